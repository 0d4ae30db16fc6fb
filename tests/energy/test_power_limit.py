"""The power-limit profiler: a pure machine, against brute force and Zeus's equations."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.energy import (
    V100,
    V100_LOADS,
    Applied,
    EtaCost,
    LeastEnergy,
    LeastEnergyWithin,
    LeastTime,
    LimitProfile,
    PowerLimitOptimizer,
    PowerProfile,
    Profiling,
    Ready,
    Settling,
    Warming,
    limits_between,
)

LIMITS = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)


class Training:
    """A job whose iteration time and watts depend on the limit; time and joules are exact sums."""

    def __init__(self, table, machine, *, gpus=1, samples=1.0):
        self.table, self.machine, self.gpus, self.samples = table, machine, gpus, samples
        self.now_s = self.energy_j = 0.0
        self.limit_w = 250.0
        self.set = []

    def _obey(self, limit_w):
        if limit_w is not None:
            self.limit_w = limit_w
            self.set.append(limit_w)
        self.machine.validate()

    def epoch(self, iterations, evaluation_s=0.0):
        self._obey(self.machine.begin_epoch(self.now_s, self.energy_j))
        for _ in range(iterations):
            iteration_s, watts = self.table[self.limit_w]
            self.now_s += iteration_s
            self.energy_j += iteration_s * watts * self.gpus
            wants = self.machine.wants_reading(self.now_s)
            self._obey(self.machine.iteration(self.now_s, self.energy_j if wants else None, self.samples))
        self.machine.end_epoch(self.now_s, self.energy_j)
        self.now_s += evaluation_s
        self.energy_j += evaluation_s * 300


def cost(table, limit, eta, max_w=250.0):
    """Eq. 7 by hand: (eta P + (1 - eta) MAXPOWER) x time per iteration."""
    return (eta * table[limit][1] + (1 - eta) * max_w) * table[limit][0]


def brute_force(table, eta):
    return min(table, key=lambda limit: (cost(table, limit, eta), limit))


def test_the_states_in_order():
    table = {limit: (0.5, limit * 0.9) for limit in (250.0, 200.0)}
    machine = PowerLimitOptimizer((200.0, 250.0), EtaCost(1.0), slice_s=2, warmup_s=1, settle_s=0.5)
    job = Training(table, machine)
    seen = [type(machine.state)]
    assert seen == [Ready]
    job._obey(machine.begin_epoch(0, 0))
    names = [(type(machine.state).__name__, job.limit_w)]
    for _ in range(20):
        job.now_s += 0.5
        job.energy_j += 0.5 * table[job.limit_w][1]
        job._obey(machine.iteration(job.now_s, job.energy_j))
        now = (type(machine.state).__name__, job.limit_w)
        if now != names[-1]:
            names.append(now)
    assert names == [
        (Warming.__name__, 250),
        (Profiling.__name__, 250),
        (Settling.__name__, 200),
        (Profiling.__name__, 200),
        (Applied.__name__, 200),
    ]
    assert job.set == [250, 200, 200]


@pytest.mark.parametrize("eta", [0, 0.25, 0.5, 0.75, 1])
@pytest.mark.parametrize("key", sorted(V100_LOADS)[::5])
def test_the_chosen_limit_is_the_brute_force_optimum(key, eta):
    """On the simulated V100, for every fifth workload and batch size."""
    load = V100_LOADS[key]
    table = {limit: (V100.epoch_s(load, limit) / 2000, V100.power_w(load, limit)) for limit in LIMITS}
    machine = PowerLimitOptimizer(LIMITS, EtaCost(eta), slice_s=5)
    job = Training(table, machine)
    while not machine.done:
        job.epoch(500)
    best = brute_force(table, eta)
    # A light load runs the same at several limits: any of them is the optimum.
    same = [limit for limit in LIMITS if cost(table, limit, eta) <= cost(table, best, eta) * (1 + 1e-9)]
    assert job.limit_w in same


tables = st.lists(
    st.tuples(st.floats(0.001, 30), st.floats(20, 250)), min_size=len(LIMITS), max_size=len(LIMITS)
).map(lambda rows: dict(zip(LIMITS, rows, strict=True)))


@given(table=tables, eta=st.floats(0, 1), epoch=st.integers(1, 400), evaluation_s=st.floats(0, 100))
@settings(max_examples=40, deadline=None)
def test_any_table_any_epoch_length(table, eta, epoch, evaluation_s):
    """Slices go on over epochs shorter than them, evaluations between are left out, the optimum is found."""
    machine = PowerLimitOptimizer(LIMITS, EtaCost(eta), slice_s=1)
    job = Training(table, machine)
    for _ in range(20_000):
        if machine.done:
            break
        job.epoch(epoch, evaluation_s)
    profile = machine.profile
    assert [seen.limit_w for seen in profile.limits] == list(LIMITS)
    for seen in profile.limits:
        iteration_s, watts = table[seen.limit_w]
        # Sums of many floats, differences of large ones: equal but for rounding.
        assert seen.power_w == pytest.approx(watts, rel=1e-6)
        assert seen.throughput == pytest.approx(1 / iteration_s, rel=1e-6)
    least = min(cost(table, limit, eta) for limit in LIMITS)
    assert cost(table, job.limit_w, eta) == pytest.approx(least, rel=1e-5)


def test_a_slice_has_whole_iterations_and_at_least_its_length():
    table = dict.fromkeys(LIMITS, (0.7, 100.0))
    machine = PowerLimitOptimizer(LIMITS, LeastTime(), slice_s=2, warmup_s=0, settle_s=0)
    job = Training(table, machine)
    job.epoch(7 * 3)  # 3 x 0.7 s is the first multiple above 2 s
    assert machine.done
    assert job.now_s == pytest.approx(7 * 2.1)


def test_energy_is_asked_for_at_the_ends_of_slices_only():
    table = dict.fromkeys(LIMITS, (0.01, 100.0))
    machine = PowerLimitOptimizer(LIMITS, LeastTime(), slice_s=1, settle_s=0.1)
    job = Training(table, machine)
    asked = 0
    machine.begin_epoch(0, 0)
    for _ in range(5000):
        job.now_s += 0.01
        wants = machine.wants_reading(job.now_s)
        asked += wants
        machine.iteration(job.now_s, 100 * job.now_s if wants else None)
    assert machine.done
    assert asked == 1 + 7 + 6  # warm-up, limits, settlings


def test_observer_mode_keeps_the_highest_limit():
    table = {limit: (0.1, limit) for limit in LIMITS}  # less power, no slower
    machine = PowerLimitOptimizer(LIMITS, LeastEnergy(), observe=True, slice_s=1)
    job = Training(table, machine)
    job.epoch(1000)
    assert job.limit_w == 250
    assert machine.state.best.limit_w == 100


def test_a_known_profile_is_applied_at_once():
    known = PowerProfile("gpu", 1, 250, tuple(LimitProfile(limit, limit, 1.0) for limit in LIMITS))
    machine = PowerLimitOptimizer(LIMITS, LeastEnergy(), known=known)
    assert machine.begin_epoch(0, 0) == 100
    assert machine.done
    assert PowerProfile.from_json(known.to_json()) == known


def test_world_size_is_in_maxpower():
    """Zeus 7: the cost of a job sums over its GPUs. Ignoring them would weigh energy 4 times too much."""
    # Per GPU at 250 W: 240 W, 1 s; at 100 W: 100 W, 1.6 s.
    table = {250.0: (1.0, 240.0), 100.0: (1.6, 100.0)}
    eta = 0.5
    one = Training(table, PowerLimitOptimizer((250.0, 100.0), EtaCost(eta), slice_s=5))
    one.epoch(100)
    four = Training(table, PowerLimitOptimizer((250.0, 100.0), EtaCost(eta), world_size=4, slice_s=5), gpus=4)
    four.epoch(100)
    assert one.limit_w == four.limit_w == brute_force(table, eta)
    assert four.machine.profile.at(250.0).power_w == pytest.approx(960)
    wrong = min(table, key=lambda limit: (eta * 4 * table[limit][1] + (1 - eta) * 250) * table[limit][0])
    assert wrong != one.limit_w  # the case tells the two apart


def test_rules():
    """Made-up profile: (limit, watts, samples per second)."""
    profile = PowerProfile(
        "gpu",
        1,
        250,
        (
            LimitProfile(250, 230, 10.0),
            LimitProfile(200, 190, 9.8),
            LimitProfile(150, 140, 9.0),
            LimitProfile(100, 98, 5.0),
        ),
    )
    assert LeastTime().choose(profile).limit_w == 250
    assert LeastEnergy().choose(profile).limit_w == 150  # 15.6 J against 23, 19.4 and 19.6
    assert LeastEnergyWithin(0.05).choose(profile).limit_w == 200
    assert LeastEnergyWithin(0.12).choose(profile).limit_w == 150
    assert LeastEnergyWithin(0).choose(profile).limit_w == 250
    assert EtaCost(0).choose(profile).limit_w == 250
    assert EtaCost(1).choose(profile).limit_w == 150


@given(rows=st.lists(st.tuples(st.floats(50, 300), st.floats(0.1, 100)), min_size=1, max_size=8))
def test_the_ends_of_eta_are_least_time_and_least_energy(rows):
    limits = tuple(LimitProfile(100.0 + 10 * i, watts, speed) for i, (watts, speed) in enumerate(rows))
    profile = PowerProfile("gpu", 1, 250, limits)
    assert EtaCost(0).choose(profile).throughput == pytest.approx(LeastTime().choose(profile).throughput)
    assert EtaCost(1).choose(profile).energy_per_sample_j == pytest.approx(
        LeastEnergy().choose(profile).energy_per_sample_j
    )
    assert LeastEnergyWithin(1e9).choose(profile) == LeastEnergy().choose(profile)


def test_limits_of_a_v100_are_those_zeus_sweeps():
    assert limits_between(100, 250) == LIMITS
    assert limits_between(100, 240, 50) == (240, 190, 140, 100)
    assert limits_between(100, 100) == (100,)
    with pytest.raises(InvalidInput):
        limits_between(200, 100)


def test_bad_arguments_say_what_they_were():
    with pytest.raises(InvalidInput, match="different positive"):
        PowerLimitOptimizer((100.0, 100.0), LeastTime())
    with pytest.raises(InvalidInput, match="slice_s=0"):
        PowerLimitOptimizer((100.0,), LeastTime(), slice_s=0)
    with pytest.raises(InvalidInput, match=r"eta must be in \[0, 1\], got 2"):
        EtaCost(2)
    with pytest.raises(InvalidInput, match="Not a power profile"):
        PowerProfile.from_json({"limits": "no"})
    with pytest.raises(InvalidInput, match="110 W was not profiled"):
        PowerProfile("gpu", 1, 250, (LimitProfile(100, 1, 1),)).at(110)


def test_the_simulated_gpu_behaves_like_dvfs():
    """More limit is never slower, never less power, and never above the limit; a light load feels nothing."""
    for load in V100_LOADS.values():
        times = [V100.epoch_s(load, limit) for limit in LIMITS]
        watts = [V100.power_w(load, limit) for limit in LIMITS]
        assert times == sorted(times)
        assert watts == sorted(watts, reverse=True)
        assert all(w <= limit + 1e-9 for w, limit in zip(watts, LIMITS, strict=True))
        assert math.isclose(times[0] * watts[0], V100.epoch_s(load, 250) * V100.power_w(load, 250))
    light = V100_LOADS["ncf", 256]
    assert V100.slowdown(light, 100) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "wrong", [{"static_w": 120.0}, {"min_limit_w": 300.0}, {"voltage_floor": 0.0}, {"idle_w": math.nan}]
)
def test_a_model_whose_watts_contradict_each_other_is_refused(wrong):
    """Below its static power a clock would be negative, and so would times and joules."""
    with pytest.raises(InvalidInput, match="is not a GPU"):
        replace(V100, **wrong)
