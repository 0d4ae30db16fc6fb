"""Reports in files and figures in notebooks: what they say is what the store has, and no markup of a trial's is any."""

import json
import math
import re
import time
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import penstock as pk
from penstock.cli._app import app
from penstock.cli._recur import _stored
from penstock.core import (
    Event,
    Measurement,
    Noted,
    Reported,
    Segment,
    SessionOpened,
    Share,
    Source,
    Started,
    Submitted,
    Trial,
    TrialStatus,
    VirtualClock,
)
from penstock.core.errors import InvalidInput, PenstockError
from penstock.goal import Goal, memory_bytes, power_w
from penstock.recurring import RecurringJob
from penstock.report import summary_text, views
from penstock.report._draw import draw, pyplot
from penstock.report._static import figures, jobs_alone, report_html, report_markdown, write_report
from penstock.report.views import Folded
from penstock.store import open_store
from penstock.testing.journals import folded_of, journal

run = CliRunner()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text.append(data)


def read_html(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def test_html_report_is_self_contained_and_escaped(store, simulated, tmp_path):
    done = run.invoke(app, ["report", store, "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text()
    tags = read_html(page)
    assert not {"script", "iframe", "link", "object"} & set(tags.seen)
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)
    text = " ".join(tags.text)
    assert "<script>alert(1)</script>" in text  # the study's name, as text
    best = min((r.metrics["loss"], r.id) for r in simulated.state.trials.values())
    assert f"(trial {best[1]}," in text
    assert f"{best[0]:.4g}" in text
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "History",
        "Learning curves",
        "Pareto front",
        "Importance",
        "Parallel coordinates",
        "Devices",
        "Best trials",
        "Pareto front",
        "Log",
    ]


def test_json_report_has_the_views(store, simulated, tmp_path):
    write_report(store, tmp_path / "report.json")
    told = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert told["overview"] == json.loads(json.dumps(views.overview(simulated)))
    assert len(told["table"]["rows"]) == 60
    assert told["sm2"] is None


def test_markdown_report_keeps_its_tables_whole(store, tmp_path):
    write_report(store, tmp_path / "report.md", "first")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# first\n")
    head, *rows = [
        line for line in text.split("## Best trials")[1].split("##")[0].splitlines() if line.startswith("|")
    ]
    assert len(rows) == 1 + 5
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in (head, *rows)}) == 1
    events = [SessionOpened(0.0), *journal(1)[1:]]
    odd = Folded.of("a|b\n# <script>", Goal.of("loss", None), events)
    assert "<script" not in report_markdown(odd, {})
    assert report_markdown(odd, {}).count("\n# ") == 0


