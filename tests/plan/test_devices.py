"""Mixed devices: fairness, the sharing incentive, optimality by brute force, learning, targets, idle devices."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.plan import Demand, DeviceKind, Idle, Rate, Rates, allocate, cost, fair_counts, target_kind

V100 = DeviceKind("v100", 8, generation=3, busy_w=300, price_per_h=2.5)
P100 = DeviceKind("p100", 8, generation=2, busy_w=250, price_per_h=1.5)
K80 = DeviceKind("k80", 8, generation=1, busy_w=150, price_per_h=0.5)


def table(**speeds):
    return Rates({(kind, device): Rate(s) for kind, row in speeds.items() for device, s in row.items()})


@given(
    wants=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    devices=st.integers(1, 40),
    data=st.data(),
)
def test_fair_counts_are_max_min_fair(wants, devices, data):
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(wants), max_size=len(wants)))
    demands = [
        Demand(str(i), "x", w, weight) for i, (w, weight) in enumerate(zip(wants, weights, strict=True))
    ]
    counts = fair_counts(demands, devices)
    assert math.fsum(counts) == pytest.approx(min(devices, sum(wants)))
    for demand, count in zip(demands, counts, strict=True):
        assert count <= demand.wants + 1e-9
        if count < demand.wants - 1e-9:  # nobody who lacks something has less per weight than another
            level = count / demand.weight
            assert all(c / d.weight <= level + 1e-9 for d, c in zip(demands, counts, strict=True))


@given(data=st.data(), n=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_no_study_is_worse_off_than_with_devices_of_all_kinds_alike(data, n):
    speed = st.floats(0.05, 20)
    kinds = [V100, P100, K80]
    rates = Rates({(str(i), d.name): Rate(data.draw(speed)) for i in range(n) for d in kinds})
    wants = data.draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    demands = [Demand(str(i), str(i), w) for i, w in enumerate(wants)]
    got = allocate(demands, kinds, rates)
    fair = fair_counts(demands, 24)
    for d in kinds:
        assert sum(row[d.name] for row in got.values()) <= d.count + 1e-6
    for demand, count in zip(demands, fair, strict=True):
        row = got[demand.study]
        assert sum(row.values()) <= count + 1e-6
        progress = sum(row[d.name] * rates.known(demand.kind, d.name).per_s for d in kinds)
        alike = sum(count / 3 * rates.known(demand.kind, d.name).per_s for d in kinds)
        assert progress >= alike * (1 - 1e-6)


def test_the_best_split_of_two_studies_as_brute_force_finds_it():
    kinds = [DeviceKind("new", 4), DeviceKind("old", 4)]
    rates = table(a={"new": 3.0, "old": 1.0}, b={"new": 1.2, "old": 1.0})
    got = allocate([Demand("a", "a", 8), Demand("b", "b", 8)], kinds, rates)

    def worth(kind, new, old):
        mean = (rates.known(kind, "new").per_s + rates.known(kind, "old").per_s) / 2
        return (new * rates.known(kind, "new").per_s + old * rates.known(kind, "old").per_s) / mean

    best = -math.inf
    for tenth in range(41):
        new = tenth / 10
        a, b = worth("a", new, 4 - new), worth("b", 4 - new, new)
        if a >= 4 and b >= 4 - 1e-9:
            best = max(best, a + b)
    ours = worth("a", got["a"]["new"], got["a"]["old"]) + worth("b", got["b"]["new"], got["b"]["old"])
    assert ours == pytest.approx(best, abs=0.06)  # the grid's step
    assert ours >= best - 1e-6


def test_each_gets_the_kind_it_is_best_on():
    """Gavel's table: Recommendation is faster on a P100, ResNet-50 on a V100."""
    rates = table(resnet50={"v100": 7.787, "p100": 4.888}, recommendation={"v100": 3.906, "p100": 8.897})
    got = allocate([Demand("r", "resnet50", 8), Demand("m", "recommendation", 8)], [V100, P100], rates)
    assert got["r"] == pytest.approx({"v100": 8, "p100": 0})
    assert got["m"] == pytest.approx({"v100": 0, "p100": 8})


def test_few_trials_get_the_fastest_devices_and_energy_or_money_others():
    rates = Rates(
        {("x", "v100"): Rate(2.0, 300), ("x", "p100"): Rate(1.5, 120), ("x", "k80"): Rate(0.9, 149)}
    )
    kinds = [V100, P100, K80]

    def chosen(goal, eta=1.0):
        row = allocate([Demand("s", "x", 4)], kinds, rates, goal=goal, eta=eta)["s"]
        return max(row, key=row.get)

    assert chosen("time") == "v100"  # 2.0 iterations/s
    assert chosen("energy") == "p100"  # 80 J, against 150 and 166
    assert chosen("money") == "k80"  # 0.5 / 0.9, against 1.25 and 1.0
    assert chosen("energy", eta=0.0) == "v100"  # Zeus: max power x time: 150, 166.7, 166.7


