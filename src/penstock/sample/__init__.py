"""Samplers: which configuration next."""

from penstock.sample._base import Observation, Sampler
from penstock.sample._random import Random

__all__ = ["Observation", "Random", "Sampler"]
