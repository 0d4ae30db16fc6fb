"""The arguments of a Study: checked one by one, each refusal with its remedy."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core import PlanPass, TrialRecord
from penstock.core.errors import InvalidInput
from penstock.energy._carbon import check_amount
from penstock.execute import Executor, Local
from penstock.goal import METERED, Budget, Goal
from penstock.plan import Fluid
from penstock.sample import TPE, Bayes, Sampler, WarmStart
from penstock.schedule import ASHA, SM2, Full, Hyperband, Scheduler, StopRule
from penstock.schedule._sm2_work import explores
from penstock.space import Space
from penstock.study._defaults import default_scheduler
from penstock.train import Command, Task


def check_space(space: Any) -> Space:
    if isinstance(space, Space):
        return space
    if isinstance(space, Mapping):
        return Space(space)
    raise InvalidInput(f"space takes a Space or a dict of domains, got {space!r}.")


def check_work(work: Any, space: Space) -> Any:
    if isinstance(work, Command):
        unknown = [field for field in work.fields if field not in space.names]
        if unknown:
            raise InvalidInput(
                f"The command uses {{{unknown[0]}}}, but the space has no such domain; it has {list(space.names)}."
            )
        return work
    if not callable(work):
        raise InvalidInput(f"work takes a function train(run), a Task or a Command, got {work!r}.")
    if isinstance(work, type):
        raise InvalidInput(f"work takes a function, got the class {work.__name__}; give an object of it.")
    _check_runs(work)
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):  # a built-in that does not tell
        return work
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(work, "__name__", None) or repr(work)
        raise InvalidInput(
            f"work is called with one argument, the run: {name}{signature} can't be ({error}). Write def {name}(run)."
        ) from None
    return work


def _check_runs(work: Any) -> None:
    """Refuse functions that do nothing of their own when they are called."""
    inner = work if inspect.isroutine(work) or isinstance(work, functools.partial) else type(work).__call__
    name = getattr(work, "__name__", None) or repr(work)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        raise InvalidInput(
            f"work takes a plain function: {name} is an async one, which nobody would await. Call asyncio.run(...) in "
            "a function without async."
        )
    if inspect.isgeneratorfunction(inner):
        raise InvalidInput(
            f"work takes a plain function: {name} has a yield in it, so that calling it runs nothing. Report by "
            "run.report(...) instead."
        )


def check_first(warm_start: Any) -> list[Mapping[str, Any]]:
    if isinstance(warm_start, Mapping):
        return [warm_start]
    if isinstance(warm_start, Iterable) and not isinstance(warm_start, str):
        configs = list(warm_start)
        if all(isinstance(config, Mapping) for config in configs):
            return configs
        warm_start = configs
    raise InvalidInput(
        f'warm_start takes configurations such as [{{"lr": 0.1}}], or an earlier Study, got {warm_start!r}.'
    )


def check_rules(stop: Any, goal: Goal | None = None) -> tuple[StopRule, ...]:
    """The stopping rules, each in the direction of the goal."""
    given = (stop,) if isinstance(stop, StopRule | type) or not isinstance(stop, Iterable) else tuple(stop)
    for rule in given:
        check_type("stop", rule, StopRule, None)
        if rule is None:
            raise InvalidInput("stop takes stopping rules, got None; without one, leave it out.")
    objectives = () if goal is None else goal.objectives
    directions = {o.metric: "max" if o.maximize else "min" for o in objectives}
    return tuple(rule.toward(directions) for rule in given)


def check_planner(planner: Any) -> Fluid | tuple[PlanPass, ...] | None:
    if planner is None or isinstance(planner, Fluid):
        return planner
    if isinstance(planner, type):
        check_type("planner", planner, Fluid, None)
    passes = tuple(planner) if isinstance(planner, Iterable) and not isinstance(planner, str) else (None,)
    if not all(callable(each) and not isinstance(each, type) for each in passes):
        raise InvalidInput(f"planner takes pk.Fluid() or a list of plan passes (functions), got {planner!r}.")
    return passes


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_confidence(value: Any) -> float:
    if not (is_number(value) and 0 < value < 1):
        raise InvalidInput(
            f"confidence must be a number between 0 and 1 (0.5: the prediction itself), got {value!r}."
        )
    return float(value)


def check_energy(budget: Budget, meter: bool, price_per_kwh: Any, currency: Any) -> None:
    if price_per_kwh is not None:
        check_amount("price_per_kwh", price_per_kwh)
    if not isinstance(currency, str) or not currency.strip():
        raise InvalidInput(f'currency takes a word such as "EUR", got {currency!r}.')
    if budget.needs_energy and not meter:
        raise InvalidInput("A budget in Wh, CO2e or money needs the meter: drop meter=False, or the budget.")
    if budget.cost is not None and price_per_kwh is None:
        raise InvalidInput(
            f"Budget cost={budget.cost:g} needs the price of electricity: give price_per_kwh= (--price, on the "
            "command line)."
        )


def check_goal(goal: Goal, work: Any, *, meter: bool) -> None:
    """Refuse a goal that nobody would measure or report."""
    if isinstance(work, Task):
        reported = ["loss", "train_loss", *work.metrics]
        for objective in goal.objectives:
            if objective.metric not in (*reported, *METERED):
                raise InvalidInput(
                    f"The goal names the metric {objective.metric!r}; the task reports {', '.join(reported)}. Add "
                    "it to the task's metrics, or name one of them."
                )
    if not meter and any(objective.metric == "energy_j" for objective in goal.objectives):
        raise InvalidInput(
            "The goal has energy_j in it, which the meter gives: drop meter=False, or the objective."
        )


def check_bubbles(planner: Any, executor: Executor, *, power_limits: bool) -> None:
    """Refuse what can't be done with devices that belong to another job and are there for a while only."""
    if not (isinstance(executor, Local) and executor.has_bubbles):
        return
    if power_limits:
        raise InvalidInput(
            "power_limits and bubbles don't go together: a limit set in a bubble would slow the host job, whose device "
            "it is. Drop power_limits, or run on devices of your own."
        )
    if isinstance(planner, Fluid):
        raise InvalidInput(
            "planner=Fluid() and bubbles don't go together: Fluid shares and spreads over devices that stay, and "
            "bubbles come and go. Drop the planner: promoted trials get the slots first, the others the bubbles."
        )


