"""Cube: many points of a space at once, as numpy sees them.

Imports numpy; imported lazily.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from penstock.core import Config
from penstock.space import Choice, Condition, Domain, Int, Space

Array: TypeAlias = NDArray[np.float64]
Test: TypeAlias = Callable[[Array], NDArray[np.bool_]]

FILLER = 0.5  # where Space.encode puts an inactive domain
_TABLE = 4096


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
        place = {name: i for i, name in enumerate(space.names)}
        self._tests: list[tuple[int, list[tuple[int, Test]]]] = []
        for name in space.order:  # parents first
            when = space[name].when
            if when is not None:
                tests = [(place[atom.name], _test(space[atom.name], atom)) for atom in when.atoms]
                self._tests.append((place[name], tests))
        self._plain = not self.choices.any()
        # The least step that changes a domain's value, for walks over discrete ones.
        self.steps = np.where(np.isinf(self.counts), 0.0, 1.0 / np.maximum(self.counts, 1.0))
        self.columns = np.concatenate(
            [[i] * (d.count if isinstance(d, Choice) else 1) for i, d in enumerate(domains)] or [[]]
        ).astype(int)
        self._numbers = ~self.choices[self.columns] if len(domains) else np.zeros(0, dtype=bool)
        # Numbers with many values can be moved as if they were continuous. Conditional ones can't: they may vanish.
        smooth = ~self.choices & (self.counts > 4) & np.array([d.when is None for d in domains], dtype=bool)
        self.free = smooth[self.columns] if len(domains) else np.zeros(0, dtype=bool)
        # Numbers that are part of every configuration: what "near a point" means is plain for them.
        self.bounded = ~self.choices & np.array([d.when is None for d in domains], dtype=bool)

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
        if self._tests:
            units[~self._active(units)] = FILLER
        return units

    def _active(self, units: Array) -> NDArray[np.bool_]:
        """Which domains are part of each point's configuration."""
        active = np.ones(units.shape, dtype=bool)
        for i, tests in self._tests:
            for parent, holds in tests:
                active[:, i] &= active[:, parent] & holds(units[:, parent])
        return active

    def expand(self, units: Array) -> Array:
        """The encoding with one number per value of a choice."""
        if self._plain:
            return units
        parts = []
        active = self._active(units) if self._tests else None
        for i, count in enumerate(self.counts):
            column = units[:, i]
            if not self.choices[i]:
                parts.append(column[:, None])
                continue
            hot = np.zeros((len(units), int(count)))
            index = np.minimum((column * count).astype(int), int(count) - 1)
            hot[np.arange(len(units)), index] = 1.0
            if active is not None:
                hot[~active[:, i]] = FILLER
            parts.append(hot)
        return np.hstack(parts)

    def collapse(self, x: Array, units: Array) -> Array:
        """Back from the encoding: numbers from ``x``, choices from ``units``."""
        points = units.copy()
        points[:, ~self.choices] = x[:, self._numbers]
        return points

    def units(self, configs: Sequence[Config]) -> Array:
        """The points of configurations."""
        return np.array([self.space.encode(c) for c in configs], dtype=float).reshape(len(configs), len(self))

    def config(self, unit: Array) -> dict[str, Any]:
        """The configuration at a snapped point."""
        return self.space.decode(unit.tolist())

    def draw(
        self, count: int, rng: np.random.Generator, low: Array | float = 0.0, high: Array | float = 1.0
    ) -> Array:
        """Uniform points, between bounds as far as discrete values allow."""
        return self.snap(low + (high - low) * rng.random((count, len(self))))

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


def _test(domain: Domain, atom: Any) -> Test:
    """A condition's test on one parent, for many of its unit numbers at once."""
    count = domain.count
    if count is not None and count <= _TABLE:
        units = [domain.to_unit(domain.value_at(i)) for i in range(count)]
        table = np.array([_holds(atom, domain.value_at(i)) for i in range(count)])
        order = np.argsort(units)
        edges, sorted_table = np.array(units)[order], table[order]

        def among(column: Array) -> NDArray[np.bool_]:
            at = np.clip(np.searchsorted(edges, column), 0, count - 1)
            before = np.maximum(at - 1, 0)
            nearer = np.abs(edges[before] - column) < np.abs(edges[at] - column)
            found: NDArray[np.bool_] = sorted_table[np.where(nearer, before, at)]
            return found

        return among
    if count is not None:
        return lambda column: np.array(
            [_holds(atom, domain.from_unit(u)) for u in column.tolist()], dtype=bool
        )
    data = atom.to_json()
    bound = domain.to_unit(data["bound"])
    above = data["test"] == "greater"
    return lambda column: column > bound if above else column < bound


def _holds(atom: Condition, value: Any) -> bool:
    return atom.holds({atom.parents[0]: value})
