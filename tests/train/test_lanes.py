"""Lanes: plain training loops whose models are computed as one give what each gives by itself, whatever they do."""

import copy
import io
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.model import _lanes as fused_lanes
from penstock.model._parametrize import Multiply
from penstock.train._generators import Generators
from penstock.train._lanes import Hub
from penstock.train._seeding import seed_all
from penstock.train._worker import Settings, Spec, execute, run_all

DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LABELS = (DATA[:, 0] * DATA[:, 1] > 0).long() + (DATA[:, 2] > 0.5).long()


def net(dropout=0.0, norm=False):
    # Batch norm takes the gradient of a bias before it to rounding errors, of which Adam makes whole steps.
    layers = [nn.Linear(6, 8, bias=not norm), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()


def sgd(model, number):
    return torch.optim.SGD(
        model.parameters(), lr=0.05 * (number + 1), momentum=0.1 * number, weight_decay=1e-3
    )


class Alone:
    """What a training function has outside of lanes."""

    def __init__(self, number):
        self.number = number

    def prepare(self, model, optimizer):
        return model, optimizer


def result(model, losses):
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def batches(count, size=8):
    for _ in range(count):
        yield torch.randint(0, len(DATA), (size,))


def simple(lane, *, steps=12, dropout=0.0, norm=False, make=sgd, each=None):
    """The ordinary loop; ``each(model, optimizer, loss, step)`` stands between backward and step."""
    number = lane.number
    model = net(dropout * (number + 1), norm)
    model, optimizer = lane.prepare(model, make(model, number))
    losses = []
    for step, rows in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
        loss.backward()
        if each is not None:
            each(model, optimizer, loss, step)
        optimizer.step()
        losses.append(loss.item())
    return result(model, losses)


def by_itself(function, number):
    seed_all(number)
    return function(Alone(number))


def together(function, count=3, **options):
    notes = []

    def seeded(lane):
        seed_all(lane.number)
        return function(lane)

    hub = Hub([seeded] * count, note=notes.append, **options)
    hub.run()
    return hub, notes


def assert_same(function, count=3, *, fused=True, error=1e-10):
    """Each lane gives what it gives by itself; ``fused``: and its calls were fused."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    alone = [by_itself(function, number) for number in range(count)]
    random.setstate(before[0])
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    hub, notes = together(function, count)
    assert torch.get_rng_state().tolist() == before[2]  # lanes draw from generators of their own
    for lane, (losses, state) in zip(hub.lanes, alone, strict=True):
        if lane.error is not None:
            raise lane.error
        assert lane.again is None
        assert bool(lane.fused) is fused
        assert lane.result[0] == pytest.approx(losses, rel=error, abs=error)
        assert lane.result[1].keys() == state.keys()
        for name, value in state.items():
            assert torch.allclose(lane.result[1][name], value, rtol=error, atol=error), name
    return hub, notes


# ------------------------------------------------------------------------------------------------ the same


def adam(model, number):
    return torch.optim.Adam(model.parameters(), lr=0.01 * (number + 1), betas=(0.8, 0.9 + 0.01 * number))


def adamw_groups(model, number):
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.002 * (number + 1)},
        {"params": model[1:].parameters()},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1 * number)


def rprop(model, number):
    return torch.optim.Rprop(model.parameters(), lr=0.01 * (number + 1))


@pytest.mark.parametrize("make", [sgd, adam, adamw_groups])
@pytest.mark.parametrize("norm", [False, True])
def test_lanes_give_what_they_give_alone(make, norm):
    assert_same(lambda lane: simple(lane, make=make, dropout=0.15, norm=norm))


@pytest.mark.parametrize("rates", [(0.0, 0.1, 0.2), (0.0, 0.0, 0.3), (0.2, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_a_lane_that_drops_nothing_does_not_speak_for_the_others(rates):
    def train(lane):
        model = net(rates[lane.number])
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses += [loss.item(), torch.rand(()).item()]  # the second: where its generator stands
        return result(model, losses)

    assert_same(train)


def test_a_lane_that_joins_calls_which_drew_nothing_draws():
    def train(lane):
        late = lane.number == 2
        model = net(0.3 if late else 0.0)
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step in range(8):
            rows = torch.randint(0, len(DATA), (8,))
            inputs = DATA[rows].requires_grad_(late and step == 0)  # such a call is made by the lane itself
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses += [loss.item(), torch.rand(()).item()]
        return result(model, losses)

    hub, _ = assert_same(train)
    assert [lane.fused for lane in hub.lanes] == [8, 8, 7]


def test_the_check_looks_at_lanes_that_differ():
    """A way that only a rate above zero takes is compared too, whoever comes first."""

    class Odd(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.drop, self.head = nn.Dropout(p), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.drop(x)) / (1 + self.drop.p)  # read as one number

    def train(lane):
        model = Odd((0.0, 0.0, 0.3)[lane.number]).double()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train, fused=False)
    assert "differ by" in notes[0]["reason"]


def test_lanes_of_twins_whose_embedding_is_the_output_layer_are_fused():
    def train(lane):
        table, body, head = nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9, bias=False)
        head.weight = table.weight
        head.register_forward_pre_hook(Multiply(4.0))
        model = nn.Sequential(table, body, head).double()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step in range(6):
            if step == 4 and lane.number == 1:
                model[1].register_forward_hook(lambda *_: None)
            optimizer.zero_grad()
            words = torch.randint(0, 9, (8,))
            loss = F.cross_entropy(model(words), words.roll(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    hub, _ = assert_same(train)
    assert [lane.fused for lane in hub.lanes] == [6, 4, 6]  # a hook of the lane's own is another matter


def test_every_call_of_lanes_in_step_is_fused():
    hub, notes = together(lambda lane: simple(lane, steps=7))
    assert [lane.fused for lane in hub.lanes] == [7, 7, 7]
    assert [note["count"] for note in notes] == [3]
    assert notes[0]["check"]["ok"]
    assert notes[0]["check"]["dtype"] == "float64"


def test_an_optimizer_without_a_kernel_steps_by_itself():
    _, notes = assert_same(lambda lane: simple(lane, make=rprop))
    assert [note["lane"] for note in notes if "steps by itself" in note["reason"]] == [0, 1, 2]


def test_clipping_and_schedules():
    def train(lane):
        number = lane.number
        model = net()
        optimizer = adam(model, number)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5 + 0.1 * number)
        model, optimizer = lane.prepare(model, optimizer)
        late = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        losses = []
        for rows in batches(12):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (number + 1))
            optimizer.step()
            early.step()
            late.step()
            losses += [loss.item(), norm.item(), optimizer.param_groups[0]["lr"]]
        return result(model, losses)

    assert_same(train)


def test_gradients_add_up_until_they_are_dropped():
    def train(lane):
        model = net(0.2)
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses, kept = [], []
        for step, rows in enumerate(batches(12)):
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows]) / 2
            loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                kept.append([p.grad for p in model.parameters()])  # no copy: a later backward leaves it alone
                optimizer.zero_grad()
        return result(model, losses + [float(g.sum()) for grads in kept for g in grads])

    assert_same(train)


def test_gradients_whose_data_is_exchanged_are_those_that_count():
    def halve(model, optimizer, loss, step):
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5  # the gradient is the same object as before

    assert_same(lambda lane: simple(lane, each=halve))


@pytest.mark.parametrize("how", ["dampening", "nesterov", "rmsprop"])
def test_momentum_that_is_zero_at_times_leaves_the_buffer_alone(how):
    def make(model):
        if how == "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
        options = {"nesterov": True} if how == "nesterov" else {"dampening": 0.2}
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, **options)

    def function(lane):
        model = net()
        model, optimizer = lane.prepare(model, make(model))
        losses = []
        for step, rows in enumerate(batches(9)):
            if how == "rmsprop":  # which makes its buffer at the first step, or never
                rests = (False, step % 2 == 1, step > 4)[lane.number]
            else:
                rests = (False, step % 2 == 0, step < 5)[lane.number]
            optimizer.param_groups[0]["momentum"] = 0.0 if rests else 0.9
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        kept = [own.get("momentum_buffer") for own in optimizer.state_dict()["state"].values()]
        return result(model, [*losses, *(float(buffer.sum()) for buffer in kept)])

    assert_same(function)


def test_two_forwards_before_a_backward_and_two_backwards_of_one_forward():
    def train(lane):
        model = net(0.1)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for rows in batches(8):
            optimizer.zero_grad()
            first, second = model(DATA[rows]), model(DATA[rows] * 2)
            loss = F.cross_entropy(first, LABELS[rows]) + F.mse_loss(second, first.detach())
            loss.backward(retain_graph=True)
            (first.square().mean() * 0.1).backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train)


def test_a_loss_of_the_parameters_themselves():
    def train(lane):
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(10):
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows]) + 0.01 * penalty
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train)


class Several(nn.Module):
    """Returns a dict, takes keywords, ties its weights, and has a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, *, scale=1.0, mask=None):
        self.seen += 1
        h = torch.tanh(self.second(torch.tanh(self.first(self.frozen(x)))))
        return {"logits": self.head(h) * scale, "size": h.square().mean(), "mask": mask.sum(), "text": "a"}


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(0.1)

    def forward(self, x, y):
        return F.cross_entropy(self.body(x), y)


