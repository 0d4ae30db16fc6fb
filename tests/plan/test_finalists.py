"""Finalists among new trials: devices of their own, soon; nobody lost, nothing given out twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Device, Free, Placement, Plan, PlanPass, Running, Segment, Share, Trial
from penstock.plan import fluid
from penstock.plan._finalists import finalists
from penstock.predict import Overhead
from penstock.testing.planning import SimulatedCluster, placements

SHARED = Overhead(alpha=1.6, beta=1.05, max_sharing=2, max_devices=4, epsilon_s=3.0)
EPOCHS = 10


def planner(overhead: Overhead) -> tuple[PlanPass, ...]:
    return fluid(
        c=overhead.max_sharing,
        d=overhead.max_devices,
        alpha=overhead.alpha,
        beta=overhead.beta,
        epsilon_s=overhead.epsilon_s,
    )


def group(count: int, first: int, *, work_s: float = 100.0, promoted: bool = False) -> list[Placement]:
    made = placements([work_s] * count, max_devices=4, first=first, epochs=EPOCHS, pausable=True)
    return [replace(each, promoted=promoted) for each in made]


def submit(cluster: SimulatedCluster, members: list[Placement], work_s: float = 100.0) -> None:
    """A second after the last: as a group of its own."""
    cluster.now_s += 1.0
    trials = [each.segments[0].trial.id for each in members]
    cluster.submit(members, dict.fromkeys(trials, work_s), dict.fromkeys(trials, EPOCHS))
    cluster.replan()


def go_on(cluster: SimulatedCluster, until_s: float) -> None:
    """Up to this time, in which something must end or change."""
    while cluster.now_s < until_s:
        cluster.step()
        cluster.replan()


def finish(cluster: SimulatedCluster) -> None:
    while not cluster.idle:
        cluster.step()
        cluster.replan()
    assert not cluster.waiting, "trials starved"


def busy_cluster() -> SimulatedCluster:
    """Four devices on which eight of 24 new trials of 100 s share; they came in two groups."""
    cluster = SimulatedCluster(4, truth=SHARED, planner=planner(SHARED))
    work = dict.fromkeys(range(6), 100.0)
    cluster.submit(group(6, 0), work, dict.fromkeys(work, EPOCHS))
    submit(cluster, group(18, 6))
    return cluster


def test_new_trials_pause_for_a_finalist_and_it_gets_two_devices() -> None:
    cluster = busy_cluster()
    began_s = cluster.now_s
    before = {r.placement.segments[0].trial.id: r.placement.shares for r in cluster.running()}
    assert len(before) == 8  # two on each device
    submit(cluster, group(1, 100, promoted=True))
    finish(cluster)
    tally = cluster.tally
    # At the end of the first epoch, 10 s at 1 / 1.6 of the speed, four give two devices up: half of all.
    first = min((s for s in tally.stays if s.trial == 100), key=lambda s: s.begin_s)
    assert first.begin_s == pytest.approx(began_s + 16.0)
    assert [share.fraction for share in first.shares] == [1.0, 1.0]
    assert tally.pauses == 4
    # 100 s on two devices: 1.05 / 2 of it.
    assert tally.ends_s[100] == pytest.approx(began_s + 16.0 + 52.5)
    assert set(tally.ends_s) == {*range(24), 100}
    # Had it waited for a place to share, it would have begun when the others end.
    assert tally.ends_s[100] < began_s + 160.0


def test_promoted_trials_go_before_new_ones_that_wait() -> None:
    """Of another rung than the last: they get the first places that are free, shared ones, and nobody pauses."""
    cluster = busy_cluster()
    rung = [
        replace(each, segments=(replace(each.segments[0], last=False),))
        for each in group(2, 100, work_s=20.0, promoted=True)
    ]
    submit(cluster, rung, 20.0)
    go_on(cluster, 160.0)
    assert cluster.tally.pauses == 0
    running = {r.placement.segments[0].trial.id for r in cluster.running()}
    assert {100, 101} <= running | set(cluster.tally.ends_s)
    finish(cluster)


def test_where_all_were_promoted_nobody_makes_room() -> None:
    """The last round of a population: each of them is a finalist, and none is worth more than the others."""
    cluster = SimulatedCluster(4, truth=SHARED, planner=planner(SHARED))
    for first in (0, 4, 8):
        submit(cluster, group(4, first, promoted=True))
    finish(cluster)
    assert cluster.tally.pauses == 0
    assert len(cluster.tally.ends_s) == 12


def test_who_cannot_pause_is_left_alone() -> None:
    cluster = SimulatedCluster(2, truth=SHARED, planner=planner(SHARED))
    submit(cluster, [replace(each, pausable=False) for each in group(3, 0)])
    submit(cluster, [replace(each, pausable=False) for each in group(6, 3)])
    submit(cluster, group(1, 100, promoted=True))
    finish(cluster)
    assert cluster.tally.pauses == 0


def placement(trial: int, *, promoted: bool = True, last: bool = True, since_s: float = 0.0) -> Placement:
    segment = Segment(Trial(trial, {}, 0), start=9 if promoted else 0, until=27, last=last)
    return Placement((segment,), expected_s=10.0, max_devices=4, since_s=since_s, promoted=promoted)


def plan_of(running: list[Placement], waiting: list[Placement], devices: int) -> Plan:
    known = {f"d{i}": Device(f"d{i}") for i in range(devices)}
    runs = [Running(replace(p, shares=(Share(f"d{i}"),)), 10.0) for i, p in enumerate(running)]
    free = tuple(Free(device) for name, device in list(known.items())[len(running) :])
    return Plan(tuple(waiting), free, running=tuple(runs), devices=known)


def test_finalists_have_half_of_the_devices_the_oldest_first() -> None:
    new = placement(9, promoted=False, since_s=5.0)
    many = [placement(trial) for trial in (4, 2, 3, 1)]
    assert finalists(plan_of([], [new, *many], 6), SHARED) == {1: 2, 2: 1}
    assert finalists(plan_of([], [new, *many], 8), SHARED) == {1: 2, 2: 2}
    # Of one device nobody can have half.
    assert finalists(plan_of([], [new, *many], 1), SHARED) == {}
    # Where two devices are little faster than one, one is enough.
    costly = replace(SHARED, beta=1.2)
    assert finalists(plan_of([], [new, *many], 8), costly) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_there_are_none_without_others_that_wait_or_in_a_group_of_its_own() -> None:
    new = placement(9, promoted=False, since_s=5.0)
    assert finalists(plan_of([placement(1), new], [], 4), SHARED) == {}
    assert finalists(plan_of([], [placement(1), placement(2, promoted=False)], 4), SHARED) == {}
    assert finalists(plan_of([], [placement(1, last=False), new], 4), SHARED) == {}


@settings(max_examples=60, deadline=None)
@given(
    devices=st.integers(1, 9),
    alpha=st.floats(1.0, 1.9),
    beta=st.floats(1.0, 1.2),
    c=st.integers(1, 3),
    groups=st.lists(
        st.tuples(
            st.integers(1, 9),  # trials
            st.floats(1.0, 300.0),  # seconds
            st.booleans(),  # promoted
            st.booleans(),  # last
            st.booleans(),  # pausable
            st.integers(0, 5),  # events before the next group
        ),
        min_size=2,
        max_size=7,
    ),
)
def test_of_any_groups_all_trials_end(
    devices: int,
    alpha: float,
    beta: float,
    c: int,
    groups: list[tuple[int, float, bool, bool, bool, int]],
) -> None:
    """The cluster asserts that nothing is given out twice and no trial is lost; here that all of them end."""
    overhead = Overhead(alpha, beta, c, 4, 2.0)
    cluster = SimulatedCluster(devices, truth=overhead, planner=planner(overhead))
    first = 0
    for count, work_s, promoted, last, pausable, steps in groups:
        members = [
            replace(each, pausable=pausable, segments=(replace(each.segments[0], last=last),))
            for each in group(count, first, work_s=work_s, promoted=promoted)
        ]
        submit(cluster, members, work_s)
        first += count
        for _ in range(steps):
            cluster.step()
            cluster.replan()
    finish(cluster)
    assert set(cluster.tally.ends_s) == set(range(first))
