"""Reports in files and figures in notebooks: what they say is what the store has, and no markup of a trial's is any."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import penstock as pk
from penstock.cli._app import app
from penstock.core import Noted, SessionOpened
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, memory_bytes, power_w
from penstock.report import views
from penstock.report._draw import draw, pyplot
from penstock.report._static import figures, report_html, report_markdown, write_report
from penstock.report.views import Folded
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


def test_png_report_is_a_picture(store, tmp_path):
    write_report(store, tmp_path / "report.png", "first")
    plt = pyplot()
    picture = plt.imread(tmp_path / "report.png")
    assert picture.shape[0] > 1000
    assert picture.shape[1] == 1400
    assert picture[..., :3].std() > 0.05  # something is drawn


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
