"""The coordinate check: after a few steps at several widths no activation may grow or vanish with the width.

Hydro 4.1: the average size (L1) of every activation vector must be bounded. What the check needs beyond that is the
muP paper's test: on a log-log scale, the size over the width has a slope near 0.

Gradients must be finite and bounded too. How the elements of a parameter's gradient scale depends on its place: in a
right model those of an output stay as they are, all others shrink with the width (as 1/width, those of queries as its
root). None grows: the largest root mean square over the steps may have any slope but one clearly above 0 (0.5).
Adaptive optimizers divide a gradient's size away, so activations alone would not tell.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput
from penstock.model._dims import _tensors
from penstock.model._light import step as step_lightly

OUTPUT = "(output)"
"""The model's output, among the layers."""

GROWS = 0.33
"""A slope beyond it, in either direction, fails: a correct model's is 0, standard parametrization's 0.5 or 1."""

EXPLODES = 0.5
"""A gradient's slope beyond it, by two standard errors, fails: a correct model's is 0 at most. Gradients are noisier
than activations, for the loss itself differs from seed to seed."""

_FAINT = 1e-5  # of the model's largest gradient: less is rounding (a key's bias, a bias before a batch norm have none)


@final
@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer, or the gradient of one parameter, over the widths.

    Attributes:
        layer: Its path in the model, or the parameter's name.
        sizes: Mean absolute activation after the last step (of the output, how far it has moved as the loss wants),
            or the largest root mean square of the gradient in all of them, by width, narrowest first; None: not
            finite.
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
        gradients: By parameter. They may shrink with the width, never grow.
    """

    divisors: tuple[float, ...]
    layers: tuple[LayerCheck, ...]
    losses: tuple[float | None, ...]
    step_s: tuple[float, ...]
    steps: int
    gradients: tuple[LayerCheck, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every layer and every gradient is in order."""
        return not self.failures

    @property
    def failures(self) -> tuple[LayerCheck, ...]:
        """The layers that are not, then the gradients, called so."""
        return (*(layer for layer in self.layers if layer.verdict != "ok"), *self._wrong)

    @property
    def _wrong(self) -> list[LayerCheck]:
        return [replace(x, layer=f"gradient of {x.layer}") for x in self.gradients if x.verdict != "ok"]

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
            "layers": [_to_json(x) for x in self.layers],
            "gradients": [_to_json(x) for x in self.gradients],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CoordinateCheck:
        """The check of its JSON-able form."""
        return cls(
            tuple(data["divisors"]),
            tuple(map(_from_json, data["layers"])),
            tuple(data["losses"]),
            tuple(data["step_s"]),
            data["steps"],
            tuple(map(_from_json, data.get("gradients", ()))),  # an earlier release looked at none
        )

    def __str__(self) -> str:
        # Gradients would double the table: of them only what is wrong.
        shown = [*self.layers, *self._wrong]
        names = max([len(x.layer) for x in shown] + [5])
        head = "  ".join(f"{'1/' + format(d, 'g'):>8}" for d in self.divisors)
        lines = [f"{'layer':<{names}}  {head}  {'slope':>6}  verdict"]
        for x in shown:
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
    """Train a few steps at several widths and compare activations and gradients.

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
    gradients: list[list[dict[str, float]]] = []
    asleep: set[str] | None = None  # layers that start at zero at every width: queries, outputs
    losses: list[float | None] = []
    times: list[float] = []
    for divisor in order:
        runs = [_train(*make(divisor, seed), batches, loss, call, steps) for seed in range(seeds)]
        sizes.append([run.sizes for run in runs])
        gradients.append([run.gradients for run in runs])
        for run in runs:
            asleep = run.zeros if asleep is None else asleep & run.zeros
        losses.append(_finite(statistics.fmean(run.loss for run in runs)))
        times.append(statistics.median(step_s for run in runs for step_s in run.steps_s))
    checks = [_judge(name, order, each, name in (asleep or ())) for name, each in _by_name(sizes).items()]
    found = _by_name(gradients)
    known = [value for each in found.values() for width in each for value in width if math.isfinite(value)]
    faint = _FAINT * max(known, default=0.0)
    judged = [_judge(name, order, each, gradient=True, least=faint) for name, each in found.items()]
    return CoordinateCheck(tuple(order), tuple(checks), tuple(losses), tuple(times), steps, tuple(judged))


def _by_name(runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[list[float]]]:
    """By the names that every run has: sizes by width and seed."""
    names = [name for name in runs[-1][0] if all(name in run for width in runs for run in width)]
    return {name: [[run[name] for run in width] for width in runs] for name in names}


@dataclass(frozen=True, slots=True)
class _Trained:
    """What a few steps showed: sizes by layer, gradients by parameter, the last loss, seconds, what began at zero."""

    sizes: dict[str, float]
    gradients: dict[str, float]
    loss: float
    steps_s: list[float]
    zeros: set[str]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    call: Callable[[nn.Module, Any], Any],
    steps: int,
) -> _Trained:
    model.train()
    masks = _generators(batches[0][0])
    first, output = _activations(model, batches[0][0], call)
    gradients: dict[str, float] = {}
    pull: Tensor | None = None  # where the loss wants the first output to move
    value = math.nan
    steps_s = []
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        if not step:
            _put(masks)
        begun = time.perf_counter()
        optimizer.zero_grad()
        made = call(model, inputs)
        start = None if step else _output(made)
        if start is not None and start.requires_grad:
            start.retain_grad()
        found = loss(made, targets)
        torch.autograd.backward(found)
        paused = time.perf_counter()
        pull = pull if start is None else start.grad
        _measure(model, gradients)
        begun += time.perf_counter() - paused  # looking at gradients is no part of a step
        step_lightly(optimizer)
        value = float(found.detach())
        steps_s.append(time.perf_counter() - begun)
    zeros = {name for name, size in first.items() if size == 0 and name != OUTPUT}
    _put(masks)  # Other masks of dropout would be taken for movement.
    sizes, now = _activations(model, batches[0][0], call)
    if output is not None and now is not None and output.shape == now.shape:
        # First outputs are random sums that shrink with the width, in a right model too: what counts is how they move.
        moved = _moved(now - output, pull)
        same = [name for name, size in first.items() if size == first[OUTPUT]]  # the layer it comes from, too
        sizes |= dict.fromkeys(same if first[OUTPUT] > 0 else [OUTPUT], moved)
    return _Trained(sizes, gradients, value, steps_s, zeros)


def _generators(inputs: Any) -> list[tuple[torch.Generator, Tensor]]:
    """What a forward of these inputs draws from, with the states at present."""
    found = [torch.default_generator]
    found += [torch.cuda.default_generators[t.device.index or 0] for t in _tensors(inputs)[:1] if t.is_cuda]
    return [(generator, generator.get_state()) for generator in found]


def _put(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _moved(change: Tensor, pull: Tensor | None) -> float:
    """How far outputs have moved, on average, towards where the loss pulled them, by the strength of its pull.

    What a step does to the outputs that nothing pulls at (of a large vocabulary, all words but the next one) is a
    random sum of few or many features: it shrinks with the width, in a right model too.
    """
    strength = 0.0 if pull is None or pull.shape != change.shape else float(pull.double().abs().sum())
    if pull is None or not strength > 0:
        return float(change.abs().mean())
    return abs(float((change.double() * pull.double()).sum())) / strength


@torch.no_grad()
def _measure(model: nn.Module, largest: dict[str, float]) -> None:
    """Keep the largest root mean square of each parameter's gradient; one that was not finite stays so."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.numel():
            continue
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        size = float(gradient.double().norm()) / math.sqrt(parameter.numel())
        before = largest.get(name, 0.0)
        largest[name] = max(before, size) if math.isfinite(before) and math.isfinite(size) else math.nan


