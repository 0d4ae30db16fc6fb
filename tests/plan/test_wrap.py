"""Trials that pause: in closed form, against McNaughton's optimum, and as a promise that a simulated cluster keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core import Device, Free, Plan, Running, Share, Turn
from penstock.plan import fluid, lower_bound_s
from penstock.plan._fluid import _follow, _may_pause
from penstock.plan._pack import Allotment
from penstock.plan._relay import take_turns
from penstock.plan._wrap import wrap
from penstock.predict import Overhead
from penstock.testing.planning import Tally, placements, run_group


def run_turns(
    turns: Sequence[Turn], work_s: Sequence[float], *, devices: int, truth: Overhead, epochs: int
) -> Tally:
    """The turns on a simulated cluster, which asserts that no device is given out twice and nobody is lost."""
    planner = _follow(Allotment(truth), "relay", runtime=None)
    return run_group(planner, work_s, devices=devices, truth=truth, epochs=epochs, pausable=True, turns=turns)


def test_three_on_two_devices_in_closed_form() -> None:
    """One device has the first trial and the second half of another one, the other its first half and the third."""
    end_s, turns = wrap([100.0] * 3, [10] * 3, devices=2, overhead=Overhead(epsilon_s=4.0), within_s=1e9)
    assert end_s == pytest.approx(100 + 4 + 50)
    assert turns == [Turn(0), Turn(1, 1, 5, 0.0), Turn(2), Turn(1, start=5)]


def test_fifty_on_thirty_two_devices_end_near_what_perfect_scaling_would_allow() -> None:
    """500 epochs of 10 s on 32 devices: 16 on each (10 of one trial, 6 of others), and one pause of 3 s before the
    last ones. Without pauses somebody has to spread, at a loss of a sixth."""
    overhead = Overhead(2.7, 1.2, 1, 4, 3.0)
    planner = fluid(alpha=2.7, beta=1.2, c=1, d=4, epsilon_s=3.0)
    tally = run_group(planner, [100.0] * 50, devices=32, truth=overhead, pausable=True)
    assert tally.pauses
    assert tally.makespan_s == pytest.approx(163.0)
    before = run_group(planner, [100.0] * 50, devices=32, truth=overhead)
    assert not before.pauses
    assert before.makespan_s > 1.09 * tally.makespan_s


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 4))
def test_epochs_of_one_second_end_as_soon_as_mcnaughton_says(counts: list[int], devices: int) -> None:
    """With pauses that cost nothing: after the mean work of a device, or the longest trial, whatever is more."""
    end_s, turns = wrap(
        [float(count) for count in counts], counts, devices=devices, overhead=Overhead(), within_s=1e9
    )
    assert end_s == max(math.ceil(sum(counts) / devices), max(counts))
    for index, count in enumerate(counts):
        mine = sorted((turn for turn in turns if turn.trial == index), key=lambda turn: turn.start)
        done = [turn.epochs or count - turn.start for turn in mine]
        assert sum(done) == count
        assert [turn.start for turn in mine] == [0, *done[:-1]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([20.0, 35.0, 50.0]) | st.floats(5, 90), min_size=1, max_size=14),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.1, 1.3]),
    st.sampled_from([1.0, 1.05, 1.2]),
    st.sampled_from([0.0, 2.0]),
    st.integers(1, 10),
)
def test_a_cluster_keeps_what_was_promised(
    work_s: list[float],
    devices: int,
    c: int,
    d: int,
    alpha: float,
    beta: float,
    epsilon_s: float,
    epochs: int,
) -> None:
    overhead = Overhead(alpha, beta, c, d, epsilon_s).within_bounds()
    end_s, turns = wrap(work_s, [epochs] * len(work_s), devices=devices, overhead=overhead, within_s=1e9)
    assert end_s >= lower_bound_s(work_s, devices=devices, overhead=overhead) * (1 - 1e-6)
    tally = run_turns(turns, work_s, devices=devices, truth=overhead, epochs=epochs)
    # With parts of devices, who is on which one depends on who ends first, and then some run faster than promised.
    whole = all(turn.width >= 1 for turn in turns)
    assert tally.makespan_s <= (end_s if whole else end_s + epsilon_s + max(work_s)) * (1 + 1e-9)
    assert tally.pauses == sum(turn.start > 0 for turn in turns)
    assume(whole and not tally.resizes)
    for index, alone_s in enumerate(work_s):
        mine = [stay for stay in tally.stays if stay.trial == index]
        ran_s = sum((s.end_s - s.begin_s) * overhead.speed(float(len(s.shares))) for s in mine)
        paused_s = sum(epsilon_s * overhead.speed(float(len(s.shares))) for s in mine[1:])
        assert ran_s - paused_s == pytest.approx(alone_s)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(5, 90), min_size=2, max_size=10),
    st.lists(st.floats(0.6, 1.6), min_size=10, max_size=10),
    st.integers(1, 4),
)
def test_nobody_is_lost_where_runtimes_were_guessed_wrong(
    guesses_s: list[float], off: list[float], devices: int
) -> None:
    truth = Overhead(epsilon_s=2.0)
    work_s = [each_s * factor for each_s, factor in zip(guesses_s, off, strict=False)]
    tally = run_group(
        fluid(epsilon_s=2.0), work_s, devices=devices, truth=truth, expected_s=guesses_s, pausable=True
    )
    assert set(tally.ends_s) == set(range(len(work_s)))
    assert tally.makespan_s >= lower_bound_s(work_s, devices=devices, overhead=truth) * (1 - 1e-6)


@pytest.mark.parametrize("off", [0.0, 0.1, 0.3])
def test_a_pause_must_promise_more_than_guesses_may_be_off(off: float) -> None:
    """Three on two devices: one and a half trials on each instead of two are a quarter less."""
    tally = run_group(
        fluid(epsilon_s=0.1),
        [100.0] * 3,
        devices=2,
        truth=Overhead(epsilon_s=0.1),
        epochs=10,
        pausable=True,
        error=off,
    )
    assert bool(tally.pauses) == (off < 0.25)
    assert tally.makespan_s == pytest.approx(150.1 if tally.pauses else 200.0)


def test_nothing_is_told_to_pause_that_could_not_go_on() -> None:
    group = placements([100.0] * 3, epochs=10, pausable=True)
    free = tuple(Free(Device(f"cpu:{i}")) for i in range(2))
    assert _may_pause(Plan(waiting=tuple(group), free=free))
    assert not _may_pause(Plan(waiting=(*group[:2], replace(group[2], pausable=False)), free=free))
    assert not _may_pause(Plan(waiting=(*group[:2], replace(group[2], exclusive=True)), free=free))
    assert not _may_pause(Plan(waiting=tuple(group), free=(free[0], Free(Device("cuda:0", kind="cuda")))))
    small = tuple(Free(Device(f"cuda:{i}", kind="cuda", memory_bytes=10)) for i in range(2))
    assert not _may_pause(Plan(waiting=(*group[:2], replace(group[2], memory_bytes=11)), free=small))


def test_who_has_not_paused_yet_is_passed_over() -> None:
    """Its second turn comes first in the order, but it still runs; the others must not wait for it."""
    turns = (Turn(0, 1, 3, 0.0), Turn(0, start=3), Turn(1))
    first, second = (replace(item, turns=turns) for item in placements([100.0] * 2, epochs=10, pausable=True))
    devices = {name: Device(name) for name in ("cpu:0", "cpu:1")}
    leaving = (Share("cpu:0"),)
    plan = Plan(
        waiting=(second,),
        free=(Free(devices["cpu:1"]),),
        running=(Running(replace(first, shares=()), 80.0, None, True, leaving),),
        devices=devices,
    )
    after = take_turns(plan, turns, Overhead())
    assert [item.segments[0].trial.id for item in after.placed] == [1]
    assert not after.resized
