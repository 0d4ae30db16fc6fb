# PYTHONPATH=benchmarks python benchmarks/papers/hydro_coordinator/bubbles_local.py
"""A real pipeline-parallel training on this machine: its step time alone, with trials in its bubbles, and co-located.

Two stages in two processes (torch.distributed.pipelining, 1F1B, gloo), each on a core of its own with one trial process
on the same core: the core is the device. Contenders run in turn, so that a noisy moment hits all of them alike.
"Co-located" is a trial that runs whenever it likes; "idle priority" the same under SCHED_IDLE, which is what a CPU (not
a GPU) can do by itself. A busy machine spoils the figures: the load is kept with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _bench import save, spread

MODES = ("alone", "bubbles", "co-located", "idle priority")
ROWS, TOKENS, WIDTH, VOCABULARY, MICRO_BATCHES = 4, 64, 128, 512, 4


def pin(number: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def host(rank: int, folder: str, steps: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import penstock as pk

    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(2)]
    module = nn.Sequential(
        *([nn.Embedding(VOCABULARY, WIDTH)] if rank == 0 else []),
        *layers,
        *([nn.Linear(WIDTH, VOCABULARY)] if rank == 1 else []),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    reporter = pk.bubbles.Host(f"{folder}/bubbles", stage=rank)
    reporter.watch(stage)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES * ROWS, TOKENS), generator=draw)
    loss_of = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        with reporter.step():
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    use = reporter.guest
    told = {
        "step_s": times,
        "lent_s": reporter.lent_s,
        "worked_s": use.worked_s,
        "pauses": use.pauses,
        "overrun_s": use.overrun_s,
    }
    Path(f"{folder}/host{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def trial(rank: int, folder: str, mode: str) -> None:
    """Train until killed, and count the steps."""
    import torch
    from torch import nn

    from penstock.train._pausing import Gate

    pin(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = torch.randn(64, 64), torch.randint(10, (64,))
    while not Path(f"{folder}/bubbles/stage{rank}.bubble").exists():
        time.sleep(0.05)
    if mode == "idle priority" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if mode == "bubbles":
        gate = Gate(f"{folder}/bubbles/stage{rank}.bubble")
        gate.to_background()
        gate.attach(model)
        gate.attach_optimizer(optimizer)
    count = Path(f"{folder}/trial{rank}")
    steps = 0
    while not Path(f"{folder}/host{rank}.json").exists():
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 20 == 0:
            count.write_text(str(steps))


def once(mode: str, steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as folder:
        run = [sys.executable, __file__, "--folder", folder, "--steps", str(steps), "--mode", mode]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        hosts = [subprocess.Popen([*run, "--host", str(rank)], env=environment) for rank in (0, 1)]
        trials = []
        if mode != "alone":
            trials = [subprocess.Popen([*run, "--trial", str(rank)], env=environment) for rank in (0, 1)]
        codes = [process.wait() for process in hosts]
        if any(codes):
            sys.exit("The host has failed.")
        for process in trials:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        told = [json.loads(Path(f"{folder}/host{rank}.json").read_text()) for rank in (0, 1)]
        counted = [Path(f"{folder}/trial{rank}") for rank in (0, 1)]
        return {
            # the first steps set up buffers, and are only watched
            "step_s": statistics.median(told[0]["step_s"][5:]),
            "lent_s": sum(t["lent_s"] for t in told),
            "host_s": sum(told[0]["step_s"]),
            "worked_s": sum(t["worked_s"] for t in told),
            "overrun_ms": 1e3 * max(t["overrun_s"] for t in told),
            "trial_steps": sum(int(c.read_text()) if c.exists() else 0 for c in counted),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    for hidden in ("--host", "--trial", "--folder", "--mode"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.host is not None:
        return host(int(arguments.host), arguments.folder, arguments.steps)
    if arguments.trial is not None:
        return trial(int(arguments.trial), arguments.folder, arguments.mode)
    found: dict[str, list[dict[str, object]]] = {mode: [] for mode in MODES}
    for repeat in range(arguments.repeats):
        for mode in MODES:
            row = once(mode, arguments.steps)
            found[mode].append(row)
            print(
                f"  repeat {repeat + 1}: {mode} {1e3 * float(row['step_s']):.1f} ms a step, {row}", flush=True
            )  # type: ignore[arg-type]
    results: dict[str, object] = {"load_average": os.getloadavg(), "runs": found}
    for mode in MODES:
        ratios = [
            float(r["step_s"]) / float(a["step_s"]) for r, a in zip(found[mode], found["alone"], strict=True)
        ]  # type: ignore[arg-type]
        results[mode] = spread(ratios)
        print(
            f"{mode}: host step x{statistics.median(ratios):.3f} of alone ({min(ratios):.3f}..{max(ratios):.3f})"
        )
    save("hydro_bubbles_local", " ".join(["python", *sys.argv]), results, ["torch"])
    return None


if __name__ == "__main__":
    main()
