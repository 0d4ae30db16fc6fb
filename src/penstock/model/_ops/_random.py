"""Dropout and other random functions of many members: each draws from its own generator what it draws alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, refuse, rule


def rates(members: Members, p: float | Tensor) -> tuple[float, ...]:
    """The members' dropout rates."""
    if isinstance(p, Tensor) and members.front(p) is not None:
        for setting, own in members.settings:
            if setting is p:
                return own.values
        # A recorded step keeps its rates, so one that is computed in it (an annealed one) can't be read off.
        raise refuse("a dropout rate that differs between members is computed in the forward, not set before")
    return p.values if isinstance(p, PerMember) else (float(p),) * members.count


def dropped(members: Members, x: Tensor, p: float | Tensor) -> Tensor:
    """Stacked activations, members first, after dropout."""
    own = rates(members, p)
    if max(own) <= 0.0:
        return x
    return x * members.draws.noise(x, own)


@rule(F.dropout)
def _dropout(
    members: Members, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training:
        return input
    if inplace and max(rates(members, p)) > 0.0:
        own = _writable(members, input)
        own.mul_(members.draws.noise(own, rates(members, p)))
        return input
    return members.wrap(dropped(members, members.spread(input), p))


def _writable(members: Members, x: Tensor) -> Tensor:
    """The stacked tensor of a function that works in place, members first: who holds it sees the result."""
    stacked = members.front(x)
    if stacked is None:
        raise refuse("a dropout in place writes into a tensor that all members share")
    return stacked


@rule(torch.dropout)
def _plain_dropout(members: Members, input: Tensor, p: float, train: bool) -> Any:
    return _dropout(members, input, p, train)


def _feature_dropout(rank: int) -> Callable[..., Any]:
    def drop(
        members: Members, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training:
            return input
        own = rates(members, p)
        if inplace and max(own) > 0.0:
            plain = drop(members, input, p)
            _writable(members, input).copy_(members.spread(plain))
            return input
        if input.dim() != rank + 2:
            each = members.wrap(torch.tensor(own, dtype=torch.float64))
            return members.each(_PLAIN[rank], (input, each, training), {}, random=True)
        stacked, at = members.below(input)
        x = members.spread(input)
        if max(own) <= 0.0:
            return input
        noise = members.draws.noise(x, own, shape=(*input.shape[:2], *(1,) * rank))
        if at is None:
            return members.wrap(x * noise)
        return members.wrap(stacked * noise.movedim(0, at), at)

    return drop


_PLAIN: dict[int, Any] = {1: F.dropout1d, 2: F.dropout2d, 3: F.dropout3d}
for _rank, _function in _PLAIN.items():
    rule(_function)(_feature_dropout(_rank))


def _drawing(function: Any) -> Callable[..., Any]:
    """A function that returns random numbers: one call per member, each from the member's generator."""

    def draw(members: Members, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:
            raise refuse(
                f"{function.__name__} draws from a generator of the model's own, which fused members would share"
            )
        if any(isinstance(arg, PerMember) for arg in (*args, *kwargs.values())):
            raise refuse(f"{function.__name__} is called with a rate that differs between members")
        return members.each(function, args, kwargs, random=True)

    return draw


def _filling(function: Any) -> Callable[..., Any]:
    """A method that fills a tensor with random numbers in place."""

    def fill(members: Members, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stacked = members.front(x)
        if stacked is None:
            raise refuse(
                f"{function.__name__} fills a tensor that all members share; draw with torch.rand or rand_like instead"
            )
        if kwargs.get("generator") is not None:
            raise refuse(f"{function.__name__} draws from a generator of the model's own")
        strides = members.draws.strides(stacked)
        for member in range(members.count):
            own = stacked[member]
            # Alone it has no gaps for the others in it, and where there are any torch draws in another order.
            filled = torch.empty_strided(own.shape, strides, dtype=own.dtype, device=own.device)
            with members.draws.lend(member):
                own.copy_(function(filled, *args, **kwargs))
        return x

    return fill


for _function in (
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.bernoulli,
    torch.normal,
    torch.multinomial,
    torch.poisson,
    torch.rrelu,
    Tensor.bernoulli,
    Tensor.multinomial,
    F.alpha_dropout,
    F.feature_alpha_dropout,
):
    rule(_function)(_drawing(_function))

for _function in (
    Tensor.bernoulli_,
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.exponential_,
    Tensor.random_,
    Tensor.geometric_,
    Tensor.cauchy_,
    Tensor.log_normal_,
):
    rule(_function)(_filling(_function))
