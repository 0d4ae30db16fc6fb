"""The contract of schedulers as a test suite, and a tiny driver that runs one without a study.

A test file subclasses ``SchedulerSuite`` and says how to make the scheduler; pytest finds the rest.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from penstock.core import Config, Segment, Trial, TrialGroup, TrialStatus, Values
from penstock.schedule import Outcome, Rules, Scheduler
from penstock.space import Choice, Float, Int, Space, equals

SPACE = Space(
    lr=Float(1e-4, 1.0, log=True),
    optimizer=Choice("sgd", "adam"),
    momentum=Float(0.0, 0.99, when=equals("optimizer", "sgd")),
    layers=Int(1, 6, structural=True),
)

Loss: TypeAlias = Callable[[Trial, int], Values]
"""``loss(trial, epoch)``: the objectives a trial reports after ``epoch`` epochs, lower is better."""


def by_fronts(values: Sequence[Values]) -> list[int]:
    """Indices from best to worst by Pareto fronts, ties in the given order; plain sorting for one objective."""
    if not values or len(values[0]) == 1:
        return sorted(range(len(values)), key=lambda i: values[i])
    left = list(range(len(values)))
    ranked: list[int] = []
    while left:
        front = [i for i in left if not any(_dominates(values[j], values[i]) for j in left)]
        ranked.extend(front)
        left = [i for i in left if i not in set(front)]
    return ranked


def _dominates(a: Values, b: Values) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def smooth_loss(seed: int, objectives: int = 1) -> Loss:
    """Losses that fall with the epochs towards a floor of each trial's own; curves may cross."""

    curves: dict[int, list[tuple[float, float]]] = {}

    def loss(trial: Trial, epoch: int) -> Values:
        curve = curves.get(trial.id)
        if curve is None:
            random = Random(f"{seed} {trial.id}")
            curve = curves[trial.id] = [(random.random(), random.random()) for _ in range(objectives)]
        return tuple(floor + fall / epoch for floor, fall in curve)

    return loss


