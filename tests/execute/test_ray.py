"""The Ray executor against a real Ray cluster: several nodes on this machine."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as pk
from penstock.core import Ended, Placement, Resized, Share, Started, TrialStatus
from penstock.core.errors import ExecutorError, InvalidInput, MissingDependency
from penstock.execute import Executor, Job, Launch, Ray, _ray
from penstock.execute._actor import TOKEN
from penstock.testing.executors import Drive, ExecutorSuite, counts, one_hangs, segment
from penstock.train import elastic

pytestmark = pytest.mark.faults
HEAD_CPUS = 3


def connect(cluster: Any) -> None:
    import ray

    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One cluster at a time on the machine, also with several test processes; this process is its driver."""
    import ray
    from ray.cluster_utils import Cluster

    with open(Path(tempfile.gettempdir()) / "penstock-ray-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": HEAD_CPUS,
                "object_store_memory": 80 << 20,
                "include_dashboard": False,
                "_system_config": {
                    "health_check_period_ms": 1000
                },  # lost nodes are noticed sooner than by default
            },
        )
        connect(made)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


class TestRay(ExecutorSuite):
    """Two executors that keep their actors from test to test: an actor takes a second to start, and more under load."""

    kept: dict[int, Ray]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def keep(cls, cluster: Any) -> Iterator[None]:
        cls.kept = {}
        yield
        for executor in cls.kept.values():
            executor.release()

    def executor(self, slots: int) -> Executor:
        return self.kept.setdefault(slots, Ray(slots=slots, warm=True))


@pytest.fixture
def make(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    opened: list[Ray] = []

    def build(work: Any, segments: Any = (), *, job: Any = None, **options: Any) -> Drive:
        executor = Ray(**options)
        executor.open(Job(work, tmp_path, ("loss",), **(job or {})))
        opened.append(executor)
        return Drive(executor, segments)

    yield build
    for executor in opened:
        executor.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], patience_s: float = 120.0) -> list[int]:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def logged(run: Any, folder: str) -> None:
    """Writes down each epoch it begins to train, and waits in the fourth for leave to go on."""
    done = run.load() or 0
    for epoch in run.epochs():
        assert epoch == done
        with open(f"{folder}/{run.trial}", "a") as file:
            file.write(f"{epoch}\n")
        while epoch == 3 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.02)
        done += 1
        run.save(done)
        run.report(loss=float(epoch), pid=os.getpid(), actor=os.getppid())


def begun(folder: Path, trial: int) -> list[int]:
    return [int(line) for line in (folder / str(trial)).read_text().split()]


# -- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_killed_actor_loses_no_epoch(make: Callable[..., Drive], tmp_path: Path, shared: bool) -> None:
    """Its trial goes on in another one from the last checkpoint, wherever that lies; the others don't notice."""
    folder = tmp_path / "begun"
    folder.mkdir()
    drive = make(
        lambda run: logged(run, str(folder)),
        [segment(trial, until=6) for trial in range(2)],
        slots=2,
        shared_files=None if shared else False,
    )
    drive.on_event = drive.retry_lost
    drive.until(lambda: all(len(drive.reports(trial)) == 3 for trial in range(2)))
    metrics = drive.reports(0)[-1].metrics
    pid, actor = int(metrics["pid"]), int(metrics["actor"])
    os.kill(actor, signal.SIGKILL)
    assert wait_gone([pid]) == []  # the worker process goes with its actor
    (folder / "go").touch()
    drive.finish(3)
    ends = [event for event in drive.of(0) if isinstance(event, Ended)]
    assert [(end.status, end.lost) for end in ends] == [
        (TrialStatus.FAILED, True),
        (TrialStatus.COMPLETED, False),
    ]
    assert "Ray actor died" in ends[0].reason
    assert begun(folder, 0) == [0, 1, 2, 3, 3, 4, 5]
    assert begun(folder, 1) == [0, 1, 2, 3, 4, 5]
    for trial in range(2):
        assert [report.epoch for report in drive.state.trials[trial].reports] == [1, 2, 3, 4, 5, 6]
    drive.state.validate()


def test_a_dying_worker_process_is_told_as_by_the_local_executor(make: Callable[..., Drive]) -> None:
    """How it died and its last words; its actor starts another."""

    def train(run: Any) -> float:
        if run.trial == 0:
            print("last words", flush=True)
            os._exit(7)
        return float(os.getppid())

    drive = make(train, [segment(trial, until=None) for trial in range(3)], slots=1)
    drive.finish(3)
    ended = drive.ended(0)
    assert (ended.status, ended.lost) == (TrialStatus.FAILED, True)
    assert "exit code 7" in ended.reason
    assert "last words" in ended.error
    assert drive.reports(1)[0].metrics == drive.reports(2)[0].metrics  # the same actor


