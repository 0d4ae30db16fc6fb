"""Budgets: how much a study may spend, in trials, epochs, time, energy, CO2e and money."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from numbers import Real
from typing import Any

from penstock.core.errors import InvalidInput

_WHOLE = ("trials", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a study has spent; None where it can't be told."""

    trials: int = 0
    epochs: int = 0
    time_s: float = 0.0
    energy_wh: float | None = None
    co2_g: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a study; None: no limit. The study stops cleanly within an epoch of the first one reached, and with
    limits of trials and epochs exactly there.

    Attributes:
        trials: How many trials may start.
        epochs: How many epochs may be trained, over all trials: each epoch once, however often it is run again after a
            failure, and those after a trial's latest report, too. No trial begins one too many: each is told how far it
            may train when it starts. Near the limit fewer trials run at a time, and the last ones end early.
        time_s: Wall time, over all sessions of the study.
        energy_wh: Energy in watt-hours. With such a limit, in CO2e or money too, all trials together go beyond it by
            one epoch at most (of a fused group, where trials are fused). So the first epoch of a study runs alone, to
            tell what one costs, and near the limit fewer trials run at a time.
        co2_g: Emissions in grams of CO2e.
        cost: Money, in the currency of the price per kWh.
        finish: Whether what runs when the budget is used up may finish its training; no other is begun.
    """

    trials: int | None = None
    epochs: int | None = None
    time_s: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None
    cost: float | None = None
    finish: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.finish, bool):
            raise InvalidInput(f"Budget finish must be True or False, got {self.finish!r}.")
        for field in _limits():
            value = getattr(self, field.name)
            if value is None:
                continue
            if not 0 < _number(value) < math.inf:
                raise InvalidInput(
                    f"Budget {field.name} must be a number above 0, got {value!r}. Without a limit, leave it out."
                )
            if field.name in _WHOLE and value != int(value):
                raise InvalidInput(f"Budget {field.name} must be a whole number, got {value!r}.")
            plain = (
                int(value) if field.name in _WHOLE else value if isinstance(value, int) else _number(value)
            )
            object.__setattr__(self, field.name, plain)  # trials are counted, and budgets are kept as JSON

    @property
    def needs_energy(self) -> bool:
        """Whether keeping it needs metered energy."""
        return (self.energy_wh, self.co2_g, self.cost) != (None, None, None)

    def used_up(self, spent: Spent, *, currency: str = "EUR") -> str | None:
        """Which limit is reached, as a sentence; None if none is. Trials are limited where they are made."""
        for field in _limits():
            limit, value = getattr(self, field.name), getattr(spent, field.name)
            if field.name != "trials" and limit is not None and value is not None and value >= limit:
                unit = currency if field.name == "cost" else _UNITS[field.name]
                return f"budget of {limit:g} {unit} used up ({value:.4g} spent)"
        return None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, without what is not limited."""
        pairs = {field.name: getattr(self, field.name) for field in _limits()}
        found = {name: value for name, value in pairs.items() if value is not None}
        return found | {"finish": True} if self.finish else found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        """The budget of its JSON-able form.

        Raises:
            InvalidInput: It is something else.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise InvalidInput(f"Not a budget written by to_json(): {error}.") from error


def _number(value: Any) -> float:
    """A number of any kind, NumPy's too, and of any size; not a number: what is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _limits() -> list[Field[Any]]:
    return [field for field in fields(Budget) if field.name != "finish"]


_UNITS = {
    "trials": "trials",
    "epochs": "epochs",
    "time_s": "s",
    "energy_wh": "Wh",
    "co2_g": "g CO2e",
}
