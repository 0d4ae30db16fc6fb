"""Penstock's own policy: a Bayesian curve of cost over batch size, explored only while it pays.

What Zeus observes and throws away is used here:

- Cost = Epochs(b) x EpochCost(b). The two factors are modelled apart: epochs are noisy and independent of the
  device, the epoch cost is all but exact once profiled.
- Neighbouring batch sizes are alike. log Epochs and log EpochCost are Gaussian processes over log b around
  the shapes that theory expects: epochs ~ 1 + b/b_crit (beyond a critical batch size more samples do not help:
  McCandlish et al. 2018), epoch cost ~ 1 + b_sat/b (below saturation an epoch is bound by its number of steps).
  b_crit and b_sat are unknown and integrated over.
- A run that was stopped early says "more epochs than this": a censored observation.
- The default's power draw says how saturated the device is, before any other batch size was run.
- A batch size is explored if what one more observation is expected to save over the recurrences to come
  exceeds what it is expected to cost more now (the knowledge gradient), and the run is stopped where going on
  is expected to cost more than starting again with the best batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, ClassVar, final

from penstock.core.errors import InvalidInput
from penstock.recurring._cost import best_limit
from penstock.recurring._history import JobSpec, Seen, View
from penstock.recurring._policy import Choice, Policy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Index = NDArray[np.intp]

HORIZON = 30
"""Recurrences a job is expected to have ahead at least: a month of nights.

