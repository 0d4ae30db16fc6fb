"""Trials that pause in the middle of a rung so that others can go on: the same results, sooner, nobody lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as pk
from penstock.core import (
    Checkpoint,
    Device,
    Ended,
    Event,
    Free,
    Placement,
    Reported,
    Resize,
    Saved,
    Share,
    Started,
    StudyState,
    TrialStatus,
)
from penstock.plan import _fluid
from penstock.schedule import StopRule
from penstock.study._ledger import Foresight, Ledger
from penstock.testing.executors import segment
from penstock.testing.journals import events_in
from penstock.train._checkpoint import FileCheckpoints

ALONE = pk.Overhead(alpha=2.5, epsilon_s=1.0)  # neither sharing nor spreading pays


def curve(run: pk.Run) -> None:
    state = run.load() or {"seen": []}
    for epoch in run.epochs():
        state["seen"].append(epoch)
        run.save(state)
        run.report(loss=run.config["x"] + 1 / len(state["seen"]))


def rarely(run: pk.Run) -> None:
    """Saves a checkpoint only where a rung of the study ends."""
    state = run.load() or {"seen": []}
    for epoch in run.epochs():
        state["seen"].append(epoch)
        if epoch + 1 in (1, 3, 9, 27):
            run.save(state)
        run.report(loss=run.config["x"] + 1 / len(state["seen"]))


def study(work: Any, planner: Any, store: Any = False, **options: Any) -> pk.Study:
    executor = pk.Simulated(2, seconds=10.0, overhead=ALONE, failure=options.pop("failure", None))
    return pk.Study(
        work,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Halving(max_epochs=27),
        sampler=pk.Random(),
        executor=executor,
        planner=planner,
        store=store,
        seed=3,
        **options,
    )


def results(done: pk.Study) -> dict[int, Any]:
    return {r.id: [(p.epoch, dict(p.metrics)) for p in r.reports] for r in done.trials}


def pauses(events: list[Event]) -> list[Ended]:
    return [event for event in events if isinstance(event, Ended) and event.kept]


def test_a_rung_of_three_on_two_devices_ends_after_one_and_a_half(tmp_path: Path) -> None:
    """Three trials of six further epochs of 10 s: 90 s on each device and 1 s for the pause, not 120 s."""
    plain = study(curve, None).run()
    fluid = study(curve, pk.Fluid(), tmp_path / "s.db").run()
    fluid.state.validate()
    assert results(fluid) == results(plain)
    assert plain.state.spent_s - fluid.state.spent_s == pytest.approx(120 - 91)
    events = events_in(tmp_path / "s.db")
    (paused,) = pauses(events)
    assert paused.epoch == 6
    (again,) = [e for e in events if isinstance(e, Started) and e.trial == paused.trial and e.start == 6]
    assert again.time_s > paused.time_s
    epochs = [e.epoch for e in events if isinstance(e, Reported) and e.trial == paused.trial]
    assert epochs == list(range(1, len(epochs) + 1))  # none is lost, none is trained twice
    assert fluid.state.trials[paused.trial].status.is_end


def test_who_does_not_save_in_every_epoch_is_never_paused(tmp_path: Path) -> None:
    fluid = study(rarely, pk.Fluid(), tmp_path / "s.db").run()
    assert not pauses(events_in(tmp_path / "s.db"))
    assert results(fluid) == results(study(rarely, None).run())


def test_a_study_that_is_cut_off_while_a_trial_pauses_goes_on_from_there(tmp_path: Path) -> None:
    whole = study(curve, pk.Fluid(), tmp_path / "whole.db").run()
    (paused,) = pauses(events_in(tmp_path / "whole.db"))
    for number, after_s in enumerate((-5.0, 0.0, 15.0, 35.0)):
        path = tmp_path / f"cut{number}.db"
        study(curve, pk.Fluid(), path, budget=pk.Budget(time_s=paused.time_s + after_s)).run()
        resumed = pk.Study.load(path, budget=pk.Budget()).run()
        assert results(resumed) == results(whole)
        assert resumed.state.counts.ended == resumed.state.counts.total


@pytest.mark.parametrize("epochs", [46, 50, 53, 57, 60, 63])
def test_a_budget_of_epochs_that_ends_around_a_pause_holds(epochs: int, tmp_path: Path) -> None:
    """27 + 18 epochs of earlier rungs, then three trials of six more, one of which pauses after three of them."""
    done = study(curve, pk.Fluid(), tmp_path / "s.db", budget=pk.Budget(epochs=epochs)).run()
    assert done.state.epochs == epochs
    reported = [(e.trial, e.epoch) for e in events_in(tmp_path / "s.db") if isinstance(e, Reported)]
    assert len(reported) == len(set(reported))
    resumed = pk.Study.load(tmp_path / "s.db", budget=pk.Budget()).run()
    assert results(resumed) == results(study(curve, None).run())


def test_failures_around_pauses_are_retried_and_nobody_is_lost() -> None:
    plain = study(curve, None).run()
    for at in (4, 6, 7, 9):
        done = study(curve, pk.Fluid(), failure=lambda _, epoch, attempt, at=at: epoch == at and not attempt)
        assert results(done.run()) == results(plain)
        assert sum(record.retries for record in done.trials) >= 1


def test_a_trial_that_is_dropped_while_it_pauses_stays_ended(tmp_path: Path) -> None:
    """A rule that ends a trial at the report at which it was to pause wins."""

    class AtSix(StopRule):
        def start(self) -> None:
            pass

        def observe(self, trial: int, epoch: int, metrics: Any) -> str | None:
            return "enough" if epoch == 6 else None

    done = study(curve, pk.Fluid(), tmp_path / "s.db", stop=AtSix()).run()
    done.state.validate()
    assert done.state.counts.ended == done.state.counts.total
    # Those who were not to pause are told after that report, and end at the next one.
    assert sorted(r.epoch for r in done.trials if r.status is TrialStatus.STOPPED and r.epoch > 3) == [
        6,
        7,
        7,
    ]
    assert not pauses(events_in(tmp_path / "s.db"))


def test_the_ledger_knows_who_saves_and_what_is_left_after_a_pause() -> None:
    ledger = Ledger(Foresight(ALONE))
    ledger.saw([Free(Device("cpu:0"))])
    placed = Placement((segment(0, until=3),), (Share("cpu:0"),), since_s=5.0, course="relay")
    ledger.launched([placed])
    ledger.started(Started(0.0, 0, 0, placed.shares), placed.segments[0])
    for epoch in (1, 2):
        ledger.reported(Reported(10.0 * epoch, 0, epoch, {"loss": 1.0}, 10.0), {})
    assert not ledger.expect(placed).pausable  # nothing was saved
    for epoch in (1, 2):
        ledger.saved(Saved(10.0 * epoch, 0, epoch, "path"))
    assert ledger.expect(placed).pausable
    ledger.asked([Resize(placed, (), 3)])
    assert [due.shares for due in ledger.take_due()] == [()]
    ledger.ended(Ended(30.0, 0, TrialStatus.PAUSED, 2, kept=True))
    rest = ledger.take_paused(0)
    assert rest is not None
    assert (rest.segments[0].start, rest.segments[0].until, rest.shares) == (2, 3, ())
    assert (rest.since_s, rest.course) == (5.0, "relay")
    assert rest.expected_s == pytest.approx(10.0)
    assert ledger.take_paused(0) is None


def test_a_copy_that_pauses_goes_on_with_its_own_checkpoints_however_often_it_begins_again(
    tmp_path: Path,
) -> None:
    """PBT's exploit: its checkpoints are known by whom it was copied from, before the pause and after it."""
    copied = segment(1, until=6, start=2, copy_from=Checkpoint(0, 2))
    ledger = Ledger(Foresight(ALONE))
    ledger.saw([Free(Device("cpu:0"))])
    placed = Placement((copied,), (Share("cpu:0"),), pausable=True)
    ledger.launched([placed])
    ledger.asked([Resize(placed, (), 4)])
    ledger.started(Started(0.0, 1, 2, placed.shares), copied)
    ledger.ended(Ended(20.0, 1, TrialStatus.PAUSED, 4, kept=True))
    rest = ledger.take_paused(1)
    assert rest is not None
    turns = {}
    for turn in (rest.segments[0], copied):  # after the pause, and as its worker's death lets it begin again
        assert turn.copy_from is not None
        turns[turn.start] = FileCheckpoints(
            tmp_path,
            1,
            seed=turn.trial.seed,
            config=turn.trial.config,
            start=turn.start,
            until=turn.until,
            copy_from=(turn.copy_from.trial, turn.copy_from.epoch),
        )
    assert list(turns) == [4, 2]
    turns[4].stage({"seen": 5})
    assert turns[4].commit(5, ()) is not None
    found = turns[2].find()
    assert found is not None
    assert found.epoch == 5


