"""What a training function sees (Run), tasks and their loop, and the worker that calls them."""

from penstock.train._command import Command
from penstock.train._elastic import elastic
from penstock.train._energy_loader import EnergyLoader
from penstock.train._lr_range import LRChoice, choose_lr, find_lr
from penstock.train._profile import Profile, ProfileSample
from penstock.train._run import Run
from penstock.train._task import Data, Task
from penstock.train._world import World

__all__ = [
    "Command",
    "Data",
    "EnergyLoader",
    "LRChoice",
    "Profile",
    "ProfileSample",
    "Run",
    "Task",
    "World",
    "choose_lr",
    "elastic",
    "find_lr",
]
