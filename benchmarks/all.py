"""Run every benchmark, one after another, and make the pages of results from what they write.

Run with: python -m benchmarks.all [--list] [--only NAME ...] [--long] (make bench, make bench LONG=1)

This is the one list of benchmarks, and every file of benchmarks/results is one that an entry here writes. Those marked
long take more than half an hour each and run with ``--long``; those that need public data run where the variable
PENSTOCK_DATA names its folder. What is skipped is told at the beginning and at the end, what has failed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = os.environ.get("PENSTOCK_DATA", "")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command of Python's, what it writes to benchmarks/results, and the data it needs."""

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    data: str = ""
    long: bool = False

    def skipped(self, long: bool) -> str:
        """Why it does not run; empty: it does."""
        if self.long and not long:
            return "long"
        if self.data and not (DATA and (Path(DATA) / self.data).is_dir()):
            return f"needs PENSTOCK_DATA/{self.data}"
        return ""


def script(path: str, *arguments: str) -> tuple[str, ...]:
    return (f"benchmarks/{path}.py", *arguments)


def module(path: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{path}", *arguments)


def whole_study(model: str, *, asha: bool) -> Benchmark:
    name = f"hydro_study_{model}{'_asha' if asha else ''}"
    options = ("--asha",) if asha else ()
    arguments = script("papers/hydro/study", "--model", model, *options, "--seeds", *"01234", "--save")
    return Benchmark(name, arguments, (name,), long=True)


BENCHMARKS = (
    Benchmark("throughput", script("throughput"), ("throughput",)),
    Benchmark("throughput_no_ray", script("throughput", "--no-ray"), ("throughput_no_ray",)),
    Benchmark("asha", script("asha"), ("asha",)),
    Benchmark("asha_optuna", script("asha", "--peers", "optuna"), ("asha_optuna",)),
    Benchmark("scale", script("scale"), ("scale",)),
    Benchmark("loop", module("loop"), ("loop",)),
    Benchmark("decide", module("decide"), ("decide",)),
    Benchmark("dashboard", script("dashboard"), ("dashboard",)),
    Benchmark("energy", script("energy"), ("energy",), data="zeus"),
    Benchmark("ray_local", script("ray_local"), ("ray_local",)),
    Benchmark(
        "flagship",
        script("flagship", "--figure", "docs/images/flagship-ablation.png"),
        ("flagship_ablation",),
        long=True,
    ),
    Benchmark("defaults_digits", script("defaults", "digits"), ("defaults_digits",), long=True),
    Benchmark("defaults_characters", script("defaults", "characters"), ("defaults_characters",), long=True),
    Benchmark(
        "defaults_fashion",
        script("defaults", "fashion", "--data", f"{DATA}/fashion-mnist"),
        ("defaults_fashion",),
        data="fashion-mnist",
        long=True,
    ),
    Benchmark("zeus", module("papers.zeus.replay", "--seeds", "20"), ("zeus",), data="zeus"),
    Benchmark("fluid_groups", script("papers/fluid/groups", "--quick", "--seeds", "3"), ("fluid_groups",)),
    Benchmark(
        "fluid_studies", script("papers/fluid/studies", "--data", DATA), ("fluid_studies",), data="gavel"
    ),
    Benchmark("fluid_local", script("papers/fluid/local"), ("fluid_local",), long=True),
    Benchmark(
        "fluid_local_storage",
        script("papers/fluid/local", "--wait", "0.03", "--name", "fluid_local_storage"),
        ("fluid_local_storage",),
        long=True,
    ),
    whole_study("cnn", asha=False),
    whole_study("cnn", asha=True),
    whole_study("transformer", asha=False),
    whole_study("transformer", asha=True),
    Benchmark("hydro_fusion", script("papers/hydro/fusion", "--save"), ("hydro_fusion",)),
    Benchmark("hydro_lanes", script("papers/hydro/lanes", "--save"), ("hydro_lanes",)),
    Benchmark("hydro_members", script("papers/hydro/members", "--save"), ("hydro_members",)),
    Benchmark("hydro_transfer", script("papers/hydro/transfer", "--save"), ("hydro_transfer",), long=True),
    Benchmark("hydro_split", module("papers.hydro_coordinator.split"), ("hydro_split",)),
    Benchmark(
        "hydro_mixed",
        script("papers/hydro_coordinator/mixed", "--rates", f"{DATA}/gavel/simulation_throughputs.json.xz"),
        ("hydro_mixed",),
        data="gavel",
    ),
    Benchmark(
        "hydro_cluster",
        script(
            "papers/hydro_coordinator/mixed",
            *("--rates", f"{DATA}/gavel/simulation_throughputs.json.xz", "--large", "3000"),
        ),
        ("hydro_cluster",),
        data="gavel",
    ),
    Benchmark(
        "hydro_bubbles",
        script("papers/hydro_coordinator/bubbles", "--fusion", f"{DATA}/hydro/resnet18_256.csv"),
        ("hydro_bubbles",),
        data="hydro",
    ),
    Benchmark(
        "hydro_bubbles_local", script("papers/hydro_coordinator/bubbles_local"), ("hydro_bubbles_local",)
    ),
    Benchmark(
        "hyperpower_predictors",
        script("papers/hyperpower/predictors", "--save", "--data", f"{DATA}/ecnas"),
        ("hyperpower_predictors",),
        data="ecnas",
    ),
    Benchmark(
        "hyperpower_divergence",
        script("papers/hyperpower/divergence", "--save", "--data", f"{DATA}/taskset"),
        ("hyperpower_divergence",),
        data="taskset",
    ),
    Benchmark("hyperpower_suggest", script("papers/hyperpower/suggest", "--save"), ("hyperpower_suggest",)),
    Benchmark(
        "hyperpower_fixed_time", script("papers/hyperpower/fixed_time", "--save"), ("hyperpower_fixed_time",)
    ),
    Benchmark(
        "hyperpower_search",
        script("papers/hyperpower/search", "--seeds", "10", "--peers", "--save"),
        ("hyperpower_search",),
        long=True,
    ),
    Benchmark(
        "sm2",
        module("papers.sm2.scenarios", "--wide", "--exhaustive"),
        ("sm2_lstm", "sm2_transformer", "sm2_resnet"),
        long=True,
    ),
    Benchmark("sm2_lr_standard", module("papers.sm2.lr_cases"), ("sm2_lr_standard",), long=True),
    Benchmark("sm2_lr_fresh", module("papers.sm2.lr_cases", "--fresh"), ("sm2_lr_fresh",), long=True),
    Benchmark("fuzz", module("hardening.fuzz"), ("fuzz",)),
    Benchmark("kills", module("hardening.kills", "--kills", "1000"), ("kills",)),
    Benchmark("soak", module("hardening.soak", "--minutes", "120"), ("soak",), long=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--long", action="store_true", help="also those of more than half an hour")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[b.name for b in BENCHMARKS])
    given = parser.parse_args()
    wanted = [b for b in BENCHMARKS if not given.only or b.name in given.only]
    if given.list:
        for each in wanted:
            needs = f"PENSTOCK_DATA/{each.data}" if each.data else ""
            print(f"{each.name:30}{'long' if each.long else '':6}{needs:30}{' '.join(each.arguments)}")
        return 0
    long = given.long or bool(given.only)
    reasons = {each.name: each.skipped(long) for each in wanted}
    skipped = ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)
    if skipped:
        print(f"skipped: {skipped}", flush=True)
    failed = []
    for benchmark in (each for each in wanted if not reasons[each.name]):
        print(f"== {benchmark.name}", flush=True)
        began_s = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
        done = subprocess.run([sys.executable, *benchmark.arguments], cwd=ROOT, env=environment)
        print(
            f"== {benchmark.name}: exit code {done.returncode} after {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        if done.returncode:
            failed.append(benchmark.name)
    from benchmarks.report import main as report

    report([])
    if skipped:
        print(f"skipped: {skipped}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
