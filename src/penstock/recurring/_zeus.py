"""The policy of the Zeus paper: pruning and Gaussian Thompson sampling over batch sizes, all limits profiled."""

from __future__ import annotations

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
        spec = view.spec
        bandit = ZeusBandit(
            spec.batch_sizes, spec.default, beta=spec.beta, window=spec.window, seed=spec.seed
        )
        for seen in view.seen:
            bandit.observe(seen.batch_size, seen.cost, seen.reached, explored=seen.explore)
        pick = bandit.choose(number, waiting=any(d.explore for d in view.pending))
        limit_w, profile_w = profiled_limit(view, pick.batch_size)
        return Choice(pick.batch_size, limit_w, profile_w, pick.cost_limit, pick.explore)