def test_a_model_that_returns_its_loss():
    def train(lane):
        model = WithLoss()
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses, slopes = [], []
        for step, rows in enumerate(batches(9)):
            optimizer.zero_grad()
            loss = model(DATA[rows], LABELS[rows])
            if step == 3:
                loss.register_hook(lambda slope: slope * 0.5)
            if step == 4:
                loss.mul_(3)
            if step == 5:
                loss.retain_grad()
            if step == 6:
                loss.backward(torch.tensor(0.25, dtype=torch.float64))
            elif step == 7:
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                loss.backward()
            slopes += [float(loss.grad)] if step == 5 else []
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses + slopes)

    assert_same(train)


def test_outputs_and_inputs_of_any_form():
    def train(lane):
        model = Several().double()
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(8)):
            optimizer.zero_grad()
            out = model(DATA[rows], scale=0.5, mask=LABELS[rows] > 0)
            out["logits"].mul_(2)  # in place: it is the lane's own
            loss = F.cross_entropy(out["logits"], LABELS[rows])
            if step % 2:
                loss = loss + out["size"]
            loss.backward()
            optimizer.step()
            losses += [loss.item(), out["mask"].item()]
            assert out["text"] == "a"
        assert model.unused.weight.grad is None
        return result(model, losses)

    assert_same(train)


