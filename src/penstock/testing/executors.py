"""The contract of executors as a test suite, and a small driver that runs one without a study.

A test file subclasses ``ExecutorSuite`` and says how to make the executor; pytest finds the rest.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from penstock.core import (
    Checkpoint,
    Ended,
    Event,
    Placement,
    Reported,
    Saved,
    Segment,
    Share,
    Started,
    StudyState,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.core.errors import InvalidInput
from penstock.execute import Executor, Job, Launch
from penstock.train import Run, elastic

DEADLINE_S = 300.0
"""Wall time after which a drive that hangs is given up."""


class Drive:
    """Launches segments as devices are free and keeps all events: a study without decisions."""

    def __init__(self, executor: Executor, segments: Sequence[Segment] = (), fraction: float = 1.0) -> None:
        self.executor = executor
        self.fraction = fraction
        self.queue = list(segments)
        self.events: list[Event] = []
        self.state = StudyState()
        self.submit(self.queue)
        self.on_event: Callable[[Event], None] = lambda event: None
        self.tries: dict[int, int] = {}

    def submit(self, segments: Sequence[Segment]) -> None:
        """Let the state know of segments."""
        self.state.apply(Submitted(0.0, len(segments), tuple(segments)))

    def launch_of(self, placement: Placement) -> Launch:
        """The placement with what the events so far tell of its trials."""
        paths: list[str | None] = []
        known = []
        for segment in placement.segments:
            record = self.state.trials[segment.trial.id]
            own = [epoch for epoch in record.saved if segment.copy_from is None or epoch > segment.start]
            if own:
                paths.append(record.saved[max(own)])
            elif segment.copy_from is not None:
                paths.append(self.state.trials[segment.copy_from.trial].saved[segment.copy_from.epoch])
            else:
                paths.append(None)
            known.append(record.epoch)
        return Launch(placement, tuple(paths), tuple(known))

    def start(
        self, segments: Sequence[Segment], shares: Sequence[Share], leaves: Sequence[int] = (), **options: Any
    ) -> None:
        """Launch one placement."""
        launch = self.launch_of(Placement(tuple(segments), tuple(shares), **options))
        self.executor.launch([replace(launch, leaves=tuple(leaves))])

    def fill(self) -> None:
        """Launch what fits."""
        launches = []
        for free in self.executor.free():
            room = int((free.fraction + 1e-9) / self.fraction)
            room += free.backlog if self.fraction == 1 else 0
            while room and self.queue:
                segment = self.queue.pop(0)
                attempt = self.tries.get(segment.trial.id, 0)
                placement = Placement((segment,), (Share(free.device.id, self.fraction),), attempt=attempt)
                launches.append(self.launch_of(placement))
                room -= 1
        if launches:
            self.executor.launch(launches)

    def poll(self, timeout_s: float | None = 1.0) -> list[Event]:
        """One poll, folded in."""
        events = self.executor.poll(timeout_s)
        for event in events:
            self.events.append(event)
            self.state.apply(event)
            self.on_event(event)
        return events

    def until(self, enough: Callable[[], bool]) -> None:
        """Poll until ``enough()``."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not enough():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Not enough after {DEADLINE_S} s: {self.events[-20:]}")
            self.fill()
            if not self.poll() and not enough():  # with nothing under way a poll doesn't wait
                time.sleep(0.002)

    def finish(self, ends: int) -> list[Event]:
        """Run until ``ends`` segments have ended."""
        self.until(lambda: sum(isinstance(event, Ended) for event in self.events) >= ends)
        return self.events

    def retry_lost(self, event: Event) -> None:
        """An ``on_event`` that runs lost segments again."""
        if isinstance(event, Ended) and event.lost:
            self.tries[event.trial] = self.tries.get(event.trial, 0) + 1
            record = self.state.trials[event.trial]
            self.queue.insert(0, record.segment)
            self.submit([record.segment])

    def of(self, trial: int) -> list[Event]:
        """A trial's events."""
        return [event for event in self.events if getattr(event, "trial", None) == trial]

    def reports(self, trial: int) -> list[Reported]:
        """A trial's reports."""
        return [event for event in self.of(trial) if isinstance(event, Reported)]

    def ended(self, trial: int) -> Ended:
        """A trial's last end."""
        return [event for event in self.of(trial) if isinstance(event, Ended)][-1]


