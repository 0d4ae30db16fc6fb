"""What each capability brings: the flagship study in simulation with one of them switched off at a time.

Run with: python benchmarks/flagship.py [--seeds 5] [--max-epochs 9] [--iterations 2] [--figure FILE.png]

Trainings are real (digits, the networks of examples/flagship.py); seconds and joules are those of simulated V100s. What
the simulation assumes is in ``executor`` below and in the example's ``load``: an epoch of the narrow twin takes half a
minute, one of the full model 4 times that; each further member of a fused group adds 0.3 of an epoch; two trials on a
device slow each other down by 1.3, a second device makes a trial 1.8 times as fast.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import flagship
import penstock as pk
from _bench import earlier, save, spread
from penstock.energy import V100
from penstock.predict import Overhead

flagship.load_digits = functools.cache(flagship.load_digits)  # every trial reads its data anew
DEVICES = 4
TWIN_S, FULL = 30.0, 4.0
OVERHEAD = Overhead(alpha=1.3, beta=1.1, max_sharing=2, max_devices=DEVICES)
POWER_W, MEMORY_BYTES = 180.0, 1e6

VARIANTS = {
    "all": None,
    "no limits": "limits",
    "no surrogate": "surrogate",
    "no fusion": "fuse",
    "no Fluid": "planner",
    "no power limits": "power_limits",
    "no Hyperband": "scheduler",
    "no energy in the goal": "goal",
    "none of them": "everything",
}


def executor(*, twin: bool) -> pk.Simulated:
    seconds = TWIN_S if twin else TWIN_S * FULL
    return pk.Simulated(
        DEVICES,
        seconds=seconds,
        fused=0.3,
        target=FULL,
        overhead=OVERHEAD,
        power=pk.SimulatedGpus(flagship.load),
    )


def study(without: str | None, known: pk.Predictors, seed: int, max_epochs: int, iterations: int) -> pk.Study:
    """The flagship study without one capability."""
    brackets = pk.Hyperband(max_epochs=max_epochs, eta=3, iterations=iterations)
    trials = iterations * sum(rungs[0][0] for rungs in brackets.table)
    options: dict[str, Any] = {
        "limits": flagship.limits,
        "predictors": known,
        "surrogate": pk.Shrink(4, second=0),
        "fuse": 4,
        "planner": pk.Fluid(overhead=OVERHEAD),
        "power_limits": pk.PowerLimits(pk.EtaCost(0.5), slice_s=1.0),
        "scheduler": brackets,
    }
    every = without == "everything"
    for name in list(options):
        if every or name == without:
            del options[name]
    if "limits" not in options:
        options.pop("predictors", None)
    if "scheduler" not in options:
        options["scheduler"] = pk.Full(trials=trials, epochs=max_epochs)
    if "fuse" not in options:
        options["fuse"] = False
    goal: dict[str, Any] = {"maximize": "accuracy"}
    if not every and without != "goal":
        goal["minimize"] = "energy_j"
    return pk.Study(
        flagship.task,
        flagship.space,
        sampler=pk.Random(),
        budget=pk.Budget(energy_wh=1e5),
        executor=executor(twin="surrogate" in options),
        store=False,
        seed=seed,
        **goal,
        **options,
    )


def memory_bytes(known: pk.Predictors, config: Any) -> float:
    predicted = known.predict("memory_bytes", config)
    return 0.0 if predicted is None else predicted.mean


def figures(found: pk.Study, known: pk.Predictors, max_epochs: int) -> dict[str, float]:
    """Makespan, energy of the trials, the best full model's accuracy within the limits, violations."""
    full = found.target_trials if found.surrogate is not None else found.trials
    trained = [t for t in full if t.status is pk.TrialStatus.COMPLETED and t.epoch >= max_epochs]

    def violates(config: Any) -> bool:
        watts = V100.power_w(flagship.load(config), V100.max_limit_w)
        return watts > POWER_W or memory_bytes(known, config) > MEMORY_BYTES

    usable = [t for t in trained if not violates(t.config)]
    makespan_s = found.state.spent_s
    return {
        "makespan_h": makespan_s / 3600,
        "energy_wh": found.energy.wh,
        "accuracy": max((t.metrics["accuracy"] for t in usable), default=0.0),
        "violations": float(sum(violates(t.config) for t in found.trials)),
        "epochs": float(found.state.epochs),
    }


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Four panels: one bar per variant, medians with least and greatest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("makespan_h", "makespan (h)"),
        ("energy_wh", "energy of the trials (Wh)"),
        ("accuracy", "accuracy of the best model within the limits"),
        ("violations", "trials beyond a limit"),
    ]
    names = list(results)[::-1]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.8), sharey=True)
    for axis, (key, label) in zip(axes, panels, strict=True):
        medians = [statistics.median(results[name][key]) for name in names]
        low = [m - min(results[name][key]) for m, name in zip(medians, names, strict=True)]
        high = [max(results[name][key]) - m for m, name in zip(medians, names, strict=True)]
        colors = ["#0b7a75" if name == "all" else "#9db4c0" for name in names]
        axis.barh(names, medians, xerr=[low, high], color=colors, ecolor="#444", capsize=2)
        axis.set_xlabel(label)
        if key == "accuracy":
            axis.set_xlim(left=min(m for m in medians if m > 0) - 0.05)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle("The flagship study with each capability switched off in turn (simulated V100s)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--max-epochs", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--add", action="store_true", help="to the seeds of an earlier run, which are in the results"
    )
    parser.add_argument("--figure", type=Path, default=None)
    options = parser.parse_args()
    known = flagship.predictors()
    results: dict[str, dict[str, list[float]]] = {}
    kept = earlier("flagship_ablation") if options.add else None
    if kept is not None:
        results = {
            name: {key: list(each["values"]) for key, each in found.items()}
            for name, found in kept["results"].items()
        }
    for name, without in VARIANTS.items():
        found = results.setdefault(name, {})
        for seed in range(options.first, options.first + options.seeds):
            done = study(without, known, seed, options.max_epochs, options.iterations).run()
            if done.state.closed is None or done.state.closed.reason == "interrupted":
                raise SystemExit("interrupted: nothing is saved")  # half a study is no result
            for key, value in figures(done, known, options.max_epochs).items():
                found.setdefault(key, []).append(value)
        line = ", ".join(f"{key} {statistics.median(values):.4g}" for key, values in found.items())
        print(f"{name:22} {line}", flush=True)
    if options.figure is not None:
        draw(results, options.figure)
    count = len(results["all"]["accuracy"])
    sizes = f"--max-epochs {options.max_epochs} --iterations {options.iterations}"
    command = f"python benchmarks/flagship.py --seeds {count} {sizes}"
    summary = {
        name: {key: {**spread(values), "values": values} for key, values in found.items()}
        for name, found in results.items()
    }
    save("flagship_ablation", command, summary, ["penstock", "torch"], kept=kept)


if __name__ == "__main__":
    main()
