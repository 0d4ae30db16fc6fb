"""Coverage-guided fuzzing of what reads data from outside, with atheris, for as long as it is let.

Run with: python -m benchmarks.hardening.fuzz [--seconds 60] [--target journal] (pip install atheris)

Targets: space, forms, journal, tables, commands (arguments of those that run no code of others), dashboard (requests).
What is tried follows the branches taken inside of Penstock. A finding stops the run with its traceback; libFuzzer
writes the input to a file beside. Counts land in benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks._bench import earlier, save

try:
    import atheris
except ImportError:
    atheris = None

TARGETS = ("space", "forms", "journal", "tables", "commands", "dashboard")
LATER = {
    "tables": ("cli._cluster", "recurring._traces"),
    "commands": ("cli._app", "cli._cluster", "cli._simulate"),
}
TABLES = (
    (
        b'{"a":{"v100":3.0,"p100":2.0},"b":{"v100":1}}',
        b"arrival_s,kind,trials,iterations,rungs\n0,compute,9,100,2\n",
    ),
    (
        b"""{"v100":{"('ResNet', 1)":{"null":3.0,"('ResNet', 1)":[2.0,2.0]}}}""",
        b"arrival_s,kind,trials,iterations\n",
    ),
    (
        b"dataset,network,batch_size,optimizer,learning_rate,target_metric,seed,epoch\nd,n,8,sgd,0.1,0.5,1,3\n",
        b"dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\nd,n,8,sgd,100,3.5,90\n",
    ),
)
COMMANDS = ("report", "trials", "doctor", "simulate")
METHODS = ("GET", "GET", "GET", "GET", "HEAD", "POST")
HEADERS = ({}, {"accept-encoding": "gzip"}, {"authorization": "Bearer"}, {"cookie": "penstock_token=1;;;="})


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

    def word(self, words: tuple[str, ...]) -> str:
        """One of these, or any text."""
        if self.random() < 0.7:
            return str(self.choice(words))
        return str(self._provider.ConsumeUnicodeNoSurrogates(8)).replace("\0", "")

    def bytes(self, most: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(most))


def _corpus(target: str, folder: Path) -> Path:
    """Something to begin with: from nothing it takes long until there are bytes enough, and the right ones."""
    folder.mkdir()
    rng = random.Random(0)
    seeds = [rng.randbytes(rng.randint(20, 200)) for _ in range(100)]
    if target == "tables":  # two halves of one length
        seeds = [b"".join(half.ljust(max(map(len, pair)), b"\n") for half in pair) for pair in TABLES]
    for number, data in enumerate(seeds):
        (folder / str(number)).write_bytes(data)
    return folder


def fuzz_one(target: str, runs: int, seconds: int) -> None:
    """Fuzz a target in this process; atheris ends it."""
    with atheris.instrument_imports(include=["penstock"]):
        from penstock.energy import PowerProfile
        from penstock.goal import Budget, Goal, Limit
        from penstock.space import Choice, Float, Int, Space, equals
        from penstock.testing import fuzz
        from penstock.testing.journals import SPACE, journal

        # What is imported later is not followed.
        for name in LATER.get(target, ()):
            importlib.import_module(f"penstock.{name}")
        if target == "dashboard":
            from penstock.report._feed import Feed
            from penstock.report.dashboard._app import make_app
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
    # Deep enough for a few steps up: some commands write where they are told to.
    folder = Path(tempfile.mkdtemp()) / "a" / "b" / "c"
    folder.mkdir(parents=True)
    spec = {"space": SPACE, "goal": goal.to_json()}
    client: Any = None
    options: dict[str, list[str]] = {}
    if target in ("commands", "dashboard"):
        study = fuzz.furnish(folder, spec, journals[1])
    if target == "commands":
        options = {name: each for name, each in fuzz.options_of().items() if name in COMMANDS}
        os.chdir(folder)
    elif target == "dashboard":
        from starlette.testclient import TestClient

        feed = Feed(str(folder / "s.db"))
        client = TestClient(make_app(feed), follow_redirects=False, raise_server_exceptions=False).__enter__()
        assert feed.wait_read(study, 30)

    def command(rng: Steered) -> list[str]:
        name = rng.choice(COMMANDS)
        words = [name, "s.db"] if name in ("report", "trials") and rng.random() < 0.8 else [name]
        for _ in range(rng.randint(0, 4)):
            if rng.random() < 0.6:
                words.append(rng.choice(options[name]))
            if rng.random() < 0.7:
                word = rng.word(fuzz.WORDS)
                # Thousands of jobs or devices are right, and take their time.
                words.append(word[:2] if word.isdigit() and len(word) < 7 else word)
        return [*words, "--trials", "3", "--max-epochs", "3"] if name == "simulate" else words

    def request(rng: Steered) -> tuple[str, dict[str, str], dict[str, str], str]:
        what = rng.randrange(4)
        if what == 0:
            path = f"/{quote(rng.bytes(12), safe='/')}"
        elif what == 1:
            path = rng.choice(fuzz.PATHS)
        else:
            path = f"/api/study/{rng.choice((1, 1, 1, 0, -1, 10**30, 'x'))}/{rng.choice(fuzz.VIEWS)}"
        query = {rng.word(fuzz.KEYS): rng.word(fuzz.VALUES) for _ in range(rng.randint(0, 3))}
        return path, query, rng.choice(HEADERS), rng.choice(METHODS)

    def test(data: bytes) -> None:
        rng = Steered(data)
        if target == "space":
            fuzz.use_space(fuzz.mutate(right_space, rng, rng.randint(1, 4)))
        elif target == "forms":
            read, value = rng.choice(forms)
            fuzz.read_form(read, fuzz.mutate(value, rng, rng.randint(1, 4)))
        elif target == "journal":
            fuzz.fold_records(fuzz.mutate_journal(rng.choice(journals), rng), spec)
        elif target == "commands":
            arguments = command(rng)
            code = fuzz.run_command(arguments)
            assert code in (0, 1, 2), f"{arguments}: exit code {code}"
        elif target == "dashboard":
            fuzz.ask(client, *request(rng))
        else:
            half = len(data) // 2
            fuzz.read_rates_and_jobs(data[:half], data[half:], folder)
            fuzz.read_traces(data[:half], data[half:], folder)

    flags = [f"-runs={runs}", f"-max_total_time={seconds}", "-timeout=20", "-max_len=512"]
    if target in ("tables", "commands", "dashboard"):
        flags.append(str(_corpus(target, folder.parent / "corpus")))
    atheris.Setup([sys.argv[0], *flags], test)
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
    kept = earlier("fuzz") if given.target else None
    results: dict[str, Any] = {} if kept is None else kept["results"]
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
        if done.returncode and not runs:
            sys.exit(f"{target} did not start:\n{done.stderr[-3000:]}")
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
    command = f"python -m benchmarks.hardening.fuzz --seconds {given.seconds}"
    save("fuzz", command, results, ["atheris"], kept=kept)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
