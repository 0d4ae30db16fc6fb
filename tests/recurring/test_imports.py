"""The room stays cheap to import."""

from __future__ import annotations

import subprocess
import sys


def test_the_job_is_imported_without_heavy_libraries():
    code = (
        "import sys, penstock.recurring as r; r.RecurringJob; r.History; "
        "print([m for m in ('torch', 'numpy', 'scipy', 'sqlalchemy', 'matplotlib', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import penstock.recurring as room

    assert sorted(room.__all__) == sorted(room._HOME)
    for name in room.__all__:
        assert getattr(room, name) is not None
