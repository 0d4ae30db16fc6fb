"""``penstock recur``: run a recurring job once, or tell what it has learnt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli._json import json_text
from penstock.core import WallClock
from penstock.core.errors import InvalidInput


def recur(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE:JOB",
            help="job.py:job or package.module:job; with --status also a store's file or URL.",
        ),
    ],
    status: Annotated[
        bool, typer.Option("--status", help="Tell what the job has learnt; run nothing.")
    ] = False,
    times: Annotated[int, typer.Option("--times", min=1, help="How many recurrences to run.")] = 1,
    tries: Annotated[int, typer.Option("--tries", min=1, help="Runs per recurrence at most.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one recurrence of a job that a Python file or module defines: decide, train, measure, learn."""
    if status and _is_store(target):
        found = _stored(target)
        print(json_text(found) if as_json else "\n\n".join(_status_text(one) for one in found))
        return
    from penstock.cli._load import call, load
    from penstock.recurring import RecurringJob

    job = load(target, "job")
    if callable(job) and not isinstance(job, RecurringJob):
        job = call(job, target, "RecurringJob")
    if not isinstance(job, RecurringJob):
        raise InvalidInput(
            f"{target} is not a penstock.RecurringJob (nor a function that returns one), but {job!r}."
        )
    failed = False
    try:
        if status:
            known = job.status()
            print(json_text(known) if as_json else _status_text(known))
            return
        with _terminable():
            for _ in range(times):
                done = job.run(tries=tries)
                failed = failed or not done.reached
                print(json_text(_recurrence(done)) if as_json else str(done), flush=True)
    finally:
        job.close()
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end a run as Ctrl-C does: its decision is given up, its power limits are restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _is_store(target: str) -> bool:
    if "://" in target or target.endswith((".db", ".sqlite", ".sqlite3")):
        return True
    return not target.endswith(".py") and os.path.isfile(target)


def _stored(url: str) -> list[dict[str, Any]]:
    from penstock.recurring._history import History, JobSpec
    from penstock.recurring._job import check_record, job_key, summarize
    from penstock.store import open_store
    from penstock.store._chunks import all_whole

    found = []
    now_s = WallClock().now_s()
    with open_store(url, write=False) as store:
        for name, value in all_whole(store, job_key("")).items():
            data = value or {}
            history = History.fold(check_record(name, data))
            sizes = sorted({d.batch_size for d in history.decisions.values()})
            if sizes:
                power, eta = float(data.get("max_power_w") or 1.0), float(data.get("eta", 0.5))
                spec = JobSpec(tuple(sizes), sizes[-1], eta, max_power_w=power)
                given = data.get("give_up_s")
                waited_for = history.waited_for(now_s, None if given is None else float(given))
                found.append(summarize(name, history, spec, waited_for))
    if not found:
        raise InvalidInput(f"{url} has no recurring job yet. Run one with: penstock recur FILE:JOB")
    return found


def _recurrence(done: Any) -> dict[str, Any]:
    return {
        "number": done.decision.number,
        "batch_size": done.decision.batch_size,
        "limit_w": done.decision.limit_w,
        "reached": done.reached,
        "epochs": done.epochs,
        "time_s": done.time_s,
        "energy_j": done.energy_j,
        "source": str(done.source),
        "cost": done.cost,
        "tries": done.tries,
        "metrics": dict(done.metrics),
        "reason": done.reason,
    }


def _status_text(known: dict[str, Any]) -> str:
    lost = f", {len(known['lost'])} lost" if known["lost"] else ""
    time_s = f"{known['time_s']:.0f}" if known["time_s"] >= 100 else f"{known['time_s']:.3g}"
    lines = [
        f"{known['name']} on {known['device'] or 'any device'}: {known['results']} runs, {known['reached']} reached "
        f"the target, {len(known['under_way'])} under way{lost}, {known['energy_j'] / 3600:.3g} Wh, {time_s} s"
    ]
    lines.append(
        f"  {'batch size':>10} {'runs':>5} {'reached':>8} {'epochs':>8} {'cost (J)':>12} {'limit (W)':>10}"
    )
    for size, row in known["batch_sizes"].items():
        mark = "  <- best" if size == known["best_batch_size"] else ""
        epochs = "-" if row["mean_epochs"] is None else f"{row['mean_epochs']:.1f}"
        cost = "-" if row["mean_cost"] is None else f"{row['mean_cost']:.4g}"
        limit = "-" if row["limit_w"] is None else f"{row['limit_w']:g}"
        lines.append(
            f"  {size:>10} {row['runs']:>5} {row['reached']:>8} {epochs:>8} {cost:>12} {limit:>10}{mark}"
        )
    return "\n".join(lines)
