"""Prometheus: the studies and recurring jobs of a store as metrics: text, an ASGI app, or a server of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from prometheus_client import CollectorRegistry, generate_latest, make_asgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.core import StudyState, TrialStatus
from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.energy import co2
from penstock.goal import Goal, metrics_of, ranked
from penstock.integrations._prometheus_jobs import job_families
from penstock.report._journal import jobs_of
from penstock.report._read import driver_of, grid_of, leave
from penstock.store import Store, StudyEntry, open_store


@dataclass(slots=True)
class _Seen:
    """A study as far as it was read."""

    state: StudyState = field(default_factory=StudyState)
    after: int = 0
    left: bool = False  # its driver died

    def news(self, store: Store, study: int) -> bool:
        """Read on; returns whether there was anything."""
        before = self.after
        for number, event in store.read(study, after=before):
            if self.left:  # resumed, or the driver had only lost its database for a while: fold it anew
                self.state, self.after, self.left = StudyState(), 0, False
                return self.news(store, study)
            self.state.apply(event)
            self.after = number
        return self.after > before


@final
class StudyCollector(Collector):
    """The studies of a store, for a Prometheus registry: ``registry.register(StudyCollector("study.db"))``.

    With them its recurring jobs, unless one study is named.

    Reads the journal, and only what is new of it at each scrape; writes nothing, unpickles nothing. May be asked from
    any thread.

    Args:
        store: A store's path or URL.
        name: Of one study; None: all of them.
    """

    def __init__(self, store: str | Path, name: str | None = None) -> None:
        self._store = store
        self._name = name
        self._seen: dict[int, _Seen] = {}
        self._chunks: dict[tuple[str, Any, int], list[Any]] = {}  # of recurring jobs: they never change
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Nothing: what there is depends on the store."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now."""
        with self._lock:
            studies, jobs = self._read()
            yield from _families(studies)
            yield from job_families(jobs, time.time())

    def _read(self) -> tuple[list[tuple[StudyEntry, StudyState]], dict[str, Any]]:
        store = open_store(self._store, write=False)
        try:
            entries = store.studies() if self._name is None else [store.find(self._name)]
            for entry in entries:
                seen = self._seen.setdefault(entry.id, _Seen())
                try:
                    seen.news(store, entry.id)
                    driver = driver_of(store, entry.id, seen.state, partial(seen.news, store, entry.id))
                    if driver is None and seen.state.open:
                        leave(seen.state, entry, store.url)
                        seen.left = True
                except StoreCorrupt:
                    continue  # "penstock report" says what is wrong; what precedes it still counts
            jobs = jobs_of(store, self._chunks) if self._name is None else {}
            return [(entry, self._seen[entry.id].state) for entry in entries], jobs
        finally:
            store.close()


