"""A compact exact Gaussian process on numpy: Matern-5/2, a length scale per dimension, fitted by MAP.

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
        signal: Variance of the part of the function in which all dimensions act together.
        noise: Variance of an observation's noise.
        apart: Variance of the part that is a sum of functions of one dimension each.
    """

    scales: Array
    signal: float
    noise: float
    apart: float = 0.0


def matern(squares: Array) -> Array:
    """Matern-5/2 correlations of squared scaled distances."""
    r = np.sqrt(5.0 * np.maximum(squares, 0.0))
    result: Array = (1.0 + r + r * r / 3.0) * np.exp(-r)
    return result


def sums(one: Array, two: Array) -> Array:
    """Mean over the dimensions of their own Matern-5/2 correlations, of points scaled for ``matern``.

    A length scale of many dimensions is longer by the root of their number: distances add up there.
    """
    total = np.zeros((len(one), len(two)))
    root = math.sqrt(5.0 * one.shape[1])
    for i in range(one.shape[1]):
        q = root * np.abs(one[:, i, None] - two[None, :, i])
        total += (1.0 + q + q * q / 3.0) * np.exp(-q)
    mean: Array = total / one.shape[1]
    return mean


def fit(
    x: Array,
    y: Array,
    starts: int = 1,
    *,
    additive: bool = False,
    center: float = math.sqrt(2.0),
    spread: float = math.sqrt(3.0),
) -> Hyper:
    """The most probable hyperparameters of standardised observations (MAP, analytic gradients).

    Priors: length scales log-normal around a value that grows with the root of the dimension, so that distances stay
    comparable in many dimensions (Hvarfner et al. 2024), signal near 1, noise small but free to grow.

    Args:
        x: Points, one per row.
        y: Standardised values.
        starts: From how many starting points, 1 or 2.
        additive: With a sum of functions of one dimension each besides the one of all (Duvenaud et al. 2011): most
            of what hyperparameters do they do alone, and that is learned from far fewer points. The data decide on
            the shares.
        center: Mean of the logarithm of a length scale's prior, over the root of the dimension.
        spread: Its standard deviation.
    """
    n, d = x.shape
    half_way = math.log(0.5) if additive else 0.0
    if n == 0:
        return Hyper(np.full(d, 0.4 * math.sqrt(d)), math.exp(half_way), 1e-2, 0.5 if additive else 0.0)
    apart = np.ascontiguousarray(np.abs(x[:, None, :] - x[None, :, :]).reshape(n * n, d).T)
    flat = apart**2
    middle = center + 0.5 * math.log(d)
    size = d + 3 if additive else d + 2

    def loss(theta: Array) -> tuple[float, Array]:
        inverse_scales = np.exp(-theta[:d])
        inverse_squares = inverse_scales**2
        signal, noise = math.exp(theta[d]), math.exp(theta[d + 1]) + _LEAST_NOISE
        r = np.sqrt(5.0 * (inverse_squares @ flat))
        decay = np.exp(-r)
        correlation = ((1.0 + r + r * r / 3.0) * decay).reshape(n, n)
        k = signal * correlation
        if additive:
            alone = math.exp(theta[d + 2])
            q = apart * (math.sqrt(5.0 * d) * inverse_scales)[:, None]
            fade = np.exp(-q)
            own = ((1.0 + q + q * q / 3.0) * fade).mean(axis=0).reshape(n, n)
            k += alone * own
        k[np.diag_indices(n)] += noise
        lower, info = dpotrf(k, lower=1)
        if info:
            return 1e10, np.zeros(size)
        inverse, _ = dpotri(lower, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        ones = inverse.sum(axis=1)
        residual = y - (ones @ y) / ones.sum()  # the constant mean at its best: its gradient vanishes
        alpha = inverse @ residual
        value = 0.5 * residual @ alpha + np.log(np.diag(lower)).sum() + 0.5 * n * _LOG_2PI
        half = 0.5 * (inverse - np.outer(alpha, alpha))
        slope = (half.ravel() * signal * (5.0 / 3.0)) * ((1.0 + r) * decay)
        gradient = np.empty(size)
        gradient[:d] = (flat @ slope) * inverse_squares
        gradient[d] = float((half * correlation).sum()) * signal
        gradient[d + 1] = float(np.trace(half)) * math.exp(theta[d + 1])
        if additive:
            gradient[:d] += ((q * q * (1.0 + q) * fade) @ half.ravel()) * (alone / (3.0 * d))
            gradient[d + 2] = float((half * own).sum()) * alone
        off = (theta - prior) / widths
        return float(value + 0.5 * off @ off), gradient + off / widths

    prior = np.array([middle] * d + [half_way, -4.5] + [half_way] * additive)
    widths = np.array([spread] * d + [0.7, 1.3] + [0.7] * additive)
    bounds = [(-4.0, 7.0)] * d + [(-3.0, 3.0), (math.log(1e-7), 1.0)] + [(-4.0, 3.0)] * additive
    best: tuple[float, Array] | None = None
    for start in (0.4, 1.6)[:starts]:
        first = prior.copy()
        first[:d] = math.log(start * math.sqrt(d))
        found = minimize(
            loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40, "ftol": 1e-5}
        )
        if best is None or found.fun < best[0]:
            best = float(found.fun), found.x
    assert best is not None
    theta = best[1]
    return Hyper(
        np.exp(theta[:d]),
        math.exp(theta[d]),
        math.exp(theta[d + 1]) + _LEAST_NOISE,
        math.exp(theta[d + 2]) if additive else 0.0,
    )


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
        self._own = hyper.signal + hyper.apart
        if self._empty:
            return
        self._x = x / hyper.scales
        self._norms = (self._x**2).sum(axis=1)
        squares = self._norms[:, None] + self._norms[None] - 2.0 * self._x @ self._x.T
        k = hyper.signal * matern(squares)
        if hyper.apart:
            k += hyper.apart * sums(self._x, self._x)
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
            return np.zeros(len(x)), np.full(len(x), math.sqrt(self._own))
        scaled = x / self.hyper.scales
        squares = (scaled**2).sum(axis=1)[:, None] + self._norms[None] - 2.0 * scaled @ self._x.T
        cross = self.hyper.signal * matern(squares)
        if self.hyper.apart:
            cross += self.hyper.apart * sums(scaled, self._x)
        mean = self.mean + cross @ self._alpha
        half = solve_triangular(self._lower, cross.T, lower=True, check_finite=False)
        variance = self._own - (half**2).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, _LEAST_VARIANCE))

    def predict_slope(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Means, standard deviations and the gradients of both at points."""
        if self._empty:
            zero = np.zeros_like(x)
            return np.zeros(len(x)), np.full(len(x), math.sqrt(self._own)), zero, zero
        scaled = x / self.hyper.scales
        apart = scaled[:, None, :] - self._x[None]
        r = np.sqrt(5.0 * (apart**2).sum(axis=2))
        decay = self.hyper.signal * np.exp(-r)
        cross = (1.0 + r + r * r / 3.0) * decay
        slope = (-(5.0 / 3.0) * (1.0 + r) * decay)[:, :, None] * apart / self.hyper.scales
        if self.hyper.apart:
            d = x.shape[1]
            q = math.sqrt(5.0 * d) * np.abs(apart)
            fade = (self.hyper.apart / d) * np.exp(-q)
            cross = cross + ((1.0 + q + q * q / 3.0) * fade).sum(axis=2)
            slope = slope - (5.0 * d / 3.0) * (1.0 + q) * fade * apart / self.hyper.scales
        mean = self.mean + cross @ self._alpha
        solved, _ = dpotrs(self._lower, cross.T, lower=1)
        variance = np.maximum(self._own - (cross * solved.T).sum(axis=1), _LEAST_VARIANCE)
        std = np.sqrt(variance)
        mean_slope = np.einsum("mnd,n->md", slope, self._alpha)
        std_slope = -np.einsum("mnd,nm->md", slope, solved) / std[:, None]
        return mean, std, mean_slope, std_slope
