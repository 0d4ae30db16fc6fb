"""A trial on several workers gives what it gives on one, whenever their number changes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.train._checkpoint import FileCheckpoints, Report
from penstock.train._elastic import Crew, _loss_by_parts, _norm_forward, _passed, joined, most_devices
from penstock.train._loader import order_of
from penstock.train._loop import Trainer
from penstock.train._worker import Settings, Spec, execute
from penstock.train._world import World

EPOCHS = 6


class Net(nn.Module):
    """All that makes a batch more than its rows: batch norm, dropout of values and of channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout2d(0.2)
        self.last = nn.Linear(width * 36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.last(functional.dropout(x.flatten(1), 0.3, self.training))


def data() -> pk.Data:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(151, 1, 8, 8, generator=generator)
    targets = (inputs.mean((1, 2, 3)) * 20).clamp(-1, 1).round().long() + 1
    return pk.Data((inputs[:101], targets[:101]), (inputs[101:], targets[101:]))


def schedule(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def accuracy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == targets).float().mean()


def summed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, targets, reduction="sum")


def weighed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Divided by the weights of the batch, which its parts have not in equal measure."""
    return functional.cross_entropy(output, targets, weight=torch.tensor([1.0, 5.0, 25.0]))


def task(loss: Any = functional.cross_entropy, **options: Any) -> pk.Task:
    return pk.Task(
        Net,
        data(),
        loss,
        metrics={"accuracy": accuracy},
        optimizer=torch.optim.SGD,
        schedule=schedule,
        epochs=EPOCHS,
        eval_batch_size=16,
        **{"metrics_on": "set", "clip_norm": 1.0, **options},
    )


def plain(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 3))


class Sink:
    """Keeps reports; says stop after so many epochs."""

    def __init__(self, stop_at: int) -> None:
        self.reports: list[Report] = []
        self.stop_at = stop_at

    def reported(self, report: Report) -> None:
        self.reports.append(report)

    def saved(self, epoch: int, path: str) -> None:
        pass

    def told(self) -> tuple[str, bool] | None:
        done = self.reports and self.reports[-1][0] >= self.stop_at
        return ("other shares", True) if done else None


CONFIG = {"width": 4, "lr": 0.05, "momentum": 0.9, "batch_size": 32}


def member(
    work: Any,
    config: dict[str, Any],
    files: Path,
    world: tuple[int, int, str] | None,
    stop_at: int,
    known: int,
    pipe: Any,
) -> None:
    """One worker's part of a segment."""
    torch.set_num_threads(1)
    sink = Sink(stop_at)
    spec = Spec(0, config, 3, 0, EPOCHS, True, None, None, known, 0)
    end = execute(work, spec, Settings(files, ("loss",)), sink, world=world)
    pipe.send((end, [report[:2] for report in sink.reports]))


def crew_of(
    size: int, work: Any, files: Path, until: int = EPOCHS, known: int = 0, **config: Any
) -> list[tuple[Any, list[Any]]]:
    """How a trial ends on so many workers, and what it reports, by each of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "torch._dynamo",
            "penstock.train._loop",
            "pytest",
        ]  # what an optimizer imports, too
    )
    files.mkdir(exist_ok=True)
    config = {**CONFIG, **config}
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        world = None if size == 1 else (rank, size, str(files / f"meet-{known}-{size}"))
        process = context.Process(target=member, args=(work, config, files, world, until, known, theirs))
        process.start()
        started.append((process, ours))
    answers = [pipe.recv() if pipe.poll(600) else None for _, pipe in started]
    for process, _ in started:
        if None in answers:
            process.kill()
        process.join()
    assert None not in answers, "a worker waits for another"
    return [answer for answer in answers if answer is not None]


def train(
    work: Any, files: Path, plan: list[tuple[int, int]], **config: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Reports and final state of a trial that is trained by (workers, until epoch) one after the other."""
    config = {**CONFIG, **config}
    reports: list[Any] = []
    for size, until in plan:
        known = reports[-1][0] if reports else 0
        answers = crew_of(size, work, files, until, known, **config)
        end, heard = answers[0]
        assert end.status == ("completed" if until == EPOCHS else "paused"), end
        assert end.epoch == until
        assert all(not heard for _, heard in answers[1:]), "a follower reported"
        reports += heard
    found = FileCheckpoints(files, 0, seed=3, config=config, until=EPOCHS).find()
    assert found is not None
    return reports, found.load("cpu")


