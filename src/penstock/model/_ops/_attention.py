"""Attention of many members: members join the batch, which the kernels are indifferent to."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, rule
from penstock.model._ops._random import dropped


@rule(F.scaled_dot_product_attention)
def _attention(
    members: Members,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa or all(members.front(x) is None for x in (query, key, value)):
        return NotImplemented
    q, k, v = members.spread(query), members.spread(key), members.spread(value)
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 5:
        return NotImplemented
    rate = max(dropout_p.values) if isinstance(dropout_p, PerMember) else dropout_p
    mask = None if attn_mask is None else members.front(attn_mask)
    if rate <= 0.0:
        if mask is not None:
            mask = mask.view(mask.shape[0], *(1,) * (5 - mask.dim()), *mask.shape[1:])
            mask = mask.expand(members.count, q.shape[1], *mask.shape[2:]).flatten(0, 1)
        elif attn_mask is not None:
            mask = attn_mask
            if mask.dim() == 4 and mask.shape[0] != 1:  # one per row of a member's batch
                mask = mask.expand(members.count, *mask.shape).flatten(0, 1)
        out = F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, 0.0, is_causal, scale=scale
        )
        return members.wrap(out.view(members.count, -1, *out.shape[1:]))
    # torch's own kernels draw the mask inside; this is its plain formula with the members' masks.
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * math.sqrt(factor), (k * math.sqrt(factor)).transpose(-2, -1))
    if is_causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        full = (
            attn_mask if mask is None else mask.view(mask.shape[0], *(1,) * (5 - mask.dim()), *mask.shape[1:])
        )
        scores = scores.masked_fill(~full, -math.inf) if full.dtype == torch.bool else scores + full
    weights = dropped(members, torch.softmax(scores, -1), dropout_p)
    return members.wrap(torch.matmul(weights, v))
