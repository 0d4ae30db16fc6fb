"""Rules that stop a trial by its own reports: the contract, a plateau, and the median rule."""

from __future__ import annotations

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

    def to_json(self) -> dict[str, object]:
        """Name and parameters, for the journal."""
        return {"name": type(self).__name__}


def _sign(mode: str) -> float:
    """What turns a metric so that lower is better."""
    if mode not in ("min", "max"):
        raise InvalidInput(f'mode is {mode!r}; give "min" or "max".')
    return 1.0 if mode == "min" else -1.0


@final
class Plateau(StopRule):
    """Stops a trial that has not improved for some epochs.

    Args:
        metric: The metric to watch.
        mode: "min" if lower is better, "max" if higher is.
        patience: Epochs without improvement after which it stops.
        min_delta: An improvement is more than this.
    """

    def __init__(self, metric: str, mode: str = "min", patience: int = 5, min_delta: float = 0.0) -> None:
        self.metric = metric
        self.mode = mode
        self._sign = _sign(mode)
        self.patience = whole("patience", patience)
        self.min_delta = fraction("min_delta", min_delta, 0.0, float("inf"))
        self._best: dict[int, tuple[float, int, int]] = {}  # best value, its epoch, latest epoch

    def start(self) -> None:
        """Begin a study."""
        self._best = {}

    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report."""
        reported = metrics.get(self.metric)
        if reported is None or reported != reported:
            return None
        value = self._sign * reported
        best, best_epoch, latest = self._best.get(trial, (float("inf"), 0, 0))
        if epoch <= latest:
            return None
        if value < best - self.min_delta or best == float("inf"):
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
class MedianStop(StopRule):
    """Stops a trial whose best value so far is worse than the median of the others' averages at its epoch.

    The rule of Google Vizier (Golovin et al. 2017): trial t stops at epoch e if its best value up to e is
    strictly worse than the median of the running averages over epochs 1 to e of the other trials. All trials
    that have come as far as e count, not only completed ones, so that it works from the first ones on.

    Args:
        metric: The metric to watch.
        mode: "min" if lower is better, "max" if higher is.
        min_epochs: No trial stops before so many epochs.
        min_trials: No trial stops before so many others have come as far.
    """

    def __init__(self, metric: str, mode: str = "min", min_epochs: int = 1, min_trials: int = 5) -> None:
        self.metric = metric
        self.mode = mode
        self._sign = _sign(mode)
        self.min_epochs = whole("min_epochs", min_epochs)
        self.min_trials = whole("min_trials", min_trials)
        self._averages: dict[int, list[float]] = {}  # by epoch, sorted
        self._curves: dict[int, tuple[float, float, int, int]] = {}  # best, sum, count, latest epoch

    def start(self) -> None:
        """Begin a study."""
        self._averages = {}
        self._curves = {}

    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report."""
        reported = metrics.get(self.metric)
        if reported is None or reported != reported:
            return None
        value = self._sign * reported
        best, total, count, latest = self._curves.get(trial, (float("inf"), 0.0, 0, 0))
        if epoch <= latest:
            return None
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
