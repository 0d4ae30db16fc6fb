"""One run of a study by one driver: carries events between executor, engine and journal."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from penstock.core import (
    Config,
    Ended,
    Event,
    Free,
    Measurement,
    Noted,
    Placement,
    Reported,
    Resized,
    Saved,
    Segment,
    SessionClosed,
    SessionOpened,
    Submitted,
    TrialStatus,
    VirtualClock,
    total,
)
from penstock.core.errors import PenstockError, StoreError
from penstock.core.state import DREW, FIT, ONCE, PROBED, REFUSED
from penstock.energy import co2, money
from penstock.execute import Launch
from penstock.goal import Budget, Spent
from penstock.report import View
from penstock.store import Store
from penstock.study._allowance import Allowance, Leases, allowed_j
from penstock.study._bounds import violation_notes
from penstock.study._engine import Engine
from penstock.study._files import CheckpointKeeper
from penstock.study._fusing import Fuser
from penstock.study._lending import leaving_of
from penstock.study._limits import LimitDesk
from penstock.study._transfer import Transfer
from penstock.train import Command, Task
from penstock.train._elastic import UNDIVIDED
from penstock.train._run import ENDLESS

if TYPE_CHECKING:
    from penstock.study._study import Study

_TICK_S = 0.25
_SIMULATED_BATCH = 1000
_HOPELESS = 20  # trials that failed, before not one epoch was trained


@final
class Session:
    """One run of a study by one driver."""

    def __init__(
        self,
        study: Study,
        engine: Engine,
        store: Store,
        files: Path,
        view: View,
        desk: LimitDesk | None = None,
    ) -> None:
        assert study._entry is not None
        self._entry = study._entry
        self._study = study
        self._engine = engine
        self._store = store
        self._executor = study.executor
        self._view = view
        self._files = files
        self._keeper = CheckpointKeeper(files, study.keep, study.goal)
        self._leave: tuple[str, str] | None = None
        self._error: Exception | None = None  # of the scheduler or the sampler: raised when all is written
        self._signals = 0
        self._signal = "Ctrl-C"
        self._failed = 0  # trials of this session
        self._why_failed = ""
        self._trained = False  # one epoch of this session, at least
        self._virtual = isinstance(study.executor.clock, VirtualClock)
        # A simulation keeps checkpoints in memory: those of earlier sessions are gone until they are made again.
        self._lost: set[str] = set()
        if self._virtual:
            self._lost.update(
                path for record in engine.state.trials.values() for path in record.saved.values()
            )
        self._batch: list[Event] = []
        self._hungry = True
        self._desk = desk
        self._unmetered = False  # said that there is no energy
        self._unsaved = False  # said that there is no checkpoint to go on from
        self._endless = False  # said that nothing ends a trial
        self._unmeasured = False  # said that a network could not be measured
        self._probed: Config | None = None  # what was measured last before training
        self._allowance: Allowance | None = None
        self._leases: Leases | None = None
        if study.budget.needs_energy and not study.budget.finish:
            limit_j = allowed_j(study.budget, study._grid, study.price_per_kwh)
            self._allowance = Allowance(limit_j, engine.state)
        if study.budget.epochs is not None and not study.budget.finish:
            self._leases = Leases(study.budget.epochs, engine.state)

    def run(self, notes: Iterable[Noted] = ()) -> None:
        """Open the session, loop, close it.

        An error closes it, too: first what came of the trials is written, then the error is raised.
        """
        engine = self._engine
        self._take(SessionOpened(self._now(), socket.gethostname(), os.getpid(), {ONCE: True, FIT: True}))
        for note in notes:
            self._take(note)
        self._write(everything=True)
        engine.requeue()
        self._view.open(self._study.name or "", self._study.goal, engine.state, self._executor.slots)
        previous = self._catch_signals()
        try:
            self._open_desk()
            self._say_unknown()
            self._let_measure()
            reason, detail = self._loop()
            self._read_desk()
            self._say_unheard()
            if self._error is not None:
                reason, detail = "error", _text_of(self._error)
            self._count_refused()
            self._take(SessionClosed(self._now(), reason, detail))
            self._write(everything=True)
        except StoreError:
            raise  # it is the journal that can't be written, or is another driver's by now
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._take(SessionClosed(self._now(), "error", _text_of(error)))
                self._write(everything=True)
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        self._keeper.finish(engine.state)
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        """The scheduler or the sampler can't go on: the session ends as by a budget, then ``run`` raises the error.

        What runs finishes its epoch and is journalled first, so that nothing is lost to who mends it and resumes.
        """
        if isinstance(error, StoreError):
            raise error  # the event itself can't be: it is not to be journalled
        if self._error is None:
            self._error = error
        if self._leave is None:
            self._leave = ("error", _text_of(error))
            self._executor.stop(list(self._engine.running), reason="an error ends the study", keep=True)

    def _loop(self) -> tuple[str, str]:
        engine, executor = self._engine, self._executor
        while True:
            if self._leave is None or (self._finishing and self._signals):
                self._check_leave()
            if self._leave is None and self._hungry:
                self._feed()
            elif self._finishing and self._hungry and (engine.moving or engine.queue):
                self._feed_begun()
            self._write()
            begun = self._finishing and (engine.moving or engine.queue)
            if self._leave is not None and not engine.running and not begun:
                return self._leave
            if not engine.running and not engine.queue and self._held_back:
                return "budget", self._nearly_used_up  # they go on, with more of it
            if engine.done:
                return "finished", ""
            if not engine.running:
                if self._held_back:
                    return "budget", self._nearly_used_up  # the scheduler waits for who was stopped
                engine.check_finished()
            self._rein()
            events = executor.poll(self._timeout_s())
            # Only an end makes room; devices that joined are noticed when nothing else happens.
            self._hungry = not events or bool(leaving_of(executor))
            for event in events:
                self._take(engine.annotate(event))
            try:
                stops = engine.take_stops(self._now())
                for event in engine.take_choice(self._now()):
                    self._take(event)
            except Exception as error:
                stops = []
                self._fail(error)
            for trial, why in stops:
                executor.stop([trial], reason=why)
            if self._leave is None:
                self._resize()  # a report may tell that the epoch has come at whose end a trial narrows
            self._view.tick(engine.state, lambda: engine.setup.scheduler.expected, len(engine.running))

    def _feed(self) -> None:
        """Ask for groups, journal them, launch what fits, and what the budgets of energy and epochs allow."""
        engine = self._engine
        more = True
        while more:
            free = self._executor.free()
            most, more = None, False
            limits = [each for each in (self._allowance, self._leases) if each is not None]
            running = len(engine.running)
            if limits:
                room, group = engine.room(free), engine.group(free)
                for each in limits:
                    free, fewer, again = each.within(free, engine.running, room, engine.setup.width, group)
                    most = fewer if most is None else most if fewer is None else min(most, fewer)
                    more = more or again
            self._feed_on(free, most)
            more = more and len(engine.running) > running

    def _feed_on(self, free: Sequence[Free], most: int | None = None) -> None:
        """The same for these devices, and for so many trials at most."""
        engine = self._engine
        now_s = self._now()
        leaving = leaving_of(self._executor)
        if not free and not engine.foresees and not leaving:
            return
        placements: Sequence[Placement] = ()
        if engine.moving:
            engine.strand(self._executor.free())
        try:
            for event in engine.submit(free, now_s):
                self._note(event)
                if isinstance(event, Submitted):
                    self._foretell(event)
            for event in engine.take_drops(now_s):
                self._take(event)
            if self._error is None:
                placements = engine.plan(free, now_s, most)
        except Exception as error:
            self._fail(error)
        self._write()  # durable before it is acted on
        if placements:
            self._executor.launch(self._allowed([self._launch(placement) for placement in placements]))
        self._resize()
        for order in engine.take_regroups(self._executor.free(), leaving):
            topic = "merge" if leaving else "split"
            self._take(Noted(now_s, topic, {"trials": list(order.members), "device": order.device}))
            self._executor.stop(order.members, reason=f"goes on on {order.device}", keep=True)

    def _feed_begun(self) -> None:
        """Launch what ran when the budget was used up and has paused, moved or failed since: it may finish, too."""
        placements: Sequence[Placement] = ()
        try:
            placements = self._engine.plan(self._executor.free(), self._now())
        except Exception as error:
            self._engine.forget_waiting()  # it would fail again and again
            self._fail(error)
        self._write()
        if placements:
            self._executor.launch([self._launch(placement) for placement in placements])
        self._resize()

    def _resize(self) -> None:
        for resize in self._engine.take_resizes():
            trial = resize.placement.segments[0].trial.id
            if resize.shares:
                self._executor.resize(trial, resize.shares)
            else:
                self._executor.stop([trial], reason="pauses for others of its group", keep=True)

    def _let_measure(self) -> None:
        """Let proposals be measured where predictions leave their limits in doubt, if nothing disturbs that."""
        gate = self._study.gate
        if gate is None or self._study.probe is None:
            return
        gate.measured_by(self._probe if self._study.measures else None)
        if not self._study.measures:
            self._view.say(
                "probe: trials train on this machine while others are proposed, which would disturb the readings, so "
                "nothing is measured before training. Train one at a time (pk.Local(1)), or give one with measure=."
            )

    def _probe(self, config: Config, count: int) -> dict[str, list[float]]:
        """Readings of a network that is not trained yet, in the journal before anybody decides by them."""
        profile = self._study.probe
        assert profile is not None
        start_s = self._now()
        samples = profile.read(config, count)
        error = next((sample.error for sample in samples if sample.error), "")
        good = [sample.values for sample in samples if not sample.error]
        readings = {
            name: [float(v[name].value) for v in good if name in v] for values in good[:1] for name in values
        }
        if isinstance(self._executor.clock, VirtualClock):  # it would have taken this long
            self._executor.clock.advance_to(start_s + count * profile.seconds)
        if error:
            readings = {}
        data: dict[str, Any] = {"config": dict(config), "readings": readings}
        data["seconds"] = self._now() - start_s
        if error:
            data["error"] = error
            if not self._unmeasured:
                self._unmeasured = True
                self._view.say(f"{dict(config)!r} could not be measured before training: {error}")
        if config == self._probed:
            data["again"] = True
        drawn = total(sample.energy for sample in samples if sample.energy is not None)
        if drawn is not None and self._study.counts_own_energy:
            data[DREW] = drawn.plain
        self._probed = dict(config)
        note = Noted(self._now(), PROBED, data)
        self._engine.probed(note)
        self._note(note)
        self._write(everything=True)  # of a simulated study, too: to measure is to act
        return readings

    @property
    def _finishing(self) -> bool:
        """Whether what runs goes on to its end although the budget is used up."""
        return self._leave is not None and self._leave[0] == "budget" and self._study.budget.finish

    def _foretell(self, event: Submitted) -> None:
        """Keep what is predicted of new trials, for the map of limits."""
        gate = self._study.gate
        for segment in () if gate is None else event.segments:
            if gate is not None and segment.start == 0:
                told = gate.check(segment.trial.config).predictions
                data = {name: [each.mean, each.std] for name, each in told.items()}
                if data:
                    self._take(Noted(event.time_s, "prediction", data, segment.trial.id))

    def _launch(self, placement: Placement) -> Launch:
        trials = self._engine.state.trials
        checkpoints: list[str | None] = []
        known: list[int] = []
        for segment in placement.segments:
            record = trials[segment.trial.id]
            path = None
            if record.saved:
                epoch = max(record.saved)
                path = record.saved[epoch] if segment.copy_from is None else None
                if segment.copy_from is not None and epoch > segment.copy_from.epoch:
                    path = record.saved[epoch]
            if path is None and segment.copy_from is not None:
                path = trials[segment.copy_from.trial].saved.get(segment.copy_from.epoch)
            if segment.start and path is None:
                self._say_unsaved(segment)
            checkpoints.append(path)
            known.append(record.epoch)
        fuser = self._study._fuser
        facts = {} if fuser is None else fuser.facts(placement, self._left_s())
        return Launch(placement, tuple(checkpoints), tuple(known), facts)

    def _allowed(self, launches: Sequence[Launch]) -> Sequence[Launch]:
        """What starts now, with the epochs that a budget allows each."""
        if self._leases is None:
            return launches
        engine, trials = self._engine, self._engine.state.trials
        wanted: list[tuple[Segment, int]] = []
        for launch in launches:
            for segment, path in zip(launch.placement.segments, launch.checkpoints, strict=True):
                there = path is not None and self._has(path)
                copied = (
                    segment.start if segment.copy_from is not None and there else 0
                )  # else it begins anew
                wanted.append((segment, max(trials[segment.trial.id].trained, copied)))
        abreast = len(wanted)
        if engine.queue or not engine.setup.scheduler.done:  # others will want some, too
            abreast = max(len(engine.running), math.ceil(self._executor.slots / engine.setup.width))
        leaves = iter(self._leases.give(wanted, abreast))
        return [
            replace(launch, leaves=tuple(next(leaves) for _ in launch.placement.segments))
            for launch in launches
        ]

    def _has(self, path: str) -> bool:
        """Whether a checkpoint is there."""
        return path not in self._lost if self._virtual else (self._files / path).exists()

    def _take(self, event: Event) -> None:
        """Apply an event and keep it for the next write, also when scheduler or sampler fail on what it says."""
        try:
            self._engine.apply(event)
        except Exception as error:
            self._fail(error)
        self._note(event)
        if isinstance(event, Ended | Resized) or self._engine.restless:
            self._hungry = True
        if self._virtual and self._desk is not None and isinstance(event, Noted):
            self._desk.keep(event)
        if self._study._fuser is not None and isinstance(event, Noted | Ended):
            self._hear_of_fusion(self._study._fuser, event)
        if isinstance(event, Noted) and event.topic == UNDIVIDED:
            self._spread_no_more(event)
        if isinstance(event, Noted) and event.topic == ENDLESS:
            self._say_endless(event)
        if isinstance(event, Ended):
            self._judge(event)
        if isinstance(event, Reported):
            self._trained = True
            self._study._paces.hear(event, self._engine.state)
            if event.energy is None:
                self._say_unmetered(event)
        elif isinstance(event, Ended) and event.status is TrialStatus.FAILED and not event.retry:
            self._failed += 1
            self._why_failed = self._why_failed or event.reason
        if isinstance(event, Saved):
            self._lost.discard(event.path)
        if isinstance(event, Saved | Ended):
            self._keeper.on(event, self._engine.state, self._engine.pins)
        if self._allowance is not None and isinstance(event, Reported):
            self._allowance.heard(event)
            if self._allowance.tight:  # it is known better now what there is room for
                self._hungry = True
        if isinstance(event, Ended) and (self._allowance is not None or self._leases is not None):
            waits = event.kept and self._engine.waits(event.trial)
            if self._allowance is not None:
                self._allowance.ended(event, waits=waits)
            if self._leases is not None and self._leases.ended(event, waits=waits):
                self._engine.again(event.trial)
        if self._desk is not None and isinstance(event, Reported | Ended):
            self._read_desk()

    def _spread_no_more(self, event: Noted) -> None:
        """Trials that have spread train whole batches on each device, for nothing: no other one is to."""
        foresight = self._engine.setup.foresight
        if foresight is not None and foresight.max_devices > 1:
            alone = replace(foresight, overhead=replace(foresight.overhead, max_devices=1), max_devices=1)
            self._engine.refine(self._study._passes(alone), alone)
            self._view.say(str(event.data["text"]))

    def _hear_of_fusion(self, fuser: Fuser, event: Noted | Ended) -> None:
        """What workers have measured counts for the trials to come; a group whose worker died is halved."""
        if isinstance(event, Noted):
            fuser.learn(event)
            return
        note = fuser.lost(event, self._now())
        if note is not None:
            self._take(note)

    def _judge(self, event: Ended) -> None:
        """Note the limits that a trial was measured to violate, up to here if it was left before its end."""
        gate, record = self._study.gate, self._engine.state.trials[event.trial]
        twin = self._study.surrogate is not None and not record.is_target
        if gate is not None and not twin:  # limits are about the model itself
            for note in violation_notes(gate, record, self._now(), so_far=event.kept or event.retry):
                if note.data["limit"] not in record.violated:
                    self._take(note)

    def _count_refused(self) -> None:
        """Keep how many proposals were refused after the last trial: a grid that ends so, limits out of reach."""
        rest = getattr(self._study.sampler, "refused", 0) - self._engine.state.refused
        if rest > 0:
            self._take(Noted(self._now(), REFUSED, {"proposals": rest}))

    def _say_unknown(self) -> None:
        """Say which limits nobody can predict yet."""
        gate = self._study.gate
        if gate is not None and gate.unknown:
            names = ", ".join(sorted({limit.name for limit in gate.unknown}))
            self._view.say(
                f"{names}: without a profile, limits are known only from what trials report. "
                + (
                    '"penstock profile" makes one'
                    if isinstance(self._study.work, Task)
                    else "Profile(None, space, measure=...).collect() makes one for predictors="
                )
                + ", so that no trial beyond them starts."
            )

    def _say_unheard(self) -> None:
        """Say which stopping rules have waited for a metric in vain."""
        reported = {name for trial in self._engine.state.trials.values() for name in trial.metrics}
        for rule in self._engine.setup.rules:
            if reported and rule.unheard is not None:
                self._view.say(
                    f"{type(rule).__name__} watches {rule.unheard}, which no trial has reported, so it has stopped "
                    f"none: they report {', '.join(sorted(reported))}."
                )

    def _say_unmetered(self, event: Reported) -> None:
        budget = self._study.budget.needs_energy
        wanted = any(objective.metric == "energy_j" for objective in self._study.goal.objectives)
        wanted = wanted and "energy_j" not in event.metrics  # else the training tells it itself
        if self._unmetered or not (budget or wanted or (self._study.meter and not self._virtual)):
            return
        self._unmetered = True
        so = ", so the budget in Wh, CO2e or money does not count it" if budget else ""
        so += ", so it has no place in the goal's order" if wanted else ""
        why = (
            "Simulated devices draw what they are given: Simulated(power=SimulatedGpus(...))."
            if self._virtual
            else f"The workers' logs in {self._files / 'logs'} say why. "
            'Run "penstock doctor" to see what can be measured here.'
        )
        self._view.say(f"Trial {event.trial} reports no energy{so}. {why}")

    def _say_unsaved(self, segment: Segment) -> None:
        """Say once that a training that goes on has nothing to go on from; a command keeps its files itself."""
        source = segment.trial.id if segment.copy_from is None else segment.copy_from.trial
        told = self._unsaved or self._virtual or isinstance(self._study.work, Command)
        if told or self._engine.state.trials[source].saved:
            return
        self._unsaved = True
        copied = "" if segment.copy_from is None else f" in the place of trial {source}"
        self._view.say(
            f"Trial {segment.trial.id} is to go on after {segment.start} epochs{copied}, but no checkpoint was saved: "
            "it starts again from the beginning, and so will others. Let the training function call run.save(state) in "
            "its loop and run.load() before it."
        )

    def _say_endless(self, event: Noted) -> None:
        """Say once that a trial may train for ever; a stopping rule would end it."""
        if self._endless or self._engine.setup.rules:
            return
        self._endless = True
        self._view.say(
            f"Trial {event.trial} has trained for {event.data['epochs']} epochs, and nothing but its own function ends "
            "it: neither run.epochs() nor the study says how many there are. Write run.epochs(10), or give the study a "
            "scheduler that says it: pk.Full(epochs=10), pk.ASHA(max_epochs=10)."
        )

    def _open_desk(self) -> None:
        """Say at once if there is nothing whose power limit could be set."""
        if self._desk is not None:
            refusal = self._desk.refusal(
                self._executor.free(), virtual=self._virtual, imagined=self._study.imagines
            )
            if refusal is not None:
                self._view.say(refusal)
                self._take(Noted(self._now(), "power_limits", {"text": refusal}))

    def _read_desk(self) -> None:
        """Journal what workers have found out about power limits."""
        if self._desk is not None:
            notes, said = self._desk.news(self._now())
            for note in notes:
                self._take(note)
            for text in said:
                self._view.say(text)

    def _note(self, event: Event) -> None:
        self._batch.append(event)
        self._view.on(event, self._engine.state)

    def _write(self, *, everything: bool = False) -> None:
        """Make the batch durable. A simulation acts on nothing outside, so it may wait for a larger batch."""
        if self._batch and (everything or not self._virtual or len(self._batch) >= _SIMULATED_BATCH):
            self._store.append(self._entry.id, self._batch)
            self._batch = []

    def _now(self) -> float:
        return self._executor.clock.now_s()

    def _timeout_s(self) -> float | None:
        """How long to wait for events: a tick, so that signals are noticed; a virtual clock has no ticks."""
        tick_s = None if self._virtual else _TICK_S
        limit_s: float | None = self._study.budget.time_s
        if limit_s is None or self._leave is not None:
            return tick_s
        left_s = max(0.0, limit_s - self._spent().time_s)
        return left_s if tick_s is None else min(tick_s, left_s)

    def _left_s(self) -> float | None:
        """The time trials that start now have; None: as long as they take."""
        scheduler = self._engine.setup.scheduler
        tuning_s = scheduler.tuning_end_s if isinstance(scheduler, Transfer) else None
        end_s = self._study.budget.time_s if tuning_s is None else tuning_s
        return None if end_s is None else max(0.0, end_s - self._spent().time_s)

    def _spent(self) -> Spent:
        state, study = self._engine.state, self._study
        time_s = state.spent_s + max(0.0, self._now() - state.last_s)
        if not study.budget.needs_energy:
            return Spent(trials=state.counts.total, epochs=state.epochs, time_s=time_s)
        energy = total(filter(None, (state.energy, self._under_way())))
        return Spent(
            trials=state.counts.total,
            epochs=state.epochs,
            time_s=time_s,
            energy_wh=None if energy is None else energy.wh,
            co2_g=None if energy is None else co2(energy, study._grid).value,
            cost=None
            if energy is None or study.price_per_kwh is None
            else money(energy, study.price_per_kwh).value,
        )

    def _under_way(self) -> Measurement | None:
        """What the epochs that run now will draw, as far as one can tell, where the budget is one of energy.

        A worker begins its next epoch before we have read the report of the last one: to stop within an epoch of the
        limit, an epoch that runs counts as spent.
        """
        state, budget = self._engine.state, self._study.budget
        if not budget.needs_energy or state.trial_energy is None or not state.reports:
            return None
        usual = state.trial_energy.scaled(1 / state.reports)
        ahead = []
        for trial in self._engine.running:
            record = state.trials[trial]
            drawn = record.reports[-1].energy if record.reports else None
            ahead.append(usual if drawn is None else drawn)
        return total(ahead)

    def _rein(self) -> None:
        """Stop trials whose next epoch would be one too many for a budget, which others use up."""
        if self._allowance is not None and self._leave is None:
            stops = self._allowance.stops(self._engine.running, waiting=self._virtual)
            if stops:
                self._executor.stop(stops, reason=self._nearly_used_up, keep=True)

    @property
    def _held_back(self) -> bool:
        """Whether a trial has left for the sake of a budget and can't go on in this session."""
        told = self._allowance is not None and bool(self._allowance.told)
        return told or (self._leases is not None and bool(self._leases.cut))

    @property
    def _nearly_used_up(self) -> str:
        budget, spent = self._study.budget, self._spent()
        used_up = budget.used_up(spent, currency=self._study.currency)
        if used_up is None and self._leases is not None and self._leases.cut:
            return (
                f"{spent.epochs} of {budget.epochs} epochs spent; who could use the others has saved no checkpoint to "
                "go on from: let the training function call run.save(state)"
            )
        return used_up or "what is left of the budget is for the epochs that run"

    def _check_leave(self) -> None:
        """Begin to drain if a signal came, the budget is used up or nothing but failures ever comes."""
        if self._signals:
            self._leave = ("interrupted", self._signal)
            again = "Press Ctrl-C again" if self._signal == "Ctrl-C" else "Send it again"
            self._view.say(
                f"{self._signal}: finishing the running epochs, then leaving. {again} to leave at once."
            )
        elif (
            used_up := self._study.budget.used_up(self._spent(), currency=self._study.currency)
        ) is not None:
            self._leave = ("budget", used_up)
            if self._study.budget.finish:
                self._engine.forget_waiting()
                return
        elif self._hopeless:
            which = "trials of this session" if len(self._engine.state.sessions) > 1 else "trials"
            text = f"the first {self._failed} {which} all failed: {self._why_failed or 'no reason was given'}"
            self._leave = ("failed", text)
            self._view.say(f"Leaving, for {text}")
        else:
            return
        self._executor.stop(list(self._engine.running), reason=self._leave[1], keep=True)

    @property
    def _hopeless(self) -> bool:
        """Whether nothing but failures ever comes, in a study that only epochs, energy or time would end."""
        if self._trained or self._failed < max(_HOPELESS, 2 * self._executor.slots):
            return False
        budget, expected = self._study.budget, self._engine.setup.scheduler.expected
        return budget != Budget() and budget.trials is None and expected is None

    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            self._signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if self._signals > 1:
                raise KeyboardInterrupt

        caught = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            caught.append(signal.SIGHUP)  # a terminal that is closed; under nohup it is ignored and stays so
        return {number: signal.signal(number, on_signal) for number in caught}


def _text_of(error: Exception) -> str:
    """An error in the journal: ours explain themselves."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


__all__ = ["Session"]
