"""Shelves: rectangles of width (devices) and height (seconds) onto devices, and when each one would run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from penstock.core.errors import InvalidInput

_EPSILON = 1e-9


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Which trials run on which devices, in which order.

    Attributes:
        devices: Per trial, the numbers of its devices; one for a trial that shares it.
        widths: Per trial, how many devices it has, or which part of one.
        queues: Per device, its trials in the order they begin on it.
        height_s: When the last one ends if all widths are as planned: a bound for the makespan.
    """

    devices: tuple[tuple[int, ...], ...]
    widths: tuple[float, ...]
    queues: tuple[tuple[int, ...], ...]
    height_s: float


def order(widths: Sequence[float], heights_s: Sequence[float]) -> list[int]:
    """Trials in non-increasing order of resources, the longest first among equals (Fluid 4.2.1)."""
    return sorted(range(len(widths)), key=lambda i: (-widths[i], -heights_s[i], i))


def shelve(widths: Sequence[float], heights_s: Sequence[float], *, devices: int) -> Layout:
    """Lay out trials on devices: each where its predecessors end first; what does not fit at once queues.

    A trial of a whole width takes that many devices together. Trials of fractions are dealt out to the device
    with the least work so far, and share it as far as their fractions add up to one device.

    Args:
        widths: A whole number of devices, or a fraction of one, per trial.
        heights_s: The time each takes at its width.
        devices: How many there are.
    """
    load: list[tuple[float, int]] = [(0.0, device) for device in range(devices)]
    queues: list[list[int]] = [[] for _ in range(devices)]
    chosen: list[tuple[int, ...]] = [()] * len(widths)
    ceiling = 0.0
    for trial in order(widths, heights_s):
        width, height = widths[trial], heights_s[trial]
        if width > devices or (width >= 1 and width != int(width)) or width <= 0:
            raise InvalidInput(
                f"A width is {width!r}; give a fraction or a whole number up to {devices} devices."
            )
        if width < 1:
            busy_s, device = load[0]
            # As a rectangle of its width: on a device that is full it adds width * height of height.
            heapq.heapreplace(load, (busy_s + width * height, device))
            ceiling = max(ceiling, busy_s + height)
            chosen[trial] = (device,)
        else:
            taken = [heapq.heappop(load) for _ in range(int(width))]
            end = taken[-1][0] + height
            for _, device in taken:
                heapq.heappush(load, (end, device))
            chosen[trial] = tuple(sorted(device for _, device in taken))
            ceiling = max(ceiling, end)
        for device in chosen[trial]:
            queues[device].append(trial)
    ceiling = max(ceiling, max((busy_s for busy_s, _ in load), default=0.0))
    return Layout(tuple(chosen), tuple(widths), tuple(map(tuple, queues)), ceiling)


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """When each trial of a layout begins and ends."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """When the last one ends."""
        return max(self.ends_s, default=0.0)


def run_through(
    layout: Layout,
    runtimes_s: Sequence[float],
    *,
    slowdown: Callable[[int], float],
    speed: Callable[[float], float],
) -> Timeline:
    """Play a layout through: a trial on a shared device slows down with the number that really share it.

    Args:
        layout: Who runs where, in which order.
        runtimes_s: Each trial's time alone on one device.
        slowdown: By the number of trials on a device, how many times longer each takes.
        speed: By a whole width, how many times faster than on one device.
    """
    count = len(runtimes_s)
    left = [float(runtime) for runtime in runtimes_s]  # work, in seconds alone on one device
    starts, ends = [-1.0] * count, [-1.0] * count
    position = [0] * len(layout.queues)
    tenants: list[list[int]] = [[] for _ in layout.queues]
    filled = [0.0] * len(layout.queues)
    rate, since = [0.0] * count, [0.0] * count
    version = [0] * count
    events: list[tuple[float, int, int]] = []

    def pace(trial: int, now: float) -> None:
        left[trial] = max(0.0, left[trial] - rate[trial] * (now - since[trial]))
        since[trial] = now
        if layout.widths[trial] >= 1:
            rate[trial] = speed(layout.widths[trial])
        else:
            rate[trial] = 1.0 / slowdown(len(tenants[layout.devices[trial][0]]))
        version[trial] += 1
        heapq.heappush(events, (now + left[trial] / rate[trial], trial, version[trial]))

    def admit(devices: Sequence[int], now: float) -> None:
        changed: set[int] = set()
        pending = list(devices)
        while pending:
            device = pending.pop()
            queue = layout.queues[device]
            while position[device] < len(queue):
                trial = queue[position[device]]
                mine, part = layout.devices[trial], min(1.0, layout.widths[trial])
                ready = all(
                    position[d] < len(layout.queues[d])
                    and layout.queues[d][position[d]] == trial
                    and filled[d] + part <= 1 + _EPSILON
                    for d in mine
                )
                if not ready:
                    break
                starts[trial] = since[trial] = now
                for d in mine:
                    position[d] += 1
                    filled[d] += part
                    tenants[d].append(trial)
                    changed.update(tenants[d])
                pending.extend(d for d in mine if d != device)
        for trial in sorted(changed):
            pace(trial, now)

    admit(range(len(layout.queues)), 0.0)
    while events:
        now, trial, stamp = heapq.heappop(events)
        if stamp != version[trial] or ends[trial] >= 0:
            continue
        ends[trial] = now
        mine = layout.devices[trial]
        for device in mine:
            tenants[device].remove(trial)
            filled[device] -= min(1.0, layout.widths[trial])
        for other in sorted({t for device in mine for t in tenants[device]}):
            pace(other, now)
        admit(mine, now)
    return Timeline(tuple(starts), tuple(ends))
