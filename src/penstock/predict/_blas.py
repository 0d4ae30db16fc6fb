"""One BLAS thread for small matrices: more of them wait for each other, the longer the busier the machine is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Within it, linear algebra of this process uses one thread; as it was afterwards.

    A study's driver shares its cores with the workers. There a Cholesky factor of a 100 x 100 matrix takes ten
    times as long with two threads as with one. Does nothing where threadpoolctl is not installed.
    """
    controller = _controller()
    return nullcontext() if controller is None else controller.limit(limits=1, user_api="blas")


@cache
def _controller() -> Any:
    for name in (
        "numpy.linalg",
        "scipy.linalg",
    ):  # both bring a BLAS of their own, which has to be there to be found
        import_module(name)
    try:
        controller = import_module("threadpoolctl").ThreadpoolController
    except ImportError:
        return None
    return controller()
