"""StaticFluid's theorems, and the improved packing, against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.plan import lower_bound_s, pack, static_fluid, waterfill_widths
from penstock.plan._pack import Allotment, forecast_s, makespan_s
from penstock.plan._place import Layout, Timeline, run_through, shelve
from penstock.predict import Overhead

runtimes_lists = st.lists(st.floats(0.1, 100), min_size=1, max_size=12)


def ideal(runtimes: Sequence[float], *, devices: int, c: int, d: int) -> tuple[Layout, Timeline]:
    """StaticFluid in the ideal case of Theorem 1: the area of a rectangle stays the same whatever its width."""
    widths = waterfill_widths(runtimes, devices=devices, max_sharing=c, max_devices=min(d, devices))
    layout = shelve(widths, [r / w for r, w in zip(runtimes, widths, strict=True)], devices=devices)
    return layout, run_through(layout, runtimes, slowdown=float, speed=float)


def brute_force(runtimes: Sequence[float], *, devices: int, d: int) -> float:
    """The best schedule of whole widths in the ideal case: all widths, all orders, each as early as it can.

    Sharing a device changes nothing in the ideal case: two that share end no sooner than one after the other.
    """
    best = math.inf
    for widths in itertools.product(range(1, min(d, devices) + 1), repeat=len(runtimes)):
        for order in itertools.permutations(range(len(runtimes))):
            ready = [0.0] * devices
            for trial in order:
                ready.sort()
                end = ready[widths[trial] - 1] + runtimes[trial] / widths[trial]
                ready[: widths[trial]] = [end] * widths[trial]
            best = min(best, max(ready))
    return best


def check(layout: Layout, timeline: Timeline, devices: int) -> None:
    """Nobody lost, nobody before time zero, no device oversubscribed at any time."""
    assert all(start >= 0 for start in timeline.starts_s)
    assert all(end > start for start, end in zip(timeline.starts_s, timeline.ends_s, strict=True))
    for trial, mine in enumerate(layout.devices):
        assert len(set(mine)) == max(1, layout.widths[trial])
        assert all(0 <= device < devices for device in mine)
    for device in range(devices):
        on_it = [t for t, mine in enumerate(layout.devices) if device in mine]
        for begin in {timeline.starts_s[t] for t in on_it}:
            held = sum(
                min(1.0, layout.widths[t])
                for t in on_it
                if timeline.starts_s[t] <= begin < timeline.ends_s[t] - 1e-9
            )
            assert held <= 1 + 1e-9


def test_figure_5_ends_after_12_seconds() -> None:
    layout, timeline = ideal([4, 4, 12, 30], devices=5, c=2, d=4)
    assert timeline.ends_s == pytest.approx(
        (8, 8, 12, 10)
    )  # the two that share take turns; 30 s on 3 devices
    check(layout, timeline, 5)
    assert brute_force([4, 4, 12, 30], devices=5, d=4) == pytest.approx(10)  # Figure 5b, the optimum


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.5, 20), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_theorem_1_against_brute_force(runtimes: list[float], devices: int, c: int, d: int) -> None:
    layout, timeline = ideal(runtimes, devices=devices, c=c, d=d)
    check(layout, timeline, devices)
    best_s = brute_force(runtimes, devices=devices, d=d)
    assert timeline.makespan_s <= 2 * best_s * (1 + 1e-9)
    # The bound that larger instances are held to is one: no schedule beats it.
    assert best_s >= max(sum(runtimes) / devices, max(runtimes) / min(d, devices)) * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=60),
    st.integers(1, 16),
    st.integers(1, 5),
    st.integers(1, 16),
)
def test_theorem_1_against_the_lower_bound(runtimes: list[float], devices: int, c: int, d: int) -> None:
    layout, timeline = ideal(runtimes, devices=devices, c=c, d=d)
    check(layout, timeline, devices)
    bound_s = max(math.fsum(runtimes) / devices, max(runtimes) / min(d, devices))
    assert timeline.makespan_s <= 2 * bound_s * (1 + 1e-9)


@st.composite
def overheads(draw: st.DrawFn) -> Overhead:
    """All that ``within_bounds`` leaves: alpha < c / (c - 1) and beta < d / (d - 1), where Lemma 6 has 1 + 1 / d."""
    c, d = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    alpha = draw(st.floats(1, 3 if c == 1 else c / (c - 1) - 1e-3))
    beta = draw(st.floats(1, 3 if d == 1 else d / (d - 1) - 1e-3))
    return Overhead(alpha, beta, c, d)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=60), st.integers(1, 16), overheads())
def test_theorem_2(runtimes: list[float], devices: int, overhead: Overhead) -> None:
    layout = static_fluid(runtimes, devices=devices, overhead=overhead)
    alpha, beta = overhead.alpha, overhead.beta
    timeline = run_through(layout, runtimes, slowdown=lambda p: alpha ** (p - 1), speed=overhead.speed)
    check(layout, timeline, devices)
    # A bound of OPT from below, so that this is stricter than the theorem: the least area, the longest trial.
    widths = [1 / overhead.max_sharing, *range(1, min(devices, overhead.max_devices) + 1)]
    area = min(w * overhead.runtime_s(1, w) for w in widths)
    fastest = min(overhead.runtime_s(1, w) for w in widths)
    opt_s = max(area * math.fsum(runtimes) / devices, fastest * max(runtimes))
    packing = alpha ** (1 / (alpha - 1)) if alpha > 1 + 1e-9 else math.e
    scaling = beta ** (1 / (beta - 1) - 1) if beta > 1 + 1e-9 else math.e
    bound_s = max(2 * opt_s + max(runtimes) * packing, 2 * opt_s * scaling)
    assert timeline.makespan_s <= bound_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(runtimes_lists, st.integers(1, 8), overheads())
def test_pack_never_loses_to_static_fluid_or_to_the_longest_first(
    runtimes: list[float], devices: int, overhead: Overhead
) -> None:
    def play(layout: Layout) -> float:
        timeline = run_through(
            layout, runtimes, slowdown=lambda p: overhead.alpha ** (p - 1), speed=overhead.speed
        )
        check(layout, timeline, devices)
        return timeline.makespan_s

    packed_s = play(pack(runtimes, devices=devices, overhead=overhead))
    assert packed_s <= play(static_fluid(runtimes, devices=devices, overhead=overhead)) * (1 + 1e-9)
    longest_first = [0.0] * devices
    for runtime in sorted(runtimes, reverse=True):
        longest_first[longest_first.index(min(longest_first))] += runtime
    assert packed_s <= max(longest_first) * (1 + 1e-9)
    assert packed_s >= lower_bound_s(runtimes, devices=devices, overhead=overhead) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.5, 20), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_pack_is_near_the_optimum_of_small_groups(runtimes: list[float], devices: int, d: int) -> None:
    packed = pack(runtimes, devices=devices, overhead=Overhead(max_devices=d))  # c = 1: no sharing
    ends_s = run_through(packed, runtimes, slowdown=float, speed=float).makespan_s
    assert ends_s <= 2 * brute_force(runtimes, devices=devices, d=d) * (1 + 1e-9)  # Theorem 1's bound


def search(runtimes: Sequence[float], *, devices: int, epochs: int, overhead: Overhead) -> float:
    """The best schedule that changes widths at ends of epochs: every placement of every trial at every such time.

    As a cluster works: a change costs epsilon on the new devices, up to c single-device trials share a device and slow
    each other down, and who runs is not interrupted.
    """
    places: list[tuple[int, ...]] = []
    for width in range(1, min(devices, overhead.max_devices) + 1):
        places += itertools.combinations(range(devices), width)
    best = math.inf

    def allowed(where: Sequence[tuple[int, ...]]) -> bool:
        for device in range(devices):
            mine = [place for place in where if device in place]
            if len(mine) > overhead.max_sharing or (len(mine) > 1 and any(len(p) > 1 for p in mine)):
                return False
        return True

    def step(
        now_s: float,
        where: tuple[tuple[int, ...], ...],
        left: tuple[float, ...],  # work to the end of the epoch
        more: tuple[int, ...],  # epochs after this one
        pause_s: tuple[float, ...],
        open_: frozenset[int],  # who may start or change now
    ) -> None:
        nonlocal best
        if now_s >= best or not any(m >= 0 for m in more):
            best = min(best, now_s)
            return
        choices = []
        for trial, place in enumerate(where):
            if more[trial] < 0:
                choices.append([()])
            elif trial in open_ or not place:
                choices.append([*places] if place else [(), *places])
            else:
                choices.append([place])
        for chosen in itertools.product(*choices):
            if not allowed(chosen) or not any(chosen):
                continue
            rates, pauses = [], []
            for trial, place in enumerate(chosen):
                changed = bool(where[trial]) and place != where[trial]
                pauses.append(overhead.epsilon_s if changed else pause_s[trial])
                crowd = max((sum(d in p for p in chosen) for d in place), default=1)
                rates.append(overhead.speed(len(place)) * overhead.alpha ** (1 - crowd) if place else 0.0)
            ends = [p + w / r if r else math.inf for p, w, r in zip(pauses, left, rates, strict=True)]
            after_s = min(ends)
            new_left, new_more, new_where, due = list(left), list(more), list(chosen), set()
            for trial, end in enumerate(ends):
                if end <= after_s * (1 + 1e-9):
                    due.add(trial)
                    new_more[trial] -= 1
                    new_left[trial] = runtimes[trial] / epochs
                    if new_more[trial] < 0:
                        new_where[trial] = ()
                elif rates[trial]:
                    new_left[trial] -= rates[trial] * max(0.0, after_s - pauses[trial])
            step(
                now_s + after_s,
                tuple(new_where),
                tuple(new_left),
                tuple(new_more),
                tuple(max(0.0, p - after_s) for p in pauses),
                frozenset(due),
            )

    count = len(runtimes)
    step(
        0.0,
        ((),) * count,
        tuple(r / epochs for r in runtimes),
        (epochs - 1,) * count,
        (0.0,) * count,
        frozenset(),
    )
    return best


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1, 20), min_size=1, max_size=3),
    st.integers(1, 2),
    overheads(),
    st.sampled_from([0.0, 0.1, 2.0]),
)
def test_no_schedule_beats_the_lower_bound(
    runtimes: list[float], devices: int, overhead: Overhead, epsilon_s: float
) -> None:
    overhead = replace(overhead, epsilon_s=epsilon_s)
    epochs = 3 if len(runtimes) == 1 else 2 if len(runtimes) == 2 else 1
    best_s = search(runtimes, devices=devices, epochs=epochs, overhead=overhead.within_bounds())
    bound_s = lower_bound_s(runtimes, devices=devices, overhead=overhead)
    assert bound_s <= best_s * (1 + 1e-6)
    # And it is no weaker than the work, packed as well as can be, and the longest trial.
    packed = min(overhead.speed(1 / p) ** -1 / p for p in range(1, overhead.within_bounds().max_sharing + 1))
    assert bound_s >= packed * sum(runtimes) / devices * (1 - 1e-6)


def test_the_lower_bound_is_met_where_it_can_be() -> None:
    share = Overhead(alpha=1.5, max_sharing=2)
    assert lower_bound_s([10.0] * 4, devices=2, overhead=share) == pytest.approx(15)  # two pairs
    wide = Overhead(beta=1.1, max_devices=2)
    assert lower_bound_s([10.0] * 2, devices=4, overhead=wide) == pytest.approx(5.5)  # each on two
    # Three on four devices: all on two in turn take 11 s each. What changes its width pays for that: it saves nothing.
    slow = replace(wide, epsilon_s=5.0)
    assert lower_bound_s([10.0] * 3, devices=4, overhead=slow) == pytest.approx(3 * 11 / 4)
    # For nothing it would mix: 10 (1 - x) + 5.5 x seconds, of which 10 (1 - x) + 11 x device seconds.
    x = (40 - 30) / (4 * 4.5 + 3)
    assert lower_bound_s([10.0] * 3, devices=4, overhead=wide) == pytest.approx(10 - 4.5 * x)


def test_pack_puts_one_too_many_with_the_shortest() -> None:
    # Nine trials, eight devices: one pair takes 1.3 times as long, a second round would take twice.
    layout = pack([10.0] * 9, devices=8, overhead=Overhead(alpha=1.3, max_sharing=2))
    ends_s = run_through(layout, [10.0] * 9, slowdown=lambda p: 1.3 ** (p - 1), speed=float).makespan_s
    assert ends_s == pytest.approx(13.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=30), st.integers(1, 12), overheads())
def test_horizon_is_the_least_into_which_the_work_fits(
    runtimes: list[float], devices: int, overhead: Overhead
) -> None:
    allotment = Allotment(overhead)
    model = allotment.overhead
    horizon_s = allotment.horizon_s(runtimes, devices)

    def work(horizon: float) -> float:
        total = 0.0
        for runtime in runtimes:
            width = allotment.width(runtime, horizon)
            total += width * model.runtime_s(runtime, width)
        return total

    assert work(horizon_s * 1.0001) <= devices * horizon_s * 1.001
    fastest = min(model.runtime_s(1, w) for w in range(1, min(devices, model.max_devices) + 1))
    if horizon_s > fastest * max(runtimes) * 1.001:  # otherwise the longest trial is the limit
        assert work(horizon_s * 0.999) >= devices * horizon_s * 0.998
    shelf_s = allotment.shelf_s(runtimes, devices)
    if shelf_s is not None:
        assert shelf_s >= horizon_s * (1 - 1e-4)
        width = sum(allotment.width(runtime, shelf_s * 1.0001) for runtime in runtimes)
        assert width <= devices + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 8))
def test_forecast_is_list_scheduling_where_nothing_is_shared(
    runtimes: list[float], devices: int, d: int
) -> None:
    overhead = Overhead(beta=1.01, max_devices=d)
    widths = waterfill_widths(runtimes, devices=devices, max_devices=min(d, devices))
    quick_s = forecast_s(widths, runtimes, ready_s=[[0.0]] * devices, overhead=overhead)
    played_s = makespan_s(runtimes, widths, devices=devices, overhead=overhead)
    assert quick_s == pytest.approx(played_s, rel=1e-6)


def test_forecast_knows_busy_devices() -> None:
    overhead = Overhead(alpha=1.5, max_sharing=2, max_devices=2)
    # One device is busy for 4 s, one has a place free at once and one after 1 s.
    ready_s = [[4.0, 4.0], [0.0, 1.0]]
    assert forecast_s([1.0], [10.0], ready_s=ready_s, overhead=overhead) == pytest.approx(11)
    assert forecast_s([0.5], [10.0], ready_s=ready_s, overhead=overhead) == pytest.approx(15)
    assert forecast_s([2.0], [10.0], ready_s=ready_s, overhead=overhead) == pytest.approx(9)
    assert forecast_s([0.5] * 3, [10.0] * 3, ready_s=ready_s, overhead=overhead) == pytest.approx(19)


def test_wrong_input_is_named() -> None:
    with pytest.raises(InvalidInput, match="devices"):
        pack([1.0], devices=0, overhead=Overhead())
    with pytest.raises(InvalidInput, match=r"1\.5"):
        shelve([1.5], [1.0], devices=2)
