"""``penstock recur`` and ``penstock replay``, through a command line of their own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli._recur import recur
from penstock.cli._replay import replay
from penstock.core.errors import InvalidInput
from penstock.recurring._synthetic import Gpu, power_table

app = typer.Typer()
app.command("recur")(recur)
app.command("replay")(replay)
runner = CliRunner()

JOB = """
import penstock.recurring as recurring

def train(run):
    for epoch in run.epochs():
        run.report(accuracy=(epoch + 1) / (3 + run.config["batch_size"] / 16))

job = recurring.RecurringJob("nightly", train, batch_sizes=[8, 16, 32], default=32,
                             target=("accuracy", 1.0), max_epochs={max_epochs}, store={store!r})
"""


def invoke(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def job(tmp_path: Path) -> tuple[str, str]:
    store = str(tmp_path / "jobs.db")
    path = tmp_path / "nightly_job.py"
    path.write_text(JOB.format(store=store, max_epochs=20))
    return f"{path}:job", store


def test_recur_runs_remembers_and_tells(job):
    target, store = job
    first = json.loads(invoke("recur", target, "--json"))
    assert (first["number"], first["batch_size"], first["reached"], first["epochs"]) == (0, 32, True, 5)
    lines = [json.loads(line) for line in invoke("recur", target, "--json", "--times", "2").splitlines()]
    assert [line["reached"] for line in lines] == [True, True]
    known = json.loads(invoke("recur", target, "--status", "--json"))
    assert known["reached"] == 3
    assert "nightly" in invoke("recur", target, "--status")
    stored = json.loads(invoke("recur", store, "--status", "--json"))
    assert [one["name"] for one in stored] == ["nightly"]
    assert stored[0]["results"] == known["results"]


def test_a_recurrence_that_fails_is_an_exit_code(tmp_path: Path):
    path = tmp_path / "hopeless_job.py"
    path.write_text(JOB.format(store=None, max_epochs=2))
    done = runner.invoke(app, ["recur", str(path), "--tries", "2"])
    assert done.exit_code == 1
    assert "did not reach the target" in done.stdout


def test_recur_names_what_is_wrong(tmp_path: Path):
    path = tmp_path / "nothing_job.py"
    path.write_text("job = 3\n")
    with pytest.raises(InvalidInput, match=r"not a penstock\.RecurringJob"):
        runner.invoke(app, ["recur", str(path)], catch_exceptions=False)


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    train, power = tmp_path / "train.csv", tmp_path / "power.csv"
    sizes = (16, 32, 64, 128)
    lines = ["dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch"]
    for name in ("alpha", "beta"):
        for size in sizes:
            lines += [f"{name},net,{size},adam,0.1,{run},0.9,{10 + size // 8 + run % 2}" for run in range(4)]
    train.write_text("\n".join(lines))
    lines = ["dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power"]
    gpu = Gpu(limits_w=(100.0, 200.0, 300.0), full_w=280.0)
    table = power_table(gpu, sizes, epoch_s=20.0, saturation=20.0, rise=0.0, rng=random.Random(0))
    for name in ("alpha", "beta"):
        for size, row in table.items():
            lines += [f"{name},net,{size},adam,{w:g},{t},{p}" for w, (t, p) in row.items()]
    power.write_text("\n".join(lines))
    return str(train), str(power)


def test_replay_compares_policies(traces, tmp_path: Path):
    train, power = traces
    base = ["replay", "--train", train, "--power", power, "--seeds", "2"]
    policies = [f"--policy={name}" for name in ("zeus", "ours", "default", "grid", "oracle")]
    result = json.loads(invoke(*base, *policies, "--json"))
    assert [row["workload"] for row in result["workloads"]] == ["alpha", "beta"]
    for row in result["workloads"]:
        assert row["recurrences"] == 2 * 4 * 3
        assert set(row["policies"]) == {"zeus", "ours", "default", "grid", "oracle"}
        assert row["policies"]["oracle"]["regret"] < row["policies"]["grid"]["regret"]
        assert row["pareto"]
    assert result["totals"]["zeus"]["regret_vs_zeus"] == pytest.approx(1.0)
    text = invoke(*base, "--workload", "beta", "--policy", "ours", "--plot", str(tmp_path / "plots"))
    assert "beta" in text
    assert "eta 0.50" in text
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {
        "beta-regret.png",
        "beta-path-ours.png",
        "beta-pareto.png",
    }


def test_replay_of_overlapping_jobs(traces):
    train, power = traces
    base = ["replay", "--train", train, "--power", power, "--seeds", "1", "--arrivals", "synthetic"]
    result = json.loads(invoke(*base, "--policy", "ours", "--json"))
    row = result["policies"]["ours"]
    assert row["most_in_flight"] > 1
    assert all(0 < one["cost_vs_default"] < 2 for one in row["workloads"].values())
    assert "in flight" in invoke(*base, "--policy", "ours")


def test_replay_options_are_checked(traces):
    train, power = traces
    with pytest.raises(InvalidInput, match="--target takes NAME=NUMBER"):
        runner.invoke(
            app, ["replay", "--train", train, "--power", power, "--target", "alpha"], catch_exceptions=False
        )
