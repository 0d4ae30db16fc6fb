"""Freed memory stays with a worker, and goes back between trials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from penstock.train._memory import give_back, keep_freed

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")

FAULTS = """
import resource, sys
import numpy
from penstock.train._memory import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones((4, 1 << 20))  # 32 MB that are freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, kind], capture_output=True, text=True, check=True)
    return int(done.stdout)


@linux
def test_a_process_that_keeps_what_it_frees_touches_no_fresh_pages() -> None:
    fresh, kept = faults("plain"), faults("keep")
    assert fresh > 50 * 4  # even of huge pages that is one for each of 2 MB
    assert kept < fresh / 20


def resident(after: Any) -> float:
    import psutil

    after()
    return psutil.Process().memory_info().rss / 1e6


def hold_and_free(run: pk.Run) -> None:
    """Two blocks with one between them that stays, so that the first is not at the heap's end."""
    import numpy

    first, between, last = numpy.ones(25_000_000), numpy.ones(100), numpy.ones(25_000_000)
    held = resident(lambda: None)
    del first, last
    freed = resident(lambda: None)
    run.report(loss=float(between[0]), held=held, freed=freed, returned=resident(give_back))


@linux
def test_a_worker_keeps_what_a_trial_frees_until_it_gives_it_back(tmp_path: Path) -> None:
    study = pk.Study(
        hold_and_free,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Full(trials=1),
        executor=pk.Local(1),
        store=tmp_path / "s.db",
    ).run()
    told = study.trials[0].metrics
    assert told["freed"] > told["held"] - 40  # of 400 MB
    assert told["returned"] < told["held"] - 360


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}]
)
def test_who_has_told_the_allocator_something_is_left_alone(environment: dict[str, str]) -> None:
    assert not keep_freed(environment)
