"""Traces of recurring jobs in the Zeus artifact's format: epochs to target, and time and power per epoch."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import InvalidInput
from penstock.recurring._checks import whole
from penstock.recurring._cost import best_limit

_TRAIN_COLUMNS = (
    "dataset",
    "network",
    "batch_size",
    "optimizer",
    "learning_rate",
    "target_metric",
    "target_epoch",
)
_POWER_COLUMNS = (
    "dataset",
    "network",
    "batch_size",
    "optimizer",
    "power_limit",
    "time_per_epoch",
    "average_power",
)

_LINE = "\0line"  # where a row was read, for people; no column is called so

TABLE_1: Mapping[str, tuple[str, float, int]] = {
    "librispeech": ("adamw", 40.0, 192),
    "squad": ("adamw", 84.0, 32),
    "sentiment140": ("adamw", 0.84, 128),
    "imagenet": ("adadelta", 0.65, 256),
    "cifar100": ("adadelta", 0.60, 1024),
    "movielens1m": ("adam", 0.41, 1024),
}
"""Optimizer, target metric and default batch size of the paper's workloads (Zeus Table 1), by plain name."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One recurring job as recorded.

    Attributes:
        name: The dataset's name in the files.
        network: The model.
        optimizer: The optimizer.
        target: The metric to reach.
        default: The default batch size.
        epochs: Per batch size, the epochs each recorded run took to the target; None: it never got there.
        power: Per batch size, watts -> (time_s, power_w) of one epoch.
        max_power_w: MAXPOWER of the device.
        max_epochs: Where a run that never reaches the target ends.
        notes: What was adapted, for people.
    """

    name: str
    network: str
    optimizer: str
    target: float
    default: int
    epochs: Mapping[int, tuple[int | None, ...]]
    power: Mapping[int, Mapping[float, tuple[float, float]]]
    max_power_w: float
    max_epochs: int
    notes: tuple[str, ...] = field(default=())

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes with both kinds of trace, ascending."""
        return tuple(sorted(self.epochs))

    @property
    def limits_w(self) -> tuple[float, ...]:
        """All power limits of the trace, ascending."""
        return tuple(sorted({limit for profile in self.power.values() for limit in profile}))

    @property
    def recurrences(self) -> int:
        """The paper's number of recurrences, 2 |B| |P| (section 6.2)."""
        return 2 * len(self.batch_sizes) * len(self.limits_w)

    def mean_epochs(self, batch_size: int) -> float:
        """Expected epochs per success: runs that never reach the target last to ``max_epochs`` and are repeated."""
        runs = self.epochs[batch_size]
        successes = sum(epochs is not None for epochs in runs)
        if successes == 0:
            return math.inf
        return sum(self.max_epochs if epochs is None else epochs for epochs in runs) / successes

    def optimum(self, eta: float) -> tuple[int, float, float]:
        """The batch size and power limit with the least expected cost, and that cost: the oracle's choice."""
        best: tuple[float, int, float] | None = None
        for size in self.batch_sizes:
            limit, cost = best_limit(self.power[size], eta=eta, max_power_w=self.max_power_w)
            total = self.mean_epochs(size) * cost
            if math.isfinite(total) and (best is None or total < best[0]):
                best = (total, size, limit)
        if best is None:
            raise InvalidInput(
                f"No batch size of {self.name} ever reaches {self.target}: choose another target."
            )
        return best[1], best[2], best[0]