@dataclass
class Trace:
    """What a scheduler did: everything needed to compare two runs, and to check one.

    Attributes:
        groups: Each group with the ``want`` it was the answer to.
        outcomes: The outcomes it was told, in order.
        dropped: The trials it gave up, in order.
        status: What became of each trial.
        proposed: Its questions for new trials: how many wanted, how many asked.
        peak: Most segments running at once.
        idle: How often a slot was idle while others ran (a barrier).
    """

    groups: list[tuple[int, TrialGroup]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    status: dict[int, TrialStatus] = field(default_factory=dict)
    proposed: list[tuple[int, int]] = field(default_factory=list)
    peak: int = 0
    idle: int = 0

    @property
    def segments(self) -> list[Segment]:
        """All segments in the order they were handed out."""
        return [segment for _, group in self.groups for segment in group.segments]


def drive(
    scheduler: Scheduler,
    loss: Loss,
    *,
    slots: int = 4,
    seed: int = 0,
    learns: bool = False,
    limit: int | None = None,
    failures: float = 0.0,
    stops: float = 0.0,
    early: float = 0.0,
    space: Space = SPACE,
    in_order: bool = False,
) -> Trace:
    """Run a scheduler to its end on ``slots`` imaginary devices and check its contract on the way.

    Args:
        scheduler: The scheduler; it is started anew.
        loss: What trials report.
        slots: How many segments run at once.
        seed: Decides which segment ends next and which ones fail.
        learns: What the sampler says of itself.
        limit: How many trials the sampler has; None: no end.
        failures: Part of the segments that fail.
        stops: Part of the segments that a rule stops.
        early: Part of the segments whose training function returns before the segment's end.
        space: The space trials are drawn from.
        in_order: Segments end in the order they began, not at random.

    Returns:
        What happened.

    Raises:
        AssertionError: The scheduler broke its contract.
    """
    trace = Trace()
    random = Random(f"driver {seed}")
    made: list[Trial] = []
    asking: list[int] = [0]

    def new(config: Config, parent: int | None = None) -> Trial:
        trial = Trial(len(made), config, Random(f"{seed} {len(made)}").getrandbits(32), parent)
        made.append(trial)
        return trial

    def propose(count: int) -> list[Trial]:
        assert count > 0, f"propose({count})"
        trace.proposed.append((asking[0], count))
        count = count if limit is None else min(count, limit - len(made))
        return [new(space.sample(Random(f"config {seed} {len(made)}"))) for _ in range(count)]

    scheduler.start(Rules(propose, by_fronts, space, learns, seed, new))
    waiting: list[Segment] = []
    running: list[Segment] = []
    epochs: dict[int, int] = {}  # behind each trial
    saved: set[tuple[int, int]] = set()
    latest: dict[int, Config] = {}
    status = trace.status

    def collect_drops() -> None:
        for trial in scheduler.drops():
            assert status[trial] is TrialStatus.PAUSED, f"trial {trial} was dropped while {status[trial]}"
            status[trial] = TrialStatus.STOPPED
            trace.dropped.append(trial)

    def check(segment: Segment) -> None:
        trial, number = segment.trial, segment.trial.id
        space.validate(trial.config)
        before = status.get(number)
        assert before in (None, TrialStatus.PAUSED), f"trial {number} was handed out while {before}"
        if segment.copy_from is None:
            assert segment.start == epochs.get(number, 0), f"trial {number} does not go on where it was"
            assert number not in latest or latest[number] == trial.config, f"trial {number} changed"
        else:
            copied = segment.copy_from
            assert copied.trial != number, f"trial {number} copies itself"
            assert copied.epoch == segment.start, f"trial {number} starts at another epoch than its copy"
            assert (copied.trial, copied.epoch) in saved, f"trial {number} copies what there is not: {copied}"
            same = [name for name in space.structural if name in trial.config or name in latest[copied.trial]]
            assert all(trial.config[name] == latest[copied.trial][name] for name in same), "weights don't fit"
        most = scheduler.max_epochs
        assert segment.until is None or segment.start < segment.until, f"trial {number} runs no epoch"
        assert most is None or (segment.until is not None and segment.until <= most), f"{segment} is too long"
        assert segment.last == (segment.until == most), f"{segment}: last?"

    while True:
        while True:
            want = asking[0] = max(0, slots - len(running) - len(waiting))
            group = scheduler.next(want)
            if group is None:
                break
            assert group.segments, "an empty group"
            trace.groups.append((want, group))
            numbers = [segment.trial.id for segment in group.segments]
            assert len(set(numbers)) == len(numbers), f"a trial twice in a group: {numbers}"
            for segment in group.segments:
                check(segment)
            for segment in group.segments:
                status[segment.trial.id] = TrialStatus.WAITING
                epochs[segment.trial.id] = segment.start
                latest[segment.trial.id] = segment.trial.config
            waiting.extend(group.segments)
        collect_drops()
        begin = slots - len(running)
        running.extend(waiting[:begin])
        del waiting[:begin]
        if not running:
            break
        trace.peak = max(trace.peak, len(running))
        trace.idle += slots - len(running)
        segment = running.pop(0 if in_order else random.randrange(len(running)))
        number = segment.trial.id
        until = 10 if segment.until is None else segment.until
        epochs[number] = until
        values: Values | None = loss(segment.trial, until)
        draw = random.random()
        if draw < failures:
            status[number], values = TrialStatus.FAILED, None
        elif draw < failures + stops:
            status[number] = TrialStatus.STOPPED
        elif segment.last or draw < failures + stops + early:
            status[number] = TrialStatus.COMPLETED
        else:
            status[number] = TrialStatus.PAUSED
            saved.add((number, until))
        outcome = Outcome(number, status[number], until, values)
        trace.outcomes.append(outcome)
        scheduler.ended(outcome)
        collect_drops()

    assert scheduler.done, "nothing runs and nothing is handed out, but it is not done"
    assert scheduler.next(slots) is None, "a group after the end"
    ends = {number: state for number, state in status.items() if not state.is_end}
    assert not ends, f"trials without an end: {ends}"
    assert scheduler.expected == len(trace.segments), "expected is wrong at the end"
    return trace


class SchedulerSuite(ABC):
    """What every scheduler must do. Subclass it, name the class ``Test...`` and implement ``scheduler``."""

    @abstractmethod
    def scheduler(self) -> Scheduler:
        """A new scheduler that ends by itself, with ``limit`` trials at most."""

    limit: int | None = None
    """How many trials the sampler has; for schedulers that end only with it."""

    def test_every_trial_comes_to_an_end(self) -> None:
        """Whatever the number of slots and the order in which segments end."""
        for slots in (1, 3, 16, 1000):
            for seed in range(3):
                for learns in (False, True):
                    drive(
                        self.scheduler(),
                        smooth_loss(seed),
                        slots=slots,
                        seed=seed,
                        learns=learns,
                        limit=self.limit,
                    )

    def test_failures_and_stops_are_survived(self) -> None:
        """And a failed or stopped trial gets nothing more."""
        for seed in range(6):
            for learns in (False, True):
                trace = drive(
                    self.scheduler(),
                    smooth_loss(seed),
                    slots=5,
                    seed=seed,
                    learns=learns,
                    limit=self.limit,
                    failures=0.2,
                    stops=0.1,
                    early=0.05,
                )
                assert TrialStatus.FAILED in trace.status.values()

    def test_all_failing_ends(self) -> None:
        """A training function that never works does not keep a study going."""
        trace = drive(self.scheduler(), smooth_loss(0), failures=1.0, limit=self.limit)
        assert all(state is TrialStatus.FAILED for state in trace.status.values())
        assert all(segment.start == 0 for segment in trace.segments)

    def test_the_sampler_may_be_exhausted(self) -> None:
        """At any moment, the first included."""
        for limit in (0, 1, 2, 3, 5, 7):
            for learns in (False, True):
                for seed in range(3):
                    trace = drive(
                        self.scheduler(), smooth_loss(seed), slots=3, seed=seed, learns=learns, limit=limit
                    )
                    if limit == 0:
                        assert not trace.groups

    def test_several_objectives(self) -> None:
        """Ranked by the rules' order."""
        for seed in range(3):
            drive(self.scheduler(), smooth_loss(seed, 2), seed=seed, failures=0.1, limit=self.limit)

    def test_replay_gives_the_same(self) -> None:
        """Same calls, same groups: with a new object, and with the same one started again."""
        scheduler = self.scheduler()
        for seed in range(2):
            first = drive(scheduler, smooth_loss(seed), seed=seed, failures=0.1, limit=self.limit)
            again = drive(scheduler, smooth_loss(seed), seed=seed, failures=0.1, limit=self.limit)
            fresh = drive(self.scheduler(), smooth_loss(seed), seed=seed, failures=0.1, limit=self.limit)
            assert first == again == fresh

    def test_more_trials_may_be_told_of_twice_and_are_forgotten_at_the_start(self) -> None:
        """A study first asks whether a larger budget brings more of them, and a resume replays all from the start."""
        found = []
        for times in (1, 2):
            scheduler = self.scheduler()
            scheduler.by_default = True
            trace = drive(scheduler, smooth_loss(0), slots=3, limit=5)
            first = copy.deepcopy(trace)
            for _ in range(times):
                scheduler.reopen(set(trace.status), 10_000)
            done = scheduler.done
            group = scheduler.next(3)
            assert group is None or not done, "a group after the end"
            assert scheduler.no_more
            found.append((done, group))
            assert drive(scheduler, smooth_loss(0), slots=3, limit=5) == first
        assert found[0] == found[1]

    def test_a_sampler_that_learns_is_not_asked_ahead(self) -> None:
        """Never for more new trials than can start."""
        trace = drive(self.scheduler(), smooth_loss(0), slots=3, learns=True, limit=self.limit)
        assert trace.proposed
        assert all(count <= want for want, count in trace.proposed)

    def test_no_new_trials_when_none_can_start(self) -> None:
        """``next(0)`` at the start proposes nothing."""

        def propose(count: int) -> list[Trial]:
            raise AssertionError(f"propose({count})")

        for learns in (False, True):
            scheduler = self.scheduler()
            scheduler.start(Rules(propose, by_fronts, SPACE, learns, 0))
            assert scheduler.next(0) is None
            assert not scheduler.done

    def test_parameters_are_json(self) -> None:
        """And tell two schedulers apart by name at least."""
        data = self.scheduler().to_json()
        assert json.loads(json.dumps(data)) == data
        assert data["name"] == type(self.scheduler()).__name__
