"""A checkpoint that goes on under another configuration (PBT): what stays as trained, and what that one decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_RATES = ("lr", "_last_lr")
_PLACES = ("last_epoch", "_step_count")


def carried(saved: Any, old: Any, new: Any, *, pace: float = 1.0, name: str = "") -> Any:
    """A state as it was saved under an old configuration, made one of a new configuration.

    Where the two fresh states differ the new configuration decides; all else is as training has left it. A learning
    rate that a schedule has changed since stays so in proportion.

    Args:
        saved: The state of an optimizer's groups or of a schedule.
        old: The same before the first step, under the configuration that it was trained with.
        new: The same before the first step, under the one that it goes on with.
        pace: Steps of the new one in the time of a step of the old, for a schedule that counts them.
        name: What it is called.
    """
    if all(isinstance(each, Mapping) for each in (saved, old, new)):
        made = {
            key: carried(saved[key], old[key], new[key], pace=pace, name=key)
            if key in saved and key in old
            else new[key]
            for key in new
        }
        return {**{key: saved[key] for key in saved if key not in old}, **made}
    if all(isinstance(each, list | tuple) for each in (saved, old, new)) and len(saved) == len(old) == len(
        new
    ):
        parts = zip(saved, old, new, strict=True)
        return type(new)([carried(*part, pace=pace, name=name) for part in parts])
    if name in _PLACES and pace != 1.0:
        return round(saved * pace)
    if alike(old, new):
        return saved
    if name not in _RATES or alike(saved, old) or not float(old):
        return new
    value = float(saved) * float(new) / float(old)
    return new.new_full(new.shape, value) if isinstance(new, Tensor) else value


def fits(old: Any, new: Any) -> bool:
    """Whether what an optimizer keeps for each parameter under one configuration is of use under the other.

    Flags (``amsgrad``), and numbers that are 0 under one of the two, decide what it keeps at all.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(fits(old[key], new[key]) for key in old)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return len(old) == len(new) and all(map(fits, old, new))
    if alike(old, new):
        return True
    numbers = (int, float, Tensor)
    plain = all(isinstance(each, numbers) and not isinstance(each, bool) for each in (old, new))
    return plain and bool(old) == bool(new)


def alike(one: Any, other: Any) -> bool:
    """Whether two values of a state are the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)
