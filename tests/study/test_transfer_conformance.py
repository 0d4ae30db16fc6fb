"""The scheduler of surrogates and targets keeps the contract of all schedulers, whatever it wraps."""

from __future__ import annotations

import penstock as pk
from penstock.core import Trial, TrialStatus
from penstock.schedule import ASHA, PBT, Full, Hyperband, Outcome, Rules, Scheduler
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


def test_what_population_based_training_has_made_of_a_configuration_is_transferred_with_what_is_held() -> (
    None
):
    space = pk.Space(lr=pk.Float(0.01, 1), decay=pk.Float(0, 1, transfers=False))
    made: list[Trial] = []

    def propose(n: int) -> list[Trial]:
        made.extend(Trial(i, {"lr": 0.1 * (1 + i), "decay": 0.7}, 0) for i in range(len(made), len(made) + n))
        return made[-n:]

    def derive(config: object, parent: int) -> Trial:
        made.append(Trial(len(made), dict(config), 0, parent))  # type: ignore[call-overload]
        return made[-1]

    asked: list[object] = []

    def allows(config: object) -> bool:
        asked.append(config)
        return True

    inner = PBT(population=4, max_epochs=3, interval=1, resample=1.0)
    scheduler = Transfer(inner, pk.Shrink(8, second=0), held={"decay": 0.7}, epochs=3)
    order = lambda values: sorted(range(len(values)), key=lambda i: values[i])  # noqa: E731
    scheduler.start(Rules(propose, order, space, False, 0, derive=derive, allows=allows))
    trained: dict[int, object] = {}  # the latest configuration of each
    while not scheduler.done:
        group = scheduler.next(4)
        assert group is not None
        for segment in group.segments:
            number = segment.trial.id
            assert segment.trial.config["decay"] == 0.7
            trained[number] = segment.trial.config
            status = TrialStatus.COMPLETED if segment.last else TrialStatus.PAUSED
            if number == 1 and segment.start == 0:  # is replaced by a new trial
                status = TrialStatus.FAILED
            value = (
                9.0 if segment.start == 0 and number == 0 else float(number)
            )  # worst at first, then the best
            values = None if status is TrialStatus.FAILED else (value,)
            scheduler.ended(Outcome(number, status, segment.until or 3, values))
    assert trained[max(trained)] == trained[0] != {"lr": 0.1, "decay": 0.7}
    assert made[-1].parent == 0
    assert asked
    assert all(config["decay"] == 0.7 for config in asked)  # type: ignore[index]
