"""How a group would go on if a planner's passes decided from now on: played through in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from penstock.core import Device, Free, Placement, Plan, PlanPass, Running, Share
from penstock.predict import Overhead

_EPSILON = 1e-9


@final
class _Job:
    """A placement that runs: ``left_s`` seconds of work, at ``rate`` of them per second."""

    __slots__ = (
        "boundary_s", "epoch_s", "leaving", "left_s", "paused_s", "placement", "rank", "rate", "shares",
        "since_s", "version",
    )  # fmt: skip

    def __init__(
        self, placement: Placement, left_s: float, epoch_s: float, rank: int | None, now_s: float
    ) -> None:
        self.placement = placement  # with the shares it is to have
        self.shares = placement.shares  # those it runs on
        self.leaving: tuple[Share, ...] = ()
        self.left_s = left_s
        self.epoch_s = epoch_s
        self.boundary_s = math.nan  # work left when a change that was asked for takes place; nan: none
        self.rank = rank
        self.rate = 0.0
        self.since_s = self.paused_s = now_s
        self.version = 0

    def settle(self, now_s: float) -> None:
        begin_s = self.since_s if self.since_s > self.paused_s else self.paused_s
        if now_s > begin_s:
            left_s = self.left_s - self.rate * (now_s - begin_s)
            self.left_s = left_s if left_s > 0 else 0.0
        self.since_s = now_s

    def ask(self, at_epoch: int | None = None) -> None:
        """A change takes place at the end of the epoch, or of a later one; of unknown epochs, at once."""
        if self.epoch_s <= 0:
            self.boundary_s = self.left_s
            return
        ahead = math.floor(self.left_s / self.epoch_s + 1e-6)
        until = self.placement.segments[0].until
        if at_epoch is not None and until is not None:
            ahead = max(0, min(ahead, until - at_epoch))
        self.boundary_s = min(ahead * self.epoch_s, self.left_s)


def epoch_s(placement: Placement, alone_s: float) -> float:
    """The work of one epoch, if the number of epochs is known; else 0."""
    epochs = epoch_count(placement)
    return alone_s / epochs if epochs else 0.0


def epoch_count(placement: Placement) -> int:
    """How many epochs it has to run; 0: not known."""
    return max([s.until - s.start for s in placement.segments if s.until is not None], default=0)


def left_of(placement: Placement, left_s: float, epoch_s: float) -> Placement:
    """What a placement of one trial has still to do when it pauses at the end of an epoch."""
    segment = placement.segments[0]
    ahead = round(left_s / epoch_s) if epoch_s > 0 else 0
    start = segment.start if segment.until is None else max(segment.start, segment.until - ahead)
    return replace(placement, segments=(replace(segment, start=start),), shares=(), expected_s=left_s)


def makespan_s(
    plan: Plan,
    passes: Sequence[PlanPass],
    *,
    overhead: Overhead,
    waiting_s: Sequence[float],
    running_s: Sequence[float],
    within_s: float = math.inf,
) -> float:
    """When all that waits and runs would have ended, every event being planned by ``passes``.

    Args:
        plan: What waits, runs and is free.
        passes: The planner.
        overhead: The runtime model.
        waiting_s: What each waiting placement takes alone on one device.
        running_s: What each running one still takes.
        within_s: Give up at this time.

    Returns:
        The seconds, or infinity if it takes longer than ``within_s`` or some of it could never begin.
    """
    game = _Game(plan, overhead, waiting_s, running_s)
    return game.play(passes, within_s)


@final
class _Game:
    def __init__(
        self, plan: Plan, overhead: Overhead, waiting_s: Sequence[float], running_s: Sequence[float]
    ) -> None:
        devices: dict[str, Device] = {item.device.id: item.device for item in plan.free}
        for running in plan.running:
            for share in (*running.placement.shares, *running.leaving):
                devices.setdefault(share.device, plan.devices.get(share.device, Device(share.device)))
        if len(plan.devices) >= len(devices):
            devices = {name: item for name, item in plan.devices.items() if name in devices}
        self.devices = devices
        self.now_s = 0.0
        self.held: dict[str, dict[int, float]] = {name: {} for name in devices}
        self.used: dict[str, set[int]] = {name: set() for name in devices}
        self.jobs: dict[int, _Job] = {}
        self.events: list[tuple[float, int, int]] = []
        self.wide = 0
        self.rates: dict[tuple[int, int], float] = {}
        self.overhead = overhead
        self.paused: set[int] = set()
        self.version = 0
        self.whole = {name: Free(device) for name, device in devices.items()}
        self.waiting = tuple(
            replace(placement, expected_s=alone_s)
            for placement, alone_s in zip(plan.waiting, waiting_s, strict=True)
        )
        for item, left_s in zip(plan.running, running_s, strict=True):
            placement = item.placement
            trial = placement.segments[0].trial.id
            job = _Job(placement, left_s, epoch_s(placement, placement.expected_s or left_s), item.rank, 0.0)
            if item.changing:
                # What it runs on until then: what it leaves, or (nobody tells) the first of what it will have.
                job.leaving = item.leaving
                job.shares = item.leaving or placement.shares[:1]
                job.ask()
            self.wide += len(placement.shares) > 1
            self.jobs[trial] = job
            for share in (*placement.shares, *job.leaving):
                self.held[share.device][trial] = share.fraction
            for share in job.shares:
                self.used[share.device].add(trial)
        self._pace(list(self.jobs))

    def play(self, passes: Sequence[PlanPass], within_s: float) -> float:
        self._plan(passes)
        while (next_s := self._next_s()) is not None:
            if next_s > within_s:
                return math.inf
            self.now_s = max(self.now_s, next_s)
            while next_s is not None and next_s <= self.now_s * (1 + _EPSILON):
                _, trial, _ = heapq.heappop(self.events)
                self.now_s = max(self.now_s, next_s)
                job = self.jobs[trial]
                job.settle(self.now_s)
                if job.boundary_s == job.boundary_s and job.left_s > 1e-6 * (job.epoch_s or job.left_s):
                    if job.placement.shares:
                        self._change(trial, job)
                    else:
                        self._pause(trial, job)
                else:
                    self._end(trial, job)
                next_s = self._next_s()
            self._plan(passes)
        return math.inf if self.waiting else self.now_s

    def _next_s(self) -> float | None:
        """When something happens next; None: nothing does. What was expected before a change of pace is dropped."""
        while self.events:
            time_s, trial, version = self.events[0]
            job = self.jobs.get(trial)
            if job is not None and job.version == version:
                return time_s
            heapq.heappop(self.events)
        return None

    def _plan(self, passes: Sequence[PlanPass]) -> None:
        free = []
        room = False
        for name, held in self.held.items():
            if not held:
                free.append(self.whole[name])
                room = True
            else:
                fraction = 1.0 - sum(held.values())
                if fraction > _EPSILON:
                    free.append(Free(self.devices[name], fraction))
        if self.waiting:
            if not free and not self.wide:
                return
        elif not room or not self.jobs:
            return
        now_s = self.now_s
        running = []
        for job in self.jobs.values():
            job.settle(now_s)
            changing = job.boundary_s == job.boundary_s
            running.append(Running(job.placement, job.left_s, job.rank, changing, job.leaving))
        plan = Plan(self.waiting, tuple(free), running=tuple(running), devices=self.devices)
        for step in passes:
            plan = step(plan)
        self.waiting = plan.waiting
        touched: set[int] = set()
        for placement in plan.placed:
            trial = placement.segments[0].trial.id
            alone_s = placement.expected_s or 0.0
            job = self.jobs[trial] = _Job(placement, alone_s, epoch_s(placement, alone_s), None, now_s)
            if trial in self.paused:
                job.paused_s = now_s + self.overhead.epsilon_s
            self.wide += len(placement.shares) > 1
            for share in placement.shares:
                self.held[share.device][trial] = share.fraction
                used = self.used[share.device]
                used.add(trial)
                touched |= used
        if touched:
            self._pace(touched)
        for resize in plan.resized:
            trial = resize.placement.segments[0].trial.id
            job = self.jobs[trial]
            kept = {share.device for share in resize.shares}
            job.leaving = tuple(share for share in job.shares if share.device not in kept)
            job.placement = replace(job.placement, shares=resize.shares)
            self.wide += len(resize.shares) > 1
            self.wide -= len(job.shares) > 1
            for share in resize.shares:
                self.held[share.device].setdefault(trial, share.fraction)
            job.ask(resize.at_epoch)
            self._expect(trial, job)

    def _pace(self, trials: Sequence[int] | set[int]) -> None:
        for trial in sorted(trials):
            job = self.jobs[trial]
            job.settle(self.now_s)
            shares = job.shares
            crowd = len(self.used[shares[0].device])
            if len(shares) > 1:
                crowd = max(len(self.used[share.device]) for share in shares)
            key = len(shares), crowd
            rate = self.rates.get(key)
            if rate is None:
                rate = self.overhead.speed(float(key[0])) / self.overhead.alpha ** (crowd - 1)
                self.rates[key] = rate
            job.rate = rate
            self._expect(trial, job)

    def _expect(self, trial: int, job: _Job) -> None:
        work_s = job.left_s if job.boundary_s != job.boundary_s else max(0.0, job.left_s - job.boundary_s)
        self.version += 1  # of all jobs: what a trial was expected to do before a pause is void, too
        job.version = self.version
        heapq.heappush(self.events, (max(self.now_s, job.paused_s) + work_s / job.rate, trial, job.version))

    def _change(self, trial: int, job: _Job) -> None:
        for share in job.leaving:
            del self.held[share.device][trial]
        touched = {trial}
        for share in job.shares:
            self.used[share.device].discard(trial)
            touched |= self.used[share.device]
        job.shares, job.leaving, job.boundary_s = job.placement.shares, (), math.nan
        job.paused_s = self.now_s + self.overhead.epsilon_s
        for share in job.shares:
            self.held[share.device][trial] = share.fraction
            self.used[share.device].add(trial)
            touched |= self.used[share.device]
        self._pace(touched)

    def _pause(self, trial: int, job: _Job) -> None:
        self._end(trial, job)
        self.paused.add(trial)
        self.waiting = (*self.waiting, left_of(job.placement, job.left_s, job.epoch_s))

    def _end(self, trial: int, job: _Job) -> None:
        self.wide -= len(job.placement.shares) > 1
        del self.jobs[trial]
        touched: set[int] = set()
        for share in (*job.shares, *job.placement.shares):
            self.held[share.device].pop(trial, None)
            used = self.used[share.device]
            used.discard(trial)
            touched |= used
        self._pace(touched)
