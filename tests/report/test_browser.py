"""The page in a real browser, on a study that runs while we look: every view, against the store."""

import json
import os
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.report import views
from penstock.report._journal import fold_journal
from penstock.report.views import Folded, Options
from penstock.testing.browser import resize

STUDY = """
import sys, time
from pathlib import Path
import penstock as pk

go = Path(sys.argv[1]).with_name("go").absolute()

def train(run):
    while run.trial >= 6 and not go.exists():  # the rest runs when somebody looks
        time.sleep(0.02)
    if run.config["width"] == 13:
        raise ValueError("<img src=x onerror=document.title='owned'> no such width")
    state = run.load() or {"epoch": 0}
    for epoch in run.epochs():
        time.sleep(0.02)
        state["epoch"] += 1
        run.save(state)
        run.report(loss=abs(run.config["x"] - 0.3) + 1 / state["epoch"], **{"<b>acc</b>": 0.5})

space = pk.Space(x=pk.Float(0, 1), width=pk.Choice(8, 13, 21), tag=pk.Choice("<script>window.owned=1</script>", "b"))
study = pk.Study(train, space, minimize="loss", scheduler=pk.ASHA(max_epochs=9, trials=40), sampler=pk.Random(),
                 store=sys.argv[1], name="<i>live</i>", seed=2, retries=0)
print("ready", flush=True)
study.run()
"""
TABS = ("overview", "history", "curves", "table", "trial", "pareto", "importance", "parallel", "devices", "power",
        "sm2", "coordinate_check", "limits", "recurring", "log")  # fmt: skip


@contextmanager
def running(arguments: list[str]):
    """A process, and the last word of its first line."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page of a live study, opened when it begins; and its store."""
    folder = tmp_path_factory.mktemp("live")
    script = folder / "live.py"
    script.write_text(textwrap.dedent(STUDY))
    store = folder / "s.db"
    with running([str(script), str(store)]) as (study, _):
        wait(lambda: store.exists() and store.stat().st_size > 0, "the store")
        serve = "from penstock.cli import main; main()"
        with running(["-c", serve, "dashboard", str(store), "--port", "0"]) as (_, address):
            browser.get(address)
            yield Page(browser, store, address, study)


def wait(test, what: str, seconds: float = 180.0):
    until = time.monotonic() + seconds
    while True:
        try:
            found = test()
        except Exception as error:  # an element that is replaced while we look
            found, what = None, f"{what} ({error!r})"
        if found:
            return found
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


class Page:
    def __init__(self, browser, store: Path, address: str, study: subprocess.Popen) -> None:
        self.browser, self.store, self.address, self.study = browser, store, address, study

    def js(self, code: str, *arguments):
        return self.browser.execute_script(code, *arguments)

    def text(self, selector: str) -> str:
        return self.js(
            "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector
        )

    def finish(self) -> Folded:
        """Wait until the study is over and the page has seen all of it."""
        self.store.with_name("go").touch()
        assert self.study.wait(300) == 0
        folded = fold_journal(self.store)[0]
        wait(lambda: self.text("#live") == "finished", "the end to be shown")
        wait(
            lambda: self.js("return Number(document.documentElement.dataset.read)") == folded.events,
            "all events",
        )
        return folded

    def open(self, view: str, trial: int | None = None) -> None:
        """Click the view's tab and wait until it is drawn."""
        if trial is not None:
            self.js("location.hash = arguments[0]", f"#study=1&view={view}&trial={trial}")
        else:
            self.js("document.querySelector(arguments[0]).click()", f"#nav [data-view={view}]")
        wait(
            lambda: (
                self.js("return document.documentElement.dataset.drawn === location.hash")
                and f"view={view}" in self.js("return location.hash")
            ),
            f"{view} to be drawn",
        )

    def traces(self, chart: int = 0) -> list[dict]:
        """What Plotly shows."""
        found = self.js(
            "const c = document.querySelectorAll('.chart.js-plotly-plot')[arguments[0]];"
            "return c ? JSON.stringify(c.data) : null",
            chart,
        )
        return json.loads(found) if found else []

    def rows(self, selector: str = "main table") -> list[list[str]]:
        return self.js(
            "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
            ".map(r => [...r.cells].map(c => c.innerText))",
            selector,
        )


def test_it_is_live(page):
    wait(lambda: page.text("#live") == "running", "the page to say that it runs")
    count = "return Number(document.querySelectorAll('.card .value')[1]?.innerText ?? 0)"
    before = wait(lambda: page.js(count), "the first trials")
    assert before < 40  # most of them wait for us
    page.store.with_name("go").touch()
    wait(lambda: page.js(count) > before, "the count of trials to grow by itself")


def test_overview_shows_what_the_store_has(page):
    folded = page.finish()
    told = views.overview(folded)
    page.open("overview")
    shown = page.text("#cards")
    assert str(float(f"{told['best']['metrics']['loss']:.4g}")) in shown
    assert f"trial {told['best']['trial']}" in shown
    for status in ("completed", "stopped", "failed"):
        if told["trials"][status]:
            assert f"{told['trials'][status]} {status}" in shown
    assert told["energy"]["source"] in shown
    assert "world average grid" in shown
    assert page.text("h1") == "<i>live</i>"
    assert page.browser.title.startswith("<i>live</i>")


