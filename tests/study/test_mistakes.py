"""Mistakes are told before any work, and a study whose training always fails ends."""

import dataclasses
import functools
import io
import math
import os
import re
import signal
import time
import warnings
from pathlib import Path

import pytest
from rich.console import Console

import penstock as pk
from penstock.core import StudyState
from penstock.core.errors import InvalidInput
from penstock.report import View
from penstock.report._journal import fold_journal
from penstock.report._view import LiveView
from penstock.report.views._overview import overview
from penstock.report.views._table import all_rows

SPACE = pk.Space(lr=pk.Float(1e-4, 1, log=True))


def train(run):
    for _ in run.epochs(3):
        run.report(loss=run.config["lr"])


def typo(run):
    for _ in run.epochs(3):
        run.reprot(loss=run.config["lr"])


def study(work=train, space=SPACE, **options):
    options.setdefault("minimize", "loss")
    options.setdefault("sampler", pk.Random())
    options.setdefault("executor", pk.Simulated(devices=4, seconds=1.0))
    options.setdefault("store", False)
    return pk.Study(work, space, **options)


class Interrupt(View):
    """Sends the study a signal at its first report."""

    def __init__(self, number):
        self.number, self.sent, self.said = number, False, []

    def open(self, name, goal, state, slots):
        pass

    def on(self, event, state):
        if event.kind == "reported" and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)

    def tick(self, state, expected, busy):
        pass

    def say(self, text):
        self.said.append(text)

    def close(self):
        pass


@pytest.mark.parametrize("budget", [{"epochs": 10}, {"energy_wh": 5.0}, {"time_s": 1e9}], ids=str)
@pytest.mark.parametrize("devices", [4, 15])
def test_a_study_whose_training_always_fails_ends(budget, devices, capsys):
    executor = pk.Simulated(devices=devices, seconds=1.0)
    done = study(typo, budget=pk.Budget(**budget), executor=executor).run()
    fewest = max(20, 2 * devices)
    assert fewest <= done.state.counts.failed <= fewest + devices
    closed = done.state.closed
    assert closed.reason == "failed"
    assert "trials all failed: AttributeError" in closed.detail
    assert closed.detail in capsys.readouterr().err
    assert done.best is None


def test_a_resume_of_such_a_study_tries_as_often_again(tmp_path):
    path = tmp_path / "s.db"
    study(typo, budget=pk.Budget(epochs=10), store=path).run()
    before = pk.Study.load(path).state.counts.failed
    again = pk.Study.load(path).run()
    assert before + 20 <= again.state.counts.failed <= before + 24
    assert "of this session" in again.state.closed.detail
    mended = pk.Study.load(path, work=train).run()
    assert mended.state.closed.reason == "budget"
    assert mended.state.epochs >= 10


def test_failures_after_an_epoch_or_of_a_counted_number_of_trials_end_nothing():
    def late(run):
        for epoch in run.epochs(3):
            if epoch:
                raise RuntimeError("later")
            run.report(loss=1.0)

    done = study(late, budget=pk.Budget(epochs=60)).run()
    assert done.state.closed.reason == "budget"
    assert study(typo, scheduler=pk.Full(trials=30)).run().state.counts.failed == 30
    assert study(typo, budget=pk.Budget(trials=30)).run().state.counts.failed == 30


def no_run():
    return {"loss": 1.0}


def two(run, more):
    return {"loss": 1.0}


async def awaited(run):
    run.report(loss=1.0)


async def streamed(run):
    yield 1.0


def yielding(run):
    yield 1.0


