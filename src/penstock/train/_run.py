"""Run: what a training function sees of its trial."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from penstock.core.check import whole
from penstock.core.errors import InvalidInput
from penstock.core.measurement import Measurement, measurement
from penstock.train._checkpoint import Checkpoints, Found, Plain, Report
from penstock.train._threads import Pace
from penstock.train._world import ALONE, World

ENDLESS = "endless"
"""The topic of notes that a trial trains on and on: neither the study nor its loop says how many epochs there are."""
_INSTEAD = {
    "suggest": "the study's space says what is tuned, as lr=pk.Float(1e-4, 1, log=True), and run.config[...] its value",
    "should_prune": "the study ends a trial by itself, at the end of an epoch of run.epochs(); or ask run.should_stop",
    "params": "the configuration is run.config",
    "number": "the trial's number is run.trial",
}
_LONG = 20  # epochs of such a trial, after which that is told


class Sink(Protocol):
    """Where a Run's news goes. Implemented by each kind of worker; stamps the time."""

    def reported(self, report: Report) -> None:
        """An epoch is over."""
        ...

    def saved(self, epoch: int, path: str) -> None:
        """A checkpoint is complete."""
        ...

    def told(self) -> tuple[str, bool] | None:
        """Whether to stop: the reason, and whether the trial is to go on later. Cheap; doesn't wait."""
        ...


class EpochMeter(Protocol):
    """Measures the energy of each epoch of one trial.

    One that has a method ``plain_end`` is asked by that instead of ``epoch_end``: it gives ``Measurement.plain``, which
    is what goes to the study anyway. One with ``on_iteration`` is told of iterations; one with ``weigh``, what part of
    its devices the trial holds. One with ``other`` tells at the end what no epoch drew, as ``Measurement.plain``.
    """

    def epoch_begin(self) -> None:
        """An epoch begins."""
        ...

    def epoch_end(self) -> Measurement | None:
        """What it drew; None where nothing can be measured."""
        ...

    def close(self) -> None:
        """The segment is over: nothing more is measured for it."""
        ...


class Unwind(BaseException):
    """Ends a training function from inside. Not an Exception, so that ``except Exception`` lets it pass."""


