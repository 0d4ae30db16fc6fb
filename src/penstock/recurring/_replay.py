"""Trace-driven simulation of a recurring job under a policy (Zeus section 6.1): pure, no sleeping."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from penstock.core.errors import InvalidInput
from penstock.recurring._baselines import Default, Grid, Oracle
from penstock.recurring._history import Decision, History, JobSpec, Result
from penstock.recurring._policy import Choice, Policy
from penstock.recurring._traces import Workload
from penstock.recurring._zeus import Zeus

MAX_TRIES = 20  # of one recurrence; then the target counts as unreachable

World: TypeAlias = Callable[[int], Workload]
"""The workload at a recurrence: constant, or drifting."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a replay.

    Attributes:
        recurrence: Which recurrence it belongs to; a failed run is followed by a retry of the same one.
        batch_size: What ran.
        limit_w: At which limit (after profiling).
        cost: Energy-time cost.
        time_s: Time.
        energy_j: Energy.
        reached: Whether it reached the target.
        epochs: Epochs it ran.
        regret: Its cost minus the optimum's expected cost; all of its cost if it failed.
    """

    recurrence: int
    batch_size: int
    limit_w: float
    cost: float
    time_s: float
    energy_j: float
    reached: bool
    epochs: int
    regret: float


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole replay of one workload under one policy and seed."""

    workload: str
    policy: str
    seed: int
    optimum_cost: float
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def regret(self) -> float:
        """Cumulative regret in units of the optimum's cost (Eq. 8 over C*)."""
        return math.fsum(step.regret for step in self.steps) / self.optimum_cost

    def curve(self) -> list[float]:
        """Cumulative regret/C* after each recurrence."""
        total, curve = 0.0, []
        for step in self.steps:
            total += step.regret / self.optimum_cost
            if step.reached:
                curve.append(total)
        return curve

    def last(self, n: int = 5) -> list[Step]:
        """The last ``n`` runs that reached the target (section 6.2)."""
        return [step for step in self.steps if step.reached][-n:]


def make_policy(name: str, workload: Workload, eta: float) -> Policy:
    """The policy of a name: ours, zeus, default, grid or oracle."""
    if name == "oracle":
        size, limit, _ = workload.optimum(eta)
        return Oracle(size, limit)
    if name == "ours":
        from penstock.recurring._curve import Curve  # needs numpy

        return Curve()
    plain: dict[str, Policy] = {"zeus": Zeus(), "default": Default(), "grid": Grid()}
    if name not in plain:
        raise InvalidInput(f"No policy {name!r}: there are ours, zeus, default, grid and oracle.")
    return plain[name]


def spec_of(workload: Workload, *, eta: float, beta: float, window: int | None, seed: int) -> JobSpec:
    """The job that a workload's traces record."""
    return JobSpec(
        workload.batch_sizes,
        workload.default,
        eta,
        beta,
        window,
        workload.limits_w,
        workload.max_power_w,
        seed,
    )


def simulate_run(workload: Workload, spec: JobSpec, choice: Choice, epochs: int | None) -> Result:
    """What a run would have done, had it needed ``epochs`` epochs (None: it never reaches the target).

    The first epoch is split evenly among the limits to profile (section 4.2); the others run at the best of
    what is then known. A run ends before the epoch that would exceed its cost limit. If that is the first one, it
    is stopped within it, having spent the limit.
    """
    profile = workload.power[choice.batch_size]
    slices = [w for w in choice.profile_w if w in profile]
    measured = {w: profile[w] for w in slices}
    limit = choice.limit_w
    if limit is None or limit not in profile:
        candidates = measured or dict(profile)
        limit = min(
            candidates, key=lambda w: spec.cost(candidates[w][0] * candidates[w][1], candidates[w][0])
        )
    time_s, power_w = profile[limit]
    first_s = sum(t for t, _ in measured.values()) / len(measured) if measured else time_s
    first_j = sum(t * p for t, p in measured.values()) / len(measured) if measured else time_s * power_w
    first = spec.cost(first_j, first_s)
    each = spec.cost(time_s * power_w, time_s)
    most = workload.max_epochs
    if choice.cost_limit is not None:
        if first > choice.cost_limit:
            part = choice.cost_limit / first
            return Result(0, 0.0, first_s * part, first_j * part, False, measured)
        most = min(most, 1 + int((choice.cost_limit - first) / each + 1e-9))
    reached = epochs is not None and epochs <= most
    ran = epochs if reached and epochs is not None else most
    return Result(
        0,
        float(ran),
        first_s + (ran - 1) * time_s,
        first_j + (ran - 1) * time_s * power_w,
        reached,
        measured or {limit: profile[limit]},
    )


