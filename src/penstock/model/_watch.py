"""What a forward leaves behind beside its result: attributes that it sets, numbers drawn from common generators."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn
from torch._C import _functorch as functorch

from penstock.core.errors import Unsupported

_TABLES = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_flat_weights",
        "_flat_weight_refs",
    }
)
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FOREIGN = (sys.stdlib_module_names - {"types", "collections"}) | {"torch", "penstock"}
_LONG = 1000  # of a vocabulary the length will do

DRAWS = "the forward draws from Python's or numpy's generator, which members would share"


@final
class Watch:
    """What layers hold beside their tables of tensors, as it is now, to be compared with what they hold later.

    That is their attributes and all that lies in them: what is in lists and dicts, attributes of plain objects, and
    tensors that are neither parameters nor buffers, which may be changed in place.

    Attributes:
        modules: The layers.
        held: The attributes of each.

    Args:
        modules: All layers of a model.
        others: Objects that a forward or a loss uses beside the model. Of layers among them tensors are watched, too.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        beside = list(others)
        self.modules: list[Any] = [*modules, *beside]
        self.held: list[dict[str, Any]] = [dict(vars(module)) for module in self.modules]
        self._inside: list[tuple[Any, Any, Any, str]] = []
        seen = {
            id(t)
            for module in self.modules
            if isinstance(module, nn.Module)
            for table in (module._parameters, module._buffers)
            for t in table.values()
        }
        for module, held in zip(self.modules, self.held, strict=True):
            for key, value in held.items():
                if key not in _TABLES and not key.endswith("_hooks"):
                    self._look(value, module, key, seen)
        for layer in beside:
            for table in (layer._parameters, layer._buffers) if isinstance(layer, nn.Module) else ():
                self._keep(table, layer, "a tensor")
                for key, tensor in table.items():
                    if tensor is not None:
                        self._inside.append((tensor, _version(tensor), layer, key))

    def _look(self, value: Any, module: Any, key: str, seen: set[int]) -> None:
        todo = [value]
        while todo:
            value = todo.pop()
            if isinstance(value, _ATOMS) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if not isinstance(value, nn.Parameter):
                    self._inside.append((value, _version(value), module, key))
            elif isinstance(value, tuple):
                todo += value
            elif isinstance(value, dict | list | set | deque):
                self._keep(value, module, key)
                if len(value) < _LONG:
                    todo += value.values() if isinstance(value, dict) else value
            elif _is_plain(value):
                self._keep(vars(value), module, key)
                todo += vars(value).values()

    def _keep(self, value: Any, module: Any, key: str) -> None:
        self._inside.append((value, copy.copy(value) if len(value) < _LONG else len(value), module, key))

    def odd(self) -> tuple[Any, str] | None:
        """A layer and the name of an attribute that is not what it was; None: all are."""
        for module, held in zip(self.modules, self.held, strict=True):
            if not _same(module.__dict__, held):
                return module, _odd(module.__dict__, held)
        for value, kept, module, key in self._inside:
            if isinstance(value, Tensor):
                same = _version(value) == kept
            else:
                same = len(value) == kept if isinstance(kept, int) else _same(value, kept)
            if not same:
                return module, key
        return None

    def restore(self) -> None:
        """Put attributes, and what lies in them, back."""
        for module, held in zip(self.modules, self.held, strict=True):
            module.__dict__.clear()
            module.__dict__.update(held)
        for value, kept, _, _ in self._inside:
            if isinstance(value, Tensor) or isinstance(kept, int):
                continue
            value.clear()
            value.extend(kept) if isinstance(value, list | deque) else value.update(kept)

    def settled(self) -> bool:
        """Whether a forward has left its layers' attributes alone.

        Raises:
            Unsupported: It keeps values of its members.
        """
        if self.odd() is None:
            return True
        for value, _, module, key in Watch(self.modules)._inside:
            if isinstance(value, Tensor) and functorch.is_batchedtensor(value):
                raise shared(module, key)
        return False


def behind(function: Any) -> list[Any]:
    """The objects that a function keeps something in: itself, what it is a method of, what it takes from around it.

    Of a model all its layers.
    """
    found: dict[int, Any] = {}
    todo = [function]
    while todo:
        value = todo.pop()
        if id(value) in found:
            continue
        if isinstance(value, nn.Module):
            found |= {id(layer): layer for layer in value.modules()}
        elif isinstance(value, types.MethodType):
            todo.append(value.__self__)
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType):
            todo += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif _is_plain(value):
            found[id(value)] = value
    return list(found.values())


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of somebody's own that holds others."""
    if isinstance(value, _CODE) or not hasattr(value, "__dict__"):
        return False
    return str(type(value).__module__).partition(".")[0] not in _FOREIGN


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except Exception:  # tensors that were exchanged, for one, and what else does not like to be compared
        return False


def _odd(now: dict[str, Any], before: dict[str, Any]) -> str:
    for key in now.keys() | before.keys():
        a, b = now.get(key), before.get(key)
        if a is not b and not _same(a, b):
            return key
    return "an attribute"


def shared(module: Any, key: str) -> Unsupported:
    """The error for an attribute that a forward sets."""
    return Unsupported(f"the forward sets {key} of a {type(module).__name__}, which members would share")


def generators() -> tuple[Any, ...]:
    """The states of Python's and numpy's common generators, to be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, words, position, *rest = numpy.random.get_state()
    return random.getstate(), words.tobytes(), position, *rest


__all__ = ["DRAWS", "Watch", "behind", "generators", "shared"]
