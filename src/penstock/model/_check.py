"""The coordinate check: after a few steps at several widths no activation may grow or vanish with the width.

Hydro 4.1: the average size (L1) of every activation vector must be bounded. What the check needs beyond that is the
muP paper's test: on a log-log scale, the size over the width has a slope near 0.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput
from penstock.model._dims import _tensors

OUTPUT = "(output)"
"""The model's output, among the layers."""

GROWS = 0.33
"""A slope beyond it, in either direction, fails: a correct model's is 0, standard parametrization's 0.5 or 1."""


@final
@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer over the widths.

    Attributes:
        layer: Its path in the model.
        sizes: Mean absolute activation after the last step, by width, narrowest first; None: not finite.
        slope: Of log size over log width.
        doubt: The slope's standard error, from the seeds.
        verdict: ``"ok"``, ``"grows"``, ``"vanishes"`` or ``"diverges"``.
    """

    layer: str
    sizes: tuple[float | None, ...]
    slope: float
    doubt: float
    verdict: str


@final
@dataclass(frozen=True, slots=True)
class CoordinateCheck:
    """The verdict on a parametrization.

    Attributes:
        divisors: Divisors of the full width, the narrowest model first.
        layers: By layer, in the order of the forward pass, the model's output last.
        losses: Training loss after the last step, by width.
        step_s: Seconds per training step, by width.
        steps: How many steps were trained.
    """

    divisors: tuple[float, ...]
    layers: tuple[LayerCheck, ...]
    losses: tuple[float | None, ...]
    step_s: tuple[float, ...]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether every layer is in order."""
        return all(layer.verdict == "ok" for layer in self.layers)

    @property
    def failures(self) -> tuple[LayerCheck, ...]:
        """The layers that are not."""
        return tuple(layer for layer in self.layers if layer.verdict != "ok")

    def explain(self) -> str:
        """What is wrong, in a sentence or two; empty if nothing is."""
        if self.ok:
            return ""
        first = ", ".join(f"{x.layer} {x.verdict} (slope {x.slope:+.2f})" for x in self.failures[:3])
        more = f" and {len(self.failures) - 3} more" if len(self.failures) > 3 else ""
        return (
            f"The coordinate check fails: over {len(self.divisors)} widths, {first}{more}. Hyperparameters of the "
            "narrow twin would not fit the full model."
        )

    def plot(self) -> dict[str, tuple[list[float], list[float | None]]]:
        """Plot data, by layer: relative widths and mean absolute activations, for log-log axes."""
        widths = [1 / divisor for divisor in self.divisors]
        return {layer.layer: (widths, list(layer.sizes)) for layer in self.layers}

    def to_json(self) -> dict[str, Any]:
        """JSON-able, for the journal."""
        return {
            "ok": self.ok,
            "divisors": list(self.divisors),
            "steps": self.steps,
            "losses": list(self.losses),
            "step_s": list(self.step_s),
            "layers": [
                {
                    "layer": x.layer,
                    "sizes": list(x.sizes),
                    "slope": _finite(x.slope),
                    "doubt": _finite(x.doubt),
                    "verdict": x.verdict,
                }
                for x in self.layers
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CoordinateCheck:
        """The check of its JSON-able form."""
        layers = [
            LayerCheck(
                x["layer"],
                tuple(x["sizes"]),
                math.nan if x["slope"] is None else x["slope"],
                math.nan if x["doubt"] is None else x["doubt"],
                x["verdict"],
            )
            for x in data["layers"]
        ]
        return cls(
            tuple(data["divisors"]),
            tuple(layers),
            tuple(data["losses"]),
            tuple(data["step_s"]),
            data["steps"],
        )

    def __str__(self) -> str:
        names = max([len(layer.layer) for layer in self.layers] + [5])
        head = "  ".join(f"{'1/' + format(d, 'g'):>8}" for d in self.divisors)
        lines = [f"{'layer':<{names}}  {head}  {'slope':>6}  verdict"]
        for x in self.layers:
            sizes = "  ".join(f"{'-' if s is None else format(s, '.3g'):>8}" for s in x.sizes)
            lines.append(f"{x.layer:<{names}}  {sizes}  {x.slope:>+6.2f}  {x.verdict}")
        return "\n".join(lines)


def coordinate_check(
    make: Callable[[float, int], tuple[nn.Module, torch.optim.Optimizer]],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    *,
    divisors: Sequence[float],
    steps: int = 4,
    seeds: int = 3,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> CoordinateCheck:
    """Train a few steps at several widths and compare activations.

    Args:
        make: ``make(divisor, seed)`` gives a model and its optimizer.
        batches: Training batches; step i takes the i-th, again and again. The first is looked at.
        loss: Of an output and targets.
        divisors: Of the full width.
        steps: Steps to train.
        seeds: Models per width, over which sizes are averaged.
        forward: How models are called, if not with the inputs alone.

    Raises:
        InvalidInput: There are fewer than two widths, or no batch.
    """
    order = sorted(set(divisors), reverse=True)
    if len(order) < 2 or not batches:
        raise InvalidInput(
            f"A coordinate check needs two widths and a batch, got the divisors {list(divisors)}."
        )
    call = forward or (lambda model, batch: model(batch))
    sizes: list[list[dict[str, float]]] = []
    asleep: set[str] | None = None  # layers that start at zero at every width: queries, outputs
    losses: list[float | None] = []
    times: list[float] = []
    for divisor in order:
        runs = [_train(*make(divisor, seed), batches, loss, call, steps) for seed in range(seeds)]
        sizes.append([run[0] for run in runs])
        for run in runs:
            asleep = run[3] if asleep is None else asleep & run[3]
        last = [run[1] for run in runs]
        losses.append(_finite(statistics.fmean(last)))
        times.append(min(run[2] for run in runs))
    layers = [name for name in sizes[-1][0] if all(name in run for width in sizes for run in width)]
    checks = [
        _judge(name, order, [[run[name] for run in width] for width in sizes], name in (asleep or ()))
        for name in layers
    ]
    return CoordinateCheck(tuple(order), tuple(checks), tuple(losses), tuple(times), steps)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    call: Callable[[nn.Module, Any], Any],
    steps: int,
) -> tuple[dict[str, float], float, float, set[str]]:
    """Sizes of all activations after ``steps`` steps, the last loss, the quickest step's seconds, what was zero."""
    model.train()
    first = _activations(model, batches[0][0], call)
    value = math.nan
    fastest = math.inf
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        begun = time.perf_counter()
        optimizer.zero_grad()
        found = loss(call(model, inputs), targets)
        torch.autograd.backward(found)
        optimizer.step()
        value = float(found.detach())
        fastest = min(fastest, time.perf_counter() - begun)
    zeros = {name for name, size in first.items() if size == 0 and name != OUTPUT}
    return _activations(model, batches[0][0], call), value, fastest, zeros


@torch.no_grad()
def _activations(model: nn.Module, inputs: Any, call: Callable[[nn.Module, Any], Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = [t for t in _tensors(output)[:1] if t.is_floating_point()]
            if values:
                found.setdefault(name, float(values[0].abs().mean()))

        return hook

    for name, module in model.named_modules():
        leaf = not any(True for _ in module.children()) or isinstance(module, nn.MultiheadAttention)
        if name and leaf:
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        output = call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    tensors = [t for t in _tensors(output) if t.is_floating_point()]
    if hasattr(output, "logits"):
        tensors = [output.logits]
    if tensors:
        found[OUTPUT] = float(tensors[0].abs().mean())
    return found


def _judge(name: str, divisors: Sequence[float], runs: Sequence[Sequence[float]], asleep: bool) -> LayerCheck:
    means = tuple(_finite(statistics.fmean(each)) for each in runs)
    if any(mean is None for mean in means):
        return LayerCheck(name, means, math.nan, math.nan, "diverges")
    if all(mean == 0 for mean in means):
        return LayerCheck(name, means, 0.0, 0.0, "ok")  # not used yet
    # Tiny against the largest is noise, and log of it even more so.
    least = 1e-6 * max(mean for mean in means if mean is not None)
    x = [-math.log(divisor) for divisor in divisors]
    slope, doubt = _line(
        [value for value, each in zip(x, runs, strict=True) for _ in each],
        [math.log(max(size, least)) for each in runs for size in each],
    )
    verdict = "ok"
    if slope - doubt > GROWS:
        verdict = "grows"
    elif slope + doubt < -GROWS and not asleep:
        # What starts at zero (queries) takes off the more slowly the wider it is, until there is what to attend to.
        verdict = "vanishes"
    return LayerCheck(name, means, slope, doubt, verdict)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares: the slope and its standard error."""
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / max(1, len(x) - 2) / spread)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


__all__ = ["GROWS", "CoordinateCheck", "LayerCheck", "coordinate_check"]
