"""Conditions: when a domain is part of a configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import SpaceError

_ABSENT = object()


class Condition(ABC):
    """A test on the values of other domains. Join several with ``&``.

    A condition on a domain that is itself inactive does not hold.
    """

    __slots__ = ()

    @abstractmethod
    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether it holds in a configuration that has all active parents."""

    @property
    @abstractmethod
    def atoms(self) -> tuple[Atom, ...]:
        """The tests it consists of, each on one parent."""

    @property
    def parents(self) -> tuple[str, ...]:
        """The names it tests."""
        return tuple(atom.name for atom in self.atoms)

    @abstractmethod
    def mapped(self, check: Callable[[Atom, Any], Any]) -> Condition:
        """The condition with every value replaced by ``check(atom, value)``."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The condition as JSON."""

    def __and__(self, other: Condition) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        return All(self.atoms + other.atoms)

    def __bool__(self) -> bool:  # else ``a and b`` would be b alone, and nobody would notice
        raise SpaceError(
            f"{self!r} has no truth value. Join conditions by &, not by and: a & b. For several values of one domain "
            'write one_of("optimizer", "sgd", "adam").'
        )


class Atom(Condition):
    """A test on one parent.

    Attributes:
        name: The parent.
    """

    __slots__ = ()

    name: str

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """Itself."""
        return (self,)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Among(Atom):
    """The parent has one of some values."""

    name: str
    values: tuple[Any, ...]

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether the parent is active and has one of the values."""
        return config.get(self.name, _ABSENT) in self.values

    def mapped(self, check: Callable[[Atom, Any], Any]) -> Condition:
        """With checked values."""
        return Among(self.name, tuple(check(self, value) for value in self.values))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"test": "one_of", "name": self.name, "values": list(self.values)}

    def __repr__(self) -> str:
        if len(self.values) == 1:
            return f"equals({self.name!r}, {self.values[0]!r})"
        return f"one_of({', '.join(map(repr, (self.name, *self.values)))})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Above(Atom):
    """The parent is greater than a number."""

    name: str
    bound: float

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether the parent is active and greater."""
        value = config.get(self.name)
        return value is not None and value > self.bound

    def mapped(self, check: Callable[[Atom, Any], Any]) -> Condition:
        """With a checked bound."""
        return Above(self.name, check(self, self.bound))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"test": "greater", "name": self.name, "bound": self.bound}

    def __repr__(self) -> str:
        return f"greater({self.name!r}, {self.bound!r})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Below(Atom):
    """The parent is less than a number."""

    name: str
    bound: float

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether the parent is active and less."""
        value = config.get(self.name)
        return value is not None and value < self.bound

    def mapped(self, check: Callable[[Atom, Any], Any]) -> Condition:
        """With a checked bound."""
        return Below(self.name, check(self, self.bound))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"test": "less", "name": self.name, "bound": self.bound}

    def __repr__(self) -> str:
        return f"less({self.name!r}, {self.bound!r})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class All(Condition):
    """All of several tests hold."""

    parts: tuple[Atom, ...]

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether all hold."""
        return all(part.holds(config) for part in self.parts)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The parts."""
        return self.parts

    def mapped(self, check: Callable[[Atom, Any], Any]) -> Condition:
        """With checked values."""
        return All(tuple(atom for part in self.parts for atom in part.mapped(check).atoms))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"test": "all", "parts": [part.to_json() for part in self.parts]}

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


def equals(name: str, value: Any) -> Condition:
    """Active when the domain ``name`` has the value ``value``."""
    return Among(_name(name), (_plain(value),))


def one_of(name: str, *values: Any) -> Condition:
    """Active when the domain ``name`` has one of ``values``."""
    if not values:
        raise SpaceError(f"one_of({name!r}) names no value. Write one_of({name!r}, value, ...).")
    return Among(_name(name), tuple(_plain(value) for value in values))


def greater(name: str, bound: float) -> Condition:
    """Active when the numeric domain ``name`` is greater than ``bound``."""
    return Above(_name(name), _number("greater", name, bound))


def less(name: str, bound: float) -> Condition:
    """Active when the numeric domain ``name`` is less than ``bound``."""
    return Below(_name(name), _number("less", name, bound))


def condition_from_json(data: Mapping[str, Any]) -> Condition:
    """The condition that ``to_json`` wrote."""
    match data["test"]:
        case "one_of":
            return Among(data["name"], tuple(data["values"]))
        case "greater":
            return Above(data["name"], data["bound"])
        case "less":
            return Below(data["name"], data["bound"])
        case "all":
            return All(tuple(a for part in data["parts"] for a in condition_from_json(part).atoms))
    raise SpaceError(f"{data['test']!r} is not a condition this version knows. Update Penstock.")


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise SpaceError(
            f'A condition tests a domain by name, not {name!r}. Write equals("optimizer", "sgd").'
        )
    return name


def _plain(value: Any) -> Any:
    """``value`` without numpy scalars and tuples, as configurations hold it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return value.item()
    return value


def _number(test: str, name: str, bound: Any) -> float:
    number = _plain(bound)
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
        raise SpaceError(f"{test}({name!r}, {bound!r}) compares with {bound!r}, not a number. Give a number.")
    return number
