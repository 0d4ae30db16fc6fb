"""The fold against a model that plays studies and keeps its own books."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import (
    Checkpoint,
    Dropped,
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Saved,
    Segment,
    SessionClosed,
    SessionOpened,
    Share,
    Source,
    Started,
    StudyState,
    Submitted,
    Trial,
    TrialStatus,
    summary,
)
from penstock.goal import Goal


@dataclass
class Play:
    """Plays a study at random; what it knows of the outcome doesn't come from the fold."""

    seed: int
    events: list[Event] = field(default_factory=list)
    status: dict[int, str] = field(default_factory=dict)
    epochs: Counter[int] = field(default_factory=Counter)
    behind: Counter[int] = field(default_factory=Counter)
    reports: int = 0
    trained: int = 0
    joules: float = 0.0
    busy_s: Counter[int] = field(default_factory=Counter)
    train_s: Counter[int] = field(default_factory=Counter)
    spent_s: float = 0.0
    now_s: float = 1.7e9
    running_since_s: dict[int, float] = field(default_factory=dict)

    def run(self, steps: int) -> "Play":
        rng = random.Random(self.seed)
        self.add(SessionOpened(self.now_s))
        for _ in range(steps):
            self.now_s += (passed_s := rng.choice([0.0, 0.25, 1.0]))
            self.spent_s += passed_s
            self.step(rng)
        return self

    def add(self, event: Event) -> None:
        self.events.append(event)

    def train(self, trial: int, epoch: int) -> None:
        """Every epoch counts once, however often it is run."""
        self.trained += max(0, epoch - self.behind[trial])
        self.behind[trial] = max(epoch, self.behind[trial])

    def pick(self, rng: random.Random, *status: str) -> int | None:
        among = [trial for trial, each in self.status.items() if each in status]
        return rng.choice(among) if among else None

    def step(self, rng: random.Random) -> None:
        what = rng.random()
        if what < 0.2 or not self.status:
            first = len(self.status)
            trials = range(first, first + rng.randrange(1, 4))
            self.add(
                Submitted(
                    self.now_s, len(trials), tuple(Segment(Trial(i, {"x": i}, i), until=9) for i in trials)
                )
            )
            self.status.update(dict.fromkeys(trials, "waiting"))
        elif what < 0.4 and (trial := self.pick(rng, "waiting")) is not None:
            self.add(Started(self.now_s, trial, shares=(Share("cpu:0"),)))
            self.status[trial] = "running"
            self.running_since_s[trial] = self.now_s
        elif what < 0.65 and (trial := self.pick(rng, "running")) is not None:
            # After a retry a trial reports epochs again that it has reported before.
            # One may not report every epoch.
            epoch = rng.randrange(max(1, self.epochs[trial] - 1), self.epochs[trial] + 3)
            train_s = rng.choice([None, 0.5])
            self.busy_s[trial] += self.now_s - self.running_since_s[trial]  # told while it runs
            self.running_since_s[trial] = self.now_s
            energy = Measurement(rng.randrange(100), "J", Source.MEASURED) if rng.random() < 0.7 else None
            self.add(Reported(self.now_s, trial, epoch, {"loss": rng.random()}, train_s, energy))
            self.train_s[trial] += train_s or 0.0
            self.joules += energy.value if energy else 0
            if epoch > self.epochs[trial]:
                self.train(trial, epoch)
                self.epochs[trial] = epoch
                self.reports += 1
        elif what < 0.85 and (trial := self.pick(rng, "running")) is not None:
            status = rng.choice(["completed", "paused", "stopped", "failed"])
            retry = status == "failed" and rng.random() < 0.5
            # It may have trained on after its last report.
            epoch = self.epochs[trial] + rng.choice([0, 0, 1, 3])
            self.train(trial, epoch)
            self.add(Ended(self.now_s, trial, TrialStatus(status), epoch, retry=retry))
            self.status[trial] = "waiting" if retry else status
            self.busy_s[trial] += self.now_s - self.running_since_s.pop(trial)
        elif what < 0.9 and (trial := self.pick(rng, "paused")) is not None:
            if rng.random() < 0.5:
                self.add(Dropped(self.now_s, trial))
                self.status[trial] = "stopped"
            else:
                self.add(
                    Submitted(self.now_s, 1, (Segment(Trial(trial, {"x": trial}, trial), start=3, until=27),))
                )
                self.status[trial] = "waiting"
        elif what < 0.93:
            self.add(Noted(self.now_s, "topic", {}))
        elif what < 0.96 and (trial := self.pick(rng, "running")) is not None:
            self.add(Saved(self.now_s, trial, self.epochs[trial], "path"))
        else:  # the driver dies or closes; a later one goes on
            if rng.random() < 0.5:
                self.add(SessionClosed(self.now_s, "interrupted"))
            else:
                self.spent_s -= self.now_s - self.events[-1].time_s  # nobody noted that time
            for trial, since_s in self.running_since_s.items():  # it ran as long as there was news
                self.busy_s[trial] += self.events[-1].time_s - since_s
            self.now_s += 1000.0
            self.add(SessionOpened(self.now_s))
            for trial, status in self.status.items():
                if status == "running":
                    self.status[trial] = "waiting"
            self.running_since_s.clear()


