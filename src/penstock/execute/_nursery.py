"""The driver's side of the nursery: workers as forks of one process that has imported torch already.

Importing torch takes seconds of CPU time. Without a nursery each worker of each study spends them anew.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import functools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, final

from penstock.train._nursery import FORK, HEADER, REAP, REPLY, SETUP

_READY_S = 120.0
_LIGHT = (
    "penstock.train._process",
    "penstock.energy",
    "cloudpickle",
    "psutil",
)  # what a worker imports in any case
_OPTIMIZERS = ("torch._dynamo", "penstock.train._fused_worker")
"""The first optimizer a process makes imports torch's compiler, which takes longer than torch itself."""
_SIGNS = {"optim", "manual_seed", "prepare"}
# Read when libraries are loaded: nurseries started under other values are not used.
_LOAD_PREFIXES = (
    "LD_",
    "PYTHON",
    "TORCH",
    "PYTORCH",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "CUDA_",
    "NVIDIA_",
)
_NOT_AT_LOAD = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "PYTHONHASHSEED",
        # Set by scikit-learn, torch's compiler and torch.cuda in the driver, when it comes to import or use them:
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_MODULE_LOADING",
    }
)
_BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from penstock.train._nursery import main
main(sys.argv[2:])
"""


@final
class Forked:
    """A worker the nursery has forked, with what the executor uses of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._pidfd = os.pidfd_open(pid)

    def is_over(self) -> bool:
        """Whether it has ended; it is left to be reaped."""
        return self.returncode is not None or bool(select.select([self._pidfd], [], [], 0)[0])

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self.wait() if self.is_over() else None

    def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, as soon as it has ended."""
        if self.returncode is None:
            select.select([self._pidfd], [], [])
            self.returncode = self._nursery.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode


@final
class Nursery:
    """One process that forks workers on request. Shared by all executors of this process."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, root, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
        self._sock = ours
        self._sock.settimeout(_READY_S)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._out_of_step = False  # an exchange was broken off
        self._modules: set[str] = set()
        self._awaited = 0  # answers to what it was told to import
        self.import_too(modules)

    @property
    def usable(self) -> bool:
        """Whether it lives, and is this process's own."""
        return self._owner == os.getpid() and not self._out_of_step and self._process.poll() is None

    def import_too(self, modules: Sequence[str]) -> bool:
        """Let it begin to import what it lacks; False where it has ended."""
        with self._lock:
            more = [name for name in modules if name not in self._modules]
            if not more or self._out_of_step:
                return not more
            path = [os.path.abspath(entry) if entry == "" else entry for entry in sys.path]
            try:
                self._send(SETUP, pickle.dumps((path, more)))
            except OSError:
                return False
            self._modules.update(more)
            self._awaited += 1
        return True

    def fork(
        self, environment: Mapping[str, str], log: int, fds: Sequence[int], numbers: Sequence[int]
    ) -> Forked:
        """A new worker. Raises OSError where there is none to be had."""
        try:
            cwd = os.getcwd()
        except OSError:
            cwd = "/"
        asked = {"environment": dict(environment), "numbers": list(numbers), "cwd": cwd}
        asked["cores"] = os.sched_getaffinity(0)
        pid = self._ask(FORK, pickle.dumps(asked), [log, *fds])
        if pid <= 0:
            raise OSError(-pid, os.strerror(-pid))
        return Forked(self, pid)

    def reap(self, pid: int) -> int:
        """The exit code of a worker that is over."""
        try:
            return self._ask(REAP, REPLY.pack(pid))
        except OSError:
            return -signal.SIGKILL  # the nursery is gone, and its workers with it

    def end(self) -> None:
        """End it, with the workers it still has."""
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, kind: bytes, body: bytes, fds: Sequence[int] = ()) -> int:
        with self._lock:
            if self._out_of_step:
                raise ConnectionError("The process that forks workers no longer answers.")
            self._out_of_step = True  # until the answer is there
            while self._awaited:
                self._receive()
                self._awaited -= 1
            self._send(kind, body, fds)
            answer = self._receive()
            self._out_of_step = False
        return answer

    def _send(self, kind: bytes, body: bytes, fds: Sequence[int] = ()) -> None:
        header = HEADER.pack(kind, len(body))
        if fds:
            socket.send_fds(self._sock, [header], list(fds))
        else:
            self._sock.sendall(header)
        self._sock.sendall(body)

    def _receive(self) -> int:
        data = bytearray()
        while len(data) < REPLY.size:
            more = self._sock.recv(REPLY.size - len(data))
            if not more:
                raise ConnectionError("The process that forks workers has ended.")
            data += more
        return int(REPLY.unpack(data)[0])


_nurseries: dict[tuple[tuple[str, str], ...], Nursery] = {}
_guard = threading.Lock()


def needs(work: Any) -> tuple[str, ...]:
    """Heavy modules that workers will import for a Task or a training function; what its code names tells."""
    from penstock.train._task import Task

    if isinstance(work, Task):
        return ("torch", *_LIGHT, *_OPTIMIZERS)
    while isinstance(work, functools.partial):
        work = work.func
    code = getattr(work, "__code__", None)
    waiting = [code] if isinstance(code, CodeType) else []
    imported, names = set(sys.modules), set[str]()
    while waiting:
        code = waiting.pop()
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        names.update(code.co_names)
        steps = (step for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
        imported.update(str(step.argval).split(".")[0] for step in steps)
    if "torch" not in imported:
        return ()
    return ("torch", *_LIGHT, *(_OPTIMIZERS if names & _SIGNS else ()))


def nursery_for(environment: Mapping[str, str], modules: Sequence[str]) -> Nursery | None:
    """The nursery for workers of an environment; None where a new interpreter is as good or the only way.

    That is: where nobody needs heavy ``modules``, unless ``PENSTOCK_NURSERY=1`` asks for one all the same (workers that
    die often start again in milliseconds); on systems other than Linux, whose libraries don't all survive a fork; where
    ``PENSTOCK_NURSERY=0`` forbids it.
    """
    asked = environment.get("PENSTOCK_NURSERY")
    modules = modules or (_LIGHT if asked == "1" else ())
    if not modules or sys.platform != "linux" or asked == "0":
        return None
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    key = tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(_LOAD_PREFIXES) and name not in _NOT_AT_LOAD
        )
    )
    with _guard:
        found = _nurseries.get(key)
        if found is None or not found.usable:
            try:
                found = _nurseries[key] = Nursery(environment, modules)
            except OSError:
                return None
    return found if found.import_too(modules) else None


@atexit.register
def _end_all() -> None:
    for nursery in _nurseries.values():
        if nursery.usable:
            nursery.end()
    _nurseries.clear()


def drop(nursery: Nursery) -> None:
    """Forget a nursery that does not answer."""
    with _guard:
        for key, known in list(_nurseries.items()):
            if known is nursery:
                del _nurseries[key]
    with contextlib.suppress(OSError):
        nursery.end()
