"""Workers that are forks of a process with torch in it: they start clean, die alone and leave nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch  # the driver has it, so workers come out of the nursery

import penstock as pk
from penstock.execute import _nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
SPACE = pk.Space(x=pk.Float(0.0, 1.0))


def study(train, trials=2, slots=2, **options):
    return pk.Study(
        train,
        SPACE,
        minimize="loss",
        scheduler=pk.Full(trials=trials, epochs=1),
        executor=pk.Local(slots=slots),
        store=False,
        seed=1,
        **options,
    ).run()


def family(run):
    import gc
    import sys

    had_torch = "torch" in sys.modules and sys.modules["torch"].tensor is not None
    for _ in run.epochs():
        time.sleep(0.3)  # so that both workers get one
        facts = {"had_torch": had_torch, "collects": gc.isenabled()}
        run.report(loss=run.config["x"], pid=os.getpid(), parent=os.getppid(), **facts)


def told(found, name):
    return [record.reports[-1].metrics[name] for record in found.trials]


def test_workers_are_children_of_one_process_that_has_torch_already():
    found = study(family)
    assert len(set(told(found, "pid"))) == 2
    assert len(set(told(found, "parent"))) == 1
    assert os.getpid() not in told(found, "parent")
    assert all(told(found, "had_torch"))
    assert all(told(found, "collects"))  # garbage
    again = study(family)  # the next study has it from the start
    assert told(again, "parent") == told(found, "parent")


WITHOUT = """
import os, sys
import penstock as pk

def train(run):
    had_torch, had_compiler = "torch" in sys.modules, "torch._dynamo" in sys.modules
    import {module}
    for _ in run.epochs():
        run.report(loss=0.0, had_torch=had_torch, had_compiler=had_compiler, parent=os.getppid())

