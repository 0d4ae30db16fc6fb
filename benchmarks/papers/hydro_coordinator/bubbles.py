# PYTHONPATH=benchmarks python benchmarks/papers/hydro_coordinator/bubbles.py
"""Hydro 6.5, Bubble Squeezer, simulated: tuning on one exclusive GPU, with and without the bubbles of a GPT training.

The paper's setting: GPT on 32 A100s in 4 pipeline stages of 8; fused ResNet-18 trials (F=16), which reach about 15% of
their exclusive throughput in bubbles. The micro-batches per step are not published: 16 come closest to the 15%. Trials:
ASHA (grace 3, reduction 3, 100 epochs) and random search; fused epoch times and memory from the artifact (--fusion).
Both get the better of two orders of the queue. Bubbles vary by 5%. All times are simulated.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import random
import sys
from itertools import pairwise
from pathlib import Path

from _bench import save, spread
from penstock.core import Device, Free, Placement, Plan, Segment, Trial
from penstock.plan import (
    FusionChoice,
    FusionProfile,
    Guest,
    Interval,
    Lent,
    Pipeline,
    fifo,
    fused_sizes,
    squeeze,
)

GB, STEPS = 2**30, 196  # steps of an epoch: CIFAR-10 by 256
EARLY, JITTER = 0.1, 0.05  # what pk.bubbles.Host leaves before an expected end; how much bubbles vary
LAYERS = 122  # places at which ResNet-18 can stop: 61 modules, forward and backward


def profiles(path: str) -> FusionChoice:
    rows = {1: (5.594, 1581), 10: (9.398, 2513), 20: (15.25, 3515), 100: (38.27, 11603), 220: (81.04, 23921)}
    if Path(path).exists():
        with open(path) as file:
            found = [r for r in csv.DictReader(file) if r["scale"] == "8"]
        rows = {int(r["fusion"]): (float(r["speed(s)"]), int(r["gmem"])) for r in found}
    made = tuple(FusionProfile(f, s / STEPS, m * 2**20) for f, (s, m) in sorted(rows.items()))
    return FusionChoice(max(rows), max(rows), made, "")


def lent_stages(micro_batches, choice, cap):
    """Each stage's speed, free memory and the host's slowdown, with bubbles that vary and are only expected."""
    p = 4
    host = Pipeline(
        (0.05,) * p,
        (0.10,) * p,
        micro_batches,
        memory_bytes=(80 * GB,) * p,
        state_bytes=(56 * GB,) * p,
        activation_bytes=(5 * GB,) * p,
    )
    schedule = host.schedule()
    rng = random.Random(0)
    stages, lost_s, steps = [], 0.0, 200
    guest = Guest((choice.step_s(cap) / LAYERS,) * LAYERS, resume_s=0.0005, slack_s=0.0002)
    for stage in range(p):
        usual = schedule.idle(stage)
        # the Host expects the quartile of what it saw, and ends a bubble 10% before
        planned = [Interval(0.0, (1 - EARLY) * (1 - 0.6745 * JITTER) * gap.length_s) for gap in usual]
        _, _, worked_s = guest.progress(planned, steps)
        for _ in range(steps):
            for gap, plan in zip(usual, planned, strict=True):
                real_s = gap.length_s * max(0.0, rng.gauss(1, JITTER))
                lost_s += max(0.0, plan.length_s - guest.slack_s - real_s)  # the host waits for what overran
        stages.append((worked_s / (steps * schedule.step_s), host.free_bytes(stage)))
    return stages, lost_s / (steps * schedule.step_s), schedule.ratio()


def tune(rungs, trials, devices, lent, choice, cap, in_bubbles, seed, patient):
    """The makespan of ASHA (async promotion of the best third) by the plan passes that a study would use."""
    rng = random.Random(seed)
    score = [rng.random() for _ in range(trials)]
    ready = [list(range(trials))] + [[] for _ in rungs[1:]]
    done = [[] for _ in rungs]
    promoted = [set() for _ in rungs]
    free, events, now, order = set(devices), [], 0.0, 0
    passes = (squeeze(lent, choice=lambda s: choice, belongs=lambda s: s.start < in_bubbles), fifo())
    while True:
        groups = []
        for r in reversed(range(len(rungs))):
            start = 0 if r == 0 else rungs[r - 1]
            low = 0
            # Hydro 4.3, step 5: what runs in bubbles is spread over them; the exclusive GPU gets full groups
            over = len(free & set(lent)) if start < in_bubbles else 1
            for size in fused_sizes(len(ready[r]), cap, max(1, over)) if ready[r] else ():
                part = ready[r][low : low + size]
                low += size
                more = patient and r > 0 and len(ready[r]) < cap  # promotions may still come
                segments = tuple(Segment(Trial(t, {}, t), start, rungs[r], r + 1 == len(rungs)) for t in part)
                groups.append((more, r if more else -r, segments))
        # patient: full groups first, the highest rung first; then what is not full, the lowest first, for more to come
        groups.sort(key=lambda group: group[:2])
        waiting = [Placement(segments) for _, _, segments in groups]
        plan = Plan(waiting=tuple(waiting), free=tuple(Free(Device(name)) for name in sorted(free)))
        for step in passes:
            plan = step(plan)
        for placed in plan.placed:
            name, first = placed.shares[0].device, placed.segments[0]
            r = rungs.index(first.until)
            members = [s.trial.id for s in placed.segments]
            speed = lent[name].speed if name in lent else 1.0
            seconds = (first.until - first.start) * STEPS * choice.step_s(len(members)) / speed
            ready[r] = [t for t in ready[r] if t not in set(members)]
            free.discard(name)
            order += 1
            heapq.heappush(events, (now + seconds, order, name, r, members))
        if not events:
            return now
        now, _, name, r, members = heapq.heappop(events)
        free.add(name)
        done[r] += members
        if r + 1 < len(rungs):
            best = sorted(done[r], key=lambda t: score[t])[: len(done[r]) // 3]
            new = [t for t in best if t not in promoted[r]]
            promoted[r].update(new)
            ready[r + 1] += new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fusion", default="../shared/data/hydro/resnet18_256.csv")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    choice = profiles(arguments.fusion)
    asha, full = [3, 9, 27, 100], [100]
    results: dict[str, object] = {
        "fusion_profiles": [[p.count, p.step_s * STEPS, p.memory_bytes] for p in choice.profiles]
    }
    for micro_batches in (4, 8, 16, 32):
        for width in (8, 1):
            stages, slowdown, ratio = lent_stages(micro_batches, choice, 16)
            lent = {f"s{i}g{g}": Lent(*stages[i]) for i in range(4) for g in range(width)}
            row: dict[str, object] = {
                "bubble_ratio": ratio,
                "speed_in_bubbles": [speed for speed, _ in stages],
                "host_slowdown": slowdown,
            }
            for label, rungs, trials, belongs in (
                ("ASHA, rungs but the last in bubbles", asha, 1000, 27),
                ("ASHA, first rung in bubbles", asha, 1000, 1),
                ("random search", full, 1000, 1),
            ):
                gains = []
                for seed in range(arguments.seeds if rungs is asha else 1):
                    alone = min(
                        tune(rungs, trials, ["gpu"], {}, choice, 16, 0, seed, order)
                        for order in (True, False)
                    )
                    both = min(
                        tune(rungs, trials, ["gpu", *lent], lent, choice, 16, belongs, seed, order)
                        for order in (True, False)
                    )
                    gains.append(alone / both)
                row[label] = spread(gains)
            results[f"{micro_batches} micro-batches, {4 * width} GPUs"] = row
            told = ", ".join(f"{k} x{v['median']:.2f}" for k, v in row.items() if isinstance(v, dict))
            print(
                f"{micro_batches} micro-batches, {4 * width} GPUs: {100 * ratio:.0f}% bubbles, speed there "
                f"{row['speed_in_bubbles'][0]:.3f}, host slowdown {100 * slowdown:.3f}%; {told}",  # type: ignore[index]
                flush=True,
            )
    assert all(a.count < b.count for a, b in pairwise(choice.profiles))
    save("hydro_bubbles", " ".join(["python", *sys.argv]), results)


if __name__ == "__main__":
    main()
