"""30 cases of LR exploration against a full grid, beside fastai's and Lightning's rules.

    python -m benchmarks.papers.sm2.lr_cases [--fresh] [--scale S] [--cases N] [--curves FILE]

``--curves`` keeps what was measured case by case, and goes on from what an interrupted run left there.

Each case is a (model, data, optimizer, batch size). The truth is a training at every rate of a grid of 20 from 1e-4
to 1; a rule sees one sweep (a quarter of an epoch, at least 60 steps) and names a rate, at which the same training
is run. Excess: its final training loss above the grid's best. Failing: not finite, or less than half of the
improvement that the best rate makes.

Penstock's margin and slope threshold were picked by a search over 40 variants on 24 of the standard cases (smaller
data), so its row there is in-sample. ``--fresh`` is the independent check: six other networks, other optimizers and
batch sizes, other seeds of weights, order and series, none of which was looked at before. The peers' rules are
re-created here and see Penstock's sweep (20 rates, loss on a fixed probe), not their own 100 steps.
"""

from __future__ import annotations

import argparse
import functools
import math
import pickle
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks._bench import save
from benchmarks.papers.sm2 import problems

from penstock.train import LRChoice, Task, choose_lr, find_lr
from penstock.train._loop import Trainer

LOW, HIGH, POINTS = 1e-4, 1.0, 20
STEPS = 150  # a training takes at least: after fewer every rule looks best that dares the most
GRID = [LOW * (HIGH / LOW) ** (i / (POINTS - 1)) for i in range(POINTS)]

SGD = functools.partial(torch.optim.SGD)
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
SETTINGS = [
    ("SGD", SGD, 16),
    ("SGD momentum", MOMENTUM, 64),
    ("Adam", torch.optim.Adam, 64),
    ("RMSprop", torch.optim.RMSprop, 32),
    ("SGD momentum", MOMENTUM, 256),
]
FRESH = [
    ("SGD", SGD, 32),
    ("SGD momentum", MOMENTUM, 128),
    ("Adam", torch.optim.Adam, 16),
    ("AdamW", torch.optim.AdamW, 64),
    ("SGD Nesterov", functools.partial(torch.optim.SGD, momentum=0.95, nesterov=True), 48),
]


def fresh_models(scale: float = 1.0) -> dict[str, tuple]:
    """Networks that no constant was chosen on."""
    n = lambda rows: int(rows * scale)  # noqa: E731
    text, vocab = problems.text(n(2000), length=24)
    fashion = problems.fashion(n(4000), pool=4)
    tanh, gelu = torch.nn.Tanh, torch.nn.GELU
    return {
        "linear digits": (lambda: problems.mlp(64), problems.digits(), F.cross_entropy, 6),
        "layer-norm MLP digits": (
            lambda: problems.normed_mlp(64, 48, torch.nn.LayerNorm, gelu), problems.digits(), F.cross_entropy, 4,
        ),
        "batch-norm MLP fashion": (
            lambda: problems.normed_mlp(49, 64, torch.nn.BatchNorm1d, tanh), fashion, F.cross_entropy, 3,
        ),
        "ResNet 6 fashion": (lambda: problems.resnet(6), fashion, F.cross_entropy, 2),
        "GRU series": (
            lambda: problems.Forecast(channels=5, hidden=32, kind=torch.nn.GRU),
            problems.series(n(2000), channels=5, steps=16, seed=7), F.smooth_l1_loss, 3,
        ),
        "1-layer transformer text": (
            lambda: problems.Language(vocab, d=48, layers=1, heads=4, length=24), text, problems.next_char, 2,
        ),
    }  # fmt: skip


def models(scale: float = 1.0) -> dict[str, tuple]:
    n = lambda rows: int(rows * scale)  # noqa: E731
    text, vocab = problems.text(n(2000))
    fashion = problems.fashion(n(4000))
    return {
        "MLP digits": (lambda: problems.mlp(64, 32), problems.digits(), F.cross_entropy, 6),
        "deep MLP fashion": (lambda: problems.mlp(196, 64, 64, 64), fashion, F.cross_entropy, 3),
        "CNN fashion": (problems.cnn, fashion, F.cross_entropy, 3),
        "ResNet fashion": (lambda: problems.resnet(4), fashion, F.cross_entropy, 2),
        "LSTM series": (problems.Forecast, problems.series(n(2000)), F.mse_loss, 3),
        "transformer text": (lambda: problems.Language(vocab), text, problems.next_char, 2),
    }


