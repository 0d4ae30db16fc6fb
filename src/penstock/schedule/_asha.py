"""ASHA (Li et al., "A system for massively parallel hyperparameter tuning", MLSys 2020), by promotion."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from typing import TypeAlias, final

from penstock.core import Segment, Trial, TrialGroup, TrialStatus, Values
from penstock.core.errors import InvalidInput
from penstock.schedule._base import Order, Outcome, Rules, Scheduler
from penstock.schedule._check import budgets, ended_by, levels, raised, whole

_Key: TypeAlias = tuple[float, int]
"""What trials of a rung are sorted by: their value or rank, and their number for ties."""

_Ranks: TypeAlias = tuple[list[tuple[_Key, Trial]], list[_Key], int, int]
"""Who of a rung may be promoted one day, the best first; the others; how many are ranked, and how many are not yet."""


@final
class ASHA(Scheduler):
    """Promotes a trial as soon as it is among the best ``1/eta`` of its rung so far; waits for nobody.

    A free slot takes the best trial that can be promoted, from the highest rung down (Algorithm 2), and else a
    new one. A promoted trial goes on from its checkpoint. When no new trials are left, all that can still be
    promoted is, and the rest is dropped; with fewer than ``eta**rungs`` trials none may reach ``max_epochs``, as
    in the paper. Failed and stopped trials count as the worst of their rung.

    Args:
        max_epochs: R, the largest budget of a trial.
        min_epochs: r, the least budget of the first rung (the grace period). Budgets are ``max_epochs`` divided
            by powers of ``eta`` and rounded down.
        eta: One in so many is promoted.
        trials: How many trials in all; None: until the sampler or the budget is exhausted.
        sampler: A Sampler for this scheduler; None: the study's.
        brackets: With more than one, trials are dealt out among brackets that begin at the first, second ...
            rung, in the proportions of Hyperband: asynchronous Hyperband.
    """

    def __init__(
        self,
        max_epochs: int = 27,
        min_epochs: int = 1,
        eta: int = 3,
        trials: int | None = 81,
        sampler: object | None = None,
        brackets: int = 1,
    ) -> None:
        self._max = self.max_epochs = whole("max_epochs", max_epochs)
        self.min_epochs = whole("min_epochs", min_epochs)
        self.eta = whole("eta", eta, 2)
        most = levels(self._max, self.min_epochs, self.eta) + 1
        self.trials = None if trials is None else whole("trials", trials)
        self.sampler = sampler
        self.brackets = whole("brackets", brackets)
        if self.brackets > most:
            raise InvalidInput(
                f"brackets is {self.brackets}; from {self.min_epochs} to {self._max} epochs with eta={self.eta} "
                f"there are {most}. Give at most {most}, or raise max_epochs."
            )
        self._rules: Rules | None = None
        self._open: list[_Bracket] = []
        self._running: dict[int, tuple[int, int, Trial]] = {}  # bracket, rung, trial
        self._most = self.trials
        self._proposed = self._handed = 0
        self._exhausted = self._finished = False
        self._dropped: list[int] = []

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        self._rules = rules
        epochs = budgets(self._max, self.min_epochs, self.eta)
        s_max = len(epochs) - 1
        self._open = [
            # Hyperband's first rung for the same starting budget, as the bracket's share of the trials.
            _Bracket(
                epochs[s:], self.eta, rules.order, (s_max + 1) * self.eta ** (s_max - s) / (s_max - s + 1)
            )
            for s in range(self.brackets)
        ]
        self._running = {}
        self._most = self.trials
        self._proposed = self._handed = 0
        self._exhausted = self._finished = False
        self._dropped = []

    def next(self, want: int) -> TrialGroup | None:
        """Up to ``want`` promotions and new trials."""
        rules = self._rules
        if rules is None or self._finished or want <= 0:
            return None
        ranks = self._ranks
        segments = self._promotions(want, exact=False)
        missing = want - len(segments)
        if missing and not self._exhausted:
            if self._most is not None:
                missing = min(missing, self._most - self._proposed)
            new = rules.propose(missing) if missing else ()
            self._proposed += len(new)
            self._exhausted = len(new) < missing or self._proposed == self._most
            segments.extend(self._begin(trial) for trial in new)
        if self._exhausted and len(segments) < want:
            segments.extend(self._promotions(want - len(segments), exact=True))
        self._handed += len(segments)
        if not segments:
            self._finish_if_over()
            self._ranks = ranks
            return None
        return TrialGroup(tuple(segments), label="asha")

    @property
    def _ranks(self) -> list[_Ranks]:
        """Of all rungs. A question without an answer leaves them as they were: journals, and so resumes, know none."""
        return [rung.ranks for bracket in self._open for rung in bracket.rungs]

    @_ranks.setter
    def _ranks(self, ranks: list[_Ranks]) -> None:
        rungs = (rung for bracket in self._open for rung in bracket.rungs)
        for rung, before in zip(rungs, ranks, strict=True):
            rung.ranks = before

    def _promotions(self, want: int, *, exact: bool) -> list[Segment]:
        segments: list[Segment] = []
        for number, bracket in enumerate(self._open):
            while len(segments) < want and (found := bracket.promotable(exact=exact)) is not None:
                rung, trial = found
                self._running[trial.id] = number, rung + 1, trial
                segments.append(bracket.segment(trial, rung + 1))
        return segments

    def _begin(self, trial: Trial) -> Segment:
        number = min(
            range(len(self._open)), key=lambda i: ((self._open[i].begun + 1) / self._open[i].share, i)
        )
        bracket = self._open[number]
        bracket.begun += 1
        self._running[trial.id] = number, 0, trial
        return bracket.segment(trial, 0)

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        number, rung, trial = self._running.pop(outcome.trial)
        bracket = self._open[number]
        paused, values = outcome.status is TrialStatus.PAUSED, outcome.rankable
        if rung < len(bracket.rungs):
            bracket.rungs[rung].add(trial, values, paused)
        if paused and values is None:  # nothing that it could be promoted by
            self._dropped.append(trial.id)
        if self._exhausted and not self._running:
            self._finish_if_over()

    def reopen(self, over: Collection[int], most: int | None) -> None:
        """Go on to the number of trials; those that were dropped keep their ranks, but are not promoted any more."""
        self._most = raised(self, self._most, most)
        if self._proposed != self._most:
            self._exhausted = self._finished = False
        for bracket in self._open:
            for rung in bracket.rungs:
                rung.give_up(over)

    @property
    def no_more(self) -> str:
        """The number of trials, or that the sampler has no more."""
        return ended_by(self, self.trials)

    def _finish_if_over(self) -> None:
        if not self._exhausted or self._running or self._finished:
            return
        ranks = self._ranks
        more = any(rung.promotable(exact=True) for bracket in self._open for rung in bracket.rungs)
        self._ranks = ranks
        if not more:
            self._finished = True
            self._dropped.extend(
                sorted(trial for bracket in self._open for rung in bracket.rungs for trial in rung.waiting)
            )

    def drops(self) -> Sequence[int]:
        """The trials that were never promoted, once nothing more can be."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def done(self) -> bool:
        """Whether no trial is new, running or to be promoted."""
        return self._finished

    @property
    def expected(self) -> int | None:
        """An estimate: what synchronous halving would hand out, or what was handed out if that is more."""
        if self._finished:
            return self._handed
        if self._most is None and not self._exhausted:
            return None
        trials = self._proposed if self._exhausted or self._most is None else self._most
        epochs = budgets(self._max, self.min_epochs, self.eta)
        shares = [bracket.share for bracket in self._open] or [1.0]
        segments = 0
        for s, share in enumerate(shares):
            begun = round(trials * share / sum(shares))
            segments += sum(begun // self.eta**i for i in range(len(epochs) - s))
        return max(segments, self._handed)

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "ASHA",
            "max_epochs": self._max,
            "min_epochs": self.min_epochs,
            "eta": self.eta,
            "trials": self.trials,
            "brackets": self.brackets,
        }


