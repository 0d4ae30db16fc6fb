"""Comparisons of policies on traces: regret, last-five energy and time, final choices, Pareto fronts, eta sweeps."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.recurring._replay import Replay, make_policy, replay
from penstock.recurring._traces import Workload


def compare(
    workload: Workload,
    policies: Sequence[str],
    *,
    seeds: int,
    eta: float = 0.5,
    beta: float = 2.0,
    window: int | None = None,
    recurrences: int | None = None,
    in_flight: int = 1,
) -> tuple[dict[str, Any], dict[str, list[Replay]]]:
    """Replay a workload under several policies with several seeds; a JSON-able summary, and the replays."""
    names = list(dict.fromkeys(policies))
    runs: dict[str, list[Replay]] = {}
    for name in dict.fromkeys([*names, "default"]):
        policy = make_policy(name, workload, eta)
        runs[name] = [
            replay(
                workload,
                policy,
                recurrences=recurrences,
                eta=eta,
                beta=beta,
                window=window,
                seed=seed,
                in_flight=in_flight,
            )
            for seed in range(seeds)
        ]
    base_j = _mean(step.energy_j for run in runs["default"] for step in run.last())
    base_s = _mean(step.time_s for run in runs["default"] for step in run.last())
    size, limit_w, cost = workload.optimum(eta)
    summary: dict[str, Any] = {
        "workload": workload.name,
        "network": workload.network,
        "optimizer": workload.optimizer,
        "target": workload.target,
        "default": workload.default,
        "batch_sizes": list(workload.batch_sizes),
        "limits_w": list(workload.limits_w),
        "recurrences": workload.recurrences if recurrences is None else recurrences,
        "seeds": seeds,
        "eta": eta,
        "beta": beta,
        "optimum": {"batch_size": size, "limit_w": limit_w, "cost": cost},
        "notes": list(workload.notes),
        "policies": {},
    }
    for name in names:
        regrets = [run.regret for run in runs[name]]
        finals = Counter((run.last()[-1].batch_size, run.last()[-1].limit_w) for run in runs[name])
        energy = _mean(step.energy_j for run in runs[name] for step in run.last())
        time_s = _mean(step.time_s for run in runs[name] for step in run.last())
        first = runs[name][0]
        summary["policies"][name] = {
            "regret": _mean(regrets),
            "regret_spread": statistics.stdev(regrets) if seeds > 1 else 0.0,
            "regret_median": statistics.median(regrets),
            "energy_vs_default": energy / base_j,
            "time_vs_default": time_s / base_s,
            "energy_saved": 1.0 - energy / base_j,
            "failed_runs": _mean(sum(not s.reached for s in run.steps) for run in runs[name]),
            "final": [
                {"batch_size": b, "limit_w": w, "seeds": n}
                for (b, w), n in sorted(finals.items(), key=lambda i: -i[1])
            ],
            "path": [[s.batch_size, s.limit_w, s.reached] for s in first.steps],
            "curve": _average_curves([run.curve() for run in runs[name]]),
        }
    return summary, {name: runs[name] for name in names}


def pareto(workload: Workload) -> list[dict[str, float]]:
    """The Pareto front of (TTA, ETA) over all configurations, fastest first (Zeus Fig. 2 and 16)."""
    points = sorted(
        (workload.mean_epochs(b) * t, workload.mean_epochs(b) * t * p, b, w)
        for b in workload.batch_sizes
        for w, (t, p) in workload.power[b].items()
        if math.isfinite(workload.mean_epochs(b))
    )
    front: list[dict[str, float]] = []
    least = math.inf
    for time_s, energy_j, size, limit_w in points:
        if energy_j < least:
            least = energy_j
            front.append({"time_s": time_s, "energy_j": energy_j, "batch_size": size, "limit_w": limit_w})
    return front


def eta_sweep(
    workload: Workload,
    policy: str,
    *,
    seeds: int,
    etas: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    beta: float = 2.0,
) -> list[dict[str, float]]:
    """Where a policy ends up for each eta: last-five TTA and ETA against default (Zeus Fig. 11 and 22)."""
    rows = []
    for eta in etas:
        summary, _ = compare(workload, [policy], seeds=seeds, eta=eta, beta=beta)
        row = summary["policies"][policy]
        rows.append(
            {
                "eta": eta,
                "energy_vs_default": row["energy_vs_default"],
                "time_vs_default": row["time_vs_default"],
                "regret": row["regret"],
            }
        )
    return rows


def geometric_mean(values: Sequence[float], *, floor: float = 1e-3) -> float:
    """The geometric mean; values below ``floor`` (a regret may come out negative by luck) count as ``floor``."""
    return math.exp(sum(math.log(max(value, floor)) for value in values) / len(values))


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def _average_curves(curves: Sequence[Sequence[float]]) -> list[float]:
    length = min(len(curve) for curve in curves)
    return [round(_mean(curve[t] for curve in curves), 4) for t in range(length)]
