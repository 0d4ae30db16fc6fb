"""The overview: what was found, how far it is, what it has cost, and what it saved against a stated baseline."""

from __future__ import annotations

from typing import Any

from penstock.core import Counts, Measurement, Source, TrialStatus, total
from penstock.energy import co2, money
from penstock.goal import metrics_of, ranked
from penstock.report._read import grid_of
from penstock.report.views._fold import Folded, clean
from penstock.report.views._words import energy as energy_text


def overview(folded: Folded) -> dict[str, Any]:
    """Headline figures of a study, each with where it comes from."""
    state, spec = folded.state, folded.spec
    best = next(iter(ranked(folded.goal, state.trials.values())), None)
    closed = state.closed
    result = {
        "name": folded.name,
        "goal": str(folded.goal),
        "objectives": folded.goal.to_json(),
        "scheduler": _named(spec.get("scheduler")),
        "sampler": _named(spec.get("sampler")),
        "executor": spec.get("executor", ""),
        "work": spec.get("work", ""),
        "seed": spec.get("seed"),
        "events": folded.events,
        "problem": folded.problem,
        "running": folded.running,
        "ended": None if closed is None else {"reason": closed.reason, "detail": closed.detail},
        "sessions": len(state.sessions),
        "first_s": state.first_s,
        "last_s": state.last_s,
        "spent_s": state.spent_s,
        "busy_s": sum(record.busy_s for record in state.trials.values()),
        "trials": {
            "total": state.counts.total,
            **{name: getattr(state.counts, name) for name in Counts.__slots__},
        },
        "epochs": state.epochs,
        "best": None
        if best is None
        else {
            "trial": best.id,
            "epochs": best.epoch,
            "metrics": metrics_of(best),
            "config": dict(best.config),
        },
        "eta": eta(folded),
        "energy": figure_of(state.energy),
        "watts": figure_of(_watts(folded)),
        **_footprint(folded),
        "saved": saved(folded),
        "power_limits": [
            {
                key: note.data.get(key)
                for key in ("device", "gpus", "batch_size", "limit_w", "highest_w", "energy_saved", "applied")
            }
            for note in state.notes
            if note.topic == "power_profile"
        ],
        "errors": _errors(folded),
    }
    cleaned: dict[str, Any] = clean(result)
    return cleaned


def figure_of(measurement: Measurement | None) -> dict[str, Any] | None:
    """A measurement with its unit, source and uncertainty, and as text."""
    if measurement is None:
        return None
    return {
        "value": measurement.value,
        "unit": measurement.unit,
        "source": str(measurement.source),
        "uncertainty": measurement.uncertainty,
        "text": str(measurement),
    }


def eta(folded: Folded) -> dict[str, Any] | None:
    """How long it still takes, from the tightest of the budgets and the scheduler's own end; None: not known.

    Each is extrapolated at the mean pace so far: a study that speeds up or slows down is off by as much.
    """
    state, spec = folded.state, folded.spec
    if not folded.running or state.spent_s <= 0:
        return None
    budget = spec.get("budget") or {}
    scheduler = spec.get("scheduler") or {}
    energy = state.energy
    wh = 0.0 if energy is None else energy.wh
    price = spec.get("price_per_kwh")
    done = {
        "time_s": state.spent_s,
        "epochs": state.epochs,
        "trials": state.counts.ended,
        "energy_wh": wh,
        "co2_g": 0.0 if energy is None else co2(energy, grid_of(folded.spec)).value,
        "cost": 0.0 if energy is None or price is None else money(energy, price).value,
    }
    found = []
    for name, spent in done.items():
        if (limit := budget.get(name)) is not None and spent > 0:
            found.append((state.spent_s * max(0.0, limit / spent - 1.0), f"budget of {limit:g} {name}"))
    trials = scheduler.get("trials") if isinstance(scheduler, dict) else None
    if isinstance(trials, int) and state.counts.ended > 0:
        left = max(0, trials - state.counts.ended)
        found.append((state.spent_s * left / state.counts.ended, f"{trials} trials of the scheduler"))
    if not found:
        return None
    seconds, why = min(found)
    return {"seconds": seconds, "because": why}


def saved(folded: Folded) -> dict[str, Any] | None:
    """Energy and time not spent because trials were stopped early.

    The baseline: every trial that is over and did not fail, trained for as many epochs as the longest of them, each
    further epoch at the trial's own mean energy and time per epoch. None before one trial was stopped early.
    """
    over = [
        record
        for record in folded.state.trials.values()
        if record.status in (TrialStatus.COMPLETED, TrialStatus.STOPPED) and record.reports
    ]
    longest = max((record.epoch for record in over), default=0)
    short = [record for record in over if record.epoch < longest]
    if not short:
        return None
    joules = [
        record.energy.scaled(
            (longest - record.epoch) / (record.trained - record.copied), source=Source.ESTIMATED
        )
        for record in short
        if record.energy is not None
    ]
    energy = total(joules)
    spent = total(record.energy for record in over if record.energy is not None)
    train_s = sum(
        (record.per_epoch(lambda report: report.train_s) or 0.0) * (longest - record.epoch)
        for record in short
    )
    epochs = sum(longest - record.epoch for record in short)
    return {
        "baseline": f"all {len(over)} trials that are over, trained for {longest} epochs each",
        "epochs": epochs,
        "part": epochs / (epochs + sum(record.epoch for record in over)),
        "train_s": train_s,
        "energy": figure_of(energy),
        "energy_text": energy_text(None if energy is None else energy.joules),
        "energy_part": None
        if energy is None or spent is None or energy.joules + spent.joules <= 0
        else energy.joules / (energy.joules + spent.joules),
    }


def _watts(folded: Folded) -> Measurement | None:
    """The draw now: of every trial that runs, what its latest epoch drew over the time it took."""
    if not folded.running:
        return None
    draws = []
    for record in folded.state.trials.values():
        if record.status is TrialStatus.RUNNING and record.reports:
            latest = record.reports[-1]
            if latest.energy is not None and latest.train_s:
                each = latest.energy
                draws.append(Measurement(each.joules / latest.train_s, "W", each.source, each.uncertainty))
    return total(draws)


def _footprint(folded: Folded) -> dict[str, Any]:
    energy, price = folded.state.energy, folded.spec.get("price_per_kwh")
    source = grid_of(folded.spec)
    return {
        "co2": None if energy is None else figure_of(co2(energy, source)),
        "grid": {
            "g_per_kwh": source.g_per_kwh,
            "region": source.region,
            "assumed": source.assumed,
            "where": source.where,
        },
        "cost": None
        if energy is None or price is None
        else figure_of(money(energy, price, str(folded.spec.get("currency", "EUR")))),
    }


def _named(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    inner = _named(part.get("inner"))
    given = ", ".join(
        [inner] * bool(inner)
        + [
            f"{key}={value}"
            for key, value in part.items()
            if key not in ("name", "inner" if inner else "") and value not in (None, [], "")
        ]
    )
    return f"{part.get('name', '')}({given})" if given else str(part.get("name", ""))


def _errors(folded: Folded) -> list[dict[str, Any]]:
    """Why trials failed, the commonest reason first."""
    reasons: dict[str, list[int]] = {}
    for record in folded.state.trials.values():
        if record.status is TrialStatus.FAILED:
            reasons.setdefault(record.reason or "no reason was given", []).append(record.id)
    top = sorted(reasons.items(), key=lambda item: -len(item[1]))[:5]
    return [{"reason": reason, "count": len(trials), "trial": trials[0]} for reason, trials in top]
