"""Shared by all tests: a hypothesis profile without deadlines (the machine may be busy), a PostgreSQL server."""

import gc
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from penstock.core.errors import Unsupported
from penstock.testing.postgres import PostgresServer, postgres_server

# Several test processes share the cores: threads that spin while they wait for each other take them from the rest.
# Read when torch is loaded, here and in the workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("penstock", deadline=None, database=None, max_examples=50)
settings.load_profile("penstock")

gc.disable()  # until all tests are imported

_numbers = count()

FOLDER = Path(__file__).parent
PROGRAMS = ("test_examples.py", "test_docs.py")  # each test of theirs is seconds of a program


class Together(LoadScopeScheduling):
    """Hands out tests one by one, but those of a file with a fixture for all of it to one process, which makes it."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        shares = ('scope="module"', 'scope="class"')
        self._together = {
            path.relative_to(config.rootpath).as_posix()
            for path in FOLDER.rglob("test_*.py")
            if path.name not in PROGRAMS and any(text in path.read_text() for text in shares)
        }

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path in self._together else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs first: the last tests are short, so that no process ends long before the others."""
    items.sort(key=lambda item: item.path.name not in PROGRAMS)


def pytest_collection_finish() -> None:
    """Now there is garbage to look for."""
    gc.enable()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        context = postgres_server()
        server = context.__enter__()
    except Unsupported as error:
        if os.environ.get("PENSTOCK_REQUIRE_POSTGRES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    try:
        yield server
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of an empty schema."""
    schema = f"test{next(_numbers)}"
    postgres.sql(f"CREATE SCHEMA {schema} AUTHORIZATION penstock")
    return f"{postgres.url}?options=-csearch_path%3D{schema}"
