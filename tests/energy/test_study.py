"""A whole study on fake GPUs: joules of every epoch, attribution, and power limits set, cached and given back."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.energy import PROFILES, PowerLimits, gpu_sensors, make_meter
from penstock.execute import Local, Simulated
from penstock.store import open_store


def train(run):
    for _ in run.epochs(2):
        time.sleep(0.4)
        run.report(loss=0.5)


def metered(executor):
    """The executor with the meter's hook in its job."""
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": make_meter})
    )
    return executor


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    """The tool by which executors find GPUs, listing the stub's."""

    def make(stub, count):
        folder = tmp_path / "bin"
        folder.mkdir()
        lines = "\n".join(
            f"{index}, {stub.state.devices[index].uuid.decode()}, Stub V100, 32768" for index in range(count)
        )
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return make


def run_study(tmp_path, executor, trials):
    study = pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        executor=metered(executor),
        budget=pk.Budget(trials=trials),
        store=tmp_path / "study.db",
    )
    study.run()
    return study


@pytest.mark.parametrize("count", [2, 4])
def test_a_study_on_fake_gpus(gpus, fake_smi, tmp_path, count):
    stub = gpus(count)
    stub.set_load(200.0)
    fake_smi(stub, count)
    study = run_study(tmp_path, Local(), trials=count)
    records = study.state.trials.values()
    assert len(records) == count
    for record in records:
        assert len(record.reports) == 2
        for report in record.reports:
            # 200 W of its own GPU for 0.4 s or a little more, and the CPU's estimate.
            assert 80 * 0.9 <= report.energy.joules <= (200 * 1.1 + 150) * report.train_s
    assert study.energy.joules == pytest.approx(sum(record.energy.joules for record in records))
    assert str(study.energy.source) == "estimated"  # the CPU's part is, and the weakest counts


def test_packed_trials_split_their_gpu(gpus, fake_smi, tmp_path):
    """Two trials at a time on one GPU: together they are charged what it drew, not twice as much."""
    stub = gpus(1)
    stub.set_load(300.0)
    stub.change(limit_w=250.0)
    fake_smi(stub, 1)
    study = run_study(tmp_path, Local(slots_per_trial=0.5), trials=2)
    begun = min(record.started_s for record in study.state.trials.values())
    ended = max(record.ended_s for record in study.state.trials.values())
    whole_j = 250 * (ended - begun)
    cpu_j = 2 * 8 * (ended - begun) * 2
    assert study.energy.joules <= whole_j * 1.1 + cpu_j
    assert study.energy.joules >= 0.5 * 250 * 0.8


# --- power limits ----------------------------------------------------------------------------------------------

# Milliseconds of an iteration by limit. At a load of 240 W the energies are 240 x 12, 200 x 16, 150 x 2, 100 x 30: no
# GPU is like that. They are far apart, and yet a busy machine's longer sleeps may change which is the least: what is
# asked for below is the least of what was measured. That it is measured well is tested in virtual time (test_limiter).
SPEED_MS = {250: 12.0, 200: 16.0, 150: 2.0, 100: 30.0}
QUICK = {"slice_s": 0.15, "step_w": 50.0}


def train_on_gpu(run):
    """Iterations that take as long as the limit of the trial's own GPU says; tells the limits it ran at."""
    sensor = gpu_sensors(shared=False)[0]
    for _ in run.epochs(2):
        for _ in range(120):
            time.sleep(SPEED_MS[round(sensor.power_limit_w())] / 1000)
            run.iteration(run.config["batch_size"])
        if run.config.get("fails") and run.epoch == 1:
            raise RuntimeError("diverged")
        run.report(loss=0.5, limit_w=sensor.power_limit_w())
    sensor.close()


