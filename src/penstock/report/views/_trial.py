"""A trial's page: its configuration, curves, energy, where it ran, and its error."""

from __future__ import annotations

from typing import Any

from penstock.core.errors import InvalidInput
from penstock.goal import metrics_of, ranked
from penstock.report._read import limits_of
from penstock.report.views._curves import curve
from penstock.report.views._fold import Folded, clean
from penstock.report.views._limits import measured_of, predictions
from penstock.report.views._overview import figure_of
from penstock.report.views._style import BLUE, Figure, axis, figure, log_or_linear
from penstock.report.views._thin import thinned

POINTS = 1_000


def trial(folded: Folded, number: int) -> dict[str, Any]:
    """Everything known of a trial.

    Raises:
        InvalidInput: There is no such trial.
    """
    record = folded.state.trials.get(number)
    if record is None:
        total = folded.state.counts.total
        raise InvalidInput(f"There is no trial {number}; the study has {total}, counted from 0.")
    best_first = ranked(folded.goal, folded.state.trials.values())
    rank = next((i for i, other in enumerate(best_first) if other.id == number), None)
    first_s = folded.state.first_s or 0.0
    curves: dict[str, Any] = {}
    for name in dict.fromkeys(name for report in record.reports for name in report.metrics):
        epochs, values = curve(record, name)
        at = thinned(values, POINTS)
        curves[name] = {"epoch": [epochs[i] for i in at], "value": [values[i] for i in at]}
    joules = [(r.epoch, r.energy.joules / epochs) for r, epochs in record.spans() if r.energy is not None]
    if joules:
        at = thinned([value for _, value in joules], POINTS)
        curves["energy_j"] = {"epoch": [joules[i][0] for i in at], "value": [joules[i][1] for i in at]}
    predicted = predictions(folded).get(number, {})
    cleaned: dict[str, Any] = clean(
        {
            "trial": record.id,
            "status": record.status.value,
            "epochs": record.trained,
            "until": record.segment.until,
            "rank": rank,
            "ranked": len(best_first),
            "seed": record.seed,
            "parent": record.parent,
            "config": dict(record.config),
            "metrics": metrics_of(record),
            "objectives": [o.metric for o in folded.goal.objectives],
            "energy": figure_of(record.energy),
            "train_s": record.train_s,
            "busy_s": record.busy_s,
            "reason": record.reason,
            "error": record.error,
            "retries": record.retries,
            "created_s": record.created_s - first_s,
            "started_s": None if record.started_s is None else record.started_s - first_s,
            "ended_s": None if record.ended_s is None else record.ended_s - first_s,
            "checkpoints": len(record.saved),
            "curves": curves,
            "spans": [
                {
                    "begin_s": span.start_s - first_s,
                    "end_s": None if span.end_s is None else span.end_s - first_s,
                    "devices": [[share.device, share.fraction] for share in span.shares],
                    "fused": [other for other in span.fused if other != number],
                    "attempt": span.attempt,
                    "status": span.status,
                }
                for span in folded.spans
                if span.trial == number
            ],
            "limits": [
                {
                    "text": str(limit),
                    "predicted": predicted.get(limit.name, (None, None))[0],
                    "measured": measured_of(record, limit.name),
                }
                for limit in limits_of(folded.spec)
            ],
        }
    )
    return cleaned


def trial_figures(data: dict[str, Any]) -> list[Figure]:
    """One small figure per metric, the objectives first."""
    names = sorted(data["curves"], key=lambda name: (name not in data["objectives"], name))
    figures = []
    for name in names:
        line = data["curves"][name]
        if len(line["epoch"]) < 2:
            continue  # one point is no curve: the page has it as a number
        values = [value for value in line["value"] if value is not None]
        title = "energy per epoch, J" if name == "energy_j" else name
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if len(line["epoch"]) < 60 else "lines",
            "name": "",
            "x": line["epoch"],
            "y": line["value"],
            "line": {"color": BLUE, "width": 2},
            "hovertemplate": "epoch %{x}: %{y:.5g}<extra></extra>",
        }
        figures.append(figure([trace], axis("epoch", tickformat="d"), axis(title, **log_or_linear(values))))
    return figures
