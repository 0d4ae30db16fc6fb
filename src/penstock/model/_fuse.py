"""Fusion: many models of one structure computed as one, each with its own weights, statistics and randomness."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from penstock.core.errors import Unsupported
from penstock.model._ops import Draws, Members, PerMember
from penstock.model._ops._attention import masks_as_given
from penstock.model._parametrize import Multiply
from penstock.model._stack import Stack, overlapping

_INTERNAL = frozenset(
    {"_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs"}
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_PER_MEMBER: dict[type, frozenset[str]] = {
    **{kind: frozenset({"p"}) for kind in _DROPOUTS},
    nn.MultiheadAttention: frozenset({"dropout"}),
    nn.LSTM: frozenset({"dropout"}),
    nn.GRU: frozenset({"dropout"}),
    nn.RNN: frozenset({"dropout"}),
}
_DYNAMIC = RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError, IndexError


@final
class Fusion:
    """Members' models computed as one.

    Attributes:
        stack: Their weights.
        draws: Their generators.
        sequential: Functions that had to be computed member by member so far.

    Args:
        modules: The members' models. They stay usable: their tensors are views of the stack.
        groups: Parameter names by group of the optimizer.
        seeds: A seed for each member's generator; default: their numbers.
        channels_last: Whether images lie so in memory where a member is alone.

    Raises:
        Unsupported: The models can't be fused; the text is the reason.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        groups: Sequence[Sequence[str]] | None = None,
        seeds: Sequence[int] | None = None,
        channels_last: bool = False,
    ) -> None:
        if not modules:
            raise Unsupported("There is nothing to fuse: no members.")
        reason = next(filter(None, map(unfusable, modules)), None)
        if reason is not None:
            raise Unsupported(reason)
        self._own = [_attributes(module) for module in modules]
        self._template = _skeleton(modules[0])
        self.stack = Stack(modules, groups)
        numbers = range(len(modules)) if seeds is None else seeds
        device = self.stack.flat.device  # masks are drawn where they are used
        made = [torch.Generator(device).manual_seed(seed) for seed in numbers]
        self.draws = Draws(made, channels_last=channels_last)
        self.sequential: set[str] = set()
        self._training = True
        self._tune()

    def __len__(self) -> int:
        return len(self.stack)

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of all members."""
        self._training = mode
        for module in self.stack.modules:
            module.train(mode)
        self._template.train(mode)

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        stacked: Sequence[bool] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Any:
        """``function(model, *args)`` for all members at once.

        Args:
            function: As for one member; it sees one member's shapes.
            args: Tensors, or tuples, lists and dicts of them.
            stacked: Which of them have a leading member dimension; the others are shared. Default: all.
            rows: Only these members, on a copy of their weights that gradients flow through; default: all.

        Returns:
            What the function returns, tensors with the member dimension first.

        Raises:
            Unsupported: The function does what can't be fused (asks for a tensor's value, ...).
        """
        count = len(self) if rows is None else len(rows)
        members = Members(self.draws if rows is None else self.draws.part(rows))
        flags = (True,) * len(args) if stacked is None else stacked
        # What has no rule of ours would draw from torch's own generator: no member's numbers, so it must not.
        members.level = functorch._vmap_increment_nesting(count, "error")
        try:
            given = [
                pytree.tree_map_only(Tensor, members.wrap, arg) if flag else arg
                for arg, flag in zip(args, flags, strict=True)
            ]
            with self._dressed(members, rows) as put, masks_as_given(), members:
                try:
                    result = function(self._template, *given)
                except _DYNAMIC as error:
                    raise _reason(error, self._numbers) from error
                self._collect(members, put, rows)
            leaves, spec = pytree.tree_flatten(result)
            out = [
                functorch._remove_batch_dim(leaf, members.level, count, 0)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
        finally:
            functorch._vmap_decrement_nesting()
            self.sequential |= members.sequential
        return pytree.tree_unflatten(out, spec)

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """The gradient of each leaf of the stack; None for one the losses don't depend on.

        The losses are summed: every member gets the gradient it gets alone. A mean would scale all of them down
        by the number of members, and change it whenever a member leaves.
        """
        each = torch.ones_like(losses)  # a sum that nobody reads need not be computed
        return list(torch.autograd.grad(losses, self.stack.leaves, each, allow_unused=True))

    # ------------------------------------------------------------ members come and go

    def keep(self, members: Sequence[int]) -> list[nn.Module]:
        """Go on with these members; returns the models of the others, standing on their own."""
        gone = self.stack.keep(members)
        self.draws = self.draws.part(members)
        self._own = [self._own[i] for i in members]
        self._tune()
        return gone

    def add(self, modules: Sequence[nn.Module], seeds: Sequence[int]) -> None:
        """Take more members in."""
        own = [_attributes(module) for module in modules]
        _differences([*self._own, *own])
        self.stack.add(modules)
        more = [torch.Generator(self.stack.flat.device).manual_seed(seed) for seed in seeds]
        self.draws = Draws([*self.draws.generators, *more], channels_last=self.draws.channels_last)
        self._own += own
        for module in modules:
            module.train(self._training)
        self._tune()

    # ------------------------------------------------------------ inside

    def _tune(self) -> None:
        """Settings in which members differ (dropout rates) go into the template as one value per member."""
        self._numbers: list[tuple[nn.Module, str, Tensor, PerMember]] = []
        self._rates: list[tuple[nn.Module, str, PerMember]] = []
        submodules = dict(self._template.named_modules(remove_duplicate=False))
        differences = _differences(self._own)
        for path, facts in self._own[
            0
        ].items():  # a number in which those that are left agree is theirs again
            for name, value in facts.items():
                if type(value) is float and (path, name) not in differences:
                    setattr(submodules[path], name, value)
        for (path, name), values in differences.items():
            module = submodules[path]
            if name in _PER_MEMBER.get(_kind(module), ()):
                self._rates.append((module, name, PerMember(values)))
                setattr(module, name, self._rates[-1][2])
            else:
                numbers = torch.tensor(values, dtype=torch.float64, device=self.stack.flat.device)
                self._numbers.append((module, name, numbers, PerMember(values)))
        for path, facts in self._own[0].items():
            for name in _PER_MEMBER.get(_kind(submodules[path]), ()):
                if len({own[path][name] for own in self._own}) == 1:
                    setattr(submodules[path], name, facts[name])
        self._places = [
            (_holder(submodules, name), name.rpartition(".")[2], name) for name, _ in self.stack.tensors
        ]
        self._recurrent = [m for m in submodules.values() if isinstance(m, nn.RNNBase)]

    @contextmanager
    def _dressed(self, members: Members, rows: Sequence[int] | None) -> Iterator[list[Tensor]]:
        """The template with the members' tensors in the places of its own."""
        index = None if rows is None else torch.tensor(list(rows), device=self.stack.flat.device)
        tensors = self.stack.tensors
        # One tensor for all names of a tied weight: whoever goes through the parameters is to meet it once.
        single = {
            id(stacked): members.wrap(stacked if index is None else stacked.index_select(0, index))
            for stacked in dict.fromkeys(stacked for _, stacked in tensors)
        }
        put = [single[id(stacked)] for _, stacked in tensors]
        for (place, key, _), tensor in zip(self._places, put, strict=True):
            place[key] = tensor
        for recurrent in self._recurrent:  # they keep their weights in a second place
            names = recurrent._flat_weights_names
            recurrent.__dict__["_flat_weights"] = [recurrent._parameters.get(name) for name in names]
        for module, name, numbers, own in self._numbers:
            wrapped = members.wrap(numbers if index is None else numbers.index_select(0, index))
            members.settings.append((wrapped, own if rows is None else own.part(rows)))
            module.__dict__[name] = wrapped
        for module, name, rates in self._rates if rows is not None else ():
            module.__dict__[name] = rates.part(rows or ())
        try:
            yield put
        finally:
            for place, key, _ in self._places:
                place[key] = None
            for recurrent in self._recurrent:
                recurrent.__dict__["_flat_weights"] = []
            for module, name, _, own in self._numbers:
                module.__dict__[name] = own.values[0]
            for module, name, rates in self._rates if rows is not None else ():
                module.__dict__[name] = rates

    def _collect(self, members: Members, put: list[Tensor], rows: Sequence[int] | None) -> None:
        """Buffers that the forward replaced instead of updating in place; with copies, whatever it changed."""
        parameters = len(put) - sum(map(len, self.stack._buffers))
        tied = {name for names in self.stack._buffers if len(names) > 1 for name in names}
        targets = self.stack.tensors
        for at, ((place, key, name), tensor) in enumerate(zip(self._places, put, strict=True)):
            now = place[key]
            if rows is None and (at < parameters or now is tensor):
                continue
            if name in tied and now is not tensor:
                raise Unsupported(f"the forward replaces the buffer {name}, which has other names, too")
            # Batch norm changes its statistics without leaving a mark, all that changes weights leaves one.
            if at < parameters and not members.below(now)[0]._version:
                continue
            if not isinstance(now, Tensor) or now.shape != tensor.shape:
                raise Unsupported(f"the buffer {name} changes its shape while training")
            stacked, dim = members.below(now.detach())
            own = stacked if dim is None else stacked.movedim(dim, 0)
            target = targets[at][1]
            with torch.no_grad():
                if rows is None:
                    target.copy_(own)
                else:
                    for row, value in zip(rows, own.expand(len(rows), *now.shape), strict=True):
                        target.data[row].copy_(value)


