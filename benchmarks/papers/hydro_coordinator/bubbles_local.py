# PYTHONPATH=benchmarks python benchmarks/papers/hydro_coordinator/bubbles_local.py
"""A real pipeline-parallel training on this machine: its step time alone, with trials in its bubbles, and co-located.

Two stages in two processes (torch.distributed.pipelining, 1F1B, gloo), each on a core of its own with one trial process
on the same core: the core is the device. The host trains on and on; every few steps another contender has the core
beside it, in an order drawn anew each cycle, so that a noisy moment hits all of them alike. The first step of a block
is not counted. What is told is the mean (and the median) step with the contender against that alone, each with a 95%
interval (bootstrap over cycles); "alone again" is the same as alone, and shows the noise.

"bubbles" is, by ``--guests``: "study", a real ``pk.Study`` with ``pk.Local(slots=0, bubbles=...)``; "modules", a
training loop with ``pk.bubbles.Gate`` on its modules; "gates", the same without the system's help (no SCHED_IDLE). In
the last, a host whose core a trial holds can't even say that its bubble is over, so overruns are not seen there.
"Co-located" is a trial that runs whenever it likes; "idle priority" the same under SCHED_IDLE, which is what a CPU (not
a GPU) can do by itself. Losses of trials in bubbles are compared with those of the same trials alone.

A busy machine spoils the figures: the load is kept with them, and ``--how`` says how it was run. Trials of idle
priority starve there: with ``--real-time`` (as root) the host has round-robin priority 20 and a trial behind it 10
instead, which is the same order before everything else; "co-located", of which there is no such counterpart, is then
left out, and a study's workers stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from _bench import save

REAL_TIME = "--real-time" in sys.argv
RUNNING = ("idle priority",) if REAL_TIME else ("co-located", "idle priority")
"""Trials that the host stops and continues, block by block."""

MODES = ("alone", "alone again", "bubbles", *RUNNING)
GUESTS = ("study", "modules", "gates")
BLOCK = 5
WARM_UP = 8
ROWS, TOKENS, WIDTH, VOCABULARY, MICRO_BATCHES = 4, 64, 128, 512, 4


def pin(number: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def real_time(priority: int) -> None:
    """With ``--real-time``: before all that this machine does besides, in the same order among themselves."""
    if REAL_TIME:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))


def order_of(cycle: int) -> list[str]:
    return random.Random(cycle).sample(MODES, len(MODES))


# ------------------------------------------------------------ the host job


def host(rank: int, folder: str, cycles: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import penstock as pk

    pin(rank)
    real_time(20)
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
    least_s = reporter.least_s
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES * ROWS, TOKENS), generator=draw)

    def loss_of(output: Any, target: Any) -> Any:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    ready = [Path(f"{folder}/ready-{mode}-{rank}") for mode in (*RUNNING, "bubbles")]
    while not (all(path.exists() for path in ready) and reporter.guest.pauses):  # all wait at their gates
        time.sleep(0.05)
    trials = {mode: int(path.read_text()) for mode, path in zip(RUNNING, ready, strict=False)}

    def begin(mode: str) -> None:
        reporter.least_s = least_s if mode == "bubbles" else math.inf  # else it only watches
        for name, pid in trials.items():
            os.kill(pid, signal.SIGCONT if name == mode else signal.SIGSTOP)
        dist.barrier()

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        with reporter.step():
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens)
        optimizer.step()
        return time.perf_counter() - began

    for mode in ("alone", "bubbles"):
        begin(mode)
        for _ in range(WARM_UP):
            step()
    times: list[dict[str, list[float]]] = []
    lent_s = worked_s = bubbles_s = 0.0
    for cycle in range(cycles):
        times.append({})
        for mode in order_of(cycle):
            begin(mode)
            lent, worked = reporter.lent_s, reporter.guest.worked_s
            block = [step() for _ in range(BLOCK)]
            times[-1][mode] = block[1:]
            if mode == "bubbles":
                lent_s += reporter.lent_s - lent
                worked_s += reporter.guest.worked_s - worked
                bubbles_s += sum(block)
    begin("alone")
    use = reporter.guest
    told = {
        "step_s": times,
        "bubbles_s": bubbles_s,
        "lent_s": lent_s,
        "worked_s": worked_s,
        "pauses": use.pauses,
        "overruns_s": use.overruns_s,
        "longest_overrun_s": use.overrun_s,
        "margin": reporter.early,
        "gaps_ms": [1e3 * gap_s for gap_s in reporter.bubbles_s],
    }
    Path(f"{folder}/host{rank}.part").write_text(json.dumps(told))
    Path(f"{folder}/host{rank}.part").replace(f"{folder}/host{rank}.json")
    for pid in trials.values():
        os.kill(pid, signal.SIGCONT)
    reporter.close()
    dist.destroy_process_group()


# ------------------------------------------------------------ trials


def training() -> tuple[Any, Any, Callable[[], float]]:
    """A model, its optimizer, and a step that returns the loss."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = torch.randn(64, 64), torch.randint(10, (64,))

    def step() -> float:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def trial(rank: int, folder: str, mode: str, guest: str) -> None:
    """Train until the host ends; what was reached then is told."""
    from penstock.train._bubble_gate import Gate

    pin(rank)
    real_time(20)
    model, optimizer, step = training()
    while not Path(f"{folder}/bubbles/stage{rank}.bubble").exists():
        time.sleep(0.05)
    if mode == "bubbles":
        gate = Gate(f"{folder}/bubbles/stage{rank}.bubble")
        if guest != "gates":
            gate.to_background()
            real_time(10)
        gate.attach(model)
        gate.attach_optimizer(optimizer)
    ready = Path(f"{folder}/ready-{mode}-{rank}")
    ready.with_suffix(".part").write_text(str(os.getpid()))
    ready.with_suffix(".part").replace(ready)
    if mode in RUNNING:
        os.kill(os.getpid(), signal.SIGSTOP)  # until its turn
    if mode == "idle priority" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        real_time(10)
    losses = []
    while not Path(f"{folder}/host{rank}.json").exists():
        losses.append(step())
    Path(f"{folder}/trial-{mode}-{rank}.json").write_text(json.dumps(losses))


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data() -> Any:
    import torch

    import penstock as pk

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(1024, 64, generator=draw)
    return pk.Data.split(inputs, inputs[:, :10].argmax(1))


