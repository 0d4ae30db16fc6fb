"""Inline: an executor that runs trials one after another in this process."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any, final

from penstock.core import (
    Clock,
    Device,
    Ended,
    Event,
    Free,
    Reported,
    Saved,
    Started,
    TrialStatus,
    WallClock,
)
from penstock.core.errors import ExecutorError
from penstock.core.measurement import measurement
from penstock.execute import Executor, Job, Launch
from penstock.execute._wire import spec_of
from penstock.train._checkpoint import Report
from penstock.train._worker import Settings, Spec, execute

_DEVICE = Device("cpu:0", cores=os.cpu_count() or 1)


@final
class Inline(Executor):
    """Runs trials one after another in a thread of this process: nothing is pickled, no process is started.

    For work that is short or is given large data, as scikit-learn's estimators are. The work may use all cores. A
    training that kills the process kills the study with it, and ``timeout_s`` is not kept. The state of the
    global random generators is what it was before when the executor is closed.
    """

    def __init__(self) -> None:
        self._clock = WallClock()
        self._settings: Settings | None = None
        self._work: Any = None
        self._launches: queue.SimpleQueue[Launch | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stops: dict[int, tuple[str, bool]] = {}
        self._busy: set[int] = set()
        self._generators: list[tuple[Any, Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Inline, ()

    @property
    def clock(self) -> Clock:
        """The wall clock."""
        return self._clock

    @property
    def slots(self) -> int:
        """One."""
        return 1

    def open(self, job: Job) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        self._work = job.work
        self._settings = Settings(
            job.files.absolute(),
            tuple(job.metrics),
            str(job.options.get("study", "")),
            job.options.get("make_meter"),
        )
        self._generators = _states()
        self._thread = threading.Thread(target=self._loop, name="penstock-inline", daemon=True)
        self._thread.start()

    def free(self) -> Sequence[Free]:
        """The process, when nothing runs in it."""
        return () if self._busy else (Free(_DEVICE),)

    def launch(self, launches: Sequence[Launch]) -> None:
        """Hand the placements to the thread."""
        for launch in launches:
            self._busy |= {segment.trial.id for segment in launch.placement.segments}
            self._launches.put(launch)

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """Heard at the next report."""
        for trial in trials:
            if trial in self._busy:
                self._stops[trial] = (reason, keep)

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events."""
        events: list[Event] = []
        try:
            if self._busy or not self._events.empty():
                events.append(self._events.get(timeout=timeout_s, block=timeout_s != 0))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        for event in events:
            if isinstance(event, Ended):
                self._busy.discard(event.trial)
                self._stops.pop(event.trial, None)
        return events

    def close(self) -> None:
        """Wait for what runs, and put the random generators back."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        for trial in self._busy:
            self._stops[trial] = ("the study was left", True)
        self._launches.put(None)
        thread.join()
        self._busy.clear()
        self._stops.clear()
        for restore, state in self._generators:
            restore(state)
        self._work = None

    # --- in the thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (launch := self._launches.get()) is not None:
            for number in range(len(launch.placement.segments)):
                self._run(launch, number)

    def _run(self, launch: Launch, number: int) -> None:
        placement, segment = launch.placement, launch.placement.segments[number]
        trial = segment.trial
        sink = _Sink(self, trial.id)
        told = self._stops.get(trial.id)
        if told is not None:  # before it started
            status = TrialStatus.PAUSED if told[1] else TrialStatus.STOPPED
            ended = Ended(self._clock.now_s(), trial.id, status, launch.known[number], told[0], kept=told[1])
            self._events.put(ended)
            return
        spec = Spec(*spec_of(launch, number))
        assert self._settings is not None
        start = segment.start
        self._events.put(
            Started(self._clock.now_s(), trial.id, start, tuple(placement.shares), placement.attempt)
        )
        end = execute(self._work, spec, self._settings, sink, threads=_DEVICE.cores)
        status = TrialStatus(end.status)
        self._events.put(
            Ended(
                self._clock.now_s(),
                trial.id,
                status,
                end.epoch,
                end.reason,
                end.error,
                kept=end.kept,
                energy=None if end.energy is None else measurement(*end.energy),
            )
        )


@final
class _Sink:
    """Puts a trial's news among the executor's events."""

    __slots__ = ("_owner", "_trial")

    def __init__(self, owner: Inline, trial: int) -> None:
        self._owner, self._trial = owner, trial

    def reported(self, report: Report) -> None:
        epoch, metrics, train_s, energy = report
        drawn = None if energy is None else measurement(*energy)
        now_s = self._owner._clock.now_s()
        self._owner._events.put(Reported(now_s, self._trial, epoch, metrics, train_s, drawn))

    def saved(self, epoch: int, path: str) -> None:
        self._owner._events.put(Saved(self._owner._clock.now_s(), self._trial, epoch, path))

    def told(self) -> tuple[str, bool] | None:
        return self._owner._stops.get(self._trial)


def _states() -> list[tuple[Any, Any]]:
    """The states of the global random generators that are loaded, each with what restores it."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        states.append((torch.set_rng_state, torch.get_rng_state()))
    return states
