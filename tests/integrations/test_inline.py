"""The in-process executor: what a study needs of it."""

import random
import threading

import penstock as pk
from penstock.integrations._inline import Inline


def study(train, **options):
    options = {"scheduler": pk.Full(trials=4), "sampler": pk.Random(), **options}
    return pk.Study(train, {"x": pk.Float(0, 1)}, minimize="loss", executor=Inline(), store=False, **options)


def test_trials_run_here_one_after_another():
    seen = []

    def train(run):
        seen.append((run.trial, threading.current_thread().name))
        run.report(loss=run.config["x"])

    found = study(train).run()
    assert [trial for trial, _ in seen] == [0, 1, 2, 3]
    assert found.best.metrics["loss"] == min(record.config["x"] for record in found.trials)
    assert found.energy is not None


def test_rungs_go_on_from_checkpoints():
    entered = []

    def train(run):
        state = run.load() or []
        for epoch in run.epochs():
            entered.append((run.trial, epoch))
            state.append(epoch)
            run.save(state)
            run.report(loss=run.config["x"] + len(state))

    found = study(train, scheduler=pk.Halving(max_epochs=4, min_epochs=1, eta=2, trials=4)).run()
    assert len(entered) == len(set(entered)) == 1 * 4 + 1 * 2 + 2 * 1
    longest = max(found.trials, key=lambda record: record.epoch)
    assert longest.metrics["loss"] == longest.config["x"] + 4


def test_a_stopping_rule_is_heard_and_failures_are_kept():
    def train(run):
        if run.trial == 2:
            raise ValueError("two")
        for _ in run.epochs(10_000):
            run.report(loss=1.0 if run.trial else -1.0)

    found = study(train, stop=[pk.Plateau("loss", patience=3)]).run()
    assert found.trials[2].reason == "ValueError: two"
    assert all(record.epoch < 10_000 for record in found.trials)
    assert found.state.closed.reason == "finished"


def test_random_generators_are_left_as_they_were():
    random.seed(5)
    expected = [random.random() for _ in range(2)]
    random.seed(5)

    def train(run):
        run.report(loss=random.random())

    assert random.random() == expected[0]
    study(train).run()
    assert random.random() == expected[1]
