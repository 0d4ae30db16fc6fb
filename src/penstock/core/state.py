"""The state of a study as a fold over its events. Pure: the same events give the same state.

``StudyState`` is the one place that knows what events mean. The study applies each event right after it is
journalled; a resume, a report and the dashboard apply the journal from the start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.device import Share
from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.core.event import (
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
from penstock.core.group import Segment
from penstock.core.measurement import Measurement, Sum, measurement, total
from penstock.core.trial import Config, TrialStatus


@dataclass(slots=True)
class TrialRecord:
    """What is known of one trial. Written by ``StudyState.apply`` alone; read-only for everybody else.

    Attributes:
        segment: The latest segment handed out for it.
        epoch: Epochs up to the latest report; a retry from an older checkpoint does not lower it.
        trained: Epochs behind it, by its reports and ends: those after the latest report, and of whom it was copied
            from, included.
        reports: One per epoch that was reported, in order.
        saved: Path of each known checkpoint by its epoch, oldest first.
        attempts: Failed tries of the present segment.
        devices: What it runs on, or ran on last.
        busy_s: Time spent running, over all segments and tries.
        energy: What it drew, in its epochs and outside of them; None where not metered.
        train_s: Time its epochs took on their devices, epochs that were run again included.
        unfinished: Its segment is yet to run to its end: what a resume has to run.
        violated: Limits of the study that its configuration was measured to violate, as text.
        device_s: Device-seconds it held: half a device for two seconds is one.
        refused: Proposals that were refused before this one, since they were predicted to violate a limit.
        overtaken: It trains the full model with a configuration that is none of the best that its narrow twin has found
            in the end: when it was started, early, nobody could know.
        once_j: As ``energy``, in joules, but with each epoch only once: what it would have drawn undisturbed.
        once_s: As ``train_s``, likewise.
        copied: How many of ``trained`` are epochs of the trial that it was copied from.
        before: Epochs up to the latest report before it took over another one's configuration (PBT); 0: it has its own.
        unfit_s: Up to when it trained configurations that were measured to violate a limit; None: none but the
            present one.
    """

    id: int
    config: Config
    seed: int
    segment: Segment
    parent: int | None = None
    status: TrialStatus = TrialStatus.WAITING
    epoch: int = 0
    trained: int = 0
    reports: list[Reported] = field(default_factory=list)
    saved: dict[int, str] = field(default_factory=dict)
    attempts: int = 0
    retries: int = 0
    reason: str = ""
    error: str = ""
    shares: tuple[Share, ...] = ()
    created_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    busy_s: float = 0.0
    energy: Measurement | None = None
    train_s: float = 0.0
    unfinished: bool = True
    violated: tuple[str, ...] = ()
    device_s: float = 0.0
    refused: int = 0
    overtaken: bool = False
    once_j: float | None = None
    once_s: float = 0.0
    copied: int = 0
    before: int = 0
    unfit_s: float | None = None
    _running_since_s: float | None = None
    _held_since_s: float | None = None  # its present shares
    _so_far: tuple[str, ...] = ()  # of ``violated``, until it goes on
    _members: int = 1  # of the fused training it runs in: they share the device's time

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest report's metrics; empty before the first."""
        return self.reports[-1].metrics if self.reports else {}

    @property
    def known(self) -> bool:
        """Whether a report tells of its present configuration."""
        return self.epoch > self.before

    @property
    def is_target(self) -> bool:
        """Whether it trains the full model in a study that tunes a narrow twin of it."""
        return self.segment.options.get("model") == "target"

    @property
    def explored(self) -> bool:
        """Whether its latest report is of an exploration, whose weights are thrown away (SM2)."""
        return bool(self.reports) and self.reports[-1].epoch - 1 in self.segment.options.get(
            "explorations", ()
        )

    def per_epoch(self, of: Callable[[Reported], float | None]) -> float | None:
        """The mean over its epochs of a figure of its reports, each of which is of all epochs since the one before.

        Those that it trained with another configuration don't count.

        Args:
            of: The figure of a report; None: that one does not tell.
        """
        summed, epochs = 0.0, 0
        for report, number in self.spans():
            value = of(report) if report.epoch > self.before else None
            if value is not None:
                summed += value
                epochs += number
        return summed / epochs if epochs else None

    def spans(self) -> Iterator[tuple[Reported, int]]:
        """Its reports, and of how many epochs each is: of all since the one before."""
        before = min(self.copied, self.reports[0].epoch - 1) if self.reports else 0
        for report in self.reports:
            yield report, report.epoch - before
            before = report.epoch

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        config = ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.config.items()
        )
        return (
            f"trial {self.id} ({self.status.value}, {self.epoch} epochs): {metrics or 'no report'}; {config}"
        )


