"""Tasks on narrow twins: factories with a width, fusion, checkpoints, schedules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.train._fused_loop import FusedTrainer
from penstock.train._loop import Trainer, private_randomness
from penstock.train._surrogate import check

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 12, generator=GENERATOR)
Y = torch.randint(0, 5, (96,), generator=GENERATOR)
DATA = pk.Data((X[:64], Y[:64]), (X[64:], Y[64:]))
WORDS = torch.randint(0, 20, (48, 6), generator=GENERATOR)


def wide(config, width=64):
    return nn.Sequential(
        nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5)
    )


def plain(config):
    return wide(config)


class Encoder(nn.Module):
    def __init__(self, depth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
        self.words, self.body = nn.Embedding(20, 32), nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(32, 20)

    def forward(self, x):
        return self.out(self.body(self.words(x)))


def encoder(config):
    return Encoder(config.get("depth", 1))


def words_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def vector_task(model=plain, **options):
    return pk.Task(model, DATA, F.cross_entropy, batch_size=16, epochs=2, **options)


def word_task(**options):
    data = pk.Data((WORDS[:32], WORDS[:32]), (WORDS[32:], WORDS[32:]))
    return pk.Task(encoder, data, words_loss, batch_size=8, epochs=2, **options)


def train(task, config, seed=1, epochs=2):
    with private_randomness():
        trainer = Trainer(task, config, seed=seed)
        metrics = [trainer.train_epoch() for _ in range(epochs)]
    return trainer, metrics


@pytest.mark.parametrize("factory", [wide, plain])
def test_both_ways_make_the_same_twin(factory):
    twin = vector_task(factory).narrowed(pk.Shrink(8))
    trainer, _ = train(twin, {"lr": 0.1}, epochs=1)
    assert trainer.model[2].weight.shape == (8, 8)
    groups = {id(p): g["lr"] for g in trainer.optimizer.param_groups for p in g["params"]}
    rates = [groups[id(trainer.model[i].weight)] for i in (0, 2, 4)]
    assert rates == pytest.approx([0.1 / 8, 0.1, 0.8])
    full, _ = train(twin.full(), {"lr": 0.1}, epochs=1)
    assert full.model[2].weight.shape == (64, 64)
    assert [g["lr"] for g in full.optimizer.param_groups] == [0.1]


def test_twins_start_from_their_seeds_whatever_was_built_before():
    def first(task, seed):
        with private_randomness():
            return Trainer(task, {"lr": 0.1}, seed=seed).model[0].weight.detach().clone()

    twin = vector_task().narrowed(pk.Shrink(8))
    one = first(twin, 3)
    assert torch.equal(one, first(twin, 3))  # the first draws the blueprint, the second finds it
    assert torch.equal(one, first(vector_task().narrowed(pk.Shrink(8)), 3))
    assert not torch.equal(one, first(twin, 4))


def test_a_structural_choice_gets_its_own_twin():
    twin = word_task().narrowed(pk.Shrink(4))
    for depth in (1, 2, 1):
        trainer, _ = train(twin, {"lr": 0.1, "depth": depth}, epochs=1)
        assert len(trainer.model.body.layers) == depth
        assert trainer.model.words.weight.shape == (20, 8)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened():
    def step(optimizer, gamma=0.5):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)

    twin = word_task(optimizer=torch.optim.AdamW, schedule=step).narrowed(pk.Shrink(4))
    config = {"lr": 0.01, "weight_decay": 0.1}
    whole, metrics = train(twin, config, epochs=2)
    half, _ = train(twin, config, epochs=1)
    state = copy.deepcopy(half.state())
    with private_randomness():
        again = Trainer(twin, config, seed=1)
        again.load_state(state)
        assert again.train_epoch() == metrics[1]
    rates = {round(g["lr"] * 4 / 0.01, 6) for g in whole.optimizer.param_groups}
    assert min(rates) == 1.0  # halved twice, each group from its own rate
    assert len(rates) > 1


@pytest.fixture
def doubles():
    """In single precision, RMSprop makes a step of gradients that are rounding errors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_fused_twins_train_like_twins_alone(optimizer, config, doubles):
    """The side table is parameter groups, so fusion needs to know nothing of it."""
    twin = word_task(optimizer=optimizer).narrowed(pk.Shrink(4))
    rates = [0.003, 0.01, 0.02]
    alone = [train(twin, {"lr": lr, **config}, seed=i)[1][-1] for i, lr in enumerate(rates)]
    with private_randomness():
        trainers = [Trainer(twin, {"lr": lr, **config}, seed=i) for i, lr in enumerate(rates)]
        fused = FusedTrainer(trainers, compile=False)
        results = [fused.train_epoch() for _ in range(2)][-1]
    assert not fused.reasons, fused.reasons
    for trainer, expected in zip(trainers, alone, strict=True):
        assert results[trainer] == pytest.approx(expected, rel=1e-8)


