"""A simulated GPU whose power limit changes both watts and speed, by a DVFS-like model fitted to a V100.

The model. A training alternates between a *heavy* phase, which keeps the cores busy, and a *light* one (input,
memory, launch gaps). At full clock the heavy phase takes the part ``duty`` of the time and wants ``peak_w``; the
light one draws ``light_w`` at any clock. Below a clock ratio f the heavy phase draws

    static_w + (peak_w - static_w) * f * max(f, v)^2

for dynamic power goes with clock times voltage squared, and voltage falls with the clock down to a floor v. The
power limit lowers the clock until the heavy phase fits under it, and the heavy phase takes 1/f as long. So a lower
limit costs no time while the phase fits, then a little (power falls with the cube of the clock), then much (below the
voltage floor power only falls with the clock itself). That is the shape of Zeus's measurements.

The device's constants and the loads below were fitted to the public V100 trace of Zeus (68 pairs of workload and
batch size at 7 limits each); ``benchmarks/energy.py fit`` repeats it and prints how well the model fits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from penstock.core import Clock, Source
from penstock.core.errors import InvalidInput, NotPermitted
from penstock.energy._sensor import DeviceKind, Sensor


@dataclass(frozen=True, slots=True)
class Load:
    """What a training asks of a GPU.

    Attributes:
        epoch_s: An epoch's time at full clock (no limit binding).
        duty: The heavy phase's part of it.
        peak_w: What the heavy phase draws at full clock.
        light_w: What the light phase draws.
    """

    epoch_s: float
    duty: float
    peak_w: float
    light_w: float

    def __post_init__(self) -> None:
        if not (self.epoch_s > 0 and 0 <= self.duty <= 1 and self.peak_w > 0 and self.light_w >= 0):
            raise InvalidInput(f"{self} is not a load: times and watts must be positive, duty in [0, 1].")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A model of a GPU; pure. The constants of ``V100`` are fitted, see the module.

    Attributes:
        name: What a sensor shows.
        idle_w: With nothing to do.
        static_w: Of the heavy phase's power, what no clock lowers.
        voltage_floor: Clock ratio below which the voltage no longer falls.
        min_limit_w: Lowest power limit.
        max_limit_w: Highest, and the one it starts with.
    """

    name: str
    idle_w: float
    static_w: float
    voltage_floor: float
    min_limit_w: float
    max_limit_w: float

    def __post_init__(self) -> None:
        if not (
            0 <= self.idle_w < math.inf
            and 0 <= self.static_w < self.min_limit_w <= self.max_limit_w < math.inf
            and 0 < self.voltage_floor <= 1
        ):
            raise InvalidInput(
                f"{self} is not a GPU: its watts must be finite, the lowest limit above static_w and at most the"
                " highest, and voltage_floor in (0, 1]."
            )

    def clock_ratio(self, load: Load, limit_w: float) -> float:
        """The clock, as a part of the full one, at which the heavy phase fits under the limit."""
        if load.peak_w <= limit_w:
            return 1.0
        room = max(limit_w - self.static_w, 1e-3) / (load.peak_w - self.static_w)
        floor = self.voltage_floor
        ratio: float = room ** (1 / 3) if room >= floor**3 else room / floor**2
        return ratio

    def slowdown(self, load: Load, limit_w: float) -> float:
        """An epoch's time against full clock."""
        return load.duty / self.clock_ratio(load, limit_w) + 1 - load.duty

    def epoch_s(self, load: Load, limit_w: float) -> float:
        """An epoch's time."""
        return load.epoch_s * self.slowdown(load, limit_w)

    def power_w(self, load: Load, limit_w: float) -> float:
        """Average watts."""
        heavy_s = load.duty / self.clock_ratio(load, limit_w)
        light_s = 1 - load.duty
        return (min(load.peak_w, limit_w) * heavy_s + load.light_w * light_s) / (heavy_s + light_s)


V100 = GpuModel("Simulated V100", 39.0, 40.0, 0.65, 100.0, 250.0)

