"""The report of searches under limits: HyperPower's figures 4 and 6 as data, and its tables 2 to 5."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean, pstdev
from typing import Any, Protocol, final

from penstock.core import Config, StudyState, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.goal import Goal, Limit


class Told(Protocol):
    """A ``Study``, or a ``Journal`` of one."""

    @property
    def goal(self) -> Goal:
        """What it is after."""

    @property
    def state(self) -> StudyState:
        """The fold over its events."""


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """One trial of a search.

    Attributes:
        config: Its configuration.
        error: Its objective, lower is better; None if it failed before it reported any.
        violates: Whether it violates a limit, by what was measured of it.
        start_s: When it began, from the beginning of the search.
        end_s: When it was over.
        epochs: How long it was trained.
        queries: How many configurations were looked at for it, itself and those refused before it.
        quantities: What was measured of it, by name.
    """

    config: Config
    error: float | None
    violates: bool
    start_s: float
    end_s: float
    epochs: int = 0
    queries: int = 1
    quantities: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Search:
    """One run of a method.

    Attributes:
        samples: In the order in which they were begun.
    """

    samples: tuple[Sample, ...]

    @property
    def best(self) -> float | None:
        """The least error that keeps the limits; None if there is none."""
        return min((s.error for s in self.samples if s.error is not None and not s.violates), default=None)

    @property
    def violations(self) -> int:
        """How many trainings violate a limit."""
        return sum(s.violates for s in self.samples)

    @property
    def queried(self) -> int:
        """How many configurations were looked at, those refused before training included (Table 4)."""
        return sum(s.queries for s in self.samples)

    @property
    def time_s(self) -> float:
        """When the last trial was over."""
        return max((s.end_s for s in self.samples), default=0.0)

    def best_by_evaluation(self) -> list[float | None]:
        """The best error after every trial (Figure 4, left)."""
        found: list[float | None] = []
        best: float | None = None
        for sample in self.samples:
            if sample.error is not None and not sample.violates and (best is None or sample.error < best):
                best = sample.error
            found.append(best)
        return found

    def best_by_time(self) -> list[tuple[float, float]]:
        """Seconds and the error found then, whenever there is a new best (Figure 6)."""
        found: list[tuple[float, float]] = []
        for sample in sorted(self.samples, key=lambda s: s.end_s):
            better = sample.error is not None and (not found or sample.error < found[-1][1])
            if better and not sample.violates and sample.error is not None:
                found.append((sample.end_s, sample.error))
        return found

    def violations_by_evaluation(self) -> list[int]:
        """Trainings that violate a limit, up to every trial (Figure 4, centre)."""
        found: list[int] = []
        for sample in self.samples:
            found.append((found[-1] if found else 0) + sample.violates)
        return found

    def constraint_map(self, x: str, y: str | None = None) -> list[dict[str, Any]]:
        """All samples over measured quantities, e.g. power and memory (Figure 4, right; Figure 1).

        Args:
            x: A quantity.
            y: Another one; None: the error.
        """
        points: list[dict[str, Any]] = []
        for number, sample in enumerate(self.samples):
            there = sample.error if y is None else sample.quantities.get(y)
            if x in sample.quantities and there is not None:
                points.append(
                    {
                        "sample": number,
                        x: sample.quantities[x],
                        y or "error": there,
                        "error": sample.error,
                        "violates": sample.violates,
                    }
                )
        return points

    def time_to_queries(self, count: int) -> float | None:
        """Seconds until so many configurations were looked at; None: never."""
        seen = 0
        for sample in self.samples:
            seen += sample.queries
            if seen >= count:
                # What was refused took no training: the count may be reached before this one's training.
                return sample.start_s if seen - 1 >= count else sample.end_s
        return None

    def time_to_error(self, error: float) -> float | None:
        """Seconds until an error no larger than this was found; None: never."""
        return next((time_s for time_s, found in self.best_by_time() if found <= error), None)


def search_of(study: Told, limits: Iterable[Limit] = ()) -> Search:
    """A study's search, for the report.

    Args:
        study: A ``Study``, or ``read_journal(store)`` of one.
        limits: Judge by these what trials report, too: for a study that did not know of them.

    Raises:
        InvalidInput: It has several objectives.
    """
    if len(study.goal.objectives) > 1:
        raise InvalidInput(f"The report is of one objective, this study has {study.goal}.")
    judged = tuple(limits)
    begun_s = study.state.first_s or 0.0
    samples = []
    for record in study.state.trials.values():
        values = None if record.status is TrialStatus.FAILED else study.goal.score(record)
        measured = {name: float(value) for name, value in record.metrics.items()}
        over = [q for q in judged if q.name in measured and not q.holds(measured[q.name])]
        start_s = record.created_s if record.started_s is None else record.started_s
        samples.append(
            Sample(
                record.config,
                None if values is None else values[0],
                bool(record.violated or over),
                start_s - begun_s,
                (start_s if record.ended_s is None else record.ended_s) - begun_s,
                record.epoch,
                1 + record.refused,
                measured,
            )
        )
    return Search(tuple(samples))


@final
@dataclass(frozen=True, slots=True)
class Gain:
    """A figure of the default method, of the one with HyperPower, and what it gains.

    Attributes:
        default: Mean over the runs; None if no run has it.
        ours: Likewise.
        gain: Geometric mean over pairs of runs in which both have it; None if there is none.
        pairs: How many pairs that is.
    """

    default: float | None
    ours: float | None
    gain: float | None
    pairs: int


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the tables.

    Attributes:
        method: Its name.
        error: Table 2: mean best error and its standard deviation, of the default method and with HyperPower.
        time_to_samples: Table 3: seconds until as many samples were queried as the default method did in all.
        samples: Table 4: samples queried.
        time_to_error: Table 5: seconds until the default method's best error.
        violations: Trainings that violate a limit, mean over runs, default and with HyperPower.
    """

    method: str
    error: tuple[tuple[float, float] | None, tuple[float, float] | None]
    time_to_samples: Gain
    samples: Gain
    time_to_error: Gain
    violations: tuple[float, float]


