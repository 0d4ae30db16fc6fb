"""Shared by all tests: a hypothesis profile without deadlines (the machine may be busy), a PostgreSQL server."""

import gc
import os
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings

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
