"""The store on a SQL database, through SQLAlchemy Core."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, final

import sqlalchemy as sa

from penstock.core import Event
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreError
from penstock.store._backend import Backend, Damaged
from penstock.store._base import Store, StudyEntry
from penstock.store._record import checksum, first_checksum, from_json, to_event, to_json, to_rows
from penstock.store._schema import cut_records, event_id, events, heads, kv, studies

_CHUNK = 4096  # records per query: short transactions, so that a slow reader holds up no checkpoint

_COLUMNS = (events.c.seq, events.c.kind, events.c.trial, events.c.time_s, events.c.data, events.c.crc)
_PAGE = (
    sa.select(*_COLUMNS)
    .where(events.c.id > sa.bindparam("after"), events.c.id < sa.bindparam("end"))
    .order_by(events.c.id)
    .limit(sa.bindparam("rows"))
)
_HEAD = sa.select(heads.c.events, heads.c.crc).where(heads.c.study == sa.bindparam("study"))
_ENTRIES = sa.select(
    studies.c.id, studies.c.name, studies.c.created_s, studies.c.spec, heads.c.events
).join_from(studies, heads, heads.c.study == studies.c.id)

_Row: TypeAlias = Any  # SQLAlchemy's Row, whose type parameters differ between its versions
_Head: TypeAlias = tuple[int, int]
"""Number and checksum of the last record."""


def _named(what: str, text: str) -> str:
    """``text`` if a database can hold it as a name."""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInput(f"{what} must be text that isn't empty and has no NUL, got {text!r}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} must be valid Unicode, got {text!r}.") from None
    return text


@final
class SqlStore(Store):
    """A store on SQLite or PostgreSQL; made by ``open_store``."""

    def __init__(self, backend: Backend, *, write: bool) -> None:
        self._backend = backend
        self._write = write
        self._locked: dict[int, _Head | None] = {}  # the head, where it is known
        self._doubt: dict[int, tuple[_Head, _Head]] = {}  # before and after an append that failed
        self._closed = False

    def __repr__(self) -> str:
        return f"<SqlStore {self.url}>"

    @property
    def url(self) -> str:
        """What opens it again, without any password."""
        return self._backend.url

    @property
    def files(self) -> Path | None:
        """``<file>.files`` beside an SQLite file; None otherwise."""
        return self._backend.files

    def studies(self) -> list[StudyEntry]:
        """All studies, oldest first."""
        query = _ENTRIES.order_by(studies.c.id)
        return [self._entry(row) for row in self._rows(query)]

    def names(self) -> set[str]:
        """The names of all studies."""
        return {row[0] for row in self._rows(sa.select(studies.c.name))}  # no order: the index alone is read

    def create(self, name: str, spec: Mapping[str, Any], work: bytes | None) -> StudyEntry:
        """Add a study."""
        self._check_writable()
        _named("A study's name", name)
        text = to_json(dict(spec), f"The spec of study {name!r}")
        now_s = time.time()

        def change(connection: sa.Connection) -> int | None:
            if connection.execute(sa.select(studies.c.id).where(studies.c.name == name)).first() is not None:
                return None
            values = {"name": name, "created_s": now_s, "spec": text, "work": work}
            study: int = connection.execute(
                studies.insert().values(values).returning(studies.c.id)
            ).scalar_one()
            values = {"study": study, "events": 0, "crc": first_checksum(study)}
            connection.execute(heads.insert().values(values))
            return study

        study = self._backend.write(change)
        if study is None:
            raise InvalidInput(
                f"There is a study {name!r} in {self.url} already. Give another name, or resume that study."
            )
        return StudyEntry(study, name, now_s, from_json(text), 0)

    def find(self, name: str | None = None) -> StudyEntry:
        """The study of that name, or the newest one."""
        query = _ENTRIES.order_by(studies.c.id.desc()).limit(1)
        if name is not None:
            query = query.where(studies.c.name == _named("A study's name", name))
        rows = self._rows(query)
        if rows:
            return self._entry(rows[0])
        names = [row[0] for row in self._rows(sa.select(studies.c.name).order_by(studies.c.id))]
        if not names:
            raise InvalidInput(f"There is no study in {self.url}. Run one with this store first.")
        raise InvalidInput(
            f"There is no study {name!r} in {self.url}. There are: {', '.join(map(repr, names))}."
        )

    def work(self, study: int) -> bytes | None:
        """The study's pickled training function."""
        rows = self._rows(sa.select(studies.c.work).where(studies.c.id == study))
        if not rows:
            raise self._unknown(study)
        return None if rows[0][0] is None else bytes(rows[0][0])

    def lock(self, study: int) -> None:
        """Become the study's writer."""
        self._check_writable()
        if study in self._locked:
            return
        if self._read_head(study) is None:
            raise self._unknown(study)
        self._backend.lock(study)
        self._locked[study] = None

    def writer(self, study: int) -> str | None:
        """Who has the study locked now, or None."""
        self._check_open()
        if study in self._locked:
            return f"process {os.getpid()} on {socket.gethostname()}"
        return self._backend.writer(study)

    def append(self, study: int, events: Sequence[Event]) -> None:
        """Write events durably, in one transaction."""
        self._check_locked(study)
        if not events:
            return
        before = self._locked[study] or self._settle(study)
        rows = to_rows(events, *before)
        after = rows[-1][0], rows[-1][5]
        self._locked[study] = None
        self._doubt[study] = before, after
        if not self._backend.append(study, before, rows):
            del self._doubt[study]
            now = self._read_head(study)
            raise StoreError(
                f"Study {study} in {self.url} was changed by another process: it has {now and now[0]} records, "
                f"not {before[0]}. Nothing was written. Close it here and open it again."
            )
        del self._doubt[study]
        self._locked[study] = after

    def _settle(self, study: int) -> _Head:
        """The head as stored, after taking back an append that landed although it was reported as failed.

        That happens when a connection is lost between the commit and its acknowledgement and stays lost.
        """
        head = self._read_head(study)
        if head is None:
            raise self._unknown(study)
        before, after = self._doubt.pop(study, (None, None))
        if before is not None and head == after:
            self.cut(study, keep=before[0])
            return before
        return head

    def read(self, study: int, *, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The study's events in order."""
        for row in self._sound(study, after):
            try:
                event = to_event(row)
            except (StoreCorrupt, ValueError, TypeError, RecursionError) as error:
                raise self._corrupt(study, row[0], str(error)) from error
            yield row[0], event

    def tail_ok(self, study: int) -> int:
        """How many records, from the first on, are sound."""
        good = 0
        with suppress(StoreCorrupt):
            for seq, _ in self.read(study):
                good = seq
        return good

    def cut(self, study: int, *, keep: int) -> int:
        """Set aside the records numbered above ``keep``."""
        self._check_locked(study)
        self._locked[study] = None

        def change(connection: sa.Connection) -> int:
            crc: Any = first_checksum(study)
            if keep:
                query = sa.select(events.c.crc).where(events.c.id == event_id(study, keep))
                crc = connection.execute(query).scalar()
            if keep < 0 or crc is None:
                raise InvalidInput(f"Can't keep {keep} records of study {study}: it hasn't so many.")
            gone = (events.c.id > event_id(study, keep)) & (events.c.id < event_id(study + 1, 0))
            columns = ["cut_s", "study", *(column.name for column in _COLUMNS)]
            rows = sa.select(sa.literal(time.time()), events.c.study, *_COLUMNS).where(gone)
            connection.execute(cut_records.insert().from_select(columns, rows))
            count = connection.execute(events.delete().where(gone)).rowcount
            head = heads.update().where(heads.c.study == study).values(events=keep, crc=crc)
            connection.execute(head)
            return int(count)

        return self._backend.write(change)

    def forget(self, study: int) -> None:
        """Take a study without records out of the store."""
        self._check_locked(study)

        def change(connection: sa.Connection) -> bool:
            empty = (heads.c.study == study) & (heads.c.events == 0)
            if connection.execute(heads.delete().where(empty)).rowcount != 1:
                return False
            connection.execute(studies.delete().where(studies.c.id == study))
            return True

        if not self._backend.write(change):
            raise StoreError(f"Study {study} in {self.url} has records: it is not forgotten.")
        del self._locked[study]

    def get(self, key: str) -> Any | None:
        """A JSON value that outlives studies, or None."""
        rows = self._rows(sa.select(kv.c.value).where(kv.c.key == _named("A key", key)))
        return self._value(key, rows[0][0]) if rows else None

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that start with ``prefix`` and have a value."""
        rows = self._rows(sa.select(kv.c.key))  # few: filtered here, the same on every database
        return sorted(row[0] for row in rows if row[0].startswith(prefix))

    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key."""
        self._check_writable()
        text = to_json(value, f"The value of {key!r}")
        self._backend.update(_named("A key", key), lambda _: text)

    def update(self, key: str, change: Callable[[Any | None], Any]) -> Any:
        """Replace the value under a key by ``change(value)``, as one step among all processes."""
        self._check_writable()
        kept: list[str] = []

        def change_text(text: str | None) -> str:
            value = change(None if text is None else self._value(key, text))
            kept[:] = [to_json(value, f"The value of {key!r}")]
            return kept[0]

        self._backend.update(_named("A key", key), change_text)
        return from_json(kept[0])

    def close(self) -> None:
        """Release the lock and the connections."""
        if not self._closed:
            self._closed = True
            self._locked.clear()
            self._backend.close()

    def _rows(self, query: sa.Executable, **values: Any) -> Sequence[_Row]:
        self._check_open()
        return self._backend.read(lambda connection: connection.execute(query, values).fetchall())

    def _read_head(self, study: int) -> _Head | None:
        rows = self._rows(_HEAD, study=study)
        return (int(rows[0][0]), int(rows[0][1])) if rows else None

    def _sound(self, study: int, after: int) -> Iterator[_Row]:
        """The rows above ``after`` whose checksums fit; StoreCorrupt at the first that doesn't."""
        last: int | None = None
        try:
            head = self._read_head(study)
            if head is None:
                raise self._unknown(study)
            last = head[0]
        except StoreCorrupt:
            pass  # the head doesn't read: go as far as the records do
        at = max(after, 0)
        crc: Any = first_checksum(study)
        if at:
            rows = self._page(study, at - 1, 1)
            if not rows or rows[0][0] != at:
                if last is not None and at >= last:
                    return
                raise self._corrupt(study, at, "it is missing")
            crc = rows[0][5]
        while last is None or at < last:
            rows = self._page(study, at, _CHUNK if last is None else min(_CHUNK, last - at))
            if not rows:
                if last is None:
                    raise self._corrupt(study, at + 1, "how many were written doesn't read")
                raise self._corrupt(study, at + 1, f"it is missing, {last} were written")
            for row in rows:
                seq, kind, trial, time_s, data, stored = row
                if seq != at + 1:
                    raise self._corrupt(study, at + 1, "it is missing")
                if checksum(crc, seq, kind, trial, time_s, data) != stored:
                    raise self._corrupt(study, seq, "its checksum doesn't fit")
                yield row
                at, crc = seq, stored

    def _page(self, study: int, after: int, rows: int) -> Sequence[_Row]:
        """Up to ``rows`` rows; where the database can't read them all, those before the first that fails."""
        self._check_open()

        values = {"after": event_id(study, after), "end": event_id(study + 1, 0), "rows": rows}
        try:
            return self._backend.read(lambda connection: connection.execute(_PAGE, values).fetchall())
        except Damaged as error:
            if rows == 1:
                raise self._corrupt(study, after + 1, error.what) from error
        return self._page(study, after, max(1, rows // 4))

    def _corrupt(self, study: int, record: int, why: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"Record {record} of study {study} in {self.url} doesn't read back: {why.rstrip('.')}. The {record - 1} "
            "before it are sound. Back up the store, then set the rest aside with Store.cut(study, keep="
            f"{record - 1}) or copy what reads with penstock.store.salvage(damaged, new)."
        )

    def _unknown(self, study: int) -> InvalidInput:
        known = [f"{entry.id} ({entry.name!r})" for entry in self.studies()]
        return InvalidInput(
            f"There is no study {study} in {self.url}. There are: {', '.join(known) or 'none'}."
        )

    def _value(self, key: str, text: str) -> Any:
        try:
            return from_json(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreCorrupt(
                f"The value of {key!r} in {self.url} doesn't read back ({error}). Put it again, or delete it."
            ) from error

    def _entry(self, row: _Row) -> StudyEntry:
        study, name, created_s, spec, count = row
        try:
            described = from_json(spec)
            if not isinstance(described, dict):
                raise TypeError(f"it is {described!r:.80}, not a mapping")
            return StudyEntry(study, name, created_s, described, count)
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreCorrupt(
                f"The description of study {name!r} in {self.url} doesn't read back ({error}). "
                "Take it from a backup of the store."
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"The store {self.url} is closed. Open it again with open_store.")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._write:
            raise StoreError(
                f"The store {self.url} is open for reading. Open it with write=True to change it."
            )

    def _check_locked(self, study: int) -> None:
        self._check_writable()
        if study not in self._locked:
            raise StoreError(
                f"Study {study} in {self.url} isn't locked here. Call lock({study}) before writing."
            )
