"""Limited: any sampler under limits that are known before training, by rejection (HyperPower's Rand and Rand-Walk)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from random import Random as Generator
from typing import Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.goal import Limit
from penstock.predict import Predictors
from penstock.sample._base import Observation, Sampler, started
from penstock.sample._bayes import Bayes
from penstock.sample._gate import Gate, Verdict
from penstock.sample._seed import Stream, mixed
from penstock.space import Space

_UNIFORM_DRAWS = 4096  # beyond, an allowed part this small is not found by drawing
_WALK_STEPS = 400


@final
class Limited(Sampler):
    """Passes on only what keeps the limits: no trial that is predicted to violate one starts.

    ``Limited(Random(), [power_w <= 90], predictors)`` is HyperPower's Rand, with ``Walk()`` its Rand-Walk. ``Bayes``
    knows limits itself and proposes by them. Of any other sampler, proposals are drawn until one is allowed, at most
    ``draws`` per trial; refused ones stay pending to it, which turns a learning sampler away from them. Then the
    trial is an allowed configuration drawn uniformly, or found by descending to the limits.

    Pure and reproducible as samplers must be. A resume asks the wrapped sampler again, for the number of refused
    draws is not in the journal: it costs what the proposals did.

    Args:
        sampler: The sampler.
        limits: The limits, or a ``Gate`` of them.
        predictors: Of the limits' quantities, from a profile.
        draws: At most so many draws per trial.
        confidence: As in ``Gate``.
    """

    def __init__(
        self,
        sampler: Sampler,
        limits: Gate | Iterable[Limit] | Limit,
        predictors: Predictors | None = None,
        *,
        draws: int = 200,
        confidence: float = 0.5,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise InvalidInput(
                f"Limited: {sampler!r} is not a sampler. Write Limited(Random(), [power_w <= 90])."
            )
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise InvalidInput(f"Limited: draws is {draws!r}; give a whole number of at least 1.")
        if isinstance(limits, Gate) and predictors is not None:
            raise InvalidInput("Limited: a Gate has its predictors already. Give limits, or drop predictors.")
        self.gate = limits if isinstance(limits, Gate) else Gate(limits, predictors, confidence=confidence)
        self._sampler = sampler.constrained(self.gate) if isinstance(sampler, Bayes) else sampler
        self._draws = draws
        self._space: Space | None = None
        self._seed = 0
        self._asked = 0
        self._exhausted = False
        self.learns = sampler.learns or self.gate.learns
        self.refused = 0
        """How many draws were refused since ``start``, those of a resume included."""

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin a study."""
        self._space, self._seed, self._asked, self.refused = space, seed, 0, 0
        self._exhausted = False
        self._sampler.start(space, objectives=objectives, seed=seed)

    def ask(self, n: int) -> list[Config]:
        """Up to ``n`` allowed configurations.

        Raises:
            InvalidInput: Nothing that keeps the limits was found; names the tightest and the nearest point.
        """
        started(self, self._space)
        configs: list[Config] = []
        for _ in range(n):
            config = self._next()
            if config is None:
                break
            configs.append(config)
        return configs

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Ask the wrapped sampler again, and give it the numbers."""
        for config, trial in zip(configs, trials, strict=True):
            self._next()
            self._sampler.adopt(config, trial)

    def adopt(self, config: Config, trial: int) -> None:
        """Passed on."""
        self._sampler.adopt(config, trial)

    def tell(self, observation: Observation) -> None:
        """Passed on."""
        self._sampler.tell(observation)

    def observe(self, config: Config, values: dict[str, float]) -> dict[Limit, float]:
        """Learn what was measured of a trial; returns the limits it violates. A study calls it."""
        return self.gate.observe(config, values)

    def __repr__(self) -> str:
        return f"Limited({self._sampler!r}, {self.gate!r})"

    def _next(self) -> Config | None:
        space = started(self, self._space)
        self._asked += 1
        for _ in range(self._draws):
            drawn = [] if self._exhausted else self._sampler.ask(1)
            if not drawn:
                self._exhausted = True
                return None
            if self.gate.check(drawn[0]).allowed:
                return drawn[0]
            self.refused += 1
        return nearest_allowed(space, self.gate, mixed(self._seed, self._asked, "limited"))


def nearest_allowed(space: Space, gate: Gate, seed: int) -> dict[str, Any]:
    """A configuration that keeps the limits: drawn uniformly, or found by descending from the best draws.

    Raises:
        InvalidInput: None was found. Names the limit that is farthest from being kept and the point nearest to
            keeping it.
    """
    ranked: list[tuple[float, int, dict[str, Any]]] = []
    for index in range(_UNIFORM_DRAWS):
        config = space.sample(Stream(seed, index))
        excess = gate.check(config).excess
        if excess <= 0.0:
            return config
        ranked.append((excess, index, config))
    ranked.sort(key=lambda entry: entry[:2])
    draw = Generator(seed)
    nearest: tuple[float, dict[str, Any]] = ranked[0][0], ranked[0][2]
    for excess, _, config in ranked[:3]:
        for step in range(_WALK_STEPS):
            moved = _moved(space, config, 0.3 * (1 - step / _WALK_STEPS) + 0.01, draw)
            found = gate.check(moved).excess
            if found <= 0.0:
                return moved
            if found < excess or (found == excess and math.isfinite(found)):
                excess, config = found, moved
        if excess < nearest[0]:
            nearest = excess, config
    raise InvalidInput(_explain(gate, nearest[1], gate.check(nearest[1])))


def _moved(space: Space, config: Config, width: float, draw: Generator) -> dict[str, Any]:
    """A neighbour: one or two domains changed."""
    moved: dict[str, Any] = copy.deepcopy(dict(config))
    for name in draw.sample(sorted(moved), k=min(len(moved), 1 + (draw.random() < 0.5))):
        domain = space[name]
        unit = domain.to_unit(moved[name]) + draw.gauss(0.0, 1.0) * max(
            width, 1.0 / (domain.count or math.inf)
        )
        moved[name] = domain.from_unit(min(max(unit, 0.0), 1.0 - 1e-12))
    kept: dict[str, Any] = {}
    for name in space.order:
        if space.active(name, kept):
            kept[name] = moved[name] if name in moved else space[name].from_unit(draw.random())
    return kept


def _explain(gate: Gate, config: Config, verdict: Verdict) -> str:
    limit = verdict.tightest
    assert limit is not None
    value = limit.quantity.text(verdict.predictions[limit.name].mean)
    margin = "" if gate.confidence == 0.5 else f" (with a confidence of {gate.confidence:g})"
    return (
        f"No configuration that keeps {', '.join(map(str, gate.limits))} was found in {_UNIFORM_DRAWS} draws and a "
        f"search from the best of them. The tightest limit is {limit}{margin}: the nearest configuration, "
        f"{dict(config)!r}, is predicted to have {value}. Loosen the limit, or widen the space."
    )
