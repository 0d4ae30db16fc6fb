"""What every benchmark shares: repeats, medians and spreads, and results with the facts that made them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Every process that is started would compile its imports anew, which is told of as slowness of whoever starts more.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

RESULTS = Path(os.environ.get("PENSTOCK_RESULTS") or Path(__file__).parent / "results")
"""Where results are kept: a rehearsal (``python -m benchmarks.all --rehearse``) has a folder of its own."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def text(values: Sequence[float], unit: str = "") -> str:
    s = spread(values)
    return f"{s['median']:.4g}{unit} ({s['min']:.4g}..{s['max']:.4g})"


def interleave(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all contenders in turn, ``repeats`` times: a noisy moment hits all of them alike."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, contender in contenders.items():
            value = contender()
            results[name].append(value)
            print(f"  repeat {repeat + 1}: {name} {value:.4g}", flush=True)
    return results


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def save(name: str, command: str, results: Mapping[str, Any], packages: Sequence[str] = ()) -> None:
    """Write results with the command, the machine, the versions and the date."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions("penstock", *packages),
        "results": results,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written to {path}", file=sys.stderr)