def same(ours: Any, theirs: Any, path: str = "state") -> None:
    """Equal but for rounding."""
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda text: f"{path}: {text}")
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{path}[{number}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), path
    else:
        assert ours == theirs, path


@pk.elastic(max_devices=2)
def adding(run: pk.Run) -> None:
    base = torch.arange(6.0).reshape(2, 3) * (run.world.rank + 1)
    leaf = torch.full((4,), 10.0**run.world.rank, requires_grad=True)
    several = [base, base.double().T, leaf, torch.tensor(2 + run.world.rank), torch.empty(0)]
    run.world.all_reduce(several)
    assert base.tolist() == several[1].T.tolist()
    assert leaf.requires_grad
    for _ in run.epochs():
        run.save(None)
        run.report(loss=float(base[1, 2]), leaf=float(leaf.sum()), count=int(several[3]))


def test_a_gradient_that_is_not_there_is_told_before_a_trial_spreads() -> None:
    with pytest.raises(InvalidInput, match=r"got None in place 1\. .* if p\.grad is not None"):
        World().all_reduce([torch.zeros(1), None])  # type: ignore[list-item]


@pytest.mark.parametrize(("size", "sums"), [(1, (5, 4, 2)), (2, (5 + 10, 44, 2 + 3))])
def test_a_worlds_tensors_of_several_kinds_are_added_up_in_place(
    size: int, sums: tuple[float, ...], tmp_path: Path
) -> None:
    end, heard = crew_of(size, adding, tmp_path, until=1)[0]
    assert end.status == "paused", end
    _, metrics = heard[0]
    assert (metrics["loss"], metrics["leaf"], metrics["count"]) == sums


def test_one_two_one_workers_train_as_one_throughout(tmp_path: Path) -> None:
    work = task()
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)])
    spread, other = train(work, tmp_path / "spread", [(1, 2), (2, 4), (1, EPOCHS)])
    assert [epoch for epoch, _ in spread] == [1, 2, 3, 4, 5, 6]
    same(alone, spread)
    for part in ("model", "optimizer", "schedule", "epoch"):
        same(state[part], other[part], part)
    # It is a training worth comparing, and the batches leave rows that 2 workers can't share evenly.
    assert alone[-1][1]["train_loss"] < 0.9 * alone[0][1]["train_loss"]
    assert 101 % 32 % 2 == 1


def test_three_workers_and_a_batch_too_small_for_all(tmp_path: Path) -> None:
    # 101 rows in batches of 33: the last batch has two rows, fewer than there are workers.
    work = task(metrics_on="batch")
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)], batch_size=33)
    spread, other = train(work, tmp_path / "spread", [(3, EPOCHS)], batch_size=33)
    same(alone, spread)
    same(state["model"], other["model"])


@pytest.mark.parametrize(("loss", "lr"), [(summed, 0.001), (weighed, 0.05)])
def test_a_loss_that_is_no_mean_trains_as_one_worker_does(tmp_path: Path, loss: Any, lr: float) -> None:
    work = task(loss, clip_norm=None)
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)], lr=lr)
    spread, other = train(work, tmp_path / "spread", [(2, EPOCHS)], lr=lr)
    same(alone, spread)
    same(state["model"], other["model"])


