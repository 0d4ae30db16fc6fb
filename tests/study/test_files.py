"""Which checkpoint is kept: that of the trial that counts as the best, whatever the order of the ends."""

import itertools
import time
from collections import deque

import pytest

import penstock as pk
from penstock.core import (
    Checkpoint,
    Device,
    Ended,
    Free,
    Noted,
    Reported,
    Saved,
    Segment,
    SessionOpened,
    Share,
    Started,
    StudyState,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.goal import Budget, Goal
from penstock.goal._objective import ranked
from penstock.study._engine import Engine, Setup
from penstock.study._files import CheckpointKeeper, gone

TARGET = {"model": "target"}
# number -> options, parent, status at the end, loss
TRIALS = {
    0: ({}, None, TrialStatus.COMPLETED, 0.1),
    1: (TARGET, 0, TrialStatus.STOPPED, 0.2),
    2: (TARGET, 0, TrialStatus.COMPLETED, 0.4),
    3: (TARGET, 0, TrialStatus.COMPLETED, 0.3),
    4: (TARGET, 9, TrialStatus.COMPLETED, 0.35),
}
ORDERS = list(itertools.permutations(TRIALS))
NOBODY_CHOSEN, BEST_CHOSEN, OTHER_CHOSEN = None, [0], [9]


# Every trained model may yet be chosen (and till then the best of the others is kept besides); trial 4 is worse than
# the best of those chosen; trial 3 is better than 4, which is chosen.
@pytest.mark.parametrize(
    ("chosen", "best_first", "kept"),
    [
        (NOBODY_CHOSEN, [3, 4, 2], ["1.ckpt", "2.ckpt", "3.ckpt", "4.ckpt"]),
        (BEST_CHOSEN, [3, 2], ["3.ckpt"]),
        (OTHER_CHOSEN, [4], ["3.ckpt", "4.ckpt"]),
    ],
)
@pytest.mark.parametrize("when", range(0, 6, 5))  # before all the ends, after them
@pytest.mark.parametrize("order", ORDERS[::7], ids=str)
def test_the_best_trials_checkpoint_is_kept(order, when, chosen, best_first, kept, tmp_path):
    goal = Goal.of("loss", None)
    keeper = CheckpointKeeper(tmp_path, "best", goal)
    segments = tuple(
        Segment(Trial(i, {}, i, parent), until=4, last=True, options=options)
        for i, (options, parent, *_) in TRIALS.items()
    )
    state = StudyState.of([SessionOpened(0.0), Submitted(0.0, 5, segments)])
    choice = [] if chosen is None else [Noted(0.0, "chosen", {"trials": chosen})]
    for event in choice if when == 0 else ():
        state.apply(event)
    for i in order:
        *_, status, loss = TRIALS[i]
        path = f"{i}.ckpt"
        (tmp_path / path).touch()
        events = (
            Started(1.0, i, 0, (Share("cpu:0", 1.0),)),
            Reported(2.0, i, 4, {"loss": loss}),
            Saved(2.0, i, 4, path),
            Ended(3.0, i, status, 4),
        )
        for event in events:
            state.apply(event)
            if isinstance(event, Saved | Ended):
                keeper.on(event, state, set)
    for event in choice if when else ():
        state.apply(event)
    keeper.finish(state)
    assert [record.id for record in ranked(goal, state.trials.values())] == best_first
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("there", "lost"),
    [([], True), ([3], False), ([4], False), ([2, 4], False), ([9], True), (["4.ckpt.tmp", "x"], True)],
    ids=str,
)
def test_a_checkpoint_is_gone_where_no_later_one_that_the_journal_missed_is_there(there, lost, tmp_path):
    """A driver that is killed has not heard of the last ones, and a worker keeps two: the journal's may be deleted."""
    folder = tmp_path / "checkpoints" / "0"
    folder.mkdir(parents=True)
    for name in there:
        (folder / (f"{name}.ckpt" if isinstance(name, int) else name)).touch()
    state = StudyState.of(
        [
            SessionOpened(0.0),
            Submitted(0.0, 4, (Segment(Trial(0, {}, 0), until=4, last=True),)),
            Started(1.0, 0, 0, (Share("cpu:0", 1.0),)),
            Reported(2.0, 0, 3, {"loss": 1.0}),
            Saved(2.0, 0, 3, "checkpoints/0/3.ckpt"),
        ]
    )
    told = gone(tmp_path, state)
    assert told == (
        [f"Trial 0: its checkpoint {folder / '3.ckpt'} is gone; it starts again."] if lost else []
    )


