"""Limits of a study: what is predicted to violate one never starts, what is measured to is noted and teaches."""

import html
import math
import random
import time
from functools import cache

import pytest

import penstock as pk
from penstock.core import Checkpoint, Ended, Noted, Reported, Segment, Started, StudyState, Submitted, Trial
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, ranked
from penstock.predict import Features, Predictor
from penstock.report import read_journal, summary_text
from penstock.report._static import write_report
from penstock.sample import Observation
from penstock.store import open_store
from penstock.study._bounds import measured

SPACE = pk.Space(
    width=pk.Int(1, 64, structural=True),
    depth=pk.Int(1, 8, structural=True),
    lr=pk.Float(1e-4, 1, log=True),
)
BOUND_W = 40.0


def watts(config):
    """The device. About a quarter of the space keeps the bound (counted below)."""
    return 20 + 0.5 * config["width"] + 3 * config["depth"]


def error(config):
    return 5 / config["width"] + 4 / config["depth"] + (math.log10(config["lr"]) + 2) ** 2


def train(run):
    for epoch in run.epochs(3):
        run.report(error=error(run.config) + 1 / (epoch + 1))


def train_and_measure(run):
    for epoch in run.epochs(3):
        run.report(error=error(run.config) + 1 / (epoch + 1), power_w=watts(run.config))


@cache
def model(factor, scatter):
    draw = random.Random(5)
    configs = [SPACE.sample(1000 + i) for i in range(40)]
    values = [factor * watts(c) * (1 + scatter * draw.gauss(0, 1)) for c in configs]
    return Predictor.fit("power_w", Features.of(SPACE), configs, values, folds=0)


def predictors(factor=1.0, scatter=0.0, **names):
    """What a profile would give, of a device that draws ``factor`` times what ours does."""
    return pk.Predictors({"power_w": model(factor, scatter).copy()}, features=Features.of(SPACE), **names)


def study(work=train, **options):
    options.setdefault("minimize", "error")
    options.setdefault("executor", pk.Simulated(devices=2, seconds=1.0))
    options.setdefault("store", False)
    options.setdefault("scheduler", pk.Full(trials=20, epochs=3))
    options.setdefault("limits", [pk.power_w <= BOUND_W])
    space = options.pop("space", SPACE)
    return pk.Study(work, space, **options)


