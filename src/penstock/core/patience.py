"""How long a run of a recurring job that does not say how it went is waited for."""

from __future__ import annotations

LOST_S = 86_400.0
"""At least so long, unless the job says otherwise."""


def patience_s(longest_s: float, give_up_s: float | None = None) -> float:
    """``give_up_s``, or ten times the longest run so far and at least a day."""
    return max(LOST_S, 10.0 * longest_s) if give_up_s is None else give_up_s
