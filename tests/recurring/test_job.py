"""RecurringJob: one recurrence end to end, its memory in a store, and many processes on one store."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
from collections import Counter
from pathlib import Path

import pytest

from penstock.core import Source, VirtualClock
from penstock.core.errors import InvalidInput, SensorError, StoreCorrupt, TrialError, Unsupported
from penstock.energy import V100_LOADS, SimulatedGpu
from penstock.recurring import Decision, Grid, RecurringJob
from penstock.store import open_store
from penstock.testing.postgres import postgres_server

EPOCHS = {32: 16, 64: 18, 128: 19, 256: 30, 512: 42, 1024: 77}


class Trainer:
    """ShuffleNet on a simulated V100: time passes at the speed the power limit allows."""

    def __init__(self, *, crash: int | None = None) -> None:
        self.clock = VirtualClock()
        self.gpu = SimulatedGpu(self.clock)
        self.rng = random.Random(0)
        self.crash = crash
        self.seen: list[dict[str, object]] = []
        self.limits: list[list[float]] = []

    def __call__(self, run) -> None:
        size = run.config["batch_size"]
        self.seen.append(dict(run.config))
        self.limits.append([])
        load = V100_LOADS["shufflenet-adadelta", size]
        need = round(EPOCHS[size] * (1 + self.rng.gauss(0, 0.04)))
        for epoch in run.epochs():
            self.gpu.run(load)
            limit = self.gpu.power_limit_w()
            self.limits[-1].append(limit)
            self.clock.advance_to(self.clock.now_s() + self.gpu.model.epoch_s(load, limit))
            self.gpu.idle()
            if size == self.crash and epoch == 2:
                raise RuntimeError("CUDA out of memory")
            run.report(accuracy=0.6 * (epoch + 1) / need)

    def job(self, **more) -> RecurringJob:
        options = {
            "batch_sizes": list(EPOCHS),
            "default": 1024,
            "target": ("accuracy", 0.6),
            "max_epochs": 300,
            "sensors": [self.gpu],
            "clock": self.clock,
        }
        return RecurringJob("nightly", self, **{**options, **more})


@pytest.mark.parametrize("policy", ["ours", "zeus"])
def test_a_job_gets_cheaper(policy):
    trainer = Trainer()
    job = trainer.job(policy=policy)
    runs = [job.run() for _ in range(22)]
    assert all(r.reached for r in runs)
    assert runs[0].decision.batch_size == 1024
    assert all(r.source is Source.SIMULATED for r in runs)
    last = sum(r.cost for r in runs[-3:]) / 3
    assert last < 0.6 * runs[0].cost
    # By the models: 128 (or, nearly as good, 256) is the optimum.
    assert runs[-1].decision.batch_size in (128, 256)
    assert trainer.gpu.power_limit_w() == 250.0  # restored


def test_the_first_run_profiles_all_limits_and_finishes_at_the_best():
    trainer = Trainer()
    job = trainer.job()
    first = job.run()
    limits = trainer.limits[0]
    assert limits[:7] == [250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0]
    assert len(set(limits[7:])) == 1
    load, model = V100_LOADS["shufflenet-adadelta", 1024], trainer.gpu.model
    cost = {w: model.epoch_s(load, w) * (0.5 * model.power_w(load, w) + 0.5 * 250.0) for w in set(limits)}
    assert limits[-1] == min(cost, key=cost.__getitem__)
    expected_s = sum(model.epoch_s(load, w) for w in limits)
    expected_j = sum(model.epoch_s(load, w) * model.power_w(load, w) for w in limits)
    assert first.time_s == pytest.approx(expected_s)
    assert first.energy_j == pytest.approx(expected_j)
    assert first.cost == pytest.approx(0.5 * expected_j + 0.5 * 250.0 * expected_s)


class IteratingTrainer(Trainer):
    """The same, in steps that it tells of; a tenth of each epoch is validation, of which it doesn't."""

    steps = 200

    def __call__(self, run) -> None:
        size = run.config["batch_size"]
        load, model = V100_LOADS["shufflenet-adadelta", size], self.gpu.model
        self.limits.append([])
        for epoch in run.epochs():
            self.gpu.run(load)
            for step in range(self.steps):
                limit = self.gpu.power_limit_w()
                self.limits[-1].append(limit)
                self.clock.advance_to(self.clock.now_s() + model.epoch_s(load, limit) / self.steps)
                if step < 0.9 * self.steps:
                    run.iteration(size)
            self.gpu.idle()
            run.report(accuracy=0.6 * (epoch + 1) / EPOCHS[size])


