"""Freed memory stays with a worker while it trains, and goes back to the system between trials.

glibc maps large blocks anew for each tensor and hands them back when it is freed, so that every step of a training on
a CPU touches fresh pages, hundreds of thousands in a few seconds of a small CNN's, and threads of one process wait for
each other's. A worker that keeps what it has freed takes none of that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE_BYTES = 1 << 30  # blocks from here on, a data set say, are still mapped by themselves
_NEVER_BYTES = 2**31 - 1
_TOLD = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees, unless the environment tells the allocator something else.

    Returns:
        Whether it does now; False where the C library has no such setting.
    """
    if any(environment.get(name) for name in _TOLD) or "glibc.malloc" in environment.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER_BYTES))


def give_back() -> None:
    """Hand freed memory back to the system, as far as whole pages are free."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _function(name: str) -> Any:
    """A function of the C library's allocator; None where there is none (macOS, musl)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None
