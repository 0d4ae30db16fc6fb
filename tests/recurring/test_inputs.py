"""What users may give a recurring job, and what is refused before anything is written."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.core import Source, VirtualClock
from penstock.core.errors import InvalidInput, SensorError
from penstock.energy import SimulatedGpu
from penstock.recurring import Decision, JobSpec, Recurrence, RecurringJob

GOOD = {"epochs": 5, "time_s": 10.0, "energy_j": 900.0, "reached": True}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": 5}, "5"),
        ({"name": ""}, "''"),
        ({"batch_sizes": 32}, "32"),
        ({"batch_sizes": "32"}, "'32'"),
        ({"batch_sizes": [8, "a"]}, "'a'"),
        ({"batch_sizes": [8, 1.5]}, "1.5"),
        ({"batch_sizes": [True]}, "True"),
        ({"batch_sizes": [0]}, "0"),
        ({"batch_sizes": {8: 1}}, "8: 1"),
        ({"default": "8"}, "'8'"),
        ({"eta": "x"}, "'x'"),
        ({"eta": math.nan}, "nan"),
        ({"eta": None}, "None"),
        ({"eta": -0.1}, "-0.1"),
        ({"beta": "x"}, "'x'"),
        ({"beta": math.inf}, "inf"),
        ({"beta": 0.5}, "0.5"),
        ({"window": 0}, "0"),
        ({"window": 2.5}, "2.5"),
        ({"max_epochs": "x"}, "'x'"),
        ({"max_epochs": 0}, "0"),
        ({"max_epochs": 1.5}, "1.5"),
        ({"limits_w": 100}, "100"),
        ({"limits_w": ["x"]}, "'x'"),
        ({"limits_w": [-5.0]}, "-5"),
        ({"limits_w": [math.nan]}, "nan"),
        ({"max_power_w": "x"}, "'x'"),
        ({"max_power_w": 0}, "0"),
        ({"config": 5}, "5"),
        ({"config": {3: 1}}, "3: 1"),
        ({"config": {"lr": "x"}}, "'x'"),
        ({"slice_s": "x"}, "'x'"),
        ({"slice_s": 0}, "0"),
        ({"give_up_s": "x"}, "'x'"),
        ({"give_up_s": -1}, "-1"),
        ({"give_up_s": math.nan}, "nan"),
        ({"store": 5}, "5"),
        ({"sensors": [5]}, "5"),
        ({"sensors": 5}, "5"),
        ({"sensors": []}, "empty"),
        ({"seed": "x"}, "'x'"),
        ({"threads": 0}, "0"),
        ({"clock": 5}, "5"),
        ({"policy": 5}, "5"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(change, named):
    options = {"name": "j", "batch_sizes": [8, 16], **change}
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        RecurringJob(options.pop("name"), **options)
    assert next(iter(change)) in str(caught.value)


def test_batch_sizes_of_any_kind_of_collection_and_whole_number_are_fine(tmp_path: Path):
    for sizes in ((b for b in (8, 16)), np.array([8, 16]), range(8, 17, 8), {8, 16}):
        job = RecurringJob(
            "j", batch_sizes=sizes, default=np.int64(16), eta=np.float32(0.5), window=np.int64(9)
        )
        assert job.decide().batch_size == 16
    with RecurringJob("n", batch_sizes=np.array([8, 16]), store=tmp_path / "n.db") as job:
        ticket = job.decide(limits_w=np.array([100, 200]))
        job.observe(
            np.int64(ticket.number),
            epochs=np.int64(5),
            time_s=np.float32(2.0),
            energy_j=np.float32(50.0),
            reached=np.bool_(True),
            profile={np.float32(100.0): (np.float32(2.0), np.int64(25))},
        )
        job.add_profile(np.int64(8), {np.int64(100): np.array([2.0, 30.0])})
        assert job.history.profile("", 8) == {100.0: (2.0, 30.0)}
        assert job.status()["reached"] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"profile": {100.0: (0.0, 50.0)}},
        {"profile": {100.0: (-1.0, 50.0)}},
        {"profile": {100.0: (1.0, -50.0)}},
        {"profile": {100.0: (math.nan, 50.0)}},
        {"profile": {100.0: (1.0, math.inf)}},
        {"profile": {math.nan: (1.0, 50.0)}},
        {"profile": {-5.0: (1.0, 50.0)}},
        {"profile": {"x": (1.0, 50.0)}},
        {"profile": {100.0: 1.0}},
        {"profile": {100.0: (1.0, 2.0, 3.0)}},
        {"profile": {100.0: "12"}},
        {"profile": [100.0]},
        {"profile": 5},
        {"time_s": 0.0},
        {"time_s": "x"},
        {"time_s": math.nan},
        {"time_s": -1.0},
        {"energy_j": None},
        {"energy_j": math.inf},
        {"energy_j": 1e300},
        {"time_s": 1e300},
        {"time_s": 1e-300},
        {"epochs": 10**400},
        {"profile": {100.0: (1e300, 50.0)}},
        {"epochs": 0},
        {"epochs": "x"},
        {"reached": "no"},
        {"reached": None},
        {"error": 5},
    ],
)
def test_a_bad_result_is_refused_and_harms_nothing(tmp_path: Path, bad):
    path = tmp_path / "j.db"
    with RecurringJob("j", batch_sizes=[8, 16], store=path, limits_w=[100.0]) as job:
        ticket = job.decide()
        with pytest.raises(InvalidInput):
            job.observe(ticket, **{**GOOD, **bad})
        assert job.history.pending == [ticket]
        job.observe(ticket, **GOOD)
    with RecurringJob("j", batch_sizes=[8, 16], store=path, limits_w=[100.0]) as job:
        assert len(job.history.results) == 1
        job.observe(job.decide(), **GOOD)
        assert job.status()["reached"] == 2


@pytest.mark.parametrize(
    ("size", "profile", "device"),
    [
        ("8", {100.0: (1.0, 50.0)}, ""),
        (0, {100.0: (1.0, 50.0)}, ""),
        (8.5, {100.0: (1.0, 50.0)}, ""),
        (8, {}, ""),
        (8, None, ""),
        (8, {100.0: (1.0, math.nan)}, ""),
        (8, {100.0: None}, ""),
        (8, {100.0: (1.0, 50.0)}, 5),
    ],
)
def test_a_bad_profile_is_refused_and_harms_nothing(tmp_path: Path, size, profile, device):
    path = tmp_path / "j.db"
    with RecurringJob("j", batch_sizes=[8, 16], store=path) as job:
        with pytest.raises(InvalidInput):
            job.add_profile(size, profile, device=device)
        job.add_profile(8, {100.0: (1.0, 50.0)})
    with RecurringJob("j", batch_sizes=[8, 16], store=path) as job:
        job.observe(job.decide(), **GOOD)
        assert job.history.profile("", 8) == {100.0: (1.0, 50.0)}


def test_wrong_tickets_devices_and_tries_are_named():
    job = RecurringJob("j", lambda run: None, batch_sizes=[8])
    job.decide()
    for ticket in ("0", None, 0.0, True, -1):
        with pytest.raises(InvalidInput, match="decision"):
            job.observe(ticket, **GOOD)
        with pytest.raises(InvalidInput, match="decision"):
            job.abandon(ticket)
    with pytest.raises(InvalidInput, match=r"device must be .* 5"):
        job.decide(device=5)
    for limits in (["x"], 100, [0]):
        with pytest.raises(InvalidInput, match="limits_w"):
            job.decide(limits_w=limits)
    for tries in ("x", 0, 1.5):
        with pytest.raises(InvalidInput, match="tries"):
            job.run(tries=tries)
    assert job.history.next_number == 1  # nothing else was decided


def test_a_job_and_its_recurrences_tell_what_they_are():
    job = RecurringJob(
        "nightly", batch_sizes=[8, 16], target=("val_loss", 0.5), store="postgresql://u:secret@h/d"
    )
    assert repr(job) == (
        "RecurringJob('nightly', batch_sizes=[8, 16], default=16, target='val_loss <= 0.5', eta=0.5, policy='ours')"
    )

    def told(**more) -> str:
        values = {"reached": True, "epochs": 5.0, "time_s": 0.02, "energy_j": 0.123, "reason": "", **more}
        return str(
            Recurrence(Decision(3, 16), cost=1.0, source=Source.ESTIMATED, tries=1, metrics={}, **values)
        )

    assert (
        told() == "#3 batch size 16: reached the target after 5 epochs, 0.02 s, 0.123 J (estimated) in 1 run"
    )
    assert "did not reach the target: ended after 1 epoch, " in told(reached=False, epochs=1.0)
    assert "did not reach the target (it crashed) after 5 epochs" in told(reached=False, reason="it crashed")
    assert ", 123456 J" in told(energy_j=123456.4)


# -- learning rates ---------------------------------------------------------------------------------------


class SGD:
    """Called like torch's."""


