"""DynamicFluid: widths that change while trials run, when it pays (Fluid, Algorithm 2; Hydro, section 5.3)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from penstock.core import Device, Placement, Plan, PlanPass, Resize, Share
from penstock.plan._board import EPSILON, Board, width_of
from penstock.plan._finalists import finalists, make_room
from penstock.plan._outlook import Outlook, Runtime
from penstock.plan._pack import Allotment
from penstock.plan._rollout import epoch_s
from penstock.plan._waterfill import waterfill_widths
from penstock.predict import Overhead

Idle: TypeAlias = Literal["longest", "waterfill", "best", "even"]
"""Who gets idle devices.

``"longest"``: the trial that would end last, one device after the other. ``"waterfill"``: each as Fluid's Algorithm 2
says. ``"best"`` and ``"even"`` are Hydro's: the trial that performs best, or all evenly.
"""

_ROUNDS = 6  # how often idle devices are dealt out anew because some did not pay


def dynamic_widths(
    remaining_s: Sequence[float], widths: Sequence[float], *, devices: int, overhead: Overhead
) -> list[float]:
    """New widths of running trials by DynamicFluid (Fluid, Algorithm 2), the old one where a change does not pay.

    Args:
        remaining_s: What each would still take alone on one device.
        widths: What each has now.
        devices: n, all devices.
        overhead: The runtime model, c, d and the cost epsilon of a change.
    """
    wanted = waterfill_widths(
        remaining_s, devices=devices, max_sharing=overhead.max_sharing, max_devices=overhead.max_devices
    )
    return [
        new if pays(left_s, old, new, overhead) else old
        for left_s, old, new in zip(remaining_s, widths, wanted, strict=True)
    ]


def pays(remaining_s: float, old: float, new: float, overhead: Overhead) -> bool:
    """Whether a trial should go from ``old`` to ``new`` devices, epsilon included (Algorithm 2, lines 5 and 7).

    More devices: when it ends sooner. Fewer: when it takes less device time.
    """
    now_s, then_s = overhead.runtime_s(remaining_s, old), overhead.runtime_s(remaining_s, new)
    if new > old:
        return then_s + overhead.epsilon_s < now_s
    return new < old and new * (then_s + overhead.epsilon_s) < old * now_s


@final
@dataclass(slots=True)
class _Candidate:
    """A trial that may get more devices."""

    index: int
    placement: Placement
    left_s: float
    speed: float  # what it runs at now
    held: int  # whole devices it has
    limit: int  # whole devices it may have
    rank: int
    running: bool
    wants: int = 0  # further whole devices, in the end
    epoch_s: float | None = None  # work left of its epoch, at whose end it changes; None: unknown

    def ends_s(self, overhead: Overhead) -> float:
        """When it would end with what it wants."""
        if self.wants == 0:
            return self.left_s / self.speed
        width = self.held + self.wants
        if self.epoch_s is None:
            return overhead.runtime_s(self.left_s, width)
        changed_s = self.epoch_s / self.speed + overhead.epsilon_s
        return changed_s + overhead.runtime_s(self.left_s - self.epoch_s, width)

    def pays(self, overhead: Overhead) -> bool:
        """Whether what it wants makes it end sooner, the cost of the change included (Algorithm 2, line 5)."""
        cost_s = overhead.epsilon_s if self.running and self.epoch_s is None else 0.0
        return self.ends_s(overhead) + cost_s < self.left_s / self.speed * (1 - EPSILON)


def elastic(
    overhead: Overhead,
    *,
    runtime: Runtime | None = None,
    idle: Idle = "longest",
    by_epochs: bool = False,
    lead: bool = False,
) -> PlanPass:
    """A pass that changes the widths of running placements.

    While something waits that found no room, trials that have more devices than they need to end in time with
    the others are asked to give some up. When nothing waits, idle devices go to running (and just placed) trials:
    to the one that would end last, again and again, or by Hydro's rules to the best or evenly. Trials that share a
    device move out first. Only what pays after epsilon is changed, and nobody who is changing already.

    Args:
        overhead: The runtime model, c, d and epsilon.
        runtime: The expected seconds of a placement alone on one device; None: ``Placement.expected_s``.
        idle: Who gets idle devices.
        by_epochs: With ``"longest"``, count the rest of a trial's epoch, too, where it is known: a change waits for
            its end, and devices that are added stand idle till then.
        lead: Among several groups keep devices for finalists, and let new trials pause for them.
    """
    model = overhead.within_bounds()
    allotment = Allotment(model)

    def step(plan: Plan) -> Plan:
        if plan.waiting:
            due = finalists(plan, model) if lead else {}
            plan = _shrink(plan, model, allotment, runtime, due)
            return make_room(plan, Outlook(plan, runtime), due) if due else plan
        if not plan.free or not (plan.running or plan.placed):
            return plan
        return _grow(plan, model, runtime, idle, by_epochs)

    return step


def _grow(plan: Plan, model: Overhead, runtime: Runtime | None, idle: Idle, by_epochs: bool) -> Plan:
    if not any(item.fraction >= 1 - EPSILON for item in plan.free):
        return plan
    outlook = Outlook(plan, runtime)
    board = Board(plan)
    board.settle(plan.running, outlook.running_s, lambda placement, left_s: 1)
    if not board.whole:
        return plan
    # In the order of their ends only so many can get one of the idle devices; some more, as not for all it pays.
    most = 4 * board.whole + 32 if idle == "longest" else None
    candidates = _candidates(plan, outlook, model, most, by_epochs and idle == "longest")
    if not candidates:
        return plan
    if idle == "waterfill":
        _as_published(candidates, outlook, board.whole, model, outlook.devices(plan))
    else:
        _hand_out(candidates, board.whole, model, idle)
    placed, resized = list(plan.placed), list(plan.resized)
    for candidate in sorted(candidates, key=lambda c: (-c.wants, c.index)):
        if not candidate.wants:
            continue
        placement = candidate.placement
        near = _devices(plan, placement)
        names = board.take_whole(candidate.wants, placement.memory_bytes, near=near)
        # Fewer than hoped for (another kind of device, too little memory): see whether it still pays.
        candidate.wants = len(names)
        if not names or not candidate.pays(model):
            board.give_back(names)
            continue
        for name in names:
            board.tenancies[name].enter(1.0, candidate.left_s, 1, placement.memory_bytes)
        kept = placement.shares if candidate.held else ()
        shares = (*kept, *(Share(name) for name in names))
        if candidate.running:
            resized.append(Resize(placement, shares))
        else:
            placed[candidate.index] = replace(placement, shares=shares)
    return replace(plan, placed=tuple(placed), resized=tuple(resized), free=board.free())


def _candidates(
    plan: Plan, outlook: Outlook, model: Overhead, most: int | None, by_epochs: bool
) -> list[_Candidate]:
    """Trials that more devices would help, by the cost of a change alone: all, or those that would end last."""
    tenants = outlook.tenants(plan)
    found: list[_Candidate] = []
    last = len(plan.running) + len(plan.placed)

    def consider(index: int, placement: Placement, left_s: float, rank: int | None, running: bool) -> None:
        limit = min(model.max_devices, placement.max_devices)
        shares = placement.shares
        alone = len(shares) > 1 or tenants[shares[0].device] == 1
        held = len(shares) if width_of(shares) >= len(shares) - EPSILON or (alone and len(shares) == 1) else 0
        # Alone on a device it holds a part of, it runs as on the whole.
        speed = model.speed(held) if held else 1.0 / model.alpha ** (tenants[shares[0].device] - 1)
        if placement.exclusive or held >= limit or placement.max_devices == 1 or not (held or running):
            return
        candidate = _Candidate(
            index, placement, left_s, speed, held, limit, last if rank is None else rank, running
        )
        if running and by_epochs:
            candidate.epoch_s = _of_epoch_s(placement, left_s)
        candidate.wants = limit - held
        if candidate.pays(model):
            candidate.wants = 0
            found.append(candidate)

    running = [index for index, item in enumerate(plan.running) if not item.changing]
    asked = {resize.placement.segments[0].trial.id for resize in plan.resized}
    placed = [
        index
        for index, placement in enumerate(plan.placed)
        if placement.shares and placement.segments[0].trial.id not in asked
    ]
    if most is not None and len(running) + len(placed) > most:
        ends = [
            (outlook.running_s[index] / _pace(plan.running[index].placement, tenants, model), True, index)
            for index in running
        ]
        ends += [
            (outlook.expected_s(plan.placed[index]) / _pace(plan.placed[index], tenants, model), False, index)
            for index in placed
        ]
        last_ones = heapq.nlargest(most, ends)
        running = sorted(index for _, runs, index in last_ones if runs)
        placed = sorted(index for _, runs, index in last_ones if not runs)
    for index in running:
        item = plan.running[index]
        consider(index, item.placement, outlook.running_s[index], item.rank, True)
    for index in placed:
        placement = plan.placed[index]
        consider(index, placement, outlook.expected_s(placement), None, False)
    return found


def _of_epoch_s(placement: Placement, left_s: float) -> float | None:
    """The work left of the present epoch, where it is known."""
    epoch = epoch_s(placement, placement.expected_s or 0.0)
    if epoch <= 0 or placement.expected_error:
        return None
    return max(0.0, left_s - math.floor(left_s / epoch + 1e-6) * epoch)


def _pace(placement: Placement, tenants: Mapping[str, int], model: Overhead) -> float:
    """How fast it runs now."""
    shares = placement.shares
    if len(shares) > 1:
        return model.speed(len(shares))
    crowd = tenants[shares[0].device]
    return 1.0 if crowd == 1 else float(model.alpha ** (1 - crowd))


def _hand_out(candidates: Sequence[_Candidate], devices: int, model: Overhead, idle: Idle) -> None:
    """Decide how many further devices each candidate gets; those for whom it does not pay get none."""
    pool = list(candidates)
    for _ in range(_ROUNDS):
        for candidate in candidates:
            candidate.wants = 0
        if idle == "best":
            _by_rank(pool, devices)
        else:
            _one_by_one(pool, devices, model, evenly=idle == "even")
        failed = [c for c in pool if c.wants and not c.pays(model)]
        if not failed:
            return
        # Who gains too little makes room for the others; the longest of them may gain enough with more.
        hopeful = max(failed, key=lambda c: (c.left_s, -c.index)) if len(failed) > 1 else None
        out = {c.index for c in failed if c is not hopeful and c.running}
        pool = [c for c in pool if not (c.running and c.index in out)]
    for candidate in pool:
        if candidate.wants and not candidate.pays(model):
            candidate.wants = 0


def _as_published(
    candidates: Sequence[_Candidate], outlook: Outlook, idle: int, model: Overhead, devices: int
) -> None:
    """Algorithm 2, lines 4 to 6: up to each trial's share of all devices, as far as there are idle ones."""
    placed = [c for c in candidates if not c.running]
    left_s = [*outlook.running_s, *(c.left_s for c in placed)]
    widths = waterfill_widths(
        left_s, devices=devices, max_sharing=model.max_sharing, max_devices=model.max_devices
    )
    for candidate in candidates:
        number = candidate.index if candidate.running else len(outlook.running_s) + placed.index(candidate)
        share = int(widths[number])  # of less than a device: none more than it has
        candidate.wants = max(0, min(share, candidate.limit) - candidate.held)
    for candidate in sorted(candidates, key=lambda c: (-c.left_s, c.index)):
        candidate.wants = min(candidate.wants, idle)
        if candidate.wants and not candidate.pays(model):
            candidate.wants = 0
        idle -= candidate.wants


