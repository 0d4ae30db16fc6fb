"""Events: everything that happens in a study, in the order it is acted on. The journal is a list of them.

Each event becomes one record: its kind, its trial (or None), its time and a JSON payload. Kinds are stable
names in old journals: add fields with defaults, never rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from penstock.core.device import Share
from penstock.core.errors import StoreCorrupt
from penstock.core.group import Segment
from penstock.core.measurement import Measurement, measurement
from penstock.core.trial import Checkpoint, Trial, TrialStatus


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A driver begins or resumes the study."""

    kind: ClassVar[str] = "session_opened"
    time_s: float
    host: str = ""
    pid: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A driver leaves the study in good order. ``reason``: finished, budget, interrupted, failed or error."""

    kind: ClassVar[str] = "session_closed"
    time_s: float
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The scheduler was asked with ``want`` and handed out a group.

    Journalled before anything of the group starts. Replay asks the scheduler again with the same ``want``
    and must get the same group. ``refused``: trials and how many proposals were refused before each of them, since
    they were predicted to violate a limit.
    """

    kind: ClassVar[str] = "submitted"
    time_s: float
    want: int
    segments: tuple[Segment, ...]
    label: str = ""
    refused: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A segment began to run."""

    kind: ClassVar[str] = "started"
    time_s: float
    trial: int
    start: int = 0
    shares: tuple[Share, ...] = ()
    attempt: int = 0
    fused: tuple[int, ...] = ()  # all trials of the fused placement, this one included


@dataclass(frozen=True, slots=True)
class Resized:
    """A running segment goes on with other shares from here on."""

    kind: ClassVar[str] = "resized"
    time_s: float
    trial: int
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Reported:
    """Metrics after ``epoch`` epochs (counted from 1).

    ``train_s`` is the time the epoch took on its devices, ``energy`` what it drew, None where not metered.
    """

    kind: ClassVar[str] = "reported"
    time_s: float
    trial: int
    epoch: int
    metrics: Mapping[str, float]
    train_s: float | None = None
    energy: Measurement | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint after ``epoch`` epochs lies complete at ``path`` (relative to the study's files)."""

    kind: ClassVar[str] = "saved"
    time_s: float
    trial: int
    epoch: int
    path: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A segment is over.

    Attributes:
        status: PAUSED or COMPLETED (it ran to its end), STOPPED or FAILED.
        epoch: Epochs the trial has behind it now.
        reason: One line, for people.
        error: The user's traceback, where there is one.
        lost: The worker died or was lost, through no fault of the training function.
        retry: The study will run the segment again (set by the study, not by executors).
        kept: True when the trial was RUNNING up to a drain and simply goes on at the next resume.
        energy: What the segment drew outside of its reported epochs (set-up, after the loop, an epoch that failed);
            None where not metered, or nothing to speak of.
    """

    kind: ClassVar[str] = "ended"
    time_s: float
    trial: int
    status: TrialStatus
    epoch: int
    reason: str = ""
    error: str = ""
    lost: bool = False
    retry: bool = False
    kept: bool = False
    energy: Measurement | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """The scheduler gave up a paused trial: it will get no further segment."""

    kind: ClassVar[str] = "dropped"
    time_s: float
    trial: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Noted:
    """A fact that a room wants kept and shown (a power profile, an SM2 round, a violated limit ...)."""

    kind: ClassVar[str] = "noted"
    time_s: float
    topic: str
    data: Mapping[str, Any]
    trial: int | None = None


Event: TypeAlias = (
    SessionOpened | SessionClosed | Submitted | Started | Resized | Reported | Saved | Ended | Dropped | Noted
)

Record: TypeAlias = tuple[str, int | None, float, dict[str, Any]]
"""An event as kind, trial, time and JSON-able payload."""


def measurement_to_json(measurement: Measurement) -> list[Any]:
    """A measurement as a JSON list."""
    return [measurement.value, measurement.unit, int(measurement.source), measurement.uncertainty]


def measurement_from_json(data: list[Any]) -> Measurement:
    """The measurement of a JSON list."""
    return measurement(data[0], _text(data[1]), data[2], data[3])


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    trial = segment.trial
    data: dict[str, Any] = {"id": trial.id, "seed": trial.seed, "last": segment.last, "until": segment.until}
    data["config"] = dict(trial.config)
    if trial.parent is not None:
        data["parent"] = trial.parent
    if segment.start:
        data["start"] = segment.start
    if segment.copy_from is not None:
        data["copy_from"] = [segment.copy_from.trial, segment.copy_from.epoch]
    if segment.options:
        data["options"] = dict(segment.options)
    return data


def _segment_from_json(data: Mapping[str, Any]) -> Segment:
    parent, until, copied = data.get("parent"), data["until"], data.get("copy_from")
    config, seed = _mapping(data["config"]), _count(data["seed"])
    trial = Trial(_count(data["id"]), config, seed, None if parent is None else _count(parent))
    return Segment(
        trial,
        start=_count(data.get("start", 0)),
        until=None if until is None else _count(until),
        last=bool(data["last"]),
        copy_from=None if copied is None else Checkpoint(_count(copied[0]), _count(copied[1])),
        options=_mapping(data.get("options", {})),
    )


def to_record(event: Event) -> Record:
    """The event as a record."""
    match event:
        case Reported():
            data: dict[str, Any] = {"e": event.epoch, "m": dict(event.metrics)}
            if event.train_s is not None:
                data["s"] = event.train_s
            if event.energy is not None:
                data["j"] = measurement_to_json(event.energy)
            return event.kind, event.trial, event.time_s, data
        case Started():
            data = {"shares": [[s.device, s.fraction] for s in event.shares]}
            if event.start:
                data["start"] = event.start
            if event.attempt:
                data["attempt"] = event.attempt
            if event.fused:
                data["fused"] = list(event.fused)
            return event.kind, event.trial, event.time_s, data
        case Ended():
            data = {"status": event.status.value, "e": event.epoch}
            if event.reason:
                data["reason"] = event.reason
            if event.error:
                data["error"] = event.error
            for flag in ("lost", "retry", "kept"):
                if getattr(event, flag):
                    data[flag] = True
            if event.energy is not None:
                data["j"] = measurement_to_json(event.energy)
            return event.kind, event.trial, event.time_s, data
        case Submitted():
            segments = [_segment_to_json(s) for s in event.segments]
            data = {"want": event.want, "label": event.label, "segments": segments}
            if event.refused:
                data["refused"] = [list(pair) for pair in event.refused]
            return event.kind, None, event.time_s, data
        case Saved():
            return event.kind, event.trial, event.time_s, {"e": event.epoch, "path": event.path}
        case Resized():
            shares = [[s.device, s.fraction] for s in event.shares]
            return event.kind, event.trial, event.time_s, {"shares": shares}
        case Dropped():
            return event.kind, event.trial, event.time_s, {"reason": event.reason}
        case Noted():
            return event.kind, event.trial, event.time_s, {"topic": event.topic, "data": dict(event.data)}
        case SessionOpened():
            data = {"host": event.host, "pid": event.pid, "note": dict(event.note)}
            return event.kind, None, event.time_s, data
        case SessionClosed():
            return event.kind, None, event.time_s, {"reason": event.reason, "detail": event.detail}


def from_record(kind: str, trial: int | None, time_s: float, data: Mapping[str, Any]) -> Event:
    """The event of a record.

    Raises:
        StoreCorrupt: The record is not one of ours.
    """
    try:
        return _from_record(kind, trial, time_s, data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise StoreCorrupt(f"A {kind!r} record can't be read: {error!r}.") from error


# A record may have the right checksum and still say nonsense: another program wrote it, or a person did. What is read
# further on may rely on the types of an event's fields.

_HUGE = 10**300  # beyond, an int is no float any more


def _real(value: Any) -> float:
    """``value``, a number."""
    if type(value) is float or (isinstance(value, int | float) and -_HUGE < value < _HUGE):
        return value
    raise TypeError(f"{value!r:.80} is not a number")


def _count(value: Any) -> int:
    """``value``, a whole number."""
    if type(value) is int:
        return value
    raise TypeError(f"{value!r:.80} is not a whole number")


def _text(value: Any) -> str:
    """``value``, a text."""
    if type(value) is str:
        return value
    raise TypeError(f"{value!r:.80} is not a text")


def _mapping(value: Any) -> dict[str, Any]:
    """``value``, a mapping."""
    if type(value) is dict:
        return value
    raise TypeError(f"{value!r:.80} is not a mapping")


def _shares(value: Any) -> tuple[Share, ...]:
    return tuple(Share(_text(device), _real(fraction)) for device, fraction in value)


def _energy_of(data: Mapping[str, Any]) -> Measurement | None:
    energy = data.get("j")
    return None if energy is None else measurement_from_json(energy)


def _from_record(kind: str, trial: int | None, time_s: float, data: Mapping[str, Any]) -> Event:
    if time_s - time_s != 0:
        raise ValueError(f"its time is {time_s!r}")
    if trial is not None:
        _count(trial)
    if kind == "submitted":
        segments = tuple(_segment_from_json(s) for s in data["segments"])
        refused = tuple((_count(trial), _count(number)) for trial, number in data.get("refused", ()))
        return Submitted(time_s, _count(data["want"]), segments, _text(data["label"]), refused)
    if kind == "session_opened":
        return SessionOpened(time_s, _text(data["host"]), _count(data["pid"]), _mapping(data.get("note", {})))
    if kind == "session_closed":
        return SessionClosed(time_s, _text(data["reason"]), _text(data["detail"]))
    if kind == "noted":
        return Noted(time_s, _text(data["topic"]), _mapping(data["data"]), trial)
    if trial is None:
        raise StoreCorrupt(f"A {kind!r} record has no trial.")
    if kind == "reported":
        metrics, train_s = _mapping(data["m"]), data.get("s")
        for value in metrics.values():
            if type(value) is not float:
                _real(value)
        if train_s is not None:
            _real(train_s)
        return Reported(time_s, trial, _count(data["e"]), metrics, train_s, _energy_of(data))
    if kind == "started":
        attempt, fused = _count(data.get("attempt", 0)), tuple(map(_count, data.get("fused", ())))
        return Started(time_s, trial, _count(data.get("start", 0)), _shares(data["shares"]), attempt, fused)
    if kind == "ended":
        flags = {flag: bool(data.get(flag)) for flag in ("lost", "retry", "kept")}
        reason, error = _text(data.get("reason", "")), _text(data.get("error", ""))
        status, drawn = TrialStatus(data["status"]), _energy_of(data)
        return Ended(time_s, trial, status, _count(data["e"]), reason, error, **flags, energy=drawn)
    if kind == "resized":
        return Resized(time_s, trial, _shares(data["shares"]))
    if kind == "saved":
        return Saved(time_s, trial, _count(data["e"]), _text(data["path"]))
    if kind == "dropped":
        return Dropped(time_s, trial, _text(data["reason"]))
    raise StoreCorrupt(f"Unknown kind of record {kind!r}: written by a newer Penstock? Upgrade to read it.")