def _families(studies: list[tuple[StudyEntry, StudyState]]) -> list[Any]:
    trials = GaugeMetricFamily("penstock_trials", "Trials by status.", labels=["study", "status"])
    epochs = CounterMetricFamily("penstock_epochs", "Epochs reported.", labels=["study"])
    seconds = CounterMetricFamily("penstock_study_seconds", "Time of all sessions.", labels=["study"])
    busy = CounterMetricFamily(
        "penstock_train_seconds", "Time that epochs took on their devices.", labels=["study"]
    )
    joules = CounterMetricFamily(
        "penstock_energy_joules", "Energy of all trials, as far as metered.", labels=["study"]
    )
    source = GaugeMetricFamily(
        "penstock_energy_source", "1 for the weakest source of the energy.", labels=["study", "source"]
    )
    grams = CounterMetricFamily("penstock_co2e_grams", "CO2e of that energy.", labels=["study"])
    watts = GaugeMetricFamily(
        "penstock_power_watts", "Draw of the running trials in their latest epochs.", labels=["study"]
    )
    best = GaugeMetricFamily("penstock_best", "Metrics of the best trial.", labels=["study", "metric"])
    number = GaugeMetricFamily("penstock_best_trial", "Number of the best trial.", labels=["study"])
    opened = GaugeMetricFamily("penstock_session_open", "1 while a driver runs the study.", labels=["study"])
    ended = GaugeMetricFamily(
        "penstock_session_ended",
        "1 for why the last session ended: interrupted, too, if its driver died.",
        labels=["study", "reason"],
    )
    latest = GaugeMetricFamily(
        "penstock_last_event_timestamp_seconds", "Time of the latest event.", labels=["study"]
    )
    for entry, state in studies:
        name = [entry.name]
        for status in TrialStatus:
            trials.add_metric([entry.name, status.value], getattr(state.counts, status.value))
        epochs.add_metric(name, state.epochs)
        seconds.add_metric(name, state.spent_s)
        busy.add_metric(name, sum(record.train_s for record in state.trials.values()))
        if state.energy is not None:  # what was not metered is missing, never 0
            joules.add_metric(name, state.energy.joules)
            source.add_metric([entry.name, str(state.energy.source)], 1)
            grams.add_metric(name, co2(state.energy, grid_of(entry.spec)).value)
        drawn = _watts(state)
        if drawn is not None:
            watts.add_metric(name, drawn)
        found = next(iter(ranked(Goal.from_json(entry.spec["goal"]), state.trials.values())), None)
        if found is not None:
            number.add_metric(name, found.id)
            for metric, value in metrics_of(found).items():
                best.add_metric([entry.name, metric], value)
        opened.add_metric(name, int(state.open))
        if state.closed is not None:
            ended.add_metric([entry.name, state.closed.reason], 1)
        latest.add_metric(name, state.last_s)
    return [
        trials,
        epochs,
        seconds,
        busy,
        joules,
        source,
        grams,
        watts,
        best,
        number,
        opened,
        ended,
        latest,
    ]


def _watts(state: StudyState) -> float | None:
    """Average watts of the running trials' latest metered epochs, added up; None where there are none."""
    drawn = []
    for record in state.trials.values():
        if record.status is TrialStatus.RUNNING and record.reports:
            report = record.reports[-1]
            if report.energy is not None and report.train_s:
                drawn.append(report.energy.joules / report.train_s)
    return sum(drawn) if drawn else None


def _registry(store: str | Path, name: str | None) -> CollectorRegistry:
    if not isinstance(store, str | Path):
        raise InvalidInput(f"store takes a store's path or URL, got {store!r}.")
    registry = CollectorRegistry()
    registry.register(StudyCollector(store, name))
    return registry


def metrics_text(store: str | Path, name: str | None = None) -> str:
    """The studies and recurring jobs of a store in Prometheus's text format, for a file or a page of your own."""
    text: bytes = generate_latest(_registry(store, name))
    return text.decode()


def metrics_app(store: str | Path, name: str | None = None) -> Callable[..., Any]:
    """An ASGI app that serves the metrics; mount it where you like: ``Mount("/metrics", metrics_app("study.db"))``."""
    app: Callable[..., Any] = make_asgi_app(_registry(store, name))
    return app


def serve_metrics(
    store: str | Path, name: str | None = None, *, port: int = 9464, host: str = "127.0.0.1"
) -> Callable[[], None]:
    """Serve the metrics at ``http://host:port/metrics`` from a thread, until the returned function is called.

    Anybody who reaches the port reads them: names of studies and metrics, no configurations.

    Raises:
        InvalidInput: The port can't be or is taken, or ``store`` is not a path or URL.
        StoreError: There is no store, or no study of that name.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise InvalidInput(f"port must be a whole number between 0 and 65535, got {port!r}.")
    if not isinstance(host, str):
        raise InvalidInput(f"host takes a name or an address, got {host!r}.")
    registry = _registry(store, name)
    opened = open_store(store, write=False)  # say now if there is none, not at every scrape
    try:
        if name is not None:
            opened.find(name)
    finally:
        opened.close()
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise InvalidInput(
            f"Can't listen on {host} port {port}: {error.strerror or error}. Give another port, or 0 for any."
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