def check_width(planner: Any, executor: Executor) -> None:
    """Refuse two words on how much of a device a trial gets."""
    width = getattr(executor, "slots_per_trial", 1)
    if planner is not None and width != 1:
        raise InvalidInput(
            f"slots_per_trial={width:g} and a planner don't go together: the planner decides how many devices a trial "
            "gets, or which part of one. Give one of the two."
        )


def longest(scheduler: Scheduler) -> int | None:
    """Training epochs of a trial that is never given up; None: as the work likes."""
    return scheduler.thorough_max if isinstance(scheduler, SM2) else scheduler.max_epochs


def check_command(work: Any, scheduler: Scheduler) -> None:
    """Refuse what only the inside of a training loop could do."""
    if not isinstance(scheduler, SM2):
        return
    if isinstance(work, Command):
        raise InvalidInput(
            "SM2 explores learning rates within a training, which a command does not show: give a pk.Task, a function "
            "that reads run.options, or another scheduler."
        )
    if not isinstance(work, Task) and not explores(work):
        name = getattr(work, "__name__", None) or repr(work)
        raise InvalidInput(
            f"SM2 explores learning rates within a training, and {name} takes no part in that: give a pk.Task, or read "
            "run.options in the function and report sm2_lr in the epochs to explore (docs/sm2.md), or use pk.Halving."
        )


def check_type(name: str, value: Any, kind: type, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, type) and issubclass(value, kind):
        raise InvalidInput(
            f"{name} takes an object, got the class {value.__name__}: write {value.__name__}(...)."
        )
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        wrap = ""
        if kind is Sampler and type(value).__module__.startswith("optuna."):
            wrap = f" Wrap Optuna's own: pk.OptunaSampler({type(value).__name__}(...))."
        elif kind is TrialRecord:
            wrap = " Give one of study.trials."
        raise InvalidInput(f"{name} takes {article} {kind.__name__}, got {value!r}.{wrap}")
    return value


def check_whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise InvalidInput(f"{name} must be a whole number of at least 0, got {value!r}.")
    return int(value)  # a seed is kept as JSON


def compose(
    scheduler: Any, sampler: Any, budget: Budget, work: Any, goal: Goal | None = None
) -> tuple[Scheduler, Sampler]:
    """The scheduler and the sampler of a study, each for itself."""
    sampler = check_type("sampler", sampler, Sampler, None)
    scheduler = check_type("scheduler", scheduler, Scheduler, None)
    if scheduler is not None and scheduler.sampler is not None:
        if sampler is not None:
            raise InvalidInput(
                "Both the study and its scheduler were given a sampler. Give it to one: "
                f"{type(scheduler).__name__}(..., sampler={type(sampler).__name__}())."
            )
        sampler = check_type("the scheduler's sampler", scheduler.sampler, Sampler, None)
    if scheduler is None:
        # A grid has an end of its own, also behind a warm start or under limits.
        unbounded = (sampler is not None and sampler.ends) or budget != Budget()
        scheduler = Full() if unbounded else default_scheduler(work, sampler, budget)
    if sampler is None:
        sampler = TPE()
    if goal is not None:
        sampler = _toward(sampler, goal)
    count = "iterations" if isinstance(scheduler, Hyperband) else "trials"
    endless = isinstance(scheduler, Full | ASHA | Hyperband) and getattr(scheduler, count) is None
    if endless and not sampler.ends and budget == Budget():
        raise InvalidInput(
            f"This study has no end: give {type(scheduler).__name__}({count}=...) or budget=Budget(trials=...), "
            "(time_s=...) or the like."
        )
    # Of its own: an object given to two studies is started by neither of them.
    return copy.copy(scheduler), copy.copy(sampler)


def _toward(sampler: Sampler, goal: Goal) -> Sampler:
    """The sampler with what it transfers measured by the goal."""
    if isinstance(sampler, WarmStart):
        return sampler.before(_toward(sampler.then, goal))
    return sampler.toward(goal) if isinstance(sampler, Bayes) else sampler


__all__ = [
    "check_command",
    "check_confidence",
    "check_energy",
    "check_first",
    "check_goal",
    "check_planner",
    "check_rules",
    "check_space",
    "check_type",
    "check_whole",
    "check_width",
    "check_work",
    "compose",
    "is_number",
    "longest",
]
