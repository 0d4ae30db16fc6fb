"""Studies whose trials train as one: the same results as one by one, whatever happens to single members."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core import (
    Ended,
    Noted,
    Placement,
    Segment,
    Share,
    Source,
    Started,
    StudyState,
    Trial,
    TrialStatus,
)
from penstock.core.errors import InvalidInput
from penstock.schedule import StopRule
from penstock.store import open_store
from penstock.study._fusing import Fuser

SPACE = pk.Space(lr=pk.Float(1e-3, 0.5, log=True), momentum=pk.Float(0.0, 0.9), dropout=pk.Float(0.0, 0.5))


def points():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 6, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def net(dropout=0.1):
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def make_task(model=net, **options):
    given = {"epochs": 4, "batch_size": 16, "metrics": {"accuracy": accuracy}, **options}
    return pk.Task(model, pk.Data.split(*points()), F.cross_entropy, **given)


def accuracy(output, targets):
    return (output.argmax(1) == targets).double().mean()


def study(task, fuse, store=False, **options):
    given = {
        "space": SPACE,
        "minimize": "loss",
        "sampler": pk.Random(),
        "scheduler": pk.Full(trials=9),
        "executor": pk.Local(slots=1),
        "seed": 4,
        **options,
    }
    return pk.Study(task, fuse=fuse, store=store, **given)


def alone(task, **options):
    """What the study gives one by one: in this process, which needs no workers."""
    return study(task, False, executor=pk.Simulated(1), **options).run().state


def events_of(path):
    store = open_store(path, write=False)
    try:
        return [event for _, event in store.read(store.find().id)]
    finally:
        store.close()


def assert_same(one: StudyState, other: StudyState):
    one.validate()
    other.validate()
    assert one.trials.keys() == other.trials.keys()
    for a, b in zip(one.trials.values(), other.trials.values(), strict=True):
        assert (a.config, a.seed, a.status, a.epoch) == (b.config, b.seed, b.status, b.epoch)
        assert a.reason == b.reason
        assert [r.epoch for r in a.reports] == [r.epoch for r in b.reports]
        for mine, theirs in zip(a.reports, b.reports, strict=True):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-9, abs=1e-9)


class Fragile(nn.Module):
    """Diverges at once where the learning rate is above 0.2: members of one group differ in that."""

    def __init__(self, lr):
        super().__init__()
        self.body, self.scale = net(0.2), 1e200 if lr > 0.2 else 1.0

    def forward(self, x):
        return self.body(x) * self.scale


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same study one by one and in groups of 4, with trials that diverge."""
    folder = tmp_path_factory.mktemp("pair")
    space = pk.Space(lr=pk.Float(1e-2, 0.5, log=True), momentum=pk.Float(0.0, 0.9))
    found = {}
    for fuse in (False, 4):
        path = folder / f"{fuse}.db"
        given = {"keep": "all", "files": folder / str(fuse)}
        study(make_task(Fragile), fuse, path, space=space, **given).run()
        found[fuse] = events_of(path)
    return folder, found


def test_a_fused_study_gives_what_an_unfused_one_gives(pair):
    _, events = pair
    one, other = (StudyState.of(events[fuse]) for fuse in (False, 4))
    assert_same(one, other)
    statuses = {record.status for record in other.trials.values()}
    assert statuses == {
        TrialStatus.COMPLETED,
        TrialStatus.FAILED,
    }  # and those beside a failed one are as ever
    groups = {event.fused for event in events[4] if isinstance(event, Started)}
    assert max(len(group) for group in groups) > 1
    assert all(len(group) <= 4 for group in groups)
    assert not any(event.fused for event in events[False] if isinstance(event, Started))


def test_checkpoints_of_members_are_those_of_trials_alone(pair):
    folder, events = pair
    one, other = (StudyState.of(events[fuse]) for fuse in (False, 4))
    compared = 0
    for a, b in zip(one.trials.values(), other.trials.values(), strict=True):
        assert sorted(a.saved) == sorted(b.saved)
        if a.status is not TrialStatus.COMPLETED:
            continue
        states = []
        for fuse, record in ((False, a), (4, b)):
            file = next((folder / str(fuse)).glob(f"**/{record.saved[max(record.saved)]}"))
            states.append(load_state(file))
            assert file.stat().st_size < 40_000  # one member's, not the group's
        for name, tensor in states[0]["model"].items():
            assert torch.allclose(tensor.double(), states[1]["model"][name].double(), atol=1e-10)
        assert states[0]["optimizer"]["param_groups"] == states[1]["optimizer"]["param_groups"]
        assert states[0].keys() == states[1].keys()
        compared += 1
    assert compared


