"""Early termination on recorded curves: what it stops, and whether any of them was learning.

    python benchmarks/papers/hyperpower/divergence.py --data FOLDER [--save]

FOLDER holds learning curves of TaskSet as JSON lists of {"hp", "train", "valid", "test"} (.json or .json.xz), 1000
configurations of Adam per task. The rule sees the validation loss, epoch by epoch, and does not know what chance is.
A training learns if the mean of its last five values is below its first one by 2% or more, and ends finite.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import _bench
from penstock.schedule import Divergence


def stopped(curve: list[float], **options: Any) -> int | None:
    """The epoch at which the rule stops a curve; None: never."""
    rule = Divergence("loss", **options)
    rule.start()
    for epoch, value in enumerate(curve, 1):
        if rule.observe(0, epoch, {"loss": value}) is not None:
            return epoch
    return None


def learns(curve: list[float]) -> bool:
    last = fmean(curve[-5:])
    return math.isfinite(last) and last <= 0.98 * curve[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="TaskSet's files")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for path in sorted(given.data.glob("*.json*")):
        text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        curves = [[float(v) for v in one["valid"]["loss"]] for one in json.loads(text)]
        good = [curve for curve in curves if learns(curve)]
        bad = [curve for curve in curves if not learns(curve)]
        wrong = [at for curve in good if (at := stopped(curve)) is not None]
        right = [at for curve in bad if (at := stopped(curve)) is not None]
        length = len(curves[0])
        saved = sum(length - at for at in (*wrong, *right)) / (length * len(curves))
        results[path.name.partition(".")[0]] = {
            "curves": len(curves),
            "learning": len(good),
            "learning_stopped": len(wrong),
            "not_learning": len(bad),
            "not_learning_stopped": len(right),
            "epochs_saved": saved,
        }
        print(
            f"{path.name}: {len(good)} learn, {len(wrong)} of them stopped; {len(bad)} don't, {len(right)} of them "
            f"stopped; {100 * saved:.1f}% of epochs saved",
            flush=True,
        )
    if given.save:
        command = "python benchmarks/papers/hyperpower/divergence.py --data taskset --save"
        _bench.save("hyperpower_divergence", command, results)


if __name__ == "__main__":
    main()
