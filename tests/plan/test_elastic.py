"""DynamicFluid and Hydro's rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Device, Free, Placement, Plan, Running, Segment, Share, Trial
from penstock.plan import dynamic_widths, elastic
from penstock.plan._elastic import Idle, pays
from penstock.predict import Overhead

DEVICES = {f"cpu:{i}": Device(f"cpu:{i}") for i in range(16)}


def running(
    trial: int, shares: dict[str, float], left_s: float, *, rank: int | None = None, most: int = 8
) -> Running:
    placement = Placement(
        (Segment(Trial(trial, {}, 0)),),
        shares=tuple(Share(name, part) for name, part in shares.items()),
        max_devices=most,
    )
    return Running(placement, left_s, rank)


def plan(items: list[Running], free: dict[str, float], waiting: int = 0, left_s: float = 10.0) -> Plan:
    return Plan(
        waiting=tuple(
            Placement((Segment(Trial(100 + i, {}, 0)),), expected_s=left_s, max_devices=8)
            for i in range(waiting)
        ),
        free=tuple(Free(DEVICES[name], part) for name, part in free.items()),
        running=tuple(items),
        devices=DEVICES,
    )


def widths(result: Plan) -> dict[int, int]:
    return {r.placement.segments[0].trial.id: len(r.shares) for r in result.resized}


def test_algorithm_2_line_5_scales_up_only_when_it_ends_sooner() -> None:
    overhead = Overhead(beta=1.1, max_devices=8, epsilon_s=2.0)
    # 20 s on one device, 20 / 2 * 1.1 = 11 s on two: 11 + 2 < 20.
    assert pays(20, 1, 2, overhead)
    # 4 s on one, 2.2 s on two: 2.2 + 2 > 4.
    assert not pays(4, 1, 2, overhead)


def test_algorithm_2_line_7_scales_down_only_when_it_saves_device_time() -> None:
    # On four devices 20 s of work take 20/4 * 1.331 = 6.655 s (26.62 device seconds), on two 11 s (22).
    assert pays(20, 4, 2, Overhead(beta=1.1, max_devices=8, epsilon_s=2.0))  # 2 * (11 + 2) = 26 < 26.62
    assert not pays(20, 4, 2, Overhead(beta=1.1, max_devices=8, epsilon_s=2.5))
    assert not pays(20, 2, 2, Overhead(beta=1.1, max_devices=8))


def test_algorithm_2_after_figure_5() -> None:
    """When the two short trials of Figure 5 have ended (8 s), a device is idle and 6 s of 30 and 4 of 12 are left."""
    new = dynamic_widths([6, 4], [3, 1], devices=5, overhead=Overhead(max_sharing=2, max_devices=4))
    assert new == [3, 2]
    costly = Overhead(max_sharing=2, max_devices=4, epsilon_s=2.0)
    assert dynamic_widths([6, 4], [3, 1], devices=5, overhead=costly) == [3, 1]


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 12),
    st.floats(1, 1.2),
    st.floats(0, 20),
)
def test_dynamic_widths_never_make_things_worse(
    trials: list[tuple[float, int]], devices: int, beta: float, epsilon_s: float
) -> None:
    overhead = Overhead(beta=beta, max_devices=4, epsilon_s=epsilon_s)
    left, old = [t[0] for t in trials], [float(t[1]) for t in trials]
    for left_s, before, after in zip(
        left, old, dynamic_widths(left, old, devices=devices, overhead=overhead), strict=True
    ):
        if after > before:
            assert overhead.runtime_s(left_s, after) + epsilon_s < overhead.runtime_s(left_s, before)
        elif after < before:
            assert after * (overhead.runtime_s(left_s, after) + epsilon_s) < before * overhead.runtime_s(
                left_s, before
            )


def test_idle_devices_go_to_the_one_that_would_end_last() -> None:
    step = elastic(Overhead(max_devices=8))
    result = step(
        plan(
            [running(0, {"cpu:0": 1}, 10), running(1, {"cpu:1": 1}, 40)],
            {"cpu:2": 1, "cpu:3": 1, "cpu:4": 1},
        )
    )
    assert widths(result) == {1: 4}  # 40 s on four devices: as long as the other on one
    shares = result.resized[0].shares
    assert shares[0] == Share("cpu:1")  # it keeps what it has
    assert {share.device for share in shares[1:]} == {"cpu:2", "cpu:3", "cpu:4"}
    assert result.free == ()


def test_hydro_gives_idle_devices_to_the_best_trial() -> None:
    items = [running(0, {"cpu:0": 1}, 10, rank=2), running(1, {"cpu:1": 1}, 10, rank=0)]
    idle = {"cpu:2": 1.0, "cpu:3": 1.0}
    assert widths(elastic(Overhead(max_devices=8), idle="best")(plan(items, idle))) == {1: 3}
    # Up to d devices; the next best gets the rest.
    assert widths(elastic(Overhead(max_devices=2), idle="best")(plan(items, idle))) == {1: 2, 0: 2}


def test_hydro_gives_idle_devices_evenly() -> None:
    items = [running(i, {f"cpu:{i}": 1}, left) for i, left in enumerate((5.0, 50.0, 500.0))]
    idle = {f"cpu:{i}": 1.0 for i in range(3, 9)}
    assert widths(elastic(Overhead(max_devices=8), idle="even")(plan(items, idle))) == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("idle", ["longest", "waterfill", "best", "even"])
def test_epsilon_keeps_short_trials_as_they_are(idle: Idle) -> None:
    step = elastic(Overhead(max_devices=8, epsilon_s=10.0), idle=idle)
    items = [running(0, {"cpu:0": 1}, 9, rank=0), running(1, {"cpu:1": 1}, 400, rank=1)]
    before = plan(items, {"cpu:2": 1, "cpu:3": 1})
    after = step(before)
    assert set(widths(after)) == {1}


def test_who_shares_a_device_moves_to_an_idle_one() -> None:
    step = elastic(Overhead(alpha=1.5, max_sharing=2, max_devices=8, epsilon_s=0.5))
    result = step(
        plan(
            [running(0, {"cpu:0": 0.5}, 10), running(1, {"cpu:0": 0.5}, 12)],
            {"cpu:1": 1},
        )
    )
    assert [(r.placement.segments[0].trial.id, r.shares) for r in result.resized] == [(1, (Share("cpu:1"),))]


def test_who_is_changing_cannot_scale_or_is_exclusive_is_left_alone() -> None:
    changing = replace(running(0, {"cpu:0": 1}, 100), changing=True)
    fixed = running(1, {"cpu:1": 1}, 100, most=1)
    alone = running(2, {"cpu:2": 1}, 100)
    alone = replace(alone, placement=replace(alone.placement, exclusive=True))
    before = plan([changing, fixed, alone], {"cpu:3": 1})
    assert elastic(Overhead(max_devices=8))(before) == before


def test_a_trial_stays_on_one_kind_and_near_its_node() -> None:
    def device(name: str, kind: str, node: str) -> Device:
        return Device(name, kind=kind, node=node)

    devices = {
        d.id: d
        for d in (
            device("a0", "V100", "a"),
            device("a1", "V100", "a"),
            device("b0", "V100", "b"),
            device("b1", "V100", "b"),
            device("k0", "K80", "a"),
        )
    }
    item = running(0, {"a0": 1}, 100)
    idle = tuple(Free(devices[name]) for name in ("k0", "b0", "b1", "a1"))
    result = elastic(Overhead(max_devices=2))(Plan(free=idle, running=(item,), devices=devices))
    assert result.resized[0].shares == (Share("a0"), Share("a1"))
    result = elastic(Overhead(max_devices=8))(Plan(free=idle, running=(item,), devices=devices))
    assert {share.device for share in result.resized[0].shares} == {"a0", "a1", "b0", "b1"}


def test_wide_trials_make_room_for_waiting_ones() -> None:
    step = elastic(Overhead(beta=1.1, max_devices=8))
    wide = running(0, {f"cpu:{i}": 1.0 for i in range(4)}, 20)
    result = step(plan([wide], {}, waiting=3, left_s=20))
    assert widths(result) == {0: 1}  # four equal trials on four devices
    assert result.resized[0].shares == (Share("cpu:0"),)
    # What is on its way already is not asked for twice.
    going = replace(
        wide, changing=True, placement=result.resized[0].placement, leaving=wide.placement.shares[1:]
    )
    assert step(plan([going], {}, waiting=3, left_s=20)).resized == ()


def test_a_wide_straggler_keeps_its_devices() -> None:
    step = elastic(Overhead(beta=1.1, max_devices=4))
    straggler = running(0, {f"cpu:{i}": 1.0 for i in range(4)}, 400)
    other = running(1, {"cpu:4": 1.0}, 5)
    assert step(plan([straggler, other], {}, waiting=2, left_s=5)).resized == ()


def test_no_gain_no_change_when_nothing_is_idle() -> None:
    before = plan([running(0, {"cpu:0": 0.5}, 10)], {"cpu:0": 0.5})
    assert elastic(Overhead(alpha=1.2, max_sharing=2, max_devices=4))(before) == before


def test_devices_that_come_too_late_are_left_alone() -> None:
    """A change waits for the end of the epoch: in the last one it never comes, just before an end it comes at once."""
    overhead = Overhead(beta=1.05, max_devices=8, epsilon_s=1.0)

    def grown(left_s: float, error: float = 0.0, by_epochs: bool = True) -> dict[int, int]:
        placement = Placement(
            (Segment(Trial(1, {}, 0), until=10),),
            shares=(Share("cpu:0"),),
            expected_s=200.0,
            expected_error=error,
            max_devices=8,
        )
        return widths(
            elastic(overhead, by_epochs=by_epochs)(plan([Running(placement, left_s)], {"cpu:1": 1.0}))
        )

    assert grown(19.5) == {}  # of an epoch of 20 s
    assert grown(19.5, by_epochs=False) == {1: 2}  # as published
    assert grown(19.5, error=0.2) == {1: 2}  # of guesses nobody knows when an epoch ends
    assert grown(22.0) == {1: 2}  # 2 s + 1 s + 10.5 s on two devices
    assert grown(60.0) == {1: 2}
