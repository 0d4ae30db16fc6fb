"""The scheduler of surrogates and targets keeps the contract of all schedulers, whatever it wraps."""

from __future__ import annotations

import penstock as pk
from penstock.schedule import ASHA, Full, Hyperband, Scheduler
from penstock.study._transfer import Transfer
from penstock.testing.schedulers import SchedulerSuite


class TestTransferOfFull(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Transfer(Full(trials=20, epochs=5), pk.Shrink(8), epochs=5)


class TestTransferOfASHA(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Transfer(ASHA(max_epochs=9, trials=27), pk.Shrink(8), epochs=9)


class TestTransferOfHyperband(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Transfer(Hyperband(max_epochs=9), pk.Shrink(8, eager=1), epochs=9)
