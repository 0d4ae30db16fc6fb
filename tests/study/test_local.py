"""Studies on real worker processes, and the crashes they have to survive."""

import importlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

import penstock as pk
from penstock.core import Ended, StudyState, Submitted
from penstock.store import open_store

SPACE = pk.Space(x=pk.Float(0, 1))

DRIVER = textwrap.dedent(
    """
    import os, sys, time
    import penstock as pk

    def train(run):
        state = run.load() or {"sum": 0.0}
        for epoch in run.epochs():
            state["sum"] += run.config["x"] * (epoch + 1)
            time.sleep(0.008)
            with open(LOG, "a") as log:
                log.write(f"{run.trial} {epoch}\\n")
            DONE.append(epoch)
            while len(DONE) >= 6 and os.path.exists(HOLD):
                open(f"{LOG}.{os.getpid()}", "w").close()
                time.sleep(0.01)
            run.save(state)
            run.report(loss=state["sum"])

    STORE, LOG, HOLD = sys.argv[1:]
    DONE = []  # of one worker
    space = pk.Space(x=pk.Float(0, 1))
    try:
        study = pk.Study.load(STORE)
    except pk.errors.StoreError:
        study = pk.Study(train, space, minimize="loss", scheduler=pk.Halving(max_epochs=9, trials=27),
                         sampler=pk.Random(), executor=pk.Local(slots=2), store=STORE, seed=5)
    except pk.errors.InvalidInput:  # killed before the study was created
        study = pk.Study(train, space, minimize="loss", scheduler=pk.Halving(max_epochs=9, trials=27),
                         sampler=pk.Random(), executor=pk.Local(slots=2), store=STORE, seed=5)
    study.run()
    """
)


def results(path):
    store = open_store(path, write=False)
    try:
        state = StudyState.of(event for _, event in store.read(store.find().id))
    finally:
        store.close()
    state.validate()
    return state


