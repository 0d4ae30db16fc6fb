"""The goal of a study: which metrics, in which direction, and how trials rank by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core import TrialRecord, TrialStatus, Values
from penstock.core.errors import InvalidInput
from penstock.goal._pareto import order as pareto_order

METERED = ("energy_j", "train_s")
"""Objectives that Penstock fills in itself: a trial's energy and training time so far."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One metric and its direction."""

    metric: str
    maximize: bool = False

    def __str__(self) -> str:
        return f"{'maximize' if self.maximize else 'minimize'} {self.metric}"


@dataclass(frozen=True, slots=True)
class Goal:
    """One or several objectives. Values are turned so that lower is better."""

    objectives: tuple[Objective, ...]

    @classmethod
    def of(cls, minimize: str | Iterable[str] | None, maximize: str | Iterable[str] | None) -> Goal:
        """The goal of a study's ``minimize=`` and ``maximize=`` arguments."""
        low, high = _names("minimize", minimize), _names("maximize", maximize)
        objectives = [Objective(name) for name in low] + [Objective(name, maximize=True) for name in high]
        if not objectives:
            raise InvalidInput('A study needs a goal: give minimize="loss" or maximize="accuracy".')
        names = [objective.metric for objective in objectives]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"The metric {name!r} is named twice among the objectives {names}.")
        return cls(tuple(objectives))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objectives' metrics that the training has to report."""
        return tuple(o.metric for o in self.objectives if o.metric not in METERED)

    def values(self, metrics: Mapping[str, float]) -> Values | None:
        """The objectives of a report, lower is better; None if one is missing or not finite."""
        found = []
        for objective in self.objectives:
            value = metrics.get(objective.metric)
            if value is None or not math.isfinite(value):
                return None
            found.append(-value if objective.maximize else value)
        return tuple(found)

    def score(self, record: TrialRecord, *, once: bool = True) -> Values | None:
        """A trial's objectives at its latest report; None if no report tells of its configuration.

        Args:
            record: The trial.
            once: Whether an epoch that was run again after a failure counts once: nobody is worse for it.
        """
        if not record.known:
            return None
        metered = any(objective.metric in METERED for objective in self.objectives)
        return self.values(metrics_of(record, once=once) if metered else record.metrics)

    @property
    def quality(self) -> int | None:
        """Which objective is the first that is not metered: quality, not cost; None: there is none."""
        return next((i for i, each in enumerate(self.objectives) if each.metric not in METERED), None)

    def order(self, values: Sequence[Values]) -> list[int]:
        """Indices from best to worst; several objectives by Pareto fronts, then crowding."""
        if len(self.objectives) == 1:
            return sorted(range(len(values)), key=values.__getitem__)
        return pareto_order(values)

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-able form."""
        return [{"metric": o.metric, "maximize": o.maximize} for o in self.objectives]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Goal:
        """The goal of its JSON-able form.

        Raises:
            InvalidInput: It is something else.
        """
        try:
            return cls(tuple(Objective(str(o["metric"]), bool(o["maximize"])) for o in data))
        except (KeyError, TypeError, IndexError) as error:
            raise InvalidInput(f"Not a goal written by to_json(): {error!r}.") from error

    def __str__(self) -> str:
        return ", ".join(map(str, self.objectives))


def metrics_of(record: TrialRecord, *, once: bool = True) -> dict[str, float]:
    """A trial's latest metrics, with what Penstock metered itself: each epoch once, or as often as it was run."""
    metrics = dict(record.metrics)
    if record.reports:
        metrics.setdefault("train_s", record.once_s if once else record.train_s)
        energy_j = record.once_j if once else None if record.energy is None else record.energy.joules
        if energy_j is not None:
            metrics.setdefault("energy_j", energy_j)
    return metrics


def ranked(goal: Goal, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The trials that have a score, best first. Failed ones and those that violate a limit don't count.

    Nor do trials that SM2 explored last, where others have trained since: the weights are thrown away, and that
    "does not contribute to the final model's performance" (SM2 4.4). Where all were explored last, those with the most
    epochs count.

    Once the full model is trained, neither do trials of its narrow twin: they only stand for it. Nor does a
    model whose configuration was overtaken on the twin after its transfer: which ones are trained, and how far, is a
    matter of time, and a study's result is not. Of several objectives quality then comes first, as in the transfer.
    """
    scored = [
        (record, goal.score(record))
        for record in records
        if record.status is not TrialStatus.FAILED and not record.violated
    ]
    pairs = [(record, values) for record, values in scored if values is not None]
    if explored := [record.epoch for record, _ in pairs if record.explored]:
        most = max(explored) if len(explored) == len(pairs) else math.inf
        pairs = [pair for pair in pairs if not pair[0].explored or pair[0].epoch == most]
    pairs = [pair for pair in pairs if pair[0].is_target] or pairs
    # A half-trained one that a better configuration has replaced is no result, however little it drew.
    whole = [pair for pair in pairs if pair[0].is_target and pair[0].status is TrialStatus.COMPLETED]
    chosen = [pair for pair in whole if not pair[0].overtaken]
    pairs = chosen or whole or pairs
    if whole:  # equals by their parents, which are proposed in order: their own numbers are a matter of time
        pairs.sort(key=lambda pair: (pair[0].parent or 0, pair[0].id))
    order = goal.order([values for _, values in pairs])
    quality = goal.quality
    if whole and quality is not None and len(goal.objectives) > 1:
        order.sort(key=lambda i: pairs[i][1][quality])
    return [pairs[i][0] for i in order]


def _names(argument: str, value: str | Iterable[str] | None) -> list[str]:
    if value is None:
        return []
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"{argument}= takes the name of a metric or a list of names, got {value!r}.")
    return names