def segment(trial: int = 0, *, until: int | None = 3, last: bool = True, **more: Any) -> Segment:
    """A segment of a trial whose configuration is ``more['config']``."""
    config = {"x": float(trial), **more.pop("config", {})}
    return Segment(Trial(trial, config, seed=1000 + trial), until=until, last=last, **more)


# -- training functions, importable by workers -----------------------------------------------------------


def counts(run: Run) -> None:
    """Keeps a list of the epochs it has done, saved and reported each time."""
    done = run.load() or []
    for epoch in run.epochs():
        done.append((run.trial, epoch))
        run.save(done)
        run.report(loss=run.config["x"] + epoch, first=done[0][0], length=len(done))


def forgets(run: Run) -> None:
    """Saves nothing."""
    for epoch in run.epochs():
        run.report(loss=float(epoch))


def returns_dict(run: Run) -> dict[str, float]:
    """Returns its metrics."""
    return {"loss": run.config["x"], "accuracy": 0.5}


def returns_float(run: Run) -> float:
    """Returns its objective."""
    return float(run.config["x"])


def returns_nothing(run: Run) -> None:
    """Tells nothing."""


def plain_reports(run: Run) -> None:
    """Has no epochs loop and no end."""
    done = run.load() or 0
    try:
        while True:
            done += 1
            run.save(done)
            run.report(loss=1.0 / done)
    except Exception:
        raise AssertionError("the end of a budget must not be catchable by mistake") from None


def merges(run: Run) -> None:
    """Reports twice per epoch."""
    for epoch in run.epochs():
        run.report(loss=1.0, early=float(epoch))
        run.report(loss=2.0, late=float(epoch))


def endless(run: Run) -> None:
    """Goes on until it is stopped."""
    for epoch in run.epochs():
        run.save(epoch + 1)
        run.report(loss=float(epoch))
        time.sleep(run.config.get("pause_s", 0.0))


def breaks(run: Run) -> None:
    """Ends itself early."""
    for epoch in run.epochs():
        run.report(loss=float(epoch))
        if epoch == 1:
            break


def raises(run: Run) -> None:
    """Fails in its second epoch."""
    for epoch in run.epochs():
        if epoch == 1:
            _deep(run.config["x"])
        run.report(loss=0.0)


def _deep(x: float) -> float:
    raise ZeroDivisionError(f"deep trouble with {x}")


def exits(run: Run) -> None:
    """Calls sys.exit."""
    raise SystemExit(3)


def reports_bad(run: Run) -> None:
    """Reports what its configuration says in its second epoch."""
    values: dict[str, Any] = {
        "nan": math.nan,
        "inf": -math.inf,
        "text": "0.5",
        "none": None,
        "list": [1.0],
        "huge": 10**400,
    }
    for epoch in run.epochs():
        try:
            run.report(loss=values[run.config["bad"]] if epoch == 1 else 0.5)
        except Exception:
            raise AssertionError("a bad report must not be catchable by mistake") from None


def reports_other(run: Run) -> None:
    """Leaves the objective out."""
    for _ in run.epochs():
        run.report(accuracy=0.5, speed=3)


def reports_numbers(run: Run) -> None:
    """Reports numbers of many types."""
    import numpy as np

    for _ in run.epochs():
        run.report(
            loss=np.float32(0.5), whole=np.int64(3), zero_d=np.array(0.25), plain=7, ratio=Fraction(1, 8)
        )


