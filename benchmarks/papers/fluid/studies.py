# PYTHONPATH=benchmarks python benchmarks/papers/fluid/studies.py --data FOLDER
"""Whole studies with and without Fluid on simulated devices (Fluid, section 6.2, Figure 7).

``pk.Study`` throughout: its loop, journal and simulated devices. Learning curves of TaskSet, co-location as Gavel
measured it on V100s, runtimes unknown to the planner at first. The default is FIFO, one trial on one device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from tuning import ALGORITHMS, run
from workloads import TASKS, Curves, data_folder, families, gavel

from _bench import save, spread
from penstock import Fluid, Overhead
from penstock.predict import fit_sharing

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
    parser.add_argument(
        "--variance", type=float, default=0.0, help="how much epochs of one trial differ (6.4.1)"
    )
    parser.add_argument("--packing", type=float, default=1.0, help="times the packing overhead (6.4.2)")
    parser.add_argument(
        "--wrong", action="store_true", help="the planner believes in Gavel's packing overhead"
    )
    parser.add_argument(
        "--ahead", type=int, default=1, help="with BOHB, trials under way per device, up to c"
    )
    parser.add_argument("--name", default="fluid_studies", help="of the file with results")
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
                    None,
                    devices=devices,
                    truth=Overhead(),
                    curves=curves,
                    sigma=arguments.sigma,
                    variance=arguments.variance,
                    seed=seed,
                )
                for seed in seeds
            }
            for family, job in jobs.items():
                c, alpha = fit_sharing({1: [1.0], 2: [job["alpha"]] * 2})
                measured = alpha
                alpha = 1 + arguments.packing * (alpha - 1)
                c = c if arguments.packing == 1 else 2
                truth = Overhead(alpha, arguments.beta, c, arguments.d, 3.0)
                concurrency = None if algorithm != "BOHB" else min(arguments.ahead, c) * devices
                planner = Fluid(
                    replace(truth, alpha=measured) if arguments.wrong else truth, concurrency=concurrency
                )
                gains, reached, worse, utilisation, most = [], [], [], [], []
                saving = min(1.0, alpha / 2) if c > 1 else 1.0  # two on a device, against one after the other
                for seed in seeds:
                    base = default[seed]
                    ours = run(
                        algorithm,
                        planner,
                        devices=devices,
                        truth=truth,
                        curves=curves,
                        sigma=arguments.sigma,
                        variance=arguments.variance,
                        seed=seed,
                    )
                    gains.append(base.makespan_s / ours.makespan_s)
                    # No device is ever idle and everything is packed: no planner could gain more on the same trials.
                    most.append(base.makespan_s * devices / (base.busy_s * saving))
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
                    "at_most": spread(most),
                    "to_equal_quality": spread(reached),
                    "loss_difference": spread(worse),
                    "utilisation": statistics.mean(utilisation),
                }
                rows.append(row)
                gain, bound = statistics.geometric_mean(gains), statistics.geometric_mean(most)
                print(
                    f"{devices:4d} {algorithm:18s} {family:15s} alpha {alpha:.2f} c {c}: makespan x{gain:.2f} "
                    f"({min(gains):.2f}..{max(gains):.2f}) of at most x{bound:.2f}, to equal quality "
                    f"x{statistics.geometric_mean(reached):.2f}, loss {statistics.mean(worse):+.4f}, busy "
                    f"{row['utilisation']:.2f} (goal {GOALS[algorithm]})",
                    flush=True,
                )
    facts = {key: value for key, value in vars(arguments).items() if key != "data"}
    command = f"python {sys.argv[0]} --data FOLDER"
    save(arguments.name, command, {"arguments": facts, "rows": rows}, ["optuna"])


if __name__ == "__main__":
    main()
