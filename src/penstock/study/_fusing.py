"""Fusion in a study: which trials train as one, how many are asked for at a time, and what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

from penstock.core import Device, Ended, Noted, Placement, Plan, PlanPass, Running, Segment, StudyState
from penstock.core.errors import InvalidInput
from penstock.execute import Executor, Local, Ray, Simulated
from penstock.plan import Fluid, FusedGroup, FusionChoice, Regroup, apart, fusion, must_agree, splits
from penstock.schedule import SM2, Scheduler
from penstock.train import Command, Task

Fuse: TypeAlias = bool | int | str
"""``"auto"``, True, False, or the number of members."""

TOPIC = "fusion"
"""Of the journal's notes: what was measured, chosen and why."""

UNMEASURED = 16
"""Members of a kind's first groups, whose workers measure what is best."""

SPLIT_S = 1.0
"""What splitting a running group costs: a worker made ready, states written and read, a step recorded anew."""

_TRIES = 3  # of measuring a kind whose first configurations fail
_LEARNER_PART = 5  # a sampler that learns is asked for a fifth of a study at a time
_LEARNER_LEAST = 10  # as many as such samplers draw at random before they begin to learn
_KINDS = 4


def check_fuse(
    given: Any, work: Any, executor: Executor, *, scheduler: Scheduler, planner: Any, power_limits: bool
) -> tuple[Fuse, str | None]:
    """The study's ``fuse``, and why nothing is fused (None: something may be).

    Raises:
        InvalidInput: It is none of the choices, or asks for what this study can't do.
    """
    ask = 'fuse takes "auto", True, False, or a number of members'
    if isinstance(given, str) and given != "auto":
        raise InvalidInput(f"{ask}, got {given!r}.")
    if not isinstance(given, str | bool | int) or (not isinstance(given, bool | str) and given < 1):
        raise InvalidInput(f"{ask} of at least 1, got {given!r}.")
    fuse: Fuse = given
    if fuse is False or (fuse == 1 and fuse is not True):
        return fuse, "fuse=False"
    reason = None
    number = not isinstance(fuse, bool | str)
    real = isinstance(executor, Local | Ray)
    if not real and not (number and isinstance(executor, Simulated)):
        reason = f"{type(executor).__name__} has no workers that measure fusion"
        reason += "; give the number of members" if isinstance(executor, Simulated) else ""
    elif real and isinstance(work, Command):
        reason = "a command is a process of its own"
    elif real and not isinstance(work, Task) and not number:
        reason = "a training function is fused by number only (fuse=8), where it calls run.prepare()"
    elif isinstance(work, Task) and work.checkpoint_steps is not None:
        reason = "checkpoint_steps: a fused epoch is saved at its end only"
    elif float(getattr(executor, "slots_per_trial", 1)) != 1:
        reason = "slots_per_trial: a fused group has one whole slot"
    elif isinstance(scheduler, SM2):
        reason = "SM2's trials have a batch size each, and only trials of one batch size can train as one"
    elif planner is not None and not isinstance(planner, Fluid):
        reason = "plan passes of your own decide what runs where"
    elif fuse == "auto" and (isinstance(executor, Ray) or power_limits or planner is not None):
        reason = "with Ray, a planner or power limits it is to be asked for: fuse=True, or a number"
    if reason is not None and fuse != "auto":
        raise InvalidInput(f"fuse={fuse!r} can't be done: {reason}.")
    return fuse, reason


