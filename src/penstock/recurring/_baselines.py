"""Policies to compare with: the default configuration, grid search with pruning, and the oracle."""

from __future__ import annotations

from typing import ClassVar, final

from penstock.recurring._history import View
from penstock.recurring._policy import Choice, Policy


@final
class Default(Policy):
    """The default batch size at the maximum power limit, for ever (Zeus section 6.1, baseline 1)."""

    name: ClassVar[str] = "default"

    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""
        limits = view.spec.limits_w
        return Choice(view.spec.default, limits[-1] if limits else None)


@final
class Grid(Policy):
    """Grid search with pruning (Zeus section 6.1, baseline 2).

    Tries one (batch size, power limit) per recurrence, starting at the default batch size and the highest
    limit; a batch size that fails to reach the target is dropped with all its limits. Then the cheapest
    configuration observed is kept. No early stopping, no profiling: each configuration costs a run.
    """

    name: ClassVar[str] = "grid"

    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""
        spec = view.spec
        limits: tuple[float | None, ...] = tuple(reversed(spec.limits_w)) or (None,)
        failed = {seen.batch_size for seen in view.seen if not seen.reached}
        order = [spec.default, *(b for b in spec.batch_sizes if b != spec.default)]
        # The grid's position follows from what was decided: in order, skipping dropped batch sizes.
        tried = self._tried(view)
        for size in order:
            if size in failed:
                continue
            for limit in limits:
                if (size, limit) not in tried:
                    return Choice(size, limit)
        best: tuple[float, int, float | None] | None = None
        for (size, limit), cost in tried.items():
            if size in failed or size not in spec.batch_sizes:  # it may be off the list since
                continue
            if cost is not None and (best is None or cost < best[0]):
                best = (cost, size, limit)
        if best is None:
            return Choice(spec.default, limits[0])
        return Choice(best[1], best[2])

    @staticmethod
    def _tried(view: View) -> dict[tuple[int, float | None], float | None]:
        tried: dict[tuple[int, float | None], float | None] = {}
        for decision in view.pending:
            tried.setdefault((decision.batch_size, decision.limit_w), None)
        for seen in view.seen:
            key = (seen.batch_size, seen.limit_w)
            old = tried.get(key)
            if seen.reached:
                tried[key] = seen.cost if old is None else min(old, seen.cost)
            else:
                tried.setdefault(key, None)
        return tried


@final
class Oracle(Policy):
    """Always the configuration with the least expected cost, which it is told: the bound of any policy."""

    name: ClassVar[str] = "oracle"

    def __init__(self, batch_size: int, limit_w: float | None) -> None:
        self._choice = Choice(batch_size, limit_w)

    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""
        return self._choice
