"""How long everything that waits and runs will take, as far as a pass can know."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypeAlias, final

from penstock.core import Placement, Plan
from penstock.plan._pack import Allotment
from penstock.predict import Overhead

Runtime: TypeAlias = Callable[[Placement], float | None]
"""The expected seconds of a placement alone on one whole device, or None."""


@final
class Outlook:
    """Runtimes of a plan's waiting and running placements; an unknown one is taken for the median of the known.

    With nothing known at all, everything takes one second: equal runtimes, as in a study's first group.
    """

    __slots__ = ("_default_s", "_runtime", "guessed", "running_s", "waiting_s")

    def __init__(self, plan: Plan, runtime: Runtime | None) -> None:
        self._runtime = runtime
        know = self._known
        if runtime is None:
            waiting = [placement.expected_s for placement in plan.waiting]
        else:
            waiting = [know(placement) for placement in plan.waiting]
        running = [item.remaining_s for item in plan.running]
        placed = [know(placement) for placement in plan.placed]
        self._default_s = 1.0
        self.guessed = None in waiting or None in running  # whether something is not known at all
        if None in waiting or None in running or None in placed:
            known = [value for value in (*waiting, *placed) if value is not None]
            known = known or [value for value in running if value is not None]
            self._default_s = max(0.0, median(known)) if known else 1.0
        default_s = self._default_s
        self.waiting_s = [default_s if v is None else v if v > 0 else 0.0 for v in waiting]
        self.running_s = [default_s if v is None else v if v > 0 else 0.0 for v in running]

    def _known(self, placement: Placement) -> float | None:
        return placement.expected_s if self._runtime is None else self._runtime(placement)

    def expected_s(self, placement: Placement) -> float:
        """What a placement takes alone on one device."""
        value = self._known(placement)
        return self._default_s if value is None else max(0.0, value)

    @staticmethod
    def devices(plan: Plan) -> int:
        """How many devices there are, busy ones included."""
        names = {item.device.id for item in plan.free}
        names.update([share.device for running in plan.running for share in running.placement.shares])
        names.update([share.device for running in plan.running for share in running.leaving])
        return max(1, len(names))

    @staticmethod
    def is_stream(plan: Plan) -> bool:
        """Whether trials come in more than one group at a time: then more will come before these have ended."""
        times = {placement.since_s for placement in plan.waiting}
        times.update(item.placement.since_s for item in plan.running)
        return len(times) > 1

    @staticmethod
    def tenants(plan: Plan) -> dict[str, int]:
        """How many placements each busy device has."""
        counts: dict[str, int] = {}
        for running in plan.running:
            for share in running.placement.shares:
                counts[share.device] = counts.get(share.device, 0) + 1
        for placement in plan.placed:
            for share in placement.shares:
                counts[share.device] = counts.get(share.device, 0) + 1
        return counts

    def horizon_s(self, allotment: Allotment, devices: int) -> float:
        """The least time into which all of it fits."""
        return allotment.horizon_s([*self.waiting_s, *self.running_s], devices)

    def ready_s(self, plan: Plan, overhead: Overhead) -> list[list[float]]:
        """Per device, when each of its c places is free, if widths stay as they are."""
        places = overhead.max_sharing
        found: dict[str, list[float]] = {item.device.id: [0.0] * places for item in plan.free}
        tenants = self.tenants(plan)
        for running, left_s in zip(plan.running, self.running_s, strict=True):
            shares = running.placement.shares
            if not shares:
                continue  # it pauses soon
            crowd = tenants[shares[0].device]
            speed = overhead.speed(len(shares)) if crowd == 1 else overhead.speed(1 / crowd)
            end_s = left_s / speed
            for share in shares:
                slots = found.setdefault(share.device, [0.0] * places)
                held = max(1, round(share.fraction * places))
                free = [i for i, ready in enumerate(slots) if ready == 0.0]
                for i in free[:held]:
                    slots[i] = end_s
        return list(found.values())
