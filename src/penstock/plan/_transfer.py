"""When a configuration found on the narrow twin starts on the full model: eager transfer and deadlines (Hydro 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

MARGIN = 1.3
"""A target is given so many times the time it is expected to take."""

STARTUP_S = 1.0
"""And so much for a device to get free and a worker to start."""

LEAST_TUNING = 0.25
"""Of a deadline, tuning gets at least this share, however long the target takes."""

PAST_RECALL = 0.5
"""A target trial that has this share of its training behind it is not given up for another."""


MOST_SLOWER = 3.0
"""Training counts as at most so many times as slow as foreseen: a tiny twin's epoch mostly has fixed costs, which the
full model's does not have in proportion."""


@final
@dataclass(frozen=True, slots=True)
class TransferStanding:
    """How a transfer stands.

    Attributes:
        best: The best surrogate trial so far that may be transferred; None: none yet.
        transferred: Surrogate trials whose configuration has a target trial, whatever became of it.
        running: Target trials that run or wait, with the share of their training behind them.
        trained: Whether a target trial has run to its end.
        done: Share of the surrogate trials that is over, 0..1; None: nobody knows how many there will be.
        over: Whether surrogate tuning has ended.
        idle: Devices for which there is nothing else to do.
        elapsed_s: Time spent.
        deadline_s: When a trained target must be there; None: no deadline.
        target_s: Time a target takes, as far as known.
        eager: From which share of the surrogate trials on the best so far is transferred.
        others: The next best surrogate trials, which are transferred too once tuning has ended.
    """

    best: int | None
    transferred: frozenset[int] = frozenset()
    running: tuple[tuple[int, float], ...] = ()
    trained: bool = False
    done: float | None = None
    over: bool = False
    idle: int = 0
    elapsed_s: float = 0.0
    deadline_s: float | None = None
    target_s: float | None = None
    eager: float = 0.5
    others: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class TransferMove:
    """What to do.

    Attributes:
        start: The surrogate trial whose configuration is to start on the full model, on an idle device.
        stop: Target trials to stop, so that ``start`` gets their device.
        why: One line, for people.
    """

    start: int | None = None
    stop: tuple[int, ...] = ()
    why: str = ""


def tuning_end_s(deadline_s: float, target_s: float | None) -> float:
    """When tuning must end for a target to be trained by the deadline."""
    if target_s is None:
        return deadline_s / 2
    return max(LEAST_TUNING * deadline_s, deadline_s - MARGIN * target_s - STARTUP_S)


def slower_by(measured_s: float, foreseen_s: float) -> float:
    """How many times as long as foreseen the model's epochs will take, by what those of its twin took."""
    if not foreseen_s > 0:
        return 1.0
    return min(
        MOST_SLOWER, max(1.0, measured_s / foreseen_s)
    )  # fused ones report their share: less says nothing


def transfer_fits(standing: TransferStanding) -> bool:
    """Whether a target that starts now would be trained by the deadline."""
    if standing.deadline_s is None or standing.target_s is None:
        return True
    return standing.elapsed_s + standing.target_s <= standing.deadline_s


def transfer_move(standing: TransferStanding) -> TransferMove:
    """What eager transfer does now.

    The best configuration so far starts on the full model once enough surrogate trials are over and a device has
    nothing else to do. A better one found later joins it on an idle device; without one it replaces the target trial
    with the least behind it, unless that is past recall. The next best, where they are wanted, come after it.
    """
    best = standing.best
    if best is None:
        return TransferMove()
    if best in standing.transferred:
        return _next_best(standing)
    alive = bool(standing.running) or standing.trained
    if alive and not transfer_fits(standing):
        return TransferMove()  # it could not be trained in time: what runs goes on
    if not _ready(standing):
        return TransferMove()
    if standing.idle > 0:
        return TransferMove(start=best, why="joins" if standing.running else "best so far")
    if not standing.running:
        return TransferMove()
    victim, behind = min(standing.running, key=lambda each: each[1])
    if behind >= PAST_RECALL:
        return TransferMove()
    return TransferMove(
        start=best, stop=(victim,), why=f"replaced by the configuration of trial {best}, which is better"
    )


def _next_best(standing: TransferStanding) -> TransferMove:
    waiting = [trial for trial in standing.others if trial not in standing.transferred]
    if not waiting or not standing.over or standing.idle <= 0 or not transfer_fits(standing):
        return TransferMove()
    return TransferMove(start=waiting[0], why="one of the best")


def _ready(standing: TransferStanding) -> bool:
    if standing.over:
        return True
    if standing.done is not None and standing.done >= standing.eager:
        return True
    if standing.deadline_s is None:
        return False
    return standing.elapsed_s >= standing.eager * tuning_end_s(standing.deadline_s, standing.target_s)


__all__ = [
    "TransferMove",
    "TransferStanding",
    "slower_by",
    "transfer_fits",
    "transfer_move",
    "tuning_end_s",
]
