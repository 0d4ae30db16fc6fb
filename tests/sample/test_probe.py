"""Measuring before training: a network whose limits are in doubt is trained only if its readings keep them."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from penstock.goal import Quantity
from penstock.predict import Features, Predictor, Predictors
from penstock.sample import Bayes, Gate, Limited, Observation, Random, Walk, WarmStart
from penstock.sample._gate import PROBES, READINGS
from penstock.sample._readings import Readings
from penstock.space import Float, Int, Space

SPACE = Space(
    width=Int(1, 64, structural=True), depth=Int(1, 8, structural=True), lr=Float(1e-4, 1.0, log=True)
)
power_w = Quantity("power_w", "W")


def watts(config):
    return 20 + 0.5 * config["width"] + 3 * config["depth"] + 4 * math.sin(config["width"] / 3)


def profiled(scatter=0.02, seed=0):
    """A profile of few samples in a form that can't follow the device: it is in doubt by several per cent."""
    draw = random.Random(seed)
    configs = [SPACE.sample(1000 + 100 * seed + i) for i in range(30)]
    values = [watts(c) * (1 + scatter * draw.gauss(0, 1)) for c in configs]
    model = Predictor.fit("power_w", Features.of(SPACE), configs, values, folds=0, forms=("linear",))
    return Predictors({"power_w": model}, features=Features.of(SPACE))


class Sensor:
    """Reads what the device draws, with a scatter; remembers of what, and how often."""

    def __init__(self, scatter=0.0, seed=0):
        self.scatter, self.draw = scatter, random.Random(seed)
        self.read: dict[tuple[int, int], int] = {}

    def __call__(self, config, count):
        key = config["width"], config["depth"]
        self.read[key] = self.read.get(key, 0) + count
        return {"power_w": [watts(config) * (1 + self.scatter * self.draw.gauss(0, 1)) for _ in range(count)]}


def test_the_margin_of_a_mean_is_students():
    """Against scipy's one-sided interval of the same readings, in logarithms."""
    values = [41.0, 39.2, 40.4, 42.1, 38.9]
    readings = Readings()
    readings.add((1.0,), values[:2])
    readings.add((1.0,), values[2:])
    logs = np.log(values)
    upper = stats.t.interval(0.98, 4, loc=logs.mean(), scale=stats.sem(logs))[1]
    margin = stats.norm.ppf(0.99) * readings.error((1.0,)) * readings.widened(0.99)
    assert math.log(readings.mean((1.0,))) + margin == pytest.approx(upper)


def test_the_scatter_of_all_structures_is_pooled():
    """Against a one-way analysis of variance: the mean square within groups."""
    groups = [[40.0, 41.0, 39.5], [80.0, 78.0], [20.1, 20.3, 20.2, 19.6]]
    readings = Readings(0.002, 3)  # of a profile
    for i, values in enumerate(groups):
        readings.add((float(i),), values)
    within = sum(float(np.var(np.log(v)) * len(v)) for v in groups) + 0.002
    assert readings.scatter == pytest.approx(math.sqrt(within / (3 + 2 + 1 + 3)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 50), bound=st.floats(30.0, 60.0), at_most=st.booleans())
def test_with_an_exact_sensor_nothing_that_is_allowed_after_measuring_violates(seed, bound, at_most):
    """Whatever the predictors say; and what was measured to keep the limit is allowed, up to the limit itself."""
    gate = Gate(power_w <= bound if at_most else power_w >= bound, profiled(seed=seed % 3), confidence=0.999)
    sensor = Sensor()
    gate.measured_by(sensor)
    for i in range(60):
        config = SPACE.sample(seed * 1000 + i)
        gate.next_trial()
        sure = gate.check(config).allowed  # by the prediction, which may be wrong once in a thousand
        before = len(sensor.read)
        allowed = gate.settle(config)
        if len(sensor.read) > before:
            holds = watts(config) <= bound if at_most else watts(config) >= bound
            assert allowed == holds
        elif allowed:
            assert sure or (config["width"], config["depth"]) in sensor.read


def test_a_structure_at_the_limit_is_allowed_as_rarely_as_the_confidence_says():
    """It draws a hair more than the bound: by definition of the confidence, one of twenty may pass."""
    known, passed, asked = profiled(), 0, 0

    def looks(config):
        told = known.predict("power_w", config)
        return (watts(config) - told.mean) / told.doubt

    config = next(c for c in (SPACE.sample(i) for i in range(200)) if 0.5 < looks(c) < 1.2)
    for seed in range(300):
        gate = Gate(power_w <= watts(config) * (1 - 1e-9), known.copy(), confidence=0.95)
        gate.measured_by(Sensor(0.05, seed))
        passed += gate.settle(config)
        asked += gate.probes
    assert asked == 300
    assert 0 < passed <= stats.binom.ppf(0.9999, 300, 0.05)


