"""The contract of samplers: which configuration next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.core import Config, Values
from penstock.core.errors import InvalidInput
from penstock.space import Space

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """What a sampler is told of a trial.

    Told whenever a trial's segment ends: once per rung under a multi-fidelity scheduler, the later and larger
    ``epoch`` superseding the earlier one of the same ``trial``.

    Attributes:
        trial: The trial's number.
        config: Its configuration.
        values: Its objectives, lower is better; None for a failure.
        epoch: Epochs behind it when ``values`` was reported.
        final: The trial gets no further segment.
        metrics: What else was measured of it, by name, such as ``power_w``: teaches predictors of limits.
    """

    trial: int
    config: Config
    values: Values | None
    epoch: int = 0
    final: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)


class Sampler(ABC):
    """Proposes configurations.

    Called by the study alone, from one thread. Pure: no I/O, no clock; all randomness comes from the seed
    given to ``start`` **and the number of configurations asked so far**, never from a running stream, so that
    ``skip(n)`` puts a fresh sampler where one that answered ``n`` proposals would be. That makes a resume
    cheap: the study replays tells and skips asks. A sampler object belongs to one study at a time; ``start``
    resets it.
    """

    learns: bool = True
    """Whether proposals depend on what was told. If not, a scheduler may ask for all at once."""

    @property
    def ends(self) -> bool:
        """Whether it runs out of proposals by itself, so that a study of all of them has an end."""
        return False

    @abstractmethod
    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin a study of ``space`` with ``objectives`` values per observation (all minimised)."""

    @abstractmethod
    def ask(self, n: int) -> list[Config]:
        """Up to ``n`` valid configurations; fewer (or none) only when the sampler is exhausted."""

    @abstractmethod
    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Take ``configs`` as if ``ask`` had answered them, under the numbers ``trials`` (a resume)."""

    @abstractmethod
    def adopt(self, config: Config, trial: int) -> None:
        """Learn the number of a configuration from ``ask``, or of one that came from elsewhere (warm start).

        It counts as pending until ``tell`` says it is final.
        """

    @abstractmethod
    def tell(self, observation: Observation) -> None:
        """Learn a result."""

    def withdraw(self, config: Config) -> None:
        """The last configuration from ``ask`` was measured to violate a limit and will be no trial.

        A sampler that knows the limits may propose anew as if it had not been asked; to any other it stays pending,
        which turns it away from there.
        """
        return


def started(sampler: Sampler, state: T | None) -> T:
    """What ``start`` set, or an error that says it was not called."""
    if state is None:
        raise InvalidInput(
            f"{type(sampler).__name__} was asked before it was started. Call start(space, ...) first."
        )
    return state
