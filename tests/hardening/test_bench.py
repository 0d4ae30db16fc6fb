"""The list of benchmarks on a repository of its own: what made a result, what is skipped, broken off and gone on with.

The files of benchmarks/ are the real ones; what they run are benchmarks of a few lines.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

FAKE = """
import pathlib, subprocess, sys, time
import _bench
from helper import VALUE

name, *what = sys.argv[1:]
log = pathlib.Path("../log")
with log.open("a") as file:
    file.write(name + "\\n")
if "wait" in what and pathlib.Path("../wait").exists():
    time.sleep(600)
if "commit" in what:
    pathlib.Path("src/penstock/late.py").write_text("late = 1\\n")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "add", "src"], check=True)
    subprocess.run([*git, "commit", "-qm", "Change it meanwhile"], check=True)
if "portions" in what:
    begun = _bench.unfinished(name)
    parts = begun["results"]["parts"] if begun else []
    while len(parts) < 4:
        parts.append(len(parts))
        time.sleep(0.2)
        _bench.save(name, "portions", {"parts": parts}, kept=begun, whole=len(parts) == 4)
        if len(parts) == 2 and pathlib.Path("../wait").exists():
            with log.open("a") as file:
                file.write("half\\n")
            time.sleep(600)
elif "part" in what:
    kept = _bench.earlier(name)
    _bench.save(name, "part", {**kept["results"], "part": 1}, kept=kept)
elif "nothing" not in what:
    for each in name.split("+"):
        _bench.save(each, " ".join(["python", *sys.argv]), {"value": VALUE})
sys.exit("fail" in what)
"""

DRIVE = """
import json, sys
from benchmarks import all as every

fakes = json.loads(open("../fakes.json").read())
every.BENCHMARKS = tuple(
    every.Benchmark(name, ("benchmarks/fake.py", "+".join(writes), *what), tuple(writes), long="long" in what)
    for name, writes, what in fakes
)
if sys.argv[1:2] != ["report"]:
    sys.exit(every.main())
from benchmarks.report import main