def tells_itself(run: Run) -> None:
    """Reports what it knows of itself."""
    for _ in run.epochs(total=2):
        run.report(loss=0.0, trial=run.trial, seed=run.seed, threads=run.threads, devices=len(run.devices))


def stamps(run: Run) -> None:
    """Reports when it runs."""
    for _ in run.epochs():
        begin_s = time.monotonic()
        time.sleep(0.02)
        run.report(loss=0.0, begin_s=begin_s, end_s=time.monotonic())


def runs(pid: int) -> bool:
    """Whether a process of this machine runs; one that is over and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@elastic(max_devices=2)
def one_hangs(run: Run) -> None:
    """Once it has trained, the worker of rank 1 does not end, unless the trial is another one than 0."""
    for epoch in run.epochs():
        run.report(loss=float(epoch))
    if run.world.rank == 1 and run.trial == 0:
        Path(run.config["pid"]).write_text(str(os.getpid()))
        time.sleep(3600)


@elastic(max_devices=2)
def one_fails(run: Run) -> None:
    """One worker of two fails in its third epoch of the first try, while the other waits for its word.

    DistributedDataParallel keeps the group's connections open, so that the other does not see them closed.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    rank = run.world.rank
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    for epoch in run.epochs():
        mark = run.folder / "failed"
        if epoch == 2 and rank == run.config["rank"] and not mark.exists():
            mark.touch()
            raise ValueError(f"rank {rank} alone")
        model(torch.ones(2, 3)).sum().backward()
        run.save(epoch)
        run.report(loss=float(epoch))


@dataclass
class Holder:
    """A callable object with something inside."""

    inside: Any = None
    numbers: list[int] = field(default_factory=list)

    def __call__(self, run: Run) -> float:
        """Train."""
        return float(run.config["x"])


