"""Meters: windows of energy over sensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, final

from penstock.core import Measurement, Source, total
from penstock.core.errors import InvalidInput, SensorError
from penstock.energy._sensor import Sensor
from penstock.energy._shared import Reading, SharedSensor

if TYPE_CHECKING:
    from penstock.core import Clock

_Reading: TypeAlias = "float | Reading | SensorError"
_Edge: TypeAlias = tuple[float, "list[_Reading]"]


@final
class Window:
    """Energy and time between two moments. Use as a context manager, or call ``end``.

    Still open, it tells what was spent so far. Windows of one meter may nest and overlap, in any thread.
    """

    __slots__ = ("_begin", "_end", "_meter", "_result", "_sensors", "_watts", "name")

    def __init__(self, meter: Meter, name: str, begin: _Edge) -> None:
        self._meter = meter
        self.name = name
        self._sensors = meter.sensors
        self._begin = begin
        self._end: _Edge | None = None
        self._watts: list[float | SensorError] | None = None
        self._result: dict[str, Measurement | SensorError] | None = None

    def end(self) -> Window:
        """Close the window. Closing it again changes nothing."""
        if self._end is None:
            self._end = self._meter._edge()
            self._watts = self._watts_if_short(self._end[0] - self._begin[0])
        return self

    def since_then(self, name: str) -> Window:
        """Another window that began when this one did; costs no reading."""
        return Window(self._meter, name, self._begin)

    def from_here(self, name: str) -> Window:
        """Another window that begins where this one ended (now, if it is open)."""
        return Window(self._meter, name, self._meter._edge() if self._end is None else self._end)

    @property
    def is_open(self) -> bool:
        """Whether it has not been ended."""
        return self._end is None

    @property
    def time_s(self) -> float:
        """Its length, or the time since its begin while it is open."""
        return (self._end[0] if self._end is not None else self._meter._now()) - self._begin[0]

    @property
    def devices(self) -> Mapping[str, Measurement]:
        """Energy by sensor id. A device that failed is missing: see ``failures``."""
        return {name: part for name, part in self._parts().items() if isinstance(part, Measurement)}

    @property
    def failures(self) -> Mapping[str, SensorError]:
        """Why devices are missing in ``devices``, by sensor id."""
        return {name: part for name, part in self._parts().items() if isinstance(part, SensorError)}

    @property
    def energy(self) -> Measurement:
        """The energy of all devices together.

        Raises:
            SensorError: A device could not be read: a sum without it would be too small. ``devices`` has the
                others.
        """
        parts = self._parts()
        for part in parts.values():
            if isinstance(part, SensorError):
                raise part
        result = total(part for part in parts.values() if isinstance(part, Measurement))
        assert result is not None  # a meter has at least one sensor
        return result

    @property
    def idle(self) -> Measurement | None:
        """Of ``energy``, the idle account: what the devices would have drawn with nothing to do.

        It is known of devices whose sensors are shared (``SharedSensor``) and that this process has joined, as trials
        do: their lowest watts seen so far, split among those who used the device in the proportions of their work. The
        rest of ``energy`` is what work added. None where no device keeps such an account.
        """
        parts = self._parts()
        end = self._meter._edge() if self._end is None else self._end
        found: list[Measurement] = []
        for sensor, before, after in zip(self._sensors, self._begin[1], end[1], strict=True):
            part = parts[sensor.id]
            if not isinstance(before, tuple) or not isinstance(after, tuple) or isinstance(part, SensorError):
                continue
            if before[4] < 0 or after[4] < 0:
                continue
            # The reader books it every 50 ms, while the energy is that of the moment.
            idle_j = min(max(0.0, after[4] - before[4]), part.value)
            found.append(Measurement(idle_j, "J", max(part.source, Source.ATTRIBUTED), part.uncertainty))
        return total(found)

    @property
    def power(self) -> Measurement:
        """Average watts.

        Raises:
            SensorError: As for ``energy``; or no time has passed.
        """
        energy, time_s = self.energy, self.time_s
        if time_s <= 0:
            raise SensorError(f"Window {self.name!r} has no length: average watts are not defined.")
        return Measurement(energy.joules / time_s, "W", energy.source, energy.uncertainty)

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _watts_if_short(self, time_s: float) -> list[float | SensorError] | None:
        """Watts now of every sensor, if the window is too short for some counter; shared ones tell theirs anyway."""
        for sensor in self._sensors:
            if time_s < 2 * sensor.resolution_s and not isinstance(sensor, SharedSensor):
                return [_power(sensor) for sensor in self._sensors]
        return None

    def _parts(self) -> dict[str, Measurement | SensorError]:
        if self._result is not None:
            return self._result
        if self._end is None:
            now = self._meter._edge()
            return self._evaluate(now, self._watts_if_short(now[0] - self._begin[0]))
        self._result = self._evaluate(self._end, self._watts)
        return self._result

    def _evaluate(
        self, end: _Edge, watts: list[float | SensorError] | None
    ) -> dict[str, Measurement | SensorError]:
        time_s = end[0] - self._begin[0]
        return {
            sensor.id: _between(
                sensor, self._begin[1][i], end[1][i], time_s, 0.0 if watts is None else watts[i]
            )
            for i, sensor in enumerate(self._sensors)
        }


def _power(sensor: Sensor) -> float | SensorError:
    try:
        return sensor.power_w()
    except SensorError as error:
        return error


def _between(
    sensor: Sensor, before: _Reading, after: _Reading, time_s: float, watts: float | SensorError
) -> Measurement | SensorError:
    """What one sensor counted between two readings of it; ``watts`` at the end count if the time is too short."""
    if isinstance(before, SensorError):
        return before
    if isinstance(after, SensorError):
        return after
    source, doubt = sensor.source, sensor.uncertainty
    short = time_s < 2 * sensor.resolution_s
    if isinstance(before, tuple) and isinstance(after, tuple):
        # Others used the device too. Who was no user of it all the while has no account to tell a part by.
        if after[2] > before[2] and before[4] >= 0 and after[4] >= 0:
            energy_j, source = after[1] - before[1], max(source, Source.ATTRIBUTED)
        else:
            energy_j = after[0] - before[0]
        watts = after[3]
    else:
        assert isinstance(before, float)
        assert isinstance(after, float)
        energy_j = after - before
    if short:
        # The counter has hardly moved, or moved for more than this window: watts x time tells better.
        if isinstance(watts, SensorError):
            return watts
        return Measurement(watts * time_s, "J", max(source, Source.ESTIMATED), doubt + 0.5)
    if sensor.resolution_s:
        doubt += sensor.resolution_s / time_s
    return Measurement(energy_j, "J", source, doubt)


@final
class Meter:
    """Opens windows over sensors.

    ``with Meter() as m: ...`` is one window over everything this machine can measure: ``m.energy``, ``m.time_s``,
    ``m.devices``. ``m.window("name")`` opens further ones, from any thread; they may nest and overlap. However
    many meters and processes there are on a node, one process reads a shared device and the others read what it
    publishes (see ``SharedSensor``).

    Args:
        sensors: What to read; ``default_sensors()`` if None, closed with the meter.
        clock: Measures the windows' length; the machine's monotonic clock if None.

    Raises:
        InvalidInput: No sensors, two that count the same joules, or two of one id.
    """

    def __init__(self, sensors: Sequence[Sensor] | None = None, *, clock: Clock | None = None) -> None:
        self._owns = sensors is None
        if sensors is None:
            from penstock.energy._discover import default_sensors

            sensors = default_sensors()
        given: Any = sensors
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise InvalidInput(f"Meter takes a list of sensors, such as default_sensors(), got {given!r}.")
        for sensor in given:
            if not isinstance(sensor, Sensor):
                raise InvalidInput(f"Meter takes sensors, such as EstimateSensor(); {sensor!r} is none.")
        if not sensors:
            raise InvalidInput('A meter needs a sensor. Run "penstock doctor" to see what this machine has.')
        keys = [sensor.key for sensor in sensors]
        doubled = sorted({key for key in keys if keys.count(key) > 1})
        if doubled:
            raise InvalidInput(f"These devices would be counted twice: {', '.join(doubled)}.")
        ids = [sensor.id for sensor in sensors]
        alike = sorted({each for each in ids if ids.count(each) > 1})
        if alike:  # a window tells energies by id: one of two would be lost
            raise InvalidInput(f"Several sensors have the id {', '.join(alike)}: give each its own.")
        self.sensors: tuple[Sensor, ...] = tuple(sensors)
        self._now: Callable[[], float] = time.monotonic if clock is None else clock.now_s
        self._lock = threading.Lock()
        self._outer: Window | None = None
        self._named: dict[str, Window] = {}
        self.outside_s = (
            0.0  # time of runs outside of their epochs that was too short to be told: the next one's
        )

    def window(self, name: str = "") -> Window:
        """Open a window now."""
        return Window(self, name, self._edge())

    def begin(self, name: str) -> None:
        """Open a window to be ended by its name, where a ``with`` block does not fit.

        Raises:
            InvalidInput: One of that name is open.
        """
        window = self.window(name)
        with self._lock:
            if name in self._named:
                raise InvalidInput(f"Window {name!r} is open already. End it first, or use another name.")
            self._named[name] = window

    def end(self, name: str) -> Window:
        """End the window of that name.

        Raises:
            InvalidInput: None of that name is open.
        """
        with self._lock:
            window = self._named.pop(name, None)
        if window is None:
            raise InvalidInput(f"No window {name!r} is open: {sorted(self._named)} are.")
        return window.end()

    @property
    def energy(self) -> Measurement:
        """Energy of the ``with`` block, so far or in all."""
        return self._block().energy

    @property
    def time_s(self) -> float:
        """Length of the ``with`` block, so far or in all."""
        return self._block().time_s

    @property
    def devices(self) -> Mapping[str, Measurement]:
        """Energy of the ``with`` block by sensor id."""
        return self._block().devices

    @property
    def failures(self) -> Mapping[str, SensorError]:
        """Sensors that could not be read in the ``with`` block, and why."""
        return self._block().failures

    def close(self) -> None:
        """End the ``with`` block's window and let the default sensors go. Idempotent."""
        if self._outer is not None:
            self._outer.end()._parts()
        if self._owns:
            for sensor in self.sensors:
                sensor.close()
            self._owns = False

    def __enter__(self) -> Meter:
        self._outer = self.window("meter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _block(self) -> Window:
        if self._outer is None:
            raise InvalidInput('Nothing has been metered yet: use "with Meter() as m:", or open m.window().')
        return self._outer

    def _edge(self) -> _Edge:
        readings: list[_Reading] = []
        for sensor in self.sensors:
            try:
                readings.append(sensor.reading() if isinstance(sensor, SharedSensor) else sensor.energy_j())
            except SensorError as error:
                readings.append(error)
        return self._now(), readings
