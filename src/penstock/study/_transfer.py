"""Surrogates in a study: tune a narrow twin, hand the best configurations on to the full model, end with it trained.

Surrogate and target trials share one study, one journal and one numbering. A target trial's segment says so in its
options, and its parent is the surrogate trial whose configuration it took; everything else follows from the journal,
so a resume goes on in whichever stage it was.
"""

from __future__ import annotations

import copy
import math
import statistics
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any, final

from penstock.core import (
    Config,
    Noted,
    Plan,
    PlanPass,
    Reported,
    Segment,
    Trial,
    TrialGroup,
    TrialStatus,
    Values,
)
from penstock.core.errors import InvalidInput, PenstockError, SpaceError, Unsupported
from penstock.goal import Goal, Objective
from penstock.model import Shrink
from penstock.plan import TransferStanding, slower_by, transfer_fits, transfer_move, tuning_end_s
from penstock.sample import Observation, Sampler
from penstock.schedule import SM2, Outcome, Rules, Scheduler
from penstock.space import Condition, Domain, Space
from penstock.train import Task

TOPIC = "surrogate"
"""Of the journal's note on the twin: the check's verdict, the side table, what a target takes."""

MODEL, TARGET = "model", "target"
_DRAWS = 100  # of what was held, for one that keeps the limits
_TRIES = 3  # target trials of different configurations before a study gives up
_HEARD = 3  # epochs of the twin before their time says anything


# ---------------------------------------------------------------- what is held


