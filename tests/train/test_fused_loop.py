"""The fused loop against the unfused one: the same numbers, whoever leaves, joins, fails or diverges."""

import copy
import dataclasses
import json
import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import InvalidInput, Unsupported
from penstock.model import FusedStep, Shrink
from penstock.model._ops import RULES
from penstock.train import Data, Task
from penstock.train import _fused_loop as fused_loop
from penstock.train._fused_loop import FusedTrainer, check, measure, train_fused
from penstock.train._loop import Trainer, train
from penstock.train._run import Unwind

N_TRAIN, N_VAL, FEATURES, CLASSES = 104, 40, 6, 4


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits(rows, seed, shape=(FEATURES,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    y = (x.flatten(1)[:, :CLASSES]).argmax(1)
    return x, y


def data(shape=(FEATURES,)):
    return Data(digits(N_TRAIN, 0, shape), digits(N_VAL, 1, shape))


def accuracy(output, targets):
    return (output.argmax(1) == targets).double().mean()


def mlp(config):
    return nn.Sequential(
        nn.Linear(FEATURES, 12), nn.ReLU(), nn.Dropout(config.get("dropout", 0.2)), nn.Linear(12, CLASSES)
    ).double()


def cnn(config):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    ).double()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.body(self.lift(x)).mean(1))


def make_task(model=mlp, shape=(FEATURES,), **options):
    options.setdefault("metrics", {"accuracy": accuracy})
    options.setdefault("batch_size", 16)
    return Task(model, data(shape), F.cross_entropy, **options)


CONFIGS = [{"lr": 0.05 * (i + 1), "momentum": 0.2 * i, "weight_decay": 0.001 * i} for i in range(4)]


def trainers(task, configs=CONFIGS):
    return [Trainer(task, config, seed=10 + i) for i, config in enumerate(configs)]


def gap(one, other):
    states = zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True)
    worst = max(float((a.double() - b.double()).abs().max()) for (_, a), b in states)
    mine, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for key, own in mine["state"].items():
        assert own.keys() == theirs["state"][key].keys()
        for name, value in own.items():
            worst = max(worst, float((value - theirs["state"][key][name]).abs().max()))
    return worst


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], abs=1e-10), name


@pytest.mark.parametrize(
    ("model", "shape"),
    [(mlp, (FEATURES,)), (cnn, (2, 8, 8)), (lambda config: Encoder().double(), (5, 3))],
    ids=["mlp", "cnn", "transformer"],
)
def test_epochs_equal_those_of_trials_alone(model, shape):
    task = make_task(model, shape)
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    assert fused.counts == [4]
    for _ in range(8):  # 7 steps each: 56 steps, the last of an epoch a smaller batch
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    for one, other in zip(alone, together, strict=True):
        assert gap(one, other) < 1e-10
    assert fused.reasons == {}


def test_members_leave_and_come_back_without_touching_the_others():
    task = make_task()
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    for epoch in range(6):
        if epoch == 2:
            fused.leave([together[1]])
            row = together[2].model[0].weight.untyped_storage().nbytes()
            assert together[1].model[0].weight.untyped_storage().nbytes() < row / 3
            kept = fused_loop.own_state(together[1])
        if epoch == 4:
            back = Trainer(task, CONFIGS[1], seed=11)
            back.load_state(kept)
            together[1] = back
            fused.leave([together[0], together[2], together[3]])
            fused = FusedTrainer(together)
            assert fused.counts == [4]
        results = fused.train_epoch()
        for i, (one, other) in enumerate(zip(alone, together, strict=True)):
            if i == 1 and epoch in (2, 3):
                assert other not in results
                continue
            close(one.train_epoch(), results[other])
    for one, other in zip(alone, together, strict=True):
        assert gap(one, other) < 1e-10


def test_a_diverging_member_leaves_its_neighbours_alone():
    task = make_task(cnn, (2, 8, 8))
    configs = [{"lr": 0.05}, {"lr": 1e300}, {"lr": 0.1}]
    alone = trainers(task, configs)
    together = trainers(task, configs)
    fused = FusedTrainer(together)
    for _ in range(3):
        results = fused.train_epoch()
        expected = [one.train_epoch() for one in alone]
    assert math.isnan(results[together[1]]["train_loss"])
    for i in (0, 2):
        close(expected[i], results[together[i]])
        assert gap(alone[i], together[i]) < 1e-10


