"""Where a Gaussian process expects the largest improvement: log EI, its gradient, and the climb along it.

Imports numpy and scipy; imported lazily.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

from penstock.predict.gp import Hyper, Process, fit

__all__ = ["Hyper", "Process", "climb", "fit", "log_ei", "log_ei_slope"]

Array: TypeAlias = NDArray[np.float64]

_LOG_2PI = math.log(2.0 * math.pi)


def climb(
    process: Process, x: Array, free: NDArray[np.bool_], offset: Array, best: float, within: Array
) -> Array:
    """Points moved to where log EI is largest nearby, in the ``free`` dimensions and ``within`` bounds of each."""
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
        bounds=[(low, high) for low, high in within[place].tolist()] * count,
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
