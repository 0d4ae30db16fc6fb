"""The log: what happened, newest first, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import (
    Dropped,
    Ended,
    Event,
    Noted,
    Reported,
    Resized,
    Saved,
    SessionClosed,
    SessionOpened,
    Started,
    Submitted,
)
from penstock.core.device import Share
from penstock.core.errors import InvalidInput
from penstock.report.views._fold import Folded, Options, clean
from penstock.report.views._words import number

LINES = 200
KINDS = (
    "session_opened", "session_closed", "submitted", "started", "resized", "reported", "saved", "ended", "dropped",
    "noted",
)  # fmt: skip


def log(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """The latest events. Options: ``filter`` (kinds, separated by commas), ``trial``, ``limit``, ``offset``."""
    options = options or Options()
    kinds = {kind.strip() for kind in options.filter.split(",") if kind.strip()}
    if unknown := sorted(kinds - set(KINDS)):
        raise InvalidInput(f"There are no events of kind {unknown[0]!r}; there are {', '.join(KINDS)}.")
    first_s = folded.state.first_s or 0.0
    lines: list[dict[str, Any]] = []
    limit, skip = min(options.limit or LINES, 1000), max(0, options.offset)
    for seq, event in reversed(folded.log):
        trial = getattr(event, "trial", None)
        if kinds and event.kind not in kinds:
            continue
        if options.trial is not None and not _concerns(event, options.trial):
            continue
        if skip:
            skip -= 1
            continue
        lines.append(
            {
                "number": seq,
                "time_s": event.time_s,
                "since_s": event.time_s - first_s,
                "kind": event.kind,
                "trial": trial,
                "text": words(event),
            }
        )
        if len(lines) >= limit:
            break
    cleaned: dict[str, Any] = clean(
        {"total": folded.events, "kept": len(folded.log), "kinds": list(KINDS), "lines": lines}
    )
    return cleaned


def words(event: Event) -> str:
    """An event in one line."""
    match event:
        case Reported():
            metrics = ", ".join(f"{name} {number(value)}" for name, value in event.metrics.items())
            energy = "" if event.energy is None else f"; {event.energy}"
            return f"epoch {event.epoch}: {metrics}{energy}"
        case Started():
            fused = f", fused with {len(event.fused) - 1} more" if len(event.fused) > 1 else ""
            again = f", try {event.attempt + 1}" if event.attempt else ""
            return f"on {_where(event.shares)} from epoch {event.start}{fused}{again}"
        case Ended():
            verb = "will be tried again" if event.retry else event.status.value
            why = f": {event.reason}" if event.reason else ""
            return f"{verb} after {event.epoch} epochs{why}"
        case Submitted():
            trials = [segment.trial.id for segment in event.segments]
            named = ", ".join(map(str, trials[:8])) + (", ..." if len(trials) > 8 else "")
            return f"{event.label + ': ' if event.label else ''}trials {named}"
        case Resized():
            return f"goes on on {_where(event.shares)}"
        case Saved():
            return f"checkpoint after epoch {event.epoch}"
        case Dropped():
            return f"given up: {event.reason}" if event.reason else "given up"
        case Noted():
            text = event.data.get("text")
            return f"{event.topic.replace('_', ' ')}: {text if text is not None else _facts(event.data)}"
        case SessionOpened():
            return f"by process {event.pid} on {event.host}"
        case SessionClosed():
            return f"{event.reason}{': ' + event.detail if event.detail else ''}"


def _facts(data: Mapping[str, Any]) -> str:
    """What a note says, but for long lists."""
    facts = []
    for name, value in data.items():
        if isinstance(value, list | tuple | Mapping):
            short = len(value) <= 4 and not any(isinstance(item, list | tuple | Mapping) for item in value)
            if isinstance(value, Mapping) or not short:
                facts.append(f"{name} ({len(value)} values)")
                continue
            value = ", ".join(number(item) for item in value)
        facts.append(f"{name} {number(value)}")
    return "; ".join(facts)[:300]


def _where(shares: tuple[Share, ...]) -> str:
    named = (s.device if s.fraction == 1 else f"{s.fraction:.3g} of {s.device}" for s in shares)
    return ", ".join(named) or "its executor"


def _concerns(event: Event, trial: int) -> bool:
    if isinstance(event, Submitted):
        return any(segment.trial.id == trial for segment in event.segments)
    return getattr(event, "trial", None) == trial
