"""SM2 in whole studies: on simulated and real workers, cut, killed, failing, metered or not."""

import dataclasses
import functools
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import types

import pytest

import penstock as pk
from penstock.core import Measurement, Source, StudyState
from penstock.core.errors import InvalidInput
from penstock.report import read_journal, sm2_comparison, sm2_plot, sm2_report, sm2_text
from penstock.store import open_store
from penstock.train._loop import Trainer

torch = pytest.importorskip("torch")
optuna = pytest.importorskip("optuna")
F = torch.nn.functional

SETUP = """
import torch
import penstock as pk

def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=g)
    return pk.Data.split(x, (x @ torch.randn(6, 3, generator=g)).argmax(1))

def net():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()

task = pk.Task(net, data, torch.nn.functional.cross_entropy, metrics={"accuracy": accuracy})
space = pk.Space(batch_size=pk.Choice(4, 8, 16, 32))
scheduler = pk.SM2(lrs=6, thorough_epochs=2, final_epochs=2, max_epochs=6, patience=None)

def make(executor, store):
    return pk.Study(task, space, minimize="loss", scheduler=scheduler, sampler=pk.Random(), executor=executor,
                    store=store, name="s", meter=False, seed=3)
"""
parts: dict = {}
exec(SETUP, parts)


def study(work=None, executor=None, **options):
    options.setdefault("scheduler", parts["scheduler"])
    options.setdefault("sampler", pk.Random())
    options.setdefault("store", False)
    options.setdefault("seed", 3)
    space = options.pop("space", parts["space"])
    return pk.Study(
        work or parts["task"], space, minimize="loss", executor=executor or pk.Simulated(devices=2), **options
    )


def outcome(state):
    return [
        (t.id, t.config, t.status.value, t.epoch, t.reason, [(r.epoch, dict(r.metrics)) for r in t.reports])
        for t in state.trials.values()
    ]


