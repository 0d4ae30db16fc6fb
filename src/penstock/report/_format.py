"""Figures and counts as short text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.core import Counts

_STATES = ("completed", "running", "paused", "waiting", "stopped", "failed")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def plain(text: str) -> str:
    """Text of a journal as a terminal may show it: what would move the cursor, colour or worse is spelt out."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def short(value: object) -> str:
    """A value with sensible digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """``loss 0.12, accuracy 0.97``."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def counts_text(counts: Counts) -> str:
    """``27 completed, 54 stopped``."""
    return ", ".join(f"{n} {name}" for name in _STATES if (n := getattr(counts, name))) or "none yet"


def duration_text(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.4 h``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
