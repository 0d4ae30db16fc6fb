"""What is particular to PostgreSQL: secrets, rights, and connections lost at the worst moments."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.core.errors import InvalidInput, StoreError, StoreLocked, StoreUnwritable
from penstock.store import Store, _postgres, open_store
from penstock.testing.postgres import PostgresServer
from penstock.testing.stores import numbered

SECRETS = ("s3cret", "s3cret/word", "s3cret%2Fword")


def shows_secret(text: str) -> bool:
    return any(secret in text for secret in SECRETS)


class Proxy:
    """A TCP proxy before the server that can swallow an answer, or refuse all."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.swallow_after: Callable[[bytes], bool] | None = None  # the request whose answer gets lost
        self.refuse = False
        self.lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            swallow = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, swallow), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server, swallow), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, swallow: threading.Event) -> None:
        try:
            while data := client.recv(1 << 20):
                if self.swallow_after is not None and self.swallow_after(data):
                    self.swallow_after = None
                    swallow.set()
                server.sendall(data)
        except OSError:
            pass
        finally:
            if not swallow.is_set():
                server.close()

    def _answers(self, client: socket.socket, server: socket.socket, swallow: threading.Event) -> None:
        try:
            while data := server.recv(1 << 20):
                if swallow.is_set():
                    self.lost.set()
                    client.shutdown(socket.SHUT_RDWR)
                    client.close()
                    time.sleep(0.2)  # the server takes the session for alive a while longer
                    return
                client.sendall(data)
        except OSError:
            pass
        finally:
            server.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    proxy = Proxy(int(postgres.url.rpartition(":")[2].partition("/")[0]))
    yield proxy
    proxy.close()


@pytest.fixture
def proxied(postgres_url: str, proxy: Proxy) -> str:
    return re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{proxy.port}", postgres_url)


def started(url: str) -> tuple[Store, int]:
    store = open_store(url, write=True)
    study = store.create("first", {}, None).id
    store.lock(study)
    store.append(study, numbered(0, 10))
    return store, study


def test_ways_to_write_the_url(postgres_url: str) -> None:
    open_store(postgres_url, write=True).close()
    rest = postgres_url.partition("://")[2]
    for scheme in ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"):
        with open_store(f"{scheme}://{rest}", write=False) as store:
            assert store.studies() == []
            assert store.files is None


def test_no_secret_is_shown(postgres_url: str, postgres: PostgresServer) -> None:
    store, study = started(postgres_url)
    texts = [store.url, repr(store), str(store.find())]
    assert store.url.startswith("postgresql://penstock@127.0.0.1:")
    wrong = [
        postgres_url.replace("penstock:", "nobody:"),
        postgres_url.replace("/penstock?", "/nowhere?"),
        re.sub(r":\d+/", ":1/", postgres_url),
        postgres_url.replace("127.0.0.1", "no.such.host.invalid"),
        postgres_url.replace("127.0.0.1:", "127.0.0.1:x"),
        postgres_url.replace("penstock:s3cret%2Fword@", "penstock@") + "&password=s3cret&connect_timeout=x",
    ]
    for url in wrong:
        with pytest.raises((StoreError, InvalidInput)) as caught:
            open_store(url, write=True)
        error: BaseException | None = caught.value
        while error is not None and not error.__suppress_context__:
            texts.append(str(error))
            error = error.__cause__ or error.__context__
        texts.append(str(error))
    with open_store(postgres_url, write=True) as second, pytest.raises(StoreLocked) as locked:
        second.lock(study)
    texts.append(str(locked.value))
    store.close()
    texts.append(repr(store))
    assert not [text for text in texts if shows_secret(text)]


def test_reading_creates_nothing(postgres_url: str, postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match="no Penstock store"):
        open_store(postgres_url, write=False)
    schema = re.findall(r"test\d+", postgres_url)[0]
    assert postgres.sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'") == "0"


