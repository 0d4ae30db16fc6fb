"""The local executor: warm worker processes on this machine's CPU cores or GPUs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from penstock.core import Clock, Ended, Event, Free, Share, TrialStatus, WallClock
from penstock.core.check import number, whole
from penstock.core.errors import ExecutorError, InvalidInput, Unsupported
from penstock.execute._base import Executor, Job, Launch
from penstock.execute._book import ORDER, Book, Flight
from penstock.execute._bubbles import lent_now
from penstock.execute._child import how, thread_environment
from penstock.execute._crew import Crew
from penstock.execute._errands import Dispatch, Errand
from penstock.execute._holdings import EPSILON
from penstock.execute._mps import Mps
from penstock.execute._nursery import needs, nursery_for
from penstock.execute._pace import MAX_BACKLOG, Pace
from penstock.execute._pool import Pool, usual_folder
from penstock.execute._ship import pack
from penstock.execute._site import Site, check_gpus, look
from penstock.execute._watch import TICK_S, Starts, patience_s
from penstock.execute._wire import check_slots_per_trial, settings_of, to_event, whereabouts
from penstock.execute._workers import Worker, Workers
from penstock.plan import Lent
from penstock.train._elastic import by_threads

_STEAL_S = 0.01
_GATHER_S = 0.001


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
        self._shared_out_s = -TICK_S
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
        gpus = check_gpus(gpus)
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
        self._clock = WallClock()
        self._mps = Mps()
        self._job: Job | None = None
        self._found: Site | None = None
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
        self._book = Book()
        self._pace = Pace()
        self._workers: Workers | None = None
        self._dispatch: Dispatch | None = None
        self._errands: dict[int, tuple[Errand, ...]] = {}  # by flight, the lead's first
        self._failing: dict[int, Flight] = {}  # of crews
        self._parting: list[tuple[Crew[Ended], Errand]] = []  # who still runs after the lead has ended well
        self._on: dict[str, list[Worker]] = {}
        self._free: tuple[Free, ...] | None = None
        self._starts = Starts()
        self._error: ExecutorError | None = None

    # -- the machine ------------------------------------------------------------------------------------

    @property
    def _site(self) -> Site:
        """This machine, looked at when it is first needed."""
        if self._found is None:
            wanted = self._wanted_slots, self._wanted_threads, self._wanted_gpus, self._wanted_bubbles
            self._found = look(*wanted, self.slots_per_trial)
        return self._found

    @property
    def clock(self) -> Clock:
        """The wall clock."""
        return self._clock

    @property
    def slots(self) -> int:
        """CPU slots or GPUs."""
        return len(self._site.devices)

    @property
    def has_bubbles(self) -> bool:
        """Whether it was given a host job's bubbles."""
        return self._wanted_bubbles is not None

    def lent(self) -> Mapping[str, Lent]:
        """Its ephemeral devices, with how much of their time is lent now; empty without bubbles."""
        return lent_now(self._site.stages)

    # -- opening and closing ----------------------------------------------------------------------------

    def prepare(self, work: Any) -> None:
        """Let the process that workers are forked from begin with its imports."""
        self._modules = needs(work)
        each = {device.cores * self.slots_per_trial for device in self._site.devices.values()}
        for threads in {max(1, int(cores + EPSILON)) for cores in each}:
            nursery_for(thread_environment(threads), self._modules)

    def open(self, job: Job) -> None:
        """Pack the work; workers start when there is something to run."""
        if self._job is not None:
            raise ExecutorError("This executor is open already: one executor serves one study at a time.")
        if not sys.executable or not hasattr(socket, "socketpair") or not hasattr(os, "fork"):
            raise Unsupported("Local needs a Python interpreter on Linux or macOS.")
        self.prepare(job.work)
        work = pack(job.work)
        path, argv, cwd = whereabouts(job.files)
        facts = {
            "path": path,
            "argv": argv,
            "cwd": cwd,
            "offset_s": self._clock.now_s() - time.monotonic(),
            "settings": settings_of(job),
        }
        (job.files / "logs").mkdir(parents=True, exist_ok=True)
        for left in ("spilled", "meet"):  # of a driver that was killed
            shutil.rmtree(job.files / left, ignore_errors=True)
        self._reset()
        self._workers = Workers(job.files, facts, work, self._modules)
        kinds = [device.kind for device in self._site.devices.values()]
        threads = by_threads(job.work, kinds, job.options.get("spread", "threads"))
        self._dispatch = Dispatch(job.files, self._site, threads=threads)
        self._job = job
        if self._site.visible and job.options.get("sharing"):
            # Several processes on a GPU at once; where it can't be had, the GPU slices its time among them.
            self._mps.start(tuple(self._site.visible.values()))
        if self._pool is not None:
            self._pool.join()
            while not self._pool.mine:  # others have them all: the first that is given up is ours
                self._pool.update(list(self._site.devices), (), time.monotonic())
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
        if self._pool is not None or self._site.stages or self.slots_per_trial > 1 or self._workers is None:
            return  # who gets which devices, and how many, will be seen
        with contextlib.suppress(ExecutorError):  # whoever launches the first trial is told
            for name in self._site.devices:
                worker = self._start(self._workers, (Share(name, 1.0),))
                worker.heard_s = self._clock.now_s()
                self._workers.rest(worker)

    def close(self) -> None:
        """Kill all workers with all they have started."""
        if self._job is None:
            return
        self._job = None
        if self._pool is not None:
            self._pool.leave()
        if self._workers is not None:
            self._workers.close()
        self._mps.stop()
        self._reset()

    # -- sharing the machine ----------------------------------------------------------------------------

    def leaving(self) -> frozenset[str]:
        """Devices that other studies have a claim to: what runs there is to make room."""
        return frozenset() if self._pool is None else frozenset(self._pool.leaving)

    def _share_out(self, workers: Workers) -> None:
        """Now and then, take and give devices."""
        now_s = time.monotonic()
        if self._pool is None or now_s - self._shared_out_s < TICK_S:
            return
        self._shared_out_s = now_s
        held = self._book.holdings  # also what is kept for a trial that is to spread
        busy = [name for name in self._site.devices if held.free(name) < 1.0]
        if not self._pool.update(list(self._site.devices), busy, now_s):
            return
        self._free = None
        # The memory of those that are idle goes back with the devices.
        workers.trim(max(0, len(self._pool.mine) - len(busy)))

    def _owns(self, name: str) -> bool:
        pool = self._pool
        return pool is None or (name in pool.mine and name not in pool.leaving)

    # -- what is free -----------------------------------------------------------------------------------

    def free(self) -> Sequence[Free]:
        """Devices with something free, or with room in the queue while trials are short."""
        if self._free is None:
            depth, held = self._pace.depth, self._book.holdings
            found: list[Free] = []
            for name, device in self._site.devices.items():
                if not self._owns(name):
                    continue
                fraction, backlog = held.free(name), 0
                if depth and name not in self._site.stages:
                    on = self._on.get(name, ())
                    if not on:
                        backlog = depth
                    elif len(on) == 1 and self._takes_more(on[0]):
                        backlog = max(0, depth + 1 - len(on[0].errands))
                if fraction or backlog:
                    found.append(Free(device, fraction, backlog))
            self._free = tuple(found)
        return self._free

    @staticmethod
    def _takes_more(worker: Worker) -> bool:
        shares = worker.shares
        alone = not worker.exclusive and not worker.crewed
        return alone and len(shares) == 1 and shares[0].fraction >= 1.0 - EPSILON

    # -- launching --------------------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch]) -> None:
        """Hand placements to workers."""
        if self._dispatch is None:
            raise ExecutorError("The executor is not open.")
        made, devices = [], self._site.devices
        for launch in launches:
            for share in launch.placement.shares:
                if share.device not in devices:
                    raise InvalidInput(
                        f"There is no device {share.device!r} here; there are {', '.join(devices)}."
                    )
            flight = self._book.flight(launch)
            made.append((flight, self._dispatch.errands(flight)))
        if made and self._pool is not None:
            self._pool.started()
        now_s = self._clock.now_s()
        for flight, errands in made:
            self._book.add(flight)
            self._errands[flight.number] = errands
            if not self._place(flight, now_s):
                self._book.waiting.append(flight)
        self._free = None

    def _place(self, flight: Flight, now_s: float) -> bool:
        """Hand a flight to workers on its shares, or to one that is busy there with short ones."""
        errands, exclusive = self._errands[flight.number], flight.exclusive
        if self._book.holdings.fits(flight.shares, exclusive=exclusive):
            for errand in errands:
                self._seat(errand, now_s)
            return True
        if len(flight.shares) != 1 or exclusive or not self._pace.depth:
            return False
        share = flight.shares[0]
        on = self._on.get(share.device, ())
        if len(on) != 1 or share.fraction < 1.0 - EPSILON or not self._takes_more(on[0]):
            return False
        if len(on[0].errands) > MAX_BACKLOG or on[0].verdict:
            return False
        self._push(on[0], errands[0])
        return True

    def _seat(self, errand: Errand, now_s: float) -> None:
        """Give an errand a worker of its own on its shares, which are free."""
        workers, shares = self._workers, errand.shares
        if workers is None:
            raise ExecutorError("The executor is not open.")
        stage = self._site.stage(shares)
        # One that trains a spread trial by threads is like any other: it is told with the errand how many it may use.
        seat = shares[:1] if errand.flight.launch.placement.max_devices > 1 else shares
        worker = workers.resting((*self._site.needs(seat), stage)) or self._start(workers, seat)
        worker.stage = stage
        worker.shares = shares
        worker.exclusive = errand.flight.exclusive
        worker.crewed = errand.crew is not None
        self._book.holdings.hold(shares, exclusive=worker.exclusive)
        for share in shares:
            self._on.setdefault(share.device, []).append(worker)
        worker.heard_s = now_s
        self._push(worker, errand)

    def _push(self, worker: Worker, errand: Errand) -> None:
        flight = errand.flight
        worker.push(errand)
        flight.sent = True
        if flight.target:  # another worker was told
            self._tell_to_change(errand)
        if flight.asked and errand.rank == 0:
            for trial in sorted(flight.open & flight.asked.keys()):  # and so it was of this
                reason, keep = flight.asked[trial]
                worker.tell_to_stop(errand, trial, reason, keep=keep)

    def _start(self, workers: Workers, shares: tuple[Share, ...]) -> Worker:
        """A new worker, in place of the longest idle one where there are more than slots."""
        workers.trim(max(2, len(self._site.devices)) - 1)
        gpus, threads = self._site.needs(shares)
        environment: dict[str, str] = {}
        if gpus:
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **self._mps.environment()}
        elif self._wanted_gpus == 0:
            environment = {"CUDA_VISIBLE_DEVICES": ""}
        return workers.start(gpus, threads, environment)

    def _release(self, worker: Worker) -> None:
        """Its devices are free."""
        self._book.holdings.release(worker.shares, exclusive=worker.exclusive)
        for share in worker.shares:
            self._on[share.device].remove(worker)
        worker.shares = ()
        worker.exclusive = worker.crewed = False
        self._free = None

    def _rest(self, worker: Worker) -> None:
        """It has nothing to do."""
        self._release(worker)
        if self._workers is not None:
            self._workers.rest(worker)

    def _let_go(self, errand: Errand) -> None:
        """An errand is done: its worker is free for others."""
        errand.close()
        worker = errand.worker
        if worker is None or worker.errands.pop(errand.number, None) is None:
            return
        if worker.shares and not worker.errands:
            self._rest(worker)

    def _finish(self, flight: Flight) -> None:
        """A flight is over. Workers that still train with it are let go when they end."""
        for errand in self._errands.pop(flight.number):
            if errand.crew is None or errand.rank not in errand.crew.running:
                self._let_go(errand)
        self._free = None

    # -- stopping ---------------------------------------------------------------------------------------

    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """Tell workers to end trials at their next report; what has not begun ends now."""
        wanted = {trial: flight for trial in trials if (flight := self._book.of(trial)) is not None}
        if not wanted or self._workers is None:
            return
        # Of a crew all must begin before one can end: they are told when they have.
        alone = {f.number for f in wanted.values() if len(self._errands[f.number]) == 1}
        for worker in self._workers.by_index.values():
            if any(errand.flight.number in alone for errand in worker.errands.values()):
                for errand in worker.take_back():
                    if errand.flight.number in alone:
                        errand.flight.sent = False
                        self._book.waiting.append(errand.flight)  # picked out below
                    else:
                        self._push(worker, errand)
        now_s = self._clock.now_s()
        for trial, flight in wanted.items():
            if not flight.sent:
                self._book.drop(flight, trial, now_s, reason, keep=keep)
                if not flight.open:
                    self._finish(flight)
                elif self._dispatch is not None:
                    for errand in self._errands[flight.number]:
                        errand.close()
                    self._errands[flight.number] = self._dispatch.errands(flight)
                continue
            flight.asked.setdefault(trial, (reason, keep))
            lead = self._errands[flight.number][0]
            if lead.worker is not None:
                lead.worker.tell_to_stop(lead, trial, reason, keep=keep)
        self._book.forget_ended()
        for worker in self._workers.by_index.values():
            if worker.shares and not worker.errands:
                self._rest(worker)
        self._free = None

    # -- changing shares --------------------------------------------------------------------------------

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Stop a trial's workers at its next report, and let it go on from its checkpoint on other shares."""
        flight = self._book.resize(trial, shares)
        if flight is not None:
            self._tell_to_change(self._errands[flight.number][0])
            self._free = None

    def _tell_to_change(self, errand: Errand) -> None:
        (trial,) = errand.flight.open
        if errand.worker is not None and errand.rank == 0:
            errand.worker.tell_to_stop(errand, trial, ORDER, keep=True)

    def _regroup(self, flight: Flight) -> None:
        """Once all its workers have stopped, let the trial go on with its new shares."""
        crew = self._errands[flight.number][0].crew
        if (crew is not None and crew.running) or self._dispatch is None:
            return
        self._finish(flight)
        now_s = self._clock.now_s()
        after = self._book.regroup(flight, flight.target, now_s)
        if after is not None:
            self._errands[after.number] = self._dispatch.errands(after)
            if not self._place(after, now_s):
                self._book.waiting.appendleft(after)

    # -- events -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for workers."""
        workers, book = self._workers, self._book
        if workers is None:
            return book.take_events()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._share_out(workers)
        first = True
        while True:
            self._pump(workers)
            if self._error is not None and not book.events:
                error, self._error = self._error, None
                raise error
            left = None if deadline is None else deadline - time.monotonic()
            over = left is not None and left <= 0
            if book.events or not book.flights or (over and not first):
                if not book.events and first:
                    self._listen(workers, 0.0)
                break
            self._listen(workers, self._patience(workers, left))
            if book.events and (left is None or left > _GATHER_S) and self._well_fed(workers):
                time.sleep(_GATHER_S)  # nobody waits for us: take more at a time
                self._listen(workers, 0.0)
            first = False
            self._check(workers)
        return book.take_events()

    @staticmethod
    def _well_fed(workers: Workers) -> bool:
        """Whether every busy worker has enough queued to do without us for a moment."""
        return all(len(worker.errands) > 16 for worker in workers.by_index.values() if worker.errands)

    def _patience(self, workers: Workers, left: float | None) -> float:
        """How long to wait at most before looking after hanging trainings and idle devices."""
        wait = patience_s(left, None if self._job is None else self._job.timeout_s)
        if any(worker.waits_for_us for worker in workers.by_index.values()):
            wait = min(wait, _STEAL_S)
        for flight in self._failing.values():
            crew = self._errands[flight.number][0].crew
            due_s = None if crew is None else crew.wait_s(self._clock.now_s())
            wait = wait if due_s is None else min(wait, due_s)
        for crew, _ in self._parting:
            due_s = crew.parts_s(self._clock.now_s())
            wait = wait if due_s is None else min(wait, due_s)
        return wait

    def _listen(self, workers: Workers, wait_s: float) -> None:
        dead: list[Worker] = []
        for worker, over in workers.wait(wait_s):
            if not over:
                self._take(worker, workers.read(worker))
            if over or (worker.child.silent and worker.child.pidfd is None):
                dead.append(worker)
        for worker in dead:
            if workers.by_index.get(worker.index) is worker:
                self._died(workers, worker)

    def _take(self, worker: Worker, messages: Sequence[tuple[Any, ...]]) -> None:
        """A worker's news."""
        now_s = self._clock.now_s()
        if messages:
            worker.heard_s = now_s
        for message in messages:
            kind = message[0]
            if kind == "y":
                worker.ready = True
                self._starts.worked()
                continue
            if kind == "x":
                worker.broken = message[1], message[2]
                continue
            errand = worker.errands.get(message[1])
            if errand is None:
                continue
            flight = errand.flight
            if errand.crew is not None and not self._of_crew(errand, errand.crew, message, now_s):
                continue
            if message[2] not in flight.open:
                continue
            ended = self._book.hear(flight, message, message[3])
            if ended is None:
                continue
            if self._book.changes(flight, ended):
                self._regroup(flight)
                continue
            self._book.end(flight, ended)
            if not flight.open:
                self._pace.learn(ended.time_s - flight.began_s)
                self._finish(flight)

    def _of_crew(self, errand: Errand, crew: Crew[Ended], message: tuple[Any, ...], now_s: float) -> bool:
        """What a worker of several tells: whether it is for the study, as the lead's news are but for its failure."""
        flight, rank = errand.flight, errand.rank
        if message[0] == "s":
            crew.begin(rank, now_s)
        if message[0] != "e":
            return rank == 0
        ended = to_event(message, message[3])
        stopped = crew.parting
        if isinstance(ended, Ended) and ended.status is TrialStatus.FAILED and flight.open and not stopped:
            crew.fail(rank, ended, now_s)
            self._failing[flight.number] = flight
            return False
        crew.end(rank, now_s)
        if rank == 0:
            self._failing.pop(flight.number, None)
            # None where the trial is over: another worker died, and the lead told of its failure before it was ended.
            left = self._errands.get(flight.number, ())
            self._parting += [(crew, e) for e in left if e.rank in crew.running]
            return True
        if flight.open and flight.target:
            self._regroup(flight)
        elif flight.number not in self._failing:
            self._let_go(errand)
        return False

    def _settle(self) -> None:
        """End trials of which one worker has failed, as soon as it is clear why; with it who has not noticed."""
        now_s = self._clock.now_s()
        for flight in list(self._failing.values()):
            errands = self._errands[flight.number]
            crew = errands[0].crew
            if crew is None or crew.wait_s(now_s) != 0.0:
                continue
            del self._failing[flight.number]
            rank, why = crew.why()
            if rank == 0 and crew.died is None:
                self._book.end(flight, why)
            else:
                where = f"On the worker of rank {rank}:\n" if rank and why.error else ""
                self._book.fail(flight, now_s, why.reason, where + why.error, lost=why.lost)
            for errand in errands:
                if errand.worker is not None and errand.rank in crew.running:
                    errand.worker.kill("its trial is over: another worker of it has failed")
            self._finish(flight)
        self._parting = [(crew, errand) for crew, errand in self._parting if errand.rank in crew.running]
        for crew, errand in self._parting:
            if crew.parts_s(now_s) == 0.0 and errand.worker is not None and not errand.worker.verdict:
                errand.worker.kill("its trial is over, and it has not ended")

    def _pump(self, workers: Workers) -> None:
        """Move what can move: failed crews, overflowing queues, what waits for devices or behind a long segment."""
        if self._failing or self._parting:
            self._settle()
        for worker in workers.by_index.values():
            worker.send()
        book = self._book
        if book.waiting:
            now_s = self._clock.now_s()
            waiting, book.waiting = book.waiting, deque()
            book.waiting.extend([flight for flight in waiting if not self._place(flight, now_s)])
            self._free = None
        elif len(book.flights) > 1:
            self._steal(workers)

    def _steal(self, workers: Workers) -> None:
        """Give idle devices what waits behind a segment that takes longer than expected."""
        # Not one that is kept for a trial which is to spread: it may be the very one that waits.
        held, devices = self._book.holdings, self._site.devices
        lonely = [name for name in devices if held.free(name) == 1.0 and self._owns(name)]
        if not lonely:
            return
        now_s = self._clock.now_s()
        for worker in list(workers.by_index.values()):
            if len(worker.errands) < 2 or now_s - worker.heard_s < _STEAL_S or len(worker.shares) != 1:
                continue
            kind = devices[worker.shares[0].device].kind
            for name in [name for name in lonely if devices[name].kind == kind]:
                taken = worker.take_back(1)
                if not taken:
                    break
                (errand,) = taken
                flight = errand.flight
                errand.shares = flight.shares = (Share(name, errand.shares[0].fraction),)
                lonely.remove(name)
                self._free = None
                if not self._place(flight, now_s):
                    self._book.recall(flight, first=False)

    # -- faults -----------------------------------------------------------------------------------------

    def _check(self, workers: Workers) -> None:
        """Kill workers whose training reports nothing; notice deaths where there is no pidfd."""
        if self._job is None:
            return
        timeout_s, now_s = self._job.timeout_s, self._clock.now_s()
        for worker in list(workers.by_index.values()):
            if worker.child.pidfd is None and worker.child.process.poll() is not None:
                self._died(workers, worker)
                continue
            trials = max((len(e.flight.open) for e in worker.errands.values() if e.rank == 0), default=0)
            if timeout_s is None or not trials or not worker.ready or worker.verdict:
                continue
            if now_s - worker.heard_s > timeout_s * trials:
                heard_s = worker.heard_s
                self._take(worker, workers.read(worker))
                if (
                    worker.heard_s == heard_s
                ):  # else it has reported, while it was this process that stood still
                    worker.kill(f"no report for {timeout_s:g} s (timeout_s)")

    def _died(self, workers: Workers, worker: Worker) -> None:
        self._take(worker, workers.read(worker))  # what it said before
        current = workers.current(worker)
        back = worker.take_back()
        begun = [e for e in worker.errands.values() if e.number == current or e.flight.seen or e.crew]
        again = [*back, *(errand for errand in worker.errands.values() if errand not in begun)]
        worker.errands = {}
        self._release(worker)
        workers.bury(worker)
        if not worker.ready and not worker.verdict:
            self._start_failed(worker)
        now_s = self._clock.now_s()
        code = worker.child.process.returncode
        fate = worker.verdict or f"its worker died: {how(code)}"
        tail, lost = "" if worker.verdict else worker.child.tail(), not worker.verdict
        for errand in sorted((*again, *begun), key=lambda each: -each.number):
            flight = errand.flight
            if errand.crew is not None and errand in back and flight.open and not errand.crew.failing:
                self._seat(errand, now_s)  # the others wait for it
            elif errand.crew is not None:
                errand.close()
                self._lost_member(errand, errand.crew, fate, tail, lost=lost)
            elif errand in begun:
                self._book.fail(flight, now_s, fate, tail, lost=lost)
                self._finish(flight)
            else:
                self._book.recall(flight)
        self._free = None

    def _lost_member(self, errand: Errand, crew: Crew[Ended], fate: str, tail: str, *, lost: bool) -> None:
        """Without one of its workers a trial can't go on, unless it had nothing left to do."""
        flight, rank = errand.flight, errand.rank
        stopped = crew.parting
        if stopped and rank:
            crew.end(rank, self._clock.now_s())
        if not flight.open:
            return
        (trial,) = flight.open
        if stopped and rank:
            self._regroup(flight)
        elif stopped or rank in crew.running:
            now_s, epoch = self._clock.now_s(), flight.epochs[trial]
            crew.die(rank, Ended(now_s, trial, TrialStatus.FAILED, epoch, fate, tail, lost=lost))
            self._failing[flight.number] = flight

    def _start_failed(self, worker: Worker) -> None:
        if not self._starts.failed(sure=worker.broken is not None):
            return
        if worker.broken is not None:
            why, detail = worker.broken
        else:
            why, detail = how(worker.child.process.returncode), worker.child.tail()
        self._error = ExecutorError(
            f"Workers can't be started: {why}. The training function must be importable in a new process "
            f"(log: {worker.child.log}).\n{detail}".rstrip()
        )
