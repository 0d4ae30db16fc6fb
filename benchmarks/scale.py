# Run with: make bench-scale
"""Hyperband on 1,000 simulated devices: seconds, memory and cost per event as trials grow; and import time."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _bench


def one(trials: int) -> dict[str, float]:
    """One study in this process: Hyperband iterations until ``trials`` trials have started."""
    import penstock as pk

    def curve(run: pk.Run) -> None:
        for epoch in run.epochs():
            run.report(loss=run.config["x"] + 1 / (epoch + 1))

    with tempfile.TemporaryDirectory() as folder:
        study = pk.Study(
            curve,
            pk.Space(x=pk.Float(0, 1), y=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Hyperband(max_epochs=81, eta=3, iterations=trials // 100),
            sampler=pk.Random(),
            executor=pk.Simulated(devices=1000, seconds=lambda config, epoch: 1 + config["y"]),
            budget=pk.Budget(trials=trials),
            store=Path(folder) / "s.db",
        )
        began, cpu = time.perf_counter(), time.process_time()
        study.run()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        from penstock.store import open_store

        store = open_store(Path(folder) / "s.db", write=False)
        events = store.find().events
        store.close()
    assert len(study.trials) == trials, len(study.trials)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "events": events,
        "us_per_event": 1e6 * cpu_s / events,
        "peak_mb": peak,
    }


def import_s() -> float:
    """CPU seconds that ``import penstock`` adds to a bare interpreter."""
    code = "import time; t = time.process_time(); import penstock; print(time.process_time() - t)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 3_000, 10_000, 30_000], help="trials")
    parser.add_argument("--repeats", type=int, default=5, help="of the largest size at most three")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    results: dict[str, object] = {}
    curve: dict[int, list[dict[str, float]]] = {}
    for repeat in range(options.repeats):
        for size in options.sizes if repeat < 3 else options.sizes[:-1]:
            done = subprocess.run(
                [sys.executable, __file__, "--one", str(size)], capture_output=True, text=True, env=os.environ
            )
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout)
            curve.setdefault(size, []).append(found)
            print(f"  repeat {repeat + 1}: {size} trials {found}", flush=True)
    print("\nHyperband on 1,000 simulated devices, durable store")
    for size, runs in curve.items():
        results[str(size)] = {key: _bench.spread([r[key] for r in runs]) for key in runs[0]}
        keys = ("seconds", "us_per_event", "peak_mb", "events")
        print(f"  {size:6d} trials:", *(f"{key} {_bench.text([r[key] for r in runs])}" for key in keys))
    imports = [import_s() for _ in range(9)]
    print(f"  import penstock: {_bench.text(imports)} CPU-seconds")
    results["import_cpu_s"] = _bench.spread(imports)
    _bench.save("scale", "make bench-scale", results)


if __name__ == "__main__":
    main()
