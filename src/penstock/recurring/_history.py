"""What a recurring job remembers: decisions by number, results in the order they arrived, power profiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.core.patience import patience_s
from penstock.recurring import _checks as checks
from penstock.recurring._cost import Profile, best_limit, run_cost

FORMAT = 1
"""All records in one value."""

CHUNKED = 2
"""The oldest records in chunks of their own; see ``penstock.store._chunks``."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is to be decided, and how costs weigh.

    Attributes:
        batch_sizes: The feasible batch sizes, ascending.
        default: The batch size the job is run with when nothing is known.
        eta: 0: only time counts; 1: only energy (Zeus Eq. 2).
        beta: A run is stopped at ``beta`` times the least cost of runs that reached the target.
        window: Use the latest so many observations (drift); None: all.
        limits_w: The device's power limits; empty where it has none that can be set.
        max_power_w: MAXPOWER of Eq. 2.
        seed: For random draws.
    """

    batch_sizes: tuple[int, ...]
    default: int
    eta: float = 0.5
    beta: float = 2.0
    window: int | None = None
    limits_w: tuple[float, ...] = ()
    max_power_w: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = tuple(sorted(set(checks.sizes(self.batch_sizes))))
        default = checks.whole("default", self.default)
        if default not in sizes:
            raise InvalidInput(f"The default batch size {default} is not one of {list(sizes)}: add it.")
        if not 0.0 <= checks.real("eta", self.eta) <= 1.0:
            raise InvalidInput(f"eta weighs energy against time and lies in [0, 1], got {self.eta}.")
        if not checks.real("beta", self.beta) >= 1.0:
            raise InvalidInput(
                f"beta must be at least 1 (stop at beta times the least cost), got {self.beta}."
            )
        window = None if self.window is None else checks.whole("window (None: all results)", self.window)
        limits_w = tuple(sorted(set(checks.limits(self.limits_w))))
        for name, value in (
            ("batch_sizes", sizes),
            ("default", default),
            ("eta", float(self.eta)),
            ("beta", float(self.beta)),
            ("window", window),
            ("limits_w", limits_w),
            ("max_power_w", checks.real("max_power_w", self.max_power_w, above=0.0)),
            ("seed", checks.whole("seed", self.seed, least=None)),
        ):
            object.__setattr__(self, name, value)

    def cost(self, energy_j: float, time_s: float) -> float:
        """The energy-time cost (Eq. 2)."""
        return run_cost(energy_j, time_s, eta=self.eta, max_power_w=self.max_power_w)


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run one recurrence.

    Attributes:
        number: The ticket: results are matched by it. Counts from 0.
        batch_size: The batch size.
        limit_w: The power limit to run at; None: not known yet (profile first), or none can be set.
        profile_w: Power limits to profile during the first epoch, one slice each; empty: none.
        cost_limit: Stop before the run's cost exceeds this; None: don't.
        explore: The pruning phase waits for this run.
        device: The kind of device it runs on.
        decided_s: When it was decided.
    """

    number: int
    batch_size: int
    limit_w: float | None = None
    profile_w: tuple[float, ...] = ()
    cost_limit: float | None = None
    explore: bool = False
    device: str = ""
    decided_s: float = 0.0

    @property
    def profiles(self) -> bool:
        """Whether power limits are to be profiled."""
        return bool(self.profile_w)


@dataclass(frozen=True, slots=True)
class Result:
    """How a recurrence went.

    Attributes:
        number: The decision's ticket.
        epochs: Epochs it ran.
        time_s: How long it took.
        energy_j: What it drew.
        reached: Whether it reached the target.
        profile: Limits measured during the run: watts -> (time_s, power_w) of one epoch.
        error: Why it failed, where it failed by itself.
    """

    number: int
    epochs: float
    time_s: float
    energy_j: float
    reached: bool
    profile: Profile = field(default_factory=dict)
    error: str = ""

    def __post_init__(self) -> None:
        for name in ("epochs", "time_s", "energy_j"):
            value = checks.real(f"A result's {name}", getattr(self, name), least=0.0)
            object.__setattr__(self, name, value)
        if self.reached and not self.epochs > 0.0:
            raise InvalidInput("A run that reached its target has at least one epoch; got 0.")


