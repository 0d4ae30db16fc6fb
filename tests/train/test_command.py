"""Scripts as work: arguments, reports, endings."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.train import Command
from penstock.train._worker import End, Settings, Spec, execute


class Notes:
    def __init__(self, stop_at: int | None = None) -> None:
        self.reports: list[Any] = []
        self.stop_at = stop_at

    def reported(self, report: Any) -> None:
        self.reports.append(report)

    def saved(self, epoch: int, path: str) -> None: ...

    def told(self) -> tuple[str, bool] | None:
        return ("enough", False) if self.stop_at and len(self.reports) >= self.stop_at else None


def run(
    source: str,
    files: Path,
    notes: Notes,
    *,
    line: str = "",
    config: Any = None,
    grace_s: float = 5,
    **to: Any,
) -> End:
    script = files / "script.py"
    script.write_text("import json, os, sys, time\n" + textwrap.dedent(source))
    command = Command(f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {line}", grace_s=grace_s)
    base: dict[str, Any] = {
        "trial": 3,
        "config": config or {},
        "seed": 11,
        "start": 0,
        "until": 3,
        "last": True,
    }
    base |= {"copy_from": None, "checkpoint": None, "known": 0, "attempt": 0}
    return execute(command, Spec(**(base | to)), Settings(files, ("loss",)), notes)


@given(value=st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_a_value_is_one_argument_whatever_it_contains(value: str) -> None:
    command = Command("prog --name={name} '{name} and more' {{brace}}")
    assert command.arguments({"name": value}) == ["prog", f"--name={value}", f"{value} and more", "{brace}"]
    assert command.fields == {"name"}


def test_no_shell_sees_the_values(tmp_path: Path) -> None:
    notes = Notes()
    bait = f"; touch {tmp_path}/pwned; $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned` && x"
    end = run(
        'print(json.dumps({"loss": float(sys.argv[1] == json.loads(os.environ["PENSTOCK_CONFIG"])["bait"])}))',
        tmp_path,
        notes,
        line="{bait}",
        config={"bait": bait},
        until=1,
    )
    assert end.status == "completed"
    assert notes.reports[0][1] == {"loss": 1.0}
    assert not (tmp_path / "pwned").exists()


def test_formats_and_absent_values() -> None:
    command = Command("prog --lr {lr:.2e} --momentum {momentum} --wd={wd} {flag!r}")
    assert command.arguments({"lr": 0.012345, "flag": "x"}) == ["prog", "--lr", "1.23e-02", "'x'"]
    assert command.fields == {"lr", "momentum", "wd", "flag"}


@pytest.mark.parametrize(
    "line", ["", "prog 'open", "prog {a.b}", "prog {0}", "prog {}", "prog {a", "prog {a[0]}"]
)
def test_bad_lines_are_refused(line: str) -> None:
    with pytest.raises(InvalidInput):
        Command(line)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": {"OMP_NUM_THREADS": 1}}, "Write {'OMP_NUM_THREADS': '1'}"),
        ({"env": ["OMP_NUM_THREADS=1"]}, "variables by name"),
        ({"cwd": 3}, "cwd takes the path of a folder, got 3"),
        ({"grace_s": "10"}, "grace_s must be a number of seconds.*got '10'"),
        ({"grace_s": -1}, "at least 0, got -1"),
    ],
)
def test_what_every_trial_would_fail_with_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Command("prog {lr}", **given)


def test_it_pickles() -> None:
    command = pickle.loads(pickle.dumps(Command("prog {lr}", env={"A": "1"})))
    assert (command.line, command.env, command.fields) == ("prog {lr}", {"A": "1"}, {"lr"})


def test_reports_are_json_lines_and_the_rest_is_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    end = run(
        """
        print("hello {not json}")
        for epoch in range(int(os.environ["PENSTOCK_EPOCHS"])):
            print(json.dumps({"loss": 1 / (epoch + 1), "seed": int(os.environ["PENSTOCK_SEED"])}))
        print("[1, 2]"); print("{}"); print("bye", file=sys.stderr)
        """,
        tmp_path,
        notes,
    )
    assert (end.status, end.epoch) == ("completed", 3)
    assert [report[0] for report in notes.reports] == [1, 2, 3]
    assert notes.reports[1][1] == {"loss": 0.5, "seed": 11.0}


def test_a_script_resumes_from_its_own_directory(tmp_path: Path) -> None:
    source = """
        path = os.path.join(os.environ["PENSTOCK_CHECKPOINT_DIR"], "state")
        start = int(open(path).read()) if os.path.exists(path) else 0
        for epoch in range(start, int(os.environ["PENSTOCK_EPOCHS"])):
            open(path, "w").write(str(epoch + 1))
            print(json.dumps({"epoch": epoch + 1, "loss": epoch, "resume": int(os.environ["PENSTOCK_RESUME_EPOCH"])}))
    """
    first, second, copied = Notes(), Notes(), Notes()
    assert run(source, tmp_path, first, until=2, last=False).status == "paused"
    assert run(source, tmp_path, second, until=5, start=2, known=2).status == "completed"
    assert [report[0] for report in first.reports + second.reports] == [1, 2, 3, 4, 5]
    assert second.reports[0][1]["resume"] == 2
    run(source, tmp_path, copied, trial=4, start=5, until=7, copy_from=(3, 5))
    assert [report[0] for report in copied.reports] == [6, 7]


def test_a_failing_script_shows_its_last_words(tmp_path: Path) -> None:
    notes = Notes()
    end = run('print(json.dumps({"loss": 1}))\nraise RuntimeError("no data in the lake")', tmp_path, notes)
    assert (end.status, end.epoch) == ("failed", 1)
    assert end.reason == "the script failed with exit code 1: RuntimeError: no data in the lake"
    assert "Traceback" in end.error
    assert "_command.py" not in end.error


def test_a_killed_script_is_told(tmp_path: Path) -> None:
    assert "SIGKILL" in run("os.kill(os.getpid(), 9)", tmp_path, Notes()).reason


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    spec = Spec(0, {}, 0, 0, 1, True, None, None, 0, 0)
    end = execute(Command("no-such-program-anywhere"), spec, Settings(tmp_path, ("loss",)), Notes())
    assert (end.status, "no-such-program-anywhere" in end.reason) == ("failed", True)


def test_a_silent_script_is_told_how_to_report(tmp_path: Path) -> None:
    assert '{"loss": 0.1}' in run("pass", tmp_path, Notes()).reason


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"high"', "null"])
def test_bad_values_fail(tmp_path: Path, value: str) -> None:
    end = run(f"print('{{\"loss\": {value}}}')", tmp_path, Notes())
    assert end.status == "failed"
    assert "'loss'" in end.reason


@pytest.mark.parametrize("epoch", ["0", "-1", "1.5", "true", '"x"'])
def test_bad_epochs_fail(tmp_path: Path, epoch: str) -> None:
    end = run(f'print(\'{{"epoch": {epoch}, "loss": 1}}\')', tmp_path, Notes())
    assert (end.status, '"epoch"' in end.reason) == ("failed", True)


def test_megabytes_on_both_streams_do_not_block(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    end = run(
        """
        for epoch in range(3):
            sys.stderr.write("e" * 3_000_000)
            sys.stdout.write("o" * 3_000_000 + "\\n")
            print(json.dumps({"loss": epoch}), flush=True)
        """,
        tmp_path,
        notes,
    )
    assert end.status == "completed"
    assert len(notes.reports) == 3


ENDLESS = """
import signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
HANDLER
epoch = 0
while True:
    epoch += 1
    print(json.dumps({"loss": epoch}), flush=True)
    time.sleep(0.02)
