"""A report in one file: HTML without scripts, Markdown, JSON, or a picture."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidInput, StoreCorrupt
from penstock.goal import ranked
from penstock.report import views
from penstock.report._draw import draw, pyplot
from penstock.report._journal import fold_store, jobs_of, told_of
from penstock.report._read import besides_text, limits_text
from penstock.report.views import Figure, Folded, Options
from penstock.report.views._words import brief, duration, energy, number
from penstock.store import open_store

FORMATS = (".html", ".md", ".json", ".png")
_TOP = 20


def write_report(store: str | Path, target: str | Path, name: str | None = None) -> Path:
    """Write a study's report; the file's ending says which kind.

    Of a store that has no study but recurring jobs, the report is about these.

    Args:
        store: A path or URL.
        target: ``report.html`` (self-contained, no scripts), ``.md``, ``.json`` or ``.png``.
        name: The study's name; None: the newest.

    Raises:
        InvalidInput: Another ending, or the file can't be written.
        MissingDependency: Plots need matplotlib.
    """
    path = Path(target)
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise InvalidInput(f"A report ends in {', '.join(FORMATS)}; got {path.name!r}.")
    folded, jobs = fold_store(store, name)
    if kind == ".json":
        content = json.dumps(report_json(folded, jobs), indent=1, allow_nan=False, default=str).encode()
    elif kind == ".md":
        content = report_markdown(folded, jobs).encode()
    elif kind == ".html":
        content = report_html(folded, jobs).encode("utf-8", "replace")
    else:
        content = report_png(folded, jobs)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"Can't write {str(path)!r}: {error.strerror}.") from error
    return path


def jobs_alone(store: str | Path) -> tuple[str, dict[str, Any]] | None:
    """What is to be told, as text and as data, of a store that has recurring jobs and no study; None of any other.

    Args:
        store: A path or URL.
    """
    opened = open_store(store, write=False)
    try:
        jobs = {} if opened.studies() else jobs_of(opened)
    finally:
        opened.close()
    if not jobs:
        return None
    text = "\n".join(f"{name}: {told}" for name, told in headline(None, jobs))
    return text, report_json(None, jobs)


def report_json(folded: Folded | None, jobs: Mapping[str, Any]) -> dict[str, Any]:
    """All views as data."""
    if folded is None:
        return {"recurring": _jobs_json(jobs)}
    return {
        "overview": views.overview(folded),
        "history": views.history(folded),
        "curves": views.curves(folded),
        "table": views.table(folded, Options(limit=1000)),
        "pareto": views.pareto(folded),
        "importance": views.importance(views.importance_input(folded)),
        "parallel": views.parallel(folded),
        "devices": views.devices(folded),
        "power": views.power(folded),
        "sm2": views.sm2(folded),
        "coordinate_check": views.coordinate_check(folded),
        "limits": views.limits(folded),
        "recurring": _jobs_json(jobs),
        "log": views.log(folded),
    }


def _jobs_json(jobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"job": name, "problem": told} if isinstance(told, str) else told
        for name, told, _ in _jobs_told(jobs)
    ]


def _jobs_told(jobs: Mapping[str, Any]) -> list[tuple[str, dict[str, Any] | str, list[Figure]]]:
    """Of every recurring job its name, what is to be told of it, or why that can't be read, and its figures."""
    found: list[tuple[str, dict[str, Any] | str, list[Figure]]] = []
    for name, value in jobs.items():
        try:
            found.append((name, *told_of(name, value)))
        except StoreCorrupt as error:  # the report of everything else is not lost for it
            found.append((name, str(error), []))
    return found


def _title(folded: Folded | None) -> str:
    return "Recurring jobs" if folded is None else folded.name


def figures(folded: Folded | None, jobs: Mapping[str, Any]) -> list[tuple[str, str, Figure]]:
    """Title, caption and figure of every view that has something to show."""
    found = [] if folded is None else _study_figures(folded)
    for name, told, drawn in _jobs_told(jobs):
        if isinstance(told, str):
            continue
        costs, beliefs = drawn
        how = f"Cost of each run with eta {told['eta']:g}" + (
            f", policy {told['policy']}." if told["policy"] else "."
        )
        runs = "Mean cost of each batch size, from the runs that reached the target."
        found += [(f"Recurring job {name}", how, costs), (f"Beliefs of {name}", runs, beliefs)]
    return [each for each in found if each[2]["data"]]


