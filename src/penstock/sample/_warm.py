"""Warm start: given configurations first, and what an earlier study learned."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput, SpaceError
from penstock.sample._base import Observation, Sampler, started
from penstock.space import Space


@final
class WarmStart(Sampler):
    """Proposes given configurations, then goes on with another sampler, which learns from all of them.

    ``WarmStart([{"lr": 0.1}], then=TPE())``; ``WarmStart.from_observations(earlier, then=TPE())``.

    Args:
        configs: Configurations to run first, in this order.
        then: The sampler that follows.
        observations: Results of an earlier study (lower values are better), told to ``then`` before its first proposal.
            Its trials count as numbers of their own; they never clash with the study's.
    """

    def __init__(
        self,
        configs: Iterable[Config] = (),
        *,
        then: Sampler,
        observations: Iterable[Observation] = (),
    ) -> None:
        if not isinstance(then, Sampler):
            raise InvalidInput(
                f"WarmStart: then is {then!r}, not a sampler. Write WarmStart(configs, then=TPE())."
            )
        for name, given in (("configs", configs), ("observations", observations)):
            if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
                raise InvalidInput(
                    f"WarmStart: {name} is {given!r}, not a list. Write WarmStart([{{...}}, {{...}}], then=TPE())."
                )
        self._given = tuple(configs)
        self._earlier = tuple(observations)
        for told in self._earlier:
            if not isinstance(told, Observation):
                raise InvalidInput(f"WarmStart: {told!r} in observations is not an Observation.")
        self._then = then
        self._first: list[dict[str, Any]] = []
        self._asked = 0
        self._space: Space | None = None
        self.learns = then.learns

    @classmethod
    def from_observations(cls, observations: Iterable[Observation], *, then: Sampler) -> WarmStart:
        """A sampler that knows the results of an earlier study from the start."""
        return cls(then=then, observations=observations)

    @property
    def then(self) -> Sampler:
        """The sampler that follows."""
        return self._then

    def before(self, then: Sampler) -> WarmStart:
        """The same configurations and results before another sampler."""
        return WarmStart(self._given, then=then, observations=self._earlier)

    def __copy__(self) -> WarmStart:
        """One of its own, with a sampler of its own to follow: each belongs to one study."""
        return self.before(copy.copy(self._then))

    @property
    def ends(self) -> bool:
        """If the sampler that follows does."""
        return self._then.ends

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin with the given configurations.

        Raises:
            SpaceError: A configuration is not of the space; says which.
        """
        self._space, self._asked = space, 0
        self._first = self.check(space)
        self._then.start(space, objectives=objectives, seed=seed)
        numbers: dict[int, int] = {}
        for told in self._earlier:
            config = _checked(space, told.config, f"Observation of trial {told.trial}")
            if told.values is not None and len(told.values) != objectives:
                raise InvalidInput(
                    f"WarmStart: the observation of trial {told.trial} has {len(told.values)} values, but the study "
                    f"has {objectives}. Give observations of the same objectives."
                )
            if told.trial not in numbers:
                numbers[told.trial] = -1 - len(numbers)
                self._then.adopt(config, numbers[told.trial])
            self._then.tell(replace(told, trial=numbers[told.trial], config=config))
        for trial, number in numbers.items():
            last = [told for told in self._earlier if told.trial == trial][-1]
            if not last.final:  # the earlier study is over: nothing of it is pending
                config = space.validate(last.config)
                self._then.tell(replace(last, trial=number, config=config, final=True))

    def check(self, space: Space) -> list[dict[str, Any]]:
        """The given configurations as the space has them.

        Raises:
            SpaceError: One is not of the space; says which.
        """
        return [_checked(space, c, f"Configuration {i}") for i, c in enumerate(self._given)]

    def ask(self, n: int) -> list[Config]:
        """The given configurations, then those of the sampler that follows."""
        started(self, self._space)
        own = [dict(config) for config in self._first[self._asked : self._asked + n]]
        self._asked += len(own)
        return [*own, *(self._then.ask(n - len(own)) if n > len(own) else [])]

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Take the given ones as asked; the rest is the other sampler's."""
        own = min(len(configs), len(self._first) - self._asked)
        self._asked += own
        if len(configs) > own:
            self._then.skip(configs[own:], trials[own:])
        for config, trial in zip(configs[:own], trials[:own], strict=True):
            self._then.adopt(config, trial)

    def adopt(self, config: Config, trial: int) -> None:
        """Passed on."""
        self._then.adopt(config, trial)

    def withdraw(self, config: Config) -> None:
        """Passed on."""
        self._then.withdraw(config)

    def tell(self, observation: Observation) -> None:
        """Passed on."""
        self._then.tell(observation)

    def __repr__(self) -> str:
        earlier = f", observations=<{len(self._earlier)}>" if self._earlier else ""
        return f"WarmStart(<{len(self._given)} configurations>, then={self._then!r}{earlier})"


def _checked(space: Space, config: Config, what: str) -> dict[str, Any]:
    try:
        return space.validate(config)
    except SpaceError as error:
        raise SpaceError(f"WarmStart: {what}, {config!r}, is not of the space. {error}") from None
