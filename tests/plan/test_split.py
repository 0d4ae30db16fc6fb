"""Dynamic split: who leaves a running fused group for an idle device, and when that pays."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Device
from penstock.core.errors import InvalidInput
from penstock.plan import FusedGroup, FusionChoice, FusionProfile, merges, splits
from penstock.plan._split import end_s, parts, time_left_s

LINEAR = FusionChoice(16, 64, tuple(FusionProfile(n, 0.1 * n, 10 * n) for n in (1, 2, 4, 8, 16)), "")
"""Members cost as much fused as one after another: two halves on two devices take half the time."""

FREE = FusionChoice(16, 64, tuple(FusionProfile(n, 0.1, 10 * n) for n in (1, 2, 4, 8, 16)), "")
"""Members come for nothing: half a group takes as long as all of it."""


def group_of(count=16, left=10, epoch_s=8.0, choice=LINEAR, device="cpu:0", kind="cpu", first=0):
    lefts = (left,) * count if isinstance(left, int) else tuple(left)
    members = tuple(range(first, first + len(lefts)))
    return FusedGroup(members, lefts, epoch_s, Device(device, kind), "net", choice)


def idle(count, kind="cpu"):
    return [Device(f"{kind}:{90 + n}", kind) for n in range(count)]


def test_sixteen_members_are_halved():
    (order,) = splits([group_of()], idle(1), cost_s=1.0)
    assert order.device == "cpu:90"
    assert len(order.members) == 8
    assert set(order.members) < set(range(16))
    assert end_s(group_of(), 1) == pytest.approx(80.0)
    assert end_s(group_of(), 2, cost_s=1.0) == pytest.approx(41.0)


def test_three_idle_devices_make_quarters():
    orders = splits([group_of()], idle(3), cost_s=1.0)
    assert [len(order.members) for order in orders] == [4, 4, 4]
    assert [order.device for order in orders] == ["cpu:90", "cpu:91", "cpu:92"]


@pytest.mark.parametrize(
    "group",
    [
        group_of(choice=FREE),  # half of it takes as long
        group_of(left=0),  # it ends with this epoch
        group_of(left=1, epoch_s=0.1),  # the rest is shorter than a split
        group_of(left=[5] + [0] * 15),  # there is one left to train
    ],
    ids=["free", "done", "short", "one"],
)
def test_what_does_not_pay_is_not_split(group):
    assert splits([group], idle(2), cost_s=1.0) == ()


def test_devices_of_another_kind_are_left_alone():
    assert splits([group_of()], idle(2, "cuda"), cost_s=0.0) == ()


def test_without_a_measurement_half_of_an_epoch_is_taken_to_be_common():
    group = group_of(choice=None)
    assert group.epoch_of_s(8) == pytest.approx(6.0)
    assert len(splits([group], idle(1), cost_s=1.0)) == 1
    assert splits([group], idle(1), cost_s=30.0) == ()


def test_groups_above_the_fusion_count_train_one_after_another():
    profiles = (FusionProfile(1, 1.0, 1), FusionProfile(2, 1.2, 1), FusionProfile(4, 1.6, 1))
    group = group_of(8, choice=FusionChoice(4, 8, profiles, ""), epoch_s=3.2)
    assert group.epoch_of_s(8) == pytest.approx(3.2)
    assert group.epoch_of_s(4) == pytest.approx(1.6)
    assert group.epoch_of_s(6) == pytest.approx(2.8)  # twice three: 2 x 1.4


def test_who_is_done_leaves_a_group():
    group = group_of(left=[3, 1], epoch_s=2.0)
    assert time_left_s(group, group.epochs_left) == pytest.approx(2.0 + 2 * 1.0)


lefts = st.lists(st.integers(0, 12), min_size=1, max_size=9)
some = st.lists(
    st.tuples(lefts, st.floats(0.01, 10.0), st.sampled_from([LINEAR, FREE, None])), min_size=1, max_size=4
)


def made(drawn):
    return [
        group_of(left=left, epoch_s=epoch_s, choice=choice, device=f"cpu:{at}", first=100 * at)
        for at, (left, epoch_s, choice) in enumerate(drawn)
    ]


@given(some, st.integers(0, 6), st.floats(0.0, 20.0))
def test_orders_are_sound_and_worth_it(drawn, devices, cost_s):
    groups = made(drawn)
    orders = splits(groups, idle(devices), cost_s=cost_s)
    assert len({order.device for order in orders}) == len(orders) <= devices
    moved = [trial for order in orders for trial in order.members]
    assert len(set(moved)) == len(moved)
    for group in groups:
        own = [order.members for order in orders if set(order.members) & set(group.members)]
        if not own:
            continue
        assert all(set(part) <= set(group.members) for part in own)
        stay = set(group.members).difference(*own)
        sizes = [len(stay), *map(len, own)]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        left = dict(zip(group.members, group.epochs_left, strict=True))
        after_s = cost_s + max(time_left_s(group, [left[t] for t in part]) for part in [stay, *own])
        assert after_s <= 0.9 * time_left_s(group, group.epochs_left) * (1 + 1e-9)


@given(some, st.integers(0, 4))
def test_the_last_end_is_as_early_as_can_be(drawn, devices):
    """Against all ways to hand the devices out, where splits cost nothing and any gain counts."""
    groups = made([(left, epoch_s, LINEAR) for left, epoch_s, _ in drawn])
    orders = splits(groups, idle(devices), cost_s=0.0, least_gain=0.0)
    counts = [1 + sum(bool(set(o.members) & set(g.members)) for o in orders) for g in groups]
    found = max(end_s(g, c) for g, c in zip(groups, counts, strict=True))
    best = min(
        max(end_s(g, c) for g, c in zip(groups, ways, strict=True))
        for ways in product(*[range(1, min(devices, len(g.members) - 1) + 2) for g in groups])
        if sum(ways) - len(ways) <= devices
    )
    assert found == pytest.approx(best)


@given(lefts, st.integers(1, 9))
def test_parts_are_even_and_whole(left, count):
    group = group_of(left=left)
    count = min(count, len(left))
    found = parts(group, count)
    assert sorted(trial for part in found for trial in part) == list(group.members)
    assert all(list(part) == sorted(part) for part in found)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_what_was_split_merges_back_when_its_device_leaves():
    here, there = group_of(8, device="cpu:0"), group_of(8, device="cpu:1", first=8)
    (order,) = merges([here, there], {"cpu:1"})
    assert order.members == tuple(range(16))
    assert order.device == "cpu:0"


@given(some, st.data())
def test_merges_keep_everybody_within_memory(drawn, data):
    groups = made([(left, epoch_s, LINEAR) for left, epoch_s, _ in drawn])
    names = [group.device.id for group in groups]
    leaving = data.draw(st.sets(st.sampled_from(names)))
    orders = merges(groups, leaving)
    assert len({order.device for order in orders}) == len(orders)
    for order in orders:
        assert order.device not in leaving
        assert len(set(order.members)) == len(order.members) <= LINEAR.limit
        (target,) = [group for group in groups if group.device.id == order.device]
        assert order.members[: len(target.members)] == target.members
    taken = {trial for order in orders for trial in order.members}
    for group in groups:
        inside = set(group.members) & taken
        assert inside in (set(), set(group.members))
        if group.device.id in leaving and len(leaving) < len(names):
            assert inside  # the limit is above all members here


def test_memory_bounds_merges():
    tight = FusionChoice(8, 8, LINEAR.profiles, "")
    groups = [group_of(8, choice=tight), group_of(4, choice=tight, device="cpu:1", first=8)]
    assert merges(groups, {"cpu:1"}) == ()


def test_wrong_values_are_named():
    with pytest.raises(InvalidInput, match="as many"):
        FusedGroup((1, 2), (3,), 1.0, Device("cpu:0"))
    with pytest.raises(InvalidInput, match="at least 0"):
        FusedGroup((1,), (-3,), 1.0, Device("cpu:0"))
    with pytest.raises(InvalidInput, match="cost_s"):
        splits([], [], cost_s=-1.0)
