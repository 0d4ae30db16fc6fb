"""How much is queued behind a running segment."""

from __future__ import annotations

import pytest

from penstock.execute._pace import MAX_BACKLOG, Pace


def after(*taken_s: float) -> int:
    pace = Pace()
    for each in taken_s:
        pace.learn(each)
    return pace.depth


@pytest.mark.parametrize(
    ("taken_s", "depth"),
    [
        (10.0, 0),
        (0.11, 0),
        (0.06, 1),
        (0.02, 2),
        (0.0125, 4),
        (0.006, 4),
        (0.001, 50),
        (1e-4, MAX_BACKLOG),
        (0.0, MAX_BACKLOG),
    ],
)
def test_the_shorter_they_are_the_more_are_queued(taken_s: float, depth: int) -> None:
    assert after(taken_s) == depth


def test_nothing_is_queued_before_one_has_ended() -> None:
    assert Pace().depth == 0


def test_one_long_segment_counts_at_once_and_is_forgotten_slowly() -> None:
    assert after(*[0.001] * 50) == 50
    assert after(*[0.001] * 50, 0.3) <= 2
    assert 0 < after(*[0.001] * 50, 0.3, *[0.001] * 20) < 50
    assert after(*[0.001] * 50, 0.3, *[0.001] * 100) >= 49


def test_long_ones_among_short_ones_leave_a_few_ahead() -> None:
    """Every tenth takes 0.2 s: 0.02 s on average, so that a worker need not wait for the driver each time."""
    assert after(*([0.001] * 9 + [0.2]) * 5, *[0.001] * 9) in (1, 2)