@dataclass(frozen=True, slots=True)
class Seen:
    """A result as a policy sees it, on the device it decides for.

    Attributes:
        number: The decision's ticket.
        batch_size: What was run.
        epochs: Epochs it ran.
        cost: Its cost, translated to this device where it ran on another (Zeus section 7).
        reached: Whether it reached the target.
        explore: ``Decision.explore``.
        limit_w: ``Decision.limit_w``.
        error: Whether it failed by itself, rather than being stopped.
    """

    number: int
    batch_size: int
    epochs: float
    cost: float
    reached: bool
    explore: bool
    limit_w: float | None = None
    error: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A job's history as seen from one kind of device.

    Attributes:
        spec: The job.
        seen: Results in the order they arrived.
        pending: Decisions whose results are not known yet.
        profiles: The power profile of each batch size measured on this device.
        foreign: Epoch costs of batch sizes that were profiled on other devices only, translated.
        memo: Where a policy may keep what it made of ``seen``, by any key: later views of the same history have it
            too. Their ``seen`` begins with this one's, but for the costs, unless ``settled``. What is decided must
            not depend on it.
        settled: No cost was translated, so that none will change.
    """

    spec: JobSpec
    seen: tuple[Seen, ...]
    pending: tuple[Decision, ...]
    profiles: Mapping[int, Profile]
    foreign: Mapping[int, float] = field(default_factory=dict)
    memo: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    settled: bool = True

    @property
    def cost_limit(self) -> float | None:
        """Beta times the least cost of the runs (in the window) that reached the target; None before any."""
        recent = self.seen if self.spec.window is None else self.seen[-self.spec.window :]
        costs = [s.cost for s in recent if s.reached]
        return self.spec.beta * min(costs) if costs else None

    def epoch_cost(self, batch_size: int) -> float | None:
        """EpochCost of a batch size that was profiled here (Eq. 7), or None."""
        profile = self.profiles.get(batch_size)
        if not profile:
            return None
        return best_limit(profile, eta=self.spec.eta, max_power_w=self.spec.max_power_w)[1]


@final
class History:
    """The memory of one recurring job: a fold over its records.

    A record is one JSON object, either ``{"d": decision}``, ``{"r": result}``, ``{"p": profile}`` or ``{"x": number}``
    (a decision given up). Appending records is all that ever happens, so concurrent writers only need
    their appends serialised.
    """

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        self.results: list[Result] = []
        self.abandoned: set[int] = set()
        self.longest_s = 0.0
        """The time of the longest run so far."""
        self._done: set[int] = set()
        self._open: dict[int, Decision] = {}
        self._profiles: dict[tuple[str, int], dict[float, tuple[float, float]]] = {}
        # Views are kept, and what policies made of them: there may be thousands of results.
        self._seen: dict[tuple[JobSpec, str], _Told] = {}
        self._costs: dict[JobSpec, dict[tuple[str, int], tuple[Profile, float]]] = {}

    @classmethod
    def fold(cls, records: Iterable[Mapping[str, Any]]) -> History:
        """The history that ``records`` tell.

        Raises:
            StoreCorrupt: One of them can't be read.
        """
        history = cls()
        for at, record in enumerate(records):
            try:
                history.apply(record)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise StoreCorrupt(f"Record {at} of the job's history can't be read: {error!r}.") from error
        return history

    @property
    def next_number(self) -> int:
        """The number of the next decision."""
        return len(self.decisions)

    @property
    def pending(self) -> list[Decision]:
        """Decisions that are neither done nor given up, oldest first."""
        return [d for n, d in self._open.items() if n not in self.abandoned]

    def waited_for(self, now_s: float, give_up_s: float | None = None) -> tuple[Decision, ...]:
        """Those of ``pending`` that may still have a result: no older than ``give_up_s``.

        By default that is ten times the longest run so far and at least a day: a run that was killed outright (out
        of memory, a reboot) never says so, and would hold up the exploration of its batch size for ever.
        """
        since_s = now_s - patience_s(self.longest_s, give_up_s)
        return tuple(d for d in self.pending if d.decided_s >= since_s)

    def done(self, number: int) -> bool:
        """Whether the result of a decision is known."""
        return number in self._done

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take in one record."""
        if "d" in record:
            self.add_decision(decision_from_json(record["d"]))
        elif "r" in record:
            self.add_result(result_from_json(record["r"]))
        elif "p" in record:
            device, size, points = record["p"]
            self.add_profile(device, int(size), profile_from_json(points))
        elif "x" in record:
            self.abandoned.add(int(record["x"]))
        else:
            raise KeyError(f"unknown record {sorted(record)}")

    def add_decision(self, decision: Decision) -> None:
        """Remember a decision."""
        self.decisions[decision.number] = decision
        self._open[decision.number] = decision

    def add_result(self, result: Result) -> None:
        """Remember a result; a second one for the same ticket is ignored (a retried message)."""
        decision = self.decisions[result.number]
        if result.number in self._done:
            return
        self._done.add(result.number)
        del self._open[result.number]
        self.abandoned.discard(result.number)  # it came after all
        self.results.append(result)
        self.longest_s = max(self.longest_s, result.time_s)
        if result.profile:
            self.add_profile(decision.device, decision.batch_size, result.profile)
        elif result.epochs > 0 and result.time_s > 0:
            point = (result.time_s / result.epochs, result.energy_j / result.time_s)
            self.add_profile(decision.device, decision.batch_size, {decision.limit_w or 0.0: point})

    def add_profile(self, device: str, batch_size: int, profile: Profile) -> None:
        """Remember what epochs take; later measurements replace earlier ones of the same limit."""
        self._profiles.setdefault((device, batch_size), {}).update(profile)
        for costs in self._costs.values():
            costs.pop((device, batch_size), None)

    def profile(self, device: str, batch_size: int) -> dict[float, tuple[float, float]]:
        """What was measured of a batch size on a device."""
        return dict(self._profiles.get((device, batch_size), {}))

    def view(self, spec: JobSpec, device: str = "") -> View:
        """The history as seen from ``device``: costs observed elsewhere are translated (Zeus section 7).

        A cost is Epochs(b) x EpochCost(b). Epochs do not depend on the device; the epoch cost is taken from the
        profile of ``b`` on this device. While ``b`` is not profiled here, its epoch cost elsewhere is scaled by
        the mean ratio of the batch sizes that are profiled on both devices.
        """
        known: dict[str, dict[int, float]] = {}
        here: dict[int, Profile] = {}
        costs = self._costs.setdefault(spec, {})
        for (kind, size), profile in self._profiles.items():
            if (kind, size) not in costs:  # the same until it is measured again
                usable = _usable(dict(profile), spec)
                least = best_limit(usable, eta=spec.eta, max_power_w=spec.max_power_w)[1]
                costs[kind, size] = usable, least
            usable, cost = costs[kind, size]
            known.setdefault(kind, {})[size] = cost
            if kind == device:
                here[size] = usable
        mine = known.get(device, {})
        ratio = {kind: _ratio(mine, theirs) for kind, theirs in known.items() if kind != device}
        foreign: dict[int, float] = {}
        for kind, theirs in known.items():
            if kind != device:
                foreign.update({b: cost * ratio[kind] for b, cost in theirs.items() if b not in mine})
        told = self._seen.setdefault((spec, device), _Told())
        seen = told.seen
        translated: dict[int, float] = {}
        for size, places in told.elsewhere.items():
            here_cost = mine.get(size, foreign.get(size))
            if here_cost is None:
                continue
            translated[size] = here_cost
            if told.translated.get(size) == here_cost:
                continue
            for at in places:
                one = seen[at]
                seen[at] = Seen(
                    one.number,
                    size,
                    one.epochs,
                    one.epochs * here_cost,
                    one.reached,
                    one.explore,
                    one.limit_w,
                    one.error,
                )
        for result in self.results[len(seen) :]:
            decision = self.decisions[result.number]
            size, cost = decision.batch_size, spec.cost(result.energy_j, result.time_s)
            if decision.device != device:
                told.elsewhere.setdefault(size, []).append(len(seen))
                known_cost = mine.get(size, foreign.get(size))
                if known_cost is not None:
                    translated[size] = known_cost
                    cost = result.epochs * known_cost
            seen.append(
                Seen(
                    result.number,
                    size,
                    result.epochs,
                    cost,
                    result.reached,
                    decision.explore,
                    decision.limit_w,
                    bool(result.error),
                )
            )
        told.translated = translated
        return View(spec, tuple(seen), tuple(self.pending), here, foreign, told.memo, not told.elsewhere)


