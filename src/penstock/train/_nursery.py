"""A process that has imported the heavy libraries once and forks workers, which start in milliseconds.

It never computes anything itself and starts no threads, so its children begin as clean as newly started
interpreters that have done their imports. Children are reaped only on request: until then their numbers are their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any, NoReturn

from penstock.train._guardian import kill_sessions

HEADER = struct.Struct("<cI")
REPLY = struct.Struct("<q")
SETUP, FORK, REAP = b"I", b"F", b"W"
MAX_FDS = 8
_LOOK_S = 5.0  # a process the driver forked may keep the socket open after its death
IDLE_S = 300.0
"""A nursery without workers ends after this time; the next study that needs one starts another."""


def main(argv: list[str]) -> NoReturn:
    """Serve until the driver is gone, or nothing was asked for some time."""
    sock = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(sock.fileno(), False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver = os.getppid()
    children: set[int] = set()
    asked_s = time.monotonic()
    while os.getppid() == driver:
        if not select.select([sock], [], [], _LOOK_S)[0]:
            if not children and time.monotonic() - asked_s > IDLE_S:
                break
            continue
        asked_s = time.monotonic()
        kind, body, fds = _receive(sock)
        if kind == SETUP:
            _import(*pickle.loads(body))
            gc.collect()
            gc.freeze()  # the collector leaves these pages alone, so that they stay shared
            sock.sendall(REPLY.pack(os.getpid()))
        elif kind == FORK:
            pid = _fork(sock, body, fds)
            if pid > 0:
                children.add(pid)
            sock.sendall(REPLY.pack(pid))
        elif kind == REAP:
            (pid,) = REPLY.unpack(body)
            done, status = os.waitpid(pid, 0) if pid in children else (pid, signal.SIGKILL)
            children.discard(done)
            sock.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
        else:
            break
    if children:
        kill_sessions(children)
    os._exit(0)


def _receive(sock: socket.socket) -> tuple[bytes, bytes, list[int]]:
    try:
        header, fds, _, _ = socket.recv_fds(sock, HEADER.size, MAX_FDS, socket.MSG_WAITALL)
        if len(header) < HEADER.size:
            return b"", b"", []
        kind, length = HEADER.unpack(header)
        body = bytearray()
        while len(body) < length:
            data = sock.recv(length - len(body))
            if not data:
                return b"", b"", []
            body += data
    except OSError:
        return b"", b"", []
    return kind, bytes(body), fds


def _import(path: list[str], modules: list[str]) -> None:
    """Import what the driver has imported; what fails here fails in the worker with its own reason."""
    sys.path[:] = path
    gc.disable()  # what is imported stays: a seventh of the time would go to looking for garbage in it
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.enable()


def _fork(sock: socket.socket, body: bytes, fds: list[int]) -> int:
    ready_r, ready_w = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(ready_w)
        pid = -(error.errno or 1)
    else:
        if pid == 0:
            os.close(ready_r)
            _child(sock, pickle.loads(body), fds, ready_w)
        os.close(ready_w)
        os.read(ready_r, 1)  # it has a session of its own now: it can be killed with all it starts
    os.close(ready_r)
    for fd in fds:
        os.close(fd)
    return pid


def _child(sock: socket.socket, asked: dict[str, Any], fds: list[int], ready: int) -> NoReturn:
    try:
        nursery = os.getppid()
        os.setsid()
        os.close(ready)
        sock.close()
        log, *fds = fds
        nothing = os.open(os.devnull, os.O_RDONLY)
        for mine, theirs in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(mine, theirs)
        os.close(log)
        os.close(nothing)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["cwd"])
        os.sched_setaffinity(0, asked["cores"])
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # Python's own generator does so by itself after a fork
        from penstock.train._process import main as serve

        serve([*map(str, fds), *map(str, asked["numbers"]), str(nursery)])
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(1)
