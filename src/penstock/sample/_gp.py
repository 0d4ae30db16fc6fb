"""A compact exact Gaussian process on numpy: Matern-5/2 with a length scale per dimension, fitted by MAP.

Why not a library: a study of small trials asks for a suggestion every few milliseconds to seconds, and on a hundred
points the time of a general library goes into its machinery. ``benchmarks/papers/hyperpower`` compares both.
Imports numpy and scipy; imported lazily.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

Array: TypeAlias = NDArray[np.float64]

_LEAST_NOISE = 1e-5
_LEAST_VARIANCE = 1e-12
_LOG_2PI = math.log(2.0 * math.pi)


@final
@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of a process over standardised values.

    Attributes:
        scales: A length scale per dimension.
        signal: Variance of the function.
        noise: Variance of an observation's noise.
    """

    scales: Array
    signal: float
    noise: float


def matern(squares: Array) -> Array:
    """Matern-5/2 correlations of squared scaled distances."""
    r = np.sqrt(5.0 * np.maximum(squares, 0.0))
    result: Array = (1.0 + r + r * r / 3.0) * np.exp(-r)
    return result


def fit(x: Array, y: Array, starts: int = 1) -> Hyper:
    """The most probable hyperparameters of standardised observations (MAP, analytic gradients).

    Priors: length scales log-normal around a value that grows with the root of the dimension, so that distances stay
    comparable in many dimensions (Hvarfner et al. 2024), signal near 1, noise small but free to grow.
    """
    n, d = x.shape
    if n == 0:
        return Hyper(np.full(d, 0.4 * math.sqrt(d)), 1.0, 1e-2)
    apart = (x[:, None, :] - x[None, :, :]) ** 2
    flat = np.ascontiguousarray(apart.reshape(n * n, d).T)
    center, spread = math.sqrt(2.0) + 0.5 * math.log(d), math.sqrt(3.0)

    def loss(theta: Array) -> tuple[float, Array]:
        inverse_squares = np.exp(-2.0 * theta[:d])
        signal, noise = math.exp(theta[d]), math.exp(theta[d + 1]) + _LEAST_NOISE
        r = np.sqrt(5.0 * (inverse_squares @ flat))
        decay = np.exp(-r)
        correlation = ((1.0 + r + r * r / 3.0) * decay).reshape(n, n)
        k = signal * correlation
        k[np.diag_indices(n)] += noise
        lower, info = dpotrf(k, lower=1)
        if info:
            return 1e10, np.zeros(d + 2)
        inverse, _ = dpotri(lower, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        ones = inverse.sum(axis=1)
        residual = y - (ones @ y) / ones.sum()  # the constant mean at its best: its gradient vanishes
        alpha = inverse @ residual
        value = 0.5 * residual @ alpha + np.log(np.diag(lower)).sum() + 0.5 * n * _LOG_2PI
        half = 0.5 * (inverse - np.outer(alpha, alpha))
        slope = (half.ravel() * signal * (5.0 / 3.0)) * ((1.0 + r) * decay)
        gradient = np.empty(d + 2)
        gradient[:d] = (flat @ slope) * inverse_squares
        gradient[d] = float((half * correlation).sum()) * signal
        gradient[d + 1] = float(np.trace(half)) * math.exp(theta[d + 1])
        off = (theta[:d] - center) / spread
        own, loud = theta[d] / 0.7, (theta[d + 1] + 4.5) / 1.3
        value += 0.5 * float(off @ off) + 0.5 * own * own + 0.5 * loud * loud
        gradient[:d] += off / spread
        gradient[d] += own / 0.7
        gradient[d + 1] += loud / 1.3
        return float(value), gradient

    bounds = [(-4.0, 7.0)] * d + [(-3.0, 3.0), (math.log(1e-7), 1.0)]
    best: tuple[float, Array] | None = None
    for start in (0.4, 1.6)[:starts]:
        first = np.array([math.log(start * math.sqrt(d))] * d + [0.0, -4.5])
        found = minimize(
            loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40, "ftol": 1e-5}
        )
        if best is None or found.fun < best[0]:
            best = float(found.fun), found.x
    assert best is not None
    theta = best[1]
    return Hyper(np.exp(theta[:d]), math.exp(theta[d]), math.exp(theta[d + 1]) + _LEAST_NOISE)


