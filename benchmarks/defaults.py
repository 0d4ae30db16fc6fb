"""Penstock's, Optuna's and Ray Tune's defaults side by side: time to the same quality, with no argument but the goal.

Run with: python benchmarks/defaults.py digits|fashion|characters [--seeds 5] [--seconds 20] [--data FOLDER]

Each contender gets the same network, data, optimizer, epochs, space, seconds and both cores, one after another, seed by
seed. The quality is the best validation accuracy of any epoch so far; Penstock and a peer are timed to the worse of
their two final ones, so that both reach it; who has reported nothing when the time is up counts with that time. The
data are in memory before the clock starts (for Ray Tune in its object store), and all run in one process: what a
contender keeps for its next study (imports, Ray's workers, the process that Penstock forks its workers from) stays, so
that of the seeds the first is a cold start. Penstock:
``pk.Study(task, space, maximize="accuracy").run()``, which begins with the middle of the space: a learning rate that
is usual, as people choose their domains, and as these three are chosen. ``--shift 10`` moves the learning rates up by
that factor, so that the middle is no longer a good one; its results are kept under names of their own. Optuna:
``study.optimize(objective)`` with reports after every epoch, so that its default pruner works. Ray Tune:
``Tuner.fit()`` with a report after every epoch; starting Ray itself is not counted. Time begins with the call and ends
at the report.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from _bench import save, spread
from penstock.core import Reported
from penstock.report import View

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist installs it
EPOCHS = 9


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs and targets to train on, and to validate with."""


@dataclass(frozen=True)
class Problem:
    """A task as all contenders get it."""

    network: Callable[..., nn.Module]
    data: Callable[[], Tensors]
    optimizer: type[torch.optim.Optimizer]
    low: float
    high: float
    loss: Callable[..., torch.Tensor] = F.cross_entropy


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float().mean()


# --- the three tasks ---------------------------------------------------------------------------------------------


def digits() -> Tensors:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data / 16, dtype=torch.float32)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1347], y[:1347], x[1347:], y[1347:]


def mlp(**_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _idx(path: Path, head: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(gzip.open(path).read()[head:]), dtype=torch.uint8)


def fashion() -> Tensors:
    folder = Path(os.environ.get("PENSTOCK_FASHION_MNIST", FASHION))
    x = _idx(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).float() / 255
    y = _idx(folder / "train-labels-idx1-ubyte.gz", 8).long()
    return x[:2000], y[:2000], x[2000:3000], y[2000:3000]


def cnn(**_: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 6 * 6, 10),
    )


