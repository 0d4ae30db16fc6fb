"""NVIDIA GPUs through ``nvidia-ml-py``; the one module that imports it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, final

from penstock.core import Source
from penstock.core.errors import InvalidInput, NotPermitted, SensorError, Unsupported
from penstock.energy._poller import POLLER
from penstock.energy._sensor import DeviceKind, Sensor

SAMPLE_S = 0.1
STALL_S = 2.0

_lock = threading.Lock()
_users = 0
_pid = -1


def _acquire() -> Any:
    """The binding, initialised; once per process however many sensors there are.

    Raises:
        Unsupported: No binding, no driver, or no GPU.
    """
    global _users, _pid
    try:
        import pynvml
    except ImportError:
        raise Unsupported(
            "NVIDIA GPUs can't be read: nvidia-ml-py is not installed. Run: pip install nvidia-ml-py"
        ) from None
    with _lock:
        if _pid != os.getpid():  # first use, or forked: the parent's session is not ours
            _users, _pid = 0, os.getpid()
        if _users == 0:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unsupported(
                    f"NVML can't be used: {_text(error)}. Without an NVIDIA GPU that is as it should be; with one,"
                    ' install its driver so that "nvidia-smi" works.'
                ) from None
        _users += 1
    return pynvml


def _release(nvml: Any) -> None:
    global _users
    with _lock:
        if _pid != os.getpid() or _users == 0:
            return
        _users -= 1
        if _users == 0:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # the driver is gone: nothing to shut down


def _text(error: Exception) -> str:
    # str() of an NVMLError asks the library for its text, which may be what is missing.
    try:
        text = str(error)
    except Exception:
        text = type(error).__name__
    return text or type(error).__name__


def gpu_count() -> int:
    """How many NVIDIA GPUs the driver shows, whatever CUDA_VISIBLE_DEVICES says.

    Raises:
        Unsupported: There is no NVML here.
    """
    nvml = _acquire()
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise SensorError(f"NVML can't count GPUs: {_text(error)}.") from error
    finally:
        _release(nvml)


def visible_gpus() -> list[int | str]:
    """What this process sees as cuda:0, cuda:1, ...: NVML indices or UUIDs, by CUDA_VISIBLE_DEVICES.

    CUDA numbers GPUs by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set, NVML always by bus: on a machine with
    different GPUs set it, or name GPUs by UUID.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(gpu_count()))
    found: list[int | str] = []
    for item in wanted.split(","):
        item = item.strip()
        if item.isdigit():
            found.append(int(item))
        elif item:
            found.append(item)
        if item in ("", "-1"):  # as CUDA does: nothing after the first invalid one
            break
    return [item for item in found if item != "-1"]


