"""Predictors: HyperPower's linear models, what is chosen under cross validation, doubt, refinement, JSON."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict

from penstock.core import Source
from penstock.core.errors import InvalidInput
from penstock.predict import Features, Form, Predictor, Predictors, cross_validate, rmspe, scatter_svg
from penstock.space import Choice, Float, Int, Space, equals

SPACE = Space(
    width=Int(16, 128, structural=True),
    depth=Int(1, 6, structural=True),
    kernel=Int(2, 5, structural=True),
    lr=Float(1e-4, 1e-1, log=True),
)
FEATURES = Features.of(SPACE)


def samples(count, first=0):
    return [SPACE.sample(first + i) for i in range(count)]


def scattered(values, share, seed=0):
    rng = np.random.default_rng(seed)
    return [v * (1 + share * rng.standard_normal()) for v in values]


def test_rmspe_by_hand():
    # Errors of +10%, -20% and 0%: the root of (0.01 + 0.04) / 3.
    assert rmspe([110, 80, 50], [100, 100, 50]) == pytest.approx(math.sqrt(0.05 / 3))
    with pytest.raises(InvalidInput):
        rmspe([1], [1, 2])


def test_features_are_the_structural_ones():
    assert FEATURES.names == ("width", "depth", "kernel")
    assert FEATURES.row({"width": 32, "depth": 2, "kernel": 3, "lr": 0.1}) == [32.0, 2.0, 3.0]


def test_features_of_choices_and_conditions():
    space = Space(act=Choice("relu", "tanh"), size=Choice(32, 64), more=Int(1, 3, when=equals("act", "tanh")))
    features = Features.of(space)  # nothing is marked: everything counts
    assert features.names == ("[act = relu]", "[act = tanh]", "size", "more", "[more]")
    assert features.row({"act": "relu", "size": 64}) == [1, 0, 64, 0, 0]
    assert features.row({"act": "tanh", "size": 32, "more": 2}) == [0, 1, 32, 2, 1]
    assert Features.from_json(json.loads(json.dumps(features.to_json()))) == features


def test_the_plain_model_recovers_the_weights_of_equation_1():
    # P(z) = 0.4 width + 3 depth + 5 kernel, exactly.
    configs = samples(40)
    values = [0.4 * c["width"] + 3 * c["depth"] + 5 * c["kernel"] for c in configs]
    model = Predictor.fit("power_w", FEATURES, configs, values, forms=("plain",), bends=False)
    assert model.weights == pytest.approx({"width": 0.4, "depth": 3.0, "kernel": 5.0}, rel=1e-3)
    assert model.rmspe < 1e-3
    config = {"width": 100, "depth": 3, "kernel": 4, "lr": 0.01}
    assert model.predict(config).mean == pytest.approx(40 + 9 + 20, rel=1e-3)


def test_the_linear_model_is_weighted_least_squares():
    """Against scikit-learn: a hardly shrunk fit of relative errors is least squares with weights 1 / y^2."""
    configs = samples(60)
    values = scattered([50 + 0.4 * c["width"] + 3 * c["depth"] for c in configs], 0.05)
    model = Predictor.fit("power_w", FEATURES, configs, values, forms=("linear",), bends=False)
    z = FEATURES.matrix(configs)
    peer = LinearRegression().fit(z, values, sample_weight=1 / np.square(values))
    got = model.weights
    # The ridge is chosen by cross validation; it shrinks by a little.
    there = samples(50, 900)
    mean, _ = model.predict_many(there)
    assert rmspe(mean, peer.predict(FEATURES.matrix(there))) < 0.01
    assert got["width"] == pytest.approx(peer.coef_[0], rel=0.1)


def test_cross_validation_agrees_with_scikit_learn_on_a_linear_device():
    configs = samples(100)
    values = np.array(scattered([80 + 0.3 * c["width"] + 4 * c["kernel"] for c in configs], 0.05))
    z = FEATURES.matrix(configs)
    ours = cross_validate(FEATURES, z, values, forms=("linear",), bends=False)
    peer = cross_val_predict(LinearRegression(), z, values, cv=10)
    assert np.sqrt(np.mean(ours**2)) == pytest.approx(rmspe(peer, values), rel=0.05)


@pytest.mark.parametrize("structures", [2, 3, 7])
def test_cross_validation_leaves_whole_structures_out(structures):
    """Few structures, measured again and again, as where one Choice is all that is structural."""
    configs = [config for config in samples(structures, 40) for _ in range(12)]
    values = np.array(scattered([80 + 0.3 * c["width"] for c in configs], 0.01))
    z = FEATURES.matrix(configs)
    group = np.repeat(np.arange(structures), 12)
    for seed in range(8):
        ours = cross_validate(FEATURES, z, values, folds=10, seed=seed, forms=("linear",), bends=False)
        # As many folds as structures: each is predicted by all others, so all its samples alike, whatever the seed.
        for each in range(structures):
            found = values[group == each] * (1 + ours[group == each])
            assert np.ptp(found) <= 1e-9 * found.max()
            rest = Predictor.fit_rows(
                "power_w",
                FEATURES,
                z[group != each],
                values[group != each],
                folds=0,
                forms=("linear",),
                bends=False,
            )
            assert found[0] == pytest.approx(rest.predict_rows(z[group == each])[0][0])
    assert math.isfinite(Predictor.fit("power_w", FEATURES, configs, values).rmspe)


def test_one_structure_alone_is_predicted_by_its_mean_and_not_cross_validated():
    configs = samples(1) * 24
    values = scattered([50.0] * 24, 0.02)
    found = Predictor.fit("power_w", FEATURES, configs, values)
    assert math.isnan(found.rmspe)
    assert found.predict(configs[0]).mean == pytest.approx(np.mean(values), rel=0.01)
    with pytest.raises(InvalidInput, match="at least two"):
        cross_validate(FEATURES, FEATURES.matrix(configs), np.array(values))


@pytest.mark.parametrize("extra", [(), ("flops",)])
def test_an_empty_space_is_predicted_by_its_mean(extra):
    values = scattered([50.0] * 24, 0.02)
    features = Features.of(Space(), extra=extra)
    found = Predictor.fit("power_w", features, [{}] * 24, values, extra=lambda config: {"flops": 1e6})
    assert found.predict({}).mean == pytest.approx(np.mean(values), rel=0.01)


def test_leaving_one_out_is_what_refitting_without_it_gives():
    configs = samples(25)
    values = np.array(scattered([30 + c["width"] * c["depth"] for c in configs], 0.03))
    rows = FEATURES.matrix(configs)
    model = Predictor("power_w", FEATURES, rows, values, Form("linear", 1e-6))
    _, left_out = model.residuals()
    for i in (0, 7, 24):
        rest = np.arange(25) != i
        again = Predictor("power_w", FEATURES, rows[rest], values[rest], model.form)
        assert again.predict(configs[i]).mean == pytest.approx(left_out[i], rel=2e-3)


def test_products_are_taken_where_they_pay_and_only_there():
    configs = samples(100)
    flat = scattered([40 + 0.5 * c["width"] + 2 * c["depth"] for c in configs], 0.02)
    bent = scattered([40 + 0.02 * c["width"] * c["depth"] * c["kernel"] for c in configs], 0.02)
    assert Predictor.fit("power_w", FEATURES, configs, flat).form.terms == "linear"
    model = Predictor.fit("power_w", FEATURES, configs, bent)
    line = Predictor.fit("power_w", FEATURES, configs, bent, forms=("plain", "linear"), bends=False)
    assert model.rmspe < 0.6 * line.rmspe
    assert model.rmspe < 0.04


def test_extra_features_are_taken_where_they_pay():
    def extra(config):
        return {"cells": config["width"] ** 2 * config["depth"] * config["kernel"] ** 2}

    features = Features.of(SPACE, extra=("cells",))
    configs = samples(80)
    values = scattered([100 + 2e-4 * extra(c)["cells"] for c in configs], 0.01)
    model = Predictor.fit("memory_bytes", features, configs, values, extra=extra)
    assert model.form.terms == "extra"
    assert model.rmspe < 0.02
    with pytest.raises(InvalidInput, match="extra"):
        Predictor.from_json(model.to_json()).predict(configs[0])


def test_the_doubt_is_calibrated_and_grows_outside_the_samples():
    configs = samples(100)
    truth = lambda c: 60 + 0.3 * c["width"] + 3 * c["depth"]  # noqa: E731
    model = Predictor.fit("power_w", FEATURES, configs, scattered(map(truth, configs), 0.04))
    there = samples(400, 5000)
    mean, std = model.predict_many(there)
    seen = np.array(scattered(map(truth, there), 0.04, seed=9))
    inside = np.mean(np.abs(seen - mean) < 1.96 * std)
    assert 0.9 < inside < 0.99
    near = model.predict({"width": 70, "depth": 3, "kernel": 3, "lr": 0.1})
    far = model.predict({"width": 1000, "depth": 40, "kernel": 3, "lr": 0.1})
    assert far.std / far.mean > 1.2 * near.std / near.mean


def test_observations_refine_it():
    """A device that draws more than the profile says for wide networks: told of a few, it knows the others."""
    configs = samples(60)
    model = Predictor.fit(
        "power_w", FEATURES, configs, scattered([50 + 0.2 * c["width"] for c in configs], 0.01)
    )
    wide = {"width": 120, "depth": 4, "kernel": 3, "lr": 0.1}
    before = model.predict(wide).mean
    for width in range(100, 128, 3):
        for depth in (2, 5):
            model.observe({"width": width, "depth": depth, "kernel": 4, "lr": 0.1}, 1.15 * (50 + 0.2 * width))
    after = model.predict(wide).mean
    truth = 1.15 * 74
    assert abs(after - truth) < 0.6 * abs(before - truth)
    assert model.observed == 20
    assert model.samples == 80


def test_json_gives_the_same_predictions():
    configs = samples(50)
    model = Predictor.fit(
        "power_w", FEATURES, configs, scattered([40 + c["width"] * c["depth"] for c in configs], 0.02)
    )
    model.observe(configs[0], 99.0)
    again = Predictor.from_json(json.loads(json.dumps(model.to_json())))
    for config in samples(5, 700):
        assert again.predict(config) == model.predict(config)
    assert (again.rmspe, again.source, again.observed) == (model.rmspe, Source.MEASURED, 1)
    with pytest.raises(InvalidInput, match="Not a predictor"):
        Predictor.from_json({"format": 1})


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, -2.0, 3.0], [1.0, math.nan, 3.0], [1.0, 0.0, 2.0]])
def test_values_that_teach_nothing_are_refused(values):
    with pytest.raises(InvalidInput, match="power_w"):
        Predictor.fit("power_w", FEATURES, samples(len(values)), values)


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-6, 1e9), st.integers(0, 50))
def test_the_unit_of_the_values_does_not_matter(scale, seed):
    configs = samples(30, seed)
    values = scattered([50 + c["width"] for c in configs], 0.03, seed)
    one = Predictor.fit("power_w", FEATURES, configs, values, folds=0)
    two = Predictor.fit("power_w", FEATURES, configs, [scale * v for v in values], folds=0)
    there = SPACE.sample(seed + 10_000)
    assert two.predict(there).mean == pytest.approx(scale * one.predict(there).mean, rel=1e-6)


class Kept(dict):
    def put(self, key, value):
        self[key] = json.loads(json.dumps(value))


def test_a_bundle_is_kept_by_device_and_task():
    configs = samples(30)
    models = {
        q: Predictor.fit(q, FEATURES, configs, [50 + c["width"] for c in configs])
        for q in ("power_w", "latency_s")
    }
    store = Kept()
    Predictors(models, device="RTX 9", task="cnn").save(store)
    assert list(store) == ["predictors/RTX 9/cnn"]
    again = Predictors.load(store, "RTX 9", "cnn")
    assert again is not None
    assert set(again) == {"power_w", "latency_s"}
    assert again.predict("power_w", configs[3]) == models["power_w"].predict(configs[3])
    assert again.predict("memory_bytes", configs[3]) is None
    assert Predictors.load(store, "another", "cnn") is None
    assert "RMSPE" in str(again)


def test_a_quantity_without_a_profile_is_learned_on_line():
    predictors = Predictors(features=FEATURES)
    config = {"width": 64, "depth": 3, "kernel": 3, "lr": 0.1}
    assert predictors.predict("energy", config) is None
    for c in samples(20):
        predictors.observe("energy", c, 10 + c["width"])
    predictors.observe("energy", config, math.nan)  # a sensor that failed
    found = predictors.predict("energy", config)
    assert found is not None
    assert found.mean == pytest.approx(74, rel=0.02)


def test_predictions_are_no_stronger_than_the_weakest_value_behind_them():
    predictors = Predictors(features=FEATURES)
    for number, config in enumerate(samples(20)):
        source = Source.ESTIMATED if number == 3 else Source.MEASURED
        predictors.observe("energy", config, 10 + config["width"], source)
    assert predictors["energy"].source is Source.ESTIMATED
    predictors.observe("energy", samples(1)[0], 50.0, Source.SIMULATED)
    assert predictors["energy"].source is Source.SIMULATED
    assert predictors.copy()["energy"].source is Source.SIMULATED


def test_the_picture_holds_every_sample():
    configs = samples(25)
    model = Predictor.fit("power_w", FEATURES, configs, scattered([50 + c["width"] for c in configs], 0.05))
    svg = scatter_svg(Predictors({"power_w": model}, device="GPU <1>"))
    assert svg.count("<circle") == 25
    assert "GPU &lt;1&gt;" in svg


def power(config):
    return 4 + 0.4 * config["width"] + 3 * config["depth"] + 5 * config["kernel"]


@pytest.fixture(scope="module")
def profiled():
    configs = [*samples(100), *samples(10)]  # ten of them twice
    values = scattered([power(c) for c in configs], 0.02)
    return Predictor.fit("power_w", FEATURES, configs, values)


@pytest.mark.parametrize("factor", [0.5, 1.3, 3.0, 20.0])
def test_a_device_that_is_off_its_profile_by_a_factor_is_learned_after_a_few_measurements(profiled, factor):
    """The truth is known: predictions come within four doubts of it, which stay a few per cent."""
    found = profiled.copy()
    configs = samples(3, 500)
    values = scattered([factor * power(c) for c in configs], 0.02, 1)
    for config, value in zip(configs, values, strict=True):
        found.observe(config, value)
    for config in samples(50, 900):
        predicted = found.predict(config)
        assert abs(predicted.mean - factor * power(config)) < 4 * predicted.doubt
        assert predicted.doubt < 0.05 * factor * power(config)
    again = Predictor.from_json(json.loads(json.dumps(found.to_json())))
    config = SPACE.sample(7)
    assert again.predict(config) == found.predict(config)
    assert sum(w * config.get(n, 1.0) for n, w in found.weights.items()) == pytest.approx(
        found.predict(config).mean, rel=0.02
    )
    measured, left_out = found.residuals()
    assert list(measured[-3:]) == values
    assert np.abs(left_out / measured - 1).max() < 0.15


def test_measurements_that_agree_with_the_profile_are_samples_like_its_own(profiled):
    """The same as one fit of all samples: no factor, no further doubt."""
    for seed in range(10):
        found = profiled.copy()
        configs = samples(30, 1000 * (seed + 1))
        values = scattered([power(c) for c in configs], 0.02, seed + 5)
        for config, value in zip(configs, values, strict=True):
            found.observe(config, value)
        data = found.to_json()
        assert data["online"] == 30
        joint = Predictor.from_json({**data, "online": 0})
        for config in samples(5, 77):
            assert found.predict(config) == joint.predict(config)


def test_one_disturbed_measurement_does_not_move_the_profile(profiled):
    found = profiled.copy()
    configs = samples(6, 300)
    for number, config in enumerate(configs):
        found.observe(config, power(config) * (1.8 if number == 0 else 1.0))
        assert found.predict(SPACE.sample(9)).mean == pytest.approx(power(SPACE.sample(9)), rel=0.03)


def test_what_no_factor_explains_is_doubt(profiled):
    """Half of the structures draw 1.8 times as much for a reason that no feature tells."""
    found = profiled.copy()
    configs = samples(20, 400)
    for number, config in enumerate(configs):
        found.observe(config, power(config) * (1.8 if number % 2 else 1.0))
    config = SPACE.sample(11)
    # The logarithms scatter by log(1.8) / 2 = 0.29 around their mean.
    assert found.predict(config).doubt / found.predict(config).mean == pytest.approx(0.29, rel=0.25)
    assert profiled.predict(config).doubt / profiled.predict(config).mean < 0.02