def test_a_run_that_tells_of_its_iterations_profiles_all_limits_in_its_first_epoch():
    trainer = IteratingTrainer()
    job = trainer.job(slice_s=0.5)
    first = job.run()
    limits = trainer.limits[0]
    assert len(limits) == EPOCHS[1024] * trainer.steps  # nothing is trained for the profile alone
    assert set(limits[: trainer.steps]) == {250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0}
    assert len(set(limits[trainer.steps :])) == 1
    load, model = V100_LOADS["shufflenet-adadelta", 1024], trainer.gpu.model
    cost = {w: model.epoch_s(load, w) * (0.5 * model.power_w(load, w) + 0.5 * 250.0) for w in set(limits)}
    assert limits[-1] == min(cost, key=cost.__getitem__)
    measured = job.history.results[0].profile
    assert set(measured) == set(limits)
    for limit, (epoch_s, power_w) in measured.items():
        assert epoch_s == pytest.approx(model.epoch_s(load, limit), rel=0.03)
        assert power_w == pytest.approx(model.power_w(load, limit), rel=0.03)
    assert first.reached
    assert trainer.gpu.power_limit_w() == 250.0


def test_a_run_is_stopped_at_its_cost_limit_and_retried():
    trainer = Trainer()
    job = trainer.job(batch_sizes=[128, 1024], default=128, beta=1.2, policy="zeus")
    assert job.run().tries == 1
    second = job.run()  # 1024 costs more than 1.2 times as much
    assert second.reached
    assert second.tries == 2
    failed = next(r for r in job.history.results if not r.reached)
    spec_cost = 0.5 * failed.energy_j + 0.5 * 250.0 * failed.time_s
    limit = job.history.decisions[failed.number].cost_limit
    assert limit is not None
    assert spec_cost <= limit
    assert [seen["batch_size"] for seen in trainer.seen][:3] == [128, 1024, 128]


def test_a_crash_is_a_result_that_does_not_lower_the_threshold():
    trainer = Trainer(crash=512)
    job = trainer.job(batch_sizes=[512, 1024], default=1024, policy="zeus")
    job.run()
    threshold = job.decide(device=trainer.gpu.name, limits_w=(100.0, 250.0))
    job.abandon(threshold)
    done = job.run()
    crashed = [r for r in job.history.results if r.error]
    assert done.reached
    assert len(crashed) == 1
    assert "out of memory" in crashed[0].error
    assert not crashed[0].reached
    again = job.decide(device=trainer.gpu.name, limits_w=(100.0, 250.0))
    assert again.cost_limit is not None
    assert threshold.cost_limit is not None
    assert again.cost_limit >= 0.9 * threshold.cost_limit
    assert trainer.gpu.power_limit_w() == 250.0


def test_a_job_that_always_crashes_says_so():
    def broken(run):
        raise ValueError("no data today")

    job = RecurringJob("broken", broken, batch_sizes=[8], target=("accuracy", 0.5))
    done = job.run(tries=2)
    assert not done.reached
    assert "no data today" in done.reason
    assert done.tries == 2
    with pytest.raises(TrialError, match="no data today"):
        job.run(raise_on_failure=True)


def test_an_interrupt_gives_the_ticket_back():
    def interrupted(run):
        raise KeyboardInterrupt

    job = RecurringJob("stopped", interrupted, batch_sizes=[8], target=("accuracy", 0.5))
    with pytest.raises(KeyboardInterrupt):
        job.run()
    assert job.history.pending == []
    assert job.history.results == []


