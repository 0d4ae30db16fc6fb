"""Budgets of energy and epochs: who may begin another epoch, and how many each may train.

What an epoch draws is known when it is over, so trials together go beyond a limit of energy by one epoch. Epochs are
counted, so they are given out beforehand and nobody trains one too many.
"""

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
class Leases:
    """Gives out a budget of epochs, so that all trials together train no more of them.

    A worker may be many epochs ahead of what the study has read of it. So each is told at its launch with which epoch
    to leave, and what all may train up to there is never more than what is left of the budget. Where that is enough for
    what they want, nothing is as it would not be without a budget. Who leaves before gives the rest back.

    Args:
        limit: The budget.
        state: What is known of the study, kept up to date by others.

    Attributes:
        cut: Trials that had to leave with nothing to go on from: they wait for another session.
    """

    def __init__(self, limit: int, state: StudyState) -> None:
        self._limit = limit
        self._state = state
        self._leaves: dict[int, tuple[int, int]] = {}  # by trial: the epochs it had behind it, and may have
        self._longest = 0  # training whose epochs nobody knew beforehand
        self._most = 0  # that any segment has wanted
        self.cut: set[int] = set()
        for record in state.trials.values():
            self._learn(record)

    @property
    def left(self) -> int:
        """Epochs that nobody has trained and nobody may train."""
        trials = self._state.trials
        given = sum(max(0, leave - max(had, trials[t].trained)) for t, (had, leave) in self._leaves.items())
        return self._limit - self._state.epochs - given

    def give(self, wanted: Sequence[tuple[Segment, int]], abreast: int) -> list[int]:
        """The epochs with which segments that start together are to leave.

        Args:
            wanted: Segments, and how many epochs each has behind it that count.
            abreast: How many trials can run at once: of the epochs of a training whose end nobody knows.
        """
        for segment, _ in wanted:
            self._leaves.pop(segment.trial.id, None)  # it has moved to another device
        left = self.left
        share = max(self._longest, math.ceil(left / abreast))
        wants = [share if s.until is None else max(0, s.until - had) for s, had in wanted]
        self._most = max(self._most, *wants)
        leaves = []
        for (segment, had), count in zip(wanted, _filled(wants, left), strict=True):
            leaves.append(had + count)
            self._leaves[segment.trial.id] = had, had + count
            self.cut.discard(segment.trial.id)
        return leaves

    def ended(self, event: Ended, *, waits: bool = False) -> bool:
        """A trial has left; returns whether it would go on if it were allowed more, and can from where it is.

        Args:
            event: How.
            waits: It only pauses, and has given its device to others.
        """
        record = self._state.trials[event.trial]
        _, leave = self._leaves.get(event.trial, (0, 0))
        if event.kept and event.epoch < leave and not waits:
            return False  # on its way to another device, or out: what it was given stays its own
        self._leaves.pop(event.trial, None)
        self._learn(record)
        if not event.kept or not leave or waits:
            return False
        if max(record.saved, default=0) < event.epoch:
            self.cut.add(event.trial)
            return False
        return True

    def _learn(self, record: TrialRecord) -> None:
        if record.segment.until is None and record.status is TrialStatus.COMPLETED:
            self._longest = max(self._longest, record.trained)

    def within(
        self, free: Sequence[Free], running: Mapping[int, Segment], units: int, width: float, group: int = 1
    ) -> tuple[Sequence[Free], int | None, bool]:
        """As ``Allowance.within``: no more trials than there are epochs left."""
        left = self.left
        if left < units * self._most:  # whoever is only to queue behind others would take epochs from them
            free = [replace(item, backlog=0) for item in free if item.fraction > 0]
            units = min(units, math.floor(sum(item.fraction for item in free) / width) * group)
        if left >= units:
            return free, max(0, left), False
        return (_one(free, width), min(left, group), True) if left > 0 else ((), 0, False)


