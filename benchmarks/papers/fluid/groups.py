# PYTHONPATH=benchmarks python benchmarks/papers/fluid/groups.py
"""One TrialGroup on 4 to 1000 simulated devices: against FIFO, against the paper's heuristics, against a lower bound.

Fluid, sections 6.3 and 6.4: group sizes, runtime variance (6.4.1), packing overhead (6.4.2), scaling overhead (6.4.3),
and the time that planning takes. Trials save a checkpoint in every epoch, so that the planner may let them pause.
Needs no data.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from workloads import runtimes

from _bench import earlier, save, spread
from penstock.core import PlanPass
from penstock.plan import fifo, fluid, lower_bound_s
from penstock.predict import Overhead, fit_sharing
from penstock.testing.planning import SimulatedCluster, placements, run_group

KINDS = ("equal", "uniform", "lognormal", "mixed")
OVERHEADS = {
    "ResNet-18 128 on V100": Overhead(1.28, 1.05, 2, 8, 3.0),
    "LM on V100": Overhead(1.6, 1.05, 2, 8, 3.0),
    "Transformer 32 on V100": Overhead(1.17, 1.1, 2, 8, 3.0),
    "four share": Overhead(1.15, 1.05, 4, 8, 3.0),
    "packing never pays": Overhead(2.7, 1.05, 1, 8, 3.0),
    "packing never pays, scaling hardly": Overhead(2.7, 1.2, 1, 4, 3.0),
    "no scaling": Overhead(1.28, 1.0, 2, 1, 3.0),
}


def planner(overhead: Overhead, *, paper: bool = False) -> tuple[PlanPass, ...]:
    return fluid(
        c=overhead.max_sharing,
        d=overhead.max_devices,
        alpha=overhead.alpha,
        beta=overhead.beta,
        epsilon_s=overhead.epsilon_s,
        widths="waterfill" if paper else "lookahead",
        idle="waterfill" if paper else "longest",
    )


def bound_s(times: list[float], devices: int, overhead: Overhead) -> float:
    """max(total work / n, the longest trial at width d): the figure of merit.

    It counts neither what packing saves nor what scaling costs; ``lower_bound_s`` counts both.
    """
    model = overhead.within_bounds()
    return max(sum(times) / devices, model.runtime_s(max(times), min(devices, model.max_devices)))


def sizes(seeds: int, quick: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    cells = [
        (4, (3, 9, 50)),
        (8, (3, 9, 27, 50, 81, 200)),
        (32, (9, 27, 50, 81, 200)),
        (128, (27, 81, 200, 500)),
    ]
    if not quick:
        cells.append((1000, (200, 1000, 2000)))
    for name, overhead in OVERHEADS.items():
        for devices, counts in cells:
            for count in counts:
                for kind in KINDS:
                    few = 1 if kind == "equal" or devices >= 1000 else seeds
                    gains, papers, bounds, least, over_least = [], [], [], [], []
                    for seed in range(few):
                        times = runtimes(kind, count, seed)
                        default = run_group((fifo(),), times, devices=devices, truth=overhead).makespan_s
                        ours = run_group(
                            planner(overhead), times, devices=devices, truth=overhead, pausable=True
                        ).makespan_s
                        published = run_group(
                            planner(overhead, paper=True), times, devices=devices, truth=overhead
                        ).makespan_s
                        gains.append(default / ours)
                        papers.append(published / ours)
                        bounds.append(ours / bound_s(times, devices, overhead))
                        least_s = lower_bound_s(times, devices=devices, overhead=overhead)
                        least.append(least_s / bound_s(times, devices, overhead))
                        over_least.append(ours / least_s)
                    rows.append(
                        {
                            "overhead": name,
                            "devices": devices,
                            "trials": count,
                            "kind": kind,
                            "against_fifo": spread(gains),
                            "against_paper": spread(papers),
                            "over_bound": spread(bounds),
                            "least_possible_over_bound": spread(least),
                            "over_least_possible": spread(over_least),
                        }
                    )
    return rows


def show_sizes(rows: list[dict[str, object]]) -> None:
    def column(name: str, which: str, chosen: list[dict[str, object]]) -> list[float]:
        return [row[name][which] for row in chosen]  # type: ignore[index]

    print(f"{len(rows)} cells (overhead x devices x trials x kind)")
    for devices in sorted({row["devices"] for row in rows}):  # type: ignore[type-var]
        chosen = [row for row in rows if row["devices"] == devices]
        gain, paper = column("against_fifo", "median", chosen), column("against_paper", "median", chosen)
        large = [row for row in chosen if row["trials"] >= 50]  # type: ignore[operator]
        bound = column("over_bound", "median", large)
        tight = column("over_least_possible", "median", large)
        print(
            f"  {devices:5d} devices: x{statistics.geometric_mean(gain):.2f} FIFO "
            f"(least {min(column('against_fifo', 'min', chosen)):.3f}), "
            f"x{statistics.geometric_mean(paper):.3f} paper (least cell {min(paper):.3f}), "
            f"50 trials and more: median {statistics.median(bound):.3f} of the bound, most {max(bound):.3f}, "
            f"{sum(b <= 1.10 for b in bound)} of {len(bound)} within 1.10, "
            f"{sum(b > 1.10 for b in column('least_possible_over_bound', 'median', large))} nobody could; "
            f"of the tight bound: median {statistics.median(tight):.3f}, most {max(tight):.3f}, "
            f"{sum(b <= 1.10 for b in tight)} within 1.10"
        )
    large = [row for row in rows if row["trials"] >= 50]  # type: ignore[operator]
    far = [row for row in large if row["over_bound"]["median"] > 1.10]  # type: ignore[index]
    open_ = [row for row in far if row["least_possible_over_bound"]["median"] <= 1.10]  # type: ignore[index]
    print(
        f"  50 trials and more: {len(large) - len(far)} of {len(large)} within 1.10 of the bound, "
        f"{len(far) - len(open_)} proven impossible, {len(open_)} neither:"
    )
    for row in sorted(open_, key=lambda row: -row["over_bound"]["median"]):  # type: ignore[index]
        print("    open:", row["overhead"], row["devices"], row["trials"], row["kind"], row["over_bound"])


def variance(seeds: int) -> list[dict[str, object]]:
    """6.4.1: nine configurations on eight devices, of more and more different length, known only roughly."""
    rows: list[dict[str, object]] = []
    overhead = OVERHEADS["ResNet-18 128 on V100"]
    for count in (8, 9, 27):
        for sigma in (0.0, 0.1, 0.3, 0.6, 1.0):
            for wrong in (0.0, 0.2, 0.5):
                gains = []
                for seed in range(seeds):
                    rng = random.Random(f"{count} {sigma} {wrong} {seed}")
                    times = [100 * rng.lognormvariate(0, sigma) for _ in range(count)]
                    guesses = [t * rng.lognormvariate(0, wrong) for t in times]
                    ours = run_group(
                        planner(overhead),
                        times,
                        devices=8,
                        truth=overhead,
                        expected_s=guesses,
                        error=wrong,
                        pausable=True,
                    )
                    default = run_group((fifo(),), times, devices=8, truth=overhead)
                    gains.append(default.makespan_s / ours.makespan_s)
                rows.append(
                    {"trials": count, "sigma": sigma, "guesses_off": wrong, "against_fifo": spread(gains)}
                )
    return rows


def packing(seeds: int) -> list[dict[str, object]]:
    """6.4.2: 27 trials on 8 devices; packing costs 1x, 1.5x, 2x, 10x of what it did, and is measured first."""
    rows: list[dict[str, object]] = []
    for factor in (1.0, 1.5, 2.0, 10.0):
        for kind in KINDS:
            gains = []
            for seed in range(seeds):
                slowdown = 1 + 0.28 * factor
                c, alpha = fit_sharing({1: [1.0], 2: [slowdown] * 2})
                truth = Overhead(alpha, 1.05, c, 1, 3.0)
                times = runtimes(kind, 27, seed)
                ours = run_group(planner(truth), times, devices=8, truth=truth, pausable=True).makespan_s
                gains.append(run_group((fifo(),), times, devices=8, truth=truth).makespan_s / ours)
            rows.append({"packing_overhead": factor, "kind": kind, "against_fifo": spread(gains)})
    return rows


def scaling() -> list[dict[str, object]]:
    """6.4.3: three trials on 4, 8 and 16 devices, packing off, for models that scale well and badly."""
    rows: list[dict[str, object]] = []
    for beta in (1.0, 1.05, 1.12, 1.25, 1.5):
        for devices in (4, 8, 16):
            truth = Overhead(1.0, beta, 1, 16, 3.0)
            times = [100.0] * 3
            tally = run_group(
                planner(truth), times, devices=devices, truth=truth.within_bounds(), pausable=True
            )
            default = run_group((fifo(),), times, devices=devices, truth=truth)
            rows.append(
                {"beta": beta, "devices": devices, "against_fifo": default.makespan_s / tally.makespan_s}
            )
    return rows


def planning_time(repeats: int = 5) -> dict[str, object]:
    """1,000 trials on 1,000 devices, and replanning after one event."""
    found: dict[str, object] = {}
    overhead = OVERHEADS["ResNet-18 128 on V100"]
    for count in (1000, 2000):
        cluster = SimulatedCluster(1000, truth=overhead, planner=planner(overhead))
        times = runtimes("lognormal", count, 0)
        work = dict(enumerate(times))
        cluster.submit(placements(times, max_devices=8), work, dict.fromkeys(work, 10))

        def once(cluster: SimulatedCluster = cluster) -> tuple[float, float]:
            plan = cluster.plan()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for step in cluster.planner:
                plan = step(plan)
            return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - begin_cpu)

        first = [once() for _ in range(repeats)]
        cluster.replan()
        again = []
        while not cluster.idle and len(again) < 300:
            cluster.step()
            again.append(once())
            cluster.replan()
        told: dict[str, object] = {}
        # On a machine that others use, too, only the CPU time is the planner's own.
        for at, unit in enumerate(("ms", "cpu_ms")):
            replans = sorted(each[at] for each in again)
            told[f"plan_{unit}"] = spread([each[at] for each in first])
            told[f"replan_{unit}"] = spread(replans)
            told[f"replan_{unit}_95th"] = replans[int(0.95 * len(replans))]
        found[f"{count} trials on 1000 devices"] = told
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave out 1000 devices")
    parser.add_argument(
        "--planning", action="store_true", help="only time planning anew; the rest of the file stays"
    )
    arguments = parser.parse_args()
    results: dict[str, object] = {}
    before = earlier("fluid_groups")
    if arguments.planning and before is not None:
        results = {**before["results"], "planning_time": planning_time()}
        print("planning time", results["planning_time"])
        command = f"{before['command'].removesuffix(', then --planning')}, then --planning"
        save("fluid_groups", command, results, kept=before)
        return
    print("planning time", results.setdefault("planning_time", planning_time()))
    results["sizes"] = rows = sizes(arguments.seeds, arguments.quick)
    show_sizes(rows)
    results["variance"] = variance(4 * arguments.seeds)
    print("runtime variance (6.4.1), trials / sigma / guesses off: gain over FIFO, median and least")
    for row in results["variance"]:  # type: ignore[attr-defined]
        gain = row["against_fifo"]
        print(
            f"  {row['trials']} {row['sigma']} {row['guesses_off']}: {gain['median']:.2f} {gain['min']:.3f}"
        )
    results["packing"] = packing(arguments.seeds)
    print("packing overhead (6.4.2)")
    for row in results["packing"]:  # type: ignore[attr-defined]
        gain = row["against_fifo"]
        print(f"  x{row['packing_overhead']} {row['kind']}: {gain['median']:.2f} {gain['min']:.3f}")
    results["scaling"] = scaling()
    print(
        "scaling overhead (6.4.3)", [tuple(round(v, 2) for v in row.values()) for row in results["scaling"]]
    )  # type: ignore[attr-defined]
    save("fluid_groups", " ".join(["python", *sys.argv]), results)


if __name__ == "__main__":
    main()
