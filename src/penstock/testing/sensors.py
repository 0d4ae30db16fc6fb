"""The contract of sensors as a test suite: subclass ``SensorContract`` and give it a sensor.

```python
class TestMySensor(SensorContract):
    @pytest.fixture
    def sensor(self): ...
    def pass_time(self): ...        # so that the device draws something
```
"""

from __future__ import annotations

import contextlib
import math
import threading
import time

import pytest

from penstock.core import Source
from penstock.core.errors import InvalidInput, Unsupported
from penstock.energy import DeviceKind, Meter, Sensor


class SensorContract:
    """What every sensor keeps. Subclasses have a fixture ``sensor``."""

    def pass_time(self) -> None:
        """Let some time pass in which the device draws energy."""
        until = time.monotonic() + 0.06
        while time.monotonic() < until:
            sum(range(1000))

    def test_says_what_it_is(self, sensor: Sensor) -> None:
        """Identity, method, source and uncertainty are there."""
        assert sensor.id
        assert sensor.key
        assert sensor.name
        assert sensor.method
        assert isinstance(sensor.kind, DeviceKind)
        assert isinstance(sensor.source, Source)
        assert math.isfinite(sensor.uncertainty)
        assert sensor.uncertainty >= 0
        assert sensor.resolution_s >= 0

    def test_energy_rises_and_never_falls(self, sensor: Sensor) -> None:
        """Joules grow with time, as finite numbers."""
        readings = [sensor.energy_j()]
        for _ in range(3):
            self.pass_time()
            readings.append(sensor.energy_j())
        assert all(math.isfinite(reading) for reading in readings)
        assert readings == sorted(readings)
        assert readings[-1] > readings[0]
        assert readings[0] >= 0

    def test_power_is_the_slope_of_energy(self, sensor: Sensor) -> None:
        """Watts are positive and of the joules' size."""
        self.pass_time()
        assert sensor.power_w() > 0
        assert math.isfinite(sensor.power_w())

    def test_measurements_keep_its_source(self, sensor: Sensor) -> None:
        """A meter never makes a figure stronger than its sensor says."""
        meter = Meter([sensor])
        with meter.window() as window:
            self.pass_time()
        assert window.energy.joules > 0
        assert window.energy.source >= sensor.source
        assert window.energy.uncertainty >= sensor.uncertainty

    def test_threads_may_read_at_once(self, sensor: Sensor) -> None:
        """Readings from several threads: each sees rising joules, nothing raises."""
        failures: list[object] = []

        def read() -> None:
            last = -1.0
            try:
                for _ in range(50):
                    now = sensor.energy_j()
                    if now < last:
                        failures.append((last, now))
                    last = now
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_power_limit_is_whole_or_absent(self, sensor: Sensor) -> None:
        """With a range, limits can be read, set within it and not outside; without one, all of it is refused."""
        range_w = sensor.power_limit_range_w
        if range_w is None:
            with pytest.raises(Unsupported):
                sensor.power_limit_w()
            with pytest.raises(Unsupported):
                sensor.set_power_limit_w(100)
            return
        low_w, high_w = range_w
        assert 0 < low_w <= high_w
        before_w = sensor.power_limit_w()
        assert low_w <= before_w <= high_w
        try:
            for limit_w in (low_w, (low_w + high_w) / 2, high_w):
                sensor.set_power_limit_w(limit_w)
                assert sensor.power_limit_w() == pytest.approx(limit_w, abs=0.001)
            for wrong_w in (low_w - 1, high_w + 1):
                with pytest.raises(InvalidInput):
                    sensor.set_power_limit_w(wrong_w)
            assert sensor.power_limit_w() == pytest.approx(high_w, abs=0.001)
        finally:
            with contextlib.suppress(InvalidInput):
                sensor.set_power_limit_w(before_w)

    def test_closing_twice_is_fine(self, sensor: Sensor) -> None:
        """Close is idempotent."""
        sensor.close()
        sensor.close()
