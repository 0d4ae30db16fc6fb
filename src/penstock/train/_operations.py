"""A place to stop before every operation that torch carries out, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@final
class _Stopping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``passage`` with what comes next: the operation, and the size of what it works on."""

    def __init__(self, passage: Callable[[object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._passage = passage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else each operation goes through torch._dynamo, whose import alone takes seconds. Nothing is compiled here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        self._passage((func, first.shape.numel() if isinstance(first, Tensor) else 0))
        return func(*args, **(kwargs or {}))


def stopping(passage: Callable[[object], None]) -> AbstractContextManager[Any]:
    """Within it, ``passage`` is called before each operation, forward, backward and update."""
    return _Stopping(passage)
