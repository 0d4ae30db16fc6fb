"""Devices and shares of them: what trials run on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One thing a trial can occupy: a GPU, or a group of CPU cores.

    Attributes:
        id: Unique within the executor, e.g. ``"cpu:0"``, ``"cuda:1"``, ``"node7/cuda:3"``.
        kind: Devices of one kind are interchangeable: ``"cpu"``, ``"NVIDIA V100"``.
        node: The machine it is on.
        memory_bytes: Its memory, or None where unknown.
        cores: CPU threads a trial that holds all of it may use.
    """

    id: str
    kind: str = "cpu"
    node: str = "local"
    memory_bytes: int | None = None
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one device, in (0, 1]. Several shares make a multi-device placement."""

    device: str
    fraction: float = 1.0