@dataclass(slots=True)
class Counts:
    """How many trials are in which state."""

    waiting: int = 0
    running: int = 0
    paused: int = 0
    completed: int = 0
    stopped: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """All trials."""
        return self.waiting + self.running + self.paused + self.completed + self.stopped + self.failed

    @property
    def ended(self) -> int:
        """Trials to which nothing more happens."""
        return self.completed + self.stopped + self.failed


VIOLATED = "limit_violated"
"""The topic of notes that a trial was measured to violate a limit of the study; ``so_far``: it was left before its end,
and is judged anew once it goes on."""
PROBED = "probed"
"""The topic of notes of readings of a network that was measured before training, since predictions left it in doubt
whether it keeps the limits; ``again``: further ones of the same network."""
CHOSEN = "chosen"
"""The topic of notes that say which ``trials`` of the narrow twin have the configurations that count in the end."""
ONCE = "once"
"""In the first session's note: trials are compared by what their epochs take once, however often they were run."""
FIT = "fit"
"""In the first session's note: trials that were measured to violate a limit are not promoted."""
DREW = "drew"
"""In the data of a note, of whatever topic: energy that no trial drew, as ``Measurement.plain``. The study's, too."""
REFUSED = "refused"
"""The topic of notes of further ``proposals`` that were refused by a limit, with no trial after them."""


