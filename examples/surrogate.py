# Run with: python examples/surrogate.py
"""Tune a network an eighth as wide, then train the full one with what was found."""

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk


def data() -> pk.Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 20, generator=generator)
    y = (x[:, :4].sin() @ torch.randn(4, 6, generator=generator)).argmax(1)
    return pk.Data.split(x, y)


def network(config):
    return nn.Sequential(
        nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6)
    )  # no word about widths: the twin is found by following the network's dimensions


def accuracy(output, targets):
    return (output.argmax(1) == targets).float().mean()


if __name__ == "__main__":
    task = pk.Task(
        network, data, F.cross_entropy, metrics={"accuracy": accuracy}, optimizer=torch.optim.AdamW, epochs=4
    )
    space = pk.Space(
        lr=pk.Float(1e-4, 1e-1, log=True),
        beta1=pk.Float(0.5, 0.95),
        weight_decay=pk.Float(
            1e-4, 1, log=True, transfers=False
        ),  # held at first, then tuned on the full model
    )
    study = pk.Study(
        task,
        space,
        minimize="loss",
        scheduler=pk.Full(trials=12),
        sampler=pk.Random(),
        surrogate=pk.Shrink(8, second=1),
        store="surrogate.db",
        name="surrogate",
    )
    study.run()
    print(study.coordinate_check)  # activations over the widths: no layer grows or vanishes
    print(f"{len(study.surrogate_trials)} surrogate trials, {len(study.target_trials)} of the full model")
    print("best:", study.best)
    print("trained model:", sum(p.numel() for p in study.load_model().parameters()), "parameters")
