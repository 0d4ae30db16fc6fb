"""Maximal-update parametrization from two widths: what makes a narrow twin's hyperparameters fit the model.

The full model is the base: it trains as the user wrote it, at the learning rate of the configuration, and its narrow
twin is corrected (Hydro, Fig. 7: the twin's output is multiplied by S). With n = narrow / full width, the twin gets,
after Table 3 of the muP paper:

================  =================  ===========  ============
weights           initial variance   SGD lr       Adam lr
================  =================  ===========  ============
input, biases     1                  x n          x 1
hidden            / n                x 1          / n
output            / n^2 (SGD: 0)     / n          / n
================  =================  ===========  ============

The paper's output starts with a variance / n^2, at which first outputs are larger at the narrow width; Hydro's
therefore starts at zero. With Adam that costs: after one step all weights of a row are equal, and so are then the
gradients of all features below (a small ResNet ends at a loss of 0.57 instead of 0.43). There it is the paper's own:
every step moves both widths alike, and the full model trains as the user wrote it.

Scaling attention by 1/d instead of 1/sqrt(d) multiplies queries by sqrt(1/n): with queries initialised to zero that
is a learning rate (/ sqrt(n) for Adam, / n for SGD), so nothing in the forward pass changes. Only a weight that is
both embedding and output needs a multiplier of its own.

Weights before a batch or layer norm keep, with Adam, a share n of the squared length that steps add (``_growth``).

The table is kept beside the model, by parameter name: state dicts, checkpoints, schedules and fusion need no
special code for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput
from penstock.model._dims import _tensors
from penstock.model._growth import Growth
from penstock.model._shrink import compare

QUERIES = frozenset(
    {"q", "query", "q_proj", "wq", "to_q", "q_lin", "q_linear", "query_proj", "Wq", "W_q", "w_q"}
)
PACKED = frozenset({"qkv", "c_attn", "in_proj", "to_qkv", "qkv_proj", "Wqkv", "query_key_value", "attn_in"})
_SCALES = ("scaling", "scale", "softmax_scale", "scale_factor", "norm_factor")
_HEAD_SIZES = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "d_head",
    "dim_head",
    "dim_per_head",
    "d_k",
    "hd",
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h", "n_h")

_NORMS = frozenset({"batch_norm", "instance_norm"})
_READS = frozenset({"dim", "size", "get", "numel", "len", "data_ptr", "is_floating_point"})

SGD_LIKE = ("SGD", "ASGD")
ADAM_LIKE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad")


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """What one parameter of the twin gets.

    Attributes:
        kind: ``"input"``, ``"hidden"``, ``"output"``, ``"vector"`` (biases, gains) or ``"fixed"`` (no width in it).
        fan_in: Full / narrow size of what it sums over.
        fan_out: Full / narrow size of what it makes.
        sgd: Learning-rate multiplier for optimizers whose step is linear in the gradient.
        adam: The same for those that normalise it.
        growth: With those: the share of what a step adds to its squared length that stays. Below 1 before a norm.
        std: Standard deviation to start with; None: as it is.
        mean: What it scatters around, where that is not zero (the lengths of a weight norm, a row of time constants).
        value: Constant to start with, where there is no deviation.
        zero: Which part starts at zero: 0: none, 1: all, 3: the first third (queries of a packed projection).
        zero_dim: Along which dimension that third lies.
    """

    kind: str
    fan_in: float = 1.0
    fan_out: float = 1.0
    sgd: float = 1.0
    adam: float = 1.0
    growth: float = 1.0
    std: float | None = None
    mean: float = 0.0
    value: float | None = None
    zero: int = 0
    zero_dim: int = 0


@final
@dataclass(frozen=True, slots=True)
class Table:
    """The side table of one model: rules by parameter name, and what little the forward pass needs.

    Attributes:
        rules: By parameter name.
        scales: Stored attention scales to set, by module and attribute.
        multipliers: What an output layer's input is multiplied by, by module (weights that are also embeddings).
        unpacked: ``nn.MultiheadAttention`` layers whose query, key and value weights are kept apart.
        notes: What could not be done, for people.
    """

    rules: Mapping[str, Rule]
    scales: Mapping[tuple[str, str], float] = field(default_factory=dict)
    multipliers: Mapping[str, float] = field(default_factory=dict)
    unpacked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Make the few changes that are not learning rates or initial values; in place, once."""
        for path in self.unpacked:
            unpack(model.get_submodule(path))
        for (path, name), value in self.scales.items():
            setattr(model.get_submodule(path), name, value)
        for path, factor in self.multipliers.items():
            if factor != 1:
                model.get_submodule(path).register_forward_pre_hook(Multiply(factor))
        return model

    @torch.no_grad()
    def initialise(self, model: nn.Module, *, redraw: bool = False, adam: bool = False) -> nn.Module:
        """Set initial values; draws from torch's generator.

        Args:
            model: Prepared.
            redraw: Draw all random weights anew, for a copy of a ready-made twin; otherwise what is there is scaled.
            adam: Whether the optimizer normalises gradients (``adam_like``): then outputs need not start at zero.
        """
        for name, parameter in model.named_parameters():
            rule = self.rules.get(name)
            if rule is None:
                continue
            if rule.zero == 1 and not (adam and rule.kind == "output"):
                parameter.zero_()
                continue
            if rule.std is not None:
                own = float(parameter.std()) if parameter.numel() > 1 else 0.0
                # What is not trained means something as it stands (a sinusoid), or is random and summed over.
                frozen = not parameter.requires_grad
                if redraw and not frozen:
                    parameter.normal_(rule.mean, rule.std)
                elif own > 0 and not rule.mean and not (frozen and rule.kind not in ("hidden", "output")):
                    parameter.mul_(rule.std / own)
            elif rule.value is not None:
                parameter.fill_(rule.value)
            if rule.zero == 3:
                parameter.narrow(rule.zero_dim, 0, parameter.shape[rule.zero_dim] // 3).zero_()
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Trainable parameters as groups for an optimizer, by their multipliers; those without one first.

        ``scale_groups`` applies the multipliers once the optimizer is there and its kind is known.
        """
        found: dict[tuple[float, float, float], list[nn.Parameter]] = {}
        plain = Rule("fixed")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                rule = self.rules.get(name, plain)
                found.setdefault((rule.sgd, rule.adam, rule.growth), []).append(parameter)
        order = sorted(found, key=lambda key: (key != (1.0, 1.0, 1.0), key))
        return [{"params": found[key], "lr_scales": key[:2], "growth": key[2]} for key in order]


def scale_groups(optimizer: torch.optim.Optimizer) -> None:
    """Multiply each group's learning rate as its parameters need it; decay stays what it was per step.

    Raises:
        InvalidInput: Nobody knows how this optimizer's steps grow with the width.
    """
    adam = adam_like(optimizer)
    for group in optimizer.param_groups:
        scale = group["lr_scale"] = group.pop("lr_scales", (1.0, 1.0))[adam]
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"] * scale
        else:
            group["lr"] = float(group["lr"]) * scale
        if group.get("weight_decay"):
            group["weight_decay"] = group["weight_decay"] / scale
        if not adam or group.get("growth") == 1:
            group.pop("growth", None)
    if any("growth" in group for group in optimizer.param_groups):
        Growth(optimizer)


@final
class ScaledSchedule:
    """A scheduler that knows nothing of multipliers, on an optimizer that has been through ``scale_groups``.

    Some schedulers multiply rates, others set them (``OneCycleLR``, ``CyclicLR``, an ``eta_min``): each one, and each
    of its steps, sees the rates of the configuration, and the multipliers are put back afterwards.

    Args:
        optimizer: With its groups scaled.
        make: Makes the scheduler of it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, make: Callable[[torch.optim.Optimizer], Any]
    ) -> None:
        self._optimizer = optimizer
        self._scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
        with self._unscaled():
            self.inner = make(optimizer)

    def step(self, *args: Any) -> None:
        """Step the scheduler."""
        with self._unscaled():
            self.inner.step(*args)

    def state_dict(self) -> Any:
        """The scheduler's own."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Into the scheduler."""
        self.inner.load_state_dict(state)

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        self._multiply([1 / scale for scale in self._scales])
        try:
            yield
        finally:
            self._multiply(self._scales)

    def _multiply(self, factors: Iterable[float]) -> None:
        for group, factor in zip(self._optimizer.param_groups, factors, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor


def adam_like(optimizer: Any) -> bool:
    """Whether an optimizer normalises its gradients, so that its step does not grow with them."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in SGD_LIKE:
            return False
        if kind.__name__ in ADAM_LIKE:
            return True
    raise InvalidInput(
        f"How {type(optimizer).__name__} must be scaled with the width is not known. For surrogates use one of "
        f"{', '.join((*SGD_LIKE, *ADAM_LIKE))}, or a subclass of one."
    )


@final
class Multiply:
    """A forward pre-hook: multiplies a layer's input (Hydro's Multiply layer)."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The scaled input."""
        return (args[0] * self.factor, *args[1:])


