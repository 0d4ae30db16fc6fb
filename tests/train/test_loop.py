"""The training loop against a hand-written one, and interruptions at every step."""

import copy
import io
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.train._loader import derive, order_of
from penstock.train._loop import Trainer, private_randomness, seed_everything, train
from penstock.train._lr_range import find_lr
from penstock.train._task import Data, Task


def make_data(n=90, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = (x @ torch.randn(6, 3, generator=g)).argmax(1)
    return Data(train=(x[: n * 2 // 3], y[: n * 2 // 3]), val=(x[n * 2 // 3 :], y[n * 2 // 3 :]))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def net(config):
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(config.get("dropout", 0.2)),
        nn.Linear(16, 3),
    )


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(BaseException):
    pass


class FakeRun:
    """A Run in memory that keeps a checkpoint once its epoch is reported, as the real one does."""

    def __init__(self, config, seed=1, until=None, options=None, store=None, folder=None):
        self.config, self.seed, self.device = config, seed, "cpu"
        self.until, self.options, self.folder = until, options or {}, folder
        self.store = {} if store is None else store
        self.reports = self.store.setdefault("reports", {})

    def epochs(self):
        epoch = self.store.get("epoch", 0)
        while self.until is None or epoch < self.until:
            self.staged = None
            yield epoch
            epoch += 1
            self.commit(epoch)

    def commit(self, epoch):
        self.store["epoch"] = epoch
        if self.staged is not None:
            self.store["state"] = self.staged

    def report(self, **metrics):
        self.last = metrics
        self.reports[self.store.get("epoch", 0) + 1] = metrics

    def save(self, state):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.staged = buffer.getvalue()

    def load(self):
        kept = self.store.get("state")
        return None if kept is None else torch.load(io.BytesIO(kept), weights_only=False)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    return a == b


def test_it_equals_a_hand_written_loop():
    data = make_data()
    task = Task(net, data, F.cross_entropy, metrics={"accuracy": accuracy}, epochs=3)
    config = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "batch_size": 16, "dropout": 0.3}
    run = FakeRun(config, seed=11)
    train(task, run)

    with private_randomness():
        seed_everything(derive(11, "init"))
        model = net(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        (x, y), (vx, vy) = data.train, data.val
        for epoch in range(3):
            seed_everything(derive(11, "epoch", epoch))
            order = order_of(len(x), 11, epoch)
            model.train()
            total = 0.0
            for i in range(0, len(x), 16):
                index = order[i : i + 16]
                loss = F.cross_entropy(model(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach().double()) * len(index)
            model.eval()
            with torch.no_grad():
                out = model(vx)
            found = run.reports[epoch + 1]
            assert found["train_loss"] == pytest.approx(total / len(x), rel=1e-12)
            assert found["loss"] == pytest.approx(float(F.cross_entropy(out, vy)), rel=1e-6)
            assert found["accuracy"] == float(accuracy(out, vy))
    final = torch.load(io.BytesIO(run.staged), weights_only=False)["model"]
    for key, value in model.state_dict().items():
        assert torch.equal(value, final[key]), key


class Writing(nn.Module):
    """Scales its inputs where they lie, or makes new ones."""

    def __init__(self, in_place):
        super().__init__()
        self.body, self.in_place = nn.Linear(6, 3), in_place

    def forward(self, x):
        return self.body(x.mul_(0.5) if self.in_place else x * 0.5)


def test_a_model_that_writes_into_its_inputs_spoils_neither_data_nor_looks():
    given = make_data()
    kept = given.train[0].clone(), given.val[0].clone()
    tasks = [
        Task(lambda config, w=w: Writing(w), given, F.cross_entropy, batch_size=16) for w in (False, True)
    ]
    plain, writing = (Trainer(task, {"lr": 0.1}, seed=1) for task in tasks)
    batch = next(writing.data.train.batches(8))
    assert writing.peek(batch) == writing.peek(batch)
    for _ in range(2):
        assert writing.train_epoch() == plain.train_epoch()
    assert torch.equal(given.train[0], kept[0])
    assert torch.equal(given.val[0], kept[1])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_kill_at_any_step_and_a_resume_give_the_same_bits(tmp_path, optimizer):
    """Every step of 2 epochs x 4 steps is the last one in turn; step checkpoints every 1, 2 or never."""
    calls = {"n": 0, "kill": math.inf}

    def loss(output, target):
        if output.requires_grad:
            calls["n"] += 1
            if calls["n"] == calls["kill"]:
                raise Killed
        # Python's and numpy's generators take part, so a resume must restore them too.
        return F.cross_entropy(output, target) * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))

    def schedule(optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)

    def build(steps):
        return Task(
            net, make_data(), loss, metrics={"accuracy": accuracy}, optimizer=optimizer, epochs=2, schedule=schedule,
            clip_norm=1.0, checkpoint_steps=steps,
        )  # fmt: skip

    config = {"lr": 0.05, "batch_size": 16}
    whole = FakeRun(config, until=2, folder=tmp_path)
    calls.update(n=0, kill=math.inf)
    train(build(None), whole)
    in_all = calls["n"]
    assert in_all == 2 * 4 + 1  # and one look at the loss before the first step
    for steps in (1, 2, None):
        task = build(steps)
        for kill in range(2, in_all + 1):
            folder = tmp_path / f"{steps}-{kill}"
            folder.mkdir()
            store = {}
            calls.update(n=0, kill=kill)
            with pytest.raises(Killed):
                train(task, FakeRun(config, until=2, store=store, folder=folder))
            calls.update(n=0, kill=math.inf)
            seed_everything(12345)  # another process, other generators
            again = FakeRun(config, until=2, store=store, folder=folder)
            train(task, again)
            assert again.reports == whole.reports, (steps, kill)
            assert same(again.load(), whole.load()), (steps, kill)
            if steps == 1 and kill > 3 and (kill - 2) % 4 > 0:
                # It went on within the epoch instead of starting it over, and looks at the loss no more.
                assert calls["n"] == in_all - 1 - (kill - 2)


def test_a_step_checkpoint_of_another_configuration_is_ignored(tmp_path):
    calls = {"n": 0, "kill": 4}

    def loss(output, target):
        calls["n"] += output.requires_grad
        if calls["n"] == calls["kill"]:
            raise Killed
        return F.cross_entropy(output, target)

    task = Task(net, make_data(), loss, epochs=1, checkpoint_steps=1)
    with pytest.raises(Killed):
        train(task, FakeRun({"lr": 0.1, "batch_size": 16}, folder=tmp_path))
    assert (tmp_path / "step.ckpt").exists()
    calls["kill"] = math.inf
    other, clean = (FakeRun({"lr": 0.2, "batch_size": 16}, folder=f) for f in (tmp_path, tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    train(task, other)
    train(task, clean)
    assert other.reports == clean.reports
    (tmp_path / "step.ckpt").write_bytes(b"damaged")
    again = FakeRun({"lr": 0.2, "batch_size": 16}, folder=tmp_path)
    train(task, again)
    assert again.reports == clean.reports


def test_trials_do_not_disturb_each_other_or_the_process():
    task = Task(net, make_data(), F.cross_entropy, epochs=2)
    config = {"lr": 0.1, "batch_size": 16}
    alone = FakeRun(config, seed=5)
    train(task, alone)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    a, b = FakeRun(config, seed=5), FakeRun({**config, "lr": 0.5}, seed=6)
    train(task, b)
    torch.randn(100)
    torch.set_rng_state(before[0])
    train(task, a)
    assert a.reports == alone.reports
    assert a.reports != b.reports
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_epochs_come_from_the_task_unless_a_scheduler_sets_them():
    task = Task(net, make_data(), F.cross_entropy, epochs=2)
    free, bounded = FakeRun({"lr": 0.1}), FakeRun({"lr": 0.1}, until=4)
    train(task, free)
    train(task, bounded)
    assert list(free.reports) == [1, 2]
    assert list(bounded.reports) == [1, 2, 3, 4]


def test_a_segment_goes_on_where_the_last_one_stopped():
    task = Task(net, make_data(), F.cross_entropy)
    whole = FakeRun({"lr": 0.1}, until=4)
    train(task, whole)
    store = {}
    train(task, FakeRun({"lr": 0.1}, until=2, store=store))
    train(task, FakeRun({"lr": 0.1}, until=4, store=store))
    assert store["reports"] == whole.reports


class Follower(nn.Module):
    """A teacher in frozen weights follows its student at every call."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.mul_(0.8).add_(mine, alpha=0.2)
        return self.student(x) - self.teacher(x)


def test_a_look_before_the_first_step_leaves_frozen_weights_alone():
    task = Task(Follower, make_data(), F.cross_entropy)
    whole = FakeRun({"lr": 0.1}, until=4)
    train(task, whole)
    store = {}
    for until in range(1, 5):  # each segment looks at its first batch
        train(task, FakeRun({"lr": 0.1}, until=until, store=store))
    assert store["reports"] == whole.reports


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_trials_would_share_are_refused_unless_they_are_frozen(frozen):
    body = nn.Linear(6, 6).requires_grad_(not frozen)
    task = Task(lambda: nn.Sequential(body, nn.Linear(6, 3)), make_data(), F.cross_entropy)
    with private_randomness():
        first = Trainer(task, {"lr": 0.1}, seed=1)
        first.train_epoch()
        first.clone().train_epoch()  # of the same trial
        del first
        if frozen:
            Trainer(task, {"lr": 0.1}, seed=2).train_epoch()
        else:
            with pytest.raises(InvalidInput, match=r"the weights '0\.weight' a second time.*deepcopy"):
                Trainer(task, {"lr": 0.1}, seed=2)
    task = Task(lambda: copy.deepcopy(body), make_data(), F.cross_entropy)
    if not frozen:
        for seed in range(2):
            Trainer(task, {"lr": 0.1}, seed=seed)


class FirstBatch(nn.Module):
    """Sets its weights by the first batch that it sees, and counts and lists its calls."""

    def __init__(self):
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)
        self.is_set, self.calls, self.seen = False, 0, []

    def forward(self, x):
        if self.training:
            if not self.is_set:
                self.scale.data = 1 / x.std(0)
                self.is_set = True
            self.calls += 1
            self.seen.append(len(x))
        return self.body(x * self.scale)


def test_a_look_before_the_first_step_leaves_what_layers_keep_as_it_was():
    data = make_data()
    task = Task(FirstBatch, data, F.cross_entropy, batch_size=32)
    with private_randomness():
        trainer = Trainer(task, {"lr": 0.0}, seed=2)
        trainer.train_epoch()
    x = data.train[0]
    first = x[order_of(len(x), 2, 0)[:32]]
    torch.testing.assert_close(trainer.model.scale.detach(), 1 / first.std(0))
    assert trainer.model.calls == trainer.steps_per_epoch
    assert sum(trainer.model.seen) == len(x)


def test_the_target_ends_the_training():
    task = Task(
        net,
        make_data(),
        F.cross_entropy,
        metrics={"accuracy": accuracy},
        epochs=200,
        target=("accuracy", 0.8),
    )
    run = FakeRun({"lr": 0.2, "batch_size": 16})
    train(task, run)
    values = [m["accuracy"] for m in run.reports.values()]
    assert values[-1] >= 0.8
    assert max(values[:-1], default=0) < 0.8


@pytest.mark.parametrize("kind", ["steps", "epochs", "plateau"])
def test_schedules_are_stepped_as_torch_would(kind):
    if kind == "steps":

        def schedule(optimizer, steps):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    elif kind == "epochs":

        def schedule(optimizer, gamma):
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    else:

        def schedule(optimizer):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.9999
            )

    task = Task(net, make_data(), F.cross_entropy, schedule=schedule, epochs=4)
    config = {"lr": 0.1, "batch_size": 16, "dropout": 0.1, **({"gamma": 0.5} if kind == "epochs" else {})}
    trainer = Trainer(task, config, seed=0)
    trainer.train_epoch()
    trainer.train_epoch()
    expected = {
        "steps": 0.1 * (1 + math.cos(math.pi * 8 / 16)) / 2,
        "epochs": 0.1 * 0.25,
        "plateau": 0.1 * 0.5,  # the second epoch is not 10,000 times better
    }[kind]
    assert trainer.lr == pytest.approx(expected)


def test_setting_the_lr_scales_a_schedule():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    trainer = Trainer(Task(net, make_data(), F.cross_entropy, schedule=schedule), {"lr": 0.1}, seed=0)
    trainer.train_epoch()
    trainer.set_lr(0.4)
    assert trainer.lr == pytest.approx(0.4)
    trainer.train_epoch()
    assert trainer.lr == pytest.approx(0.04)


def warm_then_cosine(optimizer, steps):
    made = torch.optim.lr_scheduler
    first, then = made.LinearLR(optimizer, 0.1, total_iters=4), made.CosineAnnealingLR(optimizer, steps - 4)
    return made.SequentialLR(optimizer, [first, then], [4])


RELATIVE = {
    "linear": lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
    "lambda": lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (s + 1) / steps),
    "chained": lambda optimizer, steps: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.3, 4), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "sequential": warm_then_cosine,
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("config", [{}, {"lr": 0.02}], ids=["none before", "another before"])
def test_a_rate_that_was_found_is_scheduled_as_if_it_had_been_given(name, config):
    def optimizer(parameters, lr):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": lr / 10}], lr=lr)

    task = Task(
        net,
        make_data(),
        F.cross_entropy,
        optimizer=optimizer,
        schedule=RELATIVE[name],
        epochs=2,
        batch_size=8,
    )

    def rates(trainer):
        for batch in [*trainer.data.train.batches(8)] * 2:
            yield [group["lr"] for group in trainer.optimizer.param_groups]
            trainer.run_steps([batch])

    with private_randomness():
        found = Trainer(task, config, seed=0, lr_is_found=True)
        found.set_lr(0.5)
        for mine, theirs in zip(rates(found), rates(Trainer(task, {"lr": 0.5}, seed=0)), strict=True):
            assert mine == pytest.approx(theirs)


@pytest.mark.parametrize("config", [{}, {"lr": 0.02}], ids=["none before", "another before"])
def test_a_warm_up_changes_nothing_of_the_rates_that_are_swept(config):
    warm, plain = (
        find_lr(Task(net, make_data(), F.cross_entropy, schedule=schedule, batch_size=8), config, lrs=8)
        for schedule in (warm_then_cosine, None)
    )
    assert warm.lr == plain.lr
    assert warm.loss == pytest.approx(plain.loss)


def test_a_schedule_with_rates_of_its_own_leaves_none_to_find():
    def schedule(optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)

    task = Task(net, make_data(), F.cross_entropy, schedule=schedule)
    with pytest.raises(InvalidInput, match="OneCycleLR sets learning rates of its own"):
        train(task, FakeRun({}, until=1, options={"mode": "explore"}))


def test_clipping_bounds_the_step():
    trainer = Trainer(
        Task(net, make_data(), F.cross_entropy, clip_norm=1e-3), {"lr": 1.0, "batch_size": 60}, seed=0
    )
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train_epoch()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    moved = torch.cat([(a - b).flatten() for a, b in pairs]).norm().detach()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


def test_what_the_optimizer_does_not_train_has_no_part_in_clipping():
    """Its gradients are never dropped: the norm of their sum grows, and the steps would get smaller and smaller."""

    def weights(params, lr):
        return torch.optim.SGD([p for p in params if p.dim() > 1], lr=lr)

    def frozen(config):
        model = net({})
        for p in model.parameters():
            p.requires_grad_(p.dim() > 1)
        return model

    tasks = [
        Task(model, make_data(), F.cross_entropy, optimizer=weights, batch_size=16, clip_norm=0.1)
        for model in (frozen, lambda config: net({}))
    ]
    wanted, found = (Trainer(task, {"lr": 0.1}, seed=1) for task in tasks)
    for _ in range(2):
        assert found.train_epoch() == wanted.train_epoch()


def test_mixed_precision_trains_in_bfloat16_on_a_cpu():
    seen = set()

    def loss(output, target):
        seen.add(output.dtype)
        return F.cross_entropy(output.float(), target)

    trainer = Trainer(Task(net, make_data(), loss, amp=True), {"lr": 0.1}, seed=0)
    first = trainer.train_epoch()["train_loss"]
    for _ in range(20):
        last = trainer.train_epoch()["train_loss"]
    assert seen == {torch.bfloat16}
    assert last < first
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_metrics_of_the_whole_set_and_of_batches():
    """A metric that is no mean over samples (R2) is right only on the whole set."""
    x = torch.linspace(-1, 1, 50).view(-1, 1)
    y = 3 * x

    def r2(output, target):
        return 1 - ((output - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()

    def build(on):
        task = Task(
            lambda: nn.Linear(1, 1), Data((x, y), (x, y)), F.mse_loss, metrics={"r2": r2}, eval_batch_size=7,
            metrics_on=on,
        )  # fmt: skip
        return Trainer(task, {"lr": 0.01}, seed=0)

    trainer = build("set")
    with torch.no_grad():
        out = trainer.model(x)
    assert trainer.evaluate()["r2"] == pytest.approx(float(r2(out, y)), rel=1e-5)
    assert trainer.evaluate()["loss"] == pytest.approx(float(F.mse_loss(out, y)), rel=1e-5)
    batches = [(out[i : i + 7], y[i : i + 7]) for i in range(0, 50, 7)]
    mean = sum(float(r2(a, b)) * len(a) for a, b in batches) / 50
    assert build("batch").evaluate()["r2"] == pytest.approx(mean, rel=1e-5)


def test_tuples_dicts_and_own_forwards():
    a, b = torch.randn(40, 3), torch.randn(40, 2)
    target = a.sum(1) + b.sum(1)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(2, 1)

        def forward(self, left, right):
            return (self.a(left) + self.b(right)).squeeze(1)

    losses = []
    for inputs, forward in (
        ((a, b), None),
        ({"left": a, "right": b}, None),
        ({"x": a, "y": b}, lambda model, batch: model(batch["x"], batch["y"])),
    ):
        data = Data((inputs, target), (inputs, target))
        trainer = Trainer(Task(Two, data, F.mse_loss, forward=forward), {"lr": 0.1}, seed=3)
        losses.append([trainer.train_epoch()["train_loss"] for _ in range(3)])
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < losses[0][0]


class Positioned(nn.Module):
    """Keeps the longest table of positions it has needed so far; validation has the larger batches."""

    def __init__(self):
        super().__init__()
        self.scale, self.head, self.table = nn.Parameter(torch.ones(())), nn.Linear(6, 3), torch.zeros(0)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(1.0, 1.0 + len(x)).unsqueeze(1)
        return self.head(x) * (self.scale * self.table[: len(x)] / 100)


def test_what_a_model_keeps_from_its_evaluation_can_be_trained_with():
    trainer = Trainer(Task(Positioned, make_data(), F.cross_entropy, batch_size=16), {"lr": 0.1}, seed=1)
    with private_randomness():
        losses = [trainer.train_epoch()["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


def test_a_language_model_and_a_lazy_one():
    tokens = torch.randint(0, 11, (64, 9), generator=torch.Generator().manual_seed(0))
    model = lambda: nn.Sequential(nn.Embedding(11, 8), nn.LazyLinear(11))  # noqa: E731

    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    task = Task(model, Data((tokens[:, :-1], tokens[:, 1:]), (tokens[:, :-1], tokens[:, 1:])), loss)
    trainer = Trainer(task, {"lr": 1.0}, seed=0)
    losses = [trainer.train_epoch()["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_a_clone_is_isolated():
    trainer = Trainer(
        Task(net, make_data(), F.cross_entropy, optimizer=torch.optim.Adam),
        {"lr": 0.1, "batch_size": 16},
        seed=0,
    )
    trainer.train_epoch()
    before = copy.deepcopy(trainer.state())
    with private_randomness():
        other = trainer.clone()
        assert same(other.state()["model"], before["model"])
        assert same(other.state()["optimizer"], before["optimizer"])
        other.train_epoch()
    after = trainer.state()
    assert same(before["model"], after["model"])
    assert same(before["optimizer"], after["optimizer"])
    assert not same(other.state()["model"], after["model"])


def test_a_clone_does_not_doubt_the_names_that_the_factory_took(recwarn):
    def wide(hidden_of_the_clone):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden_of_the_clone), nn.LazyLinear(3))

    config = {"hidden_of_the_clone": 5, "batch_size": 16, "lr": 0.1}
    with private_randomness():
        trainer = Trainer(Task(wide, make_data(), F.cross_entropy), config, seed=0)
        trainer.clone()
    assert not [w for w in recwarn if "hidden_of_the_clone" in str(w.message)]


def test_an_exploratory_epoch_changes_nothing_but_the_learning_rate():
    """SM2 4.4: both modes are isolated from each other."""
    options = {"mode": "explore", "lrs": 8, "lr_range": [1e-3, 1.0], "fraction": 0.5, "round": 0}
    config = {"batch_size": 4}
    trained, looked = [], []

    def forward(model, inputs):
        output = model(inputs)
        if output.requires_grad:
            output.register_hook(lambda grad: trained.append(len(grad)))
        else:
            looked.append(len(output))
        return output

    task = Task(
        net, make_data(), F.cross_entropy, metrics={"accuracy": accuracy}, optimizer=torch.optim.Adam,
        forward=forward,
    )  # fmt: skip
    store = {}
    run = FakeRun(config, until=1, options=options, store=store)
    train(task, run)
    found = run.reports[1]
    # What it took of the work of an epoch; samples that only go forward count a third.
    n, checked = (len(split[0]) for split in (make_data().train, make_data().val))
    assert found["sm2_fraction"] == pytest.approx((sum(trained) + sum(looked) / 3) / (n + checked / 3))
    assert 1e-3 <= found["sm2_lr"] <= 1.0
    # 24 steps of the sweep at most (batches are used again) and 4 of the 8 batches explored, of 60 samples.
    assert 4 * 4 < sum(trained) <= 24 * 4 + 4 * 4
    assert "accuracy" in found
    with private_randomness():
        fresh = Trainer(task, {**config, "lr": 1.0}, seed=1)
    kept = run.load()
    assert same(kept["model"], fresh.state()["model"])
    assert kept["optimizer"]["state"] == {}  # no momenta of the sweep
    assert kept["optimizer"]["param_groups"][0]["lr"] == found["sm2_lr"]
    # Thorough training from there equals plain training at that rate from the same epoch number on.
    thorough = FakeRun(config, until=3, options={"mode": "thorough", "round": 0}, store=store)
    train(task, thorough)
    with private_randomness():
        plain = Trainer(task, {**config, "lr": found["sm2_lr"]}, seed=1)
        plain.epoch = 1
        expected = [plain.train_epoch() for _ in range(2)]
    assert [thorough.reports[2], thorough.reports[3]] == expected


def wandering(count=256):
    """A straight line with noise: at any rate the loss falls to a floor that grows with the rate."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=g)
    y = x @ torch.arange(1.0, 9.0)[:, None] + torch.randn(count, 1, generator=g)
    return Data(train=(x[: count // 2], y[: count // 2]), val=(x[count // 2 :], y[count // 2 :]))


EXPLORES = {"lrs": 12, "lr_range": (1e-4, 1.0), "fraction": 0.5}


def test_a_rate_is_kept_while_it_brings_the_loss_down_and_no_longer():
    task = Task(lambda: nn.Linear(8, 1), wandering(), F.mse_loss)
    with private_randomness():
        trainer = Trainer(task, {"batch_size": 4}, seed=0, lr_is_found=True)
        first = trainer.explore(EXPLORES)
        assert first["sm2_held"] == 0.0
        best, rates, held = first["loss"], [first["sm2_lr"]], []
        for _ in range(8):
            last = [trainer.train_epoch()["loss"] for _ in range(2)][-1]
            before = copy.deepcopy(trainer.state())
            found = trainer.explore(EXPLORES)
            again = Trainer(task, {"batch_size": 4}, seed=0, lr_is_found=True)
            again.load_state(before)
            assert again.explore(EXPLORES) == found  # what it goes by is in the checkpoint
            if last < best:
                assert found["sm2_lr"] >= rates[-1]
            else:
                assert found["sm2_held"] == 0.0
            if found["sm2_held"]:
                assert found["sm2_lr"] == rates[-1]
            assert trainer.lr == pytest.approx(found["sm2_lr"])
            best = min(best, last)
            rates.append(found["sm2_lr"])
            held.append(found["sm2_held"])
    assert 1.0 in held  # the sweep named a smaller rate, and was not followed
    assert min(rates) < rates[0]  # and was in the end


def test_a_kept_rate_that_breaks_the_copy_is_given_up():
    task = Task(lambda: nn.Linear(8, 1), wandering(), F.mse_loss)
    with private_randomness():
        trainer = Trainer(task, {"batch_size": 4}, seed=0, lr_is_found=True)
        trainer.explore(EXPLORES)
        trainer.train_epoch()
        trainer._held["lr"] = 1e20  # as if it had paid so far
        found = trainer.explore(EXPLORES)
    assert found["sm2_held"] == 0.0
    assert found["sm2_lr"] <= 1.0
    assert math.isfinite(found["loss"])


@pytest.mark.parametrize(("size", "steps"), [(30, 8), (6, 10), (2, 24)])
def test_a_sweep_is_about_an_epoch_long_at_most(size, steps):
    """Of 60 samples a quarter is explored, of which half is swept: batches are used again, but not without end."""
    rows = []

    def forward(model, inputs):
        output = model(inputs)
        if output.requires_grad:
            output.register_hook(lambda grad: rows.append(len(grad)))
        return output

    with private_randomness():
        task = Task(net, make_data(), F.cross_entropy, forward=forward)
        trainer = Trainer(task, {"batch_size": size}, seed=0, lr_is_found=True)
        trainer.explore({"lrs": 20, "lr_range": (1e-5, 1e-3), "fraction": 0.25})
    tried = -(-15 // size) * size  # at most
    assert (steps - 1) * size <= sum(rows) <= steps * size + max(tried, size)


def test_thorough_training_without_any_learning_rate_is_refused():
    task = Task(net, make_data(), F.cross_entropy)
    with pytest.raises(InvalidInput, match="No learning rate"):
        train(task, FakeRun({}, until=1, options={"mode": "thorough", "round": 0}))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), r"shape \(60,\).*scalar"),
        (lambda o, t: float(F.cross_entropy(o, t)), "float"),
        (lambda o, t: F.cross_entropy(o, t).detach(), "without a gradient"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(loss, words):
    trainer = Trainer(Task(net, make_data(), loss), {"lr": 0.1, "batch_size": 60}, seed=0)
    with pytest.raises(InvalidInput, match=words):
        trainer.train_epoch()


def test_a_metric_with_a_wrong_shape_is_refused():
    task = Task(net, make_data(), F.cross_entropy, metrics={"bad": lambda o, t: o})
    with pytest.raises(InvalidInput, match=r"'bad'.*one number"):
        Trainer(task, {"lr": 0.1}, seed=0).evaluate()


def test_a_checkpoint_of_another_model_is_refused():
    task = Task(lambda width: nn.Linear(6, width), make_data(), F.cross_entropy)
    state = Trainer(task, {"lr": 0.1, "width": 3}, seed=0).state()
    with pytest.raises(InvalidInput, match="does not fit"):
        Trainer(task, {"lr": 0.1, "width": 4}, seed=0).load_state(state)


def numbers(dtype=torch.float32, n=64):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return (x, x.sum(1).float()), (x, x.sum(1).float())


def test_a_loss_with_tensors_of_its_own_goes_where_the_model_is():
    task = Task(net, make_data(), nn.CrossEntropyLoss(weight=torch.ones(3)))
    trainer = Trainer(task, {"lr": 0.1}, seed=1, device="meta")
    inputs, targets = next(trainer.data.train.batches(8))
    assert task.loss(trainer.model(inputs), targets).device == trainer.device


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, nn.MSELoss()])
def test_a_loss_that_compares_each_output_with_every_target_is_refused(loss):
    trainer = Trainer(Task(lambda: nn.Linear(6, 1), Data(*numbers()), loss), {"lr": 0.1}, seed=0)
    with pytest.raises(InvalidInput, match=r"every target.*\[64\].*\[64, 1\].*nn\.Flatten\(0\)"):
        trainer.train_epoch()


def test_other_warnings_of_a_loss_are_left_alone():
    def loss(output, targets):
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return F.mse_loss(output.squeeze(1), targets)

    trainer = Trainer(Task(lambda: nn.Linear(6, 1), Data(*numbers()), loss), {"lr": 0.1}, seed=0)
    with pytest.warns(UserWarning, match="mind the gap"):
        trainer.train_epoch()


def test_inputs_of_doubles_for_a_model_of_floats_are_refused_with_the_remedy():
    def train_with(model):
        task = Task(
            model, Data(*numbers(torch.float64)), lambda o, t: F.mse_loss(o.squeeze(1), t.to(o.dtype))
        )
        Trainer(task, {"lr": 0.1}, seed=0).train_epoch()

    with pytest.raises(InvalidInput, match=r"float64.*x\.float\(\)"):
        train_with(lambda: nn.Linear(6, 1))
    train_with(lambda: nn.Linear(6, 1).double())


def test_a_last_batch_of_one_before_a_batch_norm_is_refused_with_the_remedy():
    def train_with(**options):
        task = Task(net, make_data(99), F.cross_entropy, batch_size=13, **options)  # 66 = 5 * 13 + 1
        Trainer(task, {"lr": 0.1}, seed=0).train_epoch()

    with pytest.raises(InvalidInput, match=r"66 samples in batches of 13.*drop_last=True"):
        train_with()
    train_with(drop_last=True)