@final
class Fuser:
    """What a session knows of fusion.

    Args:
        fuse: ``"auto"`` or True: by measurement; a number: groups of so many.
        work: The Task (any work on simulated devices).
        slots: Devices there are.
        learns: Whether the sampler learns from results.
        structural: Names that the space says change the network.
    """

    def __init__(
        self, fuse: Fuse, work: Any, slots: int, *, learns: bool, structural: Iterable[str] = ()
    ) -> None:
        self._structural = frozenset(structural)
        self._fixed = None if isinstance(fuse, bool | str) else int(fuse)
        self._task = work if isinstance(work, Task) else None
        self._slots = max(1, slots)
        self._learns = learns
        self._choices: dict[str, FusionChoice] = {}
        self._checked: set[str] = set()
        self._failures: dict[str, int] = {}
        self._seen: set[str] = set()
        self._groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._left: int | None = None
        self.rule: Callable[[Sequence[FusedGroup], Sequence[Device]], Sequence[Regroup]] = _onto_idle

    def on(self, slots: int) -> None:
        """Learn how many devices there are, where that is known only once the executor is open."""
        self._slots = max(1, slots)

    # -- planning ---------------------------------------------------------------------------------------

    def passes(self, planner: Iterable[PlanPass]) -> tuple[PlanPass, ...]:
        """A planner that fuses before it places."""
        merge = fusion(
            self.key, _ByKind(self), batch_size=self._batch_size, unmeasured=self._fixed or UNMEASURED
        )
        return merge, *planner, apart

    def key(self, segment: Segment) -> Hashable | None:
        """What fused segments must agree on; None: it trains alone."""
        config = segment.trial.config
        if segment.options.get("model") == "target":  # the full model of a study with a surrogate
            return None
        if self._task is None:
            plain = [name for name, value in config.items() if not isinstance(value, float)]
            found = must_agree(segment, structural=[*self._structural.difference(plain), *plain])
        else:
            found = must_agree(
                segment,
                structural=sorted({*_structural(self._task, config), *self._structural}),
                batch_size=self._task.hyperparameters(config).get("batch_size", self._task.batch_size),
            )
        if found is not None:
            self._seen.add(_kind(found))
        return found

    def _batch_size(self, segment: Segment) -> int:
        size = segment.trial.config.get("batch_size", 1 if self._task is None else self._task.batch_size)
        return size if isinstance(size, int) else 1

    def ahead(self, units: int, queued: int, running: int, total: int, expected: int | None) -> int:
        """How many segments to have waiting when ``units`` could start: enough to fill their groups.

        Args:
            units: Placements that could start now.
            queued: Segments that wait.
            running: Segments that run.
            total: Trials so far.
            expected: Segments of the whole study, as far as known.
        """
        self._left = None if expected is None else max(queued, expected - total + queued)
        each = self._fixed or max((choice.count for choice in self._choices.values()), default=UNMEASURED)
        if self._fixed is None and self._seen - self._choices.keys():
            each = max(each, UNMEASURED)
        if self._left is not None:  # evenly over all devices, rather than all on the first that is free
            each = min(each, math.ceil(self._left / self._slots))
        room = units * max(1, each)
        if self._learns:
            # Before it is known whether fusion pays no more than are drawn at random anyway: where it does not, they
            # train one after another, and nothing is learned from, nor promoted, until they have.
            unknown = self._fixed is None and not self._choices
            part = 0 if unknown else (expected or 0) // _LEARNER_PART
            room = min(room, max(_LEARNER_LEAST, part) - running)
        else:
            room *= max(1, min(_KINDS, len(self._seen)))
        return max(units, room)

    def facts(self, placement: Placement, left_s: float | None = None) -> dict[str, Any]:
        """What the worker of a placement must know; ``left_s``: the time such trials have, None: what they take."""
        segments = placement.segments
        found = self.key(segments[0]) if len(segments) > 1 else None
        if found is None:
            for segment in segments:
                self._groups.pop(segment.trial.id, None)
            return {}
        kind = _kind(found)
        members = tuple(segment.trial.id for segment in segments)
        self._groups.update(dict.fromkeys(members, (kind, members)))
        if self._fixed is not None:
            facts: dict[str, Any] = {"count": self._fixed, "key": kind, "check": kind not in self._checked}
        elif kind in self._choices:
            facts = {"count": self._choices[kind].count, "key": kind}
        else:
            ahead = len(segments) if self._left is None else max(len(segments), self._left + len(segments))
            most = math.ceil(ahead / self._slots) if self._left is not None else 4 * UNMEASURED
            facts = {
                "count": len(segments),
                "key": kind,
                "measure": True,
                "ahead": ahead,
                "most": min(most, _LEARNER_LEAST) if self._learns else most,
                "slots": self._slots,
            }
            if left_s is not None:
                facts["left_s"] = left_s
        return {"fusion": facts}

    def regroup(
        self,
        running: Sequence[Running],
        idle: Sequence[Device],
        devices: Mapping[str, Device],
        state: StudyState,
    ) -> Sequence[Regroup]:
        """Which members of running groups go on on devices that have nothing to do (Hydro 5.3).

        Only groups that advance together are split: each member has reported, none is ahead.
        """
        groups = []
        for each in running:
            segments, shares = each.placement.segments, each.placement.shares
            records = [state.trials[segment.trial.id] for segment in segments]
            if len(shares) != 1 or shares[0].device not in devices or self._task is None:
                continue
            done = [record.epoch for record in records]
            begun = all(r.epoch > s.start and r.reports for r, s in zip(records, segments, strict=True))
            times_s = [record.reports[-1].train_s for record in records if record.reports]
            found = self.key(segments[0])
            if not begun or max(done) > min(done) + 1 or found is None or None in times_s:
                continue
            ends = [self._task.epochs if segment.until is None else segment.until for segment in segments]
            groups.append(
                FusedGroup(
                    tuple(segment.trial.id for segment in segments),
                    tuple(max(0, end - epoch - 1) for end, epoch in zip(ends, done, strict=True)),
                    sum(time_s for time_s in times_s if time_s is not None),
                    devices[shares[0].device],
                    _kind(found),
                    self._choices.get(_kind(found)),
                )
            )
        return self.rule(groups, idle)

    # -- learning ---------------------------------------------------------------------------------------

    def learn(self, note: Noted, *, earlier: bool = False) -> None:
        """Take in a note of a worker, or of the journal.

        Args:
            note: The note.
            earlier: Of an earlier session. What was not measured for lack of time then may be measured now.
        """
        data = note.data
        if note.topic != TOPIC or "kind" not in data or (earlier and data.get("hurried")):
            return
        kind = str(data["kind"])
        self._checked.add(kind)
        self._seen.add(kind)
        if data.get("failed"):
            self._failures[kind] = self._failures.get(kind, 0) + 1
            if self._failures[kind] < _TRIES:
                return
        choice = FusionChoice.from_json(data)
        if kind not in self._choices or data.get("halved"):
            self._choices[kind] = choice

    def lost(self, ended: Ended, time_s: float) -> Noted | None:
        """A worker died: the group it trained, if it was one, was too large for it; the next is half as large."""
        kind, launched = self._groups.pop(ended.trial, ("", ()))
        # Without those that have ended, or left for another group.
        members = [m for m in launched if m == ended.trial or self._groups.get(m, ("", ()))[1] == launched]
        if not ended.lost or len(members) < 2:
            return None
        for member in members:
            self._groups.pop(member, None)
        half = max(1, len(members) // 2)
        known = self._choices.get(kind)
        reason = f"a worker died with {len(members)} members"
        choice = FusionChoice(half, half, (), reason)
        if known is not None:
            if known.count <= half:
                return None
            choice = replace(known, count=half, limit=min(known.limit, half), reason=reason)
        self._choices[kind] = choice
        return Noted(time_s, TOPIC, {"kind": kind, "halved": True, **choice.to_json()})

    def choice(self, found: Hashable) -> FusionChoice | None:
        """The choice for a key."""
        if self._fixed is not None:
            known = self._choices.get(_kind(found))
            return known or FusionChoice(self._fixed, self._fixed, (), "as the study asks for")
        return self._choices.get(_kind(found))


def whole_devices(plan: Plan) -> Plan:
    """A plan pass: a fused group has its device to itself, for it was made as large as fills one."""
    if all(len(placement.segments) == 1 for placement in plan.waiting):
        return plan
    waiting = tuple(p if len(p.segments) == 1 else replace(p, exclusive=True) for p in plan.waiting)
    return replace(plan, waiting=waiting)


@final
class _ByKind(Mapping[Hashable, FusionChoice]):
    """Choices by what must agree; the length of a segment does not matter for them."""

    def __init__(self, fuser: Fuser) -> None:
        self._fuser = fuser

    def __getitem__(self, found: Hashable) -> FusionChoice:
        choice = self._fuser.choice(found)
        if choice is None:
            raise KeyError(found)
        return choice

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._fuser._choices)

    def __len__(self) -> int:
        return len(self._fuser._choices)