def limited(tmp_path, limits, *, trials, space=None, **options):
    study = pk.Study(
        options.pop("work", train_on_gpu),
        {"x": pk.Float(0, 1), "batch_size": pk.Choice(32), **(space or {})},
        minimize="loss",
        executor=options.pop("executor", None) or Local(),
        budget=pk.Budget(trials=trials),
        store=tmp_path / "study.db",
        power_limits=limits,
        **options,
    )
    study.run()
    return study


def profiles(study):
    return [note for note in study.state.notes if note.topic == "power_profile"]


def joules(note):
    """What an iteration takes at each limit, as measured."""
    return {limit: watts / throughput for limit, watts, throughput in note.data["profile"]}


def least(note):
    return min(joules(note), key=joules(note).__getitem__)


def sets(stub):
    return sum(stub.state.devices[index].sets for index in range(stub.state.count))


@pytest.mark.parametrize("count", [2, 4])
def test_a_study_finds_sets_and_gives_back_the_limits(gpus, fake_smi, tmp_path, count):
    stub = gpus(count)
    stub.set_load(240.0)
    stub.change(limit_w=230.0)  # what the administrator chose
    fake_smi(stub, count)
    study = limited(tmp_path, PowerLimits(pk.LeastEnergy(), **QUICK), trials=count + 1)
    assert [stub.limit_w(index) for index in range(count)] == [230.0] * count
    assert {record.status.value for record in study.trials} == {"completed"}
    found = profiles(study)
    assert found
    assert {record.reports[-1].metrics["limit_w"] for record in study.trials} <= set(map(least, found))
    for note in found:
        assert note.data["limit_w"] == least(note)
        assert note.data["batch_size"] == 32
        assert note.data["applied"]
        assert [seen[0] for seen in note.data["profile"]] == list(SPEED_MS)
        # 150 W for 2 ms instead of 240 W for 12 ms is 90% less; what was profiled is what is told.
        assert note.data["energy_saved"] == pytest.approx(1 - joules(note)[least(note)] / joules(note)[250])
    assert any(f"{least(note):g} W for Stub V100, batch size 32" in str(study) for note in found)


def test_a_profile_is_made_once_per_store(gpus, fake_smi, tmp_path):
    """The second study on the same store sets the known limit before its first iteration."""
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    limits = PowerLimits(pk.LeastEnergy(), **QUICK)
    first = limited(tmp_path, limits, trials=1)
    profiling = sets(stub)
    assert profiling == 1 + len(SPEED_MS) + 2  # held, each limit, the best, restored
    second = limited(tmp_path, limits, trials=2)
    assert sets(stub) - profiling == 2 * 3  # each: held, the best, restored
    (note,) = profiles(first)
    assert profiles(second) == []
    assert [record.reports[0].metrics["limit_w"] for record in second.trials] == [least(note)] * 2
    store = open_store(tmp_path / "study.db", write=False)
    (key,) = store.keys(PROFILES)
    store.close()
    assert key.startswith("power-profile/Stub V100/")
    assert key.endswith("train_on_gpu/32/1")
    before = sets(stub)
    limited(tmp_path, limits, trials=1, space={"batch_size": pk.Choice(64)})
    assert sets(stub) - before == profiling  # another batch size has its own


def test_several_gpus_of_a_trial_get_one_limit(gpus, fake_smi, tmp_path):
    stub = gpus(2)
    stub.set_load(240.0)
    fake_smi(stub, 2)
    study = limited(
        tmp_path,
        PowerLimits(pk.LeastEnergy(), **QUICK),
        trials=1,
        work=train_on_two,
        executor=Local(slots_per_trial=2),
    )
    (note,) = profiles(study)
    assert note.data["gpus"] == 2
    assert note.data["limit_w"] == least(note)
    assert {limit: watts for limit, watts, _ in note.data["profile"]}[150] == pytest.approx(300, rel=0.3)
    assert study.trials[0].metrics["same"] == 1
    assert [stub.limit_w(index) for index in range(2)] == [250.0] * 2