def test_each_lane_draws_from_generators_of_its_own():
    def train(lane):
        model = net(0.3)
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        drawn = []
        for step in range(9):
            rows = np.random.choice(len(DATA), 8)
            noise = torch.randn(8, 6, dtype=torch.float64) * random.gauss(0, 0.1)
            if lane.number == 1 and step % 2:
                drawn.append(np.random.randn())  # numpy keeps a second one in store
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows] + noise), LABELS[rows])
            loss.backward()
            drawn.append(random.random())
            optimizer.step()
            drawn += [loss.item(), np.random.rand(), np.random.randn()]
        return result(model, drawn)

    assert_same(train)


def test_generators_put_back_what_they_kept():
    generators = Generators()

    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()

    seed_all(1)
    draws, states = {}, {}
    for name in ("a", "b"):
        seed_all(ord(name))
        draw()
        states[name] = generators.keep(None)
        draws[name] = [draw() for _ in range(700)]
    current = None
    found = {"a": [], "b": []}
    for number in range(1400):
        name = "ab"[number * 7 % 2]
        generators.put(states[name])
        found[name].append(draw())
        states[name] = current = generators.keep(states[name])
    assert current is not None
    assert found == draws


# ------------------------------------------------------------------------------------- lanes of all sorts


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x):
        return self.body(x.mul_(0.5))


def test_a_model_that_writes_into_its_inputs_does_so_for_its_lane():
    def function(lane):
        model = Writing().double()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(3):
            x = DATA[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), LABELS[rows]) + x.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(function, fused=False)
    assert any("writes into its inputs" in note["reason"] for note in notes)


