"""The meter of a trial whose energy is the estimate of its own process: cheap enough for trials of microseconds."""

from __future__ import annotations

import time
from typing import ClassVar, final

from penstock.core import Measurement, Source
from penstock.core.measurement import measurement
from penstock.energy._estimate import EstimateSensor

TOLD_S = 0.0005
"""What lies outside of epochs and is shorter than this is not worth telling of: it goes to whatever runs next."""
READ_S = 0.002
"""The CPU clock is read this often at most."""
_ESTIMATED = int(Source.ESTIMATED)


@final
class SoloMeter:
    """An ``EpochMeter`` without windows, for an estimate that never fails and is exact at any moment.

    Trials may be over in microseconds, and a reading of the CPU clock takes some of them: it is read every two
    milliseconds at most, and in between energy goes on at the watts of the last reading. An epoch that ends with a
    reading gets what was wrong with that; what would make it less than an idle one is left for the next.

    Args:
        sensor: The estimate of this process.
    """

    __slots__ = (
        "_begun_s",
        "_due_s",
        "_idle_w",
        "_owed_j",
        "_read_j",
        "_read_s",
        "_sensor",
        "_since_j",
        "_since_s",
        "_watts",
    )
    on_iteration: ClassVar[None] = None  # it sets no power limit

    def __init__(self, sensor: EstimateSensor) -> None:
        self._sensor = sensor
        self._idle_w = sensor.idle_w
        self._begun_s: float | None = None
        # Where the account of what no epoch drew stands: epochs move its time and joules on.
        self._since_s: float | None = None
        self._since_j = 0.0
        self._read_s = self._read_j = self._watts = self._due_s = self._owed_j = 0.0

    def epoch_begin(self) -> None:
        """An epoch begins now."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._read(now_s)
        self._begun_s = now_s
        if self._since_s is None:
            self._since_s = now_s
            self._since_j = self._counted_j(now_s)

    def epoch_end(self) -> Measurement | None:
        """The epoch's energy; None if no epoch has begun."""
        plain = self.plain_end()
        return None if plain is None else measurement(*plain)

    def plain_end(self) -> tuple[float, str, int, float] | None:
        """``epoch_end`` as value, unit, source's number and uncertainty: what is sent to the study."""
        begun_s = self._begun_s
        if begun_s is None:
            return None
        self._begun_s = None
        now_s = time.monotonic()
        time_s = now_s - begun_s
        if now_s < self._due_s:
            joules = self._watts * time_s
        else:
            before_j = self._read_j + self._watts * (begun_s - self._read_s)
            self._read(now_s)
            drawn_j = self._read_j - before_j - self._owed_j
            joules = max(drawn_j, self._idle_w * time_s)
            self._owed_j = joules - drawn_j
        if self._since_s is not None:
            self._since_s += time_s
            self._since_j += joules
        return joules, "J", _ESTIMATED, self._sensor.uncertainty

    def other(self) -> tuple[float, str, int, float] | None:
        """What no epoch drew since the first one began, or since this was asked last; told as by ``plain_end``.

        An epoch that has begun is none any more: what it drew is part of the answer. Less than half a millisecond is
        not worth a reading: it is None, and goes to whatever runs next on the same sensor.
        """
        if self._since_s is None:
            return None
        now_s = time.monotonic()
        time_s = now_s - self._since_s
        self._begun_s = None
        self._since_s = now_s
        if time_s < TOLD_S:
            self._owed_j -= self._counted_j(now_s) - self._since_j
            return None
        if now_s >= self._due_s:
            self._read(now_s)
        drawn_j = self._counted_j(now_s) - self._since_j
        joules = max(drawn_j, self._idle_w * time_s)
        self._owed_j += joules - drawn_j
        self._since_j = self._counted_j(now_s)
        return joules, "J", _ESTIMATED, self._sensor.uncertainty

    def close(self) -> None:
        """The run is over: what ``other`` has not told is nobody's."""
        self._begun_s = self._since_s = None

    def _counted_j(self, now_s: float) -> float:
        """Joules up to now, as handed out: with what was given ahead."""
        return self._read_j + self._watts * (now_s - self._read_s) + self._owed_j

    def _read(self, now_s: float) -> None:
        """Read the CPU clock."""
        read_j = self._sensor.energy_j()
        if self._read_s:
            self._watts = max((read_j - self._read_j) / (now_s - self._read_s), self._idle_w)
            self._due_s = now_s + READ_S
        self._read_s, self._read_j = now_s, read_j