def train_on_two(run):
    sensors = gpu_sensors(shared=False)
    for _ in run.epochs(2):
        same = True
        for _ in range(120):
            limits = [sensor.power_limit_w() for sensor in sensors]
            same = same and limits[0] == limits[1]
            time.sleep(SPEED_MS[round(limits[0])] / 1000)
            run.iteration(32)
        run.report(loss=0.5, same=same)


def test_a_short_trial_leaves_its_slices_to_the_next(gpus, fake_smi, tmp_path):
    """No trial is long enough for a whole profile, unless the machine stands still: together they make one."""
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    limits = PowerLimits(pk.LeastEnergy(), slice_s=0.5, step_w=50.0)
    study = limited(tmp_path, limits, trials=4, work=train_evenly)
    (note,) = profiles(study)
    assert [seen[0] for seen in note.data["profile"]] == list(SPEED_MS)
    assert study.trials[-1].reports[-1].metrics["limit_w"] == note.data["limit_w"]


def train_evenly(run):
    """As fast at every limit: some two seconds in all, of which a warm-up and each of four slices want half a one."""
    sensor = gpu_sensors(shared=False)[0]
    for _ in run.epochs(2):
        for _ in range(120):
            time.sleep(0.008)
            run.iteration(run.config["batch_size"])
        run.report(loss=0.5, limit_w=sensor.power_limit_w())
    sensor.close()


def test_epochs_alone_are_profiled_too(gpus, fake_smi, tmp_path):
    """A function that never tells of iterations, as a Command can't."""
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    study = limited(tmp_path, PowerLimits(pk.LeastEnergy(), **QUICK), trials=1, work=train_by_epochs)
    (note,) = profiles(study)
    assert note.data["limit_w"] == least(note)


def train_by_epochs(run):
    sensor = gpu_sensors(shared=False)[0]
    for _ in run.epochs(14):
        time.sleep(25 * SPEED_MS[round(sensor.power_limit_w())] / 1000)
        run.report(loss=0.5)


def test_observer_mode_leaves_the_limit_alone(gpus, fake_smi, tmp_path):
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    study = limited(tmp_path, PowerLimits(pk.LeastEnergy(), observe=True, **QUICK), trials=2)
    assert {record.reports[-1].metrics["limit_w"] for record in study.trials} == {250}
    (note,) = profiles(study)
    assert not note.data["applied"]
    assert "would take" in str(study)


def test_a_failing_trial_gives_the_limit_back(gpus, fake_smi, tmp_path):
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    study = limited(
        tmp_path,
        PowerLimits(pk.LeastEnergy(), **QUICK),
        trials=2,
        space={"fails": pk.Choice(True)},
        retries=0,
    )
    assert {record.status.value for record in study.trials} == {"failed"}
    assert "diverged" in study.trials[0].reason
    assert stub.limit_w() == 250.0


def test_without_permission_a_study_says_so_once_and_goes_on(gpus, fake_smi, tmp_path, nvml_stub, capsys):
    stub = gpus(2)
    stub.set_load(240.0)
    stub.add_flags(nvml_stub.LOCKED)
    fake_smi(stub, 2)
    study = limited(tmp_path, pk.EtaCost(0.5), trials=4, scheduler=pk.Full(trials=4, epochs=1))
    assert {record.status.value for record in study.trials} == {"completed"}
    said = capsys.readouterr().err
    assert said.count("CAP_SYS_ADMIN") <= 2  # one per GPU, each with its own command
    assert said.count("-i 0 -pl") == 1
    assert "CAP_SYS_ADMIN" in str(study)


def test_without_gpus_a_study_says_so_once_and_goes_on(tmp_path, capsys):
    study = limited(tmp_path, pk.EtaCost(0.5), trials=3, work=train, executor=Local(2))
    assert study.state.counts.completed == 3
    assert capsys.readouterr().err.count("no GPU here") == 1
    assert [note.topic for note in study.state.notes] == ["power_limits"]
    assert "no GPU here" in str(study)


