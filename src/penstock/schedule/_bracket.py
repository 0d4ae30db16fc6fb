"""Synchronous successive halving: one bracket, and the engine that runs brackets side by side.

Halving and Hyperband are tables of rungs for this engine (Li et al., "Hyperband", JMLR 2018, Algorithm 1).
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias, final

from penstock.core import Segment, Trial, TrialGroup, TrialStatus, Values
from penstock.schedule._base import Outcome, Rules, Scheduler

Rungs: TypeAlias = tuple[tuple[int, int], ...]
"""Trials and epochs of each rung, first to last."""


def rungs(trials: int, budgets: Sequence[int], eta: int) -> Rungs:
    """The rungs of successive halving: ``floor(trials / eta**i)`` trials at ``budgets[i]``, at least one.

    Where one trial is left after the first rung, it runs to the end without another halt.
    """
    table = [(trials, budgets[0])]
    for i in range(1, len(budgets)):
        size = max(1, trials // eta**i)
        if size == 1:
            return (*table, (1, budgets[-1]))
        table.append((size, budgets[i]))
    return tuple(table)


@dataclass(frozen=True, slots=True)
class Course:
    """A bracket to come: its name, first rung and how to halve it."""

    name: str
    trials: int
    budgets: tuple[int, ...]
    eta: int

    @property
    def rungs(self) -> Rungs:
        """Its rungs."""
        return rungs(self.trials, self.budgets, self.eta)


@final
class Bracket:
    """One bracket. A rung is over when all its segments ended; its best go on, the others are dropped.

    Failed and stopped trials rank last and never go on. A trial that was COMPLETED before its rung's end (its
    training function returned early) keeps its rank but has nothing more to run.
    """

    __slots__ = (
        "_course",
        "_final",
        "_results",
        "_rules",
        "_running",
        "_table",
        "_trials",
        "rung",
        "to_propose",
    )

    def __init__(self, course: Course, rules: Rules) -> None:
        self._course = course
        self._rules = rules
        self._table = course.rungs
        self._trials: list[Trial] = []  # of this rung, in the order they were handed out
        self._results: dict[int, Values | None] = {}
        self._final: set[int] = set()
        self._running = 0
        self.rung = 0
        self.to_propose = course.trials

    @property
    def closed(self) -> bool:
        """Whether it will hand out nothing more."""
        return self.rung >= len(self._table) or (
            self.rung == len(self._table) - 1 and not self.to_propose and len(self._trials) > 0
        )

    def propose(self, count: int) -> tuple[TrialGroup | None, bool]:
        """Up to ``count`` new trials for the first rung, and whether the sampler was exhausted."""
        count = min(count, self.to_propose)
        new = self._rules.propose(count)
        exhausted = len(new) < count
        self.to_propose = 0 if exhausted else self.to_propose - len(new)
        self._trials.extend(new)
        if exhausted:  # halve what there is
            self._table = (
                rungs(len(self._trials), self._course.budgets, self._course.eta) if self._trials else ()
            )
        group = self._hand_out(new, 0) if new else None
        return group, exhausted

    @property
    def missing(self) -> list[Course]:
        """What was not proposed of it, as a bracket of its own."""
        count = self._course.trials - len(self._trials)
        return [replace(self._course, name=f"more of {self._course.name}", trials=count)] if count else []

    def _hand_out(self, trials: Sequence[Trial], start: int) -> TrialGroup:
        self._running += len(trials)
        last = self.rung == len(self._table) - 1
        until = self._table[self.rung][1]
        return TrialGroup(
            tuple(Segment(trial, start=start, until=until, last=last) for trial in trials),
            label=f"{self._course.name}, rung {self.rung}",
        )

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        self._running -= 1
        self._results[outcome.trial] = outcome.rankable
        if outcome.status is not TrialStatus.PAUSED:
            self._final.add(outcome.trial)

    @property
    def rung_over(self) -> bool:
        """Whether the rung is complete, so that ``promote`` may be called."""
        return self._running == 0 and self.to_propose == 0 and self.rung < len(self._table)

    def promote(self) -> tuple[TrialGroup | None, list[int]]:
        """Go to the next rung: its group, if there is one, and the trials given up."""
        last = self.rung >= len(self._table) - 1
        epochs = self._table[self.rung][1]
        self.rung += 1
        good = [trial for trial in self._trials if self._results[trial.id] is not None]
        keep: set[int] = set()
        if not last:
            values = [value for trial in good if (value := self._results[trial.id]) is not None]
            best = self._rules.order(values)[: self._table[self.rung][0]]
            keep = {good[index].id for index in best}
        going_on = [trial for trial in good if trial.id in keep and trial.id not in self._final]
        dropped = [t.id for t in self._trials if t.id not in keep and t.id not in self._final]
        self._trials = going_on
        self._results.clear()
        self._final.clear()
        if not going_on:
            self.rung = len(self._table)
            return None, dropped
        return self._hand_out(going_on, epochs), dropped


@final
class Brackets:
    """Runs brackets in order, the next one beginning when slots would stay idle.

    While a bracket waits for the last trials of a rung, idle slots take the first rung of the next one. With a
    sampler that learns, new trials are proposed no faster than they can start, so that each knows as many
    results as possible; otherwise a first rung is one group.
    """

    def __init__(self, courses: Iterator[Course], rules: Rules) -> None:
        self._courses = courses
        self._rules = rules
        self._upcoming = next(courses, None)
        self._left: list[Course] = []  # when trials ran out: what was not begun
        self._filling: tuple[int, Bracket] | None = None  # the bracket whose first rung is being handed out
        self._open: dict[int, Bracket] = {}
        self._ready: list[int] = []  # heap of brackets whose rung is over, the oldest first
        self._home: dict[int, int] = {}
        self._count = 0
        self._dropped: list[int] = []
        self.handed = 0

    def next(self, want: int) -> TrialGroup | None:
        """The next rung of the oldest bracket that has one, else new trials."""
        while self._ready:
            number = heapq.heappop(self._ready)
            bracket = self._open[number]
            group, dropped = bracket.promote()
            self._dropped.extend(dropped)
            if bracket.closed:
                del self._open[number]
            if group is not None:
                return self._note(number, group)
        while want > 0:
            if self._filling is None:
                if self._upcoming is None:
                    return None
                self._filling = self._count, Bracket(self._upcoming, self._rules)
                self._open[self._count] = self._filling[1]
                self._count += 1
                self._upcoming = next(self._courses, None)
            number, bracket = self._filling
            group, exhausted = bracket.propose(want if self._rules.learns else bracket.to_propose)
            if not bracket.to_propose:
                self._filling = None
            if exhausted:
                self._left = [*bracket.missing, *([] if self._upcoming is None else [self._upcoming])]
                self._upcoming = None
            if bracket.closed:
                del self._open[number]
            elif bracket.rung_over:  # exhausted just when all that was proposed had ended
                heapq.heappush(self._ready, number)
                return self.next(want)
            if group is not None:
                return self._note(number, group)
        return None

    def _note(self, number: int, group: TrialGroup) -> TrialGroup:
        self.handed += len(group.segments)
        if number in self._open:
            for segment in group.segments:
                self._home[segment.trial.id] = number
        return group

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        bracket = self._open.get(number := self._home.pop(outcome.trial, -1))
        if bracket is None:
            return  # the last rung of its bracket: nothing depends on it
        bracket.ended(outcome)
        if bracket.rung_over:
            heapq.heappush(self._ready, number)

    def reopen(self) -> None:
        """Begin what was left when trials ran out."""
        self._courses = chain(self._left, self._courses)
        self._left = []
        if self._upcoming is None:
            self._upcoming = next(self._courses, None)

    def drops(self) -> Sequence[int]:
        """Trials given up since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def done(self) -> bool:
        """Whether everything is handed out."""
        return not self._open and self._upcoming is None


