"""Measurements: a value with its unit, its source and its uncertainty, so that no figure is bare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import final

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

    @property
    def plain(self) -> tuple[float, str, int, float]:
        """Value, unit, number of the source and uncertainty; ``measurement(*plain)`` makes it again."""
        return self.value, self.unit, int(self.source), self.uncertainty

    def __add__(self, other: Measurement) -> Measurement:
        """Add; absolute uncertainties add up (they are systematic more often than not)."""
        if not isinstance(other, Measurement):
            return NotImplemented
        if other.unit != self.unit:
            raise InvalidInput(f"Can't add {self.unit} and {other.unit}.")
        total = self.value + other.value
        absolute = abs(self.value) * self.uncertainty + abs(other.value) * other.uncertainty
        return measurement(
            total,
            self.unit,
            self.source if self.source >= other.source else other.source,
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


_new = object.__new__
_set_value: Callable[[Measurement, float], None] = vars(Measurement)["value"].__set__
_set_unit: Callable[[Measurement, str], None] = vars(Measurement)["unit"].__set__
_set_source: Callable[[Measurement, Source], None] = vars(Measurement)["source"].__set__
_set_uncertainty: Callable[[Measurement, float], None] = vars(Measurement)["uncertainty"].__set__
_SOURCES = tuple(Source)


def measurement(value: float, unit: str, source: int, uncertainty: float) -> Measurement:
    """``Measurement(...)`` in a third of its time, with the same checks: every report of every trial makes some.

    Args:
        value: In ``unit``.
        unit: As for ``Measurement``.
        source: A ``Source`` or its number.
        uncertainty: Relative.
    """
    if value - value != 0 or not 0 <= uncertainty < math.inf or not 0 <= source < len(_SOURCES):
        return Measurement(value, unit, Source(source), uncertainty)  # says what is wrong
    made = _new(Measurement)
    _set_value(made, value)
    _set_unit(made, unit)
    _set_source(made, _SOURCES[source])
    _set_uncertainty(made, uncertainty)
    return made


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


@final
class Sum:
    """A growing sum: ``total`` of everything added, without a new measurement for each."""

    __slots__ = ("_absolute", "_doubt", "_source", "_unit", "_value")

    def __init__(self) -> None:
        self._value = self._absolute = self._doubt = 0.0
        self._source = Source.MEASURED
        self._unit: str | None = None

    def add(self, other: Measurement) -> None:
        """Add one; as with ``+``, absolute uncertainties add up and the weakest source is kept."""
        if other.unit != self._unit:
            if self._unit is not None:
                raise InvalidInput(f"Can't add {self._unit} and {other.unit}.")
            self._unit = other.unit
        value = other.value
        self._value += value
        self._absolute += abs(value) * other.uncertainty
        if other.uncertainty > self._doubt:
            self._doubt = other.uncertainty
        if other.source > self._source:
            self._source = other.source

    @property
    def total(self) -> Measurement | None:
        """The sum, or None of nothing."""
        if self._unit is None:
            return None
        doubt = self._absolute / abs(self._value) if self._value else self._doubt
        return Measurement(self._value, self._unit, self._source, doubt)


def total(measurements: Iterable[Measurement]) -> Measurement | None:
    """The sum, or None of nothing: never a silent zero."""
    result: Measurement | None = None
    for measurement in measurements:
        result = measurement if result is None else result + measurement
    return result
