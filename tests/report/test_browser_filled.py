"""The page in a real browser, opened before there is a study: what comes to the store is shown without a reload."""

import pytest

import penstock as pk
from penstock.core import Noted
from penstock.goal import memory_bytes, power_w
from penstock.report import read_journal, sm2_report
from penstock.store import open_store
from penstock.testing.journals import SPACE, journal

from .test_browser import Page, running, wait

PROFILE = [[100.0, 98.0, 6.0], [150.0, 140.0, 8.0], [200.0, 190.0, 9.0]]
POWER = {30: 0, 60: 1, 90: 2, 120: 3}
"""Predicted watts, and the trial they are predicted of; at most 90 are allowed."""


def sm2_curve(run):
    for epoch in run.epochs():
        size = run.config["batch_size"]
        run.report(loss=size / 64 + 1 / (epoch + 1), sm2_lr=0.1 / size, sm2_stability=1.0, sm2_fraction=0.25)


def sm2_study(store) -> None:
    pk.Study(
        sm2_curve,
        pk.Space(batch_size=pk.Choice(8, 16, 32, 64)),
        minimize="loss",
        scheduler=pk.SM2(thorough_epochs=1, final_epochs=2, max_epochs=4),
        executor=pk.Simulated(devices=2),
        store=store,
        name="rounds",
    ).run()


def limited_study(store) -> int:
    """A study with a power profile and limits, as its journal would tell of them."""
    events = journal(3)
    at_s = events[-1].time_s
    found = {
        "device": "V100",
        "batch_size": 8,
        "gpus": 1,
        "limit_w": 150.0,
        "highest_w": 200.0,
        "rule": "eta 0.5",
    }
    found |= {"profile": PROFILE, "applied": True, "energy_saved": 0.171, "time_saved": -0.125}
    events.append(Noted(at_s, "power_profile", found))
    for watts, trial in POWER.items():
        quantities = {"power_w": [watts, 1.0], "memory_bytes": [1e9 * trial, None]}
        events.append(Noted(at_s, "prediction", quantities, trial))
    limits = [(power_w <= 90).to_json(), (memory_bytes <= "4GB").to_json()]
    spec = {"goal": [{"metric": "loss", "maximize": False}], "space": SPACE, "limits": limits}
    with open_store(store, write=True) as writer:
        entry = writer.create("limited", spec, None)
        writer.lock(entry.id)
        writer.append(entry.id, events)
    return entry.id


def runs_of_a_job(count: int) -> dict:
    """What the store keeps of a job after so many runs: batch size 16 costs less than 32, and 64 fails."""
    records = []
    for number in range(count):
        size = (16, 32, 64)[number % 3]
        decision = {"n": number, "b": size, "p": 150.0, "t": 0.0, "profile": {"100.0": [], "200.0": []}}
        result = {"n": number, "epochs": 3, "s": 10.0, "j": 40.0 * size + number, "reached": size != 64}
        records += [{"d": decision}, {"r": result}]
    return {"format": 1, "records": records, "eta": 1.0, "policy": "zeus"}


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    store = tmp_path_factory.mktemp("empty") / "s.db"
    with open_store(store, write=True):
        pass
    serve = "from penstock.cli import main; main()"
    with running(["-c", serve, "dashboard", str(store), "--port", "0"]) as (process, address):
        browser.get(address)
        yield Page(browser, store, address, process)


def put_job(page, count: int) -> None:
    with open_store(page.store, write=True) as writer:
        writer.put("recurring/nightly", runs_of_a_job(count))


def tables(page) -> list[list[list[str]]]:
    return page.js(
        "return [...document.querySelectorAll('main table')].map(t => [...t.tBodies[0].rows]"
        ".map(r => [...r.cells].map(c => c.innerText)))"
    )


def show(page, place: str) -> None:
    """Go to an address of the page and wait until it is drawn."""
    page.js("location.hash = arguments[0]", place)
    wait(lambda: page.js("return document.documentElement.dataset.drawn") == place, f"{place} to be drawn")
    wait(page.traces, f"the figure of {place}")  # the study may be newer than what the server has read of it


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_page_opened_before_the_first_study_shows_what_comes(page):
    wait(lambda: "no study in this store yet" in page.text("main .nothing"), "the page to say so")
    assert "Recurring" not in page.text("main .nothing")
    put_job(page, 4)
    wait(lambda: "a recurring job" in page.text("main .nothing"), "the job to be told of")
    page.js("document.querySelector('main .nothing a').click()")
    wait(lambda: len(page.traces()) == 2, "the runs of the job: reached and stopped")


