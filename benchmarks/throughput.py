# Run with: make bench-throughput
"""Trivial trials per second with a durable store, against Optuna, Ray Tune and a bare process pool."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import _bench
import penstock as pk


def square(x: float) -> float:
    return x * x


def objective(run: pk.Run) -> None:
    run.report(loss=square(run.config["x"]))


def penstock(trials: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        study = pk.Study(
            objective,
            pk.Space(x=pk.Float(-1, 1)),
            minimize="loss",
            scheduler=pk.Full(trials=trials),
            sampler=pk.Random(),
            executor=pk.Local(slots=2),
            store=Path(folder) / "study.db",
        )
        started = time.perf_counter()
        study.run()
        seconds = time.perf_counter() - started
        assert study.state.counts.completed == trials
    return trials / seconds


def pool(trials: int) -> float:
    started = time.perf_counter()
    with ProcessPoolExecutor(2) as executor:
        futures = [executor.submit(square, i / trials) for i in range(trials)]
        for future in futures:
            future.result()
    return trials / (time.perf_counter() - started)


def optuna_with(storage: object, trials: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    started = time.perf_counter()
    study.optimize(lambda trial: square(trial.suggest_float("x", -1, 1)), n_trials=trials)
    return trials / (time.perf_counter() - started)


def optuna_sqlite(trials: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return optuna_with(f"sqlite:///{folder}/study.db", trials)


def optuna_journal(trials: int) -> float:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with tempfile.TemporaryDirectory() as folder:
        return optuna_with(JournalStorage(JournalFileBackend(f"{folder}/journal.log")), trials)


def ray_tune(trials: int) -> float:
    from ray import tune

    def train(config: dict[str, float]) -> None:
        tune.report({"loss": square(config["x"])})

    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            train,
            param_space={"x": tune.uniform(-1, 1)},
            tune_config=tune.TuneConfig(num_samples=trials, metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        started = time.perf_counter()
        tuner.fit()
        return trials / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    options = parser.parse_args()

    def count(trials: int) -> int:
        return max(1, round(trials * options.scale))

    contenders = {
        "penstock": lambda: penstock(count(20_000)),
        "process pool": lambda: pool(count(20_000)),
        "optuna sqlite": lambda: optuna_sqlite(count(150)),
        "optuna journal": lambda: optuna_journal(count(800)),
    }
    if not options.no_ray:
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        contenders["ray tune"] = lambda: ray_tune(count(6))
    rates = _bench.interleave(contenders, options.repeats)
    print("\ntrivial trials per second, start of workers included (Ray's own start is not counted)")
    ratios: dict[str, list[float]] = {}
    for name, values in rates.items():
        ratios[name] = [ours / theirs for ours, theirs in zip(rates["penstock"], values, strict=True)]
        print(f"  {name:15s} {_bench.text(values, '/s'):32s} penstock is {_bench.text(ratios[name], 'x')}")
    results = {
        name: {"per_s": _bench.spread(values), "penstock_ratio": _bench.spread(ratios[name])}
        for name, values in rates.items()
    }
    if options.no_ray:
        command = f"python benchmarks/throughput.py --repeats {options.repeats} --no-ray"
        _bench.save("throughput_no_ray", command, results, ("optuna",))
    else:
        _bench.save("throughput", "make bench-throughput", results, ("optuna", "ray"))


if __name__ == "__main__":
    main()
