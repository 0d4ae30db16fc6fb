"""Copying what still reads of a damaged store into a new one."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice

from penstock.core import Event
from penstock.core.errors import StoreCorrupt
from penstock.store._open import open_store


def salvage(damaged: str | os.PathLike[str], new: str | os.PathLike[str]) -> dict[str, int]:
    """Copy each study up to its first unreadable record, and the kept values, into another store.

    Use it where ``Store.cut`` can't help because the file itself is damaged. The damaged store isn't changed.

    Returns:
        How many records of each study were copied, by its name.

    Raises:
        StoreCorrupt: Not even the list of studies reads.
    """
    copied: dict[str, int] = {}
    with open_store(damaged, write=False) as source, open_store(new, write=True) as target:
        for entry in source.studies():
            study = target.create(entry.name, entry.spec, source.work(entry.id)).id
            target.lock(study)
            copied[entry.name] = 0
            events = source.read(entry.id)
            more = True
            while more:
                batch: list[Event] = []
                try:
                    for _, event in islice(events, 1000):
                        batch.append(event)
                    more = bool(batch)
                except StoreCorrupt:
                    more = False
                target.append(study, batch)
                copied[entry.name] += len(batch)
        with suppress(StoreCorrupt):  # profiles can be measured again
            keys = source.keys()
            for key in keys:
                target.put(key, source.get(key))
    return copied
