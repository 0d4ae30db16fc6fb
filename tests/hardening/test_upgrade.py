"""Journals of other versions: the first tables' one opens and its study goes on; a newer one is refused untouched.

``journals/format-0.journal`` was written by the first store there was (records keyed by study and number) and the first
study loop, in the middle of a study.
"""

import hashlib
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as pk
from penstock.cli._app import app
from penstock.core.errors import StoreCorrupt, StoreError
from penstock.store import open_store, upgrade

JOURNALS = Path(__file__).parent / "journals"
COLUMNS = "study, seq, kind, trial, time_s, data, crc"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copy(JOURNALS / "format-0.journal", tmp_path / "study.db"))


def outcome(study):
    return [(t.id, t.config, t.status, t.epoch, dict(t.metrics)) for t in study.trials]


def version(path, said=None):
    with closing(sqlite3.connect(path)) as raw, raw:
        if said is not None:
            raw.execute("UPDATE penstock_meta SET value = ? WHERE name = 'version'", (said,))
        return raw.execute("SELECT value FROM penstock_meta WHERE name = 'version'").fetchone()[0]


def test_the_first_journal_opens_and_its_study_goes_on(old, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(JOURNALS))  # its pickle names old_work.train
    before = old.read_bytes()
    with pytest.raises(StoreError, match=r"older format 0.*penstock upgrade"):
        pk.Study.load(old)
    assert old.read_bytes() == before
    with closing(sqlite3.connect(old)) as raw:
        records = raw.execute(f"SELECT {COLUMNS} FROM penstock_events ORDER BY study, seq").fetchall()
    done = CliRunner().invoke(app, ["upgrade", str(old)])
    assert done.exit_code == 0, done.output
    assert "1 studies" in done.output
    with closing(sqlite3.connect(old)) as raw:
        kept = raw.execute(f"SELECT {COLUMNS} FROM penstock_events ORDER BY id").fetchall()
    assert kept == records
    assert version(old) == "1"
    with open_store(old, write=False) as store:
        entry = store.find("old")
        assert store.tail_ok(entry.id) == entry.events == len(records) == 58  # every checksum fits
        assert store.get("power-profile/x") == {"w": 1.5}
    loaded = pk.Study.load(old, budget=pk.Budget(epochs=1000))
    assert 0 < loaded.state.epochs < 21
    loaded.run()
    import old_work

    fresh = pk.Study(
        old_work.train,
        pk.Space(x=pk.Float(0.01, 0.5)),
        minimize="loss",
        scheduler=pk.Halving(max_epochs=9, trials=9),
        sampler=pk.Random(),
        executor=pk.Simulated(devices=2),
        store=tmp_path / "fresh.db",
        seed=7,
    ).run()
    assert outcome(loaded) == outcome(fresh)


def test_upgrading_again_changes_nothing(old):
    upgrade(old)
    once = hashlib.sha256(old.read_bytes()).digest()
    upgrade(old)
    assert hashlib.sha256(old.read_bytes()).digest() == once
    with pytest.raises(StoreError, match="no store"):
        upgrade(old.with_name("typo.db"))
    assert not old.with_name("typo.db").exists()


def test_the_first_tables_in_postgresql(postgres_url, postgres):
    """The same records, keyed as the first store keyed them there."""
    from penstock.testing.stores import numbered

    schema = postgres_url.rpartition("%3D")[2]
    with open_store(postgres_url, write=True) as store:
        study = store.create("first", {}, b"work").id
        store.lock(study)
        store.append(study, numbered(0, 20))
    postgres.sql(
        f"SET search_path = {schema}; ALTER TABLE penstock_events DROP CONSTRAINT penstock_events_pkey; "
        "ALTER TABLE penstock_events DROP COLUMN id; ALTER TABLE penstock_events ADD PRIMARY KEY (study, seq)"
    )
    with pytest.raises(StoreError, match="older format 0"):
        open_store(postgres_url, write=False)
    upgrade(postgres_url)
    with open_store(postgres_url, write=True) as store:
        store.lock(study)
        store.append(study, numbered(20, 25))
        assert [event for _, event in store.read(study)] == numbered(0, 25)


@pytest.mark.parametrize("said", ["2", "999"])
def test_a_newer_journal_is_refused_untouched(old, said):
    upgrade(old)
    version(old, said)
    before = old.read_bytes()
    for what in (lambda: upgrade(old), lambda: open_store(old, write=False), lambda: pk.Study.load(old)):
        with pytest.raises(StoreError, match=rf"newer Penstock.*{said}.*Upgrade Penstock"):
            what()
    assert old.read_bytes() == before


@pytest.mark.parametrize("said", ["one", "", "-1", "1.0", "\u00b2", "9" * 5000])
def test_a_format_that_is_no_number_is_said(old, said):
    version(old, said)
    for write in (False, True):
        with pytest.raises(StoreCorrupt, match="no number"):
            open_store(old, write=write)
