"""A study's folder: where checkpoints and logs lie, and which checkpoints are still needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from penstock.core import Checkpoint, Ended, Saved, StudyState, TrialRecord, TrialStatus, Values
from penstock.goal import Goal
from penstock.store import Store

_NAMED = 3  # trials in a sentence each


def folder_of(store: Store, study: int, given: Path | None) -> Path:
    """The study's folder: the user's, or a numbered one beside the store."""
    return (given or base_of(store)) / f"study-{study}"


def base_of(store: Store) -> Path:
    """Where the folders of a store's studies are unless the user says otherwise."""
    return store.files or Path("penstock-files")


def gone(files: Path, state: StudyState) -> list[str]:
    """Sentences on trials that are yet to go on and whose checkpoints are not in their folder any more."""
    lost = [
        record
        for record in state.trials.values()
        if record.saved
        and not record.status.is_end
        and not any((files / path).exists() for path in reversed(record.saved.values()))
        and not _unheard(files, record)
    ]
    told = [
        f"Trial {record.id}: its checkpoint {files / record.saved[max(record.saved)]} is gone; it starts again."
        for record in lost[:_NAMED]
    ]
    more = len(lost) - len(told)
    return [*told, f"So do {more} more trials."] if more else told


def _unheard(files: Path, record: TrialRecord) -> bool:
    """Whether a worker has left a checkpoint that the journal does not know: its driver was killed before it did."""
    until = record.segment.until
    found = (path.stem for path in (files / "checkpoints" / str(record.id)).glob("*.ckpt"))
    return any(stem.isdigit() and (until is None or int(stem) <= until) for stem in found)


@final
class CheckpointKeeper:
    """Deletes checkpoints that nobody can need any more.

    Of a trial that goes on, the two latest are kept (the older one in case the newer does not read back). Of a
    trial that is over, the last one is kept if ``keep`` is ``"all"`` or the trial is the best so far.
    """

    def __init__(self, files: Path, keep: str, goal: Goal) -> None:
        self._files = files
        self._keep_all = keep == "all" or len(goal.objectives) > 1
        self._goal = goal
        self._best: tuple[Values, int] | None = None
        self._live: dict[int, dict[int, str]] = {}  # trial -> epoch -> path, of what may be on disk

    def on(self, event: Saved | Ended, state: StudyState, pins: Callable[[], set[Checkpoint]]) -> None:
        """Tidy up after an event that was applied; ``pins()`` are checkpoints somebody is yet to copy."""
        record = state.trials[event.trial]
        if isinstance(event, Saved):
            live = self._live_of(record)
            live[event.epoch] = event.path
            if len(live) > 2:
                pinned = {pin.epoch for pin in pins() if pin.trial == record.id}
                for epoch in sorted(live)[:-2]:
                    if epoch not in pinned:
                        self._delete(live, epoch)
        elif record.status.is_end and record.saved and not self._keep_all:
            self._judge(record, state)

    def finish(self, state: StudyState) -> None:
        """At the end of a session: what was dropped while paused needs no checkpoint either."""
        if self._keep_all:
            return
        for record in state.trials.values():
            if record.status.is_end and record.saved and (self._best is None or self._best[1] != record.id):
                self._judge(record, state)

    def _judge(self, record: TrialRecord, state: StudyState) -> None:
        fit = record.status is not TrialStatus.FAILED and not record.violated
        values = self._goal.score(record) if fit else None
        if (
            values is not None
        ):  # as ``ranked``: whole trainings of the full model, others of it, its narrow twin's
            whole = record.status is TrialStatus.COMPLETED
            values = (2.0 if not record.is_target else 0.0 if whole else 1.0, *values)
        if values is None or (self._best is not None and self._best[0] <= values):
            self._delete_all(record)
            return
        if self._best is not None:
            self._delete_all(state.trials[self._best[1]])
        self._best = (values, record.id)

    def _live_of(self, record: TrialRecord) -> dict[int, str]:
        return self._live.setdefault(record.id, dict(record.saved))

    def _delete_all(self, record: TrialRecord) -> None:
        live = self._live_of(record)
        for epoch in list(live):
            self._delete(live, epoch)

    def _delete(self, live: dict[int, str], epoch: int) -> None:
        (self._files / live.pop(epoch)).unlink(missing_ok=True)
