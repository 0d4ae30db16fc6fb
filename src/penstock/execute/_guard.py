"""A process that outlives its maker for a moment, to end what the maker's children have started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import final

from penstock.execute._child import Child
from penstock.train import _guardian

# Ray kills the children of an actor that it ends, but not theirs: what a training has started. So the guardian that
# does must not be the actor's child; the pipe and the pidfd tell it of the actor's end.
_DETACHED = """
import os, sys
if os.fork():
    os._exit(0)
actor = int(sys.argv[1])
os.getppid = lambda: actor
sys.path.append(sys.argv[2])
import _guardian
_guardian.main()
"""


@final
class Guard:
    """Watches worker processes, and ends their sessions when this process dies or closes it.

    Args:
        detached: It must not be our child.
    """

    def __init__(self, *, detached: bool = False) -> None:
        path, us = _guardian.__file__, str(os.getpid())
        told = ["-c", _DETACHED, us, os.path.dirname(path)] if detached else [path, us]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        if detached:
            self._process.wait()

    @property
    def pid(self) -> int:
        """Its process; of a detached one, the one that made it."""
        return self._process.pid

    def watch(self, child: Child) -> None:
        """One more."""
        self._tell(b"+%d\n" % child.process.pid)

    def end(self, children: Sequence[Child]) -> list[int]:
        """End worker processes with all they have started and close our ends of their pipes; their exit codes."""
        if not children:
            return []
        # Before they are reaped: until then the numbers are their own.
        _guardian.kill_sessions({child.process.pid for child in children})
        codes = []
        for child in children:
            child.process.kill()
            codes.append(child.process.wait())
            self._tell(b"-%d\n" % child.process.pid)
            child.close()
        return codes

    def _tell(self, line: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), line)

    def close(self) -> None:
        """Nothing is left to watch."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()
