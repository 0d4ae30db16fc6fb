"""Widths that beat StaticFluid's: the least work that fits a horizon, kept when a look ahead says it ends sooner."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import final

from penstock.core.errors import InvalidInput
from penstock.plan._place import Layout, run_through, shelve
from penstock.plan._waterfill import waterfill_widths
from penstock.predict import Overhead

_HORIZONS = (1.15, 1.0, 1.3, 1.6, 1.07, 2.0)  # of the least one: it can rarely be met
_SEARCHED = 10  # up to so many trials, widths are also improved one by one


@final
class Allotment:
    """Which width a trial needs to end within a horizon, and the least horizon into which the work fits.

    For a horizon T, a trial takes the smallest width at which it ends within T: the smaller, the less device
    time it costs (packing saves some, scaling out wastes some). The least T at which the device time of all adds
    up to no more than the devices have is a lower bound of every schedule that keeps widths constant (the dual
    approximation of Turek, Wolf and Yu for malleable tasks).

    Args:
        overhead: The runtime model, with c and d.
    """

    __slots__ = ("_costs", "_speeds", "_widths", "overhead")

    def __init__(self, overhead: Overhead) -> None:
        self.overhead = overhead = overhead.within_bounds()
        # Only parts of which a device holds a whole number of places: 1/4 and 1/2 of c = 4, never 1/3.
        sharing = [p for p in range(overhead.max_sharing, 1, -1) if overhead.max_sharing % p == 0]
        widths = [*(1 / p for p in sharing), *(float(w) for w in range(1, overhead.max_devices + 1))]
        self._widths = widths
        self._speeds = [overhead.speed(width) for width in widths]
        self._costs = [width / speed for width, speed in zip(widths, self._speeds, strict=True)]

    def width(self, alone_s: float, horizon_s: float) -> float:
        """The smallest width at which a trial ends within ``horizon_s``; the largest if none does."""
        if horizon_s <= 0:
            return self._widths[-1]
        index = bisect_left(self._speeds, alone_s / horizon_s * (1 - 1e-9))
        return self._widths[min(index, len(self._widths) - 1)]

    def horizon_s(self, runtimes_s: Sequence[float], devices: int) -> float:
        """The least horizon into which the work fits on ``devices``."""
        ordered = sorted(runtimes_s)
        if not ordered or ordered[-1] <= 0:
            return 0.0
        sums = [0.0, *accumulate(ordered)]
        low = ordered[-1] / self._speed_within(devices)
        if self._work(ordered, sums, low) <= devices * low:
            return low
        high = max(low, sums[-1] / devices, ordered[-1])
        for _ in range(40):
            middle = (low + high) / 2
            if self._work(ordered, sums, middle) <= devices * middle:
                high = middle
            else:
                low = middle
            if high - low <= 1e-6 * high:
                break
        return high

    def fastest_s(self, alone_s: float, devices: int) -> float:
        """What a trial takes on as many of ``devices`` as serve it best."""
        return alone_s / self._speed_within(devices)

    def shelf_s(self, runtimes_s: Sequence[float], devices: int) -> float | None:
        """The least horizon at which all trials run at once, side by side; None if they never fit so."""
        ordered = sorted(runtimes_s)
        if not ordered or ordered[-1] <= 0:
            return 0.0
        if math.ceil(len(ordered) * self._widths[0] - 1e-9) > devices:
            return None
        low = ordered[-1] / self._speed_within(devices)
        if self._side_by_side(ordered, low) <= devices:
            return low
        high = max(low, ordered[-1] / self._speeds[0])
        for _ in range(40):
            middle = (low + high) / 2
            if self._side_by_side(ordered, middle) <= devices:
                high = middle
            else:
                low = middle
            if high - low <= 1e-6 * high:
                break
        return high

    def _side_by_side(self, ordered: Sequence[float], horizon_s: float) -> float:
        """Devices needed to run all at once at the smallest widths that meet the horizon."""
        shared, whole, begin = 0.0, 0.0, 0
        for width, speed in zip(self._widths, self._speeds, strict=True):
            end = bisect_right(ordered, speed * horizon_s * (1 + 1e-9), begin)
            if width < 1:
                shared += math.ceil((end - begin) * width - 1e-9)
            else:
                whole += (end - begin) * width
            begin = end
        return shared + whole + self._widths[-1] * (len(ordered) - begin)

    def candidates(
        self, runtimes_s: Sequence[float], *, devices: int, idle: int, horizon_s: float, most: int
    ) -> Iterator[list[float]]:
        """Up to ``most`` ways to choose widths, the more promising first.

        Args:
            runtimes_s: Of the trials that want devices.
            devices: How many there are.
            idle: How many of them are wholly free now.
            horizon_s: Into which all work fits, that of running trials included.
            most: How many ways at most.
        """
        widest = float(max(1, idle))
        overhead = self.overhead
        yield waterfill_widths(
            runtimes_s,
            devices=max(1, idle),
            max_sharing=overhead.max_sharing,
            max_devices=min(max(1, idle), overhead.max_devices),
        )
        shelf_s = self.shelf_s(runtimes_s, idle) if idle else None
        horizons = [] if shelf_s is None else [shelf_s]
        horizons += [factor * horizon_s for factor in _HORIZONS]
        for horizon in horizons[: most - 1]:
            yield [min(widest, self.width(runtime, horizon)) for runtime in runtimes_s]

    def _speed_within(self, devices: int) -> float:
        return max(s for w, s in zip(self._widths, self._speeds, strict=True) if w <= devices)

    def _work(self, ordered: Sequence[float], sums: Sequence[float], horizon_s: float) -> float:
        """Device time at the smallest widths that meet the horizon; O(widths * log trials)."""
        work, begin = 0.0, 0
        for cost, speed in zip(self._costs, self._speeds, strict=True):
            end = bisect_right(ordered, speed * horizon_s * (1 + 1e-9), begin)
            work += cost * (sums[end] - sums[begin])
            begin = end
        return work + self._costs[-1] * (sums[-1] - sums[begin])


def lower_bound_s(runtimes_s: Sequence[float], *, devices: int, overhead: Overhead) -> float:
    """No schedule ends sooner than this, also if it changes widths at any time and moves trials as it likes.

    To end within T a trial takes at least so much device time: on one device, which it may share for a part of the
    time, what the least mix of sharing and not takes; on several, what that constant width takes; or, if its width
    changes, what the least mix of all widths takes in epsilon less time, and a place meanwhile. The bound is the
    least T at which these add up to what the devices have, or the longest trial at its best width.
    """
    times_s = [runtime for runtime in runtimes_s if runtime > 0]
    if not times_s:
        return 0.0
    overhead = overhead.within_bounds()
    shared = [1 / p for p in range(overhead.max_sharing, 0, -1)]
    spread = [float(w) for w in range(2, min(devices, overhead.max_devices) + 1)]
    one = _hull([(overhead.speed(width), width) for width in shared])
    mixed = _hull([(overhead.speed(width), width) for width in (*shared, *spread)])
    constant = [(overhead.speed(width), width) for width in spread]
    pause_s = overhead.epsilon_s

    def device_s(work_s: float, horizon_s: float) -> float:
        least = horizon_s * _mix(one, work_s / horizon_s)
        for speed, width in constant:
            if work_s <= speed * horizon_s * (1 + 1e-9):
                least = min(least, width * work_s / speed)
        if spread and horizon_s > pause_s:
            rest_s = horizon_s - pause_s
            least = min(least, rest_s * _mix(mixed, work_s / rest_s) + pause_s * shared[0])
        return least

    counts = Counter(times_s)
    low = max(times_s) / mixed[-1][0]
    high = max(low, math.fsum(times_s))
    for _ in range(60):
        middle = (low + high) / 2
        if math.fsum(n * device_s(t, middle) for t, n in counts.items()) <= devices * middle * (1 + 1e-12):
            high = middle
        else:
            low = middle
        if high - low <= 1e-7 * high:
            break
    return low


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of (speed, width), from standing still on: mixes in time cost no less."""
    hull = [(0.0, 0.0)]
    for point in sorted(points):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-2][0]) >= (
            point[1] - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append(point)
    return hull


def _mix(hull: Sequence[tuple[float, float]], speed: float) -> float:
    """The least average width at an average speed; infinite if it can't be reached."""
    for (slow, less), (fast, more) in pairwise(hull):
        if speed <= fast * (1 + 1e-9):
            return less + (more - less) * (speed - slow) / (fast - slow)
    return math.inf


def static_fluid(runtimes_s: Sequence[float], *, devices: int, overhead: Overhead) -> Layout:
    """StaticFluid: Algorithm 1's widths on shelves."""
    overhead = overhead.within_bounds()
    widths = waterfill_widths(
        runtimes_s,
        devices=devices,
        max_sharing=overhead.max_sharing,
        max_devices=min(devices, overhead.max_devices),
    )
    return _shelved(runtimes_s, widths, devices, overhead)


def pack(runtimes_s: Sequence[float], *, devices: int, overhead: Overhead) -> Layout:
    """The best of StaticFluid, of one device per trial (the longest first), and of the least work for a horizon.

    Each is played through and the one that ends first is kept, so it never loses to StaticFluid or to FIFO in the
    longest-first order as far as the runtimes are known.
    """
    if devices < 1:
        raise InvalidInput(f"devices is {devices!r}; give a whole number of at least 1.")
    overhead = overhead.within_bounds()
    allotment = Allotment(overhead)
    horizon_s = allotment.horizon_s(runtimes_s, devices)
    candidates = [[1.0] * len(runtimes_s)]
    for widths in allotment.candidates(
        runtimes_s, devices=devices, idle=devices, horizon_s=horizon_s, most=len(_HORIZONS) + 2
    ):
        if widths not in candidates:
            candidates.append(widths)
    best, best_s = candidates[0], math.inf
    for widths in candidates:
        ends_s = makespan_s(runtimes_s, widths, devices=devices, overhead=overhead)
        if ends_s < best_s * (1 - 1e-12):
            best, best_s = widths, ends_s
    if len(runtimes_s) <= _SEARCHED:
        best = _improve(best, best_s, runtimes_s, devices, overhead)
    return _shelved(runtimes_s, best, devices, overhead)


def _improve(
    widths: list[float], ends_s: float, runtimes_s: Sequence[float], devices: int, overhead: Overhead
) -> list[float]:
    """Change one trial's width at a time as long as it helps."""
    steps = [1 / p for p in range(overhead.max_sharing, 1, -1)]
    steps += [float(w) for w in range(1, min(devices, overhead.max_devices) + 1)]
    better = True
    while better:
        better = False
        for trial in range(len(widths)):
            for width in steps:
                other = [*widths[:trial], width, *widths[trial + 1 :]]
                other_s = makespan_s(runtimes_s, other, devices=devices, overhead=overhead)
                if other_s < ends_s * (1 - 1e-9):
                    widths, ends_s, better = other, other_s, True
    return widths


def _shelved(
    runtimes_s: Sequence[float], widths: Sequence[float], devices: int, overhead: Overhead
) -> Layout:
    heights = [overhead.runtime_s(r, w) for r, w in zip(runtimes_s, widths, strict=True)]
    return shelve(widths, heights, devices=devices)


def makespan_s(
    runtimes_s: Sequence[float], widths: Sequence[float], *, devices: int, overhead: Overhead
) -> float:
    """When trials of these widths on shelves would all have ended, played through."""
    layout = _shelved(runtimes_s, widths, devices, overhead)
    slowdown = [overhead.alpha ** (p - 1) for p in range(len(runtimes_s) + 1)]
    return run_through(layout, runtimes_s, slowdown=slowdown.__getitem__, speed=overhead.speed).makespan_s


def forecast_s(
    widths: Sequence[float],
    runtimes_s: Sequence[float],
    *,
    ready_s: Sequence[Sequence[float]],
    overhead: Overhead,
) -> float:
    """When trials of these widths would all have ended on devices that are partly busy; quick, not exact.

    Args:
        widths: Whole numbers, or fractions.
        runtimes_s: What each takes alone on one device.
        ready_s: Per device, when each of its c places is free.
        overhead: The runtime model.
    """
    places = overhead.max_sharing
    order = sorted(range(len(widths)), key=lambda i: (-widths[i], -runtimes_s[i]))
    devices = [(max(slots), number) for number, slots in enumerate(ready_s)]
    heapq.heapify(devices)
    last = 0.0
    position = 0
    speeds = {width: overhead.speed(width) for width in set(widths)}
    taken: set[int] = set()
    while position < len(order) and widths[order[position]] >= 1:
        trial = order[position]
        width = min(int(widths[trial]), len(ready_s))
        runtime_s = runtimes_s[trial] / speeds[widths[trial]]
        if width == 1:
            end = devices[0][0] + runtime_s
            number = devices[0][1]
            heapq.heapreplace(devices, (end, number))
            taken.add(number)
        else:
            group = [heapq.heappop(devices) for _ in range(width)]
            end = group[-1][0] + runtime_s
            for _, number in group:
                heapq.heappush(devices, (end, number))
                taken.add(number)
        last = max(last, end)
        position += 1
    if position == len(order):
        return last
    slots: list[float] = []
    for ready, number in devices:
        slots.extend([ready] * places if number in taken else ready_s[number])
    heapq.heapify(slots)
    for trial in order[position:]:
        runtime_s = runtimes_s[trial] / speeds[widths[trial]]
        needs = max(1, round(widths[trial] * places))
        if needs == 1:
            end = slots[0] + runtime_s
            heapq.heapreplace(slots, end)
        else:
            end = [heapq.heappop(slots) for _ in range(needs)][-1] + runtime_s
            for _ in range(needs):
                heapq.heappush(slots, end)
        last = max(last, end)
    return last
