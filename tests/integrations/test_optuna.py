"""Export to an Optuna storage and import from one, against Optuna and optuna-dashboard themselves."""

import json
import re
import warnings
from io import BytesIO

import optuna
import pytest
from optuna.trial import TrialState

import penstock as pk
from penstock.core import StudyState
from penstock.core.errors import InvalidInput
from penstock.integrations import export_optuna, import_optuna
from penstock.integrations._inline import Inline
from penstock.report import read_journal
from penstock.store import open_store

from .conftest import make_study

optuna.logging.set_verbosity(optuna.logging.ERROR)


def check(study, state):
    trials = {trial.user_attrs["penstock:trial"]: trial for trial in study.trials}
    assert set(trials) == set(state.trials)
    states = {"completed": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL", "paused": "RUNNING"}
    for record in state.trials.values():
        trial = trials[record.id]
        assert trial.state.name == states[record.status.value]
        assert trial.intermediate_values == {r.epoch: r.metrics["loss"] for r in record.reports}
        assert trial.params["lr"] == record.config["lr"]
        assert trial.params["layers"] == repr(record.config["layers"])
        if trial.state is TrialState.COMPLETE:
            assert trial.value == record.metrics["loss"]
            assert trial.user_attrs["energy_j"] == pytest.approx(record.energy.joules)


def test_optuna_reads_a_finished_study(store, tmp_path):
    storage = f"sqlite:///{tmp_path}/optuna.db"
    export_optuna(store, storage)
    study = optuna.load_study(study_name="curves", storage=storage)
    state = read_journal(store).state
    check(study, state)
    ours = pk.Study.load(store).best
    assert study.best_trial.user_attrs["penstock:trial"] == ours.id
    assert study.best_value == ours.metrics["loss"]
    assert len(export_optuna(store, storage).trials) == len(state.trials)


@pytest.mark.parametrize("early", [False, True])
def test_what_violates_a_limit_is_not_the_best_in_optuna_either(tmp_path, early):
    def train(run):
        for _ in run.epochs(2):
            run.report(loss=1 / run.config["width"], power_w=10.0 * run.config["width"])

    path, storage = str(tmp_path / "s.db"), optuna.storages.InMemoryStorage()
    options = {"scheduler": pk.Full(epochs=2), "sampler": pk.Grid(), "executor": Inline(), "store": path}
    pk.Study(
        train,
        {"width": pk.Choice(1, 2, 4, 8)},
        minimize="loss",
        limits=[pk.power_w <= 40],
        budget=pk.Budget(epochs=3) if early else pk.Budget(),
        **options,
    ).run()
    exported = export_optuna(path, storage)
    if early:  # some have not ended, and are brought up to date
        pk.Study.load(path, budget=pk.Budget()).run()
        exported = export_optuna(path, storage)
    best = pk.Study.load(path).best
    assert best.config == {"width": 4}
    assert len(exported.trials) == 4
    assert exported.best_trial.user_attrs["penstock:trial"] == best.id
    assert exported.best_value == 1 / 4


def test_a_study_that_goes_on_is_brought_up_to_date(tmp_path):
    path, storage = str(tmp_path / "s.db"), optuna.storages.InMemoryStorage()
    make_study(path, budget=pk.Budget(epochs=3)).run()
    study = export_optuna(path, storage)
    assert {trial.state for trial in study.trials} & {TrialState.RUNNING, TrialState.WAITING}
    pk.Study.load(path, budget=pk.Budget()).run()
    study = export_optuna(path, storage)
    check(study, read_journal(path).state)


def test_a_study_may_be_exported_before_its_first_run(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    study = make_study(str(tmp_path / "s.db"))
    assert not export_optuna(study, storage).trials
    study.run()
    check(export_optuna(study, storage), study.state)


def test_batch_sizes_beside_the_space_are_parameters(tmp_path):
    """SM2's own: the space need not have them."""

    def train(run):
        explored = run.options.get("explorations", ())
        for epoch in run.epochs():
            found = {"sm2_lr": 0.1} if epoch in explored else {}
            run.report(loss=run.config["width"] / (epoch + 1), **found)

    study = pk.Study(
        train,
        {"width": pk.Choice(8, 16)},
        minimize="loss",
        scheduler=pk.SM2(batch_sizes=[8, 32], max_epochs=4),
        executor=pk.Simulated(devices=2),
        store=False,
    ).run()
    exported = export_optuna(study, f"sqlite:///{tmp_path}/optuna.db")
    assert [trial.params for trial in exported.trials] == [record.config for record in study.trials]
    assert {trial.params["batch_size"] for trial in exported.trials} == {8, 32}


def test_values_are_of_the_configuration_beside_them_where_pbt_changes_it(tmp_path):
    """What was exported of a trial before it took over another's configuration can't be changed in Optuna."""

    def train(run):
        for epoch in run.epochs(6):
            run.save(epoch)
            run.report(loss=run.config["lr"])

    path, storage = str(tmp_path / "s.db"), f"sqlite:///{tmp_path}/optuna.db"
    pk.Study(
        train,
        {"lr": pk.Float(0.01, 1)},
        minimize="loss",
        scheduler=pk.PBT(population=4, max_epochs=6, interval=1),
        executor=Inline(),
        store=path,
        budget=pk.Budget(epochs=5),
    ).run()
    begun = {trial.params["lr"] for trial in export_optuna(path, storage).trials}
    study = pk.Study.load(path, budget=pk.Budget()).run()
    assert {record.config["lr"] for record in study.trials} - begun  # it did change
    for _ in range(2):
        exported = export_optuna(path, storage)
        assert exported.best_trial.params == study.best.config
        ended = [trial for trial in exported.trials if trial.state is TrialState.COMPLETE]
        assert all(trial.value == trial.params["lr"] for trial in ended)
        assert {trial.user_attrs["penstock:trial"] for trial in ended} == set(study.state.trials)


def test_any_prefix_of_the_journal_exports_to_the_same(store):
    """Exported after every event, as a running study would be, it ends up as if exported once."""
    with open_store(store, write=False) as opened:
        entry = opened.find(None)
        events = [event for _, event in opened.read(entry.id)]
    study = pk.Study.load(store)
    storage = optuna.storages.InMemoryStorage()
    state = StudyState()
    for event in events:
        state.apply(event)
        study._state = state
        exported = export_optuna(study, storage)
    check(exported, state)


def test_optuna_dashboard_opens_it(store, tmp_path):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/optuna.db")
    export_optuna(store, storage)
    from optuna_dashboard import wsgi  # not when every test process collects

    app = wsgi(storage)

    def get(path):
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "QUERY_STRING": "",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "wsgi.input": BytesIO(),
            "wsgi.errors": BytesIO(),
            "wsgi.url_scheme": "http",
        }
        status = []
        body = b"".join(app(environ, lambda code, headers, *rest: status.append(code)))
        assert status[0].startswith("200"), (path, status, body)
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    assert summary["study_name"] == "curves"
    detail = get(f"/api/studies/{summary['study_id']}")
    assert len(detail["trials"]) == len(read_journal(store).state.trials)
    assert {trial["state"] for trial in detail["trials"]} == {"Complete", "Pruned", "Fail"}


def test_another_study_of_that_name_is_not_overwritten(store, tmp_path):
    storage = optuna.storages.InMemoryStorage()
    foreign = optuna.create_study(storage=storage, study_name="curves")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(pk.errors.InvalidInput, match="Give study_name"):
        export_optuna(store, storage)
    optuna.create_study(storage=storage, study_name="max", direction="maximize")
    with pytest.raises(pk.errors.InvalidInput, match="maximize"):
        export_optuna(store, storage, study_name="max")
    assert len(export_optuna(store, storage, study_name="ours").trials) == 8


def test_several_objectives_and_directions(tmp_path):
    def train(run):
        return {"loss": run.config["x"], "accuracy": 1 - run.config["x"] ** 2}

    study = pk.Study(
        train,
        {"x": pk.Float(0, 1, step=0.25), "n": pk.Int(1, 9, step=2)},
        minimize="loss",
        maximize="accuracy",
        executor=Inline(),
        store=False,
        scheduler=pk.Full(trials=5),
        sampler=pk.Random(),
    ).run()
    exported = export_optuna(study, optuna.storages.InMemoryStorage())
    assert [direction.name for direction in exported.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert exported.metric_names == ["loss", "accuracy"]
    assert [trial.values for trial in exported.trials] == [
        [record.metrics["loss"], record.metrics["accuracy"]] for record in study.trials
    ]


# --- import --------------------------------------------------------------------------------------------------


def earlier(direction="maximize"):
    """An Optuna study whose best is at x = 0.7."""
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=1))
    sign = -1 if direction == "maximize" else 1

    def objective(trial):
        x = trial.suggest_float("x", 0, 2)
        trial.suggest_categorical("kind", ["a", "b"])
        trial.suggest_int("unused", 0, 3)
        return sign * (x - 0.7) ** 2

    study.optimize(objective, n_trials=40)
    return study


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_best_run_first_and_the_sampler_knows_the_rest(direction):
    old = earlier(direction)
    space = pk.Space(x=pk.Float(0, 1), kind=pk.Choice("a", "b"))
    fitting = sorted((t for t in old.trials if t.params["x"] <= 1), key=lambda t: abs(t.params["x"] - 0.7))
    assert 3 < len(fitting) < 40  # those outside the new space are left out

    def train(run):
        return (-1 if direction == "maximize" else 1) * (run.config["x"] - 0.7) ** 2

    study = pk.Study(
        train,
        space,
        **{direction: "value"},
        sampler=import_optuna(old, space, first=3),
        executor=Inline(),
        store=False,
        scheduler=pk.Full(trials=12),
    ).run()
    tried = [record.config["x"] for record in study.trials]
    assert tried[:3] == [trial.params["x"] for trial in fitting[:3]]
    # A sampler that knows forty results looks near the best; one that knows none draws from all of [0, 1].
    assert sum(abs(x - 0.7) < 0.2 for x in tried[3:]) >= 6


