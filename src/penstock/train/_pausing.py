"""Trials that run in the bubbles of a host job: they stop between layers at a bubble's end and go on in the next.

The two sides meet in a folder (best in memory, ``/dev/shm``), one pair of files per stage: a page of shared memory,
in which the host writes until when its device is lent, and a FIFO, through which it wakes a waiting trial. The host
never waits: to lend is one write into memory (and one byte through the FIFO if a trial sleeps), to take back is one
write (Hydro 5.1).
"""

from __future__ import annotations

import copy
import fcntl
import importlib
import inspect
import math
import mmap
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.core.errors import InvalidInput, Unsupported
from penstock.train._task import Task

_KEPT = 1024  # latest stops whose overruns are kept
(
    _UNTIL,
    _CLOSED_AT,
    _WAITING,
    _OPENED,
    _LENT_S,
    _FREE_BYTES,
    _STEPS,
    _WORKED_S,
    _PAUSES,
    _OVERRUN_S,
    _LATE_S,  # all overruns together
    _SPEED,  # the part of the host's time that was lent lately
    _YIELD,  # whether trials are to run only where nobody else wants the core
    _PID,  # the trial's process
    _CPU_AT_CLOSE,  # the CPU time it had used when its last bubble ended
    _CPU_AT_OPEN,  # and when the last began
    _STOPS,
    _OVERRUNS,  # of the latest stops, in a ring
) = range(18)
_SLOTS = _OVERRUNS + _KEPT  # doubles in the page
_ENDED = -1.0
_UNKNOWN_S = 0.002  # what is asked for something that never ran: as much as a host may be held up
_PATIENCE = 8  # bubbles that may be too short for what comes next before it begins all the same
_BETWEEN = "between operations"
_CUT = "the rest of what was stopped midway"
_TICK_S = 0.001
_HANDOVER_S = 30.0  # in which the trial before must have let go of a stage
_ALIVE_S = 0.5  # how often a waiting trial looks whether its host still lives


def _now_s() -> float:
    """The machine's monotonic clock, which all its processes share."""
    return time.monotonic()


def _page(path: Path) -> memoryview[float]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8 * _SLOTS)).cast("d")


def _wake_of(path: Path) -> Path:
    return path.with_suffix(".wake")


def _gpu_of(path: Path) -> Path:
    return path.with_suffix(".gpu")


