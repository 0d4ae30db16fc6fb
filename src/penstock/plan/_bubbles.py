"""Bubbles (Hydro 5.1): when the stages of a pipeline-parallel host job are idle, what fits there, and what goes there.

The schedule is that of a synchronous pipeline with a flush after every step: 1F1B (PipeDream-Flush, Hydro's Fig. 9) and
interleaved 1F1B (Megatron-LM), from the times each stage takes for a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from penstock.core.device import Device, Share
from penstock.core.errors import InvalidInput
from penstock.core.group import Segment
from penstock.core.plan import Placement, Plan, PlanPass
from penstock.plan._fusion import FusionChoice
from penstock.plan._split import LEAST_GAIN, FusedGroup, Regroup, time_left_s

_TINY_S = 1e-12


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time, from the beginning of the host's step."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


@final
@dataclass(frozen=True, slots=True)
class Work:
    """One piece of a stage's work in a step.

    Attributes:
        kind: ``"F"`` forward or ``"B"`` backward.
        micro_batch: Of which micro-batch, from 0.
        chunk: Of which of the stage's model chunks, from 0; always 0 unless interleaved.
        begin_s: When it begins.
        end_s: When it ends.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int
    begin_s: float
    end_s: float


_Item: TypeAlias = tuple[Literal["F", "B"], int, int]


