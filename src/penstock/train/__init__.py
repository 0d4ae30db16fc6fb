"""train."""

from penstock.train._command import Command
from penstock.train._lr_range import LRChoice, choose_lr, find_lr
from penstock.train._run import Run
from penstock.train._task import Data, Task

__all__ = ["Command", "Data", "LRChoice", "Run", "Task", "choose_lr", "find_lr"]
