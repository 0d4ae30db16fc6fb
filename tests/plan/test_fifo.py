"""fifo against what holds for any planner: nothing oversubscribed, nobody passed without a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Device, Free, Placement, Plan, Segment, Share, Trial
from penstock.core.errors import InvalidInput
from penstock.plan import fifo


def waiting(n: int, exclusive: frozenset[int] = frozenset()) -> tuple[Placement, ...]:
    return tuple(Placement((Segment(Trial(i, {}, 0)),), exclusive=i in exclusive) for i in range(n))


def ids(placements: tuple[Placement, ...]) -> list[int]:
    return [placement.segments[0].trial.id for placement in placements]


def devices(*fractions: float, backlog: int = 0, per_node: int = 4) -> tuple[Free, ...]:
    return tuple(
        Free(Device(f"d{i}", node=f"n{i // per_node}"), fraction, backlog)
        for i, fraction in enumerate(fractions)
    )


def test_one_trial_per_device_in_order() -> None:
    plan = fifo()(Plan(waiting(5), devices(1, 0.5, 1, 1)))
    assert [(p.segments[0].trial.id, p.shares) for p in plan.placed] == [
        (0, (Share("d0"),)),
        (1, (Share("d2"),)),
        (2, (Share("d3"),)),
    ]
    assert ids(plan.waiting) == [3, 4]
    assert [(f.device.id, f.fraction) for f in plan.free] == [("d1", 0.5)]


def test_fractions_spread_before_they_share() -> None:
    plan = fifo(0.5)(Plan(waiting(3), devices(1, 1)))
    assert [p.shares[0].device for p in plan.placed] == ["d0", "d1", "d0"]


def test_three_thirds_fill_a_device() -> None:
    plan = fifo(1 / 3)(Plan(waiting(7), devices(1, 1)))
    assert Counter(p.shares[0].device for p in plan.placed) == {"d0": 3, "d1": 3}
    assert plan.free == ()
    one_by_one = Plan(waiting(4), devices(1))
    for _ in range(3):  # the fractions come back from arithmetic, not from constants
        step = fifo(1 / 3)(Plan(one_by_one.waiting[:1], one_by_one.free))
        one_by_one = Plan(one_by_one.waiting[1:], step.free)
    assert one_by_one.free == ()


def test_several_devices_come_from_one_node() -> None:
    free = devices(1, 1, 1, 1, 1, per_node=3)
    plan = fifo(2)(Plan(waiting(3), free))
    assert [{s.device for s in p.shares} for p in plan.placed] == [{"d0", "d1"}, {"d3", "d4"}]
    assert ids(plan.waiting) == [2]
    assert [f.device.id for f in plan.free] == ["d2"]


def test_backlog_is_filled_round_robin() -> None:
    plan = fifo()(Plan(waiting(6), devices(1, 0, backlog=2)))
    assert [p.shares[0].device for p in plan.placed] == ["d0", "d0", "d1", "d0", "d1"]
    assert all(p.shares[0].fraction == 1 for p in plan.placed)
    assert ids(plan.waiting) == [5]
    few = fifo()(Plan(waiting(2), devices(0, 0, backlog=8)))
    assert [p.shares[0].device for p in few.placed] == ["d0", "d1"]
    assert [f.backlog for f in few.free] == [7, 7]


def test_exclusive_waits_for_a_whole_device_which_is_kept_for_it() -> None:
    plan = fifo(0.25)(Plan(waiting(5, frozenset({0})), devices(0.25, 0.75, 0.5)))
    assert ids(plan.waiting) == [0, 4]
    assert [(i, p.shares[0].device) for i, p in zip(ids(plan.placed), plan.placed, strict=True)] == [
        (1, "d2"),
        (2, "d0"),
        (3, "d2"),
    ]
    later = fifo(0.25)(Plan(plan.waiting, devices(0, 1, 0)))
    assert [(p.exclusive, p.shares[0]) for p in later.placed] == [(True, Share("d1", 1.0))]


def test_exclusive_is_never_queued_behind_another() -> None:
    plan = fifo()(Plan(waiting(4, frozenset({1})), devices(0, 0, backlog=2)))
    assert ids(plan.waiting) == [1, 3]
    # The device with the shortest queue gets nothing more, so it drains.
    assert [p.shares[0].device for p in plan.placed] == ["d0", "d0"]


def test_exclusive_never_starves() -> None:
    """Shared trials keep coming and both devices are busy; it gets its turn all the same."""
    passes = fifo(0.5)
    running: dict[int, tuple[str, int]] = {100: ("d0", 3), 101: ("d0", 6), 102: ("d1", 4), 103: ("d1", 7)}
    queue = list(waiting(200, frozenset({0})))
    for step in range(1, 60):
        running = {k: (d, end) for k, (d, end) in running.items() if end > step}
        used = Counter(d for d, _ in running.values())
        free = tuple(Free(Device(d), 1 - used[d] / 2) for d in ("d0", "d1") if used[d] < 2)
        plan = passes(Plan(tuple(queue[:6]), free))
        queue = [*plan.waiting, *queue[6:]]
        for placement in plan.placed:
            trial = placement.segments[0].trial.id
            if trial == 0:
                return
            running[1000 + trial] = (placement.shares[0].device, step + 2 + trial % 5)
    pytest.fail("the exclusive placement starved")


@settings(deadline=None)  # timings are never asserted
@given(
    width=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1, 2, 3]),
    fractions=st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.75, 1.0]), max_size=12),
    backlog=st.integers(0, 3),
    n=st.integers(0, 30),
    exclusive=st.frozensets(st.integers(0, 29), max_size=4),
)
def test_invariants(
    width: float, fractions: list[float], backlog: int, n: int, exclusive: frozenset[int]
) -> None:
    queue, free = waiting(n, exclusive), devices(*fractions, backlog=backlog)
    before = {f.device.id: f for f in free}
    plan = fifo(width)(Plan(queue, free, placed=(Placement((), (Share("other"),)),)))
    assert plan.placed[0].shares == (Share("other"),)  # what an earlier pass placed stays
    placed = plan.placed[1:]
    assert sorted(ids(placed) + ids(plan.waiting)) == list(range(n))  # none lost, none twice
    assert ids(plan.waiting) == sorted(ids(plan.waiting))
    # Walk the launches as an executor would: a share that does not fit is queued, at most `backlog` of them.
    left = {name: f.fraction for name, f in before.items()}
    queued: Counter[str] = Counter()
    for placement in placed:
        assert len({s.device for s in placement.shares}) == len(placement.shares)
        if width > 1:
            assert len(placement.shares) == width
            assert len({before[s.device].device.node for s in placement.shares}) == 1
        if all(left[s.device] >= s.fraction - 1e-6 for s in placement.shares):
            if placement.exclusive:
                assert all(left[s.device] == 1 and s.fraction == 1 for s in placement.shares)
            for share in placement.shares:
                left[share.device] -= share.fraction
        else:
            assert not placement.exclusive
            queued[placement.shares[0].device] += 1
    assert all(fraction >= -1e-6 for fraction in left.values())
    assert all(count <= backlog for count in queued.values())
    after = {f.device.id: f for f in plan.free}
    assert all(after[name].fraction <= left[name] + 1e-6 for name in after)
    assert all(after[name].backlog + queued[name] <= backlog for name in after)
    if not exclusive and width <= 1 and plan.waiting:  # work-conserving: who waits could not have run
        assert all(fraction < width - 1e-9 for fraction in left.values())
        assert sum(queued.values()) == backlog * len(free)
    if not exclusive:
        assert ids(placed) == list(range(len(placed)))  # first come first served


@pytest.mark.parametrize("width", [0.5, 1, 2])
def test_what_other_passes_know_is_kept(width: float) -> None:
    """Every field of the plan but the three that fifo is about."""
    known = {f.name: object() for f in fields(Plan) if f.name not in ("waiting", "free", "placed")}
    assert known
    plan = fifo(width)(replace(Plan(waiting(2), devices(1, 1)), **known))
    assert {name: getattr(plan, name) for name in known} == known


@pytest.mark.parametrize("width", [0, -1, 1.5, float("nan"), float("inf"), "1", True, None])
def test_width_is_checked(width: object) -> None:
    with pytest.raises(InvalidInput, match="width"):
        fifo(width)  # type: ignore[arg-type]
