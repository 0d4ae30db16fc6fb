"""Make docs/results.md, the README's table and that of docs/flagship.md out of benchmarks/results/*.json.

So none of them can drift from what ran.

Run with: python -m benchmarks.report [--check]

Every file of results has an extractor below, which turns its figures into rows; ``head`` marks the README's. A file
without one is listed with its medians. ``--check`` writes nothing and fails where the pages are not what the files say.
Where PENSTOCK_RESULTS names another folder of results, as a rehearsal does, the pages are made of it and not written.

docs/results.md says which source of Penstock it was made at, and compares with that one: so it stays true, and the same,
when the source goes on. ``--check`` takes it from the page; making the page anew takes the one that git knows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import _bench
from benchmarks._bench import NOT_RECORDED, RESULTS
from benchmarks.all import BENCHMARKS
from benchmarks.hardening.soak import KB_PER_TRIAL

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
FLAGSHIP = ROOT / "docs" / "flagship.md"
BEGIN, END = "<!-- results: made by python -m benchmarks.report -->", "<!-- results end -->"

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what was measured, ours, and what stands beside it. ``brief``: the README's lines for it."""

    what: str
    ours: str
    beside: str = ""
    head: bool = False
    brief: tuple[tuple[str, str, str], ...] = ()


# --- figures as text --------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, no exponent for what people read."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def middle(value: Any) -> float:
    """The median of a spread, or a number itself."""
    return float(value["median"]) if isinstance(value, Mapping) else float(value)


def ranged(value: Any, unit: str = "") -> str:
    """``median (least..greatest)``."""
    if not isinstance(value, Mapping):
        return number(value) + unit
    return f"{number(value['median'])}{unit} ({number(value['min'])}..{number(value['max'])})"


def percent(share: float) -> str:
    return f"{number(100 * share)}%"


def times(values: Sequence[float]) -> str:
    """``1.3x`` or ``1.3-1.7x``."""
    low, high = (f"{v:.2g}" if v < 10 else f"{v:.0f}" for v in (min(values), max(values)))
    return f"{low}x" if low == high else f"{low}-{high}x"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def other(name: str) -> Data:
    """The figures of another file, for a row that joins two; nothing where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# --- one extractor per file -------------------------------------------------------------------------------------------


def throughput(r: Data, head: bool) -> Iterator[Row]:
    peers = {"process pool": "bare process pool", "optuna journal": "Optuna with its journal file",
             "optuna sqlite": "Optuna with SQLite", "ray tune": "Ray Tune's function API"}  # fmt: skip
    beside = [
        f"{label} {ranged(r[name]['per_s'], '/s')}: {number(middle(r[name]['penstock_ratio']))}x"
        for name, label in peers.items()
        if name in r
    ]
    earlier = other("throughput")
    if "ray tune" not in r and "ray tune" in earlier:
        ray, ours = earlier["ray tune"], earlier["penstock"]
        beside.append(
            f"in another run Ray Tune's function API {ranged(ray['per_s'], '/s')} beside "
            f"{ranged(ours['per_s'], '/s')}: {number(middle(ray['penstock_ratio']))}x"
        )
    yield Row(
        "trivial trials per second, durable store, 2 workers",
        ranged(r["penstock"]["per_s"], "/s"),
        "; ".join(beside),
        head,
        (
            (
                "trivial trials per second, durable store, 2 workers",
                f"{number(middle(r['penstock']['per_s']))}/s",
                briefly(r, earlier, {**peers, "optuna journal": "Optuna (journal file)"}, "per_s", "/s"),
            ),
        ),
    )


def asha(r: Data, head: bool) -> Iterator[Row]:
    peers = {"optuna": "Optuna", "syne tune": "Syne Tune (its whole wall time)", "ray tune": "Ray Tune"}
    beside = [f"{label} {ranged(r[name]['ratio'], 'x')}" for name, label in peers.items() if name in r]
    earlier = other("asha")
    if "ray tune" not in r and "ray tune" in earlier:
        told = [f"{peers[name]} {ranged(earlier[name]['ratio'], 'x')}" for name in ("syne tune", "ray tune")]
        beside.append(
            f"in another run, beside {ranged(earlier['penstock']['ratio'], 'x')}: {', '.join(told)}"
        )
    yield Row(
        "ASHA, 81 configurations, up to 27 epochs of 10 ms, 2 workers: makespan over the ideal",
        ranged(r["penstock"]["ratio"], "x"),
        "; ".join(beside),
        head,
        (
            (
                "ASHA of 81 configurations on 2 workers: makespan over the ideal",
                f"{number(middle(r['penstock']['ratio']))}x",
                briefly(r, earlier, {**peers, "syne tune": "Syne Tune"}, "ratio", "x"),
            ),
        ),
    )


def briefly(r: Data, earlier: Data, peers: Mapping[str, str], figure: str, unit: str) -> str:
    """The peers' medians; those of another run, which has the slow ones, are told as such."""

    def told(run: Data, names: Sequence[str]) -> str:
        return ", ".join(f"{peers[name]} {number(middle(run[name][figure]))}{unit}" for name in names)

    here = [name for name in peers if name in r]
    there = [name for name in peers if name in earlier and name not in r]
    return told(r, here) + (f"; in another run {told(earlier, there)}" if there else "")


def scale(r: Data) -> Iterator[Row]:
    sizes = [name for name in r if name.isdigit()]
    big = "10000" if "10000" in r else sizes[-1]
    events = ", ".join(ranged(r[size]["us_per_event"]) for size in sizes)
    yield Row(
        "Hyperband on 1,000 simulated devices, durable journal",
        f"{int(big):,} trials in {ranged(r[big]['seconds'], ' s')}, {number(middle(r[big]['peak_mb']))} MB; "
        f"{int(sizes[-1]):,} in {ranged(r[sizes[-1]]['seconds'], ' s')}",
        f"per event at {', '.join(f'{int(size):,}' for size in sizes)} trials: {events} us",
        True,
        (
            (
                f"Hyperband, {int(big):,} trials on 1,000 simulated devices, durable journal",
                f"{number(middle(r[big]['seconds']))} s, {number(middle(r[big]['peak_mb']))} MB",
                f"{int(sizes[-1]):,} trials: {number(middle(r[sizes[-1]]['seconds']))} s",
            ),
        ),
    )
    if "import_cpu_s" in r:
        yield Row("`import penstock`, CPU time", ranged(r["import_cpu_s"], " s"))


