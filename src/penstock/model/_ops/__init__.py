"""Batching rules of our own for the functions where vmap is slow, wrong or missing."""

from penstock.model._ops import (
    _attention,
    _conv,
    _embedding,
    _graph,
    _linear,
    _loss,
    _norm,
    _random,
    _recurrent,
)
from penstock.model._ops._base import RULES, Members, PerMember
from penstock.model._ops._draws import Draws

__all__ = [
    "RULES",
    "Draws",
    "Members",
    "PerMember",
    "_attention",
    "_conv",
    "_embedding",
    "_graph",
    "_linear",
    "_loss",
    "_norm",
    "_random",
    "_recurrent",
]