def assert_same_alone(task, configs=CONFIGS[:3], epochs=2):
    """Fused epochs give what the trials give alone: metrics, failures, weights, buffers and optimizers."""
    alone, together = trainers(task, configs), trainers(task, configs)
    fused = FusedTrainer(together)
    failed = set()
    for _ in range(epochs):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            result = results[other]
            if isinstance(result, Exception):
                failed.add(one)
                with pytest.raises(type(result), match=str(result)):
                    one.train_epoch()
            else:
                close(one.train_epoch(), result)
    assert fused.counts == [len(configs)]
    assert max(gap(a, b) for a, b in zip(alone, together, strict=True) if a not in failed) < 1e-10
    return failed


class Applied(nn.Module):
    """A linear layer (of images: behind a convolution) whose input goes through a function."""

    def __init__(self, function, images=False):
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(2, 4, 3) if images else nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(4 * 36 if images else FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        return self.head(self.function(self, self.first(x)).flatten(1))


NOISES = {
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_over_images_is_drawn_in_the_order_in_which_they_lie_alone(noise, channels_last):
    draw = NOISES[noise]
    task = make_task(
        lambda config: Applied(lambda model, x: x + draw(x), images=True).double(),
        (2, 8, 8),
        channels_last=channels_last,
    )
    assert_same_alone(task)
    assert check(task, CONFIGS[:2]).ok


DRAWN = {
    "of what all members share": lambda model, x: x + torch.empty_like(x).normal_(),
    "by Python": lambda model, x: x if model.training else x * random.random(),
    "and asked for": lambda model, x: F.dropout(x, 0.3) * (1 if model.training else x.ndim + x.sum().item()),
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_an_evaluation_that_draws_gives_what_it_gives_alone(drawn):
    class Given(Applied):
        def forward(self, x):
            return self.head(self.function(self, x))

    assert_same_alone(make_task(lambda config: Given(DRAWN[drawn]).double()))


@pytest.mark.parametrize("metrics_on", ["set", "batch"])
def test_a_metric_that_draws_or_fails_does_so_for_its_own_member(metrics_on):
    def bootstrapped(output, targets):
        if not torch.isfinite(output).all():
            raise ValueError("Input contains NaN.")
        rows = torch.randint(0, len(targets), (len(targets),))
        return accuracy(output[rows], targets[rows]) + random.random()

    options = {"metrics": {"accuracy": bootstrapped}, "metrics_on": metrics_on, "eval_batch_size": 16}
    failed = assert_same_alone(make_task(**options), [{"lr": 0.1}, {"lr": 1e300}, {"lr": 0.2}])
    assert [trainer.config["lr"] for trainer in failed] == [1e300]


def test_a_buffer_that_the_forward_replaces_is_each_members_own():
    def track(model, x):
        if model.training:
            model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)[:CLASSES]
        return x * model.mean.sum()

    assert_same_alone(make_task(lambda config: Applied(track).double()))


class Follower(nn.Module):
    """At every call a teacher in frozen weights follows its student, and the student's own weights are worn down."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.student.weight.mul_(0.97)
                for mine, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    theirs.mul_(0.8).add_(mine, alpha=0.2)
        return self.student(x) - self.teacher(x)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x):
        return self.body(x.mul_(0.5))


def test_inputs_that_a_forward_writes_into_are_written_once_a_step(monkeypatch):
    monkeypatch.setitem(fused_loop._costs, "record_cost_s", 0.0)
    task = make_task(lambda config: Writing())
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together, compile=False)
    for _ in range(3):
        results = fused.train_epoch(ahead=100)
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    assert fused.counts == [4]
    assert max(gap(one, other) for one, other in zip(alone, together, strict=True)) < 1e-10


def test_weights_that_a_forward_changes_are_changed_once_a_step():
    task = make_task(lambda config: Follower().double())
    assert_same_alone(task)
    for recorded in (False, True):
        alone, together = trainers(task), trainers(task)
        group = fused_loop._Group(together, compile=False)
        group.fusion.train()
        for number, batch in enumerate(fused_loop._batches(together)):
            if number == 0:
                group._probe(*batch)
            if recorded and number < 2:
                group.step.record(*batch)
            group.step(*batch)
        for one, other in zip(alone, together, strict=True):
            one.train_epoch()
            assert gap(one, other) < 1e-10


def test_each_member_keeps_its_own_schedule_and_clipping():
    def schedule(optimizer, steps, warm):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=warm, total_steps=steps)

    task = make_task(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double(),
        schedule=schedule,
        epochs=4,
    )
    configs = [
        {"lr": 0.1, "momentum": 0.9, "warm": 0.3, "clip_norm": 0.2},
        {"lr": 0.1, "momentum": 0.5, "warm": 0.1},
        {"lr": 0.01, "momentum": 0.8, "warm": 0.5, "clip_norm": 0.05},
    ]
    alone, together = trainers(task, configs), trainers(task, configs)
    fused = FusedTrainer(together)
    for _ in range(4):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
            assert one.lr == other.lr
    assert max(gap(a, b) for a, b in zip(alone, together, strict=True)) < 1e-10


def test_an_epoch_schedule_on_a_plateau_follows_each_members_own_loss():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)

    task = make_task(schedule=schedule)
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    for _ in range(6):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    assert [t.lr for t in alone] == [t.lr for t in together]
    assert len({t.lr / c["lr"] for t, c in zip(together, CONFIGS, strict=True)}) > 1


def boosted(params, lr, layer):
    """One layer's weights learn faster: which one is a hyperparameter."""
    params = list(params)
    return torch.optim.SGD([{"params": [params.pop(layer)], "lr": 10 * lr}, {"params": params}], lr=lr)


def test_trials_are_grouped_by_what_is_in_the_groups_of_their_optimizers():
    task = make_task(optimizer=boosted)
    configs = [{"lr": 0.01 * (i + 1), "layer": layer} for i, layer in enumerate((0, 2, 0, 2))]
    alone, together = trainers(task, configs), trainers(task, configs)
    fused = FusedTrainer(together)
    assert fused.counts == [2, 2]
    results = fused.train_epoch()
    for one, other in zip(alone, together, strict=True):
        close(one.train_epoch(), results[other])


class Running:
    """A loss that follows its mean, as a tensor or a number."""

    def __init__(self, keeps):
        self.mean, self.calls, self.keeps = torch.ones(()), 0, keeps

    def __call__(self, output, targets):
        loss = F.cross_entropy(output, targets)
        if self.keeps == "tensor":
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        else:
            self.calls += 1
        return loss / self.mean


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output, targets):
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.center, targets)


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        (Running("tensor"), "mean of a Running"),
        (Running("number").__call__, "calls of a Running"),
        (Centered(), "of a Cent"),
    ],
)
def test_a_loss_that_keeps_something_is_not_fused_and_goes_on_without_members_values(loss, key):
    task = Task(mlp, data(), loss, batch_size=16)
    found = check(task, CONFIGS)
    assert not found.ok
    assert key in found.reason
    fused = FusedTrainer(trainers(task))
    results = fused.train_epoch()
    assert fused.counts == [1] * 4
    assert all(math.isfinite(result["loss"]) for result in results.values())


