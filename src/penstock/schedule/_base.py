"""The contract of schedulers: how much budget each configuration gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.core import Config, Measurement, Noted, Reported, Trial, TrialGroup, TrialStatus, Values

Propose: TypeAlias = Callable[[int], Sequence[Trial]]
"""``propose(n)``: up to n new trials, numbered; fewer only when the sampler or the budget is exhausted."""

Derive: TypeAlias = Callable[[Config, int], Trial]
"""``derive(config, parent)``: a new trial made from another one (PBT's explore as a new trial)."""

Order: TypeAlias = Callable[[Sequence[Values]], list[int]]
"""``order(values)``: indices from best to worst, ties in the given order."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a scheduler may call, and its seed. Handed over in ``start``; all calls are pure.

    Attributes:
        propose: New trials from the sampler.
        order: Ranks values by the study's goal (several objectives: by Pareto fronts).
        space: The study's Space (PBT perturbs within it). Typed as object: the rooms meet through core.
        learns: Whether the sampler learns from results; if not, ask for whole groups at once.
        seed: For the scheduler's own random choices.
        derive: New trials made from others (PBT replaces members that failed); None: no such trials.
        allows: Whether a configuration keeps the study's limits, as far as is known; None: there are none.
        left: How many more trials the study's budget allows, those made from others included; None: any number. It is
            kept to by ``propose``; who calls ``derive`` asks.
    """

    propose: Propose
    order: Order
    space: object
    learns: bool
    seed: int
    derive: Derive | None = None
    allows: Callable[[Config], bool] | None = None
    left: Callable[[], int | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a segment ended, after retries.

    Attributes:
        trial: The trial's number.
        status: PAUSED or COMPLETED (it ran to its end), STOPPED (by a rule, a limit or the user: it gets no
            further segment) or FAILED.
        epoch: Epochs behind it.
        values: Its objectives at ``epoch``, lower is better; None if it reported none or failed.
        metrics: All metrics of its last report, as reported (SM2 reads the learning rate it found); empty if
            it reported none.
        energy: What the epochs reported in this segment drew, None where not metered.
    """

    trial: int
    status: TrialStatus
    epoch: int
    values: Values | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    energy: Measurement | None = None

    @property
    def rankable(self) -> Values | None:
        """The values if the segment ran to its end and they are numbers; a failure or a stop ranks last."""
        if self.status is not TrialStatus.PAUSED and self.status is not TrialStatus.COMPLETED:
            return None
        if self.values is None or any(value != value for value in self.values):
            return None
        return self.values


class Scheduler(ABC):
    """Hands out TrialGroups and learns how they ended.

    Called by the study alone, from one thread. Pure and deterministic: the same calls in the same order give
    the same groups, for a resume replays them. ``start`` resets the object; it belongs to one study at a
    time.

    Attributes:
        sampler: A ``Sampler`` the user composed in (``Hyperband(sampler=TPE())``), or None for the study's.
            The scheduler only carries it; new trials come from ``Rules.propose``.
        max_epochs: The largest budget a trial can get, None if the training function decides.
        synchronous: Whether rungs are compared when they are complete, so that who goes on does not depend on how
            many trials run at once.
        by_default: Whether its number of trials is the study's choice, where nobody had said one: a larger budget of
            trials counts instead.
    """

    sampler: object | None = None
    max_epochs: int | None = None
    synchronous: bool = False
    by_default: bool = False

    @abstractmethod
    def start(self, rules: Rules) -> None:
        """Begin a study."""

    @abstractmethod
    def next(self, want: int) -> TrialGroup | None:
        """A group to run now, or None: nothing until more outcomes are known, or nothing ever (``done``).

        Called again and again until it answers None. ``want`` is how many segments could start at once; a
        synchronous scheduler may hand out more (the rest queues), and one with a sampler that learns should
        not propose more than ``want`` new trials ahead. With ``want`` 0 no new trials are proposed; a
        synchronous scheduler still hands out a rung that is ready.
        """

    @abstractmethod
    def ended(self, outcome: Outcome) -> None:
        """A segment of a group is over."""

    @abstractmethod
    def drops(self) -> Sequence[int]:
        """Paused trials given up since the last call: they get no further segment."""

    def stops(self) -> Sequence[tuple[int, str]]:
        """Trials that run or wait and are to be stopped now, with the reasons: asked again and again."""
        return ()

    def at(self, elapsed_s: float) -> None:
        """The time the study has spent, told before ``next`` and from time to time. Decisions may follow from it."""
        return None

    def heard(self, event: Reported | Noted) -> None:
        """A report or a note, for schedulers that look at more than how segments end."""
        return None

    def reopen(self, over: Collection[int], most: int | None) -> None:
        """There may be new trials again after ``propose`` came back short: the study's budget of them is another one.

        Also called before anything is decided, to see whether it is still ``done``: twice is the same as once.

        Args:
            over: Trials that get no further segment, those that were dropped included.
            most: The budget: how many trials there may be in all, those of other stages included; None: no limit.
        """
        return None

    @property
    def no_more(self) -> str:
        """Why no budget brings more trials, where it is ``done``: for people, after "The study is over:"."""
        return f"{type(self).__name__} has all the trials that it is to have"

    @property
    def urgent(self) -> bool:
        """Whether ``next`` has a group that goes before what waits."""
        return False

    @property
    def chosen(self) -> Sequence[int] | None:
        """Trials whose configurations count in the end, with all that is made of them; None: all, or not known yet."""
        return None

    def why(self, trial: int) -> str:
        """Why a trial that ``drops`` named was given up: one line for people. Asked right after ``drops``."""
        return "not promoted"

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether ``next`` will never hand out a group again, given that nothing is running."""

    @property
    @abstractmethod
    def expected(self) -> int | None:
        """How many segments there will be in all, as far as known; for the ETA."""

    def to_json(self) -> dict[str, object]:
        """Name and parameters, for the journal: a resume with other parameters is refused."""
        return {"name": type(self).__name__}
