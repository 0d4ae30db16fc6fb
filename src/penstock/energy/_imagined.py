"""Imagined GPUs for studies: what trials draw, and what power limits do to them, by the model of a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from penstock.core import Config, Measurement, Source, VirtualClock
from penstock.core.check import number
from penstock.core.errors import InvalidInput
from penstock.energy._hook import LimitOptions, PowerLimits, batch_size_of
from penstock.energy._limiter import FileCache, PowerLimiter, savings
from penstock.energy._power_limit import PowerLimitOptimizer, limits_between
from penstock.energy._profile import LimitProfile, PowerProfile, profile_key
from penstock.energy._simulated import V100, GpuModel, Load, SimulatedGpu

LoadOf: TypeAlias = Load | Callable[[Config], Load]
"""A load, or one by configuration. Its ``epoch_s`` is an epoch's time at full clock."""

_ITERATIONS = 100  # of an epoch whose training tells of none


@final
@dataclass(frozen=True, slots=True)
class SimulatedGpus:
    """GPUs that are not there: joules follow from a model of watts and speed, and from what trials do, alone.

    On ``Local`` and ``Ray``, ``Study(meter=SimulatedGpus(...))`` meters the real trainings as if each had such a GPU:
    every sample takes its time at the GPU's power limit, whatever time it takes here. On simulated devices,
    ``Simulated(power=SimulatedGpus(...))`` lets limits change both joules and the virtual seconds. Either way
    ``power_limits`` are profiled just in time as on real GPUs, and the same trials draw the same joules each time.

    Attributes:
        load: What a training asks of the GPU.
        samples: Of an epoch; what a training tells of its iterations is counted in these. Simulated devices need none.
        gpu: The model.
        target: In a study with a surrogate: how many times longer a sample of the full model takes (workers only).
    """

    load: LoadOf
    samples: float = 1.0
    gpu: GpuModel = V100
    target: float = 1.0
    limits: LimitOptions | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.load, Load) or callable(self.load)):
            raise InvalidInput(f"load takes a Load or a function of the configuration, got {self.load!r}.")
        if not isinstance(self.gpu, GpuModel):
            raise InvalidInput(f"gpu takes a GpuModel such as V100, got {self.gpu!r}.")
        for name, value in (("samples", self.samples), ("target", self.target)):
            if not number(name, value, "Give a number.") > 0:
                raise InvalidInput(f"{name} must be above 0, got {value!r}.")

    def __reduce__(self) -> tuple[Any, ...]:
        """With a load of a script's or a notebook's own, which workers can't import."""
        load = self.load if isinstance(self.load, Load | _Sent) else _Sent.of(self.load)
        return SimulatedGpus, (load, self.samples, self.gpu, self.target, self.limits)

    def load_of(self, config: Config) -> Load:
        """What a configuration asks of the GPU.

        Raises:
            InvalidInput: The function gives something else.
        """
        found = self.load if isinstance(self.load, Load) else self.load(config)
        if not isinstance(found, Load):
            raise InvalidInput(f"load gave {found!r} for {dict(config)}; it must give a Load.")
        return found

    def limited(self, limits: LimitOptions) -> SimulatedGpus:
        """The same, looking for power limits."""
        return replace(self, limits=limits)

    # --- on workers ------------------------------------------------------------------------------------------

    def __call__(self, devices: tuple[str, ...]) -> SimulatedMeter:
        """The meter of a trial of which nothing is known."""
        return self.for_spec(devices, {}, {}, 1)

    def for_trial(self, devices: tuple[str, ...], config: Config) -> SimulatedMeter:
        """The meter of a trial of this configuration."""
        return self.for_spec(devices, config, {}, 1)

    def for_spec(
        self, devices: tuple[str, ...], config: Config, options: Mapping[str, Any], members: int
    ) -> SimulatedMeter:
        """The meter of a trial, or of so many that train as one."""
        load = self.load_of(config)
        if options.get("model") == "target":
            load = replace(load, epoch_s=load.epoch_s * self.target)
        # However many train as one: here each sample takes its own time, so one profile holds for all of them.
        return SimulatedMeter(self, load, self.limits, batch_size_of(config))


