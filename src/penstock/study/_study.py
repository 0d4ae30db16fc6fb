"""Study: the loop that joins the rooms."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from penstock.core import (
    Measurement,
    Noted,
    PlanPass,
    StudyState,
    Submitted,
    TrialRecord,
    VirtualClock,
)
from penstock.core.errors import InvalidInput, PenstockError, SensorError, StoreCorrupt
from penstock.core.state import DREW
from penstock.energy import (
    LimitRule,
    Meter,
    PowerLimits,
    SimulatedGpus,
    co2,
    cpu_sensors,
    grid,
    make_meter,
    money,
)
from penstock.execute import Executor, Job, Local
from penstock.goal import Budget, Goal, Limit, front, ranked
from penstock.model import Shrink
from penstock.plan import Fluid, choose_count
from penstock.predict import Overhead, Predictors
from penstock.report import View, open_view, row, summarize, summary_text
from penstock.report._read import read_state
from penstock.sample import Gate, Sampler, WarmStart
from penstock.schedule import Scheduler, StopRule
from penstock.space import Domain, Space
from penstock.store import Store, StudyEntry, open_store
from penstock.store._open import is_in_memory, sqlite_path
from penstock.study._arguments import (
    check_bubbles,
    check_command,
    check_confidence,
    check_energy,
    check_first,
    check_goal,
    check_planner,
    check_rules,
    check_space,
    check_type,
    check_whole,
    check_width,
    check_work,
    compose,
    is_number,
    longest,
)
from penstock.study._bounds import check_bounds, check_probe, find_predictors, gate_of, limited
from penstock.study._defaults import told
from penstock.study._engine import Engine, Setup, derive_seed
from penstock.study._files import base_of, folder_of, gone
from penstock.study._foresee import foresee, known_overhead, passes_of, spread_of
from penstock.study._fusing import Fuse, Fuser, check_fuse, whole_devices
from penstock.study._ledger import Foresight
from penstock.study._lending import Paces, rule_of, with_bubbles
from penstock.study._limits import LimitDesk, check_limits, exclusively, task_of
from penstock.study._limits import alone as by_themselves
from penstock.study._pack import pack, unpack
from penstock.study._profile import key_of, measure, recall, said
from penstock.study._session import Session
from penstock.study._transfer import (
    TOPIC,
    Held,
    Transfer,
    check_surrogate,
    held_values,
    inspect_twin,
    middle,
    part_of,
    quality_objective,
    quality_of,
    targets_apart,
)
from penstock.train import Command, Profile, Task
from penstock.train._process import loads_work

if TYPE_CHECKING:
    import pandas

    from penstock.model import CoordinateCheck
    from penstock.report._plots import Plots
    from penstock.report.views import Folded

DEFAULT_STORE = "penstock.db"
_FORMAT = 1


@final
class Study:
    """Finds the configuration of ``work`` in ``space`` that is best by the goal.

    Nothing happens before ``run()``: the constructor checks its arguments and touches no file.

    Args:
        work: A training function ``train(run)``, a ``Task`` or a ``Command``.
        space: Where configurations come from; a ``Space`` or a dict of domains.
        minimize: Metric (or metrics) to minimise. ``energy_j`` and ``train_s`` are metered by Penstock.
        maximize: Metric (or metrics) to maximise.
        scheduler: How much budget each configuration gets; default ``Full(trials=50)``, and for a ``Task`` of 3 epochs
            and more, if there is no budget, ``ASHA`` with 100 trials: ``chosen`` tells why.
        sampler: Which configuration comes next; default TPE. Or give it to the scheduler.
        executor: Where trials run; default ``Local()``.
        budget: What the study may spend.
        seed: Everything random follows from it.
        store: A path (SQLite), a ``postgresql://`` URL, or False (or ``":memory:"``): keep nothing. Default
            ``penstock.db``.
        name: The study's name in the store; default: the work's name, numbered if taken.
        retries: How often a trial is run again after an error in the training function.
        timeout_s: A trial that reports nothing for so long is killed and counts as failed.
        warm_start: Configurations to try first (or one), or an earlier Study whose best ones to try first.
        stop: Stopping rules (or one), asked after every report.
        planner: Who runs where: ``pk.Fluid()`` lets short trials share devices and long ones spread over several;
            or plan passes of your own. Default: first come first served, one device each.
        files: Folder for checkpoints and logs; default: beside the store; for PostgreSQL, ``penstock-files`` in the
            present folder. A resume from elsewhere finds it.
        meter: Whether to meter the energy of every epoch (estimated where the machine has no counters); or
            ``SimulatedGpus(load)``: as if trials had such GPUs.
        region: ISO code of the country whose grid feeds the machine, for CO2e; None: the world average, flagged.
        g_per_kwh: Grams of CO2e per kilowatt-hour by your supplier's word, instead of a region.
        price_per_kwh: What a kilowatt-hour costs, for budgets and reports in money.
        currency: Of the price.
        power_limits: Find the best power limit of each trial's GPUs while it trains (Zeus) by this rule
            (``EtaCost(0.5)``, ``LeastEnergy()`` ...) and keep to it; ``PowerLimits(rule, observe=True)`` only says
            what would be saved. Trials then have their devices to themselves. Without such GPUs, or without the
            permission, it is said once and the study goes on.
        limits: Bounds such as ``power_w <= 90`` and ``memory_bytes <= "1.25GB"``. No trial that is predicted to violate
            one starts, whatever the sampler; one that is measured to is noted, is neither promoted nor the best, and
            teaches the predictors.
        predictors: Of the limits' quantities, from ``Profile(task, space).collect()``; or the device model whose
            profile is in the store; default: the one profile of this work that is in the store, if there is one. What
            nobody can predict is learned from what trials report.
        confidence: How likely each limit must be kept, by the predictors' own doubt; 0.5: by the prediction itself.
        probe: ``Profile(task, space)``, perhaps the one that made the predictors: where they leave it in doubt whether
            a network keeps the limits, it is measured before it is trained, at most 8 networks per trial. So the
            search goes nearer to the limits, as sure as before. With several trials at a time on this machine, which
            would disturb readings, only a profile with ``measure=``, of a device elsewhere, measures.
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
        meter: bool | SimulatedGpus = True,
        region: str | None = None,
        g_per_kwh: float | None = None,
        price_per_kwh: float | None = None,
        currency: str = "EUR",
        power_limits: LimitRule | PowerLimits | None = None,
        limits: Iterable[Limit] | Limit = (),
        predictors: Predictors | str | None = None,
        confidence: float = 0.999,
        probe: Profile | None = None,
        fuse: Fuse = "auto",
        surrogate: Shrink | None = None,
    ) -> None:
        self.goal = Goal.of(minimize, maximize)
        self.space = check_space(space)
        self.work = check_work(work, self.space)
        self.budget = check_type("budget", budget, Budget, Budget())
        self.scheduler, self.sampler = compose(scheduler, sampler, self.budget, self.work, self.goal)
        if isinstance(self.work, Task):
            self.work = self.work.over(longest(self.scheduler))
        # Nothing was said of how to search. People choose domains around what is usual, so that is tried first.
        by_default = scheduler is None and sampler is None and budget is None and isinstance(self.work, Task)
        self._first: list[Mapping[str, Any]] | None = None
        if warm_start is None and by_default and not limits:
            self._first = [self.space.middle]
        elif warm_start is not None:
            given = warm_start.best_configs() if isinstance(warm_start, Study) else check_first(warm_start)
            self._first = given
        self.confidence = check_confidence(confidence)
        self._unbound = check_bounds(limits, predictors, confidence)
        self.probe = check_probe(probe, self._unbound)
        self._predictors = predictors.copy() if isinstance(predictors, Predictors) else predictors
        if self._unbound and gate_of(self.sampler) is not None:
            raise InvalidInput("Both the study and its sampler have limits: give them to the study alone.")
        self.surrogate = check_surrogate(surrogate, self.work, self.scheduler, self.sampler, self.space)
        held: dict[str, Any] = {}
        if self.surrogate is not None:
            held = held_values(self.space, self.work, self.surrogate.held)
            if self._first is not None:
                self._first = [{k: v for k, v in first.items() if k not in held} for first in self._first]
        if self._first is not None:  # else the study would be in the store, with a mistake in it that stays
            tuned = part_of(self.space, [name for name in self.space.names if name not in held])
            WarmStart(self._first, then=self.sampler).check(tuned if held else self.space)
        if self._first is not None and (self.surrogate is not None or not self._unbound):
            self.sampler = WarmStart(self._first, then=self.sampler)
            self._first = None  # others are bound with the limits, when the store is there
        if self.surrogate is not None:
            self.sampler = Held(self.sampler, held)
            self.scheduler = Transfer(
                self.scheduler,
                self.surrogate,
                held=held,
                epochs=self.scheduler.max_epochs or self.work.epochs,
                deadline_s=self.budget.time_s,
                prefer=quality_of(self.goal),
                quality=quality_objective(self.goal),
            )
        elif isinstance(self.scheduler, Transfer):  # loaded
            self.surrogate = self.scheduler.shrink
        self._twin: Task | None = None
        self.executor = check_type("executor", executor, Executor, None) or Local()
        self.seed = check_whole("seed", seed)
        self.retries = check_whole("retries", retries)
        if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
            raise InvalidInput(f"timeout_s must be a number above 0 seconds, got {timeout_s!r}.")
        self.timeout_s = timeout_s
        self.stop_rules = check_rules(stop, self.goal)
        self.planner = check_planner(planner)
        if keep not in ("best", "all"):
            raise InvalidInput(f'keep takes "best" or "all", got {keep!r}.')
        self.keep = keep
        self._gpus = meter if isinstance(meter, SimulatedGpus) else None
        if not isinstance(meter, bool | SimulatedGpus):
            raise InvalidInput(f"meter takes True, False or SimulatedGpus(...), got {meter!r}.")
        self._check_imagined()
        self.meter = meter is not False
        self.region, self.g_per_kwh = region, g_per_kwh
        self.price_per_kwh, self.currency = price_per_kwh, currency
        self._grid = grid(region, g_per_kwh=g_per_kwh)
        check_energy(self.budget, self.meter, price_per_kwh, currency)
        check_goal(self.goal, self.work, meter=self.meter)
        check_width(self.planner, self.executor)
        check_command(self.work, self.scheduler)
        self.power_limits = check_limits(power_limits, self.executor, meter=self.meter)
        check_bubbles(self.planner, self.executor, power_limits=self.power_limits is not None)
        self.fuse, self._unfused = check_fuse(
            fuse,
            self.work,
            self.executor,
            scheduler=self.scheduler,
            planner=self.planner,
            power_limits=self.power_limits is not None,
        )
        self._fuser: Fuser | None = None
        self._paces = Paces()
        self.chosen: str | None = None
        """What was chosen where nothing was said, and why, in one line; None: everything was said."""
        if by_default:
            inner = self.scheduler.inner if isinstance(self.scheduler, Transfer) else self.scheduler
            chosen = self.sampler.then if isinstance(self.sampler, Held) else self.sampler
            self.chosen = told(self.work, inner, chosen, self.executor, self._unfused)
        if files is not None and (not isinstance(files, str | os.PathLike) or not str(files)):
            raise InvalidInput(f"files takes the path of a folder, got {files!r}.")
        self._files = None if files is None else Path(files).absolute()  # a resume may be elsewhere
        if store is True or not (store is None or store is False or isinstance(store, str | os.PathLike)):
            raise InvalidInput(
                f"store takes a path, a URL, None (penstock.db) or False (keep nothing), not {store!r}."
            )
        self._target: str | Path | None
        self._target = None if store is False else (DEFAULT_STORE if store is None else store)
        if self._target is not None and is_in_memory(self._target):
            self._target = None  # there would be nothing to read once it is closed
        self._home: str | None = None  # where a relative path of the store begins, once that is open
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
        check_type("executor", executor, Executor, None)
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
            executor=parts["executor"] if executor is None else executor,
            budget=Budget.from_json(entry.spec["budget"]) if budget is None else budget,
            seed=entry.spec["seed"],
            store=store,
            name=entry.name,
            retries=entry.spec["retries"],
            timeout_s=entry.spec["timeout_s"],
            stop=parts["stop"],
            planner=parts["planner"],
            files=(entry.spec.get("files") or parts["files"]) if files is None else files,
            keep=entry.spec["keep"],
            meter=_gpus_of(parts, executor) or entry.spec.get("meter", True),
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
        study.probe = parts.get("probe")
        study._entry = entry
        study._stay()
        return study

    # --- running ---------------------------------------------------------------------------------------------

    def run(self, *, view: str | View | None = None, jsonl: str | Path | None = None) -> Study:
        """Run the study to its end, or resume it where it was left.

        Ctrl-C (or SIGTERM, SIGHUP) lets every running trial finish its epoch and leaves; a second one leaves at once.
        Either way ``Study.load(...).run()`` goes on later.

        Args:
            view: ``"live"``, ``"lines"``, ``"auto"`` (live on a terminal, lines elsewhere), ``"quiet"`` or
                None, or a View such as a logger.
            jsonl: Also write every event as a JSON line to this file (``"-"``: standard output).
        """
        if loads_work():  # whose workers would import it, too, and so on
            raise InvalidInput(
                "A study runs where a module is imported that a worker needs for its training function: each worker "
                'would run it again. Put study.run() there below if __name__ == "__main__": or into a function.'
            )
        # They may be others by now.
        self.budget = check_type("budget", self.budget, Budget, Budget())
        check_energy(self.budget, self.meter, self.price_per_kwh, self.currency)
        if isinstance(self.work, Command) and isinstance(self.executor.clock, VirtualClock):
            raise InvalidInput(
                f"{self.work!r} can't be simulated: only running it would tell its metrics. Simulate a training "
                "function, or run the command on pk.Local()."
            )
        self.executor.prepare(self.work)
        shown = open_view(view, jsonl)
        store = self._open()
        try:
            assert self._entry is not None
            store.lock(self._entry.id)
            if self.surrogate is not None and self._twin is None:
                self._twin = self.work.narrowed(self.surrogate)
            check_limits(self.power_limits, self.executor, meter=self.meter)
            engine = self._engine()
            if self.measures and self.gate is not None:
                self.gate.measured_by(_nothing_yet)  # proposals are replayed as they were made
            self._state = engine.state
            _read_journal(store, self._entry, engine)
            if self._fuser is not None:
                for note in engine.state.notes:
                    self._fuser.learn(note, earlier=True)
            counted = self._entry.spec["budget"].get("trials")
            rebudgeted = engine.rebudgeted(counted, self.executor.clock.now_s())
            if engine.over_with(rebudgeted):
                self._say_over(shown)
                return self
            if self.chosen is not None and not engine.state.sessions:
                shown.say(self.chosen)
            files = self._folder(store, self._entry.id)
            if not isinstance(self.executor.clock, VirtualClock):
                for text in gone(files, engine.state):
                    shown.say(text)
            desk = None
            if self.power_limits is not None:
                desk = LimitDesk(self.power_limits, task_of(self.work), files, store)
                desk.open()
            self.executor.open(self._job(files, self._entry, desk))
            if self._fuser is not None:
                self._fuser.on(self.executor.slots)
            notes = self._first_notes(rebudgeted, engine, store, files, shown)
            with _old_objects_set_aside():
                Session(self, engine, store, files, shown, desk).run(notes)
            if rebudgeted is not None and engine.finished:
                self._say_over(shown)
            self._say_failed(shown)
        finally:
            self.executor.close()
            shown.close()
            self._state = self._state or StudyState()
            if self._target is not None:
                store.close()
        return self

    def _say_over(self, view: View) -> None:
        """Say why there are fewer trials than a budget of them allows, in a study that is over."""
        count = self.state.counts.total
        if self.budget.trials is not None and self.budget.trials > count:
            view.say(
                f"The study is over: {self.scheduler.no_more}. So there are no more trials in it than its {count}; for "
                "more, start another one with warm_start=."
            )

    def _say_failed(self, view: View) -> None:
        """Say that nothing worked: a study that shows nothing would look as if it had."""
        counts = self.state.counts
        if counts.failed and counts.failed == counts.total:
            first = self.trials[0]
            view.say(
                f"Nothing was found: {'the only trial' if counts.total == 1 else f'all {counts.total} trials'} failed, "
                f"trial {first.id} with: {first.reason}"
            )

    def _open(self) -> Store:
        """The store, open for writing, with the study in it."""
        if self._target is None and self._store is not None:
            return self._store
        store = open_store(self._place(), write=True)
        self._store = store
        self._stay()
        if self._entry is None:
            try:
                self._entry = self._create(store)
            except BaseException:
                store.close()
                raise
        return store

    def _stay(self) -> None:
        """The store is there now: its path is meant from this folder, wherever the process goes (``os.chdir``)."""
        if self._home is None and self._target is not None:
            with contextlib.suppress(OSError):  # the folder is gone
                self._home = os.getcwd()

    def _place(self) -> str | Path | None:
        """What opens the store from the present folder."""
        path = None if self._target is None or self._home is None else sqlite_path(self._target)
        if path is None or path.is_absolute():
            return self._target
        with contextlib.suppress(OSError):
            if os.getcwd() == self._home:
                return self._target
        return Path(self._home or "") / path

    def _job(self, files: Path, entry: StudyEntry, desk: LimitDesk | None = None) -> Job:
        options: dict[str, Any] = {"study": f"{entry.name} {entry.created_s:.6f}"}
        if self.meter and not isinstance(self.executor.clock, VirtualClock):
            plain = self._gpus or make_meter
            options["make_meter"] = plain if desk is None else desk.meters(self._gpus)
        elif desk is not None:
            options |= desk.for_simulated()
        if self._fuser is not None:
            options["choose_fusion"] = choose_count
        if isinstance(self.planner, Fluid):
            options |= {"sharing": True, "spread": self.planner.spread}
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
        if self._name is not None and self._name in store.names() and not _gave_way(store, self._name):
            raise InvalidInput(
                f"There is a study {self._name!r} in {store.url} already. Go on with it by "
                f"Study.load({str(self._target)!r}, {self._name!r}).run(), or give this one another name."
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
            "gpus": self._gpus,
            "probe": self.probe,
        }
        blob = None if self._target is None else pack(parts)
        while True:
            name = self._name or self._numbered(store.names())
            try:
                return store.create(name, self.spec(), blob)
            except InvalidInput:
                if self._name is not None or name not in store.names():
                    raise  # else another process was faster, and the next number will do

    def _numbered(self, taken: Collection[str]) -> str:
        """The work's name, numbered if taken."""
        base = getattr(self.work, "name", None) or getattr(self.work, "__name__", None) or "study"
        base = "study" if base == "<lambda>" else base
        numbers = (f"{base}-{count}" for count in itertools.count(2))
        return next(name for name in itertools.chain([base], numbers) if name not in taken)

    def _bind(self, store: Store) -> None:
        """Put the sampler under the limits, with the predictors that are given or in the store."""
        if self._unbound:
            found = self._predictors
            if not isinstance(found, Predictors):
                found = find_predictors(store, self.work, self.space, found)
            sampler = limited(self.sampler, self._unbound, found, self.confidence, self._first)
            if self.surrogate is not None and sampler.gate.unknown:
                names = ", ".join(sorted({limit.name for limit in sampler.gate.unknown}))
                raise InvalidInput(
                    f"Limits of a study with a surrogate are about the full model, and nothing predicts its {names}: "
                    "what the narrow twin draws does not tell. Give predictors=Profile(task, space).collect(), or "
                    'run "penstock profile" first.'
                )
            self.sampler, self._unbound = sampler, ()

    def _engine(self) -> Engine:
        foresight = self._foresee()
        self._fuser = None
        if self._unfused is None:
            self._fuser = Fuser(
                self.fuse,
                self._twin or self.work,
                self.executor.slots,
                learns=self.sampler.learns,
                structural=self.space.structural,
            )
            self._fuser.rule = rule_of(self.executor)
        setup = Setup(
            space=self.space,
            goal=self.goal,
            scheduler=self.scheduler,
            sampler=self.sampler,
            planner=self._passes(foresight),
            budget=self.budget,
            seed=self.seed,
            retries=self.retries,
            rules=self.stop_rules,
            width=self._width,
            foresight=foresight,
            twins=self.surrogate is not None,
            ahead=None if self._fuser is None else self._fuser.ahead,
            regroup=None
            if self._fuser is None or not isinstance(self.executor, Local)
            else self._fuser.regroup,
        )
        return Engine(setup)

    @property
    def measures(self) -> bool:
        """Whether networks are measured before training where their limits are in doubt: nothing disturbs that."""
        if self.probe is None:
            return False
        alone = self.executor.slots == 1 and not isinstance(self.planner, Fluid)
        return self.probe.elsewhere or alone or isinstance(self.executor.clock, VirtualClock)

    @property
    def counts_own_energy(self) -> bool:
        """Whether what this process draws for the study, before there are trials, is of the kind that theirs is."""
        return self.meter and not self.imagines and not isinstance(self.executor.clock, VirtualClock)

    @property
    def imagines(self) -> bool:
        """Whether its GPUs are imagined ones, which have power limits of their own."""
        return self._gpus is not None or getattr(self.executor, "power", None) is not None

    def _check_imagined(self) -> None:
        if self._gpus is not None and isinstance(self.executor.clock, VirtualClock):
            raise InvalidInput(
                "Simulated devices bring their own GPUs: give Simulated(power=SimulatedGpus(...)), and drop meter=."
            )

    @property
    def _width(self) -> float:
        return float(getattr(self.executor, "slots_per_trial", 1))

    def _passes(self, foresight: Foresight | None) -> tuple[PlanPass, ...]:
        """The plan passes: fuse, give devices to groups and to who profiles alone, then place."""
        alone = passes_of(self.planner, foresight, self._width)
        if self.planner is None:
            alone = with_bubbles((self._paces, *alone), self.executor, self._fuser)
        if self.power_limits is not None and not self._whole:
            alone = (by_themselves if self.imagines else exclusively, *alone)
        passes = alone
        if self._fuser is not None:
            passes = self._fuser.passes(alone if self.planner is None else (whole_devices, *alone))
        if self.surrogate is not None and self.planner is None:
            return (targets_apart(passes, alone),)
        return passes

    def _foresee(self, measured: Overhead | None = None) -> Foresight | None:
        """What a planner that looks ahead needs; overheads that are yet to be measured count as none."""
        if not isinstance(self.planner, Fluid):
            return None
        overhead = measured or known_overhead(self.planner, self.executor)
        found = foresee(
            self.planner,
            self.work,
            self.sampler,
            self.executor,
            overhead,
            synchronous=self.scheduler.synchronous,
        )
        if found is not None and self._whole:
            found = replace(found, overhead=replace(found.overhead, max_sharing=1), per_device=1)
        return found

    @property
    def _whole(self) -> bool:
        """Whether trials share no device, but may spread: imagined GPUs have each the limit of their one trial."""
        return self.power_limits is not None and self.imagines and isinstance(self.planner, Fluid)

    def _know_overheads(self, engine: Engine, store: Store, files: Path, view: View) -> Noted | None:
        """Measure what sharing and spreading cost, unless it is known; the executor is open and idle."""
        planner = self.planner
        if not isinstance(planner, Fluid) or known_overhead(planner, self.executor) is not None:
            return None
        key = key_of(self.work, self.executor, planner.spread)
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
                meter=self.counts_own_energy,
            )
            store.put(key, dict(found.data))
        view.say(said(found))
        foresight = self._foresee(found.overhead)
        if foresight is not None:
            foresight = replace(foresight, memory_bytes=found.memory_bytes)
            engine.refine(self._passes(foresight), foresight)
        drew = {} if found.energy is None else {DREW: found.energy.plain}
        return Noted(self.executor.clock.now_s(), "overhead", {**found.data, **drew})

    def _first_notes(
        self, rebudgeted: Noted | None, engine: Engine, store: Store, files: Path, view: View
    ) -> Iterator[Noted]:
        """What a session begins with; measuring and checking are done within it, for they take of the study's time."""
        if rebudgeted is not None:
            yield rebudgeted
        overheads = self._know_overheads(engine, store, files, view)
        if overheads is not None:
            yield overheads
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
        data: dict[str, Any] = {}
        with self.executor.meanwhile(), _metered(data, wanted=self.counts_own_energy):
            data |= inspect_twin(twin, shrink, middle(self.space, held), threads=threads)
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

        work = self.work
        if not isinstance(work, Task):
            raise InvalidInput(
                f"load_model builds the network of a pk.Task, and the work of this study is {_called(work)}: "
                "load_state() gives what it saved."
            )
        record, path = self._checkpoint(trial)
        if self.surrogate is not None:
            work = self._twin or work.narrowed(self.surrogate)
            work = work.full() if record.is_target else work
        return restore(work, record.config, path)

    def load_state(self, trial: TrialRecord | None = None) -> Any:
        """What a trial saved last by ``run.save``, on the CPU; default: the best one.

        Checkpoints of other trials are kept by ``keep="all"``. They are pickles: load only stores you trust.

        Raises:
            InvalidInput: There is no such checkpoint.
        """
        from penstock.train._restore import read_state

        return read_state(self._checkpoint(trial)[1])

    def _checkpoint(self, trial: TrialRecord | None) -> tuple[TrialRecord, Path]:
        """A trial, by default the best, and the file of its last checkpoint."""
        record = check_type("trial", trial, TrialRecord, self.best)
        if record is None or self._entry is None:
            failed = self.state.counts.failed
            why = f"all {failed} trials failed" if failed and failed == self.state.counts.total else ""
            raise InvalidInput(
                f"There is no best trial, so it has no checkpoint: {why or 'no trial has reported yet'}."
            )
        if not record.saved:
            raise InvalidInput(f"Trial {record.id} has saved nothing: its training called no run.save().")
        store = self._store if self._target is None else open_store(self._place(), write=False)
        assert store is not None
        try:
            folder = self._folder(store, self._entry.id)
        finally:
            if self._target is not None:
                store.close()
        path = folder / record.saved[max(record.saved)]
        if not path.exists():
            raise InvalidInput(
                f"The last checkpoint of trial {record.id}, {str(path)!r}, is gone: only the best trial's is kept, "
                'unless the study has keep="all".'
            )
        return record, path

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
            "work": _called(self.work),
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
        return self.state.refused

    @property
    def probed(self) -> int:
        """How many networks were measured before training, since predictions left it in doubt whether they keep the
        limits."""
        return self.state.probed

    @property
    def queries(self) -> list[int]:
        """How many proposals were looked at for each trial, refused ones included; empty without limits."""
        return [1 + record.refused for record in self.trials] if self.limits else []

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
            store = open_store(self._place(), write=False)
            try:
                state = StudyState()
                read_state(store, self._entry, state)
                self._state = state
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

        Failed trials don't count, nor what SM2 only explored. None before the first report.
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
        best_first = ranked(self.goal, self.state.trials.values())
        return [record.config for record in best_first[: check_whole("count", count)]]

    @property
    def energy(self) -> Measurement | None:
        """The energy so far with its source, of trials and of measuring before them; None: nothing was metered."""
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
            store = open_store(self._place(), write=False) if kept or self._store is None else self._store
            try:
                folded.read(store, self._entry)
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


