"""The recurring jobs of a store as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.core.errors import StoreCorrupt
from penstock.report._journal import told_of

_STATES = ("reached", "stopped", "failed", "given up", "under way", "lost")
_SAVED = {"energy_j": "joules", "time_s": "seconds", "cost": "cost"}


def job_families(jobs: Mapping[str, Any], now_s: float) -> list[Any]:
    """The metrics of jobs, as ``penstock.report._journal.jobs_of`` has them; one that can't be read is left out."""
    runs = GaugeMetricFamily("penstock_job_runs", "Runs by state.", labels=["job", "state"])
    totals = {
        "epochs": CounterMetricFamily("penstock_job_epochs", "Epochs of all runs.", labels=["job"]),
        "time_s": CounterMetricFamily("penstock_job_seconds", "Time of all runs.", labels=["job"]),
        "energy_j": CounterMetricFamily("penstock_job_energy_joules", "Energy of all runs.", labels=["job"]),
        "cost": CounterMetricFamily(
            "penstock_job_cost", "Energy-time cost of all runs (Zeus Eq. 2), in joules.", labels=["job"]
        ),
    }
    last = {
        "batch_size": GaugeMetricFamily(
            "penstock_job_batch_size", "Batch size of the latest run that was decided.", labels=["job"]
        ),
        "limit_w": GaugeMetricFamily(
            "penstock_job_power_limit_watts",
            "Power limit of that run; missing where it is found out by the run, or none can be set.",
            labels=["job"],
        ),
        "decided_s": GaugeMetricFamily(
            "penstock_job_last_decision_timestamp_seconds", "When that was decided.", labels=["job"]
        ),
    }
    best = GaugeMetricFamily(
        "penstock_job_best_batch_size", "The batch size with the least mean cost so far.", labels=["job"]
    )
    mean = GaugeMetricFamily(
        "penstock_job_mean_cost",
        "Mean cost of the runs that reached the target.",
        labels=["job", "batch_size"],
    )
    saved = {
        name: GaugeMetricFamily(
            f"penstock_job_saved_{unit}",
            "What as many runs that reach the target would have taken with the default batch size, less what all took.",
            labels=["job"],
        )
        for name, unit in _SAVED.items()
    }
    for name, value in jobs.items():
        try:
            told = told_of(name, value, now_s)[0]
        except StoreCorrupt:
            continue  # "penstock report" says what is wrong
        states = Counter(run["state"] for run in told["runs"])
        for state in _STATES:
            runs.add_metric([name, state], states[state])
        done = [run for run in told["runs"] if run["time_s"] is not None]
        for figure, family in totals.items():
            family.add_metric([name], sum(run[figure] for run in done))
        for figure, gauge in last.items():
            if told["runs"] and told["runs"][-1][figure] is not None:
                gauge.add_metric([name], told["runs"][-1][figure])
        able = [arm for arm in told["arms"] if arm["mean"] is not None]
        if able:
            best.add_metric([name], min(able, key=lambda arm: float(arm["mean"]))["batch_size"])
        for arm in able:
            mean.add_metric([name, str(arm["batch_size"])], arm["mean"])
        for figure, gauge in saved.items():
            less = _saved(done, value.get("default"), figure)
            if less is not None:
                gauge.add_metric([name], less)
    return [runs, *totals.values(), *last.values(), best, mean, *saved.values()]


def _saved(done: list[dict[str, Any]], default: int | None, figure: str) -> float | None:
    """Against the mean of the default's runs that reached the target, kind of device by kind; None: there are none.

    Runs on kinds of devices where the default has not reached it yet are left out: nobody knows what it would take.
    """
    less: list[float] = []
    for device in {run["device"] for run in done}:
        here = [run for run in done if run["device"] == device]
        reached = [run for run in here if run["state"] == "reached"]
        usual = [run[figure] for run in reached if run["batch_size"] == default]
        if usual:
            less.append(sum(usual) / len(usual) * len(reached) - sum(run[figure] for run in here))
    return sum(less) if less else None