def test_no_right_to_write(postgres_url: str, postgres: PostgresServer) -> None:
    store, study = started(postgres_url)
    schema = re.findall(r"test\d+", postgres_url)[0]
    change = f"ON ALL TABLES IN SCHEMA {schema}"
    postgres.sql(f"REVOKE INSERT, UPDATE {change} FROM penstock")
    with pytest.raises(StoreUnwritable, match=r"permission denied.*role that may write"):
        store.append(study, numbered(10, 20))
    assert [event for _, event in store.read(study)] == numbered(0, 10)
    postgres.sql(f"GRANT INSERT, UPDATE {change} TO penstock")
    store.append(study, numbered(10, 20))
    assert [event for _, event in store.read(study)] == numbered(0, 20)
    store.close()


def test_stores_in_two_schemas_have_locks_of_their_own(postgres_url: str, postgres: PostgresServer) -> None:
    postgres.sql("CREATE SCHEMA IF NOT EXISTS apart AUTHORIZATION penstock")
    first, study = started(postgres_url)
    second, other = started(re.sub(r"test\d+", "apart", postgres_url))
    assert study == other
    first.close()
    second.close()


def end_session(postgres: PostgresServer) -> None:
    """Let the server end the only session of a store there is. A busy one is slow to see that one is over."""
    ours = "FROM pg_stat_activity WHERE application_name LIKE 'penstock %'"

    def wait_for(count: int) -> None:
        until_s = time.monotonic() + 120
        while (found := int(postgres.sql(f"SELECT count(*) {ours}"))) != count:
            assert time.monotonic() < until_s, found
            time.sleep(0.02)

    wait_for(1)
    assert postgres.sql(f"SELECT count(pg_terminate_backend(pid)) {ours}") == "1"
    wait_for(0)


@pytest.mark.faults
def test_a_killed_session_is_replaced(postgres_url: str, postgres: PostgresServer) -> None:
    """The server ends the session between two calls: each kind of call goes on, with the lock."""
    store, study = started(postgres_url)
    calls: list[Callable[[], Any]] = [
        lambda: store.append(study, numbered(10, 20)),
        lambda: list(store.read(study)),
        lambda: store.update("n", lambda old: (old or 0) + 1),
        lambda: store.create("second", {}, None),
        lambda: store.find(),
    ]
    for call in calls:
        end_session(postgres)
        call()
        with open_store(postgres_url, write=True) as other, pytest.raises(StoreLocked):
            other.lock(study)
    assert [event for _, event in store.read(study)] == numbered(0, 20)
    assert store.get("n") == 1
    store.close()


@pytest.mark.faults
def test_a_lost_lock_is_noticed(postgres_url: str, postgres: PostgresServer) -> None:
    """Somebody else became the writer while the connection was away: refused, nothing interleaved."""
    store, study = started(postgres_url)
    end_session(postgres)
    with open_store(postgres_url, write=True) as other:
        other.lock(study)
        other.append(study, numbered(10, 11))
        with pytest.raises(StoreLocked):
            store.append(study, numbered(50, 60))
        assert [event for _, event in other.read(study)] == numbered(0, 11)
    store.close()


@pytest.mark.faults
def test_a_crashed_server(postgres_url: str, postgres: PostgresServer, monkeypatch: Any) -> None:
    """While it is down an append fails in words; what was acknowledged survives the crash, and it goes on."""
    monkeypatch.setattr(_postgres, "_AWAY_S", 0.0)
    store, study = started(postgres_url)
    postgres.stop(mode="immediate")
    try:
        with pytest.raises(StoreUnwritable, match="server runs") as caught:
            store.append(study, numbered(10, 20))
        assert not shows_secret(str(caught.value))
    finally:
        postgres.start()
    assert [event for _, event in store.read(study)] == numbered(0, 10)
    store.append(study, numbered(10, 20))
    assert [event for _, event in store.read(study)] == numbered(0, 20)
    store.close()


