"""A cluster in virtual time: tuning jobs arrive, a policy gives their trials devices of several kinds, time passes.

Pure. Thousands of jobs on a thousand devices take a minute or two. A trial runs to its end on one device.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, final

from penstock.core.errors import InvalidInput
from penstock.plan._devices import DeviceKind, Goal, Rate, Rates, cost, target_kind

_FEW = 64  # jobs, up to which the policy looks ahead, and at everybody
_LOOKS = 16  # with more of them, at how many that would be held up before a device is left idle

_URGENT = 0.5  # a job with a quarter of the work left bids twice as much

_Tactic: TypeAlias = Literal["wait", "start", "short", "any"]
_TACTICS: tuple[_Tactic, ...] = ("wait", "start", "short", "any")
"""Of the aware policy: by merit, and wait for a faster device where that ends sooner; by merit; by merit, waiting, and
short jobs first; any free device."""

Policy: TypeAlias = Literal["agnostic", "aware"]


@final
@dataclass(frozen=True, slots=True)
class TuningJob:
    """A study that arrives at a cluster.

    Attributes:
        name: Its name.
        arrival_s: When it arrives.
        kind: Its trials' kind, as the rates name it.
        rungs: (trials, iterations of each) of every rung; a rung begins when the one before has ended. Fused trials
            count as one.
        max_devices: The most devices it may use at once; None: one per trial.
        target_iterations: Iterations of the target trial, which trains when half of the trials have ended (Hydro's
            eager transfer); 0: none.
        weight: Its share among jobs.
    """

    name: str
    arrival_s: float
    kind: str
    rungs: tuple[tuple[int, float], ...]
    max_devices: int | None = None
    target_iterations: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.rungs or any(n < 1 or not (math.isfinite(i) and i > 0) for n, i in self.rungs):
            raise InvalidInput(
                f"Job {self.name!r} needs rungs of at least 1 trial and iterations above 0: {self.rungs}."
            )
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0 and self.weight > 0):
            raise InvalidInput(f"Job {self.name!r}: arrival_s must be at least 0 and weight above 0.")
        if self.max_devices is not None and self.max_devices < 1:
            raise InvalidInput(f"Job {self.name!r}: max_devices must be at least 1, got {self.max_devices}.")

    @property
    def trials(self) -> int:
        """Its trials, those of later rungs counted again."""
        return sum(n for n, _ in self.rungs)

    @property
    def iterations(self) -> float:
        """All of its iterations."""
        return math.fsum(n * i for n, i in self.rungs) + self.target_iterations


@final
@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """What became of a simulated cluster. All of it is simulated.

    Attributes:
        jct_s: Each job's completion time: from its arrival to its end.
        makespan_s: From the first arrival to the last end.
        busy_s: Device seconds at work, by kind.
        held_s: Device seconds at work or idle and not yet released, by kind.
        energy_j: Energy of all held devices; 0 where no power is known.
        money: Price of all held devices; 0 where no price is known.
        looked: How often the policy has looked ahead.
        runs: (job, device kind, begin, end) of every trial, if asked for; a target trial's begin is that of its device.
    """

    jct_s: Mapping[str, float]
    makespan_s: float
    busy_s: Mapping[str, float]
    held_s: Mapping[str, float]
    energy_j: float
    money: float
    looked: int = 0
    runs: tuple[tuple[str, str, float, float], ...] = ()

    @property
    def mean_jct_s(self) -> float:
        """The average job completion time."""
        return math.fsum(self.jct_s.values()) / len(self.jct_s) if self.jct_s else 0.0

    @property
    def utilisation(self) -> float:
        """The part of the held device time that was at work."""
        held = math.fsum(self.held_s.values())
        return math.fsum(self.busy_s.values()) / held if held else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-able figures."""
        times = sorted(self.jct_s.values())
        return {
            "jobs": len(times),
            "mean_jct_s": self.mean_jct_s,
            "median_jct_s": times[len(times) // 2] if times else 0.0,
            "p95_jct_s": times[min(len(times) - 1, int(0.95 * len(times)))] if times else 0.0,
            "makespan_s": self.makespan_s,
            "utilisation": self.utilisation,
            "busy_s": dict(self.busy_s),
            "held_s": dict(self.held_s),
            "energy_j": self.energy_j,
            "money": self.money,
        }


@dataclass(slots=True)
class _Job:
    job: TuningJob
    order: int
    rung: int = 0
    pending: int = 0
    ended: int = 0
    held: list[int] = field(default_factory=list)  # tuning trials by kind of device
    rung_left: int = 0
    target: str = "none"  # none -> waiting -> running -> done
    speeds: list[float] = field(default_factory=list)
    left: float = 0.0  # iterations not ended

    @property
    def running(self) -> int:
        return sum(self.held)

    @property
    def iterations(self) -> float:
        return self.job.rungs[self.rung][1]

    @property
    def may_start(self) -> bool:
        return self.pending > 0 and (self.job.max_devices is None or self.running < self.job.max_devices)


def simulate_cluster(
    jobs: Sequence[TuningJob],
    devices: Sequence[DeviceKind],
    truth: Mapping[tuple[str, str], Rate],
    *,
    policy: Policy = "aware",
    goal: Goal = "time",
    eta: float = 0.5,
    learn: bool = False,
    release_s: float = 60.0,
    acquire_s: float = 0.0,
    seed: int = 0,
    keep_runs: bool = False,
    short_first: bool = True,
) -> ClusterOutcome:
    """Run jobs on a cluster in virtual time.

    Both policies share devices fairly among jobs, and devices that are idle for ``release_s`` are given back (they cost
    nothing until they are needed again).

    Args:
        jobs: The jobs.
        devices: The kinds of devices.
        truth: What each kind of trial makes of each kind of device.
        policy: ``"agnostic"``: any free device is as good as another. ``"aware"``: a device goes to whom it serves best
            (its cost there against that on the job's best kind) for the devices the job has already, and no trial
            begins on one on which it would hold its job up. At every arrival it looks ahead: where the jobs that
            are there would end sooner on the whole without waiting for faster devices, or without minding kinds at
            all, it does that.
        goal: For ``"aware"``, what is to be saved.
        eta: For ``goal="energy"``.
        learn: The policy knows no rate at first, and learns each from a trial's first iterations.
        release_s: After how much idleness a device is given back.
        acquire_s: What getting a released device again takes.
        seed: Of the devices that ``"agnostic"`` takes.
        keep_runs: Keep every trial's device and times.
        short_first: Whether ``"aware"`` may also prefer jobs with little work left, where looking ahead says that this
            ends jobs sooner on the whole; False: it differs from ``"agnostic"`` in the kinds alone.

    Raises:
        InvalidInput: A job's trials run on no device there is, or a name is used twice.
    """
    if policy not in ("agnostic", "aware"):
        raise InvalidInput(f'policy must be "agnostic" or "aware", got {policy!r}.')
    if not devices:
        raise InvalidInput("A cluster needs devices.")
    cluster = _Cluster(jobs, devices, truth, policy, goal, eta, learn, release_s, acquire_s, seed, keep_runs)
    if not short_first:
        cluster.tactics = tuple(tactic for tactic in _TACTICS if tactic != "short")
    return cluster.run()


@final
class _Cluster:
    """The state of a simulation; one use."""

    def __init__(
        self,
        jobs: Sequence[TuningJob],
        devices: Sequence[DeviceKind],
        truth: Mapping[tuple[str, str], Rate],
        policy: Policy,
        goal: Goal,
        eta: float,
        learn: bool,
        release_s: float,
        acquire_s: float,
        seed: int,
        keep_runs: bool,
    ) -> None:
        self.devices, self.truth, self.policy = list(devices), truth, policy
        self.goal, self.eta, self.learn = goal, eta, learn
        self.release_s, self.acquire_s = release_s, acquire_s
        self.rng = random.Random(seed)
        self.rates = Rates() if learn else Rates(truth)
        self.jobs: list[_Job] = []
        for order, job in enumerate(sorted(jobs, key=lambda j: j.arrival_s)):
            speeds = [self._rate(job.kind, d).per_s for d in devices]
            if not any(s > 0 for s in speeds):
                raise InvalidInput(
                    f"Trials of kind {job.kind!r} (job {job.name!r}) run on no device: no rate is known."
                )
            self.jobs.append(
                _Job(
                    job,
                    order,
                    held=[0] * len(devices),
                    speeds=speeds,
                    left=job.iterations,
                )
            )
        if len({j.job.name for j in self.jobs}) != len(self.jobs):
            raise InvalidInput("Two jobs have the same name.")
        self.free: list[list[float]] = [[-math.inf] * d.count for d in devices]  # idle since, the latest last
        self.ends: list[list[float]] = [[] for _ in devices]  # when a device of the kind becomes free next
        self.events: list[tuple[float, int, int, int, str]] = []  # time, sequence, job, kind, what
        self.sequence = 0
        self.now = 0.0
        self.active: dict[int, _Job] = {}
        # By kind of trial: devices per weight, order, devices then. Who changes since is entered anew.
        self.queues: dict[str, list[tuple[float, int, int]]] = {state.job.kind: [] for state in self.jobs}
        self.targets: list[_Job] = []
        self.tactic: _Tactic = "any" if policy == "agnostic" else "wait"
        self.tactics = _TACTICS
        self.arrived = False
        self.believed_at = -1
        self.believed: dict[str, tuple[list[float], list[float]]] = {}
        self.jct_s: dict[str, float] = {}
        self.busy_s = [0.0] * len(devices)
        self.held_s = [0.0] * len(devices)
        self.energy_j = 0.0
        self.looked = 0
        self.keep_runs = keep_runs
        self.runs: list[tuple[str, str, float, float]] = []

    def _rate(self, kind: str, device: DeviceKind) -> Rate:
        return self.truth.get((kind, device.name), Rate(0.0))

    def run(self) -> ClusterOutcome:
        for index, state in enumerate(self.jobs):
            self._push(state.job.arrival_s, index, -1, "arrival")
        self._go_on()
        for k, idle in enumerate(self.free):
            for since in idle:
                self._idle(k, since)
        first = self.jobs[0].job.arrival_s if self.jobs else 0.0
        names = [d.name for d in self.devices]
        money = math.fsum(h * d.price_per_h / 3600 for h, d in zip(self.held_s, self.devices, strict=True))
        return ClusterOutcome(
            self.jct_s,
            self.now - first,
            dict(zip(names, self.busy_s, strict=True)),
            dict(zip(names, self.held_s, strict=True)),
            self.energy_j,
            money,
            self.looked,
            tuple(self.runs),
        )

    def _go_on(self) -> None:
        """Until nothing happens any more."""
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, index, kind, what = heapq.heappop(self.events)
                self._happen(self.jobs[index], kind, what)
            if self.arrived and self.policy == "aware":
                self._look_ahead()
            self.arrived = False
            self._fill()
            if not self.events and self.active:
                self._fill(force=True)

    # ---------------------------------------------- events

    def _push(self, time_s: float, index: int, kind: int, what: str) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time_s, self.sequence, index, kind, what))

    def _happen(self, state: _Job, k: int, what: str) -> None:
        if what == "arrival":
            self.active[state.order] = state
            self.arrived = True
            self._begin_rung(state)
            return
        self.free[k].append(self.now)
        if what == "target":
            state.target = "done"
            state.left -= state.job.target_iterations
        else:
            state.held[k] -= 1
            state.left -= state.iterations
            state.ended += 1
            state.rung_left -= 1
            if state.job.target_iterations and state.target == "none" and 2 * state.ended >= state.job.trials:
                state.target = "waiting"
                self.targets.append(state)
            if not state.rung_left and state.rung + 1 < len(state.job.rungs):
                state.rung += 1
                self._begin_rung(state)
            elif state.pending:
                self._queue(state)
        if not state.rung_left and state.target in ("none", "done"):
            del self.active[state.order]
            self.jct_s[state.job.name] = self.now - state.job.arrival_s

    def _begin_rung(self, state: _Job) -> None:
        state.pending = state.rung_left = state.job.rungs[state.rung][0]
        self._queue(state)

    def _start(self, state: _Job, k: int, what: str = "trial") -> None:
        since = self.free[k].pop()
        wait = self.acquire_s if self.now - since > self.release_s else 0.0
        self._idle(k, since)
        iterations = state.job.target_iterations if what == "target" else state.iterations
        seconds = iterations / state.speeds[k]
        end = self.now + wait + seconds
        device = self.devices[k]
        rate = self._rate(state.job.kind, device)
        power_w = device.busy_w if rate.power_w is None else rate.power_w
        self.busy_s[k] += seconds
        self.held_s[k] += seconds + wait
        self.energy_j += power_w * seconds + device.idle_w * wait
        if what == "target":
            state.target = "running"
        else:
            state.pending -= 1
            state.held[k] += 1
        if self.learn and self.rates.known(state.job.kind, device.name) is None:
            few = self.rates.least
            joules = power_w * few / rate.per_s
            self.rates.tell(
                state.job.kind,
                device.name,
                iterations=few,
                seconds=few / rate.per_s,
                joules=joules or None,
                utilisation=rate.utilisation,
            )
        heapq.heappush(self.ends[k], end)
        self._push(end, state.order, k, what)
        if self.keep_runs:
            self.runs.append((state.job.name, device.name, end - seconds, end))

    def _idle(self, k: int, since: float) -> None:
        """Account for a device's idle time until now; beyond ``release_s`` it was not held."""
        held = min(self.now - since, self.release_s) if since > -math.inf else 0.0
        self.held_s[k] += held
        self.energy_j += held * self.devices[k].idle_w

    # ---------------------------------------------- who gets what

    def _fill(self, force: bool = False) -> None:
        self._fill_targets()
        if self.tactic == "any":
            self._fill_any()
        else:
            self._fill_fit(waits=self.tactic != "start" and not force)

    def _fill_targets(self) -> None:
        for state in list(self.targets):
            open_kinds = [k for k, idle in enumerate(self.free) if idle and state.speeds[k] > 0]
            if not open_kinds:
                continue
            if self.policy == "agnostic":
                k = self._any(open_kinds)
            else:
                speeds = self._belief(state.job.kind)[0]
                best = max(speeds)
                names = target_kind(state.job.kind, self.devices, self.rates)
                ranked = [next(i for i, d in enumerate(self.devices) if d.name == name) for name in names]
                fine = [k for k in ranked if k in open_kinds and 2 * speeds[k] >= best]
                if not fine:
                    continue
                k = fine[0]
            self.targets.remove(state)
            self._start(state, k, "target")

    def _any(self, kinds: Sequence[int]) -> int:
        """A kind by chance: every free device is as likely."""
        return self.rng.choices(kinds, [len(self.free[k]) for k in kinds])[0]

    def _queue(self, state: _Job) -> None:
        if state.may_start:
            devices = state.running / state.job.weight
            if self.tactic == "short":
                devices = (1 + state.running) / state.job.weight * state.left**_URGENT
            entry = devices, state.order, state.running
            heapq.heappush(self.queues[state.job.kind], entry)

    def _head(self, kind: str) -> _Job | None:
        """Who has the fewest devices for its weight among the jobs of a kind; the earliest of them."""
        heap = self.queues[kind]
        while heap:
            state = self.jobs[heap[0][1]]
            if heap[0][2] == state.running and state.may_start:
                return state
            heapq.heappop(heap)  # it has changed since
        return None

    def _fill_any(self) -> None:
        """Who has the fewest devices gets any that is free."""
        aside: list[_Job] = []
        while any(self.free):
            heads = [state for kind in self.queues if (state := self._head(kind)) is not None]
            if not heads:
                break
            state = min(heads, key=lambda s: (s.running / s.job.weight, s.order))
            heapq.heappop(self.queues[state.job.kind])
            kinds = [k for k, idle in enumerate(self.free) if idle and state.speeds[k] > 0]
            if kinds:
                self._start(state, self._any(kinds))
                self._queue(state)
            else:
                aside.append(state)
        for state in aside:
            self._queue(state)

    def _fill_fit(self, *, waits: bool) -> None:
        """Each device to whom it serves best, for the devices that job has already: fair, and by kind.

        A job's merit of a kind is 1 on its best one, so the kind that serves everybody best is shared equally, and
        the others go to those who lose least by them.
        """
        aside: list[_Job] = []
        while any(self.free) and (len(aside) < _LOOKS or len(self.active) <= _FEW):
            best: tuple[float, int, int] | None = None
            for kind in self.queues:
                state = self._head(kind)
                if state is None:
                    continue
                merits = self._belief(kind)[1]
                fair = state.job.weight / (1 + state.running)
                if self.tactic == "short":
                    fair *= (max(self._belief(kind)[0]) / state.left) ** _URGENT
                for k, idle in enumerate(self.free):
                    if idle and state.speeds[k] > 0:
                        bid = merits[k] * fair, -state.order, k
                        if best is None or bid > best:
                            best = bid
            if best is None:
                break
            state = self.jobs[-best[1]]
            heapq.heappop(self.queues[state.job.kind])
            k = best[2] if not waits else self._unheld(state, best[2])
            if k < 0:
                aside.append(state)
            else:
                self._start(state, k)
                self._queue(state)
        for state in aside:
            self._queue(state)

    def _unheld(self, state: _Job, first: int) -> int:
        """The kind of free device with the most merit on which a trial would not hold its job up; -1: none."""
        if not self._holds_up(state, first):
            return first
        merits = self._belief(state.job.kind)[1]
        others = [k for k, idle in enumerate(self.free) if idle and k != first and state.speeds[k] > 0]
        for k in sorted(others, key=lambda k: -merits[k]):
            if not self._holds_up(state, k):
                return k
        return -1

    # ---------------------------------------------- looking ahead

    def _look_ahead(self) -> None:
        """Choose the tactic under which the jobs that are there would be done soonest, if no other came."""
        if len(self.active) > _FEW:
            self._turn_to("wait")
            return
        if any(0.0 in self._belief(state.job.kind)[0] for state in self.active.values()) and self.learn:
            return  # not everything is known yet
        self.looked += 1
        ends = {tactic: self._ahead(tactic) for tactic in self.tactics}
        self._turn_to(min(self.tactics, key=lambda tactic: ends[tactic]))

    def _turn_to(self, tactic: _Tactic) -> None:
        if tactic != self.tactic:
            self.tactic = tactic
            self.queues = {kind: [] for kind in self.queues}
            for state in self.active.values():
                self._queue(state)

    def _ahead(self, tactic: _Tactic) -> float:
        """The sum of the present jobs' completion times under a tactic."""
        other = copy.copy(self)
        other.learn, other.keep_runs = False, False
        other.jobs = list(self.jobs)
        for order, state in self.active.items():
            speeds = self._belief(state.job.kind)[0] if self.learn else state.speeds
            other.jobs[order] = replace(state, held=list(state.held), speeds=list(speeds))
        other.active = {order: other.jobs[order] for order in self.active}
        other.targets = [other.jobs[state.order] for state in self.targets]
        other.free = [list(idle) for idle in self.free]
        other.ends = [list(ends) for ends in self.ends]
        other.events = [event for event in self.events if event[4] != "arrival"]
        heapq.heapify(other.events)
        other.queues = {kind: list(heap) for kind, heap in self.queues.items()}
        other.rng = random.Random()
        other.rng.setstate(self.rng.getstate())
        other.jct_s, other.runs, other.arrived = {}, [], False
        other.busy_s, other.held_s = list(self.busy_s), list(self.held_s)
        other._turn_to(tactic)
        other._fill()
        if not other.events:
            other._fill(force=True)
        other._go_on()
        return math.fsum(other.jct_s.values())

    def _belief(self, kind: str) -> tuple[list[float], list[float]]:
        """Speeds and merits (the best kind's cost over this one's) of a kind of trials, as far as known now."""
        if self.believed_at != self.rates.version:
            self.believed, self.believed_at = {}, self.rates.version
        if kind not in self.believed:
            found = [self.rates.rate(kind, d.name) for d in self.devices]
            costs = [
                None if r is None else cost(r, d, self.goal, self.eta)
                for r, d in zip(found, self.devices, strict=True)
            ]
            best = min((c for c in costs if c is not None), default=1.0)
            self.believed[kind] = (
                [0.0 if r is None else r.per_s for r in found],
                [1.0 if not c else best / c for c in costs],
            )
        return self.believed[kind]

    def _holds_up(self, state: _Job, k: int) -> bool:
        """Whether a trial here would end after the rung could end on faster devices."""
        speeds, _ = self._belief(state.job.kind)
        if not speeds[k]:
            return False  # not known: try it
        end = self.now + state.iterations / speeds[k]
        otherwise = math.inf
        held = math.fsum(n * s for n, s in zip(state.held, speeds, strict=True))
        if held:
            quickest = max(s for n, s in zip(state.held, speeds, strict=True) if n)
            work = (state.pending + 0.5 * state.running) * state.iterations
            otherwise = self.now + work / held + 0.5 * state.iterations / quickest
        if state.pending <= state.running + 1:
            for other, speed in enumerate(speeds):
                if speed > speeds[k]:
                    free = self._next_free_s(other)
                    otherwise = min(otherwise, free + state.iterations / speed)
        return end > otherwise * (1 + 1e-12)

    def _next_free_s(self, k: int) -> float:
        if self.free[k]:
            return self.now
        while self.ends[k] and self.ends[k][0] < self.now:
            heapq.heappop(self.ends[k])
        return self.ends[k][0] if self.ends[k] else math.inf


