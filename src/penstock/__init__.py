"""Penstock finds good hyperparameters while spending as little energy, time and hardware as possible.

The rooms, from the ground up (imports point downwards only):

- ``core``: frozen values that the rooms exchange: trials, groups, plans, events, measurements, devices, errors
- ``space``: where configurations come from: domains, conditions, encoding
- ``goal``: what is better: objectives, budgets, Pareto sets
- ``predict``: cost before running
- ``energy``: sensors, meter, attribution, power limits, carbon
- ``model``: rewrites of torch models
- ``store``: the journal of a study, in SQLite or PostgreSQL
- ``sample``: which configuration comes next
- ``schedule``: how much budget each configuration gets
- ``plan``: which trials run where
- ``train``: what a training function sees, and the worker that calls it
- ``execute``: where trials run: local processes, a Ray cluster, simulated devices
- ``recurring``: a job that runs again and again
- ``report``: terminal views and reports
- ``study``: the loop that joins the rooms
- ``cli``, ``integrations``: ways in from outside

Every public name is an attribute of this package and is loaded when first used, so that ``import penstock`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "penstock.core": ("Device", "Measurement", "Source", "TrialStatus"),
    "penstock.space": ("Choice", "Float", "Int", "Space", "equals", "greater", "less", "one_of"),
    "penstock.energy": (
        "EtaCost",
        "LeastEnergy",
        "LeastEnergyWithin",
        "LeastTime",
        "Meter",
        "PowerLimiter",
        "PowerLimits",
        "SimulatedGpus",
    ),
    "penstock.goal": (
        "Budget",
        "Limit",
        "Quantity",
        "epoch_j",
        "epoch_s",
        "flops",
        "latency_s",
        "memory_bytes",
        "params",
        "power_w",
    ),
    "penstock.model": ("Shrink",),
    "penstock.plan": ("Fluid",),
    "penstock.predict": ("Overhead", "Predictors"),
    "penstock.sample": (
        "Bayes",
        "Gate",
        "Grid",
        "Limited",
        "OptunaSampler",
        "Random",
        "TPE",
        "Walk",
        "WarmStart",
    ),
    "penstock.schedule": (
        "ASHA",
        "Divergence",
        "Full",
        "Halving",
        "Hyperband",
        "MedianStop",
        "PBT",
        "Plateau",
        "SM2",
    ),
    "penstock.train": ("Command", "Data", "EnergyLoader", "Profile", "Run", "Task", "elastic", "find_lr"),
    "penstock.execute": ("Local", "Ray", "Simulated"),
    "penstock.recurring": ("RecurringJob",),
    "penstock.study": ("Study",),
}
_MODULES = ("bubbles", "errors")  # public modules, by their own name
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "__version__",
    *sorted({*_HOME_OF, *_MODULES}),
]

if TYPE_CHECKING:
    from penstock import bubbles, errors
    from penstock.core import Device, Measurement, Source, TrialStatus
    from penstock.energy import (
        EtaCost,
        LeastEnergy,
        LeastEnergyWithin,
        LeastTime,
        Meter,
        PowerLimiter,
        PowerLimits,
        SimulatedGpus,
    )
    from penstock.execute import Local, Ray, Simulated
    from penstock.goal import (
        Budget,
        Limit,
        Quantity,
        epoch_j,
        epoch_s,
        flops,
        latency_s,
        memory_bytes,
        params,
        power_w,
    )
    from penstock.model import Shrink
    from penstock.plan import Fluid
    from penstock.predict import Overhead, Predictors
    from penstock.recurring import RecurringJob
    from penstock.sample import TPE, Bayes, Gate, Grid, Limited, OptunaSampler, Random, Walk, WarmStart
    from penstock.schedule import ASHA, PBT, SM2, Divergence, Full, Halving, Hyperband, MedianStop, Plateau
    from penstock.space import Choice, Float, Int, Space, equals, greater, less, one_of
    from penstock.study import Study
    from penstock.train import Command, Data, EnergyLoader, Profile, Run, Task, elastic, find_lr


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
