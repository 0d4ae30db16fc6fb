"""The worker processes of the local executor: starting them, handing errands to them, ending them."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import selectors
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias, final

from penstock.core import Share
from penstock.core.errors import ExecutorError
from penstock.execute._child import Child, start_child, thread_environment
from penstock.execute._errands import Errand
from penstock.execute._guard import Guard
from penstock.execute._nursery import Forked, drop, nursery_for
from penstock.train._process import FRAME, MESSAGE_BYTES, TICKET

_BOARD_SLOTS = 4096

_Key: TypeAlias = tuple[tuple[str, ...], int, str]


@final
@dataclass(slots=True, eq=False)
class Worker:
    """A worker process and what it has to do."""

    index: int
    gpus: tuple[str, ...]
    threads: int
    child: Child
    ready: bool = False
    broken: tuple[str, str] | None = None
    errands: dict[int, Errand] = field(default_factory=dict)
    shares: tuple[Share, ...] = ()
    exclusive: bool = False
    crewed: bool = False  # it trains a trial together with others
    heard_s: float = 0.0
    verdict: str = ""  # why we killed it
    stage: str = ""  # of a host job in whose bubbles it works
    _overflow: deque[bytes] = field(default_factory=deque)
    _outbox: bytearray = field(default_factory=bytearray)

    @property
    def key(self) -> _Key:
        """What it can be used for: its GPUs, threads and stage."""
        return self.gpus, self.threads, self.stage

    @property
    def waits_for_us(self) -> bool:
        """Whether it has more to do than it can be told of now, or more than one errand."""
        return len(self.errands) > 1 or bool(self._overflow)

    def push(self, errand: Errand) -> None:
        """Put an errand into its queue."""
        self.errands[errand.number] = errand
        errand.worker = self
        if self._overflow:
            self._overflow.append(errand.message)
            return
        try:
            self.child.queue.send(errand.message)
        except BlockingIOError:
            self._overflow.append(errand.message)
        except OSError:
            pass  # it is dead; its end is noticed, and the errand moves on

    def take_back(self, most: int | None = None) -> list[Errand]:
        """Errands out of its queue that it has not begun, in order."""
        found: list[Errand] = []
        buffer = bytearray(MESSAGE_BYTES)
        while most is None or len(found) < most:
            try:
                length = self.child.queue_theirs.recv_into(buffer, MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except OSError:
                break
            if length == 0:
                break
            found += self._of_message(bytes(buffer[:length]))
        while self._overflow and (most is None or len(found) < most):
            found += self._of_message(self._overflow.popleft())
        return found

    def _of_message(self, message: bytes) -> list[Errand]:
        number = next((n for n, errand in self.errands.items() if errand.message == message), None)
        return [] if number is None else [self.errands.pop(number)]

    def tell_to_stop(self, errand: Errand, trial: int, reason: str, *, keep: bool) -> None:
        """Let it end a trial at its next report."""
        data = pickle.dumps((errand.number, trial, reason, keep), protocol=5)
        self._outbox += FRAME.pack(len(data)) + data
        self.send()

    def send(self) -> None:
        """Send what it could not take before."""
        if not self._outbox and not self._overflow:
            return
        try:
            while self._outbox:
                del self._outbox[: self.child.control.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
        with contextlib.suppress(OSError):
            while self._overflow:
                self.child.queue.send(self._overflow[0])
                self._overflow.popleft()

    def kill(self, verdict: str) -> None:
        """End the process; that it has ended is noticed like any death."""
        self.verdict = verdict
        with contextlib.suppress(OSError):
            os.kill(self.child.process.pid, signal.SIGKILL)


@final
class Workers:
    """All worker processes of a study. Ended by ``close``, and by the death of this process.

    Args:
        files: The study's folder.
        facts: What each is told first.
        work: What they train, packed.
        modules: What they import for that.
    """

    def __init__(self, files: Path, facts: Mapping[str, Any], work: bytes, modules: tuple[str, ...]) -> None:
        self.by_index: dict[int, Worker] = {}
        self._idle: dict[_Key, list[Worker]] = {}
        self._files = files
        self._modules = modules
        with contextlib.ExitStack() as scratch:
            head = pickle.dumps(facts, protocol=5)
            self._blob: IO[bytes] = scratch.enter_context(_scratch_file())
            self._blob.write(FRAME.pack(len(head)) + head + work)
            self._blob.flush()
            self._board_file: IO[bytes] = scratch.enter_context(_scratch_file())
            self._board_file.truncate(TICKET.size * _BOARD_SLOTS)
            self._board = scratch.enter_context(mmap.mmap(self._board_file.fileno(), 0))
            self._selector = scratch.enter_context(selectors.DefaultSelector())
            self.guard = Guard()
            self._scratch = scratch.pop_all()

    def start(self, gpus: tuple[str, ...], threads: int, environment: Mapping[str, str]) -> Worker:
        """A new worker.

        Args:
            gpus: Those it sees, as CUDA names them.
            threads: Its CPU threads.
            environment: What it has besides ours.

        Raises:
            ExecutorError: It can't be started.
        """
        index = next(number for number in range(_BOARD_SLOTS) if number not in self.by_index)
        log = self._files / "logs" / f"worker-{index}.log"
        whole = {**thread_environment(threads), **environment}
        fds = (self._blob.fileno(), self._board_file.fileno())
        fork = functools.partial(_forked, whole, self._modules, index)
        try:
            child = start_child(whole, log, fds, index, fork=fork)
        except OSError as error:
            raise ExecutorError(f"A worker process can't be started: {error}.") from error
        child.queue.setblocking(False)
        worker = Worker(index, gpus, threads, child)
        self.by_index[index] = worker
        self._selector.register(child.control, selectors.EVENT_READ, worker)
        if child.pidfd is not None:
            self._selector.register(child.pidfd, selectors.EVENT_READ, worker)
        self.guard.watch(child)
        return worker

    def rest(self, worker: Worker) -> None:
        """It has nothing to do."""
        self._idle.setdefault(worker.key, []).append(worker)

    def resting(self, key: _Key) -> Worker | None:
        """One that has nothing to do, to be used."""
        idle = self._idle.get(key)
        return idle.pop() if idle else None

    def trim(self, most: int) -> None:
        """End the longest idle ones, until so many are idle."""
        idle = sorted((w for kept in self._idle.values() for w in kept), key=lambda each: each.heard_s)
        for worker in idle[: max(0, len(idle) - most)]:
            self.bury(worker)

    def wait(self, wait_s: float) -> Iterator[tuple[Worker, bool]]:
        """Workers that have something to say, or (True) are over."""
        for key, _ in self._selector.select(wait_s):
            worker: Worker = key.data
            if self.by_index.get(worker.index) is worker:
                yield worker, key.fileobj is not worker.child.control

    def read(self, worker: Worker) -> list[Any]:
        """All messages of a worker that are there."""
        child = worker.child
        messages = [message for frame in child.frames() for message in pickle.loads(frame)]
        if child.silent and child.pidfd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.control)  # its pidfd tells when it is over
        return messages

    def current(self, worker: Worker) -> int:
        """The number of the errand it has begun last."""
        return int(TICKET.unpack_from(self._board, TICKET.size * worker.index)[0])

    def bury(self, worker: Worker) -> None:
        """End a worker with all it has started."""
        self._end([worker])

    def close(self) -> None:
        """End all, and leave nothing open."""
        self._end(list(self.by_index.values()))
        self._scratch.close()
        self.guard.close()

    def _end(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            for item in (worker.child.control, worker.child.pidfd):
                if item is not None:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(item)
            self.by_index.pop(worker.index, None)
            if worker in self._idle.get(worker.key, ()):
                self._idle[worker.key].remove(worker)
        self.guard.end([worker.child for worker in workers])


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