def test_energy_and_time_are_split_among_the_members(pair):
    _, events = pair
    fused = StudyState.of(events[4])
    for record in fused.trials.values():
        if record.status is TrialStatus.COMPLETED and len(record.reports) == 4:
            assert record.energy is not None
            assert record.energy.source >= Source.ATTRIBUTED
            assert record.energy.value > 0
    # One slot can't have been busy for longer than the study took.
    assert sum(record.train_s for record in fused.trials.values()) <= fused.spent_s
    assert sum(record.busy_s for record in fused.trials.values()) <= 1.01 * fused.spent_s


def test_the_comparison_in_float64_is_in_the_journal(pair):
    _, events = pair
    notes = [event.data for event in events[4] if isinstance(event, Noted) and event.topic == "fusion"]
    assert notes
    assert notes[0]["check"]["ok"]
    assert notes[0]["check"]["dtype"] == "float64"
    assert notes[0]["count"] == 4


# ---------------------------------------------------------------- members that end by themselves


class EndAt(StopRule):
    """Ends every third trial after its second epoch."""

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        return "every third" if trial % 3 == 1 and epoch == 2 else None


def slow_forward(model, x):
    time.sleep(0.01)  # once for all members
    return model(x)


CALLS: list[None] = []


def patient_forward(model, x):
    """Waits in its fifth epoch until there is a file: the driver does its part before, however late it comes to it."""
    CALLS.append(None)  # once for all: seven to compare them with trials alone, then seven in each epoch
    while len(CALLS) > 35 and not os.path.exists(os.environ["PENSTOCK_TEST_FLAG"]):
        time.sleep(0.01)
    return model(x)


def test_single_members_are_stopped(tmp_path, monkeypatch):
    path, flag, told = tmp_path / "s.db", tmp_path / "told", set()
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(flag))
    executor = pk.Local(slots=1)
    tell = executor.stop

    def stop(trials, **why):
        tell(trials, **why)
        told.update(trials)
        if told >= {1, 4}:
            flag.touch()

    executor.stop = stop
    task = make_task(epochs=12, forward=patient_forward)
    given = {"scheduler": pk.Full(trials=6), "executor": executor, "stop": [EndAt()]}
    stopped = study(task, 6, path, **given).run()
    whole = alone(make_task(epochs=12), scheduler=pk.Full(trials=6))
    for record, other in zip(stopped.trials, whole.trials.values(), strict=True):
        if record.id % 3 == 1:
            assert record.status is TrialStatus.STOPPED
            assert record.reason == "every third"
            assert 2 <= record.epoch < 12
        else:
            assert record.status is TrialStatus.COMPLETED
        for mine, theirs in zip(record.reports, other.reports, strict=False):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-9, abs=1e-9)
    ends = [event.time_s for event in events_of(path) if isinstance(event, Ended)]
    assert min(ends) < max(ends)  # who is done leaves, the others go on


def test_rungs_are_fused(tmp_path):
    path, scheduler = tmp_path / "r.db", pk.Hyperband(max_epochs=9)
    fused = study(make_task(), 8, path, scheduler=scheduler).run()
    assert_same(alone(make_task(), scheduler=scheduler), fused.state)
    starts = [event for event in events_of(path) if isinstance(event, Started)]
    assert any(event.start and len(event.fused) > 1 for event in starts)  # promoted ones, too


def test_asha_promotes_fused_trials():
    fused = study(make_task(), 6, scheduler=pk.ASHA(max_epochs=9, trials=18)).run()
    fused.state.validate()
    assert all(record.status.is_end for record in fused.trials)
    assert max(record.epoch for record in fused.trials) == 9
    assert any(len(record.reports) > 1 for record in fused.trials)


# ---------------------------------------------------------------- by measurement


