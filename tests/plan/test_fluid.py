"""The Fluid planner as a whole, on a cluster in virtual time that checks every order it gets."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import geometric_mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Device, Free, Placement, Plan, PlanPass, Running, Segment, Share, Trial
from penstock.core.errors import InvalidInput
from penstock.plan import fifo, fluid
from penstock.plan._elastic import Idle
from penstock.plan._fluid import Widths
from penstock.plan._rollout import makespan_s as rollout_s
from penstock.predict import Overhead
from penstock.testing.planning import SimulatedCluster, placements, run_group


def cluster(n: int, **kwargs: int | None) -> tuple[Free, ...]:
    return tuple(Free(Device(f"cpu:{i}", **kwargs)) for i in range(n))  # type: ignore[arg-type]


def apply(planner: tuple, plan: Plan) -> Plan:  # type: ignore[type-arg]
    for step in planner:
        plan = step(plan)
    return plan


def held(plan: Plan) -> dict[int, float]:
    return {p.segments[0].trial.id: sum(s.fraction for s in p.shares) for p in plan.placed}


def test_figure_5() -> None:
    waiting = tuple(placements([4, 4, 12, 30], max_devices=4))
    first, _ = fluid(c=2, d=4, widths="waterfill")
    plan = first(Plan(waiting=waiting, free=cluster(5)))
    assert held(plan) == {0: 0.5, 1: 0.5, 2: 1, 3: 3}
    by_trial = {p.segments[0].trial.id: {s.device for s in p.shares} for p in plan.placed}
    assert by_trial[0] == by_trial[1]  # they share one device
    assert plan.waiting == ()
    assert plan.free == ()


def test_first_group_without_known_runtimes_is_spread_evenly() -> None:
    plan = apply(
        fluid(c=4, d=8, alpha=1.1, beta=1.05), Plan(tuple(placements([None] * 4, max_devices=8)), cluster(8))
    )
    assert held(plan) == dict.fromkeys(range(4), 2)


def test_runtime_by_a_function() -> None:
    planner = fluid(d=8, runtime=lambda placement: 1.0 + 9 * (placement.segments[0].trial.id == 1))
    plan = apply(planner, Plan(tuple(placements([None] * 2, max_devices=8)), cluster(8)))
    assert held(plan)[1] > held(plan).get(0, 0.0)  # the short one may as well wait


def test_trials_that_cannot_scale_get_one_device() -> None:
    plan = apply(fluid(c=2, d=8), Plan(tuple(placements([5.0, 50.0])), cluster(8)))
    assert held(plan) == {0: 1, 1: 1}


def test_passes_are_pure() -> None:
    plan = Plan(tuple(placements([3.0, 9.0, 1.0, 1.0], max_devices=4)), cluster(3))
    copy = replace(plan)
    planner = fluid(c=2, d=4, alpha=1.2, beta=1.1)
    assert apply(planner, plan) == apply(planner, plan)
    assert plan == copy


def test_memory_is_a_hard_limit() -> None:
    gpu = tuple(Free(Device(f"cuda:{i}", memory_bytes=10)) for i in range(2))
    planner = fluid(c=4)
    packed = apply(planner, Plan(tuple(placements([1.0] * 8, memory_bytes=[4] * 8)), gpu))
    assert len(packed.placed) == 4  # two on each, though four would share
    large = apply(planner, Plan(tuple(placements([1.0] * 4, memory_bytes=[6, 6, 5, 4])), gpu))
    assert sorted(held(large)) == [0, 1, 3]  # 6 and 4 fit together, 6 and 5 do not
    unknown = apply(planner, Plan(tuple(placements([1.0] * 4)), gpu))
    assert len(unknown.placed) == 2  # nobody can promise that two fit
    huge = apply(planner, Plan(tuple(placements([1.0], memory_bytes=[11])), gpu))
    assert huge.placed == ()


def test_an_exclusive_placement_is_alone_and_gets_its_turn() -> None:
    planner = fluid(c=2)
    alone = replace(placements([1.0])[0], exclusive=True)
    others = placements([1.0] * 4, first=1)
    plan = apply(planner, Plan((*others, alone), cluster(2)))
    by_device: dict[str, list[int]] = {}
    for p in plan.placed:
        by_device.setdefault(p.shares[0].device, []).append(p.segments[0].trial.id)
    assert [0] in by_device.values() or 0 not in held(plan)
    # Devices are never wholly free; the exclusive one has waited: one device is no longer filled up.
    halves = tuple(
        Running(replace(p, shares=(Share(f"cpu:{i}", 0.5),)), 1.0)
        for i, p in enumerate(placements([1.0] * 2, first=10))
    )
    half_free = tuple(Free(Device(f"cpu:{i}"), 0.5) for i in range(2))
    longest = replace(alone, expected_s=5.0)
    plan = apply(planner, Plan((longest, *others), half_free, running=halves))
    assert len(plan.placed) == 1
    assert 0 not in held(plan)


def test_nobody_is_passed_for_ever() -> None:
    """A stream of longer trials, two for each that ends: the short one that came first still gets its turn."""
    simulated = SimulatedCluster(2, truth=Overhead(), planner=fluid())
    short, long = 1.0, 10.0
    simulated.submit(placements([long, long], first=1), {1: long, 2: long})
    simulated.replan()
    simulated.submit(placements([short], first=0), {0: short})
    count = 3
    while 0 not in simulated.tally.ends_s:
        for _ in simulated.step():
            new = placements([long, long], first=count)
            simulated.submit(new, {count: long, count + 1: long})
            count += 2
        simulated.replan()
        assert simulated.now_s < 100
    assert simulated.tally.ends_s[0] <= 4 * long


def test_trials_of_a_stream_share_while_others_wait_and_spread_when_none_does() -> None:
    """Several groups at once: the least device time counts, whatever a trial's share of the work would be."""
    long, short = (replace(p, since_s=1.0 * i) for i, p in enumerate(placements([100.0, 1.0], max_devices=4)))
    others = [replace(p, since_s=2.0) for p in placements([1.0] * 4, first=2, max_devices=4)]
    planner = fluid(c=2, d=4, alpha=1.2, beta=1.05)
    crowded = apply(planner, Plan((long, short, *others), cluster(3)))
    assert held(crowded) == dict.fromkeys(
        range(6), 0.5
    )  # StaticFluid would give the long one all but one device
    assert held(apply(planner, Plan((long, short), cluster(3)))) == {0: 2, 1: 1}