def normed(config):
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.Linear(32, 5),
    )


@pytest.mark.parametrize(
    ("optimizer", "config", "fuses"),
    [
        (torch.optim.Adam, {"weight_decay": 0.01}, True),
        (torch.optim.AdamW, {"weight_decay": 0.5}, True),
        (torch.optim.RMSprop, {"momentum": 0.5}, True),
        (torch.optim.NAdam, {}, False),
    ],
)
def test_weights_before_a_norm_grow_fused_as_they_do_alone(optimizer, config, fuses, doubles):
    data = pk.Data((X[:64].double(), Y[:64]), (X[64:].double(), Y[64:]))
    task = pk.Task(normed, data, F.cross_entropy, batch_size=16, epochs=2, optimizer=optimizer)
    twin = task.narrowed(pk.Shrink(4))
    rates = [0.003, 0.01, 0.02]
    alone = [train(twin, {"lr": lr, **config}, seed=i)[0] for i, lr in enumerate(rates)]
    assert any(group.get("growth") == 1 / 4 for group in alone[0].optimizer.param_groups)
    with private_randomness():
        trainers = [Trainer(twin, {"lr": lr, **config}, seed=i) for i, lr in enumerate(rates)]
        fused = FusedTrainer(trainers, compile=False)
        for _ in range(2):
            fused.train_epoch()
    assert not fused.reasons, fused.reasons
    assert [group.optimizer.reason is None for group in fused._groups] == [fuses]
    for own, other in zip(alone, trainers, strict=True):
        for name, value in own.model.named_parameters():
            if name not in ("0.bias", "3.bias"):  # before a norm their gradients are rounding errors
                torch.testing.assert_close(other.model.get_parameter(name), value, rtol=1e-10, atol=1e-10)


def test_weights_before_a_norm_grow_on_after_a_checkpoint():
    twin = vector_task(normed, optimizer=torch.optim.Adam).narrowed(pk.Shrink(4))
    whole, metrics = train(twin, {"lr": 0.01}, epochs=2)
    half, _ = train(twin, {"lr": 0.01}, epochs=1)
    with private_randomness():
        again = Trainer(twin, {"lr": 0.01}, seed=1)
        again.load_state(copy.deepcopy(half.state()))
        assert again.train_epoch() == metrics[1]
    assert torch.equal(again.model[3].weight, whole.model[3].weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(20, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(torch.tanh(self.body(self.words(x))))


def test_twins_whose_embedding_is_the_output_layer_are_fused(doubles):
    data = pk.Data((WORDS[:32], WORDS[:32]), (WORDS[32:], WORDS[32:]))
    task = pk.Task(lambda: Tied(), data, words_loss, batch_size=8, epochs=2, optimizer=torch.optim.Adam)
    twin = task.narrowed(pk.Shrink(4))
    configs = [{"lr": 0.01 * (i + 1)} for i in range(3)]
    alone = [train(twin, config, seed=i) for i, config in enumerate(configs)]
    with private_randomness():
        trainers = [Trainer(twin, config, seed=i) for i, config in enumerate(configs)]
        assert trainers[0].model.out._forward_pre_hooks  # the multiplier
        fused = FusedTrainer(trainers, compile=False)
        results = [fused.train_epoch() for _ in range(2)][-1]
    assert (fused.counts, fused.reasons) == ([3], {})
    for trainer, (expected, metrics) in zip(trainers, alone, strict=True):
        assert results[trainer] == pytest.approx(metrics[-1], rel=1e-10)
        for name, value in expected.model.state_dict().items():
            assert torch.allclose(trainer.model.state_dict()[name], value, rtol=1e-10, atol=1e-10), name


def test_the_twin_does_at_a_rate_what_the_model_does():
    """Over learning rates, the best of the twin is the best of the model; of a plain narrow model it need not be."""
    twin = vector_task(optimizer=torch.optim.Adam).narrowed(pk.Shrink(8))
    losses = {}
    for side, task in (("twin", twin), ("full", twin.full())):
        losses[side] = [
            sum(train(task, {"lr": lr}, seed=s, epochs=3)[1][-1]["train_loss"] for s in range(3))
            for lr in (1e-4, 1e-3, 1e-2)
        ]
    order = {side: sorted(range(3), key=values.__getitem__) for side, values in losses.items()}
    assert order["twin"] == order["full"]


def test_the_check_runs_on_a_task_and_times_the_model():
    found, epoch_s = check(vector_task().narrowed(pk.Shrink(8)), {"lr": 0.1}, threads=1)
    assert found.ok, str(found)
    assert epoch_s > 0
    assert found.divisors == (8, 4, 2, 1)