def held_values(space: Space, task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of what does not transfer, during surrogate tuning.

    In this order: what ``Shrink(held=...)`` says, the task's default, 0 if the domain holds it, its lowest value.

    Raises:
        InvalidInput: ``held`` names something else, or a value that the domain has not.
    """
    names = [name for name in space.names if name not in space.transferring]
    for name in given:
        if name not in names:
            raise InvalidInput(
                f"Shrink holds {name!r}, which is not one of the domains that don't transfer ({names}). Say "
                "transfers=False in the space for those to hold."
            )
    found: dict[str, Any] = {}
    for name in names:
        domain = space[name]
        if name in given:
            if not _holds(domain, given[name]):
                raise InvalidInput(f"Shrink holds {name}={given[name]!r}, which is not in {domain!r}.")
            found[name] = given[name]
        elif name in task.defaults and _holds(domain, task.defaults[name]):
            found[name] = task.defaults[name]
        elif _holds(domain, 0):
            found[name] = domain.check(0)
        else:
            found[name] = domain.from_unit(0.0) if domain.count is None else domain.value_at(0)
    return found


def _holds(domain: Domain, value: Any) -> bool:
    try:
        domain.check(value)
    except SpaceError:
        return False
    return True


def part_of(space: Space, names: Sequence[str], fixed: Mapping[str, Any] | None = None) -> Space:
    """The domains of those names, where all others have fixed values.

    A test on a name outside is decided by ``fixed``: passed, it is dropped from the condition; failed, the domain is
    no part of any configuration and left out.
    """
    kept: dict[str, Domain] = {}
    for name in (name for name in space.order if name in names):
        domain = space[name]
        atoms = () if domain.when is None else domain.when.atoms
        inside = [atom for atom in atoms if atom.name in kept]
        if all(atom.holds(fixed or {}) for atom in atoms if atom.name not in kept):
            when = None if not inside else reduce(and_, inside)
            kept[name] = domain if len(inside) == len(atoms) else _with_condition(domain, when)
    return Space({name: kept[name] for name in space.names if name in kept})


def _with_condition(domain: Domain, when: Condition | None) -> Domain:
    other = copy.copy(domain)
    object.__setattr__(other, "when", when)  # domains are frozen, and this one is ours
    return other


def held_in(space: Space, config: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of what transfers with the held values that are active in it."""
    found = {name: value for name, value in config.items() if name not in held}
    for name in space.order:
        if name in held and space.active(name, found):
            found[name] = held[name]
    return found


@final
class Held(Sampler):
    """A sampler of what transfers; the rest is held.

    Args:
        then: Proposes what transfers, and learns from surrogate trials alone.
        held: By name, what is held.
    """

    def __init__(self, then: Sampler, held: Mapping[str, Any]) -> None:
        self.then = copy.copy(then)
        self.held = dict(held)
        self.learns = then.learns
        self._space: Space | None = None
        self._asked: list[Config] = []
        self._own: set[int] = set()

    @property
    def ends(self) -> bool:
        """If the sampler of what transfers does."""
        return self.then.ends

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin."""
        names = [name for name in space.names if name not in self.held]
        self._space = space
        self.then.start(part_of(space, names), objectives=objectives, seed=seed)
        self.learns = self.then.learns
        self._asked, self._own = [], set()

    def ask(self, n: int) -> list[Config]:
        """Configurations with the held values that are active in them."""
        assert self._space is not None
        made: list[Config] = [held_in(self._space, config, self.held) for config in self.then.ask(n)]
        self._asked = [*self._asked, *made]
        return made

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """As if asked."""
        self._own.update(trials)
        self.then.skip([self._less(config) for config in configs], trials)

    def adopt(self, config: Config, trial: int) -> None:
        """A configuration's number; target trials are none of the sampler's."""
        for index, asked in enumerate(self._asked):
            if asked is config or asked == config:  # a replay brings it from the journal
                del self._asked[index]
                self._own.add(trial)
                self.then.adopt(self._less(config), trial)
                return

    def tell(self, observation: Observation) -> None:
        """Learn from a surrogate trial."""
        if observation.trial in self._own:
            self.then.tell(replace(observation, config=self._less(observation.config)))

    def _less(self, config: Config) -> Config:
        return {name: value for name, value in config.items() if name not in self.held}


# ---------------------------------------------------------------- the two stages


@final
class Transfer(Scheduler):
    """Runs another scheduler on the narrow twin and transfers what it finds.

    Args:
        inner: Schedules the surrogate trials.
        shrink: What the study was given.
        held: What does not transfer, at its held values.
        epochs: Epochs of a target trial; None: the task's.
        deadline_s: When a trained target must be there; None: whenever tuning is done.
        prefer: Which of several objectives the configuration to transfer is the best in, of the Pareto set; None:
            the first by the goal's order.
        quality: By what trials that still run are compared if the target must begin before one is over; None: the
            configuration that was proposed first is taken then.
    """

    def __init__(
        self,
        inner: Scheduler,
        shrink: Shrink,
        *,
        held: Mapping[str, Any] | None = None,
        epochs: int | None = None,
        deadline_s: float | None = None,
        prefer: int | None = None,
        quality: Objective | None = None,
    ) -> None:
        self.prefer = prefer
        self.quality = quality
        self.presses = True  # towards a deadline, the first target does not wait until a device is idle
        self.settles = (
            True  # among equals who was proposed first goes first, and who was replaced in vain starts again
        )
        self.follows = True  # a configuration that is changed while it trains is transferred as it became
        self.inner = copy.copy(inner)
        self.shrink = shrink
        self.held = dict(held or {})
        self.epochs = epochs
        self.max_epochs = inner.max_epochs
        self.deadline_s = deadline_s
        self.sampler = None
        self._reset(None)

    def _reset(self, rules: Rules | None) -> None:
        self._rules = rules
        self._configs: dict[int, Config] = {}
        self._found: dict[int, tuple[bool, int, Values]] = {}  # surrogate trial: complete, epoch, values
        self._alive: set[int] = set()  # surrogate trials that have a segment under way
        self._segments = 0
        self._targets: dict[int, int] = {}  # target trial: the surrogate trial it came from
        self._running: dict[int, int] = {}  # target trial: epochs behind it
        self._ended: dict[int, TrialStatus] = {}
        self._seeds: dict[int, int] = {}  # of the target of a surrogate trial's own configuration
        self._vacant = 0
        self._tuned = 0  # trials of the second stage that were handed out
        self._settled: int | None = (
            None  # surrogate trial whose second stage is over, of a study with more trials
        )
        self._elapsed_s = 0.0
        self._latest: dict[int, tuple[int, float]] = {}  # surrogate trial: epoch, quality (lower is better)
        self._broken: set[int] = set()  # surrogate trials that failed
        self._epoch_s: float | None = None
        self._twin_epoch_s: float | None = None
        self._twins_s: list[float] = []  # what the twins' epochs took, sorted
        self._slower = 1.0  # so many times as long as foreseen do epochs take; never less than it was
        self._shut = False  # whether the time left is needed for the target

    # --- what the study calls --------------------------------------------------------------------------------

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        self._reset(rules)

        def propose(n: int) -> Sequence[Trial]:
            trials = rules.propose(n)
            self._configs.update({trial.id: trial.config for trial in trials})
            return trials

        def derive(config: Config, parent: int) -> Trial:
            assert rules.derive is not None
            trial = rules.derive(self._whole(config), parent)
            self._configs[trial.id] = trial.config
            return trial

        def allows(config: Config) -> bool:
            assert rules.allows is not None
            return rules.allows(self._whole(config))

        space = rules.space
        if isinstance(space, Space) and self.held:
            space = part_of(space, [name for name in space.names if name not in self.held])
        self.inner.start(
            replace(
                rules,
                propose=propose,
                derive=None if rules.derive is None else derive,
                allows=None if rules.allows is None else allows,
                space=space,
            )
        )

    def next(self, want: int) -> TrialGroup | None:
        """Surrogate trials while there are any, then target trials on what is idle."""
        if self.urgent and want > 0:
            return self._transfer(transfer_move(self._standing(idle=1)).start)
        if not self._shut:
            group = self.inner.next(want)
            if group is not None:
                group = self._followed(group)
                self._segments += len(group.segments)
                self._alive.update(segment.trial.id for segment in group.segments)
                return group
        if want <= 0:
            return None
        start = transfer_move(self._standing(idle=want)).start
        if start is not None:
            return self._transfer(start)
        return self._second_stage(want)

    def _followed(self, group: TrialGroup) -> TrialGroup:
        """A group of the inner scheduler: PBT changes configurations as they train, and does not know what is held."""
        if not getattr(self, "follows", False):  # one of an earlier release
            return group
        segments = []
        for segment in group.segments:
            trial = segment.trial
            if trial.config != self._configs.get(trial.id):
                config = self._configs[trial.id] = self._whole(trial.config)
                segment = replace(segment, trial=replace(trial, config=config))
            segments.append(segment)
        return replace(group, segments=tuple(segments))

    def _whole(self, config: Config) -> Config:
        """A configuration of what transfers with what is held, where that is active in it."""
        space = None if self._rules is None else self._rules.space
        if not self.held or not isinstance(space, Space) or not getattr(self, "follows", False):
            return config
        return held_in(space, config, self.held)

    def ended(self, outcome: Outcome) -> None:
        """A surrogate or a target trial's segment is over."""
        if outcome.trial in self._targets:
            self._running.pop(outcome.trial, None)
            self._ended[outcome.trial] = outcome.status
            if outcome.status is TrialStatus.STOPPED:
                self._vacant += 1
            return
        self._alive.discard(outcome.trial)
        if outcome.status is TrialStatus.FAILED:
            self._broken.add(outcome.trial)
        values = outcome.rankable
        if values is None and outcome.status is TrialStatus.STOPPED:
            values = outcome.values  # of use only where nothing was trained to its end
        if values is not None and all(value == value for value in values):
            whole = outcome.status is TrialStatus.COMPLETED
            self._found[outcome.trial] = (whole, outcome.epoch, values)
        self.inner.ended(outcome)

    def reopen(self, over: Collection[int], most: int | None) -> None:
        """More surrogate trials, unless the time for them is over; if they are better, their best is transferred."""
        if self._shut or self.deadline_s is not None:
            return
        if self.done:  # a new best has a second stage of its own
            self._settled, self._tuned = self._best(), 0
        self.inner.reopen(over, most)

    @property
    def no_more(self) -> str:
        """The deadline, or as the inner scheduler has it."""
        if self.deadline_s is None:
            return self.inner.no_more
        return f"the model was to be trained within {self.deadline_s:g} s, and is"

    def drops(self) -> Sequence[int]:
        """Of the inner scheduler."""
        return self.inner.drops()

    def why(self, trial: int) -> str:
        """Of the inner scheduler."""
        return self.inner.why(trial)

    def stops(self) -> Sequence[tuple[int, str]]:
        """Surrogates for which there is no time any more, and targets that a better configuration replaces."""
        found = list(self.inner.stops())
        if self._shut:
            reason = "the time that is left is for the target model"
            found += [(trial, reason) for trial in sorted(self._alive)]
        else:
            step = transfer_move(self._standing(idle=0))
            found += [(trial, step.why) for trial in step.stop]
        return found

    def at(self, elapsed_s: float) -> None:
        """The time spent."""
        self._elapsed_s = max(self._elapsed_s, elapsed_s)
        end_s = self.tuning_end_s
        if end_s is not None and self._configs:  # without one there is nothing to transfer
            self._shut = self._shut or self._elapsed_s >= end_s
        self.inner.at(elapsed_s)

    def heard(self, event: Reported | Noted) -> None:
        """How long a target's epochs take, and how far targets are."""
        self.inner.heard(event)
        if isinstance(event, Noted):
            if event.topic == TOPIC and event.data.get("target_epoch_s") is not None:
                self._epoch_s = float(event.data["target_epoch_s"])
                self._twin_epoch_s = event.data.get("twin_epoch_s")  # an earlier release's note has none
            return
        if event.trial in self._running:
            self._running[event.trial] = event.epoch
            if event.train_s is not None:  # what was measured while training beats what was foreseen
                self._epoch_s, self._slower, self._twin_epoch_s = event.train_s, 1.0, None
        elif event.trial in self._alive and self.deadline_s is not None:
            self._hear_twin(event)

    def _hear_twin(self, event: Reported) -> None:
        """How good a twin is by now, and whether epochs take longer than the check's steps foretold."""
        quality: Objective | None = getattr(self, "quality", None)  # one of an earlier release has none
        value = math.nan if quality is None else event.metrics.get(quality.metric, math.nan)
        if quality is not None and math.isfinite(value):
            self._latest[event.trial] = event.epoch, -value if quality.maximize else value
        if self._twin_epoch_s is None or event.train_s is None or event.epoch < 2:  # the first one warms up
            return
        insort(self._twins_s, event.train_s)
        if len(self._twins_s) >= _HEARD:
            # Never back again: a replay asks less often when tuning ends, and must not find it later than it was.
            measured_s = statistics.median(self._twins_s)
            self._slower = max(self._slower, slower_by(measured_s, self._twin_epoch_s))

    @property
    def urgent(self) -> bool:
        """Whether a target trial waits for the device of one that was stopped for it, or the first one for a deadline.

        With a deadline nobody knows how long the trials that come next keep their devices: the first target goes before
        them as soon as it may start at all. A better one found later joins or replaces it.
        """
        if self._shut and not self._targets:
            return self._best() is not None
        if self.deadline_s is not None and not self._targets and getattr(self, "presses", False):
            return transfer_move(self._standing(idle=1)).start is not None  # not so one of an earlier release
        return self._vacant > 0 and transfer_move(self._standing(idle=1)).start is not None

    @property
    def done(self) -> bool:
        """Whether both stages are over."""
        if not (self._shut or self.inner.done):
            return False
        standing = self._standing(idle=1)
        return transfer_move(standing).start is None and not self._second_due(standing)

    @property
    def expected(self) -> int | None:
        """Segments of both stages."""
        if self._rules is not None and self.done:
            return self._segments + len(self._targets)
        inner = self.inner.expected
        more = self._wanted + (self.shrink.second if self.held else 0)
        return None if inner is None else max(inner + more, self._segments + len(self._targets))

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "Transfer",
            "inner": self.inner.to_json(),
            "factor": self.shrink.factor,
            "eager": self.shrink.eager,
            "second": self.shrink.second,
            "targets": self._wanted,
            "held": dict(self.held),
            "epochs": self.epochs,
            "deadline_s": self.deadline_s,
        }

    # --- decisions -------------------------------------------------------------------------------------------

    @property
    def tuning_end_s(self) -> float | None:
        """When tuning ends for the target to be trained in time; None: there is no deadline."""
        return None if self.deadline_s is None else tuning_end_s(self.deadline_s, self.target_s)

    @property
    def target_s(self) -> float | None:
        """What training the target takes, as far as known."""
        if self._epoch_s is None or self.epochs is None:
            return None
        return self._epoch_s * self._slower * self.epochs

    @property
    def _wanted(self) -> int:
        return getattr(self.shrink, "targets", 1)  # one of an earlier release has none

    def _best(self) -> int | None:
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[int]:
        """Surrogate trials, the best first: of those trained to the end, else of those trained longest."""
        assert self._rules is not None
        failed = {
            self._targets[trial] for trial, status in self._ended.items() if status is TrialStatus.FAILED
        }
        if len(failed) >= _TRIES:
            return []
        found = {trial: each for trial, each in self._found.items() if trial not in failed}
        if not found:
            return self._last_resort(failed) if self._shut else []
        settles = getattr(self, "settles", False)  # not so one of an earlier release
        furthest = max((whole, 0 if whole else epoch) for whole, epoch, _ in found.values())
        rivals = [t for t, (whole, epoch, _) in found.items() if (whole, 0 if whole else epoch) == furthest]
        if settles:  # not in the order in which they ended, which is a matter of time
            rivals.sort()
        order = self._rules.order([found[trial][2] for trial in rivals])
        prefer = getattr(self, "prefer", None)  # one of an earlier release has none
        if prefer is not None:
            # The best in one objective is of the Pareto set; what the twin drew says little of what the model will.
            order = sorted(
                range(len(rivals)) if settles else order, key=lambda at: found[rivals[at]][2][prefer]
            )
        return [rivals[at] for at in order]

    def _last_resort(self, failed: set[int]) -> list[int]:
        """What to transfer when it is time and no surrogate is over: the best that runs, else the first proposed."""
        known = [trial for trial in self._latest if trial in self._alive and trial not in failed]
        if known:
            return [min(known, key=lambda trial: (-self._latest[trial][0], self._latest[trial][1]))]
        return [trial for trial in self._configs if trial not in failed | self._broken][:1]

    def _standing(self, *, idle: int) -> TransferStanding:
        expected = self.inner.expected
        over = len(self._found) if expected is None else self._segments - len(self._alive)
        length = self.epochs or 1
        ranked = self._ranked()[: self._wanted]
        return TransferStanding(
            best=ranked[0] if ranked else None,
            transferred=frozenset(self._targets.values()) - self._in_vain(),
            running=tuple((trial, epoch / length) for trial, epoch in self._running.items()),
            trained=TrialStatus.COMPLETED in self._ended.values(),
            done=None if not expected else over / expected,
            over=self._shut or (self.inner.done and not self._alive),
            idle=idle,
            elapsed_s=self._elapsed_s,
            deadline_s=self.deadline_s,
            target_s=self.target_s,
            eager=self.shrink.eager,
            others=tuple(ranked[1:]),
        )

    def _in_vain(self) -> set[int]:
        """Surrogates whose target was stopped for a later one: once more they may be transferred.

        They are if the later one fails, or if they are among the best that are wanted in the end.
        """
        if TrialStatus.STOPPED not in self._ended.values() or not getattr(self, "settles", False):
            return set()
        latest, parents = max(self._targets), list(self._targets.values())
        return {
            parent
            for trial, parent in self._targets.items()
            if self._ended.get(trial) is TrialStatus.STOPPED
            and parent != self._targets[latest]
            and parents.count(parent) == 1
        }

    @property
    def chosen(self) -> Sequence[int] | None:
        """The best surrogates, once tuning is over."""
        if not (self._shut or (self.inner.done and not self._alive)):
            return None
        return self._ranked()[: self._wanted]

    def _transfer(self, parent: int | None) -> TrialGroup | None:
        if parent is None:
            return None
        return self._group([(self._configs[parent], parent)], f"transfer of trial {parent}")

    def _group(self, picked: Sequence[tuple[Config, int]], label: str) -> TrialGroup:
        assert self._rules is not None
        assert self._rules.derive is not None
        segments = []
        for config, parent in picked:
            trial = self._rules.derive(config, parent)
            if config is self._configs[parent]:  # transferred once more it is trained as it was
                trial = replace(trial, seed=self._seeds.setdefault(parent, trial.seed))
            self._targets[trial.id] = parent
            self._running[trial.id] = 0
            segments.append(Segment(trial, until=self.epochs, options={MODEL: TARGET}))
        self._vacant = max(0, self._vacant - len(segments))
        return TrialGroup(tuple(segments), label=label)

    def _second_due(self, standing: TransferStanding) -> bool:
        """Whether what does not transfer is still to be tuned, on the full model."""
        if not self.held or self._tuned >= self.shrink.second or standing.best in (None, self._settled):
            return False
        if not (standing.over and standing.best in standing.transferred and transfer_fits(standing)):
            return False
        return len(self._part(standing.best)) > 0  # what was held may be inactive in this one

    def _part(self, best: int) -> Space:
        """Of what was held, the domains that are active where everything else is as in a configuration."""
        assert self._rules is not None
        space = self._rules.space
        assert isinstance(space, Space)
        return part_of(space, list(self.held), self._less(self._configs[best]))

    def _less(self, config: Config) -> Config:
        return {name: value for name, value in config.items() if name not in self.held}

    def _second_stage(self, want: int) -> TrialGroup | None:
        """The best configuration with other values of what was held (Hydro 4.1, applicable scope)."""
        standing = self._standing(idle=want)
        if not self._second_due(standing):
            return None
        best = standing.best
        assert best is not None
        part = self._part(best)
        numbers = range(self._tuned, min(self._tuned + want, self.shrink.second))
        self._tuned = numbers.stop
        picked = [(self._with(best, part, number), best) for number in numbers]
        return self._group(picked, "second stage")

    def _with(self, best: int, part: Space, number: int) -> Config:
        """A configuration with values of its own for what was held, within the limits if such are soon found."""
        assert self._rules is not None
        allows = self._rules.allows
        rest = self._less(self._configs[best])
        for more in range(_DRAWS):
            config = {**rest, **part.sample(self._rules.seed + 1 + number + 1000 * more)}
            if allows is None or allows(config):
                return config
        return self._configs[best]  # which keeps them