SAMPLERS = {
    "Random": pk.Random,
    "TPE": pk.TPE,
    "Walk": pk.Walk,
    "HW-IECI": pk.Bayes,
    "HW-CWEI": lambda: pk.Bayes(weight="probability"),
    "HW-CWEI, GP": lambda: pk.Bayes(weight="gp"),
    "WarmStart": lambda: pk.WarmStart([{"width": 64, "depth": 8, "lr": 0.01}], then=pk.Random()),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_trial_that_is_predicted_to_violate_starts_with_any_sampler(name):
    done = study(sampler=SAMPLERS[name](), predictors=predictors()).run()
    assert len(done.trials) == 20
    assert max(watts(t.config) for t in done.trials) <= BOUND_W
    assert {t.status for t in done.trials} == {pk.TrialStatus.COMPLETED}


def test_the_same_samplers_violate_where_nothing_is_limited():
    done = study(sampler=pk.Random(), limits=(), scheduler=pk.Full(trials=200, epochs=1)).run()
    kept = sum(watts(t.config) <= BOUND_W for t in done.trials)
    assert 0.1 < kept / 200 < 0.35
    assert done.refused == 0
    assert done.gate is None


def test_a_grid_runs_what_is_allowed_of_it_and_ends():
    space = pk.Space(width=pk.Choice(8, 16, 32, 64), depth=pk.Choice(1, 4, 8))
    limit = pk.Quantity("cells", of=lambda c: c["width"] * c["depth"]) <= 64
    done = study(
        lambda run: run.report(error=1.0),
        space=space,
        sampler=pk.Grid(),
        limits=[limit],
        scheduler=pk.Full(epochs=1),
    ).run()
    expected = [(w, d) for w in (8, 16, 32, 64) for d in (1, 4, 8) if w * d <= 64]
    assert sorted((t.config["width"], t.config["depth"]) for t in done.trials) == sorted(expected)
    assert done.refused == 12 - len(expected)


@pytest.mark.parametrize("wrap", ["WarmStart", "Limited"])
def test_a_grid_is_run_to_its_end_behind_what_wraps_it(wrap):
    """Not to the number of trials of a study that has no end."""
    space = pk.Space(width=pk.Int(1, 60))
    limit = pk.Quantity("width", of=lambda c: c["width"]) <= 59
    sampler = (
        pk.WarmStart([{"width": 7}], then=pk.Grid()) if wrap == "WarmStart" else pk.Limited(pk.Grid(), limit)
    )
    done = study(
        lambda run: run.report(error=1.0), space=space, sampler=sampler, limits=(), scheduler=None
    ).run()
    assert len(done.trials) == (61 if wrap == "WarmStart" else 59)


def test_warm_starts_that_violate_are_left_out_and_others_come_first():
    fits, too_large = {"width": 8, "depth": 2, "lr": 0.01}, {"width": 64, "depth": 8, "lr": 0.01}
    done = study(
        sampler=pk.Random(),
        warm_start=[too_large, fits],
        predictors=predictors(),
        scheduler=pk.Full(trials=4),
    ).run()
    assert done.trials[0].config == fits
    assert all(t.config != too_large for t in done.trials)


OWN = {
    "Limited": lambda: pk.Limited(pk.Random(), [pk.power_w <= BOUND_W], predictors()),
    "Bayes": lambda: pk.Bayes(gate=pk.Gate([pk.power_w <= BOUND_W], predictors())),
}


@pytest.mark.parametrize("name", OWN)
def test_limits_that_a_sampler_has_of_its_own_count_with_a_warm_start_too(name):
    """The best in everything but the limit is among the first: once measured, it is no result."""
    too_large = {"width": 64, "depth": 8, "lr": 0.01}
    done = study(
        train_and_measure,
        limits=(),
        sampler=OWN[name](),
        warm_start=[too_large],
        scheduler=pk.Full(trials=4, epochs=3),
    ).run()
    assert done.gate is not None
    assert [limit.name for limit in done.limits] == ["power_w"]
    assert done.trials[0].config == too_large
    assert done.trials[0].violated
    assert done.best.config != too_large
    assert all(watts(t.config) <= BOUND_W for t in done.trials[1:])
    with pytest.raises(InvalidInput, match="Both the study and its sampler have limits"):
        study(sampler=pk.WarmStart([too_large], then=OWN[name]()))


def test_a_search_that_knows_limits_is_told_of_them_behind_a_warm_start():
    too_large = {"width": 64, "depth": 8, "lr": 0.01}
    done = study(
        sampler=pk.WarmStart([too_large], then=pk.Bayes(startup=3)),
        predictors=predictors(),
        scheduler=pk.Full(trials=8, epochs=1),
    ).run()
    assert len(done.trials) == 8
    assert done.refused == 1  # the first; the others are proposed by the limits


def test_an_earlier_studys_trials_are_transferred_behind_a_warm_start():
    first = {"width": 8, "depth": 2, "lr": 0.01}
    earlier = study(limits=(), sampler=pk.Random(), scheduler=pk.Full(trials=5, epochs=1)).run()
    done = study(
        limits=(),
        sampler=pk.WarmStart([first], then=pk.Bayes(transfer=earlier.trials)),
        scheduler=pk.Full(trials=2, epochs=1),
    ).run()
    assert done.trials[0].config == first


@pytest.mark.parametrize(
    "given",
    [pk.WarmStart([], then=pk.TPE()), pk.Limited(pk.WarmStart([], then=pk.TPE()), pk.params <= 5)],
    ids=["WarmStart", "Limited"],
)
def test_what_a_sampler_wraps_belongs_to_one_study_too(given):
    one, other = (study(limits=(), sampler=given).sampler for _ in range(2))
    while one is not None:
        assert one is not other
        one, other = (getattr(s, "then", getattr(s, "_sampler", None)) for s in (one, other))


@pytest.mark.parametrize("own", [False, True])
def test_population_based_training_does_not_change_a_member_beyond_a_limit(own):
    limits = [pk.Quantity("width", of=lambda c: c["width"]) <= 20]
    space = pk.Space(width=pk.Int(1, 64), lr=pk.Float(1e-4, 1, log=True))
    done = pk.Study(
        lambda run: [run.report(error=1 / run.config["width"]) for _ in run.epochs(12)] and None,
        space,
        minimize="error",
        scheduler=pk.PBT(population=8, max_epochs=12, interval=2),
        sampler=pk.Bayes(gate=pk.Gate(limits)) if own else pk.Random(),
        limits=() if own else limits,
        executor=pk.Simulated(devices=4, seconds=1.0),
        store=False,
    ).run()
    widths = [s.trial.config["width"] for s in (t.segment for t in done.trials)]
    assert max(widths) <= 20
    assert max(widths) >= 15  # it does climb towards the limit


def test_an_infeasible_space_is_told_with_the_tightest_limit_and_the_nearest_point():
    impossible = study(
        limits=[pk.power_w <= 22, pk.Quantity("cells", of=lambda c: c["width"] * c["depth"]) <= 100],
        predictors=predictors(),
        confidence=0.5,
    )
    with pytest.raises(InvalidInput) as caught:
        impossible.run()
    text = str(caught.value)
    assert "The tightest limit is power_w <= 22 W" in text
    assert "'width': 1, 'depth': 1" in text  # the least watts there are: 23.5
    assert "23.5" in text


def test_a_small_allowed_part_is_found_beyond_drawing():
    """One of 512 structures is allowed, which 200 draws mostly miss."""
    limit = pk.power_w <= 23.6
    few = pk.Full(trials=4, epochs=1)
    done = study(
        sampler=pk.Random(), limits=[limit], predictors=predictors(), confidence=0.5, scheduler=few
    ).run()
    assert {(t.config["width"], t.config["depth"]) for t in done.trials} == {(1, 1)}


def test_two_limits_and_a_users_function_hold_together():
    limits = [pk.power_w <= BOUND_W, pk.Quantity("depth", of=lambda c: c["depth"]) >= 3]
    done = study(limits=limits, predictors=predictors(), sampler=pk.Bayes()).run()
    assert all(watts(t.config) <= BOUND_W and t.config["depth"] >= 3 for t in done.trials)
    assert done.spec()["limits"][1] == {
        "quantity": "depth",
        "unit": "",
        "bound": 3.0,
        "at_most": False,
        "function": True,
    }


def test_measured_violations_are_noted_never_the_best_and_teach():
    """A profile that tells a tenth less than the device draws: the study finds out by itself."""
    wrong = predictors(0.9, scatter=0.01)
    done = study(
        train_and_measure,
        predictors=wrong,
        sampler=pk.Bayes(),
        scheduler=pk.Full(trials=40, epochs=3),
        confidence=0.9,
    ).run()
    over = [t.id for t in done.trials if watts(t.config) > BOUND_W]
    assert over  # the profile was believed at first
    assert [t.id for t in done.trials if t.violated] == over
    assert sorted({n.trial for n in done.state.notes if n.topic == "limit_violated"}) == over
    note = next(n for n in done.state.notes if n.topic == "limit_violated")
    assert note.data["limit"] == "power_w <= 40 W"
    assert note.data["value"] == pytest.approx(watts(done.trials[note.trial].config))
    assert watts(done.best.config) <= BOUND_W
    unlimited = min(done.trials, key=lambda t: t.metrics["error"])
    assert done.best.metrics["error"] >= unlimited.metrics["error"]
    assert sum(t >= 20 for t in over) < sum(t < 20 for t in over)
    assert not [t for t in over if t >= 30]
    # The predictions are of the device now, near the limit, where trials were run.
    config = {"width": 22, "depth": 3, "lr": 0.01}
    assert done.gate.predictors.predict("power_w", config).mean == pytest.approx(watts(config), rel=0.06)


def watched(run):
    for epoch in run.epochs():
        run.save({})
        run.report(error=1 - run.config["x"] + 1 / (epoch + 1), power_w=100 * run.config["x"])


def watched_study(scheduler, **options):
    return pk.Study(
        watched, pk.Space(x=pk.Float(0, 1)), minimize="error", scheduler=scheduler, sampler=pk.Random(), seed=0,
        executor=pk.Simulated(devices=1), limits=[pk.power_w <= 50], meter=False, **{"store": False} | options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "scheduler",
    [pk.Halving(max_epochs=9), pk.ASHA(max_epochs=9, trials=12)],
    ids=["halving", "asha"],
)
def test_who_was_measured_to_violate_a_limit_is_not_promoted(scheduler):
    done = watched_study(scheduler).run()
    assert any(t.violated for t in done.trials)
    assert all(t.status.is_end for t in done.trials)
    assert {t.epoch for t in done.trials if t.violated} == {1}
    assert done.best.epoch == 9
    assert done.best.config["x"] == max(t.config["x"] for t in done.trials if t.epoch == 9 and not t.violated)


def test_population_based_training_copies_nobody_who_violates_a_limit():
    done = watched_study(pk.PBT(population=6, max_epochs=6, interval=3)).run()
    first = {t.id: t.reports[0].metrics["power_w"] for t in done.trials}
    assert any(power_w > 50 for power_w in first.values())
    donors = {t.segment.copy_from.trial for t in done.trials if t.segment.copy_from is not None}
    assert donors
    assert all(first[donor] <= 50 for donor in donors)


@pytest.mark.parametrize("seed", range(4))
def test_who_took_over_a_configuration_is_judged_by_that_one(seed, tmp_path):
    """Members that violated the limit copy others: then the best is the best of all that keep it in the end."""
    path = tmp_path / "s.db"
    study = watched_study(pk.PBT(population=8, max_epochs=12, interval=3), store=path)
    study.seed = seed
    done = study.run()
    began = {t.id: t.reports[0].metrics["power_w"] for t in done.trials}
    assert any(began[t.id] > 50 >= t.metrics["power_w"] for t in done.trials)
    for trial in done.trials:
        assert bool(trial.violated) == (trial.metrics["power_w"] > 50)
    fit = [t for t in done.trials if t.metrics["power_w"] <= 50]
    assert done.best.metrics["error"] == min(t.metrics["error"] for t in fit)
    # What the views take for the best so far ends with it, and was never one beyond the limit.
    steps = done._folded().best_so_far(0)
    powers = {(t.id, r.time_s): r.metrics["power_w"] for t in done.trials for r in t.reports}
    assert all(powers[step.trial, step.time_s] <= 50 for step in steps)
    assert steps[-1].value == done.best.metrics["error"]


def test_who_has_just_taken_over_a_configuration_is_not_the_best_by_what_came_before():
    """Its latest report is of the configuration that it gave up, which violated the limit and was the best."""
    state, good, bad = StudyState(), Trial(0, {"x": 0.4}, 1), Trial(1, {"x": 0.9}, 2)
    state.apply(Submitted(0.0, 2, (Segment(good, until=1), Segment(bad, until=1))))
    for trial, error_now in ((0, 0.6), (1, 0.1)):
        state.apply(Started(0.0, trial))
        state.apply(Reported(1.0, trial, 1, {"error": error_now}))
        state.apply(Ended(1.0, trial, pk.TrialStatus.PAUSED, 1))
    state.apply(Noted(1.0, "limit_violated", {"limit": "power_w <= 50 W"}, 1))
    goal = Goal.of("error", None)
    assert [t.id for t in ranked(goal, state.trials.values())] == [0]
    copy = Segment(Trial(1, {"x": 0.45}, 2, 0), 1, 2, copy_from=Checkpoint(0, 1))
    state.apply(Submitted(2.0, 1, (copy,)))
    assert [t.id for t in ranked(goal, state.trials.values())] == [0]
    state.apply(Started(2.0, 1, 1))
    state.apply(Reported(3.0, 1, 2, {"error": 0.55}))
    assert [t.id for t in ranked(goal, state.trials.values())] == [1, 0]


def test_the_best_of_a_study_that_was_left_keeps_the_limits(tmp_path):
    """Also of trials that were left before their ends. What they were judged by so far is forgotten when they go on."""

    def settles(run):
        """The better, the more it draws; the fourth draws much in its first epochs only."""
        for epoch in run.epochs(6):
            most = run.config["x"] == 0.4 and epoch < 3
            power_w = 90.0 if most else 100 * run.config["x"]
            run.report(error=1 - run.config["x"], power_w=power_w)

    path = tmp_path / "s.db"
    study = pk.Study(
        settles, pk.Space(x=pk.Choice(0.2, 0.4, 0.7, 0.9)), minimize="error", sampler=pk.Grid(),
        executor=pk.Simulated(4), limits=[pk.power_w <= 50], meter=False, store=path, budget=pk.Budget(epochs=8),
        scheduler=pk.Full(epochs=6),
    )  # fmt: skip
    left = study.run()
    assert {t.epoch for t in left.trials} == {2}
    assert [t.config["x"] for t in left.trials if not t.violated] == [0.2]
    assert left.best.config["x"] == 0.2
    assert pk.Study.load(path).best.config["x"] == 0.2
    done = pk.Study.load(path, budget=pk.Budget(epochs=100)).run()
    assert [t.config["x"] for t in done.trials if not t.violated] == [0.2, 0.4]
    assert done.best.config["x"] == 0.4


def test_a_study_of_an_earlier_release_promotes_as_it_began(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    with monkeypatch.context() as before:
        before.setattr("penstock.study._session.FIT", "unheard-of")
        whole = watched_study(pk.Halving(max_epochs=9)).run()
        watched_study(pk.Halving(max_epochs=9), store=path, budget=pk.Budget(time_s=10)).run()
    resumed = pk.Study.load(path, budget=pk.Budget()).run()
    assert any(t.violated and t.epoch == 9 for t in whole.trials)
    assert [(t.config, t.epoch, t.status) for t in resumed.trials] == [
        (t.config, t.epoch, t.status) for t in whole.trials
    ]


def test_what_nobody_has_profiled_is_learned_from_what_the_study_measures_itself():
    """Seconds per epoch are metered in every trial."""

    def seconds(config, epoch):
        return 0.1 * config["width"] + 1.0

    done = study(
        limits=[pk.epoch_s <= 3.0],
        sampler=pk.Random(),
        scheduler=pk.Full(trials=40, epochs=3),
        executor=pk.Simulated(devices=1, seconds=seconds),
    ).run()
    over = [t.id for t in done.trials if seconds(t.config, 0) > 3.0]
    assert over == [t.id for t in done.trials if t.violated]
    assert len(over) >= 3
    assert max(over) < 12
    assert seconds(done.best.config, 0) <= 3.0


@pytest.mark.parametrize("more", [{}, {"warm_start": [{"width": 32, "depth": 1}]}])
@pytest.mark.parametrize("limited", [True, False])
def test_a_grid_that_was_interrupted_goes_on_to_its_end(tmp_path, limited, more):
    """Wrapped by limits or a warm start it still ends by itself, and needs no number of trials."""
    space = pk.Space(width=pk.Choice(8, 16, 32, 64), depth=pk.Choice(1, 4, 8))
    limit = pk.Quantity("cells", of=lambda c: c["width"] * c["depth"]) <= 64
    store = str(tmp_path / "grid.db")
    study(
        lambda run: run.report(error=1.0),
        space=space,
        sampler=pk.Grid(),
        limits=[limit] if limited else (),
        scheduler=pk.Full(epochs=1),
        budget=pk.Budget(epochs=2),
        store=store,
        **more,
    ).run()
    assert len(pk.Study.load(store).trials) < 4
    done = pk.Study.load(store, budget=pk.Budget()).run()
    first = [(w["width"], w["depth"]) for w in more.get("warm_start", ())]
    expected = [(w, d) for w in (8, 16, 32, 64) for d in (1, 4, 8) if w * d <= 64 or not limited]
    assert [(t.config["width"], t.config["depth"]) for t in done.trials] == first + expected
    assert [t.id for t in pk.Study.load(store).trials] == list(range(len(first + expected)))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_epoch_is_one_however_seldom_a_training_reports(every):
    def seconds(config, epoch):
        return 0.1 * config["width"] + 1.0

    def seldom(run):
        for epoch in run.epochs(6):
            if (epoch + 1) % every == 0:
                run.report(error=1.0)

    done = study(
        seldom,
        limits=[pk.epoch_s <= 3.0],
        sampler=pk.Random(),
        scheduler=pk.Full(trials=12, epochs=6),
        executor=pk.Simulated(devices=1, seconds=seconds),
    ).run()
    over = [t.id for t in done.trials if seconds(t.config, 0) > 3.0]
    assert 0 < len(over) < 12
    assert [t.id for t in done.trials if t.violated] == over
    for trial in done.trials:
        assert measured(trial)["epoch_s"] == pytest.approx(seconds(trial.config, 0))


@pytest.mark.parametrize("name", ["Random", "TPE", "Walk", "HW-IECI", "WarmStart"])
def test_a_resumed_study_goes_on_as_if_never_interrupted(name, tmp_path):
    """Also what the predictors have learned from measurements comes back from the journal."""

    def run(path, *budgets):
        wrong = predictors(0.9, scatter=0.01)
        study(
            train_and_measure,
            sampler=SAMPLERS[name](),
            predictors=wrong,
            confidence=0.9,
            store=path,
            scheduler=pk.Full(trials=16, epochs=3),
            budget=budgets[0],
            executor=pk.Simulated(devices=2, seconds=1.0),
            seed=1,  # at which every sampler violates a limit before it has learned
        ).run()
        for budget in budgets[1:]:
            pk.Study.load(path, budget=budget).run()
        return pk.Study.load(path)

    whole = run(tmp_path / "whole.db", pk.Budget())
    parts = run(
        tmp_path / "parts.db",
        pk.Budget(time_s=7.0),
        pk.Budget(time_s=13.0),
        pk.Budget(),
    )
    assert len(parts.trials) == 16
    assert [t.config for t in parts.trials] == [t.config for t in whole.trials]
    assert [t.violated for t in parts.trials] == [t.violated for t in whole.trials]
    assert any(t.violated for t in whole.trials)
    assert parts.limits == (pk.power_w <= BOUND_W,)


def test_the_same_object_can_be_run_on_and_predictors_of_the_caller_stay_as_they_were():
    mine = predictors(0.9)
    config = {"width": 20, "depth": 4, "lr": 0.1}
    before = mine.predict("power_w", config)
    study(train_and_measure, predictors=mine, sampler=pk.Random()).run()
    assert mine.predict("power_w", config) == before


def test_a_profile_in_the_store_is_used_by_later_studies(tmp_path):
    path = tmp_path / "studies.db"
    store = open_store(path, write=True)
    predictors(device="Board A", task="train").save(store)
    store.close()
    done = study(store=path, sampler=pk.Random(), name="one").run()
    assert max(watts(t.config) for t in done.trials) <= BOUND_W
    assert done.refused > 20

    store = open_store(path, write=True)
    predictors(2.0, device="Board B", task="train").save(store)
    store.close()
    with pytest.raises(InvalidInput, match=r"Board A.*Board B.*predictors="):
        study(store=path, name="two").run()
    done = study(store=path, name="three", predictors="Board B", limits=[pk.power_w <= 100]).run()
    assert max(watts(t.config) for t in done.trials) <= 50
    with pytest.raises(InvalidInput, match="no profile of train on 'Board C'"):
        study(store=path, name="four", predictors="Board C").run()
    other = pk.Space(height=pk.Int(1, 9, structural=True))
    with pytest.raises(InvalidInput, match="another space"):
        study(store=path, name="five", predictors="Board A", space=other).run()


def test_limits_are_checked_before_anything_runs():
    with pytest.raises(InvalidInput, match="power_w alone is no limit"):
        study(limits=[pk.power_w])
    with pytest.raises(InvalidInput, match="confidence"):
        study(confidence=1.0)
    with pytest.raises(InvalidInput, match="predictors takes"):
        study(predictors=3)
    with pytest.raises(InvalidInput, match="drop predictors"):
        study(predictors=predictors(), limits=())
    with pytest.raises(InvalidInput, match="study alone"):
        study(sampler=pk.Limited(pk.Random(), [pk.power_w <= 3]))


def test_a_sampler_may_bring_its_own_limits():
    own = pk.Limited(pk.Random(), [pk.power_w <= BOUND_W], predictors())
    done = study(sampler=own, limits=()).run()
    assert max(watts(t.config) for t in done.trials) <= BOUND_W
    assert done.limits == (pk.power_w <= BOUND_W,)


# --- early termination, budgets ------------------------------------------------------------------------------


def train_or_diverge(run):
    """Learning rates above 0.1 stay at chance, above 0.5 they explode after a while."""
    lr = run.config["lr"]
    for epoch in run.epochs(9):
        if lr > 0.5:
            run.report(error=80.0 if epoch < 1 else 80.0 * 20**epoch)
        elif lr > 0.1:
            run.report(error=90.0 + 0.1 * (-1) ** epoch)
        else:
            run.report(error=20 + error(run.config) + 60 / (epoch + 1))


@pytest.mark.parametrize(
    "scheduler",
    [
        pk.Full(trials=27, epochs=9),
        pk.Halving(max_epochs=9, trials=27),
        pk.Hyperband(max_epochs=9),
        pk.ASHA(max_epochs=9, trials=27),
        pk.PBT(population=9, max_epochs=9, interval=3),
    ],
    ids=lambda s: type(s).__name__,
)
def test_early_termination_composes_with_every_scheduler_and_stops_no_training_that_learns(scheduler):
    done = study(
        train_or_diverge,
        scheduler=scheduler,
        sampler=pk.Random(),
        predictors=predictors(),
        stop=[pk.Divergence("error", chance=90.0, epochs=3)],
    ).run()
    assert max(watts(t.config) for t in done.trials) <= BOUND_W
    hopeless = [t for t in done.trials if t.config["lr"] > 0.1]
    assert hopeless
    for trial in hopeless:
        if trial.segment.copy_from is None:  # PBT turns to such rates also later
            assert trial.epoch <= 4  # known after the third epoch's report, told at the next
            assert trial.status is pk.TrialStatus.STOPPED
    for trial in done.trials:
        if trial.config["lr"] <= 0.1:
            assert "chance" not in trial.reason
            assert "diverged" not in trial.reason
    assert done.best.config["lr"] <= 0.1
    assert done.best.epoch == 9


def test_with_a_budget_of_time_the_last_trial_may_finish():
    """HyperPower, section 5: the last sample queried before the time limit is allowed to complete."""

    def run(**more):
        return study(
            sampler=pk.Random(),
            predictors=predictors(),
            scheduler=pk.Full(epochs=3),
            executor=pk.Simulated(devices=1, seconds=10.0),
            budget=pk.Budget(time_s=100.0, **more),
        ).run()

    done = run(finish=True)
    assert [t.epoch for t in done.trials] == [3, 3, 3, 3]  # the fourth begins at 90 s
    assert done.state.spent_s == pytest.approx(120.0)
    assert done.state.closed.reason == "budget"
    cut = run()
    assert [t.epoch for t in cut.trials[:3]] == [3, 3, 3]
    assert cut.trials[3].epoch < 3
    assert pk.Budget(time_s=100.0, finish=True) == pk.Budget.from_json(
        pk.Budget(time_s=100.0, finish=True).to_json()
    )


def test_a_fixed_number_of_evaluations():
    done = study(scheduler=pk.Full(), budget=pk.Budget(trials=7), predictors=predictors()).run()
    assert len(done.trials) == 7


def test_results_of_an_earlier_study_carry_over():
    """Transfer: with what another device's study has found, the first proposals are good ones already."""
    earlier = study(sampler=pk.Random(), limits=(), scheduler=pk.Full(trials=60, epochs=3)).run()
    told = [Observation(t.id, t.config, (t.metrics["error"],), t.epoch) for t in earlier.trials]

    def first(sampler):
        done = study(sampler=sampler, predictors=predictors(), scheduler=pk.Full(trials=4, epochs=3)).run()
        return min(t.metrics["error"] for t in done.trials)

    assert first(pk.Bayes(transfer=told)) < first(pk.Bayes())


def test_a_confidence_that_leaves_nothing_is_given_up_but_never_the_prediction():
    """Sensors that scatter by 10% tell no two of these networks apart: the surest of them are taken."""
    noisy = predictors(scatter=0.1)
    done = study(
        limits=[pk.power_w <= 26],
        predictors=noisy,
        confidence=0.99,
        sampler=pk.Random(),
        scheduler=pk.Full(trials=4, epochs=1),
    ).run()
    assert len(done.trials) == 4
    for trial in done.trials:
        found = noisy.predict("power_w", trial.config)
        assert found.mean <= 26 < found.mean + 2.3 * found.std


class Hog:
    """Draws too much whatever its configuration is, and keeps a list of its own of what it has reported."""

    def __init__(self, diary, wait_s):
        self.diary, self.wait_s = diary, wait_s

    def __call__(self, run):
        run.load()
        for epoch in run.epochs(3):
            time.sleep(self.wait_s)  # real trials that take no time are queued by the dozen
            run.save(None)
            run.report(error=error(run.config), power_w=1000.0 + watts(run.config))
            with self.diary.open("a") as file:
                file.write(f"{run.trial} {epoch + 1}\n")


@pytest.mark.parametrize("executor", ["simulated", "local"])
def test_a_limit_that_turns_out_to_be_out_of_reach_loses_nothing(tmp_path, executor):
    path, diary = tmp_path / "s.db", tmp_path / "diary"
    make = pk.Simulated if executor == "simulated" else pk.Local
    scheduler = pk.Full(trials=60, epochs=3)
    work = Hog(diary, 0.0 if executor == "simulated" else 0.02)
    made = study(work, executor=make(2), store=path, scheduler=scheduler, sampler=pk.Random(), meter=False)
    with pytest.raises(InvalidInput, match=r"power_w <= 40 W.*Loosen the limit") as first:
        made.run()

    def journalled():
        store = open_store(path, write=False)
        try:
            return StudyState.of(event for _, event in store.read(store.find(None).id))
        finally:
            store.close()

    def outcome(state):
        return [(t.id, t.status, t.epoch, dict(t.metrics)) for t in state.trials.values()]

    state = journalled()
    told = {tuple(map(int, line.split())) for line in diary.read_text().splitlines()}
    assert {(t.id, r.epoch) for t in state.trials.values() for r in t.reports} == told
    assert len(state.trials) >= 8
    assert not state.counts.running
    assert outcome(state) == outcome(made.state)
    assert (state.closed.reason, state.closed.detail) == ("error", str(first.value))
    # Nothing has changed, so a resume says the same, and what there was is there.
    with pytest.raises(InvalidInput) as second:
        pk.Study.load(path).run()
    assert str(second.value).split("the nearest")[0] == str(first.value).split("the nearest")[0]
    again = journalled()
    done = [t for t in outcome(state) if t[1].is_end]
    assert [t for t in outcome(again) if t in done] == done
    assert again.closed.reason == "error"
    assert len(again.sessions) == 2


def test_reports_count_violations_and_refusals_also_of_a_journal(tmp_path):
    path = tmp_path / "s.db"
    wrong = predictors(0.8)  # a device that draws less than ours does: some of what it allows is too much
    work, scheduler = train_and_measure, pk.Full(trials=30, epochs=3)
    made = study(work, sampler=pk.Random(), predictors=wrong, scheduler=scheduler, store=path).run()
    beyond = sum(watts(t.config) > BOUND_W for t in made.trials)
    assert 0 < beyond < 30
    assert made.refused > 0
    line = f"power_w <= 40 W, {beyond} violating trainings, {made.refused} proposals refused"
    line = line.replace("1 violating trainings", "1 violating training") if beyond == 1 else line
    assert f"limits  {line}" in str(made)
    for told in (made, pk.Study.load(path)):
        facts = told.summary()
        assert (facts["limits"], facts["violations"]) == (["power_w <= 40 W"], beyond)
        assert facts["refused"] == made.refused
    journal = read_journal(path)
    text = summary_text(journal.entry.name, journal.goal, journal.state, spec=journal.entry.spec)
    assert f"limits  {line}" in text
    write_report(path, tmp_path / "r.html")
    write_report(path, tmp_path / "r.md")
    assert html.escape(line) in (tmp_path / "r.html").read_text()
    assert line in (tmp_path / "r.md").read_text().replace("\\", "").replace("&lt;", "<")


@pytest.mark.parametrize("work", ["silent", "telling"])
def test_a_limit_on_what_no_training_measured_is_said_to_be_unchecked(work, tmp_path):
    def silent(run):
        run.report(loss=run.config["x"])

    def telling(run):
        run.report(loss=run.config["x"], power_w=1.0)

    area = pk.Quantity("area", of=lambda config: config["x"])
    told = str(
        pk.Study(
            {"silent": silent, "telling": telling}[work],
            {"x": pk.Float(0, 1)},
            minimize="loss",
            sampler=pk.Random(),
            scheduler=pk.Full(trials=2, epochs=1),
            limits=[pk.power_w <= 90, area <= 2, pk.epoch_s <= 1e6],
            executor=pk.Simulated(devices=1),
            store=tmp_path / "s.db",
        ).run()
    )
    assert "0 violating trainings" in told
    assert ("; power_w was measured in no training" in told) == (work == "silent")
    assert "area" not in told.split("violating")[1]