def test_history_and_clicking_a_point_selects_the_trial_everywhere(page):
    folded = page.finish()
    page.open("history")
    told = views.history(folded)
    shown = {
        (trial, x, y)
        for trace in page.traces()
        if trace["mode"] == "markers" and isinstance(trace.get("customdata"), list)
        for trial, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
    }
    points = told["points"]
    assert shown == {
        p for p in zip(points["trial"], points["x"], points["y"], strict=True) if p[2] is not None
    }
    best = next(trace for trace in page.traces() if trace["name"] == "best so far")
    assert best["y"] == told["best"]["y"]
    # A click on the first mark, as Plotly reports it to the page.
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    mark = page.browser.find_elements(By.CSS_SELECTOR, ".scatterlayer .point")[0]
    ActionChains(page.browser).move_to_element(mark).pause(0.2).click().perform()
    wait(lambda: "trial=" in page.js("return location.hash"), "the trial to be selected")
    trial = int(page.js("return new URLSearchParams(location.hash.slice(1)).get('trial')"))
    wait(lambda: f"trial {trial} is selected" in page.text("footer"), "the footer")
    page.open("curves")
    assert any(trace["name"] == f"trial {trial}" for trace in page.traces())
    page.open("parallel")
    assert any(trace["name"] == f"trial {trial}" for trace in page.traces())
    page.open("table")
    assert page.text("tr.on").split("\t")[0].strip() == str(trial)
    page.js("document.querySelector('footer button').click()")
    wait(lambda: page.js("return document.querySelector('footer').hidden"), "the selection to go")


def test_curves(page):
    folded = page.finish()
    page.open("curves")
    expected = {
        (c["trial"], e, v)
        for c in views.curves(folded)["curves"]
        for e, v in zip(c["epoch"], c["value"], strict=True)
    }
    shown = {
        (t, e, v)
        for trace in page.traces()
        for t, e, v in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
        if e is not None
    }
    assert shown == expected
    assert len([trace for trace in page.traces() if trace["showlegend"]]) <= 4
    assert page.js("return [...document.querySelectorAll('.tools option')].map(o => o.innerText)") == [
        "loss",
        "<b>acc</b>",
    ]


def test_table_sorts_and_filters(page):
    folded = page.finish()
    page.open("table")
    page.js("[...document.querySelectorAll('th button')].find(b => b.innerText === 'x').click()")
    expected = views.table(folded, Options(sort="x"))
    first = [str(row[0]) for row in expected["rows"]]
    wait(lambda: [row[0].strip() for row in page.rows()] == first, "the table to be sorted by x")
    assert page.js("return document.querySelector('th[aria-sort=ascending]').innerText") == "x"
    page.js(
        "const f = document.getElementById('filter'); f.value = 'x < 0.5, width = 8';"
        "f.dispatchEvent(new Event('input'))"
    )
    kept = views.table(folded, Options(sort="x", filter="x < 0.5, width = 8"))
    wait(lambda: [row[0].strip() for row in page.rows()] == [str(r[0]) for r in kept["rows"]], "the filter")
    assert f"of {kept['matching']}" in page.text("#matching")
    page.js(
        "const f = document.getElementById('filter'); f.value = 'nope < 1'; f.dispatchEvent(new Event('input'))"
    )
    wait(lambda: "no column 'nope'" in page.text("#problem"), "the reason of a wrong filter")
    page.js("const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))")
    wait(lambda: len(page.rows()) == 40, "all rows again")


def test_a_trials_page_with_its_error_as_text(page):
    folded = page.finish()
    failed = next(r for r in folded.state.trials.values() if r.status.value == "failed")
    page.open("trial", failed.id)
    assert "<img src=x onerror=" in page.text("pre")
    assert "<img src=x onerror=" in page.text(".lead")
    assert page.js("return document.querySelectorAll('main img').length") == 0
    good = max(folded.state.trials.values(), key=lambda r: r.epoch)
    page.open("trial", good.id)
    shown = dict(page.rows(".two table"))
    assert shown["tag"] == good.config["tag"]
    assert shown["width"] == str(good.config["width"])
    assert page.traces(0)[0]["y"] == [report.metrics["loss"] for report in good.reports]
    page.js("document.querySelector('footer button').click()")


def test_pareto_importance_parallel_devices(page):
    folded = page.finish()
    page.open("pareto")
    told = views.pareto(folded)
    front = next(trace for trace in page.traces() if trace["name"] == "front")
    assert sorted(front["customdata"]) == told["front"]
    page.open("importance")
    shown = page.traces()[0]
    with urllib.request.urlopen(f"{page.address}api/study/1/importance", timeout=180) as answer:
        expected = json.load(answer)["importance"]
    assert set(expected) == {"x", "width", "tag"}
    assert dict(zip(shown["y"], shown["x"], strict=True)) == pytest.approx(expected)
    page.open("parallel")
    trials = {t for trace in page.traces() for t in trace["customdata"]}
    assert trials == {line["trial"] for line in views.parallel(folded)["lines"]}
    page.open("devices")
    rows = page.rows()
    told = views.devices(folded)
    assert [(row[0], int(row[-1])) for row in rows] == [(d["device"], d["segments"]) for d in told["devices"]]
    assert sum(len(t["x"]) for t in page.traces() if t["name"] != "idle") == sum(
        bar["kind"] != "idle" for bar in told["bars"]
    )


