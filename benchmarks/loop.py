"""The training loop against a hand-written one, and the loader against torch's DataLoader.

    python -m benchmarks.loop [--repeats N] [--loader-only]

Interleaved, medians of the ratios of neighbouring epochs (short ones, and many: what else the machine does then hits
both alike), one thread. Hand-written: a permutation, indexing, forward, loss, zero_grad,
backward, step, and nothing else (no DataLoader, no metrics, no .item()). Penstock: an epoch of
Trainer, as every trial runs it, with its loader. There is no validation data on either side.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from benchmarks._bench import save, spread, text
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.train import Data, Task
from penstock.train._loader import Preloaded, order_of
from penstock.train._loop import Trainer


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 10),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def cases(scale: float) -> dict[str, tuple]:
    n = lambda rows: max(128, int(rows * scale))  # noqa: E731
    g = torch.Generator().manual_seed(0)
    images = torch.randn(n(12800), 1, 28, 28, generator=g)
    labels = torch.randint(0, 10, (len(images),), generator=g)
    tokens = torch.randint(0, 64, (n(1600), 33), generator=g)
    return {
        "MLP": (mlp, images, labels, F.cross_entropy),
        "CNN": (cnn, images[: n(3200)], labels[: n(3200)], F.cross_entropy),
        "transformer": (Transformer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), token_loss),
    }


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of, x, y, size: int) -> None:
    model.train()
    order = torch.randperm(len(x))
    for i in range(0, len(x), size):
        index = order[i : i + size]
        loss = loss_of(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loop(repeats: int, scale: float, size: int = 64) -> dict[str, object]:
    results: dict[str, object] = {}
    print(
        f"{'model':12s} {'by hand ms/step':>16s} {'penstock ms/step':>17s} {'ratio':>7s}   batch {size}, SGD, 1 thread"
    )
    for name, (make, x, y, loss_of) in cases(scale).items():
        task = Task(make, Data((x, y)), loss_of, defaults={"momentum": 0.9})
        trainer = Trainer(task, {"lr": 1e-3, "batch_size": size}, seed=0)
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        hand, ours = [], []
        for repeat in range(repeats + 1):
            pair = [("hand", hand), ("ours", ours)]
            for which, times in pair if repeat % 2 else pair[::-1]:
                start = time.process_time()  # CPU time: the machine may be shared
                if which == "hand":
                    by_hand(model, optimizer, loss_of, x, y, size)
                else:
                    trainer.train_epoch()
                if repeat:
                    times.append((time.process_time() - start) / -(-len(x) // size) * 1e3)
        ratios = [o / h for o, h in zip(ours, hand, strict=True)]
        print(
            f"{name:12s} {statistics.median(hand):16.3f} {statistics.median(ours):17.3f} {text(ratios):>7s}",
            flush=True,
        )
        results[name] = {"by hand ms": spread(hand), "penstock ms": spread(ours), "ratio": spread(ratios)}
    return results


def loader(repeats: int, scale: float) -> dict[str, object]:
    results: dict[str, object] = {}
    n = int(25600 * scale)
    x, y = torch.randn(n, 784), torch.randint(0, 10, (n,))
    source = Preloaded((x, y), torch.device("cpu"))
    print(f"\n{n} x 784 floats, shuffled")
    print(f"{'batch':>6s} {'DataLoader us/batch':>20s} {'penstock us/batch':>18s} {'faster':>7s}")
    for size in (16, 64, 256, 1024):
        torch_times, our_times = [], []
        for epoch in range(repeats):
            start = time.process_time()
            for _batch in DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True):
                pass
            torch_times.append(time.process_time() - start)
            start = time.process_time()
            for _batch in source.batches(size, order=order_of(n, 0, epoch)):
                pass
            our_times.append(time.process_time() - start)
        a, b = statistics.median(torch_times), statistics.median(our_times)
        steps = -(-n // size)
        print(f"{size:6d} {a / steps * 1e6:20.1f} {b / steps * 1e6:18.1f} {a / b:6.1f}x", flush=True)
        results[f"batch {size}"] = spread([t / o for t, o in zip(torch_times, our_times, strict=True)])
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data")
    parser.add_argument("--loader-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {} if args.loader_only else {"loop": loop(args.repeats, args.scale)}
    results["loader, times faster than DataLoader"] = loader(args.repeats, args.scale)
    save("loop", "python -m benchmarks.loop", results, ["torch"])


if __name__ == "__main__":
    main()
