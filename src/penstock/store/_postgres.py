"""PostgreSQL by URL: one session that writes and holds the writer lock, so that no lock means no write."""

from __future__ import annotations

import os
import re
import socket
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, final

import sqlalchemy as sa

from penstock.core.errors import InvalidInput, MissingDependency, StoreError, StoreLocked, StoreUnwritable
from penstock.store import _schema
from penstock.store._backend import Backend, Damaged, damaged
from penstock.store._record import Row, to_json

T = TypeVar("T")

_CONNECT_S = 10
_SETTLE_S = 10.0  # how long the server may take to end our own lost session
_AWAY_S = 60.0  # how long a server that was there may be away: a restart or a failover must not end a study
_KNOCK_S = 0.1
# A machine that goes down says nothing. Left to the system, either side would wait for the other for two hours: the
# server with the lock of a study that nobody writes any more, a driver for an answer that never comes.
_ALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_UNHEARD_MS = 60_000  # how long what was sent may go without being received

# One statement, one round trip, in its own transaction: the rows go in only if the head was ours to move. They go
# as one JSON text, which Python makes several times faster than the driver makes arrays.
_APPEND = """
WITH moved AS (
    UPDATE penstock_heads SET events = %s, crc = %s WHERE study = %s AND events = %s AND crc = %s RETURNING study
)
INSERT INTO penstock_events (id, study, seq, kind, trial, time_s, data, crc)
SELECT %s::bigint + (new->>0)::bigint, moved.study, (new->>0)::bigint, new->>1, (new->>2)::bigint,
    (new->>3)::float8, new->>4, (new->>5)::bigint
FROM moved, json_array_elements(%s::json) AS new
"""
_SEED = "INSERT INTO penstock_kv (key, value) VALUES (%s, 'null') ON CONFLICT (key) DO NOTHING"
_GET = "SELECT value FROM penstock_kv WHERE key = %s FOR UPDATE"
_PUT = "UPDATE penstock_kv SET value = %s WHERE key = %s"
_HOLDER = """
SELECT l.pid, a.application_name, host(a.client_addr) FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = (%s::bigint & 4294967295)::oid AND l.objid = %s::oid
"""


