"""The pages of results are what the files of results say, and every benchmark is in the one list."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import all as every
        from benchmarks import report
    finally:
        sys.path.remove(str(ROOT))
    return report, every


@pytest.fixture(scope="module")
def results(tools):
    return tools[0].load()


def test_the_pages_are_what_the_files_say(tools, capsys):
    assert tools[0].main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_figure_or_page_is_noticed(tools, results, monkeypatch, tmp_path, capsys):
    report, _ = tools
    text = report.README.read_text()
    changed = re.sub(r"(\d)/s \(", lambda found: f"{(int(found[1]) + 1) % 10}/s (", text, count=1)
    assert changed != text
    (tmp_path / "README.md").write_text(changed)
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "results.md")
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().out.count("run python -m benchmarks.report") == 2
    assert report.main([]) == 0
    assert (tmp_path / "README.md").read_text() == report.readme(text, report.readme_table(results))


def test_figures_are_the_files_own(results):
    """Read from the files by hand, not by an extractor."""
    page, readme = (ROOT / "docs" / "results.md").read_text(), (ROOT / "README.md").read_text()
    per_s = json.loads((ROOT / "benchmarks" / "results" / "throughput_no_ray.json").read_text())["results"]
    assert f"{per_s['penstock']['per_s']['median']:,.0f}/s" in page
    assert f"{per_s['penstock']['per_s']['median']:,.0f}/s" in readme
    for name, document in results.items():
        section = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert document["command"] in section
        assert document["date"] in section
        assert document["machine"]["processor"] in section
        for package, version in document["versions"].items():
            assert f"{package} {version}" in section


def test_every_paper_stands_beside_ours(tools, results):
    page = (ROOT / "docs" / "results.md").read_text().partition("## All benchmarks")[0]
    for paper in ("Zeus", "SM2", "HyperPower", "Fluid", "Hydro"):
        assert re.search(rf"^\| {paper} ", page, re.MULTILINE)
    assert "not measured yet" not in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (4404.2, "4,404"), (12.69, "12.7"), (0.0152, "0.0152"), (110.46, "110"), (9.788, "9.79"), (1.0, "1"),
     (0.00001, "0"), (float("inf"), "inf"), (-3.456, "-3.46")],
)  # fmt: skip
def test_numbers_as_people_read_them(tools, value, text):
    shown = tools[0].number(value)
    assert shown == text
    if 1e-3 < abs(value) < 1e6:
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.01)


def test_every_benchmark_is_in_the_list(tools):
    """What can be run is run by ``make bench``; what has results is what something there writes."""
    _, every = tools
    listed = {argument for each in every.BENCHMARKS for argument in each.arguments}
    listed |= {
        f"benchmarks/{argument[11:].replace('.', '/')}.py"
        for argument in listed
        if argument.startswith("benchmarks.")
    }
    runnable = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and path.stem not in ("all", "report")
    }
    assert runnable - listed == set()
    for path in (argument for argument in listed if argument.endswith(".py")):
        assert (ROOT / path).exists(), path