class Refused(Exception):
    """A failure that is told by its reason and details; no traceback would help."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@final
class Run:
    """One trial as its training function sees it.

    A training function loops over ``run.epochs()``, reports once or more per epoch and may save its state::

        def train(run):
            model, optimizer = build(**run.config)
            if (state := run.load()) is not None:
                model.load_state_dict(state["model"])
            for epoch in run.epochs():
                ...
                run.save({"model": model.state_dict()})
                run.report(loss=loss)

    The loop starts at the epoch that the loaded state belongs to and ends when the trial's present budget is
    used up or the study stops the trial. A function without such a loop counts one epoch per report (save
    before you report); it is left at the report with which its budget ends. A function may also just
    return its metrics: that is one report.

    Attributes:
        config: The configuration, a copy that belongs to the function.
        trial: The trial's number.
        seed: The trial's seed. ``random``, and ``numpy`` and ``torch`` where loaded, are seeded with it.
        device: Where to compute: ``"cpu"``, ``"cuda:0"``.
        devices: All devices of the trial, ``device`` first.
        threads: How many CPU threads it may use.
        world: Which one this is of the workers that train the trial together; see ``pk.elastic``.
    """

    __slots__ = (
        "_accrued_s",
        "_checkpoints",
        "_copy_from",
        "_covered",
        "_crew",
        "_energy",
        "_entered",
        "_epoch",
        "_failure",
        "_folder",
        "_found",
        "_inside",
        "_known",
        "_lane",
        "_last_reported",
        "_later",
        "_leave",
        "_looped",
        "_mark_s",
        "_meter",
        "_new",
        "_objectives",
        "_on_iteration",
        "_pace",
        "_pending",
        "_pid",
        "_plain_end",
        "_reports",
        "_sink",
        "_staged",
        "_start",
        "_stop",
        "_until",
        "config",
        "device",
        "devices",
        "options",
        "seed",
        "threads",
        "trial",
        "world",
    )

    def __init__(
        self,
        *,
        trial: int,
        config: Mapping[str, Any],
        seed: int,
        until: int | None,
        known: int = 0,
        start: int = 0,
        copy_from: tuple[int, int] | None = None,
        objectives: tuple[str, ...],
        sink: Sink,
        checkpoints: Checkpoints,
        folder: Path | None = None,
        devices: tuple[str, ...] = ("cpu",),
        threads: int = 1,
        meter: EpochMeter | None = None,
        options: Mapping[str, Any] | None = None,
        crew: Any = None,
        leave: int | None = None,
    ) -> None:
        """Made by workers.

        ``known``: the last epoch whose report the study has; ``leave``: the last epoch that a budget allows it;
        ``crew``: see ``_elastic``.
        """
        self._crew = crew
        self._pace: Pace | None = None  # of a trial that one worker trains on several groups of CPU cores
        self._leave = leave
        self._lane: Any = None  # among others that train at the same time; see _lanes
        self.world: World = ALONE if crew is None else crew.world
        self.config = dict(config)
        self.trial = trial
        self.seed = seed
        self.device = devices[0]
        self.devices = devices
        self.threads = threads
        self._until = until
        self._known = known
        self._start = start
        self._copy_from = copy_from
        self._objectives = objectives
        self._sink = sink
        self._checkpoints = checkpoints
        self._folder = folder
        self._meter = meter
        self._on_iteration: Callable[[float], None] | None = None
        self._plain_end: Callable[[], Plain | None] | None = None
        if meter is not None:
            self._on_iteration = getattr(meter, "on_iteration", None)
            self._plain_end = getattr(meter, "plain_end", None)
        self.options = dict(options or {})  # what the scheduler says of this segment (SM2: explore or train)
        self._pid = os.getpid()
        self._pending: dict[str, float] = {}
        self._inside = False  # within an iteration of epochs()
        self._looped = False  # epochs() was called
        self._entered = 0  # iterations begun
        self._covered: float | None = None  # the largest total of a loop that has ended; None: none has
        self._staged = False
        self._later: Callable[[int, list[Report], Callable[[str], None]], bool] | None = None
        self._stop: tuple[str, bool] | None = None
        self._failure: str | None = None
        self._new = 0  # reports made or sent again here
        self._accrued_s = 0.0
        self._energy: Plain | None = None
        self._found: Found | None = checkpoints.find()
        self._epoch = 0
        self._last_reported = 0
        self._reports: list[Report] = []  # those the study may not have yet
        if self._found is not None:
            self._epoch = self._found.epoch
            self._last_reported = self._found.epoch
            self._reports = [report for report in self._found.reports if report[0] > known]
            for (
                report
            ) in self._reports:  # made, but perhaps never heard of, before the worker or the driver died
                sink.reported(report)
                self._new += 1
            if self._found.unheard is not None:  # or the next segment would go on from an older one
                sink.saved(self._found.epoch, self._found.unheard)
        self._take_leave()
        self._mark_s = time.perf_counter()

    def __repr__(self) -> str:
        return f"Run(trial={self.trial}, epoch={self._epoch}, config={self.config})"

    def __getattr__(self, name: str) -> Any:
        """Says what stands here for what an Optuna trial has."""
        hint = _INSTEAD.get("suggest" if name.startswith("suggest_") else name)
        instead = "" if hint is None else f": {hint}"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self
        )

    def __getitem__(self, name: object) -> Any:
        """Says where the configuration is, to a function that was written for one that is given it."""
        raise TypeError(f"the run is not the configuration itself: write run.config[{name!r}]")

    __iter__ = None  # not by its items

    @property
    def epoch(self) -> int:
        """Epochs behind the trial."""
        return self._epoch

    @property
    def until(self) -> int | None:
        """Epochs behind the trial when its present budget ends; None: as many as the function likes."""
        return self._until

    @property
    def folder(self) -> Path:
        """A directory of the trial's own that outlives restarts; made on first use."""
        if self._folder is None:
            raise InvalidInput("This executor keeps no files, so run.folder has no place. Use run.save().")
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    @property
    def should_stop(self) -> bool:
        """Whether the study wants the trial to end now; for functions with very long epochs."""
        return self._told() is not None

    def epochs(self, total: int | None = None) -> Iterator[int]:
        """Iterate over the epochs to do now, counted from 0, from where ``load`` goes on.

        One loop does them all. A second one, of a later phase, goes on from where the first ended: its total is larger.

        Args:
            total: How many epochs there are when the study sets no limit (and never more than that).
        """
        if total is not None:
            total = whole("run.epochs(total)", total, "Give how many epochs there are, such as 10.")
            if total < 0:
                raise InvalidInput(f"run.epochs(total) must not be negative, got {total}.")
        if self._inside:
            raise InvalidInput(
                "run.epochs() is already being looped over, or was left by break; nest no second loop inside it, and "
                "begin none after a break."
            )
        self._looped = True
        return _Epochs(self, total)

    def iteration(self, samples: float = 1) -> None:
        """Tell that an iteration (a training step) is over, and of how many samples it was.

        Only a study with ``power_limits`` wants to know: limits are tried during the first epochs, in slices that
        end with an iteration. A function that never tells is profiled by whole epochs, which takes longer. A
        ``Task`` tells by itself. Costs next to nothing where nobody asks.
        """
        tell = self._on_iteration
        if tell is not None and os.getpid() == self._pid:
            if not samples >= 0:
                raise InvalidInput(f"run.iteration(samples) takes a number of at least 0, got {samples!r}.")
            tell(samples)

    def report(self, /, *unnamed: Any, **metrics: Any) -> None:
        """Report metrics of the present epoch, by name.

        Several reports within one iteration of ``epochs()`` add up to one; a later value replaces an earlier
        one. Values are numbers (numpy's and torch's too). One that is not finite fails the trial.
        """
        if unnamed:
            mapping = isinstance(unnamed[0], Mapping)
            raise InvalidInput(
                f"run.report takes metrics by name, got {unnamed[0]!r:.80}: write "
                f"{'run.report(**metrics)' if mapping else 'run.report(loss=...)'}."
            )
        if not metrics or os.getpid() != self._pid:
            return
        if self._failure is not None:
            raise Unwind
        late = self._looped and not self._inside
        if not self._looped and self._over():  # the function caught everything, and goes on
            raise Unwind
        number = self._epoch if late else self._epoch + 1
        pending = self._pending
        for name, value in metrics.items():
            pending[name] = self._number(name, value, number)
        if self._inside:
            return
        if late:
            self._report_late()
            return
        self._close()
        self._go_on()
        if self._over():
            raise Unwind

    def save(self, state: Any) -> None:
        """Keep ``state`` (anything that pickles) as the checkpoint of the present epoch.

        It is serialised at once and counts from the end of the epoch on, together with the epoch's reports.
        """
        if os.getpid() != self._pid:
            return
        if self._lane is not None:
            state = self._lane.own(state)
        self._checkpoints.stage(state)
        self._staged = True
        if self._looped and not self._inside and self._entered:
            self._commit()  # after the loop: the checkpoint of the last epoch

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Let this trial's model and optimizer be computed together with those of other trials.

        In a study with ``fuse=8`` eight trials train at the same time in one process, each in its own loop, and the
        calls ``model(...)``, ``loss.backward()`` and ``optimizer.step()`` of all of them are one fused call. Everywhere
        else nothing happens. Call it once the model is on its device and the optimizer is made, before a state is
        loaded or after::

            model, optimizer = run.prepare(model, optimizer)

        Args:
            model: A ``torch.nn.Module``.
            optimizer: Its optimizer.

        Returns:
            The same model and optimizer.
        """
        return (model, optimizer) if self._lane is None else self._lane.prepare(model, optimizer)

    def load(self) -> Any | None:
        """The state to go on from, or None where there is none."""
        return None if self._found is None else self._found.load(self.device)

    # -- for workers ------------------------------------------------------------------------------------

    def _told(self) -> tuple[str, bool] | None:
        if self._stop is None:
            self._stop = self._sink.told()
            self._take_leave()
        return self._stop

    def _take_leave(self) -> None:
        """End with the last epoch that a budget allows; nobody need say so, who may be late."""
        if self._stop is None and self._leave is not None and self._epoch >= self._leave:
            self._stop = "the budget allows it no more epochs", True

    def _over(self) -> bool:
        return self._stop is not None or (self._until is not None and self._epoch >= self._until)

    def _fail(self, reason: str) -> Unwind:
        if self._failure is None:
            self._failure = reason
        return Unwind()

    def _number(self, name: str, value: Any, epoch: int) -> float:
        if type(value) is not float:
            try:
                item = getattr(value, "item", None)
                plain = value if item is None else item()
                if isinstance(plain, str | bytes):
                    raise TypeError
                value = float(plain)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise self._fail(
                    f"metric {name!r} is {_brief(value)} at epoch {epoch}: a report takes finite numbers"
                ) from None
        if not math.isfinite(value):
            raise self._fail(f"metric {name!r} is {value} at epoch {epoch}: a report takes finite numbers")
        return float(value)

    def _close(self) -> None:
        """The present epoch is over: keep its checkpoint, tell its report, ask whether to go on."""
        self._epoch += 1
        now_s = time.perf_counter()
        self._accrued_s += now_s - self._mark_s
        if self._meter is not None:
            self._draw(self._meter)
        report = self._take()
        path: str | None = None
        if self._staged:
            self._staged = False
            # The report is not sent before its checkpoint is there: should we die, both are lost or neither.
            tell = partial(self._post, report, self._epoch)
            if self._later is not None and not self._over() and self._later(self._epoch, self._reports, tell):
                self._told()
                return
            path = self._checkpoints.commit(self._epoch, self._reports)
        self._settle()
        self._post(report, self._epoch, path)
        self._told()

    def _post(self, report: Report | None, epoch: int, path: str | None) -> None:
        """Tell of an epoch."""
        if report is not None:
            self._sink.reported(report)
        if path is not None:
            self._sink.saved(epoch, path)

    def _write_behind(self) -> None:
        """Let checkpoints be written while the training goes on: the sink may be told by another thread."""
        self._later = getattr(self._checkpoints, "commit_later", None)

    def _settle(self) -> None:
        """Wait until the epochs before have been told; raises what went wrong with their checkpoints."""
        if self._later is not None:
            self._checkpoints.settle()

    def _go_on(self) -> None:
        """The next epoch begins now, unless there is none."""
        if self._meter is not None and not self._over():
            self._meter.epoch_begin()
        self._mark_s = time.perf_counter()

    def _draw(self, meter: EpochMeter) -> None:
        """Count what the epoch drew for the next report."""
        if self._plain_end is not None:
            plain = self._plain_end()
        else:
            drawn = meter.epoch_end()
            plain = None if drawn is None else drawn.plain
        if plain is not None and self._energy is not None:  # with that of epochs that were not reported
            plain = (measurement(*self._energy) + measurement(*plain)).plain
        if plain is not None:
            self._energy = plain

    def _drawn_otherwise(self) -> Plain | None:
        """At the end of the segment: what it drew and no report has told."""
        told, self._energy = self._energy, None
        other: Callable[[], Plain | None] | None = getattr(self._meter, "other", None)
        rest = None if other is None else other()
        if told is None or rest is None:
            return rest if told is None else told
        return (measurement(*told) + measurement(*rest)).plain

    def _take(self) -> Report | None:
        """What is pending as the report of the present epoch."""
        metrics = self._pending
        if not metrics:
            return None
        self._pending = {}
        missing = [name for name in self._objectives if name not in metrics]
        if missing:
            given = ", ".join(metrics)
            wanted = ", ".join(repr(name) for name in missing)
            raise self._fail(f"the report of epoch {self._epoch} lacks {wanted}; it gives {given}")
        report = (self._epoch, metrics, self._accrued_s, self._energy)
        self._accrued_s, self._energy = 0.0, None
        self._reports.append(report)
        self._last_reported = self._epoch
        self._new += 1
        return report

    def _commit(self) -> None:
        path = self._checkpoints.commit(self._epoch, self._reports)
        self._staged = False
        self._settle()
        self._post(None, self._epoch, path)

    def _report_late(self) -> None:
        """A report after the loop is that of the last epoch, if it has none yet."""
        if self._epoch > self._last_reported or (self._epoch == 0 and not self._entered):
            if self._epoch == 0:
                self._epoch = 1
            report = self._take()
            self._settle()
            self._post(report, self._epoch, None)
        elif self._entered:
            raise InvalidInput(
                f"Epoch {self._epoch} has been reported already; call run.report() inside the loop over "
                "run.epochs(), or only after it."
            )
        else:  # all epochs were done, and reported, before a restart
            self._pending = {}

    def _finish(self, returned: Any) -> None:
        """The function has returned: a last iteration that was left by break or return counts if it reported."""
        if self._inside:
            self._inside = False
            if self._pending or self._staged:
                self._close()
        elif self._staged:
            self._checkpoints.discard()
        if self._new or returned is None or self._stop is not None:
            return
        if self._epoch and self._epoch <= self._last_reported:
            return
        if isinstance(returned, Mapping):
            metrics = {str(name): value for name, value in returned.items()}
        elif len(self._objectives) == 1:
            metrics = {self._objectives[0]: returned}
        else:
            raise self._fail(
                f"the training function returned {_brief(returned)}; with several objectives return a dict with "
                + ", ".join(map(repr, self._objectives))
            )
        number = max(self._epoch, 1)
        self._pending = {name: self._number(name, value, number) for name, value in metrics.items()}
        if self._epoch:
            report = self._take()
            self._settle()
            self._post(report, self._epoch, None)
        else:
            self._close()

    def _advance(self, epoch: int, metrics: Mapping[str, Any]) -> bool:
        """A report that names its epoch (a Command's); False when the budget is used up or it is to stop."""
        if epoch > self._epoch and metrics:
            self._epoch = epoch - 1
            self._pending = {name: self._number(name, value, epoch) for name, value in metrics.items()}
            self._close()
            self._go_on()
        return not self._over()


@final
class _Epochs:
    """The iterator of ``Run.epochs``. A class, not a generator: it must notice a break without the collector."""

    __slots__ = ("_end", "_run", "_total")

    def __init__(self, run: Run, total: int | None) -> None:
        until = run._until
        self._run = run
        self._total = total
        self._end = until if total is None else total if until is None else min(until, total)

    def __iter__(self) -> Iterator[int]:
        # A second loop would do nothing, whatever the budget, and nobody would notice: a fold or a phase left out.
        covered = self._run._covered
        if covered is not None and _bound(self._total) <= covered:
            written = "" if self._total is None else self._total
            later = ""
            if covered < math.inf:
                later = f", or say where a later phase ends, as run.epochs({covered + (self._total or 1)})"
            raise InvalidInput(
                f"A second loop over run.epochs({written}) would do nothing: the loop before it has done those epochs, "
                f"which count from the trial's beginning. Let one loop do all of them{later}."
            )
        return self

    def __next__(self) -> int:
        run = self._run
        if run._failure is not None:
            raise Unwind
        if run._inside:
            run._inside = False
            run._close()
        if run._stop is not None or (self._end is not None and run._epoch >= self._end):
            run._covered = max(run._covered or 0, _bound(self._total))
            raise StopIteration
        if run._meter is not None:
            run._meter.epoch_begin()  # what the function did before its loop is no epoch's
        run._mark_s = time.perf_counter()
        run._entered += 1
        if self._end is None and run._entered == _LONG + 1:
            noted: Callable[[str, Mapping[str, Any]], None] | None = getattr(run._sink, "noted", None)
            if noted is not None:
                noted(ENDLESS, {"epochs": run._epoch})
        run._inside = True
        return run._epoch


def _bound(total: int | None) -> float:
    return math.inf if total is None else total


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "something"
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({type(value).__name__})"
