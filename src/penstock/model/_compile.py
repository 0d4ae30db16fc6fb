"""Compilation of a recorded step with torch's inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.core.errors import Unsupported


def compiled(graph: Any) -> Callable[..., Any]:
    """A recorded step as machine code. Compiles on the first call.

    Raises:
        Unsupported: There is no compiler on this machine.
    """
    import torch

    try:
        made: Callable[..., Any] = torch.compile(graph, dynamic=False, fullgraph=True)
    except Exception as error:
        raise Unsupported(f"torch.compile is not usable here: {error}") from error
    return made
