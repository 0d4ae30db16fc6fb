"""The journal of studies: SQLite in one file by default, PostgreSQL by URL.

Start with ``_base.py``, the contract; ``_sql.py`` fulfils it on what ``_sqlite.py`` and ``_postgres.py`` provide.
"""

from penstock.store._base import Store, StudyEntry
from penstock.store._open import open_store, upgrade
from penstock.store._salvage import salvage

__all__ = ["Store", "StudyEntry", "open_store", "salvage", "upgrade"]
