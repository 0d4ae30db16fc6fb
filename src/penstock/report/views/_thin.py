"""Thinning long series to what a screen shows, keeping their extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def spaced(count: int, most: int) -> list[int]:
    """At most ``most`` indices of ``count``, evenly spaced, the first and the last among them."""
    if most <= 0 or count <= 0:
        return []
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def scattered(points: Sequence[tuple[float | None, float | None, object]], most: int) -> list[int]:
    """At most ``most`` indices of marks at x and y of a kind, so that the cloud looks as if all were drawn.

    Of the marks of one kind that would lie on each other, the first stands for all: whatever lies apart is kept. Where
    there are too many, marks without a place (a value that is not finite) are left out.
    """
    if len(points) <= most:
        return list(range(len(points)))
    places = [
        (i, x, y, kind)
        for i, (x, y, kind) in enumerate(points)
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)
    ]
    if most <= 0:
        return []
    if len(places) <= most:
        return [place[0] for place in places]
    x_of = _unit([place[1] for place in places])
    y_of = _unit([place[2] for place in places])
    spots = [(i, x_of(x), y_of(y), kind) for i, x, y, kind in places]
    cells = 3.0 * math.sqrt(most)
    while cells > 1:
        across, high = 1.5 * cells, cells  # figures are wider than high
        first: dict[tuple[int, int, object], int] = {}
        for i, x, y, kind in spots:
            first.setdefault((int(x * across), int(y * high), kind), i)
        if len(first) <= most:
            return sorted(first.values())
        cells *= 0.85
    return [places[i][0] for i in spaced(len(places), most)]  # more kinds than marks


def _unit(values: list[float]) -> Callable[[float], float]:
    """From a value to 0..1, on the scale that its axis will have."""
    low, high = min(values), max(values)
    if wide(values):
        low, high = math.log(low), math.log(high)
        return lambda value: (math.log(value) - low) / (high - low)
    span = high - low
    return (lambda value: (value - low) / span) if 0 < span < math.inf else (lambda value: 0.0)


def wide(values: Sequence[float]) -> bool:
    """Whether an axis of these values is logarithmic: positive, over more than two decades."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """At most ``most`` indices of a curve: of each bucket its least and its greatest value, and both ends.

    So that no peak of a curve gets lost, however many points stand for it.
    """
    count = len(values)
    if count <= max(most, 2):
        return list(range(count))
    buckets = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for bucket in range(buckets):
        begin = 1 + bucket * (count - 2) // buckets
        end = 1 + (bucket + 1) * (count - 2) // buckets
        low, high = -1, -1
        least, greatest = math.inf, -math.inf
        for i in range(begin, end):
            value = values[i]
            if value is None:
                continue
            if low < 0 or value < least:
                low, least = i, value
            if high < 0 or value > greatest:
                high, greatest = i, value
        if low >= 0:
            kept |= {low, high}
    return sorted(kept)