def test_a_loss_that_passes_over_a_few_targets_trains_as_one_worker_does(tmp_path: Path) -> None:
    """The first batch has none of them, so that its parts are as good as the whole."""
    inputs, targets = data().train
    order = order_of(len(targets), 3, 0)
    targets[order[[27, 90, 95]]] = -100
    work = pk.Task(plain, pk.Data((inputs, targets)), functional.cross_entropy, epochs=EPOCHS)
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)], batch_size=8)
    spread, other = train(work, tmp_path / "spread", [(2, EPOCHS)], batch_size=8)
    same(alone, spread)
    same(state["model"], other["model"])


@pytest.mark.parametrize(
    ("loss", "divides"), [(functional.cross_entropy, True), (summed, False), (weighed, False)]
)
def test_a_look_at_the_loss_tells_means_from_others_and_leaves_no_trace(loss: Any, divides: bool) -> None:
    trainer = Trainer(task(loss), CONFIG, seed=3)
    inputs, targets = data().train
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = _loss_by_parts(trainer, inputs, targets, len(inputs), 3)
    assert torch.equal(torch.get_rng_state(), drawn)
    same(trainer.model.state_dict(), before)
    assert (found is None) == divides
    if found is not None and loss is summed:
        # Of parts of a third each, the sums have a third of the whole one on average, but for rows that are left over.
        assert found[0] / found[1] == pytest.approx(3, rel=0.02)


class Writing(nn.Module):
    """Writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.mul_(0.5).flatten(1))


def test_looks_leave_a_batch_alone_that_the_model_writes_into() -> None:
    trainer = Trainer(pk.Task(Writing, data(), functional.cross_entropy), {"lr": 0.1}, seed=3)
    inputs, targets = data().train
    kept = inputs.clone()
    assert _loss_by_parts(trainer, inputs, targets, len(inputs), 3) is None
    _passed(trainer, inputs)
    assert torch.equal(inputs, kept)


class Attentive(nn.Module):
    """Dropout where nobody can draw it for the whole batch: within torch's attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 4 * width)
        self.layer = nn.TransformerEncoderLayer(4 * width, 2, 16, 0.3, batch_first=True)
        self.last = nn.Linear(4 * width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.lift(x.squeeze(1))).mean(1))


def test_a_model_that_draws_for_its_part_alone_trains_as_one_worker_does(tmp_path: Path) -> None:
    work = task()
    work.model = Attentive
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)])
    spread, other = train(work, tmp_path / "spread", [(2, EPOCHS)])
    same(alone, spread)
    same(state["model"], other["model"])


class Given(nn.Module):
    """Puts its input through a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(64, 3)
        self.register_buffer("mean", torch.zeros(64))
        self.code = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, x.flatten(1)))


def averaged(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean = 0.9 * model.mean + 0.1 * x.mean(0)
    return x


def coded(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.code.data.lerp_(x.mean(0), 0.1)
    return x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda model, x: functional.dropout(x, 0.3), None),
        (lambda model, x: x * torch.rand(1), None),  # one number for all
        (lambda model, x: x + torch.randn_like(x), "other random numbers"),
        (lambda model, x: x - x.mean(0), "mixes the rows"),
        (averaged, "updates mean"),
        (coded, "updates code"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_look_at_the_model_tells_parts_from_the_whole_and_leaves_no_trace(
    rank: int, function: Any, words: str | None
) -> None:
    trainer = Trainer(task(), CONFIG, seed=3, model=Given(function))
    inputs, _ = data().train
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    drawn = torch.get_rng_state()
    crew = Crew(World(rank, 2))
    with crew._whole_batches(trainer.model):
        found = crew._odd_forward(trainer, inputs, len(inputs))
    assert torch.equal(torch.get_rng_state(), drawn)
    same(trainer.model.state_dict(), before)
    assert found is None if words is None else words in str(found)


def test_a_look_tells_whether_the_model_takes_a_part_at_all() -> None:
    """Each worker by itself, also where batch norm sees a single row."""
    inputs, _ = data().train
    fixed = Given(lambda model, x: x.view(101, 64))
    normed = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    for model, size, words in ((fixed, 2, "fails on a part of a batch of 101"), (normed, 101, None)):
        trainer = Trainer(task(), CONFIG, seed=3, model=model)
        crew = Crew(World(0, size))
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        with crew._whole_batches(trainer.model):
            found = crew._fails_on_part(trainer, inputs, len(inputs))
        same(trainer.model.state_dict(), before)
        assert found is None if words is None else words in str(found)


class Picky(nn.Module):
    """Takes no batch of 10, before its batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Net(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) == 10:
            raise ValueError("not of 10")
        return self.inner(x)