def test_recurring_jobs_are_live(page):
    put_job(page, 5)
    page.js("location.hash = '#view=recurring'")

    def shown() -> list[list[str]]:
        found = tables(page)
        return found[-1] if found else []

    wait(lambda: len(shown()) == 5, "the five runs")
    put_job(page, 7)
    wait(lambda: len(shown()) == 7, "the two new runs, by themselves")
    # eta is 1: a run's cost is its energy, 40 J times the batch size, and its number.
    told = {int(row[0]): (int(row[1]), number(row[7]), row[8]) for row in shown()}
    assert told == {
        n: (size, 40 * size + n, "stopped" if size == 64 else "reached")
        for n, size in ((n, (16, 32, 64)[n % 3]) for n in range(7))
    }
    arms = {int(row[0]): row[1:4] for row in tables(page)[0]}
    assert [int(arms[size][1]) for size in (16, 32, 64)] == [3, 2, 0]
    assert number(arms[16][2]) == 40 * 16 + 3  # the mean of runs 0, 3 and 6
    costs = {(x, y) for trace in page.traces(0) for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert costs == {(n, told[n][1]) for n in told}
    assert page.traces(1)[0]["x"] == ["16", "32"]


def test_the_first_study_is_shown_as_soon_as_it_begins(page):
    page.js("location.hash = '#view=overview'")
    wait(lambda: "no study in this store yet" in page.text("main .nothing"), "the empty page")
    sm2_study(page.store)
    wait(lambda: page.text("h1") == "rounds", "the study that came")
    wait(lambda: page.text("#live") == "finished", "its end")
    theirs = sm2_report(read_journal(page.store))
    page.open("sm2")
    rows = tables(page)[0]
    assert [(int(row[0]), int(row[1]), int(row[2]), row[-1]) for row in rows] == [
        (each.number, one.trial, one.batch_size, "kept" if one.kept else "dropped")
        for each in theirs.rounds
        for one in each.configurations
    ]
    expected = [one.score.total for each in theirs.rounds for one in each.configurations]
    assert [number(row[-2]) for row in rows] == pytest.approx(expected, rel=1e-3)
    drawn = {
        (place, trial): y
        for trace in page.traces()
        for place, trial, y in zip(trace["x"][0], trace["customdata"], trace["y"], strict=True)
    }
    contested = [each for each in theirs.rounds if len(each.configurations) > 1]
    assert drawn == {
        (f"round {each.number}", one.trial): pytest.approx(one.score.total)
        for each in contested
        for one in each.configurations
    }


def test_power_limits_and_limits_are_those_of_the_store(page):
    study = limited_study(page.store)
    names = "return [...document.querySelectorAll('#study option')].map(o => o.innerText)"
    wait(lambda: any(name.startswith("limited") for name in page.js(names)), "the new study in the list")
    show(page, f"#study={study}&view=power")
    energy, time = wait(lambda: len(page.traces()) == 2 and page.traces(), "both curves")
    assert energy["x"] == [limit for limit, _, _ in PROFILE]
    # Joules of an epoch are watts by throughput, its seconds one by throughput; both relative to 200 W.
    assert energy["y"] == pytest.approx([(w / rate) / (190.0 / 9.0) for _, w, rate in PROFILE])
    assert time["y"] == pytest.approx([9.0 / rate for _, _, rate in PROFILE])
    assert tables(page)[0] == [["V100", "1", "8", "eta 0.5", "150", "17.1% less", "12.5% more", "yes"]]
    show(page, f"#study={study}&view=limits")
    marks = {
        trace["name"]: set(zip(trace["customdata"], trace["x"], trace["y"], strict=True))
        for trace in page.traces()
    }
    assert marks == {
        "keeps them, predicted": {(trial, watts, trial) for watts, trial in POWER.items() if watts <= 90},
        "violates one, predicted": {(3, 120, 3)},
    }
    violations = [int(row[-1]) for row in tables(page)[0]]
    assert [int(row[1]) for row in tables(page)[0]] == [4, 4]
    assert violations == [1, 0]
