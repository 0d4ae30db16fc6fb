"""Small real problems for the SM2 benchmarks: images, a periodic series, text."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock.train as pkt

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_given = Path(os.environ.get("PENSTOCK_DATA", "")) / "fashion-mnist"
FASHION = _given if os.environ.get("PENSTOCK_DATA") and _given.is_dir() else DEBIAN


def fashion(n: int, *, val: int = 1000, pool: int = 2) -> pkt.Data:
    """Fashion-MNIST, the first ``n`` images, averaged down by ``pool``."""
    if not FASHION.exists():
        raise SystemExit(
            f"Fashion-MNIST is not at {FASHION}: install the Debian package dataset-fashion-mnist, "
            "or set PENSTOCK_DATA to a folder where fashion-mnist has its four .gz files."
        )

    def images(name: str, count: int) -> Tensor:
        with gzip.open(FASHION / f"{name}-images-idx3-ubyte.gz") as file:
            raw = file.read(16 + 784 * count)[16:]
        x = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
        return (F.avg_pool2d(x, pool) - 0.286) / 0.353

    def labels(name: str, count: int) -> Tensor:
        with gzip.open(FASHION / f"{name}-labels-idx1-ubyte.gz") as file:
            raw = file.read(8 + count)[8:]
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()

    return pkt.Data(
        train=(images("train", n), labels("train", n)), val=(images("t10k", val), labels("t10k", val))
    )


def digits() -> pkt.Data:
    """scikit-learn's 8x8 digits."""
    from sklearn.datasets import load_digits

    d = load_digits()
    x = torch.tensor(d.data / 16, dtype=torch.float32)
    return pkt.Data.split(x, torch.tensor(d.target), val=0.2, seed=0)


def series(n: int, *, steps: int = 24, channels: int = 7, seed: int = 0, val: int | None = None) -> pkt.Data:
    """A periodic multivariate series (daily and weekly cycles with noise): forecast one channel an hour ahead."""
    g = torch.Generator().manual_seed(seed)
    val = n // 4 if val is None else val
    length = n + val + steps + 1
    t = torch.arange(length, dtype=torch.float32)
    phase = torch.rand(channels, generator=g) * 2 * math.pi
    amp = 0.5 + torch.rand(channels, generator=g)
    day = torch.sin(2 * math.pi * t[:, None] / 24 + phase) * amp
    week = torch.sin(2 * math.pi * t[:, None] / 168 + phase.flip(0)) * 0.5
    x = day + week + 0.5 * day.roll(1, 1) * week + 0.2 * torch.randn(length, channels, generator=g)
    windows = x.unfold(0, steps, 1)[: n + val].transpose(1, 2).contiguous()
    target = x[steps : steps + n + val, :1]
    return pkt.Data(train=(windows[:n], target[:n]), val=(windows[n:], target[n:]))


def text(n: int, *, length: int = 32, val: int = 400) -> tuple[pkt.Data, int]:
    """English text that every Python ships (its language reference), by characters."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[key] for key in sorted(topics))
    kept = sorted(set(joined), key=lambda c: (-joined.count(c), c))[
        :63
    ]  # ties: a set has no order of its own
    index = {c: i + 1 for i, c in enumerate(kept)}
    codes = torch.tensor([index.get(c, 0) for c in joined])
    rows = codes[: (len(codes) - 1) // length * length].view(-1, length)
    after = codes[1 : rows.numel() + 1].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    train, held = order[:n], order[n : n + val]
    return pkt.Data(train=(rows[train], after[train]), val=(rows[held], after[held])), 64


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def r2(output: Tensor, target: Tensor) -> Tensor:
    return 1 - ((output - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()


def next_char(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    return next_char(output, target).exp()


def next_char_accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


class Block(nn.Module):
    """A residual block."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.skip = nn.Identity() if a == b and stride == 1 else nn.Conv2d(a, b, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


def resnet(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


def mlp(inputs: int, *widths: int, outputs: int = 10) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def normed_mlp(inputs: int, width: int, norm: type[nn.Module], act: type[nn.Module]) -> nn.Module:
    """Two hidden layers with a norm each."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(2):
        layers += [nn.Linear(inputs, width), norm(width), act()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


class Forecast(nn.Module):
    """An LSTM (or another recurrent network) that forecasts from its last state."""

    def __init__(self, channels: int = 7, hidden: int = 24, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.lstm = kind(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Language(nn.Module):
    """A small causal transformer."""

    def __init__(self, vocab: int, d: int = 32, layers: int = 2, heads: int = 2, length: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.place = nn.Parameter(0.02 * torch.randn(length, d))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))
