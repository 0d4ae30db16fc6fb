"""The energy-time cost of a run and of an epoch (Zeus Eq. 2, 3 and 7), and the power limit that minimises it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.core.errors import InvalidInput

Profile: TypeAlias = Mapping[float, tuple[float, float]]
"""What one epoch takes at each power limit: watts -> (time_s, average power_w). 0 W stands for "no limit set"."""


def run_cost(energy_j: float, time_s: float, *, eta: float, max_power_w: float) -> float:
    """``eta * ETA + (1 - eta) * MAXPOWER * TTA``, in joules (Zeus Eq. 2)."""
    return eta * energy_j + (1.0 - eta) * max_power_w * time_s


def epoch_cost(profile: Profile, limit_w: float, *, eta: float, max_power_w: float) -> float:
    """The cost of one epoch at a power limit (inside the minimum of Zeus Eq. 7)."""
    time_s, power_w = profile[limit_w]
    return run_cost(power_w * time_s, time_s, eta=eta, max_power_w=max_power_w)


def best_limit(profile: Profile, *, eta: float, max_power_w: float) -> tuple[float, float]:
    """The power limit with the least epoch cost, and that cost (Zeus Eq. 7). Of equals, the lowest limit."""
    if not profile:
        raise InvalidInput("An empty power profile has no best limit: measure at least one.")
    costs = {limit: epoch_cost(profile, limit, eta=eta, max_power_w=max_power_w) for limit in sorted(profile)}
    limit = min(costs, key=costs.__getitem__)
    return limit, costs[limit]
