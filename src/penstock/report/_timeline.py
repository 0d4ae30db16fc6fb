"""Who was on which device when: makespan, utilisation, a heatmap (Fluid, Figures 2 and 6) and a Gantt chart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, final

from penstock.core import Ended, Event, Resized, SessionOpened, Share, Started
from penstock.core.errors import InvalidInput, MissingDependency
from penstock.report._format import duration_text
from penstock.store import open_store


@final
@dataclass(frozen=True, slots=True)
class Stay:
    """A part of a device that a trial held for a while; times count from the study's beginning."""

    trial: int
    device: str
    fraction: float
    begin_s: float
    end_s: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """All stays of a study. The time between two sessions, when no driver ran, is left out.

    Attributes:
        stays: In the order they ended.
        devices: All devices that were used, or named by the caller, in natural order.
        makespan_s: From the beginning to the last event.
    """

    stays: tuple[Stay, ...]
    devices: tuple[str, ...]
    makespan_s: float

    @property
    def device_s(self) -> float:
        """Device-seconds held: half a device for two seconds is one."""
        return sum(stay.fraction * (stay.end_s - stay.begin_s) for stay in self.stays)

    @property
    def busy_s(self) -> float:
        """Device-seconds in which a device had at least one trial."""
        return sum(end_s - begin_s for device in self.devices for begin_s, end_s in self._busy(device))

    @property
    def utilisation(self) -> float:
        """Which part of the devices' time had at least one trial."""
        whole_s = self.makespan_s * len(self.devices)
        return self.busy_s / whole_s if whole_s > 0 else 0.0

    def _busy(self, device: str) -> list[tuple[float, float]]:
        merged: list[tuple[float, float]] = []
        for begin_s, end_s in sorted((s.begin_s, s.end_s) for s in self.stays if s.device == device):
            if merged and begin_s <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end_s, merged[-1][1])
            else:
                merged.append((begin_s, end_s))
        return merged

    def heatmap(self, bins: int = 120) -> list[list[float]]:
        """Per device, in which part of each slice of time it had a trial, in [0, 1]."""
        if bins < 1:
            raise InvalidInput(f"bins must be at least 1, got {bins!r}.")
        rows = []
        for device in self.devices:
            row = [0.0] * bins
            for begin_s, end_s in self._busy(device):
                if self.makespan_s <= 0:
                    continue
                begin, end = begin_s / self.makespan_s * bins, end_s / self.makespan_s * bins
                for number in range(int(begin), min(bins, int(end) + 1)):
                    row[number] += max(0.0, min(end, number + 1) - max(begin, number))
            rows.append([min(1.0, part) for part in row])
        return rows


def timeline(events: Iterable[Event], devices: Sequence[str] = ()) -> Timeline:
    """The timeline of a journal's events.

    Args:
        events: In journal order.
        devices: Names of devices that may have had nothing to do, which events can't tell.
    """
    stays: list[Stay] = []
    held: dict[int, tuple[tuple[Share, ...], float]] = {}
    offset_s: float | None = None
    last_s = 0.0

    def leave(trial: int, now_s: float) -> None:
        shares, since_s = held.pop(trial, ((), 0.0))
        stays.extend(Stay(trial, s.device, s.fraction, since_s, now_s) for s in shares if now_s > since_s)

    for event in events:
        if offset_s is None:
            offset_s = event.time_s
        if isinstance(event, SessionOpened):
            for trial in list(held):
                leave(trial, last_s)  # a driver that died took its trials along
            offset_s = event.time_s - last_s
        now_s = last_s = max(last_s, event.time_s - offset_s)
        if isinstance(event, Started):
            if event.trial not in held:
                held[event.trial] = event.shares, now_s
        elif isinstance(event, Resized):
            if event.trial in held:
                leave(event.trial, now_s)
                held[event.trial] = event.shares, now_s
        elif isinstance(event, Ended):
            leave(event.trial, now_s)
    for trial in list(held):
        leave(trial, last_s)
    names = {stay.device for stay in stays} | set(devices)
    return Timeline(tuple(stays), tuple(sorted(names, key=_natural)), last_s)


def read_timeline(store: str | Path, name: str | None = None) -> Timeline:
    """The timeline of the study of that name in a store, or of its newest one."""
    opened = open_store(store, write=False)
    try:
        return timeline(event for _, event in opened.read(opened.find(name).id))
    finally:
        opened.close()


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def timeline_text(told: Timeline) -> str:
    """One line: makespan, utilisation, device time."""
    return (
        f"{len(told.devices)} devices, makespan {duration_text(told.makespan_s)}, busy {told.utilisation:.0%}, "
        f"{duration_text(told.device_s)} of device time"
    )


# --- pictures --------------------------------------------------------------------------------------------------

_LEFT, _WIDTH, _ROW = 90.0, 900.0, 16.0


def _color(trial: int) -> str:
    """Neighbouring trials look different: hues a golden angle apart."""
    return f"hsl({trial * 137.508 % 360:.0f} 60% {45 + 15 * (trial % 3)}%)"


