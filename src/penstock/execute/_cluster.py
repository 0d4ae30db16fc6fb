"""The nodes of a Ray cluster as devices: what Ray tells of them, reckoned up."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.core import Device, Share
from penstock.execute._actor import gpu_facts
from penstock.execute._holdings import EPSILON

_TAKEN_S = 10.0
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


@final
class Cluster:
    """The nodes there are, the devices that the study may use of them, and those that others hold.

    Args:
        ray: The module, connected.
        options: The executor's.
    """

    def __init__(self, ray: Any, options: Mapping[str, Any]) -> None:
        self.nodes: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self.home: dict[str, Node] = {}  # of each device
        self._ray = ray
        self._options = options
        self._with_gpus = False
        self._taken: dict[str, float] = {}  # until when we don't ask again

    def usable(self, name: str) -> bool:
        """Whether a device is there, and not held by others."""
        return name in self.devices and self._taken.get(name, 0.0) <= time.monotonic()

    def take(self, names: Iterable[str]) -> None:
        """Others hold these: they are not asked for again for a while."""
        self._taken |= dict.fromkeys(names, time.monotonic() + _TAKEN_S)

    def free_taken(self) -> bool:
        """Whether a while is over for some."""
        over = [name for name, until_s in self._taken.items() if until_s <= time.monotonic()]
        for name in over:
            del self._taken[name]
        return bool(over)

    def refresh(self) -> bool:
        """Notice nodes that came and went; whether any did."""
        alive = {str(entry["NodeID"]): entry for entry in self._ray.nodes() if entry["Alive"]}
        if not self.nodes:
            wanted = self._options["gpus"]
            has = any(entry["Resources"].get("GPU", 0) >= 1 for entry in alive.values())
            self._with_gpus = bool(wanted or self._options["kinds"] or (wanted is None and has))
        if alive.keys() == self.nodes.keys():
            return False
        for ident, entry in alive.items():
            if ident not in self.nodes:
                cpus, kinds = self._options["cpus"], self._options["kinds"]
                node = node_of(entry, gpu=self._with_gpus, cpus=cpus, kinds=kinds)
                self.nodes[ident] = self._with_memory(node) if node.gpu and node.count else node
        for ident in self.nodes.keys() - alive.keys():
            del self.nodes[ident]
        self.devices, self.home = devices_of(self.nodes.values(), self._options["slots"])
        return True

    def _with_memory(self, node: Node) -> Node:
        """Ray knows a node's kind of GPU; the node's driver knows their memory. Ray chooses which one we get."""
        ray = self._ray
        pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        look = ray.remote(gpu_facts).options(num_cpus=0, scheduling_strategy=pinned, max_retries=0)
        try:
            found = ray.get(look.remote(), timeout=30)
        except Exception:
            return node
        sizes = [size for _, size in found if size is not None]
        return replace(node, memory_bytes=min(sizes)) if sizes and len(sizes) == len(found) else node

    def shortage(self, need: int) -> str:
        """What there is, for who needs more; empty where it is enough."""
        if len(self.devices) >= need:
            return ""
        kinds = self._options["kinds"]
        of = f" of kind {', '.join(kinds)}" if kinds else ""
        what = f"{len(self.nodes)} nodes with {'GPUs' if self._with_gpus else 'CPUs'}{of}"
        return f"The Ray cluster has {len(self.devices)} devices for trials that need {need}: {what}."
