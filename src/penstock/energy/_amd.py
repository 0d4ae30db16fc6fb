"""AMD GPUs through ``amdsmi``, where its import works (it comes with ROCm)."""

from __future__ import annotations

import threading
import time
import warnings
from types import ModuleType
from typing import Any, final

from penstock.core import Source
from penstock.core.errors import InvalidInput, NotPermitted, SensorError
from penstock.energy._sensor import DeviceKind, Sensor

STALL_S = 2.0

_lock = threading.Lock()
_module: ModuleType | None = None


def _load() -> Any | None:
    """The binding, initialised; None where there is none or it finds no driver."""
    global _module
    with _lock:
        if _module is None:
            try:
                import amdsmi

                amdsmi.amdsmi_init()
            except (
                Exception
            ):  # its import raises KeyError, OSError and its own errors on machines without ROCm
                return None
            _module = amdsmi
        return _module


def amd_available() -> bool:
    """Whether AMD GPUs can be looked at here."""
    return _load() is not None


@final
class AmdSensor(Sensor):
    """One AMD GPU, by the energy accumulator of its firmware.

    Raises:
        SensorError: It can't be read, or the accumulator stands still while the GPU draws power.
    """

    def __init__(self, index: int, handle: Any, amdsmi: Any) -> None:
        self._smi = amdsmi
        self._handle = handle
        self.id = f"amd:{index}"
        self.kind = DeviceKind.GPU
        self.name = str(self._call("amdsmi_get_gpu_asic_info").get("market_name") or "AMD GPU")
        self.key = f"amd:{self._call('amdsmi_get_gpu_device_uuid')}"
        self.method = "AMD SMI energy accumulator"
        self.source = Source.MEASURED
        self.uncertainty = 0.05
        self.resolution_s = 0.1
        self._lock = threading.Lock()
        self._last_j = self._accumulated_j()
        self._last_s = self._changed_s = time.monotonic()
        self._energy_j = 0.0

    def energy_j(self) -> float:
        """Joules since the sensor was made."""
        with self._lock:
            now_j, now_s = self._accumulated_j(), time.monotonic()
            if now_j == self._last_j:
                still_s = now_s - self._changed_s
                if still_s > STALL_S and (watts := self.power_w()) > 0:
                    raise SensorError(
                        f"The energy accumulator of {self.name} ({self.id}) has stood still for {still_s:.1f} s at"
                        f" {watts:.0f} W: this model or its driver keeps none."
                    )
            else:
                # Less than before: it started again.
                drawn_j = now_j - self._last_j
                self._energy_j += (
                    drawn_j if drawn_j > 0 else max(now_j, self.power_w() * (now_s - self._last_s))
                )
                self._changed_s = now_s
            self._last_j, self._last_s = now_j, now_s
            return self._energy_j

    def power_w(self) -> float:
        """Watts of the socket."""
        info = self._call("amdsmi_get_power_info")
        for field in ("current_socket_power", "average_socket_power", "socket_power"):
            try:
                return float(info[field])  # "N/A" on models without it
            except (KeyError, ValueError, TypeError):
                continue
        raise SensorError(f"{self.name} ({self.id}) tells no power: {info!r}.")

    @property
    def power_limit_range_w(self) -> tuple[float, float] | None:
        """Lowest and highest power cap; None where the driver tells no lowest one (0 W): none can be profiled then."""
        try:
            info = self._call("amdsmi_get_power_cap_info")
            low, high = float(info["min_power_cap"]) / 1e6, float(info["max_power_cap"]) / 1e6
        except (SensorError, KeyError, ValueError, TypeError):
            return None
        return (low, high) if 0 < low < high else None

    def power_limit_w(self) -> float:
        """The power cap now."""
        info = self._call("amdsmi_get_power_cap_info")
        try:
            return float(info["power_cap"]) / 1e6
        except (KeyError, ValueError, TypeError):
            raise SensorError(f"{self.name} ({self.id}) tells no power limit: {info!r}.") from None

    def set_power_limit_w(self, limit_w: float) -> None:
        """Change the power cap."""
        range_w = self.power_limit_range_w
        if range_w is None or not range_w[0] <= limit_w <= range_w[1]:
            raise InvalidInput(f"{self.name} ({self.id}) takes power limits of {range_w} W, got {limit_w:g}.")
        try:
            self._smi.amdsmi_set_power_cap(self._handle, 0, round(limit_w * 1e6))
        except Exception as error:
            if "PERM" in str(error).upper():
                raise NotPermitted(
                    f"No permission to set the power limit of {self.name} ({self.id}). Run as root."
                ) from error
            raise SensorError(f"{self.name} ({self.id}): {error}.") from error

    @property
    def restore_key(self) -> str | None:
        """The UUID."""
        return self.key

    def _accumulated_j(self) -> float:
        info = self._call("amdsmi_get_energy_count")
        ticks = info.get("energy_accumulator", info.get("power"))  # renamed in ROCm 6.1
        try:
            return float(ticks) * float(info["counter_resolution"]) / 1e6
        except (KeyError, TypeError, ValueError):
            raise SensorError(f"{self.name} ({self.id}) has no energy accumulator: {info!r}.") from None

    def _call(self, function: str) -> Any:
        try:
            return getattr(self._smi, function)(self._handle)
        except Exception as error:
            raise SensorError(
                f"{getattr(self, 'name', self.id)} ({self.id}): {function} failed: {error}."
            ) from error


def amd_gpus() -> list[AmdSensor | SensorError]:
    """A sensor per AMD GPU, or why that one can't be read; empty without ROCm.

    Raises:
        SensorError: The library can't list them.
    """
    amdsmi = _load()
    if amdsmi is None:
        return []
    try:
        handles = list(amdsmi.amdsmi_get_processor_handles())
    except Exception as error:
        raise SensorError(f"AMD SMI can't list its GPUs: {error}.") from error
    found: list[AmdSensor | SensorError] = []
    for index, handle in enumerate(handles):
        try:
            found.append(AmdSensor(index, handle, amdsmi))
        except SensorError as error:
            found.append(error)
    return found


def amd_sensors() -> list[Sensor]:
    """A sensor per AMD GPU that can be read, with a warning of each that can't; empty without ROCm.

    A GPU that can't be read is no error: that of many processors has no energy accumulator.
    """
    found: list[Sensor] = []
    for gpu in amd_gpus():
        if isinstance(gpu, SensorError):
            warnings.warn(f"Not metered: {gpu}", RuntimeWarning, stacklevel=2)
        else:
            found.append(gpu)
    return found
