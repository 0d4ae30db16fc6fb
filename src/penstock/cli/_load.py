"""Loading what a user names on the command line: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.core.errors import InvalidInput


def load(target: str, default: str) -> Any:
    """The object that ``target`` names; without ``:name`` the one called ``default``.

    Raises:
        InvalidInput: There is no such file, module or name, or it fails to import; shows the user's traceback.
    """
    place, _, name = target.partition(":")
    name = name or default
    if not place:
        raise InvalidInput(
            f"{target!r} names no file or module: write tune.py:{name} or package.module:{name}."
        )
    is_file = place.endswith(".py") or "/" in place or _is_file(place)
    module = _load_file(Path(place)) if is_file else _load_module(place)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [n for n in vars(module) if not n.startswith("_")]
            raise InvalidInput(f"{place} has no {name!r}; it has {', '.join(known) or 'nothing'}.")
        value = getattr(value, part)
    return value


def look_beside(store: str) -> None:
    """Let modules be found in the present folder and in the store's: a study's function may come from one there.

    ``python tune.py`` finds them beside the script, and the ``penstock`` command looks in its own folder alone. At the
    end, so that nothing here stands in for what is installed.
    """
    from penstock.store._open import sqlite_path

    path = sqlite_path(store)
    for folder in (Path.cwd(), *(() if path is None else (path.resolve().parent,))):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def call(function: Any, target: str, wanted: str = "Study") -> Any:
    """What a user's function without arguments returns; ``wanted`` says what that should be.

    Raises:
        InvalidInput: It needs arguments, or it fails; shows the user's traceback.
    """
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InvalidInput(
            f"{target} is a function that can't be called without arguments ({error}). Name a {wanted}, or a "
            "function without arguments that returns one."
        ) from None
    except ValueError:
        pass  # a built-in that does not tell
    found: list[Any] = []
    _execute(lambda: found.append(function()), target, "Calling")
    return found[0]


def _is_file(place: str) -> bool:
    """Whether there is such a file, which is then meant rather than a module: c.toml is no module toml of c."""
    try:
        return "." in place and Path(place).is_file()
    except ValueError:  # no name that a file can have
        return False


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(
            f"There is no file {str(path)!r} here. Give a path to a Python file, e.g. tune.py:study."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{str(path)!r} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    _ship_by_value(module)  # before it is executed: it may run a study itself
    _execute(lambda: spec.loader.exec_module(module), str(path))
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    found: list[ModuleType] = []
    _execute(lambda: found.append(importlib.import_module(name)), name)
    return found[0]


def _execute(action: Any, what: str, doing: str = "Loading") -> None:
    from penstock.core.errors import PenstockError

    try:
        action()
    except PenstockError:
        raise
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{doing} {what} failed: {error}. Is it installed, or is this the wrong folder?"
        ) from error
    except Exception as error:
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            path = Path(what).resolve()
            raise InvalidInput(
                f"{doing} {what} failed: {error}. A file is loaded by itself. Name it as a module instead, in the "
                f"folder that its package lies in: {path.parent.name}.{path.stem}:..."
            ) from error
        lines = traceback.format_exception(type(error), error, _users(error))
        raise InvalidInput(f"{doing} {what} failed:\n{''.join(lines).rstrip()}") from error


def _users(error: BaseException) -> Any:
    """The user's part of a traceback: without our frames and the import system's; None: it has none."""
    here = error.__traceback__
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        if name != __file__ and "importlib" not in name:
            return here
        here = here.tb_next
    return None  # a mistake of syntax tells its own place


def _ship_by_value(module: ModuleType) -> None:
    """Workers can't import a file by the name we gave it, nor should they execute it: ship its functions by value."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