@pytest.mark.faults
def test_a_restarted_server_is_waited_for(postgres_url: str, postgres: PostgresServer) -> None:
    """It is away for a while in the middle of a study: who writes waits, and writes once and under its lock."""
    store, study = started(postgres_url)
    postgres.stop(mode="fast")
    back = threading.Timer(1.0, postgres.start)
    back.start()
    try:
        store.append(study, numbered(10, 20))
        assert [event for _, event in store.read(study)] == numbered(0, 20)
        with open_store(postgres_url, write=True) as other, pytest.raises(StoreLocked):
            other.lock(study)
    finally:
        back.join()
        store.close()


@pytest.mark.faults
def test_a_lost_answer_does_not_write_twice(proxy: Proxy, proxied: str) -> None:
    """The batch lands, its acknowledgement doesn't: the append finds out and writes it once."""
    store, study = started(proxied)
    proxy.swallow_after = lambda request: b"INSERT INTO penstock_events" in request or b"reported" in request
    store.append(study, numbered(10, 30))
    assert proxy.lost.is_set()
    store.append(study, numbered(30, 40))
    assert [event for _, event in store.read(study)] == numbered(0, 40)
    store.close()


@pytest.mark.faults
def test_a_lost_answer_to_a_commit(proxy: Proxy, proxied: str) -> None:
    """The same for changes of several statements: a counter counts once, a study is made once."""
    store, _ = started(proxied)
    for i in range(3):
        proxy.lost.clear()
        proxy.swallow_after = lambda request: b"COMMIT" in request
        assert store.update("n", lambda old: (old or 0) + 1) == i + 1
        assert proxy.lost.is_set()
    assert store.get("n") == 3
    proxy.lost.clear()
    proxy.swallow_after = lambda request: b"COMMIT" in request
    entry = store.create("second", {}, None)
    assert proxy.lost.is_set()
    assert store.find("second") == entry
    store.close()


@pytest.mark.faults
def test_a_lost_answer_and_no_way_back(
    proxy: Proxy, proxied: str, postgres_url: str, monkeypatch: Any
) -> None:
    """The batch lands but the caller hears that it failed: when it tries again, nothing is there twice."""
    monkeypatch.setattr(_postgres, "_AWAY_S", 0.0)
    store, study = started(proxied)

    def last_request(request: bytes) -> bool:
        proxy.refuse = b"reported" in request
        return proxy.refuse

    proxy.swallow_after = last_request
    with pytest.raises(StoreUnwritable):
        store.append(study, numbered(10, 30))
    with open_store(postgres_url, write=False) as reader:
        assert reader.find().events == 30
    proxy.refuse = False
    store.append(study, numbered(10, 40))
    assert [event for _, event in store.read(study)] == numbered(0, 40)
    store.close()


def test_a_machine_that_goes_down_is_noticed_within_minutes(postgres_url: str) -> None:
    """By what the system is told of both ends: its default of two hours would keep a dead driver's lock as long."""
    with open_store(postgres_url, write=True) as store:
        connection = store._backend._connection  # type: ignore[attr-defined]
        ask = connection.exec_driver_sql
        served = [int(ask(f"SHOW tcp_keepalives_{name}").scalar()) for name in ("idle", "interval", "count")]
        assert served[0] + served[1] * served[2] <= 120
        assert min(served) > 0  # 0: not on this connection
        with socket.socket(fileno=os.dup(connection.connection.dbapi_connection.fileno())) as ours:
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle_s, interval_s, count = (ours.getsockopt(socket.IPPROTO_TCP, each) for each in options)
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle_s + interval_s * count <= 120
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    with open_store(f"{postgres_url}&keepalives_idle=7", write=False) as reader:
        driver = reader._backend._connection.connection.dbapi_connection  # type: ignore[attr-defined]
        with socket.socket(fileno=os.dup(driver.fileno())) as ours:
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
