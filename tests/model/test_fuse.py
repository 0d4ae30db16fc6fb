"""Fused members against the same models alone: every layer and optimizer, 50 steps in float64, members leaving."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import Unsupported
from penstock.model import FusedOptimizer, FusedStep, Fusion, detach, group_names
from penstock.model._parametrize import Multiply, unpack

MEMBERS, ROWS, CLASSES, STEPS = 4, 6, 3, 50
normed = nn.utils.parametrizations


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(before)


class Sequence(nn.Module):
    """A recurrent body and a head on its last output."""

    def __init__(self, body, width):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, need_weights, dropout):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout, batch_first=True)
        self.head = nn.Linear(4, CLASSES)
        self.need_weights = need_weights

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out, weights = self.attention(x, x, x, attn_mask=mask, need_weights=self.need_weights)
        extra = 0 if weights is None else weights.sum() * 1e-3
        return self.head(out.mean(1)) + extra


class Apart(nn.Module):
    """Sequence first, no biases, weights of queries, keys and values apart (as in a surrogate), a mask of numbers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=False)
        unpack(self.attention)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = x.transpose(0, 1)
        away = -0.3 * (torch.arange(len(x))[:, None] - torch.arange(len(x))).abs().double()
        return self.head(self.attention(x, x, x, attn_mask=away, need_weights=False)[0][-1])


