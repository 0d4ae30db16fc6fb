"""The local executor survives what trainings, the machine and people do to it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core import Ended, Reported, Segment, Started, TrialStatus
from penstock.core.errors import ExecutorError
from penstock.execute import Job, Local
from penstock.testing.executors import Drive, segment

pytestmark = pytest.mark.faults


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    opened: list[Local] = []

    def build(work: Any, segments: list[Segment], *, slots: int = 2, **options: Any) -> Drive:
        executor = Local(slots)
        executor.open(Job(work, tmp_path, ("loss",), **options))
        opened.append(executor)
        return Drive(executor, segments)

    yield build
    for executor in opened:
        executor.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_gone(pids: list[int], patience_s: float = 120.0) -> list[int]:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s and any(map(alive, pids)):
        time.sleep(0.01)
    return [pid for pid in pids if alive(pid)]


def logged(run: Any, folder: str) -> None:
    """Writes down each epoch it begins to train, so that a test can see what was run twice; the last trial waits."""
    done = run.load() or 0
    for epoch in run.epochs():
        assert epoch == done
        with open(f"{folder}/{run.trial}", "a") as file:
            file.write(f"{epoch}\n")
        time.sleep(0.002)
        while run.trial == 9 and epoch == 6 and not os.path.exists(f"{folder}/enough"):
            time.sleep(0.002)
        done += 1
        run.save(done)
        run.report(loss=float(epoch), pid=os.getpid())


@pytest.mark.parametrize("seed", range(3))
def test_killed_workers_lose_nothing(make: Callable[..., Drive], tmp_path: Path, seed: int) -> None:
    """kill -9 at random moments: every trial reaches its end, and only epochs without a checkpoint are run again."""
    folder = tmp_path / "begun"
    folder.mkdir()
    trials, epochs = 10, 12

    def train(run: Any) -> None:
        logged(run, str(folder))

    drive = make(train, [segment(trial, until=epochs) for trial in range(trials)])
    drive.on_event = drive.retry_lost
    dice, kills = random.Random(seed), 0
    deadline_s = time.monotonic() + 300
    while drive.state.counts.completed < trials:
        assert time.monotonic() < deadline_s, drive.events[-5:]
        drive.fill()
        drive.poll(dice.uniform(0, 0.05))
        workers = list(drive.executor._workers.by_index.values())  # type: ignore[attr-defined]
        if kills < 6 and drive.state.epochs > 12 * kills and workers:
            victim = dice.choice(workers)
            if victim.ready:
                os.kill(victim.child.process.pid, signal.SIGKILL)
                kills += 1
        if kills == 6:  # however far the others have come before
            (folder / "enough").touch()
    drive.state.validate()
    assert kills == 6
    again = 0
    for trial in range(trials):
        record = drive.state.trials[trial]
        assert [report.epoch for report in record.reports] == list(range(1, epochs + 1))
        assert [report.metrics["loss"] for report in record.reports] == list(range(epochs))
        begun = [int(line) for line in (folder / str(trial)).read_text().split()]
        assert sorted(set(begun)) == list(range(epochs))
        again += len(begun) - epochs
    # A kill costs at most the epoch it fell into, and the one before if its checkpoint was still being written.
    assert again <= 2 * kills
    assert sum(drive.tries.values()) <= kills
    assert all(event.lost for event in drive.events if isinstance(event, Ended) and event.status == "failed")


def test_segments_queued_at_a_dead_worker_move_on(make: Callable[..., Drive]) -> None:
    """Only the running one is lost."""

    def train(run: Any) -> float:
        if run.trial == 700:
            os._exit(9)
        return 1.0

    drive = make(train, [segment(trial, until=None) for trial in range(1500)])
    drive.finish(1500)
    failed = [
        event for event in drive.events if isinstance(event, Ended) and event.status is TrialStatus.FAILED
    ]
    assert [(event.trial, event.lost) for event in failed] == [(700, True)]
    assert "exit code 9" in drive.ended(700).reason
    ends = [event.trial for event in drive.events if isinstance(event, Ended)]
    assert sorted(ends) == list(range(1500))
    starts = [event.trial for event in drive.events if isinstance(event, Started)]
    assert sorted(starts) == list(range(1500))


@pytest.mark.parametrize(
    ("how", "word"),
    [("os._exit(7)", "exit code 7"), ("os.kill(os.getpid(), 11)", "SIGSEGV"), ("os.abort()", "SIGABRT")],
)
def test_a_dying_training_is_lost(make: Callable[..., Drive], how: str, word: str) -> None:
    def train(run: Any) -> None:
        for _ in run.epochs():
            run.report(loss=0.0)
            if run.trial == 0 and run.epoch == 1:
                print("last words", flush=True)
                exec(how, {"os": os})

    drive = make(train, [segment(trial) for trial in range(4)])
    drive.finish(4)
    ended = drive.ended(0)
    assert (ended.status, ended.lost) == (TrialStatus.FAILED, True)
    assert word in ended.reason
    assert "last words" in ended.error
    assert all(drive.ended(trial).status is TrialStatus.COMPLETED for trial in (1, 2, 3))


def test_a_hanging_training_is_killed(make: Callable[..., Drive]) -> None:
    """With its children; the others go on in a new worker."""

    def train(run: Any) -> None:
        for _ in run.epochs():
            if run.trial == 0 and run.epoch == 1:
                child = subprocess.Popen(["sleep", "1000"])
                run.folder.joinpath("child").write_text(str(child.pid))
                time.sleep(1000)
            run.report(loss=0.0)

    drive = make(train, [segment(trial) for trial in range(4)], slots=1, timeout_s=5.0)
    drive.finish(4)
    ended = drive.ended(0)
    assert (ended.status, ended.lost, ended.epoch) == (TrialStatus.FAILED, False, 1)
    assert "no report for 5 s (timeout_s)" in ended.reason
    assert all(drive.ended(trial).status is TrialStatus.COMPLETED for trial in (1, 2, 3))
    child = int((drive.executor._job.files / "trials/0/child").read_text())  # type: ignore[attr-defined]
    assert wait_gone([child]) == []


def test_slow_reports_within_the_limit_are_no_hang(make: Callable[..., Drive]) -> None:
    def train(run: Any) -> None:
        for _ in run.epochs():
            time.sleep(0.6)
            run.report(loss=0.0)

    drive = make(train, [segment(until=10)], timeout_s=5.0)
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED


def test_a_driver_that_stood_still_hears_what_was_reported_meanwhile(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """Before it takes a training for one that hangs."""
    go, reported, heard = (tmp_path / name for name in ("go", "reported", "heard"))

    def train(run: Any) -> None:
        for epoch in run.epochs():  # what was reported in an epoch is told when the next one begins
            if epoch == 2:
                reported.touch()
            while epoch > 0 and not (go, heard)[epoch - 1].exists():
                time.sleep(0.01)
            run.report(loss=0.0)

    drive = make(train, [segment(until=3)], slots=1, timeout_s=1000.0)
    executor: Any = drive.executor
    drive.until(lambda: len(drive.reports(0)) == 1)
    go.touch()
    deadline_s = time.monotonic() + 300
    while not reported.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    (worker,) = executor._workers.by_index.values()
    worker.heard_s -= 2000.0  # so long has it slept since
    executor._check(executor._workers)
    assert not worker.verdict
    heard.touch()
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    assert len(drive.reports(0)) == 3


def test_megabytes_of_output_do_no_harm(make: Callable[..., Drive], tmp_path: Path) -> None:
    """Neither block the training nor fill the disk: the log keeps its end."""

    def train(run: Any) -> None:
        line = "x" * 1023 + "\n"
        for _ in run.epochs():
            for _ in range(40):
                sys.stdout.write(line * 1024)
                sys.stderr.write("e" * 1024)
            run.report(loss=0.0)
        time.sleep(0.6)
        print("the end")

    drive = make(train, [segment()], slots=1)
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    log = tmp_path / "logs/worker-0.log"
    assert log.stat().st_size < 48 << 20
    assert log.read_text().endswith("the end\n")


def test_a_training_may_fork(make: Callable[..., Drive]) -> None:
    """The child comes back into the worker's code, and must neither report nor go on as a worker."""

    def train(run: Any) -> None:
        for _ in run.epochs():
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            run.report(loss=0.0, pid=os.getpid())

    drive = make(train, [segment(trial) for trial in range(6)])
    drive.finish(6)
    for trial in range(6):
        assert drive.ended(trial).status is TrialStatus.COMPLETED
        assert [report.epoch for report in drive.reports(trial)] == [1, 2, 3]
        assert len({report.metrics["pid"] for report in drive.reports(trial)}) == 1