def test_lanes_of_different_lengths_and_batch_sizes():
    def train(lane):
        model = net(0.1, norm=True)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step in range(5 + 4 * lane.number):
            size = 6 if step % 3 == lane.number else 8  # the odd batch comes at another time in each
            rows = torch.randint(0, len(DATA), (size,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 4)


class Follower(nn.Module):
    """A teacher in frozen weights follows its student at every call, and the student's own weights are worn down."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.student.weight.mul_(0.99)
            for mine, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.mul_(0.8).add_(mine, alpha=0.2)
        return self.student(x) - self.teacher(x)


def test_weights_that_a_forward_changes_are_each_lanes_own():
    def train(lane):
        model = Follower()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step in range(5 + 2 * lane.number):
            size = 6 if step % 3 == lane.number else 8  # calls that some lanes make together, not all
            rows = torch.randint(0, len(DATA), (size,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 4)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_at_other_times_in_each(quiet):
    def train(lane):
        model = net(0.3, norm=True)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(10)):
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            if step % (lane.number + 2) == 0:
                model.eval()
                with quiet():
                    for part in DATA.split(16):
                        losses.append(model(part).sum().item())
                    assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 3)


class Scaled(nn.Module):
    """Scaled by what ``read`` makes of something it holds that is neither parameter nor buffer."""

    def __init__(self, held, read):
        super().__init__()
        self.body, self.held, self.read = net(), held, read

    def forward(self, x):
        return self.body(x) * self.read(self.held)


def scale(by=1.0):
    return torch.tensor(by, dtype=torch.float64)


HELD = {
    "a tensor": (scale, lambda held: held, lambda held: held.mul_(0.8)),
    "a list in a dict": (
        lambda by=1.0: {"all": [by, 2.0]},
        lambda held: held["all"][0],
        lambda held: held["all"].__setitem__(0, held["all"][0] * 0.8),
    ),
    "an object": (
        lambda by=1.0: SimpleNamespace(by=scale(by), at=None),
        lambda held: held.by,
        lambda held: vars(held).update(by=held.by * 0.8),
    ),
    "a queue": (lambda by=1.0: deque([by]), sum, lambda held: held.append(0.1)),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_model_holds_beside_its_tensors_is_each_lanes_own(kind):
    make, read, change = HELD[kind]

    def function(lane, *, apart, within=False, between=False):
        model = Scaled(
            make(1.0 + (apart and lane.number > 1)), lambda held: (within and change(held), read(held))[1]
        )
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(4 + lane.number):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if between:
                change(model.held)
        return result(model, losses)

    def fused(**options):
        alone = [by_itself(lambda lane: function(lane, **options), number) for number in range(3)]
        hub, _ = together(lambda lane: function(lane, **options))
        for lane, (losses, _) in zip(hub.lanes, alone, strict=True):
            assert lane.error is None
            assert lane.result[0] == pytest.approx(losses, rel=1e-10)
        return [lane.fused for lane in hub.lanes]

    assert min(fused(apart=False)) > 2
    assert fused(apart=True)[2] == 0  # the first two are alike
    assert max(fused(apart=False, between=True)) == 1
    assert max(fused(apart=False, within=True)) == 0


def test_layers_in_modes_of_their_own_and_rates_that_change():
    def train(lane):
        model = net(0.3, norm=True)
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(9)):
            model[1].train(step % 2 == 0)  # batch norm
            if step == 5:
                model[3].p = 0.1 * (lane.number + 1)  # seen, and computed by the lane itself from here on
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train)
    assert any("has been changed: p" in note["reason"] for note in notes)


def test_one_lane_that_fails_fails_alone():
    def train(lane):
        def each(model, optimizer, loss, step):
            if getattr(lane, "fails", False) and step == 4:
                raise ValueError("of the second")

        lane.fails = lane.number == 1 and not isinstance(lane, Alone)
        return simple(lane, dropout=0.1, each=each)

    alone = [by_itself(train, number) for number in range(3)]
    hub, _ = together(train)
    assert isinstance(hub.lanes[1].error, ValueError)
    for number in (0, 2):
        assert hub.lanes[number].error is None
        assert hub.lanes[number].result[0] == pytest.approx(alone[number][0], rel=1e-12)


def test_a_lane_that_leaves_in_the_middle_of_a_step():
    def train(lane):
        model = net(0.1)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(8)):
            optimizer.zero_grad()
            out = model(DATA[rows])
            if lane.number == 1 and step == 3:
                return result(model, losses)  # the others' gradients of this very call are yet to come
            loss = F.cross_entropy(out, LABELS[rows])
            loss.backward()
            if lane.number == 2 and step == 5:
                return result(model, [*losses, *(float(p.grad.sum()) for p in model.parameters())])
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 5)


def test_a_nan_stays_where_it_is():
    def train(lane):
        model = net(norm=True)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(8)):
            scale = float("nan") if lane.number == 1 and step == 2 else 1.0
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows] * scale), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    alone = [by_itself(train, number) for number in range(3)]
    hub, _ = together(train)
    for lane, (losses, state) in zip(hub.lanes, alone, strict=True):
        assert lane.result[0] == pytest.approx(losses, rel=1e-10, nan_ok=True)
        assert np.isnan(losses[-1]) == (lane.number == 1)
        for name, value in state.items():
            assert torch.allclose(lane.result[1][name], value, rtol=1e-10, equal_nan=True)


def test_lanes_of_several_structures_meet_those_like_them():
    def train(lane):
        width = 5 if lane.number % 2 else 7
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 4)
    hub, notes = together(train, 3)
    assert [lane.fused for lane in hub.lanes] == [6, 0, 6]
    assert [(n["lane"], n["reason"][:15]) for n in notes if "lane" in n] == [(1, "members differ:")]


def test_lanes_that_prepare_nothing_run_one_after_another():
    hub, notes = together(lambda lane: lane.number)
    assert [lane.result for lane in hub.lanes] == [0, 1, 2]
    assert notes == []


ACTIONS = (
    "step",
    "step",
    "step",
    "odd",
    "evaluate",
    "accumulate",
    "twice",
    "forward",
    "load",
    "step only",
    "fail",
)


@settings(max_examples=20, deadline=None, derandomize=True)
@example([["step"], ["step", "step"], ["step", "load", "step"]])
@example(
    [
        ["load", "step", "step"],
        ["step", "evaluate"],
        ["step", "load"],
        ["accumulate", "step only", "step only"],
    ]
)
@given(st.lists(st.lists(st.sampled_from(ACTIONS), max_size=10), min_size=2, max_size=5))
def test_no_order_of_calls_blocks_or_changes_anything(programs):
    """Each lane does what it likes, when it likes, and ends when it likes."""

    def train(lane):
        model = net(0.2, norm=True)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses, kept = [], copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for action in programs[lane.number]:
            rows = torch.randint(0, len(DATA), (5 if action == "odd" else 8,))
            model.train(action != "evaluate")
            if action == "fail":
                return result(model, losses)
            if action == "load":
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                continue
            if action == "evaluate":
                with torch.no_grad():
                    losses.append(model(DATA[rows]).sum().item())
                continue
            if action != "step only":
                loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
                if action == "twice":
                    loss = loss + model(DATA[rows]).square().mean()
                losses.append(loss.item())
                if action == "forward":
                    continue
                loss.backward()
            if action != "accumulate":
                optimizer.step()
                optimizer.zero_grad()
        return result(model, losses)

    count = len(programs)
    alone = [by_itself(train, number) for number in range(count)]
    hub, _ = together(train, count)
    for lane, (losses, state) in zip(hub.lanes, alone, strict=True):
        if lane.error is not None:
            raise lane.error
        assert lane.again is None
        assert lane.result[0] == pytest.approx(losses, rel=1e-9, abs=1e-9)
        for name, value in state.items():
            assert torch.allclose(lane.result[1][name], value, rtol=1e-9, atol=1e-9), name


# --------------------------------------------------------------------------------- what can't be fused


class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = net()

    def forward(self, x):
        out = self.layer(x)
        return out if out.mean() > 0 else -out


class Telling(Peeking):
    """Says something beside what it returns."""

    def __init__(self):
        super().__init__()
        self.size = 0.0

    def forward(self, x):
        out = self.layer(x)
        self.size = out.square().mean()
        return out


class Appending(Peeking):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, x):
        out = self.layer(x)
        self.sizes.append(out.square().mean())
        return out


class Skipping(Peeking):
    """Decides by Python's random numbers, once for all members."""

    def forward(self, x):
        return self.layer(x) if random.random() < 2 else x


class Boxed(Peeking):
    def forward(self, x):
        return Wrapped(self.layer(x))


class Wrapped:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Peeking, "can't be computed for all members at once"),
        (Telling, "sets size"),
        (Appending, "sets sizes"),
        (Skipping, "draws from Python's or numpy's generator"),
        (Boxed, "returns a Wrapped"),
    ],
)
def test_what_cannot_be_fused_runs_alone_and_says_why(kind, reason):
    def train(lane):
        model = kind()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(6):
            optimizer.zero_grad()
            out = model(DATA[rows])
            out = out.value if isinstance(out, Wrapped) else out
            loss = F.cross_entropy(out, LABELS[rows])
            if kind is Telling:
                loss = loss + model.size
            if kind is Appending:
                loss = loss + model.sizes[-1]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train, fused=False)
    assert {note.get("lane") for note in notes} == {None, 0, 1, 2}
    assert all(reason in note["reason"] for note in notes)
    assert [note["count"] for note in notes if "count" in note] == [1]


