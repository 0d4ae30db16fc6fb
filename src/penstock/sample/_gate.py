"""Gate: whether a configuration keeps a study's limits, as far as that is known before it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeAlias, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.goal import Limit, check_limits
from penstock.predict import Prediction, Predictors
from penstock.sample._readings import Key, Readings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READINGS = 48
"""Of a structure whose limits are in doubt: the mean of so many is seven times as sure as one."""

PROBES = 8
"""So many structures are measured for one trial at most; then it is one that needs no measurement."""

_FIRST = 8  # readings after which those that can't be shown to keep the limits are given up
_HOPELESS = 3  # failures before the first success: then nothing can be measured here

Probe: TypeAlias = Callable[[Config, int], Mapping[str, Sequence[float]]]
"""Measures a configuration before it is trained: so many readings of each quantity, above 0; none: it failed."""


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

    Power and memory do not depend on trained weights. So where a prediction is in doubt, a network can be measured
    before it is trained (``measured_by``): it is allowed if the mean of many readings keeps the limit with the same
    confidence, by the scatter of the sensor. That counts for every configuration of its structure.

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
        self._probe: Probe | None = None
        self._forget()

    def start(self) -> None:
        """Forget what was observed: a study begins, or is replayed from its beginning."""
        self.predictors = self._given.copy()
        self._heard = set()
        self._forget()

    def _forget(self) -> None:
        self._readings: dict[str, Readings] = {}
        self._probed: set[Key] = set()  # of these, no measurement is to come
        self._recalled: dict[Key, tuple[Config, list[Mapping[str, Sequence[float]]]]] = {}
        self._tries = self._failures = 0
        self._able = False  # something was measured already
        self.probes = 0
        """How many structures were measured since ``start``, those of a resume included."""
        self.readings = 0
        """How often, in all."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what measures, which belongs to a run of the study."""
        return {**self.__dict__, "_probe": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """One of an older store has measured nothing."""
        self._probe = None
        self._forget()
        self.__dict__.update(state)

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
        margin = self._margin if confidence is None else NormalDist().inv_cdf(confidence)
        return self._excess(configs, margin)

    def _excess(
        self, configs: Sequence[Config], margin: float, *, hopeful: bool = False
    ) -> NDArray[np.float64]:
        import numpy as np

        worst = np.full(len(configs), -math.inf)
        for limit in self.limits:
            found = self._predict_many(limit, configs)
            if found is not None:
                mean, std = found
                if hopeful:
                    std = np.minimum(std, self._after_readings(limit.name, configs, mean))
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

    # --- measuring what is in doubt -------------------------------------------------------------------------

    def measured_by(self, probe: Probe | None) -> None:
        """Measure with this what is in doubt, when ``settle`` is asked; None: from now on nothing is."""
        self._probe = probe

    def next_trial(self) -> None:
        """A trial is looked for: ``PROBES`` structures may be measured for it."""
        self._tries = 0

    def within_reach(self, configs: Sequence[Config]) -> NDArray[np.float64]:
        """As ``excess``, of what a measurement might show: at most 0 is allowed, or worth to be measured."""
        return self._excess(configs, self._margin, hopeful=self._measures)

    def settle(self, config: Config, *, replay: bool = False) -> bool:
        """Whether a configuration is allowed, after it was measured where that is in doubt.

        Args:
            config: The configuration.
            replay: Don't measure: the journal's readings (``recall``) are all there are.
        """
        if self.check(config).allowed:
            return True
        key = self._structure(config)
        if not self._may_measure or (key not in self._recalled and (replay or self._probe is None)):
            return False
        if self._excess([config], self._margin, hopeful=True)[0] > 0.0:
            return False
        self._tries += 1
        self.probes += 1
        self._probed.add(key)
        for count in (_FIRST, READINGS - _FIRST):
            if not self._add(config, self._read(config, key, count, replay)) or self._decided(config):
                break
        self._recalled.pop(key, None)
        self._teach(config)
        return self.check(config).allowed

    def recall(self, config: Config, readings: Mapping[str, Sequence[float]]) -> None:
        """What the journal says was read of a configuration: it is not measured again."""
        self._recalled.setdefault(self._structure(config), (config, []))[1].append(readings)

    def relearn(self) -> None:
        """Learn all that was recalled, where nobody asks again for what it was read for."""
        for config, found in self._recalled.values():
            self.probes += 1
            self._probed.add(self._structure(config))
            for readings in found:
                self._add(config, readings)
            self._teach(config)
        self._recalled = {}

    @property
    def _may_measure(self) -> bool:
        return self._tries < PROBES and (self._able or self._failures < _HOPELESS)

    @property
    def _measures(self) -> bool:
        return self._may_measure and self._probe is not None

    def _read(
        self, config: Config, key: Key, count: int, replay: bool
    ) -> Mapping[str, Sequence[float]] | None:
        """Readings of a configuration; None: there are no more of them in the journal."""
        found = self._recalled.get(key)
        if found is not None and found[1]:
            return found[1].pop(0)
        return None if replay or self._probe is None else self._probe(config, count)

    def _add(self, config: Config, readings: Mapping[str, Sequence[float]] | None) -> bool:
        """Keep readings; whether there were any."""
        if readings is None:
            return False
        some = False
        for name in self._predicted:
            values = [value for value in readings.get(name, ()) if math.isfinite(value) and value > 0]
            if values:
                some = True
                self.readings += len(values)
                self._readings_of(name).add(self._key(name, config), values)
        if some:
            self._able = True
        else:
            self._failures += 1
        return some

    def _teach(self, config: Config) -> None:
        if self.refine:
            for name, found in self._readings.items():
                key = self._key(name, config)
                if key in found:
                    self.predictors.observe(name, config, found.mean(key))

    def _decided(self, config: Config) -> bool:
        """Whether more readings are of no use: the sensor is exact, or the mean, less its standard error, is too near
        to a limit even after all of them.

        Nothing is allowed by these first readings: who looks twice, and stops at what pleases, errs twice as often.
        """
        exact = True
        for limit in self.limits:
            found = self._readings.get(limit.name)
            if found is not None and (key := self._key(limit.name, config)) in found:
                error = found.error(key)
                exact = exact and error < 1e-9
                room = self._margin * found.widened(self.confidence) * found.scatter / math.sqrt(READINGS)
                spare = room - error if math.isfinite(error) else 0.0
                factor = 1.0 + spare if limit.at_most else 1.0 - spare
                if not limit.holds(found.mean(key) * factor):
                    return True
        return exact

    @property
    def _predicted(self) -> tuple[str, ...]:
        """Quantities of the limits that are predicted, and not counted."""
        found = {limit.name: None for limit in self.limits if limit.quantity.of is None}
        return tuple(name for name in found if self.predictors.measurable(name))

    def _readings_of(self, name: str) -> Readings:
        found = self._readings.get(name)
        if found is None:
            found = self._readings[name] = Readings(*self.predictors[name].pure_error)
        return found

    def _key(self, name: str, config: Config) -> Key:
        return tuple(column.of(config) for column in self.predictors[name].features.columns)

    def _structure(self, config: Config) -> Key:
        return tuple(value for name in self._predicted for value in self._key(name, config))

    def _after_readings(self, name: str, configs: Sequence[Config], mean: Any) -> Any:
        """What would be in doubt after ``READINGS``; infinite for what was measured already, or could not be."""
        import numpy as np

        if name not in self._predicted:
            return np.full(len(configs), math.inf)
        found = self._readings_of(name)
        relative = found.widened(self.confidence) * found.scatter / math.sqrt(READINGS)
        if not self._probed:
            return mean * relative
        over = [self._structure(config) in self._probed for config in configs]
        return np.where(over, math.inf, mean * relative)

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
        found = self._readings.get(limit.name)
        if found is not None and (key := self._key(limit.name, config)) in found:
            mean = found.mean(key)
            doubt = mean * found.error(key) * found.widened(self.confidence)
            return Prediction(mean, math.hypot(doubt, mean * found.scatter), doubt)
        return self.predictors.predict(limit.name, config)

    def _predict_many(self, limit: Limit, configs: Sequence[Config]) -> tuple[Any, Any] | None:
        import numpy as np

        if limit.quantity.of is not None:
            values = np.array([_value_of(limit, config) for config in configs], dtype=float)
            return values, np.zeros(len(configs))
        predicted = self.predictors.doubt_many(limit.name, configs)
        found = self._readings.get(limit.name)
        if predicted is None or not found:
            return predicted
        mean, doubt = predicted
        widened = found.widened(self.confidence)
        for i, config in enumerate(configs):
            key = self._key(limit.name, config)
            if key in found:  # what was measured needs no prediction
                mean[i] = found.mean(key)
                doubt[i] = mean[i] * found.error(key) * widened
        return mean, doubt


def _value_of(limit: Limit, config: Config) -> float:
    of = limit.quantity.of
    assert of is not None
    try:
        return float(of(config))
    except Exception as error:
        raise InvalidInput(f"The function of {limit} failed on {dict(config)!r}: {error!r}.") from error
