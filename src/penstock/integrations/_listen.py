"""The base of loggers: a study told to another tool while it runs, or afterwards from its journal."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from penstock.core import Dropped, Ended, Event, Reported, SessionClosed, Started, StudyState, TrialRecord
from penstock.core.errors import InvalidInput
from penstock.goal import Goal
from penstock.report import View, open_view, read_journal

if TYPE_CHECKING:
    from penstock.study import Study


class Listener(View):
    """A view that passes a study on to a tool. Give it to ``Study.run(view=...)``, or call ``export``.

    What a tool is told depends on the state alone: ``_sync`` brings it up to date with a trial, however often it is
    called, so that a live study, a resumed one and a finished one end up the same. All calls of one session come from
    one thread that isn't the study's: the study never waits for the tool. A tool that fails is said once, and the
    study goes on without it.
    """

    tool: ClassVar[str]
    """What it is called in messages."""

    def __init__(self, view: str | View | None) -> None:
        self._shown = open_view(view)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._problem = ""

    # --- for tools -------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, name: str, goal: Goal, state: StudyState) -> None:
        """A session of a study begins, with all that was before it."""

    @abstractmethod
    def _sync(self, record: TrialRecord) -> None:
        """Bring the tool up to date with a trial."""

    @abstractmethod
    def _finish(self, goal: Goal, state: StudyState) -> None:
        """The session is over."""

    # --- afterwards ------------------------------------------------------------------------------------------

    def export(self, source: str | Path | Study, name: str | None = None) -> None:
        """Tell the tool of a study that is finished, or as far as it has come.

        What it has been told before is not repeated.

        Args:
            source: A store's path or URL, or a Study.
            name: The study's name in the store; None: the newest.
        """
        found, goal, state = folded(source, name)
        self._begin(found, goal, state)
        for record in state.trials.values():
            self._sync(record)
        self._finish(goal, state)

    # --- live ------------------------------------------------------------------------------------------------

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """Begin to listen."""
        self._shown.open(name, goal, state, slots)
        own = state.copy()  # the study's own moves on while the tool is slow
        self._problem = ""
        self._thread = threading.Thread(
            target=self._listen, args=(name, goal, own), name=f"penstock-{self.tool}", daemon=True
        )
        self._thread.start()

    def on(self, event: Event, state: StudyState) -> None:
        """Pass an event on. Those before ``open`` are in the state it is given."""
        self._shown.on(event, state)
        if self._thread is not None:
            self._events.put(event)

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """Nothing of its own."""
        self._shown.tick(state, expected, busy)

    def say(self, text: str) -> None:
        """Said by the view it wraps."""
        self._shown.say(text)

    def close(self) -> None:
        """Wait until the tool has been told of everything."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._events.put(None)
            thread.join()
            if self._problem:
                self._shown.say(self._problem)
        self._shown.close()

    def _listen(self, name: str, goal: Goal, state: StudyState) -> None:
        try:
            self._begin(name, goal, state)
            for record in state.trials.values():
                self._sync(record)
            while (event := self._events.get()) is not None:
                state.apply(event)
                if isinstance(event, Started | Reported | Ended | Dropped):
                    self._sync(state.trials[event.trial])
                elif isinstance(event, SessionClosed):
                    self._finish(goal, state)
        except Exception as error:  # whatever the tool raises: a server that is gone, a full disk
            self._problem = f"{self.tool} was not told of everything: {type(error).__name__}: {error}"
            while self._events.get() is not None:
                pass


def folded(source: str | Path | Study, name: str | None) -> tuple[str, Goal, StudyState]:
    """Name, goal and state of a study that is given itself or by its store."""
    if isinstance(source, str | Path):
        journal = read_journal(source, name)
        return journal.entry.name, journal.goal, journal.state
    if not all(hasattr(source, name) for name in ("name", "goal", "state")):
        raise InvalidInput(f"source takes a store's path or URL, or a Study, got {source!r}.")
    return source.name or "study", source.goal, source.state
