"""First come, first served: the planner of short trials and the base line for all others."""

from __future__ import annotations

import heapq
from dataclasses import replace

from penstock.core import Free, Placement, Plan, PlanPass, Share
from penstock.core.errors import InvalidInput

_EPSILON = 1e-9  # three thirds of a device are one device


def fifo(width: float = 1.0) -> PlanPass:
    """A pass that gives each waiting placement ``width`` devices, in the order they came.

    A fraction shares a device: the emptiest device is taken first, so that few trials spread out. A whole
    number takes so many wholly free devices of one node. An ``exclusive`` placement takes at least one wholly
    free device; while there is none, later placements may pass it, but one device (the emptiest) is kept for
    it, so that it does not wait forever. What then still waits is queued behind the running placements,
    round-robin, as far as ``Free.backlog`` allows. No device is ever given more than it has free.

    Args:
        width: Devices per placement: a fraction in (0, 1], or a whole number.

    Returns:
        The pass. Its cost grows with what is free and what is placed, not with the queue.
    """
    if isinstance(width, bool) or not isinstance(width, (int, float)) or not 0 < width < float("inf"):
        raise InvalidInput(f"width is {width!r}; give the devices per trial: 0.5, 1, 2 ...")
    if width > 1 and width != int(width):
        raise InvalidInput(f"width is {width!r}; above 1 it is a whole number of devices: {round(width)}?")
    if width > 1:
        return lambda plan: _several(plan, int(width))
    return lambda plan: _shared(plan, float(width))


def _shared(plan: Plan, width: float) -> Plan:
    """Placements on one device each, or on a part of it."""
    waiting, free = plan.waiting, plan.free
    fractions = [item.fraction for item in free]
    backlogs = [item.backlog for item in free]
    emptiest = [(-item.fraction, i) for i, item in enumerate(free) if item.fraction >= width - _EPSILON]
    heapq.heapify(emptiest)
    placed: list[Placement] = []
    held: list[Placement] = []  # exclusive ones that must wait for a wholly free device
    position = 0
    while emptiest and position < len(waiting):
        placement = waiting[position]
        whole = -emptiest[0][0] >= 1 - _EPSILON
        if placement.exclusive and not whole:
            if not held:
                # What is free on the emptiest device only grows from here on, as nothing is placed on it.
                _, kept = heapq.heappop(emptiest)
                fractions[kept], backlogs[kept] = 0.0, 0
            held.append(placement)
            position += 1
            continue
        taken = 1.0 if placement.exclusive else width
        index = emptiest[0][1]
        left = fractions[index] - taken
        fractions[index] = left if left > _EPSILON else 0.0
        if fractions[index] >= width - _EPSILON:
            heapq.heapreplace(emptiest, (-fractions[index], index))
        else:
            heapq.heappop(emptiest)
        if placement.exclusive:
            backlogs[index] = 0
        placed.append(replace(placement, shares=(Share(free[index].device.id, taken),)))
        position += 1
    rest = waiting[position:]
    if rest and any(backlogs):
        rest = _queue(rest, free, backlogs, width, held, placed)
    left_over = tuple(
        replace(item, fraction=fraction, backlog=backlog)
        for item, fraction, backlog in zip(free, fractions, backlogs, strict=True)
        if fraction > 0 or backlog > 0
    )
    return replace(plan, waiting=(*held, *rest), free=left_over, placed=(*plan.placed, *placed))


def _queue(
    rest: tuple[Placement, ...],
    free: tuple[Free, ...],
    backlogs: list[int],
    width: float,
    held: list[Placement],
    placed: list[Placement],
) -> tuple[Placement, ...]:
    """Queue ``rest`` behind running placements, one per device and round; returns what is left.

    Changes ``backlogs``, ``held`` and ``placed``.
    """
    ring = [index for index, backlog in enumerate(backlogs) if backlog > 0]
    position = 0
    while ring:
        following = []
        for index in ring:
            while position < len(rest) and rest[position].exclusive:
                if not held:
                    # Nothing is free: keep the device with the shortest queue, which drains from here on.
                    kept = max(ring, key=lambda i: (backlogs[i], -i))
                    backlogs[kept] = 0
                held.append(rest[position])
                position += 1
            if position == len(rest):
                return ()
            if backlogs[index] == 0:
                continue
            placed.append(replace(rest[position], shares=(Share(free[index].device.id, width),)))
            position += 1
            backlogs[index] -= 1
            if backlogs[index]:
                following.append(index)
        ring = following
    return rest[position:]


def _several(plan: Plan, width: int) -> Plan:
    """Placements on ``width`` whole devices of one node each. All need the same: no one is passed."""
    waiting = plan.waiting
    nodes: dict[str, list[int]] = {}
    for index, item in enumerate(plan.free):
        if item.fraction >= 1 - _EPSILON:
            nodes.setdefault(item.device.node, []).append(index)
    taken: set[int] = set()
    placed: list[Placement] = []
    for members in nodes.values():
        for first in range(0, len(members) - width + 1, width):
            if len(placed) == len(waiting):
                break
            chosen = members[first : first + width]
            taken.update(chosen)
            shares = tuple(Share(plan.free[index].device.id) for index in chosen)
            placed.append(replace(waiting[len(placed)], shares=shares))
    left_over = tuple(
        item if index not in taken else replace(item, fraction=0.0)
        for index, item in enumerate(plan.free)
        if index not in taken or item.backlog > 0
    )
    return replace(plan, waiting=waiting[len(placed) :], free=left_over, placed=(*plan.placed, *placed))
