"""Energy as a quantity of a study: budgets in Wh, CO2e and money, and what reports say of them."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.energy import Load, SimulatedGpus
from penstock.store import open_store

EPOCH_S = 0.15

FILE = """
import time
import penstock as pk

def train(run):
    for _ in run.epochs(1000):
        time.sleep({epoch_s})
        run.report(loss=0.5)

study = pk.Study(train, {{"x": pk.Float(0, 1)}}, minimize="loss", executor=pk.Local(1), store="tune.db",
                 budget=pk.Budget(trials=1), region="DE", price_per_kwh=0.25, currency="USD")
"""


def train(run):
    for _ in run.epochs(1000):
        time.sleep(EPOCH_S)
        run.report(loss=0.5)


def spend(tmp_path, budget, slots=1, **options):
    study = pk.Study(
        train,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        executor=pk.Local(slots),
        store=tmp_path / "study.db",
        budget=budget,
        **options,
    )
    return study.run()


class Joules:
    """A meter that reads 1, 2, 3 ... J per epoch, scaled."""

    def __init__(self, scale, grows):
        self.scale, self.grows, self.epoch = scale, grows, 0

    def epoch_begin(self):
        pass

    def epoch_end(self):
        self.epoch += 1
        return pk.Measurement(self.scale * (self.epoch if self.grows else 1), "J", pk.Source.MEASURED, 0.0)

    def close(self):
        pass


def many_epochs(run):
    for _ in run.epochs(1000):
        run.report(loss=0.5)


@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("limit_j", [40.0, 47.5, 60.3])
@pytest.mark.parametrize(("scale", "grows"), [(1.0, False), (3.7, False), (0.4, True)])
def test_a_study_stops_within_one_epoch_of_its_energy(devices, limit_j, scale, grows):
    """Known joules on a virtual clock: all running trials together go beyond the limit by an epoch at most."""
    executor = pk.Simulated(devices=devices, seconds=1.0)
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": lambda _: Joules(scale, grows)})
    )
    study = pk.Study(
        many_epochs,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        executor=executor,
        store=False,
        budget=pk.Budget(energy_wh=limit_j / 3600),
    ).run()
    assert study.state.closed.reason == "budget"
    epochs = [report.energy.joules for record in study.trials for report in record.reports]
    assert limit_j - devices * max(epochs) <= study.energy.joules <= limit_j + max(epochs)


class JoulesOf:
    """Meters of trials that draw between ``least`` and ``most`` joules per epoch, as their configuration says."""

    def __init__(self, least, most):
        self.least, self.most = least, most

    def for_trial(self, devices, config):
        return Joules(self.least + (self.most - self.least) * config["x"], False)


@given(
    devices=st.integers(1, 8),
    most=st.floats(1, 4),
    share=st.floats(0, 1),
    even=st.booleans(),
    scheduler=st.sampled_from(["none", "asha", "full", "halving"]),
    fluid=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_all_trials_together_cross_an_energy_budget_by_one_epoch(
    devices, most, share, even, scheduler, fluid, seed
):
    """Whatever runs on however many devices: at most the limit and one epoch of the costliest trial is drawn."""
    limit_j = most + share * 60  # at least an epoch: what the first one costs is known when it is over
    executor = pk.Simulated(
        devices=devices,
        seconds=1.0 if even else lambda config, epoch: 0.5 + config["x"],
        overhead=pk.Overhead(alpha=1.2, beta=1.2, max_sharing=3, max_devices=2) if fluid else None,
    )
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": JoulesOf(1.0, most)})
    )
    study = pk.Study(
        many_epochs,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        scheduler={
            "none": lambda: None,
            "asha": lambda: pk.ASHA(max_epochs=9, min_epochs=1, eta=3, trials=30),
            "full": lambda: pk.Full(trials=40, epochs=3),
            "halving": lambda: pk.Halving(max_epochs=9, min_epochs=1, eta=3, trials=27),
        }[scheduler](),
        executor=executor,
        planner=pk.Fluid() if fluid else None,
        store=False,
        seed=seed,
        budget=pk.Budget(energy_wh=limit_j / 3600),
    ).run()
    epochs = [report.energy.joules for record in study.trials for report in record.reports]
    assert study.energy.joules <= limit_j + max(epochs) + 1e-6
    assert study.state.closed.reason in ("budget", "finished")
    if study.state.closed.reason == "budget":  # and what there was is used
        assert study.energy.joules >= limit_j - devices * (3 if fluid else 1) * max(epochs)


@pytest.mark.parametrize("limit_j", [57.5, 63.3, 70.1])
def test_trials_that_are_run_again_cross_an_energy_budget_by_one_epoch(limit_j):
    """Six that die in their last epoch without a checkpoint, and have all of them before them once more."""
    executor = pk.Simulated(devices=6, failure=lambda trial, epoch, attempt: epoch == 9 and not attempt)
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": lambda _: Joules(1.0, False)})
    )
    study = pk.Study(
        many_epochs,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        scheduler=pk.Full(trials=6, epochs=10),
        sampler=pk.Random(),
        executor=executor,
        store=False,
        budget=pk.Budget(energy_wh=limit_j / 3600),
    ).run()
    assert study.state.closed.reason == "budget"
    assert limit_j - 6 <= study.energy.joules <= limit_j + 1


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("budget", "options", "limit_wh"),
    [
        (pk.Budget(energy_wh=0.0008), {}, 0.0008),
        (pk.Budget(co2_g=0.0003), {"region": "DE"}, 0.0003 / 0.381),  # 381 g per kWh
        (pk.Budget(cost=2e-7), {"price_per_kwh": 0.25}, 2e-7 / 0.25 * 1000),
    ],
    ids=["energy_wh", "co2_g", "cost"],
)
def test_budgets_of_all_three_kinds_end_a_study_cleanly(tmp_path, budget, options, limit_wh, slots):
    study = spend(tmp_path, budget, slots, **options)
    closed = study.state.closed
    assert closed.reason == "budget"
    assert "used up" in closed.detail
    # How exactly is tested above; here the driver may be late by as many epochs as a disk takes to be durable, or as it
    # has to wait for a core.
    longest = [
        max(report.energy.wh for report in record.reports) for record in study.trials if record.reports
    ]
    assert limit_wh - sum(longest) <= study.energy.wh <= limit_wh + 60 * sum(longest)
    assert {record.status.value for record in study.trials} <= {"paused", "waiting"}  # it can be resumed


def test_a_larger_budget_resumes_what_was_left(tmp_path):
    first = spend(tmp_path, pk.Budget(energy_wh=0.0004))
    more_wh = first.energy.wh + 0.002
    again = pk.Study.load(tmp_path / "study.db", budget=pk.Budget(energy_wh=more_wh)).run()
    assert again.energy.wh > first.energy.wh
    assert again.state.closed.reason == "budget"
    assert len(again.trials[0].reports) > len(first.trials[0].reports)


def test_a_budget_that_cant_be_kept_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="price_per_kwh"):
        spend(tmp_path, pk.Budget(cost=1.0))
    with pytest.raises(InvalidInput, match="needs the meter"):
        spend(tmp_path, pk.Budget(energy_wh=1.0), meter=False)
    study = pk.Study(train, {"x": pk.Float(0, 1)}, minimize="loss", store=tmp_path / "later.db")
    study.budget = pk.Budget(cost=1.0)  # as the command line does
    with pytest.raises(InvalidInput, match="price_per_kwh"):
        study.run()


def test_energy_that_is_not_reported_is_said_not_counted_as_zero(tmp_path, capsys):
    study = pk.Study(
        one_epoch,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        executor=pk.Simulated(devices=1, seconds=1.0),
        store=False,
        budget=pk.Budget(energy_wh=1.0, trials=2),
    ).run()
    assert study.energy is None
    assert "energy not metered" in str(study)
    said = capsys.readouterr().err
    assert said.count("reports no energy") == 1
    assert "Simulated(power=SimulatedGpus(...))" in said
    assert "doctor" not in said  # which tells of this machine


def tells_energy(run):
    run.report(loss=0.5, energy_j=run.config["x"])


def test_energy_that_a_simulated_training_tells_has_its_place_in_the_goal(capsys):
    study = pk.Study(
        tells_energy,
        {"x": pk.Float(0.1, 1)},
        minimize=["loss", "energy_j"],
        executor=pk.Simulated(devices=1, seconds=1.0),
        store=False,
        scheduler=pk.Full(trials=4),
    ).run()
    assert study.best.config["x"] == min(record.config["x"] for record in study.trials)
    assert "reports no energy" not in capsys.readouterr().err


def one_epoch(run):
    run.report(loss=0.5)


def penstock(*arguments, cwd):
    command = [sys.executable, "-c", "from penstock.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_command_line_keeps_budgets_and_reports_all_three(tmp_path):
    (tmp_path / "tune.py").write_text(FILE.format(epoch_s=EPOCH_S))
    done = penstock("tune", "tune.py", "--budget", "energy_wh=0.0006", "--view", "quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "budget of 0.0006 Wh used up" in done.stdout
    told = penstock("report", "tune.db", cwd=tmp_path)
    assert "(estimated) CO2e (grid of DE)" in told.stdout
    assert "USD" in told.stdout
    data = json.loads(penstock("report", "tune.db", "--json", cwd=tmp_path).stdout)
    kwh = data["energy_j"] / 3.6e6
    assert 0 < kwh < 0.01
    assert data["co2_g"] == pytest.approx(kwh * 381)
    assert data["cost"] == pytest.approx(kwh * 0.25)
    assert (data["currency"], data["energy_source"]) == ("USD", "estimated")
    assert data["grid"] == {"g_per_kwh": 381, "region": "DE", "assumed": False}
    missing = penstock("tune", "tune.py", "--budget", "energy_wh=lots", cwd=tmp_path)
    assert missing.returncode == 2
    assert "takes a number" in missing.stderr


def test_a_study_tells_its_footprint_and_flags_the_world_average(tmp_path):
    study = spend(tmp_path, pk.Budget(energy_wh=0.0003))
    assert study.co2.value == pytest.approx(study.energy.wh / 1000 * 481)
    assert study.co2.uncertainty > study.energy.uncertainty
    assert study.cost is None
    assert "world average grid, no region given" in str(study)
    assert "(estimated)" in str(study)
    assert study.summary()["grid"]["assumed"]
    assert study.summary()["cost"] is None


@pytest.mark.parametrize("devices", [1, 4])
def test_fused_groups_cross_an_energy_budget_by_the_epoch_of_one(devices, tmp_path):
    """Groups of four on several devices: the first epoch of one group tells what the others will cost."""
    draws = SimulatedGpus(lambda config: Load(epoch_s=10.0, duty=0.5, peak_w=200.0, light_w=50.0))
    study = pk.Study(
        many_epochs,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        sampler=pk.Random(),
        scheduler=pk.Full(trials=32, epochs=8),
        executor=pk.Simulated(devices, seconds=10.0, fused=1.0, power=draws),
        fuse=4,
        store=tmp_path / "study.db",
        budget=pk.Budget(energy_wh=3.0),
    ).run()
    dearest = max(report.energy.wh for record in study.trials for report in record.reports)
    with open_store(tmp_path / "study.db", write=False) as store:
        assert any(len(getattr(event, "fused", ())) == 4 for _, event in store.read(store.find().id))
    assert 3.0 - 4 * devices * dearest <= study.energy.wh <= 3.0 + 4 * dearest + 1e-9
