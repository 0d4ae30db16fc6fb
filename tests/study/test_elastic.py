"""Elastic trials on real worker processes."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as pk
from penstock.core import Ended, Resized, Share, TrialStatus
from penstock.energy import V100, Load
from penstock.execute import Executor, Job
from penstock.predict import Overhead
from penstock.testing.executors import Drive, segment

EPOCHS = 8


class Wait(nn.Module):
    """Takes its time, so that a second worker comes before the training is over."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return inputs


def net(width: int) -> nn.Module:
    """In float64: the order of sums must not grow to a difference that can be seen."""
    layers = (nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
    return nn.Sequential(Wait(), *layers).double()


def data() -> pk.Data:
    inputs = torch.randn(600, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    targets = inputs[:, :1] * inputs[:, 1:2]
    return pk.Data((inputs[:500], targets[:500]), (inputs[500:], targets[500:]))


TASK = pk.Task(
    net, data, functional.mse_loss, optimizer=torch.optim.Adam, defaults={"width": 8}, batch_size=50
)


class Slow:
    """A Task that waits in its epoch ``config["at"]`` for the file ``config["go"]``, or goes on and on until then."""

    penstock_devices = 2

    def __call__(self, run: pk.Run) -> None:
        ranks = []
        state = run.load() or {"sum": torch.zeros(1), "sizes": []}
        go, at = Path(run.config["go"]), run.config["at"]
        for epoch in run.epochs():
            if at is None and run.world.size == 1 and go.exists():
                return
            time.sleep(0.05)
            while epoch == at and not go.exists():
                time.sleep(0.01)
            mine = torch.tensor([float(run.world.rank + 1)])
            run.world.all_reduce([mine])
            ranks.append(run.world.rank)
            state["sum"] += mine
            state["sizes"].append(run.world.size)
            run.save(state)
            run.report(loss=float(state["sum"]), size=run.world.size)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    local = pk.Local(2)
    local.open(Job(Slow(), tmp_path_factory.mktemp("elastic"), ("loss",), meter=False))
    yield local
    local.close()


def test_a_function_that_opts_in_goes_on_with_more_and_fewer_workers(
    executor: Executor, tmp_path: Path
) -> None:
    run = Drive(executor)
    work = segment(0, until=100_000, config={"go": str(tmp_path / "go"), "at": None})
    run.submit([work])
    run.start([work], [Share("cpu:0")], max_devices=2)
    run.until(lambda: len(run.reports(0)) >= 2)
    executor.resize(0, [Share("cpu:0"), Share("cpu:1")])
    assert not executor.free()
    run.until(lambda: any(r.metrics["size"] == 2 for r in run.reports(0)))
    executor.resize(0, [Share("cpu:1")])
    run.until(lambda: run.reports(0)[-1].metrics["size"] == 1)
    (tmp_path / "go").touch()
    run.finish(1)
    run.until(lambda: len(executor.free()) == 2)
    sizes = [r.metrics["size"] for r in run.reports(0)]
    assert [r.epoch for r in run.reports(0)] == list(range(1, len(sizes) + 1))
    changes = [event.shares for event in run.events if isinstance(event, Resized)]
    assert changes == [(Share("cpu:0"), Share("cpu:1")), (Share("cpu:1"),)]
    # Alone an epoch adds 1, two workers add 1 + 2: the state was carried over both changes.
    total = 0.0
    for report, size in zip(run.reports(0), sizes, strict=True):
        total += 1 if size == 1 else 3
        assert report.metrics["loss"] == total
    assert [size for size, _ in itertools.groupby(sizes)] == [1, 2, 1]
    assert run.ended(0).status is TrialStatus.COMPLETED


def workers_of(executor: Any) -> dict[str, int]:
    """Process ids by device, of workers that are busy."""
    return {w.shares[0].device: w.child.process.pid for w in executor._workers.by_index.values() if w.shares}


@pytest.mark.parametrize(("trial", "victim"), [(1, "cpu:0"), (2, "cpu:1")])
def test_a_crew_that_loses_a_worker_is_lost_and_resumes(
    executor: Executor, trial: int, victim: str, tmp_path: Path
) -> None:
    run = Drive(executor)
    run.on_event = run.retry_lost
    work = segment(trial, until=EPOCHS, config={"go": str(tmp_path / "go"), "at": 4})
    run.submit([work])
    run.start([work], [Share("cpu:0"), Share("cpu:1")], max_devices=2)
    run.until(lambda: len(run.reports(trial)) >= 3)
    os.kill(workers_of(executor)[victim], signal.SIGKILL)
    (tmp_path / "go").touch()
    run.until(lambda: any(isinstance(e, Ended) and not e.lost for e in run.events))
    run.until(lambda: len(executor.free()) == 2)
    lost = [event for event in run.events if isinstance(event, Ended) and event.lost]
    assert len(lost) == 1
    assert run.ended(trial).status is TrialStatus.COMPLETED
    assert [r.epoch for r in run.reports(trial)][-1] == EPOCHS
    # Epochs with two workers count 3, those after the loss 1: none was done twice over or left out.
    spread = int(sum(r.metrics["size"] == 2 for r in {r.epoch: r for r in run.reports(trial)}.values()))
    assert run.reports(trial)[-1].metrics["loss"] == 3 * spread + (EPOCHS - spread)


def test_a_lead_that_tells_of_its_failure_after_its_trial_is_over_is_not_heard(
    executor: Any, tmp_path: Path
) -> None:
    """It may have told before it was ended because another worker died."""
    run = Drive(executor)
    work = segment(3, until=EPOCHS, config={"go": str(tmp_path / "go"), "at": 4})
    run.submit([work])
    run.start([work], [Share("cpu:0"), Share("cpu:1")], max_devices=2)
    run.until(lambda: len(run.reports(3)) >= 2)
    [errands] = executor._errands.values()
    os.kill(workers_of(executor)["cpu:1"], signal.SIGKILL)
    (tmp_path / "go").touch()
    run.finish(1)
    run.until(lambda: len(executor.free()) == 2)
    lead = next(errand for errand in errands if errand.rank == 0)
    late = ("e", lead.number, 3, time.time(), "failed", 2, "Connection closed by peer", "", False, None)
    executor._of_crew(lead, lead.crew, late, time.time())
    assert not executor.poll(0.0)
    assert sum(isinstance(event, Ended) for event in run.events) == 1


@pytest.mark.parametrize("spread", ["threads", "workers"])
def test_a_study_of_elastic_tasks_finds_what_it_finds_without(tmp_path: Path, spread: Any) -> None:
    space = pk.Space(lr=pk.Float(1e-3, 1e-1, log=True))
    overhead = pk.Overhead(beta=1.05, max_devices=2, epsilon_s=0.0)
    found = {}
    for name, planner in (("plain", None), ("fluid", pk.Fluid(overhead, spread=spread))):
        found[name] = pk.Study(
            TASK,
            space,
            minimize="loss",
            scheduler=pk.Halving(max_epochs=20, min_epochs=5, trials=3, eta=3),
            sampler=pk.Random(),
            executor=pk.Local(2),
            planner=planner,
            store=tmp_path / f"{name}.db",
            fuse=False,
            meter=False,
        ).run()
    for ours, theirs in zip(found["fluid"].trials, found["plain"].trials, strict=True):
        assert ours.status is theirs.status
        assert [r.epoch for r in ours.reports] == [r.epoch for r in theirs.reports]
        for one, other in zip(ours.reports, theirs.reports, strict=True):
            assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-9)
    # The last trial had the machine to itself, and took it.
    assert max(len(record.shares) for record in found["fluid"].trials) == 2
    assert all(len(record.shares) == 1 for record in found["plain"].trials)


class Silent:
    """Tells of no iterations."""

    penstock_devices = 2

    def __call__(self, run: pk.Run) -> None:
        for epoch in run.epochs():
            run.save(epoch)
            run.report(loss=1.0)


@pytest.mark.parametrize("work", [TASK, Silent()], ids=["task", "function"])
def test_on_imagined_gpus_a_spread_trial_draws_what_it_draws_alone(work: Any) -> None:
    """The samples are the same, whoever trains them; no GPU of the two waits here, so none draws more."""
    load = Load(epoch_s=10.0, duty=0.6, peak_w=200.0, light_w=60.0)
    drawn = {}
    for width in (1, 2):
        study = pk.Study(
            work,
            pk.Space(lr=pk.Float(1e-3, 1.1e-3)),
            minimize="loss",
            scheduler=pk.Full(trials=1, epochs=2),
            executor=pk.Local(width),
            fuse=False,
            planner=pk.Fluid(overhead=Overhead(alpha=1.3, beta=1.1, max_sharing=1, max_devices=2)),
            meter=pk.SimulatedGpus(load, samples=500),
            store=False,
            seed=1,
        ).run()
        assert len(study.trials[0].shares) == width
        drawn[width] = [report.energy.joules for report in study.trials[0].reports]
    whole = V100.epoch_s(load, V100.max_limit_w) * V100.power_w(load, V100.max_limit_w)
    assert drawn[1] == pytest.approx([whole] * 2)
    assert drawn[2] == pytest.approx(drawn[1])


SEEN: list[float] = []


def noticing(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    SEEN.append(float(torch.get_num_threads()))
    return functional.mse_loss(output, targets)


def threads(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The most of its steps: where one thread is quicker, a wide trial uses one for a while."""
    most = max(SEEN)
    SEEN.clear()
    return torch.tensor(most)


def variable(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(os.environ["OMP_NUM_THREADS"]))


def workers(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    together = torch.distributed.is_initialized()
    return torch.tensor(float(torch.distributed.get_world_size() if together else 1))


@pytest.mark.parametrize(
    ("spread", "wide"), [("threads", (2, 2, 1)), ("workers", (1, 1, 2))], ids=["threads", "workers"]
)
def test_a_wide_task_has_the_threads_of_its_devices_or_a_worker_on_each(
    tmp_path: Path, spread: Any, wide: tuple[int, int, int]
) -> None:
    """As its own workers tell: on one device, then on two, then on one again."""
    seen = {"threads": threads, "variable": variable, "workers": workers}
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "defaults": {"lr": 0.01, "width": 8}}
    work = pk.Task(net, data, noticing, metrics=seen, batch_size=50, **options)
    local = pk.Local(2)
    local.open(Job(work, tmp_path, ("loss",), meter=False, options={"spread": spread}))
    try:
        told = []
        for trial, devices in enumerate([("cpu:0",), ("cpu:0", "cpu:1"), ("cpu:1",)]):
            run = Drive(local)
            part = segment(trial, until=1)
            part = replace(part, trial=replace(part.trial, config={"lr": 0.01}))
            run.submit([part])
            run.start([part], [Share(name) for name in devices], max_devices=2)
            run.finish(1)
            (report,) = run.reports(trial)
            told.append(tuple(report.metrics[name] for name in seen))
    finally:
        local.close()
    assert told == [(1, 1, 1), wide, (1, 1, 1)]


def test_a_wide_task_trained_by_threads_may_have_any_loss(tmp_path: Path) -> None:
    """A sum over the batch: several workers would have to train each all of it."""
    work = pk.Task(net, data, squares, optimizer=torch.optim.Adam, defaults={"width": 8}, batch_size=50)
    overhead = pk.Overhead(beta=1.05, max_devices=2, epsilon_s=0.0)
    losses = {}
    for name, planner in (("plain", None), ("fluid", pk.Fluid(overhead, concurrency=1))):
        study = pk.Study(
            work,
            pk.Space(lr=pk.Float(0.005, 0.02)),
            minimize="loss",
            scheduler=pk.Full(trials=1, epochs=3),
            sampler=pk.Random(),
            executor=pk.Local(2),
            planner=planner,
            store=tmp_path / f"{name}.db",
            fuse=False,
            meter=False,
        ).run()
        losses[name] = [report.metrics["loss"] for report in study.trials[0].reports]
        assert len(study.trials[0].shares) == (1 if planner is None else 2)
        assert not any(note.topic == "undivided" for note in study.state.notes)
    assert losses["fluid"] == pytest.approx(losses["plain"], rel=1e-9)


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, targets, reduction="sum")


def test_trials_whose_loss_is_a_sum_stay_on_one_device_and_the_study_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = pk.Task(net, data, squares, optimizer=torch.optim.Adam, defaults={"width": 8}, batch_size=50)
    found = {}
    overhead = pk.Overhead(beta=1.05, max_devices=2, epsilon_s=0.0)
    for name, planner in (("plain", None), ("fluid", pk.Fluid(overhead, concurrency=1, spread="workers"))):
        found[name] = pk.Study(
            work,
            pk.Space(lr=pk.Float(0.005, 0.02)),
            minimize="loss",
            scheduler=pk.Full(trials=3, epochs=15),  # the last one is alone for most of them, and spreads
            sampler=pk.Random(),
            executor=pk.Local(2),
            planner=planner,
            store=tmp_path / f"{name}.db",
            fuse=False,
            meter=False,
        ).run(view="lines")
    for ours, theirs in zip(found["fluid"].trials, found["plain"].trials, strict=True):
        for one, other in zip(ours.reports, theirs.reports, strict=True):
            assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-9)
    # One was on both, each with whole batches, which is where the loss was looked at; it may end there, or give one
    # back before its end. After it none has more than it can use.
    assert sum(len(record.shares) > 1 for record in found["fluid"].trials) <= 1
    told = "".join(capsys.readouterr())
    assert told.count("loss=squares") == 1
    assert "a mean over the batch" in told
