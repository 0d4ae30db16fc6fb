"""Records out of the pages of an SQLite file whose tree is broken: the last resort of ``salvage``.

The format is https://www.sqlite.org/fileformat2.html, sections 1.6 (pages and cells) and 2.1 (records). Pages are
looked at one by one, so losing one that points to others loses no record but its own. What is found may be stale
or garbage; the chained checksums of the journal tell what belongs to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LEAF = 0x0D  # a page with rows of a table; inner pages have none
_SIZES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}


def rows_in(path: Path, columns: int) -> Iterator[tuple[Any, ...]]:
    """All rows of tables with that many columns, in no particular order; an INTEGER PRIMARY KEY comes as None."""
    data = path.read_bytes()
    if len(data) < 100:
        return
    size = int.from_bytes(data[16:18], "big")
    size = 65536 if size == 1 else size
    if size < 512 or size & (size - 1):
        return
    usable = size - data[20]
    for start in range(0, len(data) - len(data) % size, size):
        page = data[start : start + size]
        head = 100 if start == 0 else 0
        if page[head] != _LEAF:
            continue
        count = int.from_bytes(page[head + 3 : head + 5], "big")
        for i in range(count):
            cell = head + 8 + 2 * i
            at = int.from_bytes(page[cell : cell + 2], "big")
            try:
                row = _record(_payload(data, page, at, size, usable))
            except (IndexError, ValueError, struct.error, KeyError):
                continue  # not a cell, or not whole
            if len(row) == columns:
                yield row


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends (section 1.6)."""
    value = 0
    for i in range(8):
        byte = data[at + i]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + i + 1
    return value << 8 | data[at + 8], at + 9


def _payload(data: bytes, page: bytes, at: int, size: int, usable: int) -> bytes:
    """The content of a cell, with what spilled over to other pages."""
    length, at = _varint(page, at)
    _, at = _varint(page, at)  # the row id
    most = usable - 35
    least = (usable - 12) * 32 // 255 - 23
    if length <= most:
        local = length
    else:
        local = least + (length - least) % (usable - 4)
        local = local if local <= most else least
    if at + local > size:
        raise ValueError("beyond the page")
    parts, left = [page[at : at + local]], length - local
    following = int.from_bytes(page[at + local : at + local + 4], "big") if left else 0
    while left > 0:
        start = (following - 1) * size
        if following < 2 or start + size > len(data):
            raise ValueError("the overflow page is lost")
        parts.append(data[start + 4 : start + 4 + min(left, usable - 4)])
        left -= usable - 4
        following = int.from_bytes(data[start : start + 4], "big")
    return b"".join(parts)


def _record(payload: bytes) -> tuple[Any, ...]:
    """The values of a record (section 2.1)."""
    end, at = _varint(payload, 0)
    kinds = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        length = (kind - 12) // 2 if kind >= 12 else _SIZES[kind]
        part = payload[at : at + length]
        if len(part) != length:
            raise ValueError("the record is cut off")
        at += length
        if kind >= 12:
            values.append(part.decode() if kind % 2 else part)
        elif kind == 7:
            values.append(struct.unpack(">d", part)[0])
        elif kind in (8, 9):
            values.append(kind - 8)
        else:
            values.append(int.from_bytes(part, "big", signed=True) if kind else None)
    return tuple(values)
