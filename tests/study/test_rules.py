"""Stopping rules and transfers in a study: by its own goal."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.report import View

SPACE = pk.Space(lr=pk.Float(1e-3, 0.5, log=True))


def rises(run):
    for epoch in run.epochs():
        run.report(accuracy=min(0.9, 0.2 + 0.05 * epoch + 0.01 * run.config["lr"]))


def study(work=rises, **options):
    options = {
        "sampler": pk.Random(),
        "scheduler": pk.Full(trials=3, epochs=20),
        "maximize": "accuracy",
    } | options
    return pk.Study(work, SPACE, executor=pk.Simulated(devices=2), store=False, **options)


class Heard(View):
    def __init__(self):
        self.said = []

    def open(self, name, goal, state, slots):
        pass

    def on(self, event, state):
        pass

    def tick(self, state, expected, busy):
        pass

    def close(self):
        pass

    def say(self, text):
        self.said.append(text)


def test_a_rule_without_a_mode_stops_no_training_that_the_study_wants():
    done = study(stop=[pk.Divergence("accuracy", chance=0.1)]).run()
    assert [(t.status, t.epoch) for t in done.trials] == [(pk.TrialStatus.COMPLETED, 20)] * 3
    with pytest.raises(InvalidInput, match="maximises it"):
        study(stop=pk.Divergence("accuracy", "min"))


def test_a_metric_that_nobody_reports_is_told_once():
    view = Heard()
    study(stop=[pk.Divergence("los"), pk.Plateau("accuracy")]).run(view=view)
    assert [text for text in view.said if "los" in text] == [
        "Divergence watches los, which no trial has reported, so it has stopped none: they report accuracy."
    ]


def test_trials_are_transferred_by_the_goal_of_the_new_study():
    earlier = study(scheduler=pk.Full(trials=20, epochs=2)).run()
    by_study = study(sampler=pk.Bayes(transfer=earlier)).run()
    by_trials = study(sampler=pk.Bayes(transfer=earlier.trials)).run()
    assert [t.config for t in by_trials.trials] == [t.config for t in by_study.trials]
