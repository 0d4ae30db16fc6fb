"""Learning curves: of hundreds of trials in a few traces, thinned on the server so that no peak gets lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import TrialRecord, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.goal import ranked
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._history import objective_at
from penstock.report.views._style import BLUE, GREY, ORANGE, RED, Figure, axis, figure, log_or_linear
from penstock.report.views._thin import spaced, thinned

CURVES = 200
BEST = 5
POINTS = 6_000


def curves(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """The curves of a metric over epochs: all trials, or an even choice over their ranking, the best always.

    Options: ``metric``, ``trial`` (always shown), ``limit`` (how many curves).
    """
    options = options or Options()
    metric = options.metric or objective_at(folded, options.objective).metric
    names = metric_names(folded)
    if names and metric not in names:
        if options.metric:
            raise InvalidInput(f"No trial reports {metric!r}; there are {', '.join(names)}.")
        metric = names[0]  # an objective that Penstock meters, which has no curve
    with_curve = [
        record
        for record in folded.state.trials.values()
        if any(metric in report.metrics for report in record.reports[:1] + record.reports[-1:])
    ]
    best_first = list(ranked(folded.goal, with_curve))
    known = {record.id for record in best_first}
    best_first += [record for record in with_curve if record.id not in known]  # failed, or no objective yet
    limit = options.limit or CURVES
    place = set(range(min(BEST, limit, len(best_first))))
    place |= set(spaced(len(best_first), limit - len(place)))
    place |= {i for i, record in enumerate(best_first) if record.id == options.trial}
    shown = [(i, best_first[i]) for i in sorted(place)]
    each = max(20, POINTS // max(1, len(shown)))
    lines = []
    for rank, record in shown:
        epochs, values = curve(record, metric)
        at = thinned(values, each)
        lines.append(
            {
                "trial": record.id,
                "rank": rank,
                "status": record.status.value,
                "epoch": [epochs[i] for i in at],
                "value": [values[i] for i in at],
            }
        )
    cleaned: dict[str, Any] = clean(
        {
            "metric": metric,
            "metrics": names,
            "total": len(with_curve),
            "curves": lines,
            "selected": options.trial,
        }
    )
    return cleaned


def curve(record: TrialRecord, metric: str) -> tuple[list[int], list[float | None]]:
    """A trial's epochs and the metric's values there."""
    reports = [report for report in record.reports if metric in report.metrics]
    return [report.epoch for report in reports], [_finite(report.metrics[metric]) for report in reports]


def metric_names(folded: Folded) -> list[str]:
    """The metrics that trials report, the objectives first."""
    names: dict[str, None] = {}
    for record in folded.state.trials.values():
        for report in record.reports[:1] + record.reports[-1:]:
            names.update(dict.fromkeys(report.metrics))
    first = [o.metric for o in folded.goal.objectives if o.metric in names]
    return first + sorted(name for name in names if name not in first)


def curves_figure(data: Mapping[str, Any]) -> Figure:
    """All curves as grey lines, the five best in colour, the selected one on top."""
    groups: dict[str, list[Any]] = {"others": [], "failed": [], f"best {BEST}": [], "selected": []}
    for line in data["curves"]:
        if line["trial"] == data["selected"]:
            groups["selected"].append(line)
        elif line["status"] == TrialStatus.FAILED.value:
            groups["failed"].append(line)
        else:
            groups[f"best {BEST}" if line["rank"] < BEST else "others"].append(line)
    looks = {"others": (GREY, 1, 0.45), "failed": (RED, 1, 0.6), f"best {BEST}": (BLUE, 2, 0.95)}
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for name, lines in groups.items():
        colour, width, opacity = looks.get(name, (ORANGE, 3.5, 1.0))
        values += [value for line in lines for value in line["value"] if value is not None]
        # A line through one point can't be seen: most trials of a scheduler that stops early have no more.
        points = [line for line in lines if len(line["epoch"]) == 1]
        for mode, part in (
            ("lines", [line for line in lines if len(line["epoch"]) > 1]),
            ("markers", points),
        ):
            if not part:
                continue
            x: list[Any] = []
            y: list[Any] = []
            trial: list[Any] = []
            for line in part:  # one trace with gaps: hundreds of traces would be slow and a wall of legend
                x += [*line["epoch"], None]
                y += [*line["value"], None]
                trial += [line["trial"]] * (len(line["epoch"]) + 1)
            traces.append(
                {
                    "type": "scatter",
                    "mode": mode,
                    "name": f"trial {data['selected']}" if name == "selected" else name,
                    "legendgroup": name,
                    "showlegend": mode == "lines" or len(points) == len(lines),
                    "x": x,
                    "y": y,
                    "customdata": trial,
                    "opacity": opacity,
                    "connectgaps": False,
                    "line": {"width": width, "color": colour},
                    "marker": {"size": 6, "color": colour},
                    "hovertemplate": "trial %{customdata}, epoch %{x}: %{y:.4g}<extra></extra>",
                }
            )
    return figure(traces, axis("epoch", tickformat="d"), axis(data["metric"], **log_or_linear(values)))


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
