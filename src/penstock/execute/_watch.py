"""What both executors with workers go by while they wait: for how long, and when they give up on starting workers."""

from __future__ import annotations

import math
from typing import final

TICK_S = 1.0
"""How often they look after what tells nothing of itself."""

_TRIES = 3


def patience_s(left_s: float | None, timeout_s: float | None) -> float:
    """How long to wait for news at most.

    Args:
        left_s: Of the time the study gives; None: for ever.
        timeout_s: After which a silent training is killed; None: never.
    """
    wait_s = TICK_S if left_s is None else max(0.0, min(TICK_S, left_s))
    return wait_s if timeout_s is None else min(wait_s, max(0.01, timeout_s / 10))


@final
class Starts:
    """Whether workers can be started at all: some in a row that can't are enough, or one that says why.

    Those that were being started when one failed count as that one: a node that leaves takes all of its own along.
    """

    def __init__(self) -> None:
        self._failed = 0
        self._failed_s = -math.inf

    def worked(self) -> None:
        """A worker has come up."""
        self._failed = 0

    def failed(self, *, sure: bool, born_s: float = math.inf, now_s: float = -math.inf) -> bool:
        """One has not; whether to give up.

        Args:
            sure: It has said why, so that another would not come up either.
            born_s: When its start began; by default it counts, whatever happened to others meanwhile.
            now_s: The time.
        """
        if born_s >= self._failed_s:
            self._failed += 1
            self._failed_s = now_s
        return sure or self._failed >= _TRIES

    @staticmethod
    def excused(tries: int) -> bool:
        """Whether a segment may be handed to yet another worker, after so many were lost before they had begun it."""
        return tries < _TRIES
