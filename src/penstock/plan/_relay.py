"""Relay: trials begin wide, narrow at the end of a chosen epoch, and hand their other devices over to who waits."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.core import Placement, Plan, Resize, Running, Share, Turn
from penstock.plan._board import EPSILON, Board
from penstock.plan._rollout import epoch_count
from penstock.plan._waves import ALIKE
from penstock.predict import Overhead

# Devices kept after narrowing, and given up, at most: more are worth a try, not always the best.
_REACHES = (3, 5)
_STEPS = (0.024, 0.003)  # each end looked for is so much earlier; where none is found, half, but not less
_GOLDEN = (math.sqrt(5) - 1) / 2


def relay(
    work_s: Sequence[float],
    epochs: Sequence[int],
    *,
    devices: int,
    overhead: Overhead,
    within_s: float,
    tries: int = 16,
) -> tuple[float, list[Turn]]:
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
        The end, infinite if none was found; and the turns in the order in which they begin, where trials are named
        by their index.
    """
    order = sorted(range(len(work_s)), key=lambda i: -work_s[i])
    best_s, best = _waves(work_s, epochs, devices, overhead)
    if best_s >= within_s:
        best_s, best = within_s, []
    step = _STEPS[0] if best else 1e-6
    for attempt in range(tries):
        reach = _REACHES[attempt % 2]
        found = _fill(work_s, epochs, order, devices, best_s * (1 - step), overhead, reach)
        if found is not None:
            best_s, best = found
            step = _STEPS[0] if attempt == 0 else step
        elif not best:
            break  # not even as late as that
        else:
            step = max(step / 2, _STEPS[1])
            keys = [-each_s * (1 + (i * attempt * _GOLDEN) % 1 / 2) for i, each_s in enumerate(work_s)]
            order = sorted(order, key=keys.__getitem__)
    return best_s if best else math.inf, best


def _fill(
    work_s: Sequence[float],
    epochs: Sequence[int],
    order: Sequence[int],
    devices: int,
    end_s: float,
    overhead: Overhead,
    reach: int,
) -> tuple[float, list[Turn]] | None:
    """Everybody's turn, so that all have ended by then; None: not found.

    One trial after the other takes the devices, the width and the epoch of narrowing that waste the least device
    time: by spreading, by the change, by waiting for the last of its devices, and by what it leaves free at the end
    that nobody can use any more.
    """
    widest = min(devices, overhead.max_devices)
    speeds = [0.0, *(overhead.speed(float(width)) for width in range(1, widest + 1))]
    pairs = [
        (width, float(kept))
        for width in range(2, widest + 1)
        for kept in range(max(1, width - reach), min(width - 1, reach) + 1)
    ]
    pairs += [(width, 1 / p) for width in range(2, widest + 1) for p in range(2, overhead.max_sharing + 1)]
    pairs.sort()
    slow = {kept: overhead.speed(kept) for _, kept in pairs}
    pause_s = overhead.epsilon_s
    ready = [0.0] * devices  # when each device is free
    least_s = min(work_s)
    # What is free from some time on till the end is lost, unless somebody can be done in that time; then only by how
    # far that one has to spread.
    enough_s = [least_s / speed for speed in reversed(speeds[1:])]
    lost = [1.0, *(1 - speeds[width] / width for width in range(widest, 0, -1))]
    # When those narrow who have a part of a device, how many may join them, and when the last of them ends.
    hosts: dict[float, list[tuple[float, int, float]]] = {}
    turns: list[tuple[float, int, Turn]] = []
    ends_s = 0.0
    for place, index in enumerate(order):
        alone_s = work_s[index]
        if place == len(order) - 1:
            lost = [1.0] * len(lost)
        best = math.inf
        chosen: tuple[int, int, int, float, float, float] | None = None
        for width in range(1, widest + 1):
            took_s = alone_s / speeds[width]
            upto = bisect_right(ready, end_s - took_s + EPSILON)
            if upto < width:
                continue
            begin_s = ready[upto - 1]
            rest_s = end_s - begin_s - took_s
            waste = width * (took_s + begin_s) - sum(ready[upto - width : upto])
            waste += width * rest_s * lost[bisect_right(enough_s, rest_s)]
            if waste < best - EPSILON:
                best, chosen = waste, (upto, width, 0, float(width), took_s, took_s)
        count = epochs[index]
        for width, kept in pairs if count > 1 and alone_s > 0 else ():
            if width > len(ready):
                break
            wide_s, narrow_s = alone_s / speeds[width] / count, alone_s / slow[kept] / count
            late_s = ready[width - 1] + pause_s + count * narrow_s - end_s
            number = max(1, math.ceil(late_s / (narrow_s - wide_s) - EPSILON)) if late_s > 0 else 1
            if number >= count:
                continue
            first_s = number * wide_s
            took_s = first_s + pause_s + (count - number) * narrow_s
            upto = bisect_right(ready, end_s - took_s + EPSILON)
            if upto < width:
                continue
            begin_s = ready[upto - 1]
            rest_s = end_s - begin_s - took_s
            waste = width * (first_s + begin_s) - sum(ready[upto - width : upto]) + kept * (took_s - first_s)
            waste += kept * rest_s * lost[bisect_right(enough_s, rest_s)]
            rest_s = end_s - begin_s - first_s
            waste += (width - kept) * rest_s * lost[bisect_right(enough_s, rest_s)]
            if waste < best - EPSILON:
                best, chosen = waste, (upto, width, number, kept, first_s, took_s)
        if chosen is None:
            return None
        upto, width, number, kept, first_s, took_s = chosen
        begin_s = ready[upto - 1]
        del ready[upto - width : upto]
        ends_s = max(ends_s, begin_s + took_s)
        freed = width - math.ceil(kept)
        if kept < 1:
            joins, gone = _share(hosts.setdefault(kept, []), kept, begin_s + first_s, begin_s + took_s)
            freed += joins
            if gone is not None:
                insort(ready, gone)
        else:
            for _ in range(int(kept)):
                insort(ready, begin_s + took_s)
        for _ in range(freed):
            insort(ready, begin_s + first_s)
        turns.append((begin_s, place, Turn(index, width, number, kept)))
    return ends_s, [turn for _, _, turn in sorted(turns, key=lambda each: each[:2])]


