"""The pages of results are what the files of results say, and every benchmark is in the one list."""

import argparse
import json
import os
import re
import runpy
import statistics
import sys
from pathlib import Path
from unittest import mock

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
    text = report.filled(report.README, report.readme_table(results))
    changed = re.sub(r"(\d)/s ", lambda found: f"{(int(found[1]) + 1) % 10}/s ", text, count=1)
    assert changed != text
    (tmp_path / "README.md").write_text(changed)
    flagship = report.FLAGSHIP.read_text()
    (tmp_path / "flagship.md").write_text(flagship.replace("| surrogate | 1", "| surrogate | 2"))
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "FLAGSHIP", tmp_path / "flagship.md")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "results.md")
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().out.count("run python -m benchmarks.report") == 3
    assert report.main([]) == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "flagship.md").read_text() == flagship
    (tmp_path / "README.md").write_text(text.replace(report.END, ""))
    with pytest.raises(ValueError, match=r"README\.md has no lines"):
        report.main(["--check"])


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


def test_the_flagships_table_is_the_files_own():
    """Read from the file by hand, not by an extractor."""
    found = json.loads((ROOT / "benchmarks" / "results" / "flagship_ablation.json").read_text())["results"]
    page = (ROOT / "docs" / "flagship.md").read_text()
    names = {"all": "(all of them on)", "none of them": "all of them off"}
    for name, each in found.items():
        line = re.escape(f"| {names.get(name, name.removeprefix('no '))} | ")
        cells = re.search(rf"^{line}(.*) \|$", page, re.MULTILINE)[1].split(" | ")
        for cell, key in zip(cells, ("makespan_h", "energy_wh", "accuracy", "violations"), strict=True):
            shown = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]
            half = 0.5 if key in ("energy_wh", "violations") else 0.005
            values = each[key]["values"]
            assert shown == pytest.approx([statistics.median(values), min(values), max(values)], abs=half)


def test_figures_in_sentences_are_the_files_own():
    """What pages say is measured, in words of their own, said as the files have it."""

    def of(name):
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]

    def says(page, *parts):
        text = " ".join((ROOT / page).read_text().split())
        for part in parts:
            assert part in text, (page, part)

    d, frames = of("dashboard"), of("dashboard")["growing"].values()
    says(
        "docs/dashboard.md",
        f"first paint {d['first_paint_s']['median']:.2f} s ({d['first_paint_s']['max']:.1f} s at worst)",
        f"the first drawing {d['first_figure_s']:.1f} s after opening",
        f"read after {d['all_read_s']:.0f} s ({d['all_read_cpu_s']:.0f} s of processor time), {d['memory_mb']:.0f} MB",
        f"at most {max(view['drawn_s'] for view in d['views'].values()):.2f} s",
        f"the longest of any view {max(each['max_ms'] for each in frames):.0f} ms",
    )
    gains = [
        of("hydro_fusion")[f"resnet8-{size}"]["gain"]["8"]["over_one_after_another"] for size in (8, 16, 32)
    ]
    says(
        "docs/fusion.md",
        "gain {:.1f} times on 8 x 8 images, {:.1f} times on 16 x 16 and {:.1f} times on 32 x 32".format(
            *gains
        ),
    )
    wall, decide = of("energy")["study"]["wall"], of("decide")
    times = [decide[f"{store}, ours"]["decide"]["median"] for store in ("memory", "sqlite", "postgresql")]
    says(
        "README.md",
        f"adds {100 * wall['added']:.1f}% to its wall time in the median of {of('energy')['study']['pairs']} pairs "
        f"(95%: {100 * wall['median_95'][0]:.1f} to {100 * wall['median_95'][1]:.1f}%)",
        "decides in {:.1f} ms (SQLite {:.1f}, PostgreSQL {:.1f})".format(*times),
    )
    names = {
        "mlp": "MLP, width 256",
        "resnet": "ResNet, 2 blocks, width 64",
        "transformer": "transformer, 2 layers, width 128",
    }
    for name, pair in of("hydro_transfer")["pairs"].items():
        model, optimizer = name.split()
        ours, theirs = pair["Penstock"], pair["standard"]
        says(
            "docs/surrogates.md",
            f"| {names[model]} | {optimizer} | {ours['rank_correlation']:.2f} | {ours['place_of_the_twins_best']} | "
            f"{ours['noise']['wide']:.2f}, {ours['noise']['thin']:.2f} | {theirs['rank_correlation']:.2f} | "
            f"{theirs['place_of_the_twins_best']} |",
        )
    rows = [
        row for row in of("fluid_studies")["rows"] if (row["condition"], row["devices"]) == ("as measured", 8)
    ]
    found = {(row["algorithm"], row["family"]): row for row in rows}
    sentences = {
        "A3C": "{:.2f} and {:.2f} times as quick; Fluid makes them {:.2f} and {:.2f} times as quick",
        "CycleGAN": "the limit is {:.2f} and {:.2f}, and Fluid reaches {:.2f} and {:.2g}",
    }
    for family, text in sentences.items():
        two = [found[name, family] for name in ("Hyperband", "BOHB")]
        figures = [row[key] for key in ("at_most_geometric_mean", "geometric_mean") for row in two]
        says("docs/fluid.md", text.format(*figures))


