"""The study loop on simulated devices: the same loop as everywhere, with time under control."""

import gc
import math
import sqlite3
import threading
from contextlib import closing

import pytest

import penstock as pk
from penstock.core import StudyState, Submitted
from penstock.core.errors import InvalidInput
from penstock.store import open_store
from penstock.testing.journals import events_in

SPACE = pk.Space(lr=pk.Float(1e-4, 1, log=True), width=pk.Int(1, 8))


def curve(run):
    floor = abs(math.log10(run.config["lr"]) + 2)
    for epoch in run.epochs(9):
        run.report(loss=floor + 1 / (epoch + 1))


def two_faced(run):
    for _ in run.epochs(3):
        run.report(loss=run.config["lr"], size=9 - run.config["width"])


def study(work=curve, **options):
    options.setdefault("minimize", "loss")
    options.setdefault("sampler", pk.Random())
    options.setdefault("executor", pk.Simulated(devices=4, seconds=1.0))
    options.setdefault("store", False)
    return pk.Study(work, SPACE, **options)


def test_random_search_finds_the_best_of_its_trials():
    done = study(scheduler=pk.Full(trials=40, epochs=9)).run()
    losses = {t.id: abs(math.log10(t.config["lr"]) + 2) + 1 / 9 for t in done.trials}
    assert len(losses) == 40
    assert done.best.id == min(losses, key=losses.get)
    assert done.best.metrics["loss"] == pytest.approx(min(losses.values()))
    assert {t.status for t in done.trials} == {pk.TrialStatus.COMPLETED}
    # 40 trials of 9 one-second epochs on 4 devices: the makespan is exactly the work divided by 4.
    assert done.state.spent_s == pytest.approx(90.0)


