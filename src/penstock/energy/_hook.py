"""The meter of a trial, made in its worker from the devices it runs on."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from penstock.core import Measurement
from penstock.core.check import number
from penstock.core.errors import InvalidInput, PenstockError, SensorError
from penstock.energy._discover import sensors_for
from penstock.energy._estimate import EstimateSensor, cores_allowed
from penstock.energy._limiter import FileCache, PowerLimiter
from penstock.energy._meter import Meter, Window
from penstock.energy._profile import LimitRule
from penstock.energy._sensor import DeviceKind
from penstock.energy._shared import SharedSensor
from penstock.energy._solo import TOLD_S, SoloMeter


@final
class EpochMeter:
    """The hook of a run: a window per epoch (SM2 Eq. 1: average watts x time of the epoch).

    Epochs don't nest: a second ``epoch_begin`` starts the epoch anew. What is drawn from the first ``epoch_begin`` on
    and by no epoch (a set-up before it starts anew, what comes between epochs and after them, an epoch that never
    ends) is told by ``other``. An energy that can't be read is None with a warning once, never 0, and never ends a
    training.

    Args:
        meter: What to read.
        fraction: The part of the devices this run holds, its weight when others share them.
        limiter: Finds the best power limit meanwhile, for a run that has its devices to itself and tells of its
            iterations; started by whoever made it, stopped by ``close``.
    """

    __slots__ = (
        "_fraction",
        "_inside",
        "_inside_s",
        "_iterated",
        "_limiter",
        "_meter",
        "_shared",
        "_warned",
        "_whole",
        "_window",
        "last",
    )

    def __init__(self, meter: Meter, *, fraction: float = 1.0, limiter: PowerLimiter | None = None) -> None:
        self._meter = meter
        self._fraction = fraction
        self._limiter = limiter
        self._iterated = False
        self._shared = [sensor for sensor in meter.sensors if isinstance(sensor, SharedSensor)]
        self._window: Window | None = None
        self._warned = False
        self.last: Window | None = None
        # One window since the first begin, and joules and seconds that epochs told.
        self._whole: Window | None = None
        self._inside: dict[str, float] = {}
        self._inside_s = 0.0

    def epoch_begin(self) -> None:
        """An epoch begins now."""
        for sensor in self._shared:
            try:
                sensor.join(self._fraction)
            except SensorError:
                continue  # the window says why
        self._window = self._meter.window("epoch")
        if self._whole is None:
            self._whole = self._window.since_then("trial")
            self._inside, self._inside_s = {}, 0.0
        if self._limiter is not None:
            self._iterated = False
            self._limiter.epoch_begin()

    @property
    def on_iteration(self) -> Callable[[float], None] | None:
        """What to call after each iteration with the number of its samples; None: nobody wants to know."""
        return None if self._limiter is None else self.iteration

    def iteration(self, samples: float = 1.0) -> None:
        """An iteration of the epoch is over."""
        if self._limiter is not None:
            self._iterated = True
            self._limiter.iteration(samples)

    def epoch_end(self) -> Measurement | None:
        """The epoch's energy; None if it can't be told, or no epoch has begun."""
        window, self._window = self._window, None
        if window is None:
            return None
        if self._limiter is not None:
            if not self._iterated:
                self._limiter.iteration()  # a training that tells of epochs alone: each is one iteration
            self._limiter.epoch_end()
        self.last = window.end()
        try:
            drawn = window.energy
        except SensorError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"Energy is not measured from here on: {error}", RuntimeWarning, stacklevel=2)
            return None
        inside = self._inside
        for name, part in window.devices.items():
            inside[name] = inside.get(name, 0.0) + part.value
        self._inside_s += window.time_s
        return drawn

    def plain_end(self) -> tuple[float, str, int, float] | None:
        """``epoch_end`` as value, unit, source's number and uncertainty: what is sent to the study."""
        drawn = self.epoch_end()
        return None if drawn is None else drawn.plain

    def other(self) -> tuple[float, str, int, float] | None:
        """What no epoch drew since the first one began, or since this was asked last; told as by ``plain_end``.

        An epoch that has begun is none any more: what it drew is part of the answer. Less than half a millisecond is
        not worth a reading: it is None, and goes to whatever runs next on the same sensors.
        """
        # All of the time minus what the epochs told, device by device.
        whole, meter = self._whole, self._meter
        self._window = None
        if whole is None:
            return None
        before_s, meter.outside_s = meter.outside_s, 0.0  # of runs before, too short to be told
        time_s = whole.time_s
        outside_s = time_s - self._inside_s + before_s
        if outside_s < TOLD_S or time_s <= 0:
            meter.outside_s = max(0.0, outside_s)
            self._whole = None
            return None
        self._whole = whole.end().from_here("trial")
        inside, inside_s = self._inside, self._inside_s
        self._inside, self._inside_s = {}, 0.0
        try:
            drawn = whole.energy
        except SensorError:
            return None
        time_s = whole.time_s
        outside_s = time_s - inside_s + before_s
        joules = 0.0
        for sensor in meter.sensors:
            part_j = whole.devices[sensor.id].value
            if time_s < 2 * sensor.resolution_s:  # watts x time, as the window itself
                joules += part_j * outside_s / time_s
            else:
                joules += max(0.0, part_j - inside.get(sensor.id, 0.0)) + part_j * before_s / time_s
        return (joules, "J", int(drawn.source), drawn.uncertainty) if joules > 0 else None

    def weigh(self, fraction: float) -> None:
        """The part of its devices that the run holds, from the next ``epoch_begin`` on."""
        self._fraction = fraction

    def close(self) -> None:
        """The run is over: what ``other`` has not told is nobody's, and others on the devices get all of them."""
        self._window = self._whole = None
        if self._limiter is not None:
            self._limiter.stop()
        for sensor in self._shared:
            sensor.pause()


