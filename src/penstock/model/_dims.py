"""Which sizes of a network must change together: a forward pass that follows every dimension of every tensor.

Each dimension is a product of atoms. What an operation does to its tensors unites atoms (a residual sum), splits
them (a width into heads and head size), or adds them up (a concatenation). Input and output dimensions are kept;
what nobody can follow is locked, with the reason and the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Dim: TypeAlias = tuple[int, ...]
"""A dimension as the atoms whose product is its size, outermost first; empty: size 1."""

KEPT = ""
"""Why an atom keeps its size, if that is in order: it is an input's, an output's or a table's."""


@final
class Atoms:
    """Sizes that are equal (united), products (parts) or sums of others."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, Dim] = {}
        self._sums: dict[int, tuple[Dim, ...]] = {}
        self.fixed: dict[int, str] = {}
        self.whole: list[Dim] = []  # what was split into several free atoms

    def new(self, size: int, fixed: str | None = None) -> Dim:
        """A dimension of its own."""
        if size == 1:
            return ()
        atom = len(self._size)
        self._size.append(size)
        self._parent.append(atom)
        if fixed is not None:
            self.fixed[atom] = fixed
        return (atom,)

    def find(self, atom: int) -> int:
        """The atom that stands for all united with this one."""
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def primes(self, dims: Iterable[int]) -> list[int]:
        """The atoms that are not split any further."""
        found: list[int] = []
        for atom in dims:
            root = self.find(atom)
            if root in self._parts:
                found.extend(self.primes(self._parts[root]))
            else:
                found.append(root)
        return found

    def size(self, dim: Iterable[int]) -> int:
        """The product of the sizes."""
        return math.prod(self._size[self.find(atom)] for atom in dim)

    def fix(self, dim: Dim, reason: str = KEPT) -> None:
        """Keep a dimension's size."""
        for atom in self.primes(dim):
            if atom not in self.fixed or reason == KEPT:
                self.fixed[atom] = reason
            for part in self._sums.get(atom, ()):
                self.fix(part, reason)

    def total(self, parts: Sequence[Dim]) -> Dim:
        """A dimension whose size is the sum of others'."""
        made = self.new(sum(self.size(part) for part in parts))
        if made:
            self._sums[made[0]] = tuple(parts)
        return made

    def split(self, atom: int, outer: int) -> Dim:
        """Split an atom into a product, ``outer`` first."""
        size = self._size[atom]
        if atom in self._sums:
            self.fix((atom,), "a concatenation is reshaped")
        reason = self.fixed.get(atom)
        parts = (*self.new(outer, reason), *self.new(size // outer, reason))
        self._parts[atom] = parts
        self.whole.append((atom,))
        return parts

    def unite(self, one: Dim, other: Dim, where: str) -> None:
        """Make two dimensions equal, part by part."""
        left, right = self.primes(one), self.primes(other)
        while left and right:
            left, right = self.primes(left), self.primes(right)
            a, b = left[0], right[0]
            if a == b:
                pass
            elif self._size[a] == self._size[b]:
                self._union(a, b, where)
            elif self._size[b] % self._size[a] == 0:
                right[0:1] = self.split(b, self._size[a])
                continue
            elif self._size[a] % self._size[b] == 0:
                left[0:1] = self.split(a, self._size[b])
                continue
            else:
                for atom in (*left, *right):
                    self.fix((atom,), f"sizes that don't divide each other meet in {where}")
                return
            left, right = left[1:], right[1:]

    def _union(self, a: int, b: int, where: str) -> None:
        sums = [self._sums.pop(x) for x in (a, b) if x in self._sums]
        reasons = [self.fixed.pop(x) for x in (a, b) if x in self.fixed]
        self._parent[b] = a
        if sums:
            self._sums[a] = sums[0]
        if reasons:
            self.fix((a,), KEPT if KEPT in reasons else reasons[0])
        if len(sums) == 2:
            if [self.size(d) for d in sums[0]] == [self.size(d) for d in sums[1]]:
                for x, y in zip(*sums, strict=True):
                    self.unite(x, y, where)
            else:
                self.fix((a,), f"two different concatenations meet in {where}")

    def regroup(self, dims: Sequence[Dim], shape: Sequence[int], where: str) -> list[Dim]:
        """The dimensions of a reshaped tensor."""
        atoms = self.primes([atom for dim in dims for atom in dim])
        found: list[Dim] = []
        for size in shape:
            taken: list[int] = []
            rest = size
            while rest > 1 and atoms:
                atom = atoms.pop(0)
                if rest % self._size[atom] == 0:
                    taken.append(atom)
                    rest //= self._size[atom]
                elif self._size[atom] % rest == 0:
                    outer, *inner = self.split(atom, rest)
                    taken.append(outer)
                    atoms[:0] = inner
                    rest = 1
                else:
                    reason = f"a reshape in {where} mixes sizes that don't divide each other"
                    for other in (atom, *taken, *atoms):
                        self.fix((other,), reason)
                    return [self.new(each, reason) for each in shape]
            found.append(tuple(taken))
        return found

    # ------------------------------------------------------------ shrinking

    def shrunk(self, factor: float) -> Callable[[Dim], int]:
        """New sizes: every free dimension divided by ``factor``, a product as a whole."""
        new: dict[int, int] = {}
        # Products of several free atoms (heads x head size) shrink as one: the innermost first.
        for whole in sorted(self.whole, key=lambda dim: len(self.primes(dim)), reverse=True):
            free = [p for p in self.primes(whole) if p not in self.fixed and p not in self._sums]
            if len(set(free)) < 2:
                continue
            left = factor / math.prod(self._size[p] / new[p] for p in free if p in new)
            for atom in reversed(free):
                if atom in new or left <= 1:
                    new.setdefault(atom, self._size[atom])
                    continue
                least = 1 if atom == free[0] else 2
                divisors = [d for d in range(1, self._size[atom] // least + 1) if self._size[atom] % d == 0]
                part = max(d for d in divisors if d <= left + 1e-9) if divisors else 1
                new[atom] = self._size[atom] // part
                left /= part

        def width(atom: int) -> int:
            root = self.find(atom)
            if root in self._parts:
                return math.prod(map(width, self._parts[root]))
            if root in self.fixed:
                return self._size[root]
            if root in self._sums:
                return sum(math.prod(map(width, part)) for part in self._sums[root])
            if root not in new:
                new[root] = max(1, round(self._size[root] / factor))
            return new[root]

        return lambda dim: math.prod(map(width, dim))


@final
class Follow(TorchFunctionMode):
    """Follows the dimensions through one forward pass of ``module``.

    Attributes:
        atoms: What is known of the sizes.
        groups: The group counts of convolutions, by module.
        normed: The normalised dimensions of layer norms, by module.
        heads: Head count and head size of attention, by module.
        used: Parameters and buffers that took part.
        seen: Dimensions met within each module's forward, for the numbers it keeps as attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.atoms = Atoms()
        self.module = module
        self.groups: dict[str, Dim] = {}
        self.normed: dict[str, tuple[Dim, ...]] = {}
        self.heads: dict[str, tuple[Dim, Dim]] = {}
        self.used: dict[str, tuple[Dim, ...]] = {}
        self.seen: dict[str, set[Dim]] = {}
        self._names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
        self._dims: dict[int, tuple[Tensor, list[Dim]]] = {}
        self._stack = [""]

    def run(self, call: Callable[[], Any], inputs: Any) -> Any:
        """Follow ``call``, a forward pass whose inputs keep their sizes; so do its outputs."""
        for tensor in _tensors(inputs):
            self._dims[id(tensor)] = (tensor, [self.atoms.new(size, KEPT) for size in tensor.shape])
        hooks = []
        for name, module in self.module.named_modules():
            hooks.append(module.register_forward_pre_hook(_Enter(self._stack, name)))
            hooks.append(module.register_forward_hook(_Leave(self._stack), always_call=True))
        try:
            with torch.no_grad(), self:
                output = call()
        finally:
            for hook in hooks:
                hook.remove()
        for tensor in _tensors(output):
            for dim in self.of(tensor):
                self.atoms.fix(dim)
        return output

    @property
    def where(self) -> str:
        """The module whose forward runs."""
        return self._stack[-1] or type(self.module).__name__

    def of(self, tensor: Tensor) -> list[Dim]:
        """A tensor's dimensions."""
        if id(tensor) not in self._dims:
            dims = [self.atoms.new(size) for size in tensor.shape]
            self._dims[id(tensor)] = (tensor, dims)
            name = self._names.get(id(tensor))
            if name is not None:
                self.used[name] = tuple(dims)
        return self._dims[id(tensor)][1]

    def set(self, tensor: Any, dims: Sequence[Dim]) -> None:
        """Say what an operation's result is made of."""
        if isinstance(tensor, Tensor):
            self._dims[id(tensor)] = (tensor, list(dims))
            for name in self._stack:
                self.seen.setdefault(name, set()).update(d for d in dims if d)

    def lock(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Keep the sizes of tensors that went into something that can't be followed."""
        for tensor in tensors:
            for dim in self.of(tensor):
                if any(atom not in self.atoms.fixed for atom in self.atoms.primes(dim)):
                    self.atoms.fix(dim, reason)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute, then follow."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        results = [
            r for r in (result if isinstance(result, tuple | list) else [result]) if isinstance(r, Tensor)
        ]
        if not results:
            if getattr(func, "__name__", "") == "__setitem__":
                self._assigned(args)
            return result
        name = str(getattr(func, "__name__", ""))
        if name == "__get__":
            name = str(getattr(getattr(func, "__self__", None), "__name__", name))
        rule = RULES.get(name.strip("_") if name.startswith("__") else name.rstrip("_"))
        if rule is None or rule(self, result, *args, **given) is NotImplemented:
            self._default(name, results, args, given)
        return result

    def _assigned(self, args: tuple[Any, ...]) -> None:
        target, value = args[0], args[2]
        if isinstance(value, Tensor) and value.dim():
            self.lock([target, value], f"an assignment to a part of a tensor in {self.where}")

    def _default(
        self, name: str, results: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Elementwise, with broadcasting; or else nobody knows."""
        tensors = [t for t in _tensors((args, kwargs)) if t.dim()]
        for out in results:
            if not tensors:
                self.of(out)
                continue
            try:
                fits = _broadcast_shape([t.shape for t in tensors]) == out.shape
            except ValueError:
                fits = False
            if not fits:
                self.lock(tensors, f"{name} in {self.where} can't be followed")
                self.set(out, [self.atoms.new(size, KEPT) for size in out.shape])
                continue
            self.set(out, self._broadcast(tensors, out.shape))

    def _broadcast(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> list[Dim]:
        dims: list[Dim] = []
        for back in range(1, len(shape) + 1):
            found: Dim | None = None
            for tensor in tensors:
                if tensor.dim() >= back and tensor.shape[-back] != 1:
                    own = self.of(tensor)[-back]
                    if found is None:
                        found = own
                    else:
                        self.atoms.unite(found, own, self.where)
            dims.append(found or ())
        return dims[::-1]


@final
class _Enter:
    def __init__(self, stack: list[str], name: str) -> None:
        self._stack, self._name = stack, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._name)


@final
class _Leave:
    def __init__(self, stack: list[str]) -> None:
        self._stack = stack

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


def _broadcast_shape(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    # torch.broadcast_shapes imports symbolic algebra first, which takes a second.
    return np.broadcast_shapes(*shapes)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in _tensors(value)]
    if isinstance(tree, tuple | list):
        return [t for value in tree for t in _tensors(value)]
    return []


# ---------------------------------------------------------------- rules by the functions' names

Rule: TypeAlias = Callable[..., Any]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(found: Rule) -> Rule:
        for name in names:
            RULES[name] = found
        return found

    return register


@_rule("linear")
def _linear(at: Follow, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    w = at.of(weight)
    at.atoms.unite(at.of(x)[-1], w[1], at.where)
    if bias is not None:
        at.atoms.unite(w[0], at.of(bias)[0], at.where)
    at.set(out, [*at.of(x)[:-1], w[0]])


@_rule("conv1d", "conv2d", "conv3d")
def _conv(
    at: Follow,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    w, spatial = at.of(weight), weight.dim() - 2
    for dim in w[2:]:
        at.atoms.fix(dim)
    if x.dim() != weight.dim():
        at.lock([x, weight], f"a convolution without a batch in {at.where}")
    channels = at.of(x)[1] if x.dim() == weight.dim() else at.of(x)[0]
    if groups == 1:
        at.atoms.unite(channels, w[1], at.where)
    else:
        # Depthwise (one channel each): the groups are the width. Otherwise groups stay and each gets narrower.
        each = at.atoms.new(groups, None if weight.shape[1] == 1 else KEPT)
        at.atoms.unite((*each, *w[1]), channels, at.where)
        multiple = at.atoms.new(weight.shape[0] // groups, KEPT if weight.shape[1] == 1 else None)
        at.atoms.unite((*each, *multiple), w[0], at.where)
        at.groups[at._stack[-1]] = each
    if bias is not None:
        at.atoms.unite(w[0], at.of(bias)[0], at.where)
    at.set(out, [at.of(x)[0], w[0], *(at.atoms.new(size, KEPT) for size in out.shape[-spatial:])])


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    at: Follow, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **more: Any
) -> None:
    w = at.of(weight)
    groups = more.get("groups", rest[3] if len(rest) > 3 else 1)
    if groups != 1:
        at.lock([weight, x], f"a grouped transposed convolution in {at.where}")
    for dim in w[2:]:
        at.atoms.fix(dim)
    at.atoms.unite(at.of(x)[1], w[0], at.where)
    if bias is not None:
        at.atoms.unite(w[1], at.of(bias)[0], at.where)
    at.set(out, [at.of(x)[0], w[1], *(at.atoms.new(size, KEPT) for size in out.shape[2:])])


@_rule("batch_norm", "instance_norm")
def _batch_norm(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> None:
    for tensor in _tensors((rest, more)):
        if tensor.dim() == 1:
            at.atoms.unite(at.of(x)[1], at.of(tensor)[0], at.where)
    at.set(out, at.of(x))


@_rule("group_norm")
def _group_norm(at: Follow, out: Tensor, x: Tensor, num_groups: int, *rest: Any, **more: Any) -> None:
    for tensor in _tensors((rest, more)):
        at.atoms.unite(at.of(x)[1], at.of(tensor)[0], at.where)
    at.set(out, at.of(x))


@_rule("layer_norm", "rms_norm")
def _layer_norm(at: Follow, out: Tensor, x: Tensor, shape: Sequence[int], *rest: Any, **more: Any) -> None:
    last = at.of(x)[-len(shape) :]
    for tensor in _tensors((rest, more)):
        for mine, its in zip(last, at.of(tensor), strict=True):
            at.atoms.unite(mine, its, at.where)
    at.normed[at._stack[-1]] = tuple(last)
    at.set(out, at.of(x))


@_rule("embedding")
def _embedding(at: Follow, out: Tensor, index: Tensor, weight: Tensor, *rest: Any, **more: Any) -> None:
    table = at.of(weight)
    at.atoms.fix(table[0])  # rows are the vocabulary
    at.set(out, [*at.of(index), table[1]])


def _masked(at: Follow, mask: Any, queries: Dim, keys: Dim) -> None:
    """A mask, which may be a buffer of the model, is as long as what it masks: it is no width."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return
    for own, dim, size in zip(at.of(mask)[-2:], (queries, keys), mask.shape[-2:], strict=True):
        if size != 1:
            at.atoms.unite(dim, own, at.where)


@_rule("multi_head_attention_forward")
def _attention_layer(
    at: Follow,
    out: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    num_heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    **more: Any,
) -> None:
    a, where = at.atoms, at.where
    wide = at.of(query)[-1]
    parts = [more.get(f"{name}_proj_weight") for name in "qkv"]
    if in_weight is not None:
        a.unite((*a.new(3, KEPT), *wide), at.of(in_weight)[0], where)
        for tensor in (key, value):
            a.unite(wide, at.of(tensor)[-1], where)
        a.unite(wide, at.of(in_weight)[1], where)
    for weight, tensor in zip(parts, (query, key, value), strict=True):
        if weight is not None:
            a.unite(wide, at.of(weight)[0], where)
            a.unite(at.of(tensor)[-1], at.of(weight)[1], where)
    if in_bias is not None:
        a.unite((*a.new(3, KEPT), *wide), at.of(in_bias)[0], where)
    for dim in at.of(out_weight):
        a.unite(wide, dim, where)
    for more_bias in (out_bias, bias_k, bias_v):
        if more_bias is not None:
            a.unite(wide, at.of(more_bias)[-1], where)
    heads = a.new(num_heads)
    size = a.new(width // num_heads)
    a.unite((*heads, *size), wide, where)
    at.heads[at._stack[-1]] = (heads, size)
    _masked(at, more.get("attn_mask"), at.of(query)[0], at.of(key)[0])
    at.set(out[0], at.of(query))
    if out[1] is not None:
        at.set(out[1], [a.new(n, KEPT) for n in out[1].shape])


@_rule("scaled_dot_product_attention")
def _attention(at: Follow, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
    if len({t.dim() for t in (q, k, v)}) != 1:
        return NotImplemented
    a, where = at.atoms, at.where
    a.unite(at.of(q)[-1], at.of(k)[-1], where)
    a.unite(at.of(k)[-2], at.of(v)[-2], where)
    for one, two, three in zip(at.of(q)[:-2], at.of(k)[:-2], at.of(v)[:-2], strict=True):
        if a.size(one) == a.size(two):  # grouped-query attention has fewer key heads
            a.unite(one, two, where)
        a.unite(two, three, where)
    _masked(at, rest[0] if rest else more.get("attn_mask"), at.of(q)[-2], at.of(k)[-2])
    if q.dim() > 3:
        at.heads[at._stack[-1]] = (at.of(q)[-3], at.of(q)[-1])
    at.set(out, [*at.of(q)[:-1], at.of(v)[-1]])
    return None


@_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(at: Follow, out: Any, x: Tensor, hx: Any, *rest: Any, **more: Any) -> Any:
    if not isinstance(rest[0], tuple | list):
        return NotImplemented  # a packed sequence
    weights, has_biases, _layers, _dropout, _train, bidirectional = rest[:6]
    a, where = at.atoms, at.where
    gates = weights[0].shape[0] // weights[1].shape[1]
    per = 4 if has_biases else 2
    if any(w.dim() == 2 and w.shape[0] != weights[0].shape[0] for w in weights):
        at.lock([x, *weights], f"a projected LSTM in {where}")
        return NotImplemented
    hidden = a.new(weights[1].shape[1])
    below = at.of(x)[-1]
    both = (*a.new(2, KEPT), *hidden) if bidirectional else hidden
    for number in range(0, len(weights), per):
        cell = number // per
        if cell and (not bidirectional or cell % 2 == 0):
            below = both
        stacked = (*a.new(gates, KEPT), *hidden)
        for index, weight in enumerate(weights[number : number + per]):
            dims = at.of(weight)
            a.unite(stacked, dims[0], where)
            if index < 2:
                a.unite(below if index == 0 else hidden, dims[1], where)
    for state in _tensors(hx):
        a.unite(at.of(state)[-1], hidden, where)
    at.set(out[0], [*at.of(x)[:-1], both])
    for state in out[1:]:
        at.set(state, [*(a.new(n, KEPT) for n in state.shape[:-1]), hidden])
    return None


@_rule("matmul", "bmm", "mm", "rmatmul")
def _matmul(at: Follow, out: Tensor, one: Tensor, two: Tensor, **more: Any) -> Any:
    if one.dim() < 2 or two.dim() < 2:
        return NotImplemented
    a, b = at.of(one), at.of(two)
    at.atoms.unite(a[-1], b[-2], at.where)
    dims: list[Dim] = []
    for back in range(3, out.dim() + 1):
        found = [d[-back] for d in (a, b) if len(d) >= back and d[-back]]
        if len(found) == 2:
            at.atoms.unite(found[0], found[1], at.where)
        dims.append(found[0] if found else ())
    at.set(out, [*dims[::-1], a[-2], b[-1]])
    return None


@_rule("addmm", "baddbmm")
def _addmm(at: Follow, out: Tensor, bias: Tensor, one: Tensor, two: Tensor, **more: Any) -> None:
    _matmul(at, out, one, two)
    at.set(out, at._broadcast([out, bias], out.shape))


@_rule("einsum")
def _einsum(at: Follow, out: Tensor, equation: str, *operands: Any) -> Any:
    if "..." in equation or "->" not in equation:
        return NotImplemented
    inputs, result = equation.replace(" ", "").split("->")
    by_letter: dict[str, Dim] = {}
    for letters, tensor in zip(inputs.split(","), _tensors(operands), strict=True):
        for letter, dim in zip(letters, at.of(tensor), strict=True):
            if letter in by_letter:
                at.atoms.unite(by_letter[letter], dim, at.where)
            by_letter.setdefault(letter, dim)
    at.set(out, [by_letter[letter] for letter in result])
    return None


@_rule("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as")
def _reshape(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> Any:
    if rest and isinstance(rest[0], torch.dtype):
        return NotImplemented
    at.set(out, at.atoms.regroup(at.of(x), out.shape, at.where))
    return None


@_rule("expand", "expand_as", "repeat_interleave", "repeat", "tile")
def _expand(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> Any:
    dims = [()] * (out.dim() - x.dim()) + at.of(x)
    sizes = [1] * (out.dim() - x.dim()) + list(x.shape)
    found: list[Dim] = []
    for dim, before, after in zip(dims, sizes, out.shape, strict=True):
        if before == after:
            found.append(dim)
        else:
            at.atoms.fix(dim)
            found.append(at.atoms.new(after, KEPT))
    at.set(out, found)
    return None


def _axes(rest: Sequence[Any], more: Mapping[str, Any], name: str = "dims") -> list[int]:
    given = rest if rest else [more.get(name, more.get("dim"))]
    flat = given[0] if len(given) == 1 and isinstance(given[0], tuple | list | torch.Size) else given
    return [int(axis) for axis in flat]


@_rule("permute")
def _permute(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> None:
    at.set(out, [at.of(x)[axis] for axis in _axes(rest, more)])


@_rule("transpose", "swapaxes", "swapdims")
def _transpose(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> None:
    one, two = rest if len(rest) == 2 else (more.get("dim0", rest[0] if rest else 0), more.get("dim1", 1))
    dims = list(at.of(x))
    dims[one], dims[two] = dims[two], dims[one]
    at.set(out, dims)


@_rule("t", "T", "mT")
def _turned(at: Follow, out: Tensor, x: Tensor, *rest: Any) -> None:
    dims = list(at.of(x))
    if len(dims) > 1:
        dims[-1], dims[-2] = dims[-2], dims[-1]
    at.set(out, dims)


@_rule("movedim", "moveaxis")
def _movedim(at: Follow, out: Tensor, x: Tensor, source: Any, destination: Any) -> Any:
    if not isinstance(source, int) or not isinstance(destination, int):
        return NotImplemented
    dims = list(at.of(x))
    dims.insert(destination % len(dims), dims.pop(source))
    at.set(out, dims)
    return None


@_rule("cat", "concat", "concatenate")
def _cat(at: Follow, out: Tensor, tensors: Sequence[Tensor], dim: int = 0, **more: Any) -> None:
    axis = more.get("axis", dim) % out.dim()
    parts = [at.of(t) for t in tensors if t.dim() == out.dim()]
    dims: list[Dim] = []
    for number in range(out.dim()):
        if number == axis:
            dims.append(at.atoms.total([part[number] for part in parts]))
            continue
        for part in parts[1:]:
            at.atoms.unite(parts[0][number], part[number], at.where)
        dims.append(parts[0][number])
    at.set(out, dims)


@_rule("stack")
def _stack(at: Follow, out: Tensor, tensors: Sequence[Tensor], dim: int = 0, **more: Any) -> None:
    dims = at._broadcast(list(tensors), tensors[0].shape)
    dims.insert(dim % out.dim(), at.atoms.new(len(tensors), KEPT))
    at.set(out, dims)


@_rule("chunk", "split", "tensor_split", "unbind")
def _parts(at: Follow, outs: Sequence[Tensor], x: Tensor, *rest: Any, **more: Any) -> Any:
    unbinds = outs[0].dim() < x.dim()
    given = more.get("dim", rest[0 if unbinds else 1] if len(rest) > (0 if unbinds else 1) else 0)
    axis = given % x.dim()
    dims = list(at.of(x))
    if unbinds:
        at.atoms.fix(dims.pop(axis))
        for out in outs:
            at.set(out, dims)
        return None
    if len({out.shape[axis] for out in outs}) > 1:
        return NotImplemented
    if len(outs) > 1:
        split = at.atoms.regroup([dims[axis]], (len(outs), outs[0].shape[axis]), at.where)
        at.atoms.fix(split[0])
        dims[axis] = split[1]
    for out in outs:
        at.set(out, dims)
    return None


@_rule("getitem", "select", "narrow", "index_select")
def _getitem(at: Follow, out: Tensor, x: Tensor, *rest: Any, **more: Any) -> Any:
    index = rest[0] if len(rest) == 1 else None
    if index is None:
        if len(rest) == 2 and out.dim() == x.dim() - 1:  # select(dim, index)
            dims = list(at.of(x))
            at.atoms.fix(dims.pop(int(rest[0])))
            at.set(out, dims)
            return None
        return NotImplemented
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if any(isinstance(entry, Tensor | list) for entry in entries):
        if len(entries) == 1 and isinstance(entries[0], Tensor) and entries[0].dtype is not torch.bool:
            at.atoms.fix(at.of(x)[0])  # rows looked up, as in an embedding
            at.set(out, [*at.of(entries[0]), *at.of(x)[1:]])
            return None
        return NotImplemented
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    spot = entries.index(Ellipsis)
    entries[spot : spot + 1] = [slice(None)] * (x.dim() - taken)
    old, dims = iter(zip(at.of(x), x.shape, strict=True)), []
    for entry in entries:
        if entry is None:
            dims.append(())
            continue
        dim, size = next(old)
        if not isinstance(entry, slice):
            at.atoms.fix(dim)
            continue
        length = len(range(*entry.indices(size)))
        if length == size:
            dims.append(dim)
        else:
            at.atoms.fix(dim)
            dims.append(at.atoms.new(length, KEPT))
    at.set(out, dims)
    return None


@_rule(
    "mean",
    "sum",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "norm",
    "logsumexp",
    "max",
    "min",
    "argmax",
    "argmin",
    "all",
    "any",
)
def _reduce(at: Follow, out: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    first = out[0] if isinstance(out, tuple) else out
    given = more.get("dim", rest[0] if rest else None)
    if isinstance(given, Tensor):
        return NotImplemented  # max(a, b)
    axes = list(range(x.dim())) if given is None else [given] if isinstance(given, int) else list(given)
    gone = {axis % x.dim() for axis in axes}
    keepdim = first.dim() == x.dim()
    dims = [() if n in gone else d for n, d in enumerate(at.of(x)) if keepdim or n not in gone]
    for each in _tensors(out):
        at.set(each, dims)
    return None


@_rule(
    *(
        f"{kind}_pool{n}d{suffix}"
        for n in (1, 2, 3)
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_max", "_adaptive_max")
        for suffix in ("", "_with_indices")
    ),
    "interpolate",
    "upsample",
    "pad",
)
def _spatial(at: Follow, out: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    for each in _tensors(out):
        if each.dim() != x.dim():
            return NotImplemented
        if each.shape[1:2] != x.shape[1:2] and x.dim() > 2:
            return NotImplemented  # padded channels
        dims = [
            d if before == after else at.atoms.new(after, KEPT)
            for d, before, after in zip(at.of(x), x.shape, each.shape, strict=True)
        ]
        at.set(each, dims)
    return None


__all__ = ["KEPT", "Atoms", "Dim", "Follow"]
