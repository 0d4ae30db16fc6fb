"""Checks of what users give a recurring job: every refusal names the value and the remedy."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.errors import InvalidInput


def whole(what: str, value: Any, *, least: int | None = 1) -> int:
    """A whole number of at least ``least``; numpy's are fine, True and 3.0 are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        wanted = "a whole number" if least is None else f"a whole number of at least {least}"
        raise InvalidInput(f"{what} must be {wanted}, got {value!r}.")
    return number


MOST = 1e18
"""No time, energy, power or number of epochs is greater; squares of such still are numbers."""


def real(what: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """A finite number, at least ``least`` and greater than ``above``."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if good else math.nan
    except OverflowError:
        number = math.inf
    if abs(number) > MOST and math.isfinite(number):
        raise InvalidInput(f"{what} can't be beyond {MOST:g}, got {value!r}: is it in another unit?")
    if not (math.isfinite(number) and number >= least and number > above):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        bound = bound if above == -math.inf else f" greater than {above:g}"
        raise InvalidInput(f"{what} must be a finite number{bound}, got {value!r}.")
    return number


def flag(what: str, value: Any) -> bool:
    """True or False; numpy's, 0 and 1 are fine, words are not."""
    if type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise InvalidInput(f"{what} must be True or False, got {value!r}.")


def each(what: str, values: Any, example: str) -> list[Any]:
    """The items of a collection that is neither a text nor a mapping; generators are fine."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidInput(f"{what} must be a list, e.g. {example}, got {values!r}.")
    return list(values)


def sizes(values: Any) -> tuple[int, ...]:
    """Batch sizes."""
    found = each("batch_sizes", values, "[32, 64, 128]")
    if not found:
        raise InvalidInput("batch_sizes is empty: give at least one.")
    return tuple(whole("Each of batch_sizes", size) for size in found)


def limits(values: Any) -> tuple[float, ...]:
    """Power limits."""
    found = each("limits_w", values, "[150, 200, 250]")
    return tuple(real("Each of limits_w", limit, above=0.0) for limit in found)


def device_name(value: Any) -> str:
    """The name of a kind of device; None: the one that has none."""
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"device must be the name of a kind of device, e.g. 'V100', got {value!r}.")
    return value or ""


def profile_of(given: Any) -> dict[float, tuple[float, float]]:
    """A power profile: watts -> (time_s, power_w) of an epoch."""
    text = f"A profile maps watts to (time_s, power_w) of an epoch, e.g. {{150.0: (12.5, 140.0)}}, got {given!r}."
    if not isinstance(given, Mapping):
        raise InvalidInput(text)
    found: dict[float, tuple[float, float]] = {}
    for limit, point in given.items():
        try:
            time_s, power_w = point
            limit_w = real("A power limit", limit, least=0.0)
            found[limit_w] = (real("time_s", time_s, above=0.0), real("power_w", power_w, least=0.0))
        except (TypeError, ValueError) as error:  # InvalidInput too: it says which
            why = f" {error}" if isinstance(error, InvalidInput) else ""
            raise InvalidInput(text + why) from error
    return found


def checked_config(given: Any) -> dict[str, Any]:
    """Further values of ``run.config``."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidInput(f"config must map names to values, e.g. {{'lr': 0.1}}, got {given!r}.")
    if "lr" in given:
        real("config['lr']", given["lr"])
    return dict(given)
