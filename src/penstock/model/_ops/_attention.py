"""Attention of many members: members join the batch, which the kernels are indifferent to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn.modules import transformer

from penstock.model._ops._base import Members, rule
from penstock.model._ops._linear import batched_linear
from penstock.model._ops._random import dropped, rates

_SHORT = 32
"""Sequences up to here are attended to by plain products: torch's kernel for CPUs calls one for every row and head,
and for 16 tokens that call is what takes longest (2048 heads of 16 x 8, forward and backward: 11 ms against 7)."""


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Let ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` take masks of fused members as they are.

    They look whether a mask is causal, for a quicker kernel. Of many members' masks there is no one answer, and in a
    step that is being recorded no value to look at; the mask itself says the same.
    """
    look = transformer._detect_is_causal_mask

    def causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and mask is not None and functorch.is_batchedtensor(mask):
            return False
        return look(mask, is_causal, size)

    transformer._detect_is_causal_mask = causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = look


@rule(F.scaled_dot_product_attention)
def _attention(
    members: Members,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    rate = max(rates(members, dropout_p))
    q, k, v = members.spread(query), members.spread(key), members.spread(value)
    mask = None if attn_mask is None else members.front(attn_mask)
    if rate <= 0.0:
        if enable_gqa or all(members.front(x) is None for x in (query, key, value)):
            return NotImplemented
        if q.dim() != 5 or k.dim() != 5 or v.dim() != 5:
            return NotImplemented
        if mask is not None:
            mask = _deepened(mask, 5)
            mask = mask.expand(members.count, q.shape[1], *mask.shape[2:]).flatten(0, 1)
        elif attn_mask is not None:
            mask = attn_mask
            if mask.dim() == 4 and mask.shape[0] != 1:  # one per row of a member's batch
                mask = mask.expand(members.count, *mask.shape).flatten(0, 1)
        out = F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, 0.0, is_causal, scale=scale
        )
        return members.wrap(out.view(members.count, -1, *out.shape[1:]))
    # torch's own kernels draw the mask inside; this is its plain formula with the members' masks, for all shapes.
    dims = max(q.dim(), k.dim(), v.dim())
    q, k, v = _deepened(q, dims), _deepened(k, dims), _deepened(v, dims)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * math.sqrt(factor), (k * math.sqrt(factor)).transpose(-2, -1))
    if is_causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        full = attn_mask if mask is None else _deepened(mask, dims)
        scores = scores.masked_fill(~full, -math.inf) if full.dtype == torch.bool else scores + full
    weights = dropped(members, torch.softmax(scores, -1), dropout_p)
    return members.wrap(torch.matmul(weights, v))


def _deepened(x: Tensor, dims: int) -> Tensor:
    """A stacked tensor whose members have as many dimensions as others': new ones come behind the members'."""
    return x[(slice(None), *(None,) * (dims - x.dim()))]


@rule(F.multi_head_attention_forward)
def _self_attention(
    members: Members,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float | Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """``nn.MultiheadAttention`` of a sequence to itself, without the copies that torch's own way through it makes."""
    odd = bias_k is not None or bias_v is not None or static_k is not None or static_v is not None
    if query is not key or key is not value or query.dim() != 3 or need_weights or add_zero_attn or odd:
        return NotImplemented
    rate = max(rates(members, dropout_p))
    x = members.front(query)
    if (
        x is None
        or key_padding_mask is not None
        or (training and rate > 0)
        or (is_causal and attn_mask is None)
    ):
        return NotImplemented
    if attn_mask is not None and (attn_mask.dim() != 2 or attn_mask.requires_grad):
        return NotImplemented
    apart = (q_proj_weight, k_proj_weight, v_proj_weight)
    given = apart if use_separate_proj_weight else (in_proj_weight,)
    found = [None if each is None else members.front(each) for each in (*given, out_proj_weight)]
    weights = [each for each in found if each is not None]
    width = query.shape[-1]
    if len(weights) != len(found) or any(w.dtype != x.dtype or w.shape[2] != width for w in weights):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    inward = torch.cat(weights[:-1], 1) if use_separate_proj_weight else weights[0]
    bias = None if in_proj_bias is None else members.spread(in_proj_bias)
    last = None if out_proj_bias is None else members.spread(out_proj_bias)
    rows = x.transpose(1, 2)  # members, batch, sequence, width: as a batch-first model has it
    count, batch, length, _ = rows.shape
    packed = batched_linear(rows, inward, bias).view(count * batch, length, 3, num_heads, -1)
    mask = None
    if attn_mask is not None:
        own = members.front(attn_mask)  # of each member where it is a buffer, though they are mostly the same
        mask = attn_mask.unsqueeze(0) if own is None else own
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(mask, -math.inf)
        if own is not None:
            mask = mask.unsqueeze(1).expand(count, batch, length, length).flatten(0, 1)
    if length <= _SHORT:
        out = _Short.apply(packed, mask)  # type: ignore[no-untyped-call]
    else:
        q, k, v = (each.transpose(1, 2) for each in packed.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask.unsqueeze(1))
        out = out.transpose(1, 2)
    joined = batched_linear(out.reshape(count, batch, length, width), weights[-1], last)
    return members.wrap(joined.transpose(1, 2)), None


class _Short(torch.autograd.Function):
    """Attention over (rows, sequence, 3, heads, size) by batched products, with all gradients in one tensor.

    A mask is one for all rows, or one for each.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _, heads, size = packed.shape
        q, k, v = packed.permute(2, 0, 3, 1, 4).reshape(3, rows * heads, length, size).unbind(0)
        scale = 1.0 / math.sqrt(size)
        if mask is None:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
        else:
            each = mask if mask.shape[0] == 1 else mask.repeat_interleave(heads, 0)
            scores = torch.baddbmm(each, q, k.transpose(1, 2), alpha=scale)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shape = rows, length, heads, size
        return torch.bmm(weights, v).view(rows, heads, length, size).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        q, k, v, weights = ctx.saved_tensors
        rows, length, heads, size = ctx.shape
        g = gradients[0].transpose(1, 2).reshape(rows * heads, length, size)
        of_weights = torch.bmm(g, v.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_scores = of_scores.mul_(1.0 / math.sqrt(size))
        parts = (
            torch.bmm(of_scores, k),
            torch.bmm(of_scores.transpose(1, 2), q),
            torch.bmm(weights.transpose(1, 2), g),
        )
        return torch.stack([each.view(rows, heads, length, size).transpose(1, 2) for each in parts], 2), None
