"""How long an epoch of a trial takes, learned while the study runs: from the trial itself, or from ones like it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median, stdev
from typing import Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput

_KEPT = 64  # trials compared with; a prediction costs the same however long the study is
_NEAREST = 5
_OWN_ERROR = 0.05  # epochs of one trial differ by so little
_ENOUGH = 8  # below so many trials, likeness says nothing


@final
class EpochTimes:
    """Seconds per epoch alone on one device, by trial.

    A trial that has run is predicted by its own mean. Another one by the geometric mean of the five trials whose
    configurations are nearest to its own (Gower's distance over numbers and choices), weighted by nearness, once
    eight trials are known; before that by the median of the study. With nothing known the answer is None, and a
    planner takes all for equal. Fed by the study from its journal's reports, so a resume learns the same.
    Belongs to one study; not shared between threads.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}
        self._configs: dict[int, Config] = {}
        self._recent: list[int] = []

    def observe(self, trial: int, config: Config, train_s: float, *, speed: float = 1.0) -> None:
        """An epoch took ``train_s`` at ``speed`` (1: alone on one device; see ``Overhead.speed``)."""
        if not (math.isfinite(train_s) and train_s >= 0 and speed > 0):
            raise InvalidInput(f"An epoch of {train_s!r} s at speed {speed!r} is not a measurement.")
        total_s, epochs = self._sums.get(trial, (0.0, 0))
        if not epochs:
            self._recent.append(trial)
            del self._recent[:-_KEPT]
        self._sums[trial] = total_s + train_s * speed, epochs + 1
        self._configs[trial] = config

    def knows(self, trial: int) -> bool:
        """Whether the trial itself has been timed."""
        return trial in self._sums

    def epoch_s(self, trial: int, config: Config) -> float | None:
        """The expected seconds of an epoch alone on one device; None: nothing is known yet."""
        if trial in self._sums:
            return self._mean_s(trial)
        near = self._near(config)
        if any(seconds <= 0 for _, seconds in near):
            return median(seconds for _, seconds in near)
        whole = sum(weight for weight, _ in near)
        if not whole:
            return None
        if len(self._recent) < _ENOUGH:
            return median(seconds for _, seconds in near)
        return math.exp(sum(weight * math.log(seconds) for weight, seconds in near) / whole)

    def error(self, trial: int, config: Config) -> float:
        """How far off ``epoch_s`` may be, relative: little for a trial that has run, else as its likes differ."""
        if trial in self._sums:
            return _OWN_ERROR
        logs = [math.log(seconds) for _, seconds in self._near(config) if seconds > 0]
        if len(logs) < 2:
            return 1.0
        return max(_OWN_ERROR, min(1.0, 2 * stdev(logs)))  # of so few, the spread itself is little known

    def _near(self, config: Config) -> list[tuple[float, float]]:
        """The most alike trials' weights and seconds; all of them as long as there are few."""
        if len(self._recent) < _ENOUGH:
            return [(1.0, self._mean_s(other)) for other in self._recent]
        spans = self._spans(config)
        near = sorted((_distance(config, self._configs[other], spans), other) for other in self._recent)
        return [(1 / (distance + 0.05), self._mean_s(other)) for distance, other in near[:_NEAREST]]

    def _mean_s(self, trial: int) -> float:
        total_s, epochs = self._sums[trial]
        return total_s / epochs

    def _spans(self, config: Config) -> dict[str, tuple[float, bool]]:
        """Per number, the range of what was seen, and whether to compare logarithms (it spans more than 100x)."""
        spans = {}
        for name, value in config.items():
            if not _is_number(value):
                continue
            seen = [float(value)]
            for other in self._recent:
                if _is_number(found := self._configs[other].get(name)):
                    seen.append(float(found or 0))
            low, high = min(seen), max(seen)
            logs = low > 0 and high > 100 * low
            spans[name] = (math.log(high / low) if logs else high - low, logs)
        return spans


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _distance(one: Config, other: Config, spans: Mapping[str, tuple[float, bool]]) -> float:
    """Gower's distance in [0, 1]: the mean over all names of how far apart the values are."""
    names = one.keys() | other.keys()
    if not names:
        return 0.0
    total = 0.0
    for name in names:
        if name not in one or name not in other:
            total += 1
            continue
        left, right = one[name], other[name]
        span, logs = spans.get(name, (0.0, False))
        if name not in spans or not _is_number(right):
            total += left != right
        elif span > 0:
            apart = abs(math.log(left / right)) if logs else abs(left - right)
            total += min(1.0, apart / span)
    return total / len(names)
