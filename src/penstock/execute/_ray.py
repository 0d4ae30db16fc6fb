"""The Ray executor: warm actors on the nodes of a Ray cluster, each with a worker process like the local executor's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import pickle
import socket
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from penstock.core import (
    Clock,
    Device,
    Ended,
    Event,
    Free,
    Measurement,
    Reported,
    Resized,
    Share,
    Started,
    TrialStatus,
    WallClock,
    check,
)
from penstock.core.errors import ExecutorError, InvalidInput, MissingDependency, Unsupported
from penstock.execute._actor import TOKEN, Opened, Order, Slot, boot_id, files_of, gpu_facts, write_file
from penstock.execute._base import Executor, Job, Launch
from penstock.execute._child import how
from penstock.execute._ship import check_config, pack
from penstock.execute._wire import (
    also_drew,
    check_slots_per_trial,
    fused_of,
    settings_of,
    specs_of,
    spreads_over_workers,
    to_event,
)

_EPSILON = 1e-9
_TICK_S = 1.0
_REFRESH_S = 1.0
_NEWS_S = 20.0
_STUCK_S = 10.0
_TAKEN_S = 10.0
_IDLE_S = 60.0
_CLOSE_S = 5.0
_SILENT_S = 5.0  # waiting for a node
_START_TRIES = 3
_KNOCK_S = 5.0  # for a head node that is just coming up
_KNOCK_AGAIN_S = 0.5
_GRAIN = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class _Node:
    """A machine of the cluster."""

    id: str
    name: str
    cpu: float  # per device
    gpu: bool


@dataclass(slots=True, eq=False)
class _Ticket:
    """A launch on its way: waiting for devices -> with a worker that starts -> sent -> done."""

    number: int
    launch: Launch
    specs: list[tuple[Any, ...]]
    shares: tuple[Share, ...]
    open: set[int]  # trials without an Ended yet
    epochs: dict[int, int]
    sent: bool = False
    seen: bool = False  # the study has been told of its start
    target: tuple[Share, ...] = ()  # shares to go on with, from the next report on
    asked: tuple[str, bool] | None = None  # meanwhile it was told to stop
    again: bool = False  # it goes on with other shares: its start was told long ago
    passed: int = 0  # workers that were lost before they had begun it
    last_s: float = 0.0  # of its latest event
    drawn: Measurement | None = None  # outside of epochs, before its shares were changed

    @property
    def trials(self) -> tuple[int, ...]:
        return tuple(spec[0] for spec in self.specs)


@dataclass(slots=True, eq=False)
class _Lease:
    """Devices reserved for the study: a placement group with one bundle per node, the leading one first."""

    key: tuple[str, ...]
    group: Any
    node: _Node
    bundle: dict[str, float]
    workers: list[_Worker] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    lease: _Lease
    part: float  # of the lease's leading bundle
    threads: int  # of each of its processes
    gpus: int
    members: int  # processes that train a trial together
    actor: Any
    call: Any  # what we wait for: the actor's opening, later its news
    born_s: float
    heard_s: float
    turn: int = 0  # counts its worker processes
    opened: Opened | None = None
    ready: bool = False
    broken: tuple[str, str] | None = None
    ticket: _Ticket | None = None
    exclusive: bool = False


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself goes on trying for minutes, and says nothing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # "auto", "local" or another way to find it, which is Ray's affair
    deadline_s = time.monotonic() + _KNOCK_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() < deadline_s - _KNOCK_AGAIN_S:
                time.sleep(_KNOCK_AGAIN_S)
                continue
            raise ExecutorError(
                f"The Ray cluster at {address!r} can't be reached: {error}. Is it up, and are host and port right "
                '("head:6379", or "ray://head:10001" from outside)? Ray on this machine alone: Ray(None), without '
                "RAY_ADDRESS."
            ) from error
        return


def _ray() -> Any:
    """Ray, loaded when first needed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependency(f"Ray can't be loaded ({error}): pip install 'penstock[ray]'.") from error
    return ray


_connecting = threading.Lock()
_guests: weakref.WeakSet[Ray] = weakref.WeakSet()
"""Who uses a connection that one of them has made: a process has one, and the last to leave ends it."""


