"""The local executor's own: arguments, the machine, GPUs as the driver lists them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as pk
from penstock.core import Ended, Reported, Share
from penstock.core.errors import InvalidInput, Unsupported
from penstock.execute import Job, Local, _site
from penstock.execute._machine import Gpu, cgroup_cores, choose_gpus, usable_cores
from penstock.testing.executors import Drive, segment

LISTING = """\
0, GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960
1, GPU-bbbb, NVIDIA A100-SXM4-40GB, 40960
2, GPU-cccc, Tesla V100, [N/A]
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("1,7,0", ["1"]),  # CUDA ignores everything from the first bad one on
        ("GPU-bbbb", ["GPU-bbbb"]),
    ],
)
def test_visible_gpus(visible: str | None, names: list[str]) -> None:
    assert [gpu.visible for gpu in choose_gpus(LISTING, visible)] == names


def test_gpu_facts() -> None:
    assert choose_gpus(LISTING, None)[2] == Gpu("2", "Tesla V100", None)
    assert choose_gpus(LISTING, None)[0].memory_bytes == 40960 * 2**20


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("garbage", None)])
def test_cgroup_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_cores(tmp_path) == cores


def test_old_cgroup_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cores(tmp_path) == 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Local(0),
        lambda: Local(2, slots_per_trial=0),
        lambda: Local(2, slots_per_trial=1.5),
        lambda: Local(2, slots_per_trial=3),
        lambda: Local(2, threads=0),
        lambda: Local(2, gpus=[0]),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Local]) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_cores_are_divided_among_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_site, "usable_cores", lambda: 8)
    monkeypatch.setattr(_site, "visible_gpus", list)
    assert [free.device.cores for free in Local(2).free()] == [4, 4]
    assert len(Local().free()) == 8
    assert [free.device.cores for free in Local(2, threads=1).free()] == [1, 1]


def test_gpus_are_the_slots_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_site, "usable_cores", lambda: 8)
    monkeypatch.setattr(_site, "visible_gpus", lambda: choose_gpus(LISTING, None))
    assert [free.device.id for free in Local().free()] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [free.device.kind for free in Local(gpus=[2]).free()] == ["Tesla V100"]
    assert [free.device.id for free in Local(gpus=0).free()] == [f"cpu:{n}" for n in range(8)]
    assert [free.device.id for free in Local(3).free()] == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(Unsupported, match="3 GPUs"):
        Local(gpus=4).free()


def test_a_worker_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the environment tells it; run.device counts from 0 there."""
    monkeypatch.setattr(_site, "visible_gpus", lambda: choose_gpus(LISTING, "GPU-bbbb,2"))

    def train(run):  # type: ignore[no-untyped-def]
        (run.folder / "seen").write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']} {run.device} {run.devices}")
        return 0.0

    executor = Local()
    executor.open(Job(train, tmp_path, ("loss",)))
    try:
        drive = Drive(executor, [segment(0, until=None), segment(1, until=None)])
        drive.finish(2)
        seen = {(tmp_path / f"trials/{trial}/seen").read_text() for trial in (0, 1)}
        assert seen == {"GPU-bbbb cuda:0 ('cuda:0',)", "2 cuda:0 ('cuda:0',)"}
    finally:
        executor.close()


def test_it_pickles_as_it_was_made() -> None:
    again = pickle.loads(pickle.dumps(Local(3, slots_per_trial=2, threads=1)))
    assert (again.slots, again.slots_per_trial) == (3, 2)


def test_usable_cores_is_at_least_one() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_a_trial_that_is_to_spread_while_it_waits_for_another_is_not_left_waiting(tmp_path: Path) -> None:
    """The idle device is kept for the very trial that waits: nobody may hand it to that trial as a place of its own."""

    @pk.elastic(max_devices=2)
    def work(run: pk.Run) -> None:
        for _ in run.epochs():
            time.sleep(run.config["s"])
            run.report(loss=1.0)

    executor = Local(2)
    executor.open(Job(work, tmp_path, ("loss",)))
    try:
        short = [segment(number, until=1, config={"s": 0.001}) for number in range(6)]
        drive = Drive(executor, short)
        drive.finish(6)  # by now the executor queues trials behind each other
        one, two = (Share(free.device.id) for free in executor.free())
        long, waits = segment(10, until=1, config={"s": 0.3}), segment(11, until=3, config={"s": 0.01})
        drive.submit([long, waits])
        drive.start([long], [one], max_devices=2)
        drive.start([waits], [one], max_devices=2)
        executor.resize(11, [one, two])
        ended: set[int] = set()
        deadline_s = time.monotonic() + 300
        free: list[float] = []
        while (not ended >= {10, 11} or free != [1.0, 1.0]) and time.monotonic() < deadline_s:
            ended |= {event.trial for event in drive.poll(0.1) if isinstance(event, Ended)}
            free = [each.fraction for each in executor.free()]
        assert ended >= {10, 11}
        assert free == [1.0, 1.0]  # nothing stays held
    finally:
        executor.close()


def test_a_trial_that_leaves_its_group_before_it_has_begun_is_not_trained(tmp_path: Path) -> None:
    """It may have been queued again meanwhile, and begin elsewhere."""

    def work(run: pk.Run) -> None:
        (run.folder / "seen").touch()
        while run.trial == 0 and not (run.folder / "go on").exists():
            time.sleep(0.005)
        for _ in run.epochs():
            run.report(loss=1.0)

    executor = Local(1)
    executor.open(Job(work, tmp_path, ("loss",), meter=False))
    try:
        (cpu,) = (Share(free.device.id) for free in executor.free())
        first, *group = (segment(number, until=1) for number in range(4))
        drive = Drive(executor)
        drive.submit([first, *group])
        drive.start([first], [cpu])
        drive.start(group, [cpu])
        executor.stop([2], reason="goes on elsewhere", keep=True)
        (tmp_path / "trials" / "0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "trials" / "0" / "go on").touch()
        drive.until(lambda: sum(isinstance(event, Ended) for event in drive.events) == 4)
        assert [event.kept for event in drive.events if isinstance(event, Ended) and event.trial == 2] == [
            True
        ]
        assert sorted(path.parent.name for path in tmp_path.glob("trials/*/seen")) == ["0", "1", "3"]
    finally:
        executor.close()


class NotedWhenLoaded:
    """Work that leaves a file with its process's number where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__.update(state)
        (self.folder / f"loaded-{os.getpid()}").touch()

    def __call__(self, run: pk.Run) -> None:
        for _ in run.epochs():
            run.report(loss=os.getpid())


def test_workers_start_beside_what_the_driver_does_first(tmp_path: Path) -> None:
    executor = Local(2)
    work = NotedWhenLoaded(tmp_path)
    (tmp_path / "files").mkdir()
    executor.open(Job(work, tmp_path / "files", ("loss",), meter=False))
    try:
        with executor.meanwhile():
            pass
        until_s = time.monotonic() + 300
        while len(list(tmp_path.glob("loaded-*"))) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        loaded = {int(path.name.partition("-")[2]) for path in tmp_path.glob("loaded-*")}
        assert len(loaded) == 2
        drive = Drive(executor, [segment(trial, until=1) for trial in range(2)])
        drive.finish(2)
        used = {event.metrics["loss"] for event in drive.events if isinstance(event, Reported)}
        assert used <= loaded, "the workers that were started are those that train"
        assert os.getpid() not in used
    finally:
        executor.close()