@pytest.mark.parametrize(
    "scheduler",
    [
        pk.Full(trials=20, epochs=9),
        pk.Halving(max_epochs=9, trials=27),
        pk.Hyperband(max_epochs=9),
        pk.ASHA(max_epochs=9, trials=27),
        pk.PBT(population=6, max_epochs=9, interval=3),
    ],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("sampler", [pk.Random(), pk.TPE()], ids=lambda s: type(s).__name__)
def test_every_scheduler_ends_with_every_sampler_and_a_seed_fixes_the_journal(scheduler, sampler, tmp_path):
    journals = []
    for name in ("a.db", "b.db"):
        path = tmp_path / name
        study(scheduler=scheduler, sampler=sampler, store=path, seed=3).run()
        journals.append([e for e in events_in(path) if e.kind not in ("session_opened", "session_closed")])
    assert journals[0] == journals[1]
    state = StudyState.of(journals[0])
    state.validate()
    assert state.counts.ended == state.counts.total > 0
    assert max(t.epoch for t in state.trials.values()) == 9


def test_another_seed_gives_other_configurations():
    configs = [
        [t.config for t in study(scheduler=pk.Full(trials=5, epochs=1), seed=s).run().trials] for s in (0, 1)
    ]
    assert configs[0] != configs[1]


def test_several_objectives_give_the_pareto_set():
    done = study(two_faced, minimize=["loss", "size"], scheduler=pk.Full(trials=30)).run()
    scores = {t.id: (t.config["lr"], 9 - t.config["width"]) for t in done.trials}
    beaten = {
        i for i, a in scores.items() for b in scores.values() if b != a and b[0] <= a[0] and b[1] <= a[1]
    }
    assert {t.id for t in done.best_trials} == set(scores) - beaten


def test_the_default_grid_ends_by_itself():
    space = pk.Space(a=pk.Choice(1, 2, 3), b=pk.Choice("x", "y"))
    done = pk.Study(
        lambda run: {"loss": run.config["a"]},
        space,
        minimize="loss",
        sampler=pk.Grid(),
        executor=pk.Simulated(devices=2),
        store=False,
    ).run()
    assert len({tuple(t.config.items()) for t in done.trials}) == len(done.trials) == 6


@pytest.mark.parametrize(
    ("budget", "check"),
    [
        (pk.Budget(trials=7), lambda s: len(s.trials) == 7),
        (pk.Budget(trials=7.0), lambda s: len(s.trials) == 7),
        (pk.Budget(epochs=20), lambda s: s.state.epochs == 20),
        (pk.Budget(epochs=2), lambda s: s.state.epochs == 2),
        (pk.Budget(time_s=5.5), lambda s: 5.5 <= s.state.spent_s <= 7),
    ],
    ids=["trials", "trials as a float", "epochs", "few epochs", "time"],
)
def test_budgets_end_a_study_within_an_epoch(budget, check):
    done = study(budget=budget).run()
    assert check(done)
    assert done.state.counts.running == 0


def test_a_budget_of_epochs_counts_those_without_a_report():
    """Validated every third epoch only: as many are trained as with a report each."""
    trained = []

    def rarely(run):
        for epoch in run.epochs(6):
            trained.append(epoch)
            if epoch % 3 == 2:
                run.report(loss=1.0)

    done = study(rarely, budget=pk.Budget(epochs=60)).run()
    assert done.state.epochs == len(trained) == 60
    assert done.state.reports == 20


@pytest.mark.parametrize("limit", [3, 20, 64])
@pytest.mark.parametrize(
    "scheduler", [pk.Full(epochs=9), pk.ASHA(max_epochs=9, trials=None)], ids=["full", "asha"]
)
def test_a_fused_group_keeps_to_a_budget_of_epochs(scheduler, limit):
    """Of eight members, which would all begin another one: those that are too many leave, or never begin."""
    executor = pk.Simulated(2, seconds=1.0)
    done = study(fuse=8, budget=pk.Budget(epochs=limit), scheduler=scheduler, executor=executor).run()
    assert sum(len(trial.reports) for trial in done.trials) == limit
    assert done.state.closed.reason == "budget"


def remembers(run):
    """As ``curve``, with checkpoints."""
    floor = abs(math.log10(run.config["lr"]) + 2)
    run.load()
    for epoch in run.epochs(9):
        run.save(epoch)
        run.report(loss=floor + 1 / (epoch + 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"executor": pk.Simulated(4, slots_per_trial=0.5)},
        {"executor": pk.Simulated(4, slots_per_trial=2)},
        {"executor": pk.Simulated(2, overhead=pk.Overhead(1.2, 1.1, 3, 2)), "planner": pk.Fluid()},
        {"fuse": 4},
    ],
    ids=["plain", "halves", "pairs", "Fluid", "fused"],
)
@pytest.mark.parametrize(
    "scheduler",
    [
        pk.Full(trials=12),
        pk.Full(trials=12, epochs=9),
        pk.Halving(max_epochs=9),
        pk.Hyperband(max_epochs=9),
        pk.ASHA(max_epochs=9, trials=20),
        pk.PBT(population=6, max_epochs=9, interval=2),
    ],
    ids=["open", "full", "halving", "hyperband", "asha", "pbt"],
)
def test_a_study_in_sessions_of_some_epochs_each_is_the_same(scheduler, options, tmp_path):
    """Each session trains exactly as many as it is allowed, up to the end of the study, which is that of an
    uninterrupted one."""
    options = {"scheduler": scheduler, "executor": pk.Simulated(4), "seed": 4, **options}
    whole = study(remembers, **options).run()
    path, limit = tmp_path / "s.db", 13
    done = study(remembers, store=path, budget=pk.Budget(epochs=limit), **options).run()
    while done.state.closed.reason == "budget":
        assert done.state.epochs == limit
        done.state.validate()
        limit += 13
        done = pk.Study.load(path, budget=pk.Budget(epochs=limit)).run()
    assert done.state.closed.reason == "finished"
    if not isinstance(scheduler, pk.ASHA):  # whose promotions depend on who ends first
        found, wanted = ([(t.config, t.epoch, t.metrics) for t in each.trials] for each in (done, whole))
        assert found == wanted
        assert done.state.epochs == whole.state.epochs <= limit


