"""Convolutions and poolings of many members: members side by side in the channels, as groups, channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._hazard import writes_beyond
from penstock.model._ops._base import Members, rule

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEW = 4
"""With so few output pixels or less, the weights' gradient is a plain product: oneDNN's kernel works along the pixels
of a row, and with one to four of them takes several times as long (64 channels, 1 x 1 pixels: 0.6 ms against 0.05)."""


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
    if not last or stacked.dim() - 1 not in _LAST:
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])
    spatial = range(3, stacked.dim())
    return stacked.permute(0, *spatial, 1, 2).flatten(-2).movedim(-1, 1)  # one copy at most


def unfold(members: Members, x: Tensor) -> Tensor:
    """What ``fold`` made, as one member sees it."""
    return members.wrap(x.view(x.shape[0], members.count, -1, *x.shape[2:]), 1)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return int(first), int(rest[0] if rest else first)


def _simple(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, options: dict[str, Any]
) -> bool:
    """Whether the call is one that ``_Conv`` computes."""
    if isinstance(padding, str) or _pair(options.get("dilation", 1)) != (1, 1):
        return False
    same = x.dtype == w.dtype and (bias is None or bias.dtype == w.dtype)
    return same and not torch.is_autocast_enabled(x.device.type)


class _Conv(torch.autograd.Function):
    """The grouped convolution with a backward that gives the weights' gradient as the stack has it.

    Left to autograd, the kernels' change of layout is differentiated too, which costs further copies of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        kernel = w.permute(0, 1, 3, 4, 2).flatten(0, 1).movedim(-1, 1)  # channels last, with one copy
        ctx.save_for_backward(x, kernel)
        ctx.given = stride, padding, w.shape[0]
        return torch.conv2d(x, kernel, bias, stride, padding, 1, w.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        stride, padding, count = ctx.given
        g = gradients[0].contiguous(memory_format=torch.channels_last)
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        few = g.shape[2] * g.shape[3] <= _FEW
        of_x, of_w = None, None
        wanted = (wants_x, wants_w and not few, False)
        if any(wanted):
            of_x, of_w, _ = torch.ops.aten.convolution_backward(
                g, x, kernel, None, stride, padding, (1, 1), False, (0, 0), count, wanted
            )
        if wants_w and few:
            of_w = _of_weights(x, g, kernel, stride, padding, count)
        elif of_w is not None:
            of_w = of_w.view(count, -1, *of_w.shape[1:])
        of_b = g.sum((0, 2, 3)) if wants_b else None
        return of_x, of_w, of_b, None, None


def _of_weights(
    x: Tensor, g: Tensor, kernel: Tensor, stride: tuple[int, int], padding: tuple[int, int], count: int
) -> Tensor:
    """The gradient of all members' weights as one batched product of outputs and patches of the input."""
    high, wide = kernel.shape[2:]
    # rows, height, width, members, channels
    rows = x.permute(0, 2, 3, 1).reshape(x.shape[0], *x.shape[2:], count, -1)
    up, left = padding
    padded = F.pad(rows, (0, 0, 0, 0, left, left, up, up))
    patches = padded.unfold(1, high, stride[0]).unfold(2, wide, stride[1]).permute(3, 0, 1, 2, 5, 6, 4)
    patches = patches.reshape(count, -1, high * wide * rows.shape[4])
    outputs = g.permute(0, 2, 3, 1).reshape(-1, count, g.shape[1] // count).permute(1, 2, 0)
    product = torch.bmm(outputs, patches)
    return product.view(count, -1, high, wide, rows.shape[4]).permute(0, 1, 4, 2, 3)


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
        total = 1 if shared else members.count * groups
        last = not writes_beyond(kernel.shape, stride, total)
        form = _LAST.get(kernel.dim()) if last else torch.contiguous_format
        if shared:  # all members read the same channels
            x = input if form is None else input.contiguous(memory_format=form)
        else:
            x = fold(members, input, last=last)
            simple = rank == 2 and groups == 1 and not transposed and last
            if simple and _simple(x, w, b, stride, padding, options):
                out = _Conv.apply(x, w, b, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
                return unfold(members, out)
            x = x if last else x.contiguous()
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
