"""Every executor keeps the contract."""

from __future__ import annotations

from penstock.execute import Executor, Local, Simulated
from penstock.testing.executors import ExecutorSuite


class TestLocal(ExecutorSuite):
    def executor(self, slots: int) -> Executor:
        return Local(slots)


class TestSimulated(ExecutorSuite):
    ships_work = False

    def executor(self, slots: int) -> Executor:
        return Simulated(slots, seconds=0.02)
