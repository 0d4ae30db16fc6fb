"""What every worker does with a segment, be it in a local process, a Ray actor or the simulation."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

from penstock.core.errors import PenstockError
from penstock.core.trial import TrialStatus
from penstock.train._checkpoint import Checkpoints, FileCheckpoints, Plain
from penstock.train._run import EpochMeter, Refused, Run, Sink, Unwind
from penstock.train._seeding import seed_all, seed_no_more
from penstock.train._threads import Pace

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep
_ERROR_CHARS = 64_000
TARGET_REACHED = "target_reached"
"""The metric by which a Task tells, once, that it has reached its target."""
_REASON_CHARS = 300
_ERRORS = f"{PenstockError.__module__}."  # users know them by another name


class Spec(NamedTuple):
    """A segment on its way to a worker. Travels as a plain tuple."""

    trial: int
    config: dict[str, Any]
    seed: int
    start: int
    until: int | None
    last: bool
    copy_from: tuple[int, int] | None
    checkpoint: str | None
    known: int
    attempt: int
    options: Mapping[str, Any] = MappingProxyType({})
    leave: int | None = None  # the last epoch that a budget allows; None: there is none


class End(NamedTuple):
    """How a segment ended. Travels as a plain tuple; ``status`` is the TrialStatus's value."""

    status: str
    epoch: int
    reason: str = ""
    error: str = ""
    kept: bool = False
    energy: Plain | None = None  # what it drew outside of the epochs it reported


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker knows of the study.

    Attributes:
        files: The study's folder; None where there is none (simulated).
        objectives: Metrics every report must have.
        study: Marks the study's checkpoints, so that files of another one in the same folder are not taken for them.
        make_meter: Makes the meter of one trial from its devices, or None. Set by the room that meters. One that
            wants to know the configuration too has a method ``for_trial(devices, config)``.
        choose_fusion: The planner's rule for the fusion count (``plan.choose_count``); None: nothing is measured.
    """

    files: Path | None
    objectives: tuple[str, ...]
    study: str = ""
    make_meter: Callable[[tuple[str, ...]], EpochMeter | None] | None = None
    choose_fusion: Callable[..., Any] | None = None


def execute(
    work: Callable[[Run], Any],
    spec: Spec,
    settings: Settings,
    sink: Sink,
    *,
    devices: tuple[str, ...] = ("cpu",),
    threads: int = 1,
    checkpoints: Checkpoints | None = None,
    world: tuple[int, int, str] | None = None,
    fraction: float = 1.0,
    alone: int | None = None,
) -> End:
    """Run one segment to its end, whatever the training function does short of killing the process.

    ``world`` (rank, size, meeting file) makes this worker one of several that train it together; ``fraction`` is the
    part of its devices that it holds; ``alone`` are the threads of one of its devices, where it has several by itself.
    """
    run: Run | None = None
    crew = None
    together = contextlib.ExitStack()
    meter = None
    failure: BaseException | None = None
    energy: Plain | None = None
    try:
        if checkpoints is None:
            checkpoints = files_of(spec, settings)
        meter = meter_of(settings, spec, devices, fraction)
        if world is not None:
            from penstock.train._elastic import CrewMeter, CrewSink, ReadOnly, joined

            crew = together.enter_context(joined(world, devices[0]))
            sink = CrewSink(crew, sink)
            meter = None if meter is None else CrewMeter(crew, meter)
            checkpoints = checkpoints if crew.leads else ReadOnly(checkpoints)
        run = make_run(
            spec,
            settings,
            sink,
            checkpoints=checkpoints,
            devices=devices,
            threads=threads,
            meter=meter,
            crew=crew,
        )
        if alone is not None:
            run._pace = Pace(threads, alone)
        if crew is not None:
            crew.meet()  # all have found the same checkpoint before the lead writes the next
        if not run._over():
            seed_all(spec.seed)
            if crew is None and getattr(sink, "any_thread", False):
                run._write_behind()
                if isinstance(checkpoints, FileCheckpoints):
                    checkpoints.prepare()
            if meter is not None:
                meter.epoch_begin()
            run._finish(work(run))
            run._settle()
    except BaseException as error:
        if run is None and isinstance(error, Unwind):
            raise
        if crew is not None and not isinstance(error, Unwind):
            error = crew.blame(error)
        failure = error
        if run is not None:
            try:
                run._settle()
            except Exception as another:
                failure = another if isinstance(error, Unwind) and run._failure is None else error
    finally:
        seed_no_more()
        if meter is not None:
            energy = None if run is None else run._drawn_otherwise()
            meter.close()
        if checkpoints is not None:
            checkpoints.discard()
        together.close()
    end = conclude(run, spec, failure)
    return end if energy is None else end._replace(energy=energy)


def make_run(
    spec: Spec,
    settings: Settings,
    sink: Sink,
    *,
    checkpoints: Checkpoints,
    devices: tuple[str, ...],
    threads: int,
    meter: EpochMeter | None,
    crew: Any = None,
) -> Run:
    """The Run of a segment."""
    return Run(
        trial=spec.trial,
        config=spec.config,
        seed=spec.seed,
        until=spec.until,
        known=spec.known,
        start=spec.start,
        copy_from=spec.copy_from,
        objectives=settings.objectives,
        sink=sink,
        checkpoints=checkpoints,
        folder=None if settings.files is None else settings.files / "trials" / str(spec.trial),
        devices=devices,
        threads=threads,
        meter=meter,
        options=spec.options,
        crew=crew,
        leave=spec.leave,
    )


def conclude(run: Run | None, spec: Spec, error: BaseException | None) -> End:
    """How a segment ended, from what its training function raised (None: it returned)."""
    epoch = 0 if run is None else run._epoch
    if error is None or isinstance(error, Unwind):
        if run is None:
            raise PenstockError("A segment without a run can't have ended well.")
        if error is not None and run._failure is not None:
            return End("failed", epoch, run._failure, user_traceback(error, reason=run._failure))
        return _verdict(run, spec)
    if isinstance(error, SystemExit):
        reason = f"the training function called sys.exit({'' if error.code is None else repr(error.code)})"
        return End("failed", epoch, reason[:_REASON_CHARS], user_traceback(error))
    if isinstance(error, Refused):
        return End("failed", epoch, clean(error.reason)[:_REASON_CHARS], clean(error.detail)[-_ERROR_CHARS:])
    if run is not None and run._failure is not None:  # the function turned our end into its own error
        return End("failed", epoch, run._failure, user_traceback(error))
    return End("failed", epoch, one_line(error), user_traceback(error))


def meter_of(
    settings: Settings, spec: Spec, devices: tuple[str, ...], fraction: float = 1.0, members: int = 1
) -> EpochMeter | None:
    """The meter of a segment, or of so many fused ones, that holds ``fraction`` of its devices, or None."""
    make = settings.make_meter
    if make is None:
        return None
    meter: EpochMeter | None
    if isinstance(make, FunctionType):
        meter = make(devices)
    else:
        for_trial: Callable[[tuple[str, ...], Any], EpochMeter | None] | None
        for_trial = getattr(make, "for_trial", None)
        for_group: Callable[..., EpochMeter | None] | None = getattr(make, "for_group", None)
        for_spec: Callable[..., EpochMeter | None] | None = getattr(make, "for_spec", None)
        if for_spec is not None:
            meter = for_spec(devices, spec.config, spec.options, members)
        elif members > 1 and for_group is not None:
            meter = for_group(devices, spec.config, members)
        else:
            meter = make(devices) if for_trial is None else for_trial(devices, spec.config)
    weigh: Callable[[float], None] | None = getattr(meter, "weigh", None)
    if weigh is not None:
        weigh(fraction)
    return meter


def files_of(spec: Spec, settings: Settings) -> FileCheckpoints:
    """The checkpoints of a segment in the study's folder."""
    if settings.files is None:
        raise PenstockError("A worker without files needs checkpoints of another kind.")
    return FileCheckpoints(
        settings.files,
        spec.trial,
        seed=spec.seed,
        config=spec.config,
        start=spec.start,
        until=spec.until,
        copy_from=spec.copy_from,
        named=spec.checkpoint,
        study=settings.study,
    )


