"""Rows: trials in a row on the same devices, filled so that all rows end together and nobody has to change."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from penstock.predict import Overhead

_HALVINGS = 7  # of the interval in which the earliest end is looked for
_REACH = (1.25, 1.6)  # times the least end: with later ones a row of trials is no good plan


def row_widths(
    waiting_s: Sequence[float],
    running: Sequence[tuple[float, float]],
    *,
    free: int,
    devices: int,
    overhead: Overhead,
) -> list[int]:
    """On how many devices each waiting trial begins now; 0: it follows another one in its row.

    A row of w devices takes so much work by a time T as a trial on w devices would do till then. Trials are packed
    into rows like goods into bins of several sizes: the longest first, into the busy row that it fills best, or
    with others into a new row of the width that wastes least. The least T at which all fit is looked for.

    Args:
        waiting_s: What each waiting trial takes alone on one device.
        running: Speed and work left of what runs.
        free: Idle devices.
        devices: All devices.
        overhead: The runtime model.

    Returns:
        Widths, in the order of ``waiting_s``. Empty: they don't fit well.
    """
    widest = min(free, overhead.max_devices)
    speeds = [(width, overhead.speed(float(width))) for width in range(1, widest + 1)]
    order = sorted(range(len(waiting_s)), key=waiting_s.__getitem__)
    ordered = [waiting_s[index] for index in order]
    work_s = math.fsum(ordered) + math.fsum([left_s for _, left_s in running])
    low = max([work_s / devices, *(left_s / speed for speed, left_s in running)])
    begins: dict[int, int] | None = None
    high = low
    for factor in _REACH:
        high = factor * low
        begins = _fill(ordered, running, speeds, free, high)
        if begins is not None:
            break
    if begins is None:
        return []
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _fill(ordered, running, speeds, free, middle)
        if found is None:
            low = middle
        else:
            begins, high = found, middle
    widths = [0] * len(order)
    for place, width in begins.items():
        widths[order[place]] = width
    return widths


def _fill(
    ordered: Sequence[float],
    running: Sequence[tuple[float, float]],
    speeds: Sequence[tuple[int, float]],
    free: int,
    end_s: float,
) -> dict[int, int] | None:
    """Who begins on how many devices so that all have ended by then; None: not found."""
    left = list(ordered)
    places = list(range(len(left)))
    room = sorted([speed * end_s - left_s for speed, left_s in running])
    begins: dict[int, int] = {}
    while left:
        at = bisect_left(room, left[-1] * (1 - 1e-9))
        if at < len(room):
            rest = room.pop(at) - left.pop()
            places.pop()
            if rest > 0:
                insort(room, rest)
            continue
        best_waste, best_width, best_row = math.inf, 0, []
        for width, speed in speeds:
            if width > free or speed * end_s < left[-1] * (1 - 1e-9):
                continue
            for halves in (False, True):
                row = _row(left, speed * end_s * (1 + 1e-9), halves)
                work_s = math.fsum([left[i] for i in row])
                waste = width * end_s / work_s if work_s > 0 else float(width)
                if waste < best_waste:
                    best_waste, best_width, best_row = waste, width, row
        if not best_row:
            return None
        free -= best_width
        begins[places[best_row[0]]] = best_width
        for i in sorted(best_row, reverse=True):
            del left[i], places[i]
    return begins


def _row(left: Sequence[float], room: float, halves: bool) -> list[int]:
    """The longest and what fills the rest of its row: always the longest that fits, or first one half as long."""
    row = [len(left) - 1]
    room -= left[-1]
    limit = room / 2 if halves else room
    while (at := bisect_right(left, limit, 0, row[-1]) - 1) >= 0:
        row.append(at)
        room -= left[at]
        limit = room
    return row
