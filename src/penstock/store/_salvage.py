"""Copying what still reads of a damaged store into a new one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

from penstock.core import Event
from penstock.core.errors import StoreCorrupt
from penstock.store._base import Store, StudyEntry
from penstock.store._open import open_store, sqlite_path
from penstock.store._pages import rows_in
from penstock.store._record import Row, checksum, first_checksum, to_event


def salvage(damaged: str | os.PathLike[str], new: str | os.PathLike[str]) -> dict[str, int]:
    """Copy each study up to its first lost record, and the kept values, into another store.

    Use it where ``Store.cut`` can't help because the file itself is damaged. Where SQLite can't find its way
    through the file any more, its pages are searched one by one. The damaged store isn't changed.

    Returns:
        How many records of each study were copied, by its name.

    Raises:
        StoreCorrupt: Not even the list of studies reads.
    """
    with ExitStack() as stack:
        try:
            source = stack.enter_context(open_store(damaged, write=False))
            entries = source.studies()
        except StoreCorrupt as error:
            raise StoreCorrupt(
                f"Not even the list of studies in {damaged} reads, so nothing can be copied. Take it from a backup."
            ) from error
        target = stack.enter_context(open_store(new, write=True))
        return _copied(source, entries, target, sqlite_path(damaged))


def _copied(source: Store, entries: Iterable[StudyEntry], target: Store, path: Path | None) -> dict[str, int]:
    copied: dict[str, int] = {}
    for entry in entries:
        study = target.create(entry.name, entry.spec, source.work(entry.id)).id
        target.lock(study)
        copied[entry.name] = 0
        events = _events(source, entry.id, path)
        while batch := list(islice(events, 1000)):
            target.append(study, batch)
            copied[entry.name] += len(batch)
    with suppress(StoreCorrupt):  # profiles can be measured again
        keys = source.keys()
        for key in keys:
            target.put(key, source.get(key))
    return copied


def _events(source: Store, study: int, path: Path | None) -> Iterator[Event]:
    """The events that the store reads, then those that only the pages of its file still tell."""
    good = 0
    try:
        for seq, event in source.read(study):
            good = seq
            yield event
        return
    except StoreCorrupt:
        if path is None:
            return
    found: dict[int, list[Row]] = {}
    for _, there, seq, kind, trial, time_s, data, crc in rows_in(path, 8):
        if there == study:
            if isinstance(time_s, int):
                time_s = float(time_s)  # SQLite packs 3.0 as 3
            found.setdefault(seq, []).append((seq, kind, trial, time_s, data, crc))
    seq, crc = 0, first_checksum(study)
    while True:
        seq += 1
        for each in found.get(seq, ()):  # several: pages that were moved leave old copies
            if checksum(crc, *each[:5]) == each[5]:
                break
        else:
            return
        crc = each[5]
        if seq > good:
            try:
                yield to_event(each)
            except (StoreCorrupt, ValueError, TypeError):
                return
