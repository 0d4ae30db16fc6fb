"""Studies of a store, read as they grow: one thread reads, any number look."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from penstock.core.errors import InvalidInput, PenstockError, StoreCorrupt
from penstock.goal import Goal
from penstock.report._journal import jobs_of
from penstock.report.views import Folded
from penstock.store import Store, StudyEntry, open_store

POLL_S = 0.5
FORGET_S = 900.0
_CHUNK = 500
_FREEZE = 20_000  # events


@dataclass(slots=True)
class _Watched:
    """A study that somebody looks at."""

    folded: Folded
    lock: threading.Lock = field(default_factory=threading.Lock)
    known: int = 0  # events in the store
    asked_s: float = 0.0
    damaged: bool = False


@final
class Feed:
    """Folds the journals of a store as they grow, without writing anything.

    ``start`` begins to read, in a thread of its own; ``view`` lends the fold of a study while it is held. A study that
    nobody asked for in 15 minutes is forgotten and read anew when somebody does.

    Args:
        store: A path or URL.
        alone: The process is there for nothing else, and Python's cycle collector may be told to leave alone what was
            folded: it holds no cycles, and walking over the reports of a large study again and again stops every
            thread for a second.
    """

    def __init__(self, store: str | Path, *, alone: bool = False) -> None:
        self._target = store
        self._alone = alone
        self._thawed = 0  # events folded since the last gc.freeze
        self._wake = threading.Condition()
        self._studies: dict[int, StudyEntry] = {}
        self._watched: dict[int, _Watched] = {}
        self._jobs: dict[str, Any] = {}
        self._chunks: dict[tuple[str, Any, int], list[Any]] = {}  # of recurring jobs: they never change
        self._problem = ""
        self._closing = False
        self._thread: threading.Thread | None = None
        self.version = 0
        """Grows whenever anything changed."""
        self.jobs_version = 0
        """Grows whenever a recurring job changed, or there is another one."""

    def start(self) -> None:
        """Open the store and read what is in it.

        Raises:
            StoreError: There is no store to read.
        """
        store = open_store(self._target, write=False)
        try:
            self._list(store)
        finally:
            store.close()
        self._thread = threading.Thread(target=self._run, name="penstock-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    @property
    def problem(self) -> str:
        """Why the store can't be read at the moment, or empty."""
        return self._problem

    def studies(self) -> list[StudyEntry]:
        """All studies, oldest first."""
        with self._wake:
            return list(self._studies.values())

    def jobs(self) -> dict[str, Any]:
        """Recurring jobs: by name, what the store keeps of them."""
        with self._wake:
            return dict(self._jobs)

    def progress(self, study: int) -> tuple[int, int]:
        """How many events of a study are read, and how many there are."""
        watched = self._watch(study)
        return watched.folded.events, max(watched.known, watched.folded.events)

    def status(self, study: int) -> tuple[str, float]:
        """``"running"``, why the last session ended, or empty before the first; and the time of the last event."""
        state = self._watch(study).folded.state
        if state.closed is not None:
            return state.closed.reason, state.last_s
        return "running" if state.sessions else "", state.last_s

    @contextmanager
    def view(self, study: int) -> Iterator[Folded]:
        """The study as far as it is read; nothing is folded in while the block runs.

        Raises:
            InvalidInput: There is no such study.
        """
        watched = self._watch(study)
        with watched.lock:
            yield watched.folded

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until something changed since ``version``; returns the version."""
        with self._wake:
            self._wake.wait_for(lambda: self.version != version or self._closing, timeout_s)
            return self.version

    def wait_read(self, study: int, timeout_s: float) -> bool:
        """Wait until all events of a study that the store has now are read."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and not self._closing:
            done, known = self.progress(study)
            if known and done >= known and not self._problem:
                return True
            self.wait(self.version, 0.2)
        return False

    def _watch(self, study: int) -> _Watched:
        with self._wake:
            watched = self._watched.get(study)
            if watched is None:
                entry = self._studies.get(study)
                if entry is None:
                    known = ", ".join(f"{e.id} ({e.name})" for e in self._studies.values()) or "none"
                    raise InvalidInput(f"There is no study {study} in this store; there are {known}.")
                goal = Goal.from_json(entry.spec.get("goal", ()))
                watched = _Watched(Folded(entry.name, goal, entry.spec, entry.created_s), known=entry.events)
                self._watched[study] = watched
                self._wake.notify_all()
            watched.asked_s = time.monotonic()
            return watched

    # --- the reading thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        store: Store | None = None
        while not self._closing:
            try:
                if store is None:
                    store = open_store(self._target, write=False)
                self._list(store)
                for study, watched in list(self._watched.items()):
                    self._read(store, study, watched)
                    self._look(store, study, watched)
                self._say("")
            except StoreCorrupt as error:
                self._say(str(error))
            except PenstockError as error:  # moved away, or the database is down: it may come back
                self._say(str(error))
                if store is not None:
                    with contextlib.suppress(PenstockError):
                        store.close()
                store = None
            self._forget()
            with self._wake:
                behind = any(w.folded.events < w.known and not w.damaged for w in self._watched.values())
                self._wake.wait_for(lambda: self._closing, 0.02 if behind and not self._problem else POLL_S)
        if store is not None:
            store.close()

    def _say(self, problem: str) -> None:
        with self._wake:
            if problem != self._problem:
                self._problem = problem
                self._changed()

    def _list(self, store: Store) -> None:
        studies = {entry.id: entry for entry in store.studies()}
        jobs = jobs_of(store, self._chunks)
        with self._wake:
            if jobs != self._jobs:
                self.jobs_version += 1
            if studies != self._studies or jobs != self._jobs:
                self._studies, self._jobs = studies, jobs
                self._changed()
            for study, watched in self._watched.items():
                if study in studies:
                    watched.known = studies[study].events

    def _read(self, store: Store, study: int, watched: _Watched) -> None:
        folded = watched.folded
        if watched.damaged or folded.events >= watched.known:
            return
        if folded.left:  # resumed, or the driver had only lost its database for a while
            folded = Folded(folded.name, folded.goal, folded.spec, folded.created_s)
            with watched.lock:
                watched.folded = folded
        chunk: list[Any] = []
        try:
            for _, event in store.read(study, after=folded.events):
                chunk.append(event)
                if len(chunk) >= _CHUNK:
                    self._apply(watched, chunk)
                    chunk = []
                    if self._closing or watched.damaged:
                        return
        except StoreCorrupt as error:
            self._apply(watched, chunk)
            chunk = []
            watched.damaged = True
            folded.problem = str(error)
            with self._wake:
                self._changed()
        self._apply(watched, chunk)

    def _look(self, store: Store, study: int, watched: _Watched) -> None:
        """See whether a study that seems to run has a driver."""
        folded = watched.folded
        if watched.damaged or not folded.running or folded.events < watched.known:
            return
        if store.writer(study) is None and next(store.read(study, after=folded.events), None) is None:
            # No news came between our reading and our question; with some, it is asked again once they are read.
            with watched.lock:
                folded.leave(self._studies[study], store.url)
            with self._wake:
                self._changed()

    def _apply(self, watched: _Watched, events: list[Any]) -> None:
        if not events:
            return
        with watched.lock:
            try:
                for event in events:
                    watched.folded.apply(event)
            except (KeyError, TypeError, ValueError, PenstockError) as error:  # e.g. of a trial there isn't
                watched.damaged = True
                watched.folded.problem = (
                    f"Record {watched.folded.events} says something that can't be: {error!r}. "
                    "What is shown is everything before it."
                )
        self._thawed += len(events)
        if self._alone and self._thawed >= _FREEZE:
            self._thawed = 0
            gc.freeze()
        with self._wake:
            self._changed()

    def _forget(self) -> None:
        now_s = time.monotonic()
        with self._wake:
            for study in [s for s, w in self._watched.items() if now_s - w.asked_s > FORGET_S]:
                del self._watched[study]

    def _changed(self) -> None:
        self.version += 1
        self._wake.notify_all()
