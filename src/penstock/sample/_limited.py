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
from penstock.sample._gate import Gate
from penstock.sample._seed import Stream, mixed
from penstock.sample._warm import WarmStart
from penstock.space import Space

_ALL = 100_000  # draws of a sampler that ends: it has nothing else, so that no other configuration takes their place
_UNIFORM_DRAWS = 4096  # beyond, an allowed part this small is not found by drawing
_CHUNK = 256
_WALK_STEPS = 60
_NEIGHBOURS = 16


@final
class Limited(Sampler):
    """Passes on only what keeps the limits: no trial that is predicted to violate one starts.

    ``Limited(Random(), [power_w <= 90], predictors)`` is HyperPower's Rand, with ``Walk()`` its Rand-Walk. ``Bayes``
    knows limits itself and proposes by them. Of any other sampler, proposals are drawn until one is allowed, at most
    ``draws`` per trial; refused ones stay pending to it, which turns a learning sampler away from them. Then the
    trial is an allowed configuration drawn uniformly, or found by descending to the limits. One that ends (``Grid``) is
    drawn from to its end, for what it leaves out is not to be tried.

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
        self._sampler = _constrained(sampler, self.gate)
        self._draws = draws
        self._space: Space | None = None
        self._seed = 0
        self._asked = 0
        self._exhausted = False
        self._refused: list[Config] = []  # until one is allowed
        self.learns = sampler.learns or self.gate.learns
        self.refused = 0
        """How many proposals were refused since ``start``, those of a resume included."""
        self.queries: list[int] = []
        """How many proposals were looked at for each trial since ``start``, those of a resume included."""

    def __copy__(self) -> Limited:
        """One of its own, with a wrapped sampler of its own: each belongs to one study."""
        return Limited(copy.copy(self._sampler), self.gate, draws=self._draws)

    @property
    def ends(self) -> bool:
        """If the wrapped sampler does."""
        return self._sampler.ends

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin a study."""
        self._space, self._seed, self._asked = space, seed, 0
        self.refused, self.queries = 0, []
        self._exhausted, self._refused = False, []
        self.gate.start()
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
        """Ask the wrapped sampler again, and give it the numbers; one that knows the limits needs not be asked."""
        if isinstance(self._sampler, Bayes):
            self._asked += len(configs)
            self.queries += [1] * len(configs)
            self.gate.relearn()
            self._sampler.skip(configs, trials)
            return
        for _ in configs:
            self._next(replay=True)
        for config, trial in zip(configs, trials, strict=True):
            self._sampler.adopt(config, trial)

    def adopt(self, config: Config, trial: int) -> None:
        """Passed on."""
        self._sampler.adopt(config, trial)

    def tell(self, observation: Observation) -> None:
        """Passed on; what was measured besides teaches the predictors."""
        self.gate.hear(observation.trial, observation.config, observation.metrics)
        self._sampler.tell(observation)

    def allows(self, config: Config) -> bool:
        """Whether a configuration keeps the limits, as far as is known; schedulers that change ones ask."""
        return self.gate.check(config).allowed

    def __repr__(self) -> str:
        return f"Limited({self._sampler!r}, {self.gate!r})"

    def _next(self, *, replay: bool = False) -> Config | None:
        space = started(self, self._space)
        self._asked += 1
        self.gate.next_trial()
        draws = max(self._draws, _ALL) if self._sampler.ends else self._draws
        for number in range(1, draws + 1):
            drawn = [] if self._exhausted else self._sampler.ask(1)
            if not drawn:
                self._exhausted = True
                return self._surest(number)
            measured = self.gate.probes
            if self.gate.settle(drawn[0], replay=replay):
                self.queries.append(number)
                self._refused = []
                return drawn[0]
            if self.gate.probes > measured:
                self._sampler.withdraw(drawn[0])
            self.refused += 1
            if not self.queries:
                self._refused.append(drawn[0])
        self.queries.append(draws + 1)
        self._refused = []
        return nearest_allowed(space, self.gate, mixed(self._seed, self._asked, "limited"))

    def _surest(self, number: int) -> Config | None:
        """When the wrapped sampler has no more: if nothing of it was allowed, what the predictions themselves allow.

        Raises:
            InvalidInput: Not even that, of all there was.
        """
        refused, self._refused = self._refused, []
        if not refused:
            return None
        found = _surest(self.gate, refused, self.gate.excess(refused).tolist())
        if found is None:
            nearest = min(refused, key=lambda config: self.gate.check(config).excess)
            where = f"among the {len(refused)} that {self._sampler!r} proposes"
            raise InvalidInput(_explain(self.gate, nearest, where))
        self.queries.append(number)
        return found