def zeus(r: Data) -> Iterator[Row]:
    v100, others = r["v100"], r.get("v100's trainings on made-up GPUs", {})
    yield Row(
        f"recurring jobs on the Zeus V100 traces, regret over {v100['of']} workloads, {r['seeds']} seeds",
        f"{number(v100['ours_vs_zeus_geometric_mean'])}x of faithful Zeus (geometric mean), "
        f"worst {number(v100['ours_vs_zeus_worst'])}x",
        f"worse than Zeus in {v100['worse_than_zeus']}, than the default in {v100['worse_than_default']} of {v100['of']}; "
        f"on {others.get('of', 0)} simulated other GPU cases worse than the default in {others.get('worse_than_default', 0)}",
        True,
        (
            (
                f"recurring jobs on Zeus's V100 traces, {v100['of']} workloads: regret",
                f"{number(v100['ours_vs_zeus_geometric_mean'])}x of Zeus's own algorithm (worst "
                f"{number(v100['ours_vs_zeus_worst'])}x)",
                f"on {others.get('of', 0)} made-up GPU cases worse than the default in {others.get('worse_than_default', 0)}",
            ),
        ),
    )
    for name in ("v100, 8 in flight", "v100's trainings on made-up GPUs", "made-up jobs"):
        if name in r:
            yield Row(
                f"the same, {name}",
                f"{number(r[name]['ours_vs_zeus_geometric_mean'])}x of faithful Zeus, worst "
                f"{number(r[name]['ours_vs_zeus_worst'])}x",
                f"worse than Zeus in {r[name]['worse_than_zeus']} of {r[name]['of']}",
            )


def zeus_saved(r: Data) -> str:
    saved = [one["policies"]["ours"]["energy_saved"] for one in r["v100"]["workloads"]]
    return f"{percent(min(saved))} to {percent(max(saved))} (Zeus itself, replayed the same way: " + (
        f"{percent(min(z := [one['policies']['zeus']['energy_saved'] for one in r['v100']['workloads']]))} to {percent(max(z))})"
    )


def energy(r: Data) -> Iterator[Row]:
    ten, own = r["overhead"]["10 epochs of 10 min"], r["overhead"]["the trace's own long epochs"]
    yield Row(
        "best power limit by Eq. 7 against brute force on the V100 trace",
        f"{r['optimum']['equal']} of {r['optimum']['of']} equal",
        f"profiling costs at most {percent(ten['time_worst'])} time and {percent(ten['energy_worst'])} energy over ten 10-minute "
        f"epochs, {percent(own['time_worst'])} and {percent(own['energy_worst'])} for one epoch of the trace's own loads of ten "
        "minutes and more",
        True,
        (
            (
                "best GPU power limit by Zeus's Eq. 7, V100 trace",
                f"{r['optimum']['equal']} of {r['optimum']['of']} as by brute force",
                f"profiling costs at most {percent(ten['energy_worst'])} energy over ten 10-minute epochs",
            ),
        ),
    )
    study = r["study"]
    yield Row(
        f"metering {study['trials']:,} trials of half a millisecond: time added",
        f"{percent(study['wall']['added'])} wall, {percent(study['CPU']['added'])} CPU (median of {study['pairs']} pairs)",
        f"quartiles of the wall time {percent(study['wall']['quartiles'][0])} to {percent(study['wall']['quartiles'][1])}",
    )


def loop(r: Data) -> Iterator[Row]:
    ratios = [f"{name} {ranged(each['ratio'], 'x')}" for name, each in r["loop"].items()]
    faster = [middle(v) for v in r["loader, times faster than DataLoader"].values()]
    yield Row(
        "training loop of a `pk.Task`, CPU time per step",
        ", ".join(ratios) + " that of a loop by hand",
        f"its loader is {min(faster):.0f}-{max(faster):.0f}x as fast as `DataLoader` (medians at {len(faster)} batch sizes)",
        True,
        (
            (
                "loop of a `pk.Task`: CPU time per step over that of a loop by hand",
                ", ".join(f"{name} {number(middle(each['ratio']))}x" for name, each in r["loop"].items()),
                f"its loader is {min(faster):.0f}-{max(faster):.0f}x as fast as `DataLoader`",
            ),
        ),
    )


def fusion(r: Data) -> Iterator[Row]:
    names = {
        "mlp16": "MLP 64-16-16-10",
        "mlp128": "MLP 64-128-128-10",
        "cnn": "CNN on 8x8 images",
        "cnn28": "CNN on 28x28",
        "resnet8-8": "ResNet-18 of width 8 on 8x8",
        "resnet8-16": "on 16x16",
        "resnet8-32": "on 32x32",
    }
    chosen, short, every = [], [], []
    for model, each in r.items():
        label, planned = names.get(model, model), str(each["planner"]["count"])
        gains = {
            count: number(gain["over_one_after_another"]) for count, gain in each.get("gain", {}).items()
        }
        every += [f"{label} {gain}x at {count}" for count, gain in gains.items()]
        told = f"{gains[planned]}x ({planned})" if planned in gains and planned != "1" else "not fused"
        chosen.append(f"{label} {told}")
        short.append(f"{label} {told.partition(' (')[0]}")
    what = "fused training, member-steps per CPU second against one by one"
    brief = "fused training: steps per CPU second over one trial after another", ", ".join(short), ""
    yield Row(f"{what} (members, as the planner chooses)", ", ".join(chosen), "", True, (brief,))
    yield Row(f"{what}, at all counts tried", "; ".join(every))
    for model, each in r.items():
        rates = each.get("member_steps_per_cpu_s", {})
        alone = [f"{name} {ranged(rate)}" for name, rate in rates.items() if " x" not in name]
        yield Row(
            f"member-steps per CPU second, {names.get(model, model)}",
            "; ".join(f"{name} {ranged(rate)}" for name, rate in rates.items() if " x" in name),
            "; ".join(alone),
        )