def test_very_short_trials_queue_behind_running_ones() -> None:
    busy = tuple(
        Running(replace(p, shares=(Share(f"cpu:{i}"),)), 1.0)
        for i, p in enumerate(placements([1.0] * 2, first=50))
    )
    free = tuple(Free(Device(f"cpu:{i}"), 0.0, backlog=2) for i in range(2))
    plan = apply(fluid(), Plan(tuple(placements([1.0] * 6)), free, running=busy))
    assert [p.shares[0].device for p in plan.placed] == ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    assert len(plan.waiting) == 2


def test_devices_that_left_are_not_used_and_those_that_joined_are() -> None:
    simulated = SimulatedCluster(4, truth=Overhead(max_devices=4), planner=fluid(d=4))
    simulated.submit(placements([100.0], max_devices=4), {0: 100.0}, {0: 100})
    simulated.replan()
    assert len(simulated.running()[0].placement.shares) == 4
    plan = replace(simulated.plan(), free=(Free(Device("cpu:9")), Free(Device("cpu:8"))))
    waiting = tuple(placements([10.0] * 2, first=1, max_devices=4))
    after = apply(fluid(d=4), replace(plan, waiting=waiting))
    assert {s.device for p in after.placed for s in p.shares} == {"cpu:8", "cpu:9"}


