"""Samplers: which configuration next."""

from penstock.sample._bandit import Belief, Pick, Pruning, ZeusBandit
from penstock.sample._base import Observation, Sampler
from penstock.sample._bayes import Bayes
from penstock.sample._gate import Gate, Verdict
from penstock.sample._grid import Grid
from penstock.sample._limited import Limited
from penstock.sample._optuna import OptunaSampler
from penstock.sample._random import Random
from penstock.sample._tpe import TPE
from penstock.sample._walk import Walk
from penstock.sample._warm import WarmStart

__all__ = [
    "TPE",
    "Bayes",
    "Belief",
    "Gate",
    "Grid",
    "Limited",
    "Observation",
    "OptunaSampler",
    "Pick",
    "Pruning",
    "Random",
    "Sampler",
    "Verdict",
    "Walk",
    "WarmStart",
    "ZeusBandit",
]
