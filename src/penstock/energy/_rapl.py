"""CPU packages and memory through the kernel's powercap tree (RAPL)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core import Source
from penstock.core.errors import NotPermitted, SensorError
from penstock.energy._poller import POLLER
from penstock.energy._sensor import DeviceKind, Sensor

ROOT = Path("/sys/class/powercap")
REMEDY = "sudo chmod -R a+r /sys/class/powercap/intel-rapl*"
_MOST_W = 1000.0
"""No CPU package draws more: what says how soon a counter may wrap around."""


@dataclass(frozen=True, slots=True)
class RaplDomain:
    """One energy counter of the powercap tree.

    Attributes:
        path: Its folder.
        label: The kernel's name for it: ``package-0``, ``dram``, ``psys``.
        id: ``"cpu:0"`` for package 0 (``"cpu:0.1"`` for its second die), ``"memory:0"`` for its memory, ``"psys:0"``.
        kind: What it measures.
    """

    path: Path
    label: str
    id: str
    kind: DeviceKind


def unwrap(previous: int, now: int, range_: int) -> int:
    """What a counter that counts 0..range_ and starts again has counted between two readings."""
    return now - previous if now >= previous else now + range_ + 1 - previous


def find_domains(root: Path = ROOT, *, psys: bool = False) -> list[RaplDomain]:
    """The domains that add up to the machine without counting a joule twice.

    Packages and their ``dram`` are added. ``core`` and ``uncore`` lie inside a package, ``psys`` (the platform)
    around them, and ``intel-rapl-mmio`` shows the same package a second time: they are left out. With ``psys``
    the platform's counter is taken, alone, where there is one.
    """
    found: dict[str, RaplDomain] = {}
    platform: list[RaplDomain] = []
    for zone in sorted(_zones(root), key=lambda zone: ("mmio" in zone.name, zone.name)):
        label = _text(zone / "name")
        if label.startswith("psys"):
            platform.append(RaplDomain(zone, label, f"psys:{len(platform)}", DeviceKind.SYSTEM))
            continue
        if not label.startswith("package") or label in found:
            continue
        # "0", or "0.1" where packages have dies.
        number = label.removeprefix("package-").replace("-die-", ".")
        found[label] = RaplDomain(zone, label, f"cpu:{number}", DeviceKind.CPU)
        for child in sorted(zone.glob(f"{zone.name}:*")):
            if _text(child / "name") == "dram":
                found[f"{label}/dram"] = RaplDomain(child, "dram", f"memory:{number}", DeviceKind.MEMORY)
    return platform if psys and platform else list(found.values())


def _zones(root: Path) -> Iterable[Path]:
    # Top zones are "intel-rapl:0"; their children "intel-rapl:0:1" also show up here as links.
    return (zone for zone in root.glob("intel-rapl*:*") if zone.name.count(":") == 1)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@final
class RaplSensor(Sensor):
    """One RAPL domain.

    The counter wraps around every few minutes to hours; a background reading every quarter of the shortest
    possible time keeps count also when nobody asks. One that started again (a suspended machine) is told from one
    that wrapped by what it would have counted meanwhile, warned of, and bridged with the watts so far.

    Raises:
        NotPermitted: The counter is there but this user may not read it.
        SensorError: It can't be read for another reason.
    """

    def __init__(self, domain: RaplDomain) -> None:
        self._domain = domain
        self.id = domain.id
        self.key = f"rapl:{domain.path}"
        self.name = f"RAPL {domain.label}"
        self.kind = domain.kind
        self.method = "RAPL energy counter"
        self.source = Source.MEASURED
        # Compared with wall meters and DRAM instrumentation, Intel's counters from Haswell on are off by a few
        # per cent (Khan et al. 2018, "RAPL in Action").
        self.uncertainty = 0.05
        self.resolution_s = 0.001
        self._file = domain.path / "energy_uj"
        self._lock = threading.Lock()
        self._range_uj = self._read(domain.path / "max_energy_range_uj")
        if self._range_uj <= 0:
            raise SensorError(f"{domain.path}/max_energy_range_uj says {self._range_uj}: not a range.")
        self._last_uj = self._read(self._file)
        self._counted_uj = 0
        self._begun_s = self._last_s = time.monotonic()
        self._last_power = (self._begun_s, 0.0)
        self._watts: float | None = None
        self._poll = POLLER.add(max(0.001, self._range_uj / 1e6 / _MOST_W / 4), self._catch_up)

    def energy_j(self) -> float:
        """Joules since the sensor was made."""
        with self._lock:
            now_uj, now_s = self._read(self._file), time.monotonic()
            drawn_uj = unwrap(self._last_uj, now_uj, self._range_uj)
            gap_s = now_s - self._last_s
            # The second is for clocks and counters that are not read at the same moment.
            if now_uj < self._last_uj and drawn_uj > 2e6 * _MOST_W * (gap_s + 1.0):
                warnings.warn(
                    f"The energy counter of {self.name} ({self.id}) started again; the time since the last reading,"
                    f" {gap_s:.1f} s, is counted with the watts before.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                before_s = self._last_s - self._begun_s
                before_uj = self._counted_uj / before_s * gap_s if before_s > 0 else 0.0
                drawn_uj = max(now_uj, round(before_uj))
            self._counted_uj += drawn_uj
            self._last_uj, self._last_s = now_uj, now_s
            return self._counted_uj / 1e6

    def power_w(self) -> float:
        """Average watts since the last call, over at least 10 ms."""
        last_s, last_j = self._last_power
        if self._watts is None:
            time.sleep(max(0.0, last_s + 0.01 - time.monotonic()))
        now_s = time.monotonic()
        if now_s - last_s >= 0.01:
            energy_j = self.energy_j()
            self._watts = (energy_j - last_j) / (now_s - last_s)
            self._last_power = (now_s, energy_j)
        assert self._watts is not None
        return self._watts

    def close(self) -> None:
        """Stop the background reading."""
        POLLER.remove(self._poll)

    def _catch_up(self) -> None:
        self.energy_j()

    def _read(self, path: Path) -> int:
        try:
            return int(path.read_bytes())
        except PermissionError:
            raise NotPermitted(
                f"{path} is for root alone (since the PLATYPUS attack). Let others read it until the next boot with:"
                f" {REMEDY}"
            ) from None
        except (OSError, ValueError) as error:
            raise SensorError(f"{path} can't be read: {error}.") from error


def rapl_sensors(root: Path = ROOT, *, psys: bool = False) -> list[RaplSensor]:
    """A sensor per domain of ``find_domains``; empty where the machine has none.

    Raises:
        NotPermitted: There are counters that this user may not read.
    """
    if not root.is_dir():
        return []
    with ExitStack() as opened:  # one that can't be read leaves none of the others behind
        found: list[RaplSensor] = []
        for domain in find_domains(root, psys=psys):
            found.append(RaplSensor(domain))
            opened.callback(found[-1].close)
        opened.pop_all()
    return found
