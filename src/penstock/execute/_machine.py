"""What this machine offers: usable CPU cores and visible GPUs, found without loading any framework."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core import Device
from penstock.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU.

    Attributes:
        visible: How CUDA_VISIBLE_DEVICES names it: an index or a UUID.
        kind: Its model.
        memory_bytes: Its memory, or None where unknown.
    """

    visible: str
    kind: str
    memory_bytes: int | None


def usable_cores() -> int:
    """CPU cores this process may use: its affinity and its cgroup's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = cgroup_cores(Path("/sys/fs/cgroup"))
    return max(1, cores if quota is None else min(cores, int(quota)))


def cgroup_cores(root: Path) -> float | None:
    """The CPU quota of a cgroup (version 2 or 1) in cores; None where there is none."""
    try:
        limit, period = (root / "cpu.max").read_text().split()[:2]
        return None if limit == "max" else float(limit) / float(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = float((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = float((root / "cpu/cpu.cfs_period_us").read_text())
        return None if limit_us <= 0 else limit_us / period_us
    except (OSError, ValueError):
        return None


def visible_gpus() -> list[Gpu]:
    """NVIDIA GPUs this process may use, in CUDA's order; empty where there are none or no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return choose_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def choose_gpus(listing: str, visible: str | None) -> list[Gpu]:
    """The GPUs of nvidia-smi's listing that CUDA_VISIBLE_DEVICES leaves; as CUDA does, up to the first bad name."""
    by_name: dict[str, Gpu] = {}
    order: list[Gpu] = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4:
            continue
        index, uuid, kind, mebibytes = cells[:4]
        memory = int(mebibytes) * 2**20 if mebibytes.isdigit() else None
        gpu = Gpu(index, kind, memory)
        order.append(gpu)
        by_name[index], by_name[uuid] = gpu, Gpu(uuid, kind, memory)
    if visible is None:
        return order
    chosen: list[Gpu] = []
    for name in visible.split(","):
        found = by_name.get(name.strip())
        if found is None:
            break
        chosen.append(found)
    return chosen


def cpu_slots(count: int, cores: int, threads: int | None) -> dict[str, Device]:
    """The cores as so many devices, each with ``threads`` of them; None: as many as there are for each."""
    each = threads or max(1, cores // max(1, count))
    return {f"cpu:{index}": Device(f"cpu:{index}", "cpu", cores=each) for index in range(count)}


def gpu_slots(
    gpus: Sequence[Gpu], wanted: int | tuple[int, ...] | None, cores: int, threads: int | None
) -> tuple[dict[str, Device], dict[str, str]]:
    """GPUs as devices, each with its part of the cores; and how CUDA names them.

    Args:
        gpus: Those this process sees.
        wanted: How many of them, or which; None: all.
        cores: CPU cores.
        threads: CPU threads of each; None: the cores divided among them.

    Raises:
        Unsupported: There are fewer.
    """
    numbers = range(len(gpus)) if wanted is None else range(wanted) if isinstance(wanted, int) else wanted
    if any(not 0 <= number < len(gpus) for number in numbers):
        raise Unsupported(f"gpus = {wanted!r}: this process sees {len(gpus)} GPUs. Drop gpus, or 0 for none.")
    devices: dict[str, Device] = {}
    visible: dict[str, str] = {}
    for number in numbers:
        name, gpu = f"cuda:{number}", gpus[number]
        each = threads or max(1, cores // len(numbers))
        devices[name] = Device(name, gpu.kind, memory_bytes=gpu.memory_bytes, cores=each)
        visible[name] = gpu.visible
    return devices, visible