class Wait(nn.Module):
    """Makes epochs last, so that their times are about the same."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return inputs


def net(width: int) -> nn.Module:
    return nn.Sequential(
        Wait(), nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1)
    ).double()


def data() -> pk.Data:
    inputs = torch.randn(240, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    targets = inputs[:, :1] * inputs[:, 1:2]
    return pk.Data((inputs[:200], targets[:200]), (inputs[200:], targets[200:]))


def test_on_real_workers_paused_trials_end_as_those_that_were_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random states, dropout's too, and the optimizer's go on where they were, on whatever worker."""
    monkeypatch.setattr(_fluid, "_RISK", 0.0)  # whatever else the machine does: pause where it seems to pay

    def tune(planner: Any, name: str) -> pk.Study:
        task = pk.Task(
            net, data, functional.mse_loss, optimizer=torch.optim.Adam, defaults={"width": 8}, batch_size=50
        )
        return pk.Study(
            task,
            pk.Space(lr=pk.Float(1e-4, 1e-1, log=True)),
            minimize="loss",
            scheduler=pk.Halving(max_epochs=9, min_epochs=3, trials=9),
            sampler=pk.Random(),
            executor=pk.Local(2),
            planner=planner,
            store=tmp_path / name,
            fuse=False,
            seed=1,
        ).run(view="quiet")

    plain = tune(None, "plain.db")
    fluid = tune(pk.Fluid(pk.Overhead(alpha=2.5, epsilon_s=0.001)), "fluid.db")
    assert pauses(events_in(tmp_path / "fluid.db"))
    assert results(fluid) == results(plain)


