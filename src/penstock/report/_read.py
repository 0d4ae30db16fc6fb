"""Reading a study from its journal, without unpickling anything; one whose driver died is told from one that runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core import Noted, StudyState, TrialRecord, TrialStatus, summary
from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.core.state import VIOLATED
from penstock.energy import Grid, co2, grid, money
from penstock.goal import Goal, Limit, measured, metrics_of, ranked
from penstock.store import Store, StudyEntry, open_store


@dataclass(frozen=True, slots=True)
class Journal:
    """A study as its journal tells it.

    Attributes:
        entry: The study in its store.
        goal: What it is after.
        state: The fold over its events.
        problem: Why the journal's tail could not be read, or empty.
        driver: Who runs it now, in words; empty: nobody. If its driver died, its session is closed as interrupted.
    """

    entry: StudyEntry
    goal: Goal
    state: StudyState
    problem: str = ""
    driver: str = ""


def read_journal(store: str | Path, name: str | None = None) -> Journal:
    """The study of that name in a store, or its newest one; a damaged tail is said, not raised."""
    opened = open_store(store, write=False)
    try:
        entry = opened.find(name)
        state = StudyState()
        problem, driver = "", None
        try:
            driver = read_state(opened, entry, state)
        except StoreCorrupt as error:
            problem = str(error)
        return Journal(entry, Goal.from_json(entry.spec.get("goal", ())), state, problem, driver or "")
    finally:
        opened.close()


def read_state(store: Store, entry: StudyEntry, state: StudyState) -> str | None:
    """Fold a study's journal into an empty ``state``; one whose driver died is left as interrupted.

    Returns:
        Who runs it now, in words; None: nobody.
    """
    at = 0

    def news() -> bool:
        nonlocal at
        before = at
        for number, event in store.read(entry.id, after=before):
            state.apply(event)
            at = number
        return at > before

    news()
    driver = driver_of(store, entry.id, state, news)
    if driver is None:
        leave(state, entry, store.url)
    return driver


def driver_of(store: Store, study: int, state: StudyState, news: Callable[[], bool]) -> str | None:
    """Who runs a study whose session is open, in words; None: nobody, or its session is closed.

    Args:
        store: Where it is.
        study: Its number there.
        state: All that was read of it.
        news: Reads on into ``state``; returns whether there was anything.
    """
    while state.open:
        writer = store.writer(study)
        # A driver that was there when we had read may have closed the session and gone before we asked.
        if writer is not None or not news():
            return writer
    return None


def leave(state: StudyState, entry: StudyEntry, url: str) -> None:
    """Fold the death of the driver into what its journal says, if its session is open; judge what ran by the limits.

    What was measured of a trial that ran counts up to here, as of one that was interrupted in good order.

    Args:
        state: All that the journal says. If the journal goes on after all, fold it anew.
        entry: The study.
        url: Its store's.
    """
    if not state.open:
        return
    notes = [note for record in state.trials.values() for note in _violations(record, entry.spec, state)]
    again = shlex.join(["penstock", "resume", url, "--study", entry.name])
    state.abandon(f"its driver died; go on with: {again}")
    for note in notes:
        state.apply(note)


def _violations(record: TrialRecord, spec: Mapping[str, Any], state: StudyState) -> list[Noted]:
    twin = bool(spec.get("surrogate")) and not record.is_target
    if record.status is not TrialStatus.RUNNING or twin:  # limits are about the model itself
        return []
    values = measured(record)
    notes = []
    for limit in limits_of(spec):
        value = values.get(limit.name)
        if value is not None and not limit.holds(value):
            data = {"limit": str(limit), "quantity": limit.name, "value": value, "bound": limit.bound}
            notes.append(Noted(state.last_s, VIOLATED, data | {"predicted": None, "so_far": True}, record.id))
    return notes


def row(record: TrialRecord, spec: Mapping[str, Any] | None = None, *, error: bool = False) -> dict[str, Any]:
    """A trial as one flat row.

    A domain that has the name of one of Penstock's own columns is called ``config.name``, a metric that has one's or
    a domain's ``metric.name``.

    Args:
        record: The trial.
        spec: The study's, for the trial's CO2e and, with a price, what its energy costs.
        error: Whether to add the traceback of a failed trial.
    """
    energy = record.energy
    head: dict[str, Any] = {
        "trial": record.id,
        "status": record.status.value,
        "epochs": record.trained,
        "busy_s": record.busy_s,
        "energy_j": None if energy is None else energy.joules,
        "energy_source": None if energy is None else str(energy.source),
        "energy_wh": None if energy is None else energy.wh,
    }
    if spec is not None:
        price = spec.get("price_per_kwh")
        head["co2_g"] = None if energy is None else co2(energy, grid_of(spec)).value
        if price is not None:
            head["cost"] = None if energy is None else money(energy, price).value
    tail = {"reason": record.reason} | ({"error": record.error} if error else {})
    own = head.keys() | tail.keys()
    config = {f"config.{name}" if name in own else name: value for name, value in record.config.items()}
    taken = own | record.config.keys() | _domains(spec)
    metrics = {f"metric.{name}" if name in taken else name: value for name, value in record.metrics.items()}
    return head | config | metrics | tail


def _domains(spec: Mapping[str, Any] | None) -> set[str]:
    """The names of a study's space: a trial has only those whose conditions hold."""
    space = (spec or {}).get("space")
    pairs = space.get("domains") if isinstance(space, Mapping) else None
    return {str(pair[0]) for pair in pairs or () if isinstance(pair, Sequence) and pair}


