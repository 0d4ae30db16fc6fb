"""A simulated trial's steps: what its training function tells, cut into epochs that take virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core import TrialStatus
from penstock.core.errors import ExecutorError
from penstock.train._checkpoint import Report
from penstock.train._worker import End

_CLOSED = ("closed", False)


@final
@dataclass(slots=True)
class Step:
    """What a trial does next: some epochs, then its news."""

    epochs: list[int]  # those it takes time for, counted from 0
    reports: list[Report] = field(default_factory=list)
    saved: list[tuple[int, str]] = field(default_factory=list)
    end: End | None = None


@final
class Script:
    """The steps of one segment, in order, from the news its training function gives."""

    def __init__(self) -> None:
        self._at: int | None = None  # epochs accounted for
        self.steps: list[Step] = []

    def _to(self, epoch: int) -> Step:
        at = epoch - 1 if self._at is None else self._at
        if epoch > at or not self.steps:
            self.steps.append(Step(list(range(at, epoch))))
            self._at = epoch
        return self.steps[-1]

    def begin(self, epoch: int) -> None:
        if self._at is None:
            self._at = epoch

    def report(self, report: Report) -> None:
        self._to(report[0]).reports.append(report)

    def save(self, epoch: int, path: str) -> None:
        self._to(epoch).saved.append((epoch, path))

    def close(self, end: End) -> None:
        at = self._at or 0
        # A failure comes in the middle of an epoch: it has taken that epoch's time.
        extra = range(at, end.epoch + 1) if end.status == TrialStatus.FAILED else range(at, end.epoch)
        if extra or not self.steps:
            self.steps.append(Step(list(extra)))
        self.steps[-1].end = end


@final
class Eager:
    """A training function that is called at once: its budget is finite."""

    def __init__(self, call: Callable[[Any], End], start: int) -> None:
        self._script = Script()
        self._script.begin(start)
        self._script.close(call(self))
        self._next = 0

    def reported(self, report: Report) -> None:
        self._script.report(report)

    def saved(self, epoch: int, path: str) -> None:
        self._script.save(epoch, path)

    def told(self) -> tuple[str, bool] | None:
        return None

    def next(self) -> Step:
        step = self._script.steps[self._next]
        self._next += 1
        return step

    def quit(self) -> None:
        pass


@final
class Lazy:
    """A training function without a budget, which may go on for ever: it is let on epoch by epoch."""

    def __init__(self, call: Callable[[Any], End], start: int) -> None:
        self._script = Script()
        self._script.begin(start)
        self._go = threading.Semaphore(0)
        self._came = threading.Semaphore(0)
        self._stop: tuple[str, bool] | None = None
        self._over = False
        self._thread = threading.Thread(
            target=self._run, args=(call,), name="penstock-simulated", daemon=True
        )
        self._begun = False

    def _run(self, call: Callable[[Any], End]) -> None:
        self._go.acquire()
        try:
            self._script.close(call(self))
        finally:
            self._over = True
            self._came.release()

    def reported(self, report: Report) -> None:
        self._script.report(report)

    def saved(self, epoch: int, path: str) -> None:
        self._script.save(epoch, path)

    def told(self) -> tuple[str, bool] | None:
        if self._script.steps and self._stop is None:
            self._came.release()
            self._go.acquire()
        return self._stop

    def next(self) -> Step:
        steps = self._script.steps
        if not steps:
            if not self._begun:
                self._begun = True
                self._thread.start()
            self._go.release()
            self._came.acquire()
        if not steps:
            raise ExecutorError("A simulated training function ended without a word.")
        return steps.pop(0)

    def quit(self) -> None:
        """Unwind the function; what it does from now on is nobody's."""
        self._stop = _CLOSED
        if self._begun and not self._over:
            self._go.release()
            self._thread.join(timeout=10)
