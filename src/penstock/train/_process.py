"""The worker's side of the local executor: a warm process that takes segments one by one."""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, final

from penstock.train._checkpoint import Report
from penstock.train._guardian import kill_sessions
from penstock.train._memory import give_back, keep_freed
from penstock.train._worker import End, Settings, Spec, one_line, run_all, user_traceback

MESSAGE_BYTES = 1 << 17
"""Longest message of the queue; a longer one travels in a file."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)
"""By which libraries are told how many threads they may use."""

FRAME = struct.Struct("<I")
TICKET = struct.Struct("<Q")
QUIT = b"Q"
SPILLED = b"F"

_FLUSH_S = 0.005
_GATHER_S = 0.001
_TIDY_S = 1.0
_BURST = 8.0
_FLUSH_COUNT = 64
_LOG_BYTES = 16 << 20
_LOG_KEPT_BYTES = 2 << 20


@final
class Channel:
    """Messages to the driver, gathered for a few milliseconds, and stop commands from it.

    The main thread posts; a background thread sends what lies too long because a training is busy, watches the
    driver and keeps the log short.
    """

    def __init__(self, control: socket.socket, driver: int, lifeline: int, parent: int | None = None) -> None:
        self._control = control
        self._driver = driver
        self._parent = driver if parent is None else parent  # the nursery, of a forked worker
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._out: list[tuple[Any, ...]] = []
        self._flushed_s = time.monotonic()
        self._in = bytearray()
        self._stops: dict[int, list[tuple[int, str, bool]]] = {}
        self._asleep = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self.dead = False  # in a forked child
        self._credit = _BURST
        self._posted_s = 0.0
        self.short = False  # the last segment was over in no time: the next may be, too, so gather more
        self.began_s = 0.0
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._watch, name="penstock-watch", daemon=True).start()

    def _forked(self) -> None:
        """A child of the training must neither speak for the worker nor keep its pipes open."""
        self.dead = True
        self._lock = threading.Lock()
        for close in (
            self._control.close,
            *(lambda fd=fd: os.close(fd) for fd in (self._wake_r, self._wake_w)),
        ):
            with contextlib.suppress(OSError):
                close()

    def post(self, message: tuple[Any, ...]) -> None:
        """Send soon."""
        if self.dead:
            return
        with self._lock:
            self._out.append(message)
            count = len(self._out)
        now_s = time.monotonic()
        if self.short and now_s - self.began_s < _FLUSH_S:
            due = now_s - self._flushed_s > _FLUSH_S
        else:  # at once, for the training may hold the interpreter for long; but not thousands of times a second
            self._credit = min(_BURST, self._credit + (now_s - self._posted_s) / _GATHER_S)
            due = self._credit >= 1
            self._credit -= due
        self._posted_s = now_s
        if due or count >= _FLUSH_COUNT:
            self.flush()
        elif self._asleep:
            self._asleep = False
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b".")

    def flush(self) -> None:
        """Send what is gathered, now."""
        if self.dead or not self._out:
            return
        with self._lock:
            out, self._out = self._out, []
            if out:
                data = pickle.dumps(out, protocol=5)
                self._control.sendall(FRAME.pack(len(data)) + data)
            self._flushed_s = time.monotonic()

    def told(self, ticket: int, trial: int) -> tuple[str, bool] | None:
        """The stop command for this trial of this ticket, if there is one."""
        if self.dead:
            return "forked", False
        try:
            while True:
                data = self._control.recv(65536, socket.MSG_DONTWAIT)
                if not data:
                    break
                self._in += data
        except (BlockingIOError, InterruptedError):
            pass
        while len(self._in) >= FRAME.size:
            (length,) = FRAME.unpack_from(self._in)
            if len(self._in) < FRAME.size + length:
                break
            of, which, reason, keep = pickle.loads(bytes(self._in[FRAME.size : FRAME.size + length]))
            del self._in[: FRAME.size + length]
            if of >= ticket:
                self._stops.setdefault(of, []).append((which, reason, keep))
        for which, reason, keep in self._stops.get(ticket, ()):
            if which == trial:
                return reason, keep
        return None

    def forget(self, ticket: int) -> None:
        """The ticket is done."""
        if self._stops:
            self._stops.pop(ticket, None)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.register(self._lifeline, select.POLLIN | select.POLLHUP)
        lifelines = {self._lifeline}
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(self._driver)
                poll.register(pidfd, select.POLLIN)
                lifelines.add(pidfd)
        log_s = 0.0
        while os.getppid() == self._parent:
            idle = not self._out
            self._asleep = idle
            try:
                ready = poll.poll(500 if idle else 1000 * _FLUSH_S)
            except InterruptedError:
                continue
            if any(fd in lifelines for fd, _ in ready):
                break
            if ready:
                os.read(self._wake_r, 4096)
                continue
            if not idle:
                try:
                    self.flush()
                except OSError:
                    break
            now_s = time.monotonic()
            if now_s - log_s > 0.2:
                log_s = now_s
                with contextlib.suppress(OSError):
                    trim_log(1)
        kill_sessions({os.getsid(0)})  # the driver is gone, so are we and all that the training started
        os._exit(1)


def trim_log(fd: int) -> None:
    """Keep the tail of a log that has grown too long. Its writers append, so they go on at the new end."""
    size = os.fstat(fd).st_size
    if size <= _LOG_BYTES:
        return
    with open(f"/proc/self/fd/{fd}" if os.path.exists("/proc/self/fd") else f"/dev/fd/{fd}", "rb") as file:
        file.seek(size - _LOG_KEPT_BYTES)
        tail = file.read(_LOG_KEPT_BYTES)
    os.ftruncate(fd, 0)
    os.write(fd, b"... earlier output dropped: the log had grown over 16 MB ...\n" + tail)


@final
class _Sink:
    """Sends one trial's news on the channel."""

    __slots__ = ("_channel", "_offset_s", "_ticket", "_trial")
    any_thread = True

    def __init__(self, channel: Channel, ticket: int, trial: int, offset_s: float) -> None:
        self._channel = channel
        self._ticket = ticket
        self._trial = trial
        self._offset_s = offset_s

    def started(self, start: int) -> None:
        self._channel.post(("s", self._ticket, self._trial, self._offset_s + time.monotonic(), start))

    def reported(self, report: Report) -> None:
        self._channel.post(("r", self._ticket, self._trial, self._offset_s + time.monotonic(), *report))

    def saved(self, epoch: int, path: str) -> None:
        self._channel.post(("c", self._ticket, self._trial, self._offset_s + time.monotonic(), epoch, path))

    def noted(self, topic: str, data: dict[str, Any]) -> None:
        self._channel.post(("n", self._ticket, self._trial, self._offset_s + time.monotonic(), topic, data))

    def told(self) -> tuple[str, bool] | None:
        return self._channel.told(self._ticket, self._trial)

    def ended(self, end: End) -> None:
        self._channel.post(("e", self._ticket, self._trial, self._offset_s + time.monotonic(), *end))


