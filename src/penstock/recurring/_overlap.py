"""Replay of overlapping recurring jobs from an arrival trace (Zeus section 6.3), on a virtual clock."""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.core.errors import InvalidInput
from penstock.recurring._history import Decision, History, JobSpec, Result
from penstock.recurring._policy import Policy
from penstock.recurring._replay import MAX_TRIES, simulate_run, spec_of
from penstock.recurring._traces import Workload


@dataclass(frozen=True, slots=True)
class Arrival:
    """One submission of the arrival trace.

    Attributes:
        group: Which recurring job it is a recurrence of.
        start_s: When it was submitted.
        runtime_s: How long it ran in the trace; its ratio to the mean of its cluster scales the replayed runtime.
    """

    group: str
    start_s: float
    runtime_s: float


@dataclass(frozen=True, slots=True)
class Ran:
    """One replayed run: of which group and workload, when, and what it took, scaled."""

    group: str
    workload: str
    start_s: float
    end_s: float
    batch_size: int
    energy_j: float
    time_s: float
    cost: float
    reached: bool


@dataclass(frozen=True, slots=True)
class Overlap:
    """A replayed arrival trace.

    Attributes:
        policy: Who decided.
        runs: All runs in the order they ended.
        most_in_flight: Recurrences of one group that were under way at once, at most.
    """

    policy: str
    runs: tuple[Ran, ...] = field(repr=False)
    most_in_flight: int

    def totals(self) -> dict[str, dict[str, float]]:
        """Per workload: energy, time and cost of all runs."""
        out: dict[str, dict[str, float]] = {}
        for run in self.runs:
            row = out.setdefault(run.workload, {"energy_j": 0.0, "time_s": 0.0, "cost": 0.0, "runs": 0.0})
            row["energy_j"] += run.energy_j
            row["time_s"] += run.time_s
            row["cost"] += run.cost
            row["runs"] += 1
        return out


