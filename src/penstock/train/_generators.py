"""The process's random generators, swapped between training loops that take turns in it."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, final

_WORDS = 624
_BYTES = 4 * (_WORDS + 1)


@final
class Generators:
    """Keeps and puts back the states of ``random``, ``numpy.random`` and torch's generators.

    Loops that meet at every step are switched thousands of times a second, and the ways Python and numpy offer to
    read a Mersenne twister's state take longer than such a step. So its 2,500 bytes are copied as they lie in memory:
    numpy gives their address, Python does not, and the place is believed only after what is there was compared with
    ``random.getstate()``. Where it does not agree the ordinary way is taken.

    Args:
        cuda: The CUDA device whose generator is swapped too; None: none.
    """

    def __init__(self, cuda: Any = None) -> None:
        import torch

        self._torch = torch.default_generator
        self._cuda = cuda
        self._inst: Any = random._inst
        self._python = _memory(_python_address(self._inst))
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random
        self._words = None if self._numpy is None else _memory(_numpy_address(self._numpy))
        self._gauss: tuple[int, float] = (-1, 0.0)  # numpy's spare normal number, which lies elsewhere

    def keep(self, before: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """The states now; ``before``: what was put in place last."""
        cuda = None
        if self._cuda is not None:
            import torch

            cuda = torch.cuda.get_rng_state(self._cuda)
        return self._torch.get_state(), self._keep_python(), self._keep_numpy(before), cuda

    def forget(self) -> None:
        """Somebody has drawn, and nobody keeps it."""
        self._gauss = (-1, 0.0)

    def put(self, states: tuple[Any, ...]) -> None:
        """Put states back."""
        own, python, numpy, cuda = states
        self._torch.set_state(own)
        if self._python is not None:
            self._python[:] = python[0]
            self._inst.gauss_next = python[1]
        else:
            random.setstate(python)
        if numpy is not None:
            self._put_numpy(numpy)
        if cuda is not None:
            import torch

            torch.cuda.set_rng_state(cuda, self._cuda)

    def _keep_python(self) -> Any:
        if self._python is None:
            return random.getstate()
        return bytes(self._python), self._inst.gauss_next

    def _keep_numpy(self, before: tuple[Any, ...] | None) -> Any:
        if self._numpy is None:
            return None
        if self._words is None:
            return self._numpy.get_state(legacy=False)
        words = bytes(self._words)
        if before is not None and before[2] is not None and before[2][1][0] == 0 and before[2][0] == words:
            return before[2]  # a normal number is drawn from the words, where none was spare
        state = self._numpy.get_state()
        self._gauss = (int(state[3]), float(state[4]))
        return words, self._gauss

    def _put_numpy(self, numpy: Any) -> None:
        if self._words is None:
            self._numpy.set_state(numpy)
            return
        words, gauss = numpy
        if gauss[0] or self._gauss[0]:
            unpacked = struct.unpack(f"{_WORDS}Ii", words)
            self._numpy.set_state(("MT19937", list(unpacked[:_WORDS]), unpacked[_WORDS], *gauss))
            self._gauss = gauss
        else:
            self._words[:] = words


def _memory(address: int) -> memoryview | None:
    return memoryview((ctypes.c_ubyte * _BYTES).from_address(address)).cast("B") if address else None


def _python_address(inst: Any) -> int:
    """Where the words of Python's generator lie, or 0."""
    if sys.implementation.name != "cpython" or type(inst) is not random.Random:
        return 0
    if type(inst).__basicsize__ < object.__basicsize__ + _BYTES:
        return 0
    address = id(inst) + object.__basicsize__
    index, *words = struct.unpack(f"i{_WORDS}I", ctypes.string_at(address, _BYTES))
    state = inst.getstate()[1]
    return address if tuple(words) == state[:_WORDS] and index == state[_WORDS] else 0


def _numpy_address(numpy: Any) -> int:
    """Where the words of numpy's generator lie, or 0."""
    try:
        address = int(numpy.get_state(legacy=False)["bit_generator"] == "MT19937")
        address = numpy.mtrand._rand._bit_generator.ctypes.state_address if address else 0
    except (AttributeError, TypeError, KeyError):
        return 0
    if not address:
        return 0
    *words, at = struct.unpack(f"{_WORDS}Ii", ctypes.string_at(address, _BYTES))
    state = numpy.get_state()
    return address if words == state[1].tolist() and at == state[2] else 0


__all__ = ["Generators"]
