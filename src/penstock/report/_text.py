"""A study on the terminal: the summary after a run and ``penstock report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from penstock.core import Measurement, StudyState, TrialRecord, TrialStatus
from penstock.energy import co2, money
from penstock.goal import METERED, Goal, metrics_of, ranked
from penstock.report._format import counts_text, duration_text, metrics_text, plain, short
from penstock.report._read import besides_text, grid_of, limits_text

_ERROR_LINES = 4
_YEAR_S = 365 * 86400.0


def summary_text(
    name: str | None,
    goal: Goal,
    state: StudyState,
    *,
    top: int = 1,
    spec: Mapping[str, Any] | None = None,
    kept: bool = True,
    driver: str = "",
) -> str:
    """What was found and what it cost, in a few lines.

    Args:
        name: The study's.
        goal: What it is after.
        state: Its state.
        top: How many of the best trials to show.
        spec: Has the region and the price of the electricity.
        kept: Whether it is in a store, so that it can be resumed.
        driver: Who runs it now, as its store says; empty: nobody has asked.
    """
    best_first = ranked(goal, state.trials.values())
    lines = [f"study {name or ''}: {goal}", f"  trials  {counts_text(state.counts)}"]
    limits = limits_text(spec or {}, state)
    if limits is not None:
        lines.append(f"  limits  {limits}")
    busy_s = sum(record.busy_s for record in state.trials.values())
    energy = "not metered" if state.energy is None else str(state.energy)
    # A virtual clock begins at 0, and the wall's began in 1970.
    clock = "simulated" if state.sessions and state.sessions[0].time_s < _YEAR_S else "wall"
    lines.append(
        f"  cost    {duration_text(state.spent_s)} {clock} time, {duration_text(busy_s)} of training"
    )
    if state.devices and state.spent_s > 0:
        held = state.device_s / (state.spent_s * len(state.devices))
        used = duration_text(state.device_s)
        lines.append(f"          {len(state.devices)} devices used, {used} of device time, {held:.0%} held")
    lines.append(f"          {state.epochs} epochs, energy {energy}{besides_text(state)}")
    if state.energy is not None:
        lines.append(f"          {_footprint(state.energy, spec or {})}")
    lines += _limit_lines(state)
    lines += _surrogate_lines(state)
    lines += _fusion_lines(state)
    if not best_first:
        violated = any(record.violated for record in state.trials.values())
        which = "that keeps the limits " if violated else ""
        lines.append(f"  best    none: no trial {which}has reported the objective")
    for rank, record in enumerate(best_first[:top]):
        lines += _trial_lines(goal, record, "best" if rank == 0 else f"{rank + 1}.")
    lines += _overtaken_lines(goal, state, best_first)
    if state.counts.failed:
        failed = [record for record in state.trials.values() if record.status.value == "failed"]
        lines.append(f"  failed  {len(failed)}, e.g. trial {failed[0].id}: {failed[0].reason}")
        lines += _error_lines(failed[0])
    if state.closed is not None and state.closed.reason != "finished":
        detail = f" ({state.closed.detail})" if state.closed.detail else ""
        later = "; it can be resumed" if kept else ""
        lines.append(f"  left    {state.closed.reason}{detail}{later}")
    if state.open and kept:
        who = f"{driver} runs it" if driver else "it runs, or its driver died and it can be resumed"
        lines.append(f"  open    {_news_text(state.last_s)}{who}")
    return plain("\n".join(lines))


def _news_text(time_s: float) -> str:
    """When a study was last heard of; nothing where its time is not that of the day."""
    if not 1e9 < time_s < 1e11:
        return ""
    return f"latest news of {datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}; "


def _error_lines(record: TrialRecord) -> list[str]:
    """Where it failed: the end of the traceback, without what its reason says already."""
    told = [line for line in record.error.splitlines() if line.strip(" ^~")]
    if told and told[-1].strip() == record.reason.strip():
        told.pop()
    return [f"          {line}" for line in told[-_ERROR_LINES:]]


def _footprint(energy: Measurement, spec: Mapping[str, Any]) -> str:
    """``0.5 g +- 17% (estimated) CO2e, DE, 0.0003 EUR``; a world average is called one."""
    source, price = grid_of(spec), spec.get("price_per_kwh")
    given = "" if spec.get("g_per_kwh") is None else f"{source.g_per_kwh:g} g/kWh, "
    text = f"{co2(energy, source)} CO2e ({given}{source.where})"
    return text if price is None else f"{text}, {money(energy, price, spec.get('currency', 'EUR'))}"


def _limit_lines(state: StudyState) -> list[str]:
    """The power limits found, one per kind of device, batch size and number of GPUs, and why none is set."""
    found: dict[tuple[object, ...], str] = {}
    for note in state.notes:
        data = note.data
        if note.topic == "power_profile":
            verb = "" if data["applied"] else "would take "
            change = ", ".join(
                f"{abs(part):.1%} {'less' if part >= 0 else 'more'} {what}"
                for part, what in ((data["energy_saved"], "energy"), (data["time_saved"], "time"))
            )
            size = f", batch size {data['batch_size']}" if data["batch_size"] else ""
            gpus = f"{data['gpus']} x " if data["gpus"] > 1 else ""
            text = f"{data['limit_w']:.0f} W for {gpus}{data['device']}{size}: {verb}{change} than at"
            found[data["device"], data["batch_size"], data["gpus"]] = f"{text} {data['highest_w']:.0f} W"
        elif note.topic == "power_limits":
            found[(data["text"],)] = str(data["text"])
    return [f"  {'power' if n == 0 else '':7s} {text}" for n, text in enumerate(found.values())]


def _surrogate_lines(state: StudyState) -> list[str]:
    """How many trials were the narrow twin's and how many the full model's, and whether the check passed."""
    for note in state.notes:
        if note.topic == "surrogate":
            targets = sum(record.is_target for record in state.trials.values())
            check = "passes" if note.data["check"]["ok"] else "FAILS"
            return [
                f"  twin    {note.data['factor']:g} times as narrow, coordinate check {check}: "
                f"{len(state.trials) - targets} trials of it, {targets} of the full model"
            ]
    return []


def _overtaken_lines(goal: Goal, state: StudyState, best_first: Sequence[TrialRecord]) -> list[str]:
    """A trained model that is none of the study's results and has come out better in quality than they have."""
    at = goal.quality
    if at is None or not best_first or best_first[0].overtaken:
        return []
    objective, found = goal.objectives[at], []
    for record in state.trials.values():
        value = goal.score(record)
        if record.overtaken and record.status is TrialStatus.COMPLETED and not record.violated and value:
            found.append((value[at], record))
    best = goal.score(best_first[0])
    if not found or best is None or min(value for value, _ in found) >= best[at]:
        return []
    record = min(found, key=lambda each: each[0])[1]
    return [
        f"  besides trial {record.id}, transferred before the twin had found better, has "
        f"{objective.metric} {short(record.metrics[objective.metric])}"
    ]


def _fusion_lines(state: StudyState) -> list[str]:
    """How many trials trained as one, by kind of trials, and why not more or none."""
    found: dict[str, str] = {}
    for note in state.notes:
        data = note.data
        if note.topic == "fusion" and "kind" in data and (data["kind"] not in found or data.get("halved")):
            size = f"batch size {data['batch_size']}: " if data.get("batch_size") else ""
            groups = f"groups of {data['count']}" if data["count"] > 1 else "not fused"
            found[data["kind"]] = f"{size}{groups}: {data['reason']}"
    return [f"  {'fused' if n == 0 else '':7s} {text}" for n, text in enumerate(found.values())]


def _trial_lines(goal: Goal, record: TrialRecord, head: str) -> list[str]:
    left_out = {*METERED} - {objective.metric for objective in goal.objectives}
    metrics = {name: value for name, value in metrics_of(record).items() if name not in left_out}
    lines = [f"  {head:7s} trial {record.id} after {record.epoch} epochs: {metrics_text(metrics)}"]
    return lines + [f"          {name} = {short(value)}" for name, value in record.config.items()]