def lanes(r: Data) -> Iterator[Row]:
    told = [f"{model} {ranged(each['ratio'], 'x')}" for model, each in r.items() if "ratio" in each]
    yield Row("plain PyTorch functions in lanes of one process, steps against one by one", "; ".join(told))


FLUID_KINDS = {
    "rungs in step (Halving, SyncBOHB, Hyperband's brackets in turn)": (
        "Halving",
        "Halving of 27",
        "SyncBOHB",
        "Hyperband in turn",
    ),
    "overlapping brackets (Hyperband, BOHB)": ("Hyperband", "BOHB"),
    "ASHA": ("ASHA", "ASHA with TPE"),
}
"""How the README's table sums Fluid's studies up."""


def fluid(r: Data) -> Iterator[Row]:
    devices = r["arguments"]["devices"]
    plain = [row for row in r["rows"] if row.get("condition", "as measured") == "as measured"]

    def told(figure: str) -> str:
        found = []
        for algorithm in dict.fromkeys(row["algorithm"] for row in plain):
            parts = []
            for count in devices:
                gains = [
                    middle(x[figure]) for x in plain if x["algorithm"] == algorithm and x["devices"] == count
                ]
                parts.append(times(gains) if gains else "not run")
            found.append(f"{algorithm} {' and '.join(parts)}")
        return ", ".join(found)

    def kind(label: str, wanted: Sequence[str]) -> tuple[str, str, str]:
        parts = []
        for count in devices:
            gains = [
                middle(x["makespan"]) for x in plain if x["algorithm"] in wanted and x["devices"] == count
            ]
            parts.append(f"{times(gains)} on {count}" if gains else f"not run on {count}")
        return (
            f"Fluid's planner, simulated devices, {label}: makespan of one trial per device over its own",
            ", ".join(parts),
            "",
        )

    where = " and ".join(map(str, devices))
    yield Row(
        f"Fluid's planner against one trial per device, simulated, {where} devices: makespan",
        told("makespan"),
        f"{r['arguments']['seeds']} seeds; range over families of networks; sharing overheads from Gavel's measurements",
        True,
        tuple(kind(label, wanted) for label, wanted in FLUID_KINDS.items()),
    )
    yield Row(
        "the same studies: time to the best loss that both reach",
        told("to_equal_quality"),
        "what the paper calls makespan is the time to a target, of one of its choice; this is the hardest one",
    )


def fluid_groups(r: Data) -> Iterator[Row]:
    gains = [middle(one["against_fifo"]) for one in r["sizes"]]
    paper = [middle(one["against_paper"]) for one in r["sizes"] if "against_paper" in one]
    yield Row(
        f"one group of trials, {len(gains)} sizes, simulated: makespan against first come first served",
        f"{number(geometric(gains))}x (geometric mean; {number(min(gains))}..{number(max(gains))})",
        f"against the paper's own assignment {number(geometric(paper))}x" if paper else "",
    )
    large = [one for one in r["sizes"] if one["trials"] >= 50 and "over_least_possible" in one]
    if large:
        simple = [middle(one["over_bound"]) for one in large]
        tight = [middle(one["over_least_possible"]) for one in large]
        missed = [one for one in large if middle(one["over_bound"]) > 1.1]
        never = sum(middle(one["least_possible_over_bound"]) > 1.1 for one in missed)
        yield Row(
            "groups of 50 trials and more, makespan within 1.10x of max(work / devices, the longest trial at width d)",
            f"{len(large) - len(missed)} of {len(large)} settings (at most {number(max(simple))}x); "
            f"{never} of the other {len(missed)} proven impossible",
            f"of a lower bound that counts what packing saves and scaling costs: {sum(x <= 1.1 for x in tight)} "
            f"(at most {number(max(tight))}x)",
        )
    for name, each in r["planning_time"].items():
        yield Row(
            f"planning, {name}",
            ranged(each["plan_ms"], " ms"),
            f"again after an event {ranged(each['replan_ms'], ' ms')}",
        )


def predictors(r: Data) -> Iterator[Row]:
    def best(space: str, quantity: str) -> str:
        return number(100 * mean(r["cnn"][f"{space}, Simulated GTX 1070, {quantity}"]["chosen"]))

    measured = min(mean(v) for k, v in r["ecnas"].items() if k.startswith("chosen")) if "ecnas" in r else None
    beside = [] if measured is None else [f"{percent(measured)} on measured GPU power of small networks"]
    share = other("hyperpower_suggest").get("share_of_botorch")
    if share is not None:
        beside.append(f"a suggestion takes {number(share)} of BoTorch's CPU time at 100 trials")
    yield Row(
        "HyperPower's predictors, error (RMSPE), 10-fold",
        f"power {best('mnist', 'power_w')} and {best('cifar', 'power_w')}%, memory {best('mnist', 'memory_bytes')} and "
        f"{best('cifar', 'memory_bytes')}% on the paper's two spaces (simulated device)",
        "; ".join(beside),
        True,
    )


def suggest(r: Data) -> Iterator[Row]:
    yield Row(
        "CPU time of one suggestion at 100 trials",
        ranged(r["penstock"]["cpu_s"], " s"),
        f"BoTorch {ranged(r['botorch']['cpu_s'], ' s')}: ours is {number(r['share_of_botorch'])} of it",
    )


