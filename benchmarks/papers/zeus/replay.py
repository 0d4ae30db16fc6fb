"""Zeus's traces replayed: regret of Zeus and of our policy, GPUs nobody recorded, drift, concurrency, overlap.

    python -m benchmarks.papers.zeus.replay --data FOLDER [--seeds 20] [--quick]

FOLDER (or the environment variable PENSTOCK_DATA plus "/zeus") has summary_train.csv and one or more
summary_power_<gpu>.csv of the Zeus artifact (examples/research_reproducibility/zeus_nsdi23/trace). Without it only the
made-up jobs are run. Results go to benchmarks/results/zeus.json.

Regret is in units of C*, the expected cost of the best configuration; a failed run counts in full. All policies
are replayed on the same luck (one draw per recurrence).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._bench import save, spread

from penstock.recurring import (
    Decision,
    History,
    Result,
    Workload,
    make_policy,
    read_workloads,
    replay,
    synthetic_arrivals,
)
from penstock.recurring import replay_arrivals as replay_overlapping
from penstock.recurring._replay import spec_of
from penstock.recurring._study import compare, eta_sweep, geometric_mean
from penstock.recurring._synthetic import on_gpu, random_gpu, synthetic_workload

PUBLISHED = {  # mean regret/C* of the authors' implementation, eta 0.5, beta 2
    "librispeech": 8.1,
    "squad": 1.7,
    "sentiment140": 1.7,
    "imagenet": 4.4,
    "cifar100": 10.0,
    "movielens-1m": 14.0,
}
POLICIES = ("zeus", "ours", "default", "oracle")


def one(job: tuple[Workload, tuple[str, ...], int, int]) -> dict[str, Any]:
    workload, policies, seeds, in_flight = job
    summary, _ = compare(workload, policies, seeds=seeds, in_flight=in_flight)
    for row in summary["policies"].values():
        del row["path"], row["curve"]
    return summary


def table(
    pool: ProcessPoolExecutor, workloads: Sequence[Workload], seeds: int, in_flight: int = 1
) -> list[Any]:
    return list(pool.map(one, [(w, POLICIES, seeds, in_flight) for w in workloads]))


def sweep(workload: Workload) -> list[dict[str, float]]:
    return eta_sweep(workload, "ours", seeds=1)


def report(title: str, rows: Sequence[dict[str, Any]], *, each: bool = True) -> dict[str, Any]:
    print(f"\n{title}")
    ratios, worse_than_default = [], 0
    for row in rows:
        p = row["policies"]
        zeus, ours, default = (p[name]["regret"] for name in ("zeus", "ours", "default"))
        # Regrets near zero may come out negative by luck: their ratio says nothing below a floor.
        ratios.append(max(ours, 0.05) / max(zeus, 0.05))
        worse_than_default += ours > default
        if each:
            published = PUBLISHED.get(row["workload"])
            note = "" if published is None else f" (published {published})"
            print(
                f"  {row['workload']:14} zeus {zeus:6.2f} +- {p['zeus']['regret_spread']:.2f}"
                f"{note:18} ours {ours:6.2f} +- {p['ours']['regret_spread']:.2f}"
                f"  default {default:7.2f}  last-5 energy saved {p['zeus']['energy_saved']:.0%} / "
                f"{p['ours']['energy_saved']:.0%}"
            )
    result = {
        "ours_vs_zeus_geometric_mean": geometric_mean(ratios),
        "ours_vs_zeus_worst": max(ratios),
        "worse_than_zeus": sum(r > 1 for r in ratios),
        "worse_than_default": worse_than_default,
        "of": len(ratios),
    }
    print(
        f"  ours/zeus {result['ours_vs_zeus_geometric_mean']:.3f} in the geometric mean, worst "
        f"{result['ours_vs_zeus_worst']:.2f}; worse than zeus {result['worse_than_zeus']}, than default "
        f"{worse_than_default}, of {len(ratios)}"
    )
    return result


def advantage(row: dict[str, Any]) -> float:
    """By how much our regret is below Zeus's."""
    return float(row["policies"]["zeus"]["regret"] - row["policies"]["ours"]["regret"])


