"""Fifty kill -9 of workers and drivers (benchmarks/hardening/kills.py: a thousand), and that the check would notice."""

import shutil
from pathlib import Path

import pytest

from penstock.testing.kills import Case, check, make_study, read_journal, read_log, storm

STUB = Path(__file__).parents[1] / "energy" / "nvml_stub" / "nvml_stub.py"


@pytest.mark.faults
def test_forty_kills_lose_nothing_and_double_nothing(tmp_path):
    tally = storm(tmp_path, kills=40, seed=11)
    assert tally.wrong == 0, tally.said
    assert tally.kills == 40
    assert min(tally.driver_kills, tally.worker_kills) >= 3  # who it hits depends on the machine, too
    assert tally.studies >= 3
    assert list(tmp_path.iterdir()) == []  # every study was checked


@pytest.mark.faults
def test_ten_kills_leave_no_power_limit_behind(tmp_path):
    tally = storm(tmp_path, kills=10, seed=3, stub=STUB)
    assert tally.wrong == 0, tally.said
    assert tally.kills == 10
    assert tally.limited >= 1  # the limits were other ones when a process was killed


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """A case with its journal and its other book, both right."""
    folder = tmp_path_factory.mktemp("books")
    case = Case("full", 5, 1, 0.0, saves=True)
    make_study(case, folder / "s.db", folder / "book", undisturbed=True).run()
    return case, folder


def drop_an_epoch(lines):
    return [line for line in lines if line != lines[3]]


def invent_an_epoch(lines):
    what, trial, _, pid = lines[-1].split()
    return [*lines, f"{what} {trial} 99 {pid}"]


def run_one_again(lines):
    return [*lines, lines[-1]]


def run_one_elsewhere(lines):
    what, trial, epoch, _ = lines[0].split()
    return [lines[0], f"{what} {trial} {epoch} 1", *lines[1:]]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda lines: lines, {}),
        (drop_an_epoch, {"lost": 1}),
        (invent_an_epoch, {"lost": 1}),
        (run_one_again, {"doubled": 1}),
        (run_one_elsewhere, {"doubled": 4}),  # its four epochs
    ],
)
def test_the_check_notices(books, tmp_path, spoil, found):
    case, folder = books
    for name in ("s.db", "book"):
        shutil.copy(folder / name, tmp_path)
    store, log = tmp_path / "s.db", tmp_path / "book"
    state, _ = read_journal(store)
    before = [(10_000, len(read_log(log)))] if spoil is run_one_again else []
    log.write_text("\n".join(spoil(log.read_text().splitlines())) + "\n")
    tally = check(case, store, log, state, before)
    assert {
        name: getattr(tally, name) for name in ("lost", "doubled", "different") if getattr(tally, name)
    } == found
    assert bool(tally.wrong) == bool(found)


def test_the_check_notices_another_result(books):
    case, folder = books
    state, _ = read_journal(folder / "s.db")
    state.trials[3].reports[-1].metrics["loss"] += 1e-9
    tally = check(case, folder / "s.db", folder / "book", state, [])
    assert (tally.different, tally.lost, tally.doubled) == (1, 0, 0)


def test_found_a_trial_that_ends_by_itself_and_was_killed_before_it_could_say_so(tmp_path):
    """Its segment goes further than the function does: nothing is left to do, and that is no failure."""
    from penstock.train._worker import Settings, Spec, execute

    class Silent:
        def reported(self, report): ...
        def saved(self, epoch, path): ...
        def told(self): ...

    def train(run):
        run.load()
        for epoch in run.epochs(4):
            run.save(epoch)
            run.report(loss=1.0)

    def ends(start, known):
        return execute(
            train,
            Spec(0, {}, 0, start, 9, True, None, None, known, 0),
            Settings(tmp_path, ("loss",)),
            Silent(),
        )

    whole = ends(start=0, known=0)
    assert (whole.status, whole.epoch) == ("completed", 4)
    assert ends(start=0, known=4) == whole
    promoted = ends(start=4, known=4)  # it was let train on, and did not
    assert promoted.status == "failed"
    assert "reported nothing" in promoted.reason


def test_found_a_checkpoint_that_the_study_never_heard_of_is_told(tmp_path):
    """The driver was killed between the writing of a checkpoint and the news of it: the next segment must find it."""
    from penstock.train._worker import Settings, Spec, execute

    class Sink:
        def __init__(self):
            self.saves, self.reports = [], []

        def reported(self, report):
            self.reports.append(report[0])

        def saved(self, epoch, path):
            self.saves.append((epoch, path))

        def told(self): ...

    def train(run):
        run.load()
        for epoch in run.epochs():
            run.save(epoch)
            run.report(loss=1.0)

    def ends(known, named):
        sink = Sink()
        execute(
            train, Spec(0, {}, 0, 0, 3, False, None, named, known, 0), Settings(tmp_path, ("loss",)), sink
        )
        return sink

    first = ends(0, None)
    assert [epoch for epoch, _ in first.saves] == first.reports == [1, 2, 3]
    heard = dict(first.saves)
    again = ends(2, heard[2])
    assert (again.reports, again.saves) == ([3], [(3, heard[3])])
    assert ends(3, heard[3]).saves == []  # all of it is known