@final
@dataclass(frozen=True, slots=True)
class _Sent:
    """A user's function on its way to workers: unpacked when it is called, for a worker's path is set by then."""

    packed: bytes

    @classmethod
    def of(cls, function: Callable[[Config], Load]) -> _Sent:
        import cloudpickle

        return cls(cloudpickle.dumps(function))

    def __call__(self, config: Config) -> Load:
        import cloudpickle

        found: Load = cloudpickle.loads(self.packed)(config)
        return found


@final
class SimulatedMeter:
    """The meter of one training on an imagined GPU, whose clock is moved on by iterations alone."""

    def __init__(self, gpus: SimulatedGpus, load: Load, limits: LimitOptions | None, batch_size: int) -> None:
        self._clock = VirtualClock()
        self._gpu = SimulatedGpu(self._clock, gpus.gpu)
        self._gpu.run(load)
        self._sample_s = load.epoch_s / gpus.samples
        self._epoch = gpus.samples
        self._part = 1.0  # of the samples of an iteration
        self._begun_j: float | None = None
        self._iterated = False
        self._limiter: PowerLimiter | None = None
        if limits is not None:
            self._limiter = PowerLimiter(
                [self._gpu],
                rule=limits.rule,
                task=limits.task,
                batch_size=batch_size,
                cache=FileCache(limits.profiles),
                observe=limits.observe,
                slice_s=limits.slice_s,
                settle_s=min(0.5, limits.slice_s / 10),
                step_w=limits.step_w,
                now=self._clock.now_s,
            )
            self._limiter.start()

    def spread(self, workers: int) -> None:
        """One of so many workers trains it: the crew's samples are told to each, and take their time on all GPUs."""
        self._part = 1.0 / workers

    def epoch_begin(self) -> None:
        """An epoch begins."""
        self._begun_j = self._gpu.energy_j()
        self._iterated = False
        if self._limiter is not None:
            self._limiter.epoch_begin()

    @property
    def on_iteration(self) -> Callable[[float], None]:
        """What to call after each iteration with the number of its samples."""
        return self.iteration

    def iteration(self, samples: float = 1.0) -> None:
        """An iteration is over: this worker's part of it took its time on the GPU."""
        self._iterated = True
        samples *= self._part
        self._clock.advance_to(self._clock.now_s() + samples * self._sample_s * self._gpu.slowdown())
        if self._limiter is not None:
            self._limiter.iteration(samples)

    def epoch_end(self) -> Measurement | None:
        """The epoch's energy; None if none has begun."""
        if self._begun_j is None:
            return None
        if not self._iterated:
            for _ in range(_ITERATIONS):
                self.iteration(self._epoch / _ITERATIONS)
        if self._limiter is not None:
            self._limiter.epoch_end()
        drawn_j, self._begun_j = self._gpu.energy_j() - self._begun_j, None
        return Measurement(drawn_j, "J", Source.SIMULATED)

    def other(self) -> None:
        """The GPU's clock stands still between epochs."""
        return

    def close(self) -> None:
        """The training is over."""
        if self._limiter is not None:
            self._limiter.stop()


# --- on simulated devices ----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Draw:
    """What a step of a simulated training takes and draws.

    Attributes:
        seconds: Alone on one device at its limit.
        heavy_s: Of these, the heavy phase.
        heavy_j: What that draws.
        light_w: What its devices draw otherwise.
    """

    seconds: float
    heavy_s: float
    heavy_j: float
    light_w: float

    def energy_j(self, devices: float, elapsed_s: float) -> float:
        """Joules on ``devices`` (a part of one, or several) over the time it took there: its work is the same."""
        return self.heavy_j + self.light_w * max(0.0, devices * elapsed_s - self.heavy_s)


