"""Random numbers of fused members: each has its own generator, and draws what it would draw alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor


class Wanted(NamedTuple):
    """One set of dropout masks: a member's shape and strides, the members' rates, type and device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rates: tuple[float, ...]
    dtype: torch.dtype
    device: torch.device


@final
class Late:
    """States that generators are given only once a number is drawn: most calls draw none, and a state is 5 KB.

    Whether a call draws is not known before: it hangs on every member's rates, not on the first one's.

    Attributes:
        loaded: Whether something was drawn.
    """

    def __init__(self, states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
        self.loaded = False
        self._states = states

    def load(self) -> None:
        """Something is about to be drawn."""
        if not self.loaded:
            self.loaded = True
            for generator, state in self._states:
                generator.set_state(state)


@final
class Draws:
    """The members' generators.

    A dropout mask is drawn member by member with the very call that torch makes for one model, so a member's masks
    are those it has alone. For a recorded step the masks are drawn before it: ``wanted`` says which.

    Attributes:
        generators: One per member.
        channels_last: Whether images lie so in memory where a member is alone.
        opaque: Something was drawn that a recording can't repeat.
    """

    def __init__(self, generators: Sequence[torch.Generator], *, channels_last: bool = False) -> None:
        self.generators = list(generators)
        self.channels_last = channels_last
        self.opaque = False
        self.wanted: list[Wanted] = []
        self._given: Iterator[Tensor] | None = None
        self._recording = False
        self._late: Late | None = None

    @property
    def count(self) -> int:
        """Members."""
        return len(self.generators)

    def part(self, members: Sequence[int]) -> Draws:
        """Those of some members, for one call."""
        made = Draws([self.generators[i] for i in members], channels_last=self.channels_last)
        made._late = self._late
        return made

    def noise(self, like: Tensor, p: Sequence[float], *, shape: Sequence[int] | None = None) -> Tensor:
        """What a dropout of rate ``p[i]`` multiplies member ``i``'s activations with.

        Args:
            like: The stacked activations, members first.
            p: The members' rates.
            shape: A member's shape of the noise, where it is not that of its activations.
        """
        if self._given is not None:
            return next(self._given)
        sizes = tuple(like.shape[1:] if shape is None else shape)
        strides = _strides(sizes) if shape is not None else self.strides(like)
        wanted = Wanted(sizes, strides, tuple(p), like.dtype, like.device)
        if self._recording:
            self.wanted.append(wanted)
        return self.draw(wanted)

    def strides(self, like: Tensor) -> tuple[int, ...]:
        """The strides a member's part of ``like`` has when it is alone: numbers are drawn in the order of memory.

        Members side by side in the channels of a convolution lie channels last; alone they lie as torch made them.
        """
        shape = tuple(like.shape[1:])
        plain = _strides(shape)
        if len(shape) in (4, 5) and like.stride(2) == 1 and not self.channels_last:
            return plain
        own = like.select(0, 0)
        return plain if own.is_contiguous() else torch.empty_like(own).stride()

    def contiguous(self, like: Tensor) -> bool:
        """Whether a member's part of ``like`` lies row by row when it is alone."""
        return self.strides(like) == _strides(like.shape[1:])

    def draw(self, wanted: Wanted) -> Tensor:
        """Masks over the probability to be kept."""
        if self._late is not None:
            self._late.load()
        shape, strides = wanted.shape, wanted.strides
        size = math.prod(shape)
        rows = torch.empty((self.count, size), dtype=wanted.dtype, device=wanted.device)
        noise = rows.as_strided((self.count, *shape), (size, *strides))
        with torch.no_grad():
            for row, rate, generator in zip(noise.unbind(0), wanted.rates, self.generators, strict=True):
                if rate <= 0.0:
                    row.fill_(1.0)  # torch draws nothing for a rate of 0 or 1
                elif rate >= 1.0:
                    row.zero_()
                else:
                    row.bernoulli_(1.0 - rate, generator=generator)
            rates = set(wanted.rates)
            if len(rates) == 1 and 0.0 < wanted.rates[0] < 1.0:
                rows.div_(1.0 - wanted.rates[0])
            elif len(rates) > 1:
                kept = [1.0 if rate >= 1.0 else 1.0 - rate for rate in wanted.rates]
                rows.div_(torch.tensor(kept, dtype=wanted.dtype, device=wanted.device).unsqueeze(1))
        return noise

    @contextmanager
    def lend(self, member: int) -> Iterator[None]:
        """Let torch's global generator be the member's."""
        if self._late is not None:
            self._late.load()
        own = self.generators[member]
        shared = torch.default_generator
        if own.device.type == "cuda":
            shared = torch.cuda.default_generators[own.device.index or 0]
        before = shared.get_state()
        shared.set_state(own.get_state())
        self.opaque = True
        try:
            yield
        finally:
            own.set_state(shared.get_state())
            shared.set_state(before)

    @contextmanager
    def late(self, states: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[Late]:
        """Give generators these states before the first number that is drawn inside."""
        self._late = Late(states)
        try:
            yield self._late
        finally:
            self._late = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Note in ``wanted`` what is drawn inside."""
        self.wanted = []
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def serve(self, masks: Sequence[Tensor]) -> Iterator[None]:
        """Hand out ``masks`` instead of drawing."""
        self._given = iter(masks)
        try:
            yield
        finally:
            self._given = None


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides)) if shape else ()
