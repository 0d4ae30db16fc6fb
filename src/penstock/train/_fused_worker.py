"""The worker's side of fusion: decides by measurement how many members train as one, and trains them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock.core.errors import PenstockError, Unsupported
from penstock.core.measurement import Measurement, Source, measurement
from penstock.train._run import EpochMeter, Sink
from penstock.train._segments import Segments, note
from penstock.train._worker import End, Settings, Spec, execute, meter_of

if TYPE_CHECKING:
    from penstock.train._checkpoint import Plain
    from penstock.train._task import Task

SHORT_S = 1.0
"""Where all that is left takes less than this one after another, measuring would not repay itself."""

_WORTH = 0.25  # the part of what is left that measuring one more count may take; of a deadline, measuring as a whole
_CHECK = 6  # times what measuring one member takes: the check makes four members, and then one and two are measured
_MEMORY = 0.6  # of what is free, for a profile is not all that a process allocates


class Choice(Protocol):
    """What the planner's rule chose. ``plan.FusionChoice``."""

    @property
    def count(self) -> int:
        """The most members of a group; 1: don't fuse."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able values for the journal."""


def run_fused(
    task: Task,
    specs: Sequence[Spec],
    settings: Settings,
    sinks: Sequence[Sink],
    tell: Callable[[int, End], None],
    *,
    devices: tuple[str, ...],
    threads: int,
    facts: Mapping[str, Any],
) -> None:
    """Run several segments of a Task: as one where it pays, else one after another."""
    fusion: Mapping[str, Any] = facts.get("fusion", {})
    fraction: float = facts.get("fraction", 1.0)
    count = int(fusion.get("count", len(specs)))
    spent: Measurement | None = None
    if fusion.get("measure") or fusion.get("check"):
        with _metered(settings, specs[0], devices, fraction) as other:
            count, decided = _decide(task, specs, settings, fusion, devices[0], sinks)
            spent = other()
        if not _unwanted(sinks):  # what was broken off says nothing of the next such trials
            note(sinks[0], decided)
    left = dict(enumerate(specs))
    if count > 1:
        group = _Placement(task, specs, settings, sinks, tell, devices, threads, fraction, spent)
        spent = None
        try:
            group.train(count)
        except Exception as error:  # of the group, not of a member: those that are left train alone
            os.write(2, f"fused training was given up: {type(error).__name__}: {error}\n".encode())
            open_ = sorted(group.segments.open)
            if open_ and _out_of_memory(error):
                half = max(1, min(count, len(specs)) // 2)
                reason = f"{min(count, len(specs))} members do not fit the memory"
                data = {"kind": fusion.get("key", ""), "count": half, "reason": reason, "halved": True}
                note(sinks[open_[0]], data)
        finally:
            group.close()
        left = group.segments.left()
    for number, spec in left.items():
        sink = sinks[number]
        end = execute(task, spec, settings, sink, devices=devices, threads=threads, fraction=fraction)
        if spent is not None:  # of finding out that they train alone
            drawn = spent if end.energy is None else spent + measurement(*end.energy)
            end, spent = end._replace(energy=drawn.plain), None
        tell(number, end)


@contextlib.contextmanager
def _metered(
    settings: Settings, spec: Spec, devices: tuple[str, ...], fraction: float
) -> Iterator[Callable[[], Measurement | None]]:
    """Meters what is done before there is a training; gives what tells the energy."""
    meter = None
    if not hasattr(settings.make_meter, "for_trial"):  # such a one would look for a power limit meanwhile
        meter = meter_of(settings, spec, devices, fraction)
    tell: Callable[[], Plain | None] | None = getattr(meter, "other", None)
    if meter is None or tell is None:
        yield lambda: None
        return

    def other() -> Measurement | None:
        drawn = tell()
        return None if drawn is None else measurement(*drawn)

    meter.epoch_begin()
    try:
        yield other
    finally:
        meter.close()


def _out_of_memory(error: BaseException) -> bool:
    from penstock.train._fused_loop import _is_memory

    return _is_memory(error)


# ---------------------------------------------------------------- how many


@final
class _Haste:
    """How long measuring may go on: for a part of the time that is left, and while anybody wants these trials.

    Args:
        left_s: The time that is left for trials such as these; None: as long as they take.
        sinks: Of the trials.

    Attributes:
        cut: Whether more would have been measured, had there been time.
    """

    def __init__(self, left_s: float | None, sinks: Sequence[Sink]) -> None:
        self.left_s = left_s
        self.cut = False
        self._sinks = sinks
        self._begun_s = time.perf_counter()

    @property
    def spent_s(self) -> float:
        """What measuring has taken so far."""
        return time.perf_counter() - self._begun_s

    def allows(self, more_s: float) -> bool:
        """Whether there is time for so much more."""
        late = self.left_s is not None and self.spent_s + more_s > _WORTH * self.left_s
        self.cut = self.cut or late
        return not late and not _unwanted(self._sinks)


def _unwanted(sinks: Sequence[Sink]) -> bool:
    """Whether all trials have been told to stop."""
    return all(sink.told() is not None for sink in sinks)


def _decide(
    task: Task,
    specs: Sequence[Spec],
    settings: Settings,
    fusion: Mapping[str, Any],
    device: str,
    sinks: Sequence[Sink],
) -> tuple[int, dict[str, Any]]:
    """The fusion count for these segments, and what to write in the journal."""
    from penstock.model import unfusable
    from penstock.train._fused_loop import check, measure
    from penstock.train._loop import Trainer

    haste = _Haste(fusion.get("left_s"), sinks)
    configs = [spec.config for spec in specs]
    given = None if fusion.get("measure") else int(fusion["count"])
    note: dict[str, Any] = {"kind": fusion.get("key", ""), "batch_size": _batch_size(task, configs[0])}
    try:
        trainer = Trainer(task, configs[0], seed=0, device=device, lr_is_found=True)
        steps = trainer.steps_per_epoch * max(1, _epochs(task, specs[0]))
        refusal = unfusable(trainer.model)
        if refusal is not None:  # before anything is measured for nothing
            return 1, {**note, "count": 1, "reason": refusal, "profiles": []}
        del trainer
        if given is None:
            begin_s = time.perf_counter()
            alone_s, _ = measure(task, configs, 1, device=device)
            took_s = time.perf_counter() - begin_s
            left_s = alone_s * steps * max(len(specs), int(fusion.get("ahead") or 0))
            if left_s < SHORT_S:
                reason = f"all trials that are left take {left_s:.2g} s: too little to measure for"
                return 1, {**note, "count": 1, "reason": reason, "profiles": []}
            if not haste.allows(_CHECK * took_s):
                reason = f"the {haste.left_s or 0.0:.2g} s that are left are too short to measure in"
                return 1, {**note, "count": 1, "reason": reason, "profiles": [], "hurried": True}
        other = max(configs[1:], key=lambda config: sum(config.get(n) != v for n, v in configs[0].items()))
        compared = check(task, [configs[0], other], device=device)  # two that differ in as much as any do
        note["check"] = compared.record()
        if not compared.ok:
            reason = f"fused and unfused do not agree: {compared.reason}"
            return 1, {**note, "count": 1, "reason": reason, "profiles": []}
        if given is not None:
            return given, {**note, "count": given, "reason": "as the study asks for", "profiles": []}
        choice = _choose(task, configs, settings, fusion, device, steps, haste)
    except Exception as error:  # a configuration that fails: it fails alone, with its own traceback
        reason = f"it could not be measured: {type(error).__name__}: {error}"
        return 1, {**note, "count": 1, "reason": reason[:500], "profiles": [], "failed": True}
    hurried = {"hurried": True} if haste.cut else {}  # a session with more time measures again
    return choice.count, {
        **note,
        **choice.to_json(),
        "measured_s": round(haste.spent_s, 3),
        **hurried,
    }


def _choose(
    task: Task,
    configs: Sequence[dict[str, Any]],
    settings: Settings,
    fusion: Mapping[str, Any],
    device: str,
    steps: int,
    haste: _Haste,
) -> Choice:
    from penstock.train._fused_loop import measure
    from penstock.train._loader import _free_bytes
    from penstock.train._loop import _device

    if settings.choose_fusion is None:
        raise PenstockError("A worker that measures fusion needs a rule to choose by.")
    free = int(_MEMORY * _free_bytes(_device(device)))
    if device == "cpu":  # its slots share the machine's memory
        free //= max(1, int(fusion.get("slots", 1)))
    ahead = max(len(configs), int(fusion.get("ahead") or 0))
    most = max(len(configs), int(fusion.get("most") or 0))
    took_s = 0.0

    def measured(count: int) -> tuple[float, int] | None:
        nonlocal took_s
        began_s = time.perf_counter()
        try:
            return measure(task, configs, count, device=device)
        except (Unsupported, MemoryError):
            return None
        finally:
            took_s = time.perf_counter() - began_s

    def worth(throughput: float) -> bool:
        """Whether what is left is long enough to repay one more count: it may halve it, and takes twice the last."""
        return 2 * took_s < _WORTH * ahead * steps / throughput and haste.allows(2 * took_s)

    chosen: Choice = settings.choose_fusion(measured, most, available_bytes=max(1, free), worth=worth)
    return chosen


def _epochs(task: Task, spec: Spec) -> int:
    return (task.epochs if spec.until is None else spec.until) - spec.start


def _batch_size(task: Task, config: Mapping[str, Any]) -> int | None:
    try:
        return task.size_of_batches(task.hyperparameters(config))
    except (PenstockError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------- the training


@final
class _Share:
    """A member's meter: its part of what the group drew, as the group's window has split it."""

    def __init__(self) -> None:
        self.drawn: Measurement | None = None

    def epoch_begin(self) -> None:
        pass

    def epoch_end(self) -> Measurement | None:
        drawn, self.drawn = self.drawn, None
        return drawn

    def other(self) -> Plain | None:
        drawn = self.epoch_end()  # of an epoch that it could not end
        return None if drawn is None else drawn.plain

    def close(self) -> None:
        pass


@final
class _Placement:
    """The members of a placement, their runs, and the window that meters all of them at once."""

    def __init__(
        self,
        task: Task,
        specs: Sequence[Spec],
        settings: Settings,
        sinks: Sequence[Sink],
        tell: Callable[[int, End], None],
        devices: tuple[str, ...],
        threads: int,
        fraction: float = 1.0,
        spent: Measurement | None = None,
    ) -> None:
        self._task = task
        self.segments = Segments(specs, settings, sinks, tell)
        self._shares: dict[int, _Share] = {}
        self._seconds: dict[int, float] = {}
        self._began_s = 0.0
        self._meter: EpochMeter | None = meter_of(settings, specs[0], devices, fraction, len(specs))
        self._inside = False  # an epoch
        self._other = spent  # drawn by no epoch, and by no member that has ended
        if self._meter is not None:
            self._meter.epoch_begin()
        for number in range(len(specs)):
            self._shares[number] = _Share()
            share = None if self._meter is None else self._shares[number]
            error = self.segments.begin(number, devices=devices, threads=threads, meter=share)
            if error is not None:
                self._end(number, error)

    def train(self, most: int) -> None:
        """Train all members to the ends of their segments."""
        from penstock.train._fused_loop import train_fused

        for number in self.segments.complete():
            self._end(number, None)
        numbers = sorted(self.segments.open)
        runs = [self.segments.runs[number] for number in numbers]
        train_fused(
            self._task,
            runs,
            most=most,
            ended=lambda at, error: self._end(numbers[at], error),
            window=_Window(self, numbers),
            on_iteration=getattr(self._meter, "on_iteration", None),
        )

    def close(self) -> None:
        """Nothing more is measured; a checkpoint that was begun and not finished is thrown away."""
        if self._meter is not None:
            self._meter.close()
        self.segments.discard()

    def _end(self, number: int, error: BaseException | None) -> None:
        run = self.segments.runs.get(number)
        if error is None and run is not None:
            try:
                self.settle(number)
                run._finish(None)
            except BaseException as unwind:
                error = unwind
        self.segments.end(number, error, lambda: self._rest(number))

    def _rest(self, number: int) -> Plain | None:
        """What a member that ends drew outside of its reports: its part of what no epoch of the group drew, too."""
        other: Callable[[], Plain | None] | None = getattr(self._meter, "other", None)
        if other is not None and (not self._inside or not self.segments.open):
            told = other()
            if told is not None:
                drawn = measurement(*told)
                self._other = drawn if self._other is None else self._other + drawn
        rest: Measurement | None = None
        if self._other is not None:
            sharing = len(self.segments.open) + 1
            rest = self._other.scaled(1 / sharing, source=Source.ATTRIBUTED)
            self._other = self._other.scaled(1 - 1 / sharing)
        run = self.segments.runs.get(number)
        own = None if run is None else run._drawn_otherwise()  # of an epoch it has not reported
        if own is None or rest is None:
            return own if rest is None else rest.plain
        return (rest + measurement(*own)).plain

    # -- the window -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An epoch of all members begins."""
        self._began_s = time.perf_counter()
        self._inside = True
        if self._meter is not None:
            self._meter.epoch_begin()

    def finish(self, samples: Mapping[int, float]) -> None:
        """It is over: time and energy are split among those that trained, weighted by their samples."""
        from penstock.energy import attribute_fused

        self._inside = False
        spent_s = time.perf_counter() - self._began_s
        whole = sum(samples.values())
        self._seconds = {number: spent_s * part / whole for number, part in samples.items()}
        drawn = None if self._meter is None else self._meter.epoch_end()
        if drawn is None:
            return
        for number, part in attribute_fused(drawn, samples).parts.items():
            energy = part.energy
            self._shares[number].drawn = replace(energy, uncertainty=drawn.uncertainty)

    def settle(self, number: int) -> None:
        """The member's epoch is about to be closed: it took its part of the group's time."""
        seconds = self._seconds.pop(number, None)
        if seconds is not None:
            self.segments.runs[number]._mark_s = time.perf_counter() - seconds


@final
class _Window:
    """What the fused loop calls around an epoch, in its own numbers."""

    def __init__(self, placement: _Placement, numbers: Sequence[int]) -> None:
        self._placement = placement
        self._numbers = numbers

    def begin(self) -> None:
        self._placement.begin()

    def end(self, samples: Mapping[int, float]) -> None:
        self._placement.finish({self._numbers[at]: count for at, count in samples.items()})

    def settle(self, at: int) -> None:
        self._placement.settle(self._numbers[at])


__all__ = ["SHORT_S", "run_fused"]