@final
class _Told:
    """A kept view: results as seen, which of them ran elsewhere, and the epoch costs these were translated with."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.elsewhere: dict[int, list[int]] = {}
        """By batch size, places in ``seen``."""
        self.translated: dict[int, float] = {}
        self.memo: dict[object, object] = {}


def _usable(profile: Profile, spec: JobSpec) -> Profile:
    # Limits that the job may still set; a profile without any of them (no limit settable) is used as it is.
    allowed = {limit: point for limit, point in profile.items() if limit in spec.limits_w}
    return allowed or profile


def _ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    logs = [math.log(mine[b] / theirs[b]) for b in mine if b in theirs and mine[b] > 0 and theirs[b] > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def profile_to_json(profile: Profile) -> list[list[float]]:
    """A profile as JSON."""
    return [[limit, time_s, power_w] for limit, (time_s, power_w) in sorted(profile.items())]


def profile_from_json(data: Iterable[Iterable[float]]) -> dict[float, tuple[float, float]]:
    """The profile of a JSON list."""
    return {float(limit): (float(time_s), float(power_w)) for limit, time_s, power_w in data}


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON."""
    data: dict[str, Any] = {"n": decision.number, "b": decision.batch_size, "t": decision.decided_s}
    if decision.limit_w is not None:
        data["p"] = decision.limit_w
    if decision.profile_w:
        data["profile"] = list(decision.profile_w)
    if decision.cost_limit is not None:
        data["stop"] = decision.cost_limit
    if decision.explore:
        data["explore"] = True
    if decision.device:
        data["device"] = decision.device
    return data


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """The decision of a JSON object."""
    return Decision(
        int(data["n"]),
        int(data["b"]),
        None if data.get("p") is None else float(data["p"]),
        tuple(float(w) for w in data.get("profile", ())),
        data.get("stop"),
        bool(data.get("explore")),
        str(data.get("device", "")),
        float(data.get("t", 0.0)),
    )


def result_to_json(result: Result) -> dict[str, Any]:
    """A result as JSON."""
    data: dict[str, Any] = {
        "n": result.number,
        "epochs": result.epochs,
        "s": result.time_s,
        "j": result.energy_j,
        "reached": result.reached,
    }
    if result.profile:
        data["profile"] = profile_to_json(result.profile)
    if result.error:
        data["error"] = result.error
    return data


def result_from_json(data: Mapping[str, Any]) -> Result:
    """The result of a JSON object."""
    return Result(
        int(data["n"]),
        float(data["epochs"]),
        float(data["s"]),
        float(data["j"]),
        bool(data["reached"]),
        profile_from_json(data.get("profile", ())),
        str(data.get("error", "")),
    )
