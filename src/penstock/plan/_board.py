"""What a pass knows of the devices while it hands them out: who is on them, what is free, what memory is left."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import final

from penstock.core import Device, Free, Placement, Plan, Running, Share

EPSILON = 1e-9  # three thirds of a device are one device


@final
class Tenancy:
    """One device: its tenants and what is free of it."""

    __slots__ = ("backlog", "count", "device", "fraction", "limit", "load_s", "memory_bytes", "unknown")

    def __init__(self, free: Free) -> None:
        self.device = free.device
        self.fraction = free.fraction
        self.backlog = free.backlog
        self.count = 0
        self.load_s = 0.0  # work left of its tenants
        self.limit = 1 << 30  # how many tenants the one with the least slack bears
        self.memory_bytes = 0
        self.unknown = False  # whether a tenant's memory is not known

    def enter(self, fraction: float, load_s: float, limit: int, memory_bytes: int | None) -> None:
        """Count a tenant in."""
        self.count += 1
        self.load_s += load_s
        self.limit = min(self.limit, limit)
        self.unknown = self.unknown or memory_bytes is None
        self.memory_bytes += memory_bytes or 0
        left = self.fraction - fraction
        self.fraction = left if left > EPSILON else 0.0

    def bears(self, fraction: float, limit: int, memory_bytes: int | None) -> bool:
        """Whether one more tenant fits: by fraction, by the others' slack, and by memory, which is a hard limit."""
        if self.fraction < fraction - EPSILON:
            return False
        if self.count == 0:
            return fits_alone(self.device, memory_bytes)
        if self.count >= min(self.limit, limit):
            return False
        if self.device.memory_bytes is None:
            return True
        if self.unknown or memory_bytes is None:
            return False  # nobody can promise that they fit together
        return self.memory_bytes + memory_bytes <= self.device.memory_bytes


def fits_alone(device: Device, memory_bytes: int | None) -> bool:
    """Whether a trial may have the device for itself; one of unknown need gets the chance to find out."""
    return memory_bytes is None or device.memory_bytes is None or memory_bytes <= device.memory_bytes


@final
class Board:
    """The devices with something free. Mutable, for the time of one pass; the plan it came from stays as it is."""

    def __init__(self, plan: Plan) -> None:
        self.tenancies: dict[str, Tenancy] = {item.device.id: Tenancy(item) for item in plan.free}
        self._whole: dict[str, dict[str, list[str]]] = {}  # kind -> node -> ids of wholly free devices
        self.whole = 0

    def settle(
        self, running: Sequence[Running], left_s: Sequence[float], bears: Callable[[Placement, float], int]
    ) -> None:
        """Count in what runs, then find the empty devices.

        Args:
            running: The placements.
            left_s: The work left of each.
            bears: With how many tenants on a device a placement, with so much work left, still ends in time.
        """
        tenancies = self.tenancies
        for item, load_s in zip(running, left_s, strict=True):
            placement = item.placement
            for share in placement.shares:
                tenancy = tenancies.get(share.device)
                if tenancy is not None:
                    # What it holds is not free as it is: only who it is has to be told.
                    limit = 1 if placement.exclusive else bears(placement, load_s)
                    tenancy.enter(0.0, load_s, limit, placement.memory_bytes)
        for name, tenancy in tenancies.items():
            # A device that is free but still named by a placement on its way to other shares is not empty.
            if tenancy.count == 0 and tenancy.fraction >= 1 - EPSILON:
                device = tenancy.device
                self._whole.setdefault(device.kind, {}).setdefault(device.node, []).append(name)
                self.whole += 1
        for nodes in self._whole.values():
            for names in nodes.values():
                names.reverse()  # the first named is taken first

    def take_whole(
        self, most: int, memory_bytes: int | None, *, near: Sequence[Device] = (), kind: str | None = None
    ) -> list[str]:
        """Up to ``most`` empty devices of one kind, on as few nodes as can be; those are gone from the board.

        Args:
            most: How many at most.
            memory_bytes: What the trial needs on each.
            near: Devices it already has: theirs is the kind, and their nodes come first.
            kind: Only devices of this kind.
        """
        if near:
            kind = near[0].kind
        kinds = [kind] if kind is not None else list(self._whole)
        best: list[str] = []
        for name in kinds:
            found = self._choose(self._whole.get(name, {}), most, memory_bytes, {d.node for d in near})
            if len(found) > len(best):
                best = found
                if len(best) == most:
                    break
        for name in best:
            device = self.tenancies[name].device
            nodes = self._whole[device.kind]
            names = nodes[device.node]
            if names[-1] == name:
                names.pop()
            else:
                names.remove(name)
            if not names:
                del nodes[device.node]
        self.whole -= len(best)
        return best

    def _choose(
        self, nodes: dict[str, list[str]], most: int, memory_bytes: int | None, home: set[str]
    ) -> list[str]:
        if not nodes:
            return []
        first = next(iter(nodes))
        if most == 1 and not home and fits_alone(self.tenancies[nodes[first][-1]].device, memory_bytes):
            return [nodes[first][-1]]
        # Its own nodes, then the tightest node that holds all of it, then the roomiest.
        ranked = sorted(
            nodes,
            key=lambda node: (
                node not in home,
                len(nodes[node]) < most,
                len(nodes[node]) if len(nodes[node]) >= most else -len(nodes[node]),
            ),
        )
        chosen: list[str] = []
        for node in ranked:
            for name in reversed(nodes[node]):
                if len(chosen) == most:
                    return chosen
                if fits_alone(self.tenancies[name].device, memory_bytes):
                    chosen.append(name)
        return chosen

    def give_back(self, names: Iterable[str]) -> None:
        """Empty devices that are not needed after all."""
        for name in names:
            device = self.tenancies[name].device
            self._whole.setdefault(device.kind, {}).setdefault(device.node, []).append(name)
            self.whole += 1

    def shared(self) -> list[tuple[float, str]]:
        """A heap of devices that have tenants and something free, the least loaded first."""
        found = [
            (tenancy.load_s, name)
            for name, tenancy in self.tenancies.items()
            if tenancy.count and tenancy.fraction > EPSILON
        ]
        heapq.heapify(found)
        return found

    def free(self) -> tuple[Free, ...]:
        """What is still free, for the plan."""
        left = []
        for tenancy in self.tenancies.values():
            if tenancy.fraction > 0 or tenancy.backlog > 0:
                left.append(Free(tenancy.device, tenancy.fraction, tenancy.backlog))
        return tuple(left)


def width_of(shares: Sequence[Share]) -> float:
    """How many devices shares add up to."""
    return sum(share.fraction for share in shares)
