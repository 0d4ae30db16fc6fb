"""``penstock simulate --jobs``: job lists, device kinds, rate tables and policies from the command line."""

import json

import pytest
from typer.testing import CliRunner

from penstock.cli._app import app
from penstock.cli._cluster import parse_devices, read_jobs, read_rates
from penstock.core.errors import InvalidInput

JOBS = """arrival_s,kind,trials,iterations,rungs,max_devices
0,cnn,9,100,2,
10,rec,4,100,1,2
"""
RATES = {"cnn": {"new": 4.0, "old": 1.0}, "rec": {"new": 2.0, "old": 3.0}}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "jobs.csv").write_text(JOBS)
    (tmp_path / "rates.json").write_text(json.dumps(RATES))
    return tmp_path


def run(*args):
    return CliRunner().invoke(app, ["simulate", *map(str, args)])


def test_a_job_list_by_hand(files):
    """cnn: 9 trials of 100 then 3 of 300; alone on one new device that is 225 s + 225 s."""
    (files / "one.csv").write_text("\n".join(JOBS.splitlines()[:2]) + "\n")
    done = run(
        "--jobs",
        files / "one.csv",
        "--rates",
        files / "rates.json",
        "--devices",
        "new=1:200:50:3.6",
        "--json",
    )
    found = json.loads(done.output)["aware"]
    assert found["makespan_s"] == found["mean_jct_s"] == pytest.approx(450)
    assert found["energy_j"] == pytest.approx(450 * 200)
    assert found["money"] == pytest.approx(0.45)
    assert found["utilisation"] == 1


def test_both_policies_are_compared(files):
    done = run(
        "--jobs",
        files / "jobs.csv",
        "--rates",
        files / "rates.json",
        "--devices",
        "new=2,old=2",
        "--policy",
        "both",
    )
    assert done.exit_code == 0, done.output
    for word in ("agnostic", "aware", "job completion", "makespan", "energy", "cost", "times as good"):
        assert word in done.output


def test_made_up_jobs_need_no_file():
    done = run("--jobs", 5, "--devices", "v100=4,k80=4", "--seed", 3, "--goal", "energy", "--json")
    assert json.loads(done.output)["aware"]["jobs"] == 5
    assert done.output != run("--jobs", 5, "--devices", "v100=4,k80=4", "--seed", 4, "--json").output


def test_gavels_form_of_a_table(tmp_path):
    table = {
        "v100": {
            "('LM', 1)": {"null": 10.0, "('LM', 1)": [8.0, 8.0], "('A3C', 1)": [5.0, 2.0]},
            "('LM', 2)": {"null": 20.0},
        },
        "v100_unconsolidated": {"('LM', 1)": {"null": 3.0}},
    }
    (tmp_path / "t.json").write_text(json.dumps(table))
    found = read_rates(str(tmp_path / "t.json"))
    assert set(found) == {("LM", "v100")}
    assert found["LM", "v100"].per_s == 10
    assert found["LM", "v100"].utilisation == pytest.approx(10 / 16)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: parse_devices("8"), "v100=8"),
        (lambda d: parse_devices("v100=0"), "at least 1"),
        (lambda d: parse_devices("v100=1,v100=2"), "twice"),
        (lambda d: read_rates(str(d / "none.json")), "can't be read"),
        (lambda d: read_rates(str(d / "jobs.csv")), "can't be read"),
        (lambda d: read_jobs(str(d / "none.csv"), {}, 1, 0), "can't be read"),
        (lambda d: read_jobs(str(d / "rates.json"), {}, 1, 0), "arrival_s"),
    ],
)
def test_what_cannot_be_read_is_said(files, call, says):
    (files / "rates.json").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match=says):
        call(files)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('{"a": {"v100": "x"}}', r"'a' on 'v100' can't make 'x' iterations"),
        ('{"a": {"v100": -1}}', r"'a' on 'v100' can't make -1 iterations"),
        ('{"a": {"v100": NaN}}', r"'a' on 'v100' can't make nan iterations"),
        (f'{{"a": {{"v100": {"9" * 400}}}}}', r"'a' on 'v100' can't make 9+\.\.\.9+ iterations"),
        ("[1, 2]", r"takes \{trial kind: \{device kind: number\}\}, got \[1, 2\]"),
        ('{"a": 3}', r"got \{'a': 3\}"),
        ("[" * 100_000, "can't be read"),
        ("""{"v100": {"('LM', 1)": {"null": -2.0}}}""", r"'LM' on 'v100' can't make -2.0 iterations"),
        ("""{"v100": {"('LM', 1)": 3}}""", r"of 'v100' is not as in Gavel's tables.*got 3"),
        ("""{"v100": {"('LM'": {"null": 1.0}}}""", r"of 'v100' is not as in Gavel's tables"),
        ("""{"v100": {"('LM', 1)": {"null": 1.0, "('LM', 1)": ["x"]}}}""", "not as in Gavel's tables"),
    ],
)  # fmt: skip
def test_a_wrong_rate_is_named_with_its_place(tmp_path, table, says):
    (tmp_path / "r.json").write_text(table)
    with pytest.raises(InvalidInput, match=says) as told:
        read_rates(str(tmp_path / "r.json"))
    assert "Error(" not in str(told.value)


def test_devices_that_no_trial_is_known_to_run_on_are_named(tmp_path):
    done = run("--jobs", 3, "--devices", "foo=2")
    assert isinstance(done.exception, InvalidInput)
    assert "--devices foo=2: no trial is known to run" in str(done.exception)
    assert "a100, k80, p100, v100" in str(done.exception)
    (tmp_path / "r.json").write_text('{"a": {"v100": 0, "foo": 1}}')
    done = run("--jobs", 3, "--devices", "v100=2", "--rates", tmp_path / "r.json")
    assert "There are rates for foo;" in str(done.exception)
    assert run("--jobs", 3, "--devices", "foo=2,v100=1").exit_code == 0


def test_kinds_without_jobs_are_refused():
    assert isinstance(run("--devices", "v100=8").exception, InvalidInput)
    assert isinstance(run("--devices", "0").exception, InvalidInput)
    assert isinstance(run("--jobs", 2, "--devices", "v100=2", "--policy", "best").exception, InvalidInput)


@pytest.mark.parametrize("policy", ["aware", "both"])
def test_a_list_without_jobs_is_refused(files, policy):
    (files / "none.csv").write_text(JOBS.splitlines()[0] + "\n")
    done = run("--jobs", files / "none.csv", "--devices", "v100=2", "--policy", policy)
    assert isinstance(done.exception, InvalidInput)
    assert "none.csv" in str(done.exception)


def test_a_job_list_of_a_spreadsheet(files):
    """Spreadsheets write UTF-8 with a byte order mark before the first column's name."""
    (files / "marked.csv").write_bytes(b"\xef\xbb\xbf" + JOBS.encode())
    rates = read_rates(str(files / "rates.json"))
    assert read_jobs(str(files / "marked.csv"), rates, 1.0, 0) == read_jobs(
        str(files / "jobs.csv"), rates, 1.0, 0
    )