def test_epochs_after_the_last_report_count():
    """In budgets, in reports and by trial: each of a function that reports two of its five epochs."""
    trained = []

    def early(run):
        for epoch in run.epochs(5):
            trained.append(run.trial)
            if epoch < 2:
                run.report(loss=1.0)

    done = study(early, scheduler=pk.Full(trials=3)).run()
    assert done.state.epochs == done.summary()["epochs"] == len(trained) == 15
    assert list(done.to_dataframe()["epochs"]) == [5, 5, 5]
    assert [t.epoch for t in done.trials] == [2, 2, 2]  # that it is known by
    trained.clear()
    budget = study(early, budget=pk.Budget(epochs=30), executor=pk.Simulated(1, seconds=1.0)).run()
    assert budget.state.epochs == len(trained) == 30
    budget.state.validate()


@pytest.mark.parametrize("sampler", [pk.Random, pk.TPE])
@pytest.mark.parametrize(
    "first", [3, 4, 8]
)  # with four devices, trials run out within a group or between two
@pytest.mark.parametrize(
    ("scheduler", "all_trials"),
    [
        (lambda: pk.Full(), 40),
        (lambda: pk.Full(trials=11), 11),
        (lambda: pk.Halving(max_epochs=9), 9),
        (lambda: pk.Hyperband(max_epochs=9), 17),
        (lambda: pk.ASHA(max_epochs=9, trials=None), 40),
        (lambda: pk.ASHA(max_epochs=9, trials=11), 11),
    ],
    ids=["full", "full 11", "halving", "hyperband", "asha", "asha 11"],
)
def test_a_larger_budget_of_trials_brings_more_of_them(tmp_path, scheduler, all_trials, first, sampler):
    """Raised twice: each time as many as allowed and planned, and who was given up stays as it was."""
    path = tmp_path / "s.db"
    done = study(
        scheduler=scheduler(), sampler=sampler(), budget=pk.Budget(trials=first, epochs=1000), store=path
    ).run()
    for limit in (first + 3, 40):
        over = [(t.id, t.config, t.epoch) for t in done.trials]
        done = pk.Study.load(path, budget=pk.Budget(trials=limit)).run()
        assert len(done.trials) == min(limit, all_trials)
        assert [(t.id, t.config, t.epoch) for t in done.trials][: len(over)] == over
        assert all(t.status.is_end for t in done.trials)
        assert done.state.closed.reason == "finished"
    again = pk.Study.load(path, budget=pk.Budget(trials=40)).run()  # there is nothing left to do
    assert len(again.state.sessions) == len(done.state.sessions)


def dies(trial, epoch, attempt):
    """Simulated workers that die again and again, each in its trial's fourth epoch."""
    return epoch == 3 and trial % 3 == 1


@pytest.mark.parametrize("limit", [6, 7, 8, None])
def test_members_that_fail_are_replaced_as_far_as_a_budget_of_trials_allows(limit, tmp_path):
    """Two of six fail, and one of those that take their places would, too."""
    path = tmp_path / "s.db"
    options = {
        "scheduler": pk.PBT(population=6, max_epochs=8, interval=2),
        "executor": pk.Simulated(devices=4, failure=dies),
    }
    budget = pk.Budget(trials=limit)
    done = study(remembers, budget=budget, **options).run()
    assert len(done.trials) == (limit or 8)
    assert done.state.counts.ended == len(done.trials)
    assert done.state.closed.reason == "finished"
    left = study(remembers, store=path, budget=pk.Budget(trials=limit, epochs=20), **options).run()
    assert left.state.closed.reason == "budget"
    resumed = pk.Study.load(path, budget=budget).run()
    assert [(t.id, t.config, t.epoch) for t in resumed.trials] == [
        (t.id, t.config, t.epoch) for t in done.trials
    ]


def test_more_trials_are_those_of_a_study_that_was_allowed_them_at_once(tmp_path):
    path = tmp_path / "s.db"
    study(scheduler=pk.Full(epochs=9), budget=pk.Budget(trials=3), store=path).run()
    more = pk.Study.load(path, budget=pk.Budget(trials=7)).run()
    plain = study(scheduler=pk.Full(epochs=9), budget=pk.Budget(trials=7)).run()
    assert [(t.config, t.seed) for t in more.trials] == [(t.config, t.seed) for t in plain.trials]


