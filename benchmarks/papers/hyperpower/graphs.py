"""Networks of NAS-Bench-101's kind, as EC-NAS-Bench has measured them: graphs, their work, and their GPU's watts.

A network is a stem (3x3 convolution to 128 channels), three stacks of three cells with a halving of the picture and a
doubling of the channels between them, and a classifier (Ying et al. 2019, section 2). A cell is a graph of
convolutions and poolings; its output joins what flows into it, so that the channels are shared out among them.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

CONV3, CONV1, POOL3 = 0, 1, 2
NAMES = ("flops", "traffic", "params", "conv3_flops", "conv1_flops", "pool_traffic")


def read(folder: Path) -> list[tuple[Any, float]]:
    """Graphs with the mean GPU watts of their trainings: all spaces that lie in a folder."""
    graphs: dict[str, Any] = {}
    for path in sorted(folder.glob("*graphs*.json*")):
        graphs |= json.loads(
            lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        )
    watts: dict[str, dict[str, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*energy*.csv*")):
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for row in csv.DictReader(text.splitlines()):
            if row["gpu_avg_w"]:
                watts[row["arch_hash"]][row["repeat"]] = float(row["gpu_avg_w"])
    return [(graphs[name], fmean(found.values())) for name, found in sorted(watts.items()) if name in graphs]


def config_of(graph: Any) -> dict[str, Any]:
    """A configuration: how many of each operation; the rest is the extra features'."""
    matrix, ops = graph
    return {
        "conv3": ops.count(CONV3),
        "conv1": ops.count(CONV1),
        "pool3": ops.count(POOL3),
        "edges": sum(map(sum, matrix)),
        "graph": json.dumps(graph),
    }


def channels(matrix: list[list[int]], inputs: int, outputs: int) -> list[int]:
    """Channels of every vertex (compute_vertex_channels of the benchmark)."""
    n = len(matrix)
    result = [0] * n
    result[0], result[-1] = inputs, outputs
    if n == 2:
        return result
    into_end = [v for v in range(1, n - 1) if matrix[v][n - 1]]
    share, rest = divmod(outputs, max(1, len(into_end)))
    for place, vertex in enumerate(into_end):
        result[vertex] = share + (place < rest)
    for vertex in range(n - 3, 0, -1):
        if not matrix[vertex][n - 1]:
            result[vertex] = max(result[o] for o in range(vertex + 1, n - 1) if matrix[vertex][o])
    return result


def work(graph: Any) -> dict[str, float]:
    """What a forward pass of one picture does, by kind of work; traffic in numbers, not bytes."""
    matrix, ops = graph
    n = len(matrix)
    total = dict.fromkeys(NAMES, 0.0)

    def moves(numbers: float) -> None:
        total["traffic"] += numbers
        total["pool_traffic"] += numbers

    def conv(size: int, a: int, b: int, k: int) -> None:
        flops = 2.0 * size**2 * a * b * k * k
        total["flops"] += flops
        total["conv3_flops" if k == 3 else "conv1_flops"] += flops
        total["traffic"] += size**2 * (a + b)
        total["params"] += a * b * k * k + 2 * b
        moves(4.0 * size**2 * b)  # batch normalisation and ReLU

    size, inputs = 32, 128
    conv(size, 3, 128, 3)
    for stack in range(3):
        if stack:
            size //= 2
        outputs = 128 * 2**stack
        for _ in range(3):
            wide = channels(matrix, inputs, outputs)
            for v in range(1, n - 1):
                sources = [s for s in range(1, v) if matrix[s][v]]
                if matrix[0][v]:
                    conv(size, inputs, wide[v], 1)
                joined = len(sources) + matrix[0][v]
                if joined > 1:
                    moves((joined + 1.0) * size**2 * wide[v])
                if ops[v] == POOL3:
                    moves(2.0 * size**2 * wide[v])
                else:
                    conv(size, wide[v], wide[v], 3 if ops[v] == CONV3 else 1)
            if matrix[0][n - 1]:
                conv(size, inputs, outputs, 1)
            inputs = outputs
    total["params"] += inputs * 10 + 10
    return total


def extra(config: Any) -> dict[str, float]:
    return work(json.loads(config["graph"]))