def _onto_idle(groups: Sequence[FusedGroup], idle: Sequence[Device]) -> Sequence[Regroup]:
    return splits(groups, idle, cost_s=SPLIT_S)


def _kind(found: Hashable) -> str:
    """The name of a kind of trials: what must agree but for the number of epochs."""
    parts = found[:-1] if isinstance(found, tuple) else found
    return json.dumps(parts, default=repr)


def _structural(task: Task, config: Mapping[str, Any]) -> list[str]:
    """Names of a configuration that may change a network's shapes.

    Numbers that only the optimizer, the schedule or the loop take don't. Of the model's own, a float (a dropout rate)
    is taken not to either: where it does, the worker finds out and trains the odd ones alone.
    """
    from penstock.train._task import OWN_NAMES, _parameters

    given = task.optimizer
    make: Any = given.get(str(config.get("optimizer"))) if isinstance(given, dict) else given
    free = {*OWN_NAMES, "beta1", "beta2"}
    for part in (make, task.schedule):
        if part is not None:
            free |= set(_parameters(part)[0])
    model = set(_parameters(task.model)[0])
    return [
        name
        for name, value in config.items()
        if isinstance(value, bool) or not (isinstance(value, float) or (name in free and name not in model))
    ]


__all__ = ["TOPIC", "UNMEASURED", "Fuse", "Fuser", "check_fuse", "whole_devices"]
