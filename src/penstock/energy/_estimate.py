"""An estimate for machines without energy counters: CPU time of a process tree x a power model."""

from __future__ import annotations

import os
import resource
import threading
import time
from typing import final

from penstock.core import Source
from penstock.core.errors import InvalidInput
from penstock.energy._sensor import DeviceKind, Sensor

BUSY_CORE_W = 6.5
"""What one busy hardware thread adds."""

IDLE_CORE_W = 1.5
"""What one hardware thread draws doing nothing, with its part of the package, memory and board."""

UNCERTAINTY = 0.5
"""+-50%: a fully busy thread at 8 W then spans 4 W (a laptop, a vCPU of a many-core server) to 12 W (the figure
that Green Algorithms, Lannelongue et al. 2021, takes per core of an unknown CPU)."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TREE_REFRESH_S = 0.25
_CHILDREN_REFRESH_S = 0.0005  # no child is started, does something and is waited for in less
_HAS_PROC = os.path.isdir("/proc/self/task")  # Linux; elsewhere psutil looks


def cores_allowed() -> float:
    """Hardware threads this process may use."""
    try:
        return float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return float(os.cpu_count() or 1)


@final
class EstimateSensor(Sensor):
    """Estimated joules of a process and all its descendants.

    The model: ``idle_core_w x cores x wall time + busy_core_w x CPU time``. Both figures are stated, not measured;
    ``uncertainty`` says how far off they may be. Give your machine's own if you know them: TDP / threads is a good
    start for ``busy_core_w + idle_core_w``. GPUs are not in it.

    CPU time is the process's own (exact), its ended children's (exact once waited for), and its living
    descendants' from ``/proc``, looked at most every 0.25 s, which keeps a reading at microseconds.

    Args:
        pid: Root of the process tree; this process if None.
        cores: Hardware threads set aside for the tree, whose idle power it is charged; a worker that holds half of
            an 8-thread device has 4. All this process may use if None.
        busy_core_w: Watts a busy thread adds.
        idle_core_w: Watts of an idle thread.
        uncertainty: Relative.
    """

    def __init__(
        self,
        pid: int | None = None,
        *,
        cores: float | None = None,
        busy_core_w: float = BUSY_CORE_W,
        idle_core_w: float = IDLE_CORE_W,
        uncertainty: float = UNCERTAINTY,
    ) -> None:
        if busy_core_w <= 0 or idle_core_w < 0:
            raise InvalidInput(f"Watts per core must be positive, got {busy_core_w=} and {idle_core_w=}.")
        if cores is not None and cores <= 0:
            raise InvalidInput(f"cores must be positive, got {cores}.")
        self._pid = pid
        self._owner = os.getpid()
        self.cores = cores_allowed() if cores is None else cores
        self._busy_w = busy_core_w
        self.idle_w = idle_core_w * self.cores
        root = self._owner if pid is None else pid
        self.id = f"cpu-estimate:{root}"
        self.key = f"process:{root}"
        self.name = f"CPU time of process {root} and its children"
        self.kind = DeviceKind.CPU
        self.method = f"CPU time x {busy_core_w:g} W + {self.cores:g} cores x {idle_core_w:g} W idle"
        self.source = Source.ESTIMATED
        self.uncertainty = uncertainty
        # Own CPU time is exact at any moment, another tree is looked at now and then.
        self.resolution_s = 0.0 if pid is None else _TREE_REFRESH_S
        self._lock = threading.Lock()
        self._tree_s = 0.0
        self._tree_read_s = -1e9
        self._children_s = 0.0
        self._others_s = 0.0
        self._looked_s = -1e9
        self._look_every_s = _CHILDREN_REFRESH_S if pid is None else _TREE_REFRESH_S
        self._start_s = time.monotonic()
        self._start_cpu_s = 0.0
        self._start_cpu_s = self._cpu_s(self._start_s)
        self._counted_s = 0.0
        self._last = (self._start_s, 0.0)
        self._watts = self.idle_w

    def energy_j(self) -> float:
        """Estimated joules since the sensor was made."""
        now_s = time.monotonic()
        return self.idle_w * (now_s - self._start_s) + self._busy_w * self._cpu_s(now_s)

    def power_w(self) -> float:
        """Average watts since the last call, over at least 50 ms."""
        now_s = time.monotonic()
        last_s, last_j = self._last
        if now_s - last_s >= 0.05:
            energy_j = self.energy_j()
            self._watts = (energy_j - last_j) / (now_s - last_s)
            self._last = (now_s, energy_j)
        return self._watts

    @property
    def cpu_s(self) -> float:
        """CPU time of the tree since the sensor was made."""
        return self._cpu_s(time.monotonic())

    def _cpu_s(self, now_s: float) -> float:
        if self._owner != os.getpid():
            self._forked()
        if now_s - self._looked_s >= self._look_every_s:
            self._look(now_s)
        own_s = time.process_time() if self._pid is None else 0.0
        self._counted_s = own_s + self._others_s - self._start_cpu_s
        return self._counted_s

    def _forked(self) -> None:
        """In a forked child, whose CPU time begins at 0: its own goes on where the parent's was read last."""
        self._owner = os.getpid()
        self._lock = threading.Lock()  # another thread of the parent may have held it
        if self._pid is None:
            self._tree_s = self._children_s = self._others_s = 0.0
            self._tree_read_s = self._looked_s = -1e9
            self._start_cpu_s = -self._counted_s

    def _look(self, now_s: float) -> None:
        """What the others of the tree have used."""
        with self._lock:
            if self._pid is None:
                times = resource.getrusage(resource.RUSAGE_CHILDREN)
                children_s = times.ru_utime + times.ru_stime
                if children_s != self._children_s:
                    self._children_s = children_s
                    self._tree_read_s = -1e9  # whoever was waited for is no longer in the tree
            if now_s - self._tree_read_s >= _TREE_REFRESH_S:
                self._tree_read_s = now_s
                root = os.getpid() if self._pid is None else self._pid
                own = () if self._pid is None else (self._pid,)
                self._tree_s = sum(_cpu_of(pid) for pid in (*own, *descendants(root)))
            # A descendant that nobody waited for takes its CPU time along: keep what was seen.
            self._others_s = max(self._others_s, self._tree_s + self._children_s)
            self._looked_s = now_s

    def refresh(self) -> None:
        """Look at the tree now, also if it was looked at a moment ago."""
        with self._lock:
            self._tree_read_s = self._looked_s = -1e9


def descendants(pid: int) -> list[int]:
    """All living descendants of a process. Empty for one that is gone."""
    if not _HAS_PROC:
        return _descendants_by_scan(pid)
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(child) for child in file.read().split()]
            except FileNotFoundError:
                if not os.path.exists(f"/proc/{parent}/task/{thread}"):
                    continue
                return _descendants_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
            except OSError:
                continue
            found += children
            todo += children
    return found


def _descendants_by_scan(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_by_psutil(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that it has waited for; 0 if it is gone."""
    if not _HAS_PROC:
        return _cpu_by_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may hold anything: count fields after the last one.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S  # utime, stime, cutime, cstime
