"""What a person sees while a study runs: a live panel, a line per event, JSON lines, or nothing."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

from penstock.core import Dropped, Ended, Event, Reported, SessionClosed, StudyState, TrialStatus, to_record
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, ranked
from penstock.report._format import counts_text, duration_text, metrics_text, short

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_SENTENCES = 3


class View(ABC):
    """Shows a study while it runs. Called by the study's loop alone; must be quick and never raise."""

    @abstractmethod
    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """A session begins (or resumes) with this state."""

    @abstractmethod
    def on(self, event: Event, state: StudyState) -> None:
        """An event was applied."""

    @abstractmethod
    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """The loop went round: ``expected()`` segments in all, ``busy`` of them running or queued on workers."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Something the user should know now."""

    @abstractmethod
    def close(self) -> None:
        """The session is over. Idempotent."""


@final
class QuietView(View):
    """Shows nothing but what must be said."""

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """Nothing."""

    def on(self, event: Event, state: StudyState) -> None:
        """Nothing."""

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """One line on standard error."""
        _print(sys.stderr, text)

    def close(self) -> None:
        """Nothing."""


@final
class LineView(View):
    """One line per thing worth knowing: a trial that is over, a new best, the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._best = _Best()

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """Say what begins."""
        self._best = _Best(goal, state)
        done = f", {state.counts.total} trials so far" if state.counts.total else ""
        self.say(f"study {name}: {goal}, {slots} slots{done}")

    def on(self, event: Event, state: StudyState) -> None:
        """A line for ends and new bests."""
        if isinstance(event, Reported):
            if self._best.improves(event):
                self.say(
                    f"trial {event.trial} epoch {event.epoch}: {metrics_text(event.metrics)} (best so far)"
                )
        elif isinstance(event, Ended):
            verb = "will be retried" if event.retry else event.status.value
            why = f": {event.reason}" if event.reason else ""
            self.say(f"trial {event.trial} {verb} after {event.epoch} epochs{why}")
        elif isinstance(event, Dropped):
            self.say(f"trial {event.trial} dropped: {event.reason}")
        elif isinstance(event, SessionClosed):
            detail = f": {event.detail}" if event.detail else ""
            self.say(f"study {event.reason}{detail}; {counts_text(state.counts)}")

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """One line."""
        _print(self._stream, text)

    def close(self) -> None:
        """Nothing."""


@final
class JsonlView(View):
    """Every event as one JSON line: ``{"kind": ..., "trial": ..., "time_s": ..., ...}``."""

    def __init__(self, target: str | Path) -> None:
        self._owned = str(target) != "-"
        try:
            self._stream: TextIO = open(target, "a", encoding="utf-8") if self._owned else sys.stdout  # noqa: SIM115
        except OSError as error:
            raise InvalidInput(f"Can't write events to {str(target)!r}: {error.strerror}.") from error

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """Nothing: the session's own event says it."""

    def on(self, event: Event, state: StudyState) -> None:
        """One line."""
        kind, trial, time_s, data = to_record(event)
        head: dict[str, Any] = {"kind": kind, "trial": trial, "time_s": time_s}
        _print(self._stream, json.dumps(head | data))

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """One line on standard error: the stream is for events."""
        _print(sys.stderr, text)

    def close(self) -> None:
        """Close the file."""
        if self._owned and not self._stream.closed:
            self._stream.close()


