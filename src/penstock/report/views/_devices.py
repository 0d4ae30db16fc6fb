"""The timeline of devices: who ran where, alone, packed, fused or spread, and where nobody ran."""

from __future__ import annotations

from typing import Any

from penstock.report.views._fold import Folded, Options, Span, clean
from penstock.report.views._style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, axis, escaped
from penstock.report.views._words import duration, time_scale

BARS = 1_500
DEVICES = 64
KINDS = {"alone": BLUE, "packed": GREEN, "fused": PURPLE, "spread": ORANGE, "failed": RED, "idle": GREY}
_NONE = "no device named"


def devices(folded: Folded, options: Options | None = None) -> dict[str, Any]:
    """Bars of every device: trial, begin and end in seconds since the start, kind, and the gaps between them.

    ``packed``: beside others on a share of the device; ``fused``: several trials in one training; ``spread``: over
    several devices; ``idle``: a session was open and nobody ran there. Where there are too many bars to be seen, those
    that touch are drawn as one, and say how many trials they stand for.
    """
    options = options or Options()
    first_s = folded.state.first_s or 0.0
    end_s = folded.state.last_s
    lanes: dict[str, list[tuple[float, float, Span, str]]] = {}
    for span in folded.spans:
        end = span.end_s if span.end_s is not None else end_s
        for share in span.shares or (None,):
            name = _NONE if share is None else share.device
            lanes.setdefault(name, []).append((span.start_s, end, span, _kind(span, share)))
    shown = sorted(lanes, key=_natural)[:DEVICES]
    bars: list[dict[str, Any]] = []
    rows = []
    open_s = sum(end - begin for begin, end in folded.sessions)
    for name in shown:
        lane = sorted(lanes[name], key=lambda bar: bar[:2])
        busy = _union([(begin, end) for begin, end, _, _ in lane])
        busy_s = sum(end - begin for begin, end in busy)
        work_s = sum((end - begin) * _part(span, name) for begin, end, span, _ in lane)
        gaps = _gaps(busy, folded.sessions)
        rows.append(
            {
                "device": name,
                "busy_s": busy_s,
                "work_s": work_s,
                "idle_s": sum(end - begin for begin, end in gaps),
                "utilisation": busy_s / open_s if open_s > 0 else None,
                "segments": len(lane),
            }
        )
        held: list[tuple[float, float, float]] = []  # until, place and height of those that share it now
        for begin, end, span, kind in lane:
            bar = _bar(name, begin - first_s, end - first_s, kind, span)
            if bar["share"] < 1 and kind != "fused":
                held = [one for one in held if one[0] > begin]
                bar["offset"] = _place(held, bar["share"])
                held.append((end, bar["offset"], bar["share"]))
            bars.append(bar)
        for begin, end in gaps:
            bars.append(_bar(name, begin - first_s, end - first_s, "idle", None))
    width_s = max(end_s - first_s, 1e-9)
    joined = bars if len(bars) <= BARS else _joined(bars, width_s, options.trial)
    cleaned: dict[str, Any] = clean(
        {
            "devices": rows,
            "hidden": max(0, len(lanes) - len(shown)),
            "bars": joined,
            "total": len(folded.spans),
            "span_s": width_s,
            "joined": len(joined) < len(bars),
        }
    )
    return cleaned


def devices_figure(data: dict[str, Any]) -> Figure:
    """A Gantt chart, one row per device."""
    scale, unit = time_scale(data["span_s"])
    traces: list[dict[str, Any]] = []
    for kind, colour in KINDS.items():
        bars = [bar for bar in data["bars"] if bar["kind"] == kind]
        if not bars:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [escaped(bar["device"]) for bar in bars],
                "base": [bar["begin_s"] / scale for bar in bars],
                "x": [(bar["end_s"] - bar["begin_s"]) / scale for bar in bars],
                "width": [0.8 * (0.35 if kind == "idle" else bar["share"]) for bar in bars],
                "offset": [-0.14 if kind == "idle" else -0.4 + 0.8 * bar["offset"] for bar in bars],
                "customdata": [bar["trial"] for bar in bars],
                "text": [escaped(bar["text"]) for bar in bars],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "opacity": 0.35 if kind == "idle" else 1.0,
                "marker": {"color": colour, "line": {"width": 0.5, "color": "rgba(128,128,128,0.6)"}},
            }
        )
    return {
        "data": traces,
        "layout": {
            "barmode": "overlay",
            "xaxis": axis(f"{unit} since the start"),
            "yaxis": axis(
                "",
                type="category",
                categoryorder="array",
                autorange="reversed",
                categoryarray=[escaped(row["device"]) for row in data["devices"]],
            ),
            "showlegend": True,
            "hovermode": "closest",
            "rows": len(data["devices"]),
        },
    }


