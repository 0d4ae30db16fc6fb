"""Parallel coordinates: each trial a line over its hyperparameters, coloured by its objective."""

from __future__ import annotations

import math
from typing import Any

from penstock.core import TrialStatus
from penstock.goal import metrics_of
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._history import objective_at
from penstock.report.views._style import ORANGE, Figure, escaped
from penstock.report.views._thin import spaced
from penstock.report.views._words import number

LINES = 200
_GROUPS = 5
# From the best fifth to the worst: blue fading to grey, visible on white and on near-black.
_LOOKS = (
    ("#1583cf", 2.0, 0.9),
    ("#56b4e9", 1.4, 0.6),
    ("#7f9fb5", 1.1, 0.5),
    ("#9a9fa6", 1.0, 0.4),
    ("#a9acb1", 1.0, 0.3),
)


def parallel(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """Axes with their ticks, and trials as heights in 0..1 on each; an even choice over the ranking of many."""
    options = options or Options()
    objective = objective_at(folded, options.objective)
    scored = []
    for record in folded.state.trials.values():
        value = metrics_of(record).get(objective.metric)
        if record.status is TrialStatus.FAILED or not record.known:  # the value is of what it was before
            continue
        if value is not None and math.isfinite(value):
            scored.append((-value if objective.maximize else value, record.id, record, value))
    scored.sort(key=lambda item: item[:2])
    kept = set(spaced(len(scored), options.limit or LINES))
    kept |= {i for i, item in enumerate(scored) if item[1] == options.trial}
    domains = _domains(folded)
    names = [
        name
        for name in dict.fromkeys([*domains, *(n for item in scored for n in item[2].config)])
        if any(name in item[2].config for item in scored)
    ]
    axes = [_Axis(name, domains.get(name, {}), [i[2].config.get(name) for i in scored]) for name in names]
    last = _Axis(objective.metric, {}, [item[3] for item in scored])
    lines = []
    for i in sorted(kept):
        _, trial, record, value = scored[i]
        heights = [
            axis.height(record.config[axis.name]) if axis.name in record.config else None for axis in axes
        ]
        lines.append({"trial": trial, "rank": i, "value": value, "heights": [*heights, last.height(value)]})
    cleaned: dict[str, Any] = clean(
        {
            "metric": objective.metric,
            "maximize": objective.maximize,
            "total": len(scored),
            "axes": [{"name": axis.name, "ticks": axis.ticks()} for axis in [*axes, last]] if scored else [],
            "lines": lines,
            "selected": options.trial,
        }
    )
    return cleaned


def parallel_figure(data: dict[str, Any]) -> Figure:
    """Lines in five colours from the best fifth to the worst; drawn worst first, so that the best lie on top."""
    axes = data["axes"]
    groups: list[list[dict[str, Any]]] = [[] for _ in range(_GROUPS)]
    selected = [line for line in data["lines"] if line["trial"] == data["selected"]]
    for line in data["lines"]:
        groups[min(_GROUPS - 1, _GROUPS * line["rank"] // max(1, data["total"]))].append(line)
    names = ("best fifth", "second", "middle", "fourth", "worst fifth")
    looks = [(group, *_LOOKS[at], names[at]) for at, group in reversed(list(enumerate(groups)))]
    looks.append((selected, ORANGE, 4.0, 1.0, f"trial {data['selected']}"))
    traces: list[dict[str, Any]] = []
    for lines, colour, width, opacity, name in looks:
        if not lines:
            continue
        x: list[Any] = []
        y: list[Any] = []
        trial: list[Any] = []
        for line in lines:
            x += [*range(len(axes)), None]
            y += [*line["heights"], None]
            trial += [line["trial"]] * (len(axes) + 1)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": x,
                "y": y,
                "customdata": trial,
                "opacity": opacity,
                "connectgaps": False,
                "line": {"width": width, "color": colour},
                "hovertemplate": "trial %{customdata}<extra></extra>",
            }
        )
    labels = [
        {
            "x": place,
            "y": height,
            "text": escaped(text),
            "showarrow": False,
            "xanchor": "right" if place == len(axes) - 1 else "left",
            "xshift": -4 if place == len(axes) - 1 else 4,
            "font": {"size": 11},
        }
        for place, one in enumerate(axes)
        for height, text in one["ticks"]
    ]
    return {
        "data": traces,
        "layout": {
            "xaxis": {
                "tickvals": list(range(len(axes))),
                "ticktext": [escaped(one["name"]) for one in axes],
                "range": [-0.08, max(0, len(axes) - 1) + 0.08],
                "showgrid": True,
                "zeroline": False,
                "automargin": True,
            },
            "yaxis": {"visible": False, "range": [-0.05, 1.05]},
            "annotations": labels,
            "showlegend": True,
            "hovermode": "closest",
        },
    }


class _Axis:
    """One coordinate: how values become heights, and what is written beside it."""

    def __init__(self, name: str, domain: dict[str, Any], values: list[Any]) -> None:
        self.name = name
        known = [value for value in values if value is not None]
        self._numbers = bool(known) and all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in known
        )
        if domain.get("kind") == "choice" or not self._numbers:
            self._numbers = False
            given = domain.get("values") or sorted({repr(v): v for v in known}.values(), key=repr)
            self._options = [repr(value) for value in given]
            self._words = [number(value) for value in given]
            return
        low = float(domain.get("low", min(known, default=0.0)))
        high = float(domain.get("high", max(known, default=1.0)))
        self._log = bool(domain.get("log")) and low > 0
        if not domain and low > 0 and high / low > 100:
            self._log = True
        self._low, self._high = low, high

    def height(self, value: Any) -> float | None:
        """Where a value lies, 0..1; None where it is no value of this axis."""
        if not self._numbers:
            if repr(value) not in self._options:
                return None
            return (self._options.index(repr(value)) + 0.5) / len(self._options)
        if value is None:
            return None
        if self._high <= self._low:
            return 0.5
        if self._log:
            part = math.log(float(value) / self._low) / math.log(self._high / self._low) if value > 0 else 0.0
        else:
            part = (float(value) - self._low) / (self._high - self._low)
        return min(1.0, max(0.0, part))

    def ticks(self) -> list[tuple[float, str]]:
        """Heights and words beside the axis."""
        if not self._numbers:
            at = spaced(len(self._options), 8)
            return [((i + 0.5) / len(self._options), self._words[i]) for i in at]
        if self._high <= self._low:
            return [(0.5, number(self._low))]
        heights = (0.0, 0.25, 0.5, 0.75, 1.0)
        ticks = []
        for height in heights:
            value = (
                self._low * (self._high / self._low) ** height
                if self._log
                else self._low + height * (self._high - self._low)
            )
            ticks.append((height, f"{value:.3g}"))
        return ticks


def _domains(folded: Folded) -> dict[str, dict[str, Any]]:
    space = folded.spec.get("space")
    if not isinstance(space, dict):
        return {}
    return {name: entry for name, entry in space.get("domains", []) if isinstance(entry, dict)}