sys.exit(main(sys.argv[2:]))
"""


class Repository:
    """A repository with the real list and pages, and a stub of Penstock."""

    def __init__(self, folder):
        self.root = folder / "repository"
        for name in ("_bench.py", "all.py", "report.py", "hardening/soak.py"):
            (self.root / "benchmarks" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "benchmarks" / name, self.root / "benchmarks" / name)
        self.write("benchmarks/fake.py", FAKE)
        self.write("benchmarks/helper.py", "VALUE = 1\n")
        self.write("src/penstock/__init__.py", "")
        self.write("drive.py", DRIVE)
        self.write("docs/results.md", "")
        self.write(
            "README.md", "<!-- results: made by python -m benchmarks.report -->\n<!-- results end -->\n"
        )
        shutil.copy(ROOT / ".gitignore", self.root)
        self.git("init", "-q")
        self.commit()

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def git(self, *arguments):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "Change it")

    def list(self, *fakes):
        named = [(name, list(each) or [name], what.split()) for (name, *each), what in fakes]
        (self.root.parent / "fakes.json").write_text(json.dumps(named))

    @property
    def environment(self):
        return {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "PENSTOCK_DATA": str(self.root.parent / "data"),
        }

    def start(self, *arguments):
        command = [sys.executable, "drive.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.root, env=self.environment, start_new_session=True, **pipes)

    def run(self, *arguments, code=0):
        """What it prints; the names that ran are in ``ran``."""
        (self.root.parent / "log").unlink(missing_ok=True)
        started = self.start(*arguments)
        told = started.communicate(timeout=120)[0]
        assert started.returncode == code, told
        return told

    @property
    def ran(self):
        log = self.root.parent / "log"
        return log.read_text().split() if log.exists() else []

    def result(self, name):
        return json.loads((self.root / "benchmarks" / "results" / f"{name}.json").read_text())

    def broken_off(self, *, at):
        """Run it until the log says ``at``, then press Ctrl-C: what it prints."""
        (self.root.parent / "log").unlink(missing_ok=True)
        (self.root.parent / "wait").touch()
        started = self.start()
        while at not in self.ran:
            assert started.poll() is None, started.communicate()[0]
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGINT)
        told = started.communicate(timeout=60)[0]
        assert started.returncode == 130, told
        (self.root.parent / "wait").unlink()
        return told


def rows(told):
    """The table at the end, by name: exit code, seconds and the rest."""
    found = re.search(r"^benchmark +exit code +seconds$", told, re.MULTILINE)
    lines = told[found.end() :].strip().splitlines()
    start = [found[0].index(word) for word in ("exit code", "seconds")]
    return {
        line[: start[0]].strip(): (line[start[0] : start[1]].strip(), line[start[1] :].split(maxsplit=1))
        for line in lines
        if not line.startswith(("failed:", "broken off:"))
    }


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_result_tells_which_source_made_it(repository, tmp_path):
    repository.list((["one"], f"{tmp_path}/data/x"))
    repository.run()
    found = repository.result("one")
    [source] = found["sources"]
    assert source["penstock"] == repository.git("rev-parse", "HEAD:src/penstock")
    assert source["committed"] == repository.git("log", "-1", "--format=%cI")
    assert source["dirty"] is False
    assert source["benchmark"] == {
        f"benchmarks/{name}": hashlib.sha256(
            (repository.root / "benchmarks" / name).read_bytes()
        ).hexdigest()[:16]
        for name in ("fake.py", "helper.py")
    }
    assert found["seconds"] >= 0
    assert found["command"] == "python benchmarks/fake.py one PENSTOCK_DATA/x"
    assert str(tmp_path) not in json.dumps(found)  # where the data is, is nobody else's matter
    repository.run()
    assert repository.ran == []


def test_it_goes_on_where_it_was_broken_off(repository):
    repository.list((["first", "a", "b"], ""), (["second"], "wait"), (["third"], ""))
    told = repository.broken_off(at="second")
    assert rows(told)["first"][0] == "0"
    assert rows(told)["second"][1][1] == "broken off"
    assert "third" not in repository.ran
    assert re.search(r"^third +not run: broken off$", told, re.MULTILINE)
    assert repository.result("b")["results"] == {"value": 1}
    assert "### b" in (repository.root / "docs" / "results.md").read_text()
    told = repository.run()
    assert repository.ran == ["second", "third"]
    assert told.startswith("skipped: first (already made by this source)\n")
    assert re.search(r"^first +skipped: already made by this source$", told, re.MULTILINE)
    repository.run()
    assert repository.ran == []
    repository.run("--again")
    assert repository.ran == ["a+b", "second", "third"]
    repository.run("--only", "third")
    assert repository.ran == ["third"]


def test_what_is_made_by_another_source_is_made_again(repository):
    repository.list((["one"], ""), (["two"], ""))
    repository.run()
    repository.write("README.md", (repository.root / "README.md").read_text() + "More.\n")
    repository.commit()
    repository.run()
    assert repository.ran == []  # neither README nor results are source
    repository.write("src/penstock/core.py", "x = 1\n")
    repository.commit()
    repository.run()
    assert repository.ran == ["one", "two"]
    repository.write("benchmarks/helper.py", "VALUE = 2\n")
    repository.commit()
    repository.run()
    assert repository.ran == ["one", "two"]
    repository.list((["one"], "other"), (["two"], ""))
    repository.run()
    assert repository.ran == ["one"]  # other arguments


@pytest.mark.parametrize("path", ["src/penstock/__init__.py", "src/penstock/new.py", "benchmarks/helper.py"])
def test_what_is_not_committed_counts_for_no_source(repository, path):
    repository.list((["one"], ""))
    repository.write(path, "VALUE = 3\n")
    for _ in range(2):
        told = repository.run()
        assert told.startswith("what is here isn't committed")
        assert repository.ran == ["one"]
        assert repository.result("one")["sources"][0]["dirty"] is True
    page = (repository.root / "docs" / "results.md").read_text()
    assert (
        "Of 1 results 0 were made by it as it is committed, 0 by earlier sources or several, 1 with uncommitted"
        in page
    )


def test_a_source_that_changes_while_it_runs_is_not_the_one_that_made_it(repository):
    repository.list((["one"], "commit"))
    repository.run()
    assert repository.git("status", "--porcelain", "src") == ""
    assert repository.result("one")["sources"][0]["dirty"] is True


def test_without_git_nothing_is_known(repository):
    shutil.rmtree(repository.root / ".git")
    repository.list((["one"], ""))
    for _ in range(2):
        assert repository.run().startswith("git does not know what is here")
        assert repository.ran == ["one"]
    assert repository.result("one")["sources"][0]["penstock"] == "unknown"
    page = (repository.root / "docs" / "results.md").read_text()
    assert "1 do not record what made them" in page
    assert "source unknown, took " in page


def test_what_fails_does_not_stop_the_others(repository):
    repository.list((["bad"], "fail nothing"), (["silent"], "nothing"), (["good"], ""), (["slow"], "long"))
    told = repository.run("--quick", code=1)
    assert repository.ran == ["bad", "silent", "good"]
    table = rows(told)
    assert [table[name][0] for name in ("bad", "silent", "good")] == ["1", "0", "0"]
    assert "did not write silent" in table["silent"][1]
    assert re.search(r"^slow +skipped: takes more than half an hour$", told, re.MULTILINE)
    assert told.endswith("failed: bad, silent\n")
    repository.run(code=1)
    assert repository.ran == ["bad", "silent", "slow"]


def test_what_fails_after_it_has_written_its_result_runs_again(repository):
    repository.list((["bad"], "fail"), (["good"], ""))
    for _ in range(2):
        told = repository.run(code=1)
        assert told.endswith("failed: bad\n")
        assert repository.result("bad")["results"] == {"value": 1}
    assert repository.ran == ["bad"]
    repository.write("benchmarks/fake.py", FAKE.replace('"fail" in what', "0"))
    repository.commit()
    repository.run()
    assert repository.ran == ["bad", "good"]
    assert "exit_code" not in repository.result("bad")
    repository.run()
    assert repository.ran == []


def test_portions_add_up_over_runs_and_the_result_stays_until_they_are_whole(repository):
    repository.list((["sum"], "portions"))
    old = {"command": "x", "date": "2020-01-01", "versions": {}, "results": {"value": 7}}
    old["machine"] = dict.fromkeys(("cores", "processor", "python", "system"), "?")
    repository.write("benchmarks/results/sum.json", json.dumps(old))
    repository.commit()
    repository.broken_off(at="half")
    assert repository.result("sum") == old
    first = repository.result("unfinished/sum")
    assert first["results"] == {"parts": [0, 1]}
    assert repository.git("status", "--porcelain", "benchmarks") == ""
    repository.run()
    whole = repository.result("sum")
    assert whole["results"] == {"parts": [0, 1, 2, 3]}
    assert len(whole["sources"]) == 1
    assert whole["seconds"] >= first["seconds"] + 0.4  # two portions of 0.2 s
    assert not (repository.root / "benchmarks" / "results" / "unfinished" / "sum.json").exists()
    repository.write("src/penstock/core.py", "x = 1\n")
    repository.commit()
    repository.broken_off(at="half")
    repository.write("src/penstock/core.py", "x = 2\n")
    repository.commit()
    repository.run()
    [source] = repository.result("sum")["sources"]  # all four anew: the others were another source's
    assert source["penstock"] == repository.git("rev-parse", "HEAD:src/penstock")


def test_an_old_result_is_of_no_recorded_source_and_a_part_put_into_it_does_not_hide_that(repository):
    old = {"command": "x", "date": "2020-01-01", "versions": {}, "results": {"value": 7}}
    old["machine"] = dict.fromkeys(("cores", "processor", "python", "system"), "?")
    repository.write("benchmarks/results/one.json", json.dumps(old))
    repository.list((["one"], "part"), (["two"], ""))
    repository.run("report")
    page = (repository.root / "docs" / "results.md").read_text()
    assert "`x` (`make bench-one`) on 2020-01-01, source not recorded, duration not recorded" in page
    assert "1 of these have dates before that commit" in page
    repository.run()
    assert repository.ran == ["one", "two"]
    assert [each["penstock"] for each in repository.result("one")["sources"]][1:] == ["not recorded"]
    assert repository.result("one")["seconds"] is None
    page = (repository.root / "docs" / "results.md").read_text()
    assert "Of 2 results 1 was made by it as it is committed, 0 by earlier sources or several, 0 with" in page
    assert "and 1 do not record" in page
    repository.run()
    assert repository.ran == ["one"]


def test_the_page_names_the_source_it_was_made_at_and_stays_the_same_when_that_goes_on(repository):
    repository.list((["one"], ""), (["two"], ""))
    repository.run()
    tree = repository.git("rev-parse", "--short=10", "HEAD:src/penstock")
    page = (repository.root / "docs" / "results.md").read_text()
    assert f"`src/penstock` was `{tree}` (committed " in page
    assert "Of 2 results 2 were made by it" in page
    assert page.count(f"source `{tree}` (the above), took ") == 2
    repository.write("src/penstock/core.py", "x = 1\n")
    repository.commit()
    repository.run("report", "--check")
    repository.run("--only", "two")
    page = (repository.root / "docs" / "results.md").read_text()
    assert "Of 2 results 1 was made by it as it is committed, 1 by earlier sources" in page
    assert re.search(rf"^\| `{tree}` \| \d+ hours before it \| one \|$", page, re.MULTILINE)
    assert f"source `{tree}` (0 hours before it), took " in page
    repository.run("report", "--check")
    (repository.root / "docs" / "results.md").write_text(page.replace("| one |", "| one, two |"))
    repository.run("report", "--check", code=1)