@final
class Process:
    """A Gaussian process given its hyperparameters and observations.

    Args:
        x: Points, one per row.
        y: Standardised values.
        hyper: From ``fit``.
    """

    def __init__(self, x: Array, y: Array, hyper: Hyper) -> None:
        self.hyper = hyper
        self.mean = 0.0
        self._empty = not len(y)
        if self._empty:
            return
        self._x = x / hyper.scales
        self._norms = (self._x**2).sum(axis=1)
        squares = self._norms[:, None] + self._norms[None] - 2.0 * self._x @ self._x.T
        k = hyper.signal * matern(squares)
        jitter = 0.0
        while True:
            trial = k.copy()
            trial[np.diag_indices(len(k))] += hyper.noise + jitter
            self._lower, info = dpotrf(trial, lower=1, clean=1)
            if not info:
                break
            jitter = max(1e-8, 10.0 * jitter)
        ones, _ = dpotrs(self._lower, np.ones((len(y), 1)), lower=1)
        weights, _ = dpotrs(self._lower, y[:, None], lower=1)
        self.mean = float(weights.sum() / ones.sum())
        self._alpha = (weights - self.mean * ones)[:, 0]

    def predict(self, x: Array) -> tuple[Array, Array]:
        """Means and standard deviations of the function (without noise) at points."""
        if self._empty:
            return np.zeros(len(x)), np.full(len(x), math.sqrt(self.hyper.signal))
        scaled = x / self.hyper.scales
        squares = (scaled**2).sum(axis=1)[:, None] + self._norms[None] - 2.0 * scaled @ self._x.T
        cross = self.hyper.signal * matern(squares)
        mean = self.mean + cross @ self._alpha
        half = solve_triangular(self._lower, cross.T, lower=True, check_finite=False)
        variance = self.hyper.signal - (half**2).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, _LEAST_VARIANCE))

    def predict_slope(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Means, standard deviations and the gradients of both at points."""
        if self._empty:
            zero = np.zeros_like(x)
            return np.zeros(len(x)), np.full(len(x), math.sqrt(self.hyper.signal)), zero, zero
        scaled = x / self.hyper.scales
        apart = scaled[:, None, :] - self._x[None]
        r = np.sqrt(5.0 * (apart**2).sum(axis=2))
        decay = self.hyper.signal * np.exp(-r)
        cross = (1.0 + r + r * r / 3.0) * decay
        slope = (-(5.0 / 3.0) * (1.0 + r) * decay)[:, :, None] * apart / self.hyper.scales
        mean = self.mean + cross @ self._alpha
        solved, _ = dpotrs(self._lower, cross.T, lower=1)
        variance = np.maximum(self.hyper.signal - (cross * solved.T).sum(axis=1), _LEAST_VARIANCE)
        std = np.sqrt(variance)
        mean_slope = np.einsum("mnd,n->md", slope, self._alpha)
        std_slope = -np.einsum("mnd,nm->md", slope, solved) / std[:, None]
        return mean, std, mean_slope, std_slope


def climb(process: Process, x: Array, free: NDArray[np.bool_], offset: Array, best: float) -> Array:
    """Points moved to where log EI is largest nearby, in the dimensions that are ``free`` and within the unit cube."""
    count = len(x)
    place = np.flatnonzero(free)
    fixed = x.copy()

    def loss(flat: Array) -> tuple[float, Array]:
        fixed[:, place] = flat.reshape(count, len(place))
        height, slope = log_ei_slope(process, fixed, offset, best)
        return -float(height.sum()), -slope[:, place].ravel()

    found = minimize(
        loss,
        x[:, place].ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (count * len(place)),
        options={"maxiter": 60, "ftol": 1e-7},
    )
    moved = x.copy()
    moved[:, place] = found.x.reshape(count, len(place))
    return moved


def log_ei(mean: Array, std: Array, best: float) -> Array:
    """The logarithm of the expected improvement below ``best``, exact also where it underflows (Ament et al. 2023)."""
    scaled: Array = _log_h((best - mean) / std) + np.log(std)
    return scaled


def log_ei_slope(process: Process, x: Array, offset: Array, best: float) -> tuple[Array, Array]:
    """Log EI at points and its gradients there; ``offset`` is added to the means as a constant."""
    mean, std, mean_slope, std_slope = process.predict_slope(x)
    z = (best - mean - offset) / std
    height = _log_h(z)
    weight = np.exp(log_ndtr(z) - height)[:, None]  # h'(z) / h(z) with h' = Phi
    z_slope = -(mean_slope + z[:, None] * std_slope) / std[:, None]
    return height + np.log(std), weight * z_slope + std_slope / std[:, None]


def _log_h(z: Array) -> Array:
    """log(phi(z) + z Phi(z))."""
    result = np.empty_like(z)
    near = z > -1.0
    zn = z[near]
    result[near] = np.log(np.exp(-0.5 * zn * zn) / math.sqrt(2.0 * math.pi) + zn * np.exp(log_ndtr(zn)))
    far = z[~near]
    # log phi + log(1 + z Phi / phi), with Phi / phi by the scaled complementary error function; -2 log|z| far out
    ratio = math.sqrt(math.pi / 2.0) * erfcx(-far / math.sqrt(2.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.where(far > -1e5, np.log1p(np.maximum(far * ratio, -1.0 + 1e-16)), -2.0 * np.log(-far))
    result[~near] = -0.5 * far * far - 0.5 * _LOG_2PI + inner
    return result
