"""How long everything that waits and runs will take, as far as a pass can know."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypeAlias, final

from penstock.core import Placement, Plan
from penstock.plan._pack import Allotment

Runtime: TypeAlias = Callable[[Placement], float | None]
"""The expected seconds of a placement alone on one whole device, or None."""


@final
class Outlook:
    """Runtimes of a plan's waiting and running placements; an unknown one is taken for the median of the known.

    With nothing known at all, everything takes one second: equal runtimes, as in a study's first group.
    """

    __slots__ = ("_default_s", "_runtime", "running_s", "waiting_s")

    def __init__(self, plan: Plan, runtime: Runtime | None) -> None:
        self._runtime = runtime
        waiting = [self._known(placement) for placement in plan.waiting]
        running = [item.remaining_s for item in plan.running]
        placed = [self._known(placement) for placement in plan.placed]
        known = [value for value in (*waiting, *placed) if value is not None]
        if len(known) < len(waiting) + len(placed) or None in running:
            if not known:
                known = [value for value in running if value is not None]
            self._default_s = median(known) if known else 1.0
        else:
            self._default_s = 1.0
        default_s = self._default_s
        self.waiting_s = [default_s if value is None else max(0.0, value) for value in waiting]
        self.running_s = [default_s if value is None else max(0.0, value) for value in running]

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
        for running in plan.running:
            for share in running.placement.shares:
                names.add(share.device)
        return max(1, len(names))

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
