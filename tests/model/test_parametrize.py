"""The parametrization: against the muP paper's table, closed forms of first steps, and standard parametrization."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.model import ScaledSchedule, adam_like, parametrize, scale_groups, shrink

_spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_spec)
sys.modules["nets"] = nets
_spec.loader.exec_module(nets)


def tables(model, factor, inputs):
    twin = shrink(model, factor, inputs=inputs, floor=2)
    table, base = parametrize(model, twin, inputs=inputs)
    return twin, table, base


def test_the_multipliers_are_those_of_the_mup_papers_table():
    # Table 3 of Tensor Programs V at n = 1/8 of the width; the full model is the base.
    n = 1 / 8
    model = nets.mlp(64)
    _, table, base = tables(model, 8, nets.vectors())
    rules = table.rules
    assert [rules[f"{i}.weight"].kind for i in (0, 2, 4)] == ["input", "hidden", "output"]
    sgd = {"0.weight": n, "0.bias": n, "2.weight": 1, "2.bias": n, "4.weight": 1 / n, "4.bias": 1}
    adam = {"0.weight": 1, "0.bias": 1, "2.weight": 1 / n, "2.bias": 1, "4.weight": 1 / n, "4.bias": 1}
    assert {name: rule.sgd for name, rule in rules.items()} == pytest.approx(sgd)
    assert {name: rule.adam for name, rule in rules.items()} == pytest.approx(adam)
    own = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    assert rules["0.weight"].std == pytest.approx(own["0.weight"])
    assert rules["2.weight"].std == pytest.approx(own["2.weight"] / math.sqrt(n))
    assert all(rule.sgd == rule.adam == 1 for rule in base.rules.values())


def test_biases_and_the_output_start_at_zero_and_nothing_else():
    model = nets.mlp(64)
    twin, table, base = tables(model, 8, nets.vectors())
    for each, rules in ((twin, table), (model, base)):
        rules.initialise(each, redraw=each is twin)
        zero = {name for name, p in each.named_parameters() if not p.any()}
        assert zero == {"0.bias", "2.bias", "4.weight", "4.bias"}


def test_with_adam_the_full_output_is_the_users_and_the_twins_has_the_mup_papers_variance():
    torch.manual_seed(0)
    model = nets.mlp(512)
    twin, table, base = tables(model, 8, nets.vectors())
    own = model[4].weight.detach().clone()
    base.initialise(model, adam=True)
    assert torch.equal(model[4].weight, own)
    table.initialise(twin, redraw=True, adam=True)
    assert twin[4].weight.std().item() == pytest.approx(8 * own.std().item(), rel=0.1)


def test_initial_variance_follows_the_table():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5))
    twin, table, _ = tables(model, 8, nets.vectors())
    table.initialise(twin, redraw=True)
    # Linear's own: uniform of variance 1 / (3 fan_in), at both widths.
    assert float(twin[2].weight.var()) == pytest.approx(1 / (3 * 64), rel=0.1)
    assert float(twin[0].weight.var()) == pytest.approx(1 / (3 * 12), rel=0.2)


def test_constants_the_user_chose_stay():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.out = nn.LSTM(12, 32, batch_first=True), nn.Linear(32, 5)
            nn.init.constant_(self.cells.bias_ih_l0, 1.0)

        def forward(self, x):
            return self.out(self.cells(x)[0])

    model, x = Gated(), torch.randn(2, 3, 12)
    twin, table, _ = tables(model, 4, x)
    table.initialise(twin, redraw=True)
    assert torch.equal(twin.cells.bias_ih_l0, torch.ones(32))
    assert not twin.cells.bias_hh_l0.any()  # torch draws it


@pytest.mark.parametrize(
    ("make", "lr"),
    [
        (torch.optim.SGD, 0.1),
        (torch.optim.Adam, 1e-3),
        (torch.optim.AdamW, 1e-3),
        (torch.optim.RMSprop, 1e-3),
    ],
)
def test_the_change_of_every_layer_by_a_step_does_not_depend_on_the_width(make, lr):
    """How much a step changes each pre-activation: the definition of maximal update. Standard fails it."""
    adam = adam_like(make([nn.Parameter(torch.zeros(1))], lr=lr))
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(2))

    def changes(model, optimizer):
        # One step to get the output off zero, one that is looked at.
        for _ in range(2):
            before = outputs(model, x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [float((b - a).abs().mean()) for a, b in zip(before, outputs(model, x), strict=True)]

    def mean(side):
        runs = []
        for seed in range(6):
            torch.manual_seed(seed)
            model = nets.mlp(512)
            twin, table, base = tables(model, 8, x[:2])
            if side == "twin":
                table.initialise(twin, redraw=True, adam=adam)
                optimizer = make(table.groups(twin), lr=lr)
                scale_groups(optimizer)
                runs.append(changes(twin, optimizer))
            elif side == "full":
                base.initialise(model, adam=adam)
                runs.append(changes(model, make(model.parameters(), lr=lr)))
            else:
                small = nets.mlp(512 if side == "standard full" else 64)
                runs.append(changes(small, make(small.parameters(), lr=lr)))
        return [sum(column) / len(column) for column in zip(*runs, strict=True)]

    full, twin = mean("full"), mean("twin")
    for a, b in zip(full, twin, strict=True):
        assert a == pytest.approx(b, rel=0.35)
    ratios = [a / b for a, b in zip(mean("standard full"), mean("standard twin"), strict=True)]
    assert max(ratios) > 2 or min(ratios) < 0.5


def outputs(model, x):
    with torch.no_grad():
        first = model[0](x)
        second = model[2](model[1](first))
        return first, second, model[4](model[3](second))


def test_hydros_instructive_example():
    """Hydro, Eq. 2 and 3: f(x) = V'U x with lr 1/w for V and w for U moves by an amount that w does not change."""

    def step(width):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1024, bias=False), nn.Linear(1024, 1, bias=False))
        nn.init.normal_(model[0].weight)
        if width == 1024:
            twin, factor = model, 1.0
            groups = [{"params": [p]} for p in model.parameters()]
        else:
            twin, table, _ = tables(model, 1024 / width, torch.ones(2, 1))
            table.initialise(twin, redraw=True)
            groups, factor = table.groups(twin), 1.0
        nn.init.zeros_(twin[1].weight)
        optimizer = torch.optim.SGD(groups, lr=factor / 1024)
        if width != 1024:
            scale_groups(optimizer)
        (-twin(torch.ones(1, 1))).sum().backward()  # dL/df = -1, so f grows by lr_V * U'U = U'U / w, about 1
        optimizer.step()
        return float(twin(torch.ones(1, 1)))

    assert step(1024) == pytest.approx(1, abs=0.15)
    assert step(128) == pytest.approx(1, abs=0.3)


