# Run with: python examples/flagship.py [local | ray | simulated]
"""All five at once: limits by predictors, Hyperband on accuracy and energy, a narrow twin whose trials train fused,
Fluid planning, power limits found just in time, a budget in watt-hours. Killed in the middle, it goes on from there
when it is run again."""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as pk
from penstock.energy import V100, Load
from penstock.predict import Features, Overhead, Predictor


def digits():
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    return pk.Data.split(images, torch.tensor(data.target), val=0.25)


def network(width):
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def load(config):
    """What a training asks of the GPU, which is a simulated one: there is none here. Half a minute an epoch."""
    busy = min(1.0, config["width"] / 512 * (config["batch_size"] / 64) ** 0.5)
    return Load(epoch_s=30.0, duty=0.4 + 0.5 * busy, peak_w=240 + 120 * busy, light_w=60)


task = pk.Task(
    network,
    digits,
    F.cross_entropy,
    metrics={"accuracy": accuracy},
    optimizer=torch.optim.SGD,
    epochs=9,
)
space = pk.Space(
    width=pk.Choice(64, 128, 512, structural=True),
    batch_size=pk.Choice(32, 64, structural=True),  # it changes watts, if not shapes
    lr=pk.Float(0.003, 0.5, log=True),
    momentum=pk.Float(0.5, 0.95),
    weight_decay=pk.Float(1e-5, 1e-2, log=True, transfers=False),  # tuned on the full model, in the end
)
limits = [pk.power_w <= 180, pk.memory_bytes <= "1MB"]  # HyperPower: of the full model
gpus = pk.SimulatedGpus(load, samples=1348, target=8.0)


def predictors():
    """Memory as measured here, power as the GPU would show it."""
    measured = pk.Profile(task, space, seconds=0.01).collect(12)
    configs = [space.sample(seed) for seed in range(24)]
    watts = [V100.power_w(load(config), V100.max_limit_w) for config in configs]
    return pk.Predictors(
        {
            "memory_bytes": measured["memory_bytes"],
            "power_w": Predictor.fit("power_w", Features.of(space), configs, watts),
        },
        features=Features.of(space),
        device=V100.name,
    )


def executor(where):
    """Where it runs: the same study on all three."""
    if where == "simulated":
        sharing = Overhead(alpha=1.3, beta=1.1, max_sharing=2, max_devices=2)
        return pk.Simulated(2, seconds=30.0, fused=0.3, target=8.0, overhead=sharing, power=gpus)
    return pk.Ray() if where == "ray" else pk.Local(2)


def study(where, store, known, *, max_epochs=9, **options):
    """The study. ``known``: the predictors."""
    return pk.Study(
        task,
        space,
        maximize="accuracy",
        minimize="energy_j",  # a Pareto set: no network that others beat in both
        scheduler=pk.Hyperband(max_epochs=max_epochs, eta=3, sampler=pk.Random()),
        limits=limits,
        predictors=known,
        surrogate=pk.Shrink(
            4, second=1
        ),  # Hydro: tune a twin a quarter as wide, eagerly train the model itself
        fuse=4,  # Hydro: up to four twins train as one
        planner=pk.Fluid(overhead=Overhead(alpha=1.3, beta=1.1, max_sharing=2, max_devices=2)),
        power_limits=pk.PowerLimits(pk.EtaCost(0.5), slice_s=1.0),  # Zeus: profiled in the first epochs
        meter=True if where == "simulated" else gpus,
        budget=pk.Budget(energy_wh=1000),
        executor=executor(where),
        store=store,
        seed=7,
        **options,
    )


def unfinished(store):
    """The study that an earlier run of this file was stopped in the middle of, or None."""
    if not Path(store).exists():
        return None
    try:
        left = pk.Study.load(store)
    except pk.errors.InvalidInput:
        return None  # it was killed before there was one
    closed = left.state.closed
    return left if closed is None or closed.reason in ("interrupted", "error") else None


if __name__ == "__main__":
    quick = "PENSTOCK_EXAMPLE_QUICK" in os.environ
    where = sys.argv[1] if len(sys.argv) > 1 else "simulated" if quick else "local"
    store = f"flagship-{where}.db"
    found = unfinished(store)
    if found is None:
        found = study(where, store, predictors())
    else:
        print(f"going on with {found.name!r} of {store}, after {found.state.epochs} epochs")
    found.run(view="lines")
    print(found)
    print(f"{len(found.surrogate_trials)} trials of the twin, {len(found.target_trials)} of the model itself")
    print(f"{found.refused} proposals refused: the model would not keep {', '.join(map(str, limits))}")
    for trial in found.best_trials:
        print(f"  accuracy {trial.metrics['accuracy']:.3f} for {trial.energy}: {dict(trial.config)}")
    for note in found.state.notes:
        if note.topic == "power_profile":
            print(
                f"  batch size {note.data['batch_size']}: {note.data['limit_w']:.0f} W saves "
                f"{note.data['energy_saved']:.0%} of the energy for {-note.data['time_saved']:.0%} more time"
            )
