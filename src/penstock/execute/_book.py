"""The launches of a study and what it is told of them: the bookkeeping that the local and the Ray executor share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from penstock.core import Ended, Event, Reported, Resized, Share, Started, TrialStatus
from penstock.core.errors import ExecutorError, InvalidInput
from penstock.core.measurement import Measurement
from penstock.execute._base import Launch
from penstock.execute._holdings import Holdings
from penstock.execute._wire import also_drew, fused_of, to_event

ORDER = "other shares"
"""The reason for which a worker stops that is to go on with other shares."""


@final
@dataclass(slots=True, eq=False)
class Flight:
    """A launch on its way: WAITING for devices -> SENT to a worker -> over, when no trial of it is open any more.

    To go on with other shares it is stopped at a report and another flight takes its place, which waits or is sent.

    Attributes:
        number: Counts flights.
        launch: What it carries out.
        shares: Where it runs, or is to.
        open: Trials without an ``Ended`` yet.
        epochs: Per trial, the last one reported.
        sent: Whether a worker has it.
        seen: Whether a worker has begun it, as far as anybody knows.
        begun: Trials of whose start the study has been told.
        again: It goes on with other shares: its start was told long ago.
        target: Shares to go on with, from the next report on.
        claims: Those of them that are kept free for it until then.
        asked: Per trial that was told to stop, the reason and the ``keep`` of the order.
        passed: Workers that were lost before they had begun it.
        began_s: When it began.
        last_s: Of its latest event.
        drawn: Outside of epochs, before its shares were changed.
    """

    number: int
    launch: Launch
    shares: tuple[Share, ...]
    open: set[int]
    epochs: dict[int, int]
    sent: bool = False
    seen: bool = False
    begun: set[int] = field(default_factory=set)
    again: bool = False
    target: tuple[Share, ...] = ()
    claims: tuple[Share, ...] = ()
    asked: dict[int, tuple[str, bool]] = field(default_factory=dict)
    passed: int = 0
    began_s: float = 0.0
    last_s: float = 0.0
    drawn: Measurement | None = None

    @property
    def exclusive(self) -> bool:
        """Whether it shares its devices with nobody."""
        return self.launch.placement.exclusive


@final
class Book:
    """All flights of a study, the parts of devices that are held and the events that the study has not taken yet.

    Pure: who calls it tells the time and talks to the workers.
    """

    def __init__(self) -> None:
        self.flights: dict[int, Flight] = {}
        self.waiting: deque[Flight] = deque()
        self.events: list[Event] = []
        self.holdings = Holdings()
        self._by_trial: dict[int, Flight] = {}
        self._numbers = 0

    def take_events(self) -> list[Event]:
        """What there is to tell, once."""
        events, self.events = self.events, []
        return events

    # -- beginning --------------------------------------------------------------------------------------

    def flight(self, launch: Launch) -> Flight:
        """A launch, checked; not in the book yet."""
        placement = launch.placement
        if not placement.shares or not placement.segments:
            raise InvalidInput(f"A placement needs segments and shares, got {placement}.")
        self._numbers += 1
        epochs = {s.trial.id: known for s, known in zip(placement.segments, launch.known, strict=True)}
        return Flight(self._numbers, launch, placement.shares, set(epochs), epochs)

    def add(self, flight: Flight) -> None:
        """From now on it is told of."""
        self.flights[flight.number] = flight
        for trial in flight.open:
            self._by_trial[trial] = flight

    def of(self, trial: int) -> Flight | None:
        """The flight a trial is in, if it runs or waits."""
        return self._by_trial.get(trial)

    def recall(self, flight: Flight, *, first: bool = True) -> None:
        """Its worker is gone before it had begun: it waits again, and is not to change."""
        flight.sent = False
        self.unclaim(flight)
        (self.waiting.appendleft if first else self.waiting.append)(flight)

    # -- news -------------------------------------------------------------------------------------------

    def hear(self, flight: Flight, message: tuple[Any, ...], time_s: float) -> Ended | None:
        """Tell a worker's message about a trial that is open, but its end: that is given back, to be decided on."""
        time_s = flight.last_s = max(flight.last_s, time_s)
        event = to_event(message, time_s)
        if event is None:
            flight.seen = True
            if not flight.again:
                self._start(flight, message[2], time_s, message[4])
        elif isinstance(event, Ended):
            return event
        else:
            if isinstance(event, Reported):
                flight.epochs[event.trial] = max(flight.epochs[event.trial], event.epoch)
            self.events.append(event)
        return None

    def _start(self, flight: Flight, trial: int, time_s: float, start: int) -> None:
        placement = flight.launch.placement
        self.events.append(
            Started(time_s, trial, start, flight.shares, placement.attempt, fused_of(placement))
        )
        flight.began_s = time_s
        flight.begun.add(trial)

    def end(self, flight: Flight, ended: Ended) -> None:
        """One of its trials is over."""
        self.events.append(also_drew(flight.drawn, ended))
        flight.open.discard(ended.trial)
        if self._by_trial.get(ended.trial) is flight:
            del self._by_trial[ended.trial]
        if not flight.open:
            self.flights.pop(flight.number, None)
            self.unclaim(flight)

    def fail(self, flight: Flight, now_s: float, reason: str, error: str, *, lost: bool) -> None:
        """All its trials are over, with their last reports; who had not begun has begun with that."""
        now_s = max(now_s, flight.last_s)
        trials = sorted(flight.open)
        for trial in trials:
            if trial not in flight.begun:  # of a fused group, some may be known to have begun, and others not
                self._start(flight, trial, now_s, 0)
        for trial in trials:
            epoch = flight.epochs[trial]
            self.end(flight, Ended(now_s, trial, TrialStatus.FAILED, epoch, reason, error, lost=lost))

    # -- stopping ---------------------------------------------------------------------------------------

    def drop(self, flight: Flight, trial: int, now_s: float, reason: str, *, keep: bool) -> None:
        """End a trial that nobody trains as it was asked to."""
        status = TrialStatus.PAUSED if keep else TrialStatus.STOPPED
        self.end(flight, Ended(now_s, trial, status, flight.epochs[trial], reason, kept=keep))

    def drop_asked(self, flight: Flight, now_s: float) -> None:
        """End those of its trials that were told to stop, now that nobody trains them any more."""
        now_s = max(now_s, flight.last_s)
        for trial in sorted(flight.open & flight.asked.keys()):
            reason, keep = flight.asked[trial]
            self.drop(flight, trial, now_s, reason, keep=keep)
        self.forget_ended()

    def forget_ended(self) -> None:
        """What has ended waits no more."""
        self.waiting = deque(flight for flight in self.waiting if flight.open)

    # -- changing shares --------------------------------------------------------------------------------

    def resize(self, trial: int, shares: Sequence[Share]) -> Flight | None:
        """Keep the new shares free for a trial that a worker has or is to have; None: it is not to change.

        A trial that was told to stop is not: its end would be taken for the stop before the change.
        """
        flight = self._by_trial.get(trial)
        if flight is None or flight in self.waiting or flight.target or flight.asked or not shares:
            return None
        placement = flight.launch.placement
        if placement.max_devices < len(shares) or len(placement.segments) > 1:
            raise InvalidInput(f"Trial {trial} can't spread over {len(shares)} devices.")
        now = {share.device for share in flight.shares}
        claims = tuple(share for share in shares if share.device not in now)
        for share in claims:
            if not self.holdings.fits([share]):
                raise ExecutorError(f"{share.fraction:g} of {share.device} is asked for, but is not free.")
        self.holdings.hold(claims)
        flight.target, flight.claims = tuple(shares), claims
        return flight

    def decline(self, trial: int, now_s: float) -> None:
        """Tell that a trial which was to change keeps what it has; one that has not begun is asked again later."""
        flight = self._by_trial.get(trial)
        if flight is not None and flight.begun:
            now_s = flight.last_s = max(now_s, flight.last_s)
            self.events.append(Resized(now_s, trial, flight.shares))

    def unclaim(self, flight: Flight) -> None:
        """What was kept for a change is free."""
        self.holdings.release(flight.claims)
        flight.target = flight.claims = ()

    def changes(self, flight: Flight, ended: Ended) -> bool:
        """Whether a trial's end is the stop before it goes on with other shares."""
        if not (flight.target and ended.kept):
            return False
        flight.drawn = also_drew(flight.drawn, ended).energy
        return True

    def regroup(self, flight: Flight, shares: tuple[Share, ...], now_s: float) -> Flight | None:
        """The flight that goes on with ``shares`` in the place of one that has stopped; None: it was told to end."""
        now_s = max(now_s, flight.last_s)
        self.unclaim(flight)
        (trial,) = flight.open
        if trial in flight.asked:
            reason, keep = flight.asked[trial]
            self.drop(flight, trial, now_s, reason, keep=keep)
            return None
        placement = replace(flight.launch.placement, shares=shares)
        after = self.flight(replace(flight.launch, placement=placement, known=(flight.epochs[trial],)))
        after.begun, after.again = {trial}, True
        after.began_s, after.last_s, after.drawn = flight.began_s, now_s, flight.drawn
        del self.flights[flight.number]
        self.add(after)
        self.events.append(Resized(now_s, trial, shares))
        return after
