"""The simulated executor: a virtual clock; the training function gives the metrics, a cost model the time."""

from __future__ import annotations

import functools
import heapq
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from penstock.core import (
    Clock,
    Config,
    Device,
    Ended,
    Event,
    Free,
    Measurement,
    Noted,
    Placement,
    Reported,
    Resized,
    Saved,
    Segment,
    Share,
    Source,
    Started,
    TrialStatus,
    VirtualClock,
)
from penstock.core.check import is_real, number, whole
from penstock.core.errors import ExecutorError, InvalidInput
from penstock.core.measurement import measurement
from penstock.energy import Draw, Fleet, SimulatedGpus
from penstock.execute._base import Executor, Job, Launch
from penstock.execute._scripts import Eager, Lazy, Step
from penstock.execute._wire import spec_of
from penstock.predict import Overhead
from penstock.train._checkpoint import MemoryCheckpoints
from penstock.train._worker import End, Settings, Spec, execute

Seconds: TypeAlias = float | Callable[[Config, int], float] | Callable[[Config, int, Placement], float]
"""Seconds per epoch: a number, or a function of the configuration, the epoch (from 0) and perhaps the placement."""

Failure: TypeAlias = Callable[[int, int, int], bool]
"""``failure(trial, epoch, attempt)``: whether the worker dies in that epoch (from 0) of that try."""

_EPSILON = 1e-9


@dataclass(slots=True, eq=False)
class _Member:
    """One trial of a flight."""

    segment: Segment
    source: Eager | Lazy
    epoch: int
    stop: tuple[str, bool] | None = None
    step: Step | None = None
    took_s: float = 0.0
    drawn_j: float = 0.0
    ended: Ended | None = None
    paths: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Flight:
    """A launched placement. Its members go step by step together and end together."""

    launch: Launch
    members: list[_Member]
    verdict: str = ""  # how the present step goes wrong
    lost: bool = False
    shares: tuple[Share, ...] = ()  # as they are now
    target: tuple[Share, ...] = ()  # from the next report on
    left_s: float = 0.0  # of the present step, alone on one device
    speed: float = 1.0
    since_s: float = 0.0  # when the speed last changed
    begun_s: float = 0.0  # when the step began
    number: int = 0  # of its entry in the heap that counts
    draw: Draw | None = None  # of the present step


