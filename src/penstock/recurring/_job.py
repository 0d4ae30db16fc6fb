"""RecurringJob: a training that runs again and again, and gets cheaper every time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from penstock.core import Clock, Source, WallClock
from penstock.core.errors import InvalidInput, StoreCorrupt, StoreUnwritable, TrialError
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
        decision: The last run's decision.
        reached: Whether the target was reached.
        epochs: Epochs of the last run.
        time_s: Time of all its runs.
        energy_j: Energy of all its runs.
        cost: Cost of all its runs (Zeus Eq. 2).
        source: Where the energy figure comes from.
        tries: How many runs it took.
        metrics: The last run's last report.
        reason: Why the last run ended, where it was not the target.
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
        end = "reached the target" if self.reached else f"did not reach the target ({self.reason})"
        limit = "" if self.decision.limit_w is None else f", {self.decision.limit_w:.0f} W"
        return (
            f"#{self.decision.number} batch size {self.decision.batch_size}{limit}: {end} after {self.epochs:g} epochs,"
            f" {self.time_s:.1f} s, {self.energy_j:.0f} J ({self.source}) in {self.tries} "
            f"{'run' if self.tries == 1 else 'runs'}"
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
        target: ``("accuracy", 0.95)``, or ``("wer", "<=", 40)``.
        max_epochs: Where a run that does not reach the target ends.
        eta: 0: only time counts; 1: only energy.
        beta: A run is stopped at ``beta`` times the least cost of runs that reached the target.
        window: Use the latest so many results, for jobs that drift; None: all (drift is then detected).
        store: A path, a URL, an open ``Store``, or None for memory.
        policy: ``"ours"`` or ``"zeus"``, or a ``Policy``.
        config: Further values for ``run.config``.
        scale_lr: How ``config["lr"]``, given for the default batch size, follows the batch size: ``"sqrt"`` (adaptive
            optimisers), ``"linear"`` (SGD), ``"off"``, or ``"auto"``: by the Task's optimizer, else off.
        seed: For draws, and for the runs' seeds.
        sensors: What to measure; by default this machine's GPUs, or its CPU where there are none.
        limits_w: Power limits to choose from; by default those the GPUs take, in steps of 25 W.
        max_power_w: MAXPOWER of Eq. 2; by default the highest limit, or the first run's average power.
        give_up_s: A decision without a result for so long counts as lost; None: only ``abandon`` says so.
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
        batch_sizes: Sequence[int],
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
        if not slice_s > 0:
            raise InvalidInput(f"slice_s must be positive, got {slice_s!r}.")
        if not name or "/" in name:
            raise InvalidInput(f"A job's name must not be empty nor contain '/', got {name!r}.")
        if train is not None and not callable(train):
            raise InvalidInput(f"train must be a Task or a function train(run), got {train!r}.")
        if max_epochs is not None and max_epochs < 1:
            raise InvalidInput(f"max_epochs must be at least 1, got {max_epochs}.")
        if scale_lr not in ("auto", "sqrt", "linear", "off"):
            raise InvalidInput(f'scale_lr must be "auto", "sqrt", "linear" or "off", got {scale_lr!r}.')
        if not batch_sizes:
            raise InvalidInput("batch_sizes is empty: give at least one.")
        self.name = name
        self._spec = JobSpec(
            tuple(batch_sizes),
            max(batch_sizes) if default is None else default,
            eta,
            beta,
            window,
            tuple(float(w) for w in limits_w or ()),
            1.0 if max_power_w is None else max_power_w,
            seed,
        )
        self._fixed_limits = limits_w is not None
        self._max_power_w = max_power_w
        self._train = train
        self._target_given = tuple(target)
        self._max_epochs = max_epochs
        self._store_given = store
        self._store: Updates | None = None
        self._policy = _policy(policy)
        self._config = dict(config or {})
        self._scale_lr = scale_lr
        self._sensors = None if sensors is None else tuple(sensors)
        self._give_up_s = give_up_s
        self._clock = clock
        self._wall: Clock = clock if clock is not None else WallClock()
        self._devices = devices
        self._threads = threads
        self._slice_s = slice_s
        self._history = History()
        self._folded = 0
        self._gpus = 1
        self._identity: Any = None

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
        made: list[Decision] = []

        def change(data: dict[str, Any], history: History) -> dict[str, Any]:
            spec = self._spec_for(data, limits_w)
            now_s = self._wall.now_s()
            view = history.view(spec, device or "")
            if self._give_up_s is not None:
                since_s = now_s - self._give_up_s
                view = replace(view, pending=tuple(d for d in view.pending if d.decided_s >= since_s))
            number = history.next_number
            choice = self._policy.choose(view, number, retry=retry)
            decision = Decision(
                number,
                choice.batch_size,
                choice.limit_w,
                choice.profile_w,
                choice.cost_limit,
                choice.explore,
                device or "",
                now_s,
            )
            made[:] = [decision]
            records = [*data["records"], {"d": decision_to_json(decision)}]
            return {**data, "eta": spec.eta, "policy": self._policy.name, "records": records}

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
            InvalidInput: There is no such decision.
        """
        number = decision if isinstance(decision, int) else decision.number
        self._add(Result(number, epochs, time_s, energy_j, reached, dict(profile or {}), error))

    def abandon(self, decision: Decision | int) -> None:
        """Say that a decision will have no result: its run was lost, or never started."""
        number = decision if isinstance(decision, int) else decision.number
        self._append({"x": number}, number)

    def add_profile(self, batch_size: int, profile: Profile, *, device: str = "") -> None:
        """Take in a quick profile of a batch size on a device, to translate costs to it (Zeus section 7)."""
        if not profile or any(t <= 0 or p < 0 for t, p in profile.values()):
            raise InvalidInput(
                f"A profile maps watts to (time_s, power_w) of an epoch, got {dict(profile)!r}."
            )
        self._append({"p": [device, batch_size, profile_to_json(profile)]}, None)

    # -- here -----------------------------------------------------------------------------------------------

    def run(self, *, tries: int = 3, raise_on_failure: bool = False) -> Recurrence:
        """Do one recurrence here: decide, train, measure, learn; again with another batch size if it fails.

        Args:
            tries: Runs at most.
            raise_on_failure: Raise if the last run ended by an error of its own.

        Raises:
            TrialError: With ``raise_on_failure``.
        """
        from penstock.recurring._launch import Launched, Target, launch

        if self._train is None:
            raise InvalidInput("This job has nothing to run: give it a Task or a function train(run).")
        if tries < 1:
            raise InvalidInput(f"tries must be at least 1, got {tries}.")
        target = Target.parse(self._target_given)
        with self._measured() as (sensors, device, limits_w):
            total_s = total_j = 0.0
            source = Source.MEASURED
            for attempt in range(1, tries + 1):
                decision = self.decide(device=device, limits_w=limits_w, retry=attempt > 1)
                spec = self._spec_for(self._data(), limits_w)
                try:
                    done: Launched = launch(
                        self._train,
                        decision,
                        spec,
                        config=self._config_for(decision.batch_size),
                        target=target,
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
        if decision.limit_w is None and done.result.profile and spec.limits_w:
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
        return summarize(self.name, history, spec)

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

    def _config_for(self, batch_size: int) -> dict[str, Any]:
        config = {**self._config, "batch_size": batch_size}
        rule = self._scale_lr if self._scale_lr != "auto" else _rule_of(self._train)
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


def summarize(name: str, history: History, spec: JobSpec) -> dict[str, Any]:
    """What a history tells, JSON-able."""
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
        "under_way": [d.number for d in history.pending],
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


def _rule_of(train: object) -> Literal["sqrt", "linear", "off"]:
    optimizer = getattr(train, "optimizer", None)
    if optimizer is None:
        return "off"
    return "linear" if getattr(optimizer, "__name__", "") == "SGD" else "sqrt"


def _seed(seed: int, number: int) -> int:
    import hashlib

    digest = hashlib.sha256(f"penstock.recurring/{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