def test_hydros_row_is_the_whole_study_once_it_was_measured(tools, results):
    report, _ = tools
    parts = {name: each for name, each in results.items() if name != "hydro_study_cnn"}
    assert report.papers(parts)[-1][:3] == (*report.HYDRO, "hydro_fusion")
    one_side = {**parts, "hydro_study_cnn": {"results": {"runs": {}}}}
    assert report.papers(one_side)[-1][2] == "hydro_fusion"
    both = {**parts, "hydro_study_cnn": {"results": {"summary": {"times_shorter": 6.27}}}}
    *_, name, read, _ = report.papers(both)[-1]
    assert (name, report.headline(name, read, both)) == ("hydro_study_cnn", "6.27x")


def test_hyperpowers_row_is_of_the_papers_method_and_data(tools):
    """Not of whatever method gains the most."""
    report, _ = tools

    def case(share, **gains):
        tables = [
            {"method": method.replace("_", "-"), "time_to_samples": {"gain": gain}}
            for method, gain in gains.items()
        ]
        return {"feasible": share, "tables": tables}

    found = {
        "mnist, Simulated GTX 1070, 10%": case(0.1, Rand=43.8, Rand_Walk=4.74),
        "mnist, Simulated GTX 1070, 3.5%": case(0.034, Rand=90.0, Rand_Walk=61.2),
        "cifar, Simulated GTX 1070, 3.5%": case(0.03, Rand=99.0, Rand_Walk=98.0),
    }
    assert report.walked(found) == (
        "4.74x with limits that 10% of configurations keep; 61.2x with limits that 3.4% of configurations keep"
    )


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
    """What can be run is run by ``make bench``."""
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


def test_what_has_results_is_what_something_in_the_list_writes(tools):
    _, every = tools
    written = [name for each in every.BENCHMARKS for name in each.writes]
    assert len(written) == len(set(written))
    saved = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert saved - set(written) == set()
    assert all(each.writes for each in every.BENCHMARKS)


def test_what_is_written_has_an_extractor_of_its_own(tools):
    report, every = tools
    assert {name for each in every.BENCHMARKS for name in each.writes} == set(report.EXTRACT)


def test_what_is_skipped_is_told_before_anything_runs(tools, monkeypatch, tmp_path, capsys):
    report, every = tools
    ran = []

    def run(benchmark):
        ran.append((benchmark.name, capsys.readouterr().out))
        return 0

    few = (
        every.Benchmark("short", ("short.py",), ()),
        every.Benchmark("longer", ("longer.py",), (), long=True),
        every.Benchmark("fed", ("fed.py",), (), data="zeus"),
    )
    monkeypatch.setattr(every, "BENCHMARKS", few)
    monkeypatch.setattr(every, "DATA", str(tmp_path))
    monkeypatch.setattr(every, "run", run)
    monkeypatch.setattr(report, "main", lambda _: 0)
    monkeypatch.setattr(sys, "argv", ["all", "--quick", "--again"])
    assert every.main() == 0
    [(name, before)] = ran
    assert name == "short"
    assert "skipped: longer (takes more than half an hour), fed (needs PENSTOCK_DATA/zeus)\n" in before
    assert re.search(r"^fed +skipped: needs PENSTOCK_DATA/zeus$", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "zeus").mkdir()
    ran.clear()
    monkeypatch.setattr(sys, "argv", ["all", "--again"])
    assert every.main() == 0
    assert [name for name, _ in ran] == ["short", "longer", "fed"]
    assert "skipped" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["all", "--list"])
    assert every.main() == 0
    assert "PENSTOCK_DATA/zeus" in capsys.readouterr().out


