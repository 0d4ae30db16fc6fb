"""The flagship study: all capabilities at once, on simulated devices, local workers and Ray, killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import penstock as pk
from penstock.energy import V100
from penstock.store import open_store

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import flagship  # noqa: E402

SMALL = {"max_epochs": 3}
KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import cloudpickle, flagship, penstock
from penstock.core import Reported

class Killer:
    reports = kept = 0
    def open(self, *_): pass
    def on(self, event, state):
        self.reports += isinstance(event, Reported)
        if self.reports >= {reports} and self.kept:
            os.kill(os.getpid(), signal.SIGKILL)
    def tick(self, *_):
        self.kept = self.reports  # in the journal before the next event comes
    def say(self, text): pass
    def close(self): pass

from penstock.report import View
from penstock.study import _session
View.register(Killer)
_session._SIMULATED_BATCH = 10  # simulations write in batches of a thousand events: this one would leave nothing
known = cloudpickle.load(open({known!r}, "rb"))
if {again!r}:
    study = penstock.Study.load({store!r}, "killed", executor=penstock.Ray(slots=2), fuse=4)
else:
    study = flagship.study({where!r}, {store!r}, known, **{options!r})
study.run(view=Killer())
"""


@pytest.fixture(scope="module")
def known():
    return flagship.predictors()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, known):
    """A folder with the predictors in a file, for other processes."""
    folder = tmp_path_factory.mktemp("flagship")
    (folder / "known").write_bytes(cloudpickle.dumps(known))
    return folder


