"""Halving and Hyperband against the published table, exact arithmetic and brute force."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Trial, TrialStatus, Values
from penstock.schedule import Halving, Hyperband, Outcome, Rules
from penstock.testing.schedulers import SPACE, Loss, Trace, by_fronts, drive, smooth_loss

# Li et al., JMLR 2018, Table 1: trials and epochs of each rung for R = 81 and eta = 3.
PUBLISHED = {
    4: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
    3: [(34, 3), (11, 9), (3, 27), (1, 81)],
    2: [(15, 9), (5, 27), (1, 81)],
    1: [(8, 27), (2, 81)],
    0: [(5, 81)],
}


def rungs_run(trace: Trace, prefix: str = "") -> dict[str, list[tuple[set[int], int, int]]]:
    """By bracket, the trials, start and end of each rung as they were really handed out."""
    brackets: dict[str, dict[str, list[tuple[set[int], int, int]]]] = {}
    for _, group in trace.groups:
        bracket, rung = group.label.rsplit(", ", 1)
        spans = {(s.start, s.until) for s in group.segments}
        assert len(spans) == 1
        start, until = spans.pop()
        assert until is not None
        numbers = {s.trial.id for s in group.segments}
        brackets.setdefault(bracket, {}).setdefault(rung, []).append((numbers, start, until))
    merged: dict[str, list[tuple[set[int], int, int]]] = {}
    for bracket, rungs in brackets.items():
        for parts in rungs.values():
            numbers = set().union(*(part[0] for part in parts))
            merged.setdefault(bracket, []).append((numbers, parts[0][1], parts[0][2]))
    return merged


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("slots", [1, 7, 200])
def test_hyperband_runs_the_published_table(learns: bool, slots: int) -> None:
    trace = drive(Hyperband(max_epochs=81, eta=3), smooth_loss(1), slots=slots, learns=learns)
    run = rungs_run(trace)
    assert {f"bracket {s}" for s in PUBLISHED} == set(run)
    for s, rows in PUBLISHED.items():
        assert [(len(numbers), until) for numbers, _, until in run[f"bracket {s}"]] == rows
        starts = [start for _, start, _ in run[f"bracket {s}"]]
        assert starts == [0, *(until for _, until in rows[:-1])]  # each rung goes on from its checkpoints
    assert len(trace.segments) == sum(n for rows in PUBLISHED.values() for n, _ in rows)


def test_hyperband_table_property() -> None:
    assert [list(rungs) for rungs in Hyperband().table] == list(PUBLISHED.values())
    assert [list(rungs) for rungs in Hyperband(brackets=2).table] == [PUBLISHED[4], PUBLISHED[3]]


@settings(deadline=None)  # timings are never asserted
@given(st.integers(1, 3000), st.integers(1, 40), st.integers(2, 10))
def test_hyperband_geometry_in_exact_arithmetic(max_epochs: int, min_epochs: int, eta: int) -> None:
    """floor(log) in floating point gives 4 rungs too few for 243 = 3**5: compare with fractions."""
    if min_epochs > max_epochs:
        return
    s_max = max(s for s in range(20) if Fraction(max_epochs, eta**s) >= min_epochs)
    table = Hyperband(max_epochs, eta, min_epochs).table
    assert len(table) == s_max + 1
    for s, rungs in zip(range(s_max, -1, -1), table, strict=True):
        n = ceil(Fraction((s_max + 1) * eta**s, s + 1))
        wanted = [(n * Fraction(1, eta**i), Fraction(max_epochs, eta ** (s - i))) for i in range(s + 1)]
        floors = [(max(1, int(size)), int(epochs)) for size, epochs in wanted]
        # A trial that is left alone halts no more until the end.
        assert list(rungs) == [row for i, row in enumerate(floors) if i in (0, s) or row[0] > 1]
        assert rungs[-1][1] == max_epochs
        assert rungs[0][1] >= min_epochs


@pytest.mark.parametrize(("max_epochs", "eta", "rungs"), [(243, 3, 6), (1000, 10, 4), (125, 5, 4), (1, 2, 1)])
def test_exact_powers_have_all_their_rungs(max_epochs: int, eta: int, rungs: int) -> None:
    halving = Halving(max_epochs, 1, eta)
    assert halving.rungs == tuple((eta ** (rungs - 1 - i), eta**i) for i in range(rungs))


def table_loss(table: list[list[int]], epochs: list[int]) -> Loss:
    """Losses from a table: row by trial, column by rung."""

    def loss(trial: Trial, epoch: int) -> Values:
        return (float(table[trial.id % len(table)][epochs.index(epoch)]),)

    return loss


def naive_halving(
    trials: list[int], sizes: list[int], epochs: list[int], loss: Loss, failed: set[tuple[int, int]]
) -> list[set[int]]:
    """Successive halving as one would write it down: sort, cut, again."""
    rungs = [set(trials)]
    alive = trials
    for rung, size in enumerate(sizes[1:]):
        results = [(loss(Trial(t, {}, 0), epochs[rung]), t) for t in alive if (t, epochs[rung]) not in failed]
        alive = sorted(t for _, t in sorted(results)[:size])
        if not alive:
            break
        rungs.append(set(alive))
    return rungs


@settings(deadline=None)  # timings are never asserted
@given(
    table=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=40),
    trials=st.integers(1, 60),
    eta=st.integers(2, 4),
    seed=st.integers(0, 1000),
    failures=st.sampled_from([0.0, 0.3]),
    slots=st.integers(1, 9),
    learns=st.booleans(),
)
def test_halving_is_naive_halving(
    table: list[list[int]], trials: int, eta: int, seed: int, failures: float, slots: int, learns: bool
) -> None:
    halving = Halving(max_epochs=eta**4, eta=eta, trials=trials)
    loss = table_loss(table, [eta**i for i in range(5)])
    trace = drive(halving, loss, seed=seed, failures=failures, slots=slots, learns=learns)
    failed = {(o.trial, o.epoch) for o in trace.outcomes if o.status is TrialStatus.FAILED}
    sizes, epochs = [n for n, _ in halving.rungs], [e for _, e in halving.rungs]
    run = rungs_run(trace)["halving"]
    assert [numbers for numbers, _, _ in run] == naive_halving(
        list(range(trials)), sizes, epochs, loss, failed
    )
    last = run[-1]
    assert last[2] == epochs[len(run) - 1]
    ended = {s.trial.id for s in trace.segments if s.until == eta**4}
    assert ended == {t for t, state in trace.status.items() if state is TrialStatus.COMPLETED} | {
        t for t, e in failed if e == eta**4
    }


@settings(deadline=None, max_examples=40)  # timings are never asserted
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 30), failures=st.sampled_from([0.0, 0.2]))
def test_hyperband_is_naive_halving_in_each_bracket(seed: int, slots: int, failures: float) -> None:
    hyperband = Hyperband(max_epochs=27, iterations=2)
    loss = smooth_loss(seed)
    trace = drive(hyperband, loss, seed=seed, slots=slots, failures=failures)
    failed = {(o.trial, o.epoch) for o in trace.outcomes if o.status is TrialStatus.FAILED}
    run = rungs_run(trace)
    first = 0
    for iteration in range(2):
        for s, rungs in zip(range(3, -1, -1), hyperband.table, strict=True):
            sizes, epochs = [n for n, _ in rungs], [e for _, e in rungs]
            trials = list(range(first, first + sizes[0]))
            first += sizes[0]
            got = [numbers for numbers, _, _ in run[f"iteration {iteration}, bracket {s}"]]
            assert got == naive_halving(trials, sizes, epochs, loss, failed)


@settings(deadline=None, max_examples=40)  # timings are never asserted
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 20), learns=st.booleans())
def test_the_best_survives_where_curves_do_not_cross(seed: int, slots: int, learns: bool) -> None:
    floors = smooth_loss(seed)

    def loss(trial: Trial, epoch: int) -> Values:
        return (floors(trial, 10**9)[0] + 1 / epoch,)

    for scheduler in (Halving(), Hyperband(max_epochs=27)):
        trace = drive(scheduler, loss, seed=seed, slots=slots, learns=learns)
        completed = {t for t, state in trace.status.items() if state is TrialStatus.COMPLETED}
        best = min(trace.status, key=lambda t: loss(Trial(t, {}, 0), 27))
        assert best in completed
        for numbers, _, _ in (rungs[0] for rungs in rungs_run(trace).values()):
            assert min(numbers, key=lambda t: loss(Trial(t, {}, 0), 27)) in completed


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("slots", [2, 5, 13])
def test_no_slot_is_idle_before_the_last_bracket_began(learns: bool, slots: int) -> None:
    """While one bracket waits at a rung, the next one fills the slots."""
    made: list[Trial] = []

    def propose(count: int) -> list[Trial]:
        new = [Trial(len(made) + i, {}, 0) for i in range(count)]
        made.extend(new)
        return new

    hyperband = Hyperband(max_epochs=27, iterations=3)
    total = 3 * sum(rungs[0][0] for rungs in hyperband.table)
    hyperband.start(Rules(propose, by_fronts, SPACE, learns, 0))
    waiting: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    while not hyperband.done or running or waiting:
        while (group := hyperband.next(max(0, slots - len(running) - len(waiting)))) is not None:
            waiting.extend((s.trial.id, s.until or 0) for s in group.segments)
        taken = slots - len(running)
        running, waiting = running + waiting[:taken], waiting[taken:]
        if len(made) < total:
            assert len(running) == slots
        # The longest first, which is the worst for barriers.
        trial, until = running.pop(max(range(len(running)), key=lambda i: running[i][0] % 7))
        hyperband.ended(Outcome(trial, TrialStatus.PAUSED, until, (float(trial * 7919 % 101),)))
    assert len(made) == total


@pytest.mark.parametrize("iterations", [1, 4])
def test_brackets_of_a_sampler_that_does_not_learn_are_whole_groups(iterations: int) -> None:
    trace = drive(Hyperband(max_epochs=9, iterations=iterations), smooth_loss(0), slots=2)
    firsts = [group for _, group in trace.groups if group.segments[0].start == 0]
    assert [len(group.segments) for group in firsts] == [9, 5, 3] * iterations


def test_the_oldest_bracket_goes_on_first() -> None:
    """When several outcomes arrive before the next question and two rungs are over."""
    made: list[Trial] = []

    def propose(count: int) -> list[Trial]:
        made.extend(new := [Trial(len(made) + i, {}, 0) for i in range(count)])
        return new

    hyperband = Hyperband(max_epochs=9)
    hyperband.start(Rules(propose, by_fronts, SPACE, False, 0))
    old, young = hyperband.next(20), hyperband.next(11)
    assert old is not None
    assert young is not None
    for segment in (*young.segments, *old.segments):  # the younger one's rung is over first
        outcome = Outcome(
            segment.trial.id, TrialStatus.PAUSED, segment.until or 0, (float(segment.trial.id),)
        )
        hyperband.ended(outcome)
    labels = [group.label for _ in range(2) if (group := hyperband.next(0)) is not None]
    assert labels == ["bracket 2, rung 1", "bracket 1, rung 1"]
