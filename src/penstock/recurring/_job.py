"""RecurringJob: a training that runs again and again, and gets cheaper every time."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from penstock.core import Clock, Source, WallClock
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreUnwritable, TrialError
from penstock.recurring import _checks as checks
from penstock.recurring._cost import Profile, best_limit
from penstock.recurring._history import (
    CHUNKED,
    FORMAT,
    Decision,
    History,
    JobSpec,
    Result,
    decision_to_json,
    profile_to_json,
    result_to_json,
)
from penstock.recurring._policy import Policy
from penstock.recurring._scale import scaled_lr
from penstock.recurring._target import Target
from penstock.store._chunks import CHUNK, archive, archived, identity, read_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.energy import Sensor


class Updates(Protocol):
    """What a job needs of a store: a value that is read, changed and written as one step among all processes."""

    def get(self, key: str) -> Any | None:
        """The value, or None."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Keep a value, replacing the old one."""
        ...

    def update(self, key: str, change: Callable[[Any | None], Any]) -> Any:
        """Replace the value by ``change(value)``; returns the new one. If ``change`` raises, nothing changes."""
        ...


class _Behind(Exception):
    """Records were archived that this process has not read yet."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        self.data = data


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What became of one recurrence, retries included.

    Attributes:
        decision: The last run's decision, with the power limit it ended at; None: none was set.
        reached: Whether the target was reached.
        epochs: Epochs of the last run.
        time_s: Time of all its runs.
        energy_j: Energy of all its runs.
        cost: Cost of all its runs (Zeus Eq. 2).
        source: Where the energy figure comes from.
        tries: How many runs it took.
        metrics: The last run's last report.
        reason: Why the last run ended, where it was not the target; empty: its epochs were over.
    """

    decision: Decision
    reached: bool
    epochs: float
    time_s: float
    energy_j: float
    cost: float
    source: Source
    tries: int
    metrics: Mapping[str, float]
    reason: str = ""

    def __str__(self) -> str:
        after = f"after {self.epochs:g} {'epoch' if self.epochs == 1 else 'epochs'}"
        if self.reached:
            end = f"reached the target {after}"
        elif self.reason:
            end = f"did not reach the target ({self.reason}) {after}"
        else:
            end = f"did not reach the target: ended {after}"
        limit = "" if self.decision.limit_w is None else f", {self.decision.limit_w:.0f} W"
        return (
            f"#{self.decision.number} batch size {self.decision.batch_size}{limit}: {end}, {_figure(self.time_s)} s, "
            f"{_figure(self.energy_j)} J ({self.source}) in {self.tries} {'run' if self.tries == 1 else 'runs'}"
        )


