"""MLflow and TensorBoard, read back by their own readers, which are imported by whom they are used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock import integrations
from penstock.core import Reported, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.integrations._inline import Inline
from penstock.integrations._listen import Listener
from penstock.report import read_journal
from penstock.sample import Sampler
from penstock.store import open_store

from .conftest import make_study


@pytest.fixture(autouse=True)
def own_registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


# --- all loggers ---------------------------------------------------------------------------------------------


class Mute(Listener):
    """A logger of a tool that is told nothing."""

    tool = "mute"
    energy_j = 0.0

    def _begin(self, name, goal, state):
        """Nothing."""

    def _sync(self, record):
        """Nothing."""

    def _finish(self, goal, state):
        self.energy_j = state.energy.joules


def test_what_a_study_draws_is_counted_once_however_many_listen(tmp_path):
    logger = Mute(Mute(None))
    study = make_study(str(tmp_path / "study.db"))
    study.run(view=logger)
    drawn = 0.0
    with open_store(tmp_path / "study.db", write=False) as journal:
        for _, event in journal.read(1):
            drawn += event.energy.joules if getattr(event, "energy", None) is not None else 0.0
    assert study.energy.joules == pytest.approx(drawn)
    assert logger.energy_j == pytest.approx(drawn)


# --- TensorBoard ---------------------------------------------------------------------------------------------


def scalars(folder):
    """All scalars of a run by tag and step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def check_board(folder, state):
    for record in state.trials.values():
        found = scalars(folder / "curves" / f"trial-{record.id:04d}") if record.reports else {}
        expected = [(report.epoch, pytest.approx(report.metrics["loss"])) for report in record.reports]
        assert found.get("loss", []) == expected
        if record.reports:
            drawn = sum(value for _, value in found["energy_j"])
            assert drawn == pytest.approx(sum(r.energy.joules for r in record.reports), rel=1e-4)
            assert found["last/energy_j"][-1][1] == pytest.approx(record.energy.joules, rel=1e-4)
            assert found["last/loss"][-1][1] == pytest.approx(record.metrics["loss"])


def test_tensorboard_has_every_report_of_a_finished_study_once(store, tmp_path):
    logger = integrations.TensorBoardLogger(tmp_path / "runs")
    logger.export(store)
    state = read_journal(store).state
    assert any(len(record.reports) == 4 for record in state.trials.values())
    check_board(tmp_path / "runs", state)
    integrations.TensorBoardLogger(tmp_path / "runs").export(store)
    check_board(tmp_path / "runs", state)


def test_tensorboard_knows_the_hyperparameters(store, tmp_path):
    integrations.TensorBoardLogger(tmp_path / "runs").export(store)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "runs" / "curves" / "trial-0000"))
    reader.Reload()
    plugins = reader.summary_metadata
    assert "_hparams_/session_start_info" in plugins
    from tensorboard.plugins.hparams import plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData.FromString(
        plugins["_hparams_/session_start_info"].plugin_data.content
    )
    record = read_journal(store).state.trials[0]
    assert data.session_start_info.hparams["lr"].number_value == record.config["lr"]
    assert data.session_start_info.hparams["layers"].string_value == repr(record.config["layers"])


def test_tensorboard_live_and_resumed_is_the_same_as_exported(tmp_path):
    path = str(tmp_path / "live.db")
    study = make_study(path, budget=pk.Budget(epochs=5))
    study.run(view=integrations.TensorBoardLogger(tmp_path / "runs"))
    assert study.state.closed.reason == "budget"
    again = pk.Study.load(path, budget=pk.Budget())
    again.run(view=integrations.TensorBoardLogger(tmp_path / "runs"))
    assert again.state.closed.reason == "finished"
    check_board(tmp_path / "runs", again.state)


# --- MLflow --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    """One tracking database for the module: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def runs_of(tracking, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=tracking)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=100)
    parents = [run for run in found if "penstock.study" in run.data.tags]
    children = {
        int(run.data.tags["penstock.trial"]): run for run in found if "penstock.trial" in run.data.tags
    }
    return client, parents, children


