"""What energy means outside: grams of CO2e by grid, money by price, and budgets in either as watt-hours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput

YEAR = 2023
SOURCE = "Ember, Yearly Electricity Data (via Our World in Data), life-cycle gCO2e per kWh generated"

WORLD_G_PER_KWH = 481.0

G_PER_KWH: Mapping[str, float] = {
    # ISO 3166-1 alpha-2 -> the grid's average in 2023, rounded, as published by Ember.
    "AR": 354, "AT": 111, "AU": 549, "BA": 600, "BD": 691, "BE": 138, "BG": 335, "BO": 532, "BR": 98, "CA": 170,
    "CH": 35, "CL": 291, "CN": 582, "CO": 260, "CR": 53, "CY": 534, "CZ": 450, "DE": 381, "DK": 152, "EC": 150,
    "EE": 417, "EG": 570, "ES": 174, "FI": 79, "FR": 56, "GB": 238, "GE": 168, "GR": 337, "HR": 205, "HU": 204,
    "IE": 291, "IN": 713, "IR": 655, "IT": 331, "JP": 485, "KR": 431, "NL": 268, "NO": 30, "NZ": 113, "PL": 662,
    "PT": 166, "SE": 41, "SG": 471, "SV": 271, "TR": 465, "TW": 644, "US": 369, "ZA": 708,
}  # fmt: skip

_COUNTRY_DOUBT = 0.15
"""A year's average of a country against the hour and the place: what the table can't know."""

_WORLD_DOUBT = 0.95
"""Countries lie between 30 and 713 g: the world average says little about any of them."""

_GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the electricity comes from.

    Attributes:
        g_per_kwh: Grams of CO2e per kilowatt-hour.
        region: The country, ``"given"`` for a figure of the user's, or ``"world"``.
        assumed: No region was given: it is the world average, and every figure from it is a rough estimate.
        uncertainty: Relative, of ``g_per_kwh``.
        origin: Who says so, and for which year.
    """

    g_per_kwh: float
    region: str
    assumed: bool
    uncertainty: float
    origin: str

    @property
    def where(self) -> str:
        """Whose figure it is, for people."""
        if self.region == _GIVEN:
            return "as given"
        return "world average grid, no region given" if self.assumed else f"grid of {self.region}"

    def __str__(self) -> str:
        name = "world average, no region given" if self.assumed else self.region
        return f"{self.g_per_kwh:g} gCO2e/kWh ({name}; {self.origin})"


def grid(region: str | None = None, *, g_per_kwh: float | None = None) -> Grid:
    """The grid of a country, of a figure you know, or, with neither, the world average, flagged.

    Args:
        region: ISO code of a country, such as ``"DE"``.
        g_per_kwh: Your supplier's figure, instead.

    Raises:
        InvalidInput: Both are given, one is of another type, or the country is not in the table.
    """
    if region is not None and not isinstance(region, str):
        raise InvalidInput(f'region takes the ISO code of a country, such as "DE", got {region!r}.')
    if region is not None and g_per_kwh is not None:
        raise InvalidInput(f"Give a region or g_per_kwh, not both: got {region!r} and {g_per_kwh!r}.")
    if g_per_kwh is not None:
        check_amount("g_per_kwh", g_per_kwh)
        return Grid(g_per_kwh, _GIVEN, False, 0.0, "as given")
    origin = f"{SOURCE}, {YEAR}"
    if region is None:
        return Grid(WORLD_G_PER_KWH, "world", True, _WORLD_DOUBT, origin)
    known = G_PER_KWH.get(region.upper())
    if known is None:
        raise InvalidInput(
            f"No grid intensity for region {region!r}. Known: {', '.join(sorted(G_PER_KWH))}. For others give"
            " g_per_kwh, e.g. from your supplier."
        )
    return Grid(known, region.upper(), False, _COUNTRY_DOUBT, origin)


def co2(energy: Measurement, source: Grid) -> Measurement:
    """Grams of CO2e of an energy; an estimate at best, for a grid's average is one."""
    return Measurement(
        energy.joules / 3.6e6 * source.g_per_kwh,
        "g",
        energy.source if source.region == _GIVEN else max(energy.source, Source.ESTIMATED),
        (1 + energy.uncertainty) * (1 + source.uncertainty) - 1,
    )


def money(energy: Measurement, price_per_kwh: float, currency: str = "EUR") -> Measurement:
    """What an energy costs. The price is the user's: none is guessed.

    Raises:
        InvalidInput: The price is no number, negative or not finite.
    """
    check_amount("price_per_kwh", price_per_kwh)
    return Measurement(energy.joules / 3.6e6 * price_per_kwh, currency, energy.source, energy.uncertainty)


def check_amount(name: str, value: Any) -> None:
    """Raise InvalidInput unless ``value`` is a price or an intensity."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and value >= 0):
        raise InvalidInput(f"{name} must be a number, finite and at least 0, got {value!r}.")


@dataclass(frozen=True, slots=True)
class EnergyBudget:
    """An energy budget and what it was made from.

    Attributes:
        wh: Watt-hours that may be spent.
        because: Which of the given budgets is the tightest: ``"energy_wh"``, ``"co2_g"`` or ``"cost"``.
    """

    wh: float
    because: str

    def spent(self, energy: Measurement | None) -> float:
        """The part of it that is spent, 1 when it is used up; 0 before the first measurement."""
        if energy is None:
            return 0.0
        return energy.wh / self.wh if self.wh > 0 else math.inf

    def is_spent(self, energy: Measurement | None, next_epoch: Measurement | None = None) -> bool:
        """Whether to stop: it is used up, or one more epoch like ``next_epoch`` would overrun it by more than half.

        Stopping at the nearer epoch boundary keeps a study within one epoch of its limit, on either side.
        """
        if energy is None:
            return False
        ahead_wh = 0.0 if next_epoch is None else next_epoch.wh / 2
        return energy.wh + ahead_wh >= self.wh


def energy_budget(
    *,
    energy_wh: float | None = None,
    co2_g: float | None = None,
    cost: float | None = None,
    source: Grid | None = None,
    price_per_kwh: float | None = None,
) -> EnergyBudget | None:
    """The tightest of budgets in Wh, CO2e and money, as watt-hours; None if none is given.

    All three grow in step with energy, so one figure is enough to watch.

    Raises:
        InvalidInput: A budget is not positive, or one in money comes without a price.
    """
    for name, value in (("energy_wh", energy_wh), ("co2_g", co2_g), ("cost", cost)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"A budget must be positive, got {name}={value!r}.")
    options: list[EnergyBudget] = []
    if energy_wh is not None:
        options.append(EnergyBudget(energy_wh, "energy_wh"))
    if co2_g is not None:
        g_per_kwh = (source or grid()).g_per_kwh
        if g_per_kwh > 0:
            options.append(EnergyBudget(co2_g / g_per_kwh * 1000, "co2_g"))
    if cost is not None:
        if price_per_kwh is None:
            raise InvalidInput(
                f"A budget of cost={cost:g} needs the price of electricity: give price_per_kwh."
            )
        check_amount("price_per_kwh", price_per_kwh)
        if price_per_kwh > 0:
            options.append(EnergyBudget(cost / price_per_kwh * 1000, "cost"))
    return min(options, key=lambda option: option.wh, default=None)
