"""A lock on a file that names its holder and that the operating system releases when the process ends."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from penstock.core.errors import StoreLocked, StoreUnwritable, Unsupported

_LOOK_S = 5.0  # a look at a lock takes no time: one that seems to last is something else

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


@final
class FileLock:
    """An exclusive ``flock``, held from construction to ``release`` or the end of the process, kill -9 included.

    The file descriptor is closed on exec, so spawned workers don't inherit the lock, and in forked children,
    so that one that outlives its parent doesn't keep it. The file is removed on release; one that is left
    behind by a killed process holds nothing.
    """

    def __init__(self, path: Path, what: str) -> None:
        try:
            import fcntl
        except ImportError:
            raise Unsupported(
                "Writing an SQLite store needs POSIX file locks, which this system hasn't. "
                "Use a PostgreSQL store (postgresql://...), or a store in memory."
            ) from None
        self._path = path
        self._fd: int | None = None
        until_s = time.monotonic() + _LOOK_S
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise StoreUnwritable(
                    f"{what} can't be locked for writing: {path}: {error.strerror}. Make the folder writable."
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until_s and _only_looked_at(fd):
                    os.close(fd)
                    time.sleep(0.001)
                    continue
                holder = _holder(fd)
                os.close(fd)
                raise StoreLocked(
                    f"{what} is open for writing by {holder}. Wait for it or stop it; reading works meanwhile."
                ) from None
            except OSError as error:
                os.close(fd)
                raise StoreUnwritable(
                    f"{what} can't be locked for writing: {path}: {error.strerror}. "
                    "Put the store on a file system with file locks."
                ) from error
            if _same(fd, path):  # else its holder removed it between our open and our lock
                break
            os.close(fd)
        self._fd = fd
        _held.add(self)
        with suppress(OSError):  # disk full: the lock holds all the same, only its message is poorer
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Give it up. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.unlink(self._path)  # still locked: nobody can lock this file and see it vanish later
            os.close(fd)

    def _forget(self) -> None:
        """In a forked child: let go of the descriptor without unlocking it for the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def holder_of(path: Path) -> str | None:
    """Who holds the lock of a file, in words; None: nobody.

    Takes it shared and gives it back at once: whoever wants it meanwhile sees that it is only looked at, and waits.
    """
    try:
        import fcntl
    except ImportError:
        return None  # nobody can have locked it
    while True:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError:
            return "another process"  # not to be known: better than to say that there is none
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            same = _same(fd, path)
            fcntl.flock(fd, fcntl.LOCK_UN)  # by word, for a child forked meanwhile has the descriptor, too
        except OSError:
            return _holder(fd)
        finally:
            os.close(fd)
        if same or not path.exists():  # else its holder removed it, and another one has made it anew
            return None


def _only_looked_at(fd: int) -> bool:
    """Whether a file that can't be locked is held shared alone, by who looks at it."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return False
    return True


def _same(fd: int, path: Path) -> bool:
    try:
        ours, there = os.fstat(fd), os.stat(path)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _holder(fd: int) -> str:
    try:
        holder: Any = json.loads(os.pread(fd, 4096, 0))
        pid, host = holder["pid"], holder["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    if pid == os.getpid() and host == socket.gethostname():
        return f"this process (pid {pid} on {host}), through another open store"
    return f"process {pid} on {host}"


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