def read_arrivals(path: str | Path) -> list[Arrival]:
    """An arrival trace: a CSV file with group, start_time and end_time (seconds), as derived from the Alibaba trace.

    Raises:
        InvalidInput: A column is missing, or a row does not read.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except OSError as error:
        raise InvalidInput(f"Can't read the arrival trace {path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path} is not a CSV file of text: {error}.") from error
    arrivals = []
    for line, row in enumerate(rows, start=2):
        try:
            start_s, end_s = float(row["start_time"]), float(row["end_time"])
            if not (math.isfinite(start_s) and math.isfinite(end_s)):
                raise ValueError(f"not finite: {start_s}, {end_s}")
            arrivals.append(Arrival(row["group"], start_s, end_s - start_s))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"{path}, line {line}: needs group, start_time, end_time; {error!r}."
            ) from error
    # Jobs that ended as they began (cancelled) say nothing of runtimes.
    lasting = [a for a in arrivals if a.runtime_s > 0]
    if not lasting:
        raise InvalidInput(f"{path} has no arrivals whose end_time is after their start_time.")
    return lasting


def synthetic_arrivals(
    workloads: Sequence[Workload],
    *,
    groups: int = 12,
    recurrences: int = 60,
    overlap: float = 3.0,
    seed: int = 0,
) -> list[Arrival]:
    """A made-up arrival trace: recurring groups whose jobs come so fast that about ``overlap`` of them overlap.

    Runtimes are log-normal within a group and span the workloads' own range between groups.
    """
    rng = random.Random(f"penstock.arrivals/{seed}")
    means = sorted(typical_runtime_s(w) for w in workloads)
    arrivals = []
    for group in range(groups):
        mean = means[group % len(means)] * math.exp(rng.gauss(0.0, 0.15))
        now_s = rng.uniform(0.0, 5.0) * mean
        for _ in range(recurrences):
            now_s += rng.expovariate(overlap / mean)
            arrivals.append(Arrival(f"group-{group}", now_s, mean * math.exp(rng.gauss(0.0, 0.2))))
    return sorted(arrivals, key=lambda a: a.start_s)


def typical_runtime_s(workload: Workload) -> float:
    """The time of the default configuration."""
    profile = workload.power[workload.default]
    return workload.mean_epochs(workload.default) * profile[max(profile)][0]


def assign(arrivals: Iterable[Arrival], workloads: Sequence[Workload]) -> dict[str, tuple[Workload, float]]:
    """Which workload each group stands for, and the mean runtime of its cluster (section 6.3).

    Groups are clustered by their mean runtime (K-means on its logarithm, as many clusters as workloads) and clusters
    matched with workloads in the order of runtimes.
    """
    times: dict[str, list[float]] = {}
    for arrival in arrivals:
        times.setdefault(arrival.group, []).append(arrival.runtime_s)
    means = {group: sum(own) / len(own) for group, own in times.items()}
    ordered = sorted(workloads, key=typical_runtime_s)
    clusters = _kmeans({g: math.log(m) for g, m in means.items()}, min(len(ordered), len(means)))
    # Fewer groups than workloads: the fastest ones stand in.
    result: dict[str, tuple[Workload, float]] = {}
    for members, workload in zip(clusters, ordered, strict=False):
        every = [t for group in members for t in times[group]]
        for group in members:
            result[group] = (workload, sum(every) / len(every))
    return result


def _kmeans(points: Mapping[str, float], k: int) -> list[list[str]]:
    # One dimension: clusters are intervals, so the best partition is found exactly by dynamic programming.
    names = sorted(points, key=lambda name: (points[name], name))
    values = [points[name] for name in names]
    n = len(values)
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)

    def spread(i: int, j: int) -> float:
        return squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / (j - i)

    best = [[math.inf] * (n + 1) for _ in range(k + 1)]
    cut = [[0] * (n + 1) for _ in range(k + 1)]
    best[0][0] = 0.0
    for c in range(1, k + 1):
        for j in range(c, n + 1):
            for i in range(c - 1, j):
                total = best[c - 1][i] + spread(i, j)
                if total < best[c][j]:
                    best[c][j], cut[c][j] = total, i
    out: list[list[str]] = []
    j = n
    for c in range(k, 0, -1):
        i = cut[c][j]
        out.append(names[i:j])
        j = i
    return list(reversed(out))


def replay_arrivals(
    arrivals: Sequence[Arrival],
    workloads: Sequence[Workload],
    make: Callable[[Workload], Policy],
    *,
    eta: float = 0.5,
    beta: float = 2.0,
    window: int | None = None,
    seed: int = 0,
) -> Overlap:
    """Replay all groups of an arrival trace; recurrences of a group overlap as they did.

    A run that fails is retried at once. Energy and time are scaled by the job's runtime over its cluster's mean, and
    so is how long the run occupies the clock.
    """
    assigned = assign(arrivals, workloads)
    runs: list[Ran] = []
    most = 0
    name = ""
    for group in sorted(assigned):
        workload, mean_s = assigned[group]
        policy = make(workload)
        name = policy.name
        own = sorted((a for a in arrivals if a.group == group), key=lambda a: a.start_s)
        spec = spec_of(workload, eta=eta, beta=beta, window=window, seed=seed)
        done, peak = _replay_group(group, own, workload, mean_s, policy, spec)
        runs += done
        most = max(most, peak)
    return Overlap(name, tuple(sorted(runs, key=lambda r: r.end_s)), most)


def _replay_group(
    group: str, own: Sequence[Arrival], workload: Workload, mean_s: float, policy: Policy, spec: JobSpec
) -> tuple[list[Ran], int]:
    luck = random.Random(f"penstock.overlap/{workload.name}/{group}/{spec.seed}")
    draws = [luck.random() for _ in own]
    history = History()
    runs: list[Ran] = []
    # Events: (time, order, kind, ...): ends before starts at the same time.
    events: list[tuple[float, int, int, int, Result | None]] = [
        (a.start_s, 1, at, 0, None) for at, a in enumerate(own)
    ]
    heapq.heapify(events)
    flying = peak = 0
    started: dict[int, float] = {}
    while events:
        now_s, _, at, tries, result = heapq.heappop(events)
        ratio = own[at].runtime_s / mean_s
        if result is not None:
            history.add_result(result)
            flying -= 1
            decision = history.decisions[result.number]
            cost = spec.cost(result.energy_j, result.time_s) * ratio
            runs.append(
                Ran(
                    group,
                    workload.name,
                    started.pop(result.number),
                    now_s,
                    decision.batch_size,
                    result.energy_j * ratio,
                    result.time_s * ratio,
                    cost,
                    result.reached,
                )
            )
            if result.reached:
                continue
            if tries + 1 >= MAX_TRIES:
                raise InvalidInput(f"{workload.name} did not reach its target in {MAX_TRIES} tries.")
            tries += 1
        number = history.next_number
        choice = policy.choose(history.view(spec), number, retry=tries > 0)
        history.add_decision(
            Decision(
                number, choice.batch_size, choice.limit_w, choice.profile_w, choice.cost_limit, choice.explore
            )
        )
        recorded = workload.epochs[choice.batch_size]
        draw = draws[at] if tries == 0 else luck.random()
        run = simulate_run(workload, spec, choice, recorded[int(draw * len(recorded))])
        run = replace(run, number=number)
        started[number] = now_s
        flying += 1
        peak = max(peak, flying)
        heapq.heappush(events, (now_s + run.time_s * ratio, 0, at, tries, run))
    return runs, peak