def sample_jobs(
    count: int,
    truth: Mapping[tuple[str, str], Rate],
    *,
    hours: float = 1.0,
    seed: int = 0,
    kinds: Sequence[str] | None = None,
    widths: Sequence[int] = (4, 8),
) -> list[TuningJob]:
    """Made-up tuning jobs in the manner of Hydro's Table 3: successive halving by 3, some fused trials each.

    Args:
        count: How many.
        truth: Rates; a job's kind is one of its trial kinds, all as likely.
        hours: Over how long they arrive, uniformly (Hydro 6.5: one hour).
        seed: Of the draws.
        kinds: Only these kinds of trials; None: all that run somewhere.
        widths: The most devices of a job is one of these (Table 3: 4 or 8 for middle sizes).
    """
    rng = random.Random(seed)
    best: dict[str, float] = {}
    for (kind, _), rate in truth.items():
        best[kind] = max(best.get(kind, 0.0), rate.per_s)
    names = sorted(kind for kind, speed in best.items() if speed > 0 and (kinds is None or kind in kinds))
    if not names or count < 1:
        raise InvalidInput(
            f"No jobs can be sampled: {count} jobs of kinds {kinds}, known are {sorted(best)}."
        )
    jobs = []
    for number in range(count):
        kind = rng.choice(names)
        trials = rng.choice((9, 18, 27, 54))  # fused: 100 to 1000 trials of 10 to 20 each
        first = rng.uniform(60, 300) * best[kind]  # 3 epochs: one to five minutes on its best device
        rungs, n, iterations = [], trials, first
        while n >= 1:
            rungs.append((n, iterations))
            n, iterations = (
                n // 3,
                iterations * (2 if len(rungs) == 1 else 3),
            )  # 3, then 6, 18, 54 more epochs
        target = rng.uniform(2, 6) * first if rng.random() < 0.5 else 0.0
        jobs.append(
            TuningJob(
                f"job{number}", rng.uniform(0, 3600 * hours), kind, tuple(rungs), rng.choice(widths), target
            )
        )
    return jobs
