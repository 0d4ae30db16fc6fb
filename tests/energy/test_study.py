"""A whole study on fake GPUs: every epoch's joules are reported, shared devices are attributed."""

import dataclasses
import os
import time

import pytest

import penstock as pk
from penstock.energy import make_meter
from penstock.execute import Local


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
            # 200 W of its own GPU for 0.4 s, and the CPU's estimate.
            assert 80 * 0.9 <= report.energy.joules <= 80 + 60
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
