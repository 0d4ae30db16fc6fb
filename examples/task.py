# Run with: python examples/task.py
"""A Task on scikit-learn's digits: find a learning rate, then train with it."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as pk

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))


def digits():
    data = load_digits()
    return pk.Data.split(
        torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target), val=0.2
    )


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


# The parts; Penstock owns the loop. `width` reaches the network, `momentum` the optimizer, by name.
task = pk.Task(
    network, digits, F.cross_entropy, metrics={"accuracy": accuracy}, optimizer=torch.optim.SGD, epochs=10
)

if __name__ == "__main__":
    config = {"width": 64, "momentum": 0.9, "batch_size": 32}

    # One short sweep, on a copy: the largest learning rate that stays stable.
    found = pk.find_lr(task, config)
    print(f"lr {found.lr:.3g} ({found.reason}), stable window {found.window[0]:.3g} to {found.window[1]:.3g}")

    # The same task in a study: every hyperparameter of the space goes where it is named.
    space = pk.Space(
        lr=pk.Float(found.lr / 10, found.lr, log=True),
        width=pk.Choice(32, 64, 128),
        momentum=pk.Float(0.5, 0.95),
    )
    scheduler = pk.Full(trials=2 if QUICK else 6, epochs=5)
    study = pk.Study(task, space, maximize="accuracy", scheduler=scheduler, seed=1)
    study.run()
    print("best:", study.best.config)
    print("reached:", ", ".join(f"{name} {value:.4g}" for name, value in study.best.metrics.items()))
