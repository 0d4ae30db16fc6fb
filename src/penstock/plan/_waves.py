"""Three waves: trials that are all alike begin wide, and go on narrow in two shifts beside those that begin then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

from penstock.core import Turn
from penstock.plan._board import EPSILON
from penstock.predict import Overhead

ALIKE = 0.98  # trials whose lengths are that near are taken for equal
_WIDEST = 8  # devices of one trial, and
_EPOCHS = 32  # epochs after which the first make room, that are tried; more where that was best
_ODD = 2  # so many may go their own way, on devices that whole numbers leave idle


@final
@dataclass(frozen=True, slots=True)
class _Way:
    """Who does what: ``early`` begin on ``wide`` devices each, for ``epochs``, all others but the odd ones then on
    ``then`` each; ``shift`` of the early go on at once with ``kept``, the rest of them after those, on ``last``."""

    early: int
    wide: int
    epochs: int
    then: int
    shift: int
    kept: float
    last: float
    breaks_s: tuple[float, float, float, float]  # when waves begin, and the end
    odd: int = 0
    stays: tuple[tuple[int, int, int], ...] = ()  # of an odd one: the wave it begins in, how wide, its epochs


def three_waves(
    work_s: Sequence[float], epochs: Sequence[int], *, devices: int, overhead: Overhead, within_s: float
) -> tuple[float, list[Turn]]:
    """The earliest end found for equal trials in three waves, and who begins in which order.

    A few begin on many devices each. After some of their epochs all of them make room for the others, which run to the
    end as they are. Of the few some narrow, and the rest of them pause: they go on when the former have ended, on the
    same devices. So two of them need as many devices beside the others as one who would take all the time, and the
    others can be more than with two waves. Linear programs over all widths, epochs of change and pauses led here: what
    they find for equal trials where packing never pays (81 of them on 128 devices) has this form, but for a trial or
    two, which go their own way on devices that whole numbers leave idle.

    Args:
        work_s: What each takes alone on one device; nothing is found if they differ.
        epochs: How many each has, at whose ends it may narrow or pause.
        devices: All of them, idle.
        overhead: The runtime model. Whoever changes or goes on after a pause takes ``epsilon_s`` longer.
        within_s: No end as late as this is looked for.

    Returns:
        The end, infinite if none was found; and the turns in the order in which they begin, where trials are named by
        their index and ``start`` is counted from the group's.
    """
    trials, count = len(work_s), min(epochs, default=0)
    if trials < 2 or count < 2 or max(epochs) > count or min(work_s) < ALIKE * max(work_s):
        return math.inf, []
    epoch_s = max(work_s) / count
    widest = min(devices, overhead.max_devices, _WIDEST)
    took_s = {float(width): epoch_s / overhead.speed(float(width)) for width in range(1, widest + 1)}
    parts_s = {1 / p: epoch_s / overhead.speed(1 / p) for p in range(2, overhead.max_sharing + 1)}
    search = _Search(trials, devices, count, took_s, {**parts_s, **took_s}, overhead.epsilon_s, within_s)
    step = math.ceil((count - 1) / _EPOCHS)
    for wide in range(2, widest + 1):
        for number in range(1, count, step):
            search.look(wide, number)
    if step > 1 and search.best is not None:
        near = search.best
        for number in range(max(1, near.epochs - step + 1), min(count, near.epochs + step)):
            search.look(near.wide, number)
    return (math.inf, []) if search.best is None else (search.best_s, _turns(search.best, trials))


@final
class _Search:
    """The best way so far."""

    __slots__ = (
        "_count", "_devices", "_every_s", "_pause_s", "_shifts", "_took_s", "_trials", "best", "best_s",
    )  # fmt: skip

    def __init__(
        self,
        trials: int,
        devices: int,
        count: int,
        took_s: Mapping[float, float],
        every_s: Mapping[float, float],
        pause_s: float,
        within_s: float,
    ) -> None:
        self._trials, self._devices, self._count, self._pause_s = trials, devices, count, pause_s
        self._took_s, self._every_s = took_s, every_s  # an epoch, on whole devices, and on any width
        self._shifts = sorted(
            (every_s[kept] + every_s[last], kept, last) for kept in every_s for last in every_s
        )
        self.best: _Way | None = None
        self.best_s = within_s

    def look(self, wide: int, number: int) -> None:
        """See what follows if the early begin on so many devices each, and make room after so many epochs."""
        early = min(self._devices // wide, self._trials - 1)
        fewest = max(1, self._trials - early - _ODD)  # who begin in the second wave
        first_s, left = number * self._took_s[wide], self._count - number
        for then in range(1, min(len(self._took_s), (self._devices - 1) // fewest) + 1):
            then_s = first_s + self._count * self._took_s[then]
            if then_s >= self.best_s * (1 - EPSILON):
                continue
            room = self._devices - fewest * then + EPSILON
            for both_s, kept, last in self._shifts:
                end_s = first_s + 2 * self._pause_s + left * both_s
                if end_s >= self.best_s * (1 - EPSILON):
                    break
                if kept >= wide or room // kept + room // last < early:
                    continue
                second_s = first_s + self._pause_s + left * self._every_s[kept]
                breaks_s = (0.0, first_s, second_s, max(end_s, then_s))
                way = self._fitted(_Way(early, wide, number, then, 0, kept, last, breaks_s))
                if way is not None:
                    self.best_s, self.best = breaks_s[-1], way

    def _fitted(self, way: _Way) -> _Way | None:
        """The way with as many in the first shift and of the odd ones as all fit; None: they don't."""
        early, kept, last = way.early, way.kept, way.last
        for odd in range(min(_ODD, self._trials - early - 1) + 1):
            room = self._devices - (self._trials - early - odd) * way.then
            if room <= 0:
                continue
            most, others = math.floor(room / kept + EPSILON), math.floor(room / last + EPSILON)
            for shift in range(max(0, early - others), min(most, early) + 1):
                if not odd:
                    return replace(way, shift=shift)
                idle = (
                    self._devices - early * way.wide,
                    room - math.ceil(shift * kept - EPSILON),
                    room - math.ceil((early - shift) * last - EPSILON),
                )
                shares = [each // odd for each in idle]
                stays = _stays(shares, way.breaks_s, self._count, self._took_s, self._pause_s)
                if stays:
                    return replace(way, shift=shift, odd=odd, stays=stays)
        return None


def _stays(
    idle: Sequence[int],
    breaks_s: Sequence[float],
    count: int,
    took_s: Mapping[float, float],
    pause_s: float,
) -> tuple[tuple[int, int, int], ...]:
    """How one trial gets through on what is idle in each wave; nothing if it doesn't."""
    stays: list[tuple[int, int, int]] = []
    done = wave = 0
    for width, waves in groupby(min(each, len(took_s)) for each in idle):
        begun, wave = wave, wave + len(list(waves))
        if width < 1:
            continue
        span_s = breaks_s[wave] - breaks_s[begun] - (pause_s if done else 0.0)
        number = min(math.floor(span_s / took_s[float(width)] + EPSILON), count - done)
        if number > 0:
            stays.append((begun, width, number))
            done += number
    return tuple(stays) if done == count else ()


def _turns(way: _Way, trials: int) -> list[Turn]:
    """In the order in which they begin."""
    begin: list[list[Turn]] = [[], [], []]
    for trial in range(way.early):
        stays = trial < way.shift
        begin[0].append(Turn(trial, way.wide, way.epochs, way.kept if stays else 0.0))
        if not stays:
            begin[2].append(Turn(trial, way.last, 0, way.last, way.epochs))
    for trial in range(way.early, trials - way.odd):
        begin[1].append(Turn(trial, way.then, 0, float(way.then)))
    for trial in range(trials - way.odd, trials):
        done = 0
        for wave, width, number in way.stays:
            ends = (wave, width, number) == way.stays[-1]
            begin[wave].append(Turn(trial, width, 0 if ends else number, float(width) if ends else 0.0, done))
            done += number
    return [turn for turns in begin for turn in turns]
