"""Widths that beat StaticFluid's: the least work that fits a horizon, kept when a look ahead says it ends sooner."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import final

from penstock.core.errors import InvalidInput
from penstock.plan._place import Layout, run_through, shelve
from penstock.plan._waterfill import waterfill_widths
from penstock.predict import Overhead

_HORIZONS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
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
        sharing = range(overhead.max_sharing, 1, -1)
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
    """No schedule ends sooner than this: max(work / devices, the longest trial at its best width).

    Work is what the trials take alone on one device each, or less where packing makes it less.
    """
    overhead = overhead.within_bounds()
    packed = overhead.max_sharing
    saving = min(1.0, overhead.alpha ** (packed - 1) / packed)
    widest = min(devices, overhead.max_devices)
    longest_s = max(runtimes_s, default=0.0)
    return max(saving * math.fsum(runtimes_s) / devices, overhead.runtime_s(longest_s, widest))


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
    base_s = allotment.horizon_s(runtimes_s, devices)
    candidates = [
        waterfill_widths(
            runtimes_s,
            devices=devices,
            max_sharing=overhead.max_sharing,
            max_devices=min(devices, overhead.max_devices),
        ),
        [1.0] * len(runtimes_s),
    ]
    for factor in _HORIZONS:
        widths = [min(float(devices), allotment.width(r, factor * base_s)) for r in runtimes_s]
        if widths not in candidates:
            candidates.append(widths)
    best, best_s = None, math.inf
    for widths in candidates:
        layout = _shelved(runtimes_s, widths, devices, overhead)
        makespan_s = _makespan_s(layout, runtimes_s, overhead)
        if makespan_s < best_s * (1 - 1e-12):
            best, best_s = layout, makespan_s
    assert best is not None
    if len(runtimes_s) <= _SEARCHED:
        best = _improve(best, best_s, runtimes_s, devices, overhead)
    return best


def _improve(
    layout: Layout, makespan_s: float, runtimes_s: Sequence[float], devices: int, overhead: Overhead
) -> Layout:
    """Change one or two trials' widths at a time as long as it helps."""
    steps = [1 / p for p in range(overhead.max_sharing, 1, -1)]
    steps += [float(w) for w in range(1, min(devices, overhead.max_devices) + 1)]
    better = True
    while better:
        better = False
        for trial in range(len(runtimes_s)):
            for width in steps:
                if width == layout.widths[trial]:
                    continue
                widths = list(layout.widths)
                widths[trial] = width
                other = _shelved(runtimes_s, widths, devices, overhead)
                other_s = _makespan_s(other, runtimes_s, overhead)
                if other_s < makespan_s * (1 - 1e-9):
                    layout, makespan_s, better = other, other_s, True
    return layout


def _shelved(
    runtimes_s: Sequence[float], widths: Sequence[float], devices: int, overhead: Overhead
) -> Layout:
    heights = [overhead.runtime_s(r, w) for r, w in zip(runtimes_s, widths, strict=True)]
    return shelve(widths, heights, devices=devices)


def _makespan_s(layout: Layout, runtimes_s: Sequence[float], overhead: Overhead) -> float:
    return run_through(
        layout, runtimes_s, slowdown=lambda p: float(overhead.alpha ** (p - 1)), speed=overhead.speed
    ).makespan_s
