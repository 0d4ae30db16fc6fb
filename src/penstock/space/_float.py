"""Float: a real number between two bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from typing import Any, final

from penstock.core.errors import SpaceError
from penstock.space._condition import Above, Among, Below, Condition
from penstock.space._domain import (
    MOST_VALUES,
    Domain,
    as_float,
    check_flags,
    flags_json,
    flags_repr,
    refuse,
)

# Continuous values are rounded to what survives the way to the unit cube and back: a model that proposes the
# point of a known configuration proposes that configuration, and journals hold no noise digits.
_SPAN_DIGITS = 12  # linear: decimal places below the span
_LOG_DIGITS = 11  # log: significant digits; log and exp lose up to 5e-13 over the range of doubles
_MIN_LOG_SPAN = 1e-4
_MIN_RELATIVE_SPAN = 1e-9


@final
@dataclass(frozen=True, slots=True, repr=False)
class Float(Domain):
    """A real number in [low, high].

    Proposals of a continuous Float are rounded to 12 decimal digits of its span (with ``log`` to 11
    significant digits); configurations the user gives keep all their digits.

    Attributes:
        low: The least value.
        high: The greatest value. With ``step``, values stop at the last grid point that does not exceed it.
        log: Uniform in the logarithm; needs ``low > 0``.
        step: Only low, low + step, low + 2 step ... in exact decimals (0.3, never 0.30000000000000004).
        when: Condition under which it is part of a configuration.
        structural: It changes the network, not only its training.
        transfers: Its best value carries over from a narrow model to a wide one.
    """

    low: float
    high: float
    _: KW_ONLY
    log: bool = False
    step: float | None = None
    when: Condition | None = None
    structural: bool = False
    transfers: bool = True
    _count: int | None = field(init=False, repr=False, compare=False)
    _origin: float = field(init=False, repr=False, compare=False)
    _span: float = field(init=False, repr=False, compare=False)
    _digits: int = field(init=False, repr=False, compare=False)
    _low10: Decimal = field(init=False, repr=False, compare=False)
    _step10: Decimal = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = f"Float({self.low!r}, {self.high!r})"
        low, high = as_float(owner, "low", self.low), as_float(owner, "high", self.high)
        check_flags(owner, self.when, self.structural, self.transfers)
        if not isinstance(self.log, bool):
            refuse(owner, f"log is {self.log!r}", "Give True or False.")
        if low >= high:
            remedy = f"Use Choice({low!r}) for a constant." if low == high else "Swap the bounds."
            refuse(owner, f"low {low!r} is not less than high {high!r}", remedy)
        span = high - low
        largest = max(abs(low), abs(high))
        if span == math.inf or span < max(
            largest * _MIN_RELATIVE_SPAN, sys.float_info.min / sys.float_info.epsilon
        ):
            remedy = "Rescale it in your training function."
            refuse(owner, f"the span {span!r} is too wide or too narrow for doubles", remedy)
        step = self.step
        count: int | None = None
        origin, digits = low, 0
        low10 = step10 = Decimal(0)
        if self.log:
            if step is not None:
                remedy = "Drop one, or list the values: Choice(...)."
                refuse(owner, f"log=True and step={step!r} exclude each other", remedy)
            if low < sys.float_info.min:
                refuse(owner, f"log=True needs low > 0, but low is {low!r}", "Raise low, or drop log=True.")
            origin = math.log(low)
            span = math.log(high) - origin
            if span < _MIN_LOG_SPAN:
                refuse(owner, "log=True makes no difference over so narrow a range", "Drop log=True.")
        elif step is not None:
            step = as_float(owner, "step", step)
            if step <= 0:
                refuse(owner, f"step {step!r} is not positive", "Give a step > 0, or None for no grid.")
            low10, step10 = Decimal(repr(low)), Decimal(repr(step))
            span10 = Decimal(repr(high)) - low10
            if step10 > span10:
                remedy = f"Use Choice({low!r}) for a constant, or a smaller step."
                refuse(owner, f"step {step!r} is larger than the range {span10}", remedy)
            if step < 16 * math.ulp(largest):
                refuse(owner, f"step {step!r} is too fine for doubles", "Drop step.")
            count = int(span10 // step10) + 1
            if count > MOST_VALUES:
                refuse(owner, f"step {step!r} makes {count} values", "Drop step.")
        else:
            quantum = max(
                math.ceil(math.log10(span)) - _SPAN_DIGITS, math.ceil(math.log10(16 * math.ulp(largest)))
            )
            digits = -quantum
        for name, value in (
            ("low", low),
            ("high", high),
            ("step", step),
            ("_count", count),
            ("_origin", origin),
            ("_span", span),
            ("_digits", digits),
            ("_low10", low10),
            ("_step10", step10),
        ):
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int | None:
        """How many grid points there are; None without a step."""
        return self._count

    def from_unit(self, unit: float) -> float:
        """The value at ``unit``."""
        count = self._count
        if count is not None:
            index = int(unit * count)
            return self.value_at(0 if index < 0 else count - 1 if index >= count else index)
        if unit <= 0.0:
            return self.low
        if unit >= 1.0:
            return self.high
        if self.log:
            value = float(f"{math.exp(self._origin + unit * self._span):.{_LOG_DIGITS - 1}e}")
        else:
            value = round(self._origin + unit * self._span, self._digits)
        return self.low if value < self.low else self.high if value > self.high else value

    def to_unit(self, value: Any) -> float:
        """Where ``value`` lies."""
        if self._count is not None:
            return (self._index(value) + 0.5) / self._count
        if self.log:
            unit = (math.log(value) - self._origin) / self._span
        else:
            unit = (value - self._origin) / self._span
        return 0.0 if unit < 0.0 else 1.0 if unit > 1.0 else float(unit)

    def check(self, value: Any) -> float:
        """``value`` as a float of the domain."""
        number = as_float(f"{self!r}", "the value", value)
        # A value one rounding error outside (0.1 * 3 for a high of 0.3) is the bound.
        slack = 4 * math.ulp(max(abs(self.low), abs(self.high)))
        if not self.low - slack <= number <= self.high + slack:
            raise SpaceError(f"{number!r} is outside [{self.low!r}, {self.high!r}]. Give a value within.")
        number = min(max(number, self.low), self.high)
        if self._count is None:
            return number
        nearest = self.value_at(self._index(number))
        assert self.step is not None
        if abs(number - nearest) > max(1e-9 * self.step, slack):
            raise SpaceError(f"{number!r} is not on the grid {self!r}. The nearest value is {nearest!r}.")
        return nearest

    def value_at(self, index: int) -> float:
        """The grid point ``index``."""
        return float(self._low10 + index * self._step10)

    def cuts(self, condition: Condition) -> Iterable[int]:
        """Indices where ``condition`` may change its truth."""
        return number_cuts(self, condition)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        data: dict[str, Any] = {"kind": "float", "low": self.low, "high": self.high}
        if self.log:
            data["log"] = True
        if self.step is not None:
            data["step"] = self.step
        return data | flags_json(self)

    def _index(self, value: float) -> int:
        assert self.step is not None
        assert self._count is not None
        return min(max(round((value - self.low) / self.step), 0), self._count - 1)

    def __repr__(self) -> str:
        parts = [repr(self.low), repr(self.high)]
        if self.log:
            parts.append("log=True")
        if self.step is not None:
            parts.append(f"step={self.step!r}")
        return f"Float({', '.join(parts + flags_repr(self))})"


def number_cuts(domain: Domain, condition: Condition) -> Iterable[int]:
    """The cuts of a discrete numeric domain, by bisection over its ascending values."""

    def first(test: Any) -> int:
        below, above = 0, domain.count or 0
        while below < above:
            middle = (below + above) // 2
            if test(domain.value_at(middle)):
                above = middle
            else:
                below = middle + 1
        return below

    match condition:
        case Among():
            for value in condition.values:
                at = first(lambda v, value=value: v >= value)
                yield from (at, at + 1)
        case Above():
            yield first(lambda v: v > condition.bound)
        case Below():
            yield first(lambda v: v >= condition.bound)