def check_mlflow(tracking, experiment, state):
    client, (parent,), children = runs_of(tracking, experiment)
    assert set(children) == set(state.trials)
    ends = {TrialStatus.COMPLETED: "FINISHED", TrialStatus.STOPPED: "KILLED", TrialStatus.FAILED: "FAILED"}
    for record in state.trials.values():
        run = children[record.id]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params == {name: str(value) for name, value in record.config.items()}
        assert run.info.status == ends[record.status]
        if record.reports:
            history = client.get_metric_history(run.info.run_id, "loss")
            told = sorted((metric.step, metric.value) for metric in history)
            assert told == [(report.epoch, report.metrics["loss"]) for report in record.reports]
            drawn = sum(m.value for m in client.get_metric_history(run.info.run_id, "energy_j"))
            assert drawn == pytest.approx(sum(report.energy.joules for report in record.reports))
            assert float(run.data.tags["penstock.energy_j"]) == record.energy.joules
            assert run.data.tags["penstock.energy_source"] == str(record.energy.source)
    assert parent.data.metrics["energy_j"] == pytest.approx(state.energy.joules)
    assert parent.data.metrics["best.loss"] == min(
        record.metrics["loss"] for record in state.trials.values() if record.status is not TrialStatus.FAILED
    )
    return parent


def test_mlflow_has_every_report_of_a_finished_study_once(store, tracking):
    state = read_journal(store).state
    for _ in range(2):
        integrations.MLflowLogger("finished", tracking_uri=tracking).export(store, "curves")
        parent = check_mlflow(tracking, "finished", state)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "curves"


def test_mlflow_live_and_resumed_is_the_same_as_exported(tmp_path, tracking):
    path = str(tmp_path / "live.db")
    make_study(path, budget=pk.Budget(epochs=5)).run(
        view=integrations.MLflowLogger("live", tracking_uri=tracking)
    )
    again = pk.Study.load(path, budget=pk.Budget())
    again.run(view=integrations.MLflowLogger("live", tracking_uri=tracking))
    assert again.state.closed.reason == "finished"
    check_mlflow(tracking, "live", again.state)


def test_mlflow_of_a_killed_study_runs_no_more_and_goes_on_with_it(store, tmp_path, tracking):
    """The journal up to the middle of a trial, with nobody who holds its lock, then the rest of it."""
    target = str(tmp_path / "killed.db")
    with open_store(store, write=False) as opened:
        entry = opened.find("curves")
        events = [event for _, event in opened.read(entry.id)]
    middle = next(i for i, event in enumerate(events) if isinstance(event, Reported)) + 1
    logger = integrations.MLflowLogger("killed", tracking_uri=tracking)
    with open_store(target, write=True) as live:
        copied = live.create(entry.name, entry.spec, None)
        live.lock(copied.id)
        live.append(copied.id, events[:middle])
        logger.export(target)
        _, (parent,), children = runs_of(tracking, "killed")
        assert {parent.info.status} | {run.info.status for run in children.values()} == {"RUNNING"}
    logger.export(target)
    _, (parent,), children = runs_of(tracking, "killed")
    assert parent.info.status == "KILLED"
    assert parent.data.tags["penstock.closed"].startswith("interrupted its driver died")
    assert {run.info.status for run in children.values()} == {"SCHEDULED"}
    with open_store(target, write=True) as live:
        live.lock(copied.id)
        live.append(copied.id, events[middle:-1])
        logger.export(target)
        assert "SCHEDULED" not in {run.info.status for run in runs_of(tracking, "killed")[2].values()}
        live.append(copied.id, events[-1:])
    logger.export(target)
    assert check_mlflow(tracking, "killed", read_journal(target).state).info.status == "FINISHED"


