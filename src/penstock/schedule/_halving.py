"""Synchronous successive halving (Jamieson and Talwalkar 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from penstock.core import TrialGroup
from penstock.schedule._base import Outcome, Rules, Scheduler
from penstock.schedule._bracket import Brackets, Course, Rungs
from penstock.schedule._check import budgets, levels, whole


@final
class Halving(Scheduler):
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

    synchronous = True

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
        self._brackets: Brackets | None = None

    @property
    def rungs(self) -> Rungs:
        """Trials and epochs of each rung, first to last."""
        return self._course.rungs

    @property
    def _course(self) -> Course:
        return Course("halving", self.trials, budgets(self._max, self.min_epochs, self.eta), self.eta)

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        self._brackets = Brackets(iter([self._course]), rules)

    def next(self, want: int) -> TrialGroup | None:
        """The next rung, once the last one is over."""
        return None if self._brackets is None else self._brackets.next(want)

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        if self._brackets is not None:
            self._brackets.ended(outcome)

    def drops(self) -> Sequence[int]:
        """The trials that were not among the best of their rung."""
        return () if self._brackets is None else self._brackets.drops()

    @property
    def done(self) -> bool:
        """Whether the last rung is handed out."""
        return self._brackets is not None and self._brackets.done

    @property
    def expected(self) -> int | None:
        """Segments of all rungs; fewer when trials fail."""
        if self._brackets is not None and self._brackets.done:
            return self._brackets.handed
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
