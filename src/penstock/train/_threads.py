"""How many threads the steps of a trial on several groups of CPU cores use: all it has, as long as that is quicker.

Threads wait for each other after every operation, so that beside another program that takes one of their cores they may
be many times slower than one of them alone. Now and then both are timed, and the quicker one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, final

_Item = TypeVar("_Item")

_STEPS = 3  # of a look, at least, the first of which does not count: caches fill, threads wake
_LOOK_S = 0.02  # and so long
_FIRST_S = 0.5  # before the first look
_PATIENCE = 40.0  # times as long as a look took the quicker one goes on
_WORSE = 1.15  # or until it has become so much slower than the other one was


@final
class Pace:
    """Chooses between two numbers of threads by how long steps take with each. Pure: the caller tells the times.

    STAY with all threads -> LOOK at the fewer -> STAY with the quicker -> LOOK at the other -> STAY ..., and from STAY
    at once to LOOK when steps become slower than the other one's were.

    Args:
        wide: The threads of all its cores.
        narrow: Those it would have on one group of them.
    """

    def __init__(self, wide: int, narrow: int) -> None:
        self._other = {wide: narrow, narrow: wide}
        self.threads = wide
        self._step_s: dict[int, float] = {}  # by threads, as last timed
        self._looking = False
        self._steps, self._taken_s = 0, 0.0  # of the present look, or the latest part of a stay
        self._first_s = 0.0
        self._stay_s = _FIRST_S  # that is left

    def tell(self, step_s: float) -> None:
        """A step took so long with ``threads``."""
        self._steps += 1
        self._taken_s += step_s
        self._stay_s -= step_s
        if self._steps == 1:
            self._first_s = step_s
        if self._steps < _STEPS or self._taken_s < _LOOK_S:
            return
        counted = self._steps - self._looking
        mine_s = self._step_s[self.threads] = (self._taken_s - self._looking * self._first_s) / counted
        taken_s, self._steps, self._taken_s = self._taken_s, 0, 0.0
        other = self._other[self.threads]
        if self._looking:
            self._looking = False
            self._stay_s = _PATIENCE * taken_s
            if self._step_s[other] < mine_s:
                self.threads = other
        elif self._stay_s <= 0 or (other in self._step_s and mine_s > _WORSE * self._step_s[other]):
            self.threads, self._looking = other, True


def paced(
    items: Iterable[_Item],
    pace: Pace,
    use: Callable[[int], Any],
    now_s: Callable[[], float] = time.perf_counter,
) -> Iterator[_Item]:
    """The items, each with the threads that ``pace`` chooses; what the caller does with one is a step."""
    threads = pace.threads
    use(threads)
    for item in items:
        began_s = now_s()
        yield item
        pace.tell(now_s() - began_s)
        if pace.threads != threads:
            threads = pace.threads
            use(threads)