def test_a_forked_child_that_lives_on_does_not_hide_a_death(make: Callable[..., Drive]) -> None:
    """It holds no pipe of the worker's, and is swept away."""

    def train(run: Any) -> float:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        run.folder.joinpath("child").write_text(str(child))
        os._exit(1)

    drive = make(train, [segment(0)])
    drive.finish(1)
    assert drive.ended(0).lost
    child = int((drive.executor._job.files / "trials/0/child").read_text())  # type: ignore[attr-defined]
    assert wait_gone([child]) == []


def test_work_that_cannot_be_imported_is_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that breaks in the worker alone: an error with the cause, from poll."""
    source = """
        import os
        if os.environ.get("PENSTOCK_TEST_DRIVER") != str(os.getpid()):
            raise RuntimeError("only at home")
        def train(run):
            return 0.0
    """
    (tmp_path / "fussy_module.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PENSTOCK_TEST_DRIVER", str(os.getpid()))
    monkeypatch.syspath_prepend(str(tmp_path))
    import fussy_module  # type: ignore[import-not-found]

    executor = Local(1)
    executor.open(Job(fussy_module.train, tmp_path, ("loss",)))
    drive = Drive(executor, [segment(0)])
    try:
        with pytest.raises(ExecutorError, match="only at home"):
            drive.finish(1)
    finally:
        executor.close()
        del sys.modules["fussy_module"]


def test_a_module_loaded_from_a_file_is_shipped_whole(make: Callable[..., Drive], tmp_path: Path) -> None:
    """Workers can't import it by its name."""
    import importlib.util

    path = tmp_path / "somewhere.py"
    path.write_text(
        "FACTOR = 3\ndef helper(x):\n    return FACTOR * x\ndef train(run):\n    return helper(run.config['x'])\n"
    )
    spec = importlib.util.spec_from_file_location("loaded_by_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded_by_path"] = module
    try:
        spec.loader.exec_module(module)
        drive = make(module.train, [segment(2, until=None)])
        drive.finish(1)
        assert drive.reports(2)[0].metrics["loss"] == 6.0
    finally:
        del sys.modules["loaded_by_path"]


