"""The coordinate check of a narrow twin in reports and figures."""

from __future__ import annotations

import re

import pytest

from penstock.core import Noted
from penstock.core.errors import InvalidInput
from penstock.goal import Goal
from penstock.report import views
from penstock.report._draw import draw, pyplot
from penstock.report._plots import Plots
from penstock.report._static import report_html, report_json, report_markdown
from penstock.report.views import Folded

WIDTHS = [8.0, 2.0, 1.0]
BODY = {"layer": "<b>body", "sizes": [0.5, 0.51, 0.49], "slope": -0.01, "doubt": 0.0, "verdict": "ok"}
SLEEPS = {"layer": "query", "sizes": [0.0, 0.0, 0.0], "slope": 0.0, "doubt": 0.0, "verdict": "ok"}
LOUD = {"layer": "(output)", "sizes": [1.0, 4.0, None], "slope": None, "doubt": None, "verdict": "diverges"}
GRADIENT = {"layer": "body.weight", "sizes": [0.1, 0.4, 0.8], "slope": 1.0, "doubt": 0.1, "verdict": "grows"}


def a_fold(**more) -> Folded:
    folded = Folded("twin", Goal.of("loss", None), {})
    check = {"ok": False, "divisors": WIDTHS, "steps": 4, "losses": [1.0] * 3, "step_s": [0.1] * 3}
    folded.apply(
        Noted(1.0, "surrogate", {"factor": 8, "check": check | {"layers": [BODY, SLEEPS, LOUD]} | more})
    )
    return folded


def table(page: str) -> list[list[str]]:
    part = page.split("<h2>Coordinate check</h2><div")[1].split("</table>")[0]
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", part)]


def test_the_html_report_has_the_table_and_the_curves():
    page = report_html(a_fold(gradients=[GRADIENT]), {})
    assert table(page) == [
        ["layer", "1/8", "1/2", "1", "slope", "verdict"],
        ["&lt;b&gt;body", "0.5", "0.51", "0.49", "-0.01", "ok"],
        ["query", "0", "0", "0", "+0.00", "ok"],
        ["(output)", "1", "4", "-", "-", "diverges"],
        ["gradient of body.weight", "0.1", "0.4", "0.8", "+1.00", "grows"],
    ]
    assert page.count("<h2>Coordinate check</h2>") == 2
    assert "alt='Coordinate check' src='data:image/png;base64," in page
    assert "After 4 steps at 3 widths 2 of 4 fail." in page


def test_the_curves_are_the_sizes_over_the_widths():
    folded = a_fold()
    figure = views.coordinate_check_figure(views.coordinate_check(folded))
    assert [(t["name"], t["x"], t["y"]) for t in figure["data"]] == [
        ("&lt;b&gt;body", [1 / 8, 1 / 2, 1], [0.5, 0.51, 0.49]),
        ("query", [1 / 8, 1 / 2, 1], [None, None, None]),
        ("(output): diverges", [1 / 8, 1 / 2, 1], [1.0, 4.0, None]),
    ]
    plt = pyplot()
    drawn, axes = plt.subplots()
    draw(figure, axes)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1/8", "1/2", "1"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1 / 8, 1 / 2, 1]] * 3
    plt.close(drawn)
    assert [list(trace.y) for trace in Plots(lambda: folded).coordinate_check().data] == [
        t["y"] for t in figure["data"]
    ]


def test_a_check_of_an_earlier_release_has_no_gradients():
    told = report_json(a_fold(), {})["coordinate_check"]
    assert [row[0] for row in told["rows"]] == ["<b>body", "query", "(output)"]
    assert told["text"].startswith("After 4 steps at 3 widths 1 of 3 fail.")


def test_a_study_without_a_twin_has_none_of_it():
    folded = Folded("plain", Goal.of("loss", None), {})
    assert "Coordinate check" not in report_html(folded, {})
    assert "Coordinate check" not in report_markdown(folded, {})
    assert report_json(folded, {})["coordinate_check"] is None
    with pytest.raises(InvalidInput, match=r"surrogate=pk\.Shrink\(8\)"):
        Plots(lambda: folded).coordinate_check()