def _holder(submodules: dict[str, nn.Module], name: str) -> dict[str, Any]:
    path, _, key = name.rpartition(".")
    module = submodules[path]
    found: Any = module._parameters if key in module._parameters else module._buffers
    return found  # type: ignore[no-any-return]


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of the structure without the weights.

    Raises:
        Unsupported: It can't be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = None
    try:
        made = copy.deepcopy(module, memo)
    except _DYNAMIC as error:  # it holds a tensor that was computed, a lock, ...
        text = str(error).strip().split("\n")[0]
        raise Unsupported(f"the model can't be copied: {type(error).__name__}: {text}") from error
    # deepcopy takes a None out of the memo for "not there yet": put the places back empty.
    for ours, theirs in zip(made.modules(), module.modules(), strict=True):
        ours._parameters = dict.fromkeys(theirs._parameters)
        ours._buffers = dict.fromkeys(theirs._buffers)
        if isinstance(ours, nn.RNNBase):
            ours.__dict__["_flat_weights"] = []
    return made


def unfusable(module: nn.Module) -> str | None:
    """Why a model can't be fused with any other, as far as a look at it tells; None: it may be."""
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            return f"{path or 'the model'} is a TorchScript module"
        if hasattr(layer, "_orig_mod"):
            return f"{path or 'the model'} is compiled; make the plain one"
    for path, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            return f"{path} is complex, and fused optimizers take real numbers"
    views = overlapping(module)
    if views is not None:
        return f"{views} share memory without being one parameter"
    hooked = _hooked(module)
    return None if hooked is None else f"{hooked} has hooks, which would see all members at once"


