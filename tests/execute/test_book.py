"""The bookkeeping of launches, without any worker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import Ended, Placement, Reported, Resized, Share, Started, TrialStatus
from penstock.core.errors import ExecutorError, InvalidInput
from penstock.execute import Launch
from penstock.execute._book import Book, Flight
from penstock.testing.executors import segment


def flown(book: Book, *trials: int, shares: tuple[Share, ...] = (Share("a"),), **options: Any) -> Flight:
    """A flight that a worker has, its shares held."""
    placement = Placement(tuple(segment(trial) for trial in trials), shares, **options)
    flight = book.flight(Launch(placement, (None,) * len(trials), (0,) * len(trials)))
    book.add(flight)
    book.holdings.hold(flight.shares, exclusive=flight.exclusive)
    flight.sent = True
    return flight


def start(trial: int, time_s: float = 1.0) -> tuple[Any, ...]:
    return "s", 1, trial, time_s, 0


def report(trial: int, epoch: int, time_s: float = 2.0) -> tuple[Any, ...]:
    return "r", 1, trial, time_s, epoch, {"loss": 0.5}, 0.1, None


def end(trial: int, status: str = "completed", *, kept: bool = False, energy: Any = None) -> tuple[Any, ...]:
    return "e", 1, trial, 3.0, status, 3, "why", "", kept, energy


def told(book: Book) -> list[str]:
    return [type(event).__name__ for event in book.take_events()]


def test_a_flight_is_told_from_its_start_to_its_end() -> None:
    book = Book()
    flight = flown(book, 0)
    assert book.hear(flight, start(0), 1.0) is None
    assert book.hear(flight, report(0, 1), 2.0) is None
    ended = book.hear(flight, end(0), 3.0)
    assert isinstance(ended, Ended)
    assert told(book) == ["Started", "Reported"]  # the end is the caller's to decide on
    book.end(flight, ended)
    assert told(book) == ["Ended"]
    assert (book.flights, book.of(0), flight.open) == ({}, None, set())
    assert book.take_events() == []


def test_times_of_a_trial_never_go_back() -> None:
    """Those of another machine are carried over, with an error."""
    book = Book()
    flight = flown(book, 0)
    book.hear(flight, start(0), 5.0)
    book.hear(flight, report(0, 1), 4.0)
    book.fail(flight, 3.0, "gone", "", lost=True)
    assert [event.time_s for event in book.take_events()] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("begun", [(), (3,), (3, 1)])
def test_a_worker_that_dies_ends_all_its_trials_with_what_they_reported(begun: tuple[int, ...]) -> None:
    """Also one that dies while it tells who begins: an end without a start is none, and would be waited for."""
    book = Book()
    flight = flown(book, 3, 1)
    for trial in begun:
        book.hear(flight, start(trial), 1.0)
    if begun:
        book.hear(flight, report(3, 2), 2.0)
    book.fail(flight, 9.0, "its worker died", "last words", lost=True)
    events = book.take_events()
    starts = [event for event in events if isinstance(event, Started)]
    assert sorted(event.trial for event in starts) == [1, 3]  # one each, told now if not before
    assert {event.fused for event in starts} == {(3, 1)}
    ends = [event for event in events if isinstance(event, Ended)]
    assert [(e.trial, e.status, e.epoch, e.lost) for e in ends] == [
        (1, TrialStatus.FAILED, 0, True),
        (3, TrialStatus.FAILED, 2 if begun else 0, True),
    ]
    assert book.flights == {}


def test_what_is_recalled_waits_before_the_others_and_keeps_nothing() -> None:
    book = Book()
    first, second = flown(book, 0, max_devices=2), flown(book, 1, shares=(Share("b"),))
    book.resize(0, [Share("a"), Share("c")])
    book.waiting.append(second)
    book.recall(first)
    assert list(book.waiting) == [first, second]
    assert (first.sent, first.target, book.holdings.free("c")) == (False, (), 1.0)


# -- changing shares ------------------------------------------------------------------------------------------


def test_new_shares_are_kept_until_the_change() -> None:
    book = Book()
    flight = flown(book, 0, max_devices=2)
    assert book.resize(0, [Share("a"), Share("b")]) is flight
    assert book.holdings.free("b") == 0.0
    assert flight.claims == (Share("b"),)
    assert book.resize(0, [Share("c")]) is None  # it is changing already
    flight.drawn = None
    ended = book.hear(flight, end(0, "paused", kept=True, energy=(5.0, "J", 0, 0.1)), 3.0)
    assert ended is not None
    assert book.changes(flight, ended)
    book.holdings.release(flight.shares)
    after = book.regroup(flight, flight.target, 4.0)
    assert after is not None
    assert (book.holdings.free("a"), book.holdings.free("b")) == (1.0, 1.0)  # to be held by who places it
    assert (after.shares, after.again, after.sent, after.open) == ((Share("a"), Share("b")), True, False, {0})
    assert after.launch.placement.shares == after.shares
    assert book.of(0) is after
    assert list(book.flights) == [after.number]
    (event,) = book.take_events()
    assert event == Resized(4.0, 0, (Share("a"), Share("b")))
    book.hear(after, start(0), 5.0)
    assert book.take_events() == []  # its start was told long ago
    last = book.hear(after, end(0, energy=(7.0, "J", 0, 0.1)), 6.0)
    assert last is not None
    book.end(after, last)
    (told_end,) = book.take_events()
    assert isinstance(told_end, Ended)
    assert told_end.energy is not None
    assert told_end.energy.value == 12.0  # with what was drawn before the change


def test_the_share_of_another_that_ends_is_not_that_which_is_kept() -> None:
    """Half of a device is kept for one trial while another gives its half back: half is free."""
    book = Book()
    flight, other = flown(book, 0, max_devices=2), flown(book, 1, shares=(Share("b", 0.5),))
    book.resize(0, [Share("a"), Share("b", 0.5)])
    book.holdings.release(other.shares)
    assert book.holdings.free("b") == 0.5
    book.unclaim(flight)
    assert book.holdings.free("b") == 1.0


def test_an_end_before_the_change_gives_back_what_was_kept() -> None:
    book = Book()
    flight = flown(book, 0, max_devices=2)
    book.resize(0, [Share("a"), Share("b")])
    ended = book.hear(flight, end(0), 3.0)
    assert ended is not None
    assert not book.changes(flight, ended)
    book.end(flight, ended)
    assert book.holdings.free("b") == 1.0


def test_a_trial_told_to_stop_while_it_changes_ends_as_it_was_told() -> None:
    book = Book()
    flight = flown(book, 0, max_devices=2)
    book.hear(flight, report(0, 2), 1.0)
    book.resize(0, [Share("a"), Share("b")])
    flight.asked[0] = "too slow", False
    assert book.regroup(flight, flight.target, 4.0) is None
    ended = book.take_events()[-1]
    assert isinstance(ended, Ended)
    assert (ended.status, ended.reason, ended.epoch, ended.kept) == (
        TrialStatus.STOPPED,
        "too slow",
        2,
        False,
    )
    assert (book.flights, book.holdings.free("b")) == ({}, 1.0)


def test_a_trial_told_to_stop_does_not_change_any_more() -> None:
    """Its end with ``keep`` would be taken for the stop before the change, and it would go on for ever."""
    book = Book()
    flight = flown(book, 0, max_devices=2)
    flight.asked[0] = "drained", True
    assert book.resize(0, [Share("a"), Share("b")]) is None
    assert book.holdings.free("b") == 1.0


def test_what_waits_does_not_change() -> None:
    book = Book()
    book.recall(flown(book, 0, max_devices=2))
    assert book.resize(0, [Share("a"), Share("b")]) is None
    assert book.resize(77, [Share("a")]) is None


def test_what_a_worker_is_to_have_changes() -> None:
    """It may take long to come up, and the study can't know that its order was not heard."""
    book = Book()
    flight = flown(book, 0, max_devices=2)
    flight.sent = False
    assert book.resize(0, [Share("a"), Share("b")]) is flight
    assert book.holdings.free("b") == 0.0


