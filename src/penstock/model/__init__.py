"""Rewrites of the user's torch models: many fused into one. Loads torch on first use of a name, not before."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.model._fuse import Fusion
    from penstock.model._ops import PerMember
    from penstock.model._optimize import FusedOptimizer, group_names, release
    from penstock.model._pace import Form, Pace
    from penstock.model._stack import Slot, Stack, detach
    from penstock.model._step import FusedStep, Recorded

_WHERE = {
    "Form": "_pace",
    "FusedOptimizer": "_optimize",
    "FusedStep": "_step",
    "Fusion": "_fuse",
    "Pace": "_pace",
    "PerMember": "_ops",
    "Recorded": "_step",
    "Slot": "_stack",
    "Stack": "_stack",
    "detach": "_stack",
    "group_names": "_optimize",
    "release": "_optimize",
}

__all__ = [
    "Form",
    "FusedOptimizer",
    "FusedStep",
    "Fusion",
    "Pace",
    "PerMember",
    "Recorded",
    "Slot",
    "Stack",
    "detach",
    "group_names",
    "release",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = found
    return found
