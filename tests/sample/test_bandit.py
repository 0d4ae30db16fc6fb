"""Zeus's bandit against closed forms, brute force and the paper's rules."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from penstock.core.errors import InvalidInput
from penstock.sample._bandit import FLAT, Belief, Pruning, ZeusBandit, posterior, thompson

costs_strategy = st.lists(st.floats(1.0, 100.0), min_size=2, max_size=8).filter(
    lambda c: max(c) - min(c) > 1e-3
)


@settings(deadline=None, max_examples=25)
@given(costs_strategy, st.floats(1.0, 100.0), st.floats(1.0, 400.0))
def test_posterior_is_the_precision_weighted_mean(costs, mean, variance):
    """Alg. 2 against Bayes' rule by numbers: the product of prior and likelihood on a fine grid."""
    import numpy as np

    spread = float(np.var(costs))
    belief = posterior(costs, Belief(mean, variance))
    low = min([*costs, mean]) - 6 * math.sqrt(variance + spread)
    high = max([*costs, mean]) + 6 * math.sqrt(variance + spread)
    theta = np.linspace(low, high, 20_001)
    log_density = stats.norm.logpdf(theta, mean, math.sqrt(variance))
    for cost in costs:
        log_density = log_density + stats.norm.logpdf(cost, theta, math.sqrt(spread))
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    if math.sqrt(belief.variance) > 8 * (theta[1] - theta[0]):  # the grid resolves it
        grid_mean = float(weight @ theta)
        assert belief.mean == pytest.approx(grid_mean, abs=1e-3 * (high - low))
        assert belief.variance == pytest.approx(float(weight @ (theta - grid_mean) ** 2), rel=1e-2)


def test_a_prior_without_variance_stays():
    """The limit of line 3; observations without variance are its other one."""
    sure = Belief(5.0, 0.0)
    assert posterior([1.0, 3.0], sure) == sure
    assert posterior([2.0, 2.0], sure) == Belief(2.0, 0.0)


def test_flat_prior_gives_the_sample_mean_and_variance_over_n():
    belief = posterior([10.0, 14.0], FLAT)
    assert belief.mean == pytest.approx(12.0)
    assert belief.variance == pytest.approx(4.0 / 2)  # Var = 4, |C_b| = 2
    assert posterior([], FLAT) == FLAT


def test_equal_costs_pin_the_belief_without_dividing_by_zero():
    assert posterior([7.0, 7.0, 7.0], Belief(100.0, 1.0)) == Belief(7.0, 0.0)
    assert posterior([7.0]) == Belief(7.0, 0.0)


def test_arms_are_drawn_independently():
    """P(draw a < draw b) for independent Gaussians; shared draws would give 0 or 1 here."""
    beliefs = {8: Belief(10.0, 4.0), 16: Belief(11.0, 9.0), 32: Belief(1000.0, 1.0)}
    n = 4000
    wins = sum(thompson(beliefs, random.Random(seed)) == 8 for seed in range(n))
    expected = stats.norm.cdf((11.0 - 10.0) / math.sqrt(13.0))
    assert wins / n == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))


def test_unknown_arms_come_first():
    beliefs = {8: Belief(1.0, 0.0), 16: FLAT, 32: FLAT}
    assert {thompson(beliefs, random.Random(seed)) for seed in range(50)} == {16, 32}


def walk(pruning: Pruning, costs: dict[int, float], fails: set[int]) -> list[int]:
    path = []
    while pruning.expecting is not None:
        size = pruning.expecting
        path.append(size)
        pruning.report(costs[size], size not in fails)
    return path


def test_pruning_explores_default_then_down_then_up_twice():
    """Alg. 3 by hand: 8 fails downwards (4 is never tried), 256 upwards (512 never); 32 is the cheapest."""
    costs = {4: 90, 8: 50, 16: 20, 32: 10, 64: 12, 128: 15, 256: 60, 512: 99}
    pruning = Pruning(list(costs), 64)
    path = walk(pruning, costs, {8, 256})
    assert path == [64, 32, 16, 8, 128, 256, *[32, 16, 64, 128]]
    assert pruning.batch_sizes == (16, 32, 64, 128)
    assert pruning.default == 32


def test_pruning_when_the_default_is_at_an_edge_or_alone():
    costs = {8: 3.0, 16: 2.0, 32: 1.0}
    assert walk(Pruning(list(costs), 32), costs, set()) == [32, 16, 8, 32, 16, 8]
    assert walk(Pruning(list(costs), 8), costs, set()) == [8, 16, 32, 32, 16, 8]
    assert walk(Pruning([8], 8), costs, set()) == [8, 8]


def test_pruning_keeps_all_when_nothing_reaches_the_target():
    pruning = Pruning([8, 16, 32], 16)
    assert walk(pruning, {8: 1, 16: 1, 32: 1}, {8, 16, 32}) == [16, 8, 32, 16, 8, 32]
    assert pruning.batch_sizes == (8, 16, 32)


