"""Quality, energy and time: which trials no other trial beats in all of them."""

from __future__ import annotations

import math
from typing import Any

from penstock.core import TrialStatus
from penstock.goal import METERED, front, metrics_of, ranked
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._history import objective_at
from penstock.report.views._style import BLUE, GREY, SCALE, Figure, axis, escaped, figure, log_or_linear
from penstock.report.views._thin import scattered
from penstock.report.views._words import brief, duration, energy, energy_scale, number, time_scale

POINTS = 400
"""So many marks at most, beside those of the front."""


def pareto(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """Every trial's objectives, energy and training time, and the front over all that are known.

    Failed trials don't count, nor those that lack one of the figures; those that violate a limit are not on the front.
    Where nothing was metered, energy is left out.
    Once a full model is trained, the front is one of models: its narrow twins would beat it in energy and time.
    """
    options = options or Options()
    chosen = objective_at(folded, options.objective)
    metered = any(record.energy is not None for record in folded.state.trials.values())
    axes: dict[str, bool] = {o.metric: o.maximize for o in folded.goal.objectives}
    axes.setdefault("train_s", False)
    if metered:
        axes.setdefault("energy_j", False)
    points = []
    for record in folded.state.trials.values():
        metrics = metrics_of(record)
        values = [metrics.get(name) for name in axes]
        if record.status is TrialStatus.FAILED or not record.known:
            continue
        if any(v is None or not math.isfinite(v) for v in values):
            continue
        points.append((record, [float(v) for v in values if v is not None]))
    signs = [-1.0 if maximize else 1.0 for maximize in axes.values()]
    places = [i for i, (record, _) in enumerate(points) if not record.violated]
    results = {each.id for each in ranked(folded.goal, folded.state.trials.values()) if each.is_target}
    if results:
        places = [i for i in places if points[i][0].id in results]
    turned = [tuple(s * v for s, v in zip(signs, points[i][1], strict=True)) for i in places]
    best = {places[k] for k in front(turned)}
    others = [i for i in range(len(points)) if i not in best]
    names = list(axes)
    x, y = (names.index(name) for name in _drawn(names, chosen.metric, metered))
    kept = best | {
        others[i] for i in scattered([(points[j][1][x], points[j][1][y], "") for j in others], POINTS)
    }
    kept |= {i for i, point in enumerate(points) if point[0].id == options.trial}
    cleaned: dict[str, Any] = clean(
        {
            "axes": names,
            "maximize": list(axes.values()),
            "quality": chosen.metric,
            "metered": metered,
            "who": "trained model" if results else "trial",
            "total": len(points),
            "shown": len(kept),
            "front": sorted(points[i][0].id for i in best),
            "points": [
                {
                    "trial": points[i][0].id,
                    "values": dict(zip(names, points[i][1], strict=True)),
                    "front": i in best,
                    "text": escaped(brief(points[i][0].config)),
                }
                for i in sorted(kept)
            ],
        }
    )
    return cleaned


def pareto_figure(data: dict[str, Any]) -> Figure:
    """Quality over energy (over time where nothing was metered), the front in colour by time."""
    cost, quality = _drawn(data["axes"], data["quality"], data["metered"])
    other = "train_s" if cost == "energy_j" else None
    most = {
        name: max((p["values"].get(name) or 0.0 for p in data["points"]), default=0.0) for name in METERED
    }
    scale, unit = energy_scale(most["energy_j"]) if cost == "energy_j" else time_scale(most["train_s"])
    per_s, time_unit = time_scale(most["train_s"])
    traces: list[dict[str, Any]] = []
    for on_front in (False, True):
        points = [p for p in data["points"] if p["front"] is on_front]
        if not points:
            continue
        if on_front:  # with three axes and noise it may be long
            points = [
                points[i]
                for i in scattered([(p["values"][cost], p["values"][quality], "") for p in points], POINTS)
            ]
        marker: dict[str, Any] = {"size": 10 if on_front else 6, "color": BLUE if on_front else GREY}
        if not on_front:
            marker["opacity"] = 0.5
        elif other is not None:
            marker |= {
                "color": [p["values"][other] / per_s for p in points],
                "colorscale": [[i / (len(SCALE) - 1), c] for i, c in enumerate(SCALE)],
                "showscale": True,
                "colorbar": {"title": {"text": f"time, {time_unit}"}, "thickness": 12},
            }
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "front" if on_front else "other trials",
                "x": [p["values"][cost] / scale for p in points],
                "y": [p["values"][quality] for p in points],
                "customdata": [p["trial"] for p in points],
                "text": [_told(p, quality) for p in points],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": marker,
            }
        )
    xs = [x for trace in traces for x in trace["x"]]
    ys = [y for trace in traces for y in trace["y"]]
    title = f"energy of the trial, {unit}" if cost == "energy_j" else f"training time of the trial, {unit}"
    return figure(
        traces,
        axis(title, **log_or_linear(xs)),
        axis(quality, **log_or_linear(ys)),
        legend={"orientation": "h", "y": 1.08},
    )


def _drawn(axes: list[str], quality: str, metered: bool) -> tuple[str, str]:
    """What lies on the horizontal and on the vertical axis."""
    cost = "energy_j" if metered and quality != "energy_j" else "train_s"
    return cost, quality if quality != cost else axes[0]


def _told(point: dict[str, Any], quality: str) -> str:
    values = point["values"]
    parts = [f"trial {point['trial']}: {escaped(quality)} {number(values[quality])}"]
    if "energy_j" in values:
        parts.append(energy(values["energy_j"]))
    if "train_s" in values:
        parts.append(duration(values["train_s"]))
    return f"{', '.join(parts)}<br>{point['text']}"
