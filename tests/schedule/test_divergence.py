"""Early termination of diverging trainings: none of the converging ones is stopped."""

import json
import math
import pickle
from pathlib import Path

import pytest
from sklearn.metrics import matthews_corrcoef

from penstock.core.errors import InvalidInput
from penstock.goal import Goal
from penstock.schedule import Divergence, MedianStop, Plateau, StopRule
from penstock.study._arguments import check_rules

CURVES = json.loads((Path(__file__).parent / "digits_curves.json").read_text())
"""Trainings of a small network on scikit-learn's digits with SGD at 28 learning rates from 1e-3 to 1e3, 12 epochs:
accuracy and training loss per epoch, as torch gave them ("nan" and "inf" as texts)."""


def run(rule, values, metric="accuracy", **more):
    """The epoch at which the rule stops a curve and why; None if it runs to its end."""
    rule.start()
    for epoch, value in enumerate(values, 1):
        metrics = {metric: value} | {name: curve[epoch - 1] for name, curve in more.items()}
        reason = rule.observe(0, epoch, metrics)
        if reason is not None:
            return epoch, reason
    return None


def test_it_is_a_stopping_rule():
    rule = Divergence("accuracy", "max", chance=0.1)
    assert isinstance(rule, StopRule)
    assert rule.to_json() == {
        "name": "Divergence",
        "metric": "accuracy",
        "mode": "max",
        "chance": 0.1,
        "epochs": 5,
        "margin": 0.02,
        "explode": 10.0,
        "loss": None,
    }


def test_recorded_trainings_are_told_apart():
    """By their end: all that learn run on, all that stay at chance or blow up are stopped early."""
    learned = stopped = 0
    for curve in CURVES:
        accuracy = [float(value) for value in curve["accuracy"]]
        loss = [float(value) for value in curve["loss"]]
        rule = Divergence("accuracy", "max", chance=0.1, epochs=5, margin=0.2, loss="loss")
        end = run(rule, accuracy, loss=loss)
        if accuracy[-1] > 0.3:
            learned += 1
            assert end is None, (curve["lr"], accuracy, end)
        elif not math.isfinite(loss[-1]) or max(accuracy) < 0.12:
            stopped += 1
            assert end is not None, (curve["lr"], accuracy)
            assert end[0] <= 8  # of 12
    assert learned >= 10  # the record holds enough of both
    assert stopped >= 4


def test_no_recorded_training_that_learns_is_stopped_without_knowing_chance():
    for curve in CURVES:
        accuracy = [float(value) for value in curve["accuracy"]]
        loss = [float(value) for value in curve["loss"]]
        if accuracy[-1] > 0.3:
            assert run(Divergence("loss"), loss, metric="loss") is None, curve["lr"]


def test_the_papers_case_ten_classes_at_ninety_per_cent_error():
    # HyperPower Figure 3, right: networks that diverge stay at 10% accuracy and are known after a few epochs.
    stuck = [90.0, 90.2, 89.9, 90.1, 89.8, 90.0, 90.0]
    slow = [90.0, 89.9, 89.0, 86.0, 80.0, 70.0, 60.0]
    rule = Divergence("error", chance=90)
    assert run(rule, stuck, metric="error") == (5, "best error 89.8 is no better than chance after 5 epochs")
    assert run(rule, slow, metric="error") is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_stops_at_once(bad):
    assert run(Divergence("loss"), [2.3, bad], metric="loss")[0] == 2
    assert run(Divergence("accuracy", "max", loss="loss"), [0.4, 0.5], loss=[1.0, bad])[0] == 2


def test_an_explosion_needs_two_reports():
    assert run(Divergence("loss"), [2.3, 1.9, 400.0, 1.8, 1.7], metric="loss") is None
    end = run(Divergence("loss"), [2.3, 1.9, 400.0, 500.0], metric="loss")
    assert end is not None
    assert end[0] == 4
    assert "2.3" in end[1]


def test_a_first_value_of_zero_is_no_measure_of_an_explosion():
    truth = [0, 1] * 50
    guesses = [[0] * 100, [1, 0] * 2 + [0] * 96, [1, 0] + [0] * 98, [0] * 50 + truth[50:], truth]
    curve = [matthews_corrcoef(truth, guess) for guess in guesses]
    assert (
        curve[0] == 0.0 > max(curve[1:3])
    )  # one class alone; then a little worse than that, before it learns
    assert curve[-1] == 1.0
    assert run(Divergence("mcc", "max"), curve, "mcc") is None
    policy_loss = [0.0, 1e-3, 2e-3, -1e-3, 1e-3]  # a policy gradient's is 0 at first, whatever it learns
    rule = Divergence("accuracy", "max", loss="loss")
    assert run(rule, [0.1, 0.3, 0.5, 0.7, 0.8], loss=policy_loss) is None


