"""Seeds for the random generators of a process, also for those of libraries that a training imports later."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, final


def seed_all(seed: int) -> None:
    """Seed Python's generator, numpy's and torch's; the latter two when they are imported, if they aren't yet.

    So a trial draws the same numbers whether it is the first of its worker or not.
    """
    random.seed(seed)
    for name, sow in _SOWERS.items():
        module = sys.modules.get(name)
        if module is not None:
            sow(module, seed)
    _LATER.seed = seed
    if _LATER not in sys.meta_path:
        sys.meta_path.insert(0, _LATER)


def seed_no_more() -> None:
    """The training is over: what is imported from here on is nobody's trial."""
    _LATER.seed = None


def _sow_numpy(numpy: Any, seed: int) -> None:
    if hasattr(numpy, "random"):
        numpy.random.seed(seed % 2**32)


def seed_torch(torch: Any, seed: int) -> None:
    """``torch.manual_seed``, without what it does for accelerators where there are none.

    For each kind that is not initialised it notes down the whole stack, which takes a millisecond and more.
    """
    if _has_accelerator(torch):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _has_accelerator(torch: Any) -> bool:
    """Asked each time: a worker may be given its GPUs after it was started."""
    if hasattr(torch, "accelerator"):
        return bool(torch.accelerator.is_available())
    return True  # before 2.6 nobody knows for all kinds


def _sow_torch(torch: Any, seed: int) -> None:
    if hasattr(torch, "manual_seed"):
        seed_torch(torch, seed % 2**63)


_SOWERS: dict[str, Callable[[Any, int], None]] = {"numpy": _sow_numpy, "torch": _sow_torch}


@final
class _Later(MetaPathFinder):
    """Seeds a library right after its import."""

    seed: int | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        sow = _SOWERS.get(fullname)
        if sow is None or self.seed is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self.seed is not None:
                sow(module, self.seed)

        loader.exec_module = execute_and_seed
        return spec


_LATER = _Later()