def test_fusion_that_is_wrong_is_found_out_before_it_is_used(monkeypatch):
    honest = fused_lanes.Fusion.__call__

    def wrong(self, *args, **options):
        out = honest(self, *args, **options)
        return torch.cat([out[:1], out[1:] * (1 + 1e-6)])

    monkeypatch.setattr(fused_lanes.Fusion, "__call__", wrong)
    _, notes = assert_same(simple, fused=False)
    assert "fused and unfused differ by 1e-06" in notes[0]["reason"]
    assert notes[0]["check"]["ok"] is False


def test_calls_that_are_not_the_ordinary_ones_are_made_by_the_lane():
    def train(lane):
        model = net(0.1)
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for rows in batches(8):
            optimizer.zero_grad()
            x = DATA[rows].clone().requires_grad_()
            loss = F.cross_entropy(model(x), LABELS[rows])
            (slope,) = torch.autograd.grad(loss, x)  # an adversarial step
            loss = F.cross_entropy(model(DATA[rows] + 0.1 * slope.sign()), LABELS[rows])
            hidden = model[0](DATA[rows])  # a layer of the model
            loss = loss + hidden.square().mean()
            loss = (
                loss
                + torch.func.functional_call(
                    model, {n: p * 0.5 for n, p in model.named_parameters()}, (DATA[rows],)
                )
                .square()
                .mean()
            )
            loss = loss + torch.utils.checkpoint.checkpoint(model, DATA[rows], use_reentrant=False).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train)
    assert any("an input needs a gradient" in note["reason"] for note in notes)


@pytest.mark.parametrize("how", ["grad", "create_graph", "inputs"])
def test_gradients_asked_for_in_other_ways_send_the_lane_to_train_alone(how):
    def train(lane):
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        loss = model(DATA).square().mean()
        if lane.number == 1:
            if how == "grad":
                torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            else:
                loss.backward(
                    **({"create_graph": True} if how == "create_graph" else {"inputs": [model[0].weight]})
                )
        else:
            loss.backward()
        optimizer.step()
        return result(model, [loss.item()])

    hub, _ = together(train)
    assert [lane.again is not None for lane in hub.lanes] == [False, True, False]
    assert [lane.error for lane in hub.lanes] == [None] * 3


def test_what_torch_refuses_is_refused():
    def train(lane):
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        out = model(DATA)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        optimizer.zero_grad()
        out = model(DATA)
        out.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        with pytest.raises(InvalidInput, match="already"):
            lane.prepare(model, optimizer)
        return True

    hub, _ = together(train)
    assert [(lane.error, lane.result) for lane in hub.lanes] == [(None, True)] * 3
    hub, _ = together(lambda lane: lane.prepare(net(), "adam"))
    assert [type(lane.error) for lane in hub.lanes] == [InvalidInput] * 3


# ------------------------------------------------------------------- models and optimizers stay themselves


def test_the_model_can_be_copied_saved_loaded_and_changed():
    def train(lane):
        model = net(0.1, norm=True)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        average, losses, best = copy.deepcopy(model), [], None
        for step, rows in enumerate(batches(12)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.5)
                if step == 4:
                    model[0].weight.clamp_(-0.3, 0.3)
            if step == 6:
                best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 9:
                model.load_state_dict(best[0])
                optimizer.load_state_dict(best[1])
            losses += [loss.item(), average.eval()(DATA[rows]).sum().item()]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        again.eval()
        losses.append(again(DATA).sum().item())
        model[0].weight.data = model[0].weight.data * 0.5  # it no longer lies with the others'
        optimizer.zero_grad()
        model(DATA).sum().backward()
        optimizer.step()
        bare = net(norm=True)
        bare.load_state_dict(model.state_dict())
        return result(bare, losses)

    assert_same(train)


