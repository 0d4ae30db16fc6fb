"""Budgets of energy and epochs as allowances: who may begin another epoch, so that all end within one of the limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, final

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


class _Account(Protocol):
    """What is limited.

    Attributes:
        first: What an epoch costs before one was reported; None: nobody knows.
    """

    first: float | None

    def spent(self, state: StudyState) -> float:
        """What is spent."""

    def cost(self, event: Reported, record: TrialRecord) -> float | None:
        """What the epochs cost that a report tells of; None: nobody knows."""

    def costs(self, record: TrialRecord) -> Sequence[float]:
        """The same of the last two reports of a trial, as far as known."""

    def most(self, left: float, group: int) -> int:
        """How many trials may start as one."""


@final
class Joules:
    """Energy: what an epoch costs is known when one was reported."""

    first: float | None = None

    def spent(self, state: StudyState) -> float:
        """Of trials, and of what was measured before them."""
        return 0.0 if state.energy is None else state.energy.joules

    def cost(self, event: Reported, record: TrialRecord) -> float | None:
        """What was metered."""
        return None if event.energy is None else event.energy.joules

    def costs(self, record: TrialRecord) -> Sequence[float]:
        """What was metered."""
        return [report.energy.joules for report in record.reports[-2:] if report.energy is not None]

    def most(self, left: float, group: int) -> int:
        """All: they count as one, whose epoch is one."""
        return group


@final
class Epochs:
    """Epochs: one each, or as many as a trial trains between two reports."""

    first: float | None = 1.0

    def spent(self, state: StudyState) -> float:
        """Those that are known of."""
        return float(state.epochs)

    def cost(self, event: Reported, record: TrialRecord) -> float | None:
        """Since the report before."""
        return next(iter(self.costs(record)[-1:]), None)

    def costs(self, record: TrialRecord) -> Sequence[float]:
        """Between reports."""
        begun = 0 if record.segment.copy_from is None else min(record.segment.start, record.epoch)
        ends = [report.epoch for report in record.reports[-3:]]
        ends = ends if len(ends) == 3 else [begun, *ends]
        return [float(max(1, after - before)) for before, after in itertools.pairwise(ends)]

    def most(self, left: float, group: int) -> int:
        """As many as there are epochs left: a fused group's epoch is one of each member."""
        return max(1, min(group, math.floor(left)))


@final
class Allowance:
    """Keeps all running trials together to one epoch beyond a limit.

    A worker begins its next epoch before the study has read the report of the last one. So a trial counts with the
    epoch it is in and with the one it will begin before it could be stopped. While all of that fits, everything runs as
    it would without a limit. Then, one trial may cross the limit, and the others end with their present epoch.

    Where nobody knows yet what an epoch costs, the first one of a study runs alone, to tell. Fused trials count as one
    where that is energy: they begin together.

    Args:
        limit: The limit.
        state: What is known of the study, kept up to date by others.
        account: Of what.
        told: Trials that were stopped for the sake of a limit; several allowances share them.

    Attributes:
        tight: Whether less was allowed than is free, when last asked: a report may change that.
    """

    def __init__(self, limit: float, state: StudyState, account: _Account, told: set[int]) -> None:
        self._limit = limit
        self._state = state
        self._account = account
        self._dearest = account.first or 0.0
        self._dearer = _DEARER if account.first is None else 1.0
        self._known = account.first is not None
        self.told = told
        self.tight = False
        for record in state.trials.values():
            for report in record.reports:
                self.heard(report)

    def heard(self, event: Reported) -> None:
        """A report tells what an epoch costs, or that nobody can tell."""
        self._known = True
        cost = self._account.cost(event, self._state.trials[event.trial])
        if cost is not None:
            self._dearest = max(self._dearest, cost)

    def ended(self, event: Ended) -> None:
        """A trial is no longer under way. One that was stopped for our sake waits for the next session."""
        if not event.kept:
            self.told.discard(event.trial)

    def _costs(self, record: TrialRecord, ahead: int = 1) -> float:
        """What a trial's epoch will cost: the one it is in, or the next but one."""
        told = self._account.costs(record)
        if not told:
            return self._dearer * self._dearest
        return told[-1] + ahead * max(0.0, told[-1] - told[0])

    def _goes_on(self, trial: int, segment: Segment) -> bool:
        """Whether a trial begins another epoch after the present one, unless it is stopped."""
        if trial in self.told:
            return False
        return segment.until is None or self._state.trials[trial].epoch + 1 < segment.until

    def _far(self, trials: int) -> bool:
        """Whether so many trials can't come near the limit: most of the time nothing more need be asked."""
        most = 2 * _DEARER * self._dearest  # of each: no more than 5 times the dearest
        return self._known and self._account.spent(self._state) + trials * most < self._limit

    def _under_way(self, running: Mapping[int, Segment]) -> float:
        """What is spent when the present epochs are over."""
        costs = sum(self._costs(self._state.trials[trial]) for trial in running)
        return self._account.spent(self._state) + costs

    def _begun_soon(self, running: Mapping[int, Segment]) -> Iterable[tuple[int, float]]:
        """Who will begin another epoch, and what that costs."""
        for trial, segment in running.items():
            if self._goes_on(trial, segment):
                yield trial, self._costs(self._state.trials[trial], 2)

    def stops(self, running: Mapping[int, Segment], *, waiting: bool) -> list[int]:
        """Trials that must end with their present epoch; each is told once.

        Args:
            running: What runs.
            waiting: Whether those that have not begun, too: where a trial told so still runs its first epoch.
        """
        if self._far(len(running)):
            return []
        left = self._limit - self._under_way(running)
        crossed = left < 0
        stopped = []
        for trial, cost in self._begun_soon(running):
            left -= cost
            if left >= 0:
                continue
            begun = self._state.trials[trial].status is TrialStatus.RUNNING
            if crossed and (begun or waiting):
                left += cost
                stopped.append(trial)
            crossed = True
        self.told.update(stopped)
        return stopped

    def within(
        self, free: Sequence[Free], running: Mapping[int, Segment], units: int, width: float, group: int = 1
    ) -> tuple[Sequence[Free], int | None, bool]:
        """What of the free devices may be used now, for how many trials, and whether to ask again once it is.

        Args:
            free: What is free.
            running: What runs.
            units: How many trials could start on it.
            width: Devices per trial.
            group: How many trials start as one, fused.

        Returns:
            ``free`` itself, and None, if there is no need to keep to less.
        """
        self.tight = not self._known
        if not self._known:
            return ((), 0, False) if running else (_one(free, width), group, False)
        if self._far(len(running) + units):
            return free, None, False
        soon = self._under_way(running) + sum(cost for _, cost in self._begun_soon(running))
        each = 2 * self._dearer * self._dearest  # an epoch, and the one it begins before it could be stopped
        if soon + units * each < self._limit:
            return free, None, False
        self.tight = True
        most = self._account.most(self._limit - soon, group)
        if running and soon + most * each >= self._limit:
            return (), 0, False
        return _one(free, width), most, True


def _one(free: Sequence[Free], width: float) -> list[Free]:
    """Room for one trial: no other is to queue behind it."""
    if width < 1:
        fits = [item for item in free if item.fraction >= width - 1e-9]
        return [replace(item, fraction=width, backlog=0) for item in fits[:1]]
    fits = [item for item in free if item.fraction >= 1]
    return [replace(item, backlog=0) for item in fits[: math.ceil(width)]]
