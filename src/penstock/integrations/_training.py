"""What the callbacks of training loops share: a trial's reports, or a meter and a limiter where there is no Run."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from penstock.core import Measurement
from penstock.core.errors import InvalidInput
from penstock.energy import (
    DeviceKind,
    EpochMeter,
    FileCache,
    LimitReport,
    LimitRule,
    Meter,
    PowerLimiter,
    Sensor,
    default_sensors,
    wait_for_gpu,
)
from penstock.train import Run
from penstock.train._run import Unwind

Names: TypeAlias = "Mapping[str, str] | Iterable[str] | None"


@final
class Training:
    """One training, as a callback sees it: begin, iterations, reports, end.

    With a ``run``, reports, energy and power limits are the study's business: the run is told. Without, a meter of its
    own measures each stretch between two reports, and ``power_limit`` is found and set meanwhile.

    Args:
        run: The trial, or None.
        metrics: Which to report: names, or the study's names by the trainer's (``{"val_loss": "loss"}``); None: all.
        power_limit: A rule, without a run.
        cache: A file that keeps power profiles from one training to the next, without a run.
        sensors: What to meter, without a run; None: what there is.
        limiter_options: Further arguments of the ``PowerLimiter``.
    """

    def __init__(
        self,
        run: Run | None,
        metrics: Names,
        power_limit: LimitRule | None,
        cache: str | Path | None,
        sensors: Sequence[Sensor] | None,
        limiter_options: Mapping[str, Any] | None = None,
    ) -> None:
        if run is not None and not isinstance(run, Run):
            raise InvalidInput(f"run takes the Run of a training function, got {run!r}.")
        if run is not None and power_limit is not None:
            raise InvalidInput("Within a study its power_limits=... count: give the rule to the Study.")
        if power_limit is not None and not isinstance(power_limit, LimitRule):
            raise InvalidInput(f"power_limit takes a rule, such as EtaCost(0.5), got {power_limit!r}.")
        if isinstance(metrics, str):
            raise InvalidInput(
                f"metrics takes a list of names or a dict, got {metrics!r}: write [{metrics!r}]."
            )
        if metrics is not None and not isinstance(metrics, Iterable):
            raise InvalidInput(f"metrics takes a list of names or a dict, got {metrics!r}.")
        self._given = (
            None if sensors is None else tuple(sensors) if isinstance(sensors, Iterable) else (sensors,)
        )
        if not all(isinstance(each, Sensor) for each in self._given or ()):
            raise InvalidInput(f"sensors takes a list of sensors, got {sensors!r}.")
        self.run = run
        self._seen: set[str] = set()
        self._names = (
            None
            if metrics is None
            else dict(metrics)
            if isinstance(metrics, Mapping)
            else {name: name for name in metrics}
        )
        for name in [*(self._names or {}).keys(), *(self._names or {}).values()]:
            if not isinstance(name, str):
                raise InvalidInput(f"metrics takes names, got {name!r} among {metrics!r}.")
        self._reported = False
        self._rule, self._cache = power_limit, cache
        self._options = dict(limiter_options or {})
        self._sensors: tuple[Sensor, ...] = ()
        self._meter: EpochMeter | None = None
        self._limiter: PowerLimiter | None = None
        self._report: LimitReport | None = None
        self.energies: list[Measurement | None] = []
        self.stop_asked = False

    def begin(self, *, task: str, batch_size: int) -> None:
        """The training begins, or goes on."""
        self.stop_asked = False
        if self.run is not None or self._meter is not None:
            return
        self._sensors = self._given if self._given is not None else tuple(default_sensors())
        gpus = [
            sensor
            for sensor in self._sensors
            if sensor.kind is DeviceKind.GPU and sensor.power_limit_range_w is not None
        ]
        if self._rule is not None and gpus:
            self._limiter = PowerLimiter(
                gpus,
                rule=self._rule,
                task=task,
                batch_size=batch_size,
                cache=None if self._cache is None else FileCache(self._cache),
                sync=wait_for_gpu,
                exact_epochs=False,  # an evaluation lies between the last iteration and the report
                **self._options,
            )
            self._limiter.start()
        self._meter = EpochMeter(Meter(self._sensors), limiter=self._limiter)
        self._meter.epoch_begin()

    def iteration(self, samples: float) -> None:
        """A step is over."""
        if self.run is not None:
            self.run.iteration(samples)
        elif self._meter is not None:
            self._meter.iteration(samples)

    def report(
        self, metrics: Mapping[str, Any], state: Callable[[], Any] | None = None
    ) -> Measurement | None:
        """A stretch is over; sets ``stop_asked`` when the training is to end.

        Args:
            metrics: All that the trainer knows.
            state: Makes the checkpoint to keep, if one is wanted.
        """
        if self.run is None:
            drawn = None
            if self._meter is not None:
                wait_for_gpu()
                drawn = self._meter.epoch_end()
                self._meter.epoch_begin()
            self.energies.append(drawn)
            return drawn
        chosen = self._chosen(metrics)
        self._seen |= {str(name) for name in metrics}
        if not chosen:
            return None
        self._reported = True
        try:
            if state is not None:
                self.run.save(state())
            self.run.report(**chosen)
        except Unwind:
            # The budget of the trial's segment is used up, or the trial is to stop or has failed. The trainer is let
            # to end in good order: it may have processes and files to close.
            self.stop_asked = True
        return None

    def _chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        if self._names is None:
            return {name: value for name, value in metrics.items() if _is_number(value)}
        return {ours: metrics[theirs] for theirs, ours in self._names.items() if theirs in metrics}

    def finish(self) -> None:
        """The training came to its end: ``end``, and say if nothing of it could be reported.

        Raises:
            InvalidInput: None of the wanted metrics was among those the trainer logged.
        """
        self.end()
        if self.run is not None and self._names and not self._reported:
            wanted, seen = (", ".join(map(repr, sorted(some))) for some in (self._names, self._seen))
            raise InvalidInput(
                f"Nothing was reported: metrics= names {wanted}, and the trainer logged {seen or 'nothing'}. "
                "Give the names it logs, or the study's names by them: metrics={'val_loss': 'loss'}."
            )

    def end(self) -> None:
        """The training is over: restore power limits, let the sensors go. Idempotent."""
        meter, self._meter = self._meter, None
        if meter is None:
            return
        if self._limiter is not None:
            self._report = self._limiter.report
        meter.close()
        self._limiter = None
        if self._given is None:
            for sensor in self._sensors:
                sensor.close()

    @property
    def energy(self) -> Measurement | None:
        """What all stretches drew; None if one is not known, or within a study, which counts itself."""
        total: Measurement | None = None
        for drawn in self.energies:
            if drawn is None:
                return None
            total = drawn if total is None else total + drawn
        return total

    @property
    def limits(self) -> LimitReport | None:
        """What was found out about power limits; None without a rule or a GPU that has limits."""
        return self._limiter.report if self._limiter is not None else self._report


class TrainingCallback:
    """What a library's callback of a training loop shares with those of others. Abstract: the library calls the rest.

    A callback derives from this first and then from the library's own base.

    Args:
        run: The trial; None: only energy and power limit.
        metrics: Which metrics to report: names, or the study's names by the trainer's; None: all there are.
        checkpoint: Keep checkpoints as the trial's.
        power_limit: A rule, without a run.
        cache: A file that keeps power profiles for the next training.
        sensors: What to meter, without a run; None: what there is.
        limiter_options: Further arguments of the ``PowerLimiter``.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        metrics: Names = None,
        checkpoint: bool = True,
        power_limit: LimitRule | None = None,
        cache: str | Path | None = None,
        sensors: Sequence[Sensor] | None = None,
        limiter_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._training = Training(run, metrics, power_limit, cache, sensors, limiter_options)
        self._checkpoint = checkpoint and run is not None

    @property
    def energies(self) -> list[Measurement | None]:
        """Without a run: what each stretch between two reports drew (mostly an epoch); None where it can't be told."""
        return list(self._training.energies)

    @property
    def energy(self) -> Measurement | None:
        """Without a run: what all of them drew."""
        return self._training.energy

    @property
    def limits(self) -> LimitReport | None:
        """Without a run: what was found out about power limits."""
        return self._training.limits

    def _kept(self, kind: str) -> tuple[Path, bytes] | None:
        """The run's folder and what the trial's checkpoint holds under ``kind``; None where there is nothing."""
        run = self._training.run
        state = None if run is None else run.load()
        return None if run is None or state is None else (run.folder, state[kind])


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | str | bytes):
        return False
    if isinstance(value, int | float):
        return True
    size = getattr(value, "numel", None) or getattr(value, "size", None)  # tensors, numpy
    return (size() if callable(size) else size) == 1


def packed(folder: Path) -> bytes:
    """A folder as bytes, to be kept as a checkpoint."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=folder.name)
    return buffer.getvalue()


def unpacked(data: bytes, folder: Path) -> Path:
    """The folder that ``packed`` has packed, below another one."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        name = tar.getnames()[0].partition("/")[0]
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        tar.extractall(folder, filter="data")
    return target
