"""Do hyperparameters transfer from a model an eighth as wide? Hydro, Fig. 10 (a-d), on CPU-sized models.

Run with: OMP_NUM_THREADS=1 python benchmarks/papers/hydro/transfer.py [--models mlp resnet transformer] [--seeds 1]

Ten random configurations (learning rate, momentum, batch size) train to the end on the full model and on its narrow
twin; the figures are the rank correlation (Spearman) of the final training losses and whether the best one on the
twin is the full model's best or second best. Standard parametrization, the same two widths built by the factory and
trained as they are, stands beside it. A training that diverges ranks last. The space ends below the learning rates
at which these models get unstable: near that edge the narrow twin is a little more stable than the full model (SGD at
lr 0.8 with momentum 0.9 stalls the full MLP and not its twin), and ranks differ there.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import nn

import penstock as pk
from penstock.train._loop import Trainer, private_randomness

FACTOR = 8


def mlp(config, width=256):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


def resnet(config, width=64):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


class Language(nn.Module):
    def __init__(self, width, vocabulary=24, length=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.5)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.triu(torch.ones(length, length, dtype=torch.bool), 1))

    def forward(self, x):
        x = self.tokens(x) + self.places
        return self.head(self.norm(self.layers(x, mask=self.mask)))


def transformer(config, width=128):
    return Language(width)


def language_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:800, None] / 8 - 1
    return pk.Data.split(images, torch.tensor(data.target)[:800], val=0.2)


def sentences(count=320, length=16, vocabulary=24):
    """Sequences in which the next token follows from the last one, or repeats the one before it.

    Both widths can learn that much. A chain too rich for the narrow twin would test its memory instead: what a model
    can't hold, no parametrization transfers.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocabulary, vocabulary, generator=generator).mul(3).softmax(-1)
    rows = torch.randint(0, vocabulary, (count, 2), generator=generator)
    for _ in range(length - 1):
        drawn = torch.multinomial(table[rows[:, -1]], 1, generator=generator)
        again = torch.rand(count, 1, generator=generator) < 0.3
        rows = torch.cat([rows, torch.where(again, rows[:, -2:-1], drawn)], 1)
    return pk.Data.split(rows[:, :-1].clone(), rows[:, 1:].clone(), val=0.2)


PROBLEMS = {
    "mlp": (mlp, digits, F.cross_entropy, 8),
    "resnet": (resnet, digits, F.cross_entropy, 4),
    "transformer": (transformer, sentences, language_loss, 8),
}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": pk.Float(1e-3, 0.3, log=True), "momentum": pk.Float(0.5, 0.9)}),
    "Adam": (torch.optim.Adam, {"lr": pk.Float(1e-4, 0.03, log=True), "beta1": pk.Float(0.5, 0.95)}),
}


def final_loss(task, config, epochs, seeds):
    losses = []
    for seed in range(1, seeds + 1):
        with private_randomness():
            trainer = Trainer(task, config, seed=seed)
            for _ in range(epochs):
                metrics = trainer.train_epoch()
        losses.append(metrics["train_loss"])
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else 1e9


def spearman(one, two):
    a, b = rankdata(one), rankdata(two)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


def narrow(factory, width):
    return lambda config: factory(config, width=width)


def compare(name, optimizer, count, seeds):
    factory, data, loss, epochs = PROBLEMS[name]
    make, domains = OPTIMIZERS[optimizer]
    full = factory.__defaults__[0]
    task = pk.Task(factory, data(), loss, optimizer=make, epochs=epochs)
    small = pk.Task(narrow(factory, full // FACTOR), task.data, loss, optimizer=make, epochs=epochs)
    twin = task.narrowed(pk.Shrink(FACTOR))
    space = pk.Space(**domains, batch_size=pk.Choice(16, 32, 64))
    configs = [space.sample(100 + number) for number in range(count)]
    sides = {"Penstock": (task.at(twin.surrogate).full(), twin), "standard": (task, small)}
    losses = {side: ([], []) for side in sides}
    seconds = [0.0, 0.0]
    for config in configs:  # interleaved
        for side, pair in sides.items():
            for place, each in enumerate(pair):
                begun = time.perf_counter()
                losses[side][place].append(final_loss(each, config, epochs, seeds))
                seconds[place] += time.perf_counter() - begun
    rows = {}
    for side, (wide, thin) in losses.items():
        order = sorted(range(count), key=wide.__getitem__)
        chosen = min(range(count), key=thin.__getitem__)
        rows[side] = {
            "rank correlation": spearman(wide, thin),
            "place of the twin's best": order.index(chosen) + 1,
            "regret": wide[chosen] - min(wide),
            "wide": wide,
            "thin": thin,
        }
    return rows, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", help="also write everything here")
    given = parser.parse_args()
    everything = {}
    print("model        optimizer parametrization  rank corr.  place   regret  full s  twin s")
    for name in given.models:
        for optimizer in given.optimizers:
            rows, seconds = compare(name, optimizer, given.count, given.seeds)
            everything[f"{name} {optimizer}"] = rows
            for side, row in rows.items():
                place, regret = row["place of the twin's best"], row["regret"]
                print(
                    f"{name:<12} {optimizer:<9} {side:<15} {row['rank correlation']:>11.3f} {place:>6} "
                    f"{regret:>8.4f} {seconds[0]:>7.1f} {seconds[1]:>7.1f}",
                    flush=True,
                )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
