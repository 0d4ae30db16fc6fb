"""Python programs as processes of their own that need not import what one process has imported for all of them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

_SERVER = """
import gc, importlib, json, os, runpy, sys

def serve(requests, replies):
    for line in requests:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            return asked
        _, status = os.waitpid(child, 0)
        replies.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\\n")
        replies.flush()
    sys.exit()

requests, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
gc.disable()  # while nothing but imports is done
for name in sys.argv[3:]:
    importlib.import_module(name)
gc.enable()
gc.freeze()  # so that the pages stay shared
asked = serve(requests, replies)
requests.close(), replies.close()
for fd, path in ((1, asked["out"]), (2, asked["err"])):
    file = os.open(path, os.O_WRONLY)
    os.dup2(file, fd)
    os.close(file)
os.environ.clear()
os.environ.update(asked["env"])
os.chdir(asked["cwd"])
program, *arguments = asked["arguments"]
gc.unfreeze()
if program == "-c":
    sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
    exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
else:
    sys.argv, sys.path[0] = [program, *arguments], os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")
"""


@final
class Programs:
    """Runs programs one after the other, each in a fork of one process that has imported ``modules``.

    What a program does, what it prints and how it ends is its own; only the seconds in which an interpreter starts and
    imports libraries are spent once. Linux and macOS.
    """

    def __init__(self, *modules: str) -> None:
        asks, self._requests = os.pipe()
        self._replies, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(asks), str(answers), *modules],
            stdin=subprocess.DEVNULL,
            pass_fds=(asks, answers),
            start_new_session=True,
        )
        os.close(asks)
        os.close(answers)

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._requests)
        os.close(self._replies)
        self._process.wait()

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *arguments`` (a path or ``-c`` first) to its end.

        Raises:
            TimeoutError: It takes longer; nothing more can be run then.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            asked = {
                "arguments": list(arguments),
                "cwd": os.fspath(cwd),
                "env": dict(os.environ if env is None else env),
                "out": str(out),
                "err": str(err),
            }
            os.write(self._requests, (json.dumps(asked) + "\n").encode())
            if not select.select([self._replies], [], [], timeout)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise TimeoutError(f"{arguments} took longer than {timeout} s: {err.read_text()[-2000:]}")
            reply = os.read(self._replies, 64)
            if not reply:
                raise RuntimeError("The process that runs programs has ended.")
            return subprocess.CompletedProcess(
                list(arguments), json.loads(reply), out.read_text(), err.read_text()
            )