def tune(executor: Any, trials: int) -> list[tuple[Any, ...]]:
    """A study's finished trials: their learning rates and losses."""
    import torch.nn.functional as F

    import penstock as pk

    study = pk.Study(
        pk.Task(network, data, F.cross_entropy, epochs=2, batch_size=64, defaults={"momentum": 0.9}),
        pk.Space(lr=pk.Float(1e-3, 0.5, log=True)),
        minimize="loss",
        scheduler=pk.Full(trials=trials, epochs=2),
        sampler=pk.Random(),
        executor=executor,
        fuse=False,
        store=False,
        seed=1,
    )
    study.run()
    return [
        (t.config["lr"], t.metrics["loss"], t.metrics["train_loss"])
        for t in study.trials
        if t.epoch == 2 and "loss" in t.metrics
    ]


def study(folder: str) -> None:
    """A study in the bubbles, until it is told to end."""
    import penstock as pk

    while not all(Path(f"{folder}/bubbles/stage{rank}.bubble").exists() for rank in (0, 1)):
        time.sleep(0.05)
    for rank in (0, 1):
        Path(f"{folder}/ready-bubbles-{rank}").write_text(str(os.getpid()))
    found = tune(pk.Local(slots=0, threads=1, bubbles=f"{folder}/bubbles"), trials=2000)
    Path(f"{folder}/study.json").write_text(json.dumps(found))


# ------------------------------------------------------------ one run and what it shows


def same_losses(folder: str, guest: str) -> dict[str, Any]:
    """Whether trials in bubbles have the losses of trials alone, to the last bit; trains these."""
    if guest == "study":
        import penstock as pk

        found = [tuple(row) for row in json.loads(Path(f"{folder}/study.json").read_text())]
        count = min(len(found), 40)  # so many are trained again
        if not count:
            return {"trials": 0, "compared": 0, "same": None}
        alone = {row[0]: row for row in tune(pk.Local(slots=2, threads=1), trials=count)}
        pairs = [(row, alone[row[0]]) for row in found if row[0] in alone]
        return {"trials": len(found), "compared": len(pairs), "same": all(a == b for a, b in pairs)}
    rows = [json.loads(Path(f"{folder}/trial-bubbles-{rank}.json").read_text()) for rank in (0, 1)]
    _, _, step = training()
    alone_losses = [step() for _ in range(max(map(len, rows)))]
    steps = sum(map(len, rows))
    return {
        "steps": steps,
        "compared": steps,
        "same": all(row == alone_losses[: len(row)] for row in rows),
    }


