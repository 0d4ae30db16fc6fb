"""What a job remembers: tickets, late and repeated results, profiles, translation between devices."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.recurring import Decision, History, JobSpec, Result
from penstock.recurring._history import (
    decision_from_json,
    decision_to_json,
    profile_to_json,
    result_from_json,
    result_to_json,
)

SPEC = JobSpec((8, 16, 32), 16, 0.5, 2.0, None, (100.0, 200.0), 200.0)

finite = st.floats(0.0, 1e9)
decisions = st.builds(
    Decision,
    st.integers(0, 1000),
    st.integers(1, 4096),
    st.none() | st.floats(1.0, 500.0),
    st.lists(st.floats(1.0, 500.0), max_size=4).map(tuple),
    st.none() | finite,
    st.booleans(),
    st.sampled_from(["", "V100", "A40"]),
    finite,
)
results = st.builds(
    Result,
    st.integers(0, 1000),
    st.floats(1.0, 1e4),
    finite,
    finite,
    st.booleans(),
    st.dictionaries(st.floats(0.0, 500.0), st.tuples(finite, finite), max_size=3),
    st.text(max_size=10),
)


@given(decisions)
def test_decisions_survive_json(decision):
    assert decision_from_json(json.loads(json.dumps(decision_to_json(decision)))) == decision


@given(results)
def test_results_survive_json(result):
    assert result_from_json(json.loads(json.dumps(result_to_json(result)))) == result


def history_of(pairs: list[tuple[Decision, Result]], order: list[int]) -> History:
    history = History()
    for decision, _ in pairs:
        history.add_decision(decision)
    for at in order:
        history.add_result(pairs[at][1])
    return history


def test_results_come_in_any_order_and_only_once():
    pairs = [(Decision(n, 8 * 2**n, 100.0), Result(n, 10.0, 100.0, 5000.0 + n, True)) for n in range(3)]
    history = history_of(pairs, [2, 0, 2])
    assert [r.number for r in history.results] == [2, 0]
    assert [d.number for d in history.pending] == [1]
    seen = history.view(SPEC).seen
    assert [(s.number, s.batch_size) for s in seen] == [(2, 32), (0, 8)]


def test_a_result_needs_its_decision():
    with pytest.raises(KeyError):
        History().add_result(Result(0, 1.0, 1.0, 1.0, True))


def test_an_abandoned_decision_is_not_pending_but_its_result_still_counts():
    history = History()
    history.add_decision(Decision(0, 8))
    history.apply({"x": 0})
    assert history.pending == []
    history.add_result(Result(0, 3.0, 30.0, 300.0, True))
    assert history.view(SPEC).seen[0].epochs == 3.0


def test_a_failed_run_does_not_lower_the_threshold():
    history = History()
    for n, (energy, reached) in enumerate([(10_000.0, True), (10.0, False)]):
        history.add_decision(Decision(n, 8, 100.0))
        history.add_result(Result(n, 10.0 if reached else 0.0, energy / 100.0, energy, reached))
    expected = 2.0 * (0.5 * 10_000 + 0.5 * 200 * 100)
    assert history.view(SPEC).cost_limit == pytest.approx(expected)


def test_costs_are_translated_between_devices():
    """Section 7: Epochs(b) seen on one GPU times EpochCost(b) on the other."""
    history = History()
    for n, size in enumerate((8, 16)):
        history.add_decision(Decision(n, size, 100.0, device="old"))
        history.add_result(Result(n, 10.0 * (n + 1), 1000.0, 90_000.0, True, {100.0: (50.0, 90.0)}))
    history.add_profile("new", 8, {100.0: (20.0, 80.0), 200.0: (15.0, 150.0)})
    history.add_profile("new", 16, {100.0: (10.0, 100.0)})
    view = history.view(SPEC, "new")
    eight = min(20.0 * (0.5 * 80 + 0.5 * 200), 15.0 * (0.5 * 150 + 0.5 * 200))
    assert view.seen[0].cost == pytest.approx(10.0 * eight)
    assert view.seen[1].cost == pytest.approx(20.0 * 10.0 * (0.5 * 100 + 0.5 * 200))
    assert history.view(SPEC, "old").seen[0].cost == pytest.approx(0.5 * 90_000 + 0.5 * 200 * 1000)


def test_a_batch_size_not_profiled_on_the_new_device_is_scaled_by_the_others():
    history = History()
    history.add_profile("old", 8, {100.0: (40.0, 100.0)})
    history.add_profile("old", 16, {100.0: (20.0, 100.0)})
    history.add_profile("new", 8, {100.0: (10.0, 100.0)})  # four times as fast
    history.add_decision(Decision(0, 16, 100.0, device="old"))
    history.add_result(Result(0, 5.0, 100.0, 10_000.0, True, {100.0: (20.0, 100.0)}))
    view = history.view(SPEC, "new")
    assert view.foreign[16] == pytest.approx(5.0 * (0.5 * 100 + 0.5 * 200))
    assert view.seen[0].cost == pytest.approx(5 * 5.0 * (0.5 * 100 + 0.5 * 200))


def test_the_view_is_the_same_whether_folded_at_once_or_step_by_step():
    rng = random.Random(1)
    records: list[dict[str, object]] = []
    for n in range(30):
        records.append({"d": decision_to_json(Decision(n, rng.choice([8, 16, 32]), 100.0))})
        records.append({"r": result_to_json(Result(n, rng.randint(1, 9), rng.random(), rng.random(), True))})
    step = History()
    for record in records:
        step.apply(record)
        step.view(SPEC)
    assert step.view(SPEC) == History.fold(records).view(SPEC)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_views_of_several_devices_are_the_same_however_often_they_were_looked_at(data):
    """What is kept between views is never stale: results and profiles come in any order, on any device."""
    kinds, sizes = ("", "V100", "A40"), (8, 16, 32)
    points = st.dictionaries(
        st.sampled_from([100.0, 200.0]),
        st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([80.0, 150.0])),
        min_size=1,
    )
    step = History()
    records: list[dict[str, object]] = []
    for n in range(data.draw(st.integers(1, 12))):
        kind, size = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(sizes))
        new: list[dict[str, object]] = [{"d": decision_to_json(Decision(n, size, 100.0, device=kind))}]
        if data.draw(st.booleans()):
            profile = data.draw(points | st.just({}))
            epochs = data.draw(st.sampled_from([1.0, 4.0]))
            new.append({"r": result_to_json(Result(n, epochs, 3.0 * epochs, 200.0, True, profile))})
        if data.draw(st.booleans()):
            other = [data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(sizes))]
            new.append({"p": [*other, profile_to_json(data.draw(points))]})
        for record in new:
            step.apply(record)
            records.append(record)
            if data.draw(st.booleans()):
                step.view(SPEC, data.draw(st.sampled_from(kinds)))
    for kind in kinds:
        assert step.view(SPEC, kind) == History.fold(records).view(SPEC, kind)


def test_unreadable_records_say_which():
    with pytest.raises(StoreCorrupt, match="Record 1"):
        History.fold([{"d": decision_to_json(Decision(0, 8))}, {"q": 1}])


@pytest.mark.parametrize(
    "change",
    [
        {"batch_sizes": ()},
        {"batch_sizes": (0,)},
        {"default": 9},
        {"eta": 1.5},
        {"beta": 0.9},
        {"window": 0},
        {"max_power_w": 0.0},
    ],
)
def test_wrong_jobs_are_refused(change):
    with pytest.raises(InvalidInput):
        JobSpec(**{"batch_sizes": (8, 16), "default": 8, **change})


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_results_must_be_numbers(bad):
    with pytest.raises(InvalidInput):
        Result(0, 1.0, bad, 1.0, True)
    with pytest.raises(InvalidInput):
        Result(0, 0.0, 1.0, 1.0, True)