def test_a_study_that_an_error_or_nothing_but_failures_ended_is_no_finished_run(tmp_path, tracking):
    def fails(run):
        raise ValueError("never works")

    class Broken(Sampler):
        def start(self, space, *, objectives, seed):
            self.asked = 0

        def ask(self, n):
            self.asked += n
            if self.asked > 2:
                raise RuntimeError("no more ideas")
            return [{"x": 0.5} for _ in range(n)]

        def skip(self, configs, trials): ...

        def adopt(self, config, trial): ...

        def tell(self, observation): ...

    space = {"x": pk.Float(0, 1)}
    options = {"minimize": "loss", "executor": Inline(), "scheduler": pk.Full(trials=60)}
    hopeless = pk.Study(
        fails, space, store=tmp_path / "a.db", **options | {"scheduler": None}, budget=pk.Budget(time_s=600)
    )
    hopeless.run(view=integrations.MLflowLogger("hopeless", tracking_uri=tracking))
    assert hopeless.state.closed.reason == "failed"
    broken = pk.Study(lambda run: 1.0, space, store=tmp_path / "b.db", sampler=Broken(), **options)
    with pytest.raises(RuntimeError, match="no more ideas"):
        broken.run(view=integrations.MLflowLogger("broken", tracking_uri=tracking))
    assert broken.state.closed.reason == "error"
    for experiment in ("hopeless", "broken"):
        _, (parent,), _ = runs_of(tracking, experiment)
        assert parent.info.status == "FAILED"


def population(run):
    epoch = run.load() or 0
    for _ in run.epochs():
        epoch += 1
        run.save(epoch)
        run.report(loss=run.config["lr"] / epoch)


def population_study(path, **options):
    momentum = pk.Float(0, 1, when=pk.equals("optimizer", "sgd"))
    space = pk.Space(lr=pk.Float(0.1, 1), optimizer=pk.Choice("sgd", "adam"), momentum=momentum)
    pbt = pk.PBT(population=4, max_epochs=6, interval=2, resample=0.5)
    options = {"scheduler": pbt, "sampler": pk.Random(), "executor": Inline(), "name": "population"} | options
    return pk.Study(population, space, minimize="loss", store=path, seed=5, **options)


def test_mlflow_says_what_a_member_of_a_population_trains_with_now(tmp_path, tracking):
    """Its parameters there stay those of its start: MLflow has no way to change them."""
    path = str(tmp_path / "pbt.db")
    own = {"config.owner": "me"}
    first = population_study(path, budget=pk.Budget(epochs=14))
    first.run(view=integrations.MLflowLogger("population", tracking_uri=tracking, tags=own))
    again = pk.Study.load(path, budget=pk.Budget())
    again.run(view=integrations.MLflowLogger("population", tracking_uri=tracking, tags=own))
    changed = {record.id: record for record in again.state.trials.values() if record.before}
    _, _, children = runs_of(tracking, "population")
    for trial, run in children.items():
        told = {n.removeprefix("config."): v for n, v in run.data.tags.items() if n.startswith("config.")}
        assert told.pop("owner") == "me"
        expected = changed[trial].config if trial in changed else {}
        assert told == {name: str(value) for name, value in expected.items()}
        after = str(changed[trial].before) if trial in changed else None
        assert run.data.tags.get("penstock.config_after") == after
    assert any(
        children[trial].data.params != {name: str(value) for name, value in record.config.items()}
        for trial, record in changed.items()
    )


def test_studies_of_one_name_in_two_stores_are_two_runs(tmp_path, tracking):
    for number in range(2):
        path = str(tmp_path / f"{number}.db")
        make_study(path, scheduler=pk.Full(trials=1)).run()
        integrations.MLflowLogger("twins", tracking_uri=tracking).export(path)
    assert len(runs_of(tracking, "twins")[1]) == 2


def test_a_server_that_is_not_there_is_said_and_the_study_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    logger = integrations.MLflowLogger("nowhere", tracking_uri="http://127.0.0.1:9")
    study = make_study(str(tmp_path / "s.db"), scheduler=pk.Full(trials=2)).run(view=logger)
    assert study.state.closed.reason == "finished"
    assert "MLflow was not told of everything" in capsys.readouterr().err
    import mlflow

    assert mlflow.active_run() is None


def odd(run):
    for epoch in run.epochs(2):
        run.report(
            **{"f1@0.5": 0.5 + epoch, "f1#0.5": 7.0, "../up": 1.0, "a//b": 2.0, "loss": 1 / (epoch + 1)}
        )


def odd_study(path, name):
    space = {"lr": pk.Choice(0.1), "bäume": pk.Choice(3), "long": pk.Choice("x" * 9000)}
    return pk.Study(odd, space, minimize="f1@0.5", scheduler=pk.Full(trials=1), sampler=pk.Random(), name=name,
                    store=path, executor=Inline())  # fmt: skip


