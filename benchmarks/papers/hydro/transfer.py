"""Do hyperparameters transfer from a model an eighth as wide? Hydro, Fig. 10 (a-d), on CPU-sized models.

Run with: OMP_NUM_THREADS=1 python benchmarks/papers/hydro/transfer.py [--models mlp resnet resnet128] [--save]

Ten random configurations (learning rate, momentum or beta1, batch size) train to the end on the full model and on its
narrow twin; the figures are the rank correlation (Spearman) of the final training losses and whether the best one on
the twin is the full model's best or second best. Standard parametrization, the same two widths built by the factory
and trained as they are, stands beside it. A training that diverges ranks last.

A final loss is the mean over ``--seeds`` seeds (initial weights and data order), and each width's own noise is told
beside it: ``noise`` is the rank correlation of one width with itself under other seeds (the mean over the pairs of
seeds). No transfer can be expected to rank better than a width ranks itself. ``--thin-seeds`` gives the twins, which
are cheap, more seeds than the full model. ``resnet128`` is a model whose twin has 16 channels instead of 8.

The images are 2,000 of Fashion-MNIST, averaged down to 14 x 14. The 640 digits used first were learnt by heart: most
losses of the full ResNet with Adam lay between 0.03 and 0.06, it agreed with itself under another seed by no more than
0.78, and nobody can rank the ten configurations then.

``--space moderate`` (default) ends below the learning rates where these models get unstable; ``--space paper`` has the
ranges of Hydro's Table 2 (SGD lr 1e-4..1, momentum 0.5..0.999; Adam lr 1e-5..0.1), far beyond that edge.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.papers.sm2.problems import fashion

import penstock as pk
from _bench import earlier, save, unfinished
from penstock.train._loop import Trainer, private_randomness

FACTOR = 8


def mlp(config, width=256):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(196, width),
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


def wide_resnet(config, width=128):
    """Its twin has 16 channels."""
    return resnet(config, width)


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


def images():
    return fashion(2000, val=500)


def digits(count=800):
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:count, None] / 8 - 1
    return pk.Data.split(images, torch.tensor(data.target)[:count], val=0.2)


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
    "mlp": (mlp, images, F.cross_entropy, 8),
    "resnet": (resnet, images, F.cross_entropy, 4),
    "resnet128": (wide_resnet, images, F.cross_entropy, 4),
    "transformer": (transformer, sentences, language_loss, 8),
}
USUAL = ["mlp", "resnet", "transformer"]
OPTIMIZERS = {
    "SGD": (
        torch.optim.SGD,
        {
            "moderate": {"lr": pk.Float(1e-3, 0.3, log=True), "momentum": pk.Float(0.5, 0.9)},
            "paper": {"lr": pk.Float(1e-4, 1.0, log=True), "momentum": pk.Float(0.5, 0.999)},
        },
    ),
    "Adam": (
        torch.optim.Adam,
        {
            "moderate": {"lr": pk.Float(1e-4, 0.03, log=True), "beta1": pk.Float(0.5, 0.95)},
            "paper": {"lr": pk.Float(1e-5, 0.1, log=True), "beta1": pk.Float(0.5, 0.95)},
        },
    ),
}
WORST = 1e9
"""The loss of a training that diverged: it ranks last."""


def final_losses(task, config, epochs, seeds):
    losses = []
    for seed in range(1, seeds + 1):
        with private_randomness():
            trainer = Trainer(task, config, seed=seed)
            for _ in range(epochs):
                metrics = trainer.train_epoch()
                if not math.isfinite(metrics["train_loss"]):
                    break
        loss = metrics["train_loss"]
        losses.append(loss if math.isfinite(loss) else WORST)
    return losses


def spearman(one, two):
    a, b = rankdata(one), rankdata(two)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


def narrow(factory, width):
    return lambda config: factory(config, width=width)


def noise(losses):
    """How well a width ranks as itself under another seed; ``losses`` by configuration and seed."""
    runs = list(zip(*losses, strict=True))
    pairs = list(itertools.combinations(runs, 2))
    return statistics.fmean(spearman(a, b) for a, b in pairs) if pairs else None


def error(chosen, best):
    """The standard error of the difference of two means; None with one seed. A regret below it is a tie."""
    if len(chosen) < 2:
        return None
    return math.sqrt((statistics.variance(chosen) + statistics.variance(best)) / len(chosen))


def compare(name, optimizer, given):
    factory, data, loss, epochs = PROBLEMS[name]
    epochs = given.epochs or epochs
    make, spaces = OPTIMIZERS[optimizer]
    full = factory.__defaults__[0]
    task = pk.Task(factory, data(), loss, optimizer=make, epochs=epochs)
    small = pk.Task(narrow(factory, full // FACTOR), task.data, loss, optimizer=make, epochs=epochs)
    twin = task.narrowed(pk.Shrink(FACTOR))
    space = pk.Space(**spaces[given.space], batch_size=pk.Choice(16, 32, 64))
    configs = [space.sample(given.first + number) for number in range(given.count)]
    sides = {"Penstock": (task.at(twin.surrogate).full(), twin), "standard": (task, small)}
    losses = {side: ([], []) for side in sides}
    seconds = [0.0, 0.0]
    for config in configs:  # interleaved
        for side, pair in sides.items():
            for place, each in enumerate(pair):
                begun = time.perf_counter()
                seeds = max(given.seeds, given.thin_seeds) if place else given.seeds
                losses[side][place].append(final_losses(each, config, epochs, seeds))
                seconds[place] += time.perf_counter() - begun
    rows = {}
    for side, (wide_all, thin_all) in losses.items():
        wide, thin = ([statistics.fmean(each) for each in losses] for losses in (wide_all, thin_all))
        order = sorted(range(given.count), key=wide.__getitem__)
        chosen = min(range(given.count), key=thin.__getitem__)
        rows[side] = {
            "rank_correlation": spearman(wide, thin),
            "place_of_the_twins_best": order.index(chosen) + 1,
            "regret": wide[chosen] - min(wide),
            "standard_error_of_regret": error(wide_all[chosen], wide_all[order[0]]),
            "noise": {"wide": noise(wide_all), "thin": noise(thin_all)},
            "wide": wide_all,
            "thin": thin_all,
        }
    thin_seeds = max(given.seeds, given.thin_seeds)
    return {
        "epochs": epochs,
        "seeds": given.seeds,
        "thin_seeds": thin_seeds,
        "configs": configs,
        **rows,
    }, seconds


def shown(value):
    return "     -" if value is None else f"{value:6.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=USUAL, choices=list(PROBLEMS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--space", default="moderate", choices=["moderate", "paper"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--first", type=int, default=7000, help="seed of the first configuration")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--thin-seeds", type=int, default=0, help="default: as many as --seeds")
    parser.add_argument("--epochs", type=int, default=0, help="default: each model's own")
    parser.add_argument("--save", nargs="?", const="hydro_transfer", help="a name other than hydro_transfer")
    given = parser.parse_args()
    torch.set_num_threads(1)
    everything = {"space": given.space, "first_configuration": given.first, "pairs": {}}
    pairs = [f"{name} {optimizer}" for name in given.models for optimizer in given.optimizers]
    begun = unfinished(given.save) if given.save else None
    kept = begun
    if begun is not None:
        everything["pairs"] = begun["results"]["pairs"]
    elif given.save and (before := earlier(given.save)):  # pairs may be measured one by one
        others = {key: rows for key, rows in before["results"]["pairs"].items() if key not in pairs}
        same = all(before["results"].get(key) == everything[key] for key in ("space", "first_configuration"))
        if same and others:
            kept, everything["pairs"] = before, others
    print(
        "model        optimizer parametrization  rank corr.  place   regret  noise: wide  twin  full s  twin s"
    )
    for name in given.models:
        for optimizer in given.optimizers:
            if begun is not None and f"{name} {optimizer}" in begun["results"]["pairs"]:
                continue
            rows, seconds = compare(name, optimizer, given)
            everything["pairs"][f"{name} {optimizer}"] = rows
            for side in ("Penstock", "standard"):
                row = rows[side]
                print(
                    f"{name:<12} {optimizer:<9} {side:<15} {row['rank_correlation']:>11.3f} "
                    f"{row['place_of_the_twins_best']:>6} {row['regret']:>8.4f}      {shown(row['noise']['wide'])} "
                    f"{shown(row['noise']['thin'])} {seconds[0]:>7.1f} {seconds[1]:>7.1f}",
                    flush=True,
                )
            if given.save:
                command = " ".join(["python", *sys.argv])
                whole = f"{name} {optimizer}" == pairs[-1]
                save(given.save, command, everything, ("torch",), kept=kept, whole=whole)


if __name__ == "__main__":
    main()
