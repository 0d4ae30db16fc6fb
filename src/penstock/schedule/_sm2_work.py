"""Tells whether a training function can be explored by SM2, before anything of it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_SIGNS = frozenset({"options", "sm2_lr"})
_MOST = 200  # functions to look into


def explores(work: Any) -> bool:
    """Whether a training function takes part in explorations: it names ``run.options`` or reports ``sm2_lr``.

    Looks at its code and at that of the functions, methods and modules' members it names, without calling any. What
    shows no Python code (a built-in), and what has too much of it to look at, is given the benefit of the doubt.
    """
    waiting = list(_functions(work))
    if not waiting:
        return True
    seen: set[CodeType] = set()
    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names: set[str] = set()
        for code in _nested(function.__code__):
            names |= {*code.co_names, *_strings(code.co_consts)}
        if names & _SIGNS:
            return True
        cells = (cell for cell in function.__closure__ or () if _is_filled(cell))
        known = [function.__globals__[name] for name in names & function.__globals__.keys()]
        known += [cell.cell_contents for cell in cells]
        waiting += [found for value in known for found in _named(value, names)]
    return bool(waiting)


def _named(value: Any, names: set[str]) -> Iterator[FunctionType]:
    """The functions a piece of code may call that has this value at hand and uses these names."""
    if isinstance(value, ModuleType):
        for member in names & vars(value).keys():
            yield from _functions(vars(value)[member])
        return
    if not isinstance(value, type):
        yield from _functions(value)
    kind = value if isinstance(value, type) else type(value)
    for each in kind.__mro__:
        yield from (f for name, f in vars(each).items() if name in names and isinstance(f, FunctionType))


def _functions(work: Any) -> Iterator[FunctionType]:
    """The Python functions behind a callable: itself, what a partial holds, the methods of an object."""
    while isinstance(work, functools.partial):
        work = work.func
    work = getattr(work, "__wrapped__", work)
    work = getattr(work, "__func__", work)
    if isinstance(work, FunctionType):
        yield work
    elif callable(work) and isinstance(type(work).__call__, FunctionType):
        for kind in type(work).__mro__:
            yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
