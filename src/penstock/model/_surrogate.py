"""Shrink: how a study makes and uses a narrow twin of the user's model. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.errors import InvalidInput


@final
@dataclass(frozen=True, slots=True)
class Shrink:
    """Tune a narrow twin of the model, then train the model itself with what was found (Hydro).

    Attributes:
        factor: Every hidden width is divided by it (Hydro's S).
        floor: The narrowest a shrunk layer may be; a narrower one is refused with its name.
        eager: From this share of the surrogate trials on, the best configuration so far starts on the full model as
            soon as a device is free; 1: only when all are done.
        second: How many further trials of the full model tune what does not transfer (``transfers=False``: weight
            decay, dropout), beside the one at the held values.
        held: Values of those names during surrogate tuning; default: the optimizer's or the model's own default, else
            the domain's value nearest to none.
        check: Whether a failing coordinate check stops the study; False: it is only noted.
        widths: Divisors at which the check trains a few steps; default: the model, two in between and the twin.
        steps: Steps of the check.
        targets: How many of the best configurations are trained on the full model once tuning is over; the best
            result counts. Where devices would be idle while the best one trains, a second costs energy but no time.

    Example:
        >>> Shrink(8)
        Shrink(8)
    """

    factor: float = 8
    floor: int = 4
    eager: float = 0.5
    second: int = 3
    held: Mapping[str, Any] = field(default_factory=dict)
    check: bool = True
    widths: tuple[float, ...] = ()
    steps: int = 4
    targets: int = 1

    def __post_init__(self) -> None:
        if not _number(self.factor) or not math.isfinite(self.factor) or self.factor <= 1:
            raise InvalidInput(f"Shrink takes a factor above 1, such as 8, got {self.factor!r}.")
        for name, least in (("floor", 1), ("second", 0), ("steps", 1), ("targets", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(
                    f"Shrink {name} must be a whole number of at least {least}, got {value!r}."
                )
        if not _number(self.eager) or not 0 <= self.eager <= 1:
            raise InvalidInput(f"Shrink eager is a share of the trials between 0 and 1, got {self.eager!r}.")
        if not isinstance(self.held, Mapping):
            raise InvalidInput(
                f'Shrink held takes values by name, such as {{"weight_decay": 1e-4}}, got {self.held!r}. Leave it out '
                "to hold what does not transfer at its default."
            )
        if not isinstance(self.widths, tuple | list) or any(
            not _number(width) or not 1 <= width < math.inf for width in self.widths
        ):
            raise InvalidInput(
                f"Shrink widths are divisors of at least 1, such as (2, 4), got {self.widths!r}."
            )

    @property
    def divisors(self) -> tuple[float, ...]:
        """At which divisors of the width the check trains, the full model (1) and the twin included."""
        if self.widths:
            return tuple(sorted({1.0, float(self.factor), *map(float, self.widths)}))
        between = [2.0**k for k in range(1, 16) if 2.0**k < self.factor]
        chosen = (
            between if len(between) <= 2 else [between[len(between) // 2 - 1], between[len(between) // 2]]
        )
        return (1.0, *chosen, float(self.factor))

    def __repr__(self) -> str:
        return f"Shrink({self.factor:g})"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["Shrink"]
