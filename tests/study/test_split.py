"""Fused groups that are split while they run: the same results as unsplit, whoever ends or dies meanwhile."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core import (
    Device,
    Ended,
    Free,
    Noted,
    Placement,
    Reported,
    Running,
    Saved,
    Segment,
    SessionOpened,
    Share,
    Started,
    StudyState,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.goal import Budget, Goal
from penstock.plan import Regroup, fifo
from penstock.schedule import StopRule
from penstock.store import open_store
from penstock.study import _fusing
from penstock.study._engine import Engine, Setup

SPACE = pk.Space(lr=pk.Float(1e-3, 0.5, log=True), momentum=pk.Float(0.0, 0.9), dropout=pk.Float(0.0, 0.5))


def points():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(160, 6, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def net(dropout=0.1):
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


CALLS: list[None] = []


def patient_forward(model, x):
    """Waits in its fifth epoch until the driver has told some to stop, in its eighth until it has told some to move."""
    CALLS.append(None)  # once for all: seven to compare them with trials alone, then nine in each epoch
    for calls, flag in ((45, "told to stop"), (70, "told to move")):
        while len(CALLS) > calls and not os.path.exists(f"{os.environ['PENSTOCK_TEST_FOLDER']}/{flag}"):
            time.sleep(0.01)
    return model(x)


def watched(folder):
    """Two workers; a file says when all of the second sixteen have been told to stop, another when some are to move."""
    executor = pk.Local(slots=2, threads=1)
    tell, told = executor.stop, set()

    def stop(trials, *, keep=False, **why):
        tell(trials, keep=keep, **why)
        told.update(() if keep else trials)
        if told >= set(range(16, 32)):
            (folder / "told to stop").touch()
        if keep:
            (folder / "told to move").touch()

    executor.stop = stop
    return executor


def make_task(**options):
    return pk.Task(
        net, pk.Data.split(*points()), F.cross_entropy, **{"epochs": 20, "batch_size": 16, **options}
    )


class FirstOnly(StopRule):
    """Ends the trials from ``of`` on after two epochs: whoever trained them falls idle."""

    def __init__(self, of, also=()):
        self.of, self.also = of, dict(also)

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        if (trial >= self.of and epoch >= 2) or epoch == self.also.get(trial):
            return "enough"
        return None


def study(fuse, store, executor, trials, rule, **options):
    return pk.Study(
        make_task(**options.pop("task", {})),
        SPACE,
        minimize="loss",
        sampler=pk.Random(),
        scheduler=pk.Full(trials=trials),
        executor=executor,
        stop=[rule],
        fuse=fuse,
        store=store,
        seed=4,
        **options,
    )


def events_of(path):
    with open_store(path, write=False) as store:
        return [event for _, event in store.read(store.find().id)]


def assert_same(one: StudyState, other: StudyState):
    other.validate()
    assert one.trials.keys() == other.trials.keys()
    for a, b in zip(one.trials.values(), other.trials.values(), strict=True):
        assert (a.config, a.seed, a.status, a.reason) == (b.config, b.seed, b.status, b.reason)
        assert [r.epoch for r in b.reports] == list(range(1, b.epoch + 1))
        if a.status is not TrialStatus.STOPPED:  # a stop may come an epoch later, as messages go
            assert a.epoch == b.epoch
        for mine, theirs in zip(a.reports, b.reports, strict=False):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-9, abs=1e-9)


def groups_of(events):
    return {
        event.fused: event.shares[0].device for event in events if isinstance(event, Started) and event.fused
    }


@pytest.fixture(scope="module")
def cheap():
    """Epochs here take milliseconds; studies shall think that a split costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fusing, "SPLIT_S", 0.0)
        yield


@pytest.fixture(scope="module")
def split_study(tmp_path_factory, cheap):
    """32 trials in two groups of 16, the second of which ends early; its store, and their results one by one."""
    path = tmp_path_factory.mktemp("split") / "s.db"
    plain = study(False, False, pk.Simulated(2), 32, FirstOnly(16)).run().state
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_TEST_FOLDER", str(path.parent))
        task = {"forward": patient_forward}
        study(16, path, watched(path.parent), 32, FirstOnly(16), task=task, keep="all").run()
        yield path, plain


def test_sixteen_members_are_split_when_a_worker_falls_idle(split_study):
    path, plain = split_study
    events = events_of(path)
    state = StudyState.of(events)
    assert_same(plain, state)
    groups = groups_of(events)
    first, second = tuple(range(16)), tuple(range(16, 32))
    assert {first, second} <= set(groups)
    halves = [event for event in events if isinstance(event, Noted) and event.topic == "split"]
    moved = tuple(halves[0].data["trials"])  # a half that is done first may be given half of the other
    assert len(moved) == 8
    assert set(moved) < set(first)
    assert groups[moved] == groups[second] != groups[first]
    # From live state: nobody starts again, the first report there is of the epoch after the last one here.
    left = {event.trial: event.epoch for event in events if isinstance(event, Ended) and event.kept}
    assert set(left) == {trial for half in halves for trial in half.data["trials"]}
    assert all(epoch >= 1 for epoch in left.values())
    for trial in range(16):
        assert state.trials[trial].status is TrialStatus.COMPLETED
        assert state.trials[trial].attempts == 0