found = pk.Study(
    train, pk.Space(x=pk.Float(0, 1)), minimize="loss",
    scheduler=pk.Full(trials=1, epochs=1), executor=pk.Local(slots=1), store=False,
).run()
(record,) = found.trials
told = record.reports[-1].metrics
had = [name for name in ("torch", "compiler") if told["had_" + name]]
print("torch" in sys.modules, had, told["parent"] == os.getpid())
"""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("json", "False [] True"),
        ("torch.nn.functional", "False ['torch'] False"),
        ("torch; torch.optim.SGD", "False ['torch', 'compiler'] False"),
    ],
)
def test_a_function_that_imports_torch_itself_finds_it_there(module, expected, tmp_path):
    """The driver has none; a function without torch has nothing to wait for."""
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.format(module=module))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == expected, done.stderr


def without_optimizer(run):
    for _ in run.epochs():
        run.report(loss=0.0, compiler="torch._dynamo" in sys.modules, parent=os.getppid())


def with_optimizer(run):
    had = "torch._dynamo" in sys.modules
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for _ in run.epochs():
        run.report(loss=0.0, compiler=had, parent=os.getppid())


def test_a_nursery_imports_later_what_a_later_study_needs():
    for nursery in list(_nursery._nurseries.values()):
        _nursery.drop(nursery)
    first, second = study(without_optimizer, trials=1), study(with_optimizer, trials=1)
    assert told(first, "compiler") == [False]
    assert told(second, "compiler") == [True]
    assert told(first, "parent") == told(second, "parent")


def without_torch(run):
    for _ in run.epochs():
        run.report(loss=0.0, parent=os.getppid())


@pytest.mark.parametrize("name", ["KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_libraries_set_in_the_driver_needs_no_other_nursery(name, monkeypatch, tmp_path):
    """scikit-learn's import sets the first, torch's compiler the second, in the middle of a program."""
    monkeypatch.delenv(name, raising=False)
    before = told(study(without_torch, trials=1), "parent")
    monkeypatch.setenv(name, str(tmp_path))
    assert told(study(without_torch, trials=1), "parent") == before != [os.getpid()]


def test_it_can_be_forbidden(monkeypatch):
    monkeypatch.setenv("PENSTOCK_NURSERY", "0")
    assert set(told(study(family), "parent")) == {os.getpid()}


def environment(run):
    for _ in run.epochs():
        threads = int(os.environ["OMP_NUM_THREADS"])
        run.report(loss=0.0, word=float(os.environ.get("PENSTOCK_TEST_WORD", "-1")), threads=threads)


def test_a_worker_has_the_environment_of_the_moment(monkeypatch):
    assert told(study(environment, trials=1), "word") == [-1]
    monkeypatch.setenv("PENSTOCK_TEST_WORD", "5")
    assert told(study(environment, trials=1), "word") == [5]
    monkeypatch.delenv("PENSTOCK_TEST_WORD")
    assert told(study(environment, trials=1), "word") == [-1]


def threads(run):
    for _ in run.epochs():
        run.report(loss=0.0, threads=torch.get_num_threads(), variable=float(os.environ["OMP_NUM_THREADS"]))


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_worker_has_the_threads_of_its_slot(wanted):
    found = pk.Study(
        threads,
        SPACE,
        minimize="loss",
        scheduler=pk.Full(trials=1, epochs=1),
        executor=pk.Local(slots=1, threads=wanted),
        store=False,
    ).run()
    assert told(found, "threads") == told(found, "variable") == [wanted]


def leave(run):
    for _ in run.epochs():
        os._exit(7)


def test_how_a_worker_ended_is_told():
    (record,) = study(leave, trials=1, retries=0).trials
    assert "exit code 7" in record.reason


def test_an_ended_nursery_is_replaced(monkeypatch):
    (first,) = set(told(study(family, trials=1), "parent"))
    os.kill(int(first), signal.SIGKILL)
    (second,) = set(told(study(family, trials=1), "parent"))
    assert second not in (first, os.getpid())


def end_nursery(run):
    import pathlib

    for _ in run.epochs():
        flag = pathlib.Path(os.environ["PENSTOCK_TEST_FLAG"])
        if not flag.exists():
            flag.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        run.report(loss=run.config["x"])


def test_a_trial_whose_nursery_dies_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(tmp_path / "flag"))
    found = study(end_nursery, trials=2, slots=1)
    assert [record.status.value for record in found.trials] == ["completed", "completed"]
    assert sum(record.retries for record in found.trials) == 1


def test_one_that_does_not_answer_is_given_up(monkeypatch):
    """Workers are then started as new interpreters."""
    monkeypatch.setattr(_nursery, "_READY_S", 0.2)
    monkeypatch.setattr(_nursery, "_BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(_nursery, "_nurseries", {})
    assert set(told(study(family, trials=1), "parent")) == {os.getpid()}


DRIVER = textwrap.dedent(
    """
    import os, sys, time, torch
    import penstock as pk

    def train(run):
        for _ in run.epochs():
            os.makedirs(f"{sys.argv[1]}/{os.getpid()}-{os.getppid()}", exist_ok=True)
            time.sleep(0.01)
            run.report(loss=1.0)

    if __name__ == "__main__":
        scheduler = pk.Full(trials=2, epochs=100_000)
        executor = pk.Local(slots=2)
        space = pk.Space(x=pk.Float(0.0, 1.0))
        pk.Study(train, space, minimize="loss", scheduler=scheduler, executor=executor, store=False).run()
    """
)


@pytest.mark.faults
def test_with_the_driver_all_of_them_die(tmp_path):
    script, seen = tmp_path / "driver.py", tmp_path / "seen"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), str(seen)])
    try:
        deadline_s = time.monotonic() + 300
        while len(list(seen.glob("*"))) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        # While all live: a worker whose nursery dies first would tell of another parent.
        numbers = {int(number) for entry in seen.iterdir() for number in entry.name.split("-")}
        assert len(numbers) == 3  # two workers and the nursery
        processes = [psutil.Process(number) for number in numbers]
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