_meters: dict[tuple[object, ...], Meter] = {}
_hooks: dict[tuple[object, ...], SoloMeter] = {}  # trials take them over from each other
for _kept in (_meters, _hooks):  # a sensor is of the process that has made it
    os.register_at_fork(after_in_child=_kept.clear)


@final
@dataclass(frozen=True, slots=True)
class PowerLimits:
    """How a study finds and sets its GPUs' power limits; ``Study(power_limits=rule)`` is short for this.

    Attributes:
        rule: Which limit is best.
        observe: Profile, but keep the highest limit, and say what would have been saved.
        slice_s: How long each limit is profiled.
        step_w: Between the limits that are tried.
    """

    rule: LimitRule
    observe: bool = False
    slice_s: float = 5.0
    step_w: float = 25.0

    def __post_init__(self) -> None:
        if not isinstance(self.rule, LimitRule):
            raise InvalidInput(
                f"power_limits takes a rule, such as EtaCost(0.5) or LeastEnergy(), got {self.rule!r}."
            )
        number("slice_s", self.slice_s, "Give seconds.")
        number("step_w", self.step_w, "Give watts.")
        if not self.slice_s > 0 or not self.step_w > 0:
            raise InvalidInput(
                f"slice_s and step_w must be positive, got {self.slice_s!r} and {self.step_w!r}."
            )


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How a run's power limit is found.

    Attributes:
        rule: Which limit is best.
        task: Names the task in the cache.
        profiles: File that keeps the profiles, shared by the study's workers.
        observe: Only say what would be saved.
        slice_s: How long each limit is profiled.
        step_w: Between the limits that are tried.
    """

    rule: LimitRule
    task: str
    profiles: Path
    observe: bool = False
    slice_s: float = 5.0
    step_w: float = 25.0


PROBLEMS = "power-problem/"
"""Under keys that begin so, workers leave word in the file of profiles why a limit is not set."""

_told: set[str] = set()


def _problem(limits: LimitOptions, text: str) -> None:
    """Leave word for the study, once per process."""
    if text not in _told:
        _told.add(text)
        try:
            FileCache(limits.profiles).put(f"{PROBLEMS}{text}", text)
        except OSError:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@final
@dataclass(frozen=True, slots=True)
class LimitedMeters:
    """Makes the meters of trials whose GPUs get a power limit. Can be pickled.

    Attributes:
        limits: How.
    """

    limits: LimitOptions

    def __call__(self, devices: tuple[str, ...]) -> EpochMeter | SoloMeter | None:
        """For a trial of which nothing but its devices is known."""
        return self.for_trial(devices, {})

    def for_trial(self, devices: tuple[str, ...], config: Mapping[str, Any]) -> EpochMeter | SoloMeter | None:
        """For a trial of this configuration; its ``batch_size`` is part of the profile's key."""
        return make_meter(devices, limits=self.limits, batch_size=batch_size_of(config))

    def for_group(
        self, devices: tuple[str, ...], config: Mapping[str, Any], members: int
    ) -> EpochMeter | SoloMeter | None:
        """For so many trials that train as one, which load a GPU otherwise than one: they have their own profile."""
        limits = replace(self.limits, task=f"{self.limits.task} fused {members}")
        return make_meter(devices, limits=limits, batch_size=batch_size_of(config))


