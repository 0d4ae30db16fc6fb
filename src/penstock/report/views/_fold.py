"""A study as the views see it: the state, where trials ran, what improved when. Folded event by event."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.core import Ended, Event, Reported, Resized, SessionOpened, Started, StudyState
from penstock.core.device import Share
from penstock.goal import Goal, metrics_of
from penstock.report._read import driver_of, leave, limits_of
from penstock.store import Store, StudyEntry

LOG = 20_000
"""So many events are kept for the log; older ones are in the store."""


@dataclass(slots=True)
class Span:
    """One stretch of a trial on its devices; ``end_s`` is None while it runs."""

    trial: int
    start_s: float
    shares: tuple[Share, ...]
    fused: tuple[int, ...] = ()
    attempt: int = 0
    end_s: float | None = None
    status: str = "running"


@dataclass(frozen=True, slots=True)
class Improvement:
    """A report that was better than all before it, in one objective.

    Attributes:
        time_s: When.
        trial: Whose.
        value: The objective as reported.
        epochs: Epochs of all trials until then.
        energy_j: Energy of all trials until then.
        trials: Trials made until then.
    """

    time_s: float
    trial: int
    value: float
    epochs: int
    energy_j: float
    trials: int


@dataclass(slots=True)
class Last:
    """Where a study stood at the latest report of a trial: the trial's place in a history."""

    time_s: float
    epochs: int
    energy_j: float


