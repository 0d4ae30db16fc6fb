"""StaticFluid: devices in proportion to each trial's runtime, between 1/c and d of them (Fluid, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core.check import is_real
from penstock.core.errors import InvalidInput

_TOLERANCE = 1e-9  # a share of 2.9999999996 devices is 3


def waterfill_widths(
    runtimes: Sequence[float], *, devices: int, max_sharing: int = 1, max_devices: int | None = None
) -> list[float]:
    """How many devices each trial of a group gets (Fluid, Algorithm 1, line 4).

    A trial's share of the devices is its share of the group's work, rounded down to whole devices; less than
    one device becomes ``1 / max_sharing`` of one, and nobody gets more than ``max_devices``. The whole
    widths never add up to more than ``devices``; what is left holds the fractions, the longest first, and
    what does not fit waits.

    Example:
        >>> waterfill_widths([4, 4, 12, 30], devices=5, max_sharing=2, max_devices=4)
        [0.5, 0.5, 1.0, 3.0]

    Args:
        runtimes: What each trial would take alone on one device, in any unit of time. All zero: as if equal.
        devices: n, how many interchangeable devices there are.
        max_sharing: c, the most trials that may share a device.
        max_devices: d, the most devices of one trial; None: all.

    Returns:
        The widths, in the order of ``runtimes``.

    Raises:
        InvalidInput: A runtime is negative or not finite, or a count is below 1.
    """
    limit = devices if max_devices is None else max_devices
    for name, count in (("devices", devices), ("max_sharing", max_sharing), ("max_devices", limit)):
        if not is_real(count) or not math.isfinite(count) or int(count) != count or count < 1:
            raise InvalidInput(f"{name} is {count!r}; give a whole number of at least 1.")
    works_s: list[float] = []  # as Python's floats: those of an array have integers that overflow
    try:
        for runtime in runtimes:
            if not (math.isfinite(runtime) and runtime >= 0):
                raise InvalidInput(f"A runtime is {runtime!r}; give finite seconds of at least 0.")
            works_s.append(float(runtime))
    except TypeError as error:
        raise InvalidInput(
            f"runtimes is {runtimes!r}; give seconds of each trial, such as [4, 12]."
        ) from error
    total = math.fsum(works_s)
    if total <= 0:
        works_s, total = [1.0] * len(works_s), float(len(works_s))
    widths = []
    for work_s in works_s:
        whole = math.floor(work_s * devices / total + _TOLERANCE)
        widths.append(float(min(whole, limit)) if whole >= 1 else 1.0 / max_sharing)
    return widths
