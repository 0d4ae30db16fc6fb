"""What goes wrong is told on the command line: by a message, by the exit code, and with the user's frames alone."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from penstock.cli import main
from penstock.store import open_store

HEAD = """
import penstock as pk

def train(run):
    for epoch in run.epochs(3):
        run.report(loss={loss})

def make(work=train, store="s.db", **options):
    options.setdefault("scheduler", pk.Full(trials=2))
    return pk.Study(work, pk.Space(lr=pk.Float(0, 1)), minimize="loss", sampler=pk.Random(), store=store,
                    executor=pk.Simulated(devices=1), **options)

study = make()
"""


COMMAND = [sys.executable, "-c", "from penstock.cli import main; main()"]


@pytest.fixture
def penstock(tmp_path, monkeypatch, capsys):
    """The command, run in this process: starting one takes longer than all it does here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        sys.modules.pop("t", None)
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    yield run
    sys.modules.pop("t", None)


def write(folder, more="", loss='run.config["lr"]'):
    (folder / "t.py").write_text(HEAD.format(loss=loss) + more)
    return folder


def test_a_study_that_only_failed_exits_with_1_and_shows_where(penstock, tmp_path):
    write(tmp_path, loss='run.config["lr"] / 0')
    done = penstock("tune", "t.py", "--view", "quiet")
    assert done.returncode == 1, done.stderr
    assert "failed  2, e.g. trial 0: ZeroDivisionError" in done.stdout
    assert 'run.report(loss=run.config["lr"] / 0)' in done.stdout
    told = [json.loads(line) for line in penstock("trials", "s.db", "--json").stdout.splitlines()]
    assert all("in train" in row["error"] and row["status"] == "failed" for row in told)
    assert penstock("resume", "s.db", "--view", "quiet").returncode == 1


def test_simulate_tells_of_failures_and_refuses_a_command(penstock, tmp_path):
    write(tmp_path, 'line = make(pk.Command("train --lr {lr}"))\n', loss="1 / 0")
    done = penstock("simulate", "t.py", "--devices", "2")
    assert done.returncode == 1
    assert "failed   2, e.g. trial 0: ZeroDivisionError" in done.stdout
    done = penstock("simulate", "t.py:line")
    assert done.returncode == 2
    assert "can't be simulated" in done.stderr


@pytest.mark.parametrize(
    ("more", "target", "named", "hidden"),
    [
        ("", "t.py:train", "t.py:train is a function that can't be called without arguments", "Traceback"),
        ("def bad():\n    return 1 / 0\n", "t.py:bad", "ZeroDivisionError", "_app.py"),
        ("def bad(:\n", "t.py:bad", "SyntaxError", "importlib"),
    ],
    ids=["arguments", "raises", "syntax"],
)
def test_a_mistake_in_the_users_file_shows_the_users_frames_alone(
    penstock, tmp_path, more, target, named, hidden
):
    write(tmp_path, more)
    done = penstock("tune", target)
    assert done.returncode == 2
    assert named in done.stderr
    assert hidden not in done.stderr
    assert "penstock/cli" not in done.stderr
    assert not (tmp_path / "s.db").exists()


def test_trials_of_a_damaged_journal_are_shown_and_the_damage_is_said(penstock, tmp_path):
    write(tmp_path)
    assert penstock("tune", "t.py", "--view", "quiet").returncode == 0
    damage(tmp_path / "s.db")
    for option in ("--json", "--csv", None):
        done = penstock("trials", "s.db", *([option] if option else []))
        assert done.returncode == 2, done.stdout
        assert "everything before it" in done.stderr
        assert "completed" in done.stdout


