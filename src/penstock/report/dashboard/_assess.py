"""Parameter importance in a process of its own: a forest takes seconds, and nobody else should wait for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, final

from penstock.core.errors import PenstockError

_ROOT = str(Path(__file__).resolve().parents[3])
IDLE_S = 300.0
"""A process without work for so long ends: it holds the memory of two libraries."""


@final
class Assessor:
    """Hands the input of ``views.importance`` to a process and waits for what it says. For one thread at a time.

    The process starts with the first question and stays for the next ones, since most of its time goes into loading
    Optuna and scikit-learn. ``close`` may come from any thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def assess(self, given: dict[str, Any]) -> dict[str, Any]:
        """The importance of each hyperparameter.

        Raises:
            PenstockError: The process failed.
        """
        for _ in range(2):  # it may end of idleness just now
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except (OSError, ValueError):
                line = b""
            if line:
                break
            self._end()
        else:
            raise PenstockError(
                "The process that assesses parameters ended without an answer; its log says why."
            )
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PenstockError(f"The importance was not found: {answer['failed']}")
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise PenstockError("The dashboard is closing.")
        if self._process is None or self._process.poll() is not None:
            # -P: nothing is imported from the folder the dashboard was started in, which is often where stores of
            # others lie. Penstock itself may be there, and comes last.
            code = f"import sys; sys.path.append({_ROOT!r}); from {__name__} import answer; answer()"
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=pipe, stdout=pipe)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what was not written is of no use to anybody
                        stream.close()


def answer() -> None:
    """The process: one line of JSON in, one out, until the other end closes."""
    from penstock.report.views import importance

    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints is no answer
    while True:
        waiting = threading.Timer(IDLE_S, os._exit, (0,))
        waiting.daemon = True
        waiting.start()
        line = sys.stdin.readline()
        waiting.cancel()
        if not line:
            return
        try:
            told = importance(json.loads(line))
        except Exception as error:  # the next question may be a better one
            told = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(told, allow_nan=False), file=out, flush=True)
