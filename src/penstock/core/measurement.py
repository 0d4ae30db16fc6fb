"""Measurements: a value with its unit, its source and its uncertainty, so that no figure is bare."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from penstock.core.errors import InvalidInput

J_PER_WH = 3600.0


class Source(IntEnum):
    """Where a figure comes from, from the strongest to the weakest. A sum keeps the weakest."""

    MEASURED = 0
    ATTRIBUTED = 1
    ESTIMATED = 2
    SIMULATED = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value with unit, source and relative uncertainty.

    Attributes:
        value: In ``unit``.
        unit: ``"J"``, ``"W"``, ``"s"``, ``"bytes"``, ``"g"`` (CO2e), or a currency code.
        source: Where it comes from.
        uncertainty: Relative, one-sided: 0.05 is +-5%.
    """

    value: float
    unit: str
    source: Source
    uncertainty: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InvalidInput(f"A measurement must be finite, got {self.value!r} {self.unit}.")
        if not (math.isfinite(self.uncertainty) and self.uncertainty >= 0):
            raise InvalidInput(f"Uncertainty must be finite and at least 0, got {self.uncertainty!r}.")

    @property
    def joules(self) -> float:
        """The value in joules; an error if it is not an energy."""
        if self.unit != "J":
            raise InvalidInput(f"{self} is not an energy: its unit is {self.unit}, not J.")
        return self.value

    @property
    def wh(self) -> float:
        """The value in watt-hours; an error if it is not an energy."""
        return self.joules / J_PER_WH

    def __add__(self, other: Measurement) -> Measurement:
        """Add; absolute uncertainties add up (they are systematic more often than not)."""
        if not isinstance(other, Measurement):
            return NotImplemented
        if other.unit != self.unit:
            raise InvalidInput(f"Can't add {self.unit} and {other.unit}.")
        total = self.value + other.value
        absolute = abs(self.value) * self.uncertainty + abs(other.value) * other.uncertainty
        return Measurement(
            total,
            self.unit,
            max(self.source, other.source),
            absolute / abs(total) if total else max(self.uncertainty, other.uncertainty),
        )

    def scaled(self, factor: float, *, source: Source | None = None) -> Measurement:
        """The value times ``factor``; ``source`` may weaken the source, never strengthen it."""
        weakest = self.source if source is None else max(self.source, source)
        return Measurement(self.value * factor, self.unit, weakest, self.uncertainty)

    def __str__(self) -> str:
        number, unit = _readable(self.value, self.unit)
        doubt = f" +- {100 * self.uncertainty:.2g}%" if self.uncertainty else ""
        if self.uncertainty >= 1:
            doubt = f" +- {100 * self.uncertainty:,.0f}%"
        return f"{number} {unit}{doubt} ({self.source})"


def _readable(value: float, unit: str) -> tuple[str, str]:
    """Three digits in the unit people use: J, Wh or kWh; g or kg; bytes to TB."""
    for least, divisor, name in _LARGER.get(unit, ()):
        if abs(value) >= least:
            value, unit = value / divisor, name
            break
    rounded = float(f"{value:.3g}")
    return (f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"), unit


_LARGER = {
    "J": ((1e4 * J_PER_WH, 1e3 * J_PER_WH, "kWh"), (J_PER_WH / 10, J_PER_WH, "Wh")),
    "g": ((1e4, 1e3, "kg"),),
    "W": ((1e5, 1e3, "kW"),),
    "bytes": ((1e12, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e4, 1e3, "kB")),
}


def total(measurements: Iterable[Measurement]) -> Measurement | None:
    """The sum, or None of nothing: never a silent zero."""
    result: Measurement | None = None
    for measurement in measurements:
        result = measurement if result is None else result + measurement
    return result