def test_layers_that_are_replaced_frozen_or_added():
    def train(lane):
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(10)):
            if step == 2:
                model[1] = nn.Softsign()
            if step == 4:
                model[0].requires_grad_(False)
            if step == 6:
                model[0].requires_grad_(True)
                model.append(nn.Linear(3, 3).double())
                optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.2})
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train)
    assert any("has been replaced" in note["reason"] for note in notes)


def test_a_layer_that_is_set_free_trains():
    def train(lane):
        model = net()
        model[0].requires_grad_(False)
        model, optimizer = lane.prepare(model, adam(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(10)):
            if step == 4 + lane.number:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    _, notes = assert_same(train)
    assert any("it trains other parameters than before" in note["reason"] for note in notes)


@pytest.mark.parametrize("make", [sgd, adam])
def test_an_optimizer_whose_state_is_dropped_begins_again(make):
    def train(lane):
        model = net()
        model, optimizer = lane.prepare(model, make(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(10)):
            if step == 4 + lane.number:
                optimizer.state.clear()
            if step == 8 and lane.number == 0:  # who stays is laid out anew
                break
            if step == 8:
                optimizer.state[model[0].weight] = {}
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.first(x), self.second(x)


@pytest.mark.parametrize("before", [0, 7], ids=["from the start", "after steps of its own"])
def test_a_head_that_is_used_at_times_counts_its_own_steps(before):
    """Adam corrects its averages by the number of steps, which is each parameter's own."""

    def train(lane):
        model = TwoHeads().double()
        optimizer = adam(model, lane.number)
        losses = []
        for step, rows in enumerate(batches(before + 12)):
            if step == before:
                model, optimizer = lane.prepare(model, optimizer)
            optimizer.zero_grad()
            first, second = model(DATA[rows])
            loss = F.cross_entropy(first, LABELS[rows])
            if step % 3 == 2 or step >= 7:
                loss = loss + F.cross_entropy(second, LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train)


def test_a_lane_that_rebuilds_its_model_while_another_leaves():
    def train(lane):
        number = lane.number
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, number))
        losses = []
        for step, rows in enumerate(batches(8)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA[rows]), LABELS[rows])
            loss.backward()
            if number == 1 and step == 3:
                return result(model, losses)
            if number == 0 and step == 3:  # found out only after the other has gone
                with torch.no_grad():
                    model[0].weight = nn.Parameter(model[0].weight * 2)
                    model[3].bias.data = model[3].bias.data + 1
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, 5)


