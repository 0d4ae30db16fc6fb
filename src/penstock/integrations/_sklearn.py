"""scikit-learn: a study as a search over an estimator's parameters, by cross validation."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from sklearn.base import _fit_context, clone, is_classifier
from sklearn.exceptions import FitFailedWarning
from sklearn.model_selection import check_cv, cross_validate
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import check_random_state, get_tags, indexable

from penstock.core import Measurement, TrialRecord, TrialStatus
from penstock.core.errors import InvalidInput, TrialError, Unsupported
from penstock.execute import Executor, Local
from penstock.goal import Budget
from penstock.integrations._inline import Inline
from penstock.sample import Sampler
from penstock.schedule import Full, Scheduler
from penstock.space import Domain, Space
from penstock.study import Study
from penstock.train import Run


@final
class PenstockSearchCV(BaseSearchCV):
    """Finds an estimator's best parameters by a study, in scikit-learn's manner.

    Each trial cross-validates one configuration; each fold is an epoch of it. So a scheduler such as
    ``ASHA(max_epochs=5, trials=60)`` with ``cv=5`` evaluates most configurations on one fold and only the good ones on
    all, and a budget may be in time, watt-hours, CO2e or money. Those not evaluated on all folds have NaN for the
    others and as their mean, and are ranked last.

    After ``fit`` it has what scikit-learn's searches have (``cv_results_``, ``best_params_``, ``best_estimator_`` ...),
    ``energy_``, the energy of all folds with its source, and ``study_``. ``cv_results_`` has ``energy_j`` per
    configuration where it was metered.

    Args:
        estimator: What to tune.
        space: A ``Space`` or a dict of domains by parameter: ``{"svc__C": Float(1e-3, 1e3, log=True)}``.
        n_trials: How many configurations, if neither scheduler nor budget says so.
        scheduler: How many folds each configuration gets; default: all.
        sampler: Which configuration comes next; default TPE.
        budget: What the study may spend.
        scoring: As in ``GridSearchCV``. With several metrics ``refit`` names the one that is maximised.
        n_jobs: None: in this process; a number: so many worker processes; -1: one per core.
        refit: As in ``GridSearchCV``.
        cv: As in ``GridSearchCV``.
        verbose: Above 0: say what happens.
        random_state: Everything random of the search follows from it.
        error_score: As in ``GridSearchCV``.
        return_train_score: As in ``GridSearchCV``.
        executor: Where trials run, in place of ``n_jobs``.
        store: Keep the study there (a path or URL), for ``penstock report`` and the like; None: keep nothing.
        name: The study's name in the store.
    """

    _parameter_constraints = {  # noqa: RUF012
        **{key: value for key, value in BaseSearchCV._parameter_constraints.items() if key != "pre_dispatch"},
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimator: Any,
        space: Space | Mapping[str, Domain],
        *,
        n_trials: int = 20,
        scheduler: Scheduler | None = None,
        sampler: Sampler | None = None,
        budget: Budget | None = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        refit: Any = True,
        cv: Any = None,
        verbose: int = 0,
        random_state: Any = None,
        error_score: Any = np.nan,
        return_train_score: bool = False,
        executor: Executor | None = None,
        store: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            estimator,
            scoring=scoring,
            n_jobs=n_jobs,
            refit=refit,
            cv=cv,
            verbose=verbose,
            error_score=error_score,
            return_train_score=return_train_score,
        )
        self.space = space
        self.n_trials = n_trials
        self.scheduler = scheduler
        self.sampler = sampler
        self.budget = budget
        self.random_state = random_state
        self.executor = executor
        self.store = store
        self.name = name

    @_fit_context(prefer_skip_nested_validation=False)  # type: ignore[untyped-decorator, unused-ignore]
    def fit(self, X: Any, y: Any = None, **params: Any) -> PenstockSearchCV:
        """Run the study, and fit the best configuration on all data.

        Args:
            X: The data.
            y: The targets; None for unsupervised estimators.
            **params: ``groups`` for the splitter; the rest goes to the estimator's ``fit``, split with the data.
        """
        scorers, refit_metric = self._get_scorers()
        self._check_params(params)
        X, y = indexable(X, y)
        fit_params = dict(params)
        groups = fit_params.pop("groups", None)
        splitter = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        splits = [(train, test) for train, test in splitter.split(X, y, groups)]
        self.n_splits_ = len(splits)
        multiple = isinstance(self.scoring, list | tuple | set | dict)
        names = list(scorers._scorers) if multiple else ["score"]
        # What a callable gives, only its results tell: one score, or several, of which refit names one.
        wanted = self.refit if callable(self.scoring) else refit_metric
        work = _Folds(
            clone(self.estimator),
            X,
            y,
            splits,
            self.scoring,
            f"test_{wanted if isinstance(wanted, str) else names[0]}",
            [f"{kind}_{name}" for kind in ("test", "train") for name in names],
            fit_params,
            self.error_score,
            bool(self.return_train_score),
        )
        study = self._study(work)
        study.run(view="auto" if self.verbose else None)
        if self.error_score == "raise" and work.errors:  # in this process: the error itself
            raise work.errors[0]
        self.study_ = study
        self.energy_: Measurement | None = study.energy
        self.cv_results_ = self._results(study.trials)
        self.multimetric_ = multiple or "mean_test_score" not in self.cv_results_
        if callable(self.scoring) and self.multimetric_:
            names = [
                key.removeprefix("mean_test_") for key in self.cv_results_ if key.startswith("mean_test_")
            ]
            self._check_refit_for_multimetric(dict.fromkeys(names))
            refit_metric = self.refit
        self.scorer_ = scorers._scorers if multiple else scorers
        if self.refit or not self.multimetric_:
            self.best_index_ = self._select_best_index(self.refit, refit_metric, self.cv_results_)
            if not callable(self.refit):
                self.best_score_ = self.cv_results_[f"mean_test_{refit_metric}"][self.best_index_]
            self.best_params_ = self.cv_results_["params"][self.best_index_]
        if self.refit:
            self._refit(X, y, fit_params)
        return self

    def _check_params(self, params: Mapping[str, Any]) -> None:
        from sklearn import get_config

        if params and get_config()["enable_metadata_routing"]:
            raise Unsupported(
                "PenstockSearchCV passes parameters of fit() to the estimator, not by scikit-learn's metadata routing: "
                "turn it off, or give none."
            )

    def _study(self, work: _Folds) -> Study:
        """The study that fit() runs."""
        if not isinstance(self.space, Space | Mapping):
            raise InvalidInput(
                f"space takes a Space or a dict of domains by parameter, such as {{'C': Float(1e-3, 1e3, log=True)}}, "
                f"got {self.space!r}."
            )
        if not isinstance(self.n_trials, int | np.integer) or self.n_trials < 1:
            raise InvalidInput(f"n_trials must be a whole number of at least 1, got {self.n_trials!r}.")
        scheduler = self.scheduler
        if scheduler is None:
            scheduler = Full() if self.budget is not None else Full(trials=self.n_trials)
        executor = self.executor
        if executor is None:
            if self.n_jobs is None:
                executor = Inline()
            else:
                executor = Local(gpus=0) if self.n_jobs < 0 else Local(self.n_jobs)
        return Study(
            work,
            self.space if isinstance(self.space, Space) else dict(self.space),
            maximize="score",
            scheduler=scheduler,
            sampler=self.sampler,
            executor=executor,
            budget=self.budget,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            store=False if self.store is None else self.store,
            name=self.name,
        )

    def _results(self, trials: list[TrialRecord]) -> dict[str, Any]:
        """``cv_results_`` of the trials."""
        failed = [trial for trial in trials if trial.status is TrialStatus.FAILED]
        if failed and self.error_score == "raise":
            raise TrialError(
                f"Parameters {dict(failed[0].config)} failed: {failed[0].reason}\n{failed[0].error}"
            )
        shown = [trial for trial in trials if trial.reports or trial.status is TrialStatus.FAILED]
        if not any(len(trial.reports) == self.n_splits_ for trial in shown):
            if failed:
                raise ValueError(
                    f"All the {len(failed)} configurations failed. The first one: {failed[0].reason}\n"
                    f"{failed[0].error}"
                )
            raise InvalidInput(
                f"No configuration was evaluated on all {self.n_splits_} folds: give a larger budget, or a scheduler "
                f"with max_epochs={self.n_splits_}."
            )
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(trials)} configurations failed. The first one: {failed[0].reason}",
                FitFailedWarning,
                stacklevel=3,
            )
        names = {key for trial in shown for report in trial.reports for key in report.metrics}
        tests = sorted(key.removeprefix("test_") for key in names if key.startswith("test_"))
        out: list[dict[str, Any]] = []
        for trial in shown:
            known = {report.epoch: report.metrics for report in trial.reports}
            for fold in range(1, self.n_splits_ + 1):
                out.append(_outcome(known.get(fold, {}), tests, train=self.return_train_score))
        more: dict[str, list[Any]] = {"n_folds": [len(trial.reports) for trial in shown]}
        if all(trial.energy is not None for trial in shown):
            more["energy_j"] = [trial.energy.joules for trial in shown if trial.energy is not None]
        with warnings.catch_warnings():
            # That a mean is not finite is no news: configurations were stopped, and failures have been said.
            warnings.filterwarnings("ignore", message="One or more of the", category=UserWarning)
            configs = [dict(trial.config) for trial in shown]
            results: dict[str, Any] = self._format_results(configs, self.n_splits_, out, more)
        return results

    def _refit(self, X: Any, y: Any, fit_params: Mapping[str, Any]) -> None:
        self.best_estimator_ = clone(self.estimator).set_params(**self.best_params_)
        begin_s = time.time()
        if y is None:
            self.best_estimator_.fit(X, **fit_params)
        else:
            self.best_estimator_.fit(X, y, **fit_params)
        self.refit_time_ = time.time() - begin_s
        if hasattr(self.best_estimator_, "feature_names_in_"):
            self.feature_names_in_ = self.best_estimator_.feature_names_in_

    def __getstate__(self) -> dict[str, Any]:
        """Without the study, which has files and locks."""
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("study_", None)
        return state

    def __sklearn_tags__(self) -> Any:
        """Those of the estimator, as all searches have them."""
        tags = super().__sklearn_tags__()
        own = get_tags(self.estimator)
        tags.target_tags, tags.input_tags = own.target_tags, own.input_tags
        return tags


def _outcome(metrics: Mapping[str, float], tests: list[str], *, train: bool) -> dict[str, Any]:
    """One fold as scikit-learn's own searches have it; NaN where it was not evaluated."""

    def scores(kind: str) -> Any:
        if tests == ["score"]:
            return metrics.get(f"{kind}_score", math.nan)
        return {name: metrics.get(f"{kind}_{name}", math.nan) for name in tests}

    outcome = {
        "fit_time": metrics.get("fit_time", math.nan),
        "score_time": metrics.get("score_time", math.nan),
        "test_scores": scores("test"),
    }
    if train:
        outcome["train_scores"] = scores("train")
    return outcome


