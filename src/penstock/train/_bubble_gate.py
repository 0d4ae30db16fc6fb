"""The trial's side of bubbles: a gate it passes between its layers, where it waits while the host computes."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from penstock.core.errors import InvalidInput, Unsupported
from penstock.train._bubble_page import (
    CLOSED_AT,
    CPU_AT_CLOSE,
    CPU_AT_OPEN,
    ENDED,
    FREE_BYTES,
    KEPT,
    LATE_S,
    OPENED,
    OVERRUN_S,
    OVERRUNS,
    PAUSES,
    PID,
    STOPS,
    UNTIL,
    WAITING,
    WORKED_S,
    GuestUse,
    clock_s,
    cores_of,
    gpu_of,
    is_alive,
    page_of,
    text_of,
    use_of,
    wake_of,
)

_UNKNOWN_S = 0.002  # what is asked for something that never ran: as much as a host may be held up
_PATIENCE = 8  # bubbles that may be too short for what comes next before it begins all the same
_BETWEEN = "between operations"
_CUT = "the rest of what was stopped midway"
_TICK_S = 0.001
_ALIVE_S = 0.5  # how often a waiting trial looks whether its host still lives


def _threads() -> list[int]:
    """All of this process, for what the system sets thread by thread."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


def _await_gpu() -> None:
    """Wait until GPUs have done what this process gave them: they are told far ahead of what they do."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@final
class Gate:
    """Where a trial passes between its layers: it waits there while the host computes.

    A layer begins only if it ends before the bubble does, by what it took before and how much that varied. What never
    ran begins only with 2 ms left. What is longer than every bubble begins with one, so that it is an overrun
    (counted) and not a trial that hangs for ever.

    One trial at a time: the gate is locked until it is closed or its process ends.

    Args:
        path: A stage's ``.bubble`` file.
        slack_s: How long before the end of a bubble to stop.

    Raises:
        InvalidInput: There is no such file.
        Unsupported: Another trial holds it.
    """

    def __init__(self, path: str | os.PathLike[str], *, slack_s: float = 0.0002) -> None:
        self.path = Path(path)
        try:
            self._lock = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise InvalidInput(
                f"No bubbles at {self.path}: {error.strerror}. Has the host job started?"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise Unsupported(f"The bubbles at {self.path} are another trial's.") from error
        self.slack_s = slack_s
        self._words = page_of(self.path)
        self._wake = os.open(wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        self._paces: dict[object, tuple[float, float]] = {}  # mean and mean deviation
        self._needs: dict[object, float] = {_CUT: 0.0}  # it can be stopped again
        self._slot: object = None
        self._since = self._cpu_s = 0.0
        self._inside = self._cut = self._ticks = False
        self._background = False
        self._by_cpu = False  # count the CPU's time, not the time that passes
        self._settle = _await_gpu if text_of(gpu_of(self.path)) else None
        self._words[CPU_AT_CLOSE] = self._words[CPU_AT_OPEN] = 0.0
        self._words[PID] = float(os.getpid()) if sys.platform == "linux" else 0.0

    def to_background(self) -> None:
        """Let the system run this process only where no other wants the core, where it can."""
        if not hasattr(os, "SCHED_IDLE"):
            return
        try:
            for thread in _threads():
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            return
        self._background, self._by_cpu = True, self._settle is None
        if os.getsid(0) == os.getpid():
            # Linux shares cores between sessions first (autogroups), so within a session of its own even an idle
            # process has half of the core that a host of another session wants.
            with suppress(OSError):
                Path("/proc/self/autogroup").write_text("19")

    def _to_foreground(self) -> None:
        """The host is over: what is left of the trial is not in anybody's way, as far as the system lets it return."""
        self._background = self._by_cpu = False
        with suppress(OSError):
            for thread in _threads():
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            if os.getsid(0) == os.getpid():
                Path("/proc/self/autogroup").write_text("0")

    def to_cores(self) -> None:
        """Run where the host's stage runs, if that is on a CPU: elsewhere, other stages compute meanwhile."""
        cores = {int(core) for core in text_of(cores_of(self.path)).split()}
        if cores and hasattr(os, "sched_setaffinity"):
            for thread in _threads():
                with suppress(OSError):
                    os.sched_setaffinity(thread, cores)

    @classmethod
    def any(cls, folder: str | os.PathLike[str], *, slack_s: float = 0.0002) -> Gate:
        """A gate of a host's that no other trial holds.

        Raises:
            InvalidInput: The folder has none.
            Unsupported: All are held.
        """
        paths = sorted(Path(folder).glob("*.bubble"))
        if not paths:
            raise InvalidInput(f"No host job lends bubbles in {folder}: start it first.")
        for path in paths:
            with suppress(Unsupported):
                return cls(path, slack_s=slack_s)
        raise Unsupported(f"All {len(paths)} stages in {folder} have their trial: use fewer devices.")

    @property
    def use(self) -> GuestUse:
        """What was made of the bubbles."""
        return use_of(self._words)

    @property
    def free_bytes(self) -> int | None:
        """The device memory that the host leaves free; None: not known."""
        found = self._words[FREE_BYTES]
        return None if math.isnan(found) else int(found)

    def passage(self, slot: object) -> None:
        """Go through when there is time for what comes next; ``slot`` says what that is."""
        if self._settle is not None:
            self._settle()
        self._inside = True
        try:
            self._pass(slot)
        finally:
            self._inside = False

    def _pass(self, slot: object) -> None:
        now = clock_s()
        by_cpu = self._by_cpu or slot is _BETWEEN
        cpu_s = time.process_time() if by_cpu or self._slot is _BETWEEN else 0.0
        late = self._slot is not None and self._account(now, cpu_s)
        self._cut = False
        until = self._words[UNTIL]
        if until == ENDED:
            if self._background:
                self._to_foreground()
        elif now + self._needs.get(slot, _UNKNOWN_S) + self.slack_s > until:
            if not late:
                self._stopped(0.0)
            now = self._pause(slot, now)
            cpu_s = time.process_time() if by_cpu else 0.0
        self._slot, self._since, self._cpu_s = slot, now, cpu_s

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Within it, a trial stops in the midst of Python code, too, not only where it passes.

        A timer looks every millisecond of a bubble whether it is over; what is one call of a library still runs to its
        end. It does nothing outside of the main thread, and where SIGALRM has another use.
        """
        main = threading.current_thread() is threading.main_thread()
        if (
            not main
            or self._ticks
            or signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN)
        ):
            yield
            return
        before = signal.signal(signal.SIGALRM, self._tick)
        signal.siginterrupt(signal.SIGALRM, False)  # libraries need not know
        self._ticks = True
        self._time(True)
        try:
            yield
        finally:
            self._time(False)
            self._ticks = False
            signal.signal(signal.SIGALRM, before)

    def _time(self, on: bool) -> None:
        if self._ticks and threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, _TICK_S if on else 0.0, _TICK_S if on else 0.0)

    def _tick(self, number: int, frame: object) -> None:
        if self._inside or self._slot is None:
            return
        self._inside = True  # before anything is looked at: the timer may fire again in the midst of this
        try:
            until = self._words[UNTIL]
            if until == ENDED:
                self._time(False)
                return
            now = clock_s()
            if now < until:
                return
            self._cut = True
            if not self._account(now, time.process_time()):
                self._stopped(0.0)
            self._since, self._cpu_s = self._pause(_CUT, now), time.process_time()
        finally:
            self._inside = False

    def between(self) -> None:
        """Say that what comes next (data, a report, saving) is no layer's work: it waits for a bubble like any other.

        It counts by the CPU time that it takes, for it may be a wait.
        """
        self.passage(_BETWEEN)

    def rest(self) -> None:
        """Say that what comes next is not the trial's any more, and not counted."""
        if self._slot is not None:
            self._account(clock_s(), time.process_time())
            self._slot = None

    def _account(self, now: float, cpu_s: float) -> bool:
        """What the last slot took until now, and until so much CPU time; returns whether the bubble ended meanwhile."""
        words, slot = self._words, self._slot
        took = now - self._since
        by_cpu = self._by_cpu or slot is _BETWEEN
        spent = cpu_s - self._cpu_s if by_cpu else took
        took = min(took, spent)  # not what it had to wait for the core: it did not keep the host from it
        words[WORKED_S] += took
        closed = words[CLOSED_AT]
        if closed <= self._since:
            if not self._cut:  # a part says nothing of the whole
                self._learn(slot, took)
            return False
        opened = words[OPENED]
        late = (opened if opened > closed else now) - closed
        if by_cpu:
            since, until = words[CPU_AT_CLOSE] - self._cpu_s, spent
            if opened > closed:  # it has got into the next bubble
                until = words[CPU_AT_OPEN] - self._cpu_s
            late = min(late, until - since if 0 <= since <= until <= spent else spent)
            if not self._cut:
                self._learn(slot, took)
        elif not self._cut and closed - self._since > self._needs.get(slot, 0.0):
            self._learn(slot, closed - self._since)  # then it had the host beside it: so long at least
        self._stopped(late)
        return True

    def _learn(self, slot: object, took: float) -> None:
        pace = self._paces.get(slot)
        if pace is None:
            mean, deviation = took, took / 2
        else:
            mean, deviation = pace
            error = took - mean
            mean += error / 8
            deviation += (abs(error) - deviation) / 4
        self._paces[slot] = mean, deviation
        # The bound that TCP uses for the times of acknowledgements (RFC 6298, 2.3): seldom exceeded, soon forgotten.
        self._needs[slot] = mean + 4 * deviation

    def _stopped(self, late: float) -> None:
        words = self._words
        stops = int(words[STOPS])
        words[OVERRUNS + stops % KEPT] = late
        words[STOPS] = stops + 1.0
        words[OVERRUN_S] = max(words[OVERRUN_S], late)
        words[LATE_S] += late

    def _pause(self, slot: object, now: float) -> float:
        """Sleep until a bubble begins (or the host is gone); returns the time."""
        words = self._words
        words[PAUSES] += 1
        need = self._needs.get(slot, _UNKNOWN_S) + self.slack_s
        seen, passed = words[OPENED], 0
        self._time(False)  # it must not wake up for nothing
        words[WAITING] = 1.0
        try:
            while True:
                now = clock_s()
                until, opened = words[UNTIL], words[OPENED]
                if until == ENDED:
                    return now
                if opened > seen:
                    seen, passed = opened, passed + 1
                if until <= now:
                    if not select.select([self._wake], [], [], _ALIVE_S)[0]:
                        if not is_alive(self._wake):
                            words[UNTIL] = ENDED
                    else:
                        with suppress(BlockingIOError):
                            os.read(self._wake, 4096)
                    continue
                length = until - opened
                fresh = need > length and now - opened < length / 4  # no bubble like this is long enough
                if now + need <= until or (passed and fresh) or passed > _PATIENCE:
                    return now
                time.sleep(max(0.0, until - now))
        finally:
            words[WAITING] = 0.0
            self._time(True)

    def attach(self, model: Any) -> Any:
        """Let a model stop before each module's forward and backward pass; gives it back."""
        for module in model.modules():
            module.register_forward_pre_hook(_Forward(self, id(module)))
            module.register_forward_hook(_Backward(self, id(module)))
        model.register_forward_hook(_Rest(self))
        return model

    def attach_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer wait before each step; gives it back."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is not None:
            register(_Step(self))
            optimizer.register_step_post_hook(_Rest(self))
        return optimizer

    def close(self) -> None:
        """Give the gate to others."""
        if self._lock < 0:
            return
        self._words[PID] = 0.0
        os.close(self._wake)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Hook:
    """A hook that copies of its model share: the gate is the process's."""

    def __init__(self, gate: Gate, name: int = 0) -> None:
        self.gate, self.name = gate, name

    def __deepcopy__(self, memo: object) -> _Hook:
        return self


@final
class _Forward(_Hook):
    def __call__(self, module: Any, args: Any) -> None:
        self.gate.passage((self.name, "forward", module.training))


@final
class _Backward(_Hook):
    """On the graph's nodes, not on the module: module backward hooks would forbid in-place layers behind it."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        for node in _nodes(output):
            node.register_prehook(self._pass)

    def _pass(self, gradients: Any) -> None:
        self.gate.passage((self.name, "backward"))


@final
class _Step(_Hook):
    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.gate.passage("optimizer")


@final
class _Rest(_Hook):
    """After a step, and after a forward pass that no backward pass follows: data, metrics, reports."""

    def __call__(self, source: Any, args: Any, rest: Any) -> None:
        if not getattr(source, "training", False):
            self.gate.between()


def _nodes(output: Any) -> Iterator[Any]:
    """The graph's nodes that made an output, which may be nested."""
    if isinstance(output, tuple | list):
        for item in output:
            yield from _nodes(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _nodes(item)
    else:
        node = getattr(output, "grad_fn", None)
        if node is not None:
            yield node