class Making(nn.Module):
    """Makes a tensor of the default type."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) + torch.full((3,), 1 / 3)


def test_a_default_type_is_the_lanes_own():
    def train(lane):
        torch.set_default_dtype(torch.float64 if lane.number % 2 else torch.float32)
        try:
            model = Making()
            model, optimizer = lane.prepare(model, sgd(model, lane.number))
            x, losses = DATA.to(torch.get_default_dtype()), []
            for rows in batches(5):
                optimizer.zero_grad()
                out = model(x[rows])
                loss = F.cross_entropy(out, LABELS[rows])
                loss.backward()
                optimizer.step()
                losses += [loss.item(), float(torch.tensor(0.1))]
                assert out.dtype == torch.get_default_dtype()
            return result(model, losses)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same(train, 4, error=1e-6)


def test_hooks_on_the_model_and_its_parameters():
    def train(lane):
        seen = []
        model = net()
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        model.register_forward_hook(lambda _, x, out: seen.append(out.sum().item()))
        for step, rows in enumerate(batches(6)):
            if step == 3:
                model[0].weight.register_hook(lambda grad: grad * 0.5)
            optimizer.zero_grad()
            F.cross_entropy(model(DATA[rows]), LABELS[rows]).backward()
            optimizer.step()
        return result(model, seen)

    _, notes = assert_same(train)
    assert any("a parameter has a gradient hook" in note["reason"] for note in notes)


def test_mixed_precision():
    def train(lane):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        model, optimizer = lane.prepare(model, sgd(model, lane.number))
        losses = []
        for step, rows in enumerate(batches(8)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step != 2):
                out = model(DATA[rows].float())
                assert out.dtype == (torch.float32 if step == 2 else torch.bfloat16)
                loss = F.cross_entropy(out.float(), LABELS[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return result(model, losses)

    assert_same(train, error=2e-2)


def test_closures():
    def train(lane):
        model = net()
        make = torch.optim.LBFGS if lane.number >= 0 else None
        model, optimizer = lane.prepare(
            model, make(model.parameters(), lr=0.1 * (lane.number + 1), max_iter=3)
        )

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA), LABELS)
            loss.backward()
            return loss

        return result(model, [optimizer.step(closure).item() for _ in range(3)])

    assert_same(train)
    assert_same(
        lambda lane: _closure_of_sgd(lane),
    )


def _closure_of_sgd(lane):
    model = net()
    model, optimizer = lane.prepare(model, sgd(model, lane.number))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(DATA), LABELS)
        loss.backward()
        return loss

    return result(model, [optimizer.step(closure).item() for _ in range(3)])


def test_two_models_that_feed_each_other():
    def train(lane):
        maker, judge = nn.Linear(4, 6).double(), net(0.1)
        maker, maker_step = lane.prepare(maker, adam(maker, lane.number))
        judge, judge_step = lane.prepare(judge, sgd(judge, lane.number))
        losses = []
        for rows in batches(6):
            noise = torch.randn(8, 4, dtype=torch.float64)
            judge_step.zero_grad()
            loss = judge(maker(noise).detach()).square().mean() + F.cross_entropy(
                judge(DATA[rows]), LABELS[rows]
            )
            loss.backward()
            judge_step.step()
            maker_step.zero_grad()
            made = F.cross_entropy(judge(maker(noise)), LABELS[rows])
            made.backward()
            maker_step.step()
            losses += [loss.item(), made.item()]
        weights = {**maker.state_dict(), **{f"judge.{n}": v for n, v in judge.state_dict().items()}}
        return losses, {name: value.clone() for name, value in weights.items()}

    assert_same(train)


# ------------------------------------------------------------------------------------------- in a worker


class Sink:
    """Keeps what a run tells."""

    def __init__(self, stop_at=None):
        self.reports, self.notes, self.saves, self.times, self.energies = {}, [], [], [], []
        self.stop_at = stop_at

    def reported(self, report):
        epoch, metrics, train_s, energy = report
        self.reports[epoch] = metrics
        self.times.append(train_s)
        self.energies.append(energy)

    def saved(self, epoch, path):
        self.saves.append(epoch)

    def told(self):
        return ("enough", False) if self.stop_at is not None and self.stop_at in self.reports else None

    def noted(self, topic, data):
        self.notes.append((topic, data))


def specs(count, until=4):
    return [Spec(i, {"lr": 0.1 * (i + 1)}, i, 0, until, True, None, None, 0, 0) for i in range(count)]


def train(run):
    model = net(0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=0.5)
    model, optimizer = run.prepare(model, optimizer)
    if (state := run.load()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in run.epochs():
        torch.manual_seed(100 * run.seed + epoch)
        model.train()
        for rows in torch.randperm(len(DATA)).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(DATA[rows]), LABELS[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(DATA), LABELS)
        run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.report(loss=loss)


def run_placement(tmp_path, work, sinks, until=4, **settings):
    ends = {}
    run_all(
        work,
        specs(len(sinks), until),
        Settings(tmp_path, ("loss",), **settings),
        sinks,
        ends.__setitem__,
        facts={"fusion": {"count": len(sinks), "key": "k"}},
    )
    return ends


def assert_as_alone(tmp_path, work, sinks, ends, until=4):
    for number, spec in enumerate(specs(len(sinks), until)):
        sink = Sink(sinks[number].stop_at)
        assert ends[number] == execute(work, spec, Settings(tmp_path / "alone", ("loss",)), sink)
        assert sinks[number].reports.keys() == sink.reports.keys()
        for epoch, metrics in sink.reports.items():
            assert sinks[number].reports[epoch] == pytest.approx(metrics, rel=1e-10)


def test_a_placement_is_what_its_segments_are_alone(tmp_path):
    sinks = [Sink(), Sink(stop_at=2), Sink()]
    ends = run_placement(tmp_path, train, sinks)
    assert_as_alone(tmp_path, train, sinks, ends)
    assert [end.status for end in ends.values()] == ["stopped", "completed", "completed"]
    assert [(topic, note["kind"], note["count"], note["check"]["ok"]) for topic, note in sinks[0].notes] == [
        ("fusion", "k", 3, True)
    ]


def test_a_checkpoint_holds_one_lane_and_fits_the_bare_model(tmp_path):
    sinks = [Sink() for _ in range(4)]
    run_placement(tmp_path / "fused", train, sinks, until=2)
    execute(train, specs(1, 2)[0], Settings(tmp_path / "alone", ("loss",)), Sink())
    sizes = [
        max(path.stat().st_size for path in (tmp_path / how).rglob("*") if path.is_file())
        for how in ("fused", "alone")
    ]
    assert sizes[0] < 1.2 * sizes[1]
    # Begun in lanes, ended alone; begun alone, ended in lanes.
    sink = Sink()
    execute(train, specs(1)[0], Settings(tmp_path / "fused", ("loss",)), sink)
    whole = Sink()
    execute(train, specs(1)[0], Settings(tmp_path / "whole", ("loss",)), whole)
    assert sink.reports[4] == pytest.approx(whole.reports[4], rel=1e-10)
    for spec in specs(2, 2):
        execute(train, spec, Settings(tmp_path / "back", ("loss",)), Sink())
    sinks = [Sink(), Sink()]
    run_placement(tmp_path / "back", train, sinks)
    assert sinks[0].reports[4] == pytest.approx(whole.reports[4], rel=1e-10)


def test_a_lane_that_cannot_go_on_is_trained_alone_from_its_checkpoint(tmp_path):
    def awkward(run):
        model = net()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if (state := run.load()) is not None:
            model.load_state_dict(state)
        for epoch in run.epochs():
            loss = F.cross_entropy(model(DATA), LABELS)
            if epoch == 2 and run.trial == 1:
                grads = torch.autograd.grad(loss, list(model.parameters()))
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
            else:
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            run.save(model.state_dict())
            run.report(loss=loss)

    sinks = [Sink() for _ in range(3)]
    ends = run_placement(tmp_path, awkward, sinks)
    assert_as_alone(tmp_path, awkward, sinks, ends)
    assert sorted(set(sinks[1].saves)) == [1, 2, 3, 4]  # what it goes on from may be told once more
    (note,) = (data for _, data in sinks[1].notes)
    assert note == {
        "trial": 1,
        "reason": "torch.autograd.grad asks for gradients of a fused model's parameters",
    }


@pytest.mark.parametrize("error", [MemoryError("no room"), ZeroDivisionError("a defect")])
def test_lanes_that_break_are_finished_alone(tmp_path, monkeypatch, error):
    honest, calls = fused_lanes.FusedLanes.forward, []

    def breaks(self, *args):
        calls.append(1)
        if len(calls) == 8:
            raise error
        return honest(self, *args)

    monkeypatch.setattr(fused_lanes.FusedLanes, "forward", breaks)
    sinks = [Sink() for _ in range(3)]
    ends = run_placement(tmp_path, train, sinks)
    assert_as_alone(tmp_path, train, sinks, ends)
    halved = [data["count"] for _, data in sinks[0].notes if data.get("halved")]
    assert halved == ([1] if isinstance(error, MemoryError) else [])


def test_a_function_that_prepares_nothing_is_told_of(tmp_path):
    def plain(run):
        for _ in run.epochs():
            run.report(loss=run.config["lr"])

    sinks = [Sink() for _ in range(2)]
    ends = run_placement(tmp_path, plain, sinks)
    assert_as_alone(tmp_path, plain, sinks, ends)
    assert sinks[0].notes[0][1]["count"] == 1
    assert "does not call run.prepare" in sinks[0].notes[0][1]["reason"]


def test_seconds_and_joules_of_lanes_add_up(tmp_path):
    import time

    from penstock.core.measurement import Measurement, Source

    class Meter:
        """One watt."""

        total_j = 0.0

        def __init__(self):
            self.began_s = time.perf_counter()

        def epoch_begin(self):
            self.began_s = time.perf_counter()

        def epoch_end(self):
            drawn_j = time.perf_counter() - self.began_s
            Meter.total_j += drawn_j
            return Measurement(drawn_j, "J", Source.MEASURED, 0.1)

        def close(self):
            pass

    slept_s = [0.0, 0.0]

    def busy(run):  # the second sleeps three times as long as the first
        model = net()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs():
            for _ in range(4):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(DATA), LABELS)
                loss.backward()
                optimizer.step()
                begin_s = time.perf_counter()
                time.sleep(0.005 * (1 + 2 * run.trial))
                slept_s[run.trial] += time.perf_counter() - begin_s
            run.report(loss=loss)

    sinks = [Sink(), Sink()]
    begin_s = time.perf_counter()
    ends = run_placement(tmp_path, busy, sinks, make_meter=lambda devices: Meter())
    assert [end.error for end in ends.values()] == ["", ""]
    whole_s = time.perf_counter() - begin_s
    seconds = [sum(sink.times) for sink in sinks]
    joules = [sum(energy[0] for energy in sink.energies) for sink in sinks]
    assert seconds[0] >= 4 * 4 * 0.005
    assert seconds[1] >= 4 * 4 * 0.015
    assert sum(seconds) <= whole_s  # nobody is charged for what others did
    assert sum(joules) <= Meter.total_j * (1 + 1e-9)
    assert all(mine_j >= 0.5 * mine_s for mine_j, mine_s in zip(joules, slept_s, strict=True))
    # Who sleeps more draws more, unless the machine stands still while the other one computes.
    assert joules[1] > joules[0] or slept_s[0] + sum(seconds) - sum(slept_s) > slept_s[1]
    assert {energy[2] for sink in sinks for energy in sink.energies} == {int(Source.ATTRIBUTED)}


def test_joules_of_lanes_outside_of_their_epochs_are_told_at_the_end(tmp_path):
    import time

    from penstock.core.measurement import Measurement, Source

    told_j = 0.0

    class Meter:
        """One watt."""

        def epoch_begin(self):
            self.began_s = time.perf_counter()

        def epoch_end(self):
            nonlocal told_j
            drawn_j = time.perf_counter() - self.began_s
            told_j += drawn_j
            return Measurement(drawn_j, "J", Source.MEASURED, 0.1)

        def close(self):
            pass

    def slow(run):
        time.sleep(0.05)
        model = net()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(DATA), LABELS)
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            run.report(loss=loss)
        time.sleep(0.05)

    sinks = [Sink(), Sink()]
    ends = run_placement(tmp_path, slow, sinks, make_meter=lambda devices: Meter())
    assert [end.error for end in ends.values()] == ["", ""]
    inside = sum(energy[0] for sink in sinks for energy in sink.energies)
    outside = [end.energy[0] for end in ends.values()]
    assert all(joules >= 0.09 for joules in outside)
    assert inside + sum(outside) == pytest.approx(told_j, rel=0.1)
