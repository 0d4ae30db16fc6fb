"""The contract of stores as tests: an implementation subclasses ``StoreSuite`` and runs it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core import Event, Noted, Reported, Started
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreError, StoreLocked
from penstock.store import Store, open_store
from penstock.testing.events import events as any_event
from penstock.testing.events import every_event

_HOLD = """
import sys, time
from penstock.store import open_store
store = open_store(sys.argv[1], write=True)
store.lock(int(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


def numbered(start: int, stop: int) -> list[Event]:
    """Reports that tell their own number."""
    return [Reported(float(i), i, 1, {"x": float(i)}) for i in range(start, stop)]


@contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """Run ``body`` in a forked process, which opens stores of its own; kills it at the end. Yields its id."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    try:
        yield child
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


class StoreSuite:
    """What every store does. A subclass, named ``Test...``, has these fixtures.

    ``url``: where an empty store can be made and opened by several processes. ``sql``: a function that runs a
    statement on its database behind the store's back.
    """

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        """An open store with one study, locked."""
        with open_store(url, write=True) as store:
            store.lock(store.create("first", {"seed": 1}, b"work").id)
            yield store

    @pytest.fixture
    def study(self, store: Store) -> int:
        """The study's key."""
        return store.find("first").id

    # Studies

    def test_reading_needs_a_store(self, url: str) -> None:
        """Opening for reading makes no store."""
        for _ in range(2):
            with pytest.raises(StoreError):
                open_store(url, write=False)

    def test_studies(self, store: Store, url: str) -> None:
        """Studies come back as they were made, from this store and from another."""
        spec = {"space": {"lr": [1e-4, 0.1]}, "text": "\u2603'\"", "none": None}
        second = store.create("second 'quoted' \u2603", spec, bytes(range(256)))
        third = store.create("third", {}, None)
        for each in (store, open_store(url, write=False)):
            assert [entry.name for entry in each.studies()] == ["first", second.name, "third"]
            assert each.names() == {"first", second.name, "third"}
            assert each.find() == third
            assert each.find(second.name) == second
            assert each.find(second.name).spec == spec
            assert each.work(second.id) == bytes(range(256))
            assert each.work(third.id) is None
            if each is not store:
                each.close()

    def test_a_name_is_taken_once(self, store: Store) -> None:
        """A second study of a name is refused, and the first stays."""
        with pytest.raises(InvalidInput, match="'first'"):
            store.create("first", {"other": 1}, None)
        assert store.find("first").spec == {"seed": 1}
        assert len(store.studies()) == 1

    def test_unknown_studies(self, store: Store, study: int) -> None:
        """An unknown name or key is an error that lists what there is."""
        with pytest.raises(InvalidInput, match=r"'nope'.*'first'"):
            store.find("nope")
        for call in (store.work, store.lock, lambda key: list(store.read(key))):
            with pytest.raises(InvalidInput, match="first"):
                call(study + 1000)
        with pytest.raises(InvalidInput, match="name"):
            store.create("", {}, None)

    def test_empty_store(self, url: str) -> None:
        """A store without studies can be opened and says that it has none."""
        open_store(url, write=True).close()
        with open_store(url, write=False) as store:
            assert store.studies() == []
            with pytest.raises(InvalidInput, match="no study"):
                store.find()

    # The journal

    def test_every_event_round_trips(self, store: Store, study: int, url: str) -> None:
        """Each event reads back equal, here, elsewhere, and after the store was closed."""
        events = every_event()
        store.append(study, events)
        expected = list(enumerate(events, 1))
        assert list(store.read(study)) == expected
        with open_store(url, write=False) as other:
            assert list(other.read(study)) == expected
        store.close()
        with open_store(url, write=False) as other:
            assert list(other.read(study)) == expected
            assert other.find().events == len(events)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(batches=st.lists(st.lists(any_event, max_size=4), max_size=4))
    def test_any_events_round_trip(self, store: Store, study: int, batches: list[list[Event]]) -> None:
        """Any events in any batches read back, from any point on."""
        before = store.find().events
        for batch in batches:
            store.append(study, batch)
        events = [event for batch in batches for event in batch]
        read = list(store.read(study, after=before))
        assert read == list(enumerate(events, before + 1))
        assert store.find().events == before + len(events)

    def test_read_after(self, store: Store, study: int) -> None:
        """``after`` skips exactly so many, also past the pages that a store may read in."""
        events = numbered(0, 9000)
        store.append(study, events)
        for after in (0, 1, 4095, 4096, 4097, 8999, 9000, 9001):
            read = list(store.read(study, after=after))
            assert read == list(enumerate(events, 1))[after:]

    def test_a_read_ends_where_it_began(self, store: Store, study: int) -> None:
        """A read ends at the last event there was when it began, whatever is written meanwhile."""
        store.append(study, numbered(0, 5))
        reading = store.read(study)
        next(reading)
        store.append(study, numbered(5, 10))
        assert [seq for seq, _ in reading] == [2, 3, 4, 5]
        assert [seq for seq, _ in store.read(study, after=5)] == [6, 7, 8, 9, 10]

    def test_studies_are_apart(self, store: Store, study: int) -> None:
        """Two studies in one store have journals of their own."""
        other = store.create("other", {}, None).id
        store.lock(other)
        for i in range(5):
            store.append(study, numbered(i, i + 1))
            store.append(other, numbered(100 + 2 * i, 102 + 2 * i))
        assert [event for _, event in store.read(study)] == numbered(0, 5)
        assert [event for _, event in store.read(other)] == numbered(100, 110)

    def test_all_or_none(self, store: Store, study: int) -> None:
        """A batch with an event that can't be kept leaves nothing, and the next one goes on."""
        store.append(study, numbered(0, 2))
        bad: list[Event] = [*numbered(2, 4), Noted(0.0, "topic", {"x": object()})]
        with pytest.raises(InvalidInput, match="object object"):
            store.append(study, bad)
        with pytest.raises(InvalidInput, match="time"):
            store.append(study, [*numbered(2, 4), Started(float("nan"), 1)])
        store.append(study, [])
        store.append(study, numbered(2, 3))
        assert [event for _, event in store.read(study)] == numbered(0, 3)

    def test_large_batch_and_large_event(self, store: Store, study: int) -> None:
        """A traceback of a megabyte and a batch of thousands are nothing special."""
        large: list[Event] = [Noted(0.0, "log", {"text": "x\u00e9\n" * 300_000})]
        store.append(study, large)
        store.append(study, numbered(0, 20_000))
        assert [event for _, event in store.read(study)] == large + numbered(0, 20_000)

    # Who may write

    def test_append_needs_the_lock(self, store: Store, url: str) -> None:
        """Nothing is written without the lock."""
        other = store.create("other", {}, None).id
        for call in (lambda: store.append(other, numbered(0, 1)), lambda: store.cut(other, keep=0)):
            with pytest.raises(StoreError, match="lock"):
                call()
        assert list(store.read(other)) == []

    def test_reading_stores_change_nothing(self, store: Store, study: int, url: str) -> None:
        """A store that is open for reading refuses to write."""
        with open_store(url, write=False) as reader:
            calls: list[Callable[[], Any]] = [
                lambda: reader.create("x", {}, None),
                lambda: reader.lock(study),
                lambda: reader.append(study, numbered(0, 1)),
                lambda: reader.put("key", 1),
                lambda: reader.update("key", lambda _: 1),
            ]
            for call in calls:
                with pytest.raises(StoreError, match="write=True"):
                    call()
        assert store.get("key") is None

    def test_one_writer_in_a_process(self, store: Store, study: int, url: str) -> None:
        """A second store of the same process is refused, until the first is closed."""
        store.lock(study)  # again: no change
        with open_store(url, write=True) as second:
            with pytest.raises(StoreLocked, match=str(os.getpid())):
                second.lock(study)
            other = second.create("other", {}, None).id
            second.lock(other)
            second.append(other, numbered(0, 1))
            store.append(study, numbered(0, 1))
            store.close()
            second.lock(study)
            second.append(study, numbered(1, 2))
            assert [event for _, event in second.read(study)] == numbered(0, 2)

    def test_one_writer_among_processes(self, url: str) -> None:
        """A process is refused while another writes, by pid and host, and not once that one is killed."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id
            command = [sys.executable, "-c", _HOLD, url, str(study)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
                try:
                    assert holder.stdout is not None
                    assert holder.stdout.readline() == b"held\n"
                    with pytest.raises(StoreLocked) as refusal:
                        store.lock(study)
                    assert str(holder.pid) in str(refusal.value)
                    assert socket.gethostname() in str(refusal.value)
                    with open_store(url, write=False) as reader:
                        assert list(reader.read(study)) == []
                finally:
                    holder.kill()
            _lock_soon(store, study)
            store.append(study, numbered(0, 1))

    def test_who_writes(self, url: str) -> None:
        """Whoever asks is told who writes, from any store, and that nobody does once that one is closed or killed."""
        with open_store(url, write=True) as store, open_store(url, write=False) as reader:
            study = store.create("first", {}, None).id
            other = store.create("other", {}, None).id
            assert store.writer(study) is None
            assert reader.writer(study) is None
            store.lock(study)
            for each in (store, reader):
                assert str(os.getpid()) in (each.writer(study) or "")
                assert each.writer(other) is None
            command = [sys.executable, "-c", _HOLD, url, str(other)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
                try:
                    assert holder.stdout is not None
                    assert holder.stdout.readline() == b"held\n"
                    for each in (store, reader):
                        assert f"process {holder.pid} on {socket.gethostname()}" in (each.writer(other) or "")
                finally:
                    holder.kill()
            _lock_soon(store, other)
            store.close()
            assert reader.writer(study) is None
            assert reader.writer(other) is None

    def test_asking_who_writes_hinders_nobody(self, url: str) -> None:
        """A writer gets its lock however often others look at it."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id

        def body() -> None:
            with open_store(url, write=False) as reader:
                while True:
                    reader.writer(study)

        with forked(body), forked(body), open_store(url, write=False) as reader:
            for _ in range(100):
                with open_store(url, write=True) as store:
                    store.lock(study)
                    assert str(os.getpid()) in (reader.writer(study) or "")

    def test_children_do_not_inherit_the_lock(self, url: str) -> None:
        """Children that outlive a killed writer, spawned or forked, don't keep the study locked."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id
        told, tell = os.pipe()

        def body() -> None:
            writer = open_store(url, write=True)
            writer.lock(study)
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            spawned = subprocess.Popen(command, close_fds=False)
            forked_child = os.fork()
            if forked_child:
                os.write(tell, f"{spawned.pid} {forked_child}".encode())
            time.sleep(600)

        children: list[int] = []
        try:
            with forked(body) as writer, open_store(url, write=True) as store:
                children = [int(pid) for pid in os.read(told, 100).split()]
                with pytest.raises(StoreLocked, match=str(writer)):
                    store.lock(study)
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
                _lock_soon(store, study)
                for child in children:
                    os.kill(child, 0)  # still alive
        finally:
            os.close(told)
            os.close(tell)
            for child in children:
                os.kill(child, signal.SIGKILL)

    def test_a_forked_child_cannot_write(self, store: Store, study: int, url: str) -> None:
        """A fork that uses its parent's store is told so and does the parent no harm."""

        def body() -> None:
            try:
                store.append(study, numbered(7, 8))
            except StoreError:
                store.close()
                os._exit(7)

        with forked(body) as child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        store.append(study, numbered(0, 1))
        assert [event for _, event in store.read(study)] == numbered(0, 1)
        with open_store(url, write=True) as other, pytest.raises(StoreLocked):
            other.lock(study)

    def test_a_stale_writer_is_fenced(self, store: Store, study: int, sql: Callable[[str], Any]) -> None:
        """A writer whose journal was changed under it writes nothing."""
        store.append(study, numbered(0, 3))
        sql("UPDATE penstock_heads SET events = 2")
        with pytest.raises(StoreError, match="another process"):
            store.append(study, numbered(3, 4))

    def test_readers_beside_a_writer(self, url: str) -> None:
        """A reader follows a writer in another process, without a gap, and neither hinders the other."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id

        def body() -> None:
            with open_store(url, write=True) as writer:
                writer.lock(study)
                for i in range(150):
                    writer.append(study, numbered(20 * i, 20 * i + 20))

        with forked(body), open_store(url, write=False) as reader:
            seen: list[Event] = []
            until_s = time.monotonic() + 300
            while len(seen) < 3000 and time.monotonic() < until_s:
                for seq, event in reader.read(study, after=len(seen)):
                    assert seq == len(seen) + 1
                    seen.append(event)
                assert len(seen) % 20 == 0, "a batch is seen whole or not at all"
            assert seen == numbered(0, 3000)

    def test_killed_writers_leave_whole_batches(self, url: str) -> None:
        """After kill -9 at any moment the journal is a prefix of whole batches, with all acknowledged ones."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id
        rng = random.Random(7)
        for _ in range(10):
            with open_store(url, write=False) as store:
                before = store.find().events
            told, tell = os.pipe()

            def body(tell: int = tell) -> None:
                with open_store(url, write=True) as writer:
                    writer.lock(study)
                    for i in range(100_000):
                        batch: list[Event] = [Noted(0.0, "batch", {"n": i, "of": i % 7 + 1})] * (i % 7 + 1)
                        writer.append(study, batch)
                        os.write(tell, b".")

            with forked(body) as child:
                assert os.read(told, 1) == b"."
                time.sleep(rng.uniform(0, 0.05))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(tell)
            acknowledged = 1
            while data := os.read(told, 65536):
                acknowledged += len(data)
            os.close(told)
            with open_store(url, write=True) as store:
                _lock_soon(store, study)
                found = [event for _, event in store.read(study, after=before)]
            batches: dict[int, int] = {}
            for event in found:
                assert isinstance(event, Noted)
                batches[event.data["n"]] = batches.get(event.data["n"], 0) + 1
            assert list(batches) == list(range(len(batches)))
            assert all(count == n % 7 + 1 for n, count in batches.items())
            assert len(batches) in (acknowledged, acknowledged + 1)

    # Damage

    @pytest.mark.parametrize(
        ("damage", "record"),
        [
            ("UPDATE penstock_events SET data = '{}' WHERE seq = 8", 8),
            ("UPDATE penstock_events SET data = 'garbage' WHERE seq = 10", 10),
            ("UPDATE penstock_events SET crc = crc + 1 WHERE seq = 10", 10),
            ("UPDATE penstock_events SET trial = 77 WHERE seq = 3", 3),
            ("UPDATE penstock_events SET time_s = time_s + 1e-9 WHERE seq = 3", 3),
            ("UPDATE penstock_events SET kind = 'started' WHERE seq = 1", 1),
            ("DELETE FROM penstock_events WHERE seq = 5", 5),
            ("DELETE FROM penstock_events WHERE seq > 8", 9),
            (
                "DELETE FROM penstock_events WHERE seq = 5; UPDATE penstock_events SET seq = 5 WHERE seq = 10",
                5,
            ),
            ("UPDATE penstock_heads SET events = 12", 11),
        ],
    )
    def test_damage_is_found_and_cut(
        self, store: Store, study: int, url: str, sql: Callable[[str], Any], damage: str, record: int
    ) -> None:
        """A changed, lost or moved record is found and named, all before it reads, and after a cut it goes on."""
        store.append(study, numbered(0, 10))
        store.close()
        for statement in damage.split(";"):
            sql(statement)
        with open_store(url, write=False) as reader:
            reading = reader.read(study)
            assert [event for _, event in islice(reading, record - 1)] == numbered(0, record - 1)
            with pytest.raises(StoreCorrupt, match=rf"Record {record} of study {study}\b"):
                next(reading)
            assert reader.tail_ok(study) == record - 1
        with open_store(url, write=True) as writer:
            writer.lock(study)
            there = int(sql("SELECT count(*) FROM penstock_events"))
            assert writer.cut(study, keep=record - 1) == there - (record - 1)
            assert int(sql("SELECT count(*) FROM penstock_cut_records")) == there - (record - 1)
            writer.append(study, numbered(50, 52))
            assert [event for _, event in writer.read(study)] == numbered(0, record - 1) + numbered(50, 52)
            assert writer.tail_ok(study) == writer.find().events == record + 1

    def test_a_record_of_another_journal_does_not_fit(
        self, store: Store, study: int, sql: Callable[[str], Any]
    ) -> None:
        """A record that is sound where it comes from is found where it doesn't belong, by the chain."""
        other = store.create("other", {}, None).id
        store.lock(other)
        store.append(study, numbered(0, 10))
        store.append(other, numbered(100, 110))
        columns = ("trial", "time_s", "data", "crc")
        source = f"FROM penstock_events o WHERE o.study = {other} AND o.seq = 5"
        values = ", ".join(f"{name} = (SELECT o.{name} {source})" for name in columns)
        sql(f"UPDATE penstock_events SET {values} WHERE study = {study} AND seq = 5")
        with pytest.raises(StoreCorrupt, match=rf"Record 5 of study {study}\b"):
            list(store.read(study))
        assert [event for _, event in store.read(other)] == numbered(100, 110)

    def test_cut_bounds(self, store: Store, study: int) -> None:
        """A cut keeps what it is told to keep; what isn't there can't be kept."""
        store.append(study, numbered(0, 5))
        for keep in (6, -1):
            with pytest.raises(InvalidInput, match=str(keep)):
                store.cut(study, keep=keep)
        assert store.cut(study, keep=5) == 0
        assert store.cut(study, keep=2) == 3
        store.append(study, numbered(7, 8))
        assert [event for _, event in store.read(study)] == [*numbered(0, 2), *numbered(7, 8)]
        assert store.cut(study, keep=0) == 3
        assert list(store.read(study)) == []

    def test_a_forgotten_study_leaves_its_name_free(self, store: Store, study: int) -> None:
        """Only a study without records can be forgotten; its number is not used again."""
        name = store.find().name
        store.append(study, numbered(0, 2))
        with pytest.raises(StoreError, match="has records"):
            store.forget(study)
        store.cut(study, keep=0)
        store.forget(study)
        assert store.studies() == []
        with pytest.raises(StoreError, match="lock"):
            store.forget(study)
        again = store.create(name, {}, None)
        assert again.id > study
        assert list(store.read(again.id)) == []

    def test_newer_versions_are_refused(self, store: Store, url: str, sql: Callable[[str], Any]) -> None:
        """A store of a newer format is opened neither for reading nor for writing."""
        store.close()
        sql("UPDATE penstock_meta SET value = '999' WHERE name = 'version'")
        for write in (False, True):
            with pytest.raises(StoreError, match="999"):
                open_store(url, write=write)
        assert sql("SELECT value FROM penstock_meta WHERE name = 'version'") == "999"

    # Values

    def test_values(self, store: Store, url: str) -> None:
        """Values are kept, replaced and listed, for other stores too."""
        assert store.get("power") is None
        store.put("power", {"w": [1.5, None, "x\0\udcff"], "deep": {"a": []}})
        store.put("power/b", 3)
        store.put("q'\u2603", "text")
        store.put("power/b", False)
        with open_store(url, write=False) as reader:
            for each in (store, reader):
                assert each.get("power") == {"w": [1.5, None, "x\0\udcff"], "deep": {"a": []}}
                assert each.get("power/b") is False
                assert each.keys() == ["power", "power/b", "q'\u2603"]
                assert each.keys("power/") == ["power/b"]
        with pytest.raises(InvalidInput, match="'key'"):
            store.put("key", object())
        with pytest.raises(InvalidInput, match="key"):
            store.put("", 1)

    def test_update(self, store: Store) -> None:
        """``update`` sees the old value, returns the new one, and changes nothing if it fails."""
        assert store.update("n", lambda old: [old]) == [None]
        assert store.update("n", lambda old: [*(old or []), 2]) == [None, 2]

        def fail(old: Any) -> Any:
            raise RuntimeError("no")

        for change in (fail, lambda old: object()):
            with pytest.raises((RuntimeError, InvalidInput)):
                store.update("n", change)
            with pytest.raises((RuntimeError, InvalidInput)):
                store.update("new", change)
        assert store.get("n") == [None, 2]
        assert store.get("new") is None
        assert store.keys() == ["n"]
        store.append(store.find().id, numbered(0, 1))  # the failed ones left no transaction open

    def test_updates_of_many_processes_add_up(self, url: str) -> None:
        """No update of one process is lost to another's, while a study is written as well."""
        with open_store(url, write=True) as store:
            study = store.create("first", {}, None).id
            store.lock(study)

            def body() -> None:
                with open_store(url, write=True) as other:
                    for _ in range(40):
                        other.update("count", lambda old: (old or 0) + 1)

            with forked(body) as a, forked(body) as b, forked(body) as c:
                for i in range(40):
                    store.append(study, numbered(i, i + 1))
                for child in (a, b, c):
                    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert store.get("count") == 120
            assert [event for _, event in store.read(study)] == numbered(0, 40)

    # Closing

    def test_closed_stores(self, store: Store, study: int) -> None:
        """A closed store says so; closing twice is fine."""
        store.close()
        store.close()
        calls: list[Callable[[], Any]] = [
            store.studies,
            lambda: list(store.read(study)),
            lambda: store.append(study, numbered(0, 1)),
            lambda: store.put("k", 1),
            lambda: store.get("k"),
        ]
        for call in calls:
            with pytest.raises(StoreError, match="closed"):
                call()


def _lock_soon(store: Store, study: int) -> None:
    """Lock once the server has noticed that the last holder is dead."""
    until_s = time.monotonic() + 120
    while True:
        try:
            return store.lock(study)
        except StoreLocked:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
