"""Convolutions and poolings of many members: members side by side in the channels, as groups, channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, rule

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def fold(members: Members, x: Tensor, *, last: bool = True) -> Tensor:
    """The stacked (members, rows, channels, ...) as (rows, members * channels, ...).

    In memory the members' channels lie side by side already when ``x`` came from a convolution, so this is a
    view there and a copy for the first layer only.
    """
    stacked, at = members.below(x)
    if at is None:
        stacked = x.unsqueeze(1).expand(x.shape[0], members.count, *x.shape[1:])
    elif at != 1:
        stacked = stacked.movedim(at, 1)
    flat = stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])
    form = _LAST.get(flat.dim()) if last else None
    return flat if form is None else flat.contiguous(memory_format=form)


def unfold(members: Members, x: Tensor) -> Tensor:
    """What ``fold`` made, as one member sees it."""
    return members.wrap(x.view(x.shape[0], members.count, -1, *x.shape[2:]), 1)


def _convolve(function: Callable[..., Tensor], rank: int, *, transposed: bool = False) -> Callable[..., Any]:
    def convolve(
        members: Members,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **named: Any,
    ) -> Any:
        w = members.front(weight)
        if w is None or input.dim() != rank + 2:  # unbatched input (C, H, W) is rare: vmap's
            return NotImplemented
        names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        options = dict(zip(names, rest, strict=False)) | named
        groups = options.pop("groups", 1)
        b = None if bias is None else members.spread(bias).reshape(-1)
        kernel = w.reshape(-1, *w.shape[2:])
        shared = members.front(input) is None and groups == 1 and not transposed
        if shared:  # all members read the same channels
            x, total = input, 1
            form = _LAST.get(x.dim())
            x = x if form is None else x.contiguous(memory_format=form)
        else:
            x, total = fold(members, input), members.count * groups
        form = _LAST.get(kernel.dim())
        if form is not None:
            kernel = kernel.contiguous(memory_format=form)
        out = function(x, kernel, b, stride, padding, groups=total, **options)
        return unfold(members, out)

    return convolve


for _rank, _plain, _back in (
    (1, torch.conv1d, torch.conv_transpose1d),
    (2, torch.conv2d, torch.conv_transpose2d),
    (3, torch.conv3d, torch.conv_transpose3d),
):
    rule(_plain)(_convolve(_plain, _rank))
    rule(_back)(_convolve(_back, _rank, transposed=True))


def _pool(function: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def pool(members: Members, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != rank + 2 or members.front(input) is None:
            return NotImplemented
        if kwargs.get("return_indices"):
            return NotImplemented
        return unfold(members, function(fold(members, input), *args, **kwargs))

    return pool


for _function, _rank in (
    (F.max_pool2d, 2),
    (torch.max_pool2d, 2),
    (F.avg_pool2d, 2),
    (F.adaptive_avg_pool2d, 2),
    (F.max_pool1d, 1),
    (torch.max_pool1d, 1),
    (F.avg_pool1d, 1),
    (F.adaptive_avg_pool1d, 1),
):
    rule(_function)(_pool(_function, _rank))