def within(each: Data) -> str:
    """The least and the greatest error of searches that kept the limits."""
    found = [e for e in each["best_error"] if e is not None and math.isfinite(e)]
    return f"; {number(min(found))}..{number(max(found))}" if len(found) > 1 else ""


def search(r: Data) -> Iterator[Row]:
    for problem in ("mnist", "cifar"):
        for method, each in r.get(problem, {}).items():
            error = each.get("mean")
            told = f"{number(statistics.fmean(each['violations']))} violating trainings per search"
            if "measuring_share_of_time" in each:
                told += f"; measuring before training takes {percent(each['measuring_share_of_time'])} of the time"
            yield Row(
                f"{problem} under limits (simulated), {method}, {each['seeds']} seeds",
                "none within the limits" if error is None else f"error {number(error)}% (mean{within(each)})",
                told,
            )


def divergence(r: Data) -> Iterator[Row]:
    wrong, right = (
        sum(each[name] for each in r.values()) for name in ("learning_stopped", "not_learning_stopped")
    )
    rest, learning = (sum(each[name] for each in r.values()) for name in ("not_learning", "learning"))
    yield Row(
        "early stop of diverging trials on TaskSet's curves",
        f"{wrong} of {learning} learning curves stopped, {right} of {rest} others",
        f"epochs saved {', '.join(percent(each['epochs_saved']) for each in r.values())}",
    )


def fixed_time(r: Data) -> Iterator[Row]:
    for name, each in r.items():
        for table in each["tables"]:
            gains = {
                what: table[what]["gain"]
                for what in ("samples", "time_to_samples", "time_to_error")
                if what in table
            }
            told = ", ".join(
                f"{what.replace('_', ' ')} {number(gain)}x" for what, gain in gains.items() if gain
            )
            yield Row(
                f"{name}, limits that {percent(each['feasible'])} of configurations keep: {table['method']} with them against "
                "without",
                told,
            )


def walked(r: Data) -> str:
    """The paper's own case: random walk on MNIST, once for each tightness of the limits."""
    found = [
        (each["feasible"], table["time_to_samples"]["gain"])
        for name, each in r.items()
        if name.startswith("mnist, Simulated GTX 1070")
        for table in each["tables"]
        if table["method"] == "Rand-Walk"
    ]
    return "; ".join(
        f"{'no figure' if gain is None else f'{number(gain)}x'} with limits that {percent(share)} of configurations keep"
        for share, gain in found
    )


def mixed(r: Data) -> Iterator[Row]:
    for name, each in r.items():
        if "mean_jct" in each:
            yield Row(
                f"mixed cluster, {name}: against an agnostic planner",
                f"mean job completion {ranged(each['mean_jct'], 'x')}",
                f"makespan {ranged(each['makespan'], 'x')}, energy {ranged(each['energy'], 'x')}",
            )


def cluster(r: Data) -> Iterator[Row]:
    aware, agnostic = r["aware"], r["agnostic"]
    yield Row(
        f"{r['jobs']:,} jobs of {r['trials']:,} trials on {r['gpus']:,} simulated GPUs of three kinds: mean job completion",
        f"{number(aware['mean_jct_s'] / 3600)} h, planned in {number(aware['cpu_s'])} s of CPU",
        f"an agnostic planner {number(agnostic['mean_jct_s'] / 3600)} h "
        f"({number(agnostic['mean_jct_s'] / aware['mean_jct_s'])}x), makespan "
        f"{number(agnostic['makespan_s'] / aware['makespan_s'])}x, energy {number(agnostic['energy_j'] / aware['energy_j'])}x",
    )


def lr_cases(label: str) -> Callable[[Data], Iterator[Row]]:
    def read(r: Data) -> Iterator[Row]:
        def of(rule: str) -> str:
            each = r[rule]
            return f"{each['failing']} failing, median excess {percent(each['median_excess'])}"

        yield Row(
            f"a learning rate for {r['cases']} trainings ({label}): loss above the best of a grid",
            of("Penstock"),
            f"Lightning's rule {of('Lightning')}; fastai's valley {of('fastai valley')}",
        )

    return read


def sm2(r: Data) -> Iterator[Row]:
    yield Row(
        f"SM2, {r['scenario']}: energy saved by alpha = 0.75 against alpha = 1 ({r['energy']})",
        percent(r["saving"]),
        f"parity with one plain training {number(r['parity'])}",
    )
    for name, less in r.get("alpha_0.75_minus_exhaustive", {}).items():
        if name in ("test_accuracy", "test_r2"):
            yield Row(
                f"SM2, {r['scenario']}: {name.removeprefix('test_')} on a test set, minus that of the best of "
                f"{r['exhaustive']['trainings']} single trainings",
                f"{100 * less:+.2f} points",
            )


def decide(r: Data) -> Iterator[Row]:
    told = [
        f"{name.partition(',')[0]} {ranged(each['decide'])}"
        for name, each in r.items()
        if name.endswith(", ours")
    ]
    yield Row(f"one decision of a recurring job after {r['observations']:,} runs, ms", ", ".join(told))


def dashboard(r: Data) -> Iterator[Row]:
    worst = max(each["max_ms"] for each in r["growing"].values())
    yield Row(
        f"dashboard of {r['trials']:,} trials with {r['reports']:,} reports",
        f"first figure after {number(r['first_figure_s'])} s, all read after {number(r['all_read_s'])} s, "
        f"{number(r['memory_mb'])} MB",
        f"longest frame while it grows {number(worst)} ms",
    )


def kills(r: Data) -> Iterator[Row]:
    def of(*names: str) -> int:
        return sum(int(r[kind][name]) for kind in ("cpu", "gpu") for name in names)

    wrong = of("lost", "doubled", "different", "orphans", "limits", "errors")
    yield Row(
        f"{of('driver_kills', 'worker_kills'):,} kill -9 ({of('driver_kills'):,} of drivers, {of('worker_kills'):,} of workers) over "
        f"{of('studies'):,} studies",
        f"{of('lost')} trials lost, {of('doubled')} doubled, {of('different')} other results, {of('orphans')} workers left",
        f"{of('trials'):,} trials, {of('epochs'):,} epochs; power limits changed at {of('limited'):,} kills, not restored "
        f"{of('limits')} times" + ("" if not wrong else f"; {wrong} findings"),
        True,
    )