@pytest.mark.parametrize("make", [Random, Walk, Bayes, lambda: WarmStart([], then=Bayes())])
def test_measurements_are_bounded_and_of_a_structure_only_once(make):
    sensor = Sensor(0.02)
    gate = Gate(power_w <= 40, profiled(), confidence=0.999)
    sampler = Limited(make(), gate)
    sampler.start(SPACE, objectives=1, seed=3)
    gate.measured_by(sensor)
    for trial in range(15):
        before = len(sensor.read)
        (config,) = sampler.ask(1)
        assert len(sensor.read) - before <= PROBES
        sampler.adopt(config, trial)
        sampler.tell(Observation(trial, config, (watts(config),)))
        assert watts(config) <= 40
    assert sensor.read, "nothing was in doubt: the test says nothing"
    assert max(sensor.read.values()) <= READINGS
    assert gate.probes == len(sensor.read)
    assert gate.readings == sum(sensor.read.values())


def test_a_search_that_may_measure_goes_nearer_to_the_limit():
    """The best is as wide as possible. With the prediction alone a margin of its doubt is left."""
    nearest = {}
    for measures in (False, True):
        gate = Gate(power_w <= 40, profiled(), confidence=0.999)
        sampler = Limited(Bayes(), gate)
        sampler.start(SPACE, objectives=1, seed=0)
        gate.measured_by(Sensor(0.01) if measures else None)
        found = []
        for trial in range(20):
            (config,) = sampler.ask(1)
            sampler.adopt(config, trial)
            sampler.tell(Observation(trial, config, (-watts(config),)))
            found.append(watts(config))
        assert max(found) <= 40
        nearest[measures] = max(found)
    assert nearest[True] > nearest[False]


def test_where_nothing_can_be_measured_it_is_as_without():
    """After three failures nobody asks again, and what runs is what the prediction alone allows."""
    calls = []

    def broken(config, count):
        calls.append(config)
        return {}

    gate = Gate(power_w <= 40, profiled(), confidence=0.999)
    sampler = Limited(Bayes(), gate)
    sampler.start(SPACE, objectives=1, seed=1)
    gate.measured_by(broken)
    for trial in range(8):
        (config,) = sampler.ask(1)
        assert gate.check(config).allowed
        sampler.adopt(config, trial)
        sampler.tell(Observation(trial, config, (-watts(config),)))
    assert len(calls) == 3


def test_a_limit_that_readings_say_nothing_of_is_not_measured_again_and_again():
    """Both quantities are in doubt, but the board knows one of them only."""
    known = profiled()
    heat = Predictor.fit(
        "heat",
        Features.of(SPACE),
        [SPACE.sample(1000 + i) for i in range(30)],
        [watts(SPACE.sample(1000 + i)) for i in range(30)],
        folds=0,
        forms=("linear",),
    )
    both = Predictors({"power_w": known["power_w"], "heat": heat}, features=Features.of(SPACE))
    gate = Gate([power_w <= 40, Quantity("heat") <= 40], both, confidence=0.999)
    sensor = Sensor(0.01)
    gate.measured_by(sensor)
    doubtful = next(
        c
        for c in (SPACE.sample(i) for i in range(500))
        if not gate.check(c).allowed and gate.within_reach([c])[0] <= 0
    )
    for _ in range(3):
        gate.next_trial()
        assert not gate.settle(doubtful)
    assert gate.probes == 1
    assert max(sensor.read.values()) <= READINGS


def test_readings_that_are_no_figures_count_as_none():
    gate = Gate(power_w <= 40, profiled(), confidence=0.999)
    gate.measured_by(lambda config, count: {"power_w": [math.nan, 0.0, -1.0, math.inf], "other": [1.0]})
    doubtful = next(
        c
        for c in (SPACE.sample(i) for i in range(500))
        if not gate.check(c).allowed and gate.within_reach([c])[0] <= 0
    )
    assert not gate.settle(doubtful)
    assert gate.readings == 0


def test_what_was_measured_counts_for_every_configuration_of_the_structure():
    sensor = Sensor()
    gate = Gate(power_w <= 40, profiled(), confidence=0.999)
    gate.measured_by(sensor)
    doubtful = next(
        c
        for c in (SPACE.sample(i) for i in range(500))
        if not gate.check(c).allowed and gate.within_reach([c])[0] <= 0 and watts(c) <= 40
    )
    assert gate.settle(doubtful)
    gate.measured_by(None)
    assert gate.settle({**doubtful, "lr": 0.5})
    assert gate.excess([{**doubtful, "lr": 0.25}])[0] <= 0
    assert len(sensor.read) == 1
