"""Every scheduler keeps the contract."""

from __future__ import annotations

from penstock.schedule import ASHA, PBT, Full, Halving, Hyperband, Scheduler
from penstock.testing.schedulers import SchedulerSuite


class TestFull(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Full(trials=30)


class TestFullWithEpochs(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Full(trials=30, epochs=7)


class TestFullUntilExhausted(SchedulerSuite):
    limit = 37

    def scheduler(self) -> Scheduler:
        return Full()


class TestHalving(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Halving()


class TestHalvingOddSizes(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Halving(max_epochs=50, min_epochs=3, eta=2, trials=23)


class TestHyperband(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return Hyperband(max_epochs=27, iterations=2)


class TestHyperbandUntilExhausted(SchedulerSuite):
    limit = 60

    def scheduler(self) -> Scheduler:
        return Hyperband(max_epochs=10, eta=2, brackets=3, iterations=None)


class TestASHA(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return ASHA()


class TestASHAUntilExhausted(SchedulerSuite):
    limit = 50

    def scheduler(self) -> Scheduler:
        return ASHA(max_epochs=40, min_epochs=3, eta=4, trials=None)


class TestASHABrackets(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return ASHA(trials=60, brackets=3)


class TestPBT(SchedulerSuite):
    def scheduler(self) -> Scheduler:
        return PBT(population=8, max_epochs=25, interval=4)
