"""The table of trials: sorted, filtered and in pages, on the server."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import InvalidInput
from penstock.goal import metrics_of
from penstock.report.views._fold import Folded, Options, clean

ROWS = 100
_TERM = re.compile(r"^\s*([^<>=!~]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*$")
_FIRST = ("trial", "status", "epochs")


def table(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """A page of trials.

    Options: ``sort`` (a column), ``descending``, ``offset``, ``limit``, and ``filter``: words that must occur somewhere
    in the row, and terms ``column < value`` (also ``<= > >= = != ~``, the last for "contains"), separated by commas.
    """
    options = options or Options()
    rows = all_rows(folded)
    columns = column_names(folded, rows)
    test = reader(options.filter, columns, rows)
    kept = [row for row in rows if test(row)]
    if options.sort:
        if options.sort not in columns:
            raise InvalidInput(f"There is no column {options.sort!r}; there are {', '.join(columns)}.")
        kept = sort_rows(kept, options.sort, descending=options.descending)
    limit = min(options.limit or ROWS, 1000)
    cleaned: dict[str, Any] = clean(
        {
            "columns": columns,
            "objectives": [o.metric for o in folded.goal.objectives],
            "total": len(rows),
            "matching": len(kept),
            "offset": options.offset,
            "rows": [
                [row.get(name) for name in columns]
                for row in kept[max(0, options.offset) : max(0, options.offset) + limit]
            ],
        }
    )
    return cleaned


def all_rows(folded: Folded) -> list[dict[str, Any]]:
    """Every trial as a flat row; a metric that has the name of a domain is called ``metric.name``."""
    rows = []
    domains = {name for record in folded.state.trials.values() for name in record.config}
    for record in folded.state.trials.values():
        row: dict[str, Any] = {"trial": record.id, "status": record.status.value, "epochs": record.trained}
        for name, value in metrics_of(record).items():
            clash = name in domains or name in _FIRST or name == "reason"
            row[f"metric.{name}" if clash else name] = value
        row["busy_s"] = record.busy_s
        for name, value in record.config.items():
            row[f"config.{name}" if name in _FIRST or name in ("busy_s", "reason") else name] = value
        row["reason"] = record.reason
        rows.append(row)
    return rows


def column_names(folded: Folded, rows: list[dict[str, Any]]) -> list[str]:
    """The columns in the order people look for them: objectives, configuration, other metrics, cost, reason."""
    names = dict.fromkeys(name for row in rows for name in row)
    objectives = [o.metric for o in folded.goal.objectives]
    shown = [o if o in names else f"metric.{o}" for o in objectives]
    config = dict.fromkeys(name for record in folded.state.trials.values() for name in record.config)
    order = [
        *_FIRST,
        *(name for name in shown if name in names),
        *(name for name in config if name in names),
        *(name for name in names if name not in ("train_s", "energy_j", "busy_s", "reason")),
        *(name for name in ("energy_j", "train_s", "busy_s", "reason") if name in names),
    ]
    return list(dict.fromkeys(order))


def sort_rows(rows: list[dict[str, Any]], column: str, *, descending: bool) -> list[dict[str, Any]]:
    """By a column; rows without a value come last either way, numbers before words."""
    known = [row for row in rows if _key(row.get(column)) is not None]
    missing = [row for row in rows if _key(row.get(column)) is None]
    known.sort(key=lambda row: _key(row.get(column)) or (2, 0.0, ""), reverse=descending)
    return known + missing


def reader(text: str, columns: list[str], rows: list[dict[str, Any]]) -> Callable[[Mapping[str, Any]], bool]:
    """The test that a filter stands for.

    Raises:
        InvalidInput: A term names a column there isn't, or asks whether a number is less than a word.
    """
    tests: list[Callable[[Mapping[str, Any]], bool]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _TERM.match(part)
        if match is None:
            tests.append(_anywhere(part.lower()))
            continue
        name, sign, wanted = match.groups()
        if name not in columns:
            raise InvalidInput(f"There is no column {name!r} to filter by; there are {', '.join(columns)}.")
        if sign[0] in "<>" and _number(wanted) is None and _is_numeric(name, rows):
            raise InvalidInput(f"{name!r} has numbers, and {wanted!r} is none: write {name} {sign} 0.01.")
        tests.append(_compared(name, sign, wanted))
    return lambda row: all(test(row) for test in tests)


def _anywhere(word: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: any(word in str(value).lower() for value in row.values())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_numeric(name: str, rows: list[dict[str, Any]]) -> bool:
    """Whether a column has numbers and nothing else."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _compared(name: str, sign: str, wanted: str) -> Callable[[Mapping[str, Any]], bool]:
    bound = _number(wanted)

    def test(row: Mapping[str, Any]) -> bool:
        value = row.get(name)
        if sign == "~":
            return wanted.lower() in str(value).lower()
        if value is None:
            return sign == "!=" and wanted != ""
        if bound is not None and isinstance(value, int | float) and not isinstance(value, bool):
            left: Any = value
            right: Any = bound
        else:
            left, right = str(value).lower(), wanted.lower()
        results: dict[str, Callable[[], bool]] = {
            "=": lambda: left == right,
            "!=": lambda: left != right,
            "<": lambda: left < right,
            "<=": lambda: left <= right,
            ">": lambda: left > right,
            ">=": lambda: left >= right,
        }
        return bool(results[sign]())

    return test


def _key(value: Any) -> tuple[int, float, str] | None:
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value))