def table_of(text: str, title: str) -> list[list[str]]:
    """The rows of a table in a Markdown report, but for its head."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].strip().splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_what_violates_a_limit_is_neither_best_nor_on_the_front():
    events = journal(3)
    goal = Goal.of("loss", None)
    known = {}
    for record in Folded.of("plain", goal, events).state.trials.values():
        if record.status is not TrialStatus.FAILED and math.isfinite(record.metrics.get("loss", math.nan)):
            joules = math.fsum(report.energy.joules for report in record.reports if report.energy is not None)
            known[record.id] = (record.metrics["loss"], math.fsum(r.train_s for r in record.reports), joules)
    over = sorted(known, key=known.__getitem__)[:3]
    now_s = events[-1].time_s
    events += [Noted(now_s, "limit_violated", {"limit": "power_w <= 90 W"}, trial) for trial in over]
    folded = Folded.of("limited", goal, events)
    kept = {trial: own for trial, own in known.items() if trial not in over}
    front = {
        trial
        for trial, own in kept.items()
        if not any(o != own and all(a <= b for a, b in zip(o, own, strict=True)) for o in kept.values())
    }
    text = report_markdown(folded, {})
    assert {int(row[0]) for row in table_of(text, "Pareto front")} == front
    best_first = sorted(kept, key=kept.__getitem__)
    assert [int(row[0]) for row in table_of(text, "Best trials")][: len(kept)] == best_first
    assert f"(trial {best_first[0]}," in text.split("## ")[0]
    assert {point["trial"] for point in views.pareto(folded)["points"]} == set(known)  # all are shown


def test_markdown_report_has_front_failures_and_log():
    folded, jobs = everything()
    text = report_markdown(folded, jobs)
    # The front by its definition: nobody is at least as good in loss, time and energy and better in one of them.
    known = {}
    for record in folded.state.trials.values():
        if record.status is not TrialStatus.FAILED and math.isfinite(record.metrics.get("loss", math.nan)):
            once = record.reports  # an epoch that was run again counts once
            joules = math.fsum(report.energy.joules for report in once if report.energy is not None)
            known[record.id] = (record.metrics["loss"], math.fsum(r.train_s for r in once), joules)
    front = {
        trial
        for trial, own in known.items()
        if not any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in known.values()
        )
    }
    shown = table_of(text, "Pareto front")
    assert {int(row[0]) for row in shown} == front
    losses = [known[int(row[0])][0] for row in shown]
    assert losses == sorted(losses)
    failed = [r for r in folded.state.trials.values() if r.status is TrialStatus.FAILED]
    assert failed
    assert sum(int(row[0]) for row in table_of(text, "Failures")) == len(failed)
    last = table_of(text, "Log")
    assert 0 < len(last) <= 20
    assert {row[1] for row in last} >= {"noted"}
    assert table_of(text, "Recurring job nightly")[0][:3] == ["32", "3", "2"]


def test_a_report_counts_the_runs_of_a_job_as_its_status_does(tmp_path):
    with RecurringJob("nightly", batch_sizes=[8, 16], default=8, store=tmp_path / "s.db") as job:
        job.observe(job.decide(), epochs=3, time_s=1.0, energy_j=5.0, reached=True)
        job.abandon(job.decide())
        job.decide()
        status = job.status()
    text, _ = jobs_alone(tmp_path / "s.db")
    assert (status["results"], status["reached"], len(status["under_way"])) == (1, 1, 1)
    assert text.startswith("job nightly: 1 run, 1 reached the target, 1 under way; 5 J in all")


@pytest.mark.parametrize(
    ("give_up_s", "state"), [(None, "lost"), (1e6, "under way"), (math.inf, "under way")]
)
def test_a_run_that_never_came_back_is_lost_once_its_job_waits_no_more(tmp_path, give_up_s, state):
    """Decided two days ago; a job waits for a day, or as long as it says. As its status says it, too."""
    two_days_ago = VirtualClock(time.time() - 2 * 86_400)
    options = {"batch_sizes": [8, 16], "default": 8, "give_up_s": give_up_s, "store": tmp_path / "s.db"}
    with RecurringJob("nightly", clock=two_days_ago, **options) as job:
        job.observe(job.decide(), epochs=3, time_s=1.0, energy_j=5.0, reached=True)
        job.decide()
    text, told = jobs_alone(tmp_path / "s.db")
    assert text.startswith(f"job nightly: 1 run, 1 reached the target, 1 {state}; 5 J in all")
    assert [run["state"] for run in told["recurring"][0]["runs"]] == ["reached", state]
    (status,) = _stored(str(tmp_path / "s.db"))
    assert (status["under_way"], status["lost"]) == (([], [1]) if state == "lost" else ([1], []))
    with RecurringJob("nightly", **options) as job:
        assert job.status()["lost"] == status["lost"]


def test_a_store_with_nothing_but_a_recurring_job_has_a_report(tmp_path):
    _, jobs = everything()
    with open_store(tmp_path / "s.db", write=True) as writer:
        writer.put("recurring/nightly", jobs["nightly"])
    for kind in ("html", "md", "json", "png"):
        assert write_report(tmp_path / "s.db", tmp_path / f"r.{kind}").stat().st_size > 0
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# Recurring jobs\n")
    assert "3 runs, 2 reached the target; 303 J in all; batch size 32 is cheapest so far" in text
    assert table_of(text, "Recurring job nightly")[0][:3] == ["32", "3", "2"]
    told = json.loads((tmp_path / "r.json").read_text())
    assert [run["energy_j"] for run in told["recurring"][0]["runs"]] == [100.0, 101.0, 102.0]
    assert (tmp_path / "r.html").read_text().count("<img") == 2
    text, data = jobs_alone(tmp_path / "s.db")
    assert text == "job nightly: 3 runs, 2 reached the target; 303 J in all; batch size 32 is cheapest so far"
    assert data == told
    with pytest.raises(PenstockError, match="no study"):
        write_report(tmp_path / "s.db", tmp_path / "r.md", "other")
    with open_store(tmp_path / "empty.db", write=True):
        pass
    with pytest.raises(PenstockError):
        write_report(tmp_path / "empty.db", tmp_path / "r.md")
    assert jobs_alone(tmp_path / "empty.db") is None


def test_png_report_is_a_picture(store, tmp_path):
    write_report(store, tmp_path / "report.png", "first")
    plt = pyplot()
    picture = plt.imread(tmp_path / "report.png")
    assert picture.shape[0] > 1000
    assert picture.shape[1] == 1400
    assert picture[..., :3].std() > 0.05  # something is drawn


LONG = "the_learning_rate_of_the_classifier_that_stands_on_top_of_the_encoder_number_"


def test_long_names_leave_room_for_the_figures():
    """They took whole panels, and whatever lay in them was squeezed into a line."""
    space = {"domains": [[f"{LONG}{n}", {"kind": "float", "low": 0, "high": 12}] for n in range(10)]}
    events: list[Event] = [SessionOpened(0.0)]
    for trial in range(12):
        config = {f"{LONG}{n}": trial * (n + 1) % 13 for n in range(10)}
        events.append(Submitted(float(trial), 1, (Segment(Trial(trial, config, 0), until=1),)))
        events.append(Started(float(trial), trial, 0, (Share("cpu:0"),)))
        events.append(Reported(trial + 1.0, trial, 1, {"loss": trial % 5 + 1.0}, 1.0))
    folded = Folded.of("long", Goal.of("loss", None), events, {"space": space})
    plt = pyplot()
    for title, _, figure in figures(folded, {}):
        drawn = plt.figure(figsize=(7.0, 3.8), layout="constrained")
        try:
            axes = drawn.subplots()
            draw(figure, axes)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                drawn.canvas.draw()
            box = axes.get_position()
            assert box.width > 0.4, title
            assert box.height > 0.4, title
            if title == "Importance":  # cut as they are, they differ
                assert len({label.get_text() for label in axes.get_yticklabels()}) == 10
        finally:
            plt.close(drawn)


@pytest.mark.parametrize(
    ("minimize", "told", "left_out"),
    [(["loss", "energy_j"], "energy_j 6", "train_s"), ("loss", "loss 0.5", "energy_j")],
)
def test_the_summary_has_every_objective_of_the_best(minimize, told, left_out):
    segment = Segment(Trial(0, {"lr": 0.1}, 0), until=2)
    events: list[Event] = [SessionOpened(0.0), Submitted(0.0, 1, (segment,)), Started(0.0, 0)]
    for epoch in (1, 2):
        drawn = Measurement(3.0, "J", Source.MEASURED)
        events.append(Reported(float(epoch), 0, epoch, {"loss": 1 / epoch}, 1.0, drawn))
    goal = Goal.of(minimize, None)
    text = summary_text("s", goal, Folded.of("s", goal, events).state)
    best = next(line for line in text.splitlines() if "best" in line)
    assert told in best
    assert left_out not in best


def test_other_endings_and_places_are_refused(store, tmp_path):
    with pytest.raises(InvalidInput, match=r"ends in \.html"):
        write_report(store, tmp_path / "report.pdf")
    with pytest.raises(InvalidInput, match="Can't write"):
        write_report(store, tmp_path / "none" / "report.md")


def everything() -> tuple[Folded, dict]:
    """A study with something for every view."""
    events = journal(3)
    profile = [[100.0, 98.0, 6.0], [200.0, 190.0, 9.0]]
    data = {
        "device": "V100",
        "batch_size": 8,
        "gpus": 1,
        "limit_w": 100.0,
        "highest_w": 200.0,
        "profile": profile,
    }
    data |= {"applied": True, "energy_saved": 0.2, "time_saved": -0.1}
    events.append(Noted(events[-1].time_s, "power_profile", data))
    for trial in range(6):
        data = {"power_w": [60.0 + 10 * trial, 1.0], "memory_bytes": [1e9 * trial, None]}
        events.append(Noted(events[-1].time_s, "prediction", data, trial))
    limits = [(power_w <= 90).to_json(), (memory_bytes <= "4GB").to_json()]
    records = [{"d": {"n": n, "b": 32, "t": 0.0}} for n in range(3)]
    records += [
        {"r": {"n": n, "epochs": 3, "s": 10.0 + n, "j": 100.0 + n, "reached": n != 1}} for n in range(3)
    ]
    return folded_of(events, limits=limits), {"nightly": {"format": 1, "records": records}}


def test_every_figure_is_drawn_with_the_points_it_has():
    folded, jobs = everything()
    plt = pyplot()
    shown = figures(folded, jobs)
    assert [title for title, _, _ in shown] == [
        "History",
        "Learning curves",
        "Pareto front",
        "Importance",
        "Parallel coordinates",
        "Devices",
        "Power limits",
        "Limits",
        "Recurring job nightly",
        "Beliefs of nightly",
    ]
    for title, _, figure in shown:
        drawn, axes = plt.subplots()
        draw(figure, axes)
        marks = sum(
            len(c.get_offsets())
            for c in axes.collections
            if hasattr(c, "get_offsets") and c.get_offsets().ndim == 2
        )
        lines = sum(len(line.get_xdata()) for line in axes.lines)
        points = sum(len(t["x"]) for t in figure["data"] if t["type"] == "scatter")
        bars = sum(len(t["x"]) for t in figure["data"] if t["type"] == "bar")
        assert marks + lines >= points, title
        assert len(axes.patches) >= bars, title
        plt.close(drawn)


def test_the_html_has_no_markup_of_the_users(monkeypatch):
    folded, jobs = everything()
    monkeypatch.setattr("penstock.report._static.figures", lambda *given: [])  # drawn above
    folded.name = "<b>&\"'"
    tags = read_html(report_html(folded, jobs))
    assert "<b>&\"'" in "".join(tags.text)
    assert "b" not in tags.seen


# --- notebooks ---


def small_study(**options) -> pk.Study:
    def train(run):
        for epoch in run.epochs():
            run.report(loss=run.config["x"] + 1 / (epoch + 1))

    space = pk.Space(x=pk.Float(0, 1), tag=pk.Choice("<b>", "c"))
    return pk.Study(train, space, minimize="loss", scheduler=pk.Full(trials=8, epochs=3), sampler=pk.Random(),
                    executor=pk.Simulated(devices=2), name="<i>n</i>", **options)  # fmt: skip


@pytest.mark.parametrize("kept", [False, True])
def test_study_plot_gives_plotly_figures(tmp_path, kept):
    import plotly.graph_objects as go

    study = small_study(store=tmp_path / "s.db" if kept else False).run()
    history = study.plot.history(x="trial")
    assert isinstance(history, go.Figure)
    marks = next(trace for trace in history.data if trace.name == "completed")
    assert dict(zip(marks.customdata, marks.y, strict=True)) == {
        r.id: r.metrics["loss"] for r in study.trials
    }
    for name in ("curves", "pareto", "importance", "parallel", "devices"):
        assert isinstance(getattr(study.plot, name)(), go.Figure)
        assert getattr(study.plot, name)().data
    one = study.plot.trial(3)
    assert [y for y in one.data[0].y if y is not None] == [r.metrics["loss"] for r in study.trials[3].reports]
    for name in ("power", "sm2", "limits"):
        with pytest.raises(InvalidInput):
            getattr(study.plot, name)()
    for wrong in ("x", -1, 5, 0.0, True):
        with pytest.raises(InvalidInput, match="objective"):
            study.plot.history(objective=wrong)
    for wrong in (-1, 0, "x", None):
        with pytest.raises(InvalidInput, match="limit takes"):
            study.plot.curves(limit=wrong)
    with pytest.raises(InvalidInput, match="trial takes"):
        study.plot.parallel(trial="x")
    with pytest.raises(InvalidInput, match="no trial 99"):
        study.plot.trial(99)
    with pytest.raises(InvalidInput, match="reports no 'acc'"):
        study.plot.trial(1, "acc")


def test_study_in_a_notebook_is_a_table_without_markup_of_the_users(tmp_path):
    study = small_study(store=False)
    assert "none yet" in study._repr_html_()
    study.run()
    root = ElementTree.fromstring(study._repr_html_())
    rows = {row[0].text: row[1].text for row in root.iter("tr")}
    assert "8 completed" in rows["trials"]
    assert f"(trial {study.best.id}, 3 epochs)" in rows["best"]
    assert root.find("b").text == "study <i>n</i>"
    assert not list(root.iter("i"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "world average grid, no region given"),
        ({"region": "DE"}, "grid of DE"),
        ({"g_per_kwh": 100.0}, "as given"),
    ],
)
def test_reports_say_whose_grid_it_is(spec, words):
    folded = folded_of(journal(0), **spec)
    assert f"({words})" in report_markdown(folded, {})


def test_losses_of_trials_that_diverged_take_no_report_with_them(simulated):
    """Their squares, and the difference of two of them, are beyond what a number holds."""
    given = views.importance_input(simulated)
    wanted = views.importance(given)["importance"]
    for factor in (2.0**900, 2.0**-900):
        far = {**given, "trials": [(config, value * factor) for config, value in given["trials"]]}
        assert views.importance(far)["importance"] == wanted
    plt = pyplot()
    drawn, axes = plt.subplots()
    draw({"data": [{"type": "scatter", "x": [0, 1], "y": [-1e308, 1e308]}], "layout": {}}, axes)
    drawn.canvas.draw()
    plt.close(drawn)