def test_what_pays_is_fused_by_default(tmp_path):
    path = tmp_path / "a.db"
    task = make_task(forward=slow_forward, epochs=3)  # a step takes 10 ms however many members it has
    found = study(task, "auto", path, scheduler=pk.Full(trials=24)).run()
    assert_same(alone(make_task(epochs=3), scheduler=pk.Full(trials=24)), found.state)
    events = events_of(path)
    note = next(event.data for event in events if isinstance(event, Noted) and event.topic == "fusion")
    assert note["check"]["ok"]
    counts = [count for count, _, _ in note["profiles"]]
    assert counts[:2] == [1, 2]
    rates = {count: count / step_s for count, step_s, _ in note["profiles"]}
    assert note["count"] == max(rates, key=rates.get) > 1
    assert f"groups of {note['count']}" in str(found)
    groups = {event.fused for event in events if isinstance(event, Started)}
    assert max(map(len, groups)) > 1
    again = pk.Study.load(path)  # what was measured is kept with the study
    assert any(note.topic == "fusion" for note in again.state.notes)


class Branching(nn.Module):
    """Asks for a tensor's value, which differs between members."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        out = self.body(x)
        return out * 2 if out.mean().item() > 0 else out


def test_what_cannot_be_fused_trains_alone_with_the_reason():
    space = pk.Space(lr=pk.Float(1e-3, 0.5, log=True))
    task = make_task(lambda: Branching(), forward=slow_forward, epochs=4)
    found = study(task, "auto", space=space, scheduler=pk.Full(trials=16)).run()
    plain = alone(make_task(lambda: Branching()), space=space, scheduler=pk.Full(trials=16))
    assert_same(plain, found.state)
    assert "not fused" in str(found)
    assert "can't be computed for all members at once" in str(found)


def test_a_short_study_is_not_measured():
    found = study(make_task(epochs=1), "auto", scheduler=pk.Full(trials=4)).run()
    assert all(record.status is TrialStatus.COMPLETED for record in found.trials)
    assert "too little to measure for" in str(found)


# ---------------------------------------------------------------- deaths


def deadly_forward(model, x):
    flag = Path(os.environ["PENSTOCK_TEST_FLAG"])
    count = len(list(flag.parent.glob("step-*")))
    (flag.parent / f"step-{count}").touch()
    if count == 30 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return model(x)


def test_all_members_of_a_dead_worker_are_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(tmp_path / "died"))
    path = tmp_path / "d.db"
    dead = study(make_task(forward=deadly_forward), 8, path, scheduler=pk.Full(trials=8)).run()
    assert (tmp_path / "died").exists()
    assert_same(alone(make_task(), scheduler=pk.Full(trials=8)), dead.state)
    assert all(record.retries == 1 for record in dead.trials)
    halved = [n.data for n in dead.state.notes if n.topic == "fusion" and n.data.get("halved")]
    assert [data["count"] for data in halved] == [4]
    groups = {event.fused for event in events_of(path) if isinstance(event, Started) and event.attempt}
    assert {len(group) for group in groups} == {4}


def epochs_in(path):
    try:
        return StudyState.of(events_of(path)).epochs
    except (pk.errors.StoreError, InvalidInput):
        return 0  # it is not there yet


DRIVER = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[2])
    import penstock as pk
    from test_fusion import make_task, patient_forward, study

    task = make_task(epochs=8, forward=patient_forward)
    study(task, 8, sys.argv[1], scheduler=pk.Full(trials=8)).run()
    """
)


def test_a_fused_study_that_is_killed_goes_on_unfused(tmp_path, monkeypatch):
    path, script, flag = tmp_path / "k.db", tmp_path / "driver.py", tmp_path / "go"
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(flag))
    script.write_text(DRIVER)
    process = subprocess.Popen([sys.executable, str(script), str(path), str(Path(__file__).parent)])
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if epochs_in(path) >= 10:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert 10 <= epochs_in(path) < 64
    flag.touch()
    monkeypatch.syspath_prepend(Path(__file__).parent)  # where the driver has its task from
    pk.Study.load(path, fuse=False).run()
    found = StudyState.of(events_of(path))
    assert_same(alone(make_task(epochs=8), scheduler=pk.Full(trials=8)), found)


# ---------------------------------------------------------------- what a session knows


