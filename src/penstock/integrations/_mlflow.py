"""MLflow: a run per study, and below it one per trial."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from penstock.core import StudyState, TrialRecord, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, metrics_of, ranked
from penstock.integrations._listen import Listener
from penstock.report import View

_STATUS = {
    TrialStatus.COMPLETED: RunStatus.FINISHED,
    TrialStatus.STOPPED: RunStatus.KILLED,
    TrialStatus.FAILED: RunStatus.FAILED,
}
_STUDY, _TRIAL, _KEY = "penstock.study", "penstock.trial", "penstock.key"
_FORBIDDEN = re.compile(r"[^\w./: -]")  # what MLflow takes in names: word characters and these
_CONFIG, _AFTER = "config.", "penstock.config_after"
_BATCH = 1000  # metrics in one call: MLflow takes no more


@final
class MLflowLogger(Listener):
    """Logs a study to MLflow: ``study.run(view=MLflowLogger("digits"))``.

    The study is a run of the experiment, each trial a run nested in it: its configuration as parameters, its metrics,
    ``energy_j`` and ``train_s`` by epoch, its end as the run's status. The study's run has the best trial's
    configuration and metrics, and the energy of all. A parameter in MLflow can't change: of a trial that takes over
    another one's configuration (``PBT``), tags ``config.lr`` and so on say what it trains with, and
    ``penstock.config_after`` the epoch after which it does. Logged again (resumed, or by ``export`` after it
    ran), only what is new is added. Once a session is over, trials that may go on are ``SCHEDULED``; a study that was
    interrupted, or whose driver died, is ``KILLED``; one that an error ended, or that was left because all its trials
    failed, is ``FAILED``.

    Args:
        experiment: The experiment's name; made if there is none.
        tracking_uri: Of the server or database; None: as MLflow is set up (``MLFLOW_TRACKING_URI``).
        tags: For all runs.
        view: What to show meanwhile, as in ``Study.run``.
    """

    tool: ClassVar[str] = "MLflow"

    def __init__(
        self,
        experiment: str = "penstock",
        *,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        view: str | View | None = None,
    ) -> None:
        super().__init__(view)
        if not isinstance(experiment, str) or not experiment:
            raise InvalidInput(f"experiment takes a name, got {experiment!r}.")
        self._name = experiment
        if tracking_uri is not None and (not isinstance(tracking_uri, str) or not tracking_uri):
            raise InvalidInput(
                f"tracking_uri takes a URI such as 'sqlite:///mlflow.db', got {tracking_uri!r}."
            )
        if tags is not None and (
            not isinstance(tags, Mapping) or not all(isinstance(name, str) and name for name in tags)
        ):
            raise InvalidInput(f"tags takes a dict of values by name, got {tags!r}.")
        self._uri = tracking_uri
        self._tags = {name: str(value) for name, value in _named(tags or {}).items()}
        self._client: Any = None
        self._experiment = ""
        self._study = ""
        self._runs: dict[int, str] = {}
        self._logged: dict[int, int] = {}  # trial -> the last epoch logged
        self._over: set[int] = set()
        self._waiting: set[int] = set()  # as MLflow knows
        self._present: dict[int, dict[str, str]] = {}  # trial -> tags that say what it trains with

    def _begin(self, name: str, goal: Goal, state: StudyState) -> None:
        client = self._client = self._connected()
        found = client.get_experiment_by_name(self._name)
        self._experiment = client.create_experiment(self._name) if found is None else found.experiment_id
        self._runs, self._logged, self._over, self._waiting, self._present = {}, {}, set(), set(), {}
        # Its begin tells it from studies of the same name in other stores.
        mark = f"{name} {state.first_s:.6f}" if state.first_s is not None else name
        # A hash, for MLflow's filters can't quote everything a name may have.
        key = hashlib.sha256(mark.encode("utf-8", "surrogatepass")).hexdigest()
        known = self._search(f"tags.`{_KEY}` = '{key}'")
        if known:
            self._study = known[0].info.run_id
            client.update_run(self._study, status="RUNNING")
            self._recall(goal)
            return
        tags = {**self._tags, _KEY: key, _STUDY: mark[:5000], "penstock.goal": str(goal)[:5000]}
        self._study = client.create_run(self._experiment, run_name=name, tags=tags).info.run_id

    def _connected(self) -> Any:
        try:
            return MlflowClient(tracking_uri=self._uri)
        except MlflowException as error:
            raise InvalidInput(
                f"MLflow can't use the tracking URI {self._uri!r}: {error.message}. Give one such as "
                "'sqlite:///mlflow.db' or 'http://host:5000'."
            ) from error

    def _recall(self, goal: Goal) -> None:
        """What was logged of the study before."""
        for run in self._search(f"tags.`mlflow.parentRunId` = '{self._study}'"):
            trial = int(run.data.tags[_TRIAL])
            self._runs[trial] = run.info.run_id
            names = [clean_name(metric) for metric in goal.metrics]
            key = next((name for name in names if name in run.data.metrics), "train_s")
            history = self._client.get_metric_history(run.info.run_id, key)
            self._logged[trial] = max((metric.step for metric in history), default=0)
            self._present[trial] = {
                tag: value
                for tag, value in run.data.tags.items()
                if tag.startswith((_CONFIG, _AFTER)) and tag not in self._tags
            }
            if run.info.status == "SCHEDULED":
                self._waiting.add(trial)
            elif run.info.status != "RUNNING":
                self._over.add(trial)

    def _search(self, query: str) -> list[Any]:
        runs: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, max_results=1000, page_token=token)
            runs.extend(page)
            token = page.token
            if not token:
                return runs

    def _sync(self, record: TrialRecord) -> None:
        client = self._client
        over = record.status.is_end
        if record.status is TrialStatus.WAITING or (record.id in self._over and over):
            return
        run = self._runs.get(record.id)
        if run is None:
            tags = {**self._tags, "mlflow.parentRunId": self._study, _TRIAL: str(record.id)}
            run = client.create_run(
                self._experiment,
                start_time=_ms(record.started_s or record.created_s),
                run_name=f"trial {record.id}",
                tags=tags,
            ).info.run_id
            self._runs[record.id] = run
            params = [Param(name, str(value)[:6000]) for name, value in _named(record.config).items()]
            client.log_batch(run, params=params)
        if record.id in self._waiting and record.status is TrialStatus.RUNNING:
            client.update_run(run, status="RUNNING")
            self._waiting.remove(record.id)
        self._log(record, run)
        self._retag(record, run)
        if over:
            told = [
                RunTag("penstock.status", record.status.value),
                RunTag("penstock.reason", record.reason[:5000]),
            ]
            if record.energy is not None:
                told.append(RunTag("penstock.energy_source", str(record.energy.source)))
                # With what it drew outside of its epochs, which the metric by epoch leaves out.
                told.append(RunTag("penstock.energy_j", repr(record.energy.joules)))
            client.log_batch(run, tags=told)
            status = RunStatus.to_string(_STATUS[record.status])
            client.set_terminated(run, status=status, end_time=_ms(record.ended_s or 0.0))
            self._over.add(record.id)

    def _retag(self, record: TrialRecord, run: str) -> None:
        """Say what a trial trains with that has taken over another one's configuration."""
        if not record.before:
            return
        tags = {f"{_CONFIG}{name}": str(value)[:5000] for name, value in _named(record.config).items()}
        tags[_AFTER] = str(record.before)
        known = self._present.get(record.id, {})
        if tags == known:
            return
        for gone in known.keys() - tags.keys():  # it is no part of the present configuration
            self._client.delete_tag(run, gone)
        self._client.log_batch(run, tags=[RunTag(tag, value) for tag, value in tags.items()])
        self._present[record.id] = tags

    def _log(self, record: TrialRecord, run: str) -> None:
        logged = self._logged.get(record.id, 0)
        if record.epoch <= logged:
            return
        metrics: list[Metric] = []
        for report in record.reports:
            if report.epoch > logged:
                values: dict[str, float] = dict(report.metrics)
                if report.train_s is not None:
                    values.setdefault("train_s", report.train_s)
                if report.energy is not None:
                    values.setdefault("energy_j", report.energy.joules)
                at_ms = _ms(report.time_s)
                metrics += [
                    Metric(name, value, at_ms, report.epoch) for name, value in _named(values).items()
                ]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(run, metrics=metrics[begin : begin + _BATCH])
        self._logged[record.id] = record.epoch

    def _finish(self, goal: Goal, state: StudyState) -> None:
        at_ms = _ms(state.last_s)
        metrics = [Metric("trials", state.counts.total, at_ms, 0), Metric("epochs", state.epochs, at_ms, 0)]
        tags = []
        if state.energy is not None:
            metrics.append(Metric("energy_j", state.energy.joules, at_ms, 0))
            tags.append(RunTag("penstock.energy_source", str(state.energy.source)))
        best = next(iter(ranked(goal, state.trials.values())), None)
        if best is not None:
            last = _named(metrics_of(best))
            metrics += [Metric(f"best.{name}", value, at_ms, 0) for name, value in last.items()]
            # Tags, for a parameter of a run can't change, and a resumed study may find a better trial.
            tags.append(RunTag("penstock.best_trial", str(best.id)))
            config = _named(best.config)
            tags += [RunTag(f"best.{name}", str(value)[:5000]) for name, value in config.items()]
        self._client.log_batch(self._study, metrics=metrics, tags=tags)
        if state.closed is not None:
            tags = [RunTag("penstock.closed", f"{state.closed.reason} {state.closed.detail}".strip())]
            self._client.log_batch(self._study, tags=tags)
            ends = {"interrupted": "KILLED", "failed": "FAILED", "error": "FAILED"}
            status = ends.get(state.closed.reason, "FINISHED")
            self._client.set_terminated(self._study, status=status, end_time=at_ms)
            for trial in self._runs.keys() - self._over - self._waiting:
                self._client.update_run(self._runs[trial], status="SCHEDULED")
                self._waiting.add(trial)


def _ms(time_s: float) -> int:
    return int(time_s * 1000)


def clean_name(name: str) -> str:
    """A name that MLflow takes: others than letters, digits and ``_ - . : /`` and spaces are ``_``, as ``f1_0.5``."""
    parts = _FORBIDDEN.sub("_", name)[:240].split("/")
    # It reads names as paths, which may not leave their folder nor have empty parts.
    clean = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return "_" + clean[2:] if clean.startswith("..") else clean


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that MLflow takes; where two become one, the second has a number."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        clean = unique = clean_name(name)
        number = 1
        while unique in named or (unique != name and unique in values):
            number += 1
            unique = f"{clean}_{number}"
        named[unique] = value
    return named
