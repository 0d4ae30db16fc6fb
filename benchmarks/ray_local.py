# Run with: make bench-ray_local
"""The Ray executor against the local one: the same study of trials of 1 s and more, on a cluster that is up."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _bench
import penstock as pk

EPOCHS = 5


def work(turns: int) -> float:
    """So much computing in plain Python, the same in every process."""
    total = 0.0
    for turn in range(turns):
        total += (turn % 7) * 0.5
    return total


def objective(run: pk.Run) -> None:
    done = run.load() or 0
    for _ in run.epochs(total=EPOCHS):
        work(run.config["turns"])
        done += 1
        run.save(done)
        run.report(loss=run.config["x"])


def turns_per_s() -> float:
    """Of the machine at its quickest, so that trials take at least what they are meant to."""
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        work(2_000_000)
        best = max(best, 2_000_000 / (time.perf_counter() - started))
    return best


def run(executor: Callable[[], pk.Local | pk.Ray], seconds: float, trials: int, speed: float) -> float:
    """Wall seconds of the whole study, the start of its workers included."""
    turns = int(seconds * speed / EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        study = pk.Study(
            objective,
            pk.Space(x=pk.Float(-1, 1), turns=pk.Choice(turns)),
            minimize="loss",
            scheduler=pk.Full(trials=trials),
            sampler=pk.Random(),
            executor=executor(),
            store=Path(folder) / "study.db",
            meter=False,
        )
        started = time.perf_counter()
        study.run()
        taken = time.perf_counter() - started
        assert study.state.counts.completed == trials
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=["1x40", "2x20", "5x8"], help="seconds x trials")
    options = parser.parse_args()
    import ray

    started = time.perf_counter()
    ray.init(
        "local",
        num_cpus=options.slots,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    cluster_s = time.perf_counter() - started
    print(f"cluster up in {cluster_s:.1f} s (not counted below)")
    results: dict[str, object] = {"slots": options.slots, "epochs": EPOCHS, "cluster_start_s": cluster_s}
    speed = turns_per_s()
    for case in options.cases:
        seconds, trials = float(case.partition("x")[0]), int(case.partition("x")[2])
        taken = _bench.interleave(
            {
                "local": lambda s=seconds, n=trials: run(lambda: pk.Local(options.slots), s, n, speed),
                "ray": lambda s=seconds, n=trials: run(lambda: pk.Ray(slots=options.slots), s, n, speed),
            },
            options.repeats,
        )
        ratios = [ray_s / local_s for ray_s, local_s in zip(taken["ray"], taken["local"], strict=True)]
        print(
            f"{trials} trials of {seconds:g} s: local {_bench.text(taken['local'], ' s')}, "
            f"ray {_bench.text(taken['ray'], ' s')}, ray/local {_bench.text(ratios, 'x')}"
        )
        results[case] = {
            "trial_s": seconds,
            "trials": trials,
            "local_s": _bench.spread(taken["local"]),
            "ray_s": _bench.spread(taken["ray"]),
            "ratio": _bench.spread(ratios),
        }
    ray.shutdown()
    _bench.save("ray_local", "make bench-ray_local", results, ("ray",))


if __name__ == "__main__":
    main()
