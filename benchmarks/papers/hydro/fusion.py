"""Hydro, inter-trial fusion: member-steps per CPU second, fused against one after another and against 2 processes.

The rule: every contender does the same optimizer steps on the same shapes with one thread per process, and is
charged the CPU time its processes used, so that a second process is not a second machine and what else runs here
counts for nobody. The baseline is the plain loop (zero_grad, forward, backward, step) over batches that lie ready
in memory, convolutions in channels_last too, and the faster of the two layouts counts. Contenders take turns.

    python benchmarks/papers/hydro/fusion.py [--models mlp16 cnn] [--repeats 5] [--compile] [--save]

Convolutions are measured on several image sizes, for the smaller the image the more of a step is calls, which fusion
saves. The goal names no size, so every size is held against it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from _bench import interleave, save, spread
from penstock.core.errors import Unsupported
from penstock.model import FusedOptimizer, FusedStep, Fusion, group_names
from penstock.plan import choose_count
from penstock.train import Data, Task
from penstock.train._fused_loop import check, measure

BATCH = 32
GOALS = {
    "mlp16": (16, 15.0),
    "mlp128": (16, 3.5),
    "transformer": (16, 1.8),
    "resnet8-8": (8, 1.9),
    "resnet8-16": (8, 1.9),
    "resnet8-32": (8, 1.9),
    "cnn": (8, 1.4),
    "cnn28": (8, 1.4),
}
"""By model (with images: and their side): the count of the goal, and the gain over one after another."""


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Transformer(nn.Module):
    """Two layers of width 32 over 16 tokens, without dropout: masks cost each member what they cost it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embed(x)).mean(1))
        return out


class Block(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.short = (
            nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or wide != out
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.short(x))


def resnet(width: int) -> nn.Module:
    """ResNet-18 as for CIFAR (no pooling in the stem); ``width`` channels in the first stage."""
    stages: list[nn.Module] = []
    wide = width
    for number in range(4):
        out = width * 2**number
        stages += [Block(wide, out, 2 if number else 1), Block(out, out, 1)]
        wide = out
    stem = (nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10))


