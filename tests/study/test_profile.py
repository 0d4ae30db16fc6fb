"""The overhead profile on real worker processes: it finds what is known of the work."""

from __future__ import annotations

import fcntl
import html
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as pk
from penstock.core import Measurement, Noted, Source
from penstock.core.measurement import measurement
from penstock.core.state import DREW
from penstock.execute import Job
from penstock.predict import Probe
from penstock.store import open_store
from penstock.study._profile import _Bench, measure, recall
from penstock.train._probe import _gathered, _Timer, usual_s
from penstock.train._run import Unwind

BUSY_S = 0.0005  # of a core, for one iteration: a fraction of any system's time slice


class Sleepy:
    """Trials that wait: any number of them share a device for nothing."""

    def __call__(self, run: pk.Run) -> None:
        for _ in run.epochs(5):
            for _ in range(20):
                self.step(run)
                run.iteration()
            run.report(loss=1.0)

    def step(self, run: pk.Run) -> None:
        time.sleep(0.05)  # far longer than it takes to get a core back on a busy machine


class Greedy(Sleepy):
    """Trials that all need the same thing, and are in each other's way: two of them get on more slowly than in turn."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def step(self, run: pk.Run) -> None:
        with self.lock.open("a") as file:
            alone = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
                fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.08 if alone else 0.12)
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
            scheduler=pk.Full(trials=2, epochs=1),
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


def test_what_the_profile_draws_is_the_studys_energy(tmp_path: Path) -> None:
    """Once: the study that recalls it has drawn nothing for it. It counts in budgets of energy, and of time."""

    def run(budget: pk.Budget, **options: Any) -> pk.Study:
        return pk.Study(
            busy,
            pk.Space(x=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Full(trials=1, epochs=1),
            sampler=pk.Random(),
            executor=pk.Local(2),
            planner=pk.Fluid(max_sharing=2),
            budget=budget,
            store=tmp_path / "s.db",
            **options,
        ).run()

    first, second = run(pk.Budget()), run(pk.Budget())
    (note,) = [n for n in first.state.notes if n.topic == "overhead"]
    drawn = measurement(*note.data[DREW])
    # Each probe keeps a core busy for half a second at least: no machine's core draws less than a tenth of a watt.
    assert drawn.joules > 3 * 0.5 * 0.1
    assert first.state.spent_s > 2 * 0.5  # one alone, then two at a time
    assert first.energy is not None
    assert first.state.trial_energy is not None
    assert first.energy.joules == pytest.approx(first.state.trial_energy.joules + drawn.joules)
    assert first.energy.source is max(drawn.source, first.state.trial_energy.source)
    told = f"{drawn} of it for measuring and checking before training"
    assert told in str(first)
    assert told in html.unescape(first._repr_html_())
    assert first.summary()["besides_j"] == drawn.joules
    assert second.energy is not None
    assert second.state.besides is None
    assert "of it for measuring" not in str(second)
    store = open_store(tmp_path / "s.db", write=True)
    try:
        (key,) = store.keys("overhead/")
        assert DREW not in store.get(key)
        store.put(key, None)  # it is measured again
    finally:
        store.close()
    third = run(pk.Budget(energy_wh=drawn.wh / 100))
    assert third.state.closed is not None
    assert third.state.closed.reason == "budget"
    assert not third.state.epochs


def test_all_workers_of_a_crew_tell_what_they_drew(tmp_path: Path) -> None:
    def tell(rank: int, joules: float) -> Measurement | None:
        return _gathered(tmp_path, 0, (rank, 3, ""), Measurement(joules, "J", Source.ESTIMATED))

    assert tell(2, 3.0) is None
    assert tell(1, 2.0) is None
    found = tell(0, 1.0)
    assert found is not None
    assert found.joules == 6.0


def busy(run: pk.Run) -> None:
    """Keeps its core busy, in iterations that mostly begin and end within one turn on it."""
    for _ in run.epochs():
        for _ in range(40):
            begun_s = time.thread_time()
            while time.thread_time() - begun_s < BUSY_S:
                pass
            run.iteration()
        run.report(loss=1.0)


def take_turns(busy_s: float, slice_s: float, size: int, count: int) -> list[float]:
    """The iterations of one of ``size`` trainings that take turns on a core, each for ``slice_s``."""
    times_s, left_s = [], slice_s
    for _ in range(count):
        todo_s, wall_s = busy_s, 0.0
        while todo_s > left_s:
            wall_s += left_s + (size - 1) * slice_s
            todo_s, left_s = todo_s - left_s, slice_s
        left_s -= todo_s
        times_s.append(wall_s + todo_s)
    return times_s


@pytest.mark.parametrize("busy_s", [0.00005, 0.0005, 0.003, 0.02, 0.3])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_taking_turns_is_seen_however_short_iterations_are(busy_s: float, size: int) -> None:
    count = max(30, int(0.5 / size / busy_s))
    times_s = take_turns(busy_s, 0.004, size, count)
    # Each has the core for one part in ``size`` of the time. A tenth of it is as near as half a second tells.
    assert usual_s(times_s) == pytest.approx(size * busy_s, rel=0.1)


@pytest.mark.parametrize("busy_s", [0.0005, 0.02, 0.3])
def test_a_hiccup_does_not_count(busy_s: float) -> None:
    times_s = [busy_s] * max(30, int(0.5 / busy_s))
    times_s[len(times_s) // 2] += 2.0
    assert usual_s(times_s) == pytest.approx(busy_s)


def test_a_single_iteration_is_as_long_as_it_is() -> None:
    assert usual_s([3.0]) == 3.0
    assert usual_s([0.0, 0.0]) == 0.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="probes can't be kept to one core here")
def test_two_short_busy_loops_on_one_core_are_found_to_wait_for_each_other(tmp_path: Path) -> None:
    executor = pk.Local(2)
    executor.open(Job(busy, tmp_path, ("loss",), meter=False))
    try:
        found = measure(executor, {}, tmp_path, seed=0, max_sharing=2, max_devices=1)
    finally:
        executor.close()
    both = found.data["sharing_s"]["2"]
    # However loaded the machine is: the two together have at most one core, so each takes twice what it computes.
    assert sum(both) / len(both) > 1.5 * BUSY_S


def linear() -> nn.Module:
    return nn.Linear(6, 1)


def points() -> pk.Data:
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    return pk.Data((inputs, inputs[:, :1]), (inputs, inputs[:, :1]))


def test_a_crew_with_short_iterations_is_timed(tmp_path: Path) -> None:
    task = pk.Task(linear, points, functional.mse_loss, batch_size=8, defaults={"lr": 0.01})
    executor = pk.Local(2)
    executor.open(Job(task, tmp_path, ("loss",), meter=False, options={"spread": "workers"}))
    try:
        bench = _Bench(executor, {}, tmp_path / "profile", seed=0, meter=True)
        (time_s,) = bench.run(Probe("scaling", 2), [item.device for item in executor.free()])
    finally:
        executor.close()
    assert time_s > 0
    told = tmp_path / "profile" / "scaling-2" / "drew-0-1"
    assert json.loads(told.read_text())[0] > 0
    (drawn,) = bench.drawn
    assert drawn.joules > json.loads(told.read_text())[0]


@pytest.mark.parametrize("first", ["lead", "follower"])
def test_a_crew_leaves_at_the_same_iteration(tmp_path: Path, first: str) -> None:
    told = {"path": tmp_path, "number": 0, "size": 1, "iterations": 5, "window_s": 0.0, "limit_s": 20.0}
    crew = [_Timer(told, leads=True, alone=False), _Timer(told, leads=False, alone=False)]
    for _ in range(20):
        left = []
        # Nobody ends a step that another one has not begun, but within it either may be the first to do so.
        for timer in crew if first == "lead" else reversed(crew):
            try:
                timer.on_iteration(8)
            except Unwind:
                left.append(timer)
        if left:
            break
    assert sorted(map(id, left)) == sorted(map(id, crew))
    assert all(len(timer.times) >= 5 for timer in crew)


def test_what_was_timed_by_single_iterations_is_measured_again(tmp_path: Path) -> None:
    result = pk.Overhead(alpha=1.0, max_sharing=4).to_json()
    store = open_store(tmp_path / "study.db", write=True)
    try:
        store.put("overhead/old", {"result": result, "memory_bytes": None})
        store.put("overhead/new", {"result": result, "memory_bytes": None, "window_s": 0.5})
        assert recall(store, "overhead/old") is None
        found = recall(store, "overhead/new")
        assert found is not None
        assert found.overhead.max_sharing == 4
    finally:
        store.close()
