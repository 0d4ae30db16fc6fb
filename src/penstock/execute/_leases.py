"""What the Ray executor has of a cluster: devices reserved by placement groups, and warm actors in them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from penstock.core import Share
from penstock.execute._actor import Opened, Order, Slot
from penstock.execute._book import Flight
from penstock.execute._cluster import Node, bundles_of, whole
from penstock.execute._holdings import EPSILON

_CLOSE_S = 5.0


@final
@dataclass(slots=True, eq=False)
class Lease:
    """Devices reserved for the study: a placement group with one bundle per node, the leading one first."""

    key: tuple[str, ...]
    group: Any
    node: Node
    bundle: dict[str, float]
    workers: list[Actor] = field(default_factory=list)


@final
@dataclass(slots=True, eq=False)
class Actor:
    """An actor with its worker process, or its crew of them."""

    name: str
    lease: Lease
    part: float  # of the lease's leading bundle
    threads: int  # of each of its processes
    gpus: int
    members: int  # processes that train a trial together
    handle: Any
    call: Any  # what we wait for: the actor's opening, later its news
    born_s: float
    heard_s: float
    turn: int = 0  # counts its worker processes
    opened: Opened | None = None
    ready: bool = False
    broken: tuple[str, str] | None = None
    flight: Flight | None = None


@final
class Leases:
    """All leases and actors of one connection; between studies they are parked.

    Args:
        ray: The module, connected.
        environment: Ray's ``runtime_env`` for the actors, where the connection has not got it.
    """

    def __init__(self, ray: Any, environment: Mapping[str, Any] | None) -> None:
        self.by_key: dict[tuple[str, ...], Lease] = {}
        self.waited_for: dict[Any, Actor] = {}  # by the call
        self._ray = ray
        self._environment = environment
        self._names = itertools.count()

    # -- devices ----------------------------------------------------------------------------------------

    def lease(self, shares: tuple[Share, ...], home: Mapping[str, Node]) -> Lease:
        """The reservation of these devices, made if there is none."""
        key = tuple(share.device for share in shares)
        lease = self.by_key.get(key)
        if lease is not None:
            return lease
        for other in list(self.by_key.values()):
            if set(other.key).isdisjoint(key):
                continue
            if any(worker.flight is not None for worker in other.workers):
                # Parts of several devices of which others hold parts: run in the first one's.
                if len(key) > 1:
                    return self.lease(shares[:1], home)
                continue
            self.drop(other)
        bundles = bundles_of(shares, home)
        group = self._ray.util.placement_group(
            list(bundles.values()),
            strategy="PACK" if len(bundles) == 1 else "STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": node.id} for node in bundles],
        )
        node = next(iter(bundles))
        lease = self.by_key[key] = Lease(key, group, node, bundles[node])
        return lease

    def drop(self, lease: Lease) -> None:
        """Give devices back to Ray."""
        for worker in list(lease.workers):
            self.forget(worker)
        if self.by_key.get(lease.key) is lease:  # not one that was made since
            del self.by_key[lease.key]
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(lease.group)

    def drop_all(self) -> None:
        """Give everything back."""
        for lease in list(self.by_key.values()):
            self.drop(lease)

    # -- actors -----------------------------------------------------------------------------------------

    def worker(self, lease: Lease, part: float, threads: int, gpus: int, members: int) -> Actor:
        """An idle actor of this kind, made if there is none; others make room for it."""
        idle = [w for w in lease.workers if w.flight is None]
        for worker in reversed(idle):
            if (worker.part, worker.threads, worker.members) == (part, threads, members):
                return worker
        for other in idle:
            if sum(w.part for w in lease.workers) + part > 1.0 + EPSILON:
                self.retire(other)
        resources = whole({name: part * amount for name, amount in lease.bundle.items()})
        options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 4,
            "scheduling_strategy": self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                lease.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            ),
        }
        if self._environment:
            options["runtime_env"] = self._environment
        actor = self._ray.remote(Slot).options(**options).remote()
        name = f"ray-{next(self._names)}-{lease.node.name}"
        now_s = time.monotonic()
        made = Actor(name, lease, part, threads, gpus, members, actor, None, now_s, now_s)
        lease.workers.append(made)
        return made

    def open(self, worker: Actor, order: Order, blob: Any) -> None:
        """Let the actor start a worker process."""
        worker.opened, worker.ready = None, False
        worker.born_s = time.monotonic()
        worker.turn += 1
        order = replace(
            order,
            name=worker.name,
            threads=worker.threads,
            gpus=worker.gpus,
            turn=worker.turn,
            members=worker.members,
        )
        self.wait_for(worker, worker.handle.open.remote(order, blob))

    def wait_for(self, worker: Actor, call: Any) -> None:
        """Wait for that call of an actor, and no other."""
        if worker.call is not None:
            self.waited_for.pop(worker.call, None)
        worker.call = call
        self.waited_for[call] = worker

    def forget(self, worker: Actor) -> None:
        """Kill the actor; nothing it says counts any more."""
        if worker.call is not None:
            self.waited_for.pop(worker.call, None)
        if worker in worker.lease.workers:
            worker.lease.workers.remove(worker)
        with contextlib.suppress(Exception):
            self._ray.kill(worker.handle, no_restart=True)

    def bury(self, worker: Actor) -> None:
        """Forget an actor that is lost. With the last one of a lease nobody is left who would be found idle there."""
        self.forget(worker)
        if not worker.lease.workers:
            self.drop(worker.lease)

    def retire(self, worker: Actor) -> None:
        """Let go of an idle actor, in good order."""
        with contextlib.suppress(Exception):
            if worker.opened is not None:
                self._ray.wait([worker.handle.close.remote()], timeout=_CLOSE_S)
        self.forget(worker)

    # -- the end of a study -----------------------------------------------------------------------------

    def end_processes(self) -> None:
        """Let all actors end their worker processes."""
        closing = [worker.handle.close.remote() for worker in self.waited_for.values() if worker.opened]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)

    def park(self) -> None:
        """Keep the actors, without worker processes."""
        for lease in self.by_key.values():
            for worker in list(lease.workers):
                if worker.opened is None:
                    self.forget(worker)
                worker.call = worker.opened = worker.broken = worker.flight = None
                worker.ready = False
        self.waited_for.clear()
