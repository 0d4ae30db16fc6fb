# Run with: python examples/sm2.py
"""SM2 on scikit-learn's digits: find batch size and learning rate while training, and see what it cost."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as pk
from penstock.report import sm2_report, sm2_text

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))


def digits():
    data = load_digits()
    return pk.Data.split(
        torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target), val=0.2
    )


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


task = pk.Task(network, digits, F.cross_entropy, metrics={"accuracy": accuracy}, defaults={"momentum": 0.9})

if __name__ == "__main__":
    # Each round explores every batch size that is left on a part of the data, drops the worse half by performance,
    # energy per epoch and stable learning rate, and trains the rest. The last one trains to the end.
    study = pk.Study(
        task,
        pk.Space(batch_size=pk.Choice(8, 16, 32, 64)),
        maximize="accuracy",
        scheduler=pk.SM2(alpha=0.75, thorough_epochs=2, final_epochs=5, max_epochs=6 if QUICK else 15),
        seed=1,
    )
    study.run()
    print(sm2_text(sm2_report(study)))
    winner = study.state.trials[sm2_report(study).winner]
    print(
        "left:",
        winner.config,
        f"accuracy {winner.metrics['accuracy']:.3f}",
        f"({winner.reason or 'completed'})",
    )
