"""How a model's images lie in memory: channels last, where convolutions are faster for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput
from penstock.train._loader import copied

if TYPE_CHECKING:
    from penstock.train._loop import Trainer
    from penstock.train._task import Task

_CLOSE = 1e-4
"""How far the losses of both layouts may lie apart: rounding in single precision stays far below."""

_SLOWER = (nn.GroupNorm, nn.InstanceNorm2d, nn.ConvTranspose2d)
"""Layers whose kernels take longer in channels_last: with them, steps took up to 1.2 times as long on a core."""
_FEWEST = 2
"""A single convolution, as a transformer's patches have, gains less than it costs to leave the layout again."""

_known: WeakKeyDictionary[Task, dict[Hashable, bool]] = WeakKeyDictionary()
"""By task and shapes: whether training in channels_last was seen to work, for a worker's next trials."""


def lay_out(trainer: Trainer, batch: Any, forward: Callable[..., Any]) -> None:
    """Move the weights of convolutions to channels_last where that is faster, and safe for this model's code.

    Faster: on CPUs, in single precision, for convolutions one after another with nothing between them that wants
    images the other way (see ``_SLOWER``). Safe: a training step on ``batch`` runs in both layouts (``x.view`` is
    what breaks most often) and gives the same loss from the same random numbers (masks over images are drawn in the
    order of memory). Only what the step reads decides, never a clock, so that every worker decides alike.

    Raises:
        InvalidInput: ``channels_last=True``, and the model's code can't do with it.
    """
    wanted = trainer.task.channels_last
    model = trainer.model
    on_cpu = trainer.device.type == "cpu"
    if (
        wanted is False
        or (wanted is None and not (on_cpu and trainer.dtype is None and _pays(model)))
        or _chosen(model)
    ):
        return
    hazard = _hazard(model) if on_cpu else None
    if hazard is not None:
        if wanted:
            raise InvalidInput(
                f"channels_last=True, but torch's kernel for the layer {hazard!r} (1 x 1, strided, fewer than 8 "
                "channels) writes beyond its memory in that layout on CPUs. Give it 8 channels, or drop channels_last."
            )
        return
    seen = _known.setdefault(trainer.task, {})
    shapes = tuple((name, p.shape) for name, p in model.named_parameters())
    key = (type(model), shapes, _settings(model))
    # The workers of one trial must look together: layers that see the whole batch speak to each other.
    known = None if trainer.crew is not None else seen.get(key)
    if known is None:
        seen[key] = _works(trainer, batch, forward, must=wanted is True)
    elif known:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _settings(model: nn.Module) -> tuple[bool, ...]:
    """Which numbers of its layers are 0: a dropout of that rate draws nothing, so the layout is all one to it."""
    held = (vars(layer).items() for layer in model.modules())
    return tuple(value != 0 for items in held for _, value in items if type(value) is float)


def _chosen(model: nn.Module) -> bool:
    """Whether the factory has laid the weights out itself."""
    last = torch.channels_last
    images = (p for p in model.parameters() if p.dim() == 4)
    return any(p.is_contiguous(memory_format=last) and not p.is_contiguous() for p in images)


def _pays(model: nn.Module) -> bool:
    layers = list(model.modules())
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    if len(convolutions) < _FEWEST or any(isinstance(layer, _SLOWER) for layer in layers):
        return False
    kernels = {id(layer.weight) for layer in convolutions}
    if any(p.dim() == 4 and id(p) not in kernels for p in model.parameters()):
        return False  # Who knows what they are for.
    return all(_is_plain(layer) for layer in convolutions)


def _is_plain(layer: nn.Conv2d) -> bool:
    """Whether it is a kind of convolution whose kernels were tried."""
    plain = layer.padding_mode == "zeros" and set(layer.dilation) == {1}
    return plain and layer.weight.dtype is torch.float32


def _hazard(model: nn.Module) -> str | None:
    """The name of a layer that must not be in channels_last."""
    from penstock.model import writes_beyond

    name: str
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and writes_beyond(layer.weight.shape, layer.stride, layer.groups):
            return name
    return None


def _works(trainer: Trainer, batch: Any, forward: Callable[..., Any], *, must: bool) -> bool:
    """Leave the model in channels_last if a step works there and gives what it gives now; else as it was."""
    model = trainer.model
    try:
        before = _look(trainer, batch, forward, backward=False)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        after = _look(trainer, batch, forward, backward=True)
    except (RuntimeError, ValueError, TypeError) as error:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        if must:
            raise InvalidInput(
                f"channels_last=True, but a step of the model fails there: {error} Where the model's code calls "
                "view, reshape does the same in any layout."
            ) from error
        return False
    if must or math.isclose(before, after, rel_tol=_CLOSE, abs_tol=_CLOSE):
        return True
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return False


def _look(trainer: Trainer, batch: Any, forward: Callable[..., Any], *, backward: bool) -> float:
    """The loss of a step on ``batch`` that leaves no trace in buffers, gradients and generators."""
    from penstock.train._loop import no_trace

    inputs, targets = copied(batch)
    model = trainer.model
    with no_trace(model, trainer.device):
        with torch.enable_grad(), trainer._autocast():
            loss: Tensor = trainer.task.loss(forward(model, inputs), targets)
        if backward:
            weights = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, weights, allow_unused=True)
        return float(loss.detach())
