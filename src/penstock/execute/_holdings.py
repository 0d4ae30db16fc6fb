"""Which part of each device is held: the arithmetic of shares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from penstock.core import Share

EPSILON = 1e-9
"""What sums of fractions may be off by."""


@final
class Holdings:
    """Parts of devices that are held, by the devices' names. One that was never held is free."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}
        self._exclusive: set[str] = set()

    def free(self, device: str) -> float:
        """The part of a device that others can have; 1 if nobody has any."""
        if device in self._exclusive:
            return 0.0
        left = 1.0 - self._held.get(device, 0.0)
        return left if left > EPSILON else 0.0

    def fits(self, shares: Iterable[Share], *, exclusive: bool = False) -> bool:
        """Whether all these shares are free; ``exclusive``: and nobody has another part of their devices."""
        for share in shares:
            held = self._held.get(share.device, 0.0)
            if share.device in self._exclusive or held + share.fraction > 1.0 + EPSILON:
                return False
            if exclusive and held:
                return False
        return True

    def hold(self, shares: Iterable[Share], *, exclusive: bool = False) -> None:
        """Take shares; ``exclusive``: nobody gets what is left of their devices."""
        for share in shares:
            self._held[share.device] = self._held.get(share.device, 0.0) + share.fraction
            if exclusive:
                self._exclusive.add(share.device)

    def release(self, shares: Iterable[Share], *, exclusive: bool = False) -> None:
        """Give back what was taken so."""
        for share in shares:
            left = self._held.get(share.device, 0.0) - share.fraction
            self._held[share.device] = left if left > EPSILON else 0.0
            if exclusive:
                self._exclusive.discard(share.device)
