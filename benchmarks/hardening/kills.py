"""A thousand kill -9 of workers and drivers over many small studies; the books are compared after each study.

Run with: python -m benchmarks.hardening.kills [--kills 1000] [--gpu-share 0.2]

Counts add up over runs in benchmarks/results/unfinished/kills.json until there are so many: stop it at any time, start
it again to go on, as long as the source is committed and stays the same. Each portion has its own seed, which the file
names; a quarter of an hour holds some hundreds of kills on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._bench import save, unfinished

from penstock.testing.kills import storm

STUB = Path(__file__).parents[2] / "tests" / "energy" / "nvml_stub" / "nvml_stub.py"
SUMS = ("studies", "driver_kills", "worker_kills", "trials", "epochs", "again", "limited")
WRONG = ("lost", "doubled", "different", "orphans", "limits", "errors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="in total, what was broken off included")
    parser.add_argument("--portion", type=int, default=25, help="kills between two savings")
    parser.add_argument("--gpu-share", type=float, default=0.2, help="part of the portions with power limits")
    given = parser.parse_args()
    begun = unfinished("kills")
    results: dict[str, Any] = {} if begun is None else begun["results"]
    for kind in ("cpu", "gpu"):
        results.setdefault(kind, dict.fromkeys((*SUMS, *WRONG), 0))
    results.setdefault("seeds", 0)
    results.setdefault("said", [])
    while (had := _kills(results)) < given.kills:
        seed = results["seeds"]
        gpu_kills = sum(results["gpu"][name] for name in ("driver_kills", "worker_kills"))
        kind = "gpu" if gpu_kills < given.gpu_share * (had + 1) else "cpu"
        with tempfile.TemporaryDirectory() as folder:
            kills = min(given.portion, given.kills - had)
            tally = storm(Path(folder), kills=kills, seed=seed, stub=STUB if kind == "gpu" else None)
        for name in (*SUMS, *WRONG):
            results[kind][name] += getattr(tally, name)
        results["said"] += tally.said
        results["seeds"] += 1
        print(f"{_kills(results)} kills ({kind}): {tally}", flush=True)
        command = f"python -m benchmarks.hardening.kills --kills {given.kills}"
        save("kills", command, results, kept=begun, whole=_kills(results) >= given.kills)
    wrong = sum(results[kind][name] for kind in ("cpu", "gpu") for name in WRONG)
    print(f"{_kills(results)} kills, {wrong} things wrong")
    sys.exit(1 if wrong else 0)


def _kills(results: dict[str, Any]) -> int:
    return sum(results[kind][name] for kind in ("cpu", "gpu") for name in ("driver_kills", "worker_kills"))


if __name__ == "__main__":
    main()
