"""How many placements a worker may have queued, from how long the last ones took."""

from __future__ import annotations

from typing import final

MAX_BACKLOG = 192


@final
class Pace:
    """Follows the time segments take: up at once, down slowly, so that nothing queues behind a long one."""

    def __init__(self) -> None:
        self._estimate_s: float | None = None
        self._mean_s = 0.0

    def learn(self, taken_s: float) -> None:
        """A segment took so long."""
        old = self._estimate_s
        self._mean_s = taken_s if old is None else 0.8 * self._mean_s + 0.2 * taken_s
        self._estimate_s = taken_s if old is None else max(taken_s, 0.9 * old + 0.1 * taken_s)

    @property
    def depth(self) -> int:
        """How many placements to queue behind a running one."""
        taken_s = self._estimate_s
        if taken_s is None:
            return 0
        if taken_s > 0.05:
            # Long ones among short ones (rungs, say): a few ahead, so that no worker waits for the journal; if a long
            # one comes to stand before them, an idle worker takes them over.
            return 0 if self._mean_s > 0.1 else 1 if self._mean_s > 0.025 else 2
        if taken_s > 0.005:
            return max(1, min(4, int(0.05 / taken_s)))
        return min(MAX_BACKLOG, max(4, int(0.05 / max(taken_s, 1e-5))))
