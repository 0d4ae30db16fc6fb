"""One run of a recurring job in this process: metered, its power limits profiled, stopped at target or cost."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from penstock.core import Measurement, Source
from penstock.core.errors import PenstockError, SensorError, Unsupported
from penstock.energy import EtaCost, LimitGuard, Meter, PowerLimitOptimizer, Sensor, Window, wait_for_gpu
from penstock.recurring._history import Decision, JobSpec, Result
from penstock.recurring._target import Target
from penstock.train import Task
from penstock.train._checkpoint import MemoryCheckpoints, Report
from penstock.train._worker import Settings, Spec, execute

if TYPE_CHECKING:
    from penstock.core import Clock


@final
class Gauge:
    """The epoch meter of one run: adds up time and energy, and tries the power limits to be profiled.

    A training that tells of its iterations (a Task does, a function by ``run.iteration``) has its limits profiled in
    slices of ``slice_s`` during its first epoch (Zeus 4.2). Any other is told apart by epochs alone: the limits to
    profile then take the first epochs in turn. Both go from the highest limit down, by the power-limit optimiser of
    the energy room.
    """

    def __init__(
        self,
        meter: Meter,
        spec: JobSpec,
        decision: Decision,
        guard: LimitGuard | None,
        *,
        slice_s: float = 5.0,
    ) -> None:
        self._meter = meter
        self._spec = spec
        self._guard = guard
        self._window: Window | None = None
        self._machine: PowerLimitOptimizer | None = None
        self.time_s = 0.0
        self.energy_j = 0.0
        self._source: Source | None = None  # of what was added up so far
        self.epochs = 0
        self.last_cost = 0.0
        self._sums: dict[float, tuple[int, float, float]] = {}
        self._limit_w = None if guard is None else decision.limit_w
        self._changed = False  # the limit changed within the present epoch
        self._iterated = False  # iterations were told of, ever
        self._samples = 0.0  # in the present epoch
        self._epoch_samples = 0.0  # in the last whole epoch
        if guard is not None and decision.profile_w:
            self._limits_w = tuple(decision.profile_w)
            self._machine = self._profiler(slice_s, slice_s, min(0.5, slice_s / 10))
            self._set(max(decision.profile_w))
        elif guard is not None and decision.limit_w is not None:
            self._set(decision.limit_w)

    def _profiler(self, slice_s: float, warmup_s: float, settle_s: float) -> PowerLimitOptimizer:
        return PowerLimitOptimizer(
            self._limits_w,
            EtaCost(self._spec.eta),
            max_limit_w=self._spec.max_power_w,
            slice_s=slice_s,
            warmup_s=warmup_s,
            settle_s=settle_s,
        )

    @property
    def measured(self) -> dict[float, tuple[float, float]]:
        """Time of an epoch and mean power at each limit."""
        found: dict[float, tuple[float, float]] = {}
        if self._iterated and self._machine is not None and self._epoch_samples > 0:
            profile = self._machine.profile
            slices = self._machine.seen if profile is None else profile.limits
            found = {s.limit_w: (self._epoch_samples / s.throughput, s.power_w) for s in slices}
        # Whole epochs tell better than slices, which know nothing of what an epoch does besides its iterations.
        whole = {w: (t / n, j / t) for w, (n, t, j) in self._sums.items() if t > 0}
        both = [whole[w][0] / found[w][0] for w in found if w in whole]
        more = sum(both) / len(both) if both else 1.0
        return {w: (time_s * more, power_w) for w, (time_s, power_w) in found.items()} | whole

    @property
    def source(self) -> Source:
        """Where the energy figure comes from; while nothing was read, the weakest of what would be."""
        if self._source is not None:
            return self._source
        return max((sensor.source for sensor in self._meter.sensors), default=Source.ESTIMATED)

    @property
    def cost(self) -> float:
        """What the run has cost so far (Eq. 2)."""
        return self._spec.cost(self.energy_j, self.time_s)

    @property
    def on_iteration(self) -> Callable[[float], None] | None:
        """What to call after each iteration; None: nobody wants to know."""
        return None if self._machine is None else self.iteration

    def epoch_begin(self) -> None:
        """An epoch begins."""
        self._window = self._meter.window("epoch")
        self._changed = False
        self._samples = 0.0
        if self._machine is not None and not self._machine.done:
            self._follow(self._machine.begin_epoch(self.time_s, self.energy_j))
            self._changed = False  # the epoch begins with it

    def iteration(self, samples: float) -> None:
        """An iteration of so many samples is over."""
        self._samples += samples
        self._iterated = True
        machine, window = self._machine, self._window
        if machine is None or machine.done or window is None:
            return
        now_s = self.time_s + window.time_s
        energy_j = None
        if machine.wants_reading(now_s):
            wait_for_gpu()
            now_s = self.time_s + window.time_s
            with contextlib.suppress(SensorError):  # the slice is made longer, until the sensor answers
                energy_j = self.energy_j + window.energy.joules
        self._follow(machine.iteration(now_s, energy_j, samples))

    def epoch_end(self) -> Measurement | None:
        """What it drew."""
        if self._window is None:
            return None
        window, self._window = self._window.end(), None
        unread: SensorError | None = None
        try:
            energy: Measurement = window.energy
        except SensorError as error:
            energy, unread = self._guessed(window.time_s, error), error
        self._read(energy.source)
        before, begun = self.cost, (self.time_s, self.energy_j)
        self.time_s += window.time_s
        self.energy_j += energy.joules
        self.epochs += 1
        self.last_cost = self.cost - before
        if unread is not None:
            return energy  # it tells nothing of the limit it ran at
        if not self._changed:
            n, time_s, energy_j = self._sums.get(self._limit_w or 0.0, (0, 0.0, 0.0))
            self._sums[self._limit_w or 0.0] = (n + 1, time_s + window.time_s, energy_j + energy.joules)
        if self._iterated:
            self._epoch_samples = self._samples
        if self._machine is not None and not self._machine.done:
            if not self._iterated:
                if (
                    self.epochs == 1
                ):  # told apart by epochs alone: begin anew, with the first epoch as a slice
                    self._machine = self._profiler(1e-9, 0.0, 0.0)
                    self._machine.begin_epoch(*begun)
                self._follow(self._machine.iteration(self.time_s, self.energy_j))
            if self._machine is not None:
                self._machine.end_epoch(self.time_s, self.energy_j)
        return energy

    def close(self) -> None:
        """The run is over: what was spent since its last whole epoch counts too, though not as an epoch."""
        window, self._window = self._window, None
        if window is not None:
            with contextlib.suppress(SensorError):
                energy = window.end().energy
                self.energy_j += energy.joules
                self.time_s += window.time_s
                # A moment after the last epoch is too short for most counters and estimated; next to epochs that were
                # measured it is less than their own uncertainty, and does not make an estimate of them.
                if self._source is None or energy.joules > 0.01 * self.energy_j:
                    self._read(energy.source)
                return
            self._read(Source.ESTIMATED)  # a part of the sum is missing

    def _guessed(self, time_s: float, error: SensorError) -> Measurement:
        """What an epoch drew that no sensor told of: as much as those before it, in its time.

        Raises:
            SensorError: There are none before it: nothing of this run is known.
        """
        if not self.time_s > 0.0:
            raise error
        warnings.warn(f"The energy of an epoch is estimated by those before it: {error}", RuntimeWarning, 2)
        return Measurement(self.energy_j / self.time_s * time_s, "J", Source.ESTIMATED, 0.5)

    def _read(self, source: Source) -> None:
        self._source = source if self._source is None else max(self._source, source)

    def _follow(self, limit_w: float | None) -> None:
        if limit_w is not None and limit_w != self._limit_w:
            self._changed = True
            self._set(limit_w)

    def _set(self, limit_w: float) -> None:
        if self._guard is None:
            return
        try:
            self._guard.set(limit_w)
            self._limit_w = limit_w
        except (SensorError, Unsupported) as error:  # a training does not end for it
            warnings.warn(
                f"The power limit stays as it was before the run from here on: {error}", RuntimeWarning, 2
            )
            self._guard.restore()
            self._guard = self._machine = self._limit_w = None
            self._changed = True

    @property
    def limited(self) -> bool:
        """Whether power limits can be set."""
        return self._guard is not None


@final
class _Judge:
    """The sink of one run: stops it at the target, or before its cost limit is exceeded."""

    def __init__(self, target: Target, gauge: Gauge, cost_limit: float | None) -> None:
        self._target = target
        self._gauge = gauge
        self._cost_limit = cost_limit
        self.reached = False
        self.last: dict[str, float] = {}

    def reported(self, report: Report) -> None:
        """An epoch is over."""
        self.last = dict(report[1])
        self.reached = self.reached or self._target.reached(report[1])

    def saved(self, epoch: int, path: str) -> None:
        """A checkpoint is complete."""

    def told(self) -> tuple[str, bool] | None:
        """Whether to stop."""
        if self.reached:
            return "the target is reached", False
        limit = self._cost_limit
        if limit is not None and self._gauge.cost + self._gauge.last_cost > limit:
            return f"one more epoch would exceed the cost limit of {limit:.4g} J", False
        return None


@dataclass(frozen=True, slots=True)
class Launched:
    """What became of one run: its result, its last metrics, where the energy figure comes from, why it ended, and
    whether power limits could be set."""

    result: Result
    metrics: Mapping[str, float]
    source: Source
    reason: str
    limited: bool


def launch(
    work: Callable[[Any], Any],
    decision: Decision,
    spec: JobSpec,
    *,
    config: Mapping[str, Any],
    target: Target,
    max_epochs: int | None,
    seed: int,
    sensors: Sequence[Sensor],
    clock: Clock | None,
    devices: tuple[str, ...],
    threads: int,
    slice_s: float = 5.0,
) -> Launched:
    """Run ``work`` once as decided; whatever it does, there is a result."""
    meter = Meter(sensors, clock=clock)
    limited = [sensor for sensor in sensors if sensor.power_limit_range_w is not None]
    guard: LimitGuard | None = None
    if limited and spec.limits_w:
        guard = LimitGuard(limited)
        try:
            guard.hold()
        except PenstockError:
            guard = None  # no permission: the limit stays as it is, and is measured as "no limit set"
    try:
        gauge = Gauge(meter, spec, decision, guard, slice_s=slice_s)
        judge = _Judge(target, gauge, decision.cost_limit)
        end = execute(
            work.over(max_epochs) if isinstance(work, Task) else work,
            Spec(decision.number, dict(config), seed, 0, max_epochs, True, None, None, 0, 0),
            Settings(None, (target.metric,), make_meter=lambda _: gauge),
            judge,
            devices=devices,
            threads=threads,
            checkpoints=MemoryCheckpoints({}, decision.number, None),
        )
    finally:
        if guard is not None:
            guard.restore()
    if end.status == "failed" and end.reason.startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt
    error = end.reason if end.status == "failed" and not judge.reached else ""
    result = Result(
        decision.number,
        float(gauge.epochs),
        gauge.time_s,
        gauge.energy_j,
        judge.reached and gauge.epochs > 0,
        gauge.measured,
        error,
    )
    return Launched(result, judge.last, gauge.source, end.reason or error, gauge.limited)
