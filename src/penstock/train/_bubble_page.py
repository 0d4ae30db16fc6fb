"""What a host job and the trials in its bubbles share: a page of memory and a FIFO per stage, in a folder.

The folder is best in memory (``/dev/shm``). Into the page the host writes until when its device is lent; through the
FIFO it wakes a waiting trial. The host never waits: to lend is one write into memory (and one byte through the FIFO if
a trial sleeps), to take back is one write (Hydro 5.1).
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import InvalidInput

KEPT = 1024  # latest stops whose overruns are kept
(
    UNTIL,
    CLOSED_AT,
    WAITING,
    OPENED,
    LENT_S,
    FREE_BYTES,
    STEPS,
    WORKED_S,
    PAUSES,
    OVERRUN_S,
    LATE_S,  # all overruns together
    SPEED,  # the part of the host's time that was lent lately
    YIELD,  # whether trials are to run only where nobody else wants the core
    PID,  # the trial's process
    CPU_AT_CLOSE,  # the CPU time it had used when its last bubble ended
    CPU_AT_OPEN,  # and when the last began
    STOPS,
    OVERRUNS,  # of the latest stops, in a ring
) = range(18)
SLOTS = OVERRUNS + KEPT  # doubles in the page
ENDED = -1.0


def clock_s() -> float:
    """The machine's monotonic clock, which all its processes share."""
    return time.monotonic()


def page_of(path: Path) -> memoryview[float]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8 * SLOTS)).cast("d")


def wake_of(path: Path) -> Path:
    return path.with_suffix(".wake")


def gpu_of(path: Path) -> Path:
    return path.with_suffix(".gpu")


def cores_of(path: Path) -> Path:
    return path.with_suffix(".cores")


def text_of(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def is_alive(wake: int) -> bool:
    """Whether a host holds the FIFO's lock: the system gives it back however the host ends."""
    try:
        fcntl.flock(wake, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(wake, fcntl.LOCK_UN)
    return False


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


def use_of(words: memoryview[float]) -> GuestUse:
    stops = int(words[STOPS])
    latest = tuple(words[OVERRUNS + number % KEPT] for number in range(max(0, stops - KEPT), stops))
    return GuestUse(words[WORKED_S], int(words[PAUSES]), words[OVERRUN_S], latest)


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
            words = page_of(self.path)
            wake = os.open(wake_of(self.path), os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            return 1.0, None
        try:
            over = words[UNTIL] == ENDED or not is_alive(wake)
        finally:
            os.close(wake)
        free = None if math.isnan(words[FREE_BYTES]) else int(words[FREE_BYTES])
        return (1.0, None) if over else (words[SPEED], free)


def stages_in(folder: str | os.PathLike[str]) -> list[Stage]:
    """The stages that lend bubbles in a folder, in order.

    Raises:
        InvalidInput: There are none.
    """
    found = []
    for path in sorted(Path(folder).glob("*.bubble"), key=lambda p: (len(p.name), p.name)):
        found.append(Stage(path, path.stem, text_of(gpu_of(path)) or None))
    if not found:
        raise InvalidInput(f"No host job lends bubbles in {folder}: start it first.")
    return found
