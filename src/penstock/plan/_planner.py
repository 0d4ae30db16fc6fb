"""Fluid as a study's planner: what the user says of it, before the overheads are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from penstock.core import PlanPass
from penstock.core.errors import InvalidInput
from penstock.plan._elastic import Idle
from penstock.plan._fluid import Widths, fluid
from penstock.predict import Overhead

Spread: TypeAlias = Literal["threads", "workers"]
"""What trains a trial on several groups of CPU cores: one worker's threads, or one worker each."""


@final
@dataclass(frozen=True, slots=True)
class Fluid:
    """Devices flow to the trials that need them: short ones share a device, long ones spread, widths follow.

    Give it to a study: ``pk.Study(..., planner=pk.Fluid())``. The results of the trials stay the same; when and
    where they run changes.

    Attributes:
        overhead: What sharing and spreading cost. None: it is measured in a short profile when the study starts,
            and kept in the store for later ones; simulated devices know theirs.
        max_sharing: The most trials on one device the profile may find worth while.
        max_devices: The most devices of one trial; None: all there are. Trials of a ``Task``, and of functions
            marked with ``pk.elastic``, can have more than one.
        concurrency: How many segments are under way at once, whatever the number of devices (Fluid 6.2.2). None:
            as many as fit at the most; with a sampler that learns and a scheduler that is not synchronous
            (``ASHA``, ``Full``), one per device.
        idle: Who gets devices that nothing waits for: ``"longest"``, the trial that would end last;
            ``"waterfill"``, as in Fluid's Algorithm 2; ``"best"`` or ``"even"``, as in Hydro.
        widths: ``"lookahead"``, or ``"waterfill"`` for StaticFluid as published.
        spread: How a trial of a ``Task`` uses several groups of CPU cores: ``"threads"``, in one worker with the
            threads of all; ``"workers"``, in one on each, joined as on GPUs.
    """

    overhead: Overhead | None = None
    max_sharing: int = 4
    max_devices: int | None = None
    concurrency: int | None = None
    idle: Idle = "longest"
    widths: Widths = "lookahead"
    spread: Spread = "threads"

    def __post_init__(self) -> None:
        if self.overhead is not None and not isinstance(self.overhead, Overhead):
            raise InvalidInput(f"overhead takes a pk.Overhead, got {self.overhead!r}.")
        for name in ("max_sharing", "max_devices", "concurrency"):
            value = getattr(self, name)
            if value is None and name != "max_sharing":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.spread not in get_args(Spread):
            raise InvalidInput(f'spread takes "threads" or "workers", got {self.spread!r}.')
        self.passes(Overhead())  # checks the rest

    def passes(self, overhead: Overhead) -> tuple[PlanPass, ...]:
        """The plan passes for overheads that are known."""
        return fluid(
            c=overhead.max_sharing,
            d=overhead.max_devices,
            alpha=overhead.alpha,
            beta=overhead.beta,
            epsilon_s=overhead.epsilon_s,
            idle=self.idle,
            widths=self.widths,
        )