def _by_rank(pool: Sequence[_Candidate], devices: int) -> None:
    """Hydro 5.3 (b): to the top performing trial, then to the next."""
    for candidate in sorted(pool, key=lambda c: (c.rank, -c.left_s, c.index)):
        if not candidate.running:
            break  # nobody can tell yet how those just placed perform
        candidate.wants = min(devices, candidate.limit - candidate.held)
        devices -= candidate.wants


def _one_by_one(pool: Sequence[_Candidate], devices: int, model: Overhead, *, evenly: bool) -> None:
    """One device at a time to the trial that would end last, or (Hydro 5.3 (a)) has the fewest devices."""

    def key(candidate: _Candidate) -> tuple[float, float, int]:
        ends_s = candidate.ends_s(model)
        if evenly:
            return candidate.held + candidate.wants, -ends_s, candidate.index
        return -ends_s, 0.0, candidate.index

    heap = [(key(candidate), number) for number, candidate in enumerate(pool)]
    heapq.heapify(heap)
    while heap and devices:
        _, number = heap[0]
        candidate = pool[number]
        candidate.wants += 1
        devices -= 1
        if candidate.held + candidate.wants < candidate.limit:
            heapq.heapreplace(heap, (key(candidate), number))
        else:
            heapq.heappop(heap)


