"""Coverage-guided fuzzing of what reads data from outside, with atheris, for as long as it is let.

Run with: python -m benchmarks.hardening.fuzz [--seconds 60] [--target journal] (pip install atheris)

Targets: space, forms, journal, tables. What is tried follows the branches taken inside of Penstock. A finding stops the
run with its traceback; libFuzzer writes the input to a file beside. Counts land in benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._bench import RESULTS, save

try:
    import atheris
except ImportError:
    atheris = None

TARGETS = ("space", "forms", "journal", "tables")


class Steered(random.Random):
    """Random choices out of the fuzzer's bytes; 0 once they are used up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._provider = atheris.FuzzedDataProvider(data)

    def random(self) -> float:
        return self._provider.ConsumeProbability() * (1 - 2**-53)

    def getrandbits(self, bits: int) -> int:
        return int(self._provider.ConsumeUInt((bits + 7) // 8)) >> (-bits % 8)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        low, high = (0, start) if stop is None else (start, stop)
        return int(self._provider.ConsumeIntInRange(low, high - 1))

    def randint(self, low: int, high: int) -> int:
        return int(self._provider.ConsumeIntInRange(low, high))

    def choice(self, items: Any) -> Any:
        return items[self.randrange(len(items))]


def fuzz_one(target: str, runs: int, seconds: int) -> None:
    """Fuzz a target in this process; atheris ends it."""
    with atheris.instrument_imports(include=["penstock"]):
        from penstock.energy import PowerProfile
        from penstock.goal import Budget, Goal, Limit
        from penstock.space import Choice, Float, Int, Space, equals
        from penstock.testing import fuzz
        from penstock.testing.journals import SPACE, journal
    right_space = Space(
        {
            "lr": Float(1e-4, 1, log=True),
            "n": Int(1, 64, step=3),
            "o": Choice("a", "b"),
            "m": Float(0, 1, when=equals("o", "a")),
        }
    ).to_json()
    goal = Goal.of("loss", None)
    forms = [
        (Goal.from_json, goal.to_json()),
        (Budget.from_json, Budget(trials=3).to_json()),
        (Limit.from_json, {"quantity": "power_w", "unit": "W", "bound": 90.0, "at_most": True}),
        (
            PowerProfile.from_json,
            {"device": "V", "world_size": 1, "max_limit_w": 250.0, "limits": [[1.0, 2.0, 3.0]]},
        ),
    ]
    journals = [journal(seed, 4) for seed in range(3)]
    folder = Path(tempfile.mkdtemp())

    def test(data: bytes) -> None:
        rng = Steered(data)
        if target == "space":
            fuzz.use_space(fuzz.mutate(right_space, rng, rng.randint(1, 4)))
        elif target == "forms":
            read, value = rng.choice(forms)
            fuzz.read_form(read, fuzz.mutate(value, rng, rng.randint(1, 4)))
        elif target == "journal":
            fuzz.fold_records(
                fuzz.mutate_journal(rng.choice(journals), rng), {"space": SPACE, "goal": goal.to_json()}
            )
        else:
            half = len(data) // 2
            fuzz.read_rates_and_jobs(data[:half], data[half:], folder)
            fuzz.read_traces(data[:half], data[half:], folder)

    atheris.Setup(
        [sys.argv[0], f"-runs={runs}", f"-max_total_time={seconds}", "-timeout=20", "-max_len=512"], test
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if atheris is None:
        sys.exit("This needs atheris, which has wheels for Linux: pip install atheris")
    if given.here:
        fuzz_one(given.target[0], -1, given.seconds)
        return
    path = RESULTS / "fuzz.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    bad = False
    for target in given.target or TARGETS:
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.hardening.fuzz", "--here", "--target", target]
        done = subprocess.run([*command, "--seconds", str(given.seconds)], capture_output=True, text=True)
        lines = [
            line
            for line in done.stderr.splitlines()
            if line.startswith("#") and line.split()[0][1:].isdigit()
        ]
        runs = int(lines[-1].split()[0].lstrip("#")) if lines else 0
        covered = [word for line in lines for word in line.split("cov: ")[1:]]
        results[target] = {
            "runs": runs,
            "seconds": round(time.monotonic() - begun_s),
            "branches": int(covered[-1].split()[0]) if covered else 0,
            "findings": 0 if done.returncode == 0 else 1,
        }
        print(f"{target}: {results[target]}", flush=True)
        if done.returncode:
            bad = True
            print(done.stderr[-3000:])
    save("fuzz", f"python -m benchmarks.hardening.fuzz --seconds {given.seconds}", results, ["atheris"])
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