@pytest.mark.parametrize("kwargs", [{"idle": "worst"}, {"widths": "guess"}, {"c": 0}, {"alpha": 0.5}])
def test_wrong_options_are_named(kwargs: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(kwargs)).replace("c", "max_sharing")):
        fluid(**kwargs)  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, object]:
    count = draw(st.integers(1, 25))
    c, d = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    runtimes = draw(st.lists(st.floats(0.5, 60), min_size=count, max_size=count))
    wrong = draw(st.lists(st.floats(0.3, 3), min_size=count, max_size=count))
    unknown = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    memory = draw(st.none() | st.lists(st.none() | st.integers(1, 8), min_size=count, max_size=count))
    return {
        "runtimes_s": runtimes,
        "expected_s": [None if u else r * w for r, w, u in zip(runtimes, wrong, unknown, strict=True)],
        "memory_bytes": memory,
        "devices": [
            Device(f"gpu:{i}", node=f"node{i // 2}", memory_bytes=draw(st.sampled_from([None, 8, 12])))
            for i in range(draw(st.integers(1, 6)))
        ],
        "truth": Overhead(
            draw(st.floats(1, 2.5)), draw(st.floats(1, 1.4)), c, d, draw(st.sampled_from([0.0, 0.3, 5.0]))
        ),
        "epochs": draw(st.integers(1, 6)),
    }


@settings(max_examples=150, deadline=None)
@given(
    worlds(),
    st.sampled_from(["longest", "waterfill", "best", "even"]),
    st.sampled_from(["lookahead", "waterfill"]),
)
def test_whatever_happens_nobody_is_lost_and_no_device_is_given_twice(
    world: dict[str, object], idle: Idle, widths: Widths
) -> None:
    """Wrong guesses, unknown memory, mixed devices: the cluster itself asserts shares, memory and loss."""
    truth = world["truth"]
    assert isinstance(truth, Overhead)
    planner = fluid(
        c=truth.max_sharing,
        d=truth.max_devices,
        alpha=truth.alpha,
        beta=truth.beta,
        epsilon_s=truth.epsilon_s,
        idle=idle,
        widths=widths,
    )
    tally = run_group(planner, **world)  # type: ignore[arg-type]
    runtimes = world["runtimes_s"]
    assert isinstance(runtimes, list)
    assert sorted(tally.ends_s) == list(range(len(runtimes)))
    fastest = max(truth.speed(w) for w in range(1, truth.max_devices + 1))
    for trial, end_s in tally.ends_s.items():
        assert end_s >= runtimes[trial] / fastest * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 50), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_online_it_stays_within_twice_the_optimum(runtimes: list[float], devices: int, d: int) -> None:
    """Theorem 1 for the running planner: without overheads, packing off, changes free."""
    truth = Overhead(max_devices=d)
    tally = run_group(fluid(d=d), runtimes, devices=devices, truth=truth, epochs=50)
    bound_s = max(sum(runtimes) / devices, max(runtimes) / min(d, devices))
    assert tally.makespan_s <= 2 * bound_s * (1 + 1e-6)


@st.composite
def small_groups(draw: st.DrawFn) -> dict[str, object]:
    return {
        "runtimes_s": draw(
            st.lists(st.sampled_from([3.0, 7.0, 20.0]) | st.floats(3, 90), min_size=1, max_size=14)
        ),
        "devices": draw(st.integers(1, 7)),
        "truth": Overhead(
            draw(st.sampled_from([1.0, 1.15, 1.3, 1.6])),
            draw(st.sampled_from([1.0, 1.05, 1.2])),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 8)),
            draw(st.sampled_from([0.0, 0.5, 3.0])),
        ).within_bounds(),
        "epochs": draw(st.sampled_from([1, 3, 10])),
    }


def planner_of(truth: Overhead, **kwargs: str) -> tuple[PlanPass, ...]:
    return fluid(
        c=truth.max_sharing,
        d=truth.max_devices,
        alpha=truth.alpha,
        beta=truth.beta,
        epsilon_s=truth.epsilon_s,
        **kwargs,  # type: ignore[arg-type]
    )


