"""Limits: bounds on what a configuration may draw, take or need: ``power_w <= 90`` (HyperPower's constraints)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, final

from penstock.core import Config, TrialRecord
from penstock.core.errors import InvalidInput

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SCALES: dict[str, dict[str, float]] = {
    "bytes": {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()} | {"bytes": 1.0},
    "W": {"mW": 1e-3, "W": 1.0, "kW": 1e3},
    "s": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    "J": {"mJ": 1e-3, "J": 1.0, "kJ": 1e3, "Wh": 3600.0, "kWh": 3.6e6},
    "": {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12},
}
_TEXT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


@final
@dataclass(frozen=True, slots=True)
class Quantity:
    """Something a configuration has, to be bounded: ``power_w <= 90``, ``memory_bytes <= "1.25GB"``.

    Without ``of`` it is predicted from a profile, or known from what trials report under its name. With ``of`` it
    is a function of the configuration, exact and known before training:
    ``Quantity("cells", of=lambda config: config["width"] ** 2) <= 4096``.

    Attributes:
        name: Under which it is predicted and reported.
        unit: ``"W"``, ``"bytes"``, ``"s"``, ``"J"`` or none; texts such as ``"1.25GB"`` are read by it.
        of: The value of a configuration.
    """

    name: str
    unit: str = ""
    of: Callable[[Config], float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise InvalidInput(f"A quantity's name must be an identifier such as power_w, got {self.name!r}.")
        if self.unit not in _SCALES:
            known = ", ".join(repr(unit) for unit in _SCALES)
            raise InvalidInput(f"The unit {self.unit!r} of {self.name} is not known: give one of {known}.")
        if self.of is not None and not callable(self.of):
            raise InvalidInput(f"{self.name}: of={self.of!r} is not a function of the configuration.")

    def amount(self, given: object) -> float:
        """A number or a text such as ``"1.25GB"`` in the quantity's unit.

        Raises:
            InvalidInput: It is neither, or of another unit.
        """
        if isinstance(given, str):
            return self._read(given)
        if isinstance(given, SupportsFloat) and not isinstance(given, bool):
            with suppress(OverflowError):  # of a whole number
                if math.isfinite(float(given)):
                    return float(given)
        raise InvalidInput(f"The bound of {self.name} must be a finite number or a text, got {given!r}.")

    def text(self, value: float) -> str:
        """A value with its unit, for people."""
        if self.unit == "bytes":
            for least, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e4, "kB")):
                if abs(value) >= least:
                    return f"{value / (least if name != 'kB' else 1e3):.4g} {name}"
        return f"{value:.4g} {self.unit}".rstrip()

    def __le__(self, bound: float | str) -> Limit:
        return Limit(self, self.amount(bound))

    def __ge__(self, bound: float | str) -> Limit:
        return Limit(self, self.amount(bound), at_most=False)

    def __lt__(self, bound: object) -> Limit:
        raise InvalidInput(f"Write {self.name} <= {bound!r}: measured values have no use for a strict bound.")

    def __gt__(self, bound: object) -> Limit:
        raise InvalidInput(f"Write {self.name} >= {bound!r}: measured values have no use for a strict bound.")

    def _read(self, text: str) -> float:
        match = _TEXT.fullmatch(text)
        scales = _SCALES[self.unit]
        scale = None if match is None else (1.0 if not match[2] else scales.get(match[2]))
        if match is None or scale is None or not math.isfinite(float(match[1]) * scale):
            raise InvalidInput(
                f"{self.name}: {text!r} can't be read. Write a number, with one of {', '.join(scales)} if you like."
            )
        return float(match[1]) * scale


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """A bound of a quantity.

    Attributes:
        quantity: What is bounded.
        bound: In the quantity's unit; the bound itself is allowed.
        at_most: An upper bound; False: a lower one.
    """

    quantity: Quantity
    bound: float
    at_most: bool = True

    @property
    def name(self) -> str:
        """The quantity's name."""
        return self.quantity.name

    def excess(self, value: float) -> float:
        """By how much ``value`` is over the bound, relative to it; at most 0 where the limit is kept.

        With a bound of 0, the absolute difference. A value that is not a number violates by infinity.
        """
        if math.isnan(value):
            return math.inf
        over = value - self.bound if self.at_most else self.bound - value
        return over / abs(self.bound) if self.bound else over

    def holds(self, value: float) -> bool:
        """Whether ``value`` keeps the limit."""
        return value <= self.bound if self.at_most else value >= self.bound

    def probability(self, mean: float, std: float) -> float:
        """How likely a normal quantity keeps the limit: HyperPower 3.5's Pr(g(x) <= g0)."""
        if not std > 0:
            return 1.0 if self.holds(mean) else 0.0
        margin = (self.bound - mean if self.at_most else mean - self.bound) / std
        return 0.5 * math.erfc(-margin / math.sqrt(2.0))

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; a user's function is left out (it is kept by pickling)."""
        return {
            "quantity": self.quantity.name,
            "unit": self.quantity.unit,
            "bound": self.bound,
            "at_most": self.at_most,
            "function": self.quantity.of is not None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Limit:
        """The limit of its JSON-able form, without a user's function.

        Raises:
            InvalidInput: It is something else.
        """
        try:
            quantity = Quantity(data["quantity"], data["unit"])
            return cls(quantity, float(data["bound"]), bool(data["at_most"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise InvalidInput(f"Not a limit written by to_json(): {error!r}.") from error
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"Not a limit written by to_json(): {error!r}.") from error

    def __bool__(self) -> bool:
        raise InvalidInput(
            f"{self} has no truth value. For two bounds write two limits: [{self.name} >= a, {self.name} <= b]."
        )

    def __str__(self) -> str:
        return f"{self.name} {'<=' if self.at_most else '>='} {self.quantity.text(self.bound)}"


def measured(record: TrialRecord) -> dict[str, float]:
    """What is known of a trial's configuration: its latest metrics, and seconds and joules of its epochs."""
    values = dict(record.metrics) if record.known else {}
    seconds = record.per_epoch(lambda report: report.train_s)
    joules = record.per_epoch(lambda report: None if report.energy is None else report.energy.value)
    if seconds is not None:
        values.setdefault("epoch_s", seconds)
    if joules is not None:
        values.setdefault("epoch_j", joules)
    return values


def check_limits(limits: Iterable[Limit] | Limit | Any) -> tuple[Limit, ...]:
    """The limits as a tuple.

    Raises:
        InvalidInput: One is not a limit, or two leave nothing between them.
    """
    if isinstance(limits, Limit):
        limits = (limits,)
    given: tuple[Any, ...]
    try:
        given = tuple(limits)
    except TypeError:
        raise InvalidInput(f"limits takes a list such as [power_w <= 90], got {limits!r}.") from None
    most: dict[str, Limit] = {}
    for limit in given:
        if isinstance(limit, Quantity):
            raise InvalidInput(f"{limit.name} alone is no limit: write {limit.name} <= ...")
        if not isinstance(limit, Limit):
            raise InvalidInput(f"limits takes limits such as power_w <= 90, got {limit!r}.")
        known = most.get(limit.name)
        if limit.at_most and (known is None or limit.bound < known.bound):
            most[limit.name] = limit
    for limit in given:
        upper = most.get(limit.name)
        if not limit.at_most and upper is not None and limit.bound > upper.bound:
            raise InvalidInput(f"Nothing is between {limit} and {upper}. Drop one of them.")
    return given


power_w = Quantity("power_w", "W")
"""Average watts of the device during inference."""

memory_bytes = Quantity("memory_bytes", "bytes")
"""The most memory that inference needs on the device."""

latency_s = Quantity("latency_s", "s")
"""Seconds of one inference batch."""

params = Quantity("params")
"""Trainable parameters."""

flops = Quantity("flops")
"""Floating-point operations of one inference batch."""

epoch_s = Quantity("epoch_s", "s")
"""Seconds of one epoch of training."""

epoch_j = Quantity("epoch_j", "J")
"""Joules of one epoch of training."""
