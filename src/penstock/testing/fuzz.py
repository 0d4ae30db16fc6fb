"""What reads data from outside, as targets for fuzzing: each may raise a PenstockError and nothing else, and must end.

``mutate`` makes almost-right data out of right data; its choices come from anything with the methods of
``random.Random``, so that hypothesis shrinks them and atheris steers them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.core import Event, to_record
from penstock.core.errors import PenstockError
from penstock.store._record import checksum, first_checksum
from penstock.store._schema import event_id

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e-300, 1e308, float("inf"), float("nan"),
    "", "x", "loss", "\0", "\ud800", "NaN", "1", [], {}, [[]], {"": None},
)  # fmt: skip
"""Values that programs stumble over."""


def mutate(value: Any, rng: random.Random, changes: int = 1) -> Any:
    """JSON data like ``value``, with some parts dropped, doubled, swapped or replaced."""
    for _ in range(changes):
        value = _change(value, rng)
    return value


def _change(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        what = rng.randrange(8)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            other = rng.choice(list(value))
            return {**value, key: value[other], other: value[key]}
        if what == 2:
            return {**value, rng.choice(["", "x", "kind", "when"]): rng.choice(SCALARS)}
        return {**value, key: _change(value[key], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        what = rng.randrange(6)
        if what == 0:
            return [*value[:at], *value[at + 1 :]]
        if what == 1:
            return [*value[: at + 1], *value[at:]]
        return [*value[:at], _change(value[at], rng), *value[at + 1 :]]
    return rng.choice(SCALARS)


@contextmanager
def allowed(*more: type[BaseException]) -> Iterator[None]:
    """Whatever Penstock raises on purpose, with a text."""
    try:
        yield
    except PenstockError as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} without a text") from error
    except more:
        pass


# --- JSON forms -------------------------------------------------------------------------------------------------------


def read_form(read: Callable[[Any], Any], value: Any) -> Any:
    """What ``read`` makes of a value; None where it refuses it."""
    found = None
    with allowed():
        found = read(value)
    return found


def use_space(value: Any) -> None:
    """Read a space and, if it is one, use it: sample, encode, write it again."""
    from penstock.space import Space

    space = read_form(Space.from_json, value)
    if space is None:
        return
    with allowed():
        config = space.validate(space.sample(random.Random(0)))
        space.decode(space.encode(config))
        again = Space.from_json(json.loads(json.dumps(space.to_json())))
        if again.validate(config) != config:
            raise AssertionError(f"{config} is not of the space that was written and read")


# --- journals ---------------------------------------------------------------------------------------------------------


def seal(path: Path, study: int, records: Sequence[tuple[Any, Any, Any, str]]) -> None:
    """Replace a study's records in an SQLite store by others, with the checksums of a sound journal."""
    crc = first_checksum(study)
    rows = []
    for seq, (kind, trial, time_s, data) in enumerate(records, 1):
        crc = checksum(crc, seq, kind, trial, time_s, data)
        rows.append((event_id(study, seq), study, seq, kind, trial, time_s, data, crc))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DELETE FROM penstock_events WHERE study = ?", (study,))
        raw.executemany("INSERT INTO penstock_events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        raw.execute("UPDATE penstock_heads SET events = ?, crc = ? WHERE study = ?", (len(rows), crc, study))


def mutate_journal(events: Sequence[Event], rng: random.Random) -> list[tuple[Any, Any, Any, str]]:
    """Records of a journal in which some say something else, are missing, doubled or out of order."""
    records: list[list[Any]] = [list(to_record(event)) for event in events]
    for _ in range(rng.randint(1, 3)):
        if not records:
            break
        at = rng.randrange(len(records))
        what = rng.randrange(7)
        if what == 0:
            del records[at]
        elif what == 1:
            records.insert(at, list(records[rng.randrange(len(records))]))
        elif what == 2:
            records[at][0] = rng.choice(["", "x", *{record[0] for record in records}])
        elif what == 3:
            records[at][1] = rng.choice([None, -1, 0, 10**15])
        elif what == 4:
            records[at][2] = rng.choice([0.0, -1e9, 1e300])
        else:
            records[at][3] = mutate(records[at][3], rng)
    sealed = []
    for kind, trial, time_s, data in records:
        text = json.dumps(data)
        if rng.random() < 0.02:
            text = rng.choice(["", "{", "[]", "null", text[:-1], "[" * 5000])
        sealed.append((kind, trial, float(time_s), text))
    return sealed


def fold_records(records: Sequence[tuple[Any, Any, Any, str]], spec: Mapping[str, Any]) -> None:
    """Read records, fold what can be read and tell of it, as a report does."""
    from penstock.goal import Goal
    from penstock.report import row, summarize, summary_text
    from penstock.report.views import Folded
    from penstock.store._record import to_event

    goal = Goal.from_json(spec["goal"])
    folded = Folded("fuzzed", goal, spec, 0.0)
    with allowed(ValueError, RecursionError):  # of JSON; the store says which record
        for record in records:
            event = to_event((0, *record))
            with allowed():
                folded.apply(event)
    summarize("fuzzed", goal, folded.state, spec)
    summary_text("fuzzed", goal, folded.state, spec=spec)
    for each in folded.state.trials.values():
        with allowed():
            json.dumps(row(each, spec, error=True))


def read_store(path: Path) -> None:
    """Read a store in every way there is without writing: list, fold, report, views, table."""
    from penstock.report import read_journal, row, summarize, summary_text
    from penstock.report._journal import fold_journal, jobs_of, told_of
    from penstock.store import open_store

    with allowed(), open_store(path, write=False) as store:
        for entry in store.studies():
            with allowed():
                list(store.read(entry.id))
            store.tail_ok(entry.id)
        keys = store.keys()
        for key in keys:
            with allowed():
                store.get(key)
        for name, value in jobs_of(store).items():
            with allowed():
                told_of(name, value)
    with allowed():
        journal = read_journal(path)
        summarize(journal.entry.name, journal.goal, journal.state, journal.entry.spec)
        summary_text(journal.entry.name, journal.goal, journal.state, spec=journal.entry.spec)
        for record in journal.state.trials.values():
            json.dumps(row(record, journal.entry.spec, error=True))
    with allowed():
        fold_journal(path)


# --- the command line -------------------------------------------------------------------------------------------------

WORDS = ("s.db", "x", "t.py", "t.py:study", "t.py:job", "bad.py:study", "no.module:x", "", "-", "--", "0", "1", "-1",
         "2", "nan", "inf", "1e400", "\u00b2", "\u0663", "9" * 30, "v100=2", "v100=2,p100=1", "v100=0", "v100=1:2:3:4",
         "j.csv", "r.json", "a=b", "trials=3", "trials=x", "finish=1", "time_s=nan", "=", "postgresql://", "sqlite:///s.db",
         "sqlite://", "mysql://x", "asha", "hyperband", "money", "both", "\ud800", "o.md", "o.xyz", "/nowhere/x.html",
         ".", "..", "live", "quiet")  # fmt: skip
"""Words of command lines in a folder that ``furnish`` has filled: right ones, and such as programs stumble over."""


def furnish(folder: Path, spec: Mapping[str, Any], events: Sequence[Event]) -> int:
    """Put the files that ``WORDS`` names into a folder, none of which does anything; returns the study in ``s.db``."""
    from penstock.store import open_store

    with open_store(folder / "s.db", write=True) as store:
        entry = store.create("fuzzed", spec, b"work")
        store.lock(entry.id)
        store.append(entry.id, events)
    (folder / "t.py").write_text("study = 3\ndef job(): return 4\n")
    (folder / "bad.py").write_text("1 / 0\n")
    (folder / "j.csv").write_text("arrival_s,kind,trials,iterations\n0,compute,3,10\n")
    (folder / "r.json").write_text('{"a": {"v100": 1.0}}')
    return entry.id


def options_of(*left_out: str) -> dict[str, list[str]]:
    """The commands there are, and the options of each."""
    import typer

    from penstock.cli._app import app

    group: Any = typer.main.get_command(app)
    return {
        name: [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        for name, command in group.commands.items()
        if name not in left_out
    }


def run_command(arguments: Sequence[str]) -> int:
    """Run ``penstock ARGUMENTS`` in this process, its output thrown away; returns the exit code."""
    from penstock.cli._app import app

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            app(args=list(arguments))
        except PenstockError as error:
            if not str(error).strip():
                raise AssertionError("an error without a text") from error
            return 2
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
    return 0


# --- the dashboard ----------------------------------------------------------------------------------------------------

PATHS = ("/", "//", "/%ff", "/api/recurring", "/api/studies", "/static/../app.js", "/static/x", "/api/")
VIEWS = ("overview", "history", "curves", "table", "pareto", "importance", "parallel", "devices", "power", "sm2",
         "limits", "log", "trial", "nope", "%00", "stream/x")  # fmt: skip
KEYS = ("sort", "filter", "limit", "offset", "x", "trial", "metric", "name", "metrics", "log", "trials", "token",
        "after")  # fmt: skip
VALUES = ("", "0", "-1", "1e999", "nan", "loss", "lr < 0.5", "loss <", "((", "9" * 50, "\u00b2", "lr", "1,2,3",
          "<script>", "a" * 3000, "act == 'relu'", "__import__('os')", "lr**lr**9**9", "not " * 200, "(" * 500,
          "1<2<3")  # fmt: skip
"""Paths, views of a study, and names and values of query strings."""


def ask(
    client: Any, path: str, query: Mapping[str, str], headers: Mapping[str, str], method: str = "GET"
) -> int:
    """Ask a dashboard's test client; returns the status, which is an answer of ours and no crash."""
    answer = client.request(method, path, params=dict(query), headers=dict(headers))
    if answer.status_code >= 500 and answer.status_code != 503:
        raise AssertionError(f"{method} {path} {query}: {answer.status_code} {answer.text[:500]}")
    if answer.status_code >= 400 and method != "HEAD":
        reason = answer.json()["error"]["reason"]
        assert reason, f"{path}: an error without a reason"
    return int(answer.status_code)


# --- files ------------------------------------------------------------------------------------------------------------


def read_rates_and_jobs(rates: bytes, jobs: bytes, folder: Path) -> None:
    """Read a table of rates (JSON) and a list of jobs (CSV)."""
    from penstock.cli._cluster import read_jobs, read_rates

    table, listed = folder / "rates.json", folder / "jobs.csv"
    table.write_bytes(rates)
    listed.write_bytes(jobs)
    with allowed():
        read_rates(str(table))
    with allowed():
        read_jobs(str(listed), read_rates(None), 1.0, 0)


def read_traces(train: bytes, power: bytes, folder: Path) -> None:
    """Read recorded runs of recurring jobs (CSV)."""
    from penstock.recurring._traces import read_workloads

    (folder / "train.csv").write_bytes(train)
    (folder / "power.csv").write_bytes(power)
    with allowed():
        read_workloads(str(folder / "train.csv"), str(folder / "power.csv"), ())
