"""The tables, their version, and how an older version becomes a newer one."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.schema import CreateTable

from penstock.core.errors import StoreCorrupt, StoreError

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


def _key_records(connection: sa.Connection) -> None:
    """Format 0 to 1: records get a key of their own, in place of study and number."""
    study, seq = "CAST(study AS BIGINT)", "CAST(seq AS BIGINT)"
    key = f"{study} * {1 << SEQ_BITS} + {seq}"
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("ALTER TABLE penstock_events RENAME TO penstock_events_0")
        events.create(connection)
        columns = "study, seq, kind, trial, time_s, data, crc"
        connection.exec_driver_sql(
            f"INSERT INTO penstock_events (id, {columns}) SELECT {key}, {columns} FROM penstock_events_0 "
            "ORDER BY study, seq"
        )
        connection.exec_driver_sql("DROP TABLE penstock_events_0")
        return
    for change in (
        "ADD COLUMN id BIGINT",
        "DROP CONSTRAINT penstock_events_pkey",
    ):
        connection.exec_driver_sql(f"ALTER TABLE penstock_events {change}")
    connection.exec_driver_sql(f"UPDATE penstock_events SET id = {key}")
    connection.exec_driver_sql("ALTER TABLE penstock_events ADD PRIMARY KEY (id)")


UPGRADES: dict[int, Callable[[sa.Connection], None]] = {0: _key_records}
"""From a version to the next one. Each runs in the transaction that opens the store for writing."""


def version_of(connection: sa.Connection) -> int | None:
    """The schema's version; None where there is no Penstock store.

    The first tables said 1 as well, and had no key of their own for records: they count as 0.
    """
    inspector = sa.inspect(connection)
    if not inspector.has_table(meta.name):
        return None
    value = connection.execute(sa.select(meta.c.value).where(meta.c.name == "version")).scalar()
    if value is None:  # it is written together with the table
        raise StoreCorrupt(
            "The store has lost the number of its format: it is damaged. Take it from a backup."
        )
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise StoreCorrupt(
            f"The store's format is said to be {value!r}, which is no number. Take it from a backup."
        )
    version = int(value)
    if version == 1 and inspector.has_table(events.name):
        names = {column["name"] for column in inspector.get_columns(events.name)}
        return version if "id" in names else 0
    return version


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
            "Back it up, then: penstock upgrade STORE"
        )


_creations: dict[str, list[str]] = {}


def _create(connection: sa.Connection) -> None:
    """Make the tables that are not there yet. SQLAlchemy takes milliseconds to put it in words, so those are kept."""
    dialect = connection.dialect
    if dialect.name not in _creations:
        made = [CreateTable(table, if_not_exists=True) for table in metadata.sorted_tables]
        _creations[dialect.name] = [str(each.compile(dialect=dialect)) for each in made]
    for statement in _creations[dialect.name]:
        connection.exec_driver_sql(statement)


def prepare(connection: sa.Connection, url: str) -> None:
    """Create the tables, or upgrade them, inside a transaction that keeps others out."""
    if version_of(connection) is None:
        _create(connection)
        connection.execute(meta.insert().values(name="version", value=str(VERSION)))
        return
    check(connection, url, write=True)
    for version in range(int(version_of(connection) or 0), VERSION):
        UPGRADES[version](connection)
        connection.execute(meta.update().where(meta.c.name == "version").values(value=str(version + 1)))