def _cores_of(path: Path) -> Path:
    return path.with_suffix(".cores")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time that another process has used, as ``clock_getcpuclockid(3)`` makes it on Linux."""
    return (~pid << 3) | 2


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


def _alive(wake: int) -> bool:
    """Whether a host holds the FIFO's lock: the system gives it back however the host ends."""
    try:
        fcntl.flock(wake, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(wake, fcntl.LOCK_UN)
    return False


# ------------------------------------------------------------ the host's side


@final
class Margin:
    """How much before its expected end a bubble ends for trials: as little as the host can bear.

    Bubbles vary. A trial that still works when one has ended early holds the host up by what it overran. The margin
    grows quickly while that costs more of the host's time than allowed, and shrinks slowly while it costs less.

    Args:
        early: To begin with, as a part of the bubble.
        slowdown: What the host may lose, as a part of its time.
    """

    def __init__(self, early: float = 0.1, slowdown: float = 0.002) -> None:
        self.early, self.slowdown = early, slowdown
        self._late_s = self._step_s = 0.0

    def passed(self, step_s: float, late_s: float) -> float:
        """A step of the host took so long, and trials overran by so much in it; returns the margin from now on."""
        # Both fade alike, so their ratio is that of the last steps.
        self._late_s = 0.9 * self._late_s + late_s
        self._step_s = 0.9 * self._step_s + step_s
        if self._late_s > self.slowdown * self._step_s:
            self.early = min(0.5, 1.1 * self.early + 0.005)
        else:
            self.early = max(0.0, 0.98 * self.early - 0.0005)
        return self.early


@final
class Host:
    """The hook in a pipeline-parallel job: reports one stage's bubbles, so that trials can run in them.

    Between ``step()`` and the end of its block, whatever is not computed (forward, backward) is a bubble. Their lengths
    are learned over the first steps and followed from then on; only those that are long enough are lent, each until
    shortly before it is expected to end.

    Example::

        host = pk.bubbles.Host("/dev/shm/llm", stage=rank)
        host.watch(stage)                       # a torch.distributed.pipelining stage
        for batch in loader:
            with host.step():
                schedule.step(batch)
            optimizer.step()
        host.close()

    Not for several threads. One Host per stage and process.

    Args:
        folder: Where hosts and trials meet; made if missing.
        stage: The stage's number.
        gpu: The stage's GPU, as ``CUDA_VISIBLE_DEVICES`` names it (a number or a UUID), so that trials compute on the
            same one; None: the stage computes on the CPU.
        free_bytes: The device memory that trials may use there; None: not known.
        least_s: Shorter bubbles are not lent.
        learn_steps: Steps that are only watched.
        early: How much before the expected end a bubble ends for trials at first, as a part of its length; from then
            on the margin follows what trials overrun.
        slowdown: How much of the stage's time trials that overrun a bubble may cost.
        background: Let the system run a study's trials there only on cores that nobody else wants, where it can
            (Linux): on a CPU, what a trial does between its layers then can't disturb the host either.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        stage: int = 0,
        gpu: int | str | None = None,
        free_bytes: int | None = None,
        least_s: float = 0.003,
        learn_steps: int = 3,
        early: float = 0.1,
        slowdown: float = 0.002,
        background: bool = True,
    ) -> None:
        if not hasattr(os, "mkfifo"):
            raise Unsupported("Bubbles need FIFOs, which this system lacks: use Linux or macOS.")
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise InvalidInput(f"stage must be a whole number of at least 0, got {stage!r}.")
        if not (0 <= early < 1 and least_s > 0 and learn_steps >= 1 and 0 <= slowdown < 1):
            raise InvalidInput(
                "early and slowdown must be in [0, 1), least_s above 0, learn_steps at least 1, "
                f"got {early}, {slowdown}, {least_s}, {learn_steps}."
            )
        self.stage = stage
        self.least_s, self.learn_steps = least_s, learn_steps
        self._margin = Margin(early, slowdown)
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        self.path = base / f"stage{stage}.bubble"
        with suppress(FileNotFoundError):
            _wake_of(self.path).unlink()
        _gpu_of(self.path).write_text("" if gpu is None else str(gpu))
        pinned = gpu is None and hasattr(os, "sched_getaffinity")
        _cores_of(self.path).write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))) if pinned else "")
        os.mkfifo(_wake_of(self.path), 0o600)
        self._wake = os.open(_wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        fcntl.flock(self._wake, fcntl.LOCK_EX)
        with tempfile.NamedTemporaryFile(dir=base, delete=False) as file:  # trials must not see half a page
            file.write(bytes(8 * _SLOTS))
        Path(file.name).replace(self.path)
        self._words = _page(self.path)
        self._words[_YIELD] = float(background)
        self._words[_FREE_BYTES] = math.nan if free_bytes is None else float(free_bytes)
        self._gaps: list[deque[float]] = []
        self._at = 0
        self._gap_began: float | None = None
        self._steps = 0
        self._step_began: float | None = None
        self._late_s = self._lent_s = self._lent_before_s = self._time_s = 0.0

    @property
    def early(self) -> float:
        """How much before its expected end a bubble ends for trials now, as a part of its length."""
        return self._margin.early

    # ---------------------------------------------- reporting

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of the pipeline's schedule (not the optimizer's)."""
        self._at = 0
        self._follow()
        self._begin_gap()
        try:
            yield
        finally:
            self._end_gap()
            self._steps += 1
            self._words[_STEPS] = float(self._steps)

    def _follow(self) -> None:
        """From one step's beginning to the next's: what was lent, and what trials overran."""
        now, words = _now_s(), self._words
        if self._step_began is not None and self._steps > self.learn_steps:
            step_s = now - self._step_began
            self._margin.passed(step_s, words[_LATE_S] - self._late_s)
            self._time_s = 0.9 * self._time_s + step_s
            self._lent_s = 0.9 * self._lent_s + words[_LENT_S] - self._lent_before_s
            words[_SPEED] = min(1.0, self._lent_s / self._time_s)
        self._step_began = now
        self._late_s, self._lent_before_s = words[_LATE_S], words[_LENT_S]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around everything the stage computes within a step; ``watch`` does this for torch's pipelining."""
        self._end_gap()
        try:
            yield
        finally:
            self._at += 1
            self._begin_gap()

    def watch(self, stage: Any) -> Any:
        """Report the forward and backward passes of a ``torch.distributed.pipelining`` stage, and give it back."""
        names = [
            n
            for n in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
            if hasattr(stage, n)
        ]
        if len(names) < 2:
            raise InvalidInput(
                f"watch takes a stage of torch.distributed.pipelining, got {type(stage).__name__}."
            )
        for name in names:
            setattr(stage, name, self._watched(getattr(stage, name)))
        return stage

    def _watched(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.computing():
                return compute(*args, **kwargs)

        return watched

    def _begin_gap(self) -> None:
        now = self._gap_began = _now_s()
        if self._steps < self.learn_steps or self._at >= len(self._gaps):
            return
        length_s = self.expected_s(self._at)
        if length_s >= self.least_s:
            self.lend(length_s * (1 - self._margin.early), now)

    def _end_gap(self) -> None:
        if self._gap_began is None:
            return
        now = self.take_back()
        if self._at == len(self._gaps):
            self._gaps.append(deque(maxlen=16))
        self._gaps[self._at].append(now - self._gap_began)
        self._gap_began = None

    def expected_s(self, gap: int) -> float:
        """How long a step's ``gap``-th bubble is expected to last: a cautious quarter of the last ones were shorter."""
        seen = sorted(self._gaps[gap])
        return seen[len(seen) // 4]

    @property
    def bubbles_s(self) -> list[float]:
        """The expected lengths of a step's gaps, long and short."""
        return [self.expected_s(gap) for gap in range(len(self._gaps))]

    # ---------------------------------------------- lending

    def lend(self, length_s: float = math.inf, now_s: float | None = None) -> None:
        """Lend the device for ``length_s``, or until it is taken back."""
        now = _now_s() if now_s is None else now_s
        words = self._words
        self._read_cpu(_CPU_AT_OPEN)
        words[_OPENED] = now
        words[_UNTIL] = now + length_s
        if words[_WAITING]:
            with suppress(BlockingIOError):  # full: whoever sleeps has bytes enough to wake up
                os.write(self._wake, b".")

    def take_back(self) -> float:
        """End a bubble, now; returns the time."""
        now = _now_s()
        words = self._words
        if words[_UNTIL] > 0:
            self._read_cpu(_CPU_AT_CLOSE)
            words[_CLOSED_AT] = now
            words[_LENT_S] += min(now, words[_UNTIL]) - words[_OPENED]
            words[_UNTIL] = 0.0
        return now

    def _read_cpu(self, word: int) -> None:
        """Note the CPU time that the trial has used: what it uses between bubbles is its overrun. Some microseconds."""
        if self._words[_PID]:
            with suppress(OSError):
                self._words[word] = time.clock_gettime(_cpu_clock(int(self._words[_PID])))

    @property
    def lent_s(self) -> float:
        """How long the device has been lent, in all."""
        return self._words[_LENT_S]

    @property
    def guest(self) -> GuestUse:
        """What a trial has made of it."""
        return _use(self._words)

    def close(self) -> None:
        """The host job has ended: its device is free, and a trial there goes on without pauses."""
        if self._wake < 0:
            return
        self._words[_UNTIL] = _ENDED
        with suppress(BlockingIOError):
            os.write(self._wake, b".")
        os.close(self._wake)
        self._wake = -1

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
@dataclass(frozen=True, slots=True)
class GuestUse:
    """What a trial made of the bubbles.

    Attributes:
        worked_s: How long its layers have worked.
        pauses: How often it has stopped.
        overrun_s: The most that it worked on after a bubble's end.
        overruns_s: How long it worked on after each of the latest bubbles' ends; 0 where it had stopped by then.
    """

    worked_s: float
    pauses: int
    overrun_s: float
    overruns_s: tuple[float, ...] = ()

    def quantile_s(self, part: float) -> float:
        """The overrun that ``part`` of the latest stops did not exceed; NaN if there were none."""
        if not 0 <= part <= 1:
            raise InvalidInput(f"part must be in [0, 1], got {part!r}.")
        ordered = sorted(self.overruns_s)
        return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def _use(words: memoryview[float]) -> GuestUse:
    stops = int(words[_STOPS])
    latest = tuple(words[_OVERRUNS + number % _KEPT] for number in range(max(0, stops - _KEPT), stops))
    return GuestUse(words[_WORKED_S], int(words[_PAUSES]), words[_OVERRUN_S], latest)


# ------------------------------------------------------------ the trial's side


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
        self._words = _page(self.path)
        self._wake = os.open(_wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        self._paces: dict[object, tuple[float, float]] = {}  # mean and mean deviation
        self._needs: dict[object, float] = {_CUT: 0.0}  # it can be stopped again
        self._slot: object = None
        self._since = self._cpu_s = 0.0
        self._inside = self._cut = self._ticks = False
        self._background = False
        self._by_cpu = False  # count the CPU's time, not the time that passes
        self._settle = _await_gpu if _read(_gpu_of(self.path)) else None
        self._words[_CPU_AT_CLOSE] = self._words[_CPU_AT_OPEN] = 0.0
        self._words[_PID] = float(os.getpid()) if sys.platform == "linux" else 0.0

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
        cores = {int(core) for core in _read(_cores_of(self.path)).split()}
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
        return _use(self._words)

    @property
    def free_bytes(self) -> int | None:
        """The device memory that the host leaves free; None: not known."""
        found = self._words[_FREE_BYTES]
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
        now = _now_s()
        by_cpu = self._by_cpu or slot is _BETWEEN
        cpu_s = time.process_time() if by_cpu or self._slot is _BETWEEN else 0.0
        late = self._slot is not None and self._account(now, cpu_s)
        self._cut = False
        until = self._words[_UNTIL]
        if until == _ENDED:
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
        until = self._words[_UNTIL]
        if until == _ENDED:
            self._time(False)
            return
        now = _now_s()
        if self._inside or self._slot is None or now < until:
            return
        self._inside = self._cut = True
        try:
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
            self._account(_now_s(), time.process_time())
            self._slot = None

    def _account(self, now: float, cpu_s: float) -> bool:
        """What the last slot took until now, and until so much CPU time; returns whether the bubble ended meanwhile."""
        words, slot = self._words, self._slot
        took = now - self._since
        by_cpu = self._by_cpu or slot is _BETWEEN
        spent = cpu_s - self._cpu_s if by_cpu else took
        took = min(took, spent)  # not what it had to wait for the core: it did not keep the host from it
        words[_WORKED_S] += took
        closed = words[_CLOSED_AT]
        if closed <= self._since:
            if not self._cut:  # a part says nothing of the whole
                self._learn(slot, took)
            return False
        opened = words[_OPENED]
        late = (opened if opened > closed else now) - closed
        if by_cpu:
            since, until = words[_CPU_AT_CLOSE] - self._cpu_s, spent
            if opened > closed:  # it has got into the next bubble
                until = words[_CPU_AT_OPEN] - self._cpu_s
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
        stops = int(words[_STOPS])
        words[_OVERRUNS + stops % _KEPT] = late
        words[_STOPS] = stops + 1.0
        words[_OVERRUN_S] = max(words[_OVERRUN_S], late)
        words[_LATE_S] += late

    def _pause(self, slot: object, now: float) -> float:
        """Sleep until a bubble begins (or the host is gone); returns the time."""
        words = self._words
        words[_PAUSES] += 1
        need = self._needs.get(slot, _UNKNOWN_S) + self.slack_s
        seen, passed = words[_OPENED], 0
        self._time(False)  # it must not wake up for nothing
        words[_WAITING] = 1.0
        try:
            while True:
                now = _now_s()
                until, opened = words[_UNTIL], words[_OPENED]
                if until == _ENDED:
                    return now
                if opened > seen:
                    seen, passed = opened, passed + 1
                if until <= now:
                    if not select.select([self._wake], [], [], _ALIVE_S)[0]:
                        if not _alive(self._wake):
                            words[_UNTIL] = _ENDED
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
            words[_WAITING] = 0.0
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
        self._words[_PID] = 0.0
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


# ------------------------------------------------------------ what executors see


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that lends its bubbles.

    Attributes:
        path: Its ``.bubble`` file.
        name: Its name, unique in its folder.
        gpu: Its GPU as ``CUDA_VISIBLE_DEVICES`` names it; None: it computes on the CPU.
    """

    path: Path
    name: str
    gpu: str | None

    def now(self) -> tuple[float, int | None]:
        """The part of the time that is lent at present (1: the host has ended), and the device memory left free."""
        try:
            words = _page(self.path)
            wake = os.open(_wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            return 1.0, None
        try:
            over = words[_UNTIL] == _ENDED or not _alive(wake)
        finally:
            os.close(wake)
        free = None if math.isnan(words[_FREE_BYTES]) else int(words[_FREE_BYTES])
        return (1.0, None) if over else (words[_SPEED], free)


def stages_in(folder: str | os.PathLike[str]) -> list[Stage]:
    """The stages that lend bubbles in a folder, in order.

    Raises:
        InvalidInput: There are none.
    """
    found = []
    for path in sorted(Path(folder).glob("*.bubble"), key=lambda p: (len(p.name), p.name)):
        found.append(Stage(path, path.stem, _read(_gpu_of(path)) or None))
    if not found:
        raise InvalidInput(f"No host job lends bubbles in {folder}: start it first.")
    return found


@contextmanager
def guest(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a trial stop between any two operations of torch, and in Python code, while the host of a stage computes.

    Finer than layers, and for every kind of training: fused groups, functions, what has no modules. What is compiled
    is one operation, so nothing is compiled meanwhile.

    Args:
        path: The stage's ``.bubble`` file.
    """
    from penstock.train import _fused_loop
    from penstock.train._operations import stopping

    gate = _patient(path)
    gate.to_cores()
    if gate._words[_YIELD]:
        gate.to_background()
    importlib.import_module("torch._dynamo")  # optimizers import it, for seconds: no bubble's time for that
    cost_s = _fused_loop._costs["compile_cost_s"]
    _fused_loop._costs["compile_cost_s"] = math.inf
    try:
        with stopping(gate.passage), gate.anywhere():
            gate.between()
            yield
    finally:
        _fused_loop._costs["compile_cost_s"] = cost_s
        gate.rest()
        gate.close()


def _patient(path: str | os.PathLike[str]) -> Gate:
    """A stage's gate, as soon as the trial before has let go of it."""
    deadline_s = _now_s() + _HANDOVER_S
    while True:
        try:
            return Gate(path)
        except Unsupported:
            if _now_s() > deadline_s:
                raise
            time.sleep(0.01)


# ------------------------------------------------------------ tasks

_gates: dict[str, Gate] = {}


def gate_of(folder: str | os.PathLike[str], *, background: bool = True) -> Gate:
    """This process's gate in a folder: taken at the first call, held as long as the process lives.

    Args:
        folder: Where the hosts are.
        background: Also let the system run this process only where no other wants the core (SCHED_IDLE), where it can.
    """
    key = str(Path(folder).resolve())
    if key not in _gates:
        _gates[key] = Gate.any(folder)
        _gates[key].to_cores()
        if background:
            _gates[key].to_background()
    return _gates[key]


@final
class _Attached:
    """A factory of models or optimizers whose products pause; it has the signature of the original."""

    def __init__(self, make: Callable[..., Any], folder: str, what: str, background: bool) -> None:
        self.make, self.folder, self.what, self.background = make, folder, what, background
        self.__name__ = getattr(make, "__name__", type(make).__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.make)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.make(*args, **kwargs)
        gate = gate_of(self.folder, background=self.background)
        return gate.attach(made) if self.what == "model" else gate.attach_optimizer(made)


def squeeze_task(task: Task, folder: str | os.PathLike[str], *, background: bool = True) -> Task:
    """A task whose trials run in the bubbles that hosts lend in ``folder``, with the results they have alone.

    Each worker process takes one stage's bubbles for itself: give the study as many devices as there are stages, and
    ``fuse=False``.

    Args:
        task: The task.
        folder: Where the host's ``Host``s are.
        background: Also let the system run trials only on cores that nobody else wants, where it can (Linux); what a
            trial does between its layers then can't disturb the host either.
    """
    if not isinstance(task, Task):
        raise InvalidInput(
            f"squeeze takes a pk.Task, got {task!r}. In a training function, use pk.bubbles.Gate."
        )
    other = copy.copy(task)
    base = str(Path(folder).resolve())
    other.model = _Attached(task.model, base, "model", background)
    make = task.optimizer
    if isinstance(make, Mapping):
        other.optimizer = {name: _Attached(one, base, "optimizer", background) for name, one in make.items()}
    else:
        other.optimizer = _Attached(make, base, "optimizer", background)
    return other
