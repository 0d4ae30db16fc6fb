"""The simulated executor's own: virtual time, costs, determinism."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core import Ended, Placement, Reported, Saved, Share, Started, TrialStatus, to_record
from penstock.core.errors import ExecutorError, InvalidInput
from penstock.execute import Job, Simulated
from penstock.testing.executors import Drive, counts, endless, raises, segment


def opened(executor: Simulated, work: Any = counts, segments: Any = (), **options: Any) -> Drive:
    executor.open(Job(work, Path("nowhere"), ("loss",), **options))
    return Drive(executor, segments)


def test_times_follow_the_cost_model() -> None:
    """Two devices, three trials: closed form."""
    drive = opened(
        Simulated(2, seconds=lambda config, epoch: 1 + config["x"] + epoch / 4),
        segments=[segment(trial, until=2) for trial in range(3)],
    )
    drive.finish(3)
    assert [report.time_s for report in drive.reports(0)] == [1.0, 2.25]
    assert [report.time_s for report in drive.reports(1)] == [2.0, 4.25]
    started = [event.time_s for event in drive.events if isinstance(event, Started)]
    assert started == [0.0, 0.0, 2.25]
    assert drive.ended(2).time_s == 2.25 + 3.0 + 3.25
    assert [report.train_s for report in drive.reports(2)] == [3.0, 3.25]


def test_a_failure_takes_its_epochs_time() -> None:
    drive = opened(Simulated(1, seconds=10.0), raises, [segment()])
    drive.finish(1)
    assert drive.ended(0).time_s == 20.0


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 3.0), (0.5, 6.0), (0.25, 12.0)])
def test_a_fraction_is_proportionally_slower(fraction: float, expected: float) -> None:
    drive = opened(Simulated(1, seconds=1.0))
    drive.submit([segment()])
    drive.start([segment()], [Share("sim:0", fraction)])
    drive.finish(1)
    assert drive.ended(0).time_s == expected


def test_a_cost_of_the_placement_decides_itself() -> None:
    def seconds(config: Any, epoch: int, placement: Placement) -> float:
        return 8.0 / len(placement.shares)

    drive = opened(Simulated(4, seconds=seconds))
    drive.submit([segment(0, until=1), segment(1, until=1)])
    drive.start([segment(0, until=1)], [Share("sim:0", 0.5)])
    drive.start([segment(1, until=1)], [Share("sim:1"), Share("sim:2")])
    drive.finish(2)
    assert (drive.ended(0).time_s, drive.ended(1).time_s) == (8.0, 4.0)


def test_kinds_of_devices() -> None:
    executor = Simulated({"slow": 1, "fast": 2}, seconds=4.0, kinds={"fast": 2.0})
    drive = opened(executor)
    assert [free.device.kind for free in executor.free()] == ["slow", "fast", "fast"]
    drive.submit([segment(trial, until=1) for trial in range(2)])
    drive.start([segment(0, until=1)], [Share("sim:1")])
    drive.start([segment(1, until=1)], [Share("sim:0"), Share("sim:2")])
    drive.finish(2)
    assert (drive.ended(0).time_s, drive.ended(1).time_s) == (2.0, 4.0)


def test_fused_members_end_together() -> None:
    drive = opened(Simulated(1, seconds=lambda config, epoch: 1 + config["x"]))
    members = [segment(trial, until=1 + trial) for trial in range(3)]
    drive.submit(members)
    drive.start(members, [Share("sim:0")])
    drive.finish(3)
    assert {drive.ended(trial).time_s for trial in range(3)} == {
        9.0
    }  # three epochs at the pace of the slowest
    assert [report.time_s for report in drive.reports(0)] == [3.0]
    assert [report.time_s for report in drive.reports(2)] == [3.0, 6.0, 9.0]


def test_the_same_study_gives_the_same_records() -> None:
    def once() -> str:
        drive = opened(
            Simulated(7, seconds=lambda config, epoch: 1 + (config["x"] * 7 % 3), failure=_dies),
            segments=[segment(trial, until=4) for trial in range(40)],
        )
        drive.on_event = drive.retry_lost
        drive.until(lambda: drive.state.counts.completed == 40)
        return json.dumps([to_record(event) for event in drive.events])

    first = once()
    assert first == once()
    assert '"lost": true' in first


def _dies(trial: int, epoch: int, attempt: int) -> bool:
    return attempt == 0 and (trial * 5 + epoch) % 23 == 0


def test_an_injected_death_loses_the_epoch() -> None:
    drive = opened(
        Simulated(1, failure=lambda trial, epoch, attempt: epoch == 2 and attempt == 0),
        segments=[segment(until=4)],
    )
    drive.on_event = drive.retry_lost
    drive.until(lambda: drive.state.counts.completed == 1)
    ends = [event for event in drive.events if isinstance(event, Ended)]
    assert [(end.status, end.lost, end.epoch) for end in ends] == [
        (TrialStatus.FAILED, True, 2),
        (TrialStatus.COMPLETED, False, 4),
    ]
    assert [report.epoch for report in drive.reports(0)] == [1, 2, 3, 4]  # from its checkpoint
    assert drive.ended(0).time_s == 5.0


def test_an_epoch_over_the_limit_times_out() -> None:
    drive = opened(Simulated(1, seconds=60.0), segments=[segment()], timeout_s=5.0)
    drive.finish(1)
    assert drive.ended(0).reason == "no report for 5 s (timeout_s)"
    assert drive.ended(0).time_s == 5.0


def test_poll_moves_the_clock_no_further_than_asked() -> None:
    drive = opened(Simulated(1, seconds=10.0), segments=[segment(until=1)])
    drive.fill()
    drive.poll(4.0)
    assert drive.executor.clock.now_s() == 4.0
    assert not drive.reports(0)
    drive.poll(0)
    assert drive.executor.clock.now_s() == 4.0
    drive.poll(6.0)
    assert [type(event) for event in drive.events] == [Started, Reported, Saved, Ended]
    assert drive.executor.clock.now_s() == 10.0


def test_taking_what_is_not_free_is_an_error() -> None:
    drive = opened(Simulated(1))
    drive.submit([segment(trial) for trial in range(3)])
    drive.start([segment(0)], [Share("sim:0", 0.6)])
    with pytest.raises(ExecutorError, match=r"0.5 of sim:0 .* 0.4 is free"):
        drive.start([segment(1)], [Share("sim:0", 0.5)])
    with pytest.raises(ExecutorError):
        drive.start([segment(1)], [Share("sim:0", 0.4)], exclusive=True)
    with pytest.raises(InvalidInput, match="sim:9"):
        drive.start([segment(1)], [Share("sim:9")])
    drive.finish(1)
    drive.start([segment(1)], [Share("sim:0", 0.5)], exclusive=True)
    with pytest.raises(ExecutorError):
        drive.start([segment(2)], [Share("sim:0", 0.5)])


def test_endless_functions_are_let_on_step_by_step() -> None:
    """And leave no thread behind."""
    before = threading.active_count()
    drive = opened(Simulated(3, seconds=1.0), endless, [segment(trial, until=None) for trial in range(3)])
    drive.until(lambda: len(drive.reports(2)) == 50)
    assert drive.executor.clock.now_s() == 50.0
    drive.executor.stop([0], reason="enough")
    drive.finish(1)
    assert drive.ended(0).epoch == 51
    drive.executor.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: Simulated(0),
        lambda: Simulated(2, seconds=0.0),
        lambda: Simulated(2, seconds=float("nan")),
        lambda: Simulated({"a": 2}, kinds={"b": 2.0}),
        lambda: Simulated({"a": 2}, kinds={"a": 0.0}),
        lambda: Simulated(2, slots_per_trial=3),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Simulated]) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_a_bad_cost_is_named() -> None:
    drive = opened(Simulated(1, seconds=lambda config, epoch: -1.0), segments=[segment()])
    with pytest.raises(InvalidInput, match=r"-1.0.*epoch 0"):
        drive.fill()


def test_it_pickles_as_it_was_made() -> None:
    again = pickle.loads(pickle.dumps(Simulated({"a": 1, "b": 2}, seconds=3.0, kinds={"b": 2.0})))
    assert again.slots == 3
    drive = opened(again, segments=[segment(until=1)])
    drive.finish(1)
    assert drive.ended(0).time_s == 3.0
