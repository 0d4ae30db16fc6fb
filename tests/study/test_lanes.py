"""Studies of plain training functions whose trials meet in fused calls: the same results as one by one."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core import Ended, Saved, Started, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.schedule import StopRule
from penstock.store import open_store

SPACE = pk.Space(lr=pk.Float(1e-3, 0.5, log=True), dropout=pk.Float(0.0, 0.5))


def train(run, branch=False, deadly=False, patient=False):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    layers = (
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(run.config["dropout"]),
        nn.Linear(8, 2),
    )
    model = (Branching if branch else nn.Sequential)(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    if (state := run.load()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in run.epochs():
        while patient and epoch == 5 and not os.path.exists(os.environ["PENSTOCK_TEST_FLAG"]):
            time.sleep(0.01)
        torch.manual_seed(1000 * run.trial + epoch)
        model.train()
        for rows in torch.randperm(96).split(24):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y)
        run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if deadly and run.trial == 2 and epoch == 2:
            flag = Path(os.environ["PENSTOCK_TEST_FLAG"])
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        run.report(loss=loss)


class Branching(nn.Sequential):
    """Asks for a tensor's value, which differs between trials."""

    def forward(self, x):
        out = super().forward(x)
        return out * 2 if out.mean().item() > 0 else out


def branching(run):
    train(run, branch=True)


def deadly(run):
    train(run, deadly=True)


def patient(run):
    """Waits in its sixth epoch until the driver has told somebody to stop."""
    train(run, patient=True)


def study(work, fuse, store=False, **options):
    given = {
        "space": SPACE,
        "minimize": "loss",
        "sampler": pk.Random(),
        "scheduler": pk.Full(trials=6, epochs=4),
        "executor": pk.Local(slots=1),
        "seed": 4,
        **options,
    }
    return pk.Study(work, fuse=fuse, store=store, **given)


def alone(work=train, **options):
    """What the study gives one by one: in this process, which needs no workers, and where prepare does nothing."""
    return study(work, False, executor=pk.Simulated(1), **options).run().state


def events_of(path):
    store = open_store(path, write=False)
    try:
        return [event for _, event in store.read(store.find().id)]
    finally:
        store.close()


def assert_same(one, other):
    one.validate()
    other.validate()
    assert one.trials.keys() == other.trials.keys()
    for a, b in zip(one.trials.values(), other.trials.values(), strict=True):
        assert (a.config, a.seed, a.status, a.epoch) == (b.config, b.seed, b.status, b.epoch)
        assert [r.epoch for r in a.reports] == [r.epoch for r in b.reports]
        for mine, theirs in zip(a.reports, b.reports, strict=True):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-9, abs=1e-9)


class EndAt(StopRule):
    """Ends every third trial after its second epoch."""

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        return "every third" if trial % 3 == 1 and epoch == 2 else None


def test_rungs_of_a_training_function_meet_in_lanes(tmp_path):
    path, scheduler = tmp_path / "r.db", pk.Hyperband(max_epochs=4, eta=2)
    fused = study(train, 4, path, scheduler=scheduler, keep="all").run()
    assert_same(alone(scheduler=scheduler), fused.state)
    events = events_of(path)
    starts = [event for event in events if isinstance(event, Started)]
    assert max(len(event.fused) for event in starts) == 4
    assert any(event.start and len(event.fused) > 1 for event in starts)  # promoted ones, too
    notes = [note.data for note in fused.state.notes if note.topic == "fusion"]
    assert notes[0]["count"] == 4
    assert notes[0]["check"]["ok"]
    assert "groups of 4" in str(fused)
    assert sum(record.train_s for record in fused.trials) <= fused.state.spent_s
    assert all(record.energy is None or record.energy.value > 0 for record in fused.trials)


def test_lanes_of_a_worker_that_is_killed_go_on_from_their_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(tmp_path / "died"))
    path = tmp_path / "d.db"
    dead = study(deadly, 6, path).run()
    assert (tmp_path / "died").exists()
    assert_same(alone(), dead.state)
    assert all(record.retries == 1 for record in dead.trials)
    again = [event for event in events_of(path) if isinstance(event, Started) and event.attempt]
    assert {len(event.fused) for event in again} == {3}  # half as many
    saved = [(event.trial, event.epoch) for event in events_of(path) if isinstance(event, Saved)]
    assert sorted(saved) == [(trial, epoch) for trial in range(6) for epoch in range(1, 5)]  # none twice


def test_what_cannot_be_fused_trains_alone_with_the_reason(tmp_path):
    path = tmp_path / "b.db"
    found = study(branching, 3, path).run()
    assert_same(alone(branching), found.state)
    assert "not fused" in str(found)
    assert "can't be computed for all members at once" in str(found)
    starts = [event for event in events_of(path) if isinstance(event, Started)]
    assert [len(event.fused) for event in starts][-3:] == [0, 0, 0]  # the study has learnt it


def test_single_lanes_are_stopped(tmp_path, monkeypatch):
    flag, path = tmp_path / "told", tmp_path / "s.db"
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(flag))
    executor = pk.Local(slots=1)
    stop = executor.stop
    executor.stop = lambda *trials, **why: (stop(*trials, **why), flag.touch())
    long = pk.Full(trials=3, epochs=30)
    stopped = study(patient, 3, path, scheduler=long, stop=[EndAt()], executor=executor).run()
    whole = alone(scheduler=pk.Full(trials=3, epochs=3))
    for record, other in zip(stopped.trials, whole.trials.values(), strict=True):
        if record.id == 1:
            assert record.status is TrialStatus.STOPPED
            assert 2 <= record.epoch < 30
        else:
            assert record.status is TrialStatus.COMPLETED
            assert record.epoch == 30
        for mine, theirs in zip(record.reports, other.reports, strict=False):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-9, abs=1e-9)
    ends = [event.trial for event in events_of(path) if isinstance(event, Ended)]
    assert ends[0] == 1


def test_a_number_is_asked_for():
    assert study(train, "auto")._unfused is not None  # as ever
    with pytest.raises(InvalidInput, match=r"by number only \(fuse=8\)"):
        study(train, True)
    with pytest.raises(InvalidInput, match="a command is a process of its own"):
        study(pk.Command("python train.py"), 4)
