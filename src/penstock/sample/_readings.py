"""Readings: what a structure was measured to need before anything of it was trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeAlias, final

Key: TypeAlias = tuple[float, ...]
"""A structure, by the features that predictions look at."""


@final
class Readings:
    """Readings of one quantity, by structure.

    Sensors scatter by per cents, so everything is of logarithms. The scatter is taken to be the same for all: what
    repeated readings of each differ by is pooled, with that of a profile's repeats ("pure error").

    Args:
        squares: Of a profile's repeats, the sum of the squared deviations of their logarithms.
        freedom: Their degrees of freedom.
    """

    def __init__(self, squares: float = 0.0, freedom: int = 0) -> None:
        self._squares, self._freedom = squares, freedom
        self._logs: dict[Key, list[float]] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, key: Key) -> bool:
        return key in self._logs

    def add(self, key: Key, values: Sequence[float]) -> None:
        """Keep readings of a structure; what is no number above 0 is none."""
        fresh = [math.log(value) for value in values if math.isfinite(value) and value > 0]
        if fresh:
            logs = self._logs.setdefault(key, [])
            before = _squares(logs)
            self._freedom += len(fresh) - (not logs)
            logs += fresh
            self._squares += max(_squares(logs) - before, 0.0)

    def mean(self, key: Key) -> float:
        """Of a structure that was measured."""
        logs = self._logs[key]
        return math.exp(math.fsum(logs) / len(logs))

    def error(self, key: Key) -> float:
        """The relative standard error of that mean; infinite while the scatter is not known."""
        return self.scatter / math.sqrt(len(self._logs[key])) if self._freedom else math.inf

    @property
    def scatter(self) -> float:
        """The relative standard deviation of a reading; 0: not known."""
        return math.sqrt(self._squares / self._freedom) if self._freedom else 0.0

    def widened(self, confidence: float) -> float:
        """By how much a margin of normal deviations is to be wider, since the scatter is estimated (Student's t)."""
        from scipy.special import stdtrit

        normal = NormalDist().inv_cdf(confidence)
        if not self._freedom or abs(normal) < 1e-9:
            return 1.0
        return float(stdtrit(self._freedom, confidence)) / normal


def _squares(logs: Sequence[float]) -> float:
    if len(logs) < 2:
        return 0.0
    middle = math.fsum(logs) / len(logs)
    return math.fsum((log - middle) ** 2 for log in logs)