@final
class NvmlSensor(Sensor):
    """One NVIDIA GPU.

    The joules come from the GPU's total-energy counter (Volta and later). Where it has none, or the counter stands
    still while the GPU draws power, watts are sampled every 0.1 s by a background thread and integrated. A counter
    that starts again (a driver reload) is bridged with watts x time. Both are warned of once.

    With MIG on, the counter is the whole GPU's and instances have none: refused unless ``whole_mig_gpu`` says that
    the whole is wanted.

    Args:
        gpu: NVML index or UUID (its beginning will do).
        whole_mig_gpu: Measure the whole GPU although it is divided.
        lazy: Don't read it before the first question: joules count from there.
        now: Seconds, to integrate over; a test's virtual clock.

    Raises:
        Unsupported: No NVML, no such GPU, or MIG.
        SensorError: The GPU can't be read.
    """

    def __init__(
        self,
        gpu: int | str = 0,
        *,
        whole_mig_gpu: bool = False,
        lazy: bool = False,
        sample_s: float = SAMPLE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = _acquire()
        self._closed = False
        self._now = now
        self._sample_s = sample_s
        self._lock = threading.Lock()
        self._poll: int | None = None
        self._owner = os.getpid()
        self.id = f"gpu:{gpu}"
        self.key = self.name = f"GPU {gpu}"
        try:
            self._open(gpu, whole_mig_gpu)
            if not lazy:
                self._begin()
        except BaseException:
            self.close()
            raise

    def _open(self, gpu: int | str, whole_mig_gpu: bool) -> None:
        nvml = self._nvml
        self._handle = self._find(gpu)
        self.index = int(self._call(nvml.nvmlDeviceGetIndex, self._handle))
        self.id = f"gpu:{self.index}"
        self.name = str(self._call(nvml.nvmlDeviceGetName, self._handle))
        self.key = str(self._call(nvml.nvmlDeviceGetUUID, self._handle))
        self.kind = DeviceKind.GPU
        self.source = Source.MEASURED
        if mig_enabled(nvml, self._handle) and not whole_mig_gpu:
            raise Unsupported(
                f"{self.name} ({self.id}) is divided by MIG: its energy counter is the whole GPU's, an instance has"
                f" none. Turn MIG off with: sudo nvidia-smi -i {self.index} -mig 0, or measure the whole GPU with"
                f" NvmlSensor({self.index}, whole_mig_gpu=True)."
            )
        self._energy_j = 0.0
        self._last_s = self._changed_s = self._now()
        self._last_w = 0.0
        self._last_mj: int | None = None
        self._counting = False
        self.method = "NVML total energy counter"
        self.uncertainty = 0.05  # NVIDIA states +-5% for NVML's power readings
        self.resolution_s = 0.1

    def _begin(self) -> None:
        nvml = self._nvml
        self._counting = True
        self._last_s = self._changed_s = self._now()
        try:
            self._last_mj = int(nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            self._start_sampling()
        except nvml.NVMLError as error:
            self._explain(error)

    def energy_j(self) -> float:
        """Joules since the sensor was made."""
        self._check_fork()
        with self._lock:
            if not self._counting:
                self._begin()
            elif self._last_mj is None:
                self._sample()
            else:
                self._count()
            return self._energy_j

    def power_w(self) -> float:
        """Watts, as the GPU averages them (over 25 ms to 1 s by model)."""
        self._check_fork()
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
        except self._nvml.NVMLError as error:
            self._explain(error)

    @property
    def power_limit_range_w(self) -> tuple[float, float] | None:
        """Lowest and highest power limit, None where the GPU has no limit to set (some laptops)."""
        nvml = self._nvml
        try:
            low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None
        except nvml.NVMLError as error:
            self._explain(error)
        return low / 1000, high / 1000

    def power_limit_w(self) -> float:
        """The power limit now."""
        nvml = self._nvml
        try:
            return float(nvml.nvmlDeviceGetPowerManagementLimit(self._handle)) / 1000
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            raise Unsupported(f"{self.name} ({self.id}) has no power limit.") from None
        except nvml.NVMLError as error:
            self._explain(error)

    def set_power_limit_w(self, limit_w: float) -> None:
        """Change the power limit; it stays until changed again or the driver is reloaded."""
        range_w = self.power_limit_range_w
        if range_w is None:
            raise Unsupported(f"{self.name} ({self.id}) has no power limit to set.")
        if not range_w[0] <= limit_w <= range_w[1]:
            raise InvalidInput(
                f"{self.name} ({self.id}) takes power limits of {range_w[0]:g}..{range_w[1]:g} W, got {limit_w:g}."
            )
        nvml = self._nvml
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(limit_w * 1000))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            raise Unsupported(f"{self.name} ({self.id}) has no power limit to set.") from None
        except nvml.NVMLError as error:
            self._explain(error, f"set its power limit to {limit_w:g} W")

    @property
    def restore_key(self) -> str | None:
        """The UUID."""
        return f"nvml:{self.key}"

    def close(self) -> None:
        """Let NVML go."""
        if self._closed:
            return
        self._closed = True
        if self._poll is not None:
            POLLER.remove(self._poll)
        if self._owner == os.getpid():
            _release(self._nvml)

    # -- the counter

    def _count(self) -> None:
        nvml = self._nvml
        try:
            now_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except nvml.NVMLError as error:
            self._explain(error)
        now_s = self._now()
        assert self._last_mj is not None
        if now_mj > self._last_mj:
            self._energy_j += (now_mj - self._last_mj) / 1000
            self._changed_s = now_s
        elif now_mj < self._last_mj:
            warnings.warn(
                f"The energy counter of {self.name} ({self.id}) started again; the time since the last reading,"
                f" {now_s - self._last_s:.1f} s, is counted with the watts now.",
                RuntimeWarning,
                stacklevel=3,
            )
            self._energy_j += max(now_mj / 1000, self.power_w() * (now_s - self._last_s))
            self._changed_s = now_s
        elif now_s - self._changed_s > STALL_S and (watts := self.power_w()) > 0:
            warnings.warn(
                f"The energy counter of {self.name} ({self.id}) has stood still for {now_s - self._changed_s:.1f} s"
                f" at {watts:.0f} W; its power is sampled from here on.",
                RuntimeWarning,
                stacklevel=3,
            )
            self._energy_j += watts * (now_s - self._changed_s)
            self._start_sampling()
            return
        self._last_s, self._last_mj = now_s, now_mj

    # -- no counter

    def _start_sampling(self) -> None:
        self._last_mj = None
        self.method = f"NVML power sampled every {self._sample_s:g} s"
        # Sampled power misses what happens between samples; some GPUs average only a quarter of the time (Yang et
        # al. 2024, "Accurate and convenient energy measurements for GPUs").
        self.uncertainty = 0.1
        self.resolution_s = self._sample_s
        self._last_w = self.power_w()
        self._last_s = self._now()
        self._poll = POLLER.add(self._sample_s, self._sample_in_background)

    def _sample_in_background(self) -> None:
        with self._lock:
            if not self._closed:
                self._sample()

    def _sample(self) -> None:
        watts, now_s = self.power_w(), self._now()
        self._energy_j += (watts + self._last_w) / 2 * max(0.0, now_s - self._last_s)
        self._last_w, self._last_s = watts, now_s

    # -- NVML

    def _find(self, gpu: int | str) -> Any:
        nvml = self._nvml
        count = self._call(nvml.nvmlDeviceGetCount)
        if isinstance(gpu, str) and gpu.startswith("MIG-"):
            raise Unsupported(
                f"{gpu} is a MIG instance, which has no energy counter of its own. Use a whole GPU, with MIG off."
            )
        if isinstance(gpu, int):
            if 0 <= gpu < count:
                return self._call(nvml.nvmlDeviceGetHandleByIndex, gpu)
            raise Unsupported(f"There is no GPU {gpu}: NVML shows {count}.")
        for index in range(count):
            handle = self._call(nvml.nvmlDeviceGetHandleByIndex, index)
            if str(self._call(nvml.nvmlDeviceGetUUID, handle)).startswith(gpu):
                return handle
        raise Unsupported(f"There is no GPU {gpu}: NVML shows {count} others.")

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            self._explain(error)

    def _check_fork(self) -> None:
        if self._owner != os.getpid():
            self._nvml = _acquire()
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._handle = self._find(self.key)
            if self._counting and self._last_mj is None:
                self._start_sampling()

    def _explain(self, error: Exception, doing: str = "read it") -> NoReturn:
        """Raise what the user can act on."""
        nvml = self._nvml
        who = f"{self.name} ({self.id})"
        index = self.id.partition(":")[2]
        if isinstance(error, nvml.NVMLError_GpuIsLost | nvml.NVMLError_ResetRequired):
            raise SensorError(
                f"{who} has fallen off the bus ({_text(error)}): its energy can't be told. Look for Xid errors with"
                f" dmesg, then reset it with: sudo nvidia-smi --gpu-reset -i {index}, or reboot."
            ) from error
        if isinstance(error, nvml.NVMLError_NoPermission):
            raise NotPermitted(f"No permission to {doing}: {who}. {permission_remedy(index)}") from error
        raise SensorError(f"{who}: NVML can't {doing}: {_text(error)}.") from error


def permission_remedy(index: str) -> str:
    """How one gets to set power limits."""
    return (
        "Setting power limits needs root (CAP_SYS_ADMIN). Run as root: sudo -E env PATH=$PATH <command>; in a"
        f" container add: --cap-add SYS_ADMIN; or set a fixed limit yourself: sudo nvidia-smi -i {index} -pl <watts>"
    )


def mig_enabled(nvml: Any, handle: Any) -> bool:
    """Whether a GPU is divided into MIG instances."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # GPUs before Ampere know no MIG
