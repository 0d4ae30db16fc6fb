"""``penstock upgrade``: a store that an older Penstock wrote, in this one's format."""

from __future__ import annotations

from typing import Annotated

import typer


def upgrade(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A path or a postgresql:// URL.")],
) -> None:
    """Bring a store of an older Penstock to this one's format: all of it, or nothing. Back it up first."""
    from penstock.store import open_store
    from penstock.store import upgrade as do

    do(store)
    with open_store(store, write=False) as opened:
        print(f"{opened.url} is in the present format; it holds {len(opened.studies())} studies.")
