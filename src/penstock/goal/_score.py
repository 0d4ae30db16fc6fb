"""The SM2 score: performance, energy per epoch and learning rate of configurations in one number (Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one configuration and what it is made of.

    Attributes:
        total: Eq. 2, higher is better; ``-inf`` for a configuration without a finite performance.
        performance: Rescaled to 0..1 over the configurations, 1 is the best.
        energy: The same of the energy per epoch: 1 is the least. None where no configuration has any.
        lr: The same of the stable learning rate: 1 is the largest. None where no configuration has any.
    """

    total: float
    performance: float
    energy: float | None
    lr: float | None


def rescale(values: Sequence[float | None], *, higher_is_better: bool = True) -> list[float] | None:
    """The values moved to 0..1 over all of them, turned so that 1 is the best (SM2 4.3).

    Equal values, and a single one, are all 1: none is worse than the best. What is None or not finite is
    left out of the range and gets 0, so that nobody gains by an unknown; None if nothing is known.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    best = high if higher_is_better else low
    # Halved first, so that a span wider than the largest float does not become infinite.
    span = high / 2 - low / 2
    result = []
    for value in values:
        if value is None or not math.isfinite(value):
            result.append(0.0)
        elif span == 0.0 or value == best:
            result.append(1.0)
        else:
            distance = abs(best / 2 - value / 2) / span
            result.append(min(1.0, max(0.0, 1.0 - distance)))
    return result


def score(
    performance: Sequence[float | None],
    energy_j: Sequence[float | None],
    lr: Sequence[float | None],
    *,
    alpha: float = 0.75,
    beta: float = 0.5,
) -> list[Score]:
    """``f = alpha P + (1 - alpha) (beta E + (1 - beta) LR)`` of each configuration (SM2 Eq. 2).

    Args:
        performance: Per configuration, **higher is better**; None or not finite for one that failed.
        energy_j: Joules per epoch, less is better; None where not metered.
        lr: The largest stable learning rate, larger is better; None where not explored.
        alpha: Weight of the performance, in 0..1. 1 looks at nothing else.
        beta: Weight of the energy within the rest, in 0..1.

    An attribute that no configuration has is left out and its weight goes to the other of the pair (to the
    performance if both are unknown): a study without a meter is scored by performance and learning rate.

    Raises:
        InvalidInput: A weight outside 0..1, or lists of different lengths.
    """
    for name, weight in (("alpha", alpha), ("beta", beta)):
        if not 0.0 <= weight <= 1.0:
            raise InvalidInput(f"{name} must be between 0 and 1, got {weight!r}.")
    if not len(performance) == len(energy_j) == len(lr):
        raise InvalidInput(
            f"Every configuration needs all three attributes, got {len(performance)} performances, "
            f"{len(energy_j)} energies and {len(lr)} learning rates; use None for what is unknown."
        )
    good = [value is not None and math.isfinite(value) for value in performance]
    # A configuration that failed is out of the race: its energy and lr must not stretch the others' range.
    quality = rescale(performance)
    energies = rescale(
        [v if ok else None for v, ok in zip(energy_j, good, strict=True)], higher_is_better=False
    )
    rates = rescale([v if ok else None for v, ok in zip(lr, good, strict=True)])
    scores = []
    for index, ok in enumerate(good):
        p = quality[index] if quality else 0.0
        e = energies[index] if energies else None
        r = rates[index] if rates else None
        if e is not None and r is not None:
            rest = beta * e + (1.0 - beta) * r
        elif e is not None or r is not None:
            rest = e if e is not None else (r if r is not None else 0.0)
        else:
            rest = p
        scores.append(Score(alpha * p + (1.0 - alpha) * rest if ok else -math.inf, p, e, r))
    return scores