def events(path):
    store = open_store(path, write=False)
    try:
        return [event for _, event in store.read(store.find().id)]
    finally:
        store.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in a worker: sums in another order would differ in the last digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The study, run without interruption on simulated devices: its path and its outcome."""
    path = tmp_path_factory.mktemp("whole") / "s.db"
    done = parts["make"](pk.Simulated(devices=1), path).run()
    return path, outcome(done.state)


def test_a_study_follows_algorithm_1(whole):
    """4 configurations: 4 explored, 2 trained 2 epochs, 2 explored, 1 trained by twos to 6 thorough epochs."""
    trials = whole[1]
    explored = {i: [e for e, m in reports if "sm2_lr" in m] for i, *_, reports in trials}
    assert sorted(len(epochs) for epochs in explored.values()) == [1, 1, 2, 3]
    (winner,) = [i for i, epochs in explored.items() if len(epochs) == 3]
    assert explored[winner] == [1, 4, 7]
    for number, _config, status, epoch, reason, _ in trials:
        if number == winner:
            assert (status, epoch) == ("completed", 9)
        else:
            assert status == "stopped"
            assert "worse half of round" in reason
    assert {config["batch_size"] for _, config, *_ in trials} == {4, 8, 16, 32}


def test_local_gives_what_simulated_gives(whole, tmp_path):
    done = parts["make"](pk.Local(slots=2), tmp_path / "s.db").run()
    assert outcome(done.state) == whole[1]


def test_a_journal_cut_anywhere_resumes_to_the_same_results(whole, tmp_path):
    """Simulated checkpoints die with the process, so unfinished trials run their whole history again."""
    path = tmp_path / "s.db"
    parts["make"](pk.Simulated(devices=1), path).run()
    length = len(events(path))
    cuts = sorted(random.Random(0).sample(range(2, length), 8), reverse=True)
    for cut in cuts:
        store = open_store(path, write=True)
        entry = store.find("s")
        store.lock(entry.id)
        store.cut(entry.id, keep=cut)
        store.close()
        resumed = pk.Study.load(path, "s").run()
        resumed.state.validate()
        assert outcome(resumed.state) == whole[1], cut


DRIVER = SETUP + textwrap.dedent(
    """
    import os, signal, sys
    from penstock.report import View

    class Killer(View):
        events = 0
        def open(self, *_): pass
        def on(self, event, state):
            self.events += 1
            if self.events >= int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        def tick(self, *_): pass
        def say(self, text): pass
        def close(self): pass

    try:
        study = pk.Study.load(sys.argv[1])
    except (pk.errors.StoreError, pk.errors.InvalidInput):  # killed before the study was created
        study = make(pk.Local(slots=1), sys.argv[1])
    study.run(view=Killer())
    """
)


@pytest.mark.faults
def test_killed_drivers_resume_to_the_uninterrupted_result(whole, tmp_path):
    script, path = tmp_path / "driver.py", tmp_path / "s.db"
    script.write_text(DRIVER)
    rng = random.Random(5)
    for _ in range(2):
        command = [sys.executable, str(script), str(path), str(rng.randint(4, 16))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600)
        assert done.returncode == -signal.SIGKILL, done.stderr
    pk.Study.load(path).run()  # here, whose workers have torch already
    state = StudyState.of(events(path))
    state.validate()
    for ours, theirs in zip(outcome(state), whole[1], strict=True):
        assert ours[:4] == theirs[:4]
        for (epoch, metrics), (at, wanted) in zip(ours[5], theirs[5], strict=True):
            # The uninterrupted one ran in this process, whose sums may differ from a worker's in the last digit.
            assert epoch == at
            assert metrics == pytest.approx(wanted, rel=1e-5)


def test_nothing_leaks_from_explorations_into_the_model(whole):
    """By hand: where the study explored, only the learning rate changes; all else is plain training."""
    trials = whole[1]
    number, config, *_, reports = max(trials, key=lambda trial: trial[3])
    seed = StudyState.of(events(whole[0])).trials[number].seed
    trainer = Trainer(parts["task"], {**config, "lr": 1.0}, seed=seed)
    for epoch, metrics in reports:
        if "sm2_lr" in metrics:
            trainer.set_lr(metrics["sm2_lr"])
            trainer.epoch += 1
        else:
            assert trainer.train_epoch() == metrics, epoch


def test_batch_sizes_need_not_be_in_the_space():
    space = pk.Space(momentum=pk.Float(0.5, 0.9))
    quick = pk.SM2([8, 16], lrs=4, thorough_epochs=1, final_epochs=1, max_epochs=2, sampler=pk.TPE())
    done = study(space=space, scheduler=quick, sampler=None).run()
    assert [t.config["batch_size"] for t in done.trials] == [8, 16]
    assert all(0.5 <= t.config["momentum"] <= 0.9 for t in done.trials)
    assert len({t.seed for t in done.trials}) == 1


@pytest.mark.parametrize("sampler", [pk.TPE, lambda: pk.OptunaSampler(optuna.samplers.RandomSampler)])
def test_batch_sizes_outside_the_space_are_none_of_the_samplers_at_a_resume(sampler, tmp_path):
    options = {"space": pk.Space(decay=pk.Float(0.0, 1.0)), "sampler": sampler()}
    quick = pk.SM2([4, 8, 16], thorough_epochs=2, final_epochs=2, max_epochs=4)
    whole = study(even, scheduler=quick, **options).run()
    path = tmp_path / "s.db"
    cut = study(even, scheduler=quick, store=path, budget=pk.Budget(time_s=2.5), **options).run()
    assert cut.state.closed.reason != "finished"
    assert outcome(pk.Study.load(path, budget=pk.Budget()).run().state) == outcome(whole.state)


def test_a_budget_of_trials_leaves_out_the_last_batch_sizes():
    for source in (Source.MEASURED, Source.SIMULATED):
        executor = metered(pk.Simulated(devices=2), source)
        done = study(even, executor, budget=pk.Budget(trials=3)).run()
        assert [t.config["batch_size"] for t in done.trials] == [4, 8, 16]
        assert done.state.closed.reason == "finished"
        assert done.state.counts.completed == 1


def test_one_configuration_is_explored_and_trained():
    done = study(scheduler=pk.SM2([16], lrs=4, final_epochs=2, max_epochs=4, patience=None)).run()
    (trial,) = done.trials
    assert (trial.status.value, trial.epoch) == ("completed", 6)
    assert ["sm2_lr" in report.metrics for report in trial.reports] == [True, False, False] * 2
    told = sm2_report(done)
    assert told.winner == 0
    assert all(c.score.total == 1.0 for round_ in told.rounds for c in round_.configurations)


def test_equal_values_keep_the_first_batch_sizes():
    def same(run):
        for _ in run.epochs():
            assert run.options["mode"] in ("explore", "thorough")
            run.report(loss=1.0)

    done = study(same, scheduler=pk.SM2(max_epochs=2, thorough_epochs=1, final_epochs=1, patience=None)).run()
    assert [(t.config["batch_size"], t.status.value) for t in done.trials] == [
        (4, "completed"),
        (8, "stopped"),
        (16, "stopped"),
        (32, "stopped"),
    ]


def test_failing_trials_leave_the_race_and_the_others_go_on():
    def breaks(run):
        assert run.options
        for epoch in run.epochs():
            size = run.config["batch_size"]
            if size == 32 or (size == 16 and epoch == 1):
                raise RuntimeError("no luck")
            run.report(loss=1.0 / size)

    quick = pk.SM2(max_epochs=2, thorough_epochs=1, final_epochs=1, patience=None)
    done = study(breaks, scheduler=quick).run()
    found = {t.config["batch_size"]: t.status.value for t in done.trials}
    assert found == {4: "stopped", 8: "completed", 16: "failed", 32: "failed"}
    assert done.best.config["batch_size"] == 8
    none = study(lambda run: 1 / (run.options is None), scheduler=quick).run()
    assert none.best is None
    assert none.state.closed.reason == "finished"
    assert {t.status.value for t in none.trials} == {"failed"}
    assert sm2_report(none).rounds == ()


def test_a_target_reached_in_the_last_epoch_of_a_segment_ends_the_study():
    task = pk.Task(parts["net"], parts["data"], F.cross_entropy, target=("loss", 1e9))
    done = study(task, scheduler=pk.SM2(lrs=4, thorough_epochs=1, max_epochs=50)).run()
    over = [t for t in done.trials if t.status.value == "completed"]
    assert {t.epoch for t in over} == {
        2
    }  # one exploration, one epoch at the end of which the target is reached
    assert all(t.status.is_end for t in done.trials)
    assert max(t.epoch for t in done.trials) == 2
    others = {t.reason for t in done.trials if t.status.value == "stopped"}
    assert all("reached its target" in reason or "worse half" in reason for reason in others)


class Looped:
    """A callable whose method takes part in explorations, or not."""

    def __init__(self, explores):
        self.loop = self.by_options if explores else self.plain

    def by_options(self, run):
        return run.options

    def __call__(self, run):
        return self.loop(run)

    def plain(self, run):
        return run.config


class Fitter:
    """No callable, with two ways to train."""

    def fit(self, run):
        return run.options

    def other(self, run):
        return run.config


def told(run):
    for _ in run.epochs():
        run.report(loss=1.0, sm2_lr=0.1)


def untold(run):
    for _ in run.epochs(2):
        run.report(loss=1.0)


def test_a_function_that_takes_no_part_in_explorations_is_refused_before_anything_runs():
    def inner(run):
        told(run)

    def empty(run):
        return late(run)

    plain = [untold, functools.partial(untold), lambda run: untold(run), empty]
    for work in plain:
        with pytest.raises(
            InvalidInput, match=r"takes no part in that: give a pk\.Task, or read run\.options"
        ):
            study(work)
    for work in (told, functools.partial(told), lambda run: told(run), inner, Looped(True), study().work):
        assert study(work).work is work

    library = types.ModuleType("library")
    library.explored, library.unexplored = told, untold
    trainer = Fitter()
    for work in (
        lambda run: library.explored(run),
        lambda run: trainer.fit(run),
        lambda run: Fitter.fit(trainer, run),
    ):
        assert study(work).work is work
    with pytest.raises(InvalidInput, match="takes no part"):
        study(lambda run: library.unexplored(run))
    with pytest.raises(InvalidInput, match="takes no part"):
        study(lambda run: trainer.other(run))

    def late(run):
        return untold(run)

    with pytest.raises(InvalidInput, match="empty takes no part"):
        study(empty)
    assert pk.Study(untold, parts["space"], minimize="loss", store=False).work is untold  # others are free to


def test_a_winner_ended_by_patience_says_so():
    def flat(run):
        for _ in run.epochs():
            run.report(
                loss=float(run.config["batch_size"]),
                **({"sm2_lr": 0.1} if run.options["mode"] == "explore" else {}),
            )

    done = study(flat, scheduler=pk.SM2(thorough_epochs=1, final_epochs=2, patience=2)).run()
    winner = done.trials[0]
    assert winner.status.value == "stopped"
    assert "patience" in winner.reason
    assert "2 x 2 epochs" in winner.reason
    assert done.best.id == winner.id


@pytest.mark.parametrize("end", ["trained", "explored"])
def test_what_an_exploration_showed_is_no_result(tmp_path, end):
    """SM2 4.4: explorations do not contribute to the final model's performance.

    Here the learning rate alone decides. Those it drops have shown lower losses, on weights that no longer exist.
    """

    def train(run):
        size = run.config["batch_size"]
        for epoch in run.epochs():
            explores = run.options["mode"] == "explore"
            run.save({"epoch": epoch})
            run.report(
                loss=1.0 / size if explores else 10.0 / size, **({"sm2_lr": 1.0 / size} if explores else {})
            )

    # 4 + 2 + 2 epochs of two rounds, 2 of the last one; the budget ends the study with its next exploration.
    scheduler = pk.SM2(
        alpha=0.0, beta=0.0, thorough_epochs=1, final_epochs=2, max_epochs=3 if end == "trained" else 30
    )
    budget = pk.Budget(epochs=11)
    done = study(train, pk.Local(1), scheduler=scheduler, budget=budget, store=tmp_path / "study.db").run()
    winner = min(done.trials, key=lambda trial: trial.config["batch_size"])
    others = [trial for trial in done.trials if trial.id != winner.id]
    assert (winner.epoch, winner.explored) == ((5, False) if end == "trained" else (6, True))
    assert all(trial.metrics["loss"] < winner.metrics["loss"] for trial in others)
    assert done.best.id == winner.id
    assert done.load_state()["epoch"] == winner.epoch - 1


class Gauge:
    """Joules by the batch size, from a given source."""

    def __init__(self, config, source):
        self.joules = 1000.0 / config["batch_size"]
        self.source = source

    def epoch_begin(self):
        pass

    def epoch_end(self):
        return Measurement(self.joules, "J", self.source)

    def close(self):
        pass


class Gauges:
    def __init__(self, source):
        self.source = source

    def __call__(self, devices):
        return None

    def for_trial(self, devices, config):
        return Gauge(config, self.source)


def metered(executor, source):
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": Gauges(source)})
    )
    return executor


def even(run):
    """Small batches are a little better; energy speaks for large ones."""
    assert run.options.get("mode") in ("explore", "thorough", None)  # None: of another scheduler
    for _ in run.epochs():
        run.save({})  # else a segment would train, and draw, all epochs before it again
        run.report(loss=0.5 + run.config["batch_size"] / 1e6)


@pytest.mark.parametrize(("source", "at_once"), [(Source.MEASURED, 1), (Source.SIMULATED, 3)])
def test_configurations_run_one_after_another_only_where_a_whole_device_is_measured(
    tmp_path, source, at_once
):
    path = tmp_path / "s.db"
    executor = metered(pk.Simulated(devices=3), source)
    done = study(
        even, executor, scheduler=pk.SM2(max_epochs=4, thorough_epochs=1, final_epochs=2), store=path
    )
    done.run()
    running, most = set(), 0
    for event in events(path):
        if event.kind == "started":
            running.add(event.trial)
        elif event.kind == "ended":
            running.discard(event.trial)
        most = max(most, len(running))
    assert most == at_once
    assert done.energy.source is source


def test_alpha_decides_and_the_comparison_tells_what_it_saves():
    def run(alpha):
        quick = pk.SM2(alpha=alpha, beta=1.0, max_epochs=20, thorough_epochs=1, final_epochs=5, patience=None)
        return study(even, metered(pk.Simulated(devices=1), Source.SIMULATED), scheduler=quick).run()

    only, both = run(1.0), run(0.4)
    assert sm2_report(only).winner == 0  # batch 4, the best by a hair
    # Eq. 2 by hand, P and E rescaled: 4: (1, 0), 8: (6/7, 4/7), 16: (4/7, 6/7), 32: (0, 1); with alpha 0.4 the
    # scores are 0.4, 0.686, 0.743, 0.6, and of 8 (1, 0) and 16 (0, 1) in the next round 16 wins.
    first = sm2_report(both).rounds[0].configurations
    assert [c.score.total for c in first] == pytest.approx([0.4, 4.8 / 7, 5.2 / 7, 0.6])
    assert both.trials[sm2_report(both).winner].config["batch_size"] == 16
    space = pk.Space(batch_size=pk.Choice(8))
    vanilla = study(
        even,
        metered(pk.Simulated(devices=1), Source.SIMULATED),
        space=space,
        scheduler=pk.Full(trials=1, epochs=20),
    ).run()
    row = sm2_comparison(both, alpha_1=only, vanilla=vanilla)
    assert row.vanilla_j == pytest.approx(20 * 1000 / 8)
    # Every exploration and every epoch of every trial draws 1000 J / batch size.
    assert row.sm2_j == pytest.approx(sum(t.epoch * 1000 / t.config["batch_size"] for t in both.trials))
    assert row.parity == pytest.approx(row.sm2_j / row.vanilla_j)
    assert row.saving > 0.5
    with pytest.raises(InvalidInput, match="alpha_1"):
        sm2_comparison(both, alpha_1=study(even, meter=False).run(), vanilla=vanilla)


def test_the_report_tells_what_the_journal_tells(whole, tmp_path):
    path, trials = whole
    told = sm2_report(read_journal(path))
    assert [len(round_.configurations) for round_ in told.rounds] == [4, 2, 1]
    for round_ in told.rounds:
        for c in round_.configurations:
            reports = trials[c.trial][-1]
            explored = [m for _, m in reports if "sm2_lr" in m][round_.number]
            assert c.value == explored["loss"]
            assert c.lr == explored["sm2_lr"]
            assert c.energy_j is None
            assert c.kept == (len(reports) > explored_epoch(reports, round_.number))
            # Without energy Eq. 2 is alpha P + (1 - alpha) LR.
            parts_of = c.score
            assert parts_of.total == pytest.approx(0.75 * parts_of.performance + 0.25 * parts_of.lr)
    assert (told.energy, told.training, told.parity) == (None, None, None)
    text = sm2_text(told)
    assert text.count("kept") == 4
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli import main; main()", "report", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert text in done.stdout, done.stderr
    with pytest.raises(InvalidInput, match="another scheduler"):
        sm2_report(study(even, scheduler=pk.Full(trials=1, epochs=1)).run())


def explored_epoch(reports, number):
    return [epoch for epoch, metrics in reports if "sm2_lr" in metrics][number]


def test_the_plot_draws_three_panels(whole):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = sm2_plot(sm2_report(read_journal(whole[0])))
    assert len(figure.axes) == 3
    assert len(figure.axes[0].lines) == 4 + 3  # four configurations, three explorations of the winner


def test_an_exploration_that_breaks_its_copy_takes_a_tenth_of_the_rate():
    """A metric that is infinite once the weights have moved far: no rate of the sweep shows it."""

    def cliff(output, target):
        return math.inf if output.abs().max() > 0.02 else 1.0

    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))

    def line():
        layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        return layer

    task = pk.Task(line, pk.Data.split(x, x.sum(1, keepdim=True)), F.mse_loss, metrics={"cliff": cliff})
    trainer = Trainer(task, {"batch_size": 16}, seed=0, lr_is_found=True)
    plain = pk.find_lr(task, {"batch_size": 16}, lrs=4, lr_range=(1e-2, 0.1), fraction=0.5)
    found = trainer.explore({"lrs": 4, "lr_range": (1e-2, 0.1), "fraction": 0.5})
    assert found["cliff"] == 1.0
    assert found["sm2_lr"] == trainer.lr < plain.lr / 5
    assert found["sm2_stability"] == 0.0
    assert torch.equal(trainer.model.weight, torch.zeros(1, 2))