def wait_until(true):
    until_s = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def drive(tmp_path, name, sig=None):
    """Run the driver; with ``sig``, send it that when each of its two workers waits in its sixth epoch."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    log, hold = tmp_path / f"{name}.log", tmp_path / f"{name}.hold"
    command = [sys.executable, str(script), str(tmp_path / f"{name}.db"), str(log), str(hold)]
    if sig is not None:
        hold.touch()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if sig is not None:
        wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob(f"{log.name}.*"))) == 2)
        process.send_signal(sig)
        if sig == signal.SIGKILL:  # its workers, too, before they finish their epochs
            pids = [int(path.suffix[1:]) for path in tmp_path.glob(f"{log.name}.*")]
            wait_until(lambda: not any(map(alive, pids)))
        hold.unlink()
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def outcome(state):
    return [(t.id, t.config["x"], t.status.value, t.epoch, dict(t.metrics)) for t in state.trials.values()]


@pytest.mark.faults
def test_no_epoch_before_a_checkpoint_is_run_twice(tmp_path):
    """Every epoch saves, so after one kill at most the epochs in flight (one per slot) run again."""
    code, _ = drive(tmp_path, "once", signal.SIGKILL)
    assert code == -signal.SIGKILL
    left = str(pk.Study.load(tmp_path / "once.db"))
    assert re.search(
        r"^  left    interrupted \(its driver died; go on with: penstock resume .*once\.db --study",
        left,
        re.M,
    )
    code, errors = drive(tmp_path, "once")
    assert code == 0, errors
    assert "  open  " not in str(pk.Study.load(tmp_path / "once.db"))
    lines = (tmp_path / "once.log").read_text().split("\n")[:-1]
    again = len(lines) - len(set(lines))
    assert 0 < again <= 2
    state = results(tmp_path / "once.db")
    assert len(set(lines)) == state.epochs


@pytest.mark.faults
def test_ctrl_c_drains_and_the_study_resumes(tmp_path):
    code, errors = drive(tmp_path, "drained", signal.SIGINT)
    assert code == 0, errors
    state = results(tmp_path / "drained.db")
    assert state.closed.reason == "interrupted"
    assert state.counts.running == 0
    code, errors = drive(tmp_path, "drained")
    assert code == 0, errors
    whole = drive(tmp_path, "whole")
    assert whole[0] == 0
    assert outcome(results(tmp_path / "drained.db")) == outcome(results(tmp_path / "whole.db"))
    lines = (tmp_path / "drained.log").read_text().split("\n")[:-1]
    assert len(lines) == len(set(lines))  # a drain loses nothing


@pytest.mark.faults
def test_killed_workers_lose_nothing(tmp_path):
    markers = tmp_path / "killed"
    markers.mkdir()

    def train(run):
        state = run.load() or 0
        for epoch in run.epochs(6):
            state += 1
            run.save(state)
            run.report(loss=run.config["x"], seen=state)
            marker = markers / f"{run.trial}-{epoch}"
            if random.Random(f"{run.trial}-{epoch}").random() < 0.2 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    done = pk.Study(
        train,
        SPACE,
        minimize="loss",
        scheduler=pk.Full(trials=12),
        sampler=pk.Random(),
        executor=pk.Local(slots=2),
        store=tmp_path / "s.db",
    ).run()
    died = len(list(markers.iterdir()))
    assert died > 3
    assert {t.status.value for t in done.trials} == {"completed"}
    assert sum(t.retries for t in done.trials) == died
    for trial in done.trials:
        assert [report.epoch for report in trial.reports] == list(range(1, 7))
        # Had an epoch before the last checkpoint been lost or run twice, the count would not match.
        assert [report.metrics["seen"] for report in trial.reports] == list(range(1, 7))


def test_two_writers_the_second_is_refused(tmp_path):
    path = tmp_path / "s.db"
    pk.Study(
        lambda run: {"loss": run.config["x"]},
        SPACE,
        minimize="loss",
        scheduler=pk.Full(trials=2),
        sampler=pk.Random(),
        executor=pk.Local(slots=1),
        store=path,
    ).run()
    holder = open_store(path, write=True)
    holder.lock(holder.find().id)
    try:
        script = f"import penstock as pk\npk.Study.load({str(path)!r}).run()"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode != 0
        assert "StoreLocked" in done.stderr
        assert str(os.getpid()) in done.stderr
    finally:
        holder.close()


def test_local_gives_what_simulated_gives(tmp_path):
    def train(run):
        for epoch in run.epochs():
            run.report(loss=run.config["x"] + 1 / (epoch + 1))

    def run(executor):
        made = pk.Study(
            train,
            SPACE,
            minimize="loss",
            scheduler=pk.Hyperband(max_epochs=9),
            sampler=pk.Random(),
            executor=executor,
            store=False,
            seed=4,
        ).run()
        return {t.id: (t.config["x"], t.epoch, t.status, dict(t.metrics)) for t in made.trials}

    assert run(pk.Local(slots=2)) == run(pk.Simulated(devices=2))


def test_a_script_needs_no_main_guard_and_prints_only_its_own_output(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import penstock as pk\n"
        "def train(run):\n"
        "    print('noise' * 1000)\n"
        "    run.report(loss=run.config['x'] ** 2)\n"
        "study = pk.Study(train, pk.Space(x=pk.Float(-1, 1)), minimize='loss',\n"
        "                 scheduler=pk.Full(trials=4), sampler=pk.Random(), store='s.db').run()\n"
        "print(len(study.trials), study.best.metrics['loss'] < 1)\n"
    )
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 True\n"
    assert done.stderr == ""


def test_hanging_trials_are_killed_and_named():
    def hangs(run):
        run.report(loss=1.0)
        if run.trial == 0:
            time.sleep(600)

    done = pk.Study(
        hangs,
        SPACE,
        minimize="loss",
        scheduler=pk.Full(trials=3),
        sampler=pk.Random(),
        executor=pk.Local(slots=2),
        timeout_s=5.0,
        store=False,
    ).run()
    assert [t.status.value for t in done.trials] == ["failed", "completed", "completed"]
    assert "timeout_s" in done.trials[0].reason


MANY = textwrap.dedent(
    """
    import gc
    import penstock as pk

    def train(run):
        for _ in run.epochs(1):
            run.report(loss=run.config["x"])

    def once():
        pk.Study(train, pk.Space(x=pk.Float(0, 1)), minimize="loss", sampler=pk.Random(),
                 scheduler=pk.Full(trials=300), executor=pk.Local(1), store=False).run()

    once()
    gc.collect()
    first = len(gc.get_objects())
    for _ in range(12):
        once()
    print(len(gc.get_objects()) / first)
    """
)


def test_studies_one_after_another_leave_their_driver_small(tmp_path):
    """What a study leaves in cycles is collected once there is a good deal more of everything: never left for good."""
    script = tmp_path / "many.py"
    script.write_text(MANY)
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.4


@pytest.mark.parametrize(
    "scheduler", [pk.Halving(max_epochs=3, trials=3), pk.PBT(population=2, max_epochs=2, interval=1)]
)
@pytest.mark.parametrize("saves", [False, True])
def test_a_training_that_saves_nothing_is_told_once_that_it_starts_again(tmp_path, capsys, scheduler, saves):
    begun = tmp_path / "begun"

    def train(run):
        done = run.load() or 0
        with begun.open("a") as log:
            log.write(f"{done}\n")
        for _ in run.epochs():
            done += 1
            if saves:
                run.save(done)
            run.report(loss=run.config["x"])

    pk.Study(
        train,
        SPACE,
        minimize="loss",
        scheduler=scheduler,
        sampler=pk.Random(),
        executor=pk.Local(1),
        store=False,
    ).run()
    assert ("1" in begun.read_text().split()) == saves
    assert capsys.readouterr().err.count("no checkpoint was saved") == (not saves)


def quick(run):
    for epoch in run.epochs(50):
        run.report(loss=run.config["x"] / (epoch + 1))


def quick_saved(run):
    run.load()
    for epoch in run.epochs(50):
        run.save(epoch)
        run.report(loss=run.config["x"] / (epoch + 1))


@pytest.mark.parametrize("work", [quick, quick_saved])
@pytest.mark.parametrize(
    "scheduler",
    [pk.Full(), pk.Full(epochs=40), pk.ASHA(max_epochs=27, trials=None)],
    ids=["open", "full", "asha"],
)
def test_workers_far_ahead_of_their_driver_keep_to_a_budget_of_epochs(work, scheduler):
    """Fifty epochs are over before the driver has read of the first one."""
    for limit in (5, 64):
        done = pk.Study(
            work,
            SPACE,
            minimize="loss",
            scheduler=scheduler,
            sampler=pk.Random(),
            budget=pk.Budget(epochs=limit),
            executor=pk.Local(slots=2),
            store=False,
            meter=False,
        ).run()
        assert done.state.epochs == limit
        assert sum(len(trial.reports) for trial in done.trials) == limit
        assert done.state.closed.reason == "budget"


def falls_silent(run):
    """The second trial returns early; the first, without checkpoints, could use what it leaves."""
    for epoch in run.epochs(40):
        run.report(loss=1.0)
        if run.trial == 1 and epoch == 1:
            return


def test_epochs_that_nobody_can_use_are_said(tmp_path):
    options = {"minimize": "loss", "sampler": pk.Random(), "executor": pk.Local(slots=2), "meter": False}
    path = tmp_path / "s.db"
    budget = pk.Budget(epochs=20)
    done = pk.Study(falls_silent, SPACE, scheduler=pk.Full(trials=2), budget=budget, store=path, **options)
    done.run()
    assert done.state.epochs == 12  # of ten each
    assert done.state.closed.reason == "budget"
    assert "12 of 20 epochs spent" in done.state.closed.detail
    assert "run.save" in done.state.closed.detail
    more = pk.Study.load(path, budget=pk.Budget(epochs=60)).run()
    assert [trial.epoch for trial in more.trials] == [40, 2]
    assert more.state.closed.reason == "finished"


@pytest.mark.parametrize("sampler", [pk.TPE, pk.Bayes, pk.Random])
def test_who_learns_is_asked_when_somebody_is_idle(tmp_path, sampler):
    """However short the trials: what would queue behind them could not learn from them. Others queue."""
    study = pk.Study(
        lambda run: run.config["x"],
        SPACE,
        minimize="loss",
        sampler=sampler(),
        executor=pk.Local(slots=2),
        budget=pk.Budget(trials=40),
        store=tmp_path / "s.db",
        meter=False,
    ).run()
    under_way, most = 0, 0
    with open_store(tmp_path / "s.db", write=False) as store:
        for _, event in store.read(store.find().id):
            if isinstance(event, Submitted):
                under_way += len(event.segments)
            elif isinstance(event, Ended):
                under_way -= 1
            most = max(most, under_way)
    assert len(study.trials) == 40
    assert under_way == 0
    assert (most <= 2) == (sampler is not pk.Random)


@pytest.mark.parametrize("rules", [(), (pk.Plateau("loss", patience=25),)], ids=["nothing", "a rule"])
def test_trials_that_nothing_ends_are_told_of(rules, capsys):
    def train(run):
        for epoch in run.epochs():
            run.report(loss=1.0 if epoch < 25 else 0.0)
            if epoch == 30:
                break

    pk.Study(
        train,
        SPACE,
        minimize="loss",
        executor=pk.Local(1),
        budget=pk.Budget(trials=2),
        store=False,
        stop=rules,
    ).run()
    said = capsys.readouterr().err
    assert said.count("nothing but its own function ends it") == (not rules)
    assert said.count("Write run.epochs(10)") == (not rules)


def test_a_module_that_runs_a_study_as_it_is_imported_runs_no_others_in_workers(tmp_path, monkeypatch):
    (tmp_path / "runs_at_once.py").write_text(
        textwrap.dedent(
            """
            import os
            import penstock as pk

            if (depth := int(os.environ.get("DEPTH", 0))) > 1:
                raise SystemExit("a worker of a worker")
            os.environ["DEPTH"] = str(depth + 1)

            def train(run):
                return run.config["x"]

            study = pk.Study(train, {"x": pk.Float(0, 1)}, minimize="loss", scheduler=pk.Full(trials=1),
                             executor=pk.Local(1), store=False)
            study.run()
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DEPTH", "0")
    with pytest.raises(
        pk.errors.PenstockError, match=r'each worker would run it again.*if __name__ == "__main__"'
    ):
        importlib.import_module("runs_at_once")
