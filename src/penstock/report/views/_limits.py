"""The constraint map: predicted and measured power, memory and the like against the study's limits (HyperPower)."""

from __future__ import annotations

import math
from typing import Any

from penstock.core import TrialRecord
from penstock.core.state import VIOLATED
from penstock.goal import metrics_of
from penstock.report._read import limits_of, limits_text
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._style import BLUE, ORANGE, RED, Figure, axis, figure
from penstock.report.views._thin import scattered

POINTS = 400
"""So many marks at most."""
TOPIC = "prediction"
"""Notes of a trial with its predicted quantities: ``{"power_w": 85.0}`` or ``{"power_w": [85.0, 2.5]}`` with the
standard deviation."""


def limits(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """Of every trial the predicted and the measured value of each limited quantity, and whether it keeps the limit."""
    options = options or Options()
    found = limits_of(folded.spec)
    predicted = predictions(folded)
    quantities = []
    for limit in found:
        rows = []
        for record in folded.state.trials.values():
            mean, std = predicted.get(record.id, {}).get(limit.name, (None, None))
            measured = measured_of(record, limit.name)
            if mean is None and measured is None:
                continue
            value = measured if measured is not None else mean
            rows.append(
                {
                    "trial": record.id,
                    "predicted": mean,
                    "std": std,
                    "measured": measured,
                    "holds": value is not None and not math.isnan(value) and limit.holds(value),
                }
            )
        quantities.append(
            {
                "quantity": limit.name,
                "unit": limit.quantity.unit,
                "bound": limit.bound,
                "at_most": limit.at_most,
                "text": str(limit),
                "rows": rows,
                "violations": sum(not row["holds"] for row in rows),
                "measured": sum(row["measured"] is not None for row in rows),
            }
        )
    text = limits_text(folded.spec, folded.state)
    cleaned: dict[str, Any] = clean({"limits": quantities, "text": text, "selected": options.trial})
    return cleaned


def limits_figure(data: dict[str, Any]) -> Figure:
    """Two limits: a map with one on each axis and the allowed corner; otherwise the first one over the trials."""
    given = [each for each in data["limits"] if each["rows"]]
    if not given:
        return figure([], axis(""), axis(""))
    first, second = given[0], given[1] if len(given) > 1 else None
    per_first, per_second = _scale(first)[0], 1.0 if second is None else _scale(second)[0]
    if second is not None:
        others = {row["trial"]: row for row in second["rows"]}
        pairs = [(row, others[row["trial"]]) for row in first["rows"] if row["trial"] in others]
        points = [
            (_value(a, per_first), _value(b, per_second), a["trial"], a["holds"] and b["holds"], a, b)
            for a, b in pairs
        ]
    else:
        points = [
            (row["trial"], _value(row, per_first), row["trial"], row["holds"], row, None)
            for row in first["rows"]
        ]
    shown = _few(points, data["selected"])
    traces: list[dict[str, Any]] = []
    kinds = (
        (True, "circle", "keeps the limits"),
        (True, "circle-open", "keeps them, predicted"),
        (False, "circle", "violates one"),
        (False, "circle-open", "violates one, predicted"),
    )
    for holds, symbol, name in kinds:
        kept = [point for point in shown if point[3] is holds and _symbol(point[4], point[5]) == symbol]
        if kept:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [point[0] for point in kept],
                    "y": [point[1] for point in kept],
                    "customdata": [point[2] for point in kept],
                    "marker": {
                        "size": 8,
                        "opacity": 0.75,
                        "color": BLUE if holds else RED,
                        "symbol": symbol,
                    },
                    "hovertemplate": "trial %{customdata}: %{x:.4g}, %{y:.4g}<extra></extra>",
                }
            )
    shapes = [_line("y" if second is None else "x", first["bound"] / per_first)]
    if second is not None:
        shapes.append(_line("y", second["bound"] / per_second))
    x = axis("trial") if second is None else axis(_title(first))
    y = axis(_title(first if second is None else second))
    return figure(traces, x, y, shapes=shapes)


def _few(points: list[Any], selected: int | None) -> list[Any]:
    """At most so many marks as a browser draws quickly; what keeps the limits never hides what doesn't."""
    kept = set(scattered([(p[0], p[1], (p[3], _symbol(p[4], p[5]))) for p in points], POINTS))
    return [point for i, point in enumerate(points) if i in kept or point[2] == selected]


def measured_of(record: TrialRecord, name: str) -> float | None:
    """What was measured of a trial: its latest metric of that name; of ``epoch_s`` and ``epoch_j``, the mean."""
    found = metrics_of(record).get(name)
    if found is None and name == "epoch_s":
        found = record.per_epoch(lambda report: report.train_s)
    if found is None and name == "epoch_j":
        found = record.per_epoch(lambda report: None if report.energy is None else report.energy.joules)
    return found


def predictions(folded: Folded) -> dict[int, dict[str, tuple[float, float | None]]]:
    """By trial, what was predicted of it before it began: mean and standard deviation."""
    found: dict[int, dict[str, tuple[float, float | None]]] = {}
    for note in folded.state.notes:
        if note.trial is None:
            continue
        if note.topic == VIOLATED and isinstance(note.data.get("predicted"), int | float):
            told = found.setdefault(note.trial, {})
            told.setdefault(str(note.data["quantity"]), (float(note.data["predicted"]), None))
        if note.topic != TOPIC:
            continue
        for name, value in note.data.items():
            pair = value if isinstance(value, list | tuple) else [value, None]
            if pair and isinstance(pair[0], int | float):
                found.setdefault(note.trial, {})[name] = (
                    float(pair[0]),
                    float(pair[1]) if len(pair) > 1 and isinstance(pair[1], int | float) else None,
                )
    return found


def _value(row: dict[str, Any], scale: float) -> float | None:
    value: float | None = row["measured"] if row["measured"] is not None else row["predicted"]
    return None if value is None else value / scale


def _symbol(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    """A ring where anything that is shown is only predicted."""
    measured = row["measured"] is not None and (other is None or other["measured"] is not None)
    return "circle" if measured else "circle-open"


def _title(limit: dict[str, Any]) -> str:
    name = str(limit["quantity"])
    unit = _scale(limit)[1]
    for ending in (f"_{limit['unit']}", f"_{str(limit['unit']).lower()}"):
        name = name.removesuffix(ending)
    return f"{name.replace('_', ' ')}, {unit}" if unit else name


def _scale(limit: dict[str, Any]) -> tuple[float, str]:
    """By what a quantity is divided to be drawn, and the unit then: nobody reads 2,000,000,000 bytes."""
    if limit["unit"] != "bytes":
        return 1.0, str(limit["unit"] or "")
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(limit["bound"]) >= size:
            return size, unit
    return 1.0, "bytes"


def _line(direction: str, at: float) -> dict[str, Any]:
    ends = {"x0": 0, "x1": 1, "y0": at, "y1": at, "xref": "paper", "yref": "y"}
    if direction == "x":
        ends = {"x0": at, "x1": at, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", **ends, "line": {"color": ORANGE, "width": 2, "dash": "dash"}}