@final
class Folded:
    """What the views are made from. ``apply`` each event once, in journal order; views only read.

    Args:
        name: The study's.
        goal: What it is after.
        spec: What it is, from its store.
        created_s: When it was made.
    """

    def __init__(
        self, name: str, goal: Goal, spec: Mapping[str, Any] | None = None, created_s: float = 0.0
    ) -> None:
        self.name = name
        self.goal = goal
        self.spec: Mapping[str, Any] = spec or {}
        self.created_s = created_s
        self.state = StudyState()
        self.events = 0
        self.problem = ""
        self.left = False  # its driver died: if its journal goes on, it is folded anew
        self.spans: list[Span] = []
        self.sessions: list[list[float]] = []  # begin and latest event of each
        self.improvements: list[list[Improvement]] = [[] for _ in goal.objectives]
        # Under limits, every report: that its trial violates one is known only later.
        self._told: list[list[Improvement]] | None = (
            [[] for _ in goal.objectives] if limits_of(self.spec) else None
        )
        self.last: dict[int, Last] = {}
        self.log: deque[tuple[int, Event]] = deque(maxlen=LOG)
        self._open: dict[int, Span] = {}
        self._energy_j = 0.0

    @classmethod
    def of(
        cls, name: str, goal: Goal, events: Iterable[Event], spec: Mapping[str, Any] | None = None
    ) -> Folded:
        """The fold over ``events``."""
        folded = cls(name, goal, spec)
        for event in events:
            folded.apply(event)
        return folded

    def read(self, store: Store, entry: StudyEntry) -> None:
        """Fold in what the journal says, from its begin; if the driver has died, that, too."""
        study = entry.id

        def news() -> bool:
            before = self.events
            for _, event in store.read(study, after=before):
                self.apply(event)
            return self.events > before

        news()
        if driver_of(store, study, self.state, news) is None:
            self.leave(entry, store.url)

    def apply(self, event: Event) -> None:
        """Fold one event in."""
        self.events += 1
        self.log.append((self.events, event))
        new = self.state.apply(event)
        if isinstance(event, Reported):  # nearly all of them: by the shortest way
            if event.energy is not None:
                self._energy_j += (
                    event.energy.value
                )  # as the state sums it: also of an epoch that is run again
            if new:
                self._reported(event)
            session = self.sessions[-1] if self.sessions else None
            if session is not None and event.time_s > session[1]:
                session[1] = event.time_s
            return
        if isinstance(event, Started):
            if new:
                span = Span(event.trial, event.time_s, event.shares, event.fused, event.attempt)
                self.spans.append(span)
                self._open[event.trial] = span
        elif isinstance(event, Ended):
            if new and event.energy is not None:  # what was drawn outside of the epochs
                self._energy_j += event.energy.joules
            found = self._open.pop(event.trial, None) if new else None
            if found is not None:
                found.end_s = max(found.start_s, event.time_s)
                found.status = "retried" if event.retry else event.status.value
        elif isinstance(event, Resized):
            before = self._open.get(event.trial) if new else None
            if before is not None:
                before.end_s, before.status = max(before.start_s, event.time_s), "resized"
                span = Span(event.trial, before.end_s, event.shares, before.fused, before.attempt)
                self.spans.append(span)
                self._open[event.trial] = span
        elif isinstance(event, SessionOpened):
            self._lose()
            self.sessions.append([event.time_s, event.time_s])
        if self.sessions:
            self.sessions[-1][1] = max(self.sessions[-1][1], event.time_s)

    def leave(self, entry: StudyEntry, url: str) -> None:
        """The driver died, as the store at ``url`` shows: see ``penstock.report._read.leave``."""
        if self.state.open:
            leave(self.state, entry, url)
            self._lose()
            self.left = True

    def _lose(self) -> None:
        """Whatever ran when the driver was lost ran until its last word, as far as one can tell."""
        for left in self._open.values():
            left.end_s = max(left.start_s, self.sessions[-1][1] if self.sessions else left.start_s)
            left.status = "lost"
        self._open.clear()

    @property
    def running(self) -> bool:
        """Whether a session is open; one whose driver is known to have died is not."""
        return self.state.open

    def _reported(self, event: Reported) -> None:
        state = self.state
        energy_j = self._energy_j
        last = self.last.get(event.trial)
        if last is None:
            self.last[event.trial] = Last(event.time_s, state.epochs, energy_j)
        else:
            last.time_s, last.epochs, last.energy_j = event.time_s, state.epochs, energy_j
        for objective, found in zip(self.goal.objectives, self.improvements, strict=True):
            value = event.metrics.get(objective.metric)
            if value is None and objective.metric in ("energy_j", "train_s"):
                value = metrics_of(state.trials[event.trial]).get(objective.metric)
            if value is None or not math.isfinite(value):
                continue
            better = not found or (value > found[-1].value if objective.maximize else value < found[-1].value)
            if not better and self._told is None:
                continue
            step = Improvement(event.time_s, event.trial, value, state.epochs, energy_j, state.counts.total)
            if self._told is not None:
                self._told[self.goal.objectives.index(objective)].append(step)
            if better:
                found.append(step)

    def best_so_far(self, place: int) -> list[Improvement]:
        """The improvements in one objective, those of configurations that were measured to violate a limit left out."""
        found = self.improvements[place]
        until_s: dict[int, float] = {}
        for record in self.state.trials.values():
            if record.violated or record.unfit_s is not None:
                until_s[record.id] = math.inf if record.violated or record.unfit_s is None else record.unfit_s

        def unfit(step: Improvement) -> bool:
            return step.time_s <= until_s.get(step.trial, -math.inf)

        if not any(map(unfit, found)):
            return found
        best: list[Improvement] = []
        maximize = self.goal.objectives[place].maximize
        for step in found if self._told is None else self._told[place]:
            if not unfit(step) and (
                not best or (step.value > best[-1].value if maximize else step.value < best[-1].value)
            ):
                best.append(step)
        return best


@dataclass(frozen=True, slots=True)
class Options:
    """What a reader may choose in a view; each view uses what it knows.

    Attributes:
        objective: Which objective, by its place in the goal; None: the first that is not metered.
        metric: Which metric's curves; empty: the objective's.
        x: What lies on the horizontal axis.
        trial: The selected trial: always among those that are shown.
        limit: How many rows, curves or lines.
        offset: From which row on.
        sort: By which column.
        descending: From the largest.
        filter: What to show only.
        job: Which recurring job.
    """

    objective: int | None = None
    metric: str = ""
    x: str = "time"
    trial: int | None = None
    limit: int = 0
    offset: int = 0
    sort: str = ""
    descending: bool = False
    filter: str = ""
    job: str = ""


_PLAIN = frozenset((int, str, bool, type(None)))


def clean(value: Any) -> Any:
    """``value`` with nothing that JSON can't say: what is not finite becomes None."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [
            (item if -math.inf < item < math.inf else None)
            if type(item) is float
            else item
            if type(item) in _PLAIN
            else clean(item)
            for item in value
        ]
    return value
