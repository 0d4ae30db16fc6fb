"""How figures look: colours that work in light and dark and for the colour-blind, axes, and the empty figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from penstock.report.views._thin import wide

Figure: TypeAlias = dict[str, Any]
"""``{"data": [trace, ...], "layout": {...}}`` in Plotly's terms, JSON-able."""

# Okabe and Ito's palette: told apart by the colour-blind, and visible on white and on near-black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#c9b600",
)
GREY = "#8a8f98"

STATUS = {
    "completed": GREEN,
    "running": BLUE,
    "paused": SKY,
    "waiting": GREY,
    "stopped": ORANGE,
    "failed": RED,
}

SCALE = (
    "#8a5fb8",
    "#5a78c4",
    "#21918c",
    "#5ec962",
    "#c9c11f",
)  # viridis, its ends visible on black and on white


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with a title, which may be a user's word."""
    return {"title": {"text": escaped(title)}, "automargin": True, **options}


def figure(traces: list[dict[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any) -> Figure:
    """A figure of traces with two axes."""
    return {
        "data": traces,
        "layout": {
            "xaxis": dict(x),
            "yaxis": dict(y),
            "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
            "hovermode": "closest",
            **layout,
        },
    }


def log_or_linear(values: list[float]) -> dict[str, Any]:
    """A log axis where values are positive and span more than two decades."""
    known = [value for value in values if value is not None]
    if not wide(known):
        return {}
    # 1, 2, 5, 10, ... as long as there is room for so many labels.
    return (
        {"type": "log", "dtick": "D2"}
        if math.log10(max(known)) - math.log10(min(known)) <= 5
        else {"type": "log"}
    )


def escaped(text: str) -> str:
    """Text for Plotly's labels, which read a few HTML tags: none of the user's is one."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
