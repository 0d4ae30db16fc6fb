"""SQLite in one file: WAL, durable at commit, readers beside the writer, and a file lock for the writer."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar, final
from urllib.parse import quote

import sqlalchemy as sa

from penstock.core.errors import PenstockError, StoreError, StoreUnwritable
from penstock.store import _schema
from penstock.store._backend import Backend, Damaged, damaged
from penstock.store._filelock import FileLock, holder_of
from penstock.store._record import Row

T = TypeVar("T")

_MAGIC = b"SQLite format 3\0"
_BUSY_S = 30.0
_WAL_PAGES = 4000  # a checkpoint every 16 MB: each one syncs both files
_WAL_KEPT_BYTES = 64 << 20

_INSERT = "INSERT INTO penstock_events (id, study, seq, kind, trial, time_s, data, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_ADVANCE = "UPDATE penstock_heads SET events = ?, crc = ? WHERE study = ? AND events = ? AND crc = ?"
_GET = "SELECT value FROM penstock_kv WHERE key = ?"
_PUT = "INSERT INTO penstock_kv (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"

_Stamp: TypeAlias = tuple[int, int, int, int] | None


@final
class SqliteBackend(Backend):
    """One SQLite file, or a database in memory where ``path`` is None.

    A store for writing keeps one connection; a store for reading connects for each query (``_Reader``).
    """

    def __init__(self, path: Path | None, *, write: bool) -> None:
        self.url = "sqlite://" if path is None else f"sqlite:///{path}"
        self.files = None if path is None else path.with_name(path.name + ".files")
        self._path = path
        self._locks: dict[int, FileLock] = {}
        self._connection: sa.Connection | None = None
        self._in_write = False
        self._pid = os.getpid()
        if path is not None:
            _check_path(path, write=write)
        self._reader = None if path is None else _Reader(path)
        if write:
            try:
                self._open()
            except BaseException:
                self.close()
                raise
        else:
            self.read(lambda connection: _schema.check(connection, self.url, write=False))

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Run a query."""
        self._check_process()
        try:
            if self._connection is None:
                if self._reader is None:
                    raise StoreError("A store in memory is gone once it is closed.")
                return self._reader.read(query)
            try:
                return query(self._connection)
            finally:
                self._connection.rollback()
        except sa.exc.DBAPIError as error:
            raise self._words(error, "read") from error.orig
        except PenstockError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # what the driver makes of bytes gone wrong
            raise Damaged(f"{self.url} can't be read: {error}.") from error

    def write(self, change: Callable[[sa.Connection], T]) -> T:
        """Run a change in one transaction."""
        self._check_process()
        if self._connection is None:
            raise StoreError(f"The store {self.url} isn't open for writing. Open it with write=True.")
        self._in_write = True
        try:
            with self._connection.begin():
                return change(self._connection)
        except sa.exc.DBAPIError as error:
            raise self._words(error, "written") from error.orig
        finally:
            self._in_write = False

    def update(self, key: str, change: Callable[[str | None], str]) -> None:
        """Replace the text under a key; BEGIN IMMEDIATE keeps other writers out in between."""

        def swap(connection: sa.Connection) -> None:
            old = connection.exec_driver_sql(_GET, (key,)).scalar()
            connection.exec_driver_sql(_PUT, (key, change(old)))

        self.write(swap)

    def lock(self, study: int) -> None:
        """Lock ``<file>.<study>.lock``; a database in memory has nobody to keep out."""
        if self._path is not None:
            path = _lock_path(self._path, study)
            self._locks[study] = FileLock(path, f"Study {study} in {self.url}")

    def writer(self, study: int) -> str | None:
        """Who has locked ``<file>.<study>.lock``."""
        return None if self._path is None else holder_of(_lock_path(self._path, study))

    def append(self, study: int, before: tuple[int, int], rows: Sequence[Row]) -> bool:
        """Write rows and the new head, unless the head is another one."""
        head = (rows[-1][0], rows[-1][5], study, *before)
        base = _schema.event_id(study, 0)

        def change(connection: sa.Connection) -> bool:
            if connection.exec_driver_sql(_ADVANCE, head).rowcount != 1:
                return False
            connection.exec_driver_sql(_INSERT, [(base + row[0], study, *row) for row in rows])
            return True

        return self.write(change)

    def close(self) -> None:
        """Close the connection, which moves the WAL into the file where nobody else reads, and the locks."""
        connection, self._connection = self._connection, None
        if connection is not None and os.getpid() == self._pid:
            with suppress(sa.exc.SQLAlchemyError, sqlite3.Error):  # disk full: the WAL keeps the records
                connection.close()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def _open(self) -> None:
        path = self._path
        if path is not None and path.exists() and path.stat().st_size:
            # Look before touching anything: it may be another program's file.
            self.read(lambda connection: _check_ours(connection, self.url))
        name = ":memory:" if path is None else _uri(path, "rwc")
        try:
            self._connection = _connection(lambda: _connect(name))
            sa.event.listen(self._connection, "begin", self._begin)
            if path is not None:
                _use_wal(self._connection)
        except sa.exc.DBAPIError as error:
            raise self._words(error, "written") from error.orig
        self.write(lambda connection: _schema.prepare(connection, self.url))

    def _begin(self, connection: sa.Connection) -> None:
        # The driver is in autocommit mode. A write takes SQLite's write lock at once, so that what it reads
        # first can't change; a read is one statement and needs no transaction.
        if self._in_write:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"The store {self.url} was opened by process {self._pid} and this is {os.getpid()}, forked from "
                "it. Open the store again in this process."
            )

    def _words(self, error: sa.exc.DBAPIError, done: str) -> StoreError:
        """What went wrong, in words with a remedy."""
        cause = error.orig if error.orig is not None else error
        name = getattr(cause, "sqlite_errorname", None) or type(cause).__name__
        text = f"{self.url} can't be {done}: {cause} ({name})."
        if damaged(cause):
            return Damaged(text)
        if done == "read":
            return StoreError(f"{text} Check that the file is there and readable, and its -wal file with it.")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            remedy = "Make the file and its folder writable, or give another path."
        elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            remedy = f"Another process held it for {_BUSY_S:.0f} s. Try again, or find out what it is doing."
        elif name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            remedy = "Free some space on its disk (or raise the quota or file size limit), then go on."
        else:
            return StoreError(f"{text} Nothing was changed.")
        return StoreUnwritable(f"{text} Nothing was half-written and what is there is intact. {remedy}")


