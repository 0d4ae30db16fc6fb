"""Packing a study's parts for the store, so that a resume needs nothing but the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidInput, StoreError
from penstock.execute._ship import blame, dumps

_MOST_BYTES = 990_000_000  # SQLite takes a billion at once, PostgreSQL a little more


def pack(parts: dict[str, Any]) -> bytes:
    """The parts as a pickle; functions of scripts and notebooks travel by value.

    Raises:
        InvalidInput: A part can't be pickled, or is more than a store takes; says which.
    """
    try:
        blob = dumps(parts)
        if len(blob) <= _MOST_BYTES:
            return blob
    except Exception as error:
        for name, part in parts.items():
            try:
                dumps(part)
            except Exception as cause:
                raise InvalidInput(
                    f"The study's {name} can't be shipped to workers nor kept for a resume: {blame(part, cause)}. Make "
                    "what it holds (a lock, an open file, a connection, a generator) inside the training function."
                ) from error
        raise
    sizes = {name: len(dumps(part)) for name, part in parts.items()}
    name = max(sizes, key=lambda each: sizes[each])
    raise InvalidInput(
        f"The study's {name} is {sizes[name] / 1e9:.3g} GB with the data that it holds, and a store takes less than 1. "
        "Load the data inside the training function; a pk.Task takes a function for data=."
    )


def unpack(blob: bytes | None, folder: Path | None, *, given: Any = None) -> dict[str, Any]:
    """The parts of a pickle.

    Raises:
        StoreError: They can't be restored; says what is missing.
    """
    import cloudpickle

    if blob is None:
        raise StoreError("This study was stored without its training function: it can be read, not resumed.")
    try:
        parts: dict[str, Any] = cloudpickle.loads(blob)
    except Exception as error:
        lacks = isinstance(error, ModuleNotFoundError)
        elsewhere = ", or name the folder of that module in PYTHONPATH" if lacks else ""
        raise StoreError(
            f"The stored training function can't be restored here: {type(error).__name__}: {error}. Resume in the "
            f"environment and folder where the study was made{elsewhere}."
        ) from error
    if given is not None:
        parts["work"] = given
    return parts