@torch.no_grad()
def _activations(
    model: nn.Module, inputs: Any, call: Callable[[nn.Module, Any], Any]
) -> tuple[dict[str, float], Tensor | None]:
    """The mean size of what every layer makes, and the output itself."""
    found: dict[str, float] = {}
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = [t for t in _tensors(output)[:1] if t.is_floating_point()]
            if values:
                found.setdefault(name, float(values[0].abs().mean()))

        return hook

    for name, module in model.named_modules():
        inner = [child for child, _ in module.named_children() if child != "parametrizations"]
        leaf = not inner or isinstance(module, nn.MultiheadAttention)
        if name and leaf and "parametrizations" not in name.split("."):  # whose outputs are weights
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        output = call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    whole = _output(output)
    if whole is not None:
        found[OUTPUT] = float(whole.abs().mean())
    return found, whole


def _output(made: Any) -> Tensor | None:
    """The output proper of what a model returns."""
    if hasattr(made, "logits"):
        logits: Tensor = made.logits
        return logits
    return next((t for t in _tensors(made) if t.is_floating_point()), None)


def _judge(
    name: str,
    divisors: Sequence[float],
    runs: Sequence[Sequence[float]],
    asleep: bool = False,
    *,
    gradient: bool = False,
    least: float = 0.0,
) -> LayerCheck:
    """The verdict on sizes, by width and seed; below ``least`` they are noise."""
    means = tuple(_finite(statistics.fmean(each)) for each in runs)
    if any(mean is None for mean in means):
        return LayerCheck(name, means, math.nan, math.nan, "diverges")
    if all(mean == 0 for mean in means):
        return LayerCheck(name, means, 0.0, 0.0, "ok")  # not used yet
    # Tiny against the largest is noise, and log of it even more so.
    least = max(least, 1e-6 * max(mean for mean in means if mean is not None))
    x = [-math.log(divisor) for divisor in divisors]
    slope, doubt = _line(
        [value for value, each in zip(x, runs, strict=True) for _ in each],
        [math.log(max(size, least)) for each in runs for size in each],
    )
    verdict = "ok"
    if slope - 2 * doubt > EXPLODES if gradient else slope - doubt > GROWS:
        verdict = "grows"
    elif slope + doubt < -GROWS and not asleep and not gradient:
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


def _to_json(one: LayerCheck) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "sizes": list(one.sizes),
        "slope": _finite(one.slope),
        "doubt": _finite(one.doubt),
        "verdict": one.verdict,
    }


def _from_json(data: Mapping[str, Any]) -> LayerCheck:
    return LayerCheck(
        data["layer"],
        tuple(data["sizes"]),
        math.nan if data["slope"] is None else data["slope"],
        math.nan if data["doubt"] is None else data["doubt"],
        data["verdict"],
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


__all__ = ["EXPLODES", "GROWS", "CoordinateCheck", "LayerCheck", "coordinate_check"]