def compare_searches(
    methods: Mapping[str, tuple[Sequence[Search], Sequence[Search]]],
) -> list[Comparison]:
    """Tables 2 to 5 of the paper.

    Args:
        methods: By name, the runs of the constraint-unaware method and of the same with limits, predictors and early
            termination, in pairs (the same seeds).

    Raises:
        InvalidInput: A method has no runs, or not as many of the one as of the other.
    """
    rows = []
    for name, (default, ours) in methods.items():
        if not default or len(default) != len(ours):
            raise InvalidInput(
                f"{name}: give as many runs with limits as without, in pairs; got {len(ours)} and {len(default)}."
            )
        rows.append(
            Comparison(
                name,
                (_spread(default), _spread(ours)),
                _gain(
                    [d.time_s for d in default],
                    [o.time_to_queries(d.queried) for d, o in zip(default, ours, strict=True)],
                    faster=True,
                ),
                _gain([d.queried for d in default], [o.queried for o in ours], faster=False),
                _gain(
                    [None if d.best is None else d.time_to_error(d.best) for d in default],
                    [
                        None if d.best is None else o.time_to_error(d.best)
                        for d, o in zip(default, ours, strict=True)
                    ],
                    faster=True,
                ),
                (fmean(d.violations for d in default), fmean(o.violations for o in ours)),
            )
        )
    return rows


def _spread(runs: Sequence[Search]) -> tuple[float, float] | None:
    found = [run.best for run in runs if run.best is not None]
    return (fmean(found), pstdev(found)) if len(found) == len(runs) else None


def _gain(default: Sequence[float | None], ours: Sequence[float | None], *, faster: bool) -> Gain:
    pairs = [
        (d, o)
        for d, o in zip(default, ours, strict=True)
        if d is not None and o is not None and d > 0 and o > 0
    ]
    ratios = [d / o if faster else o / d for d, o in pairs]
    return Gain(
        _mean(default),
        _mean(ours),
        geometric_mean(ratios) if ratios else None,
        len(ratios),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def comparison_text(rows: Sequence[Comparison], *, unit_s: float = 3600.0, unit: str = "h") -> str:
    """The tables for people.

    Args:
        rows: From ``compare_searches``.
        unit_s: Seconds of the unit of time.
        unit: Its name.
    """
    width = max([len(row.method) for row in rows], default=6)
    lines: list[str] = []

    def table(title: str, cells: Sequence[Sequence[str]]) -> None:
        lines.append(title)
        for row, texts in zip(rows, cells, strict=True):
            lines.append(f"  {row.method:{width}}  " + "  ".join(f"{text:>16}" for text in texts))
        lines.append("")

    def gains(of: Sequence[Gain], scale: float) -> list[list[str]]:
        return [
            [_number(g.default, scale), _number(g.ours, scale), "-" if g.gain is None else f"{g.gain:.2f}x"]
            for g in of
        ]

    def errors(one: tuple[float, float] | None) -> str:
        return "-" if one is None else f"{one[0]:.2f} ({one[1]:.2f})"

    table(
        "Table 2. Mean best error (standard deviation): default, HyperPower",
        [[errors(part) for part in row.error] for row in rows],
    )
    table(
        f"Table 3. Time ({unit}) to the number of samples that the default queried: default, HyperPower, speedup",
        gains([row.time_to_samples for row in rows], unit_s),
    )
    table(
        "Table 4. Samples queried: default, HyperPower, increase",
        gains([row.samples for row in rows], 1.0),
    )
    table(
        f"Table 5. Time ({unit}) to the best error of the default: default, HyperPower, speedup",
        gains([row.time_to_error for row in rows], unit_s),
    )
    table(
        "Trainings that violate a limit: default, HyperPower",
        [[f"{part:.1f}" for part in row.violations] for row in rows],
    )
    return "\n".join(lines).rstrip()


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value / scale:.2f}"