def read_workloads(
    train: str | Path,
    power: str | Path,
    names: Sequence[str] = (),
    *,
    targets: Mapping[str, float] | None = None,
    defaults: Mapping[str, int] | None = None,
) -> list[Workload]:
    """The workloads of two trace files, whatever the GPU.

    Workloads of the paper's Table 1 get its optimizer, target and default batch size. For others the optimizer
    is the one both files have most rows of, the target the hardest that most batch sizes reach in every run, and
    the default the largest batch size that reaches it in every run (the paper's own rule, section 6.1). A default
    that does not fit this GPU (it is missing from the power trace) gives way to the largest one that does.

    Args:
        train: ``summary_train.csv``.
        power: ``summary_power_<gpu>.csv``.
        names: Datasets to keep; case and punctuation do not matter. Empty: all that both files have.
        targets: Target metrics by dataset, instead of the above.
        defaults: Default batch sizes by dataset, instead of the above.

    Raises:
        InvalidInput: A file lacks a column or a readable row, or has no such workload.
    """
    train_rows = _read(train, _TRAIN_COLUMNS)
    power_rows = _read(power, _POWER_COLUMNS)
    max_power_w = max(_positive(row, "power_limit") for row in power_rows)
    both = {(r["dataset"], r["network"]) for r in train_rows} & {
        (r["dataset"], r["network"]) for r in power_rows
    }
    wanted = {plain(name) for name in names}
    order = list(dict.fromkeys((r["dataset"], r["network"]) for r in power_rows))
    chosen = [key for key in order if key in both and (not wanted or _named(key, wanted))]
    missing = [n for n in names if not any(_named(key, {plain(n)}) for key in chosen)]
    if missing or not chosen:
        have = ", ".join(sorted({dataset for dataset, _ in both})) or "none"
        asked = ", ".join(missing) or "any"
        raise InvalidInput(f"No workload {asked} in {train} and {power}: they both have {have}.")
    chosen.sort(
        key=lambda key: list(TABLE_1).index(plain(key[0])) if plain(key[0]) in TABLE_1 else len(TABLE_1)
    )
    targets = {plain(k): v for k, v in (targets or {}).items()}
    defaults = {plain(k): v for k, v in (defaults or {}).items()}
    for what, given in (("target", targets), ("default batch size", defaults)):
        unknown = sorted(set(given) - {plain(dataset) for dataset, _ in both})
        if unknown:
            have = ", ".join(sorted({dataset for dataset, _ in both}))
            raise InvalidInput(f"A {what} was given for {', '.join(unknown)}: the traces have {have}.")
    for size in defaults.values():
        whole("A default batch size", size)
    return [
        _workload(
            key,
            [r for r in train_rows if (r["dataset"], r["network"]) == key],
            [r for r in power_rows if (r["dataset"], r["network"]) == key],
            max_power_w,
            targets.get(plain(key[0])),
            defaults.get(plain(key[0])),
        )
        for key in chosen
    ]