def _filled(wants: Sequence[int], amount: int) -> list[int]:
    """``amount`` among ``wants``: all get the same, but nobody more than wanted (max-min fair, in whole numbers)."""
    given = [0] * len(wants)
    order = sorted(range(len(wants)), key=wants.__getitem__)
    for done, index in enumerate(order):
        given[index] = max(0, min(wants[index], amount // (len(wants) - done)))
        amount -= given[index]
    return given


@final
class Allowance:
    """Keeps all running trials together to one epoch beyond a limit of energy.

    A worker begins its next epoch before the study has read the report of the last one. So a trial counts with the
    epoch it is in and with the one it will begin before it could be stopped. While all of that fits, everything runs as
    it would without a limit. Then, one trial may cross the limit, and the others end with their present epoch.

    Nobody knows what an epoch costs before one was reported, so the first one of a study runs alone, to tell. Fused
    trials count as one: they begin together.

    Args:
        limit_j: The limit.
        state: What is known of the study, kept up to date by others.

    Attributes:
        told: Trials that were stopped for the sake of the limit.
        tight: Whether less was allowed than is free, when last asked: a report may change that.
    """

    def __init__(self, limit_j: float, state: StudyState) -> None:
        self._limit_j = limit_j
        self._state = state
        self._dearest_j = 0.0
        self._known = False
        self._at: dict[int, int] = {}  # by running trial, its latest epoch: one may be run again
        self.told: set[int] = set()
        self.tight = False
        for record in state.trials.values():
            for report in record.reports:
                self._learn(report)

    def heard(self, event: Reported) -> None:
        """A report tells what an epoch costs, or that nobody can tell."""
        self._at[event.trial] = event.epoch
        self._learn(event)

    def _learn(self, event: Reported) -> None:
        self._known = True
        if event.energy is not None:
            self._dearest_j = max(self._dearest_j, event.energy.joules)

    def ended(self, event: Ended, *, waits: bool = False) -> None:
        """A trial is no longer under way. One that was stopped for our sake waits for the next session, unless it only
        pauses, and ``waits`` in this one."""
        self._at.pop(event.trial, None)
        if not event.kept or waits:
            self.told.discard(event.trial)

    @property
    def _spent_j(self) -> float:
        return 0.0 if self._state.energy is None else self._state.energy.joules

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
        return segment.until is None or self._epoch(trial, segment) + 1 < segment.until

    def _epoch(self, trial: int, segment: Segment) -> int:
        """The epochs behind it now: less than it has reported where it was begun again, from an older checkpoint."""
        if trial in self._at:
            return self._at[trial]
        copied = 0 if segment.copy_from is None else segment.start
        return max(copied, *self._state.trials[trial].saved, 0)

    def _far(self, trials: int) -> bool:
        """Whether so many trials can't come near the limit: most of the time nothing more need be asked."""
        most_j = 2 * _DEARER * self._dearest_j  # of each: no more than 5 times the dearest
        return self._known and self._spent_j + trials * most_j < self._limit_j

    def _under_way_j(self, running: Mapping[int, Segment]) -> float:
        """What is spent when the present epochs are over."""
        return self._spent_j + sum(self._costs_j(self._state.trials[trial]) for trial in running)

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
        if self._far(len(running)):
            return []
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
        soon_j = self._under_way_j(running) + sum(cost_j for _, cost_j in self._begun_soon(running))
        each_j = 2 * _DEARER * self._dearest_j  # an epoch, and the one it begins before it could be stopped
        if soon_j + units * each_j < self._limit_j:
            return free, None, False
        self.tight = True
        if running and soon_j + group * each_j >= self._limit_j:
            return (), 0, False
        return _one(free, width), group, True


def _one(free: Sequence[Free], width: float) -> list[Free]:
    """Room for one trial: no other is to queue behind it."""
    if width < 1:
        fits = [item for item in free if item.fraction >= width - 1e-9]
        return [replace(item, fraction=width, backlog=0) for item in fits[:1]]
    fits = [item for item in free if item.fraction >= 1]
    return [replace(item, backlog=0) for item in fits[: math.ceil(width)]]
