"""Finalists first: while new trials take every device, those that train to their end get some for themselves.

Fluid minimises the makespan of one group. Where several are under way (Hyperband's brackets, ASHA), a study's best
result comes from trials that were promoted to the end. Among many new ones they would wait for a place and share a
device, and the result would come later than one trial per device brings it (Fluid measures the time to a target,
section 6.1). To let them lead costs little, for they are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.core import Device, Placement, Plan, Resize, Share
from penstock.plan._board import EPSILON, Board, fits_alone, width_of
from penstock.plan._outlook import Outlook
from penstock.predict import Overhead

_KEPT = 0.95  # of the speed that devices have apart: what a finalist must still make of those it spreads over


def finalists(plan: Plan, overhead: Overhead) -> dict[int, int]:
    """How many devices each finalist is to have for itself, by trial, the oldest first.

    There are none unless something waits, several groups are under way, and some of that is new and can make room.
    All finalists together have at most half of the devices.
    """
    if not plan.waiting:
        return {}
    under_way = [*[item.placement for item in plan.running], *plan.placed, *plan.waiting]
    promoted = [item for item in under_way if item.promoted]
    if not promoted or len(promoted) == len(under_way) or not Outlook.is_stream(plan):
        return {}
    room = Outlook.devices(plan) // 2
    width = max(w for w in range(1, overhead.max_devices + 1) if overhead.speed(w) >= _KEPT * w)
    due: dict[int, int] = {}
    for item in sorted(promoted, key=_trial):
        if not room:
            break
        if len(item.segments) > 1 or not item.segments[0].last:
            continue
        due[_trial(item)] = most = min(width, item.max_devices, room)
        room -= most
    return due


def widen(
    plan: Plan, outlook: Outlook, board: Board, due: Mapping[int, int], overhead: Overhead
) -> list[Resize]:
    """Give empty devices to finalists that run, as far as those that wait leave some; they are gone from the board."""
    if not due:
        return []
    kept = sum(_trial(item) in due for item in plan.waiting)
    tenants = outlook.tenants(plan)
    known = plan.devices
    resized: list[Resize] = []
    for item, left_s in zip(plan.running, outlook.running_s, strict=True):
        placement = item.placement
        if board.whole <= kept:
            break
        if item.changing or placement.max_devices == 1 or not placement.shares:
            continue
        held = _held(placement, tenants)
        wants = due.get(_trial(placement), 0) - held
        if wants <= 0:
            continue
        near = [known[share.device] for share in placement.shares if share.device in known]
        names = board.take_whole(min(wants, board.whole - kept), placement.memory_bytes, near=near)
        old = float(held) if held else 1 / tenants[placement.shares[0].device]
        then_s = overhead.epsilon_s + overhead.runtime_s(left_s, held + len(names))
        if not names or then_s >= overhead.runtime_s(left_s, old):
            board.give_back(names)
            continue
        for name in names:
            board.tenancies[name].enter(1.0, left_s, 1, placement.memory_bytes)
        more = tuple(Share(name) for name in names)
        resized.append(Resize(placement, (*placement.shares, *more) if held else more))
    return resized


def make_room(plan: Plan, outlook: Outlook, due: Mapping[int, int]) -> Plan:
    """Ask new trials to pause at the end of their epoch, so that finalists find empty devices."""
    asked = {_trial(resize.placement): resize.shares for resize in plan.resized}
    on: dict[str, list[int]] = {}  # device -> who runs on it, by place; -1: who can't be asked
    for index, item in enumerate(plan.running):
        for share in (*item.placement.shares, *item.leaving):
            on.setdefault(share.device, []).append(index)
    for shares in (*(placement.shares for placement in plan.placed), *asked.values()):
        for share in shares:
            on.setdefault(share.device, []).append(-1)

    def pauses(index: int) -> bool:
        return index >= 0 and plan.running[index].changing and not plan.running[index].placement.shares

    def may_pause(index: int) -> bool:
        if index < 0:
            return False
        placement = plan.running[index].placement
        return (
            placement.pausable
            and not placement.promoted
            and not plan.running[index].changing
            and len(placement.shares) == 1
            and _trial(placement) not in asked
        )

    # Those are, or will be, empty without anybody's help.
    empty = sum(item.fraction >= 1 - EPSILON and item.device.id not in on for item in plan.free)
    empty += sum(all(pauses(index) for index in tenants) for tenants in on.values())
    # Who has most to do would be in the way longest.
    devices = sorted(
        (name for name, tenants in on.items() if all(may_pause(index) for index in tenants)),
        key=lambda name: -max(outlook.running_s[index] for index in on[name]),
    )
    crowds = outlook.tenants(plan)
    resized: list[Resize] = []
    for placement in (*(item.placement for item in plan.running), *plan.placed, *plan.waiting):
        most = due.get(_trial(placement), 0)
        held = _held(placement, crowds) if placement.shares else 0
        if not most or _trial(placement) in asked or (placement.shares and placement.max_devices == 1):
            continue
        for _ in range(most - held):
            if empty:
                empty -= 1
                continue
            name = next((name for name in devices if _suits(placement, plan.devices.get(name), plan)), None)
            if name is None:
                break
            devices.remove(name)
            resized += [Resize(plan.running[index].placement, ()) for index in on[name]]
    return replace(plan, resized=(*plan.resized, *resized)) if resized else plan


def _trial(placement: Placement) -> int:
    return placement.segments[0].trial.id


def _held(placement: Placement, tenants: Mapping[str, int]) -> int:
    """Devices that it has for itself; one of which it holds a part counts if nobody else is there."""
    shares = placement.shares
    alone = len(shares) == 1 and tenants.get(shares[0].device, 1) == 1
    return len(shares) if alone or width_of(shares) >= len(shares) - EPSILON else 0


def _suits(placement: Placement, device: Device | None, plan: Plan) -> bool:
    """Whether a finalist can use the device, beside those that it has."""
    if device is None:
        return False
    has = [plan.devices[share.device] for share in placement.shares if share.device in plan.devices]
    return fits_alone(device, placement.memory_bytes) and all(each.kind == device.kind for each in has)