def segment(number, config=None, **more):
    return Segment(Trial(number, config or {"lr": 0.1}, number), until=4, **more)


def placement(numbers):
    return Placement(tuple(segment(n) for n in numbers), (Share("cpu:0"),))


def measured(kind, count):
    profiles = [[1, 1.0, 100], [count, 1.0, 100 * count]]
    return Noted(0.0, "fusion", {"kind": kind, "count": count, "reason": "", "profiles": profiles})


def test_samplers_that_learn_are_not_asked_for_a_whole_study():
    assert Fuser("auto", make_task(), 2, learns=False).ahead(2, 0, 0, 0, 100) == 32
    assert Fuser(16, make_task(), 2, learns=True).ahead(2, 0, 0, 0, 100) == 20
    assert Fuser("auto", make_task(), 2, learns=True).ahead(2, 0, 0, 0, 20) == 10
    assert Fuser("auto", make_task(), 2, learns=True).ahead(1, 0, 10, 10, 20) == 1


def test_samplers_that_learn_are_asked_for_few_until_fusion_was_measured():
    fuser = Fuser("auto", make_task(), 2, learns=True)
    assert fuser.ahead(2, 0, 0, 0, 100) == 10
    fuser.key(segment(0))
    facts = fuser.facts(placement(range(5)))["fusion"]
    fuser.learn(measured(facts["key"], 8))
    assert fuser.ahead(2, 0, 0, 10, 100) == 16
    fuser = Fuser("auto", make_task(), 2, learns=True)
    fuser.learn(measured(facts["key"], 1))  # it does not pay: as many as there are devices
    assert fuser.ahead(2, 0, 0, 10, 100) == 2


def test_what_is_left_is_spread_over_all_devices():
    fuser = Fuser("auto", make_task(), 2, learns=False)
    fuser.key(segment(0))
    facts = fuser.facts(placement(range(16)))["fusion"]
    assert facts["measure"]
    fuser.learn(measured(facts["key"], 64))
    assert fuser.facts(placement(range(16)))["fusion"] == {"count": 64, "key": facts["key"]}
    assert fuser.ahead(1, 0, 16, 32, 100) == 34  # of 68 for two devices, not 64 for the first
    assert fuser.ahead(1, 0, 16, 32, None) == 64


def test_a_kind_is_what_changes_shapes():
    task = pk.Task(
        lambda config: net(config["dropout"]),
        points,
        F.cross_entropy,
        optimizer={"sgd": torch.optim.SGD, "adam": torch.optim.AdamW},
        schedule=lambda optimizer, steps, warmup=1: None,
    )
    fuser = Fuser("auto", task, 2, learns=False)
    base = {"lr": 0.1, "dropout": 0.1, "optimizer": "sgd", "momentum": 0, "layers": 2}

    def same(**changes):
        return fuser.key(segment(0, base)) == fuser.key(segment(1, {**base, **changes}))

    assert same(lr=1e-3, dropout=0.4, momentum=0.9)
    assert same(warmup=5, clip_norm=1)
    assert not same(layers=3)
    assert not same(optimizer="adam")
    assert not same(batch_size=128)
    assert not same(nesterov=True)
    marked = Fuser("auto", task, 2, learns=False, structural=("dropout",))
    assert marked.key(segment(0, base)) != marked.key(segment(1, {**base, "dropout": 0.2}))
    assert fuser.key(segment(0, base, options={"mode": "explore"})) is None
    assert fuser.key(segment(0, base, options={"explorations": [0, 2]})) is None


def test_what_was_not_measured_for_lack_of_time_is_measured_in_the_next_session():
    fuser = Fuser("auto", make_task(), 2, learns=False)
    facts = fuser.facts(placement(range(4)), 12.5)["fusion"]
    assert facts["left_s"] == 12.5
    hurried = {"kind": facts["key"], "count": 1, "reason": "", "profiles": [], "hurried": True}
    fuser.learn(Noted(0.0, "fusion", hurried))
    assert fuser.choice(fuser.key(segment(0))).count == 1
    later = Fuser("auto", make_task(), 2, learns=False)
    later.learn(Noted(0.0, "fusion", hurried), earlier=True)
    assert later.choice(later.key(segment(0))) is None
    assert later.facts(placement(range(4)))["fusion"]["measure"]