def _bar(device: str, begin_s: float, end_s: float, kind: str, span: Span | None) -> dict[str, Any]:
    took = duration(end_s - begin_s)
    if span is None:
        return {
            "device": device, "begin_s": begin_s, "end_s": end_s, "kind": kind, "trial": None, "trials": 0,
            "share": 1.0, "offset": 0.0, "text": f"nobody for {took}",
        }  # fmt: skip
    text = f"trial {span.trial}: {took}, {span.status}"
    if kind == "fused":
        text += f", fused with {len(span.fused) - 1} more"
    if kind == "spread":
        text += f", on {len(span.shares)} devices"
    if span.attempt:
        text += f", try {span.attempt + 1}"
    share = _part(span, device)
    offset = 0.0
    if kind == "fused":
        place = span.fused.index(span.trial) if span.trial in span.fused else 0
        offset, share = place / len(span.fused) * share, share / len(span.fused)
    return {
        "device": device, "begin_s": begin_s, "end_s": end_s, "kind": kind, "trial": span.trial, "trials": 1,
        "share": share, "offset": offset, "text": text,
    }  # fmt: skip


def _place(held: list[tuple[float, float, float]], share: float) -> float:
    """Where on the device a share is drawn: the first gap, so that neighbours lie side by side."""
    at = 0.0
    for _, begin, height in sorted(held, key=lambda one: one[1]):
        if begin - at >= share - 1e-9:
            break
        at = max(at, begin + height)
    return min(at, max(0.0, 1.0 - share))


def _kind(span: Span, share: Any) -> str:
    if span.status in ("failed", "retried", "lost"):
        return "failed"
    if len(span.fused) > 1:
        return "fused"
    if len(span.shares) > 1:
        return "spread"
    return "packed" if share is not None and share.fraction < 1 else "alone"


def _part(span: Span, device: str) -> float:
    return next((min(1.0, share.fraction) for share in span.shares if share.device == device), 1.0)


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _gaps(busy: list[tuple[float, float]], sessions: list[list[float]]) -> list[tuple[float, float]]:
    """When a session was open and nobody ran."""
    gaps = []
    for begin, end in sessions:
        at = begin
        for start, stop in busy:
            if stop <= begin or start >= end:
                continue
            if start > at:
                gaps.append((at, start))
            at = max(at, stop)
        if at < end:
            gaps.append((at, end))
    return [(begin, end) for begin, end in gaps if end - begin > 0]


def _joined(bars: list[dict[str, Any]], width_s: float, selected: int | None) -> list[dict[str, Any]]:
    """Bars of one device and kind that touch, as far as a screen shows, are one; gaps too small to see are none."""
    lanes = len({bar["device"] for bar in bars})
    pixel_s = width_s / max(40.0, BARS / max(1, lanes) / 2)
    result: list[dict[str, Any]] = []
    open_bars: dict[tuple[str, str, float], dict[str, Any]] = {}
    for bar in sorted(bars, key=lambda bar: bar["begin_s"]):
        if bar["kind"] == "idle" and bar["end_s"] - bar["begin_s"] < pixel_s:
            continue
        if bar["trial"] is not None and bar["trial"] == selected:
            result.append(bar)
            continue
        key = (bar["device"], bar["kind"], bar["offset"])
        last = open_bars.get(key)
        if (
            last is not None
            and bar["begin_s"] - last["end_s"] < pixel_s
            and last["end_s"] - last["begin_s"] < 20 * pixel_s
        ):
            last["end_s"] = max(last["end_s"], bar["end_s"])
            last["trials"] += 1
            last["text"] = f"{last['trials']} segments, the first of trial {last['trial']}"
            continue
        open_bars[key] = dict(bar)
        result.append(open_bars[key])
    return result


def _natural(name: str) -> tuple[Any, ...]:
    """``cuda:10`` after ``cuda:9``."""
    digits = "".join(c if c.isdigit() else " " for c in name).split()
    return ("".join(c for c in name if not c.isdigit()), *(int(d) for d in digits[:4]))