def _study_figures(folded: Folded) -> list[tuple[str, str, Figure]]:
    found: list[tuple[str, str, Figure]] = []
    history = views.history(folded)
    found.append(
        ("History", "Every trial at its latest report, and the best so far.", views.history_figure(history))
    )
    curves = views.curves(folded)
    shown = f"{len(curves['curves']):,} of {curves['total']:,} trials."
    found.append(("Learning curves", shown, views.curves_figure(curves)))
    pareto = views.pareto(folded)
    caption = f"On the front is who no other {pareto['who']} beats in {', '.join(pareto['axes'])}."
    found.append(("Pareto front", caption, views.pareto_figure(pareto)))
    importance = views.importance(views.importance_input(folded))
    caption = f"{importance['method']} over {importance['trials']:,} trials."
    found.append(("Importance", caption, views.importance_figure(importance)))
    parallel = views.parallel(folded)
    found.append(
        ("Parallel coordinates", f"{len(parallel['lines']):,} trials.", views.parallel_figure(parallel))
    )
    devices = views.devices(folded)
    found.append(("Devices", f"{devices['total']:,} segments.", views.devices_figure(devices)))
    power = views.power(folded)
    found.append(("Power limits", "Relative to the highest limit.", views.power_figure(power)))
    rounds = views.sm2(folded)
    if rounds is not None:
        found.append(
            ("SM2 rounds", f"alpha {rounds['alpha']:g}, beta {rounds['beta']:g}.", views.sm2_figure(rounds))
        )
    found.append(("Limits", "Dashed: the limits.", views.limits_figure(views.limits(folded))))
    twin = views.coordinate_check(folded)
    if twin is not None:
        found.append(("Coordinate check", twin["text"], views.coordinate_check_figure(twin)))
    return found


def headline(folded: Folded | None, jobs: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """What was found and what it cost, as pairs of words; recurring jobs are named where there is no study."""
    broken = [("problem", told) for _, told, _ in _jobs_told(jobs or {}) if isinstance(told, str)]
    if folded is None:
        known = [(name, told) for name, told, _ in _jobs_told(jobs or {}) if not isinstance(told, str)]
        return [(f"job {name}", _job_words(told)) for name, told in known] + broken
    told = views.overview(folded)
    rows = [("goal", told["goal"])]
    if told["best"] is not None:
        metrics = {o["metric"]: told["best"]["metrics"].get(o["metric"]) for o in told["objectives"]}
        best = ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
        rows.append(("best", f"{best} (trial {told['best']['trial']}, {told['best']['epochs']} epochs)"))
        config = ", ".join(f"{key} = {number(value)}" for key, value in told["best"]["config"].items())
        rows.append(("configuration", config))
    counts = [f"{told['trials'][s]:,} {s}" for s in told["trials"] if s != "total" and told["trials"][s]]
    rows.append(("trials", f"{told['trials']['total']:,}: {', '.join(counts) or 'none yet'}"))
    limits = limits_text(folded.spec, folded.state)
    if limits is not None:
        rows.append(("limits", limits))
    rows.append(("time", f"{duration(told['spent_s'])}, {duration(told['busy_s'])} of training"))
    drawn = "not metered" if told["energy"] is None else told["energy"]["text"]
    rows.append(("energy", drawn + besides_text(folded.state)))
    if told["co2"] is not None:
        rows.append(("CO2e", f"{told['co2']['text']} ({told['grid']['where']})"))
    if told["cost"] is not None:
        rows.append(("money", told["cost"]["text"]))
    if told["saved"] is not None:
        saved = told["saved"]
        joules = None if saved["energy"] is None else saved["energy"]["value"]
        less = f"{energy(joules)}, " if joules is not None else ""
        rows.append(("saved", f"{less}{saved['epochs']:,} epochs against {saved['baseline']} (estimated)"))
    rows.append(("scheduler", told["scheduler"]))
    if told["ended"] is not None:
        rows.append(("ended", ": ".join(filter(None, (told["ended"]["reason"], told["ended"]["detail"])))))
    if told["problem"]:
        rows.append(("problem", told["problem"]))
    return [(name, str(text)) for name, text in rows] + broken


def _job_words(told: Mapping[str, Any]) -> str:
    """A recurring job in one line."""
    runs = [run for run in told["runs"] if run["time_s"] is not None]  # counted as by "recur --status"
    waited_for = [
        f", {number:,} {state}"
        for state in ("under way", "lost")
        if (number := sum(run["state"] == state for run in told["runs"]))
    ]
    reached = sum(run["state"] == "reached" for run in runs)
    spent = [run["energy_j"] for run in runs if run["energy_j"] is not None]
    drawn = f"; {energy(sum(spent))} in all" if spent else ""
    known = [arm for arm in told["arms"] if arm["mean"] is not None]
    best = min(known, key=lambda arm: arm["mean"])["batch_size"] if known else None
    cheapest = "" if best is None else f"; batch size {best} is cheapest so far"
    count = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
    return f"{count}, {reached:,} reached the target{''.join(waited_for)}{drawn}{cheapest}"


def report_html(folded: Folded | None, jobs: Mapping[str, Any]) -> str:
    """One file: text, tables and pictures within it; no scripts, nothing loaded from elsewhere."""
    said = html.escape
    parts = [f"<h1>{said(_title(folded))}</h1>", "<table class=pairs>"]
    parts += [f"<tr><th>{said(name)}</th><td>{said(text)}</td></tr>" for name, text in headline(folded, jobs)]
    parts.append("</table>")
    for title, caption, figure in figures(folded, jobs):
        picture = base64.b64encode(_picture([(title, figure)], 9.5)).decode()
        parts.append(
            f"<h2>{said(title)}</h2><img alt='{said(title, quote=True)}' src='data:image/png;base64,{picture}'>"
            f"<p>{said(caption)}</p>"
        )
    for title, columns, rows in _tables(folded, jobs):
        if not rows:
            continue
        head = "".join(f"<th>{said(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{said(number(value))}</td>" for value in row) + "</tr>" for row in rows
        )
        parts.append(f"<h2>{said(title)}</h2><div class=wide><table><tr>{head}</tr>{body}</table></div>")
    return _PAGE.format(title=said(_title(folded)), body="\n".join(parts))


