"""Fixed number of evaluations (section 5): best feasible error, violations, evaluations to the unaware best.

python benchmarks/papers/hyperpower/search.py                      (2 seeds of Penstock's methods, a minute or two)
python benchmarks/papers/hyperpower/search.py --seeds 10 --peers   (everything; BoTorch where it is installed)

With --runs every run is kept by its seed, and runs can be added one by one. The peers (minutes per seed) know nothing
of Penstock's samplers, and seeds, limits, objective and noise are the same for all: with --save, their rows of the
last saved results stay if they are not run again and the setting is the same.

"Measured in doubt": a network whose power is in doubt is measured before it is trained, as the profile's networks were.
That costs time, not evaluations: the networks and readings it took are counted, and what they take of the simulated
time, at a second per reading, against the trainings'.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from cnn import Problem
from methods import METHODS, READING_S, Evaluation, Search, limits_of

import _bench
from penstock.goal import Limit

PEERS = ("Optuna GPSampler", "BoTorch LogEI, constrained")


def reached(search: Search, error: float) -> int | None:
    """Evaluations until a feasible error no larger than ``error``; None: never."""
    for count in range(1, len(search.evaluations) + 1):
        if search.best(count) <= error:
            return count
    return None


def place(folder: Path, name: str, problem: Problem, limits: list[Limit], count: int, seed: int) -> Path:
    """Where a run is kept."""
    bounds = "_".join(f"{limit.bound:.6g}" for limit in limits)
    words = "".join(c if c.isalnum() else "-" for c in name)
    return folder / f"{problem.dataset}_{bounds}_{count}_{words}_{seed}.json"


def searched(
    folder: Path | None, name: str, problem: Problem, limits: list[Limit], count: int, seed: int
) -> Search:
    """One search, or what it was when it was run before."""
    if folder is None:
        return METHODS[name](problem, limits, count, seed)
    path = place(folder, name, problem, limits, count, seed)
    if path.exists():
        data = json.loads(path.read_text())
        done = [Evaluation(**e) for e in data["evaluations"]]
        return Search(done, data["cpu_s"], data.get("probes", 0), data.get("readings", 0))
    search = METHODS[name](problem, limits, count, seed)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(search)))
    return search


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mnist", "cifar"])
    parser.add_argument("--methods", nargs="+", default=None, help="names; default all of Penstock's")
    parser.add_argument("--peers", action="store_true", help="Optuna's and BoTorch's too")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--share", type=float, default=0.25, help="of configurations that the power limit leaves"
    )
    parser.add_argument("--evaluations", type=int, default=None, help="default 30 for mnist, 50 for cifar")
    parser.add_argument("--runs", type=Path, default=None, help="keep every run in this folder, and reuse it")
    parser.add_argument("--kept", action="store_true", help="only what is in the folder of --runs")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    reused = given.runs is not None and given.runs.exists()
    names = given.methods or [name for name in METHODS if given.peers or name not in PEERS]
    if find_spec("botorch") is None and PEERS[1] in names:
        print("BoTorch is not installed here: skipped.", file=sys.stderr)
        names = [name for name in names if name != PEERS[1]]
    table: dict[str, dict[str, dict[str, object]]] = {}
    settings: dict[str, dict[str, object]] = {}
    for dataset in given.problems:
        problem = Problem(dataset)
        limits = limits_of(problem, given.share)
        count = given.evaluations or (30 if dataset == "mnist" else 50)
        print(
            f"{dataset}: {len(problem.space)} dimensions, {', '.join(map(str, limits))}, {count} evaluations"
        )
        settings[dataset] = {"limits": [str(limit) for limit in limits], "evaluations": count}
        found: dict[str, list[Search]] = {}
        seeds_of: dict[str, list[int]] = {}
        for name in names:
            seeds: Sequence[int] = range(given.first_seed, given.first_seed + given.seeds)
            if given.kept:
                seeds = [s for s in seeds if place(given.runs, name, problem, limits, count, s).exists()]
            if not seeds:
                continue
            seeds_of[name] = list(seeds)
            found[name] = [searched(given.runs, name, problem, limits, count, seed) for seed in seeds]
            runs = found[name]
            best = [run.best() for run in runs]
            row: dict[str, object] = {
                "seeds": len(runs),
                "first_seed": min(seeds),
                "best_error": [None if value == math.inf else value for value in best],
                "mean": None if max(best) == math.inf else statistics.fmean(best),
                "violations": [run.violations for run in runs],
                "cpu_s_per_suggestion": statistics.fmean(run.cpu_s for run in runs) / count,
            }
            if any(run.probes for run in runs):
                trained_s = [
                    sum(problem.epochs * problem.epoch_s(e.config) for e in run.evaluations) for run in runs
                ]
                row |= {
                    "probes": [run.probes for run in runs],
                    "readings": [run.readings for run in runs],
                    "measuring_share_of_time": statistics.fmean(
                        READING_S * run.readings / (READING_S * run.readings + busy_s)
                        for run, busy_s in zip(runs, trained_s, strict=True)
                    ),
                }
                print(
                    f"  {name}: {statistics.fmean(run.probes for run in runs):.1f} networks measured first, "
                    f"{statistics.fmean(run.readings for run in runs):.0f} readings, "
                    f"{row['measuring_share_of_time']:.1%} of the time"
                )
            table.setdefault(dataset, {})[name] = row
            print(
                f"  {name:28} best {statistics.fmean(best):7.3f} +- "
                f"{statistics.pstdev(best) if max(best) < math.inf else math.nan:.3f}   violations "
                f"{statistics.fmean(run.violations for run in runs):5.1f}   "
                f"{1000 * row['cpu_s_per_suggestion']:.0f} ms",
                flush=True,
            )
        if "EI, unaware" in found:
            for name in [n for n in found if n.startswith("HW")]:
                shares, missed, own = [], 0, []
                for seed in sorted({*seeds_of[name]} & {*seeds_of["EI, unaware"]}):
                    run = found[name][seeds_of[name].index(seed)]
                    plain = found["EI, unaware"][seeds_of["EI, unaware"].index(seed)]
                    if plain.best() == math.inf:  # it never kept the limits: nothing to compare with
                        continue
                    at, its = reached(run, plain.best()), reached(plain, plain.best())
                    missed += at is None
                    shares.append((at or 2 * count) / count)  # never: counted as twice all of them
                    own.append((at or 2 * count) / (its or count))
                ratio = statistics.geometric_mean(shares)
                table[dataset][name] |= {
                    "share_of_evaluations": ratio,
                    "against_its_own_best": statistics.geometric_mean(own),
                    "never": missed,
                }
                print(
                    f"  {name}: the unaware method's best in {ratio:.3f} of its {count} evaluations (never: {missed}); "
                    f"{statistics.geometric_mean(own):.3f} of those it took to its best",
                    flush=True,
                )
    datasets = list(table)
    for name in [n for n in names if n.startswith("HW") and all(n in table[d] for d in datasets)]:
        shares = [table[d][name].get("share_of_evaluations") for d in datasets]
        if len(shares) > 1 and all(isinstance(share, float) for share in shares):
            mean = statistics.geometric_mean([float(str(share)) for share in shares])
            table.setdefault("both", {})[name] = {"share_of_evaluations": mean}
            print(f"{name}: geometric mean over the problems {mean:.3f}")
    if given.save:
        saved = _bench.earlier("hyperpower_search")
        kept = {} if reused else None  # nobody knows which source made that
        before = {} if saved is None else saved["results"]
        for dataset in datasets:
            for name in PEERS:
                same = before.get("settings", {}).get(dataset) == settings[dataset]
                if same and name not in table[dataset] and name in before.get(dataset, {}):
                    table[dataset][name], kept = before[dataset][name], saved
        table["settings"] = settings
        _bench.save(
            "hyperpower_search",
            f"python benchmarks/papers/hyperpower/search.py --seeds {given.seeds} --peers --save",
            table,
            ("optuna", "botorch", "numpy", "scipy"),
            kept=kept,
        )
    else:
        print(json.dumps({d: {n: r.get("mean") for n, r in rows.items()} for d, rows in table.items()}))


if __name__ == "__main__":
    main()