DRIVER = """
import os, pathlib, subprocess, sys, time
from penstock.execute import Job, Local
from penstock.testing.executors import Drive, segment

def train(run):
    child = subprocess.Popen(["sleep", "1000"])
    for epoch in run.epochs():
        run.report(loss=0.0, pid=os.getpid(), child=child.pid)
        while epoch == 1:
            BODY

folder = pathlib.Path(sys.argv[1])
executor = Local(2)
executor.open(Job(train, folder, ("loss",)))
drive = Drive(executor, [segment(0, until=None), segment(1, until=None)])
drive.until(lambda: len(drive.reports(0)) > 0 and len(drive.reports(1)) > 0)
guard = executor._workers.guard.pid
pids = [int(drive.reports(t)[0].metrics[key]) for t in (0, 1) for key in ("pid", "child")]
print(*pids, guard, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("body", ["time.sleep(1)", "3 ** (10**7 + epoch)"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_the_driver(tmp_path: Path, body: str, how: signal.Signals) -> None:
    """With their children, also while a training holds the interpreter lock; no guardian remains."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace("BODY", body))
    driver = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    try:
        assert len(pids) == 5
        assert all(map(alive, pids))
        driver.send_signal(how)
        driver.wait()
        assert wait_gone(pids) == []
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_ctrl_c_at_the_terminal_reaches_no_worker(make: Callable[..., Drive]) -> None:
    """Workers are in sessions of their own, so the driver can drain."""

    def train(run: Any) -> None:
        for _ in run.epochs():
            run.report(loss=0.0, group=os.getpgid(0), session=os.getsid(0))

    drive = make(train, [segment(0, until=1)])
    drive.finish(1)
    metrics = drive.reports(0)[0].metrics
    assert metrics["group"] != os.getpgid(0)
    assert metrics["session"] != os.getsid(0)