@pytest.mark.parametrize("name", ["it's mine", "a\\' or `1` = '1", 'say "hi"'])
def test_mlflow_takes_any_name_and_knows_the_study_again(tmp_path, tracking, name):
    path = str(tmp_path / "s.db")
    experiment = f"odd {name}"
    odd_study(path, name).run(
        view=integrations.MLflowLogger(experiment, tracking_uri=tracking, tags={"team@home": "5"})
    )
    for _ in range(2):
        integrations.MLflowLogger(experiment, tracking_uri=tracking).export(path)
        client, (parent,), children = runs_of(tracking, experiment)
        assert parent.data.tags["penstock.study"].startswith(name)
        assert set(children) == {0}
        run = children[0]
        history = client.get_metric_history(run.info.run_id, "f1_0.5")
        assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.5), (2, 1.5)]
        assert run.data.metrics["f1_0.5_2"] == 7.0
        assert (run.data.metrics["_/up"], run.data.metrics["a/_/b"]) == (1.0, 2.0)
        assert run.data.params["lr"] == "0.1"
        assert run.data.params["bäume"] == "3"
        assert run.data.params["long"].startswith("xxx")
        assert parent.data.metrics["best.f1_0.5"] == 1.5
        assert parent.data.tags["best.lr"] == "0.1"
        assert parent.data.tags["team_home"] == "5"
        assert parent.info.status == "FINISHED"


@given(st.text(min_size=1, max_size=300))
def test_every_name_becomes_one_that_mlflow_takes_and_good_ones_stay(name):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

    from penstock.integrations._mlflow import clean_name

    clean = clean_name(name)
    for prefix in ("", "best."):
        for check in (_validate_metric_name, _validate_param_name, _validate_tag_name):
            check(prefix + clean)
    assert clean_name(clean) == clean
    assert clean_name("val_loss/fold-1: F1 .5") == "val_loss/fold-1: F1 .5"


@given(st.text(min_size=1, max_size=300))
def test_a_studys_folder_is_below_the_loggers(name):
    from penstock.integrations._tensorboard import folder_name

    found = folder_name(name)
    assert found
    assert found not in (".", "..")
    assert not set("/\\\0\n") & set(found)
    assert len(found.encode()) <= 255
    other = name + "x"
    assert folder_name(other) != found


@pytest.mark.parametrize("name", ["../evil", "ABSOLUTE", ".", "a/b"])
def test_tensorboard_stays_in_its_folder(tmp_path, name):
    base = tmp_path / "base"
    name = str(tmp_path / "abs") if name == "ABSOLUTE" else name
    odd_study(str(tmp_path / "s.db"), name).run()
    for _ in range(2):
        integrations.TensorBoardLogger(base / "runs").export(str(tmp_path / "s.db"))
    (folder,) = (base / "runs").iterdir()
    assert [path.name for path in base.iterdir()] == ["runs"]
    assert not (tmp_path / "abs").exists()
    (tag,) = [steps for tag, steps in scalars(folder / "trial-0000").items() if tag.startswith("f1") and len(steps) == 2
              and steps[0][1] == 0.5]  # fmt: skip
    assert tag == [(1, 0.5), (2, 1.5)]


def test_loggers_say_what_they_cannot_use(store, tmp_path):
    (tmp_path / "file").touch()
    for wrong in (5, None, "", tmp_path / "file"):
        with pytest.raises(InvalidInput, match="folder"):
            integrations.TensorBoardLogger(wrong)
    with pytest.raises(InvalidInput, match="Can't write"):
        integrations.TensorBoardLogger(tmp_path / "file" / "runs").export(store)
    for wrong in (5, None, object()):
        with pytest.raises(InvalidInput, match="source takes"):
            integrations.TensorBoardLogger(tmp_path / "runs").export(wrong)
    for wrong in (5, "tag", {5: "x"}):
        with pytest.raises(InvalidInput, match="tags takes"):
            integrations.MLflowLogger(tags=wrong)
    for wrong in (5, ""):
        with pytest.raises(InvalidInput, match="tracking_uri takes"):
            integrations.MLflowLogger(tracking_uri=wrong)
    with pytest.raises(InvalidInput, match="'nonsense://x'"):
        integrations.MLflowLogger(tracking_uri="nonsense://x").export(store)
