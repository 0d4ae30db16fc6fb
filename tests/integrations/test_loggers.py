"""MLflow and TensorBoard, read back by their own readers."""

import mlflow
import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import penstock as pk
from penstock.core import TrialStatus
from penstock.integrations import MLflowLogger, TensorBoardLogger
from penstock.report import read_journal

from .conftest import make_study


@pytest.fixture(autouse=True)
def own_registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


# --- TensorBoard ---------------------------------------------------------------------------------------------


def scalars(folder):
    """All scalars of a run by tag and step, as TensorBoard reads them."""
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
            assert drawn == pytest.approx(record.energy.joules, rel=1e-4)
            assert found["last/loss"][-1][1] == pytest.approx(record.metrics["loss"])


def test_tensorboard_has_every_report_of_a_finished_study_once(store, tmp_path):
    logger = TensorBoardLogger(tmp_path / "runs")
    logger.export(store)
    state = read_journal(store).state
    assert any(len(record.reports) == 4 for record in state.trials.values())
    check_board(tmp_path / "runs", state)
    TensorBoardLogger(tmp_path / "runs").export(store)
    check_board(tmp_path / "runs", state)


def test_tensorboard_knows_the_hyperparameters(store, tmp_path):
    TensorBoardLogger(tmp_path / "runs").export(store)
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
    study.run(view=TensorBoardLogger(tmp_path / "runs"))
    assert study.state.closed.reason == "budget"
    again = pk.Study.load(path, budget=pk.Budget())
    again.run(view=TensorBoardLogger(tmp_path / "runs"))
    assert again.state.closed.reason == "finished"
    check_board(tmp_path / "runs", again.state)


# --- MLflow --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    """One tracking database for the module: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def runs_of(tracking, experiment):
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
            assert drawn == pytest.approx(record.energy.joules)
            assert run.data.tags["penstock.energy_source"] == str(record.energy.source)
    assert parent.data.metrics["energy_j"] == pytest.approx(state.energy.joules)
    assert parent.data.metrics["best.loss"] == min(
        record.metrics["loss"] for record in state.trials.values() if record.status is not TrialStatus.FAILED
    )
    return parent


def test_mlflow_has_every_report_of_a_finished_study_once(store, tracking):
    state = read_journal(store).state
    for _ in range(2):
        MLflowLogger("finished", tracking_uri=tracking).export(store, "curves")
        parent = check_mlflow(tracking, "finished", state)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "curves"


def test_mlflow_live_and_resumed_is_the_same_as_exported(tmp_path, tracking):
    path = str(tmp_path / "live.db")
    make_study(path, budget=pk.Budget(epochs=5)).run(view=MLflowLogger("live", tracking_uri=tracking))
    again = pk.Study.load(path, budget=pk.Budget())
    again.run(view=MLflowLogger("live", tracking_uri=tracking))
    assert again.state.closed.reason == "finished"
    check_mlflow(tracking, "live", again.state)


def test_studies_of_one_name_in_two_stores_are_two_runs(tmp_path, tracking):
    for number in range(2):
        path = str(tmp_path / f"{number}.db")
        make_study(path, scheduler=pk.Full(trials=1)).run()
        MLflowLogger("twins", tracking_uri=tracking).export(path)
    assert len(runs_of(tracking, "twins")[1]) == 2


def test_a_server_that_is_not_there_is_said_and_the_study_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    logger = MLflowLogger("nowhere", tracking_uri="http://127.0.0.1:9")
    study = make_study(str(tmp_path / "s.db"), scheduler=pk.Full(trials=2)).run(view=logger)
    assert study.state.closed.reason == "finished"
    assert "MLflow was not told of everything" in capsys.readouterr().err
    assert mlflow.active_run() is None
