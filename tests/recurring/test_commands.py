"""``penstock recur`` and ``penstock replay``: what they print, refuse and survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli._recur import _terminable, recur
from penstock.cli._replay import _totals, replay
from penstock.core import VirtualClock
from penstock.core.errors import InvalidInput, StoreError
from penstock.energy import SimulatedGpu
from penstock.recurring import RecurringJob, read_workloads
from penstock.recurring._replay import replay as replay_one
from penstock.recurring._study import pareto
from penstock.recurring._zeus import Zeus

app = typer.Typer()
app.command("recur")(recur)
app.command("replay")(replay)
runner = CliRunner()


def invoke(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(match: str, *arguments: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        runner.invoke(app, list(arguments), catch_exceptions=False)


# -- recur ------------------------------------------------------------------------------------------------

ENDLESS = """
import time
import penstock.recurring as recurring

def train(run):
    for epoch in run.epochs():
        print("training", flush=True)
        time.sleep(600)
        run.report(accuracy=0.0)

job = recurring.RecurringJob("endless", train, batch_sizes=[8], store={store!r})
"""


def test_a_terminated_run_gives_its_ticket_back(tmp_path: Path):
    store, path = tmp_path / "jobs.db", tmp_path / "endless_job.py"
    path.write_text(ENDLESS.format(store=str(store)))
    command = [sys.executable, "-c", "from penstock.cli._app import main; main()", "recur", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "training" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode not in (0, -signal.SIGKILL)
    with RecurringJob("endless", batch_sizes=[8], store=store) as job:
        assert job.history.next_number == 1
        assert job.history.pending == []
        assert job.history.abandoned == {0}
        assert job.history.results == []


def test_a_terminated_run_restores_its_power_limit_and_gives_its_ticket_back():
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    limits = []

    def train(run):
        for epoch in run.epochs():
            clock.advance_to(clock.now_s() + 10.0)
            limits.append(gpu.power_limit_w())
            if epoch == 2:  # the guard of the power limit has a handler of its own by now
                os.kill(os.getpid(), signal.SIGTERM)
            run.report(accuracy=0.0)

    job = RecurringJob("gpu", train, batch_sizes=[8], sensors=[gpu], clock=clock)
    with pytest.raises(KeyboardInterrupt), _terminable():
        job.run()
    assert len(set(limits)) > 1
    assert gpu.power_limit_w() == 250.0
    assert job.history.abandoned == {0}
    assert job.history.pending == []


def test_sigterm_is_handled_as_before_once_the_runs_are_over(tmp_path: Path):
    path = tmp_path / "short_job.py"
    path.write_text(
        "import penstock.recurring as recurring\n"
        "def train(run):\n"
        "    for _ in run.epochs():\n"
        "        run.report(accuracy=1.0)\n"
        "job = recurring.RecurringJob('short', train, batch_sizes=[8])\n"
        "def needs(store):\n"
        "    return job\n"
        "def makes(store=None):\n"
        "    return job\n"
        "def fails():\n"
        "    return {}['default']\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert "reached the target" in invoke("recur", str(path))
    assert "reached the target" in invoke("recur", f"{path}:makes")
    assert signal.getsignal(signal.SIGTERM) == before
    refused(r"needs is a function that can't be called without arguments .*'store'", "recur", f"{path}:needs")
    # Where it failed, in the user's own file, and none of our frames.
    refused(r"fails failed:\n(?s:.*)line 11, in fails\n(?s:.*)KeyError: 'default'", "recur", f"{path}:fails")


@pytest.mark.parametrize("name", ["jobs.store", "jobs", "jobs.sqlite", "jobs.db.old"])
def test_the_status_of_a_store_whatever_it_is_called(tmp_path: Path, name: str):
    path = tmp_path / name
    with RecurringJob("nightly", batch_sizes=[8], store=path) as job:
        job.observe(job.decide(), epochs=5, time_s=10.0, energy_j=900.0, reached=True)
    assert json.loads(invoke("recur", str(path), "--status", "--json"))[0]["name"] == "nightly"
    assert "nightly on any device: 1 runs" in invoke("recur", str(path), "--status")


def test_a_file_that_is_no_store_is_said_to_be_none(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing of the kind\n" * 100)
    with pytest.raises(StoreError):
        runner.invoke(app, ["recur", str(path), "--status"], catch_exceptions=False)


# -- replay -----------------------------------------------------------------------------------------------


def test_replay_prints_paths_fronts_and_curves(traces):
    train, power = map(str, traces)
    base = ["replay", "--train", train, "--power", power, "--seeds", "1", "--workload", "cifar100"]
    text = invoke(*base, "--policy", "zeus", "--policy", "default")
    workload = read_workloads(train, power, ["cifar100"])[0]
    run = replay_one(workload, Zeus(), seed=0)
    total = workload.recurrences
    assert f"after {total // 4}, {total // 2}, {3 * total // 4}, {total} recurrences" in text
    curve = run.curve()
    expected = " ".join(f"{curve[total * q // 4 - 1]:.2f}" for q in (1, 2, 3, 4))
    assert any(" ".join(line.split()[1:]) == expected for line in text.splitlines())
    for point in pareto(workload):
        assert f"{point['energy_j']:,.0f} J  {point['batch_size']:g}@{point['limit_w']:g}W" in text
    # Unrolled, what is printed is every run of the first seed in turn.
    words = text.partition("search path")[2].partition("  zeus")[2].partition("  default")[0].split()
    unrolled = []
    for word in words:
        times, _, one = word.rpartition("x")
        unrolled += [one] * int(times or 1)
    assert unrolled == [
        f"{s.batch_size}@{s.limit_w:g}W{'' if s.reached else '!'}" for s in run.steps
    ]  # failed runs too


@pytest.mark.parametrize("option", ["--plot=x", "--sweep", "--recurrences=5", "--in-flight=2"])
def test_options_that_arrivals_have_no_use_for_are_refused(traces, option):
    train, power = map(str, traces)
    name = option.partition("=")[0]
    refused(
        f"{name} can't be combined",
        "replay",
        "--train",
        train,
        "--power",
        power,
        "--arrivals=synthetic",
        option,
    )


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("--default=cifar100=0.5", "whole number of at least 1.*cifar100=0.5"),
        ("--default=cifar100=nan", "NAME=NUMBER"),
        ("--default=cifar100=0", "at least 1"),
        ("--default==8", "NAME=NUMBER"),
        ("--default=mnist=8", "given for mnist"),
        ("--target=mnist=0.5", "given for mnist"),
        ("--target=cifar100=inf", "NAME=NUMBER"),
    ],
)
def test_pairs_are_checked(traces, option, match):
    train, power = map(str, traces)
    refused(match, "replay", "--train", train, "--power", power, option)


def test_a_default_may_be_written_like_any_whole_number(traces):
    train, power = map(str, traces)
    text = invoke(
        "replay", f"--train={train}", f"--power={power}", "--workload=cifar100", "--default=cifar100=2.56e2",
        "--policy=default", "--seeds=1", "--recurrences=2",
    )  # fmt: skip
    assert "default 256" in text


def test_nothing_is_a_multiple_of_no_regret():
    rows = [{"policies": {"zeus": {"regret": 0.0}, "ours": {"regret": 1.0}}}]
    assert _totals(rows, ["zeus", "ours"])["ours"] == {
        "regret_sum": 1.0,
        "regret_vs_zeus": None,
        "worst_vs_zeus": None,
    }
    rows.append({"policies": {"zeus": {"regret": 2.0}, "ours": {"regret": 1.0}}})
    assert _totals(rows, ["zeus", "ours"])["ours"]["regret_vs_zeus"] == pytest.approx(0.5)


def test_json_stays_json_where_zeus_has_no_regret(tmp_path: Path):
    train, power = tmp_path / "train.csv", tmp_path / "power.csv"
    train.write_text(
        "dataset,network,batch_size,optimizer,learning_rate,target_metric,target_epoch\na/b,n,8,sgd,0.1,0.5,4\n"
    )
    power.write_text(
        "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\na/b,n,8,sgd,100,10,90\n"
    )
    base = ["replay", "--train", str(train), "--power", str(power), "--seeds", "1", "--policy", "zeus"]

    def never(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(invoke(*base, "--json"), parse_constant=never)
    assert told["totals"]["zeus"]["regret_vs_zeus"] is None
    plots = tmp_path / "plots"
    assert "a/b" in invoke(*base, "--plot", str(plots))
    assert {p.name for p in plots.iterdir()} == {"a-b-regret.png", "a-b-path-zeus.png", "a-b-pareto.png"}


def test_plots_that_can_t_be_written_are_refused_before_the_replay(traces):
    train, power = map(str, traces)
    refused("Can't write plots to", "replay", "--train", train, "--power", power, "--plot", train)
    refused(
        "Can't write plots to",
        "replay",
        "--train",
        train,
        "--power",
        power,
        "--plot",
        os.path.join(train, "x"),
    )