def test_coming_down_after_a_jump_is_given_time():
    jump = [0.7, *(1.9 * 0.97**e for e in range(60))]
    assert run(Divergence("loss"), jump, metric="loss") is None
    assert run(Divergence("loss"), [0.7, *([1.9] * 60)], metric="loss")[0] <= 13


def test_trials_are_apart_and_start_forgets():
    rule = Divergence("loss", epochs=3, margin=0.01)
    rule.start()
    for epoch, (good, bad) in enumerate([(2.0, 2.0), (1.5, 2.0), (1.2, 2.0)], 1):
        assert rule.observe(0, epoch, {"loss": good}) is None
        reason = rule.observe(1, epoch, {"loss": bad})
    assert reason is not None
    rule.start()
    assert rule.observe(1, 4, {"loss": 2.0}) is None


def test_known_epochs_and_reports_without_the_metric_change_nothing():
    rule = Divergence("loss", epochs=3)
    rule.start()
    assert rule.observe(0, 1, {"loss": 2.0}) is None
    assert rule.observe(0, 1, {"loss": math.nan}) is None  # a retry's second report
    assert rule.observe(0, 2, {"accuracy": 0.1}) is None


def test_arguments_are_checked():
    for bad in (
        {"mode": "up"},
        {"loss": 3},
        {"epochs": 0},
        {"margin": -1},
        {"explode": 0.5},
        {"chance": math.nan},
    ):
        with pytest.raises(InvalidInput):
            Divergence("loss", **bad)


RISING = [0.2 + 0.05 * epoch for epoch in range(15)]


@pytest.mark.parametrize("rule", [Divergence("accuracy", chance=0.1), Plateau("accuracy", patience=3)])
def test_a_rule_takes_the_direction_of_the_study(rule):
    """Accuracy that rises is learning where it is maximised; where it is to fall, it is none."""
    (turned,) = check_rules(rule, Goal.of(None, "accuracy"))
    assert run(turned, RISING) is None
    assert turned.to_json()["mode"] == "max"
    (kept,) = check_rules([rule], Goal.of("accuracy", None))
    assert run(kept, RISING) is not None
    (other,) = check_rules([rule], Goal.of("loss", None))
    assert run(other, RISING) is not None  # no objective: lower is better, as before
    assert rule.mode is None  # the caller's own object stays as it was


def test_the_median_rule_takes_the_direction_of_the_study_too():
    (rule,) = check_rules(MedianStop("accuracy", min_trials=2), Goal.of(None, "accuracy"))
    rule.start()
    for trial, value in enumerate([0.5, 0.6]):
        assert rule.observe(trial, 1, {"accuracy": value}) is None
    assert rule.observe(2, 1, {"accuracy": 0.9}) is None
    assert rule.observe(3, 1, {"accuracy": 0.1}) is not None


@pytest.mark.parametrize("kind", [Divergence, Plateau, MedianStop])
def test_a_rule_against_the_study_is_refused(kind):
    with pytest.raises(InvalidInput, match=r'mode="min".*maximises it.*mode="max"'):
        check_rules(kind("accuracy", "min"), Goal.of(None, "accuracy"))
    with pytest.raises(InvalidInput, match=r'mode="max".*minimises it.*mode="min"'):
        check_rules(kind("loss", "max"), Goal.of("loss", None))
    (same,) = check_rules(kind("accuracy", "max"), Goal.of("loss", "accuracy"))
    assert same.mode == "max"


def test_a_rule_of_an_older_store_goes_on_as_it_began():
    """There the default was "min", and what it decided is in the journal."""
    rule = Divergence("accuracy", "min", chance=0.1)
    for name in ("_aims", "_heard"):
        del rule.__dict__[name]
    (old,) = check_rules(pickle.loads(pickle.dumps(rule)), Goal.of(None, "accuracy"))
    assert old.mode == "min"
    assert old.unheard == "accuracy"


@pytest.mark.parametrize("kind", [Divergence, Plateau, MedianStop])
@pytest.mark.parametrize("metric", [3, None, "", ["loss"]])
def test_a_metric_is_a_name(kind, metric):
    with pytest.raises(InvalidInput, match="watches a metric"):
        kind(metric)


def test_a_rule_tells_that_it_has_never_heard_its_metric():
    for rule in (Divergence("los"), Plateau("los"), MedianStop("los")):
        rule.start()
        rule.observe(0, 1, {"loss": 1.0})
        assert rule.unheard == "los"
        rule.observe(0, 2, {"los": 1.0})
        assert rule.unheard is None
        rule.start()
        assert rule.unheard == "los"
