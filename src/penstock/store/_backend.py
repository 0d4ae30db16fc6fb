"""What a database must do for ``SqlStore``: connections, transactions, the writer lock, its errors in words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from penstock.core.errors import StoreCorrupt
from penstock.store._record import Row

T = TypeVar("T")


class Backend(ABC):
    """One database. Owned and called by one ``SqlStore``, from one thread.

    Every method raises a StoreError where the database fails; SQLAlchemy's errors don't get out.
    """

    url: str
    files: Path | None

    @abstractmethod
    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Run ``query`` outside of a transaction. It may be called again if the database changed under it."""

    @abstractmethod
    def write(self, change: Callable[[sa.Connection], T]) -> T:
        """Run ``change`` in one durable transaction. It may be called again after a lost connection."""

    @abstractmethod
    def update(self, key: str, change: Callable[[str | None], str]) -> None:
        """Replace the text under a key, serialised among all processes."""

    @abstractmethod
    def lock(self, study: int) -> None:
        """Become the writer of a study, or raise StoreLocked."""

    @abstractmethod
    def writer(self, study: int) -> str | None:
        """Who has a study's lock, in words; None: nobody. Nobody who wants it is hindered by the question."""

    @abstractmethod
    def append(self, study: int, before: tuple[int, int], rows: Sequence[Row]) -> bool:
        """Write rows and the new head durably if the head is still ``before`` (number, checksum).

        Returns:
            False where the head is another one; nothing was written.
        """

    @abstractmethod
    def close(self) -> None:
        """Release locks and connections. Idempotent."""


def damaged(error: BaseException) -> bool:
    """Whether an error of the database driver says that stored data doesn't read."""
    code = getattr(error, "sqlite_errorname", "") or ""
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_FORMAT")):
        return True
    if "Could not decode to UTF-8" in str(error):
        return True
    return str(getattr(error, "sqlstate", "") or "") in {"XX001", "XX002"}  # PostgreSQL's data_corrupted


class Damaged(StoreCorrupt):
    """The database itself can't read what it stored. ``SqlStore`` says which record, where it is one."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} The database is damaged. Copy what reads: penstock.store.salvage(damaged, new)."
        )
        self.what = what
