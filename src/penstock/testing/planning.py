"""A cluster in virtual time for planners: it launches, packs, resizes and ends placements by Fluid's runtime model."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from penstock.core import (
    Device,
    Free,
    Placement,
    Plan,
    PlanPass,
    Resize,
    Running,
    Segment,
    Share,
    Trial,
    Turn,
)
from penstock.predict import Overhead

_EPSILON = 1e-9


@dataclass(slots=True)
class _Job:
    """A running placement: ``left`` seconds of work, at ``rate`` of them per second."""

    placement: Placement
    left: float
    epoch: float  # seconds of work in an epoch
    expected: float | None  # what the planner was told all of it would take
    work: float
    started_s: float
    rate: float = 0.0
    since_s: float = 0.0
    paused_until_s: float = 0.0
    version: int = 0
    target: tuple[Share, ...] | None = None  # shares from the end of the epoch on
    boundary: float = 0.0  # work left at the end of the epoch in which the change was asked for
    rank: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Stay:
    """What one trial had from when to when: for Gantt charts and checks."""

    trial: int
    shares: tuple[Share, ...]
    begin_s: float
    end_s: float


@final
@dataclass(slots=True)
class Tally:
    """What became of a simulated run."""

    makespan_s: float = 0.0
    busy_s: float = 0.0  # device seconds during which a device had at least one tenant
    resizes: int = 0
    pauses: int = 0
    stays: list[Stay] = field(default_factory=list)
    ends_s: dict[int, float] = field(default_factory=dict)


@final
class SimulatedCluster:
    """Devices, what runs on them, and the time. Every wrong order of a planner is an AssertionError.

    Args:
        devices: How many, or which.
        truth: The overheads that really hold; the planner may believe in others.
        planner: The passes.
    """

    def __init__(
        self, devices: int | Sequence[Device], *, truth: Overhead, planner: Sequence[PlanPass]
    ) -> None:
        made = [Device(f"cpu:{i}") for i in range(devices)] if isinstance(devices, int) else devices
        self.devices: dict[str, Device] = {device.id: device for device in made}
        self.truth = truth
        self.planner = tuple(planner)
        self.now_s = 0.0
        self.waiting: list[Placement] = []
        self.tally = Tally()
        self.plans = 0
        self._held: dict[str, dict[int, float]] = {name: {} for name in self.devices}
        self._used: dict[str, set[int]] = {name: set() for name in self.devices}
        self._memory: dict[int, int] = {}
        self._jobs: dict[int, _Job] = {}
        self._work: dict[int, tuple[float, int]] = {}
        self._events: list[tuple[float, int, int]] = []
        self._busy_since: dict[str, float] = {}
        self._paused: set[int] = set()
        self._version = 0

    # --- what the driver does --------------------------------------------------------------------------------

    def submit(
        self,
        placements: Iterable[Placement],
        work_s: Mapping[int, float],
        epochs: Mapping[int, int] | None = None,
    ) -> None:
        """Queue placements of one segment; ``work_s`` says what each trial really takes alone on one device."""
        for placement in placements:
            trial = placement.segments[0].trial.id
            self._work[trial] = work_s[trial], max(1, (epochs or {}).get(trial, 1))
            self.waiting.append(replace(placement, since_s=self.now_s))

    def replan(self) -> Plan:
        """Let the planner decide, and do what it says."""
        plan = self.plan()
        for step in self.planner:
            plan = step(plan)
        self.plans += 1
        before = {placement.segments[0].trial.id for placement in self.waiting}
        after = [placement.segments[0].trial.id for placement in (*plan.waiting, *plan.placed)]
        assert len(after) == len(set(after)), "a trial was doubled"
        assert set(after) == before, f"trials lost or made up: {before ^ set(after)}"
        self.waiting = list(plan.waiting)
        for placement in plan.placed:
            self._launch(placement)
        for resize in plan.resized:
            self._resize(resize)
        return plan

    def plan(self) -> Plan:
        """What the planner gets to see."""
        return Plan(
            waiting=tuple(self.waiting), free=self.free(), running=self.running(), devices=self.devices
        )

    def free(self) -> tuple[Free, ...]:
        """What is free of each device."""
        found = []
        for name, held in self._held.items():
            fraction = 1.0 - sum(held.values())
            if fraction > _EPSILON:
                found.append(Free(self.devices[name], fraction if held else 1.0))
        return tuple(found)

    def running(self) -> tuple[Running, ...]:
        """What runs, with the work left as a study would know it: exact once an epoch was seen."""
        found = []
        for job in self._jobs.values():
            left = self._left(job)
            done_epochs = int((job.work - left) / job.epoch + 1e-6)
            remaining: float | None
            if done_epochs >= 1 or job.expected is None:
                remaining = left if done_epochs >= 1 else None
            else:
                remaining = job.expected * left / job.work
            placement = job.placement
            leaving: tuple[Share, ...] = ()
            if job.target is not None:
                kept = {share.device for share in job.target}
                leaving = tuple(share for share in placement.shares if share.device not in kept)
                placement = replace(placement, shares=job.target)
            found.append(Running(placement, remaining, job.rank, job.target is not None, leaving))
        return tuple(found)

    def rank(self, ranks: Mapping[int, int]) -> None:
        """Tell how trials perform, 0 being the best."""
        for trial, job in self._jobs.items():
            job.rank = ranks.get(trial, job.rank)

    @property
    def idle(self) -> bool:
        """Whether nothing runs."""
        return not self._jobs

    def step(self) -> list[int]:
        """Go on to the time of the next event: the trials that ended then (none if one only changed shares)."""
        ended: list[int] = []
        happened = False
        while self._events:
            time_s, trial, version = self._events[0]
            job = self._jobs.get(trial)
            if job is None or job.version != version:
                heapq.heappop(self._events)
                continue
            if happened and time_s > self.now_s * (1 + _EPSILON):
                break
            heapq.heappop(self._events)
            happened = True
            self.now_s = max(self.now_s, time_s)
            job.left = self._left(job)
            job.since_s = self.now_s
            if job.target is not None and job.left > 1e-6 * job.epoch:
                if job.target:
                    self._change(trial, job)
                else:
                    self._pause(trial, job)
            else:
                self._end(trial, job)
                ended.append(trial)
        return ended

    # --- inside ----------------------------------------------------------------------------------------------

    def _left(self, job: _Job) -> float:
        ran_s = max(0.0, self.now_s - max(job.since_s, job.paused_until_s))
        return max(0.0, job.left - job.rate * ran_s)

    def _launch(self, placement: Placement) -> None:
        trial = placement.segments[0].trial.id
        assert placement.shares, "launched without devices"
        assert trial not in self._jobs
        work, epochs = self._work[trial]
        job = _Job(placement, work, work / epochs, placement.expected_s, work, self.now_s, since_s=self.now_s)
        if trial in self._paused:
            job.paused_until_s = self.now_s + self.truth.epsilon_s
        self._jobs[trial] = job
        self._hold(trial, placement.shares, placement)
        self._enter(trial, placement.shares)

    def _hold(self, trial: int, shares: Sequence[Share], placement: Placement) -> None:
        for share in shares:
            held = self._held[share.device]
            held[trial] = share.fraction
            assert sum(held.values()) <= 1 + 1e-6, f"{share.device} is given out more than once: {held}"
            self._memory[trial] = placement.memory_bytes or 0
            memory = self.devices[share.device].memory_bytes
            if memory is not None and len(held) > 1:
                need = sum(self._memory[t] for t in held)
                assert need <= memory, f"{share.device} runs out of memory: {need} of {memory} bytes"
            assert len(held) == 1 or not any(
                self._jobs[t].placement.exclusive for t in held if t in self._jobs
            ), f"{share.device} was exclusive"

    def _enter(self, trial: int, shares: Sequence[Share]) -> None:
        affected = {trial}
        for share in shares:
            if not self._used[share.device]:
                self._busy_since[share.device] = self.now_s
            self._used[share.device].add(trial)
            affected |= self._used[share.device]
        self._repace(affected)

    def _leave(self, trial: int, shares: Sequence[Share]) -> None:
        affected: set[int] = set()
        for share in shares:
            self._used[share.device].discard(trial)
            if not self._used[share.device]:
                self.tally.busy_s += self.now_s - self._busy_since.pop(share.device)
            affected |= self._used[share.device]
        affected.discard(trial)
        self._repace(affected)

    def _repace(self, trials: Iterable[int]) -> None:
        for trial in sorted(trials):
            job = self._jobs[trial]
            job.left = self._left(job)
            job.since_s = self.now_s
            shares = job.placement.shares
            crowd = max(len(self._used[share.device]) for share in shares)
            job.rate = self.truth.speed(float(len(shares))) / self.truth.alpha ** (crowd - 1)
            self._expect(trial, job)

    def _expect(self, trial: int, job: _Job) -> None:
        work = job.left if job.target is None else max(0.0, job.left - job.boundary)
        self._version += 1  # of all jobs: what a trial was expected to do before a pause is void, too
        job.version = self._version
        begin_s = max(self.now_s, job.paused_until_s)
        heapq.heappush(self._events, (begin_s + work / job.rate, trial, job.version))

    def _resize(self, resize: Resize) -> None:
        trial = resize.placement.segments[0].trial.id
        job = self._jobs[trial]
        assert job.target is None, "a change during a change"
        assert resize.shares or job.placement.pausable, "it can't pause"
        assert len(resize.shares) <= job.placement.max_devices, "wider than it can be"
        old = {share.device for share in job.placement.shares}
        self._hold(trial, [share for share in resize.shares if share.device not in old], job.placement)
        job.left = self._left(job)
        job.since_s = self.now_s
        done = job.work - job.left
        epochs = int(done / job.epoch + 1e-6)
        at_boundary = abs(done - epochs * job.epoch) < 1e-6 * job.epoch
        epochs += not (at_boundary and epochs)
        if resize.at_epoch is not None:
            assert len(resize.shares) < len(old), "only to narrow or to pause can wait for an epoch"
            epochs = max(epochs, resize.at_epoch - resize.placement.segments[0].start)
        job.boundary = max(0.0, job.work - epochs * job.epoch)
        job.target = resize.shares
        self._expect(trial, job)

    def _change(self, trial: int, job: _Job) -> None:
        assert job.target is not None
        old, new = job.placement.shares, job.target
        self._note(trial, job)
        kept = {share.device for share in new}
        for share in old:
            if share.device not in kept:
                del self._held[share.device][trial]
        for share in new:
            self._held[share.device][trial] = share.fraction
        self._leave(trial, old)
        job.placement = replace(job.placement, shares=new)
        job.target = None
        job.started_s = self.now_s
        job.paused_until_s = self.now_s + self.truth.epsilon_s
        self.tally.resizes += 1
        self._enter(trial, new)

    def _pause(self, trial: int, job: _Job) -> None:
        self._note(trial, job)
        for share in job.placement.shares:
            self._held[share.device].pop(trial, None)
        del self._jobs[trial]
        self._leave(trial, job.placement.shares)
        ahead = round(job.left / job.epoch)
        segment = job.placement.segments[0]
        rest = replace(segment, start=segment.start + round(job.work / job.epoch) - ahead)
        self._work[trial] = job.left, ahead
        self._paused.add(trial)
        self.tally.pauses += 1
        self.waiting.append(replace(job.placement, segments=(rest,), shares=(), expected_s=job.left))

    def _note(self, trial: int, job: _Job) -> None:
        self.tally.stays.append(Stay(trial, job.placement.shares, job.started_s, self.now_s))

    def _end(self, trial: int, job: _Job) -> None:
        self._note(trial, job)
        for held in self._held.values() if job.target is not None else ():
            held.pop(trial, None)
        for share in job.placement.shares:
            self._held[share.device].pop(trial, None)
        del self._jobs[trial]
        self._leave(trial, job.placement.shares)
        self.tally.ends_s[trial] = self.now_s
        self.tally.makespan_s = max(self.tally.makespan_s, self.now_s)


def placements(
    expected_s: Sequence[float | None],
    *,
    max_devices: int = 1,
    memory_bytes: Sequence[int | None] | None = None,
    error: float = 0.0,
    first: int = 0,
    epochs: int = 1,
    pausable: bool = False,
) -> list[Placement]:
    """One placement per expected runtime, trials numbered from ``first``, of ``epochs`` epochs."""
    return [
        Placement(
            (Segment(Trial(first + i, {}, 0), until=epochs),),
            expected_s=value,
            expected_error=error,
            max_devices=max_devices,
            memory_bytes=None if memory_bytes is None else memory_bytes[i],
            pausable=pausable,
        )
        for i, value in enumerate(expected_s)
    ]


def run_group(
    planner: Sequence[PlanPass],
    runtimes_s: Sequence[float],
    *,
    devices: int | Sequence[Device],
    truth: Overhead,
    expected_s: Sequence[float | None] | None = None,
    error: float = 0.0,
    epochs: int = 10,
    memory_bytes: Sequence[int | None] | None = None,
    max_devices: int | None = None,
    pausable: bool = False,
    turns: Sequence[Turn] = (),
    watch: Callable[[SimulatedCluster], None] | None = None,
) -> Tally:
    """Run one group of trials to its end; with ``turns``, those are decided already."""
    cluster = SimulatedCluster(devices, truth=truth, planner=planner)
    group = placements(
        list(runtimes_s) if expected_s is None else expected_s,
        max_devices=truth.max_devices if max_devices is None else max_devices,
        memory_bytes=memory_bytes,
        error=error,
        epochs=epochs,
        pausable=pausable,
    )
    work = dict(enumerate(runtimes_s))
    cluster.submit([replace(each, turns=tuple(turns)) for each in group], work, dict.fromkeys(work, epochs))
    cluster.replan()
    while not cluster.idle:
        cluster.step()
        if watch is not None:
            watch(cluster)
        cluster.replan()
    assert not cluster.waiting, f"{len(cluster.waiting)} trials starved"
    return cluster.tally
