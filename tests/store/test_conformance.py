"""Both databases fulfil the contract of stores."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.postgres import PostgresServer
from penstock.testing.stores import StoreSuite


class TestSqlite(StoreSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "study.db")

    @pytest.fixture
    def sql(self, url: str) -> Callable[[str], Any]:
        def run(statement: str) -> Any:
            with closing(sqlite3.connect(url)) as connection, connection:
                row = connection.execute(statement).fetchone()
            return row and row[0]

        return run


class TestPostgres(StoreSuite):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    @pytest.fixture
    def sql(self, postgres: PostgresServer, url: str) -> Callable[[str], Any]:
        schema = re.findall(r"test\d+", url)[0]
        return lambda statement: postgres.sql(f"SET search_path = {schema}; {statement}")
