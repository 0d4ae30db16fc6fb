"""World: which one a worker is of those that train a trial together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from penstock.core.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor


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

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Add each of these tensors up over all workers, in place; alone it stays as it is.

        All workers call it with tensors of the same shapes in the same order, such as the gradients of a step. They are
        exchanged as one tensor: workers wait for each other once, not once for each of them.

        Raises:
            InvalidInput: One is no tensor, such as the gradient of a parameter that has none.
        """
        given = list(tensors)
        for place, tensor in enumerate(given):
            if not hasattr(tensor, "dtype"):  # told alone, too, not only once the trial spreads
                raise InvalidInput(
                    f"run.world.all_reduce takes tensors, got {tensor!r} in place {place}. Of parameters without a "
                    "gradient give none: [p.grad for p in model.parameters() if p.grad is not None]."
                )
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        alike = defaultdict(list)
        for tensor in given:
            alike[tensor.dtype, tensor.device].append(tensor)
        with torch.no_grad():
            for same in alike.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in same])
                dist.all_reduce(flat)
                totals: tuple[Tensor, ...] = torch.split(flat, [tensor.numel() for tensor in same])
                for tensor, total in zip(same, totals, strict=True):
                    tensor.copy_(total.view_as(tensor))


ALONE = World()
