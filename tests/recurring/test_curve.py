"""The cost-curve policy: its inference against brute force, its decisions against what it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from penstock.core.errors import InvalidInput
from penstock.recurring import Curve, Decision, History, JobSpec, Result, View
from penstock.recurring import _curve as curve

LIMITS = (100.0, 150.0, 200.0, 250.0)
SPEC = JobSpec((8, 16, 32, 64, 128), 64, 0.5, 2.0, None, LIMITS, 250.0)


def belief(n: int = 5, seed: int = 0) -> curve._Belief:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n)) * 0.3
    return curve._Belief(rng.normal(size=n), root @ root.T + 0.01 * np.eye(n))


def test_conditioning_with_one_shape_is_the_textbook_gaussian_process():
    x = np.arange(5.0)
    kernel = curve._kernel(x, 0.3, 2.0, 0.1)
    shape = np.array([[0.1, 0.2, 0.4, 0.7, 1.1]])
    at, y, noise = np.array([1, 3]), np.array([2.0, 2.6]), np.array([0.01, 0.02])
    got = curve._mixture(shape, np.zeros(1), kernel, at, y, noise)
    # The same by the joint Gaussian's precision matrix, with the unknown constant as a variable of its own.
    prior = np.linalg.inv(np.block([[kernel, np.zeros((5, 1))], [np.zeros((1, 5)), np.array([[25.0]])]]))
    rows = np.zeros((2, 6))
    for row, arm in enumerate(at):
        rows[row, arm] = rows[row, 5] = 1.0
    precision = prior + rows.T @ np.diag(1 / noise) @ rows
    joint = np.linalg.solve(precision, rows.T @ ((y - shape[0, at]) / noise))
    sums = np.hstack([np.eye(5), np.ones((5, 1))])
    np.testing.assert_allclose(got.mean, shape[0] + sums @ joint, atol=1e-8)
    np.testing.assert_allclose(got.cov, sums @ np.linalg.inv(precision) @ sums.T, atol=1e-8)


def test_shapes_are_weighted_by_how_well_they_predict():
    """Two mean functions, one of them right: the mixture's moments are the weighted ones of the two posteriors."""
    x = np.arange(4.0)
    kernel = curve._kernel(x, 0.1, 2.0, 0.05)
    shapes = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    at, y, noise = np.array([0, 2]), np.array([1.0, 1.1]), np.array([0.01, 0.01])
    prior = np.log([0.3, 0.7])
    got = curve._mixture(shapes, prior, kernel, at, y, noise)
    inner = (kernel + 25.0)[np.ix_(at, at)] + np.diag(noise)
    weight = np.exp(prior) * [stats.multivariate_normal(s[at], inner).pdf(y) for s in shapes]
    weight /= weight.sum()
    alone = [curve._mixture(s[None], np.zeros(1), kernel, at, y, noise) for s in shapes]
    mean = weight[0] * alone[0].mean + weight[1] * alone[1].mean
    np.testing.assert_allclose(got.mean, mean, atol=1e-9)
    cov = sum(
        w * (a.cov + np.outer(a.mean - mean, a.mean - mean)) for w, a in zip(weight, alone, strict=True)
    )
    np.testing.assert_allclose(got.cov, cov, atol=1e-9)


@pytest.mark.parametrize("bound", [-2.0, 0.0, 1.5, 4.0])
def test_a_stopped_run_is_a_censored_observation(bound):
    """Moments of N(mean, cov) times P(noisy draw of an arm > bound), by sampling with weights."""
    start, noise = belief(3), 0.2
    got = curve._beyond(start, 1, bound, noise**2)
    rng = np.random.default_rng(1)
    samples = rng.multivariate_normal(start.mean, start.cov, size=400_000)
    weight = stats.norm.cdf((samples[:, 1] - bound) / noise)
    if weight.sum() > 2000:
        weight /= weight.sum()
        mean = weight @ samples
        np.testing.assert_allclose(got.mean, mean, atol=0.01)
        spread = samples - mean
        np.testing.assert_allclose(got.cov, (weight[:, None] * spread).T @ spread, atol=0.01)
    assert got.mean[1] >= start.mean[1]
    assert got.cov[1, 1] <= start.cov[1, 1] + 1e-12


def test_inverse_mills_is_continuous_far_out():
    for z in (-20.0, -8.5, -8.0 - 1e-9, -7.9, 0.0, 5.0):
        expected = math.exp(stats.norm.logpdf(z) - stats.norm.logcdf(z))
        assert curve._inverse_mills(z) == pytest.approx(expected, rel=2e-3)


