"""Devices that a study has for a while: bubbles that are lent to it, and devices that leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, final

from penstock.core import Device, Placement, Plan, PlanPass, Reported, Segment, StudyState
from penstock.execute import Executor, Local
from penstock.plan import FusedGroup, FusionChoice, Lent, Rates, Regroup, beside, merges, recall, splits
from penstock.study import _fusing
from penstock.study._fusing import Fuser

Rule: TypeAlias = Callable[[Sequence[FusedGroup], Sequence[Device]], Sequence[Regroup]]
"""Which members of running groups go on where, from the groups and the idle devices."""


def lent_by(executor: Executor) -> Callable[[], Mapping[str, Lent]] | None:
    """What tells the bubbles that an executor has now; None: it has none."""
    return executor.lent if isinstance(executor, Local) and executor.has_bubbles else None


def with_bubbles(passes: Iterable[PlanPass], executor: Executor, fuser: Fuser | None) -> tuple[PlanPass, ...]:
    """The planner's passes, with the bubbles that the executor has."""
    lent = lent_by(executor)
    if lent is None:
        return tuple(passes)

    def choice(segment: Segment) -> FusionChoice | None:
        found = None if fuser is None else fuser.key(segment)
        return None if found is None or fuser is None else fuser.choice(found)

    return beside(passes, lent, choice=choice)


@final
class Paces:
    """How fast a study's epochs are on each kind of device, learned as they come (Hydro 5.2).

    Its pass gives the fastest kind that is free first; kinds that were never tried come before all, and devices of one
    kind stay as they are.
    """

    def __init__(self) -> None:
        self._rates = Rates(least=1)
        self._kinds: dict[str, str] = {}
        self._several = False

    def hear(self, event: Reported, state: StudyState) -> None:
        """Learn from an epoch of a trial that had one whole device."""
        if not self._several or not event.train_s:
            return
        shares = state.trials[event.trial].shares
        if len(shares) == 1 and shares[0].fraction >= 1.0 and shares[0].device in self._kinds:
            kind = self._kinds[shares[0].device]
            self._rates.tell("epoch", kind, iterations=1.0, seconds=event.train_s)

    def __call__(self, plan: Plan) -> Plan:
        """The pass."""
        for item in plan.free:
            self._kinds[item.device.id] = item.device.kind
        kinds = {item.device.kind for item in plan.free}
        self._several = self._several or len(set(self._kinds.values())) > 1
        if len(kinds) < 2:
            return plan
        speeds = {}
        for kind in kinds:
            known = self._rates.known("epoch", kind)
            speeds[kind] = math.inf if known is None else known.per_s
        free = tuple(sorted(plan.free, key=lambda item: -speeds[item.device.kind]))
        # Of those who start now, the longest on the fastest.
        now = sum(item.fraction >= 1.0 for item in free)
        first = sorted(plan.waiting[:now], key=_length, reverse=True)
        return replace(plan, free=free, waiting=(*first, *plan.waiting[now:]))


def _length(placement: Placement) -> float:
    """Epochs; without a budget, more than any."""
    lengths = [math.inf if s.until is None else float(s.until - s.start) for s in placement.segments]
    return max(lengths)


def leaving_of(executor: Executor) -> frozenset[str]:
    """Devices that the executor is to give up."""
    return executor.leaving() if isinstance(executor, Local) else frozenset()


def rule_of(executor: Executor) -> Rule:
    """Merges groups whose devices leave, else splits onto idle devices (Hydro 5.3).

    With bubbles, first of all trials leave them for idle exclusive devices (``recall``).
    """
    lent = lent_by(executor)

    def rule(groups: Sequence[FusedGroup], idle: Sequence[Device]) -> Sequence[Regroup]:
        leaving = leaving_of(executor)
        if leaving:
            return merges(groups, leaving)
        now = {} if lent is None else lent()
        if now:
            there = [group for group in groups if group.device.id in now]
            own = [device for device in idle if device.id not in now]
            orders = recall(there, own, now, count=_fusing.UNMEASURED, cost_s=_fusing.SPLIT_S)
            if orders:
                return orders
        return splits(groups, idle, cost_s=_fusing.SPLIT_S)

    return rule