def final_loss(task: Task, lr: float, size: int, seed: int) -> tuple[float, float]:
    """Training loss before and after."""
    torch.manual_seed(seed)
    trainer = Trainer(task, {"lr": lr, "batch_size": size}, seed=seed)
    before = trainer.evaluate(trainer.data.train)["loss"]
    after = math.nan
    for _ in range(task.epochs):
        if not math.isfinite(trainer.train_epoch()["train_loss"]):
            return before, math.inf
        after = trainer.evaluate(trainer.data.train)["loss"]
    return before, after if math.isfinite(after) else math.inf


def fastai_valley(choice: LRChoice) -> float:
    """fastai 2's default: the middle of the longest valley, a third in."""
    pairs = [(r, v) for r, v in zip(choice.lrs, ema(choice.losses), strict=False) if math.isfinite(v)]
    losses = [v for _, v in pairs]
    n = len(losses)
    longest = [1] * n
    start, end = 0, 0
    for i in range(1, n):
        for j in range(i):
            if losses[i] < losses[j] and longest[i] < longest[j] + 1:
                longest[i] = longest[j] + 1
            if longest[end] < longest[i]:
                end, start = i, i - longest[i] + 1
    sections = (end - start) / 3
    return pairs[start + int(sections) + int(sections / 2)][0]


def lightning(choice: LRChoice) -> float:
    """Lightning's suggestion: the steepest descent of the smoothed loss, ends left out."""
    values = ema(choice.losses)
    skip_begin, skip_end = (2, 1) if len(values) < 40 else (10, 1)
    inner = [v for v in values[skip_begin : len(values) - skip_end] if math.isfinite(v)]
    if len(inner) < 2:
        return choice.lrs[0]
    slopes = [inner[1] - inner[0]]
    slopes += [(b - a) / 2 for a, b in zip(inner, inner[2:], strict=False)] + [inner[-1] - inner[-2]]
    return choice.lrs[slopes.index(min(slopes)) + skip_begin]


def ema(losses: tuple[float, ...], keep: float = 0.5) -> list[float]:
    """Exponential smoothing without bias, as both peers do; 0.5 instead of their 0.98, for 20 points and not 100."""
    result, mean = [], 0.0
    best = math.inf
    for i, loss in enumerate(losses):
        if not math.isfinite(loss) or (i > 1 and loss > 4 * best):
            break
        mean = keep * mean + (1 - keep) * loss
        result.append(mean / (1 - keep ** (i + 1)))
        best = min(best, result[-1])
    return result