@final
class PostgresBackend(Backend):
    """One PostgreSQL database, on one session.

    The session holds the advisory locks of the studies it writes. If it is lost, what it was doing is tried once
    more on a new session that took the locks again: by then the old one is over, so the head of the study tells
    whether a batch landed. Whoever writes waits a minute for a server that is gone, for it may only be restarted.
    """

    def __init__(self, url: str, *, write: bool) -> None:
        self.files = None
        self._write = write
        self._pid = os.getpid()
        self._locks: dict[int, None] = {}
        self._connection: sa.Connection | None = None
        self._session = 0  # the server's process of our session
        self._session_lost = 0  # and of the one before
        parsed, self._secrets = _parse(url)
        self.url = _shown(parsed)
        self._engine = _engine(parsed)
        try:
            if write:
                self._session_call(self._prepare)
            else:
                self.read(lambda connection: _schema.check(connection, self.url, write=False))
        except BaseException:
            self.close()
            raise

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Run a query; in autocommit mode, so nothing stays open."""
        return self._session_call(lambda connection: query(connection))

    def write(self, change: Callable[[sa.Connection], T]) -> T:
        """Run a change in one transaction; after a connection lost in its commit, ask what became of it."""
        committing: list[tuple[int, T]] = []

        def call(connection: sa.Connection) -> T:
            if committing and _committed(connection, committing[0][0], self._session_lost):
                return committing[0][1]
            committing.clear()
            return _in_transaction(connection, change, committing)

        return self._session_call(call)

    def update(self, key: str, change: Callable[[str | None], str]) -> None:
        """Replace the text under a key, with its row locked in between."""

        def swap(connection: sa.Connection) -> None:
            connection.exec_driver_sql(_SEED, (key,))
            old = connection.exec_driver_sql(_GET, (key,)).scalar()
            connection.exec_driver_sql(_PUT, (change(None if old == "null" else old), key))

        self.write(swap)

    def lock(self, study: int) -> None:
        """Take the study's advisory lock for the session."""
        self._session_call(lambda connection: self._take(connection, study, lost=set()))
        self._locks[study] = None

    def writer(self, study: int) -> str | None:
        """Whose session has the study's advisory lock."""

        def query(connection: sa.Connection) -> str | None:
            row = connection.exec_driver_sql(_HOLDER, (self._lock_class(connection), study)).first()
            return None if row is None else _holder(tuple(row))

        return self.read(query)

    def append(self, study: int, before: tuple[int, int], rows: Sequence[Row]) -> bool:
        """Write rows and the new head in one statement, unless the head is another one."""
        after = (rows[-1][0], rows[-1][5])
        values = (*after, study, *before, _schema.event_id(study, 0), to_json(rows, "A batch"))
        tried = False

        def change(connection: sa.Connection) -> bool:
            nonlocal tried
            if tried:  # the first try may have landed before the connection was lost
                query = "SELECT events, crc FROM penstock_heads WHERE study = %s"
                head = connection.exec_driver_sql(query, (study,)).one()
                if (int(head[0]), int(head[1])) == after:
                    return True
            tried = True
            return connection.exec_driver_sql(_APPEND, values).rowcount == len(rows)

        return self._session_call(change)

    def close(self) -> None:
        """End the session and release its locks: by word, for a busy server is slow to notice that it is over."""
        if self._locks and self._connection is not None and os.getpid() == self._pid:
            with suppress(sa.exc.SQLAlchemyError):
                self._connection.rollback()
                self._connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")
                self._connection.commit()
        self._drop()
        self._locks.clear()
        if os.getpid() == self._pid:
            self._engine.dispose()

    def _session_call(self, call: Callable[[sa.Connection], T]) -> T:
        """Call with the session, once more on a new one where it was lost."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"The store {self.url} was opened by process {self._pid} and this is {os.getpid()}, forked from "
                "it. Open the store again in this process."
            )
        fresh = self._connection is None
        while True:
            connection = self._connect()
            try:
                return call(connection)
            except sa.exc.DBAPIError as error:
                lost = error.connection_invalidated
                if lost:
                    self._drop()
                if not lost or fresh:
                    raise self._words(error) from None
                fresh = True
            finally:
                if not connection.closed and not connection.invalidated:
                    connection.rollback()  # ends SQLAlchemy's autobegin; the driver is in autocommit mode

    def _connect(self) -> sa.Connection:
        """The session, made anew with its locks where it was lost."""
        if self._connection is not None:
            return self._connection
        # Where there was none before, an error is the user's to hear at once: a wrong URL, say.
        until_s = time.monotonic() + (_AWAY_S if self._write and self._session else 0.0)
        lost = {self._session} - {0}
        self._session_lost = self._session
        while True:
            try:
                connection = self._new_session(lost)
                break
            except sa.exc.DBAPIError as error:
                if time.monotonic() >= until_s or not isinstance(error, sa.exc.OperationalError):
                    raise self._words(error) from None
                time.sleep(_KNOCK_S)
        self._connection = connection
        _open_backends.add(self)
        return connection

    def _new_session(self, lost: set[int]) -> sa.Connection:
        """A session with the locks of those that were ``lost``, to which it belongs if it is lost on the way."""
        try:
            connection = self._engine.connect()
        except sa.exc.DBAPIError:
            raise
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"{self.url} can't be opened: {self._scrub(error)}.") from None
        try:
            session = int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
            before = set(lost)
            lost.add(session)
            if self._write:
                self._durable(connection)
            else:
                connection.exec_driver_sql("SET default_transaction_read_only = on")
            for study in self._locks:
                self._take(connection, study, lost=before)
        except BaseException:
            with suppress(sa.exc.SQLAlchemyError):
                connection.close()
            raise
        self._session = session
        return connection

    def _durable(self, connection: sa.Connection) -> None:
        if not 0 < int(connection.exec_driver_sql("SHOW tcp_keepalives_idle").scalar() or 0) <= 60:
            for name, value in _ALIVE.items():
                connection.exec_driver_sql(f"SET tcp_{name} = {value}")
        if connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
            connection.exec_driver_sql("SET synchronous_commit = on")  # acknowledged means on disk

    def _prepare(self, connection: sa.Connection) -> None:
        if _schema.version_of(connection) == _schema.VERSION:
            return

        def change(inner: sa.Connection) -> None:
            inner.exec_driver_sql("SELECT pg_advisory_xact_lock(%s, 0)", (self._lock_class(inner),))
            _schema.prepare(inner, self.url)

        connection.rollback()
        _in_transaction(connection, change, [])

    def _lock_class(self, connection: sa.Connection) -> int:
        """The first half of our advisory locks' keys: different for stores in different schemas."""
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar()
        return zlib.crc32(f"penstock {schema}".encode()) - (1 << 31)

    def _take(self, connection: sa.Connection, study: int, *, lost: set[int]) -> None:
        key = (self._lock_class(connection), study)
        until_s = time.monotonic() + _SETTLE_S
        while not connection.exec_driver_sql("SELECT pg_try_advisory_lock(%s, %s)", key).scalar():
            holder = connection.exec_driver_sql(_HOLDER, key).first()
            if holder is None:
                continue  # released between the two statements
            if holder[0] in lost and time.monotonic() < until_s:
                # Our own session, whose end the server hasn't noticed. It may be in the middle of a commit.
                connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (holder[0],))
                time.sleep(0.05)
                continue
            raise StoreLocked(
                f"Study {study} in {self.url} is open for writing by {_holder(tuple(holder))}. "
                "Wait for it or stop it; reading works meanwhile."
            )

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and os.getpid() == self._pid:
            with suppress(sa.exc.SQLAlchemyError):
                connection.invalidate()
                connection.close()

    def _forget(self) -> None:
        """In a forked child: let go of the socket, or the server would take the session for alive.

        Its number stays taken, so that nothing else gets it while the driver still knows it.
        """
        if self._connection is not None:
            with suppress(Exception):
                driver: Any = self._connection.connection.dbapi_connection
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, driver.fileno(), inheritable=False)
                os.close(nowhere)

    def _words(self, error: sa.exc.DBAPIError) -> StoreError:
        """What went wrong, in words with a remedy and without secrets."""
        cause = error.orig if error.orig is not None else error
        state = str(getattr(cause, "sqlstate", "") or "")
        text = f"{self.url}: {self._scrub(cause)}."
        if damaged(cause):
            return Damaged(text)
        intact = "Nothing was half-written and what is there is intact."
        if state.startswith("53"):  # insufficient resources
            return StoreUnwritable(f"{text} {intact} Free space or connections on the database server.")
        if state in ("25006", "42501"):
            remedy = "Connect as a role that may write, to a server that isn't a read-only replica."
            return StoreUnwritable(f"{text} {intact} {remedy}")
        if not state or state.startswith(("08", "57P")) or error.connection_invalidated:
            remedy = (
                "Check that the server runs and can be reached; the study can be resumed from what it holds."
            )
            return StoreUnwritable(f"{text} {intact} {remedy}")
        return StoreError(f"{text} Check the URL's user, database and rights.")

    def _scrub(self, error: BaseException) -> str:
        text = " ".join(str(error).split()).rstrip(".")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