def soak(r: Data) -> Iterator[Row]:
    names = {"long": "one study", "many": "studies one after another", "simulated": "simulated studies"}
    for kind, each in r.items():
        memory, handles = each["figures"]["driver_mb"], each["figures"]["driver_handles"]
        kept = each.get("driver_kb_per_trial")  # of the one study, whose records are kept
        flat = all(
            kept < KB_PER_TRIAL if name == "driver_mb" and kept is not None else figure["flat"]
            for name, figure in each["figures"].items()
        )
        did = f"{each['events']:,} events" if kind == "simulated" else f"{each['trials']:,} trials"
        more = "" if kept is None else f"; {number(kept)} kB for each trial, whose record is kept"
        rule = "" if kept is None else f" (below {KB_PER_TRIAL:g} kB of driver memory per trial)"
        yield Row(
            f"soak, {names[kind]}, {number(each['seconds'] / 60)} min, {did}",
            f"flat{rule}" if flat else "grows",
            f"driver {number(memory['start'])} MB {memory['gain']:+.1f}, handles {handles['start']:.0f} {handles['gain']:+.1f}{more}",
        )


def fuzzed(r: Data) -> Iterator[Row]:
    told = [f"{name} {each['runs']:,}" for name, each in r.items()]
    yield Row(
        "coverage-guided fuzzing (atheris), inputs tried",
        ", ".join(told),
        f"{sum(e['findings'] for e in r.values())} findings",
    )


def split(r: Data) -> Iterator[Row]:
    for name, each in r.items():
        if isinstance(each, Mapping) and "share" in each:
            yield Row(
                f"splitting a fused training of {name} in mid-epoch: share of the epoch lost",
                ranged(each["share"]),
            )


def bubbles(r: Data) -> Iterator[Row]:
    for name, each in r.items():
        if "bubble_ratio" not in each:
            continue
        told = [
            f"{what} {ranged(one['shorter'], 'x')}"
            for what, one in each.items()
            if isinstance(one, Mapping) and "shorter" in one
        ]
        yield Row(
            f"tuning in the bubbles of a pipeline, simulated, {name}: makespan against its own devices alone",
            "; ".join(told),
            f"{percent(each['bubble_ratio'])} of the pipeline's time is bubbles; it is slowed down by {percent(each['host_slowdown'])}",
        )


def bubbles_local(r: Data) -> Iterator[Row]:
    def of(each: Data, mode: str) -> str:
        low, high = each[mode]["mean"]["interval"]
        return f"{mode} {each[mode]['mean']['ratio']:.3f} ({low:.3f}..{high:.3f})"

    for guest, each in r.items():
        if not (isinstance(each, Mapping) and "overrun_ms" in each):
            continue
        late, losses = each["overrun_ms"], each["losses"]
        others = [of(each, mode) for mode in ("alone again", "idle priority", "co-located") if mode in each]
        yield Row(
            f"a real pipeline on two cores with trials in its bubbles ({guest}; {r['how']}): its step, 1 is alone",
            of(each, "bubbles"),
            f"{'; '.join(others)}; trials worked on after a bubble's end for {number(late['p95'])} ms (95%), "
            f"{number(late['max'])} ms (most) in {late['stops']} stops; "
            f"losses {'as alone' if losses['same'] else 'NOT as alone'} ({losses['compared']} compared)",
        )


def members(r: Data) -> Iterator[Row]:
    told = [f"groups of {each['group']}: {number(each['peak_gb'])} GB" for each in r["cases"]]
    yield Row(
        f"{r['cases'][0]['members']} narrow ResNets that train at the same time in one process: peak memory",
        "; ".join(told),
        "goal: 8 GB",
    )


def transfer(r: Data) -> Iterator[Row]:
    for name, each in r["pairs"].items():
        ours, theirs = each["Penstock"], each["standard"]
        yield Row(
            f"transfer from width 1/8, {name}: rank correlation of final losses, place of the twin's best",
            f"{ours['rank_correlation']:.3f}, {ours['place_of_the_twins_best']}",
            f"standard parametrization {theirs['rank_correlation']:.3f}, {theirs['place_of_the_twins_best']}",
        )


def whole_study(label: str) -> Callable[[Data], Iterator[Row]]:
    def read(r: Data) -> Iterator[Row]:
        found = r.get("summary")
        if found is None:
            yield Row(f"whole study, {label}", "one side only, see the file")
            return

        def side(name: str) -> str:
            each = found[name]
            error = each["loss"]["standard_error"]
            give = "" if error is None else f" +- {number(error)}"
            return (
                f"{ranged(each['seconds'], ' s')}, test loss {number(each['loss']['mean'])}{give}, "
                f"accuracy {percent(each['accuracy']['mean'])}"
            )

        def quickly(name: str) -> str:
            each = found[name]
            return f"{number(middle(each['seconds']))} s, accuracy {percent(each['accuracy']['mean'])}"

        seeds = "1 seed" if found["seeds"] == 1 else f"{found['seeds']} seeds"
        yield Row(
            f"whole study, {label}: {r['trials']} configurations x {r['epochs']} epochs, the trained target included",
            side("Penstock"),
            f"Ray Tune {side('Ray Tune')}: {ranged(found['times_shorter_by_seed'], 'x')} as long, seed by seed; {seeds}",
            True,
            (
                (
                    f"whole study, {label}: {r['trials']} configurations x {r['epochs']} epochs, training of the best included",
                    quickly("Penstock"),
                    f"Ray Tune {quickly('Ray Tune')}: {ranged(found['times_shorter_by_seed'], 'x')} as long",
                ),
            ),
        )

    return read


