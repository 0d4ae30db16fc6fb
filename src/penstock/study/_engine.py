"""The study's state machine: events in, decisions out. Pure: no clock, no I/O, no sleeping.

The engine holds the state (a fold over events), the scheduler, the sampler and the queue of what waits to run.
The shell around it (``_study``) carries events from the executor to the engine and the journal, and launches
what the engine decides. Because everything here follows from the journal, a resume is a replay.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.core import (
    Checkpoint,
    Config,
    Device,
    Dropped,
    Ended,
    Event,
    Free,
    Noted,
    Placement,
    Plan,
    PlanPass,
    Reported,
    Resize,
    Resized,
    Running,
    Saved,
    Segment,
    Share,
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
from penstock.core.state import CHOSEN, PROBED
from penstock.goal import Budget, Goal, measured
from penstock.plan import Regroup
from penstock.sample import Observation, Sampler
from penstock.schedule import Outcome, Rules, Scheduler, StopRule
from penstock.space import Space
from penstock.study._bounds import allowed_by, gate_of
from penstock.study._ledger import Foresight, Ledger

_AHEAD = 16  # a planner sees so many trials ahead for each one that fits; the rest only queues

TRIALS = "budget_of_trials"
"""The topic of notes that the budget of trials is another one than before: ``trials``, or None for no limit."""

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
        ahead: For a planner that fuses: how many segments to have waiting, from how many could start, wait and run,
            how many trials there are and how many segments there will be; None: as many as could start.
        foresight: For a planner that looks at what runs and at how long things take; None: for one that looks
            only at what is free, which costs the least.
        twins: Whether most trials train a narrow twin of the model, whose measurements are not the model's.
        regroup: For fused groups that can be split while they run: from the running groups, the idle devices, all
            devices by id and the state, who is to go on where; None: they stay as they were launched.
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
    foresight: Foresight | None = None
    ahead: Callable[[int, int, int, int, int | None], int] | None = None
    twins: bool = False
    regroup: (
        Callable[[Sequence[Running], Sequence[Device], Mapping[str, Device], StudyState], Sequence[Regroup]]
        | None
    ) = None


@dataclass(slots=True)
class _Move:
    """Trials that are on their way from their groups to a device, which is kept free for them."""

    order: Regroup
    coming: set[int]  # have not ended yet where they are
    segments: dict[int, Segment] = field(default_factory=dict)
    attempt: int = 0


def derive_seed(seed: int, *path: object) -> int:
    """A seed in [0, 2**31) that follows from ``seed`` and a path of names and numbers."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def _idle(free: Sequence[Free]) -> list[Free]:
    """What is free now, without what may be queued behind others."""
    return [replace(item, backlog=0) for item in free]


