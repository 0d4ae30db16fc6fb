"""Hyperband (Li et al., JMLR 2018): successive halving with several starting budgets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import final

from penstock.core.errors import InvalidInput
from penstock.schedule._bracket import Bracketed, Course, Rungs
from penstock.schedule._check import budgets, levels, whole


@final
class Hyperband(Bracketed):
    """Hedges between many short trials and few long ones: brackets of successive halving.

    Bracket ``s`` starts ``ceil((s_max + 1) / (s + 1) * eta**s)`` trials with ``max_epochs / eta**s`` epochs: the
    table of the JMLR version (34, 15, 8 and 5 trials in brackets 3 to 0 for 81 epochs and eta 3; the first
    preprint had 27, 9, 6 and 5). A rung keeps the best ``floor(n / eta**i)`` of the bracket's ``n``.

    Brackets begin in order, from the shortest starting budget to the longest, each as soon as slots would
    otherwise be idle: while one waits for the last trials of a rung, the next one's first rung runs. With TPE as
    the sampler this is BOHB.

    Args:
        max_epochs: R, the largest budget of a trial.
        eta: How many times fewer trials and more epochs each rung has.
        min_epochs: The least budget of a trial.
        brackets: Only so many brackets per iteration, those with the shortest starting budgets; None: all.
        iterations: How often the brackets are repeated; None: until the sampler or the budget is exhausted.
        sampler: A Sampler for this scheduler; None: the study's.
    """

    def __init__(
        self,
        max_epochs: int = 81,
        eta: int = 3,
        min_epochs: int = 1,
        brackets: int | None = None,
        iterations: int | None = 1,
        sampler: object | None = None,
    ) -> None:
        self._max = self.max_epochs = whole("max_epochs", max_epochs)
        self.eta = whole("eta", eta, 2)
        self.min_epochs = whole("min_epochs", min_epochs)
        most = levels(self._max, self.min_epochs, self.eta) + 1
        self.brackets: int = most if brackets is None else whole("brackets", brackets)
        if self.brackets > most:
            raise InvalidInput(
                f"brackets is {self.brackets}; from {self.min_epochs} to {self._max} epochs with eta={self.eta} "
                f"there are {most}. Give at most {most}, or raise max_epochs."
            )
        self.iterations = None if iterations is None else whole("iterations", iterations)
        self.sampler = sampler

    @property
    def table(self) -> tuple[Rungs, ...]:
        """Trials and epochs of each rung of each bracket of one iteration, in the order they begin."""
        return tuple(course.rungs for course in self._iteration(0))

    def _iteration(self, iteration: int) -> Iterator[Course]:
        epochs = budgets(self._max, self.min_epochs, self.eta)
        s_max = len(epochs) - 1
        prefix = "" if self.iterations == 1 else f"iteration {iteration}, "
        for s in range(s_max, s_max - self.brackets, -1):
            trials = -(-(s_max + 1) * self.eta**s // (s + 1))  # ceil, in whole numbers
            yield Course(f"{prefix}bracket {s}", trials, epochs[s_max - s :], self.eta)

    def _courses(self) -> Iterator[Course]:
        iterations = count() if self.iterations is None else range(self.iterations)
        return (course for i in iterations for course in self._iteration(i))

    @property
    def _planned(self) -> int | None:
        if self.iterations is None:
            return None
        return self.iterations * sum(size for rungs in self.table for size, _ in rungs)

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "Hyperband",
            "max_epochs": self._max,
            "eta": self.eta,
            "min_epochs": self.min_epochs,
            "brackets": self.brackets,
            "iterations": self.iterations,
        }
