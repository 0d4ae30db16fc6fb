"""Recurring jobs that get cheaper every time: history, policies, replay of traces, and the job itself.

Start with ``_history.py`` (what is remembered) and ``_policy.py`` (the contract of policies); ``_zeus.py`` is the
paper's, ``_curve.py`` ours. ``_job.py`` joins them with the store and the meter, ``_replay.py`` with recorded traces.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.recurring._baselines import Default, Grid, Oracle
    from penstock.recurring._cost import Profile, best_limit, epoch_cost, run_cost
    from penstock.recurring._curve import Curve
    from penstock.recurring._history import Decision, History, JobSpec, Result, Seen, View
    from penstock.recurring._job import Recurrence, RecurringJob
    from penstock.recurring._overlap import Arrival, replay_arrivals, synthetic_arrivals
    from penstock.recurring._policy import Choice, Policy
    from penstock.recurring._replay import Replay, Step, make_policy, replay
    from penstock.recurring._scale import scaled_lr
    from penstock.recurring._traces import Workload, read_workloads
    from penstock.recurring._zeus import Zeus

_HOME = {
    "Arrival": "_overlap",
    "Choice": "_policy",
    "Curve": "_curve",
    "Decision": "_history",
    "Default": "_baselines",
    "Grid": "_baselines",
    "History": "_history",
    "JobSpec": "_history",
    "Oracle": "_baselines",
    "Policy": "_policy",
    "Profile": "_cost",
    "Recurrence": "_job",
    "RecurringJob": "_job",
    "Replay": "_replay",
    "Result": "_history",
    "Seen": "_history",
    "Step": "_replay",
    "View": "_history",
    "Workload": "_traces",
    "Zeus": "_zeus",
    "best_limit": "_cost",
    "epoch_cost": "_cost",
    "make_policy": "_replay",
    "read_workloads": "_traces",
    "replay": "_replay",
    "replay_arrivals": "_overlap",
    "run_cost": "_cost",
    "scaled_lr": "_scale",
    "synthetic_arrivals": "_overlap",
}

__all__ = [
    "Arrival",
    "Choice",
    "Curve",
    "Decision",
    "Default",
    "Grid",
    "History",
    "JobSpec",
    "Oracle",
    "Policy",
    "Profile",
    "Recurrence",
    "RecurringJob",
    "Replay",
    "Result",
    "Seen",
    "Step",
    "View",
    "Workload",
    "Zeus",
    "best_limit",
    "epoch_cost",
    "make_policy",
    "read_workloads",
    "replay",
    "replay_arrivals",
    "run_cost",
    "scaled_lr",
    "synthetic_arrivals",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"penstock.recurring.{_HOME[name]}"), name)
    raise AttributeError(f"module 'penstock.recurring' has no attribute {name!r}")
