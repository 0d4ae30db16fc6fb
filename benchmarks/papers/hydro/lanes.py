"""Hydro, inter-trial fusion of loops that users wrote: lanes (``run.prepare``) against the same loops in sequence.

The rule is that of ``fusion.py``: the same optimizer steps on the same shapes, one thread, charged the CPU time they
use, contenders in turn. Both sides run the same function, in which only ``prepare`` differs. The first steps (in lanes:
with the comparison that comes before fusion is trusted) count for nobody. ``loss inside`` is a model that returns its
loss, so that nothing is left for each lane to differentiate.

    python benchmarks/papers/hydro/lanes.py [--models mlp16 transformer] [--lanes 16] [--repeats 5] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from fusion import BATCH, MODELS, batch, optimizer_of

from _bench import interleave, save, spread
from penstock.train._lanes import Hub

WARM = 5


class WithLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), y)


class Clock:
    """CPU time from when all lanes are warm until all have ended."""

    def __init__(self, lanes: int) -> None:
        self.left = lanes
        self.begin_s = 0.0

    def warm(self) -> None:
        self.left -= 1
        if not self.left:
            self.begin_s = time.process_time()


def loop(name: str, number: int, steps: int, inside: bool, clock: Clock) -> Callable[[Any], None]:
    make, shape = MODELS[name]

    def train(lane: Any) -> None:
        torch.manual_seed(number)
        model = WithLoss(make()) if inside else make()
        optimizer = optimizer_of(model, 0.001 * (1 + number))
        if lane is not None:
            model, optimizer = lane.prepare(model, optimizer)
        x, y = batch(shape, BATCH)
        for step in range(WARM + steps):
            if step == WARM:
                clock.warm()
            optimizer.zero_grad()
            loss = model(x, y) if inside else F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    return train


def alone(name: str, lanes: int, steps: int, inside: bool) -> float:
    """Lane-steps per CPU second, one after another."""
    spent_s = 0.0
    for number in range(lanes):
        clock = Clock(1)
        loop(name, number, steps, inside, clock)(None)
        spent_s += time.process_time() - clock.begin_s
    return lanes * steps / spent_s


def together(name: str, lanes: int, steps: int, inside: bool) -> float:
    """Lane-steps per CPU second, in lanes."""
    clock = Clock(lanes)
    hub = Hub([loop(name, number, steps, inside, clock) for number in range(lanes)])
    hub.run()
    spent_s = time.process_time() - clock.begin_s
    for lane in hub.lanes:
        if lane.error is not None:
            raise lane.error
        if lane.fused != WARM + steps:
            raise RuntimeError(f"lane {lane.number} was fused in {lane.fused} of {WARM + steps} steps")
    return lanes * steps / spent_s


def main() -> None:
    """Compare, print and maybe save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["mlp16", "mlp128", "transformer"], choices=sorted(MODELS)
    )
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.models:
        print(name)
        contenders: dict[str, Callable[[], float]] = {}
        for inside in (False, True):
            given = (name, options.lanes, options.steps, inside)
            suffix = ", loss inside" if inside else ""
            contenders[f"one after another{suffix}"] = lambda given=given: alone(*given)  # type: ignore[misc]
            contenders[f"lanes{suffix}"] = lambda given=given: together(*given)  # type: ignore[misc]
        rates = interleave(contenders, options.repeats)
        found: dict[str, Any] = {key: spread(values) for key, values in rates.items()}
        for suffix in ("", ", loss inside"):
            pairs = zip(rates[f"lanes{suffix}"], rates[f"one after another{suffix}"], strict=True)
            ratios = [a / b for a, b in pairs]
            found[f"ratio{suffix}"] = spread(ratios)
            print(
                f"{name}{suffix}: {statistics.median(ratios):.2f}x (from {min(ratios):.2f} to {max(ratios):.2f}) "
                f"with {options.lanes} lanes"
            )
        results[name] = found
    if options.save:
        command = (
            f"python benchmarks/papers/hydro/lanes.py --lanes {options.lanes} --repeats {options.repeats}"
        )
        save("hydro_lanes", command, results, ["torch", "greenlet"])


if __name__ == "__main__":
    main()
