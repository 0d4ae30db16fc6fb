"""Checks of schedulers' arguments, and the geometry of rungs that several of them share."""

from __future__ import annotations

from penstock.core.errors import InvalidInput
from penstock.schedule._base import Scheduler


def whole(name: str, value: object, least: int = 1) -> int:
    """``value`` as a whole number of at least ``least``, or an error that names it."""
    # Anything with __index__ (NumPy's integers too), but not a bool and not a float such as 3.0.
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = int(value.__index__())
        if number >= least:
            return number
    raise InvalidInput(f"{name} is {value!r}; give a whole number of at least {least}.")


def fraction(name: str, value: object, low: float, high: float) -> float:
    """``value`` as a number in [low, high], or an error that names it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise InvalidInput(f"{name} is {value!r}; give a number from {low:g} to {high:g}.")


def levels(max_epochs: int, min_epochs: int, eta: int) -> int:
    """The largest s with ``min_epochs * eta**s <= max_epochs``.

    In whole numbers: ``floor(log(243) / log(3))`` is 4 in floating point, not 5.
    """
    if min_epochs > max_epochs:
        raise InvalidInput(
            f"min_epochs is {min_epochs} and max_epochs {max_epochs}: lower min_epochs, or raise max_epochs."
        )
    count = 0
    while min_epochs * eta ** (count + 1) <= max_epochs:
        count += 1
    return count


def budgets(max_epochs: int, min_epochs: int, eta: int) -> tuple[int, ...]:
    """Epochs at each rung, first to last: from ``max_epochs`` down by ``eta``, rounded down.

    The last rung is ``max_epochs`` itself; where ``max_epochs`` is ``min_epochs * eta**s``, the first is
    ``min_epochs``.
    """
    count = levels(max_epochs, min_epochs, eta)
    return tuple(max_epochs // eta**down for down in range(count, -1, -1))


def raised(scheduler: Scheduler, own: int | None, most: int | None) -> int | None:
    """A scheduler's number of trials where the budget has another: who said their own number has said enough."""
    return own if own is None or most is None or not scheduler.by_default else max(own, most)


def ended_by(scheduler: Scheduler, own: int | None) -> str:
    """Why a scheduler with a number of trials, or none, has no more of them."""
    name = type(scheduler).__name__
    if own is None:
        return "its sampler has proposed all there is"
    return f"{name}(trials={own}) has a number of its own, which no budget raises"
