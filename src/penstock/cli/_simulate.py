"""``penstock simulate``: made-up learning curves, and what a simulated run comes to."""

from __future__ import annotations

import math
import time
from typing import Any

from penstock.core import TrialStatus
from penstock.core.errors import InvalidInput
from penstock.execute import Simulated
from penstock.report._format import duration_text
from penstock.sample import Random
from penstock.schedule import ASHA, Full, Halving, Hyperband, Scheduler
from penstock.space import Float, Space
from penstock.study import Study
from penstock.train import Run


def curve(run: Run) -> None:
    """A made-up training: a power law towards a floor that depends on the learning rate and width."""
    lr, width = run.config["lr"], run.config["width"]
    floor = 0.05 + 0.1 * abs(math.log10(lr) + 2) + 0.1 * (1 - width)
    for epoch in run.epochs():
        run.save(epoch)  # so that a promoted trial goes on instead of starting over
        run.report(loss=floor + (1 + width) / (epoch + 1))


def made_up_study(executor: Simulated, scheduler: str, trials: int, max_epochs: int, seed: int) -> Study:
    """A study of made-up trainings on simulated devices."""
    makers: dict[str, Scheduler] = {
        "full": Full(trials=trials, epochs=max_epochs),
        "halving": Halving(max_epochs=max_epochs, trials=trials),
        "hyperband": Hyperband(max_epochs=max_epochs),
        "asha": ASHA(max_epochs=max_epochs, trials=trials),
    }
    if scheduler not in makers:
        raise InvalidInput(f"--scheduler takes one of {', '.join(makers)}, got {scheduler!r}.")
    space = Space(lr=Float(1e-4, 1, log=True), width=Float(0, 1))
    return Study(
        curve,
        space,
        minimize="loss",
        scheduler=makers[scheduler],
        sampler=Random(),
        executor=executor,
        seed=seed,
        store=False,
        name="simulated",
    )


def outcome(study: Study, devices: int) -> dict[str, Any]:
    """Makespan, utilisation and the study's summary, JSON-able."""
    state = study.state
    busy_s = sum(record.busy_s for record in state.trials.values())
    makespan_s = state.spent_s
    utilisation = busy_s / (devices * makespan_s) if makespan_s else None
    result = {"devices": devices, "makespan_s": makespan_s, "device_s": busy_s, "utilisation": utilisation}
    failed = [record for record in state.trials.values() if record.status is TrialStatus.FAILED]
    failures = {
        "failed": len(failed),
        "failure": {"trial": failed[0].id, "reason": failed[0].reason} if failed else None,
    }
    # The summary counts devices that were used, and this all that there are.
    return study.summary() | result | failures | {"cpu_s": time.process_time()}


def outcome_text(result: dict[str, Any]) -> str:
    """The outcome for people; every time in it is simulated."""
    used = "" if result["utilisation"] is None else f", {100 * result['utilisation']:.0f}% busy"
    best, failure = result["best"], result["failure"]
    lines = [
        f"simulated {result['trials']} trials, {result['epochs']} epochs on {result['devices']} devices",
        f"  makespan {duration_text(result['makespan_s'])} (simulated){used}",
    ]
    if best is None:
        lines.append("  best     none: no trial has reported the objective")
    else:
        metrics = {k: v for k, v in best["metrics"].items() if k not in ("train_s", "energy_j")}
        lines.append(f"  best     trial {best['trial']}: {metrics}")
    if failure is not None:
        lines.append(f"  failed   {result['failed']}, e.g. trial {failure['trial']}: {failure['reason']}")
    return "\n".join(lines)
