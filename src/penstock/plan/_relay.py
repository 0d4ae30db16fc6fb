"""Relay: trials begin wide, narrow at the end of a chosen epoch, and hand their other devices over to who waits."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace

from penstock.core import Placement, Plan, Resize, Share, Turn
from penstock.plan._board import Board
from penstock.predict import Overhead

_EPSILON = 1e-9
_REACHES = (
    3,
    5,
)  # devices kept after narrowing, and given up, at most: more are worth a try, not always the best
_HALVINGS = 5  # of the interval in which the earliest end is looked for; then, in other orders,
_STEP = 0.997  # each time a little earlier
_GOLDEN = (math.sqrt(5) - 1) / 2


def relay(
    work_s: Sequence[float],
    epochs: Sequence[int],
    *,
    devices: int,
    overhead: Overhead,
    within_s: float,
    tries: int = 16,
) -> tuple[float, list[tuple[int, int, int, int]]]:
    """The earliest end found for trials that take turns on devices, and who begins in which order.

    Whoever begins in this order as soon as there are enough devices ends no later than this, and neither do all, if
    nobody takes longer than was told: no one who begins or ends sooner keeps another one from its devices.

    Args:
        work_s: What each takes alone on one device.
        epochs: How many each has, at whose ends it may narrow; 0: not known.
        devices: All of them, idle.
        overhead: The runtime model.
        within_s: No end as late as this is looked for.
        tries: How often all are dealt out, at most; once if nothing is found.

    Returns:
        The end, infinite if none was found; and in the order in which they begin each trial's index, its devices,
        after how many epochs it narrows (0: never), and the devices it keeps.
    """
    widest = min(devices, overhead.max_devices)
    low = max(math.fsum(work_s) / devices, max(work_s) / overhead.speed(float(widest)))
    order = sorted(range(len(work_s)), key=lambda i: -work_s[i])
    end_s = within_s * (1 - 1e-6)
    best_s = math.inf
    best: list[tuple[int, int, int, int]] = []
    for attempt in range(tries):
        found = _fill(work_s, epochs, order, devices, end_s, overhead, _REACHES[attempt % 2])
        if found is not None:
            best_s, best = found
        elif not best:
            break  # not even as late as that
        elif attempt < _HALVINGS:
            low = max(low, end_s)
        if attempt < _HALVINGS:
            end_s = (low + best_s) / 2
        else:
            end_s = _STEP * best_s
            keys = [-each_s * (1 + (i * attempt * _GOLDEN) % 1 / 2) for i, each_s in enumerate(work_s)]
            order = sorted(order, key=keys.__getitem__)
        if end_s < low:
            break
    return best_s, best


def _fill(
    work_s: Sequence[float],
    epochs: Sequence[int],
    order: Sequence[int],
    devices: int,
    end_s: float,
    overhead: Overhead,
    reach: int,
) -> tuple[float, list[tuple[int, int, int, int]]] | None:
    """Everybody's turn, so that all have ended by then; None: not found.

    One trial after the other takes the devices, the width and the epoch of narrowing that waste the least device
    time: by spreading, by the change, by waiting for the last of its devices, and by what it leaves free at the end
    that nobody can use any more.
    """
    widest = min(devices, overhead.max_devices)
    speeds = [0.0, *(overhead.speed(float(width)) for width in range(1, widest + 1))]
    pairs = [
        (width, kept)
        for width in range(2, widest + 1)
        for kept in range(max(1, width - reach), min(width - 1, reach) + 1)
    ]
    pause_s = overhead.epsilon_s
    ready = [0.0] * devices  # when each device is free
    least_s = min(work_s)
    # What is free from some time on till the end is lost, unless somebody can be done in that time; then only by how
    # far that one has to spread.
    enough_s = [least_s / speed for speed in reversed(speeds[1:])]
    lost = [1.0, *(1 - speeds[width] / width for width in range(widest, 0, -1))]
    turns: list[tuple[float, int, int, int, int, int]] = []
    ends_s = 0.0
    for place, index in enumerate(order):
        alone_s = work_s[index]
        if place == len(order) - 1:
            lost = [1.0] * len(lost)
        best = math.inf
        chosen: tuple[int, int, int, int, float, float] | None = None
        for width in range(1, widest + 1):
            took_s = alone_s / speeds[width]
            upto = bisect_right(ready, end_s - took_s + _EPSILON)
            if upto < width:
                continue
            begin_s = ready[upto - 1]
            rest_s = end_s - begin_s - took_s
            waste = width * (took_s + begin_s) - sum(ready[upto - width : upto])
            waste += width * rest_s * lost[bisect_right(enough_s, rest_s)]
            if waste < best - _EPSILON:
                best, chosen = waste, (upto, width, 0, width, took_s, took_s)
        count = epochs[index]
        for width, kept in pairs if count > 1 and alone_s > 0 else ():
            wide_s, narrow_s = alone_s / speeds[width] / count, alone_s / speeds[kept] / count
            late_s = ready[width - 1] + pause_s + count * narrow_s - end_s
            number = max(1, math.ceil(late_s / (narrow_s - wide_s) - _EPSILON)) if late_s > 0 else 1
            if number >= count:
                continue
            first_s = number * wide_s
            took_s = first_s + pause_s + (count - number) * narrow_s
            upto = bisect_right(ready, end_s - took_s + _EPSILON)
            if upto < width:
                continue
            begin_s = ready[upto - 1]
            rest_s = end_s - begin_s - took_s
            waste = width * (first_s + begin_s) - sum(ready[upto - width : upto]) + kept * (took_s - first_s)
            waste += kept * rest_s * lost[bisect_right(enough_s, rest_s)]
            rest_s = end_s - begin_s - first_s
            waste += (width - kept) * rest_s * lost[bisect_right(enough_s, rest_s)]
            if waste < best - _EPSILON:
                best, chosen = waste, (upto, width, number, kept, first_s, took_s)
        if chosen is None:
            return None
        upto, width, number, kept, first_s, took_s = chosen
        begin_s = ready[upto - 1]
        del ready[upto - width : upto]
        for _ in range(width - kept):
            insort(ready, begin_s + first_s)
        for _ in range(kept):
            insort(ready, begin_s + took_s)
        ends_s = max(ends_s, begin_s + took_s)
        turns.append((begin_s, place, index, width, number, kept))
    return ends_s, [turn[2:] for turn in sorted(turns)]


def turns_of(plan: Plan) -> tuple[Turn, ...]:
    """What was decided for a group, as those of it tell that run or wait."""
    for item in plan.running:
        if item.placement.turns:
            return item.placement.turns
    for placement in (*plan.placed, *plan.waiting):
        if placement.turns:
            return placement.turns
    return ()


def take_turns(plan: Plan, turns: Sequence[Turn]) -> Plan:
    """Begin with those whose turn it is: in their order, as far as there are enough devices."""
    waiting = {placement.segments[0].trial.id: placement for placement in plan.waiting}
    known = {turn.trial for turn in turns}
    ordered = [turn for turn in turns if turn.trial in waiting]
    # Who is not known comes last: one that has failed and begins again is, though.
    ordered += [Turn(trial) for trial in waiting if trial not in known]
    board = Board(plan)
    board.settle(plan.running, [0.0] * len(plan.running), lambda left_s: 1)
    placed: list[Placement] = []
    resized = list(plan.resized)
    for turn in ordered:
        placement = waiting[turn.trial]
        width = min(turn.width, placement.max_devices)
        names = board.take_whole(width, placement.memory_bytes)
        if not names or (len(names) < width and (plan.running or placed)):
            board.give_back(names)
            break  # who comes after it would take its devices
        for name in names:
            board.tenancies[name].enter(1.0, 0.0, 1, placement.memory_bytes)
        begun = replace(placement, shares=tuple(Share(name) for name in names), turns=tuple(turns))
        placed.append(begun)
        del waiting[turn.trial]
        segment = placement.segments[0]
        if turn.epochs and len(names) > turn.kept and _goes_on(placement, segment.start + turn.epochs):
            resized.append(Resize(begun, begun.shares[: turn.kept], segment.start + turn.epochs))
    left = tuple(placement for placement in plan.waiting if placement.segments[0].trial.id in waiting)
    return replace(
        plan,
        waiting=left,
        free=board.free(),
        placed=(*plan.placed, *placed),
        resized=tuple(resized),
    )


def _goes_on(placement: Placement, epoch: int) -> bool:
    until = placement.segments[0].until
    return until is not None and epoch < until