def defaults(problem: str, file: str, shifted: bool = False) -> Callable[[Data], Iterator[Row]]:
    peers = {"optuna": "Optuna", "ray tune": "Ray Tune"}
    label = f"{problem}, learning rates 10 times as high" if shifted else problem

    def read(r: Data) -> Iterator[Row]:
        ours = " and ".join(ranged(r["faster"][name], "x") for name in peers)
        high = other(f"{file}_shifted")
        beside = ""
        if high:
            told = [f"{number(middle(high['faster'][name]))}x" for name in peers]
            beside = f"with learning rates 10 times as high {' and '.join(told)}"
        brief = f"defaults on {problem}: time of {' and '.join(peers.values())} to the same quality over ours"
        yield Row(
            f"defaults on {label}: time to the quality that both reach, against {' and '.join(peers.values())}",
            f"{ours} as fast, seed by seed",
            "; ".join(
                f"{number(middle(r[name]['penstock_seconds']))} s beside {each}'s {number(middle(r[name]['seconds']))} s"
                for name, each in peers.items()
            ),
            not shifted,
            ((brief, ours, beside),),
        )
        for name, each in peers.items():
            yield Row(
                f"defaults on {label}: seconds to the quality that {each} reaches too",
                ranged(r[name]["penstock_seconds"], " s"),
                f"{each} {ranged(r[name]['seconds'], ' s')}",
            )

    return read


def ablation(r: Data) -> Iterator[Row]:
    for name, each in r.items():
        yield Row(
            f"the flagship study, {'all capabilities' if name == 'all' else name}, simulated GPUs",
            f"makespan {ranged(each['makespan_h'], ' h')}, {ranged(each['energy_wh'], ' Wh')}, accuracy {ranged(each['accuracy'])}",
            f"violations {ranged(each['violations'])}",
        )


def fluid_local(r: Data) -> Iterator[Row]:
    wait_s = r["arguments"].get("wait", 0.0)
    yield Row(
        f"Halving of small CNNs on {r['arguments']['slots']} real cores"
        + (f", storage that takes {number(wait_s)} s for a batch" if wait_s else "")
        + ": makespan of one trial per core over Fluid's",
        ranged(r["gain"], "x"),
    )


def ray_local(r: Data) -> Iterator[Row]:
    for each in r.values():
        if isinstance(each, Mapping) and "ratio" in each:
            yield Row(
                f"{each['trials']} trials of {number(each['trial_s'])} s on Ray: time over that on local workers",
                ranged(each["ratio"], "x"),
            )


EXTRACT: dict[str, Callable[[Data], Iterator[Row]]] = {
    "throughput_no_ray": lambda r: throughput(r, True),
    "throughput": lambda r: throughput(r, False),
    "asha_optuna": lambda r: asha(r, True),
    "asha": lambda r: asha(r, False),
    "scale": scale,
    "zeus": zeus,
    "energy": energy,
    "decide": decide,
    "loop": loop,
    "hydro_fusion": fusion,
    "hydro_lanes": lanes,
    "hydro_members": members,
    "hydro_transfer": transfer,
    "hydro_study_cnn": whole_study("CNN of width 256"),
    "hydro_study_cnn_asha": whole_study("CNN of width 256, ASHA on both sides"),
    "hydro_study_transformer": whole_study("transformer of width 512"),
    "hydro_study_transformer_asha": whole_study("transformer of width 512, ASHA on both sides"),
    "hydro_split": split,
    "hydro_mixed": mixed,
    "hydro_cluster": cluster,
    "hydro_bubbles": bubbles,
    "hydro_bubbles_local": bubbles_local,
    "fluid_studies": fluid,
    "fluid_groups": fluid_groups,
    "fluid_local": fluid_local,
    "fluid_local_storage": fluid_local,
    "ray_local": ray_local,
    "hyperpower_predictors": predictors,
    "hyperpower_suggest": suggest,
    "hyperpower_search": search,
    "hyperpower_fixed_time": fixed_time,
    "hyperpower_divergence": divergence,
    "sm2_lstm": sm2,
    "sm2_transformer": sm2,
    "sm2_resnet": sm2,
    "sm2_lr_standard": lr_cases("its constants were chosen on these"),
    "sm2_lr_fresh": lr_cases("networks that no constant was chosen on"),
    "defaults_digits": defaults("digits", "defaults_digits"),
    "defaults_fashion": defaults("Fashion-MNIST", "defaults_fashion"),
    "defaults_characters": defaults("characters", "defaults_characters"),
    "defaults_digits_shifted": defaults("digits", "defaults_digits", shifted=True),
    "defaults_fashion_shifted": defaults("Fashion-MNIST", "defaults_fashion", shifted=True),
    "defaults_characters_shifted": defaults("characters", "defaults_characters", shifted=True),
    "flagship_ablation": ablation,
    "dashboard": dashboard,
    "kills": kills,
    "soak": soak,
    "fuzz": fuzzed,
}
"""In the order of the README's table and of the page."""


def plain(r: Any, name: str = "", depth: int = 3) -> Iterator[Row]:
    """The medians of a file that no extractor knows."""
    if isinstance(r, Mapping) and {"median", "min", "max"} <= r.keys():
        yield Row(name, ranged(r))
    elif isinstance(r, Mapping) and depth:
        for key, each in r.items():
            yield from plain(each, f"{name}, {key}".lstrip(", "), depth - 1)
    elif isinstance(r, int | float) and not isinstance(r, bool):
        yield Row(name, number(r))


# --- the papers' own figures ------------------------------------------------------------------------------------------


def headline(name: str, read: Callable[[Data], str], results: Mapping[str, Data]) -> str:
    if name not in results:
        return "not measured yet"
    return read(results[name]["results"])


def sm2_saving(r: Data) -> str:
    return f"{percent(r['saving'])}, parity {number(r['parity'])}"


Paper = tuple[str, str, str, Callable[[Data], str], str]