def _verdict(run: Run, spec: Spec) -> End:
    epoch, until = run._epoch, spec.until
    if run._failure is not None:  # swallowed by a bare except
        return End(TrialStatus.FAILED.value, epoch, run._failure)
    at_end = until is not None and epoch >= until
    if run._stop is not None:
        reason, keep = run._stop
        if not keep:
            return End(TrialStatus.STOPPED.value, epoch, reason)
        if not at_end:
            return End(TrialStatus.PAUSED.value, epoch, reason, kept=True)
    # It may have been done before, and only nobody knew.
    went_on = epoch > (0 if until is None else spec.start)  # in this segment, before it was cut off
    was_done = not run._entered and (at_end or (went_on and epoch <= spec.known))
    if not run._new and not was_done:
        wanted = ", ".join(f"{name}=..." for name in run._objectives) or "loss=..."
        told = f"the training function reported nothing; call run.report({wanted})"
        if at_end and run._entered:  # it may report later, but its scheduler decides before
            first = f"epoch {until}" if until == spec.start + 1 else f"epochs {spec.start + 1} to {until}"
            told = (
                f"the training function reported nothing in {first}, all it was given; call run.report({wanted}) in "
                "the last epoch it is given at the latest, or give it more (min_epochs)"
            )
        return End(TrialStatus.FAILED.value, epoch, told)
    if at_end:
        # A task that is good enough has ended its trial, also in the last epoch of its segment.
        over = spec.last or (bool(run._reports) and TARGET_REACHED in run._reports[-1][1])
        return End((TrialStatus.COMPLETED if over else TrialStatus.PAUSED).value, epoch)
    reason = "" if until is None else f"the training function returned after {epoch} of {until} epochs"
    return End(TrialStatus.COMPLETED.value, epoch, reason)