_open_backends: weakref.WeakSet[PostgresBackend] = weakref.WeakSet()


def _forget_all() -> None:
    for backend in list(_open_backends):
        backend._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _in_transaction(
    connection: sa.Connection, change: Callable[[sa.Connection], T], committing: list[tuple[int, T]]
) -> T:
    """Run a change between BEGIN and COMMIT on a session that is in autocommit mode otherwise.

    Puts the transaction's number and the result into ``committing`` right before the commit.
    """
    connection.exec_driver_sql("BEGIN")
    try:
        result = change(connection)
        number = int(connection.exec_driver_sql("SELECT txid_current()").scalar_one())
        committing.append((number, result))
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        with suppress(sa.exc.SQLAlchemyError):
            connection.exec_driver_sql("ROLLBACK")
        raise
    return result


def _committed(connection: sa.Connection, number: int, session: int) -> bool:
    """Whether a transaction of a lost session was committed; ends it where it is still open."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        status = connection.exec_driver_sql("SELECT txid_status(%s)", (number,)).scalar()
        if status != "in progress" or time.monotonic() > until_s:
            return bool(status == "committed")
        connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (session,))
        time.sleep(0.05)


def _parse(url: str) -> tuple[sa.URL, list[str]]:
    scheme, _, rest = url.partition("://")
    try:
        parsed = sa.make_url(f"postgresql+psycopg://{rest}")
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidInput(
            f"The {scheme} URL can't be parsed. Write postgresql://user@host:port/database, with special "
            "characters in the password percent-encoded."
        ) from None
    secrets = {str(parsed.password)} if parsed.password else set()
    secrets |= {str(value) for name, value in parsed.query.items() if "password" in name}
    secrets |= set(re.findall(r":([^:@/]+)@", rest))
    return parsed, sorted(secrets, key=len, reverse=True)


def _shown(url: sa.URL) -> str:
    hidden = [name for name in url.query if "password" in name]
    shown = sa.URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    return shown.difference_update_query(hidden).render_as_string(hide_password=True)


def _engine(url: sa.URL) -> sa.Engine:
    arguments: dict[str, Any] = {"application_name": f"penstock {os.getpid()}@{socket.gethostname()}"[:63]}
    wanted = {"connect_timeout": _CONNECT_S, **_ALIVE, "tcp_user_timeout": _UNHEARD_MS}
    arguments |= {name: value for name, value in wanted.items() if name not in url.query}
    try:
        return sa.create_engine(
            url,
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            connect_args=arguments,
        )
    except ImportError as error:
        raise MissingDependency(
            f'A PostgreSQL store needs the driver psycopg ({error}). Install it: pip install "penstock[postgres]"'
        ) from None


def _holder(row: Sequence[Any]) -> str:
    session, name, address = row
    match = re.fullmatch(r"penstock (\d+)@(.*)", name or "")
    if match is None:
        return f"another client (server process {session})"
    where = f"process {match[1]} on {match[2]}"
    if int(match[1]) == os.getpid() and match[2] == socket.gethostname():
        return f"this process ({where}), through another open store"
    return where + (f" ({address})" if address else "")
