"""A soak: memory and file handles of a process that runs studies for hours, and over 100,000 simulated events.

Run with: python -m benchmarks.hardening.soak [--minutes 120] [--events 100000] [--only real|simulated]

Two real drivers run one after another, each for half of the time, with sleeping trials on two local workers: one runs
one study all the time, the other small studies one after another. A third runs simulated studies until there were so
many events. Driver and workers are looked at from outside. Fitted is the straight line through the samples after
the first fifth; a process is flat if that line gains less than a tenth of its first value over the time, or 4 MB.
The one long study keeps a record of every trial by design, so its driver's memory is judged per trial: it is flat if
the line gains less than 4 kB for each trial of that time. What is broken off goes on after the last that was whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks._bench import earlier, save, unfinished

KINDS = ("simulated", "long", "many")
KEPT = 120  # samples that are kept of each figure
KB_PER_TRIAL = 4.0  # that a driver may keep of a trial of its study


def train(run: Any) -> None:
    import time

    for epoch in run.epochs(4):
        time.sleep(0.1)
        run.save({"epoch": epoch, "weights": bytes(20_000)})
        run.report(loss=run.config["x"] / (epoch + 1))


def quick(run: Any) -> None:
    for epoch in run.epochs():
        run.report(loss=run.config["x"] + 1 / (epoch + 1))


def drive(kind: str, folder: Path, amount: float) -> None:
    """A driver: seconds of real studies, or a number of simulated events. Prints what it did."""
    import penstock as pk

    space = pk.Space(x=pk.Float(0, 1))
    began_s, studies, trials, events = time.monotonic(), 0, 0, 0
    store = folder / f"{kind}.db"
    while True:
        left = amount - (events if kind == "simulated" else time.monotonic() - began_s)
        if left <= 0:
            break
        options: dict[str, Any] = {
            "minimize": "loss",
            "sampler": pk.Random(),
            "store": store,
            "name": f"s{studies}",
        }
        if kind == "simulated":
            scheduler: Any = pk.Hyperband(max_epochs=27)
            study = pk.Study(quick, space, scheduler=scheduler, executor=pk.Simulated(devices=20), **options)
        elif kind == "long":
            budget = pk.Budget(time_s=left)
            study = pk.Study(
                train,
                space,
                scheduler=pk.Full(trials=16 + int(6 * left)),
                executor=pk.Local(slots=2),
                budget=budget,
                **options,
            )
        else:
            study = pk.Study(
                train, space, scheduler=pk.Full(trials=16), executor=pk.Local(slots=2), **options
            )
        study.run()
        studies += 1
        trials += study.state.counts.total
        if kind == "simulated":
            from penstock.store import open_store

            with open_store(store, write=False) as opened:
                events += opened.find(f"s{studies - 1}").events
        print(json.dumps({"studies": studies, "trials": trials, "events": events}), flush=True)


def watch(kind: str, amount: float, every_s: float) -> dict[str, Any]:
    """Run a driver and sample it and its children."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.hardening.soak", "--drive", kind, folder, str(amount)]
        out = Path(folder) / "out"
        with out.open("w") as file:
            driver = subprocess.Popen(command, stdout=file)
        process = psutil.Process(driver.pid)
        samples: list[dict[str, float]] = []
        began_s = time.monotonic()
        while driver.poll() is None:
            one = _sample(process)
            if one is not None:
                samples.append({"time_s": time.monotonic() - began_s, **one})
            time.sleep(every_s)
        told = out.read_text().splitlines()
        if driver.returncode or not told:
            raise RuntimeError(f"The driver ended with {driver.returncode}.")
        left = [str(path.relative_to(folder)) for path in Path(folder).rglob("*lock")]
        return {**json.loads(told[-1]), "seconds": time.monotonic() - began_s, "locks_left": len(left)} | fit(
            samples
        )