def test_a_default_that_fails_prunes_neither_direction():
    """Alg. 3, lines 3 to 5: b0 is explored, then b < b0 until one of them fails, then b > b0."""
    costs = {8: 5.0, 16: 4.0, 32: 9.0, 64: 20.0}
    pruning = Pruning(list(costs), 32)
    assert walk(pruning, costs, {32}) == [32, 16, 8, 64, *[16, 8, 64]]
    assert pruning.batch_sizes == (8, 16, 64)
    assert pruning.default == 16


def algorithm_3(sizes: list[int], default: int, costs: dict[int, float], fails: set[int]) -> list[int]:
    """Lines 2 to 9 as they are printed; all sizes stay where none converged."""
    path = []
    for _ in range(2):
        tried = [default]
        for direction in (
            sorted((b for b in sizes if b < default), reverse=True),
            sorted(b for b in sizes if b > default),
        ):
            for size in direction:
                tried.append(size)
                if size in fails:
                    break
        path += tried
        converged = [b for b in tried if b not in fails]
        if converged:
            sizes, default = converged, min(converged, key=lambda b: costs[b])
    return path


@given(
    st.lists(st.sampled_from([2**k for k in range(1, 10)]), min_size=1, max_size=9, unique=True),
    st.data(),
)
def test_pruning_always_ends_and_keeps_only_sizes_that_converged(sizes, data):
    default = data.draw(st.sampled_from(sizes))
    fails = data.draw(st.sets(st.sampled_from(sizes)))
    ranks = data.draw(st.permutations(range(len(sizes))))
    costs = {size: float(rank) for size, rank in zip(sizes, ranks, strict=True)}
    pruning = Pruning(sizes, default)
    path = walk(pruning, costs, fails)
    assert path == algorithm_3(sizes, default, costs, fails)
    good = set(path) - fails
    assert set(pruning.batch_sizes) <= (good or set(sizes))


def drive(bandit: ZeusBandit, cost: dict[int, float], n: int, start: int = 0) -> list[int]:
    picks = []
    for number in range(start, start + n):
        pick = bandit.choose(number)
        picks.append(pick.batch_size)
        total = cost[pick.batch_size] * (1 + 0.01 * ((number * 7) % 5))
        reached = pick.cost_limit is None or total <= pick.cost_limit
        bandit.observe(pick.batch_size, total if reached else pick.cost_limit, reached, explored=pick.explore)
    return picks


def test_converges_to_the_cheapest_batch_size():
    cost = {8: 40.0, 16: 22.0, 32: 12.0, 64: 10.0, 128: 14.0, 256: 30.0}
    picks = drive(ZeusBandit(list(cost), 256), cost, 60)
    assert set(picks[-20:]) == {64}


def test_a_failed_run_does_not_lower_the_threshold():
    bandit = ZeusBandit([8, 16], 16, beta=2.0)
    assert bandit.cost_limit is None
    bandit.observe(16, 100.0, True, explored=True)
    bandit.observe(8, 3.0, False, explored=True)  # crashed early: cheap
    assert bandit.cost_limit == 200.0
    bandit.observe(8, 60.0, True)
    assert bandit.cost_limit == 120.0


def test_a_batch_size_that_begins_to_crash_is_left():
    """8 is the cheapest, until all of its runs end at once: what they spent is not what the target costs."""
    cost = {8: 10.0, 16: 12.0}
    bandit = ZeusBandit(list(cost), 16)
    assert drive(bandit, cost, 30)[-10:] == [8] * 10
    picks = []
    for number in range(30, 80):
        picks.append(bandit.choose(number).batch_size)
        crashes = picks[-1] == 8
        bandit.observe(picks[-1], 0.1 if crashes else 12.0, not crashes)
    assert picks[-20:].count(16) > 15  # by what the crashes cost it would be 0


def test_a_run_that_fails_counts_with_the_threshold_at_least():
    bandit = ZeusBandit([8, 16], 8, beta=2.0)
    for size, cost in ((8, 10.0), (16, 12.0), (8, 11.0), (16, 13.0)):
        bandit.observe(size, cost, True, explored=True)
    bandit.observe(16, 1.5, False)  # 2 x 10 is the threshold
    bandit.observe(8, 50.0, False)  # beyond it, as the last epoch of a run may be
    assert bandit.beliefs()[16].mean == pytest.approx((12.0 + 13.0 + 20.0) / 3)
    assert bandit.beliefs()[8].mean == pytest.approx((10.0 + 11.0 + 50.0) / 3)


