"""How long executors wait, and when they give up on starting workers."""

from __future__ import annotations

import pytest

from penstock.execute._watch import TICK_S, Starts, patience_s


@pytest.mark.parametrize(
    ("left_s", "timeout_s", "wait_s"),
    [
        (None, None, TICK_S),
        (0.2, None, 0.2),
        (-3.0, None, 0.0),  # the time is up
        (60.0, None, TICK_S),
        (None, 5.0, 0.5),  # a hanging training is noticed within a tenth of its limit
        (None, 1e-6, 0.01),
        (0.2, 600.0, 0.2),
    ],
)
def test_patience(left_s: float | None, timeout_s: float | None, wait_s: float) -> None:
    assert patience_s(left_s, timeout_s) == pytest.approx(wait_s)


def test_three_in_a_row_that_do_not_start_are_enough() -> None:
    starts = Starts()
    assert [starts.failed(sure=False) for _ in range(2)] == [False, False]
    starts.worked()
    assert [starts.failed(sure=False) for _ in range(3)] == [False, False, True]


def test_one_that_says_why_is_enough() -> None:
    assert Starts().failed(sure=True)


def test_a_segment_is_handed_on_three_times() -> None:
    assert [Starts.excused(tries) for tries in range(5)] == [True, True, True, False, False]