def test_what_goes_on_elsewhere_is_seen_when_a_worker_has_begun_it_there() -> None:
    """Or else who is lost before that would cost its trial a try."""
    book = Book()
    flight = flown(book, 0, max_devices=2)
    book.hear(flight, start(0), 1.0)
    assert flight.seen
    book.resize(0, [Share("b")])
    after = book.regroup(flight, flight.target, 2.0)
    assert after is not None
    assert not after.seen
    book.take_events()
    book.hear(after, start(0), 3.0)
    assert after.seen
    assert book.take_events() == []


def test_who_was_told_to_stop_ends_when_nobody_trains_it_any_more() -> None:
    """The order went to a worker that is gone; the others of its group still wait."""
    book = Book()
    flight = flown(book, 0, 1)
    flight.asked[1] = "not needed", True
    book.recall(flight)
    book.drop_asked(flight, 4.0)
    (ended,) = book.take_events()
    assert isinstance(ended, Ended)
    assert (ended.trial, ended.status, ended.reason, ended.kept) == (
        1,
        TrialStatus.PAUSED,
        "not needed",
        True,
    )
    assert (list(book.waiting), flight.open) == ([flight], {0})
    flight.asked[0] = "too slow", False
    book.drop_asked(flight, 5.0)
    assert (list(book.waiting), book.flights) == ([], {})


def test_impossible_changes_are_refused_and_keep_nothing() -> None:
    book = Book()
    flown(book, 0, max_devices=2)
    flown(book, 1, shares=(Share("b", 0.5),))
    with pytest.raises(InvalidInput, match="3 devices"):
        book.resize(0, [Share("a"), Share("c"), Share("d")])
    with pytest.raises(ExecutorError, match="1 of b"):
        book.resize(0, [Share("c"), Share("b")])
    assert book.holdings.free("c") == 1.0


def test_a_placement_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="segments and shares"):
        Book().flight(Launch(Placement((), (Share("a"),)), (), ()))


def test_a_trial_that_nobody_trains_ends_as_asked() -> None:
    book = Book()
    flight = flown(book, 0, 1)
    book.waiting.append(flight)
    book.drop(flight, 0, 1.0, "not needed", keep=True)
    book.forget_ended()
    assert list(book.waiting) == [flight]  # the other one is still to run
    book.drop(flight, 1, 1.0, "not needed", keep=False)
    book.forget_ended()
    assert not book.waiting
    ends = [event for event in book.take_events() if isinstance(event, Ended)]
    assert [(e.status, e.kept) for e in ends] == [(TrialStatus.PAUSED, True), (TrialStatus.STOPPED, False)]


def test_reports_only_raise_what_is_known() -> None:
    book = Book()
    flight = flown(book, 0)
    flight.epochs[0] = 5
    book.hear(flight, report(0, 3), 1.0)
    assert flight.epochs[0] == 5
    (event,) = book.take_events()
    assert isinstance(event, Reported)
