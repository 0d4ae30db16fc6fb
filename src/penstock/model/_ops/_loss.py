"""Losses of many members: one kernel over all rows, one mean per member."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, rule

_LANE_BYTES = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
_ROWS = 64


def _across(rows: Tensor) -> bool:
    """Whether the softmax of these rows is quicker along columns.

    torch's kernel for CPUs takes a row of more than two classes at a time, and one that does not fill a vector register
    costs it several times one that does (512 rows of 10 classes: 81 us, of 24: 15, and of 10 along columns: 5).
    """
    classes = rows.shape[-1]
    lane = _LANE_BYTES // rows.element_size()
    return rows.device.type == "cpu" and 2 < classes < lane and rows.shape[0] >= _ROWS


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
    scores, right = classes.reshape(-1, classes.shape[-1]), rows.reshape(-1)
    if _across(scores):  # as one image of as many pixels as there are rows
        scores, right = scores.t().unsqueeze(0), right.unsqueeze(0)
    losses = F.cross_entropy(scores, right, ignore_index=ignore_index, reduction="none").view(count, -1)
    total = losses.sum(1)
    if reduction == "sum":
        return members.wrap(total)
    # As numbers of the loss's own type: of any other, each division would convert them anew.
    counted = (rows.reshape(count, -1) != ignore_index).sum(1, dtype=total.dtype)
    return members.wrap(total / counted)
