"""A Task's narrow twin: which networks it builds, how they start, and the check that they are alike."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.core.trial import Config
from penstock.model import (
    CoordinateCheck,
    ScaledSchedule,
    Shrink,
    Table,
    adam_like,
    compare,
    coordinate_check,
    narrower,
    parametrize,
    scale_groups,
    shrink,
    without_compiler,
)
from penstock.train._loader import copied, derive
from penstock.train._loop import _forward, private_randomness, seed_everything

if TYPE_CHECKING:
    from penstock.train._task import Task

TARGET = "target"
"""``options["model"]`` of a segment that trains the full model in a study that tunes its twin."""

_KEPT = 8  # blueprints per process


@final
@dataclass(frozen=True, slots=True)
class Blueprint:
    """A twin, ready to be copied, and the tables of both models.

    Attributes:
        twin: The prepared twin; None: the factory builds it at ``width``.
        width: What the factory is told.
        table: Of the twin.
        base: Of the full model.
    """

    twin: nn.Module | None
    width: float | int | None
    table: Table
    base: Table


_blueprints: dict[str, list[tuple[dict[str, Any], float, Blueprint]]] = {}


@final
class Surrogate:
    """Builds the twins of one task.

    Args:
        shrink: How narrow.
        inputs: An example batch of two samples.
        divisor: Of the width of what is built; 1: the full model, initialised alike.
    """

    def __init__(self, shrink: Shrink, inputs: Any, *, divisor: float | None = None) -> None:
        self.shrink = shrink
        self.inputs = inputs
        self.divisor = float(shrink.factor if divisor is None else divisor)
        self.token = uuid.uuid4().hex

    @classmethod
    def of(cls, task: Task, shrink: Shrink) -> Surrogate:
        """The surrogate of a task; looks at its data."""
        data = task.load(torch.device("cpu")).train
        inputs, _ = next(data.batches(min(2, data.n)))
        return cls(shrink, inputs)

    def at(self, divisor: float) -> Surrogate:
        """The same at another width."""
        other = copy.copy(self)
        other.divisor = float(divisor)
        return other

    def build(self, task: Task, config: Config) -> tuple[nn.Module, set[str]]:
        """A freshly initialised model, and the names of the configuration its factory looked at."""
        plan, used = self._blueprint(task, config)
        adam = _adam(task, config)
        if self.divisor == 1:
            model, _ = task.build_plain(config)
            plan.base.initialise(model, adam=adam)
        elif plan.twin is None:
            model, _ = task.build_plain({**config, "width": plan.width})
            plan.table.prepare(model)
            plan.table.initialise(model, adam=adam)
        else:
            model = copy.deepcopy(plan.twin)
            plan.table.initialise(model, redraw=True, adam=adam)
        return model, used

    def groups(self, task: Task, model: nn.Module, config: Config) -> list[Any]:
        """What an optimizer of ``model`` gets."""
        if self.divisor == 1:
            return [p for p in model.parameters() if p.requires_grad]
        plan, _ = self._blueprint(task, config)
        return list(plan.table.groups(model))

    def scale(self, optimizer: Any) -> None:
        """Apply the table's learning rates to an optimizer of ``groups``."""
        if self.divisor != 1:
            scale_groups(optimizer)

    def schedule(self, optimizer: Any, make: Callable[[Any], Any]) -> Any:
        """A scheduler of such an optimizer."""
        return make(optimizer) if self.divisor == 1 else ScaledSchedule(optimizer, make)

    def table(self, task: Task, config: Config) -> Table:
        """The twin's table."""
        return self._blueprint(task, config)[0].table

    def _blueprint(self, task: Task, config: Config) -> tuple[Blueprint, set[str]]:
        """From this process's cache, by the values that the factory looks at."""
        divisor = self.divisor if self.divisor != 1 else float(self.shrink.factor)
        known = _blueprints.setdefault(self.token, [])
        for seen, at, plan in known:
            if at == divisor and all(name in config and _same(config[name], v) for name, v in seen.items()):
                return plan, set(seen)
        with private_randomness():
            seed_everything(derive(0, "blueprint"))
            plan, used = self._draw(task, config, divisor)
        values = {name: config[name] for name in used if name in config}
        known.insert(0, (values, divisor, plan))
        del known[_KEPT * 4 :]
        return plan, set(values)

    def _draw(self, task: Task, config: Config, divisor: float) -> tuple[Blueprint, set[str]]:
        wide, used = task.build_plain(config)
        forward = task.forward or _forward
        width = narrower(task.model, config, divisor)
        if width is None:
            twin = shrink(wide, divisor, inputs=self.inputs, forward=forward, floor=self.shrink.floor)
        else:
            twin, _ = task.build_plain({**config, "width": width})
            compare(wide, twin, floor=self.shrink.floor)
        table, base = parametrize(wide, twin, inputs=self.inputs, forward=forward)
        if width is not None:
            return Blueprint(None, width, table, base), used
        return Blueprint(table.prepare(twin), None, table, base), used


def _adam(task: Task, config: Config) -> bool:
    """Whether the configuration's optimizer is Adam-like; only an optimizer itself can tell, so one is made."""
    optimizer, _ = task.build_optimizer([nn.Parameter(torch.zeros(1))], config, lr=1.0)
    return adam_like(optimizer)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or json.dumps(one, default=repr) == json.dumps(other, default=repr)


def check(task: Task, config: Config, *, threads: int | None = None) -> tuple[CoordinateCheck, float]:
    """Run the coordinate check of a narrowed task; also the seconds an epoch of the full model takes.

    Args:
        task: Of ``Task.narrowed``.
        config: At which hyperparameters.
        threads: Threads to compute with, as many as a trial will have; None: as it is.

    Raises:
        Unsupported: The model can't be shrunk.
    """
    surrogate = task.surrogate
    if surrogate is None:
        raise InvalidInput("There is nothing to check: this task has no narrow twin.")
    given = task.hyperparameters(config)
    data = task.load(torch.device("cpu"))
    size = min(task.size_of_batches(given), data.train.n)
    batches = [
        batch for batch, _ in zip(data.train.batches(size), range(surrogate.shrink.steps), strict=False)
    ]

    forward = task.forward or _forward

    def make(divisor: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        other = task.at(surrogate.at(divisor))
        seed_everything(derive(seed, "check"))
        model, _ = other.build_model(given)
        optimizer, _ = other.build_optimizer(other.groups(model, given), given)
        return model, optimizer

    before = torch.get_num_threads()
    with private_randomness(), without_compiler():
        try:
            if threads is not None:
                torch.set_num_threads(max(1, threads))
            found = coordinate_check(
                make,
                batches,
                task.loss,
                divisors=surrogate.shrink.divisors,
                steps=surrogate.shrink.steps,
                forward=lambda model, inputs: forward(model, copied(inputs)),  # all read the same batches
            )
        finally:
            torch.set_num_threads(before)
    step_s = found.step_s[-1]
    rows = data.train.n + (
        0 if data.val is None else data.val.n / 3
    )  # an evaluation is about a third of a step
    return found, step_s * rows / size


def describe(table: Table) -> list[Mapping[str, Any]]:
    """The side table as rows, for people and the journal."""
    return [
        {
            "parameter": name,
            "kind": rule.kind,
            "sgd_lr": rule.sgd,
            "adam_lr": rule.adam,
            "growth": rule.growth,
            "std": rule.std,
        }
        for name, rule in table.rules.items()
    ]


__all__ = ["TARGET", "Surrogate", "check", "describe"]
