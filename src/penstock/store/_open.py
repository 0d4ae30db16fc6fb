"""Opening a store by path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.core.errors import InvalidInput, StoreError
from penstock.store._base import Store

_IN_MEMORY = (":memory:", "sqlite://", "sqlite:///", "sqlite:///:memory:")  # as SQLite and its URLs call it


def open_store(url_or_path: str | os.PathLike[str] | None, *, write: bool) -> Store:
    """Open a store.

    Args:
        url_or_path: The path of an SQLite file (``study.db``, ``sqlite:///study.db``), the URL of a PostgreSQL
            database (``postgresql://user@host/database``), or None (or ``:memory:``) for a store in memory, gone
            when closed.
        write: Whether studies will be created or written; creates the store where there is none. False creates
            nothing at all.

    Raises:
        StoreError: There is no store, it isn't one, or it was written by a newer Penstock.
        StoreUnwritable: It can't be opened for writing.
        MissingDependency: The database's driver isn't installed.
    """
    from penstock.store._sql import SqlStore
    from penstock.store._sqlite import SqliteBackend

    if url_or_path is None:
        if not write:
            raise InvalidInput("A store in memory starts empty: open it with write=True, or give a path.")
        return SqlStore(SqliteBackend(None, write=True), write=True)
    path = sqlite_path(url_or_path)
    if path is not None:
        return SqlStore(SqliteBackend(path, write=write), write=write)
    text = os.fspath(url_or_path)
    if text in _IN_MEMORY:
        return open_store(None, write=write)
    scheme = text.partition("://")[0]
    if scheme == "sqlite":
        raise InvalidInput(
            f"{text!r} isn't the URL of a file. Use sqlite:///relative or sqlite:////absolute."
        )
    if scheme.partition("+")[0] in ("postgresql", "postgres"):
        from penstock.store._postgres import PostgresBackend

        return SqlStore(PostgresBackend(text, write=write), write=write)
    raise InvalidInput(
        f"Can't open a store with scheme {scheme!r}. Use a path, sqlite:///path, or postgresql://user@host/database."
    )


def is_in_memory(url_or_path: str | os.PathLike[str]) -> bool:
    """Whether a store of that name is gone when it is closed."""
    return os.fspath(url_or_path) in _IN_MEMORY


def upgrade(url_or_path: str | os.PathLike[str]) -> None:
    """Bring a store that an older Penstock wrote to this one's format, in one transaction: all of it, or nothing.

    Opening a store for writing does the same. A store of this format is left as it is.

    Raises:
        StoreError: There is no store, it isn't one, or it was written by a newer Penstock.
        StoreUnwritable: It can't be opened for writing.
    """
    path = sqlite_path(url_or_path)
    if path is not None and not path.exists():
        raise StoreError(f"There is no store at {path}. Check the path.")
    open_store(url_or_path, write=True).close()


def sqlite_path(url_or_path: str | os.PathLike[str]) -> Path | None:
    """The file that a path or URL names; None where it names something else."""
    if not isinstance(url_or_path, str | os.PathLike):
        raise InvalidInput(
            f"A store is given by its path or URL, got {url_or_path!r}. Give one, e.g. study.db."
        )
    text = os.fspath(url_or_path)
    scheme, colon, rest = text.partition("://")
    if not text:
        raise InvalidInput("The path of a store can't be empty. Give one, e.g. study.db.")
    if text in _IN_MEMORY:
        return None
    if not colon:
        word, one, _ = text.partition(":")
        if one and word.partition("+")[0] in ("sqlite", "postgresql", "postgres"):  # Path("a://b") is a:/b
            raise InvalidInput(
                f'A store that begins with "{word}:" is no path, and a URL begins with "{word}://". Give a string: '
                "sqlite:///path, or postgresql://user@host/database."
            )
        return _file(text)
    if scheme == "sqlite" and rest.startswith("/"):
        return _file(rest[1:])
    return None


def _file(text: str) -> Path:
    path = Path(text)
    if "\0" in text or not path.name:
        raise InvalidInput(f"{text!r} is not the name of a file. Give one, e.g. study.db.")
    return path
