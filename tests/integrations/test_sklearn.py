"""PenstockSearchCV by scikit-learn's own rules, and beside GridSearchCV."""

import pickle
import warnings
from unittest import SkipTest

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import estimator_checks_generator

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.integrations import PenstockSearchCV
from penstock.report import read_journal

X, y = load_iris(return_X_y=True)
GRID = {"n_neighbors": [1, 20, 60], "weights": ["uniform", "distance"]}
SPACE = {name: pk.Choice(*values) for name, values in GRID.items()}


def search(estimator=None, space=None, **options):
    return PenstockSearchCV(
        KNeighborsClassifier() if estimator is None else estimator,
        SPACE if space is None else space,
        **{"random_state": 0, "sampler": pk.Grid(), "n_trials": 6, "cv": 3, **options},
    )


def of_checks():
    """scikit-learn's checks of an estimator, but those of array libraries that are not installed."""
    made = search(DecisionTreeClassifier(random_state=0), {"max_depth": pk.Choice(3)}, n_trials=1, cv=2)
    made.set_params(error_score="raise")
    for estimator, check in estimator_checks_generator(made):
        name = check.func.__name__
        # GridSearchCV fails the second one too: the estimator's own fit() says that y is missing.
        if "array_api" not in name and name != "check_requires_y_none":
            yield pytest.param(estimator, check, id=name)


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks():
    failed = {}
    checked = 0
    for parameter in of_checks():
        estimator, check = parameter.values
        checked += 1
        try:
            check(estimator)
        except SkipTest:
            checked -= 1
        except Exception as error:  # all of them, to see all that fail at once
            failed[parameter.id] = repr(error)
    assert failed == {}
    assert checked > 40


def by_params(results, key):
    return {tuple(sorted(params.items())): results[key][i] for i, params in enumerate(results["params"])}


def test_a_full_grid_is_what_grid_search_finds():
    """The same folds, the same parameters: the same table, whatever the order."""
    ours = search(return_train_score=True).fit(X, y)
    theirs = GridSearchCV(KNeighborsClassifier(), GRID, cv=3, return_train_score=True).fit(X, y)
    keys = [
        key for key in theirs.cv_results_ if "time" not in key and key != "params" and "param_" not in key
    ]
    assert "split2_test_score" in keys
    for key in keys:
        assert by_params(ours.cv_results_, key) == pytest.approx(by_params(theirs.cv_results_, key)), key
    assert ours.best_score_ == theirs.best_score_
    assert set(theirs.cv_results_) <= set(ours.cv_results_)
    np.testing.assert_array_equal(ours.classes_, theirs.classes_)
    assert ours.n_features_in_ == 4
    assert ours.predict(X).shape == y.shape
    best = clone(ours.estimator).set_params(**ours.best_params_).fit(X, y)
    np.testing.assert_array_equal(ours.predict_proba(X), best.predict_proba(X))
    assert ours.score(X, y) == best.score(X, y)


def test_energy_is_counted():
    found = search().fit(X, y)
    assert found.energy_.joules > 0
    assert sum(found.cv_results_["energy_j"]) == pytest.approx(found.energy_.joules)


def test_several_metrics_beside_grid_search():
    scoring = ["accuracy", "f1_macro"]
    ours = search(scoring=scoring, refit="f1_macro").fit(X, y)
    theirs = GridSearchCV(KNeighborsClassifier(), GRID, scoring=scoring, refit="f1_macro", cv=3).fit(X, y)
    for key in ("mean_test_accuracy", "mean_test_f1_macro", "rank_test_f1_macro"):
        assert by_params(ours.cv_results_, key) == pytest.approx(by_params(theirs.cv_results_, key))
    assert ours.best_score_ == theirs.best_score_
    assert ours.score(X, y) == pytest.approx(theirs.score(X, y), abs=0.05)
    with pytest.raises(ValueError, match="refit"):
        search(scoring=scoring).fit(X, y)
    assert not hasattr(search(scoring=scoring, refit=False).fit(X, y), "best_params_")


def losing_and_winning(estimator, inputs, targets):
    """Several metrics by one function; the first is best where the second is worst."""
    accuracy = accuracy_score(targets, estimator.predict(inputs))
    return {"misses": 1 - accuracy, "hits": accuracy}


def test_of_the_metrics_that_a_function_gives_the_one_that_refit_names_is_searched_for():
    found = search(scoring=losing_and_winning, refit="hits", scheduler=pk.Full(trials=6)).fit(X, y)
    theirs = GridSearchCV(KNeighborsClassifier(), GRID, scoring=losing_and_winning, refit="hits", cv=3).fit(
        X, y
    )
    best = max(by_params(theirs.cv_results_, "mean_test_hits").values())
    assert found.best_score_ == pytest.approx(best)
    assert found.study_.best.metrics["score"] == pytest.approx(best)
    halved = search(
        scoring=losing_and_winning,
        refit="hits",
        scheduler=pk.Halving(max_epochs=3, min_epochs=1, eta=3, trials=6),
    ).fit(X, y)
    kept = by_params(theirs.cv_results_, "mean_test_hits")[tuple(sorted(halved.best_params_.items()))]
    assert kept > min(by_params(theirs.cv_results_, "mean_test_hits").values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("refit", ["accuracy", False])
def test_a_fold_that_fails_has_the_error_score_in_every_metric(refit):
    options = {"scoring": ["accuracy", "f1_macro"], "refit": refit, "error_score": 0.0, "cv": 3}
    options["return_train_score"] = True
    ours = search(space={"n_neighbors": pk.Choice(1, -1)}, n_trials=2, **options).fit(X, y)
    theirs = GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, -1]}, **options).fit(X, y)
    for key in ("mean_test_accuracy", "mean_test_f1_macro", "mean_train_f1_macro"):
        assert by_params(ours.cv_results_, key) == pytest.approx(by_params(theirs.cv_results_, key))