class ExecutorSuite(ABC):
    """What every executor must do."""

    ships_work = True
    """Whether the work goes to other processes (and so must be picklable)."""

    @abstractmethod
    def executor(self, slots: int) -> Executor:
        """A new executor with so many devices."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        """The study's folder."""
        return tmp_path

    @pytest.fixture
    def make(self, files: Path) -> Iterator[Callable[..., Drive]]:
        """Opens executors and closes them."""
        opened: list[Executor] = []

        def build(
            work: Any,
            segments: Sequence[Segment] = (),
            *,
            slots: int = 2,
            fraction: float = 1.0,
            **options: Any,
        ) -> Drive:
            executor = self.executor(slots)
            options.setdefault("metrics", ("loss",))
            executor.open(Job(work, files, **options))
            opened.append(executor)
            return Drive(executor, segments, fraction)

        yield build
        for executor in opened:
            executor.close()

    # -- order ------------------------------------------------------------------------------------------

    def test_events_come_in_order(self, make: Callable[..., Drive]) -> None:
        """Started, then reports and checkpoints by epoch, then one end; times never go back."""
        drive = make(counts, [segment(trial, until=4) for trial in range(7)])
        drive.finish(7)
        assert drive.executor.poll(0) == []
        for trial in range(7):
            events = drive.of(trial)
            kinds = [type(event) for event in events]
            assert kinds == [Started] + [Reported, Saved] * 4 + [Ended]
            assert [event.epoch for event in events[1:-1]] == [1, 1, 2, 2, 3, 3, 4, 4]  # type: ignore[union-attr]
            times = [event.time_s for event in events]
            assert times == sorted(times)
            assert drive.ended(trial).status is TrialStatus.COMPLETED
            assert drive.ended(trial).epoch == 4
            losses = [report.metrics["loss"] for report in drive.reports(trial)]
            assert losses == [trial + epoch for epoch in range(4)]
        drive.state.validate()

    def test_every_report_tells_its_time(self, make: Callable[..., Drive]) -> None:
        """``train_s`` is filled, and no more than passed."""
        drive = make(stamps, [segment(until=3)])
        drive.finish(1)
        events = drive.of(0)
        spans = [report.train_s for report in drive.reports(0)]
        assert all(span is not None and span > 0 for span in spans)
        assert sum(span or 0.0 for span in spans) <= events[-1].time_s - events[0].time_s + 1e-3

    def test_a_segment_that_is_not_the_last_pauses(self, make: Callable[..., Drive]) -> None:
        """PAUSED, not COMPLETED."""
        drive = make(counts, [segment(until=2, last=False)])
        drive.finish(1)
        assert drive.ended(0).status is TrialStatus.PAUSED

    def test_nothing_running_means_no_waiting(self, make: Callable[..., Drive]) -> None:
        """``poll(None)`` answers at once."""
        assert make(counts).executor.poll(None) == []

    # -- budgets and checkpoints ------------------------------------------------------------------------

    def test_promotion_goes_on_from_the_checkpoint(self, make: Callable[..., Drive]) -> None:
        """The second segment starts where the first ended."""
        drive = make(counts, [segment(until=2, last=False)])
        drive.finish(1)
        follow = segment(until=5, start=2)
        drive.submit([follow])
        drive.queue.append(follow)
        drive.finish(2)
        assert [report.epoch for report in drive.reports(0)] == [1, 2, 3, 4, 5]
        assert [report.metrics["length"] for report in drive.reports(0)] == [1, 2, 3, 4, 5]

    def test_a_trial_that_saves_nothing_starts_again(self, make: Callable[..., Drive]) -> None:
        """Its known epochs are reported again; the state takes no notice."""
        drive = make(forgets, [segment(until=2, last=False)])
        drive.finish(1)
        follow = segment(until=4, start=2)
        drive.submit([follow])
        drive.queue.append(follow)
        drive.finish(2)
        assert [report.epoch for report in drive.reports(0)] == [1, 2, 1, 2, 3, 4]
        assert [report.epoch for report in drive.state.trials[0].reports] == [1, 2, 3, 4]
        drive.state.validate()

    def test_a_copy_goes_on_from_the_other_trial(self, make: Callable[..., Drive]) -> None:
        """PBT's exploit: trial 1 takes over the state of trial 0."""
        drive = make(counts, [segment(trial, until=2, last=False) for trial in (0, 1)])
        drive.finish(2)
        follow = segment(1, until=4, start=2, copy_from=Checkpoint(0, 2))
        drive.submit([follow])
        drive.queue.append(follow)
        drive.finish(3)
        assert [report.metrics["first"] for report in drive.reports(1)] == [1, 1, 0, 0]
        assert [report.epoch for report in drive.reports(1)] == [1, 2, 3, 4]

    def test_a_budget_ends_a_function_without_a_loop(self, make: Callable[..., Drive]) -> None:
        """It is left at the report that uses up its budget, and resumes."""
        drive = make(plain_reports, [segment(until=3, last=False)])
        drive.finish(1)
        assert drive.ended(0).status is TrialStatus.PAUSED
        follow = segment(until=5, start=3)
        drive.submit([follow])
        drive.queue.append(follow)
        drive.finish(2)
        assert [report.metrics["loss"] for report in drive.reports(0)] == [1.0 / n for n in range(1, 6)]
        assert drive.ended(0).status is TrialStatus.COMPLETED

    def test_returned_metrics_count_as_one_report(self, make: Callable[..., Drive]) -> None:
        """A dict."""
        drive = make(returns_dict, [segment(trial, until=None) for trial in range(3)])
        drive.finish(3)
        for trial in range(3):
            assert [(r.epoch, dict(r.metrics)) for r in drive.reports(trial)] == [
                (1, {"loss": trial, "accuracy": 0.5})
            ]
            assert drive.ended(trial).status is TrialStatus.COMPLETED

    def test_a_returned_number_is_the_objective(self, make: Callable[..., Drive]) -> None:
        """A float."""
        drive = make(returns_float, [segment(4, until=None)])
        drive.finish(1)
        assert [dict(report.metrics) for report in drive.reports(4)] == [{"loss": 4.0}]

    def test_a_returned_number_is_not_enough_for_two_objectives(self, make: Callable[..., Drive]) -> None:
        """It fails with what to return."""
        drive = make(returns_float, [segment(4, until=None)], metrics=("loss", "latency_s"))
        drive.finish(1)
        assert drive.ended(4).status is TrialStatus.FAILED
        assert "latency_s" in drive.ended(4).reason

    def test_several_reports_in_an_epoch_are_one(self, make: Callable[..., Drive]) -> None:
        """The later value wins."""
        drive = make(merges, [segment(until=2)])
        drive.finish(1)
        assert [dict(report.metrics) for report in drive.reports(0)] == [
            {"loss": 2.0, "early": epoch, "late": epoch} for epoch in (0.0, 1.0)
        ]

    def test_a_function_may_end_itself(self, make: Callable[..., Drive]) -> None:
        """It is complete, and the epoch it left counts."""
        drive = make(breaks, [segment(until=9, last=False)])
        drive.finish(1)
        assert [report.epoch for report in drive.reports(0)] == [1, 2]
        assert drive.ended(0).status is TrialStatus.COMPLETED
        assert drive.ended(0).epoch == 2

    def test_a_function_knows_its_trial(self, make: Callable[..., Drive]) -> None:
        """Number, seed, threads, devices; ``total`` limits a loop without a budget."""
        drive = make(tells_itself, [segment(5, until=None)])
        drive.finish(1)
        metrics = drive.reports(5)[-1].metrics
        assert (metrics["trial"], metrics["seed"]) == (5, 1005)
        assert metrics["threads"] >= 1
        assert metrics["devices"] == 1
        assert drive.ended(5).epoch == 2

    # -- failures ---------------------------------------------------------------------------------------

    def test_a_failure_shows_the_users_traceback_only(self, make: Callable[..., Drive]) -> None:
        """The reason is its last line."""
        drive = make(raises, [segment(trial) for trial in range(3)])
        drive.finish(3)
        for trial in range(3):
            ended = drive.ended(trial)
            assert (ended.status, ended.epoch, ended.lost) == (TrialStatus.FAILED, 1, False)
            assert ended.reason == f"ZeroDivisionError: deep trouble with {float(trial)}"
            assert "in raises" in ended.error
            assert "in _deep" in ended.error
            assert ended.error.count("File ") == 2, ended.error

    def test_sys_exit_fails_the_trial_alone(self, make: Callable[..., Drive]) -> None:
        """The worker goes on."""
        drive = make(exits, [segment(trial) for trial in range(4)])
        drive.finish(4)
        assert all(drive.ended(trial).status is TrialStatus.FAILED for trial in range(4))
        assert all("sys.exit(3)" in drive.ended(trial).reason for trial in range(4))
        assert not any(drive.ended(trial).lost for trial in range(4))

    @pytest.mark.parametrize("bad", ["nan", "inf", "text", "none", "list", "huge"])
    def test_a_report_that_is_no_finite_number_fails(self, make: Callable[..., Drive], bad: str) -> None:
        """The reason names metric, value and epoch."""
        drive = make(reports_bad, [segment(config={"bad": bad})])
        drive.finish(1)
        ended = drive.ended(0)
        assert (ended.status, ended.lost) == (TrialStatus.FAILED, False)
        assert "'loss'" in ended.reason
        assert "epoch 2" in ended.reason
        assert {
            "nan": "nan",
            "inf": "-inf",
            "text": "'0.5'",
            "none": "None",
            "list": "[1.0]",
            "huge": "1000",
        }[bad] in ended.reason
        assert len(drive.reports(0)) == 1

    def test_a_report_without_the_objective_fails(self, make: Callable[..., Drive]) -> None:
        """The reason says what was given."""
        drive = make(reports_other, [segment()])
        drive.finish(1)
        assert drive.ended(0).status is TrialStatus.FAILED
        for word in ("'loss'", "accuracy", "speed"):
            assert word in drive.ended(0).reason

    def test_a_function_that_tells_nothing_fails(self, make: Callable[..., Drive]) -> None:
        """The reason says what to call."""
        drive = make(returns_nothing, [segment()])
        drive.finish(1)
        assert drive.ended(0).status is TrialStatus.FAILED
        assert "run.report(loss=" in drive.ended(0).reason

    def test_numbers_of_any_library_are_numbers(self, make: Callable[..., Drive]) -> None:
        """They arrive as floats."""
        drive = make(reports_numbers, [segment(until=1)])
        drive.finish(1)
        metrics = drive.reports(0)[0].metrics
        assert dict(metrics) == {"loss": 0.5, "whole": 3.0, "zero_d": 0.25, "plain": 7.0, "ratio": 0.125}
        assert {type(value) for value in metrics.values()} == {float}

    def test_one_failure_ends_all_workers_of_a_trial(self, make: Callable[..., Drive]) -> None:
        """With its own error, at once: by itself the other would wait for the group's timeout, which is an hour.

        A ``Drive`` waits no longer than five minutes. Both devices are free for the next try.
        """
        drive = make(one_fails, meter=False)
        if not (self.ships_work and drive.executor.spreads):
            pytest.skip("trials do not spread over workers")
        shares = [Share(free.device.id) for free in drive.executor.free()]
        for rank in range(2):  # one after the other on the same workers, which take seconds to start
            work = segment(rank, until=4, config={"rank": rank})
            for attempt in range(2):
                drive.submit([work])
                drive.start([work], shares, max_devices=2, attempt=attempt)
                drive.finish(2 * rank + attempt + 1)
                drive.until(lambda: sum(free.fraction for free in drive.executor.free()) == 2)
            failed, completed = (event for event in drive.of(rank) if isinstance(event, Ended))
            assert (failed.status, failed.lost, failed.epoch) == (TrialStatus.FAILED, False, 2)
            assert failed.reason == f"ValueError: rank {rank} alone"
            assert "raise ValueError" in failed.error
            assert ("On the worker of rank 1" in failed.error) == (rank == 1)
            assert (completed.status, completed.epoch) == (TrialStatus.COMPLETED, 4)

    def test_who_hangs_after_its_lead_has_ended_is_ended(
        self, make: Callable[..., Drive], tmp_path: Path
    ) -> None:
        """Its trial is over, and well; the devices are for the next one. Here no training has a timeout."""
        drive = make(one_hangs, meter=False)
        if not (self.ships_work and drive.executor.spreads):
            pytest.skip("trials do not spread over workers")
        shares = [Share(free.device.id) for free in drive.executor.free()]
        pid = tmp_path / "pid"
        for number in range(2):
            work = segment(number, until=2, config={"pid": str(pid)})
            drive.submit([work])
            drive.start([work], shares, max_devices=2)
            drive.finish(number + 1)
            assert drive.ended(number).status is TrialStatus.COMPLETED
            drive.until(lambda: pid.exists() and bool(pid.read_text()) and not runs(int(pid.read_text())))
            drive.until(lambda: sum(free.fraction for free in drive.executor.free()) == 2)

    # -- stopping ---------------------------------------------------------------------------------------

    def _stopped(self, make: Callable[..., Drive], **stop: Any) -> Drive:
        drive: Drive = make(endless, [segment(until=None, config={"pause_s": 0.01})])
        drive.until(lambda: len(drive.reports(0)) >= 2)
        drive.executor.stop([0], **stop)
        drive.finish(1)
        return drive

    def test_a_stopped_trial_ends_at_its_next_report(self, make: Callable[..., Drive]) -> None:
        """STOPPED, with the reason, at the epoch of its last report."""
        drive = self._stopped(make, reason="too slow")
        ended = drive.ended(0)
        assert (ended.status, ended.reason, ended.kept) == (TrialStatus.STOPPED, "too slow", False)
        assert ended.epoch == drive.reports(0)[-1].epoch
        assert drive.executor.poll(0) == []

    def test_a_kept_trial_goes_on_later(self, make: Callable[..., Drive]) -> None:
        """PAUSED and kept; launched again, it does no epoch twice."""
        drive = self._stopped(make, reason="drained", keep=True)
        ended = drive.ended(0)
        assert (ended.status, ended.kept) == (TrialStatus.PAUSED, True)
        again = segment(until=ended.epoch + 2, start=ended.epoch, config={"pause_s": 0.01})
        drive.submit([again])
        drive.queue.append(again)
        drive.finish(2)
        epochs = [report.epoch for report in drive.reports(0)]
        assert epochs == list(range(1, ended.epoch + 3))

    @pytest.mark.parametrize(("work", "until"), [(counts, 9), (plain_reports, 9), (endless, None)])
    def test_a_trial_leaves_with_the_last_epoch_it_is_allowed(
        self, make: Callable[..., Drive], work: Any, until: int | None
    ) -> None:
        """By itself, however late its driver reads of it: it is kept as if it had been stopped then."""
        drive = make(work, [segment(until=until)])
        drive.queue.clear()
        device = Share(drive.executor.free()[0].device.id)
        drive.start([segment(until=until)], [device], leaves=[4])
        drive.finish(1)
        assert drive.ended(0).kept
        assert drive.ended(0).status is TrialStatus.PAUSED
        assert drive.ended(0).epoch == len(drive.reports(0)) == 4
        drive.start([segment(until=until)], [device], leaves=[4])  # it has had all of them
        drive.finish(2)
        assert drive.ended(0).kept
        assert drive.state.epochs == len({report.epoch for report in drive.reports(0)}) == 4

    def test_stopping_what_does_not_run_is_ignored(self, make: Callable[..., Drive]) -> None:
        """Before, and after."""
        drive = make(counts, [segment()])
        drive.executor.stop([0, 77], reason="no")
        drive.finish(1)
        drive.executor.stop([0], reason="no")
        assert drive.executor.poll(0) == []
        assert drive.ended(0).status is TrialStatus.COMPLETED

    # -- devices ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("fraction", [1.0, 1 / 3])
    def test_devices_are_never_oversubscribed(self, make: Callable[..., Drive], fraction: float) -> None:
        """At any time the shares of what runs on a device add up to at most 1."""
        drive = make(stamps, [segment(trial, until=2) for trial in range(9)], fraction=fraction)
        drive.finish(9)
        assert _peak(drive.events) <= 1 + 1e-9
        free = {free.device.id: free.fraction for free in drive.executor.free()}
        assert list(free.values()) == [1.0, 1.0]

    def test_a_placement_may_hold_several_devices(self, make: Callable[..., Drive]) -> None:
        """While it runs, nothing is free."""
        drive = make(counts)
        drive.submit([segment(0, until=2)])
        names = [free.device.id for free in drive.executor.free()]
        assert len(names) == drive.executor.slots == 2
        drive.start([segment(0, until=2)], [Share(name) for name in names])
        assert sum(free.fraction for free in drive.executor.free()) == 0
        drive.finish(1)
        started = drive.of(0)[0]
        assert isinstance(started, Started)
        assert {share.device for share in started.shares} == set(names)
        assert sum(free.fraction for free in drive.executor.free()) == 2

    def test_all_members_of_a_fused_placement_run(self, make: Callable[..., Drive]) -> None:
        """Each has its own events."""
        drive = make(counts)
        members = [segment(trial, until=2) for trial in range(3)]
        drive.submit(members)
        drive.start(members, [Share(drive.executor.free()[0].device.id)])
        drive.finish(3)
        for trial in range(3):
            started = drive.of(trial)[0]
            assert isinstance(started, Started)
            assert started.fused == (0, 1, 2)
            assert [report.metrics["loss"] for report in drive.reports(trial)] == [trial, trial + 1.0]

    def test_many_short_trials_are_all_run(self, make: Callable[..., Drive]) -> None:
        """Also those that the executor lets queue."""
        drive = make(returns_float, [segment(trial, until=None) for trial in range(400)])
        drive.finish(400)
        assert sorted(event.trial for event in drive.events if isinstance(event, Ended)) == list(range(400))
        for trial in range(400):
            assert [type(event) for event in drive.of(trial)] == [Started, Reported, Ended]
            assert drive.reports(trial)[0].metrics["loss"] == trial

    # -- opening and closing ----------------------------------------------------------------------------

    def test_closing_twice_is_closing_once(self, files: Path) -> None:
        """Before opening, while trials run, and after."""
        executor = self.executor(2)
        executor.close()
        executor.open(Job(endless, files, ("loss",)))
        drive = Drive(executor, [segment(0, until=None, config={"pause_s": 0.01})])
        drive.until(lambda: bool(drive.reports(0)))
        executor.close()
        executor.close()
        assert executor.poll(0) == []

    def test_it_can_be_opened_again(self, files: Path) -> None:
        """For another study."""
        executor = self.executor(1)
        for work in (returns_float, returns_dict):
            executor.open(Job(work, files, ("loss",)))
            drive = Drive(executor, [segment(until=None)])
            drive.finish(1)
            assert drive.ended(0).status is TrialStatus.COMPLETED
            executor.close()

    def test_a_closure_can_be_the_work(self, make: Callable[..., Drive]) -> None:
        """As in a notebook."""
        offset = 5.0
        drive = make(lambda run: run.config["x"] + offset, [segment(2, until=None)])
        drive.finish(1)
        assert drive.reports(2)[0].metrics["loss"] == 7.0

    def test_work_that_cannot_be_shipped_is_refused(self, files: Path) -> None:
        """At once, naming what can't be pickled."""
        if not self.ships_work:
            pytest.skip("the work stays in this process")
        lock = threading.Lock()

        def train(run: Run) -> float:
            with lock:
                return 0.0

        executor = self.executor(1)
        with pytest.raises(InvalidInput, match=r"closure variable 'lock'.*_thread.lock"):
            executor.open(Job(train, files, ("loss",)))
        with pytest.raises(InvalidInput, match=r"attribute 'inside'.*_thread.lock"):
            executor.open(Job(Holder(lock), files, ("loss",)))
        executor.open(Job(Holder(), files, ("loss",)))  # it is still good for other work
        executor.close()

    def test_a_configuration_that_cannot_be_shipped_is_refused(self, make: Callable[..., Drive]) -> None:
        """Before anything of the launch runs, naming the value."""
        if not self.ships_work:
            pytest.skip("the configuration stays in this process")
        drive = make(counts)
        bad = segment(1, config={"lock": threading.Lock()})
        drive.submit([segment(0), bad])
        name = drive.executor.free()[0].device.id
        launches = [drive.launch_of(Placement((s,), (Share(name, 0.5),))) for s in (segment(0), bad)]
        with pytest.raises(InvalidInput, match="lock"):
            drive.executor.launch(launches)
        assert drive.executor.poll(0.2) == []


def _peak(events: Sequence[Event]) -> float:
    """The largest sum of shares that any device carried at a time."""
    running: dict[int, tuple[Share, ...]] = {}
    peak = 0.0
    # At one and the same time ends come before starts.
    moments = [event for event in events if isinstance(event, Started | Ended)]
    for event in sorted(moments, key=lambda e: (e.time_s, isinstance(e, Started))):
        if isinstance(event, Ended):
            running.pop(event.trial, None)
            continue
        running[event.trial] = event.shares
        load: dict[str, float] = {}
        for shares in running.values():
            for share in shares:
                load[share.device] = load.get(share.device, 0.0) + share.fraction
        peak = max(peak, *load.values())
    return peak
