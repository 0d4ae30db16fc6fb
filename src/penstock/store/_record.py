"""Records: events as rows of text with a chained checksum, and back."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.core import Event, from_record, to_record
from penstock.core.errors import InvalidInput

Row: TypeAlias = tuple[int, str, int | None, float, str, int]
"""Number, kind, trial, time, JSON payload and checksum of a record."""


def _plain(value: Any) -> Any:
    """Scalars and arrays of numeric libraries as Python's own; JSON knows nothing else."""
    plain = getattr(value, "tolist", None)
    if plain is None:
        raise TypeError(f"{value!r} of type {type(value).__name__}")
    return plain()


# Pure ASCII: lone surrogates in a traceback and NULs, which PostgreSQL can't hold, survive as escapes.
_encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
_decode = json.JSONDecoder().raw_decode  # faster than decode: it doesn't look for white space around


def to_json(value: Any, what: str) -> str:
    """The value as JSON text.

    Raises:
        InvalidInput: JSON can't hold it; ``what`` names it in the text.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{what} can't be kept: JSON holds numbers, text, lists and mappings, not {error}. "
            "Convert it, or keep it in a file and store its path."
        ) from None


def from_json(text: str) -> Any:
    """The value of JSON text."""
    return json.loads(text)


def first_checksum(study: int) -> int:
    """What the chain of a study starts with, so that a record of another study doesn't fit."""
    return zlib.crc32(b"study %d" % study)


def checksum(before: int, seq: Any, kind: Any, trial: Any, time_s: Any, data: Any) -> int:
    """The checksum of a record, chained to the one ``before``: a lost or moved record is seen too."""
    text = f"{seq}\n{kind}\n{trial}\n{time_s!r}\n{data}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


def to_rows(events: Sequence[Event], seq: int, crc: int) -> list[Row]:
    """The rows of events that follow record ``seq`` with checksum ``crc``.

    Raises:
        InvalidInput: An event can't be kept.
    """
    rows: list[Row] = []
    for event in events:
        kind, trial, time_s, data = to_record(event)
        seq += 1
        time_s = float(time_s) + 0.0  # SQLite keeps -0.0 as 0.0, which has another text
        if not math.isfinite(time_s):
            raise InvalidInput(f"Event {kind!r} has time {time_s!r}: a time must be finite.")
        if trial is not None:
            trial = int(trial)
        try:
            text = _encode(data)
        except (TypeError, ValueError, RecursionError):
            text = to_json(data, f"Event {kind!r} of trial {trial}")  # says what is wrong
        crc = checksum(crc, seq, kind, trial, time_s, text)
        rows.append((seq, kind, trial, time_s, text, crc))
    return rows


def to_event(row: Sequence[Any]) -> Event:
    """The event of a row whose checksum is right."""
    return from_record(row[1], row[2], row[3], _decode(row[4])[0])
