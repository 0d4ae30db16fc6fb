"""A worker process with our ends of what connects us to it: the local executor's and a Ray actor's are the same."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from penstock.execute._nursery import Forked
from penstock.train._process import FRAME, MESSAGE_BYTES, THREAD_VARIABLES
from penstock.train._worker import clean

Process = subprocess.Popen[bytes] | Forked

_BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from penstock.train._process import main
main(sys.argv[2:])
"""
_READ_BYTES = 1 << 18


@final
@dataclass(slots=True, eq=False)
class Child:
    """A worker process.

    Attributes:
        process: It.
        control: Messages from it, commands to it.
        queue: Tickets to it.
        queue_theirs: Its end of the queue, to take back what it hasn't begun.
        lifeline: Closed when we die, which it notices.
        pidfd: Readable when it is over; None where the system has none.
        log: What it writes.
        log_from: Where in the log it began.
        silent: At the end of its stream.
    """

    process: Process
    control: socket.socket
    queue: socket.socket
    queue_theirs: socket.socket
    lifeline: int
    pidfd: int | None
    log: Path
    log_from: int
    silent: bool = False
    _inbox: bytearray = field(default_factory=bytearray)

    def frames(self) -> list[bytes]:
        """All whole messages there are."""
        inbox = self._inbox
        while True:
            try:
                data = self.control.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.silent = True
                break
            inbox += data
            if len(data) < _READ_BYTES:
                break
        found: list[bytes] = []
        position = 0
        while len(inbox) - position >= FRAME.size:
            (length,) = FRAME.unpack_from(inbox, position)
            end = position + FRAME.size + length
            if len(inbox) < end:
                break
            found.append(bytes(memoryview(inbox)[position + FRAME.size : end]))
            position = end
        if position:
            del inbox[:position]
        return found

    def is_over(self) -> bool:
        """Whether the process has ended; it is left to be reaped, so that its number stays its own."""
        if isinstance(self.process, Forked):
            return self.process.is_over()
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except OSError:
            return True

    def tail(self) -> str:
        """The last lines it wrote."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 4096, min(self.log_from, size)))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return clean("\n".join(lines[-20:]))

    def close(self) -> None:
        """Close our ends."""
        for sock in (self.control, self.queue, self.queue_theirs):
            sock.close()
        os.close(self.lifeline)
        if self.pidfd is not None:
            os.close(self.pidfd)


def thread_environment(threads: int) -> dict[str, str]:
    """Our environment, for a process that may use so many threads."""
    return os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))


def start_child(
    environment: Mapping[str, str],
    log: Path,
    files: tuple[int, int],
    index: int,
    *,
    fork: Callable[[int, Sequence[int]], Forked | None] | None = None,
) -> Child:
    """Start a worker process in a session of its own: the terminal's Ctrl-C is for the driver, which drains.

    Args:
        environment: Its.
        log: Where its output goes.
        files: Descriptors of the file with the work, and of the board on which it says what it does.
        index: Its place on the board.
        fork: Makes it from an open log and descriptors to hand over; where that gives None, and by default, a new
            interpreter is started.

    Raises:
        OSError: It can't be started.
    """
    control, control_theirs = socket.socketpair()
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    if sys.platform == "darwin":
        kind = socket.SOCK_DGRAM
    queue, queue_theirs = socket.socketpair(socket.AF_UNIX, kind)
    queue.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
    lifeline_theirs, lifeline = os.pipe()
    fds = (control_theirs.fileno(), queue_theirs.fileno(), lifeline_theirs, *files)
    root = str(Path(__file__).parents[2])
    process: Process | None = None
    try:
        with log.open("ab") as out:
            log_from = out.tell()
            process = None if fork is None else fork(out.fileno(), fds)
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, root, *map(str, (*fds, index, os.getpid()))],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=fds,
                    start_new_session=True,
                    env=environment,
                )
    finally:
        control_theirs.close()
        os.close(lifeline_theirs)
        if process is None:
            for sock in (control, queue, queue_theirs):
                sock.close()
            os.close(lifeline)
    control.setblocking(False)
    pidfd = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(process.pid)
    return Child(process, control, queue, queue_theirs, lifeline, pidfd, log, log_from)


def how(code: int | None) -> str:
    """How a process ended, from its exit code."""
    if code is None:
        return "it can't be reached"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
