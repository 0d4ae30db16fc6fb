"""``penstock replay``: recurring jobs replayed from traces under several policies."""

from __future__ import annotations

import math
import textwrap
from typing import Annotated, Any

import typer

from penstock.cli._json import json_text
from penstock.core.errors import InvalidInput


def replay(
    train: Annotated[
        str, typer.Option("--train", help="summary_train.csv: epochs to target of recorded runs.")
    ],
    power: Annotated[str, typer.Option("--power", help="summary_power_GPU.csv: time and power per epoch.")],
    workload: Annotated[list[str] | None, typer.Option("--workload", help="A dataset; default: all.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="ours, zeus, default, grid or oracle; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Replays per policy.")] = 20,
    eta: Annotated[
        float, typer.Option("--eta", min=0.0, max=1.0, help="0: time alone; 1: energy alone.")
    ] = 0.5,
    beta: Annotated[float, typer.Option("--beta", min=1.0, help="Early-stopping factor.")] = 2.0,
    window: Annotated[int | None, typer.Option("--window", min=1, help="Observations to use; all.")] = None,
    recurrences: Annotated[
        int | None, typer.Option("--recurrences", min=1, help="Default: 2 |B| |P|.")
    ] = None,
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Recurrences under way at once.")] = 1,
    target: Annotated[list[str] | None, typer.Option("--target", help="NAME=METRIC, another target.")] = None,
    default: Annotated[
        list[str] | None, typer.Option("--default", help="NAME=BATCH_SIZE, another default.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also sweep eta from 0 to 1.")] = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals", help="Replay overlapping jobs: a CSV of group,start_time,end_time, or 'synthetic'."
        ),
    ] = None,
    plot: Annotated[str | None, typer.Option("--plot", help="Write plots to this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay recurring jobs from recorded traces: what would each policy have cost?"""
    from penstock.recurring._traces import read_workloads

    names = policy or ["ours", "zeus", "default", "oracle"]
    if arrivals is not None:
        ignored = {
            "--plot": plot is not None,
            "--sweep": sweep,
            "--recurrences": recurrences is not None,
            "--in-flight": in_flight != 1,
        }
        refused = ", ".join(option for option, given in ignored.items() if given)
        if refused:
            raise InvalidInput(
                f"{refused} can't be combined with --arrivals, which tells itself what recurs when: leave it out."
            )
    workloads = read_workloads(
        train,
        power,
        workload or (),
        targets=_pairs(target, "--target"),
        defaults=_sizes(_pairs(default, "--default")),
    )
    if arrivals is not None:
        result = _overlapping(arrivals, workloads, names, seeds, eta, beta, window)
        print(json_text(result) if as_json else _overlap_text(result))
        return
    from penstock.recurring._study import compare, eta_sweep, pareto

    if plot is not None:
        from penstock.recurring._plots import plot_folder

        plot_folder(plot)  # known to work before anything is replayed
    rows = []
    for one in workloads:
        summary, _ = compare(
            one,
            names,
            seeds=seeds,
            eta=eta,
            beta=beta,
            window=window,
            recurrences=recurrences,
            in_flight=in_flight,
        )
        summary["pareto"] = pareto(one)
        steps = eta_sweep(one, names[0], seeds=min(seeds, 3), beta=beta) if sweep or plot else []
        summary["eta_sweep"] = steps
        rows.append(summary)
        if plot is not None:
            from penstock.recurring._plots import plot_workload

            summary["plots"] = [str(path) for path in plot_workload(one, summary, steps, plot)]
        if not as_json:
            print(_text(summary))
    if as_json:
        print(json_text({"workloads": rows, "totals": _totals(rows, names)}))
    elif len(rows) > 1:
        print(_totals_text(_totals(rows, names)))


def _pairs(items: list[str] | None, option: str) -> dict[str, float]:
    found = {}
    for item in items or ():
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not math.isfinite(number):
            raise InvalidInput(f"{option} takes NAME=NUMBER, e.g. cifar100=0.6, got {item!r}.")
        found[name] = number
    return found


def _sizes(pairs: dict[str, float]) -> dict[str, int]:
    for name, value in pairs.items():
        if value < 1 or value != int(value):
            raise InvalidInput(
                f"--default takes a whole number of at least 1, e.g. cifar100=1024, got {name}={value:g}."
            )
    return {name: int(value) for name, value in pairs.items()}


def _totals(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    from penstock.recurring._study import geometric_mean

    totals: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        regrets = [row["policies"][name]["regret"] for row in rows]
        totals[name] = {"regret_sum": sum(regrets)}
        if "zeus" in names:
            # Nothing is a multiple of no regret (which may come out below zero by luck): such workloads don't count.
            zeus = [row["policies"]["zeus"]["regret"] for row in rows]
            ratios = [mine / theirs for mine, theirs in zip(regrets, zeus, strict=True) if theirs > 0]
            totals[name]["regret_vs_zeus"] = geometric_mean(ratios) if ratios else None
            totals[name]["worst_vs_zeus"] = max(ratios, default=None)
    return totals


def _text(summary: dict[str, Any]) -> str:
    best = summary["optimum"]
    lines = [
        f"{summary['workload']} ({summary['network']}, {summary['optimizer']}, target {summary['target']:g}): default "
        f"{summary['default']}, optimum batch size {best['batch_size']} at {best['limit_w']:g} W, "
        f"{summary['recurrences']} recurrences, {summary['seeds']} seeds"
    ]
    lines += [f"  note: {note}" for note in summary["notes"]]
    lines.append(f"  {'policy':8} {'regret/C*':>18} {'last-5 ETA':>11} {'last-5 TTA':>11}  final choices")
    for name, row in summary["policies"].items():
        finals = ", ".join(f"{f['batch_size']}@{f['limit_w']:g}W x{f['seeds']}" for f in row["final"][:3])
        regret = f"{row['regret']:.2f} +- {row['regret_spread']:.2f}"
        lines.append(
            f"  {name:8} {regret:>18} {row['energy_vs_default']:>10.1%} {row['time_vs_default']:>10.1%}  {finals}"
        )
    total = len(next(iter(summary["policies"].values()))["curve"])
    marks = sorted({max(1, round(total * quarter / 4)) for quarter in (1, 2, 3, 4)})
    lines.append(f"  cumulative regret/C* after {', '.join(map(str, marks))} recurrences")
    for name, row in summary["policies"].items():
        lines.append(f"  {name:8} " + " ".join(f"{row['curve'][at - 1]:>8.2f}" for at in marks))
    lines.append("  search path of the first seed: batch size@limit, runs on end; ! did not reach the target")
    for name, row in summary["policies"].items():
        lines += textwrap.wrap(
            _path(row["path"]), 118, initial_indent=f"  {name:8} ", subsequent_indent=11 * " "
        )
    lines.append("  Pareto front: time, energy (of the expected run), batch size@limit")
    for point in summary.get("pareto", ()):
        lines.append(
            f"    {point['time_s']:>12,.0f} s {point['energy_j']:>14,.0f} J  "
            f"{point['batch_size']:g}@{point['limit_w']:g}W"
        )
    for row in summary.get("eta_sweep", ()):
        lines.append(
            f"  eta {row['eta']:4.2f}: ETA {row['energy_vs_default']:.1%}, TTA {row['time_vs_default']:.1%} of default"
        )
    return "\n".join(lines)


def _path(steps: list[Any]) -> str:
    """Runs of the same configuration on end are told once."""
    parts: list[tuple[str, int]] = []
    for size, limit_w, reached in steps:
        one = f"{size}@{limit_w:g}W{'' if reached else '!'}"
        if parts and parts[-1][0] == one:
            parts[-1] = (one, parts[-1][1] + 1)
        else:
            parts.append((one, 1))
    return " ".join(one if times == 1 else f"{times}x{one}" for one, times in parts)


def _totals_text(totals: dict[str, Any]) -> str:
    lines = ["all workloads:"]
    for name, row in totals.items():
        text = f"  {name:8} sum of regrets {row['regret_sum']:.1f}"
        if row.get("regret_vs_zeus") is not None:
            text += f", {row['regret_vs_zeus']:.2f} of zeus's in the geometric mean"
            text += f", at worst {row['worst_vs_zeus']:.2f}"
        lines.append(text)
    return "\n".join(lines)


def _overlapping(
    source: str,
    workloads: list[Any],
    names: list[str],
    seeds: int,
    eta: float,
    beta: float,
    window: int | None,
) -> dict[str, Any]:
    from penstock.recurring._overlap import read_arrivals, replay_arrivals, synthetic_arrivals
    from penstock.recurring._replay import make_policy

    result: dict[str, Any] = {"arrivals": source, "seeds": seeds, "policies": {}}
    for name in dict.fromkeys([*names, "default"]):
        sums: dict[str, dict[str, float]] = {}
        peak = 0
        for seed in range(seeds):
            trace = (
                synthetic_arrivals(workloads, seed=seed) if source == "synthetic" else read_arrivals(source)
            )
            replayed = replay_arrivals(
                trace,
                workloads,
                lambda w, name=name: make_policy(name, w, eta),  # type: ignore[misc]
                eta=eta,
                beta=beta,
                window=window,
                seed=seed,
            )
            peak = max(peak, replayed.most_in_flight)
            for workload, row in replayed.totals().items():
                mine = sums.setdefault(workload, dict.fromkeys(row, 0.0))
                for key, value in row.items():
                    mine[key] += value / seeds
        result["policies"][name] = {"workloads": sums, "most_in_flight": peak}
    base = result["policies"]["default"]["workloads"]
    for row in result["policies"].values():
        for workload, mine in row["workloads"].items():
            for key in ("energy_j", "time_s", "cost"):
                mine[f"{key}_vs_default"] = mine[key] / base[workload][key]
    return result


def _overlap_text(result: dict[str, Any]) -> str:
    lines = [f"overlapping jobs ({result['arrivals']}), against default:"]
    for name, row in result["policies"].items():
        lines.append(f"  {name} (at most {row['most_in_flight']} of a group in flight)")
        for workload, mine in row["workloads"].items():
            lines.append(
                f"    {workload:14} energy {mine['energy_j_vs_default']:.1%}, time {mine['time_s_vs_default']:.1%}, "
                f"cost {mine['cost_vs_default']:.1%}, {mine['runs']:.0f} runs"
            )
    return "\n".join(lines)
