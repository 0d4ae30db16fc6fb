"""The state machine of a failing crew, without any worker."""

from __future__ import annotations

import pytest

from penstock.execute._crew import FAREWELL_S, PARTING_S, Crew


def begun(size: int) -> Crew[str]:
    crew: Crew[str] = Crew(size)
    for rank in range(size):
        crew.begin(rank, 0.0)
    return crew


def test_a_crew_that_runs_or_ends_well_is_never_settled() -> None:
    crew = begun(3)
    assert crew.wait_s(1e9) is None
    for rank in (2, 0, 1):
        crew.end(rank, 0.0)
    assert not crew.running
    assert not crew.failing
    assert crew.wait_s(1e9) is None


def test_who_fails_gives_the_others_time_to_notice() -> None:
    crew = begun(3)
    crew.fail(1, "one", 10.0)
    assert crew.wait_s(10.0) == FAREWELL_S
    assert crew.wait_s(10.0 + FAREWELL_S) == 0.0
    assert crew.running == {0, 2}  # to be ended
    assert crew.why() == (1, "one")


def test_a_second_failure_does_not_prolong_it() -> None:
    crew = begun(3)
    crew.fail(1, "one", 10.0)
    crew.fail(2, "two", 11.0)
    assert crew.wait_s(11.0) == FAREWELL_S - 1.0


@pytest.mark.parametrize("last", ["fail", "end"])
def test_it_is_settled_at_once_when_nobody_runs_any_more(last: str) -> None:
    crew = begun(2)
    crew.fail(1, "one", 10.0)
    if last == "fail":
        crew.fail(0, "lead", 10.0)
    else:
        crew.end(0, 10.0)
    assert crew.wait_s(10.0) == 0.0
    assert crew.running == set()
    assert crew.why() == ((0, "lead") if last == "fail" else (1, "one"))


def test_a_death_is_why_the_others_fail_and_settles_it() -> None:
    crew = begun(3)
    crew.fail(0, "connection closed", 10.0)
    crew.die(2, "signal SIGKILL")
    crew.die(1, "ended by us")
    assert crew.wait_s(10.0) == 0.0
    assert (crew.died, crew.why()) == (2, (2, "signal SIGKILL"))


def test_a_worker_that_has_not_begun_can_not_notice() -> None:
    crew: Crew[str] = Crew(2)
    crew.begin(1, 0.0)
    crew.fail(1, "one", 1.0)
    assert crew.wait_s(1000.0) is None
    crew.begin(0, 1000.0)
    assert crew.wait_s(1000.0) == FAREWELL_S


def test_who_has_not_ended_a_while_after_the_lead_is_late() -> None:
    crew = begun(3)
    crew.end(2, 5.0)
    assert crew.late_s(1e9) is None
    crew.end(0, 10.0)
    assert crew.late_s(10.0) == PARTING_S
    assert crew.late_s(10.0 + PARTING_S) == 0.0
    assert crew.running == {1}  # to be ended
    assert crew.wait_s(1e9) is None  # the trial has not failed
    crew.end(1, 11.0)
    assert crew.late_s(1e9) is None


def test_who_begins_when_the_lead_has_ended_has_its_time() -> None:
    crew: Crew[str] = Crew(2)
    crew.begin(0, 0.0)
    crew.end(0, 1.0)
    assert crew.late_s(1e9) is None  # it is still starting
    crew.begin(1, 50.0)
    assert crew.late_s(50.0) == PARTING_S


def test_nobody_is_late_where_one_has_failed() -> None:
    crew = begun(3)
    crew.fail(1, "one", 10.0)
    crew.end(0, 10.0)
    assert crew.late_s(1e9) is None
    assert crew.wait_s(10.0 + FAREWELL_S) == 0.0


@pytest.mark.parametrize("failed", [False, True])
def test_who_still_runs_after_the_lead_has_ended_is_to_end_whether_or_not_another_failed(
    failed: bool,
) -> None:
    crew = begun(3)
    (crew.fail if failed else lambda rank, _, now_s: crew.end(rank, now_s))(1, "one", 10.0)
    crew.end(0, 10.0)
    due_s = 10.0 + (FAREWELL_S if failed else PARTING_S)
    assert crew.parts_s(due_s - 0.5) == 0.5
    assert crew.parts_s(due_s) == 0.0
    crew.end(2, due_s)
    assert crew.parts_s(due_s) is None  # nobody does
