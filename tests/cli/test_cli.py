"""The command line as a user would type it: real processes, real exit codes."""

import csv
import io
import json
import math
import re
import signal
import subprocess
import sys

import pytest

from penstock.cli._json import json_text
from penstock.testing.programs import Programs

FILE = """
import math, time
import penstock as pk

def train(run):
    for epoch in run.epochs():
        time.sleep({nap})
        run.save(epoch)
        run.report(loss=abs(math.log10(run.config["lr"]) + 2) + 1 / (epoch + 1))

study = pk.Study(
    train,
    pk.Space(lr=pk.Float(1e-4, 1, log=True), kind=pk.Choice("a", "b")),
    minimize="loss",
    scheduler=pk.ASHA(max_epochs=9, trials={trials}),
    sampler=pk.Random(),
    executor=pk.Local(slots=2),
    store="cli.db",
)
"""


MAIN = "from penstock.cli import main; main()"


@pytest.fixture(scope="module")
def programs():
    """Each command is a process of its own; what every one of them imports is imported once."""
    with Programs("penstock.cli._app", "penstock.study._study", "penstock.store._sql") as made:
        yield made


@pytest.fixture(scope="module")
def penstock(programs):
    def run(*arguments, cwd):
        return programs.run(["-c", MAIN, *map(str, arguments)], cwd=cwd)

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tune.py").write_text(FILE.format(nap=0.001, trials=9))
    return tmp_path


