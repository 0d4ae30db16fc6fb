"""Predictors: what a device's profile says of configurations, one predictor per quantity, kept in a store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock.core import Config, Source
from penstock.core.errors import InvalidInput
from penstock.predict._features import Extra, Features
from penstock.predict._linear import Prediction, Predictor

if TYPE_CHECKING:
    from penstock.predict._features import Matrix

PREFIX = "predictors/"
"""What the keys of all profiles in a store begin with."""

_FEWEST = 8  # measured values before a quantity that was never profiled is predicted


class Cache(Protocol):
    """Where profiles are kept; a ``Store`` is one."""

    def get(self, key: str) -> Any | None:
        """A JSON value, or None."""

    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value."""


def key_of(device: str, task: str) -> str:
    """The store's key of a device model's profile of a task."""
    return f"{PREFIX}{_word(device)}/{_word(task)}"


def _word(text: str) -> str:
    return text.replace("/", "_")


@final
class Predictors:
    """Predicts the quantities of a profile, and learns from what a study measures.

    A quantity without a profile is learned from measurements alone (``observe``) if ``features`` are given: it is
    predicted as soon as there are enough of them. Not shared between threads.

    Args:
        models: Predictors by quantity.
        device: The device model they were made on.
        task: The task they were made of.
        features: For quantities that were not profiled.
        extra: Gives the extra features.
        exact: Quantities that ``extra`` gives themselves.
    """

    def __init__(
        self,
        models: Mapping[str, Predictor] | None = None,
        *,
        device: str = "",
        task: str = "",
        features: Features | None = None,
        extra: Extra | None = None,
        exact: Sequence[str] = (),
    ) -> None:
        self._exact = frozenset(exact)
        self._models = dict(models or {})
        self.device = device
        self.task = task
        self._features = features
        self._extra = extra
        self._waiting: dict[str, list[tuple[Config, float, Source]]] = {}
        self.version = 0
        """Counts what was learned, for those who keep answers."""

    @property
    def features(self) -> Features | None:
        """Of the space they were made for."""
        return self._features

    # --- as a mapping ---------------------------------------------------------------------------------------

    def __getitem__(self, quantity: str) -> Predictor:
        if quantity not in self._models:
            raise InvalidInput(f"{quantity} was not profiled: there are {', '.join(self._models) or 'none'}.")
        return self._models[quantity]

    def __contains__(self, quantity: object) -> bool:
        return quantity in self._models or self._exactly(str(quantity))

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    # --- predicting and learning ----------------------------------------------------------------------------

    def predict(self, quantity: str, config: Config) -> Prediction | None:
        """The quantity of a configuration; None if nothing is known of it (yet)."""
        if self._exactly(quantity):
            assert self._extra is not None
            return Prediction(float(self._extra(config)[quantity]), 0.0, 0.0)
        model = self._models.get(quantity)
        return None if model is None else model.predict(config)

    def predict_many(self, quantity: str, configs: Sequence[Config]) -> tuple[Matrix, Matrix] | None:
        """Means and standard deviations of many configurations; None if nothing is known of it (yet)."""
        if self._exactly(quantity):
            import numpy as np

            assert self._extra is not None
            values = np.array([self._extra(config)[quantity] for config in configs], dtype=float)
            return values, np.zeros(len(configs))
        model = self._models.get(quantity)
        return None if model is None else model.predict_many(configs)

    def doubt_many(self, quantity: str, configs: Sequence[Config]) -> tuple[Matrix, Matrix] | None:
        """As ``predict_many``, with the doubt of the quantity itself (``Prediction.doubt``) for the deviations."""
        model = None if self._exactly(quantity) else self._models.get(quantity)
        return self.predict_many(quantity, configs) if model is None else model.doubt_many(configs)

    def _exactly(self, quantity: str) -> bool:
        """Whether the extra features tell the quantity itself: a network's parameters are counted, not predicted."""
        return self._extra is not None and quantity in self._exact

    def learns(self, quantity: str) -> bool:
        """Whether measured values of the quantity would change predictions."""
        return not self._exactly(quantity) and (quantity in self._models or self._features is not None)

    def measurable(self, quantity: str) -> bool:
        """Whether the quantity is predicted with a doubt that a measurement could lift."""
        return quantity in self._models and not self._exactly(quantity)

    def observe(self, quantity: str, config: Config, value: float, source: Source = Source.MEASURED) -> None:
        """Learn a measured value. One that is no number above 0 is ignored: a sensor's failure teaches nothing.

        Predictions rest on all values, so that their source is the weakest of theirs.
        """
        if not (math.isfinite(value) and value > 0):
            return
        model = self._models.get(quantity)
        if model is not None:
            model.observe(config, value)
            model.source = max(model.source, source)
            self.version += 1
            return
        if self._features is None:
            return
        waiting = self._waiting.setdefault(quantity, [])
        waiting.append((dict(config), value, source))
        if len(waiting) >= max(_FEWEST, len(self._features.columns) + 2):
            configs, values = [c for c, _, _ in waiting], [v for _, v, _ in waiting]
            forms = ("plain", "linear", "log")  # so few samples carry no more
            self._models[quantity] = Predictor.fit(
                quantity,
                self._features,
                configs,
                values,
                extra=self._extra,
                folds=0,
                source=max(each for _, _, each in waiting),
                forms=forms,
            )
            del self._waiting[quantity]
            self.version += 1

    def copy(self) -> Predictors:
        """The same predictors, learning on their own from now on."""
        other = Predictors(
            {name: model.copy() for name, model in self._models.items()},
            device=self.device,
            task=self.task,
            features=self._features,
            extra=self._extra,
            exact=tuple(self._exact),
        )
        other._waiting = {name: list(pairs) for name, pairs in self._waiting.items()}
        return other

    # --- keeping --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "device": self.device,
            "task": self.task,
            "models": {name: model.to_json() for name, model in self._models.items()},
            "features": None if self._features is None else self._features.to_json(),
            "exact": sorted(self._exact),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, extra: Extra | None = None) -> Predictors:
        """Back from ``to_json``.

        Raises:
            InvalidInput: It is something else.
        """
        try:
            models = {str(n): Predictor.from_json(m, extra=extra) for n, m in data["models"].items()}
            features = None if data["features"] is None else Features.from_json(data["features"])
            return cls(
                models,
                device=str(data["device"]),
                task=str(data["task"]),
                features=features,
                extra=extra,
                exact=data["exact"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"Not predictors written by to_json(): {error!r}.") from error

    def save(self, store: Cache) -> str:
        """Keep them in a store for later studies on this device model; returns the key."""
        key = key_of(self.device, self.task)
        store.put(key, self.to_json())
        return key

    @classmethod
    def load(cls, store: Cache, device: str, task: str, *, extra: Extra | None = None) -> Predictors | None:
        """Those of a device model and a task, or None if there are none."""
        data = store.get(key_of(device, task))
        return None if data is None else cls.from_json(data, extra=extra)

    def __str__(self) -> str:
        lines = [f"Profile of {self.task or 'a task'} on {self.device or 'a device'}"]
        for name, model in self._models.items():
            doubt = (
                "too few samples to cross-validate"
                if math.isnan(model.rmspe)
                else f"{100 * model.rmspe:.1f}%"
            )
            lines.append(
                f"  {name}: RMSPE {doubt} (10-fold), {model.form.terms} model, {model.samples} samples, "
                f"{model.source}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Predictors of {', '.join(self._models) or 'nothing'} on {self.device or 'a device'}>"
