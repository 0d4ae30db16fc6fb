"""From a study's planner to what its engine must foresee: overheads, widths and concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.core import PlanPass, VirtualClock
from penstock.execute import Executor
from penstock.plan import Fluid, fifo
from penstock.predict import Overhead
from penstock.sample import Sampler
from penstock.study._ledger import Foresight
from penstock.train._elastic import most_devices


def passes_of(
    planner: Fluid | Sequence[PlanPass] | None, foresight: Foresight | None, width: float
) -> tuple[PlanPass, ...]:
    """The plan passes of a study."""
    if isinstance(planner, Fluid):
        return planner.passes(Overhead() if foresight is None else foresight.overhead)
    return tuple(planner) if planner else (fifo(width),)


def known_overhead(planner: Fluid, executor: Executor) -> Overhead | None:
    """The overheads, where the user or the executor gives them; None: they are to be measured."""
    if planner.overhead is not None:
        return planner.overhead
    own: Overhead | None = getattr(executor, "overhead", None)
    if own is None and isinstance(executor.clock, VirtualClock):
        return Overhead()  # nothing to measure, and nothing to gain: a fraction takes longer in proportion
    return own


def foresee(
    planner: Any,
    work: Any,
    sampler: Sampler,
    executor: Executor,
    overhead: Overhead | None,
    *,
    synchronous: bool = False,
) -> Foresight | None:
    """What the engine must foresee for ``planner``; None for one that looks only at what is free."""
    if not isinstance(planner, Fluid):
        return None
    overhead = (overhead or Overhead()).within_bounds()
    widest = spread_of(planner, work, executor)
    overhead = replace(overhead, max_devices=min(overhead.max_devices, widest))
    places = overhead.max_sharing
    if synchronous and not sampler.learns and places > 1:
        # Nothing that is trained depends on when it starts. A place left empty while a rung waits for its last trials
        # wastes what sharing saves, so the next bracket begins a little earlier. Much earlier
        # it would take devices from those that are nearer to their ends.
        places += places // 2
    return Foresight(
        overhead,
        max_devices=overhead.max_devices,
        concurrency=planner.concurrency,
        # Rungs that are compared as a whole come out the same however many trials run at once. Otherwise a sampler that
        # learns would also lead to other promotions, which may take longer than sharing saves.
        per_device=1 if sampler.learns and not synchronous else places,
        ranked=planner.idle == "best",
    )


def spread_of(planner: Fluid, work: Any, executor: Executor) -> int:
    """Over how many devices a trial may spread here."""
    if not executor.spreads:
        return 1
    # On simulated devices nothing is really spread: the overheads they were given say how far.
    widest = executor.slots if isinstance(executor.clock, VirtualClock) else most_devices(work)
    return max(1, min(widest, executor.slots, planner.max_devices or executor.slots))