@pytest.fixture
def tuned(folder, penstock):
    done = penstock("tune", "tune.py:study", "--view", "quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_tune_prints_what_it_found_and_what_it_cost(folder, penstock):
    done = penstock("tune", "tune.py:study", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "best    trial" in done.stdout
    assert "cost" in done.stdout
    lines = [line for line in done.stderr.splitlines() if re.match(r"trial \d+ ", line)]
    assert len({line.split()[1] for line in lines}) == 9  # one line per event where there is no terminal


def test_jsonl_on_stdout_is_nothing_but_events(folder, penstock):
    done = penstock("tune", "tune.py", "--view", "quiet", "--jsonl", "-", cwd=folder)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "session_opened"
    assert kinds[-1] == "session_closed"
    assert kinds.count("reported") == sum(int(r["epochs"]) for r in rows(folder, penstock))


def rows(folder, penstock):
    done = penstock("trials", "cli.db", "--csv", cwd=folder)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def test_report_and_trials_agree(tuned, penstock):
    report = json.loads(penstock("report", "cli.db", "--json", cwd=tuned).stdout)
    table = rows(tuned, penstock)
    assert report["trials"] == len(table) == 9
    scored = [row for row in table if row["loss"]]
    best = min(scored, key=lambda row: float(row["loss"]))
    assert int(best["trial"]) == report["best"]["trial"]
    assert float(best["lr"]) == report["best"]["config"]["lr"]
    text = penstock("report", "cli.db", cwd=tuned).stdout
    assert f"trial {best['trial']} after" in text
    as_json = [
        json.loads(line) for line in penstock("trials", "cli.db", "--json", cwd=tuned).stdout.splitlines()
    ]
    assert [row["trial"] for row in as_json] == list(range(9))
    assert penstock("trials", "cli.db", cwd=tuned).stdout.count("\n") == 10


ODD = """
import penstock as pk

def train(run):
    if run.trial:
        raise RuntimeError("\\x1b]0;title\\x07 gone")
    return {"auc[macro]": 0.5}

pk.Study(train, {"kind": pk.Choice("\\x1b[31mred")}, maximize="auc[macro]", name="a\\x1b[2J", store="odd.db",
         scheduler=pk.Full(trials=2), sampler=pk.Random(), executor=pk.Simulated(devices=1)).run(view=None)
"""


def test_what_others_wrote_cannot_steer_the_terminal(tmp_path, penstock, programs):
    (tmp_path / "odd.py").write_text(ODD)
    assert programs.run(["odd.py"], cwd=tmp_path).returncode == 0
    told = penstock("report", "odd.db", cwd=tmp_path).stdout
    table = penstock("trials", "odd.db", cwd=tmp_path).stdout
    assert "study a\\x1b[2J: maximize auc[macro]" in told
    assert "auc[macro]" in table.splitlines()[0]
    for text in (told, table):
        assert "\\x1b[31mred" in text
        assert "RuntimeError: \\x1b]0;title\\x07 gone" in text
        assert all(character.isprintable() or character == "\n" for character in text)


def test_ctrl_c_then_resume(folder, penstock):
    hold = folder / "hold"
    hold.touch()
    text = FILE.format(nap=0.05, trials=30).replace(
        'store="cli.db"', 'store="cli.db", name="two words; $HOME"'
    )
    # Most of it is left, however late the signal comes.
    wait = f"while run.trial > 4 and os.path.exists({str(hold)!r}):\n            time.sleep(0.01)\n        time.sleep("
    text = text.replace("time.sleep(", wait).replace("import math, time", "import math, os, time")
    (folder / "tune.py").write_text(text)
    command = [
        sys.executable,
        "-c",
        MAIN,
        "tune",
        "tune.py",
        "--view",
        "lines",
    ]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "epochs" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    hold.unlink()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    told = errors.partition("Go on with: ")[2].splitlines()[0]
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {told}"], capture_output=True, text=True, cwd=folder)
    again = shown.stdout.splitlines()  # as a shell reads it
    assert again[:2] + again[3:] == ["penstock", "resume", "--study", "two words; $HOME"]
    before = json.loads(penstock("report", "cli.db", "--json", cwd=folder).stdout)
    assert before["running"] == 0
    done = penstock(*again[1:], "--view", "quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    after = json.loads(penstock("report", "cli.db", "--json", cwd=folder).stdout)
    assert after["trials"] == 30
    assert after["completed"] + after["stopped"] == 30
    assert after["epochs"] >= before["epochs"]


def test_budget_from_the_command_line(folder, penstock):
    done = penstock("tune", "tune.py", "--view", "quiet", "--budget", "trials=4", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(rows(folder, penstock)) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tune", "missing.py:study"], "missing.py"),
        (["tune", "tune.py:nothing"], "nothing"),
        (["tune", "tune.py:pk"], "not a penstock.Study"),
        (["tune", "no_such_module:study"], "no_such_module"),
        (["tune", "tune.py", "--view", "loud"], "loud"),
        (["tune", "tune.py", "--budget", "joy=5"], "joy"),
        (["tune", "tune.py", "--budget", "trials=many"], "many"),
        (["report", "none.db"], "none.db"),
        (["trials", "tune.py"], "tune.py"),
        (["resume", "none.db"], "none.db"),
        (["simulate", "--scheduler", "best"], "best"),
    ],
)
def test_mistakes_are_named_without_a_traceback(folder, arguments, named, penstock):
    done = penstock(*arguments, cwd=folder)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in folder.iterdir() if "pycache" not in p.name) == ["tune.py"]


def test_a_file_that_fails_to_load_shows_the_users_lines_only(folder, penstock):
    (folder / "broken.py").write_text("import penstock\n\nvalue = 1 / 0\n")
    done = penstock("tune", "broken.py:study", cwd=folder)
    assert done.returncode == 2
    assert 'broken.py", line 3' in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "_load.py" not in done.stderr


@pytest.mark.parametrize("scheduler", ["full", "halving", "hyperband", "asha"])
def test_simulate_tells_makespan_and_utilisation(tmp_path, scheduler, penstock):
    done = penstock(
        "simulate",
        "--scheduler",
        scheduler,
        "--devices",
        4,
        "--trials",
        27,
        "--epoch-s",
        10,
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # No schedule is shorter than its work spread evenly, and device time is epochs times seconds per epoch.
    assert found["device_s"] == pytest.approx(found["epochs"] * 10)
    assert found["makespan_s"] >= found["device_s"] / 4
    assert 0 < found["utilisation"] <= 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_relative_imports_is_to_be_named_as_a_module(tmp_path, penstock):
    package = tmp_path / "models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("def train(run): run.report(loss=run.config['x'])\n")
    (package / "tune.py").write_text(
        "import penstock as pk\nfrom .parts import train\n"
        "study = pk.Study(train, {'x': pk.Float(0, 1)}, minimize='loss', store=False,\n"
        "                 scheduler=pk.Full(trials=2), executor=pk.Local(1))\n"
    )
    done = penstock("tune", "models/tune.py:study", cwd=tmp_path)
    assert done.returncode != 0
    assert "Name it as a module instead" in done.stderr
    assert "models.tune:..." in done.stderr
    assert "Traceback" not in done.stderr
    assert penstock("tune", "models.tune:study", cwd=tmp_path).returncode == 0


def test_simulate_counts_devices_that_were_never_used(tmp_path, penstock):
    asked = (
        "simulate",
        "--devices",
        50,
        "--scheduler",
        "full",
        "--trials",
        5,
        "--max-epochs",
        2,
        "--epoch-s",
        10,
    )
    found = json.loads(penstock(*asked, "--json", cwd=tmp_path).stdout)
    # Five trials at once, each 20 s on a device of its own, while 45 devices do nothing.
    assert (found["devices"], found["makespan_s"]) == (50, 20)
    assert found["utilisation"] == pytest.approx(0.1)
    assert "on 50 devices" in penstock(*asked, cwd=tmp_path).stdout


def test_a_profile_that_could_not_be_kept_is_not_measured(tmp_path, penstock):
    (tmp_path / "net.py").write_text(
        "import penstock as pk\n"
        "from pathlib import Path\n"
        "def measure():\n"
        "    Path('measured').touch()\n"
        "    raise RuntimeError\n"
        "task = pk.Task(measure, lambda: measure(), lambda o, t: o)\n"
        "space = pk.Space(width=pk.Int(1, 4, structural=True))\n"
    )
    done = penstock("profile", "net.py:task", "--samples", 3, "--store", "nowhere/p.db", cwd=tmp_path)
    assert done.returncode != 0
    assert "mkdir -p" in done.stderr
    assert not (tmp_path / "measured").exists()


def test_simulate_a_study_of_ones_own_keeps_nothing(folder, penstock):
    done = penstock("simulate", "tune.py:study", "--devices", 3, "--epoch-s", 2, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "9 trials" in done.stdout
    assert not (folder / "cli.db").exists()


def test_version_and_help(tmp_path, penstock):
    import penstock as pk

    assert penstock("--version", cwd=tmp_path).stdout.strip() == f"penstock {pk.__version__}"
    shown = penstock("--help", cwd=tmp_path).stdout
    for command in ("tune", "resume", "report", "trials", "simulate"):
        assert command in shown
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"penstock {pk.__version__}")


def test_json_of_commands_is_any_readers():
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    text = json_text({"score": -math.inf, "rows": [{"loss": math.nan, "epochs": 3}, (0.5, math.inf)]})
    told = json.loads(text, parse_constant=refuse)
    assert told == {"score": None, "rows": [{"loss": None, "epochs": 3}, [0.5, None]]}
