"""Executors: where placements run."""

from penstock.execute._base import Executor, Job, Launch
from penstock.execute._local import Local
from penstock.execute._ray import Ray
from penstock.execute._ship import pack
from penstock.execute._simulated import Simulated

__all__ = ["Executor", "Job", "Launch", "Local", "Ray", "Simulated", "pack"]
