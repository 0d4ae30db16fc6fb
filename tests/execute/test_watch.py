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


def test_those_that_were_starting_when_one_failed_count_as_that_one() -> None:
    """A node that leaves takes them all along, which says nothing of the next."""
    starts = Starts()
    assert not any(starts.failed(sure=False, born_s=born_s, now_s=9.0) for born_s in (1.0, 2.0, 3.0, 4.0))
    assert not starts.failed(sure=False, born_s=9.5, now_s=12.0)
    assert not starts.failed(sure=False, born_s=9.6, now_s=12.1)
    assert starts.failed(sure=False, born_s=13.0, now_s=14.0)


def test_one_that_says_why_is_enough() -> None:
    assert Starts().failed(sure=True)


def test_a_segment_is_handed_on_three_times() -> None:
    assert [Starts.excused(tries) for tries in range(5)] == [True, True, True, False, False]
