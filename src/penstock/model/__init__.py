"""Rewrites of the user's torch models: many fused into one, and narrow twins. Loads torch on first use of a name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.model._check import CoordinateCheck, LayerCheck, coordinate_check
    from penstock.model._fuse import Fusion, unfusable
    from penstock.model._hazard import writes_beyond
    from penstock.model._light import without_compiler
    from penstock.model._ops import PerMember
    from penstock.model._optimize import FusedOptimizer, group_names, release
    from penstock.model._pace import Form, Pace
    from penstock.model._parametrize import Rule, ScaledSchedule, Table, adam_like, parametrize, scale_groups
    from penstock.model._shrink import compare, narrower, shrink
    from penstock.model._stack import Slot, Stack, detach
    from penstock.model._step import FusedStep, Recorded
    from penstock.model._surrogate import Shrink

_WHERE = {
    "CoordinateCheck": "_check",
    "Form": "_pace",
    "FusedOptimizer": "_optimize",
    "FusedStep": "_step",
    "Fusion": "_fuse",
    "LayerCheck": "_check",
    "Pace": "_pace",
    "PerMember": "_ops",
    "Recorded": "_step",
    "Rule": "_parametrize",
    "ScaledSchedule": "_parametrize",
    "Shrink": "_surrogate",
    "Slot": "_stack",
    "Stack": "_stack",
    "Table": "_parametrize",
    "adam_like": "_parametrize",
    "compare": "_shrink",
    "coordinate_check": "_check",
    "detach": "_stack",
    "group_names": "_optimize",
    "narrower": "_shrink",
    "parametrize": "_parametrize",
    "release": "_optimize",
    "scale_groups": "_parametrize",
    "shrink": "_shrink",
    "unfusable": "_fuse",
    "without_compiler": "_light",
    "writes_beyond": "_hazard",
}

__all__ = [
    "CoordinateCheck",
    "Form",
    "FusedOptimizer",
    "FusedStep",
    "Fusion",
    "LayerCheck",
    "Pace",
    "PerMember",
    "Recorded",
    "Rule",
    "ScaledSchedule",
    "Shrink",
    "Slot",
    "Stack",
    "Table",
    "adam_like",
    "compare",
    "coordinate_check",
    "detach",
    "group_names",
    "narrower",
    "parametrize",
    "release",
    "scale_groups",
    "shrink",
    "unfusable",
    "without_compiler",
    "writes_beyond",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = found
    return found