def test_where_one_worker_alone_cant_take_its_part_each_trains_the_whole(tmp_path: Path) -> None:
    work = task()
    work.model = Picky
    alone, state = train(work, tmp_path / "alone", [(1, EPOCHS)])
    spread, other = train(work, tmp_path / "spread", [(3, EPOCHS)])  # batches of 32: 10, 11 and 11
    same(alone, spread)
    same(state["model"], other["model"])


class Failing(nn.Module):
    """Fails on one of two workers alone, in the midst of its training."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.inner, self.rank, self.steps = Net(width), rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > 9 and torch.distributed.get_rank() == self.rank:
            raise ValueError(f"seen by rank {self.rank} alone")
        return self.inner(x)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_worker_is_that_of_all(tmp_path: Path, rank: int) -> None:
    """At once, not when the others have waited for it for an hour; and its own error, not that they lost it."""
    work = task()
    work.model = Failing
    ends = [end for end, _ in crew_of(2, work, tmp_path, rank=rank)]
    assert [end.status for end in ends] == ["failed", "failed"]
    assert {end.reason for end in ends} == {f"ValueError: seen by rank {rank} alone"}
    assert all("raise ValueError(f" in end.error for end in ends)


def test_who_can_spread() -> None:
    assert most_devices(task()) > 1000
    assert most_devices(lambda run: None) == 1

    @pk.elastic
    def many(run: pk.Run) -> None: ...

    @pk.elastic(max_devices=4)
    def some(run: pk.Run) -> None: ...

    assert most_devices(many) > 1000
    assert most_devices(some) == 4
    with pytest.raises(InvalidInput, match="max_devices"):
        pk.elastic(max_devices=0)
    for mistake in (lambda: pk.elastic(3), lambda: pk.elastic(max_devices=2)(3)):
        with pytest.raises(InvalidInput, match=r"got 3.*@pk\.elastic"):
            mistake()


@pytest.mark.parametrize("affine", [True, False])
def test_whole_batch_norm_has_torchs_own_derivatives(tmp_path: Path, affine: bool) -> None:
    """First and second ones: a gradient penalty is a derivative of a derivative."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, 2, 2, generator=generator, dtype=torch.float64)
    outer = torch.randn(6, 3, 2, 2, generator=generator, dtype=torch.float64)

    def derivatives(forward: Any, norm: nn.Module) -> list[torch.Tensor]:
        x = inputs.clone().requires_grad_()
        out = (forward(x) * outer).square().sum()
        wanted = [x, *norm.parameters()]
        first = torch.autograd.grad(out, wanted, retain_graph=True)
        (again,) = torch.autograd.grad(out, [x], create_graph=True)
        second = torch.autograd.grad(again.square().sum(), wanted[:2])
        return [out.detach(), *first, *second, *norm.buffers()]

    def norm() -> nn.BatchNorm2d:
        made = nn.BatchNorm2d(3, affine=affine).double()
        for number, parameter in enumerate(made.parameters()):
            parameter.data.copy_(torch.tensor([0.5, 1.5, -2.0]) + number)
        return made

    plain, ours = norm(), norm()
    with joined((0, 1, str(tmp_path / "meet")), "cpu") as crew:
        crew._rows = (0, 6, 6)
        found = derivatives(_norm_forward(crew, ours), ours)
    for mine, theirs in zip(found, derivatives(plain, plain), strict=True):
        torch.testing.assert_close(mine, theirs)
