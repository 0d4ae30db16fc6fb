"""The contract of policies: from a job's history to its next decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from penstock.recurring._cost import best_limit
from penstock.recurring._history import View


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy chose; see ``Decision`` for the fields."""

    batch_size: int
    limit_w: float | None = None
    profile_w: tuple[float, ...] = ()
    cost_limit: float | None = None
    explore: bool = False


class Policy(ABC):
    """Chooses the batch size and power limit of a recurring job's next run.

    Pure: the choice depends on the view, the number and the spec's seed alone. No state is kept between calls,
    so any process that has the history decides the same.
    """

    name: ClassVar[str]

    @abstractmethod
    def choose(self, view: View, number: int, *, retry: bool = False) -> Choice:
        """The choice for decision ``number``; ``retry``: of a recurrence whose last run failed."""


def profiled_limit(view: View, batch_size: int) -> tuple[float | None, tuple[float, ...]]:
    """The best limit of a profiled batch size; for an unseen one, all limits to profile (Zeus section 4.2)."""
    profile = view.profiles.get(batch_size, {})
    limits = view.spec.limits_w
    if not limits:
        return None, ()
    missing = [limit for limit in limits if limit not in profile]
    if len(missing) == len(limits):
        return None, tuple(sorted(limits, reverse=True))
    best, _ = best_limit(profile, eta=view.spec.eta, max_power_w=view.spec.max_power_w)
    if not missing:
        return best, ()
    # A run that was too short to try all of them: go on with the rest, beside the best so far.
    return None, tuple(sorted([best, *missing], reverse=True))
