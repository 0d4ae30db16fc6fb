"""Fixed wall time (section 5, Tables 2-5): each method as it is, and with limits, predictors and early termination.

    python benchmarks/papers/hyperpower/fixed_time.py [--seeds 3] [--methods Rand Rand-Walk HW-CWEI HW-IECI] [--save]

Whole studies on the simulated executor: two hours of virtual time for MNIST, five for CIFAR-10, the last trial allowed
to finish, as in the paper. A sample that is refused by the predictors has been queried, but takes no time. The default
methods neither know the limits nor stop a diverging training; what they violate is judged by the device's true values.
The power limit leaves a tenth of the configurations: in the paper, too, default Rand found little that kept it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from cnn import CHANCE_ERROR, GTX_1070, TEGRA_TX1, Problem
from methods import limits_of, profile

import _bench
import penstock as pk
from penstock.report import Search, compare_searches, comparison_text, search_of

HOURS = {"mnist": 2.0, "cifar": 5.0}
SAMPLERS = {
    "Rand": pk.Random,
    "Rand-Walk": pk.Walk,
    "Rand-Walk, sigma 0.3": lambda: pk.Walk(0.3),
    "HW-CWEI": lambda: pk.Bayes(weight="probability"),
    "HW-IECI": pk.Bayes,
}


def study(problem: Problem, limits: list[pk.Limit], method: str, seed: int, aware: bool) -> Search:
    def train(run: Any) -> None:
        curve = problem.curve(run.config, seed)
        true = {"power_w": problem.power_w(run.config), "memory_bytes": problem.memory_bytes(run.config)}
        for epoch in run.epochs(problem.epochs):
            run.report(error=curve[epoch], **true)

    more: dict[str, Any] = {}
    if aware:
        more = {
            "limits": limits,
            "predictors": profile(problem, seed=seed),
            "stop": [pk.Divergence("error", chance=CHANCE_ERROR)],
        }
    done = pk.Study(
        train,
        problem.space,
        minimize="error",
        sampler=SAMPLERS[method](),
        scheduler=pk.Full(epochs=problem.epochs),
        executor=pk.Simulated(devices=1, seconds=lambda config, _: problem.epoch_s(config)),
        budget=pk.Budget(time_s=3600 * HOURS[problem.dataset], finish=True),
        seed=seed,
        store=False,
        meter=False,
        **more,
    ).run()
    return search_of(done, limits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--problems", nargs="+", default=list(HOURS))
    parser.add_argument("--devices", nargs="+", default=["GTX"], help="GTX, Tegra")
    parser.add_argument(
        "--power", type=float, default=0.1, help="part of configurations the power limit leaves"
    )
    parser.add_argument("--memory", type=float, default=0.5, help="likewise, the memory limit (GTX only)")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name in given.devices:
        device = GTX_1070 if name == "GTX" else TEGRA_TX1
        for dataset in given.problems:
            problem = Problem(dataset, device)
            # As in the paper, where memory can't be measured on the Tegra.
            limits = limits_of(problem, given.power, given.memory if name == "GTX" else None)
            drawn = [problem.space.sample(200_000 + i) for i in range(1000)]
            kept = [c for c in drawn if all(q.holds(getattr(problem, q.name)(c)) for q in limits)]
            print(
                f"{dataset} on {device.name}: {', '.join(map(str, limits))}, {HOURS[dataset]:g} h;", end=" "
            )
            print(
                f"{len(kept) / 10:.1f}% of configurations keep them, "
                f"{sum(map(problem.diverges, drawn)) / 10:.1f}% diverge",
                flush=True,
            )
            methods = {}
            for method in given.methods:
                runs = [
                    [study(problem, limits, method, seed, aware) for seed in range(given.seeds)]
                    for aware in (False, True)
                ]
                methods[method] = (runs[0], runs[1])
            rows = compare_searches(methods)
            print(comparison_text(rows), flush=True)
            results[f"{dataset}, {device.name}"] = {
                "limits": [str(limit) for limit in limits],
                "feasible": len(kept) / len(drawn),
                "tables": [dataclasses.asdict(row) for row in rows],
            }
    for method in given.methods:
        gains = [
            row["samples"]["gain"]
            for result in results.values()
            for row in result["tables"]
            if row["method"] == method
        ]
        print(
            f"{method}: {statistics.geometric_mean(gains):.1f}x more samples queried "
            f"({', '.join(f'{gain:.1f}' for gain in gains)})"
        )
    if given.save:
        command = f"python benchmarks/papers/hyperpower/fixed_time.py --seeds {given.seeds} --save"
        _bench.save("hyperpower_fixed_time", command, results, ("numpy", "scipy"))


if __name__ == "__main__":
    main()