def _devices(plan: Plan, placement: Placement) -> list[Device]:
    known = plan.devices
    return [known[share.device] for share in placement.shares if share.device in known]


def _shrink(
    plan: Plan, model: Overhead, allotment: Allotment, runtime: Runtime | None, due: Mapping[int, int]
) -> Plan:
    """Ask wide trials for devices that waiting ones need more, but for those that finalists are to have."""
    wide = [
        (index, item)
        for index, item in enumerate(plan.running)
        if not item.changing and len(item.placement.shares) > 1 and item.placement.max_devices > 1
    ]
    if not wide:
        return plan
    needed = len(plan.waiting) - sum([len(item.leaving) for item in plan.running])
    if needed <= 0:
        return plan
    outlook = Outlook(plan, runtime)
    horizon_s = outlook.horizon_s(allotment, outlook.devices(plan))
    stream = outlook.is_stream(plan)
    resized = list(plan.resized)
    # Who would be done first has the most to spare.
    wide.sort(key=lambda entry: outlook.running_s[entry[0]] / model.speed(len(entry[1].placement.shares)))
    for index, item in wide:
        if needed <= 0:
            break
        shares, left_s = item.placement.shares, outlook.running_s[index]
        enough = 1 if stream else max(1, round(allotment.width(left_s, horizon_s)))
        enough = due.get(item.placement.segments[0].trial.id, enough)
        new = max(enough, len(shares) - needed)
        if new < len(shares) and pays(left_s, len(shares), new, model):
            resized.append(Resize(item.placement, shares[:new]))
            needed -= len(shares) - new
    return plan if len(resized) == len(plan.resized) else replace(plan, resized=tuple(resized))