@final
class _Bracket:
    """The rungs from one starting budget to the largest. The last rung promotes nobody and keeps nothing."""

    def __init__(self, epochs: tuple[int, ...], eta: int, order: Order, share: float) -> None:
        self.epochs = epochs
        self.rungs = [_Rung(eta, order) for _ in epochs[:-1]]
        self.share = share
        self.begun = 0

    def promotable(self, *, exact: bool) -> tuple[int, Trial] | None:
        """The rung and trial to promote next, which then counts as promoted (Alg. 2, lines 11 to 17)."""
        for rung in range(len(self.rungs) - 1, -1, -1):
            if self.rungs[rung].promotable(exact=exact):
                return rung, self.rungs[rung].promote()
        return None

    def segment(self, trial: Trial, rung: int) -> Segment:
        """The trial's way through ``rung``."""
        start = self.epochs[rung - 1] if rung else 0
        return Segment(trial, start=start, until=self.epochs[rung], last=rung == len(self.epochs) - 1)


@final
class _Rung:
    """The trials that reached one rung, and who of them may be promoted.

    A trial may be promoted when it is among the best ``floor(n / eta)`` of the rung's ``n``. With one objective
    an event costs a few comparisons however many trials there are: those not promoted are in a heap; the
    keys of the others are a sorted list, and the rank of the heap's first is its place in that list, for
    nobody else who was not promoted is better. With several objectives a new result may change all ranks
    (Pareto fronts), so they are ranked anew, but not before the rung has grown by a 64th: a promotion is then
    decided by ranks that old at most, and by present ones when nothing else is left to do.
    """

    __slots__ = ("_all", "_eta", "_heap", "_order", "_others", "_rank_all", "_ranked", "_unranked")

    def __init__(self, eta: int, order: Order) -> None:
        self._eta = eta
        self._rank_all = order
        self._heap: list[tuple[_Key, Trial]] = []  # may be promoted one day, the best first
        self._others: list[_Key] = []  # promoted, or completed early: sorted
        self._ranked = 0  # failures included
        self._all: dict[int, tuple[Trial, Values, bool]] = {}  # several objectives: all results but failures
        self._unranked = 0
        self._order: list[int] = []  # of all results, as ranked last

    @property
    def ranks(self) -> _Ranks:
        """What ``promotable`` goes by; good until somebody is added or promoted."""
        return self._heap, self._others, self._ranked, self._unranked

    @ranks.setter
    def ranks(self, ranks: _Ranks) -> None:
        self._heap, self._others, self._ranked, self._unranked = ranks

    def add(self, trial: Trial, values: Values | None, may_go_on: bool) -> None:
        """A trial reached the rung's end, or failed on the way (``values`` None)."""
        if values is None:
            self._ranked += 1
        elif len(values) > 1:
            self._all[trial.id] = trial, values, may_go_on
            self._unranked += 1
        else:
            self._ranked += 1
            self._place((values[0], trial.id), trial, may_go_on)

    def _place(self, key: _Key, trial: Trial, may_go_on: bool) -> None:
        if may_go_on:
            heapq.heappush(self._heap, (key, trial))
        else:
            insort(self._others, key)

    def promotable(self, *, exact: bool) -> bool:
        """Whether its best trial that was not promoted may be."""
        if self._unranked > (0 if exact else self._ranked // 64):
            self._rank()
        if not self._heap:
            return False
        return bisect_left(self._others, self._heap[0][0]) < self._ranked // self._eta

    def _rank(self) -> None:
        results = [self._all[trial] for trial in sorted(self._all)]
        self._ranked += self._unranked
        self._unranked = 0
        self._heap, self._others = [], []
        if len(self._order) != len(results):
            self._order = self._rank_all([values for _, values, _ in results])
        for rank, index in enumerate(self._order):
            trial, _, may_go_on = results[index]
            self._place((rank, trial.id), trial, may_go_on)

    def promote(self) -> Trial:
        """Take the best trial that was not promoted."""
        key, trial = heapq.heappop(self._heap)
        insort(self._others, key)
        if trial.id in self._all:
            self._all[trial.id] = trial, self._all[trial.id][1], False
        return trial

    def give_up(self, over: Collection[int]) -> None:
        """Never promote these."""
        for trial in self._all.keys() & over:
            self._all[trial] = *self._all[trial][:2], False
        for key, _ in (entry for entry in self._heap if entry[1].id in over):
            insort(self._others, key)
        self._heap = [entry for entry in self._heap if entry[1].id not in over]
        heapq.heapify(self._heap)

    @property
    def waiting(self) -> list[int]:
        """Trials that were not promoted."""
        if self._all:
            return [number for number, (_, _, may_go_on) in self._all.items() if may_go_on]
        return [trial.id for _, trial in self._heap]