def test_scripts_need_no_main_guard(tmp_path: Path) -> None:
    """A top-level script whose functions live in __main__ just works, and workers don't run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pathlib, tempfile
        from penstock.execute import Job, Local
        from penstock.testing.executors import Drive, segment
        print("script runs", flush=True)
        class State:
            def __init__(self, n): self.n = n
        def helper(x):
            return x + 1
        def train(run):
            state = run.load() or State(0)
            for _ in run.epochs():
                state.n += 1
                run.save(state)
                run.report(loss=helper(state.n))
        executor = Local(1)
        executor.open(Job(train, pathlib.Path(tempfile.mkdtemp()), ("loss",)))
        drive = Drive(executor, [segment(until=2, last=False)])
        drive.finish(1)
        follow = segment(until=3, start=2)
        drive.submit([follow]); drive.queue.append(follow)
        drive.finish(2)
        print([r.metrics["loss"] for r in drive.reports(0)], drive.ended(0).error)
        executor.close()
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["script runs", "[2.0, 3.0, 4.0] "], done.stderr


def test_thread_limits_reach_the_worker(tmp_path: Path) -> None:
    def train(run: Any) -> None:
        import torch

        for _ in run.epochs():
            run.report(
                loss=0.0,
                omp=int(os.environ["OMP_NUM_THREADS"]),
                torch=torch.get_num_threads(),
                run=run.threads,
            )
            torch.set_num_threads(2 if run.threads == 1 else 1)  # the next trial must not inherit it

    executor = Local(2, threads=1)
    executor.open(Job(train, tmp_path, ("loss",)))
    try:
        drive = Drive(executor)
        drive.submit([segment(trial, until=1) for trial in range(3)])
        names = [free.device.id for free in executor.free()]
        from penstock.core import Share

        for trial, shares in enumerate(([Share(names[0])], [Share(n) for n in names], [Share(names[1])])):
            drive.start([segment(trial, until=1)], shares)
            drive.until(lambda trial=trial: bool(drive.reports(trial)) and len(executor.free()) == 2)  # type: ignore[misc]
        found = [
            (r.metrics["omp"], r.metrics["torch"], r.metrics["run"])
            for e in range(3)
            for r in drive.reports(e)
        ]
        assert found == [(1, 1, 1), (2, min(2, os.cpu_count() or 1), 2), (1, 1, 1)]
    finally:
        executor.close()


def test_a_long_segment_does_not_hold_up_what_is_queued_behind_it(make: Callable[..., Drive]) -> None:
    """Short ones teach the executor to queue; then one is long, and idle devices take over."""

    def train(run: Any) -> float:
        if run.trial == 600:
            while not all(
                os.path.exists(run.folder.parent / str(trial) / "done") for trial in range(601, 700)
            ):
                time.sleep(0.005)
        elif run.trial > 600:
            run.folder.joinpath("done").touch()
        return 0.0

    drive = make(train, [segment(trial, until=None) for trial in range(700)])
    drive.finish(700)
    assert all(drive.ended(trial).status is TrialStatus.COMPLETED for trial in range(700))


def test_what_is_queued_can_be_stopped(make: Callable[..., Drive], tmp_path: Path) -> None:
    """It ends at once, unstarted; its neighbours run."""
    told = tmp_path / "told"

    def train(run: Any) -> float:
        if run.trial >= 300:
            time.sleep(0.05)
        while run.trial == 300 and not told.exists():  # however late the driver comes to it
            time.sleep(0.01)
        return 0.0

    drive = make(train, [segment(trial, until=None) for trial in range(300)], slots=1)
    drive.finish(300)
    # As on a machine that is not busy, where trials of this kind take far less than a millisecond:
    drive.executor._pace._estimate_s, drive.executor._free = 0.001, None
    assert drive.executor.free()[0].backlog >= 5
    drive.queue = [segment(trial, until=None) for trial in range(300, 306)]
    drive.submit(drive.queue)
    drive.fill()
    drive.executor.stop([303, 304], reason="not needed", keep=True)
    told.touch()
    drive.finish(306)
    for trial in (303, 304):
        assert [type(event) for event in drive.of(trial)] == [Ended]
        assert (drive.ended(trial).status, drive.ended(trial).kept) == (TrialStatus.PAUSED, True)
    for trial in (300, 301, 302, 305):
        assert [type(event) for event in drive.of(trial)] == [Started, Reported, Ended]


def test_what_waits_for_its_worker_can_be_stopped(make: Callable[..., Drive]) -> None:
    """While the worker is still importing."""
    drive = make(lambda run: 0.0, [segment(0, until=None), segment(1, until=None)], slots=1)
    drive.fill()
    drive.executor.stop([0], reason="changed my mind")
    drive.finish(2)
    assert [type(event) for event in drive.of(0)] == [Ended]
    assert drive.ended(0).status is TrialStatus.STOPPED
    assert drive.ended(1).status is TrialStatus.COMPLETED


def test_a_large_configuration_arrives(make: Callable[..., Drive], tmp_path: Path) -> None:
    drive = make(
        lambda run: float(len(run.config["text"])), [segment(0, until=None, config={"text": "x" * 10**6})]
    )
    drive.finish(1)
    assert drive.reports(0)[0].metrics["loss"] == 10**6
    assert list((tmp_path / "spilled").iterdir()) == []