def fragment(folded: Folded) -> str:
    """The headline as a table, for notebooks; everything escaped."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in headline(folded)
    )
    return f"<div><b>study {html.escape(folded.name)}</b><table>{rows}</table></div>"


def report_markdown(folded: Folded | None, jobs: Mapping[str, Any]) -> str:
    """Headline and tables as Markdown, without pictures."""
    lines = [f"# {_cell(_title(folded))}", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(text)} |" for name, text in headline(folded, jobs)]
    if folded is not None:
        found = views.importance(views.importance_input(folded))
        if found["importance"]:
            shares = [[name, f"{value:.1%}"] for name, value in found["importance"].items()]
            title = f"Importance for {found['metric']} ({found['method']})"
            lines += _markdown(title, ["hyperparameter", "share"], shares)
        rows = [
            [row["device"], duration(row["busy_s"]), f"{row['utilisation'] or 0:.0%}", row["segments"]]
            for row in views.devices(folded)["devices"]
        ]
        lines += _markdown("Devices", ["device", "busy", "of the sessions", "segments"], rows)
    for title, columns, rows in _tables(folded, jobs):
        lines += _markdown(title, columns, rows)
    return "\n".join(lines) + "\n"


def _markdown(title: str, columns: list[str], rows: list[list[Any]]) -> list[str]:
    """A table under its title; nothing where it is empty."""
    if not rows:
        return []
    lines = ["", f"## {_cell(title)}", "", f"| {' | '.join(map(_cell, columns))} |"]
    lines.append("|---" * len(columns) + "|")
    return lines + [f"| {' | '.join(_cell(number(value)) for value in row)} |" for row in rows]


def _tables(folded: Folded | None, jobs: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Title, columns and rows of every table."""
    tables: list[tuple[str, list[str], list[list[Any]]]] = []
    if folded is not None:
        tables = [
            ("Best trials", *_best_rows(folded)),
            ("Pareto front", *_front(folded)),
            ("Failures", *_failures(folded)),
            ("Coordinate check", *_coordinates(folded)),
        ]
    for name, told, _ in _jobs_told(jobs):
        if not isinstance(told, str):
            arms = [[arm["batch_size"], arm["runs"], arm["reached"], arm["mean"]] for arm in told["arms"]]
            columns = ["batch size", "runs", "reached", "mean cost, J"]
            tables.append((f"Recurring job {name}", columns, arms))
    if folded is not None:
        tables.append(("Log", *_log(folded)))
    return tables


def report_png(folded: Folded | None, jobs: Mapping[str, Any]) -> bytes:
    """All figures in one picture under the headline."""
    head = "\n".join(f"{name}: {_cut(text)}" for name, text in headline(folded, jobs))
    return _picture(
        [(title, each) for title, _, each in figures(folded, jobs)], 14.0, f"{_title(folded)}\n{head}"
    )


