"""Predictor: a quantity as a linear function of features, chosen and judged by cross validation (HyperPower 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from penstock.core import Config, Source
from penstock.core.errors import InvalidInput
from penstock.predict._blas import one_thread
from penstock.predict._features import Extra, Features

if TYPE_CHECKING:
    from penstock.predict._features import Matrix
    from penstock.predict._smooth import Smooth

FORMS = (
    "plain",
    "linear",
    "log",
    "extra",
    "log extra",
    "products",
    "log products",
    "all",
    "log all",
    "smooth",
    "smooth extra",
)
"""From the simplest: Eq. 1-2 as printed; with a constant; with extra features and their logarithms; with products of
features; with everything. A log form is one of logarithms throughout: a product of powers of the features. A smooth
one is any smooth function of the features' logarithms, a Gaussian process."""

_RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_BENDS = (0.003, 0.01, 0.03, 0.1)
_WIDTHS = (1.0, 2.0, 4.0)
_PAYS = 0.95  # a richer form must lower the cross-validated error to so much of the simpler one's
_MOST_PRODUCTS = 24  # columns; beyond, products would outnumber any affordable profile
_NOISE = 0.02  # relative; what a bend is weighed against, the data decide by cross validation
_LEAST = 1e-9  # of the mean value
_FEWEST_SMOOTH = 20
_FEWEST_REPEATS = 5  # degrees of freedom that a sensor's scatter is believed from
_FEWEST_ONLINE = 3  # measurements of a study that a profile is corrected by
_SURE = 0.999  # how sure it must be that they disagree with it
_FORMAT = 1


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted value.

    Attributes:
        mean: The value.
        std: The standard deviation of a measurement of it: what the model does not know plus the sensor's scatter.
        doubt: The standard deviation of the quantity itself, the sensor's scatter left out where it is known (from
            structures that were measured repeatedly); None: as ``std``.
    """

    mean: float
    std: float
    doubt: float | None = None


@final
@dataclass(frozen=True, slots=True)
class Form:
    """The form of a model.

    Attributes:
        terms: One of ``FORMS``.
        ridge: Prior precision of the weights against the noise; small: hardly any shrinking.
        bend: Standard deviation, relative, of a smooth deviation from the linear function; 0: none.
        width: Over how many standard deviations of a feature it is smooth, times the root of their number.
        hyper: Of a smooth form: length scales, the function's variance and the noise's, in its own units.
    """

    terms: str
    ridge: float
    bend: float = 0.0
    width: float = 1.0
    hyper: tuple[float, ...] = ()

    @property
    def smooth(self) -> bool:
        """Whether it is no sum of terms."""
        return self.terms.startswith("smooth")


@final
@dataclass(frozen=True, slots=True)
class _Shift:
    """By what factor a study's measurements are off a profile's model: its logarithm, and that one's standard error."""

    log: float = 0.0
    error: float = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.log)


