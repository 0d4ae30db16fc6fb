"""Trials that run in the bubbles of a host job: they stop between layers at a bubble's end and go on in the next.

``_bubble_host`` is the host's side, ``_bubble_gate`` the trial's, ``_bubble_page`` what they share. Here whole trials
are put behind a gate: whatever a worker runs (``guest``), or the trials of a task (``squeeze_task``).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from penstock.core.errors import InvalidInput, Unsupported
from penstock.train._bubble_gate import Gate
from penstock.train._bubble_page import YIELD, clock_s
from penstock.train._task import Task

_HANDOVER_S = 30.0  # in which the trial before must have let go of a stage


@contextmanager
def guest(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a trial stop between any two operations of torch, and in Python code, while the host of a stage computes.

    Finer than layers, and for every kind of training: fused groups, functions, what has no modules. What is compiled
    is one operation, so nothing is compiled meanwhile.

    Args:
        path: The stage's ``.bubble`` file.
    """
    from penstock.train import _fused_loop
    from penstock.train._operations import stopping

    gate = _patient(path)
    gate.to_cores()
    if gate._words[YIELD]:
        gate.to_background()
    importlib.import_module("torch._dynamo")  # optimizers import it, for seconds: no bubble's time for that
    cost_s = _fused_loop._costs["compile_cost_s"]
    _fused_loop._costs["compile_cost_s"] = math.inf
    try:
        with stopping(gate.passage), gate.anywhere():
            gate.between()
            yield
    finally:
        _fused_loop._costs["compile_cost_s"] = cost_s
        gate.rest()
        gate.close()


def _patient(path: str | os.PathLike[str]) -> Gate:
    """A stage's gate, as soon as the trial before has let go of it."""
    deadline_s = clock_s() + _HANDOVER_S
    while True:
        try:
            return Gate(path)
        except Unsupported:
            if clock_s() > deadline_s:
                raise
            time.sleep(0.01)


# ------------------------------------------------------------ tasks

_gates: dict[str, Gate] = {}


def gate_of(folder: str | os.PathLike[str], *, background: bool = True) -> Gate:
    """This process's gate in a folder: taken at the first call, held as long as the process lives.

    Args:
        folder: Where the hosts are.
        background: Also let the system run this process only where no other wants the core (SCHED_IDLE), where it can.
    """
    key = str(Path(folder).resolve())
    if key not in _gates:
        _gates[key] = Gate.any(folder)
        _gates[key].to_cores()
        if background:
            _gates[key].to_background()
    return _gates[key]


@final
class _Attached:
    """A factory of models or optimizers whose products pause; it has the signature of the original."""

    def __init__(self, make: Callable[..., Any], folder: str, what: str, background: bool) -> None:
        self.make, self.folder, self.what, self.background = make, folder, what, background
        self.__name__ = getattr(make, "__name__", type(make).__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.make)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.make(*args, **kwargs)
        gate = gate_of(self.folder, background=self.background)
        return gate.attach(made) if self.what == "model" else gate.attach_optimizer(made)


def squeeze_task(task: Task, folder: str | os.PathLike[str], *, background: bool = True) -> Task:
    """A task whose trials run in the bubbles that hosts lend in ``folder``, with the results they have alone.

    Each worker process takes one stage's bubbles for itself: give the study as many devices as there are stages, and
    ``fuse=False``.

    Args:
        task: The task.
        folder: Where the host's ``Host``s are.
        background: Also let the system run trials only on cores that nobody else wants, where it can (Linux); what a
            trial does between its layers then can't disturb the host either.
    """
    if not isinstance(task, Task):
        raise InvalidInput(
            f"squeeze takes a pk.Task, got {task!r}. In a training function, use pk.bubbles.Gate."
        )
    other = copy.copy(task)
    base = str(Path(folder).resolve())
    other.model = _Attached(task.model, base, "model", background)
    make = task.optimizer
    if isinstance(make, Mapping):
        other.optimizer = {name: _Attached(one, base, "optimizer", background) for name, one in make.items()}
    else:
        other.optimizer = _Attached(make, base, "optimizer", background)
    return other