def literal(choice: LRChoice) -> float:
    """The second derivative over the rate itself, as the paper's words have it."""
    from penstock.train._lr_range import _second_derivative, _smooth

    values = [v for v in choice.losses if math.isfinite(v)]
    if len(values) < 4:
        return choice.lrs[0]
    bends = [abs(c) for c in _second_derivative(choice.lrs[: len(values)], _smooth(values))]
    windows = [(sum(bends[i : i + 3]) / 3, i + 2) for i in range(len(values) - 2)]
    windows.sort()
    return choice.lrs[max(last for _, last in windows[: max(1, len(windows) // 2)])]


RULES = {
    "Penstock": lambda choice: choice.lr,
    "fastai valley": fastai_valley,
    "Lightning": lightning,
    "literal (linear lr)": literal,
}


def collect(cases: int, scale: float = 1.0, curves: Path | None = None, *, fresh: bool = False) -> list[dict]:
    rows: list[dict] = []
    seed = 101 if fresh else 0
    kept = pickle.loads(curves.read_bytes()) if curves is not None and curves.exists() else []
    for name, (make, data, loss, least) in (fresh_models if fresh else models)(scale).items():
        for label, optimizer, size in FRESH if fresh else SETTINGS:
            if len(rows) >= cases:
                return rows
            start = time.perf_counter()
            n = len(data.train[0])
            epochs = max(least, -(-STEPS * size // n))
            task = Task(make, data, loss, optimizer=optimizer, epochs=epochs)
            if len(rows) < len(kept):
                rows.append({**kept[len(rows)], "task": task})
                continue
            truth = [final_loss(task, lr, size, seed) for lr in GRID]
            fraction = min(1.0, max(0.25, POINTS * size / n))
            choice = find_lr(
                task, {"batch_size": size}, lrs=POINTS, lr_range=(LOW, HIGH), fraction=fraction, seed=seed
            )
            rows.append(
                {
                    "case": f"{name}, {label}, {size}",
                    "task": task,
                    "size": size,
                    "seed": seed,
                    "before": truth[0][0],
                    "truth": [after for _, after in truth],
                    "choice": choice,
                }
            )
            if curves is not None:
                bare = [{key: value for key, value in row.items() if key != "task"} for row in rows]
                curves.write_bytes(pickle.dumps(bare))
            print(f"{rows[-1]['case']:40s} {time.perf_counter() - start:5.1f} s", flush=True)
    return rows


def judge(rows: list[dict], rule, *, run: bool = True) -> list[tuple[float, float, bool]]:
    """Per case: the rate, the excess and whether it fails."""
    verdicts = []
    for row in rows:
        lr = rule(choose_lr(row["choice"].lrs, row["choice"].losses))
        best = min(row["truth"])
        near = min(range(POINTS), key=lambda i: abs(math.log(GRID[i] / lr)))
        exact = abs(math.log(GRID[near] / lr)) < 1e-6
        loss = (
            row["truth"][near]
            if exact or not run
            else final_loss(row["task"], lr, row["size"], row["seed"])[1]
        )
        fails = not math.isfinite(loss) or row["before"] - loss < 0.5 * (row["before"] - best)
        verdicts.append((lr, loss - best, fails))
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument(
        "--fresh", action="store_true", help="networks and seeds that no constant was chosen on"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data")
    parser.add_argument("--curves", type=Path, help="keep what was measured here (without the tasks)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = {} if args.curves and args.curves.exists() else None  # nobody knows which source measured that
    rows = collect(args.cases, args.scale, args.curves, fresh=args.fresh)
    verdicts = {name: judge(rows, rule) for name, rule in RULES.items()}
    print(f"\n{'case':40s} {'best lr':>9s}" + "".join(f"{name:>26s}" for name in RULES))
    for i, row in enumerate(rows):
        best = GRID[min(range(POINTS), key=lambda j: row["truth"][j])]
        cells = "".join(
            f"{v[i][0]:12.2g} {v[i][1]:+9.3f}{' FAIL' if v[i][2] else '     '}"[:26].rjust(26)
            for v in verdicts.values()
        )
        print(f"{row['case']:40s} {best:9.2g}{cells}")
    print(f"\n{'rule':22s} {'failing':>8s} {'median excess':>14s} {'worst excess':>13s}")
    results: dict[str, object] = {"cases": len(rows), "seed": rows[0]["seed"], "scale": args.scale}
    for name, found in verdicts.items():
        excess = [e for _, e, _ in found]
        fails = sum(f for _, _, f in found)
        worst = max((e for e in excess if math.isfinite(e)), default=math.nan)
        print(f"{name:22s} {fails:5d}/{len(found)} {statistics.median(excess):14.3f} {worst:13.3f}")
        results[name] = {
            "failing": fails,
            "median_excess": statistics.median(excess),
            "worst_finite_excess": worst,
            "failing_cases": [row["case"] for row, (_, _, bad) in zip(rows, found, strict=True) if bad],
            "lr": {row["case"]: lr for row, (lr, _, _) in zip(rows, found, strict=True)},
        }
    command = (
        f"python -m benchmarks.papers.sm2.lr_cases{' --fresh' if args.fresh else ''} --scale {args.scale:g}"
    )
    save(f"sm2_lr_{'fresh' if args.fresh else 'standard'}", command, results, ["torch"], kept=kept)


if __name__ == "__main__":
    main()
