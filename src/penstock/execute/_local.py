"""The local executor: warm worker processes on this machine's CPU cores or GPUs."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, final

from penstock.core import (
    Clock,
    Device,
    Ended,
    Event,
    Free,
    Reported,
    Resized,
    Share,
    Started,
    TrialStatus,
    WallClock,
)
from penstock.core.check import number, whole
from penstock.core.errors import ExecutorError, InvalidInput, Unsupported
from penstock.core.measurement import Measurement
from penstock.execute._base import Executor, Job, Launch
from penstock.execute._bubbles import in_bubble, lent_devices, lent_now
from penstock.execute._child import Child, how, start_child, thread_environment
from penstock.execute._machine import usable_cores, visible_gpus
from penstock.execute._mps import Mps
from penstock.execute._nursery import Forked, drop, needs, nursery_for
from penstock.execute._pool import Pool, usual_folder
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
from penstock.plan import Lent
from penstock.train import _guardian
from penstock.train._bubble_page import Stage
from penstock.train._process import FRAME, MESSAGE_BYTES, SPILLED, TICKET

_EPSILON = 1e-9
_BOARD_SLOTS = 4096
_TICK_S = 1.0
_STEAL_S = 0.01
_GATHER_S = 0.001
_MAX_BACKLOG = 192
_START_TRIES = 3
_FAREWELL_S = 0.5  # in which the death that made a lead fail shows


@dataclass(slots=True, eq=False)
class _Ticket:
    """A launch on its way. WAITING for devices -> with a worker (in its queue, then running) -> done."""

    number: int
    launch: Launch
    message: bytes
    shares: tuple[Share, ...]
    open: set[int]  # trials without an Ended yet
    epochs: dict[int, int]
    seen: bool = False  # the study has been told of its start
    began_s: float = 0.0
    worker: _Worker | None = None
    # Of a trial that is trained by one worker per device: the lead's ticket has the others', and they have it.
    crew: list[_Ticket] = field(default_factory=list)
    lead: _Ticket | None = None
    target: tuple[Share, ...] = ()  # shares to go on with, from the next report on
    claims: tuple[Share, ...] = ()  # those of them that are kept free for it until then
    halted: bool = False  # it has stopped for that
    asked: tuple[str, bool] | None = None  # meanwhile it was told to stop
    drawn: Measurement | None = None  # outside of epochs, before its shares were changed


@dataclass(slots=True, eq=False)
class _Worker:
    index: int
    gpus: tuple[str, ...]
    threads: int
    child: Child
    ready: bool = False
    broken: tuple[str, str] | None = None
    tickets: dict[int, _Ticket] = field(default_factory=dict)
    overflow: deque[bytes] = field(default_factory=deque)
    outbox: bytearray = field(default_factory=bytearray)
    shares: tuple[Share, ...] = ()
    exclusive: bool = False
    crewed: bool = False  # it trains a trial together with others
    heard_s: float = 0.0
    verdict: str = ""  # why we killed it
    stage: str = ""  # of a host job in whose bubbles it works

    @property
    def key(self) -> tuple[tuple[str, ...], int, str]:
        return self.gpus, self.threads, self.stage


@final
class Local(Executor):
    """Runs trials in worker processes of this machine.

    Workers are started when first needed, import the training function once and are used for many trials. Each
    is limited to its share of the cores. A worker that dies or hangs costs its present trial's try, is replaced
    and takes all processes it has started along; so does the death of the driver.

    Args:
        slots: How many slots the CPU cores are divided into; default: one per usable core, or one per GPU.
        slots_per_trial: Slots each trial gets: a whole number, or a fraction of one slot.
        threads: CPU threads per slot; default: the usable cores divided by the slots.
        gpus: Which GPUs (numbers as this process sees them), or how many; 0: none; default: all visible.
        bubbles: The folder of a host job's ``pk.bubbles.Host``: its stages are devices, too, on which trials run in the
            bubbles alone. The slots get promoted trials first and take trials out of the bubbles when they fall idle.
            With bubbles, ``slots`` may be 0.
        shared: Share the slots fairly with other studies of this user on this machine that say so, too (or, a path:
            with those that name the same folder). A study alone has them all; when others come, it gives up what is
            more than its share: idle slots at once, others when their segment ends, or, where they train fused trials
            that another slot can take in, at the end of their epoch. Slots that are idle for a minute are given back.
        weight: The study's share among those.
    """

    spreads = True

    def __init__(
        self,
        slots: int | None = None,
        *,
        slots_per_trial: float = 1,
        threads: int | None = None,
        gpus: int | Sequence[int] | None = None,
        bubbles: str | os.PathLike[str] | None = None,
        shared: bool | str | os.PathLike[str] = False,
        weight: float = 1.0,
    ) -> None:
        if not isinstance(shared, bool | str | os.PathLike) or shared == "":
            raise InvalidInput(f"shared takes True, False or the path of a folder, got {shared!r}.")
        number("weight", weight, "Give this study's share among those that share the slots.")
        self._pool = (
            None if shared is False else Pool(usual_folder() if shared is True else shared, weight=weight)
        )
        self._shared_out_s = -_TICK_S
        self._shared, self._weight = shared if isinstance(shared, bool) else os.fspath(shared), weight
        if bubbles is not None and not (isinstance(bubbles, str | os.PathLike) and str(bubbles)):
            raise InvalidInput(f"bubbles takes the folder of a host job's pk.bubbles.Host, got {bubbles!r}.")
        if slots is not None:
            slots = whole("Local(slots)", slots, "Drop it for one slot per core.")
            if slots < (1 if bubbles is None else 0):
                raise InvalidInput(f"slots must be at least 1, got {slots}.")
        number("slots_per_trial", slots_per_trial, "Give 1, 2, or a fraction such as 0.5.")
        if threads is not None:
            threads = whole("threads", threads, "Drop it for the usable cores divided by the slots.")
        gpus = _check_gpus(gpus)
        check_slots_per_trial(slots_per_trial, slots if bubbles is None else None)
        if threads is not None and threads < 1:
            raise InvalidInput(f"threads must be at least 1, got {threads}.")
        if slots is not None and gpus:
            raise InvalidInput("Give slots (of the CPU) or gpus, not both: each GPU is one slot.")
        self.slots_per_trial = slots_per_trial
        self._wanted_slots = slots
        self._wanted_threads = threads
        self._wanted_gpus = gpus
        self._wanted_bubbles = None if bubbles is None else os.fspath(bubbles)
        self._stages: dict[str, Stage] = {}
        self._clock = WallClock()
        self._mps = Mps()
        self._job: Job | None = None
        self._devices: dict[str, Device] | None = None
        self._visible: dict[str, str] = {}
        self._modules: tuple[str, ...] = ()
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """How it was made, not what it runs: a study's executor is kept with the study."""
        options: dict[str, Any] = {
            "slots_per_trial": self.slots_per_trial,
            "threads": self._wanted_threads,
            "gpus": self._wanted_gpus,
            "bubbles": self._wanted_bubbles,
            "shared": self._shared,
            "weight": self._weight,
        }
        return functools.partial(Local, self._wanted_slots, **options), ()

    def _reset(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._idle: dict[tuple[tuple[str, ...], int, str], list[_Worker]] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._by_trial: dict[int, _Ticket] = {}
        self._waiting: deque[_Ticket] = deque()
        self._events: list[Event] = []
        self._held: dict[str, float] = {}
        self._on: dict[str, list[_Worker]] = {}
        self._number = 0
        self._estimate_s: float | None = None
        self._mean_s = 0.0
        self._free: tuple[Free, ...] | None = None
        self._failed_starts = 0
        self._error: ExecutorError | None = None
        self._selector: selectors.BaseSelector | None = None
        self._scratch = contextlib.ExitStack()
        self._blob: IO[bytes] | None = None
        self._board: mmap.mmap | None = None
        self._board_file: IO[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    # -- the machine ------------------------------------------------------------------------------------

    def _machine(self) -> dict[str, Device]:
        if self._devices is None:
            self._devices = self._find_devices()
            self._free = None
        return self._devices

    def _find_devices(self) -> dict[str, Device]:
        cores = usable_cores()
        wanted = self._wanted_gpus
        gpus = [] if wanted == 0 or (wanted is None and self._wanted_slots is not None) else visible_gpus()
        if wanted is not None and wanted != 0:
            numbers = list(range(wanted)) if isinstance(wanted, int) else list(wanted)
            if any(number >= len(gpus) or number < 0 for number in numbers):
                raise Unsupported(
                    f"gpus = {wanted!r}: this process sees {len(gpus)} GPUs. Drop gpus, or 0 for none."
                )
        else:
            numbers = list(range(len(gpus)))
        devices: dict[str, Device] = {}
        if numbers:
            per_slot = self._wanted_threads or max(1, cores // len(numbers))
            for number in numbers:
                gpu = gpus[number]
                name = f"cuda:{number}"
                devices[name] = Device(name, gpu.kind, memory_bytes=gpu.memory_bytes, cores=per_slot)
                self._visible[name] = gpu.visible
        else:
            slots = cores if self._wanted_slots is None else self._wanted_slots
            per_slot = self._wanted_threads or max(1, cores // max(1, slots))
            for number in range(slots):
                name = f"cpu:{number}"
                devices[name] = Device(name, "cpu", cores=per_slot)
        if self._wanted_bubbles is not None:
            self._stages = lent_devices(self._wanted_bubbles)
            for name, stage in self._stages.items():
                devices[name] = Device(name, "bubble", cores=self._wanted_threads or 1)
                if stage.gpu is not None:
                    self._visible[name] = stage.gpu
        if self.slots_per_trial > len(devices):
            raise InvalidInput(
                f"slots_per_trial = {self.slots_per_trial} does not fit in {len(devices)} slots."
            )
        return devices

    @property
    def clock(self) -> Clock:
        """The wall clock."""
        return self._clock

    @property
    def slots(self) -> int:
        """CPU slots or GPUs."""
        return len(self._machine())

    @property
    def has_bubbles(self) -> bool:
        """Whether it was given a host job's bubbles."""
        return self._wanted_bubbles is not None

    def lent(self) -> Mapping[str, Lent]:
        """Its ephemeral devices, with how much of their time is lent now; empty without bubbles."""
        self._machine()
        return lent_now(self._stages)

    # -- opening and closing ----------------------------------------------------------------------------

    def prepare(self, work: Any) -> None:
        """Let the process that workers are forked from begin with its imports."""
        self._modules = needs(work)
        each = {device.cores * self.slots_per_trial for device in self._machine().values()}
        for threads in {max(1, int(cores + _EPSILON)) for cores in each}:
            nursery_for(thread_environment(threads), self._modules)

    def open(self, job: Job) -> None:
        """Pack the work; workers start when there is something to run."""
        if self._job is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        if not sys.executable or not hasattr(socket, "socketpair") or not hasattr(os, "fork"):
            raise Unsupported("Local needs a Python interpreter on Linux or macOS.")
        self.prepare(job.work)
        work = pack(job.work)
        try:
            cwd = os.getcwd()
        except OSError:
            cwd = str(job.files.absolute())
        facts = {
            "path": [os.path.abspath(entry) if entry == "" else entry for entry in sys.path],
            "argv": sys.argv,
            "cwd": cwd,
            "offset_s": self._clock.now_s() - time.monotonic(),
            "settings": settings_of(job),
        }
        head = pickle.dumps(facts, protocol=5)
        (job.files / "logs").mkdir(parents=True, exist_ok=True)
        for left in ("spilled", "meet"):  # of a driver that was killed
            shutil.rmtree(job.files / left, ignore_errors=True)
        self._reset()
        self._blob = self._scratch.enter_context(_scratch_file())
        self._blob.write(FRAME.pack(len(head)) + head + work)
        self._blob.flush()
        self._board_file = self._scratch.enter_context(_scratch_file())
        self._board_file.truncate(TICKET.size * _BOARD_SLOTS)
        self._board = mmap.mmap(self._board_file.fileno(), 0)
        self._selector = selectors.DefaultSelector()
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-E", _guardian.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._job = job
        if self._visible and job.options.get("sharing"):
            # Several processes on a GPU at once; where it can't be had, the GPU slices its time among them.
            self._mps.start(tuple(self._visible.values()))
        if self._pool is not None:
            self._pool.join()
            while not self._pool.mine:  # others have them all: the first that is given up is ours
                self._pool.update(list(self._machine()), (), time.monotonic())
                time.sleep(0.0 if self._pool.mine else _STEAL_S)
            self._free = None

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Start a worker for each device beside what the driver does; they import what the work needs."""
        # In a thread, for the process that workers are forked from may still be busy with its own imports.
        starting = threading.Thread(target=self._start_workers, name="penstock-start", daemon=True)
        starting.start()
        try:
            yield
        finally:
            starting.join()

    def _start_workers(self) -> None:
        if self._pool is not None or self._stages or self.slots_per_trial > 1:
            return  # who gets which devices, and how many, will be seen
        with contextlib.suppress(ExecutorError):  # whoever launches the first trial is told
            for name in self._machine():
                worker = self._spawn(*self._needs((Share(name, 1.0),)))
                worker.heard_s = self._clock.now_s()
                self._idle.setdefault(worker.key, []).append(worker)

    def close(self) -> None:
        """Kill all workers with all they have started."""
        if self._job is None:
            return
        self._job = None
        if self._pool is not None:
            self._pool.leave()
        workers = list(self._workers.values())
        if workers:
            _guardian.kill_sessions({worker.child.process.pid for worker in workers})
        for worker in workers:
            worker.child.process.kill()
            worker.child.process.wait()
            self._dismantle(worker)
        self._mps.stop()
        if self._selector is not None:
            self._selector.close()
        if self._board is not None:
            self._board.close()
        self._scratch.close()
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()
        self._reset()

    # -- sharing the machine ----------------------------------------------------------------------------

    def leaving(self) -> frozenset[str]:
        """Devices that other studies have a claim to: what runs there is to make room."""
        return frozenset() if self._pool is None else frozenset(self._pool.leaving)

    def _share_out(self) -> None:
        """Now and then, take and give devices."""
        now_s = time.monotonic()
        if self._pool is None or now_s - self._shared_out_s < _TICK_S:
            return
        self._shared_out_s = now_s
        busy = [name for name, on in self._on.items() if on]
        if not self._pool.update(list(self._machine()), busy, now_s):
            return
        self._free = None
        idle = [worker for workers in self._idle.values() for worker in workers]
        spare = len(idle) - max(0, len(self._pool.mine) - len(busy))
        for worker in sorted(idle, key=lambda each: each.heard_s)[: max(0, spare)]:
            self._idle[worker.key].remove(worker)  # its memory goes back with the device
            self._bury(worker)

    def _owns(self, name: str) -> bool:
        pool = self._pool
        return pool is None or (name in pool.mine and name not in pool.leaving)

    # -- what is free -----------------------------------------------------------------------------------

    def free(self) -> Sequence[Free]:
        """Devices with something free, or with room in the queue while trials are short."""
        if self._free is None:
            depth = self._depth()
            found: list[Free] = []
            for name, device in self._machine().items():
                if not self._owns(name):
                    continue
                fraction = max(0.0, 1.0 - self._held.get(name, 0.0))
                fraction = fraction if fraction > _EPSILON else 0.0
                backlog = 0
                if depth and name not in self._stages:
                    on = self._on.get(name, ())
                    if not on:
                        backlog = depth
                    elif len(on) == 1 and self._takes_more(on[0]):
                        backlog = max(0, depth + 1 - len(on[0].tickets))
                if fraction or backlog:
                    found.append(Free(device, fraction, backlog))
            self._free = tuple(found)
        return self._free

    def _depth(self) -> int:
        """How many placements to queue behind a running one, from how long the last ones took."""
        taken_s = self._estimate_s
        if taken_s is None:
            return 0
        if taken_s > 0.05:
            # Long ones among short ones (rungs, say): a few ahead, so that no worker waits for the journal; if a long
            # one comes to stand before them, an idle worker takes them over.
            return 0 if self._mean_s > 0.1 else 1 if self._mean_s > 0.025 else 2
        if taken_s > 0.005:
            return max(1, min(4, int(0.05 / taken_s)))
        return min(_MAX_BACKLOG, max(4, int(0.05 / max(taken_s, 1e-5))))

    @staticmethod
    def _takes_more(worker: _Worker) -> bool:
        shares = worker.shares
        alone = not worker.exclusive and not worker.crewed
        return alone and len(shares) == 1 and shares[0].fraction >= 1.0 - _EPSILON

    # -- launching --------------------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch]) -> None:
        """Hand placements to workers."""
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        tickets = [self._ticket(launch) for launch in launches]
        if tickets and self._pool is not None:
            self._pool.started()
        now_s = self._clock.now_s()
        for ticket in tickets:
            self._tickets[ticket.number] = ticket
            for trial in ticket.open:
                self._by_trial[trial] = ticket
            if not self._place(ticket, now_s):
                self._waiting.append(ticket)
        self._free = None

    def _ticket(self, launch: Launch) -> _Ticket:
        placement = launch.placement
        devices = self._machine()
        for share in placement.shares:
            if share.device not in devices:
                raise InvalidInput(
                    f"There is no device {share.device!r} here; there are {', '.join(devices)}."
                )
        if not placement.shares or not placement.segments:
            raise InvalidInput(f"A placement needs segments and shares, got {placement}.")
        if not spreads_over_workers(placement, len(placement.shares)):
            return self._made(launch, placement.shares, launch.facts)
        size, path = len(placement.shares), self._meeting()
        crew = [
            self._made(launch, (share,), {**launch.facts, "world": (rank, size, path)})
            for rank, share in enumerate(placement.shares)
        ]
        lead = crew[0]
        lead.crew = crew[1:]
        for ticket in lead.crew:
            ticket.lead = lead
        return lead

    def _meeting(self) -> str:
        """A file by which the workers of one trial find each other."""
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        folder = self._job.files.absolute() / "meet"
        folder.mkdir(exist_ok=True)
        return str(folder / f"{os.getpid()}-{self._number}")

    def _made(self, launch: Launch, shares: tuple[Share, ...], facts: Mapping[str, Any]) -> _Ticket:
        """The ticket for one worker."""
        placement = launch.placement
        gpus, threads = self._needs(shares)
        fraction = sum(share.fraction for share in shares) / len(shares)
        if fraction < 1.0 - _EPSILON:  # its weight among those that share its devices
            facts = {**facts, "fraction": fraction}
        if shares[0].device in self._stages:
            facts = in_bubble(facts, self._stages[shares[0].device])
        names = tuple(f"cuda:{index}" for index in range(len(gpus))) or ("cpu",)
        specs = specs_of(launch)
        self._number += 1
        try:
            message = pickle.dumps((self._number, specs, names, threads, dict(facts)), protocol=5)
        except Exception as error:
            for spec in specs:
                raise check_config(spec[0], spec[1]) from error
            raise
        if len(message) > MESSAGE_BYTES:
            message = self._spill(message)
        epochs = {s.trial.id: known for s, known in zip(placement.segments, launch.known, strict=True)}
        return _Ticket(self._number, launch, message, shares, set(epochs), epochs)

    def _spill(self, message: bytes) -> bytes:
        if self._job is None:
            raise ExecutorError("The executor is not open.")
        folder = self._job.files.absolute() / "spilled"
        folder.mkdir(exist_ok=True)
        path = folder / f"{self._number}.pickle"
        path.write_bytes(message)
        return SPILLED + os.fsencode(path)

    def _needs(self, shares: tuple[Share, ...]) -> tuple[tuple[str, ...], int]:
        devices = self._machine()
        cores = sum(devices[share.device].cores * share.fraction for share in shares)
        gpus = tuple(self._visible[share.device] for share in shares if share.device in self._visible)
        return gpus, max(1, int(cores + _EPSILON))

    def _fits(self, ticket: _Ticket) -> bool:
        exclusive = ticket.launch.placement.exclusive
        for share in ticket.shares:
            on = self._on.get(share.device)
            if on and (exclusive or any(worker.exclusive for worker in on)):
                return False
            if self._held.get(share.device, 0.0) + share.fraction > 1.0 + _EPSILON:
                return False
        return True

    def _place(self, ticket: _Ticket, now_s: float) -> bool:
        if ticket.crew:
            if not all(self._fits(member) for member in (ticket, *ticket.crew)):
                return False
            for member in (ticket, *ticket.crew):
                self._seat(member, now_s).crewed = True
            return True
        if self._fits(ticket):
            self._seat(ticket, now_s)
            return True
        if len(ticket.shares) != 1 or ticket.launch.placement.exclusive or not self._depth():
            return False
        share = ticket.shares[0]
        on = self._on.get(share.device, ())
        if len(on) != 1 or share.fraction < 1.0 - _EPSILON or not self._takes_more(on[0]):
            return False
        if len(on[0].tickets) > _MAX_BACKLOG or on[0].verdict:
            return False
        self._push(on[0], ticket)
        return True

    def _seat(self, ticket: _Ticket, now_s: float) -> _Worker:
        """Give a ticket a worker of its own on its shares, which are free."""
        gpus, threads = self._needs(ticket.shares)
        stage = ticket.shares[0].device if ticket.shares[0].device in self._stages else ""
        idle = self._idle.get((gpus, threads, stage))
        worker = idle.pop() if idle else self._spawn(gpus, threads)
        worker.stage = stage
        worker.shares = ticket.shares
        worker.exclusive = ticket.launch.placement.exclusive
        for share in ticket.shares:
            self._held[share.device] = self._held.get(share.device, 0.0) + share.fraction
            self._on.setdefault(share.device, []).append(worker)
        worker.heard_s = now_s
        self._push(worker, ticket)
        return worker

    def _push(self, worker: _Worker, ticket: _Ticket) -> None:
        worker.tickets[ticket.number] = ticket
        ticket.worker = worker
        if worker.overflow:
            worker.overflow.append(ticket.message)
            return
        try:
            worker.child.queue.send(ticket.message)
        except BlockingIOError:
            worker.overflow.append(ticket.message)
        except OSError:
            pass  # it is dead; its end is noticed in poll, and the ticket moves on

    # -- workers ----------------------------------------------------------------------------------------

    def _spawn(self, gpus: tuple[str, ...], threads: int) -> _Worker:
        if self._job is None or self._blob is None or self._board_file is None or self._selector is None:
            raise ExecutorError("The executor is not open.")
        self._retire()
        index = next(number for number in range(_BOARD_SLOTS) if number not in self._workers)
        log = self._job.files / "logs" / f"worker-{index}.log"
        environment = thread_environment(threads)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            environment |= self._mps.environment()
        elif self._wanted_gpus == 0:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        files = (self._blob.fileno(), self._board_file.fileno())
        try:
            child = start_child(
                environment,
                log,
                files,
                index,
                fork=functools.partial(_forked, environment, self._modules, index),
            )
        except OSError as error:
            raise ExecutorError(f"A worker process can't be started: {error}.") from error
        child.queue.setblocking(False)
        worker = _Worker(index, gpus, threads, child)
        self._workers[index] = worker
        self._selector.register(child.control, selectors.EVENT_READ, worker)
        if child.pidfd is not None:
            self._selector.register(child.pidfd, selectors.EVENT_READ, worker)
        self._tell_guard(b"+%d\n" % child.process.pid)
        return worker

    def _tell_guard(self, line: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._guard.stdin.fileno(), line)

    def _retire(self) -> None:
        """Let go of the longest idle worker when there are more than slots."""
        idle = [worker for workers in self._idle.values() for worker in workers]
        if len(idle) >= max(2, len(self._machine())):
            oldest = min(idle, key=lambda worker: worker.heard_s)
            self._idle[oldest.key].remove(oldest)
            self._bury(oldest)

    def _dismantle(self, worker: _Worker) -> None:
        if self._selector is not None:
            for item in (worker.child.control, worker.child.pidfd):
                if item is not None:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(item)
        worker.child.close()
        self._workers.pop(worker.index, None)

    def _bury(self, worker: _Worker) -> None:
        """End a worker's whole session, then its process, then our ends of its pipes."""
        _guardian.kill_sessions(
            {worker.child.process.pid}
        )  # before it is reaped: until then the number is its own
        worker.child.process.kill()
        worker.child.process.wait()
        self._tell_guard(b"-%d\n" % worker.child.process.pid)
        self._dismantle(worker)

    def _release(self, worker: _Worker) -> None:
        for share in worker.shares:
            left = self._held[share.device] - share.fraction
            self._on[share.device].remove(worker)
            self._held[share.device] = left if self._on[share.device] else 0.0
        worker.shares = ()
        worker.exclusive = worker.crewed = False
        self._free = None

    def _take_back(self, worker: _Worker, most: int | None = None) -> list[_Ticket]:
        """Tickets out of a worker's queue that it has not begun, in order."""
        found: list[_Ticket] = []
        buffer = bytearray(MESSAGE_BYTES)
        while most is None or len(found) < most:
            try:
                length = worker.child.queue_theirs.recv_into(buffer, MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, OSError):
                break
            message = bytes(buffer[:length])
            ticket = self._of_message(message, worker)
            if ticket is not None:
                found.append(ticket)
            if length == 0:
                break
        while worker.overflow and (most is None or len(found) < most):
            ticket = self._of_message(worker.overflow.popleft(), worker)
            if ticket is not None:
                found.append(ticket)
        return found

    @staticmethod
    def _of_message(message: bytes, worker: _Worker) -> _Ticket | None:
        number = next((n for n, ticket in worker.tickets.items() if ticket.message == message), None)
        return None if number is None else worker.tickets.pop(number)

    # -- stopping ---------------------------------------------------------------------------------------

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """Tell workers to end trials at their next report; what has not begun ends now."""
        wanted = {trial: ticket for trial in trials if (ticket := self._by_trial.get(trial)) is not None}
        if not wanted:
            return
        # Of a crew all must begin before one can end: they are told when they have.
        numbers = {ticket.number for ticket in wanted.values() if not ticket.crew}
        for worker in list(self._workers.values()):
            if not numbers.isdisjoint(worker.tickets):
                for ticket in self._take_back(worker):
                    if ticket.number in numbers:
                        self._waiting.append(ticket)  # picked out below
                    else:
                        self._push(worker, ticket)
        waiting = {ticket.number for ticket in self._waiting}
        now_s = self._clock.now_s()
        for trial, ticket in wanted.items():
            if ticket.number in waiting:
                status = TrialStatus.PAUSED if keep else TrialStatus.STOPPED
                self._end(ticket, Ended(now_s, trial, status, ticket.epochs[trial], reason, kept=keep))
                continue
            if ticket.target:
                ticket.asked = reason, keep
            for worker in self._workers.values():
                if ticket.number in worker.tickets:
                    data = pickle.dumps((ticket.number, trial, reason, keep), protocol=5)
                    worker.outbox += FRAME.pack(len(data)) + data
                    self._send_out(worker)
        self._waiting = deque(ticket for ticket in self._waiting if ticket.open)
        for worker in list(self._workers.values()):
            if worker.shares and not worker.tickets:
                self._rest(worker)
        self._free = None

    # -- changing shares --------------------------------------------------------------------------------

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Stop a trial's workers at its next report, and let it go on from its checkpoint on other shares."""
        ticket = self._by_trial.get(trial)
        if ticket is None or ticket.target or ticket.worker is None or not shares:
            return
        placement = ticket.launch.placement
        if placement.max_devices < len(shares) or len(placement.segments) > 1:
            raise InvalidInput(f"Trial {trial} can't spread over {len(shares)} devices.")
        now = {share.device for member in (ticket, *ticket.crew) for share in member.shares}
        claims = tuple(share for share in shares if share.device not in now)
        for share in claims:
            if self._held.get(share.device, 0.0) + share.fraction > 1.0 + _EPSILON:
                raise ExecutorError(f"{share.fraction:g} of {share.device} is asked for, but is not free.")
        for share in claims:
            self._held[share.device] = self._held.get(share.device, 0.0) + share.fraction
        ticket.target, ticket.claims = tuple(shares), claims
        data = pickle.dumps((ticket.number, trial, "other shares", True), protocol=5)
        ticket.worker.outbox += FRAME.pack(len(data)) + data
        self._send_out(ticket.worker)
        self._free = None

    def _unclaim(self, ticket: _Ticket) -> None:
        for share in ticket.claims:
            self._held[share.device] = max(0.0, self._held[share.device] - share.fraction)
        ticket.target = ticket.claims = ()
        self._free = None

    def _regroup(self, lead: _Ticket) -> None:
        """Once all its workers have stopped, let the trial go on with its new shares."""
        if not lead.halted or any(member.open for member in lead.crew):
            return
        target, launch, now_s = lead.target, lead.launch, self._clock.now_s()
        self._unclaim(lead)
        for member in (lead, *lead.crew):
            self._let_go(member)
        trial = launch.placement.segments[0].trial.id
        if lead.asked is not None:
            reason, keep = lead.asked
            status = TrialStatus.PAUSED if keep else TrialStatus.STOPPED
            self._end(lead, Ended(now_s, trial, status, lead.epochs[trial], reason, kept=keep))
            return
        placement = replace(launch.placement, shares=target)
        ticket = self._ticket(replace(launch, placement=placement, known=(lead.epochs[trial],)))
        ticket.seen, ticket.began_s, ticket.drawn = True, lead.began_s, lead.drawn
        del self._tickets[lead.number]
        self._tickets[ticket.number] = self._by_trial[trial] = ticket
        self._events.append(Resized(now_s, trial, target))
        if not self._place(ticket, now_s):
            self._waiting.appendleft(ticket)

    def _let_go(self, ticket: _Ticket) -> None:
        """A ticket is done: its worker is free for others."""
        worker = ticket.worker
        if worker is None or worker.tickets.pop(ticket.number, None) is None:
            return
        if worker.shares and not worker.tickets:
            self._rest(worker)

    def _disband(self, lead: _Ticket) -> None:
        """The lead is over for good: what was kept for a change is free, and so is who has followed it."""
        if lead.target:
            self._unclaim(lead)
        for member in lead.crew:
            if not member.open:
                self._let_go(member)

    def _send_out(self, worker: _Worker) -> None:
        try:
            while worker.outbox:
                del worker.outbox[: worker.child.control.send(worker.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            worker.outbox.clear()

    # -- events -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for workers."""
        if self._selector is None:
            events, self._events = self._events, []
            return events
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._share_out()
        first = True
        while True:
            self._pump()
            if self._error is not None and not self._events:
                error, self._error = self._error, None
                raise error
            left = None if deadline is None else deadline - time.monotonic()
            over = left is not None and left <= 0
            if self._events or not self._tickets or (over and not first):
                if not self._events and first:
                    self._listen(0.0)
                break
            self._listen(self._patience(left))
            if self._events and (left is None or left > _GATHER_S) and self._well_fed():
                time.sleep(_GATHER_S)  # nobody waits for us: take more at a time
                self._listen(0.0)
            first = False
            self._check()
        events, self._events = self._events, []
        return events

    def _well_fed(self) -> bool:
        """Whether every busy worker has enough queued to do without us for a moment."""
        return all(len(worker.tickets) > 16 for worker in self._workers.values() if worker.tickets)

    def _patience(self, left: float | None) -> float:
        """How long to wait at most before looking after hanging trainings and idle devices."""
        wait = _TICK_S if left is None else max(0.0, min(_TICK_S, left))
        timeout_s = None if self._job is None else self._job.timeout_s
        if timeout_s is not None:
            wait = min(wait, max(0.01, timeout_s / 10))
        if any(len(worker.tickets) > 1 or worker.overflow for worker in self._workers.values()):
            wait = min(wait, _STEAL_S)
        return wait

    def _listen(self, wait_s: float) -> None:
        if self._selector is None:
            return
        dead: list[_Worker] = []
        for key, _ in self._selector.select(wait_s):
            worker: _Worker = key.data
            if key.fileobj is worker.child.control:
                if not self._receive(worker) and worker.child.pidfd is None:
                    dead.append(worker)
            else:
                dead.append(worker)
        for worker in dead:
            if worker.index in self._workers and self._workers[worker.index] is worker:
                self._died(worker)

    def _receive(self, worker: _Worker) -> bool:
        """Read all there is; False at the end of the stream."""
        child = worker.child
        for frame in child.frames():
            self._take(worker, pickle.loads(frame))
        if child.silent and child.pidfd is not None and self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.control)  # its pidfd tells when it is over
        return not child.silent

    def _take(self, worker: _Worker, messages: list[tuple[Any, ...]]) -> None:
        worker.heard_s = self._clock.now_s()
        events, tickets = self._events, worker.tickets
        for message in messages:
            kind = message[0]
            if kind == "y":
                worker.ready = True
                self._failed_starts = 0
                continue
            if kind == "x":
                worker.broken = message[1], message[2]
                continue
            ticket = tickets.get(message[1])
            trial: int = message[2]
            if ticket is None or trial not in ticket.open:
                continue
            time_s: float = message[3]
            if ticket.lead is not None:
                if kind == "e":
                    ticket.open.clear()
                    if ticket.lead.target:
                        self._regroup(ticket.lead)
                    else:
                        self._let_go(ticket)
                continue
            event = to_event(message, time_s)
            if event is None:
                placement = ticket.launch.placement
                if not ticket.seen or not placement.max_devices > 1:  # after a change it has started long ago
                    shares = placement.shares if ticket.crew else ticket.shares
                    fused = fused_of(placement)
                    events.append(Started(time_s, trial, message[4], shares, placement.attempt, fused))
                    ticket.began_s = time_s
                ticket.seen = True
            elif isinstance(event, Ended):
                ended = event
                if ticket.target and ended.kept:
                    ticket.halted = True
                    ticket.drawn = also_drew(ticket.drawn, ended).energy
                    self._regroup(ticket)
                    continue
                if ended.status is TrialStatus.FAILED and self._abandoned(ticket):
                    ended = replace(ended, lost=True)
                self._end(ticket, ended)
                if ticket.crew or ticket.target:
                    self._disband(ticket)
                if not ticket.open:
                    del tickets[ticket.number]
                    self._learn(time_s - ticket.began_s)
                    self._free = None
            else:
                if isinstance(event, Reported):
                    ticket.epochs[trial] = max(ticket.epochs[trial], event.epoch)
                events.append(event)
        if worker.shares and not tickets:
            self._rest(worker)

    def _learn(self, taken_s: float) -> None:
        """Follow the time segments take: up at once, down slowly, so that nothing queues behind a long one."""
        old = self._estimate_s
        self._mean_s = taken_s if old is None else 0.8 * self._mean_s + 0.2 * taken_s
        self._estimate_s = taken_s if old is None else max(taken_s, 0.9 * old + 0.1 * taken_s)

    def _end(self, ticket: _Ticket, ended: Ended) -> None:
        self._events.append(also_drew(ticket.drawn, ended))
        ticket.open.discard(ended.trial)
        if self._by_trial.get(ended.trial) is ticket:
            del self._by_trial[ended.trial]
        if not ticket.open:
            self._tickets.pop(ticket.number, None)
            if ticket.message[:1] == SPILLED:
                with contextlib.suppress(OSError):
                    os.unlink(os.fsdecode(ticket.message[1:]))

    @staticmethod
    def _abandoned(lead: _Ticket) -> bool:
        """Whether a worker of its crew has died, which makes the others fail."""
        deadline_s = time.monotonic() + _FAREWELL_S
        workers = [member.worker for member in lead.crew if member.worker is not None]
        while workers:
            for worker in workers:
                if worker.child.is_over():
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return False

    def _rest(self, worker: _Worker) -> None:
        """It has nothing to do: its devices are free."""
        self._release(worker)
        self._idle.setdefault(worker.key, []).append(worker)

    def _pump(self) -> None:
        """Move what can move: overflowing queues, waiting tickets, tickets queued behind a long one."""
        for worker in self._workers.values():
            if worker.outbox:
                self._send_out(worker)
            while worker.overflow:
                try:
                    worker.child.queue.send(worker.overflow[0])
                except OSError:
                    break
                worker.overflow.popleft()
        if self._waiting:
            now_s = self._clock.now_s()
            blocked: deque[_Ticket] = deque()
            while self._waiting:
                ticket = self._waiting.popleft()
                if not self._place(ticket, now_s):
                    blocked.append(ticket)
            self._waiting = blocked
            self._free = None
        elif len(self._tickets) > 1:
            self._steal()

    def _steal(self) -> None:
        """Give idle devices what waits behind a segment that takes longer than expected."""
        # Not one that is kept for a trial which is to spread: it may be the very one that waits.
        lonely = [
            name
            for name in self._machine()
            if not self._on.get(name) and not self._held.get(name, 0.0) and self._owns(name)
        ]
        if not lonely:
            return
        now_s = self._clock.now_s()
        for worker in list(self._workers.values()):
            if len(worker.tickets) < 2 or now_s - worker.heard_s < _STEAL_S or len(worker.shares) != 1:
                continue
            kind = self._machine()[worker.shares[0].device].kind
            for name in [name for name in lonely if self._machine()[name].kind == kind]:
                taken = self._take_back(worker, 1)
                if not taken:
                    break
                ticket = taken[0]
                ticket.shares = (Share(name, ticket.shares[0].fraction),)
                lonely.remove(name)
                self._free = None
                if not self._place(ticket, now_s):
                    self._waiting.append(ticket)

    # -- faults -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Kill workers whose training reports nothing; notice deaths where there is no pidfd."""
        if self._job is None:
            return
        timeout_s, now_s = self._job.timeout_s, self._clock.now_s()
        for worker in list(self._workers.values()):
            if worker.child.pidfd is None and worker.child.process.poll() is not None:
                self._died(worker)
            elif (
                timeout_s is not None
                and worker.tickets
                and worker.ready
                and not worker.verdict
                and not all(ticket.lead is not None for ticket in worker.tickets.values())
                and now_s - worker.heard_s > timeout_s * max(len(t.open) for t in worker.tickets.values())
            ):
                heard_s = worker.heard_s
                self._receive(worker)
                if worker.heard_s != heard_s:
                    continue  # it has reported, while it was this process that stood still
                worker.verdict = f"no report for {timeout_s:g} s (timeout_s)"
                with contextlib.suppress(OSError):
                    os.kill(worker.child.process.pid, signal.SIGKILL)

    def _died(self, worker: _Worker) -> None:
        self._receive(worker)  # what it said before
        current = 0 if self._board is None else TICKET.unpack_from(self._board, TICKET.size * worker.index)[0]
        back = self._take_back(worker)
        grabbed = list(worker.tickets.values())
        worker.tickets = {}
        if worker.shares:
            self._release(worker)
        elif worker in self._idle.get(worker.key, ()):
            self._idle[worker.key].remove(worker)
        self._bury(worker)
        now_s = self._clock.now_s()
        if not worker.ready:
            self._start_failed(worker)
        grabbed += [ticket for ticket in back if ticket.crew or ticket.lead is not None]
        back = [ticket for ticket in back if not ticket.crew and ticket.lead is None]
        for ticket in grabbed:
            if ticket.lead is not None:
                self._follower_died(ticket)
                continue
            if ticket.number != current and not ticket.seen and not ticket.crew:
                back.insert(0, ticket)  # taken, but not begun
                continue
            fate = worker.verdict or f"its worker died: {how(worker.child.process.returncode)}"
            if not ticket.seen:
                for trial in sorted(ticket.open):
                    self._events.append(
                        Started(now_s, trial, 0, ticket.shares, ticket.launch.placement.attempt)
                    )
            for trial in sorted(ticket.open):
                ended = Ended(
                    now_s,
                    trial,
                    TrialStatus.FAILED,
                    ticket.epochs[trial],
                    fate,
                    "" if worker.verdict else worker.child.tail(),
                    lost=not worker.verdict,
                )
                self._end(ticket, ended)
            self._disband(ticket)
        self._waiting.extendleft(sorted(back, key=lambda ticket: -ticket.number))
        self._free = None

    def _follower_died(self, ticket: _Ticket) -> None:
        """Without one of its workers a trial can't go on: it is lost, whatever the lead still does."""
        lead, running = ticket.lead, bool(ticket.open)
        ticket.open.clear()
        if lead is None or not lead.open:
            return
        if lead.halted:
            self._regroup(lead)  # it had nothing left to do
        elif running and lead.worker is not None and lead.number in lead.worker.tickets:
            with contextlib.suppress(OSError):
                os.kill(lead.worker.child.process.pid, signal.SIGKILL)

    def _start_failed(self, worker: _Worker) -> None:
        self._failed_starts += 1
        if worker.broken is None and self._failed_starts < _START_TRIES:
            return
        if worker.broken is not None:
            why, detail = worker.broken
        else:
            why, detail = how(worker.child.process.returncode), worker.child.tail()
        self._error = ExecutorError(
            f"Workers can't be started: {why}. The training function must be importable in a new process "
            f"(log: {worker.child.log}).\n{detail}".rstrip()
        )


def _check_gpus(gpus: Any) -> int | tuple[int, ...] | None:
    """How many GPUs, or which; an error names what is neither."""
    remedy = "Give how many, or a list of their numbers such as [0, 1]; 0 for none."
    if gpus is None:
        return None
    if isinstance(gpus, Sequence) and not isinstance(gpus, str | bytes):
        chosen = tuple(whole("gpus", each, remedy) for each in gpus)
        if any(each < 0 for each in chosen) or len(set(chosen)) < len(chosen):
            raise InvalidInput(f"gpus takes each GPU's number once, from 0 on, got {gpus!r}. {remedy}")
        return chosen
    count = whole("gpus", gpus, remedy)
    if count < 0:
        raise InvalidInput(f"gpus must be at least 0, got {count}. {remedy}")
    return count


@contextlib.contextmanager
def _scratch_file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def _forked(
    environment: Mapping[str, str], modules: Sequence[str], index: int, log: int, fds: Sequence[int]
) -> Forked | None:
    """A worker out of the nursery; None if it takes a new interpreter."""
    for _ in range(2):  # one that just ended, having waited long enough, is replaced
        nursery = nursery_for(environment, modules)
        if nursery is None:
            return None
        try:
            return nursery.fork(environment, log, fds, (index, os.getpid()))
        except OSError:
            drop(nursery)
    return None
