"""The tables, their version, and how an older version becomes a newer one."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from penstock.core.errors import StoreError

VERSION = 1

metadata = sa.MetaData()

# The prefix lets a store live in a PostgreSQL database beside other tables.
meta = sa.Table(
    "penstock_meta",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts up in INTEGER alone

studies = sa.Table(
    "penstock_studies",
    metadata,
    sa.Column("id", _id, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("work", sa.LargeBinary),
    sqlite_autoincrement=True,
)

# The number and checksum of each study's last record: counts in O(1), shows a lost tail, and lets an append say
# "after record n" so that two writers can't interleave and a repeated batch can't land twice.
heads = sa.Table(
    "penstock_heads",
    metadata,
    sa.Column("study", _id, primary_key=True, autoincrement=False),
    sa.Column("events", sa.BigInteger, nullable=False),
    sa.Column("crc", sa.BigInteger, nullable=False),
)

SEQ_BITS = 40

# Clustered by a key made of study and number: one tree in journal order, whose data is in its leaves alone. So an
# append touches the last page, and a lost inner page of an SQLite file takes no record with it (see _pages).
events = sa.Table(
    "penstock_events",
    metadata,
    sa.Column("id", _id, primary_key=True, autoincrement=False),
    sa.Column("study", _id, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("trial", sa.BigInteger),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("data", sa.Text, nullable=False),
    sa.Column("crc", sa.BigInteger, nullable=False),
)


def event_id(study: int, seq: int) -> int:
    """The key of a record."""
    return (study << SEQ_BITS) + seq


# What `cut` set aside. Any content: these records may be damaged.
cut_records = sa.Table(
    "penstock_cut_records",
    metadata,
    sa.Column("id", _id, primary_key=True),
    sa.Column("cut_s", sa.Double, nullable=False),
    sa.Column("study", _id, nullable=False),
    sa.Column("seq", sa.BigInteger),
    sa.Column("kind", sa.Text),
    sa.Column("trial", sa.BigInteger),
    sa.Column("time_s", sa.Double),
    sa.Column("data", sa.Text),
    sa.Column("crc", sa.BigInteger),
)

kv = sa.Table(
    "penstock_kv",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

UPGRADES: dict[int, Callable[[sa.Connection], None]] = {}
"""From a version to the next one. Each runs in the transaction that opens the store for writing."""


def version_of(connection: sa.Connection) -> int | None:
    """The schema's version; None where there is no Penstock store."""
    if not sa.inspect(connection).has_table(meta.name):
        return None
    value = connection.execute(sa.select(meta.c.value).where(meta.c.name == "version")).scalar()
    return None if value is None else int(value)


def check(connection: sa.Connection, url: str, *, write: bool) -> None:
    """Refuse what this Penstock can't use.

    Raises:
        StoreError: Not a store, of a newer version, or of an older one that reading alone can't upgrade.
    """
    version = version_of(connection)
    if version is None:
        raise StoreError(
            f"{url} holds no Penstock store. Give the store of a study that was started, or start one there."
        )
    if version > VERSION:
        raise StoreError(
            f"{url} was written by a newer Penstock: its format is {version}, this one knows up to {VERSION}. "
            "Upgrade Penstock to use it; nothing was changed."
        )
    if version < VERSION and not write:
        raise StoreError(
            f"{url} has the older format {version}, this Penstock reads {VERSION}. "
            "Back it up and open it once for writing (e.g. resume its study) to upgrade it."
        )


def prepare(connection: sa.Connection, url: str) -> None:
    """Create the tables, or upgrade them, inside a transaction that keeps others out."""
    if version_of(connection) is None:
        metadata.create_all(connection)
        connection.execute(meta.insert().values(name="version", value=str(VERSION)))
        return
    check(connection, url, write=True)
    for version in range(int(version_of(connection) or 0), VERSION):
        UPGRADES[version](connection)
        connection.execute(meta.update().where(meta.c.name == "version").values(value=str(version + 1)))
