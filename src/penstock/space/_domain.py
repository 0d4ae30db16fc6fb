"""The contract of domains: a named value's range, its unit interval and its JSON."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, final

from penstock.core.errors import SpaceError
from penstock.space._condition import Condition

MOST_VALUES = 2**50
"""Discrete domains are indexed through the unit interval, which a double divides no finer than this."""


class Domain(ABC):
    """The values one hyperparameter may take. Immutable; its name is its key in the Space.

    Every domain maps onto the unit interval: ``from_unit`` of a uniform number in [0, 1) is a fair draw, and
    ``from_unit(to_unit(value)) == value`` exactly for every value that ``from_unit`` or ``check`` can return
    of a discrete domain, and for every value that ``from_unit`` can return of a continuous one.

    Attributes:
        when: The condition under which the domain is part of a configuration; None: always.
        structural: It changes the network (HyperPower's z), not only its training.
        transfers: Its best value carries over from a narrow model to a wide one (Hydro).
    """

    __slots__ = ()

    when: Condition | None
    structural: bool
    transfers: bool

    @property
    @abstractmethod
    def count(self) -> int | None:
        """How many values there are; None for a continuous domain."""

    @abstractmethod
    def from_unit(self, unit: float) -> Any:
        """The value at ``unit`` in [0, 1]; outside, the nearest one."""

    @abstractmethod
    def to_unit(self, value: Any) -> float:
        """Where a value of the domain lies in [0, 1]; discrete values lie in the middle of equal bins."""

    @abstractmethod
    def check(self, value: Any) -> Any:
        """``value`` as the domain would give it itself (an exact int for ``3.0``, no numpy scalars).

        Raises:
            SpaceError: It is not of the domain; the text says why, and starts so that a name fits before it.
        """

    @abstractmethod
    def value_at(self, index: int) -> Any:
        """The ``index``-th value of a discrete domain, in ascending or given order."""

    @abstractmethod
    def cuts(self, condition: Condition) -> Iterable[int]:
        """For a discrete domain: indices at which the truth of ``condition`` (one atom) may change."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Kind and parameters, JSON-able."""

    def points(self, resolution: int | None) -> Sequence[Any]:
        """The values of a full factorial: all of them, or ``resolution`` ones spread evenly.

        A continuous domain includes both its ends, and with a resolution of 1 its middle. Returned are the
        values of a continuous domain and the indices of a discrete one (for ``value_at``).
        """
        count = self.count
        if count is None:
            if resolution is None:
                raise SpaceError("is continuous and has no resolution")
            if resolution == 1:
                return [self.from_unit(0.5)]
            return _Spread(resolution, lambda i: self.from_unit(i / (resolution - 1)))
        if resolution is None or resolution >= count:
            return range(count)
        if resolution == 1:
            return [count // 2]
        return _Spread(resolution, lambda i: round(i * (count - 1) / (resolution - 1)))


@final
class _Spread(Sequence[Any]):
    """So many values, each made when it is asked for: of a fine grid hardly any are."""

    def __init__(self, count: int, at: Callable[[int], Any]) -> None:
        self._count, self._at = count, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        found = range(self._count)[index]
        return self._at(found) if isinstance(found, int) else [self._at(i) for i in found]


def refuse(owner: str, what: str, remedy: str) -> NoReturn:
    """Raise a SpaceError of the form the users know: who, what, what to do."""
    raise SpaceError(f"{owner}: {what}. {remedy}")


def as_float(owner: str, name: str, value: Any) -> float:
    """``value`` as a finite float, or a SpaceError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(owner, f"{name} is {value!r}, a {type(value).__name__}, not a number", "Give a finite number.")
    result = float(value)
    if result != result or result in (float("inf"), float("-inf")):
        refuse(owner, f"{name} is {result}", "Give a finite number.")
    return result


def as_int(owner: str, name: str, value: Any) -> int:
    """``value`` as an int, or a SpaceError; integral floats are taken."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(owner, f"{name} is {value!r}, a {type(value).__name__}, not an integer", "Give an integer.")
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not number.is_integer():  # also NaN and the infinities
        refuse(owner, f"{name} is {value!r}, not an integer", "Give an integer, or use Float.")
    return int(number)


def check_flags(owner: str, when: Any, structural: Any, transfers: Any) -> None:
    """Refuse what is not a condition or not a flag."""
    if when is not None and not isinstance(when, Condition):
        refuse(owner, f"when is {when!r}, not a condition", 'Write when=equals("optimizer", "sgd").')
    for name, flag in (("structural", structural), ("transfers", transfers)):
        if not isinstance(flag, bool):
            refuse(owner, f"{name} is {flag!r}", "Give True or False.")


def flags_repr(domain: Domain) -> list[str]:
    """The keyword arguments all domains share, where they differ from their defaults."""
    parts = []
    if domain.when is not None:
        parts.append(f"when={domain.when!r}")
    if domain.structural:
        parts.append("structural=True")
    if not domain.transfers:
        parts.append("transfers=False")
    return parts


def flags_json(domain: Domain) -> dict[str, Any]:
    """The JSON fields all domains share, where they differ from their defaults."""
    data: dict[str, Any] = {}
    if domain.when is not None:
        data["when"] = domain.when.to_json()
    if domain.structural:
        data["structural"] = True
    if not domain.transfers:
        data["transfers"] = False
    return data
