"""What a study does where its user says nothing: scheduler, fusion and planning by the work and the machine."""

from __future__ import annotations

from typing import Any

from penstock.execute import Executor
from penstock.goal import Budget
from penstock.sample import Sampler, WarmStart
from penstock.schedule import ASHA, Full, Scheduler
from penstock.train import Task

DEFAULT_TRIALS = 50
"""Of a work whose epochs are not known beforehand: each is trained to its end."""

HALVED_TRIALS = 100
"""Of a Task, of which most end after an epoch: they cost less than half of the 50, from some 9 epochs on."""

_ETA = 3
_FEWEST_EPOCHS = _ETA  # fewer have no rungs


def default_scheduler(work: Any, sampler: Sampler | None, budget: Budget) -> Scheduler:
    """The scheduler of a study that was given none, and neither an end.

    A Task says how long its trainings are, so bad ones can be ended early. ASHA of the halving schedulers, for it
    never waits for a rung to fill: the first good configuration is trained to its end while others still begin.
    """
    found: Scheduler = Full(trials=DEFAULT_TRIALS)
    if sampler is None and budget == Budget() and isinstance(work, Task) and work.epochs >= _FEWEST_EPOCHS:
        found = ASHA(max_epochs=work.epochs, eta=_ETA, trials=HALVED_TRIALS)
    found.by_default = True
    return found


def told(work: Any, scheduler: Scheduler, sampler: Sampler, executor: Executor, unfused: str | None) -> str:
    """One line on what was chosen and why."""
    after = sampler.then if isinstance(sampler, WarmStart) else sampler
    names = f"{type(scheduler).__name__} with {type(after).__name__}"
    if after is not sampler:
        names += " from the middle of the space on"
    if isinstance(scheduler, ASHA):
        why = (
            f"a Task of {scheduler.max_epochs} epochs, so of {scheduler.trials} configurations the worse end early, "
            "after 1 epoch at the soonest"
        )
    elif isinstance(work, Task):
        why = "a Task of so few epochs that every configuration is trained to its end"
    else:
        why = "how long a training is can't be told beforehand, so every configuration is trained to its end"
    fused = (
        "configurations alike train as one where measuring finds that it pays"
        if unfused is None
        else f"nothing is fused ({unfused})"
    )
    where = type(executor).__name__
    return f"Chosen: {names} ({why}); {fused}; first come, first served on {where}'s devices, one each."


__all__ = ["DEFAULT_TRIALS", "HALVED_TRIALS", "default_scheduler", "told"]
