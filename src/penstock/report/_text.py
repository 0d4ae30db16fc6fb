"""A study on the terminal: the summary after a run and ``penstock report``."""

from __future__ import annotations

from penstock.core import StudyState, TrialRecord
from penstock.goal import Goal, metrics_of, ranked
from penstock.report._format import counts_text, duration_text, metrics_text, short


def summary_text(name: str | None, goal: Goal, state: StudyState, *, top: int = 1) -> str:
    """What was found and what it cost, in a few lines."""
    best_first = ranked(goal, state.trials.values())
    lines = [f"study {name or ''}: {goal}", f"  trials  {counts_text(state.counts)}"]
    busy_s = sum(record.busy_s for record in state.trials.values())
    energy = "not metered" if state.energy is None else str(state.energy)
    lines.append(f"  cost    {duration_text(state.spent_s)} wall time, {duration_text(busy_s)} of training")
    lines.append(f"          {state.epochs} epochs, energy {energy}")
    if not best_first:
        lines.append("  best    none: no trial has reported the objective")
    for rank, record in enumerate(best_first[:top]):
        lines += _trial_lines(record, "best" if rank == 0 else f"{rank + 1}.")
    if state.counts.failed:
        failed = [record for record in state.trials.values() if record.status.value == "failed"]
        lines.append(f"  failed  {len(failed)}, e.g. trial {failed[0].id}: {failed[0].reason}")
    if state.closed is not None and state.closed.reason != "finished":
        detail = f" ({state.closed.detail})" if state.closed.detail else ""
        lines.append(f"  left    {state.closed.reason}{detail}; it can be resumed")
    return "\n".join(lines)


def _trial_lines(record: TrialRecord, head: str) -> list[str]:
    metrics = {k: v for k, v in metrics_of(record).items() if k not in ("train_s", "energy_j")}
    lines = [f"  {head:7s} trial {record.id} after {record.epoch} epochs: {metrics_text(metrics)}"]
    return lines + [f"          {name} = {short(value)}" for name, value in record.config.items()]
