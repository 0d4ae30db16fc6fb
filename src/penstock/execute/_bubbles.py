"""Stages of a host job as devices of an executor: trials run there in the host's bubbles alone (Hydro 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.plan import Lent
from penstock.train._bubble_page import Stage, stages_in

_LEAST_SPEED = 1e-3  # of a host that has lent nothing yet: it learns its bubbles in its first steps


def lent_devices(folder: str) -> dict[str, Stage]:
    """The stages that lend bubbles in a folder, by the names of their devices.

    Raises:
        InvalidInput: There are none.
    """
    return {f"bubble:{stage.name}": stage for stage in stages_in(folder)}


def lent_now(stages: Mapping[str, Stage]) -> dict[str, Lent]:
    """What the hosts lend at present."""
    found = {}
    for name, stage in stages.items():
        speed, free_bytes = stage.now()
        found[name] = Lent(max(_LEAST_SPEED, speed), free_bytes)
    return found


def in_bubble(facts: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """What a worker must know of a placement in bubbles.

    Nothing is measured there, for every time includes the host's; that fused and unfused agree is checked.
    """
    told: dict[str, Any] = {**facts, "bubble": str(stage.path)}
    fusion = told.get("fusion")
    if fusion is not None and fusion.get("measure"):
        kept = {name: fusion[name] for name in ("count", "key") if name in fusion}
        told["fusion"] = {**kept, "check": True}
    return told
