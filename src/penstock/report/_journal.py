"""Reading a study for the views: its journal folded, and the store's recurring jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.goal import Goal
from penstock.report import views
from penstock.report.views import Figure, Folded
from penstock.report.views._recurring import PREFIX
from penstock.store import Store, open_store
from penstock.store._chunks import whole


@final
@dataclass(frozen=True, slots=True)
class Unreadable:
    """What stands for a recurring job whose history can't be read.

    Attributes:
        reason: Why.
    """

    reason: str


def fold_journal(store: str | Path, name: str | None = None) -> tuple[Folded, dict[str, Any]]:
    """A study folded for the views, and the store's recurring jobs; a damaged tail is said, not raised."""
    folded, jobs = fold_store(store, name, need_study=True)
    assert folded is not None
    return folded, jobs


def fold_store(
    store: str | Path, name: str | None = None, *, need_study: bool = False
) -> tuple[Folded | None, dict[str, Any]]:
    """As ``fold_journal``; without a study where none is named and the store has nothing but recurring jobs."""
    opened = open_store(store, write=False)
    try:
        jobs = jobs_of(opened)
        if name is None and not need_study and jobs and not opened.studies():
            return None, jobs
        entry = opened.find(name)
        folded = Folded(entry.name, Goal.from_json(entry.spec.get("goal", ())), entry.spec, entry.created_s)
        try:
            folded.read(opened, entry)
        except StoreCorrupt as error:
            folded.problem = str(error)
        return folded, jobs
    finally:
        opened.close()


def jobs_of(
    store: Store, chunks: MutableMapping[tuple[str, Any, int], list[Any]] | None = None
) -> dict[str, Any]:
    """By name, what the store keeps of its recurring jobs; one that can't be read leaves the others alone.

    Args:
        store: Open.
        chunks: Keeps what was read of archived records for the next time.
    """
    kept = {} if chunks is None else chunks
    jobs: dict[str, Any] = {}
    for key in store.keys(PREFIX):
        name = key[len(PREFIX) :]
        if "/" in name:  # a chunk
            continue
        try:
            jobs[name] = whole(store, key, kept)
        except StoreCorrupt as error:
            jobs[name] = Unreadable(str(error))
        except (KeyError, TypeError, ValueError) as error:
            jobs[name] = Unreadable(_foreign(name, error))
    return jobs


def told_of(name: str, value: Any, now_s: float | None = None) -> tuple[dict[str, Any], list[Figure]]:
    """The view of a recurring job at a time, by default now, and its figures.

    Raises:
        StoreCorrupt: What the store keeps under its name is no recurring job's.
    """
    if isinstance(value, Unreadable):
        raise StoreCorrupt(value.reason)
    value = {} if value is None else value
    if not isinstance(value, Mapping) or not isinstance(value.get("records", []), list):
        raise StoreCorrupt(_foreign(name, None))
    try:
        data = views.recurring(name, value, now_s=time.time() if now_s is None else now_s)
        return data, views.recurring_figures(data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidInput) as error:
        raise StoreCorrupt(_foreign(name, error)) from error


def _foreign(name: str, error: Exception | None) -> str:
    why = "" if error is None else f" ({type(error).__name__}: {error})"
    return (
        f"What the store keeps under {PREFIX + name!r} is not the history of a recurring job that this version "
        f"can read{why}."
    )