class Engine:
    """Decides what runs next. See the module's docstring; one thread, one study."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.state = StudyState()
        self.queue: deque[Placement] = deque()
        self.running: dict[int, Segment] = {}
        self._next_trial = 0
        self._proposed = 0  # trials that the sampler proposed
        self._refused: dict[int, int] = {}  # proposals before one, until it is submitted
        self._children: dict[int, int] = {}  # how many trials were made from one
        self._copies: set[int] = set()  # trials that may still have to copy another one's checkpoint
        self._replayed: deque[Trial] | None = None
        self._drops: dict[int, str] = {}
        self._stops: list[tuple[int, str]] = []
        self._doomed: dict[int, str] = {}  # running trials that a rule wants ended, and why
        self._stopping: set[int] = set()  # what the scheduler wants stopped and has not ended yet
        self._learns = setup.sampler.learns
        self._ledger = None if setup.foresight is None else Ledger(setup.foresight)
        self._pressed = False  # whether a finalist came: others may pause for it although nothing is free
        self._looked_at = 0  # how much was known when the queue was last looked at
        self._resizes: tuple[Resize, ...] = ()
        self._groups: dict[tuple[int, ...], tuple[Share, ...]] = {}  # fused ones, as they were launched
        self._member_of: dict[int, tuple[int, ...]] = {}  # a trial's latest
        self._moves: list[_Move] = []
        self._fates: dict[int, str] = {}  # of trials that were to end while they moved
        self._kinds: dict[str, Device] = {}
        self._idle = False  # a device was, when groups were last looked at
        self._news = False  # a segment is over: the scheduler may have chosen
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
            allows=allowed_by(setup.sampler),
            left=self._left,
        )
        setup.scheduler.start(rules)
        for rule in setup.rules:
            rule.start()

    def refine(self, planner: tuple[PlanPass, ...], foresight: Foresight) -> None:
        """Go on with overheads that are known only now."""
        self.setup = replace(self.setup, planner=planner, foresight=foresight)
        if self._ledger is not None:
            self._ledger.foresight = foresight

    # --- events in -------------------------------------------------------------------------------------------

    def annotate(self, event: Event) -> Event:
        """Decide what only the engine can: whether a failure is retried, and a trial that moves was to end instead."""
        if isinstance(event, Ended) and event.kept:
            fate = self._fates.get(event.trial) or self._doomed.get(event.trial)
            if fate is not None and event.status is TrialStatus.PAUSED:
                return replace(event, status=TrialStatus.STOPPED, reason=fate, kept=False)
            return event
        if isinstance(event, Ended) and event.status is TrialStatus.PAUSED:
            # A rule spoke at the last report of the segment: the trial must not be promoted all the same.
            reason = self._doomed.get(event.trial)
            return event if reason is None else replace(event, status=TrialStatus.STOPPED, reason=reason)
        if isinstance(event, Ended) and event.status is TrialStatus.FAILED:
            allowed = LOST_RETRIES if event.lost else self.setup.retries
            record = self.state.trials[event.trial]
            if record.attempts < allowed:
                return replace(event, retry=True)
        return event

    def apply(self, event: Event) -> bool:
        """Fold in an event and let scheduler, sampler and rules learn from it."""
        fresh = self.state.apply(event)
        if self._ledger is not None:
            self._enter(self._ledger, event)
        if not fresh:
            return False
        match event:
            case Reported():
                self._check_rules(event)
                self.setup.scheduler.heard(event)
            case Noted():
                self.setup.scheduler.heard(event)
                if event.topic == TRIALS:
                    self._reopen(event)
            case Started():
                self.running[event.trial] = self.state.trials[event.trial].segment
                self._member_of[event.trial] = event.fused
                if event.trial in self._doomed:  # before it was interrupted
                    self._stops.append((event.trial, self._doomed[event.trial]))
                if event.fused:
                    self._groups[event.fused] = event.shares
            case Ended():
                self._ended(event)
            case Dropped():
                self._drops.pop(event.trial, None)
                self._tell(self.state.trials[event.trial], final=True)
        return True

    def _enter(self, ledger: Ledger, event: Event) -> None:
        match event:
            case Reported():
                ledger.reported(event, self.state.trials[event.trial].config)
            case Started():
                ledger.started(event, self.state.trials[event.trial].segment)
            case Saved():
                ledger.saved(event)
            case Resized():
                ledger.resized(event)
            case Ended():
                ledger.ended(event)

    def _check_rules(self, event: Reported) -> None:
        for rule in self.setup.rules:
            reason = rule.observe(event.trial, event.epoch, event.metrics)
            if reason is not None:
                self._stops.append((event.trial, reason))
                self._doomed.setdefault(event.trial, reason)
                return

    def _ended(self, event: Ended) -> None:
        segment = self.running.pop(event.trial, None)
        self._member_of.pop(event.trial, None)
        self._stopping.discard(event.trial)
        if not event.kept and not event.retry:
            self._doomed.pop(event.trial, None)
        record = self.state.trials[event.trial]
        if self._moves:
            self._arrived(event, segment or record.segment, record.attempts)
        if event.kept:
            # Unfinished: it waits for its next turn, goes on elsewhere, or is queued again at the next resume.
            rest = None if self._ledger is None else self._ledger.take_paused(event.trial)
            if rest is not None:
                self.queue.append(rest)
            return
        if event.retry:
            again = self._placement(segment or record.segment, event.time_s, record.attempts)
            self.queue.appendleft(again)
            return
        unfit = event.status is TrialStatus.FAILED or self._violates(record)
        values = None if unfit else self.values(record)
        begun = (segment or record.segment).start
        drawn = [r.energy for r in record.reports if r.epoch > begun and r.energy is not None]
        self.setup.scheduler.ended(
            Outcome(event.trial, event.status, record.epoch, values, record.metrics, total(drawn))
        )
        self._news = True
        if self._learns:
            self._tell(record, final=event.status is not TrialStatus.PAUSED)
        self._hear_drops()

    def _violates(self, record: TrialRecord) -> bool:
        """Whether a trial was measured to violate a limit: it can't be the best, so others are to go on."""
        gate = gate_of(self.setup.sampler)
        if gate is None or not self.state.fit or (self.setup.twins and not record.is_target):
            return False
        return bool(gate.violated(measured(record)))

    def _tell(self, record: TrialRecord, *, final: bool) -> None:
        if self._learns:
            values = None if record.status is TrialStatus.FAILED else self.values(record)
            gated = gate_of(self.setup.sampler) is not None
            # Limits are about the model itself: what a narrow twin draws is no measurement of that.
            metrics = measured(record) if gated and not self.setup.twins else {}
            told = Observation(record.id, record.config, values, record.epoch, final, metrics)
            self.setup.sampler.tell(told)

    def _hear_drops(self) -> None:
        scheduler = self.setup.scheduler
        for trial in scheduler.drops():
            self._drops[trial] = scheduler.why(trial)

    def _arrived(self, event: Ended, segment: Segment, attempt: int) -> None:
        """A trial that was to move has left its group, by moving or otherwise."""
        for move in self._moves:
            if event.trial in move.coming:
                move.coming.discard(event.trial)
                self._fates.pop(event.trial, None)
                if event.kept:
                    move.segments[event.trial] = segment
                    move.attempt = max(move.attempt, attempt)
        self._moves = [move for move in self._moves if move.coming or move.segments]

    # --- decisions out ---------------------------------------------------------------------------------------

    def take_stops(self, time_s: float) -> list[tuple[int, str]]:
        """Running trials that a rule or the scheduler wants ended, with the reasons; each is told once."""
        scheduler = self.setup.scheduler
        scheduler.at(self._elapsed_s(time_s))
        stops, self._stops = self._stops, []
        for trial, reason in scheduler.stops():
            if trial in self.running:
                if trial not in self._stopping:
                    self._stopping.add(trial)
                    stops.append((trial, reason))
            elif not self.state.trials[trial].status.is_end:
                self._drops[trial] = reason
        if self._moves:
            moving = {trial for move in self._moves for trial in move.coming}
            self._fates.update({trial: reason for trial, reason in stops if trial in moving})
            for move in self._moves:
                move.segments = {t: s for t, s in move.segments.items() if t not in self._drops}
            self._moves = [move for move in self._moves if move.coming or move.segments]
        if self._drops and self.queue:
            waiting = [p for p in self.queue if not any(s.trial.id in self._drops for s in p.segments)]
            self.queue = deque(waiting)
        return [(trial, reason) for trial, reason in stops if trial in self.running]

    def take_choice(self, time_s: float) -> list[Event]:
        """Which configurations count in the end, as soon as the scheduler knows it, or knows better."""
        if not self._news:
            return []
        self._news = False
        chosen = self.setup.scheduler.chosen
        if chosen is None or tuple(chosen) == self.state.chosen:
            return []
        return [Noted(time_s, CHOSEN, {"trials": list(chosen)})]

    def take_drops(self, time_s: float) -> list[Event]:
        """Paused trials that the scheduler gave up, as events to journal and apply."""
        dropped: list[Event] = []
        for trial, reason in self._drops.items():
            if not self.state.trials[trial].status.is_end:
                dropped.append(Dropped(time_s, trial, reason))
        self._drops.clear()
        return dropped

    def submit(self, free: Sequence[Free], time_s: float) -> Iterator[Event]:
        """Ask the scheduler for what could start now; the groups as events, already applied.

        One by one: an error of the scheduler or the sampler leaves those before it to be journalled.
        """
        free = self._unkept(free)
        ledger = self._ledger
        if ledger is None:
            # Who learns proposes for what is idle: running trials teach what would queue behind them.
            want = self._room(_idle(free) if self._learns else free) - len(self.queue)
        else:
            ledger.saw(free)
            want = ledger.concurrency() - len(self.queue) - len(self.running)
            if self.setup.ahead is not None:  # as many as fill their fused groups
                want = max(want, self._room(free) - len(self.queue))
        self.setup.scheduler.at(self._elapsed_s(time_s))
        if self.setup.scheduler.urgent:
            want = max(want, 1)
        # Whoever looks ahead also takes a rung that is ready while nothing is free: it is planned as a whole.
        while want > 0 or ledger is not None:
            group = self.setup.scheduler.next(max(0, want))
            if group is None:
                break
            ids = [segment.trial.id for segment in group.segments]
            refused = tuple((trial, self._refused.pop(trial)) for trial in ids if trial in self._refused)
            event = Submitted(time_s, max(0, want), group.segments, group.label, refused)
            self._handed_out(event)
            self.queue.extend([self._placement(segment, time_s) for segment in group.segments])
            want -= len(group.segments)
            self._pressed = self._pressed or any(each.start and each.last for each in group.segments)
            yield event
        self._hear_drops()

    def plan(
        self, free: Sequence[Free], time_s: float = 0.0, most: int | None = None
    ) -> tuple[Placement, ...]:
        """What to launch now; it leaves the queue. Planners that look ahead or fuse see ``most`` segments at most."""
        if self._ledger is not None:
            return self._plan_ahead(self._ledger, free, time_s, most)
        free = self._unkept(free)  # nor what those get who go on now
        moved = self._moved() if self._moves else ()
        if not self.queue or not free:
            return moved
        seen = self._room(free)
        if self.setup.ahead is None:
            seen += 1  # of fused ones, one more than fills the groups would make them uneven
        elif most is not None:
            seen = min(seen, most)
        waiting = tuple(islice(self.queue, seen))
        plan = Plan(waiting, tuple(free))
        for step in self.setup.planner:
            plan = step(plan)
        for _ in waiting:
            self.queue.popleft()
        self.queue.extendleft(reversed(plan.waiting))
        for placement in plan.placed:
            for segment in placement.segments:
                self.running[segment.trial.id] = segment
        return (*moved, *plan.placed)

    def _unkept(self, free: Sequence[Free]) -> Sequence[Free]:
        """What is free and not kept for trials that are on their way to it."""
        if self.setup.regroup is not None:
            self._kinds.update({item.device.id: item.device for item in free})
        if not self._moves:
            return free
        kept = {move.order.device for move in self._moves}
        return [item for item in free if item.device.id not in kept]

    def _moved(self) -> tuple[Placement, ...]:
        """Trials that have all left their groups, as they go on."""
        there = [move for move in self._moves if not move.coming]
        self._moves = [move for move in self._moves if move.coming]
        placements = []
        for move in there:
            segments = tuple(move.segments[trial] for trial in move.order.members if trial in move.segments)
            placements.append(Placement(segments, (Share(move.order.device),), attempt=move.attempt))
            for segment in segments:
                self.running[segment.trial.id] = segment
        return tuple(placements)

    def strand(self, free: Sequence[Free]) -> None:
        """Let trials that have all left their groups wait like others if their device is not theirs any more.

        It was kept free for them, and other studies may have been given what is idle.
        """
        idle = {item.device.id for item in free if item.fraction >= 1.0}
        lost = [move for move in self._moves if not move.coming and move.order.device not in idle]
        self._moves = [move for move in self._moves if move not in lost]
        for move in lost:
            segments = [move.segments[trial] for trial in move.order.members if trial in move.segments]
            self.queue.extendleft(Placement((each,), attempt=move.attempt) for each in reversed(segments))

    def take_regroups(self, free: Sequence[Free], leaving: Collection[str] = ()) -> tuple[Regroup, ...]:
        """Who is to leave their fused groups for another device at the end of the epoch; each is told once.

        Asked when all that could start has: a device that is still free would stay idle. Also who is on devices that
        are ``leaving``.
        """
        regroup = self.setup.regroup
        if regroup is None or self._ledger is not None or not self._groups:
            self._idle = False
            return ()
        idle = [item.device for item in self._unkept(free) if item.fraction >= 1.0]
        groups = self._fused()
        self._idle = bool(groups and (idle or leaving))
        if not self._idle or (self.queue and not leaving) or self._moves:
            return ()
        orders = tuple(regroup(groups, idle, self._kinds, self.state))
        self._moves = [_Move(order, set(order.members)) for order in orders]
        return orders

    def _fused(self) -> list[Running]:
        """The fused groups that run, without members that have left."""
        found: list[Running] = []
        for members, shares in list(self._groups.items()):
            live = [t for t in members if t in self.running and self._member_of.get(t) == members]
            if len(live) < 2:
                del self._groups[members]
                continue
            found.append(Running(Placement(tuple(self.running[t] for t in live), shares)))
        return found

    def _plan_ahead(
        self, ledger: Ledger, free: Sequence[Free], time_s: float, most: int | None
    ) -> tuple[Placement, ...]:
        """The same for a planner that also looks at what runs and at how long everything takes."""
        ledger.news = False
        if most == 0:
            return ()  # nor does anything make room for who may not start
        if self.queue:
            if not free and not ledger.wide and not self._pressed:
                return ()
            self._pressed = False
        elif not self.running or not any(item.fraction >= 1 for item in free):
            return ()
        if ledger.version != self._looked_at:
            self._looked_at = ledger.version
            self.queue = deque(ledger.expect(placement) for placement in self.queue)
        seen = _AHEAD * max(1, len(ledger.devices)) * ledger.foresight.overhead.max_sharing
        waiting = tuple(islice(self.queue, seen if most is None else min(seen, most)))
        running = ledger.running(time_s, self._ranks)
        plan = Plan(waiting, ledger.unclaimed(free), running=running, devices=ledger.devices)
        for step in self.setup.planner:
            plan = step(plan)
        if len(plan.waiting) != len(waiting):
            for _ in waiting:
                self.queue.popleft()
            # As they were: taking a fused placement apart again forgets what its members take alone.
            before = {placement.segments[0].trial.id: placement for placement in waiting}
            self.queue.extendleft(before[item.segments[0].trial.id] for item in reversed(plan.waiting))
        ledger.launched(plan.placed)
        ledger.asked(plan.resized)
        self._resizes = tuple(resize for resize in plan.resized if resize.at_epoch is None)
        for placement in plan.placed:
            for segment in placement.segments:
                self.running[segment.trial.id] = segment
        return plan.placed

    def take_resizes(self) -> tuple[Resize, ...]:
        """Running placements whose shares are to change at the end of the epoch, or that are to pause then."""
        resizes, self._resizes = self._resizes, ()
        return resizes if self._ledger is None else (*resizes, *self._ledger.take_due())

    @property
    def foresees(self) -> bool:
        """Whether to ask for groups, and to plan, also when nothing is free."""
        return self._ledger is not None

    @property
    def restless(self) -> bool:
        """Whether something was learned that makes another plan worth while, although nothing has ended."""
        if self._ledger is None:
            return self._idle
        return self._ledger.news

    def _ranks(self, trials: Sequence[int]) -> dict[int, int]:
        """How trials do, compared with each other: 0 is the best; those without a report are left out."""
        scored = [(t, v) for t in trials if (v := self.values(self.state.trials[t])) is not None]
        order = self.setup.goal.order([values for _, values in scored])
        return {scored[index][0]: place for place, index in enumerate(order)}

    @property
    def moving(self) -> bool:
        """Whether trials are on their way from one group to another."""
        return bool(self._moves)

    @property
    def done(self) -> bool:
        """Whether nothing runs, nothing waits and nothing more will come."""
        return not (self.queue or self.running or self._moves) and self.setup.scheduler.done

    @property
    def finished(self) -> bool:
        """After a replay: whether the journal tells of a study that was run to its end.

        The scheduler may not know: that nobody proposed any more trials is not journalled.
        """
        return self.state.closed is not None and self.state.closed.reason == "finished"

    def _elapsed_s(self, time_s: float) -> float:
        """What the study has spent by ``time_s``, over all sessions."""
        return self.state.spent_s + max(0.0, time_s - self.state.last_s)

    def _room(self, free: Sequence[Free]) -> int:
        """How many segments to have waiting: as many as could start, or as many as fill their fused groups."""
        units, ahead = self.units(free), self.setup.ahead
        if ahead is None or not units:
            return units
        expected = self.setup.scheduler.expected or self.setup.budget.trials
        return ahead(units, len(self.queue), len(self.running), self._next_trial, expected)

    def room(self, free: Sequence[Free]) -> int:
        """How many segments could start on what is free, fused or side by side."""
        if self._ledger is None:
            return self._room(free)
        self._ledger.saw(free)
        beside = self._ledger.concurrency() - len(self.running)
        return beside if self.setup.ahead is None else max(beside, self._room(free))

    def group(self, free: Sequence[Free]) -> int:
        """How many segments start as one: on one of the free devices, fused."""
        if self.setup.ahead is None:
            return 1
        return max(1, self._room(_idle(free[:1])))

    def units(self, free: Sequence[Free]) -> int:
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

    def _placement(self, segment: Segment, time_s: float, attempt: int = 0) -> Placement:
        if self._ledger is None:
            return Placement((segment,), attempt=attempt)
        promoted = segment.start > 0
        return self._ledger.expect(Placement((segment,), attempt=attempt, since_s=time_s, promoted=promoted))

    # --- trials ----------------------------------------------------------------------------------------------

    def _propose(self, n: int) -> Sequence[Trial]:
        if self._replayed is not None:
            return self._propose_again(n)
        left = self._left()
        n = n if left is None else min(n, left)
        if n <= 0:
            return ()
        sampler, seed = self.setup.sampler, self.setup.seed
        trials = []
        configs = sampler.ask(n)
        looked: Sequence[int] = getattr(sampler, "queries", ())[
            -len(configs) :
        ]  # under limits, how many for each
        for place, config in enumerate(configs):
            # By its place among proposals: trials made from others come whenever a device is idle for them, and a
            # trial's training must not depend on when that was.
            trial = Trial(self._next_trial, config, derive_seed(seed, self._proposed))
            sampler.adopt(config, trial.id)
            if place < len(looked) and looked[place] > 1:
                self._refused[trial.id] = looked[place] - 1
            self._next_trial += 1
            self._proposed += 1
            trials.append(trial)
        return trials

    def _left(self) -> int | None:
        """How many more trials the budget allows; during a replay, how many were made from others next."""
        if self._replayed is not None:
            return sum(trial.parent is not None for trial in self._replayed)
        limit = self.setup.budget.trials
        return None if limit is None else max(0, limit - self._next_trial)

    def _derive(self, config: Config, parent: int) -> Trial:
        """A new trial made from another one, seeded by its parent and its place among the children."""
        child = self._children.get(parent, 0)
        self._children[parent] = child + 1
        known = self.state.trials.get(parent)
        seed = self.setup.seed if known is None else known.seed
        trial = Trial(self._next_trial, config, derive_seed(seed, "child", child), parent)
        if self._replayed and self._replayed[0].id == trial.id:  # an older journal's seeds count
            trial = replace(trial, seed=self._replayed.popleft().seed)
        self.setup.sampler.adopt(config, trial.id)
        self._next_trial += 1
        return trial

    def _propose_again(self, n: int) -> Sequence[Trial]:
        """During a replay the journal answers for the sampler; trials made from others are none of its answers."""
        assert self._replayed is not None
        trials: list[Trial] = []
        while len(trials) < n and self._replayed and self._replayed[0].parent is None:
            trials.append(self._replayed.popleft())
        space = self.setup.space  # a scheduler may have added to what was proposed: SM2 its batch sizes
        proposed = [{name: value for name, value in t.config.items() if name in space} for t in trials]
        self.setup.sampler.skip(proposed, [t.id for t in trials])
        self._next_trial += len(trials)
        self._proposed += len(trials)
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
            elif isinstance(event, Noted) and event.topic == PROBED:
                self._remember(event)
            else:
                self.apply(event)
        self._stops.clear()
        self._groups.clear()
        self._member_of.clear()
        self.running.clear()
        self.queue.clear()
        if self._ledger is not None:
            self._ledger.clear()

    def rebudgeted(self, before: int | None, time_s: float) -> Noted | None:
        """After a replay: the note that the budget of trials is not the last session's; ``before``: of the first."""
        for note in self.state.notes:
            if note.topic == TRIALS:
                before = note.data["trials"]
        limit = self.setup.budget.trials
        return None if limit == before else Noted(time_s, TRIALS, {"trials": limit})

    def over_with(self, note: Noted | None) -> bool:
        """After a replay: whether the study was run to its end, and a new budget of trials brings no more of them."""
        if not self.finished or note is None:
            return self.finished
        limit = note.data["trials"]
        if limit is not None and limit <= self.state.counts.total:
            return True
        self._reopen(note)
        return self.setup.scheduler.done

    def _reopen(self, note: Noted) -> None:
        over = {record.id for record in self.state.trials.values() if record.status.is_end}
        self.setup.scheduler.reopen(over, note.data["trials"])

    def probed(self, event: Noted) -> None:
        """What was measured for a proposal that is being made: nobody learns of it but who asked."""
        self.state.apply(event)

    def _remember(self, event: Noted) -> None:
        self.state.apply(event)
        gate = gate_of(self.setup.sampler)
        if gate is not None:
            gate.recall(event.data["config"], event.data["readings"])

    def requeue(self) -> None:
        """After a replay and the new session's first event: queue what is unfinished, oldest first."""
        for record in self.state.trials.values():
            if record.unfinished:
                self.queue.append(self._placement(record.segment, self.state.last_s, record.attempts))

    def again(self, trial: int) -> None:
        """Queue a trial that has left before the end of its segment, before all others, if it does not wait already."""
        if self.waits(trial) or any(trial in move.segments for move in self._moves):
            return  # it was to pause, or to move, at the same time
        record = self.state.trials[trial]
        self.queue.appendleft(self._placement(record.segment, self.state.last_s, record.attempts))

    def forget_waiting(self) -> None:
        """Leave what waits to the next session; who runs and comes back, to pause or to be tried again, still waits."""
        self.queue.clear()

    def waits(self, trial: int) -> bool:
        """Whether a trial is in the queue."""
        return any(segment.trial.id == trial for placement in self.queue for segment in placement.segments)

    def _resubmit(self, event: Submitted) -> None:
        new = [s.trial for s in event.segments if s.trial.id >= self._next_trial]
        self._replayed = deque(sorted(new, key=lambda trial: trial.id))
        self.setup.scheduler.at(self._elapsed_s(event.time_s))
        try:
            group = self.setup.scheduler.next(event.want)
            if group is None and not event.want:
                # A rung that was ready while nothing was free, but cut short: that nobody proposed any more trials for
                # it was learned between two groups, which is not journalled.
                group = self.setup.scheduler.next(1)
        finally:
            self._replayed = None
        if group is None or not _same(group.segments, event.segments):
            raise InvalidInput(
                f"The journal does not follow from this study: its group {event.label!r} of trials "
                f"{[s.trial.id for s in event.segments][:5]} is not what the scheduler hands out now. Resume with "
                "the same space, scheduler, sampler and seed, or start a new study under another name."
            )
        self._handed_out(event)
        self._hear_drops()

    def _handed_out(self, event: Submitted) -> None:
        self.state.apply(event)
        self._copies.update(s.trial.id for s in event.segments if s.copy_from is not None)

    def pins(self) -> set[Checkpoint]:
        """Checkpoints that an unfinished segment has copied or is yet to copy, also one that waits for a resume."""
        found: dict[int, Checkpoint] = {}
        for trial in self._copies:
            record = self.state.trials[trial]
            if record.unfinished and record.segment.copy_from is not None:
                found[trial] = record.segment.copy_from
        self._copies = set(found)
        return set(found.values())

    # --- results ---------------------------------------------------------------------------------------------

    def values(self, record: TrialRecord) -> Values | None:
        """A trial's objectives at its latest report, lower is better."""
        return self.setup.goal.score(record, once=self.state.once)

    def check_finished(self) -> None:
        """Raise if the study can neither go on nor is done: a defect in a scheduler, never the user's fault."""
        if not (self.queue or self.running or self._moves) and not self.setup.scheduler.done:
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
