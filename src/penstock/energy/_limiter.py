"""The power limiter: drives the profiler's state machine with real clocks, sensors and limits."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, final

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput, NotPermitted, PenstockError, SensorError, Unsupported
from penstock.energy._guard import LimitGuard
from penstock.energy._power_limit import PowerLimitOptimizer, limits_between
from penstock.energy._profile import (
    EtaCost,
    LimitProfile,
    LimitRule,
    PowerProfile,
    ProfileCache,
    part_key,
    profile_key,
)
from penstock.energy._sensor import Sensor

log = logging.getLogger("penstock.energy")


@final
class FileCache:
    """Profiles in a JSON file, for runs without a store, and for the workers of a study.

    Written whole, by renaming: never half. Several processes may put at once.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def get(self, key: str) -> Any | None:
        """A value, or None; also None for an unreadable file."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._write(lambda values: {**values, key: value})

    def replace(self, values: Mapping[str, Any]) -> None:
        """Keep these, and nothing else."""
        self._write(lambda _: dict(values))

    def _write(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path.with_name(f"{self._path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            beside.write_text(json.dumps(change(self._read())))
            beside.replace(self._path)

    def items(self) -> list[tuple[str, Any]]:
        """All of them, to be kept elsewhere."""
        return list(self._read().items())

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


@dataclass(frozen=True, slots=True)
class LimitReport:
    """What the limiter found and did.

    Attributes:
        limit_w: The limit in force now.
        best: What the rule chose; None while profiling, or if nothing could be profiled.
        profile: The complete profile, or None.
        observing: The best limit is not applied: observer mode, or no permission.
        reason: Why no limit is applied; empty if one is.
        cached: The profile was known from before.
        energy_saved: The part of the energy that ``best`` saves against the highest limit (negative: costs).
        time_saved: The part of the time, likewise (usually negative).
    """

    limit_w: float | None
    best: LimitProfile | None
    profile: PowerProfile | None
    observing: bool
    reason: str
    cached: bool
    energy_saved: float | None
    time_saved: float | None

    def __str__(self) -> str:
        if self.best is None:
            return self.reason or "Power limits are being profiled."
        assert self.energy_saved is not None
        assert self.time_saved is not None
        change = (
            f"{abs(self.energy_saved):.1%} {'less' if self.energy_saved >= 0 else 'more'} energy,"
            f" {abs(self.time_saved):.1%} {'less' if self.time_saved >= 0 else 'more'} time"
        )
        if self.observing:
            return f"A power limit of {self.best.limit_w:.0f} W would take {change}."
        return f"Power limit {self.best.limit_w:.0f} W: {change} than at the highest."


@final
class PowerLimiter:
    """Finds and keeps the best power limit of a training's GPUs, while it trains.

    Use as a context manager around the training, and tell of its progress: ``epoch_begin``, ``iteration`` after each
    iteration, ``epoch_end``. All GPUs get the same limit and their energies are added. Limits are restored at the end
    of the block, at exit, on SIGTERM, and by a watchdog after SIGKILL (``LimitGuard``).

    Without permission, or where limits can't be set, it says so once and goes on as an observer. A device that fails
    on the way ends the profiling, never the training.

    Args:
        sensors: The job's GPUs on this machine, all of one model.
        rule: Which limit is best; ``EtaCost(0.5)`` if None.
        task: With device model, batch size and number of GPUs the key of the profile in ``cache``.
        batch_size: Of the whole job.
        cache: Where profiles are kept: a ``Store``, a ``FileCache``, or None.
        observe: Profile, but keep the highest limit and report what would be saved.
        step_w: Between the limits that are tried.
        slice_s: See ``PowerLimitOptimizer``, as ``warmup_s`` and ``settle_s``.
        world_size: GPUs of the job; ``len(sensors)`` if None.
        now: Seconds.
        exact_epochs: ``epoch_end`` is called right after the last iteration. If not, what lies between (an
            evaluation, a checkpoint) is kept out of the slices by reading the energy ten times per slice.
        sync: Waits until the GPUs have done what was asked of them, called before an energy is read.
        tell: Gets sentences for the user, each once; the log if None.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor],
        *,
        rule: LimitRule | None = None,
        task: str = "",
        batch_size: int = 0,
        cache: ProfileCache | None = None,
        observe: bool = False,
        step_w: float = 25.0,
        slice_s: float = 5.0,
        warmup_s: float | None = None,
        settle_s: float = 0.5,
        world_size: int | None = None,
        exact_epochs: bool = True,
        now: Callable[[], float] = time.monotonic,
        sync: Callable[[], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if not sensors:
            raise InvalidInput("A power limiter needs a GPU.")
        names = {sensor.name for sensor in sensors}
        if len(names) > 1:
            raise InvalidInput(
                f"The GPUs of one job get one limit, so must be of one model; got {sorted(names)}."
            )
        self._sensors = tuple(sensors)
        self._rule = rule if rule is not None else EtaCost()
        self._world_size = len(sensors) if world_size is None else world_size
        if self._world_size < len(sensors):
            raise InvalidInput(f"world_size {self._world_size} is less than the {len(sensors)} GPUs here.")
        self._key = profile_key(sensors[0].name, task, batch_size, self._world_size)
        self._exact = exact_epochs
        self._cache = cache
        self._observe = observe
        self._step_w = step_w
        self._slices = (slice_s, warmup_s, settle_s)
        self._now = now
        self._sync = sync
        self._tell = tell if tell is not None else log.warning
        self._guard = LimitGuard(sensors)
        self._machine: PowerLimitOptimizer | None = None
        self._known: PowerProfile | None = None
        self._begun = 0  # limits that an earlier training has profiled
        self._max_power_w: float | None = None
        self._reason = ""
        self._saved = False

    # -- the block

    def __enter__(self) -> PowerLimiter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Take the limits over, if that is possible. Nothing changes before."""
        self._known = self._load(self._key)
        try:
            ranges = [range_w for sensor in self._sensors if (range_w := sensor.power_limit_range_w)]
            low_w = max((range_w[0] for range_w in ranges), default=0.0)
            high_w = min((range_w[1] for range_w in ranges), default=0.0)
            if len(ranges) == len(self._sensors):
                self._max_power_w = high_w * self._world_size
            self._guard.hold()
        except (NotPermitted, Unsupported, SensorError) as error:
            self._give_up(f"The power limit stays as it is: {error}")
            return
        self._known = self._taken(low_w, high_w)
        slice_s, warmup_s, settle_s = self._slices
        begun = self._load(part_key(self._key)) if self._known is None else None
        self._machine = PowerLimitOptimizer(
            limits_between(low_w, high_w, self._step_w),
            self._rule,
            device=self._sensors[0].name,
            world_size=self._world_size,
            max_limit_w=high_w,
            slice_s=slice_s,
            warmup_s=warmup_s,
            settle_s=settle_s,
            observe=self._observe,
            known=self._known,
            seen=() if begun is None else begun.limits,
            piece_s=None if self._exact else slice_s / 10,
        )
        self._begun = len(self._machine.seen)

    def stop(self) -> None:
        """Restore the limits; keep what was profiled of them for the next training. Idempotent."""
        self._guard.restore()
        self._keep_part()

    # -- progress

    def epoch_begin(self) -> None:
        """An epoch's first iteration begins."""
        if self._machine is not None:
            self._drive(lambda machine: machine.begin_epoch(*self._measure()))

    def iteration(self, samples: float = 1.0) -> None:
        """An iteration is over. Cheap, but at the end of a slice."""
        machine = self._machine
        if machine is None or machine.done:
            return
        if not machine.wants_reading(self._now()):
            machine.iteration(self._now(), None, samples)
            return

        def step(machine: PowerLimitOptimizer) -> float | None:
            now_s, energy_j = self._measure()
            return machine.iteration(now_s, energy_j, samples)

        self._drive(step)

    def epoch_end(self) -> None:
        """An epoch's last iteration is over."""
        machine = self._machine
        if machine is not None and not machine.done:

            def step(machine: PowerLimitOptimizer) -> None:
                (machine.end_epoch if self._exact else machine.leave_epoch)(*self._measure())

            self._drive(step)

    @property
    def profiling(self) -> bool:
        """Whether limits are still being tried."""
        return self._machine is not None and not self._machine.done

    @property
    def max_power_w(self) -> float | None:
        """Zeus's MAXPOWER of the whole job, as it was at the start; None where GPUs have no limits."""
        return self._max_power_w

    @property
    def report(self) -> LimitReport:
        """What was found and done so far."""
        machine = self._machine
        profile = machine.profile if machine is not None else self._known
        best = None if profile is None else self._rule.choose(profile)
        saved = None if profile is None or best is None else savings(profile, best)
        try:
            limit_w = self._sensors[0].power_limit_w()
        except PenstockError:
            limit_w = None
        return LimitReport(
            limit_w,
            best,
            profile,
            self._observe or bool(self._reason),
            self._reason,
            self._known is not None,
            None if saved is None else saved[0],
            None if saved is None else saved[1],
        )

    # -- inside

    def _measure(self) -> tuple[float, float]:
        if self._sync is not None:
            self._sync()
        return self._now(), sum(sensor.energy_j() for sensor in self._sensors)

    def _drive(self, step: Callable[[PowerLimitOptimizer], float | None]) -> None:
        machine = self._machine
        assert machine is not None
        try:
            limit_w = step(machine)
            if limit_w is not None:
                self._guard.set(limit_w)
        except (SensorError, Unsupported) as error:
            self._machine = None
            self._guard.restore()
            self._give_up(f"Power limits are no longer optimised: {error}")
            return
        if machine.done and not self._saved:
            self._saved = True
            profile = machine.profile
            if profile is not None and self._known is None:
                self._keep(self._key, profile)
            self._tell_result()

    def _keep_part(self) -> None:
        """A training that was over before its profile: the next one of its kind goes on from there."""
        machine = self._machine
        if machine is None or machine.done or len(machine.seen) <= self._begun:
            return
        self._begun = len(machine.seen)
        part = PowerProfile(self._sensors[0].name, self._world_size, machine.limits_w[0], machine.seen)
        self._keep(part_key(self._key), part)

    def _keep(self, key: str, profile: PowerProfile) -> None:
        if self._cache is not None:
            try:
                self._cache.put(key, profile.to_json())
            except (OSError, PenstockError) as error:  # a full disk must not end a training
                log.warning("The power profile %r is not kept: %s", key, error)

    def _tell_result(self) -> None:
        log.info("%s", self.report)

    def _give_up(self, text: str) -> None:
        self._reason = text
        self._tell(text)

    def _taken(self, low_w: float, high_w: float) -> PowerProfile | None:
        """The known profile, of the limits that these devices take: cards of one name may take different ones.

        None where it leaves a step or more of what they take untried: the best may lie there.
        """
        if self._known is None:
            return None
        limits = tuple(seen for seen in self._known.limits if low_w <= seen.limit_w <= high_w)
        tried_w = [seen.limit_w for seen in limits]
        if not tried_w or max(high_w - max(tried_w), min(tried_w) - low_w) >= self._step_w:
            return None
        return replace(self._known, max_limit_w=high_w, limits=limits)

    def _load(self, key: str) -> PowerProfile | None:
        value = self._cache.get(key) if self._cache is not None else None
        if value is None:
            return None
        try:
            return PowerProfile.from_json(value)
        except InvalidInput as error:
            log.warning("A cached power profile is not used: %s", error)
            return None


def savings(profile: PowerProfile, chosen: LimitProfile) -> tuple[float, float]:
    """The parts of energy and of time that a limit saves against the highest one; of no energy, nothing."""
    top = profile.highest
    saved = 1 - chosen.energy_per_sample_j / top.energy_per_sample_j if top.power_w > 0 else 0.0
    return saved, 1 - top.throughput / chosen.throughput


def would_have_taken(
    energy: Measurement, time_s: float, profile: PowerProfile, ran_at: LimitProfile, chosen: LimitProfile
) -> tuple[Measurement, float]:
    """Energy and time of a training that ran at one limit, had it run at another (Zeus 5, Observer Mode)."""
    energy_ratio = chosen.energy_per_sample_j / ran_at.energy_per_sample_j if ran_at.power_w > 0 else 1.0
    return energy.scaled(
        energy_ratio, source=Source.ESTIMATED
    ), time_s * ran_at.throughput / chosen.throughput
