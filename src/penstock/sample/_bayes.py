"""Bayes: Gaussian-process expected improvement, with HyperPower's constraint-aware acquisitions (3.4 and 3.5)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from penstock.core import Config, TrialRecord, TrialStatus, Values
from penstock.core.errors import InvalidInput, SpaceError
from penstock.goal import Goal
from penstock.predict import one_thread
from penstock.sample._base import Observation, Sampler, started
from penstock.sample._gate import Gate
from penstock.sample._seed import mixed
from penstock.space import Space

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.sample._cube import Cube
    from penstock.sample._gp import Hyper, Process

    Array = NDArray[np.float64]

_MOST_POINTS = 400  # of which a process is made; the cost grows with the cube of it
_MOST_FITTED = 200  # of which hyperparameters are fitted
_EVERY = 40  # up to so many results, hyperparameters are fitted anew after each; then at every tenth more
_UNIFORM = 512
_AROUND_BEST = 256
_PARENTS = 4
_CHILDREN = 40
_COARSE = (0.15, 0.07)
_FINE = (0.03, 0.01)
_POOL = 2  # starting points to choose from: more of them push all into the corners
_MANY = 8  # more domains than that: proposals stay near the best
_ENOUGH = (
    2.5  # results per domain that a process of all of them is worth something with: then every other one
)
_AFAR = 3  # proposals from everywhere before a trust region that is too small begins anew
_REACH = 0.15  # half the width of what is near, at first; and its bounds
_LEAST_REACH, _MOST_REACH = 0.02, 0.4
_RIVALS = 4  # allowed draws of which the one nearest to the limits is taken, for two starting points of three

# Worse than the median by more than the best is better: how bad does not matter (benchmarks/papers/hyperpower).
_BAD = 1.0

Weight = Literal["indicator", "probability", "gp"]


class Earlier(Protocol):
    """A ``Study`` that was run, as far as its results are transferred."""

    @property
    def goal(self) -> Goal:
        """What its results are measured by."""

    @property
    def trials(self) -> Sequence[TrialRecord]:
        """Its trials."""


@dataclass(slots=True)
class _Told:
    config: Config
    values: Values | None
    epoch: int
    final: bool


@dataclass(frozen=True, slots=True)
class _Model:
    process: Process
    base: Any  # a function of points that the process deviates from, or None
    best: float
    leader: int | None  # which of the results is the best of those the limits allow


@final
class Bayes(Sampler):
    """Proposes where a Gaussian process of the results expects the largest improvement.

    Without limits it is plain expected improvement. With limits (``Study(limits=...)`` hands them over, or ``gate=``)
    it knows them:

    - ``weight="indicator"``: **HW-IECI**, expected improvement where all limits are predicted to be kept and none
      elsewhere (HyperPower Eq. 3).
    - ``weight="probability"``: **HW-CWEI** by the predictors' own doubt: expected improvement times the
      probability that the limits are kept.
    - ``weight="gp"``: HW-CWEI with a Gaussian process per limit, of the values at the points tried so far.

    Whatever the weight, nothing that is predicted to violate a limit is proposed.

    Any space: log domains by their logarithm, choices by indicators, inactive domains at a filler value. Observations
    may be noisy. Pending trials count with the value the process expects of them, so parallel proposals differ.
    A failure counts as the worst result. Under a multi-fidelity scheduler it learns from the longest training of
    which there are enough results (BOHB's rule); trials stopped before count as no better than the worst of them.
    Several objectives are joined by random weights that change with every proposal (ParEGO).

    Args:
        gate: Limits and their predictors, where no study hands them over.
        weight: How limits count, see above.
        startup: Proposals before the model, spread over what the limits allow; default 5 and one per two domains.
        transfer: An earlier study of the same space, run or loaded, on another scale perhaps: the shape of its results
            is where the model starts from, as far as it proves right. Or its trials, which then are measured by the
            goal of the study to come, or ``Observation``s (lower is better).

    Raises:
        InvalidInput: One of these is something else, or the earlier study has no results.
    """

    _records: tuple[TrialRecord, ...] = ()  # here too: samplers of older stores have none

    def __init__(
        self,
        *,
        gate: Gate | None = None,
        weight: Weight = "indicator",
        startup: int | None = None,
        transfer: Earlier | Iterable[Observation] | Iterable[TrialRecord] = (),
    ) -> None:
        if weight not in ("indicator", "probability", "gp"):
            raise InvalidInput(f'Bayes: weight is {weight!r}; give "indicator", "probability" or "gp".')
        if startup is not None and (isinstance(startup, bool) or not isinstance(startup, int) or startup < 1):
            raise InvalidInput(f"Bayes: startup is {startup!r}; give a whole number of at least 1.")
        if gate is not None and not isinstance(gate, Gate):
            raise InvalidInput(f"Bayes: gate is {gate!r}; give Gate(limits, predictors).")
        self._gate = gate
        self._shared = False  # somebody else tells the gate what was measured
        self._weight = weight
        self._startup = startup
        self._transfer, self._records = _earlier(transfer)
        self._space: Space | None = None
        self._cube: Cube | None = None
        self._seed = 0
        self._objectives = 1
        self._asked = 0
        self._told: dict[int, _Told] = {}
        self._pending: dict[int, Config] = {}
        self._nameless: list[Config] = []
        self._fitted: tuple[bytes, Hyper] | None = None
        self._earlier: Process | None = None

    @property
    def gate(self) -> Gate | None:
        """The limits it knows, if any."""
        return self._gate

    def constrained(self, gate: Gate) -> Bayes:
        """The same sampler with limits; a study calls it."""
        other = copy.copy(self)
        other._gate, other._shared = gate, True
        return other

    def toward(self, goal: Goal) -> Bayes:
        """The same sampler, trials to transfer measured by a goal; a study calls it.

        Raises:
            InvalidInput: No trial has what the goal is about.
        """
        if not self._records:
            return self
        other = copy.copy(self)
        other._transfer, other._records = _results(goal, self._records), ()
        return other

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin with nothing known but an earlier study's results.

        Raises:
            SpaceError: A configuration to transfer is not of the space.
            InvalidInput: Results to transfer are not of so many objectives, or trials whose goal nobody told.
        """
        if self._records:
            raise InvalidInput(
                "Bayes: transfer has trials, which don't tell what is better. Give the study: transfer=study, or "
                "transfer=pk.Study.load(...)."
            )
        self._space, self._seed, self._objectives, self._asked = space, seed, objectives, 0
        self._cube = None
        self._told, self._pending, self._nameless = {}, {}, []
        self._fitted, self._earlier = None, None
        if self._gate is not None and not self._shared:
            self._gate.start()
        for told in self._transfer:
            try:
                space.validate(told.config)
            except SpaceError as error:
                raise SpaceError(
                    f"Bayes: trial {told.trial} to transfer, {dict(told.config)!r}, is not of the space. {error}"
                ) from None
            if told.values is not None and len(told.values) != objectives:
                raise InvalidInput(
                    f"Bayes: trial {told.trial} to transfer has {len(told.values)} values, but the study has "
                    f"{objectives}. Transfer from a study of the same objectives."
                )

    def ask(self, n: int) -> list[Config]:
        """``n`` proposals, one after the other: each knows of those before it."""
        space = started(self, self._space)
        configs: list[Config] = []
        if n > 0:
            with one_thread():
                for _ in range(n):
                    config = self._propose(space)
                    self._asked += 1
                    self._nameless.append(config)
                    configs.append(space.validate(config))
        return configs

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Take proposals as answered: they are pending."""
        self._asked += len(configs)
        for config, trial in zip(configs, trials, strict=True):
            self._pending[trial] = dict(config)

    def adopt(self, config: Config, trial: int) -> None:
        """Learn a trial's number; it is pending."""
        if trial in self._pending or trial in self._told:
            return
        if config in self._nameless:
            self._nameless.remove(config)
        self._pending[trial] = copy.deepcopy(dict(config))

    def withdraw(self, config: Config) -> None:
        """Propose anew in its place: the gate has measured it, and will not allow it again."""
        if config in self._nameless:
            self._nameless.remove(config)
            self._asked -= 1

    def tell(self, observation: Observation) -> None:
        """Learn a result; a later one of the same trial supersedes it."""
        trial, values = observation.trial, observation.values
        if self._gate is not None and not self._shared:
            self._gate.hear(trial, observation.config, observation.metrics)
        if values is not None and not all(math.isfinite(value) for value in values):
            values = None
        if values is not None and len(values) != self._objectives:
            raise InvalidInput(
                f"Trial {trial} was told with {len(values)} values, but the study has {self._objectives}."
            )
        self.adopt(observation.config, trial)
        known = self._told.get(trial)
        if values is None and not observation.final:
            return
        if known is not None and values is not None and observation.epoch < known.epoch:
            return
        config = known.config if known is not None else self._pending[trial]
        self._told[trial] = _Told(config, values, observation.epoch, observation.final)
        if observation.final:
            self._pending.pop(trial, None)

    def __repr__(self) -> str:
        limits = "" if self._gate is None else f"gate={self._gate!r}, "
        return f"Bayes({limits}weight={self._weight!r})"

    # --- the proposal ---------------------------------------------------------------------------------------

    def _propose(self, space: Space) -> Config:
        import numpy as np

        from penstock.sample._cube import Cube

        if self._cube is None:
            self._cube = Cube(space)
        cube = self._cube
        rng = np.random.default_rng(mixed(self._seed, self._asked, "bayes"))
        points, values, waiting = self._data(cube, rng)
        taken = {_key(row) for row in (*points, *waiting)}
        startup = 5 + len(space) // 2 if self._startup is None else self._startup
        early = len(points) < 2 or len(points) + len(waiting) < startup or float(np.ptp(values)) == 0.0
        # An empty space has nothing to model: its one configuration is all there is.
        if not len(space) or (early and (not self._transfer or self._objectives > 1)):
            return self._spread(cube, np.vstack([points, waiting]), taken, rng)
        return self._improve(cube, points, values, waiting, taken, rng)

    def _spread(self, cube: Cube, known: Array, taken: set[bytes], rng: np.random.Generator) -> Config:
        """Of some allowed points the one farthest from all known.

        Where a limit matters, the best of what keeps it lies at it: else the limit could be dropped. So two of three
        starting points are near the limits, and every third one is anywhere, for limits that turn out not to matter.
        """
        import numpy as np

        pool = self._allowed_pool(cube, taken, rng, 1 if len(known) % 3 == 2 else _RIVALS)
        if not len(known):
            return cube.config(pool[0])
        here, there = cube.expand(pool), cube.expand(known)
        apart = ((here[:, None, :] - there[None]) ** 2).sum(axis=2).min(axis=1)
        return cube.config(pool[int(np.argmax(apart))])

    def _allowed_pool(
        self, cube: Cube, taken: set[bytes], rng: np.random.Generator, rivals: int = 1
    ) -> Array:
        """Some points that the limits allow and nobody has tried, each the nearest to them of ``rivals``."""
        import numpy as np

        if self._gate is None:
            rivals = 1
        wanted = rivals * _POOL
        found, excess = np.empty((0, len(cube))), np.empty(0)
        other: Array | None = None  # allowed, but tried before
        for _ in range(8):
            pool = cube.draw(_POOL if self._gate is None else 32 * _POOL, rng)
            over = np.zeros(len(pool)) if self._gate is None else self._excess(cube, pool)
            allowed = over <= 0.0
            fresh = allowed & np.array([_key(row) not in taken for row in pool])
            found, excess = np.vstack([found, pool[fresh]]), np.concatenate([excess, over[fresh]])
            if len(found) >= wanted:
                break
            if allowed.any() and other is None:
                other = pool[allowed]
        if len(found):
            groups = np.array_split(np.arange(min(len(found), wanted)), min(len(found), _POOL))
            return found[[int(group[np.argmax(excess[group])]) for group in groups]]
        if other is not None:
            return other
        assert self._gate is not None
        from penstock.sample._limited import nearest_allowed

        nearest = nearest_allowed(cube.space, self._gate, mixed(self._seed, self._asked, "search"))
        return np.array([cube.space.encode(nearest)])

    def _improve(
        self,
        cube: Cube,
        points: Array,
        values: Array,
        waiting: Array,
        taken: set[bytes],
        rng: np.random.Generator,
    ) -> Config:
        """Where the acquisition is largest: uniform points and ones near the best, then local search."""
        import numpy as np

        model = self._model(cube, points, values, waiting)
        low, high = self._box(cube, points, values, model)
        score = self._acquisition(cube, points, model, low, high)
        order = np.argsort(values, kind="stable")
        if self._gate is not None and len(points):
            allowed = self._allows(cube, points[order])
            order = np.concatenate([order[allowed], order[~allowed]])
        leaders = points[order[:5]]
        pool = [cube.draw(_UNIFORM, rng, low, high)]
        if len(leaders):
            pool += [cube.near(leaders, _AROUND_BEST // 10, sigma, rng) for sigma in (0.05, 0.2)]
        candidates = np.vstack(pool)
        scores = score(candidates)
        parents, heights = self._best_allowed(cube, candidates, scores, taken, _PARENTS)
        if not len(parents):
            return self._spread(cube, np.vstack([points, waiting]), taken, rng)
        for sigma in _COARSE:
            self._search(cube, score, parents, heights, sigma, taken, rng)
        self._climb(cube, model, score, parents, heights, taken, low, high)
        for sigma in _FINE:
            self._search(cube, score, parents, heights, sigma, taken, rng)
        return cube.config(parents[int(np.argmax(heights))])

    def _search(
        self,
        cube: Cube,
        score: Any,
        parents: Array,
        heights: Array,
        sigma: float,
        taken: set[bytes],
        rng: np.random.Generator,
    ) -> None:
        """Replace each parent by its best allowed child, if that is better."""
        children = cube.near(parents, _CHILDREN, sigma, rng)
        scores = score(children)
        for i in range(len(parents)):
            own = slice(i * _CHILDREN, (i + 1) * _CHILDREN)
            better = scores[own] > heights[i]
            if better.any():
                kids, kid_scores = children[own][better], scores[own][better]
                found, height = self._best_allowed(cube, kids, kid_scores, taken, 1)
                if len(found):
                    parents[i], heights[i] = found[0], height[0]

    def _box(self, cube: Cube, points: Array, values: Array, model: _Model) -> tuple[Array, Array]:
        """Bounds of the next proposal: near the best, or everywhere.

        In many dimensions a process of a few results is least sure of the corners, and expected improvement visits
        one after the other. So most proposals stay in a trust region around the best (Eriksson et al. 2019), which
        grows while it improves and shrinks while it does not; when it is too small, it begins anew after some proposals
        from everywhere. Once there are enough results, every other proposal is from everywhere anyway. Choices and
        what depends on them are free.
        """
        import numpy as np

        low, high = np.zeros(len(cube)), np.ones(len(cube))
        count = int(cube.varies.sum())
        known = len(values) >= _ENOUGH * count and len(values) % 2 == 0
        if model.leader is None or count <= _MANY or known:
            return low, high
        startup = 5 + len(cube) // 2 if self._startup is None else self._startup
        least = 1e-3 * float(np.ptp(np.sort(values)[: len(values) // 2 + 1]))  # less is no improvement
        reach, lucky, idle, afar = _REACH, 0, 0, 0
        best = float(values[:startup].min())
        for value in values[startup:].tolist():
            better = value < best - least
            best = min(best, value)
            if afar:
                afar = 0 if better else afar - 1
                continue
            lucky, idle = (lucky + 1, 0) if better else (0, idle + 1)
            if lucky == 3:
                reach, lucky = min(2.0 * reach, _MOST_REACH), 0
            elif idle == max(4, count // 2):
                reach, idle = reach / 2.0, 0
                if reach < _LEAST_REACH:
                    reach, afar = _REACH, _AFAR
        if afar:
            return low, high
        wide = np.maximum(reach, 1.01 * cube.steps)  # one step of a whole number at least
        bound = cube.bounded
        leader = points[model.leader]
        low[bound] = np.maximum(leader - wide, 0.0)[bound]
        high[bound] = np.minimum(leader + wide, 1.0)[bound]
        return low, high

    def _climb(
        self,
        cube: Cube,
        model: _Model,
        score: Any,
        parents: Array,
        heights: Array,
        taken: set[bytes],
        low: Array,
        high: Array,
    ) -> None:
        """Follow the gradient; where it leaves what the limits allow, go as far as they do."""
        import numpy as np

        from penstock.sample._gp import climb

        x = cube.expand(parents)
        free = cube.free
        if not free.any():
            return
        offset = np.zeros(len(x)) if model.base is None else model.base(x)
        within = np.column_stack([low, high])[cube.columns]
        moved = cube.collapse(climb(model.process, x, free, offset, model.best, within), parents)
        # Halfway points too: the summit may be forbidden, or beyond what the base's constant holds for.
        steps = np.array([1.0, 0.75, 0.5, 0.25, 0.1])
        for i in range(len(parents)):
            line = cube.snap(parents[i] + steps[:, None] * (moved[i] - parents[i]))
            scores = score(line)
            better = scores > heights[i]
            if better.any():
                found, height = self._best_allowed(cube, line[better], scores[better], taken, 1)
                if len(found):
                    parents[i], heights[i] = found[0], height[0]

    def _best_allowed(
        self, cube: Cube, points: Array, scores: Array, taken: set[bytes], wanted: int
    ) -> tuple[Array, Array]:
        """The ``wanted`` points of the highest scores that the limits allow and nobody has tried."""
        import numpy as np

        order = np.argsort(-scores, kind="stable")
        found: list[int] = []
        seen: set[bytes] = set()
        first, size = 0, wanted
        while first < len(order):
            chunk = [int(i) for i in order[first : first + size] if _key(points[i]) not in taken]
            # The first ones most often do, and asking of a configuration may mean tracing its network.
            first, size = first + size, min(2 * size, 32)
            chunk = [i for i in chunk if scores[i] > -math.inf]
            for i, allowed in zip(chunk, self._allows(cube, points[chunk]).tolist(), strict=True):
                key = _key(points[i])
                if allowed and key not in seen:
                    seen.add(key)
                    found.append(i)
                    if len(found) == wanted:
                        return points[found], scores[found]
        return points[found].copy(), scores[found].copy()

    def _allows(self, cube: Cube, points: Array) -> NDArray[np.bool_]:
        import numpy as np

        if self._gate is None or not len(points):
            return np.ones(len(points), dtype=bool)
        return self._excess(cube, points) <= 0.0

    def _excess(self, cube: Cube, points: Array) -> Array:
        """By how much points are over the limits, as far as a measurement might show (``Gate.within_reach``)."""
        assert self._gate is not None
        return self._gate.within_reach([cube.config(point) for point in points])

    def _acquisition(self, cube: Cube, points: Array, model: _Model, low: Array, high: Array) -> Any:
        """The function to maximise over points between bounds: log EI, plus the log probability of keeping limits."""
        import numpy as np

        from penstock.sample._gp import log_ei

        process, base, best = model.process, model.base, model.best
        gates: list[tuple[Process, float, float]] = []
        gate = self._gate
        if gate is not None and self._weight == "gp" and len(points) >= 2:
            gates = self._limit_processes(cube, points)

        def score(units: Array) -> Array:
            x = cube.expand(units)
            mean, std = process.predict(x)
            if base is not None:
                mean = mean + base(x)
            total = log_ei(mean, std, best)
            if gate is not None and self._weight == "probability":
                total = total + gate.log_probability([cube.config(unit) for unit in units])
            for other, sign, bound in gates:
                from scipy.special import log_ndtr

                g_mean, g_std = other.predict(x)
                total = total + log_ndtr(sign * (bound - g_mean) / g_std)
            outside = ((units < low - 1e-9) | (units > high + 1e-9)).any(axis=1)
            return np.where(outside, -np.inf, total)

        return score

    def _model(self, cube: Cube, points: Array, values: Array, waiting: Array) -> _Model:
        """The process of all results with the pending ones, the base it deviates from, and the value to improve on."""
        import numpy as np

        from penstock.sample._gp import Process

        x = cube.expand(points)
        y = _standardised(values)
        base = self._base(cube, x, y)
        deviation = y if base is None else y - base(x)
        hyper = self._hyper(cube, x, values)
        process = Process(x, deviation, hyper)
        believed = process.predict(x)[0] if len(x) else np.zeros(0)
        whole = believed if base is None else believed + base(x)
        allowed = self._allows(cube, points)
        # Noise: the least expected value, not the least observed one. Only what the limits allow can be improved on.
        best = float(whole[allowed].min()) if allowed.any() else float(whole.max()) if len(whole) else 0.0
        leader = int(np.argmin(np.where(allowed, values, np.inf))) if allowed.any() else None
        if len(waiting):
            ahead = cube.expand(waiting)
            guess = process.predict(ahead)[0]
            process = Process(np.vstack([x, ahead]), np.concatenate([deviation, guess]), hyper)
        return _Model(process, base, best, leader)

    def _hyper(self, cube: Cube, x: Array, values: Array) -> Hyper:
        """Hyperparameters from the first results; a function of the results alone, so a resume finds the same."""
        from penstock.sample._gp import fit

        used = min(len(x), _EVERY)
        while int(1.1 * used) + 1 <= len(x) and used >= _EVERY:
            used = int(1.1 * used) + 1
        used = min(used, _MOST_FITTED)
        x, values = x[:used], values[:used]
        key = x.tobytes() + values.tobytes()
        if self._fitted is None or self._fitted[0] != key:
            y = _standardised(values)
            base = self._base(cube, x, y)
            found = fit(x, y if base is None else y - base(x), 2 if used <= 20 else 1, additive=True)
            self._fitted = key, found
        return self._fitted[1]

    def _limit_processes(self, cube: Cube, points: Array) -> list[tuple[Process, float, float]]:
        """A process per limit of its quantity's values at the tried points, standardised (HyperPower 3.5)."""
        import numpy as np

        from penstock.sample._gp import Process, fit

        assert self._gate is not None
        configs = [cube.config(point) for point in points]
        x = cube.expand(points)
        found = []
        for limit in self._gate.limits:
            predicted = self._gate._predict_many(limit, configs)
            if predicted is None:
                continue
            g = np.asarray(predicted[0], dtype=float)
            center, spread = float(g.mean()), float(g.std()) or 1.0
            process = Process(x, (g - center) / spread, fit(x, (g - center) / spread))
            found.append((process, 1.0 if limit.at_most else -1.0, (limit.bound - center) / spread))
        return found

    # --- what is known --------------------------------------------------------------------------------------

    def _data(self, cube: Cube, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Points and values to learn from, and pending points, in the order of the trials' numbers."""
        import numpy as np

        told = sorted(self._told.items())
        done = [(trial, t) for trial, t in told if t.values is not None]
        level = _level([t.epoch for _, t in done], len(cube) + 3)
        scalars = self._scalars([t.values for _, t in done if t.values is not None], rng)
        full = [s for s, (_, t) in zip(scalars, done, strict=True) if t.epoch >= level]
        worst = max(full, default=0.0)
        value_of = dict(zip((trial for trial, _ in done), scalars, strict=True))
        configs: list[Config] = []
        values: list[float] = []
        waiting = [config for trial, config in sorted(self._pending.items()) if trial not in self._told]
        for trial, t in told:
            if t.values is None:
                if full:
                    configs.append(t.config)
                    values.append(worst)
            elif t.epoch >= level:
                configs.append(t.config)
                values.append(value_of[trial])
            elif t.final:
                configs.append(t.config)  # stopped or dropped on the way: no better than the worst
                values.append(max(worst, value_of[trial]) if value_of[trial] > worst else worst)
            else:
                waiting.append(t.config)
        waiting += self._nameless
        if len(configs) > _MOST_POINTS:
            order = np.argsort(values, kind="stable")
            half = _MOST_POINTS // 2
            rest = [int(i) for i in order[half:]]
            kept = sorted([int(i) for i in order[:half]] + sorted(rest)[-half:])
            configs, values = [configs[i] for i in kept], [values[i] for i in kept]
        return cube.units(configs), np.array(values, dtype=float), cube.units(waiting[-_MOST_POINTS:])

    def _scalars(self, values: Sequence[Values], rng: np.random.Generator) -> list[float]:
        """One number per result: itself, or a random augmented Tchebycheff sum of several (Knowles 2006)."""
        import numpy as np

        if self._objectives == 1 or not values:
            return [value[0] for value in values]
        table = np.array(values, dtype=float)
        low, span = table.min(axis=0), np.ptp(table, axis=0)
        table = (table - low) / np.where(span > 0, span, 1.0)
        weights = rng.dirichlet(np.ones(self._objectives))
        weighted = table * weights
        return [float(v) for v in weighted.max(axis=1) + 0.05 * weighted.sum(axis=1)]

    def _base(self, cube: Cube, x: Array, y: Array) -> Any:
        """What an earlier study says of points, scaled by how right it proves; None without one."""
        import numpy as np

        from penstock.sample._gp import Process, fit

        if self._objectives > 1:
            return None
        earlier = [told for told in self._transfer if told.values is not None and told.final]
        level = _level([told.epoch for told in earlier], len(cube) + 3)
        earlier = [told for told in earlier if told.epoch >= level]
        if len(earlier) < 2:
            return None
        if self._earlier is None:
            points = cube.expand(cube.units([told.config for told in earlier]))[-_MOST_POINTS:]
            values = _standardised(np.array([told.values[0] for told in earlier if told.values]))[
                -_MOST_POINTS:
            ]
            self._earlier = Process(points, values, fit(points, values))
        process = self._earlier
        # Regression through the mean with two results' worth of faith in it: y = rho * earlier.
        rho = 1.0
        if len(x):
            said = process.predict(x)[0]
            said = said - said.mean()
            rho = float(np.clip((said @ (y - y.mean()) + 2.0) / (said @ said + 2.0), 0.0, 1.0))

        def base(at: Array) -> Array:
            found: Array = rho * process.predict(at)[0]
            return found

        return base


def _earlier(transfer: Any) -> tuple[tuple[Observation, ...], tuple[TrialRecord, ...]]:
    """Results to transfer, and trials that are none before a goal is known."""
    goal = getattr(transfer, "goal", None)
    if isinstance(goal, Goal):
        return _results(goal, transfer.trials), ()
    if isinstance(transfer, Iterable) and not isinstance(transfer, str | bytes):
        given = tuple(transfer)
        if all(isinstance(each, Observation) for each in given):
            return given, ()
        if all(isinstance(each, TrialRecord) for each in given):
            return (), given
    raise InvalidInput(
        f"Bayes: transfer is {transfer!r}; give an earlier study, transfer=pk.Study.load('penstock.db', name), its "
        "trials, or Observations."
    )


def _results(goal: Goal, records: Iterable[TrialRecord]) -> tuple[Observation, ...]:
    """What is known of the trials that are over, by a goal: lower is better."""
    over = [record for record in records if record.status.is_end]
    failed = TrialStatus.FAILED
    found = [
        Observation(r.id, dict(r.config), None if r.status is failed else goal.score(r), r.epoch)
        for r in over
    ]
    if not any(told.values is not None for told in found):
        raise InvalidInput(
            f"Bayes: there is nothing to transfer: of {len(over)} trials that are over, none has a result of the goal "
            f"({goal}). Run the earlier study first, or leave transfer out."
        )
    return tuple(found)


def _standardised(values: Array) -> Array:
    """Mean 0 and deviation 1, very bad values cut off first: a diverged training must not flatten the rest."""
    import numpy as np

    if not len(values):
        return values
    middle, best = float(np.median(values)), float(values.min())
    cut = np.minimum(values, middle + _BAD * (middle - best)) if middle > best else values
    largest = float(np.abs(cut).max())
    if largest > 1e100:  # its square would be beyond all numbers
        cut = cut / largest
    spread = float(cut.std())
    result: Array = (cut - cut.mean()) / (spread if spread > 0 else 1.0)
    return result


def _key(point: Array) -> bytes:
    """Tells configurations apart; the last digits are rounding."""
    rounded: bytes = point.round(9).tobytes()
    return rounded


def _level(epochs: Sequence[int], enough: int) -> float:
    """The longest training of which there are enough results (Falkner et al. 2018, Algorithm 2)."""
    ordered = sorted(epochs)
    return ordered[-min(enough, len(ordered))] if ordered else 0
