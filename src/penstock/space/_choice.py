"""Choice: one of some given values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.errors import SpaceError
from penstock.space._condition import Condition
from penstock.space._domain import Domain, check_flags, flags_json, flags_repr, refuse

_REMEDY = "Use a name and look the object up in your training function."


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Choice(Domain):
    """One of some values, without an order: strings, numbers, booleans, None, or lists of them.

    Values are what JSON gives back: tuples become lists. One value alone makes a constant; of a list, that is asked for
    by ``Choice.constant([64, 64])``, as ``Choice(["a", "b"])`` is more likely a mistake for ``Choice("a", "b")``.

    Attributes:
        values: The values.
        when: Condition under which it is part of a configuration.
        structural: It changes the network, not only its training.
        transfers: Its best value carries over from a narrow model to a wide one.
    """

    values: tuple[Any, ...] = field(compare=False)
    when: Condition | None
    structural: bool
    transfers: bool
    _keys: tuple[Hashable, ...]  # compared in place of the values: tells True from 1
    _index: dict[Hashable, int] = field(compare=False)
    _copied: bool = field(compare=False)

    def __init__(
        self,
        *values: Any,
        when: Condition | None = None,
        structural: bool = False,
        transfers: bool = True,
    ) -> None:
        owner = f"Choice({', '.join(map(repr, values))})"
        if not values:
            refuse("Choice()", "it has no values", "Give at least one: Choice(32, 64, 128).")
        if len(values) == 1 and isinstance(values[0], list | tuple):
            each = ", ".join(map(repr, values[0]))
            refuse(
                owner,
                "a list as its only value",
                f"Give the values one by one: Choice({each}); or Choice.constant(...) for a list that never changes.",
            )
        if (
            len(values) == 1
            and isinstance(values[0], Iterable)
            and not isinstance(values[0], str | bytes | Mapping)
        ):
            kind = type(values[0]).__name__
            refuse(owner, f"one {kind} as its only value", "Give the values one by one: Choice(*values).")
        self._set(owner, values, when, structural, transfers)

    @classmethod
    def constant(
        cls, value: Any, *, when: Condition | None = None, structural: bool = False, transfers: bool = True
    ) -> Choice:
        """The domain of one value, which may be a list."""
        made = cls.__new__(cls)
        made._set(f"Choice.constant({value!r})", (value,), when, structural, transfers)
        return made

    def _set(
        self, owner: str, values: Sequence[Any], when: Condition | None, structural: bool, transfers: bool
    ) -> None:
        check_flags(owner, when, structural, transfers)
        plain = tuple(_plain(owner, value) for value in values)
        seen: dict[Hashable, Any] = {}
        for value in plain:
            loose = _loose_key(value)
            if loose in seen:
                equal = seen[loose]
                twice = f"{value!r} is there twice"
                what = twice if repr(equal) == repr(value) else f"{equal!r} and {value!r} are equal in Python"
                refuse(owner, what, "Drop one, or use names (strings).")
            seen[loose] = value
        keys = tuple(_key(value) for value in plain)
        index = {key: i for i, key in enumerate(keys)}
        for name, entry in (
            ("values", plain),
            ("when", when),
            ("structural", structural),
            ("transfers", transfers),
            ("_keys", keys),
            ("_index", index),
            ("_copied", any(isinstance(value, list) for value in plain)),
        ):
            object.__setattr__(self, name, entry)

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    def from_unit(self, unit: float) -> Any:
        """The value whose bin ``unit`` is in."""
        values = self.values
        index = int(unit * len(values))
        return self.value_at(0 if index < 0 else len(values) - 1 if index >= len(values) else index)

    def to_unit(self, value: Any) -> float:
        """The middle of the value's bin."""
        return (self.index(value) + 0.5) / len(self.values)

    def check(self, value: Any) -> Any:
        """``value`` as the domain holds it."""
        return self.value_at(self.index(value))

    def index(self, value: Any) -> int:
        """The place of ``value`` among the values.

        Raises:
            SpaceError: It is none of them.
        """
        try:
            index = self._index.get(_key(value))
        except TypeError:
            index = None
        if index is None:
            known = ", ".join(map(repr, self.values[:20])) + (", ..." if len(self.values) > 20 else "")
            raise SpaceError(f"{value!r} is none of its values. Give one of {known}.")
        return index

    def value_at(self, index: int) -> Any:
        """The value at ``index``; lists are fresh, so that a training function may change its own."""
        value = self.values[index]
        return _copy(value) if self._copied else value

    def cuts(self, condition: Condition) -> Iterable[int]:
        """All indices: the values have no order."""
        return range(len(self.values))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": "choice", "values": _copy(list(self.values))} | flags_json(self)

    def __repr__(self) -> str:
        name = "Choice.constant" if len(self.values) == 1 and self._copied else "Choice"
        return f"{name}({', '.join([*map(repr, self.values), *flags_repr(self)])})"


def _copy(value: Any) -> Any:
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _plain(owner: str, value: Any) -> Any:
    """``value`` as JSON gives it back."""
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            refuse(owner, f"{value!r} is not a finite number", "Use a name (a string) for it.")
        return value
    if isinstance(value, list | tuple):
        return [_plain(owner, item) for item in value]
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return _plain(owner, value.item())
    if isinstance(
        value, str | int | float
    ):  # of a subclass: an enum's member would come back as something else
        base = str if isinstance(value, str) else int if isinstance(value, int) else float
        remedy = f"Give its plain value, {base.__name__}(...): the journal can't tell them apart."
        refuse(owner, f"{value!r} is a {type(value).__name__}", remedy)
    refuse(owner, f"{value!r} is a {type(value).__name__}, which no configuration can hold", _REMEDY)


def _key(value: Any) -> Hashable:
    """A hashable stand-in that tells booleans from numbers, but not 1 from 1.0 nor lists from tuples."""
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool):
        return ("bool", value)
    return value  # type: ignore[no-any-return]


def _loose_key(value: Any) -> Hashable:
    return tuple(map(_loose_key, value)) if isinstance(value, list) else value