def test_a_hanging_training_is_killed_with_its_children(make: Callable[..., Drive], tmp_path: Path) -> None:
    def train(run: Any) -> None:
        for _ in run.epochs():
            if run.trial == 0 and run.epoch == 1:
                child = subprocess.Popen(["sleep", "1000"])
                run.folder.joinpath("child").write_text(str(child.pid))
                time.sleep(1000)
            run.report(loss=0.0)

    drive = make(train, [segment(trial) for trial in range(2)], slots=1, job={"timeout_s": 8.0})
    drive.finish(2)
    ended = drive.ended(0)
    assert (ended.status, ended.lost, ended.epoch) == (TrialStatus.FAILED, False, 1)
    assert "no report for 8 s (timeout_s)" in ended.reason
    assert drive.ended(1).status is TrialStatus.COMPLETED
    assert wait_gone([int((tmp_path / "trials/0/child").read_text())]) == []


def test_a_node_that_joins_is_used_and_one_that_leaves_loses_no_epoch(
    make: Callable[..., Drive], cluster: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()
    work = lambda run: logged(run, str(folder))  # noqa: E731
    drive = make(work, [segment(trial, until=6) for trial in range(HEAD_CPUS + 1)])
    drive.on_event = drive.retry_lost
    head = {free.device.node for free in drive.executor.free()}
    drive.until(lambda: all(len(drive.reports(trial)) == 3 for trial in range(HEAD_CPUS)))
    assert drive.queue  # there is no room for the last one
    assert drive.executor.slots == HEAD_CPUS
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    last = HEAD_CPUS
    drive.until(lambda: len(drive.reports(last)) == 3)
    started = drive.of(last)[0]
    assert isinstance(started, Started)
    assert drive.executor.slots == HEAD_CPUS + 1
    joined = started.shares[0].device.partition("/")[0]
    assert joined not in head
    cluster.remove_node(node, allow_graceful=False)
    drive.until(lambda: any(isinstance(event, Ended) for event in drive.of(last)))
    assert drive.ended(last).lost
    (folder / "go").touch()
    drive.finish(HEAD_CPUS + 2)
    assert begun(folder, last) == [0, 1, 2, 3, 3, 4, 5]
    again = [event for event in drive.of(last) if isinstance(event, Started)][-1]
    assert again.shares[0].device.partition("/")[0] in head
    assert all(drive.ended(trial).status is TrialStatus.COMPLETED for trial in range(HEAD_CPUS + 1))
    assert drive.executor.slots == HEAD_CPUS
    drive.state.validate()


def test_a_node_that_leaves_while_its_actors_start_is_no_reason_to_give_up(
    make: Callable[..., Drive], cluster: Any, tmp_path: Path
) -> None:
    """They are unreachable before Ray says that the node has left: three workers that can't be started, it seems."""
    import ray._private.state

    node = cluster.add_node(num_cpus=3, object_store_memory=80 << 20)
    try:
        drive = make(counts)
        drive.until(lambda: drive.executor.slots == HEAD_CPUS + 3)
        devices = [free.device for free in drive.executor.free()]
        names = [device.id for device in devices if device.node.endswith(node.node_id[:6])]
        token, text = tmp_path / TOKEN, (tmp_path / TOKEN).read_text()
        token.unlink()
        os.mkfifo(token)  # an actor that looks whether it sees the folder waits here
        before = set(ray._private.state.actors())
        work = [segment(trial, until=2) for trial in range(3)]
        drive.submit(work)
        for part, name in zip(work, names, strict=True):
            drive.start([part], [Share(name)])

        def starting() -> int:
            actors = ray._private.state.actors()
            return sum(each["State"] == "ALIVE" for name, each in actors.items() if name not in before)

        drive.until(lambda: starting() == 3)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    token.unlink()
    token.write_text(text)
    drive.finish(3)
    assert [drive.ended(trial).status for trial in range(3)] == [TrialStatus.COMPLETED] * 3
    assert sum(isinstance(event, Started) for event in drive.events) == 3


def load_when(path: str) -> Any:
    """Takes a worker that loads its work until there is a file of this name."""
    while not os.path.exists(path):
        time.sleep(0.02)
    return counts


class Late:
    """Work that workers begin with when a file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return load_when, (str(self.path),)


def test_a_trial_told_to_stop_is_not_begun_anew_when_its_actor_dies_before_it_began(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """The order went to the actor that is no more."""
    go = tmp_path / "go"
    drive = make(Late(go), [segment(0, until=3)], slots=1)
    executor: Any = drive.executor
    drive.until(lambda: executor._book.of(0) is not None and executor._book.of(0).sent)
    executor.stop([0], reason="not needed", keep=True)
    [worker] = executor._leases.waited_for.values()
    os.kill(worker.opened.pid, signal.SIGKILL)
    drive.until(lambda: worker not in worker.lease.workers)
    go.touch()
    drive.finish(1)
    assert [type(event) for event in drive.of(0)] == [Ended]
    ended = drive.ended(0)
    assert (ended.status, ended.reason, ended.kept) == (TrialStatus.PAUSED, "not needed", True)
    assert sum(free.fraction for free in executor.free()) == 1


def test_devices_go_back_with_the_last_actor_that_had_them(make: Callable[..., Drive]) -> None:
    """Nobody is left whose idle time would tell that they are not needed."""
    import ray

    drive = make(counts, [segment(0, until=1)], slots=1)
    drive.finish(1)
    executor: Any = drive.executor
    [lease] = executor._leases.by_key.values()
    [worker] = lease.workers
    os.kill(worker.opened.pid, signal.SIGKILL)

    def noticed() -> bool:
        executor._look_after()
        executor._listen(0.1)  # nothing is under way, so a poll does not
        return not lease.workers

    drive.until(noticed)
    assert executor._leases.by_key == {}
    assert ray.util.placement_group_table(lease.group)["state"] == "REMOVED"


def test_work_that_cannot_be_imported_is_no_endless_loop(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fussy_ray_module.py").write_text(
        textwrap.dedent("""
        import os
        if os.environ.get("PENSTOCK_TEST_DRIVER") != str(os.getpid()):
            raise RuntimeError("only at home")
        def train(run):
            return 0.0
        """)
    )
    monkeypatch.setenv("PENSTOCK_TEST_DRIVER", str(os.getpid()))
    monkeypatch.syspath_prepend(str(tmp_path))
    import fussy_ray_module  # type: ignore[import-not-found]

    executor = Ray(slots=1)
    executor.open(Job(fussy_ray_module.train, tmp_path, ("loss",)))
    try:
        with pytest.raises(ExecutorError, match="only at home"):
            Drive(executor, [segment(0)]).finish(1)
    finally:
        executor.close()
        del sys.modules["fussy_ray_module"]


DRIVER = """
import os, sys, time
import penstock as pk

FOLDER = sys.argv[2]

def train(run):
    done = run.load() or 0
    for epoch in run.epochs(total=6):
        with open(f"{FOLDER}/{run.trial}", "a") as file:
            file.write(f"{epoch}\\n")
        while epoch == 3 and not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.02)
        done += 1
        run.save(done)
        run.report(loss=run.config["x"] + epoch, pid=os.getpid())