def kill_in_the_middle(where, folder, store, reports, *, again=False, **options):
    """Run the study in a process that is killed after so many reports; the store is what is left.

    ``again``: the one that is there already, on Ray.
    """
    script = KILLED.format(
        examples=str(EXAMPLES),
        reports=reports,
        known=str(folder / "known"),
        where=where,
        store=str(store),
        options=options,
        again=again,
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def curves(study, targets):
    """By configuration, the metrics of every epoch of the twin's trials, or of the model's own."""
    return {
        tuple(sorted(trial.config.items())): {
            report.epoch: (report.metrics["accuracy"], report.metrics["loss"]) for report in trial.reports
        }
        for trial in study.trials
        if trial.is_target is targets
    }


def alike(one, two):
    """The same trials, each trained as far, with the same metrics but for rounding in fused groups."""
    assert one.keys() == two.keys()
    for config, epochs in one.items():
        assert epochs.keys() == two[config].keys()
        for epoch, metrics in epochs.items():
            # One of 449 pictures may lie on the border; losses are sums of float32.
            assert metrics[0] == pytest.approx(two[config][epoch][0], abs=0.0023)
            assert metrics[1] == pytest.approx(two[config][epoch][1], rel=1e-3)


def result(study):
    """The configuration and curve of ``study.best``, then those of the other model made of the twin's best."""
    whole = [trial for trial in study.surrogate_trials if trial.status is pk.TrialStatus.COMPLETED]
    best = max(whole, key=lambda trial: trial.metrics["accuracy"])
    trained = [trial for trial in study.target_trials if trial.parent == best.id]
    assert len(trained) == 2  # transferred, and once more with another weight decay
    assert {trial.status for trial in trained} == {pk.TrialStatus.COMPLETED}
    assert study.best in trained  # whatever eager transfer trains besides
    trained.sort(key=lambda trial: trial is not study.best)
    keys = [tuple(sorted(trial.config.items())) for trial in trained]
    return {key: curves(study, True)[key] for key in keys}


def sound(study):
    """What holds of every run of it, wherever."""
    study.state.validate()
    assert study.state.closed.reason == "finished"
    assert study.best.is_target
    assert study.best.epoch == study.scheduler.max_epochs
    assert study.refused > 0
    for trial in study.trials:
        assert trial.status.is_end
        assert V100.power_w(flagship.load(trial.config), 250.0) <= 180
        assert trial.config["width"] < 512  # beyond 1 MB
        assert not trial.violated
        assert all(report.energy is not None for report in trial.reports)
    assert study.energy.wh <= 1000


def best_limit_w(config):
    """Zeus Eq. 7 by brute force, for eta = 0.5."""
    load = flagship.load(config)
    limits = range(100, 251, 25)
    return min(limits, key=lambda w: (0.5 * V100.power_w(load, w) + 0.5 * 250) * V100.epoch_s(load, w))


def test_in_simulation_a_killed_study_ends_as_one_that_was_not(known, shelf):
    whole = flagship.study("simulated", shelf / "whole.db", known, max_epochs=9).run()
    sound(whole)
    fused = [event.fused for event in _events(shelf / "whole.db") if getattr(event, "fused", ())]
    assert fused, "no trials were fused"
    profiles = [note.data for note in whole.state.notes if note.topic == "power_profile"]
    assert profiles
    assert all(profile["energy_saved"] > 0.1 for profile in profiles)
    kill_in_the_middle("simulated", shelf, shelf / "killed.db", whole.state.epochs // 2, max_epochs=9)
    left = flagship.unfinished(shelf / "killed.db")  # as the example does when it is run again
    assert 0 < left.state.epochs < whole.state.epochs
    resumed = left.run()
    sound(resumed)
    assert curves(resumed, False) == curves(whole, False)
    assert list(result(resumed).items()) == list(result(whole).items())
    for store in ("whole.db", "killed.db", "none.db"):
        assert flagship.unfinished(shelf / store) is None
    open_store(shelf / "empty.db", write=True).close()
    assert flagship.unfinished(shelf / "empty.db") is None


@pytest.fixture(scope="module")
def ray(monkeypatch_module):
    """A runtime of two CPUs that outlives drivers: they find its address where Ray looks for one."""
    ray = pytest.importorskip("ray")
    context = ray.init(
        "local",  # whatever else runs on this machine
        num_cpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    monkeypatch_module.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def whole(known, shelf):
    """The study on local workers, from its beginning to its end; the store is ``shelf / "real.db"``."""
    store = shelf / "real.db"
    first = flagship.study("local", store, known, name="first", **SMALL).run()
    sound(first)
    profiles = {
        note.data["batch_size"]: note.data for note in first.state.notes if note.topic == "power_profile"
    }
    assert profiles
    for batch_size, profile in profiles.items():
        # Who of that batch size came first has profiled it.
        sizes = [trial.config for trial in first.trials if trial.config["batch_size"] == batch_size]
        assert profile["limit_w"] in {best_limit_w(config) for config in sizes}
    # Its profiles are known now, so that what a trial draws no longer depends on who profiles.
    whole = flagship.study("local", store, known, name="whole", **SMALL).run()
    sound(whole)
    return whole


def test_killed_on_local_workers_and_again_on_ray_it_ends_with_the_same_result(whole, shelf, ray):
    store, name, third = shelf / "real.db", "killed", whole.state.epochs // 3
    kill_in_the_middle("local", shelf, store, third, name=name, **SMALL)
    begun = pk.Study.load(store, name).state.epochs
    kill_in_the_middle("ray", shelf, store, third, again=True)
    left = pk.Study.load(store, name, executor=pk.Ray(slots=2), fuse=4)
    assert 0 < begun < left.state.epochs < whole.state.epochs
    resumed = left.run()
    sound(resumed)
    assert len(resumed.state.sessions) == 3
    alike(curves(resumed, False), curves(whole, False))
    alike(result(resumed), result(whole))
    assert list(result(resumed)) == list(result(whole))  # the best first
    # Whether any of them trained fused depends on what the kills have left to wait together.


def _events(path, name=None):
    store = open_store(path, write=False)
    try:
        return [event for _, event in store.read(store.find(name).id)]
    finally:
        store.close()
