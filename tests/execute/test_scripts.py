"""The steps of a simulated trial, from what its training function tells."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.execute._scripts import Eager, Lazy, Script, Step
from penstock.train._worker import End


def report(epoch: int) -> Any:
    return epoch, {"loss": 1.0 / epoch}, None, None


def completed(epoch: int) -> End:
    return End("completed", epoch)


def epochs(steps: list[Step]) -> list[list[int]]:
    return [step.epochs for step in steps]


def test_every_epoch_is_a_step_with_its_news() -> None:
    script = Script()
    script.begin(2)  # it goes on from a checkpoint
    for epoch in (3, 4):
        script.report(report(epoch))
        script.save(epoch, f"{epoch}.ckpt")
    script.close(completed(4))
    assert epochs(script.steps) == [[2], [3]]
    assert [step.saved for step in script.steps] == [[(3, "3.ckpt")], [(4, "4.ckpt")]]
    assert [step.end for step in script.steps] == [None, completed(4)]


def test_epochs_without_a_report_take_their_time_with_the_next() -> None:
    script = Script()
    script.begin(0)
    script.report(report(3))
    script.close(completed(5))
    assert epochs(script.steps) == [[0, 1, 2], [3, 4]]


def test_a_failure_has_taken_the_time_of_the_epoch_it_came_in() -> None:
    script = Script()
    script.begin(0)
    script.report(report(1))
    script.close(End("failed", 1, "why"))
    assert epochs(script.steps) == [[0], [1]]


def test_who_says_nothing_has_one_step() -> None:
    script = Script()
    script.close(completed(0))
    assert epochs(script.steps) == [[]]


@pytest.mark.parametrize("kind", [Eager, Lazy])
def test_both_kinds_give_the_same_steps(kind: type[Eager] | type[Lazy]) -> None:
    def call(sink: Any) -> End:
        for epoch in (1, 2, 3):
            sink.reported(report(epoch))
            sink.told()
        return completed(3)

    source = kind(call, 0)
    steps = [source.next() for _ in range(3)]
    if steps[-1].end is None:
        steps.append(source.next())
    source.quit()
    assert [epoch for step in steps for epoch in step.epochs] == [0, 1, 2]
    assert [r[0] for step in steps for r in step.reports] == [1, 2, 3]
    assert steps[-1].end == completed(3)


def test_a_function_without_an_end_is_let_on_epoch_by_epoch_and_unwound() -> None:
    begun: list[int] = []

    def call(sink: Any) -> End:
        while True:
            begun.append(len(begun) + 1)
            sink.reported(report(begun[-1]))
            if sink.told() is not None:
                return End("stopped", begun[-1])

    source = Lazy(call, 0)
    assert begun == []
    source.next()
    source.next()
    assert begun == [1, 2]
    source.quit()
    assert not source._thread.is_alive()