def _share(
    hosts: list[tuple[float, int, float]], kept: float, from_s: float, end_s: float
) -> tuple[bool, float | None]:
    """Whether a trial joins another one on a part of a device, or keeps one of its own; and when that device is
    free, if nobody else can come."""
    for number, (narrow_s, room, until_s) in enumerate(hosts):
        if narrow_s <= from_s + EPSILON:  # before that, the host would be slowed down while it is wide
            until_s = max(until_s, end_s)
            if room > 1:
                hosts[number] = narrow_s, room - 1, until_s
                return True, None
            del hosts[number]
            return True, until_s
    hosts.append((from_s, round(1 / kept) - 1, end_s))
    return False, None


def _waves(
    work_s: Sequence[float], epochs: Sequence[int], devices: int, overhead: Overhead
) -> tuple[float, list[Turn]]:
    """The best of all ways in two waves, for trials that are all alike: some begin, and narrow all at once; the others
    begin then, all equally wide, and run to their end."""
    alone_s, count, trials = max(work_s), epochs[0], len(work_s)
    if min(work_s) < ALIKE * alone_s or min(epochs) < max(epochs) or count < 2:
        return math.inf, []
    best_s = math.inf
    best = (0, 0, 0, 0.0, 0)
    widths = range(1, min(devices, overhead.max_devices) + 1)
    speeds = {float(width): overhead.speed(float(width)) for width in widths}
    parts = {1 / p: overhead.speed(1 / p) for p in range(2, overhead.max_sharing + 1)}
    epoch_s = alone_s / count
    for kept, slow in {**parts, **speeds}.items():
        for then in widths:
            if then <= kept:
                continue
            # So many that the devices they leave are enough for the others.
            first = max(1, math.ceil((then * trials - devices) / (then - kept) - EPSILON))
            while then * (trials - first) > devices - math.ceil(first * kept - EPSILON):
                first += 1
            for width in widths[math.ceil(kept) :]:
                if first * width > devices or first > trials:
                    break
                # The more epochs before, the sooner the first and the later the others are done.
                before_s, after_s, then_s = epoch_s / speeds[width], epoch_s / slow, alone_s / speeds[then]
                even = (overhead.epsilon_s + count * after_s - then_s) / after_s
                for number in {
                    max(1, min(count - 1, whole)) for whole in (math.floor(even), math.ceil(even))
                }:
                    end_s = max(overhead.epsilon_s + (count - number) * after_s, then_s) + number * before_s
                    if end_s < best_s * (1 - EPSILON):
                        best_s, best = end_s, (first, width, number, kept, then)
    first, width, number, kept, then = best
    turns = [Turn(index, width, number, kept) for index in range(first)]
    return best_s, turns + [Turn(index, then, 0, float(then)) for index in range(first, trials)]


def turn_of(turns: Iterable[Turn], placement: Placement) -> Turn | None:
    """The turn of a placement, that runs or waits: of several, by the epochs it had behind it."""
    segment = placement.segments[0]
    mine = [turn for turn in turns if turn.trial == segment.trial.id and turn.start <= segment.start]
    return max(mine, key=lambda turn: turn.start, default=None)


def turns_of(plan: Plan) -> tuple[Turn, ...]:
    """What was decided for a group, as those of it tell that run or wait."""
    for item in plan.running:
        if item.placement.turns:
            return item.placement.turns
    for placement in (*plan.placed, *plan.waiting):
        if placement.turns:
            return placement.turns
    return ()