@pytest.mark.parametrize("sampler", [pk.Random, pk.TPE])
@pytest.mark.parametrize("kept", [True, False], ids=["stored", "in memory"])
def test_a_study_without_a_scheduler_goes_on_with_more_trials(tmp_path, kept, sampler):
    """Its number of trials was its own choice. With a sampler that does not learn they are those of a longer study."""
    path = tmp_path / "s.db" if kept else False
    done = study(sampler=sampler(), store=path).run()
    assert len(done.trials) == 50
    for limit, count in ((10, 50), (50, 50), (53, 53), (60, 60), (55, 60)):
        before = [(t.id, t.config, t.epoch) for t in done.trials]
        if kept:
            done = pk.Study.load(path, budget=pk.Budget(trials=limit)).run()
        else:
            done.budget = pk.Budget(trials=limit)
            done.run()
        assert len(done.trials) == count
        assert [(t.id, t.config, t.epoch) for t in done.trials][: len(before)] == before
        assert done.state.counts.completed == count
    assert len(done.state.sessions) == 3  # of five runs, two brought more
    if sampler is pk.Random:
        longer = study(scheduler=pk.Full(trials=60)).run()
        assert [(t.config, t.seed) for t in done.trials] == [(t.config, t.seed) for t in longer.trials]


def test_a_study_without_a_scheduler_is_given_more_trials_before_its_end(tmp_path):
    path = tmp_path / "s.db"
    left = study(store=path, name="left", sampler=pk.TPE())
    left.budget = pk.Budget(epochs=100)
    left.run()
    assert len(left.trials) < 50
    fewer = pk.Study.load(path, "left", budget=pk.Budget(trials=30)).run()
    assert fewer.state.counts.completed == 30
    more = pk.Study.load(path, "left", budget=pk.Budget(trials=40)).run()  # fewer than it has by itself
    assert more.state.counts.completed == 40
    unbound = pk.Study.load(path, "left", budget=pk.Budget())
    assert unbound.run().state.counts.completed == 50  # as many as it has by itself
    assert pk.Study.load(path, "left", budget=pk.Budget(trials=52)).run().state.counts.completed == 52


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        (pk.PBT(population=6, max_epochs=4, interval=2), "PBT trains one population"),
        (pk.Halving(max_epochs=9, trials=3), "all brackets of Halving"),
    ],
    ids=["PBT", "Halving"],
)
def test_a_scheduler_that_brings_no_more_trials_says_so(tmp_path, capsys, scheduler, why):
    path = tmp_path / "s.db"
    study(budget=pk.Budget(trials=3), scheduler=scheduler, store=path).run()
    assert len(pk.Study.load(path, budget=pk.Budget(trials=6)).run().trials) == 3
    said = capsys.readouterr().err
    assert why in said
    assert "no more trials" in said


@pytest.mark.parametrize("scheduler", [pk.Full(trials=5), pk.ASHA(max_epochs=9, trials=5)])
def test_a_scheduler_whose_own_number_of_trials_is_done_says_so(tmp_path, capsys, scheduler):
    path = tmp_path / "s.db"
    count = len(study(scheduler=scheduler, budget=None, store=path).run().trials)
    capsys.readouterr()
    for limit, told in ((count, False), (count + 1, True)):
        assert len(pk.Study.load(path, budget=pk.Budget(trials=limit)).run().trials) == count
        assert ("no more trials" in capsys.readouterr().err) == told


def test_studies_without_a_name_that_begin_at_once_get_different_ones(tmp_path):
    """On one store, as by scripts that are started side by side."""
    path, begin, names = tmp_path / "s.db", threading.Barrier(6), []

    def run():
        made = study(scheduler=pk.Full(trials=1), store=path)
        begin.wait()
        names.append(made.run().name)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["curve", *(f"curve-{number}" for number in range(2, 7))]


