"""Which checkpoint is kept: that of the trial that counts as the best, whatever the order of the ends."""

import itertools

import pytest

from penstock.core import (
    Ended,
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
from penstock.goal import Goal
from penstock.goal._objective import ranked
from penstock.study._files import CheckpointKeeper, gone

TARGET = {"model": "target"}
# number -> options, status at the end, loss
TRIALS = {
    0: ({}, TrialStatus.COMPLETED, 0.1),
    1: (TARGET, TrialStatus.STOPPED, 0.2),
    2: (TARGET, TrialStatus.COMPLETED, 0.4),
    3: (TARGET, TrialStatus.COMPLETED, 0.3),
}


@pytest.mark.parametrize("order", list(itertools.permutations(TRIALS)), ids=str)
def test_the_best_trials_checkpoint_is_kept(order, tmp_path):
    goal = Goal.of("loss", None)
    keeper = CheckpointKeeper(tmp_path, "best", goal)
    segments = tuple(
        Segment(Trial(i, {}, i), until=4, last=True, options=options) for i, (options, *_) in TRIALS.items()
    )
    state = StudyState.of([SessionOpened(0.0), Submitted(0.0, 4, segments)])
    for i in order:
        _, status, loss = TRIALS[i]
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
    keeper.finish(state)
    assert [record.id for record in ranked(goal, state.trials.values())] == [3, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["3.ckpt"]


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
