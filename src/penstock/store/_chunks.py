"""Lists of records that grow for years under one key: full chunks are archived, only the rest is ever rewritten.

The value is a mapping with a list of ``"records"`` that are only ever appended to. Once there are many, the oldest
``CHUNK`` of them move to ``KEY/0``, the next to ``KEY/1``, and so on; ``"archived"`` counts these chunks. A chunk is
written before the value lets go of its records, and never changes: whoever writes it again, after a crash or beside
another process, writes the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from penstock.core.errors import StoreCorrupt

CHUNK = 32
"""Records in a chunk. Part of the format: two processes that archive at once must cut alike."""


class Values(Protocol):
    """What a growing list needs of a store."""

    def get(self, key: str) -> Any | None:
        """The value, or None."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Keep a value."""
        ...

    def update(self, key: str, change: Callable[[Any | None], Any]) -> Any:
        """Replace the value by ``change(value)`` as one step among all processes; returns the new one."""
        ...


class Readable(Protocol):
    """What reading needs."""

    def get(self, key: str) -> Any | None:
        """The value, or None."""
        ...

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with that prefix."""
        ...


def chunk_key(key: str, number: int) -> str:
    """Where a chunk is kept."""
    return f"{key}/{number}"


def archived(value: Mapping[str, Any]) -> int:
    """How many chunks hold the records before those in ``value``."""
    return int(value.get("archived", 0))


def identity(value: Mapping[str, Any]) -> Any:
    """What tells one list from another that took its place; None while it is empty."""
    records = value["records"]
    return value.get("id", records[0] if records else None)


def read_chunk(store: Any, key: str, value: Mapping[str, Any], number: int) -> list[Any]:
    """The records of one chunk of the list whose value is ``value``.

    Raises:
        StoreCorrupt: It is missing, or another list's.
    """
    chunk = store.get(chunk_key(key, number))
    records = chunk.get("records") if isinstance(chunk, Mapping) else None
    if not isinstance(records, list) or len(records) != CHUNK or chunk.get("id") != value.get("id"):
        raise StoreCorrupt(
            f"What the store keeps under {chunk_key(key, number)!r} is not the part of {key!r} that belongs there. "
            "Take it from a backup of the store."
        )
    return records


def archive(store: Values, key: str, value: Mapping[str, Any], *, format: int, above: int = 2) -> Any | None:
    """Move all full chunks but the last out of ``value``, which the store was seen to hold, if there are ``above``.

    Safe among processes and at any point where it may be cut short. Returns the new value, or None if nothing was
    done.
    """
    records = value["records"]
    if len(records) < above * CHUNK:
        return None
    full = len(records) // CHUNK - 1
    moved = records[: full * CHUNK]
    first = archived(value)
    ident = value.get("id") or hashlib.sha256(json.dumps(moved[:CHUNK]).encode()).hexdigest()[:32]
    for at in range(full):
        chunk = {"id": ident, "records": moved[at * CHUNK : (at + 1) * CHUNK]}
        store.put(chunk_key(key, first + at), chunk)

    def trim(now: Any | None) -> Any:
        if now is None or archived(now) != first or now["records"][: len(moved)] != moved:
            return now  # another process has done it
        rest = now["records"][len(moved) :]
        return {**now, "format": format, "id": ident, "archived": first + full, "records": rest}

    return store.update(key, trim)


def whole(store: Readable, key: str, chunks: MutableMapping[tuple[str, Any, int], list[Any]]) -> Any | None:
    """The value with all its records, archived ones included; ``chunks`` keeps those read before."""
    value = store.get(key)
    if not isinstance(value, Mapping) or not archived(value):
        return value
    records: list[Any] = []
    for number in range(archived(value)):
        place = key, value.get("id"), number
        if place not in chunks:
            chunks[place] = read_chunk(store, key, value, number)
        records += chunks[place]
    return {**value, "archived": 0, "records": records + value["records"]}


def all_whole(
    store: Readable, prefix: str, chunks: MutableMapping[tuple[str, Any, int], list[Any]] | None = None
) -> dict[str, Any]:
    """All values under ``prefix`` by the rest of their keys, with all records; the chunks are not among them."""
    kept = {} if chunks is None else chunks
    names = [key[len(prefix) :] for key in store.keys(prefix)]
    return {name: whole(store, prefix + name, kept) for name in names if "/" not in name}
