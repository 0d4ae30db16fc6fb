"""Mixed devices (Hydro 5.2): which kind of device each study's trials get, by what they make of it.

Throughput and power of every kind of trial on every kind of device are given or learned while they run. The allocation
keeps each study at its fair number of devices and at least at the progress it would have with devices of any kind (the
sharing incentive of Gavel, which Hydro follows); within that it gives every kind to whom it serves best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from penstock.core.errors import InvalidInput

Goal: TypeAlias = Literal["time", "energy", "money"]


@final
@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of interchangeable devices.

    Attributes:
        name: ``"v100"``.
        count: How many there are.
        generation: Larger is newer.
        busy_w: Power at work, where a trial's own is not known.
        idle_w: Power while held and idle.
        price_per_h: Money per device and hour.
        cores: CPU cores that are held and released with a device.
    """

    name: str
    count: int
    generation: int = 0
    busy_w: float = 0.0
    idle_w: float = 0.0
    price_per_h: float = 0.0
    cores: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise InvalidInput(f"There must be at least 1 device of kind {self.name!r}, got {self.count!r}.")
        for name in ("busy_w", "idle_w", "price_per_h"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(
                    f"{name} of {self.name!r} is {value!r}; give a finite figure of at least 0."
                )


@final
@dataclass(frozen=True, slots=True)
class Rate:
    """What a kind of trial makes of a kind of device.

    Attributes:
        per_s: Iterations a second; 0: it can't run there.
        power_w: What the device draws meanwhile; None: the kind's ``busy_w``.
        utilisation: The part of the device it keeps busy (SM activity), 0..1; None: not known.
    """

    per_s: float
    power_w: float | None = None
    utilisation: float | None = None


@final
class Rates:
    """Throughput, power and utilisation by kind of trial and kind of device: given, learned, or inferred.

    What is measured replaces what was given. A pair that was never seen is inferred from how much faster the one
    device is than another on the kinds of trials that were seen on both.

    Args:
        given: By (trial kind, device kind).
        least: How many iterations make a measurement.
    """

    def __init__(self, given: Mapping[tuple[str, str], Rate] | None = None, *, least: int = 3) -> None:
        self._known: dict[tuple[str, str], Rate] = dict(given or {})
        self._seen: dict[
            tuple[str, str], list[float]
        ] = {}  # iterations, seconds, joules, seconds with joules
        self.least = least
        self.version = 0

    def tell(
        self,
        trial: str,
        device: str,
        *,
        iterations: float,
        seconds: float,
        joules: float | None = None,
        utilisation: float | None = None,
    ) -> None:
        """Learn from some iterations of a trial."""
        if not (iterations > 0 and seconds > 0):
            raise InvalidInput(f"iterations and seconds must be above 0, got {iterations} and {seconds}.")
        sums = self._seen.setdefault((trial, device), [0.0, 0.0, 0.0, 0.0])
        sums[0] += iterations
        sums[1] += seconds
        if joules is not None:
            sums[2] += joules
            sums[3] += seconds
        if sums[0] < self.least:
            return
        old = self._known.get((trial, device))
        power_w = sums[2] / sums[3] if sums[3] else (None if old is None else old.power_w)
        used = utilisation if utilisation is not None else (None if old is None else old.utilisation)
        new = Rate(sums[0] / sums[1], power_w, used)
        if old is None or abs(new.per_s - old.per_s) > 0.02 * old.per_s:
            self.version += 1  # worth a new allocation
        self._known[trial, device] = new

    def known(self, trial: str, device: str) -> Rate | None:
        """What was given or measured."""
        return self._known.get((trial, device))

    def rate(self, trial: str, device: str) -> Rate | None:
        """What was given, measured or can be inferred; None: nothing is known."""
        found = self._known.get((trial, device))
        if found is not None:
            return found
        guesses = []
        for (other, where), rate in self._known.items():
            if other == trial and where != device and rate.per_s > 0:
                ratio = self._ratio(device, where)
                if ratio is not None:
                    guesses.append(rate.per_s * ratio)
        return Rate(statistics.median(guesses)) if guesses else None

    def _ratio(self, device: str, than: str) -> float | None:
        ratios = [
            rate.per_s / self._known[trial, than].per_s
            for (trial, where), rate in self._known.items()
            if where == device and (trial, than) in self._known and self._known[trial, than].per_s > 0
        ]
        return statistics.median(ratios) if ratios else None


def cost(rate: Rate, device: DeviceKind, goal: Goal = "time", eta: float = 0.5) -> float:
    """What an iteration costs: seconds; joules by Zeus' eta (eta E + (1 - eta) max power T); or money.

    Infinite where it can't run.
    """
    if not rate.per_s > 0:
        return math.inf
    if goal == "time":
        return 1 / rate.per_s
    if goal == "money":
        return device.price_per_h / 3600 / rate.per_s
    if goal != "energy":
        raise InvalidInput(f'goal must be "time", "energy" or "money", got {goal!r}.')
    if not 0 <= eta <= 1:
        raise InvalidInput(f"eta must be in [0, 1], got {eta!r}.")
    power_w = device.busy_w if rate.power_w is None else rate.power_w
    return (eta * power_w + (1 - eta) * device.busy_w) / rate.per_s


@final
@dataclass(frozen=True, slots=True)
class Demand:
    """What a study could use now.

    Attributes:
        study: Its name.
        kind: Its trials' kind.
        wants: How many devices it could use: trials that run or could.
        weight: Its share among studies.
        urgency: How much its progress counts beyond its fair share, e.g. 1 / remaining work: short studies first.
    """

    study: str
    kind: str
    wants: int
    weight: float = 1.0
    urgency: float = 1.0


def fair_counts(demands: Sequence[Demand], devices: int) -> list[float]:
    """Devices for each study by max-min fairness: equal per weight, nobody more than it wants, nothing left over.

    Example:
        >>> fair_counts([Demand("a", "x", 1), Demand("b", "x", 9), Demand("c", "x", 9)], 9)
        [1.0, 4.0, 4.0]
    """
    if any(not d.weight > 0 or d.wants < 0 for d in demands):
        raise InvalidInput("Weights must be above 0 and wants at least 0.")
    counts = [0.0] * len(demands)
    left = float(devices)
    order = sorted(range(len(demands)), key=lambda i: demands[i].wants / demands[i].weight)
    weights = math.fsum(d.weight for d in demands)
    for i in order:
        counts[i] = min(float(demands[i].wants), left * demands[i].weight / weights) if weights > 0 else 0.0
        left -= counts[i]
        weights -= demands[i].weight
    return counts


def whole_counts(wants: Sequence[int], weights: Sequence[float], devices: int) -> list[int]:
    """Devices of each study: the fair counts in whole devices, what is left over to the largest rests, earliest first.

    Example:
        >>> whole_counts([4, 4, 1], [1.0, 1.0, 1.0], 4)
        [2, 1, 1]
    """
    demands = [
        Demand(str(i), "", want, weight) for i, (want, weight) in enumerate(zip(wants, weights, strict=True))
    ]
    fair = fair_counts(demands, devices)
    counts = [math.floor(share + 1e-9) for share in fair]
    left = min(devices, sum(wants)) - sum(counts)
    by_rest = sorted(range(len(fair)), key=lambda i: (counts[i] - fair[i], i))
    for i in [i for i in by_rest if counts[i] < wants[i]][:left]:
        counts[i] += 1
    return counts


Allocation: TypeAlias = dict[str, dict[str, float]]
"""Devices by study and kind; not whole: who is below its figure is served next."""


def allocate(
    demands: Sequence[Demand],
    devices: Sequence[DeviceKind],
    rates: Rates,
    *,
    goal: Goal = "time",
    eta: float = 0.5,
) -> Allocation:
    """Devices of each kind for each study.

    The number of a study's devices is its fair one. Which kinds they are maximises the sum of the studies' normalised
    progress per cost, and no study gets less of it than devices of all kinds alike would give.

    Args:
        demands: The studies.
        devices: The kinds.
        rates: What is known; kinds of trials of which nothing is known are allotted all kinds alike.
        goal: What progress costs.
        eta: For ``"energy"``, Zeus' weight of energy against time.
    """
    demands = [d for d in demands if d.wants > 0]
    if not demands:
        return {}
    total = sum(d.count for d in devices)
    counts = fair_counts(demands, total)
    values = {kind: _values(kind, devices, rates, goal, eta) for kind in {d.kind for d in demands}}
    # Studies of one kind of trial differ in nothing the choice of devices depends on, urgency apart: one row for all.
    groups: dict[tuple[str, float], list[int]] = {}
    for i, demand in enumerate(demands):
        groups.setdefault((demand.kind, _rounded(demand.urgency)), []).append(i)
    keys = list(groups)
    wanted = [math.fsum(counts[i] for i in groups[key]) for key in keys]
    shares = _solve(
        [values[kind] for kind, _ in keys], [u for _, u in keys], wanted, [d.count for d in devices]
    )
    allocation: Allocation = {}
    for key, want, row in zip(keys, wanted, shares, strict=True):
        for i in groups[key]:
            part = counts[i] / want if want > 0 else 0.0
            allocation[demands[i].study] = {d.name: x * part for d, x in zip(devices, row, strict=True)}
    return allocation


def _rounded(urgency: float) -> float:
    """Urgencies within a factor of two count alike: fewer rows."""
    return 2.0 ** round(math.log2(urgency)) if urgency > 0 and math.isfinite(urgency) else 1.0


def _values(kind: str, devices: Sequence[DeviceKind], rates: Rates, goal: Goal, eta: float) -> list[float]:
    """Progress per cost on each kind, 1 for the mean device."""
    found = [rates.rate(kind, d.name) for d in devices]
    if all(rate is None for rate in found):
        return [1.0] * len(devices)
    costs = [math.inf if r is None else cost(r, d, goal, eta) for r, d in zip(found, devices, strict=True)]
    if any(c == 0 for c in costs):
        raise InvalidInput(f"goal={goal!r} needs the power or price of every kind: one is 0.")
    values = [1 / c for c in costs]
    some = [v for v, r in zip(values, found, strict=True) if r is not None]
    values = [statistics.fmean(some) if r is None else v for v, r in zip(values, found, strict=True)]
    mean = math.fsum(v * d.count for v, d in zip(values, devices, strict=True)) / sum(
        d.count for d in devices
    )
    return [v / mean if mean > 0 else 0.0 for v in values]


def _solve(
    values: Sequence[Sequence[float]],
    urgency: Sequence[float],
    wanted: Sequence[float],
    counts: Sequence[int],
) -> list[list[float]]:
    """The transport problem: rows get ``wanted`` devices out of columns of ``counts``."""
    rows, columns = len(values), len(counts)
    if rows == 1:  # the best devices first
        row, left = [0.0] * columns, wanted[0]
        for k in sorted(range(columns), key=lambda k: -values[0][k]):
            row[k] = min(left, float(counts[k])) if values[0][k] > 0 else 0.0
            left -= row[k]
        return [row]
    import numpy as np
    from scipy.optimize import linprog

    scale = max(urgency)
    gain = np.array([[v * u / scale for v in row] for row, u in zip(values, urgency, strict=True)])
    upper = np.zeros((columns + 2 * rows, rows * columns))
    limit = np.zeros(columns + 2 * rows)
    for k in range(columns):
        upper[k, k::columns] = 1
        limit[k] = counts[k]
    for g in range(rows):
        upper[columns + g, g * columns : (g + 1) * columns] = 1
        limit[columns + g] = wanted[g]
        upper[columns + rows + g, g * columns : (g + 1) * columns] = [-v for v in values[g]]
        limit[columns + rows + g] = -wanted[g] * (1 - 1e-9)  # no less than from the mean device
    found = linprog(-gain.ravel(), A_ub=upper, b_ub=limit, method="highs")
    if found.x is None:  # numerically on the edge: all kinds alike is always a solution
        total = sum(counts)
        return [[want * count / total for count in counts] for want in wanted]
    return [[max(0.0, float(x)) for x in row] for row in found.x.reshape(rows, columns)]


def target_kind(
    kind: str,
    devices: Iterable[DeviceKind],
    rates: Rates,
    *,
    least_used: float = 0.5,
    least_speed: float = 0.5,
) -> list[str]:
    """The kinds of device for a target trial, best first (Hydro 5.2).

    It trains alone and unfused; on a new GPU that it would leave under half used it is misplaced, so it goes to the
    newest that it does use, or to the oldest.

    Args:
        kind: The trial's kind.
        devices: The kinds of devices.
        rates: With utilisations as far as known; a kind without one counts as used.
        least_used: Below this utilisation a device is too good for it.
        least_speed: Devices on which it would run slower than this part of its best speed come last.
    """
    newest = sorted(devices, key=lambda d: -d.generation)
    speeds = {d.name: rate.per_s for d in newest if (rate := rates.rate(kind, d.name)) is not None}
    best = max(speeds.values(), default=0.0)

    def slow(d: DeviceKind) -> bool:
        return speeds.get(d.name, best) < least_speed * best

    def used(d: DeviceKind) -> bool:
        rate = rates.rate(kind, d.name)
        return rate is None or rate.utilisation is None or rate.utilisation >= least_used

    good = [d for d in newest if not slow(d)]
    fitting = [d for d in good if used(d)]
    too_good = [d for d in reversed(good) if not used(d)]  # the oldest first
    crawling = sorted((d for d in newest if slow(d)), key=lambda d: -speeds.get(d.name, 0.0))
    return [d.name for d in (*fitting, *too_good, *crawling)]


@final
@dataclass(slots=True)
class Idle:
    """Which devices have been idle long enough to be given back to the cluster, with the cores that go with them.

    Attributes:
        after_s: How long a device may be idle (Hydro 5.2: a minute).
    """

    after_s: float = 60.0
    _since: dict[str, float] = field(default_factory=dict)

    def busy(self, device: str) -> None:
        """A device got work (or is gone)."""
        self._since.pop(device, None)

    def idle(self, device: str, now_s: float) -> None:
        """A device has nothing to do."""
        self._since.setdefault(device, now_s)

    def due(self, now_s: float) -> list[str]:
        """Devices to release now, the longest idle first; they are forgotten."""
        found = sorted((s, d) for d, s in self._since.items() if now_s - s >= self.after_s)
        for _, device in found:
            del self._since[device]
        return [device for _, device in found]

    def next_s(self) -> float | None:
        """When the next one will be due; None: none is idle."""
        return min(self._since.values()) + self.after_s if self._since else None