V100_LOADS: dict[tuple[str, int], Load] = {
    # (workload of the Zeus trace, batch size)
    ("shufflenet-adadelta", 8): Load(243.742, 0.0991, 59.7, 36.8),
    ("shufflenet-adadelta", 16): Load(125.217, 0.1133, 58.2, 39.8),
    ("shufflenet-adadelta", 32): Load(64.725, 0.1198, 82.9, 46.7),
    ("shufflenet-adadelta", 64): Load(32.542, 0.3531, 125.0, 70.7),
    ("shufflenet-adadelta", 128): Load(16.528, 0.5916, 156.4, 66.4),
    ("shufflenet-adadelta", 256): Load(9.557, 0.5929, 243.4, 80.6),
    ("shufflenet-adadelta", 512): Load(7.732, 0.6861, 277.9, 45.0),
    ("shufflenet-adadelta", 1024): Load(7.006, 0.6765, 309.6, 55.7),
    ("shufflenet-adadelta", 2048): Load(7.127, 0.6276, 318.7, 50.4),
    ("shufflenet-adadelta", 4096): Load(7.626, 0.5622, 356.8, 51.4),
    ("shufflenet-adam", 8): Load(225.172, 0.1921, 64.7, 33.4),
    ("shufflenet-adam", 16): Load(115.9, 0.1185, 64.0, 39.5),
    ("shufflenet-adam", 32): Load(59.713, 0.0954, 65.4, 48.5),
    ("shufflenet-adam", 64): Load(30.037, 0.3677, 125.0, 72.7),
    ("shufflenet-adam", 128): Load(15.253, 0.5573, 172.8, 65.0),
    ("shufflenet-adam", 256): Load(9.041, 0.6084, 247.1, 75.7),
    ("shufflenet-adam", 512): Load(7.411, 0.6481, 288.6, 64.8),
    ("shufflenet-adam", 1024): Load(6.767, 0.7095, 309.8, 52.2),
    ("shufflenet-adam", 2048): Load(6.882, 0.7103, 315.1, 32.8),
    ("shufflenet-adam", 4096): Load(7.726, 0.6169, 324.4, 30.6),
    ("resnet50", 8): Load(5639.2, 0.8665, 238.5, 93.0),
    ("resnet50", 16): Load(4082.7, 0.8263, 320.1, 94.7),
    ("resnet50", 32): Load(3563.9, 0.8704, 336.2, 86.6),
    ("resnet50", 64): Load(3210.1, 0.81, 383.1, 100.0),
    ("resnet50", 128): Load(3035.9, 0.8031, 409.3, 100.0),
    ("resnet50", 192): Load(2980.0, 0.7935, 409.4, 100.0),
    ("resnet50", 256): Load(2944.4, 0.8003, 417.6, 100.0),
    ("resnet50", 360): Load(2948.7, 0.7731, 428.8, 98.5),
    ("deepspeech2", 2): Load(41729.2, 0.6779, 180.9, 91.1),
    ("deepspeech2", 4): Load(23817.0, 0.6726, 182.9, 90.0),
    ("deepspeech2", 8): Load(13373.2, 0.6813, 188.2, 88.3),
    ("deepspeech2", 12): Load(9886.5, 0.7004, 197.6, 82.7),
    ("deepspeech2", 16): Load(8115.4, 0.6505, 213.1, 91.5),
    ("deepspeech2", 24): Load(6468.6, 0.6993, 267.6, 84.0),
    ("deepspeech2", 32): Load(5574.4, 0.7283, 274.6, 72.4),
    ("deepspeech2", 48): Load(5126.9, 0.6543, 307.0, 76.9),
    ("deepspeech2", 56): Load(5050.8, 0.6943, 306.6, 51.6),
    ("deepspeech2", 64): Load(5317.6, 0.6356, 302.8, 73.0),
    ("deepspeech2", 72): Load(5239.8, 0.6165, 312.1, 75.1),
    ("deepspeech2", 96): Load(5315.7, 0.5394, 305.3, 75.2),
    ("deepspeech2", 128): Load(5408.8, 0.4037, 364.3, 98.9),
    ("deepspeech2", 156): Load(5591.6, 0.3903, 377.2, 100.0),
    ("deepspeech2", 192): Load(5796.9, 0.3803, 367.5, 100.0),
    ("ncf", 4): Load(3743.2, 0.1102, 94.3, 31.4),
    ("ncf", 8): Load(1836.7, 0.115, 80.8, 32.8),
    ("ncf", 16): Load(948.617, 0.1138, 69.0, 34.3),
    ("ncf", 32): Load(466.788, 0.0795, 93.3, 33.4),
    ("ncf", 64): Load(243.571, 0.2025, 110.0, 20.0),
    ("ncf", 128): Load(124.306, 0.1202, 88.2, 31.6),
    ("ncf", 256): Load(61.589, 0.0936, 67.9, 35.2),
    ("ncf", 512): Load(33.882, 0.0511, 99.2, 34.5),
    ("ncf", 1024): Load(19.55, 0.0104, 200.0, 36.3),
    ("ncf", 2048): Load(12.319, 0.0368, 171.2, 33.0),
    ("ncf", 4096): Load(10.27, 0.0244, 141.6, 34.4),
    ("ncf", 8192): Load(7.959, 0.0121, 182.9, 35.2),
    ("ncf", 16384): Load(7.068, 0.1882, 106.1, 20.0),
    ("bert-sentiment", 8): Load(6514.2, 0.8321, 226.1, 99.1),
    ("bert-sentiment", 16): Load(4158.2, 0.836, 334.7, 99.9),
    ("bert-sentiment", 32): Load(3561.0, 0.8218, 370.6, 100.0),
    ("bert-sentiment", 64): Load(3517.5, 0.7945, 378.9, 100.0),
    ("bert-sentiment", 128): Load(3529.8, 0.8332, 394.1, 100.0),
    ("bert-squad", 8): Load(1341.7, 0.8351, 397.6, 100.0),
    ("bert-squad", 12): Load(1360.4, 0.8404, 397.4, 100.0),
    ("bert-squad", 16): Load(1358.3, 0.8619, 427.2, 100.0),
    ("bert-squad", 24): Load(1449.2, 0.8715, 415.8, 100.0),
    ("bert-squad", 32): Load(1393.3, 0.8539, 465.0, 100.0),
    ("bert-squad", 48): Load(1485.8, 0.8548, 454.6, 100.0),
    ("bert-squad", 56): Load(1402.6, 0.8332, 495.9, 100.0),
}