def test_trials_are_grouped_by_batch_size_and_shape():
    def make(width, dropout=0.1):
        return nn.Sequential(
            nn.Linear(FEATURES, width), nn.Dropout(dropout), nn.Linear(width, CLASSES)
        ).double()

    task = make_task(make)
    configs = [
        {"lr": 0.1, "width": w, "batch_size": b, "dropout": d}
        for w, b, d in [(4, 8, 0.1), (4, 8, 0.5), (8, 8, 0.1), (8, 8, 0.0), (4, 16, 0.2)]
    ]
    alone, together = trainers(task, configs), trainers(task, configs)
    fused = FusedTrainer(together)
    assert sorted(fused.counts) == [1, 2, 2]
    assert fused.reasons == {together[4]: "there is no other trial like it"}
    for _ in range(3):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])


def test_the_fusion_count_is_spread_evenly():
    task = make_task()
    fused = FusedTrainer(trainers(task, [{"lr": 0.1}] * 9), most=8)
    assert sorted(fused.counts) == [4, 5]
    with pytest.raises(InvalidInput, match="most"):
        FusedTrainer([], most=0)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        out = self.layer(x)
        return out if out.mean() > 0 else -out


def test_what_cannot_be_fused_trains_one_after_another_with_a_reason():
    task = make_task(lambda: Branching().double())
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    results = fused.train_epoch()
    for one, other in zip(alone, together, strict=True):
        close(one.train_epoch(), results[other])
    assert set(fused.reasons) == set(together)
    assert "data-dependent" in fused.reasons[together[0]]