def _sample(process: psutil.Process) -> dict[str, float] | None:
    try:
        with process.oneshot():
            one = {
                "driver_mb": process.memory_info().rss / 1e6,
                "driver_handles": process.num_fds(),
                "driver_threads": process.num_threads(),
            }
        children = process.children(recursive=True)
        one["children"] = len(children)
        workers = [
            (c.memory_info().rss / 1e6, c.num_fds()) for c in children if c.status() != psutil.STATUS_ZOMBIE
        ]
        if workers:
            one["largest_child_mb"] = max(rss for rss, _ in workers)
            one["most_child_handles"] = max(fds for _, fds in workers)
    except psutil.Error:
        return None
    return one


def line(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The least-squares line: its value at the first time, and its gain up to the last."""
    n = len(times)
    mean_t, mean_v = sum(times) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in times)
    slope = (
        sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
        if spread
        else 0.0
    )
    return mean_v + slope * (times[0] - mean_t), slope * (times[-1] - times[0])


def fit(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of each figure the fitted start and gain, whether it is flat, and some of the samples."""
    end_s = samples[-1]["time_s"]
    found: dict[str, Any] = {"samples": len(samples), "figures": {}}
    for name in (
        "driver_mb",
        "driver_handles",
        "driver_threads",
        "children",
        "largest_child_mb",
        "most_child_handles",
    ):
        points = [(s["time_s"], s[name]) for s in samples if name in s and s["time_s"] >= end_s / 5]
        if len(points) < 5:
            continue
        start, gain = line([t for t, _ in points], [v for _, v in points])
        floor = 4.0 if name.endswith("_mb") else 2.0
        step = max(1, len(points) // KEPT)
        found["figures"][name] = {
            "start": start,
            "gain": gain,
            "flat": gain <= max(start / 10, floor),
            "points": [[round(t, 1), round(v, 2)] for t, v in points[::step]],
        }
    return found


def judge_per_trial(found: dict[str, Any]) -> None:
    """Judge a driver's memory by its gain per trial: the line is over four fifths of the time, and of the trials."""
    memory = found["figures"]["driver_mb"]
    found["driver_kb_per_trial"] = 1e3 * memory["gain"] * 1.25 / max(1, found["trials"])
    memory["flat"] = found["driver_kb_per_trial"] < KB_PER_TRIAL


def main() -> None:
    if "--drive" in sys.argv:
        kind, folder, amount = sys.argv[sys.argv.index("--drive") + 1 :]
        drive(kind, Path(folder), float(amount))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--only", choices=("real", "simulated"))
    parser.add_argument(
        "--lenient", action="store_true", help="exit with 0 whatever grows: too short to tell"
    )
    given = parser.parse_args()
    begun = unfinished("soak")
    kept = begun or (earlier("soak") if given.only else None)
    results: dict[str, Any] = {} if kept is None else kept["results"]
    kinds = {None: KINDS, "real": KINDS[1:], "simulated": KINDS[:1]}[given.only]
    for kind in kinds:
        if begun is not None and kind in begun["results"]:
            continue
        seconds = given.minutes * 30
        every_s = 0.2 if kind == "simulated" else max(0.2, seconds / 1000)
        results[kind] = watch(kind, given.events if kind == "simulated" else seconds, every_s)
        if kind == "long":
            judge_per_trial(results[kind])
        for name, figure in results[kind]["figures"].items():
            verdict = "flat" if figure["flat"] else "GROWS"
            if kind == "long" and name == "driver_mb":
                verdict += (
                    f" ({results[kind]['driver_kb_per_trial']:.2f} kB per trial, at most {KB_PER_TRIAL:g})"
                )
            print(f"{kind} {name}: {figure['start']:.1f} {figure['gain']:+.2f} {verdict}", flush=True)
        command = f"python -m benchmarks.hardening.soak --minutes {given.minutes:g} --events {given.events}"
        save("soak", command, results, ["psutil"], kept=kept, whole=kind == kinds[-1])
    flat = all(figure["flat"] for kind in results.values() for figure in kind["figures"].values())
    sys.exit(0 if flat or given.lenient else 1)


if __name__ == "__main__":
    main()
