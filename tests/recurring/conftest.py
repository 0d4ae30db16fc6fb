"""Small synthetic traces in the published format, for the tests of this room."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.recurring._synthetic import Gpu, epochs_table, power_table
from penstock.recurring._traces import Workload

SIZES = (8, 16, 32, 64, 128, 256)


def small_workload(
    *,
    critical: float = 100.0,
    small: float = 4.0,
    default: int = 256,
    noise: float = 0.05,
    saturation: float = 30.0,
    fails_below: int = 0,
    gpu: Gpu | None = None,
    sizes: tuple[int, ...] = SIZES,
    least: float = 15.0,
) -> Workload:
    epochs = epochs_table(
        sizes,
        least=least,
        critical=critical,
        small=small,
        noise=noise,
        wiggle=0.0,
        fails_below=fails_below,
        fails_above=10**9,
        runs=6,
        rng=random.Random(3),
    )
    device = gpu or Gpu()
    power = power_table(device, sizes, epoch_s=60.0, saturation=saturation, rise=0.0, rng=random.Random(4))
    return Workload("small", "net", "sgd", 0.9, default, epochs, power, max(device.limits_w), 400)


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    return small_workload


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Two workloads: one of the paper's names, which gets its target and default, and one of nobody's."""
    train, power = tmp_path / "summary_train.csv", tmp_path / "summary_power_x.csv"
    rng = random.Random(0)
    lines = ["dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch"]
    for size in (128, 256, 512, 1024, 2048):
        for run in range(3):
            for target, factor in ((0.5, 0.5), (0.6, 1.0)):
                epochs = max(1, round(factor * 20 * (1 + size / 500) * (1 + rng.gauss(0, 0.05))))
                lines.append(f"cifar100,shufflenetv2,{size},adadelta,1e-1,{run},{target},{epochs}")
    for size in (4, 8, 16, 32):
        for run in range(3):
            lines.append(f"my-data,mlp,{size},sgd,0.1,{run},0.7,{10 + size // 8}")
            reached = "" if size == 32 and run == 1 else 20 + size // 4
            lines.append(f"my-data,mlp,{size},sgd,0.1,{run},0.8,{reached}")
            lines.append(f"my-data,mlp,{size},sgd,0.1,{run},0.9,{'' if size > 4 else 90}")
    train.write_text("\n".join(lines) + "\n")
    lines = ["dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power"]
    tables = {
        ("cifar100", "shufflenetv2", "adadelta"): (64, 128, 256, 512, 1024),
        ("my-data", "mlp", "sgd"): (4, 8, 16, 32),
    }
    gpu = Gpu(limits_w=(90.0, 140.0, 190.0), full_w=180.0)
    for (dataset, network, optimizer), sizes in tables.items():
        table = power_table(gpu, sizes, epoch_s=30.0, saturation=20.0, rise=0.0, rng=rng)
        for size in sizes:
            for limit, (time_s, power_w) in table[size].items():
                lines.append(f"{dataset},{network},{size},{optimizer},{limit:g},{time_s},{power_w}")
    power.write_text("\n".join(lines) + "\n\n")
    return train, power