def brackets(executor: Any, planner: Any, path: Path, work: Any = curve) -> pk.Study:
    return pk.Study(
        work,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Hyperband(max_epochs=27),
        sampler=pk.Random(),
        executor=executor,
        planner=planner,
        store=path,
        seed=3,
    ).run(view="quiet")


SHARED = pk.Overhead(alpha=1.4, max_sharing=2, epsilon_s=1.0)


def test_new_trials_pause_for_finalists_and_end_as_without(tmp_path: Path) -> None:
    """Of Hyperband's brackets: who pauses is new, and goes on to where it was to go."""
    fluid = brackets(pk.Simulated(4, seconds=10.0, overhead=SHARED), pk.Fluid(), tmp_path / "fluid.db")
    plain = brackets(pk.Simulated(4, seconds=10.0), None, tmp_path / "plain.db")
    fluid.state.validate()
    assert results(fluid) == results(plain)
    events = events_in(tmp_path / "fluid.db")
    paused = pauses(events)
    assert paused
    for event in paused:
        begun = [e for e in events if isinstance(e, Started) and e.trial == event.trial]
        assert begun[0].start == 0
        assert event.epoch in {e.start for e in begun}


def test_a_study_that_is_cut_off_while_new_trials_pause_for_a_finalist_goes_on(tmp_path: Path) -> None:
    def executor() -> pk.Simulated:
        return pk.Simulated(4, seconds=10.0, overhead=SHARED)

    whole = brackets(executor(), pk.Fluid(), tmp_path / "whole.db")
    first = pauses(events_in(tmp_path / "whole.db"))[0]
    for number, after_s in enumerate((-5.0, 0.0, 5.0, 45.0)):
        path = tmp_path / f"cut{number}.db"
        cut = pk.Study(
            curve,
            pk.Space(x=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Hyperband(max_epochs=27),
            sampler=pk.Random(),
            executor=executor(),
            planner=pk.Fluid(),
            store=path,
            seed=3,
            budget=pk.Budget(time_s=first.time_s + after_s),
        ).run(view="quiet")
        assert cut.state.counts.ended < whole.state.counts.ended
        resumed = pk.Study.load(path, budget=pk.Budget()).run(view="quiet")
        assert results(resumed) == results(whole)


@pytest.mark.parametrize("after_s", [-5.0, -0.5, 5.0])
def test_who_was_to_pause_when_the_budget_was_used_up_may_finish_with_the_others(
    after_s: float, tmp_path: Path
) -> None:
    def tune(name: str, budget: pk.Budget) -> list[Event]:
        pk.Study(
            curve,
            pk.Space(x=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Hyperband(max_epochs=27),
            sampler=pk.Random(),
            executor=pk.Simulated(4, seconds=10.0, overhead=SHARED),
            planner=pk.Fluid(),
            store=tmp_path / name,
            seed=3,
            budget=budget,
        ).run(view="quiet")
        return events_in(tmp_path / name)

    first = pauses(tune("whole.db", pk.Budget()))[0]
    limit_s = first.time_s + after_s
    events = tune("cut.db", pk.Budget(time_s=limit_s, finish=True))
    running: set[int] = set()
    begun: set[int] = set()  # after that
    for event in events:
        if isinstance(event, Started):
            (running if event.time_s <= limit_s else begun).add(event.trial)
        elif isinstance(event, Ended) and event.time_s <= limit_s:
            running.discard(event.trial)
    assert (first.trial in running) == (after_s < 0)
    state = StudyState.of(events)
    state.validate()
    assert not [trial for trial in running if state.trials[trial].unfinished]
    assert begun <= running  # and no other is begun


def test_who_is_to_be_tried_again_when_the_budget_is_used_up_may_finish_too() -> None:
    done = pk.Study(
        curve,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Full(trials=9, epochs=6),
        sampler=pk.Random(),
        executor=pk.Simulated(
            2, seconds=10.0, failure=lambda trial, epoch, attempt: epoch == 4 and not attempt
        ),
        budget=pk.Budget(time_s=25.0, finish=True),
        store=False,
    ).run(view="quiet")
    assert done.state.closed is not None
    assert done.state.closed.reason == "budget"
    assert [(trial.epoch, trial.retries, trial.status) for trial in done.trials[:2]] == [
        (6, 1, TrialStatus.COMPLETED)
    ] * 2
    assert not any(trial.epoch for trial in done.trials[2:])


def lasting(run: pk.Run) -> None:
    state = run.load() or {"seen": []}
    for epoch in run.epochs():
        time.sleep(0.01)
        state["seen"].append(epoch)
        run.save(state)
        run.report(loss=run.config["x"] + 1 / len(state["seen"]))


def test_on_real_workers_finalists_change_no_result(tmp_path: Path) -> None:
    fluid = brackets(pk.Local(2), pk.Fluid(SHARED), tmp_path / "fluid.db", lasting)
    plain = brackets(pk.Simulated(4, seconds=10.0), None, tmp_path / "plain.db", lasting)
    assert results(fluid) == results(plain)
    assert fluid.state.counts.failed == 0