def test_on_a_cpu_without_limits_the_first_run_sets_the_unit():
    def train(run):
        total = 0
        for epoch in run.epochs(3):
            total += sum(i * i for i in range(60_000))
            run.report(loss=1.0 / (epoch + 1))

    job = RecurringJob("cpu", train, batch_sizes=[8, 16], default=16, target=("loss", 0.5), max_epochs=5)
    first = job.run()
    assert first.reached
    assert first.epochs == 2
    assert first.decision.limit_w is None
    assert first.decision.profile_w == ()
    assert first.cost == pytest.approx(first.energy_j)  # eta mixes equals: MAXPOWER is its own average
    assert job.run().reached


@pytest.mark.parametrize("policy", ["ours", "zeus"])
def test_runs_too_short_to_try_all_limits_go_on_where_they_were_left(policy):
    trainer = Trainer()
    job = trainer.job(batch_sizes=[128], default=128, target=("accuracy", 0.1), policy=policy)
    for _ in range(10):
        assert job.run().epochs < 7
    load, model = V100_LOADS["shufflenet-adadelta", 128], trainer.gpu.model
    limits = [100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0]
    known = set(job.history.profile(trainer.gpu.name, 128))
    assert len(known) > len(trainer.limits[0])
    if policy == "zeus":
        assert known == set(limits)
    cost = {w: model.epoch_s(load, w) * (0.5 * model.power_w(load, w) + 0.5 * 250.0) for w in limits}
    last = trainer.limits[-1]
    assert len(set(last)) == 1
    assert cost[last[0]] <= 1.01 * min(cost.values())


def test_two_gpus_count_together():
    trainer = Trainer()
    other = SimulatedGpu(trainer.clock, index=1)
    job = trainer.job(sensors=[trainer.gpu, other])
    done = job.run()
    assert done.cost == pytest.approx(0.5 * done.energy_j + 0.5 * 500.0 * done.time_s)
    assert other.power_limit_w() == 250.0


def test_batch_sizes_may_change_between_restarts(tmp_path: Path):
    path = tmp_path / "c.db"
    with RecurringJob("c", batch_sizes=[8, 16], default=16, store=path) as job:
        for _ in range(4):
            observe(job, job.decide())
    with RecurringJob("c", batch_sizes=[64, 128], default=64, store=path) as job:
        ticket = job.decide()
        assert ticket.batch_size == 64
        observe(job, ticket)
        assert job.decide().batch_size in (64, 128)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("policy", ["ours", "zeus", Grid()])
def test_a_batch_size_taken_off_the_list_is_neither_run_nor_a_measure(policy, window, tmp_path: Path):
    """It cost a fifth of any other: by beta times its cost, all runs of those that are left would be stopped."""
    cost_j = {32: 4000.0, 64: 1000.0, 128: 5000.0, 256: 6000.0}

    def job(*sizes):
        return RecurringJob(
            "c",
            batch_sizes=sizes,
            default=128,
            policy=policy,
            window=window,
            max_power_w=100.0,
            store=tmp_path / "c.db",
        )

    def end(job, ticket):
        limit_j = math.inf if ticket.cost_limit is None else ticket.cost_limit
        whole_j = cost_j[ticket.batch_size]
        part = min(1.0, limit_j / whole_j)
        job.observe(
            ticket,
            epochs=10 * part,
            time_s=whole_j * part / 100,
            energy_j=whole_j * part,
            reached=part == 1.0,
        )
        return part == 1.0

    with job(64, 128, 256) as before:
        for _ in range(9):
            end(before, before.decide())
    with job(32, 128, 256) as after:
        reached = []
        for _ in range(6):
            # Two at a time: Zeus runs the best size that it knows while another one is explored.
            tickets = [after.decide(), after.decide()]
            assert {ticket.batch_size for ticket in tickets} <= {32, 128, 256}
            reached += [end(after, ticket) for ticket in tickets]
        assert sum(reached) > len(reached) // 2


