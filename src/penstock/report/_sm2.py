"""The report of an SM2 study: per round what decided (SM2 Fig. 2), and what it cost in trainings (Table 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.core import StudyState
from penstock.core.errors import InvalidInput, MissingDependency
from penstock.goal import Goal
from penstock.report._format import short
from penstock.schedule._sm2 import Comparison, Round, SM2Report, compare, report


class Told(Protocol):
    """A ``Study``, or a ``Journal`` of one."""

    @property
    def goal(self) -> Goal:
        """What it is after."""

    @property
    def state(self) -> StudyState:
        """The fold over its events."""


def sm2_report(study: Told, *, alpha: float | None = None, beta: float | None = None) -> SM2Report:
    """Per round the attributes and the score of every configuration, and what went into which part.

    Args:
        study: A ``Study`` that ran with ``pk.SM2``, or ``read_journal(store)`` of one.
        alpha: Score with this weight instead of the study's; which configurations were kept stays as it was.
        beta: Likewise.

    Raises:
        InvalidInput: The study has another scheduler.
    """
    parameters = sm2_parameters(_spec(study))
    if parameters is None:
        raise InvalidInput("This study has another scheduler than SM2; there are no rounds to report.")
    objective = study.goal.objectives[0]
    return report(
        study.state,
        objective.metric,
        maximize=objective.maximize,
        alpha=float(parameters["alpha"]) if alpha is None else alpha,
        beta=float(parameters["beta"]) if beta is None else beta,
    )


def sm2_comparison(study: Told, *, alpha_1: Told, vanilla: Told) -> Comparison:
    """Table 1 of the paper from three studies of one task: what SM2 saves, and its parity.

    Args:
        study: With ``pk.SM2``.
        alpha_1: The same with ``alpha=1``.
        vanilla: One training without SM2, e.g. ``pk.Full(trials=1)``.

    Raises:
        InvalidInput: One of them was not metered.
    """
    found = []
    for name, told in (("alpha_1", alpha_1), ("study", study), ("vanilla", vanilla)):
        if told.state.energy is None:
            raise InvalidInput(f"The energy of {name} is not known: it ran without a meter.")
        found.append(told.state.energy.joules)
    return compare(*found)


def sm2_parameters(spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """SM2's parameters out of a study's spec; None for another scheduler."""
    scheduler = spec.get("scheduler")
    return scheduler if isinstance(scheduler, Mapping) and scheduler.get("name") == "SM2" else None


def sm2_text(told: SM2Report) -> str:
    """The report as lines for a terminal; rounds of the last configuration alone are one line each."""
    lines = [
        f"SM2, alpha {told.alpha:g}, beta {told.beta:g}; parts of the score are rescaled to 0..1, 1 is best"
    ]
    heads = ("round", "batch", told.metric, "J/epoch", "lr", "P", "E", "LR", "score", "")
    rows = [heads, *(row for round_ in told.rounds for row in _rows(round_, told.maximize))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines += [
        "  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if told.energy is not None:
        part = 0.0 if told.explored is None else told.explored.joules / told.energy.joules
        rest = (
            ""
            if told.outside is None
            else f", {told.outside.joules / told.energy.joules:.0%} outside of epochs"
        )
        lines.append(f"  energy  {told.energy}, {part:.0%} of it for explorations{rest}")
    if told.parity is not None:
        lines.append(f"  parity  {told.parity:.2f} trainings of trial {told.winner} alone ({told.training})")
    return "\n".join(lines)


def _rows(round_: Round, maximize: bool) -> list[tuple[str, ...]]:
    rows = []
    for c in round_.configurations:
        value = None if c.value is None else (-c.value if maximize else c.value)
        total = "failed" if math.isinf(c.score.total) else f"{c.score.total:.3f}"
        parts = (
            "-" if part is None else f"{part:.2f}"
            for part in (c.score.performance, c.score.energy, c.score.lr)
        )
        cells = (_cell(c.batch_size), _cell(value), _cell(c.energy_j), _cell(c.lr))
        rows.append((str(round_.number), *cells, *parts, total, "kept" if c.kept else ""))
    return rows


def _cell(value: Any) -> str:
    return "-" if value is None else short(value)


def sm2_plot(told: SM2Report) -> Any:
    """Draw performance, energy and learning rate over the epochs (SM2 Fig. 2); returns the matplotlib figure.

    Dotted lines mark the exploratory epochs of the last configuration.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependency('Plots need matplotlib: pip install "matplotlib>=3.8".') from error
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    sizes = {c.trial: c.batch_size for round_ in told.rounds for c in round_.configurations}
    for trial, epochs in told.epochs.items():
        for ax, name in zip(axes, ("value", "energy_j", "lr"), strict=True):
            # An exploratory epoch draws the energy of a part of an epoch: no point of that curve.
            points = [
                (e.epoch, getattr(e, name))
                for e in epochs
                if getattr(e, name) is not None and not (name == "energy_j" and e.explored)
            ]
            if points:
                ax.plot(*zip(*points, strict=True), marker=".", label=f"batch {sizes.get(trial, '?')}")
    for epoch in told.epochs.get(told.winner, ()) if told.winner is not None else ():
        for ax in axes if epoch.explored else ():
            ax.axvline(epoch.epoch, color="grey", linestyle=":", linewidth=0.8)
    for ax, label in zip(axes, (told.metric, "energy per epoch, J", "learning rate"), strict=True):
        ax.set_xlabel("epoch")
        ax.set_ylabel(label)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize="small")
    return figure


def _spec(study: Any) -> Mapping[str, Any]:
    """The spec of a Study (a method) or of a Journal (its entry's)."""
    entry = getattr(study, "entry", None)
    found: Mapping[str, Any] = entry.spec if entry is not None else study.spec()
    return found
