"""The contract of executors: where placements run."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core import Clock, Event, Free, Placement, Share
from penstock.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Job:
    """What an executor needs to know to run a study's trials.

    Attributes:
        work: The training function, Task or Command.
        files: Folder for checkpoints and logs; exists. Workers on other machines reach it too, or the executor
            brings the files over.
        metrics: Metrics that every report must contain (the objectives).
        timeout_s: Kill a trial that reports nothing for so long; None: never.
        meter: Whether energy is metered.
        options: Further facts for workers, by room. ``study``: a text that marks the study's checkpoints, so that
            files of another study in the same folder are never taken for them; ``make_meter``: makes a trial's meter
            in the worker from its devices; ``sharing``: that trials will share devices.
    """

    work: Any
    files: Path
    metrics: tuple[str, ...]
    timeout_s: float | None = None
    meter: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """A placement with what the study knows of its segments' trials.

    Attributes:
        placement: What runs where.
        checkpoints: Per segment, the path of the checkpoint to start from (relative to the files), or None.
        known: Per segment, the last epoch whose report is in the journal: a worker that finds a newer
            checkpoint on disk than the journal knows of goes on from it and re-sends the reports between.
        facts: What the worker must know of the placement as a whole, by room: how its segments are fused.
        leaves: Per segment, the epoch with which it ends as if it were stopped then, to be kept: a budget allows no
            more. Empty: nothing of the kind.
    """

    placement: Placement
    checkpoints: tuple[str | None, ...]
    known: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    leaves: tuple[int, ...] = ()


class Executor(ABC):
    """Runs placements and tells what happened.

    Called by the study alone, from one thread. The executor owns its processes, threads and clock; ``close``
    ends them. Nothing runs before ``open`` and the constructor only checks its arguments. Every launched segment
    gives a ``Started``, then ``Reported`` and ``Saved`` events in epoch order, then exactly one ``Ended``,
    also when its worker dies (``lost=True``) or is stopped. If one of several workers that train a trial together fails
    or dies, the trial ends with its error, and so do the others. A failed training never takes the executor down. A
    training function that returns before its segment's budget is used up has ended its trial: COMPLETED.

    Attributes:
        spreads: Whether a trial that can (``Placement.max_devices`` above 1) is trained on several devices at once,
            and ``resize`` works.
    """

    spreads: bool = False

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """The clock its events are stamped with."""

    def prepare(self, work: Any) -> None:  # noqa: B027
        """Begin with what takes time and needs nothing but the work: ``open`` follows soon. Returns at once."""

    @abstractmethod
    def open(self, job: Job) -> None:
        """Make ready to run ``job``'s trials; check that it can be shipped to workers.

        Raises:
            InvalidInput: The work can't be pickled; says what in it can't.
        """

    def meanwhile(self) -> contextlib.AbstractContextManager[None]:
        """Around work of the driver's that the first trials wait for: workers that take time to start may start then.

        Entered between ``open`` and the first launch; nothing else is asked of the executor before it is left.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def free(self) -> Sequence[Free]:
        """What is free now: devices with a fraction or a backlog left. Cheap: proportional to what is free."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many devices there are in all."""

    @abstractmethod
    def launch(self, launches: Sequence[Launch]) -> None:
        """Start placements whose shares are free. Returns at once."""

    @abstractmethod
    def stop(self, trials: Sequence[int], *, reason: str, keep: bool = False) -> None:
        """End these trials' segments at their next report: STOPPED, or with ``keep`` PAUSED and ``kept``.

        A queued segment that has not started ends at once, without a ``Started``. A trial that is not running is
        ignored.
        """

    def resize(self, trial: int, shares: Sequence[Share]) -> None:
        """Let a running placement (named by its first trial) go on with these shares from its next report on.

        New devices are held from now on; those given up are free when the change takes place, which a ``Resized``
        event of each of its trials tells. A segment that ends before that ends as it does, without one. Ignored
        for a trial that is not running or is changing already.

        Raises:
            Unsupported: This executor can't.
        """
        raise Unsupported(f"{type(self).__name__} can't change the devices of a running trial.")

    @abstractmethod
    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events, at most ``timeout_s`` (None: until there are some; 0: don't wait).

        Returns all that are there, in order per trial. Empty when the time is up or nothing is running.

        Raises:
            ExecutorError: No worker can be started (the work can't be imported there, say).
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers. Idempotent."""