@final
class Ray(Executor):
    """Runs trials on a Ray cluster.

    Every GPU is a device, or every CPU (or ``cpus`` of them) where the cluster has no GPUs. Devices are reserved by
    placement groups when first used; actors in them are warm and serve many trials, each with a worker process like
    the local executor's. A trial that gets a part of a device asks Ray for that part. The training function and what
    it holds are put into the object store once, so they travel once to each node. Where a node does not see the
    study's folder, checkpoints and the trials' own files are brought over. The death of an actor or a node costs its
    trials' tries: the study runs them elsewhere, from their last checkpoints. Nodes that join are used.

    Penstock must be installed on the nodes, and the modules the training function imports must be there: by the nodes'
    image, or by ``runtime_env``.

    Args:
        address: Of the cluster: ``"auto"`` (the one this machine is a node of), ``"host:port"``, ``"ray://host:port"``
            (from outside); None: as ``RAY_ADDRESS`` says, else Ray is started on this machine. A connection that
            this process has already is used as it is.
        slots: Use at most so many devices.
        slots_per_trial: Devices each trial gets: a whole number, or a fraction of one.
        cpus: CPUs per device; default: 1 without GPUs, else the node's CPUs divided by its GPUs.
        gpus: Whether devices are GPUs; default: if there are any.
        kinds: Only GPUs of these kinds, by Ray's names (``"A100"``, ``"V100"``).
        shared_files: Whether the nodes see the study's folder under the same name; default: each node looks.
        runtime_env: Ray's environment for the workers: ``{"working_dir": ".", "pip": [...]}``.
        wait_s: How long to wait for a node while there is none.
        warm: Keep actors and devices from one study to the next that this executor runs, as long as this process
            lives; default: give them back after each.
        bubbles: Not here, and refused: see ``Local``.
        shared: Not here, and refused: Ray itself divides its cluster among programs.

    Raises:
        Unsupported: ``bubbles`` or ``shared`` is given.
    """

    spreads = True

    def __init__(
        self,
        address: str | None = None,
        *,
        slots: int | None = None,
        slots_per_trial: float = 1,
        cpus: float | None = None,
        gpus: bool | None = None,
        kinds: str | Sequence[str] | None = None,
        shared_files: bool | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        wait_s: float = 300.0,
        warm: bool = False,
        bubbles: object = None,
        shared: object = False,
    ) -> None:
        if bubbles is not None:
            raise Unsupported(
                "pk.Ray does not run trials in bubbles: a host job lends them through the memory of its own machine, "
                "and Ray does not say on which machine of the cluster its actors meet it. On each machine of the host "
                "job, run a study with pk.Local(slots=0, bubbles=...)."
            )
        if shared is not False:
            raise Unsupported(
                "pk.Ray has no shared=: Ray divides its cluster among the programs that use it. "
                "Limit this study with slots=, or run it with pk.Local(shared=True)."
            )
        if address is not None and (not isinstance(address, str) or not address.strip()):
            raise InvalidInput(f'address takes "auto", "host:port" or "ray://host:port", got {address!r}.')
        if slots is not None:
            slots = check.whole("Ray(slots)", slots, "Drop it for all devices of the cluster.")
            if slots < 1:
                raise InvalidInput(f"slots must be at least 1, got {slots}.")
        check.number("slots_per_trial", slots_per_trial, "Give 1, 2, or a fraction such as 0.5.")
        check_slots_per_trial(slots_per_trial, slots)
        for name, flag in {"gpus": gpus, "shared_files": shared_files, "warm": warm}.items():
            if not (isinstance(flag, bool) or (flag is None and name != "warm")):
                raise InvalidInput(f"{name} takes True or False, got {flag!r}.")
        if cpus is not None and check.number("cpus", cpus, "Give the CPUs of one device, such as 4.") <= 0:
            raise InvalidInput(f"cpus must be above 0, got {cpus}.")
        if kinds is not None and gpus is False:
            raise InvalidInput("kinds names GPUs: drop gpus=False, or kinds.")
        if not (check.is_real(wait_s) and wait_s >= 0):
            raise InvalidInput(f"wait_s must be at least 0 seconds, got {wait_s!r}.")
        if kinds is not None and not (
            isinstance(kinds, Iterable) and all(isinstance(kind, str) for kind in kinds)
        ):
            raise InvalidInput(f'kinds takes names of GPUs, such as ["A100"], got {kinds!r}.')
        if runtime_env is not None and not isinstance(runtime_env, Mapping):
            raise InvalidInput(
                f'runtime_env takes a mapping as Ray documents it, such as {{"pip": ["xgboost"]}}, got {runtime_env!r}.'
            )
        self.slots_per_trial = slots_per_trial
        self._options: dict[str, Any] = {
            "address": address,
            "slots": slots,
            "slots_per_trial": slots_per_trial,
            "cpus": cpus,
            "gpus": gpus,
            "kinds": (kinds,) if isinstance(kinds, str) else None if kinds is None else tuple(kinds),
            "shared_files": shared_files,
            "runtime_env": None if runtime_env is None else dict(runtime_env),
            "wait_s": wait_s,
            "warm": warm,
        }
        self._clock = WallClock()
        self._job: Job | None = None
        self._part()
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """How it was made, not what it runs: a study's executor is kept with the study."""
        return functools.partial(Ray, **self._options), ()

    def _part(self) -> None:
        """Forget the cluster."""
        self._ray: Any = None
        self._ours = False  # we have connected, with our environment
        self._with_gpus = False
        self._nodes: dict[str, _Node] = {}
        self._devices: dict[str, Device] = {}
        self._home: dict[str, _Node] = {}  # of each device
        self._facts: dict[str, list[tuple[str, int | None]]] = {}
        self._taken: dict[str, float] = {}  # devices that others hold, and until when we don't ask again
        self._leases: dict[tuple[str, ...], _Lease] = {}
        self._names = itertools.count()
        self._free: tuple[Free, ...] | None = None

    def _reset(self) -> None:
        """Forget the study."""
        self._blob: Any = None
        self._order: Order | None = None
        self._workers: dict[Any, _Worker] = {}  # by what we wait for
        self._tickets: dict[int, _Ticket] = {}
        self._by_trial: dict[int, _Ticket] = {}
        self._waiting: deque[_Ticket] = deque()
        self._events: list[Event] = []
        self._held: dict[str, float] = {}
        self._exclusive: set[str] = set()
        self._offsets: dict[str, float] = {}  # from a machine's monotonic clock to ours
        self._number = 0
        self._failed_starts = 0
        self._error: ExecutorError | None = None
        self._refreshed_s = -math.inf
        self._listened_s = math.inf
        self._free = None

    @property
    def clock(self) -> Clock:
        """The driver's wall clock; the nodes' times are carried over to it."""
        return self._clock

    @property
    def slots(self) -> int:
        """Devices of the cluster that the study may use, now."""
        return len(self._devices)

    # -- opening and closing ----------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Connect, put the work into the object store and look at the nodes; actors start when needed."""
        if self._job is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        ray = _ray()
        work = pack(job.work)
        self._reset()
        files = job.files.absolute()
        (files / "logs").mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex
        (files / TOKEN).write_text(token)
        self._connect(ray)
        try:
            self._blob = ray.put(work)
            try:
                cwd = os.getcwd()
            except OSError:
                cwd = str(files)
            self._order = Order(
                name="",
                settings=settings_of(job),
                token=token,
                shared=self._options["shared_files"],
                path=tuple(os.path.abspath(entry) if entry == "" else entry for entry in sys.path),
                argv=tuple(sys.argv),
                cwd=cwd,
                machine=boot_id(),
                threads=1,
                gpus=0,
            )
            self._offsets[self._order.machine] = self._clock.now_s() - time.monotonic()
            self._job = job
            self._await_devices(need=math.ceil(self.slots_per_trial))
        except BaseException:
            self._job = job
            self.close()
            raise

    def _connect(self, ray: Any) -> None:
        with _connecting:
            if not ray.is_initialized():
                _guests.clear()
                if self._ray is not None:
                    self._part()  # somebody has disconnected us since the last study
            self._ray = ray
            if not ray.is_initialized():
                self._init(ray)
            elif not _guests:
                return  # it is the user's own
            _guests.add(self)

    def _disconnect(self) -> None:
        """Leave; who is the last ends the connection, unless it is the user's own."""
        with _connecting:
            if self in _guests:
                _guests.discard(self)
                if not _guests:
                    self._ray.shutdown()

    def _init(self, ray: Any) -> None:
        address = self._options["address"] or os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {} if address != "local" else {"include_dashboard": False}
        if self._options["runtime_env"]:
            options["runtime_env"] = self._options["runtime_env"]
        _knock(address)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:
            self._ray = None
            raise ExecutorError(
                f"The Ray cluster at {address!r} can't be reached: {error}. Is it up, and of this version of Ray "
                f"({ray.__version__}) and Python? Ray on this machine alone: Ray(None), without RAY_ADDRESS."
            ) from error
        self._ours = True

    def close(self) -> None:
        """End all actors, give the devices back and disconnect, if the connection is ours."""
        if self._job is None:
            return
        with contextlib.suppress(OSError):
            (self._job.files / TOKEN).unlink()
        self._job = None
        ray = self._ray
        with contextlib.suppress(Exception):  # a cluster that is gone needs no tidying
            if ray.is_initialized():
                closing = [worker.actor.close.remote() for worker in self._workers.values() if worker.opened]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
                if self._options["warm"]:
                    self._park()
                    return
                for lease in list(self._leases.values()):
                    self._drop(lease)
                self._disconnect()
        self._part()
        self._reset()

    def release(self) -> None:
        """Give back what ``warm`` keeps between studies."""
        if self._job is not None or self._ray is None:
            return
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                for lease in list(self._leases.values()):
                    self._drop(lease)
                self._disconnect()
        self._part()

    def _park(self) -> None:
        """Keep the actors, without worker processes."""
        for lease in list(self._leases.values()):
            for worker in list(lease.workers):
                if worker.opened is None:
                    self._forget(worker)
                worker.call = worker.opened = worker.broken = worker.ticket = None
                worker.ready = worker.exclusive = False
        self._reset()

    # -- the cluster ------------------------------------------------------------------------------------

    def _await_devices(self, need: int = 1) -> None:
        """Wait until there are ``need`` devices."""
        wait_s = self._options["wait_s"]
        began_s = time.monotonic()
        told = False
        while True:
            self._refresh()
            if len(self._devices) >= need:
                return
            waited_s = time.monotonic() - began_s
            kinds = self._options["kinds"]
            of = f" of kind {', '.join(kinds)}" if kinds else ""
            what = f"{len(self._nodes)} nodes with {'GPUs' if self._with_gpus else 'CPUs'}{of}"
            has = f"The Ray cluster has {len(self._devices)} devices for trials that need {need}"
            if waited_s >= wait_s:
                break
            if not told and waited_s >= _SILENT_S:
                told = True
                warnings.warn(
                    f"{has}: {what}. Waiting for more, up to {wait_s:g} s (wait_s).",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(0.2)
        raise ExecutorError(
            f"{has}, after waiting {wait_s:g} s (wait_s): {what}. Add nodes, or ask for less (slots_per_trial, cpus)."
        )

    def _refresh(self) -> None:
        """Notice nodes that came and went."""
        self._refreshed_s = time.monotonic()
        alive = {str(entry["NodeID"]): entry for entry in self._ray.nodes() if entry["Alive"]}
        gone = [node for node in self._nodes if node not in alive]
        first = not self._nodes
        if first:
            wanted = self._options["gpus"]
            has = any(entry["Resources"].get("GPU", 0) >= 1 for entry in alive.values())
            self._with_gpus = bool(wanted or self._options["kinds"] or (wanted is None and has))
        come = [node for node in alive if node not in self._nodes]
        if not gone and not come:
            return
        for node in come:
            self._join(node, alive[node])
        lost = {node: self._nodes.pop(node) for node in gone}
        self._choose_devices()
        for lease in list(self._leases.values()):
            if lease.node.id in lost or any(name not in self._home for name in lease.key):
                for worker in list(lease.workers):
                    self._died(worker, f"its node {lease.node.name} left the cluster", "", lost=True)
                self._drop(lease)
        self._free = None

    def _join(self, node: str, entry: Mapping[str, Any]) -> None:
        resources = entry["Resources"]
        count = int(resources.get("GPU" if self._with_gpus else "CPU", 0))
        cpus = float(resources.get("CPU", 0))
        share = self._options["cpus"]
        if self._with_gpus:
            kind = next((k.partition(":")[2] for k in resources if k.startswith("accelerator_type:")), "GPU")
            if self._options["kinds"] is not None and kind not in self._options["kinds"]:
                count = 0
            share = min(cpus / count, share or max(1, cpus // count)) if count else 0.0
            if count:
                self._facts[node] = self._look_at_gpus(node, kind, count)
        else:
            share = share or 1.0
            count = int(cpus / share + _EPSILON)
            self._facts[node] = [("cpu", None)] * count
        name = f"{entry.get('NodeManagerHostname') or entry.get('NodeManagerAddress')}-{node[:6]}"
        self._nodes[node] = _Node(node, name, share, self._with_gpus)
        self._facts.setdefault(node, [])

    def _look_at_gpus(self, node: str, kind: str, count: int) -> list[tuple[str, int | None]]:
        """Ray knows a node's kind of GPU; the node's driver knows their memory. Ray chooses which one we get."""
        ray = self._ray
        pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        look = ray.remote(gpu_facts).options(num_cpus=0, scheduling_strategy=pinned, max_retries=0)
        try:
            found = ray.get(look.remote(), timeout=30)
        except Exception:
            found = []
        memory = [size for _, size in found]
        least = min((size for size in memory if size is not None), default=None) if all(memory) else None
        return [(kind, least)] * count

    def _choose_devices(self) -> None:
        """The first ``slots`` devices of the nodes, as they joined."""
        devices: dict[str, Device] = {}
        home: dict[str, _Node] = {}
        most = self._options["slots"]
        for node in self._nodes.values():
            for number, (kind, memory) in enumerate(self._facts[node.id]):
                if most is not None and len(devices) >= most:
                    break
                name = f"{node.name}/{'cuda' if node.gpu else 'cpu'}:{number}"
                cores = max(1, int(node.cpu + _EPSILON))
                devices[name] = Device(name, kind, node.name, memory, cores)
                home[name] = node
        self._devices, self._home = devices, home

    # -- what is free -----------------------------------------------------------------------------------

    def free(self) -> Sequence[Free]:
        """Devices with something free. Waits for a node if there is none."""
        if self._job is None:
            return ()
        if not self._devices:
            self._await_devices()
        if self._free is None:
            now_s = time.monotonic()
            found = []
            for name, device in self._devices.items():
                fraction = 1.0 - self._held.get(name, 0.0)
                if fraction > _EPSILON and self._taken.get(name, 0.0) <= now_s:
                    found.append(Free(device, fraction))
            self._free = tuple(found)
        return self._free

    # -- launching --------------------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch]) -> None:
        """Hand placements to actors."""
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        tickets = [self._ticket(launch) for launch in launches]
        for ticket in tickets:
            self._tickets[ticket.number] = ticket
            for trial in ticket.open:
                self._by_trial[trial] = ticket
            if not self._place(ticket):
                self._waiting.append(ticket)
        self._free = None

    def _ticket(self, launch: Launch) -> _Ticket:
        placement = launch.placement
        if not placement.shares or not placement.segments:
            raise InvalidInput(f"A placement needs segments and shares, got {placement}.")
        specs = specs_of(launch)
        try:
            pickle.dumps((specs, dict(launch.facts)), protocol=5)
        except Exception as error:
            for spec in specs:
                raise check_config(spec[0], spec[1]) from error
            raise
        self._number += 1
        epochs = {s.trial.id: known for s, known in zip(placement.segments, launch.known, strict=True)}
        return _Ticket(self._number, launch, specs, placement.shares, set(epochs), epochs)

    def _fits(self, ticket: _Ticket) -> bool:
        now_s = time.monotonic()
        for share in ticket.shares:
            name = share.device
            if name not in self._devices or self._taken.get(name, 0.0) > now_s or name in self._exclusive:
                return False
            held = self._held.get(name, 0.0)
            if held + share.fraction > 1.0 + _EPSILON or (held and ticket.launch.placement.exclusive):
                return False
        return True

    def _retarget(self, ticket: _Ticket) -> None:
        """Find other devices for a ticket whose own have left the cluster or are held by others."""
        now_s = time.monotonic()
        if all(s.device in self._devices and self._taken.get(s.device, 0.0) <= now_s for s in ticket.shares):
            return
        free = {item.device.id: item for item in self.free() if item.device.id not in self._exclusive}
        found: list[Share] = []
        for share in ticket.shares:
            name = next((n for n, item in free.items() if item.fraction >= share.fraction - _EPSILON), None)
            if name is None:
                return
            found.append(Share(name, share.fraction))
            home = self._home[name]
            del free[name]
            if len(ticket.shares) > 1:
                free = {n: item for n, item in free.items() if self._home[n] is home}
        ticket.shares = tuple(found)

    def _place(self, ticket: _Ticket) -> bool:
        """Give the ticket to a worker, if its devices are free."""
        if not self._fits(ticket):
            return False
        lease = self._lease(ticket.shares)
        home = lease.node
        led = [share for share in ticket.shares if self._home[share.device] is home]
        cores = sum(self._devices[share.device].cores * share.fraction for share in led)
        spread = spreads_over_workers(ticket.launch.placement, len(ticket.shares))
        members = len(led) if spread and len(lease.key) > 1 else 1
        threads = max(1, int(cores / members + _EPSILON))
        part = led[0].fraction if len(lease.key) == 1 else 1.0
        gpus = len(led) if home.gpu else 0
        idle = [w for w in lease.workers if w.ticket is None]
        worker = next(
            (w for w in reversed(idle) if (w.part, w.threads, w.members) == (part, threads, members)), None
        )
        if worker is None:
            for other in idle:
                if sum(w.part for w in lease.workers) + part > 1.0 + _EPSILON:
                    self._retire(other)
            worker = self._start(lease, part, threads, gpus, members)
        worker.ticket = ticket
        worker.exclusive = ticket.launch.placement.exclusive
        worker.heard_s = time.monotonic()
        if worker.call is None:
            self._open_worker(worker)
        for share in ticket.shares:
            self._held[share.device] = self._held.get(share.device, 0.0) + share.fraction
            if worker.exclusive:
                self._exclusive.add(share.device)
        if worker.opened is not None:
            self._send(worker)
        return True

    def _release(self, worker: _Worker) -> None:
        """Its devices are free."""
        ticket, worker.ticket = worker.ticket, None
        if ticket is None:
            return
        for share in ticket.shares:
            left = self._held.get(share.device, 0.0) - share.fraction
            self._held[share.device] = left if left > _EPSILON else 0.0
            if worker.exclusive:
                self._exclusive.discard(share.device)
        worker.exclusive = False
        self._free = None

    def _send(self, worker: _Worker) -> None:
        ticket, opened = worker.ticket, worker.opened
        if ticket is None or opened is None or self._job is None:
            return
        names = tuple(f"cuda:{index}" for index in range(worker.gpus // worker.members)) or ("cpu",)
        messages = []
        for rank in range(worker.members):
            facts = dict(ticket.launch.facts)
            fraction = sum(share.fraction for share in ticket.shares) / len(ticket.shares)
            if fraction < 1.0 - _EPSILON:  # its weight among those that share its devices
                facts["fraction"] = fraction
            if worker.members > 1:
                facts["world"] = (rank, worker.members, f"{opened.folder}/meet-{ticket.number}")
            message = (ticket.number, ticket.specs, names, worker.threads, facts)
            messages.append(pickle.dumps(message, protocol=5))
        files: list[Any] = []
        if not opened.shared:
            for spec in ticket.specs:
                for name in files_of(self._job.files, spec[0], spec[7]):
                    with contextlib.suppress(OSError):  # deleted meanwhile: an older one serves
                        files.append(self._ray.put((name, (self._job.files / name).read_bytes())))
        ticket.sent = True
        worker.actor.take.remote(ticket.number, ticket.trials, tuple(messages), *files)

    # -- leases and workers -----------------------------------------------------------------------------

    def _lease(self, shares: tuple[Share, ...]) -> _Lease:
        """The reservation of these devices, made if there is none."""
        key = tuple(share.device for share in shares)
        lease = self._leases.get(key)
        if lease is not None:
            return lease
        for other in list(self._leases.values()):
            if set(other.key).isdisjoint(key):
                continue
            if any(worker.ticket is not None for worker in other.workers):
                # Parts of several devices of which others hold parts: run in the first one's.
                if len(key) > 1:
                    return self._lease(shares[:1])
                continue
            self._drop(other)
        bundles: dict[_Node, dict[str, float]] = {}
        for share in shares:
            node = self._home[share.device]
            part = 1.0 if len(shares) == 1 else share.fraction
            bundle = bundles.setdefault(node, {})
            bundle["CPU"] = bundle.get("CPU", 0.0) + part * node.cpu
            if node.gpu:
                bundle["GPU"] = bundle.get("GPU", 0.0) + part
        group = self._ray.util.placement_group(
            [_whole(bundle) for bundle in bundles.values()],
            strategy="PACK" if len(bundles) == 1 else "STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": node.id} for node in bundles],
        )
        node = next(iter(bundles))
        lease = _Lease(key, group, node, _whole(bundles[node]))
        self._leases[key] = lease
        return lease

    def _start(self, lease: _Lease, part: float, threads: int, gpus: int, members: int) -> _Worker:
        if self._order is None:
            raise ExecutorError("The executor is not open.")
        ray = self._ray
        inside = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            lease.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
        )
        resources = _whole({name: part * amount for name, amount in lease.bundle.items()})
        options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 4,
            "scheduling_strategy": inside,
        }
        if not self._ours and self._options["runtime_env"]:
            options["runtime_env"] = self._options["runtime_env"]
        actor = ray.remote(Slot).options(**options).remote()
        name = f"ray-{next(self._names)}-{lease.node.name}"
        now_s = time.monotonic()
        worker = _Worker(name, lease, part, threads, gpus, members, actor, None, now_s, now_s)
        lease.workers.append(worker)
        return worker

    def _open_worker(self, worker: _Worker) -> None:
        """Let the actor start a worker process."""
        order = self._order
        if order is None:
            return

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
        self._wait_for(worker, worker.actor.open.remote(order, self._blob))

    def _wait_for(self, worker: _Worker, call: Any) -> None:
        if worker.call is not None:
            self._workers.pop(worker.call, None)
        worker.call = call
        self._workers[call] = worker

    def _forget(self, worker: _Worker) -> None:
        """Kill the actor; nothing it says counts any more."""
        if worker.call is not None:
            self._workers.pop(worker.call, None)
        if worker in worker.lease.workers:
            worker.lease.workers.remove(worker)
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor, no_restart=True)

    def _retire(self, worker: _Worker) -> None:
        """Let go of an idle actor, in good order."""
        with contextlib.suppress(Exception):
            if worker.opened is not None:
                self._ray.wait([worker.actor.close.remote()], timeout=_CLOSE_S)
        self._forget(worker)

    def _drop(self, lease: _Lease) -> None:
        """Give devices back to Ray."""
        for worker in list(lease.workers):
            self._forget(worker)
        self._leases.pop(lease.key, None)
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(lease.group)

    # -- stopping ---------------------------------------------------------------------------------------

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """Tell workers to end trials at their next report; what was not sent to one ends now."""
        wanted = {trial: ticket for trial in trials if (ticket := self._by_trial.get(trial)) is not None}
        holders = {w.ticket.number: w for w in self._workers.values() if w.ticket is not None}
        for trial, ticket in wanted.items():
            holder = holders.get(ticket.number)
            if ticket.target:
                ticket.asked = reason, keep
            if ticket.sent:
                if holder is not None:
                    data = pickle.dumps((ticket.number, trial, reason, keep), protocol=5)
                    holder.actor.stop.remote(data)
                continue
            status = TrialStatus.PAUSED if keep else TrialStatus.STOPPED
            ended = Ended(self._clock.now_s(), trial, status, ticket.epochs[trial], reason, kept=keep)
            ticket.specs = [spec for spec in ticket.specs if spec[0] != trial]
            self._end(ticket, ended)
            if holder is not None and not ticket.open:
                self._release(holder)
        self._waiting = deque(ticket for ticket in self._waiting if ticket.open)
        self._free = None

    # -- changing shares --------------------------------------------------------------------------------

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Stop a trial's workers at its next report, and let it go on from its checkpoint on other shares."""
        ticket = self._by_trial.get(trial)
        worker = next((w for w in self._workers.values() if w.ticket is ticket), None)
        if ticket is None or worker is None or ticket.target or not ticket.sent or not shares:
            return
        placement = ticket.launch.placement
        if placement.max_devices < len(shares) or len(placement.segments) > 1:
            raise InvalidInput(f"Trial {trial} can't spread over {len(shares)} devices.")
        ticket.target = tuple(shares)
        for share in self._claims(ticket):
            if self._held.get(share.device, 0.0) + share.fraction > 1.0 + _EPSILON:
                ticket.target = ()
                raise ExecutorError(f"{share.fraction:g} of {share.device} is asked for, but is not free.")
        for share in self._claims(ticket):
            self._held[share.device] = self._held.get(share.device, 0.0) + share.fraction
        worker.actor.stop.remote(pickle.dumps((ticket.number, trial, "other shares", True), protocol=5))
        self._free = None

    @staticmethod
    def _claims(ticket: _Ticket) -> list[Share]:
        """Shares that are kept free for it until it changes."""
        now = {share.device for share in ticket.shares}
        return [share for share in ticket.target if share.device not in now]

    def _unclaim(self, ticket: _Ticket) -> None:
        for share in self._claims(ticket):
            self._held[share.device] = max(0.0, self._held[share.device] - share.fraction)
        ticket.target = ()
        self._free = None

    def _regroup(self, worker: _Worker, ticket: _Ticket, time_s: float) -> None:
        """Its workers have stopped: let the trial go on with its new shares."""
        target, launch = ticket.target, ticket.launch
        self._unclaim(ticket)
        self._release(worker)
        trial = launch.placement.segments[0].trial.id
        if ticket.asked is not None:
            reason, keep = ticket.asked
            status = TrialStatus.PAUSED if keep else TrialStatus.STOPPED
            self._end(ticket, Ended(time_s, trial, status, ticket.epochs[trial], reason, kept=keep))
            return
        placement = replace(launch.placement, shares=target)
        after = self._ticket(replace(launch, placement=placement, known=(ticket.epochs[trial],)))
        after.seen = after.again = True
        after.drawn = ticket.drawn
        after.last_s = time_s
        del self._tickets[ticket.number]
        self._tickets[after.number] = self._by_trial[trial] = after
        self._events.append(Resized(time_s, trial, target))
        if not self._place(after):
            self._waiting.appendleft(after)

    # -- events -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for actors."""
        if self._job is None:
            events, self._events = self._events, []
            return events
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        first = True
        while True:
            self._look_after()
            if self._error is not None and not self._events:
                error, self._error = self._error, None
                raise error
            left = None if deadline is None else deadline - time.monotonic()
            over = left is not None and left <= 0
            if self._events or not self._tickets or (over and not first):
                if not self._events and not self._devices and left:
                    time.sleep(min(left, 0.2))  # for a node to join
                break
            self._listen(self._patience(left))
            first = False
        events, self._events = self._events, []
        return events

    def _patience(self, left: float | None) -> float:
        """How long to wait at most before looking after nodes and hanging trainings."""
        wait = _TICK_S if left is None else max(0.0, min(_TICK_S, left))
        timeout_s = None if self._job is None else self._job.timeout_s
        return wait if timeout_s is None else min(wait, max(0.01, timeout_s / 10))

    def _look_after(self) -> None:
        """Nodes, hanging trainings, actors that can't start, idle ones; then place what waits."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s > _REFRESH_S:
            self._refresh()
            for name, until_s in list(self._taken.items()):
                if until_s <= now_s:
                    del self._taken[name]
                    self._free = None
        timeout_s = None if self._job is None else self._job.timeout_s
        away_s = now_s - self._listened_s
        self._listened_s = now_s
        for worker in list(self._workers.values()):
            if away_s > _TICK_S:  # who was not listened to was not silent
                worker.heard_s = min(now_s, worker.heard_s + away_s)
            quiet_s = now_s - worker.heard_s
            if worker.ticket is None:
                if quiet_s > _IDLE_S and all(w.ticket is None for w in worker.lease.workers):
                    self._retire(worker)
                    if not worker.lease.workers:
                        self._drop(worker.lease)
            elif timeout_s is not None and worker.ready and quiet_s > timeout_s * len(worker.ticket.open):
                self._died(worker, f"no report for {timeout_s:g} s (timeout_s)", "", lost=False)
            elif worker.opened is None and now_s - worker.born_s > _STUCK_S:
                self._check_stuck(worker)
        if self._waiting:
            blocked: deque[_Ticket] = deque()
            while self._waiting:
                ticket = self._waiting.popleft()
                if self._devices:
                    self._retarget(ticket)
                if not self._place(ticket):
                    blocked.append(ticket)
            self._waiting = blocked
            self._free = None

    def _check_stuck(self, worker: _Worker) -> None:
        """An actor that has not come up: if others hold its devices, run its trial somewhere else."""
        worker.born_s = time.monotonic()
        table = self._ray.util.placement_group_table(worker.lease.group)
        if table.get("state") == "CREATED":
            return  # the actor is on its way: a large environment, a slow machine
        for name in worker.lease.key:
            self._taken[name] = time.monotonic() + _TAKEN_S
        for other in list(worker.lease.workers):
            self._set_aside(other)
        self._drop(worker.lease)

    def _listen(self, wait_s: float) -> None:
        """Hear all actors that have something to say."""
        self._hear_all(wait_s)
        self._listened_s = time.monotonic()

    def _hear_all(self, wait_s: float) -> None:
        ray = self._ray
        calls = list(self._workers)
        if not calls:
            time.sleep(min(wait_s, 0.2))
            return
        try:
            if not ray.is_initialized():
                raise SystemExit
            ready, _ = ray.wait(calls, num_returns=1, timeout=wait_s)
        except SystemExit:  # so Ray tells who waits that another thread has disconnected
            if ray.is_initialized():
                raise
            raise ExecutorError(
                "This process was disconnected from Ray while the study ran: ray.shutdown() was called in another "
                "thread. Call it after the study, which can be resumed."
            ) from None
        if ready and len(calls) > 1:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in ready:
            worker = self._workers.get(call)
            if worker is None:
                continue
            try:
                answer = ray.get(call)
            except ray.exceptions.RayError as error:
                self._lost(worker, error)
                continue
            if isinstance(answer, Opened):
                worker.opened = answer
                self._note_offset(answer)
                self._send(worker)
            else:
                self._take(worker, answer)
            # Equal, not the same: Ray Client answers with references of its own.
            if worker.call == call and worker in worker.lease.workers:
                self._wait_for(worker, worker.actor.news.remote(worker.turn, _NEWS_S))

    def _note_offset(self, opened: Opened) -> None:
        """What to add to a machine's monotonic clock: the least difference seen is the one with the least delay."""
        offset_s = self._clock.now_s() - opened.now_s
        self._offsets[opened.machine] = min(offset_s, self._offsets.get(opened.machine, math.inf))

    def _take(self, worker: _Worker, answer: list[tuple[Any, ...]]) -> None:
        """News of a worker."""
        if answer:
            worker.heard_s = time.monotonic()
        for item in answer:
            if item[0] == "m":
                self._hear(worker, pickle.loads(item[1]))
            elif item[0] == "f":
                if not self._keep_file(worker, item[1], item[2]):
                    return
            elif item[0] == "t":
                if worker.ticket is not None and worker.ticket.number == item[1]:
                    self._died(worker, item[2], "", lost=True)
                    return
            else:
                self._worker_ended(worker, item[1], item[2])

    def _keep_file(self, worker: _Worker, name: str, data: bytes) -> bool:
        """Put a file of a node into the study's folder; a trial whose files can't be kept has failed."""
        if self._job is None:
            return False
        try:
            write_file(self._job.files, name, data)
        except OSError as error:
            self._died(worker, f"its file {name} can't be kept: {error}", "", lost=False)
            return False
        return True

    def _hear(self, worker: _Worker, messages: list[tuple[Any, ...]]) -> None:
        offset_s = 0.0 if worker.opened is None else self._offsets[worker.opened.machine]
        for message in messages:
            kind = message[0]
            if kind == "y":
                worker.ready = True
                self._failed_starts = 0
                continue
            if kind == "x":
                worker.broken = message[1], message[2]
                continue
            ticket = worker.ticket
            trial: int = message[2]
            if ticket is None or ticket.number != message[1] or trial not in ticket.open:
                continue
            time_s = ticket.last_s = max(ticket.last_s, message[3] + offset_s)
            event = to_event(message, time_s)
            if event is None:
                if not ticket.again:
                    self._tell_start(ticket, trial, time_s, message[4])
            elif isinstance(event, Ended):
                if ticket.target and event.kept:
                    ticket.drawn = also_drew(ticket.drawn, event).energy
                    self._regroup(worker, ticket, time_s)
                    continue
                self._end(ticket, event)
                if not ticket.open:
                    self._release(worker)
            else:
                if isinstance(event, Reported):
                    ticket.epochs[trial] = max(ticket.epochs[trial], event.epoch)
                self._events.append(event)

    def _tell_start(self, ticket: _Ticket, trial: int, time_s: float, start: int) -> None:
        placement = ticket.launch.placement
        started = Started(time_s, trial, start, ticket.shares, placement.attempt, fused_of(placement))
        self._events.append(started)
        ticket.seen = True

    def _end(self, ticket: _Ticket, ended: Ended) -> None:
        self._events.append(also_drew(ticket.drawn, ended))
        ticket.open.discard(ended.trial)
        if self._by_trial.get(ended.trial) is ticket:
            del self._by_trial[ended.trial]
        if not ticket.open:
            self._tickets.pop(ticket.number, None)
            if ticket.target:
                self._unclaim(ticket)

    # -- faults -----------------------------------------------------------------------------------------

    def _worker_ended(self, worker: _Worker, code: int | None, tail: str) -> None:
        """The worker process died; its actor lives and starts another."""
        if not worker.ready:
            self._start_failed(worker, *(worker.broken or (how(code), tail)), sure=worker.broken is not None)
            self._set_aside(worker)
            return
        self._blame(worker, f"its worker died: {how(code)}", tail, lost=True)
        self._open_worker(worker)

    def _lost(self, worker: _Worker, error: Any) -> None:
        """The actor died, could not be made, or can't be reached."""
        ray = self._ray
        self._refresh()
        if worker not in worker.lease.workers:
            return  # its node has left, and that was told
        if worker.opened is None and worker.lease.node.id in self._nodes:
            gone = isinstance(error, ray.exceptions.RayActorError) and "creation task" not in str(error)
            self._start_failed(worker, _first_line(error), str(error), sure=not gone)
            self._set_aside(worker)
            return
        self._died(worker, f"its Ray actor died: {_first_line(error)}", str(error)[:4000], lost=True)

    def _died(self, worker: _Worker, fate: str, detail: str, *, lost: bool) -> None:
        """End the worker's segment and forget it."""
        self._blame(worker, fate, detail, lost=lost)
        self._forget(worker)
        self._free = None

    def _set_aside(self, worker: _Worker) -> None:
        """A worker that never began: its segment has not suffered."""
        ticket = worker.ticket
        self._release(worker)
        self._forget(worker)
        if ticket is not None:
            ticket.sent = False
            self._waiting.appendleft(ticket)

    def _blame(self, worker: _Worker, fate: str, detail: str, *, lost: bool) -> None:
        ticket = worker.ticket
        if ticket is None:
            return
        if ticket.target:
            self._unclaim(ticket)
        self._release(worker)
        if not ticket.seen and lost and ticket.passed < _START_TRIES:
            ticket.passed += 1
            ticket.sent = False  # not begun, as far as anybody knows
            self._waiting.appendleft(ticket)
            return
        now_s = max(self._clock.now_s(), ticket.last_s)
        for trial in sorted(ticket.open):
            if not ticket.seen:
                self._tell_start(ticket, trial, now_s, 0)
        for trial in sorted(ticket.open):
            ended = Ended(now_s, trial, TrialStatus.FAILED, ticket.epochs[trial], fate, detail, lost=lost)
            self._end(ticket, ended)

    def _start_failed(self, worker: _Worker, why: str, detail: str, *, sure: bool) -> None:
        self._failed_starts += 1
        if not sure and self._failed_starts < _START_TRIES:
            return
        self._error = ExecutorError(
            f"Workers can't be started on node {worker.lease.node.name}: {why}. Penstock and what the training "
            "function imports must be installed there (in the nodes' image, or by "
            f"Ray(runtime_env={{'working_dir': '.'}})).\n{detail}".rstrip()
        )


def _whole(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources in grains, rounded down, so that three thirds fit into one."""
    grains = {name: math.floor(amount * _GRAIN + 1e-6) / _GRAIN for name, amount in resources.items()}
    return {name: amount for name, amount in grains.items() if amount > 0}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return (text if len(text) <= 200 else text[:197] + "...").rstrip(".")
