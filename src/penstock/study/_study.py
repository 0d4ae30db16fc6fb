"""Study: the loop that joins the rooms."""

from __future__ import annotations

import copy
import inspect
import math
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from penstock.core import (
    Ended,
    Event,
    Free,
    Measurement,
    Noted,
    Placement,
    PlanPass,
    Reported,
    Resized,
    Saved,
    SessionClosed,
    SessionOpened,
    StudyState,
    Submitted,
    TrialRecord,
    TrialStatus,
    VirtualClock,
    total,
)
from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.energy import LimitRule, PowerLimits, co2, grid, make_meter, money
from penstock.energy._carbon import check_amount
from penstock.execute import Executor, Job, Launch, Local
from penstock.goal import Budget, Goal, Limit, Spent, front, ranked
from penstock.model import Shrink
from penstock.plan import Fluid, choose_count
from penstock.predict import Overhead, Predictors
from penstock.report import View, open_view, row, summarize, summary_text
from penstock.sample import TPE, Gate, Grid, Limited, Sampler, WarmStart
from penstock.schedule import Full, Scheduler, StopRule
from penstock.space import Domain, Space
from penstock.store import Store, StudyEntry, open_store
from penstock.study._allowance import Allowance, allowed_j
from penstock.study._bounds import check_bounds, find_predictors, gate_of, limited, violation_notes
from penstock.study._engine import Engine, Setup, derive_seed
from penstock.study._files import CheckpointKeeper, base_of, folder_of, gone
from penstock.study._foresee import foresee, known_overhead, passes_of, spread_of
from penstock.study._fusing import Fuse, Fuser, check_fuse
from penstock.study._ledger import Foresight
from penstock.study._limits import LimitDesk, check_limits, exclusively, task_of
from penstock.study._pack import pack, unpack
from penstock.study._profile import key_of, measure, recall, said
from penstock.study._transfer import (
    TOPIC,
    Held,
    Transfer,
    check_surrogate,
    held_values,
    inspect_twin,
    middle,
    targets_apart,
)
from penstock.train import Command, Task

if TYPE_CHECKING:
    import pandas

    from penstock.model import CoordinateCheck
    from penstock.report._plots import Plots
    from penstock.report.views import Folded

DEFAULT_STORE = "penstock.db"
DEFAULT_TRIALS = 50
_TICK_S = 0.25
_FORMAT = 1
_SIMULATED_BATCH = 1000
_HOPELESS = 20  # trials that failed, before not one epoch was trained