def _hooked(module: nn.Module) -> str | None:
    """The first layer or parameter with hooks; a twin's own multipliers are right for all members at once."""
    for path, sub in module.named_modules():
        before: Any = sub._forward_pre_hooks
        if path and before and len(_factors(sub)) == len(before):
            before = None
        if sub._forward_hooks or before or sub._backward_hooks or sub._backward_pre_hooks:
            return path or type(module).__name__
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return path
    return None


def _factors(module: nn.Module) -> tuple[float, ...]:
    """What a twin multiplies the inputs of this layer by."""
    return tuple(hook.factor for hook in module._forward_pre_hooks.values() if isinstance(hook, Multiply))


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What each submodule holds beside parameters, buffers and submodules."""
    return {
        path: {
            "": _kind(sub),
            "multipliers": _factors(sub),
            **{
                key: value
                for key, value in vars(sub).items()
                if key not in _INTERNAL and not key.endswith("_hooks")
            },
        }
        for path, sub in module.named_modules()
    }


def _kind(module: nn.Module) -> type:
    """The class of a layer; torch makes another one for every layer that is parametrized (weight norm, ...)."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _differences(own: Sequence[dict[str, dict[str, Any]]]) -> dict[tuple[str, str], list[float]]:
    """Settings whose numbers differ between members.

    Raises:
        Unsupported: Members differ in something that is not a number.
    """
    first = own[0]
    found: dict[tuple[str, str], list[float]] = {}
    for number, other in enumerate(own[1:], 1):
        if other.keys() != first.keys():
            raise Unsupported(f"members differ in their layers: {sorted(other.keys() ^ first.keys())}")
        for path, facts in first.items():
            if other[path].keys() != facts.keys():
                odd = sorted(other[path].keys() ^ facts.keys())
                raise Unsupported(f"members differ in what {path or 'the model'} holds: {odd}")
            for name, value in facts.items():
                theirs = other[path][name]
                if (path, name) in found or _equal(value, theirs):
                    continue
                if not name:
                    where = path or "the model"
                    raise Unsupported(
                        f"members differ in the code of {where}, a {value.__name__}, or in the values from around it"
                        if value.__qualname__ == theirs.__qualname__
                        else f"members differ in {where}: a {value.__name__} in member 0, a {theirs.__name__} in "
                        f"member {number}"
                    )
                where = f"{path}.{name}" if path else name
                kind = facts[""]
                if type(value) is not float or type(theirs) is not float:
                    raise Unsupported(
                        f"members differ in {where}: {_brief(value)} in member 0, {_brief(theirs)} in member {number}"
                    )
                if kind.__module__.startswith("torch.nn") and name not in _PER_MEMBER.get(kind, ()):
                    raise Unsupported(
                        f"members differ in {where} of a {kind.__name__}: {value!r} and {theirs!r}"
                    )
                found[path, name] = []
    return {key: [float(o[key[0]][key[1]]) for o in own] for key in found}


