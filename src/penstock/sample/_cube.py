"""Cube: many points of a space at once, as numpy sees them.

Imports numpy; imported lazily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from penstock.core import Config
from penstock.space import Choice, Int, Space

Array: TypeAlias = NDArray[np.float64]


@final
class Cube:
    """Points of the unit cube of a space, one number per domain, and their encoding for models.

    Discrete domains are snapped to the middles of their bins, so that two points are the same configuration exactly
    when their rows are equal; inactive domains lie at the filler.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        domains = [space[name] for name in space.names]
        self.counts = np.array([math.inf if d.count is None else d.count for d in domains])
        self.choices = np.array([isinstance(d, Choice) for d in domains], dtype=bool)
        self.varies = self.counts > 1
        self._logs = [(i, d) for i, d in enumerate(domains) if isinstance(d, Int) and d.log]
        self._bins = np.array(
            [d.count is not None and not (isinstance(d, Int) and d.log) for d in domains], dtype=bool
        )
        self._conditional = any(d.when is not None for d in domains)
        self._plain = not self.choices.any()
        # The least step that changes a domain's value, for walks over discrete ones.
        self.steps = np.where(np.isinf(self.counts), 0.0, 1.0 / np.maximum(self.counts, 1.0))
        self.dimensions = space.width(one_hot=True)

    def __len__(self) -> int:
        return len(self.counts)

    def snap(self, units: Array) -> Array:
        """The points of configurations nearest to given ones, in place."""
        np.clip(units, 0.0, 1.0, out=units)
        bins = self._bins
        if bins.any():
            counts = self.counts[bins]
            units[:, bins] = (np.minimum(np.floor(units[:, bins] * counts), counts - 1) + 0.5) / counts
        for i, domain in self._logs:
            low, high = math.log(domain.low - 0.5), math.log(domain.high + 0.5)
            values = np.clip(np.rint(np.exp(low + units[:, i] * (high - low))), domain.low, domain.high)
            units[:, i] = np.clip((np.log(values) - low) / (high - low), 0.0, 1.0)
        if self._conditional:
            for i, row in enumerate(units):
                units[i] = self.space.encode(self.space.decode(row.tolist()))
        return units

    def expand(self, units: Array) -> Array:
        """The encoding with one number per value of a choice."""
        if self._plain:
            return units
        parts = []
        for i, count in enumerate(self.counts):
            column = units[:, i]
            if not self.choices[i]:
                parts.append(column[:, None])
                continue
            hot = np.zeros((len(units), int(count)))
            index = np.minimum((column * count).astype(int), int(count) - 1)
            hot[np.arange(len(units)), index] = 1.0
            if self._conditional:
                name = self.space.names[i]
                if self.space[name].when is not None:
                    # Half is the filler, but also the middle value of an odd count: ask the configuration.
                    middle = np.flatnonzero(column == 0.5)
                    for row in middle:
                        if name not in self.space.decode(units[row].tolist()):
                            hot[row] = 0.5
            parts.append(hot)
        return np.hstack(parts)

    def units(self, configs: Sequence[Config]) -> Array:
        """The points of configurations."""
        return np.array([self.space.encode(c) for c in configs], dtype=float).reshape(len(configs), len(self))

    def config(self, unit: Array) -> dict[str, Any]:
        """The configuration at a snapped point."""
        return self.space.decode(unit.tolist())

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Uniform points."""
        return self.snap(rng.random((count, len(self))))

    def near(self, centers: Array, each: int, sigma: float, rng: np.random.Generator) -> Array:
        """Points around centers, ``each`` per center and center by center: some domains moved, at least one."""
        count, d = len(centers) * each, len(self)
        points = np.repeat(centers, each, axis=0)
        moved = rng.random((count, d)) < max(0.35, 1.5 / d)
        moved[np.arange(count), rng.integers(0, d, count)] = True
        width = np.maximum(sigma, 0.8 * self.steps)
        stepped = points + width * rng.standard_normal((count, d))
        if self.choices.any():
            stepped[:, self.choices] = rng.random((count, int(self.choices.sum())))
        inside = np.abs(
            np.mod(stepped + 1.0, 2.0) - 1.0
        )  # reflected at the walls: clipping would pile up there
        return self.snap(np.where(moved, inside, points))
