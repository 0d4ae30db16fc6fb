"""Gaussian Thompson sampling with pruning exploration: Zeus's batch-size optimiser (section 4.3, Alg. 1-3)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from penstock.core.errors import InvalidInput

PRUNING_ROUNDS = 2  # Zeus Alg. 3, line 2: twice, so that each survivor's cost variance can be estimated


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of an arm's mean cost: a Gaussian.

    Attributes:
        mean: Of the arm's mean cost.
        variance: Of that mean; ``inf`` says nothing is known, 0 that all observations agree.
    """

    mean: float
    variance: float


FLAT = Belief(0.0, math.inf)
"""Zeus's default prior: zero mean and infinite variance, i.e. no knowledge."""


def posterior(costs: Sequence[float], prior: Belief = FLAT, *, cost_variance: float | None = None) -> Belief:
    """The belief in an arm's mean cost after observing ``costs`` (Zeus Alg. 2).

    Args:
        costs: The arm's observed costs.
        prior: The belief before.
        cost_variance: The variance of single costs where it is known; by default it is learnt from ``costs``
            (Alg. 2, line 2), as Zeus does.
    """
    if not costs:
        return prior
    n = len(costs)
    total = math.fsum(costs)
    if cost_variance is None:
        average = total / n
        cost_variance = math.fsum((cost - average) ** 2 for cost in costs) / n  # Alg. 2, line 2
    if cost_variance <= 0.0:
        # The limit of lines 3 and 4: observations without variance outweigh any prior.
        return Belief(total / n, 0.0)
    if prior.variance <= 0.0:
        return prior  # and no observation outweighs a prior without variance
    precision = 1.0 / prior.variance + n / cost_variance  # 1/inf is 0: the flat prior
    variance = 1.0 / precision  # line 3
    return Belief(variance * (prior.mean / prior.variance + total / cost_variance), variance)  # line 4


def thompson(beliefs: Mapping[int, Belief], rng: random.Random) -> int:
    """The arm whose sampled mean cost is least (Zeus Alg. 1). Each arm gets a draw of its own.

    An arm of which nothing is known has infinite variance: a draw of it lies below any finite one half of the
    time, however often it is repeated. Such arms come first, in random order.
    """
    unknown = [arm for arm, belief in beliefs.items() if math.isinf(belief.variance)]
    if unknown:
        return rng.choice(unknown)
    draws = {arm: rng.gauss(belief.mean, math.sqrt(belief.variance)) for arm, belief in beliefs.items()}
    return min(draws, key=draws.__getitem__)


@final
class Pruning:
    """Exploration with pruning around the default batch size (Zeus Alg. 3, lines 1-9).

    A round explores the default, then smaller sizes until one fails, then larger ones until one fails. Sizes
    that reached the target survive; the cheapest of them is the next round's default. One size is explored at
    a time: ``expecting`` says which, ``report`` says how it went.

    If the default itself fails, both directions are explored all the same: lines 4 and 5 end at a failure of their own.
    If no size reaches the target in a round, nothing was learnt about which to keep: all stay.
    """

    def __init__(self, batch_sizes: Sequence[int], default: int, rounds: int = PRUNING_ROUNDS) -> None:
        self.batch_sizes = tuple(sorted(batch_sizes))
        self.default = default
        self._rounds_left = rounds
        self._expecting: int | None = None
        self._down: list[int] = []
        self._up: list[int] = []
        self._good: list[int] = []
        self._best_cost = math.inf
        self._best = default
        self._begin()

    @property
    def expecting(self) -> int | None:
        """The batch size to explore now; None when exploration is over."""
        return self._expecting

    def report(self, cost: float, reached: bool) -> None:
        """Tell how the run of the expected batch size went."""
        batch_size = self._expecting
        if batch_size is None:
            return
        if reached:
            self._good.append(batch_size)
            if cost < self._best_cost:
                self._best_cost, self._best = cost, batch_size
        elif batch_size < self.default:
            self._down = []  # "until convergence failure": the rest of this direction is pruned
        elif batch_size > self.default:
            self._up = []
        self._step()

    def _begin(self) -> None:
        if self._rounds_left == 0:
            self._expecting = None
            return
        self._rounds_left -= 1
        at = self.batch_sizes.index(self.default)
        self._down = list(reversed(self.batch_sizes[: at + 1]))
        self._up = list(self.batch_sizes[at + 1 :])
        self._good = []
        self._best_cost, self._best = math.inf, self.default
        self._expecting = self.default

    def _step(self) -> None:
        if self._expecting in self._down:
            self._down = self._down[self._down.index(self._expecting) + 1 :]
        elif self._expecting in self._up:
            self._up = self._up[self._up.index(self._expecting) + 1 :]
        remaining = self._down or self._up
        if remaining:
            self._expecting = remaining[0]
            return
        if self._good:
            self.batch_sizes = tuple(sorted(self._good))  # Alg. 3, line 6
            self.default = self._best  # line 7
        self._begin()


@dataclass(frozen=True, slots=True)
class Pick:
    """A choice of the bandit.

    Attributes:
        batch_size: What to run.
        explore: Whether it is the step the pruning phase waits for. Pass it back to ``observe``.
        cost_limit: Stop the run before its cost exceeds this; None while no run has reached the target.
    """

    batch_size: int
    explore: bool
    cost_limit: float | None