def finite(value: Any) -> Any:
    """JSON has no infinities: null stands for them (never recovered, say)."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drift(seeds: int) -> dict[str, Any]:
    """The optimum moves half-way: how long until the mean regret of a batch size is below 10% again."""
    from penstock.recurring._synthetic import Gpu, epochs_table, power_table

    sizes = (16, 32, 64, 128)
    power = power_table(Gpu(), sizes, epoch_s=60.0, saturation=14.0, rise=0.0, rng=random.Random(4))

    def world(critical: float, small: float) -> Workload:
        epochs = epochs_table(
            sizes,
            least=15.0,
            critical=critical,
            small=small,
            noise=0.05,
            wiggle=0.0,
            fails_below=0,
            fails_above=10**9,
            runs=6,
            rng=random.Random(3),
        )
        return Workload("drift", "net", "sgd", 0.9, 64, epochs, power, 250.0, 400)

    before, after = world(60.0, 1.0), world(4000.0, 20.0)
    total, best = 160, after.optimum(0.5)[2]
    result: dict[str, Any] = {
        "optimum": [before.optimum(0.5)[0], after.optimum(0.5)[0]],
        "batch_sizes": len(sizes),
    }
    for name, window in (("zeus", None), ("zeus", 12), ("ours", None), ("ours", 12)):
        recovered, late = [], []
        for seed in range(seeds):
            run = replay(
                lambda t: before if t < total // 2 else after,
                make_policy(name, before, 0.5),
                recurrences=total,
                window=window,
                seed=seed,
            )
            costs = [0.0] * total
            for step in run.steps:
                costs[step.recurrence] += step.cost / best
            tail = costs[total // 2 :]
            settled = [t for t in range(len(tail) - 8) if statistics.mean(tail[t : t + 8]) < 1.15]
            recovered.append(settled[0] if settled else math.inf)
            late.append(statistics.mean(tail[2 * len(sizes) :]) - 1.0)
        key = f"{name}, window {window}"
        result[key] = {
            "recurrences_to_recover_median": statistics.median(recovered),
            "late_regret_per_recurrence": statistics.mean(late),
        }
        print(
            f"  {key}: recovers after {statistics.median(recovered)}, then {statistics.mean(late):.3f} C*/recurrence"
        )
    return result


def decision_ms(workload: Workload, observations: int = 1000) -> dict[str, Any]:
    """Time of one decision with many past observations."""
    rng = random.Random(0)
    spec = spec_of(workload, eta=0.5, beta=2.0, window=None, seed=0)
    history = History()
    limit = workload.limits_w[len(workload.limits_w) // 2]
    for n in range(observations):
        size = rng.choice(workload.batch_sizes)
        epochs = float(
            rng.choice([e for e in workload.epochs[size] if e is not None] or [workload.max_epochs])
        )
        time_s, power_w = workload.power[size][limit]
        history.add_decision(Decision(n, size, limit))
        history.add_result(Result(n, epochs, epochs * time_s, epochs * time_s * power_w, True))
    result = {}
    for name in ("zeus", "ours"):
        policy = make_policy(name, workload, 0.5)
        times = []
        for _ in range(40):
            begin = time.perf_counter()
            policy.choose(history.view(spec), observations)
            times.append(1000 * (time.perf_counter() - begin))
        result[name] = spread(times)
        print(f"  {name}: median {statistics.median(times):.2f} ms, least {min(times):.2f} ms")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    given = os.environ.get("PENSTOCK_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) / "zeus" if given else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="Fewer seeds and made-up jobs.")
    arguments = parser.parse_args()
    seeds = 3 if arguments.quick else arguments.seeds
    few = 2 if arguments.quick else 4
    results: dict[str, Any] = {"seeds": seeds}
    with ProcessPoolExecutor(2) as pool:
        data = arguments.data
        if data is None or not (data / "summary_train.csv").exists():
            print("No traces: give --data or PENSTOCK_DATA. Made-up jobs only.", file=sys.stderr)
            recorded: dict[str, list[Workload]] = {}
        else:
            recorded = {
                path.stem.removeprefix("summary_power_"): read_workloads(data / "summary_train.csv", path)
                for path in sorted(data.glob("summary_power_*.csv"))
            }
        for gpu, workloads in recorded.items():
            rows = table(pool, workloads, seeds)
            results[gpu] = {"workloads": rows, **report(f"{gpu}, {seeds} seeds", rows)}
            eight = table(pool, workloads, seeds, in_flight=8)
            kept = [
                advantage(b) / advantage(a) if advantage(a) else None
                for a, b in zip(rows, eight, strict=True)
            ]
            results[f"{gpu}, 8 in flight"] = {
                "workloads": eight,
                "advantage_kept": {row["workload"]: k for row, k in zip(rows, kept, strict=True)},
                **report(f"{gpu}, 8 recurrences in flight", eight),
            }
            print("  advantage over zeus kept:", ", ".join("-" if k is None else f"{k:.2f}" for k in kept))
            sweeps = pool.map(sweep, workloads)
            results[f"{gpu}, eta sweep"] = {w.name: s for w, s in zip(workloads, sweeps, strict=True)}
            moved = [
                replace(on_gpu(w, random_gpu(random.Random(7000 + g)), g), name=f"{w.name}/gpu{g}")
                for g in range(few)
                for w in workloads
            ]
            rows = table(pool, moved, few)
            results[f"{gpu}'s trainings on made-up GPUs"] = {
                "workloads": rows,
                **report(f"{gpu}'s trainings on {few} made-up GPUs, {few} seeds", rows, each=False),
            }
            print(f"\n{gpu}, overlapping jobs (made-up arrivals)")
            overlapping: dict[str, Any] = {}
            for name in ("default", "zeus", "ours"):
                arrivals = synthetic_arrivals(workloads, groups=12, recurrences=60, seed=1)
                done = replay_overlapping(arrivals, workloads, lambda w, n=name: make_policy(n, w, 0.5))
                overlapping[name] = {"totals": done.totals(), "most_in_flight": done.most_in_flight}
            base = overlapping["default"]["totals"]
            for name in ("zeus", "ours"):
                parts = {
                    w: {k: row[k] / base[w][k] for k in ("energy_j", "time_s", "cost")}
                    for w, row in overlapping[name]["totals"].items()
                }
                overlapping[name]["vs_default"] = parts
                print(f"  {name}: cost against default", {w: round(v["cost"], 3) for w, v in parts.items()})
            results[f"{gpu}, overlapping"] = overlapping
            print("\none decision with 1,000 observations")
            results[f"{gpu}, decision_ms"] = decision_ms(max(workloads, key=lambda w: len(w.batch_sizes)))
        count = 8 if arguments.quick else 30
        rows = table(pool, [synthetic_workload(seed) for seed in range(500, 500 + count)], few)
        results["made-up jobs"] = {
            "workloads": rows,
            **report(f"{count} made-up jobs on made-up GPUs", rows, each=False),
        }
    print("\ndrift: the optimum moves half-way")
    results["drift"] = drift(10 if not arguments.quick else 3)
    save(
        "zeus",
        shlex.join(["python", "-m", "benchmarks.papers.zeus.replay", *sys.argv[1:]]),
        finite(results),
        ["numpy", "scipy"],
    )


if __name__ == "__main__":
    main()