@final
class Fleet:
    """The imagined GPUs of one simulated study, with what is known of their power limits.

    Args:
        gpus: Their model.
        limits: What the study wants of power limits; None: they stay at the highest.
        task: Names the work in the profiles' keys.
        known: Profiles from earlier, by key.
    """

    def __init__(
        self,
        gpus: SimulatedGpus,
        limits: PowerLimits | None = None,
        task: str = "",
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self._gpus = gpus
        self._limits = limits
        self._task = task
        self._profiles: dict[str, tuple[float, PowerProfile]] = {}  # and from when on they are known
        self._parts: dict[str, tuple[LimitProfile, ...]] = {}
        self._news: list[tuple[float, dict[str, Any]]] = []
        for key, value in (known or {}).items():
            self._profiles[key] = float("-inf"), PowerProfile.from_json(value)

    def step(self, now_s: float, config: Config, members: int, base_s: float, alone_s: float) -> Draw:
        """What a step draws that would take ``base_s`` at full clock, of ``members`` fused ones together.

        One of them alone would take ``alone_s``. Fused members do their heavy work one after another and share the
        light phases: of a time that is less than theirs alone, the heavy part is larger.
        """
        load, gpu, limits = self._gpus.load_of(config), self._gpus.gpu, self._limits
        if base_s <= 0:
            return Draw(base_s, 0.0, 0.0, load.light_w)
        duty = min(1.0, load.duty * members * alone_s / base_s)
        load = Load(base_s, duty, load.peak_w, load.light_w)
        if limits is None:
            return _at(gpu, load, gpu.max_limit_w)
        task = self._task if members == 1 else f"{self._task} fused {members}"
        key = profile_key(gpu.name, task, batch_size_of(config))
        ready_s, profile = self._profiles.get(key, (float("inf"), None))
        if profile is not None and ready_s <= now_s:
            chosen = profile.highest if limits.observe else limits.rule.choose(profile)
            return _at(gpu, load, chosen.limit_w)
        return self._profile(now_s, key, batch_size_of(config), load, limits)

    def _profile(self, now_s: float, key: str, batch_size: int, load: Load, limits: PowerLimits) -> Draw:
        """A step during which limits are tried, slice by slice (Zeus 4.2)."""
        gpu = self._gpus.gpu
        machine = PowerLimitOptimizer(
            limits_between(gpu.min_limit_w, gpu.max_limit_w, limits.step_w),
            limits.rule,
            device=gpu.name,
            max_limit_w=gpu.max_limit_w,
            slice_s=limits.slice_s,
            settle_s=min(0.5, limits.slice_s / 10),
            observe=limits.observe,
            seen=self._parts.get(key, ()),
        )
        clock_s = drawn_j = heavy_s = heavy_j = 0.0
        limit_w = machine.begin_epoch(clock_s, drawn_j) or gpu.max_limit_w
        count = max(_ITERATIONS, round(10 * load.epoch_s / limits.slice_s))
        piece = replace(load, epoch_s=load.epoch_s / count)
        for _ in range(count):
            part = _at(gpu, piece, limit_w)
            clock_s += part.seconds
            drawn_j += part.energy_j(1.0, part.seconds)
            heavy_s += part.heavy_s
            heavy_j += part.heavy_j
            limit_w = machine.iteration(clock_s, drawn_j, 1.0) or limit_w
        machine.end_epoch(clock_s, drawn_j)
        found = machine.profile
        if found is None:
            self._parts[key] = machine.seen
        elif key not in self._profiles:
            self._profiles[key] = now_s + clock_s, found
            self._news.append((now_s + clock_s, self._found(key, batch_size, found, limits)))
        return Draw(clock_s, heavy_s, heavy_j, load.light_w)

    def news(self, now_s: float) -> list[dict[str, Any]]:
        """Profiles that are complete by now, each once, as the journal's notes have them, with their keys."""
        told = [data for ready_s, data in self._news if ready_s <= now_s]
        self._news = [item for item in self._news if item[0] > now_s]
        return told

    def _found(self, key: str, batch_size: int, profile: PowerProfile, limits: PowerLimits) -> dict[str, Any]:
        best = limits.rule.choose(profile)
        energy_saved, time_saved = savings(profile, best)
        return {
            "device": profile.device,
            "gpus": 1,
            "batch_size": batch_size,
            "rule": repr(limits.rule),
            "limit_w": best.limit_w,
            "highest_w": profile.highest.limit_w,
            "energy_saved": energy_saved,
            "time_saved": time_saved,
            "applied": not limits.observe,
            "profile": [[seen.limit_w, seen.power_w, seen.throughput] for seen in profile.limits],
            "key": key,
        }


def _at(gpu: GpuModel, load: Load, limit_w: float) -> Draw:
    heavy_s = load.epoch_s * load.duty / gpu.clock_ratio(load, limit_w)
    light_s = load.epoch_s * (1 - load.duty)
    return Draw(heavy_s + light_s, heavy_s, min(load.peak_w, limit_w) * heavy_s, load.light_w)


__all__ = ["Draw", "Fleet", "LoadOf", "SimulatedGpus", "SimulatedMeter"]