def test_two_forms_of_the_trials_at_once_are_refused(penstock, tmp_path):
    done = penstock("trials", "none.db", "--csv", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--csv and --json" in done.stderr


@pytest.mark.parametrize("command", ["tune", "recur", "profile", "simulate"])
def test_a_file_that_is_not_pythons_is_said_to_be_none(penstock, tmp_path, command):
    (tmp_path / "c.toml").write_text("[study]\n")
    done = penstock(command, "c.toml")
    assert done.returncode == 2
    assert "'c.toml' is not a Python file" in done.stderr
    assert "No module named" not in done.stderr


def damage(path):
    """Change the journal's last record, as a failing disk does."""
    connection = sqlite3.connect(path)
    last = "SELECT max(seq) FROM penstock_events"
    assert connection.execute(f"UPDATE penstock_events SET data = '{{}}' WHERE seq = ({last})").rowcount == 1
    connection.commit()
    connection.close()


def test_a_budget_of_cost_and_its_price_from_the_command_line(penstock, tmp_path):
    write(tmp_path)
    done = penstock("tune", "t.py", "--budget", "cost=1", "--price", "-3")
    assert (done.returncode, "price_per_kwh" in done.stderr) == (2, True)
    assert not (tmp_path / "s.db").exists()
    done = penstock("tune", "t.py", "--budget", "cost=1")
    assert (done.returncode, "price_per_kwh" in done.stderr) == (2, True)
    done = penstock("tune", "t.py", "--budget", "cost=1", "--price", "0.3", "--currency", "CHF")
    assert done.returncode == 0, done.stderr
    rows = penstock("trials", "s.db", "--json").stdout.splitlines()
    assert ["cost" in json.loads(row) for row in rows] == [True, True]


SLOW = """
import time

def nap(run):
    for epoch in run.epochs(1000):
        time.sleep(0.05)
        run.report(loss=1.0)

slow = pk.Study(nap, pk.Space(lr=pk.Float(0, 1)), minimize="loss", executor=pk.Local(1), store=False, meter=False)
"""


def test_what_is_not_kept_is_not_to_be_resumed(tmp_path):
    write(tmp_path, SLOW)
    command = [*COMMAND, "tune", "t.py:slow", "--view", "lines"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    for line in process.stderr:
        if "best so far" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "interrupted (SIGTERM)" in out
    assert "resume" not in out + err


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_closed_terminal_lets_epochs_finish_unless_it_is_ignored(tmp_path, ignored):
    epochs = 30 if ignored else 1000  # not over before it is told, however late that is
    write(tmp_path, SLOW.replace("meter=False", f"meter=False, budget=pk.Budget(epochs={epochs})"))
    command = [*COMMAND, "tune", "t.py:slow", "--view", "lines"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    finally:
        signal.signal(signal.SIGHUP, before)
    for line in process.stderr:
        if "best so far" in line:
            break
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == (0 if ignored else 129)
    assert ("interrupted (SIGHUP)" in out) != ignored


@pytest.mark.parametrize(
    "options",
    [["--price", "-3"], ["-o", "nonexist/x.json"], ["-o", "."], ["--g-per-kwh", "-1"]],
    ids=lambda options: options[0] + options[1],
)
def test_measure_checks_before_the_command_runs(penstock, tmp_path, options):
    done = penstock("measure", *options, "--", "touch", "ran")
    assert done.returncode == 2
    assert options[1].split("/")[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_measure_keeps_its_result_and_code_where_the_file_cant_be_written(tmp_path):
    """The folder is gone by the time the command is over."""
    (tmp_path / "out").mkdir()
    options = ["-o", "out/x.json", "--json", "--g-per-kwh", "100"]
    command = [*COMMAND, "measure", *options, "--", "sh", "-c", "rmdir out; exit 3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert "can't write 'out/x.json'" in done.stderr
    told = json.loads(done.stdout)
    assert (told["exit_code"], told["grid"]["g_per_kwh"]) == (3, 100.0)
    assert told["co2_g"] == pytest.approx(told["energy_wh"] / 10)


def test_a_terminal_without_the_letters_of_a_name_gets_the_report_all_the_same(penstock, tmp_path):
    write(tmp_path, more='study = make(name="größe λ")\n')
    penstock("tune", "t.py", "--view", "quiet")
    done = subprocess.run(
        [*COMMAND, "report", "s.db"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert r"study gr\xf6\xdfe \u03bb: minimize loss" in done.stdout


def test_a_file_that_runs_its_study_itself_is_not_executed_by_workers(penstock, tmp_path):
    head = """
import os
with open("executed", "a") as file:
    file.write("x")
if os.path.getsize("executed") > 2:
    raise SystemExit("by a worker of a worker")
"""
    run = """
study = pk.Study(train, {"lr": pk.Float(0, 1)}, minimize="loss", scheduler=pk.Full(trials=2), executor=pk.Local(1),
                 store="s.db")
study.run()
"""
    (tmp_path / "t.py").write_text(head + HEAD.format(loss='run.config["lr"]') + run)
    done = penstock("tune", "t.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "executed").read_text() == "x"
    assert "2 completed" in done.stdout
    with contextlib.closing(open_store(tmp_path / "s.db", write=False)) as store:
        assert len(store.studies()) == 1


@pytest.mark.parametrize("where", [".", "elsewhere"])
def test_a_function_of_a_module_beside_the_script_is_found_again(tmp_path, where):
    """The command's own folder is all it has on its path, as -P does here; python puts the script's there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside.py").write_text("def train(run):\n    run.report(loss=run.config['x'])\n")
    (tmp_path / "script.py").write_text(
        "import penstock as pk\n"
        "from beside import train\n"
        "pk.Study(train, {'x': pk.Float(0, 1)}, minimize='loss', executor=pk.Local(1), store='s.db',\n"
        "         budget=pk.Budget(trials=1)).run()\n"
    )
    made = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    resume = [sys.executable, "-P", *COMMAND[1:], "resume", str(tmp_path / "s.db"), "--budget", "trials=3"]
    done = subprocess.run(resume, cwd=tmp_path / where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 completed" in done.stdout
    (tmp_path / "beside.py").rename(tmp_path / "moved.py")
    done = subprocess.run(resume, cwd=tmp_path / where, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No module named 'beside'" in done.stderr
    assert "PYTHONPATH" in done.stderr
