"""How well power and memory are predicted: RMSPE of 10-fold cross validation (HyperPower Table 1).

    python benchmarks/papers/hyperpower/predictors.py [--data FOLDER] [--save]

On the CNN spaces of section 4 (simulated devices, 100 profiled structures), by the structural hyperparameters alone
as in Eq. 1-2, and with parameters and FLOPs of the network. And, with --data, for the GPU watts of EC-NAS-Bench's
networks: FOLDER holds <space>_energy.csv[.gz] and generated_graphs_*.json[.xz]; every space found is used. Every
fold chooses the model's form anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import graphs
import numpy as np
from cnn import GTX_1070, TEGRA_TX1, Problem

import _bench
from penstock.predict import Column, Features, Predictor, cross_validate

PLAIN = ("plain", "linear")


def rmspe(
    features: Features, configs: list[Any], values: list[float], extra: Any, repeats: int, **more: Any
) -> list[float]:
    rows = np.array([features.row(config, extra) for config in configs])
    found = []
    for seed in range(repeats):
        errors = cross_validate(features, rows, np.array(values), seed=seed, **more)
        found.append(float(np.sqrt(np.mean(errors**2))))
    return found


def cnn(samples: int, repeats: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for device in (GTX_1070, TEGRA_TX1):
        for dataset in ("mnist", "cifar"):
            problem = Problem(dataset, device)
            configs = [problem.space.sample(50_000 + i) for i in range(samples)]
            measured = [problem.measure(config) for config in configs]

            def counted(config: Any, problem: Problem = problem) -> dict[str, float]:
                return {"params": problem.params(config), "flops": problem.flops(config)}

            for quantity in ("power_w", "memory_bytes", "latency_s"):
                values = [one[quantity] for one in measured]
                z = Features.of(problem.space)
                more = Features.of(problem.space, extra=("params", "flops"))
                table[f"{dataset}, {device.name}, {quantity}"] = row = {
                    "linear": rmspe(z, configs, values, None, repeats, forms=PLAIN, bends=False),
                    "chosen": rmspe(z, configs, values, None, repeats),
                    "chosen, with params and FLOPs": rmspe(more, configs, values, counted, repeats),
                    "form": Predictor.fit(quantity, z, configs, values, folds=0).form.terms,
                }
                print(f"{dataset:6} {device.name:20} {quantity:13}", shown(row), flush=True)
    return table


def shown(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {100 * fmean(found):.2f}%" for name, found in row.items() if name != "form")


def ecnas(folder: Path, repeats: int) -> dict[str, Any]:
    networks = graphs.read(folder)
    configs = [graphs.config_of(graph) for graph, _ in networks]
    watts = [value for _, value in networks]
    counts = tuple(Column(name) for name in ("conv3", "conv1", "pool3", "edges"))
    counted = {}
    for name in ("params",), graphs.NAMES:
        counted["chosen, with " + " ".join(name)] = rmspe(
            Features(counts, tuple(name)), configs, watts, graphs.extra, repeats
        )
    row = {
        "linear": rmspe(Features(counts), configs, watts, None, repeats, forms=PLAIN, bends=False),
        **counted,
    }
    print(f"EC-NAS-Bench GPU watts, {len(watts)} networks:", shown(row), flush=True)
    return {"networks": len(watts), "watts": [min(watts), max(watts)], **row}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None, help="EC-NAS-Bench's files")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3, help="partitions into folds")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    table: dict[str, Any] = {}
    if given.data is not None:
        table["ecnas"] = ecnas(given.data, given.repeats)
    table["cnn"] = cnn(given.samples, given.repeats)
    if given.save:
        data = "" if given.data is None else " --data ecnas"
        command = f"python benchmarks/papers/hyperpower/predictors.py{data} --save"
        _bench.save("hyperpower_predictors", command, table, ("numpy", "scipy"))


if __name__ == "__main__":
    main()