_loading = False


def loads_work() -> bool:
    """Whether this is a worker that imports the modules of its work, and wants nothing of them but definitions."""
    return _loading


def _load(blob: bytes) -> Any:
    global _loading
    _loading = True
    try:
        return pickle.loads(blob)
    finally:
        _loading = False


def main(argv: list[str]) -> NoReturn:
    """Serve until told to quit or the driver is gone."""
    control_fd, queue_fd, lifeline_fd, blob_fd, board_fd, slot, driver, *nursery = map(int, argv)
    for fd in (control_fd, queue_fd, lifeline_fd, blob_fd, board_fd):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_freed()
    channel = Channel(socket.socket(fileno=control_fd), driver, lifeline_fd, *nursery)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        size = os.fstat(blob_fd).st_size
        blob = os.pread(blob_fd, size, 0)
        head = FRAME.unpack_from(blob)[0]
        facts = pickle.loads(blob[FRAME.size : FRAME.size + head])
        sys.path[:] = facts["path"]
        sys.argv[:] = facts["argv"]
        with contextlib.suppress(OSError):
            os.chdir(facts["cwd"])
        work = _load(blob[FRAME.size + head :])
        del blob
        os.close(blob_fd)
    except BaseException as error:
        channel.post(("x", one_line(error), user_traceback(error)))
        channel.flush()
        os._exit(3)
    gc.freeze()  # libraries and the work stay: full collections during a training need not look at them
    channel.post(("y", os.getpid()))
    channel.flush()
    _serve(
        channel, socket.socket(fileno=queue_fd), board_fd, slot, facts["settings"], work, facts["offset_s"]
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(
    channel: Channel,
    queue: socket.socket,
    board_fd: int,
    slot: int,
    settings: Settings,
    work: Any,
    offset_s: float,
) -> None:
    me = os.getpid()
    board = mmap.mmap(board_fd, 0)
    buffer = bytearray(MESSAGE_BYTES)
    view = memoryview(buffer)
    first = True
    while True:
        try:
            length = queue.recv_into(view, MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            length = queue.recv_into(view, MESSAGE_BYTES)
        message = view[:length]
        kind = bytes(message[:1])
        if length == 0 or kind == QUIT:
            return
        if kind == SPILLED:
            path = Path(os.fsdecode(bytes(message[1:])))
            ticket, specs, devices, threads, facts = pickle.loads(path.read_bytes())
        else:
            ticket, specs, devices, threads, facts = pickle.loads(message)
        # So that our death is blamed on the right segment:
        TICKET.pack_into(board, TICKET.size * slot, ticket)
        _use_threads(threads)
        if first:
            first = False
            _open_sensors(settings, devices)
        specs = [Spec._make(spec) for spec in specs]
        sinks = [_Sink(channel, ticket, spec.trial, offset_s) for spec in specs]
        os.write(2, b"--- trial %s\n" % b", ".join(b"%d" % spec.trial for spec in specs))
        channel.began_s = time.monotonic()
        for spec, sink in zip(specs, sinks, strict=True):
            sink.started(spec.start)
        ends: list[tuple[_Sink, End]] = []

        def tell(number: int, end: End, sinks: list[_Sink] = sinks, ends: list[Any] = ends) -> None:
            ends.append((sinks[number], end))
            if len(sinks) > 1 and os.getpid() == me:  # of several, who is done is not kept waiting
                sinks[number].ended(end)

        run_all(work, specs, settings, sinks, tell, devices=devices, threads=threads, facts=facts)
        if os.getpid() != me:  # the training forked and its child came back here
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(0)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if len(sinks) == 1:
            for sink, end in ends:
                sink.ended(end)
        channel.flush()  # all of it, before the next segment begins: should that one kill us, this one is not lost
        taken_s = time.monotonic() - channel.began_s
        channel.short = taken_s < _FLUSH_S
        if taken_s > _TIDY_S:
            _tidy()
        channel.forget(ticket)


def _open_sensors(settings: Settings, devices: tuple[str, ...]) -> None:
    """Before the first segment, so that it seems to take no longer than the next."""
    if settings.make_meter is not None and not hasattr(settings.make_meter, "for_trial"):
        with contextlib.suppress(Exception):  # whoever needs it will be told
            settings.make_meter(devices)


def _tidy() -> None:
    """Give memory back before the next trial, which may share its device with others."""
    gc.collect()
    give_back()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _use_threads(threads: int) -> None:
    """Let torch and what is started from here use so many: a training may have changed it, or this one is wider."""
    torch = sys.modules.get("torch")
    if os.environ.get(THREAD_VARIABLES[0]) != str(threads):
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    if torch is not None and hasattr(torch, "get_num_threads") and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