@pytest.mark.parametrize("make", [torch.jit.script, torch.compile])
@pytest.mark.parametrize("part", [False, True])
def test_models_or_layers_that_are_compiled_train_one_after_another_with_a_reason(make, part):
    def model(config):
        made = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)).double()
        if not part:
            return make(made)
        made[0] = make(made[0])
        return made

    together = trainers(make_task(model), CONFIGS[:2])
    fused = FusedTrainer(together)
    word = "is a TorchScript module" if make is torch.jit.script else "is compiled; make the plain one"
    assert set(fused.reasons.values()) == {f"{'0' if part else 'the model'} {word}"}


class Coin(nn.Module):
    """Leaves a layer out now and then, as Python's generator says."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(x if self.training and random.random() < 0.1 else torch.tanh(self.layer(x)))


class Warming(nn.Module):
    """Becomes another one after some steps."""

    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x):
        self.calls += self.training
        return self.head(x) * (1 if self.calls < 20 else 2)


class Keeping(nn.Module):
    """Keeps its last output."""

    def __init__(self):
        super().__init__()
        self.head, self.last = nn.Linear(FEATURES, CLASSES), torch.zeros(1)

    def forward(self, x):
        out = self.head(x) + 0.1 * self.last.mean()
        self.last = out.detach()
        return out


@pytest.mark.parametrize(
    ("model", "reason"), [(Coin, "Python's or numpy's generator"), (Warming, "calls"), (Keeping, "last")]
)
def test_what_members_would_share_beside_their_tensors_is_not_fused(model, reason):
    task = make_task(lambda: model().double())
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    for _ in range(5):
        results = fused.train_epoch(ahead=1000)
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    assert all(reason in fused.reasons[trainer] for trainer in together)
    assert not check(task, CONFIGS[:2]).ok


class Caching(nn.Module):
    """Makes what it needs at its first call."""

    def __init__(self):
        super().__init__()
        self.head, self.weights = nn.Linear(FEATURES, CLASSES), {}

    def forward(self, x):
        if x.shape[1] not in self.weights:
            self.weights[x.shape[1]] = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.head(x * self.weights[x.shape[1]])


def test_what_a_model_makes_at_its_first_call_for_all_is_fused():
    task = make_task(lambda: Caching().double())
    alone, together = trainers(task), trainers(task)
    fused = FusedTrainer(together)
    for _ in range(3):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    assert fused.reasons == {}


class Named(NamedTuple):
    logits: torch.Tensor
    size: torch.Tensor


@dataclasses.dataclass
class Described:
    logits: torch.Tensor
    size: torch.Tensor


def as_in_transformers(logits, size):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.SequenceClassifierOutput(logits=logits, loss=size)


class Talkative(nn.Module):
    """Returns its outputs by name, and a number for the batch beside them."""

    def __init__(self, form):
        super().__init__()
        self.head, self.form = nn.Linear(FEATURES, CLASSES), form

    def forward(self, x):
        out = self.head(x)
        return self.form(out, out.abs().mean())


@pytest.mark.parametrize("metrics_on", ["set", "batch"])
@pytest.mark.parametrize("form", [Named, Described, as_in_transformers])
def test_metrics_see_outputs_as_the_model_returns_them(form, metrics_on):
    task = make_task(
        lambda: Talkative(form).double(),
        metrics={
            "accuracy": lambda out, y: accuracy(out.logits, y),
            "size": lambda out, y: out["loss"] if isinstance(out, Mapping) else out.size,
        },
        metrics_on=metrics_on,
        eval_batch_size=16,  # 40 rows: the last batch is smaller
    )
    task.loss = lambda out, y: F.cross_entropy(out.logits, y)
    alone, together = trainers(task), trainers(task)
    results = FusedTrainer(together).train_epoch()
    x, y = task.data.val
    for one, other in zip(alone, together, strict=True):
        found = one.train_epoch()
        close(found, results[other])
        with torch.no_grad():
            whole = one.model.head(x)
        assert found["accuracy"] == pytest.approx(float((whole.argmax(1) == y).double().mean()))
        assert found["size"] == pytest.approx(float(whole.abs().mean()))


def test_a_group_that_does_not_fit_the_memory_is_halved(monkeypatch):
    differentiate = fused_loop.FusedStep._differentiate

    def tight(self, inputs, targets):
        if len(self.fusion) > 2:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"
            )
        return differentiate(self, inputs, targets)

    monkeypatch.setattr(fused_loop.FusedStep, "_differentiate", tight)
    task = make_task(cnn, (2, 8, 8))
    configs = [{"lr": 0.01 * (i + 1)} for i in range(5)]
    alone, together = trainers(task, configs), trainers(task, configs)
    fused = FusedTrainer(together)
    for _ in range(2):
        results = fused.train_epoch()
        for one, other in zip(alone, together, strict=True):
            close(one.train_epoch(), results[other])
    assert sorted(fused.counts) == [1, 2, 2]


def test_streamed_data_gives_the_same_batches():
    x, y = digits(N_TRAIN, 0)
    task = Task(
        mlp, Data((x, y), digits(N_VAL, 1), preload=False), F.cross_entropy, batch_size=16, drop_last=True
    )
    alone, together = trainers(task), trainers(task)
    results = FusedTrainer(together).train_epoch()
    for one, other in zip(alone, together, strict=True):
        close(one.train_epoch(), results[other])


# ---------------------------------------------------------------- runs


class FakeRun:
    """Counts epochs as a Run does: a report that is not finite ends the trial."""

    def __init__(self, config, seed, until=None, state=None, stop_after=None):
        self.config, self.seed, self.device, self.until = config, seed, "cpu", until
        self.state, self.stop_after = copy.deepcopy(state), stop_after
        self.reports, self.saved = [], []

    def epochs(self):
        done = 0 if self.state is None else self.state["epoch"]
        while self.until is None or done < self.until:
            if self.stop_after is not None and done >= self.stop_after:
                return
            yield done
            done += 1

    def load(self):
        return self.state

    def save(self, state):
        self.saved.append(state)

    def report(self, **metrics):
        if not all(math.isfinite(value) for value in metrics.values()):
            raise Unwind
        self.reports.append(metrics)


def test_runs_report_save_stop_and_fail_each_by_itself():
    task = make_task(epochs=5)
    plans = [
        ({"lr": 0.05}, {"until": 3}),
        ({"lr": 1e300}, {"until": 6}),
        ({"lr": 0.1}, {"until": 6, "stop_after": 4}),
        ({"lr": 0.2}, {}),  # no budget: the task's epochs
        ({"lr": -1.0}, {"until": 2}),
    ]
    alone = [FakeRun(config, i, **more) for i, (config, more) in enumerate(plans)]
    together = [FakeRun(config, i, **more) for i, (config, more) in enumerate(plans)]
    expected = []
    for run in alone:
        try:
            train(task, run)
            expected.append(None)
        except BaseException as error:
            expected.append(type(error))
    ends = train_fused(task, together)
    assert [None if end is None else type(end) for end in ends] == expected
    assert expected[1] is Unwind
    assert issubclass(expected[4], InvalidInput)
    assert [len(run.reports) for run in together] == [len(run.reports) for run in alone]
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.reports, other.reports, strict=True):
            close(a, b)
        assert [s["epoch"] for s in one.saved] == [s["epoch"] for s in other.saved]


def test_a_fused_checkpoint_goes_on_alone_and_the_other_way_round():
    task = make_task()
    runs = [FakeRun(config, i, until=4) for i, config in enumerate(CONFIGS)]
    for run in runs:
        train(task, run)
    halves = [FakeRun(config, i, until=2) for i, config in enumerate(CONFIGS)]
    assert train_fused(task, halves) == [None] * 4
    one_row = sum(p.nbytes for p in mlp({}).parameters())
    weight = halves[0].saved[-1]["model"]["0.weight"]
    assert weight.untyped_storage().nbytes() <= one_row  # not the memory of all members
    alone = [FakeRun(c, i, until=4, state=halves[i].saved[-1]) for i, c in enumerate(CONFIGS)]
    for run in alone:
        train(task, run)
    together = [FakeRun(c, i, until=4, state=halves[i].saved[-1]) for i, c in enumerate(CONFIGS)]
    train_fused(task, together)
    for whole, a, b in zip(runs, alone, together, strict=True):
        close(whole.reports[-1], a.reports[-1])
        close(whole.reports[-1], b.reports[-1])


def test_a_target_ends_one_run_and_not_the_others():
    task = make_task(target=("train_loss", 0.9), epochs=30)
    configs = [{"lr": 0.5, "momentum": 0.5}, {"lr": 1e-5}]
    runs = [FakeRun(c, i, until=8) for i, c in enumerate(configs)]
    alone = [FakeRun(c, i, until=8) for i, c in enumerate(configs)]
    train_fused(task, runs)
    for run in alone:
        train(task, run)
    assert [len(r.reports) for r in runs] == [len(r.reports) for r in alone]
    assert len(runs[0].reports) < 8 == len(runs[1].reports)


# ---------------------------------------------------------------- check and measure


def test_check_agrees_in_float64_for_a_float32_task():
    task = Task(
        lambda dropout=0.1: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
        ),
        Data(tuple(t.float() if t.is_floating_point() else t for t in digits(N_TRAIN, 0))),
        F.cross_entropy,
        optimizer=torch.optim.AdamW,
    )
    found = check(task, [{"lr": 0.1, "dropout": 0.1}, {"lr": 0.2, "dropout": 0.5}])
    assert found.ok
    assert found.error < 1e-10
    assert found.dtype == "float64"
    assert found.record()["members"] == 2


def test_check_catches_a_wrong_rule(monkeypatch):
    from penstock.model._ops import RULES

    right = RULES[F.linear]

    def wrong(members, input, weight, bias=None):
        return members.wrap(members.spread(right(members, input, weight, bias)) * 1.0001)

    monkeypatch.setitem(RULES, F.linear, wrong)
    found = check(make_task(), CONFIGS[:2])
    assert not found.ok
    assert "differs by" in found.reason


class Halved(nn.Module):
    """A last layer that may start at zero; see ``halving`` for what goes wrong before it."""

    def __init__(self, width=16, silent=False):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        if silent:
            nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def halving(members, x):
    """A wrong rule for ``torch.relu``: of the gradient half is lost."""
    half = torch.relu(members.front(x)) / 2
    return members.wrap(half + half.detach())


@pytest.mark.parametrize("kind", ["plain", "silent", "twin"])
def test_check_sees_gradients_before_a_readout_that_starts_at_zero(monkeypatch, kind):
    """A narrow twin's does, and so do the last layers of many blocks: at their first step nothing flows back."""
    monkeypatch.setitem(RULES, torch.relu, halving)
    task = make_task(lambda width=16: Halved(width, kind == "silent").double())
    if kind == "twin":
        task = task.narrowed(Shrink(2))
    found = check(task, [{"lr": 0.1}, {"lr": 0.2}])
    assert not found.ok
    assert "the gradient of body" in found.reason


