"""Whole studies in virtual time: a scheduler, a sampler, learning curves, and a planner on a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads import Curves, epoch_s

from penstock.core import Placement, PlanPass, Segment, Trial, TrialStatus
from penstock.predict import EpochTimes, Overhead
from penstock.sample import TPE, Random
from penstock.sample._base import Observation
from penstock.schedule import ASHA, Halving, Hyperband
from penstock.schedule._base import Outcome, Rules
from penstock.testing.planning import SimulatedCluster

EPOCHS = 27


class InTurn:
    """Hyperband's brackets strictly one after the other, as synchronous BOHB runs them."""

    def __init__(self, iterations: int = 1) -> None:
        table = Hyperband(max_epochs=EPOCHS).table
        self._halvings = [
            Halving(max_epochs=EPOCHS, min_epochs=rungs[0][1], trials=rungs[0][0])
            for _ in range(iterations)
            for rungs in table
        ]
        self._rules: Rules | None = None

    def start(self, rules: Rules) -> None:
        self._rules = rules
        self._halvings[0].start(rules)

    def next(self, want: int) -> Any:
        group = self._halvings[0].next(1 << 30)  # a synchronous rung is one group
        if group is None and self._halvings[0].done and len(self._halvings) > 1 and not self._open:
            self._halvings.pop(0)
            self._halvings[0].start(self._rules)
            group = self._halvings[0].next(1 << 30)
        if group is not None:
            self._open += len(group.segments)
        return group

    _open = 0

    def ended(self, outcome: Outcome) -> None:
        self._open -= 1
        self._halvings[0].ended(outcome)

    @property
    def done(self) -> bool:
        return len(self._halvings) == 1 and self._halvings[0].done


ALGORITHMS = {
    "Halving": lambda: (Halving(max_epochs=EPOCHS), Random()),
    "Halving of 81": lambda: (Halving(max_epochs=EPOCHS, trials=81), Random()),
    "SyncBOHB": lambda: (InTurn(), TPE()),
    "Hyperband in turn": lambda: (InTurn(), Random()),
    "Hyperband": lambda: (Hyperband(max_epochs=EPOCHS), Random()),
    "ASHA": lambda: (ASHA(max_epochs=EPOCHS, trials=81), Random()),
    "BOHB": lambda: (ASHA(max_epochs=EPOCHS, trials=81, brackets=3), TPE()),
}


@dataclass(slots=True)
class Result:
    """What a study came to."""

    makespan_s: float = 0.0
    best: float = float("inf")
    busy_s: float = 0.0
    resizes: int = 0
    trials: int = 0
    history: list[tuple[float, float]] = field(default_factory=list)  # when a better loss was known

    def reached_s(self, target: float) -> float | None:
        return next((time_s for time_s, loss in self.history if loss <= target), None)


def run(
    algorithm: str,
    planner: Sequence[PlanPass],
    *,
    devices: int,
    truth: Overhead,
    curves: Curves,
    sigma: float = 0.3,
    mean_s: float = 30.0,
    concurrency: int | None = None,
    seed: int = 0,
) -> Result:
    """One study. Runtimes are not known beforehand: the planner learns them as a study would (EpochTimes)."""
    scheduler, sampler = ALGORITHMS[algorithm]()
    sampler.start(curves.space, objectives=1, seed=seed)
    numbers = iter(range(1 << 30))
    trials: dict[int, Trial] = {}

    def propose(n: int) -> list[Trial]:
        made = []
        for config in sampler.ask(n):
            trial = trials.setdefault(number := next(numbers), Trial(number, config, 0))
            sampler.adopt(config, number)
            made.append(trial)
        return made

    rules = Rules(
        propose=propose,
        order=lambda values: sorted(range(len(values)), key=lambda i: (values[i], i)),
        space=curves.space,
        learns=type(sampler).learns,
        seed=seed,
    )
    scheduler.start(rules)
    cluster = SimulatedCluster(devices, truth=truth, planner=planner)
    times = EpochTimes()
    # ASHA's concurrency is free of the number of devices (6.2.2). A sampler that learns is asked no further ahead than
    # without Fluid: more trials in flight would mean fewer results to learn from.
    concurrency = concurrency or devices * (1 if type(sampler).learns else truth.max_sharing)
    running: dict[int, Segment] = {}
    result = Result()

    def second(trial: int) -> float:
        return epoch_s(curves.row(trials[trial].config), mean_s=mean_s, sigma=sigma, seed=seed)

    def submit() -> None:
        while True:
            want = max(0, concurrency - len(running))
            group = scheduler.next(want)
            if group is None:
                return
            placements, work, epochs = [], {}, {}
            for segment in group.segments:
                trial, count = segment.trial.id, segment.until - segment.start
                guess = times.epoch_s(trial, segment.trial.config)
                placements.append(
                    Placement(
                        (segment,),
                        expected_s=None if guess is None else guess * count,
                        expected_error=times.error(trial, segment.trial.config),
                        max_devices=truth.max_devices,
                    )
                )
                work[trial], epochs[trial] = count * second(trial), count
                running[trial] = segment
            cluster.submit(placements, work, epochs)

    submit()
    cluster.replan()
    while not cluster.idle:
        for trial in cluster.step():
            segment = running.pop(trial)
            loss = curves.loss(segment.trial.config, segment.until, EPOCHS)
            for _ in range(segment.until - segment.start):
                times.observe(trial, segment.trial.config, second(trial))
            if loss < result.best:
                result.best = loss
                result.history.append((cluster.now_s, loss))
            status = TrialStatus.COMPLETED if segment.last else TrialStatus.PAUSED
            scheduler.ended(Outcome(trial, status, segment.until, (loss,)))
            if type(sampler).learns:
                sampler.tell(Observation(trial, segment.trial.config, (loss,), segment.until, segment.last))
        submit()
        cluster.replan()
    assert not running
    assert not cluster.waiting
    result.makespan_s, result.busy_s = cluster.tally.makespan_s, cluster.tally.busy_s
    result.resizes, result.trials = cluster.tally.resizes, len(trials)
    return result