class Adam:
    """Called like torch's."""


class Work:
    """A callable with an optimizer, like a Task."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer
        self.rates: dict[int, float] = {}

    def __call__(self, run) -> None:
        self.rates[run.config["batch_size"]] = run.config["lr"]
        for _ in run.epochs():
            run.report(accuracy=1.0)


@pytest.mark.parametrize(
    ("optimizer", "chosen", "factor"),
    [
        (SGD, None, 4.0),
        (Adam, None, 2.0),
        (functools.partial(SGD, momentum=0.9), None, 4.0),
        (functools.partial(functools.partial(Adam), betas=(0.9, 0.99)), None, 2.0),
        ({"sgd": SGD, "adam": Adam}, "sgd", 4.0),
        ({"sgd": SGD, "adam": functools.partial(Adam)}, "adam", 2.0),
        ({"sgd": SGD, "adam": Adam}, None, 1.0),
        (lambda parameters, lr: None, None, 1.0),
        (None, None, 1.0),
    ],
)
def test_learning_rates_follow_the_optimizer(optimizer, chosen, factor):
    work = Work(optimizer)
    config = {"lr": 0.1} | ({} if chosen is None else {"optimizer": chosen})
    job = RecurringJob("lr", work, batch_sizes=[16, 64], default=16, config=config, policy="zeus")
    for _ in range(6):
        job.run()
    assert work.rates[16] == 0.1
    assert work.rates[64] == pytest.approx(0.1 * factor)


# -- lost runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["zeus", "ours"])
def test_a_run_that_was_killed_is_waited_for_a_day_and_no_longer(policy):
    clock = VirtualClock()
    job = RecurringJob("lost", batch_sizes=[8, 16], default=16, policy=policy, clock=clock)
    lost = job.decide()
    clock.advance_to(86_000.0)
    assert job.status()["under_way"] == [0]
    if policy == "zeus":
        assert not job.decide().explore  # still waiting for the first
    clock.advance_to(200_000.0)
    again = job.decide()
    assert again.batch_size == lost.batch_size
    if policy == "zeus":
        assert again.explore
    status = job.status()
    assert status["under_way"] == [again.number]
    assert 0 in status["lost"]
    job.observe(lost, **GOOD)  # it came after all
    assert 0 not in job.status()["lost"]
    assert [r.number for r in job.history.results] == [0]


def test_a_run_is_waited_for_for_ever_where_the_job_says_so():
    clock = VirtualClock()
    job = RecurringJob("ever", batch_sizes=[8], clock=clock, give_up_s=math.inf)
    job.decide()
    clock.advance_to(1e9)
    assert job.status()["under_way"] == [0]


def test_long_runs_are_waited_for_longer():
    clock = VirtualClock()
    job = RecurringJob("long", batch_sizes=[8], clock=clock)
    job.observe(job.decide(), epochs=5, time_s=50_000.0, energy_j=1.0, reached=True)
    job.decide()
    clock.advance_to(499_000.0)
    assert job.status()["under_way"] == [1]
    clock.advance_to(501_000.0)
    assert job.status()["lost"] == [1]


# -- units and sources --------------------------------------------------------------------------------------


def test_status_from_outside_weighs_costs_as_the_job_does(tmp_path: Path):
    from penstock.cli._recur import _stored
    from penstock.report import views
    from penstock.store import open_store

    for name, options, power_w in (
        ("limits", {"limits_w": [100.0, 250.0]}, 250.0),
        ("given", {"max_power_w": 400.0}, 400.0),
        ("neither", {}, 90.0),  # the first run's draw
    ):
        path = tmp_path / f"{name}.db"
        with RecurringJob(name, batch_sizes=[8], store=path, **options) as job:
            for energy_j in (900.0, 1100.0):
                job.observe(job.decide(), epochs=5, time_s=10.0, energy_j=energy_j, reached=True)
            own = job.status()["batch_sizes"][8]["mean_cost"]
        assert own == pytest.approx(0.5 * 1000.0 + 0.5 * power_w * 10.0)
        assert _stored(str(path))[0]["batch_sizes"][8]["mean_cost"] == pytest.approx(own)
        with open_store(path, write=False) as store:
            told = views.recurring(name, store.get(f"recurring/{name}"))
        assert told["max_power_w"] == pytest.approx(power_w)
        assert told["arms"][0]["mean"] == pytest.approx(own)


def test_limits_found_at_the_device_count_too(tmp_path: Path):
    from penstock.cli._recur import _stored

    clock = VirtualClock()
    gpu = SimulatedGpu(clock)

    def train(run):
        for _ in run.epochs():
            clock.advance_to(clock.now_s() + 10.0)
            run.report(accuracy=1.0)

    path = tmp_path / "gpu.db"
    with RecurringJob("gpu", train, batch_sizes=[8], sensors=[gpu], clock=clock, store=path) as job:
        done = job.run()
        assert job.status()["batch_sizes"][8]["mean_cost"] == pytest.approx(done.cost)
    with RecurringJob("gpu", batch_sizes=[8], store=path) as job:  # knows of no device
        assert job.status()["batch_sizes"][8]["mean_cost"] == pytest.approx(done.cost)
    assert _stored(str(path))[0]["batch_sizes"][8]["mean_cost"] == pytest.approx(done.cost)
    assert done.cost == pytest.approx(0.5 * done.energy_j + 0.5 * 250.0 * done.time_s)


def test_energy_of_a_run_without_a_whole_epoch_is_not_said_to_be_measured():
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)

    def crash(run):
        clock.advance_to(clock.now_s() + 10.0)
        raise RuntimeError("no data")

    job = RecurringJob("crash", crash, batch_sizes=[8], sensors=[gpu], clock=clock)
    done = job.run(tries=1)
    assert done.energy_j > 0
    assert done.source is Source.SIMULATED
    assert done.time_s == pytest.approx(10.0)


def test_a_gauge_that_read_nothing_claims_nothing():
    from penstock.energy import Meter
    from penstock.recurring._launch import Gauge

    clock = VirtualClock()
    spec = JobSpec((8,), 8)
    gauge = Gauge(Meter([SimulatedGpu(clock)], clock=clock), spec, Decision(0, 8), None)
    gauge.close()
    assert gauge.source is Source.SIMULATED


def test_a_slice_whose_energy_is_not_read_at_once_loses_no_samples():
    from penstock.energy import LimitGuard, Meter
    from penstock.recurring._launch import Gauge

    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    read, failing = gpu.energy_j, []

    def energy_j() -> float:
        if failing:
            failing.pop()
            raise SensorError("Timeout")
        return read()

    gpu.energy_j = energy_j
    decision = Decision(0, 8, None, (250.0, 100.0))
    with LimitGuard([gpu]) as guard:
        gauge = Gauge(Meter([gpu], clock=clock), JobSpec((8,), 8), decision, guard, slice_s=3.0)
        gauge.epoch_begin()
        for iteration in range(20):
            clock.advance_to(clock.now_s() + 1.0)
            if iteration == 5:  # the end of the first slice, after three of warming up
                failing.append(True)
            gauge.iteration(10.0)
    assert not failing
    assert [seen.throughput for seen in gauge._machine.profile.limits] == pytest.approx([10.0, 10.0])


def test_one_run_is_no_belief(tmp_path: Path):
    from penstock.report import views
    from penstock.store import open_store

    path = tmp_path / "b.db"
    with RecurringJob("b", batch_sizes=[8, 16], store=path, policy="zeus") as job:
        job.observe(job.decide(), **GOOD)
        with open_store(path, write=False) as store:
            told = views.recurring("b", store.get("recurring/b"))
        assert [(arm["std"], arm["mean"] is None) for arm in told["arms"]] == [(None, False)]
        beliefs = views.recurring_figures(told)[1]["data"]
        assert ["error_y" in trace for trace in beliefs] == [False]
        assert "one run" in beliefs[0]["text"][0]
        for n in range(8):
            job.observe(job.decide(), **{**GOOD, "time_s": 10.0 + n % 3})
    with open_store(path, write=False) as store:
        told = views.recurring("b", store.get("recurring/b"))
    bars = [trace for trace in views.recurring_figures(told)[1]["data"] if "error_y" in trace]
    assert len(bars) == 1
    drawn = [b for b, y in zip(bars[0]["error_y"]["array"], bars[0]["y"], strict=True) if y is not None]
    assert all(bar > 0 for bar in drawn)
    assert "95%" in bars[0]["name"]