def replay(
    workload: Workload | World,
    policy: Policy,
    *,
    recurrences: int | None = None,
    eta: float = 0.5,
    beta: float = 2.0,
    window: int | None = None,
    seed: int = 0,
    in_flight: int = 1,
) -> Replay:
    """Replay a recurring job under a policy.

    Args:
        workload: The traces, or a function from the recurrence's number to the traces (drift). All must have the
            same batch sizes and limits.
        policy: Decides.
        recurrences: How often the job recurs; by default the paper's 2 |B| |P|.
        eta: Energy against time.
        beta: Early-stopping factor.
        window: Observations to use; None: all.
        seed: For both the draws of recorded runs and the policy.
        in_flight: Recurrences under way at once: the result of a run becomes known after so many further
            decisions.
    """
    world: World = workload if callable(workload) else (lambda _: workload)
    start = world(0)
    total = start.recurrences if recurrences is None else recurrences
    spec = spec_of(start, eta=eta, beta=beta, window=window, seed=seed)
    luck = random.Random(f"penstock.replay/{start.name}/{seed}")
    # One draw per recurrence, whatever is chosen: policies are compared on the same luck.
    draws = [luck.random() for _ in range(total)]
    history = History()
    steps: list[Step] = []
    flying: list[tuple[int, int, Result]] = []  # recurrence, try, result
    queue: list[tuple[int, int]] = [(t, 0) for t in reversed(range(total))]
    while queue or flying:
        while queue and len(flying) < in_flight:
            recurrence, tries = queue.pop()
            if tries >= MAX_TRIES:
                raise InvalidInput(
                    f"{start.name} did not reach its target in {MAX_TRIES} tries: is it feasible?"
                )
            now = world(recurrence)
            number = history.next_number
            choice = policy.choose(history.view(spec), number, retry=tries > 0)
            history.add_decision(_decision(choice, number))
            draw = draws[recurrence] if tries == 0 else luck.random()
            recorded = now.epochs[choice.batch_size]
            result = simulate_run(now, spec, choice, recorded[int(draw * len(recorded))])
            flying.append((recurrence, tries, replace(result, number=number)))
        recurrence, tries, result = flying.pop(0)
        history.add_result(result)
        optimum = world(recurrence).optimum(eta)[2]
        steps.append(_step(spec, history.decisions[result.number], result, recurrence, optimum))
        if not result.reached:
            queue.append((recurrence, tries + 1))
    return Replay(start.name, policy.name, seed, start.optimum(eta)[2], tuple(steps))


def _decision(choice: Choice, number: int) -> Decision:
    return Decision(
        number, choice.batch_size, choice.limit_w, choice.profile_w, choice.cost_limit, choice.explore
    )


def _step(spec: JobSpec, decision: Decision, result: Result, recurrence: int, optimum: float) -> Step:
    cost = spec.cost(result.energy_j, result.time_s)
    limit = decision.limit_w
    if limit is None:
        limit = min(
            result.profile,
            key=lambda w: spec.cost(result.profile[w][0] * result.profile[w][1], result.profile[w][0]),
        )
    return Step(
        recurrence,
        decision.batch_size,
        limit,
        cost,
        result.time_s,
        result.energy_j,
        result.reached,
        int(result.epochs),
        cost - optimum if result.reached else cost,
    )
