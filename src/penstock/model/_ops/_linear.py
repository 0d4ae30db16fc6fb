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
    if torch.is_autocast_enabled(x.device.type) or rows.dtype != weight.dtype:
        wide = weight.transpose(1, 2)
        out = torch.bmm(rows, wide) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, wide)
    else:
        out = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], width)


class _Linear(torch.autograd.Function):
    """The batched product with a backward that gives the weight's gradient in the weight's own layout.

    Left to autograd it comes transposed, and laying it out for the optimizer costs a copy of all weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = weight.transpose(1, 2)
        return torch.bmm(x, wide) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            torch.bmm(g, weight) if needs[0] else None,
            torch.bmm(g.transpose(1, 2), x) if needs[1] else None,
            g.sum(1) if needs[2] else None,
        )


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
