"""What drivers and workers say to each other, on the driver's side: launches to specs, messages to events."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from penstock.core import Ended, Noted, Placement, Reported, Saved, Share, TrialStatus, total
from penstock.core.errors import InvalidInput
from penstock.core.measurement import Measurement, measurement
from penstock.execute._base import Job, Launch
from penstock.execute._holdings import EPSILON
from penstock.train._worker import Settings

SpecTuple: TypeAlias = tuple[Any, ...]
"""The fields of a ``Spec`` in their order: a plain tuple is quicker to pickle."""


def settings_of(job: Job) -> Settings:
    """What a study's workers are told once."""
    return Settings(
        job.files.absolute(),
        tuple(job.metrics),
        str(job.options.get("study", "")),
        job.options.get("make_meter"),
        job.options.get("choose_fusion"),
    )


def whereabouts(files: Path) -> tuple[list[str], list[str], str]:
    """The driver's search path, arguments and folder, for workers to have the same; ``files`` if that is gone."""
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = str(files.absolute())
    return [os.path.abspath(entry) if entry == "" else entry for entry in sys.path], sys.argv, cwd


def specs_of(launch: Launch) -> list[SpecTuple]:
    """What a worker is told of each segment of a launch."""
    return [spec_of(launch, number) for number in range(len(launch.placement.segments))]


def spec_of(launch: Launch, number: int) -> SpecTuple:
    """What a worker is told of one segment of a launch."""
    segment = launch.placement.segments[number]
    trial, copied = segment.trial, segment.copy_from
    return (
        trial.id,
        dict(trial.config),
        trial.seed,
        segment.start,
        segment.until,
        segment.last,
        None if copied is None else (copied.trial, copied.epoch),
        launch.checkpoints[number],
        launch.known[number],
        launch.placement.attempt,
        dict(segment.options),
        launch.leaves[number] if launch.leaves else None,
    )


def fused_of(placement: Placement) -> tuple[int, ...]:
    """The trials that a placement trains as one."""
    return () if len(placement.segments) == 1 else tuple(s.trial.id for s in placement.segments)


def spreads(placement: Placement, shares: int) -> bool:
    """Whether it is one trial on several devices, which could do with fewer."""
    return placement.max_devices > 1 and shares > 1 and len(placement.segments) == 1


def to_event(message: tuple[Any, ...], time_s: float) -> Reported | Saved | Noted | Ended | None:
    """The event of a worker's message about a trial; None for its start, of which it knows only a part."""
    kind, trial = message[0], message[2]
    if kind == "r":
        _, _, _, _, epoch, metrics, train_s, energy = message
        drawn = None if energy is None else measurement(*energy)
        return Reported(time_s, trial, epoch, metrics, train_s, drawn)
    if kind == "e":
        _, _, _, _, status, epoch, reason, error, kept, energy = message
        drawn = None if energy is None else measurement(*energy)
        return Ended(time_s, trial, TrialStatus(status), epoch, reason, error, kept=kept, energy=drawn)
    if kind == "c":
        return Saved(time_s, trial, message[4], message[5])
    if kind == "n":
        return Noted(time_s, message[4], message[5], trial)
    return None


def weighed(facts: Mapping[str, Any], shares: Sequence[Share]) -> dict[str, Any]:
    """What a worker must know of its placement, with its weight among those that share its devices."""
    fraction = sum(share.fraction for share in shares) / len(shares)
    return dict(facts) if fraction >= 1.0 - EPSILON else {**facts, "fraction": fraction}


def also_drew(drawn: Measurement | None, ended: Ended) -> Ended:
    """The end with what the trial drew outside of epochs before, on other shares."""
    if drawn is None:
        return ended
    return replace(ended, energy=total(part for part in (drawn, ended.energy) if part is not None))


def check_slots_per_trial(slots_per_trial: float, slots: int | None) -> None:
    """Refuse what no slots can be cut into."""
    if not slots_per_trial > 0:
        raise InvalidInput(f"slots_per_trial must be positive, got {slots_per_trial}.")
    if slots_per_trial > 1 and slots_per_trial != int(slots_per_trial):
        raise InvalidInput(
            f"slots_per_trial must be a whole number or a fraction below 1, got {slots_per_trial}."
        )
    if slots is not None and slots_per_trial > slots:
        raise InvalidInput(f"slots_per_trial = {slots_per_trial} does not fit in {slots} slots.")
