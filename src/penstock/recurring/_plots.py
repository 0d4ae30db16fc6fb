"""Plots of replays: cumulative regret, search paths over the regret map, Pareto fronts and eta sweeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidInput, MissingDependency
from penstock.recurring._cost import epoch_cost
from penstock.recurring._study import pareto
from penstock.recurring._traces import Workload


def plot_workload(
    workload: Workload, summary: Mapping[str, Any], sweep: Sequence[Mapping[str, float]], folder: str | Path
) -> list[Path]:
    """Write the plots of one workload as PNG files; returns their paths.

    Raises:
        MissingDependency: matplotlib is not installed.
        InvalidInput: The folder can't be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependency("Plots need matplotlib: pip install matplotlib.") from error
    target = plot_folder(folder)
    title = re.sub(r"[^\w.-]+", "-", workload.name)  # a dataset may be called a/b
    written = []

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, row in summary["policies"].items():
        axes.plot(range(1, len(row["curve"]) + 1), row["curve"], label=name)
    axes.set(xlabel="recurrence", ylabel="cumulative regret / C*", title=workload.name)
    axes.set_yscale("symlog")
    axes.legend()
    written.append(_save(figure, target / f"{title}-regret.png"))

    for name, row in summary["policies"].items():
        figure, axes = plt.subplots(figsize=(6, 4))
        eta, best = float(summary["eta"]), float(summary["optimum"]["cost"])
        limits = list(workload.limits_w)
        grid = [
            [
                workload.mean_epochs(b)
                * epoch_cost(workload.power[b], w, eta=eta, max_power_w=workload.max_power_w)
                / best
                - 1.0
                if w in workload.power[b]
                else float("nan")
                for b in workload.batch_sizes
            ]
            for w in limits
        ]
        image = axes.imshow(grid, aspect="auto", origin="lower", cmap="Blues_r", vmin=0.0, vmax=1.0)
        figure.colorbar(image, ax=axes, label="regret / C*")
        x = [workload.batch_sizes.index(step[0]) for step in row["path"]]
        y = [limits.index(step[1]) for step in row["path"]]
        axes.plot(x, y, color="grey", linewidth=0.7)
        axes.scatter(x, y, c=range(len(x)), cmap="autumn_r", s=14, zorder=3)
        axes.set_xticks(range(len(workload.batch_sizes)), [str(b) for b in workload.batch_sizes], rotation=60)
        axes.set_yticks(range(len(limits)), [f"{w:g}" for w in limits])
        axes.set(
            xlabel="batch size", ylabel="power limit (W)", title=f"{workload.name}: search path of {name}"
        )
        written.append(_save(figure, target / f"{title}-path-{name}.png"))

    figure, axes = plt.subplots(figsize=(6, 4))
    front = pareto(workload)
    axes.plot([p["time_s"] for p in front], [p["energy_j"] for p in front], "o-", label="Pareto front")
    profile = workload.power[workload.default]
    time_s, power_w = profile[max(profile)]
    epochs = workload.mean_epochs(workload.default)
    axes.plot([epochs * time_s], [epochs * time_s * power_w], "r^", label="default")
    ends: dict[tuple[float, float], list[str]] = {}
    for row in sweep:
        end = (row["time_vs_default"] * epochs * time_s, row["energy_vs_default"] * epochs * time_s * power_w)
        ends.setdefault(end, []).append(f"{row['eta']:g}")
    for end, etas in ends.items():
        axes.plot([end[0]], [end[1]], "kx")
        axes.annotate(rf"$\eta$={', '.join(etas)}", end)
    axes.set(xlabel="TTA (s)", ylabel="ETA (J)", title=workload.name)
    axes.legend()
    written.append(_save(figure, target / f"{title}-pareto.png"))
    return written


def plot_folder(folder: str | Path) -> Path:
    """The folder for plots, made where there is none.

    Raises:
        InvalidInput: It can't be made or written.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"Can't write plots to {str(folder)!r}: {error.strerror or error}.") from error
    return target


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidInput(f"Can't write the plot {str(path)!r}: {error.strerror or error}.") from error
    finally:
        plt.close(figure)
    return path
