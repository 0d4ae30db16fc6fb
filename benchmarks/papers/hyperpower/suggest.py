"""What a suggestion costs: CPU seconds with 100 past trials in 8 dimensions, beside BoTorch's LogEI, at equal quality.

    python benchmarks/papers/hyperpower/suggest.py [--seeds 5] [--more 10] [--save]

Both begin with the same 100 random points of a noisy function with two valleys, and go on by themselves for ``--more``
evaluations. CPU time of the whole process, one thread. Quality: the best true value reached.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy: threads of its library that spin would be charged, too

import _bench
from penstock.sample import Bayes, Observation
from penstock.space import Float, Space

D, PAST = 8, 100
SPACE = Space(**{f"x{i}": Float(0.0, 1.0) for i in range(D)})
Point = Sequence[float]
Step = Callable[[list[Point], list[float]], Point]


def true(x: Point) -> float:
    """A wide valley and a narrow, deeper one, of different curvature along the axes."""
    wide = sum((1 + i / 2) * (v - 0.35) ** 2 for i, v in enumerate(x))
    narrow = sum((2 + i) * (v - 0.7) ** 2 for i, v in enumerate(x))
    return 1.0 + 0.4 * wide - 1.2 * math.exp(-2.0 * narrow)


def start(seed: int) -> tuple[list[Point], list[float], random.Random]:
    draw = random.Random(seed)
    points: list[Point] = [[draw.random() for _ in range(D)] for _ in range(PAST)]
    return points, [true(x) + 0.01 * draw.gauss(0, 1) for x in points], draw


def penstock(seed: int) -> Step:
    sampler = Bayes()
    sampler.start(SPACE, objectives=1, seed=seed)
    told = 0

    def step(points: list[Point], values: list[float]) -> Point:
        nonlocal told
        for number in range(told, len(points)):
            config = {f"x{i}": v for i, v in enumerate(points[number])}
            sampler.tell(Observation(number, config, (values[number],)))
        told = len(points)
        (config,) = sampler.ask(1)
        return [config[f"x{i}"] for i in range(D)]

    return step


def botorch(seed: int) -> Step:
    import torch
    from botorch.acquisition.analytic import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    bounds = torch.stack([torch.zeros(D), torch.ones(D)]).double()

    def step(points: list[Point], values: list[float]) -> Point:
        x, y = torch.tensor(points).double(), -torch.tensor(values).double()[:, None]
        model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        acquisition = LogExpectedImprovement(model, best_f=y.max())
        chosen, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=256)
        return [float(v) for v in chosen[0]]

    return step


def search(make: Callable[[int], Step], seed: int, more: int) -> dict[str, Any]:
    points, values, draw = start(seed)
    step = make(seed)
    cpu_s = []
    for _ in range(more):
        begun = time.process_time()
        point = step(points, values)
        cpu_s.append(time.process_time() - begun)
        points.append(point)
        values.append(true(point) + 0.01 * draw.gauss(0, 1))
    return {"cpu_s": cpu_s, "best": min(map(true, points))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--more", type=int, default=10)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name, make in (("penstock", penstock), ("botorch", botorch)):
        search(make, 99, 1)  # imports
        runs = [search(make, seed, given.more) for seed in range(given.seeds)]
        cpu_s = [s for run in runs for s in run["cpu_s"]]
        results[name] = {"cpu_s": _bench.spread(cpu_s), "mean_cpu_s": statistics.fmean(cpu_s)}
        results[name]["best"] = [run["best"] for run in runs]
        best = statistics.fmean(run["best"] for run in runs)
        print(f"{name}: {_bench.text(cpu_s, ' s')} CPU per suggestion, best {best:.4f}", flush=True)
    ratio = results["penstock"]["mean_cpu_s"] / results["botorch"]["mean_cpu_s"]
    results["start"] = [min(map(true, start(seed)[0])) for seed in range(given.seeds)]
    results["share_of_botorch"] = ratio
    print(
        f"a suggestion takes {ratio:.3f} of BoTorch's CPU time; started from {statistics.fmean(results['start']):.4f}"
    )
    if given.save:
        shown = f"--seeds {given.seeds} --more {given.more} --save"
        command = f"python benchmarks/papers/hyperpower/suggest.py {shown}"
        _bench.save("hyperpower_suggest", command, results, ("numpy", "scipy", "torch", "botorch"))


if __name__ == "__main__":
    main()
