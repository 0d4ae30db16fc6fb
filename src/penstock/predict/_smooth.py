"""Smooth: a quantity as any smooth function of features, a Gaussian process of logarithms.

Imports numpy; imported lazily.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.predict.gp import Hyper, fit, matern

if TYPE_CHECKING:
    from penstock.predict._features import Features, Matrix

# Scales of a device's response: about the width of a feature, where a search's prior is smoother by far. With a hundred
# samples of HyperPower's networks that is what the doubt agrees with the errors at (benchmarks/papers/hyperpower).
_CENTER, _SPREAD = 0.0, 1.0
_CONSTANT = 25.0  # prior variance of the level, in variances of the values


@final
class Smooth:
    """A Matern-5/2 process of the logarithm of a quantity over (the logarithms of) its features.

    Args:
        features: What the rows hold.
        rows: Samples' features.
        values: Samples' values.
        extra: Whether extra features count.
        hyper: Its hyperparameters; None: the most probable ones.
        first: Of how many of the samples the units are, so that later ones don't shift them.
    """

    def __init__(
        self,
        features: Features,
        rows: Matrix,
        values: Matrix,
        *,
        extra: bool,
        hyper: Hyper | None = None,
        first: int | None = None,
    ) -> None:
        from scipy.linalg.lapack import dpotrf, dpotri

        self.values = values
        self.used = len(features.columns) + (len(features.extra) if extra else 0)
        begin = rows[:first, : self.used]
        self._logged = (begin > 0).all(axis=0)
        begin = self._log(begin)
        low, width = begin.min(axis=0), np.ptp(begin, axis=0)
        self._low, self._width = low, np.where(width > 0, width, np.inf)
        logs = np.log(values)
        self.center, self.spread = float(logs[:first].mean()), float(logs[:first].std()) or 1.0
        y = (logs - self.center) / self.spread
        self.x = (self._log(rows[:, : self.used]) - self._low) / self._width
        self.hyper = hyper or fit(self.x, y, center=_CENTER, spread=_SPREAD)
        covariance = self._covariance(self.x)
        covariance[np.diag_indices_from(covariance)] += self.hyper.noise
        factor, info = dpotrf(covariance, lower=1)
        if info:
            raise InvalidInput("The samples' features are degenerate: collect samples that differ.")
        inverse, _ = dpotri(factor, lower=1)
        self.inverse = np.tril(inverse) + np.tril(inverse, -1).T
        self.alpha = self.inverse @ y
        # Rasmussen & Williams 5.4.2: what leaving one out misses it by.
        missed = self.spread * self.alpha / np.diag(self.inverse)
        self.left_out = values * -np.expm1(-missed)
        relative = np.abs(self.left_out / values)
        clipped = np.minimum(relative, 4.0 * np.median(relative) + 1e-9)
        self.scatter = max(float(np.sqrt(np.mean(clipped**2))), 1e-6)
        self.noise = self.spread * math.sqrt(self.hyper.noise)
        # Relative variances of the function at the samples, each left out.
        unknown = np.maximum(1.0 / np.diag(self.inverse) - self.hyper.noise, 0.0)
        self.unknown = self.spread**2 * unknown

    def predict(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """Values, and the relative standard deviation of what is not known of them."""
        points = (self._log(rows[:, : self.used]) - self._low) / self._width
        cross = self._covariance(points)
        mean = self.center + self.spread * (cross @ self.alpha)
        variance = self.hyper.signal + _CONSTANT - ((cross @ self.inverse) * cross).sum(axis=1)
        return np.exp(np.minimum(mean, 80.0)), self.spread * np.sqrt(np.maximum(variance, 0.0))

    def weights(self) -> dict[str, float]:
        """None: it is not a sum of terms."""
        return {}

    def _covariance(self, points: Matrix) -> Matrix:
        one, two = points / self.hyper.scales, self.x / self.hyper.scales
        squares = (one**2).sum(1)[:, None] + (two**2).sum(1)[None] - 2.0 * one @ two.T
        found: Matrix = self.hyper.signal * matern(squares) + _CONSTANT
        return found

    def _log(self, rows: Matrix) -> Matrix:
        """Logarithms of what is above 0 in all samples: a layer twice as wide is as far at 32 as at 512."""
        found: Matrix = np.where(self._logged, np.log(np.maximum(rows, 1e-12)), rows)
        return found
