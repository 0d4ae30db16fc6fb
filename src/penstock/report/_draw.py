"""Drawing a view's figure with matplotlib, for reports that are read without a browser or a script."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import MissingDependency

_FAR = 1e300
_DASHES = {"solid": "-", "dot": ":", "dash": "--"}
_SYMBOLS = {"circle": "o", "x": "x", "circle-open": "o"}
_TITLE = {"x": 60, "y": 40}  # letters that fit along an axis
_ROW = 64  # and below the ticks of one, gaps not counted


def pyplot() -> Any:
    """matplotlib's pyplot, drawing without a screen.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg", force=False)
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependency('Static plots need matplotlib: pip install "penstock[report]".') from error
    return plt


def draw(figure: Mapping[str, Any], axes: Any) -> None:
    """Draw a figure as the views make them: lines, marks, bars, ticks, notes and dashed limits."""
    layout = figure["layout"]
    for trace in figure["data"]:
        if trace["type"] == "bar":
            _bars(trace, axes, layout.get("yaxis", {}).get("categoryarray", []))
        else:
            _scatter(trace, axes)
    for shape in layout.get("shapes", ()):
        mark = axes.axvline if shape["yref"] == "paper" else axes.axhline
        mark(shape["x0"] if shape["yref"] == "paper" else shape["y0"], color=shape["line"]["color"], ls="--")
    for note in layout.get("annotations", ()):
        axes.annotate(
            _plain(note["text"]),
            (note["x"], note["y"]),
            fontsize=7,
            ha="right" if note.get("xanchor") == "right" else "left",
            va="center",
            xytext=(note.get("xshift", 0), 0),
            textcoords="offset points",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    _frame(layout, axes)
    handles, labels = axes.get_legend_handles_labels()
    if layout.get("showlegend") and handles:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncol": 5}
        bars = any(trace.get("type") == "bar" for trace in figure["data"])  # which fill the whole panel
        beside = {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.0),
            "columnspacing": 1.0,
            "handlelength": 1.2,
        }
        above = below | beside  # the title is on the left
        place = above if bars else {"loc": "best"}
        if layout.get("annotations"):
            place = above if _crowded(layout) else below
        axes.legend(handles[:12], labels[:12], fontsize=7, frameon=False, **place)


def _crowded(layout: Mapping[str, Any]) -> bool:
    """Whether names below an axis would run into each other."""
    return sum(min(24, len(text)) for text in layout.get("xaxis", {}).get("ticktext", ())) > _ROW


