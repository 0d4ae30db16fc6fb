"""The Python side of the NVML stub: builds the library, writes and reads its state file."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import time
from pathlib import Path

MAX_DEVICES, MAX_PIDS = 16, 64
NO_COUNTER, NO_ENERGY_FUNCTION, STALLED, LOST, LOCKED, MIG, NO_LIMIT = 1, 2, 4, 8, 16, 32, 64
ENVIRONMENT = "PENSTOCK_NVML_STUB"


class _Device(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 64),
        ("uuid", ctypes.c_char * 64),
        *[(name, ctypes.c_double) for name in ("load_w", "idle_w", "limit_w", "min_w", "max_w", "default_w")],
        *[(name, ctypes.c_double) for name in ("energy_j", "settled_s", "stalled_j", "quantum_s")],
        ("flags", ctypes.c_int64),
        ("sets", ctypes.c_int64),
    ]


class _Pid(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_int64), ("calls", ctypes.c_int64 * 4)]


class _State(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("is_virtual", ctypes.c_int64),
        ("now_s", ctypes.c_double),
        ("unused", ctypes.c_double),
        ("devices", _Device * MAX_DEVICES),
        ("pids", _Pid * MAX_PIDS),
    ]


def build(folder: Path, *flags: str) -> Path:
    """Compile the library under the name that nvidia-ml-py loads; returns its path."""
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source], check=True)
    return library


class NvmlStub:
    """Fake GPUs in a state file. ``state.devices[i]`` has the raw fields; methods settle the joules first."""

    def __init__(self, path: Path, count: int, *, virtual: bool = False) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(_State)))
        self.file = path.open("r+b")
        self.map = mmap.mmap(self.file.fileno(), ctypes.sizeof(_State))
        self.state = _State.from_buffer(self.map)
        self.state.count = count
        self.state.is_virtual = virtual
        for index in range(count):
            device = self.state.devices[index]
            device.name = b"Stub V100"
            device.uuid = f"GPU-{index:08x}-{os.getpid():x}-{time.monotonic_ns():x}".encode()
            device.idle_w, device.load_w = 40.0, 0.0
            device.min_w, device.max_w, device.default_w, device.limit_w = 100.0, 250.0, 250.0, 250.0
            device.settled_s = self.now_s()

    @classmethod
    def attach(cls, path: Path) -> NvmlStub:
        """The GPUs that another process has made at ``path``."""
        stub = object.__new__(cls)
        stub.path = path
        stub.file = path.open("r+b")
        stub.map = mmap.mmap(stub.file.fileno(), ctypes.sizeof(_State))
        stub.state = _State.from_buffer(stub.map)
        return stub

    def write_smi(self, folder: Path) -> None:
        """Put a tool there by which executors find these GPUs."""
        tool = folder / "nvidia-smi"
        uuids = [self.state.devices[index].uuid.decode() for index in range(self.state.count)]
        lines = "\n".join(f"{index}, {uuid}, Stub V100, 32768" for index, uuid in enumerate(uuids))
        tool.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
        tool.chmod(0o755)

    def environment(self, library: Path) -> dict[str, str]:
        """What a child process needs to see these GPUs."""
        paths = [str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths)), ENVIRONMENT: str(self.path)}

    def now_s(self) -> float:
        return self.state.now_s if self.state.is_virtual else time.monotonic()

    def advance(self, seconds: float) -> None:
        assert self.state.is_virtual
        self.state.now_s += seconds

    def watts(self, index: int) -> float:
        device = self.state.devices[index]
        return max(device.idle_w, min(device.load_w, device.limit_w))

    def energy_j(self, index: int) -> float:
        """The truth, whatever the counter shows."""
        device = self.state.devices[index]
        return device.energy_j + max(0.0, self.now_s() - device.settled_s) * self.watts(index)

    def set_load(self, watts: float, *indices: int) -> None:
        self.change(*indices, load_w=watts)

    def change(self, *indices: int, **fields: float) -> None:
        """Set fields of some GPUs (all if none is named), counting the joules up to now with the old ones."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        for index in indices or range(self.state.count):
            device = self.state.devices[index]
            device.energy_j, device.settled_s = self.energy_j(index), self.now_s()
            for name, value in fields.items():
                setattr(device, name, value)
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def add_flags(self, flags: int, *indices: int) -> None:
        for index in indices or range(self.state.count):
            device = self.state.devices[index]
            device.stalled_j = self.energy_j(index)
            device.flags |= flags

    def limit_w(self, index: int = 0) -> float:
        return float(self.state.devices[index].limit_w)

    def readers(self) -> dict[int, int]:
        """Calls that read energy or power, by process."""
        return {
            entry.pid: entry.calls[0] + entry.calls[1]
            for entry in self.state.pids
            if entry.pid and entry.calls[0] + entry.calls[1]
        }

    def forget_calls(self) -> None:
        for entry in self.state.pids:
            for kind in range(4):
                entry.calls[kind] = 0

    def close(self) -> None:
        del self.state
        self.map.close()
        self.file.close()
