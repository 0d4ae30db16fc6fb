# PYTHONPATH=benchmarks python benchmarks/papers/fluid/studies.py --data FOLDER
"""Whole studies with and without Fluid on simulated devices (Fluid, section 6.2, Figure 7).

Learning curves of TaskSet, co-location as Gavel measured it on V100s, runtimes unknown to the planner at first. The
default is FIFO, one trial on one device.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from tuning import ALGORITHMS, run
from workloads import TASKS, Curves, data_folder, families, gavel

from _bench import save, spread
from penstock.plan import fifo, fluid
from penstock.predict import Overhead, fit_sharing

GOALS = {
    "SyncBOHB": 2.0,
    "Halving": 2.0,
    "Halving of 81": 2.0,
    "Hyperband in turn": 1.5,
    "Hyperband": 1.5,
    "ASHA": 1.3,
    "BOHB": 1.3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with gavel/ and taskset/; else the variable PENSTOCK_DATA")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--task", default=TASKS[0], choices=TASKS, help="whose learning curves")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--beta", type=float, default=1.05)
    parser.add_argument("--d", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=0.3, help="how much epochs of different trials differ")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    arguments = parser.parse_args()
    curves = Curves(data_folder(arguments.data, "taskset"), arguments.task)
    jobs = families(gavel(data_folder(arguments.data, "gavel")))
    rows = []
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for devices in arguments.devices:
        for algorithm in arguments.algorithms:
            default = {
                seed: run(
                    algorithm,
                    (fifo(),),
                    devices=devices,
                    truth=Overhead(),
                    curves=curves,
                    sigma=arguments.sigma,
                    seed=seed,
                )
                for seed in seeds
            }
            for family, job in jobs.items():
                c, alpha = fit_sharing({1: [1.0], 2: [job["alpha"]] * 2})
                truth = Overhead(alpha, arguments.beta, c, arguments.d, 3.0)
                planner = fluid(c=c, d=arguments.d, alpha=alpha, beta=arguments.beta, epsilon_s=3.0)
                gains, reached, worse, utilisation = [], [], [], []
                for seed in seeds:
                    base = default[seed]
                    ours = run(
                        algorithm,
                        planner,
                        devices=devices,
                        truth=truth,
                        curves=curves,
                        sigma=arguments.sigma,
                        seed=seed,
                    )
                    gains.append(base.makespan_s / ours.makespan_s)
                    target = max(base.best, ours.best)
                    reached.append(base.reached_s(target) / ours.reached_s(target))  # type: ignore[operator]
                    worse.append(ours.best - base.best)
                    utilisation.append(ours.busy_s / devices / ours.makespan_s)
                row = {
                    "algorithm": algorithm,
                    "devices": devices,
                    "family": family,
                    "alpha": alpha,
                    "c": c,
                    "makespan": spread(gains),
                    "to_equal_quality": spread(reached),
                    "loss_difference": spread(worse),
                    "utilisation": statistics.mean(utilisation),
                }
                rows.append(row)
                print(
                    f"{devices:4d} {algorithm:18s} {family:15s} alpha {alpha:.2f} c {c}: makespan "
                    f"x{statistics.geometric_mean(gains):.2f} ({min(gains):.2f}..{max(gains):.2f}), to equal quality "
                    f"x{statistics.geometric_mean(reached):.2f}, loss {statistics.mean(worse):+.4f}, busy "
                    f"{row['utilisation']:.2f} (goal {GOALS[algorithm]})",
                    flush=True,
                )
    facts = {key: value for key, value in vars(arguments).items() if key != "data"}
    command = f"python {sys.argv[0]} --data FOLDER"
    save("fluid_studies", command, {"arguments": facts, "rows": rows}, ["optuna"])


if __name__ == "__main__":
    main()
