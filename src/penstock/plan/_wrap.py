"""Wrap: trials that find no whole place on a device pause at the end of an epoch and go on elsewhere (McNaughton)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from penstock.core import Turn
from penstock.plan._board import EPSILON
from penstock.predict import Overhead

_CLOSER = 0.002  # an end that is so near to the best possible is not looked for any closer
_TRIES = 12  # and at most so many ends are looked for in one row of places


def wrap(
    work_s: Sequence[float], epochs: Sequence[int], *, devices: int, overhead: Overhead, within_s: float
) -> tuple[float, list[Turn]]:
    """The earliest end found for trials that may pause once, and who begins in which order.

    Devices are made into places of one width, or two neighbouring ones. The places are filled one after the other up to
    the same end. A trial that is too long for what is left of a place has its last epochs there, and its first ones at
    the beginning of the next place (McNaughton 1959). So who pauses has been waiting for long when its second turn
    comes, and nobody depends on when exactly it paused.

    Args:
        work_s: What each takes alone on one device.
        epochs: How many each has, at whose ends it may pause; 0: not known, it never does.
        devices: All of them, idle.
        overhead: The runtime model. Whoever goes on after a pause takes ``epsilon_s`` longer.
        within_s: No end as late as this is looked for.

    Returns:
        The end, infinite if none was found; and the turns in the order in which they begin, where trials are named by
        their index and ``start`` is counted from the group's.
    """
    order = sorted(range(len(work_s)), key=lambda index: -work_s[index])
    best_s, best = within_s, None
    total_s = sum(work_s)
    rows = sorted(
        (total_s / sum(overhead.speed(width) for width in places), -len(places), places)
        for places in _places(devices, len(work_s), overhead)
    )
    for least_s, _, places in rows:
        low_s = max(least_s, max(work_s, default=0.0) / max(overhead.speed(width) for width in places))
        if low_s >= best_s * (1 - _CLOSER):
            continue
        # At first only a little sooner than what there is: most rows of places fail at once.
        end_s = best_s * (1 - _CLOSER)
        for _ in range(_TRIES):
            found = _Filling(work_s, epochs, places, overhead, end_s).fill(order)
            if found is not None:
                best_s, best = found
            elif end_s >= best_s * (1 - _CLOSER) - EPSILON:
                break
            else:
                low_s = end_s
            if best_s - low_s <= _CLOSER * best_s:
                break
            end_s = (low_s + best_s) / 2
    return (math.inf, []) if best is None else (best_s, best)


def _places(devices: int, trials: int, overhead: Overhead) -> list[tuple[float, ...]]:
    """Ways to make places of devices: parts of them, or so many as whole devices allow, the widest first."""
    found = [(1 / parts,) * (parts * devices) for parts in range(2, overhead.max_sharing + 1)]
    fewest = math.ceil(devices / overhead.max_devices)
    for count in range(max(1, fewest), min(devices, max(trials, fewest)) + 1):
        width, more = divmod(devices, count)
        found.append((float(width + 1),) * more + (float(width),) * (count - more))
    return found


@final
class _Filling:
    """Places that are filled one after the other up to an end."""

    __slots__ = (
        "_begun",
        "_end_s",
        "_epochs",
        "_latest_s",
        "_overhead",
        "_place",
        "_places",
        "_used_s",
        "_work_s",
    )

    def __init__(
        self,
        work_s: Sequence[float],
        epochs: Sequence[int],
        places: tuple[float, ...],
        overhead: Overhead,
        end_s: float,
    ) -> None:
        self._work_s, self._epochs = work_s, epochs
        self._places = places
        self._overhead = overhead
        self._end_s = end_s
        self._place = 0
        self._used_s = 0.0  # of the present place
        self._latest_s = 0.0  # when the last one so far ends
        self._begun: list[tuple[float, int, Turn]] = []

    def fill(self, order: Sequence[int]) -> tuple[float, list[Turn]] | None:
        """When all have ended, and who begins in which order; None: some don't fit."""
        for index in order:
            if not self._fits(index) and not self._cut(index):
                self._place += 1
                self._used_s = 0.0
                if self._place == len(self._places) or not self._fits(index):
                    return None
        turns = sorted(self._begun, key=lambda each: each[:2])
        return self._latest_s, [turn for _, _, turn in turns]

    def _fits(self, index: int) -> bool:
        """It has the place for all its epochs."""
        width = self._places[self._place]
        took_s = self._work_s[index] / self._overhead.speed(width)
        if self._used_s + took_s > self._end_s + EPSILON:
            return False
        self._begin(self._used_s, took_s, Turn(index, width, 0, width))
        self._used_s += took_s
        return True

    def _cut(self, index: int) -> bool:
        """It has its last epochs here, and its first ones on the next place, before that."""
        count, pause_s = self._epochs[index], self._overhead.epsilon_s
        if count < 2 or self._place + 1 == len(self._places):
            return False
        width, other = self._places[self._place], self._places[self._place + 1]
        epoch_s = self._work_s[index] / count
        here_s, there_s = epoch_s / self._overhead.speed(width), epoch_s / self._overhead.speed(other)
        room_s = self._end_s - self._used_s - pause_s
        later = min(count - 1, math.floor(room_s / here_s + EPSILON)) if here_s > 0 else 0
        first = count - later
        if later < 1 or first * there_s > self._used_s + EPSILON:
            return False
        self._begin(self._used_s, pause_s + later * here_s, Turn(index, width, 0, width, first))
        self._begin(0.0, first * there_s, Turn(index, other, first, 0.0))
        self._place += 1
        self._used_s = first * there_s
        return True

    def _begin(self, begin_s: float, took_s: float, turn: Turn) -> None:
        self._begun.append((begin_s, len(self._begun), turn))
        self._latest_s = max(self._latest_s, begin_s + took_s)
