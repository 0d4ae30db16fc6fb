"""What can go wrong around a study: the disk, the journal, the work itself, two drivers at once."""

import resource
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

import penstock as pk
from penstock.core import StudyState
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreLocked
from penstock.sample import Sampler
from penstock.store import open_store

SPACE = pk.Space(x=pk.Float(0, 1))


def train(run):
    for epoch in run.epochs(5):
        run.report(loss=run.config["x"] + 1 / (epoch + 1))


def study(path, work=train, **options):
    options.setdefault("executor", pk.Simulated(devices=2))
    options.setdefault("scheduler", pk.Full(trials=20))
    return pk.Study(work, SPACE, minimize="loss", sampler=pk.Random(), store=path, **options)


def outcome(done):
    return [(t.id, t.config, t.status, t.epoch, dict(t.metrics)) for t in done.trials]


def penstock(*arguments, **options):
    command = [sys.executable, "-c", "from penstock.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.faults
def test_a_full_disk_is_a_clear_error_and_the_study_goes_on_when_there_is_room(tmp_path):
    path = tmp_path / "s.db"
    script = textwrap.dedent(
        f"""
        import penstock as pk
        def train(run):
            for epoch in run.epochs(5):
                run.report(loss=run.config["x"] + 1 / (epoch + 1))
        pk.Study(train, pk.Space(x=pk.Float(0, 1)), minimize="loss", scheduler=pk.Full(trials=400),
                 sampler=pk.Random(), executor=pk.Simulated(devices=2), store={str(path)!r}).run()
        """
    )

    def small_files():
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=small_files, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "StoreUnwritable" in done.stderr
    assert str(path) in done.stderr
    before = pk.Study.load(path)
    assert 0 < before.state.epochs < 2000
    before.state.validate()
    assert before.run().state.counts.completed == 400


@pytest.mark.faults
def test_a_damaged_last_record_is_reported_and_the_rest_stays_readable(tmp_path):
    path = tmp_path / "s.db"
    whole = study(path).run()
    with sqlite3.connect(path) as raw:
        last = raw.execute("SELECT max(seq) FROM penstock_events").fetchone()[0]
        raw.execute(
            "UPDATE penstock_events SET data = substr(data, 1, length(data) - 1) WHERE seq = ?", (last - 3,)
        )
    report = penstock("report", path)
    assert report.returncode == 2
    assert f"{last - 3}" in report.stderr
    assert "Traceback" not in report.stderr
    assert "best    trial" in report.stdout
    with pytest.raises(StoreCorrupt, match="--repair"):
        pk.Study.load(path).run()
    resumed = penstock("resume", path, "--repair", "--view", "quiet")
    assert resumed.returncode == 0, resumed.stderr
    assert outcome(pk.Study.load(path)) == outcome(whole)


def test_work_that_cannot_be_shipped_is_named_before_anything_runs(tmp_path):
    lock = threading.Lock()

    def holds_a_lock(run):
        with lock:
            run.report(loss=1.0)

    with pytest.raises(InvalidInput, match=r"its closure variable 'lock' \(_thread\.lock\) can't be pickled"):
        study(tmp_path / "s.db", holds_a_lock, executor=pk.Local(slots=1)).run()


@pytest.mark.faults
def test_a_study_in_postgresql_resumes_and_has_one_writer(postgres_url, tmp_path):
    first = study(postgres_url, budget=pk.Budget(epochs=30), files=tmp_path, name="pg").run()
    assert first.state.closed.reason == "budget"
    holder = open_store(postgres_url, write=True)
    holder.lock(holder.find("pg").id)
    try:
        with pytest.raises(StoreLocked):
            pk.Study.load(postgres_url, "pg").run()
    finally:
        holder.close()
    resumed = pk.Study.load(postgres_url, "pg", budget=pk.Budget(epochs=1000)).run()
    assert outcome(resumed) == outcome(study(tmp_path / "same.db").run())
    assert "s3cret" not in str(resumed.store_url)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(pk.errors.StoreError, match="nowhere"):
        study(tmp_path / "nowhere" / "s.db").run()


class Weary(Sampler):
    """A user's sampler with a mistake in it that shows at the seventh result, or at the seventh question."""

    learns = True

    def __init__(self, fails_at):
        self.fails_at = fails_at
        self.inner = pk.Random()

    def start(self, space, *, objectives, seed):
        self.calls = {"ask": 0, "tell": 0}
        self.inner.start(space, objectives=objectives, seed=seed)

    def count(self, call):
        self.calls[call] += 1
        if call == self.fails_at and self.calls[call] == 7:
            raise ZeroDivisionError("weary")

    def ask(self, n):
        self.count("ask")
        return self.inner.ask(n)

    def skip(self, configs, trials):
        self.inner.skip(configs, trials)

    def adopt(self, config, trial):
        self.inner.adopt(config, trial)

    def tell(self, observation):
        self.count("tell")


@pytest.mark.parametrize("fails_at", ["ask", "tell"])
def test_an_error_of_a_sampler_is_raised_after_what_runs_is_written(tmp_path, fails_at):
    path = tmp_path / "s.db"
    options = {"scheduler": pk.Full(trials=20), "executor": pk.Simulated(devices=3, seconds=1.0)}
    made = pk.Study(train, SPACE, minimize="loss", sampler=Weary(fails_at), store=path, **options)
    with pytest.raises(ZeroDivisionError, match="weary"):
        made.run()
    store = open_store(path, write=False)
    try:
        state = StudyState.of(event for _, event in store.read(store.find(None).id))
    finally:
        store.close()
    assert state.closed.reason == "error"
    assert state.closed.detail == "ZeroDivisionError: weary"
    assert not state.counts.running
    assert [(t.id, t.status, t.epoch) for t in state.trials.values()] == [
        (t.id, t.status, t.epoch) for t in made.trials
    ]
    # Three devices of one speed: whenever one trial has reported, so have the others that ran beside it.
    by_trial = [len(t.reports) for t in state.trials.values()]
    assert sum(by_trial) >= 6 * 5
    assert all(count in (0, 1, 5) for count in by_trial)