def test_a_study_that_ran_out_of_budget_goes_on_with_a_larger_one(tmp_path):
    path = tmp_path / "s.db"
    make = dict(scheduler=pk.Full(trials=12, epochs=9), store=path)
    first = study(budget=pk.Budget(epochs=30), **make).run()
    assert first.state.closed.reason == "budget"
    assert first.state.counts.completed < 12
    again = pk.Study.load(path, budget=pk.Budget(epochs=10_000)).run()
    assert again.state.closed.reason == "finished"
    assert again.state.counts.completed == 12
    plain = study(scheduler=pk.Full(trials=12, epochs=9)).run()
    assert [(t.config, dict(t.metrics)) for t in again.trials] == [
        (t.config, dict(t.metrics)) for t in plain.trials
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": pk.Full(trials=3, epochs=2)},
        {
            "scheduler": pk.Full(epochs=2),
            "budget": pk.Budget(trials=4),
        },  # ends with a group of all four devices
        {"scheduler": pk.ASHA(max_epochs=9, trials=None), "budget": pk.Budget(trials=8)},
        {"scheduler": pk.PBT(population=4, max_epochs=4, interval=2)},
        {"sampler": pk.Grid(2)},
    ],
    ids=["full", "budget", "asha", "pbt", "grid"],
)
def test_running_a_finished_study_again_changes_nothing(tmp_path, options):
    path = tmp_path / "s.db"
    study(**options, store=path).run()
    before = events_in(path)
    pk.Study.load(path).run()
    assert events_in(path) == before


def test_a_sampler_that_proposes_no_more_says_so(tmp_path, capsys):
    path = tmp_path / "s.db"
    study(sampler=pk.Grid(2), store=path).run()  # of two rates and all eight widths
    assert len(pk.Study.load(path, budget=pk.Budget(trials=20)).run().trials) == 16
    assert "its sampler has proposed all there is" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 2, 5, 17, 40, 77])
@pytest.mark.parametrize("sampler", [pk.Random(), pk.TPE()], ids=lambda s: type(s).__name__)
def test_a_journal_cut_anywhere_resumes_to_the_same_trials(tmp_path, cut, sampler):
    """What a crash leaves is a prefix of the journal; the resumed study must come to the same results."""
    path = tmp_path / "s.db"
    make = dict(
        scheduler=pk.Halving(max_epochs=9, trials=27), executor=pk.Simulated(devices=1), sampler=sampler
    )
    whole = study(store=path, name="s", **make).run()
    events = events_in(path)[:cut]
    store = open_store(path, write=True)
    entry = store.find("s")
    store.lock(entry.id)
    store.cut(entry.id, keep=cut)
    store.close()
    resumed = pk.Study.load(path, "s").run()
    assert events_in(path)[:cut] == events
    resumed.state.validate()
    assert [(t.id, t.config, t.status, t.epoch) for t in resumed.trials] == [
        (t.id, t.config, t.status, t.epoch) for t in whole.trials
    ]
    assert resumed.best.id == whole.best.id


def test_a_journal_of_another_study_is_refused(tmp_path):
    path = tmp_path / "s.db"
    study(scheduler=pk.Full(trials=6, epochs=4), store=path, budget=pk.Budget(epochs=5)).run()
    loaded = pk.Study.load(path, budget=pk.Budget(epochs=100))
    loaded.scheduler = pk.Halving(max_epochs=9, trials=27)
    with pytest.raises(InvalidInput, match="does not follow from this study"):
        loaded.run()


def test_a_failed_trial_is_kept_and_counted_and_never_best():
    def breaks(run):
        for _ in run.epochs(2):
            run.report(loss=0.0 if run.trial == 1 else 1.0)
            if run.trial == 1:
                raise RuntimeError("no luck")

    done = study(breaks, scheduler=pk.Full(trials=4)).run()
    failed = done.trials[1]
    assert failed.status is pk.TrialStatus.FAILED
    assert "no luck" in failed.reason
    assert 'raise RuntimeError("no luck")' in failed.error
    assert "penstock/" not in failed.error.replace(__file__, "")
    assert done.state.counts.failed == 1
    assert done.best.id != 1


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_failures_are_retried_as_configured(retries):
    def breaks(run):
        raise RuntimeError("always")

    done = study(breaks, scheduler=pk.Full(trials=2), retries=retries).run()
    assert [t.attempts for t in done.trials] == [retries + 1] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", None])
