"""A narrow twin of a network: every hidden width divided, inputs and outputs as they are.

Three ways, in this order: the factory takes a width; the network has a configuration object that says how it was made
(Hugging Face); or its forward pass is followed dimension by dimension. An existing library, torch-pruning 1.6, was
evaluated for the third: it shrinks plain CNNs well, but fails on LSTMs and on attention written by hand, and leaves
the width of ``nn.TransformerEncoder`` as it is without a word.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput, Unsupported
from penstock.model._dims import Dim, Follow, _tensors

WIDTH = "width"
"""The parameter by which a factory is told how wide to build."""

# What configurations of Hugging Face call their widths, and their numbers of heads.
_CONFIG_WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "dim",
    "embedding_size",
    "word_embed_proj_dim",
    "intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "hidden_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "hidden_sizes",
)
_CONFIG_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_CONFIG_SIZES = ("head_dim", "d_kv", "attention_head_size")


def narrower(make: Callable[..., Any], config: Mapping[str, Any], factor: float) -> float | int | None:
    """The width at which a factory makes its twin, or None if it takes none.

    A factory ``build(config, width=256)`` is called with ``width=256 / factor``; where the configuration holds a width,
    with that, divided.

    Raises:
        InvalidInput: It takes a width, but neither a default nor the configuration says how wide the model is.
    """
    try:
        parameter = inspect.signature(make).parameters.get(WIDTH)
    except (TypeError, ValueError):
        return None
    if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return None
    given = config.get(WIDTH, parameter.default)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InvalidInput(
            f"The model factory takes a width without a default number ({given!r}): write width=256 (or 1.0 for a "
            "multiple), so that the narrow twin's can be told."
        )
    return max(1, round(given / factor)) if isinstance(given, int) else given / factor


def shrink(
    module: nn.Module,
    factor: float,
    *,
    inputs: Any,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    floor: int = 4,
) -> nn.Module:
    """A copy of ``module`` whose hidden widths are divided by ``factor``; its weights are yet to be initialised.

    Args:
        module: The network.
        factor: What widths are divided by.
        inputs: An example batch, which both must take.
        forward: How it is called, if not with ``inputs`` alone.
        floor: The narrowest a shrunk layer may be.

    Raises:
        Unsupported: A layer can't be shrunk safely, or gets too narrow; names it.
    """
    _refuse_script(module)
    call = forward or (lambda model, batch: model(batch))
    twin = _from_config(module, factor) or _follow(module, factor, inputs, call)
    compare(module, twin, floor=floor)
    expected = _shapes(call, copy.deepcopy(module), inputs)
    try:
        found = _shapes(call, copy.deepcopy(twin), inputs)
    except Exception as error:
        raise Unsupported(
            f"{type(module).__name__} can't be shrunk: its narrow twin fails with {error!r}. {_REMEDY}"
        ) from error
    if expected != found:
        raise Unsupported(
            f"{type(module).__name__} can't be shrunk: its output would change from {expected} to {found}. {_REMEDY}"
        )
    return twin


_REMEDY = (
    "Let the model factory take a width (def make(config, width=256)), with which the narrow twin is built."
)


def _refuse_script(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise Unsupported(
                f"{path or 'The model'} is TorchScript, whose layers can't be followed. Let the model factory make the "
                "plain one, without torch.jit.script and torch.jit.trace."
            )


def compare(module: nn.Module, twin: nn.Module, *, floor: int = 1) -> dict[str, tuple[float, ...]]:
    """By parameter, the ratio of the two models' sizes, dimension by dimension.

    Raises:
        Unsupported: They are not the same network at two widths, or a layer of the twin is below ``floor``.
    """
    _refuse_script(module)
    wide, narrow = dict(module.named_parameters()), dict(twin.named_parameters())
    if wide.keys() != narrow.keys():
        odd = sorted(wide.keys() ^ narrow.keys())[0]
        raise Unsupported(
            f"The two widths are not the same network: only one of them has the parameter {odd!r}. "
            "Build the same layers at every width."
        )
    ratios: dict[str, tuple[float, ...]] = {}
    for name, parameter in wide.items():
        other = narrow[name]
        if parameter.dim() != other.dim():
            raise Unsupported(
                f"The parameter {name!r} has {parameter.dim()} dimensions, its narrow twin {other.dim()}."
            )
        ratios[name] = tuple(a / b for a, b in zip(parameter.shape, other.shape, strict=True))
        for a, b in zip(parameter.shape, other.shape, strict=True):
            if b > a:
                raise Unsupported(f"The layer {name!r} is wider in the narrow twin: {b} instead of {a}.")
            if b < a and b < floor:
                raise Unsupported(
                    f"The layer {name!r} would be {b} wide instead of {a}, below the floor of {floor}: it would not "
                    "behave like the full one. Shrink by less, or lower the floor."
                )
    if all(ratio == 1 for each in ratios.values() for ratio in each):
        raise Unsupported(
            f"Nothing of {type(module).__name__} can be shrunk: no layer has a width of its own, between inputs and "
            f"outputs. {_REMEDY}"
        )
    return ratios


def _shapes(call: Callable[[nn.Module, Any], Any], module: nn.Module, inputs: Any) -> list[tuple[int, ...]]:
    module.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return [tuple(t.shape) for t in _outputs(call(module, inputs))]


def _outputs(output: Any) -> list[Tensor]:
    """The tensors that are the result; a Hugging Face output also holds hidden states, which narrow."""
    if hasattr(output, "logits"):
        return [output.logits]
    return _tensors(output)


# ---------------------------------------------------------------- by its configuration


def _from_config(module: nn.Module, factor: float) -> nn.Module | None:
    config = getattr(module, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(module, "config_class"):
        return None
    narrow: Any = copy.deepcopy(config)
    known = getattr(config, "attribute_map", {})
    done = set()
    for name in _CONFIG_WIDTHS:
        real = known.get(name, name)
        value = getattr(config, name, None)
        if value is None or real in done:
            continue
        done.add(real)
        if isinstance(value, list | tuple):
            setattr(narrow, name, type(value)(max(1, round(v / factor)) for v in value))
        else:
            setattr(narrow, name, max(1, round(value / factor)))
    if not done:
        return None
    width = next((getattr(narrow, n) for n in _CONFIG_WIDTHS[:4] if getattr(narrow, n, None)), None)
    heads = next((getattr(config, n) for n in _CONFIG_HEADS if getattr(config, n, None)), None)
    if isinstance(width, int) and isinstance(heads, int) and width % heads:
        raise Unsupported(
            f"{type(module).__name__}: a width of {width} can't be divided among {heads} attention heads. Choose a "
            "factor that leaves every head the same size."
        )
    for name in _CONFIG_SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int) and name in vars(narrow):
            setattr(narrow, name, max(1, round(value / factor)))
    build: Any = type(module)
    made: nn.Module = build(narrow)
    kinds = {parameter.dtype for parameter in module.parameters()}
    return made.to(kinds.pop()) if len(kinds) == 1 else made


# ---------------------------------------------------------------- by following its dimensions


def _follow(
    module: nn.Module, factor: float, inputs: Any, call: Callable[[nn.Module, Any], Any]
) -> nn.Module:
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        raise Unsupported(f"{type(module).__name__} has lazy layers: run a batch through it first.")
    traced = copy.deepcopy(module).train()
    follow = Follow(traced)
    with torch.random.fork_rng(devices=[]):
        follow.run(lambda: call(traced, inputs), inputs)
    width = follow.atoms.shrunk(factor)
    _refuse_locked(follow)
    clear, unclear = _numbers(follow, traced, width)
    failure: Exception | None = None
    for choice in (clear | unclear, clear):  # a number that means two things: try it as a width first
        twin = copy.deepcopy(module)
        _resize(twin, follow, width)
        for (path, name), value in choice.items():
            setattr(twin.get_submodule(path), name, value)
        try:
            _shapes(call, copy.deepcopy(twin), inputs)
        except Exception as error:
            failure = failure or error
            if not unclear:
                break
            continue
        return twin
    raise Unsupported(
        f"{type(module).__name__} can't be shrunk: its narrow twin fails with {failure!r}. {_REMEDY}"
    ) from failure


def _refuse_locked(follow: Follow) -> None:
    """What could not be followed, and belongs to a weight, is refused by name."""
    for name, dims in follow.used.items():
        for dim in dims:
            for atom in follow.atoms.primes(dim):
                reason = follow.atoms.fixed.get(atom)
                if reason:
                    raise Unsupported(f"The layer {name!r} can't be shrunk safely: {reason}. {_REMEDY}")


def _resize(twin: nn.Module, follow: Follow, width: Callable[[Dim], int]) -> None:
    """Cut every parameter and buffer to its new shape, and tell its module."""
    tensors: dict[str, Tensor] = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for name, dims in follow.used.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            cut = tensor[tuple(slice(width(dim)) for dim in dims)].clone()
            if isinstance(tensor, nn.Parameter):
                tensor.data = cut
            else:
                path, _, last = name.rpartition(".")
                twin.get_submodule(path)._buffers[last] = cut
    for path, module in twin.named_modules():
        _tell(module, path, follow, width)


def _tell(module: Any, path: str, follow: Follow, width: Callable[[Dim], int]) -> None:
    """Bring the numbers that torch's own layers keep in line with their weights."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.conv._ConvTransposeNd):
        module.in_channels, module.out_channels = module.weight.shape[:2]
    elif isinstance(module, nn.modules.conv._ConvNd):
        if path in follow.groups:
            module.groups = width(follow.groups[path])
        module.out_channels = module.weight.shape[0]
        module.in_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        known = module.weight if module.weight is not None else module.running_mean
        if known is not None:
            module.num_features = len(known)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if path in follow.normed:
            module.normalized_shape = tuple(width(dim) for dim in follow.normed[path])
    elif isinstance(module, nn.GroupNorm) and module.weight is not None:
        module.num_channels = len(module.weight)
        module.num_groups = math.gcd(module.num_groups, module.num_channels)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.RNNBase):
        first, second = module.get_parameter("weight_ih_l0"), module.get_parameter("weight_hh_l0")
        module.input_size, module.hidden_size = first.shape[1], second.shape[1]
        module.flatten_parameters()
    elif isinstance(module, nn.MultiheadAttention) and path in follow.heads:
        heads, size = follow.heads[path]
        module.num_heads, module.head_dim = width(heads), width(size)
        module.embed_dim = module.num_heads * module.head_dim
        module.kdim = (module.k_proj_weight.shape[1]) if module.in_proj_weight is None else module.embed_dim
        module.vdim = (module.v_proj_weight.shape[1]) if module.in_proj_weight is None else module.embed_dim
    elif (
        isinstance(module, nn.Transformer)
        and f"{path}.encoder.layers.0.self_attn".lstrip(".") in follow.heads
    ):
        heads, size = follow.heads[f"{path}.encoder.layers.0.self_attn".lstrip(".")]
        module.nhead, module.d_model = width(heads), width(heads) * width(size)


