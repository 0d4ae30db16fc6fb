"""Predicted against actual, as a picture (HyperPower Figure 5): plain SVG, so that nothing needs to be installed."""

from __future__ import annotations

import math
from html import escape

from penstock.predict._bundle import Predictors

_SIDE, _GAP = 300.0, 70.0


def scatter_svg(predictors: Predictors) -> str:
    """One panel per quantity: every sample, predicted by the others, against what was measured."""
    panels = []
    for number, name in enumerate(predictors):
        model = predictors[name]
        actual, predicted = model.residuals()
        pairs = [(float(a), float(p)) for a, p in zip(actual, predicted, strict=True)]
        doubt = "" if math.isnan(model.rmspe) else f", RMSPE {100 * model.rmspe:.1f}%"
        panels.append(_panel(pairs, f"{name}{doubt} ({model.source})", _GAP + number * (_SIDE + _GAP)))
    width = _GAP + len(panels) * (_SIDE + _GAP)
    title = f"{predictors.task or 'task'} on {predictors.device or 'device'}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{_SIDE + 120:.0f}" '
        f'font-family="sans-serif" font-size="12">\n<text x="{_GAP}" y="20" font-size="14">{escape(title)}</text>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(pairs: list[tuple[float, float]], title: str, left: float) -> str:
    low = min(min(pair) for pair in pairs)
    high = max(max(pair) for pair in pairs)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room
    top = 50.0

    def place(value: float) -> float:
        return _SIDE * (value - low) / (high - low)

    marks = [
        f'<circle cx="{left + place(a):.1f}" cy="{top + _SIDE - place(p):.1f}" r="3" fill="#c33" fill-opacity="0.6"/>'
        for a, p in pairs
    ]
    ticks = []
    for share in (0.0, 0.5, 1.0):
        at, label = _SIDE * share, f"{low + share * (high - low):.3g}"
        ticks.append(f'<text x="{left + at:.1f}" y="{top + _SIDE + 16}" text-anchor="middle">{label}</text>')
        ticks.append(f'<text x="{left - 6}" y="{top + _SIDE - at + 4:.1f}" text-anchor="end">{label}</text>')
    return "\n".join(
        [
            f'<text x="{left}" y="{top - 10}">{escape(title)}</text>',
            f'<rect x="{left}" y="{top}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>',
            f'<line x1="{left}" y1="{top + _SIDE}" x2="{left + _SIDE}" y2="{top}" stroke="#36c"/>',
            *marks,
            *ticks,
            f'<text x="{left + _SIDE / 2}" y="{top + _SIDE + 34}" text-anchor="middle">actual</text>',
        ]
    )