def test_a_query_rate_is_attention_divided_by_the_head_size():
    """A multiplier on zero queries and a learning rate for them give the same training, for SGD and Adam."""

    class Attention(nn.Module):
        def __init__(self, d=32, factor=1.0):
            super().__init__()
            self.heads, self.factor = 4, factor
            self.q, self.k, self.v, self.out = (nn.Linear(d, n, bias=False) for n in (d, d, d, 5))
            self.embed = nn.Linear(12, d)

        def forward(self, x):
            x = self.embed(x)
            b, t, d = x.shape
            q, k, v = (
                layer(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(self.factor * q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

    x = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = Attention(128).double()
    twin, table, _ = tables(wide, 4, x)
    assert table.rules["q.weight"].zero == 1
    table.initialise(twin, redraw=True)
    nn.init.normal_(twin.out.weight)
    for make, lr in ((torch.optim.SGD, 0.05), (torch.optim.Adam, 1e-3)):
        ours, explicit = copy.deepcopy(twin), copy.deepcopy(twin)
        explicit.factor = math.sqrt(32 / 8)  # 1/d relative to the full model: sqrt(d_full / d_narrow)
        mine = make(table.groups(ours), lr=lr)
        scale_groups(mine)
        others = table.groups(explicit)
        theirs = make(others, lr=lr)
        scale_groups(theirs)
        for group in theirs.param_groups:  # the query's rate without the part that stands for the multiplier
            if any(p is explicit.q.weight for p in group["params"]):
                group["params"] = [p for p in group["params"] if p is not explicit.q.weight]
                lr_q = group["lr"] / (4 if make is torch.optim.SGD else 2)
                theirs.add_param_group({"params": [explicit.q.weight], "lr": lr_q})
                break
        for _ in range(5):
            for model, optimizer in ((ours, mine), (explicit, theirs)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(ours(x), explicit(x), rtol=1e-4, atol=1e-6)  # Adam adds its eps


def test_torchs_attention_gets_a_query_weight_of_its_own():
    model = nets.Encoder(64)
    twin, table, base = tables(model, 4, nets.words())
    path = "body.layers.0.self_attn"
    assert table.unpacked == (path,)
    before = copy.deepcopy(twin).eval()(nets.words())
    table.prepare(twin)
    torch.testing.assert_close(twin.eval()(nets.words()), before)  # the same function of the same weights
    assert twin.get_submodule(path).q_proj_weight.shape == (16, 16)
    table.initialise(twin, redraw=True)
    base.initialise(model)
    assert not twin.get_submodule(path).q_proj_weight.any()
    assert not model.get_submodule(path).in_proj_weight[:64].any()
    assert model.get_submodule(path).in_proj_weight[64:].any()
    key, query = table.rules[f"{path}.k_proj_weight"], table.rules[f"{path}.q_proj_weight"]
    assert (key.adam, query.adam) == (4, pytest.approx(4 * 2))
    assert (key.sgd, query.sgd) == (1, pytest.approx(4))


def test_a_stored_scale_is_divided_by_the_head_size():
    model = nets.Packed(64)  # 4 heads of 16
    twin, table, _ = tables(model, 4, nets.words())
    assert twin.scale == pytest.approx(4**-0.5)
    table.prepare(twin)
    assert twin.scale == pytest.approx(16**0.5 / 4)  # 1/d, and at the full width what it was
    table.initialise(twin, redraw=True)
    assert not twin.qkv.weight[:16].any()
    assert twin.qkv.weight[16:].any()


def test_a_tied_output_gets_a_multiplier():
    model = nets.gpt2(64)
    twin, table, base = tables(model, 4, nets.words())
    assert table.multipliers == {"lm_head": 4}
    assert table.rules["transformer.wte.weight"].kind == "input"
    assert not base.multipliers
    x = nets.words()
    plain = twin.eval()(x).logits
    table.prepare(twin)
    factor = 16**0.5 / 4  # head sizes 16 and 4
    assert twin.transformer.h[0].attn.scaling == pytest.approx(factor)
    twin.transformer.h[0].attn.scaling = 4**-0.5
    torch.testing.assert_close(twin(x).logits, 4 * plain)


def test_groups_work_with_schedules_and_checkpoints_and_keep_decay():
    model = nets.mlp(64)
    twin, table, _ = tables(model, 8, nets.vectors())
    table.initialise(twin, redraw=True)
    optimizer = torch.optim.AdamW(table.groups(twin), lr=0.01, weight_decay=0.1)
    scale_groups(optimizer)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates[id(twin[0].weight)] == pytest.approx(0.01)
    assert rates[id(twin[2].weight)] == pytest.approx(0.08)
    assert all(g["lr"] * g["weight_decay"] == pytest.approx(0.001) for g in optimizer.param_groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    twin(nets.vectors()).square().mean().backward()
    optimizer.step()
    schedule.step()
    assert {round(g["lr"], 6) for g in optimizer.param_groups} == {0.005, 0.04}
    again = torch.optim.AdamW(table.groups(twin), lr=1.0)
    scale_groups(again)
    again.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_an_optimizer_nobody_knows_is_refused():
    class Odd(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    with pytest.raises(InvalidInput, match="How Odd must be scaled"):
        scale_groups(Odd([{"params": [nn.Parameter(torch.ones(1))], "lr_scales": (1, 2)}], lr=0.1))


def test_a_hidden_layer_onto_a_kept_size_does_not_start_dead():
    """Zero weights in the middle of a network would never learn: only what makes the output starts at zero."""

    class Neck(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.neck, self.again, self.out = (
                nn.Linear(12, 64),
                nn.Linear(64, 12),
                nn.Linear(12, 64),
                nn.Linear(64, 5),
            )

        def forward(self, x):
            return self.out(F.relu(self.again(x + self.neck(F.relu(self.up(x))))))

    twin, table, _ = tables(Neck(), 8, nets.vectors())
    table.initialise(twin, redraw=True)
    assert table.rules["neck.weight"].kind == "output"
    assert twin.neck.weight.any()
    assert not twin.out.weight.any()


S = torch.optim.lr_scheduler
SCHEDULES = {
    "multiplies": lambda o: S.ExponentialLR(o, 0.7),
    "has a floor": lambda o: S.CosineAnnealingLR(o, 6, eta_min=0.02),
    "sets": lambda o: S.OneCycleLR(o, max_lr=0.3, total_steps=8, cycle_momentum=False),
    "goes round": lambda o: S.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=3, cycle_momentum=False),
    "one after the other": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=3), S.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=False)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_a_group_the_rate_of_a_plain_optimizer_times_its_multiplier(name):
    make = SCHEDULES[name]
    twin, table, _ = tables(nets.mlp(64), 8, nets.vectors())
    scaled = torch.optim.Adam(table.groups(twin), lr=0.1)
    scale_groups(scaled)
    scales = [group["lr"] / 0.1 for group in scaled.param_groups]
    assert len({round(scale, 6) for scale in scales}) > 1
    plain = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs, ours = make(plain), ScaledSchedule(scaled, make)
    for number in range(7):
        rate = plain.param_groups[0]["lr"]
        assert [group["lr"] for group in scaled.param_groups] == pytest.approx([rate * s for s in scales])
        scaled.step()
        plain.step()
        ours.step()
        theirs.step()
        if number == 3:  # resumed from a checkpoint
            kept = copy.deepcopy((scaled.state_dict(), ours.state_dict()))
            scaled = torch.optim.Adam(table.groups(twin), lr=0.1)
            scale_groups(scaled)
            ours = ScaledSchedule(scaled, make)
            scaled.load_state_dict(kept[0])
            ours.load_state_dict(kept[1])


def test_a_plateau_lowers_every_group_in_proportion():
    twin, table, _ = tables(nets.mlp(64), 8, nets.vectors())
    optimizer = torch.optim.Adam(table.groups(twin), lr=0.1)
    scale_groups(optimizer)
    before = [group["lr"] for group in optimizer.param_groups]
    schedule = ScaledSchedule(
        optimizer, lambda o: S.ReduceLROnPlateau(o, patience=0, factor=0.1, min_lr=0.04)
    )
    for _ in range(3):
        schedule.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4 * lr for lr in before])


def test_a_twin_keeps_what_values_scatter_around_and_what_is_not_trained():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(12, 256))
            self.slow = nn.Parameter(torch.linspace(1, 4, 256))
            self.places = nn.Parameter(torch.sin(torch.arange(256.0)), requires_grad=False)
            self.output = nn.Linear(256, 5)

        def forward(self, x):
            return self.output(torch.relu(self.inner(x)) * self.slow + self.places)

    torch.manual_seed(0)
    model = Net()
    lengths = "inner.parametrizations.weight.original0"
    expected = model.get_parameter(lengths).mean().item()
    twin, table, _ = tables(model, 4, nets.vectors())
    table.initialise(twin, redraw=True)
    assert twin.get_parameter(lengths).mean().item() == pytest.approx(expected, rel=0.1)
    assert twin.slow.mean().item() == pytest.approx(2.5, abs=0.5)
    assert torch.equal(twin.places, torch.sin(torch.arange(64.0)))
    # A factory that takes a width has made them itself.
    made = copy.deepcopy(twin)
    with torch.no_grad():
        made.slow.copy_(torch.linspace(1, 4, 64))
    table.initialise(made)
    assert torch.equal(made.slow, torch.linspace(1, 4, 64))


class Norms(nn.Module):
    """Weights whose length matters and weights whose length does not."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Linear(12, width)
        names = ("before", "bare", "both", "joined", "frozen", "shown", "twice")
        self.parts = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(width) for name in names})
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        made, x = {}, self.stem(x)
        for name, part in self.parts.items():
            norm, y = self.norms[name], part(x)
            if name == "bare":
                x = F.relu(y)
            elif name == "both":
                x = norm(y) + y
            elif name == "joined":
                x = norm(y) + torch.cat([y, x], 1).mean()
            elif name == "frozen":
                x = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias)
            elif name == "twice":
                x = norm(y) + part(norm(y))
            else:
                x = norm(y)
                made[name] = y
        return self.out(x), made["shown"]


def test_weights_may_grow_where_only_batch_norms_see_what_they_make():
    wide, twin = Norms(32), Norms(8)
    table, base = parametrize(wide, twin, inputs=nets.vectors())
    assert {name for name, rule in table.rules.items() if rule.growth != 1} == {"parts.before.weight"}
    assert table.rules["parts.before.weight"].growth == 1 / 4
    assert all(rule.growth == 1 for rule in base.rules.values())


def normed(width, norm=nn.BatchNorm1d):
    return nn.Sequential(
        nn.Linear(12, width, bias=False),
        norm(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        norm(width),
        nn.ReLU(),
        nn.Linear(width, 5),
    ).double()


def test_a_step_of_adam_keeps_its_direction_and_a_share_of_the_length_it_adds():
    torch.manual_seed(0)
    x, y = torch.randn(64, 12).double(), torch.randint(0, 5, (64,))
    wide, twin = normed(64), normed(8)
    table, _ = parametrize(wide, twin, inputs=x)
    optimizer = torch.optim.Adam(table.initialise(twin, adam=True) and table.groups(twin), lr=0.01, eps=1e-30)
    scale_groups(optimizer)
    first, last = twin[3].weight.detach().clone(), twin[6].weight.detach().clone()
    F.cross_entropy(twin(x), y).backward()
    signs, signs_last = twin[3].weight.grad.sign(), twin[6].weight.grad.sign()
    optimizer.step()
    whole = first - 8 * 0.01 * signs  # Adam's first step is its rate in every weight
    length = (7 * first.square().sum() + whole.square().sum()) / 8
    torch.testing.assert_close(twin[3].weight.detach(), whole * (length / whole.square().sum()).sqrt())
    torch.testing.assert_close(twin[6].weight.detach(), last - 8 * 0.01 * signs_last)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_decoupled_decay_is_no_growth(make):
    weight = nn.Parameter(torch.randn(6, 6).double())
    first = weight.detach().clone()
    more = {} if make is torch.optim.AdamW else {"decoupled_weight_decay": True}
    optimizer = make(
        [{"params": [weight], "lr_scales": (1, 4), "growth": 1 / 4}], lr=0.1, weight_decay=0.2, **more
    )
    scale_groups(optimizer)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), first * (1 - 0.1 * 0.2))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_weights_before_a_norm_get_longer_as_the_models_do(norm):
    """On random labels, where gradients are noise; without the correction it would be eight times as fast."""
    x, y = torch.randn(3200, 12).double(), torch.randint(0, 5, (3200,))

    def growth(width, corrected=True):
        torch.manual_seed(1)
        wide, model = normed(64, norm), normed(width, norm)
        table, _ = parametrize(wide, normed(8, norm), inputs=x[:8])
        groups = [{"params": list(model.parameters())}]
        if width != 64:
            groups = table.groups(table.initialise(model, adam=True))
            groups = groups if corrected else [{**group, "growth": 1.0} for group in groups]
        optimizer = torch.optim.Adam(groups, lr=0.003)
        scale_groups(optimizer)
        before = model[3].weight.detach().square().sum()
        for batch in range(0, 3200, 32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch : batch + 32]), y[batch : batch + 32]).backward()
            optimizer.step()
        return float(model[3].weight.detach().square().sum() / before) - 1

    wide = growth(64)
    assert growth(8) == pytest.approx(wide, rel=0.3)
    assert growth(8, corrected=False) > 4 * wide


def test_sgd_and_the_full_model_have_no_such_share():
    wide, twin = normed(64), normed(8)
    table, base = parametrize(wide, twin, inputs=nets.vectors().double())
    for optimizer in (
        torch.optim.SGD(table.groups(twin), lr=0.1),
        torch.optim.Adam(base.groups(wide), lr=0.1),
    ):
        scale_groups(optimizer)
        assert not optimizer._optimizer_step_post_hooks
        assert not any("growth" in group for group in optimizer.param_groups)
