"""Dynamic split (Hydro 5.3): fused groups that run give members to devices that fall idle, and take them back."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from penstock.core.device import Device
from penstock.core.errors import InvalidInput
from penstock.plan._fusion import FusionChoice

LEAST_GAIN = 0.1
"""A group is split if that brings its end nearer by this part at least: an idle device saves energy, too."""

_UNKNOWN = 0.5  # of an epoch's time, what is taken to be common to all members where nothing was measured


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """A fused placement that runs.

    Attributes:
        members: Its trials, in the group's order.
        epochs_left: How many epochs each of them has ahead once the present one is over, which is when members can
            leave.
        epoch_s: How long an epoch of all of them takes.
        device: Where it runs.
        kind: Groups of one kind can be merged.
        choice: What was measured of that kind; None: nothing.
    """

    members: tuple[int, ...]
    epochs_left: tuple[int, ...]
    epoch_s: float
    device: Device
    kind: Hashable = None
    choice: FusionChoice | None = None

    def __post_init__(self) -> None:
        if not self.members or len(self.members) != len(self.epochs_left):
            raise InvalidInput(
                f"A group has as many epochs_left as members, got {len(self.epochs_left)} of {len(self.members)}."
            )
        if min(self.epochs_left) < 0 or not self.epoch_s >= 0.0:
            raise InvalidInput(
                f"epochs_left and epoch_s must be at least 0, got {self.epochs_left}, {self.epoch_s}."
            )

    def epoch_of_s(self, count: int) -> float:
        """How long an epoch of ``count`` members like these takes on such a device."""
        if count <= 0:
            return 0.0
        whole = len(self.members)
        if self.choice is not None and self.choice.profiles:
            return self.epoch_s * _step_s(self.choice, count) / _step_s(self.choice, whole)
        return self.epoch_s * (_UNKNOWN + (1.0 - _UNKNOWN) * count / whole)


@dataclass(frozen=True, slots=True)
class Regroup:
    """An order: these trials leave their groups at the end of the present epoch and go on as one on ``device``."""

    members: tuple[int, ...]
    device: str


def time_left_s(group: FusedGroup, epochs_left: Sequence[int]) -> float:
    """How long members of a group with so many epochs ahead take as a group of their own: who is done leaves it."""
    total, done = 0.0, 0
    ordered = sorted(epochs_left)
    for at, epochs in enumerate(ordered):
        total += (epochs - done) * group.epoch_of_s(len(ordered) - at)
        done = epochs
    return total


def parts(group: FusedGroup, count: int) -> list[tuple[int, ...]]:
    """The members in ``count`` even parts; those with many epochs ahead are dealt out first, one to each part."""
    order = sorted(range(len(group.members)), key=lambda at: (-group.epochs_left[at], at))
    dealt = [sorted(order[part::count]) for part in range(count)]
    return [tuple(group.members[at] for at in part) for part in dealt]


def end_s(group: FusedGroup, count: int, *, cost_s: float = 0.0) -> float:
    """When the last of ``count`` parts of a group is done, from the end of the present epoch on."""
    left = dict(zip(group.members, group.epochs_left, strict=True))
    longest_s = max(time_left_s(group, [left[member] for member in part]) for part in parts(group, count))
    return longest_s + (cost_s if count > 1 else 0.0)


def splits(
    groups: Sequence[FusedGroup],
    idle: Sequence[Device],
    *,
    cost_s: float,
    least_gain: float = LEAST_GAIN,
) -> tuple[Regroup, ...]:
    """Which members go to which idle devices (Hydro 5.3: a fused trial is split evenly, not trained distributed).

    The group that would end last is split first, into one part more, as long as there are devices of its kind and
    it ends sooner by ``least_gain``, what a split costs included; then the next. Where end times fall with every
    device given, this minimises the last end.

    Args:
        groups: What runs.
        idle: Devices with nothing to do and nothing waiting for them.
        cost_s: What a split costs: a worker to be made ready, states to be read and written.
        least_gain: The least relative gain.

    Returns:
        Orders, at most one per idle device. A part of each group always stays where it is.
    """
    if not cost_s >= 0.0 or not 0.0 <= least_gain < 1.0:
        raise InvalidInput(
            f"cost_s must be at least 0 and least_gain in [0, 1), got {cost_s!r} and {least_gain!r}."
        )
    free: dict[str, list[str]] = {}
    for device in idle:
        free.setdefault(device.kind, []).append(device.id)
    counts = [1] * len(groups)
    ends_s = [end_s(group, 1) for group in groups]
    able = [sum(left > 0 for left in group.epochs_left) for group in groups]
    open_ = set(range(len(groups)))
    while open_:
        last = max(open_, key=lambda at: (ends_s[at], -at))
        group = groups[last]
        room = len(free.get(group.device.kind, ())) - sum(
            counts[at] - 1 for at, other in enumerate(groups) if other.device.kind == group.device.kind
        )
        # One more part; where what a split costs eats the gain of one, perhaps not that of two.
        for count in range(counts[last] + 1, min(counts[last] + room, able[last]) + 1):
            then_s = end_s(group, count, cost_s=cost_s)
            if then_s < (1.0 - least_gain) * ends_s[last]:
                counts[last], ends_s[last] = count, then_s
                break
        else:
            open_.discard(last)
    orders: list[Regroup] = []
    for group, count in zip(groups, counts, strict=True):
        for part in parts(group, count)[1:]:
            orders.append(Regroup(part, free[group.device.kind].pop(0)))
    return tuple(orders)


def merges(groups: Sequence[FusedGroup], leaving: Collection[str]) -> tuple[Regroup, ...]:
    """Where the members on devices that leave go on: merged with a group of their kind, the one that then ends first.

    A group takes in no more than memory allows (``FusionChoice.limit``). Members for which there is no group are in
    no order: they wait for a device, as any other trial does.
    """
    staying = [group for group in groups if group.device.id not in leaving]
    taken: dict[str, FusedGroup] = {group.device.id: group for group in staying}
    changed: dict[str, tuple[int, ...]] = {}
    going = [group for group in groups if group.device.id in leaving]
    for group in sorted(going, key=lambda g: -end_s(g, 1)):
        best: tuple[float, FusedGroup] | None = None
        for other in taken.values():
            if other.kind != group.kind or other.device.kind != group.device.kind:
                continue
            count = len(other.members) + len(group.members)
            if other.choice is not None and count > other.choice.limit:
                continue
            merged = FusedGroup(
                (*other.members, *group.members),
                (*other.epochs_left, *group.epochs_left),
                other.epoch_of_s(count),
                other.device,
                other.kind,
                other.choice,
            )
            then_s = end_s(merged, 1)
            if best is None or then_s < best[0]:
                best = then_s, merged
        if best is not None:
            taken[best[1].device.id] = best[1]
            changed[best[1].device.id] = best[1].members
    return tuple(Regroup(members, device) for device, members in changed.items())


def _step_s(choice: FusionChoice, members: int) -> float:
    """Seconds of a step of all members: in as many groups as the fusion count makes of them, one after another."""
    groups = math.ceil(members / max(1, choice.count))
    sizes = [members // groups + (1 if at < members % groups else 0) for at in range(groups)]
    return sum(choice.step_s(size) for size in sizes)
