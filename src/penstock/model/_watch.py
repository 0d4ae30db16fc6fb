"""What a forward leaves behind beside its result: attributes that it sets, numbers drawn from common generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.utils import _pytree as pytree

from penstock.core.errors import Unsupported

_STATE = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})

DRAWS = "the forward draws from Python's or numpy's generator, which members would share"


def held_by(module: nn.Module) -> dict[str, Any]:
    """What a layer holds, lists and the like copied: they are changed in place."""
    return {key: copy.copy(value) if loose(key, value) else value for key, value in vars(module).items()}


def loose(key: str, value: Any) -> bool:
    """Whether an attribute is something that is changed in place, other than the layer's own tables."""
    return type(value) in (list, dict, set) and key not in _STATE and not key.endswith("_hooks")


def same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a layer holds what it held."""
    try:
        return now == before
    except (RuntimeError, ValueError, TypeError):
        return False


def odd(now: dict[str, Any], before: dict[str, Any]) -> str:
    """The name of an attribute that is not what it was."""
    for key in now.keys() | before.keys():
        a, b = now.get(key), before.get(key)
        try:
            if a is not b and not bool(a == b):
                return key
        except (RuntimeError, ValueError, TypeError):
            return key
    return "an attribute"


def shared(module: nn.Module, key: str) -> Unsupported:
    """The error for an attribute that a forward sets."""
    return Unsupported(f"the forward sets {key} of a {type(module).__name__}, which members would share")


def settled(modules: Sequence[nn.Module], before: Sequence[dict[str, Any]]) -> bool:
    """Whether a forward has left its layers' attributes alone.

    Raises:
        Unsupported: It keeps values of its members.
    """
    found = True
    for module, held in zip(modules, before, strict=True):
        if same(module.__dict__, held):
            continue
        found = False
        for key, value in held_by(module).items():
            own = key not in _STATE and value is not held.get(key)
            if own and any(
                isinstance(leaf, Tensor) and functorch.is_batchedtensor(leaf)
                for leaf in pytree.tree_leaves(value)
            ):
                raise shared(module, key)
    return found


def generators() -> tuple[Any, ...]:
    """The states of Python's and numpy's common generators, to be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, words, position, *rest = numpy.random.get_state()
    return random.getstate(), words.tobytes(), position, *rest


__all__ = ["DRAWS", "generators", "held_by", "loose", "odd", "same", "settled", "shared"]
