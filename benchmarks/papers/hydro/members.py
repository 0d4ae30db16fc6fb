"""How many narrow ResNets train concurrently in 8 GB? Peak memory of 512, in groups and all in one.

Run with: OMP_NUM_THREADS=1 python benchmarks/papers/hydro/members.py [--members 512] [--groups 8 64 512] [--save]

ResNet-18 of width 8 on 32 x 32 images. All members are alive from the first step to the last: weights, batch-norm
statistics and momentum of each stay in memory while epoch by epoch every group takes its steps; the largest "group" is
all of them in one step. Every member has its own seed, initial weights, data order and learning rate, and the losses of
a sample of members are compared with the same trials trained alone. In float32 a ReLU whose input is nearly 0 may fall
on either side, so they are compared twice: with trials alone in channels_last, which add up in the order that fused
ones do, and in torch's default layout, whose difference is what another order of adding makes. Each case runs in a
process of its own, whose peak resident memory (torch and Python included) is what counts.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from fusion import batch, resnet

from _bench import save
from penstock.train import Data, Task
from penstock.train._fused_loop import FusedTrainer
from penstock.train._loop import Trainer, private_randomness

LIMIT_GB = 8.0


def trainer(task: Task, member: int) -> Trainer:
    return Trainer(task, {"lr": 0.001 * (1 + member % 50)}, seed=member)


def case(members: int, most: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train all members; the peak memory, and the worst difference to members trained alone."""
    x, y = batch((3, 32, 32), given.steps * given.batch)
    task = Task(
        lambda: resnet(8),
        Data((x, y)),
        F.cross_entropy,
        batch_size=given.batch,
        epochs=given.epochs,
        defaults={"momentum": 0.9},
    )
    before_s = time.process_time()
    trainers = [trainer(task, member) for member in range(members)]
    built_s, before_s = time.process_time() - before_s, time.process_time()
    fused = FusedTrainer(trainers, most=most)
    losses: list[list[float]] = [[] for _ in trainers]
    for _ in range(given.epochs):
        results = fused.train_epoch()
        for kept, each in zip(losses, trainers, strict=True):
            found = results[each]
            if isinstance(found, Exception):
                raise SystemExit(f"a member failed: {found}")
            kept.append(found["train_loss"])
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    trained_s = time.process_time() - before_s
    alive = {t.data_ptr() for each in trainers for t in each.model.parameters()}
    momenta = sum(s["momentum_buffer"].numel() for each in trainers for s in each.optimizer.state.values())
    weights = sum(p.numel() for each in trainers for p in each.model.parameters())
    if len(alive) != members * len(list(trainers[0].model.parameters())) or momenta != weights:
        raise SystemExit("not every member has weights and momentum of its own")
    sample = range(0, members, max(1, members // given.sample))
    worst = {}
    for layout in (torch.channels_last, torch.contiguous_format):
        worst[layout] = 0.0
        for member in sample:
            with private_randomness():
                alone = trainer(task, member)
                alone.model.to(memory_format=layout)
                for epoch in range(given.epochs):
                    loss = alone.train_epoch()["train_loss"]
                    worst[layout] = max(worst[layout], abs(loss - losses[member][epoch]) / abs(loss))
    return {
        "members": members,
        "group": most,
        "groups": len(fused.counts),
        "batch_size": given.batch,
        "epochs": given.epochs,
        "steps": given.steps * given.epochs,
        "peak_gb": peak_gb,
        "state_gb": 8 * weights / 1e9,
        "build_cpu_s": built_s,
        "train_cpu_s": trained_s,
        "finite": sum(all(map(math.isfinite, each)) for each in losses),
        "one_after_another": len(fused.reasons),
        "compared": len(sample),
        "worst_relative_difference_of_loss": worst[torch.channels_last],
        "worst_relative_difference_of_loss_in_default_layout": worst[torch.contiguous_format],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of an epoch")
    parser.add_argument("--sample", type=int, default=8, help="members that are compared")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        print(json.dumps(case(given.members, given.case, given)))
        return
    results = []
    for most in given.groups:
        command = [sys.executable, __file__, "--case", str(most)]
        for name in ("members", "batch", "epochs", "steps", "sample"):
            command += [f"--{name}", str(getattr(given, name))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results.append(found)
        verdict = "within" if found["peak_gb"] <= LIMIT_GB else "ABOVE"
        print(
            f"{found['members']} members in groups of {most}: peak {found['peak_gb']:.2f} GB ({verdict} "
            f"{LIMIT_GB:g} GB), {found['train_cpu_s']:.0f} s of CPU for {found['steps']} steps each, losses differ "
            f"from those alone by {found['worst_relative_difference_of_loss']:.1e} at most "
            f"({found['worst_relative_difference_of_loss_in_default_layout']:.1e} in the default layout)",
            flush=True,
        )
        if given.save:
            text = " ".join(["python", *sys.argv])
            save("hydro_members", text, {"cases": results}, ("torch",), whole=most == given.groups[-1])


if __name__ == "__main__":
    main()