def targets_apart(passes: Sequence[PlanPass], alone: Sequence[PlanPass]) -> PlanPass:
    """A pass that places target trials first and by themselves, then the others: those may be fused, these not."""

    def place(plan: Plan) -> Plan:
        mine = tuple(p for p in plan.waiting if p.segments[0].options.get(MODEL) == TARGET)
        if not mine:
            for step in passes:
                plan = step(plan)
            return plan
        others = tuple(p for p in plan.waiting if p.segments[0].options.get(MODEL) != TARGET)
        first = replace(plan, waiting=mine)
        for step in alone:
            first = step(first)
        rest = replace(first, waiting=others, placed=())
        for step in passes:
            rest = step(rest)
        return replace(rest, waiting=(*first.waiting, *rest.waiting), placed=(*first.placed, *rest.placed))

    return place


# ---------------------------------------------------------------- for the study


def check_surrogate(
    shrink: Any, work: Any, scheduler: Scheduler, sampler: Sampler, space: Space
) -> Shrink | None:
    """The study's ``surrogate``, if it can be.

    Raises:
        InvalidInput: It is no ``Shrink``, or the study has parts that don't go with one.
    """
    if shrink is None:
        return None
    if isinstance(shrink, type) or not isinstance(shrink, Shrink):
        raise InvalidInput(f"surrogate takes pk.Shrink(8) or the like, got {shrink!r}.")
    if not isinstance(work, Task):
        raise InvalidInput(
            "surrogate needs a pk.Task: a training function makes its own network, which can't be shrunk from outside."
        )
    if isinstance(scheduler, SM2):
        raise InvalidInput(
            "surrogate and pk.SM2 don't go together: SM2 finds learning rates that are in no configuration."
        )
    if not space.transferring:
        raise InvalidInput("Nothing in the space transfers, so there is nothing to tune on a narrow twin.")
    for name in space.transferring:
        when = space[name].when
        for parent in () if when is None else when.parents:
            if not space[parent].transfers:
                raise InvalidInput(
                    f"{name!r} has when={when!r}, but {parent!r} has transfers=False: it gets other values on the full "
                    f"model, where {name!r} would not be tuned. Say transfers=False for {name!r} too, or drop it "
                    f"from {parent!r}."
                )
    return shrink