@final
class _Reader:
    """Reads a file without a trace.

    SQLite's read-only connections to a WAL database create two side files where there are none and leave them
    behind, and fail in a folder that is read-only. So while there is no ``-wal`` file, hence no writer, the file
    is read as immutable; if it changed meanwhile, again. Each query has its own connection for that reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = path.with_name(path.name + "-wal")

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Run a query; SQLAlchemy's errors pass."""
        while True:
            before = self._stamp()
            try:
                with _connection(self._connect) as connection:
                    result = query(connection)
            except Exception:
                if before == self._stamp():
                    raise
                continue
            if before is None or before == self._stamp():
                return result

    def _stamp(self) -> _Stamp:
        """What tells that an immutable file changed; None while a writer has it open."""
        if _size(self._wal):
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _connect(self) -> sqlite3.Connection:
        mode = "ro" if _size(self._wal) else "ro&immutable=1"
        connection = _connect(_uri(self._path, mode))
        # Nothing is written here, but only so does SQLite read what is left of a file that was cut off.
        connection.execute("PRAGMA writable_schema = ON")
        return connection


def _lock_path(path: Path, study: int) -> Path:
    return path.with_name(f"{path.name}.{study}.lock")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _uri(path: Path, mode: str) -> str:
    return f"file:{quote(str(path.absolute()))}?mode={mode}"


_wanted = threading.local()


@cache
def _engine() -> sa.Engine:
    """One for all files, which keeps no connection: the statements it knows are compiled once per process."""
    return sa.create_engine(
        "sqlite://", creator=lambda: _wanted.connect(), poolclass=sa.NullPool, hide_parameters=True
    )


def _connection(connect: Callable[[], sqlite3.Connection]) -> sa.Connection:
    _wanted.connect = connect
    try:
        return _engine().connect()
    finally:
        del _wanted.connect


def _connect(name: str) -> sqlite3.Connection:
    return sqlite3.connect(
        name, uri=name.startswith("file:"), timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )


def _use_wal(connection: sa.Connection) -> None:
    """Readers beside the writer, and each commit synced: a power cut loses nothing that was acknowledged."""
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            break
        except sa.exc.OperationalError as error:  # the busy handler isn't asked for this one
            name = getattr(error.orig, "sqlite_errorname", "")
            if not name.startswith("SQLITE_BUSY") or time.monotonic() > until_s:
                raise
            time.sleep(0.01)
    connection.exec_driver_sql("PRAGMA synchronous = FULL")
    connection.exec_driver_sql(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.exec_driver_sql(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")
    connection.rollback()


def _check_ours(connection: sa.Connection, url: str) -> None:
    tables = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar()
    if tables:  # none: whoever made the file died before the first commit
        _schema.check(connection, url, write=True)


def _check_path(path: Path, *, write: bool) -> None:
    """Say what is wrong with a path before SQLite touches it."""
    try:
        folder = path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise StoreError(f"{path} can't be looked at: {error.strerror}. Give another path.") from error
    if folder:
        raise StoreError(f"{path} is a folder. Give the path of a file in it, e.g. {path / 'study.db'}.")
    if not path.parent.is_dir():
        if path.parts[0].startswith("~"):  # mkdir in a shell would mean another folder
            raise StoreError(
                f"The folder {path.parent} doesn't exist: {path.parts[0]} stands for a home in shells alone. Give "
                f"os.path.expanduser({str(path)!r})."
            )
        raise StoreError(f"The folder {path.parent} doesn't exist. Create it first: mkdir -p {path.parent}")
    if write:
        # Asked first, because SQLite opens what it may not write and leaves side files while finding out.
        for each in (path.parent, path):
            if each.exists() and not os.access(each, os.W_OK):
                raise StoreUnwritable(
                    f"{path} can't be written: {each} isn't writable. Change that, or its path."
                )
    if not path.exists():
        if not write:
            raise StoreError(
                f"There is no store at {path}. Check the path, or run a study with it as its store."
            )
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}. Check its permissions.") from error
    if (start or not write) and start != _MAGIC:
        raise StoreError(f"{path} is not a Penstock store; it was left as it is. Give another path.")
