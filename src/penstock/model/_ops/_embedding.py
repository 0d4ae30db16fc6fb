"""Embeddings of many members: one table with the members' tables one below the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, refuse, rule


@rule(F.embedding)
def _embedding(
    members: Members,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    tables = members.front(weight)
    if tables is None or max_norm is not None or sparse:
        return NotImplemented
    size, width = tables.shape[1:]
    rows = members.spread(input)
    offset = torch.arange(members.count, device=rows.device) * size
    at = rows + offset.view(-1, *(1,) * (rows.dim() - 1))
    # How often a row is used is counted by member too: none uses another's rows.
    out = F.embedding(at, tables.reshape(-1, width), scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None:
        padding = padding_idx if padding_idx >= 0 else size + padding_idx
        out = torch.where((rows == padding).unsqueeze(-1), out.detach(), out)  # that row gets no gradient
    return members.wrap(out)


@rule(torch.embedding_renorm_)
def _renorm(members: Members, *args: Any, **kwargs: Any) -> Any:
    # It works in place on rows that lie in all members' weights, and vmap would shorten those of one member alone.
    raise refuse("an embedding with max_norm shortens the weights that it looks up")
