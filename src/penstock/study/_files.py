"""A study's folder: where checkpoints and logs lie, and which checkpoints are still needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from penstock.core import Checkpoint, Ended, Saved, StudyState, TrialRecord, TrialStatus
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


def _whole(record: TrialRecord) -> bool:
    return record.is_target and record.status is TrialStatus.COMPLETED


@final
class CheckpointKeeper:
    """Deletes checkpoints that nobody can need any more.

    Of a trial that goes on, the two latest are kept (the older one in case the newer does not read back). Of a
    trial that is over, the last one is kept if ``keep`` is ``"all"`` or the trial is the best so far. Trained full
    models are kept until it is known which configurations count, and one that was overtaken also later if it has come
    out better.
    """

    def __init__(self, files: Path, keep: str, goal: Goal) -> None:
        self._files = files
        self._keep_all = keep == "all" or len(goal.objectives) > 1
        self._goal = goal
        self._best: int | None = None
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
            if record.status.is_end and record.saved and self._best != record.id:
                self._judge(record, state)

    def _judge(self, record: TrialRecord, state: StudyState) -> None:
        if _whole(record) and state.chosen is None:
            return
        best = None if self._best is None else state.trials[self._best]
        key, best_key = self._key(record), None if best is None else self._key(best)
        winner: TrialRecord | None = best
        loser: TrialRecord | None = record
        if key is not None and (best_key is None or key < best_key):
            winner, loser = record, best
            self._best = record.id
        if loser is not None and not self._spares(loser, winner):
            self._delete_all(loser)

    def _key(self, record: TrialRecord) -> tuple[float, ...] | None:
        """As ``ranked``: whole trainings of the full model, overtaken ones, others of it, those of its twin.

        Of each, what was explored last comes last, the fewest epochs at the end.
        """
        fit = record.status is not TrialStatus.FAILED and not record.violated
        values = self._goal.score(record) if fit else None
        if values is None:
            return None
        tier = 0 if _whole(record) else 2 if record.is_target else 3
        parent = record.parent or 0 if _whole(record) else 0
        explored = (1, -record.epoch) if record.explored else (0, 0)
        return (tier + (tier == 0 and record.overtaken), *explored, *values, parent, record.id)

    def _spares(self, loser: TrialRecord, winner: TrialRecord | None) -> bool:
        if winner is None or not (_whole(loser) and loser.overtaken and not loser.violated):
            return False
        mine, other = self._goal.score(loser), self._goal.score(winner)
        return mine is not None and other is not None and mine < other

    def _live_of(self, record: TrialRecord) -> dict[int, str]:
        return self._live.setdefault(record.id, dict(record.saved))

    def _delete_all(self, record: TrialRecord) -> None:
        live = self._live_of(record)
        for epoch in list(live):
            self._delete(live, epoch)

    def _delete(self, live: dict[int, str], epoch: int) -> None:
        (self._files / live.pop(epoch)).unlink(missing_ok=True)
