"""What this machine can measure: the default sensors, and the findings behind ``penstock doctor``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidInput, NotPermitted, PenstockError, SensorError, Unsupported
from penstock.energy._estimate import EstimateSensor
from penstock.energy._sensor import Sensor
from penstock.energy._shared import SharedSensor

if TYPE_CHECKING:
    from penstock.energy._rapl import RaplDomain

POWERCAP = Path("/sys/class/powercap")
SYSTEM = Path("/")


DRIVER_REMEDY = "sudo modprobe nvidia  # after an update of the driver: sudo reboot"
AMD_REMEDY = "sudo modprobe amdgpu  # and this user into the groups render and video"


class State(StrEnum):
    """How something stands."""

    OK = "ok"
    ESTIMATED = "estimated"
    LIMITED = "limited"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        subject: A device or facility.
        measure: Whether its energy can be told, and how well.
        control: Whether its power limit can be set; ABSENT where there is none to set.
        detail: In words.
        fix: The exact command that would improve it; empty if nothing would, or nothing need be.
    """

    subject: str
    measure: State
    control: State = State.ABSENT
    detail: str = ""
    fix: str = ""


def gpu_sensors(*, shared: bool = True, folder: Path | None = None) -> list[Sensor]:
    """Sensors of the GPUs this process may use (CUDA_VISIBLE_DEVICES); empty without any.

    GPUs divided by MIG are left out: they have one counter for all instances (``penstock doctor`` says so).

    Raises:
        SensorError: There is a GPU that can't be read.
    """
    from penstock.energy._amd import amd_sensors
    from penstock.energy._nvml import NvmlSensor, visible_gpus

    try:
        wanted = visible_gpus()
    except Unsupported:
        wanted = []
    with ExitStack() as opened:
        found: list[Sensor] = []
        for gpu in wanted:
            try:
                found.append(_kept(opened, NvmlSensor(gpu, lazy=shared)))
            except Unsupported:
                continue
        found += [_kept(opened, sensor) for sensor in amd_sensors()]
        if shared:
            found = [_kept(opened, SharedSensor(sensor, folder=folder)) for sensor in found]
        opened.pop_all()
    return found


def _kept(opened: ExitStack, sensor: Sensor) -> Sensor:
    """The sensor, which is closed if one of those after it can't be opened."""
    opened.callback(sensor.close)
    return sensor


def cpu_sensors(*, shared: bool = True, cores: float | None = None, root: Path = POWERCAP) -> list[Sensor]:
    """RAPL counters where this user may read them, else the estimate for this process and its children."""
    from penstock.energy._rapl import rapl_sensors

    try:
        rapl: list[Sensor] = list(rapl_sensors(root))
    except PenstockError:
        rapl = []
    if not rapl:
        return [EstimateSensor(cores=cores)]
    if shared:
        with ExitStack() as opened:
            for sensor in rapl:
                opened.callback(sensor.close)
            rapl = [_kept(opened, SharedSensor(sensor)) for sensor in rapl]
            opened.pop_all()
    return rapl


def default_sensors(*, shared: bool = True, cores: float | None = None) -> list[Sensor]:
    """Sensors for everything this process can measure: its GPUs, and the CPU by counter or estimate.

    Args:
        shared: One process per node reads each device, the others follow it.
        cores: CPU threads set aside for this process, for the estimate.
    """
    with ExitStack() as opened:
        gpus = [_kept(opened, sensor) for sensor in gpu_sensors(shared=shared)]
        cpus = cpu_sensors(shared=shared, cores=cores)
        opened.pop_all()
    return [*gpus, *cpus]


def sensors_for(devices: Sequence[str], *, cores: float | None = None, shared: bool = True) -> list[Sensor]:
    """Sensors of what a trial runs on: its GPUs (``cuda:1`` is this process's second), and the CPU.

    Args:
        devices: Ids as in a placement: ``"cpu:0"``, ``"cuda:1"``, ``"node7/cuda:3"``.
        cores: CPU threads set aside for the trial, for the estimate.
        shared: As in ``default_sensors``.
    """
    gpus: list[Sensor] = []
    wanted = [
        int(match[1]) for device in devices if (match := re.search(r"(?:^|/)(?:cuda|gpu):(\d+)$", device))
    ]
    with ExitStack() as opened:
        if wanted:
            from penstock.energy._nvml import NvmlSensor, visible_gpus

            visible = visible_gpus()
            for number in wanted:
                if number >= len(visible):
                    raise Unsupported(
                        f"There is no cuda:{number} here: NVML shows {len(visible)} visible GPUs."
                    )
                sensor = _kept(opened, NvmlSensor(visible[number], lazy=shared))
                gpus.append(_kept(opened, SharedSensor(sensor)) if shared else sensor)
        cpus = cpu_sensors(shared=shared, cores=cores)
        opened.pop_all()
    return [*gpus, *cpus]


def examine(root: Path = POWERCAP, system: Path = SYSTEM) -> list[Finding]:
    """Look at everything; changes nothing but sets each GPU's power limit to what it is, to see whether it may."""
    return [*_examine_nvidia(system), *_examine_amd(), *_examine_cpu(root)]


