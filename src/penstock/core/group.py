"""TrialGroups: the only thing a scheduler hands to the planner (Fluid, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.trial import Checkpoint, Trial


@dataclass(frozen=True, slots=True)
class Segment:
    """The next stretch of one trial's training.

    Attributes:
        trial: The trial.
        start: Epochs it has behind it when the segment starts.
        until: Epochs it has behind it when the segment ends; None: until the training function returns.
        last: Whether the trial is complete when the segment ends; otherwise it is paused, to be promoted
            (another segment) or stopped by the scheduler.
        copy_from: Start from another trial's checkpoint instead of its own (PBT's exploit).
        options: JSON-able facts for the worker about how to train this stretch (SM2's exploratory and
            thorough modes); the Run shows them as ``run.options``.
    """

    trial: Trial
    start: int = 0
    until: int | None = None
    last: bool = True
    copy_from: Checkpoint | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Segments that may run in any order and whose common makespan is to be minimised.

    Attributes:
        segments: What to run, at most one segment per trial.
        label: What it is, for people: ``"bracket 3, rung 1"``.
    """

    segments: tuple[Segment, ...]
    label: str = ""