def test_non_finite_metrics_are_failures_with_a_reason(value):
    done = study(lambda run: run.report(loss=value), scheduler=pk.Full(trials=1)).run()
    assert done.trials[0].status is pk.TrialStatus.FAILED
    assert "loss" in done.trials[0].reason
    assert repr(value) in done.trials[0].reason


def test_a_stopping_rule_stops_only_whom_it_names():
    def flat(run):
        for epoch in run.epochs(20):
            run.report(loss=1.0 if run.trial % 2 else 1 / (epoch + 1))

    rule = pk.Plateau("loss", mode="min", patience=4)
    done = study(flat, scheduler=pk.Full(trials=4), stop=[rule]).run()
    assert [t.status.value for t in done.trials] == ["completed", "stopped", "completed", "stopped"]
    assert [t.epoch for t in done.trials][::2] == [20, 20]
    assert all(t.epoch < 20 for t in done.trials[1::2])


def test_warm_start_from_configurations_and_from_a_study():
    first = [{"lr": 0.01, "width": 3}, {"lr": 0.5, "width": 1}]
    done = study(scheduler=pk.Full(trials=6, epochs=9), warm_start=first).run()
    assert [dict(t.config) for t in done.trials[:2]] == first
    after = study(scheduler=pk.Full(trials=12, epochs=9), warm_start=done, seed=9).run()
    assert after.trials[0].config == done.best.config
    with pytest.raises(InvalidInput, match="lr"):
        study(warm_start=[{"lr": 7.0, "width": 1}], scheduler=pk.Full(trials=2)).run()


