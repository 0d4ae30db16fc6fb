"""What a study is after: objectives and their ranking, budgets, Pareto sets, scores."""

from penstock.goal._budget import Budget, Spent
from penstock.goal._limit import (
    Limit,
    Quantity,
    check_limits,
    epoch_j,
    epoch_s,
    flops,
    latency_s,
    measured,
    memory_bytes,
    params,
    power_w,
)
from penstock.goal._objective import METERED, Goal, Objective, metrics_of, ranked
from penstock.goal._pareto import dominates, front, order
from penstock.goal._score import Score, rescale, score

__all__ = [
    "METERED",
    "Budget",
    "Goal",
    "Limit",
    "Objective",
    "Quantity",
    "Score",
    "Spent",
    "check_limits",
    "dominates",
    "epoch_j",
    "epoch_s",
    "flops",
    "front",
    "latency_s",
    "measured",
    "memory_bytes",
    "metrics_of",
    "order",
    "params",
    "power_w",
    "ranked",
    "rescale",
    "score",
]
