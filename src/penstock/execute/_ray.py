"""The Ray executor: warm actors on the nodes of a Ray cluster, each with a worker process like the local executor's."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from penstock.core import (
    Clock,
    Event,
    Free,
    Resized,
    Share,
    TrialStatus,
    WallClock,
    check,
)
from penstock.core.errors import ExecutorError, InvalidInput, Unsupported
from penstock.execute._actor import TOKEN, Opened, Order, boot_id, files_of, write_file
from penstock.execute._base import Executor, Job, Launch
from penstock.execute._book import ORDER, Book, Flight
from penstock.execute._child import how
from penstock.execute._cluster import Cluster, Node, elsewhere
from penstock.execute._connection import connect, leave, load
from penstock.execute._holdings import EPSILON
from penstock.execute._leases import Actor, Leases
from penstock.execute._ship import check_config, pack
from penstock.execute._watch import TICK_S, Starts, patience_s
from penstock.execute._wire import (
    check_slots_per_trial,
    settings_of,
    specs_of,
    spreads,
    weighed,
    whereabouts,
)
from penstock.train._elastic import by_threads

_REFRESH_S = 1.0
_NEWS_S = 20.0
_STUCK_S = 10.0
_IDLE_S = 60.0
_SILENT_S = 5.0  # waiting for a node


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
        self._cluster = Cluster(None, self._options)
        self._leases = Leases(None, None)
        self._free: tuple[Free, ...] | None = None

    def _reset(self) -> None:
        """Forget the study."""
        self._blob: Any = None
        self._order: Order | None = None
        self._book = Book()
        self._offsets: dict[str, float] = {}  # from a machine's monotonic clock to ours
        self._starts = Starts()
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
        return len(self._cluster.devices)

    # -- opening and closing ----------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Connect, put the work into the object store and look at the nodes; actors start when needed."""
        if self._job is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        ray = load()
        work = pack(job.work)
        self._reset()
        files = job.files.absolute()
        (files / "logs").mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex
        (files / TOKEN).write_text(token)
        self._connect(ray)
        try:
            self._blob = ray.put(work)
            path, argv, cwd = whereabouts(files)
            self._order = Order(
                name="",
                settings=settings_of(job),
                token=token,
                shared=self._options["shared_files"],
                path=tuple(path),
                argv=tuple(argv),
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
        if self._ray is not None and not ray.is_initialized():
            self._part()  # somebody has disconnected us since the last study
        environment = self._options["runtime_env"]
        made = connect(ray, self, self._options["address"], environment)
        if self._ray is None:
            self._ray, self._cluster = ray, Cluster(ray, self._options)
            self._leases = Leases(ray, None if made else environment)

    def close(self) -> None:
        """End all actors, give the devices back and disconnect, if the connection is ours."""
        if self._job is None:
            return
        with contextlib.suppress(OSError):
            (self._job.files / TOKEN).unlink()
        self._job = None
        with contextlib.suppress(Exception):  # a cluster that is gone needs no tidying
            if self._ray.is_initialized():
                self._leases.end_processes()
                if self._options["warm"]:
                    self._leases.park()
                    self._reset()
                    return
        self.release()
        self._reset()

    def release(self) -> None:
        """Give back what ``warm`` keeps between studies."""
        if self._job is not None or self._ray is None:
            return
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                self._leases.drop_all()
                leave(self._ray, self)
        self._part()

    # -- the cluster ------------------------------------------------------------------------------------

    def _await_devices(self, need: int = 1) -> None:
        """Wait until there are ``need`` devices."""
        wait_s, began_s, told = self._options["wait_s"], time.monotonic(), False
        while True:
            self._refresh()
            shortage = self._cluster.shortage(need)
            if not shortage:
                return
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                raise ExecutorError(
                    f"{shortage} Nothing more has come after waiting {wait_s:g} s (wait_s). Add nodes, or ask for less "
                    "(slots_per_trial, cpus)."
                )
            if not told and waited_s >= _SILENT_S:
                told = True
                waits = f"{shortage} Waiting for more, up to {wait_s:g} s (wait_s)."
                warnings.warn(waits, RuntimeWarning, stacklevel=2)
            time.sleep(0.2)

    def _refresh(self) -> None:
        """Notice nodes that came and went."""
        self._refreshed_s = time.monotonic()
        cluster = self._cluster
        if not cluster.refresh():
            return
        for lease in list(self._leases.by_key.values()):
            if lease.node.id not in cluster.nodes or any(name not in cluster.home for name in lease.key):
                for worker in list(lease.workers):
                    self._died(worker, f"its node {lease.node.name} left the cluster", "", lost=True)
                self._leases.drop(lease)
        self._free = None

    # -- what is free -----------------------------------------------------------------------------------

    def free(self) -> Sequence[Free]:
        """Devices with something free. Waits for a node if there is none."""
        if self._job is None:
            return ()
        if not self._cluster.devices:
            self._await_devices()
        if self._free is None:
            self._free = tuple(
                Free(device, fraction)
                for name, device in self._cluster.devices.items()
                if self._cluster.usable(name) and (fraction := self._book.holdings.free(name))
            )
        return self._free

    # -- launching --------------------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch]) -> None:
        """Hand placements to actors."""
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        flights = []
        for launch in launches:
            flights.append(self._book.flight(launch))
            specs = specs_of(launch)
            try:
                pickle.dumps((specs, dict(launch.facts)), protocol=5)
            except Exception as error:
                raise check_config(specs, error) from error
        for flight in flights:
            self._book.add(flight)
            if not self._place(flight):
                self._book.waiting.append(flight)
        self._free = None

    def _retarget(self, flight: Flight) -> None:
        """Find other devices for a flight whose own have left the cluster or are held by others.

        One that can spread makes do with fewer where too few are left: to wait for others may be for ever.
        """
        shares = flight.shares
        if all(self._cluster.usable(share.device) for share in shares):
            return
        gone = any(share.device not in self._cluster.devices for share in shares)
        least = 1 if gone and spreads(flight.launch.placement, len(shares)) else len(shares)
        free = {item.device.id: item.fraction for item in self.free()}
        found = elsewhere(shares, free, self._cluster.home, least=least)
        if found is not None:
            flight.shares = found
            if flight.again:  # or else its start tells
                now_s = flight.last_s = max(self._clock.now_s(), flight.last_s)
                self._book.events += [Resized(now_s, trial, found) for trial in flight.open]

    def _place(self, flight: Flight) -> bool:
        """Give the flight to a worker, if its devices are free."""
        shares, order = flight.shares, self._order
        if order is None or not all(self._cluster.usable(share.device) for share in shares):
            return False
        if not self._book.holdings.fits(shares, exclusive=flight.exclusive):
            return False
        lease = self._leases.lease(shares, self._cluster.home)
        led = [share for share in shares if self._cluster.home[share.device] is lease.node]
        cores = sum(self._cluster.devices[share.device].cores * share.fraction for share in led)
        spread = spreads(flight.launch.placement, len(shares)) and not self._by_threads(lease.node)
        members = len(led) if spread and len(lease.key) > 1 else 1
        threads = max(1, int(cores / members + EPSILON))
        part = led[0].fraction if len(lease.key) == 1 else 1.0
        worker = self._leases.worker(lease, part, threads, len(led) if lease.node.gpu else 0, members)
        worker.flight = flight
        worker.heard_s = time.monotonic()
        self._book.holdings.hold(shares, exclusive=flight.exclusive)
        self._free = None
        if worker.call is None:
            self._leases.open(worker, order, self._blob)
        self._send(worker)
        return True

    def _by_threads(self, node: Node) -> bool:
        """Whether one worker trains a trial that spreads on this node."""
        job = self._job
        return job is not None and by_threads(job.work, [node.kind], job.options.get("spread", "threads"))

    def _release(self, worker: Actor) -> None:
        """Its devices are free."""
        flight, worker.flight = worker.flight, None
        if flight is not None:
            self._book.holdings.release(flight.shares, exclusive=flight.exclusive)
            self._free = None

    def _send(self, worker: Actor) -> None:
        """Hand its flight to an actor, if that has come up."""
        flight, opened = worker.flight, worker.opened
        if flight is None or opened is None or self._job is None:
            return
        names = tuple(f"cuda:{index}" for index in range(worker.gpus // worker.members)) or ("cpu",)
        specs = [spec for spec in specs_of(flight.launch) if spec[0] in flight.open]
        facts = weighed(flight.launch.facts, flight.shares)
        if worker.members == 1 and spreads(flight.launch.placement, len(flight.shares)):
            facts["alone"] = max(1, worker.threads // len(flight.shares))
        messages = []
        for rank in range(worker.members):
            if worker.members > 1:
                # Of this turn's workers alone: those before may have waited there for the same segment.
                place = f"{opened.folder}/meet-{flight.number}-{worker.turn}"
                facts["world"] = (rank, worker.members, place)
            messages.append(pickle.dumps((flight.number, specs, names, worker.threads, facts), protocol=5))
        files: list[Any] = []
        if not opened.shared:
            for spec in specs:
                for name in files_of(self._job.files, spec[0], spec[7]):
                    with contextlib.suppress(OSError):  # deleted meanwhile: an older one serves
                        files.append(self._ray.put((name, (self._job.files / name).read_bytes())))
        flight.sent = True
        trials = tuple(spec[0] for spec in specs)
        worker.handle.take.remote(worker.turn, flight.number, trials, tuple(messages), *files)
        if flight.target:  # it was asked for while the actor came up
            self._tell_to_stop(worker, trials[0], ORDER, keep=True)

    def _holder(self, flight: Flight) -> Actor | None:
        return next((w for w in self._leases.waited_for.values() if w.flight is flight), None)

    # -- stopping ---------------------------------------------------------------------------------------

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """Tell workers to end trials at their next report; what was not sent to one ends now."""
        wanted = {trial: flight for trial in trials if (flight := self._book.of(trial)) is not None}
        for trial, flight in wanted.items():
            holder = self._holder(flight)
            if flight.sent:
                flight.asked.setdefault(trial, (reason, keep))
                self._tell_to_stop(holder, trial, reason, keep=keep)
                continue
            self._book.drop(flight, trial, self._clock.now_s(), reason, keep=keep)
            if holder is not None and not flight.open:
                self._release(holder)
        self._book.forget_ended()
        self._free = None

    def _tell_to_stop(self, worker: Actor | None, trial: int, reason: str, *, keep: bool) -> None:
        if worker is not None and worker.flight is not None:
            data = pickle.dumps((worker.flight.number, trial, reason, keep), protocol=5)
            worker.handle.stop.remote(data)

    # -- changing shares --------------------------------------------------------------------------------

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Stop a trial's workers at its next report, and let it go on from its checkpoint on other shares."""
        try:
            flight = self._book.resize(trial, shares)
        except ExecutorError:  # who lost its own device was moved to one that the study kept for this
            self._book.decline(trial, self._clock.now_s())
            return
        if flight is not None:
            if flight.sent:
                self._tell_to_stop(self._holder(flight), trial, ORDER, keep=True)
            self._free = None

    def _regroup(self, worker: Actor, flight: Flight, time_s: float) -> None:
        """Its workers have stopped: let the trial go on with what there is of its new shares."""
        target = tuple(share for share in flight.target if share.device in self._cluster.devices)
        self._release(worker)
        after = self._book.regroup(flight, target or flight.shares, time_s)
        if after is not None and not self._place(after):
            self._book.waiting.appendleft(after)

    # -- events -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for actors."""
        book = self._book
        if self._job is None:
            return book.take_events()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        first = True
        while True:
            self._look_after()
            if self._error is not None and not book.events:
                error, self._error = self._error, None
                raise error
            left = None if deadline is None else deadline - time.monotonic()
            over = left is not None and left <= 0
            if book.events or not book.flights or (over and not first):
                if not book.events and not self._cluster.devices and left:
                    time.sleep(min(left, 0.2))  # for a node to join
                break
            self._listen(patience_s(left, self._job.timeout_s))
            first = False
        return book.take_events()

    def _look_after(self) -> None:
        """Nodes, hanging trainings, actors that can't start, idle ones; then place what waits."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s > _REFRESH_S:
            self._refresh()
            if self._cluster.free_taken():
                self._free = None
        timeout_s = None if self._job is None else self._job.timeout_s
        away_s = now_s - self._listened_s
        self._listened_s = now_s
        for worker in list(self._leases.waited_for.values()):
            if away_s > TICK_S:  # who was not listened to was not silent
                worker.heard_s = min(now_s, worker.heard_s + away_s)
            quiet_s = now_s - worker.heard_s
            if worker.flight is None:
                if quiet_s > _IDLE_S and all(w.flight is None for w in worker.lease.workers):
                    self._leases.retire(worker)
                    if not worker.lease.workers:
                        self._leases.drop(worker.lease)
            elif timeout_s is not None and worker.ready and quiet_s > timeout_s * len(worker.flight.open):
                self._died(worker, f"no report for {timeout_s:g} s (timeout_s)", "", lost=False)
            elif worker.opened is None and now_s - worker.born_s > _STUCK_S:
                self._check_stuck(worker)
        book = self._book
        if book.waiting:
            waiting, book.waiting = book.waiting, deque()
            for flight in waiting:
                if self._cluster.devices:
                    self._retarget(flight)
                if not self._place(flight):
                    book.waiting.append(flight)
            self._free = None

    def _check_stuck(self, worker: Actor) -> None:
        """An actor that has not come up: if others hold its devices, run its trial somewhere else."""
        worker.born_s = time.monotonic()
        table = self._ray.util.placement_group_table(worker.lease.group)
        if table.get("state") == "CREATED":
            return  # the actor is on its way: a large environment, a slow machine
        self._refresh()  # others of the lease may have been at work, on a node that has just left
        if worker not in worker.lease.workers:
            return
        self._cluster.take(worker.lease.key)
        for other in list(worker.lease.workers):
            self._set_aside(other)
        self._leases.drop(worker.lease)

    def _listen(self, wait_s: float) -> None:
        """Hear all actors that have something to say."""
        self._hear_all(wait_s)
        self._listened_s = time.monotonic()

    def _hear_all(self, wait_s: float) -> None:
        ray, leases = self._ray, self._leases
        calls = list(leases.waited_for)
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
            worker = leases.waited_for.get(call)
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
                leases.wait_for(worker, worker.handle.news.remote(worker.turn, _NEWS_S))

    def _note_offset(self, opened: Opened) -> None:
        """What to add to a machine's monotonic clock: the least difference seen is the one with the least delay."""
        offset_s = self._clock.now_s() - opened.now_s
        self._offsets[opened.machine] = min(offset_s, self._offsets.get(opened.machine, math.inf))

    def _take(self, worker: Actor, answer: list[tuple[Any, ...]]) -> None:
        """News of a worker."""
        if answer:
            worker.heard_s = time.monotonic()
        for item in answer:
            if worker not in worker.lease.workers:
                return  # its trial goes on elsewhere, and it made room
            if item[0] == "m":
                self._hear(worker, pickle.loads(item[1]))
            elif item[0] == "f":
                if not self._keep_file(worker, item[1], item[2]):
                    return
            elif item[0] == "t":
                if worker.flight is not None and worker.flight.number == item[1]:
                    self._died(worker, item[2], "", lost=True)
                    return
            else:
                self._worker_ended(worker, item[1], item[2])

    def _keep_file(self, worker: Actor, name: str, data: bytes) -> bool:
        """Put a file of a node into the study's folder; a trial whose files can't be kept has failed."""
        if self._job is None:
            return False
        try:
            write_file(self._job.files, name, data)
        except OSError as error:
            self._died(worker, f"its file {name} can't be kept: {error}", "", lost=False)
            return False
        return True

    def _hear(self, worker: Actor, messages: list[tuple[Any, ...]]) -> None:
        offset_s = 0.0 if worker.opened is None else self._offsets[worker.opened.machine]
        for message in messages:
            kind = message[0]
            if kind == "y":
                worker.ready = True
                self._starts.worked()
                continue
            if kind == "x":
                worker.broken = message[1], message[2]
                continue
            flight = worker.flight
            if flight is None or flight.number != message[1] or message[2] not in flight.open:
                continue
            ended = self._book.hear(flight, message, message[3] + offset_s)
            if ended is None:
                continue
            if self._book.changes(flight, ended):
                self._regroup(worker, flight, ended.time_s)
                continue
            if worker.members > 1 and ended.status is TrialStatus.FAILED:
                ended = replace(ended, epoch=flight.epochs[ended.trial])  # it may be another member's word
            self._book.end(flight, ended)
            if not flight.open:
                self._release(worker)

    # -- faults -----------------------------------------------------------------------------------------

    def _worker_ended(self, worker: Actor, code: int | None, tail: str) -> None:
        """The worker process died; its actor lives and starts another."""
        if not worker.ready:
            self._start_failed(worker, *(worker.broken or (how(code), tail)), sure=worker.broken is not None)
            self._set_aside(worker)
            return
        self._blame(worker, f"its worker died: {how(code)}", tail, lost=True)
        if self._order is not None:
            self._leases.open(worker, self._order, self._blob)

    def _lost(self, worker: Actor, error: Any) -> None:
        """The actor died, could not be made, or can't be reached."""
        ray = self._ray
        self._refresh()
        if worker not in worker.lease.workers:
            return  # its node has left, and that was told
        if worker.opened is None and worker.lease.node.id in self._cluster.nodes:
            gone = isinstance(error, ray.exceptions.RayActorError) and "creation task" not in str(error)
            self._start_failed(worker, _first_line(error), str(error), sure=not gone)
            self._set_aside(worker)
            return
        self._died(worker, f"its Ray actor died: {_first_line(error)}", str(error)[:4000], lost=True)

    def _died(self, worker: Actor, fate: str, detail: str, *, lost: bool) -> None:
        """End the worker's segment and forget it."""
        self._blame(worker, fate, detail, lost=lost)
        self._leases.bury(worker)
        self._free = None

    def _set_aside(self, worker: Actor) -> None:
        """A worker that never began: its segment has not suffered."""
        flight = worker.flight
        self._release(worker)
        self._leases.bury(worker)
        if flight is not None:
            self._recall(flight)

    def _blame(self, worker: Actor, fate: str, detail: str, *, lost: bool) -> None:
        """End the worker's segment, unless it has not begun as far as anybody knows."""
        flight = worker.flight
        if flight is None:
            return
        self._release(worker)
        if not flight.seen and lost and self._starts.excused(flight.passed):
            flight.passed += 1
            self._recall(flight)
        else:
            self._book.fail(flight, self._clock.now_s(), fate, detail, lost=lost)

    def _recall(self, flight: Flight) -> None:
        """Let a segment that was not begun wait again; the order to stop it went to who is gone, and holds."""
        self._book.recall(flight)
        self._book.drop_asked(flight, self._clock.now_s())

    def _start_failed(self, worker: Actor, why: str, detail: str, *, sure: bool) -> None:
        if not self._starts.failed(sure=sure, born_s=worker.born_s, now_s=time.monotonic()):
            return
        self._error = ExecutorError(
            f"Workers can't be started on node {worker.lease.node.name}: {why}. Penstock and what the training "
            "function imports must be installed there (in the nodes' image, or by "
            f"Ray(runtime_env={{'working_dir': '.'}})).\n{detail}".rstrip()
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return (text if len(text) <= 200 else text[:197] + "...").rstrip(".")