def told(state: StudyState) -> dict[str, object]:
    """Everything the state says, comparable."""
    return {
        "summary": summary(state),
        "trials": state.trials,
        "notes": state.notes,
        "sessions": state.sessions,
        "closed": state.closed,
        "times": (state.first_s, state.last_s),
    }


plays = st.builds(lambda seed, steps: Play(seed).run(steps), st.integers(0, 2**32), st.integers(0, 120))


@settings(deadline=None)
@given(plays)
def test_the_fold_agrees_with_the_books(play: Play) -> None:
    state = StudyState.of(play.events)
    state.validate()
    assert {trial: record.status.value for trial, record in state.trials.items()} == play.status
    assert {name: getattr(state.counts, name) for name in set(play.status.values())} == Counter(
        play.status.values()
    )
    assert state.counts.total == len(play.status)
    assert {trial: record.epoch for trial, record in state.trials.items() if record.epoch} == +play.epochs
    assert state.epochs == play.trained
    assert {trial: record.trained for trial, record in state.trials.items() if record.trained} == +play.behind
    assert state.reports == play.reports
    assert (0.0 if state.energy is None else state.energy.joules) == pytest.approx(play.joules)
    assert sum(r.energy.joules for r in state.trials.values() if r.energy) == pytest.approx(play.joules)
    for trial, record in state.trials.items():
        assert record.train_s == play.train_s[trial]
        assert record.busy_s == pytest.approx(play.busy_s[trial], abs=1e-5)
        assert record.device_s == pytest.approx(play.busy_s[trial], abs=1e-5)  # each on a whole device
    assert state.device_s == pytest.approx(sum(play.busy_s.values()), abs=1e-4)
    last_gap_s = play.now_s - play.events[-1].time_s  # steps at the end that noted nothing
    assert state.spent_s == pytest.approx(play.spent_s - last_gap_s, abs=1e-4)


@settings(deadline=None)
@given(plays, st.data())
def test_a_fold_can_be_cut_anywhere(play: Play, data: st.DataObject) -> None:
    """Folding a part and then the rest is folding the whole, and every part is a valid state."""
    cut = data.draw(st.integers(0, len(play.events)))
    state = StudyState.of(play.events[:cut])
    state.validate()
    for event in play.events[cut:]:
        state.apply(event)
    assert told(state) == told(StudyState.of(play.events))


def is_repeatable(event: Event) -> bool:
    """Events a doubled message may bring; energy and time count each time, and a retry is a decision."""
    if isinstance(event, Reported):
        return event.energy is None and event.train_s is None
    return isinstance(event, Started | Saved | Dropped) or (isinstance(event, Ended) and not event.retry)


@settings(deadline=None)
@given(plays, st.data())
def test_doubled_events_change_nothing(play: Play, data: st.DataObject) -> None:
    doubled: list[Event] = []
    for event in play.events:
        doubled.append(event)
        if is_repeatable(event) and data.draw(st.booleans()):
            doubled.append(event)
    assert told(StudyState.of(doubled)) == told(StudyState.of(play.events))


def test_apply_says_whether_it_was_news() -> None:
    state = StudyState.of([SessionOpened(0.0), Submitted(0.0, 1, (Segment(Trial(0, {}, 0), until=3),))])
    report = Reported(1.0, 0, 1, {"loss": 1.0})
    assert state.apply(Started(0.0, 0))
    assert not state.apply(Started(0.0, 0))
    assert state.apply(report)
    assert not state.apply(report)
    ended = Ended(2.0, 0, TrialStatus.COMPLETED, 1)
    assert state.apply(ended)
    assert not state.apply(ended)
    assert not state.apply(Dropped(3.0, 0))
    assert state.trials[0].ended_s == 2.0