@final
class Predictor:
    """Predicts one quantity of a configuration before it runs, and says how far off it may be.

    The model is ``sum_j w_j z_j`` (HyperPower Eq. 1 and 2), with the terms that pay under cross validation: a
    constant, products of features (a layer's inputs times its outputs), extra features (FLOPs, parameters), a
    smooth deviation from the linear function (a Gaussian process) where a device saturates, or a smooth function
    altogether. Weights minimise the *relative* errors, for RMSPE is what counts and a measurement scatters by per
    cents.

    ``fit`` makes one, ``observe`` refines it by what a study measures. Where that is off by more than the profile's
    doubt (another batch size, a warmer device), predictions are multiplied by the factor between the two; what is
    left of the difference is doubt. Not shared between threads.

    Attributes:
        quantity: Its name, e.g. ``"power_w"``.
        features: What it looks at.
        form: What cross validation chose.
        rmspe: Root mean square percentage error of k-fold cross validation, 0.05 is 5%; every fold chooses its form
            anew, so the choice does not flatter the figure. ``nan`` with too few samples.
        source: How strong the samples' figures are.
    """

    # Not in ``__init__``: a study that was stored by an older Penstock brings predictors without them.
    _profiled: _Model | Smooth | None = None  # the model of the profile alone
    _shift = _Shift()
    _strayed = 0.0

    def __init__(
        self,
        quantity: str,
        features: Features,
        rows: Matrix,
        values: Matrix,
        form: Form,
        *,
        extra: Extra | None = None,
        rmspe: float = math.nan,
        source: Source = Source.MEASURED,
        online: int = 0,
        inflate: float = 1.0,
    ) -> None:
        self.quantity = quantity
        self.features = features
        self.form = form
        self.rmspe = rmspe
        self.source = source
        self._extra = extra
        self._rows = rows
        self._values = values
        self._online = online
        self._inflate = inflate
        self._model: _Model | Smooth | None = None
        self._pure = self._least_pure = 0.0
        self._pending: list[tuple[list[float], float]] = []

    @classmethod
    def fit(
        cls,
        quantity: str,
        features: Features,
        configs: Sequence[Config],
        values: Sequence[float],
        *,
        extra: Extra | None = None,
        folds: int = 10,
        seed: int = 0,
        source: Source = Source.MEASURED,
        forms: Sequence[str] = FORMS,
        bends: bool = True,
    ) -> Predictor:
        """Fit a model to samples.

        Args:
            quantity: What the values are.
            features: What to look at.
            configs: The samples' configurations.
            values: Theirs, above 0.
            extra: Gives the extra features, if ``features`` has any.
            folds: Of the cross validation behind ``rmspe``; 0: none.
            seed: Of the folds.
            source: Of the values.
            forms: Which terms may be chosen; ``("plain",)`` is the paper's model.
            bends: Whether a smooth deviation may be.

        Raises:
            InvalidInput: Values that are not above 0, lists of different lengths, fewer than 3 samples.
        """
        if len(configs) != len(values):
            raise InvalidInput(
                f"There are {len(configs)} configurations, but {len(values)} values of {quantity}."
            )
        return cls.fit_rows(
            quantity,
            features,
            features.matrix(configs, extra),
            values,
            extra=extra,
            folds=folds,
            seed=seed,
            source=source,
            forms=forms,
            bends=bends,
        )

    @classmethod
    def fit_rows(
        cls,
        quantity: str,
        features: Features,
        rows: Matrix,
        values: Sequence[float],
        *,
        extra: Extra | None = None,
        folds: int = 10,
        seed: int = 0,
        source: Source = Source.MEASURED,
        forms: Sequence[str] = FORMS,
        bends: bool = True,
    ) -> Predictor:
        """As ``fit``, from a matrix of features."""
        import numpy as np

        y = np.asarray(values, dtype=float)
        if len(y) < 3:
            raise InvalidInput(f"{quantity}: {len(y)} samples are too few for a prediction. Collect more.")
        if not (np.isfinite(y).all() and (y > 0).all() and np.isfinite(rows).all()):
            raise InvalidInput(f"{quantity}: a value is not a number above 0, or a feature is not finite.")
        unknown = [form for form in forms if form not in FORMS]
        if unknown or not forms:
            raise InvalidInput(f"forms takes some of {', '.join(FORMS)}, got {tuple(forms)!r}.")
        usable = _usable(features, tuple(forms))
        rmspe, inflate = math.nan, 1.0
        with one_thread():
            form = _choose(features, rows, y, usable, bends)
        # Of one structure alone nothing can be left out: what it takes is its mean.
        if folds > 1 and len(y) >= 2 * folds and (rows != rows[0]).any():
            errors = cross_validate(features, rows, y, folds=folds, seed=seed, forms=usable, bends=bends)
            rmspe = float(np.sqrt(np.mean(errors**2)))
            inflate = _inflation(_made(features, rows, y, form), errors)
        return cls(
            quantity, features, rows, y, form, extra=extra, rmspe=rmspe, source=source, inflate=inflate
        )

    # --- predicting -----------------------------------------------------------------------------------------

    def predict(self, config: Config) -> Prediction:
        """The quantity of one configuration."""
        mean, std, doubt = self._predict(self.features.matrix([config], self._extra))
        return Prediction(float(mean[0]), float(std[0]), float(doubt[0]))

    def predict_many(self, configs: Sequence[Config]) -> tuple[Matrix, Matrix]:
        """Means and standard deviations of many configurations."""
        return self.predict_rows(self.features.matrix(configs, self._extra))

    def predict_rows(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """As ``predict_many``, from features."""
        return self._predict(rows)[:2]

    def doubt_many(self, configs: Sequence[Config]) -> tuple[Matrix, Matrix]:
        """Means of many configurations, and ``Prediction.doubt`` of them."""
        mean, _, doubt = self._predict(self.features.matrix(configs, self._extra))
        return mean, doubt

    @property
    def sensor(self) -> float:
        """The relative standard deviation of repeated measurements of one structure; 0: not known."""
        self._fitted()
        return self._pure

    @property
    def pure_error(self) -> tuple[float, int]:
        """What repeated measurements of one structure differ by: the sum of their logarithms' squared deviations, and
        its degrees of freedom."""
        self._fitted()
        return _pure_error(self._rows, self._values)

    def _predict(self, rows: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        import numpy as np

        with one_thread():
            model = self._fitted()
            mean, unknown = model.predict(rows)
        mean = mean * self._shift.factor
        unknown = (self._inflate * unknown) ** 2 + self._shift.error**2 + self._strayed**2
        misfit = self._misfit(model, (self._pure, self._least_pure))
        return mean, mean * np.sqrt(unknown + model.noise**2), mean * np.sqrt(unknown + misfit)

    def _misfit(self, model: _Model | Smooth, repeated: tuple[float, float]) -> float:
        """The relative variance of what a model does not follow, given what ``_repeated`` says of the sensor."""
        # What the model does not follow and what the sensor scatters look alike: repeats tell them apart.
        # A smooth form has its own account of what it does not follow; with a sum of terms that is in the noise, so
        # as much of it is the sensor's as the repeats are sure of.
        sensor = repeated[0] if self.form.smooth else repeated[1]
        return max(model.noise**2 - sensor**2, 0.0)

    # --- learning -------------------------------------------------------------------------------------------

    def observe(self, config: Config, value: float) -> None:
        """Learn a measured value; the next prediction takes it into account.

        Raises:
            InvalidInput: It is not a number above 0.
        """
        if not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"{self.quantity}: {value!r} is not a measured value above 0.")
        self._pending.append((self.features.row(config, self._extra), float(value)))
        self._model = None

    @property
    def samples(self) -> int:
        """How many values it rests on, those observed included."""
        return len(self._values) + len(self._pending)

    @property
    def observed(self) -> int:
        """How many of them were observed after it was fitted."""
        return self._online + len(self._pending)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every term, by name; of the linear part alone where it bends, none of a smooth form."""
        model = self._fitted()
        found = model.weights()
        if found and isinstance(model, _Model) and model.log:
            return {**found, "constant": found["constant"] + self._shift.log}
        return {name: weight * self._shift.factor for name, weight in found.items()}

    @property
    def scatter(self) -> float:
        """The relative standard deviation of a measurement around the model."""
        return self._fitted().scatter

    def residuals(self) -> tuple[Matrix, Matrix]:
        """Of every sample the measured value, and the one predicted without it (leave one out)."""
        import numpy as np

        model = self._fitted()
        factor = np.ones(len(self._values))
        factor[len(factor) - self._online :] = self._shift.factor
        return self._values, self._values - factor * model.left_out

    def copy(self) -> Predictor:
        """The same predictor, learning on its own from now on."""
        return Predictor.from_json(self.to_json(), extra=self._extra)

    # --- JSON -----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for a store."""
        self._fitted()
        return {
            "format": _FORMAT,
            "quantity": self.quantity,
            "features": self.features.to_json(),
            "form": [self.form.terms, self.form.ridge, self.form.bend, self.form.width],
            "hyper": list(self.form.hyper),
            "inflate": self._inflate,
            "rmspe": None if math.isnan(self.rmspe) else self.rmspe,
            "source": int(self.source),
            "online": self._online,
            "rows": self._rows.tolist(),
            "values": self._values.tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, extra: Extra | None = None) -> Predictor:
        """The predictor of its JSON-able form.

        Args:
            data: From ``to_json``.
            extra: The function of the extra features, if it was fitted with any.

        Raises:
            InvalidInput: It is something else.
        """
        import numpy as np

        try:
            if data["format"] != _FORMAT:
                raise InvalidInput(
                    f"The predictor is of format {data['format']}: update Penstock, or profile again."
                )
            features = Features.from_json(data["features"])
            terms, ridge, bend, width = data["form"]
            values = np.array(data["values"], dtype=float)
            rows = np.array(data["rows"], dtype=float).reshape(len(values), -1)
            return cls(
                str(data["quantity"]),
                features,
                rows,
                values,
                Form(terms, ridge, bend, width, tuple(map(float, data.get("hyper", ())))),
                extra=extra,
                rmspe=math.nan if data["rmspe"] is None else float(data["rmspe"]),
                source=Source(data["source"]),
                online=int(data["online"]),
                inflate=float(data.get("inflate", 1.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"Not a predictor written by to_json(): {error!r}.") from error

    def __repr__(self) -> str:
        doubt = "not cross-validated" if math.isnan(self.rmspe) else f"RMSPE {100 * self.rmspe:.1f}%"
        return f"<Predictor of {self.quantity}: {self.form.terms}, {self.samples} samples, {doubt}>"

    def _fitted(self) -> _Model | Smooth:
        if self._model is None:
            import numpy as np

            if self._pending:
                self._rows = np.vstack([self._rows, [row for row, _ in self._pending]])
                self._values = np.append(self._values, [value for _, value in self._pending])
                self._online += len(self._pending)
                self._pending = []
            with one_thread():
                first = len(self._values) - self._online
                self._shift = self._shifted(first)
                values = self._values.copy()
                values[first:] /= self._shift.factor
                self._model = _made(self.features, self._rows, values, self.form, first)
            self._pure, self._least_pure = _repeated(self._rows, values)
            self._strayed = _strayed(self._model, first, self._inflate)
        return self._model

    def _shifted(self, first: int) -> _Shift:
        """What the study's own measurements say of the profile's model as a whole.

        In one fit with a hundred samples of a profile, a few measurements that contradict it would pass for outliers.
        """
        import numpy as np

        if self._online < _FEWEST_ONLINE or first < 3:
            return _Shift()
        rows, values = self._rows[:first], self._values[:first]
        if self._profiled is None:
            self._profiled = _made(self.features, rows, values, self.form, first)
        model = self._profiled
        mean, unknown = model.predict(self._rows[first:])
        # Its doubt may be the same error everywhere; what measurements scatter by averages out.
        doubt = (self._inflate * unknown) ** 2 + self._misfit(model, _repeated(rows, values))
        return _shift(np.log(self._values[first:] / mean), doubt, model.noise**2, first)


def rmspe(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """The root mean square percentage error, as a fraction (HyperPower section 5)."""
    if len(predicted) != len(actual) or not len(actual):
        raise InvalidInput(f"rmspe compares lists of one length, got {len(predicted)} and {len(actual)}.")
    total = math.fsum(((float(p) - float(a)) / float(a)) ** 2 for p, a in zip(predicted, actual, strict=True))
    return math.sqrt(total / len(actual))


def cross_validate(
    features: Features,
    rows: Matrix,
    values: Matrix,
    *,
    folds: int = 10,
    seed: int = 0,
    forms: Sequence[str] = FORMS,
    bends: bool = True,
) -> Matrix:
    """The relative error of every sample, predicted by a model that was chosen and fitted without its fold."""
    import numpy as np

    usable = _usable(features, tuple(forms))
    # A structure that was measured twice is not predicted from itself: structures are dealt out to folds, not samples.
    number: dict[bytes, int] = {}
    structure = [number.setdefault(row.tobytes(), len(number)) for row in rows]
    if len(number) < 2:
        raise InvalidInput("Cross validation leaves structures out: collect samples of at least two.")
    order = np.random.default_rng(seed).permutation(len(number))
    dealt = np.empty(len(number), dtype=int)
    dealt[order] = np.arange(len(number)) % folds
    fold_of = dealt[structure]
    errors = np.empty(len(values))
    with one_thread():
        for fold in range(min(folds, len(number))):
            out = fold_of == fold
            form = _choose(features, rows[~out], values[~out], usable, bends)
            mean, _ = _made(features, rows[~out], values[~out], form).predict(rows[out])
            errors[out] = (mean - values[out]) / values[out]
    return errors


# --- inside -------------------------------------------------------------------------------------------------


def _usable(features: Features, forms: tuple[str, ...]) -> tuple[str, ...]:
    """The forms that differ for these features, from the simplest on."""
    usable = [form for form in FORMS if form in forms]
    if not features.extra:
        usable = [form for form in usable if not form.endswith(("extra", "all"))] or ["linear"]
    if len(features.columns) > _MOST_PRODUCTS:
        usable = [form for form in usable if not form.endswith(("products", "all"))] or ["linear"]
    if not features.columns:  # of an empty space: a function of nothing is a constant
        usable = [form for form in usable if form != "smooth"] or ["linear"]
    return tuple(usable)


def _choose(features: Features, rows: Matrix, values: Matrix, forms: Sequence[str], bends: bool) -> Form:
    """The simplest form whose leave-one-out error no richer one undercuts by more than a little."""
    smooth = [terms for terms in forms if terms.startswith("smooth")]
    best: Form | None = None
    least = math.inf
    for terms in [terms for terms in forms if terms not in smooth] or ["linear"]:
        design = _Design(features, rows, terms)
        own = min(
            ((_loo(design, rows, values, Form(terms, ridge)), -ridge) for ridge in _RIDGES),
            key=lambda p: p[0],
        )
        if best is None or own[0] < _PAYS * least:
            best, least = Form(terms, -own[1]), own[0]
    assert best is not None
    if bends and len(values) >= 20 and best.terms != "plain":
        design = _Design(features, rows, best.terms)
        for width in _WIDTHS:
            for bend in _BENDS:
                bent = Form(best.terms, best.ridge, bend, width)
                error = _loo(design, rows, values, bent)
                if error < (_PAYS * least if best.bend == 0.0 else least):
                    best, least = bent, error
    if smooth and len(values) >= _FEWEST_SMOOTH:
        missed = (_made(features, rows, values, best).left_out / values) ** 2
        for terms in smooth:
            found = _smooth(features, rows, values, terms)
            own_missed = (found.left_out / values) ** 2
            # So free a form is taken by luck sometimes: its gain must be more than twice its standard error, too.
            gain = missed - own_missed
            surely = float(gain.mean()) > 2 * float(gain.std()) / math.sqrt(len(gain))
            if surely and own_missed.mean() < _PAYS**2 * missed.mean():
                hyper = (*found.hyper.scales.tolist(), found.hyper.signal, found.hyper.noise)
                best, missed = Form(terms, 0.0, hyper=hyper), own_missed
    return best


def _made(
    features: Features, rows: Matrix, values: Matrix, form: Form, first: int | None = None
) -> _Model | Smooth:
    """The model of a form, fitted; its units by the ``first`` samples, where it has some."""
    return (
        _smooth(features, rows, values, form.terms, form.hyper, first)
        if form.smooth
        else _Model(features, rows, values, form)
    )


def _smooth(
    features: Features,
    rows: Matrix,
    values: Matrix,
    terms: str,
    hyper: tuple[float, ...] = (),
    first: int | None = None,
) -> Smooth:
    import numpy as np

    from penstock.predict._smooth import Smooth
    from penstock.predict.gp import Hyper

    given = Hyper(np.array(hyper[:-2]), hyper[-2], hyper[-1]) if hyper else None
    return Smooth(features, rows, values, extra=terms.endswith("extra"), hyper=given, first=first)


def _inflation(model: _Model | Smooth, errors: Matrix) -> float:
    """By how much the model's doubt of its function is to be raised to agree with what cross validation missed.

    A form, and hyperparameters, that were chosen by the samples fit them better than they fit what they did not see.
    """
    import numpy as np

    size = np.abs(errors)
    clipped = np.minimum(
        size, 4.0 * np.median(size) + 1e-9
    )  # a disturbed measurement is not the model's doubt
    unknown = float(np.mean(model.unknown))
    missed = float(np.mean(clipped**2)) - model.noise**2
    return math.sqrt(max(missed / unknown, 1.0)) if unknown > 0 else 1.0


def _repeated(rows: Matrix, values: Matrix) -> tuple[float, float]:
    """The relative scatter of measurements of the same structure ("pure error") and its lower 10% bound.

    0: there are too few repeats.
    """
    from scipy.special import gammaincinv

    squares, freedom = _pure_error(rows, values)
    if freedom < _FEWEST_REPEATS:
        return 0.0, 0.0
    quantile = 2.0 * float(gammaincinv(freedom / 2.0, 0.9))  # of chi squared
    return math.sqrt(squares / freedom), math.sqrt(squares / quantile)


def _pure_error(rows: Matrix, values: Matrix) -> tuple[float, int]:
    """Of measurements of the same structure, the sum of their logarithms' squared deviations, and its freedom."""
    import numpy as np

    alike: dict[bytes, list[float]] = {}
    for row, value in zip(rows, np.log(values), strict=True):
        alike.setdefault(row.tobytes(), []).append(float(value))
    groups = [np.array(logs) for logs in alike.values() if len(logs) > 1]
    squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in groups)
    return squares, sum(len(logs) - 1 for logs in groups)


def _shift(logs: Matrix, doubt: Matrix, noise: float, samples: int) -> _Shift:
    """The factor, if it is surely another one than 1.

    Where measurements agree with the profile, they are samples like its own and nothing is corrected.

    Args:
        logs: Logarithms of measured over predicted values.
        doubt: Relative variances of the predictions themselves.
        noise: The relative variance of measurements around them.
        samples: Of the profile, whose doubt is as well known as there are many.
    """
    from scipy.special import stdtrit

    weights = 1.0 / (doubt + noise)
    weights /= weights.sum()
    mean = float(weights @ logs)
    spread = float(weights @ (logs - mean) ** 2) * len(logs) / (len(logs) - 1)
    error = max(spread, noise) * float(weights @ weights)
    sure = abs(mean) > stdtrit(samples - 1, 0.5 + _SURE / 2.0) * math.sqrt(error + float(weights @ doubt))
    return _Shift(mean, math.sqrt(error)) if sure else _Shift()


def _strayed(model: _Model | Smooth, first: int, inflate: float) -> float:
    """What a study's measurements miss the model by beyond what was to be expected, relative; 0: they don't.

    Not clipped: a profile's outlier is a disturbed sample, but what a study measures is what its limits are about.
    """
    import numpy as np
    from scipy.special import gammaincinv

    values = model.values[first:]
    if len(values) < _FEWEST_ONLINE:
        return 0.0
    predicted = np.maximum(values - model.left_out[first:], _LEAST * values)
    squares = np.log(values / predicted) ** 2
    expected = model.noise**2 + inflate**2 * model.unknown[first:]
    usual = np.sort(squares / expected)[:-1]  # one disturbed measurement is none of the model's fault
    if usual.sum() <= 2.0 * gammaincinv(len(usual) / 2.0, _SURE):  # of chi squared
        return 0.0
    return math.sqrt(max(float(np.mean(squares - expected)), 0.0))


def _loo(design: _Design, rows: Matrix, values: Matrix, form: Form) -> float:
    import numpy as np

    model = _Model(design.features, rows, values, form, design)
    return float(np.sqrt(np.mean((model.left_out / values) ** 2)))


class _Design:
    """The terms of a form, each scaled by the samples to mean 0 and deviation 1 (but in the plain form)."""

    def __init__(self, features: Features, rows: Matrix, terms: str) -> None:
        import numpy as np

        self.features, self.terms = features, terms
        self.plain = len(features.columns)
        self.log = terms.startswith("log")
        # An indicator, or a number that may be 0, stays as it is.
        self.logged: list[bool] = [bool(all_above) and self.log for all_above in np.min(rows, axis=0) > 0]
        raw = self._raw(rows)
        if terms == "plain":
            self.shift = np.zeros(raw.shape[1])
            self.scale = np.maximum(np.abs(raw).max(axis=0, initial=0.0), 1e-12)
        else:
            self.shift = raw.mean(axis=0)
            spread = raw.std(axis=0)
            self.scale = np.where(spread > 1e-9 * (1.0 + np.abs(self.shift)), spread, np.inf)
        smooth = rows[:, : self.plain]
        self.center = smooth.mean(axis=0)
        spread = smooth.std(axis=0)
        self.spread = np.where(spread > 0, spread, np.inf)

    def _raw(self, rows: Matrix) -> Matrix:
        import numpy as np

        if self.log:
            rows = np.where(self.logged, np.log(np.maximum(rows, 1e-12)), rows)
        z, more = rows[:, : self.plain], rows[:, self.plain :]
        parts = [z]
        if self.terms.endswith(("products", "all")):
            i, j = np.triu_indices(self.plain)
            parts.append(z[:, i] * z[:, j])
        if self.terms.endswith(("extra", "all")):
            parts.append(more)
            if not self.log:
                parts.append(np.log(np.maximum(np.abs(more), 1e-12)))
        return np.hstack(parts)

    def matrix(self, rows: Matrix) -> Matrix:
        """Terms of rows, the constant last (but in the plain form)."""
        import numpy as np

        scaled = (self._raw(rows) - self.shift) / self.scale
        return scaled if self.terms == "plain" else np.hstack([scaled, np.ones((len(rows), 1))])

    def bent(self, rows: Matrix, others: Matrix, width: float) -> Matrix:
        """How alike the deviations of two sets of rows are: a squared-exponential kernel over the columns."""
        import numpy as np

        one = (rows[:, : self.plain] - self.center) / self.spread
        two = (others[:, : self.plain] - self.center) / self.spread
        squares = (one**2).sum(1)[:, None] + (two**2).sum(1)[None] - 2.0 * one @ two.T
        kernel: Matrix = np.exp(-np.maximum(squares, 0.0) / (2.0 * max(self.plain, 1) * width**2))
        return kernel

    def names(self) -> list[str]:
        """Of the terms."""
        own, extra = [str(c) for c in self.features.columns], list(self.features.extra)
        if self.log:
            own = [f"log {name}" if logged else name for name, logged in zip(own, self.logged, strict=False)]
            extra = [f"log {name}" for name in extra]
        names = list(own)
        if self.terms.endswith(("products", "all")):
            names += [f"{own[i]} * {own[j]}" for i in range(len(own)) for j in range(i, len(own))]
        if self.terms.endswith(("extra", "all")):
            names += extra if self.log else extra + [f"log {name}" for name in extra]
        return names


class _Model:
    """Ridge regression of relative errors with a smooth deviation, as one Gaussian process.

    In units of the mean value (or of logarithms): prior covariance of the weights noise^2 / ridge, of the bend
    bend^2 kernel, noise proportional to the value. The ridge is relative to the noise, so the mean does not depend
    on it where nothing bends; the noise then is what leaving one out leaves. The constant is hardly shrunk.
    """

    def __init__(
        self, features: Features, rows: Matrix, values: Matrix, form: Form, design: _Design | None = None
    ) -> None:
        import numpy as np
        from scipy.linalg.lapack import dpotrf, dpotri

        self.form = form
        self.design = design or _Design(features, rows, form.terms)
        self.values, self.rows = values, rows
        self.log = self.design.log
        self.unit = float(np.exp(np.log(values).mean())) if self.log else float(values.mean())
        y = np.log(values / self.unit) if self.log else values / self.unit
        # A relative error of the value is an absolute one of its logarithm.
        weight = np.ones(len(y)) if self.log else y**2
        self.terms = self.design.matrix(rows)
        self.prior = np.full(self.terms.shape[1], 1.0 / form.ridge)
        if form.terms != "plain":
            self.prior[-1] = 1e6
        covariance = (self.terms * self.prior) @ self.terms.T
        if form.bend:
            covariance += (form.bend / _NOISE) ** 2 * self.design.bent(rows, rows, form.width)
        covariance[np.diag_indices_from(covariance)] += weight
        factor, info = dpotrf(covariance, lower=1)
        if info:
            raise InvalidInput("The samples' features are degenerate: collect samples that differ.")
        inverse, _ = dpotri(factor, lower=1)
        self.inverse = np.tril(inverse) + np.tril(inverse, -1).T
        self.alpha = self.inverse @ y
        diagonal = np.diag(self.inverse)
        # Rasmussen & Williams 5.4.2: what leaving one out misses it by.
        missed = self.alpha / diagonal
        self.left_out = values * -np.expm1(-missed) if self.log else self.unit * missed
        relative = self.left_out / values
        # A few outliers (a measurement disturbed by another process) should not blow up everybody's doubt.
        clipped = np.minimum(np.abs(relative), 4.0 * np.median(np.abs(relative)) + 1e-9)
        self.scatter = max(float(np.sqrt(np.mean(clipped**2))), 1e-6)
        # Errors of leaving one out hold the weights' own doubt: take its average out, ``predict`` puts it in.
        self.noise = self.scatter / math.sqrt(max(float(np.mean(1.0 / (diagonal * weight))), 1.0))
        # Relative variances of the function at the samples, each left out.
        self.unknown = self.noise**2 * np.maximum(1.0 / (diagonal * weight) - 1.0, 0.0)

    def predict(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """Values, and the relative standard deviation of what is not known of them."""
        import numpy as np

        form = self.form
        terms = self.design.matrix(rows)
        cross = (terms * self.prior) @ self.terms.T
        own = ((terms**2) * self.prior).sum(1)
        if form.bend:
            cross += (form.bend / _NOISE) ** 2 * self.design.bent(rows, self.rows, form.width)
            own = own + (form.bend / _NOISE) ** 2
        mean = cross @ self.alpha
        doubt = np.maximum(own - ((cross @ self.inverse) * cross).sum(1), 0.0)
        if self.log:
            return self.unit * np.exp(np.minimum(mean, 50.0)), self.noise * np.sqrt(doubt)
        # Nothing draws less than nothing: far outside the samples a line may. There the doubt is that of its least.
        level = np.maximum(mean, _LEAST)
        return level * self.unit, self.noise * np.sqrt(doubt) / level

    def weights(self) -> dict[str, float]:
        import numpy as np

        scaled = self.prior * (self.terms.T @ self.alpha)
        names = self.design.names()
        unit = 1.0 if self.log else self.unit
        raw = unit * scaled[: len(names)] / self.design.scale
        found = {name: float(weight) for name, weight in zip(names, raw, strict=True)}
        if self.form.terms != "plain":
            start = math.log(self.unit) if self.log else 0.0
            found["constant"] = start + float(unit * scaled[-1] - np.sum(raw * self.design.shift))
        return found