def test_views_without_data_say_why(page):
    page.finish()
    for view, words in (
        ("power", "power_limits="),
        ("sm2", "another scheduler"),
        ("coordinate_check", "surrogate=pk.Shrink(8)"),
        ("limits", "no limits"),
        ("recurring", "no recurring job"),
        ("trial", "No trial is selected"),
    ):
        page.open(view)
        assert words in page.text("main .nothing")


def test_log(page):
    folded = page.finish()
    page.open("log")
    rows = page.rows()
    assert [int(row[0].replace(",", "")) for row in rows] == [
        line["number"] for line in views.log(folded, Options(limit=100))["lines"]
    ]
    assert rows[0][2] == "session closed"


def test_the_keyboard_reaches_every_view(page):
    from selenium.webdriver.common.keys import Keys

    page.finish()
    page.open("overview")
    page.js("document.querySelector('#nav [data-view=overview]').focus()")
    for view in TABS[1:4]:
        page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        page.browser.switch_to.active_element.send_keys(Keys.ENTER)
        wait(lambda view=view: f"view={view}" in page.js("return location.hash"), f"Enter to open {view}")
        wait(
            lambda: page.js("return document.documentElement.dataset.drawn === location.hash"),
            "it to be drawn",
        )
    page.js("document.querySelector('tr.pick').focus()")
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait(lambda: "view=trial" in page.js("return location.hash"), "Enter on a row to open the trial")
    unnamed = page.js(
        "return [...document.querySelectorAll('button, input, select, a')].filter(e => !e.innerText.trim() && "
        "!e.getAttribute('aria-label') && !e.closest('.chart')).map(e => e.outerHTML)"
    )
    assert unnamed == []
    page.js("const b = document.querySelector('footer button'); if (b) b.click()")


LEFT_EDGES = """
return [...document.querySelectorAll("main table")].map((table) => [...table.rows].slice(0, 5).map((row) =>
  [...row.cells].map((cell) => Math.round(cell.getBoundingClientRect().left))));
"""


def test_what_has_not_changed_is_not_drawn_again(page):
    """A page that draws everything anew with every poll stutters."""
    page.finish()
    page.open("history")
    page.js(
        "window.drawings = 0; document.querySelector('.chart').on('plotly_afterplot', () => window.drawings++)"
    )
    again = "const done = arguments[0]; refresh().then(() => done(window.drawings))"
    assert page.browser.execute_async_script(again) == 0
    page.js("document.getElementById('theme').click()")  # other colours: drawn
    wait(lambda: page.js("return window.drawings") > 0, "the figure in other colours")
    page.js("document.getElementById('theme').click()")
    for view in ("table", "log"):
        page.open(view)
        page.js("window.row = document.querySelector('main tbody tr:nth-child(2)'); window.row.marked = true")
        page.browser.execute_async_script("const done = arguments[0]; refresh().then(() => done(0))")
        assert page.js("return document.querySelector('main tbody tr:nth-child(2)').marked") is True


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_no_view_is_wider_than_the_screen_in_light_and_dark(page, width, theme):
    page.finish()
    resize(page.browser, width, 844)
    try:
        if page.js("return document.documentElement.dataset.theme") != theme:
            page.js("document.getElementById('theme').click()")
        backdrop = page.js("return getComputedStyle(document.body).backgroundColor")
        assert backdrop == ("rgb(20, 23, 27)" if theme == "dark" else "rgb(246, 247, 249)")
        for view in TABS:
            page.open(view)
            assert page.js("return document.documentElement.scrollWidth") <= width, f"{view} is too wide"
            for table in page.js(LEFT_EDGES):
                assert all(row == table[0] for row in table), f"columns of {view} are not aligned"
    finally:
        resize(page.browser, 1280, 900)
        if page.js("return document.documentElement.dataset.theme") != "light":
            page.js("document.getElementById('theme').click()")


def test_nothing_of_the_trials_ran_and_the_policy_held(page):
    page.finish()
    assert page.js("return window.owned") is None
    assert "owned" not in page.browser.title
    assert page.js("return document.querySelectorAll('main script, main iframe, main i b').length") == 0
    for entry in page.browser.get_log("browser"):
        if entry["level"] != "SEVERE":
            continue
        # Plotly tries to add the style sheet of its maps, which no view uses: the policy keeps it out.
        harmless = "plotly.min.js" in entry["message"] and "style" in entry["message"]
        wanted = "/table?" in entry["message"] and "404" in entry["message"]  # our own wrong filter
        assert harmless or wanted, entry["message"]
    loaded = page.js("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(page.address) for name in loaded)
