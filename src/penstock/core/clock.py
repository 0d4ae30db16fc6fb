"""Clocks: time is injected, so logic never sleeps and a simulation can run a week in a second."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import final


class Clock(ABC):
    """Tells the time in seconds since the Unix epoch (a virtual clock starts at 0)."""

    @abstractmethod
    def now_s(self) -> float:
        """Seconds; never goes back."""


@final
class WallClock(Clock):
    """The machine's time of day, kept monotonic within the process."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return self._offset_s + time.monotonic()


@final
class VirtualClock(Clock):
    """A clock that its owner moves. One owner; never goes back."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move the clock to ``time_s``; a time in the past leaves it where it is."""
        self._now_s = max(self._now_s, time_s)
