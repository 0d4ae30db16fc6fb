"""The study's state machine: events in, decisions out. Pure: no clock, no I/O, no sleeping.

The engine holds the state (a fold over events), the scheduler, the sampler and the queue of what waits to run.
The shell around it (``_study``) carries events from the executor to the engine and the journal, and launches
what the engine decides. Because everything here follows from the journal, a resume is a replay.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.core import (
    Checkpoint,
    Config,
    Dropped,
    Ended,
    Event,
    Free,
    Noted,
    Placement,
    Plan,
    PlanPass,
    Reported,
    Segment,
    Started,
    StudyState,
    Submitted,
    Trial,
    TrialRecord,
    TrialStatus,
    Values,
    to_record,
    total,
)
from penstock.core.errors import InvalidInput, PenstockError
from penstock.goal import Budget, Goal
from penstock.sample import Observation, Sampler
from penstock.schedule import Outcome, Rules, Scheduler, StopRule
from penstock.space import Space

LOST_RETRIES = 3
"""How often a segment is run again whose worker died through no fault of the training function."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a study is made of, as far as decisions go.

    Attributes:
        space: Where configurations come from.
        goal: What is better.
        scheduler: Owned by the engine while the study runs.
        sampler: Likewise.
        planner: Plan passes, applied in order.
        budget: Limits; the engine keeps to ``budget.trials``, the shell to the rest.
        seed: Everything random follows from it.
        retries: How often a segment is run again after an error of the training function.
        rules: Stopping rules, asked after every report.
        width: Devices per trial, as the planner places them: how many segments can start at once.
    """

    space: Space
    goal: Goal
    scheduler: Scheduler
    sampler: Sampler
    planner: tuple[PlanPass, ...]
    budget: Budget
    seed: int = 0
    retries: int = 0
    rules: tuple[StopRule, ...] = ()
    width: float = 1.0


def derive_seed(seed: int, *path: object) -> int:
    """A seed in [0, 2**31) that follows from ``seed`` and a path of names and numbers."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


