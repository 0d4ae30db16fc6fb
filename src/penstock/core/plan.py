"""Plans: which segments run where. Plan passes are pure functions from Plan to Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.core.device import Device, Share
from penstock.core.group import Segment


@dataclass(frozen=True, slots=True)
class Turn:
    """On how many devices a trial of a group is to begin, and when it hands some of them over to others.

    Attributes:
        trial: Its number.
        width: The devices it begins on; less than 1: a part of one.
        epochs: After so many of its epochs it narrows; 0: it never does.
        kept: The devices it goes on with; less than 1: a part of one, which others then share; 0: none, it waits for
            its next turn.
        start: The epochs it has behind it when the turn begins, if it has several turns.
    """

    trial: int
    width: float = 1
    epochs: int = 0
    kept: float = 1.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Segments (one, or several fused into one training) on shares of devices.

    Attributes:
        segments: One segment, or several that train as one fused model.
        shares: The devices; empty while it is waiting.
        exclusive: Nothing else may run on its devices at the same time (e.g. while power limits
            are profiled).
        attempt: How often its segments have been tried before (0 the first time).
        expected_s: How long its segments would take alone on one whole device; None: not known.
        expected_error: How far off ``expected_s`` may be, relative (0.2 is +-20%).
        memory_bytes: The most memory it needs on a device; None: not known.
        max_devices: Over how many devices it can spread, and change that while it runs; 1: it can't.
        pausable: Whether it can give all devices up at the end of any epoch, and go on from there later: it was seen to
            save a checkpoint in every epoch.
        since_s: When it was queued, on the executor's clock: who waits long is not passed for ever.
        promoted: Whether its trial was chosen to go on: its scheduler lets it start after epochs of an earlier segment.
            A pause changes nothing about it.
        course: How its planner decided to go on with its group; "": nothing was decided. For planners alone.
        turns: Where that is an order in which its trials begin, those turns. For planners alone.
    """

    segments: tuple[Segment, ...]
    shares: tuple[Share, ...] = ()
    exclusive: bool = False
    attempt: int = 0
    expected_s: float | None = None
    expected_error: float = 0.0
    memory_bytes: int | None = None
    max_devices: int = 1
    pausable: bool = False
    since_s: float = 0.0
    promoted: bool = False
    course: str = ""
    turns: tuple[Turn, ...] = ()


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
class Running:
    """A placement that runs.

    Attributes:
        placement: With the shares it holds now; with a change of them under way, those it will hold (none: it pauses).
        remaining_s: How long it would still take alone on one whole device; None: not known.
        rank: Its place among the study's trials by the goal, 0 being the best; None: not known yet.
        changing: A change of its shares was asked for and has not taken place yet.
        leaving: Until the change takes place, the shares it gives up; they are not free before.
    """

    placement: Placement
    remaining_s: float | None = None
    rank: int | None = None
    changing: bool = False
    leaving: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Resize:
    """An order to a running placement: go on with these shares from the end of the current epoch, or of a later one.

    New shares are taken from what is free at once; those given up become free when the change takes place.

    Attributes:
        placement: As it runs now, or as it is to be launched by the same plan.
        shares: What it is to run on. With ``at_epoch``, no more devices than it has. None at all: it pauses, and waits
            again with what it has still to do (only who is ``pausable``).
        at_epoch: The epoch at whose end it changes; None: the one that runs now.
    """

    placement: Placement
    shares: tuple[Share, ...]
    at_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of planning.

    Attributes:
        waiting: Placements without devices, first come first. May be a prefix of the whole queue, at
            least as long as what could be placed at once.
        free: Devices with something free.
        placed: Placements with devices, to be launched now.
        running: What runs already, for the passes that look at it.
        resized: Running placements whose shares are to change.
        devices: Devices by id, as far as known, those that are busy included.
    """

    waiting: tuple[Placement, ...] = ()
    free: tuple[Free, ...] = ()
    placed: tuple[Placement, ...] = ()
    running: tuple[Running, ...] = ()
    resized: tuple[Resize, ...] = ()
    devices: Mapping[str, Device] = field(default_factory=dict)


PlanPass: TypeAlias = Callable[[Plan], Plan]
"""A pure function. A planner is a tuple of passes, applied in order."""
