"""What trials saved, given back by the study; and a study in which nothing worked says so."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput


def count(run):
    state = run.load() or {"sum": 0.0, "epochs": 0}
    for _ in run.epochs(3):
        state = {"sum": state["sum"] + run.config["x"], "epochs": state["epochs"] + 1}
        run.save(state)
        run.report(loss=state["sum"])


def study_of(work, store, **options):
    return pk.Study(
        work,
        {"x": pk.Float(0, 1)},
        minimize="loss",
        sampler=pk.Grid(3),
        executor=pk.Local(1),
        store=store,
        **options,
    )


@pytest.mark.parametrize("kept", [True, False])
def test_the_best_trials_last_state_is_given_back(tmp_path, kept):
    study = study_of(count, tmp_path / "s.db" if kept else False).run()
    expected = {"sum": pytest.approx(3 * study.best.config["x"]), "epochs": 3}
    assert study.load_state() == expected
    if kept:
        assert pk.Study.load(tmp_path / "s.db").load_state() == expected
    worst = max(study.trials, key=lambda record: record.config["x"])
    with pytest.raises(InvalidInput, match=rf'checkpoint of trial {worst.id}, .* is gone: .*keep="all"'):
        study.load_state(worst)


def test_any_trials_state_is_given_back_where_all_are_kept(tmp_path):
    study = study_of(count, tmp_path / "s.db", keep="all").run()
    for record in study.trials:
        assert study.load_state(record)["sum"] == pytest.approx(record.metrics["loss"])


def test_what_can_not_be_loaded_is_told(tmp_path):
    study = study_of(count, tmp_path / "s.db")
    with pytest.raises(InvalidInput, match="no trial has reported yet"):
        study.load_state()
    study.run()
    with pytest.raises(InvalidInput, match=r"Trial \d has saved nothing.*run\.save"):
        study_of(lambda run: run.config["x"], False).run().load_state()
    with pytest.raises(InvalidInput, match=r"all [0-9]+ trials failed"):
        study_of(lambda run: run.config["y"], False).run().load_state()
    with pytest.raises(InvalidInput, match=r"work of this study is count: load_state\(\)"):
        study.load_model()
    with pytest.raises(InvalidInput, match=r"trial takes a TrialRecord, got 2\. Give one of study\.trials"):
        study.load_state(2)


def test_a_study_of_failures_says_so_although_nothing_is_shown(capsys):
    def fails(run):
        raise ValueError("no such file: train.csv")

    def half(run):
        if run.config["x"] > 0.4:
            raise ValueError("too large")
        return 1.0

    study_of(half, False).run()
    assert capsys.readouterr().err == ""
    study_of(fails, False).run()
    told = capsys.readouterr().err
    assert told.startswith("Nothing was found: all 3 trials failed")
    assert "ValueError: no such file: train.csv" in told