def test_a_lost_group_is_halved_once():
    fuser = Fuser("auto", make_task(), 2, learns=False)
    key = fuser.facts(placement(range(8)))["fusion"]["key"]
    lost = [Ended(1.0, n, TrialStatus.FAILED, 0, lost=True) for n in range(8)]
    notes = [fuser.lost(event, 1.0) for event in lost]
    assert [note.data["count"] for note in notes if note is not None] == [4]
    assert fuser.choice(fuser.key(segment(0))).count == 4
    fuser.facts(placement(range(4)))
    assert fuser.lost(Ended(2.0, 0, TrialStatus.COMPLETED, 4), 2.0) is None
    again = Fuser("auto", make_task(), 2, learns=False)
    for note in (measured(key, 16), *filter(None, notes)):
        again.learn(note)
    assert again.choice(again.key(segment(0))).count == 4


def test_a_configuration_that_fails_is_not_held_against_its_kind():
    fuser = Fuser("auto", make_task(), 2, learns=False)
    key = fuser.facts(placement(range(4)))["fusion"]["key"]
    failed = Noted(0.0, "fusion", {"kind": key, "count": 1, "reason": "", "profiles": [], "failed": True})
    fuser.learn(failed)
    assert fuser.facts(placement(range(4)))["fusion"]["measure"]
    fuser.learn(failed)
    fuser.learn(failed)
    assert fuser.choice(fuser.key(segment(0))).count == 1


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        ("always", {}, "got 'always'"),
        (0, {}, "at least 1"),
        (True, {"work": lambda run: 1.0}, "by number only"),
        (4, {"executor": pk.Local(slots=2, slots_per_trial=2)}, "slots_per_trial"),
        (True, {"executor": pk.Simulated(2)}, "give the number of members"),
        (8, {"work": make_task(checkpoint_steps=5)}, "checkpoint_steps"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(given, options, text):
    work = options.pop("work", None) or make_task()
    with pytest.raises(InvalidInput, match=text):
        study(work, given, **options)
    if given in (True, 8):
        study(work, "auto", **options)  # not an error: it trains unfused


def test_simulated_devices_take_fused_placements():
    def train(run):
        for epoch in run.epochs():
            run.report(loss=run.config["x"] / (1 + epoch))

    def makespan_s(fuse, **options):
        executor = pk.Simulated(2, seconds=10.0, **options)
        given = {"space": pk.Space(x=pk.Float(0, 1)), "scheduler": pk.Full(trials=16, epochs=3)}
        found = study(train, fuse, executor=executor, **given).run()
        assert all(record.status is TrialStatus.COMPLETED for record in found.trials)
        return found.state.spent_s, sum(record.train_s for record in found.trials)

    assert makespan_s(False) == pytest.approx((240.0, 480.0))
    assert makespan_s(8) == pytest.approx((30.0, 60.0))
    assert makespan_s(8, fused=0.5) == pytest.approx((135.0, 270.0))
    assert makespan_s(4, fused=0.5) == pytest.approx((150.0, 300.0))


def load_state(file):
    from penstock.train._checkpoint import _loader, _read

    return _loader(file, _read(file))("cpu")


def test_fused_trials_keep_to_a_budget_of_epochs_and_go_on_from_there(tmp_path):
    """Checkpoints come every third epoch only, and with the last one that the budget allows."""
    task = make_task(epochs=5, checkpoint_epochs=3)
    path, limit = tmp_path / "s.db", 14
    done = study(task, 4, path, scheduler=pk.Full(trials=6), budget=pk.Budget(epochs=limit)).run()
    assert (done.state.epochs, done.state.closed.reason) == (limit, "budget")
    assert all(max(t.saved) == t.epoch for t in done.trials if t.epoch)
    done = pk.Study.load(path, budget=pk.Budget(epochs=100)).run()
    again = [report for report in events_of(path) if report.kind == "reported"]
    assert len(again) == len({(report.trial, report.epoch) for report in again}) == 30
    plain = alone(task, scheduler=pk.Full(trials=6))
    for trial in done.trials:
        assert trial.metrics["loss"] == pytest.approx(plain.trials[trial.id].metrics["loss"], rel=1e-6)
