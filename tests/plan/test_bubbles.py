"""Bubbles: closed forms, the paper's Fig. 9, a greedy simulation in ticks, and what is placed in them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.device import Device
from penstock.core.errors import InvalidInput
from penstock.core.group import Segment
from penstock.core.plan import Free, Placement, Plan
from penstock.core.trial import Trial
from penstock.plan import FusedGroup, FusionChoice, FusionProfile, fifo
from penstock.plan._bubbles import (
    Guest,
    Interval,
    Lent,
    Pipeline,
    beside,
    fitted_count,
    lend,
    recall,
    squeeze,
)

GB = 2**30


def equal(p, m, *, f=1.0, b=2.0, **more):
    return Pipeline((f,) * p, (b,) * p, m, **more)


def ticks(forward, backward, m):
    """1F1B by its rule instead of its order, in ticks: forward while fewer than p - s are in flight, else backward."""
    p = len(forward)
    forwarded = [[None] * m for _ in range(p)]  # the tick at which it is done
    backed = [[None] * m for _ in range(p)]
    doing = [None] * p  # (kind, micro-batch, end)
    busy = [[] for _ in range(p)]
    tick = 0
    while any(x is None for row in backed for x in row):
        for s in range(p):
            if doing[s] is not None and doing[s][2] == tick:
                kind, i, end = doing[s]
                (forwarded if kind == "F" else backed)[s][i] = end
                doing[s] = None
        for s in range(p):
            if doing[s] is not None:
                continue
            nf = sum(x is not None for x in forwarded[s])
            nb = sum(x is not None for x in backed[s])
            if nf < m and nf - nb < p - s:
                if s == 0 or forwarded[s - 1][nf] is not None:
                    doing[s] = ("F", nf, tick + forward[s])
            elif nb < m and (s == p - 1 or backed[s + 1][nb] is not None):
                doing[s] = ("B", nb, tick + backward[s])
        for s in range(p):
            if doing[s] is not None:
                busy[s].append(tick)
        tick += 1
    end = max(x for row in backed for x in row)
    return end, [sorted(set(range(end)) - set(row)) for row in busy]


def idle_ticks(schedule, stage):
    return [t for gap in schedule.idle(stage) for t in range(round(gap.begin_s), round(gap.end_s))]


@given(p=st.integers(1, 8), m=st.integers(1, 24), f=st.floats(0.1, 9), b=st.floats(0.1, 9))
@settings(max_examples=60, deadline=None)
def test_equal_stages_idle_for_the_closed_form(p, m, f, b):
    schedule = equal(p, m, f=f, b=b).schedule()
    assert schedule.flush_s == pytest.approx((m + p - 1) * (f + b))
    for stage in range(p):
        assert schedule.ratio(stage) == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)


@given(p=st.integers(2, 6), groups=st.integers(1, 5), v=st.integers(2, 4), b=st.floats(0.5, 4))
@settings(max_examples=60, deadline=None)
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, v, b):
    m = p * groups
    schedule = equal(p, m, b=b, chunks=v).schedule()
    # Megatron-LM: the bubble is (p-1)(f+b)/v
    assert schedule.flush_s == pytest.approx(m * (1 + b) + (p - 1) * (1 + b) / v)
    assert schedule.ratio() == pytest.approx((p - 1) / (v * m + p - 1))


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_unequal_stages_as_the_simulation_in_ticks(p, m, data):
    forward = data.draw(st.lists(st.integers(1, 5), min_size=p, max_size=p))
    backward = data.draw(st.lists(st.integers(1, 9), min_size=p, max_size=p))
    schedule = Pipeline(tuple(map(float, forward)), tuple(map(float, backward)), m).schedule()
    end, idle = ticks(forward, backward, m)
    assert schedule.flush_s == pytest.approx(end)
    for stage in range(p):
        assert idle_ticks(schedule, stage) == idle[stage]


@given(p=st.integers(1, 5), groups=st.integers(1, 3), v=st.integers(1, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_piece_of_work_is_done_once_after_what_it_needs_and_no_earlier_time_was_possible(
    p, groups, v, data
):
    seconds = st.floats(0.1, 5)
    forward = tuple(data.draw(st.lists(seconds, min_size=p, max_size=p)))
    backward = tuple(data.draw(st.lists(seconds, min_size=p, max_size=p)))
    send_s = data.draw(st.sampled_from([0.0, 0.3]))
    host = Pipeline(forward, backward, p * groups, chunks=v, send_s=send_s)
    schedule = host.schedule()
    end = {(w.kind, w.micro_batch, w.chunk, s): w.end_s for s, row in enumerate(schedule.work) for w in row}
    assert len(end) == 2 * p * (p * groups) * v
    model = [(chunk, stage) for chunk in range(v) for stage in range(p)]  # the order of the layers
    for s, row in enumerate(schedule.work):
        free = 0.0
        for w in row:
            depth = model.index((w.chunk, s))
            needs = [free]
            if w.kind == "F" and depth > 0:
                chunk, stage = model[depth - 1]
                needs.append(end["F", w.micro_batch, chunk, stage] + send_s * (stage != s))
            if w.kind == "B":
                needs.append(end["F", w.micro_batch, w.chunk, s])
                if depth + 1 < len(model):
                    chunk, stage = model[depth + 1]
                    needs.append(end["B", w.micro_batch, chunk, stage] + send_s * (stage != s))
            assert w.begin_s == pytest.approx(max(needs))
            free = w.end_s


def test_figure_9():
    """Four stages, four micro-batches; Worker 1 waits from its fourth forward to its first backward."""
    schedule = equal(4, 4).schedule()
    assert schedule.step_s == 21
    assert schedule.idle(0)[0] == Interval(4, 10)
    assert [w.kind for w in schedule.work[3]] == list("FBFBFBFB")
    assert [schedule.idle(s)[0].length_s for s in (1, 2, 3)] == [
        1,
        2,
        3,
    ]  # the filling of the pipeline
    assert [schedule.host.in_flight(s) for s in range(4)] == [4, 3, 2, 1]


def test_free_memory_grows_with_the_stage():
    host = equal(
        4, 8, memory_bytes=(80 * GB,) * 4, state_bytes=(30 * GB,) * 4, activation_bytes=(10 * GB,) * 4
    )
    assert [host.free_bytes(s) for s in range(4)] == [10 * GB, 20 * GB, 30 * GB, 40 * GB]
    assert equal(4, 8).free_bytes(0) is None


def test_the_optimizer_step_is_no_bubble():
    schedule = equal(2, 4, update_s=0.5).schedule()
    assert schedule.step_s == pytest.approx(schedule.flush_s + 0.5)
    assert schedule.ratio() == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pipeline((1.0,), (1.0, 2.0), 4), "one forward and one backward"),
        (lambda: Pipeline((1.0, -1.0), (1.0, 2.0), 4), "-1.0"),
        (lambda: equal(4, 6, chunks=2), "multiples"),
        (lambda: equal(4, 0), "micro_batches"),
        (lambda: equal(4, 4, memory_bytes=(1,)), "memory_bytes"),
        (lambda: Guest(()), "layers_s"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(InvalidInput, match=says):
        make()


@given(
    layers=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    gaps=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    periods=st.integers(1, 6),
    resume=st.integers(0, 3),
    slack=st.integers(0, 2),
)
def test_progress_as_second_by_second(layers, gaps, periods, resume, slack):
    bubbles, clock = [], 0
    for length in gaps:
        bubbles.append(Interval(clock + 1.0, clock + 1.0 + length))
        clock += length + 1
    got = Guest(tuple(map(float, layers)), float(resume), float(slack)).progress(bubbles, periods)
    at = steps = worked = 0
    for _ in range(periods):
        for length in gaps:
            second = resume
            while second + layers[at] <= length - slack:
                second += layers[at]
                worked += layers[at]
                at = (at + 1) % len(layers)
                steps += at == 0
    assert got == (steps, at, worked)


def test_a_guest_of_fine_layers_gets_the_bubble_ratio_and_one_of_coarse_layers_nothing():
    schedule = equal(4, 8).schedule()
    for stage in range(4):
        assert Guest((1e-3,) * 10).speed(schedule, stage) == pytest.approx(3 / 11, rel=0.01)
        assert Guest((100.0,)).speed(schedule, stage) == 0


def choice(count=16, base=1 * GB, each=2 * GB):
    profiles = tuple(FusionProfile(c, 0.1 * (1 + 0.1 * c), base + each * c) for c in (1, 2, count))
    return FusionChoice(count, count, profiles, "")


@given(free=st.integers(0, 60), base=st.integers(0, 5), each=st.integers(1, 5))
def test_fitted_count_is_the_largest_that_fits(free, base, each):
    fits = [c for c in range(1, 17) if (base + each * c) <= free]
    assert fitted_count(choice(16, base * GB, each * GB), free * GB) == max(fits, default=0)


def segment(number, start=0, last=False):
    return Segment(Trial(number, {}, number), start=start, until=start + 3, last=last)


def free(*names):
    return tuple(Free(Device(name, kind="A100")) for name in names)


def test_early_rungs_go_into_bubbles_and_promoted_trials_to_the_exclusive_device():
    lent = {"s0": Lent(0.2), "s1": Lent(0.3)}
    waiting = (
        Placement((segment(0),), expected_s=6.0),
        Placement((segment(1),)),
        Placement((segment(2),)),
        Placement((segment(3, start=3),)),
        Placement((segment(4, last=True),)),  # not multi-fidelity: all of it at once
    )
    plan = squeeze(lent)(Plan(waiting=waiting, free=free("gpu", "s0", "s1")))
    assert [(p.segments[0].trial.id, p.shares[0].device) for p in plan.placed] == [(0, "s1"), (1, "s0")]
    assert plan.placed[0].expected_s == pytest.approx(6.0 / 0.3)
    assert [p.segments[0].trial.id for p in plan.waiting] == [3, 4, 2]
    assert [f.device.id for f in plan.free] == ["gpu"]
    done = fifo()(plan)
    assert [(p.segments[0].trial.id, p.shares[0].device) for p in done.placed[2:]] == [(3, "gpu")]


def test_a_fused_placement_is_cut_to_the_free_memory_and_nobody_is_lost():
    lent = {"s0": Lent(0.2, 9 * GB), "s1": Lent(0.2, 13 * GB), "s2": Lent(0.2, 2 * GB)}
    fused = Placement(tuple(segment(i) for i in range(16)), expected_s=10.0)
    plan = squeeze(lent, choice=lambda s: choice())(Plan(waiting=(fused,), free=free("s0", "s1", "s2")))
    assert [(p.shares[0].device, len(p.segments)) for p in plan.placed] == [("s1", 6), ("s0", 4)]
    everybody = [s.trial.id for p in (*plan.placed, *plan.waiting) for s in p.segments]
    assert sorted(everybody) == list(range(16))
    for placed in plan.placed:
        assert placed.memory_bytes <= lent[placed.shares[0].device].free_bytes


def test_a_plan_without_ephemeral_devices_is_left_as_it_is():
    plan = Plan(waiting=(Placement((segment(0),)),), free=free("gpu"))
    assert squeeze({"s0": Lent(0.2)})(plan) == plan


def test_lend_names_the_devices_of_each_stage():
    host = equal(4, 4, memory_bytes=(80,) * 4, state_bytes=(30,) * 4, activation_bytes=(10,) * 4)
    lent = lend(host.schedule(), Guest((0.01,) * 5), [[f"n{n}g{g}" for g in range(8)] for n in range(4)])
    assert len(lent) == 32
    assert lent["n3g7"].free_bytes == 40
    assert math.isclose(lent["n0g0"].speed, 3 / 7, rel_tol=0.02)
    assert lend(host.schedule(), Guest((1000.0,)), [["a"], ["b"], ["c"], ["d"]]) == {}


def group(members, left, epoch_s, device, kind="net"):
    lefts = (left,) * len(members) if isinstance(left, int) else tuple(left)
    return FusedGroup(tuple(members), lefts, epoch_s, Device(device), kind, LINEAR)


LINEAR = FusionChoice(8, 8, tuple(FusionProfile(n, 1.0 + 0.1 * n, n) for n in (1, 2, 4, 8)), "")
LENT = {f"b{n}": Lent(0.1) for n in range(4)}


def test_an_idle_exclusive_device_takes_those_who_would_end_last_out_of_the_bubbles():
    """11 s an epoch in bubbles and 1.1 s alone; of ten trials the eight with most epochs ahead fit one group."""
    groups = [
        group([0, 1, 2], 10, 13.0, "b0"),
        group([3, 4, 5], 20, 13.0, "b1"),
        group([6, 7, 8, 9], 30, 14.0, "b2"),
    ]
    (order,) = recall(groups, [Device("gpu")], LENT)
    assert order.device == "gpu"
    assert set(order.members) == {3, 4, 5, 6, 7, 8, 9, 0}
    assert recall(groups, [], LENT) == ()
    assert recall(groups, [Device("b3")], LENT) == ()  # another bubble is no exclusive device
    assert recall(groups, [Device("gpu")], LENT, cost_s=1e4) == ()


def test_a_running_group_takes_in_as_many_as_it_has_room_for():
    groups = [group([0, 1, 2, 3, 4, 5], 50, 1.6, "gpu"), group([6, 7, 8], 40, 13.0, "b0")]
    (order,) = recall(groups, [], LENT)
    assert order.device == "gpu"
    assert set(order.members) == {0, 1, 2, 3, 4, 5, 6, 7}
    full = [group(range(8), 50, 1.8, "gpu"), group([8, 9], 40, 12.0, "b0")]
    assert recall(full, [], LENT) == ()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 7),
    st.floats(0, 50),
)
def test_who_is_recalled_ends_sooner_and_nobody_is_recalled_twice(there, idle, residents, cost_s):
    groups, first = [], 0
    for at, (count, left) in enumerate(there):
        groups.append(group(range(first, first + count), left, 10 * (1 + 0.1 * count), f"b{at}"))
        first += count
    if residents:
        groups.append(group(range(100, 100 + residents), 25, 1 + 0.1 * residents, "host"))
    orders = recall(groups, [Device(f"gpu{n}") for n in range(idle)], LENT, cost_s=cost_s)
    moved = [member for order in orders for member in order.members]
    assert len(set(moved)) == len(moved)
    assert len({order.device for order in orders}) == len(orders)
    ends = {m: g.epochs_left[0] * g.epoch_s for g in groups for m in g.members}
    left = {m: g.epochs_left[0] for g in groups for m in g.members}
    for order in orders:
        came = [m for m in order.members if m < 100]
        assert came
        assert min(left[m] for m in came) > 0
        # alone there, in one group, however it is shared with the residents: at most 8 members, 1.8 s an epoch
        assert cost_s < max(ends[m] for m in came)
        if order.device != "host":
            assert len(order.members) <= 8
            longest = max(left[m] for m in came)
            assert cost_s + longest * (1 + 0.1) <= max(ends[m] for m in came) * 0.9 + 1e-6


def test_exclusive_devices_first_then_bubbles_and_nobody_waits_beside_a_free_bubble():
    waiting = tuple(Placement((segment(n, start=9 * (n == 4)),)) for n in range(5))
    (step,) = beside([fifo()], lambda: LENT)
    done = step(Plan(waiting=waiting, free=(*free("gpu"), *free("b0", "b1", "b2"))))
    where = {p.segments[0].trial.id: p.shares[0].device for p in done.placed}
    assert where[4] == "gpu"  # promoted: it goes before those of the first rung
    assert set(where.values()) == {"gpu", "b0", "b1", "b2"}
    assert len(done.waiting) == 1
    (plain,) = beside([fifo()], dict)
    assert len(plain(Plan(waiting=waiting, free=free("x", "y"))).placed) == 2
