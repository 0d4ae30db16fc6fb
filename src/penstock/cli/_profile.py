"""``penstock profile FILE:task``: measure random structures on this device and fit predictors to them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli._json import json_text


def profile(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE:TASK", help="tune.py:task or tune.py:study; a Task, or a Study of one."),
    ],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random structures to measure.")] = 100,
    space: Annotated[
        str, typer.Option("--space", help="The name of the Space beside the task; a study has its own.")
    ] = "space",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda:0.")] = "cpu",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Rows of an inference batch.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long each structure runs.")] = 0.2,
    training: Annotated[bool, typer.Option("--training", help="Also time and energy of an epoch.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    store: Annotated[
        str | None, typer.Option("--store", help="Keep the predictors there: a path or postgresql:// URL.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw predicted against actual into this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure power, memory and latency of random structures, fit predictors, and say how good they are."""
    from penstock.core.errors import InvalidInput
    from penstock.predict import scatter_svg
    from penstock.train import Profile

    if plot is not None:
        _check_plot(plot)
    if store is not None:
        from penstock.store import open_store

        open_store(store, write=True).close()  # told now, before anything is measured in vain
    task, found = _load(target, space)
    made = Profile(task, found, device=device, batch_size=batch_size, seconds=seconds, training=training)
    shown = sys.stderr.isatty()

    def tell(index: int, sample: Any) -> None:
        if shown:
            print(f"\r{index + 1} of {samples} structures measured", end="", file=sys.stderr, flush=True)

    predictors = made.collect(samples, seed=seed, on_sample=tell)
    if shown:
        print(file=sys.stderr)
    failed = [sample for sample in made.samples if sample.error]
    key = None
    if store is not None:
        opened = open_store(store, write=True)
        try:
            key = predictors.save(opened)
        finally:
            opened.close()
    unwritten = None
    if plot is not None:
        try:
            plot.write_text(scatter_svg(predictors), encoding="utf-8")
        except OSError as error:  # what was measured is still told
            unwritten = InvalidInput(f"--plot {plot} can't be written: {error.strerror or error}.")
    if as_json:
        print(json_text(_facts(predictors, len(made.samples), failed, key)))
    else:
        _tell(predictors, failed)
        if key is not None:
            print(f"Kept in {store} under {key}.")
        if plot is not None and unwritten is None:
            print(f"Predicted against actual: {plot}")
    if unwritten is not None:
        raise unwritten


def _check_plot(plot: Path) -> None:
    """Refuse what could not be drawn, before anything is measured."""
    from penstock.core.errors import InvalidInput

    if plot.suffix.lower() != ".svg":
        raise InvalidInput(f"--plot {plot}: the picture is an SVG. Give a name that ends with .svg.")
    if not plot.parent.is_dir():
        raise InvalidInput(f"--plot {plot}: there is no folder {plot.parent}. Make it, or give another one.")
    if plot.is_dir():
        raise InvalidInput(f"--plot {plot} is a folder. Give the name of a file.")


def _tell(predictors: Any, failed: list[Any]) -> None:
    print(predictors)
    weak = sorted({str(predictors[q].source) for q in predictors} - {"measured"})
    if weak:
        print(f'Some figures are {" and ".join(weak)}, not measured: "penstock doctor" says why.')
    if failed:
        print(f"{len(failed)} structures could not be measured; the first: {failed[0].error}")


def _load(target: str, space: str) -> tuple[Any, Any]:
    from penstock.cli._load import load
    from penstock.core.errors import InvalidInput
    from penstock.space import Space

    found = load(target, "task")
    place = target.partition(":")[0]
    if hasattr(found, "work") and hasattr(found, "space"):  # a Study
        return found.work, found.space
    where = load(f"{place}:{space}", space)
    if not isinstance(where, Space):
        raise InvalidInput(f"{place}:{space} is not a penstock.Space, but {where!r}. Name it with --space.")
    return found, where


def _facts(predictors: Any, samples: int, failed: list[Any], key: str | None) -> dict[str, Any]:
    return {
        "device": predictors.device,
        "task": predictors.task,
        "samples": samples,
        "failed": len(failed),
        "key": key,
        "quantities": {
            name: {
                "rmspe": None if math.isnan(predictors[name].rmspe) else predictors[name].rmspe,
                "form": predictors[name].form.terms,
                "source": str(predictors[name].source),
                "samples": predictors[name].samples,
            }
            for name in predictors
        },
    }
