"""The metric at which a run of a recurring job is done."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidInput

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}

# "wer" is an error rate but "power" is not: all but losses need a separator (or a capital letter) before them.
_FALLING = re.compile(
    r"(?i:loss)$"
    r"|(?:^|[^A-Za-z0-9])(?i:err|error|wer|cer|mse|rmse|mae|nll|ppl|perplexity)(?:[^A-Za-z0-9]?(?i:rate))?$"
    r"|(?<=[a-z0-9])(?:Err|Error|W[Ee][Rr]|C[Ee][Rr]|M[Ss][Ee]|R[Mm][Ss][Ee]|M[Aa][Ee]|N[Ll][Ll]|P[Pp][Ll]|Perplexity)$"
)


def falls(metric: str) -> bool:
    """Whether a metric is better when lower, by its name: losses, errors, error rates and perplexities are."""
    return _FALLING.search(metric) is not None


@dataclass(frozen=True, slots=True)
class Target:
    """The metric at which a run is done."""

    metric: str
    comparison: str
    value: float

    @classmethod
    def parse(cls, given: Sequence[Any]) -> Target:
        """A target from ``("accuracy", 0.95)`` or ``("wer", "<=", 40)``.

        Without a comparison, a metric whose name ends in loss, err, error, wer, cer, mse, rmse, mae, nll, ppl or
        perplexity (``val_loss``, ``test/error``, ``error_rate``) is to fall to the value, any other to rise to it.

        Raises:
            InvalidInput: It is something else.
        """
        text = (
            'target must be ("metric", value) or ("metric", "<=" or ">=", value) with a finite value, '
            f"got {given!r}."
        )
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) not in (2, 3):
            raise InvalidInput(text)
        name, value = given[0], given[-1]
        number = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
        if not isinstance(name, str) or not name or not number:
            raise InvalidInput(text)
        comparison = given[1] if len(given) == 3 else "<=" if falls(name) else ">="
        if not isinstance(comparison, str) or comparison not in _OPERATORS:
            raise InvalidInput(text)
        return cls(name, comparison, float(value))

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.value:g}"

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether ``metrics`` are that good."""
        return self.metric in metrics and _OPERATORS[self.comparison](metrics[self.metric], self.value)
