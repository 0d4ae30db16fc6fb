"""A Ray actor's side of the Ray executor: it keeps one warm worker process on its node and passes messages on.

The worker process is the local executor's, to the letter: a training that forks, hangs, holds the interpreter lock or
takes its process down behaves alike in both. Ray is not imported here: the executor makes an actor of the class.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, final

from penstock.execute._child import Child, start_child, thread_environment
from penstock.execute._crew import Crew
from penstock.execute._guard import Guard
from penstock.execute._machine import visible_gpus
from penstock.train._process import FRAME, MESSAGE_BYTES, SPILLED, TICKET
from penstock.train._worker import Settings

_GATHER_S = 0.002
TOKEN = ".penstock-driver"
"""The file by which a node knows the driver's folder when it sees it."""


def boot_id() -> str:
    """What tells machines apart, and one machine from itself before a reboot; containers of one machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor needs to know to serve a study.

    Attributes:
        name: The worker's, for its log.
        settings: The study's, with the folder as the driver names it.
        token: What stands in the folder's token file.
        shared: Whether nodes see the driver's folder; None: look.
        path: The driver's module search path.
        argv: The driver's arguments.
        cwd: The driver's folder.
        machine: The driver's ``boot_id``.
        threads: CPU threads of each worker process.
        gpus: How many GPUs the actor has; Ray says which.
        turn: Counts how often the actor was opened.
        members: How many worker processes train a trial together, one per device.
    """

    name: str
    settings: Settings
    token: str
    shared: bool | None
    path: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str
    machine: str
    threads: int
    gpus: int
    turn: int = 0
    members: int = 1


@dataclass(frozen=True, slots=True)
class Opened:
    """What an actor tells of itself.

    Attributes:
        machine: Its ``boot_id``.
        shared: Whether it sees the driver's folder.
        pid: Its process.
        now_s: Its monotonic clock.
        folder: On its node, for what is its own; empty for an actor with one worker process.
    """

    machine: str
    shared: bool
    pid: int
    now_s: float
    folder: str = ""


