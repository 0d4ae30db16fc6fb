"""SM2's three scenarios (Table 1): energy with alpha = 0.75, alpha = 1 and vanilla training, and parity.

    python -m benchmarks.papers.sm2.scenarios [resnet lstm transformer] [--quick] [--wide] [--exhaustive]

Models are really trained; the energy is **simulated**: a GPU whose step takes t0 + B t1 seconds and draws
idle + (peak - idle) * busy watts, with rising cooling and transfer losses near full use (SM2 4.1). ``--wide`` is the
paper's second setup, 16 batch sizes and 40 learning rates. ``--exhaustive`` trains every batch size at several learning
rates for as long as SM2's winner and prints the best final quality beside SM2's.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.papers.sm2 import problems

from penstock.core import Measurement, Reported, Segment, Source, Submitted, Trial, TrialStatus
from penstock.schedule import Outcome, Rules
from penstock.schedule._sm2 import SM2, compare, report
from penstock.train import Task
from penstock.train._loop import Trainer

SIZES = [16, 32, 48, 64, 96, 128, 256, 512]
WIDE = [16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512]


@dataclass(frozen=True)
class Gpu:
    """A simulated accelerator."""

    t0_s: float = 1.0e-3
    t1_s: float = 1.5e-5
    idle_w: float = 60.0
    peak_w: float = 300.0

    def sample_j(self, size: int) -> float:
        """Joules of one training sample at a batch size."""
        step_s = self.t0_s + size * self.t1_s
        busy = size * self.t1_s / step_s
        loss = 1 + 0.25 * busy**4  # transfers and cooling, near full use
        return step_s * (self.idle_w + (self.peak_w - self.idle_w) * busy) * loss / size


@dataclass
class Scenario:
    name: str
    task: Task
    metric: str
    maximize: bool
    vanilla_lr: float
    vanilla_size: int
    lr_range: tuple[float, float]
    gpu: Gpu
    epochs: int  # the stopping rule: no more than this, for SM2's last configuration and vanilla alike


def scenarios(scale: float) -> dict[str, Scenario]:
    n = lambda rows: int(rows * scale)  # noqa: E731
    text, vocab = problems.text(n(3000))
    momentum = {"momentum": 0.9}
    return {
        "resnet": Scenario(
            "ResNet, Fashion-MNIST",
            Task(lambda: problems.resnet(4), problems.fashion(n(6000)), F.cross_entropy,
                 metrics={"accuracy": problems.accuracy}, defaults=momentum),
            "accuracy", True, 0.05, 64, (1e-3, 1.0), Gpu(), 60,
        ),
        "lstm": Scenario(
            "LSTM, periodic series",
            Task(problems.Forecast, problems.series(n(6000)), F.mse_loss, metrics={"r2": problems.r2},
                 optimizer=torch.optim.Adam),
            "r2", True, 0.005, 64, (1e-4, 0.1), Gpu(t0_s=3e-3), 60,
        ),
        "transformer": Scenario(
            "transformer LM, Python reference",
            Task(lambda: problems.Language(vocab), text, problems.next_char,
                 metrics={"perplexity": problems.perplexity}, optimizer=torch.optim.Adam),
            "perplexity", False, 0.003, 64, (1e-4, 0.1), Gpu(t1_s=6e-5), 60,
        ),
    }  # fmt: skip


@dataclass
class Study:
    """A study in this process: SM2 decides, the task trains, the GPU model counts."""

    scenario: Scenario
    scheduler: SM2
    seed: int = 0
    events: list[Any] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def run(self) -> Study:
        sign = -1.0 if self.scenario.maximize else 1.0
        self.scheduler.start(
            Rules(lambda k: [Trial(i, {}, self.seed) for i in range(k)], sorted, None, False, self.seed)
        )
        clock = 0.0
        while (group := self.scheduler.next(1)) is not None:
            self.events.append(Submitted(clock, 1, group.segments, group.label))
            for segment in group.segments:
                clock += 1
                run = InProcess(self, segment)
                try:
                    self.scenario.task(run)
                    ok = all(torch.isfinite(torch.tensor(list(m.values()))).all() for _, m, _ in run.reports)
                except RuntimeError:
                    ok = False
                for epoch, metrics, joules in run.reports:
                    energy = Measurement(joules, "J", Source.SIMULATED)
                    self.events.append(Reported(clock, segment.trial.id, epoch, metrics, None, energy))
                last = run.reports[-1][1]
                self.metrics[segment.trial.id] = last
                total = Measurement(sum(j for *_, j in run.reports), "J", Source.SIMULATED)
                status = (
                    TrialStatus.FAILED
                    if not ok
                    else TrialStatus.COMPLETED
                    if segment.last
                    else TrialStatus.PAUSED
                )
                values = (sign * last[self.scenario.metric],) if ok else None
                self.scheduler.ended(
                    Outcome(segment.trial.id, status, segment.until or 0, values, last, total)
                )
            self.scheduler.drops()
        return self


class InProcess:
    """A Run."""

    device = "cpu"

    def __init__(self, study: Study, segment: Segment) -> None:
        self.study, self.segment = study, segment
        self.config, self.seed = segment.trial.config, segment.trial.seed
        self.until, self.options = segment.until, segment.options
        self.reports: list[tuple[int, dict[str, float], float]] = []

    def epochs(self):
        yield from range(self.segment.start, self.segment.until)

    def report(self, **metrics: float) -> None:
        scenario = self.study.scenario
        data = scenario.task.data
        size = self.config["batch_size"]
        samples = len(data.train[0]) * metrics.get("sm2_fraction", 1.0)
        check = len(data.val[0]) * scenario.gpu.sample_j(256) / 3  # a forward pass is a third of a step
        joules = samples * scenario.gpu.sample_j(size) + check
        self.reports.append((self.segment.start + len(self.reports) + 1, metrics, joules))

    def save(self, state: Any) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.study.states[self.segment.trial.id] = buffer.getvalue()

    def load(self) -> Any:
        kept = self.study.states.get(self.segment.trial.id)
        return None if kept is None else torch.load(io.BytesIO(kept), weights_only=False)


def vanilla(scenario: Scenario, lr: float, size: int) -> tuple[float, float, int]:
    """One training without SM2 under the same stopping rule: quality, joules, epochs."""
    trainer = Trainer(scenario.task, {"lr": lr, "batch_size": size}, seed=0)
    data, gpu = scenario.task.data, scenario.gpu
    value, joules, epochs = float("nan"), 0.0, 0
    while epochs < scenario.epochs:
        epochs += 1
        value = trainer.train_epoch()[scenario.metric]
        joules += len(data.train[0]) * gpu.sample_j(size) + len(data.val[0]) * gpu.sample_j(256) / 3
        if value != value:
            break
    return value, joules, epochs


def show(scenario: Scenario, study: Study) -> None:
    told = report(study.events, scenario.metric, maximize=scenario.maximize)
    for round_ in told.rounds:
        if len(round_.configurations) == 1:
            continue
        print(f"  round {round_.number}: batch {scenario.metric:>11s} J/epoch       lr   score")
        for c in round_.configurations:
            value = float("nan") if c.value is None else (-c.value if scenario.maximize else c.value)
            mark = "kept" if c.kept else ""
            print(
                f"           {c.batch_size:6d} {value:11.4f} {c.energy_j or 0:7.1f} {c.lr or 0:8.4f}", end=""
            )
            print(f" {c.score.total:7.3f} {mark}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="scenarios; all by default")
    parser.add_argument("--quick", action="store_true", help="a third of the data")
    parser.add_argument("--wide", action="store_true", help="16 batch sizes, 40 learning rates")
    parser.add_argument("--exhaustive", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name, scenario in scenarios(0.33 if args.quick else 1.0).items():
        if args.names and name not in args.names:
            continue
        start = time.perf_counter()
        sizes, lrs = (WIDE, 40) if args.wide else (SIZES, 20)
        more = {
            "lrs": lrs,
            "lr_range": scenario.lr_range,
            "max_epochs": scenario.epochs,
            "patience": None,
            "side_by_side": True,
        }
        print(f"\n{scenario.name}", flush=True)
        ours = Study(scenario, SM2(sizes, alpha=0.75, **more)).run()
        show(scenario, ours)
        only = Study(scenario, SM2(sizes, alpha=1.0, **more)).run()
        quality = ours.metrics[ours.events[-1].trial][scenario.metric]
        quality_1 = only.metrics[only.events[-1].trial][scenario.metric]
        size, size_1 = (s.scheduler.rounds[-1].configurations[0].batch_size for s in (ours, only))
        plain, plain_j, plain_epochs = vanilla(scenario, scenario.vanilla_lr, scenario.vanilla_size)
        told, told_1 = (report(s.events, scenario.metric, maximize=scenario.maximize) for s in (ours, only))
        row = compare(told_1.energy.joules, told.energy.joules, plain_j)
        table.append((scenario.name, row, quality, quality_1, plain))
        print(
            f"  alpha 0.75: batch {size}, {scenario.metric} {quality:.4f}; alpha 1: batch {size_1}, {quality_1:.4f}; "
            f"vanilla: batch {scenario.vanilla_size}, {plain:.4f} in {plain_epochs} epochs; "
            f"explorations took {100 * told.explored.joules / told.energy.joules:.0f}% of SM2's energy; "
            f"{time.perf_counter() - start:.0f} s"
        )
        if args.exhaustive:
            rates = [
                scenario.lr_range[0] * (scenario.lr_range[1] / scenario.lr_range[0]) ** (i / 6)
                for i in range(7)
            ]
            runs = [(vanilla(scenario, lr, b)[0], b, lr) for b in sizes for lr in rates]
            best = (max if scenario.maximize else min)(run for run in runs if run[0] == run[0])
            print(
                f"  best of {len(runs)} single configurations: {best[0]:.4f} (batch {best[1]}, lr {best[2]:.2g})"
            )
    heads = "".join(f"{head:>10s}" for head in ("alpha 1", "alpha .75", "saving", "vanilla", "parity"))
    print(f"\n{'simulated energy, J':34s}{heads}")
    for name, row, *_ in table:
        cells = (
            f"{row.alpha_1_j:.0f}",
            f"{row.sm2_j:.0f}",
            f"{row.saving:.0%}",
            f"{row.vanilla_j:.0f}",
            f"{row.parity:.2f}",
        )
        print(f"{name:34s}" + "".join(f"{cell:>10s}" for cell in cells))
    print(
        f"median parity {statistics.median(row.parity for _, row, *_ in table):.2f}; the paper: 1.76, 0.90, 0.59"
    )


if __name__ == "__main__":
    main()
