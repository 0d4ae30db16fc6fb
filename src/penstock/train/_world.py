"""World: which one a worker is of those that train a trial together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class World:
    """The workers that train one trial together.

    Attributes:
        rank: This worker's number, 0 being the one that reports and saves.
        size: How many there are. Above 1, ``torch.distributed``'s default process group joins them.
    """

    rank: int = 0
    size: int = 1


ALONE = World()
