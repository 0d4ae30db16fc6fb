"""What the local executor has of this machine: CPU slots or GPUs, and the stages of a host job that lend bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core import Device, Share
from penstock.core.check import whole
from penstock.core.errors import InvalidInput
from penstock.execute._bubbles import lent_devices
from penstock.execute._holdings import EPSILON
from penstock.execute._machine import cpu_slots, gpu_slots, usable_cores, visible_gpus
from penstock.train._bubble_page import Stage


@final
@dataclass(frozen=True, slots=True)
class Site:
    """The devices.

    Attributes:
        devices: By name.
        visible: How CUDA names those that are GPUs.
        stages: Of those that are lent by a host job.
    """

    devices: dict[str, Device]
    visible: dict[str, str]
    stages: dict[str, Stage]

    def needs(self, shares: Sequence[Share]) -> tuple[tuple[str, ...], int]:
        """The GPUs, as CUDA names them, and the CPU threads of a worker on these shares."""
        cores = sum(self.devices[share.device].cores * share.fraction for share in shares)
        gpus = tuple(self.visible[share.device] for share in shares if share.device in self.visible)
        return gpus, max(1, int(cores + EPSILON))

    def stage(self, shares: Sequence[Share]) -> str:
        """The device, if it is one that a host job lends."""
        return shares[0].device if shares[0].device in self.stages else ""


def look(
    slots: int | None,
    threads: int | None,
    gpus: int | tuple[int, ...] | None,
    bubbles: str | None,
    slots_per_trial: float,
) -> Site:
    """This machine, as the arguments of ``Local`` ask for it.

    Raises:
        Unsupported: There are fewer GPUs.
        InvalidInput: A trial has no room.
    """
    cores = usable_cores()
    without = gpus == 0 or (gpus is None and slots is not None)
    devices, visible = gpu_slots([] if without else visible_gpus(), gpus, cores, threads)
    if not devices:
        devices = cpu_slots(cores if slots is None else slots, cores, threads)
    stages = {} if bubbles is None else lent_devices(bubbles)
    for name, stage in stages.items():
        devices[name] = Device(name, "bubble", cores=threads or 1)
        if stage.gpu is not None:
            visible[name] = stage.gpu
    if slots_per_trial > len(devices):
        raise InvalidInput(f"slots_per_trial = {slots_per_trial} does not fit in {len(devices)} slots.")
    return Site(devices, visible, stages)


def check_gpus(gpus: Any) -> int | tuple[int, ...] | None:
    """How many GPUs, or which; an error names what is neither."""
    remedy = "Give how many, or a list of their numbers such as [0, 1]; 0 for none."
    if gpus is None:
        return None
    if isinstance(gpus, Sequence) and not isinstance(gpus, str | bytes):
        chosen = tuple(whole("gpus", each, remedy) for each in gpus)
        if any(each < 0 for each in chosen) or len(set(chosen)) < len(chosen):
            raise InvalidInput(f"gpus takes each GPU's number once, from 0 on, got {gpus!r}. {remedy}")
        return chosen
    count = whole("gpus", gpus, remedy)
    if count < 0:
        raise InvalidInput(f"gpus must be at least 0, got {count}. {remedy}")
    return count
