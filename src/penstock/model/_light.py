"""Optimizers without torch's compiler: for a process that trains a few steps and compiles nothing.

The first optimizer that a process makes or steps imports the compiler, only to tell it what not to look into. That
takes as long as importing torch itself.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from penstock.model._growth import only_growth

_TOLD = "__dynamo_disable"  # where torch keeps a method of which its compiler knows that it is not to look into it
_COMPILER = "torch._dynamo"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers be made without importing torch's compiler: while this lasts their methods seem to be told of.

    Where the compiler is there already, or torch keeps that elsewhere, nothing changes.
    """
    marked = []
    if _COMPILER not in sys.modules:
        for method in vars(torch.optim.Optimizer).values():
            inner: Any = getattr(method, "__wrapped__", None)
            if inner is not None and not hasattr(inner, _TOLD):
                setattr(inner, _TOLD, inner)
                marked.append(inner)
    try:
        yield
    finally:
        for inner in marked:
            if getattr(inner, _TOLD, None) is inner:
                delattr(inner, _TOLD)


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, without importing torch's compiler where nothing but its wrappers would.

    An optimizer of the user's own, with hooks other than ours, or whose ``step`` an lr scheduler counts, steps as ever.
    """
    before, after = (
        list(hooks.values())
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    )
    plain = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    plain = plain and only_growth([*before, *after]) and not optimizer.defaults.get("differentiable")
    if _COMPILER in sys.modules or not plain:
        optimizer.step()
        return
    inner: Any = inspect.unwrap(type(optimizer).step)
    for hook in before:
        hook(optimizer, (), {})
    with torch.no_grad():
        inner(optimizer)
    for hook in after:
        hook(optimizer, (), {})


__all__ = ["step", "without_compiler"]
