"""Grid search: every configuration of a full factorial, once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from penstock.core import Config
from penstock.sample._base import Observation, Sampler, started
from penstock.space import Space


@final
class Grid(Sampler):
    """All combinations in order, the last domain changing fastest; exhausted after the last one.

    Conditions are respected: a combination in which a domain is inactive appears once.

    Args:
        resolution: How many values to take of each continuous domain, evenly spread with both ends (log
            domains by their logarithm); or by name, of any domain. Needed where a Float has no step.
    """

    learns = False

    def __init__(self, resolution: int | Mapping[str, int] | None = None) -> None:
        self._resolution = resolution
        self._space: Space | None = None
        self._rest: Iterator[dict[str, Any]] = iter(())

    @property
    def ends(self) -> bool:
        """After the last combination."""
        return True

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin at the first combination.

        Raises:
            SpaceError: A continuous domain has no resolution.
        """
        self._space, self._rest = space, space.grid(self._resolution)

    def ask(self, n: int) -> list[Config]:
        """The next ``n`` combinations, or what is left."""
        started(self, self._space)
        return list(itertools.islice(self._rest, n))

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Pass over as many combinations."""
        for _ in itertools.islice(self._rest, len(configs)):
            pass

    def adopt(self, config: Config, trial: int) -> None:
        """Nothing to learn."""

    def tell(self, observation: Observation) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"Grid({'' if self._resolution is None else f'resolution={self._resolution!r}'})"