def test_cost_by_hand():
    assert cost(Rate(2.0), V100) == 0.5
    assert cost(Rate(2.0), V100, "money") == pytest.approx(2.5 / 7200)
    assert cost(Rate(2.0, 200), V100, "energy", eta=0.5) == 125
    assert cost(Rate(0.0), V100) == math.inf
    with pytest.raises(InvalidInput, match="goal"):
        cost(Rate(1.0), V100, "speed")
    with pytest.raises(InvalidInput, match="eta"):
        cost(Rate(1.0), V100, "energy", eta=2)


def test_rates_are_learned_and_unseen_pairs_inferred():
    rates = Rates(least=3)
    rates.tell("a", "v100", iterations=2, seconds=1)
    assert rates.rate("a", "v100") is None  # too few
    rates.tell("a", "v100", iterations=2, seconds=1, joules=250)
    assert rates.rate("a", "v100") == Rate(2.0, 250.0)
    rates.tell("a", "k80", iterations=5, seconds=10)
    rates.tell("b", "v100", iterations=40, seconds=4)
    assert rates.known("b", "k80") is None
    assert rates.rate("b", "k80").per_s == pytest.approx(10 / 4)  # a K80 is a quarter of a V100
    assert rates.rate("c", "k80") is None


def test_a_kind_of_trial_nobody_knows_gets_all_kinds_alike():
    got = allocate([Demand("s", "new", 12)], [V100, P100, K80], Rates())
    assert sum(got["s"].values()) == pytest.approx(12)


def test_a_device_it_cannot_run_on_is_not_given():
    rates = table(x={"v100": 1.0, "p100": 1.0, "k80": 0.0}, y={"v100": 1.0, "p100": 1.0, "k80": 1.0})
    got = allocate([Demand("x", "x", 12), Demand("y", "y", 12)], [V100, P100, K80], rates)
    assert got["x"]["k80"] == pytest.approx(0, abs=1e-6)


def test_targets_go_to_the_newest_device_they_use():
    def rates(v, p, k, speeds=(1.0, 0.9, 0.8)):
        used = zip(("v100", "p100", "k80"), speeds, (v, p, k), strict=True)
        return Rates({("t", name): Rate(s, utilisation=u) for name, s, u in used})

    kinds = [K80, V100, P100]
    assert target_kind("t", kinds, rates(0.9, 0.9, 0.9))[0] == "v100"
    assert target_kind("t", kinds, rates(0.3, 0.6, 0.9))[0] == "p100"
    assert target_kind("t", kinds, rates(0.1, 0.2, 0.3))[0] == "k80"
    assert target_kind("t", kinds, rates(0.1, 0.2, 0.3, (1.0, 0.9, 0.1))) == ["p100", "v100", "k80"]
    assert target_kind("t", kinds, rates(0.3, 0.6, 0.9), least_used=0.2)[0] == "v100"
    assert sorted(target_kind("unknown", kinds, Rates())) == ["k80", "p100", "v100"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(0, 40)), max_size=40))
def test_idle_devices_are_released_after_a_minute(steps):
    idle, since, now = Idle(60.0), {}, 0.0
    for device, free, wait in steps:
        now += wait
        due = idle.due(now)
        assert set(due) == {d for d, s in since.items() if now - s >= 60}
        since = {d: s for d, s in since.items() if d not in due}
        if free:
            idle.idle(device, now)
            since.setdefault(device, now)
        else:
            idle.busy(device)
            since.pop(device, None)
        assert idle.next_s() == (min(since.values()) + 60 if since else None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeviceKind("v100", 0),
        lambda: DeviceKind("v100", 1, busy_w=-1),
        lambda: fair_counts([Demand("a", "x", 1, weight=0)], 3),
        lambda: Rates().tell("a", "b", iterations=0, seconds=1),
        lambda: allocate([Demand("a", "x", 1)], [DeviceKind("f", 1)], table(x={"f": 1.0}), goal="money"),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(InvalidInput):
        make()


def test_studies_of_one_kind_share_alike():
    rates = table(x={"v100": 3.0, "p100": 1.0})
    got = allocate([Demand(str(i), "x", 20) for i in range(4)], [V100, P100], rates)
    for a, b in itertools.pairwise(got.values()):
        assert a == pytest.approx(b)
