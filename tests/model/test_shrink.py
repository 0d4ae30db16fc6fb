"""Narrow twins: against the same factory at the narrow width, layer by layer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core.errors import InvalidInput, Unsupported
from penstock.model import compare, narrower, shrink

_spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_spec)
sys.modules["nets"] = nets
_spec.loader.exec_module(nets)


def shapes(model):
    return {name: tuple(p.shape) for name, p in (*model.named_parameters(), *model.named_buffers())}


# What the factory builds at a quarter of the width is what shrinking by 4 must find.
BOTH = {
    "mlp": (nets.mlp, lambda: nets.mlp(16), nets.vectors),
    "resnet": (nets.resnet, lambda: nets.resnet(8), nets.images),
    "vgg": (nets.vgg, lambda: nets.vgg(8), nets.images),
    "mobilenet": (nets.mobilenet, lambda: nets.mobilenet(8), nets.images),
    "resnext": (nets.resnext, lambda: nets.resnext(8), nets.images),
    "concatenation": (nets.Dense, lambda: nets.Dense(8), nets.images),
    "lstm": (nets.Reader, lambda: nets.Reader(width=8), nets.words),
    "gru": (lambda: nets.Reader(nn.GRU), lambda: nets.Reader(nn.GRU, width=8), nets.words),
    "bidirectional": (
        lambda: nets.Reader(both=True),
        lambda: nets.Reader(width=8, both=True),
        nets.words,
    ),
    "attention by hand": (nets.Separate, lambda: nets.Separate(16), nets.words),
    "packed attention": (nets.Packed, lambda: nets.Packed(16), nets.words),
    "torch's transformer": (nets.Encoder, lambda: nets.Encoder(16), nets.words),
    "a mask as a buffer": (nets.Causal, lambda: nets.Causal(16), nets.words),
    "GPT-2": (nets.gpt2, lambda: nets.gpt2(16), nets.words),
    "BERT": (nets.bert, lambda: nets.bert(16), nets.words),
}


@pytest.mark.parametrize("name", list(BOTH))
def test_the_twin_is_what_the_factory_builds_at_that_width(name):
    wide, narrow, inputs = BOTH[name]
    model, x = wide(), inputs()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = shrink(model, 4, inputs=x, floor=2)
    assert shapes(twin) == shapes(narrow())
    # It computes what a network built like that computes, from the same weights.
    other = narrow()
    other.load_state_dict(twin.state_dict())
    twin.eval(), other.eval()
    with torch.no_grad():
        one, two = twin(x), other(x)
    one, two = getattr(one, "logits", one), getattr(two, "logits", two)
    torch.testing.assert_close(one, two)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())  # untouched


@pytest.mark.parametrize("name", ["resnet", "bidirectional", "packed attention", "torch's transformer"])
def test_a_twin_trains(name):
    wide, _, inputs = BOTH[name]
    twin, x = shrink(wide(), 4, inputs=inputs()), inputs()
    twin(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in twin.parameters())


def test_heads_are_shared_out_when_their_size_can_not_be_divided():
    # 8 heads of size 2: a quarter of the width is 2 heads of size 2 or 4 of size 1... not of half a number.
    twin = shrink(nets.Separate(16, heads=8), 4, inputs=nets.words(), floor=2)
    assert twin.q.weight.shape == (4, 4)
    assert twin(nets.words()).shape == (2, 8, 20)


def test_odd_widths_round():
    model = nn.Sequential(nn.Linear(12, 50), nn.ReLU(), nn.Linear(50, 5))
    assert shrink(model, 8, inputs=nets.vectors())[0].weight.shape == (6, 12)


def test_too_narrow_layers_are_refused_by_name():
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 5))
    with pytest.raises(Unsupported, match=r"'2\.weight' would be 2 wide instead of 16, below the floor of 4"):
        shrink(model, 8, inputs=nets.vectors())
    assert shrink(model, 8, inputs=nets.vectors(), floor=2)[2].weight.shape == (2, 8)


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, 1, 1), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(F.pixel_shuffle(self.first(x), 2).mean((2, 3)))


def test_what_can_not_be_followed_is_refused_by_name():
    with pytest.raises(Unsupported, match=r"'first\.weight' can't be shrunk safely: pixel_shuffle"):
        shrink(Shuffled(), 4, inputs=nets.images(), floor=1)


def test_a_network_without_a_width_of_its_own_is_refused():
    with pytest.raises(Unsupported, match="Nothing of Linear can be shrunk"):
        shrink(nn.Linear(12, 5), 4, inputs=nets.vectors())


def test_a_skip_from_the_input_keeps_its_width():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.out = nn.Linear(12, 64), nn.Linear(64, 12), nn.Linear(12, 5)

        def forward(self, x):
            return self.out(x + self.down(F.relu(self.up(x))))

    twin = shrink(Skip(), 4, inputs=nets.vectors())
    assert (twin.up.weight.shape, twin.down.weight.shape) == ((16, 12), (12, 16))


def test_two_widths_are_compared_shape_by_shape():
    ratios = compare(nets.mlp(64), nets.mlp(16))
    assert ratios["0.weight"] == (4, 1)
    assert ratios["2.weight"] == (4, 4)
    assert ratios["4.weight"] == (1, 4)
    with pytest.raises(Unsupported, match="not the same network"):
        compare(nets.mlp(), nn.Linear(12, 5))


def test_factories_that_take_a_width_say_how_wide():
    assert narrower(lambda config, width=256: None, {}, 8) == 32
    assert narrower(lambda config, width=1.0: None, {}, 8) == 0.125
    assert narrower(lambda config, width=256: None, {"width": 512}, 8) == 64
    assert narrower(lambda config: None, {}, 8) is None
    with pytest.raises(InvalidInput, match="width without a default"):
        narrower(lambda config, width: None, {}, 8)


@pytest.mark.parametrize("wrong", [1, 0.5, "8", float("nan"), True])
def test_shrink_refuses_what_is_no_factor(wrong):
    with pytest.raises(InvalidInput, match="factor above 1"):
        pk.Shrink(wrong)


def test_the_check_trains_at_widths_between():
    assert pk.Shrink(8).divisors == (1, 2, 4, 8)
    assert pk.Shrink(2).divisors == (1, 2)
    assert pk.Shrink(64).divisors[0] == 1
    assert len(pk.Shrink(64).divisors) == 4


def test_torchs_transformer_knows_its_new_width():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(20, 64)
            self.both = nn.Transformer(64, 4, 1, 1, 128, 0.0, batch_first=True)
            self.output = nn.Linear(64, 20)

        def forward(self, x):
            return self.output(self.both(self.tokens(x), self.tokens(x)))

    x = torch.randint(0, 20, (3, 5))
    twin = shrink(Translator(), 4, inputs=x, floor=2)
    assert twin(x).shape == (3, 5, 20)
    assert (twin.both.d_model, twin.both.nhead) == (16, 4)
    assert twin.both.encoder.layers[0].self_attn.head_dim == 4


def test_a_twin_from_a_configuration_has_the_models_precision():
    pytest.importorskip("transformers")
    twin = shrink(nets.gpt2().double(), 4, inputs=nets.words(), floor=2)
    assert {p.dtype for p in twin.parameters()} == {torch.float64}


@pytest.mark.parametrize("where", ["all of it", "a layer"])
def test_torchscript_is_refused_with_the_remedy(where: str) -> None:
    model: nn.Module = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 2))
    if where == "all of it":
        model = torch.jit.script(model)
    else:
        model[0] = torch.jit.script(model[0])  # type: ignore[operator]
    for call in (lambda: shrink(model, 4, inputs=torch.randn(2, 8)), lambda: compare(model, model)):
        with pytest.raises(Unsupported, match=r"is TorchScript.*plain one"):
            call()