def test_a_retry_is_with_another_batch_size():
    """Section 4.4: "we stop the job and retry with another batch size"; the next recurrence may try it again."""
    cost = {8: 10.0, 16: 12.0, 32: 12.5}
    bandit = ZeusBandit(list(cost), 16)
    drive(bandit, cost, 40)
    bandit.observe(8, 20.0, False)
    assert {bandit.choose(n, retry=True).batch_size for n in range(40, 240)} == {16, 32}
    assert 8 in {bandit.choose(n).batch_size for n in range(40, 240)}
    alone = ZeusBandit([64], 64)
    drive(alone, {64: 5.0}, 4)
    alone.observe(64, 10.0, False)
    assert alone.choose(4, retry=True).batch_size == 64


def test_draws_survive_restarts():
    """A bandit rebuilt from its observations decides as the old one would have: no stream to lose."""
    cost = {8: 10.02, 16: 10.0, 32: 10.01}
    one = ZeusBandit(list(cost), 16, seed=5)
    drive(one, cost, 12)
    two = ZeusBandit(list(cost), 16, seed=5)
    drive(two, cost, 12)
    later = [one.choose(n).batch_size for n in range(12, 40)]
    assert [two.choose(n).batch_size for n in reversed(range(12, 40))] == later[::-1]
    other = ZeusBandit(list(cost), 16, seed=6)
    drive(other, cost, 12)
    assert [other.choose(n).batch_size for n in range(12, 40)] != later


def test_concurrent_submissions_run_the_best_known_size_while_exploring():
    bandit = ZeusBandit([8, 16, 32], 16)
    assert bandit.choose(0).batch_size == 16
    assert bandit.choose(1, waiting=True).batch_size == 16  # nothing known: the default
    bandit.observe(16, 10.0, True, explored=True)
    assert bandit.choose(2).batch_size == 8
    bandit.observe(16, 9.0, True)  # a concurrent run ends first
    pick = bandit.choose(3, waiting=True)
    assert (pick.batch_size, pick.explore) == (16, False)
    bandit.observe(8, 5.0, True, explored=True)
    assert bandit.choose(4, waiting=True).batch_size == 8


def test_results_of_a_run_started_in_one_phase_and_ended_in_the_next_count():
    cost = {8: 10.0, 16: 12.0}
    bandit = ZeusBandit(list(cost), 8)
    drive(bandit, cost, 4)
    assert not bandit.exploring
    before = bandit.beliefs()[16]
    bandit.observe(16, 2.0, True)  # decided during pruning
    after = bandit.beliefs()[16]
    assert after.mean < before.mean
    bandit.observe(16, 2.0, True, explored=True)  # even if it says it explored
    assert not bandit.exploring


def test_window_forgets_and_looks_again():
    cost = {8: 10.0, 16: 12.0}
    windowed = ZeusBandit(list(cost), 8, window=6)
    drive(windowed, cost, 4)
    for _ in range(6):
        windowed.observe(8, 30.0, True)
    assert math.isinf(windowed.beliefs()[16].variance)
    assert windowed.choose(50).batch_size == 16
    assert windowed.cost_limit == 60.0  # the cheap past is out of the window


def test_a_single_observation_in_the_window_does_not_pin_the_belief():
    bandit = ZeusBandit([8, 16], 8, window=5)
    drive(bandit, {8: 10.0, 16: 12.0}, 4)
    for cost in (10.0, 12.0, 9.0, 11.0):
        bandit.observe(8, cost, True)
    single = bandit.beliefs()[16]
    assert single.variance > 0


def test_equal_costs_pin_an_arm_only_to_the_letter():
    """Two equal runs of 16 and two different ones of 8: by Alg. 2 alone the belief in 16 has no variance left."""
    beliefs = {}
    for pooled in (True, False):
        bandit = ZeusBandit([8, 16], 8, pooled=pooled)
        for size, cost in ((8, 9.0), (16, 12.0), (8, 11.0), (16, 12.0)):
            bandit.observe(size, cost, True, explored=True)
        beliefs[pooled] = bandit.beliefs()
    assert beliefs[False][16] == Belief(12.0, 0.0)
    assert beliefs[False][8] == posterior([9.0, 11.0])
    # Pooled relative variance: 2 x 0.1^2 / 2 degrees of freedom = 0.01; as one more run of 16: 0.01 x 144 / 2 / 2.
    assert beliefs[True][16].variance == pytest.approx(0.01 * 144 / 2 / 2)
    assert beliefs[True][16].mean == pytest.approx(12.0)


def test_one_batch_size():
    bandit = ZeusBandit([64], 64)
    assert drive(bandit, {64: 5.0}, 10) == [64] * 10


@pytest.mark.parametrize(
    "arguments",
    [
        dict(batch_sizes=[], default=1),
        dict(batch_sizes=[8], default=16),
        dict(batch_sizes=[8], default=8, beta=0.5),
        dict(batch_sizes=[8], default=8, window=0),
    ],
)
def test_wrong_input_is_named(arguments):
    sizes, default = arguments.pop("batch_sizes"), arguments.pop("default")
    with pytest.raises(InvalidInput):
        ZeusBandit(sizes, default, **arguments)
