"""Adaptive fusion: memory line, measured counts, even groups, devices by weight."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.device import Device
from penstock.core.errors import InvalidInput
from penstock.core.group import Segment
from penstock.core.plan import Free, Placement, Plan
from penstock.core.trial import Trial
from penstock.plan import (
    FusionChoice,
    FusionProfile,
    apart,
    choose_count,
    fused_sizes,
    fusion,
    fusion_limit,
    must_agree,
    share_devices,
)

GB = 2**30


def segment(number, config=None, *, start=0, until=10, options=None):
    return Segment(
        Trial(number, config or {"lr": 0.1}, number), start=start, until=until, options=options or {}
    )


def machine(step_of, base_bytes=GB, each_bytes=GB // 8):
    """A device whose step time is a function of the count; remembers what was asked."""
    asked = []

    def measure(count):
        asked.append(count)
        return step_of(count), base_bytes + each_bytes * count

    measure.asked = asked
    return measure


def test_what_looks_like_a_small_gain_is_measured_again():
    """The first look at the unfused step is slow by chance: two fused members only seem faster."""
    looks = {1: iter([1.3, 1.0]), 2: iter([2.1, 2.05])}
    choice = choose_count(lambda count: (next(looks[count]), GB), 2)
    assert choice.count == 1
    assert choice.reason == "fusing gains less than it is worth"
    assert [(profile.count, profile.step_s) for profile in choice.profiles] == [(1, 1.0), (2, 2.05)]


def test_the_memory_bound_is_the_line_through_one_and_two():
    # Hydro Fig. 8 (b): memory grows linearly; 676 narrow ResNet-18s fit an A100 of 40 GB at about 59 MiB each.
    one, two = FusionProfile(1, 1.0, 1000 + 59), FusionProfile(2, 1.0, 1000 + 2 * 59)
    assert fusion_limit(one, two, 1000 + 676 * 59) == 676
    assert fusion_limit(one, two, 1000 + 677 * 59 - 1) == 676
    assert fusion_limit(one, two, 10) == 1
    with pytest.raises(InvalidInput, match="rising"):
        fusion_limit(two, one, GB)
    with pytest.raises(InvalidInput, match="available_bytes"):
        fusion_limit(one, two, 0)


def test_a_free_lunch_is_eaten_whole():
    measure = machine(lambda count: 1.0)
    choice = choose_count(measure, 50)
    assert choice.count == 50
    assert measure.asked == [1, 2, 4, 8, 16, 32, 50]
    assert choice.gain == 50


def test_more_is_not_always_better():
    # throughput 1, 1.6, 2.2, 1.9, 1.5: convolutions that fall out of the caches
    rates = {1: 1.0, 2: 1.6, 4: 2.2, 8: 1.9, 16: 1.5, 32: 9.0}
    measure = machine(lambda count: count / rates[count])
    choice = choose_count(measure, 64)
    assert choice.count == 4
    assert 32 not in measure.asked
    assert choice.gain == pytest.approx(2.2)


def test_many_members_are_not_measured_twice_in_vain():
    rates = {1: 1.0, 2: 1.1, 4: 1.1, 8: 1.8, 16: 1.9, 32: 1.92, 64: 9.0}
    measure = machine(lambda count: count / rates[count])
    assert choose_count(measure, 64).count == 16  # 4 was no better than 2, and yet 8 was tried
    assert measure.asked == [1, 2, 4, 8, 16, 32]


def test_of_counts_that_train_as_fast_the_smallest_is_taken():
    rates = {1: 1.0, 2: 1.4, 4: 1.55, 8: 1.58, 16: 1.6}
    assert choose_count(machine(lambda count: count / rates[count]), 16).count == 4


def test_not_fusing_is_an_answer():
    choice = choose_count(machine(lambda count: 1.2 * count if count > 1 else 1.0), 16)
    assert choice.count == 1
    assert "no count is faster" in choice.reason
    assert choose_count(machine(lambda count: 0.99 * count), 16).count == 1
    assert (
        choose_count(lambda count: (1.0, 1) if count == 1 else None, 16).reason == "2 members can't be fused"
    )


def test_memory_stops_the_search():
    measure = machine(lambda count: 1.0)
    choice = choose_count(measure, 100, available_bytes=2 * GB)
    assert choice.limit == choice.count == 8
    assert max(measure.asked) == 8
    tight = choose_count(measure, 100, available_bytes=GB + GB // 8)
    assert tight.count == 1
    assert "memory" in tight.reason


@given(st.lists(st.floats(0.01, 10), min_size=8, max_size=8), st.integers(1, 128))
def test_the_choice_is_the_best_of_what_was_measured(steps, trials):
    table = {2**i: step for i, step in enumerate(steps)}
    measure = machine(lambda count: table.get(count, count))
    choice = choose_count(measure, trials)
    best = max(profile.throughput for profile in choice.profiles)
    alone = choice.profiles[0].throughput
    near = min(profile.count for profile in choice.profiles if profile.throughput >= 0.95 * best)
    found = {profile.count: profile.throughput for profile in choice.profiles}
    assert choice.count <= trials
    assert choice.count == (near if found[near] >= 1.05 * alone else 1)
    assert choice.gain >= 1.0


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 16))
def test_groups_are_even_small_enough_and_use_the_devices(trials, count, devices):
    sizes = fused_sizes(trials, count, devices)
    assert sum(sizes) == trials
    assert max(sizes) <= count
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) >= min(devices, trials)
    # no more rounds than needed
    assert math.ceil(len(sizes) / devices) == math.ceil(math.ceil(trials / count) / min(devices, trials)) or (
        len(sizes) == trials
    )


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=12), st.integers(0, 64))
def test_devices_follow_the_weights(weights, devices):
    shares = share_devices(weights, devices)
    assert sum(shares) == devices
    if devices >= len(weights):
        assert min(shares) >= 1
        total = sum(weights)
        for share, weight in zip(shares, weights, strict=True):
            quota = 1 + (devices - len(weights)) * weight / total
            assert abs(share - quota) <= 1 + 1e-9
    with pytest.raises(InvalidInput, match="Weights"):
        share_devices([1.0, 0.0], 2)


def test_what_must_agree():
    base = segment(0, {"lr": 0.1, "width": 8, "batch_size": 32})

    def key(s):
        return must_agree(s, structural=("width",), batch_size=64)

    assert key(base) == key(segment(1, {"lr": 0.9, "width": 8, "batch_size": 32}))
    assert key(base) == key(segment(1, {"width": 8, "batch_size": 32}, start=5, until=15))
    assert key(base) != key(segment(1, {"width": 9, "batch_size": 32}))
    assert key(base) != key(segment(1, {"width": 8}))
    assert key(base) != key(segment(1, {"width": 8, "batch_size": 32}, until=20))
    assert key(segment(1, options={"mode": "explore"})) is None
    hash(must_agree(segment(2, {"layers": [4, [8]]}), structural=("layers",)))


def waiting(*segments, **more):
    return tuple(Placement((s,), expected_s=10.0, since_s=float(s.trial.id), **more) for s in segments)


def test_the_pass_merges_what_agrees_and_keeps_the_rest_in_place():
    configs = [{"batch_size": 32}, {"batch_size": 64}] * 3 + [{"batch_size": 128}]
    segments = [segment(i, config) for i, config in enumerate(configs)]
    key = must_agree
    measured = choose_count(machine(lambda count: 1.0 + 0.1 * (count - 1)), 3)
    choices = {key(segments[0]): measured, key(segments[1]): measured, key(segments[6]): measured}
    retried = Placement((segment(9, {"batch_size": 32}),), attempt=1)
    plan = Plan(waiting=(*waiting(*segments), retried), free=(Free(Device("cpu:0")),))
    merged = fusion(key, choices)(plan).waiting
    assert [[s.trial.id for s in p.segments] for p in merged] == [[0, 2, 4], [1, 3, 5], [6], [9]]
    assert merged[0].expected_s == pytest.approx(10.0 * 1.2)
    assert merged[0].since_s == 0.0
    assert merged[0].memory_bytes == GB + 3 * (GB // 8)
    assert merged[3] is retried


def test_the_pass_spreads_a_group_over_the_free_devices():
    segments = [segment(i) for i in range(8)]
    choices = {must_agree(segments[0]): choose_count(machine(lambda count: 1.0), 8)}
    free = tuple(Free(Device(f"cpu:{i}")) for i in range(2))
    merged = fusion(must_agree, choices)(Plan(waiting=waiting(*segments), free=free)).waiting
    assert [len(p.segments) for p in merged] == [4, 4]


def test_the_pass_does_nothing_where_fusion_does_not_pay_or_is_not_measured():
    segments = [segment(i) for i in range(4)]
    plan = Plan(waiting=waiting(*segments), free=(Free(Device("cpu:0")),))
    slow = choose_count(machine(lambda count: 2.0 * count if count > 1 else 1.0), 4)
    assert fusion(must_agree, {must_agree(segments[0]): slow})(plan) == plan
    assert fusion(must_agree, {})(plan) == plan
    alone = Plan(waiting=waiting(*segments, exclusive=True))
    fast = choose_count(machine(lambda count: 1.0), 4)
    assert fusion(must_agree, {must_agree(segments[0]): fast})(alone) == alone


def queued(*segments, attempt=0):
    return [Placement((each,), attempt=attempt) for each in segments]


def test_kinds_without_a_choice_are_merged_to_be_measured():
    one = Free(Device("cpu:0", "cpu"))
    plan = Plan(tuple(queued(*(segment(n) for n in range(6)))), (one,))
    assert len(fusion(must_agree, {})(plan).waiting) == 6
    merged = fusion(must_agree, {}, unmeasured=4)(plan).waiting
    assert [len(p.segments) for p in merged] == [3, 3]
    assert all(p.memory_bytes is None and p.expected_s is None for p in merged)


def test_what_was_lost_is_merged_with_its_like_once_and_then_tried_alone():
    one = Free(Device("cpu:0", "cpu"))
    fresh = queued(segment(0), segment(1))
    lost = queued(segment(2), segment(3), attempt=1)
    again = queued(segment(4), segment(5), attempt=2)
    plan = Plan((*fresh, *lost, *again), (one,))
    merged = fusion(must_agree, {}, unmeasured=8)(plan).waiting
    assert [(len(p.segments), p.attempt) for p in merged] == [(2, 0), (2, 1), (1, 2), (1, 2)]


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 1))
def test_taking_apart_is_the_reverse_of_merging(sizes, attempt):
    numbers = iter(range(100))
    groups = [tuple(segment(next(numbers)) for _ in range(size)) for size in sizes]
    plan = apart(Plan(tuple(Placement(group, attempt=attempt) for group in groups)))
    assert [p.segments for p in plan.waiting] == [(each,) for group in groups for each in group]
    assert all(p.attempt == attempt for p in plan.waiting)


def test_small_layers_may_lose_at_two_and_gain_at_eight():
    rates = {1: 1.0, 2: 0.6, 4: 0.9, 8: 1.8, 16: 3.0}
    choice = choose_count(machine(lambda count: count / rates[count]), 16)
    assert choice.count == 16


def test_measuring_ends_when_too_little_is_left():
    measure = machine(lambda count: 1.0)
    choice = choose_count(measure, 64, worth=lambda throughput: throughput < 4)
    assert measure.asked == [1, 2, 4]
    assert choice.count == 4


def test_a_choice_survives_the_journal():
    choice = choose_count(machine(lambda count: 1.0), 8)
    assert FusionChoice.from_json(json.loads(json.dumps(choice.to_json()))) == choice