def cnn(side: int) -> nn.Module:
    """Two convolutions of 16 and 32 channels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "mlp16": (lambda: mlp(16), (64,)),
    "mlp128": (lambda: mlp(128), (64,)),
    "transformer": (Transformer, None),
    "resnet8-8": (lambda: resnet(8), (3, 8, 8)),
    "resnet8-16": (lambda: resnet(8), (3, 16, 16)),
    "resnet8-32": (lambda: resnet(8), (3, 32, 32)),
    "cnn": (lambda: cnn(8), (1, 8, 8)),
    "cnn28": (lambda: cnn(28), (1, 28, 28)),
}


def batch(shape: tuple[int, ...] | None, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if shape is None:
        x = torch.randint(64, (*leading, 16), generator=generator)
    else:
        x = torch.randn(*leading, *shape, generator=generator)
    return x, torch.randint(10, leading, generator=generator)


def optimizer_of(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def rate(step: Callable[[], None], members: int, seconds: float) -> float:
    """Member-steps per CPU second."""
    step()
    begin_s, end_s, steps = time.process_time(), time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s or steps < 3:
        step()
        steps += 1
    return steps * members / (time.process_time() - begin_s)


def plain_loop(name: str, *, last: bool = False) -> Callable[[], None]:
    """One step of the loop that everybody writes."""
    make, shape = MODELS[name]
    model = make()
    x, y = batch(shape, BATCH)
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def fused_loop(name: str, count: int, form: str) -> tuple[Callable[[], None], float]:
    """A fused step of ``count`` members, and what recording or compiling it took."""
    make, shape = MODELS[name]
    models = [make() for _ in range(count)]
    optimizers = [optimizer_of(model, 0.01 * (1 + i)) for i, model in enumerate(models)]
    fusion = Fusion(models, groups=group_names(models[0], optimizers[0]))
    optimizer = FusedOptimizer(fusion.stack, optimizers)
    optimizer.adopt(range(count))
    step = FusedStep(fusion, optimizer, lambda model, x, y: F.cross_entropy(model(x), y))
    x, y = batch(shape, count, BATCH)
    cost_s = 0.0
    step(x, y)
    if form != "plain":
        cost_s = step.record(x, y, compile=form == "compiled").seconds

    def run() -> None:
        step(x, y)

    return run, cost_s


def serve(name: str, last: bool, pipe: Any) -> None:
    """One of the parallel processes: runs for as long as it is told, tells its rate."""
    torch.set_num_threads(1)
    step = plain_loop(name, last=last)
    while (seconds := pipe.recv()) is not None:
        pipe.send(rate(step, 1, seconds))


class Parallel:
    """Two processes with one thread each: their mean rate per CPU second is that of a core."""

    def __init__(self, name: str, last: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, last, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, seconds: float) -> float:
        for pipe in self.pipes:
            pipe.send(seconds)
        return sum(pipe.recv() for pipe in self.pipes) / 2

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def task_of(name: str) -> Task:
    make, shape = MODELS[name]
    x, y = batch(shape, 4 * BATCH)
    return Task(make, Data((x, y)), F.cross_entropy, batch_size=BATCH, defaults={"momentum": 0.9})


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    task = task_of(name)
    configs = [{"lr": 0.01 * (1 + i)} for i in range(4)]

    def measured(count: int) -> tuple[float, int] | None:
        try:
            return measure(task, configs, count)
        except Unsupported:
            return None

    choice = choose_count(measured, options.trials)
    checked = check(task, configs[:2])
    wanted, goal = GOALS[name]
    counts = sorted({wanted, choice.count} - {1})
    print(f"{name}: the planner chose {choice.count}: {choice.reason}; float64 error {checked.error:.1e}")
    image = name.startswith(("resnet", "cnn"))
    steps = {"one after another": plain_loop(name)}
    if image:
        steps["one after another, channels_last"] = plain_loop(name, last=True)
    warm = {key: rate(step, 1, options.seconds) for key, step in steps.items()}
    parallel = Parallel(
        name, last=image and warm["one after another, channels_last"] > warm["one after another"]
    )
    contenders: dict[str, Callable[[], float]] = {
        key: (lambda step=step: rate(step, 1, options.seconds)) for key, step in steps.items()
    }
    contenders["2 processes"] = lambda: parallel(options.seconds)
    costs = {}
    for count in counts:
        for form in ("plain", "recorded", *(("compiled",) if options.compile else ())):
            try:
                step, costs[f"{form} x{count}"] = fused_loop(name, count, form)
            except Unsupported as error:
                print(f"  {form} x{count}: {error}")
                continue
            contenders[f"{form} x{count}"] = lambda step=step, count=count: rate(step, count, options.seconds)
    try:
        rates = interleave(contenders, options.repeats)
    finally:
        parallel.close()
    found = {key: spread(values) for key, values in rates.items()}
    base = max(found[key]["median"] for key in steps)
    result: dict[str, Any] = {
        "planner": {**choice.to_json(), "float64_error": checked.error, "check": checked.ok},
        "member_steps_per_cpu_s": found,
        "seconds_to_record_or_compile": costs,
        "goal": {"count": wanted, "gain": goal},
        "gain": {},
    }
    for count in counts:
        forms = {key: value["median"] for key, value in found.items() if key.endswith(f" x{count}")}
        best = max(forms, key=lambda key: forms[key])
        result["gain"][str(count)] = {
            "form": best.split()[0],
            "over_one_after_another": forms[best] / base,
            "over_2_processes": forms[best] / found["2 processes"]["median"],
            "plain_over_one_after_another": forms[f"plain x{count}"] / base,
        }
        print(
            f"  {name} x{count}: {forms[best] / base:.2f} times one after another ({best.split()[0]}), "
            f"{forms[best] / found['2 processes']['median']:.2f} times 2 processes; goal {goal} at {wanted}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--trials", type=int, default=64, help="how many trials the planner has to place")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.models:
        results[name] = compare(name, options)
        if options.save:
            command = " ".join(["python", *sys.argv])
            save("hydro_fusion", command, results, ("torch",), whole=name == options.models[-1])


if __name__ == "__main__":
    main()