def take_turns(plan: Plan, turns: Sequence[Turn], overhead: Overhead) -> Plan:
    """Begin with those whose turn it is: in their order, as far as there are enough devices."""
    waiting = {placement.segments[0].trial.id: placement for placement in plan.waiting}
    known: dict[int, list[Turn]] = {}
    for turn in turns:
        known.setdefault(turn.trial, []).append(turn)
    # Whose next turn comes later than others' is passed over while it has not paused yet.
    mine = {turn_of(known.get(trial, ()), placement) for trial, placement in waiting.items()}
    ordered = [turn for turn in turns if turn in mine]
    # Who is not known comes last: one that has failed and begins again is, though.
    ordered += [Turn(trial) for trial in waiting if trial not in known]
    board = Board(plan)
    board.settle(plan.running, [0.0] * len(plan.running), lambda placement, left_s: 1 << 30)
    # When those narrow who keep a part of a device, and which part.
    hosts = [
        (_narrows_s(item, own, overhead), item.placement.shares[0])
        for item in plan.running
        if item.placement.shares
        and item.placement.shares[0].fraction < 1
        and (own := turn_of(known.get(item.placement.segments[0].trial.id, ()), item.placement)) is not None
    ]
    placed: list[Placement] = []
    resized = list(plan.resized)
    for turn in ordered:
        placement = waiting[turn.trial]
        if turn.width < 1:
            name = _part(board, turn.width, placement.memory_bytes)
            if name is None:
                break  # who comes after it would take its devices
            names, shares = [name], [Share(name, turn.width)]
        else:
            width = int(min(turn.width, placement.max_devices))
            names = board.take_whole(width, placement.memory_bytes)
            if not names or (len(names) < width and (plan.running or placed)):
                board.give_back(names)
                break
            shares = [Share(name) for name in names]
        kept = tuple(shares[: math.ceil(turn.kept)])
        segment = placement.segments[0]
        narrows = turn.epochs and len(names) > turn.kept and _goes_on(placement, turn.epochs)
        if narrows and 0 < turn.kept < 1:
            count = epoch_count(placement)
            from_s = overhead.runtime_s(placement.expected_s or 0.0, float(len(names))) * turn.epochs / count
            part = _place_with(hosts, board, turn.kept, from_s, placement)
            if part is None:
                # It holds no more than that part of its first device from now on, so that others can have the rest.
                part = shares[0] = Share(names[0], turn.kept)
                hosts.append((from_s, part))
            else:
                board.tenancies[part.device].enter(turn.kept, 0.0, 1 << 30, placement.memory_bytes)
            kept = (part,)
        for share in shares:
            board.tenancies[share.device].enter(share.fraction, 0.0, 1 << 30, placement.memory_bytes)
        begun = replace(placement, shares=tuple(shares), turns=tuple(turns))
        placed.append(begun)
        del waiting[turn.trial]
        if narrows:
            resized.append(Resize(begun, kept, segment.start + turn.epochs))
    left = tuple(placement for placement in plan.waiting if placement.segments[0].trial.id in waiting)
    return replace(
        plan,
        waiting=left,
        free=board.free(),
        placed=(*plan.placed, *placed),
        resized=tuple(resized),
    )


def _part(board: Board, part: float, memory_bytes: int | None) -> str | None:
    """A device of which such a part is free: rather one that is shared already than an empty one."""
    limit = round(1 / part)
    for name, tenancy in board.tenancies.items():
        if tenancy.count and tenancy.bears(part, limit, memory_bytes):
            return name
    return next(iter(board.take_whole(1, memory_bytes)), None)


def _place_with(
    hosts: Sequence[tuple[float, Share]], board: Board, kept: float, from_s: float, placement: Placement
) -> Share | None:
    """A part of a device that another one will have narrowed to by then, the latest such: until then it would be slowed
    down."""
    best_s, best = -math.inf, None
    for narrow_s, part in hosts:
        tenancy = board.tenancies.get(part.device)
        if (
            tenancy is None
            or part.fraction != kept
            or not best_s < narrow_s <= from_s * (1 + EPSILON) + EPSILON
        ):
            continue
        if tenancy.bears(kept, round(1 / kept), placement.memory_bytes):
            best_s, best = narrow_s, part
    return best


def _narrows_s(item: Running, turn: Turn, overhead: Overhead) -> float:
    """When a running trial gives devices up."""
    if not item.leaving:
        return 0.0
    left = 1 - turn.epochs / max(1, epoch_count(item.placement))
    wide_s = (item.remaining_s or 0.0) - left * (item.placement.expected_s or 0.0)
    return max(0.0, overhead.runtime_s(wide_s, float(turn.width)))


def _goes_on(placement: Placement, epochs: int) -> bool:
    segment = placement.segments[0]
    return segment.until is not None and segment.start + epochs < segment.until
