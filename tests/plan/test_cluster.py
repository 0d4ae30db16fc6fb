"""The simulated cluster: closed forms, conservation, fairness, kinds of devices, release, and both policies."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.plan import DeviceKind, Rate
from penstock.plan._cluster import TuningJob, sample_jobs, simulate_cluster

TRUTH = {
    ("cnn", "new"): Rate(4.0, 200.0, 0.9),
    ("cnn", "old"): Rate(1.0, 100.0, 0.9),
    ("rec", "new"): Rate(2.0, 80.0, 0.2),
    ("rec", "old"): Rate(3.0, 90.0, 0.4),
}


def kinds(new=2, old=2, **more):
    return [
        DeviceKind("new", new, 2, busy_w=250, idle_w=50, price_per_h=3.6, **more),
        DeviceKind("old", old, 1, busy_w=120, idle_w=20, price_per_h=1.8, **more),
    ]


def job(name="a", arrival=0.0, kind="cnn", rungs=((4, 100.0),), **more):
    return TuningJob(name, arrival, kind, rungs, **more)


@pytest.mark.parametrize("policy", ["agnostic", "aware"])
def test_one_kind_of_device_is_list_scheduling(policy):
    """Five equal trials on two devices: three rounds of 25 s."""
    out = simulate_cluster([job(rungs=((5, 100.0),))], kinds()[:1], TRUTH, policy=policy)
    assert out.jct_s["a"] == out.makespan_s == pytest.approx(75)
    assert out.busy_s["new"] == pytest.approx(125)
    # the second device has 25 s of idleness, less than a minute, at the end
    assert out.held_s["new"] == pytest.approx(150)
    assert out.energy_j == pytest.approx(125 * 200 + 25 * 50)
    assert out.money == pytest.approx(150 * 3.6 / 3600)
    assert out.utilisation == pytest.approx(125 / 150)


def test_rungs_follow_one_another_and_widths_are_kept():
    out = simulate_cluster([job(rungs=((4, 100.0), (1, 200.0)), max_devices=1)], kinds()[:1], TRUTH)
    assert out.jct_s["a"] == pytest.approx(4 * 25 + 50)


def test_aware_uses_the_device_that_is_best_and_does_not_wait_for_a_slow_one():
    """One trial left: 25 s on a new device, 100 s on an old one."""
    jobs = [job(rungs=((3, 100.0),))]
    out = simulate_cluster(jobs, kinds(new=1, old=1), TRUTH, policy="aware", keep_runs=True)
    assert out.makespan_s == pytest.approx(75)
    assert {device for _, device, _, _ in out.runs} == {"new"}


def test_each_job_goes_to_its_kind():
    jobs = [job("a", kind="cnn", rungs=((20, 100.0),)), job("b", kind="rec", rungs=((20, 100.0),))]
    out = simulate_cluster(jobs, kinds(), TRUTH, keep_runs=True)
    assert {device for name, device, _, _ in out.runs if name == "a"} == {"new"}
    assert [d for name, d, _, _ in out.runs if name == "b"].count("old") >= 18
    agnostic = simulate_cluster(jobs, kinds(), TRUTH, policy="agnostic")
    assert out.mean_jct_s < agnostic.mean_jct_s


def test_learning_rates_costs_little():
    jobs = [job(f"{k}{i}", 10.0 * i, k, ((20, 100.0),)) for k in ("cnn", "rec") for i in range(3)]
    known = simulate_cluster(jobs, kinds(4, 4), TRUTH).mean_jct_s
    learned = simulate_cluster(jobs, kinds(4, 4), TRUTH, learn=True).mean_jct_s
    blind = simulate_cluster(jobs, kinds(4, 4), TRUTH, policy="agnostic").mean_jct_s
    assert learned < 1.15 * known < blind


def test_a_target_trial_that_would_leave_a_new_device_idle_goes_to_an_old_one():
    jobs = [job(kind="rec", rungs=((4, 60.0),), target_iterations=30.0)]
    out = simulate_cluster(jobs, kinds(), TRUTH, keep_runs=True)
    seconds = {(device, round(end - begin, 6)) for _, device, begin, end in out.runs}
    assert ("old", 10.0) in seconds  # the target: 30 iterations at 3 a second
    assert len(out.runs) == 5


def test_goals_choose_other_devices():
    def shares(goal, eta=1.0):
        jobs = [job(kind="cnn", rungs=((2, 100.0),))]
        return simulate_cluster(jobs, kinds(), TRUTH, goal=goal, eta=eta).busy_s

    assert shares("time")["old"] == 0
    assert shares("energy")["old"] == 0  # 50 J an iteration against 100 J
    rec = [job(kind="rec", rungs=((2, 100.0),))]
    assert simulate_cluster(rec, kinds(), TRUTH, goal="money").busy_s["new"] == 0


def test_idle_devices_are_given_back_after_a_minute_and_cost_nothing_then():
    jobs = [job("a", rungs=((1, 100.0),)), job("b", arrival=1000.0, rungs=((1, 100.0),))]
    out = simulate_cluster(jobs, kinds(new=1)[:1], TRUTH, acquire_s=5.0)
    # acquired (5 s), 25 s of work, 60 s idle, given back; acquired again, 25 s of work
    assert out.held_s["new"] == pytest.approx(5 + 25 + 60 + 5 + 25)
    assert out.jct_s == pytest.approx({"a": 30, "b": 30})


@given(
    data=st.data(),
    policy=st.sampled_from(["agnostic", "aware"]),
    learn=st.booleans(),
    new=st.integers(1, 4),
    old=st.integers(1, 4),
)
@settings(max_examples=15, deadline=None)
def test_nothing_is_lost_and_no_device_does_two_things(data, policy, learn, new, old):
    jobs = data.draw(
        st.lists(
            st.builds(
                job,
                arrival=st.integers(0, 300).map(float),
                kind=st.sampled_from(["cnn", "rec"]),
                rungs=st.lists(st.tuples(st.integers(1, 9), st.floats(1, 300)), min_size=1, max_size=3).map(
                    tuple
                ),
                max_devices=st.one_of(st.none(), st.integers(1, 4)),
                target_iterations=st.sampled_from([0.0, 50.0]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    jobs = [
        TuningJob(str(i), j.arrival_s, j.kind, j.rungs, j.max_devices, j.target_iterations)
        for i, j in enumerate(jobs)
    ]
    out = simulate_cluster(jobs, kinds(new, old), TRUTH, policy=policy, learn=learn, keep_runs=True)
    assert set(out.jct_s) == {j.name for j in jobs}
    for j in jobs:
        own = [(d, b, e) for name, d, b, e in out.runs if name == j.name]
        assert len(own) == j.trials + (j.target_iterations > 0)
        done = math.fsum((e - b) * TRUTH[j.kind, d].per_s for d, b, e in own)
        assert done == pytest.approx(j.iterations)
        assert min(b for _, b, _ in own) >= j.arrival_s - 1e-6
        assert max(e for _, _, e in own) == pytest.approx(j.arrival_s + out.jct_s[j.name])
    for name, count in (("new", new), ("old", old)):
        edges = sorted(
            edge
            for _, d, b, e in out.runs
            if d == name
            for edge in ((b + 1e-9, 1), (e - 1e-9, -1))
            if e - b > 1e-6
        )
        at_once = 0
        for _, change in edges:
            at_once += change
            assert at_once <= count
    busy = math.fsum(e - b for _, _, b, e in out.runs)
    assert math.fsum(out.busy_s.values()) == pytest.approx(busy)
    assert out.makespan_s == pytest.approx(max(e for *_, e in out.runs) - min(j.arrival_s for j in jobs))
    assert 0 < out.utilisation <= 1 + 1e-9


def test_equal_jobs_share_equally():
    jobs = [job(str(i), rungs=((40, 100.0),)) for i in range(4)]
    for policy in ("agnostic", "aware"):
        times = simulate_cluster(jobs, kinds(4, 4)[:1], TRUTH, policy=policy).jct_s.values()
        assert max(times) - min(times) <= 25 + 1e-6


def test_sampled_jobs_are_those_of_their_seed():
    assert sample_jobs(20, TRUTH, seed=3) == sample_jobs(20, TRUTH, seed=3) != sample_jobs(20, TRUTH, seed=4)
    assert all(0 <= j.arrival_s <= 3600 for j in sample_jobs(20, TRUTH))
    assert {j.kind for j in sample_jobs(50, TRUTH, kinds=["rec"])} == {"rec"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: simulate_cluster([job()], [], TRUTH), "devices"),
        (lambda: simulate_cluster([job(kind="x")], kinds(), TRUTH), "'x'"),
        (lambda: simulate_cluster([job(), job()], kinds(), TRUTH), "same name"),
        (lambda: simulate_cluster([job()], kinds(), TRUTH, policy="best"), "best"),
        (lambda: job(rungs=()), "rungs"),
        (lambda: job(arrival=-1.0), "arrival_s"),
        (lambda: job(max_devices=0), "max_devices"),
        (lambda: sample_jobs(3, TRUTH, kinds=["x"]), "kinds"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(InvalidInput, match=says):
        call()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cnn", "rec"]),
            st.lists(st.tuples(st.integers(1, 9), st.floats(1, 300)), min_size=1, max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_looking_ahead_is_never_worse_than_not_minding_kinds(drawn, new, old, seed):
    """Of jobs that are all there it knows the end under every tactic, also under that of the agnostic policy."""
    jobs = [job(str(i), kind=kind, rungs=rungs) for i, (kind, rungs) in enumerate(drawn)]
    agnostic = simulate_cluster(jobs, kinds(new, old), TRUTH, policy="agnostic", seed=seed)
    for short_first in (True, False):
        aware = simulate_cluster(jobs, kinds(new, old), TRUTH, seed=seed, short_first=short_first)
        assert aware.mean_jct_s <= agnostic.mean_jct_s * (1 + 1e-9)
        assert aware.looked == 1