def test_a_job_with_another_target_is_refused_once_runs_have_reached_theirs(tmp_path: Path):
    def train(run):
        for epoch in run.epochs(9):
            run.report(accuracy=epoch / 8, loss=1.0)

    def job(*target):
        return RecurringJob(
            "t", train, batch_sizes=[8, 16], default=8, target=target, store=tmp_path / "t.db"
        )

    with job("accurracy", 0.5) as wrong:  # a slip: nothing was learnt, and it may be put right
        assert not wrong.run(tries=1).reached
    with job("accuracy", 0.5) as first:
        assert first.run().reached
    with job("accuracy", 0.9) as other:
        with pytest.raises(InvalidInput, match=r"accuracy >= 0\.5, and this one is for accuracy >= 0\.9"):
            other.run()
        decision = other.decide()  # a cluster judges by itself
        other.observe(decision, epochs=3, time_s=1.0, energy_j=1.0, reached=True)
        assert len(other.history.decisions) == 3
    with job("accuracy", ">=", 0.5) as again:
        assert again.run().reached


def test_learning_rates_follow_the_batch_size():
    trainer = Trainer()
    job = trainer.job(config={"lr": 0.1}, scale_lr="sqrt", batch_sizes=[256, 1024])
    for _ in range(3):
        job.run()
    by_size = {seen["batch_size"]: seen["lr"] for seen in trainer.seen}
    assert by_size == {1024: 0.1, 256: pytest.approx(0.05)}


def test_a_task_is_run_with_the_batch_size_decided():
    import torch
    from torch import nn

    from penstock.train import Data, Task

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 4, generator=generator)
    targets = (inputs[:, 0] > 0).long()
    task = Task(
        model=lambda: nn.Linear(4, 2),
        data=Data((inputs, targets), (inputs, targets)),
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()},
        optimizer=torch.optim.SGD,
        epochs=30,
    )
    job = RecurringJob(
        "task",
        task,
        batch_sizes=[16, 32],
        default=32,
        target=("accuracy", 0.9),
        max_epochs=30,
        config={"lr": 0.5},
    )
    done = [job.run() for _ in range(2)]
    assert all(r.reached for r in done)
    assert done[0].metrics["accuracy"] >= 0.9


# -- memory -----------------------------------------------------------------------------------------------


def observe(job: RecurringJob, decision: Decision, epochs: float = 10.0, reached: bool = True) -> None:
    time_s = epochs * (1.0 + 50.0 / decision.batch_size)
    job.observe(decision, epochs=epochs, time_s=time_s, energy_j=100.0 * time_s, reached=reached)


def test_late_and_repeated_results_are_taken_and_unknown_ones_refused():
    job = RecurringJob("late", batch_sizes=[8, 16, 32], default=16)
    tickets = [job.decide() for _ in range(4)]
    for ticket in reversed(tickets):
        observe(job, ticket)
        observe(job, ticket)
    assert [r.number for r in job.history.results] == [3, 2, 1, 0]
    with pytest.raises(InvalidInput, match="no decision 9"):
        job.observe(9, epochs=1, time_s=1, energy_j=1, reached=True)


@pytest.mark.parametrize("policy", ["ours", "zeus"])
def test_a_restart_changes_nothing(tmp_path: Path, policy):
    """The same decisions whether one process makes them all or a new one makes each."""

    def decisions(path: Path, restart: bool) -> list[tuple[int, float | None]]:
        job = RecurringJob("r", batch_sizes=[8, 16, 32, 64], default=32, store=path, policy=policy, seed=7)
        out = []
        for n in range(25):
            ticket = job.decide()
            out.append((ticket.batch_size, ticket.cost_limit))
            observe(job, ticket, epochs=10.0 + (n * 5) % 3 + ticket.batch_size / 32)
            if restart:
                job.close()
                job = RecurringJob(
                    "r", batch_sizes=[8, 16, 32, 64], default=32, store=path, policy=policy, seed=7
                )
        job.close()
        return out

    assert decisions(tmp_path / "a.db", False) == decisions(tmp_path / "b.db", True)


def test_a_lost_run_does_not_hold_up_exploration():
    clock = VirtualClock()
    job = RecurringJob("lost", batch_sizes=[8, 16], default=16, policy="zeus", clock=clock, give_up_s=100.0)
    first = job.decide()
    assert first.explore
    assert not job.decide().explore  # waiting for the first
    clock.advance_to(1000.0)
    assert job.decide().explore


