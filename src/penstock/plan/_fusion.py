"""Adaptive fusion (Hydro 4.3): which trials train as one, and how many at most, by measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.core.errors import InvalidInput
from penstock.core.group import Segment
from penstock.core.plan import Placement, Plan, PlanPass

FusionKey: TypeAlias = Callable[[Segment], Hashable | None]
"""What fused segments must agree on; None: the segment is never fused."""


@dataclass(frozen=True, slots=True)
class FusionProfile:
    """What a step of ``count`` fused members was measured to take.

    Attributes:
        count: Members; 1 is the plain, unfused training.
        step_s: Seconds of one step of all of them.
        memory_bytes: What it needs on the device.
    """

    count: int
    step_s: float
    memory_bytes: int

    @property
    def throughput(self) -> float:
        """Members' steps per second."""
        return self.count / self.step_s


@dataclass(frozen=True, slots=True)
class FusionChoice:
    """The fusion count of a kind of trials, and why.

    Attributes:
        count: The most members of a group; 1: don't fuse.
        limit: The most that memory allows.
        profiles: What was measured, by rising count.
        reason: One line, for people.
    """

    count: int
    limit: int
    profiles: tuple[FusionProfile, ...]
    reason: str

    @property
    def gain(self) -> float:
        """Throughput at ``count`` over one after another."""
        by_count = {profile.count: profile for profile in self.profiles}
        return by_count[self.count].throughput / by_count[1].throughput if self.count in by_count else 1.0

    def to_json(self) -> dict[str, Any]:
        """JSON-able values for the journal."""
        return {
            "count": self.count,
            "limit": self.limit,
            "reason": self.reason,
            "profiles": [[p.count, p.step_s, p.memory_bytes] for p in self.profiles],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FusionChoice:
        """The choice of a journal's note."""
        profiles = tuple(FusionProfile(int(c), float(s), int(b)) for c, s, b in data.get("profiles", ()))
        count = int(data["count"])
        return cls(count, int(data.get("limit", count)), profiles, str(data.get("reason", "")))

    def step_s(self, count: int) -> float:
        """Seconds of a step of ``count`` members, between the measured counts on a straight line."""
        below = max((p for p in self.profiles if p.count <= count), key=lambda p: p.count)
        above = min(
            (p for p in self.profiles if p.count >= count), key=lambda p: p.count, default=self.profiles[-1]
        )
        if above.count <= below.count:
            return below.step_s * count / below.count
        part = (count - below.count) / (above.count - below.count)
        return below.step_s + part * (above.step_s - below.step_s)

    def memory_bytes(self, count: int) -> int | None:
        """What ``count`` members need, by the line through the smallest two profiles; None with only one."""
        if len(self.profiles) < 2 or self.profiles[0].count == self.profiles[1].count:
            return self.profiles[0].memory_bytes if count == 1 and self.profiles else None
        base, each = _line(self.profiles[0], self.profiles[1])
        return math.ceil(base + each * count)


def _line(one: FusionProfile, two: FusionProfile) -> tuple[float, float]:
    """Memory as a + b * count: activations and weights grow with the members, data and program don't."""
    each = max(0.0, (two.memory_bytes - one.memory_bytes) / (two.count - one.count))
    return one.memory_bytes - each * one.count, each


def fusion_limit(one: FusionProfile, two: FusionProfile, available_bytes: int) -> int:
    """The most members that fit (Hydro 4.3, step 3): the line through the profiles of F=1 and F=2.

    Returns:
        At least 1: a trial that does not fit alone is not fusion's concern.

    Raises:
        InvalidInput: The profiles are not of two different counts, or there is no memory.
    """
    if one.count >= two.count:
        raise InvalidInput(f"Profiles of rising counts are needed, got {one.count} and {two.count}.")
    if available_bytes <= 0:
        raise InvalidInput(f"available_bytes must be above 0, got {available_bytes}.")
    base, each = _line(one, two)
    if each == 0.0:
        return 2**31
    return max(1, math.floor((available_bytes - base) / each))


_NEAR = 0.95
_FEW = 8
_SURE = 1.5
"""A gain below this is measured again: single steps were seen to differ by a third from one moment to the next."""


def choose_count(
    measure: Callable[[int], tuple[float, int] | None],
    trials: int,
    *,
    available_bytes: int | None = None,
    least_gain: float = 1.05,
    worth: Callable[[float], bool] | None = None,
) -> FusionChoice:
    """The smallest fusion count among 1, 2, 4, 8, ... whose measured throughput is the best, or hardly below it.

    Of counts that train about as fast the smallest is taken: its results are there sooner, and fewer members share
    what befalls one of them.

    More is not always better: on CPUs wide fused convolutions fall out of the caches. The search stops when twice in
    a row a doubling has hardly helped (beyond eight members once, for there the steps are long to measure and the calls
    cost little any more), at the memory's limit, and at the number of trials. Two fused members may well be slower than
    two alone where eight are faster (small layers, whose cost is the call): each count is therefore compared with the
    one before, and the best of all counts.

    Args:
        measure: ``measure(count)`` gives seconds per step and bytes; None if ``count`` members can't be fused.
        trials: How many trials of the kind there are.
        available_bytes: The device's free memory; None: unlimited.
        least_gain: Fusing must be this much better than not fusing, or it is not worth its risk.
        worth: Asked before each further count with the best throughput so far: whether enough work is left to repay
            measuring it. None: always.
    """
    if trials < 1:
        raise InvalidInput(f"There must be at least 1 trial, got {trials}.")
    first = measure(1)
    if first is None:
        raise InvalidInput("measure(1) must measure the unfused training, got None.")
    profiles = [FusionProfile(1, *first)]
    best = profiles[0]
    limit = trials if available_bytes is None else min(trials, 2**31)
    reason = "there is no other trial to fuse with" if trials == 1 else ""
    count, worse = 2, 0
    while count <= min(limit, trials) and worse < 2:
        if worth is not None and not worth(best.throughput):
            break
        found = measure(count)
        if found is None:
            reason = "" if best.count > 1 else f"{count} members can't be fused"
            break
        profile = FusionProfile(count, *found)
        profiles.append(profile)
        if len(profiles) == 2 and available_bytes is not None:
            limit = min(trials, fusion_limit(profiles[0], profile, available_bytes))
            if limit < 2:
                reason = "two members don't fit the memory"
                break
        helped = _NEAR * profile.throughput > profiles[-2].throughput
        worse = 0 if helped else worse + (2 if count > _FEW else 1)
        if profile.throughput > best.throughput:
            best = profile
        if count == min(limit, trials):
            break
        count = min(2 * count, limit, trials)
    best = next(profile for profile in profiles if profile.throughput >= _NEAR * best.throughput)
    if best.count > 1 and best.throughput < _SURE * profiles[0].throughput:
        best = _again(measure, profiles, best)
    if best.count > 1 and best.throughput < least_gain * profiles[0].throughput:
        best = profiles[0]
        reason = "fusing gains less than it is worth"
    if not reason:
        gain = best.throughput / profiles[0].throughput
        reason = (
            f"{best.count} members train {gain:.2f} times as fast as one after another"
            if best.count > 1
            else "no count is faster than one after another"
        )
    return FusionChoice(best.count, max(1, limit), tuple(profiles), reason)


def _again(
    measure: Callable[[int], tuple[float, int] | None], profiles: list[FusionProfile], best: FusionProfile
) -> FusionProfile:
    """``best``, after it and the unfused step were measured once more; of two looks at each the faster one counts.

    They were measured at different moments, the unfused step first of all and cold: a neighbour's burst of work, or
    what is made once, must not look like a gain.
    """
    for count in (1, best.count):
        found = measure(count)
        at = next(i for i, profile in enumerate(profiles) if profile.count == count)
        if found is not None and found[0] < profiles[at].step_s:
            profiles[at] = FusionProfile(count, found[0], max(found[1], profiles[at].memory_bytes))
    return next(profile for profile in profiles if profile.count == best.count)


def must_agree(segment: Segment, *, structural: Sequence[str] = (), batch_size: int = 0) -> Hashable | None:
    """What segments must agree on to be fused: shapes, batch size, optimizer, epochs.

    Args:
        segment: The segment.
        structural: Names of the space that change the network's shapes.
        batch_size: That of configurations without one.

    Returns:
        None for segments that explore instead of training: their steps are not alike.
    """
    if segment.options.get("mode") == "explore" or segment.options.get("explorations"):
        return None
    config = segment.trial.config
    shapes = tuple((name, _hashable(config.get(name))) for name in sorted(structural))
    length = None if segment.until is None else segment.until - segment.start
    return (shapes, config.get("batch_size", batch_size), config.get("optimizer"), length)


def _hashable(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)


def share_devices(weights: Sequence[float], devices: int) -> list[int]:
    """Devices for each group in proportion to its weight B x N (Hydro 4.3, step 4), by largest remainder.

    While there are enough, every group gets at least one; where there are fewer, the heaviest get one each.
    """
    if any(not weight > 0 for weight in weights):
        raise InvalidInput(f"Weights must be above 0, got {list(weights)}.")
    groups = len(weights)
    if devices <= groups:
        heaviest = sorted(range(groups), key=lambda i: -weights[i])[: max(0, devices)]
        return [1 if i in set(heaviest) else 0 for i in range(groups)]
    total = math.fsum(weights)
    spare = devices - groups
    quotas = [spare * weight / total for weight in weights]
    shares = [1 + math.floor(quota) for quota in quotas]
    order = sorted(range(groups), key=lambda i: (-(quotas[i] - math.floor(quotas[i])), i))
    for i in order[: devices - sum(shares)]:
        shares[i] += 1
    return shares


def fused_sizes(trials: int, count: int, devices: int = 1) -> list[int]:
    """Sizes of the fused groups of ``trials`` trials: none above ``count``, as even as can be, all devices in use.

    Hydro 4.3, step 5: one fused group per device where that suffices, further ones in whole rounds of devices.
    """
    if trials < 1 or count < 1:
        raise InvalidInput(f"There must be trials and a count of at least 1, got {trials} and {count}.")
    least = math.ceil(trials / count)
    width = max(1, min(devices, trials))
    parts = min(trials, math.ceil(least / width) * width)
    return [trials // parts + (1 if i < trials % parts else 0) for i in range(parts)]


def fusion(
    key: FusionKey,
    choices: Mapping[Hashable, FusionChoice],
    *,
    batch_size: Callable[[Segment], int] = lambda segment: 1,
    unmeasured: int = 1,
) -> PlanPass:
    """The pass that merges waiting placements into fused ones.

    Put it before the pass that hands out devices, and ``apart`` behind that. Placements of equal attempts are merged:
    what was lost once is tried again in groups (whoever counts losses has halved the choice by then), what was lost
    or has failed twice alone, so that it can't take others down for ever.

    Args:
        key: What must agree, e.g. ``must_agree``.
        choices: The fusion count by key.
        batch_size: A segment's batch size, for the groups' weights B x N.
        unmeasured: The count for keys without a choice, whose workers then measure; 1: they wait for nobody.
    """

    def count_of(found: Hashable) -> int:
        choice = choices.get(found)
        return unmeasured if choice is None else choice.count

    def merge(plan: Plan) -> Plan:
        kinds: dict[tuple[Hashable, int], list[int]] = {}
        for at, placement in enumerate(plan.waiting):
            if (
                len(placement.segments) != 1
                or placement.exclusive
                or placement.attempt > 1
                or placement.shares
            ):
                continue
            found = key(placement.segments[0])
            if found is not None and count_of(found) > 1:
                kinds.setdefault((found, placement.attempt), []).append(at)
        alike = {kind: places for kind, places in kinds.items() if len(places) > 1}
        if not alike:
            return plan
        whole = sum(1 for free in plan.free if free.fraction >= 1.0)
        weights = [
            float(len(places) * max(1, batch_size(plan.waiting[places[0]].segments[0])))
            for places in alike.values()
        ]
        devices = share_devices(weights, whole)
        merged: dict[int, Placement] = {}
        gone: set[int] = set()
        for ((found, _), places), share in zip(alike.items(), devices, strict=True):
            low = 0
            for size in fused_sizes(len(places), count_of(found), max(1, share)):
                part = places[low : low + size]
                low += size
                if size > 1:
                    merged[part[0]] = _fused([plan.waiting[i] for i in part], choices.get(found))
                    gone.update(part[1:])
        waiting = tuple(merged.get(i, placement) for i, placement in enumerate(plan.waiting) if i not in gone)
        return replace(plan, waiting=waiting)

    return merge


def apart(plan: Plan) -> Plan:
    """The pass that takes fused placements apart again for which there was no device: next time more may wait."""
    if all(len(placement.segments) == 1 for placement in plan.waiting):
        return plan
    waiting: list[Placement] = []
    for placement in plan.waiting:
        if len(placement.segments) == 1:
            waiting.append(placement)
            continue
        for segment in placement.segments:
            waiting.append(
                Placement(
                    (segment,),
                    attempt=placement.attempt,
                    since_s=placement.since_s,
                    promoted=placement.promoted,
                )
            )
    return replace(plan, waiting=tuple(waiting))


def _fused(placements: Sequence[Placement], choice: FusionChoice | None) -> Placement:
    """Several placements as one."""
    count = len(placements)
    times = [p.expected_s for p in placements if p.expected_s is not None]
    expected_s = None
    if len(times) == count and choice is not None and choice.profiles:
        expected_s = max(times) * choice.step_s(count) / choice.profiles[0].step_s
    return Placement(
        segments=tuple(segment for p in placements for segment in p.segments),
        attempt=placements[0].attempt,
        expected_s=expected_s,
        expected_error=max(p.expected_error for p in placements),
        memory_bytes=None if choice is None else choice.memory_bytes(count),
        since_s=min(p.since_s for p in placements),
        promoted=all(p.promoted for p in placements),
    )
