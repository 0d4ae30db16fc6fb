"""Every trial to the end: random or grid search, or plain Bayesian optimisation, as the sampler says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from penstock.core import Segment, TrialGroup
from penstock.schedule._base import Outcome, Rules, Scheduler
from penstock.schedule._check import ended_by, raised, whole


@final
class Full(Scheduler):
    """Runs all trials to the end.

    With a sampler that does not learn and a known number of trials, all are handed out in one group;
    otherwise as many as can start.

    Args:
        trials: How many; None: until the sampler is exhausted or the budget is spent.
        epochs: Budget of each trial; None: the training function decides.
        sampler: A Sampler for this scheduler; None: the study's.
    """

    def __init__(
        self, trials: int | None = None, epochs: int | None = None, sampler: object | None = None
    ) -> None:
        self.trials = None if trials is None else whole("trials", trials)
        self.max_epochs = None if epochs is None else whole("epochs", epochs)
        self.sampler = sampler
        self._rules: Rules | None = None
        self._most = self.trials
        self._handed = 0
        self._exhausted = False

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        self._rules = rules
        self._most = self.trials
        self._handed = 0
        self._exhausted = False

    def next(self, want: int) -> TrialGroup | None:
        """All trials at once, or ``want`` of them."""
        rules = self._rules
        if rules is None or self._exhausted or want <= 0:
            return None
        if self._most is None:
            count = want
        elif rules.learns:
            count = min(want, self._most - self._handed)
        else:
            count = self._most - self._handed
        if count <= 0:
            return None
        trials = rules.propose(count)
        self._handed += len(trials)
        self._exhausted = len(trials) < count or self._handed == self._most
        if not trials:
            return None
        return TrialGroup(tuple(Segment(trial, until=self.max_epochs) for trial in trials), label="full")

    def reopen(self, over: Collection[int], most: int | None) -> None:
        """Go on to the number of trials."""
        self._most = raised(self, self._most, most)
        self._exhausted = self._handed == self._most

    @property
    def no_more(self) -> str:
        """The number of trials, or that the sampler has no more."""
        return ended_by(self, self.trials)

    def ended(self, outcome: Outcome) -> None:
        """Nothing depends on it."""

    def drops(self) -> Sequence[int]:
        """None: no trial is ever paused."""
        return ()

    @property
    def done(self) -> bool:
        """Whether all trials are handed out."""
        return self._exhausted

    @property
    def expected(self) -> int | None:
        """The number of trials, once known."""
        return self._handed if self._exhausted else self._most

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {"name": "Full", "trials": self.trials, "epochs": self.max_epochs}
