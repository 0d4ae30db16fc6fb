"""Random numbers of fused members: each has its own generator, and draws what it would draw alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor


@final
class Draws:
    """The members' generators.

    A dropout mask is drawn member by member with the very call that torch makes for one model, so a member's masks
    are those it has alone. For a recorded step the masks are drawn before it: ``wanted`` says which.

    Attributes:
        generators: One per member.
        opaque: Something was drawn that a recording can't repeat.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self.opaque = False
        self.wanted: list[tuple[tuple[int, ...], tuple[float, ...], torch.dtype]] = []
        self._given: Iterator[Tensor] | None = None
        self._recording = False

    @property
    def count(self) -> int:
        """Members."""
        return len(self.generators)

    def noise(self, shape: Sequence[int], p: Sequence[float], like: Tensor) -> Tensor:
        """What a dropout of rate ``p[i]`` multiplies member ``i``'s activations of ``shape`` with."""
        if self._given is not None:
            return next(self._given)
        if self._recording:
            self.wanted.append((tuple(shape), tuple(p), like.dtype))
        return self.draw(shape, p, like.dtype, like.device)

    def draw(
        self, shape: Sequence[int], p: Sequence[float], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Masks over the probability to be kept."""
        noise = torch.empty((self.count, *shape), dtype=dtype, device=device)
        with torch.no_grad():
            for row, rate, generator in zip(noise.unbind(0), p, self.generators, strict=True):
                if rate <= 0.0:
                    row.fill_(1.0)  # torch draws nothing for a rate of 0 or 1
                elif rate >= 1.0:
                    row.zero_()
                else:
                    row.bernoulli_(1.0 - rate, generator=generator).div_(1.0 - rate)
        return noise

    @contextmanager
    def lend(self, member: int) -> Iterator[None]:
        """Let torch's global generator be the member's."""
        own, shared = self.generators[member], torch.default_generator
        before = shared.get_state()
        shared.set_state(own.get_state())
        self.opaque = True
        try:
            yield
        finally:
            own.set_state(shared.get_state())
            shared.set_state(before)

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