def test_energy_outside_of_epochs_counts_once_for_each_end() -> None:
    drawn = Measurement(5.0, "J", Source.MEASURED, 0.1)
    state = StudyState.of(
        [
            Submitted(0.0, 1, (Segment(Trial(0, {}, 0)),)),
            Started(0.0, 0),
            Ended(1.0, 0, TrialStatus.FAILED, 0, retry=True, energy=drawn),
            Started(1.0, 0),
            Reported(2.0, 0, 1, {"loss": 1.0}, 1.0, Measurement(2.0, "J", Source.MEASURED, 0.1)),
            Ended(3.0, 0, TrialStatus.COMPLETED, 1, energy=drawn),
        ]
    )
    assert state.energy is not None
    assert state.trials[0].energy is not None
    assert state.energy.joules == state.trials[0].energy.joules == 12.0
    assert state.energy.uncertainty == pytest.approx(0.1)
    assert not state.apply(Ended(3.0, 0, TrialStatus.COMPLETED, 1, energy=drawn))
    assert state.energy is not None
    assert state.energy.joules == 12.0


def test_time_between_sessions_is_not_spent() -> None:
    state = StudyState.of(
        [
            SessionOpened(100.0),
            Noted(110.0, "a", {}),
            SessionOpened(5000.0),
            SessionClosed(5003.0, "finished"),
        ]
    )
    assert state.spent_s == 13.0
    assert state.closed is not None


def test_an_epoch_that_was_run_again_is_spent_twice_and_compared_once() -> None:
    def report(epoch: int) -> Reported:
        return Reported(1.0, 0, epoch, {"loss": 1.0}, 3.0, Measurement(2.0 + epoch, "J", Source.MEASURED))

    opened = SessionOpened(0.0, note={"once": True})
    segment = Segment(Trial(0, {}, 0), until=3)
    events = [opened, Submitted(0.0, 1, (segment,)), Started(0.0, 0), report(1), report(2)]
    killed = StudyState.of([*events, SessionOpened(2.0), Started(2.0, 0), report(2), report(3)])
    undisturbed = StudyState.of([*events, report(3)])
    goal = Goal.of(["energy_j", "train_s"], None)
    assert goal.score(killed.trials[0]) == goal.score(undisturbed.trials[0]) == (12.0, 9.0)
    assert goal.score(killed.trials[0], once=False) == (16.0, 12.0)
    assert killed.energy is not None
    assert killed.energy.joules == 16.0
    assert killed.once
    assert not StudyState.of([SessionOpened(0.0), opened]).once  # begun by an earlier release


@pytest.mark.parametrize(("reports", "trained"), [([5, 6], 2), ([6], 2), ([1, 2, 3, 4, 5], 5)])
def test_epochs_of_the_trial_that_another_was_copied_from_count_once(
    reports: list[int], trained: int
) -> None:
    """As PBT replaces a member that failed; where no checkpoint was saved, it starts from the beginning."""
    first = Segment(Trial(0, {}, 0), until=4)
    copy = Segment(Trial(1, {}, 1, 0), start=4, until=8, copy_from=Checkpoint(0, 4))
    events = [SessionOpened(0.0), Submitted(0.0, 1, (first,)), Started(0.0, 0, shares=(Share("cpu:0"),))]
    events += [Reported(1.0, 0, epoch, {"loss": 1.0}) for epoch in (1, 2, 3, 4)]
    events += [Submitted(2.0, 1, (copy,)), Started(2.0, 1, start=4, shares=(Share("cpu:0"),))]
    events += [Reported(3.0, 1, epoch, {"loss": 1.0}) for epoch in reports]
    state = StudyState.of(events)
    state.validate()
    assert state.epochs == 4 + trained


@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_copy_goes_on_by_itself(seed: int, cut: float) -> None:
    """By the player's own books: neither of the two counts what the other is told."""
    play = Play(seed).run(60)
    at = int(cut * len(play.events))
    state = StudyState.of(play.events[:at])
    before = state.energy, dict(summary(state)), [len(r.reports) for r in state.trials.values()]
    twin = state.copy()
    for event in play.events[at:]:
        twin.apply(event)
    twin.validate()
    assert (state.energy, dict(summary(state)), [len(r.reports) for r in state.trials.values()]) == before
    for event in play.events[at:]:
        state.apply(event)
    for each in (state, twin):
        assert (0.0 if each.energy is None else each.energy.joules) == pytest.approx(play.joules)
        assert each.reports == play.reports