@final
@dataclass(frozen=True, slots=True)
class _Folds:
    """The training function of a search: cross-validates a configuration fold by fold. Can be pickled."""

    estimator: Any
    X: Any = field(repr=False)
    y: Any = field(repr=False)
    splits: list[tuple[Any, Any]] = field(repr=False)
    scoring: Any
    objective: str
    scores: list[str]  # all that are known before
    fit_params: Mapping[str, Any] = field(repr=False)
    error_score: Any
    train_score: bool
    errors: list[Exception] = field(default_factory=list)  # seen in this process

    @property
    def name(self) -> str:
        """The study's name, if none is given."""
        return type(self.estimator).__name__

    def __call__(self, run: Run) -> None:
        """Report each fold; ``score`` is the mean of the folds so far."""
        done: list[float] = run.load() or []
        for fold in run.epochs(len(self.splits)):
            outcome = self._evaluate(dict(run.config), fold)
            objective = self.objective
            if objective not in outcome:  # a callable's metrics are known only now
                objective = next(key for key in outcome if key.startswith("test_"))
            done.append(outcome[objective])
            finite = {key: value for key, value in outcome.items() if math.isfinite(value)}
            if objective not in finite:
                raise InvalidInput(
                    f"{objective.removeprefix('test_')} is {outcome[objective]} in fold {fold}."
                )
            run.save(done)
            run.report(score=sum(done) / len(done), **finite)

    def _evaluate(self, config: dict[str, Any], fold: int) -> dict[str, float]:
        estimator = clone(self.estimator).set_params(**config)
        try:
            found = cross_validate(
                estimator,
                self.X,
                self.y,
                cv=[self.splits[fold]],
                scoring=self.scoring,
                params=dict(self.fit_params) or None,
                return_train_score=self.train_score,
                error_score="raise",
            )
        except Exception as error:
            self.errors.append(error)
            if self.error_score == "raise" or not math.isfinite(self.error_score):
                raise
            warnings.warn(
                f"Fold {fold} failed and scores {self.error_score}: {error}", FitFailedWarning, stacklevel=2
            )
            known = self.scores if self.objective in self.scores else [self.objective]
            scored = [name for name in known if self.train_score or not name.startswith("train_")]
            return {"fit_time": 0.0, "score_time": 0.0, **dict.fromkeys(scored, float(self.error_score))}
        return {key: float(values[0]) for key, values in found.items()}