@final
class Simulated(Executor):
    """Runs trials on imagined devices, in virtual time.

    The training function is really called, in this process, for the metrics of its epochs; how long they take is
    ``seconds``. The same study gives the same events at the same times. Checkpoints live in memory: a study
    resumed in another process starts its unfinished trials again.

    Args:
        devices: How many devices, or how many of each kind.
        seconds: Seconds per epoch on a whole device: a number, or a function ``(config, epoch)``, epochs counted
            from 0. A fraction of a device takes proportionally longer, several devices are no faster. A function
            ``(config, epoch, placement)`` decides about shares itself.
        overhead: What sharing a device, spreading over several and changing that cost (Fluid's h(i, w)); then the
            number of trials on a device counts, not their fractions, and widths can change while trials run. None:
            as said under ``seconds``.
        kinds: How many times faster than ``seconds`` each kind of device is; 1 where not given. The slowest
            device of a placement counts.
        failure: ``failure(trial, epoch, attempt)`` says whether the worker dies in that epoch, for tests.
        fused: How much longer an epoch takes for each further member of a fused placement: 0: they come for nothing,
            1: as long as one after another.
        target: In a study with a surrogate: how many times longer an epoch of the full model takes than ``seconds``,
            which is the narrow twin's.
        power: What the devices draw; then power limits are profiled and set, and change both joules and seconds.
            None: joules are those that the training function reports.
    """

    def __init__(
        self,
        devices: int | Mapping[str, int] = 8,
        *,
        seconds: Seconds = 1.0,
        kinds: Mapping[str, float] | None = None,
        failure: Failure | None = None,
        slots_per_trial: float = 1,
        overhead: Overhead | None = None,
        fused: float = 0.0,
        target: float = 1.0,
        power: SimulatedGpus | None = None,
    ) -> None:
        counts = _counts(devices)
        if any(count < 0 for count in counts.values()) or sum(counts.values()) < 1:
            raise InvalidInput(f"devices must be at least 1, got {devices!r}.")
        if callable(seconds):
            if not _takes(seconds, 2) and not _takes(seconds, 3):
                raise InvalidInput(
                    f"seconds is called with (config, epoch), or (config, epoch, placement); {seconds!r} can't be."
                )
        elif not number("seconds", seconds, "Give those of an epoch, or a function of (config, epoch).") > 0:
            raise InvalidInput(f"seconds must be positive, got {seconds!r}.")
        if kinds is not None and not isinstance(kinds, Mapping):
            raise InvalidInput(f'kinds takes speeds by kind of device, such as {{"a": 2.0}}, got {kinds!r}.')
        number("slots_per_trial", slots_per_trial, "Give 1, 2, or a fraction such as 0.5.")
        number("fused", fused, "Give 0 or more.")
        if overhead is not None and not isinstance(overhead, Overhead):
            raise InvalidInput(f"overhead takes an Overhead(...), got {overhead!r}.")
        if failure is not None and not callable(failure):
            raise InvalidInput(f"failure takes a function of (trial, epoch, attempt), got {failure!r}.")
        for kind, speed in (kinds or {}).items():
            number(f"The speed of {kind!r}", speed)
            if kind not in counts:
                raise InvalidInput(f"kinds names {kind!r}, but devices has only {', '.join(counts)}.")
            if not (math.isfinite(speed) and speed > 0):
                raise InvalidInput(f"The speed of {kind!r} must be positive, got {speed!r}.")
        total = sum(counts.values())
        if not slots_per_trial > 0 or slots_per_trial > total:
            raise InvalidInput(f"slots_per_trial must be in (0, {total}], got {slots_per_trial}.")
        if not (math.isfinite(fused) and fused >= 0):
            raise InvalidInput(f"fused must be at least 0, got {fused!r}.")
        if not number("target", target, "Give how many times longer.") > 0:
            raise InvalidInput(f"target must be above 0, got {target!r}.")
        if power is not None and not isinstance(power, SimulatedGpus):
            raise InvalidInput(f"power takes SimulatedGpus(...), got {power!r}.")
        self._fused = float(fused)
        self._target = float(target)
        self.power = power
        self._fleet: Fleet | None = None
        self.slots_per_trial = slots_per_trial
        self._made_with: tuple[Any, dict[str, Any]] = (
            devices,
            {
                "seconds": seconds,
                "kinds": kinds,
                "failure": failure,
                "slots_per_trial": slots_per_trial,
                "overhead": overhead,
                "fused": fused,
                "target": target,
                "power": power,
            },
        )
        self.overhead = overhead
        self.spreads = overhead is not None and overhead.max_devices > 1
        self._seconds = seconds
        self._takes_placement = callable(seconds) and _arity(seconds) >= 3
        if overhead is not None and self._takes_placement:
            raise InvalidInput(
                "Give overhead, or seconds of three arguments that knows about shares; not both."
            )
        self._speeds = {kind: (kinds or {}).get(kind, 1.0) for kind in counts}
        self._failure = failure
        self._devices: dict[str, Device] = {}
        for kind, count in counts.items():
            for _ in range(count):
                name = f"sim:{len(self._devices)}"
                self._devices[name] = Device(name, kind, node="simulated")
        self._clock = VirtualClock()
        self._job: Job | None = None
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """How it was made, not what it runs: a study's executor is kept with the study."""
        devices, options = self._made_with
        return functools.partial(Simulated, devices, **options), ()

    def _reset(self) -> None:
        self._heap: list[tuple[float, int, _Flight]] = []
        self._number = 0
        self._flights: dict[int, tuple[_Flight, _Member]] = {}
        self._events: list[Event] = []
        self._box: dict[str, tuple[int, bytes]] = {}
        self._free: dict[str, Free] = {name: Free(device) for name, device in self._devices.items()}
        self._on: dict[str, int] = {}
        self._tenants: dict[str, dict[int, _Flight]] = {}  # with an overhead: who slows down whom
        self._exclusive: set[str] = set()
        self._kept: set[int] = set()  # trials that paused in mid-segment
        self._listed: tuple[Free, ...] | None = None

    @property
    def clock(self) -> Clock:
        """The virtual clock; it starts at 0."""
        return self._clock

    @property
    def slots(self) -> int:
        """How many devices."""
        return len(self._devices)

    def open(self, job: Job) -> None:
        """Make ready; nothing is shipped, for the work runs in this process."""
        if self._job is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        if not callable(job.work):
            raise InvalidInput(f"The work must be callable with a Run, got {job.work!r}.")
        self._reset()
        self._job = job
        if self.power is not None and job.meter:
            limits, profiles = job.options.get("power_limits"), job.options.get("power_profiles")
            self._fleet = Fleet(self.power, limits, str(job.options.get("task", "")), profiles)
        self._settings = Settings(
            None, tuple(job.metrics), str(job.options.get("study", "")), job.options.get("make_meter")
        )

    def close(self) -> None:
        """Forget everything."""
        for _, member in list(self._flights.values()):
            member.source.quit()
        self._job = self._fleet = None
        self._reset()

    def free(self) -> Sequence[Free]:
        """Devices with something free, those freed last at the end."""
        if self._listed is None:
            self._listed = tuple(self._free.values())
        return self._listed

    # -- launching --------------------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch]) -> None:
        """Begin placements at the present virtual time."""
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        now_s = self._clock.now_s()
        for launch in launches:
            self._hold(launch.placement)
            members = [self._member(launch, number) for number in range(len(launch.placement.segments))]
            flight = _Flight(launch, members, shares=launch.placement.shares)
            if self.overhead is not None:
                if any(member.segment.trial.id in self._kept for member in members):
                    # To go on after a pause is like a change.
                    flight.since_s = now_s + self.overhead.epsilon_s
                self._enter(flight, now_s)
            fused = () if len(members) == 1 else tuple(member.segment.trial.id for member in members)
            placement = launch.placement
            for member in members:
                trial = member.segment.trial.id
                self._flights[trial] = flight, member
                self._events.append(
                    Started(now_s, trial, member.segment.start, placement.shares, placement.attempt, fused)
                )
            self._go_on(flight, now_s)

    def _member(self, launch: Launch, number: int) -> _Member:
        segment, path, job = launch.placement.segments[number], launch.checkpoints[number], self._job
        if job is None:
            raise ExecutorError("The executor is not open.")
        spec = Spec(*spec_of(launch, number))
        checkpoints = MemoryCheckpoints(self._box, segment.trial.id, path)
        work, settings = job.work, self._settings

        def call(sink: Any) -> End:
            return execute(work, spec, settings, sink, checkpoints=checkpoints)

        kept = None if path is None else self._box.get(path)
        start = 0 if kept is None else kept[0]
        source = Lazy(call, start) if segment.until is None else Eager(call, start)
        return _Member(segment, source, launch.known[number])

    def _hold(self, placement: Placement) -> None:
        if not placement.shares or not placement.segments:
            raise InvalidInput(f"A placement needs segments and shares, got {placement}.")
        self._hold_shares(placement.shares, placement)

    def _hold_shares(self, shares: Sequence[Share], placement: Placement) -> None:
        for share in shares:
            free = self._free.get(share.device)
            if share.device not in self._devices:
                raise InvalidInput(f"There is no device {share.device!r} here.")
            busy = self._on.get(share.device, 0)
            if (
                free is None
                or share.fraction > free.fraction + _EPSILON
                or share.device in self._exclusive
                or (placement.exclusive and busy)
            ):
                left = 0.0 if free is None else free.fraction
                raise ExecutorError(
                    f"{share.fraction:g} of {share.device} is asked for, but {left:g} is free."
                )
        for share in shares:
            self._on[share.device] = self._on.get(share.device, 0) + 1
            left = 0.0 if placement.exclusive else self._free[share.device].fraction - share.fraction
            if placement.exclusive:
                self._exclusive.add(share.device)
            if left > _EPSILON:
                self._free[share.device] = Free(self._devices[share.device], left)
            else:
                del self._free[share.device]
        self._listed = None

    def _release(self, shares: Sequence[Share]) -> None:
        for share in shares:
            name = share.device
            self._on[name] -= 1
            self._exclusive.discard(name)
            held = self._free.pop(name, None)
            fraction = share.fraction + (0.0 if held is None else held.fraction)
            if not self._on[name] or fraction > 1.0 - _EPSILON:
                fraction = 1.0
            self._free[name] = Free(self._devices[name], fraction)
        self._listed = None

    # -- time -------------------------------------------------------------------------------------------

    def _cost_s(self, segment: Segment, epoch: int, placement: Placement) -> float:
        seconds: Any = self._seconds
        config = segment.trial.config
        if self._takes_placement:
            cost = seconds(config, epoch, placement)
        else:
            cost = seconds(config, epoch) if callable(seconds) else seconds
        if not (is_real(cost) and math.isfinite(cost) and cost >= 0):
            raise InvalidInput(
                f"seconds gave {cost!r} for epoch {epoch} of {dict(config)}; it must be at least 0."
            )
        if segment.options.get("model") == "target":
            cost *= self._target
        if self.overhead is None and not self._takes_placement:
            cost /= min(1.0, sum(share.fraction for share in placement.shares))
        return float(cost) / min(self._speeds[self._devices[share.device].kind] for share in placement.shares)

    def _go_on(self, flight: _Flight, now_s: float) -> None:
        """Plan the flight's next step."""
        placement, longest = flight.launch.placement, 0.0
        for member in flight.members:
            if member.ended is not None:
                continue
            member.step = step = member.source.next()
            trial, taken = member.segment.trial.id, 0.0
            for epoch in step.epochs:
                taken += self._cost_s(member.segment, epoch, placement)
                if self._failure is not None and self._failure(trial, epoch, placement.attempt):
                    flight.verdict, flight.lost = "its worker died: simulated", True
                    break
            member.took_s = taken
            longest = max(longest, taken)
        going = [member for member in flight.members if member.ended is None]
        if len(going) > 1:  # each has its part of the time they take together
            slower = 1.0 + self._fused * (len(going) - 1)
            longest *= slower
            for member in going:
                member.took_s *= slower / len(going)
        if self._fleet is not None and longest > 0:
            alone_s = longest / (1.0 + self._fused * (len(going) - 1))
            config = going[0].segment.trial.config
            flight.draw = self._fleet.step(now_s, config, len(going), longest, alone_s)
            for member in going:
                member.took_s *= flight.draw.seconds / longest
            longest = flight.draw.seconds
        timeout_s = None if self._job is None else self._job.timeout_s
        if timeout_s is not None and longest > timeout_s:
            flight.verdict, flight.lost = f"no report for {timeout_s:g} s (timeout_s)", False
            longest = timeout_s
        flight.begun_s = now_s
        if self.overhead is not None:
            flight.left_s, flight.since_s = longest, max(now_s, flight.since_s)
            self._expect(flight)
            return
        self._number += 1
        flight.number = self._number
        heapq.heappush(self._heap, (now_s + longest, self._number, flight))

    # -- sharing and spreading ------------------------------------------------------------------------------

    def _expect(self, flight: _Flight) -> None:
        """(Re)enter when the flight's step will be over at its present speed."""
        self._number += 1
        flight.number = self._number
        heapq.heappush(self._heap, (flight.since_s + flight.left_s / flight.speed, self._number, flight))

    def _enter(self, flight: _Flight, now_s: float) -> None:
        for share in flight.shares:
            self._tenants.setdefault(share.device, {})[id(flight)] = flight
        self._pace(flight.shares, now_s)

    def _exit(self, flight: _Flight, now_s: float) -> None:
        for share in flight.shares:
            self._tenants[share.device].pop(id(flight), None)
        self._pace(flight.shares, now_s)

    def _pace(self, shares: Sequence[Share], now_s: float) -> None:
        """Let everybody on these devices go on at the speed that the present crowd allows."""
        overhead = self.overhead
        if overhead is None:
            return
        for share in shares:
            for flight in self._tenants[share.device].values():
                held = flight.shares
                crowd = max(len(self._tenants[other.device]) for other in held)
                speed = overhead.speed(float(len(held))) / overhead.alpha ** (crowd - 1)
                if speed != flight.speed:
                    elapsed_s = max(0.0, now_s - flight.since_s)  # negative: it is still changing its shares
                    flight.left_s = max(0.0, flight.left_s - flight.speed * elapsed_s)
                    flight.since_s = max(now_s, flight.since_s)
                    flight.speed = speed
                    if flight.number:
                        self._expect(flight)

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Change a flight's shares at its next report."""
        if self.overhead is None:
            super().resize(trial, shares)
        found = self._flights.get(trial)
        if found is None or found[0].target or not shares:
            return
        flight = found[0]
        old = {share.device for share in flight.shares}
        if any(share.device in old and share not in flight.shares for share in shares):
            # It leaves a part of a device and takes another part of it: only when it changes.
            raise InvalidInput(f"A change to {list(shares)} splits a device that trial {trial} holds.")
        self._hold_shares([s for s in shares if s.device not in old], flight.launch.placement)
        flight.target = tuple(shares)

    def _change(self, flight: _Flight, now_s: float) -> None:
        kept = {share.device for share in flight.target}
        left = [share for share in flight.shares if share.device not in kept]
        self._exit(flight, now_s)
        flight.shares, flight.target, flight.number = flight.target, (), 0
        flight.left_s = 0.0
        flight.since_s = now_s + (0.0 if self.overhead is None else self.overhead.epsilon_s)
        self._release(left)
        self._enter(flight, now_s)
        for member in flight.members:
            if member.ended is None:
                self._events.append(Resized(now_s, member.segment.trial.id, flight.shares))

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Move the clock to the next thing that happens, at most by ``timeout_s``."""
        heap, clock = self._heap, self._clock
        limit = None if timeout_s is None else clock.now_s() + timeout_s
        while heap:
            if heap[0][1] != heap[0][2].number:  # it goes at another speed by now
                heapq.heappop(heap)
                continue
            time_s = heap[0][0]
            if limit is not None and time_s > limit:
                clock.advance_to(limit)
                break
            before = len(self._events)
            clock.advance_to(time_s)
            while heap and heap[0][0] <= time_s:
                _, number, flight = heapq.heappop(heap)
                if number == flight.number:
                    self._arrive(flight, time_s)
            if len(self._events) > before:
                break
        events, self._events = self._events, []
        return events

    def _arrive(self, flight: _Flight, now_s: float) -> None:
        """The flight's step is over."""
        flight.number = 0
        going = sum(member.ended is None for member in flight.members)
        if self.overhead is not None:
            for member in flight.members:
                member.took_s = (now_s - flight.begun_s) / max(1, going)
        drawn_j = 0.0
        if flight.draw is not None:
            devices = sum(share.fraction for share in flight.shares)
            drawn_j = flight.draw.energy_j(devices, now_s - flight.begun_s)
            flight.draw = None
        for member in flight.members:
            member.drawn_j = drawn_j / max(1, going)
        if self._fleet is not None:
            self._events += [Noted(now_s, "power_profile", data) for data in self._fleet.news(now_s)]
        for member in flight.members:
            step, trial = member.step, member.segment.trial.id
            if member.ended is not None or step is None:
                continue
            if flight.verdict:
                member.ended = Ended(
                    now_s,
                    trial,
                    TrialStatus.FAILED,
                    member.epoch,
                    flight.verdict,
                    lost=flight.lost,
                    energy=self._untold(member, None),
                )
                continue
            self._tell(member, step, now_s)
        if any(member.ended is None for member in flight.members):
            if flight.target:
                self._change(flight, now_s)
            self._go_on(flight, now_s)
            return
        for member in flight.members:
            self._finish(member, now_s)
        if self.overhead is not None:
            self._exit(flight, now_s)
        held = {share.device for share in flight.shares}
        self._release((*flight.shares, *(share for share in flight.target if share.device not in held)))

    def _tell(self, member: _Member, step: Step, now_s: float) -> None:
        trial, end = member.segment.trial.id, step.end
        for epoch, metrics, _, energy in step.reports:
            joules = None if energy is None else measurement(*energy)
            if joules is None and self._fleet is not None:
                joules = Measurement(member.drawn_j / len(step.reports), "J", Source.SIMULATED)
            self._events.append(Reported(now_s, trial, epoch, metrics, member.took_s, joules))
            member.epoch = max(member.epoch, epoch)
        for epoch, path in step.saved:
            self._events.append(Saved(now_s, trial, epoch, path))
            member.paths.append((epoch, path))
        told = member.stop
        drawn = _drawn(end) if step.reports else self._untold(member, end)
        failed = end is not None and end.status == TrialStatus.FAILED
        if told is not None and (step.reports or end is not None) and not failed:
            reason, keep = told
            at_end = (
                member.segment.until is not None and end is not None and end.epoch >= member.segment.until
            )
            epoch = member.epoch if end is None else max(member.epoch, end.epoch)
            if not keep:
                member.ended = Ended(now_s, trial, TrialStatus.STOPPED, epoch, reason, energy=drawn)
                return
            if not at_end:
                member.ended = Ended(now_s, trial, TrialStatus.PAUSED, epoch, reason, kept=True, energy=drawn)
                self._kept.add(trial)
                return
        if end is not None:
            member.ended = Ended(
                now_s,
                trial,
                TrialStatus(end.status),
                end.epoch,
                end.reason,
                end.error,
                kept=end.kept,
                energy=drawn,
            )

    def _untold(self, member: _Member, end: End | None) -> Measurement | None:
        """What a step without a report drew, which its end has to tell: an epoch that fails is spent, too."""
        drawn = _drawn(end)
        if self._fleet is None or not member.drawn_j:
            return drawn
        step = Measurement(member.drawn_j, "J", Source.SIMULATED)
        return step if drawn is None else drawn + step

    def _finish(self, member: _Member, now_s: float) -> None:
        ended, trial = member.ended, member.segment.trial.id
        if ended is None:
            return
        member.source.quit()
        if ended.time_s != now_s:  # it was through before its companions
            ended = replace(ended, time_s=now_s)
        self._events.append(ended)
        del self._flights[trial]
        newest = max((epoch for epoch, _ in member.paths), default=None)
        for epoch, path in member.paths:
            if epoch != newest:
                self._box.pop(path, None)

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """End trials at their next report."""
        for trial in trials:
            found = self._flights.get(trial)
            if found is not None and found[1].stop is None:
                found[1].stop = reason, keep


def _counts(devices: Any) -> dict[str, int]:
    remedy = 'Give how many, or how many of each kind: {"fast": 2, "slow": 6}.'
    if isinstance(devices, Mapping):
        return {str(kind): whole(f"devices[{kind!r}]", count, remedy) for kind, count in devices.items()}
    return {"simulated": whole("devices", devices, remedy)}


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with that many arguments; True where that can't be told."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _drawn(end: End | None) -> Measurement | None:
    """What a segment drew outside of its epochs."""
    return None if end is None or end.energy is None else measurement(*end.energy)


def _arity(function: Callable[..., Any]) -> int:
    """How many positional arguments a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional for parameter in parameters)
