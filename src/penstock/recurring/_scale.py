"""The learning rate that goes with another batch size."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from penstock.core.errors import InvalidInput

LrScaling: TypeAlias = Literal["sqrt", "linear", "off"]


def scaled_lr(lr: float, batch_size: int, default: int, rule: LrScaling) -> float:
    """The learning rate for ``batch_size``, given the one for ``default``.

    Args:
        lr: The learning rate tuned for the default batch size.
        batch_size: The batch size to run with.
        default: The default batch size.
        rule: ``"sqrt"`` for adaptive optimisers such as Adam (Zeus section 6.1), ``"linear"`` for SGD, ``"off"``.
    """
    ratio = batch_size / default
    if rule == "sqrt":
        return lr * math.sqrt(ratio)
    if rule == "linear":
        return lr * ratio
    if rule == "off":
        return lr
    raise InvalidInput(f'scale_lr must be "sqrt", "linear" or "off", got {rule!r}.')
