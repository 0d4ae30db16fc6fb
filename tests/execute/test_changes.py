"""Trials on several devices of the local executor: what is kept for a change, and who ends with whom."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from penstock.core import Ended, Reported, Resized, Share, TrialStatus
from penstock.execute import Job, Local, _crew
from penstock.testing.executors import DEADLINE_S, Drive, segment

pytestmark = pytest.mark.faults


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    opened: list[Local] = []

    def build(work: Any, slots: int = 2) -> Drive:
        executor = Local(slots)
        executor.open(Job(work, tmp_path, ("loss",), meter=False))
        opened.append(executor)
        return Drive(executor)

    yield build
    for executor in opened:
        executor.close()


@pk.elastic(max_devices=3)
def waits(run: pk.Run) -> None:
    """Waits in its second epoch for the file ``config["go"]``."""
    for epoch in run.epochs():
        while epoch == 1 and not os.path.exists(run.config.get("go", "/")):
            time.sleep(0.01)
        time.sleep(run.config.get("s", 0.0))
        run.save(epoch)
        run.report(loss=1.0, pid=os.getpid())


def free(drive: Drive) -> dict[str, float]:
    return {each.device.id: each.fraction for each in drive.executor.free() if each.fraction}


def test_what_is_kept_for_a_change_stays_so_when_a_neighbour_ends(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """Half of a device is kept for one trial, a trial on the other half ends: half is free, not all of it."""
    drive = make(waits)
    go, later = str(tmp_path / "go"), str(tmp_path / "later")
    spreads, ends = segment(0, until=3, config={"go": later}), segment(1, until=2, config={"go": go})
    drive.submit([spreads, ends])
    drive.start([spreads], [Share("cpu:0")], max_devices=2)
    drive.start([ends], [Share("cpu:1", 0.5)])
    drive.until(lambda: bool(drive.reports(0) and drive.reports(1)))
    drive.executor.resize(0, [Share("cpu:0"), Share("cpu:1", 0.5)])
    assert free(drive) == {}
    Path(go).touch()
    drive.finish(1)
    assert free(drive) == {"cpu:1": 0.5}
    Path(later).touch()
    drive.finish(2)
    drive.until(lambda: free(drive) == {"cpu:0": 1.0, "cpu:1": 1.0})


def test_a_trial_that_was_told_to_stop_is_not_changed_instead(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    drive = make(waits)
    work = segment(0, until=4, config={"go": str(tmp_path / "go")})
    drive.submit([work])
    drive.start([work], [Share("cpu:0")], max_devices=2)
    drive.until(lambda: bool(drive.reports(0)))
    drive.executor.stop([0], reason="drained", keep=True)
    drive.executor.resize(0, [Share("cpu:0"), Share("cpu:1")])
    (tmp_path / "go").touch()
    drive.finish(1)
    ended = drive.ended(0)
    assert (ended.status, ended.reason, ended.kept) == (TrialStatus.PAUSED, "drained", True)
    assert not any(isinstance(event, Resized) for event in drive.events)


def test_the_order_to_change_follows_a_trial_that_another_worker_takes_over(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """It was queued behind a long one and told to spread; an idle device takes it meanwhile."""
    drive = make(waits, slots=3)
    drive.queue = [segment(number, until=1, config={"s": 0.001}) for number in range(9)]
    drive.submit(drive.queue)
    drive.finish(9)  # by now the executor queues trials behind each other
    one, two, _ = (Share(each.device.id) for each in drive.executor.free())
    long = segment(10, until=2, config={"go": str(tmp_path / "go")})
    queued = segment(11, until=6, config={"s": 0.05})
    drive.submit([long, queued])
    drive.start([long], [one], max_devices=3)
    drive.start([queued], [one], max_devices=3)
    drive.executor.resize(11, [one, two])
    drive.until(lambda: bool(drive.reports(11)))
    (tmp_path / "go").touch()
    drive.finish(11)
    assert [event.shares for event in drive.of(11) if isinstance(event, Resized)] == [(one, two)]
    assert [report.epoch for report in drive.reports(11)] == [1, 2, 3, 4, 5, 6]


def test_long_messages_to_a_crew_leave_no_file_behind(make: Callable[..., Drive], tmp_path: Path) -> None:
    drive = make(waits)
    work = segment(0, until=2, config={"text": "x" * 10**6})
    drive.submit([work])
    drive.start([work], [Share("cpu:0"), Share("cpu:1")], max_devices=2)
    drive.finish(1)
    drive.until(lambda: len(free(drive)) == 2)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    assert list((tmp_path / "spilled").iterdir()) == []


def test_a_worker_that_dies_before_it_has_begun_is_replaced_in_a_crew(make: Callable[..., Drive]) -> None:
    """Here an idle one, of whose death nobody has heard: the trial is not lost, for nothing of it was."""
    drive = make(waits)
    work = [segment(number, until=1) for number in range(3)]
    drive.submit(work)
    for number, device in enumerate(("cpu:0", "cpu:1")):
        drive.start([work[number]], [Share(device)])
    drive.finish(2)
    pids = {int(event.metrics["pid"]) for event in drive.events if isinstance(event, Reported)}
    pidfd = os.pidfd_open(min(pids))
    try:
        os.kill(min(pids), signal.SIGKILL)
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
    finally:
        os.close(pidfd)
    drive.start([work[2]], [Share("cpu:0"), Share("cpu:1")], max_devices=2)
    drive.finish(3)
    assert (drive.ended(2).status, drive.ended(2).lost) == (TrialStatus.COMPLETED, False)
    assert len([event for event in drive.events if isinstance(event, Ended)]) == 3


def test_the_order_to_stop_follows_a_crew_whose_lead_dies_before_it_has_begun(
    make: Callable[..., Drive],
) -> None:
    """It was told to one of whose death nobody had heard, and another takes its place."""
    drive = make(waits)
    work = [segment(0, until=1), segment(1, until=1), segment(2, until=4)]
    drive.submit(work)
    for number, device in enumerate(("cpu:0", "cpu:1")):
        drive.start([work[number]], [Share(device)])
    drive.finish(2)
    for pid in {int(event.metrics["pid"]) for event in drive.events if isinstance(event, Reported)}:
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            assert select.select([pidfd], [], [], DEADLINE_S)[0]
        finally:
            os.close(pidfd)
    drive.start([work[2]], [Share("cpu:0"), Share("cpu:1")], max_devices=2)
    drive.executor.stop([2], reason="too slow")
    drive.finish(3)
    ended = drive.ended(2)
    assert (ended.status, ended.reason) == (TrialStatus.STOPPED, "too slow")
    assert ended.epoch < 4


@pk.elastic(max_devices=3)
def one_dies(run: pk.Run) -> None:
    """One of three dies in its second epoch; the others wait for ever, in no collective operation."""
    for epoch in run.epochs():
        if epoch == 1:
            if run.world.rank == run.config["rank"]:
                print("last words", flush=True)
                os._exit(7)
            time.sleep(1e6)
        run.report(loss=0.0)


@pytest.mark.parametrize("rank", [0, 2])
def test_when_one_worker_of_a_trial_dies_the_others_end(make: Callable[..., Drive], rank: int) -> None:
    """It is told how the one died, and all devices are free."""
    drive = make(one_dies, slots=3)
    work = segment(0, config={"rank": rank})
    drive.submit([work])
    drive.start([work], [Share(f"cpu:{number}") for number in range(3)], max_devices=3)
    drive.finish(1)
    drive.until(lambda: len(free(drive)) == 3)
    ended = drive.ended(0)
    assert (ended.status, ended.lost, ended.epoch) == (TrialStatus.FAILED, True, 1)
    assert "exit code 7" in ended.reason
    assert "last words" in ended.error
    assert len([event for event in drive.events if isinstance(event, Ended)]) == 1


@pk.elastic(max_devices=3)
def one_fails_late(run: pk.Run) -> None:
    """When all epochs are over: one of three fails, one hangs and the lead waits for the file ``config["go"]``."""
    for _ in run.epochs():
        run.report(loss=0.0)
    if run.world.rank == 1:
        raise ValueError("late")
    while run.world.rank == 2 or not os.path.exists(run.config["go"]):
        time.sleep(0.01)


def test_who_hangs_after_another_failed_and_the_lead_ended_well_is_ended(
    make: Callable[..., Drive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial is over, and its device is for the next one."""
    monkeypatch.setattr(_crew, "FAREWELL_S", 1e6)  # however late the lead hears that it may end
    drive = make(one_fails_late, slots=3)
    executor: Any = drive.executor
    work = segment(0, until=1, config={"go": str(tmp_path / "go")})
    drive.submit([work])
    drive.start([work], [Share(f"cpu:{number}") for number in range(3)], max_devices=3)
    drive.until(lambda: bool(executor._failing))
    (tmp_path / "go").touch()
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    [(crew, _)] = executor._parting
    crew._due_s = 0.0
    drive.until(lambda: len(free(drive)) == 3)
