"""Autograd's view of fused tensors: the graph lies below them, where a forward does not look."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.model._ops._base import Members, refuse, rule


@rule(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(members: Members, x: Tensor) -> bool:
    """As it is of one member: a penalty on all weights that are trained asks for it."""
    return members.below(x)[0].requires_grad


@rule(Tensor.register_hook)
def _register_hook(members: Members, x: Tensor, hook: Any) -> Any:
    """On the tensor that a member sees it would never be called, for gradients flow through the stacked one."""
    raise refuse("the forward puts a hook on a tensor, which would see the gradients of all members at once")