def test_a_driver_that_dies_in_the_middle_of_a_split_goes_on_to_the_same_results(split_study, tmp_path: Path):
    path, plain = split_study
    copy = tmp_path / "s.db"
    shutil.copy(path, copy)
    shutil.copytree(path.with_name("s.db.files"), tmp_path / "s.db.files")
    kept = [at for at, e in enumerate(events_of(path), 1) if isinstance(e, Ended) and e.kept]
    with open_store(copy, write=True) as store:
        found = store.find()
        store.lock(found.id)
        store.cut(found.id, keep=kept[2])  # three of eight have left, nobody has arrived
    for trial, record in StudyState.of(events_of(copy)).trials.items():  # nor does the disk know the future
        folder = next((tmp_path / "s.db.files").glob(f"*/checkpoints/{trial}"))
        for file in folder.glob("*.ckpt"):
            if int(file.stem) > max(record.saved, default=0):
                file.unlink()
    resumed = pk.Study.load(copy).run()
    assert_same(plain, resumed.state)


# ---------------------------------------------------------------- the engine alone, event by event


class Bench:
    """An engine with four trials that train as one on ``a`` while ``b`` is idle, and the shell around it."""

    def __init__(self, trials=4):
        setup = Setup(
            space=SPACE,
            goal=Goal.of("loss", None),
            scheduler=pk.Full(trials=trials, epochs=9),
            sampler=pk.Random(),
            planner=(),
            budget=Budget(),
            rules=(FirstOnly(99, also={1: 3}),),
            regroup=lambda groups, idle, devices, state: self.orders(groups, idle),
        )
        self.journal = []
        self.engine = Engine(setup)
        self.a, self.b = Device("a"), Device("b")
        self.asked = 0
        self.take(SessionOpened(0.0, "here", 1))
        for event in self.engine.submit([Free(self.a, 1.0, trials)], 0.0):
            self.journal.append(event)
        members = tuple(range(trials))
        self.engine.queue.clear()
        for trial in members:
            self.take(Started(1.0, trial, 0, (Share("a"),), 0, members))

    def orders(self, groups, idle):
        self.asked += 1
        members = [segment.trial.id for segment in groups[0].placement.segments]
        return [Regroup(tuple(members[len(members) // 2 :]), idle[0].id)]

    def take(self, event):
        event = self.engine.annotate(event)
        self.journal.append(event)
        self.engine.apply(event)
        return event

    def report(self, trial, epoch):
        self.take(Reported(epoch + 1.0, trial, epoch, {"loss": 1.0 / epoch}, 0.1))
        self.take(Saved(epoch + 1.0, trial, epoch, f"{trial}/{epoch}"))

    def left(self, trial, epoch):
        return self.take(Ended(9.0, trial, TrialStatus.PAUSED, epoch, "goes on", kept=True))

    @property
    def both(self):
        return [Free(self.b)]

    def unfinished(self):
        """What a driver that takes over with the journal as it is now would run."""
        full = pk.Full(trials=4, epochs=9)
        fresh = Engine(replace(self.engine.setup, scheduler=full, sampler=pk.Random(), regroup=None))
        fresh.replay(self.journal)
        fresh.apply(SessionOpened(99.0, "there", 2))
        fresh.requeue()
        return sorted(segment.trial.id for placement in fresh.queue for segment in placement.segments)


def test_the_device_is_kept_until_all_have_come_and_the_driver_may_die_at_any_point():
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    (order,) = engine.take_regroups(bench.both)
    assert order == Regroup((2, 3), "b")
    assert engine.take_regroups(bench.both) == ()  # told once
    assert bench.asked == 1
    assert bench.unfinished() == [0, 1, 2, 3]
    bench.left(3, 2)
    assert engine.plan(bench.both) == ()  # 2 is still coming
    assert bench.unfinished() == [0, 1, 2, 3]
    assert not engine.done
    bench.left(2, 2)
    (placement,) = engine.plan(bench.both)
    assert [segment.trial.id for segment in placement.segments] == [2, 3]
    assert placement.shares == (Share("b"),)
    assert engine.plan(bench.both) == ()
    assert bench.unfinished() == [0, 1, 2, 3]
    for trial in (2, 3):
        bench.take(Started(10.0, trial, 0, (Share("b"),), 0, (2, 3)))
    engine.state.validate()
    # Both halves are groups of their own now, and could be split again.
    groups = [[s.trial.id for s in g.placement.segments] for g in engine._fused()]
    assert groups == [[0, 1], [2, 3]]


def test_trials_whose_device_was_given_away_on_their_way_to_it_wait_like_others():
    """Studies that share a machine give up what is idle, and so is a device that is kept for who is to come."""
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    bench.left(3, 2)
    engine.strand([])  # 2 is still coming
    assert engine.moving
    bench.left(2, 2)
    engine.strand(bench.both)
    assert engine.moving
    engine.strand([Free(bench.a, 0.5)])
    assert not engine.moving
    assert [[segment.trial.id for segment in each.segments] for each in engine.queue] == [[2], [3]]
    assert engine.plan([]) == ()
    assert bench.unfinished() == [0, 1, 2, 3]


def test_a_device_to_which_trials_move_is_given_to_nobody_else_when_they_are_there():
    """One that is to be run again waits when the last of them has come."""
    bench = Bench()
    engine = bench.engine
    engine.setup = replace(engine.setup, planner=(fifo(),))
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    bench.left(3, 2)
    assert bench.take(Ended(9.0, 0, TrialStatus.FAILED, 1, "its worker died", lost=True)).retry
    assert engine.plan(bench.both) == ()
    bench.left(2, 2)
    (placement,) = engine.plan(bench.both)
    assert [segment.trial.id for segment in placement.segments] == [2, 3]
    assert [segment.trial.id for each in engine.queue for segment in each.segments] == [0]


def test_a_half_that_comes_back_is_one_group_though_it_was_there_before():
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    for trial in (2, 3):
        bench.left(trial, 2)
    (placement,) = engine.plan(())  # also where nothing else is to start any more
    assert [segment.trial.id for segment in placement.segments] == [2, 3]
    for trial in (2, 3):  # on the device of the others, say
        bench.take(Started(10.0, trial, 0, (Share("a"),), 0, (2, 3)))
    groups = [[s.trial.id for s in g.placement.segments] for g in engine._fused()]
    assert groups == [[0, 1], [2, 3]]
    for trial in (0, 1):
        bench.take(Ended(11.0, trial, TrialStatus.COMPLETED, 9))
    groups = [[s.trial.id for s in g.placement.segments] for g in engine._fused()]
    assert groups == [[2, 3]]


def test_nothing_else_gets_the_device_meanwhile():
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    assert list(engine.submit(bench.both, 5.0)) == []
    engine.queue.append(Placement((engine.running[0],)))
    assert engine.plan(bench.both) == ()
    assert len(engine.queue) == 1


def test_a_member_that_is_to_end_while_it_moves_ends():
    bench = Bench()
    engine = bench.engine
    engine.setup = replace(engine.setup, rules=(FirstOnly(99, also={2: 2}),))
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    bench.report(2, 2)
    assert engine.take_stops(5.0) == [(2, "enough")]
    ended = bench.left(2, 2)  # its worker was told to let it go before it was told to stop it
    assert (ended.status, ended.reason, ended.kept) == (TrialStatus.STOPPED, "enough", False)
    bench.left(3, 2)
    (placement,) = engine.plan(bench.both)
    assert [segment.trial.id for segment in placement.segments] == [3]
    assert bench.unfinished() == [0, 1, 3]


def test_members_that_end_or_die_on_the_way_are_not_waited_for():
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    engine.take_regroups(bench.both)
    bench.take(Ended(5.0, 2, TrialStatus.COMPLETED, 9))
    bench.take(Ended(5.0, 3, TrialStatus.FAILED, 1, "its worker died", lost=True))
    assert not engine.moving
    assert [segment.trial.id for p in engine.queue for segment in p.segments] == [3]  # tried again, anywhere
    assert bench.unfinished() == [0, 1, 3]


def test_a_queue_that_waits_goes_first():
    bench = Bench()
    engine = bench.engine
    for trial in range(4):
        bench.report(trial, 1)
    engine.queue.append(Placement((engine.running[0],)))
    assert engine.take_regroups(bench.both) == ()
    assert bench.asked == 0


# ---------------------------------------------------------------- when the fuser splits


def split_by_fuser(epochs, train_s=5.0, until=20):
    task = make_task(epochs=until)
    fuser = _fusing.Fuser(4, task, 2, learns=False)
    state = StudyState()
    segments = tuple(Segment(Trial(n, {"lr": 0.1, "momentum": 0.5, "dropout": 0.1}, n)) for n in range(4))
    state.apply(Submitted(0.0, 4, segments))
    for n, epoch in enumerate(epochs):
        state.apply(Started(0.0, n, 0, (Share("cpu:0"),), 0, (0, 1, 2, 3)))
        for done in range(1, epoch + 1):
            state.apply(Reported(float(done), n, done, {"loss": 1.0}, train_s / 4))
    running = [Running(Placement(segments, (Share("cpu:0"),)))]
    devices = {name: Device(name) for name in ("cpu:0", "cpu:1")}
    return [order.members for order in fuser.regroup(running, [devices["cpu:1"]], devices, state)]


def test_the_fuser_splits_what_advances_together_and_is_long_enough(monkeypatch):
    monkeypatch.setattr(_fusing, "SPLIT_S", 1.0)
    assert split_by_fuser([3, 3, 3, 3]) == [(1, 3)]
    assert split_by_fuser([3, 3, 2, 3]) == [(0, 3)]  # 2 has most ahead
    assert split_by_fuser([0, 0, 0, 0]) == []  # nothing is known of it yet
    assert split_by_fuser([9, 0, 0, 0]) == []  # one after another: not fused after all
    assert split_by_fuser([18, 18, 18, 18], train_s=1.0) == []  # as good as done
