# Run with: make bench-asha
"""ASHA, 81 configurations, up to 27 epochs of 10 ms, 2 workers: makespan against the ideal and against peers.

The ideal is the work each run actually did (its epochs x 10 ms) divided by 2. Time counts from the first trial's
start to the last one's end, so nobody pays for starting workers; the whole wall time stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import time
from pathlib import Path

import _bench
import penstock as pk

EPOCH_S = 0.010
MAX_EPOCHS, ETA = 27, 3


def loss_at(lr: float, epoch: int) -> float:
    return abs(math.log10(lr) + 2) + 1 / (epoch + 1)


def penstock_train(run: pk.Run) -> None:
    state = run.load() or {}
    for epoch in run.epochs():
        time.sleep(EPOCH_S)
        run.save(state)
        run.report(loss=loss_at(run.config["lr"], epoch))


def penstock(trials: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        study = pk.Study(
            penstock_train,
            pk.Space(lr=pk.Float(1e-4, 1, log=True)),
            minimize="loss",
            scheduler=pk.ASHA(max_epochs=MAX_EPOCHS, min_epochs=1, eta=ETA, trials=trials),
            sampler=pk.Random(),
            executor=pk.Local(slots=2),
            store=Path(folder) / "s.db",
        )
        began = time.perf_counter()
        study.run()
        wall_s = time.perf_counter() - began
        first = min(t.started_s for t in study.trials if t.started_s is not None)
        last = max(t.ended_s or t.reports[-1].time_s for t in study.trials)
        return {"makespan_s": last - first, "wall_s": wall_s, "epochs": study.state.epochs}


def optuna(trials: int) -> dict[str, float]:
    import optuna as op

    op.logging.set_verbosity(op.logging.ERROR)
    spans: list[tuple[float, float]] = []
    epochs = [0]

    def objective(trial: op.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-4, 1, log=True)
        began = time.perf_counter()
        try:
            for epoch in range(MAX_EPOCHS):
                time.sleep(EPOCH_S)
                epochs[0] += 1
                trial.report(loss_at(lr, epoch), epoch + 1)
                if trial.should_prune():
                    raise op.TrialPruned
            return loss_at(lr, MAX_EPOCHS - 1)
        finally:
            spans.append((began, time.perf_counter()))

    with tempfile.TemporaryDirectory() as folder:
        pruner = op.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)
        study = op.create_study(
            storage=f"sqlite:///{folder}/s.db", sampler=op.samplers.RandomSampler(seed=0), pruner=pruner
        )
        began = time.perf_counter()
        study.optimize(objective, n_trials=trials, n_jobs=2)
        wall_s = time.perf_counter() - began
    makespan_s = max(end for _, end in spans) - min(start for start, _ in spans)
    return {"makespan_s": makespan_s, "wall_s": wall_s, "epochs": epochs[0]}


def ray_tune(trials: int) -> dict[str, float]:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    def train(config: dict[str, float]) -> None:
        for epoch in range(MAX_EPOCHS):
            time.sleep(EPOCH_S)
            tune.report({"loss": loss_at(config["lr"], epoch)})

    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            train,
            param_space={"lr": tune.loguniform(1e-4, 1)},
            tune_config=tune.TuneConfig(
                num_samples=trials,
                metric="loss",
                mode="min",
                scheduler=ASHAScheduler(max_t=MAX_EPOCHS, grace_period=1, reduction_factor=ETA),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        began = time.perf_counter()
        grid = tuner.fit()
        wall_s = time.perf_counter() - began
    done = [r.metrics for r in grid]
    first = min(m["timestamp"] - m["time_total_s"] for m in done)
    last = max(m["timestamp"] for m in done)
    return {
        "makespan_s": max(last - first, 1e-9),
        "wall_s": wall_s,
        "epochs": sum(m["training_iteration"] for m in done),
    }


def syne_tune(trials: int) -> dict[str, float]:
    """In a folder of its own: it leaves files in the home and in the working directory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["SYNETUNE_FOLDER"] = folder
        return _syne_tune(trials)


def _syne_tune(trials: int) -> dict[str, float]:
    import logging

    logging.getLogger().setLevel(logging.ERROR)
    from syne_tune import StoppingCriterion, Tuner
    from syne_tune.backend import PythonBackend
    from syne_tune.config_space import loguniform
    from syne_tune.optimizer.baselines import ASHA

    space = {"lr": loguniform(1e-4, 1), "max_epochs": MAX_EPOCHS}
    backend = PythonBackend(tune_function=_syne_train, config_space=space)
    scheduler = ASHA(
        space,
        metric="loss",
        time_attr="epoch",
        max_t=MAX_EPOCHS,
        grace_period=1,
        reduction_factor=ETA,
        do_minimize=True,
    )
    tuner = Tuner(
        trial_backend=backend,
        scheduler=scheduler,
        stop_criterion=StoppingCriterion(max_num_trials_started=trials),
        n_workers=2,
        sleep_time=0.0,
        save_tuner=False,
        print_update_interval=1e9,
    )
    began = time.perf_counter()
    tuner.run()
    wall_s = time.perf_counter() - began
    seen = tuner.tuning_status.overall_metric_statistics
    epochs = int(seen.count)  # one report per epoch
    makespan_s = seen.max_metrics["ended_s"] - seen.min_metrics["began_s"]
    return {"makespan_s": makespan_s, "wall_s": wall_s, "epochs": epochs}


def _syne_train(lr: float, max_epochs: int) -> None:
    import math
    import time

    from syne_tune import Reporter

    report, began_s = Reporter(), time.time()
    for epoch in range(max_epochs):
        time.sleep(0.010)
        loss = abs(math.log10(lr) + 2) + 1 / (epoch + 1)
        report(loss=loss, epoch=epoch + 1, began_s=began_s, ended_s=time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=81)
    parser.add_argument("--peers", default="optuna,ray,syne")
    parser.add_argument(
        "--slow", type=int, default=2, help="repeats that Ray Tune and Syne Tune join: they take minutes each"
    )
    options = parser.parse_args()
    peers = options.peers.split(",")
    runs: dict[str, list[dict[str, float]]] = {}
    contenders = {"penstock": penstock}
    if "optuna" in peers:
        contenders["optuna"] = optuna
    if "ray" in peers:
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        contenders["ray tune"] = ray_tune
    if "syne" in peers:
        contenders["syne tune"] = syne_tune
    for repeat in range(options.repeats):
        for name, contender in contenders.items():
            if name in ("ray tune", "syne tune") and repeat >= options.slow:
                continue
            result = contender(options.trials)
            result["ratio"] = result["makespan_s"] / (result["epochs"] * EPOCH_S / 2)
            runs.setdefault(name, []).append(result)
            print(f"  repeat {repeat + 1}: {name} {result}", flush=True)
    print(
        f"\nASHA, {options.trials} configurations, up to {MAX_EPOCHS} epochs of 10 ms, 2 workers: makespan / ideal"
    )
    results = {}
    for name, found in runs.items():
        keys = ("ratio", "makespan_s", "wall_s", "epochs")
        results[name] = {key: _bench.spread([r[key] for r in found]) for key in keys}
        print(f"  {name:10s}", *(f"{key} {_bench.text([r[key] for r in found])}" for key in keys))
    if peers == ["optuna"]:
        command = f"python benchmarks/asha.py --repeats {options.repeats} --peers optuna"
        _bench.save("asha_optuna", command, results, ("optuna",))
    else:
        _bench.save("asha", "make bench-asha", results, ("optuna", "ray", "syne-tune"))


if __name__ == "__main__":
    main()