def _frame(layout: Mapping[str, Any], axes: Any) -> None:
    for name in ("x", "y"):
        given = layout.get(f"{name}axis", {})
        title = _label(given.get("title", {}).get("text", ""), _TITLE[name])
        getattr(axes, f"set_{name}label")(title)
        if given.get("type") == "log":
            getattr(axes, f"set_{name}scale")("log")
        if "range" in given:
            getattr(axes, f"set_{name}lim")(*given["range"])
        elif given.get("rangemode") == "tozero":
            getattr(axes, f"set_{name}lim")(**{"left" if name == "x" else "bottom": 0})
        if str(given.get("tickformat", "")).endswith("%"):
            getattr(axes, f"{name}axis").set_major_formatter("{x:.0%}")
        if given.get("autorange") == "reversed":
            getattr(axes, f"invert_{name}axis")()
        if "tickvals" in given:
            labels = [_label(text, 24) for text in given["ticktext"]]
            crowded = name == "x" and _crowded(layout)
            slanted = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
            getattr(axes, f"set_{name}ticks")(given["tickvals"], labels, **slanted)
            getattr(axes, f"set_{name}ticks")([], minor=True)  # a log axis would label its own between them
        if given.get("visible") is False:
            getattr(axes, f"get_{name}axis")().set_visible(False)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _scatter(trace: Mapping[str, Any], axes: Any) -> None:
    x = [_plain(value) if isinstance(value, str) else _number(value) for value in trace["x"]]
    y = [_number(value) for value in trace["y"]]
    mode = trace.get("mode", "lines")
    line, marker = trace.get("line", {}), trace.get("marker", {})
    label = (_plain(trace.get("name", "")) or None) if trace.get("showlegend", True) else None
    opacity = trace.get("opacity", 1.0)
    if "lines" in mode:
        step = {"drawstyle": "steps-post"} if line.get("shape") == "hv" else {}
        axes.plot(
            x,
            y,
            color=line.get("color"),
            lw=0.6 * line.get("width", 2),
            ls=_DASHES.get(line.get("dash", "solid"), "-"),
            alpha=opacity,
            label=label,
            **step,
        )
        label = None
    if "markers" in mode:
        size, colour, symbol = marker.get("size", 6), marker.get("color"), marker.get("symbol", "circle")
        sizes = [0.6 * s * s for s in size] if isinstance(size, Sequence) else 0.6 * size * size
        options: dict[str, Any] = {"c": colour, "alpha": marker.get("opacity", opacity), "s": sizes}
        if isinstance(colour, list):
            from matplotlib.colors import LinearSegmentedColormap

            options["cmap"] = LinearSegmentedColormap.from_list(
                "figure", [tuple(stop) for stop in marker["colorscale"]]
            )
        if symbol == "circle-open":
            options |= {"c": "none", "edgecolors": colour}
        drawn = axes.scatter(x, y, marker=_SYMBOLS.get(symbol, "o"), label=label, lw=1.0, **options)
        if marker.get("showscale"):
            axes.figure.colorbar(drawn, ax=axes, label=marker["colorbar"]["title"]["text"])
    if "error_y" in trace:
        axes.errorbar(x, y, yerr=trace["error_y"]["array"], fmt="none", ecolor=trace["error_y"]["color"])


def _bars(trace: Mapping[str, Any], axes: Any, rows: Sequence[str]) -> None:
    colour = trace["marker"]["color"]
    label, opacity = _plain(trace.get("name", "")), trace.get("opacity", 1.0)
    if trace.get("orientation") != "h":
        x = trace["x"]
        names = [f"{b}\n{a}" for a, b in zip(*x, strict=True)] if x and isinstance(x[0], list) else x
        axes.bar([_plain(name) for name in names], [v or 0.0 for v in trace["y"]], color=colour, label=label)
        return
    names = [_plain(name) for name in trace["y"]]
    if "base" not in trace:
        bars = axes.barh(range(len(names)), trace["x"], color=colour, label=label)
        axes.set_yticks(range(len(names)), [_label(name) for name in trace["y"]])
        axes.bar_label(bars, [_plain(text) for text in trace.get("text", ())], fontsize=7, padding=2)
        return
    known = {_plain(name): i for i, name in enumerate(rows)}
    at = [known[name] + o + w / 2 for name, o, w in zip(names, trace["offset"], trace["width"], strict=True)]
    axes.barh(
        at, trace["x"], trace["width"], left=trace["base"], color=colour, label=label, alpha=opacity, lw=0
    )
    axes.set_yticks(list(known.values()), [_label(name) for name in rows])


def _number(value: Any) -> Any:
    """None as a gap; matplotlib can't make ticks where the difference of two numbers is infinite."""
    if value is None:
        return float("nan")
    return max(-_FAR, min(_FAR, value)) if isinstance(value, float) else value


def _label(text: str, most: int = 32) -> str:
    """Text of at most so many letters, both ends kept: what a long name takes, its panel lacks."""
    whole = html.unescape(str(text))
    if len(whole) > most:
        whole = f"{whole[: (most - 1) // 2]}…{whole[-(most // 2) :]}"
    return whole.replace("$", r"\$")


def _plain(text: str) -> str:
    """Text as it was before it was escaped for Plotly; a dollar sign is no formula."""
    return html.unescape(str(text)).replace("$", r"\$")