@final
class Slot:
    """One worker process, or a crew of them that trains a trial together on several devices.

    Its methods are called by the executor alone, several at a time in threads of their own. Of a crew the lead's
    messages are passed on; if one of its members dies, or fails and the others don't notice, all of it ends.

    ``news`` gives, in order: ``("m", data)``, a pickled list of the worker's messages; ``("f", path, data)``, a file
    of a folder the driver does not see; ``("d", code, last lines)``, the worker's death; ``("t", ticket, reason)``, a
    segment that can't be begun here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._crew: tuple[Child, ...] = ()  # the lead first
        self._turn = 0  # of the crew
        self._team: tuple[int, Crew[tuple[Any, ...]]] | None = None  # of the crew's present ticket
        self._parting: list[tuple[int, Crew[tuple[Any, ...]]]] = []  # of tickets whose lead has ended well
        self._held: list[tuple[Any, ...]] = []  # of the present ticket, until nobody is busy with one before
        self._guard: Guard | None = None
        self._scratch: Path | None = None
        self._files = Path()
        self._shared = True
        self._spilled: list[Path] = []
        self._troubles: list[tuple[Any, ...]] = []
        self._known: dict[str, tuple[int, int]] = {}
        self._wake_r, self._wake_w = os.pipe()

    # -- opening and closing ----------------------------------------------------------------------------

    def open(self, order: Order, work: bytes) -> Opened:
        """Start a worker process, in place of one that is there."""
        self._bury()
        files = order.settings.files
        shared = order.shared
        if shared is None:
            shared = _sees(files, order.token)
        self._shared = shared
        self._files = files if shared and files is not None else self._own_folder()
        self._known = {}
        if self._guard is None:
            self._guard = Guard(detached=True)
        here = order.machine == boot_id()
        head = {
            "path": _search_path(order.path, here=here),
            "argv": list(order.argv),
            "cwd": order.cwd if here or os.path.isdir(order.cwd) else os.getcwd(),
            "offset_s": 0.0,  # the driver knows its own clock
            "settings": replace(order.settings, files=self._files),
        }
        packed = pickle.dumps(head, protocol=5)
        self._turn = order.turn
        guard = self._guard
        self._crew = tuple(self._spawn(order, rank, packed, work, guard) for rank in range(order.members))
        folder = str(self._own_folder()) if order.members > 1 else ""
        return Opened(boot_id(), shared, os.getpid(), time.monotonic(), folder)

    def _spawn(self, order: Order, rank: int, head: bytes, work: bytes, guard: Guard) -> Child:
        log = self._files / "logs" / f"{order.name}{f'-{rank}' if rank else ''}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = thread_environment(order.threads)
        if not order.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif order.members > 1:
            environment["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"].split(",")[rank]
        with _memory_file() as blob, _memory_file() as board:
            blob.write(FRAME.pack(len(head)) + head)
            blob.write(work)
            blob.flush()
            board.truncate(TICKET.size)
            child = start_child(environment, log, (blob.fileno(), board.fileno()), 0)
        guard.watch(child)
        return child

    def _own_folder(self) -> Path:
        """A folder of the node's, for what the driver's can't hold."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="penstock-"))
        return self._scratch

    def _bury(self) -> list[int]:
        """End the worker processes with all they have started; their exit codes."""
        with self._lock:
            crew, self._crew, self._team, self._parting, self._held = self._crew, (), None, [], []
        if not crew or self._guard is None:
            return []
        os.write(self._wake_w, b".")  # whoever waits for their news
        return self._guard.end(crew)

    def close(self) -> None:
        """End the worker process and leave nothing behind on the node."""
        self._bury()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    # -- to the worker ----------------------------------------------------------------------------------

    def take(
        self,
        turn: int,
        ticket: int,
        trials: tuple[int, ...],
        messages: tuple[bytes, ...],
        *files: tuple[str, bytes],
    ) -> None:
        """Begin a segment, by a message for each worker process of that turn; for another's it is too late.

        ``files`` are those of the driver's folder it needs and this node does not see.
        """
        if turn != self._turn:
            return  # its files took so long to come that the worker has died meanwhile, and the driver knows
        try:
            if not self._shared:
                self._lay_out(trials, files)
            while self._spilled:
                self._spilled.pop().unlink(missing_ok=True)
            messages = tuple(
                self._spill(f"{ticket}-{rank}", message) for rank, message in enumerate(messages)
            )
        except OSError as error:
            self._troubles.append(("t", ticket, f"its node can't write its files: {error}"))
            os.write(self._wake_w, b".")
            return
        with self._lock:
            if turn != self._turn:
                return
            if len(self._crew) > 1:
                self._team = ticket, Crew(len(self._crew))
            for child, message in zip(self._crew, messages, strict=False):
                with contextlib.suppress(OSError):  # it is dead; the news tell
                    child.queue.send(message)

    def _spill(self, name: str, message: bytes) -> bytes:
        """A message that is too long for the queue travels in a file."""
        if len(message) <= MESSAGE_BYTES:
            return message
        path = self._own_folder() / f"{name}.pickle"
        path.write_bytes(message)
        self._spilled.append(path)
        return SPILLED + os.fsencode(path)

    def _lay_out(self, trials: tuple[int, ...], files: tuple[tuple[str, bytes], ...]) -> None:
        """Make the trials' part of our own folder what the driver's is."""
        for trial in trials:
            for folder in ("checkpoints", "trials"):
                shutil.rmtree(self._files / folder / str(trial), ignore_errors=True)
        for name, data in files:
            path = self._files / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._known = {}
        for trial in trials:
            self._changed(trial)

    def stop(self, data: bytes) -> None:
        """Pass a stop command on; a crew's lead tells the others."""
        with self._lock:
            if self._crew:
                with contextlib.suppress(OSError):
                    self._crew[0].control.sendall(FRAME.pack(len(data)) + data)

    # -- from the worker --------------------------------------------------------------------------------

    def news(self, turn: int, wait_s: float) -> list[tuple[Any, ...]]:
        """What there is of the worker processes of that turn, or what comes within ``wait_s``."""
        deadline_s = time.monotonic() + wait_s
        found: list[tuple[Any, ...]] = []
        while True:
            crew = self._crew
            if not crew or self._turn != turn:
                return found
            dead = self._listen(crew, max(0.0, deadline_s - time.monotonic()), found)
            if found and dead is None:
                time.sleep(_GATHER_S)
                dead = self._listen(crew, 0.0, found)
            if dead is not None:
                codes = self._bury()
                found.append(("d", codes[crew.index(dead)] if codes else None, dead.tail()))
            if found or time.monotonic() >= deadline_s:
                return found

    def _listen(self, crew: tuple[Child, ...], wait_s: float, found: list[tuple[Any, ...]]) -> Child | None:
        """Wait for something and add it to ``found``; the worker process that is dead, or None."""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        with contextlib.suppress(ValueError):  # closed meanwhile
            for child in crew:
                if not child.silent:
                    poll.register(child.control, select.POLLIN)
                if child.pidfd is not None:
                    poll.register(child.pidfd, select.POLLIN)
        most_s = 5.0 if all(child.pidfd is not None for child in crew) else 0.2
        due_s = None if self._team is None else self._team[1].wait_s(time.monotonic())
        late_s = [team.parts_s(time.monotonic()) for _, team in self._parting]
        most_s = min([most_s, *(each for each in (due_s, *late_s) if each is not None)])
        ready = {fd for fd, _ in poll.poll(1000 * min(wait_s, most_s))}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if self._crew is not crew:
            return None
        dead = next((child for child in crew if child.pidfd in ready or child.is_over()), None)
        troubles, self._troubles = self._troubles, []
        found += troubles
        for rank, child in enumerate(crew):
            for data in child.frames():
                found += self._passed_on(data if len(crew) == 1 else self._of_crew(rank, data))
        if dead is None:
            found += self._settled()
        return dead

    def _passed_on(self, data: bytes) -> list[tuple[Any, ...]]:
        if not data:
            return []
        return [("m", data)] if self._shared else self._with_files(data)

    def _of_crew(self, rank: int, data: bytes) -> bytes:
        """What the driver is told of a member's messages: the lead's, but for a failure until it is clear why."""
        told = []
        for message in pickle.loads(data):
            kind, team = message[0], self._team
            if team is not None and kind in "se" and message[1] == team[0]:
                if kind == "s":
                    team[1].begin(rank, time.monotonic())
                elif message[4] == "failed":
                    team[1].fail(rank, message, time.monotonic())
                    continue
                else:
                    team[1].end(rank, time.monotonic())
                    if rank == 0:
                        self._team = None  # it is over, and well
                        self._parting.append(team)
            elif kind in "se":
                self._part(rank, message)
            if rank == 0 or kind == "x":
                told.append(message)
        told = self._in_turn(told)
        return pickle.dumps(told, protocol=5) if told else b""

    def _in_turn(self, told: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """What can be told now: if one hangs in a segment that is over, the next is not begun, but for its lead."""
        if not any(team.running for _, team in self._parting):
            told, self._held = self._held + told, []
            return told
        ticket = None if self._team is None else self._team[0]
        early = [message for message in told if message[0] not in "xy" and message[1] == ticket]
        self._held += early
        return [message for message in told if message not in early]

    def _part(self, rank: int, message: tuple[Any, ...]) -> None:
        """A member begins or ends what the lead has ended already."""
        for ticket, team in self._parting:
            if ticket == message[1]:
                if message[0] == "s":
                    team.begin(rank, time.monotonic())
                else:
                    team.end(rank, time.monotonic())
        self._parting = [(ticket, team) for ticket, team in self._parting if team.running]

    def _settled(self) -> list[tuple[Any, ...]]:
        """The failure of a crew, once it is clear why; who has not noticed ends with it, and so do the others."""
        if any(team.parts_s(time.monotonic()) == 0.0 for _, team in self._parting):
            self._bury()  # one hangs: the next trial would wait for it
            return [("d", None, "")]
        team = self._team
        if team is None or team[1].wait_s(time.monotonic()) != 0.0:
            return []
        rank, message = team[1].why()
        if rank:
            *before, error, kept, _ = message
            where = f"On the worker of rank {rank}:\n" if error else ""
            message = (*before, where + error, kept, None)
        found = self._passed_on(pickle.dumps([message], protocol=5))
        self._team = None
        if team[1].running:
            self._bury()
            found.append(("d", None, ""))
        return found

    def _with_files(self, data: bytes) -> list[tuple[Any, ...]]:
        """Messages with the files they tell of before them; a checkpoint that is gone already is not told of."""
        found: list[tuple[Any, ...]] = []
        messages = []
        for message in pickle.loads(data):
            if message[0] == "c":
                try:
                    found.append(("f", message[5], (self._files / message[5]).read_bytes()))
                except OSError:
                    continue
            elif message[0] == "e":
                trial = message[2]
                for name in self._changed(trial):
                    with contextlib.suppress(OSError):
                        found.append(("f", name, (self._files / name).read_bytes()))
                shutil.rmtree(self._files / "checkpoints" / str(trial), ignore_errors=True)
            messages.append(message)
        found.append(("m", pickle.dumps(messages, protocol=5)))
        return found

    def _changed(self, trial: int) -> list[str]:
        """Files of the trial's own folder that were not there the last time, or not so."""
        changed = []
        for path in sorted((self._files / "trials" / str(trial)).rglob("*")):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    name = path.relative_to(self._files).as_posix()
                    state = (path.stat().st_size, path.stat().st_mtime_ns)
                    if self._known.get(name) != state:
                        self._known[name] = state
                        changed.append(name)
        return changed


def gpu_facts() -> list[tuple[str, int | None]]:
    """Kind and memory of the node's GPUs. Runs on the node."""
    return [(gpu.kind, gpu.memory_bytes) for gpu in visible_gpus()]


def files_of(folder: Path, trial: int, named: str | None) -> list[str]:
    """The files of the driver's folder that a segment of the trial may need, relative to it."""
    names = {} if named is None else {named: None}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder / "checkpoints" / str(trial)):
            if name.endswith(".ckpt"):
                names[f"checkpoints/{trial}/{name}"] = None
    for path in sorted((folder / "trials" / str(trial)).rglob("*")):
        if path.is_file() and not path.is_symlink():
            names[path.relative_to(folder).as_posix()] = None
    return list(names)


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Put a file in its place, whole or not at all."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OSError(f"{name!r} is outside the study's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _sees(files: Path | None, token: str) -> bool:
    try:
        return files is not None and (files / TOKEN).read_text() == token
    except (OSError, UnicodeDecodeError):
        return False


def _search_path(theirs: tuple[str, ...], *, here: bool) -> list[str]:
    """The driver's search path on its own machine; elsewhere ours, then what there is of the driver's."""
    path = (
        [*theirs, *sys.path] if here else [*sys.path, *(entry for entry in theirs if os.path.exists(entry))]
    )
    return list(dict.fromkeys(os.path.abspath(entry) if entry == "" else entry for entry in path))


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("penstock"), "w+b")
    return tempfile.TemporaryFile()