def grid_of(spec: Mapping[str, Any]) -> Grid:
    """The grid that feeds a study; the world's where it names one that this version does not know."""
    try:
        return grid(spec.get("region"), g_per_kwh=spec.get("g_per_kwh"))
    except InvalidInput:
        return grid()


def summarize(
    name: str | None, goal: Goal, state: StudyState, spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A study's headline numbers, JSON-able; ``spec`` says where its electricity comes from and what it costs."""
    best = next(iter(ranked(goal, state.trials.values())), None)
    found: dict[str, Any] | None = None
    if best is not None:
        found = {
            "trial": best.id,
            "epochs": best.epoch,
            "config": dict(best.config),
            "metrics": metrics_of(best),
        }
    closed = state.closed
    return {
        "name": name,
        "goal": str(goal),
        **summary(state),
        **_footprint(state, spec or {}),
        "best": found,
        "ended": None if closed is None else {"reason": closed.reason, "detail": closed.detail},
    }


def limits_of(spec: Mapping[str, Any]) -> list[Limit]:
    """The limits that a study's spec names, its own or its sampler's."""
    try:
        return [Limit.from_json(entry) for entry in _entries(spec)]
    except (KeyError, TypeError, ValueError, InvalidInput):
        return []


def _entries(spec: Mapping[str, Any]) -> Any:
    for holder in (spec, spec.get("sampler")):
        given = holder.get("limits") if isinstance(holder, Mapping) else None
        if isinstance(given, Mapping):  # as a Gate writes them
            given = given.get("limits")
        if given:
            return given
    return ()


_COMPUTED = ("params", "flops", "epoch_s", "epoch_j")  # counted exactly, or metered anyway


def limits_text(spec: Mapping[str, Any], state: StudyState) -> str | None:
    """``power_w <= 90 W, 2 violating trainings, 41 proposals refused``; None without limits.

    With ``, 12 networks measured first`` where some were measured before training, and ``; power_w was measured in no
    training`` where nobody can tell whether it was kept.
    """
    found = limits_of(spec)
    if not found:
        return None
    violating = _violating(state)
    trainings = "training" if violating == 1 else "trainings"
    proposals = "proposal" if state.refused == 1 else "proposals"
    told = f"{violating:,} violating {trainings}, {state.refused:,} {proposals} refused"
    if state.probed:
        told += f", {state.probed:,} {'network' if state.probed == 1 else 'networks'} measured first"
    computed = {*_COMPUTED, *(entry["quantity"] for entry in _entries(spec) if entry.get("function"))}
    reported = [record.metrics for record in state.trials.values() if record.metrics]
    named = dict.fromkeys(limit.name for limit in found)
    untold = [n for n in named if n not in computed and not any(n in metrics for metrics in reported)]
    if reported and untold:
        told += f"; {' and '.join(untold)} {'was' if len(untold) == 1 else 'were'} measured in no training"
    return f"{', '.join(map(str, found))}, {told}"


def _violating(state: StudyState) -> int:
    """Trials that were measured to violate a limit, with a configuration that they have given up meanwhile, too."""
    return sum(bool(record.violated) or record.unfit_s is not None for record in state.trials.values())


def besides_text(state: StudyState) -> str:
    """``, 12.3 J of it for measuring and checking``; nothing where that was none of the energy."""
    return (
        "" if state.besides is None else f", {state.besides} of it for measuring and checking before training"
    )


def _footprint(state: StudyState, spec: Mapping[str, Any]) -> dict[str, Any]:
    source, price = grid_of(spec), spec.get("price_per_kwh")
    energy = state.energy
    return {
        "energy_uncertainty": None if energy is None else energy.uncertainty,
        "besides_j": None if state.besides is None else state.besides.joules,
        "co2_g": None if energy is None else co2(energy, source).value,
        "grid": {"g_per_kwh": source.g_per_kwh, "region": source.region, "assumed": source.assumed},
        "cost": None if energy is None or price is None else money(energy, price).value,
        "currency": None if price is None else str(spec.get("currency", "EUR")),
        "power_profiles": [dict(note.data) for note in state.notes if note.topic == "power_profile"],
        "limits": [str(limit) for limit in limits_of(spec)],
        "violations": _violating(state),
        "refused": state.refused,
        "probed": state.probed,
    }