def _numbers(
    follow: Follow, module: nn.Module, width: Callable[[Dim], int]
) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, str], Any]]:
    """Attributes of the user's own modules that hold a width: those that are sure, and those that may also be
    something else's size."""
    clear: dict[tuple[str, str], Any] = {}
    unclear: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules():
        if type(part).__module__.startswith("torch."):
            continue
        sizes: dict[int, set[int]] = {}
        dims = set(follow.seen.get(path, ()))
        for name, own in follow.used.items():
            if name.startswith(f"{path}." if path else ""):
                dims.update(dim for dim in own if dim)
        for dim in dims:
            for each in (dim, *((p,) for p in follow.atoms.primes(dim))):
                sizes.setdefault(follow.atoms.size(each), set()).add(width(each))
        for name, value in _own_numbers(part):
            new = sizes.get(value, {value})
            if isinstance(value, bool) or new == {value}:
                continue
            (clear if len(new) == 1 else unclear)[path, name] = min(new)
        for name, value in list(vars(part).items()):
            # A stored attention scale, 1/sqrt(head size), follows the head size.
            if isinstance(value, float) and 0 < value < 1:
                size = round(value**-2)
                new = sizes.get(size, {size})
                if math.isclose(value, size**-0.5, rel_tol=1e-6) and len(new) == 1 and new != {size}:
                    clear[path, name] = next(iter(new)) ** -0.5
    return clear, unclear


def _own_numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items():
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_") and value > 1:
            yield name, value


__all__ = ["compare", "narrower", "shrink"]
