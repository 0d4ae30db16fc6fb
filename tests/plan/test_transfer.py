"""Eager transfer and deadlines, as a pure decision (Hydro 4.3 and Case III)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import TransferMove, TransferStanding, slower_by, transfer_move, tuning_end_s


def test_nothing_starts_before_half_of_the_surrogates_are_over():
    assert transfer_move(TransferStanding(best=3, done=0.49, idle=2)) == TransferMove()
    assert transfer_move(TransferStanding(best=3, done=0.5, idle=2)).start == 3
    assert transfer_move(TransferStanding(best=3, done=0.2, idle=2, eager=0.2)).start == 3
    assert transfer_move(TransferStanding(best=None, done=1.0, over=True, idle=2)) == TransferMove()


def test_nothing_starts_without_an_idle_device():
    assert transfer_move(TransferStanding(best=3, done=0.9, idle=0)) == TransferMove()


def test_a_better_one_joins_on_an_idle_device():
    after = transfer_move(
        TransferStanding(best=7, transferred=frozenset({3}), running=((40, 0.1),), done=0.8, idle=1)
    )
    assert (after.start, after.stop) == (7, ())


def test_a_better_one_replaces_the_youngest_target_where_nothing_is_idle():
    running = ((40, 0.4), (41, 0.1))
    after = transfer_move(
        TransferStanding(best=7, transferred=frozenset({3, 4}), running=running, done=0.8, idle=0)
    )
    assert (after.start, after.stop) == (7, (41,))
    assert "trial 7" in after.why


def test_a_target_past_half_of_its_training_is_left_alone():
    running = ((40, 0.6),)
    assert (
        transfer_move(TransferStanding(best=7, transferred=frozenset({3}), running=running, done=0.8))
        == TransferMove()
    )


def test_the_same_configuration_is_not_transferred_twice():
    assert (
        transfer_move(TransferStanding(best=3, transferred=frozenset({3}), done=1.0, over=True, idle=4))
        == TransferMove()
    )


def test_the_next_best_follow_when_tuning_is_over():
    one = {"best": 3, "others": (5, 6), "transferred": frozenset({3}), "running": ((40, 0.1),), "done": 1.0}
    assert transfer_move(TransferStanding(**one, over=True, idle=1)).start == 5
    assert transfer_move(TransferStanding(**one, over=False, idle=1)) == TransferMove()
    assert (
        transfer_move(TransferStanding(**one, over=True, idle=0)) == TransferMove()
    )  # nothing is stopped for it
    late = TransferStanding(**one, over=True, idle=1, elapsed_s=80, deadline_s=100, target_s=30)
    assert transfer_move(late) == TransferMove()
    both = TransferStanding(**{**one, "transferred": frozenset({3, 5, 6})}, over=True, idle=1)
    assert transfer_move(both) == TransferMove()


def test_tuning_ends_in_time_for_the_target():
    # 900 s (Table 4), a target of 200 s: it gets 260 s and a second to start.
    assert tuning_end_s(900, 200) == pytest.approx(900 - 260 - 1)
    assert tuning_end_s(900, 2000) == 225  # however long the target takes, a quarter is for tuning
    assert tuning_end_s(900, None) == 450


def test_the_twins_epochs_tell_how_slow_the_models_will_be():
    assert slower_by(3.0, 2.0) == 1.5
    assert slower_by(1.0, 2.0) == 1  # fused: a share of the group's time
    assert slower_by(100.0, 1.0) == 3  # fixed costs of an epoch, not a slower machine
    assert slower_by(1.0, 0.0) == 1


def test_a_target_that_could_not_be_trained_in_time_starts_only_if_there_is_no_other():
    late = {"best": 7, "over": True, "idle": 1, "elapsed_s": 800, "deadline_s": 900, "target_s": 200}
    assert (
        transfer_move(TransferStanding(**late, running=((40, 0.3),), transferred=frozenset({3})))
        == TransferMove()
    )
    assert transfer_move(TransferStanding(**late, trained=True, transferred=frozenset({3}))) == TransferMove()
    assert transfer_move(TransferStanding(**late)).start == 7


def test_with_a_deadline_half_of_the_tuning_time_counts_too():
    standing = {"best": 3, "idle": 1, "deadline_s": 900, "target_s": 200}  # tuning ends at 639 s
    assert transfer_move(TransferStanding(**standing, elapsed_s=319)) == TransferMove()
    assert transfer_move(TransferStanding(**standing, elapsed_s=320)).start == 3


@given(
    best=st.none() | st.integers(0, 9),
    transferred=st.frozensets(st.integers(0, 9)),
    running=st.lists(st.tuples(st.integers(20, 29), st.floats(0, 1)), unique_by=lambda pair: pair[0]),
    done=st.none() | st.floats(0, 1),
    over=st.booleans(),
    idle=st.integers(0, 3),
    elapsed_s=st.floats(0, 1000),
    deadline_s=st.none() | st.floats(1, 1000),
)
def test_a_move_is_always_possible(best, transferred, running, done, over, idle, elapsed_s, deadline_s):
    standing = TransferStanding(
        best, transferred, tuple(running), False, done, over, idle, elapsed_s, deadline_s, target_s=50.0
    )
    after = transfer_move(standing)
    assert after.start in (None, best)
    assert after.start is None or after.start not in transferred
    assert set(after.stop) <= {trial for trial, _ in running}
    assert not (after.stop and idle)  # nothing is stopped while a device is idle
    assert after.start is None or idle or after.stop  # what starts has a device
