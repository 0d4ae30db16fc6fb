"""The coordinate check: right parametrizations pass it, standard and broken ones fail, with the layer named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.model import CoordinateCheck, coordinate_check, parametrize, scale_groups, shrink
from penstock.model._check import _line, _measure

_spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_spec)
sys.modules["nets"] = nets
_spec.loader.exec_module(nets)


def batch(rows=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 12, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def ours(build, inputs, optimizer, lr, spoil=None, adam=False):
    def make(divisor, seed):
        torch.manual_seed(seed)
        model = build()
        twin = shrink(model, 8 if divisor == 1 else divisor, inputs=inputs, floor=2)
        table, base = parametrize(model, twin, inputs=inputs)
        if divisor == 1:
            base.initialise(model, adam=adam)
            return model, optimizer(model.parameters(), lr=lr)
        table.prepare(twin)
        table.initialise(twin, redraw=True, adam=adam)
        made = optimizer(table.groups(twin), lr=lr)
        scale_groups(made)
        if spoil is not None:
            spoil(twin)
        return twin, made

    return make


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.005)])
def test_our_parametrization_passes(optimizer, lr):
    make = ours(lambda: nets.mlp(128), batch()[0][:2], optimizer, lr)
    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 2, 4, 8))
    assert check.ok, str(check)
    assert check.divisors == (8, 4, 2, 1)
    assert check.layers[-1].layer == "(output)"
    assert all(loss is not None for loss in check.losses)


def test_masks_of_dropout_are_no_movement():
    """They make outputs differ by random sums, which shrink with the width: far more than small steps move them."""

    def build():
        return nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 5))

    def loss(output, targets):  # what moves the outputs is common to all rows
        return output[:, 0].mean()

    x, y = batch()
    make = ours(build, x[:2], torch.optim.Adam, 1e-4, adam=True)
    check = coordinate_check(make, [(x, y)], loss, divisors=(1, 2, 4, 8))
    assert check.ok, str(check)
    assert abs(check.layers[-1].slope) < 0.2, str(check)


def test_words_that_nothing_pulls_at_do_not_hide_how_the_next_one_moves():
    """Of many outputs a row moves one by the width's features together; the others by random sums of them."""
    x = torch.arange(64)
    y = (3 * x + 1) % 64

    def build(width=128):
        return nn.Sequential(nn.Embedding(64, width), nn.LayerNorm(width), nn.Linear(width, 64, bias=False))

    make = ours(build, x, torch.optim.Adam, 1e-3, adam=True)
    check = coordinate_check(make, [(x, y)], F.cross_entropy, divisors=(1, 2, 4, 8))
    assert check.ok, str(check)
    assert abs(check.layers[-1].slope) < 0.2, str(check)

    def standard(divisor, seed):
        torch.manual_seed(seed)
        model = build(128 // divisor)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    check = coordinate_check(standard, [(x, y)], F.cross_entropy, divisors=(1, 2, 4, 8))
    assert check.layers[-1].slope > 0.8  # as many features move the output together as there are


def test_a_weight_that_is_computed_is_no_activation():
    normed = nn.utils.parametrizations.weight_norm

    def build():
        first, second = normed(nn.Linear(12, 128)), normed(nn.Linear(128, 128))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(128, 5))

    x, y = batch()
    make = ours(build, x[:2], torch.optim.Adam, 0.005)
    check = coordinate_check(make, [(x, y)], F.cross_entropy, divisors=(1, 2, 4, 8))
    assert [layer.layer for layer in check.layers] == ["0", "1", "2", "3", "4", "(output)"]
    assert check.ok, str(check)


def test_a_transformer_passes_with_its_queries_at_zero():
    x = nets.words()
    y = torch.randint(0, 20, x.shape, generator=torch.Generator().manual_seed(3))
    make = ours(lambda: nets.Separate(128), x, torch.optim.Adam, 0.002)

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    check = coordinate_check(make, [(x, y)], loss, divisors=(1, 2, 4, 8), seeds=2)
    assert check.ok, str(check)


def test_queries_that_start_at_zero_like_the_output_are_measured_themselves():
    x = nets.words()
    y = torch.randint(0, 20, x.shape, generator=torch.Generator().manual_seed(3))
    make = ours(lambda: nets.Separate(64), x, torch.optim.SGD, 0.1)

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    check = coordinate_check(make, [(x, y)], loss, divisors=(1, 4), seeds=1)
    sizes = {layer.layer: layer.sizes for layer in check.layers}
    (query,) = [name for name in sizes if name.rpartition(".")[2] == "q"]
    model, optimizer = make(1, 0)
    for _ in range(check.steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    seen = []
    model.get_submodule(query).register_forward_hook(lambda *args: seen.append(args[2].abs().mean().item()))
    model(x)
    assert sizes[query][-1] == pytest.approx(seen[0], rel=1e-4)


def test_standard_parametrization_fails_and_says_where():
    def make(divisor, seed):
        torch.manual_seed(seed)
        model = nets.mlp(int(256 / divisor))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 2, 4, 8))
    assert not check.ok
    assert "(output)" in [layer.layer for layer in check.failures]
    assert {layer.verdict for layer in check.failures} == {"grows"}
    assert "grows (slope +" in check.explain()
    assert "would not fit" in check.explain()


def test_a_layer_that_vanishes_with_the_width_is_found():
    def spoil(twin):  # a wrong initial variance in one layer
        with torch.no_grad():
            twin[2].weight.mul_((64 / twin[2].weight.shape[0]) ** 1.0)

    make = ours(lambda: nets.mlp(64), batch()[0][:2], torch.optim.SGD, 0.01, spoil)
    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 2, 4, 8))
    found = {layer.layer: layer for layer in check.layers}
    assert found["0"].verdict == "ok"
    assert found["2"].verdict == "vanishes"
    assert found["2"].slope == pytest.approx(-1, abs=0.25)