def _called(work: object) -> str:
    return getattr(work, "__qualname__", None) or repr(work)


def _gave_way(store: Store, name: str) -> bool:
    """Take a study of that name out of the store if it never had a trial: a mistake ended it before its first one.

    Raises:
        StoreError: Another process runs it.
    """
    entry = store.find(name)
    if any(isinstance(event, Submitted) for _, event in store.read(entry.id)):
        return False
    store.lock(entry.id)
    store.cut(entry.id, keep=0)
    store.forget(entry.id)
    return True


def _gpus_of(parts: Mapping[str, Any], executor: Executor | None) -> SimulatedGpus | None:
    """The imagined GPUs of a stored study, unless it goes on on simulated devices."""
    virtual = executor is not None and isinstance(executor.clock, VirtualClock)
    found: SimulatedGpus | None = None if virtual else parts.get("gpus")
    return found


def _nothing_yet(config: Mapping[str, Any], count: int) -> dict[str, list[float]]:
    """Nothing is measured while a journal is replayed."""
    raise PenstockError(f"{dict(config)!r} was to be measured {count} times during a replay.")


@contextlib.contextmanager
def _metered(data: dict[str, Any], *, wanted: bool) -> Iterator[None]:
    """Put into a note's data what this process draws meanwhile."""
    sensors = cpu_sensors() if wanted else []
    window = Meter(sensors).window("check") if sensors else None
    try:
        yield
    finally:
        if window is not None:
            with contextlib.suppress(SensorError):
                data[DREW] = window.end().energy.plain
        for sensor in sensors:
            sensor.close()


