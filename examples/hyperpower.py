# Run with: python examples/hyperpower.py
"""The best network on scikit-learn's digits that fits a small board: profile, then search inside the limits."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as pk

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))


def digits():
    data = load_digits()
    images = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    return pk.Data.split(images, torch.tensor(data.target), val=0.2)


def network(features, kernel, units):
    size = 8 - kernel + 1
    return nn.Sequential(
        nn.Conv2d(1, features, kernel),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features * size**2, units),
        nn.ReLU(),
        nn.Linear(units, 10),
    )


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


task = pk.Task(
    network,
    digits,
    F.cross_entropy,
    metrics={"accuracy": accuracy},
    optimizer=torch.optim.SGD,
    epochs=3,
    defaults={"momentum": 0.9, "batch_size": 64},
    eval_batch_size=64,
)
# What is structural changes the network, and so its power and memory; the learning rate does not.
space = pk.Space(
    features=pk.Int(4, 48, structural=True),
    kernel=pk.Int(2, 5, structural=True),
    units=pk.Int(16, 256, structural=True),
    lr=pk.Float(0.003, 1.0, log=True),
)

if __name__ == "__main__":
    # 1. Measure random structures here, and fit predictors to them.
    predictors = pk.Profile(task, space, seconds=0.02).collect(24)
    print(predictors)

    # 2. Search inside the limits: HW-IECI, and trainings that go nowhere are stopped.
    study = pk.Study(
        task,
        space,
        maximize="accuracy",
        sampler=pk.Bayes(),
        scheduler=pk.Full(trials=4 if QUICK else 8, epochs=3),
        stop=[pk.Divergence("accuracy", "max", chance=0.1, epochs=2)],
        limits=[pk.memory_bytes <= "600kB", pk.params <= "80k"],
        predictors=predictors,
        executor=pk.Simulated(devices=1),  # leave it out to use this machine's cores or GPUs
        store=False,
    )
    study.run()
    best = study.best
    memory = predictors.predict("memory_bytes", best.config)
    print("best:", dict(best.config))
    print(
        f"accuracy {best.metrics['accuracy']:.3f} with {predictors.predict('params', best.config).mean:.0f} parameters "
        f"and {memory.mean / 1e3:.0f} +- {memory.std / 1e3:.0f} kB"
    )
    print(f"{len(study.trials)} trainings, none outside the limits; {study.refused} proposals refused")