study = pk.Study(train, {"x": pk.Choice(0.0, 1.0)}, minimize="loss", budget=pk.Budget(trials=2), store=sys.argv[1],
                 executor=pk.Ray(sys.argv[3], slots=2), name="killed")
study.run()
"""


def test_a_study_goes_on_after_its_driver_was_killed(cluster: Any, tmp_path: Path) -> None:
    """The workers of the dead driver are gone; the new one loses at most the epochs that were running."""
    folder, store, script = tmp_path / "begun", tmp_path / "study.db", tmp_path / "driver.py"
    folder.mkdir()
    script.write_text(DRIVER)
    arguments = [sys.executable, str(script), str(store), str(folder), cluster.address]
    with open(tmp_path / "driver.log", "wb") as log:
        driver = subprocess.Popen(arguments, stdout=log, stderr=log)
    pids: dict[int, int] = {}
    reports = {0: 0, 1: 0}
    trouble: Exception | None = None
    try:
        deadline_s = time.monotonic() + 300
        while any(count < 3 for count in reports.values()):
            assert time.monotonic() < deadline_s, trouble
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            time.sleep(0.2)
            if store.exists():
                try:
                    study = pk.Study.load(store, "killed")
                except pk.errors.PenstockError as error:
                    trouble = error  # it is not in there yet
                    continue
                for record in study.trials:
                    reports[record.id] = record.epoch
                    pids.update({record.id: int(record.metrics["pid"])} if record.reports else {})
        driver.kill()
        driver.wait()
        assert wait_gone(list(pids.values())) == []
    finally:
        driver.kill()
        driver.wait()
    (folder / "go").touch()
    again = pk.Study.load(store, "killed").run()
    assert [record.status for record in again.trials] == [TrialStatus.COMPLETED] * 2
    for record in again.trials:
        assert [report.epoch for report in record.reports] == [1, 2, 3, 4, 5, 6]
        assert begun(folder, record.id) == [0, 1, 2, 3, 3, 4, 5]


# -- the cluster ----------------------------------------------------------------------------------------------


def test_a_study_on_ray_finds_what_it_finds_locally(cluster: Any, tmp_path: Path) -> None:
    """The same trials, the same reports, the same best."""

    def train(run: Any) -> None:
        state = run.load() or 0.0
        for epoch in run.epochs():
            state += run.config["x"] * (run.seed % 97) / (epoch + 1)
            run.save(state)
            run.report(loss=state)

    def found(executor: Executor, name: str) -> Any:
        study = pk.Study(
            train,
            {"x": pk.Float(0.1, 1.0, log=True)},
            minimize="loss",
            scheduler=pk.Halving(trials=6, max_epochs=4, eta=2),
            sampler=pk.Random(),
            executor=executor,
            store=tmp_path / f"{name}.db",
            seed=5,
            meter=False,
        ).run()
        assert study.best is not None
        trials = {
            record.id: (dict(record.config), record.status, [dict(r.metrics) for r in record.reports])
            for record in study.trials
        }
        return trials, study.best.id

    assert found(Ray(slots=2), "ray") == found(pk.Local(2), "local")


def where(run: Any) -> None:
    """Tells what Ray has given it, and waits until its fellows run too."""
    for _ in run.epochs():
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        run.report(loss=0.0, first=float(gpus[0]), count=float(len(gpus)), devices=float(len(run.devices)))
        deadline_s = time.monotonic() + 300
        while (
            len(list(run.folder.parent.iterdir())) < run.config["fellows"] and time.monotonic() < deadline_s
        ):
            time.sleep(0.02)


def test_gpus_by_kind_in_parts_and_in_pairs(make: Callable[..., Drive], cluster: Any) -> None:
    """Halves of one GPU see the same one, another GPU's trial another one; a pair is seen by one process."""
    node = cluster.add_node(
        num_cpus=2, num_gpus=2, resources={"accelerator_type:V100": 1}, object_store_memory=80 << 20
    )
    try:
        drive = make(where, kinds="V100", wait_s=60.0)
        assert drive.executor.slots == 2
        names = [free.device.id for free in drive.executor.free()]
        assert {free.device.kind for free in drive.executor.free()} == {"V100"}
        parts = [segment(trial, until=1, config={"fellows": 3}) for trial in range(3)]
        drive.submit(parts)
        for part, (name, fraction) in zip(
            parts, [(names[0], 0.5), (names[0], 0.5), (names[1], 1.0)], strict=True
        ):
            drive.start([part], [Share(name, fraction)])
        drive.until(lambda: all(drive.reports(trial) for trial in range(3)))
        seen = [
            (drive.reports(t)[0].metrics["first"], drive.reports(t)[0].metrics["count"]) for t in range(3)
        ]
        assert seen[0] == seen[1] != seen[2]
        assert {count for _, count in seen} == {1.0}
        drive.finish(3)
        pair = segment(3, until=1, config={"fellows": 1})
        drive.submit([pair])
        drive.start([pair], [Share(name) for name in names])
        drive.finish(4)
        metrics = drive.reports(3)[0].metrics
        assert (metrics["count"], metrics["devices"]) == (2.0, 2.0)
        drive.executor.close()
    finally:
        cluster.remove_node(node)


