"""Pareto sets: what no other point beats in everything (all objectives minimised)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core import Values


def dominates(a: Values, b: Values) -> bool:
    """Whether ``a`` is at least as good as ``b`` everywhere and better somewhere."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def front(values: Sequence[Values]) -> list[int]:
    """Indices of the points that no other point dominates, in the given order."""
    if not values:
        return []
    if len(values[0]) == 1:
        best = min(values)
        return [i for i, value in enumerate(values) if value == best]
    # Only what sorts before a point can dominate it, and a dominated point is dominated by a front member.
    members: list[int] = []
    for i in sorted(range(len(values)), key=values.__getitem__):
        if not any(dominates(values[j], values[i]) for j in members):
            members.append(i)
    return sorted(members)


def order(values: Sequence[Values]) -> list[int]:
    """Indices from best to worst: by front, within a front the less crowded first (NSGA-II), equals as given."""
    left = list(range(len(values)))
    ranked: list[int] = []
    while left:
        chosen = {left[k] for k in front([values[i] for i in left])}
        members = [i for i in left if i in chosen]
        crowding = _crowding([values[i] for i in members])
        ranked += [i for _, i in sorted(zip(crowding, members, strict=True), key=lambda p: (-p[0], p[1]))]
        left = [i for i in left if i not in chosen]
    return ranked


def _crowding(values: Sequence[Values]) -> list[float]:
    distance = [0.0] * len(values)
    for k in range(len(values[0])):
        by = sorted(range(len(values)), key=lambda i: values[i][k])
        span = values[by[-1]][k] - values[by[0]][k]
        if span > 0:  # else there are no ends
            distance[by[0]] = distance[by[-1]] = math.inf
            for before, i, after in zip(by, by[1:], by[2:], strict=False):
                distance[i] += (values[after][k] - values[before][k]) / span
    # Which of equal points is at an end is chance: the first of them is the least crowded.
    equal: dict[Values, list[int]] = {}
    for i, value in enumerate(values):
        equal.setdefault(value, []).append(i)
    for group in equal.values():
        if len(group) > 1:
            apart = sorted((distance[i] for i in group), reverse=True)
            for i, found in zip(group, apart, strict=True):
                distance[i] = found
    return distance
