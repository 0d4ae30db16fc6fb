"""Whole studies in virtual time: ``pk.Study`` with a scheduler, a sampler, learning curves and simulated devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads import Curves, epoch_s

import penstock as pk
from penstock.core import Reported, StudyState, TrialGroup
from penstock.report import timeline
from penstock.schedule import Halving, Hyperband
from penstock.schedule._base import Outcome, Rules, Scheduler


class InTurn(Scheduler):
    """Hyperband's brackets strictly one after the other, each rung proposed as a whole: synchronous BOHB."""

    def __init__(self, epochs: int) -> None:
        self.max_epochs = self._epochs = epochs
        self._table = Hyperband(max_epochs=epochs).table

    def start(self, rules: Rules) -> None:
        self._rules = rules
        self._left = [
            Halving(max_epochs=self._epochs, min_epochs=rungs[0][1], trials=rungs[0][0])
            for rungs in self._table
        ]
        self._left[0].start(rules)
        self._open = 0

    def next(self, want: int) -> TrialGroup | None:
        group = self._left[0].next(1 << 30)  # a synchronous rung is one group
        if group is None and self._left[0].done and len(self._left) > 1 and not self._open:
            self._dropped = [*self.drops()]
            self._left.pop(0)
            self._left[0].start(self._rules)
            group = self._left[0].next(1 << 30)
        if group is not None:
            self._open += len(group.segments)
        return group

    _dropped: Sequence[int] = ()

    def ended(self, outcome: Outcome) -> None:
        self._open -= 1
        self._left[0].ended(outcome)

    def drops(self) -> Sequence[int]:
        found, self._dropped = [*self._dropped, *self._left[0].drops()], ()
        return found

    @property
    def done(self) -> bool:
        return len(self._left) == 1 and self._left[0].done

    @property
    def expected(self) -> int | None:
        return sum(size for rungs in self._table for size, _ in rungs)


ALGORITHMS: dict[str, Any] = {
    "Halving": lambda epochs: (pk.Halving(max_epochs=epochs, trials=81), pk.Random()),
    "Halving of 27": lambda epochs: (pk.Halving(max_epochs=epochs, trials=27), pk.Random()),
    "SyncBOHB": lambda epochs: (InTurn(epochs), pk.TPE()),
    "Hyperband in turn": lambda epochs: (InTurn(epochs), pk.Random()),
    "Hyperband": lambda epochs: (pk.Hyperband(max_epochs=epochs), pk.Random()),
    "ASHA": lambda epochs: (pk.ASHA(max_epochs=epochs, trials=81), pk.Random()),
    "BOHB": lambda epochs: (pk.Hyperband(max_epochs=epochs), pk.TPE()),
    "ASHA with TPE": lambda epochs: (pk.ASHA(max_epochs=epochs, trials=81, brackets=3), pk.TPE()),
}
"""Scheduler and sampler by the largest budget. BOHB as Falkner et al. run it in parallel: Hyperband's brackets, the
next one beginning when devices would be idle, with a model; synchronous BOHB with one bracket after the other."""


@dataclass(slots=True)
class Result:
    """What a study came to."""

    makespan_s: float = 0.0
    best: float = float("inf")
    busy_s: float = 0.0
    work_s: float = 0.0  # what all epochs take alone on one device each
    longest_s: float = 0.0  # the same of the trial that trained longest
    trials: int = 0
    history: list[tuple[float, float]] = field(default_factory=list)  # when a better loss was known

    def reached_s(self, target: float) -> float | None:
        return next((time_s for time_s, loss in self.history if loss <= target), None)


def run(
    algorithm: str,
    planner: Any,
    *,
    devices: int,
    truth: pk.Overhead,
    curves: Curves,
    epochs: int = 81,
    sigma: float = 0.3,
    mean_s: float = 30.0,
    variance: float = 0.0,
    seed: int = 0,
) -> Result:
    """One study. Runtimes are not known beforehand: the study learns them from the reports.

    Args:
        algorithm: Of ``ALGORITHMS``.
        planner: ``pk.Fluid(...)``, or None: first come first served, one device each.
        devices: How many simulated ones.
        truth: Overheads that really hold.
        curves: Learning curves.
        epochs: R, the largest budget of a trial.
        sigma: By how much epochs of different trials differ.
        mean_s: Of an epoch.
        variance: By how much epochs of one trial differ, relative (Fluid 6.4.1).
        seed: Of everything.
    """
    scheduler, sampler = ALGORITHMS[algorithm](epochs)

    def train(trial: pk.Run) -> None:
        trial.load()
        for epoch in trial.epochs():
            trial.save(None)
            trial.report(loss=curves.loss(trial.config, epoch + 1, epochs))

    def seconds(config: Any, epoch: int) -> float:
        row = curves.row(config)
        taken_s = epoch_s(row, mean_s=mean_s, sigma=sigma, seed=seed)
        return (
            taken_s
            if not variance
            else epoch_s(row * 1000 + epoch, mean_s=taken_s, sigma=variance, seed=seed)
        )

    study = pk.Study(
        train,
        curves.space,
        minimize="loss",
        scheduler=scheduler,
        sampler=sampler,
        executor=pk.Simulated(devices, seconds=seconds, overhead=truth),
        planner=planner,
        seed=seed,
        store=False,
        meter=False,
    ).run()
    return _result(study, seconds)


def _result(study: pk.Study, seconds: Callable[[Any, int], float]) -> Result:
    assert study._store is not None
    assert study._entry is not None
    events = [event for _, event in study._store.read(study._entry.id)]
    state = StudyState.of(events)
    state.validate()
    if state.closed is None or state.closed.reason != "finished":
        raise RuntimeError("A study was stopped before its end: its makespan says nothing.")
    told = timeline(events)
    result = Result(told.makespan_s, busy_s=told.busy_s, trials=len(study.trials))
    work_s: dict[int, float] = {}
    for event in events:
        if isinstance(event, Reported):
            taken_s = seconds(state.trials[event.trial].config, event.epoch - 1)
            work_s[event.trial] = work_s.get(event.trial, 0.0) + taken_s
        if isinstance(event, Reported) and event.metrics["loss"] < result.best:
            result.best = event.metrics["loss"]
            result.history.append((event.time_s, result.best))
    result.work_s = sum(work_s.values())
    result.longest_s = max(work_s.values(), default=0.0)
    return result
