"""The Gaussian process behind smooth forms and proposals, and what a predictor knows of its own errors."""

import math

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from penstock.predict import Features, Predictor, cross_validate, gp, rmspe
from penstock.space import Int, Space

SPACE = Space(
    width=Int(16, 256, structural=True), depth=Int(1, 8, structural=True), kernel=Int(2, 5, structural=True)
)
FEATURES = Features.of(SPACE)
rng = np.random.default_rng(3)
X = rng.random((30, 4))
Y = np.sin(4 * X[:, 0]) + X[:, 1] ** 2 + 0.5 * X[:, 2] * X[:, 3] + 0.05 * rng.standard_normal(30)
Y = (Y - Y.mean()) / Y.std()
THERE = rng.random((7, 4))


def watts(config):
    """A device that fills up: no line, no product of powers."""
    work = config["width"] * config["depth"] * config["kernel"] ** 2
    return 30 + 90 * (1 - math.exp(-work / 8000)) + 3 * config["kernel"]


def profile(count, scatter, seed, repeats=0):
    draw = np.random.default_rng(seed)
    configs = [SPACE.sample(1000 * seed + i) for i in range(count)]
    configs += configs[:repeats]
    return configs, [watts(c) * (1 + scatter * draw.standard_normal()) for c in configs]


def additive(hyper, one, two):
    """The kernel by its definition."""
    d = len(hyper.scales)
    whole = Matern(hyper.scales, nu=2.5)(one, two)
    parts = [
        Matern(hyper.scales[i] / math.sqrt(d), nu=2.5)(one[:, i : i + 1], two[:, i : i + 1]) for i in range(d)
    ]
    return hyper.signal * whole + hyper.apart * sum(parts) / d


def test_a_process_is_scikit_learns():
    hyper = gp.fit(X, Y)
    process = gp.Process(X, Y, hyper)
    kernel = ConstantKernel(hyper.signal) * Matern(hyper.scales, nu=2.5) + WhiteKernel(hyper.noise)
    peer = GaussianProcessRegressor(kernel, optimizer=None).fit(X, Y - process.mean)
    mean, std = process.predict(THERE)
    theirs, their_std = peer.predict(THERE, return_std=True)
    assert mean == pytest.approx(theirs + process.mean, abs=1e-8)
    assert std**2 == pytest.approx(their_std**2 - hyper.noise, abs=1e-8)


def test_an_additive_process_is_its_kernels_definition():
    hyper = gp.fit(X, Y, additive=True)
    assert hyper.apart > 0
    process = gp.Process(X, Y, hyper)
    k = additive(hyper, X, X) + hyper.noise * np.eye(30)
    cross = additive(hyper, THERE, X)
    mean, std = process.predict(THERE)
    assert mean == pytest.approx(process.mean + cross @ np.linalg.solve(k, Y - process.mean), abs=1e-8)
    own = hyper.signal + hyper.apart - np.einsum("ij,ji->i", cross, np.linalg.solve(k, cross.T))
    assert std**2 == pytest.approx(own, abs=1e-8)
    again, again_std, slope, std_slope = process.predict_slope(THERE)
    assert again == pytest.approx(mean)
    assert again_std == pytest.approx(std)
    for i, point in enumerate(THERE):
        assert slope[i] == pytest.approx(
            approx_fprime(point, lambda p: process.predict(p[None])[0][0], 1e-6), abs=1e-4
        )
        assert std_slope[i] == pytest.approx(
            approx_fprime(point, lambda p: process.predict(p[None])[1][0], 1e-6), abs=1e-4
        )


def test_hyperparameters_are_where_their_density_is_largest():
    """No step away from them makes data and priors more probable, the density taken by its definition."""

    def density(scales, signal, noise, apart):
        k = additive(gp.Hyper(scales, signal, noise, apart), X, X) + noise * np.eye(30)
        ones = np.linalg.solve(k, np.ones(30))
        left = Y - (ones @ Y) / ones.sum()
        data = -0.5 * left @ np.linalg.solve(k, left) - 0.5 * np.linalg.slogdet(k)[1]
        off = (np.log(scales) - math.sqrt(2) - 0.5 * math.log(4)) / math.sqrt(3)
        other = [(math.log(v) - math.log(0.5)) / 0.7 for v in (signal, apart)]
        return data - 0.5 * (
            off @ off + other[0] ** 2 + other[1] ** 2 + ((math.log(noise - 1e-5) + 4.5) / 1.3) ** 2
        )

    h = gp.fit(X, Y, 2, additive=True)
    best = density(h.scales, h.signal, h.noise, h.apart)
    for factor in (0.7, 1.4):
        for i in range(4):
            scales = h.scales.copy()
            scales[i] *= factor
            assert density(scales, h.signal, h.noise, h.apart) < best + 1e-3
        assert density(h.scales, factor * h.signal, h.noise, h.apart) < best + 1e-3
        assert density(h.scales, h.signal, factor * h.noise, h.apart) < best + 1e-3
        assert density(h.scales, h.signal, h.noise, factor * h.apart) < best + 1e-3