def _picture(shown: list[tuple[str, Figure]], width: float, head: str = "") -> bytes:
    plt = pyplot()
    columns = 1 if len(shown) == 1 else 2
    rows = max(1, math.ceil(len(shown) / columns))
    top = 0.2 + 0.18 * (head.count("\n") + 1) if head else 0.0
    height = rows * (4.0 if columns == 1 else 3.8) + top
    drawn = plt.figure(figsize=(width, height), layout="constrained")
    try:
        panels = drawn.subfigures(2, 1, height_ratios=[top, height - top]) if head else [None, drawn]
        if head:
            panels[0].text(0.01, 0.95, head.replace("$", r"\$"), va="top", fontsize=10, wrap=True)
        if shown:
            axes = panels[1].subplots(rows, columns, squeeze=False)
            places = [one for row in axes for one in row]
            for place, (title, figure) in zip(places, shown, strict=False):
                draw(figure, place)
                if head:
                    place.set_title(title.replace("$", r"\$"), fontsize=11, loc="left")
            for place in places[len(shown) :]:
                place.set_visible(False)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()
    finally:
        plt.close(drawn)


def _best_rows(folded: Folded) -> tuple[list[str], list[list[Any]]]:
    objective = folded.goal.objectives[folded.goal.quality or 0]
    best_first = [each.id for each in ranked(folded.goal, folded.state.trials.values()) if each.is_target]
    violating = {record.id for record in folded.state.trials.values() if record.violated}
    # Trained models come before trials of their narrow twin, and what violates a limit is no result.
    most = 1000 if best_first or violating else _TOP
    options = Options(limit=most, filter="status != failed", descending=objective.maximize)
    columns = views.table(folded, Options(limit=1))["columns"]
    for name in (objective.metric, f"metric.{objective.metric}"):
        if name in columns:
            page = views.table(
                folded,
                Options(limit=most, filter=options.filter, sort=name, descending=objective.maximize),
            )
            break
    else:
        page = views.table(folded, options)
    place, at = {trial: i for i, trial in enumerate(best_first)}, page["columns"].index("trial")
    kept = [row for row in page["rows"] if row[at] not in violating]
    rows = sorted(kept, key=lambda row: place.get(row[at], len(place)))
    return page["columns"], rows[:_TOP]


def _front(folded: Folded) -> tuple[list[str], list[list[Any]]]:
    """The trials that no other one beats, the best quality first."""
    told = views.pareto(folded)
    names, quality = told["axes"], told["quality"]
    sign = -1.0 if told["maximize"][names.index(quality)] else 1.0
    points = [point for point in told["points"] if point["front"]]
    points.sort(key=lambda point: (sign * point["values"][quality], point["trial"]))
    rows = []
    for point in points[:_TOP]:
        config = brief(folded.state.trials[point["trial"]].config)
        rows.append([point["trial"], *(point["values"][name] for name in names), config])
    return ["trial", *names, "configuration"], rows


def _failures(folded: Folded) -> tuple[list[str], list[list[Any]]]:
    """Why trials failed, the commonest reason first."""
    errors = views.overview(folded)["errors"]
    return ["trials", "such as", "reason"], [
        [each["count"], each["trial"], _cut(each["reason"])] for each in errors
    ]


def _coordinates(folded: Folded) -> tuple[list[str], list[list[Any]]]:
    """The verdict on every layer and gradient, with its size at each width."""
    twin = views.coordinate_check(folded)
    if twin is None:
        return [], []
    rows = []
    for layer, *sizes, slope, verdict in twin["rows"]:
        shown = ["-" if size is None else size for size in sizes]
        rows.append([layer, *shown, "-" if slope is None else f"{slope:+.2f}", verdict])
    return ["layer", *twin["names"], "slope", "verdict"], rows


def _log(folded: Folded) -> tuple[list[str], list[list[Any]]]:
    """The latest events but reports, of which there are too many."""
    kinds = ",".join(kind for kind in views.log(folded, Options(limit=1))["kinds"] if kind != "reported")
    lines = views.log(folded, Options(filter=kinds, limit=_TOP))["lines"]
    rows = [
        [
            f"+{duration(line['since_s'])}",
            line["kind"].replace("_", " "),
            "" if line["trial"] is None else line["trial"],
            _cut(line["text"]),
        ]
        for line in lines
    ]
    return ["since the start", "event", "trial", "what"], rows


def _cell(text: str) -> str:
    """Text within a Markdown table: no pipes, line ends or markup of the user's."""
    escaped = html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ").replace("\r", " ")
    return escaped.replace("`", "\\`").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_")


def _cut(text: str) -> str:
    return text if len(text) <= 180 else text[:177] + "..."


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 24px auto; padding: 0 16px; color: #1b1f24; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid #e3e6ea; vertical-align: top; }}
td {{ overflow-wrap: anywhere; }} .wide {{ overflow-x: auto; font-size: 13px; }} .wide td {{ white-space: nowrap; }}
img {{ max-width: 100%; height: auto; }} p {{ color: #5a6370; margin: 0 0 18px; }}
</style></head><body>
{body}
</body></html>
"""