class Yielding:
    def __call__(self, run):
        yield 1.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"minimize": 5}, "minimize"),
        ({"space": {1: pk.Float(0, 1)}}, "1"),
        ({"timeout_s": "a"}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"warm_start": 5}, "warm_start"),
        ({"warm_start": "lr"}, "warm_start"),
        ({"warm_start": [5]}, "warm_start"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"planner": 5}, "planner"),
        ({"planner": pk.Fluid}, r"Fluid\(...\)"),
        ({"planner": "fluid"}, "planner"),
        ({"planner": [5]}, "planner"),
        ({"files": 5}, "files"),
        ({"store": 5}, "store"),
        ({"region": 5}, "region"),
        ({"g_per_kwh": "a"}, "g_per_kwh"),
        ({"g_per_kwh": -1}, "g_per_kwh"),
        ({"g_per_kwh": 50, "region": "DE"}, "not both"),
        ({"meter": "no"}, "meter"),
        ({"confidence": 5}, "confidence"),
        ({"confidence": "a"}, "confidence"),
        ({"price_per_kwh": -0.1}, "price_per_kwh"),
        ({"price_per_kwh": "0.3"}, "price_per_kwh"),
        ({"price_per_kwh": True}, "price_per_kwh"),
        ({"currency": 5}, "currency"),
        ({"currency": ""}, "currency"),
        ({"work": no_run}, "no_run"),
        ({"work": two}, "two"),
        ({"work": awaited}, "awaited is an async"),
        ({"work": streamed}, "streamed is an async"),
        ({"work": yielding}, "yielding has a yield"),
        ({"work": functools.partial(yielding)}, "has a yield"),
        ({"work": Yielding()}, "Yielding.* has a yield"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_a_wrong_argument_is_named_before_any_work(arguments, named):
    with pytest.raises(InvalidInput, match=named) as caught:
        study(**arguments)
    value = next(iter(arguments.values()))
    if isinstance(value, int | float | str):
        assert repr(value) in str(caught.value)


def test_a_task_is_not_asked_for_a_metric_that_it_never_reports():
    torch = pytest.importorskip("torch")

    def right(output, targets):
        return (output.argmax(1) == targets).float().mean()

    data = torch.zeros(20, 4), torch.zeros(20).long()
    task = pk.Task(
        lambda: torch.nn.Linear(4, 2), data, torch.nn.functional.cross_entropy, metrics={"right": right}
    )
    with pytest.raises(InvalidInput, match="'accuracy'; the task reports loss, train_loss, right"):
        study(task, minimize=None, maximize="accuracy")
    with pytest.raises(InvalidInput, match="'val_loss'"):
        study(task, minimize=["energy_j", "val_loss"])
    study(task, minimize=["train_loss", "train_s", "energy_j"], maximize="right")


def test_a_sampler_of_optuna_is_to_be_wrapped():
    optuna = pytest.importorskip("optuna")
    with pytest.raises(InvalidInput, match=r"pk\.OptunaSampler\(RandomSampler"):
        study(sampler=optuna.samplers.RandomSampler())


def test_a_wrong_target_of_events_and_a_price_set_later_are_named_before_the_store_is_made(tmp_path):
    made = study(store=tmp_path / "s.db")
    with pytest.raises(InvalidInput, match=r"jsonl.*5"):
        made.run(jsonl=5)
    made.price_per_kwh = -3
    with pytest.raises(InvalidInput, match="price_per_kwh"):
        made.run()
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize("wrong", [0, 5, pk.Budget, "trials=5"], ids=str)
def test_a_wrong_budget_of_a_loaded_study_is_named(tmp_path, wrong):
    study(scheduler=pk.Full(trials=1), store=tmp_path / "s.db").run()
    with pytest.raises(InvalidInput, match="budget takes"):
        pk.Study.load(tmp_path / "s.db", budget=wrong)
    loaded = pk.Study.load(tmp_path / "s.db")
    loaded.budget = wrong
    with pytest.raises(InvalidInput, match="budget takes"):
        loaded.run()
    with pytest.raises(InvalidInput, match="executor takes"):
        pk.Study.load(tmp_path / "s.db", executor=wrong)


def test_one_configuration_and_one_rule_need_no_list():
    def flat(run):
        for _ in run.epochs(50):
            run.report(loss=1.0)

    one = study(flat, warm_start={"lr": 0.25}, scheduler=pk.Full(trials=1), stop=pk.Plateau("loss")).run()
    assert one.trials[0].config == {"lr": 0.25}
    assert one.trials[0].status is pk.TrialStatus.STOPPED


def test_a_command_is_not_simulated():
    work = pk.Command("train --lr {lr}")
    with pytest.raises(InvalidInput, match="can't be simulated"):
        study(work).run()


@pytest.mark.parametrize(
    ("number", "named"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_a_signal_is_told_by_its_name_and_what_is_not_kept_is_not_to_be_resumed(
    number, named, tmp_path, request
):
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
    for store in (False, tmp_path / "s.db"):
        view = Interrupt(number)
        done = study(budget=pk.Budget(epochs=1000), store=store).run(view=view)
        assert (done.state.closed.reason, done.state.closed.detail) == ("interrupted", named)
        assert any(text.startswith(named) for text in view.said)
        assert ("can be resumed" in str(done)) == bool(store)


def test_a_signal_also_ends_what_was_to_finish_when_the_budget_is_used_up():
    def flat(run):
        for _ in run.epochs():
            run.report(loss=1.0)

    view = Interrupt(signal.SIGINT)  # at 1 s, when the budget has been used up for half a second
    budget = pk.Budget(time_s=0.5, finish=True)
    done = study(flat, scheduler=pk.Full(trials=8, epochs=50), budget=budget).run(view=view)
    assert (done.state.closed.reason, done.state.closed.detail) == ("interrupted", "Ctrl-C")
    assert any(text.startswith("Ctrl-C") for text in view.said)
    assert max(trial.epoch for trial in done.trials) <= 2
    whole = study(flat, scheduler=pk.Full(trials=8, epochs=50), budget=budget).run()
    assert [trial.epoch for trial in whole.trials if trial.epoch] == [50] * 4


class HalfKilowattHour:
    """A meter that reads half a kilowatt-hour per epoch."""

    def epoch_begin(self):
        pass

    def epoch_end(self):
        return pk.Measurement(1.8e6, "J", pk.Source.MEASURED, 0.0)

    def close(self):
        pass


def metered():
    executor = pk.Simulated(devices=1, seconds=1.0)
    open_ = executor.open
    executor.open = lambda job: open_(
        dataclasses.replace(job, options={**job.options, "make_meter": lambda _: HalfKilowattHour()})
    )
    return executor


def test_a_grid_of_ones_own_and_a_price_count_per_trial():
    done = study(
        executor=metered(), scheduler=pk.Full(trials=2), g_per_kwh=100, price_per_kwh=0.5, currency="CHF"
    ).run()
    # Three epochs are 1.5 kWh: 150 g and 0.75 CHF.
    frame = done.to_dataframe()
    assert list(frame["energy_wh"]) == pytest.approx([1500.0] * 2)
    assert list(frame["co2_g"]) == pytest.approx([150.0] * 2)
    assert list(frame["cost"]) == pytest.approx([0.75] * 2)
    assert done.co2.value == pytest.approx(300.0)
    assert done.summary()["co2_g"] == pytest.approx(300.0)
    assert "100 g/kWh, as given" in str(done)
    assert overview(done._folded())["co2"]["value"] == pytest.approx(300.0)
    left = study(executor=metered(), budget=pk.Budget(cost=2.0), price_per_kwh=0.5, currency="CHF").run()
    assert "budget of 2 CHF used up" in left.state.closed.detail


def test_columns_of_penstocks_own_are_never_overwritten():
    def odd(run):
        for _ in run.epochs(2):
            run.report(loss=1.0, status=7.0, lr=3.0, cost=9.0)

    space = {"epochs": pk.Choice(77), "trial": pk.Choice(88), "lr": pk.Choice(0.5)}
    done = study(odd, space, scheduler=pk.Full(trials=1), price_per_kwh=0.3).run()
    row = done.to_dataframe().iloc[0]
    assert (row["trial"], row["status"], row["epochs"]) == (0, "completed", 2)
    assert (row["config.epochs"], row["config.trial"]) == (77, 88)
    assert (row["lr"], row["metric.lr"], row["metric.status"], row["metric.cost"]) == (0.5, 3.0, 7.0, 9.0)


def test_a_metric_and_a_domain_of_some_trials_with_one_name_have_a_column_each(tmp_path):
    """A trial without the domain has its metric where those with it have theirs."""

    def odd(run):
        run.report(loss=1.0, decay=run.config["lr"] + 1)

    space = {"lr": pk.Choice(1.0, 2.0), "decay": pk.Choice(0.5, when=pk.equals("lr", 1.0))}
    path = tmp_path / "s.db"
    done = study(odd, space, sampler=pk.Grid(), store=path).run()
    frame = done.to_dataframe().sort_values("lr")
    assert frame["metric.decay"].tolist() == [2.0, 3.0]
    assert frame["decay"].tolist() == [0.5, pytest.approx(math.nan, nan_ok=True)]
    shown = sorted(all_rows(fold_journal(path)[0]), key=lambda row: row["lr"])
    assert [(row.get("decay"), row["metric.decay"]) for row in shown] == [(0.5, 2.0), (None, 3.0)]


# --- the folder of checkpoints ----------------------------------------------------------------------------------


def slow(run):
    for epoch in run.epochs(60):
        time.sleep(0.05)
        run.save(epoch)
        run.report(loss=1.0)


def test_a_relative_folder_is_found_from_elsewhere_and_a_lost_checkpoint_is_said(
    tmp_path, monkeypatch, capsys
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    made = study(
        slow, executor=pk.Local(1), store=here / "s.db", files="ck", budget=pk.Budget(epochs=2), meter=False
    )
    monkeypatch.chdir(there)  # also before it runs: the folder is that of its making
    made.run()
    assert made.spec()["files"] == str(here / "ck")
    [record] = [trial for trial in made.trials if trial.saved]
    files = here / "ck" / "study-1"
    path = files / record.saved[max(record.saved)]
    assert path.exists()
    assert not list(there.iterdir())
    for each in record.saved.values():
        (files / each).unlink(missing_ok=True)
    loaded = pk.Study.load(here / "s.db", budget=pk.Budget(epochs=made.state.epochs + 10))
    capsys.readouterr()
    loaded.run()
    assert f"Trial {record.id}: its checkpoint {path} is gone; it starts again." in capsys.readouterr().err
    assert loaded.state.closed.reason == "budget"
    assert not list(there.iterdir())


@pytest.mark.parametrize("name", [":memory:", "sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_keeps_nothing_and_its_results_are_read_all_the_same(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    done = study(scheduler=pk.Full(trials=2), executor=pk.Simulated(devices=1), store=name).run()
    assert len(done.trials) == 2
    done.plot.history()
    assert done.run().best is not None
    assert not list(tmp_path.iterdir())


def no_meter(devices, **options):
    warnings.warn("Energy is not measured: no counter, no estimate", RuntimeWarning, stacklevel=2)


@pytest.mark.parametrize("wanted", [True, False])
def test_energy_that_cant_be_metered_is_said_once_with_where_to_look(tmp_path, monkeypatch, capsys, wanted):
    monkeypatch.setattr("penstock.study._study.make_meter", no_meter)
    options = {"executor": pk.Local(1), "store": tmp_path / "s.db", "meter": wanted}
    done = study(scheduler=pk.Full(trials=2), **options).run()
    assert done.energy is None
    said = capsys.readouterr().err
    assert said.count("reports no energy") == wanted
    if wanted:
        folder = Path(re.search(r"logs in (\S+) say why", said)[1])
        assert any("no counter, no estimate" in log.read_text() for log in folder.rglob("*") if log.is_file())


def test_the_folder_of_a_study_in_postgresql_is_found_from_elsewhere(postgres_url, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    study(store=postgres_url, budget=pk.Budget(epochs=5)).run()
    assert (here / "penstock-files" / "study-1").is_dir()
    monkeypatch.chdir(there)
    loaded = pk.Study.load(postgres_url, budget=pk.Budget(epochs=9)).run()
    assert loaded.spec()["files"] == str(here / "penstock-files")
    assert not list(there.iterdir())
    moved = pk.Study.load(postgres_url, files="moved")
    assert moved.spec()["files"] == str(there / "moved")


def test_the_live_panel_keeps_the_last_three_sentences():
    view = LiveView()
    for text in ("first", "second", "third", "fourth"):
        view.say(text)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(view._draw(StudyState(), None))
    shown = console.export_text()
    assert [text for text in ("first", "second", "third", "fourth") if text in shown] == [
        "second",
        "third",
        "fourth",
    ]


def test_a_mistake_in_a_warm_start_leaves_no_study_in_the_store(tmp_path):
    path = tmp_path / "s.db"
    with pytest.raises(pk.errors.SpaceError, match=r"Configuration 1, \{'lr': 5\}"):
        study(warm_start=[{"lr": 0.1}, {"lr": 5}], name="mine", store=path)
    with pytest.raises(pk.errors.SpaceError, match="Configuration 0"):
        study(warm_start={"lr": 5}, limits=[pk.params <= 5])
    done = study(warm_start=[{"lr": 0.1}], name="mine", store=path, scheduler=pk.Full(trials=2)).run()
    assert done.trials[0].config == {"lr": 0.1}


def test_a_quiet_run_is_asked_for_as_on_the_command_line(capsys):
    done = study(executor=pk.Simulated(2), budget=pk.Budget(trials=2), store=False).run(view="quiet")
    assert [record.epoch for record in done.trials] == [3, 3]
    assert capsys.readouterr() == ("", "")
    with pytest.raises(InvalidInput, match="\"quiet\" or a View, such as a logger; got 'loud'"):
        study(executor=pk.Simulated(2), budget=pk.Budget(trials=2), store=False).run(view="loud")


def test_a_summary_says_whose_clock_its_time_is_of():
    made_up = str(study(scheduler=pk.Full(trials=2), executor=pk.Simulated(devices=1000, seconds=60.0)).run())
    assert "3 min simulated time, 6 min of training" in made_up
    assert "2 devices used, 6 min of device time, 100% held" in made_up
    assert "wall time" not in made_up
    real = str(study(scheduler=pk.Full(trials=1), executor=pk.Local(1)).run())
    assert "wall time" in real
    assert "simulated" not in real


@pytest.mark.parametrize("count", [-1, "3", 1.5])
def test_a_number_of_best_configurations_that_is_none_is_refused(count):
    with pytest.raises(InvalidInput, match="count must be a whole number"):
        study().best_configs(count)


def test_data_that_no_store_takes_is_told_with_the_remedy(monkeypatch, tmp_path):
    data = bytes(200_000)

    def holds(run):
        return len(data)

    monkeypatch.setattr("penstock.study._pack._MOST_BYTES", 100_000)
    with pytest.raises(
        InvalidInput, match=r"study's work is 0\.0002\d* GB with the data.*inside the training function"
    ):
        study(holds, store=tmp_path / "s.db").run()
