"""Prometheus's metrics, parsed by Prometheus's own parser."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as pk
from penstock.core import StudyState
from penstock.core.errors import InvalidInput, PenstockError, StoreError
from penstock.integrations import StudyCollector, metrics_app, metrics_text, serve_metrics
from penstock.report import read_journal
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
