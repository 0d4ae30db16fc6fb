"""What the local executor's workers are told: a flight as one errand, or as one for each worker of a crew."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from penstock.core import Ended, Share
from penstock.execute._book import Flight
from penstock.execute._bubbles import in_bubble
from penstock.execute._crew import Crew
from penstock.execute._ship import check_config
from penstock.execute._site import Site
from penstock.execute._wire import specs_of, spreads, weighed
from penstock.train._process import MESSAGE_BYTES, SPILLED

if TYPE_CHECKING:
    from penstock.execute._workers import Worker


@final
@dataclass(slots=True, eq=False)
class Errand:
    """One worker's part of a flight: all of it, or that of one rank where several workers train a trial together."""

    number: int
    flight: Flight
    message: bytes
    shares: tuple[Share, ...]
    rank: int = 0
    crew: Crew[Ended] | None = None
    worker: Worker | None = None

    def close(self) -> None:
        """No worker will read its message any more."""
        if self.message[:1] == SPILLED:
            with contextlib.suppress(OSError):
                os.unlink(os.fsdecode(self.message[1:]))


@final
class Dispatch:
    """Makes errands of flights.

    Args:
        files: The study's folder, for messages that are too long for a queue and for crews to meet.
        site: The devices.
        threads: Whether one worker trains a trial that spreads, with the threads of all its devices; else a crew does.
    """

    def __init__(self, files: Path, site: Site, *, threads: bool) -> None:
        self._files = files.absolute()
        self._site = site
        self._threads = threads
        self._numbers = itertools.count(1)

    def errands(self, flight: Flight) -> tuple[Errand, ...]:
        """What workers are told of a flight, the lead's first.

        Raises:
            InvalidInput: A configuration can't be pickled.
        """
        shares, facts, size = flight.shares, flight.launch.facts, len(flight.shares)
        if not spreads(flight.launch.placement, size):
            return (self._errand(flight, shares, facts),)
        if self._threads:
            _, alone = self._site.needs(shares[:1])
            return (self._errand(flight, shares, {**facts, "alone": alone}),)
        folder = self._files / "meet"
        folder.mkdir(exist_ok=True)
        path = str(folder / f"{os.getpid()}-{flight.number}")  # by which they find each other
        crew: Crew[Ended] = Crew(size)
        found = []
        for rank, share in enumerate(shares):
            errand = self._errand(flight, (share,), {**facts, "world": (rank, size, path)})
            errand.rank, errand.crew = rank, crew
            found.append(errand)
        return tuple(found)

    def _errand(self, flight: Flight, shares: tuple[Share, ...], facts: Mapping[str, Any]) -> Errand:
        gpus, threads = self._site.needs(shares)
        facts, stage = weighed(facts, shares), self._site.stage(shares)
        if stage:
            facts = in_bubble(facts, self._site.stages[stage])
        names = tuple(f"cuda:{index}" for index in range(len(gpus))) or ("cpu",)
        # Of several that train as one, some may have been told to stop while they waited.
        specs = [spec for spec in specs_of(flight.launch) if spec[0] in flight.open]
        number = next(self._numbers)
        try:
            message = pickle.dumps((number, specs, names, threads, facts), protocol=5)
        except Exception as error:
            raise check_config(specs, error) from error
        if len(message) > MESSAGE_BYTES:
            folder = self._files / "spilled"
            folder.mkdir(exist_ok=True)
            path = folder / f"{number}.pickle"
            path.write_bytes(message)
            message = SPILLED + os.fsencode(path)
        return Errand(number, flight, message, shares)