def batch_size_of(config: Mapping[str, Any]) -> int:
    """The batch size that a configuration names, for a profile's key; 0: it names none."""
    size = config.get("batch_size", 0)
    return size if isinstance(size, int) and not isinstance(size, bool) else 0


def make_meter(
    devices: tuple[str, ...],
    *,
    cores: float | None = None,
    fraction: float = 1.0,
    limits: LimitOptions | None = None,
    batch_size: int = 0,
) -> EpochMeter | SoloMeter | None:
    """The meter of one trial, in the process that runs it. Sensors are opened once per process.

    Can be pickled, also as a ``functools.partial`` with ``cores``.

    Args:
        devices: What the trial runs on: ``("cpu",)``, ``("cuda:0", "cuda:1")``.
        cores: CPU threads of the slot, whose idle power the trial is charged in the estimate; what executors tell a
            worker by OMP_NUM_THREADS if None.
        fraction: The part of the devices it holds.
        limits: Find and set the best power limit of its GPUs; for exclusive placements.
        batch_size: Of the trial, for the profile's key.

    Returns:
        None, with a warning, where nothing can be measured.
    """
    if cores is None:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        cores = min(float(threads), cores_allowed()) if threads.isdigit() and int(threads) else None
    key = (devices, cores)
    hook = _hooks.get(key) if limits is None else None
    if hook is not None:
        return hook
    meter = _meters.get(key)
    if meter is None:
        try:
            meter = Meter(sensors_for(devices, cores=cores))
        except PenstockError as error:
            warnings.warn(f"Energy is not measured: {error}", RuntimeWarning, stacklevel=2)
            return None
        _meters[key] = meter
    if limits is None:
        first = meter.sensors[0]
        if len(meter.sensors) == 1 and isinstance(first, EstimateSensor) and not first.resolution_s:
            hook = _hooks[key] = SoloMeter(first)  # one trial at a time, of which it keeps nothing
            return hook
        return EpochMeter(meter, fraction=fraction)
    return EpochMeter(meter, fraction=fraction, limiter=_limiter(meter, limits, batch_size))


def _limiter(meter: Meter, limits: LimitOptions, batch_size: int) -> PowerLimiter | None:
    """The started limiter of a run, or None with word left why there is none: a run never fails for it."""
    gpus = [sensor for sensor in meter.sensors if sensor.kind is DeviceKind.GPU]
    if not gpus:
        return None  # the study knows that it runs on CPUs
    try:
        without = [sensor for sensor in gpus if sensor.power_limit_range_w is None]
        if without:
            _problem(limits, f"{without[0].name} ({without[0].id}) has no power limit to set.")
            return None
        limiter = PowerLimiter(
            gpus,
            rule=limits.rule,
            task=limits.task,
            batch_size=batch_size,
            cache=FileCache(limits.profiles),
            observe=limits.observe,
            slice_s=limits.slice_s,
            settle_s=min(0.5, limits.slice_s / 10),
            step_w=limits.step_w,
            exact_epochs=False,
            sync=wait_for_gpu,
            tell=lambda text: _problem(limits, text),
        )
        limiter.start()
    except (PenstockError, OSError) as error:
        _problem(limits, f"The power limit stays as it is: {error}")
        return None
    return limiter


def wait_for_gpu() -> None:
    """Wait for the GPU, so that a slice's end is the end of its work. Never loads torch."""
    torch = sys.modules.get("torch")
    cuda = None if torch is None else getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        cuda.synchronize()