A job that has gone on for longer is expected to go on for longer: the geometric mean of this and its age. (Its age
itself, as for any process of unknown length, makes for exploration that does not pay within the paper's horizons.)
"""

NOISE = 0.1
"""Prior relative spread of epochs to target between runs: "as large as 14%" (Zeus section 3.2)."""

REPEATS = (1, 3, 9)
"""Exploring an arm may take several runs to pay: how many are considered (the KG(*) rule, Frazier & Powell 2010)."""

OUTLIER = 2.0
"""How much less a single run counts than the noise would say."""

LEAST_STOP = 1.5
"""No run is stopped below so many times the best mean cost: a stopped run teaches less than a finished one."""

STOPS = 3
"""Where so many runs in a row were stopped, it is the limit that is too low: it is doubled, and again after as many."""

FAILS_PER_OCTAVE = 0.05
"""Prior chance, per octave away from the nearest batch size that reached the target, that one never does."""

CUSUM_SLACK = 1.0
CUSUM_ALARM = 6.0
"""Drift alarm, in standard deviations: about three runs in a row that are three deviations out."""

NOISE_WEIGHT = 4.0
"""How many runs the prior spread counts for."""


@dataclass(frozen=True, slots=True)
class _Belief:
    """A Gaussian belief over the log of a positive function of the batch sizes."""

    mean: Array
    cov: Array


@final
class Curve(Policy):
    """A Bayesian cost curve over batch sizes with knowledge-gradient exploration.

    Args:
        horizon: Recurrences that are still to come. None: not known; see ``HORIZON``.
    """

    name: ClassVar[str] = "ours"

    def __init__(self, horizon: int | None = None) -> None:
        if horizon is not None and horizon < 1:
            raise InvalidInput(f"horizon must be at least 1 recurrence or None, got {horizon}.")
        self._horizon = horizon

    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""
        spec = view.spec
        recent = view.seen if spec.window is None else view.seen[-spec.window :]
        evidence = _gathered(view) if spec.window is None else _evidence(_own(spec, recent))
        if not evidence.logs:
            return self._with_limit(view, _before_any_success(spec, evidence), None)
        import numpy as np

        x = np.log2(np.asarray(spec.batch_sizes, dtype=np.float64))
        noise = evidence.noise
        epochs = _epochs_belief(spec, evidence, noise)
        costs = _epoch_cost_belief(view)
        index = {size: at for at, size in enumerate(spec.batch_sizes)}
        soon = (epochs, costs)
        for decision in view.pending:  # what is under way will be known soon: don't explore it twice
            at = index.get(decision.batch_size)
            if at is not None:
                soon = (_hallucinate(soon[0], at, noise**2), _hallucinate(soon[1], at, 1e-4))
        horizon = self._horizon or max(HORIZON, math.isqrt(HORIZON * len(view.seen)))
        good = np.log2(
            np.asarray([size for size in spec.batch_sizes if size in evidence.logs], dtype=np.float64)
        )
        fails = 1.0 - (1.0 - FAILS_PER_OCTAVE) ** np.min(np.abs(x[:, None] - good[None, :]), axis=1)
        banned = {index[size] for size in evidence.broken if size in index}
        # A batch size that never finished is a guess: one run at a time finds out (Zeus section 4.4 runs the best-known
        # size meanwhile).
        under_way = {decision.batch_size for decision in view.pending}
        banned |= {index[size] for size in under_way if size in index and size not in evidence.logs}
        at, stop, usual = _best_action(epochs, costs, soon, noise, 0.0 if retry else horizon, banned, fails)
        return self._with_limit(view, spec.batch_sizes[at], _cost_limit(spec, evidence, stop, usual))

    def _with_limit(self, view: View, size: int, cost_limit: float | None) -> Choice:
        limit_w, profile_w = thrifty_limits(view, size)
        return Choice(size, limit_w, profile_w, cost_limit)


def _before_any_success(spec: JobSpec, evidence: _Evidence) -> int:
    # The default is trusted. If it fails, its neighbours are tried, nearest first, and it again in turn.
    def failures(size: int) -> int:
        return len(evidence.beyond.get(size, ())) + evidence.crashes.get(size, 0)

    return min(spec.batch_sizes, key=lambda b: (failures(b), abs(math.log(b / spec.default)), b))


def thrifty_limits(view: View, size: int) -> tuple[float | None, tuple[float, ...]]:
    """The power limit to run at, and those to profile.

    The first batch size profiles all limits. Epoch cost is near-convex in the limit and its optimum moves slowly
    with the batch size, so another one profiles only the optimum of the nearest profiled batch size and its
    neighbours. A batch size that is run again is a contender: then what lies within two limits of its best is
    profiled too, until that is known, for a few percent of epoch cost add up over the recurrences.
    """
    spec = view.spec
    limits = spec.limits_w
    if not limits:
        return None, ()
    profile = {w: p for w, p in view.profiles.get(size, {}).items() if w in limits}
    if not profile:
        others = {b: p for b, p in view.profiles.items() if b != size and any(w in limits for w in p)}
        if not others:
            return None, tuple(reversed(limits))
        near = min(others, key=lambda b: (abs(math.log(b / size)), b))
        best, _ = best_limit(others[near], eta=spec.eta, max_power_w=spec.max_power_w)
        at = limits.index(best)
        return None, tuple(reversed(limits[max(0, at - 1) : at + 2]))
    best, _ = best_limit(profile, eta=spec.eta, max_power_w=spec.max_power_w)
    at = limits.index(best)
    missing = [w for w in limits[max(0, at - 2) : at + 3] if w not in profile]
    if not missing:
        return best, ()
    return None, tuple(sorted([best, *missing], reverse=True))


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the observations say of epochs, by batch size (in one pass: there may be thousands).

    Attributes:
        logs: Count, sum and sum of squares of log epochs of runs that reached the target.
        beyond: Epochs of runs that were stopped before it.
        crashes: Runs that failed by themselves and may have done so because of their batch size.
        noise: The relative spread of epochs between runs: pooled, with a prior.
        fewest: The least epochs of a run that reached the target.
        epoch_costs: What an epoch of the latest run cost.
        stopped: Runs that were stopped since the last one that reached the target.
    """

    logs: dict[int, tuple[int, float, float]]
    beyond: dict[int, list[float]]
    crashes: dict[int, int]
    noise: float
    fewest: dict[int, float]
    epoch_costs: dict[int, float]
    stopped: int

    @property
    def least(self) -> float | None:
        """The least that a run which reached the target would cost today: data grow, and old costs with them."""
        known = [n * self.epoch_costs[b] for b, n in self.fewest.items() if self.epoch_costs.get(b, 0.0) > 0]
        return min(known, default=None)

    @property
    def broken(self) -> set[int]:
        """Batch sizes that crashed twice (out of memory, say) and never succeeded: not feasible here."""
        return {size for size, n in self.crashes.items() if n >= 2 and size not in self.logs}


def _own(spec: JobSpec, seen: Sequence[Seen]) -> list[Seen]:
    sizes = set(spec.batch_sizes)
    return [one for one in seen if one.batch_size in sizes]


def _evidence(seen: Sequence[Seen]) -> _Evidence:
    """What observations say of the present regime."""
    gathering = _Gathering()
    gathering.take(seen)
    return gathering.evidence()


def _gathered(view: View) -> _Evidence:
    """The same for all of a view, going on where the last decision's view ended: most of it was there already."""
    known = view.memo.get(_Gathering)
    if isinstance(known, _Gathering) and known.given > len(view.seen):  # an older view, looked at again
        return _evidence(_own(view.spec, view.seen))
    if not isinstance(known, _Gathering):
        known = view.memo[_Gathering] = _Gathering()
    new = view.seen[known.given :]
    known.given = len(view.seen)
    known.take(_own(view.spec, new))
    evidence = known.evidence()
    if view.settled:
        return evidence
    # Costs that are translated change with the profiles; nothing else that was gathered does.
    present = _own(view.spec, view.seen)[known.began :]
    return replace(evidence, epoch_costs={s.batch_size: s.cost / s.epochs for s in present if _tells_cost(s)})


def _tells_cost(one: Seen) -> bool:
    return one.epochs > 0 and (one.reached or not one.error)


def _cost_limit(spec: JobSpec, evidence: _Evidence, stop: float | None, usual: float) -> float | None:
    """Where to stop a run: at beta times the least cost (Zeus section 4.4), or sooner, where starting again is cheaper.

    But not below what the best batch size usually costs, with some room: one lucky run would have all others stopped,
    and a run that is stopped early does not tell that it was luck. Nor for ever, if the luck was all there is to know.
    """
    if evidence.least is None:
        return stop
    cap = max(spec.beta * evidence.least, min(spec.beta, LEAST_STOP) * usual)
    return (cap if stop is None else min(cap, stop)) * 2.0 ** (evidence.stopped // STOPS)


@final
class _Gathering:
    """Gathers the observations of the present regime, one by one.

    Drift: epochs that keep departing from what their batch size used to take, beyond noise, to one side, mean that
    the job has changed (a two-sided CUSUM over standardised departures). Evidence then restarts where the
    departures began.
    """

    def __init__(self) -> None:
        self.given = 0
        self.began = 0
        """Where the present regime began."""
        self._seen: list[Seen] = []
        self._at = 0
        self._restart()
        self._up_from = self._down_from = 0

    def _restart(self) -> None:
        self._logs: dict[int, tuple[int, float, float]] = {}
        self._beyond: dict[int, list[float]] = {}
        self._crashes: dict[int, int] = {}
        self._crashed_since: list[int] = []  # sizes of the runs that crashed since the last one that did not
        self._outage = False
        self._fewest: dict[int, float] = {}
        self._epoch_costs: dict[int, float] = {}
        self._stopped = 0
        self._squares, self._freedom = NOISE_WEIGHT * NOISE**2, NOISE_WEIGHT
        self._up = self._down = 0.0

    def evidence(self) -> _Evidence:
        """What was gathered so far; not to be changed, nor kept."""
        noise = math.sqrt(self._squares / self._freedom)
        return _Evidence(
            self._logs, self._beyond, self._crashes, noise, self._fewest, self._epoch_costs, self._stopped
        )

    def take(self, seen: Sequence[Seen]) -> None:
        """Take in later observations."""
        self._seen.extend(seen)
        while self._at < len(self._seen):
            one = self._seen[self._at]
            size = one.batch_size
            n, total, square = self._logs.get(size, (0, 0.0, 0.0))
            if one.error and not one.reached:
                self._crashed(size)
                self._at += 1
                continue
            self._crashed_since.clear()
            self._outage = False
            log = math.log(max(one.epochs, 0.5))
            if n >= 2:
                departure = (log - total / n) / math.sqrt(self._squares / self._freedom * (1.0 + OUTLIER / n))
                if not one.reached:
                    # Stopped: at least so far out; nothing is known if it was stopped below the mean.
                    departure = max(departure, 0.0)
                if self._departed(departure):
                    continue
            if one.reached:
                if not self._logs:  # until now everything failed, so that nothing is known of any batch size
                    self._crashes.clear()
                if n:
                    self._squares += (log - total / n) ** 2 * n / (n + 1)
                    self._freedom += 1
                self._logs[size] = (n + 1, total + log, square + log * log)
                self._fewest[size] = min(self._fewest.get(size, math.inf), one.epochs)
                self._stopped = 0
            else:
                self._beyond.setdefault(size, []).append(one.epochs)
                self._stopped += 1
            if _tells_cost(one):
                self._epoch_costs[size] = one.cost / one.epochs
            self._at += 1

    def _crashed(self, size: int) -> None:
        """Count a crash, unless a batch size that works is among those that crash in a row: then it is an outage."""
        if self._outage or size in self._logs:
            self._outage = True
            for each in self._crashed_since:
                self._crashes[each] -= 1
            self._crashed_since.clear()
        else:
            self._crashed_since.append(size)
            self._crashes[size] = self._crashes.get(size, 0) + 1

    def _departed(self, departure: float) -> bool:
        """Whether the job has changed; then evidence begins anew where it did."""
        if self._up == 0.0:
            self._up_from = self._at
        if self._down == 0.0:
            self._down_from = self._at
        self._up = max(0.0, self._up + departure - CUSUM_SLACK)
        self._down = max(0.0, self._down - departure - CUSUM_SLACK)
        if self._up <= CUSUM_ALARM and self._down <= CUSUM_ALARM:
            return False
        self.began = self._at = self._up_from if self._up > CUSUM_ALARM else self._down_from
        self._restart()
        return True


@lru_cache(maxsize=64)
def _covariance(sizes: tuple[int, ...], scale: float, length: float, nugget: float) -> Array:
    import numpy as np

    return _kernel(np.log2(np.asarray(sizes, dtype=np.float64)), scale, length, nugget)


def _kernel(x: Array, scale: float, length: float, nugget: float) -> Array:
    import numpy as np

    gap = (x[:, None] - x[None, :]) / length
    smooth: Array = scale**2 * np.exp(-0.5 * gap**2) + nugget**2 * np.eye(len(x))
    return smooth


def _mixture(shapes: Array, log_prior: Array, kernel: Array, at: Index, y: Array, variance: Array) -> _Belief:
    """The belief given observations ``y`` at arms ``at``, with the shape parameters integrated out.

    Each row of ``shapes`` is a mean function; to each an unknown constant is added (a vague Gaussian). The
    posterior is a mixture of Gaussians with one covariance; its first two moments are returned.
    """
    import numpy as np

    full = kernel + 25.0  # the unknown constant
    inner = full[np.ix_(at, at)] + np.diag(variance)
    factor = np.linalg.cholesky(inner)
    gain = np.linalg.solve(inner, full[at]).T  # arms x observations
    rest = y[None, :] - shapes[:, at]
    white = np.linalg.solve(factor, rest.T)
    log_weight = log_prior - 0.5 * np.sum(white**2, axis=0)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    means = shapes + rest @ gain.T
    mean = weight @ means
    spread = means - mean
    cov = full - gain @ full[at] + (weight[:, None] * spread).T @ spread
    return _Belief(mean, cov)


def _epochs_belief(spec: JobSpec, evidence: _Evidence, noise: float) -> _Belief:
    import numpy as np

    arms = [(a, *evidence.logs[size]) for a, size in enumerate(spec.batch_sizes) if size in evidence.logs]
    at = np.asarray([a for a, _, _, _ in arms], dtype=np.intp)
    y = np.asarray([total / n for _, n, total, _ in arms])
    # Spreads differ between batch sizes and single runs may be outliers: few runs count for less than the pooled
    # noise says, as with a Student t.
    variance = np.asarray([noise**2 * (1.0 + OUTLIER / n) / n for _, n, _, _ in arms])
    shapes, prior = _epochs_shapes(spec.batch_sizes, spec.default)
    belief = _mixture(shapes, prior, _covariance(spec.batch_sizes, 0.2, 2.0, 0.1), at, y, variance)
    for arm, size in enumerate(spec.batch_sizes):
        for count in sorted(evidence.beyond.get(size, ()))[-3:]:
            belief = _beyond(belief, arm, math.log(max(count, 0.5)), noise**2)
    return belief


@lru_cache(maxsize=64)
def _epochs_shapes(sizes: tuple[int, ...], default: int) -> tuple[Array, Array]:
    """Mean functions of log epochs over the batch sizes, and the log of their prior weights."""
    import numpy as np

    x = np.log2(np.asarray(sizes, dtype=np.float64))
    critical = np.arange(x.min() - 2.0, x.max() + 4.5, 1.0)
    # Too small batches: gradients too noisy (Zeus section 4.4). The default is known to be large enough.
    low = np.concatenate([[-50.0], np.arange(x.min() - 3.0, math.log2(default) - 0.5, 1.0)])
    c, small = (grid.ravel() for grid in np.meshgrid(critical, low))
    shapes = np.log(1.0 + 2.0 ** (x[None, :] - c[:, None]) + 2.0 ** (2.0 * (small[:, None] - x[None, :])))
    prior = np.where(small < -40.0, math.log(0.5), math.log(0.5 / max(1, len(low) - 1)))
    return shapes, prior


def _epoch_cost_belief(view: View) -> _Belief:
    import numpy as np

    spec = view.spec
    points: list[tuple[int, float, float]] = []
    for arm, size in enumerate(spec.batch_sizes):
        cost = view.epoch_cost(size)
        if cost is not None and cost > 0:
            points.append((arm, math.log(cost), 0.01**2))
        elif view.foreign.get(size, 0.0) > 0:
            points.append((arm, math.log(view.foreign[size]), 0.15**2))
    if not points:  # nothing was timed: any scale will do
        points.append((spec.batch_sizes.index(spec.default), 0.0, 0.01**2))
    at = np.asarray([p[0] for p in points], dtype=np.intp)
    y = np.asarray([p[1] for p in points])
    variance = np.asarray([p[2] for p in points])
    shapes, sat = _cost_shapes(spec.batch_sizes)
    guess, width = _saturation(view)
    prior = -0.5 * ((sat - guess) / width) ** 2
    return _mixture(shapes, prior, _covariance(spec.batch_sizes, 0.1, 2.0, 0.05), at, y, variance)


@lru_cache(maxsize=64)
def _cost_shapes(sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean functions of log epoch costs over the batch sizes, and the log2 b_sat of each."""
    import numpy as np

    x = np.log2(np.asarray(sizes, dtype=np.float64))
    sat = np.arange(x.min() - 6.0, x.max() + 6.5, 1.0)
    return np.log(1.0 + 2.0 ** (sat[:, None] - x[None, :])), sat


def _saturation(view: View) -> tuple[float, float]:
    """What the power draw of a profiled batch size tells of log2 b_sat: mean and standard deviation.

    A device that draws little of its limit waits most of the time, and a larger batch would fill it.
    """
    spec = view.spec
    top = spec.limits_w[-1] if spec.limits_w else None
    known = [b for b in spec.batch_sizes if top is not None and top in view.profiles.get(b, {})]
    if not known or top is None:
        return math.log2(spec.default) - 2.0, 4.0
    size = spec.default if spec.default in known else known[0]
    draw = view.profiles[size][top][1] / top
    # Between an idle draw of about a fifth and a full one of about four fifths of the limit.
    busy = min(0.95, max(0.05, (draw - 0.2) / 0.6))
    return math.log2(size) + math.log2(1.0 / busy - 1.0), 2.0


def _hallucinate(belief: _Belief, at: int, variance: float) -> _Belief:
    """The belief once arm ``at`` will have been observed, whatever the outcome: same mean, less variance."""
    import numpy as np

    column = belief.cov[:, at]
    return _Belief(belief.mean, belief.cov - np.outer(column, column) / (column[at] + variance))


def _beyond(belief: _Belief, at: int, bound: float, variance: float) -> _Belief:
    """The belief once a noisy draw of arm ``at`` is known to exceed ``bound``: moments of the truncated Gaussian."""
    import numpy as np

    column = belief.cov[:, at]
    scale = math.sqrt(column[at] + variance)
    z = (belief.mean[at] - bound) / scale
    ratio = _inverse_mills(z)
    mean = belief.mean + column * (ratio / scale)
    cov = belief.cov - np.outer(column, column) * (ratio * (z + ratio) / scale**2)
    return _Belief(mean, cov)


def _inverse_mills(z: float) -> float:
    """phi(z) / Phi(z), without underflow."""
    if z < -8.0:  # asymptotic: Phi(z) ~ phi(z)/|z| (1 - 1/z^2)
        return -z / (1.0 - 1.0 / z**2)
    return math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi) / (0.5 * math.erfc(-z / math.sqrt(2.0)))


def _best_action(
    epochs: _Belief,
    costs: _Belief,
    soon: tuple[_Belief, _Belief],
    noise: float,
    horizon: float,
    banned: set[int],
    fails: Array,
) -> tuple[int, float | None, float]:
    """The arm with the least expected cost now, less what observing it saves later; where to stop it; the least cost.

    ``soon`` are the beliefs once the runs under way will have ended: what there is left to learn.
    """
    import numpy as np

    log_mean = epochs.mean + costs.mean
    var = np.maximum(np.diag(epochs.cov), 0.0) + np.maximum(np.diag(costs.cov), 0.0)
    allowed = np.asarray([a not in banned for a in range(len(log_mean))])
    if not allowed.any():
        allowed[:] = True
    mean = np.where(allowed, np.exp(np.minimum(log_mean + 0.5 * var, 600.0)), np.inf)
    best = int(np.argmin(mean))
    now, stop = _run_costs(log_mean, var + noise**2, float(mean[best]), fails)
    now[best], stop[best] = mean[best], np.inf
    value = np.full(len(mean), -np.inf)
    for repeats in REPEATS:
        gain = float(mean[best]) - _after(*soon, noise / math.sqrt(repeats), mean)
        value = np.maximum(value, (horizon - repeats) * gain - repeats * (now - float(mean[best])))
    chosen = int(np.argmax(np.where(allowed, value, -np.inf)))
    return chosen, None if math.isinf(stop[chosen]) else float(stop[chosen]), float(mean[best])


def _after(epochs: _Belief, costs: _Belief, noise: float, mean: Array) -> Array:
    """Per arm: the expected least mean cost once that arm has been observed (knowledge gradient)."""
    import numpy as np

    nodes, weights = _quadrature()
    step_e = epochs.cov / np.sqrt(np.maximum(np.diag(epochs.cov), 0.0) + noise**2)[None, :]
    step_k = costs.cov / np.sqrt(np.maximum(np.diag(costs.cov), 0.0) + 1e-4)[None, :]
    # [outcome of b's epochs, outcome of b's epoch cost, cost of c, observed arm a]
    factor_e = np.exp(nodes[:, None, None] * step_e - 0.5 * step_e**2)
    factor_k = np.exp(nodes[:, None, None] * step_k - 0.5 * step_k**2)
    least = np.min(mean[None, None, :, None] * factor_e[:, None] * factor_k[None, :], axis=2)
    expected: Array = np.einsum("i,j,ija->a", weights, weights, least)
    return expected


@cache
def _quadrature() -> tuple[Array, Array]:
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    return nodes, weights / weights.sum()


def _run_costs(log_mean: Array, var: Array, best: float, fails: Array) -> tuple[Array, Array]:
    """Per arm: the expected cost of a recurrence that starts with it, and the cost at which to stop it.

    A run stopped at t has cost t and the recurrence starts again with the best arm: E[min(C, t)] + P(C > t) best,
    for a lognormal C. t is chosen to minimise it.
    """
    import numpy as np
    from scipy.special import ndtr

    sd = np.sqrt(var)
    t = best * np.concatenate([np.linspace(LEAST_STOP, 4.0, 21), [1e4]])
    z = (np.log(t)[None, :] - log_mean[:, None]) / sd[:, None]
    below = np.exp(np.minimum(log_mean + 0.5 * var, 600.0))[:, None] * ndtr(z - sd[:, None])
    above = fails[:, None] + (1.0 - fails[:, None]) * ndtr(-z)
    total = (1.0 - fails[:, None]) * below + above * (t[None, :] + best)
    at = np.argmin(total, axis=1)
    rows = np.arange(len(at))
    return total[rows, at], np.where(at == len(t) - 1, np.inf, t[at])