def test_costs_are_translated_to_another_device():
    """Section 7: what was learnt on a slow device decides on a fast one, once its epochs are profiled there."""
    job = RecurringJob(
        "moved", batch_sizes=[8, 64], default=64, policy="zeus", limits_w=[100.0], max_power_w=100.0
    )
    for _ in range(12):  # on the old device 8 is cheaper: 10 epochs against 40 at the same epoch time
        ticket = job.decide(device="old")
        epochs = 10.0 if ticket.batch_size == 8 else 15.0
        job.observe(
            ticket,
            epochs=epochs,
            time_s=epochs,
            energy_j=100.0 * epochs,
            reached=True,
            profile={100.0: (1.0, 100.0)},
        )
    assert Counter(job.decide(device="old").batch_size for _ in range(10)).most_common(1)[0][0] == 8
    job.add_profile(8, {100.0: (1.0, 100.0)}, device="new")
    job.add_profile(
        64, {100.0: (0.2, 100.0)}, device="new"
    )  # an epoch of large batches is five times as fast
    assert Counter(job.decide(device="new").batch_size for _ in range(10)).most_common(1)[0][0] == 64


def test_status_tells_what_was_learnt():
    job = RecurringJob("s", batch_sizes=[8, 16, 32], default=16)
    for _ in range(6):
        observe(job, job.decide())
    job.decide()
    known = json.loads(json.dumps(job.status()))
    assert known["results"] == 6
    assert known["under_way"] == [6]
    assert known["best_batch_size"] in (8, 16, 32)
    assert sum(row["runs"] for row in known["batch_sizes"].values()) == 6


def test_a_foreign_value_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "x.db"
    with open_store(path, write=True) as store:
        store.put("recurring/j", {"format": 99, "records": []})
    job = RecurringJob("j", batch_sizes=[8], store=path)
    with pytest.raises(StoreCorrupt, match="Upgrade"):
        job.decide()
    job.close()


@pytest.mark.parametrize(
    "change",
    [
        {"batch_sizes": []},
        {"default": 7},
        {"name": "a/b"},
        {"name": ""},
        {"train": 3},
        {"max_epochs": 0},
        {"scale_lr": "cubic"},
        {"policy": "magic"},
        {"eta": 2.0},
    ],
)
def test_wrong_arguments_are_named(change):
    options = {"name": "j", "train": None, "batch_sizes": [8, 16], **change}
    name, train = options.pop("name"), options.pop("train")
    with pytest.raises(InvalidInput):
        RecurringJob(name, train, **options)


@pytest.mark.parametrize("target", ["accuracy", ("accuracy",), ("accuracy", "=", 1), (3, 0.5), ("a", True)])
def test_wrong_targets_are_named(target):
    with pytest.raises(InvalidInput, match="target must be"):
        RecurringJob("j", lambda run: None, batch_sizes=[8], target=target)


def test_nothing_to_run_is_said():
    with pytest.raises(InvalidInput, match="nothing to run"):
        RecurringJob("j", batch_sizes=[8]).run()


# -- many processes -----------------------------------------------------------------------------------------


def work_on(url: str, worker: int, rounds: int, queue) -> None:
    job = RecurringJob("shared", batch_sizes=[8, 16, 32, 64], default=32, store=url, policy="zeus")
    rng = random.Random(worker)
    waiting = []
    numbers = []
    for _ in range(rounds):
        ticket = job.decide()
        numbers.append(ticket.number)
        waiting.append(ticket)
        rng.shuffle(waiting)
        if len(waiting) > 2:
            observe(job, waiting.pop(), epochs=float(rng.randint(8, 12)))
    for ticket in waiting:
        observe(job, ticket, epochs=float(rng.randint(8, 12)))
    job.close()
    queue.put(numbers)


