"""EnergyLoader: energy-aware training in two lines, around any PyTorch DataLoader (Zeus Listing 1)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, final

from penstock.core import Clock, Measurement, WallClock
from penstock.core.errors import InvalidInput, SensorError
from penstock.energy import (
    DeviceKind,
    EtaCost,
    FileCache,
    Grid,
    LimitReport,
    LimitRule,
    Meter,
    PowerLimiter,
    ProfileCache,
    Sensor,
    Window,
    co2,
    default_sensors,
    grid,
    wait_for_gpu,
)

log = logging.getLogger("penstock.energy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """What a training spent.

    Attributes:
        epochs: Epochs that ended.
        time_s: Their time, evaluation and all.
        energy: Their energy; None if it could not be told.
        co2: Grams of CO2e of it.
        cost_j: Zeus Eq. 2, eta x energy + (1 - eta) x MAXPOWER x time; None without a MAXPOWER.
        metric: The last metric reported.
        stopped: Why ``epochs()`` ended: ``"epochs"``, ``"target"`` or ``"cost"``; empty if it has not.
        limits: The power limit's part of it; None without a GPU.
    """

    epochs: int
    time_s: float
    energy: Measurement | None
    co2: Measurement | None
    cost_j: float | None
    metric: float | None
    stopped: str
    limits: LimitReport | None

    def __str__(self) -> str:
        energy = "energy not measurable" if self.energy is None else f"{self.energy}, {self.co2} CO2e"
        text = f"{self.epochs} epochs, {self.time_s:.1f} s, {energy}"
        return f"{text}. {self.limits}" if self.limits is not None else text


@final
class EnergyLoader(Generic[T]):
    """Wraps a DataLoader: meters the training, finds the best GPU power limit during the first epoch, applies it,
    stops at the target or when the cost gets too high, and reports.

    ```python
    loader = pk.EnergyLoader(DataLoader(...), epochs=100, target=0.65)
    for epoch in loader.epochs():           # may stop early
        for batch in loader:
            ...                             # learn from batch
        loader.report_metric(accuracy)
    print(loader.report)
    ```

    Without ``epochs()`` each pass over the loader is an epoch: the power limit is found just the same, but nothing
    stops early and what lies between passes is not counted. Everything else is the wrapped loader's (``len``,
    ``dataset``, ``batch_size``...). ``close``, the end of a ``with`` block or of ``epochs()`` restore the limits; later
    passes are not counted.

    With several processes (``torchrun`` on one machine) the process of local rank 0 meters all of the job's GPUs, sets
    their limits and decides; the others follow. On several machines limits are left alone, and energy and cost are the
    first one's.

    Args:
        loader: Any iterable of batches.
        epochs: How many ``epochs()`` goes at most.
        target: Stop when a reported metric reaches it.
        maximize: Whether more of the metric is better.
        eta: Zeus's knob: 1 is energy alone, 0 time alone.
        rule: Another rule for the power limit than ``EtaCost(eta)``.
        cost_threshold_j: Stop before an epoch that would take the cost (Eq. 2) above it, as the epochs so far go.
        max_power_w: MAXPOWER of one device for the cost, where the GPU does not tell its own.
        task: Names the job, for the cache.
        batch_size: Of the whole job; the loader's times the number of GPUs if None.
        cache: Keeps power profiles: a path, a ``Store``, or None.
        observe: Only look: keep the highest limit, report what would have been saved.
        region: Country of the electricity, for CO2e; the world average, flagged, if None.
        sensors: What to read; the default sensors if None. GPUs among them get their limit set.
        slice_s: How long each limit is profiled.
        warmup_s: The first slice, not measured.
        settle_s: Left out after each change of limit.
        step_w: Between the limits that are tried.
        clock: A simulation's time; the machine's if None.
        tell: Gets sentences for the user; the log if None.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *,
        epochs: int | None = None,
        target: float | None = None,
        maximize: bool = True,
        eta: float = 0.5,
        rule: LimitRule | None = None,
        cost_threshold_j: float | None = None,
        max_power_w: float | None = None,
        task: str = "",
        batch_size: int | None = None,
        cache: ProfileCache | Path | str | None = None,
        observe: bool = False,
        region: str | None = None,
        sensors: Sequence[Sensor] | None = None,
        slice_s: float = 5.0,
        warmup_s: float | None = None,
        settle_s: float = 0.5,
        step_w: float = 25.0,
        clock: Clock | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        given: Any = loader
        if isinstance(given, str | bytes) or not (
            isinstance(given, Iterable) or hasattr(given, "__getitem__")
        ):
            raise InvalidInput(
                f"EnergyLoader wraps an iterable of batches, such as a DataLoader, got {loader!r}."
            )
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
            raise InvalidInput(f"epochs must be a whole number of at least 1, got {epochs!r}.")
        if cost_threshold_j is not None and not cost_threshold_j > 0:
            raise InvalidInput(f"cost_threshold_j must be positive, got {cost_threshold_j!r}.")
        self._loader = loader
        self._epochs = epochs
        self._target = target
        self._maximize = maximize
        self._eta = EtaCost(eta).eta
        self._rule: LimitRule = EtaCost(eta) if rule is None else rule
        self._threshold_j = cost_threshold_j
        self._max_power_w = max_power_w
        self._task = task
        self._cache = FileCache(cache) if isinstance(cache, str | Path) else cache
        self._observe = observe
        self._grid: Grid = grid(region)
        self._given_sensors = None if sensors is None else tuple(sensors)
        self._slice_s, self._warmup_s, self._settle_s, self._step_w = slice_s, warmup_s, settle_s, step_w
        self._clock = WallClock() if clock is None else clock
        self._tell = tell if tell is not None else log.warning
        self._batch_size = batch_size
        self._meter: Meter | None = None
        self._limiter: PowerLimiter | None = None
        self._own_w: float | None = None  # MAXPOWER of this machine of several
        self._started = self._closed = False
        self._world = _World.find()
        self._window: Window | None = None
        self._done = 0
        self._time_s = 0.0
        self._energy: Measurement | None = None
        self._unknown = False
        self._metric: float | None = None
        self._stopped = ""

    # -- the wrapped loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[T]:
        if self._closed:  # a pass after the training, over its data: none of it
            yield from self._loader
            return
        self._start()
        alone = self._window is None  # no epochs() around it: this pass is an epoch
        if alone:
            self._begin()
        limiter = self._limiter
        if limiter is not None:
            limiter.epoch_begin()
        try:
            for batch in self._loader:
                yield batch
                if limiter is not None and limiter.profiling:
                    limiter.iteration(_samples(batch) * self._world.size)
        finally:
            if limiter is not None:
                limiter.epoch_end()
            if alone:
                self._end()

    # -- epochs

    def epochs(self) -> Iterator[int]:
        """Epoch numbers from 0, until the last one, the target or the cost threshold.

        Raises:
            InvalidInput: ``epochs`` was not given, or this loader's training has ended.
        """
        if self._epochs is None:
            raise InvalidInput("EnergyLoader(epochs=...) says how many epochs() may go; it was not given.")
        if self._closed:
            raise InvalidInput(
                "This EnergyLoader's training has ended: its power limits are restored and nothing is metered any "
                "more. Make a new EnergyLoader for another training."
            )
        self._start()
        try:
            for epoch in range(self._epochs):
                if self._agree(self._over_cost()):
                    self._stopped = "cost"
                    self._say(
                        f"Stopped before epoch {epoch}: it would take the cost above {self._threshold_j:g} J"
                        f" (now {self.cost_j or 0.0:.4g} J)."
                    )
                    return
                self._begin()
                try:
                    yield epoch
                finally:
                    self._end()
                if self._reached():
                    self._stopped = "target"
                    return
            self._stopped = "epochs"
        finally:
            self.close()

    def report_metric(self, metric: float) -> None:
        """The epoch's validation metric; ``epochs()`` ends when it reaches the target. On every rank the same."""
        self._metric = float(metric)

    # -- results

    @property
    def cost_j(self) -> float | None:
        """Zeus Eq. 2 so far; None if the energy or MAXPOWER is not known."""
        if self._energy is None or self._unknown:
            return 0.0 if self._done == 0 else None
        if self._eta == 1:
            return self._energy.joules
        max_power_w = self._max_w()
        if max_power_w is None:
            return None
        return self._eta * self._energy.joules + (1 - self._eta) * max_power_w * self._time_s

    @property
    def report(self) -> EnergyReport:
        """What was spent so far."""
        energy = None if self._unknown else self._energy
        return EnergyReport(
            self._done,
            self._time_s,
            energy,
            None if energy is None else co2(energy, self._grid),
            self.cost_j if self._done else None,
            self._metric,
            self._stopped,
            None if self._limiter is None else self._limiter.report,
        )

    def close(self) -> None:
        """Restore the power limits and let the sensors go. Idempotent."""
        if self._closed or not self._started:
            return
        self._closed = True
        if self._limiter is not None:
            self._limiter.stop()
        if self._meter is not None and self._given_sensors is None:
            for sensor in self._meter.sensors:
                sensor.close()
        if self._done:
            log.info("%s", self.report)

    def __enter__(self) -> EnergyLoader[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _start(self) -> None:
        if self._started:
            return
        try:
            self._open()
        except BaseException:
            # A second epochs() is refused just the same, not let run without a meter.
            self._meter = self._limiter = None
            for sensor in self.__dict__.pop("_default_sensors", ()):
                sensor.close()
            raise
        self._started = True

    def _open(self) -> None:
        if (
            self._threshold_j is not None
            and self._world.leads
            and self._eta < 1
            and self._max_power_w is None
        ):
            sensors = self._sensors()
            if not _with_limits(sensors):
                raise InvalidInput(
                    f"A cost with eta {self._eta:g} needs MAXPOWER, and no GPU here tells one: give max_power_w, or"
                    " eta=1."
                )
        if not self._world.leads:
            return
        sensors = self._sensors()
        self._meter = Meter(sensors, clock=self._clock)
        gpus = _with_limits(sensors)
        if not gpus:
            return
        if self._world.machines > 1:
            self._own_w = sum(range_w[1] for gpu in gpus if (range_w := gpu.power_limit_range_w) is not None)
            self._say(
                "The job runs on several machines: power limits are left alone, energy is this machine's."
            )
            return
        limiter = PowerLimiter(
            gpus,
            rule=self._rule,
            task=self._task,
            batch_size=self._job_batch_size(len(gpus)),
            cache=self._cache,
            observe=self._observe,
            world_size=max(len(gpus), self._world.size),
            sync=wait_for_gpu,
            tell=self._tell,
            slice_s=self._slice_s,
            warmup_s=self._warmup_s,
            settle_s=self._settle_s,
            step_w=self._step_w,
            now=self._clock.now_s,
        )
        limiter.start()
        self._limiter = limiter

    def _sensors(self) -> Sequence[Sensor]:
        if self._meter is not None:
            return self._meter.sensors
        if self._given_sensors is not None:
            return self._given_sensors
        if not hasattr(self, "_default_sensors"):
            self._default_sensors = default_sensors()
        return self._default_sensors

    def _job_batch_size(self, gpus: int) -> int:
        if self._batch_size is not None:
            return self._batch_size
        own = getattr(self._loader, "batch_size", None) or 0
        return int(own) * self._world.size

    def _begin(self) -> None:
        if self._meter is not None:
            self._window = self._meter.window("epoch")

    def _end(self) -> None:
        self._done += 1
        window, self._window = self._window, None
        if window is None:
            return
        wait_for_gpu()
        window.end()
        self._time_s += window.time_s
        try:
            energy = window.energy
        except SensorError as error:
            if not self._unknown:
                self._say(f"Energy is not measured from here on: {error}")
            self._unknown = True
            return
        self._energy = energy if self._energy is None else self._energy + energy

    def _max_w(self) -> float | None:
        """MAXPOWER of the devices whose energy is counted: on several machines, of this one's."""
        if self._max_power_w is not None:
            here = self._world.size if self._world.machines == 1 else self._world.local_size
            return self._max_power_w * here
        return self._own_w if self._limiter is None else self._limiter.max_power_w

    def _over_cost(self) -> bool:
        """Whether the next epoch, if it costs what they did on average, would go over the threshold (Zeus 4.4)."""
        cost_j = self.cost_j
        if self._threshold_j is None or cost_j is None or self._done == 0:
            return False
        return cost_j + cost_j / self._done > self._threshold_j

    def _reached(self) -> bool:
        if self._target is None or self._metric is None:
            return False
        return self._metric >= self._target if self._maximize else self._metric <= self._target

    def _agree(self, stop: bool) -> bool:
        """What rank 0 says, on every rank: all stop in the same epoch."""
        if self._threshold_j is None or self._world.size == 1:
            return stop
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return stop
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flag = torch.tensor([int(stop)], device=device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def _say(self, text: str) -> None:
        if self._world.leads:
            self._tell(text)


@dataclass(frozen=True, slots=True)
class _World:
    """This process among those of the job."""

    rank: int
    local_rank: int
    size: int
    local_size: int

    @classmethod
    def find(cls) -> _World:
        """From what ``torchrun`` (and SLURM's and MPI's wrappers of it) put into the environment."""

        def number(name: str, default: int) -> int:
            text = os.environ.get(name, "")
            return int(text) if text.isdigit() else default

        size = number("WORLD_SIZE", 1)
        return cls(number("RANK", 0), number("LOCAL_RANK", 0), size, number("LOCAL_WORLD_SIZE", size))

    @property
    def leads(self) -> bool:
        """Whether this process meters and decides."""
        return self.local_rank == 0

    @property
    def machines(self) -> int:
        return max(1, self.size // max(1, self.local_size))


def _with_limits(sensors: Sequence[Sensor]) -> list[Sensor]:
    return [sensor for sensor in sensors if sensor.kind is DeviceKind.GPU and sensor.power_limit_range_w]


def _samples(batch: object) -> int:
    """How many samples a batch has: its first tensor's length; 1 where there is none."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) > 0 else 1
