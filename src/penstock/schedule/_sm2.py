"""SM2: successive halving by performance, energy and stable learning rate together (Geissler et al. 2024)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, final

from penstock.core import (
    Config,
    Event,
    Measurement,
    Reported,
    Segment,
    Source,
    StudyState,
    Trial,
    TrialGroup,
    TrialStatus,
    total,
)
from penstock.core.errors import InvalidInput, SpaceError
from penstock.goal._score import Score, score
from penstock.schedule._base import Outcome, Rules, Scheduler
from penstock.schedule._check import fraction, whole
from penstock.space import Space

_DRAWS = 100  # of the other hyperparameters, for a batch size that keeps the study's limits with them


@final
class SM2(Scheduler):
    """Finds batch size and learning rate of a ``pk.Task`` while it trains: spend more to save more.

    Each round explores every configuration that is left for one epoch on a random part of the batches, in
    isolation, which tells its performance, its energy per epoch and its largest stable learning rate; drops the
    worse half by the score of Eq. 2; and trains the others thoroughly at the rate found. The last one
    left trains on, its learning rate explored anew before every ``final_epochs``, until a stopping rule of the user's
    ends it: ``max_epochs``, ``patience``, the task's ``target``, the study's budget or its stop rules. A rate that
    still brings the loss down is kept, where the sweep names a smaller one.

    The configurations are ``batch_sizes``; all other hyperparameters come from the study's space and sampler, one
    proposal per batch size, and all start from one seed, so that they differ in nothing else. ``lr`` need not be in
    the space: exploration sets it. An exploratory epoch counts as an epoch of its trial (Fig. 2) and is
    reported with ``sm2_lr``, ``sm2_held``, ``sm2_stability`` and ``sm2_fraction``.

    Where the energy of a whole device is measured, configurations run one after another (the paper's way); where
    it is attributed to each, estimated or simulated, side by side. The first exploration runs alone and shows which.

    Args:
        batch_sizes: The configurations; None: the values of the space's ``batch_size``.
        lrs: Learning rates that an exploration inspects.
        lr_range: The smallest and the largest of them.
        alpha: Weight of the performance against energy and learning rate, 0..1.
        beta: Weight of the energy against the learning rate, 0..1.
        explore_fraction: Part of the batches of an exploratory epoch.
        thorough_epochs: Epochs of thorough training per round.
        final_epochs: Epochs between two explorations of the last configuration.
        max_epochs: Thorough epochs of the last configuration in all, those of its rounds included.
        patience: End when so many blocks of ``final_epochs`` in a row brought no improvement; None: never. After
            the first such block the learning rate falls, so that 1 ends the training before that could help.
        side_by_side: True or False decides; None: by where the energy comes from.
        sampler: A Sampler for this scheduler; None: the study's.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int] | None = None,
        lrs: int = 20,
        lr_range: tuple[float, float] = (1e-3, 1.0),
        alpha: float = 0.75,
        beta: float = 0.5,
        explore_fraction: float = 0.25,
        thorough_epochs: int = 5,
        final_epochs: int = 10,
        *,
        max_epochs: int = 100,
        patience: int | None = 2,
        side_by_side: bool | None = None,
        sampler: object | None = None,
    ) -> None:
        self.batch_sizes = None if batch_sizes is None else _sizes(batch_sizes)
        self.lrs = whole("lrs", lrs, 2)
        self.lr_range = _range(lr_range)
        self.alpha = fraction("alpha", alpha, 0.0, 1.0)
        self.beta = fraction("beta", beta, 0.0, 1.0)
        self.explore_fraction = fraction("explore_fraction", explore_fraction, 0.0, 1.0)
        if self.explore_fraction == 0.0:
            raise InvalidInput("explore_fraction is 0: an exploration needs some batches, e.g. 0.25.")
        self.thorough_epochs = whole("thorough_epochs", thorough_epochs)
        self.final_epochs = whole("final_epochs", final_epochs)
        self.thorough_max = whole("max_epochs", max_epochs)
        self.patience = None if patience is None else whole("patience", patience)
        self.side_by_side = side_by_side
        self.sampler = sampler
        self._rules: Rules | None = None
        self._reset()

    def _reset(self) -> None:
        self._round = 0
        self._live: list[_Lane] = []
        self._queue: list[Segment] = []
        self._label = ""
        self._running: dict[int, Segment] = {}
        self._parallel = self.side_by_side
        self._drops: list[int] = []
        self._reasons: dict[int, str] = {}
        self._end = ""
        self._handed = 0
        self._unopened: list[int] = []  # batch sizes that have no trial yet
        self._over = False
        self._best: float | None = None
        self._stale = 0
        self._shown: dict[int, _Shown] = {}  # what each configuration showed last, those dropped included
        self.rounds: list[Round] = []

    def start(self, rules: Rules) -> None:
        """Begin a study.

        Raises:
            InvalidInput: There are no batch sizes: neither given nor in the space.
        """
        self._reset()
        self._rules = rules
        self._unopened = list(_find_sizes(self.batch_sizes, rules.space))

    def next(self, want: int) -> TrialGroup | None:
        """The explorations or trainings of the present round."""
        if self._rules is None or self._over or want < 1:
            return None
        # Nobody knows yet where the energy comes from: the first exploration runs alone.
        alone = not self._parallel
        if alone and self._running:
            return None
        if self._unopened:
            self._open(self._rules, 1 if alone else len(self._unopened))
        if not self._queue:
            return None
        taken = [self._queue.pop(0)] if alone else self._queue
        self._queue = self._queue if alone else []
        for segment in taken:
            self._running[segment.trial.id] = segment
        self._handed += len(taken)
        return TrialGroup(tuple(taken), self._label)

    def ended(self, outcome: Outcome) -> None:
        """A segment is over: note its attributes, and at the end of a phase begin the next."""
        segment = self._running.pop(outcome.trial, None)
        if segment is None:
            return
        lane = next(lane for lane in self._live if lane.trial.id == outcome.trial)
        lane.epoch = max(lane.epoch, outcome.epoch)
        if self._over:  # it ran on when another one reached the target
            if outcome.status is TrialStatus.PAUSED:
                self._drops.append(outcome.trial)
                self._reasons.setdefault(outcome.trial, self._end)
            return
        explored = segment.options["mode"] == "explore"
        lane.paused = outcome.status is TrialStatus.PAUSED
        lane.alive = outcome.status in (TrialStatus.PAUSED, TrialStatus.COMPLETED)
        if explored:
            # One that failed before its report says nothing of where the energy comes from.
            if self._parallel is None and (outcome.energy is not None or outcome.metrics):
                self._parallel = outcome.energy is None or outcome.energy.source is not Source.MEASURED
            lane.explored(outcome)
        else:
            lane.thorough += max(0, outcome.epoch - segment.start)
            lane.values = outcome.values
            # The training reached its target, or the epochs it may have: Alg. 1, line 2. A driver that died between
            # report and end sees the target in the metrics alone.
            reached = lane.alive and outcome.metrics.get("target_reached", 0.0) > 0
            if outcome.status is TrialStatus.COMPLETED or reached:
                lane.alive = outcome.status is not TrialStatus.COMPLETED  # what is over is not ours to drop
                self._reasons[lane.trial.id] = "reached its target"
                self._stop(f"trial {lane.trial.id} reached its target")
                return
        if not self._queue and not self._running and not self._unopened:
            self._phase_over(explored)

    def drops(self) -> Sequence[int]:
        """Configurations that lost, and at the end the last one, if a rule of ours stopped it."""
        drops, self._drops = self._drops, []
        return drops

    def why(self, trial: int) -> str:
        """The round that a configuration lost, or the rule that ended the last one."""
        return self._reasons.get(trial, "not promoted")

    @property
    def no_more(self) -> str:
        """The batch sizes."""
        return "SM2 has one trial for each batch size, and the best of them is trained"

    @property
    def done(self) -> bool:
        """Whether the last configuration has stopped."""
        return self._over

    @property
    def expected(self) -> int | None:
        """Segments in all if the last configuration trains to ``max_epochs``."""
        if self._over:
            return self._handed
        if self._rules is None:
            return None
        if self._handed or not self._unopened:
            return None
        left, segments, thorough = len(self._unopened), 0, 0
        while thorough < self.thorough_max:
            segments += left
            left = -(-left // 2)
            if epochs := self._epochs(left, thorough):
                segments += left
                thorough += epochs
        return segments

    def to_json(self) -> dict[str, object]:
        """Name and parameters."""
        return {
            "name": "SM2",
            "batch_sizes": None if self.batch_sizes is None else list(self.batch_sizes),
            "lrs": self.lrs,
            "lr_range": list(self.lr_range),
            "alpha": self.alpha,
            "beta": self.beta,
            "explore_fraction": self.explore_fraction,
            "thorough_epochs": self.thorough_epochs,
            "final_epochs": self.final_epochs,
            "max_epochs": self.thorough_max,
            "patience": self.patience,
            "side_by_side": self.side_by_side,
        }

    # ------------------------------------------------------------ phases

    def _open(self, rules: Rules, count: int) -> None:
        """Make the trials of the next ``count`` batch sizes; a group hands out all that it proposed.

        Raises:
            InvalidInput: No batch size keeps the study's limits.
        """
        fitting = {size: kept for size in self._unopened if (kept := _within(rules, size)) is not None}
        if not fitting and not self._live:
            raise InvalidInput(
                f"SM2: none of the batch sizes {self._unopened} was found to keep the study's limits. Give other ones, "
                "loosen the limits, or lower confidence=."
            )
        sizes, self._unopened = [*fitting][:count], [*fitting][count:]
        trials = list(rules.propose(len(sizes))) if sizes else []
        opened: list[_Lane] = []
        for trial, size in zip(trials, sizes, strict=False):
            # One seed for all: "fixing the random seed" (SM2 5.1).
            seed = (self._live + opened)[0].trial.seed if self._live or opened else trial.seed
            config: Config = _sized(rules, trial.config, size)
            if rules.allows is not None and not rules.allows(config):
                config = fitting[size]
            opened.append(_Lane(replace(trial, config=config, seed=seed)))
        self._live += opened
        if opened:
            self._explore(opened)
        if len(opened) < len(sizes) or not sizes:  # no more trials are proposed, or no size is left that fits
            self._unopened = []
            if not self._live:
                self._over = True
            elif not opened and not self._running:
                self._phase_over(explored=True)

    def _explore(self, lanes: Sequence[_Lane]) -> None:
        final = self._round > 0 and len(self._live) == 1
        self._label = f"round {self._round}, {'final ' if final else ''}exploration"
        self._queue = [
            Segment(
                lane.trial,
                start=lane.epoch,
                until=lane.epoch + 1,
                last=False,
                options=self._options("explore", lane),
            )
            for lane in lanes
        ]

    def _options(self, mode: str, lane: _Lane) -> dict[str, Any]:
        """What a worker has to know; one without a checkpoint runs the trial's whole history again by it."""
        if mode == "explore":
            lane.explorations.append(lane.epoch)
        return {
            "mode": mode,
            "round": self._round,
            "lrs": self.lrs,
            "lr_range": list(self.lr_range),
            "fraction": self.explore_fraction,
            "explorations": list(lane.explorations),
        }

    def _train(self) -> None:
        final = len(self._live) == 1
        self._label = f"round {self._round}, {'final' if final else 'thorough'} training"
        self._queue = []
        for lane in self._live:
            epochs = max(1, self._epochs(len(self._live), lane.thorough))
            self._queue.append(
                Segment(
                    lane.trial,
                    start=lane.epoch,
                    until=lane.epoch + epochs,
                    last=final and lane.thorough + epochs >= self.thorough_max,
                    options=self._options("thorough", lane),
                )
            )

    def _epochs(self, live: int, thorough: int) -> int:
        """How many of ``max_epochs`` a round trains; one at least is kept for the last configuration.

        It must not end with an exploration, whose weights are thrown away.
        """
        left = self.thorough_max - thorough
        return min(left, self.final_epochs) if live == 1 else min(left - 1, self.thorough_epochs)

    def _phase_over(self, explored: bool) -> None:
        if explored:
            self._evaluate()
        self._live = [lane for lane in self._live if lane.alive]
        if not self._live:
            self._over = True
            return
        # Once too few epochs are left, rounds go on by explorations alone.
        if explored and any(self._epochs(len(self._live), lane.thorough) for lane in self._live):
            self._train()
            return
        if len(self._live) == 1 and (reason := self._exhausted(self._live[0])):
            self._stop(reason)
            return
        self._round += 1
        self._explore(self._live)

    def _evaluate(self) -> None:
        """Eq. 2 over the configurations of the round; the worse half is dropped (Alg. 1, lines 17-20).

        The attributes are rescaled "across all explored configurations" (SM2 4.3): those dropped before count with
        what they showed last. Over the survivors alone the two of the last round would be 0 and 1 in everything, so
        that the better performer won by any margin, and noise would be blown up to the full range: the energy
        could not decide between configurations that perform alike, which is what it is there for (SM2 5.2, 6).
        """
        lanes = self._live
        present = {lane.trial.id for lane in lanes}
        shown = [lane.shown for lane in lanes]
        shown += [last for trial, last in self._shown.items() if trial not in present]
        scores = score(
            self._performances([last.values for last in shown]),
            [last.energy_j for last in shown],
            [last.lr for last in shown],
            alpha=self.alpha,
            beta=self.beta,
        )[: len(lanes)]
        self._shown |= {lane.trial.id: lane.shown for lane in lanes if lane.alive}
        # Ties stay in the order of the batch sizes.
        ranked = sorted(range(len(lanes)), key=lambda i: (-scores[i].total, i))
        keep = -(-len(lanes) // 2) if len(lanes) > 1 else 1
        kept = set(ranked[:keep])
        self.rounds.append(
            Round(
                self._round,
                tuple(
                    Attributes(
                        lane.trial.id,
                        lane.trial.config.get("batch_size"),
                        None if lane.values is None else lane.values[0],
                        lane.energy_j,
                        lane.lr,
                        scores[i],
                        i in kept and lane.alive,
                    )
                    for i, lane in enumerate(lanes)
                ),
            )
        )
        for i, lane in enumerate(lanes):
            if i not in kept or not lane.alive:
                if lane.paused:
                    worse = f"in the worse half of round {self._round}: score {scores[i].total:.3f}"
                    self._drops.append(lane.trial.id)
                    self._reasons[lane.trial.id] = worse if lane.alive else "what it showed does not count"
                lane.alive = False

    def _performances(self, values: Sequence[tuple[float, ...] | None]) -> list[float | None]:
        """Higher is better. Several objectives count by their rank in the study's order."""
        known = [i for i, found in enumerate(values) if found]
        if self._rules is not None and known and len(values[known[0]] or ()) > 1:
            order = self._rules.order([values[i] or () for i in known])
            rank = {known[index]: -float(place) for place, index in enumerate(order)}
            return [rank.get(i) for i in range(len(values))]
        return [-found[0] if found else None for found in values]

    def _exhausted(self, lane: _Lane) -> str:
        """The rule of ours that ends the last configuration, or nothing."""
        if lane.thorough >= self.thorough_max:
            return f"trained for max_epochs={self.thorough_max}"
        if self.patience is None or lane.values is None:
            return ""
        value = lane.values[0]
        if self._best is None or value < self._best:
            self._best, self._stale = value, 0
        else:
            self._stale += 1
        if self._stale < self.patience:
            return ""
        return f"the last one left; no improvement in {self._stale} x {self.final_epochs} epochs (patience)"

    def _stop(self, reason: str) -> None:
        self._queue = []
        self._end = reason
        self._over = True
        # What still runs may end; everybody who is only paused is given up.
        for lane in self._live:
            if lane.alive and lane.trial.id not in self._running:
                self._drops.append(lane.trial.id)
                self._reasons.setdefault(lane.trial.id, reason)


@dataclass(slots=True)
class _Lane:
    """A configuration in the race."""

    trial: Trial
    epoch: int = 0  # all, explorations included
    thorough: int = 0
    explorations: list[int] = field(default_factory=list)  # epochs, counted from 0
    alive: bool = True
    paused: bool = False
    values: tuple[float, ...] | None = None
    energy_j: float | None = None
    lr: float | None = None

    @property
    def shown(self) -> _Shown:
        """The attributes of its last exploration; one that failed has no performance."""
        return _Shown(self.values if self.alive else None, self.energy_j, self.lr)

    def explored(self, outcome: Outcome) -> None:
        self.values = outcome.values
        self.alive = self.alive and outcome.values is not None
        self.lr = outcome.metrics.get("sm2_lr")
        self.energy_j = None
        if outcome.energy is not None:
            self.energy_j = energy_per_epoch_j(outcome.energy, outcome.metrics)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What an exploration showed of a configuration."""

    values: tuple[float, ...] | None
    energy_j: float | None
    lr: float | None


def energy_per_epoch_j(energy: Measurement, metrics: Mapping[str, float]) -> float:
    """Joules of a whole epoch from those of an exploratory one that saw a part of the samples."""
    part = metrics.get("sm2_fraction", 1.0)
    return energy.joules / part if part > 0 else energy.joules


@dataclass(frozen=True, slots=True)
class Attributes:
    """One configuration in one round (a point of the paper's Fig. 2).

    Attributes:
        trial: Its number.
        batch_size: Its batch size.
        value: Its objective in the exploratory epoch, lower is better; None if it failed.
        energy_j: Energy of an epoch; None where not metered.
        lr: The largest stable learning rate.
        score: Eq. 2 and its rescaled parts.
        kept: Whether it survived the round.
    """

    trial: int
    batch_size: Any
    value: float | None
    energy_j: float | None
    lr: float | None
    score: Score
    kept: bool


@dataclass(frozen=True, slots=True)
class Round:
    """The attributes of all configurations of one round."""

    number: int
    configurations: tuple[Attributes, ...]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one configuration (a point of the paper's Fig. 2).

    Attributes:
        epoch: Its number in the trial, counted from 1, explorations included.
        explored: Whether it was exploratory.
        value: The study's metric, as reported.
        energy_j: What it drew; None where not metered.
        lr: The learning rate that exploration chose last.
    """

    epoch: int
    explored: bool
    value: float | None
    energy_j: float | None
    lr: float | None


@dataclass(frozen=True, slots=True)
class SM2Report:
    """What an SM2 study did, from its journal.

    Attributes:
        metric: The study's (first) objective.
        maximize: Whether higher is better.
        alpha: Weight of the performance.
        beta: Weight of the energy within the rest.
        rounds: The attributes and scores of each round.
        epochs: By trial, every epoch reported.
        energy: All it drew; None where not metered.
        explored: The part of it that went into explorations.
        winner: The trial that was left; None before the last round.
        training: What the winner's thorough epochs and one set-up drew: one training of it without SM2, as far as
            known.
        outside: The part of ``energy`` that segments drew outside of their epochs: starting, loading, saving.
    """

    metric: str
    maximize: bool
    alpha: float
    beta: float
    rounds: tuple[Round, ...]
    epochs: Mapping[int, tuple[Epoch, ...]]
    energy: Measurement | None
    explored: Measurement | None
    winner: int | None
    training: Measurement | None
    outside: Measurement | None = None

    @property
    def parity(self) -> float | None:
        """Trainings of the winner that would have cost as much as the study; None where not known.

        Needs no second study, and so says nothing of a user's own choice of batch size: see ``compare``.
        """
        if self.energy is None or self.training is None or self.training.joules <= 0:
            return None
        return self.energy.joules / self.training.joules


def report(
    journal: Iterable[Event] | StudyState,
    metric: str,
    *,
    maximize: bool,
    alpha: float = 0.75,
    beta: float = 0.5,
) -> SM2Report:
    """Read the rounds of an SM2 study out of its journal (the data of the paper's Fig. 2). Pure.

    Args:
        journal: Its events, or the state they make.
        metric: The study's objective; of several, the first.
        maximize: Whether higher is better.
        alpha: Weight of the performance.
        beta: Weight of the energy within the rest.
    """
    state = journal if isinstance(journal, StudyState) else StudyState.of(journal)
    found: list[dict[int, Reported]] = []  # by round: a configuration is explored once in every round it sees
    epochs: dict[int, tuple[Epoch, ...]] = {}
    exploring: list[Measurement] = []
    training: dict[int, list[Measurement]] = {}
    outside: dict[int, Measurement] = {}
    for record in state.trials.values():
        rows: list[Epoch] = []
        round_ = 0
        lr = None
        # The latest segment carries the trial's whole history (epochs there are counted from 0).
        explorations = frozenset(record.segment.options.get("explorations", ()))
        for told in record.reports:
            explores = told.epoch - 1 in explorations
            if explores:
                lr = told.metrics.get("sm2_lr")
                while len(found) <= round_:
                    found.append({})
                found[round_][record.id] = told
                round_ += 1
            if told.energy is not None:
                (exploring if explores else training.setdefault(record.id, [])).append(told.energy)
            joules = None if told.energy is None else told.energy.joules
            rows.append(Epoch(told.epoch, explores, told.metrics.get(metric), joules, lr))
        epochs[record.id] = tuple(rows)
        inside = sum(told.energy.joules for told in record.reports if told.energy is not None)
        if record.energy is not None and (rest := record.energy.joules - inside) > 1e-9 * inside:
            outside[record.id] = record.energy.scaled(rest / record.energy.joules)
    rounds = tuple(
        _round(number, reports, state, found, metric, maximize, alpha, beta)
        for number, reports in enumerate(found)
    )
    last = [c.trial for c in rounds[-1].configurations if c.kept] if rounds else []
    winner = last[0] if len(last) == 1 else None
    alone = None if winner is None else total(training.get(winner, []))
    if alone is not None and winner in outside:
        # A training without SM2 is set up once, not once per segment.
        kinds = [epoch.explored for epoch in epochs[winner]]
        segments = 1 + sum(a != b for a, b in itertools.pairwise(kinds))
        alone += outside[winner].scaled(1.0 / segments)
    return SM2Report(
        metric,
        maximize,
        alpha,
        beta,
        rounds,
        epochs,
        state.energy,
        total(exploring),
        winner,
        alone,
        total(outside.values()),
    )


def _round(
    number: int,
    reports: Mapping[int, Reported],
    state: StudyState,
    found: Sequence[Mapping[int, Reported]],
    metric: str,
    maximize: bool,
    alpha: float,
    beta: float,
) -> Round:
    trials = sorted(reports)
    later = found[number + 1 :]
    # Those dropped in earlier rounds count with what they showed last, as they did in the study.
    last: dict[int, Reported] = {}
    for earlier in found[:number]:
        last |= earlier
    shown = [reports[trial] for trial in trials] + [last[t] for t in sorted(last) if t not in reports]
    sign = 1.0 if maximize else -1.0
    values = [told.metrics.get(metric) for told in shown]
    energies = [_epoch_energy(told) for told in shown]
    rates = [told.metrics.get("sm2_lr") for told in shown]
    performance = [None if value is None else sign * value for value in values]
    scores = score(performance, energies, rates, alpha=alpha, beta=beta)
    ranked = sorted(range(len(trials)), key=lambda i: (-scores[i].total, i))
    best = set(ranked[: -(-len(trials) // 2)])
    return Round(
        number,
        tuple(
            Attributes(
                trial,
                state.trials[trial].config.get("batch_size"),
                None if performance[i] is None else -(performance[i] or 0.0),
                energies[i],
                rates[i],
                scores[i],
                trial in later[0] if later else i in best,
            )
            for i, trial in enumerate(trials)
        ),
    )


def _epoch_energy(event: Reported) -> float | None:
    return None if event.energy is None else energy_per_epoch_j(event.energy, event.metrics)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the paper's Table 1.

    Attributes:
        alpha_1_j: Energy of SM2 that looks at the performance alone.
        sm2_j: Energy of SM2.
        vanilla_j: Energy of one training without SM2.
        saving: 1 - sm2 / alpha_1.
        parity: How many trainings without SM2 cost as much as SM2.
    """

    alpha_1_j: float
    sm2_j: float
    vanilla_j: float
    saving: float
    parity: float


def compare(alpha_1_j: float, sm2_j: float, vanilla_j: float) -> Comparison:
    """Table 1's saving and parity from three energies.

    Parity is SM2's energy in trainings: 1.76 means that a user who would try two configurations by hand has
    already spent more. (The paper prints the inverse, 16.4 / 14.8 and 69.4 / 40.7, in the two rows where SM2
    costs less than a single training; here these are 0.90 and 0.59.)

    Raises:
        InvalidInput: An energy is not above 0.
    """
    for name, joules in (("alpha_1_j", alpha_1_j), ("sm2_j", sm2_j), ("vanilla_j", vanilla_j)):
        if not (joules > 0 and math.isfinite(joules)):
            raise InvalidInput(f"{name} must be above 0, got {joules!r}.")
    return Comparison(alpha_1_j, sm2_j, vanilla_j, 1.0 - sm2_j / alpha_1_j, sm2_j / vanilla_j)


def _sized(rules: Rules, config: Config, size: int) -> dict[str, Any]:
    """A configuration with another batch size: what hangs on that comes and goes with it."""
    changed = {**config, "batch_size": size}
    if isinstance(rules.space, Space) and "batch_size" in rules.space:
        return rules.space.repair(changed, Random(f"penstock SM2 {rules.seed} {size}"))
    return changed


def _within(rules: Rules, size: int) -> Config | None:
    """A configuration of the batch size that keeps the study's limits, if one is soon found."""
    if rules.allows is None or not isinstance(rules.space, Space):
        return {}
    for draw in range(_DRAWS):
        config = _sized(rules, rules.space.sample(Random(f"penstock SM2 {rules.seed} draw {draw}")), size)
        if rules.allows(config):
            return config
    return None


def _range(given: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low < high < math.inf:
        raise InvalidInput(f"lr_range is {given!r}; give (low, high) with 0 < low < high.")
    return low, high


def _sizes(given: Iterable[int]) -> tuple[int, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInput(f"batch_sizes is {given!r}; give a list of them, e.g. [32, 64, 128].")
    sizes = tuple(whole("batch_sizes", size) for size in given)
    if not sizes:
        raise InvalidInput("batch_sizes is empty; give at least one, e.g. [32, 64, 128].")
    if len(set(sizes)) < len(sizes):
        raise InvalidInput(f"batch_sizes is {list(sizes)}; drop the repeated ones.")
    return sizes


def _find_sizes(given: tuple[int, ...] | None, space: Any) -> tuple[int, ...]:
    """The batch sizes: those given, which the space must allow, or the space's."""
    try:
        domain = space["batch_size"]
    except (KeyError, TypeError, InvalidInput):
        domain = None
    if given is not None:
        for size in given if domain is not None else ():
            try:
                domain.check(size)
            except SpaceError as error:
                raise InvalidInput(
                    f"batch_sizes has {size}, which batch_size={domain!r} of the space does not allow. Give sizes of "
                    "the domain, or drop one of the two."
                ) from error
        return given
    values = getattr(domain, "values", None)
    if not values:
        raise InvalidInput(
            "SM2 needs batch sizes to compare: SM2(batch_sizes=[32, 64, 128]), or batch_size=pk.Choice(32, 64, 128) "
            "in the space."
        )
    return _sizes(values)
