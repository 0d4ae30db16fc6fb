# PYTHONPATH=benchmarks python benchmarks/papers/hydro_coordinator/mixed.py --rates simulation_throughputs.json.xz
"""Hydro 6.5, mixed GPUs: kind-aware allocation against kind-agnostic, on throughputs that Gavel's authors measured.

20 middle-size jobs (successive halving by 3, fused trials, 4 or 8 GPUs at most) arrive within an hour at 32 GPUs, as in
the paper; its A100s are V100s here, its V100s P100s (and K80s), for which throughputs are published. Kind-agnostic: who
has the fewest GPUs gets any that is free. "Kinds alone": the same fairness, and the policy differs only in which kind a
job gets; otherwise it may also put short jobs first. Then 100 random mixes of GPUs and jobs, rates learned online
instead of given, and (--large) a large cluster, which has a result of its own. All times are simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from _bench import save, spread
from penstock.cli._cluster import parse_devices, read_rates
from penstock.plan._cluster import sample_jobs, simulate_cluster

CLUSTERS = {
    "V100 + P100": "v100=16,p100=16",
    "V100 + P100 + K80": "v100=12,p100=12,k80=8",
    "V100 + K80": "v100=16,k80=16",
}


def gain(jobs, devices, rates, seed, *, learn=False, goal="time", short_first=True):
    agnostic = simulate_cluster(jobs, devices, rates, policy="agnostic", seed=seed)
    aware = simulate_cluster(
        jobs, devices, rates, policy="aware", learn=learn, goal=goal, eta=1.0, short_first=short_first
    )
    return {
        "mean_jct": agnostic.mean_jct_s / aware.mean_jct_s,
        "makespan": agnostic.makespan_s / aware.makespan_s,
        "energy": agnostic.energy_j / aware.energy_j,
        "money": agnostic.money / aware.money,
        "worst_job": min(agnostic.jct_s[name] / aware.jct_s[name] for name in aware.jct_s),
    }


def summary(rows):
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", required=True, help="gavel/simulation_throughputs.json.xz")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--mixes", type=int, default=100)
    parser.add_argument("--large", type=int, default=0, help="only this: so many jobs on 1000 GPUs")
    arguments = parser.parse_args()
    if not Path(arguments.rates).exists():
        sys.exit(f"No table at {arguments.rates}: name Gavel's simulation_throughputs.json by --rates.")
    table = read_rates(arguments.rates)
    if arguments.large:
        return large(table, arguments.large)
    results: dict[str, object] = {}
    for name, text in CLUSTERS.items():
        devices = parse_devices(text)
        rates = {k: v for k, v in table.items() if k[1] in {d.name for d in devices}}
        for label, more in (
            ("known rates", {}),
            ("kinds alone", {"short_first": False}),
            ("learned rates", {"learn": True}),
            ("goal energy", {"goal": "energy"}),
        ):
            rows = [
                gain(sample_jobs(20, rates, seed=seed), devices, rates, seed, **more)
                for seed in range(arguments.seeds)
            ]
            results[f"{name}, {label}"] = told = summary(rows)
            jct = told["mean_jct"]
            print(
                f"{name}, {label}: average JCT x{jct['median']:.2f} ({jct['min']:.2f}..{jct['max']:.2f}), makespan "
                f"x{told['makespan']['median']:.2f}, energy x{told['energy']['median']:.2f}, "
                f"cost x{told['money']['median']:.2f}",
                flush=True,
            )
    for label, short_first in (("random mixes", True), ("random mixes, kinds alone", False)):
        rows = []
        for mix in range(arguments.mixes):
            rng = random.Random(f"mix {mix}")
            names = rng.sample(["v100", "p100", "k80"], rng.choice((2, 3)))
            devices = parse_devices(",".join(f"{name}={rng.choice((2, 4, 8, 16))}" for name in names))
            rates = {k: v for k, v in table.items() if k[1] in names}
            jobs = sample_jobs(rng.choice((5, 10, 20)), rates, seed=mix)
            rows.append(gain(jobs, devices, rates, mix, short_first=short_first))
        told = summary(rows)
        worse = sum(row["mean_jct"] < 1 for row in rows)
        results[label] = told | {"mixes": len(rows), "worse": worse}
        print(
            f"{len(rows)} {label}: average JCT x{told['mean_jct']['median']:.2f} "
            f"(least {told['mean_jct']['min']:.3f}); worse on {worse}",
            flush=True,
        )
    save("hydro_mixed", " ".join(["python", *sys.argv]), results)


def large(table, count) -> None:
    """Thousands of jobs within a day on a thousand GPUs."""
    devices = parse_devices("v100=400,p100=300,k80=300")
    jobs = sample_jobs(count, table, hours=24, seed=0)
    results: dict[str, object] = {"jobs": len(jobs), "trials": sum(j.trials for j in jobs), "gpus": 1000}
    for policy in ("agnostic", "aware"):
        begin = time.process_time()
        out = simulate_cluster(jobs, devices, table, policy=policy)
        cpu_s = time.process_time() - begin
        results[policy] = {"cpu_s": cpu_s, **out.to_json()}
        print(f"{len(jobs)} jobs on 1000 GPUs, {policy}: {cpu_s:.1f} s of CPU, {out.to_json()}", flush=True)
    save("hydro_cluster", " ".join(["python", *sys.argv]), results)


if __name__ == "__main__":
    main()