def test_expected_least_cost_after_an_observation_matches_sampling():
    """The knowledge gradient's inner expectation, by drawing observations and conditioning on each."""
    epochs, costs, noise = belief(4, 2), belief(4, 3), 0.15
    mean = np.exp(epochs.mean + costs.mean + 0.5 * (np.diag(epochs.cov) + np.diag(costs.cov)))
    got = curve._after(epochs, costs, noise, mean)
    rng = np.random.default_rng(5)
    for arm in range(4):
        total, n = 0.0, 4000
        moved = []
        for one, variance in ((epochs, noise**2), (costs, 1e-4)):
            scale = math.sqrt(one.cov[arm, arm] + variance)
            y = one.mean[arm] + scale * rng.normal(size=n)
            gain = one.cov[:, arm] / scale**2
            shifted = one.mean[None, :] + gain[None, :] * (y - one.mean[arm])[:, None]
            left = np.diag(one.cov) - one.cov[:, arm] ** 2 / scale**2
            moved.append(shifted + 0.5 * left)
        total = float(np.exp(moved[0] + moved[1]).min(axis=1).mean())
        assert got[arm] == pytest.approx(total, rel=0.06)


def test_observing_never_makes_the_expected_optimum_worse():
    epochs, costs = belief(5, 7), belief(5, 8)
    mean = np.exp(epochs.mean + costs.mean + 0.5 * (np.diag(epochs.cov) + np.diag(costs.cov)))
    assert (curve._after(epochs, costs, 0.1, mean) <= mean.min() * (1 + 1e-9)).all()


def test_cost_of_a_run_with_a_stop_matches_sampling():
    log_mean, var, best = np.array([0.5, 1.2]), np.array([0.3, 0.04]), 1.5
    fails = np.array([0.1, 0.0])
    cost, stop = curve._run_costs(log_mean, var, best, fails)
    rng = np.random.default_rng(0)
    for arm in range(2):
        draws = np.exp(rng.normal(log_mean[arm], math.sqrt(var[arm]), size=400_000))
        draws[rng.random(len(draws)) < fails[arm]] = np.inf
        stops = best * np.linspace(1.5, 6.0, 60)
        brute = {t: np.minimum(draws, t).mean() + (draws > t).mean() * best for t in (*stops, 1e5)}
        limit = min(stop[arm], 1e5)
        there = np.minimum(draws, limit).mean() + (draws > limit).mean() * best
        assert cost[arm] == pytest.approx(there, rel=0.01)
        assert cost[arm] <= min(brute.values()) * 1.01


def history_of(runs: list[tuple[int, float, bool]], profile_all: bool = True) -> History:
    history = History()
    for number, (size, epochs, reached) in enumerate(runs):
        history.add_decision(Decision(number, size, 150.0))
        time_s = 10.0 + 400.0 / size
        profile = {w: (time_s, min(w, 160.0)) for w in LIMITS} if profile_all else {150.0: (time_s, 150.0)}
        history.add_result(Result(number, epochs, epochs * time_s, epochs * time_s * 150.0, reached, profile))
    return history


def test_the_first_run_is_the_default_with_all_limits_profiled():
    choice = Curve().choose(History().view(SPEC), 0)
    assert choice.batch_size == 64
    assert choice.profile_w == (250.0, 200.0, 150.0, 100.0)
    assert choice.cost_limit is None


def test_another_batch_size_profiles_only_around_the_known_optimum():
    history = history_of([(64, 10.0, True)])
    limit, profile = curve.thrifty_limits(history.view(SPEC), 32)
    assert limit is None
    assert len(profile) <= 3
    best = min(LIMITS, key=lambda w: 0.5 * min(w, 160.0) + 0.5 * 250.0)
    assert best in profile


def test_a_contender_profiles_what_lies_within_two_limits_of_its_best():
    history = History()
    history.add_decision(Decision(0, 64, 200.0))
    history.add_result(Result(0, 1.0, 10.0, 1500.0, True, {200.0: (10.0, 190.0), 250.0: (9.9, 240.0)}))
    limit, profile = curve.thrifty_limits(history.view(SPEC), 64)
    assert limit is None  # to be chosen from what is measured, the best so far among it
    assert set(profile) == {100.0, 150.0, 200.0}
    history.add_decision(Decision(1, 64, None, profile))
    history.add_result(
        Result(1, 1.0, 10.0, 1500.0, True, {100.0: (30.0, 90.0), 150.0: (11.0, 140.0), 200.0: (10.0, 190.0)})
    )
    # 150 W: 11 s x (70 + 125) W; 200 W: 10 s x (95 + 125) W
    assert curve.thrifty_limits(history.view(SPEC), 64) == (150.0, ())


