"""Synchronous successive halving (Jamieson and Talwalkar 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from penstock.schedule._bracket import Bracketed, Course, Rungs
from penstock.schedule._check import budgets, levels, whole


@final
class Halving(Bracketed):
    """Starts many trials with few epochs, and again and again lets the best ``1/eta`` of them go on.

    A rung is over when all its trials ended; the best ``floor(trials / eta**i)`` (at least one) go on from their
    checkpoints to the next, the others are dropped. Failed and stopped trials never go on.

    Args:
        max_epochs: Budget of the last rung.
        min_epochs: Least budget of the first rung. Budgets are ``max_epochs`` divided by powers of ``eta`` and
            rounded down.
        eta: How many times fewer trials and more epochs each rung has.
        trials: Trials of the first rung; None: as many as leave one for the last.
        sampler: A Sampler for this scheduler; None: the study's.
    """

    def __init__(
        self,
        max_epochs: int = 27,
        min_epochs: int = 1,
        eta: int = 3,
        trials: int | None = None,
        sampler: object | None = None,
    ) -> None:
        self._max = self.max_epochs = whole("max_epochs", max_epochs)
        self.min_epochs = whole("min_epochs", min_epochs)
        self.eta = whole("eta", eta, 2)
        rungs = levels(self._max, self.min_epochs, self.eta)
        self.trials: int = self.eta**rungs if trials is None else whole("trials", trials)
        self.sampler = sampler

    @property
    def rungs(self) -> Rungs:
        """Trials and epochs of each rung, first to last."""
        return self._course.rungs

    @property
    def _course(self) -> Course:
        return Course("halving", self.trials, budgets(self._max, self.min_epochs, self.eta), self.eta)

    def _courses(self) -> Iterator[Course]:
        yield self._course

    @property
    def _planned(self) -> int:
        return sum(size for size, _ in self.rungs)

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "Halving",
            "max_epochs": self._max,
            "min_epochs": self.min_epochs,
            "eta": self.eta,
            "trials": self.trials,
        }
