"""Profile: measures random structures of a task on a device and fits predictors to them (HyperPower 3.3).

Imports torch lazily, when something is measured.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from penstock.core import Config, Measurement, Source, total
from penstock.core.errors import InvalidInput, PenstockError, SensorError
from penstock.predict import Features, Predictor, Predictors
from penstock.space import Space

if TYPE_CHECKING:
    from penstock.energy import Sensor
    from penstock.train._task import Task

Measure: TypeAlias = Callable[[Config], Mapping[str, "Measurement | float"]]
"""A device of the user's own: quantities of a configuration, by name."""

_INFERENCE = ("power_w", "memory_bytes", "latency_s", "params", "flops")
_TRAINING = ("epoch_s", "epoch_j")
_EXTRA = ("params", "flops")
_ROUNDS = 5
_FEWEST = 3  # samples of a quantity that a predictor is fitted to
_AGAIN = 10  # of so many structures one is measured again: repeats tell the sensor's scatter


@final
@dataclass(frozen=True, slots=True)
class ProfileSample:
    """What was measured of one structure.

    Attributes:
        config: The configuration.
        values: By quantity.
        error: Why it could not be measured; empty if it was.
        energy: What measuring it drew; None where nobody knows, as of ``measure``.
    """

    config: Config
    values: Mapping[str, Measurement] = field(default_factory=dict)
    error: str = ""
    energy: Measurement | None = None


