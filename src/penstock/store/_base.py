"""The contract of stores: an append-only journal of events per study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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

    One process writes a study at a time (``lock``); any number read while it does, from this machine or, with
    PostgreSQL, from others. An object is used from one thread and by the process that opened it: it is not
    carried over a fork. ``append`` returns when the events are durable, all or none of them. Opening a store
    for reading creates nothing. No text, error or ``repr`` of a store shows a password.

    Going on after damage: ``tail_ok`` says how many records at the beginning are sound, ``cut`` sets the rest
    aside. Where the file itself is damaged, ``penstock.store.salvage`` copies what reads into a new store.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """What opens it again, without any password."""

    @property
    @abstractmethod
    def files(self) -> Path | None:
        """The folder for checkpoints and logs beside the journal; None where the store implies none.

        Not created by the store.
        """

    @abstractmethod
    def studies(self) -> list[StudyEntry]:
        """All studies, oldest first."""

    @abstractmethod
    def names(self) -> set[str]:
        """The names of all studies: to know these, nothing else of the studies need be read."""

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
        """Become the study's writer until ``close`` or the end of the process, however it ends.

        Locking again what this store has locked changes nothing.

        Raises:
            StoreLocked: Another process, or another open store of this one, is. Says which process.
        """

    @abstractmethod
    def writer(self, study: int) -> str | None:
        """Who has the study locked now, in words such as ``process 12 on host``; None: nobody.

        Tells a study that runs from one whose driver was killed. Hinders neither a writer nor who wants to be one.
        """

    @abstractmethod
    def append(self, study: int, events: Sequence[Event]) -> None:
        """Write events durably, in one transaction.

        Raises:
            StoreError: The study isn't locked by this store.
            StoreUnwritable: Nothing of ``events`` was written; what was there before is intact, and a later
                call works when the cause is gone.
            InvalidInput: An event holds something that JSON can't; nothing was written.
        """

    @abstractmethod
    def read(self, study: int, *, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The study's events in order, numbered from 1, those with a number above ``after``.

        Ends at the last event there is when the iteration starts; ask again with ``after`` for later ones. No
        transaction stays open between two events.

        Raises:
            StoreCorrupt: At the first record that does not read back, after all that precede it. Says which.
        """

    @abstractmethod
    def tail_ok(self, study: int) -> int:
        """How many records, from the first on, are sound: ``keep`` for ``cut``. Never raises StoreCorrupt."""

    @abstractmethod
    def cut(self, study: int, *, keep: int) -> int:
        """Set aside the records numbered above ``keep``; returns how many.

        They move to the table of cut records, from where a person can still read them.

        Raises:
            StoreError: The study isn't locked by this store.
            InvalidInput: There are fewer than ``keep`` records.
        """

    @abstractmethod
    def forget(self, study: int) -> None:
        """Take a study without records out of the store: its name is free then, its number is never used again.

        Raises:
            StoreError: The study isn't locked by this store, or has records: ``cut`` them first.
        """

    @abstractmethod
    def get(self, key: str) -> Any | None:
        """A JSON value that outlives studies (a power profile, a hardware profile), or None."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """The keys that start with ``prefix`` and have a value, sorted by code points."""

    @abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key, replacing the old one. Needs no lock; safe among processes."""

    @abstractmethod
    def update(self, key: str, change: Callable[[Any | None], Any]) -> Any:
        """Replace the value under a key by ``change(value)``, as one step among all processes.

        ``change`` gets None where there is no value, and is called with writers of the same key waiting: keep
        it short. It may be called again after a lost connection. If it raises, nothing changes.

        Returns:
            The new value.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the lock and the connections. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