@final
class RecurringJob:
    """A training that recurs, e.g. every night, and whose batch size and power limit are chosen each time.

    ``run()`` does one recurrence here. Where a cluster launches jobs by itself, ``decide()`` says how to run the next
    one and ``observe()`` takes its result; any number may be under way at once, from any number of processes that
    share the store, and results may come late and in any order. Nothing is opened before the first call.

    Args:
        name: Names the job in its store.
        train: A ``Task``, or a function ``train(run)``; None if only ``decide`` and ``observe`` are used. The batch
            size is ``run.config["batch_size"]``.
        batch_sizes: The feasible batch sizes. With a single one only the power limit is tuned.
        default: The batch size used so far; the largest if None.
        target: ``("accuracy", 0.95)``, or ``("wer", "<=", 40)``. Without a comparison, a metric whose name ends in
            loss, err, error, wer, cer, mse, rmse, mae, nll, ppl or perplexity is to fall, any other to rise.
        max_epochs: Where a run that does not reach the target ends.
        eta: 0: only time counts; 1: only energy.
        beta: A run is stopped at ``beta`` times the least cost of runs that reached the target.
        window: Use the latest so many results, for jobs that drift; None: all (drift is then detected).
        store: A path, a URL, an open ``Store``, or None for memory.
        policy: ``"ours"`` or ``"zeus"``, or a ``Policy``.
        config: Further values for ``run.config``.
        scale_lr: How ``config["lr"]``, given for the default batch size, follows the batch size: ``"sqrt"`` (adaptive
            optimisers), ``"linear"`` (SGD), ``"off"``, or ``"auto"``: by the class of the Task's optimizer (that
            ``config["optimizer"]`` chooses, of several), linear for ``SGD`` and sqrt for others. Where the class can't
            be told (a lambda, a plain training function) it is off: say which one.
        seed: For draws, and for the runs' seeds.
        sensors: What to measure; by default this machine's GPUs, or its CPU where there are none.
        limits_w: Power limits to choose from; by default those the GPUs take, in steps of 25 W.
        max_power_w: MAXPOWER of Eq. 2; by default the highest limit, or the first run's average power.
        give_up_s: A decision without a result for so long is no longer waited for (a late result still counts);
            None: ten times the longest run so far, and at least a day; ``math.inf``: never. ``abandon`` says so at
            once.
        clock: Tells the time.
        devices: What the training function computes on.
        threads: CPU threads it may use.
        slice_s: How long each power limit is profiled, in the first epoch of a batch size that is new.
    """

    def __init__(
        self,
        name: str,
        train: Callable[[Any], Any] | None = None,
        *,
        batch_sizes: Iterable[int],
        default: int | None = None,
        target: Sequence[Any] = ("accuracy", 1.0),
        max_epochs: int | None = None,
        eta: float = 0.5,
        beta: float = 2.0,
        window: int | None = None,
        store: str | os.PathLike[str] | Updates | None = None,
        policy: Literal["ours", "zeus"] | Policy = "ours",
        config: Mapping[str, Any] | None = None,
        scale_lr: Literal["auto", "sqrt", "linear", "off"] = "auto",
        seed: int = 0,
        sensors: Sequence[Sensor] | None = None,
        limits_w: Sequence[float] | None = None,
        max_power_w: float | None = None,
        give_up_s: float | None = None,
        clock: Clock | None = None,
        devices: tuple[str, ...] = ("cpu",),
        threads: int = 1,
        slice_s: float = 5.0,
    ) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise InvalidInput(f"A job's name must be a text without '/' that is not empty, got {name!r}.")
        if train is not None and not callable(train):
            raise InvalidInput(f"train must be a Task or a function train(run), got {train!r}.")
        if scale_lr not in ("auto", "sqrt", "linear", "off"):
            raise InvalidInput(f'scale_lr must be "auto", "sqrt", "linear" or "off", got {scale_lr!r}.')
        sizes = checks.sizes(batch_sizes)
        self.name = name
        self._spec = JobSpec(
            sizes,
            max(sizes) if default is None else default,
            eta,
            beta,
            window,
            () if limits_w is None else checks.limits(limits_w),
            1.0 if max_power_w is None else max_power_w,
            seed,
        )
        self._fixed_limits = limits_w is not None
        self._max_power_w = None if max_power_w is None else self._spec.max_power_w
        self._train = train
        self._target = Target.parse(target)
        self._max_epochs = None if max_epochs is None else checks.whole("max_epochs", max_epochs)
        self._store_given = _checked_store(store)
        self._store: Updates | None = None
        self._policy = _policy(policy)
        self._config = checks.checked_config(config)
        self._scale_lr = scale_lr
        self._sensors = None if sensors is None else _checked_sensors(sensors)
        for_ever = give_up_s is None or give_up_s == math.inf
        self._give_up_s = give_up_s if for_ever else checks.real("give_up_s", give_up_s, above=0.0)
        if clock is not None and not callable(getattr(clock, "now_s", None)):
            raise InvalidInput(f"clock must be a penstock Clock, got {clock!r}.")
        self._clock = clock
        self._wall: Clock = clock if clock is not None else WallClock()
        self._devices = devices
        self._threads = checks.whole("threads", threads)
        self._slice_s = checks.real("slice_s", slice_s, above=0.0)
        self._history = History()
        self._folded = 0
        self._gpus = 1
        self._identity: Any = None

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"RecurringJob({self.name!r}, batch_sizes={list(spec.batch_sizes)}, default={spec.default}, "
            f"target={str(self._target)!r}, eta={spec.eta:g}, policy={self._policy.name!r})"
        )

    # -- for clusters ---------------------------------------------------------------------------------------

    def decide(
        self, *, device: str | None = None, limits_w: Sequence[float] | None = None, retry: bool = False
    ) -> Decision:
        """How to run the next recurrence. Its number is the ticket to report the result with.

        Args:
            device: The kind of device it will run on, e.g. a GPU's model name: costs seen on other kinds are translated
                (Zeus section 7). Empty by default.
            limits_w: Power limits that device takes, if not the job's own.
            retry: The recurrence's last run failed and it is to run again.
        """
        return self._decide(device, limits_w, retry, None)

    def _decide(
        self,
        device: str | None,
        limits_w: Sequence[float] | None,
        retry: bool,
        target: Target | None,
    ) -> Decision:
        """``decide``; a run that is judged here also says by which target."""
        made: list[Decision] = []
        kind = checks.device_name(device)
        settable_w = None if limits_w is None else checks.limits(limits_w)

        def change(data: dict[str, Any], history: History) -> dict[str, Any]:
            if target is not None:
                self._check_target(data.get("target"), history)
                data["target"] = [target.metric, target.comparison, target.value]
            spec = self._spec_for(data, settable_w)
            now_s = self._wall.now_s()
            view = replace(history.view(spec, kind), pending=history.waited_for(now_s, self._give_up_s))
            number = history.next_number
            choice = self._policy.choose(view, number, retry=retry)
            decision = Decision(
                number,
                choice.batch_size,
                choice.limit_w,
                choice.profile_w,
                choice.cost_limit,
                choice.explore,
                kind,
                now_s,
            )
            made[:] = [decision]
            records = [*data["records"], {"d": decision_to_json(decision)}]
            if spec.limits_w or self._max_power_w is not None:  # else the first result tells it
                data["max_power_w"] = spec.max_power_w
            about = {"eta": spec.eta, "policy": self._policy.name, "default": spec.default}
            # As text, for JSON has no infinity; readers wait as long as the job does.
            about["give_up_s"] = None if self._give_up_s is None else str(self._give_up_s)
            return {**data, **about, "records": records}

        # Archiving waits for a result, where nobody waits for the answer, unless none come.
        self._tidy(self._update(change), above=4)
        return made[0]

    def observe(
        self,
        decision: Decision | int,
        *,
        epochs: float,
        time_s: float,
        energy_j: float,
        reached: bool,
        profile: Profile | None = None,
        error: str = "",
    ) -> None:
        """Take in the result of a run, late or early, in any order. A second result for one ticket is ignored.

        Args:
            decision: What it was, or its number.
            epochs: Epochs it ran.
            time_s: How long it took.
            energy_j: What it drew.
            reached: Whether it reached the target.
            profile: Limits measured on the way: watts -> (time_s, power_w) of an epoch.
            error: Why it failed by itself, where it did.

        Raises:
            InvalidInput: There is no such decision, or a value can't be; nothing was written.
        """
        # All is checked before anything is written: a record that does not read back would end the job's history.
        measured = {} if profile is None else checks.profile_of(profile)
        if not isinstance(error, str):
            raise InvalidInput(f"error must be a text, got {error!r}.")
        result = Result(
            _number(decision), epochs, time_s, energy_j, checks.flag("reached", reached), measured, error
        )
        if result.reached and not result.time_s > 0.0:
            raise InvalidInput(
                f"A run that reached its target took some time: time_s must be > 0, got {time_s!r}."
            )
        if result.energy_j > checks.MOST * result.time_s > 0.0:
            raise InvalidInput(
                f"No run draws {energy_j!r} J in {time_s!r} s: is one of them in another unit?"
            )
        self._add(result)

    def abandon(self, decision: Decision | int) -> None:
        """Say that a decision will have no result: its run was lost, or never started."""
        number = _number(decision)
        self._append({"x": number}, number)

    def add_profile(self, batch_size: int, profile: Profile, *, device: str = "") -> None:
        """Take in a quick profile of a batch size on a device, to translate costs to it (Zeus section 7)."""
        size, measured = checks.whole("batch_size", batch_size), checks.profile_of(profile)
        if not measured:
            raise InvalidInput("The profile is empty: give watts -> (time_s, power_w) of an epoch.")
        self._append({"p": [checks.device_name(device), size, profile_to_json(measured)]}, None)

    # -- here -----------------------------------------------------------------------------------------------

    def run(self, *, tries: int = 3, raise_on_failure: bool = False) -> Recurrence:
        """Do one recurrence here: decide, train, measure, learn; again with another batch size if it fails.

        Args:
            tries: Runs at most.
            raise_on_failure: Raise if the last run ended by an error of its own.

        Raises:
            TrialError: With ``raise_on_failure``.
        """
        from penstock.recurring._launch import Launched, launch

        if self._train is None:
            raise InvalidInput("This job has nothing to run: give it a Task or a function train(run).")
        tries = checks.whole("tries", tries)
        with self._measured() as (sensors, device, limits_w):
            total_s = total_j = 0.0
            source = Source.MEASURED
            for attempt in range(1, tries + 1):
                decision = self._decide(device, limits_w, attempt > 1, self._target)
                spec = self._spec_for(self._data(), limits_w)
                try:
                    done: Launched = launch(
                        self._train,
                        decision,
                        spec,
                        config=self._config_for(decision.batch_size),
                        target=self._target,
                        max_epochs=self._max_epochs,
                        seed=_seed(spec.seed, decision.number),
                        sensors=sensors,
                        clock=self._clock,
                        devices=self._devices,
                        threads=self._threads,
                        slice_s=self._slice_s,
                    )
                except BaseException:
                    self.abandon(decision)
                    raise
                self._add(done.result)
                total_s += done.result.time_s
                total_j += done.result.energy_j
                source = max(source, done.source)
                if done.result.reached:
                    break
        spec = self._spec_for(self._data(), limits_w)
        if not done.limited:
            decision = replace(decision, limit_w=None)
        elif decision.limit_w is None and done.result.profile and spec.limits_w:
            limit_w, _ = best_limit(done.result.profile, eta=spec.eta, max_power_w=spec.max_power_w)
            decision = replace(decision, limit_w=limit_w or None)
        if raise_on_failure and done.result.error:
            raise TrialError(f"Recurrence {decision.number} of {self.name!r} failed: {done.result.error}")
        return Recurrence(
            decision,
            done.result.reached,
            done.result.epochs,
            total_s,
            total_j,
            spec.cost(total_j, total_s),
            source,
            attempt,
            done.metrics,
            "" if done.result.reached else done.reason,
        )

    # -- what is known ----------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Everything decided and observed so far, read anew from the store."""
        self._data()
        return self._history

    def status(self) -> dict[str, Any]:
        """What is known, JSON-able: runs, costs by batch size, the best, what is under way."""
        data = self._data()
        history = self._history
        spec = self._spec_for(data, None)
        waited_for = history.waited_for(self._wall.now_s(), self._give_up_s)
        return summarize(self.name, history, spec, waited_for)

    def close(self) -> None:
        """Close the store, if this job opened it. Idempotent."""
        if self._store is not None and self._store is not self._store_given:
            close = getattr(self._store, "close", None)
            if close is not None:
                close()
        self._store = None

    def __enter__(self) -> RecurringJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return job_key(self.name)

    def _open(self) -> Updates:
        if self._store is None:
            given = self._store_given
            if given is None or isinstance(given, str | os.PathLike):
                from penstock.store import open_store

                self._store = open_store(given, write=True)
            else:
                self._store = given
        return self._store

    def _data(self) -> dict[str, Any]:
        store = self._open()
        while True:
            try:
                return self._fold(store.get(self._key))
            except _Behind as behind:
                self._catch_up(store, behind.data)

    def _update(self, change: Callable[[dict[str, Any], History], dict[str, Any]]) -> dict[str, Any]:
        """Change the job's value as one step among all processes, with all of its history folded."""
        store = self._open()
        made: list[dict[str, Any]] = []

        def step(value: Any) -> Any:
            made[:] = [change(self._fold(value), self._history)]
            return made[0]

        while True:
            try:
                store.update(self._key, step)
                return made[0]
            except _Behind as behind:  # chunks can't be read within the update
                self._catch_up(store, behind.data)

    def _tidy(self, data: dict[str, Any], *, above: int = 2) -> None:
        """Archive what need not be rewritten with every change."""
        with suppress(StoreUnwritable):  # what matters is written already, and the next one archives instead
            moved = archive(self._open(), self._key, data, format=CHUNKED, above=above)
            if moved is not None:
                self._identity = identity(moved)

    def _fold(self, value: Any) -> dict[str, Any]:
        data = empty_record() if value is None else dict(value)
        records = check_record(self.name, data)
        before = archived(data) * CHUNK
        ident = identity(data)
        if self._folded > before + len(records) or ident != self._identity:  # another history: start anew
            self._history, self._folded = History(), 0
        self._identity = ident
        if self._folded < before:
            raise _Behind(data)
        self._apply(records, before)
        return data

    def _catch_up(self, store: Updates, data: Mapping[str, Any]) -> None:
        for number in range(self._folded // CHUNK, archived(data)):
            self._apply(read_chunk(store, self._key, data, number), number * CHUNK)

    def _apply(self, records: Sequence[Any], before: int) -> None:
        """Fold in those of ``records``, the first of which has ``before`` predecessors, that are new."""
        for at in range(self._folded - before, len(records)):
            try:
                self._history.apply(records[at])
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise StoreCorrupt(
                    f"Record {before + at} of job {self.name!r} can't be read: {error!r}."
                ) from error
            self._folded = before + at + 1

    def _spec_for(self, data: Mapping[str, Any], limits_w: Sequence[float] | None) -> JobSpec:
        spec = self._spec
        if limits_w is not None and not self._fixed_limits:
            spec = replace(spec, limits_w=tuple(float(w) for w in limits_w))
        if self._max_power_w is None:
            # MAXPOWER is that of all GPUs of the job together (Zeus section 7).
            known = self._gpus * max(spec.limits_w) if spec.limits_w else data.get("max_power_w")
            spec = replace(spec, max_power_w=float(known) if known else 1.0)
        return spec

    def _add(self, result: Result) -> None:
        self._append({"r": result_to_json(result)}, result.number, result)

    def _append(self, record: dict[str, Any], number: int | None, result: Result | None = None) -> None:
        def change(data: dict[str, Any], history: History) -> dict[str, Any]:
            if number is not None and number not in history.decisions:
                raise InvalidInput(
                    f"Job {self.name!r} has no decision {number}: it has made {history.next_number}."
                )
            if number is not None and history.done(number):
                return data
            if (
                result is not None
                and data.get("max_power_w") is None
                and result.time_s > 0
                and result.energy_j > 0
            ):
                # Without a limit to take MAXPOWER from, the first run's draw fixes the units for good.
                data["max_power_w"] = result.energy_j / result.time_s
            return {**data, "records": [*data["records"], record]}

        self._tidy(self._update(change))

    def _check_target(self, known: Any, history: History) -> None:
        """Refuse to learn from runs that were for another target: what they took would mislead."""
        if known is None or not any(result.reached for result in history.results):
            return
        before = Target.parse(known)
        if before != self._target:
            raise InvalidInput(
                f"The runs of job {self.name!r} were for the target {before}, and this one is for {self._target}: "
                "what they took would mislead it. Give the job another name, or the old target."
            )

    def _config_for(self, batch_size: int) -> dict[str, Any]:
        config = {**self._config, "batch_size": batch_size}
        rule = self._scale_lr if self._scale_lr != "auto" else _rule_of(self._train, config)
        if "lr" in config and rule != "off":
            config["lr"] = scaled_lr(float(config["lr"]), batch_size, self._spec.default, rule)
        return config

    @contextmanager
    def _measured(self) -> Iterator[tuple[tuple[Sensor, ...], str, tuple[float, ...] | None]]:
        from penstock.energy import cpu_sensors, gpu_sensors, limits_between

        own = self._sensors is None
        sensors = self._sensors if self._sensors is not None else tuple(gpu_sensors()) or tuple(cpu_sensors())
        try:
            ranges = [sensor.power_limit_range_w for sensor in sensors]
            settable = [r for r in ranges if r is not None]
            self._gpus = max(1, len(settable))
            limits_w: tuple[float, ...] | None = None
            if settable:
                limits_w = limits_between(max(low for low, _ in settable), min(high for _, high in settable))
            names = sorted({sensor.name for sensor, r in zip(sensors, ranges, strict=True) if r is not None})
            yield sensors, "+".join(names) or "cpu", limits_w
        finally:
            if own:
                for sensor in sensors:
                    sensor.close()


def job_key(name: str) -> str:
    """The store's key of a job's history."""
    return f"recurring/{name}"


def empty_record() -> dict[str, Any]:
    """The value of a job without a history."""
    return {"format": FORMAT, "records": []}


def check_record(name: str, data: Mapping[str, Any]) -> list[Any]:
    """The records of a job's value.

    Raises:
        StoreCorrupt: It is something else, or newer than this version reads.
    """
    records = data.get("records")
    if data.get("format") not in (FORMAT, CHUNKED) or not isinstance(records, list):
        raise StoreCorrupt(
            f"What the store keeps under {job_key(name)!r} is not a history this version can read. Upgrade Penstock."
        )
    return records


def summarize(
    name: str, history: History, spec: JobSpec, waited_for: Sequence[Decision] | None = None
) -> dict[str, Any]:
    """What a history tells, JSON-able. Of those pending, others than ``waited_for`` (None: all are) count as lost."""
    under_way = [d.number for d in (history.pending if waited_for is None else waited_for)]
    kinds = {d.device for d in history.decisions.values()}
    device = max(kinds, key=lambda k: sum(d.device == k for d in history.decisions.values()), default="")
    view = history.view(spec, device)
    sizes = {}
    for size in sorted({d.batch_size for d in history.decisions.values()}):
        own = [s for s in view.seen if s.batch_size == size]
        good = [s for s in own if s.reached]
        profile = view.profiles.get(size)
        best = None if not profile else best_limit(profile, eta=spec.eta, max_power_w=spec.max_power_w)[0]
        sizes[size] = {
            "runs": len(own),
            "reached": len(good),
            "mean_epochs": sum(s.epochs for s in good) / len(good) if good else None,
            "mean_cost": sum(s.cost for s in good) / len(good) if good else None,
            "limit_w": best or None,
        }
    able = [size for size, row in sizes.items() if row["mean_cost"] is not None]
    total_j = sum(r.energy_j for r in history.results)
    return {
        "name": name,
        "device": device,
        "decisions": history.next_number,
        "results": len(history.results),
        "reached": sum(r.reached for r in history.results),
        "under_way": under_way,
        "lost": [d.number for d in history.pending if d.number not in under_way],
        "energy_j": total_j,
        "time_s": sum(r.time_s for r in history.results),
        "best_batch_size": min(able, key=lambda b: float(sizes[b]["mean_cost"] or 0.0)) if able else None,
        "batch_sizes": sizes,
    }


def _policy(given: str | Policy) -> Policy:
    if isinstance(given, Policy):
        return given
    if given == "ours":
        from penstock.recurring._curve import Curve

        return Curve()
    if given == "zeus":
        from penstock.recurring._zeus import Zeus

        return Zeus()
    raise InvalidInput(f'policy must be "ours", "zeus" or a Policy, got {given!r}.')


def _rule_of(train: object, config: Mapping[str, Any]) -> Literal["sqrt", "linear", "off"]:
    """By the optimizer's class; a function might make any optimizer, so that nothing is scaled for it."""
    optimizer = getattr(train, "optimizer", None)
    if isinstance(optimizer, Mapping):
        named = config.get("optimizer")
        optimizer = optimizer.get(named) if isinstance(named, str) else None
    while isinstance(optimizer, functools.partial):
        optimizer = optimizer.func
    if not isinstance(optimizer, type):
        return "off"
    return "linear" if optimizer.__name__ == "SGD" else "sqrt"


def _number(decision: Any) -> int:
    if isinstance(decision, Decision):
        return decision.number
    return checks.whole("decision (a Decision, or its number)", decision, least=0)


def _checked_store(given: Any) -> str | os.PathLike[str] | Updates | None:
    able = all(callable(getattr(given, name, None)) for name in ("get", "put", "update"))
    if given is None or isinstance(given, str | os.PathLike) or (able and not isinstance(given, dict)):
        store: str | os.PathLike[str] | Updates | None = given
        return store
    raise InvalidInput(f"store must be a path, a URL, an open Store or None (memory), got {given!r}.")


def _checked_sensors(given: Any) -> tuple[Sensor, ...]:
    found = checks.each("sensors", given, "penstock.energy.gpu_sensors()")
    if not found:
        raise InvalidInput(
            "sensors is empty: give at least one, or leave it out to use what this machine has."
        )
    for one in found:
        if not hasattr(one, "power_limit_range_w") or not hasattr(one, "source"):
            raise InvalidInput(f"sensors must be penstock Sensors, got {one!r}.")
    return tuple(found)


def _figure(value: float) -> str:
    """A figure in whole units where it is large, and with three digits where that would hide it."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _seed(seed: int, number: int) -> int:
    import hashlib

    digest = hashlib.sha256(f"penstock.recurring/{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