def test_no_limits_to_set_means_none_to_profile():
    spec = JobSpec((8, 16), 8)
    assert curve.thrifty_limits(History().view(spec), 8) == (None, ())


def test_a_well_known_optimum_is_kept():
    runs = [(size, epochs, True) for _ in range(12) for size, epochs in ((32, 10.0), (64, 11.0), (128, 16.0))]
    runs += [(16, 14.0, True)] * 4 + [(8, 30.0, True)] * 3
    choice = Curve().choose(history_of(runs).view(SPEC), 99)
    assert choice.batch_size == 64  # 10 x 22.5 against 11 x 16.25
    assert choice.profile_w == ()


def test_a_retry_goes_for_the_best_known():
    runs = [(64, 10.0, True), (64, 10.0, True), (8, 5.0, False)]
    view = history_of(runs).view(SPEC)
    assert Curve().choose(view, 3, retry=True).batch_size in (32, 64, 128)
    assert Curve().choose(view, 3, retry=True).batch_size != 8


def test_no_run_may_cost_more_than_beta_times_the_least():
    runs = [(64, 10.0, True)]
    view = history_of(runs).view(SPEC)
    choice = Curve().choose(view, 1)
    assert choice.cost_limit is not None
    assert choice.cost_limit <= 2.0 * view.seen[0].cost * (1 + 1e-9)


def test_batch_sizes_that_crash_twice_are_left_alone():
    history = history_of([(64, 10.0, True)] * 2)
    for number in (2, 3):
        history.add_decision(Decision(number, 128))
        history.add_result(Result(number, 0.0, 1.0, 1.0, False, {}, "out of memory"))
    assert {Curve(horizon=h).choose(history.view(SPEC), 4).batch_size for h in (5, 100, 5000)} & {
        128
    } == set()


def crash(history: History, *sizes: int) -> None:
    for size in sizes:
        number = history.next_number
        history.add_decision(Decision(number, size))
        history.add_result(Result(number, 0.0, 1.0, 1.0, False, {}, "No space left on device"))


def test_crashes_of_an_outage_say_nothing_of_the_batch_sizes():
    """Before the first success, or together with a batch size that has worked: no fault of theirs."""
    before = History()
    crash(before, 64, 32, 128, 16, 64, 32, 128, 16)
    assert curve._evidence(before.view(SPEC).seen).broken == {64, 32, 128, 16}
    number = before.next_number
    before.add_decision(Decision(number, 8))
    before.add_result(Result(number, 10.0, 10.0, 1000.0, True))
    assert curve._evidence(before.view(SPEC).seen).broken == set()

    later = history_of([(64, 10.0, True)] * 2)
    crash(later, 128, 128, 64, 32, 32)
    assert curve._evidence(later.view(SPEC).seen).broken == set()

    memory = history_of([(64, 10.0, True)] * 2)
    crash(memory, 128, 128, 32)
    assert curve._evidence(memory.view(SPEC).seen).broken == {128}


@pytest.mark.parametrize("outage", [(0, 3), (0, 4), (1, 4)])
def test_a_job_finds_its_best_batch_size_after_an_outage(outage):
    need = {8: 30, 16: 9, 32: 14, 64: 18, 128: 29}
    history = History()
    for night in range(60):
        for attempt in range(3):
            number = history.next_number
            choice = Curve().choose(history.view(SPEC), number, retry=attempt > 0)
            if outage[0] <= night < outage[1]:
                crash(history, choice.batch_size)
                continue
            limit_w, epochs = choice.limit_w or 250.0, need[choice.batch_size]
            cost = SPEC.cost(limit_w, 1.0)
            ran = next(
                n
                for n in range(1, epochs + 1)
                if n == epochs or (n + 1) * cost > (choice.cost_limit or math.inf)
            )
            measured = {w: (1.0, w) for w in choice.profile_w or (limit_w,)}
            history.add_decision(Decision(number, choice.batch_size, choice.limit_w, choice.profile_w))
            history.add_result(Result(number, ran, ran, ran * limit_w, ran == epochs, measured))
            if ran == epochs:
                break
    assert choice.batch_size == 16