PAPERS: list[Paper] = [
    (
        "Zeus (NSDI'23)",
        "15.3% to 75.8% less energy than the default batch size and power limit, over six workloads on a V100",
        "zeus",
        zeus_saved,
        "replayed from the paper's published V100 traces, not run on a GPU; eta = 0.5; the mean over all recurrences, exploration "
        "included",
    ),
    (
        "SM2 (2024), ResNet",
        "8% less energy by alpha = 0.75 than by alpha = 1 (49.7 to 45.8 Wh), parity 1.76",
        "sm2_resnet",
        sm2_saving,
        "a small ResNet on a part of Fashion-MNIST on a CPU; energy simulated from a V100 trace instead of measured",
    ),
    (
        "SM2 (2024), LSTM",
        "47% less energy by alpha = 0.75 than by alpha = 1 (28.0 to 14.8 Wh), parity 1.11",
        "sm2_lstm",
        sm2_saving,
        "our own series and network on a CPU; energy simulated from a V100 trace instead of measured",
    ),
    (
        "SM2 (2024), Transformer",
        "16% less energy (48.5 to 40.7 Wh), parity 1.70",
        "sm2_transformer",
        sm2_saving,
        "a small language model of Python's reference on a CPU; energy simulated from a V100 trace instead of measured",
    ),
    (
        "HyperPower (DATE'18), predictors",
        "power error 5.70% (MNIST) and 5.98% (CIFAR-10), memory 4.43% and 4.67% on a GTX 1070",
        "hyperpower_predictors",
        lambda r: next(predictors(r)).ours,
        "the device is simulated, so its noise is ours; on measured power of other GPUs and networks the error is in the table below",
    ),
    (
        "HyperPower (DATE'18), search",
        "up to 112.99x faster to as many samples as without the models (random walk, MNIST)",
        "hyperpower_fixed_time",
        walked,
        "the same method and data, on a simulated device with simulated training times, the mean over seeds; the share of "
        "configurations that keep the limits decides the factor, and was about 3% in the paper, by its Table 2",
    ),
    (
        "Fluid (MLSys'21)",
        "100% faster synchronous BOHB, 30% faster BOHB and ASHA; 30% to 100% in synchronous stages, 10% to 70% over all, on real GPUs",
        "fluid_studies",
        lambda r: next(fluid(r)).ours,
        "simulated devices with Gavel's measured sharing overheads and recorded loss curves",
    ),
]  # fmt: skip
"""Who, the paper's figure, the file of ours, how to read it, and what differs; Hydro's is chosen by ``papers``."""

HYDRO = (
    "Hydro (OSDI'23)",
    "8.7x to 78.5x shorter makespan than Ray by narrow models, fusion and transfer together, on A100s",
)


def papers(results: Mapping[str, Data]) -> list[Paper]:
    """All of them: Hydro's whole study where it was measured, else what fusion alone brings."""
    if "summary" in results.get("hydro_study_cnn", {"results": {}})["results"]:
        return [*PAPERS, (
            *HYDRO,
            "hydro_study_cnn",
            lambda r: ranged(r["summary"].get("times_shorter_by_seed", r["summary"]["times_shorter"]), "x"),
            "a CNN of width 256 on 8 x 8 images and two CPU cores, where fusion saves calls and no idle units of a GPU",
        )]  # fmt: skip
    return [*PAPERS, (
        *HYDRO,
        "hydro_fusion",
        lambda r: next(fusion(r)).ours,
        "fusion alone, on two CPU cores, where the gain is in calls saved and not in idle units of a GPU; no makespan of all three "
        "together was measured",
    )]  # fmt: skip


# --- the pages --------------------------------------------------------------------------------------------------------


def load() -> dict[str, Data]:
    """All files of results by name, those with an extractor first."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    order = [name for name in EXTRACT if name in found]
    return {name: found[name] for name in (*order, *(name for name in found if name not in EXTRACT))}


def rows_of(name: str, document: Data) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: Its extractor does not fit its shape.
    """
    extract = EXTRACT.get(name)
    if extract is None:
        return list(plain(document["results"]))[:12]
    try:
        return list(extract(document["results"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"benchmarks/results/{name}.json is not as its extractor in benchmarks/report.py expects: {error!r}"
        ) from error


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in ([*head], ["---"] * len(head), *cells))
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
        .replace("|---| ---", "|---|---")
    )


# --- what made them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A state of src/penstock: git's hash of it, short, and when it was committed."""

    tree: str
    committed: str

    def __str__(self) -> str:
        return f"`{self.tree}` (committed {self.committed})"


STATED = re.compile(r"`src/penstock` was `([0-9a-f]{10})` \(committed (\S+)\)")


def present() -> Source | None:
    """The source that git knows."""
    found = _bench.penstock()
    return None if found["penstock"] == "unknown" else Source(found["penstock"][:10], found["committed"])


def stated() -> Source | None:
    """The one that docs/results.md says it was made at."""
    found = STATED.search(PAGE.read_text()) if PAGE.exists() else None
    return found and Source(found[1], found[2])


def age(source: Source, now: Source) -> str:
    hours = (
        datetime.fromisoformat(now.committed) - datetime.fromisoformat(source.committed)
    ).total_seconds() / 3600
    count, unit = (abs(hours) / 24, "day") if abs(hours) >= 24 else (abs(hours), "hour")
    return f"{count:.0f} {unit}{'' if round(count) == 1 else 's'} {'before' if hours >= 0 else 'after'} it"


def source_of(document: Data, now: Source | None) -> tuple[str, str]:
    """What made a result, and how old that is: ``of it`` if it is the source of now, as committed."""
    names, ages = [], []
    for each in document.get("sources", [NOT_RECORDED]):
        if each["dirty"] not in (True, False):
            return each["penstock"], ""
        source = Source(each["penstock"][:10], each["committed"])
        same = now is not None and source.tree == now.tree
        names.append(f"`{source.tree}`{' with uncommitted changes' if each['dirty'] else ''}")
        ages.append("it" if same and not each["dirty"] else age(source, now) if now and not same else "")
    return " and ".join(dict.fromkeys(names)), ", ".join(dict.fromkeys(filter(None, ages)))


