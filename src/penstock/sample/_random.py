"""Random search: every configuration drawn on its own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random as Generator
from typing import ClassVar, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.sample._base import Observation, Sampler
from penstock.sample._seed import mixed
from penstock.space import Space


@final
class Random(Sampler):
    """Uniform in the unit cube of the space: log domains by their logarithm, choices evenly."""

    learns: ClassVar[bool] = False

    def __init__(self) -> None:
        self._space: Space | None = None
        self._seed = 0
        self._asked = 0
        self._generator = Generator()

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin at the first proposal."""
        self._space, self._seed, self._asked = space, seed, 0

    def ask(self, n: int) -> list[Config]:
        """``n`` configurations."""
        if self._space is None:
            raise InvalidInput("Random was asked before it was started. Call start(space, ...) first.")
        first, self._asked = self._asked, self._asked + n
        configs: list[Config] = []
        for index in range(first, first + n):
            self._generator.seed(mixed(self._seed, index))
            configs.append(self._space.sample(self._generator))
        return configs

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Count the proposals as answered."""
        self._asked += len(configs)

    def adopt(self, config: Config, trial: int) -> None:
        """Nothing to learn."""

    def tell(self, observation: Observation) -> None:
        """Nothing to learn."""
