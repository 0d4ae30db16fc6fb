"""Rules that stop a trial by its own reports: the contract, a plateau, and the median rule."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Mapping
from typing import final

from penstock.core.errors import InvalidInput
from penstock.schedule._check import fraction, whole


class StopRule(ABC):
    """Says when a trial should stop, from what it and the others reported.

    Called by the study alone, from one thread, with every report in the order it is journalled. Pure: no I/O,
    no clock, the same calls give the same answers, for a resume replays them. A rule object belongs to one
    study at a time; ``start`` resets it.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin a study: forget everything."""

    @abstractmethod
    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report; returns why the trial should stop, in one line for people, or None.

        A report of an epoch that is already known (a retry from an older checkpoint) changes nothing, and one
        without the rule's metric neither.
        """

    def toward(self, directions: Mapping[str, str]) -> StopRule:
        """The rule for a study whose objectives have these directions, "min" or "max" by metric.

        Raises:
            InvalidInput: The rule wants the opposite of the study.
        """
        return self

    @property
    def unheard(self) -> str | None:
        """A metric that the rule needs and that no report has had since ``start``; None: there is none."""
        return None

    def to_json(self) -> dict[str, object]:
        """Name and parameters, for the journal."""
        return {"name": type(self).__name__}


class _Watch(StopRule):
    """What rules that watch one metric have in common: which one, and in which direction it is better."""

    _aims = False  # of a rule from an older store, which goes on as it began: its mode may be a default
    _heard = False

    def __init__(self, metric: object, mode: object) -> None:
        if not isinstance(metric, str) or not metric:
            raise InvalidInput(
                f'{type(self).__name__} watches a metric that trials report, got {metric!r}: give its name, "loss".'
            )
        if mode not in (None, "min", "max"):
            raise InvalidInput(
                f'mode is {mode!r}; give "min" or "max", or leave it out: as the study has it.'
            )
        self.metric = metric
        self.mode = None if mode is None else str(mode)
        self._sign = -1.0 if mode == "max" else 1.0  # turns the metric so that lower is better
        self._aims = True
        self._heard = False

    @final
    def toward(self, directions: Mapping[str, str]) -> StopRule:
        """The rule in the study's direction, if the metric is one of its objectives."""
        wanted = directions.get(self.metric)
        if not self._aims or wanted is None or self.mode == wanted:
            return self
        if self.mode is not None:
            verb = "maximises" if wanted == "max" else "minimises"
            raise InvalidInput(
                f"{type(self).__name__} takes a {'lower' if wanted == 'max' else 'higher'} {self.metric} for better "
                f'(mode="{self.mode}"), but the study {verb} it. Leave mode out, or give mode="{wanted}".'
            )
        other = copy.copy(self)
        other.mode, other._sign = wanted, -1.0 if wanted == "max" else 1.0
        other.start()
        return other

    @property
    @final
    def unheard(self) -> str | None:
        """The metric, until a report has it."""
        return None if self._heard else self.metric


@final
class Plateau(_Watch):
    """Stops a trial that has not improved for some epochs. What is infinitely bad or not a number is no improvement.

    Args:
        metric: The metric to watch.
        mode: "min" if lower is better, "max" if higher is; default: as the study has it where the metric is one of its
            objectives, else "min".
        patience: Epochs without improvement after which it stops.
        min_delta: An improvement is more than this.
    """

    def __init__(
        self, metric: str, mode: str | None = None, patience: int = 5, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode)
        self.patience = whole("patience", patience)
        self.min_delta = fraction("min_delta", min_delta, 0.0, float("inf"))
        self._best: dict[int, tuple[float, int, int]] = {}  # best value, its epoch, latest epoch

    def start(self) -> None:
        """Begin a study."""
        self._best = {}
        self._heard = False

    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report."""
        reported = metrics.get(self.metric)
        self._heard = self._heard or reported is not None
        if reported is None:
            return None
        value = (
            self._sign * reported if reported == reported else float("inf")
        )  # not a number: no improvement
        known = self._best.get(trial)
        best, best_epoch, latest = known or (float("inf"), 0, 0)
        if epoch <= latest:
            return None
        if known is None or value < best - self.min_delta:
            self._best[trial] = value, epoch, epoch
            return None
        self._best[trial] = best, best_epoch, epoch
        if epoch - best_epoch < self.patience:
            return None
        return f"{self.metric} has not improved on {self._sign * best:.6g} since epoch {best_epoch}"

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "Plateau",
            "metric": self.metric,
            "mode": self.mode,
            "patience": self.patience,
            "min_delta": self.min_delta,
        }


@final
class MedianStop(_Watch):
    """Stops a trial whose best value so far is worse than the median of the others' averages at its epoch.

    The rule of Google Vizier (Golovin et al. 2017): trial t stops at epoch e if its best value up to e is
    strictly worse than the median of the running averages over epochs 1 to e of the other trials. All trials
    that have come as far as e count, not only completed ones, so that it works from the first ones on. What is not a
    number is no best value and in no average.

    Args:
        metric: The metric to watch.
        mode: "min" if lower is better, "max" if higher is; default: as the study has it where the metric is one of its
            objectives, else "min".
        min_epochs: No trial stops before so many epochs.
        min_trials: No trial stops before so many others have come as far.
    """

    def __init__(
        self, metric: str, mode: str | None = None, min_epochs: int = 1, min_trials: int = 5
    ) -> None:
        super().__init__(metric, mode)
        self.min_epochs = whole("min_epochs", min_epochs)
        self.min_trials = whole("min_trials", min_trials)
        self._averages: dict[int, list[float]] = {}  # by epoch, sorted
        self._curves: dict[int, tuple[float, float, int, int]] = {}  # best, sum, count, latest epoch

    def start(self) -> None:
        """Begin a study."""
        self._averages = {}
        self._curves = {}
        self._heard = False

    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report."""
        reported = metrics.get(self.metric)
        self._heard = self._heard or reported is not None
        if reported is None:
            return None
        value = self._sign * reported
        best, total, count, latest = self._curves.get(trial, (float("inf"), 0.0, 0, 0))
        if epoch <= latest:
            return None
        if value == value:
            best, total, count = min(best, value), total + value, count + 1
        self._curves[trial] = best, total, count, epoch
        others = self._averages.setdefault(epoch, [])
        reason = None
        if epoch >= self.min_epochs and len(others) >= self.min_trials:
            median = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2
            if best > median:
                reason = (
                    f"best {self.metric} {self._sign * best:.6g} is worse than the median "
                    f"{self._sign * median:.6g} of {len(others)} trials at epoch {epoch}"
                )
        if value == value:
            insort(others, total / count)
        return reason

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "MedianStop",
            "metric": self.metric,
            "mode": self.mode,
            "min_epochs": self.min_epochs,
            "min_trials": self.min_trials,
        }