def _read_journal(store: Store, entry: StudyEntry, engine: Engine) -> None:
    try:
        engine.replay(event for _, event in store.read(entry.id))
    except StoreCorrupt as error:
        raise StoreCorrupt(
            f"{error} To go on from the last good record, run: penstock resume --repair {store.url}"
        ) from error


_looked_at = (
    0  # blocks of memory that there were before the first study, or that our last full collection left
)
_set_aside = False


@contextlib.contextmanager
def _old_objects_set_aside() -> Iterator[None]:
    """Spare the garbage collector what is there already, torch above all, while a study makes many objects of its own.

    A full collection of a large heap takes a tenth of a second, in which workers wait. What is set aside and given back
    does not count as new for the collector, which would never look at the studies before this one: like it, we look
    at everything once there is a good deal more of it. Whoever has frozen objects decides for themselves.
    """
    global _looked_at, _set_aside
    if _set_aside or gc.get_freeze_count():  # which counts one by one: slow unless there are none
        yield
        return
    blocks = sys.getallocatedblocks()
    if not _looked_at:
        _looked_at = blocks
    elif blocks > 1.15 * _looked_at:
        gc.collect()
        _looked_at = sys.getallocatedblocks()
    gc.freeze()
    _set_aside = True
    try:
        yield
    finally:
        gc.unfreeze()
        _set_aside = False
