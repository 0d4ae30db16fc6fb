"""The history: every trial's objective where it stood last, and the best report so far."""

from __future__ import annotations

from typing import Any

from penstock.core import TrialRecord
from penstock.core.errors import InvalidInput
from penstock.goal import Objective, metrics_of
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._style import BLUE, STATUS, Figure, axis, escaped, figure, log_or_linear
from penstock.report.views._thin import scattered
from penstock.report.views._words import brief, energy_scale, number, time_scale

POINTS = 400
"""So many marks at most: what a browser draws within a frame or two."""
AXES = {
    "time": "{unit} since the start",
    "trial": "trial",
    "epochs": "epochs of all trials",
    "energy": "energy of all trials, {unit}",
}


def history(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """Points of trials and steps of the best so far; ``x`` is time, trial, epochs or energy.

    The best so far is the best *report*: a trial that got worse later still set it. One that was measured to violate
    a limit never did.
    """
    options = options or Options()
    objective = objective_at(folded, options.objective)
    if options.x not in AXES:
        raise InvalidInput(f"x takes one of {', '.join(AXES)}, got {options.x!r}.")
    state = folded.state
    first_s = state.first_s or 0.0
    per_s, time_unit = time_scale(state.last_s - first_s)
    per_j, energy_unit = energy_scale(0.0 if state.energy is None else state.energy.joules)
    points = []
    for record in state.trials.values():
        last = folded.last.get(record.id)
        value = metrics_of(record).get(objective.metric)
        if last is None or value is None:
            continue
        places = {
            "time": (last.time_s - first_s) / per_s,
            "trial": record.id,
            "epochs": last.epochs,
            "energy": last.energy_j / per_j,
        }
        points.append((places[options.x], value, record.id, record.status.value, record))
    points.sort(key=lambda point: point[0])
    best = []
    for step in folded.best_so_far(folded.goal.objectives.index(objective)):
        places = {
            "time": (step.time_s - first_s) / per_s,
            "trial": step.trial,
            "epochs": step.epochs,
            "energy": step.energy_j / per_j,
        }
        best.append((places[options.x], step.value, step.trial))
    if options.x == "trial":  # by trial number, the best so far is that of trials up to it
        best = _by_trial(points, objective)
    end = max([point[0] for point in points] + [step[0] for step in best], default=0.0)
    kept = set(scattered([(point[0], point[1], point[3]) for point in points], POINTS))
    setters = {step[2] for step in best}  # who set a best is always shown
    kept |= {i for i, point in enumerate(points) if point[2] in setters}
    if options.trial is not None:
        kept |= {i for i, point in enumerate(points) if point[2] == options.trial}
    shown = [points[i] for i in sorted(kept)]
    result: dict[str, Any] = clean(
        {
            "metric": objective.metric,
            "maximize": objective.maximize,
            "x": options.x,
            "x_title": AXES[options.x].format(unit=time_unit if options.x == "time" else energy_unit),
            "total": len(points),
            "shown": len(shown),
            "points": {
                "x": [point[0] for point in shown],
                "y": [point[1] for point in shown],
                "trial": [point[2] for point in shown],
                "status": [point[3] for point in shown],
                "text": [_told(point[4], objective.metric, point[1]) for point in shown],
            },
            "best": {
                "x": [step[0] for step in best] + ([end] if best else []),
                "y": [step[1] for step in best] + ([best[-1][1]] if best else []),
                "trial": [step[2] for step in best] + ([best[-1][2]] if best else []),
            },
        }
    )
    return result


def history_figure(data: dict[str, Any]) -> Figure:
    """The history as a figure; trials coloured by their status."""
    points = data["points"]
    traces: list[dict[str, Any]] = []
    for status, colour in STATUS.items():
        at = [i for i, each in enumerate(points["status"]) if each == status and points["y"][i] is not None]
        if at:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": status,
                    "x": [points["x"][i] for i in at],
                    "y": [points["y"][i] for i in at],
                    "customdata": [points["trial"][i] for i in at],
                    "text": [points["text"][i] for i in at],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"size": 7, "opacity": 0.7, "color": colour},
                }
            )
    if data["best"]["x"]:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best so far",
                "x": data["best"]["x"],
                "y": data["best"]["y"],
                "customdata": data["best"]["trial"],
                "hovertemplate": "best so far %{y:.4g}, trial %{customdata}<extra></extra>",
                "line": {"shape": "hv", "width": 2.5, "color": BLUE},
            }
        )
    values = [v for v in points["y"] + data["best"]["y"] if v is not None]
    return figure(traces, axis(data["x_title"]), axis(data["metric"], **log_or_linear(values)))


def objective_at(folded: Folded, place: int | None) -> Objective:
    """One of the study's objectives; None: quality, where the goal has energy or time besides.

    Raises:
        InvalidInput: There is none at that place.
    """
    objectives = folded.goal.objectives
    if place is None:
        return objectives[folded.goal.quality or 0]
    if isinstance(place, bool) or not isinstance(place, int):
        raise InvalidInput(f"objective takes a place in the goal, counted from 0, got {place!r}.")
    if not 0 <= place < len(objectives):
        raise InvalidInput(f"The study has {len(objectives)} objectives, counted from 0; got {place}.")
    return objectives[place]


def _told(record: TrialRecord, metric: str, value: float) -> str:
    first = f"trial {record.id}, {record.epoch} epochs: {escaped(metric)} {number(value)}"
    return f"{first}<br>{escaped(brief(record.config))}"


def _by_trial(points: list[tuple[Any, ...]], objective: Objective) -> list[tuple[float, float, int]]:
    best: list[tuple[float, float, int]] = []
    for x, value, trial, status, record in points:
        if status == "failed" or value != value or record.violated:
            continue
        if not best or (value > best[-1][1] if objective.maximize else value < best[-1][1]):
            best.append((x, value, trial))
    return best
