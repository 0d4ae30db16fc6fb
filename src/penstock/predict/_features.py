"""Features: a configuration as HyperPower's z, the numbers that power and memory are predicted from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from penstock.core import Config
from penstock.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix: TypeAlias = NDArray[np.float64]

Extra: TypeAlias = Callable[[Config], Mapping[str, float]]
"""Further numbers of a configuration by name, such as the parameters and FLOPs of the network it makes."""


class SpaceLike(Protocol):
    """A ``Space``, as far as features need it: the rooms meet through core."""

    def to_json(self) -> dict[str, Any]:
        """The space as data."""


@final
@dataclass(frozen=True, slots=True)
class Column:
    """One feature.

    Attributes:
        name: The domain.
        kind: ``"number"``: its value, 0 where inactive; ``"is"``: 1 if its value is ``value``; ``"has"``: 1 if
            it is part of the configuration.
        value: For ``"is"``.
    """

    name: str
    kind: str = "number"
    value: Any = None

    def of(self, config: Config) -> float:
        """The feature of a configuration.

        Raises:
            InvalidInput: The value is not a number.
        """
        if self.kind == "number":
            value = config.get(self.name, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(f"{self.name}={value!r} is not a number, as it was when this was fitted.")
            return float(value)
        if self.kind == "has":
            return float(self.name in config)
        return float(self.name in config and config[self.name] == self.value)

    def __str__(self) -> str:
        if self.kind == "number":
            return self.name
        return f"[{self.name}]" if self.kind == "has" else f"[{self.name} = {self.value}]"


@final
@dataclass(frozen=True, slots=True)
class Features:
    """Which numbers of a configuration count, in order.

    Attributes:
        columns: Numbers and indicators of domains.
        extra: Names of further numbers that a function of the configuration gives (``Extra``).
    """

    columns: tuple[Column, ...]
    extra: tuple[str, ...] = ()

    @classmethod
    def of(cls, space: SpaceLike, *, structural: bool = True, extra: Sequence[str] = ()) -> Features:
        """The features of a space: numbers as they are, other choices by an indicator of each value.

        Args:
            space: The space.
            structural: Only of domains that are marked ``structural`` (HyperPower 3.3: "parameters such as
                learning rate have negligible impact"); of all domains where none is marked.
            extra: Names of further numbers.
        """
        domains: list[tuple[str, dict[str, Any]]] = [(n, d) for n, d in space.to_json()["domains"]]
        if structural and any(domain.get("structural") for _, domain in domains):
            domains = [(name, domain) for name, domain in domains if domain.get("structural")]
        columns: list[Column] = []
        for name, domain in domains:
            values = domain.get("values")
            if values is None or all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                columns.append(Column(name))
            else:
                columns.extend(Column(name, "is", value) for value in values)
            if domain.get("when") is not None:
                columns.append(Column(name, "has"))
        return cls(tuple(columns), tuple(extra))

    @property
    def names(self) -> tuple[str, ...]:
        """For people, columns then extras."""
        return tuple(map(str, self.columns)) + self.extra

    def row(self, config: Config, extra: Extra | None = None) -> list[float]:
        """The features of one configuration.

        Raises:
            InvalidInput: Extras are needed and ``extra`` is missing or does not give one.
        """
        row = [column.of(config) for column in self.columns]
        if self.extra:
            if extra is None:
                raise InvalidInput(
                    f"The predictor was fitted with {', '.join(self.extra)}: give the function that tells them, "
                    "extra=..."
                )
            more = extra(config)
            for name in self.extra:
                if name not in more:
                    raise InvalidInput(f"extra gives {', '.join(more)} of a configuration, but no {name}.")
                row.append(float(more[name]))
        return row

    def matrix(self, configs: Sequence[Config], extra: Extra | None = None) -> Matrix:
        """The features of many configurations, one row each."""
        import numpy as np

        rows = [self.row(config, extra) for config in configs]
        return np.array(rows, dtype=float).reshape(len(rows), len(self.columns) + len(self.extra))

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"columns": [[c.name, c.kind, c.value] for c in self.columns], "extra": list(self.extra)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Features:
        """The features of their JSON-able form."""
        return cls(tuple(Column(*column) for column in data["columns"]), tuple(data["extra"]))