@final
@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline-parallel host job, as far as its bubbles depend on it.

    Attributes:
        forward_s: Seconds of one micro-batch's forward pass on each stage (all of a stage's chunks together).
        backward_s: The same for the backward pass.
        micro_batches: m, micro-batches of a step.
        chunks: v, model chunks of each stage; above 1: interleaved 1F1B.
        send_s: Seconds that activations or gradients take to the next stage. While they travel, a stage is idle.
        update_s: Seconds of the optimizer's step, at the end, when all stages have flushed.
        memory_bytes: What each stage's device has; empty: not known.
        state_bytes: What each stage's weights, gradients and optimizer hold; empty: not known.
        activation_bytes: What a micro-batch's activations hold on each stage until its backward pass; empty: not known.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    micro_batches: int
    chunks: int = 1
    send_s: float = 0.0
    update_s: float = 0.0
    memory_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        p = len(self.forward_s)
        if p < 1 or len(self.backward_s) != p:
            raise InvalidInput(
                f"A pipeline needs one forward and one backward time per stage, got {p} and {len(self.backward_s)}."
            )
        for seconds in (*self.forward_s, *self.backward_s):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidInput(f"A stage's time is {seconds!r}; give finite seconds above 0.")
        for name in ("send_s", "update_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise InvalidInput(f"{name} is {seconds!r}; give finite seconds of at least 0.")
        for name in ("micro_batches", "chunks"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {count!r}.")
        if self.chunks > 1 and self.micro_batches % p:
            raise InvalidInput(
                f"Interleaved 1F1B needs micro-batches in multiples of the {p} stages, got {self.micro_batches}."
            )
        for name in ("memory_bytes", "state_bytes", "activation_bytes"):
            if getattr(self, name) and len(getattr(self, name)) != p:
                raise InvalidInput(
                    f"{name} needs one figure per stage ({p}), got {len(getattr(self, name))}."
                )

    @property
    def stages(self) -> int:
        """p, the number of stages."""
        return len(self.forward_s)

    def order(self, stage: int) -> list[_Item]:
        """A stage's work in a step, in order: (F or B, micro-batch, chunk)."""
        p, m, v = self.stages, self.micro_batches, self.chunks
        total = m * v
        if v == 1:
            warm = min(p - stage - 1, m)
        else:  # Megatron-LM: two more per stage, as its first chunk's results come back to stage 0
            warm = total if m == p else min(2 * (p - stage - 1) + (v - 1) * p, total)
        items = [self._item("F", k) for k in range(warm)]
        for k in range(total - warm):
            items += [self._item("F", warm + k), self._item("B", k)]
        return items + [self._item("B", k) for k in range(total - warm, total)]

    def _item(self, kind: Literal["F", "B"], k: int) -> _Item:
        """The k-th forward or backward of any stage: groups of p micro-batches, chunk after chunk."""
        p, v = self.stages, self.chunks
        if v == 1:
            return kind, k, 0
        chunk = (k % (p * v)) // p
        return kind, (k // (p * v)) * p + k % p, chunk if kind == "F" else v - 1 - chunk

    def in_flight(self, stage: int) -> float:
        """The most micro-batches whose activations a stage holds at once (a chunk's are 1/v of them)."""
        held = most = 0
        for kind, _, _ in self.order(stage):
            held += 1 if kind == "F" else -1
            most = max(most, held)
        return most / self.chunks

    def free_bytes(self, stage: int) -> int | None:
        """The memory that a stage leaves free at its peak; None: not known."""
        if not (self.memory_bytes and self.state_bytes and self.activation_bytes):
            return None
        held = math.ceil(self.in_flight(stage) * self.activation_bytes[stage])
        return max(0, self.memory_bytes[stage] - self.state_bytes[stage] - held)

    def schedule(self) -> BubbleSchedule:
        """When each stage works, and when it doesn't."""
        return BubbleSchedule(self, _times(self))


def _times(host: Pipeline) -> tuple[tuple[Work, ...], ...]:
    """Each stage's work at its earliest time, in the schedule's order."""
    p, v = host.stages, host.chunks
    orders = [host.order(stage) for stage in range(p)]
    done: dict[tuple[str, int, int, int], float] = {}
    rows: list[list[Work]] = [[] for _ in range(p)]
    clock = [0.0] * p
    at = [0] * p
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for stage in range(p):
            while at[stage] < len(orders[stage]):
                kind, micro, chunk = orders[stage][at[stage]]
                ready = _ready_s(host, done, kind, micro, chunk, stage)
                if ready is None:
                    break
                begin = max(clock[stage], ready)
                seconds = (host.forward_s if kind == "F" else host.backward_s)[stage] / v
                clock[stage] = done[kind, micro, chunk, stage] = begin + seconds
                rows[stage].append(Work(kind, micro, chunk, begin, begin + seconds))
                at[stage] += 1
                left -= 1
        if left == before:
            raise InvalidInput(f"The schedule of {host!r} waits for itself.")
    return tuple(tuple(row) for row in rows)


def _ready_s(
    host: Pipeline,
    done: Mapping[tuple[str, int, int, int], float],
    kind: str,
    micro: int,
    chunk: int,
    stage: int,
) -> float | None:
    """When what a piece of work needs has arrived; None: not known yet."""
    last, v = host.stages - 1, host.chunks
    if kind == "F":
        if stage == 0 and chunk == 0:
            return 0.0
        source = ("F", micro, chunk, stage - 1) if stage else ("F", micro, chunk - 1, last)
    elif stage == last and chunk == v - 1:
        return done.get(("F", micro, chunk, stage))  # the loss is here: nothing travels
    else:
        source = ("B", micro, chunk, stage + 1) if stage < last else ("B", micro, chunk + 1, 0)
    if source not in done:
        return None
    return done[source] + (host.send_s if source[3] != stage else 0.0)


@final
@dataclass(frozen=True, slots=True)
class BubbleSchedule:
    """One step of a host job, and the next are like it.

    Attributes:
        host: The host job.
        work: What each stage does, in order of time.
    """

    host: Pipeline
    work: tuple[tuple[Work, ...], ...]

    @property
    def flush_s(self) -> float:
        """When the last stage has done its last backward pass."""
        return max(row[-1].end_s for row in self.work)

    @property
    def step_s(self) -> float:
        """From one step's beginning to the next's."""
        return self.flush_s + self.host.update_s

    def idle(self, stage: int) -> tuple[Interval, ...]:
        """A stage's bubbles in a step, in order of time; the optimizer's step is not one."""
        gaps, clock = [], 0.0
        for work in (*self.work[stage], None):
            begin = self.flush_s if work is None else work.begin_s
            if begin - clock > _TINY_S * max(1.0, self.flush_s):
                gaps.append(Interval(clock, begin))
            clock = begin if work is None else work.end_s
        return tuple(gaps)

    def idle_s(self, stage: int) -> float:
        """How long a stage is idle in a step."""
        return math.fsum(gap.length_s for gap in self.idle(stage))

    def ratio(self, stage: int | None = None) -> float:
        """The part of a step, without the optimizer's, that a stage (None: the mean stage) is idle.

        With equal stages and free sends it is (p-1)/(m+p-1), and (p-1)/(v m+p-1) interleaved.
        """
        if stage is not None:
            return self.idle_s(stage) / self.flush_s
        return math.fsum(map(self.idle_s, range(self.host.stages))) / (self.host.stages * self.flush_s)


@final
@dataclass(frozen=True, slots=True)
class Guest:
    """A trial (fused or not) that runs in bubbles and stops between its layers.

    Attributes:
        layers_s: Seconds of each part of its step that can't be stopped, in order: layers forward, layers backward, the
            optimizer's step.
        resume_s: What going on in a new bubble costs.
        slack_s: How long before a bubble's end it stops, so that the host never waits.
    """

    layers_s: tuple[float, ...]
    resume_s: float = 0.0
    slack_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers_s or any(not (math.isfinite(s) and s > 0) for s in self.layers_s):
            raise InvalidInput(f"layers_s needs finite seconds above 0, got {self.layers_s!r}.")
        if not (self.resume_s >= 0 and self.slack_s >= 0):
            raise InvalidInput(
                f"resume_s and slack_s must be at least 0, got {self.resume_s}, {self.slack_s}."
            )

    @property
    def step_s(self) -> float:
        """Seconds of a step alone on the device."""
        return math.fsum(self.layers_s)

    def progress(
        self, bubbles: Sequence[Interval], periods: int = 1, start: int = 0
    ) -> tuple[int, int, float]:
        """How far it comes in ``periods`` steps of the host.

        A layer begins only if it ends before the bubble does: known bubbles are never overrun.

        Returns:
            Whole steps done, the layer it is at, and the seconds it has worked.
        """
        at, steps, worked = start, 0, []
        for _ in range(periods):
            for bubble in bubbles:
                left = bubble.length_s - self.resume_s - self.slack_s
                while self.layers_s[at] <= left + _TINY_S:
                    left -= self.layers_s[at]
                    worked.append(self.layers_s[at])
                    at += 1
                    if at == len(self.layers_s):
                        at, steps = 0, steps + 1
        return steps, at, math.fsum(worked)

    def speed(self, schedule: BubbleSchedule, stage: int, periods: int = 64) -> float:
        """Its speed in a stage's bubbles, as a part of its speed alone on such a device; 0: a layer never fits."""
        _, _, worked_s = self.progress(schedule.idle(stage), periods)
        return worked_s / (periods * schedule.step_s)


def fitted_count(choice: FusionChoice, free_bytes: int | None) -> int:
    """The most members of a fused trial that fit a stage's free memory, by the profiles' line; 0: not even one.

    Hydro does not swap: what does not fit the free memory does not run there.
    """
    if free_bytes is None:
        return choice.count
    alone = choice.profiles[0].memory_bytes if choice.profiles else 0
    if alone > free_bytes:
        return 0
    count = 1
    for more in range(2, choice.count + 1):
        need = choice.memory_bytes(more)
        if need is None or need > free_bytes:
            break
        count = more
    return count


@final
@dataclass(frozen=True, slots=True)
class Lent:
    """An ephemeral device: one that is lent in the bubbles of a host job.

    Attributes:
        speed: The guests' speed there, as a part of that on the device alone.
        free_bytes: What the host leaves free; None: not known.
    """

    speed: float
    free_bytes: int | None = None


def lend(schedule: BubbleSchedule, guest: Guest, devices: Iterable[Sequence[str]]) -> dict[str, Lent]:
    """The devices of a host job as ephemeral ones, by id.

    Args:
        schedule: The host's.
        guest: What will run there.
        devices: The ids of each stage's devices, in the order of the stages.

    Returns:
        Only the devices on which a guest makes progress.
    """
    found: dict[str, Lent] = {}
    for stage, ids in enumerate(devices):
        speed = guest.speed(schedule, stage)
        if speed > 0:
            found |= {name: Lent(speed, schedule.host.free_bytes(stage)) for name in ids}
    return found


def early(segment: Segment) -> bool:
    """Whether a segment is of a multi-fidelity scheduler's first rung: most such trials end there (Hydro 5.1)."""
    return segment.start == 0 and not segment.last


def squeeze(
    lent: Mapping[str, Lent],
    *,
    choice: Callable[[Segment], FusionChoice | None] = lambda segment: None,
    belongs: Callable[[Segment], bool] = early,
    least_speed: float = 0.0,
) -> PlanPass:
    """The pass that puts early rungs into bubbles and keeps promoted trials on exclusive devices.

    Put it behind ``fusion`` and before the pass that hands out the exclusive devices, which then sees no ephemeral
    device and has the promoted trials first in its queue. A fused placement is cut to what fits the stage's free
    memory; what is cut off waits on. The stages with the most speed x members are filled first.

    Args:
        lent: The ephemeral devices by id.
        choice: How a segment's kind fuses (its memory by count); None: its placement's own ``memory_bytes`` counts.
        belongs: Which segments may run in bubbles.
        least_speed: Devices slower than this part of an exclusive one are left alone.
    """

    def place(plan: Plan) -> Plan:
        if not any(free.device.id in lent for free in plan.free):
            return plan
        exclusive = tuple(free for free in plan.free if free.device.id not in lent)
        open_ids = [
            free.device.id
            for free in plan.free
            if free.device.id in lent and free.fraction >= 1.0 and lent[free.device.id].speed > least_speed
        ]
        placed = list(plan.placed)
        promoted = [w for w in plan.waiting if not all(map(belongs, w.segments))]
        rest = [w for w in plan.waiting if all(map(belongs, w.segments))]
        kept: list[Placement] = []
        while rest and open_ids:
            head = rest.pop(0)
            if head.exclusive:
                kept.append(head)
                continue
            fits = {name: _fitting(head, lent[name], choice(head.segments[0])) for name in open_ids}
            best = max(open_ids, key=lambda name: (lent[name].speed * fits[name], -open_ids.index(name)))
            if not fits[best]:
                kept.append(head)
                continue
            open_ids.remove(best)
            count = fits[best]
            placed.append(
                _cut(head, slice(0, count), (Share(best),), choice(head.segments[0]), lent[best].speed)
            )
            if count < len(head.segments):
                rest.insert(0, _cut(head, slice(count, None), (), choice(head.segments[0]), 1.0))
        return replace(plan, waiting=(*promoted, *kept, *rest), free=exclusive, placed=tuple(placed))

    return place


def beside(
    passes: Iterable[PlanPass],
    lent: Callable[[], Mapping[str, Lent]],
    *,
    choice: Callable[[Segment], FusionChoice | None] = lambda segment: None,
) -> tuple[PlanPass, ...]:
    """A planner for exclusive devices that also has bubbles.

    The exclusive devices are filled first, with the promoted trials before those of the first rung; whatever is left
    then goes into bubbles, the first rung before the rest. Nothing waits while a bubble is free: trials leave it
    (``recall``) when an exclusive device falls idle.

    Args:
        passes: Of the exclusive devices alone.
        lent: The ephemeral devices at present.
        choice: As of ``squeeze``.
    """
    inner = tuple(passes)

    def place(plan: Plan) -> Plan:
        now = lent()
        bubbles = tuple(free for free in plan.free if free.device.id in now)
        if now:
            exclusive = tuple(free for free in plan.free if free.device.id not in now)
            ordered = sorted(plan.waiting, key=lambda w: all(map(early, w.segments)))
            plan = replace(plan, waiting=tuple(ordered), free=exclusive)
        for step in inner:
            plan = step(plan)
        if not bubbles:
            return plan
        left = plan.free
        ordered = sorted(plan.waiting, key=lambda w: not all(map(early, w.segments)))
        plan = replace(plan, waiting=tuple(ordered), free=bubbles)
        plan = squeeze(now, choice=choice, belongs=lambda segment: True)(plan)
        return replace(plan, free=left)

    return (place,)


def recall(
    groups: Sequence[FusedGroup],
    idle: Sequence[Device],
    lent: Mapping[str, Lent],
    *,
    count: int | None = None,
    cost_s: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> tuple[Regroup, ...]:
    """Who leaves the bubbles for exclusive devices that are idle, or whose fused groups have room.

    A trial in bubbles makes a fraction of the progress it would make alone, and nothing of it is lost when it goes on
    elsewhere. So bubbles hold whatever the exclusive devices have not come to yet, and these take those trials out of
    the bubbles that would end last, and train them as one (Hydro 5.1: the top trials go on on exclusive resources).
    Members of one kind are taken together, as many as fuse well.

    Args:
        groups: What runs, each as it is on its present device (``epoch_s`` is what an epoch takes there); a trial
            that trains alone is a group of one.
        idle: Exclusive devices with nothing to do and nothing waiting for them.
        lent: The ephemeral devices by id.
        count: The most members of a group of which nothing was measured; None: as many as the largest has.
        cost_s: What the change costs.
        least_gain: By which part those that leave must end sooner, at least. A running group takes in no less than
            this part of what it could have: it is taken apart and made anew for it.

    Returns:
        Orders, at most one per device. Where a group runs on the device, its members are in the order, too.
    """
    if not cost_s >= 0.0 or not 0.0 <= least_gain < 1.0:
        raise InvalidInput(
            f"cost_s must be at least 0 and least_gain in [0, 1), got {cost_s!r} and {least_gain!r}."
        )
    there = [group for group in groups if group.device.id in lent and max(group.epochs_left) > 0]
    hosts: list[tuple[Device, FusedGroup | None]] = [(d, None) for d in idle if d.id not in lent]
    hosts += [(group.device, group) for group in groups if group.device.id not in lent]
    orders: list[Regroup] = []
    for device, host in hosts:
        best: tuple[float, tuple[int, ...]] | None = None
        for kind in dict.fromkeys(group.kind for group in there):
            if host is not None and host.kind != kind:
                continue
            alike = [group for group in there if group.kind == kind]
            found = _recalled(alike, host, lent, count, cost_s, least_gain)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            continue
        gone = set(best[1])
        residents = () if host is None else host.members
        orders.append(Regroup((*residents, *best[1]), device.id))
        there = [left for group in there if (left := _without(group, gone)) is not None]
    return tuple(orders)


def _without(group: FusedGroup, gone: set[int]) -> FusedGroup | None:
    """What is left of a group, if it has anything ahead."""
    stay = [at for at, member in enumerate(group.members) if member not in gone]
    if not stay or not any(group.epochs_left[at] for at in stay):
        return None
    return replace(
        group,
        members=tuple(group.members[at] for at in stay),
        epochs_left=tuple(group.epochs_left[at] for at in stay),
        epoch_s=group.epoch_of_s(len(stay)),
    )


def _recalled(
    groups: Sequence[FusedGroup],
    host: FusedGroup | None,
    lent: Mapping[str, Lent],
    count: int | None,
    cost_s: float,
    least_gain: float,
) -> tuple[float, tuple[int, ...]] | None:
    """Of groups of one kind in bubbles: the time that is saved, and the members who then leave: those who end last."""
    known = [*groups, host] if host is not None else groups
    choice = next((group.choice for group in known if group.choice is not None), None)
    most = choice.count if choice is not None else count or max(len(group.members) for group in known)
    stay: list[int] = []
    if host is not None:
        # Who is done before the slowest of the newcomers has come makes room for them.
        waits_s = max(group.epoch_s for group in groups)
        stay = [left for left in host.epochs_left if left * host.epoch_s > waits_s]
    room = most - len(stay)
    if room <= 0 or (host is not None and room < least_gain * most):
        return None
    rows: list[tuple[float, int, int, FusedGroup]] = []
    for group in groups:
        end = time_left_s(group, group.epochs_left)
        pairs = zip(group.members, group.epochs_left, strict=True)
        rows += [(end, left, member, group) for member, left in pairs if left > 0]
    rows.sort(key=lambda row: (-row[0], -row[1], row[2]))
    taken = rows[:room]
    if host is not None and len(taken) < least_gain * most:
        return None
    slowest = taken[0][3]
    # The same group without the slowness of its bubbles, from which any other size is reckoned.
    alone = replace(slowest, epoch_s=slowest.epoch_s * lent[slowest.device.id].speed)
    # The newcomers among all who train there by then; who is longer there than they are does not hold them up.
    lefts = [left for _, left, _, _ in taken]
    end_s = cost_s + time_left_s(alone, [*(min(left, max(lefts)) for left in stay), *lefts])
    if not end_s < (1.0 - least_gain) * taken[0][0]:
        return None
    return taken[0][0] - end_s, tuple(member for _, _, member, _ in taken)


def _fitting(placement: Placement, device: Lent, choice: FusionChoice | None) -> int:
    members = len(placement.segments)
    if choice is not None and choice.profiles:
        return min(
            members, fitted_count(replace(choice, count=max(choice.count, members)), device.free_bytes)
        )
    if device.free_bytes is None or (placement.memory_bytes or 0) <= device.free_bytes:
        return members
    return 0


def _cut(
    placement: Placement, part: slice, shares: tuple[Share, ...], choice: FusionChoice | None, speed: float
) -> Placement:
    """Some members of a placement, with what is known of its time and memory."""
    segments = placement.segments[part]
    expected_s, memory = placement.expected_s, placement.memory_bytes
    if len(segments) < len(placement.segments) and choice is not None and choice.profiles:
        memory = choice.memory_bytes(len(segments))
        if expected_s is not None:
            expected_s *= choice.step_s(len(segments)) / choice.step_s(len(placement.segments))
    if expected_s is not None:
        expected_s /= speed
    return replace(placement, segments=segments, shares=shares, expected_s=expected_s, memory_bytes=memory)