def made_by(results: Mapping[str, Data], now: Source | None) -> list[str]:
    """How many results are of the source of now, which are of others, and which do not tell."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, document in results.items():
        groups.setdefault(source_of(document, now), []).append(name)
    of_it = sum(len(names) for (_, old), names in groups.items() if old == "it")
    changed = sum(len(names) for (tree, _), names in groups.items() if "uncommitted" in tree)
    untold = [name for (tree, _), names in groups.items() if "`" not in tree for name in names]
    told = (
        f"Of {len(results)} results {of_it} {'was' if of_it == 1 else 'were'} made by it as it is committed, "
        f"{len(results) - of_it - changed - len(untold)} by earlier sources or several, {changed} with uncommitted changes, and "
        f"{len(untold)} do not record what made them."
    )
    if now is None:
        return ["Which source of Penstock this page was made at is not known. " + told]
    sure = sum(results[name]["date"] < now.committed[:10] for name in untold)
    if sure:
        told += f" {sure} of these have dates before that commit: an earlier source made them."
    lines = []
    for (tree, old), names in groups.items():
        dates = sorted({results[name]["date"] for name in names})
        since = {"it": "the above", "": f"results of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"}
        lines.append([tree, since.get(old, old), ", ".join(names)])
    return [
        f"`src/penstock` was {now} when this page was made. {told} "
        "`git rev-parse --short=10 HEAD:src/penstock` tells what it is now: if that is another, all of this is of earlier sources.",
        table(
            ["source", "age", "results"],
            sorted(lines, key=lambda line: (line[1] != "the above", "`" not in line[0])),
        ),
    ]


def took(seconds: float | None) -> str:
    if seconds is None:
        return "duration not recorded"
    return f"took {number(seconds)} s" if seconds < 120 else f"took {number(seconds / 60)} min"


def page(results: Mapping[str, Data], now: Source | None) -> str:
    """docs/results.md."""
    entries = {name: each.name for each in BENCHMARKS for name in each.writes}
    parts = [
        "# Results",
        "Made from `benchmarks/results/*.json` by `python -m benchmarks.report`; a test fails if it is not. A figure with "
        "brackets is a median, with the least and the greatest of its repeats; one without is of one run, a count, or what its row says. `make bench` runs every benchmark that the present source has not run yet, "
        "those on public data where `PENSTOCK_DATA` names its folder. CPU alone: no GPU was at hand, "
        "and what is said of GPUs is simulated or replayed from published measurements, as each row says.",
        "## What made them",
        *made_by(results, now),
        "## Beside the papers",
        table(
            ["paper", "its figure", "ours", "what differs"],
            [
                [who, theirs, headline(name, read, results), differs]
                for who, theirs, name, read, differs in papers(results)
            ],
        ),
        "## All benchmarks",
    ]
    for name, document in results.items():
        machine, versions = document["machine"], document["versions"]
        command = f"`{document['command']}`"
        if name in entries and f"bench-{entries[name]}" not in command:
            command += f" (`make bench-{entries[name]}`)"
        tree, old = source_of(document, now)
        made = f"source {tree}" + (f" ({'the above' if old == 'it' else old})" if old else "")
        parts += [
            f"### {name}",
            table(
                ["what", "measured", "beside it"],
                [[r.what, r.ours, r.beside] for r in rows_of(name, document)],
            ),
            f"{command} on {document['date']}, {made}, {took(document.get('seconds'))}, {machine['cores']} cores of {machine['processor']}, Python "
            f"{machine['python']}, {machine['system']}; {', '.join(f'{k} {v}' for k, v in versions.items())}.",
        ]
    return "\n\n".join(parts) + "\n"


def readme_table(results: Mapping[str, Data]) -> str:
    """What stands between the README's markers."""
    rows = [row for name, document in results.items() for row in rows_of(name, document) if row.head]
    lines = [line for row in rows for line in row.brief or ((row.what, row.ours, row.beside),)]
    return table(["what", "measured", "beside it"], lines)


def ablation_table(r: Data) -> str:
    """What stands between the markers of docs/flagship.md."""
    figures = {"makespan_h": ".2f", "energy_wh": ".0f", "accuracy": ".3f", "violations": ".0f"}
    names = {"all": "(all of them on)", "none of them": "all of them off"}

    def cell(each: Data, form: str) -> str:
        return f"{each['median']:{form}} ({each['min']:{form}}..{each['max']:{form}})"

    made = table(
        [
            "without",
            "makespan (h)",
            "energy of the trials (Wh)",
            "accuracy within the limits",
            "trials beyond a limit",
        ],
        [
            [
                names.get(name, name.removeprefix("no ")),
                *(cell(each[key], form) for key, form in figures.items()),
            ]
            for name, each in r.items()
        ],
    )
    return f"Medians of {r['all']['accuracy']['repeats']} seeds (least and greatest):\n\n{made}"


def filled(path: Path, made: str) -> str:
    """A page with what stands between its markers replaced.

    Raises:
        ValueError: It has no markers.
    """
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path.name} has no lines {BEGIN!r} and {END!r} to put the table between.")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(argv)
    results = load()
    now = stated() if given.check else present() or stated()
    wanted = {PAGE: page(results, now), README: filled(README, readme_table(results))}
    if "flagship_ablation" in results:
        wanted[FLAGSHIP] = filled(FLAGSHIP, ablation_table(results["flagship_ablation"]["results"]))
    if os.environ.get("PENSTOCK_RESULTS"):
        print(f"pages can be made of the {len(results)} files of {RESULTS}; none is written")
        return 0
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} {'is not what the results say: run python -m benchmarks.report' if given.check else 'written'}"
        )
        if not given.check:
            path.write_text(wanted[path])
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
