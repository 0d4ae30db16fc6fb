"""Holds the power limits of devices and gives them back, whatever happens to the process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, final

from penstock.core.errors import NotPermitted, PenstockError, Unsupported
from penstock.energy._sensor import Sensor
from penstock.energy._shared import runtime_folder


@final
class LimitGuard:
    """Changes power limits and restores what they were: on ``restore``, at the end of a ``with`` block or of the
    process, on SIGTERM, and, by a watchdog process, when the process is killed.

    One process at a time holds a device's limit; a file in the runtime folder tells who, and what the limit was, so
    that a process that comes after a killed one restores the right limit. Nothing changes before ``hold``.
    """

    def __init__(self, sensors: Sequence[Sensor]) -> None:
        self._sensors = tuple(sensors)
        self._pid = os.getpid()
        self._original_w: dict[int, float] = {}
        self._files: list[IO[str]] = []  # the claims, and
        self._told: list[dict[str, Any]] = []  # what they say
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._old_handler: Any = None
        self._handles_signal = False
        self._lock = threading.RLock()

    @property
    def held(self) -> bool:
        """Whether limits are held now."""
        return bool(self._original_w)

    @property
    def original_w(self) -> tuple[float, ...]:
        """The limits to go back to, in the sensors' order."""
        return tuple(self._original_w.values())

    def hold(self) -> None:
        """Take the limits over.

        Raises:
            Unsupported: A device has no limit to set.
            NotPermitted: This user may not set limits, or another process holds one of them.
        """
        with self._lock:
            if self.held:
                return
            self._pid = os.getpid()
            for sensor in self._sensors:
                if sensor.power_limit_range_w is None:
                    raise Unsupported(f"{sensor.name} ({sensor.id}) has no power limit to set.")
            try:
                for index, sensor in enumerate(self._sensors):
                    original_w, left = self._claim(sensor)
                    try:
                        sensor.set_power_limit_w(original_w)  # no change, but shows whether we may
                    except BaseException:
                        if left:  # whoever may set it still has to know what it was
                            self._files.pop().close()
                            self._told.pop()
                        raise
                    self._original_w[index] = original_w
            except BaseException:
                self._release()
                raise
            self._start_watchdog()
            for index, file in enumerate(self._files):
                _write_claim(file, self._told[index] | {"watched": True})
            atexit.register(self.restore)
            if threading.current_thread() is threading.main_thread():
                self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
                self._handles_signal = True

    def set(self, limit_w: float) -> None:
        """Give every device this limit.

        Raises:
            SensorError: A device does not take it; those before it have.
        """
        for sensor in self._sensors:
            sensor.set_power_limit_w(limit_w)

    def restore(self) -> None:
        """Give every device its own limit back. Idempotent; safe at exit."""
        with self._lock:
            if not self.held or self._pid != os.getpid():
                return
            failed = False
            for index, limit_w in self._original_w.items():
                try:
                    self._sensors[index].set_power_limit_w(limit_w)
                except PenstockError:
                    failed = True  # a lost GPU forgets its limit; go on with the others
            self._release()
            self._stop_watchdog(clean=not failed)
            atexit.unregister(self.restore)
            if self._handles_signal and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                with contextlib.suppress(ValueError):  # not the main thread any more
                    signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
            self._handles_signal = False

    def __enter__(self) -> LimitGuard:
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _claim(self, sensor: Sensor) -> tuple[float, bool]:
        """Become the one that holds the device's limit; returns what to restore, and if a killed process left it so."""
        now_w = sensor.power_limit_w()
        if sensor.restore_key is None:
            return now_w, False
        opened = os.open(claim_path(sensor.restore_key), os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(opened, "r+")  # held until restored
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = read_claim(file).get("pid", "unknown")
            file.close()
            raise NotPermitted(
                f"Process {holder} holds the power limit of {sensor.name} ({sensor.id}). Two jobs can't set one"
                " device's limit: wait for it, or run this one without."
            ) from None
        self._files.append(file)
        file.seek(0)
        # Left by a process that was killed, its watchdog too: the limit now is not the device's own.
        left = read_claim(file).get("limit_w")
        original_w = float(left) if left is not None else now_w
        self._told.append({"pid": os.getpid(), "limit_w": original_w})
        _write_claim(file, self._told[-1])
        return original_w, left is not None

    def _release(self) -> None:
        self._original_w = {}
        for file in self._files:
            _write_claim(file, None)
            file.close()
        self._files, self._told = [], []

    def _start_watchdog(self) -> None:
        limits = {
            key: self._original_w[index]
            for index, sensor in enumerate(self._sensors)
            if (key := sensor.restore_key) is not None
        }
        if not limits:
            return
        told = json.dumps(limits).encode() + b"\n"
        self._watchdog = _take_spare(told)
        if self._watchdog is not None:
            return
        self._watchdog = subprocess.Popen(
            [sys.executable, "-c", "from penstock.energy._watchdog import main; main()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C or a kill of our group is not for it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(told)
        self._watchdog.stdin.flush()
        _pipes.add(self._watchdog.stdin)

    def _stop_watchdog(self, *, clean: bool) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None:
            return
        assert watchdog.stdin is not None
        if clean and _keep_spare(watchdog):
            return
        _pipes.discard(watchdog.stdin)
        with contextlib.suppress(OSError):
            if clean:
                watchdog.stdin.write(b"clean\n")
            watchdog.stdin.close()
        # It ends by itself; a thread collects it, so that neither a zombie is left nor anybody waits.
        with contextlib.suppress(RuntimeError):  # too late for threads: the interpreter is ending
            threading.Thread(target=watchdog.wait, name="penstock-watchdog", daemon=True).start()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        old: Callable[[int, FrameType | None], Any] | int | None = self._old_handler
        self.restore()
        if callable(old):
            old(number, frame)
        elif old != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def claim_path(key: str) -> str:
    """The file that tells who holds a device's limit."""
    return str(runtime_folder() / f"limit-{zlib.crc32(key.encode()):08x}")


def read_claim(file: IO[str]) -> dict[str, Any]:
    """Who holds a limit, what it was, and whether a watchdog knows it; nothing if nobody does."""
    try:
        value = json.loads(file.read() or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write_claim(file: IO[str], value: dict[str, Any] | None) -> None:
    with contextlib.suppress(OSError):
        if value is None:
            os.ftruncate(file.fileno(), 0)
        else:  # in one go: who is killed on the way must not take along what the limit was
            size = os.fstat(file.fileno()).st_size
            os.pwrite(file.fileno(), json.dumps(value).encode().ljust(size), 0)


_pipes: set[IO[bytes]] = set()

_spare: tuple[subprocess.Popen[bytes], dict[str, str]] | None = None
"""A watchdog with nothing to watch, and the environment it was started in. A worker that runs trial after trial needs
one all the time: a new interpreter for each would cost more than a short trial."""
_spare_lock = threading.Lock()


def _take_spare(told: bytes) -> subprocess.Popen[bytes] | None:
    global _spare
    with _spare_lock:
        spare, _spare = _spare, None
    if spare is None:
        return None
    watchdog, environment = spare
    assert watchdog.stdin is not None
    try:
        if environment == dict(os.environ) and watchdog.poll() is None:
            watchdog.stdin.write(told)
            watchdog.stdin.flush()
            return watchdog
    except OSError:
        pass  # it was killed meanwhile
    _pipes.discard(watchdog.stdin)
    with contextlib.suppress(OSError):
        watchdog.stdin.close()
    watchdog.wait()  # it has nothing to restore, so ends at once
    return None


def _keep_spare(watchdog: subprocess.Popen[bytes]) -> bool:
    global _spare
    assert watchdog.stdin is not None
    with _spare_lock:
        if _spare is not None:
            return False
        try:
            watchdog.stdin.write(b"clean\n")
            watchdog.stdin.flush()
        except OSError:
            return False
        _spare = watchdog, dict(os.environ)
        return True


def _forget_pipes() -> None:
    """In a forked child: its copy of a pipe would keep the watchdog waiting when the parent is killed."""
    global _spare, _spare_lock
    _spare, _spare_lock = None, threading.Lock()
    for pipe in list(_pipes):
        with contextlib.suppress(OSError, ValueError):
            # Not closed: the number could be reused, and closed again with the file object.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, pipe.fileno(), inheritable=False)
            os.close(null)
    _pipes.clear()


os.register_at_fork(after_in_child=_forget_pipes)