def test_simulated_devices_have_no_limits(tmp_path, capsys):
    study = limited(
        tmp_path, pk.LeastEnergy(), trials=2, work=simulated, executor=Simulated(devices=2, seconds=1.0)
    )
    assert study.state.counts.completed == 2
    assert "Simulated devices have no power limits" in capsys.readouterr().err


def simulated(run):
    for _ in run.epochs(2):
        run.report(loss=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"power_limits": pk.LeastEnergy(), "executor": Local(slots_per_trial=0.5)}, "slots_per_trial=0.5"),
        ({"power_limits": pk.LeastEnergy(), "meter": False}, "needs the meter"),
        ({"power_limits": pk.LeastEnergy}, r"write LeastEnergy\(...\)"),
        ({"power_limits": 0.5}, "takes a rule"),
    ],
)
def test_what_cant_work_is_refused_up_front(tmp_path, arguments, message):
    with pytest.raises(InvalidInput, match=message):
        pk.Study(train, {"x": pk.Float(0, 1)}, minimize="loss", store=tmp_path / "s.db", **arguments)
    assert not (tmp_path / "s.db").exists()


def test_a_loaded_study_keeps_its_limits(gpus, fake_smi, tmp_path):
    stub = gpus(1)
    stub.set_load(240.0)
    fake_smi(stub, 1)
    limits = PowerLimits(pk.LeastEnergy(), **QUICK)
    limited(tmp_path, limits, trials=1)
    loaded = pk.Study.load(tmp_path / "study.db", budget=pk.Budget(trials=2))
    assert loaded.power_limits == limits


DRIVER = """
import sys
import penstock as pk
from penstock.energy import PowerLimits
sys.path.insert(0, {folder!r})
from test_study import train_for_long
pk.Study(train_for_long, {{"batch_size": pk.Choice(32)}}, minimize="loss", executor=pk.Local(),
    budget=pk.Budget(trials=2), store={store!r}, power_limits=PowerLimits(pk.LeastEnergy(), slice_s=0.08, step_w=50.0)
).run()
"""


def train_for_long(run):
    sensor = gpu_sensors(shared=False)[0]
    for _ in run.epochs(500):
        for _ in range(30):
            time.sleep(SPEED_MS[round(sensor.power_limit_w())] / 1000)
            run.iteration(32)
        run.report(loss=0.5)


@pytest.mark.faults
@pytest.mark.parametrize("who", ["driver", "worker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_study_gives_the_limits_back(gpus, fake_smi, tmp_path, nvml_library, who, number):
    stub = gpus(2)
    stub.set_load(240.0)
    stub.change(limit_w=230.0)
    fake_smi(stub, 2)
    code = DRIVER.format(folder=str(Path(__file__).parent), store=str(tmp_path / "study.db"))
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=stub.environment(nvml_library), stderr=subprocess.DEVNULL
    )
    try:
        assert until(lambda: 230.0 not in [stub.limit_w(index) for index in range(2)])
        if who == "driver":
            os.kill(driver.pid, number)
            assert until(lambda: driver.poll() is not None)
            assert until(lambda: [stub.limit_w(index) for index in range(2)] == [230.0] * 2)
        else:
            for worker in psutil.Process(driver.pid).children():
                if "penstock.train._process" in " ".join(worker.cmdline()):
                    os.kill(worker.pid, number)
            # The trials are tried again, in new workers, from what the profile knows; then the study is told to leave.
            before = sets(stub)
            assert until(lambda: sets(stub) >= before + 4)
            assert until(lambda: 230.0 not in [stub.limit_w(index) for index in range(2)])
            os.kill(driver.pid, signal.SIGTERM)
            assert until(lambda: driver.poll() is not None)
            assert until(lambda: [stub.limit_w(index) for index in range(2)] == [230.0] * 2)
    finally:
        driver.kill()
        driver.wait()


def until(true, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()
