"""What runs where, how fast, and how long it will still take: what a planner that looks ahead gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from penstock.core import (
    Config,
    Device,
    Ended,
    Free,
    Placement,
    Reported,
    Resize,
    Resized,
    Running,
    Saved,
    Segment,
    Share,
    Started,
)
from penstock.predict import EpochTimes, Overhead


@final
@dataclass(frozen=True, slots=True)
class Foresight:
    """What an engine needs to know to plan ahead of what is free.

    Attributes:
        overhead: The runtime model with c and d, as the planner's.
        max_devices: Over how many devices the study's work can spread on its executor.
        concurrency: How many segments may be under way at once; None: ``per_device`` for each device.
        per_device: See there.
        memory_bytes: What a trial needs on a device, where it was measured.
        ranked: Whether the planner wants to know how running trials perform.
    """

    overhead: Overhead
    max_devices: int = 1
    concurrency: int | None = None
    per_device: int = 1
    memory_bytes: int | None = None
    ranked: bool = False


@dataclass(slots=True, eq=False)
class _Seat:
    """A placement that was launched."""

    placement: Placement
    epochs: dict[int, int]  # by trial, the last reported one
    change: tuple[Placement, tuple[Share, ...]] | None = None  # as it will be, and the shares it gives up
    later: Resize | None = None  # its executor is not told of it before the epoch at whose end it comes,
    claims: tuple[Share, ...] = ()  # and what is kept free for that
    seated: bool = False  # it has started: it slows others down
    fused: bool = False
    speed: float = 1.0
    since_s: float = 0.0  # when the speed last changed
    work_s: float = 0.0  # done since the last report, in seconds alone on one device
    told_s: float = 0.0  # when it last reported, or started
    guess: tuple[int, float | None] = (
        -1,
        None,
    )  # seconds per epoch by its likes, and how much was known then


@final
class Ledger:
    """Follows the events of a study. Every step costs as much as there are trials on the devices it touches."""

    def __init__(self, foresight: Foresight) -> None:
        self.foresight = foresight
        self.times = EpochTimes()
        self.devices: dict[str, Device] = {}
        self.known = 0  # trials whose epochs have been timed
        self.news = False  # something was learned that a planner would want to act on
        self.wide = 0  # seats of several devices
        self._open_ended = (0, 0)  # epochs of segments without a budget, and how many ended
        self._seats: dict[int, _Seat] = {}  # by each of its trials
        self._order: dict[int, _Seat] = {}  # by its first trial, oldest first
        self._on: dict[str, dict[int, _Seat]] = {}  # by device, then first trial
        self._due: list[Resize] = []
        self._told: dict[int, tuple[int, int]] = {}  # by trial, epochs reported and epochs saved
        self._paused: dict[int, Placement] = {}  # those that a plan let pause, as they wait again

    # --- what is expected ------------------------------------------------------------------------------------

    def expect(self, placement: Placement) -> Placement:
        """The placement with what is known of its runtime."""
        expected_s, error = 0.0, 0.0
        for segment in placement.segments:
            taken_s = self._segment_s(segment)
            if taken_s is None:
                return replace(
                    placement,
                    expected_s=None,
                    expected_error=1.0,
                    memory_bytes=self.foresight.memory_bytes,
                    max_devices=self._spread(placement),
                    pausable=False,
                )
            expected_s = max(expected_s, taken_s)
            epochs = (self._until(segment) or 0.0) - segment.start
            error = max(error, self.times.error(segment.trial.id, segment.trial.config, epochs))
        return replace(
            placement,
            expected_s=expected_s,
            expected_error=error,
            memory_bytes=self.foresight.memory_bytes,
            max_devices=self._spread(placement),
            pausable=self._saves(placement),
        )

    def _saves(self, placement: Placement) -> bool:
        """Whether it is known to save a checkpoint in every epoch: a pause then costs no epoch."""
        if len(placement.segments) != 1:
            return False
        reported, saved = self._told.get(placement.segments[0].trial.id, (0, 0))
        return saved >= reported > 1

    def _spread(self, placement: Placement) -> int:
        return self.foresight.max_devices if len(placement.segments) == 1 else 1

    def _segment_s(self, segment: Segment) -> float | None:
        until = self._until(segment)
        epoch_s = self.times.epoch_s(segment.trial.id, segment.trial.config)
        if until is None or epoch_s is None:
            return None
        return epoch_s * max(0.0, until - segment.start)

    def _until(self, segment: Segment) -> float | None:
        """Its last epoch; where the training function decides, as many as others took on average."""
        if segment.until is not None:
            return segment.until
        total, count = self._open_ended
        return total / count if count else None

    @property
    def version(self) -> int:
        """Changes when so much more is known that what waits should be looked at again."""
        return self.known.bit_length()

    def concurrency(self) -> int:
        """How many segments may be under way at once."""
        if self.foresight.concurrency is not None:
            return self.foresight.concurrency
        return self.foresight.per_device * len(self.devices)

    def saw(self, free: Iterable[Free]) -> None:
        """Devices that were free once are known."""
        for item in free:
            self.devices[item.device.id] = item.device

    # --- events ----------------------------------------------------------------------------------------------

    def launched(self, placements: Sequence[Placement]) -> None:
        """These are on their way to their devices."""
        for placement in placements:
            seat = _Seat(placement, {s.trial.id: s.start for s in placement.segments})
            self._order[placement.segments[0].trial.id] = seat
            for segment in placement.segments:
                self._seats[segment.trial.id] = seat
            self.wide += len(placement.shares) > 1

    def asked(self, resizes: Sequence[Resize]) -> None:
        """These were told to change their shares."""
        for resize in resizes:
            seat = self._order[resize.placement.segments[0].trial.id]
            self._ask(seat, resize.shares)
            if resize.at_epoch is not None:
                seat.later = resize
                held = {share.device for share in seat.placement.shares}
                seat.claims = tuple(share for share in resize.shares if share.device not in held)
                # At the end of its first epoch: an executor may not listen before it has started, or start before it
                # is heard of. So it is told twice, and ignores the second time.
                if seat.epochs[resize.placement.segments[0].trial.id] >= resize.at_epoch - 1:
                    self._due.append(resize)

    def take_due(self) -> tuple[Resize, ...]:
        """Changes that were to wait for an epoch, which has begun: executors make them at its end."""
        due, self._due = self._due, []
        for resize in due:
            seat = self._order.get(resize.placement.segments[0].trial.id)
            if seat is not None and seat.seated:
                seat.claims = ()  # from now on its executor keeps it free
        return tuple(due)

    def unclaimed(self, free: Sequence[Free]) -> tuple[Free, ...]:
        """What is free of devices, less what is kept for changes of which executors don't know yet."""
        claimed: dict[str, float] = {}
        for seat in self._order.values():
            for share in seat.claims:
                claimed[share.device] = claimed.get(share.device, 0.0) + share.fraction
        if not claimed:
            return tuple(free)
        return tuple(
            replace(item, fraction=max(0.0, item.fraction - claimed.get(item.device.id, 0.0)))
            for item in free
        )

    @staticmethod
    def _ask(seat: _Seat, shares: tuple[Share, ...]) -> None:
        kept = {share.device for share in shares}
        leaving = tuple(share for share in seat.placement.shares if share.device not in kept)
        seat.change = replace(seat.placement, shares=shares), leaving

    def _look(self, seat: _Seat, epoch: int) -> None:
        """Whether the epoch at whose end it is to change comes next."""
        later = seat.later
        if later is not None and later.at_epoch is not None and epoch >= later.at_epoch - 1:
            self._due.append(later)
            seat.later = None

    def started(self, event: Started, segment: Segment) -> None:
        """A segment runs. In a replay it is the first that is heard of its placement."""
        if event.trial not in self._seats:
            self.launched([Placement((segment,), event.shares)])
        seat = self._seats[event.trial]
        if not seat.seated:
            seat.seated = True
            seat.fused = bool(event.fused)
            if event.shares and event.shares != seat.placement.shares:  # an executor took another device
                moved = dict(zip(seat.placement.shares, event.shares, strict=False))
                seat.placement = replace(seat.placement, shares=event.shares)
                for other in self._order.values():  # some may be on their way to a part of the same device
                    if other.later is not None:
                        shares = tuple(moved.get(share, share) for share in other.later.shares)
                        other.later = replace(other.later, shares=shares)
                        other.claims = tuple(moved.get(share, share) for share in other.claims)
                        self._ask(other, shares)
            seat.since_s = seat.told_s = event.time_s
            if seat.placement.segments[0].start > segment.start:  # it has paused: so long it does nothing
                seat.since_s += self.foresight.overhead.epsilon_s
            self._enter(seat, event.time_s)
            self._look(seat, seat.epochs[event.trial])

    def reported(self, event: Reported, config: Config) -> None:
        """An epoch is over."""
        reported, saved = self._told.get(event.trial, (0, 0))
        self._told[event.trial] = reported + 1, saved
        seat = self._seats.get(event.trial)
        if seat is None:
            return
        seat.epochs[event.trial] = event.epoch
        self._look(seat, event.epoch)
        if seat.fused:
            return  # epochs of a fused training say nothing of a trial alone
        self._settle(seat, event.time_s)
        elapsed_s = event.time_s - seat.told_s
        taken_s = elapsed_s if event.train_s is None else event.train_s
        speed = seat.work_s / elapsed_s if elapsed_s > 0 else seat.speed
        seat.told_s, seat.work_s = event.time_s, 0.0
        if speed > 0:
            if not self.times.knows(event.trial):
                self.known += 1
                # Nobody could plan for it so far; a guess that proves a little wrong is no reason to.
                self.news = self.news or seat.placement.expected_s is None
            self.times.observe(event.trial, config, max(0.0, taken_s), speed=speed)

    def saved(self, event: Saved) -> None:
        """A checkpoint is there."""
        reported, saved = self._told.get(event.trial, (0, 0))
        self._told[event.trial] = reported, saved + 1

    def resized(self, event: Resized) -> None:
        """A change of shares has taken place."""
        seat = self._seats.get(event.trial)
        if seat is None:
            return
        self._leave(seat, event.time_s)
        self.wide += (len(event.shares) > 1) - (len(seat.placement.shares) > 1)
        seat.placement = replace(seat.placement, shares=event.shares)
        seat.change = seat.later = None
        seat.claims = ()
        self._due = [due for due in self._due if due.placement.segments[0].trial.id != event.trial]
        self._enter(seat, event.time_s)
        seat.since_s = event.time_s + self.foresight.overhead.epsilon_s  # so long it does nothing

    def ended(self, event: Ended) -> None:
        """A segment is over; with the last of its placement the devices are free."""
        seat = self._seats.pop(event.trial, None)
        if seat is None:
            return
        for segment in seat.placement.segments:
            if segment.trial.id == event.trial and segment.until is None and event.epoch:
                total, count = self._open_ended
                self._open_ended = total + event.epoch, count + 1
        if event.kept and seat.change is not None and not seat.change[0].shares:
            segment = replace(seat.placement.segments[0], start=event.epoch)
            self._paused[event.trial] = self.expect(replace(seat.placement, segments=(segment,), shares=()))
        del seat.epochs[event.trial]
        self._due = [due for due in self._due if due.placement.segments[0].trial.id != event.trial]
        if not seat.epochs:
            self._order.pop(seat.placement.segments[0].trial.id, None)
            self.wide -= len(seat.placement.shares) > 1
            if seat.seated:
                self._leave(seat, event.time_s)

    def take_paused(self, trial: int) -> Placement | None:
        """What a trial has still to do that a plan let pause; None: it ended for another reason."""
        return self._paused.pop(trial, None)

    def clear(self) -> None:
        """After a replay: nothing runs, but what was learned stays."""
        self._paused.clear()
        self._seats.clear()
        self._order.clear()
        self._on.clear()
        self._due.clear()
        self.wide = 0
        self.news = False

    # --- what runs -------------------------------------------------------------------------------------------

    def running(self, now_s: float, ranks: Callable[[Sequence[int]], dict[int, int]]) -> tuple[Running, ...]:
        """What runs, with the work left as far as known."""
        order = ranks(list(self._order)) if self.foresight.ranked else {}
        found = []
        for trial, seat in self._order.items():
            left_s = self._left_s(seat, now_s)
            if seat.change is None:
                if not seat.placement.pausable and self._saves(
                    seat.placement
                ):  # its first epochs have shown it
                    seat.placement = replace(seat.placement, pausable=True)
                found.append(Running(seat.placement, left_s, order.get(trial)))
            else:
                placement, leaving = seat.change
                found.append(Running(placement, left_s, order.get(trial), True, leaving))
        return tuple(found)

    def _left_s(self, seat: _Seat, now_s: float) -> float | None:
        done_s = seat.work_s + (seat.speed * max(0.0, now_s - seat.since_s) if seat.seated else 0.0)
        longest: float | None = None
        for segment in seat.placement.segments:
            epoch_s = self._epoch_s(seat, segment)
            until = self._until(segment)
            if epoch_s is None or until is None:
                return None
            epochs = max(0.0, until - seat.epochs.get(segment.trial.id, until))
            # Of the epoch that runs, at most all of it is done.
            left_s = epoch_s * epochs - min(done_s, epoch_s)
            longest = max(longest or 0.0, left_s)
        return longest

    def _epoch_s(self, seat: _Seat, segment: Segment) -> float | None:
        """What its epochs take: as it has shown, or by its likes, which are looked for only when more is known."""
        trial, config = segment.trial.id, segment.trial.config
        if self.times.knows(trial):
            return self.times.epoch_s(trial, config)
        if seat.guess[0] != self.version:
            seat.guess = self.version, self.times.epoch_s(trial, config)
        return seat.guess[1]

    # --- speeds ----------------------------------------------------------------------------------------------

    def _settle(self, seat: _Seat, now_s: float) -> None:
        seat.work_s += seat.speed * max(0.0, now_s - seat.since_s)
        seat.since_s = max(seat.since_s, now_s)

    def _enter(self, seat: _Seat, now_s: float) -> None:
        first = seat.placement.segments[0].trial.id
        for share in seat.placement.shares:
            self._on.setdefault(share.device, {})[first] = seat
        self._pace(seat.placement.shares, now_s)

    def _leave(self, seat: _Seat, now_s: float) -> None:
        first = seat.placement.segments[0].trial.id
        self._settle(seat, now_s)
        for share in seat.placement.shares:
            self._on.get(share.device, {}).pop(first, None)
        self._pace(seat.placement.shares, now_s)

    def _pace(self, shares: Sequence[Share], now_s: float) -> None:
        overhead = self.foresight.overhead
        for share in shares:
            for seat in self._on.get(share.device, {}).values():
                self._settle(seat, now_s)
                held = seat.placement.shares
                crowd = max(len(self._on[other.device]) for other in held)
                seat.speed = overhead.speed(float(len(held))) / overhead.alpha ** (crowd - 1)
