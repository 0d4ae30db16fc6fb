"""A study whose driver is killed is told from one that runs, by everything that reads it."""

import json
import shlex
import subprocess
import sys
import time

import pytest

import penstock as pk
from penstock.core import StudyState
from penstock.report import read_journal
from penstock.report._feed import Feed
from penstock.report._static import write_report
from penstock.store import open_store

DRIVER = """
import sys, time
from pathlib import Path
import penstock as pk

HOLD = Path(sys.argv[2])

def train(run):
    for epoch in run.epochs():
        if epoch:
            while HOLD.exists():
                time.sleep(0.02)
        run.report(loss=-run.config["x"], heat=run.config["x"])

pk.Study(train, pk.Space(x=pk.Choice(1.0, 9.0)), minimize="loss", scheduler=pk.Full(epochs=2), sampler=pk.Grid(),
         limits=[pk.Quantity("heat") <= 5], executor=pk.Local(slots=2), store=sys.argv[1], name="two words").run()
"""


def wait_until(true):
    until_s = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def reported(url):
    try:
        return len(read_journal(url).state.trials) == 2 and read_journal(url).state.reports == 2
    except pk.errors.PenstockError:  # not made yet
        return False


def penstock(*arguments):
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_killed_study_is_not_running(kind, tmp_path, request, monkeypatch):
    from prometheus_client.parser import text_string_to_metric_families

    from penstock.integrations import StudyCollector, metrics_text

    monkeypatch.chdir(tmp_path)  # where a study on PostgreSQL has its files
    url = request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "s.db")
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "driver.py").write_text(DRIVER)
    collector = StudyCollector(url)

    def scraped():
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in collector.collect()
            for sample in family.samples
        }

    def rows():
        return [json.loads(line) for line in penstock("trials", url, "--json").splitlines()]

    with subprocess.Popen([sys.executable, "driver.py", url, str(hold)]) as driver:
        try:
            wait_until(lambda: reported(url))
            feed = Feed(url)
            feed.start()
            journal = read_journal(url)
            assert journal.driver.startswith(f"process {driver.pid} on ")
            assert f"; {journal.driver} runs it" in penstock("report", url)
            assert {row["status"] for row in rows()} == {"running"}
            assert feed.wait_read(1, 300)
            assert feed.status(1)[0] == "running"
            assert scraped()["penstock_session_open", "two words"] == 1
            assert pk.Study.load(url).best.config["x"] == 9  # what runs is not judged before it ends
        finally:
            driver.kill()
    try:
        wait_until(lambda: not read_journal(url).driver)  # a server takes its time to notice
        again = f"penstock resume {shlex.quote(journal_url(url))} --study 'two words'"
        text = penstock("report", url)
        assert f"left    interrupted (its driver died; go on with: {again})" in text
        assert "best    trial 0" in text
        told = json.loads(penstock("report", url, "--json"))
        assert told["ended"]["reason"] == "interrupted"
        assert (told["running"], told["paused"], told["violations"]) == (0, 2, 1)
        assert told["best"]["config"] == {"x": 1.0}
        assert {(row["status"], row["reason"]) for row in rows()} == {("paused", "its driver died")}

        static = json.loads(write_report(url, tmp_path / "r.json").read_text())
        assert static["overview"]["running"] is False
        assert again in static["overview"]["ended"]["detail"]
        assert static["overview"]["best"]["config"] == {"x": 1.0}

        wait_until(lambda: feed.status(1)[0] == "interrupted")
        with feed.view(1) as folded:
            assert folded.state.counts.paused == 2
            assert {span.status for span in folded.spans} == {"lost"}
            assert not folded.running

        loaded = pk.Study.load(url)
        assert loaded.best.config["x"] == 1
        assert loaded.trials[1].violated == ("heat <= 5",)

        found = scraped()
        assert found["penstock_session_open", "two words"] == 0
        assert found["penstock_session_ended", "interrupted", "two words"] == 1
        assert found["penstock_trials", "running", "two words"] == 0
        assert found["penstock_best_trial", "two words"] == 0

        hold.unlink()
        done = loaded.run()
        assert done.state.closed.reason == "finished"
        with open_store(url, write=False) as store:
            state = StudyState.of(event for _, event in store.read(1))
        wait_until(lambda: feed.status(1)[0] == "finished")
        with feed.view(1) as folded:
            assert folded.state.spent_s == state.spent_s
            assert [note.topic for note in folded.state.notes] == [note.topic for note in state.notes]
        fresh = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(metrics_text(url))
            for sample in family.samples
        }
        assert scraped() == fresh
        assert fresh["penstock_session_ended", "finished", "two words"] == 1
    finally:
        feed.close()


def journal_url(url):
    with open_store(url, write=False) as store:
        return store.url


def test_a_study_that_is_read_as_it_ends_did_not_die(tmp_path):
    """The driver closes the session and goes between the last read and the look at its lock."""
    from penstock.report._read import read_state

    path = tmp_path / "s.db"
    study = pk.Study(
        lambda run: [run.report(loss=1.0) for _ in run.epochs()],
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Full(epochs=1, trials=2),
        executor=pk.Simulated(devices=1),
        store=path,
    )
    study.run()
    with open_store(path, write=False) as store:
        entry = store.find()
        events = list(store.read(entry.id))
        with open_store(tmp_path / "copy.db", write=True) as copy:
            mine = copy.create("copy", entry.spec, None)
            copy.lock(mine.id)
            copy.append(mine.id, [event for _, event in events[:-1]])

            with open_store(tmp_path / "copy.db", write=False) as reader:
                ask = reader.writer

                def asked_late(study):
                    if not copy._closed:
                        copy.append(study, [events[-1][1]])
                        copy.close()
                    return ask(study)

                reader.writer = asked_late
                state = StudyState()
                assert read_state(reader, mine, state) is None
    assert state.closed.reason == "finished"
