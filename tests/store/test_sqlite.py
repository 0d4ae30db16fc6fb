"""What is particular to SQLite: paths, files that aren't stores, full and read-only disks, damaged files."""

import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.core import Event, Noted
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreError, StoreUnwritable
from penstock.store import open_store, salvage
from penstock.testing.events import every_event
from penstock.testing.stores import forked, numbered


def made(path: Path, events: int = 10) -> int:
    """A closed store with one study; returns its key."""
    with open_store(path, write=True) as store:
        study = store.create("first", {}, b"work").id
        store.lock(study)
        store.append(study, numbered(0, events))
    return study


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# Paths


def test_ways_to_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = made(Path("study.db"))
    for name in (
        "study.db",
        Path("study.db"),
        tmp_path / "study.db",
        "sqlite:///study.db",
        f"sqlite:///{tmp_path}/study.db",
    ):
        with open_store(name, write=False) as store:
            assert len(list(store.read(study))) == 10
            assert store.files is not None
            assert store.files.resolve() == tmp_path / "study.db.files"
            assert not store.files.exists()
            with open_store(store.url, write=False) as again:
                assert again.find().events == 10


@pytest.mark.parametrize("name", ["a?b#c%20 d.db", "\u00e9'\".db", "no-suffix", "x&mode=rw"])
def test_awkward_names(tmp_path: Path, name: str) -> None:
    made(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with open_store(tmp_path / name, write=False) as store:
        assert store.find().events == 10
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_in_memory() -> None:
    with pytest.raises(InvalidInput, match="memory"):
        open_store(None, write=False)
    with open_store(None, write=True) as store, open_store("sqlite://", write=True) as other:
        study = store.create("first", {}, None).id
        store.lock(study)
        store.append(study, every_event())
        assert [event for _, event in store.read(study)] == every_event()
        assert store.files is None
        assert store.update("n", lambda old: 1) == store.get("n") == 1
        assert other.studies() == []


@pytest.mark.parametrize(
    "name",
    ["postgresql:ann:secret@host", "postgres:/ann:secret@host/db", Path("postgresql://ann:secret@host/db")],
)
def test_a_url_with_too_few_slashes_is_no_file(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a URL that was made a Path: its journal would be kept in a file of that name, password and all."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="no path") as caught:
        open_store(name, write=True)
    assert "secret" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_unknown_schemes() -> None:
    with pytest.raises(InvalidInput, match=r"'mysql'.*postgresql://"):
        open_store("mysql://user:secret@host/db", write=True)
    with pytest.raises(InvalidInput, match="sqlite:////absolute"):
        open_store("sqlite://host/db", write=True)
    for what in (False, 3, b"study.db"):
        with pytest.raises(InvalidInput, match=f"path or URL, got {what!r}"):
            open_store(what, write=False)


@pytest.mark.parametrize("write", [False, True])
def test_what_is_not_a_store(tmp_path: Path, write: bool) -> None:
    (tmp_path / "bytes").write_bytes(os.urandom(5000))
    (tmp_path / "text").write_text("SQLite format?")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other, other:
        other.execute("CREATE TABLE theirs (x)")
    (tmp_path / "cut").write_bytes((tmp_path / "other.db").read_bytes()[:50])
    (tmp_path / "folder").mkdir()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for name in ("bytes", "text", "other.db", "cut", "folder"):
        with pytest.raises(StoreError, match=name):
            open_store(tmp_path / name, write=write)
    with pytest.raises(StoreError, match=r"missing.*mkdir"):
        open_store(tmp_path / "missing" / "study.db", write=write)
    with pytest.raises(StoreError, match=r"~ stands for a home.*expanduser\('~/nowhere/study.db'\)"):
        open_store("~/nowhere/study.db", write=write)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert after == before


def test_empty_files(tmp_path: Path) -> None:
    """A file that was made and not yet written becomes a store, but not by reading it."""
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(StoreError, match="not a Penstock store"):
        open_store(path, write=False)
    assert path.stat().st_size == 0
    made(path)
    # and so does a database whose maker was killed before its first commit
    with closing(sqlite3.connect(tmp_path / "wal")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert (tmp_path / "wal").stat().st_size > 0
    made(tmp_path / "wal")


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    study = made(tmp_path / "study.db")
    before = digest(tmp_path)
    assert list(before) == ["study.db"]
    with open_store(tmp_path / "study.db", write=False) as store:
        reading = store.read(study)
        next(reading)
        assert digest(tmp_path) == before
    assert digest(tmp_path) == before


def test_a_reader_survives_writers_that_come_and_go(tmp_path: Path) -> None:
    """The file is read as immutable while nobody writes: a reader must notice when somebody does."""
    path = tmp_path / "study.db"
    study = made(path, 0)
    with open_store(path, write=False) as reader:
        for i in range(5):
            with open_store(path, write=True) as writer:
                writer.lock(study)
                writer.append(study, numbered(2 * i, 2 * i + 1))
                assert len(list(reader.read(study))) == 2 * i + 1
                writer.append(study, numbered(2 * i + 1, 2 * i + 2))
                assert len(list(reader.read(study))) == 2 * i + 2
            assert [event for _, event in reader.read(study)] == numbered(0, 2 * i + 2)


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """An immutable read that a writer crossed may be torn: its result isn't used."""
    from penstock.store._sqlite import _Reader

    path = tmp_path / "study.db"
    study = made(path)
    results: list[int] = []

    def query(connection: Any) -> int:
        results.append(connection.exec_driver_sql("SELECT events FROM penstock_heads").scalar())
        if len(results) == 1:
            with open_store(path, write=True) as writer:
                writer.lock(study)
                writer.append(study, numbered(10, 15))
        elif len(results) == 2:
            raise ValueError("torn")
        return results[-1]

    with pytest.raises(ValueError, match="torn"):
        _Reader(path).read(query)
    assert results == [10, 15]
    assert _Reader(path).read(query) == 15


def test_commits_are_synced(tmp_path: Path) -> None:
    """Durable against a power cut: WAL with synchronous FULL, as SQLite's manual asks for."""
    with open_store(tmp_path / "study.db", write=True) as store:
        connection = store._backend._connection  # type: ignore[attr-defined]
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_the_wal_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is always in the middle of a read doesn't keep the writer from checkpoints."""
    from penstock.store import _sqlite

    monkeypatch.setattr(_sqlite, "_WAL_PAGES", 100)
    path = tmp_path / "study.db"
    with open_store(path, write=True) as writer, open_store(path, write=False) as reader:
        study = writer.create("first", {}, None).id
        writer.lock(study)
        writer.append(study, numbered(0, 10))
        readings = []
        for i in range(60):
            reading = reader.read(study)
            next(reading)
            readings.append(reading)
            writer.append(study, numbered(700 * i, 700 * i + 700))
        assert path.stat().st_size > 2e6
        assert (tmp_path / "study.db-wal").stat().st_size < 1e6


def test_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older format is upgraded step by step when opened for writing, in one transaction."""
    from penstock.store import _schema

    study = made(tmp_path / "study.db")
    steps: list[int] = []

    def step(version: int, fails: bool = False) -> None:
        def run(connection: object) -> None:
            connection.exec_driver_sql(f"CREATE TABLE penstock_new{version} (x INTEGER)")  # type: ignore[attr-defined]
            if fails:
                raise RuntimeError("half-way")
            steps.append(version)

        monkeypatch.setitem(_schema.UPGRADES, version, run)

    def tables() -> int:
        with closing(sqlite3.connect(tmp_path / "study.db")) as raw:
            return raw.execute(
                "SELECT count(*) FROM sqlite_master WHERE name LIKE 'penstock_new%'"
            ).fetchone()[0]

    monkeypatch.setattr(_schema, "VERSION", 3)
    with pytest.raises(StoreError, match="older format 1"):
        open_store(tmp_path / "study.db", write=False)
    step(1)
    step(2, fails=True)
    with pytest.raises(RuntimeError, match="half-way"):
        open_store(tmp_path / "study.db", write=True)
    assert tables() == 0
    step(2)
    steps.clear()
    open_store(tmp_path / "study.db", write=True).close()
    assert steps == [1, 2]
    assert tables() == 2
    with open_store(tmp_path / "study.db", write=False) as store:
        assert len(list(store.read(study))) == 10


# Disks


_FILL = """
import os, resource, signal, sys
from penstock.core.errors import StoreUnwritable
from penstock.store import open_store
from penstock.testing.stores import numbered

path, limit = sys.argv[1], int(sys.argv[2])
with open_store(path, write=True) as store:
    study = store.create("first", {}, None).id
    store.lock(study)
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    else:
        ballast = open(os.path.join(os.path.dirname(path), "ballast"), "wb", buffering=0)
        free = os.statvfs(path)
        ballast.write(bytes(max(0, free.f_bavail * free.f_frsize - 400_000)))
    written = 0
    try:
        while written < 10**6:
            store.append(study, numbered(written, written + 100))
            written += 100
        sys.exit("the disk is never full")
    except StoreUnwritable as error:
        assert path in str(error) and "space" in str(error) and "intact" in str(error), error
    for _ in range(2):
        try:
            store.append(study, numbered(written, written + 20_000))
            sys.exit("still full")
        except StoreUnwritable:
            pass
    assert [event for _, event in store.read(study)] == numbered(0, written)
    with open_store(path, write=False) as reader:
        assert [event for _, event in reader.read(study)] == numbered(0, written)
    print(written)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        ballast.close()
        os.unlink(ballast.name)
    store.append(study, numbered(written, written + 100))
    assert [event for _, event in store.read(study)] == numbered(0, written + 100)
with open_store(path, write=False) as reader:
    assert [event for _, event in reader.read(study)] == numbered(0, written + 100)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=2m", "penstock-test", str(folder)]
    if (
        mount is None
        or os.geteuid() != 0
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a small tmpfs needs root; the file size limit is tested instead")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def run_script(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.faults
def test_disk_full(small_disk: Path) -> None:
    assert int(run_script(_FILL, str(small_disk / "study.db"), "0")) >= 100


@pytest.mark.faults
def test_file_size_limit(tmp_path: Path) -> None:
    assert int(run_script(_FILL, str(tmp_path / "study.db"), "500000")) >= 100


@pytest.mark.faults
@pytest.mark.parametrize("what", ["file", "folder", "both"])
def test_read_only(what: str) -> None:
    """By a user who may not write; a root that runs the tests becomes nobody for it."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "study.db"
    study = made(path)

    def body() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with open_store(path, write=False) as store:
            assert [event for _, event in store.read(study)] == numbered(0, 10)
        with pytest.raises(StoreUnwritable, match=rf"{path}.*writable"):
            open_store(path, write=True)
        with open_store(path, write=False) as store:
            assert [event for _, event in store.read(study)] == numbered(0, 10)

    try:
        folder.chmod(0o555 if what in ("folder", "both") else 0o777)
        path.chmod(0o444 if what in ("file", "both") else 0o666)
        before = digest(folder)
        with forked(body) as child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert digest(folder) == before
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


# Damaged files


def kept_open_by_a_killed_writer(path: Path) -> int:
    """A store whose last records are in the WAL alone; returns its study."""
    told, tell = os.pipe()

    def body() -> None:
        store = open_store(path, write=True)
        study = store.create("first", {}, None).id
        store.lock(study)
        for i in range(10):
            store.append(study, numbered(10 * i, 10 * i + 10))
        os.write(tell, str(study).encode())
        os.kill(os.getpid(), 9)

    with forked(body):
        study = int(os.read(told, 20))
    os.close(told)
    os.close(tell)
    return study


@pytest.mark.faults
def test_wal_of_a_killed_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = kept_open_by_a_killed_writer(path)
    assert (tmp_path / "study.db-wal").stat().st_size
    with open_store(path, write=False) as store:
        assert [event for _, event in store.read(study)] == numbered(0, 100)


@pytest.mark.faults
@pytest.mark.parametrize("lost", [1, 3000, 20_000])
def test_torn_wal(tmp_path: Path, lost: int) -> None:
    """A WAL whose end never reached the disk: whole batches remain, and the study goes on."""
    path = tmp_path / "study.db"
    study = kept_open_by_a_killed_writer(path)
    wal = tmp_path / "study.db-wal"
    os.truncate(wal, wal.stat().st_size - lost)
    (tmp_path / "study.db-shm").unlink()
    with open_store(path, write=True) as store:
        store.lock(study)
        read = [event for _, event in store.read(study)]
        assert read == numbered(0, len(read))
        assert len(read) % 10 == 0
        assert len(read) < 100
        store.append(study, numbered(len(read), 120))
        assert [event for _, event in store.read(study)] == numbered(0, 120)


@pytest.mark.faults
def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = made(path, 6000)
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE penstock_events SET data = CAST(x'7bff' AS TEXT) WHERE seq = 5555")
    with open_store(path, write=True) as store:
        with pytest.raises(StoreCorrupt, match="Record 5555 of study"):
            list(store.read(study))
        assert store.tail_ok(study) == 5554
        store.lock(study)
        assert store.cut(study, keep=5554) == 446
        assert [event for _, event in store.read(study)] == numbered(0, 5554)


def records_in(data: bytes) -> int:
    """How many records, from the first on, have their text somewhere in the bytes."""
    count = 0
    while f'"x":{count}.0}}'.encode() in data:
        count += 1
    return count


@pytest.mark.faults
@pytest.mark.parametrize("how", ["garbage page", "cut in half", "last pages lost"])
def test_damaged_file(tmp_path: Path, how: str) -> None:
    """Damage to the file itself is reported with the record, and every record before it can be copied."""
    path = tmp_path / "study.db"
    study = made(path, 5000)
    with open_store(path, write=True) as store:
        store.put("profile", [1, 2])
    data = bytearray(path.read_bytes())
    if how == "garbage page":
        start = data.rindex(b'"x":4000.0') // 4096 * 4096
        data[start : start + 4096] = b"\xa5" * 4096
    elif how == "cut in half":
        data = data[: len(data) // 4096 // 2 * 4096]  # takes a page with it that points to all others
    else:
        data = data[: -8 * 4096]
    path.write_bytes(data)
    there = records_in(data)
    assert 1000 < there < 5000
    with open_store(path, write=False) as store:
        good = store.tail_ok(study)
        if how != "cut in half":
            assert good == there
        with pytest.raises(StoreCorrupt, match=f"Record {good + 1} of study {study}"):
            list(store.read(study))
    assert salvage(path, tmp_path / "new.db") == {"first": there}
    with open_store(tmp_path / "new.db", write=True) as new:
        entry = new.find("first")
        assert [event for _, event in new.read(entry.id)] == numbered(0, there)
        assert new.work(entry.id) == b"work"
        assert new.get("profile") == [1, 2]
        new.lock(entry.id)
        new.append(entry.id, numbered(there, there + 1))
    assert path.read_bytes() == data


@pytest.mark.faults
def test_what_can_not_be_salvaged_says_so(tmp_path: Path) -> None:
    """Nobody is sent round in circles, and a store of which little is left is not taken for one of somebody else's."""
    path, cut, new = tmp_path / "study.db", tmp_path / "cut.db", tmp_path / "new.db"
    made(path, 50)
    data = path.read_bytes()

    def salvaged(length: int) -> dict[str, int] | str:
        cut.write_bytes(data[:length])
        new.unlink(missing_ok=True)
        try:
            return salvage(cut, new)
        except StoreCorrupt as error:
            return str(error)

    lost = 0
    for length in range(4096, len(data), 2048):
        told = salvaged(length)
        if isinstance(told, str):
            lost += 1
            assert "Not even the list of studies" in told
            assert not new.exists()
            with pytest.raises(StoreCorrupt, match="damaged"):
                open_store(cut, write=True).studies()
    assert lost


@pytest.mark.faults
def test_pages_tell_what_sqlite_tells(tmp_path: Path) -> None:
    """Searched page by page, a sound file gives the rows that SQLite gives, long and odd ones included."""
    from penstock.store._pages import rows_in

    path = tmp_path / "study.db"
    with open_store(path, write=True) as store:
        study = store.create("first", {}, None).id
        store.lock(study)
        store.append(study, every_event())
        for length in (400, *range(3900, 4100), 5000, 100_000):
            store.append(study, [Noted(1e-3, "long", {"text": "y" * length}, 2**40)])
        store.append(study, numbered(0, 3000))
    with closing(sqlite3.connect(path)) as raw:
        expected = raw.execute(
            "SELECT NULL, study, seq, kind, trial, time_s, data, crc FROM penstock_events ORDER BY seq"
        ).fetchall()
    found = {row[2]: row for row in rows_in(path, 8)}
    assert [found[seq] for seq in sorted(found)] == expected


@pytest.mark.faults
def test_flipped_bits(tmp_path: Path) -> None:
    """A flipped bit in a record is always found; anywhere in the file it never gives wrong events."""
    path = tmp_path / "study.db"
    study = made(path, 200)
    whole = path.read_bytes()
    rng = random.Random(3)

    def read(at: int) -> int | None:
        """How many events come before an error, None without one."""
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        events: list[Event] = []
        try:
            with open_store(path, write=False) as store:
                events.extend(event for _, event in store.read(study))
        except (StoreError, InvalidInput):  # the latter where the study's own row is gone
            assert events == numbered(0, len(events))
            return len(events)
        assert events == numbered(0, 200)
        return None

    for _ in range(60):
        read(rng.randrange(100, len(whole)))
    for _ in range(60):
        record = rng.randrange(200)
        start = whole.index(f'{{"e":1,"m":{{"x":{record}.0}}}}'.encode())
        assert read(start + rng.randrange(16)) == record


def test_errors_are_penstocks(tmp_path: Path) -> None:
    """A store that vanishes while it is open for reading is an error in words."""
    path = tmp_path / "study.db"
    study = made(path)
    with open_store(path, write=False) as store:
        path.unlink()
        with pytest.raises(StoreError, match=r"study\.db"):
            list(store.read(study))
    assert not path.exists()


def test_a_name_that_no_file_can_have_is_said(tmp_path):
    with pytest.raises(StoreError, match=r"can't be looked at: File name too long\. Give another path"):
        open_store(tmp_path / f"{'a' * 300}.db", write=True)
