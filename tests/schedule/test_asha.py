"""ASHA against a naive re-implementation of the paper's Algorithm 2, and its cost per event."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Segment, Trial, TrialGroup, TrialStatus, Values
from penstock.schedule import ASHA, Outcome, Rules
from penstock.testing.schedulers import SPACE, by_fronts, drive, smooth_loss


class Naive:
    """Algorithm 2 line by line: rungs as lists, sorted anew at each call."""

    def __init__(self, trials: int, top: int, eta: int) -> None:
        self.trials, self.top, self.eta = trials, top, eta
        self.rungs: list[list[tuple[Values, int, bool]]] = [[] for _ in range(top + 1)]
        self.promoted: list[set[int]] = [set() for _ in range(top + 1)]
        self.made = 0

    def get_job(self) -> tuple[int, int] | None:
        for k in range(self.top - 1, -1, -1):
            count = len(self.rungs[k]) // self.eta
            good = [(values, trial) for values, trial, ok in self.rungs[k] if ok]
            if good and len(good[0][0]) > 1:
                good.sort(key=lambda entry: entry[1])
                good = [good[i] for i in by_fronts([values for values, _ in good])]
            else:
                good.sort()
            candidates = [trial for _, trial in good[:count]]
            promotable = [trial for trial in candidates if trial not in self.promoted[k]]
            if promotable:
                self.promoted[k].add(promotable[0])
                return promotable[0], k + 1
        if self.made < self.trials:
            self.made += 1
            return self.made - 1, 0
        return None

    def report(self, trial: int, rung: int, values: Values, ok: bool) -> None:
        self.rungs[rung].append((values, trial, ok))


@settings(deadline=None)  # timings are never asserted
@given(
    trials=st.integers(1, 60),
    eta=st.integers(2, 4),
    top=st.integers(0, 3),
    slots=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([3, 1000]),  # few values: many ties
    failures=st.sampled_from([0.0, 0.2]),
    objectives=st.sampled_from([1, 1, 2]),
)
def test_asha_is_algorithm_2(
    trials: int, eta: int, top: int, slots: int, seed: int, levels: int, failures: float, objectives: int
) -> None:
    random = Random(seed)
    made: list[Trial] = []

    def propose(count: int) -> list[Trial]:
        new = [Trial(len(made) + i, {}, 0) for i in range(count)]
        made.extend(new)
        return new

    asha = ASHA(max_epochs=2 * eta**top, min_epochs=2, eta=eta, trials=trials)
    asha.start(Rules(propose, by_fronts, SPACE, True, 0))
    naive = Naive(trials, top, eta)
    running: list[tuple[int, int]] = []
    while True:
        jobs = []
        while len(jobs) < slots - len(running) and (job := naive.get_job()) is not None:
            jobs.append(job)
        group = asha.next(slots - len(running))
        segments = () if group is None else group.segments
        assert [(s.trial.id, s.start, s.until, s.last) for s in segments] == [
            (trial, 2 * eta ** (rung - 1) if rung else 0, 2 * eta**rung, rung == top) for trial, rung in jobs
        ]
        running += jobs
        if not running:
            break
        trial, rung = running.pop(random.randrange(len(running)))
        ok = random.random() >= failures
        values = tuple(float(random.randrange(levels)) for _ in range(objectives))
        naive.report(trial, rung, values, ok)
        status = (TrialStatus.COMPLETED if rung == top else TrialStatus.PAUSED) if ok else TrialStatus.FAILED
        asha.ended(Outcome(trial, status, 2 * eta**rung, values if ok else None))
    assert asha.done
    left = {t for k in range(top) for _, t, ok in naive.rungs[k] if ok and t not in naive.promoted[k]}
    assert set(asha.drops()) == left
    assert not asha.drops()


def test_worst_case_of_the_order_still_fills_the_rungs() -> None:
    """81 trials, 27 epochs: at the end at least 27, 9 and 3 have been promoted, whoever came first."""
    for reverse in (False, True):
        trace = drive(ASHA(), lambda t, e, r=reverse: (float(-t.id if r else t.id),), slots=1, in_order=True)
        reached = {e: sum(s.until == e for s in trace.segments) for e in (1, 3, 9, 27)}
        assert reached[1] == 81
        if not reverse:  # the best come first: no promotion is wasted
            assert (reached[3], reached[9], reached[27]) == (27, 9, 3)
        else:
            assert reached[3] >= 27
            assert reached[9] >= 9
            assert reached[27] >= 3


def test_slots_are_never_idle_while_there_are_new_trials() -> None:
    trace = drive(ASHA(trials=200), smooth_loss(3), slots=8)
    proposing = [sum(s.start == 0 for s in group.segments) for _, group in trace.groups]
    last_new = max(i for i, new in enumerate(proposing) if new)
    for want, group in trace.groups[:last_new]:
        assert len(group.segments) == want


def test_brackets_share_trials_like_hyperband() -> None:
    trace = drive(ASHA(max_epochs=81, trials=1430, brackets=5), smooth_loss(0), slots=50)
    first = [s.until for s in trace.segments if s.start == 0]
    counts = [first.count(e) for e in (1, 3, 9, 27, 81)]
    # Without rounding Hyperband starts 81, 33.75, 15, 7.5 and 5 trials: 142.25 per iteration.
    for count, share in zip(counts, (81, 33.75, 15, 7.5, 5), strict=True):
        assert count == pytest.approx(1430 * share / 142.25, abs=1.5)


class Counted(float):
    """A float that counts its comparisons."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)

    def __gt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__gt__(self, other)

    __hash__ = float.__hash__


