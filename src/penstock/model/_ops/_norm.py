"""Normalisations of many members: batch statistics of each member's own rows, its own running averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, rule
from penstock.model._ops._conv import fold, unfold


@rule(F.batch_norm)
def _batch_norm(
    members: Members,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if members.front(input) is None or input.dim() < 2:
        return NotImplemented
    if isinstance(momentum, PerMember) or isinstance(eps, PerMember):
        return NotImplemented
    if training:
        rows = input.numel() // input.shape[1]
        if rows <= 1:
            return NotImplemented  # torch's own error text
    mean, var = _running(members, running_mean), _running(members, running_var)
    if (running_mean is not None and mean is None) or (running_var is not None and var is None):
        return NotImplemented
    w = None if weight is None else members.spread(weight).reshape(-1)
    b = None if bias is None else members.spread(bias).reshape(-1)
    out = torch.batch_norm(fold(members, input), w, b, mean, var, training, momentum, eps, True)
    return unfold(members, out)


def _running(members: Members, x: Tensor | None) -> Tensor | None:
    """The stacked running average as one long vector in the same memory, for torch updates it in place."""
    if x is None:
        return None
    stacked = members.front(x)
    return stacked.view(-1) if stacked is not None and stacked.is_contiguous() else None


@rule(F.layer_norm)
def _layer_norm(
    members: Members,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    x = members.front(input)
    if x is None or isinstance(eps, PerMember):
        return NotImplemented
    out = F.layer_norm(x, tuple(normalized_shape), None, None, eps)
    w, b = _aligned(members, weight, x), _aligned(members, bias, x)
    if w is not None and b is not None:
        out = torch.addcmul(b, out, w)
    elif w is not None:
        out = out * w
    elif b is not None:
        out = out + b
    return members.wrap(out)


@rule(F.group_norm, torch.group_norm)
def _group_norm(
    members: Members,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Every row is normalised by itself, so members are further rows; only scale and shift are their own."""
    x = members.front(input)
    if x is None or isinstance(eps, PerMember) or input.dim() < 2:
        return NotImplemented
    rows = x.reshape(-1, *x.shape[2:])
    out = torch.group_norm(rows, num_groups, None, None, eps, cudnn_enabled).view(x.shape)
    after = (1,) * (input.dim() - 2)
    if weight is not None:
        out = out * members.spread(weight).view(members.count, 1, -1, *after)
    if bias is not None:
        out = out + members.spread(bias).view(members.count, 1, -1, *after)
    return members.wrap(out)


def _aligned(members: Members, scale: Tensor | None, x: Tensor) -> Tensor | None:
    """A stacked affine parameter with 1s for the dimensions between the members and its own."""
    if scale is None:
        return None
    s = members.spread(scale)
    return s.view(s.shape[0], *(1,) * (x.dim() - s.dim()), *s.shape[1:])


@rule(F.normalize)
def _normalize(
    members: Members,
    input: Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
) -> Any:
    """Into a tensor that is there, for which vmap has no rules: spectral norm keeps its vectors so."""
    into = None if out is None else members.front(out)
    if into is None or isinstance(p, Tensor | PerMember) or isinstance(eps, Tensor | PerMember):
        return NotImplemented
    into.copy_(F.normalize(members.spread(input), p, dim + 1 if dim >= 0 else dim, eps))
    return out