def run_all(
    work: Any,
    specs: Sequence[Spec],
    settings: Settings,
    sinks: Sequence[Sink],
    tell: Callable[[int, End], None],
    *,
    devices: tuple[str, ...] = ("cpu",),
    threads: int = 1,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run the segments of one placement: one, or several as one training.

    Args:
        work: The training function, Task or Command.
        specs: The segments.
        settings: The study's.
        sinks: Where each segment's news goes.
        tell: Called with a segment's number and how it ended, as soon as it has.
        devices: Where to compute.
        threads: CPU threads.
        facts: What the planner says of the placement: its fusion count, or that it is to be measured; the executor:
            which one this is of the workers that train it together, the ``fraction`` of its devices it holds, the
            threads of one of them where it has several (``alone``), and the stage's file if it runs in a host job's
            ``bubble``.
    """
    if "bubble" in facts:
        from penstock.train._pausing import guest

        rest = {name: fact for name, fact in facts.items() if name != "bubble"}
        with guest(facts["bubble"]):
            run_all(work, specs, settings, sinks, tell, devices=devices, threads=threads, facts=rest)
        return
    if len(specs) > 1:
        from penstock.train._task import Task

        if isinstance(work, Task):
            from penstock.train._fused_worker import run_fused

            run_fused(work, specs, settings, sinks, tell, devices=devices, threads=threads, facts=facts)
            return
        if "fusion" in facts:
            from penstock.train._lane_worker import run_lanes

            run_lanes(work, specs, settings, sinks, tell, devices=devices, threads=threads, facts=facts)
            return
    for number, (spec, sink) in enumerate(zip(specs, sinks, strict=True)):
        if "probe" in facts:
            from penstock.train._probe import probe

            tell(number, probe(work, spec, settings, sink, facts, devices=devices, threads=threads))
            continue
        placed = {name: facts[name] for name in ("world", "fraction", "alone") if name in facts}
        end = execute(work, spec, settings, sink, devices=devices, threads=threads, **placed)
        tell(number, end)


def one_line(error: BaseException) -> str:
    """The last line of a traceback."""
    lines = traceback.format_exception_only(error)
    text = clean(lines[-1].strip()).removeprefix(_ERRORS) if lines else type(error).__name__
    if isinstance(error, pickle.PicklingError) and "__main__" in text:
        text += (
            ". A worker has not run the script: define it in a module to import, or keep it with run.save()"
        )
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."


def clean(text: str) -> str:
    """Text that any store can keep: no lone surrogates, no NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\\0")


def user_traceback(error: BaseException, *, reason: str | None = None) -> str:
    """The traceback without Penstock's own frames; ``reason`` stands in for the exception's own line.

    Empty where Penstock refused something by itself: the reason says it all.
    """
    report = traceback.TracebackException.from_exception(error)
    _strip(report, set())
    if not report.stack and (reason is not None or (report.__cause__ is None and report.__context__ is None)):
        return ""
    if reason is None:
        text = "".join(report.format())
    else:
        text = "Traceback (most recent call last):\n" + "".join(report.stack.format()) + reason + "\n"
    text = clean(text)
    if len(text) > _ERROR_CHARS:
        half = _ERROR_CHARS // 2
        text = text[:half] + "\n  ...\n" + text[-half:]
    return text


def _strip(report: traceback.TracebackException, seen: set[int]) -> None:
    if id(report) in seen:
        return
    seen.add(id(report))
    users = [frame for frame in report.stack if not _ours(frame.filename)]
    if users or (report.exc_type is not None and issubclass(report.exc_type, PenstockError | Unwind)):
        report.stack = traceback.StackSummary.from_list(users)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _strip(other, seen)


def _ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and not filename.startswith(_TESTING)


def stamp(offset_s: float) -> float:
    """Now, on the driver's clock: both read the machine's monotonic clock."""
    return offset_s + time.monotonic()


__all__ = [
    "End",
    "Settings",
    "Spec",
    "clean",
    "conclude",
    "execute",
    "files_of",
    "make_run",
    "meter_of",
    "one_line",
    "run_all",
    "user_traceback",
]
