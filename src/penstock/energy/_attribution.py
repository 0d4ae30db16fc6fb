"""Attribution: how the joules of a shared device are split among the trials on it.

The rule. Of what a device draws, its idle power goes on one account and the rest, what work added, on another.
Those who use it share both in the same proportions; with nobody there it stays unattributed. The parts and what is
unattributed always sum to the whole, and every part is marked ``attributed`` or weaker.

What studies do. *Packed* trials (several processes on one device) weigh as much as **the share of the device that they
hold, for the time they are active**: nothing tells how much each of them really used of it. Their split is kept by the
device's one reader, period by period (see ``_shared``), with the idle account beside it (``Window.idle``). *Fused*
trials (one training of several models) get equal parts **weighted by the samples each processed**, or in lanes by the
time each ran; there all is on the work account. ``attribute`` splits by active time x utilisation for whoever knows the
utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput

K = TypeVar("K", bound=Hashable)


def split(amount: float, weights: Sequence[float]) -> list[float]:
    """``amount`` in proportion to ``weights``; the parts sum to it. All 0 if no weight is positive.

    Raises:
        InvalidInput: A weight is negative or not finite.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidInput(f"Weights must be finite and at least 0, got {weight!r}.")
    top = max(weights, default=0.0)
    if top <= 0:
        return [0.0] * len(weights)
    # Against the largest weight: tiny or huge weights neither vanish nor overflow.
    scaled = [weight / top for weight in weights]
    whole = math.fsum(scaled)
    parts = [amount * (weight / whole) for weight in scaled]
    # Rounding's rest goes to the largest part, where it is relatively smallest.
    largest = max(range(len(parts)), key=lambda index: scaled[index])
    parts[largest] += amount - math.fsum(parts)
    return parts


@dataclass(frozen=True, slots=True)
class Usage(Generic[K]):
    """How one trial used a device in a period.

    Attributes:
        key: The trial.
        active_s: How long it was active.
        utilisation: How much of the device it used meanwhile, in any unit common to all (its share of the device
            where nothing better is known).
    """

    key: K
    active_s: float
    utilisation: float = 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """One trial's energy: what its work drew, and its part of the idle power. ``energy`` is both."""

    work: Measurement
    idle: Measurement

    @property
    def energy(self) -> Measurement:
        """Work and idle together."""
        return self.work + self.idle


@dataclass(frozen=True, slots=True)
class Attribution(Generic[K]):
    """A device's energy, split. ``parts`` and ``unattributed`` sum to the whole."""

    parts: Mapping[K, Part]
    unattributed: Measurement


def attribute(
    energy: Measurement, usages: Sequence[Usage[K]], *, duration_s: float, idle_w: float = 0.0
) -> Attribution[K]:
    """Split a device's energy in a period among the packed trials on it: active time x utilisation.

    Args:
        energy: Of the whole device in the period.
        usages: Who used it, each trial once.
        duration_s: The period's length.
        idle_w: What the device draws with nothing to do; 0 puts all on the work account.

    Raises:
        InvalidInput: A trial appears twice, or a figure is negative.
    """
    if duration_s < 0 or idle_w < 0:
        raise InvalidInput(f"duration_s and idle_w must be at least 0, got {duration_s} and {idle_w}.")
    keys = [usage.key for usage in usages]
    if len(set(keys)) != len(keys):
        raise InvalidInput(f"Each trial must appear once, got {keys}.")
    whole_j = energy.joules
    idle_j = min(max(whole_j, 0.0), idle_w * duration_s)
    for usage in usages:  # the product of two negative figures would not show it
        if not (usage.active_s >= 0 and usage.utilisation >= 0):
            raise InvalidInput(f"active_s and utilisation must be at least 0, got {usage}.")
    weights = [usage.active_s * usage.utilisation for usage in usages]
    work = split(whole_j - idle_j, weights)
    idle = split(idle_j, weights)

    def marked(value_j: float) -> Measurement:
        return Measurement(value_j, "J", max(energy.source, Source.ATTRIBUTED), energy.uncertainty)

    nobody = not any(weight > 0 for weight in weights)
    return Attribution(
        {key: Part(marked(a), marked(b)) for key, a, b in zip(keys, work, idle, strict=True)},
        marked(whole_j if nobody else 0.0),
    )


def attribute_fused(
    energy: Measurement, samples: Mapping[K, float], *, duration_s: float = 0.0, idle_w: float = 0.0
) -> Attribution[K]:
    """Split the energy of a fused training among its members: equal parts weighted by samples processed.

    Members that processed equally many samples get equal parts; one that was stopped half-way gets half as much.
    """
    usages = [Usage(key, 1.0, count) for key, count in samples.items()]
    return attribute(energy, usages, duration_s=duration_s, idle_w=idle_w)
