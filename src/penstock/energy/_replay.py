"""Recorded hardware, replayed: a sensor that reads a trace against a clock, and the recorder of such traces."""

from __future__ import annotations

import csv
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from penstock.core import Clock, Source
from penstock.core.errors import InvalidInput, SensorError
from penstock.energy._sensor import DeviceKind, Sensor


@final
class ReplaySensor(Sensor):
    """Plays a trace of watts over time; between two points power is a straight line.

    Args:
        times_s: When, from 0 or any start, strictly rising.
        watts: How much, at each time.
        clock: The trace begins at this clock's time now.
        name: The recorded device.
        source: What the recording was; a replay is never stronger.
        uncertainty: Of the recording.

    Raises:
        InvalidInput: Fewer than two points, times that don't rise, or watts that are negative or no number.
    """

    def __init__(
        self,
        times_s: Sequence[float],
        watts: Sequence[float],
        clock: Clock,
        *,
        name: str = "recorded device",
        kind: DeviceKind = DeviceKind.GPU,
        source: Source = Source.SIMULATED,
        uncertainty: float = 0.0,
    ) -> None:
        if len(times_s) != len(watts) or len(times_s) < 2:
            raise InvalidInput(
                f"A trace needs at least 2 points, got {len(times_s)} times and {len(watts)} watts."
            )
        if not all(
            later > earlier and math.isfinite(later - earlier)
            for earlier, later in itertools.pairwise(times_s)
        ):
            raise InvalidInput("The times of a trace must rise.")
        for watt in watts:
            if not 0 <= watt < math.inf:
                raise InvalidInput(f"Watts must be finite and can't be negative, got {watt}.")
        self.id = f"replay:{name}"
        self.key = f"replay:{name}:{id(self)}"
        self.name = name
        self.kind = kind
        self.method = "replayed trace"
        self.source = max(source, Source.SIMULATED)
        self.uncertainty = uncertainty
        self._times = [time_s - times_s[0] for time_s in times_s]
        self._watts = list(watts)
        self._sums_j = [0.0]
        for index in range(1, len(watts)):
            span_s = self._times[index] - self._times[index - 1]
            self._sums_j.append(self._sums_j[-1] + span_s * (watts[index] + watts[index - 1]) / 2)
        self._now: Callable[[], float] = clock.now_s
        self._start_s = clock.now_s()

    @property
    def length_s(self) -> float:
        """How long the trace is."""
        return self._times[-1]

    def energy_j(self) -> float:
        """Joules since the trace began.

        Raises:
            SensorError: The trace is over.
        """
        index, part_s, watts = self._at()
        return self._sums_j[index] + part_s * (self._watts[index] + watts) / 2

    def power_w(self) -> float:
        """Watts now.

        Raises:
            SensorError: The trace is over.
        """
        return self._at()[2]

    def _at(self) -> tuple[int, float, float]:
        """Which piece of the trace it is, how far into it, and the watts there."""
        now_s = self._now() - self._start_s
        last = len(self._times) - 1
        if now_s > self._times[last] * (1 + 1e-9):
            raise SensorError(
                f"The trace of {self.name} ended at {self._times[last]:g} s; it is {now_s:g} s now."
            )
        index = min(bisect_right(self._times, now_s) - 1, last - 1)
        part_s = now_s - self._times[index]
        slope = (self._watts[index + 1] - self._watts[index]) / (self._times[index + 1] - self._times[index])
        return index, part_s, self._watts[index] + slope * part_s

    @classmethod
    def from_csv(cls, path: Path | str, clock: Clock, *, name: str | None = None) -> ReplaySensor:
        """Read a trace of columns ``time_s`` and ``power_w``, as ``Recorder`` writes it.

        Raises:
            InvalidInput: The file has no such columns.
        """
        times_s: list[float] = []
        watts: list[float] = []
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                try:
                    times_s.append(float(row["time_s"]))
                    watts.append(float(row["power_w"]))
                except (KeyError, TypeError, ValueError) as error:
                    raise InvalidInput(
                        f"{path} needs numbers in columns time_s and power_w: {error}."
                    ) from None
        return cls(times_s, watts, clock, name=name or Path(path).stem)


@final
class Recorder:
    """Writes a sensor's watts to a file that ``ReplaySensor.from_csv`` reads. Its owner calls ``sample``."""

    def __init__(self, sensor: Sensor, path: Path | str, clock: Clock) -> None:
        self._sensor = sensor
        self._clock = clock
        self._file = open(path, "w", newline="")  # noqa: SIM115 - closed by close()
        self._writer = csv.writer(self._file)
        self._writer.writerow(["time_s", "power_w"])

    def sample(self) -> None:
        """Write a point now."""
        self._writer.writerow([repr(self._clock.now_s()), repr(self._sensor.power_w())])

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
