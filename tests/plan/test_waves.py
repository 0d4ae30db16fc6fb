"""Three waves: in closed form, as a promise that a simulated cluster keeps, and against what there was without."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Turn
from penstock.plan import fluid, lower_bound_s
from penstock.plan._fluid import _follow
from penstock.plan._pack import Allotment
from penstock.plan._waves import three_waves
from penstock.predict import Overhead
from penstock.testing.planning import Tally, run_group


def run_turns(
    turns: Sequence[Turn], work_s: Sequence[float], *, devices: int, truth: Overhead, epochs: int
) -> Tally:
    """The turns on a simulated cluster, which asserts that no device is given out twice and nobody is lost."""
    planner = _follow(Allotment(truth), "relay", runtime=None)
    return run_group(planner, work_s, devices=devices, truth=truth, epochs=epochs, pausable=True, turns=turns)


def epochs_of(turns: Sequence[Turn], trial: int, count: int) -> list[int]:
    """The epochs of each of a trial's turns, those after it has narrowed included."""
    mine = sorted((turn for turn in turns if turn.trial == trial), key=lambda turn: turn.start)
    return [turn.epochs if turn.epochs and not turn.kept else count - turn.start for turn in mine]


def test_eleven_on_sixteen_devices_in_closed_form() -> None:
    """Four begin on four devices each, for eight of ten epochs. Then seven others have two each, and the two devices
    that are left the last epochs of two of the four, and after them those of the other two."""
    overhead = Overhead(2.7, 1.05, 1, 8, 3.0)
    end_s, turns = three_waves([100.0] * 11, [10] * 11, devices=16, overhead=overhead, within_s=1e9)
    assert end_s == pytest.approx(80 / (4 / 1.05**3) + 100 / (2 / 1.05))
    assert turns == [
        *(Turn(trial, 4, 8, 1.0) for trial in (0, 1)),
        *(Turn(trial, 4, 8, 0.0) for trial in (2, 3)),
        *(Turn(trial, 2, 0, 2.0) for trial in range(4, 11)),
        *(Turn(trial, 1, 0, 1.0, 8) for trial in (2, 3)),
    ]
    tally = run_turns(turns, [100.0] * 11, devices=16, truth=overhead, epochs=10)
    assert tally.makespan_s == pytest.approx(end_s)
    assert (tally.pauses, tally.resizes) == (2, 2)


def test_eighty_one_on_a_hundred_and_twenty_eight_end_near_what_perfect_scaling_would_allow() -> None:
    """25 begin on five devices for seven of ten epochs; 17 of them go on with one, then 8 with two, beside 55 that have
    two from then on; and one has three, then one, then two."""
    overhead = Overhead(2.7, 1.05, 1, 8, 3.0)
    first_s = 7 * 10 / (5 / 1.05**4)
    end_s, _ = three_waves([100.0] * 81, [10] * 81, devices=128, overhead=overhead, within_s=1e9)
    assert end_s == pytest.approx(first_s + 100 / (2 / 1.05))
    assert end_s <= 1.10 * 8100 / 128
    planner = fluid(alpha=2.7, beta=1.05, d=8, epsilon_s=3.0)
    tally = run_group(planner, [100.0] * 81, devices=128, truth=overhead, pausable=True)
    assert tally.makespan_s <= end_s * (1 + 1e-9)
    assert tally.pauses
    before = run_group(planner, [100.0] * 81, devices=128, truth=overhead)
    assert not before.pauses
    assert before.makespan_s > 1.01 * tally.makespan_s


def test_only_trials_that_are_alike_and_have_epochs() -> None:
    overhead = Overhead(beta=1.05, max_devices=4)
    assert three_waves([], [], devices=4, overhead=overhead, within_s=1e9) == (math.inf, [])
    for work_s, epochs in (
        ([100.0, 90.0, 100.0], [10] * 3),
        ([100.0] * 3, [10, 10, 9]),
        ([100.0] * 3, [1] * 3),
        ([100.0] * 3, [0] * 3),
        ([100.0], [10]),
    ):
        assert three_waves(work_s, epochs, devices=4, overhead=overhead, within_s=1e9) == (math.inf, [])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 60),
    st.integers(2, 40),
    st.integers(1, 3),
    st.integers(2, 8),
    st.sampled_from([1.0, 1.1, 1.3]),
    st.sampled_from([1.0, 1.05, 1.1]),
    st.sampled_from([0.0, 2.0, 5.0]),
    st.integers(2, 12),
)
def test_a_cluster_keeps_what_was_promised(
    trials: int, devices: int, c: int, d: int, alpha: float, beta: float, epsilon_s: float, epochs: int
) -> None:
    overhead = Overhead(alpha, beta, c, d, epsilon_s).within_bounds()
    work_s = [100.0] * trials
    end_s, turns = three_waves(work_s, [epochs] * trials, devices=devices, overhead=overhead, within_s=1e9)
    if not turns:
        return
    assert end_s >= lower_bound_s(work_s, devices=devices, overhead=overhead) * (1 - 1e-6)
    for trial in range(trials):
        assert sum(epochs_of(turns, trial, epochs)) == epochs
    tally = run_turns(turns, work_s, devices=devices, truth=overhead, epochs=epochs)
    assert set(tally.ends_s) == set(range(trials))
    # With parts of devices, who is on which one depends on who ends first.
    if all(turn.width >= 1 and (turn.kept >= 1 or not turn.kept) for turn in turns):
        assert tally.makespan_s <= end_s * (1 + 1e-9)
    found_s, _ = three_waves(work_s, [epochs] * trials, devices=devices, overhead=overhead, within_s=end_s)
    assert found_s == math.inf  # it was the earliest it can find


@pytest.mark.parametrize(
    ("trials", "devices", "epsilon_s"), [(11, 16, 3.0), (25, 32, 3.0), (50, 64, 3.0), (100, 128, 3.0)]
)
def test_a_planner_finds_them(trials: int, devices: int, epsilon_s: float) -> None:
    truth = Overhead(2.7, 1.05, 1, 8, epsilon_s)
    planner = fluid(alpha=2.7, beta=1.05, d=8, epsilon_s=epsilon_s)
    work_s = [100.0] * trials
    end_s, _ = three_waves(work_s, [10] * trials, devices=devices, overhead=truth, within_s=1e9)
    before = run_group(planner, work_s, devices=devices, truth=truth)
    tally = run_group(planner, work_s, devices=devices, truth=truth, pausable=True)
    assert tally.makespan_s <= end_s * (1 + 1e-9)
    assert tally.makespan_s < before.makespan_s
    assert tally.makespan_s >= lower_bound_s(work_s, devices=devices, overhead=truth) * (1 - 1e-6)


@pytest.mark.parametrize("error", [0.0, 0.01, 0.1])
def test_shifts_only_where_runtimes_are_sure(error: float) -> None:
    """Whoever comes later depends on who was there before."""
    truth = Overhead(2.7, 1.05, 1, 8, 3.0)
    tally = run_group(
        fluid(alpha=2.7, beta=1.05, d=8, epsilon_s=3.0),
        [100.0] * 11,
        devices=16,
        truth=truth,
        error=error,
        pausable=True,
    )
    assert bool(tally.pauses) == (error < 0.02)
