"""A checkpoint under another configuration, as PBT's explore makes them: trains by what the configuration says."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.train import _loader
from penstock.train._loop import Trainer

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
BOTH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@pytest.fixture(autouse=True)
def _fresh_cache():
    yield
    _loader.forget()


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def task(**more):
    return pk.Task(**{"model": net, "data": (X, Y), "loss": F.cross_entropy, "epochs": 8, **more})


def trained(made, config, epochs=4):
    trainer = Trainer(made, config, seed=0)
    return trainer, [trainer.train_epoch() and trainer.lr for _ in range(epochs)]


def taken_over(made, before, after):
    """A trainer of ``after`` on what one of ``before`` has trained."""
    first, _ = trained(made, before)
    second = Trainer(made, after, seed=0)
    second.load_state(first.state())
    return first, second


def one_cycle(optimizer, steps, lr):
    return lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)


def warm_up(optimizer, steps):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps // 4)
    then = lr_scheduler.CosineAnnealingLR(optimizer, steps - steps // 4)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [steps // 4])


def decay(optimizer, gamma=0.9):
    return lr_scheduler.ExponentialLR(optimizer, gamma)


SCHEDULES = {
    "none": None,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer, epochs: lr_scheduler.CosineAnnealingLR(optimizer, epochs),
    "one cycle": one_cycle,
    "warm-up": warm_up,
    "lambda": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "decay": decay,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"lr": 0.1}, {"lr": 0.03}),
        ({"lr": 0.1, "batch_size": 16}, {"lr": 0.2, "batch_size": 32}),
        ({"lr": 0.1, "batch_size": 32}, {"lr": 0.1, "batch_size": 16}),
    ],
)
def test_rates_are_those_of_the_configuration_from_there_on(schedule, before, after):
    made = task(schedule=SCHEDULES[schedule])
    _, expected = trained(made, after, 8)
    _, second = taken_over(made, before, after)
    rates = [second.train_epoch() and second.lr for _ in range(4)]
    assert rates == pytest.approx(expected[4:], abs=1e-9)


def test_what_a_schedule_takes_from_the_configuration_is_explored_too():
    made = task(schedule=decay)
    _, second = taken_over(made, {"lr": 0.1, "gamma": 0.9}, {"lr": 0.1, "gamma": 0.5})
    begun = second.lr
    second.train_epoch()
    assert begun == pytest.approx(0.1 * 0.9**4)
    assert second.lr == pytest.approx(begun * 0.5)


def test_a_rate_that_a_plateau_has_cut_stays_cut_in_proportion():
    made = task(schedule=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0))
    first, second = taken_over(made, {"lr": 0.1}, {"lr": 0.2})
    assert first.lr < 0.1  # the loss does not rise
    assert second.lr == pytest.approx(2 * first.lr)


def test_hyperparameters_are_new_and_moments_as_trained():
    made = task(optimizer=torch.optim.Adam)
    before, after = (
        {"lr": 0.1, "beta1": 0.9, "weight_decay": 0.1},
        {"lr": 0.02, "beta1": 0.8, "weight_decay": 0.2},
    )
    first, second = taken_over(made, before, after)
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.02, (0.8, 0.999), 0.2)
    for one, other in zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert one["step"] == other["step"]


def test_the_same_configuration_goes_on_as_it_was():
    made = task(optimizer=torch.optim.Adam, schedule=SCHEDULES["cosine"])
    whole, expected = trained(made, {"lr": 0.1}, 8)
    _, second = taken_over(made, {"lr": 0.1}, {"lr": 0.1})
    assert [second.train_epoch() and second.lr for _ in range(4)] == expected[4:]
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        (BOTH, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}),
        (BOTH, {"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": False}, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.0}, {"momentum": 0.9}),
    ],
)
def test_an_optimizer_that_keeps_something_else_begins_anew(optimizer, before, after):
    first, second = taken_over(task(optimizer=optimizer), {"lr": 0.1, **before}, {"lr": 0.05, **after})
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not second.optimizer.state
    assert second.lr == 0.05
    second.train_epoch()
    assert second.epoch == 5


def test_weights_of_another_network_are_said_with_the_remedy():
    with pytest.raises(InvalidInput, match=r"saved with another width.*structural=True"):
        taken_over(task(), {"lr": 0.1, "width": 8}, {"lr": 0.1, "width": 4})


class Seen(torch.optim.SGD):
    """Notes what it was made with and what it steps by."""

    def __init__(self, params, lr, momentum, seen):
        super().__init__(params, lr=lr, momentum=momentum)
        self.made_with, self.seen = (lr, momentum), seen

    def step(self, closure=None):
        group = self.param_groups[0]
        with open(self.seen, "a") as file:
            file.write(json.dumps([self.made_with, (group["lr"], group["momentum"])]) + "\n")
        return super().step(closure)


def test_pbt_trains_by_the_configurations_it_explores(tmp_path):
    seen = tmp_path / "seen.jsonl"
    study = pk.Study(
        task(optimizer=Seen, defaults={"seen": str(seen)}),
        {"lr": pk.Float(1e-3, 0.1, log=True), "momentum": pk.Float(0.1, 0.9)},
        minimize="loss",
        scheduler=pk.PBT(population=4, max_epochs=4, interval=1),
        executor=pk.Local(2),
        store=tmp_path / "s.db",
        fuse=False,
    ).run()
    assert study.state.counts.failed == 0
    steps = [json.loads(line) for line in seen.read_text().splitlines()]
    assert all(made_with == stepped for made_with, stepped in steps)
    assert len({tuple(made_with) for made_with, _ in steps}) > 4  # it did explore


def test_pbt_explores_fused_as_it_does_alone(tmp_path):
    ends = []
    for fuse in (False, 2):
        study = pk.Study(
            task(optimizer=BOTH),
            {"lr": pk.Float(1e-3, 0.1, log=True), "optimizer": pk.Choice("sgd", "adam")},
            minimize="loss",
            scheduler=pk.PBT(population=4, max_epochs=4, interval=1),
            executor=pk.Local(1),
            store=tmp_path / f"{fuse}.db",
            fuse=fuse,
        ).run()
        assert study.state.counts.failed == 0
        ends.append({record.id: (record.config, record.metrics["loss"]) for record in study.trials})
    alone, fused = ends
    for number, (config, loss) in alone.items():
        assert fused[number][0] == config
        assert fused[number][1] == pytest.approx(loss, rel=1e-3)
