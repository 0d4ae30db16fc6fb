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
_OWN_ERROR = 0.05  # epochs of one trial differ by so little, as long as nobody knows better
_SEEN = 3  # from so many epochs on their own spread tells,
_LEAST_ERROR = 0.005  # but nothing is known better than that
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
        self._sums: dict[int, tuple[float, float, int]] = {}  # seconds, their squares' sum, epochs
        self._configs: dict[int, Config] = {}
        self._recent: list[int] = []
        self._columns: dict[str, _Column] | None = None  # of the recent ones' configurations

    def observe(self, trial: int, config: Config, train_s: float, *, speed: float = 1.0) -> None:
        """An epoch took ``train_s`` at ``speed`` (1: alone on one device; see ``Overhead.speed``)."""
        if not (math.isfinite(train_s) and train_s >= 0 and speed > 0):
            raise InvalidInput(f"An epoch of {train_s!r} s at speed {speed!r} is not a measurement.")
        total_s, squares, epochs = self._sums.get(trial, (0.0, 0.0, 0))
        if not epochs:
            self._recent.append(trial)
            del self._recent[:-_KEPT]
            self._columns = None
        alone_s = train_s * speed
        self._sums[trial] = total_s + alone_s, squares + alone_s * alone_s, epochs + 1
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

    def error(self, trial: int, config: Config, epochs: float = 1.0) -> float:
        """How far off ``epoch_s`` may be of so many further epochs together, relative.

        Little for a trial that has run: as its own epochs differ, once three were seen. Else as its likes differ.
        """
        if trial in self._sums:
            return self._own_error(trial, epochs)
        logs = [math.log(seconds) for _, seconds in self._near(config) if seconds > 0]
        if len(logs) < 2:
            return 1.0
        return max(_OWN_ERROR, min(1.0, 2 * stdev(logs)))  # of so few, the spread itself is little known

    def _near(self, config: Config) -> list[tuple[float, float]]:
        """The most alike trials' weights and seconds; all of them as long as there are few."""
        if len(self._recent) < _ENOUGH:
            return [(1.0, self._mean_s(other)) for other in self._recent]
        if self._columns is None:
            names = dict.fromkeys(name for other in self._recent for name in self._configs[other])
            self._columns = {
                name: _Column([self._configs[other].get(name, _MISSING) for other in self._recent])
                for name in names
            }
        near = sorted(zip(_distances(config, self._columns, len(self._recent)), self._recent, strict=True))
        return [(1 / (distance + 0.05), self._mean_s(other)) for distance, other in near[:_NEAREST]]

    def _mean_s(self, trial: int) -> float:
        total_s, _, epochs = self._sums[trial]
        return total_s / epochs

    def _own_error(self, trial: int, epochs: float) -> float:
        total_s, squares, seen = self._sums[trial]
        if seen < _SEEN or total_s <= 0:
            return _OWN_ERROR
        mean_s = total_s / seen
        spread = math.sqrt(max(0.0, squares / seen - mean_s * mean_s) * seen / (seen - 1)) / mean_s
        # Of the mean so far and of the mean to come; of few epochs, the spread itself is little known.
        unsure = 1 + 2 / (seen - 1)
        return min(1.0, max(_LEAST_ERROR, unsure * spread * math.sqrt(1 / seen + 1 / max(1.0, epochs))))


@final
class _Column:
    """What the trials compared with have of one hyperparameter: a planner asks often, so it is made ready once."""

    __slots__ = ("high", "logs", "low", "numeric", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        numbers = [float(value) for value in values if _is_number(value)]
        self.numeric = len(numbers) == len(values)
        self.low, self.high = min(numbers, default=math.inf), max(numbers, default=-math.inf)
        self.logs = [math.log(value) for value in numbers] if self.numeric and self.low > 0 else []

    def apart(self, value: Any) -> list[float]:
        """How far ``value`` is from each, in [0, 1]."""
        if not _is_number(value):
            return [float(other is _MISSING or value != other) for other in self.values]
        low, high = min(self.low, value), max(self.high, value)
        span = high - low
        if low > 0 and high > 100 * low:  # over such a range logarithms are compared
            span, here = math.log(high / low), math.log(value)
            if self.logs:
                return [min(1.0, abs(here - other) / span) for other in self.logs]
            return [min(1.0, abs(here - math.log(v)) / span) if _is_number(v) else 1.0 for v in self.values]
        if span <= 0:
            return [0.0 if _is_number(other) else 1.0 for other in self.values]
        if self.numeric:
            return [min(1.0, abs(value - other) / span) for other in self.values]
        return [min(1.0, abs(value - v) / span) if _is_number(v) else 1.0 for v in self.values]


_MISSING: Any = object()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _distances(config: Config, columns: Mapping[str, _Column], count: int) -> list[float]:
    """Gower's distance in [0, 1] to each: the mean over all names of either of how far apart the values are."""
    totals, names = [0.0] * count, [len(config)] * count
    for name, column in columns.items():
        if name in config:
            totals = [total + apart for total, apart in zip(totals, column.apart(config[name]), strict=True)]
        else:
            for index, value in enumerate(column.values):
                if value is not _MISSING:
                    totals[index] += 1
                    names[index] += 1
    alone = sum(name not in columns for name in config)
    return [(total + alone) / many if many else 0.0 for total, many in zip(totals, names, strict=True)]
