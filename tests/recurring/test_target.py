"""Targets: which metrics fall, and what is refused."""

from __future__ import annotations

import math

import pytest

from penstock.core.errors import InvalidInput
from penstock.recurring import RecurringJob
from penstock.recurring._target import Target

FALLING = [
    "loss", "val_loss", "train/loss", "valid-loss", "validation loss", "logloss", "valLoss", "VAL_LOSS", "err",
    "top1_err", "error", "test.error", "testError", "error_rate", "wer", "dev_wer", "cer", "mse", "val_rmse", "mae",
    "nll", "ppl", "val_perplexity", "valMSE",
]  # fmt: skip
RISING = [
    "accuracy", "val_acc", "f1", "auc", "power", "answer", "bleu", "map", "saucer", "loss_reduction", "terror",
    "soccer", "spheremae", "reward",
]  # fmt: skip


@pytest.mark.parametrize("name", FALLING)
def test_losses_and_errors_are_to_fall(name):
    target = Target.parse((name, 0.5))
    assert target.comparison == "<="
    assert not target.reached({name: 0.9})
    assert target.reached({name: 0.5})


@pytest.mark.parametrize("name", RISING)
def test_other_metrics_are_to_rise(name):
    target = Target.parse((name, 0.5))
    assert target.comparison == ">="
    assert not target.reached({name: 0.4})
    assert target.reached({name: 0.5})


def test_a_comparison_that_is_given_wins():
    assert not Target.parse(("loss", ">=", 0.5)).reached({"loss": 0.1})
    assert Target.parse(("accuracy", "<=", 0.5)).reached({"accuracy": 0.1})
    assert not Target.parse(("accuracy", 0.5)).reached({"accuracy": math.nan})
    assert not Target.parse(("accuracy", 0.5)).reached({"loss": 1.0})


@pytest.mark.parametrize(
    "given",
    [
        ("loss", "<", 0.5),
        ("loss", "==", 0.5),
        ("loss", ["<="], 0.5),
        ("loss", math.nan),
        ("loss", "<=", math.inf),
        ("loss", "0.5"),
        ("", 0.5),
        "loss",
        5,
        None,
        {"loss": 0.5, "a": 1},
    ],
)
def test_what_is_no_target_is_refused_at_once(given):
    with pytest.raises(InvalidInput, match="target must be"):
        RecurringJob("j", batch_sizes=[8], target=given)


def test_a_run_trains_until_its_validation_loss_has_fallen():
    def train(run):
        for epoch in run.epochs():
            run.report(val_loss=2.0 / (epoch + 1))

    done = RecurringJob("j", train, batch_sizes=[8], target=("val_loss", 0.5), max_epochs=20).run()
    assert done.reached
    assert done.epochs == 4
    assert done.metrics["val_loss"] == 0.5