@final
class SimulatedGpu(Sensor):
    """A GPU that exists in a clock's time only.

    ``run(load)`` puts work on it until ``idle()``; joules are the model's watts integrated over the clock.

    Args:
        clock: Whose time passes.
        model: Its constants.
        index: Its number; ids and keys come from it.
        may_set_limit: False behaves like a user without permission.
    """

    def __init__(
        self, clock: Clock, model: GpuModel = V100, *, index: int = 0, may_set_limit: bool = True
    ) -> None:
        self.id = f"gpu:{index}"
        self.key = f"simulated:{id(clock)}:{index}"
        self.name = model.name
        self.kind = DeviceKind.GPU
        self.method = "simulated"
        self.source = Source.SIMULATED
        self.uncertainty = 0.0
        self.model = model
        self._now: Callable[[], float] = clock.now_s
        self._may_set = may_set_limit
        self._lock = threading.Lock()
        self._load: Load | None = None
        self._limit_w = model.max_limit_w
        self._settled_s = clock.now_s()
        self._energy_j = 0.0

    def run(self, load: Load) -> None:
        """Work on ``load`` from now on."""
        with self._lock:
            self._settle()
            self._load = load

    def idle(self) -> None:
        """Nothing to do from now on."""
        with self._lock:
            self._settle()
            self._load = None

    def slowdown(self) -> float:
        """How much longer the present load takes than at full clock; 1 without one."""
        return 1.0 if self._load is None else self.model.slowdown(self._load, self._limit_w)

    def energy_j(self) -> float:
        """Joules since it was made."""
        with self._lock:
            self._settle()
            return self._energy_j

    def power_w(self) -> float:
        """Watts now."""
        load = self._load
        return self.model.idle_w if load is None else self.model.power_w(load, self._limit_w)

    @property
    def power_limit_range_w(self) -> tuple[float, float] | None:
        """The model's."""
        return self.model.min_limit_w, self.model.max_limit_w

    def power_limit_w(self) -> float:
        """The power limit now."""
        return self._limit_w

    def set_power_limit_w(self, limit_w: float) -> None:
        """Change the power limit: speed and watts follow at once."""
        if not self.model.min_limit_w <= limit_w <= self.model.max_limit_w:
            raise InvalidInput(
                f"{self.name} ({self.id}) takes power limits of {self.model.min_limit_w:g}.."
                f"{self.model.max_limit_w:g} W, got {limit_w:g}."
            )
        if not self._may_set:
            raise NotPermitted(
                f"No permission to set the power limit of {self.name} ({self.id}). Run as root."
            )
        with self._lock:
            self._settle()
            self._limit_w = limit_w

    def _settle(self) -> None:
        now_s = self._now()
        self._energy_j += self.power_w() * max(0.0, now_s - self._settled_s)
        self._settled_s = max(now_s, self._settled_s)
