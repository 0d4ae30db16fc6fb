"""How fast weights before a norm get longer: corrected in a narrow twin, so that its steps turn them as they should.

A batch or layer norm takes no notice of how long the weights before it are, so gradients stand at right angles to
them, and every step makes them longer; the longer they are, the less a step turns them. A twin with a fraction n of the
inputs steps 1/n times as far in each weight: as far as the model in what all gradients have in common, but with 1/n
times the squared length. Its high rates would lower themselves 1/n times as fast as the model's. So of what a step adds
to the squared length, a share n stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor


def squared(rows: Tensor) -> Tensor:
    """The squared length of each row."""
    return rows.square().sum(-1, keepdim=True)


def shortening(before: Tensor, after: Tensor, share: float) -> Tensor:
    """What to multiply weights by whose squared length was ``before`` and is ``after``, so that a share is added."""
    return torch.where(after > 0, ((1 - share) * before + share * after) / after, 1.0).sqrt()


@final
class Growth:
    """Hooks of an optimizer whose groups may have a ``growth``: the share of the added squared length that stays.

    Decoupled decay is no growth: it shortens weights as it does in the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._before: list[tuple[Tensor, Tensor, float]] = []
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note how long the weights are."""
        self._before = []
        for group in optimizer.param_groups:
            share = group.get("growth", 1.0)
            if share == 1:
                continue
            kept = 1.0
            if group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
                kept = 1.0 - float(group["lr"]) * float(group["weight_decay"])
            for p in group["params"]:
                if p.grad is not None:
                    self._before.append((p, squared(p.reshape(1, -1)) * kept**2, share))

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shorten them."""
        for p, length, share in self._before:
            p.mul_(shortening(length, squared(p.reshape(1, -1)), share).reshape(()))
        self._before = []


def only_growth(hooks: Sequence[Any]) -> bool:
    """Whether these hooks of an optimizer are no others than a ``Growth``'s."""
    return all(isinstance(getattr(hook, "__self__", None), Growth) for hook in hooks)


__all__ = ["Growth", "only_growth", "shortening", "squared"]
