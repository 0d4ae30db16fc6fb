"""Figures in words: three or four digits and the unit that people use."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> str:
    """Four digits; integers as they are, with separators."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        rounded = float(f"{value:.4g}")
        return f"{rounded:,.0f}" if 1e4 <= abs(rounded) < 1e9 else f"{rounded:.4g}"
    return str(value)


def energy(joules: float | None) -> str:
    """``250 J``, ``12.3 Wh``, ``4.5 kWh``."""
    if joules is None:
        return "not metered"
    if abs(joules) < 3600:
        return f"{joules:.3g} J"
    wh = joules / 3600
    return f"{wh:.3g} Wh" if wh < 1000 else f"{wh / 1000:,.3g} kWh"


def duration(seconds: float | None) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds is None:
        return "not known"
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def brief(config: Any, most: int = 6) -> str:
    """A configuration in one line."""
    items = [f"{name}={number(value)}" for name, value in dict(config).items()]
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def energy_scale(joules: float) -> tuple[float, str]:
    """By what to divide joules up to so many, and the unit then."""
    if joules < 3600:
        return 1.0, "J"
    return (3600.0, "Wh") if joules < 3.6e6 else (3.6e6, "kWh")


def time_scale(seconds: float) -> tuple[float, str]:
    """By what to divide seconds up to so many, and the unit then."""
    if seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if seconds < 18_000 else (3600.0, "h")
