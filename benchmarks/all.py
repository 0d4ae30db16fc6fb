"""Run every benchmark, one after another, and make the pages of results from what they write.

Run with: python -m benchmarks.all [--list] [--quick] [--again] (make bench, make bench QUICK=1, make bench AGAIN=1)
          python -m benchmarks.all --only NAME ... (make bench-NAME)
          python -m benchmarks.all --rehearse [--only NAME ...] (make bench-rehearsal)

This is the one list of benchmarks, and every file of benchmarks/results is one that an entry here writes. All of it
takes some ten hours. It may be broken off (Ctrl-C) and run again: a benchmark whose results say that this very source
made them (Penstock, the benchmark's own code and its arguments, all committed) is skipped, unless it failed after
writing them or ``--again`` is given.
``--quick`` leaves out those marked long, which take more than half an hour each. Those that need public data run where
the variable PENSTOCK_DATA names its folder. What is skipped is told at the beginning; at the end there is a table of
what ran, how it ended and what was skipped and why. What fails doesn't stop the others. ``--only`` always runs, and a
NAME that none has stands for all that begin with it: ``make bench-hydro`` runs all of Hydro's.

A rehearsal runs all of them, the long ones too, each by its own code at a tiny size and into a folder of its own, and
sees that each writes what it says and that the pages can be made of it. Its figures mean nothing and are thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _bench

ROOT = Path(__file__).parents[1]
RESULTS = _bench.RESULTS
DATA = os.environ.get("PENSTOCK_DATA", "")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where dataset-fashion-mnist installs it
GRACE_S = 30.0  # of a benchmark to end after Ctrl-C
SCRATCH = "{scratch}"  # stands for the folder of a rehearsal
FASHION = Path(DATA) / "fashion-mnist" if DATA and (Path(DATA) / "fashion-mnist").is_dir() else DEBIAN


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command of Python's, what it writes to benchmarks/results, and the data it needs.

    ``rehearsal`` follows the other arguments in a rehearsal and makes it tiny; empty: it takes seconds as it is.
    """

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    data: str = ""
    long: bool = False
    rehearsal: tuple[str, ...] = ()

    def skipped(self, quick: bool) -> str:
        """Why it does not run; empty: it does."""
        if self.long and quick:
            return "takes more than half an hour"
        if self.data == "fashion-mnist":
            found = FASHION.is_dir()
            return "" if found else f"needs PENSTOCK_DATA/fashion-mnist or {DEBIAN}"
        if self.data and not (DATA and (Path(DATA) / self.data).is_dir()):
            return f"needs PENSTOCK_DATA/{self.data}"
        return ""

    def made_by(self, now: Mapping[str, Any]) -> bool:
        """Whether the source of now has made all that this writes."""
        given = self.arguments[2:] if self.arguments[0] == "-m" else self.arguments[1:]
        found = [json.loads(path.read_text()) for path in self.results() if path.exists()]
        return len(found) == len(self.writes) and all(_bench.made_by(now, each, given) for each in found)

    def results(self) -> list[Path]:
        return [RESULTS / f"{name}.json" for name in self.writes]


def script(path: str, *arguments: str) -> tuple[str, ...]:
    return (f"benchmarks/{path}.py", *arguments)


