"""The contract of stores: an append-only journal of events per study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core import Event


@dataclass(frozen=True, slots=True)
class StudyEntry:
    """One study in a store.

    Attributes:
        id: Its key in the store.
        name: Unique in the store.
        created_s: When it was made.
        spec: What the study is, JSON-able: space, objectives, scheduler, seed, version.
        events: How many events it has.
    """

    id: int
    name: str
    created_s: float
    spec: Mapping[str, Any]
    events: int


class Store(ABC):
    """Keeps the journals of studies.

    One process writes a study at a time (``lock``); any number read. Used from one thread. ``append`` returns
    when the events are durable, all or none of them. Opening a store for reading creates nothing.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """What opens it again, without any password."""

    @property
    @abstractmethod
    def files(self) -> Path | None:
        """The folder for checkpoints and logs beside the journal; None where the store implies none."""

    @abstractmethod
    def studies(self) -> list[StudyEntry]:
        """All studies, oldest first."""

    @abstractmethod
    def create(self, name: str, spec: Mapping[str, Any], work: bytes | None) -> StudyEntry:
        """Add a study. ``work`` is its pickled training function.

        Raises:
            InvalidInput: The name is taken.
        """

    @abstractmethod
    def find(self, name: str | None = None) -> StudyEntry:
        """The study of that name, or the newest one.

        Raises:
            InvalidInput: There is none; says which there are.
        """

    @abstractmethod
    def work(self, study: int) -> bytes | None:
        """The study's pickled training function."""

    @abstractmethod
    def lock(self, study: int) -> None:
        """Become the study's writer until ``close`` or the end of the process.

        Raises:
            StoreLocked: Another process is.
        """

    @abstractmethod
    def append(self, study: int, events: Sequence[Event]) -> None:
        """Write events durably, in one transaction.

        Raises:
            StoreUnwritable: Nothing of ``events`` was written; what was there before is intact.
        """

    @abstractmethod
    def read(self, study: int, *, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The study's events in order, numbered from 1, those with a number above ``after``.

        Raises:
            StoreCorrupt: At the first record that does not read back, after all that precede it. ``problem``
                of a later call to ``read`` does not change.
        """

    @abstractmethod
    def get(self, key: str) -> Any | None:
        """A JSON value that outlives studies (a power profile, a hardware profile), or None."""

    @abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key, replacing the old one."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock and the connections. Idempotent."""
