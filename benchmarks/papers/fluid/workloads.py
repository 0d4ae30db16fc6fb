"""What the Fluid benchmarks run: real learning curves, measured co-location, and trials of different lengths."""

from __future__ import annotations

import ast
import json
import lzma
import math
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from penstock.predict import fit_scaling, fit_sharing
from penstock.space import Float, Space

HYPERPARAMETERS = (
    "learning_rate", "beta1", "beta2", "epsilon", "l1", "l2", "linear_decay", "exponential_decay",
)  # fmt: skip


TASKS = tuple(
    f"FixedTextRNNClassification_imdb_patch128_LSTM128_{name}"
    for name in ("bs64", "avg_bs64", "embed128_bs64")
)


def data_folder(argument: str | None, name: str) -> Path:
    """The folder of public measurements: ``--data``, or the variable PENSTOCK_DATA."""
    root = argument or os.environ.get("PENSTOCK_DATA")
    if root is None or not (Path(root) / name).is_dir():
        sys.exit(
            f"skipped: needs the folder {name!r} of public measurements; give it with --data or PENSTOCK_DATA "
            "(gavel: stanford-futuredata/gavel; taskset: releaunifreiburg/DyHPO)."
        )
    return Path(root) / name


def gavel(folder: Path, kind: str = "v100") -> dict[str, dict[str, Any]]:
    """Per job type of Gavel: alpha and c of two of it on one GPU, beta and d of it over 1, 2, 4, 8 GPUs."""
    with lzma.open(folder / "simulation_throughputs.json.xz") as file:
        table = json.load(file)[kind]
    rates: dict[str, dict[int, float]] = {}
    pairs: dict[str, float] = {}
    for key, others in table.items():
        name, workers = ast.literal_eval(key)
        if others["null"]:
            rates.setdefault(name, {})[workers] = others["null"]
        if workers == 1 and key in others and others[key][0]:
            pairs[name] = others[key][0]
    found = {}
    for name, by_workers in rates.items():
        if 1 not in by_workers or name not in pairs:
            continue
        alone = 1 / by_workers[1]
        c, alpha = fit_sharing({1: [alone], 2: [1 / pairs[name]] * 2})
        # The rate counts the steps of all workers together, so the time per step falls as they share the work.
        d, beta = fit_scaling({w: [1 / rate] for w, rate in by_workers.items()})
        found[name] = {"alpha": alpha, "c": c, "beta": beta, "d": d}
    return found


def families(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median job of each family (ResNet-18, LM, ...) by its co-location overhead."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, job in jobs.items():
        groups.setdefault(name.partition(" (")[0], []).append(job)
    return {
        name: {"alpha": statistics.median_low([job["alpha"] for job in members])}
        for name, members in sorted(groups.items())
    }


class Curves:
    """Learning curves of TaskSet: the validation loss of the nearest measured configuration, epoch by epoch."""

    def __init__(self, folder: Path, task: str = TASKS[0]) -> None:
        import numpy

        with lzma.open(folder / f"{task}.json.xz") as file:
            rows = json.load(file)
        self._points = numpy.array(
            [[math.log10(max(1e-12, row["hp"][n])) for n in HYPERPARAMETERS] for row in rows]
        )
        low, high = self._points.min(axis=0), self._points.max(axis=0)
        self._low, self._span = low, numpy.where(high > low, high - low, 1.0)
        self._points = (self._points - low) / self._span
        losses = numpy.array([row["valid"]["loss"] for row in rows], dtype=float)
        worst = numpy.nanmax(losses[numpy.isfinite(losses)])
        self.losses = numpy.where(numpy.isfinite(losses), losses, worst)
        self.space = Space(
            **{
                name: Float(float(10 ** low[i]), float(10 ** high[i]), log=True)
                for i, name in enumerate(HYPERPARAMETERS)
                if high[i] > low[i]
            }
        )
        self._names = [(i, name) for i, name in enumerate(HYPERPARAMETERS) if high[i] > low[i]]
        self._cache: dict[tuple[float, ...], int] = {}

    def row(self, config: Any) -> int:
        """The nearest measured configuration."""
        import numpy

        key = tuple(config[name] for _, name in self._names)
        if key not in self._cache:
            point = numpy.zeros(len(HYPERPARAMETERS))
            for (i, _), value in zip(self._names, key, strict=True):
                point[i] = (math.log10(value) - self._low[i]) / self._span[i]
            self._cache[key] = int(((self._points - point) ** 2).sum(axis=1).argmin())
        return self._cache[key]

    def loss(self, config: Any, epoch: int, max_epochs: int) -> float:
        """The lowest loss up to ``epoch`` of ``max_epochs`` (the curves have 51 points)."""
        upto = max(1, round(50 * epoch / max_epochs))
        return float(self.losses[self.row(config), : upto + 1].min())


def epoch_s(row: int, *, mean_s: float, sigma: float, seed: int) -> float:
    """What an epoch of a configuration takes alone on one device: log-normal around the mean, always the same."""
    normal = random.Random(f"{seed}:{row}").gauss(0, 1)
    return mean_s * math.exp(sigma * normal - sigma * sigma / 2)


def runtimes(kind: str, count: int, seed: int) -> list[float]:
    """Trials of a group: equal, uniform, log-normal, or mostly short with some ten times as long."""
    rng = random.Random(f"{kind}:{count}:{seed}")
    if kind == "equal":
        return [100.0] * count
    if kind == "uniform":
        return [rng.uniform(50, 150) for _ in range(count)]
    if kind == "lognormal":
        return [100 * rng.lognormvariate(-0.32, 0.8) for _ in range(count)]
    return [50.0 * (10 if rng.random() < 0.15 else 1) for _ in range(count)]