@final
class ZeusBandit:
    """Zeus's optimiser of one recurring job's batch size: pruning, then Thompson sampling (Alg. 3).

    Pure. Draws depend on the seed and the decision's number alone, so they survive restarts and do not depend
    on the order in which results arrive. Results may be late and out of order: a run that began in the
    pruning phase and ends in the sampling phase counts like any other.

    Args:
        batch_sizes: The feasible batch sizes.
        default: Where exploration starts.
        beta: A run is stopped at ``beta`` times the least cost of runs that reached the target.
        window: Use the latest so many observations, over all batch sizes (drift); None: all.
        prior: The belief in an unobserved arm's mean cost.
        pooled: Let what all arms show of the cost's variance count as one more run of each. False is Alg. 2 to the
            letter, by which two runs of equal cost pin an arm's belief for good: on the paper's MovieLens trace
            one replay in twenty then never finds the best batch size.
        seed: For the draws.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        default: int,
        *,
        beta: float = 2.0,
        window: int | None = None,
        prior: Belief = FLAT,
        pooled: bool = True,
        seed: int = 0,
    ) -> None:
        sizes = sorted(set(batch_sizes))
        if not sizes:
            raise InvalidInput("A bandit needs at least one batch size, got none.")
        if default not in sizes:
            raise InvalidInput(
                f"The default batch size {default} is not one of {sizes}: add it, or pick one."
            )
        if not beta >= 1.0:
            raise InvalidInput(f"beta must be at least 1 (stop at beta times the least cost), got {beta}.")
        if window is not None and window < 1:
            raise InvalidInput(f"window must be at least 1 observation or None for all, got {window}.")
        self._beta = beta
        self._window = window
        self._prior = prior
        self._pooled = pooled
        self._seed = seed
        self._pruning = Pruning(sizes, default)
        self._observations: list[tuple[int, float, bool]] = []

    @property
    def exploring(self) -> bool:
        """Whether the pruning phase is still on."""
        return self._pruning.expecting is not None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that are still in the race."""
        return self._pruning.batch_sizes

    @property
    def cost_limit(self) -> float | None:
        """The early-stopping threshold: beta times the least cost of the runs that reached the target.

        Failed runs do not count: stopped early, they are cheap, and would lower it until nothing can finish.
        """
        costs = [cost for _, cost, reached in self._recent() if reached]
        return self._beta * min(costs) if costs else None

    @property
    def best_known(self) -> int:
        """The batch size of the cheapest run that reached the target so far; the default before there is one."""
        reached = [(cost, size) for size, cost, ok in self._recent() if ok]
        return min(reached)[1] if reached else self._pruning.default

    def beliefs(self) -> dict[int, Belief]:
        """The belief in each remaining arm's mean cost, from the observations in the window.

        A run that did not reach the target counts with the early-stopping threshold at least: it would have cost more.
        By what it spent, a batch size that crashes at once would look the cheapest of all and be run for ever.
        """
        least = self.cost_limit or 0.0
        costs: dict[int, list[float]] = {size: [] for size in self.batch_sizes}
        for size, cost, reached in self._recent():
            if size in costs:
                costs[size].append(cost if reached else max(cost, least))
        pooled = _relative_variance(costs.values())
        beliefs = {}
        for size, own in costs.items():
            variance = None
            if own and self._pooled:
                average = math.fsum(own) / len(own)
                squares = math.fsum((cost - average) ** 2 for cost in own)
                variance = (squares + pooled * average**2) / len(own)
            beliefs[size] = posterior(own, self._prior, cost_variance=variance)
        return beliefs

    def choose(self, number: int, *, waiting: bool = False, retry: bool = False) -> Pick:
        """The batch size for decision ``number``.

        Args:
            number: Counts decisions; with the seed it determines the draws.
            waiting: An exploratory run is under way. During pruning the job then runs with the best-known size
                (section 4.4, "Handling concurrent job submissions").
            retry: It is for a run that failed: "retry with another batch size" than the latest that did (section 4.4).
        """
        expecting = self._pruning.expecting
        if expecting is not None:
            if waiting:
                return Pick(self.best_known, False, self.cost_limit)
            return Pick(expecting, True, self.cost_limit)
        rng = random.Random(f"penstock.bandit/{self._seed}/{number}")
        beliefs = self.beliefs()
        if retry:
            failed = next((size for size, _, reached in reversed(self._observations) if not reached), None)
            beliefs = {size: belief for size, belief in beliefs.items() if size != failed} or beliefs
        return Pick(thompson(beliefs, rng), False, self.cost_limit)

    def observe(self, batch_size: int, cost: float, reached: bool, *, explored: bool = False) -> None:
        """Learn the cost of a run, in the order in which results arrive.

        Args:
            batch_size: What was run.
            cost: What it cost, up to the target or to where it was stopped.
            reached: Whether it reached the target.
            explored: ``Pick.explore`` of the choice.
        """
        self._observations.append((batch_size, cost, reached))
        if explored and batch_size == self._pruning.expecting:
            self._pruning.report(cost, reached)

    def _recent(self) -> list[tuple[int, float, bool]]:
        return self._observations if self._window is None else self._observations[-self._window :]


def _relative_variance(groups: Iterable[Sequence[float]]) -> float:
    total, freedom = 0.0, 0
    for costs in groups:
        if len(costs) > 1:
            average = math.fsum(costs) / len(costs)
            total += math.fsum((cost / average - 1.0) ** 2 for cost in costs) if average > 0 else 0.0
            freedom += len(costs) - 1
    return total / freedom if freedom else 0.0