def module(path: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{path}", *arguments)


def whole_study(model: str, *, asha: bool) -> Benchmark:
    name = f"hydro_study_{model}{'_asha' if asha else ''}"
    options = ("--asha",) if asha else ()
    chosen = {"cnn": "--targets 2 --seeds 0 1 2 3 4", "transformer": "--targets 4 --seeds 10 11 12 13 14"}
    arguments = script("papers/hydro/study", "--model", model, *options, *chosen[model].split(), "--save")
    tiny = ("--trials", "2", "--epochs", "2", "--targets", "2", "--seeds", "0")
    return Benchmark(name, arguments, (name,), long=True, rehearsal=tiny)


def defaults(problem: str, shifted: bool) -> Benchmark:
    """Shifted: the middle of the learning rates, where Penstock begins, is no longer a good one."""
    name = f"defaults_{problem}{'_shifted' if shifted else ''}"
    fashion = problem == "fashion"
    options = (*(("--data", str(FASHION)) if fashion else ()), *(("--shift", "10") if shifted else ()))
    data = "fashion-mnist" if fashion else ""
    return Benchmark(
        name, script("defaults", problem, *options), (name,), data, rehearsal=tiny("--seeds 1 --seconds 8")
    )


def tiny(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BENCHMARKS = (
    Benchmark(
        "throughput", script("throughput"), ("throughput",), rehearsal=tiny("--repeats 1 --scale 0.02")
    ),
    Benchmark(
        "throughput_no_ray",
        script("throughput", "--no-ray"),
        ("throughput_no_ray",),
        rehearsal=tiny("--repeats 1 --scale 0.02"),
    ),
    Benchmark("asha", script("asha"), ("asha",), rehearsal=tiny("--repeats 1 --trials 4")),
    Benchmark(
        "asha_optuna",
        script("asha", "--peers", "optuna"),
        ("asha_optuna",),
        rehearsal=tiny("--repeats 1 --trials 9"),
    ),
    Benchmark("scale", script("scale"), ("scale",), rehearsal=tiny("--sizes 100 300 --repeats 1")),
    Benchmark("loop", module("loop"), ("loop",), rehearsal=tiny("--repeats 1 --scale 0.05")),
    Benchmark("decide", module("decide"), ("decide",), rehearsal=tiny("--observations 20 --repeats 10")),
    Benchmark("dashboard", script("dashboard"), ("dashboard",), rehearsal=tiny("--trials 50 --save")),
    Benchmark("energy", script("energy"), ("energy",), data="zeus", rehearsal=tiny("--trials 50 --pairs 3")),
    Benchmark("ray_local", script("ray_local"), ("ray_local",), rehearsal=tiny("--repeats 1 --cases 0.2x4")),
    Benchmark(
        "flagship",
        script("flagship", "--figure", "docs/images/flagship-ablation.png"),
        ("flagship_ablation",),
        rehearsal=(*tiny("--seeds 1 --max-epochs 3 --iterations 1 --figure"), f"{SCRATCH}/flagship.png"),
    ),
    *(
        defaults(problem, shifted)
        for shifted in (False, True)
        for problem in ("digits", "characters", "fashion")
    ),
    Benchmark(
        "zeus",
        module("papers.zeus.replay", "--seeds", "20"),
        ("zeus",),
        data="zeus",
        rehearsal=tiny("--quick"),
    ),
    Benchmark(
        "fluid_groups",
        script("papers/fluid/groups", "--quick", "--seeds", "3"),
        ("fluid_groups",),
        rehearsal=tiny("--seeds 1"),
    ),
    Benchmark(
        "fluid_studies",
        script("papers/fluid/studies", "--data", DATA),
        ("fluid_studies",),
        data="gavel",
        rehearsal=tiny("--seeds 1 --devices 4 --families ResNet-18"),
    ),
    Benchmark(
        "fluid_local",
        script("papers/fluid/local", "--seeds", "7"),
        ("fluid_local",),
        rehearsal=tiny("--seeds 1 --trials 3 --epochs 3"),
    ),
    Benchmark(
        "fluid_local_storage",
        script("papers/fluid/local", "--seeds", "7", "--wait", "0.03", "--name", "fluid_local_storage"),
        ("fluid_local_storage",),
        rehearsal=tiny("--seeds 1 --trials 3 --epochs 3 --wait 0.003"),
    ),
    whole_study("cnn", asha=False),
    whole_study("cnn", asha=True),
    whole_study("transformer", asha=False),
    whole_study("transformer", asha=True),
    Benchmark(
        "hydro_fusion",
        script("papers/hydro/fusion", "--save"),
        ("hydro_fusion",),
        rehearsal=tiny("--models mlp16 transformer cnn --repeats 1 --seconds 0.02 --trials 4"),
    ),
    Benchmark(
        "hydro_lanes",
        script("papers/hydro/lanes", "--save"),
        ("hydro_lanes",),
        rehearsal=tiny("--lanes 2 --steps 4 --repeats 1"),
    ),
    Benchmark(
        "hydro_members",
        script("papers/hydro/members", "--save"),
        ("hydro_members",),
        rehearsal=tiny("--members 8 --groups 4 8 --sample 2"),
    ),
    Benchmark(
        "hydro_transfer",
        script("papers/hydro/transfer", "--save"),
        ("hydro_transfer",),
        data="fashion-mnist",
        long=True,
        rehearsal=tiny("--count 3 --seeds 1 --epochs 1 --optimizers SGD"),
    ),
    Benchmark(
        "hydro_split",
        module("papers.hydro_coordinator.split"),
        ("hydro_split",),
        rehearsal=tiny("--models mlp128 --samples 128 --repeats 1"),
    ),
    Benchmark(
        "hydro_mixed",
        script("papers/hydro_coordinator/mixed", "--rates", f"{DATA}/gavel/simulation_throughputs.json.xz"),
        ("hydro_mixed",),
        data="gavel",
        rehearsal=tiny("--seeds 1 --mixes 2"),
    ),
    Benchmark(
        "hydro_cluster",
        script(
            "papers/hydro_coordinator/mixed",
            *("--rates", f"{DATA}/gavel/simulation_throughputs.json.xz", "--large", "3000"),
        ),
        ("hydro_cluster",),
        data="gavel",
        rehearsal=tiny("--large 20"),
    ),
    Benchmark(
        "hydro_bubbles",
        script("papers/hydro_coordinator/bubbles", "--fusion", f"{DATA}/hydro/resnet18_256.csv"),
        ("hydro_bubbles",),
        data="hydro",
        rehearsal=tiny("--seeds 1"),
    ),
    Benchmark(
        "hydro_bubbles_local",
        script("papers/hydro_coordinator/bubbles_local"),
        ("hydro_bubbles_local",),
        rehearsal=tiny("--cycles 1"),
    ),
    Benchmark(
        "hyperpower_predictors",
        script("papers/hyperpower/predictors", "--save", "--data", f"{DATA}/ecnas"),
        ("hyperpower_predictors",),
        data="ecnas",
        rehearsal=tiny("--samples 40 --repeats 1"),
    ),
    Benchmark(
        "hyperpower_divergence",
        script("papers/hyperpower/divergence", "--save", "--data", f"{DATA}/taskset"),
        ("hyperpower_divergence",),
        data="taskset",
    ),
    Benchmark(
        "hyperpower_suggest",
        script("papers/hyperpower/suggest", "--save"),
        ("hyperpower_suggest",),
        rehearsal=tiny("--seeds 1 --more 1"),
    ),
    Benchmark(
        "hyperpower_fixed_time",
        script("papers/hyperpower/fixed_time", "--save"),
        ("hyperpower_fixed_time",),
        rehearsal=tiny("--seeds 1 --problems mnist --power 0.1 --methods Rand Rand-Walk"),
    ),
    Benchmark(
        "hyperpower_search",
        script("papers/hyperpower/search", "--seeds", "10", "--peers", "--save"),
        ("hyperpower_search",),
        long=True,
        rehearsal=tiny("--seeds 1 --evaluations 6"),
    ),
    Benchmark(
        "sm2",
        module("papers.sm2.scenarios", "--wide", "--exhaustive"),
        ("sm2_lstm", "sm2_transformer", "sm2_resnet"),
        data="fashion-mnist",
        long=True,
        rehearsal=tiny("--samples 128 --epochs 16"),
    ),
    Benchmark(
        "sm2_lr_standard",
        module("papers.sm2.lr_cases"),
        ("sm2_lr_standard",),
        data="fashion-mnist",
        long=True,
        rehearsal=tiny("--cases 1 --scale 0.05"),
    ),
    Benchmark(
        "sm2_lr_fresh",
        module("papers.sm2.lr_cases", "--fresh"),
        ("sm2_lr_fresh",),
        data="fashion-mnist",
        long=True,
        rehearsal=tiny("--cases 1 --scale 0.05"),
    ),
    Benchmark("fuzz", module("hardening.fuzz"), ("fuzz",), rehearsal=tiny("--seconds 2")),
    Benchmark(
        "kills",
        module("hardening.kills", "--kills", "1000"),
        ("kills",),
        rehearsal=tiny("--kills 6 --portion 3"),
    ),
    Benchmark(
        "soak",
        module("hardening.soak", "--minutes", "120"),
        ("soak",),
        long=True,
        rehearsal=tiny("--minutes 0.5 --events 20000 --lenient"),
    ),
)


def run(benchmark: Benchmark, more: Sequence[str] = (), **variables: str) -> int:
    """Run one of them, as told by ``arguments`` and ``more``; its exit code."""
    print(f"== {benchmark.name}", flush=True)
    began_s = time.monotonic()
    path = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    with subprocess.Popen(
        [sys.executable, *benchmark.arguments, *more], cwd=ROOT, env=environment
    ) as started:
        try:
            code = started.wait()
        except KeyboardInterrupt:  # which it has got, too: it may end its own processes
            try:
                started.wait(timeout=GRACE_S)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                started.kill()
            raise
    print(f"== {benchmark.name}: exit code {code} after {time.monotonic() - began_s:.0f} s", flush=True)
    return code


def measure(wanted: Sequence[Benchmark], reasons: Mapping[str, str], again: bool) -> int:
    """Run those that no reason speaks against, make the pages and tell how it went; the exit code.

    Ctrl-C ends the one that runs and leaves out those to come; whatever was made is kept.
    """
    lines = {
        each.name: [each.name, "", "", reasons[each.name] and f"skipped: {reasons[each.name]}"]
        for each in wanted
    }
    broken_off, failed = False, []
    for benchmark in (each for each in wanted if not reasons[each.name]):
        line, began_s = lines[benchmark.name], time.monotonic()
        if broken_off:
            line[3] = "not run: broken off"
            continue
        if again:
            for name in benchmark.writes:
                (RESULTS / "unfinished" / f"{name}.json").unlink(missing_ok=True)
        had = [path.exists() and path.stat().st_mtime_ns for path in benchmark.results()]
        try:
            code = run(benchmark)
        except KeyboardInterrupt:
            broken_off = True
            line[3] = "broken off"
        else:
            line[1] = str(code)
            now = [path.exists() and path.stat().st_mtime_ns for path in benchmark.results()]
            old = [name for name, *two in zip(benchmark.writes, had, now, strict=True) if two[0] == two[1]]
            for name in benchmark.writes if code else ():
                if name not in old:
                    _bench.failed(name, code)
            if old:
                line[3] = f"did not write {', '.join(old)}"
            if code or old:
                failed.append(benchmark.name)
        line[2] = f"{time.monotonic() - began_s:.0f}"
    from benchmarks.report import main as report

    try:
        report([])
    except ValueError as error:
        print(error)
        failed.append("the pages of results")
    rows = [["benchmark", "exit code", "seconds", ""], *lines.values()]
    widths = [max(len(row[place]) for row in rows) + 2 for place in range(3)]
    for row in rows:
        print("".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    if failed:
        print(f"failed: {', '.join(failed)}")
    if broken_off:
        print("broken off: run it again to go on")
        return 130
    return 1 if failed else 0


def contents(*folders: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()
    }


def rehearse(wanted: Sequence[Benchmark]) -> list[str]:
    """Run them at a tiny size, into a folder that is thrown away; what went wrong."""
    wrong = []
    kept, beside = contents(RESULTS, ROOT / "docs"), set(ROOT.iterdir())
    with tempfile.TemporaryDirectory(prefix="penstock-rehearsal-") as name:
        scratch = Path(name)
        variables = {"PENSTOCK_RESULTS": name}
        for benchmark in wanted:
            had = contents(scratch)
            code = run(benchmark, [each.replace(SCRATCH, name) for each in benchmark.rehearsal], **variables)
            new = [path for path, text in contents(scratch).items() if text != had.get(path)]
            wrote = {path.stem for path in new if path.suffix == ".json"}
            if code:
                wrong.append(f"{benchmark.name} (exit code {code})")
            if wrote != set(benchmark.writes):
                wrote_text, told = (
                    ", ".join(sorted(names)) or "nothing" for names in (wrote, benchmark.writes)
                )
                wrong.append(f"{benchmark.name} (wrote {wrote_text} instead of {told})")
        report = Benchmark("report", ("-m", "benchmarks.report"), ())
        if run(report, **variables):
            wrong.append("the pages of results")
    now = contents(RESULTS, ROOT / "docs")
    changed = [path for path in sorted(kept.keys() | now) if kept.get(path) != now.get(path)]
    wrong += [f"{path.relative_to(ROOT)} (changed)" for path in changed]
    left = [path.name for path in sorted(set(ROOT.iterdir()) - beside) if not path.name.startswith(".")]
    wrong += [f"{name} (left behind)" for name in left]
    return wrong


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Those of these names; of a name that none has, all that begin with it."""
    known = {b.name for b in BENCHMARKS}
    begin = tuple(f"{name}_" for name in names if name not in known)
    return [b for b in BENCHMARKS if b.name in names or (begin and b.name.startswith(begin))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without those of more than half an hour")
    parser.add_argument("--again", action="store_true", help="also what this source has already made")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="these alone; hydro: all of hydro_*"
    )
    parser.add_argument("--rehearse", action="store_true", help="all at a tiny size; no results are kept")
    given = parser.parse_args()
    unknown = [name for name in given.only if not chosen([name])]
    if unknown:
        parser.error(
            f"there is no benchmark {', '.join(unknown)}; choose from {', '.join(b.name for b in BENCHMARKS)}"
        )
    wanted = chosen(given.only) if given.only else list(BENCHMARKS)
    if given.list:
        for each in wanted:
            needs = f"PENSTOCK_DATA/{each.data}" if each.data else ""
            arguments = (*each.arguments, *(each.rehearsal if given.rehearse else ()))
            print(f"{each.name:30}{'long' if each.long else '':6}{needs:30}{' '.join(arguments)}")
        return 0
    now = _bench.penstock()
    if now["dirty"] is not False and not given.rehearse:
        known = "what is here isn't committed" if now["dirty"] is True else "git does not know what is here"
        print(f"{known}: results will say so, and a run that is broken off begins anew", flush=True)
    reasons = {each.name: each.skipped(given.quick) for each in wanted}
    if not (given.again or given.only or given.rehearse):
        made = {each.name: "already made by this source" for each in wanted if each.made_by(now)}
        reasons |= {name: reasons[name] or reason for name, reason in made.items()}
    skipped = ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)
    if skipped:
        print(f"skipped: {skipped}", flush=True)
    if not given.rehearse:
        return measure(wanted, reasons, given.again)
    failed = rehearse([each for each in wanted if not reasons[each.name]])
    if skipped:
        print(f"skipped: {skipped}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