def quality_of(goal: Goal) -> int | None:
    """Of several objectives, the first that is not metered: quality, not cost. None: there is only one, or none."""
    return goal.quality if len(goal.objectives) > 1 else None


def quality_objective(goal: Goal) -> Objective | None:
    """The first objective that is not metered."""
    return None if goal.quality is None else goal.objectives[goal.quality]


def middle(space: Space, held: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the middle of the space, at which the check runs."""
    return held_in(space, space.decode([0.5] * space.width()), held)


def inspect_twin(task: Task, shrink: Shrink, config: Config, *, threads: int | None) -> dict[str, Any]:
    """What the journal keeps of a twin: the check, the table and the time of a target's epoch.

    Raises:
        Unsupported: The model can't be shrunk, or the check fails and ``Shrink(check=True)`` minds.
        InvalidInput: The model can't be computed.
    """
    from penstock.train._surrogate import check, describe

    try:
        found, epoch_s = check(task, config, threads=threads)
    except PenstockError:
        raise
    except Exception as error:  # of the user's factory, forward or loss
        raise InvalidInput(
            f"The narrow twin can't be checked, for the task's own code fails at {dict(config)!r}: "
            f"{type(error).__name__}: {error}. A forward must work in training and, for evaluation, without gradients."
        ) from error
    if not found.ok and shrink.check:
        raise Unsupported(
            f"{found.explain()}\n{found}\nTune the full model instead (drop surrogate=), shrink by less, let the "
            f"factory take a width, or go on all the same with Shrink({shrink.factor:g}, check=False)."
        )
    assert task.surrogate is not None
    table = task.surrogate.table(task, task.hyperparameters(config))
    return {
        "factor": shrink.factor,
        "check": found.to_json(),
        "target_epoch_s": epoch_s,
        "twin_epoch_s": epoch_s * found.step_s[found.divisors.index(shrink.factor)] / found.step_s[-1],
        "table": describe(table),
        "notes": list(table.notes),
    }


__all__ = [
    "MODEL",
    "TARGET",
    "TOPIC",
    "Held",
    "Transfer",
    "check_surrogate",
    "held_values",
    "inspect_twin",
    "middle",
    "part_of",
    "quality_objective",
    "quality_of",
    "targets_apart",
]