class StudyState:
    """The fold. ``apply`` each event once, in journal order.

    Events that say nothing new (a second report of an epoch after a retry, the end of a trial that is not
    running) are accepted and change nothing, but what a second report drew is counted: an epoch that is run again
    takes its energy and its time again.
    """

    def __init__(self) -> None:
        self.trials: dict[int, TrialRecord] = {}
        self.counts = Counts()
        self.epochs = 0  # that trials have trained, each once, as far as their reports and ends tell
        self.reports = 0  # one may come after several epochs
        self._energy = Sum()  # of trials
        self._besides = Sum()  # of measuring and checking before there is a trial
        self.notes: list[Noted] = []
        self.sessions: list[SessionOpened] = []
        self.closed: SessionClosed | None = None
        self.first_s: float | None = None
        self.last_s = 0.0
        self.spent_s = 0.0  # wall time of all sessions
        self.device_s = 0.0  # device-seconds held by trials
        self.devices: set[str] = set()  # devices that were used
        self.refused = 0  # proposals, since they were predicted to violate a limit
        self.probed = 0  # networks that were measured before training
        self.chosen: tuple[int, ...] | None = None  # trials of the twin whose configurations count; None: all

    @classmethod
    def of(cls, events: Iterable[Event]) -> StudyState:
        """The state after ``events``."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    def copy(self) -> StudyState:
        """The same state, to be moved on by itself; what is frozen (reports, notes, sessions) is shared."""
        own = copy.copy(self)
        own.counts = copy.copy(self.counts)
        own._energy, own._besides = copy.copy(self._energy), copy.copy(self._besides)
        own.notes, own.sessions, own.devices = list(self.notes), list(self.sessions), set(self.devices)
        own.trials = {}
        for number, record in self.trials.items():
            twin = own.trials[number] = copy.copy(record)
            twin.reports, twin.saved = list(record.reports), dict(record.saved)
        return own

    @property
    def energy(self) -> Measurement | None:
        """What was drawn in all, by trials and by what notes tell of; None where nothing was metered."""
        besides = self.besides
        return self.trial_energy if besides is None else total(filter(None, (self.trial_energy, besides)))

    @property
    def trial_energy(self) -> Measurement | None:
        """What all trials have drawn, in their epochs and outside of them; None where nothing was metered."""
        return self._energy.total

    @property
    def besides(self) -> Measurement | None:
        """What measuring and checking before there was a trial have drawn, as notes tell; None: nothing was metered."""
        return self._besides.total

    @property
    def open(self) -> bool:
        """Whether its last session has not been closed: a driver runs it, or died without a word."""
        return bool(self.sessions) and self.closed is None

    @property
    def once(self) -> bool:
        """Whether its trials are compared by what each epoch takes once; not so in journals of earlier releases."""
        return bool(self.sessions) and bool(self.sessions[0].note.get(ONCE))

    @property
    def fit(self) -> bool:
        """Whether trials that violate a limit are not promoted; not so in journals of earlier releases."""
        return bool(self.sessions) and bool(self.sessions[0].note.get(FIT))

    def apply(self, event: Event) -> bool:
        """Fold one event in; returns whether it said anything new."""
        if self.first_s is None:
            self.first_s = event.time_s
        if not isinstance(event, SessionOpened):
            self.spent_s += max(0.0, event.time_s - self.last_s)
            self.last_s = max(self.last_s, event.time_s)
        try:
            return self._fold(event)
        except (KeyError, InvalidInput) as error:
            trial = getattr(event, "trial", None)
            why = f"of trial {trial}, which was never handed out" if trial not in self.trials else repr(error)
            raise StoreCorrupt(f"A {event.kind!r} record says what can't be: {why}.") from error

    def _fold(self, event: Event) -> bool:
        match event:
            case Reported():
                return self._reported(event)
            case Started():
                return self._started(event)
            case Ended():
                return self._ended(event)
            case Submitted():
                for segment in event.segments:
                    self._submitted(segment, event.time_s)
                for trial, number in event.refused:
                    self.trials[trial].refused = number
                    self.refused += number
            case Saved():
                self.trials[event.trial].saved[event.epoch] = event.path
            case Resized():
                record = self.trials[event.trial]
                if record.status is not TrialStatus.RUNNING:
                    return False
                self._settle_shares(record, event.time_s)
                self._hold(record, event.shares, event.time_s)
            case Dropped():
                record = self.trials[event.trial]
                if record.status.is_end:
                    return False
                record.reason = event.reason
                record.ended_s = event.time_s
                record.unfinished = False
                self._move(record, TrialStatus.STOPPED)
            case Noted():
                self.notes.append(event)
                if event.topic == VIOLATED and event.trial in self.trials:
                    record = self.trials[event.trial]
                    limit = str(event.data["limit"])
                    if event.data.get("so_far") and limit not in record.violated:
                        record._so_far = (*record._so_far, limit)
                    record.violated = tuple(dict.fromkeys((*record.violated, limit)))
                if event.topic == PROBED and not event.data.get("again"):
                    self.probed += 1
                if event.topic == CHOSEN and isinstance(event.data.get("trials"), list):
                    self.chosen = tuple(event.data["trials"])
                    for record in self.trials.values():
                        record.overtaken = self._overtaken(record)
                if DREW in event.data:
                    self._besides.add(measurement(*event.data[DREW]))
                if event.topic == REFUSED and isinstance(event.data.get("proposals"), int):
                    self.refused += event.data["proposals"]
            case SessionOpened():
                self.sessions.append(event)
                self.closed = None
                self._settle(self.last_s)
                self.last_s = event.time_s
            case SessionClosed():
                self.closed = event
        return True

    def _overtaken(self, record: TrialRecord) -> bool:
        return self.chosen is not None and record.is_target and record.parent not in self.chosen

    def _move(self, record: TrialRecord, status: TrialStatus) -> None:
        counts = self.counts
        old, new = record.status.value, status.value
        setattr(counts, old, getattr(counts, old) - 1)
        setattr(counts, new, getattr(counts, new) + 1)
        record.status = status

    def _submitted(self, segment: Segment, time_s: float) -> None:
        trial = segment.trial
        record = self.trials.get(trial.id)
        if record is None:
            record = TrialRecord(trial.id, trial.config, trial.seed, segment, trial.parent, created_s=time_s)
            record.overtaken = self._overtaken(record)
            self.trials[trial.id] = record
            self.counts.waiting += 1
            return
        record.segment = segment
        record.config = trial.config  # PBT's explore changes it
        if segment.copy_from is not None:  # nothing is known of it yet
            record.before = record.epoch
            if record.violated:
                record.violated, record.unfit_s = (), time_s
        record.attempts = 0
        record.ended_s = None
        record.unfinished = True
        self._move(record, TrialStatus.WAITING)

    def _started(self, event: Started) -> bool:
        record = self.trials[event.trial]
        if record.status is TrialStatus.RUNNING:
            return False
        self._move(record, TrialStatus.RUNNING)
        self._hold(record, event.shares, event.time_s)
        record._running_since_s = event.time_s
        record._members = max(1, len(event.fused))
        if record.started_s is None:
            record.started_s = event.time_s
        if record._so_far:
            record.violated = tuple(limit for limit in record.violated if limit not in record._so_far)
            record._so_far = ()
        return True

    def _hold(self, record: TrialRecord, shares: tuple[Share, ...], time_s: float) -> None:
        record.shares = shares
        record._held_since_s = time_s
        for share in shares:
            self.devices.add(share.device)

    def _settle_shares(self, record: TrialRecord, time_s: float) -> None:
        """Count what it held up to now."""
        if record._held_since_s is not None:
            held_s = max(0.0, time_s - record._held_since_s) / record._members
            used_s = held_s * sum(share.fraction for share in record.shares)
            record.device_s += used_s
            self.device_s += used_s
            record._held_since_s = None

    def _count_time(self, record: TrialRecord, time_s: float) -> None:
        """Count what it ran and held up to now, where it goes on: its driver may die before it ends."""
        if record._running_since_s is not None:
            record.busy_s += max(0.0, time_s - record._running_since_s) / record._members
            record._running_since_s = max(time_s, record._running_since_s)
        if record._held_since_s is not None:
            since_s = max(time_s, record._held_since_s)
            self._settle_shares(record, time_s)
            record._held_since_s = since_s

    def _reported(self, event: Reported) -> bool:
        record = self.trials[event.trial]
        self._count_time(record, event.time_s)
        if event.energy is not None:  # spent is spent, also for an epoch that is run again
            self._drew(record, event.energy)
        if event.train_s is not None:
            record.train_s += event.train_s
        if event.epoch <= record.epoch:
            return False
        # Without a checkpoint to copy it has begun anew, whatever its segment says.
        self._count_epochs(record, event.epoch, min(record.segment.start, event.epoch - 1))
        record.epoch = event.epoch
        record.once_s += event.train_s or 0.0
        self._count_once(record, event.energy)
        record.reports.append(event)
        self.reports += 1
        return True

    def _count_epochs(self, record: TrialRecord, epoch: int, copied: int) -> None:
        """A trial has trained up to ``epoch``; of a copy that has just begun, ``copied`` of them are another's."""
        if not record.trained and record.segment.copy_from is not None:
            if epoch <= copied:
                return  # none of its own yet
            record.copied = record.trained = copied
        self.epochs += max(0, epoch - record.trained)
        record.trained = max(epoch, record.trained)

    def _count_once(self, record: TrialRecord, drawn: Measurement | None) -> None:
        if drawn is not None:
            record.once_j = drawn.joules if record.once_j is None else record.once_j + drawn.joules

    def _drew(self, record: TrialRecord, drawn: Measurement) -> None:
        record.energy = drawn if record.energy is None else record.energy + drawn
        self._energy.add(drawn)

    def _ended(self, event: Ended) -> bool:
        record = self.trials[event.trial]
        queued = record.status is TrialStatus.WAITING and not event.retry  # stopped before it started
        if record.status is not TrialStatus.RUNNING and not queued:
            return False
        self._count_time(record, event.time_s)
        record._running_since_s = record._held_since_s = None
        self._count_epochs(record, event.epoch, record.segment.start)
        if event.energy is not None:
            self._drew(record, event.energy)
            self._count_once(record, event.energy)
        if event.status is TrialStatus.FAILED:
            record.attempts += 1
            record.error = event.error
        record.reason = event.reason
        if event.retry:
            record.retries += 1
            self._move(record, TrialStatus.WAITING)
            return True
        if event.kept:
            self._move(record, TrialStatus.PAUSED)
            return True
        record.unfinished = False
        if event.status.is_end:
            record.ended_s = event.time_s
        self._move(record, event.status)
        return True

    def _settle(self, time_s: float) -> None:
        """A new session: what ran when the last driver left or died, at ``time_s``, waits to be run again."""
        for record in self.trials.values():
            if record.status is TrialStatus.RUNNING or (
                record.unfinished and record.status is TrialStatus.PAUSED
            ):
                self._count_time(record, time_s)
                record._running_since_s = record._held_since_s = None
                self._move(record, TrialStatus.WAITING)

    def abandon(self, detail: str) -> None:
        """The driver died with the latest event: what ran is left there, and the session is closed as interrupted.

        Said by who reads the journal, for nobody is left to write it. What comes after it belongs to a fold of its own.
        """
        for record in self.trials.values():
            if record.status is TrialStatus.RUNNING:
                self._count_time(record, self.last_s)
                record._running_since_s = record._held_since_s = None
                record.reason = "its driver died"
                self._move(record, TrialStatus.PAUSED)
        self.closed = SessionClosed(self.last_s, "interrupted", detail)

    def validate(self) -> None:
        """Assert the invariants; called by tests."""
        tally = Counts()
        for record in self.trials.values():
            setattr(tally, record.status.value, getattr(tally, record.status.value) + 1)
            epochs = [report.epoch for report in record.reports]
            assert epochs == sorted(set(epochs)), f"trial {record.id}: epochs {epochs} not increasing"
            assert record.epoch == (epochs[-1] if epochs else 0)
            assert record.trained >= record.epoch
        assert tally == self.counts, f"{tally} != {self.counts}"
        assert self.reports == sum(len(record.reports) for record in self.trials.values())
        assert self.epochs == sum(record.trained - record.copied for record in self.trials.values())
        assert self.reports <= self.epochs


def summary(state: StudyState) -> dict[str, Any]:
    """The state's headline numbers as JSON-able values."""
    counts = state.counts
    return {
        "trials": counts.total,
        **{name: getattr(counts, name) for name in Counts.__slots__},
        "epochs": state.epochs,
        "spent_s": state.spent_s,
        "devices": len(state.devices),
        "device_s": state.device_s,
        "utilisation": state.device_s / (state.spent_s * len(state.devices))
        if state.devices and state.spent_s > 0
        else None,
        "energy_j": None if state.energy is None else state.energy.joules,
        "energy_source": None if state.energy is None else str(state.energy.source),
    }
