# Run with: python examples/lanes.py
"""Plain PyTorch loops of eight trials at a time, whose forward, backward and step are computed as one."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as pk

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))


def train(run):
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(run.config["dropout"]), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=run.config["momentum"])
    model, optimizer = run.prepare(model, optimizer)  # the only line that is not PyTorch's or the study's
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in run.epochs():
        model.train()
        for rows in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        run.report(accuracy=accuracy)


space = {"lr": pk.Float(1e-3, 1, log=True), "momentum": pk.Float(0, 0.95), "dropout": pk.Float(0, 0.5)}

if __name__ == "__main__":
    study = pk.Study(
        train,
        space,
        maximize="accuracy",
        sampler=pk.Random(),
        scheduler=pk.Full(trials=8 if QUICK else 16, epochs=4),
        executor=pk.Local(1),
        store="lanes.db",
        fuse=8,
    )
    study.run()
    print(study)