@final
class Profile:
    """Draws random configurations, builds each network, and measures its inference on the target device.

    ``Profile(task, space).collect(100)`` gives ``Predictors`` of power, memory, latency, parameters and FLOPs, for
    ``Study(limits=...)`` and to keep in a store. Every figure has its source: power is measured where the device has a
    counter and estimated from CPU time elsewhere; memory is the allocator's peak on a GPU, and on a CPU what
    the network's tensors need at the most, which is estimated.

    Args:
        task: The task; only its model and data are used (and the loop, with ``training=True``).
        space: The space; what is marked ``structural`` is what predictions look at.
        device: Where to run, ``"cpu"`` or ``"cuda:0"``.
        batch_size: Rows of an inference batch; default: the task's ``eval_batch_size``.
        seconds: How long each structure runs, after a warm-up, for its power and latency.
        training: Also measure some steps of training, for ``epoch_s`` and ``epoch_j``.
        sensors: Read these instead of the device's; not closed.
        measure: A function of the configuration that measures instead (another machine, a simulator): gives numbers
            above 0, or ``Measurement``s, by quantity.
        name: The task's name in a store; default: the model factory's.
        source: Where the numbers of ``measure`` come from, ``Source.MEASURED`` on a real board; default: simulated. A
            ``Measurement`` has its own.

    Raises:
        InvalidInput: One of these is something else.
    """

    def __init__(
        self,
        task: Task | None,
        space: Space,
        *,
        device: str = "cpu",
        batch_size: int | None = None,
        seconds: float = 0.2,
        training: bool = False,
        sensors: Sequence[Sensor] | None = None,
        measure: Measure | None = None,
        name: str | None = None,
        source: Source | None = None,
    ) -> None:
        if task is None and measure is None:
            raise InvalidInput(
                "A profile needs a task to build and run, or measure=, a function that measures."
            )
        if task is not None and measure is None and not hasattr(task, "build_model"):
            raise InvalidInput(f"A profile needs a Task, which tells how to build the network, got {task!r}.")
        if not isinstance(space, Space):
            raise InvalidInput(
                f"A profile draws structures from a Space, got {space!r}: write pk.Space(...)."
            )
        if measure is not None and not callable(measure):
            raise InvalidInput(f"measure takes a function of a configuration, got {measure!r}.")
        if not isinstance(device, str) or not device:
            raise InvalidInput(f'device takes "cpu" or "cuda:0", got {device!r}.')
        if batch_size is not None:
            _whole("batch_size", batch_size, 1)
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 < seconds < math.inf:
            raise InvalidInput(f"seconds must be a number above 0, got {seconds!r}.")
        if source is not None and not isinstance(source, Source):
            raise InvalidInput(f"source takes pk.Source.MEASURED or the like, got {source!r}.")
        if source is not None and measure is None:
            raise InvalidInput(
                f"source={source!r} is of what measure= gives; the device's own sensors know theirs: drop it."
            )
        self.task, self.space, self.device = task, space, device
        self.batch_size = batch_size
        self.seconds, self.training = seconds, training
        self._sensors, self._measure = sensors, measure
        self._source = Source.SIMULATED if source is None else source
        made_by = None if task is None else getattr(task.model, "__name__", None)
        self.name = name or made_by or "task"
        self.samples: list[ProfileSample] = []
        self.repeats: list[ProfileSample] = []
        self._traced: dict[str, dict[str, float]] = {}
        self._looked_at: set[str] | None = None  # names that make a network; None: none was traced yet

    def collect(
        self,
        samples: int = 100,
        *,
        seed: int = 0,
        folds: int = 10,
        on_sample: Callable[[int, ProfileSample], None] | None = None,
    ) -> Predictors:
        """Measure so many structures and fit predictors to all measured so far.

        Structures that fail to build or run are kept with their error in ``samples`` and left out. Every tenth one
        (more of few) is measured again, for the scatter of the sensors; these are in ``repeats``.

        Args:
            samples: How many.
            seed: Of the draws.
            folds: Of the cross validation.
            on_sample: Told of each one.

        Raises:
            InvalidInput: Too few could be measured; shows the first error.
        """
        _whole("samples", samples, 1)
        _whole("folds", folds, 0)
        _whole("seed", seed, 0)
        for index in range(samples):
            sample = self._sample(self.space.sample(_mixed(seed, len(self.samples))))
            self.samples.append(sample)
            if on_sample is not None:
                on_sample(index, sample)
        again = max(1, min(_AGAIN, samples // 5))
        for sample in self.samples[len(self.samples) - samples :: again]:
            if not sample.error:
                self.repeats.append(self._sample(sample.config))
        return self.fit(folds=folds, seed=seed)

    def read(self, config: Config, count: int = 1) -> list[ProfileSample]:
        """Measure one configuration so many times, each as ``collect`` does; a failure is the last.

        They are kept by nobody: ``samples`` are random structures, and these are not.
        """
        _whole("count", count, 1)
        found: list[ProfileSample] = []
        while len(found) < count and not (found and found[-1].error):
            found.append(self._sample(config))
        return found

    @property
    def elsewhere(self) -> bool:
        """Whether it measures by ``measure``, so not on a device of this machine that may train meanwhile."""
        return self._measure is not None

    def fit(self, *, folds: int = 10, seed: int = 0) -> Predictors:
        """Predictors of what was measured so far.

        A quantity is above 0: readings that are not (a counter too coarse for so short a run) are left out, which a
        warning tells.

        Raises:
            InvalidInput: Too few could be measured; of ``measure``, also if too few readings of one quantity are left.
        """
        _whole("folds", folds, 0)
        _whole("seed", seed, 0)
        good = [sample for sample in self.samples if not sample.error]
        if len(good) < _FEWEST:
            broken = next((f" The first failed: {s.error}" for s in self.samples if s.error), "")
            raise InvalidInput(
                f"{len(good)} of {len(self.samples)} structures could be measured, too few.{broken}"
            )
        good += [sample for sample in self.repeats if not sample.error]
        configs = [sample.config for sample in good]
        models: dict[str, Predictor] = {}
        for quantity in dict.fromkeys(name for sample in good for name in sample.values):
            if self._measure is None and quantity in _EXTRA:
                continue  # counted from the traced network, not predicted
            read = [
                (c, s.values[quantity]) for c, s in zip(configs, good, strict=True) if quantity in s.values
            ]
            known = [(config, value) for config, value in read if value.value > 0]
            if len(known) < len(read):
                self._leave_out(quantity, len(known), [value for _, value in read if value.value <= 0])
            if len(known) < _FEWEST:
                continue
            # A batch size is not structural, but an epoch's time depends on it.
            structural = quantity not in _TRAINING
            extra = () if self._measure is not None else _EXTRA
            models[quantity] = Predictor.fit(
                quantity,
                Features.of(self.space, structural=structural, extra=extra),
                [config for config, _ in known],
                [value.value for _, value in known],
                extra=self.traced if extra else None,
                folds=folds,
                seed=seed,
                source=max(value.source for _, value in known),
            )
        # What the predictors were fitted with must be there when they are asked: drop extras that never paid.
        return Predictors(
            {name: _without_unused(model) for name, model in models.items()},
            device=self.device_name,
            task=self.name,
            features=Features.of(self.space),
            extra=self.traced if self._measure is None else None,
            exact=_EXTRA if self._measure is None else (),
        )

    def _leave_out(self, quantity: str, left: int, without: Sequence[Measurement]) -> None:
        """Say which readings are no figure."""
        told = (
            f"{quantity}: {len(without)} of {left + len(without)} readings are not above 0 (the first is "
            f"{without[0].value:g})"
        )
        if left < _FEWEST and self._measure is not None:
            raise InvalidInput(
                f"{told}: {left} are too few for a prediction. See what measure= returns, or leave {quantity} out."
            )
        then = "and left out" if left >= _FEWEST else "so it is not predicted; raise seconds="
        warnings.warn(f"{told}, {then}.", UserWarning, stacklevel=4)

    @property
    def device_name(self) -> str:
        """The device's model."""
        if self._measure is not None:
            return str(getattr(self._measure, "device", self.device))
        if self.device.startswith("cuda"):
            import torch

            return torch.cuda.get_device_name(self.device)
        return _cpu_name()

    def traced(self, config: Config) -> dict[str, float]:
        """Parameters and FLOPs of the network a configuration makes, without running it; kept for the next time."""
        found = self._traced.get(self._key(config))
        if found is None:
            if len(self._traced) > 20_000:
                self._traced.clear()
            found, looked_at = _trace(self._task(), config, self._rows())
            self._looked_at = looked_at | (self._looked_at or set())
            self._traced[self._key(config)] = found
        return found

    # --- inside ---------------------------------------------------------------------------------------------

    def _key(self, config: Config) -> str:
        """What a network depends on: two configurations that agree in all that factories have looked at, in any
        network so far, make the same one, for a factory that finds the same goes on to look at the same.
        """
        names = (self.space.structural or self.space.names) if self._looked_at is None else self._looked_at
        return repr(sorted((name, repr(value)) for name, value in config.items() if name in names))

    def _task(self) -> Task:
        if self.task is None:
            raise InvalidInput("This profile has no task to build networks of.")
        return self.task

    def _rows(self) -> int:
        return self.batch_size or self._task().eval_batch_size

    def _sample(self, config: Config) -> ProfileSample:
        drawn: list[Measurement] = []
        sample = self._try(config, drawn)
        return replace(sample, energy=total(drawn))

    def _try(self, config: Config, drawn: list[Measurement]) -> ProfileSample:
        try:
            if self._measure is not None:
                return ProfileSample(config, _readings(self._measure(config), self._source))
            values = self._run(config, drawn)
            self._traced[self._key(config)] = {n: values[n].value if n in values else 0.0 for n in _EXTRA}
            return ProfileSample(config, values)
        except PenstockError as error:
            return ProfileSample(config, error=str(error))
        except Exception as error:
            # A structure that can't be built (a kernel larger than its input) is an answer, not a defect; and a board
            # that does not answer once must not cost what was measured before.
            return ProfileSample(config, error=f"{type(error).__name__}: {error}")

    def _run(self, config: Config, drawn: list[Measurement]) -> dict[str, Measurement]:
        """What a structure needs; what finding that out drew, failed or not, goes to ``drawn``."""
        import torch

        from penstock.energy import Meter, sensors_for
        from penstock.train._loop import _forward, private_randomness

        task = self._task()
        device = torch.device(self.device)
        values: dict[str, Measurement] = {}
        sensors = self._sensors if self._sensors is not None else sensors_for([_device_id(device)])
        meter = Meter(sensors)
        whole = meter.window("profile")
        try:
            with private_randomness(), torch.no_grad():
                torch.manual_seed(0)
                model, _ = task.build_model(task.hyperparameters(config))
                model = model.to(device).eval()
                data = task.load(device)
                source = data.val or data.train
                inputs, _ = next(iter(source.batches(min(self._rows(), source.n))))
                forward = task.forward or _forward
                forward(model, inputs)  # lazy layers take their shapes here
                values["params"] = Measurement(_params(model), "", Source.MEASURED)
                values["flops"] = Measurement(_flops(lambda: forward(model, inputs)), "", Source.MEASURED)
                values["memory_bytes"] = _memory(lambda: forward(model, inputs), model, inputs, device)
                times, window = _repeat(lambda: forward(model, inputs), device, self.seconds, meter)
                values["latency_s"] = Measurement(
                    statistics.median(times), "s", Source.MEASURED, _spread(times)
                )
                # No figure is better than a made-up one: without a sensor the quantity has no predictor.
                with contextlib.suppress(SensorError):
                    values["power_w"] = window.power
            if self.training:
                values |= self._train(config, sensors)
        finally:
            with contextlib.suppress(SensorError):
                drawn.append(whole.end().energy)
            if self._sensors is None:
                for sensor in sensors:
                    sensor.close()
        return values

    def _train(self, config: Config, sensors: Sequence[Sensor]) -> dict[str, Measurement]:
        """Some steps of training, scaled to an epoch."""
        from penstock.energy import Meter
        from penstock.train._loop import Trainer, private_randomness

        with private_randomness():
            trainer = Trainer(self._task(), config, seed=0, device=self.device, lr_is_found=True)
            if trainer.lr == 0.0:
                trainer.set_lr(1e-3)
            source, size = trainer.data.train, trainer.batch_size
            trainer.model.train()

            def steps(count: int) -> None:
                done = 0
                while done < count:
                    for batch in source.batches(size):
                        trainer.run_steps([batch])
                        done += 1
                        if done == count:
                            return

            steps(2)
            start = time.perf_counter()
            steps(2)
            one_s = max((time.perf_counter() - start) / 2, 1e-6)
            count = max(3, min(trainer.steps_per_epoch, math.ceil(self.seconds / one_s)))
            window = Meter(sensors).window("training")
            steps(count)
            _finish(trainer.device)
            window.end()
        scale = trainer.steps_per_epoch / count
        found = {"epoch_s": Measurement(window.time_s * scale, "s", Source.MEASURED)}
        with contextlib.suppress(SensorError):
            found["epoch_j"] = window.energy.scaled(scale)
        return found


_UNITS = {"power_w": "W", "memory_bytes": "bytes", "latency_s": "s", "epoch_s": "s", "epoch_j": "J"}


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} must be a whole number of at least {least}, got {value!r}.")


def _readings(found: Any, source: Source) -> dict[str, Measurement]:
    """What a function of the user's own has measured, checked."""
    if not isinstance(found, Mapping) or not found:
        raise InvalidInput(f'measure= returned {found!r}: return numbers by quantity, {{"power_w": 12.5}}.')
    values: dict[str, Measurement] = {}
    for name, value in found.items():
        number = hasattr(value, "__float__") and not isinstance(value, bool)
        if not isinstance(name, str) or not (number or isinstance(value, Measurement)):
            raise InvalidInput(
                f'measure= returned {name!r}: {value!r}, which is no number: return {{"power_w": 12.5}}.'
            )
        values[name] = (
            value
            if isinstance(value, Measurement)
            else Measurement(float(value), _UNITS.get(name, ""), source)
        )
    return values


def _cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model; where nobody tells it, its kind: all of "x86_64" draw different power."""
    import platform

    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "cpu"


def _without_unused(model: Predictor) -> Predictor:
    """The predictor without extra features, where its form has no use for them: tracing a network takes time."""
    if not model.features.extra or model.form.terms.endswith(("extra", "all")):
        return model
    data = model.to_json()
    kept = len(model.features.columns)
    data["features"]["extra"] = []
    data["rows"] = [row[:kept] for row in data["rows"]]
    return Predictor.from_json(data)


def _trace(task: Task, config: Config, rows: int) -> tuple[dict[str, float], set[str]]:
    """Parameters and FLOPs by shapes alone, on torch's meta device, and the names the network was made of.

    A network that can't be on that device is run.
    """
    import torch

    from penstock.train._loader import flatten
    from penstock.train._loop import _forward, private_randomness

    data = task.load(torch.device("cpu"))
    source = data.val or data.train
    inputs, _ = next(iter(source.batches(min(rows, source.n))))
    forward = task.forward or _forward

    def count(device: str) -> tuple[dict[str, float], set[str]]:
        with torch.device(device):
            model, looked_at = task.build_model(task.hyperparameters(config))
        model = model.to(device).eval()
        leaves, rebuild = flatten(inputs)
        batch = rebuild([leaf.to(device) for leaf in leaves])
        forward(model, batch)  # lazy layers take their shapes here
        flops = _flops(lambda: forward(model, batch))
        return {"params": _params(model), "flops": flops}, looked_at

    with private_randomness(), torch.no_grad():
        try:
            return count("meta")
        except (RuntimeError, NotImplementedError):
            return count("cpu")


def _params(model: Any) -> float:
    return float(sum(p.numel() for p in model.parameters() if p.requires_grad))


def _flops(run: Callable[[], Any]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def _memory(run: Callable[[], Any], model: Any, inputs: Any, device: Any) -> Measurement:
    """The most memory a forward pass needs, with the weights and the batch."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return Measurement(float(torch.cuda.max_memory_allocated(device)), "bytes", Source.MEASURED)
    from penstock.train._loader import flatten

    held = [*model.parameters(), *model.buffers(), *flatten(inputs)[0]]
    still = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    return Measurement(float(still + _peak_bytes(run)), "bytes", Source.ESTIMATED, 0.2)


def _peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that are alive at once while ``run`` runs, those it finds there left out."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.alive: dict[int, int] = {}
            self.live: int = 0
            self.peak: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._see(tensor, given)
            return result

        def _see(self, tensor: Tensor, given: set[int]) -> None:
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if key in given or key in self.alive or not size:
                return  # a view, or written in place
            self.alive[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key)

        def _gone(self, key: int) -> None:
            self.live -= self.alive.pop(key, 0)

    with Watch() as watch:
        run()
    return int(watch.peak)


def _repeat(run: Callable[[], Any], device: Any, seconds: float, meter: Any) -> tuple[list[float], Any]:
    """Seconds of single runs over a while, and the meter's window of it."""
    for _ in range(2):
        run()
    _finish(device)
    start = time.perf_counter()
    run()
    _finish(device)
    each = max(1, math.ceil(seconds / _ROUNDS / max(time.perf_counter() - start, 1e-6)))
    times = []
    window = meter.window("inference")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(each):
            run()
        _finish(device)
        times.append((time.perf_counter() - start) / each)
    window.end()
    return times, window


def _finish(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _device_id(device: Any) -> str:
    return f"{device.type}:{device.index or 0}"


def _spread(times: Sequence[float]) -> float:
    middle = statistics.median(times)
    return statistics.median(abs(t - middle) for t in times) / middle if middle > 0 else 0.0


def _mixed(seed: int, index: int) -> int:
    return (seed * 1_000_003 + index) % 2**31
