"""Fixed number of evaluations (section 5): best feasible error, violations, evaluations to the unaware best.

python benchmarks/papers/hyperpower/search.py                      (2 seeds of Penstock's methods, a minute or two)
python benchmarks/papers/hyperpower/search.py --seeds 10 --peers   (everything; BoTorch where it is installed)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from cnn import Problem
from methods import METHODS, Search, limits_of

import _bench

PEERS = ("Optuna GPSampler", "BoTorch LogEI, constrained")


def reached(search: Search, error: float) -> int | None:
    """Evaluations until a feasible error no larger than ``error``; None: never."""
    for count in range(1, len(search.evaluations) + 1):
        if search.best(count) <= error:
            return count
    return None


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
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    names = given.methods or [name for name in METHODS if given.peers or name not in PEERS]
    if find_spec("botorch") is None and PEERS[1] in names:
        print("BoTorch is not installed here: skipped.", file=sys.stderr)
        names = [name for name in names if name != PEERS[1]]
    table: dict[str, dict[str, dict[str, object]]] = {}
    for dataset in given.problems:
        problem = Problem(dataset)
        limits = limits_of(problem, given.share)
        count = given.evaluations or (30 if dataset == "mnist" else 50)
        print(
            f"{dataset}: {len(problem.space)} dimensions, {', '.join(map(str, limits))}, {count} evaluations"
        )
        found: dict[str, list[Search]] = {}
        for name in names:
            seeds = range(given.first_seed, given.first_seed + given.seeds)
            found[name] = [METHODS[name](problem, limits, count, seed) for seed in seeds]
            runs = found[name]
            best = [run.best() for run in runs]
            row: dict[str, object] = {
                "best_error": best,
                "mean": statistics.fmean(best),
                "violations": [run.violations for run in runs],
                "cpu_s_per_suggestion": statistics.fmean(run.cpu_s for run in runs) / count,
            }
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
                for run, plain in zip(found[name], found["EI, unaware"], strict=True):
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
    for name in [n for n in names if n.startswith("HW")]:
        shares = [table[d][name].get("share_of_evaluations") for d in table]
        if len(shares) > 1 and all(isinstance(share, float) for share in shares):
            print(f"{name}: geometric mean over the problems {statistics.geometric_mean(shares):.3f}")  # type: ignore[arg-type]
    if given.save:
        _bench.save(
            "hyperpower-search",
            " ".join(["python", *sys.argv]),
            table,
            ("optuna", "botorch", "numpy", "scipy"),
        )
    else:
        print(json.dumps({d: {n: r["mean"] for n, r in rows.items()} for d, rows in table.items()}))


if __name__ == "__main__":
    main()
