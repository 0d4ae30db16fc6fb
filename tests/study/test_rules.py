"""Stopping rules and transfers in a study: by its own goal."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.report import View
from penstock.store import open_store

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


def uneven(run):
    for epoch in run.epochs():
        run.save({})
        run.report(accuracy=run.config["lr"] if epoch < 2 else 0.9)


@pytest.mark.parametrize("epochs", [1, 2], ids=["on the way", "at the end of the rung"])
def test_who_was_to_stop_when_the_driver_was_killed_stops(epochs, tmp_path):
    """Killed between a report and the end it led to."""
    path = tmp_path / "s.db"
    rates = [0.5, 0.4, 0.3, 0.2, 0.1, 0.05]  # from the third on, all are below the median of those before

    def made(store):
        return pk.Study(
            uneven, SPACE, maximize="accuracy", scheduler=pk.Halving(max_epochs=4, min_epochs=2, eta=2, trials=6),
            sampler=pk.Random(), stop=pk.MedianStop("accuracy", min_epochs=epochs, min_trials=2), store=store,
            executor=pk.Simulated(devices=1), name="s", meter=False, warm_start=[{"lr": rate} for rate in rates],
        )  # fmt: skip

    def outcome(found):
        return [(t.id, t.status, t.reason) for t in found.trials]

    whole = made(path).run()
    told = [t.id for t in whole.trials if "median" in t.reason]
    assert told == [2, 3, 4, 5]
    store = open_store(path, write=True)
    entry = store.find("s")
    events = [event for _, event in store.read(entry.id)]
    last = max(i for i, e in enumerate(events) if e.kind == "reported" and e.trial in told)
    store.lock(entry.id)
    store.cut(entry.id, keep=last + 1)
    store.close()
    assert outcome(pk.Study.load(path).run()) == outcome(whole)
