"""The coordinate check of a narrow twin: by layer, whether activations keep their size over the widths (Hydro, muP)."""

from __future__ import annotations

from typing import Any

from penstock.report.views._fold import Folded, clean
from penstock.report.views._style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Figure,
    axis,
    escaped,
    figure,
)

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)
_TOPIC = "surrogate"  # of the study's note on the twin


def coordinate_check(folded: Folded) -> dict[str, Any] | None:
    """The check as the journal keeps it; None for a study without a narrow twin, or before it was checked."""
    for note in folded.state.notes:
        if note.topic == _TOPIC and note.data.get("check"):
            check = note.data["check"]
            rows = [*check["layers"]]
            # An earlier release looked at no gradients.
            rows += [{**x, "layer": f"gradient of {x['layer']}"} for x in check.get("gradients", ())]
            cleaned: dict[str, Any] = clean(
                {
                    "ok": check["ok"],
                    "factor": note.data.get("factor"),
                    "steps": check["steps"],
                    "widths": [1 / divisor for divisor in check["divisors"]],
                    "names": [_width(divisor) for divisor in check["divisors"]],
                    "layers": check["layers"],
                    "rows": [[x["layer"], *x["sizes"], x["slope"], x["verdict"]] for x in rows],
                }
            )
            return cleaned | {"text": _words(cleaned)}
    return None


def coordinate_check_figure(data: dict[str, Any]) -> Figure:
    """Mean absolute activation of every layer over the width, on log axes: level lines are right ones."""
    traces: list[dict[str, Any]] = []
    fine = 0
    for layer in data["layers"]:
        wrong = layer["verdict"] != "ok"
        colour = RED if wrong else _COLOURS[fine % len(_COLOURS)]
        fine += not wrong
        name = escaped(layer["layer"])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{name}: {layer['verdict']}" if wrong else name,
                "x": data["widths"],
                "y": [size or None for size in layer["sizes"]],  # 0 has no place on a log axis
                "line": {"dash": "dash" if wrong else "solid", "color": colour},
                "marker": {"color": colour, "size": 6},
                "hovertemplate": f"{name}: %{{y:.3g}} at %{{x:.3g}} of the width<extra></extra>",
            }
        )
    ticks = {"tickvals": data["widths"], "ticktext": data["names"]}
    return figure(
        traces,
        axis("width, relative to the model's", type="log", **ticks),
        axis("mean absolute activation", type="log"),
        showlegend=True,
    )


def _width(divisor: float) -> str:
    return "1" if divisor == 1 else f"1/{divisor:g}"


def _words(data: dict[str, Any]) -> str:
    wrong = [row for row in data["rows"] if row[-1] != "ok"]
    said = (
        "every layer and gradient is in order" if not wrong else f"{len(wrong)} of {len(data['rows'])} fail"
    )
    return (
        f"After {data['steps']} steps at {len(data['widths'])} widths {said}. A right layer's line is level."
    )
