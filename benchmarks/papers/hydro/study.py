"""A whole study, the trained target included: Penstock with a surrogate against Ray Tune on the full model.

Run with: OMP_NUM_THREADS=1 python benchmarks/papers/hydro/study.py --model cnn [--asha] [--repeats 5]

Both sides get the same random configurations, data, epochs and two processes of one thread each. Ray Tune trains every
configuration on the full model; its best is the result. Penstock trains them on a twin an eighth as wide (fused where
it pays), and the best on the full model. Wall time from the call to the result; Ray is started before the clock is. The
quality is the final validation loss of the result. Sides take turns. ``--trials 8 --epochs 2`` is a quick look.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from transfer import Language, digits, language_loss, sentences

import penstock as pk

SPACE = pk.Space(lr=pk.Float(1e-4, 0.1, log=True), beta1=pk.Float(0.5, 0.95))
BATCH = 32


def cnn(config):
    return nn.Sequential(
        nn.Conv2d(1, 256, 3, 2, 1),
        nn.BatchNorm2d(256),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, 1, 1),
        nn.BatchNorm2d(256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def transformer(config):
    return Language(512)


PROBLEMS = {"cnn": (cnn, digits, F.cross_entropy), "transformer": (transformer, sentences, language_loss)}


def with_penstock(name, configs, epochs, asha, seed):
    model, data, loss = PROBLEMS[name]
    task = pk.Task(model, data, loss, optimizer=torch.optim.Adam, epochs=epochs, batch_size=BATCH)
    trials = len(configs)
    scheduler = pk.ASHA(max_epochs=epochs, trials=trials) if asha else pk.Full(trials=trials, epochs=epochs)
    with tempfile.TemporaryDirectory() as folder:
        study = pk.Study(
            task,
            SPACE,
            minimize="loss",
            scheduler=scheduler,
            sampler=pk.Random(),
            warm_start=configs,
            executor=pk.Local(slots=2),
            surrogate=pk.Shrink(8),
            store=f"{folder}/study.db",
            seed=seed,
            meter=False,
        )
        begun = time.perf_counter()
        study.run()
        seconds = time.perf_counter() - begun
        if study.best is None or not study.best.is_target:
            raise SystemExit(f"no target was trained: {study}")
        return seconds, study.best.metrics["loss"]


def ray_train(given):
    from ray import tune

    torch.set_num_threads(1)
    name, config, epochs, seed = given["name"], given["config"], given["epochs"], given["seed"]
    model_of, data_of, loss_of = PROBLEMS[name]
    data = data_of()
    (x, y), (vx, vy) = data.train, data.val
    torch.manual_seed(seed)
    model = model_of(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(config["beta1"], 0.999))
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            value = float(loss_of(model(vx), vy))
        tune.report({"loss": value if math.isfinite(value) else 1e9})


def with_ray(name, configs, epochs, asha, seed):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3) if asha else None
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(ray_train, {"cpu": 1}),
            param_space={"name": name, "epochs": epochs, "seed": seed, "config": tune.grid_search(configs)},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", scheduler=scheduler, max_concurrent_trials=2
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        begun = time.perf_counter()
        results = tuner.fit()
        return time.perf_counter() - begun, results.get_best_result().metrics["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn", choices=list(PROBLEMS))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--asha", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray

    here = os.path.dirname(os.path.abspath(__file__))
    environment = {"env_vars": {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    sides = {"Penstock": with_penstock, "Ray Tune": with_ray}
    found = {side: ([], []) for side in sides}
    for seed in range(given.repeats):
        configs = [SPACE.sample(1000 * seed + number) for number in range(given.trials)]
        for side, run in sides.items():
            seconds, loss = run(given.model, configs, given.epochs, given.asha, seed)
            found[side][0].append(seconds)
            found[side][1].append(loss)
            print(f"{side:<9} seed {seed}: {seconds:8.1f} s, loss {loss:.4f}", flush=True)
    times = {side: statistics.median(each[0]) for side, each in found.items()}
    print(f"{given.model}, {given.trials} x {given.epochs} epochs{', ASHA' if given.asha else ''}:")
    for side, (_, losses) in found.items():
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        print(
            f"  {side:<9} {times[side]:8.1f} s (median), loss {statistics.fmean(losses):.4f} +- {error:.4f}"
        )
    print(f"  {times['Ray Tune'] / times['Penstock']:.1f} times shorter")
    ray.shutdown()


if __name__ == "__main__":
    main()
