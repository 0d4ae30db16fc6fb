"""The host's side of bubbles: it says when its device is free, and takes it back."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
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
    LATE_S,
    LENT_S,
    OPENED,
    PID,
    SLOTS,
    SPEED,
    STEPS,
    UNTIL,
    WAITING,
    YIELD,
    GuestUse,
    clock_s,
    cores_of,
    gpu_of,
    page_of,
    use_of,
    wake_of,
)


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time that another process has used, as ``clock_getcpuclockid(3)`` makes it on Linux."""
    return (~pid << 3) | 2


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
            wake_of(self.path).unlink()
        gpu_of(self.path).write_text("" if gpu is None else str(gpu))
        pinned = gpu is None and hasattr(os, "sched_getaffinity")
        cores_of(self.path).write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))) if pinned else "")
        os.mkfifo(wake_of(self.path), 0o600)
        self._wake = os.open(wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        fcntl.flock(self._wake, fcntl.LOCK_EX)
        with tempfile.NamedTemporaryFile(dir=base, delete=False) as file:  # trials must not see half a page
            file.write(bytes(8 * SLOTS))
        Path(file.name).replace(self.path)
        self._words = page_of(self.path)
        self._words[YIELD] = float(background)
        self._words[FREE_BYTES] = math.nan if free_bytes is None else float(free_bytes)
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
            self._words[STEPS] = float(self._steps)

    def _follow(self) -> None:
        """From one step's beginning to the next's: what was lent, and what trials overran."""
        now, words = clock_s(), self._words
        if self._step_began is not None and self._steps > self.learn_steps:
            step_s = now - self._step_began
            self._margin.passed(step_s, words[LATE_S] - self._late_s)
            self._time_s = 0.9 * self._time_s + step_s
            self._lent_s = 0.9 * self._lent_s + words[LENT_S] - self._lent_before_s
            words[SPEED] = min(1.0, self._lent_s / self._time_s)
        self._step_began = now
        self._late_s, self._lent_before_s = words[LATE_S], words[LENT_S]

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
        now = self._gap_began = clock_s()
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
        now = clock_s() if now_s is None else now_s
        words = self._words
        self._read_cpu(CPU_AT_OPEN)
        words[OPENED] = now
        words[UNTIL] = now + length_s
        if words[WAITING]:
            with suppress(BlockingIOError):  # full: whoever sleeps has bytes enough to wake up
                os.write(self._wake, b".")

    def take_back(self) -> float:
        """End a bubble, now; returns the time."""
        now = clock_s()
        words = self._words
        if words[UNTIL] > 0:
            self._read_cpu(CPU_AT_CLOSE)
            words[CLOSED_AT] = now
            words[LENT_S] += min(now, words[UNTIL]) - words[OPENED]
            words[UNTIL] = 0.0
        return now

    def _read_cpu(self, word: int) -> None:
        """Note the CPU time that the trial has used: what it uses between bubbles is its overrun. Some microseconds."""
        if self._words[PID]:
            with suppress(OSError):
                self._words[word] = time.clock_gettime(_cpu_clock(int(self._words[PID])))

    @property
    def lent_s(self) -> float:
        """How long the device has been lent, in all."""
        return self._words[LENT_S]

    @property
    def guest(self) -> GuestUse:
        """What a trial has made of it."""
        return use_of(self._words)

    def close(self) -> None:
        """The host job has ended: its device is free, and a trial there goes on without pauses."""
        if self._wake < 0:
            return
        self._words[UNTIL] = ENDED
        with suppress(BlockingIOError):
            os.write(self._wake, b".")
        os.close(self._wake)
        self._wake = -1

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
