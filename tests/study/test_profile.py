"""The overhead profile on real worker processes: it finds what is known of the work."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

import penstock as pk
from penstock.core import Noted
from penstock.execute import Job
from penstock.store import open_store
from penstock.study._profile import measure, recall


class Sleepy:
    """Trials that wait: any number of them share a device for nothing."""

    def __call__(self, run: pk.Run) -> None:
        for _ in run.epochs(5):
            for _ in range(20):
                self.step(run)
                run.iteration()
            run.report(loss=1.0)

    def step(self, run: pk.Run) -> None:
        time.sleep(0.02)


class Greedy(Sleepy):
    """Trials that all need the same thing: no two of them get on any faster than in turn."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def step(self, run: pk.Run) -> None:
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.08)
        time.sleep(0.0005)  # who waits comes next


@pytest.mark.parametrize(("kind", "sharing"), [("sleepy", 3), ("greedy", 1)])
def test_the_profile_finds_how_many_trials_a_device_bears(tmp_path: Path, kind: str, sharing: int) -> None:
    work = Sleepy() if kind == "sleepy" else Greedy(tmp_path / "lock")
    executor = pk.Local(2)
    executor.open(Job(work, tmp_path, ("loss",), meter=False))
    try:
        found = measure(executor, {}, tmp_path, seed=0, max_sharing=3, max_devices=1)
        assert len(executor.free()) == 2, "the profile left something running"
    finally:
        executor.close()
    assert found.overhead.max_sharing == sharing
    assert set(found.data["sharing_s"]) == {"1", "2", "3"} if kind == "sleepy" else {"1", "2"}


def test_a_study_measures_once_and_remembers(tmp_path: Path) -> None:
    def run() -> pk.Study:
        return pk.Study(
            Sleepy(),
            pk.Space(x=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Full(trials=2),
            sampler=pk.Random(),
            executor=pk.Local(1),
            planner=pk.Fluid(max_sharing=2),
            store=tmp_path / "s.db",
            meter=False,
        ).run()

    first, second = run(), run()
    store = open_store(tmp_path / "s.db", write=False)
    try:
        (key,) = store.keys("overhead/")
        kept = recall(store, key)
    finally:
        store.close()
    assert kept is not None
    assert kept.overhead.max_sharing == 2
    for study in (first, second):
        (note,) = [n for n in study.state.notes if isinstance(n, Noted) and n.topic == "overhead"]
        assert note.data["result"] == kept.data["result"]  # the second one has not measured again
        assert {share.fraction for record in study.trials for share in record.shares} == {0.5}
