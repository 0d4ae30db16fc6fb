"""What a recurring job's ``decide()`` and ``observe()`` take once it has a long history, by store.

Every repeat is one recurrence of a job that has had 1,000: decided, then observed. The store is a real one: a commit to
SQLite or PostgreSQL waits for the disk. "two kinds" decides for two kinds of device in turn, so that costs are
translated. "cpu" is the CPU time of the process alone, which what else runs here does not change much.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._bench import save, spread, text

from penstock import RecurringJob
from penstock.core.errors import Unsupported

LIMITS_W = (100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def recur(job: RecurringJob, rng: random.Random, device: str) -> tuple[float, float, float, float]:
    """One recurrence; what deciding and observing took, in ms, and what of it was CPU time."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    decision = job.decide(device=device)
    decided, decided_cpu = time.perf_counter(), time.process_time()
    epochs = (12.0 + 0.03 * decision.batch_size + 60.0 / decision.batch_size) * (1.0 + rng.gauss(0.0, 0.05))
    epoch_s = 10.0 * (1.0 + 50.0 / decision.batch_size)
    profile = {w: (epoch_s * (1.0 + 30.0 / w), 0.8 * w) for w in decision.profile_w}
    told, told_cpu = time.perf_counter(), time.process_time()
    job.observe(
        decision,
        epochs=epochs,
        time_s=epochs * epoch_s,
        energy_j=epochs * epoch_s * 150.0,
        reached=True,
        profile=profile,
    )
    observed, observed_cpu = time.perf_counter(), time.process_time()
    return (
        1000 * (decided - begin),
        1000 * (observed - told),
        1000 * (decided_cpu - begin_cpu),
        1000 * (observed_cpu - told_cpu),
    )


@contextlib.contextmanager
def stores() -> Iterator[dict[str, str | None]]:
    """By name, what opens each store there is here."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        found: dict[str, str | None] = {"memory": None, "sqlite": str(Path(folder) / "jobs.db")}
        try:
            from penstock.testing.postgres import postgres_server

            found["postgresql"] = stack.enter_context(postgres_server()).url
        except Unsupported as error:
            print(f"no PostgreSQL here: {error}", file=sys.stderr)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--observations", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"observations": arguments.observations, "unit": "ms"}
    cases = [("ours", ("V100",)), ("zeus", ("V100",)), ("ours", ("V100", "A40"))]
    with stores() as found:
        for store, url in found.items():
            for policy, devices in cases:
                name = f"{store}, {policy}" + (", two kinds" if len(devices) > 1 else "")
                rng = random.Random(0)
                job = RecurringJob(
                    name, batch_sizes=SIZES, default=1024, store=url, policy=policy, limits_w=LIMITS_W
                )
                with job:
                    for n in range(arguments.observations):
                        recur(job, rng, devices[n % len(devices)])
                    rows = [recur(job, rng, devices[n % len(devices)]) for n in range(arguments.repeats)]
                decide, observe, decide_cpu, observe_cpu = zip(*rows, strict=True)
                results[name] = {
                    "decide": described(decide),
                    "observe": described(observe),
                    "decide cpu": described(decide_cpu),
                    "observe cpu": described(observe_cpu),
                }
                print(
                    f"{name}: decide {text(decide, ' ms')}, observe {text(observe, ' ms')}; of CPU: "
                    f"{text(decide_cpu, ' ms')} and {text(observe_cpu, ' ms')}",
                    flush=True,
                )
    save("decide", "python -m benchmarks.decide", results, ("numpy", "scipy", "sqlalchemy", "psycopg"))


def described(values: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(values)
    return {**spread(values), "p10": ordered[len(ordered) // 10], "p90": ordered[9 * len(ordered) // 10]}


if __name__ == "__main__":
    main()