@final
class LiveView(View):
    """A panel on a terminal, redrawn a few times a second."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._name = ""
        self._goal: Goal | None = None
        self._slots = 0
        self._said: list[str] = []
        self._next_s = 0.0
        self._started_s = time.monotonic()
        self._before = 0
        self._segments = 0
        self._last: tuple[StudyState, Callable[[], int | None]] | None = None

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        """Begin to draw."""
        from rich.console import Console
        from rich.live import Live

        self._name, self._goal, self._slots = name, goal, slots
        self._started_s = time.monotonic()
        self._segments = self._before = sum(not record.unfinished for record in state.trials.values())
        console = Console(stderr=True)
        self._live = Live(self._draw(state, None), console=console, auto_refresh=False, transient=False)
        self._live.start()

    def on(self, event: Event, state: StudyState) -> None:
        """Keep track of what is over."""
        if isinstance(event, Ended) and not event.retry and not event.kept:
            self._segments += 1

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        """Redraw when it is time."""
        self._last = (state, expected)
        now_s = time.monotonic()
        if self._live is not None and now_s >= self._next_s:
            self._next_s = now_s + 0.2
            self._live.update(self._draw(state, expected()), refresh=True)

    def say(self, text: str) -> None:
        """Shown under the panel, with the two sentences before it."""
        self._said = [*self._said, text][-_SENTENCES:]

    def close(self) -> None:
        """Draw once more and leave the terminal as it was."""
        if self._live is not None:
            if self._last is not None:
                state, expected = self._last
                self._live.update(self._draw(state, expected()), refresh=True)
            self._live.stop()
            self._live = None

    def _draw(self, state: StudyState, expected: int | None) -> Table:
        from rich.markup import escape
        from rich.table import Table

        counts = state.counts
        table = Table.grid(padding=(0, 2))
        table.add_row("[bold]study[/]", f"{escape(self._name)}: {escape(str(self._goal))}")
        table.add_row("trials", counts_text(state.counts))
        table.add_row("slots", f"{min(counts.running, self._slots)} of {self._slots} busy")
        table.add_row("best", escape(_best_text(self._goal, state)))
        energy = "" if state.energy is None else f", {state.energy}"
        elapsed_s = time.monotonic() - self._started_s
        table.add_row("time", f"{duration_text(elapsed_s)}{self._eta(expected, elapsed_s)}{energy}")
        for text in self._said:
            table.add_row("", f"[yellow]{escape(text)}[/]")
        return table

    def _eta(self, expected: int | None, elapsed_s: float) -> str:
        done = self._segments - self._before
        if expected is None or done <= 0 or self._segments >= expected:
            return ""
        return f", about {duration_text(elapsed_s * (expected - self._segments) / done)} to go"


@final
class _Several(View):
    """Several views at once."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = tuple(views)

    def open(self, name: str, goal: Goal, state: StudyState, slots: int) -> None:
        for view in self._views:
            view.open(name, goal, state, slots)

    def on(self, event: Event, state: StudyState) -> None:
        for view in self._views:
            view.on(event, state)

    def tick(self, state: StudyState, expected: Callable[[], int | None], busy: int) -> None:
        for view in self._views:
            view.tick(state, expected, busy)

    def say(self, text: str) -> None:
        self._views[0].say(text)

    def close(self) -> None:
        for view in self._views:
            view.close()


class _Best:
    """The best report so far, kept as reports come in (one objective; several show the first)."""

    def __init__(self, goal: Goal | None = None, state: StudyState | None = None) -> None:
        self._goal = goal
        self._value: float | None = None
        self._report: Reported | None = None
        for record in () if state is None else state.trials.values():
            if record.status is not TrialStatus.FAILED and record.reports:
                self.improves(record.reports[-1])

    def improves(self, report: Reported) -> bool:
        values = None if self._goal is None else self._goal.values(report.metrics)
        if values is None or (self._value is not None and values[0] >= self._value):
            return False
        self._value, self._report = values[0], report
        return True


def _best_text(goal: Goal | None, state: StudyState) -> str:
    """The best trial by its latest report, as ``Study.best`` has it."""
    best = None if goal is None else next(iter(ranked(goal, state.trials.values())), None)
    if best is None:
        return "none yet"
    settings = ", ".join(f"{name}={short(value)}" for name, value in best.config.items())
    return f"{metrics_text(best.metrics)} (trial {best.id}: {settings})"


def open_view(view: str | View | None, jsonl: str | Path | None = None) -> View:
    """The view that ``Study.run(view=, jsonl=)`` asks for."""
    if jsonl is not None:
        _check_target(jsonl)
    if isinstance(view, View):
        shown: View = view
    elif view is None or view == "quiet":
        shown = QuietView()
    elif view == "lines" or (view == "auto" and not sys.stderr.isatty()):
        shown = LineView()
    elif view in ("live", "auto"):
        shown = LiveView()
    else:
        raise InvalidInput(
            f'view takes "live", "lines", "auto", "quiet" or a View, such as a logger; got {view!r}.'
        )
    return shown if jsonl is None else _Several((shown, JsonlView(jsonl)))


def _check_target(jsonl: object) -> None:
    if isinstance(jsonl, bool) or not isinstance(jsonl, str | Path) or not str(jsonl):
        raise InvalidInput(f'jsonl takes the path of a file, or "-" for standard output, got {jsonl!r}.')


def _print(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        pass  # whoever read it has gone; the study goes on
