"""Divergence: stops a training that does not learn or blows up, after a few epochs (HyperPower 3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from penstock.core.errors import InvalidInput
from penstock.schedule._check import fraction, whole
from penstock.schedule._stopping import _Watch


@dataclass(slots=True)
class _Curve:
    latest: int
    first: float
    best: float
    low: float = math.inf  # the lowest since the first report, and when a real advance was last made on it
    moved: int = 0
    worse: int = 0


@final
class Divergence(_Watch):
    """Stops a trial whose metric shows no learning or divergence. Composes with every scheduler.

    It does not predict how good a training will be, which could wrong a slow one; it only finds those that go
    nowhere, as HyperPower does. A trial is stopped when

    - the metric, or the loss if ``loss`` is given, is not a number or infinite;
    - it has exploded: worse than its first value by ``explode`` times the larger of that value and how far the
      trial has come, in two reports one after the other; while both are 0, nothing has;
    - after ``epochs`` epochs it never was better than guessing: not beyond ``chance`` by ``margin`` of it; without
      ``chance``, never better than its first report by ``margin`` of that. And it stands still: whoever jumps up at
      first and then comes down, step by step, is given the time.

    Args:
        metric: The metric to watch.
        mode: "min" if lower is better, "max" if higher is; default: as the study has it where the metric is one of its
            objectives, else "min".
        chance: What guessing gives, e.g. 0.1 for the accuracy or 90 for the per cent error of ten classes.
        epochs: Epochs that a trial has to show that it learns; default 5, without ``chance`` 12.
        margin: The least that counts as learning, relative; default 0.02, without ``chance`` 0.002: with them the rule
            stops none of the converging trainings of TaskSet (``benchmarks/papers/hyperpower``).
        explode: See above.
        loss: A second metric, lower is better, looked at for explosions.
    """

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        chance: float | None = None,
        epochs: int | None = None,
        margin: float | None = None,
        explode: float = 10.0,
        loss: str | None = None,
    ) -> None:
        super().__init__(metric, mode)
        self.chance = None if chance is None else fraction("chance", chance, -math.inf, math.inf)
        if self.chance is not None and not math.isfinite(self.chance):
            raise InvalidInput(f"chance is {chance!r}; give what guessing gives, or None.")
        self.epochs = whole("epochs", (12 if chance is None else 5) if epochs is None else epochs)
        self.margin = fraction(
            "margin", (0.002 if chance is None else 0.02) if margin is None else margin, 0.0, 1.0
        )
        self.explode = fraction("explode", explode, 1.0, math.inf)
        if loss is not None and (not isinstance(loss, str) or not loss):
            raise InvalidInput(f'loss is {loss!r}; give the name of a metric such as "loss", or None.')
        self.loss = loss
        self._curves: dict[tuple[int, str], _Curve] = {}

    def start(self) -> None:
        """Begin a study."""
        self._curves = {}
        self._heard = False

    def observe(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> str | None:
        """Learn a report."""
        self._heard = self._heard or self.metric in metrics
        for name, sign in ((self.loss, 1.0), (self.metric, self._sign)):
            reported = None if name is None else metrics.get(name)
            if name is None or reported is None:
                continue
            reason = self._look(trial, epoch, name, sign, float(reported))
            if reason is not None:
                return reason
        return None

    def _look(self, trial: int, epoch: int, name: str, sign: float, reported: float) -> str | None:
        curve = self._curves.get((trial, name))
        if curve is not None and epoch <= curve.latest:
            return None
        if not math.isfinite(reported):
            if curve is not None:
                curve.latest = epoch
            return f"{name} is {reported} at epoch {epoch}: the training diverged"
        value = sign * reported
        if curve is None:
            curve = self._curves[trial, name] = _Curve(epoch, value, value)
        else:
            curve.latest = epoch
            if value < curve.low - self.margin * abs(curve.low) or curve.low == math.inf:
                curve.low, curve.moved = value, epoch
        room = max(abs(curve.first), curve.first - curve.best)
        # One bad report may be a fluke (a batch, a schedule's restart); two in a row are not. Beside a first
        # value of 0, as correlations have that guess, everything would be many times as large.
        curve.worse = curve.worse + 1 if room > 0 and value > curve.first + self.explode * room else 0
        curve.best = min(curve.best, value)
        if curve.worse >= 2:
            return f"{name} has grown from {sign * curve.first:.6g} to {reported:.6g}: the training diverged"
        if (
            name != self.metric
            or epoch < self.epochs
            or (curve.moved and epoch - curve.moved < self.epochs - 2)
        ):
            return None
        return self._idle(name, sign, epoch, curve)

    def _idle(self, name: str, sign: float, epoch: int, curve: _Curve) -> str | None:
        if self.chance is not None:
            level = sign * self.chance
            if curve.best >= level - self.margin * abs(level):
                return f"best {name} {sign * curve.best:.6g} is no better than chance after {epoch} epochs"
        elif curve.moved and curve.best >= curve.first - self.margin * abs(curve.first):
            return f"{name} has not improved on its first value {sign * curve.first:.6g} in {epoch} epochs"
        return None

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "Divergence",
            "metric": self.metric,
            "mode": self.mode,
            "chance": self.chance,
            "epochs": self.epochs,
            "margin": self.margin,
            "explode": self.explode,
            "loss": self.loss,
        }