def test_a_sum_is_learned_from_few_points_in_many_dimensions():
    draw = np.random.default_rng(0)

    def f(x):
        return sum(np.cos(3 * x[:, i] + i) for i in range(10))

    x, there = draw.random((45, 10)), draw.random((200, 10))
    center, spread = f(x).mean(), f(x).std()

    def missed(**more):
        process = gp.Process(x, (f(x) - center) / spread, gp.fit(x, (f(x) - center) / spread, **more))
        return float(np.std(process.predict(there)[0] * spread + center - f(there)))

    assert missed(additive=True) < 0.6 * missed()


def test_a_saturating_device_is_smooth_and_its_doubt_is_honest():
    inside, errors, spreads, smooth = [], [], [], 0
    for seed in range(4):
        configs, values = profile(80, 0.02, seed, repeats=12)
        model = Predictor.fit("power_w", FEATURES, configs, values)
        smooth += model.form.smooth
        there = [SPACE.sample(90_000 + i) for i in range(200)]
        mean, doubt = model.doubt_many(there)
        truth = np.array([watts(c) for c in there])
        off = mean - truth
        inside += list(np.abs(off) < 1.96 * doubt)
        line = Predictor.fit("power_w", FEATURES, configs, values, forms=("plain", "linear"), folds=0)
        errors.append(rmspe(mean, truth) / rmspe(line.predict_many(there)[0], truth))
        spreads.append(model.predict(there[0]).std / model.predict(there[0]).doubt)
        again = Predictor.from_json(model.to_json())
        assert again.predict(there[0]) == model.predict(there[0])
        assert again.doubt_many(there)[1] == pytest.approx(doubt)
    assert smooth >= 2
    assert 0.9 < np.mean(inside) <= 1.0  # of the quantity itself, not of a measurement of it
    assert np.mean(errors) < 0.6
    assert min(spreads) > 1.05


def test_repeats_tell_the_sensors_scatter():
    configs, values = profile(60, 0.05, 1, repeats=40)
    model = Predictor.fit("power_w", FEATURES, configs, values, folds=0)
    assert model.sensor == pytest.approx(0.05, rel=0.3)
    # Without repeats, or with ones that agree, all that is missed may be the model's fault.
    for n, given in ((60, values[:60]), (100, values[:60] + values[:40])):
        blind = Predictor.fit("power_w", FEATURES, configs[:n], given, folds=0)
        found = blind.predict(configs[0])
        assert blind.sensor == pytest.approx(0, abs=1e-12)
        assert found.doubt == pytest.approx(found.std)


def test_what_is_measured_later_moves_a_smooth_model_near_it_and_lowers_its_doubt():
    configs, values = profile(40, 0.02, 2, repeats=8)
    model = Predictor.fit("power_w", FEATURES, configs, values, forms=("smooth",))
    config = {"width": 100, "depth": 4, "kernel": 3}
    before = model.predict(config)
    draw = np.random.default_rng(0)
    for _ in range(12):
        model.observe(config, 1.1 * watts(config) * (1 + 0.02 * draw.standard_normal()))
    after = model.predict(config)
    assert abs(after.mean / (1.1 * watts(config)) - 1) < 0.5 * abs(before.mean / (1.1 * watts(config)) - 1)
    assert after.doubt < 0.7 * before.doubt


def test_a_structure_that_was_measured_twice_is_not_predicted_from_itself():
    draw = np.random.default_rng(0)
    configs = [SPACE.sample(i) for i in range(40)]
    rows = FEATURES.matrix(configs + configs)
    values = np.tile(np.exp(0.3 * draw.standard_normal(40)), 2)  # nothing to learn but by heart
    errors = cross_validate(FEATURES, rows, values, forms=("smooth",), bends=False)
    assert np.sqrt(np.mean(errors**2)) > 0.25
