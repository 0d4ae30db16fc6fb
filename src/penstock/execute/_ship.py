"""Packs the work of a study for other processes, and says what in it can't be packed."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from penstock.core.errors import InvalidInput


def pack(work: Any) -> bytes:
    """Pickle ``work``: functions of scripts and notebooks by value, of importable modules by reference.

    Raises:
        InvalidInput: It can't be pickled; says what in it can't.
    """
    import cloudpickle

    modules = [module for module in _modules(work) if not _importable(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(work)
    except Exception as error:
        name = getattr(work, "__qualname__", None) or type(work).__name__
        raise InvalidInput(
            f"{name} can't be sent to worker processes: {blame(work, error)}. "
            "Make it inside the training function, or keep it in a module that workers can import."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def dumps(value: Any) -> bytes:
    """``cloudpickle.dumps``, with all imported modules by name, those of a class of their own as well.

    cloudpickle takes a function that says ``torch.distributed`` and, anywhere, ``config`` to use the module
    ``torch.distributed.config``, which is of such a class, and fails.

    A tensor that is a view (``x[:2000]``) goes alone: torch would pickle all of the tensor it is a view of with it.
    """
    import cloudpickle

    torch: Any = sys.modules.get("torch")

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                name = obj.__name__
                if sys.modules.get(name) is obj:
                    return importlib.import_module, (name,)
            if torch is not None and type(obj) is torch.Tensor and _is_part(obj, torch):
                return obj.detach().clone().__reduce_ex__(5)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def _is_part(tensor: Any, torch: Any) -> bool:
    """Whether a tensor without a history is less than what it is stored in."""
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_nested
    plain = tensor.layout is torch.strided and not special
    return plain and tensor.nbytes < tensor.untyped_storage().nbytes()


def _modules(work: Any) -> list[Any]:
    """The modules ``work`` and what it holds directly come from, apart from ``__main__``."""
    held = [work, type(work), *getattr(work, "__dict__", {}).values()]
    names = {getattr(part, "__module__", None) for part in held}
    return [
        sys.modules[name] for name in sorted(n for n in names if isinstance(n, str)) if name in sys.modules
    ]


def _importable(module: Any) -> bool:
    """Whether a worker that imports the module by name gets this one (a file loaded by path is not found)."""
    name, path = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or path is None:
        return True  # cloudpickle sends __main__ by value on its own
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    if spec is getattr(module, "__spec__", None):
        # find_spec answers from sys.modules: look on the path itself
        finders = (f for f in sys.meta_path if hasattr(f, "find_spec"))
        parent, _, _ = name.rpartition(".")
        where = getattr(sys.modules.get(parent), "__path__", None) if parent else None
        try:
            spec = next((found for f in finders if (found := f.find_spec(name, where)) is not None), None)
        except (ImportError, ValueError, AttributeError):
            return False
    origin = None if spec is None else spec.origin
    return origin is not None and os.path.realpath(origin) == os.path.realpath(path)


def _pickles(value: Any) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What ``value`` is made of, by the name a user knows it by."""
    parts: list[tuple[str, Any]] = []
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = getattr(function, "__closure__", None) or ()
        for name, cell in zip(code.co_freevars, cells, strict=False):
            try:
                parts.append((f"its closure variable {name!r}", cell.cell_contents))
            except ValueError:
                continue
        module_globals = function.__globals__
        parts += [
            (f"the global {n!r} it uses", module_globals[n]) for n in code.co_names if n in module_globals
        ]
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        parts += [(f"the default of its argument {n!r}", d) for n, d in zip(names, defaults, strict=True)]
    owner = getattr(value, "__self__", None)
    if owner is not None and function is not value:
        parts.append(("the object it is a method of", owner))
    if isinstance(value, dict):
        parts += [(f"its item {key!r}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set):
        parts += [(f"its element {index}", item) for index, item in enumerate(value)]
    elif code is None:
        inside = getattr(value, "__dict__", None)
        slots = getattr(type(value), "__slots__", ())
        if isinstance(inside, dict):
            parts += [(f"its attribute {name!r}", item) for name, item in inside.items()]
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                parts.append((f"its attribute {name!r}", getattr(value, name)))
        if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            parts += [("its function", value.func)]
            parts += [(f"its argument {k!r}", v) for k, v in value.keywords.items()]
            parts += [(f"its argument {i}", v) for i, v in enumerate(value.args)]
    return parts


def blame(value: Any, error: Exception) -> str:
    """Which part of ``value`` can't be pickled, by the name a user knows it by, and why."""
    where, what, why = _culprit(value, error)
    return f"{where} ({_kind(what)}) can't be pickled: {why}"


def _culprit(value: Any, error: Exception, depth: int = 4) -> tuple[str, Any, str]:
    """The innermost part that can't be pickled: its name, itself and why."""
    if depth:
        for name, part in _parts(value):
            failure = _pickles(part)
            if failure is not None:
                inner, what, why = _culprit(part, failure, depth - 1)
                return (name if inner == "it" else f"{name}, {inner}"), what, why
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "it", value, why


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def check_config(specs: Iterable[Sequence[Any]], error: Exception) -> InvalidInput:
    """The error for trials of which workers can't be told: the value of a configuration, if it is one."""
    trials = []
    for trial, config, *_ in specs:
        trials.append(str(trial))
        for name, value in config.items():
            try:
                pickle.dumps(value, protocol=5)
            except Exception as why:
                return InvalidInput(
                    f"The configuration of trial {trial} can't be sent to a worker: {name} = {value!r} can't be "
                    f"pickled ({why}). Use plain values in the space and build the object in the training function."
                )
    return InvalidInput(
        f"Trial {', '.join(trials)} can't be sent to a worker: it can't be pickled ({error})."
    )