@pytest.mark.parametrize("then", [pk.TPE(), pk.Bayes()])
def test_what_was_no_number_is_a_failure_and_none_of_the_best(then):
    study = optuna.create_study()
    for x in (0.9, 0.2, 0.8, 0.3, 0.7, 0.6):
        study.enqueue_trial({"x": x})
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        if x > 0.6:
            trial.report(float("nan"), 1)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, x if x < 0.6 else float("inf"))
    sampler = import_optuna(study, {"x": pk.Float(0, 1)}, first=5, then=then)
    found = pk.Study(
        lambda run: [run.report(loss=run.config["x"]) for _ in run.epochs(1)],
        {"x": pk.Float(0, 1)},
        minimize="loss",
        sampler=sampler,
        scheduler=pk.Full(trials=4),
        executor=Inline(),
        store=False,
    ).run()
    assert [record.config["x"] for record in found.trials[:2]] == [0.2, 0.3]
    assert all(record.config["x"] not in (0.9, 0.8, 0.7, 0.6) for record in found.trials)


def test_a_round_trip_through_optuna_keeps_configurations_and_results(store, tmp_path):
    storage = f"sqlite:///{tmp_path}/optuna.db"
    export_optuna(store, storage)
    warm = import_optuna(storage, make_study(str(tmp_path / "x.db")).space, first=2)
    state = read_journal(store).state
    told = {observation.trial: observation for observation in warm._earlier}
    for record in state.trials.values():
        if record.reports:
            assert told[record.id].config == dict(record.config)
            assert told[record.id].values == (record.metrics["loss"],)


