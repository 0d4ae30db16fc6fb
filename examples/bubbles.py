# Run with: python examples/bubbles.py
"""Trials in the bubbles of a pipeline-parallel training: two stages in two processes, a study beside them.

The host is a real transformer trained with torch.distributed.pipelining (1F1B, gloo). Each stage has a
``pk.bubbles.Host`` that says when it only waits; the stages are devices of the study, whose trials run then, and stop
between two operations when the stage goes on.
"""

import multiprocessing
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock as pk

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))
# Micro-batches of a few milliseconds: the waits between shorter ones are too short to lend.
MICRO_BATCHES, ROWS, TOKENS, WIDTH, VOCABULARY = 4, 16, 32, 64, 256


# ------------------------------------------------------------ the host job, one process per stage


class Stage(nn.Module):
    """Half of a small language model."""

    def __init__(self, number):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else nn.Identity()
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.head = nn.Linear(WIDTH, VOCABULARY) if number == 1 else nn.Identity()

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def host_job(rank, folder):
    """Train until a file named ``stop`` appears; rank 0 decides, so that both stop after the same step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)
    module = Stage(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCHES * ROWS, TOKENS), generator=torch.Generator().manual_seed(0)
    )

    host = pk.bubbles.Host(
        f"{folder}/bubbles", stage=rank, background=False
    )  # these lines are all that a host job needs:
    host.watch(stage)

    def loss_of(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    go_on, steps, began = torch.ones(1), 0, time.perf_counter()
    while go_on:
        optimizer.zero_grad()
        with host.step():
            if rank == 0:
                schedule.step(tokens)
            else:
                losses = []
                schedule.step(target=tokens.roll(-1, 1), losses=losses)
        optimizer.step()
        steps += 1
        go_on.fill_(not os.path.exists(f"{folder}/stop"))
        dist.broadcast(go_on, 0)
    host.close()
    step_ms = 1e3 * (time.perf_counter() - began) / steps
    use = host.guest
    print(
        f"stage {rank}: {steps} steps of {step_ms:.0f} ms, lent {host.lent_s:.2f} s; "
        f"trials worked {use.worked_s:.2f} s there, stopped {use.pauses} times"
    )
    dist.destroy_process_group()


# ------------------------------------------------------------ the trials


def network(width):
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


def data():
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    return pk.Data.split(inputs, (inputs[:, :8].sum(1) > inputs[:, 8:].sum(1)).long())


task = pk.Task(network, data, F.cross_entropy, epochs=2, batch_size=64, defaults={"momentum": 0.9})
space = pk.Space(lr=pk.Float(1e-3, 0.5, log=True), width=pk.Choice(16, 32))


def tune(executor):
    study = pk.Study(
        task,
        space,
        minimize="loss",
        scheduler=pk.Full(trials=4 if QUICK else 12, epochs=2),
        executor=executor,
        fuse=False,
        store=False,
        seed=1,
    )
    study.run(view=None)
    return [trial.metrics["loss"] for trial in study.trials]


if __name__ == "__main__":
    # First without the host job: what workers import is imported then, too.
    alone = tune(pk.Local(slots=1, threads=1))
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        hosts = [fork.Process(target=host_job, args=(rank, folder)) for rank in (0, 1)]
        for host in hosts:
            host.start()
        while not all(os.path.exists(f"{folder}/bubbles/stage{rank}.bubble") for rank in (0, 1)):
            time.sleep(0.1)
            if not all(host.is_alive() for host in hosts):
                sys.exit("A stage of the host job has ended early.")
        squeezed = tune(pk.Local(slots=0, threads=1, bubbles=f"{folder}/bubbles"))
        open(f"{folder}/stop", "w").close()
        for host in hosts:
            host.join()
        if any(host.exitcode for host in hosts):
            sys.exit("The host job has failed.")
    print(f"losses in bubbles: {', '.join(f'{loss:.4f}' for loss in squeezed)}")
    print(f"losses alone:      {', '.join(f'{loss:.4f}' for loss in alone)}")
    print("the same" if squeezed == alone else "not the same")