def characters() -> Tensors:
    """Python's own help texts, to be continued letter by letter."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))[:60_000]
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([letters[letter] for letter in text])
    pieces = codes.unfold(0, 33, 32)
    x, y = pieces[:, :-1], pieces[:, 1:]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].contiguous(), y[order].contiguous()
    return x[:1200], y[:1200], x[1200:1600], y[1200:1600]


class Transformer(nn.Module):
    def __init__(self, width: int = 32, letters: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.place = nn.Parameter(torch.zeros(32, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.out = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) + self.place
        normal = self.one(hidden)
        seen = F.scaled_dot_product_attention(
            self.query(normal), self.key(normal), self.value(normal), is_causal=True
        )
        hidden = hidden + self.mix(seen)
        hidden = hidden + self.feed(self.two(hidden))
        return self.out(hidden)


def transformer(**_: Any) -> nn.Module:
    return Transformer()


def letter_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


PROBLEMS = {
    "digits": Problem(mlp, digits, torch.optim.SGD, 1e-4, 1.0),
    "fashion": Problem(cnn, fashion, torch.optim.SGD, 1e-4, 1.0),
    "characters": Problem(transformer, characters, torch.optim.Adam, 1e-5, 1e-1, letter_loss),
}
BATCH_SIZE = 32


# --- the contenders ----------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """Best so far by time."""

    points: list[tuple[float, float]]
    seconds: float = 0.0  # what it was given: one without a single report by then counts with these
    trials: int = 0

    @property
    def final(self) -> float:
        return max((value for _, value in self.points), default=0.0)

    def time_to(self, quality: float) -> float:
        return min((at for at, value in self.points if value >= quality), default=self.seconds)


def penstock(problem: Problem, data: Tensors, seed: int, seconds: float) -> Curve:
    """With nothing but the goal. The clock ends it, from outside: a default study has its own end."""

    x, y, v, w = data
    first = "momentum" if problem.optimizer is torch.optim.SGD else "beta1"
    task = pk.Task(
        problem.network,
        pk.Data((x, y), (v, w)),
        problem.loss,
        metrics={"accuracy": accuracy},
        optimizer=problem.optimizer,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
    )
    space = pk.Space(lr=pk.Float(problem.low, problem.high, log=True), **{first: pk.Float(0.5, 0.99)})
    curve = Curve([], seconds)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        begun_s = time.perf_counter()
        study = pk.Study(task, space, maximize="accuracy", seed=seed)
        listener = _Listener(curve, begun_s, begun_s + seconds)
        study.run(view=listener)
        curve.trials = len(study.trials)
    print(f"    {listener.said[0] if listener.said else ''}", flush=True)
    return curve


class _Listener(View):
    """Keeps the best so far, and interrupts the study when the time is up."""

    def __init__(self, curve: Curve, begun_s: float, end_s: float) -> None:
        self.curve, self.begun_s, self.end_s = curve, begun_s, end_s
        self.said: list[str] = []

    def open(self, name: str, goal: Any, state: Any, slots: int) -> None:
        pass

    def on(self, event: Any, state: Any) -> None:
        if isinstance(event, Reported):
            self.curve.points.append((time.perf_counter() - self.begun_s, event.metrics["accuracy"]))

    def tick(self, state: Any, expected: Any, busy: int) -> None:
        if time.perf_counter() > self.end_s:
            self.end_s = float("inf")
            os.kill(os.getpid(), 15)  # SIGTERM: running epochs end, then it leaves

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass


def loop(
    problem: Problem,
    data: Tensors,
    config: dict[str, float],
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """A plain training, as one writes it: the one of the peers."""
    torch.manual_seed(seed)
    x, y, v, w = data
    model = problem.network()
    if problem.optimizer is torch.optim.SGD:
        optimizer = problem.optimizer(model.parameters(), lr=config["lr"], momentum=config["other"])
    else:
        optimizer = problem.optimizer(model.parameters(), lr=config["lr"], betas=(config["other"], 0.999))
    for epoch in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            problem.loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            report(epoch, float(accuracy(model(v), w)))


def optuna(problem: Problem, data: Tensors, seed: int, seconds: float) -> Curve:
    """One after another, as by default; torch uses both cores."""
    import optuna as library

    library.logging.set_verbosity(library.logging.ERROR)
    curve = Curve([], seconds)
    begun_s = time.perf_counter()

    def objective(trial: Any) -> float:
        config = {
            "lr": trial.suggest_float("lr", problem.low, problem.high, log=True),
            "other": trial.suggest_float("other", 0.5, 0.99),
        }
        best = 0.0

        def report(epoch: int, value: float) -> None:
            nonlocal best
            best = max(best, value)
            curve.points.append((time.perf_counter() - begun_s, value))
            trial.report(value, epoch)
            if trial.should_prune():
                raise library.TrialPruned
            if time.perf_counter() - begun_s > seconds:
                raise library.TrialPruned

        loop(problem, data, config, seed, report)
        return best

    sampler = library.samplers.TPESampler(seed=seed)  # the default, with a seed
    study = library.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, timeout=seconds)
    curve.trials = len(study.trials)
    return curve


def tune(problem: Problem, data: Tensors, seed: int, seconds: float) -> Curve:
    """As many trials at once as there are cores, as by default."""
    import ray
    from ray import tune as library
    from ray.tune import Callback

    curve = Curve([], seconds)
    begun_s = 0.0
    stored = ray.put(data)

    def trainable(config: dict[str, float]) -> None:
        loop(problem, ray.get(stored), config, seed, lambda _, value: library.report({"accuracy": value}))

    class Watch(Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
            curve.points.append((time.perf_counter() - begun_s, result["accuracy"]))

    space = {"lr": library.loguniform(problem.low, problem.high), "other": library.uniform(0.5, 0.99)}
    with tempfile.TemporaryDirectory() as folder:
        tuner = library.Tuner(
            trainable,
            param_space=space,
            tune_config=library.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=-1,
                time_budget_s=seconds,
                search_alg=library.search.BasicVariantGenerator(random_state=seed),
            ),
            run_config=library.RunConfig(storage_path=folder, verbose=0, callbacks=[Watch()]),
        )
        begun_s = time.perf_counter()
        results = tuner.fit()
        if results.errors and not curve.points:
            print(
                f"    ray tune has no report: {str(results.errors[0]).strip().splitlines()[-1]}", flush=True
            )
        curve.trials = len(results)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problem", choices=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--data", type=Path, default=None, help="the folder of Fashion-MNIST's four files")
    parser.add_argument("--only", nargs="*", default=None, help="contenders; nothing is saved")
    parser.add_argument("--shift", type=float, default=1.0, help="times all learning rates")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["PENSTOCK_FASHION_MNIST"] = str(options.data)
    warnings.filterwarnings("ignore")
    problem = PROBLEMS[options.problem]
    problem = replace(problem, low=options.shift * problem.low, high=options.shift * problem.high)
    contenders: dict[str, Callable[[Problem, Tensors, int, float], Curve]] = {
        "penstock": penstock,
        "optuna": optuna,
        "ray tune": tune,
    }
    if options.only:
        contenders = {name: contenders[name] for name in options.only}
    if "ray tune" in contenders:
        import ray

        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        # Its workers find this file's modules, too.
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        ray.init("local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    data = problem.data()
    finals: dict[str, list[float]] = {name: [] for name in contenders}
    trials: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}  # ours and theirs
    for seed in range(options.seeds):
        curves = {name: run(problem, data, seed, options.seconds) for name, run in contenders.items()}
        for name, curve in curves.items():
            finals[name].append(curve.final)
            trials[name].append(float(curve.trials))
            told = (
                f"  seed {seed}: {name} {curve.final:.4f}, {curve.trials} trials, {len(curve.points)} epochs"
            )
            if name != "penstock" and "penstock" in curves:
                ours = curves["penstock"]
                quality = min((each.final for each in (ours, curve) if each.points), default=0.0)
                seconds[name].append((ours.time_to(quality), curve.time_to(quality)))
                told += (
                    f"; {quality:.4f} after {seconds[name][-1][1]:.2f} s, ours {seconds[name][-1][0]:.2f} s"
                )
            print(told, flush=True)
    result: dict[str, Any] = {
        name: {"final": spread(finals[name]), "trials": spread(trials[name])} for name in contenders
    }
    for name, pairs in seconds.items():
        if pairs:
            ours_s, theirs_s = zip(*pairs, strict=True)
            result[name] |= {"seconds": spread(theirs_s), "penstock_seconds": spread(ours_s)}
            medians = statistics.median(theirs_s), statistics.median(ours_s)
            print(f"{name}: {medians[0]:.2f} s, ours {medians[1]:.2f} s to the same quality")
    if not options.only:
        result["faster"] = {
            name: spread([theirs / mine for mine, theirs in pairs])
            for name, pairs in seconds.items()
            if pairs
        }
        given = f"{options.problem} --seeds {options.seeds} --seconds {options.seconds:g}"
        name = f"defaults_{options.problem}"
        if options.shift != 1.0:
            given += f" --shift {options.shift:g}"
            name += "_shifted"
        command = f"python benchmarks/defaults.py {given}"
        save(name, command, result, ["penstock", "optuna", "ray", "torch"])


if __name__ == "__main__":
    main()
