"""Population based training (Jaderberg et al. 2017), in synchronous rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, final

from penstock.core import Checkpoint, Config, Segment, Trial, TrialGroup, TrialStatus, Values
from penstock.core.errors import InvalidInput
from penstock.schedule._base import Outcome, Rules, Scheduler
from penstock.schedule._check import fraction, whole
from penstock.space import Choice, Domain, Float, Int, Space

_DRAWS = 20  # of a change that the study's limits allow


@final
class PBT(Scheduler):
    """Trains a population together; after each round the worst go on from copies of the best, changed a little.

    A round is ``interval`` epochs of every member. When all have ended it, each of the worst ``quantile`` takes
    over the checkpoint and the configuration of one of the best ``quantile``, drawn at random (truncation
    selection), and explores: each value is drawn anew with probability ``resample``, and else a number is
    multiplied by one of ``factors``, and a Choice moves to a neighbour. It keeps its number. What is
    ``structural``, and what decides whether something structural is active, stays as the weights were
    trained. A member that failed or was stopped is replaced by a new trial made in the same way, as long as a
    budget of trials allows new ones.

    A ``Task`` trains on by the new configuration. A training function that loads an optimizer's state has to set its
    rates by ``run.config`` afterwards: they are part of that state.

    Args:
        population: How many trials train together.
        max_epochs: Epochs in all.
        interval: Epochs of a round; the last one may be shorter.
        quantile: Which part is worst, and best; at least one member each.
        resample: Probability of drawing a value anew.
        factors: What numbers are multiplied by, one of them at random.
        sampler: A Sampler for the first population; None: the study's.
    """

    def __init__(
        self,
        population: int = 8,
        max_epochs: int = 100,
        interval: int = 10,
        quantile: float = 0.25,
        resample: float = 0.25,
        factors: Sequence[float] = (0.8, 1.2),
        sampler: object | None = None,
    ) -> None:
        self.population = whole("population", population, 2)
        self._max = self.max_epochs = whole("max_epochs", max_epochs)
        self.interval = whole("interval", interval)
        if self.interval > self._max:
            raise InvalidInput(
                f"interval is {interval} and max_epochs {max_epochs}: give a shorter interval."
            )
        self.quantile = fraction("quantile", quantile, 0.0, 0.5)
        if not self.quantile:
            raise InvalidInput("quantile is 0; nobody would learn from anybody: give up to 0.5, or use Full.")
        self.resample = fraction("resample", resample, 0.0, 1.0)
        if isinstance(factors, str | bytes) or not isinstance(factors, Iterable):
            raise InvalidInput(f"factors is {factors!r}; give what to multiply numbers by: (0.8, 1.2).")
        self.factors = tuple(fraction("each of factors", factor, 1e-6, 1e6) for factor in factors)
        if not self.factors:
            raise InvalidInput("factors is empty; give what to multiply numbers by: (0.8, 1.2).")
        self.sampler = sampler
        self._rules: Rules | None = None
        self._space = Space()
        self._reset()

    def _reset(self) -> None:
        self._members: list[Trial] = []
        self._outcomes: dict[int, Outcome] = {}
        self._running = self._handed = self._round = 0
        self._to_propose = self.population
        self._finished = False
        self._dropped: list[int] = []

    def start(self, rules: Rules) -> None:
        """Begin a study."""
        if not isinstance(rules.space, Space):
            raise InvalidInput(f"PBT explores a Space; the study has {rules.space!r}.")
        self._reset()
        self._rules = rules
        self._space = rules.space

    def next(self, want: int) -> TrialGroup | None:
        """The next round, once the last one is over; the first population no faster than it can start."""
        rules = self._rules
        if rules is None or self._finished:
            return None
        if self._to_propose:
            count = min(want, self._to_propose) if rules.learns else self._to_propose
            if want <= 0:
                return None
            new = rules.propose(count)
            self._to_propose = 0 if len(new) < count else self._to_propose - len(new)
            self._members.extend(new)
            if new:
                return self._group([self._segment(trial) for trial in new])
        if self._running:
            return None
        if not self._members:
            self._finished = True
            return None
        segments = self._next_round(rules, self._space)
        return self._group(segments) if segments else None

    @property
    def _until(self) -> int:
        return min(self._max, (self._round + 1) * self.interval)

    def _segment(self, trial: Trial, donor: int | None = None) -> Segment:
        start, until = self._round * self.interval, self._until
        source = None if donor is None else Checkpoint(donor, start)
        return Segment(trial, start, until, last=until == self._max, copy_from=source)

    def _group(self, segments: list[Segment]) -> TrialGroup:
        self._running += len(segments)
        self._handed += len(segments)
        # Nothing follows the last round.
        self._finished = segments[0].last and not self._to_propose
        return TrialGroup(tuple(segments), label=f"round {self._round}")

    def _next_round(self, rules: Rules, space: Space) -> list[Segment]:
        """Exploit and explore: the segments of the round after the one that is over."""
        paused = [m for m in self._members if self._outcomes[m.id].status is TrialStatus.PAUSED]
        values: list[Values] = []
        ranked: list[Trial] = []
        for member in paused:
            if (value := self._outcomes[member.id].rankable) is not None:
                ranked.append(member)
                values.append(value)
        if not ranked:  # nobody to learn from
            self._dropped.extend(member.id for member in paused)
            self._finished = True
            return []
        ranked = [ranked[index] for index in rules.order(values)]
        best, worst = self._selected(ranked, paused)
        self._round += 1
        segments: list[Segment] = []
        for position, member in enumerate(self._members):
            # A stream of its own for each decision: the same whatever the others do.
            random = Random(f"penstock PBT {rules.seed} {self._round} {position}")
            status = self._outcomes[member.id].status
            if status is TrialStatus.PAUSED and member.id not in worst:
                segments.append(self._segment(member))
                continue
            if status is TrialStatus.COMPLETED or (
                status is not TrialStatus.PAUSED and not _may_derive(rules)
            ):
                continue  # it ended early by itself, or can't be replaced
            donor = random.choice(best)
            config = self._explore(space, donor.config, random)
            if rules.allows is not None:
                for _ in range(_DRAWS):
                    if rules.allows(config):
                        break
                    config = self._explore(space, donor.config, random)
                else:
                    config = dict(donor.config)  # the donor was allowed
            if status is TrialStatus.PAUSED or rules.derive is None:
                changed = Trial(member.id, config, member.seed, donor.id)
            else:
                changed = rules.derive(config, donor.id)
            segments.append(self._segment(changed, donor.id))
        self._members = [segment.trial for segment in segments]
        self._outcomes.clear()
        return segments

    def _selected(self, ranked: list[Trial], paused: list[Trial]) -> tuple[list[Trial], set[int]]:
        """The members to copy from, and those that copy: the worst, and any that reported nothing."""
        count = max(1, int(self.quantile * len(paused)))
        best = ranked[:count]
        silent = [member for member in paused if self._outcomes[member.id].rankable is None]
        worst = [*ranked, *silent][max(count, len(paused) - count) :]
        return best, {member.id for member in [*worst, *silent]}

    def _explore(self, space: Space, config: Config, random: Random) -> dict[str, Any]:
        """The donor's configuration, changed a little."""
        fixed = _architecture(space)
        result: dict[str, Any] = {}
        for name in space.order:
            if not space.active(name, result):
                continue
            domain = space[name]
            if name in config and name in fixed:
                result[name] = config[name]
            elif name not in config or random.random() < self.resample:
                result[name] = domain.from_unit(random.random())
            else:
                result[name] = _perturbed(domain, config[name], random, self.factors)
        return result

    def ended(self, outcome: Outcome) -> None:
        """A segment is over."""
        self._running -= 1
        self._outcomes[outcome.trial] = outcome

    def drops(self) -> Sequence[int]:
        """Members given up because there was nobody to learn from."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def no_more(self) -> str:
        """The population."""
        return (
            "PBT trains one population from its beginning to its end, where a new member would have nobody of its age "
            "to be compared with"
        )

    @property
    def done(self) -> bool:
        """Whether the last round is handed out."""
        return self._finished

    @property
    def expected(self) -> int | None:
        """One segment per member and round."""
        if self._finished:
            return self._handed
        return self.population * -(-self._max // self.interval)

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "PBT",
            "population": self.population,
            "max_epochs": self._max,
            "interval": self.interval,
            "quantile": self.quantile,
            "resample": self.resample,
            "factors": list(self.factors),
        }


def _may_derive(rules: Rules) -> bool:
    left = rules.left()
    return rules.derive is not None and (left is None or left > 0)


def _architecture(space: Space) -> set[str]:
    """What copied weights depend on: structural domains, and those their conditions test, and so on."""
    fixed = set(space.structural)
    for name in reversed(space.order):  # children before their parents
        condition = space[name].when
        if name in fixed and condition is not None:
            fixed.update(condition.parents)
    return fixed


def _perturbed(domain: Domain, value: Any, random: Random, factors: Sequence[float]) -> Any:
    """A value near ``value``: multiplied by a factor and clipped, or a neighbour of a Choice."""
    if isinstance(domain, Choice):
        index = domain.index(value) + random.choice((-1, 1))
        return domain.value_at(min(max(index, 0), domain.count - 1))
    factor = random.choice(factors)
    if not isinstance(domain, (Float, Int)):
        return value
    # From 0 no factor leads away: move by the same part of the range.
    target = value * factor if value else (factor - 1) * (domain.high - domain.low)
    target = min(max(target, domain.low), domain.high)
    if domain.count is None:
        return domain.from_unit(domain.to_unit(target))  # without noise digits
    step = domain.step or 1
    before = round((value - domain.low) / step)
    index = round((target - domain.low) / step)
    if index == before and factor != 1:  # small whole numbers move too
        index += 1 if (factor > 1) == (value >= 0) else -1
    return domain.value_at(min(max(index, 0), domain.count - 1))