def test_numpys_integers_are_counts():
    assert len(search(n_trials=np.int64(2)).fit(X, y).study_.trials) == 2


def test_a_scheduler_spends_fewer_folds_and_ranks_what_it_stopped_last():
    halving = pk.Halving(max_epochs=4, min_epochs=1, eta=2, trials=8)
    space = {"n_neighbors": pk.Int(1, 40), "weights": SPACE["weights"]}
    found = search(space=space, sampler=pk.Random(), scheduler=halving, cv=4).fit(X, y)
    folds = found.cv_results_["n_folds"]
    assert sorted(folds) == [1, 1, 1, 1, 2, 2, 4, 4]
    means, ranks = found.cv_results_["mean_test_score"], found.cv_results_["rank_test_score"]
    assert np.isnan(means[folds < 4]).all()
    assert ranks[folds < 4].min() > ranks[folds == 4].max()
    assert found.best_score_ == np.nanmax(means)
    # What was evaluated is what cross validation of it gives.
    index = int(found.best_index_)
    alone = cross_val_score(KNeighborsClassifier(**found.best_params_), X, y, cv=4)
    np.testing.assert_allclose([found.cv_results_[f"split{i}_test_score"][index] for i in range(4)], alone)


def test_conditional_spaces_and_pipelines():
    space = {
        "ridge__alpha": pk.Float(1e-3, 1e3, log=True),
        "ridge__fit_intercept": pk.Choice(True, False),
        "ridge__positive": pk.Choice(True, False, when=pk.equals("ridge__fit_intercept", True)),
    }
    data, target = make_regression(60, 5, noise=3, random_state=0)
    made = search(make_pipeline(StandardScaler(), Ridge()), space, sampler=pk.TPE(), n_trials=10)
    found = made.fit(data, target)
    assert found.best_score_ > 0.9
    masked = found.cv_results_["param_ridge__positive"].mask
    assert [not hidden for hidden in np.broadcast_to(masked, 10)] == [
        "ridge__positive" in params for params in found.cv_results_["params"]
    ]
    again = clone(made).fit(data, target)
    assert again.cv_results_["params"] == found.cv_results_["params"]


def test_groups_and_fit_parameters_reach_splitter_and_estimator():
    groups = np.arange(len(y)) % 5
    weights = np.ones(len(y))
    tree = DecisionTreeClassifier(random_state=0)
    space = {"max_depth": pk.Choice(1, 2)}
    found = search(tree, space, n_trials=2, cv=GroupKFold(5)).fit(X, y, groups=groups, sample_weight=weights)
    theirs = GridSearchCV(tree, {"max_depth": [1, 2]}, cv=GroupKFold(5)).fit(X, y, groups=groups)
    assert found.best_score_ == pytest.approx(theirs.best_score_)


def test_failures_are_scored_warned_of_or_raised():
    space = {"n_neighbors": pk.Choice(1, -1)}
    with pytest.warns(Warning, match="1 of 2 configurations failed"):
        found = search(space=space, n_trials=2).fit(X, y)
    assert found.best_params_ == {"n_neighbors": 1}
    assert np.isnan(by_params(found.cv_results_, "mean_test_score")[("n_neighbors", -1),])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scored = search(space=space, n_trials=2, error_score=-1.0).fit(X, y)
        with pytest.raises(ValueError, match="All the 1 configurations failed"):
            search(space={"n_neighbors": pk.Choice(-1)}, n_trials=1).fit(X, y)
    assert by_params(scored.cv_results_, "mean_test_score")[("n_neighbors", -1),] == -1.0
    with pytest.raises(ValueError, match="n_neighbors"):
        search(space=space, n_trials=2, error_score="raise").fit(X, y)


def test_clones_pickles_and_leaves_the_random_generator_alone(tmp_path):
    made = search(
        scheduler=pk.ASHA(max_epochs=3, trials=4), sampler=None, store=str(tmp_path / "s.db"), name="knn"
    )
    twin = clone(made)
    assert twin.get_params().keys() == made.get_params().keys()
    assert twin.scheduler is not made.scheduler
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    twin.fit(X, y)
    assert np.random.rand() == expected
    loaded = pickle.loads(pickle.dumps(twin))
    np.testing.assert_array_equal(loaded.predict(X), twin.predict(X))
    assert read_journal(tmp_path / "s.db", "knn").state.counts.total == 4


def test_worker_processes_find_the_same():
    few = {"n_neighbors": pk.Choice(1, 5)}
    parallel = search(space=few, n_trials=2, n_jobs=2).fit(X, y)
    alone = search(space=few, n_trials=2).fit(X, y)
    assert by_params(parallel.cv_results_, "mean_test_score") == by_params(
        alone.cv_results_, "mean_test_score"
    )


def test_what_cannot_work_is_said():
    with pytest.raises(pk.errors.InvalidInput, match="n_trials"):
        search(n_trials=0).fit(X, y)
    with pytest.raises(pk.errors.InvalidInput, match="max_epochs=3"):
        search(scheduler=pk.Halving(max_epochs=2, min_epochs=1, eta=2, trials=2)).fit(X, y)


@pytest.mark.parametrize("space", [None, 5, [("C", 1)]])
def test_a_space_that_is_none_is_said(space):
    with pytest.raises(InvalidInput, match="space takes"):
        PenstockSearchCV(Ridge(), space).fit(*make_regression(20, random_state=0))
