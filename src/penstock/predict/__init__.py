"""What a trial will cost, before it runs."""

from penstock.predict._overhead import (
    Overhead,
    OverheadProfile,
    Probe,
    fit_scaling,
    fit_sharing,
    marginal_benefit,
)
from penstock.predict._runtime import EpochTimes

__all__ = ["EpochTimes", "Overhead", "OverheadProfile", "Probe", "fit_scaling", "fit_sharing", "marginal_benefit"]
