"""Checks of arguments: the kinds that every room takes numbers of."""

from __future__ import annotations

import math
import numbers
from typing import Any

from penstock.core.errors import InvalidInput


def is_real(value: Any) -> bool:
    """Whether it is a number (NumPy's too) and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(name: str, value: Any, remedy: str = "") -> int:
    """``value`` as an int (NumPy's are taken, floats and booleans are not), or an error that names it.

    Args:
        name: Of the argument.
        value: What was given.
        remedy: What else to say; an example where nothing is given.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        hint = remedy or "Give one, such as 2."
        raise InvalidInput(f"{name} takes a whole number, got {value!r}. {hint}")
    return int(value)


def number(name: str, value: Any, remedy: str = "") -> float:
    """``value`` as a finite float (booleans are none), or an error that names it."""
    if not is_real(value) or not math.isfinite(value):
        hint = remedy or "Give one, such as 1.5."
        raise InvalidInput(f"{name} takes a finite number, got {value!r}. {hint}")
    return float(value)
