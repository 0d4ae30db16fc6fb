"""Gate: whether a configuration keeps a study's limits, as far as that is known before it is trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.goal import Limit, check_limits
from penstock.predict import Prediction, Predictors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """How a configuration stands to the limits.

    Attributes:
        excess: By how much it is over the limit it is farthest over, relative to the bound; at most 0: allowed.
        tightest: That limit, or the one it is nearest to; None if nothing is known.
        predictions: What is predicted, by quantity.
    """

    excess: float
    tightest: Limit | None
    predictions: Mapping[str, Prediction]

    @property
    def allowed(self) -> bool:
        """Whether no limit is predicted to be violated."""
        return self.excess <= 0.0


@final
class Gate:
    """Limits with what predicts their quantities.

    A quantity that is a function of the configuration is known exactly; any other is what the predictors say. Of
    a quantity that nobody can predict (yet), every value is allowed: it is known after training only.

    Args:
        limits: The limits.
        predictors: From a profile; they learn from ``observe``.
        confidence: How likely each limit must be kept. 0.5 asks the predicted value itself (HyperPower Eq. 3); 0.95
            leaves a margin of 1.64 standard deviations of the prediction.
        refine: Whether ``observe`` teaches the predictors.

    Raises:
        InvalidInput: A confidence outside (0, 1), or something that is not a limit.
    """

    def __init__(
        self,
        limits: Iterable[Limit] | Limit,
        predictors: Predictors | None = None,
        *,
        confidence: float = 0.5,
        refine: bool = True,
    ) -> None:
        self.limits = check_limits(limits)
        if not 0.0 < confidence < 1.0:
            raise InvalidInput(
                f"confidence must be between 0 and 1 (0.5: the prediction itself), got {confidence!r}."
            )
        if predictors is not None and not isinstance(predictors, Predictors):
            raise InvalidInput(f"predictors takes Predictors, as a profile gives them, got {predictors!r}.")
        self.predictors = predictors if predictors is not None else Predictors()
        self._given = self.predictors.copy()
        self._heard: set[tuple[int, str]] = set()
        self.confidence = confidence
        self.refine = refine
        self._margin = NormalDist().inv_cdf(confidence)

    def start(self) -> None:
        """Forget what was observed: a study begins, or is replayed from its beginning."""
        self.predictors = self._given.copy()
        self._heard = set()

    @property
    def learns(self) -> bool:
        """Whether verdicts may change while a study runs."""
        return self.refine and any(
            limit.quantity.of is None and self.predictors.learns(limit.name) for limit in self.limits
        )

    @property
    def unknown(self) -> tuple[Limit, ...]:
        """Limits that can't be told before training (yet)."""
        return tuple(
            limit for limit in self.limits if limit.quantity.of is None and limit.name not in self.predictors
        )

    def check(self, config: Config) -> Verdict:
        """How one configuration stands."""
        worst, tightest = -math.inf, None
        predictions: dict[str, Prediction] = {}
        for limit in self.limits:
            found = predictions.get(limit.name) or self._predict(limit, config)
            if found is None:
                continue
            predictions[limit.name] = found
            doubt = found.std if found.doubt is None else found.doubt
            excess = limit.excess(self._pessimistic(limit, found.mean, doubt))
            if tightest is None or excess > worst:
                worst, tightest = excess, limit
        return Verdict(worst if tightest is not None else 0.0, tightest, predictions)

    def excess(self, configs: Sequence[Config], *, confidence: float | None = None) -> NDArray[np.float64]:
        """``check(config).excess`` of many configurations at once, with another confidence perhaps."""
        import numpy as np

        worst = np.full(len(configs), -math.inf)
        for limit in self.limits:
            found = self._predict_many(limit, configs)
            if found is not None:
                mean, std = found
                margin = self._margin if confidence is None else NormalDist().inv_cdf(confidence)
                values = mean + margin * std if limit.at_most else mean - margin * std
                over = values - limit.bound if limit.at_most else limit.bound - values
                over = over / abs(limit.bound) if limit.bound else over
                worst = np.maximum(worst, np.where(np.isnan(over), np.inf, over))
        return np.where(np.isneginf(worst), 0.0, worst)

    def log_probability(self, configs: Sequence[Config]) -> NDArray[np.float64]:
        """The logarithm of how likely all limits are kept, by the predictors' own doubt (HyperPower 3.5)."""
        import numpy as np
        from scipy.special import log_ndtr

        total = np.zeros(len(configs))
        for limit in self.limits:
            found = self._predict_many(limit, configs)
            if found is not None:
                mean, std = found
                room = limit.bound - mean if limit.at_most else mean - limit.bound
                sure = np.where(room >= 0, 0.0, -np.inf)
                total += np.where(std > 0, log_ndtr(room / np.where(std > 0, std, 1.0)), sure)
        return total

    def observe(self, config: Config, values: Mapping[str, float]) -> dict[Limit, float]:
        """Learn what was measured of a trial; returns the limits it violates, with the values."""
        for name in {limit.name for limit in self.limits if limit.quantity.of is None}:
            if self.refine and name in values:
                self.predictors.observe(name, config, float(values[name]))
        return self.violated(values)

    def hear(self, trial: int, config: Config, values: Mapping[str, float]) -> None:
        """``observe`` what a trial tells for the first time: rungs of one training are no new measurements."""
        fresh = {n: v for n, v in values.items() if (trial, n) not in self._heard}
        if fresh:
            self._heard.update((trial, name) for name in fresh)
            self.observe(config, fresh)

    def violated(self, values: Mapping[str, float]) -> dict[Limit, float]:
        """The limits that measured values violate, with the values."""
        return {
            limit: float(values[limit.name])
            for limit in self.limits
            if limit.name in values and not limit.holds(values[limit.name])
        }

    def to_json(self) -> dict[str, Any]:
        """The limits, for the journal."""
        return {"limits": [limit.to_json() for limit in self.limits], "confidence": self.confidence}

    def __repr__(self) -> str:
        return f"Gate({', '.join(map(str, self.limits))})"

    def _pessimistic(self, limit: Limit, mean: Any, std: Any) -> Any:
        return mean + self._margin * std if limit.at_most else mean - self._margin * std

    def _predict(self, limit: Limit, config: Config) -> Prediction | None:
        if limit.quantity.of is not None:
            return Prediction(_value_of(limit, config), 0.0, 0.0)
        return self.predictors.predict(limit.name, config)

    def _predict_many(self, limit: Limit, configs: Sequence[Config]) -> tuple[Any, Any] | None:
        import numpy as np

        if limit.quantity.of is not None:
            values = np.array([_value_of(limit, config) for config in configs], dtype=float)
            return values, np.zeros(len(configs))
        return self.predictors.doubt_many(limit.name, configs)


def _value_of(limit: Limit, config: Config) -> float:
    of = limit.quantity.of
    assert of is not None
    try:
        return float(of(config))
    except Exception as error:
        raise InvalidInput(f"The function of {limit} failed on {dict(config)!r}: {error!r}.") from error
