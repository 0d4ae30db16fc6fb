"""Int: a whole number between two bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

from penstock.core.errors import SpaceError
from penstock.space._condition import Condition
from penstock.space._domain import MOST_VALUES, Domain, as_int, check_flags, flags_json, flags_repr, refuse
from penstock.space._float import number_cuts

_MOST_LOG = 10**12  # beyond, log and exp no longer tell neighbours apart


@final
@dataclass(frozen=True, slots=True, repr=False)
class Int(Domain):
    """A whole number in [low, high].

    Attributes:
        low: The least value.
        high: The greatest value. With ``step``, values stop at the last grid point that does not exceed it.
        log: A number v is as likely as its share [v - 1/2, v + 1/2] of the logarithmic axis; needs ``low >= 1``.
        step: Only low, low + step, low + 2 step ...
        when: Condition under which it is part of a configuration.
        structural: It changes the network, not only its training.
        transfers: Its best value carries over from a narrow model to a wide one.
    """

    low: int
    high: int
    _: KW_ONLY
    log: bool = False
    step: int | None = None
    when: Condition | None = None
    structural: bool = False
    transfers: bool = True
    _count: int = field(init=False, repr=False, compare=False)
    _by: int = field(init=False, repr=False, compare=False)
    _origin: float = field(init=False, repr=False, compare=False)
    _span: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = f"Int({self.low!r}, {self.high!r})"
        low, high = as_int(owner, "low", self.low), as_int(owner, "high", self.high)
        check_flags(owner, self.when, self.structural, self.transfers)
        if not isinstance(self.log, bool):
            refuse(owner, f"log is {self.log!r}", "Give True or False.")
        if low >= high:
            remedy = f"Use Choice({low!r}) for a constant." if low == high else "Swap the bounds."
            refuse(owner, f"low {low!r} is not less than high {high!r}", remedy)
        step = None if self.step is None else as_int(owner, "step", self.step)
        if step is not None:
            if step <= 0:
                refuse(owner, f"step {step!r} is not positive", "Give a step of at least 1.")
            if step > high - low:
                remedy = f"Use Choice({low!r}) for a constant, or a smaller step."
                refuse(owner, f"step {step!r} is larger than the range {high - low}", remedy)
            if step == 1:
                step = None
        origin = span = 0.0
        if self.log:
            if step is not None:
                remedy = "Drop one, or list the values: Choice(...)."
                refuse(owner, f"log=True and step={step!r} exclude each other", remedy)
            if low < 1:
                refuse(owner, f"log=True needs low >= 1, but low is {low!r}", "Raise low, or drop log=True.")
            if high > _MOST_LOG:
                refuse(
                    owner, f"log=True goes up to {_MOST_LOG}, but high is {high!r}", "Use Float(log=True)."
                )
            origin = math.log(low - 0.5)
            span = math.log(high + 0.5) - origin
        count = (high - low) // (step or 1) + 1
        if count > MOST_VALUES:
            refuse(owner, f"it has {count} values, more than {MOST_VALUES}", "Narrow it, or give a step.")
        for name, value in (
            ("low", low),
            ("high", high),
            ("step", step),
            ("_count", count),
            ("_by", step or 1),
            ("_origin", origin),
            ("_span", span),
        ):
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """How many values there are."""
        return self._count

    def from_unit(self, unit: float) -> int:
        """The value at ``unit``."""
        if self.log:
            value = round(math.exp(self._origin + min(max(unit, 0.0), 1.0) * self._span))
            return self.low if value < self.low else self.high if value > self.high else value
        index = int(unit * self._count)
        if index >= self._count:
            index = self._count - 1
        return self.low + index * self._by if index > 0 else self.low

    def to_unit(self, value: Any) -> float:
        """Where ``value`` lies."""
        if self.log:
            unit = (math.log(value) - self._origin) / self._span
            return 0.0 if unit < 0.0 else 1.0 if unit > 1.0 else unit
        return float(((value - self.low) // self._by + 0.5) / self._count)

    def check(self, value: Any) -> int:
        """``value`` as an int of the domain."""
        number = as_int(f"{self!r}", "the value", value)
        if not self.low <= number <= self.high:
            raise SpaceError(f"{number!r} is outside [{self.low!r}, {self.high!r}]. Give a value within.")
        index, rest = divmod(number - self.low, self._by)
        if rest:
            nearest = self.value_at(min(index + (rest > self._by / 2), self._count - 1))
            raise SpaceError(f"{number!r} is not on the grid {self!r}. The nearest value is {nearest!r}.")
        return number

    def value_at(self, index: int) -> int:
        """The grid point ``index``."""
        return self.low + index * self._by

    def cuts(self, condition: Condition) -> Iterable[int]:
        """Indices where ``condition`` may change its truth."""
        return number_cuts(self, condition)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        data: dict[str, Any] = {"kind": "int", "low": self.low, "high": self.high}
        if self.log:
            data["log"] = True
        if self.step is not None:
            data["step"] = self.step
        return data | flags_json(self)

    def __repr__(self) -> str:
        parts = [repr(self.low), repr(self.high)]
        if self.log:
            parts.append("log=True")
        if self.step is not None:
            parts.append(f"step={self.step!r}")
        return f"Int({', '.join(parts + flags_repr(self))})"
