"""The contract of sensors: the energy of one device, and its power limit where it has one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

from penstock.core import Source
from penstock.core.errors import Unsupported


class DeviceKind(StrEnum):
    """What a sensor measures. A machine's energy is the sum over sensors of different keys."""

    GPU = "gpu"
    CPU = "cpu"
    MEMORY = "memory"
    SYSTEM = "system"


class Sensor(ABC):
    """Reads the energy of one device.

    Any thread of the process that made it may call it. ``energy_j`` is cheap (microseconds): meters call it at
    every window's edges. The owner calls ``close`` when done; a closed sensor is not read again. A constructor
    may open a device, start counting and look at it, but never changes it: limits change in ``set_power_limit_w``
    alone.

    A sensor that can't tell the energy raises ``SensorError`` with the reason and the remedy. It never answers 0
    for "don't know", and what it answers never falls.

    Attributes:
        id: Short name on this node, e.g. ``"gpu:0"``.
        key: Tells the device apart on this node for good, e.g. a GPU's UUID: two sensors of one key count the
            same joules.
        name: The device's model, e.g. ``"Tesla V100-PCIE-32GB"``.
        kind: What it is.
        method: How the joules are got, in a few words.
        source: How strong the figure is.
        uncertainty: Relative, one-sided: 0.05 is +-5%.
        resolution_s: How often the reading changes: an edge of a window is off by up to so much.
    """

    id: str
    key: str
    name: str
    kind: DeviceKind
    method: str
    source: Source
    uncertainty: float
    resolution_s: float = 0.0

    @abstractmethod
    def energy_j(self) -> float:
        """Joules since the sensor was made. Never falls.

        Raises:
            SensorError: They can't be read.
        """

    @abstractmethod
    def power_w(self) -> float:
        """Watts now, or over the last moments where the device tells no better.

        Raises:
            SensorError: They can't be read.
        """

    @property
    def power_limit_range_w(self) -> tuple[float, float] | None:
        """Lowest and highest power limit the device takes, or None if it has no limit to set."""
        return None

    def power_limit_w(self) -> float:
        """The power limit now."""
        raise Unsupported(f"{self.name} ({self.id}) has no power limit.")

    def set_power_limit_w(self, limit_w: float) -> None:
        """Change the power limit, for everybody who uses the device.

        Raises:
            Unsupported: The device has no power limit.
            InvalidInput: ``limit_w`` is outside ``power_limit_range_w``.
            NotPermitted: This user may not.
        """
        raise Unsupported(f"{self.name} ({self.id}) has no power limit.")

    @property
    def restore_key(self) -> str | None:
        """What a watchdog process opens the device by to restore its limit; None if the limit dies with us."""
        return None

    def close(self) -> None:  # noqa: B027 - most sensors hold nothing
        """Let the device go. Idempotent."""
