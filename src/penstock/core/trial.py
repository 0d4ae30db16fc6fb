"""Trials: a configuration, its seed and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]
"""One configuration: JSON-able values by domain name; inactive conditional domains are absent."""

Values: TypeAlias = tuple[float, ...]
"""The objectives of a report, in the goal's order, each turned so that **lower is better**."""


class TrialStatus(StrEnum):
    """Where a trial is.

    Transitions: WAITING -> RUNNING -> PAUSED -> RUNNING ..., and from RUNNING or PAUSED to one of
    the ends COMPLETED, STOPPED (by a scheduler, rule, budget or the user) or FAILED. A failure that
    is retried goes RUNNING -> WAITING.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens to a trial in this state."""
        return self in _ENDS


_ENDS = frozenset({TrialStatus.COMPLETED, TrialStatus.STOPPED, TrialStatus.FAILED})


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration under a number. Numbers count from 0 in the order of creation.

    Attributes:
        id: The number.
        config: The configuration.
        seed: The trial's own seed, derived from the study's seed and the number.
        parent: The trial it was made from (PBT's exploit, a transferred target trial), if any.
    """

    id: int
    config: Config
    seed: int
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state of a trial after ``epoch`` epochs."""

    trial: int
    epoch: int