def _constrained(sampler: Sampler, gate: Gate) -> Sampler:
    """The sampler with the limits, if it is one that knows them or goes on with one."""
    if isinstance(sampler, WarmStart):
        return sampler.before(_constrained(sampler.then, gate))
    return sampler.constrained(gate) if isinstance(sampler, Bayes) else sampler


def _surest(gate: Gate, configs: Sequence[Config], heights: Sequence[float]) -> Config | None:
    """Where nothing is as sure as asked for: the surest of what is predicted to keep the limits, if anything is."""
    bare = gate.excess(configs, confidence=0.5).tolist()
    kept = [i for i, excess in enumerate(bare) if excess <= 0.0]
    return configs[min(kept, key=heights.__getitem__)] if kept else None


def nearest_allowed(space: Space, gate: Gate, seed: int) -> dict[str, Any]:
    """A configuration that keeps the limits: drawn uniformly, or found by descending from the best draws.

    Where nothing keeps them with the gate's confidence (a sensor that scatters by more than the space spans, say), the
    draw that most likely does of those that are predicted to.

    Raises:
        InvalidInput: None was found. Names the limit that is farthest from being kept and the point nearest to
            keeping it.
    """
    pool: list[dict[str, Any]] = []
    heights: list[float] = []
    for first in range(0, _UNIFORM_DRAWS, _CHUNK):  # by chunks: most often the first one holds what is sought
        configs = [space.sample(Stream(seed, index)) for index in range(first, first + _CHUNK)]
        for config, excess in zip(configs, gate.excess(configs).tolist(), strict=True):
            if excess <= 0.0:
                return config
            pool.append(config)
            heights.append(excess)
    # What the predictions themselves allow still is allowed.
    sure = _surest(gate, pool, heights)
    if sure is not None:
        return dict(sure)
    draw = Generator(seed)
    order = sorted(range(len(pool)), key=heights.__getitem__)
    nearest: tuple[float, dict[str, Any]] = heights[order[0]], pool[order[0]]
    for start in order[:3]:
        excess, config = heights[start], pool[start]
        for step in range(_WALK_STEPS):
            width = 0.3 * (1 - step / _WALK_STEPS) + 0.01
            moved = [_moved(space, config, width, draw) for _ in range(_NEIGHBOURS)]
            found = gate.excess(moved).tolist()
            least = min(range(_NEIGHBOURS), key=found.__getitem__)
            if found[least] <= 0.0:
                return moved[least]
            if found[least] < excess or (found[least] == excess and math.isfinite(excess)):
                excess, config = found[least], moved[least]
        if excess < nearest[0]:
            nearest = excess, config
    where = f"in {_UNIFORM_DRAWS} draws and a search from the best of them"
    raise InvalidInput(_explain(gate, nearest[1], where))


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


def _explain(gate: Gate, config: Config, where: str) -> str:
    verdict = gate.check(config)
    limit = verdict.tightest
    assert limit is not None
    value = limit.quantity.text(verdict.predictions[limit.name].mean)
    margin = "" if gate.confidence == 0.5 else f" (with a confidence of {gate.confidence:g})"
    return (
        f"No configuration that keeps {', '.join(map(str, gate.limits))} was found {where}. The tightest limit is "
        f"{limit}{margin}: the nearest configuration, {dict(config)!r}, is predicted to have {value}. Loosen the "
        "limit, or widen the space."
    )