@final
class Study:
    """Finds the configuration of ``work`` in ``space`` that is best by the goal.

    Nothing happens before ``run()``: the constructor checks its arguments and touches no file.

    Args:
        work: A training function ``train(run)``, a ``Task`` or a ``Command``.
        space: Where configurations come from; a ``Space`` or a dict of domains.
        minimize: Metric (or metrics) to minimise. ``energy_j`` and ``train_s`` are metered by Penstock.
        maximize: Metric (or metrics) to maximise.
        scheduler: How much budget each configuration gets; default ``Full(trials=50)``.
        sampler: Which configuration comes next; default TPE. Or give it to the scheduler.
        executor: Where trials run; default ``Local()``.
        budget: What the study may spend.
        seed: Everything random follows from it.
        store: A path (SQLite), a ``postgresql://`` URL, or False: keep nothing. Default ``penstock.db``.
        name: The study's name in the store; default: the work's name, numbered if taken.
        retries: How often a trial is run again after an error in the training function.
        timeout_s: A trial that reports nothing for so long is killed and counts as failed.
        warm_start: Configurations to try first (or one), or an earlier Study whose best ones to try first.
        stop: Stopping rules (or one), asked after every report.
        planner: Who runs where: ``pk.Fluid()`` lets short trials share devices and long ones spread over several;
            or plan passes of your own. Default: first come first served, one device each.
        files: Folder for checkpoints and logs; default: beside the store; for PostgreSQL, ``penstock-files`` in the
            present folder. A resume from elsewhere finds it.
        meter: Whether to meter the energy of every epoch (estimated where the machine has no counters).
        region: ISO code of the country whose grid feeds the machine, for CO2e; None: the world average, flagged.
        g_per_kwh: Grams of CO2e per kilowatt-hour by your supplier's word, instead of a region.
        price_per_kwh: What a kilowatt-hour costs, for budgets and reports in money.
        currency: Of the price.
        power_limits: Find the best power limit of each trial's GPUs while it trains (Zeus) by this rule
            (``EtaCost(0.5)``, ``LeastEnergy()`` ...) and keep to it; ``PowerLimits(rule, observe=True)`` only says
            what would be saved. Trials then have their devices to themselves. Without such GPUs, or without the
            permission, it is said once and the study goes on.
        limits: Bounds such as ``power_w <= 90`` and ``memory_bytes <= "1.25GB"``. No trial that is predicted to violate
            one starts, whatever the sampler; one that is measured to is noted, is never the best, and teaches the
            predictors.
        predictors: Of the limits' quantities, from ``Profile(task, space).collect()``; or the device model whose
            profile is in the store; default: the one profile of this work that is in the store, if there is one. What
            nobody can predict is learned from what trials report.
        confidence: How likely each limit must be kept, by the predictors' own doubt; 0.5: by the prediction itself.
        fuse: Train many trials of a ``Task`` as one (Hydro): ``"auto"``: on ``Local`` workers, at the count that is
            measured to be fastest, and only where fused and unfused agree; True: the same, but an error where this
            study can't; a number: groups of so many; False: never. What was chosen and why is in the journal. A
            training function is fused by number, where it calls ``run.prepare``.
        surrogate: ``pk.Shrink(8)``: tune a narrow twin of a ``Task``'s model, an eighth as wide, and train the model
            itself with the best of what was found (Hydro). What the space says does not transfer is held meanwhile
            and tuned on the model in a small second stage. With ``Budget(time_s=...)`` the trained model is there
            in time.
        keep: Which trials' last checkpoints to keep once the trials are over: ``"best"`` or ``"all"``.
    """

    def __init__(
        self,
        work: Callable[..., Any] | Command | Any,
        space: Space | Mapping[str, Domain],
        *,
        minimize: str | Iterable[str] | None = None,
        maximize: str | Iterable[str] | None = None,
        scheduler: Scheduler | None = None,
        sampler: Sampler | None = None,
        executor: Executor | None = None,
        budget: Budget | None = None,
        seed: int = 0,
        store: str | Path | bool | None = None,
        name: str | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        warm_start: Iterable[Mapping[str, Any]] | Mapping[str, Any] | Study | None = None,
        stop: Sequence[StopRule] | StopRule = (),
        planner: Fluid | Sequence[PlanPass] | None = None,
        files: str | Path | None = None,
        keep: str = "best",
        meter: bool = True,
        region: str | None = None,
        g_per_kwh: float | None = None,
        price_per_kwh: float | None = None,
        currency: str = "EUR",
        power_limits: LimitRule | PowerLimits | None = None,
        limits: Iterable[Limit] | Limit = (),
        predictors: Predictors | str | None = None,
        confidence: float = 0.95,
        fuse: Fuse = "auto",
        surrogate: Shrink | None = None,
    ) -> None:
        self.goal = Goal.of(minimize, maximize)
        self.space = _check_space(space)
        self.work = _check_work(work, self.space)
        self.budget = _check_type("budget", budget, Budget, Budget())
        self.scheduler, self.sampler = _compose(scheduler, sampler, self.budget)
        self._first = None if warm_start is None else _check_first(warm_start)
        self.confidence = _check_confidence(confidence)
        self._unbound = check_bounds(limits, predictors, confidence)
        self._predictors = predictors.copy() if isinstance(predictors, Predictors) else predictors
        if self._unbound and gate_of(self.sampler) is not None:
            raise InvalidInput("Both the study and its sampler have limits: give them to the study alone.")
        self.surrogate = check_surrogate(
            surrogate, self.work, self.scheduler, self.sampler, self.space, limits=bool(self._unbound)
        )
        held: dict[str, Any] = {}
        if self.surrogate is not None:
            held = held_values(self.space, self.work, self.surrogate.held)
            if self._first is not None:
                self._first = [{k: v for k, v in first.items() if k not in held} for first in self._first]
        if self._first is not None and not self._unbound:  # limits are bound when the store is there
            self.sampler = WarmStart(self._first, then=self.sampler)
        if self.surrogate is not None:
            self.sampler = Held(self.sampler, held)
            self.scheduler = Transfer(
                self.scheduler,
                self.surrogate,
                held=held,
                epochs=self.scheduler.max_epochs or self.work.epochs,
                deadline_s=self.budget.time_s,
            )
        elif isinstance(self.scheduler, Transfer):  # loaded
            self.surrogate = self.scheduler.shrink
        self._twin: Task | None = None
        self.executor = _check_type("executor", executor, Executor, None) or Local()
        self.seed = _check_whole("seed", seed)
        self.retries = _check_whole("retries", retries)
        if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
            raise InvalidInput(f"timeout_s must be a number above 0 seconds, got {timeout_s!r}.")
        self.timeout_s = timeout_s
        self.stop_rules = _check_rules(stop)
        self.planner = _check_planner(planner)
        if keep not in ("best", "all"):
            raise InvalidInput(f'keep takes "best" or "all", got {keep!r}.')
        self.keep = keep
        if not isinstance(meter, bool):
            raise InvalidInput(f"meter takes True or False, got {meter!r}.")
        self.meter = meter
        self.region, self.g_per_kwh = region, g_per_kwh
        self.price_per_kwh, self.currency = price_per_kwh, currency
        self._grid = grid(region, g_per_kwh=g_per_kwh)
        _check_energy(self.budget, self.meter, price_per_kwh, currency)
        self.power_limits = check_limits(power_limits, self.executor, meter=self.meter)
        self.fuse, self._unfused = check_fuse(
            fuse,
            self.work,
            self.executor,
            planned=self.planner is not None,
            power_limits=self.power_limits is not None,
        )
        self._fuser: Fuser | None = None
        if files is not None and (not isinstance(files, str | os.PathLike) or not str(files)):
            raise InvalidInput(f"files takes the path of a folder, got {files!r}.")
        self._files = None if files is None else Path(files).absolute()  # a resume may be elsewhere
        if store is True or not (store is None or store is False or isinstance(store, str | os.PathLike)):
            raise InvalidInput(
                f"store takes a path, a URL, None (penstock.db) or False (keep nothing), not {store!r}."
            )
        self._target: str | Path | None
        self._target = None if store is False else (DEFAULT_STORE if store is None else store)
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise InvalidInput(f"name must be a word, got {name!r}.")
        self._name = name
        self._entry: StudyEntry | None = None
        self._store: Store | None = None
        self._state: StudyState | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    # --- loading ---------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        store: str | Path,
        name: str | None = None,
        *,
        work: Callable[..., Any] | Any | None = None,
        executor: Executor | None = None,
        budget: Budget | None = None,
        fuse: Fuse | None = None,
        files: str | Path | None = None,
    ) -> Study:
        """The study of that name in a store, or its newest one; ``run()`` resumes it.

        The training function, scheduler, sampler and executor come from the store. They are pickles: load only
        stores you trust (reports and the dashboard read the journal without unpickling anything).

        Args:
            store: A path or URL.
            name: The study's name; None: the newest.
            work: Use this training function instead of the stored one.
            executor: Run here instead.
            budget: A new budget, e.g. a larger one.
            fuse: Fuse otherwise from here on; checkpoints fit either way.
            files: Where its folder of checkpoints is now, if it was moved.
        """
        opened = open_store(store, write=False)
        try:
            entry = opened.find(name)
            parts = unpack(opened.work(entry.id), folder_of(opened, entry.id, None), given=work)
        finally:
            opened.close()
        study = cls(
            parts["work"],
            Space.from_json(entry.spec["space"]),
            minimize=[o["metric"] for o in entry.spec["goal"] if not o["maximize"]],
            maximize=[o["metric"] for o in entry.spec["goal"] if o["maximize"]],
            scheduler=parts["scheduler"],
            sampler=None if parts["scheduler"].sampler is not None else parts["sampler"],
            executor=executor or parts["executor"],
            budget=budget or Budget.from_json(entry.spec["budget"]),
            seed=entry.spec["seed"],
            store=store,
            name=entry.name,
            retries=entry.spec["retries"],
            timeout_s=entry.spec["timeout_s"],
            stop=parts["stop"],
            planner=parts["planner"],
            files=files or entry.spec.get("files") or parts["files"],
            keep=entry.spec["keep"],
            meter=entry.spec.get("meter", True),
            region=entry.spec.get("region"),
            g_per_kwh=entry.spec.get("g_per_kwh"),
            price_per_kwh=entry.spec.get("price_per_kwh"),
            currency=entry.spec.get("currency", "EUR"),
            power_limits=parts.get("power_limits"),
            confidence=entry.spec.get("confidence", 0.95),
            fuse=fuse if fuse is not None else entry.spec.get("fuse", "auto") if executor is None else "auto",
        )
        study.goal = Goal.from_json(entry.spec["goal"])
        study.sampler = parts["sampler"]
        study._entry = entry
        return study

    # --- running ---------------------------------------------------------------------------------------------

    def run(self, *, view: str | View | None = None, jsonl: str | Path | None = None) -> Study:
        """Run the study to its end, or resume it where it was left.

        Ctrl-C (or SIGTERM) lets every running trial finish its epoch and leaves; a second one leaves at once. Either
        way ``Study.load(...).run()`` goes on later.

        Args:
            view: ``"live"``, ``"lines"``, ``"auto"`` (live on a terminal, lines elsewhere), or None: quiet.
            jsonl: Also write every event as a JSON line to this file (``"-"``: standard output).
        """
        # They may be others by now.
        _check_energy(self.budget, self.meter, self.price_per_kwh, self.currency)
        if isinstance(self.work, Command) and isinstance(self.executor.clock, VirtualClock):
            raise InvalidInput(
                f"{self.work!r} can't be simulated: only running it would tell its metrics. Simulate a training "
                "function, or run the command on pk.Local()."
            )
        shown = open_view(view, jsonl)
        store = self._open()
        try:
            assert self._entry is not None
            store.lock(self._entry.id)
            if self.surrogate is not None and self._twin is None:
                self._twin = self.work.narrowed(self.surrogate)
            check_limits(self.power_limits, self.executor, meter=self.meter)
            engine = self._engine()
            self._state = engine.state
            _read_journal(store, self._entry, engine)
            if self._fuser is not None:
                for note in engine.state.notes:
                    self._fuser.learn(note)
            if engine.finished:
                return self
            files = self._folder(store, self._entry.id)
            if not isinstance(self.executor.clock, VirtualClock):
                for text in gone(files, engine.state):
                    shown.say(text)
            desk = None
            if self.power_limits is not None:
                desk = LimitDesk(self.power_limits, task_of(self.work), files, store)
                desk.open()
            self.executor.open(self._job(files, self._entry, desk))
            learned = self._know_overheads(engine, store, files, shown)
            notes = self._first_notes(learned, engine, shown)
            _Session(self, engine, store, files, shown, desk).run(notes)
        finally:
            self.executor.close()
            shown.close()
            self._state = self._state or StudyState()
            if self._target is not None:
                store.close()
        return self

    def _open(self) -> Store:
        """The store, open for writing, with the study in it."""
        if self._target is None and self._store is not None:
            return self._store
        store = open_store(self._target, write=True)
        self._store = store
        if self._entry is None:
            try:
                self._entry = self._create(store)
            except BaseException:
                store.close()
                raise
        return store

    def _job(self, files: Path, entry: StudyEntry, desk: LimitDesk | None = None) -> Job:
        options: dict[str, Any] = {"study": f"{entry.name} {entry.created_s:.6f}"}
        if self.meter and not isinstance(self.executor.clock, VirtualClock):
            options["make_meter"] = make_meter if desk is None else desk.meters()
        if self._fuser is not None:
            options["choose_fusion"] = choose_count
        if isinstance(self.planner, Fluid):
            options["sharing"] = True
        return Job(self._twin or self.work, files, self.goal.metrics, self.timeout_s, self.meter, options)

    def _folder(self, store: Store, study: int) -> Path:
        """Where checkpoints and logs go; a throw-away study's folder goes with the object."""
        if self._target is None and self._files is None:
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="penstock-")
            return Path(self._scratch.name)
        folder = folder_of(store, study, self._files)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"Can't make the folder {str(folder)!r} for checkpoints: {error.strerror}."
            ) from error
        return folder

    def _create(self, store: Store) -> StudyEntry:
        taken = {entry.name for entry in store.studies()}
        name = self._name
        if name is None:
            base = getattr(self.work, "name", None) or getattr(self.work, "__name__", None) or "study"
            base = "study" if base == "<lambda>" else base
            name, count = base, 1
            while name in taken:
                count += 1
                name = f"{base}-{count}"
        elif name in taken:
            raise InvalidInput(
                f"There is a study {name!r} in {store.url} already. Go on with it by "
                f"Study.load({str(self._target)!r}, {name!r}).run(), or give this one another name."
            )
        self._bind(store)
        if self._target is not None and self._files is None and store.files is None:
            self._files = base_of(store).absolute()  # a resume may be elsewhere
        parts = {
            "work": self.work,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
            "executor": self.executor,
            "planner": self.planner,
            "stop": self.stop_rules,
            "files": self._files,
            "power_limits": self.power_limits,
        }
        blob = None if self._target is None else pack(parts)
        entry = store.create(name, self.spec(), blob)
        return entry

    def _bind(self, store: Store) -> None:
        """Put the sampler under the limits, with the predictors that are given or in the store."""
        if self._unbound:
            found = self._predictors
            if not isinstance(found, Predictors):
                found = find_predictors(store, self.work, self.space, found)
            self.sampler = limited(self.sampler, self._unbound, found, self.confidence, self._first)
            self._unbound = ()

    def _engine(self) -> Engine:
        foresight = self._foresee()
        width = float(getattr(self.executor, "slots_per_trial", 1))
        passes = passes_of(self.planner, foresight, width)
        self._fuser = None
        alone = passes
        if self._unfused is None:
            self._fuser = Fuser(
                self.fuse,
                self._twin or self.work,
                self.executor.slots,
                learns=self.sampler.learns,
                structural=self.space.structural,
            )
            passes = self._fuser.passes(passes)
        if self.surrogate is not None and self.planner is None:
            passes = (targets_apart(passes, alone),)
        setup = Setup(
            space=self.space,
            goal=self.goal,
            scheduler=self.scheduler,
            sampler=self.sampler,
            planner=(
                *(() if self.power_limits is None else (exclusively,)),
                *passes,
            ),
            budget=self.budget,
            seed=self.seed,
            retries=self.retries,
            rules=self.stop_rules,
            width=width,
            foresight=foresight,
            ahead=None if self._fuser is None else self._fuser.ahead,
            regroup=None
            if self._fuser is None or not isinstance(self.executor, Local)
            else self._fuser.regroup,
        )
        return Engine(setup)

    def _foresee(self, measured: Overhead | None = None) -> Foresight | None:
        """What a planner that looks ahead needs; overheads that are yet to be measured count as none."""
        if not isinstance(self.planner, Fluid):
            return None
        overhead = measured or known_overhead(self.planner, self.executor)
        return foresee(self.planner, self.work, self.sampler, self.executor, overhead)

    def _know_overheads(self, engine: Engine, store: Store, files: Path, view: View) -> Noted | None:
        """Measure what sharing and spreading cost, unless it is known; the executor is open and idle."""
        planner = self.planner
        if not isinstance(planner, Fluid) or known_overhead(planner, self.executor) is not None:
            return None
        key = key_of(self.work, self.executor)
        found = recall(store, key)
        if found is None:
            view.say(
                "Measuring what sharing devices and spreading over several costs; once per work and machine."
            )
            config = self.space.sample(derive_seed(self.seed, "overhead"))
            widest = spread_of(planner, self.work, self.executor)
            found = measure(
                self.executor,
                config,
                files,
                seed=self.seed,
                max_sharing=planner.max_sharing,
                max_devices=widest,
            )
            store.put(key, dict(found.data))
        view.say(said(found))
        foresight = self._foresee(found.overhead)
        if foresight is not None:
            foresight = replace(foresight, memory_bytes=found.memory_bytes)
            old = passes_of(planner, engine.setup.foresight, 1.0)
            passes = engine.setup.planner[: len(engine.setup.planner) - len(old)]
            engine.refine((*passes, *passes_of(planner, foresight, 1.0)), foresight)
        return Noted(self.executor.clock.now_s(), "overhead", dict(found.data))

    def _first_notes(self, learned: Noted | None, engine: Engine, view: View) -> Iterator[Noted]:
        """What a session begins with; the twin is checked within it, for that takes of the study's time."""
        if learned is not None:
            yield learned
        twin = self._know_twin(engine, view)
        if twin is not None:
            yield twin

    def _know_twin(self, engine: Engine, view: View) -> Noted | None:
        """Check the narrow twin, once per study; the executor is open and idle."""
        known = any(note.topic == TOPIC for note in engine.state.notes)
        twin, shrink = self._twin, self.surrogate
        if twin is None or shrink is None or known or isinstance(self.executor.clock, VirtualClock):
            return None
        view.say(f"Checking that a twin {shrink.factor:g} times as narrow trains like the model.")
        held = self.scheduler.held if isinstance(self.scheduler, Transfer) else {}
        threads = min((free.device.cores for free in self.executor.free()), default=1)
        data = inspect_twin(twin, shrink, middle(self.space, held), threads=threads)
        return Noted(self.executor.clock.now_s(), TOPIC, data)

    @property
    def coordinate_check(self) -> CoordinateCheck | None:
        """The check of the narrow twin: by layer, whether activations keep their size over the widths; None: none."""
        from penstock.model import CoordinateCheck

        for note in self.state.notes:
            if note.topic == TOPIC:
                return CoordinateCheck.from_json(note.data["check"])
        return None

    @property
    def surrogate_trials(self) -> list[TrialRecord]:
        """Trials of the narrow twin; without a surrogate, none."""
        return [] if self.surrogate is None else [trial for trial in self.trials if not trial.is_target]

    @property
    def target_trials(self) -> list[TrialRecord]:
        """Trials of the full model in a study with a surrogate; without one, none."""
        return [trial for trial in self.trials if trial.is_target]

    def load_model(self, trial: TrialRecord | None = None) -> Any:
        """The trained network of a ``Task``'s trial, on the CPU and ready to evaluate; default: of the best one.

        In a study with a surrogate the best is the full model. Checkpoints of other trials are kept by ``keep="all"``.

        Raises:
            InvalidInput: There is no such checkpoint, or no network in it.
        """
        from penstock.train._restore import restore

        record = trial or self.best
        if record is None or not record.saved or not isinstance(self.work, Task) or self._entry is None:
            raise InvalidInput(
                "There is no trained network: no trial of a pk.Task has saved a checkpoint yet."
            )
        store = self._store if self._target is None else open_store(self._target, write=False)
        assert store is not None
        try:
            folder = self._folder(store, self._entry.id)
        finally:
            if self._target is not None:
                store.close()
        work = self.work
        if self.surrogate is not None:
            work = self._twin or work.narrowed(self.surrogate)
            work = work.full() if record.is_target else work
        return restore(work, record.config, folder / record.saved[max(record.saved)])

    def spec(self) -> dict[str, Any]:
        """What the study is, JSON-able; kept in the store."""
        return {
            "format": _FORMAT,
            "space": self.space.to_json(),
            "goal": self.goal.to_json(),
            "scheduler": self.scheduler.to_json(),
            "sampler": {"name": type(self.sampler).__name__},
            "executor": type(self.executor).__name__,
            "budget": self.budget.to_json(),
            "seed": self.seed,
            "retries": self.retries,
            "timeout_s": self.timeout_s,
            "keep": self.keep,
            "files": None if self._files is None else str(self._files),
            "meter": self.meter,
            "region": self.region,
            "g_per_kwh": self.g_per_kwh,
            "price_per_kwh": self.price_per_kwh,
            "currency": self.currency,
            "power_limits": None if self.power_limits is None else repr(self.power_limits),
            "limits": [limit.to_json() for limit in self.limits],
            "confidence": self.confidence,
            "fuse": self.fuse,
            "surrogate": None if self.surrogate is None else repr(self.surrogate),
            "work": getattr(self.work, "__qualname__", None) or repr(self.work),
        }

    @property
    def gate(self) -> Gate | None:
        """The limits with what predicts their quantities; None without limits, or before the first run."""
        return gate_of(self.sampler)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of its trials."""
        return self._unbound or (() if self.gate is None else self.gate.limits)

    @property
    def refused(self) -> int:
        """How many proposals were refused because a limit was predicted to be violated."""
        return self.sampler.refused if isinstance(self.sampler, Limited) else 0

    @property
    def queries(self) -> list[int]:
        """How many proposals were looked at for each trial, refused ones included; empty without limits."""
        return self.sampler.queries if isinstance(self.sampler, Limited) else []

    # --- results ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The study's name in its store; None before the first run, if none was given."""
        return self._name if self._entry is None else self._entry.name

    @property
    def store_url(self) -> str | None:
        """What opens the study's store again; None if nothing is kept."""
        if self._target is None or "://" not in str(self._target):
            return None if self._target is None else str(self._target)
        return None if self._store is None else self._store.url  # a URL without its password

    def keep_nothing(self) -> None:
        """Run without a store: for simulations of a study that would otherwise be kept."""
        self._target = None

    @property
    def state(self) -> StudyState:
        """The state: of this object's run, or folded from the journal."""
        if self._state is None:
            if self._entry is None or self._target is None:
                return StudyState()
            store = open_store(self._target, write=False)
            try:
                self._state = StudyState.of(event for _, event in store.read(self._entry.id))
            finally:
                store.close()
        return self._state

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials, in the order of their numbers."""
        return list(self.state.trials.values())

    @property
    def best(self) -> TrialRecord | None:
        """The best trial by its latest report; with several objectives, the first of ``best_trials``.

        Failed trials don't count. None before the first report.
        """
        ranked = self.best_trials
        return ranked[0] if ranked else None

    @property
    def best_trials(self) -> list[TrialRecord]:
        """The Pareto set: all trials that no other trial beats in every objective."""
        best_first = ranked(self.goal, self.state.trials.values())
        if len(self.goal.objectives) == 1:
            return best_first[:1]
        scores = [self.goal.score(record) or () for record in best_first]
        return [best_first[i] for i in front(scores)]

    def best_configs(self, count: int = 10) -> list[Mapping[str, Any]]:
        """The ``count`` best trials' configurations, best first."""
        return [record.config for record in ranked(self.goal, self.state.trials.values())[:count]]

    @property
    def energy(self) -> Measurement | None:
        """The energy of all epochs so far with its source; None where nothing was metered."""
        return self.state.energy

    @property
    def co2(self) -> Measurement | None:
        """Grams of CO2e of that energy, by the region's grid or the world's average."""
        return None if self.energy is None else co2(self.energy, self._grid)

    @property
    def cost(self) -> Measurement | None:
        """What that energy costs; None without a price or where nothing was metered."""
        if self.energy is None or self.price_per_kwh is None:
            return None
        return money(self.energy, self.price_per_kwh, self.currency)

    @property
    def plot(self) -> Plots:
        """The views as Plotly figures: ``study.plot.history()``, ``.curves()``, ``.pareto()``, ``.importance()`` ..."""
        from penstock.report._plots import Plots

        return Plots(self._folded)

    def _folded(self) -> Folded:
        """The journal as the views see it."""
        from penstock.report.views import Folded

        folded = Folded(self.name or "", self.goal, self.spec())
        if self._entry is not None:
            kept = self._target is not None
            store = open_store(self._target, write=False) if kept or self._store is None else self._store
            try:
                for _, event in store.read(self._entry.id):
                    folded.apply(event)
            finally:
                if kept:
                    store.close()
        return folded

    def _repr_html_(self) -> str:
        """The headline as a table, in notebooks."""
        from penstock.report._static import fragment

        return fragment(self._folded())

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per trial: number, status, epochs, seconds, energy, CO2e, configuration and latest metrics.

        A domain that has the name of one of these columns is called ``config.name``, a metric ``metric.name``.
        """
        try:
            import pandas
        except ImportError as error:
            from penstock.core.errors import MissingDependency

            raise MissingDependency(
                'to_dataframe needs pandas: pip install "penstock[dataframe]".'
            ) from error
        spec = self.spec()
        return pandas.DataFrame([row(record, spec) for record in self.trials])

    def summary(self) -> dict[str, Any]:
        """Headline numbers, JSON-able."""
        return summarize(self.name, self.goal, self.state, self.spec())

    def __str__(self) -> str:
        kept = self._target is not None
        return summary_text(self.name, self.goal, self.state, spec=self.spec(), kept=kept)

    def __repr__(self) -> str:
        counts = self.state.counts
        return (
            f"<Study {self.name or 'not run yet'}: {self.goal}, {counts.ended} of {counts.total} trials over>"
        )


@final
class _Session:
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
        self._signals = 0
        self._signal = "Ctrl-C"
        self._failed = 0  # trials of this session
        self._why_failed = ""
        self._trained = False  # one epoch of this session, at least
        self._virtual = isinstance(study.executor.clock, VirtualClock)
        self._batch: list[Event] = []
        self._hungry = True
        self._desk = desk
        self._unmetered = False  # said that there is no energy
        self._allowance: Allowance | None = None
        if study.budget.needs_energy and not study.budget.finish:
            limit_j = allowed_j(study.budget, study._grid, study.price_per_kwh)
            self._allowance = Allowance(limit_j, engine.state)

    def run(self, notes: Iterable[Noted] = ()) -> None:
        """Open the session, loop, close it."""
        engine = self._engine
        self._take(SessionOpened(self._now(), socket.gethostname(), os.getpid()))
        for note in notes:
            self._take(note)
        self._write(everything=True)
        engine.requeue()
        self._view.open(self._study.name or "", self._study.goal, engine.state, self._executor.slots)
        previous = self._catch_signals()
        try:
            self._open_desk()
            self._say_unknown()
            reason, detail = self._loop()
            self._read_desk()
            self._take(SessionClosed(self._now(), reason, detail))
            self._write(everything=True)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        self._keeper.finish(engine.state)

    def _loop(self) -> tuple[str, str]:
        engine, executor = self._engine, self._executor
        while True:
            if self._leave is None:
                self._check_leave()
            if self._leave is None and self._hungry:
                self._feed()
            elif engine.moving and self._finishing:
                executor.launch([self._launch(placement) for placement in engine.plan(())])
            self._write()
            if self._leave is not None and not engine.running and not (engine.moving and self._finishing):
                return self._leave
            if engine.done:
                return "finished", ""
            if not engine.running:
                if self._allowance is not None and self._allowance.told:
                    return "budget", self._nearly_used_up  # the scheduler waits for who was stopped
                engine.check_finished()
            self._rein()
            events = executor.poll(self._timeout_s())
            # Only an end makes room; devices that joined are noticed when nothing else happens.
            self._hungry = not events
            for event in events:
                self._take(engine.annotate(event))
            for trial, why in engine.take_stops(self._now()):
                executor.stop([trial], reason=why)
            self._view.tick(engine.state, lambda: engine.setup.scheduler.expected, len(engine.running))

    def _feed(self) -> None:
        """Ask for groups, journal them, launch what fits, and what the allowance of energy allows."""
        allowance, engine = self._allowance, self._engine
        if allowance is None or engine.foresees or engine.setup.ahead is not None:
            self._feed_on(self._executor.free())
            return
        more = True
        while more:
            free = self._executor.free()
            width, running = engine.setup.width, len(engine.running)
            allowed, more = allowance.within(free, engine.running, engine.units(free), width)
            self._feed_on(allowed)
            more = more and len(engine.running) > running

    def _feed_on(self, free: Sequence[Free]) -> None:
        engine = self._engine
        now_s = self._now()
        if not free and not engine.foresees:
            return
        for event in engine.submit(free, now_s):
            self._note(event)
            if isinstance(event, Submitted):
                self._foretell(event)
        for event in engine.take_drops(now_s):
            self._take(event)
        placements = engine.plan(free, now_s)
        self._write()  # durable before it is acted on
        if placements:
            self._executor.launch([self._launch(placement) for placement in placements])
        for resize in engine.take_resizes():
            self._executor.resize(resize.placement.segments[0].trial.id, resize.shares)
        for order in engine.take_regroups(self._executor.free()):
            self._take(Noted(now_s, "split", {"trials": list(order.members), "device": order.device}))
            self._executor.stop(order.members, reason=f"goes on on {order.device}", keep=True)

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
            checkpoints.append(path)
            known.append(record.epoch)
        fuser = self._study._fuser
        facts = {} if fuser is None else fuser.facts(placement)
        return Launch(placement, tuple(checkpoints), tuple(known), facts)

    def _take(self, event: Event) -> None:
        """Apply an event and keep it for the next write."""
        self._engine.apply(event)
        self._note(event)
        if isinstance(event, Ended | Resized) or self._engine.restless:
            self._hungry = True
        if self._study._fuser is not None and isinstance(event, Noted | Ended):
            self._hear_of_fusion(self._study._fuser, event)
        if isinstance(event, Ended) and not event.kept and not event.retry:
            self._judge(event.trial)
        if isinstance(event, Reported):
            self._trained = True
            if event.energy is None:
                self._say_unmetered(event)
        elif isinstance(event, Ended) and event.status is TrialStatus.FAILED and not event.retry:
            self._failed += 1
            self._why_failed = self._why_failed or event.reason
        if isinstance(event, Saved | Ended):
            self._keeper.on(event, self._engine.state, self._engine.pins)
        if self._allowance is not None:
            if isinstance(event, Reported):
                self._allowance.heard(event)
                self._hungry = True  # it is known better now what there is room for
            elif isinstance(event, Ended):
                self._allowance.ended(event)
        if self._desk is not None and isinstance(event, Reported | Ended):
            self._read_desk()

    def _hear_of_fusion(self, fuser: Fuser, event: Noted | Ended) -> None:
        """What workers have measured counts for the trials to come; a group whose worker died is halved."""
        if isinstance(event, Noted):
            fuser.learn(event)
            return
        note = fuser.lost(event, self._now())
        if note is not None:
            self._take(note)

    def _judge(self, trial: int) -> None:
        """Note the limits that a trial was measured to violate."""
        gate, record = self._study.gate, self._engine.state.trials[trial]
        if gate is not None:
            for note in violation_notes(gate, record, self._now()):
                if note.data["limit"] not in record.violated:
                    self._take(note)

    def _say_unknown(self) -> None:
        """Say which limits nobody can predict yet."""
        gate = self._study.gate
        if gate is not None and gate.unknown:
            names = ", ".join(sorted({limit.name for limit in gate.unknown}))
            self._view.say(
                f"{names}: without a profile, limits are known only from what trials report. "
                '"penstock profile" makes one, so that no trial beyond them starts.'
            )

    def _say_unmetered(self, event: Reported) -> None:
        budget = self._study.budget.needs_energy
        if self._unmetered or not (budget or (self._study.meter and not self._virtual)):
            return
        self._unmetered = True
        so = ", so the budget in Wh, CO2e or money does not count it" if budget else ""
        why = "" if self._virtual else f"The workers' logs in {self._files / 'logs'} say why. "
        self._view.say(
            f"Trial {event.trial} reports no energy{so}. {why}"
            'Run "penstock doctor" to see what can be measured here.'
        )

    def _open_desk(self) -> None:
        """Say at once if there is nothing whose power limit could be set."""
        if self._desk is not None:
            refusal = self._desk.refusal(self._executor.free(), virtual=self._virtual)
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
        if not budget.needs_energy or state.energy is None or not state.epochs:
            return None
        usual = state.energy.scaled(1 / state.epochs)
        ahead = []
        for trial in self._engine.running:
            record = state.trials[trial]
            drawn = record.reports[-1].energy if record.reports else None
            ahead.append(usual if drawn is None else drawn)
        return total(ahead)

    def _rein(self) -> None:
        """Stop trials whose next epoch would be one too many for a budget of energy, which others use up."""
        if self._allowance is not None and self._leave is None:
            stops = self._allowance.stops(self._engine.running, waiting=self._virtual)
            if stops:
                self._executor.stop(stops, reason=self._nearly_used_up, keep=True)

    @property
    def _nearly_used_up(self) -> str:
        budget, spent = self._study.budget, self._spent()
        used_up = budget.used_up(spent, currency=self._study.currency)
        return used_up or "what is left of the energy budget is for the epochs that run"

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

        return {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}


def _read_journal(store: Store, entry: StudyEntry, engine: Engine) -> None:
    try:
        engine.replay(event for _, event in store.read(entry.id))
    except StoreCorrupt as error:
        raise StoreCorrupt(
            f"{error} To go on from the last good record, run: penstock resume --repair {store.url}"
        ) from error


# --- checking arguments --------------------------------------------------------------------------------------


def _check_space(space: Any) -> Space:
    if isinstance(space, Space):
        return space
    if isinstance(space, Mapping):
        return Space(space)
    raise InvalidInput(f"space takes a Space or a dict of domains, got {space!r}.")


def _check_work(work: Any, space: Space) -> Any:
    if isinstance(work, Command):
        unknown = [field for field in work.fields if field not in space.names]
        if unknown:
            raise InvalidInput(
                f"The command uses {{{unknown[0]}}}, but the space has no such domain; it has {list(space.names)}."
            )
        return work
    if not callable(work):
        raise InvalidInput(f"work takes a function train(run), a Task or a Command, got {work!r}.")
    if isinstance(work, type):
        raise InvalidInput(f"work takes a function, got the class {work.__name__}; give an object of it.")
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):  # a built-in that does not tell
        return work
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(work, "__name__", None) or repr(work)
        raise InvalidInput(
            f"work is called with one argument, the run: {name}{signature} can't be ({error}). Write def {name}(run)."
        ) from None
    return work


def _check_first(warm_start: Any) -> list[Mapping[str, Any]]:
    if isinstance(warm_start, Study):
        return warm_start.best_configs()
    if isinstance(warm_start, Mapping):
        return [warm_start]
    if isinstance(warm_start, Iterable) and not isinstance(warm_start, str):
        configs = list(warm_start)
        if all(isinstance(config, Mapping) for config in configs):
            return configs
        warm_start = configs
    raise InvalidInput(
        f'warm_start takes configurations such as [{{"lr": 0.1}}], or an earlier Study, got {warm_start!r}.'
    )


def _check_rules(stop: Any) -> tuple[StopRule, ...]:
    given = (stop,) if isinstance(stop, StopRule | type) or not isinstance(stop, Iterable) else tuple(stop)
    for rule in given:
        _check_type("stop", rule, StopRule, None)
        if rule is None:
            raise InvalidInput("stop takes stopping rules, got None; without one, leave it out.")
    return given


def _check_planner(planner: Any) -> Fluid | tuple[PlanPass, ...] | None:
    if planner is None or isinstance(planner, Fluid):
        return planner
    if isinstance(planner, type):
        _check_type("planner", planner, Fluid, None)
    passes = tuple(planner) if isinstance(planner, Iterable) and not isinstance(planner, str) else (None,)
    if not all(callable(each) and not isinstance(each, type) for each in passes):
        raise InvalidInput(f"planner takes pk.Fluid() or a list of plan passes (functions), got {planner!r}.")
    return passes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_confidence(value: Any) -> float:
    if not (_is_number(value) and 0 < value < 1):
        raise InvalidInput(
            f"confidence must be a number between 0 and 1 (0.5: the prediction itself), got {value!r}."
        )
    return float(value)


def _check_energy(budget: Budget, meter: bool, price_per_kwh: Any, currency: Any) -> None:
    if price_per_kwh is not None:
        check_amount("price_per_kwh", price_per_kwh)
    if not isinstance(currency, str) or not currency.strip():
        raise InvalidInput(f'currency takes a word such as "EUR", got {currency!r}.')
    if budget.needs_energy and not meter:
        raise InvalidInput("A budget in Wh, CO2e or money needs the meter: drop meter=False, or the budget.")
    if budget.cost is not None and price_per_kwh is None:
        raise InvalidInput(
            f"Budget cost={budget.cost:g} needs the price of electricity: give price_per_kwh=."
        )


def _check_type(name: str, value: Any, kind: type, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, type) and issubclass(value, kind):
        raise InvalidInput(
            f"{name} takes an object, got the class {value.__name__}: write {value.__name__}(...)."
        )
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} takes a {kind.__name__}, got {value!r}.")
    return value


def _check_whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{name} must be a whole number of at least 0, got {value!r}.")
    return value


def _compose(scheduler: Any, sampler: Any, budget: Budget) -> tuple[Scheduler, Sampler]:
    sampler = _check_type("sampler", sampler, Sampler, None)
    scheduler = _check_type("scheduler", scheduler, Scheduler, None)
    if scheduler is not None and scheduler.sampler is not None:
        if sampler is not None:
            raise InvalidInput(
                "Both the study and its scheduler were given a sampler. Give it to one: "
                f"{type(scheduler).__name__}(..., sampler={type(sampler).__name__}())."
            )
        sampler = _check_type("the scheduler's sampler", scheduler.sampler, Sampler, None)
    if sampler is None:
        sampler = TPE()
    if scheduler is None:
        unbounded = isinstance(sampler, Grid) or budget != Budget()
        scheduler = Full() if unbounded else Full(trials=DEFAULT_TRIALS)
    endless = isinstance(scheduler, Full) and scheduler.trials is None and not isinstance(sampler, Grid)
    if endless and budget == Budget():
        raise InvalidInput(
            "This study has no end: give Full(trials=...) or budget=Budget(trials=...), (time_s=...) or the like."
        )
    # Of its own: an object given to two studies is started by neither of them.
    return copy.copy(scheduler), copy.copy(sampler)
