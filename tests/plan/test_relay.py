"""Turns on devices: in closed form, against brute force, and as a promise that holds when trials end sooner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core import Device, Free, Plan, Resize, Running, Share, Turn
from penstock.plan import fluid, lower_bound_s
from penstock.plan._fluid import _follow, _takes_turns
from penstock.plan._pack import Allotment
from penstock.plan._relay import relay, take_turns
from penstock.predict import Overhead
from penstock.testing.planning import SimulatedCluster, Tally, placements, run_group


def in_order_s(
    turns: Sequence[Turn], work_s: Sequence[float], epochs: Sequence[int], devices: int, overhead: Overhead
) -> float:
    """When the last one has ended if each begins, in this order, as soon as enough devices are free."""
    free = [0.0] * devices
    begin_s = end_s = 0.0
    for turn in turns:
        index, width, after, kept = turn.trial, turn.width, turn.epochs, int(turn.kept)
        free.sort()
        begin_s = max(begin_s, free[width - 1])
        alone_s = work_s[index]
        if after:
            first_s = begin_s + alone_s * after / epochs[index] / overhead.speed(float(width))
            rest_s = alone_s * (1 - after / epochs[index]) / overhead.speed(float(kept))
            done_s = first_s + overhead.epsilon_s + rest_s
            free[:width] = [first_s] * (width - kept) + [done_s] * kept
        else:
            done_s = begin_s + alone_s / overhead.speed(float(width))
            free[:width] = [done_s] * width
        end_s = max(end_s, done_s)
    return end_s


def best_s(work_s: Sequence[float], epochs: int, devices: int, overhead: Overhead) -> float:
    """The least end of all orders, widths and epochs of narrowing."""
    widest = min(devices, overhead.max_devices)
    ways = [(width, 0, width) for width in range(1, widest + 1)]
    ways += [(w, k, v) for w in range(2, widest + 1) for k in range(1, epochs) for v in range(1, w)]
    best = math.inf
    for order in set(itertools.permutations(range(len(work_s)))):
        for chosen in itertools.product(ways, repeat=len(work_s)):
            turns = [Turn(index, *way) for index, way in zip(order, chosen, strict=True)]
            best = min(best, in_order_s(turns, work_s, [epochs] * len(work_s), devices, overhead))
    return best


def run_turns(
    turns: Sequence[Turn],
    told_s: Sequence[float],
    work_s: Sequence[float],
    *,
    devices: int,
    truth: Overhead,
    epochs: int,
) -> Tally:
    """The course on a simulated cluster, which asserts that no device is given out twice and nobody is lost."""
    planner = _follow(Allotment(truth), "relay", runtime=None)
    return run_group(
        planner, work_s, devices=devices, truth=truth, expected_s=told_s, epochs=epochs, turns=turns
    )


def test_three_on_four_devices_in_closed_form() -> None:
    """McNaughton: four devices for 75 s are 300 s of work. Two begin on two, and give the third one each half-way."""
    overhead = Overhead(max_devices=2)
    end_s, turns = relay([100.0] * 3, [10] * 3, devices=4, overhead=overhead, within_s=100.0)
    assert end_s == pytest.approx(75.0)
    assert turns == [Turn(0, 2, 5, 1), Turn(1, 2, 5, 1), Turn(2, 2, 0, 2)]


def test_five_on_eight_devices_in_closed_form() -> None:
    """Two narrow from four devices to one after five of ten epochs; the others have two each of what they leave."""
    overhead = Overhead(1.0, 1.05, 1, 8, 3.0)
    end_s, turns = relay([100.0] * 5, [10] * 5, devices=8, overhead=overhead, within_s=100.0)
    assert end_s == pytest.approx(50 / (4 / 1.05**3) + 3 + 50)
    assert turns == [Turn(0, 4, 5, 1), Turn(1, 4, 5, 1), *(Turn(index, 2, 0, 2) for index in (2, 3, 4))]
    truth = overhead
    tally = run_group(fluid(d=8, beta=1.05, epsilon_s=3.0), [100.0] * 5, devices=8, truth=truth, epochs=10)
    assert tally.makespan_s <= end_s * (1 + 1e-9)


def test_what_does_not_fit_before_the_given_end_is_not_tried_further() -> None:
    overhead = Overhead(max_devices=2)
    assert relay([100.0] * 3, [10] * 3, devices=4, overhead=overhead, within_s=74.0) == (math.inf, [])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([20.0, 35.0, 50.0]) | st.floats(10, 90), min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.05, 1.2]),
    st.sampled_from([0.0, 2.0]),
)
def test_against_all_orders_widths_and_epochs(
    work_s: list[float], devices: int, d: int, beta: float, epsilon_s: float
) -> None:
    overhead = Overhead(beta=beta, max_devices=d, epsilon_s=epsilon_s).within_bounds()
    epochs = [3] * len(work_s)
    end_s, turns = relay(work_s, epochs, devices=devices, overhead=overhead, within_s=2 * sum(work_s))
    least_s = best_s(work_s, 3, devices, overhead)
    assert lower_bound_s(work_s, devices=devices, overhead=overhead) <= least_s * (1 + 1e-6)
    assert least_s * (1 - 1e-9) <= end_s
    assert sorted(turn.trial for turn in turns) == list(range(len(work_s)))
    # A promise: in this order it takes no longer.
    assert in_order_s(turns, work_s, epochs, devices, overhead) <= end_s * (1 + 1e-9)


groups = st.tuples(
    st.lists(st.sampled_from([30.0, 60.0]) | st.floats(5, 90), min_size=2, max_size=16),
    st.integers(2, 12),
    st.builds(
        Overhead,
        beta=st.sampled_from([1.0, 1.05, 1.2]),
        max_devices=st.integers(2, 8),
        epsilon_s=st.sampled_from([0.0, 0.5, 3.0]),
    ),
    st.sampled_from([1, 3, 10]),
)


@settings(max_examples=80, deadline=None)
@given(groups, st.lists(st.floats(0.2, 1.0), min_size=16, max_size=16))
def test_who_takes_no_longer_than_told_ends_no_later_than_promised(
    group: tuple[list[float], int, Overhead, int], parts: list[float]
) -> None:
    told_s, devices, overhead, epochs = group
    truth = overhead.within_bounds()
    end_s, turns = relay(
        told_s, [epochs] * len(told_s), devices=devices, overhead=truth, within_s=2 * sum(told_s)
    )
    assume(turns)
    exact = run_turns(turns, told_s, told_s, devices=devices, truth=truth, epochs=epochs)
    assert exact.makespan_s <= end_s * (1 + 1e-6)
    work_s = [each_s * part for each_s, part in zip(told_s, parts, strict=False)]
    sooner = run_turns(turns, told_s, work_s, devices=devices, truth=truth, epochs=epochs)
    assert sooner.makespan_s <= end_s * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(groups, st.lists(st.floats(0.3, 3.0), min_size=16, max_size=16), st.integers(1, 12))
def test_wrong_guesses_and_other_devices_leave_nobody_behind(
    group: tuple[list[float], int, Overhead, int], parts: list[float], there: int
) -> None:
    told_s, devices, overhead, epochs = group
    truth = overhead.within_bounds()
    _, turns = relay(
        told_s, [epochs] * len(told_s), devices=devices, overhead=truth, within_s=2 * sum(told_s)
    )
    work_s = [each_s * part for each_s, part in zip(told_s, parts, strict=False)]
    # Fewer devices than the turns were made for, and one trial that has none.
    tally = run_turns(turns[:-1], told_s, work_s, devices=there, truth=truth, epochs=epochs)
    assert sorted(tally.ends_s) == list(range(len(told_s)))
    assert tally.makespan_s >= lower_bound_s(work_s, devices=there, overhead=truth) * (1 - 1e-6)


def test_seven_on_eight_devices_go_on_two_by_two_in_closed_form() -> None:
    """Four begin on two devices, and go on in pairs on one each; those who wait have two each, too."""
    overhead = Overhead(1.25, 1.0, 2, 2, 0.0)
    end_s, turns = relay([100.0] * 7, [10] * 7, devices=8, overhead=overhead, within_s=120.0)
    # Six of ten epochs on two devices, then four at 4/5 of the speed; the others 50 s from then on.
    assert end_s == pytest.approx(30 + 40 * 1.25)
    assert end_s == pytest.approx(30 + 50)
    assert turns == [*(Turn(i, 2, 6, 0.5) for i in range(4)), *(Turn(i, 2, 0, 2) for i in range(4, 7))]
    tally = run_turns(turns, [100.0] * 7, [100.0] * 7, devices=8, truth=overhead, epochs=10)
    assert tally.makespan_s == pytest.approx(end_s)
    packed = [stay for stay in tally.stays if stay.shares[0].fraction < 1 and len(stay.shares) == 1]
    assert [(stay.begin_s, stay.end_s) for stay in packed] == [pytest.approx((30, 80))] * 4
    assert len({stay.shares for stay in packed}) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([30.0, 60.0]) | st.floats(5, 90), min_size=2, max_size=16),
    st.integers(2, 16),
    st.builds(
        Overhead,
        alpha=st.sampled_from([1.0, 1.1, 1.3]),
        beta=st.sampled_from([1.0, 1.05, 1.2]),
        max_sharing=st.integers(2, 4),
        max_devices=st.integers(2, 8),
        epsilon_s=st.sampled_from([0.0, 3.0]),
    ),
    st.lists(st.floats(0.5, 2.0), min_size=16, max_size=16),
)
def test_who_shares_in_the_end_is_never_lost(
    told_s: list[float], devices: int, overhead: Overhead, parts: list[float]
) -> None:
    truth = overhead.within_bounds()
    _, turns = relay(told_s, [10] * len(told_s), devices=devices, overhead=truth, within_s=2 * sum(told_s))
    for work_s in (told_s, [each_s * part for each_s, part in zip(told_s, parts, strict=False)]):
        tally = run_turns(turns, told_s, work_s, devices=devices, truth=truth, epochs=10)
        assert sorted(tally.ends_s) == list(range(len(told_s)))
        assert tally.makespan_s >= lower_bound_s(work_s, devices=devices, overhead=truth) * (1 - 1e-6)


def test_those_who_run_tell_whose_turn_it_is() -> None:
    """So the passes need to remember nothing, and a group goes on as it was decided."""
    truth = Overhead(1.0, 1.05, 1, 8, 3.0)
    planner = fluid(d=8, beta=1.05, epsilon_s=3.0)
    cluster = SimulatedCluster(8, truth=truth, planner=planner)
    group = placements([100.0] * 5, max_devices=8, epochs=10)
    cluster.submit(group, dict.fromkeys(range(5), 100.0), dict.fromkeys(range(5), 10))
    plan = cluster.replan()
    assert {item.course for item in plan.placed} == {"relay"}
    assert [resize.at_epoch for resize in plan.resized] == [5] * 2
    cluster.waiting = [replace(item, turns=(), course="") for item in cluster.waiting]
    cluster.step()
    assert cluster.now_s == pytest.approx(50 / (4 / 1.05**3))
    plan = cluster.replan()
    assert [(item.course, len(item.shares)) for item in plan.placed] == [("relay", 2)] * 3


def test_nobody_passes_one_whose_devices_are_not_free_yet() -> None:
    waiting = placements([50.0, 50.0, 50.0], max_devices=4)
    runs = Running(replace(placements([50.0], first=9)[0], shares=(Share("d"),)), 20.0)
    turns = (Turn(1, 2, 3, 1), Turn(0, 2), Turn(2, 1))
    free = tuple(Free(Device(name)) for name in "abc")
    plan = take_turns(Plan(tuple(waiting), free, running=(runs,)), turns, Overhead())
    assert [item.segments[0].trial.id for item in plan.placed] == [1]
    assert [item.segments[0].trial.id for item in plan.waiting] == [0, 2]
    assert plan.resized == ()  # it has one epoch only: there is nothing to hand over
    waiting = placements([50.0, 50.0, 50.0], max_devices=4, epochs=5)
    plan = take_turns(Plan(tuple(waiting), free, running=(runs,)), turns, Overhead())
    (begun,) = plan.placed
    assert plan.resized == (Resize(begun, begun.shares[:1], 3),)
    assert [item.device.id for item in plan.free] == ["c"]


def test_runtimes_must_be_surer_where_trials_wait_for_one_another() -> None:
    overhead = Overhead(1.0, 1.05, 1, 8, 3.0)
    free = tuple(Free(Device(f"gpu:{i}")) for i in range(8))

    def takes_turns(count: int, error: float) -> bool:
        group = placements([100.0] * count, max_devices=8, epochs=10, error=error)
        return _takes_turns(Plan(tuple(group), free), overhead, 8)

    assert [takes_turns(8, error) for error in (0.01, 0.02, 0.03)] == [True, True, False]
    assert [takes_turns(9, error) for error in (0.01, 0.02, 0.03)] == [True, False, False]


def test_turns_are_not_fixed_where_runtimes_are_guesses_or_devices_differ() -> None:
    planner = fluid(d=8, beta=1.05, epsilon_s=3.0)
    free = [Free(Device(f"gpu:{i}")) for i in range(8)]

    def courses(group: list[object], devices: list[Free]) -> set[str]:
        plan = Plan(tuple(group), tuple(devices))  # type: ignore[arg-type]
        for step in planner:
            plan = step(plan)
        return {item.course for item in plan.placed}

    sure = placements([100.0] * 5, max_devices=8, epochs=10)
    assert courses([*sure], free) == {"relay"}
    assert courses([*placements([100.0] * 5, max_devices=8, epochs=10, error=0.01)], free) == {"relay"}
    assert "relay" not in courses([*placements([100.0] * 5, max_devices=8, epochs=10, error=0.05)], free)
    assert "relay" not in courses([*sure[:-1], replace(sure[-1], max_devices=1)], free)
    assert "relay" not in courses([*sure[:-1], replace(sure[-1], exclusive=True)], free)
    other = [*free[:-1], Free(Device("gpu:7", kind="other"))]
    assert "relay" not in courses([*sure], other)