def test_copies_whose_checkpoint_is_gone_keep_a_budget_of_epochs(tmp_path):
    """The copy begins anew, and what it was to be spared counts, too."""
    gone, begun = tmp_path / "gone", tmp_path / "begun"

    def train(run):
        def wait_for(file):
            until_s = time.monotonic() + 300
            while not file.exists():
                assert time.monotonic() < until_s
                time.sleep(0.01)

        if run.trial == 1:  # fails once the other one's checkpoint is there, and takes it with it
            saved = tmp_path / "s.db.files" / "study-1" / "checkpoints" / "0" / "2.ckpt"
            wait_for(saved)
            for each in saved.parent.iterdir():
                each.unlink()
            gone.touch()
            raise ValueError("on purpose")
        for epoch in run.epochs():
            if run.trial == 2:
                begun.touch()
            elif gone.exists():
                wait_for(begun)  # it begins again, too: what it saves now must not be there to copy
            run.save(epoch)
            run.report(loss=float(epoch))

    study = pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.PBT(population=2, max_epochs=4, interval=2),
        sampler=pk.Random(),
        executor=pk.Local(slots=2),
        budget=pk.Budget(epochs=6),
        store=tmp_path / "s.db",
    ).run()
    copy = study.trials[2]
    assert copy.segment.copy_from.trial == 0
    assert copy.reports[0].epoch == 1  # nothing was there to copy
    assert sum(len(record.reports) for record in study.trials) == study.state.epochs == 6


def test_copies_of_an_earlier_simulated_session_keep_a_budget_of_epochs(tmp_path):
    """Its checkpoints are gone: a copy begins anew, and what it was to be spared counts."""

    def train(run):
        for epoch in run.epochs():
            if run.trial == 1:
                raise ValueError("on purpose")
            run.save(epoch)
            run.report(loss=float(epoch))

    first = pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.PBT(population=3, max_epochs=12, interval=4),
        sampler=pk.Random(),
        executor=pk.Simulated(3),
        budget=pk.Budget(epochs=8),
        store=tmp_path / "s.db",
    ).run()
    assert first.state.epochs == 8
    for limit in range(9, 20, 2):
        done = pk.Study.load(tmp_path / "s.db", budget=pk.Budget(epochs=limit)).run()
        assert done.state.epochs == limit


class Unwalked(deque):
    """A queue that is as long as a study has trials: nobody is to go through it at every checkpoint."""

    def __iter__(self):
        raise AssertionError("the whole queue was gone through")


def test_what_is_to_be_copied_is_kept_as_long_as_the_copy_may_begin_again():
    """Also by a trial that has left with its driver's drain, and will go on at the next resume."""
    setup = Setup(
        space=pk.Space(x=pk.Float(0, 1)),
        goal=Goal.of("loss", None),
        scheduler=pk.PBT(population=2, max_epochs=4, interval=2, quantile=0.5),
        sampler=pk.Random(),
        planner=(),
        budget=Budget(),
    )
    engine = Engine(setup)
    device = [Free(Device("a"), 1.0, 9)]
    list(engine.submit(device, 0.0))
    for trial in (0, 1):
        engine.apply(Started(1.0, trial, 0, (Share("a"),)))
        engine.apply(Reported(2.0, trial, 2, {"loss": float(trial)}))
        engine.apply(Ended(2.0, trial, TrialStatus.PAUSED, 2))
    assert engine.pins() == set()
    list(engine.submit(device, 3.0))
    engine.queue = Unwalked()
    assert engine.pins() == {Checkpoint(0, 2)}
    engine.apply(Started(4.0, 1, 2, (Share("a"),)))
    engine.apply(Ended(5.0, 1, TrialStatus.PAUSED, 2, kept=True))
    assert engine.pins() == {Checkpoint(0, 2)}
    engine.apply(SessionOpened(6.0))
    engine.apply(Started(7.0, 1, 2, (Share("a"),)))
    engine.apply(Reported(8.0, 1, 4, {"loss": 1.0}))
    engine.apply(Ended(8.0, 1, TrialStatus.COMPLETED, 4))
    assert engine.pins() == set()
