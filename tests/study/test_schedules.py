"""A task's learning-rate schedule goes over the training that the study gives, not over the task's own length."""

import pytest
import torch

import penstock as pk

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
DATA = pk.Data((X, X.sum(1)), (X, X.sum(1)))
STEPS = 5  # of an epoch, with batches of 8


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))


def task(schedule, **options):
    return pk.Task(
        network, DATA, torch.nn.functional.mse_loss, schedule=schedule, epochs=4, batch_size=8, **options
    )


def study(work, scheduler, **options):
    space = (
        {"lr": pk.Float(1e-4, 1e-2, log=True)}
        if not isinstance(scheduler, pk.SM2)
        else {"batch_size": pk.Choice(8)}
    )
    options.setdefault("executor", pk.Simulated(devices=1))
    return pk.Study(
        work, space, minimize="loss", scheduler=scheduler, sampler=pk.Random(), store=False, **options
    )


@pytest.mark.parametrize(
    ("scheduler", "epochs"),
    [
        (pk.Full(trials=1, epochs=9), 9),
        (pk.Full(trials=1, epochs=2), 2),
        (pk.Full(trials=1), 4),
        (pk.ASHA(max_epochs=9, trials=3), 9),
        (pk.Hyperband(max_epochs=9), 9),
        (pk.PBT(population=2, interval=2, max_epochs=6), 6),
        (pk.SM2(max_epochs=6, final_epochs=3), 6),
    ],
    ids=["longer", "shorter", "own", "asha", "hyperband", "pbt", "sm2"],
)
def test_a_schedule_goes_over_the_longest_training_of_the_study(scheduler, epochs):
    told = []

    def by_steps(optimizer, steps, epochs):
        told.append((steps, epochs))
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

    study(task(by_steps), scheduler).run()
    assert set(told) == {(epochs * STEPS, epochs)}


def test_a_one_cycle_reaches_the_end_of_a_longer_training():
    def one_cycle(optimizer, steps, lr):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)

    done = study(task(one_cycle), pk.Full(trials=1, epochs=7), executor=pk.Local(1)).run()
    assert [(trial.status.value, trial.epoch) for trial in done.trials] == [("completed", 7)]


def test_a_one_cycle_reaches_the_end_of_a_recurrence(tmp_path):
    told = []

    def by_steps(optimizer, steps):
        told.append(steps)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-5, total_steps=steps)

    job = pk.RecurringJob(
        "nightly",
        task(by_steps),
        batch_sizes=[8],
        target=("loss", 1e-9),
        max_epochs=6,
        config={"lr": 1e-5},
        store=tmp_path / "jobs.db",
    )
    result = job.run(tries=1)
    assert (result.epochs, told) == (6, [6 * STEPS])