def check_many_processes(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers, rounds = 3, 25  # enough for records to be archived, by any of them, while the others go on
    processes = [context.Process(target=work_on, args=(url, w, rounds, queue)) for w in range(workers)]
    for process in processes:
        process.start()
    numbers = [n for _ in processes for n in queue.get(timeout=300)]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    assert sorted(numbers) == list(range(workers * rounds))  # every ticket once
    with RecurringJob("shared", batch_sizes=[8, 16, 32, 64], default=32, store=url, policy="zeus") as job:
        history = job.history
        assert len(history.results) == workers * rounds  # nothing lost
        assert history.pending == []
        exploring = [d.batch_size for d in history.decisions.values() if d.explore]
        assert exploring[0] == 32
        assert len(exploring) <= 2 * 4
    with RecurringJob("shared", batch_sizes=[8, 16, 32, 64], default=32, store=url, policy="zeus") as late:
        ticket = late.decide()  # knows nothing yet: reads the archive in the middle of its first change
        assert ticket.number == workers * rounds
        assert len(late.history.results) == workers * rounds
    with open_store(url, write=False) as store:
        assert len(store.keys("recurring/shared/")) >= 3


def test_many_processes_on_one_sqlite_file(tmp_path: Path):
    check_many_processes(str(tmp_path / "shared.db"))


def test_many_processes_on_postgresql():
    try:
        with postgres_server() as server:
            check_many_processes(server.url)
    except Unsupported as error:
        pytest.skip(str(error))


def test_a_sensor_that_fails_once_does_not_end_a_run():
    """Without limits all epochs are alike: what the others drew tells what the one that was not read did."""
    trainer = Trainer()
    read, failing = trainer.gpu.energy_j, []
    load, model = V100_LOADS["shufflenet-adadelta", 1024], trainer.gpu.model

    def energy_j() -> float:
        if failing:
            failing.pop()
            raise SensorError("NVML can't read it: Timeout.")
        return read()

    def train(run) -> None:
        for epoch in run.epochs():
            trainer.gpu.run(load)
            trainer.clock.advance_to(trainer.clock.now_s() + model.epoch_s(load, 250.0))
            trainer.gpu.idle()
            if epoch == 3:
                failing.append(True)
            run.report(accuracy=0.1 * (epoch + 1))

    trainer.gpu.energy_j = energy_j
    job = RecurringJob(
        "nightly",
        train,
        batch_sizes=[1024],
        target=("accuracy", 0.6),
        max_epochs=9,
        limits_w=[250.0],
        sensors=[trainer.gpu],
        clock=trainer.clock,
    )
    with pytest.warns(RuntimeWarning, match="estimated by those before it: NVML can't read it: Timeout"):
        done = job.run()
    assert (done.reached, done.epochs, done.tries) == (True, 6, 1)
    epoch_s = model.epoch_s(load, 250.0)
    assert done.time_s == pytest.approx(6 * epoch_s)
    assert done.energy_j == pytest.approx(6 * epoch_s * model.power_w(load, 250.0))


@pytest.mark.parametrize("at", [0, 2])
def test_a_limit_that_cant_be_set_on_the_way_ends_no_training(at):
    """A driver that does not answer once is no fault of the batch size. The limit from before is there again."""
    trainer = Trainer()
    change = trainer.gpu.set_power_limit_w
    left = [at + 1]  # one more: that which shows whether limits may be set

    def set_power_limit_w(limit_w: float) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise SensorError("NVML can't set it: Timeout.")
        change(limit_w)

    trainer.gpu.set_power_limit_w = set_power_limit_w
    with pytest.warns(RuntimeWarning, match="power limit stays as it was.*Timeout"):
        done = trainer.job(batch_sizes=[1024]).run()
    assert (done.reached, done.tries, done.decision.limit_w) == (True, 1, None)
    assert trainer.gpu.power_limit_w() == 250.0


def test_without_permission_a_run_says_nothing_of_the_limit_it_should_have_had():
    """A job that has learnt a limit as root, run again by somebody who may not set it."""
    trainer = Trainer()
    job = trainer.job(batch_sizes=[1024])
    learnt = [job.run(), job.run()][-1].decision.limit_w
    assert learnt is not None
    assert learnt < 250.0
    known = job.history.profile(trainer.gpu.name, 1024)[learnt]
    load, model = V100_LOADS["shufflenet-adadelta", 1024], trainer.gpu.model
    assert known == pytest.approx((model.epoch_s(load, learnt), model.power_w(load, learnt)))
    trainer.gpu._may_set = False
    done = job.run()
    assert set(trainer.limits[-1]) == {250.0}
    assert done.decision.limit_w is None
    assert job.history.profile(trainer.gpu.name, 1024)[learnt] == known