class Bracketed(Scheduler):
    """A scheduler that runs brackets."""

    synchronous = True

    _brackets: Brackets | None = None

    @abstractmethod
    def _courses(self) -> Iterator[Course]:
        """All brackets, in the order they begin; they need not end."""

    @property
    @abstractmethod
    def _planned(self) -> int | None:
        """Segments of all brackets if no trial fails; None without an end."""

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        self._brackets = Brackets(self._courses(), rules)

    def next(self, want: int) -> TrialGroup | None:
        """The next rung of the oldest bracket that is ready, else the first rung of the next bracket."""
        return None if self._brackets is None else self._brackets.next(want)

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        if self._brackets is not None:
            self._brackets.ended(outcome)

    def reopen(self, over: Collection[int], most: int | None) -> None:
        """Go on with what is missing of the bracket that came short, and the brackets after it."""
        if self._brackets is not None:
            self._brackets.reopen()

    @property
    def no_more(self) -> str:
        """The brackets."""
        return f"all brackets of {type(self).__name__} are filled"

    def drops(self) -> Sequence[int]:
        """The trials that were not among the best of their rung."""
        return () if self._brackets is None else self._brackets.drops()

    @property
    def done(self) -> bool:
        """Whether the last rung of the last bracket is handed out."""
        return self._brackets is not None and self._brackets.done

    @property
    def expected(self) -> int | None:
        """Segments of all rungs of all brackets; fewer when trials fail. None without an end."""
        if self._brackets is not None and self._brackets.done:
            return self._brackets.handed
        return self._planned