def test_comparisons_per_event_stay_flat() -> None:
    """Logarithmic: eight times the trials may add a few comparisons, never eight times as many."""
    per_event = []
    for trials in (250, 2000):
        Counted.comparisons = 0
        random = Random(0)
        made: list[Trial] = []

        def propose(count: int, made: list[Trial] = made) -> list[Trial]:
            made.extend(new := [Trial(len(made) + i, {}, 0) for i in range(count)])
            return new

        def order(values: object) -> list[int]:
            raise AssertionError("a rung was sorted anew")

        asha = ASHA(max_epochs=81, trials=trials)
        asha.start(Rules(propose, order, SPACE, False, 0))
        running: list[tuple[int, int]] = []
        events = 0
        while not asha.done:
            group = asha.next(10 - len(running))
            if group is not None:
                running.extend((s.trial.id, s.until or 0) for s in group.segments)
            if running:
                trial, until = running.pop(random.randrange(len(running)))
                events += 1
                asha.ended(Outcome(trial, TrialStatus.PAUSED, until, (Counted(random.random()),)))
        per_event.append(Counted.comparisons / events)
    assert per_event[1] < per_event[0] + 4 * 3 * 5  # log2(8) more levels for each search in each rung
    assert per_event[1] < 2 * per_event[0]


def test_several_objectives_are_ranked_rarely_when_there_are_many() -> None:
    calls: list[int] = []

    def order(values: list[Values]) -> list[int]:
        calls.append(len(values))
        return sorted(range(len(values)), key=lambda i: sum(values[i]))

    made: list[Trial] = []

    def propose(count: int) -> list[Trial]:
        made.extend(new := [Trial(len(made) + i, {}, 0) for i in range(count)])
        return new

    asha = ASHA(max_epochs=9, trials=3000)
    asha.start(Rules(propose, order, SPACE, False, 0))  # type: ignore[arg-type]
    random = Random(1)
    running: list[tuple[int, int]] = []
    promoted: set[int] = set()
    first_rung: dict[int, Values] = {}
    while not asha.done:
        group = asha.next(1)
        if group is not None:
            running.extend((s.trial.id, s.until or 0) for s in group.segments)
            promoted.update(s.trial.id for s in group.segments if s.until == 3)
        if running:
            trial, until = running.pop()
            # The last ones are the best: they must be ranked though the rung hardly grows any more.
            scale = 0.001 if trial >= 2980 else 1.0
            values = (scale * random.random(), scale * random.random())
            if until == 1:
                first_rung[trial] = values
            asha.ended(Outcome(trial, TrialStatus.PAUSED, until, values))
    best = sorted(first_rung, key=lambda t: sum(first_rung[t]))[:1000]
    assert set(best) <= promoted
    assert sum(calls) < 3000 * 64 * 6  # each result is ranked a bounded number of times, not 3000 times


def test_a_trial_without_a_value_is_given_up_at_once() -> None:
    """It ran to its rung's end but nothing of it counts (its energy was not metered, it violates a limit)."""
    trials = iter([Trial(i, {}, 0) for i in range(6)])
    scheduler = ASHA(max_epochs=9, trials=6)
    scheduler.start(Rules(lambda n: [next(trials) for _ in range(n)], by_fronts, SPACE, False, 0))
    group = scheduler.next(6)
    assert group is not None
    for segment in group.segments:
        number = segment.trial.id
        scheduler.ended(Outcome(number, TrialStatus.PAUSED, 1, None if number < 2 else (float(number),)))
    assert scheduler.drops() == [0, 1]
    promoted = scheduler.next(6)
    assert promoted is not None
    assert [segment.trial.id for segment in promoted.segments] == [
        2,
        3,
    ]  # two of six: those without count as worst


def test_a_question_that_gets_no_answer_changes_nothing() -> None:
    """A journal tells of groups alone: what a resume asks again are the questions that were answered."""

    def by_sum(values: Sequence[Values]) -> list[int]:
        return sorted(range(len(values)), key=lambda i: sum(values[i]))

    def propose(count: int) -> list[Trial]:
        made.extend(new := [Trial(len(made) + i, {}, 0) for i in range(count)])
        return new

    def started() -> ASHA:
        made.clear()
        asha = ASHA(max_epochs=4, eta=2, trials=300)
        asha.start(Rules(propose, by_sum, SPACE, False, 0))
        return asha

    made: list[Trial] = []
    journal: list[tuple[int, TrialGroup] | Outcome] = []
    running: list[Segment] = []
    random = Random(4)
    asha = started()
    while not asha.done:
        want = 16 - len(running)
        group = asha.next(want)
        if group is not None:
            journal.append((want, group))
            running.extend(group.segments)
        for _ in range(min(len(running), random.randrange(9))):
            segment = running.pop(random.randrange(len(running)))
            status = TrialStatus.COMPLETED if segment.last else TrialStatus.PAUSED
            values = random.random(), random.random()
            outcome = Outcome(segment.trial.id, status, segment.until or 0, values)
            journal.append(outcome)
            asha.ended(outcome)
    again = started()
    for entry in journal:
        if isinstance(entry, Outcome):
            again.ended(entry)
        else:
            assert again.next(entry[0]) == entry[1]
