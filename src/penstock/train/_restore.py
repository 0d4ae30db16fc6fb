"""A trained network, or whatever else was saved, out of a checkpoint: what a study ends with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidInput
from penstock.core.trial import Config

if TYPE_CHECKING:
    from penstock.train._task import Task


def read_state(path: Path) -> Any:
    """What a training has saved in a checkpoint, on the CPU.

    Raises:
        InvalidInput: There is no such checkpoint.
    """
    from penstock.train._checkpoint import _loader, _read

    facts = _read(path) if path.exists() else None
    if facts is None:
        raise InvalidInput(f"There is no complete checkpoint at {str(path)!r}.")
    return _loader(path, facts)("cpu")


def restore(task: Task, config: Config, path: Path) -> Any:
    """The network of a task at a configuration, with the weights of a checkpoint, in evaluation mode on the CPU.

    Raises:
        InvalidInput: There is no such checkpoint, or it is not one of this task.
    """
    from penstock.train._loop import private_randomness

    state = read_state(path)
    if not isinstance(state, dict) or "model" not in state:
        raise InvalidInput(f"The checkpoint {str(path)!r} is not one of a pk.Task.")
    with private_randomness():
        model, _ = task.build_model(task.hyperparameters(config))
    model.load_state_dict(state["model"])
    return model.eval()


__all__ = ["read_state", "restore"]