def test_ten_runs_of_one_script_keep_ten_studies(tmp_path):
    path = tmp_path / "s.db"
    names = [study(scheduler=pk.Full(trials=1), store=path).run().name for _ in range(3)]
    assert names == ["curve", "curve-2", "curve-3"]
    assert pk.Study.load(path).name == "curve-3"
    study(scheduler=pk.Full(trials=1), store=path, name="mine").run()
    with pytest.raises(InvalidInput, match="mine"):
        study(scheduler=pk.Full(trials=1), store=path, name="mine").run()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(minimize=None), "needs a goal"),
        (dict(scheduler=pk.ASHA), "ASHA"),
        (dict(sampler="tpe"), "tpe"),
        (dict(scheduler=pk.ASHA(sampler=pk.TPE())), "sampler"),
        (dict(scheduler=pk.Full()), "no end"),
        (dict(scheduler=pk.ASHA(trials=None)), r"no end: give ASHA\(trials="),
        (dict(scheduler=pk.Hyperband(iterations=None)), r"no end: give Hyperband\(iterations="),
        (dict(seed=-1), "-1"),
        (dict(seed=1.5), "1.5"),
        (dict(retries=-2), "-2"),
        (dict(timeout_s=0), "timeout_s"),
        (dict(store=True), "store"),
        (dict(keep="some"), "some"),
        (dict(budget=5), "budget"),
        (dict(executor="ray"), "ray"),
        (dict(name=""), "name"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(options, named):
    with pytest.raises(InvalidInput, match=named):
        study(**options)
    with pytest.raises(InvalidInput):
        pk.Study(5, SPACE, minimize="loss")
    with pytest.raises(InvalidInput, match="momentum"):
        pk.Study(pk.Command("python t.py --m {momentum}"), SPACE, minimize="loss")


def test_dataframe_and_summary_tell_the_same(tmp_path):
    done = study(scheduler=pk.ASHA(max_epochs=9, trials=9), store=tmp_path / "s.db").run()
    frame = done.to_dataframe()
    assert list(frame["trial"]) == list(range(9))
    assert frame["loss"].min() == pytest.approx(done.best.metrics["loss"])
    assert done.summary()["best"]["trial"] == done.best.id
    assert f"trial {done.best.id}" in str(done)


def test_groups_are_journalled_before_their_trials_start(tmp_path):
    path = tmp_path / "s.db"
    study(scheduler=pk.ASHA(max_epochs=9, trials=20), store=path).run()
    submitted: set[tuple[int, int]] = set()
    for event in events_in(path):
        if isinstance(event, Submitted):
            submitted |= {(s.trial.id, s.start) for s in event.segments}
        elif event.kind == "started":
            assert (event.trial, event.start) in submitted


def test_a_grid_without_a_scheduler_is_loaded_and_resumed(tmp_path):
    path = tmp_path / "grid.db"
    options = {"minimize": "loss", "sampler": pk.Grid(), "executor": pk.Simulated(devices=1, seconds=1.0)}
    study = pk.Study(two_epochs, {"x": pk.Choice(1, 2, 3)}, store=path, budget=pk.Budget(epochs=3), **options)
    study.run()
    resumed = pk.Study.load(path, budget=pk.Budget(epochs=100)).run()
    assert sorted(trial.config["x"] for trial in resumed.trials) == [1, 2, 3]
    assert {trial.status.value for trial in resumed.trials} == {"completed"}


def two_epochs(run):
    for _ in run.epochs(2):
        run.report(loss=run.config["x"])


def test_what_was_there_before_is_spared_the_collector_while_a_study_runs_and_no_longer():
    counts = []

    def train(run):
        counts.append(gc.get_freeze_count())
        return {"loss": 1.0}

    space = pk.Space(x=pk.Float(0, 1))
    executor = pk.Simulated(devices=1)
    pk.Study(train, space, minimize="loss", scheduler=pk.Full(trials=2), executor=executor, store=False).run()
    assert min(counts) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_study_that_never_had_a_trial_leaves_its_name_free(tmp_path):
    """A mistake that is found only at the first trial is mended in the script, which keeps its name for the study."""

    def study(**options):
        return pk.Study(
            lambda run: run.config["x"],
            {"x": pk.Float(0, 1)},
            minimize="loss",
            name="mine",
            store=tmp_path / "s.db",
            scheduler=pk.Full(trials=2),
            executor=pk.Local(1),
            **options,
        )

    cells = pk.Quantity("cells", of=lambda config: config["x"])
    with pytest.raises(InvalidInput, match="No configuration that keeps cells <= -1"):
        study(limits=[cells <= -1]).run()
    assert pk.Study.load(tmp_path / "s.db").trials == []
    assert len(study(limits=[cells <= 0.5]).run().trials) == 2
    with pytest.raises(InvalidInput, match="There is a study 'mine'"):
        study().run()
    with open_store(tmp_path / "s.db", write=False) as store:
        assert [entry.name for entry in store.studies()] == ["mine"]


def test_a_study_begins_whatever_the_others_of_its_store_are(tmp_path):
    """Their descriptions are not read: hundreds of them took megabytes, and a damaged one hindered all others."""
    store = tmp_path / "s.db"
    options = {
        "minimize": "loss",
        "executor": pk.Simulated(),
        "scheduler": pk.Full(trials=1, epochs=1),
        "store": store,
    }
    pk.Study(curve, SPACE, name="first", **options).run(view=None)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE penstock_studies SET spec = '{'")
    pk.Study(curve, SPACE, name="second", **options).run(view=None)
    pk.Study(curve, SPACE, **options).run(view=None)
    with open_store(store, write=False) as opened:
        assert opened.names() == {"first", "second", "curve"}


@pytest.mark.parametrize("store", ["s.db", "sqlite:///s.db"])
def test_a_study_finds_its_store_again_from_another_folder(tmp_path, monkeypatch, store):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    made = study(store=store, budget=pk.Budget(trials=3), scheduler=pk.Full(epochs=9)).run()
    loaded = pk.Study.load(store)
    monkeypatch.chdir(tmp_path / "other")
    assert loaded.best.config == made.best.config
    assert len(made.plot.history().data) > 0
    for each, trials in ((made, 5), (loaded, 7)):
        each.budget = pk.Budget(trials=trials)
        assert len(each.run().trials) == trials
    assert list((tmp_path / "other").iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert len(pk.Study.load(store).trials) == 7
