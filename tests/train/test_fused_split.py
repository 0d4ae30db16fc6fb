"""A fused group that is split and merged while it trains: every member as if it had always been in one group."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.train import Data, Task
from penstock.train._fused_loop import FusedTrainer, own_state, train_fused
from penstock.train._loop import Trainer

CONFIGS = [
    {"lr": 0.01 * (i + 1), "momentum": 0.05 * i, "weight_decay": 0.001 * i, "dropout": 0.02 * i}
    for i in range(16)
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, x.flatten(1)[:, :4].argmax(1)


def cnn(config):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(36, 4),
    ).double()


def make_task(**options):
    return Task(cnn, Data(rows(80, 0), rows(40, 1)), F.cross_entropy, batch_size=16, **options)


def made(task, numbers, states=None):
    trainers = []
    for n in numbers:
        trainer = Trainer(task, CONFIGS[n], seed=n)
        if states is not None:
            trainer.load_state(pickle.loads(states[n]))
        trainers.append(trainer)
    return trainers


def taken(trainers, numbers):
    """Their states as other processes get them."""
    return {n: pickle.dumps(own_state(trainer)) for n, trainer in zip(numbers, trainers, strict=True)}


def epochs(groups, count):
    """Metrics of each epoch by trial."""
    found = []
    for _ in range(count):
        of = {}
        for numbers, trainers, fused in groups:
            results = fused.train_epoch()
            of |= {n: results[trainer] for n, trainer in zip(numbers, trainers, strict=True)}
        found.append(of)
    return found


def farthest(one, other):
    return max(
        abs(a[n][name] - b[n][name]) for a, b in zip(one, other, strict=True) for n in a for name in a[n]
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_sixteen_members_are_split_and_merged_back(optimizer):
    options = {"optimizer": optimizer}
    if optimizer is torch.optim.Adam:
        options["optimizer"] = lambda params, lr, weight_decay: optimizer(
            params, lr, weight_decay=weight_decay
        )
    task = make_task(**options)
    everybody = list(range(16))
    whole = made(task, everybody)
    expected = epochs([(everybody, whole, FusedTrainer(whole))], 6)

    first = made(task, everybody)
    fused = FusedTrainer(first)
    found = epochs([(everybody, first, fused)], 2)
    leaving, staying = everybody[1::2], everybody[::2]
    states = taken([first[n] for n in leaving], leaving)
    fused.leave([first[n] for n in leaving])
    elsewhere = made(task, leaving, states)  # on another device, in another process
    halves = [
        (staying, [first[n] for n in staying], fused),
        (leaving, elsewhere, FusedTrainer(elsewhere)),
    ]
    assert [half[2].counts for half in halves] == [[8], [8]]
    found += epochs(halves, 2)
    # The other device leaves: its members come back.
    back = made(task, leaving, taken(elsewhere, leaving))
    fused.join(back)
    found += epochs([(staying + leaving, [first[n] for n in staying] + back, fused)], 2)
    assert farthest(expected, found) < 1e-12


class Told:
    """A run that is told to stop, as a Run is: between epochs it ends, within one it may know already."""

    def __init__(self, number, until, stop_at=None, state=None):
        self.config, self.seed, self.device, self.until = CONFIGS[number], number, "cpu", until
        self.state, self.stop_at, self.done = copy.deepcopy(state), stop_at, 0
        self.reports, self.saved = [], []

    @property
    def should_stop(self):
        return self.stop_at is not None and self.done + 1 >= self.stop_at

    def epochs(self):
        self.done = 0 if self.state is None else self.state["epoch"]
        while self.done < self.until and (self.stop_at is None or self.done < self.stop_at):
            yield self.done
            self.done += 1

    def load(self):
        return self.state

    def save(self, state):
        self.saved.append(state)

    def report(self, **metrics):
        self.reports.append(metrics)


def test_who_is_told_to_leave_leaves_a_checkpoint_whatever_the_interval():
    task = make_task(checkpoint_epochs=5)
    whole = [Told(n, 6) for n in range(6)]
    train_fused(task, whole)
    runs = [Told(n, 6, stop_at=2 if n % 2 else None) for n in range(6)]
    assert train_fused(task, runs) == [None] * 6
    moved = [run for run in runs if run.stop_at]
    assert [[state["epoch"] for state in run.saved] for run in moved] == [[2]] * 3
    again = [Told(n, 6, state=runs[n].saved[-1]) for n in (1, 3, 5)]
    train_fused(task, again)
    for run in again:
        reports = runs[run.seed].reports + run.reports
        assert len(reports) == 6
        for mine, theirs in zip(whole[run.seed].reports, reports, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-12)