def plain(name: str) -> str:
    """A name without case and punctuation: MovieLens-1M -> movielens1m."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _named(key: tuple[str, str], wanted: Iterable[str]) -> bool:
    return any((name and plain(key[0]).startswith(name)) or plain(key[1]) == name for name in wanted)


def _read(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            missing = [column for column in columns if column not in names]
            if missing:
                raise InvalidInput(
                    f"{path} lacks the column {', '.join(missing)}; it has {', '.join(names)}."
                )
            reader.fieldnames = names
            rows = []
            for row in reader:
                cells = {k: (v or "").strip() for k, v in row.items() if k}
                rows.append({**cells, _LINE: f"{path}, line {reader.line_num}"})
    except OSError as error:
        raise InvalidInput(f"Can't read the trace {path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path} is not a CSV file of text: {error}.") from error
    rows = [row for row in rows if row["dataset"]]
    if not rows:
        raise InvalidInput(f"{path} has a header but no rows.")
    return rows


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"{row[_LINE]}: {column} must be a finite number, got {row[column]!r}.")
    return value


def _positive(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column)
    if value <= 0:
        raise InvalidInput(f"{row[_LINE]}: {column} must be greater than 0, got {row[column]!r}.")
    return value


def _size(row: Mapping[str, str]) -> int:
    value = _number(row, "batch_size")
    if value < 1 or value != int(value):
        raise InvalidInput(
            f"{row[_LINE]}: batch_size must be a whole number of at least 1, got {row['batch_size']!r}."
        )
    return int(value)


def _taken(row: Mapping[str, str]) -> int | None:
    """Epochs to the target; None: never reached."""
    value = _maybe(row["target_epoch"])
    if value is None:
        return None
    if value != int(value):
        raise InvalidInput(
            f"{row[_LINE]}: target_epoch must be a whole number (empty or nan: never reached), "
            f"got {row['target_epoch']!r}."
        )
    return int(value)


def _maybe(text: str) -> float | None:
    # Absent, "nan" and "-1" all occur as "never reached" in traces.
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _workload(
    key: tuple[str, str],
    train: list[dict[str, str]],
    power: list[dict[str, str]],
    max_power_w: float,
    target: float | None,
    default: int | None,
) -> Workload:
    dataset, network = key
    notes: list[str] = []
    table = TABLE_1.get(plain(dataset))
    shared = {r["optimizer"] for r in train} & {r["optimizer"] for r in power}
    if not shared:
        raise InvalidInput(f"{dataset}: the two traces have no optimizer in common.")
    optimizer = table[0] if table and table[0] in shared else ""
    if not optimizer:
        optimizer = max(sorted(shared), key=lambda name: sum(r["optimizer"] == name for r in train))
    points: dict[int, dict[float, list[tuple[float, float]]]] = {}
    for row in power:
        time_s, power_w = _maybe(row["time_per_epoch"]), _maybe(row["average_power"])
        if row["optimizer"] != optimizer or time_s is None or power_w is None:
            continue
        size, limit = _size(row), _positive(row, "power_limit")
        points.setdefault(size, {}).setdefault(limit, []).append((time_s, power_w))
    profiles = {
        size: {limit: _average(values) for limit, values in sorted(limits.items())}
        for size, limits in points.items()
    }
    runs = [r for r in train if r["optimizer"] == optimizer]
    trained = {_size(r) for r in runs}
    sizes = sorted(trained & set(profiles))
    if not sizes:
        raise InvalidInput(f"{dataset}: no batch size has both a training and a power trace.")
    if target is None:
        target = table[1] if table else _hardest(runs, sizes)
    at = [r for r in runs if math.isclose(_number(r, "target_metric"), target, rel_tol=1e-9)]
    if not at:
        known = sorted({_number(r, "target_metric") for r in runs})
        raise InvalidInput(f"{dataset}: target {target} was not recorded; recorded are {known}.")
    first = default if default is not None else (table[2] if table else None)
    epochs = _epochs(at, sizes, first)
    sizes = sorted(epochs)
    steady = [b for b in sizes if all(e is not None for e in epochs[b])]
    if first is None:
        first = max(steady) if steady else sizes[-1]
    if first not in sizes:
        fits = [b for b in steady if b <= first] or steady or sizes
        fallback = max(fits) if fits[0] <= first else min(fits)
        notes.append(f"default batch size {first} has no trace on this GPU: {fallback} instead")
        first = fallback
    dropped = sorted((trained | set(profiles)) - set(sizes))
    if dropped:
        notes.append(f"batch sizes in one trace alone, left out: {', '.join(map(str, dropped))}")
    recorded = [_taken(r) for r in runs]
    max_epochs = max((e for e in recorded if e is not None), default=1)
    return Workload(
        dataset,
        network,
        optimizer,
        target,
        first,
        epochs,
        {b: profiles[b] for b in sizes},
        max_power_w,
        max_epochs,
        tuple(notes),
    )


def _average(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(t for t, _ in values) / len(values), sum(p for _, p in values) / len(values)


def _epochs(
    rows: list[dict[str, str]], sizes: Sequence[int], default: int | None
) -> dict[int, tuple[int | None, ...]]:
    by_rate: dict[int, dict[float, list[int | None]]] = {}
    for row in rows:
        size = _size(row)
        if size in sizes:
            rate = _maybe(row["learning_rate"]) or 0.0
            by_rate.setdefault(size, {}).setdefault(rate, []).append(_taken(row))
    if not by_rate:
        return {}
    anchor = default if default in by_rate else max(by_rate)
    anchor_rate = max(by_rate[anchor], key=lambda rate: len(by_rate[anchor][rate]))
    chosen: dict[int, tuple[int | None, ...]] = {}
    for size, rates in by_rate.items():
        # Several learning rates for one batch size: the one square-root scaling asks for (section 6.1).
        wanted = math.log(max(anchor_rate, 1e-300) * math.sqrt(size / anchor))
        rate = min(rates, key=lambda r: abs(math.log(max(r, 1e-300)) - wanted))
        chosen[size] = tuple(rates[rate])
    return chosen


def _hardest(rows: list[dict[str, str]], sizes: Sequence[int]) -> float:
    table: dict[float, dict[int, list[int | None]]] = {}
    for row in rows:
        size = _size(row)
        if size in sizes:
            table.setdefault(_number(row, "target_metric"), {}).setdefault(size, []).append(_taken(row))

    def steady(target: float) -> list[int]:
        return [b for b, epochs in table[target].items() if all(e is not None for e in epochs)]

    able = (
        [t for t in table if 2 * len(steady(t)) > len(sizes)]
        or [t for t in table if steady(t)]
        or list(table)
    )

    def hardness(target: float) -> float:
        taken = [e for b in steady(target) for e in table[target][b] if e is not None]
        return sum(taken) / len(taken) if taken else 0.0

    return max(able, key=hardness)
