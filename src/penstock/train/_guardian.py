"""A process that outlives the driver by a moment to end its workers, run as a script without Penstock.

The driver writes ``+pid`` and ``-pid`` lines, one session per worker. When the driver is gone, even by kill -9,
every process of those sessions is killed: the workers and whatever the trainings have started. A thread in each
worker does the same; this one also works while a training holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys


def pids() -> list[int]:
    """All processes of the machine."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        import psutil

        return list(psutil.pids())


def kill_sessions(sessions: set[int]) -> None:
    """Kill all processes of some sessions, and what they fork meanwhile; the caller's own process last."""
    me = os.getpid()
    for _ in range(10):
        found = False
        for pid in pids():
            try:
                if pid == me or os.getsid(pid) not in sessions or _is_zombie(pid):
                    continue
                os.kill(pid, signal.SIGKILL)
                found = True
            except OSError:
                continue
        if not found:
            break
    if os.getsid(0) in sessions:
        os.kill(me, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False


def main() -> None:
    """Read lines until the driver is gone, then kill."""
    driver = int(sys.argv[1])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watched = [0]
    # A process the driver forked may hold the pipe open after its death: its pidfd tells, too.
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            watched.append(os.pidfd_open(driver))
    sessions: set[int] = set()
    buffer = b""
    while os.getppid() == driver:
        ready, _, _ = select.select(watched, [], [], 5.0)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                number = int(line[1:])
                if line[:1] == b"+":
                    sessions.add(number)
                else:
                    sessions.discard(number)
        elif ready:
            break
    if sessions:
        kill_sessions(sessions)


if __name__ == "__main__":
    main()
