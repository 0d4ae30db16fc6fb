"""Stopping rules against hand-made curves and the median of the statistics module."""

from __future__ import annotations

import json
import math
from statistics import median

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.schedule import MedianStop, Plateau, StopRule


def stopped_at(rule: StopRule, curve: list[float], metric: str = "loss", trial: int = 0) -> int | None:
    for epoch, value in enumerate(curve, start=1):
        if rule.observe(trial, epoch, {metric: value}) is not None:
            return epoch
    return None


@pytest.mark.parametrize(
    ("curve", "patience", "min_delta", "epoch"),
    [
        ([5, 4, 3, 2, 1, 0], 2, 0.0, None),
        ([5, 4, 4, 4, 4], 2, 0.0, 4),  # best at 2: two epochs without improvement are over at 4
        ([5, 4, 4.5, 3.9, 3.9, 3.9], 2, 0.0, 6),
        ([5, 5, 5], 1, 0.0, 2),
        ([5, 4.95, 4.9, 4.85, 4.8], 3, 0.1, None),  # 4.85 is more than 0.1 under 5
        ([5, 4.95, 4.92, 4.91, 4.9], 3, 0.1, 4),
        # What never is a number does not improve either; the first that is does.
        ([math.inf, math.inf, math.inf], 2, 0.0, 3),
        ([5, 4, math.nan, math.nan, math.nan], 2, 0.0, 4),
        ([math.nan, math.inf, 3, 2, math.nan, math.inf], 2, 0.0, 6),
    ],
)
def test_plateau(curve: list[float], patience: int, min_delta: float, epoch: int | None) -> None:
    assert stopped_at(Plateau("loss", "min", patience, min_delta), curve) == epoch
    mirrored = [-value for value in curve]
    assert stopped_at(Plateau("accuracy", "max", patience, min_delta), mirrored, "accuracy") == epoch


def test_plateau_says_why_and_starts_afresh() -> None:
    rule = Plateau("accuracy", "max", 1)
    rule.observe(3, 1, {"accuracy": 0.75})
    assert rule.observe(3, 2, {"accuracy": 0.5}) == "accuracy has not improved on 0.75 since epoch 1"
    rule.start()
    assert rule.observe(3, 2, {"accuracy": 0.5}) is None


def test_other_metrics_and_repeated_epochs_change_nothing() -> None:
    rule = Plateau("loss", patience=2)
    for epoch, value in ((1, 3.0), (2, 4.0)):
        rule.observe(0, epoch, {"loss": value})
    assert rule.observe(0, 3, {"other": 1.0}) is None
    assert rule.observe(0, 2, {"loss": 0.0}) is None  # a retry
    assert rule.observe(0, 3, {"loss": 3.5}) is not None


def test_trials_do_not_share_a_plateau() -> None:
    rule = Plateau("loss", patience=2)
    for epoch in (1, 2):
        assert rule.observe(0, epoch, {"loss": 1.0}) is None
        assert rule.observe(1, epoch, {"loss": 9.0 - epoch}) is None
    assert rule.observe(0, 3, {"loss": 1.0}) is not None
    assert rule.observe(1, 3, {"loss": 6.0}) is None


def test_median_by_hand() -> None:
    """Averages at epoch 2 are 2, 4 and 6: a best of 5 is worse than the median 4, one of 4 is not."""
    rule = MedianStop("loss", min_epochs=2, min_trials=3)
    for trial, curve in enumerate(([3, 1], [5, 3], [7, 5])):
        assert stopped_at(rule, [float(v) for v in curve], trial=trial) is None
    assert stopped_at(rule, [9.0, 4.0], trial=3) is None
    assert stopped_at(rule, [9.0, 9.0], trial=4) == 2


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of Optuna's own
@pytest.mark.parametrize("mode", ["min", "max"])
def test_median_stops_what_is_not_a_number_as_optuna_does(mode: str) -> None:
    """And judges a trial that was one before by its best: 2 is better than all, 9 is worse."""
    sign = 1.0 if mode == "min" else -1.0
    study = optuna.create_study(
        direction=f"{mode}imize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=0)
    )
    rule = MedianStop("loss", mode, min_trials=3)
    for trial in range(3):
        curve = dict.fromkeys((1, 2), sign * (trial + 3.0))
        study.add_trial(optuna.create_trial(value=curve[2], intermediate_values=curve))
        assert stopped_at(rule, list(curve.values()), trial=trial) is None
    for trial, told in enumerate(([math.nan, math.nan], [sign * 2.0, math.nan], [sign * 9.0, math.nan]), 3):
        asked = study.ask()
        for epoch, value in enumerate(told, 1):
            asked.report(value, epoch)
            assert (rule.observe(trial, epoch, {"loss": value}) is not None) == asked.should_prune()


@settings(deadline=None)  # timings are never asserted
@given(
    curves=st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=2, max_size=12),
    least=st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_median_against_the_definition(curves: list[list[int]], least: int, mode: str) -> None:
    """Epoch by epoch, trial by trial: all earlier reports of the epoch count."""
    rule = MedianStop("m", mode, min_trials=least)
    sign = 1 if mode == "min" else -1
    for epoch in range(1, 5):
        for trial, curve in enumerate(curves):
            got = rule.observe(trial, epoch, {"m": float(curve[epoch - 1])})
            averages = [sign * sum(other[:epoch]) / epoch for other in curves[:trial]]
            best = min(sign * value for value in curve[:epoch])
            expected = len(averages) >= least and best > median(averages)
            assert (got is not None) == expected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Plateau("loss", "down"), "down"),
        (lambda: Plateau("loss", patience=0), "patience is 0"),
        (lambda: Plateau("loss", min_delta=-1), "min_delta is -1"),
        (lambda: MedianStop("loss", min_trials=0), "min_trials is 0"),
        (lambda: MedianStop("loss", min_epochs=1.5), "min_epochs is 1.5"),
    ],
)
def test_arguments_are_checked(make: object, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make()  # type: ignore[operator]


def test_parameters_are_json() -> None:
    for rule in (Plateau("loss"), MedianStop("loss", "max")):
        assert json.loads(json.dumps(rule.to_json())) == rule.to_json()
        assert rule.to_json()["name"] == type(rule).__name__