def test_what_does_not_fit_is_said():
    old = earlier()
    with pytest.raises(pk.errors.InvalidInput, match="fits the space"):
        import_optuna(old, {"x": pk.Float(5, 6), "kind": pk.Choice("a", "b")})
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="one")
    optuna.create_study(storage=storage, study_name="two")
    with pytest.raises(pk.errors.InvalidInput, match="2 studies"):
        import_optuna(storage, {"x": pk.Float(0, 1)})


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("optuna.db", "sqlite:///optuna.db"),
        ("", "storage takes"),
        (5, "storage takes"),
        (None, "storage takes"),
        ("nonsense:///x", "can't open the storage nonsense:///x"),
        ("sqlite:///none/of/these/optuna.db", "can't open the storage"),
        ("redis://localhost", "can't open the storage"),
    ],
)
def test_what_is_no_storage_is_said(store, tmp_path, monkeypatch, storage, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        export_optuna(store, storage)
    with pytest.raises(InvalidInput):
        import_optuna(storage, {"lr": pk.Float(0, 1)})
    assert sorted(path.name for path in tmp_path.glob("*optuna*")) == []


def test_a_password_is_not_said(store):
    with pytest.raises(InvalidInput) as caught:
        export_optuna(store, "nonsense://me:secret@host/db")
    assert "me:***@host" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_sources_and_missing_files_are_refused_and_none_is_made(tmp_path):
    for wrong in (5, None, object()):
        with pytest.raises(InvalidInput, match="source takes"):
            export_optuna(wrong, f"sqlite:///{tmp_path}/optuna.db")
    with pytest.raises(InvalidInput, match="no file"):
        import_optuna(f"sqlite:///{tmp_path}/old.db", {"lr": pk.Float(0, 1)})
    assert list(tmp_path.iterdir()) == []


def test_import_takes_only_what_it_can_use():
    study = optuna.create_study(direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=2)
    space = {"lr": pk.Float(0, 1)}
    for first in (-1, "x", 1.5, True, None):
        with pytest.raises(InvalidInput, match="first takes"):
            import_optuna(study, space, first=first)
    with pytest.raises(InvalidInput, match="space takes"):
        import_optuna(study, None)
    with pytest.raises(InvalidInput, match="then takes"):
        import_optuna(study, space, then="tpe")
    with pytest.raises(InvalidInput, match="maximises a value, but the new study"):
        import_optuna(study, space, minimize="loss")
    with pytest.raises(InvalidInput, match="would mislead"):
        import_optuna(study, space, maximize=["acc", "f1"])
    assert (
        import_optuna(study, space, maximize="acc", first=1).start(pk.Space(**space), objectives=1, seed=0)
        is None
    )
    with warnings.catch_warnings(action="ignore"):  # experimental
        study.set_metric_names(["f1"])
    with pytest.raises(InvalidInput, match="maximises f1"):
        import_optuna(study, space, maximize="acc")
