"""The policy of the Zeus paper: pruning and Gaussian Thompson sampling over batch sizes, all limits profiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from penstock.recurring._history import View
from penstock.recurring._policy import Choice, Policy, profiled_limit
from penstock.sample._bandit import ZeusBandit


@final
class Zeus(Policy):
    """Zeus as published (Alg. 1-3, section 4.4)."""

    name: ClassVar[str] = "zeus"

    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""
        bandit = _told(view)
        pick = bandit.choose(number, waiting=any(d.explore for d in view.pending), retry=retry)
        limit_w, profile_w = profiled_limit(view, pick.batch_size)
        return Choice(pick.batch_size, limit_w, profile_w, pick.cost_limit, pick.explore)


@dataclass(frozen=True, slots=True)
class _Told:
    """A bandit and how many results it was told of."""

    bandit: ZeusBandit
    given: int


def _told(view: View) -> ZeusBandit:
    """The bandit that was told of all runs; what the last decision's was told need not be told again."""
    spec = view.spec
    known = view.memo.get(Zeus) if view.settled else None
    if isinstance(known, _Told) and known.given <= len(view.seen):
        bandit, given = known.bandit, known.given
    else:
        given = 0
        bandit = ZeusBandit(
            spec.batch_sizes, spec.default, beta=spec.beta, window=spec.window, seed=spec.seed
        )
    for seen in view.seen[given:]:
        if seen.batch_size in spec.batch_sizes:  # not those that were taken off the list since
            bandit.observe(seen.batch_size, seen.cost, seen.reached, explored=seen.explore)
    if view.settled:
        view.memo[Zeus] = _Told(bandit, len(view.seen))
    return bandit