def _brief(value: Any) -> str:
    """A value in an error's text: of a tensor or a long list its beginning."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


_Pairs: TypeAlias = frozenset[tuple[int, int]]


def _equal(a: Any, b: Any, seen: _Pairs = frozenset()) -> bool:
    """Whether two members hold the same: by value, or by what is in it; ``seen``: pairs that are being compared."""
    if a is b or (id(a), id(b)) in seen:
        return True
    within = seen | {(id(a), id(b))}
    if isinstance(a, type):
        return isinstance(b, type) and _same_class(a, b, within)
    if not _same_class(type(a), type(b), within) or isinstance(a, nn.Module):
        return False
    if isinstance(a, Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_equal(x, y, within) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key], within) for key, value in a.items())
    try:
        if bool(a == b):
            return True
    except Exception:  # an array says so of each of its numbers, others don't like to be compared
        if hasattr(a, "__array__") and hasattr(a, "tobytes"):
            return (a.shape, a.dtype) == (b.shape, b.dtype) and bool((a == b).all())
    if callable(a) and hasattr(a, "__code__") and hasattr(b, "__code__"):
        return _same_code(a, b, within)
    # Plain objects of one kind (a torch generator, a lock, a config) are compared by what they hold.
    return bool(getattr(a, "__dict__", None)) and _equal(vars(a), vars(b), within)


def _same_class(a: type, b: type, seen: _Pairs) -> bool:
    """Whether two classes are one, or what one ``class`` statement made when it ran twice (in every trial)."""
    if a is b:
        return True
    named = (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
    if not named or len(a.__bases__) != len(b.__bases__) or vars(a).keys() != vars(b).keys():
        return False
    if not all(
        _same_class(mine, theirs, seen) for mine, theirs in zip(a.__bases__, b.__bases__, strict=True)
    ):
        return False
    within = seen | {(id(a), id(b))}
    for name, mine in vars(a).items():
        theirs = vars(b)[name]
        for kind in ("__func__", "fget"):  # of class methods, static methods and properties
            mine, theirs = getattr(mine, kind, mine), getattr(theirs, kind, theirs)
        same = (_same_code if hasattr(mine, "__code__") else _equal)(mine, theirs, within)
        if not same and name not in ("__dict__", "__weakref__"):
            return False
    return True


def _same_code(a: Any, b: Any, seen: _Pairs) -> bool:
    """Whether two functions do the same, with the same values from around them (their class, for ``super``)."""
    if getattr(b, "__code__", None) != a.__code__:
        return False
    around = (a.__defaults__, b.__defaults__), (a.__kwdefaults__, b.__kwdefaults__)
    cells = zip(_contents(a), _contents(b), strict=True)
    return all(_equal(mine, theirs, seen) for mine, theirs in (*around, *cells))


def _contents(function: Any) -> Iterator[Any]:
    """What a function takes from around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing yet
            yield None


def _reason(error: BaseException, numbers: Sequence[tuple[nn.Module, str, Tensor, PerMember]]) -> Exception:
    if isinstance(error, Unsupported):
        return error
    text = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
    if "randomness error mode" in text:
        text = "it draws random numbers by a function that has no generator for each of them"
    elif numbers and ("calling .item()" in text or "data-dependent control flow" in text):
        odd = ", ".join(sorted({f"{name} of a {type(module).__name__}" for module, name, *_ in numbers}))
        text = f"members differ in {odd}, and the forward asks for a number (as in `if self.p > 0`): {text}"
    return Unsupported(f"the forward can't be computed for all members at once: {text}")