# ---------------------------------------------------------------- the table of two models


def parametrize(
    wide: nn.Module,
    twin: nn.Module,
    *,
    inputs: Any,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> tuple[Table, Table]:
    """The tables of a twin and of the full model.

    Args:
        wide: The full model, as its factory initialises it.
        twin: The same at another width, from ``shrink`` or from the factory.
        inputs: An example batch.
        forward: How models are called, if not with ``inputs`` alone.
    """
    ratios = compare(wide, twin)
    call = forward or (lambda model, batch: model(batch))
    shape = _Shape(twin, call, inputs)
    own = dict(wide.named_parameters())
    rules: dict[str, Rule] = {}
    for name, ratio in ratios.items():
        rules[name] = _rule(name, ratio, own[name], shape)
    modules = dict(twin.named_modules())
    scales: dict[tuple[str, str], float] = {}
    unpacked: list[str] = []
    notes: list[str] = []
    for path, module in wide.named_modules():
        _attention(path, module, modules[path], shape, rules, scales, unpacked, notes)
    multipliers = _tied(wide, shape, ratios)
    table = Table(rules, scales, multipliers, tuple(unpacked), tuple(notes))
    # The full model is the base: only what starts at zero differs from what the user wrote.
    zeros = {name: Rule(rule.kind, zero=rule.zero, zero_dim=rule.zero_dim) for name, rule in rules.items()}
    for path in unpacked:
        for letter in "qkv":
            del zeros[_join(path, f"{letter}_proj_weight")]
        zeros[_join(path, "in_proj_weight")] = Rule("hidden", zero=3)
    return table, Table(zeros)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _rule(name: str, ratio: tuple[float, ...], weight: Tensor, shape: _Shape) -> Rule:
    """After Table 3 of the muP paper; ratios are full / narrow, 1/n."""
    deviation = float(weight.detach().float().std()) if weight.numel() > 1 else 0.0
    std: float | None = deviation
    mean = float(weight.detach().float().mean()) if weight.numel() else 0.0
    if abs(mean) <= max(deviation / 2, 4 * deviation / math.sqrt(max(weight.numel(), 1))):
        mean = 0.0  # as far off as the mean of a few draws is
    value: float | None = None
    if deviation == 0:
        std, value = None, float(weight.detach().flatten()[0]) if weight.numel() else None
    # Hydro 4.1: biases start at zero; constants that the user chose (a forget gate's 1) stay.
    zero = int(weight.dim() == 1 and "bias" in name.rpartition(".")[2] and std is not None)
    if all(each == 1 for each in ratio):
        return Rule("fixed", std=std, mean=mean, value=value, zero=zero)
    if weight.dim() == 1:
        return Rule("vector", 1.0, ratio[0], sgd=1 / ratio[0], std=std, mean=mean, value=value, zero=zero)
    into, out = shape.roles.get(name, (None, None))
    fan_in = ratio[into] if into is not None else 1.0
    fan_out = ratio[out] if out is not None else max(ratio)
    if fan_in == 1:
        return Rule("input", fan_in, fan_out, sgd=1 / fan_out, std=std, mean=mean, value=value)
    if fan_out == 1:
        last = name in shape.last
        start = None if std is None else std * fan_in
        return Rule(
            "output", fan_in, fan_out, sgd=fan_in, adam=fan_in, std=start, value=value, zero=int(last)
        )
    start = None if std is None else std * math.sqrt(fan_in)
    growth = 1 / fan_in if name in shape.normed else 1.0
    return Rule(
        "hidden", fan_in, fan_out, fan_in / fan_out, fan_in, growth, std=start, mean=mean, value=value
    )


def _attention(
    path: str,
    wide: nn.Module,
    twin: nn.Module,
    shape: _Shape,
    rules: dict[str, Rule],
    scales: dict[tuple[str, str], float],
    unpacked: list[str],
    notes: list[str],
) -> None:
    """Queries start at zero, and logits are divided by the head size instead of its root."""
    if isinstance(wide, nn.MultiheadAttention) and isinstance(twin, nn.MultiheadAttention):
        ratio = wide.head_dim / twin.head_dim
        if not wide._qkv_same_embed_dim:
            _query(rules, _join(path, "q_proj_weight"), ratio)
            return
        name = _join(path, "in_proj_weight")
        if ratio == 1:
            rules[name] = replace(rules[name], zero=3)
            return
        old = rules.pop(name)
        for letter in "qkv":
            rules[_join(path, f"{letter}_proj_weight")] = old
        _query(rules, _join(path, "q_proj_weight"), ratio)
        unpacked.append(path)
        return
    for child, layer in twin.named_children():
        weight = _join(_join(path, child), "weight")
        if weight not in rules or rules[weight].kind != "hidden":
            continue
        sizes = layer.get_parameter("weight").shape
        if child in QUERIES:
            _query(rules, weight, _head_ratio(path, wide, twin, child, shape) or rules[weight].fan_out)
            return
        if child in PACKED and len(sizes) == 2:
            axis = shape.roles[weight][1] or 0
            if sizes[axis] != 3 * sizes[1 - axis]:
                notes.append(f"{path}.{child}: not three equal parts, so queries start as they are")
                continue
            rules[weight] = replace(rules[weight], zero=3, zero_dim=axis)
            ratio = _head_ratio(path, wide, twin, child, shape) or rules[weight].fan_out
            if ratio != 1:
                _stored_scale(path, child, twin, ratio, scales, notes)
            return


def _query(rules: dict[str, Rule], name: str, ratio: float) -> None:
    """A multiplier sqrt(ratio) on queries that start at zero, as a learning rate."""
    rule = rules[name]
    rules[name] = replace(rule, sgd=rule.sgd * ratio, adam=rule.adam * math.sqrt(ratio), zero=1)
    bias = name.removesuffix("weight") + "bias"
    if bias in rules:
        own = rules[bias]
        rules[bias] = replace(own, sgd=own.sgd * ratio, adam=own.adam * math.sqrt(ratio), zero=1)


def _stored_scale(
    path: str,
    child: str,
    twin: nn.Module,
    ratio: float,
    scales: dict[tuple[str, str], float],
    notes: list[str],
) -> None:
    for name in _SCALES:
        value = vars(twin).get(name)
        if isinstance(value, float):
            scales[path, name] = value * math.sqrt(ratio)
            return
    notes.append(
        f"{_join(path, child)}: attention stays divided by the root of the head size, for queries, keys and values "
        "share one weight and no stored scale was found"
    )


def _head_ratio(path: str, wide: nn.Module, twin: nn.Module, child: str, shape: _Shape) -> float | None:
    """Full / narrow head size, from attributes; None: not told."""
    for name in _HEAD_SIZES:
        a, b = getattr(wide, name, None), getattr(twin, name, None)
        if isinstance(a, int) and isinstance(b, int) and not isinstance(a, bool) and b > 0:
            return a / b
    for name in _HEADS:
        a, b = getattr(wide, name, None), getattr(twin, name, None)
        if isinstance(a, int) and isinstance(b, int) and not isinstance(a, bool) and a > 0 and b > 0:
            weight = _join(_join(path, child), "weight")
            axis = shape.roles[weight][1] or 0
            out = wide.get_parameter(f"{child}.weight").shape[axis] / a
            return float(out / (twin.get_parameter(f"{child}.weight").shape[axis] / b))
    return None


def _tied(wide: nn.Module, shape: _Shape, ratios: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Output layers whose weight is also an embedding: the one case that needs a multiplier."""
    first = {id(p): name for name, p in wide.named_parameters()}
    found: dict[str, float] = {}
    for path, module in wide.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, nn.Parameter):
            name = first[id(weight)]
            if name != _join(path, "weight") and shape.roles.get(name) == (0, 1):
                found[path] = ratios[name][1]
    return found


@torch.no_grad()
def unpack(layer: nn.Module) -> None:
    """Keep query, key and value weights of an ``nn.MultiheadAttention`` apart, so that each has its learning rate."""
    if not isinstance(layer, nn.MultiheadAttention) or layer.in_proj_weight is None:
        return
    parts = layer.in_proj_weight.detach().chunk(3)
    layer.register_parameter("in_proj_weight", None)
    for letter, part in zip("qkv", parts, strict=True):
        layer.register_parameter(f"{letter}_proj_weight", nn.Parameter(part.clone()))
    layer._qkv_same_embed_dim = False


@final
class _Shape:
    """Which dimension of each weight it sums over and which it makes; which make the output, or are only normed."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any) -> None:
        self.roles: dict[str, tuple[int | None, int | None]] = {}
        first = {id(p): name for name, p in model.named_parameters()}
        for _, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                name = first[id(parameter)]
                if parameter.dim() < 2 or name in self.roles:
                    continue
                self.roles[name] = _role(module)
        self._spy(model, call, inputs)

    def _spy(self, model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any) -> None:
        copied = copy.deepcopy(model).train()
        first = {id(p): name for name, p in copied.named_parameters()}
        order: list[str] = []
        made: dict[int, str] = {}
        hooks = []

        def watch(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.dim() > 1:
                    order.append(first[id(weight)])
                    for tensor in _tensors(output):
                        made[tensor.data_ptr()] = first[id(weight)]

            return hook

        for path, module in copied.named_modules():
            hooks.append(module.register_forward_hook(watch(path)))
        follow = _Uses(first)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), follow:
            output = call(copied, inputs)
        for hook in hooks:
            hook.remove()
        for name, role in follow.roles.items():
            if self.roles.get(name) == (None, None):
                self.roles[name] = role
        direct = {made[t.data_ptr()] for t in _tensors(output) if t.data_ptr() in made}
        self.last = direct or set(order[-1:]) or set(follow.order[-1:])
        self.normed = follow.normed(output)


def _role(module: nn.Module) -> tuple[int | None, int | None]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__ == "Conv1D":
        return 0, 1
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return 0, 1
    if isinstance(
        module, nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention
    ):
        return 1, 0
    return None, None


class _Uses(torch.overrides.TorchFunctionMode):
    """How parameters of the user's own modules are used."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.roles: dict[str, tuple[int | None, int | None]] = {}
        self.order: list[str] = []
        self._made: dict[int, tuple[str, Tensor]] = {}  # the tensor is kept: its id must stay its own
        self._normed: set[str] = set()
        self._else: set[str] = set()

    def normed(self, output: Any) -> set[str]:
        """Weights whose length no one takes notice of: what they make goes into norms, and nowhere else."""
        shown = {self._made[id(each)][0] for each in _tensors(output) if id(each) in self._made}
        return self._normed - self._else - shown

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note what multiplies with a weight."""
        name = str(getattr(func, "__name__", "")).strip("_")
        if name in ("linear", "conv1d", "conv2d", "conv3d") and len(args) > 1:
            self._see(args[1], (1, 0))
        elif name in ("matmul", "mm", "bmm", "rmatmul") and len(args) > 1 and isinstance(args[1], Tensor):
            self._see(args[1], (args[1].dim() - 2, args[1].dim() - 1))
        elif name == "embedding" and len(args) > 1:
            self._see(args[1], (0, 1))
        made = func(*args, **(kwargs or {}))
        self._follow(name, args, kwargs or {}, made)
        return made

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Note where what a weight makes goes."""
        if name in _READS:
            return
        # Both norms say in sixth place whether they take the batch's own mean and variance.
        own = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
        norms = name == "layer_norm" or (name in _NORMS and bool(own))
        weighs = name == "linear" or name.startswith("conv")
        for each in _tensors((args, kwargs)):
            if id(each) in self._made:
                (self._normed if norms and each is args[0] else self._else).add(self._made[id(each)][0])
            if id(each) in self._names:
                if weighs and len(args) > 1 and each is args[1] and isinstance(made, Tensor):
                    self._made[id(made)] = self._names[id(each)], made
                else:
                    self._else.add(self._names[id(each)])

    def _see(self, weight: Any, role: tuple[int, int]) -> None:
        name = self._names.get(id(weight))
        if name is not None:
            self.roles[name] = role
            self.order.append(name)


__all__ = [
    "Multiply",
    "Rule",
    "ScaledSchedule",
    "Table",
    "adam_like",
    "parametrize",
    "scale_groups",
    "unpack",
]
