"""Losses of many members: one kernel over all rows, one mean per member."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, rule


@rule(F.cross_entropy)
def _cross_entropy(
    members: Members,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None
    if not plain or label_smoothing or isinstance(label_smoothing, PerMember) or target.is_floating_point():
        return NotImplemented
    x = members.front(input)
    if x is None or input.dim() < 2 or reduction not in ("mean", "sum"):
        return NotImplemented
    rows, count = members.spread(target), members.count
    classes = x.movedim(2, -1) if x.dim() > 3 else x
    losses = F.cross_entropy(
        classes.reshape(-1, classes.shape[-1]), rows.reshape(-1), ignore_index=ignore_index, reduction="none"
    ).view(count, -1)
    total = losses.sum(1)
    if reduction == "sum":
        return members.wrap(total)
    counted = (rows.reshape(count, -1) != ignore_index).sum(1)
    return members.wrap(total / counted)
