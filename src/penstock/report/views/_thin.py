"""Thinning long series to what a screen shows, keeping their extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def spaced(count: int, most: int) -> list[int]:
    """At most ``most`` indices of ``count``, evenly spaced, the first and the last among them."""
    if most <= 0 or count <= 0:
        return []
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


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
