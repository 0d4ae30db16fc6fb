"""Studies that tune a narrow twin and end with the full model trained."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core import Noted, Reported, Submitted, Trial, TrialStatus
from penstock.core.errors import InvalidInput, Unsupported
from penstock.goal import Objective
from penstock.report._static import write_report
from penstock.schedule import Outcome, Rules
from penstock.store import open_store
from penstock.study._fusing import Fuser
from penstock.study._transfer import TOPIC, Held, Transfer, held_values, inspect_twin

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 12, generator=GENERATOR)
Y = (X @ torch.randn(12, 5, generator=GENERATOR)).argmax(1)
SPACE = pk.Space(
    lr=pk.Float(1e-3, 0.5, log=True), weight_decay=pk.Float(1e-6, 1e-2, log=True, transfers=False)
)


def make(config):
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def forward(model, inputs):
    output = model(inputs)
    output.hidden = model[2].out_features
    return output


def hidden(output, targets):
    return float(output.hidden)  # the validation data is one batch, so that this is the model's own output


def a_task(**options):
    options.setdefault("epochs", 3)
    data = pk.Data((X[:64], Y[:64]), (X[64:], Y[64:]))
    options.setdefault("metrics", {"hidden": hidden})
    return pk.Task(make, data, F.cross_entropy, forward=forward, batch_size=32, **options)


def seconds(config, epoch, placement):
    return 8.0 if placement.segments[0].options.get("model") == "target" else 1.0


def a_study(**options):
    options.setdefault("minimize", "loss")
    options.setdefault("sampler", pk.Random())
    options.setdefault("scheduler", pk.Full(trials=8))
    options.setdefault("executor", pk.Simulated(devices=2, seconds=seconds))
    options.setdefault("store", False)
    options.setdefault("surrogate", pk.Shrink(8))
    return pk.Study(options.pop("task", None) or a_task(), options.pop("space", SPACE), **options)


@pytest.fixture(scope="module")
def done():
    return a_study().run()


def test_the_result_is_the_full_model_with_both_histories(done):
    assert {t.metrics["hidden"] for t in done.surrogate_trials} == {8}
    assert {t.metrics["hidden"] for t in done.target_trials} == {64}
    assert len(done.surrogate_trials) == 8
    assert done.best in done.target_trials
    assert done.best.epoch == 3
    best = min(done.surrogate_trials, key=lambda t: t.metrics["loss"])
    assert {t.parent for t in done.target_trials if t.status is TrialStatus.COMPLETED} >= {best.id}
    assert done.best.config["lr"] == best.config["lr"]


def test_what_does_not_transfer_is_held_then_tuned_on_the_full_model(done):
    assert {t.config["weight_decay"] for t in done.surrogate_trials} == {1e-6}
    best = min(done.surrogate_trials, key=lambda t: t.metrics["loss"])
    tuned = [t for t in done.target_trials if t.parent == best.id]
    assert len(tuned) == 1 + pk.Shrink(8).second
    assert len({t.config["weight_decay"] for t in tuned}) == len(tuned)
    assert {t.config["lr"] for t in tuned} == {best.config["lr"]}


def test_the_held_value_is_the_users_where_there_is_one():
    shrink = pk.Shrink(8, held={"weight_decay": 1e-3}, second=0)
    found = a_study(surrogate=shrink, scheduler=pk.Full(trials=2)).run()
    assert {t.config["weight_decay"] for t in found.trials} == {1e-3}
    found = a_study(
        task=a_task(defaults={"weight_decay": 1e-4}),
        scheduler=pk.Full(trials=2),
        surrogate=pk.Shrink(8, second=0),
    ).run()
    assert {t.config["weight_decay"] for t in found.trials} == {1e-4}
    with pytest.raises(InvalidInput, match="holds 'lr'"):
        a_study(surrogate=pk.Shrink(8, held={"lr": 0.1}))
    with pytest.raises(InvalidInput, match=r"holds weight_decay=7"):
        a_study(surrogate=pk.Shrink(8, held={"weight_decay": 7}))


def test_the_best_so_far_starts_eagerly_on_an_idle_device():
    # Odd numbers on 2 devices: one idles while the last surrogate runs.
    space = pk.Space(lr=pk.Float(1e-3, 0.5, log=True))
    eager = a_study(scheduler=pk.Full(trials=7), space=space).run()
    first = eager.target_trials[0]
    last = max(t.ended_s for t in eager.surrogate_trials)
    assert first.started_s < last
    patient = a_study(scheduler=pk.Full(trials=7), space=space, surrogate=pk.Shrink(8, eager=1)).run()
    assert patient.target_trials[0].started_s >= max(t.ended_s for t in patient.surrogate_trials)
    assert len(patient.target_trials) == 1
    assert eager.state.spent_s <= patient.state.spent_s


@pytest.mark.parametrize("scheduler", [pk.ASHA(max_epochs=4, trials=9), pk.Hyperband(max_epochs=4)])
def test_multi_fidelity_schedulers_end_with_the_full_model(scheduler):
    found = a_study(scheduler=scheduler, sampler=pk.TPE()).run()
    assert found.best.metrics["hidden"] == 64
    assert found.best.epoch == 4
    furthest = [t for t in found.surrogate_trials if t.epoch == 4]
    best = min(furthest, key=lambda t: t.metrics["loss"])
    assert best.id in {t.parent for t in found.target_trials}
    found.state.validate()


def test_a_deadline_leaves_a_trained_model():
    # 8 s per target epoch, 24 in all; nothing else bounds the search.
    found = a_study(scheduler=pk.Full(), budget=pk.Budget(time_s=80)).run()
    assert found.best.metrics["hidden"] == 64
    assert found.best.status is TrialStatus.COMPLETED
    assert found.state.spent_s <= 80
    assert len(found.surrogate_trials) > 10


def test_workers_that_measure_fusion_know_when_tuning_ends(monkeypatch):
    told = []
    original = Fuser.facts

    def facts(self, placement, left_s=None):
        told.append((placement.segments[0].options.get("model"), left_s))
        return original(self, placement, left_s)

    monkeypatch.setattr(Fuser, "facts", facts)
    found = a_study(scheduler=pk.Full(), budget=pk.Budget(time_s=80), fuse=4).run()
    assert found.best.metrics["hidden"] == 64
    left = [left_s for model, left_s in told if model is None]
    assert left[0] == 40  # half of the deadline, while nobody knows that the target takes 24 s
    assert all(left_s <= 80 - 1.3 * 24 - 1 for left_s in left)
    assert left[-1] < left[0]
    told.clear()
    a_study(scheduler=pk.Full(trials=4), fuse=4).run()
    assert {left_s for _, left_s in told} == {None}


def test_a_study_goes_on_where_it_was_left(tmp_path):
    whole = a_study(store=tmp_path / "whole.db", seed=5).run()
    for epochs in (7, 26, 33):  # while surrogates train, near their end, while targets train
        path = tmp_path / f"{epochs}.db"
        a_study(store=path, seed=5, budget=pk.Budget(epochs=epochs)).run()
        again = pk.Study.load(path, budget=pk.Budget(epochs=1000)).run()
        assert again.surrogate == pk.Shrink(8)
        assert again.best.metrics["hidden"] == 64
        assert {t.config["lr"] for t in again.target_trials} >= {whole.best.config["lr"]}
        assert all(t.status.is_end for t in again.trials)
        again.state.validate()


def test_more_trials_are_of_the_twin_and_a_better_one_is_trained_on_the_full_model(tmp_path):
    """As in a study that was allowed them at once, whose best is another one than of the first three."""
    options = {"scheduler": pk.Full(), "seed": 1}
    plain = a_study(budget=pk.Budget(trials=40), **options).run()
    twins = plain.surrogate_trials
    losses = [t.metrics["loss"] for t in twins]
    first = next(n for n in range(2, 20) if min(losses[:n]) > min(losses))
    path = tmp_path / "s.db"
    few = a_study(budget=pk.Budget(trials=first), store=path, **options).run()
    assert len(few.surrogate_trials) == first
    more = pk.Study.load(path, budget=pk.Budget(trials=40 + len(few.target_trials))).run()
    more.state.validate()
    best = min(more.surrogate_trials, key=lambda t: t.metrics["loss"])
    assert best.config == min(twins, key=lambda t: t.metrics["loss"]).config
    assert more.best.config["lr"] == best.config["lr"] != few.best.config["lr"]
    assert more.best in more.target_trials
    tuned = [t for t in more.target_trials if t.parent == best.id]
    assert len(tuned) == 1 + pk.Shrink(8).second
    assert all(t.overtaken == (t.parent != best.id) for t in more.target_trials)
    again = pk.Study.load(path, budget=pk.Budget(trials=40 + len(few.target_trials))).run()
    assert len(again.trials) == len(more.trials)


def test_a_model_that_was_due_by_a_deadline_gets_no_more_trials(tmp_path, capsys):
    path = tmp_path / "s.db"
    done = a_study(scheduler=pk.Full(), budget=pk.Budget(time_s=80, trials=4), store=path).run()
    more = pk.Study.load(path, budget=pk.Budget(time_s=800, trials=50)).run()
    assert len(more.trials) == len(done.trials)
    assert "was to be trained within 80 s" in capsys.readouterr().err


def test_the_journal_tells_surrogates_and_targets_apart(tmp_path):
    a_study(store=tmp_path / "s.db").run()
    store = open_store(tmp_path / "s.db", write=False)
    groups = [event for _, event in store.read(store.find().id) if isinstance(event, Submitted)]
    store.close()
    options = {event.label: {s.options.get("model") for s in event.segments} for event in groups}
    assert options["full"] == {None}
    assert options["second stage"] == {"target"}
    assert any(label.startswith("transfer of trial") for label in options)


# ---------------------------------------------------------------- the scheduler by itself


def started(shrink=None, trials=4, space=None, config=lambda i: {"lr": 0.1 * i}, **options):
    made: list[Trial] = []

    def propose(n):
        new = [Trial(len(made) + i, config(len(made) + i), 0) for i in range(n)]
        made.extend(new)
        return new

    def derive(config, parent):
        made.append(Trial(len(made), config, len(made), parent))
        return made[-1]

    transfer = Transfer(pk.Full(trials=trials, epochs=2), shrink or pk.Shrink(8), epochs=2, **options)
    order = lambda values: sorted(range(len(values)), key=values.__getitem__)  # noqa: E731
    transfer.start(Rules(propose, order, space or pk.Space(lr=pk.Float(0, 1)), False, 0, derive))
    return transfer


def end(transfer, trial, loss, status=TrialStatus.COMPLETED):
    transfer.ended(Outcome(trial, status, 2, None if loss is None else (loss,)))


def test_a_better_configuration_replaces_a_target_that_has_just_begun():
    transfer = started()
    assert len(transfer.next(4).segments) == 4
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    (segment,) = transfer.next(1).segments
    assert (segment.trial.parent, segment.options) == (1, {"model": "target"})
    assert transfer.stops() == []
    end(transfer, 2, 0.3)  # better, and nothing is idle
    assert transfer.stops() == [(4, "replaced by the configuration of trial 2, which is better")]
    end(transfer, 4, 0.6, TrialStatus.STOPPED)
    assert transfer.urgent
    (segment,) = transfer.next(1).segments
    assert segment.trial.parent == 2
    assert not transfer.urgent


def test_a_target_half_trained_is_not_replaced_but_joined():
    transfer = started()
    transfer.next(4)
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    transfer.next(1)
    transfer.heard(Reported(0.0, 4, 1, {"loss": 1.0}))
    end(transfer, 2, 0.3)
    assert transfer.stops() == []
    assert transfer.next(1).segments[0].trial.parent == 2
    end(transfer, 3, 0.8)
    assert transfer.next(1) is None
    assert transfer.done


def test_a_target_that_fails_makes_room_for_the_second_best():
    transfer = started(trials=2)
    transfer.next(2)
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    assert transfer.next(1).segments[0].trial.parent == 1
    end(transfer, 2, None, TrialStatus.FAILED)
    assert not transfer.done
    assert transfer.next(1).segments[0].trial.parent == 0


def test_who_was_replaced_in_vain_is_transferred_once_more():
    transfer = started(trials=4)
    transfer.next(4)
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    assert transfer.next(1).segments[0].trial.parent == 1
    end(transfer, 2, 0.3)
    assert [trial for trial, _ in transfer.stops()] == [4]
    end(transfer, 4, 0.6, TrialStatus.STOPPED)
    assert transfer.next(1).segments[0].trial.parent == 2
    end(transfer, 3, 0.8)
    assert transfer.chosen == [2]
    end(transfer, 5, None, TrialStatus.FAILED)  # and nothing is trained
    assert transfer.chosen == [1]
    assert not transfer.done
    assert transfer.next(1).segments[0].trial.parent == 1
    end(transfer, 6, None, TrialStatus.STOPPED)  # by a rule, say: that is that
    assert transfer.next(1) is None
    assert transfer.done


def test_who_was_replaced_and_is_wanted_in_the_end_is_trained_again_as_it_was():
    transfer = started(pk.Shrink(8, targets=2), trials=4)
    transfer.next(4)
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    (first,) = transfer.next(1).segments
    end(transfer, 2, 0.3)
    end(transfer, first.trial.id, 0.6, TrialStatus.STOPPED)
    assert transfer.next(1).segments[0].trial.parent == 2
    assert transfer.next(1) is None  # not before tuning is over
    end(transfer, 3, 0.8)
    (again,) = transfer.next(1).segments
    assert (again.trial.parent, again.trial.config) == (1, first.trial.config)
    assert again.trial.seed == first.trial.seed != 0
    assert transfer.next(1) is None


@pytest.mark.parametrize("prefer", [None, 0])
def test_among_equals_the_first_proposed_is_transferred_whoever_ended_first(prefer):
    for order in itertools.permutations(range(3)):
        transfer = started(trials=3, prefer=prefer)
        transfer.next(3)
        assert transfer.chosen is None
        for trial in order:
            # The second best objective is what the twin drew, which must not count.
            values = (0.5,) if prefer is None else (0.5, float(order.index(trial)))
            transfer.ended(Outcome(trial, TrialStatus.COMPLETED, 2, values))
        assert transfer.chosen == [0]


def opposite(output, targets):
    """What is best for the twin is worst for the model: whatever is trained besides its best comes out better."""
    loss = float(F.cross_entropy(output, targets))
    return loss if output.hidden < 64 else -loss


@pytest.mark.parametrize("targets", [1, 2])
def test_the_result_does_not_depend_on_how_long_things_take(targets):
    """Whichever models are trained early: the best in the end is made of what was best on the twin."""
    results, besides = [], set()
    # The better, the slower, and the other way round; the model 8 times as slow as its twin, or hardly.
    for power, longer in itertools.product((-1, 0, 1), (1.1, 8.0)):
        found = a_study(
            seed=2,
            task=a_task(metrics={"hidden": hidden, "opposite": opposite}),
            minimize="opposite",
            scheduler=pk.Full(trials=9, epochs=3),
            surrogate=pk.Shrink(8, second=1, targets=targets, eager=0.2),
            executor=pk.Simulated(
                3, seconds=partial(lambda p, config, epoch: config["lr"] ** p, power), target=longer
            ),
        ).run()
        twins = sorted(found.surrogate_trials, key=lambda trial: trial.metrics["opposite"])
        assert found.state.chosen == tuple(trial.id for trial in twins[:targets])
        whole = [t for t in found.target_trials if t.status is TrialStatus.COMPLETED]
        made = [t for t in whole if t.parent in found.state.chosen]
        assert {t.parent for t in made} == set(found.state.chosen)
        assert found.best.metrics["opposite"] == min(t.metrics["opposite"] for t in made)
        others = [t for t in found.target_trials if t.parent not in found.state.chosen]
        assert [t for t in found.target_trials if t.overtaken] == others
        results.append((found.best.config, found.best.seed, [dict(r.metrics) for r in found.best.reports]))
        better = min((t.metrics["opposite"] for t in others if t in whole), default=0.0)
        is_better = better < found.best.metrics["opposite"]
        assert ("besides" in str(found)) is is_better
        besides.add(is_better)
    if targets == 1:
        assert besides == {False, True}  # what else is trained does depend on it
    assert all(result == results[0] for result in results)


def test_the_two_best_are_trained_on_the_full_model_and_the_better_counts():
    found = a_study(surrogate=pk.Shrink(8, targets=2, second=0), seed=3).run()
    twins = sorted(found.surrogate_trials, key=lambda trial: trial.metrics["loss"])
    late = [t for t in found.target_trials if t.status is TrialStatus.COMPLETED]
    assert {t.parent for t in late} >= {twins[0].id, twins[1].id}
    assert found.best.metrics["loss"] == min(t.metrics["loss"] for t in late)


def test_the_next_best_waits_until_tuning_is_over():
    transfer = started(pk.Shrink(8, targets=2))
    transfer.next(4)
    end(transfer, 0, 0.9), end(transfer, 1, 0.5)
    assert transfer.next(1).segments[0].trial.parent == 1
    assert transfer.next(1) is None
    end(transfer, 2, 0.7)
    assert transfer.next(1) is None
    end(transfer, 3, 0.8)
    assert not transfer.done
    assert transfer.next(1).segments[0].trial.parent == 2
    assert transfer.next(1) is None
    assert transfer.done


def test_nothing_is_transferred_if_every_surrogate_failed():
    transfer = started(trials=2)
    transfer.next(2)
    end(transfer, 0, None, TrialStatus.FAILED), end(transfer, 1, math.nan)
    assert transfer.next(2) is None
    assert transfer.done


def test_at_the_close_surrogates_stop_and_the_best_goes_first():
    transfer = started(pk.Shrink(8, eager=1), trials=10, deadline_s=100.0)
    transfer.heard(Noted(0.0, TOPIC, {"target_epoch_s": 10.0}))  # 20 s in all: tuning ends at 73 s
    transfer.next(10)
    transfer.heard(Reported(0.0, 0, 1, {"loss": 1.0}))
    end(transfer, 0, 0.9)
    transfer.at(72.9)
    assert transfer.stops() == []
    assert not transfer.urgent
    transfer.at(73.1)
    assert [trial for trial, _ in transfer.stops()] == list(range(1, 10))
    assert transfer.urgent
    (segment,) = transfer.next(1).segments
    assert segment.trial.parent == 0
    assert transfer.next(5) is None
    assert transfer.done


def test_towards_a_deadline_the_first_target_goes_before_further_surrogates():
    transfer = started(trials=10, deadline_s=100.0)
    transfer.heard(Noted(0.0, TOPIC, {"target_epoch_s": 10.0}))  # tuning ends at 73 s, half of that is 36.5 s
    transfer.next(2)
    end(transfer, 0, 0.9)
    transfer.at(36.4)
    assert not transfer.urgent
    transfer.at(36.6)
    assert transfer.urgent
    (segment,) = transfer.next(1).segments
    assert (segment.trial.parent, segment.options) == (0, {"model": "target"})
    assert not transfer.urgent
    assert transfer.stops() == []
    end(transfer, 1, 0.5)
    assert not transfer.urgent  # the second one waits for an idle device, or takes the first one's


def test_at_the_close_the_best_that_runs_goes_first_where_none_is_over():
    for maximize, parent in ((False, 2), (True, 1)):
        transfer = started(trials=4, deadline_s=100.0, quality=Objective("score", maximize))
        transfer.heard(Noted(0.0, TOPIC, {"target_epoch_s": 10.0}))
        transfer.next(4)
        transfer.heard(Reported(0.0, 0, 1, {"score": math.nan}))
        transfer.heard(Reported(0.0, 1, 1, {"score": 0.9}))
        transfer.heard(Reported(0.0, 2, 1, {"score": 0.3}))
        assert not transfer.urgent
        transfer.at(73.1)
        assert transfer.urgent
        assert transfer.next(1).segments[0].trial.parent == parent
        assert transfer.done


def test_at_the_close_without_a_report_the_first_configuration_is_trained():
    transfer = started(trials=4, deadline_s=100.0)
    transfer.at(99.0)  # the check took so long: there is nothing to transfer yet
    transfer.next(4)
    end(transfer, 0, None, TrialStatus.FAILED)
    transfer.at(99.1)
    assert transfer.urgent
    (segment,) = transfer.next(1).segments
    assert (segment.trial.parent, segment.trial.config) == (1, {"lr": 0.1})
    for trial in (1, 2, 3):
        end(transfer, trial, None, TrialStatus.STOPPED)
    assert transfer.next(1) is None
    assert transfer.done


def test_a_target_is_foreseen_to_be_as_slow_as_its_twin_was():
    transfer = started(trials=4, deadline_s=100.0)
    transfer.heard(Noted(0.0, TOPIC, {"target_epoch_s": 10.0, "twin_epoch_s": 1.0}))
    transfer.next(4)
    assert transfer.target_s == 20
    for trial in range(3):
        transfer.heard(Reported(0.0, trial, 1, {"loss": 1.0}, 50.0))  # a first epoch also warms up
    assert transfer.target_s == 20
    for trial, taken_s in enumerate((1.5, 9.0, 1.8)):
        transfer.heard(Reported(0.0, trial, 2, {"loss": 1.0}, taken_s))
    assert transfer.target_s == pytest.approx(1.8 * 20)  # the median
    for _ in range(9):
        transfer.heard(Reported(0.0, 3, 2, {"loss": 1.0}, 0.01))  # of many that train as one, a share
    assert transfer.target_s == pytest.approx(1.8 * 20)
    transfer.at(100 - 1.3 * 36 - 1 - 0.1)
    assert not transfer.urgent
    transfer.at(100 - 1.3 * 36 - 1 + 0.1)
    assert transfer.urgent
    transfer.next(1)
    transfer.heard(Reported(0.0, 4, 1, {"loss": 1.0}, 12.0))
    assert transfer.target_s == 24  # its own epochs say more than all that


# ---------------------------------------------------------------- conditions on what is held

BRANCHES = pk.Space(
    lr=pk.Float(0.001, 1),
    optimizer=pk.Choice("sgd", "adam"),
    momentum=pk.Float(0.1, 0.9, when=pk.equals("optimizer", "sgd"), transfers=False),
    nesterov=pk.Choice(False, True, when=pk.greater("momentum", 0.5), transfers=False),
)


def test_only_what_is_active_is_held():
    sampler = Held(pk.Random(), {"momentum": 0.7, "nesterov": True})
    sampler.start(BRANCHES, objectives=1, seed=0)
    asked = sampler.ask(40)
    assert [BRANCHES.validate(config) for config in asked] == asked
    held = {
        name: {(c.get("momentum"), c.get("nesterov")) for c in asked if c["optimizer"] == name}
        for name in ("sgd", "adam")
    }
    assert held == {"sgd": {(0.7, True)}, "adam": {(None, None)}}


@pytest.mark.parametrize(("best", "more"), [("sgd", 12), ("adam", 0)])
def test_the_second_stage_tunes_only_what_is_active(best, more):
    names = ("sgd", "adam")

    def config(number):
        held = {"momentum": 0.1} if number == 0 else {}
        return {"lr": 0.5, "optimizer": names[number], **held}

    transfer = started(
        pk.Shrink(8, second=12),
        trials=2,
        space=BRANCHES,
        config=config,
        held={"momentum": 0.1, "nesterov": False},
    )
    transfer.next(2)
    for number in range(2):
        end(transfer, number, 0.1 if names[number] == best else 0.9)
    (first,) = transfer.next(1).segments
    assert first.trial.config == config(names.index(best))
    group = transfer.next(12)
    found = [] if group is None else [segment.trial.config for segment in group.segments]
    assert transfer.done
    assert len(found) == more
    assert [BRANCHES.validate(each) for each in found] == found
    assert {each["optimizer"] for each in found} <= {best}
    assert len({each["momentum"] for each in found}) == more
    assert {"nesterov" in each for each in found} == ({True, False} if more else set())


def test_a_study_with_a_condition_on_what_is_held_runs_to_its_end():
    task = a_task(optimizer={"sgd": torch.optim.SGD, "adam": torch.optim.Adam})
    space = pk.Space(
        lr=pk.Float(1e-3, 0.5, log=True),
        optimizer=pk.Choice("sgd", "adam"),
        momentum=pk.Float(0.1, 0.9, when=pk.equals("optimizer", "sgd"), transfers=False),
    )
    found = a_study(task=task, space=space, scheduler=pk.Full(trials=4)).run()
    assert found.state.closed.reason == "finished"
    assert {t.config["optimizer"] for t in found.surrogate_trials} == {"sgd", "adam"}
    for trial in found.trials:
        assert space.validate(trial.config) == trial.config


def test_what_transfers_may_not_depend_on_what_does_not():
    space = pk.Space(
        optimizer=pk.Choice("sgd", "adam", transfers=False),
        momentum=pk.Float(0.1, 0.9, when=pk.equals("optimizer", "sgd")),
    )
    with pytest.raises(
        InvalidInput, match=r"'momentum' has when=.*'optimizer'.*Say transfers=False for 'momentum'"
    ):
        a_study(space=space)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "wrong",
    [
        {"eager": "x"},
        {"eager": math.nan},
        {"eager": None},
        {"widths": 3},
        {"widths": ("a",)},
        {"widths": "24"},
        {"widths": (0.5,)},
        {"widths": (math.inf,)},
        {"held": None},
        {"held": ["weight_decay"]},
    ],
)
def test_a_shrink_says_which_argument_is_wrong(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidInput, match=rf"Shrink {name} .*got {re.escape(repr(value))}"):
        pk.Shrink(8, **wrong)


def test_the_check_stops_a_study_whose_twin_would_mislead():
    class Loud(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, width), nn.ReLU())
            self.out = nn.Linear(width, 5)

        def forward(self, x):
            return self.out(self.body(x)) * self.out.in_features  # what no parametrization can know of

    def build(config, width=64):
        return Loud(width)

    data = pk.Data((X[:64], Y[:64]), (X[64:], Y[64:]))
    task = pk.Task(build, data, F.cross_entropy, batch_size=32, defaults={"lr": 0.01})
    shrink = pk.Shrink(8)
    with pytest.raises(Unsupported, match=r"(?s)coordinate check fails.*out +.*grows.*check=False"):
        inspect_twin(task.narrowed(shrink), shrink, {}, threads=1)
    shrink = pk.Shrink(8, check=False)
    note = inspect_twin(task.narrowed(shrink), shrink, {}, threads=1)
    assert note["check"]["ok"] is False
    assert note["target_epoch_s"] > 0


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InvalidInput, match=r"pk\.Shrink\(8\)"):
        a_study(surrogate=8)
    with pytest.raises(InvalidInput, match=r"needs a pk\.Task"):
        pk.Study(lambda run: None, SPACE, minimize="loss", surrogate=pk.Shrink(8))
    with pytest.raises(InvalidInput, match="SM2"):
        a_study(scheduler=pk.SM2(max_epochs=4))
    with pytest.raises(InvalidInput, match="about the full model"):
        a_study(
            limits=[pk.power_w <= 90]
        ).run()  # nobody predicts it, and the twin's watts are not the model's
    with pytest.raises(InvalidInput, match="Nothing in the space transfers"):
        a_study(space=pk.Space(weight_decay=pk.Float(0, 1, transfers=False)))


def test_on_real_workers_the_twin_is_checked_and_the_trained_model_is_there(tmp_path):
    data = pk.Data((X[:64], Y[:64]), (X[64:], Y[64:]))
    task = pk.Task(make, data, F.cross_entropy, epochs=2, batch_size=32)
    found = a_study(
        task=task,
        executor=pk.Local(slots=2),
        store=tmp_path / "s.db",
        scheduler=pk.Full(trials=4),
        space=pk.Space(lr=pk.Float(1e-3, 0.5, log=True)),
        fuse=2,
    ).run()
    assert found.coordinate_check.ok, str(found.coordinate_check)
    # One that was replaced by a better configuration before its first epoch has drawn nothing that anybody measured.
    checked_j = found.energy.joules - sum(t.energy.joules for t in found.trials if t.energy is not None)
    assert checked_j > 0.01  # two seconds of a core, some watts
    assert all(t.status is TrialStatus.COMPLETED for t in found.surrogate_trials), found.trials[0].error
    # One that was begun eagerly may have been replaced by a better configuration of the other pair.
    assert {t.status for t in found.target_trials} <= {TrialStatus.COMPLETED, TrialStatus.STOPPED}
    assert found.best in found.target_trials
    assert found.best.status is TrialStatus.COMPLETED
    files = list(tmp_path.rglob("*.ckpt"))
    assert {int(file.parent.name) for file in files} == {found.best.id}  # keep="best": the full model's
    again = pk.Study.load(tmp_path / "s.db")
    assert again.coordinate_check.to_json() == found.coordinate_check.to_json()
    parameters = {name for name, _ in make({}).named_parameters()}
    assert {each.layer for each in again.coordinate_check.gradients} == parameters
    shown = {trace.name: tuple(trace.y) for trace in again.plot.coordinate_check().data}
    assert shown == {each.layer: each.sizes for each in found.coordinate_check.layers}
    page = write_report(tmp_path / "s.db", tmp_path / "report.html").read_text()
    assert all(f"<td>gradient of {name}</td>" in page for name in parameters)
    model = again.load_model()
    assert model[2].weight.shape == (64, 64)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(X[64:]), Y[64:]))
    assert loss == pytest.approx(found.best.metrics["loss"], rel=1e-4)


def test_what_does_not_transfer_is_held_at_a_value_of_its_domain() -> None:
    """The first one where nobody gives another, not its place."""
    space = pk.Space(
        lr=pk.Float(1e-4, 1, log=True),
        batch_size=pk.Choice(32, 64, 128, transfers=False),
        warmup=pk.Int(5, 50, transfers=False),
        decay=pk.Float(1e-5, 1e-2, log=True, transfers=False),
        dropout=pk.Float(0, 0.5, transfers=False),
        two=pk.Choice("a", "b", transfers=False),
    )
    task = pk.Task(lambda: None, (torch.zeros(4, 2), torch.zeros(4)), lambda output, target: output.sum())
    held = held_values(space, task, {})
    assert held == {"batch_size": 32, "warmup": 5, "decay": 1e-5, "dropout": 0.0, "two": "a"}


class Hooked(nn.Module):
    """A hook without a gradient to be hooked: its forward fails in every evaluation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(x))
        hidden.register_hook(lambda gradient: gradient / 2)
        return self.head(hidden)


def test_a_model_that_cannot_be_computed_is_told_before_any_training(tmp_path):
    data = pk.Data((torch.randn(20, 6), torch.arange(20) % 3))
    task = pk.Task(Hooked, data, F.cross_entropy, epochs=1, batch_size=10)
    space, path = pk.Space(lr=pk.Float(1e-3, 1, log=True)), tmp_path / "s.db"
    study = pk.Study(task, space, minimize="loss", surrogate=pk.Shrink(2), store=path, executor=pk.Local(1))
    with pytest.raises(
        InvalidInput, match=r"task's own code fails at .*cannot register a hook.*without grad"
    ):
        study.run()
    assert not study.trials
