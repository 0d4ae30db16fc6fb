"""Made-up recurring jobs and GPUs with known optima: for tests, drift studies and held-out validation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.recurring._traces import Workload


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as a few numbers.

    Attributes:
        limits_w: The power limits it can be set to.
        idle_w: What it draws when it waits.
        full_w: What it would draw fully busy without a limit.
        speed: Relative compute speed.
        gamma: Speed ~ (power above idle) ** gamma when a limit binds; diminishing returns for gamma < 1.
        noise: Relative spread of measurements.
    """

    limits_w: tuple[float, ...] = (100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0)
    idle_w: float = 40.0
    full_w: float = 230.0
    speed: float = 1.0
    gamma: float = 0.6
    noise: float = 0.01


def power_table(
    gpu: Gpu,
    batch_sizes: Sequence[int],
    *,
    epoch_s: float,
    saturation: float,
    rise: float,
    rng: random.Random,
) -> dict[int, dict[float, tuple[float, float]]]:
    """Time and power of an epoch for each batch size and power limit.

    Args:
        gpu: The device.
        batch_sizes: The batch sizes.
        epoch_s: Compute time of an epoch at full speed.
        saturation: The batch size at which half of the time is overhead.
        rise: Growth of compute time per octave (padding, caches); may be negative.
        rng: For measurement noise.
    """
    table: dict[int, dict[float, tuple[float, float]]] = {}
    for size in batch_sizes:
        compute_s = epoch_s / gpu.speed * (1.0 + rise) ** math.log2(size / batch_sizes[0])
        overhead_s = epoch_s * saturation / size
        row: dict[float, tuple[float, float]] = {}
        for limit in gpu.limits_w:
            busy = compute_s / (compute_s + overhead_s)
            demand_w = gpu.idle_w + (gpu.full_w - gpu.idle_w) * busy
            slow = 1.0
            if demand_w > limit:
                slow = ((demand_w - gpu.idle_w) / (limit - gpu.idle_w)) ** gpu.gamma
            time_s = compute_s * slow + overhead_s
            row[limit] = (
                time_s * (1.0 + rng.gauss(0.0, gpu.noise)),
                min(demand_w, 0.98 * limit) * (1.0 + rng.gauss(0.0, gpu.noise)),
            )
        table[size] = row
    return table


def epochs_table(
    batch_sizes: Sequence[int],
    *,
    least: float,
    critical: float,
    small: float,
    noise: float,
    wiggle: float,
    fails_below: int,
    fails_above: int,
    runs: int,
    rng: random.Random,
) -> dict[int, tuple[int | None, ...]]:
    """Recorded epochs to target of each batch size.

    Args:
        batch_sizes: The batch sizes.
        least: Epochs of a small enough batch.
        critical: Where epochs have doubled.
        small: Below this, gradients are too noisy and epochs grow again.
        noise: Relative spread between runs of one batch size.
        wiggle: Relative departure of a batch size from the smooth curve.
        fails_below: Smaller ones never reach the target.
        fails_above: Larger ones never reach the target.
        runs: Runs recorded per batch size.
        rng: The source of randomness.
    """
    table: dict[int, tuple[int | None, ...]] = {}
    for size in batch_sizes:
        mean = least * (1.0 + size / critical + (small / size) ** 2) * math.exp(rng.gauss(0.0, wiggle))
        if size < fails_below or size > fails_above:
            table[size] = (None,) * runs
        else:
            table[size] = tuple(max(1, round(mean * math.exp(rng.gauss(0.0, noise)))) for _ in range(runs))
    return table


def synthetic_workload(seed: int) -> Workload:
    """A random recurring job on a random GPU, all of it a function of ``seed``."""
    rng = random.Random(f"penstock.synthetic/{seed}")
    count = rng.randint(5, 13)
    first = rng.choice([2, 4, 8, 16])
    sizes = [first * 2**k for k in range(count)]
    if rng.random() < 0.4:  # finer grids, as in the paper's speech and question-answering jobs
        sizes = sorted({*sizes, *(s * 3 // 2 for s in sizes[:-1] if s >= 4)})
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    gpu = random_gpu(rng)
    epochs = epochs_table(
        sizes,
        least=math.exp(rng.uniform(math.log(3), math.log(60))),
        critical=2 ** rng.uniform(low, high + 3),
        small=2 ** rng.uniform(low - 4, low + 1),
        noise=rng.uniform(0.02, 0.15),
        wiggle=rng.uniform(0.0, 0.08),
        fails_below=sizes[rng.choice([0, 0, 0, 1, 2])],
        fails_above=sizes[rng.choice([-1, -1, -1, -2])],
        runs=5,
        rng=rng,
    )
    power = power_table(
        gpu,
        sizes,
        epoch_s=math.exp(rng.uniform(math.log(5), math.log(5000))),
        saturation=2 ** rng.uniform(low - 3, high + 1),
        rise=rng.uniform(-0.03, 0.05),
        rng=rng,
    )
    steady = [b for b in sizes if all(e is not None for e in epochs[b])]
    default = rng.choice(steady[len(steady) // 2 :])
    most = max(e for runs in epochs.values() for e in runs if e is not None)
    return Workload(
        f"synthetic-{seed}", "none", "sgd", 1.0, default, epochs, power, max(gpu.limits_w), 2 * most
    )


def random_gpu(rng: random.Random) -> Gpu:
    """A random GPU within what data-centre cards do."""
    top = rng.choice([250.0, 260.0, 300.0, 350.0, 400.0])
    bottom = rng.choice([100.0, 125.0, 150.0])
    return Gpu(
        tuple(bottom + 25.0 * k for k in range(int((top - bottom) // 25) + 1)),
        idle_w=rng.uniform(0.1, 0.3) * top if bottom > 0.35 * top else 0.1 * top,
        full_w=rng.uniform(0.75, 1.0) * top,
        speed=rng.uniform(0.5, 3.0),
        gamma=rng.uniform(0.3, 0.9),
    )


def on_gpu(workload: Workload, gpu: Gpu, seed: int) -> Workload:
    """The same training on another, made-up GPU: epochs as recorded, power traces simulated.

    How saturated the recorded device was at each batch size is read off its time per epoch.
    """
    rng = random.Random(f"penstock.on_gpu/{workload.name}/{seed}")
    times = {b: profile[max(profile)][0] for b, profile in workload.power.items()}
    compute_s = min(times.values())
    smallest = min(times)
    saturation = max(0.0, times[smallest] / compute_s - 1.0) * smallest
    power = power_table(
        gpu, workload.batch_sizes, epoch_s=compute_s, saturation=saturation, rise=0.0, rng=rng
    )
    return Workload(
        workload.name,
        workload.network,
        workload.optimizer,
        workload.target,
        workload.default,
        workload.epochs,
        power,
        max(gpu.limits_w),
        workload.max_epochs,
    )
