"""A placement of several segments in a worker: measured, fused, and finished alone where fusion fails."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.plan import choose_count
from penstock.train import Data, Task
from penstock.train._fused_loop import FusedTrainer
from penstock.train._worker import Settings, Spec, execute, run_all


class Sink:
    """Keeps what a run tells."""

    def __init__(self):
        self.reports, self.notes, self.saves = {}, [], []

    def reported(self, report):
        epoch, metrics, *_ = report
        self.reports[epoch] = metrics

    def saved(self, epoch, path):
        self.saves.append(epoch)

    def told(self):
        return None

    def noted(self, topic, data):
        self.notes.append((topic, data))


def make_task(**options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 5, generator=generator, dtype=torch.float64)
    data = Data((x, (x[:, 0] > 0).long()), (x[:16], (x[:16, 0] > 0).long()))
    return Task(lambda: nn.Linear(5, 2).double(), data, F.cross_entropy, batch_size=8, **options)


def specs(count, until=4):
    return [Spec(i, {"lr": 0.1 * (i + 1)}, i, 0, until, True, None, None, 0, 0) for i in range(count)]


def run(tmp_path, task, facts, count=4):
    sinks, ends = [Sink() for _ in range(count)], {}
    settings = Settings(tmp_path, ("loss",), choose_fusion=choose_count)
    run_all(task, specs(count), settings, sinks, ends.__setitem__, facts={"fusion": facts})
    assert ends.keys() == set(range(count))
    return sinks, ends


def assert_as_alone(tmp_path, task, sinks, ends):
    for number, spec in enumerate(specs(len(sinks))):
        sink = Sink()
        end = execute(task, spec, Settings(tmp_path / "alone", ("loss",)), sink)
        assert ends[number] == end
        assert sinks[number].reports.keys() == sink.reports.keys()
        assert sinks[number].saves == sink.saves or len(set(sinks[number].saves)) == len(sink.saves)
        for epoch, metrics in sink.reports.items():
            assert sinks[number].reports[epoch] == pytest.approx(metrics, rel=1e-9)


def test_a_placement_is_what_its_segments_are_alone(tmp_path):
    sinks, ends = run(tmp_path, make_task(), {"count": 4, "check": True, "key": "k"})
    assert_as_alone(tmp_path, make_task(), sinks, ends)
    topic, note = sinks[0].notes[0]
    assert (topic, note["kind"], note["count"], note["check"]["ok"]) == ("fusion", "k", 4, True)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a defect")])
def test_a_group_that_breaks_is_finished_alone_from_its_checkpoints(tmp_path, monkeypatch, error):
    original, calls = FusedTrainer.train_epoch, []

    def breaks(self, **options):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(self, **options)

    monkeypatch.setattr(FusedTrainer, "train_epoch", breaks)
    sinks, ends = run(tmp_path, make_task(), {"count": 4, "key": "k"})
    assert len(calls) == 3  # two epochs fused, the third broke, the rest alone
    assert_as_alone(tmp_path, make_task(), sinks, ends)
    halved = [note["count"] for sink in sinks for _, note in sink.notes if note.get("halved")]
    assert halved == ([2] if isinstance(error, MemoryError) else [])


def test_a_configuration_that_cannot_be_built_fails_by_itself(tmp_path):
    def fragile(lr):
        if lr > 0.25:
            raise ValueError("too fast")
        return nn.Linear(5, 2).double()

    task = make_task()
    task.model = fragile
    sinks, ends = run(tmp_path, task, {"count": 4, "key": "k"})
    assert [ends[i].status for i in range(4)] == ["completed", "completed", "failed", "failed"]
    assert "too fast" in ends[2].reason
    assert "fragile" in ends[2].error
    assert [len(sink.reports) for sink in sinks] == [4, 4, 0, 0]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_model_with_gradient_hooks_trains_alone_and_nothing_is_measured(tmp_path, monkeypatch, register):
    def hooked(lr):
        model = nn.Linear(5, 2).double()

        def halve(of):
            if register == "register_hook":
                return of * 0.5
            of.grad.mul_(0.5)

        getattr(model.weight, register)(halve)
        return model

    def never(*args, **options):
        raise AssertionError("measured for nothing")

    monkeypatch.setattr("penstock.train._fused_loop.measure", never)
    monkeypatch.setattr("penstock.train._fused_loop.check", never)
    task = make_task()
    task.model = hooked
    facts = {"measure": True, "key": "k", "count": 4, "ahead": 10**6, "most": 9, "slots": 4}
    sinks, ends = run(tmp_path, task, facts)
    note = sinks[0].notes[0][1]
    assert (note["count"], note["reason"]) == (1, "weight has hooks, which would see all members at once")
    assert "failed" not in note
    assert_as_alone(tmp_path, task, sinks, ends)


def test_measuring_asks_the_rule_with_what_memory_there_is(tmp_path):
    asked = {}

    def rule(measure, trials, *, available_bytes, worth):
        asked.update(trials=trials, bytes=available_bytes)
        return choose_count(measure, trials, available_bytes=available_bytes, worth=worth)

    sinks, ends = [Sink() for _ in range(4)], {}
    settings = Settings(tmp_path, ("loss",), choose_fusion=rule)
    facts = {"measure": True, "key": "k", "count": 4, "ahead": 10**6, "most": 9, "slots": 4}
    run_all(make_task(), specs(4), settings, sinks, ends.__setitem__, facts={"fusion": facts})
    assert asked["trials"] == 9
    assert 0 < asked["bytes"] < 2**45
    assert_as_alone(tmp_path, make_task(), sinks, ends)
    note = sinks[0].notes[0][1]
    assert [count for count, _, _ in note["profiles"]][:2] == [1, 2]
    assert note["reason"]


@pytest.mark.parametrize("facts", [{"count": 4}, {"count": 4, "check": True}, {"count": 1, "check": True}])
def test_every_joule_of_a_placement_is_told_once(tmp_path, facts):
    """At one constant power: what its members are told is that power times its time."""
    import time

    from penstock.energy import EpochMeter, EstimateSensor, Meter

    class Joules(Sink):
        told_j = 0.0

        def reported(self, report):
            super().reported(report)
            self.told_j += report[3][0]

    def slow(**_):
        time.sleep(0.03)
        return nn.Linear(5, 2).double()

    sensor = EstimateSensor(cores=2)
    sensor.energy_j = lambda: sensor.idle_w * time.monotonic()
    hook = EpochMeter(Meter([sensor]))
    task = make_task()
    task.model = slow
    sinks, ends = [Joules() for _ in range(4)], {}
    settings = Settings(tmp_path, ("loss",), make_meter=lambda devices: hook, choose_fusion=choose_count)
    run_all(task, specs(4), settings, sinks, ends.__setitem__, facts={"fusion": facts})  # loads modules
    sinks, ends = [Joules() for _ in range(4)], {}
    settings = Settings(tmp_path / "2", ("loss",), make_meter=lambda devices: hook)
    begun_s = time.monotonic()
    run_all(task, specs(4), settings, sinks, ends.__setitem__, facts={"fusion": facts})
    drawn_j = sensor.idle_w * (time.monotonic() - begun_s)
    assert [end.error for end in ends.values()] == [""] * 4
    outside_j = [end.energy[0] for end in ends.values()]
    assert sum(sink.told_j for sink in sinks) + sum(outside_j) == pytest.approx(drawn_j, rel=0.1)
    assert all(joules > 0.8 * 0.03 * sensor.idle_w for joules in outside_j)


MEASURE = {"measure": True, "key": "k", "count": 4, "ahead": 10**6, "most": 64, "slots": 1}


def test_before_a_near_deadline_nothing_is_measured(tmp_path):
    sinks, ends = run(tmp_path, make_task(), {**MEASURE, "left_s": 0.0})
    assert_as_alone(tmp_path, make_task(), sinks, ends)
    note = sinks[0].notes[0][1]
    assert (note["count"], note["profiles"], note["hurried"]) == (1, [], True)
    assert "check" not in note  # which takes several times as long as all else
    assert "too short to measure in" in note["reason"]


def test_measuring_stays_within_its_part_of_the_time_left(tmp_path, monkeypatch):
    from penstock.train import _fused_loop, _fused_worker

    now_s, counts = [0.0], []

    class Clock:
        perf_counter = staticmethod(lambda: now_s[0])

    def measure(task, configs, count, *, device):
        counts.append(count)
        now_s[0] += 0.1 * count  # of which ever more are worth it: what is left takes days
        return 0.1, 1000

    monkeypatch.setattr(_fused_worker, "time", Clock)
    monkeypatch.setattr(_fused_loop, "measure", measure)
    sinks, _ = run(tmp_path, make_task(), {**MEASURE, "left_s": 8.0})  # a quarter of it: 2 s
    assert counts == [1, 1, 2, 4, 8]  # 1.6 s; 16 members would take as long again
    assert sinks[0].notes[0][1]["count"] == 8
    assert sinks[0].notes[0][1]["hurried"]
    counts.clear()
    sinks, _ = run(tmp_path / "at ease", make_task(), MEASURE)
    assert max(counts) == 64
    assert "hurried" not in sinks[0].notes[0][1]


def test_trials_that_were_told_to_stop_while_fusion_is_measured_end_at_once(tmp_path):
    class Stopped(Sink):
        def told(self):
            return "no longer wanted", False

    sinks, ends = [Stopped() for _ in range(4)], {}
    measured = []

    def rule(measure, trials, **options):
        measured.append(trials)
        return choose_count(measure, trials, **options)

    settings = Settings(tmp_path, ("loss",), choose_fusion=rule)
    run_all(make_task(), specs(4), settings, sinks, ends.__setitem__, facts={"fusion": MEASURE})
    assert [(end.status, end.epoch, end.reason) for end in ends.values()] == [
        ("stopped", 0, "no longer wanted")
    ] * 4
    assert not measured
    assert [(sink.reports, sink.notes) for sink in sinks] == [
        ({}, [])
    ] * 4  # the next such trials are measured


def test_of_a_fused_group_those_told_to_stop_before_it_begins_are_left_out(tmp_path):
    class Stopped(Sink):
        def told(self):
            return "no longer wanted", False

    sinks, ends = [Sink(), Stopped(), Sink(), Sink()], {}
    settings = Settings(tmp_path, ("loss",))
    run_all(
        make_task(), specs(4), settings, sinks, ends.__setitem__, facts={"fusion": {"count": 4, "key": "k"}}
    )
    assert [ends[i].status for i in range(4)] == ["completed", "stopped", "completed", "completed"]
    assert [len(sink.reports) for sink in sinks] == [4, 0, 4, 4]
