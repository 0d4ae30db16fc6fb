"""Power-limit profiles: what each limit costs in time and saves in energy, and the one that was chosen (Zeus)."""

from __future__ import annotations

from typing import Any

from penstock.report.views._fold import Folded, clean
from penstock.report.views._style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Figure, axis, escaped, figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)


def power(folded: Folded) -> dict[str, Any]:
    """Of each device and batch size the latest profile, relative to its highest limit; and why there is none."""
    profiles: dict[tuple[Any, ...], dict[str, Any]] = {}
    said: dict[str, None] = {}
    for note in folded.state.notes:
        data = note.data
        if note.topic == "power_limits":
            said[str(data.get("text", ""))] = None
        if note.topic != "power_profile":
            continue
        seen = sorted(data.get("profile", []))
        if not seen:
            continue
        top = seen[-1]
        points = [
            {
                "limit_w": limit,
                "power_w": drawn,
                "throughput": rate,
                "time": top[2] / rate if rate else None,  # of one epoch, relative to the highest limit
                "energy": (drawn / rate) / (top[1] / top[2]) if rate and top[1] and top[2] else None,
            }
            for limit, drawn, rate in seen
        ]
        key = (data.get("device"), data.get("gpus"), data.get("batch_size"))
        profiles[key] = {
            "device": data.get("device"),
            "gpus": data.get("gpus"),
            "batch_size": data.get("batch_size"),
            "rule": data.get("rule"),
            "limit_w": data.get("limit_w"),
            "highest_w": data.get("highest_w"),
            "energy_saved": data.get("energy_saved"),
            "time_saved": data.get("time_saved"),
            "applied": data.get("applied"),
            "points": points,
        }
    cleaned: dict[str, Any] = clean({"profiles": list(profiles.values()), "said": list(said)})
    return cleaned


def power_figure(data: dict[str, Any]) -> Figure:
    """Energy (full lines) and time (dotted) per epoch over the limit; the chosen limit is marked."""
    traces: list[dict[str, Any]] = []
    for colour, profile in zip(_COLOURS * len(data["profiles"]), data["profiles"], strict=False):
        size = f", batch size {profile['batch_size']}" if profile["batch_size"] else ""
        name = escaped(f"{profile['device']}{size}")
        limits = [point["limit_w"] for point in profile["points"]]
        for key, dash in (("energy", "solid"), ("time", "dot")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": key
                    == "energy",  # the dotted line of the same colour is told of in the note
                    "x": limits,
                    "y": [point[key] for point in profile["points"]],
                    "line": {"dash": dash, "color": colour},
                    "marker": {
                        "color": colour,
                        "size": [13 if limit == profile["limit_w"] else 6 for limit in limits],
                    },
                    "hovertemplate": f"%{{x:.0f}} W: %{{y:.3f}} of the {key} at the highest limit<extra></extra>",
                }
            )
    return figure(
        traces,
        axis("power limit, W"),
        axis("per epoch, relative to the highest limit"),
        showlegend=len(data["profiles"]) > 0,
    )
