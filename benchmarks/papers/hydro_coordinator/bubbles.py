# PYTHONPATH=benchmarks python benchmarks/papers/hydro_coordinator/bubbles.py
"""Hydro 6.5, Bubble Squeezer, simulated: tuning on one exclusive GPU, with and without the bubbles of a GPT training.

What the paper says of its setting, and what is taken where it says nothing:

- The host: GPT on 32 A100s, 4 stages on 4 nodes, 1F1B: 8 GPUs per stage. Micro-batches are not published; 16 make the
  bubbles 3/19 of a step, which gives the published speed of a trial there, around 15% of its exclusive one.
- The trials: ResNet-18 scaled by 8, batch size 256, fused by F = 16, in bubbles and on the exclusive GPU alike. Fused
  epoch times and memory are the artifact's measurements (--fusion).
- The tuning job (Tables 2 and 3, middle size): 1000 trials of at most 100 epochs; ASHA with grace 3, reduction 3, one
  bracket, promoting first (its Algorithm 2); and random search, which trains all to the end. 1 exclusive GPU.
- Bubbles vary by 5%; what a trial works beyond a bubble's end, the host waits. Moving trials to the exclusive GPU waits
  for the end of their epoch and costs 5 s.

Both contenders have the same planner; fused groups take members in at the ends of epochs where they have room. "Lowest
rung first" sets the bubbles against another order on the GPU alone, the best for it: nobody is promoted before all
trials are through the first rung. That is not ASHA as published. All times are simulated.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import random
import sys
from pathlib import Path

from _bench import save, spread
from penstock.core import Device, Free, Placement, Plan, Segment, Trial
from penstock.plan import (
    FusedGroup,
    FusionChoice,
    FusionProfile,
    Guest,
    Interval,
    Lent,
    Pipeline,
    fused_sizes,
    recall,
    squeeze,
)
from penstock.train._bubble_host import Margin

GB, STEPS = 2**30, 196  # steps of an epoch: CIFAR-10 by 256
STAGES, WIDTH, FUSED, TRIALS, EPOCHS = 4, 8, 16, 1000, 100
ASHA, RANDOM = (3, 9, 27, EPOCHS), (EPOCHS,)
JITTER = 0.05  # how much bubbles vary
MOVE_S = 5.0  # states written and read, a group made anew
LAYERS = 122  # places at which ResNet-18 can stop: 61 modules, forward and backward
GPU = "gpu"


def profiles(path: str) -> FusionChoice:
    rows = {1: (5.594, 1581), 10: (9.398, 2513), 20: (15.25, 3515), 100: (38.27, 11603), 220: (81.04, 23921)}
    if Path(path).exists():
        with open(path) as file:
            found = [r for r in csv.DictReader(file) if r["scale"] == "8"]
        rows = {int(r["fusion"]): (float(r["speed(s)"]), int(r["gmem"])) for r in found}
    made = tuple(FusionProfile(f, s / STEPS, m * 2**20) for f, (s, m) in sorted(rows.items()))
    return FusionChoice(FUSED, FUSED, made, "")


def lent_stages(micro_batches, choice, steps=400):
    """Each stage's speed and free memory, and the host's slowdown, with bubbles that vary and are only expected."""
    host = Pipeline(
        (0.05,) * STAGES,
        (0.10,) * STAGES,
        micro_batches,
        memory_bytes=(80 * GB,) * STAGES,
        state_bytes=(56 * GB,) * STAGES,
        activation_bytes=(5 * GB,) * STAGES,
    )
    schedule = host.schedule()
    rng = random.Random(0)
    stages, lost_s = [], 0.0
    guest = Guest((choice.step_s(FUSED) / LAYERS,) * LAYERS, resume_s=0.0005, slack_s=0.0002)
    for stage in range(STAGES):
        margin, at, worked_s = Margin(), 0, 0.0
        for _ in range(steps):
            late_s = 0.0
            for gap in schedule.idle(stage):
                # the Host expects the quartile of what it saw, and ends a bubble by its margin before
                lent_s = (1 - margin.early) * (1 - 0.6745 * JITTER) * gap.length_s
                real_s = gap.length_s * max(0.0, rng.gauss(1, JITTER))
                _, at, took_s = guest.progress([Interval(0.0, lent_s)], start=at)
                worked_s += took_s
                late_s += max(0.0, lent_s - guest.slack_s - real_s)
            margin.passed(schedule.step_s, late_s)
            lost_s += late_s  # of every stage: at the worst, no two of them wait at the same time
        stages.append((worked_s / (steps * schedule.step_s), host.free_bytes(stage)))
    return stages, lost_s / (steps * schedule.step_s), schedule.ratio()


class Tuning:
    """A tuning job, epoch by epoch, by the plan passes and rules that a study uses."""

    def __init__(self, rungs, lent, choice, seed, *, lowest_first=False):
        rng = random.Random(seed)
        self.score = [rng.random() for _ in range(TRIALS)]
        self.rungs, self.lent, self.choice = rungs, lent, choice
        self.lowest_first = lowest_first
        self.fresh = list(range(TRIALS))
        self.done = [[] for _ in rungs]
        self.promoted = [set() for _ in rungs]
        self.rung = {}
        self.groups: dict[str, dict[int, int]] = {}  # by device: a trial's epochs ahead
        self.free = {GPU, *lent}
        self.leaving: set[int] = set()  # at the end of their epoch in bubbles
        self.arrived: dict[int, int] = {}  # out of the bubbles: they join at the end of the GPU's epoch
        self.events: list[tuple[float, int, str]] = []
        self.steps = [0.0] + [choice.step_s(n) for n in range(1, FUSED + 1)]
        self.now, self.order, self.moved, self.epochs = 0.0, 0, 0, dict.fromkeys(("gpu", "bubbles"), 0)

    def run(self):
        self.plan()
        while self.events:
            self.now, _, name = heapq.heappop(self.events)
            self.epoch_ended(name)
            self.plan()
        assert not self.arrived
        assert not any(self.waiting())
        return self.now

    def promotable(self, rung):
        """ASHA, Algorithm 2: of those who are through the rung below, the best third, as soon as there is room."""
        through = sorted(self.done[rung - 1], key=self.score.__getitem__)
        return [t for t in through[: len(through) // 3] if t not in self.promoted[rung - 1]]

    def waiting(self):
        return [list(self.fresh), *map(self.promotable, range(1, len(self.rungs)))]

    def taken(self, trial, rung):
        if rung:
            self.promoted[rung - 1].add(trial)
        else:
            self.fresh.remove(trial)
        self.rung[trial] = rung
        return self.rungs[rung] - (self.rungs[rung - 1] if rung else 0)

    def epoch_s(self, name):
        speed = self.lent[name].speed if name in self.lent else 1.0
        return STEPS * self.steps[len(self.groups[name])] / speed

    def go_on(self, name, cost_s=0.0):
        self.free.discard(name)
        self.order += 1
        heapq.heappush(self.events, (self.now + self.epoch_s(name) + cost_s, self.order, name))

    def epoch_ended(self, name):
        group = self.groups[name]
        self.epochs["bubbles" if name in self.lent else "gpu"] += len(group)
        for trial in list(group):
            group[trial] -= 1
            if not group[trial]:
                del group[trial]
                self.leaving.discard(trial)
                self.done[self.rung[trial]].append(trial)
            elif trial in self.leaving:
                self.leaving.discard(trial)
                self.arrived[trial] = group.pop(trial)
                self.moved += 1
        if not group:
            del self.groups[name]
            self.free.add(name)
        elif name in self.lent:
            self.go_on(name)
        else:
            self.refill()

    def plan(self):
        if GPU in self.free:
            self.refill()
        if self.lent:
            self.fill_bubbles()
            self.recall()

    def refill(self):
        """Between two epochs of the GPU: who comes out of the bubbles first, then what waits."""
        group = self.groups.get(GPU, {})
        room, before = FUSED - len(group), len(group)
        if not before or room >= FUSED // 8:
            for trial in sorted(self.arrived, key=lambda t: -self.arrived[t])[:room]:
                group[trial] = self.arrived.pop(trial)
            waiting = list(enumerate(self.waiting()))
            for rung, trials in waiting if self.lowest_first else reversed(waiting):
                for trial in trials[: FUSED - len(group)]:
                    group[trial] = self.taken(trial, rung)
        if group:
            self.groups[GPU] = group
            self.go_on(GPU, MOVE_S if before and len(group) > before else 0.0)

    def fill_bubbles(self):
        names = sorted(self.free & self.lent.keys())
        waiting, rungs = [], self.waiting() if names else []
        for rung, trials in enumerate(
            rungs
        ):  # early rungs first (5.1), evenly over what is free (4.3, step 5)
            segments = [Segment(Trial(t, {}, t), 0, self.rungs[rung]) for t in trials]
            for size in fused_sizes(len(trials), FUSED, len(names)) if trials else ():
                waiting.append(Placement(tuple(segments[:size])))
                segments = segments[size:]
        plan = Plan(waiting=tuple(waiting), free=tuple(Free(Device(name)) for name in names))
        plan = squeeze(self.lent, choice=lambda s: self.choice, belongs=lambda s: True)(plan)
        for placed in plan.placed:
            name = placed.shares[0].device
            rung = self.rungs.index(placed.segments[0].until)
            self.groups[name] = {s.trial.id: self.taken(s.trial.id, rung) for s in placed.segments}
            self.go_on(name)

    def recall(self):
        if self.leaving or self.arrived:
            return
        groups = [
            FusedGroup(
                tuple(group),
                tuple(left - 1 for left in group.values()),
                self.epoch_s(name),
                Device(name),
                choice=self.choice,
            )
            for name, group in self.groups.items()
        ]
        idle = [Device(GPU)] if GPU in self.free else []
        for order in recall(groups, idle, self.lent, cost_s=MOVE_S):
            self.leaving.update(set(order.members) - self.groups.get(GPU, {}).keys())


def makespans(rungs, lent, choice, seeds, lowest_first):
    made = [Tuning(rungs, lent, choice, seed, lowest_first=lowest_first) for seed in seeds]
    return [tuning.run() for tuning in made], made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fusion", required=True, help="table of fused throughput: hydro/resnet18_256.csv")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    choice = profiles(arguments.fusion)
    results: dict[str, object] = {
        "fusion_profiles": [[p.count, p.step_s * STEPS, p.memory_bytes] for p in choice.profiles],
        "setting": {
            "stages": STAGES,
            "gpus_per_stage": WIDTH,
            "micro_batches": 16,
            "fused": FUSED,
            "trials": TRIALS,
            "asha_rungs": ASHA,
            "epochs": EPOCHS,
            "exclusive_gpus": 1,
        },
    }
    searches = {
        "ASHA": (ASHA, False, range(arguments.seeds)),
        "random search": (RANDOM, False, range(1)),
        "ASHA, lowest rung first": (ASHA, True, range(arguments.seeds)),
    }
    alone = {label: makespans(r, {}, choice, seeds, low)[0] for label, (r, low, seeds) in searches.items()}
    for micro_batches in (16, 8, 32):  # the setting, and what the micro-batches change
        stages, slowdown, ratio = lent_stages(micro_batches, choice)
        lent = {f"s{i}g{g}": Lent(*stages[i]) for i in range(STAGES) for g in range(WIDTH)}
        row: dict[str, object] = {
            "bubble_ratio": ratio,
            "speed_in_bubbles": [speed for speed, _ in stages],
            "host_slowdown": slowdown,
        }
        told = []
        for label, (rungs, _, all_seeds) in searches.items():
            seeds = all_seeds if micro_batches == 16 else all_seeds[:3]
            # in bubbles the published order throughout: there is always room for who can be promoted
            both, made = makespans(rungs, lent, choice, seeds, False)
            before = alone[label][: len(seeds)]
            gains = [a / b for a, b in zip(before, both, strict=True)]
            row[label] = {
                "shorter": spread(gains),
                "alone_s": spread(before),
                "with_bubbles_s": spread(both),
                "moved": spread([t.moved for t in made]),
                "epochs_in_bubbles": spread([t.epochs["bubbles"] for t in made]),
                "epochs_on_gpu": spread([t.epochs["gpu"] for t in made]),
            }
            told.append(f"{label} x{row[label]['shorter']['median']:.2f}")  # type: ignore[index]
        results[f"{micro_batches} micro-batches"] = row
        print(
            f"{micro_batches} micro-batches: {100 * ratio:.0f}% bubbles, speed there {stages[0][0]:.3f}, "
            f"host slowdown {100 * slowdown:.2f}%; {', '.join(told)}",
            flush=True,
        )
    save("hydro_bubbles", " ".join(["python", *sys.argv]), results)


if __name__ == "__main__":
    main()
