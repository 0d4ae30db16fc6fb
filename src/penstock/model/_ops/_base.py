"""The mode under which a fused call runs: torch's vmap does what we have no rule for, our rules do the rest.

A tensor inside a fused call is a functorch batched tensor: it looks like one member's, and the stacked tensor of
all members lies below it, with the member dimension anywhere. A rule gets the call as one member would make it,
takes the stacked tensors out, computes on them with ordinary operations (which autograd records) and wraps the
result up again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch.overrides import TorchFunctionMode

from penstock.core.errors import Unsupported
from penstock.model._ops._draws import Draws

Rule: TypeAlias = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""Our batching rules by torch function. A rule that returns NotImplemented leaves the call to vmap."""

_OPEN: dict[Any, Callable[..., Any]] = {}
_FUNCTIONAL = F.__name__


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for the given torch functions."""

    def register(found: Rule) -> Rule:
        for function in functions:
            RULES[function] = found
        return found

    return register


@final
class PerMember(float):
    """A number that differs between members where a layer expects one; rules read ``values``."""

    values: tuple[float, ...]

    def __new__(cls, values: Iterable[float]) -> PerMember:
        """As a plain number it is the largest: torch's layers ask whether there is anything to drop."""
        numbers = tuple(float(value) for value in values)
        made = super().__new__(cls, max(numbers))
        made.values = numbers
        return made

    def part(self, members: Iterable[int]) -> PerMember:
        """That of some members."""
        return PerMember([self.values[member] for member in members])


@final
class Members(TorchFunctionMode):
    """One fused call: how many members there are, at which vmap level, and where they draw random numbers.

    Attributes:
        count: Members.
        level: The vmap level of the call.
        draws: The members' generators.
        sequential: Functions that were computed member by member, because neither we nor vmap have a rule.
        settings: Numbers of the model in which members differ, as the forward sees them, with their values.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.count = draws.count
        self.level = 0
        self.draws = draws
        self.sequential: set[str] = set()
        self.settings: list[tuple[Tensor, PerMember]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply our rule, or let vmap have the call."""
        given = kwargs or {}
        found = RULES.get(func)
        if found is not None and functorch.maybe_current_level() == self.level:
            saved = functorch.pop_dynamic_layer_stack()  # rules compute on the stacked tensors, outside vmap
            try:
                result = found(self, *args, **given)
            finally:
                functorch.push_dynamic_layer_stack(saved)
            if result is not NotImplemented:
                return result
        opened = _OPEN.get(func, func)
        if opened is func:
            opened = _open(func)
        if opened is not None:
            with self:
                return opened(*args, **given)
        return func(*args, **given)

    # ------------------------------------------------------------ for rules

    def below(self, x: Tensor) -> tuple[Tensor, int | None]:
        """The stacked tensor below ``x`` and its member dimension; ``x`` itself and None if it has none."""
        return functorch._unwrap_batched(x, self.level)

    def front(self, x: Tensor) -> Tensor | None:
        """The stacked tensor with members first, or None if all members share ``x``."""
        stacked, at = self.below(x)
        if at is None:
            return None
        return stacked if at == 0 else stacked.movedim(at, 0)

    def spread(self, x: Tensor) -> Tensor:
        """The stacked tensor with members first; a shared one is repeated without a copy."""
        found = self.front(x)
        return x.unsqueeze(0).expand(self.count, *x.shape) if found is None else found

    def wrap(self, x: Tensor, at: int = 0) -> Tensor:
        """A stacked tensor as one member sees it."""
        return functorch._add_batch_dim(x, at, self.level)

    def each(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, random: bool = False
    ) -> Any:
        """Member by member: the floor for single functions. ``random`` lets each draw from its own generator."""
        from torch.utils import _pytree as pytree

        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        below = [self.below(leaf) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
        plain = [at is not None and self.draws.contiguous(leaf.movedim(at, 0)) for leaf, at in below]
        results = []
        for member in range(self.count):
            own = [leaf if at is None else leaf.select(at, member) for leaf, at in below]
            if random:  # in the order in which it lies alone
                own = [
                    leaf.contiguous() if isinstance(leaf, Tensor) and flat else leaf
                    for leaf, flat in zip(own, plain, strict=True)
                ]
            a, k = pytree.tree_unflatten(own, spec)
            if random:
                with self.draws.lend(member):
                    results.append(func(*a, **k))
            else:
                results.append(func(*a, **k))
        self.sequential.add(getattr(func, "__name__", repr(func)))
        flat = [pytree.tree_flatten(result) for result in results]
        joined = [
            self.wrap(torch.stack(column)) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*(leaves for leaves, _ in flat), strict=True)
        ]
        return pytree.tree_unflatten(joined, flat[0][1])


def _never(*_: Any) -> bool:
    return False


def _open(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch.nn.functional whose body runs under the mode.

    Such a function hands itself to the mode before its first line, so calling it from there would never get to
    the linear layers and dropouts inside. The copy leaves that question out.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ != _FUNCTIONAL:
        return None
    if not {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"} & set(
        func.__code__.co_names
    ):
        return None
    names = dict(F.__dict__)
    names.update(
        has_torch_function=_never, has_torch_function_unary=_never, has_torch_function_variadic=_never
    )
    made = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    _OPEN[func] = made
    return made


def refuse(reason: str) -> Unsupported:
    """The error that sends a group to the floor, with the reason."""
    return Unsupported(reason)