def _nvidia_traces(system: Path) -> list[str]:
    """What shows that this machine has an NVIDIA GPU and its driver, whether or not it works."""
    nodes = [path for path in (system / "dev").glob("nvidia*") if path.name[6:].isdigit()]
    return [str(path) for path in (system / "proc/driver/nvidia", *sorted(nodes)) if path.exists()]


def _examine_nvidia(system: Path) -> list[Finding]:
    from penstock.energy._nvml import gpu_count

    try:
        count = gpu_count()
    except SensorError as error:
        return [Finding("NVIDIA GPUs", State.BROKEN, State.BROKEN, str(error), DRIVER_REMEDY)]
    except PenstockError as error:
        traces = _nvidia_traces(system)
        if traces and find_spec("pynvml") is None:
            return [
                Finding("NVIDIA GPUs", State.BROKEN, State.BROKEN, str(error), "pip install nvidia-ml-py")
            ]
        if traces:
            detail = f"There is {traces[0]}, but the driver does not answer. {error}"
            return [Finding("NVIDIA GPUs", State.BROKEN, State.BROKEN, detail, DRIVER_REMEDY)]
        return [Finding("NVIDIA GPUs", State.ABSENT, State.ABSENT, str(error))]
    if count == 0:
        return [Finding("NVIDIA GPUs", State.ABSENT, State.ABSENT, "The driver is there, but shows no GPU.")]
    return [_examine_gpu(index) for index in range(count)]


def _examine_gpu(index: int) -> Finding:
    from penstock.energy._nvml import NvmlSensor

    subject = f"gpu:{index}"
    try:
        sensor = NvmlSensor(index)
    except Unsupported as error:
        return Finding(
            subject, State.LIMITED, State.LIMITED, str(error), f"sudo nvidia-smi -i {index} -mig 0"
        )
    except PenstockError as error:
        fix = f"sudo nvidia-smi --gpu-reset -i {index}"
        return Finding(subject, State.BROKEN, State.BROKEN, str(error), fix)
    try:
        return _examine_limit(sensor, f"sudo nvidia-smi --gpu-reset -i {index}")
    finally:
        sensor.close()


def _examine_amd() -> list[Finding]:
    from penstock.energy._amd import amd_available, amd_gpus

    if not amd_available():
        return []
    try:
        gpus = amd_gpus()
    except SensorError as error:
        return [Finding("AMD GPUs", State.BROKEN, State.BROKEN, str(error), AMD_REMEDY)]
    found = []
    for index, sensor in enumerate(gpus):
        if isinstance(sensor, SensorError):
            found.append(Finding(f"amd:{index}", State.BROKEN, State.BROKEN, str(sensor), AMD_REMEDY))
        else:
            found.append(_examine_limit(sensor, AMD_REMEDY))
            sensor.close()
    return found


def _examine_limit(sensor: Sensor, remedy: str) -> Finding:
    """Of a GPU that can be read: its power now, and whether its limit may be set to what it is."""
    subject = f"{sensor.id} {sensor.name}"
    try:
        detail = f"{sensor.method}, +-{100 * sensor.uncertainty:.0f}%, {sensor.power_w():.0f} W now"
        range_w = sensor.power_limit_range_w
        if range_w is None:
            return Finding(subject, State.OK, State.ABSENT, f"{detail}; no power limit to set")
        limit_w = sensor.power_limit_w()
        detail += f"; power limit {limit_w:.0f} W of {range_w[0]:.0f}..{range_w[1]:.0f} W"
        try:
            sensor.set_power_limit_w(limit_w)
        except NotPermitted:
            fix = 'sudo -E env "PATH=$PATH" <your command>  # or in a container: --cap-add SYS_ADMIN'
            return Finding(subject, State.OK, State.LIMITED, f"{detail}, which this user may not change", fix)
        except (Unsupported, InvalidInput) as error:
            return Finding(subject, State.OK, State.ABSENT, f"{detail}; {error}")
        return Finding(subject, State.OK, State.OK, f"{detail}, which may be changed")
    except PenstockError as error:
        return Finding(subject, State.BROKEN, State.BROKEN, str(error), remedy)


def _examine_cpu(root: Path) -> list[Finding]:
    from penstock.energy._rapl import REMEDY, RaplSensor, find_domains

    domains: list[RaplDomain] = find_domains(root) if root.is_dir() else []
    if not domains:
        estimate = EstimateSensor()
        return [
            Finding(
                "CPU",
                State.ESTIMATED,
                State.ABSENT,
                f"No RAPL counters in {root} (a virtual machine, a container without /sys, or another CPU): estimated"
                f" as {estimate.method}, +-{100 * estimate.uncertainty:.0f}%",
                ""
                if root.is_dir()
                else "sudo modprobe intel_rapl_msr  # on bare metal; a virtual machine has none",
            )
        ]
    found = []
    for domain in domains:
        subject = f"{domain.id} {domain.label}"
        try:
            sensor = RaplSensor(domain)
        except NotPermitted as error:
            found.append(Finding(subject, State.ESTIMATED, State.ABSENT, str(error), REMEDY))
        except PenstockError as error:
            found.append(Finding(subject, State.BROKEN, State.ABSENT, str(error)))
        else:
            detail = f"{sensor.method}, +-{100 * sensor.uncertainty:.0f}%"
            found.append(Finding(subject, State.OK, State.ABSENT, detail))
            sensor.close()
    return found
