"""An energy budget as an allowance: who may begin another epoch, so that the total ends within one of the limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from penstock.core import Ended, Free, Reported, Segment, StudyState, TrialRecord, TrialStatus
from penstock.energy import Grid
from penstock.goal import Budget

_DEARER = 4.0
"""An epoch of a trial that has not reported yet may cost so many times the dearest one seen."""


def allowed_j(budget: Budget, grid: Grid, price_per_kwh: float | None) -> float:
    """The tightest of a budget's limits in Wh, CO2e and money, in joules."""
    per_kwh = (
        (budget.energy_wh, 1000.0),
        (budget.co2_g, grid.g_per_kwh),
        (budget.cost, price_per_kwh),
    )
    limits = [limit / each * 3.6e6 for limit, each in per_kwh if limit is not None and each]
    return min(limits, default=math.inf)


@final
class Allowance:
    """Keeps all running trials together to one epoch beyond a limit.

    A worker begins its next epoch before the study has read the report of the last one. So a trial counts with the
    epoch it is in and with the one it will begin before it could be stopped. While all of that fits, everything runs as
    it would without a limit. Then, one trial may cross the limit, and the others end with their present epoch.

    The first epoch of a study runs alone: it tells what an epoch costs. Fused trials count as one: they begin together.

    Args:
        limit_j: The limit.
        state: What is known of the study, kept up to date by others.
    """

    def __init__(self, limit_j: float, state: StudyState) -> None:
        self._limit_j = limit_j
        self._state = state
        self._dearest_j = 0.0
        self._known = False
        self.told: set[int] = set()
        for record in state.trials.values():
            for report in record.reports:
                self.heard(report)

    def heard(self, event: Reported) -> None:
        """A report tells what an epoch costs, or that nobody can tell."""
        self._known = True
        if event.energy is not None:
            self._dearest_j = max(self._dearest_j, event.energy.joules)

    def ended(self, event: Ended) -> None:
        """A trial is no longer under way. One that was stopped for our sake waits for the next session."""
        if not event.kept:
            self.told.discard(event.trial)

    def _costs_j(self, record: TrialRecord, ahead: int = 1) -> float:
        """What a trial's epoch will cost: the one it is in, or the next but one."""
        told = [report.energy.joules for report in record.reports[-2:] if report.energy is not None]
        if not told:
            return _DEARER * self._dearest_j
        return told[-1] + ahead * max(0.0, told[-1] - told[0])

    def _goes_on(self, trial: int, segment: Segment) -> bool:
        """Whether a trial begins another epoch after the present one, unless it is stopped."""
        if trial in self.told:
            return False
        return segment.until is None or self._state.trials[trial].epoch + 1 < segment.until

    def _under_way_j(self, running: Mapping[int, Segment]) -> float:
        """What is spent when the present epochs are over."""
        energy = self._state.energy
        spent_j = 0.0 if energy is None else energy.joules
        return spent_j + sum(self._costs_j(self._state.trials[trial]) for trial in running)

    def _begun_soon(self, running: Mapping[int, Segment]) -> Iterable[tuple[int, float]]:
        """Who will begin another epoch, and what that costs."""
        for trial, segment in running.items():
            if self._goes_on(trial, segment):
                yield trial, self._costs_j(self._state.trials[trial], 2)

    def stops(self, running: Mapping[int, Segment], *, waiting: bool) -> list[int]:
        """Trials that must end with their present epoch; each is told once.

        Args:
            running: What runs.
            waiting: Whether those that have not begun, too: where a trial told so still runs its first epoch.
        """
        left_j = self._limit_j - self._under_way_j(running)
        crossed = left_j < 0
        stopped = []
        for trial, cost_j in self._begun_soon(running):
            left_j -= cost_j
            if left_j >= 0:
                continue
            begun = self._state.trials[trial].status is TrialStatus.RUNNING
            if crossed and (begun or waiting):
                left_j += cost_j
                stopped.append(trial)
            crossed = True
        self.told.update(stopped)
        return stopped

    def within(
        self, free: Sequence[Free], running: Mapping[int, Segment], units: int, width: float, group: int = 1
    ) -> tuple[Sequence[Free], bool]:
        """What of the free devices may be used now, and whether to ask again once it is.

        Args:
            free: What is free.
            running: What runs.
            units: How many trials could start on it.
            width: Devices per trial.
            group: How many trials start as one, fused: their epoch is one.
        """
        if not self._known:
            return ((), False) if running else (_one(free, width), False)
        soon_j = self._under_way_j(running) + sum(cost_j for _, cost_j in self._begun_soon(running))
        each_j = 2 * _DEARER * self._dearest_j  # an epoch, and the one it begins before it could be stopped
        if soon_j + units * each_j < self._limit_j:
            return free, False
        if running and soon_j + group * each_j >= self._limit_j:
            return (), False
        return _one(free, width), True


def _one(free: Sequence[Free], width: float) -> list[Free]:
    """Room for one trial: no other is to queue behind it."""
    if width < 1:
        fits = [item for item in free if item.fraction >= width - 1e-9]
        return [replace(item, fraction=width, backlog=0) for item in fits[:1]]
    fits = [item for item in free if item.fraction >= 1]
    return [replace(item, backlog=0) for item in fits[: math.ceil(width)]]