def once(guest: str, cycles: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as folder:
        run = [sys.executable, __file__, "--folder", folder, "--cycles", str(cycles), "--guests", guest]
        run += ["--real-time"] * REAL_TIME
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        hosts = [subprocess.Popen([*run, "--host", str(rank)], env=environment) for rank in (0, 1)]
        trials = [
            subprocess.Popen([*run, "--mode", mode, "--trial", str(rank)], env=environment)
            for mode in (RUNNING if guest == "study" else (*RUNNING, "bubbles"))
            for rank in (0, 1)
        ]
        if guest == "study":
            trials.append(subprocess.Popen([*run, "--study"], env=environment))
        try:
            codes = [process.wait() for process in hosts]
            if any(codes):
                sys.exit("The host has failed.")
            if guest == "study":
                trials[-1].send_signal(signal.SIGTERM)  # let it finish epochs and leave
            for process in trials:
                if hasattr(os, "SCHED_IDLE"):  # where others want the core, an idle one would not even end
                    with suppress(ProcessLookupError):
                        os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))
                process.wait(60)
        finally:
            for process in (*hosts, *trials):
                if process.poll() is None:
                    process.kill()
                    process.wait()
        told = [json.loads(Path(f"{folder}/host{rank}.json").read_text()) for rank in (0, 1)]
        losses = same_losses(folder, guest)
        progress = {
            mode: sum(len(json.loads(Path(f"{folder}/trial-{mode}-{r}.json").read_text())) for r in (0, 1))
            for mode in RUNNING
        }
    overruns_ms = sorted(1e3 * late for t in told for late in t["overruns_s"])
    at = lambda part: overruns_ms[max(0, math.ceil(part * len(overruns_ms)) - 1)] if overruns_ms else None  # noqa: E731
    device_s = sum(t["bubbles_s"] for t in told)
    return {
        **against_alone(told[0]["step_s"]),
        "losses": losses,
        "trial_steps": progress | ({"bubbles": losses["steps"]} if "steps" in losses else {}),
        "lent": sum(t["lent_s"] for t in told) / device_s,
        "worked": sum(t["worked_s"] for t in told) / device_s,
        "stops": sum(t["pauses"] for t in told),
        "overrun_ms": {
            "stops": len(overruns_ms),
            "p50": at(0.5),
            "p95": at(0.95),
            "p99": at(0.99),
            "max": 1e3 * max(t["longest_overrun_s"] for t in told),
            "over_2_ms": sum(late > 2 for late in overruns_ms),
        },
        "margin": [t["margin"] for t in told],
        "gaps_ms": [t["gaps_ms"] for t in told],
    }


def against_alone(cycles: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Each mode's steps, and what they are against those alone."""
    drawn = random.Random(0)
    samples = [drawn.choices(range(len(cycles)), k=len(cycles)) for _ in range(1000)]

    def ratio(mode: str, middle: Callable[[list[float]], float], numbers: Sequence[int]) -> float:
        steps = {name: [s for n in numbers for s in cycles[n][name]] for name in (mode, "alone")}
        return middle(steps[mode]) / middle(steps["alone"])

    found: dict[str, Any] = {}
    for mode in MODES:
        ordered = sorted(s for cycle in cycles for s in cycle[mode])
        found[mode] = row = {
            "step_ms": 1e3 * statistics.fmean(ordered),
            "step_median_ms": 1e3 * statistics.median(ordered),
            "step_p95_ms": 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1],
        }
        for name, middle in (("mean", statistics.fmean), ("median", statistics.median)):
            again = sorted(ratio(mode, middle, numbers) for numbers in samples)
            row[name] = {
                "ratio": ratio(mode, middle, range(len(cycles))),
                "interval": [again[25], again[974]],
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=24, help="Per kind of guest.")
    parser.add_argument("--guests", nargs="+", choices=GUESTS, default=["study", "modules"])
    parser.add_argument("--how", default="as any process", help="How it was run, to keep with the results.")
    parser.add_argument("--name", default="hydro_bubbles_local")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="For a busy machine, as root: the host before the trial as ever, both before everything else.",
    )
    parser.add_argument("--study", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--host", "--trial", "--folder", "--mode"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.host is not None:
        return host(int(arguments.host), arguments.folder, arguments.cycles)
    if arguments.trial is not None:
        return trial(int(arguments.trial), arguments.folder, arguments.mode, arguments.guests[0])
    if arguments.study:
        return study(arguments.folder)
    results: dict[str, Any] = {
        "how": arguments.how,
        "cycles": arguments.cycles,
        "steps_per_block": BLOCK - 1,
        "load_average": {"before": os.getloadavg()},
    }
    for guest in arguments.guests:
        found = results[guest] = once(guest, arguments.cycles)
        for mode in MODES:
            means, medians = found[mode]["mean"], found[mode]["median"]
            print(
                f"{guest}: {mode} {found[mode]['step_ms']:.1f} ms a step, x{means['ratio']:.3f} of alone "
                f"({means['interval'][0]:.3f}..{means['interval'][1]:.3f}); medians x{medians['ratio']:.3f} "
                f"({medians['interval'][0]:.3f}..{medians['interval'][1]:.3f})",
                flush=True,
            )
        print(
            f"{guest}: lent {100 * found['lent']:.1f}% of the time, trials worked {100 * found['worked']:.1f}%; "
            f"overruns, ms: {found['overrun_ms']}; losses {found['losses']}; "
            f"steps {found['trial_steps']}; margin {found['margin']}",
            flush=True,
        )
    results["load_average"]["after"] = os.getloadavg()
    save(arguments.name, " ".join(["python", *sys.argv]), results, ["torch"])
    return None


if __name__ == "__main__":
    main()