def timeline_svg(told: Timeline, *, bins: int = 120) -> str:
    """The heatmap above the Gantt chart, as an SVG that needs nothing else."""
    scale = _WIDTH / told.makespan_s if told.makespan_s > 0 else 0.0
    parts = [f'<text x="10" y="20" font-size="14">{escape(timeline_text(told))}</text>']
    top = 40.0
    for device, row in zip(told.devices, told.heatmap(bins), strict=True):
        parts.append(
            f'<text x="{_LEFT - 6}" y="{top + _ROW - 4:.1f}" text-anchor="end">{escape(device)}</text>'
        )
        for number, part in enumerate(row):
            shade = round(255 - 195 * part)
            parts.append(
                f'<rect x="{_LEFT + number * _WIDTH / bins:.2f}" y="{top:.1f}" width="{_WIDTH / bins + 0.3:.2f}" '
                f'height="{_ROW - 1:.1f}" fill="rgb({shade},{round(shade * 0.3 + 178)},{shade})"/>'
            )
        top += _ROW
    top += 24
    for device in told.devices:
        parts.append(
            f'<text x="{_LEFT - 6}" y="{top + _ROW - 4:.1f}" text-anchor="end">{escape(device)}</text>'
        )
        for lane, stay in _lanes(told, device):
            parts.append(
                f'<rect x="{_LEFT + stay.begin_s * scale:.2f}" y="{top + lane * (_ROW - 1):.2f}" '
                f'width="{max(0.5, (stay.end_s - stay.begin_s) * scale):.2f}" '
                f'height="{max(1.0, stay.fraction * (_ROW - 1)):.2f}" fill="{_color(stay.trial)}">'
                f"<title>trial {stay.trial}: {stay.fraction:g} of {escape(device)}, {stay.begin_s:.1f} s to "
                f"{stay.end_s:.1f} s</title></rect>"
            )
        top += _ROW
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<text x="{_LEFT + share * _WIDTH:.1f}" y="{top + 14:.1f}" text-anchor="middle">'
            f"{escape(duration_text(share * told.makespan_s))}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40:.0f}" height="{top + 30:.0f}" '
        'font-family="sans-serif" font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _lanes(told: Timeline, device: str) -> list[tuple[float, Stay]]:
    """A device's stays, each with where in its row it begins, so that those that share it lie side by side."""
    placed: list[tuple[float, Stay]] = []
    for stay in sorted(
        (s for s in told.stays if s.device == device), key=lambda s: (s.begin_s, s.end_s, s.trial)
    ):
        taken = sorted((lane, other.fraction) for lane, other in placed if other.end_s > stay.begin_s)
        lane = 0.0
        for begin, height in taken:
            if begin - lane >= stay.fraction - 1e-9:
                break
            lane = max(lane, begin + height)
        placed.append((min(lane, max(0.0, 1 - stay.fraction)), stay))
    return placed


def write_timeline(told: Timeline, path: str | Path, *, bins: int = 120) -> Path:
    """Write heatmap and Gantt chart to ``path``: .html or .svg, or .png, which needs matplotlib."""
    if not isinstance(told, Timeline):
        raise InvalidInput(
            f"write_timeline takes a timeline, got {told!r}. Of a study's store: read_timeline({str(told)!r})."
            if isinstance(told, str | Path)
            else f"write_timeline takes a timeline, got {told!r}. Make one by read_timeline(store)."
        )
    path = Path(path)
    try:
        if path.suffix == ".svg":
            path.write_text(timeline_svg(told, bins=bins), encoding="utf-8")
        elif path.suffix == ".html":
            title = escape(path.stem)
            page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n{timeline_svg(told, bins=bins)}'
            path.write_text(page, encoding="utf-8")
        elif path.suffix == ".png":
            _write_png(told, path, bins)
        else:
            raise InvalidInput(
                f"Can't write a timeline to {path.name!r}: give a name that ends in .html, .svg or .png."
            )
    except OSError as error:
        raise InvalidInput(
            f"Can't write {str(path)!r}: {error.strerror}. Give a file in a folder that is there and may be written."
        ) from error
    return path


def _write_png(told: Timeline, path: Path, bins: int) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import hsv_to_rgb
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("A PNG needs matplotlib: pip install matplotlib, or write .html.") from error
    height = max(2.0, 0.22 * len(told.devices) + 0.8)
    figure = Figure(figsize=(11, 2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    extent = (0.0, max(told.makespan_s, 1e-9), len(told.devices), 0)
    above.imshow(
        told.heatmap(bins) or [[0.0]],
        aspect="auto",
        vmin=0,
        vmax=1,
        cmap="Greens",
        extent=extent,
        interpolation="nearest",
    )
    above.set_title(timeline_text(told))
    for number, device in enumerate(told.devices):
        for lane, stay in _lanes(told, device):
            hue = stay.trial * 137.508 % 360 / 360
            below.broken_barh(
                [(stay.begin_s, stay.end_s - stay.begin_s)],
                (number + lane, 0.95 * stay.fraction),
                color=hsv_to_rgb((hue, 0.55, 0.75 - 0.15 * (stay.trial % 3))),
            )
    below.set_xlim(0, extent[1])
    below.set_ylim(len(told.devices), 0)
    below.set_xlabel("seconds")
    for axis in (above, below):
        axis.set_yticks([n + 0.5 for n in range(len(told.devices))], told.devices, fontsize=7)
    figure.savefig(path, dpi=110)


__all__ = ["Stay", "Timeline", "read_timeline", "timeline", "timeline_svg", "timeline_text", "write_timeline"]
