"""Reading a study for the views: its journal folded, and the store's recurring jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.errors import StoreCorrupt
from penstock.goal import Goal
from penstock.report.views import Folded
from penstock.report.views._recurring import PREFIX
from penstock.store import open_store
from penstock.store._chunks import all_whole


def fold_journal(store: str | Path, name: str | None = None) -> tuple[Folded, dict[str, Any]]:
    """A study folded for the views, and the store's recurring jobs; a damaged tail is said, not raised."""
    opened = open_store(store, write=False)
    try:
        entry = opened.find(name)
        folded = Folded(entry.name, Goal.from_json(entry.spec["goal"]), entry.spec, entry.created_s)
        try:
            for _, event in opened.read(entry.id):
                folded.apply(event)
        except StoreCorrupt as error:
            folded.problem = str(error)
        return folded, all_whole(opened, PREFIX)
    finally:
        opened.close()