"""


def gone(pid: int) -> bool:
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.faults
@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
@pytest.mark.parametrize("stop_at", [None, 2])
def test_a_script_that_goes_on_is_ended_with_its_children(
    tmp_path: Path, handler: str, stop_at: int | None
) -> None:
    """At the end of its budget, or when it is stopped; SIGKILL follows SIGTERM."""
    notes = Notes(stop_at)
    source, line = ENDLESS.replace("HANDLER", handler), str(tmp_path / "pids")
    end = run(source, tmp_path, notes, line=line, grace_s=0.3)
    assert (end.status, end.epoch) == (("completed", 3) if stop_at is None else ("stopped", 2))
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_sigterm_lets_a_script_clean_up(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *a: (open(sys.argv[1] + '.clean', 'w'), sys.exit(0)))"
    run(ENDLESS.replace("HANDLER", handler), tmp_path, Notes(2), line=str(tmp_path / "pids"))
    assert (tmp_path / "pids.clean").exists()


def test_a_script_may_end_by_itself_after_its_budget(tmp_path: Path) -> None:
    """It is not killed while it writes its last checkpoint."""
    source = """
        for epoch in range(3):
            print(json.dumps({"loss": epoch}), flush=True)
        time.sleep(0.5)
        open(sys.argv[1], "w").write("complete")
    """
    end = run(source, tmp_path, Notes(), line=str(tmp_path / "last"))
    assert end.status == "completed"
    assert (tmp_path / "last").read_text() == "complete"
