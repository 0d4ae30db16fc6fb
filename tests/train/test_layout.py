"""Convolutions in channels_last: the same training, faster, and only where the model's code can do with it."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock.train._layout as layout
from penstock.core.errors import InvalidInput
from penstock.train._loop import Trainer, private_randomness
from penstock.train._task import Data, Task

G = torch.Generator().manual_seed(0)
IMAGES = torch.randn(48, 3, 8, 8, generator=G)
LABELS = torch.randint(4, (48,), generator=G)


@pytest.fixture(autouse=True)
def _fresh():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    layout._known.clear()
    yield
    torch.set_num_threads(before)


def conv(config):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, 4),
    )


class Views(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.conv, self.head = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)), nn.Linear(288, 4)

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.view(len(x), -1))


def masked(config):
    layers = (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Dropout(config.get("dropout", 0.3)))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 4))


def normed(config):
    layers = (nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 4))


def shortcut(config):
    """A strided 1 x 1 convolution of 4 channels, whose kernel in channels_last corrupts memory in torch 2.13."""
    layers = (nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 4))


def weighted(config):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
            )
            self.kernel = nn.Parameter(torch.ones(3, 3, 1, 1))

        def forward(self, x):
            return self.layers(F.conv2d(x, self.kernel))

    return Weighted()


def patches(config):
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(32, 4))


def trained(model, *, epochs=2, dtype=torch.float32, **given):
    data = Data((IMAGES.to(dtype), LABELS), (IMAGES[:16].to(dtype), LABELS[:16]))
    task = Task(lambda config: model(config).to(dtype), data, F.cross_entropy, batch_size=16, **given)
    with private_randomness():
        trainer = Trainer(task, {"lr": 0.05, "momentum": 0.9}, seed=3)
        metrics = [trainer.train_epoch() for _ in range(epochs)]
    return trainer, metrics


def is_last(trainer):
    layers = (m for m in trainer.model.modules() if isinstance(m, nn.Conv2d))
    weights = [m.weight for m in layers if m.kernel_size != (1, 1)]  # those lie the same either way
    found = {w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights}
    assert len(found) == 1
    return found.pop()


def same(a, b):
    theirs = b.model.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.model.state_dict().items())


def test_convolutions_train_in_channels_last_and_learn_the_same():
    auto, metrics = trained(conv)
    plain, expected = trained(conv, channels_last=False)
    assert is_last(auto)
    assert not is_last(plain)
    for mine, theirs in zip(metrics, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(auto.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_looking_leaves_no_trace():
    """Bit by bit what a factory gives that chose the layout itself, for which nobody looks."""
    auto, metrics = trained(conv)
    chosen, expected = trained(lambda config: conv(config).to(memory_format=torch.channels_last))
    assert is_last(chosen)
    assert metrics == expected
    assert same(auto, chosen)
    assert int(auto.model[1].num_batches_tracked) == 6
    again, more = trained(conv)  # of a structure that was looked at before
    assert more == metrics
    assert same(auto, again)


class Growing(nn.Module):
    """Makes a buffer at its first forward, and puts another tensor in the place of one at each."""

    def __init__(self, config):
        super().__init__()
        self.inner = conv(config)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(1))
        self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()
        return self.inner(x * self.scale)


def test_looking_leaves_no_trace_in_buffers_that_are_replaced_or_new():
    auto, metrics = trained(Growing)
    plain, expected = trained(Growing, channels_last=False)
    assert is_last(auto)
    assert torch.equal(auto.model.mean, plain.model.mean)
    assert metrics[-1] == pytest.approx(expected[-1], rel=1e-3)


@pytest.mark.parametrize("model", [Views, masked, normed, patches, shortcut, weighted])
def test_what_depends_on_the_order_of_memory_or_loses_by_it_stays_as_it_is(model):
    auto, metrics = trained(model)
    plain, expected = trained(model, channels_last=False)
    assert not is_last(auto)
    assert metrics == expected
    assert same(auto, plain)


def test_a_trial_that_drops_nothing_does_not_decide_for_those_that_do():
    data = Data((IMAGES, LABELS), (IMAGES[:16], LABELS[:16]))
    task = Task(masked, data, F.cross_entropy, batch_size=16)
    found = []
    for config in ({"lr": 0.05, "dropout": 0.0}, {"lr": 0.05, "dropout": 0.3}):
        with private_randomness():
            trainer = Trainer(task, config, seed=3)
            found.append(trainer.train_epoch())
    assert is_last(trainer) is False
    layout._known.clear()
    with private_randomness():
        assert Trainer(task, config, seed=3).train_epoch() == found[1]


def test_a_user_who_insists_is_told_what_to_change():
    with pytest.raises(InvalidInput, match=r"channels_last=True, but.*reshape does the same"):
        trained(Views, channels_last=True)
    with pytest.raises(InvalidInput, match=r"the layer '2'.*beyond its memory.*Give it 8 channels"):
        trained(shortcut, channels_last=True)
    insisted, _ = trained(masked, channels_last=True)
    assert is_last(insisted)
    with pytest.raises(InvalidInput, match="channels_last must be True, False or None, got 'yes'"):
        Task(conv, Data((IMAGES, LABELS)), F.cross_entropy, channels_last="yes")


def test_double_precision_has_no_kernels_for_it():
    trainer, _ = trained(conv, dtype=torch.float64, epochs=1)
    assert not is_last(trainer)


def test_a_resumed_training_is_the_uninterrupted_one():
    whole, expected = trained(conv, epochs=3)
    first, _ = trained(conv, epochs=1)
    state = first.state()
    with private_randomness():
        second = Trainer(first.task, {"lr": 0.05, "momentum": 0.9}, seed=3)
        second.load_state(state)
        rest = [second.train_epoch() for _ in range(2)]
    assert rest == expected[1:]
    assert same(whole, second)


@dataclass
class Factory:
    """A callable that can't be hashed, as dataclasses are."""

    channels: int = 8

    def __call__(self, config):
        return conv(config)


def test_a_factory_needs_no_hash():
    data = Data((IMAGES, LABELS))
    with private_randomness():
        trainer = Trainer(Task(Factory(), data, F.cross_entropy), {"lr": 0.1}, seed=0)
        trainer.train_epoch()
    assert is_last(trainer)


LAST_MEMBER = """
import torch, torch.nn.functional as F
from torch import nn
from penstock.train import Data, Task
from penstock.train._fused_loop import FusedTrainer
from penstock.train._loop import Trainer

torch.set_num_threads(1)
x, y = torch.randn(64, 3, 14, 14), torch.randint(3, (64,))

def net(config):
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 1, 2), nn.Flatten(), nn.Linear(392, 3))

task = Task(net, Data((x, y)), F.cross_entropy, batch_size=8)
members = [Trainer(task, {"lr": 0.01}, seed=i) for i in range(2)]
fused = FusedTrainer(members)
fused.train_epoch()
fused.leave(members[:1])
for _ in range(20):
    fused.train_epoch()
print("done")
"""


def test_the_last_member_of_a_fused_group_keeps_to_its_memory():
    """Alone it has one group of channels, as a training that is not fused: the kernel that corrupts memory."""
    done = subprocess.run([sys.executable, "-c", LAST_MEMBER], capture_output=True, text=True)
    assert done.stdout == "done\n", (done.returncode, done.stderr[-500:])
