"""Walk: a random walk around the best point (HyperPower's Rand-Walk, section 3.5)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from random import Random as Generator
from statistics import NormalDist
from typing import Any, final

from penstock.core import Config, Values
from penstock.core.errors import InvalidInput
from penstock.sample._base import Observation, Sampler, started
from penstock.sample._seed import Stream, mixed
from penstock.space import Choice, Domain, Space

_NORMAL = NormalDist()


@final
class Walk(Sampler):
    """Draws x ~ N(x+, sigma^2) around the best point x+ so far, in the unit cube of the space.

    The normal distribution is truncated to the cube. Log domains walk by their logarithm, discrete ones over equal
    bins. A Choice has no order: it changes with the probability with which the walk would leave a bin of width 1/n
    from its middle, to any other value alike. A domain that becomes active is drawn uniformly. Until the first
    result, all is drawn uniformly. With several objectives, x+ is drawn from the non-dominated points.

    Args:
        sigma: The step, as a part of each domain's width. HyperPower's sigma_0; results are sensitive to it. With 0.3,
            a third as many proposals are refused under limits as of random search, about as in the paper's Table 4.
        sigma_end: If given, sigma shrinks geometrically to it over ``steps`` proposals and stays there.
        steps: See ``sigma_end``.
    """

    def __init__(self, sigma: float = 0.3, *, sigma_end: float | None = None, steps: int = 100) -> None:
        self._sigma = _positive("sigma", sigma)
        self._sigma_end = self._sigma if sigma_end is None else _positive("sigma_end", sigma_end)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InvalidInput(
                f"Walk: steps is {steps!r}. Give the number of proposals over which sigma shrinks."
            )
        self._steps = steps
        self._space: Space | None = None
        self._seed = 0
        self._asked = 0
        self._told: dict[int, tuple[Values, int, dict[str, Any]]] = {}
        self._front: list[int] = []  # trials that none dominates; with one objective, the best one

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin with nothing known."""
        self._space, self._seed, self._asked = space, seed, 0
        self._told, self._front = {}, []

    def sigma_at(self, index: int) -> float:
        """The step of the ``index``-th proposal."""
        shrunk: float = (self._sigma_end / self._sigma) ** min(index / self._steps, 1.0)
        return self._sigma * shrunk

    def ask(self, n: int) -> list[Config]:
        """``n`` points around the best."""
        space = started(self, self._space)
        first, self._asked = self._asked, self._asked + n
        return [self._propose(space, index) for index in range(first, first + n)]

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Count the proposals as answered."""
        self._asked += len(configs)

    def adopt(self, config: Config, trial: int) -> None:
        """Nothing to learn before its result."""

    def tell(self, observation: Observation) -> None:
        """Learn a result; a failure takes back what the trial told before."""
        trial, values = observation.trial, observation.values
        known = self._told.get(trial)
        if values is None or any(value != value for value in values):
            if known is not None and observation.final:
                del self._told[trial]
                self._refresh(trial)
            return
        if known is not None and observation.epoch < known[1]:
            return
        self._told[trial] = (values, observation.epoch, dict(observation.config))
        if known is not None and trial in self._front:
            self._refresh(trial)
        else:
            self._enter(trial)

    def _propose(self, space: Space, index: int) -> Config:
        if not self._front:
            return space.sample(Stream(self._seed, index))
        draw = Generator(mixed(self._seed, index, "walk"))
        center = self._told[self._front[int(draw.random() * len(self._front))]][2]
        sigma = self.sigma_at(index)
        config: dict[str, Any] = {}
        for name in space.order:
            if space.active(name, config):
                domain, unit = space[name], draw.random()
                config[name] = (
                    _step(domain, center[name], sigma, unit) if name in center else domain.from_unit(unit)
                )
        return config

    def _enter(self, trial: int) -> None:
        values = self._told[trial][0]
        if any(_beats(self._told[other][0], other, values, trial) for other in self._front):
            return
        self._front = [t for t in self._front if not _beats(values, trial, self._told[t][0], t)] + [trial]
        self._front.sort()

    def _refresh(self, trial: int) -> None:
        if trial in self._front:
            self._front = []
            for other in sorted(self._told):
                self._enter(other)

    def __repr__(self) -> str:
        shrinks = self._sigma_end != self._sigma
        more = f", sigma_end={self._sigma_end!r}, steps={self._steps!r}" if shrinks else ""
        return f"Walk(sigma={self._sigma!r}{more})"


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise InvalidInput(f"Walk: {name} is {value!r}. Give a positive number; the cube's width is 1.")
    return float(value)


def _beats(values: Values, trial: int, others: Values, other: int) -> bool:
    """Whether the first dominates the second; of equals, the trial with the lower number does."""
    if values == others:
        return trial < other
    return all(a <= b for a, b in zip(values, others, strict=True))


def _step(domain: Domain, value: Any, sigma: float, unit: float) -> Any:
    """One step from ``value``, ``unit`` being the uniform number that decides it."""
    if isinstance(domain, Choice):
        stay = 1.0 - 2.0 * _NORMAL.cdf(-0.5 / (domain.count * sigma))
        if domain.count == 1 or unit < stay:
            return domain.check(value)
        other = min(int((unit - stay) / (1.0 - stay) * (domain.count - 1)), domain.count - 2)
        return domain.value_at(other + (other >= domain.index(value)))
    center = domain.to_unit(value)
    low, high = _NORMAL.cdf(-center / sigma), _NORMAL.cdf((1.0 - center) / sigma)
    at = low + unit * (high - low)
    if not 0.0 < at < 1.0:
        return domain.from_unit(0.0 if at <= 0.0 else 1.0)
    return domain.from_unit(center + sigma * _NORMAL.inv_cdf(at))
