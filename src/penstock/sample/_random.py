"""Random search: every configuration drawn on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from penstock.core import Config
from penstock.sample._base import Observation, Sampler, started
from penstock.sample._seed import Stream
from penstock.space import Space


@final
class Random(Sampler):
    """Uniform in the unit cube of the space: log domains by their logarithm, choices evenly."""

    learns = False

    def __init__(self) -> None:
        self._space: Space | None = None
        self._seed = 0
        self._asked = 0

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin at the first proposal."""
        self._space, self._seed, self._asked = space, seed, 0

    def ask(self, n: int) -> list[Config]:
        """``n`` configurations."""
        sample = started(self, self._space).sample
        first, self._asked = self._asked, self._asked + n
        return [sample(Stream(self._seed, index)) for index in range(first, first + n)]

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Count the proposals as answered."""
        self._asked += len(configs)

    def adopt(self, config: Config, trial: int) -> None:
        """Nothing to learn."""

    def tell(self, observation: Observation) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return "Random()"
