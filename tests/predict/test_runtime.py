from __future__ import annotations

import random
from statistics import median

import pytest

from penstock.core.errors import InvalidInput
from penstock.predict import EpochTimes


def test_nothing_is_known_at_first_then_the_median_then_the_trial_itself() -> None:
    times = EpochTimes()
    assert times.epoch_s(0, {"lr": 0.1}) is None
    for trial, seconds in enumerate((2.0, 3.0, 100.0)):
        times.observe(trial, {"lr": 0.1 * (trial + 1)}, seconds)
    assert times.epoch_s(9, {"lr": 0.1}) == 3.0
    times.observe(1, {"lr": 0.2}, 5.0)
    assert times.epoch_s(1, {"lr": 0.2}) == 4.0


def test_a_shared_or_wide_epoch_counts_as_alone_on_one_device() -> None:
    times = EpochTimes()
    times.observe(0, {}, 13.0, speed=1 / 1.3)  # two on a device
    times.observe(0, {}, 2.5, speed=4)  # on four devices
    assert times.epoch_s(0, {}) == pytest.approx(10.0)


def test_likeness_beats_the_median_where_configurations_decide() -> None:
    rng = random.Random(0)
    times = EpochTimes()

    def make() -> tuple[dict[str, object], float]:
        config = {
            "batch_size": rng.choice([16, 64, 256]),
            "lr": 10 ** rng.uniform(-5, 0),
            "net": rng.choice("ab"),
        }
        seconds = 640 / config["batch_size"] * (3 if config["net"] == "b" else 1)
        return config, seconds * rng.uniform(0.95, 1.05)

    seen = []
    for trial in range(60):
        config, seconds = make()
        times.observe(trial, config, seconds)
        seen.append(seconds)
    likeness, flat = [], []
    for trial in range(1000, 1050):
        config, seconds = make()
        guess = times.epoch_s(trial, config)
        assert guess is not None
        likeness.append(abs(guess - seconds) / seconds)
        flat.append(abs(median(seen) - seconds) / seconds)
    assert median(likeness) < 0.2
    assert sum(likeness) < 0.5 * sum(flat)


def test_the_error_says_how_sure_it_is() -> None:
    rng = random.Random(1)
    times = EpochTimes()
    assert times.error(0, {}) == 1.0
    for trial in range(30):
        size = rng.choice([1, 8])
        times.observe(trial, {"size": size}, size * rng.uniform(0.98, 1.02))
    assert times.error(0, {"size": 1}) <= 0.1  # it has run
    assert times.error(99, {"size": 8}) <= 0.1  # all like it take the same
    blind = EpochTimes()
    for trial in range(30):
        blind.observe(trial, {"lr": rng.random()}, rng.choice([1.0, 8.0]))
    assert blind.error(99, {"lr": 0.5}) > 0.5  # what decides is not in the configuration


def test_conditional_names_and_odd_values_are_compared() -> None:
    times = EpochTimes()
    for trial in range(10):
        config = {"kind": "deep", "layers": 4} if trial % 2 else {"kind": "flat"}
        times.observe(trial, config, 8.0 if trial % 2 else 1.0)
    deep, flat = times.epoch_s(99, {"kind": "deep", "layers": 4}), times.epoch_s(99, {"kind": "flat"})
    assert deep is not None
    assert flat is not None
    assert deep > 4 > 2 > flat


def test_wrong_times_are_named() -> None:
    with pytest.raises(InvalidInput, match="-1"):
        EpochTimes().observe(0, {}, -1.0)


def test_how_much_its_own_epochs_differ_is_how_sure_a_trial_is() -> None:
    rng = random.Random(3)
    even, uneven, new = EpochTimes(), EpochTimes(), EpochTimes()
    for _ in range(9):
        even.observe(0, {}, 2.0, speed=1.5)
        uneven.observe(0, {}, 3.0 * rng.gauss(1, 0.2))
    new.observe(0, {}, 3.0)
    assert new.error(0, {}) == pytest.approx(0.05)  # one epoch tells nothing of the others
    assert 0 < even.error(0, {}) <= 0.01
    assert 0.15 < uneven.error(0, {}) < 0.5
    # Over many epochs what is left evens out, but not what the mean so far is off.
    assert 0.05 < uneven.error(0, {}, 1000) < uneven.error(0, {}, 10) < uneven.error(0, {})


def test_the_error_covers_what_really_comes() -> None:
    """About as often as one standard deviation does, or oftener."""
    rng = random.Random(4)
    within = 0
    for _ in range(400):
        times = EpochTimes()
        for _ in range(4):
            times.observe(0, {}, rng.gauss(10, 1))
        guess_s = times.epoch_s(0, {})
        assert guess_s is not None
        true_s = sum(rng.gauss(10, 1) for _ in range(8)) / 8
        within += abs(true_s / guess_s - 1) <= times.error(0, {}, 8)
    assert within > 0.68 * 400