class Causal(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.project, self.head, self.dropout = nn.Linear(4, 12), nn.Linear(4, CLASSES), dropout

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.project(x).view(rows, length, 3, 2, 2).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.head(out.transpose(1, 2).reshape(rows, length, 4)[:, -1])


class Encoder(nn.Module):
    """With a mask of its own, in which torch looks whether it is causal."""

    def __init__(self, mask, length, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, CLASSES)
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        masks = {
            "bool": causal,
            "float": torch.zeros(length, length, dtype=torch.float64).masked_fill(causal, -math.inf),
            "band": causal | causal.T.roll(2, 0).tril(),
        }
        self.register_buffer("mask", masks[mask])

    def forward(self, x):
        return self.head(self.body(x, mask=self.mask)[:, -1])


class Single(nn.Module):
    """Attention without a dimension of heads, or with fewer heads of keys and values than of queries."""

    def __init__(self, dropout, grouped=False):
        super().__init__()
        self.project, self.head = nn.Linear(4, 12), nn.Linear(4, CLASSES)
        self.dropout, self.grouped = dropout, grouped

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        if self.grouped:
            q = q.unflatten(-1, (2, 2)).transpose(1, 2)
            k, v = k[:, None, :, :2], v[:, None, :, 2:]
        away = -0.3 * (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs().double()
        out = F.scaled_dot_product_attention(q, k, v, away, self.dropout, enable_gqa=self.grouped)
        return self.head(out.transpose(1, 2).flatten(2)[:, -1] if self.grouped else out[:, -1])


class Functional(nn.Module):
    """Has no layer for its dropout, only a rate."""

    def __init__(self, drop, p):
        super().__init__()
        self.first, self.head, self.drop, self.p = nn.Linear(5, 7), nn.Linear(7, CLASSES), drop, p

    def forward(self, x):
        return self.head(self.drop(self.first(x), self.p, self.training))


class Cell(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 5, bias), nn.Linear(5, CLASSES)

    def forward(self, x):
        state = None
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return self.head(state[0])


class Tied(nn.Module):
    """An embedding whose table is the output layer too; ``factor``: as a narrow twin multiplies its input."""

    def __init__(self, factor=None):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 5, padding_idx=0)
        self.head = nn.Linear(5, CLASSES, bias=False)
        self.head.weight = self.table.weight
        if factor is not None:
            self.head.register_forward_pre_hook(Multiply(factor))

    def forward(self, x):
        return self.head(torch.tanh(self.table(x)).mean(1))


class Noisy(nn.Module):
    """Draws from torch's generator itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        noise = torch.randn_like(x) + torch.rand(x.shape[1:]) + torch.empty_like(x).normal_()
        return self.head(x + 0.1 * noise)


class Unused(nn.Module):
    """Has weights that the loss does not depend on: an optimizer must leave them alone."""

    def __init__(self):
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Counting(nn.Module):
    """Replaces a buffer instead of updating it in place; one weight is frozen."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.head.weight.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.head(x - self.mean)


class Reused(nn.Module):
    """A layer and its normalisation under two names each, used twice; statistics are gathered at both uses."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(5, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.body = nn.ModuleList([self.layer, self.norm, nn.LayerNorm(6), self.layer, self.norm])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.body:
            x = layer(x)
        return self.head(x)


class Kept(nn.Module):
    """Drops in place and goes on with what it had before."""

    def __init__(self, first, drop, head):
        super().__init__()
        self.first, self.drop, self.head = first, drop, head

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.drop(x))


class Shared(nn.Module):
    """A buffer that lies in two layers: updated in one, read in the other."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.register_buffer("mean", torch.zeros(5))
        self.head.register_buffer("offset", self.mean)

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.head(x - self.head.offset)


class Shrunk(nn.Module):
    """Divides by a norm of all weights that are trained, of which one is tied and one frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        length = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        return self.head(torch.tanh(self.second(self.first(x)))) / length


def defined(rate=1.0):
    """A class that is another one at every call; ``rate`` is a value from around it."""

    class Local(nn.Module):
        slope = 2

        def __init__(self):
            super().__init__()
            self.head, self.factor = nn.Linear(5, CLASSES), nn.Parameter(torch.ones(()))

        @staticmethod
        def bend(x):
            return torch.tanh(x)

        @property
        def steep(self):
            return self.slope * rate

        def forward(self, x):
            return self.head(self.bend(self.steep * x)) * self.factor

    return Local()


class Scaled(nn.Module):
    """Has a number of its own that differs between members."""

    def __init__(self, scale):
        super().__init__()
        self.head, self.scale = nn.Linear(5, CLASSES), scale

    def forward(self, x):
        return self.head(x) * self.scale


def stack(*layers):
    return nn.Sequential(*layers)


def flat(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, CLASSES))


RATES = (0.0, 0.2, 0.5, 0.9)  # the first draws nothing
VECTOR, IMAGE, LINE, TOKENS, SERIES, LONG = (5,), (2, 6, 6), (2, 8), "tokens", (4, 4), (34, 4)
MODELS = {
    "linear": (lambda i: stack(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES, bias=False)), VECTOR),
    "dropout": (lambda i: stack(nn.Linear(5, 7), nn.Dropout(0.3), flat(7)), VECTOR),
    "dropout rates": (lambda i: stack(nn.Linear(5, 7), nn.Dropout(RATES[i]), flat(7)), VECTOR),
    "functional dropout": (lambda i: Functional(torch.dropout, 0.3), VECTOR),
    "functional dropout rates": (lambda i: Functional(F.dropout, RATES[i]), VECTOR),
    "functional alpha dropout rates": (lambda i: Functional(F.alpha_dropout, RATES[i]), VECTOR),
    "dropout in place, rates": (
        lambda i: Kept(nn.Linear(5, 7), nn.Dropout(RATES[i], inplace=True), flat(7)),
        VECTOR,
    ),
    "dropout 2d in place": (
        lambda i: Kept(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4, inplace=True), flat(64)),
        IMAGE,
    ),
    "a buffer under two names": (lambda i: Shared(), VECTOR),
    "a norm of all weights": (lambda i: Shrunk(), VECTOR),
    "weight norm": (lambda i: stack(normed.weight_norm(nn.Linear(5, 7)), nn.Tanh(), flat(7)), VECTOR),
    "spectral norm": (lambda i: stack(normed.spectral_norm(nn.Linear(5, 7)), nn.Tanh(), flat(7)), VECTOR),
    "batch norm 1d": (
        lambda i: stack(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.GELU(), flat(7)),
        VECTOR,
    ),
    "a class of the factory's, and a number to train": (lambda i: defined(), VECTOR),
    "layers used twice": (lambda i: Reused(), VECTOR),
    "layer norm": (lambda i: stack(nn.Linear(5, 7), nn.LayerNorm(7), nn.SiLU(), flat(7)), VECTOR),
    "conv 1d": (lambda i: stack(nn.Conv1d(2, 3, 3), nn.MaxPool1d(2), nn.ReLU(), flat(9)), LINE),
    "conv 2d": (
        lambda i: stack(
            nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), flat(36)
        ),
        IMAGE,
    ),
    "strides, groups, dilation": (
        lambda i: stack(
            nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.Conv2d(4, 4, 2, dilation=2, padding="same"), flat(36)
        ),
        IMAGE,
    ),
    "few pixels": (  # 3 x 2 of them, then 2 x 1
        lambda i: stack(nn.Conv2d(2, 4, (3, 2), (2, 3), (1, 0)), nn.Conv2d(4, 3, 3, 2, 1), flat(6)),
        IMAGE,
    ),
    "transposed conv": (
        lambda i: stack(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.AvgPool2d(3), flat(48)),
        IMAGE,
    ),
    "adaptive pool": (lambda i: stack(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), flat(4)), IMAGE),
    "dropout 2d": (lambda i: stack(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), nn.Dropout(0.2), flat(64)), IMAGE),
    "dropout 2d rates": (lambda i: stack(nn.Conv2d(2, 4, 3), nn.Dropout2d(RATES[i]), flat(64)), IMAGE),
    "dropout 2d rates without channels": (lambda i: stack(nn.Dropout2d(RATES[i]), flat(16)), LINE),
    "group norm": (lambda i: stack(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), flat(64)), IMAGE),
    "instance norm": (
        lambda i: stack(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), flat(64)),
        IMAGE,
    ),
    "embedding": (lambda i: stack(nn.Embedding(CLASSES, 4), nn.Tanh(), flat(16)), TOKENS),
    "embedding scaled by frequency": (
        lambda i: stack(
            nn.Embedding(CLASSES, 4, padding_idx=1, scale_grad_by_freq=True), nn.Tanh(), flat(16)
        ),
        TOKENS,
    ),
    "tied embedding": (lambda i: Tied(), TOKENS),
    "tied embedding of a twin": (lambda i: Tied(4.0), TOKENS),
    "transformer": (
        lambda i: stack(
            nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True, norm_first=bool(i < 0)), flat(16)
        ),
        SERIES,
    ),
    "transformer without dropout": (
        lambda i: stack(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True), flat(16)
        ),
        SERIES,
    ),
    "attention": (lambda i: Attention(False, 0.0), SERIES),
    "attention, long": (lambda i: Attention(False, 0.0), LONG),
    "attention, weights apart": (lambda i: Apart(), SERIES),
    "attention weights": (lambda i: Attention(True, 0.2), SERIES),
    "attention weights, rates": (lambda i: Attention(True, RATES[i]), SERIES),
    "attention of one head with dropout": (lambda i: Single(0.3), SERIES),
    "attention of one head, rates": (lambda i: Single(RATES[i]), SERIES),
    "attention of grouped queries with dropout": (lambda i: Single(0.3, grouped=True), SERIES),
    "causal attention, rates": (lambda i: Causal(RATES[i]), SERIES),
    "causal attention": (lambda i: Causal(), SERIES),
    "causal attention with dropout": (lambda i: Causal(0.3), SERIES),
    "encoder with a mask": (lambda i: Encoder("bool", 4), SERIES),
    "encoder with a mask of numbers": (lambda i: Encoder("float", 4), SERIES),
    "encoder with another mask, long": (lambda i: Encoder("band", 34), LONG),
    "encoder with a mask and dropout": (lambda i: Encoder("bool", 4, 0.1), SERIES),
    "lstm": (lambda i: Sequence(nn.LSTM(4, 5, 2, batch_first=True, dropout=0.3), 5), SERIES),
    "lstm cell": (lambda i: Cell(True), SERIES),
    "lstm cell without biases": (lambda i: Cell(False), SERIES),
    "lstm both ways": (lambda i: Sequence(nn.LSTM(4, 5, bidirectional=True), 10), SERIES),
    "lstm projected": (lambda i: Sequence(nn.LSTM(4, 5, 2, proj_size=3, bias=False), 3), SERIES),
    "gru": (lambda i: Sequence(nn.GRU(4, 5, 2, batch_first=True), 5), SERIES),
    "rnn tanh": (lambda i: Sequence(nn.RNN(4, 5, 2, batch_first=True), 5), SERIES),
    "rnn relu": (lambda i: Sequence(nn.RNN(4, 5, nonlinearity="relu", bidirectional=True), 10), SERIES),
    "own random numbers": (lambda i: Noisy(), VECTOR),
    "alpha dropout": (lambda i: stack(nn.Linear(5, 7), nn.SELU(), nn.AlphaDropout(0.2), flat(7)), VECTOR),
    "unused weights": (lambda i: Unused(), VECTOR),
    "buffer replaced": (lambda i: Counting(), VECTOR),
    "own numbers": (lambda i: Scaled(0.5 * (i + 1)), VECTOR),
}


def batches(shape, steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    if shape == "tokens":
        x = torch.randint(CLASSES, (steps, MEMBERS, ROWS, 4), generator=generator)
    else:
        x = torch.randn(steps, MEMBERS, ROWS, *shape, generator=generator)
    return x, torch.randint(CLASSES, (steps, MEMBERS, ROWS), generator=generator)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def sgd(parameters, i):
    return torch.optim.SGD(parameters, lr=0.005 * (i + 1), momentum=0.25 * i, weight_decay=0.01 * i)


def members(make, optimizer=sgd, clips=None):
    torch.manual_seed(3)
    models = [make(i) for i in range(MEMBERS)]
    alone = [copy.deepcopy(model) for model in models]
    together = [optimizer([p for p in m.parameters() if p.requires_grad], i) for i, m in enumerate(models)]
    apart = [optimizer([p for p in m.parameters() if p.requires_grad], i) for i, m in enumerate(alone)]
    fusion = Fusion(models, groups=group_names(models[0], together[0]), seeds=range(MEMBERS))
    return fusion, FusedOptimizer(fusion.stack, together, clips), models, together, alone, apart


def train_fused(fusion, optimizer, models, optimizers, shape, *, record=False):
    """50 steps; member 2 leaves after 20 and comes back, as it stood, after 30."""
    step = FusedStep(fusion, optimizer, loss_of)
    x, y = batches(shape)
    ids, state = list(range(MEMBERS)), None
    for at in range(STEPS):
        if at == 20:
            state = fusion.draws.generators[2].get_state()
            fusion.keep([0, 1, 3])
            optimizer.keep([0, 1, 3])
            ids = [0, 1, 3]
            step.forget()
        if at == 30:
            fusion.add([models[2]], [0])
            optimizer.add([optimizers[2]])
            fusion.draws.generators[3].set_state(state)
            ids = [0, 1, 3, 2]
            step.forget()
        if record and at in (3, 22, 32):
            step.record(x[at][ids], y[at][ids])
        step(x[at][ids], y[at][ids])


def train_alone(model, optimizer, i, shape, clip=None):
    x, y = batches(shape)
    torch.manual_seed(i)
    for at in range(STEPS):
        if i == 2 and 20 <= at < 30:
            continue
        optimizer.zero_grad()
        loss_of(model, x[at, i], y[at, i]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def worst(model, other, optimizer=None, theirs=None):
    state = other.state_dict()
    gaps = [
        0.0 if torch.equal(v, state[n]) else float((v.double() - state[n].double()).abs().max())
        for n, v in model.state_dict().items()  # a mask of infinities is equal or not
    ]
    if optimizer is not None:
        mine, second = optimizer.state_dict(), theirs.state_dict()
        assert mine["param_groups"] == second["param_groups"]
        assert mine["state"].keys() == second["state"].keys()
        for key, own in mine["state"].items():
            assert {n for n, v in own.items() if v is not None} == second["state"][key].keys()
            gaps += [
                float((second["state"][key][n] - v).abs().max()) for n, v in own.items() if v is not None
            ]
    return max(gaps)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_equals_itself_alone(name):
    make, shape = MODELS[name]
    fusion, optimizer, models, together, alone, apart = members(make)
    train_fused(fusion, optimizer, models, together, shape)
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, shape)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pixels", [(), (3, 2)])
@pytest.mark.parametrize("classes", [2, 3, 7, 8, 17])  # in float64 a register holds 4 or 8
@pytest.mark.parametrize("recorded", [False, True])
def test_a_loss_of_many_rows_equals_that_of_each_member_alone(classes, pixels, reduction, recorded):
    """Many rows of few classes go through a kernel along columns; rows to be ignored count for nobody."""
    torch.manual_seed(5)
    models = [nn.Linear(4, classes) for _ in range(3)]
    alone = [copy.deepcopy(model) for model in models]
    x = torch.randn(3, 40, *pixels, 4)
    y = torch.randint(classes, (3, 40, *pixels))
    y[1, ::3] = 1
    y[2, :35] = 1  # most rows of a member

    def loss(model, x, y):
        scores = model(x)
        return F.cross_entropy(
            scores.movedim(-1, 1) if pixels else scores, y, ignore_index=1, reduction=reduction
        )

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    fusion = Fusion(models, groups=group_names(models[0], optimizers[0]))
    step = FusedStep(fusion, FusedOptimizer(fusion.stack, optimizers), loss)
    if recorded:
        step.record(x, y)
    losses = step(x, y)
    for i, model in enumerate(alone):
        own = loss(model, x[i], y[i])
        own.backward()
        assert float(losses[i]) == pytest.approx(float(own.detach()), rel=1e-12)
        for name, parameter in model.named_parameters():
            wanted = parameter.detach() - 0.1 * parameter.grad
            assert torch.allclose(models[i].get_parameter(name), wanted, rtol=0, atol=1e-12)


optim = torch.optim
OPTIMIZERS = {
    "sgd": lambda p, i: optim.SGD(p, lr=0.1 * (i + 1)),
    "momentum": lambda p, i: optim.SGD(p, lr=0.05, momentum=[0, 0.5, 0.9, 0.99][i], weight_decay=0.01 * i),
    "dampening": lambda p, i: optim.SGD(p, lr=0.05, momentum=[0, 0.5, 0.9, 0.9][i], dampening=0.2 * i),
    "nesterov": lambda p, i: optim.SGD(p, lr=0.05, momentum=0.9 - 0.1 * i, weight_decay=0.01, nesterov=True),
    "adam": lambda p, i: optim.Adam(p, lr=0.01 * (i + 1), betas=(0.8 + 0.02 * i, 0.9 + 0.01 * i), eps=1e-6),
    "adam, decay": lambda p, i: optim.Adam(p, lr=0.01, weight_decay=0.1 * i, eps=1e-6 * (i + 1)),
    "amsgrad": lambda p, i: optim.Adam(p, lr=0.01 * (i + 1), amsgrad=True, eps=1e-6),
    "adamw": lambda p, i: optim.AdamW(p, lr=0.01 * (i + 1), weight_decay=0.1 * i, eps=1e-6),
    "maximize": lambda p, i: optim.AdamW(p, lr=0.001 * (i + 1), maximize=True, eps=1e-6),
    "adadelta": lambda p, i: optim.Adadelta(p, lr=0.5 * (i + 1), rho=0.9 - 0.1 * i, weight_decay=0.01 * i),
    "rmsprop": lambda p, i: optim.RMSprop(
        p, lr=0.001 * (i + 1), alpha=0.9 - 0.05 * i, weight_decay=0.1, eps=1e-5
    ),
    "rmsprop, momentum": lambda p, i: optim.RMSprop(p, lr=0.001, momentum=0.2 * i, eps=1e-5),
    "rmsprop, centered": lambda p, i: optim.RMSprop(p, lr=0.001 * (i + 1), centered=True, eps=1e-5),
    "adagrad (no kernel)": lambda p, i: optim.Adagrad(p, lr=0.1 * (i + 1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("record", [False, True], ids=["plain", "recorded"])
def test_every_optimizer_equals_itself_alone(name, record):
    if record and "no kernel" in name:
        pytest.skip("an optimizer without a kernel is not recorded")
    clips = [None, 0.5, 0.1, None]
    make = MODELS["dropout"][0]
    fusion, optimizer, models, together, alone, apart = members(make, OPTIMIZERS[name], clips)
    assert (optimizer.reason is not None) == ("no kernel" in name)
    original = optimizer.add
    optimizer.add = lambda added: original(added, [clips[2]])
    train_fused(fusion, optimizer, models, together, VECTOR, record=record)
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, VECTOR, clips[i])
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


def test_parameter_groups_keep_their_own_learning_rates():
    def grouped(parameters, i):
        a, b = parameters[:2], parameters[2:]
        return optim.Adam([{"params": b, "lr": 0.03 * (i + 1)}, {"params": a}], lr=0.01 * (i + 1), eps=1e-6)

    fusion, optimizer, models, together, alone, apart = members(MODELS["dropout"][0], grouped)
    assert len(fusion.stack.groups) == 2
    train_fused(fusion, optimizer, models, together, VECTOR)
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, VECTOR)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_parameter_group_may_be_empty(empty):
    def grouped(parameters, i):
        groups = [{"params": parameters[:2], "lr": 0.03 * (i + 1)}, {"params": parameters[2:]}]
        groups.insert(empty, {"params": [], "lr": 9.0})
        return optim.Adam(groups, lr=0.01 * (i + 1), eps=1e-6)

    fusion, optimizer, models, together, alone, apart = members(MODELS["dropout"][0], grouped)
    train_fused(fusion, optimizer, models, together, VECTOR)
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, VECTOR)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


RECORDED = (
    "linear",
    "conv 2d",
    "few pixels",
    "transformer",
    "transformer without dropout",
    "encoder with a mask",
    "lstm",
    "dropout rates",
    "functional dropout rates",
    "causal attention, rates",
    "spectral norm",
    "tied embedding of a twin",
    "embedding scaled by frequency",
)


@pytest.mark.parametrize("name", [*RECORDED, "dropout 2d"])
def test_a_recorded_step_equals_a_plain_one(name):
    make, shape = MODELS[name]
    fusion, optimizer, models, together, alone, apart = members(make)
    train_fused(fusion, optimizer, models, together, shape, record=True)
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, shape)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


def test_recording_leaves_no_trace():
    make, shape = MODELS["conv 2d"]
    fusion, optimizer, models, *_ = members(make)
    x, y = batches(shape, 1)
    before = [copy.deepcopy(m.state_dict()) for m in models]
    generators = [g.get_state() for g in fusion.draws.generators]
    FusedStep(fusion, optimizer, loss_of).record(x[0], y[0])
    for model, state in zip(models, before, strict=True):
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
    assert all(
        torch.equal(a, g.get_state()) for a, g in zip(generators, fusion.draws.generators, strict=True)
    )


@pytest.mark.parametrize("broken", ["fails", "is wrong"])
def test_a_recording_of_shapes_that_does_not_hold_is_made_of_values(monkeypatch, broken):
    make, shape = MODELS["conv 2d"]
    fusion, optimizer, models, together, alone, apart = members(make)
    trace, kinds = FusedStep._trace, []

    def traced(self, *arguments, fake=True):
        graph = trace(self, *arguments, fake=fake)
        kinds.append(fake)
        if fake:
            forward = graph.forward

            def other(*given):
                if broken == "fails":
                    raise RuntimeError("view size is not compatible with input tensor's size and stride")
                return forward(*given) + 1

            graph.forward = other
        return graph

    monkeypatch.setattr(FusedStep, "_trace", traced)
    train_fused(fusion, optimizer, models, together, shape, record=True)
    assert kinds[:3] == [True, True, False]
    for i in range(MEMBERS):
        train_alone(alone[i], apart[i], i, shape)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


class Fickle(nn.Module):
    """Does something else at every call."""

    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(5, CLASSES), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) * self.calls


def test_a_step_that_changes_is_not_recorded():
    fusion, optimizer, *_ = members(lambda i: Fickle())
    x, y = batches(VECTOR, 1)
    with pytest.raises(Unsupported, match="something else"):
        FusedStep(fusion, optimizer, loss_of).record(x[0], y[0])


@pytest.mark.parametrize("name", ["conv 2d", "transformer", "lstm", "linear"])
def test_a_diverged_member_does_not_touch_its_neighbours(name):
    make, shape = MODELS[name]

    def wild(parameters, i):
        return sgd(parameters, i) if i != 1 else optim.SGD(parameters, lr=float("inf"))

    fusion, optimizer, models, together, alone, apart = members(make, wild)
    train_fused(fusion, optimizer, models, together, shape)
    assert not all(torch.isfinite(p).all() for p in models[1].parameters())
    for i in (0, 2, 3):
        train_alone(alone[i], apart[i], i, shape)
        assert worst(alone[i], models[i], apart[i], together[i]) < 1e-10


def test_members_tensors_are_views_and_the_gone_stand_alone():
    fusion, optimizer, models, together, *_ = members(MODELS["conv 2d"][0])
    x, y = batches(IMAGE, 1)
    FusedStep(fusion, optimizer, loss_of)(x[0], y[0])
    storage = fusion.stack.flat.untyped_storage().data_ptr()
    for model in models:
        assert all(p.untyped_storage().data_ptr() == storage for p in model.parameters())
    with torch.no_grad():
        models[3][0].weight.fill_(2.0)  # through the view
    assert (fusion.stack.leaves[0][3] == 2.0).all()
    gone = fusion.keep([0, 3])
    optimizer.keep([0, 3])
    assert gone == [models[1], models[2]]
    for model, own in ((models[1], together[1]), (models[2], together[2])):
        size = sum(p.numel() for p in model.parameters()) * 8
        assert all(p.untyped_storage().nbytes() <= size for p in model.parameters())
        for state in own.state.values():
            assert all(v.untyped_storage().nbytes() <= size for v in state.values())
    assert (models[3][0].weight == 2.0).all()
    assert models[3][0].weight.untyped_storage().data_ptr() == fusion.stack.flat.untyped_storage().data_ptr()
    detach(models[3])
    assert models[3][0].weight.untyped_storage().data_ptr() != fusion.stack.flat.untyped_storage().data_ptr()


def test_a_number_that_members_differ_in_is_each_members_own_after_others_left():
    fusion, _, models, *_ = members(lambda i: Scaled([9.0, 2.0, 2.0, 2.0][i]))
    x, _ = batches(VECTOR, 1)
    for keep in ([0, 1, 2], [1, 2]):  # the last two agree: the one that differed is gone
        fusion.keep(keep)
        out = fusion(lambda m, a: m(a), x[0][: len(keep)])
        for member, model in enumerate(fusion.stack.modules):
            assert torch.allclose(out[member], model(x[0][member]), atol=1e-12)
    fusion.add([models[0]], [0])
    out = fusion(lambda m, a: m(a), x[0][:3])
    for member, model in enumerate(fusion.stack.modules):
        assert torch.allclose(out[member], model(x[0][member]), atol=1e-12)


def test_evaluation_with_shared_inputs_equals_each_alone():
    for name in ("conv 2d", "linear", "transformer", "lstm", "embedding"):
        make, shape = MODELS[name]
        fusion, _, models, *_ = members(make)
        x, _ = batches(shape, 1)
        fusion.train(False)
        with torch.no_grad():
            out = fusion(lambda m, a: m(a), x[0, 0], stacked=(False,))
            for member, model in enumerate(models):
                assert torch.allclose(out[member], model(x[0, 0]), atol=1e-12)


def test_bfloat16_autocast_stays_close_to_alone():
    torch.set_default_dtype(torch.float32)
    for name in ("linear", "conv 2d", "transformer"):
        make, shape = MODELS[name]
        fusion, optimizer, models, _, alone, apart = members(make)
        step = FusedStep(fusion, optimizer, loss_of, autocast=torch.bfloat16)
        x, y = batches(shape, 3)
        for at in range(3):
            step(x[at].float() if x.is_floating_point() else x[at], y[at])
        for i, (model, own) in enumerate(zip(alone, apart, strict=True)):
            torch.manual_seed(i)
            for at in range(3):
                own.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model, x[at, i].float() if x.is_floating_point() else x[at, i], y[at, i])
                loss.backward()
                own.step()
            assert worst(model, models[i]) < 0.02


# ---------------------------------------------------------------- refusals


def test_members_that_differ_are_refused_with_the_place():
    with pytest.raises(Unsupported, match=r"0\.weight is"):
        Fusion([nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 5))])
    with pytest.raises(Unsupported, match=r"members differ in 0\.eps of a LayerNorm"):
        Fusion([stack(nn.LayerNorm(3, eps=1e-5)), stack(nn.LayerNorm(3, eps=1e-3))])
    with pytest.raises(Unsupported, match=r"members differ in 1\.kernel_size"):
        Fusion([stack(nn.Linear(2, 2), nn.MaxPool2d(2)), stack(nn.Linear(2, 2), nn.MaxPool2d(3))])
    with pytest.raises(Unsupported, match="members differ in 0: a Sigmoid in member 0, a Tanh in member 1"):
        Fusion([stack(nn.Sigmoid(), nn.Linear(2, 2)), stack(nn.Tanh(), nn.Linear(2, 2))])
    with pytest.raises(Unsupported, match="members differ in the code of the model, a Local"):
        Fusion([defined(1.0), defined(2.0)])
    with pytest.raises(Unsupported, match="no members"):
        Fusion([])
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="hooks"):
        Fusion([hooked, nn.Linear(2, 2)])
    with pytest.raises(Unsupported, match=r"members differ in head\.multipliers: \(2\.0,\).*\(4\.0,\)"):
        Fusion([Tied(2.0), Tied(4.0)])
    mixed = Tied(2.0)
    mixed.head.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="head has hooks"):
        Fusion([mixed, Tied(2.0)])
    parametrized = [stack(normed.weight_norm(nn.Linear(2, 2))), stack(normed.spectral_norm(nn.Linear(2, 2)))]
    with pytest.raises(Unsupported, match="members differ"):
        Fusion(parametrized)


def test_optimizers_that_differ_are_refused():
    fusion = Fusion([nn.Linear(2, 2), nn.Linear(2, 2)])
    first, second = fusion.stack.modules
    mixed = [optim.SGD(first.parameters(), lr=1), optim.Adam(second.parameters(), lr=1)]
    assert "different optimizers" in FusedOptimizer(fusion.stack, mixed).reason
    flags = [
        optim.SGD(m.parameters(), lr=1, momentum=0.9, nesterov=n) for m, n in ((first, True), (second, False))
    ]
    assert "nesterov" in FusedOptimizer(fusion.stack, flags).reason


def test_torch_looks_at_masks_again_after_a_fused_call():
    look = nn.modules.transformer._detect_is_causal_mask
    fusion, *_ = members(lambda i: Encoder("bool", 4))
    x, y = batches(SERIES, 1)
    fusion(loss_of, x[0], y[0])
    assert nn.modules.transformer._detect_is_causal_mask is look


def test_asking_for_a_value_is_refused_with_the_reason():
    fusion = Fusion([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(Unsupported, match="can't be computed for all members"):
        fusion(lambda m, x: m(x) * m(x).mean().item(), torch.randn(2, 3, 2))
    assert fusion(lambda m, x: m(x), torch.randn(2, 3, 2)).shape == (2, 3, 2)  # and it still works


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_shortens_its_weights_is_refused(layer):
    # Under vmap it would shorten those of the first member alone.
    fusion = Fusion([layer(5, 3, max_norm=0.1) for _ in range(2)])
    with pytest.raises(Unsupported, match="max_norm"):
        fusion(lambda m, x: m(x), torch.zeros(2, 4, 1, dtype=torch.long))


def test_a_rate_that_the_forward_computes_is_refused():
    class Annealed(Functional):
        def forward(self, x):
            return self.head(F.dropout(x, 1 - self.p))

    class Branching(Functional):
        def forward(self, x):
            return self.head(F.dropout(x, self.p) if self.p > 0.1 else x)

    def call(kind):
        Fusion([kind(None, 0.1), kind(None, 0.2)])(lambda m, x: m(x), torch.randn(2, 3, 7))

    with pytest.raises(Unsupported, match="computed in the forward"):
        call(Annealed)
    with pytest.raises(Unsupported, match="members differ in p of a Branching"):
        call(Branching)


class Viewing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, CLASSES)
        if how == "parameter":
            self.second = nn.Parameter(self.first.weight)
        elif how == "buffer":
            self.register_buffer("second", self.first.weight.data)
        else:
            self.second = self.first.weight.detach()[1:]

    def forward(self, x):
        return self.head(self.first(x) + x @ self.second[:1].T)


@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute"])
def test_views_of_a_parameter_are_refused(how):
    with pytest.raises(Unsupported, match="share memory without being one parameter"):
        Fusion([Viewing(how) for _ in range(2)])


def test_complex_weights_are_refused():
    with pytest.raises(Unsupported, match="weight is complex"):
        Fusion([nn.Linear(5, CLASSES, dtype=torch.cdouble) for _ in range(2)])


def test_a_hook_on_an_activation_is_refused():
    def forward(model, x):
        x = model(x)
        x.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))  # too far away to be seen by a check
        return x

    with pytest.raises(Unsupported, match="puts a hook on a tensor"):
        Fusion([nn.Linear(5, CLASSES) for _ in range(2)])(forward, torch.randn(2, 3, 5))


def test_a_model_that_cannot_be_copied_is_refused():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        model.doubled = 2 * model.weight
    with pytest.raises(Unsupported, match="can't be copied"):
        Fusion(models)


def test_random_numbers_of_no_member_are_refused():
    """Without a rule torch draws from its own generator, which would give members other numbers than alone."""
    fusion = Fusion([nn.Linear(8, 8), nn.Linear(8, 8)])
    with pytest.raises(Unsupported, match="draws random numbers"):
        fusion(lambda m, x: F.fractional_max_pool2d(m(x), 2, 4), torch.randn(2, 1, 1, 8, 8))
