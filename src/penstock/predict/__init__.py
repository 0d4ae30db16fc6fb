"""What a trial will cost, before it runs."""

from penstock.predict._blas import one_thread
from penstock.predict._bundle import PREFIX, Predictors, key_of
from penstock.predict._features import Column, Extra, Features
from penstock.predict._linear import Form, Prediction, Predictor, cross_validate, rmspe
from penstock.predict._overhead import (
    Overhead,
    OverheadProfile,
    Probe,
    fit_scaling,
    fit_sharing,
    marginal_benefit,
)
from penstock.predict._plot import scatter_svg
from penstock.predict._runtime import EpochTimes

__all__ = [
    "PREFIX",
    "Column",
    "EpochTimes",
    "Extra",
    "Features",
    "Form",
    "Overhead",
    "OverheadProfile",
    "Prediction",
    "Predictor",
    "Predictors",
    "Probe",
    "cross_validate",
    "fit_scaling",
    "fit_sharing",
    "key_of",
    "marginal_benefit",
    "one_thread",
    "rmspe",
    "scatter_svg",
]
