"""Plans: which segments run where. Plan passes are pure functions from Plan to Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.device import Device, Share
from penstock.core.group import Segment


@dataclass(frozen=True, slots=True)
class Placement:
    """Segments (one, or several fused into one training) on shares of devices.

    Attributes:
        segments: One segment, or several that train as one fused model.
        shares: The devices; empty while it is waiting.
        exclusive: Nothing else may run on its devices at the same time (e.g. while power limits
            are profiled).
        attempt: How often its segments have been tried before (0 the first time).
    """

    segments: tuple[Segment, ...]
    shares: tuple[Share, ...] = ()
    exclusive: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """What is free on one device.

    Attributes:
        device: The device.
        fraction: The part of it no placement holds, in [0, 1].
        backlog: How many more placements its executor is ready to queue behind the running ones, so that
            very short trials don't wait for the driver. 0 for trials that take long.
    """

    device: Device
    fraction: float = 1.0
    backlog: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of planning.

    Attributes:
        waiting: Placements without devices, first come first. May be a prefix of the whole queue, at
            least as long as what could be placed at once.
        free: Devices with something free.
        placed: Placements with devices, to be launched now.
    """

    waiting: tuple[Placement, ...] = ()
    free: tuple[Free, ...] = ()
    placed: tuple[Placement, ...] = ()


PlanPass: TypeAlias = Callable[[Plan], Plan]
"""A pure function. A planner is a tuple of passes, applied in order."""