def test_a_divergence_is_found():
    def make(divisor, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, int(64 / divisor)), nn.Linear(int(64 / divisor), 5))
        return model, torch.optim.SGD(model.parameters(), lr=1e30)

    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 8))
    assert not check.ok
    assert "diverges" in {layer.verdict for layer in check.layers}
    assert CoordinateCheck.from_json(check.to_json()).to_json() == check.to_json()


class Loud(torch.autograd.Function):
    """Passes its input on, and a gradient that is ``gain`` times as large back."""

    @staticmethod
    def forward(context, x, gain):
        context.gain = gain
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.gain, None


class Amplifier(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return Loud.apply(x, self.gain)


def test_gradients_that_grow_with_the_width_are_found_where_activations_tell_nothing():
    def amplified(power):
        make = ours(lambda: nets.mlp(128), batch()[0][:2], torch.optim.Adam, 0.005)

        def louder(divisor, seed):
            model, optimizer = make(divisor, seed)
            model.insert(2, Amplifier((128 / divisor) ** power))
            return model, optimizer

        return coordinate_check(louder, [batch()], F.cross_entropy, divisors=(1, 2, 4, 8))

    plain, loud = amplified(0), amplified(2)
    assert plain.ok, str(plain)
    assert [x.layer for x in loud.layers] == [x.layer for x in plain.layers]
    assert {x.verdict for x in loud.layers} == {"ok"}  # Adam divides a gradient's size away
    assert [x.layer for x in loud.failures] == ["gradient of 0.weight", "gradient of 0.bias"]
    before, after = ({x.layer: x.slope for x in check.gradients} for check in (plain, loud))
    assert before["0.weight"] == pytest.approx(-1, abs=0.3)  # hidden gradients shrink as 1/width
    assert before["5.weight"] == pytest.approx(0, abs=0.3)  # an output's stay
    assert after["0.weight"] - before["0.weight"] == pytest.approx(2, abs=0.1)
    assert not loud.ok
    assert "gradient of 0.weight grows (slope +" in loud.explain()
    assert str(loud).splitlines()[-1].split()[:3] == ["gradient", "of", "0.bias"]
    assert "gradient" not in str(plain)
    assert CoordinateCheck.from_json(loud.to_json()) == loud


def test_a_gradient_that_is_not_finite_is_found():
    class Rooted(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body, self.out = nn.Linear(12, width), nn.Linear(width, 5)
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.out(self.body(x)) + self.scale.sqrt()  # the root of 0 has no derivative

    def make(divisor, seed):
        torch.manual_seed(seed)
        model = Rooted(int(64 / divisor))
        return model, torch.optim.SGD([*model.body.parameters(), *model.out.parameters()], lr=1e-4)

    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 8))
    assert ("gradient of scale", "diverges") in [(x.layer, x.verdict) for x in check.failures]


def test_a_gradient_is_its_root_mean_square_whether_sparse_or_not():
    words, targets = torch.tensor([1, 1, 3]), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(7, 4, sparse=sparse)
        torch.autograd.backward(F.mse_loss(model(words), targets))
        _measure(model, found.setdefault(sparse, {}))
        dense = model.weight.grad.to_dense() if sparse else model.weight.grad
        assert found[sparse] == {"weight": pytest.approx(float(dense.pow(2).mean().sqrt()))}
        model.weight.grad = dense * 0
        _measure(model, found[sparse])
    assert found[False] == pytest.approx(found[True])  # the largest of the two stays


def test_a_check_of_an_earlier_release_is_read():
    make = ours(lambda: nets.mlp(64), batch()[0][:2], torch.optim.SGD, 0.1)
    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 8), steps=1, seeds=1)
    data = check.to_json()
    del data["gradients"]
    old = CoordinateCheck.from_json(data)
    assert (old.layers, old.gradients, old.ok) == (check.layers, (), check.ok)


def test_a_step_takes_its_median_time(monkeypatch):
    now = [0.0]
    taken_s = iter([9, 2, 3, 1, 4, 1, 1, 8, 5, 6, 7, 5])  # 3 seeds of 2 steps, narrow then wide

    def loss(output, targets):
        now[0] += next(taken_s)
        return F.cross_entropy(output, targets)

    monkeypatch.setattr("penstock.model._check.time", SimpleNamespace(perf_counter=lambda: now[0]))
    make = ours(lambda: nets.mlp(64), batch()[0][:2], torch.optim.SGD, 0.1)
    check = coordinate_check(make, [batch()], loss, divisors=(1, 8), steps=2, seeds=3)
    assert check.step_s == (2.5, 5.5)


def test_slopes_are_least_squares():
    slope, doubt = _line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    assert (slope, doubt) == (pytest.approx(2), pytest.approx(0, abs=1e-9))


def test_the_table_and_the_plot_show_every_layer():
    make = ours(lambda: nets.mlp(64), batch()[0][:2], torch.optim.SGD, 0.1)
    check = coordinate_check(make, [batch()], F.cross_entropy, divisors=(1, 8), steps=1, seeds=1)
    lines = str(check).splitlines()
    assert lines[0].split() == ["layer", "1/8", "1/1", "slope", "verdict"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2", "3", "4", "(output)"]
    widths, sizes = check.plot()["0"]
    assert widths == [1 / 8, 1]
    assert len(sizes) == 2
    assert CoordinateCheck.from_json(check.to_json()) == check


def test_one_width_is_no_check():
    with pytest.raises(InvalidInput, match="two widths"):
        coordinate_check(lambda d, s: None, [batch()], F.cross_entropy, divisors=(1,))