@settings(max_examples=150, deadline=None)
@given(small_groups())
def test_known_runtimes_never_end_later_than_by_the_papers_algorithms(world: dict[str, object]) -> None:
    truth = world["truth"]
    assert isinstance(truth, Overhead)
    ours = run_group(planner_of(truth), **world)  # type: ignore[arg-type]
    papers = run_group(planner_of(truth, widths="waterfill", idle="waterfill"), **world)  # type: ignore[arg-type]
    assert ours.makespan_s <= papers.makespan_s * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(
    small_groups(),
    st.sampled_from(["longest", "waterfill", "even"]),
    st.sampled_from(["lookahead", "waterfill"]),
    st.integers(0, 3),
)
def test_what_is_played_through_is_what_happens(
    world: dict[str, object], idle: Idle, widths: Widths, later: int
) -> None:
    """Against the simulated cluster, from the begin and from where it has come to before a width changes."""
    truth, runtimes, epochs = world["truth"], world["runtimes_s"], world["epochs"]
    assert isinstance(truth, Overhead)
    assert isinstance(runtimes, list)
    assert isinstance(epochs, int)
    passes = planner_of(truth, idle=idle, widths=widths)
    simulated = SimulatedCluster(world["devices"], truth=truth, planner=passes)  # type: ignore[arg-type]
    work = dict(enumerate(runtimes))
    simulated.submit(
        placements(runtimes, max_devices=truth.max_devices, epochs=epochs), work, dict.fromkeys(work, epochs)
    )
    for _ in range(later):
        before = simulated.tally.resizes
        plan = simulated.replan()
        if plan.resized or not plan.waiting:
            return
        simulated.step()
        assert simulated.tally.resizes == before
    plan = simulated.plan()
    told_s = simulated.now_s + rollout_s(
        plan,
        passes,
        overhead=truth,
        waiting_s=[p.expected_s or 0.0 for p in plan.waiting],
        running_s=[item.remaining_s or 0.0 for item in plan.running],
    )
    simulated.replan()
    while not simulated.idle:
        simulated.step()
        simulated.replan()
    assert told_s == pytest.approx(simulated.tally.makespan_s, rel=1e-6)


def test_a_course_once_taken_is_followed() -> None:
    """What runs tells it, so that the passes need to remember nothing."""
    truth = Overhead(1.3, 1.05, 2, 4, 1.0)
    first, *waiting = placements([90.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0], max_devices=4)
    paper = planner_of(truth, widths="waterfill", idle="waterfill")
    ways = set()
    for course in ("waterfill", "longest", "one", "x1", "x1.6"):
        runs = Running(replace(first, shares=(Share("cpu:9"),), course=course), 80.0)
        plan = apply(planner_of(truth), Plan(tuple(waiting), cluster(3), running=(runs,)))
        assert {placement.course for placement in plan.placed} == {course}
        if course == "waterfill":
            assert held(plan) == held(apply(paper, Plan(tuple(waiting), cluster(3), running=(runs,))))
        ways.add(tuple(sorted(held(plan).items())))
    assert len(ways) > 1


@pytest.mark.parametrize("expected_s", [None, 1e-4])
def test_what_is_not_known_or_over_at_once_is_not_played_through(expected_s: float | None) -> None:
    plan = apply(fluid(c=2, alpha=1.2, d=4), Plan(tuple(placements([expected_s] * 6)), cluster(4)))
    assert {placement.course for placement in plan.placed} == {""}


@pytest.mark.parametrize("variance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(("alpha", "c"), [(1.3, 2), (1.15, 4), (10.0, 1)])
def test_faster_than_first_come_first_served(variance: float, alpha: float, c: int) -> None:
    """Groups of all sizes on 8 devices, with wrong guesses: never slower, and clearly faster on the whole."""
    rng = random.Random(f"{variance} {alpha}")
    truth = Overhead(alpha, 1.05, c, 8, epsilon_s=1.0)
    gains = []
    for count in (3, 8, 9, 27, 60):
        runtimes = [30 * rng.lognormvariate(0, variance) for _ in range(count)]
        guesses = [r * rng.uniform(0.7, 1.4) for r in runtimes]
        planner = fluid(c=c, d=8, alpha=alpha, beta=1.05, epsilon_s=1.0)
        ours = run_group(planner, runtimes, devices=8, truth=truth, expected_s=guesses, error=0.2).makespan_s
        theirs = run_group((fifo(),), runtimes, devices=8, truth=truth).makespan_s
        gains.append(theirs / ours)
    assert min(gains) >= 0.999
    assert geometric_mean(gains) > 1.25


def test_segments_know_their_number() -> None:
    """The helper of these tests makes what it says."""
    made = placements([1.0, None], first=7)
    assert made[0] == Placement((Segment(Trial(7, {}, 0), until=1),), expected_s=1.0)
    assert made[1].expected_s is None
