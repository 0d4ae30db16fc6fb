"""A trial on several groups of cores uses all its threads as long as that is quicker."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train._threads import Pace, paced


def play(steps: int, wide_s: list[float], narrow_s: float) -> tuple[float, list[int]]:
    """Time of so many steps, and their threads; with two threads a step takes ``wide_s`` of its number, with one the
    same always."""
    pace, taken_s, used = Pace(2, 1), 0.0, []
    for step in range(steps):
        step_s = wide_s[min(step, len(wide_s) - 1)] if pace.threads == 2 else narrow_s
        used.append(pace.threads)
        taken_s += step_s
        pace.tell(step_s)
    return taken_s, used


def test_the_first_steps_have_all_threads() -> None:
    assert Pace(8, 2).threads == 8


@given(wide_s=st.floats(1e-4, 1.0), narrow_s=st.floats(1e-4, 1.0))
def test_little_is_lost_against_who_knows_which_is_quicker(wide_s: float, narrow_s: float) -> None:
    """In the long run looks at the slower one take a fortieth of the time at most, and those at the beginning."""
    steps = 4000
    taken_s, used = play(steps, [wide_s], narrow_s)
    slower, quicker = max(wide_s, narrow_s), min(wide_s, narrow_s)
    looks = used.count(2 if wide_s > narrow_s else 1)
    assert taken_s == pytest.approx(looks * slower + (steps - looks) * quicker)
    first_s = 0.5 + 2 * (0.02 + 4 * slower)
    assert taken_s <= first_s + steps * quicker * (1 + 1 / 40 + 1e-9) + 0.02 + 4 * slower


def test_a_burst_of_other_work_costs_some_steps_and_is_forgotten() -> None:
    """Two threads are 1.7 times as quick but for a while, in which they are twenty times as slow."""
    wide_s = [0.01] * 1000 + [0.2] * 1000 + [0.01] * 3000
    taken_s, used = play(5000, wide_s, 0.017)
    assert used[:1000].count(2) > 950
    assert used[1100:2000].count(2) < 60
    assert used[3600:].count(2) > 1300  # the last look in it was long, and so is the wait for the next
    assert taken_s < 0.6 * sum(wide_s)


def test_noise_does_not_make_the_slower_one_win() -> None:
    rng = random.Random(1)
    pace, used = Pace(2, 1), []
    for _ in range(5000):
        used.append(pace.threads)
        pace.tell((0.01 if pace.threads == 2 else 0.017) * rng.uniform(0.8, 1.25))
    assert used.count(2) > 4500


def test_threads_are_changed_between_items_and_all_items_come() -> None:
    clock, changes, pace = [0.0], [], Pace(2, 1)
    found = []
    for item in paced(range(200), pace, changes.append, lambda: clock[0]):
        found.append(item)
        clock[0] += 0.1 if changes[-1] == 2 else 0.01
    assert found == list(range(200))
    # After half a second the quicker one is found, and before the end it is looked back at the other once.
    assert changes == [2, 1, 2, 1]
