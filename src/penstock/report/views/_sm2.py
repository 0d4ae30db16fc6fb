"""SM2's rounds: what every configuration was worth, who was kept, and what the explorations cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from penstock.report._sm2 import sm2_parameters
from penstock.report.views._fold import Folded, clean
from penstock.report.views._overview import figure_of
from penstock.report.views._style import BLUE, GREY, Figure, axis
from penstock.schedule._sm2 import report


def sm2(folded: Folded) -> dict[str, Any] | None:
    """The rounds of an SM2 study; None for another scheduler."""
    parameters = sm2_parameters(folded.spec)
    if parameters is None:
        return None
    objective = folded.goal.objectives[0]
    told = report(
        folded.state,
        objective.metric,
        maximize=objective.maximize,
        alpha=float(parameters["alpha"]),
        beta=float(parameters["beta"]),
    )
    rounds: list[dict[str, Any]] = []
    for each in told.rounds:
        rows = []
        for one in each.configurations:
            value = one.value if one.value is None or not objective.maximize else -one.value
            rows.append(
                {
                    "trial": one.trial,
                    "batch_size": one.batch_size,
                    "value": value,
                    "energy_j": one.energy_j,
                    "lr": one.lr,
                    "performance": one.score.performance,
                    "energy": one.score.energy,
                    "stability": one.score.lr,
                    "score": None if math.isinf(one.score.total) else one.score.total,
                    "kept": one.kept,
                }
            )
        rounds.append({"number": each.number, "rows": rows})
    sizes = {row["trial"]: row["batch_size"] for each in rounds for row in each["rows"]}
    cleaned: dict[str, Any] = clean(
        {
            "metric": told.metric,
            "alpha": told.alpha,
            "beta": told.beta,
            "rounds": rounds,
            "winner": told.winner,
            "energy": figure_of(told.energy),
            "explored": figure_of(told.explored),
            "parity": told.parity,
            "epochs": [
                {
                    "trial": trial,
                    "batch_size": sizes.get(trial),
                    "points": [dataclasses.asdict(epoch) for epoch in epochs],
                }
                for trial, epochs in told.epochs.items()
            ],
        }
    )
    return cleaned


def sm2_figure(data: dict[str, Any]) -> Figure:
    """The score of each batch size, round by round (rounds of the last configuration alone are left out)."""
    contested = [each for each in data["rounds"] if len(each["rows"]) > 1] or data["rounds"]
    traces: list[dict[str, Any]] = []
    for kept in (True, False):
        x: list[Any] = [[], []]
        y: list[Any] = []
        trial: list[Any] = []
        for each in contested:
            for row in each["rows"]:
                if row["kept"] is kept:
                    x[0].append(f"round {each['number']}")
                    x[1].append(f"batch {row['batch_size']}")
                    y.append(row["score"])
                    trial.append(row["trial"])
        if y:
            traces.append(
                {
                    "type": "bar",
                    "name": "kept" if kept else "dropped",
                    "x": x,
                    "y": y,
                    "customdata": trial,
                    "hovertemplate": "%{x}: score %{y:.3f}, trial %{customdata}<extra></extra>",
                    "marker": {"color": BLUE if kept else GREY},
                }
            )
    return {
        "data": traces,
        "layout": {
            "xaxis": axis("", type="multicategory"),
            "yaxis": axis("score (Eq. 2), 1 is best", rangemode="tozero"),
            "showlegend": True,
            "hovermode": "closest",
            "barmode": "overlay",
        },
    }
