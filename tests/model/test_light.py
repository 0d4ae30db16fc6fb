"""Optimizers that step without torch's compiler being imported do what torch's own ``step`` does."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import torch
from penstock.model._growth import Growth
from penstock.model._light import step, without_compiler

def normed(p):  # as a twin's optimizer has them before a norm
    made = torch.optim.Adam([{"params": p, "growth": 0.125}], lr=0.1)
    Growth(made)
    return made

makers = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "with growth": normed,
}

class Own(torch.optim.SGD):  # of the user's: its step is nobody else's business
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)

def trained(make, go):
    torch.default_generator.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = make([weight])
    for i in range(5):
        optimizer.zero_grad()
        (weight.sin().sum() * (i + 1)).backward()
        go(optimizer)
    return weight.detach(), optimizer

with without_compiler():
    light = {name: trained(make, step)[0] for name, make in makers.items()}
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
left = [m for m in vars(torch.optim.Optimizer).values() if hasattr(getattr(m, "__wrapped__", None), "__dynamo_disable")]
assert not left, "torch is left as it was"
assert not torch.equal(light["with growth"], trained(lambda p: torch.optim.Adam(p, lr=0.1), lambda o: o.step())[0])
for name, make in makers.items():
    assert torch.equal(light[name], trained(make, lambda o: o.step())[0]), name
assert "torch._dynamo" in sys.modules, "torch imports it by itself: else this module is needed no more"
assert trained(lambda p: Own(p, lr=0.1), step)[1].steps == 5
"""


def test_light_steps_are_steps() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
