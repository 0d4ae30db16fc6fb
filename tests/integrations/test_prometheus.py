"""Prometheus's metrics, parsed by Prometheus's own parser."""

import socket
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as pk
from penstock.core import StudyState
from penstock.core.errors import InvalidInput, PenstockError, StoreError
from penstock.integrations import StudyCollector, metrics_app, metrics_text, serve_metrics
from penstock.integrations._prometheus_jobs import _STATES, job_families
from penstock.recurring import RecurringJob
from penstock.report import read_journal
from penstock.report._journal import jobs_of
from penstock.store import open_store

from .conftest import make_study


def samples(text):
    """Values by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check(found, state):
    for status in ("waiting", "running", "paused", "completed", "stopped", "failed"):
        assert found["penstock_trials", *sorted(("curves", status))] == getattr(state.counts, status)
    assert found["penstock_epochs_total", "curves"] == state.epochs
    assert found["penstock_energy_joules_total", "curves"] == pytest.approx(state.energy.joules)


def test_the_text_says_what_the_journal_says(store):
    state = read_journal(store).state
    found = samples(metrics_text(store))
    check(found, state)
    best = pk.Study.load(store).best
    assert found["penstock_best_trial", "curves"] == best.id
    assert found["penstock_best", "curves", "loss"] == best.metrics["loss"]
    assert found["penstock_session_open", "curves"] == 0
    assert found["penstock_energy_source", "curves", str(state.energy.source)] == 1
    assert "penstock_power_watts" not in {name for name, *_ in found}  # nothing runs


def test_a_scrape_sees_what_is_new(store, tmp_path):
    """The journal copied into another store event by event, scraped after each, as a running study would be."""
    target = str(tmp_path / "live.db")
    with open_store(store, write=False) as opened:
        entry = opened.find(None)
        events = [event for _, event in opened.read(entry.id)]
    collector = StudyCollector(target)
    state = StudyState()
    watts = []
    with open_store(target, write=True) as live:
        copied = live.create(entry.name, entry.spec, None)
        live.lock(copied.id)
        for event in events:
            live.append(copied.id, [event])
            state.apply(event)
            families = {family.name: family for family in collector.collect()}
            assert families["penstock_epochs"].samples[0].value == state.epochs
            assert families["penstock_session_open"].samples[0].value == (state.closed is None)
            watts += [sample.value for sample in families["penstock_power_watts"].samples]
    assert watts
    assert all(value >= 0 for value in watts)


def test_the_server_serves_and_stops(store):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = serve_metrics(store, port=port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            check(samples(answer.read().decode()), read_journal(store).state)
    finally:
        stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)


def test_the_app_is_mounted_in_starlette(store):
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    client = TestClient(Starlette(routes=[Mount("/metrics", metrics_app(store, "curves"))]))
    check(samples(client.get("/metrics/").text), read_journal(store).state)


def test_recurring_jobs_are_told_as_they_went(store):
    """Against sums of our own; a job of the store that can't be read leaves the others alone."""
    job = RecurringJob(
        "nightly", None, batch_sizes=[32, 64], default=64, target=("accuracy", 0.6), eta=0.25, max_power_w=200.0,
        policy="zeus", store=store,
    )  # fmt: skip
    spent = []
    for night in range(40):  # more than stay in one value
        decision = job.decide(device="V100" if night % 4 else "A40", limits_w=[100.0, 200.0])
        if night == 3:
            job.abandon(decision)
            continue
        if night == 39:
            continue
        cheap = 1.0 if decision.batch_size == 32 else 2.0
        ended = {"epochs": 3, "time_s": 100.0 * cheap, "energy_j": 5000.0 * cheap, "reached": night != 5}
        measured = {limit_w: (30.0, limit_w) for limit_w in decision.profile_w}
        job.observe(decision, **ended, profile=measured, error="out of memory" if night == 5 else "")
        spent.append((decision, ended))
    with open_store(store, write=True) as opened:
        opened.put("recurring/foreign", {"records": 5})

    found = samples(metrics_text(store))
    assert not [key for key in found if "foreign" in key]
    states = {state: found["penstock_job_runs", *sorted((state, "nightly"))] for state in _STATES}
    assert states == {"reached": 37, "stopped": 0, "failed": 1, "given up": 1, "under way": 1, "lost": 0}
    energy_j = sum(ended["energy_j"] for _, ended in spent)
    time_s = sum(ended["time_s"] for _, ended in spent)
    assert found["penstock_job_energy_joules_total", "nightly"] == energy_j
    assert found["penstock_job_seconds_total", "nightly"] == time_s
    assert found["penstock_job_epochs_total", "nightly"] == 3 * 38
    assert found["penstock_job_cost_total", "nightly"] == 0.25 * energy_j + 0.75 * 200 * time_s
    assert found["penstock_job_batch_size", "nightly"] == decision.batch_size
    assert found["penstock_job_best_batch_size", "nightly"] == 32
    assert found["penstock_job_mean_cost", "64", "nightly"] == 0.25 * 10_000 + 0.75 * 200 * 200
    assert found["penstock_job_last_decision_timestamp_seconds", "nightly"] == decision.decided_s
    assert decision.limit_w is not None
    assert found["penstock_job_power_limit_watts", "nightly"] == decision.limit_w
    # The default takes 10 kJ and 200 s, and that counts on the kinds of devices where it has reached the target.
    known = {made.device for made, ended in spent if made.batch_size == 64 and ended["reached"]}
    there = [ended for made, ended in spent if made.device in known]
    less_j = sum(10_000 * ended["reached"] - ended["energy_j"] for ended in there)
    assert less_j > 0
    assert found["penstock_job_saved_joules", "nightly"] == pytest.approx(less_j)
    assert found["penstock_job_saved_seconds", "nightly"] == pytest.approx(less_j / 50)
    assert found["penstock_job_saved_cost", "nightly"] == pytest.approx(
        0.25 * less_j + 0.75 * 200 * less_j / 50
    )
    assert not [key for key in samples(metrics_text(store, "curves")) if "job" in key[0]]

    with open_store(store, write=False) as opened:
        runs = job_families(jobs_of(opened), time.time() + 2 * 86_400)[0].samples
    later = {sample.labels["state"]: sample.value for sample in runs}
    assert later == states | {"under way": 0, "lost": 1}


def test_several_studies_are_told_apart(store):
    study = make_study(store, scheduler=pk.Full(trials=2))
    study._name = "other"
    study.run()
    found = samples(metrics_text(store))
    assert found["penstock_epochs_total", "curves"] != found["penstock_epochs_total", "other"]
    assert ("penstock_epochs_total", "other") not in samples(metrics_text(store, "curves"))


def test_what_cannot_be_served_is_said(store, tmp_path):
    for port in (-1, 65536, "x", 1.5, None, True):
        with pytest.raises(InvalidInput, match="port must be"):
            serve_metrics(store, port=port)
    with pytest.raises(InvalidInput, match="host takes"):
        serve_metrics(store, host=5, port=0)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidInput, match="Give another port"),
    ):
        serve_metrics(store, port=taken.getsockname()[1])
    with pytest.raises(StoreError, match="no store"):
        serve_metrics(tmp_path / "none.db", port=0)
    with pytest.raises(PenstockError, match="nobody"):
        serve_metrics(store, "nobody", port=0)
    with pytest.raises(InvalidInput, match="store takes"):
        metrics_text(5)
    assert not (tmp_path / "none.db").exists()