def test_check_says_why_members_cannot_be_fused():
    found = check(make_task(lambda: Branching().double()), CONFIGS[:2])
    assert not found.ok
    assert "data-dependent" in found.reason
    assert json.dumps(found.record(), allow_nan=False)
    with pytest.raises(InvalidInput, match="at least 2"):
        check(make_task(), CONFIGS[:1])


def test_measured_memory_grows_linearly_with_the_members():
    task = make_task(cnn, (2, 8, 8))
    bytes_of = {count: measure(task, [{"lr": 0.1}], count, steps=1)[1] for count in (2, 4, 8)}
    slope = (bytes_of[4] - bytes_of[2]) / 2
    assert bytes_of[8] == pytest.approx(bytes_of[2] + 6 * slope, rel=0.02)
    with pytest.raises(Unsupported, match="data-dependent"):
        measure(make_task(lambda: Branching().double()), [{"lr": 0.1}], 2)


@pytest.mark.parametrize("recorded_s", [0.0005, 0.005])
def test_a_recording_that_took_long_shows_its_pace_before_it_is_left(monkeypatch, recorded_s):
    """By a clock on which recording takes longer than all steps so far: left at once, it would be made again."""
    now, made, replayed = [0.0], [], []
    record, step = FusedStep.record, FusedStep.__call__

    def recording(self, *arguments, **named):
        made.append(now[0])
        now[0] += 50.0
        return record(self, *arguments, **named)

    def stepping(self, inputs, targets):
        now[0] += recorded_s if self.recorded else 0.001
        replayed.append(bool(self.recorded))
        return step(self, inputs, targets)

    monkeypatch.setattr(fused_loop, "_clock", lambda device: lambda: now[0])
    monkeypatch.setitem(fused_loop._costs, "record_cost_s", 0.004)
    monkeypatch.setattr(FusedStep, "record", recording)
    monkeypatch.setattr(FusedStep, "__call__", stepping)
    fused = FusedTrainer(trainers(make_task(defaults={"batch_size": 4})))
    fused.train_epoch(ahead=100)
    assert len(made) == 1
    assert sum(replayed) >= 5
    assert replayed[-1] == (recorded_s < 0.001)  # the faster one is kept