def test_what_is_under_way_is_not_explored_again():
    history = history_of([(64, 10.0, True)])
    picked = []
    for number in range(1, 9):
        choice = Curve().choose(history.view(SPEC), number)
        history.add_decision(Decision(number, choice.batch_size, choice.limit_w))
        picked.append(choice.batch_size)
    explored = [size for size in picked if size != 64]
    assert len(explored) >= 2
    assert len(set(explored)) >= 2


def test_the_default_failing_makes_its_neighbours_tried():
    history = history_of([(64, 100.0, False)])
    assert Curve().choose(history.view(SPEC), 1).batch_size in (32, 128)


def test_one_batch_size_tunes_the_limit_alone():
    spec = JobSpec((64,), 64, limits_w=LIMITS, max_power_w=250.0)
    first = Curve().choose(History().view(spec), 0)
    assert first.profile_w
    second = Curve().choose(history_of([(64, 10.0, True)]).view(spec), 1)
    assert (second.batch_size, second.profile_w) == (64, ())
    assert second.limit_w == 100.0  # equal times in this profile: the lowest draw wins


def test_the_choice_is_a_function_of_the_history():
    view = history_of([(64, 10.0, True), (32, 9.0, True), (16, 12.0, True)]).view(SPEC)
    assert isinstance(view, View)
    assert len({Curve().choose(view, n) for n in range(5)}) == 1


def test_drift_drops_what_no_longer_holds():
    steady = [(64, 10.0 + (n % 3 - 1), True) for n in range(20)]
    drifted = steady + [(64, 25.0, True)] * 4
    before = curve._evidence(history_of(steady).view(SPEC).seen)
    after = curve._evidence(history_of(drifted).view(SPEC).seen)
    assert before.logs[64][0] == 20
    assert after.logs[64][0] == 4
    assert math.exp(after.logs[64][1] / 4) == pytest.approx(25.0)


CHANGES = {
    "data grow by 1.5% a night": lambda night: (10, 1.015**night),
    "an epoch takes three times as long": lambda night: (10, 3.0 if night >= 20 else 1.0),
    "one night has a tenth of the data": lambda night: (10, 0.1 if night == 20 else 1.0),
    "one night is easy": lambda night: (2 if night == 20 else 10, 1.0),
    "the first night is easy": lambda night: (10 if night else 2, 1.0),
    "three times as many epochs": lambda night: (30 if night >= 20 else 10, 1.0),
}


@pytest.mark.parametrize("sizes", [(32,), (16, 32, 64)])
@pytest.mark.parametrize("beta", [1.2, 2.0])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_job_that_changes_is_soon_trained_to_its_target_again(change, beta, sizes):
    """Nights of up to three runs, each stopped as ``run()`` stops it: no cost limit may stop all of them for ever."""
    spec = JobSpec(sizes, 32, beta=beta, limits_w=LIMITS, max_power_w=250.0)
    history, rng, reached = History(), np.random.default_rng(0), []
    for night in range(80):
        for attempt in range(3):
            number = history.next_number
            choice = Curve().choose(history.view(spec), number, retry=attempt > 0)
            epochs, factor = change(night)
            need = max(1, round(epochs * rng.normal(1.0, 0.05)))
            points = {w: (factor * (1 + (250 - w) / 300), 0.9 * w) for w in LIMITS}
            time_s, power_w = points[choice.limit_w or 150.0]
            epoch_cost = spec.cost(time_s * power_w, time_s)
            limit = math.inf if choice.cost_limit is None else choice.cost_limit
            ran = next(n for n in range(1, need + 1) if n == need or (n + 1) * epoch_cost > limit)
            measured = {w: points[w] for w in choice.profile_w or (choice.limit_w,)}
            history.add_decision(Decision(number, choice.batch_size, choice.limit_w, choice.profile_w))
            history.add_result(
                Result(number, ran, ran * time_s, ran * time_s * power_w, ran == need, measured)
            )
            if ran == need:
                break
        reached.append(ran == need)
    assert reached.count(False) <= 5
    assert all(reached[30:])


def test_noise_alone_is_not_drift():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(40):
        runs = [(64, float(round(20 * math.exp(rng.normal(0, 0.12)))), True) for _ in range(150)]
        alarms += curve._evidence(history_of(runs).view(SPEC).seen).logs[64][0] < 150
    assert alarms == 0


def test_wrong_horizon():
    with pytest.raises(InvalidInput):
        Curve(horizon=0)
