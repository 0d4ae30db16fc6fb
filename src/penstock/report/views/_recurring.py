"""Recurring jobs: what was decided and what it cost, run by run, and what is believed of every batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.patience import patience_s
from penstock.report.views._fold import clean
from penstock.report.views._style import BLUE, GREY, ORANGE, RED, Figure, axis, figure
from penstock.report.views._words import duration, energy
from penstock.sample._bandit import posterior

PREFIX = "recurring/"


def recurring(
    name: str, value: Mapping[str, Any], *, eta: float | None = None, now_s: float | None = None
) -> dict[str, Any]:
    """A job's history from what its store keeps under ``recurring/NAME``, archived records included.

    Costs are Zeus's Eq. 2 with ``eta``, by default the job's own (0.5 where the store does not tell), and the MAXPOWER
    that the job decides by. What is shown of a batch size's cost is the sample mean of the runs that reached the target
    and its standard error (the posterior of Zeus Alg. 2 with a flat prior), whatever the policy believes; one run alone
    has a mean but no error. A run that has been under way for longer than the job waits at ``now_s`` is lost.
    """
    eta = float(value.get("eta", 0.5)) if eta is None else eta
    decisions: dict[int, Mapping[str, Any]] = {}
    results: dict[int, Mapping[str, Any]] = {}
    given_up: set[int] = set()
    limits: set[float] = set()
    for record in value.get("records", []):
        if "d" in record:
            decisions[int(record["d"]["n"])] = record["d"]
            limits |= {float(limit) for limit in record["d"].get("profile", ())}
        elif "r" in record:
            results.setdefault(int(record["r"]["n"]), record["r"])
        elif "x" in record:
            given_up.add(int(record["x"]))
    max_power_w = float(value.get("max_power_w") or max(limits, default=0.0) or 1.0)
    given = value.get("give_up_s")
    longest_s = max((float(result["s"]) for result in results.values()), default=0.0)
    patient_s = patience_s(longest_s, None if given is None else float(given))
    rows = []
    for number, decision in sorted(decisions.items()):
        result = results.get(number)
        cost = None
        if result is not None:
            cost = eta * float(result["j"]) + (1 - eta) * max_power_w * float(result["s"])
        rows.append(
            {
                "number": number,
                "batch_size": decision["b"],
                "limit_w": decision.get("p"),
                "explore": bool(decision.get("explore")),
                "device": decision.get("device", ""),
                "decided_s": decision.get("t", 0.0),
                "cost_limit": decision.get("stop"),
                "state": _state(
                    number,
                    result,
                    given_up,
                    lost=now_s is not None and float(decision.get("t", 0.0)) < now_s - patient_s,
                ),
                "epochs": None if result is None else result["epochs"],
                "time_s": None if result is None else result["s"],
                "energy_j": None if result is None else result["j"],
                "cost": cost,
                "error": "" if result is None else result.get("error", ""),
            }
        )
    cleaned: dict[str, Any] = clean(
        {
            "job": name,
            "policy": value.get("policy", ""),
            "eta": eta,
            "max_power_w": max_power_w,
            "runs": rows,
            "arms": _arms(rows),
        }
    )
    return cleaned


def recurring_figures(data: dict[str, Any]) -> list[Figure]:
    """The cost of each run by batch size, and the belief in each batch size's mean cost."""
    looks = {"reached": (BLUE, "circle"), "stopped": (ORANGE, "x"), "failed": (RED, "x")}
    traces: list[dict[str, Any]] = []
    for state, (colour, symbol) in looks.items():
        runs = [run for run in data["runs"] if run["state"] == state]
        if runs:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": state,
                    "x": [run["number"] for run in runs],
                    "y": [run["cost"] for run in runs],
                    "text": [_told(run) for run in runs],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"size": 9, "color": colour, "symbol": symbol},
                }
            )
    costs = figure(traces, axis("recurrence"), axis("cost, J", rangemode="tozero"))
    arms = [arm for arm in data["arms"] if arm["mean"] is not None]
    beliefs = figure(
        [
            _means(name, arms, single, colour)
            for name, single, colour in (
                ("mean of runs that reached the target, 95%", False, BLUE),
                ("one run that reached the target", True, GREY),
            )
            if any((arm["std"] is None) is single for arm in arms)
        ],
        axis("batch size", type="category"),
        axis("mean cost of runs that reached the target, J", rangemode="tozero"),
    )
    return [costs, beliefs]


def _means(name: str, arms: list[dict[str, Any]], single: bool, colour: str) -> dict[str, Any]:
    """The arms with one run (``single``), or those with more; all are named, to keep them in order."""
    own = [(arm["std"] is None) is single for arm in arms]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [str(arm["batch_size"]) for arm in arms],
        "y": [arm["mean"] if mine else None for arm, mine in zip(arms, own, strict=True)],
        "text": [_believed(arm) for arm in arms],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 10, "color": colour},
    }
    if not single:  # a bar of no length would claim that one run tells all
        bars = [1.96 * (arm["std"] or 0.0) for arm in arms]
        trace["error_y"] = {"type": "data", "array": bars, "color": GREY}
    return trace


def _state(number: int, result: Mapping[str, Any] | None, given_up: set[int], *, lost: bool) -> str:
    if result is None:
        return "given up" if number in given_up else "lost" if lost else "under way"
    if result["reached"]:
        return "reached"
    return "failed" if result.get("error") else "stopped"


def _arms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    arms = []
    for size in sorted({row["batch_size"] for row in rows}):
        own = [row for row in rows if row["batch_size"] == size]
        good = [row["cost"] for row in own if row["state"] == "reached"]
        belief = posterior(good)
        arms.append(
            {
                "batch_size": size,
                "runs": sum(row["cost"] is not None for row in own),
                "reached": len(good),
                "mean": belief.mean if good else None,
                "std": math.sqrt(belief.variance) if len(good) > 1 else None,
            }
        )
    return arms


def _believed(arm: dict[str, Any]) -> str:
    error = "one run, no error known" if arm["std"] is None else f"+- {1.96 * arm['std']:.2g} J (95%)"
    return (
        f"batch size {arm['batch_size']}: {arm['mean']:.4g} J, {error}; {arm['reached']} of {arm['runs']} "
        "runs reached the target"
    )


def _told(run: dict[str, Any]) -> str:
    limit = "" if run["limit_w"] is None else f", {run['limit_w']:.0f} W"
    return (
        f"run {run['number']}: batch size {run['batch_size']}{limit}, {run['epochs']:g} epochs, "
        f"{duration(run['time_s'])}, {energy(run['energy_j'])}"
    )
