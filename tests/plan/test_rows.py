"""Trials in a row on the same devices, against brute force and played through."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan import lower_bound_s
from penstock.plan._fluid import _follow
from penstock.plan._pack import Allotment
from penstock.plan._rows import row_widths
from penstock.predict import Overhead
from penstock.testing.planning import run_group


def best_s(runtimes: Sequence[float], *, devices: int, overhead: Overhead) -> float:
    """The least end of trials in rows on rows: all ways to put them into rows, all widths."""
    best = math.inf
    for number in range(1, min(len(runtimes), devices) + 1):
        for homes in itertools.product(range(number), repeat=len(runtimes)):
            loads = [
                math.fsum(r for r, home in zip(runtimes, homes, strict=True) if home == row)
                for row in range(number)
            ]
            for widths in itertools.product(range(1, overhead.max_devices + 1), repeat=number):
                if sum(widths) <= devices:
                    best = min(
                        best, max(overhead.runtime_s(x, w) for x, w in zip(loads, widths, strict=True))
                    )
    return best


@pytest.mark.parametrize("running", [[], [(1.0, 0.0)]])
def test_trials_that_take_no_time_fit_anywhere(running: list[tuple[float, float]]) -> None:
    widths = row_widths([0.0, 0.0, 0.0], running, free=2, devices=3, overhead=Overhead(max_devices=2))
    assert sorted(widths) == [0, 0, 1]


def test_two_in_a_row_beside_a_long_one() -> None:
    overhead = Overhead(max_devices=2)
    widths = row_widths([60.0, 70.0, 130.0], [], free=4, devices=4, overhead=overhead)
    assert widths == [0, 2, 2]  # 65 s on two devices each: no device is ever idle
    assert best_s([60.0, 70.0, 130.0], devices=4, overhead=overhead) == pytest.approx(65)


def test_who_fills_a_busy_row_waits_for_it() -> None:
    overhead = Overhead(beta=1.05, max_devices=2)
    # One that runs has 20 s left: 30 s after it end when 50 s that begin now do.
    assert row_widths([30.0, 50.0], [(1.0, 20.0)], free=1, devices=2, overhead=overhead) == [0, 1]


def test_what_never_fits_in_rows_is_left_to_the_horizon() -> None:
    overhead = Overhead(max_devices=1)
    assert row_widths([100.0, 1.0], [], free=8, devices=8, overhead=overhead) == []


small = st.lists(st.sampled_from([20.0, 35.0]) | st.floats(5, 90), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(small, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1.0, 1.05, 1.2]))
def test_against_all_ways_to_fill_rows(runtimes: list[float], devices: int, d: int, beta: float) -> None:
    overhead = Overhead(beta=beta, max_devices=d).within_bounds()
    widths = row_widths(runtimes, [], free=devices, devices=devices, overhead=overhead)
    if not widths:
        return
    assert 0 < sum(widths) <= devices
    assert max(widths) <= overhead.max_devices
    # Those who begin leave the others as much room as the promise says: within what was looked at.
    least_s = max(sum(runtimes) / devices, lower_bound_s(runtimes, devices=devices, overhead=overhead))
    ends_s = max(overhead.runtime_s(r, w) for r, w in zip(runtimes, widths, strict=True) if w)
    assert ends_s <= 1.6 * least_s * (1 + 1e-6)
    assert best_s(runtimes, devices=devices, overhead=overhead) >= least_s * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(5, 90), min_size=1, max_size=24),
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from(["rows", "1+2", "1+3", "1+6"]),
    st.booleans(),
)
def test_courses_leave_nobody_behind(
    runtimes: list[float], devices: int, d: int, course: str, wrong: bool
) -> None:
    """Also when trials take half or twice as long as was told."""
    truth = Overhead(1.3, 1.05, 2, d, 1.0).within_bounds()
    passes = _follow(Allotment(truth), course, runtime=None)
    told = [r * (2 if i % 2 else 0.5) for i, r in enumerate(runtimes)] if wrong else None
    tally = run_group(passes, runtimes, devices=devices, truth=truth, expected_s=told, error=0.5 * wrong)
    assert sorted(tally.ends_s) == list(range(len(runtimes)))
    assert tally.makespan_s >= lower_bound_s(runtimes, devices=devices, overhead=truth) * (1 - 1e-6)


def test_rows_end_sooner_than_the_widths_of_a_horizon() -> None:
    """Three trials on two devices: two in a row take as long as the third."""
    truth = Overhead(1.0, 1.05, 1, 2, 3.0)
    rows, horizon = (
        run_group(_follow(Allotment(truth), name, runtime=None), [40.0, 42.0, 80.0], devices=2, truth=truth)
        for name in ("rows", "x1.15")
    )
    assert rows.makespan_s == pytest.approx(82)
    assert rows.makespan_s <= horizon.makespan_s
    assert rows.resizes == 0
