"""Hydro 5.3, dynamic split: what it costs to split a fused group of 16 members onto an idle device, in epochs.

All that a split adds to the training counts: the leaving members' states taken out and written, the others
re-indexed, the leaving ones read and built anew as a group of their own, and what the first epochs after it take longer
than the last in either half, the slower one counts (a step that was recorded is recorded anew once that repays itself).
Times are CPU seconds of one thread, so that what else runs here counts for nobody. Epochs are measured on few samples
and an epoch of 50,000 (CIFAR-10's) is so many steps like these. Every split is compared with the same members trained
unsplit. Each model has a process of its own: what recording a step cost there decides whether the next is recorded,
so in one process the model that comes first would decide for the second (until November 2026 it did, and hid what
recording anew costs the small one).

    python -m benchmarks.papers.hydro_coordinator.split [--models cnn28 mlp128] [--samples 1280] [--repeats 3] [--add]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from benchmarks._bench import earlier, save, spread
from torch import nn

from penstock.train import Data, Task
from penstock.train._fused_loop import FusedTrainer, own_state
from penstock.train._loop import Trainer

MEMBERS = 16
BATCH = 64
EPOCH = 50_000
"""Samples of the epoch that costs are compared with."""

EPOCHS = 4
"""How many are trained before the split and after it; the last shows the pace."""

T = TypeVar("T")


def cnn28() -> nn.Module:
    """Two convolutions of 16 and 32 channels over 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 10),
    )


def mlp128() -> nn.Module:
    """Two hidden layers of width 128 over 28 x 28 images."""
    layers = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(nn.Flatten(), *layers)


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn28": cnn28, "mlp128": mlp128}


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its CPU seconds."""
    begin_s = time.process_time()
    found = call()
    return found, time.process_time() - begin_s


def task_of(model: str, samples: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples + 512, 1, 28, 28, generator=generator)
    y = x.flatten(1)[:, :10].argmax(1)
    data = Data((x[:samples], y[:samples]), (x[samples:], y[samples:]))
    return Task(MODELS[model], data, F.cross_entropy, batch_size=BATCH)


def trainers_of(task: Task, numbers: Sequence[int]) -> list[Trainer]:
    configs = [{"lr": 0.002 * (n + 1), "momentum": 0.05 * n} for n in numbers]
    return [Trainer(task, config, seed=n) for n, config in zip(numbers, configs, strict=True)]


def split_once(model: str, samples: int, folder: Path) -> dict[str, float]:
    """Train a group, split it, go on; what it took, and how far the results are from those of the unsplit group."""
    task = task_of(model, samples)
    numbers = list(range(MEMBERS))
    group = trainers_of(task, numbers)
    fused = FusedTrainer(group)
    ahead = EPOCHS * EPOCH // samples  # as sure to come as for an epoch of that length
    for _ in range(EPOCHS - 1):
        fused.train_epoch(ahead=ahead)
    _, epoch_s = timed(lambda: fused.train_epoch(ahead=ahead))
    staying, leaving = numbers[::2], numbers[1::2]
    whole = {n: own_state(group[n]) for n in numbers}

    def write() -> None:
        for n in leaving:
            torch.save(own_state(group[n]), folder / f"{n}.pt")

    def build() -> tuple[list[Trainer], FusedTrainer]:
        made = trainers_of(task, leaving)
        for n, trainer in zip(leaving, made, strict=True):
            trainer.load_state(torch.load(folder / f"{n}.pt", weights_only=False))
        return made, FusedTrainer(made)

    _, write_s = timed(write)
    _, leave_s = timed(lambda: fused.leave([group[n] for n in leaving]))
    (other, second), build_s = timed(build)
    halves = [(fused, [group[n] for n in staying]), (second, other)]
    again_s, half_s, after = [], [], {}
    for (half, members), own in zip(halves, (staying, leaving), strict=True):
        times_s = []
        for epoch in range(EPOCHS):
            results, spent_s = timed(lambda half=half: half.train_epoch(ahead=ahead))  # type: ignore[misc]
            times_s.append(spent_s)
            if epoch == 0:
                after |= {n: results[t]["train_loss"] for n, t in zip(own, members, strict=True)}
        half_s.append(times_s[-1])
        again_s.append(max(0.0, sum(times_s) - EPOCHS * times_s[-1]))
    unsplit = trainers_of(task, numbers)
    for n, trainer in zip(numbers, unsplit, strict=True):
        trainer.load_state(whole[n])
    expected = dict(zip(numbers, losses_of(FusedTrainer(unsplit), unsplit, ahead), strict=True))
    move_s = write_s + leave_s + build_s
    cost_s = move_s + max(again_s)
    longer = EPOCH / samples
    return {
        "epoch_s": longer * epoch_s,
        "half_epoch_s": longer * max(half_s),
        "write_s": write_s,
        "leave_s": leave_s,
        "build_s": build_s,
        "again_s": max(again_s),
        "cost_s": cost_s,
        "share_moving": move_s / (longer * epoch_s),
        "share": cost_s / (longer * epoch_s),
        "farthest_loss": max(abs(expected[n] - after[n]) / abs(expected[n]) for n in numbers),
    }


def losses_of(fused: FusedTrainer, members: Sequence[Trainer], ahead: int) -> list[float]:
    results: dict[Trainer, Any] = fused.train_epoch(ahead=ahead)
    return [results[trainer]["train_loss"] for trainer in members]


def repeated(model: str, samples: int, repeats: int) -> dict[str, Any]:
    """Splits of one model: spreads of all they took."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        split_once(model, 4 * BATCH, Path(folder))  # imports and warms up
        rows = [split_once(model, samples, Path(folder)) for _ in range(repeats)]
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--samples", type=int, default=1280, help="Of the epochs that are trained.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="Keep what is saved of other models.")
    arguments = parser.parse_args()
    command = " ".join(["python", "-m", "benchmarks.papers.hydro_coordinator.split", *sys.argv[1:]])
    kept = earlier("hydro_split") if arguments.add else None
    results: dict[str, Any] = {} if kept is None else kept["results"]
    results |= {
        "members": MEMBERS,
        "batch_size": BATCH,
        "samples": arguments.samples,
        "epoch_samples": EPOCH,
        "unit": "CPU seconds",
    }
    for model in arguments.models:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            told = process.submit(repeated, model, arguments.samples, arguments.repeats).result()
        results[model] = {**told, "command": command}
        share = told["share"]
        parts = ", ".join(
            f"{name[:-2].replace('_', ' ')} {told[name]['median'] * 1000:.0f} ms"
            for name in ("write_s", "leave_s", "build_s", "again_s")
        )
        print(
            f"{model}: an epoch of {EPOCH} samples of {MEMBERS} takes {told['epoch_s']['median']:.2f} s, of 8 "
            f"{told['half_epoch_s']['median']:.2f} s; a split {told['cost_s']['median'] * 1000:.0f} ms ({parts}): "
            f"{100 * share['median']:.2f}% of an epoch ({100 * share['min']:.2f}..{100 * share['max']:.2f}%), "
            f"moving alone {100 * told['share_moving']['median']:.2f}%; "
            f"losses differ by {told['farthest_loss']['max']:.1e}",
            flush=True,
        )
    save("hydro_split", command, results, ["torch"], kept=kept)


if __name__ == "__main__":
    main()
