"""Linear layers of many members: one batched matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, rule


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for stacked tensors, members first."""
    count, width = x.shape[0], weight.shape[1]
    rows = x.reshape(count, -1, x.shape[-1])
    if bias is None:
        out = torch.bmm(rows, weight.transpose(1, 2))
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
    return out.view(*x.shape[:-1], width)


@rule(F.linear)
def _linear(members: Members, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    w = members.front(weight)
    if w is None or w.dim() != 3:
        return NotImplemented
    b = None if bias is None else members.spread(bias)
    x = members.front(input)
    if x is not None:
        return members.wrap(batched_linear(x, w, b))
    # The same input for all members (validation): one wide product.
    out = F.linear(input, w.reshape(-1, w.shape[-1]), None if b is None else b.reshape(-1))
    return members.wrap(out.view(*input.shape[:-1], members.count, w.shape[1]), input.dim() - 1)