class Engine:
    """Decides what runs next. See the module's docstring; one thread, one study."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.state = StudyState()
        self.queue: deque[Placement] = deque()
        self.running: dict[int, Segment] = {}
        self._next_trial = 0
        self._replayed: deque[Trial] | None = None
        self._drops: dict[int, str] = {}
        self._stops: list[tuple[int, str]] = []
        self._learns = setup.sampler.learns
        setup.sampler.start(
            setup.space, objectives=len(setup.goal.objectives), seed=derive_seed(setup.seed, "sampler")
        )
        rules = Rules(
            propose=self._propose,
            order=setup.goal.order,
            space=setup.space,
            learns=setup.sampler.learns,
            seed=derive_seed(setup.seed, "scheduler"),
            derive=self._derive,
        )
        setup.scheduler.start(rules)
        for rule in setup.rules:
            rule.start()

    # --- events in -------------------------------------------------------------------------------------------

    def annotate(self, event: Event) -> Event:
        """Decide what only the engine can: whether a failure is retried."""
        if isinstance(event, Ended) and event.status is TrialStatus.FAILED and not event.kept:
            allowed = LOST_RETRIES if event.lost else self.setup.retries
            record = self.state.trials[event.trial]
            if record.attempts < allowed:
                return replace(event, retry=True)
        return event

    def apply(self, event: Event) -> bool:
        """Fold in an event and let scheduler, sampler and rules learn from it."""
        fresh = self.state.apply(event)
        if not fresh:
            return False
        match event:
            case Reported():
                self._check_rules(event)
            case Started():
                self.running[event.trial] = self.state.trials[event.trial].segment
            case Ended():
                self._ended(event)
            case Dropped():
                self._drops.pop(event.trial, None)
                self._tell(self.state.trials[event.trial], final=True)
        return True

    def _check_rules(self, event: Reported) -> None:
        for rule in self.setup.rules:
            reason = rule.observe(event.trial, event.epoch, event.metrics)
            if reason is not None:
                self._stops.append((event.trial, reason))
                return

    def _ended(self, event: Ended) -> None:
        segment = self.running.pop(event.trial, None)
        record = self.state.trials[event.trial]
        if event.kept:
            return  # unfinished: it is queued again at the next resume
        if event.retry:
            self.queue.appendleft(Placement((segment or record.segment,), attempt=record.attempts))
            return
        failed = event.status is TrialStatus.FAILED
        values = None if failed else self.values(record)
        begun = (segment or record.segment).start
        drawn = [r.energy for r in record.reports if r.epoch > begun and r.energy is not None]
        self.setup.scheduler.ended(
            Outcome(event.trial, event.status, record.epoch, values, record.metrics, total(drawn))
        )
        if self._learns:
            self._tell(record, final=event.status is not TrialStatus.PAUSED)
        self._hear_drops()

    def _tell(self, record: TrialRecord, *, final: bool) -> None:
        if self._learns:
            values = None if record.status is TrialStatus.FAILED else self.values(record)
            told = Observation(record.id, record.config, values, record.epoch, final)
            self.setup.sampler.tell(told)

    def _hear_drops(self) -> None:
        scheduler = self.setup.scheduler
        for trial in scheduler.drops():
            self._drops[trial] = scheduler.why(trial)

    # --- decisions out ---------------------------------------------------------------------------------------

    def take_stops(self) -> list[tuple[int, str]]:
        """Running trials that a stopping rule wants ended, with the reasons; each is told once."""
        stops, self._stops = self._stops, []
        return [(trial, reason) for trial, reason in stops if trial in self.running]

    def take_drops(self, time_s: float) -> list[Event]:
        """Paused trials that the scheduler gave up, as events to journal and apply."""
        dropped: list[Event] = []
        for trial, reason in self._drops.items():
            if not self.state.trials[trial].status.is_end:
                dropped.append(Dropped(time_s, trial, reason))
        self._drops.clear()
        return dropped

    def submit(self, free: Sequence[Free], time_s: float) -> list[Event]:
        """Ask the scheduler for what could start now; the groups as events, already applied."""
        want = self._units(free) - len(self.queue)
        submitted: list[Event] = []
        while want > 0:
            group = self.setup.scheduler.next(want)
            if group is None:
                break
            event = Submitted(time_s, want, group.segments, group.label)
            self.state.apply(event)
            self._enqueue(group.segments)
            submitted.append(event)
            want -= len(group.segments)
        self._hear_drops()
        return submitted

    def plan(self, free: Sequence[Free]) -> tuple[Placement, ...]:
        """What to launch now; it leaves the queue."""
        if not self.queue or not free:
            return ()
        waiting = tuple(islice(self.queue, self._units(free) + 1))
        plan = Plan(waiting, tuple(free))
        for step in self.setup.planner:
            plan = step(plan)
        for _ in waiting:
            self.queue.popleft()
        self.queue.extendleft(reversed(plan.waiting))
        for placement in plan.placed:
            for segment in placement.segments:
                self.running[segment.trial.id] = segment
        return plan.placed

    @property
    def done(self) -> bool:
        """Whether nothing runs, nothing waits and nothing more will come."""
        return not self.queue and not self.running and self.setup.scheduler.done

    @property
    def finished(self) -> bool:
        """After a replay: whether the journal tells of a study that was run to its end."""
        closed = self.state.closed
        return closed is not None and closed.reason == "finished" and self.setup.scheduler.done

    def _units(self, free: Sequence[Free]) -> int:
        """How many segments could start (or be queued behind others) on what is free."""
        whole, fractions, backlog = 0, 0, 0
        width = self.setup.width
        for item in free:
            backlog += item.backlog
            if width < 1:
                fractions += int(item.fraction / width + 1e-9)
            elif item.fraction >= 1:
                whole += 1
        return (fractions if width < 1 else int(whole / width + 1e-9)) + backlog

    def _enqueue(self, segments: Iterable[Segment]) -> None:
        self.queue.extend(Placement((segment,)) for segment in segments)

    # --- trials ----------------------------------------------------------------------------------------------

    def _propose(self, n: int) -> Sequence[Trial]:
        if self._replayed is not None:
            return self._propose_again(n)
        limit = self.setup.budget.trials
        if limit is not None:
            n = min(n, limit - self._next_trial)
        if n <= 0:
            return ()
        sampler, seed = self.setup.sampler, self.setup.seed
        trials = []
        for config in sampler.ask(n):
            trial = Trial(self._next_trial, config, derive_seed(seed, self._next_trial))
            sampler.adopt(config, trial.id)
            self._next_trial += 1
            trials.append(trial)
        return trials

    def _derive(self, config: Config, parent: int) -> Trial:
        """A new trial made from another one; the same in a replay, for nothing here is drawn."""
        trial = Trial(self._next_trial, config, derive_seed(self.setup.seed, self._next_trial), parent)
        self.setup.sampler.adopt(config, trial.id)
        self._next_trial += 1
        return trial

    def _propose_again(self, n: int) -> Sequence[Trial]:
        """During a replay the journal answers for the sampler."""
        assert self._replayed is not None
        trials = [self._replayed.popleft() for _ in range(min(n, len(self._replayed)))]
        self.setup.sampler.skip([t.config for t in trials], [t.id for t in trials])
        self._next_trial += len(trials)
        return trials

    # --- replay ----------------------------------------------------------------------------------------------

    def replay(self, events: Iterable[Event]) -> None:
        """Bring a fresh engine to where the journal ends.

        Raises:
            InvalidInput: The journal was made by another scheduler, sampler, space or seed.
        """
        for event in events:
            if isinstance(event, Submitted):
                self._resubmit(event)
            else:
                self.apply(event)
        self._stops.clear()
        self.running.clear()
        self.queue.clear()

    def requeue(self) -> None:
        """After a replay and the new session's first event: queue what is unfinished, oldest first."""
        for record in self.state.trials.values():
            if record.unfinished:
                self.queue.append(Placement((record.segment,), attempt=record.attempts))

    def _resubmit(self, event: Submitted) -> None:
        new = [s.trial for s in event.segments if s.trial.id >= self._next_trial]
        self._replayed = deque(sorted(new, key=lambda trial: trial.id))
        try:
            group = self.setup.scheduler.next(event.want)
        finally:
            self._replayed = None
        if group is None or not _same(group.segments, event.segments):
            raise InvalidInput(
                f"The journal does not follow from this study: its group {event.label!r} of trials "
                f"{[s.trial.id for s in event.segments][:5]} is not what the scheduler hands out now. Resume with "
                "the same space, scheduler, sampler and seed, or start a new study under another name."
            )
        self.state.apply(event)
        self._hear_drops()

    def pins(self) -> set[Checkpoint]:
        """Checkpoints that a waiting or running segment is yet to copy."""
        segments = [s for p in self.queue for s in p.segments] + list(self.running.values())
        return {segment.copy_from for segment in segments if segment.copy_from is not None}

    # --- results ---------------------------------------------------------------------------------------------

    def values(self, record: TrialRecord) -> Values | None:
        """A trial's objectives at its latest report, lower is better."""
        return self.setup.goal.score(record)

    def check_finished(self) -> None:
        """Raise if the study can neither go on nor is done: a defect in a scheduler, never the user's fault."""
        if not self.queue and not self.running and not self.setup.scheduler.done:
            raise PenstockError(
                f"{type(self.setup.scheduler).__name__} waits for results although nothing is running. This is a "
                "defect in Penstock; please report it with the journal."
            )


def _same(ours: tuple[Segment, ...], theirs: tuple[Segment, ...]) -> bool:
    """Whether two groups are the same in the journal's eyes, which knows lists but no tuples."""
    if ours == theirs:
        return True
    texts = [json.dumps(to_record(Submitted(0.0, 0, segments))[3]) for segments in (ours, theirs)]
    return texts[0] == texts[1]


def noted(time_s: float, topic: str, trial: int | None = None, **data: object) -> Noted:
    """A ``Noted`` event."""
    return Noted(time_s, topic, data, trial)


__all__ = ["LOST_RETRIES", "Engine", "Setup", "derive_seed", "noted"]
