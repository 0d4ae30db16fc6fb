# PYTHONPATH=benchmarks python benchmarks/papers/fluid/local.py
"""Halving of small CNNs on this machine's cores: Fluid, overheads measured at the start, against one trial per core.

A study of one trial, which is not compared, measures what sharing and spreading cost here; the others find that in the
store, as later studies of the same work do. Both sides run the same trials with the same seeds.

Two kinds of trials. A ``pk.Task`` with its data in memory keeps its core busy: there only spreading can gain, and the
profile finds that out. With ``--wait 0.03`` a training function reads every batch from storage that answers after so
long, as a network file system does: its core is idle for a part of each step, and sharing it gains as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock as pk
from _bench import save, spread
from penstock.report import read_timeline, write_timeline


def net(width: int, norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width) if norm else nn.GroupNorm(1, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def made() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Noisy blobs in ten places of a picture: made up, but a CNN has to learn them."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 10, (2500,), generator=generator)
    pictures = 0.8 * torch.randn(2500, 1, 16, 16, generator=generator)
    for row, target in enumerate(targets.tolist()):
        y, x = 3 * (target // 4) + 2, 3 * (target % 4) + 2
        pictures[row, 0, y : y + 4, x : x + 4] += 1
    return (pictures[:2000], targets[:2000]), (pictures[2000:], targets[2000:])


def data() -> pk.Data:
    return pk.Data(*made())


def accuracy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == targets).float().mean()


TASK = pk.Task(
    net,
    data,
    functional.cross_entropy,
    metrics={"accuracy": accuracy},
    optimizer=torch.optim.SGD,
    defaults={"momentum": 0.9},
    batch_size=250,
)


def waiting(wait_s: float) -> Any:
    """A training function that reads batches from storage, each after ``wait_s``; workers read their own rows."""

    (inputs, targets), (check, truth) = made()

    @pk.elastic(max_devices=2)
    def train(run: pk.Run) -> None:
        torch.manual_seed(run.seed)
        model = net(run.config["width"], norm=False)
        optimizer = torch.optim.SGD(model.parameters(), run.config["lr"], momentum=0.9)
        if saved := run.load():
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        rank, size = run.world.rank, run.world.size
        for epoch in run.epochs():
            order = torch.randperm(2000, generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(250):
                mine = batch[rank * 250 // size : (rank + 1) * 250 // size]
                time.sleep(wait_s * len(mine) / 250)
                loss = functional.cross_entropy(model(inputs[mine]), targets[mine]) * len(mine) / 250
                optimizer.zero_grad()
                loss.backward()
                run.world.all_reduce(parameter.grad for parameter in model.parameters())
                optimizer.step()
                run.iteration()
            mine = slice(rank * len(check) // size, (rank + 1) * len(check) // size)
            with torch.no_grad():
                loss = functional.cross_entropy(model(check[mine]), truth[mine], reduction="sum") / len(check)
            run.world.all_reduce([loss])
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            run.report(loss=loss)

    return train


SPACE = pk.Space(lr=pk.Float(1e-3, 0.3, log=True), width=pk.Int(16, 48))


def one(planner: Any, folder: Path, name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    study = pk.Study(
        waiting(arguments.wait) if arguments.wait else TASK,
        SPACE,
        minimize="loss",
        scheduler=pk.Halving(max_epochs=arguments.epochs, trials=arguments.trials),
        sampler=pk.Random(),
        executor=pk.Local(arguments.slots),
        planner=planner,
        store=folder / "s.db",
        name=name,
        seed=seed,
        meter=False,
        fuse=False,
    ).run()
    told = read_timeline(folder / "s.db", name)
    write_timeline(told, folder / f"{name}.html")
    best = study.best
    assert best is not None
    return {
        "makespan_s": told.makespan_s,
        "wall_s": time.monotonic() - began_s,
        "utilisation": told.utilisation,
        "loss": best.metrics["loss"],
        "best": best.id,
        "widths": sorted({sum(s.fraction for s in record.shares) for record in study.trials}),
        "overhead": next((n.data["result"] for n in study.state.notes if n.topic == "overhead"), None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds until storage hands out a batch")
    parser.add_argument("--name", default="fluid_local", help="of the file with results")
    arguments = parser.parse_args()
    rows, gains = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = argparse.Namespace(**{**vars(arguments), "trials": 1, "epochs": 3})
        profile_s = one(pk.Fluid(), folder, "profile", 0, small)["wall_s"]
        for seed in range(arguments.seeds):
            plain = one(None, folder, f"plain-{seed}", seed, arguments)
            fluid = one(pk.Fluid(), folder, f"fluid-{seed}", seed, arguments)
            gains.append(plain["makespan_s"] / fluid["makespan_s"])
            rows.append({"seed": seed, "plain": plain, "fluid": fluid})
            print(
                f"seed {seed}: one per core {plain['makespan_s']:.1f} s, Fluid {fluid['makespan_s']:.1f} s, "
                f"x{gains[-1]:.2f}; loss {plain['loss']:.5f} and {fluid['loss']:.5f}; widths {fluid['widths']}; "
                f"{fluid['overhead']}",
                flush=True,
            )
    print(f"makespan x{statistics.geometric_mean(gains):.2f} (goal 1.3)")
    facts = {key: value for key, value in vars(arguments).items() if key != "name"}
    save(
        arguments.name,
        " ".join(["python", *sys.argv]),
        {"arguments": facts, "gain": spread(gains), "profile_study_s": profile_s, "rows": rows},
        ["torch"],
    )


if __name__ == "__main__":
    main()