def test_a_driver_that_keeps_records_is_judged_per_trial(tools):
    """1 MB over four fifths of 250 trials is 5 kB for each, of 500 it is 2.5."""
    report, _ = tools
    from benchmarks.hardening import soak

    for trials, flat in ((250, False), (500, True)):
        figures = {
            "driver_mb": {"start": 50.0, "gain": 1.0, "flat": not flat},
            "driver_handles": {"start": 9.0, "gain": 0.0, "flat": True},
        }
        found = {"trials": trials, "seconds": 60.0, "figures": figures}
        soak.judge_per_trial(found)
        assert found["driver_kb_per_trial"] == pytest.approx(1250 / trials)
        assert figures["driver_mb"]["flat"] is flat
        [row] = report.soak({"long": found})
        assert row.ours.startswith("flat" if flat else "grows")


class Parsed(BaseException):
    """Thrown by a benchmark's parser when it has parsed, in the place of what would run then."""


@pytest.fixture
def parses(monkeypatch):
    """Whether a benchmark's own parser takes arguments: its file is run as the list runs it, up to there."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *given):
        parse(parser, *given)
        raise Parsed

    def check(arguments):
        first, *rest = arguments
        path = ROOT / (f"{rest.pop(0).replace('.', '/')}.py" if first == "-m" else first)
        had = set(sys.modules)
        monkeypatch.setattr(sys, "argv", [str(path), *rest])
        monkeypatch.setattr(sys, "path", [str(path.parent), str(ROOT), str(ROOT / "benchmarks"), *sys.path])
        with mock.patch.dict(os.environ), pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")
        for name in set(sys.modules) - had:  # two folders have modules of the same name
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(path.parent):
                del sys.modules[name]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    return check


def test_every_benchmark_takes_its_arguments_and_those_of_its_rehearsal(tools, parses):
    _, every = tools
    quick = {each.name for each in every.BENCHMARKS if not each.rehearsal}
    assert quick == {"hyperpower_divergence"}
    for each in every.BENCHMARKS:
        parses(each.arguments)
        parses((*each.arguments, *each.rehearsal))
    with pytest.raises(SystemExit):
        parses(("benchmarks/scale.py", "--no-such-argument"))


WRITER = """
import sys, _bench
for name in sys.argv[1:]:
    _bench.save(name, " ".join(sys.argv), {"a": 1})
sys.exit(name == "failing")
"""


def test_a_rehearsal_keeps_results_apart_and_tells_what_does_not_write_what_it_says(
    tools, monkeypatch, tmp_path, capfd
):
    _, every = tools
    (tmp_path / "writer.py").write_text(WRITER)
    writer = str(tmp_path / "writer.py")

    def one(name, *writes, **more):
        return every.Benchmark(name, (writer, name), writes, **more)

    few = (
        one("right", "right"),
        one("both", "both", "more", rehearsal=("more",), long=True),
        one("other", "another"),
        one("again", "again", rehearsal=("right",)),
        one("failing", "failing"),
    )
    monkeypatch.setattr(every, "BENCHMARKS", few)
    before = every.contents(ROOT / "benchmarks" / "results")
    monkeypatch.setattr(sys, "argv", ["all", "--rehearse"])
    assert every.main() == 1
    told = capfd.readouterr().out
    assert told.splitlines()[-1] == (
        "failed: other (wrote other instead of another), again (wrote again, right instead of again), "
        "failing (exit code 1)"
    )
    assert "pages can be made of the 6 files" in told
    assert every.contents(ROOT / "benchmarks" / "results") == before
    monkeypatch.setattr(sys, "argv", ["all", "--rehearse", "--only", "right", "both"])
    assert every.main() == 0


def test_one_benchmark_is_run_by_its_name_and_those_of_a_paper_by_what_their_names_begin_with(tools):
    _, every = tools
    assert [each.name for each in every.chosen(["hydro_study_transformer"])] == ["hydro_study_transformer"]
    assert [each.name for each in every.chosen(["throughput", "defaults"])] == [
        "throughput",
        "defaults_digits",
        "defaults_characters",
        "defaults_fashion",
        "defaults_digits_shifted",
        "defaults_characters_shifted",
        "defaults_fashion_shifted",
    ]
    assert not every.chosen(["hydr"])
    written = {name for each in every.chosen(["hydro"]) for name in each.writes}
    assert written == {path.stem for path in every.RESULTS.glob("hydro_*.json")}


def test_what_trains_on_fashion_mnist_says_so(tools):
    """So it is skipped where there is none."""
    _, every = tools
    for each in every.BENCHMARKS:
        path = each.arguments[1].replace(".", "/") + ".py" if each.arguments[0] == "-m" else each.arguments[0]
        if re.search(r"\bfashion\(", (ROOT / path).read_text()) and path != "benchmarks/defaults.py":
            assert each.data == "fashion-mnist", each.name