@elastic
def descends(run: Any) -> None:
    """Gradient descent on all rows, each worker with its own part of them, until the file ``config["go"]`` is there.

    With ``config["at"]`` it waits for it in that epoch.
    """
    import torch
    import torch.distributed as dist

    torch.manual_seed(3)
    rows, truth = torch.rand(40, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    rank, size = run.world.rank, run.world.size
    weights = (
        torch.zeros(5, dtype=torch.float64)
        if (saved := run.load()) is None
        else torch.tensor(saved, dtype=torch.float64)
    )
    for _ in run.epochs():
        if "at" not in run.config and size == 1 and os.path.exists(run.config["go"]):
            return
        mine = rows[rank::size]
        gradient = mine.T @ (mine @ (weights - truth))
        if size > 1:
            dist.all_reduce(gradient)
        weights = weights - 0.02 * gradient
        (run.folder / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(0.1)
        while run.epoch == run.config.get("at") and not os.path.exists(run.config["go"]):
            time.sleep(0.02)
        run.save(weights.tolist())
        run.report(loss=float((rows @ (weights - truth)).square().sum()), size=size)


def slope(x: float) -> Any:
    import torch

    return torch.nn.Linear(3, 1).double()


def plane() -> Any:
    import torch

    inputs = torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24
    return pk.Data((inputs, inputs.sum(1, keepdim=True)), (inputs, inputs.sum(1, keepdim=True)))


def threads_and_workers(output: Any, targets: Any) -> Any:
    import torch

    together = torch.distributed.is_initialized()
    return torch.tensor(
        10.0 * int(os.environ["OMP_NUM_THREADS"]) + (torch.distributed.get_world_size() if together else 1)
    )


def test_a_task_spreads_over_cores_by_threads(make: Callable[..., Drive]) -> None:
    """On one device, on two and on one again, as its own worker tells."""
    import torch

    task = pk.Task(
        slope,
        plane,
        torch.nn.functional.mse_loss,
        metrics={"seen": threads_and_workers},
        optimizer=torch.optim.SGD,
        defaults={"lr": 0.1},
        batch_size=4,
    )
    drive = make(task, slots=2, job={"meter": False})
    one, two = (Share(free.device.id) for free in drive.executor.free())
    for trial, shares in enumerate([[one], [one, two], [two]]):
        work = segment(trial, until=1, config={"lr": 0.1})
        drive.submit([work])
        drive.start([work], shares, max_devices=2)
        drive.finish(trial + 1)
    assert [drive.ended(trial).reason for trial in range(3)] == [""] * 3
    assert [drive.reports(trial)[0].metrics["seen"] for trial in range(3)] == [11.0, 21.0, 11.0]


def test_a_trial_spreads_over_devices_and_back(make: Callable[..., Drive], tmp_path: Path) -> None:
    """1, then 2, then 1 worker give the losses of one process throughout; without one of two the trial is lost."""
    import numpy as np
    import torch

    drive = make(descends, slots=2)
    one, two = (Share(free.device.id) for free in drive.executor.free())
    go, never = tmp_path / "go", tmp_path / "never"
    alone = segment(0, until=100_000, config={"go": str(go)})
    wide = segment(1, until=6, config={"go": str(never), "at": 3})
    drive.submit([alone, wide])

    def sizes() -> list[float]:
        return [report.metrics["size"] for report in drive.reports(0)]

    drive.start([alone], [one], max_devices=2)
    drive.until(lambda: len(sizes()) >= 2)
    drive.executor.resize(0, [one, two])
    assert drive.executor.free() == ()
    drive.until(lambda: 2.0 in sizes())
    drive.executor.resize(0, [two])
    drive.until(lambda: sizes()[-1] == 1.0)
    go.touch()
    drive.finish(1)
    changes = [event.shares for event in drive.of(0) if isinstance(event, Resized)]
    assert changes == [(one, two), (two,)]
    assert [report.epoch for report in drive.reports(0)] == list(range(1, len(sizes()) + 1))
    assert [size for size, _ in itertools.groupby(sizes())] == [1.0, 2.0, 1.0]
    torch.manual_seed(3)
    rows, truth = torch.rand(40, 5, dtype=torch.float64).numpy(), torch.rand(5, dtype=torch.float64).numpy()
    error, expected = -truth, []
    for _ in sizes():
        error = error - 0.02 * rows.T @ (rows @ error)
        expected.append(np.square(rows @ error).sum())
    assert [report.metrics["loss"] for report in drive.reports(0)] == pytest.approx(expected, rel=1e-9)
    drive.start([wide], [one, two], max_devices=2)
    drive.until(lambda: len(drive.reports(1)) >= 2)
    written = tmp_path / "trials/1/pid-1"
    drive.until(lambda: written.read_text() != "")  # it writes it anew each epoch
    pid = next(text for _ in range(10_000) if (text := written.read_text()))
    os.kill(int(pid), signal.SIGKILL)
    drive.finish(2)
    assert drive.ended(1).lost
    assert "SIGKILL" in drive.ended(1).reason
    assert sum(free.fraction for free in drive.executor.free()) == 2


def test_a_trial_whose_new_device_leaves_before_it_changes_goes_on_with_the_others(
    make: Callable[..., Drive], cluster: Any, tmp_path: Path
) -> None:
    """It would wait for a second device for ever: there is but one left."""
    node = cluster.add_node(num_cpus=HEAD_CPUS, object_store_memory=80 << 20)
    try:
        drive = make(descends, cpus=HEAD_CPUS)  # a node is a device
        drive.until(lambda: drive.executor.slots == 2)
        shares = {free.device.node: Share(free.device.id) for free in drive.executor.free()}
        two = next(share for name, share in shares.items() if name.endswith(node.node_id[:6]))
        one = next(share for share in shares.values() if share is not two)
        work = segment(0, until=6, config={"go": str(tmp_path / "go"), "at": 3})
        drive.submit([work])
        drive.start([work], [one], max_devices=2)
        drive.until(lambda: len(drive.reports(0)) == 3)
        drive.executor.resize(0, [one, two])
    finally:
        cluster.remove_node(node, allow_graceful=False)
    drive.until(lambda: drive.executor.slots == 1)
    (tmp_path / "go").touch()
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    assert [event.shares for event in drive.of(0) if isinstance(event, Resized)] == [(one,)]
    assert [report.epoch for report in drive.reports(0)] == [1, 2, 3, 4, 5, 6]
    drive.executor.close()


def test_a_trial_whose_new_device_has_just_left_is_not_lost(
    make: Callable[..., Drive], cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has stopped for the change, and waits for an actor where there is none any more: nothing of it was lost."""
    node = cluster.add_node(num_cpus=HEAD_CPUS, object_store_memory=80 << 20)
    try:
        drive = make(descends, cpus=HEAD_CPUS)  # a node is a device
        drive.until(lambda: drive.executor.slots == 2)
        shares = {free.device.node: Share(free.device.id) for free in drive.executor.free()}
        two = next(share for name, share in shares.items() if name.endswith(node.node_id[:6]))
        one = next(share for share in shares.values() if share is not two)
        work = segment(0, until=6, config={"go": str(tmp_path / "go"), "at": 3})
        drive.submit([work])
        drive.start([work], [one], max_devices=2)
        drive.until(lambda: len(drive.reports(0)) == 3)
        drive.executor.resize(0, [two])
        with monkeypatch.context() as unnoticed:
            unnoticed.setattr(_ray, "_REFRESH_S", 1e9)
            cluster.remove_node(node, allow_graceful=False)
            (tmp_path / "go").touch()
            drive.until(lambda: any(isinstance(event, Resized) for event in drive.events))
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED
    assert [event.shares for event in drive.of(0) if isinstance(event, Resized)] == [(two,), (one,)]
    assert [report.epoch for report in drive.reports(0)] == [1, 2, 3, 4, 5, 6]
    drive.executor.close()


def test_a_trial_whose_actor_is_still_starting_is_changed(make: Callable[..., Drive], tmp_path: Path) -> None:
    """To its study it runs: it would be waited for to change, for as long as it lives."""
    drive = make(descends, slots=2)
    one, two = (Share(free.device.id) for free in drive.executor.free())
    work = segment(0, until=100_000, config={"go": str(tmp_path / "go")})
    drive.submit([work])
    drive.start([work], [one], max_devices=2)
    drive.executor.resize(0, [two])
    assert drive.executor.free() == ()
    drive.until(
        lambda: any(isinstance(event, Resized) for event in drive.events) or len(drive.reports(0)) > 9
    )
    drive.executor.resize(0, [one])  # the actor on the other device has yet to start
    drive.until(lambda: len(drive.reports(0)) > 9)
    (tmp_path / "go").touch()
    drive.finish(1)
    assert [event.shares for event in drive.of(0) if isinstance(event, Resized)] == [(two,), (one,)]
    assert sum(free.fraction for free in drive.executor.free()) == 2


def test_a_worker_that_dies_when_its_trial_has_moved_on_is_not_replaced(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """Its actor made room for the trial's next one, and what is asked of it is answered at once, again and again."""
    drive = make(descends, slots=2)
    executor: Any = drive.executor
    one, two = (Share(free.device.id) for free in executor.free())
    work = segment(0, until=6, config={"go": str(tmp_path / "go"), "at": 3})
    drive.submit([work])
    drive.start([work], [one], max_devices=2)
    drive.until(lambda: len(drive.reports(0)) == 3)
    executor.resize(0, [one, two])
    [worker] = executor._leases.waited_for.values()
    end = ("e", worker.flight.number, 0, time.monotonic(), "paused", 3, "other shares", "", True, None)
    executor._take(worker, [("m", pickle.dumps([end])), ("d", -9, "")])
    assert worker not in worker.lease.workers
    assert worker not in executor._leases.waited_for.values()
    (tmp_path / "go").touch()
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED


def test_who_hangs_after_its_lead_has_ended_costs_the_next_trial_nothing(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """It is given to the same crew at once, begins when that is whole again, and has lost nothing."""
    drive = make(one_hangs, slots=2, job={"meter": False})
    shares = [Share(free.device.id) for free in drive.executor.free()]
    for trial in range(2):
        work = segment(trial, until=2, config={"pid": str(tmp_path / "pid")})
        drive.submit([work])
        drive.start([work], shares, max_devices=2)
        drive.finish(trial + 1)
    assert [drive.ended(trial).reason for trial in range(2)] == ["", ""]
    assert [drive.ended(trial).status for trial in range(2)] == [TrialStatus.COMPLETED] * 2
    assert sum(isinstance(event, Started) for event in drive.of(1)) == 1


def test_a_folder_the_nodes_do_not_see_is_brought_over(make: Callable[..., Drive], tmp_path: Path) -> None:
    """Checkpoints for promotions and copies, and what trials write into their own folders."""

    def train(run: Any) -> None:
        counts(run)
        (run.folder / "inner").mkdir(exist_ok=True)
        with open(run.folder / "inner" / "notes", "a") as file:
            file.write(f"{run.trial}\n")

    drive = make(
        train, [segment(trial, until=2, last=False) for trial in (0, 1)], slots=2, shared_files=False
    )
    drive.finish(2)
    assert (tmp_path / "checkpoints/0/2.ckpt").exists()
    follow = [segment(0, until=4, start=2), segment(1, until=4, start=2, copy_from=pk_checkpoint(0, 2))]
    drive.submit(follow)
    drive.queue += follow
    drive.finish(4)
    assert [report.metrics["length"] for report in drive.reports(0)] == [1, 2, 3, 4]
    assert [report.metrics["first"] for report in drive.reports(1)] == [1, 1, 0, 0]
    assert [type(event).__name__ for event in drive.of(0)].count("Saved") >= 2
    assert (tmp_path / "trials/0/inner/notes").read_text() == "0\n0\n"
    assert (tmp_path / "trials/1/inner/notes").read_text() == "1\n1\n"


def pk_checkpoint(trial: int, epoch: int) -> Any:
    from penstock.core import Checkpoint

    return Checkpoint(trial, epoch)


def test_a_large_configuration_arrives(make: Callable[..., Drive]) -> None:
    drive = make(
        lambda run: float(len(run.config["text"])),
        [segment(0, until=None, config={"text": "x" * 10**6})],
        slots=1,
    )
    drive.finish(1)
    assert drive.reports(0)[0].metrics["loss"] == 10**6


def test_devices_that_others_hold_are_waited_for(make: Callable[..., Drive]) -> None:
    """Another Ray program has the CPUs: the trial begins when it gives them back."""
    import ray

    class Hog:
        def here(self) -> bool:
            return True

    hog = ray.remote(Hog).options(num_cpus=HEAD_CPUS).remote()
    assert ray.get(hog.here.remote())
    drive = make(counts, [segment(0, until=2)], slots=1)
    drive.fill()
    assert drive.poll(1.0) == []
    ray.kill(hog)
    drive.finish(1)
    assert drive.ended(0).status is TrialStatus.COMPLETED


def test_a_driver_outside_of_the_cluster_goes_through_ray_client(cluster: Any, tmp_path: Path) -> None:
    """Its references are made anew with every answer: equal to those it asked with, not the same."""
    import ray
    from ray.util.client.server.server import serve

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = serve("127.0.0.1", port)
    script = f"""
    import penstock as pk

    def train(run):
        for epoch in run.epochs(total=2):
            run.save(epoch)
            run.report(loss=run.config["x"] / (epoch + 1))

    if __name__ == "__main__":
        study = pk.Study(train, pk.Space(x=pk.Float(0, 1)), minimize="loss", budget=pk.Budget(trials=3), seed=1,
                         executor=pk.Ray("ray://127.0.0.1:{port}", slots=1), store={str(tmp_path / "s.db")!r})
        study.run()
        print([(record.id, record.epoch) for record in study.trials], study.state.counts.completed)
    """
    path = tmp_path / "driver.py"
    path.write_text(textwrap.dedent(script))
    try:
        told = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, timeout=400, check=False
        )
    finally:
        server.stop(0)
        if (
            not ray.is_initialized()
        ):  # it has disconnected this process: others would each start a Ray of their own
            connect(cluster)
    assert told.stdout.split("\n")[0] == "[(0, 2), (1, 2), (2, 2)] 3", told.stderr[-2000:]


TWO_STUDIES = """
import json, threading, time
from pathlib import Path
import ray
import penstock as pk

def short(run):
    for _ in run.epochs(1):
        while not Path("other-runs").exists():
            time.sleep(0.05)
        run.report(loss=1.0)

def long(run):
    for epoch in run.epochs(9):
        Path("other-runs").touch()
        time.sleep(0.5)
        run.report(loss=1.0)

ended = {}

def study(work, name):
    made = pk.Study(work, {"x": pk.Float(0, 1)}, minimize="loss", scheduler=pk.Full(trials=1), store="s.db", name=name,
                    executor=pk.Ray(slots=1, cpus=0.5))
    ended[name] = made.run().state.closed.reason

threads = []
for pair in ((short, "short"), (long, "long")):
    threads.append(threading.Thread(target=study, args=pair))
    threads[-1].start()
    while not ray.is_initialized():
        time.sleep(0.05)
for thread in threads:
    thread.join()
print(json.dumps([ended, ray.is_initialized()]))
"""


def test_studies_in_two_threads_share_the_connection_which_the_last_one_ends(
    cluster: Any, tmp_path: Path
) -> None:
    """The one that has connected may be over first: the other goes on."""
    path = tmp_path / "driver.py"
    path.write_text(TWO_STUDIES)
    told = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    assert told.returncode == 0, told.stderr[-2000:]
    ended, connected = json.loads(told.stdout.splitlines()[-1])
    assert ended == {"short": "finished", "long": "finished"}
    assert not connected


@pytest.mark.parametrize("noticed", ["before", "meanwhile"])
def test_who_disconnects_under_a_study_is_told_of(noticed: str) -> None:
    """Ray raises SystemExit where it waits, or connects to another cluster: both would end the study without a word."""

    class Disconnected:
        connected = noticed == "meanwhile"

        def is_initialized(self) -> bool:
            return self.connected

        def wait(self, *_: object, **__: object) -> None:
            self.connected = False
            raise SystemExit(0)

    executor: Any = Ray()
    executor._ray, executor._leases.waited_for = Disconnected(), {"a call": None}
    with pytest.raises(ExecutorError, match=r"ray\.shutdown\(\)"):
        executor._listen(0.1)


def test_who_was_not_listened_to_was_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fits a model for a minute, or waits for a core: what was reported meanwhile is yet to come."""
    worker = SimpleNamespace(heard_s=100.0, flight=SimpleNamespace(open={7}), ready=True, opened=True)
    executor: Any = Ray()
    told: list[str] = []
    executor._job, executor._leases.waited_for = SimpleNamespace(timeout_s=5.0), {"a call": worker}
    executor._died = lambda worker, reason, *_, **__: told.append(reason)
    executor._refreshed_s = executor._listened_s = 101.0
    now_s = 160.0
    monkeypatch.setattr(_ray, "time", SimpleNamespace(monotonic=lambda: now_s))
    executor._refresh = lambda: None
    executor._look_after()
    assert told == []
    for now_s in (160.5, 161.0, 161.5, 162.0, 162.5, 163.0, 163.5, 163.9):  # it listens, and hears nothing
        executor._look_after()
        assert told == []
        executor._listened_s = now_s
    now_s = 164.1
    executor._look_after()
    assert told == ["no report for 5 s (timeout_s)"]


def test_a_device_that_was_kept_for_a_change_and_went_to_another_trial_is_no_error() -> None:
    """One that lost its own is moved to whatever is free, also to what a study keeps for a change at a later epoch."""
    executor: Any = Ray()
    book = executor._book
    flights = []
    for trial, device in enumerate("ab"):
        flight = book.flight(
            Launch(Placement((segment(trial),), (Share(device),), max_devices=2), (None,), (0,))
        )
        book.add(flight)
        book.holdings.hold(flight.shares)
        flight.sent = True
        flights.append(flight)
    executor.resize(0, [Share("b")])
    assert book.take_events() == []  # its start is not told yet, and with that the study asks again
    book.hear(flights[0], ("s", 1, 0, 5.0, 0), 5.0)
    book.take_events()
    executor.resize(0, [Share("b")])
    (event,) = book.take_events()
    assert isinstance(event, Resized)
    assert (event.trial, event.shares) == (0, (Share("a"),))
    assert flights[0].target == ()
    assert book.holdings.free("a") == book.holdings.free("b") == 0.0


def test_a_crew_does_not_meet_where_one_before_it_has_waited() -> None:
    """An actor's next workers may get the same segment: they would look for those that are no more."""
    executor: Any = Ray()
    executor._job = SimpleNamespace(files=Path())
    shares = (Share("a"), Share("b"))
    flight = executor._book.flight(Launch(Placement((segment(0),), shares, max_devices=2), (None,), (0,)))
    sent: list[Any] = []
    worker = SimpleNamespace(
        flight=flight, opened=SimpleNamespace(folder="here", shared=True), gpus=0, threads=1
    )
    worker.handle = SimpleNamespace(take=SimpleNamespace(remote=lambda *given: sent.append(given[3])))
    worker.members = 2
    for worker.turn in (1, 2):
        executor._send(worker)
    places = [[pickle.loads(message)[4]["world"][2] for message in messages] for messages in sent]
    assert [len(set(each)) for each in places] == [1, 1]
    assert places[0] != places[1]


def test_what_runs_on_a_node_that_has_just_left_is_not_set_aside() -> None:
    """Another actor of the same lease waits for room and finds none any more; but this one was at work, and is lost."""
    worker, other = SimpleNamespace(born_s=0.0), SimpleNamespace()
    worker.lease = SimpleNamespace(key=("a",), group=None, workers=[worker, other])
    executor: Any = Ray()
    set_aside: list[Any] = []
    table = {"state": "RESCHEDULING"}
    executor._ray = SimpleNamespace(util=SimpleNamespace(placement_group_table=lambda group: table))
    executor._refresh, executor._set_aside = worker.lease.workers.clear, set_aside.append
    executor._check_stuck(worker)
    assert set_aside == []


def test_a_cluster_without_room_is_an_error(cluster: Any, tmp_path: Path) -> None:
    for executor in (Ray(gpus=True, wait_s=0.0), Ray(slots_per_trial=64, wait_s=0.0)):
        with pytest.raises(ExecutorError, match="wait_s"):
            executor.open(Job(counts, tmp_path, ("loss",)))
        executor.close()


def test_who_waits_for_a_node_is_told_what_for(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray, "_SILENT_S", 0.0)
    executor = Ray(kinds="A100", wait_s=3.0)
    with (
        pytest.warns(RuntimeWarning, match=r"0 devices .* GPUs of kind A100\. Waiting .* 3 s") as told,
        pytest.raises(ExecutorError, match="after waiting"),
    ):
        executor.open(Job(counts, tmp_path, ("loss",)))
    assert len(told) == 1
    executor.close()


# -- without a cluster ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"address": ""},
        {"slots": 0},
        {"slots": "2"},
        {"slots": 2.5},
        {"slots_per_trial": "x"},
        {"cpus": "x"},
        {"gpus": "x"},
        {"shared_files": "x"},
        {"warm": None},
        {"wait_s": "x"},
        {"wait_s": float("nan")},
        {"slots_per_trial": 1.5},
        {"slots_per_trial": 0},
        {"slots": 2, "slots_per_trial": 3},
        {"cpus": 0},
        {"gpus": False, "kinds": "V100"},
        {"wait_s": -1},
        {"kinds": 3},
        {"kinds": [3]},
        {"runtime_env": 3},
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Ray(**options)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr("penstock.execute._connection._KNOCK_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else takes it, and not listened at
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        executor = Ray(address)
        with pytest.raises(ExecutorError, match=rf"{address}.*refused.*Ray\(None\)"):
            executor._connect(NoRay())
        executor.close()
        taken.listen()
        with pytest.raises(ExecutorError, match="asked Ray"):  # now it is Ray's affair
            executor._connect(NoRay())


class NoRay:
    """Stands in for Ray, to see whether it was asked."""

    __version__ = "0"

    def is_initialized(self) -> bool:
        return False

    def init(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("asked Ray")


def test_it_is_kept_with_a_study_as_it_was_made() -> None:
    executor = Ray("auto", slots=3, kinds=["V100", "A100"], runtime_env={"pip": ["x"]})
    assert pickle.loads(pickle.dumps(executor))._options == executor._options


def test_without_ray_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[ray\]'"):
        Ray().open(Job(counts, tmp_path, ("loss",)))


def test_the_executor_loads_ray_only_when_it_is_opened() -> None:
    code = "import sys, penstock as pk; pk.Ray('auto'); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
