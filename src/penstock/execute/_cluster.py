"""The nodes of a Ray cluster as devices: what Ray tells of them, reckoned up. Ray itself is not needed here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core import Device, Share
from penstock.execute._holdings import EPSILON

_GRAIN = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster.

    Attributes:
        id: Ray's.
        name: Ours, with its host's.
        kind: Of its devices.
        count: How many it has.
        cpu: CPUs of each.
        gpu: Whether they are GPUs.
        memory_bytes: Of each; None where unknown.
    """

    id: str
    name: str
    kind: str
    count: int
    cpu: float
    gpu: bool
    memory_bytes: int | None = None


def node_of(
    entry: Mapping[str, Any], *, gpu: bool, cpus: float | None, kinds: Collection[str] | None
) -> Node:
    """A node, from Ray's entry of it.

    Args:
        entry: It.
        gpu: Whether GPUs are the devices, not CPUs.
        cpus: CPUs of a device; None: 1, or the node's divided among its GPUs.
        kinds: Of GPUs, that count; None: all.
    """
    resources = entry["Resources"]
    there = float(resources.get("CPU", 0))
    if gpu:
        kind = next((k.partition(":")[2] for k in resources if k.startswith("accelerator_type:")), "GPU")
        count = int(resources.get("GPU", 0)) if kinds is None or kind in kinds else 0
        each = min(there / count, cpus or max(1, there // count)) if count else 0.0
    else:
        kind, each = "cpu", cpus or 1.0
        count = int(there / each + EPSILON)
    ident = str(entry["NodeID"])
    name = f"{entry.get('NodeManagerHostname') or entry.get('NodeManagerAddress')}-{ident[:6]}"
    return Node(ident, name, kind, count, each, gpu)


def devices_of(nodes: Iterable[Node], most: int | None) -> tuple[dict[str, Device], dict[str, Node]]:
    """The first ``most`` devices of the nodes, as they joined; and the node of each."""
    devices: dict[str, Device] = {}
    home: dict[str, Node] = {}
    for node in nodes:
        for number in range(node.count):
            if most is not None and len(devices) >= most:
                break
            name = f"{node.name}/{'cuda' if node.gpu else 'cpu'}:{number}"
            cores = max(1, int(node.cpu + EPSILON))
            devices[name] = Device(name, node.kind, node.name, node.memory_bytes, cores)
            home[name] = node
    return devices, home


def whole(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources in grains, rounded down, so that three thirds fit into one."""
    grains = {name: math.floor(amount * _GRAIN + 1e-6) / _GRAIN for name, amount in resources.items()}
    return {name: amount for name, amount in grains.items() if amount > 0}


def bundles_of(shares: Sequence[Share], home: Mapping[str, Node]) -> dict[Node, dict[str, float]]:
    """What to reserve on each node for these shares: of one device all, for others may come to share it."""
    bundles: dict[Node, dict[str, float]] = {}
    for share in shares:
        node = home[share.device]
        part = 1.0 if len(shares) == 1 else share.fraction
        bundle = bundles.setdefault(node, {})
        bundle["CPU"] = bundle.get("CPU", 0.0) + part * node.cpu
        if node.gpu:
            bundle["GPU"] = bundle.get("GPU", 0.0) + part
    return {node: whole(bundle) for node, bundle in bundles.items()}


def elsewhere(
    shares: Sequence[Share], free: Mapping[str, float], home: Mapping[str, Node], *, least: int
) -> tuple[Share, ...] | None:
    """Free shares in the place of these, on one node if they are several; None: there are not even ``least``."""
    for count in range(len(shares), least - 1, -1):
        for node in dict.fromkeys(home[name] for name in free):
            left = {name: part for name, part in free.items() if home[name] is node}
            found: list[Share] = []
            for share in shares[:count]:
                name = next((n for n, part in left.items() if part >= share.fraction - EPSILON), None)
                if name is None:
                    break
                found.append(Share(name, share.fraction))
                del left[name]
            if len(found) == count:
                return tuple(found)
    return None
