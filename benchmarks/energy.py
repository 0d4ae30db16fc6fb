"""Energy: does the profiler find the optimum, what does it cost, what does metering cost, how good is the V100 model?

    python benchmarks/energy.py [--trace summary_power_v100.csv]         # all of it, kept in results/energy.json
    python benchmarks/energy.py optimum --trace summary_power_v100.csv   # Eq. 7 against brute force on the Zeus trace
    python benchmarks/energy.py overhead                                 # just-in-time profiling on the simulated V100
    python benchmarks/energy.py window                                   # a meter's window against the NVML stub
    python benchmarks/energy.py study                                    # metering 1,000 trivial trials
    python benchmarks/energy.py fit --trace summary_power_v100.csv       # the V100 model against its trace

The trace is Zeus's public one (github.com/ml-energy/zeus, trace/): dataset, network, batch_size, optimizer,
power_limit, time_per_epoch, average_power.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import importlib.util
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import _bench
from penstock.energy import V100, V100_LOADS, EtaCost, Meter, PowerLimitOptimizer, gpu_sensors
from penstock.energy._simulated import Load

ETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
LIMITS = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
NAMES = {
    ("cifar100", "shufflenetv2", "adadelta"): "shufflenet-adadelta",
    ("cifar100", "shufflenetv2", "adam"): "shufflenet-adam",
    ("imagenet", "resnet50", "adadelta"): "resnet50",
    ("librispeech", "deepspeech2", "adamw"): "deepspeech2",
    ("movielens-1m", "ncf", "adam"): "ncf",
    ("sentiment140", "bert_base_uncased", "adamw"): "bert-sentiment",
    ("squad", "bert_base_uncased", "adamw"): "bert-squad",
}


def read_trace(path: Path) -> dict[tuple[str, int], dict[float, tuple[float, float]]]:
    """(workload, batch size) -> limit -> (seconds per epoch, watts)."""
    found: dict[tuple[str, int], dict[float, tuple[float, float]]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = NAMES[row["dataset"], row["network"], row["optimizer"]]
            key = name, int(row["batch_size"])
            found[key][float(row["power_limit"])] = float(row["time_per_epoch"]), float(row["average_power"])
    return dict(found)


def run_job(
    table: dict[float, tuple[float, float]], machine: PowerLimitOptimizer, epochs: int, iterations: int
) -> tuple[float, float, float]:
    """A training whose epochs take ``table[limit]``; returns time, energy and the last limit."""
    now_s = energy_j = 0.0
    limit_w = max(table)
    for _ in range(epochs):
        limit_w = machine.begin_epoch(now_s, energy_j) or limit_w
        for _ in range(iterations):
            epoch_s, watts = table[limit_w]
            now_s += epoch_s / iterations
            energy_j += epoch_s / iterations * watts
            if not machine.done:
                wants = machine.wants_reading(now_s)
                limit_w = machine.iteration(now_s, energy_j if wants else None) or limit_w
        machine.end_epoch(now_s, energy_j)
    return now_s, energy_j, limit_w


def cost(row: tuple[float, float], eta: float) -> float:
    """Zeus Eq. 7 x epochs: (eta P + (1 - eta) MAXPOWER) x time."""
    return (eta * row[1] + (1 - eta) * max(LIMITS)) * row[0]


def optimum(trace: Path) -> dict[str, Any]:
    """The limit the profiler settles on against the brute-force optimum, on every pair of the trace."""
    table = read_trace(trace)
    equal = total = 0
    for key, rows in sorted(table.items()):
        for eta in ETAS:
            machine = PowerLimitOptimizer(tuple(rows), EtaCost(eta))
            epochs = 0
            while not machine.done and epochs < 400:  # short epochs: the slices go on over several
                epochs += 10
                machine = PowerLimitOptimizer(tuple(rows), EtaCost(eta))
                _, _, chosen_w = run_job(rows, machine, epochs, 1000)
            best_w = min(rows, key=lambda limit: (cost(rows[limit], eta), limit))
            total += 1
            if chosen_w == best_w:
                equal += 1
            else:
                print(f"  differs: {key} eta {eta}: chose {chosen_w}, brute force says {best_w}")
    print(
        f"optimum: {equal} of {total} equal ({len(table)} pairs of workload and batch size x {len(ETAS)} etas)"
    )
    return {"equal": equal, "of": total}


def overhead() -> dict[str, Any]:
    """Time and energy of profiling just in time, against running at the chosen limit from the start."""
    print(
        "overhead of just-in-time profiling on the simulated V100, 7 limits, slices of 5 s after 5 s of warm-up;"
    )
    print(f"all {len(V100_LOADS)} loads x {len(ETAS)} etas, against the chosen limit from the start:")
    print(
        f"{'epoch':>8} {'epochs':>6}   {'time: median':>12} {'worst':>8}   {'energy: median':>14} {'worst':>8}"
    )
    found: dict[str, Any] = {}
    for minutes in (1, 2, 5, 10, 20, 60):
        for epochs in (1, 10):
            times, energies = [], []
            for load in V100_LOADS.values():
                same = Load(60.0 * minutes / V100.slowdown(load, 250), load.duty, load.peak_w, load.light_w)
                table = {limit: (V100.epoch_s(same, limit), V100.power_w(same, limit)) for limit in LIMITS}
                for eta in ETAS:
                    machine = PowerLimitOptimizer(LIMITS, EtaCost(eta))
                    time_s, energy_j, limit_w = run_job(table, machine, epochs, 100 * minutes)
                    if not machine.done:
                        limit_w = min(table, key=lambda limit: cost(table[limit], eta))
                    ideal_s = table[limit_w][0] * epochs
                    times.append(time_s / ideal_s - 1)
                    energies.append(energy_j / (ideal_s * table[limit_w][1]) - 1)
            found[f"{epochs} epochs of {minutes} min"] = {
                "time_median": statistics.median(times),
                "time_worst": max(times),
                "energy_median": statistics.median(energies),
                "energy_worst": max(energies),
            }
            print(
                f"{minutes:>4} min {epochs:>6}   {statistics.median(times):>12.2%} {max(times):>8.2%}"
                f"   {statistics.median(energies):>14.2%} {max(energies):>8.2%}"
            )
    print(
        "A run whose only epoch takes 10 min spends 44 s of it on other limits than the "
        "chosen one. The runs Zeus is for"
        "\ntrain for many epochs, and profile once per batch size and store: the 10-epoch rows, or none of it at all."
    )
    return found | {"the trace's own long epochs": long_epochs()}


def long_epochs() -> dict[str, Any]:
    """The trace's own loads whose epochs take ten minutes or more, at their own length, for a single epoch."""
    worst_s = worst_j = 0.0
    count = 0
    for load in V100_LOADS.values():
        table = {limit: (V100.epoch_s(load, limit), V100.power_w(load, limit)) for limit in LIMITS}
        if table[250.0][0] < 600:
            continue
        count += 1
        for eta in ETAS:
            machine = PowerLimitOptimizer(LIMITS, EtaCost(eta))
            time_s, energy_j, limit_w = run_job(table, machine, 1, 10_000)
            assert machine.done
            worst_s = max(worst_s, time_s / table[limit_w][0] - 1)
            worst_j = max(worst_j, energy_j / (table[limit_w][0] * table[limit_w][1]) - 1)
    print(
        f"the {count} loads of the trace with epochs of 10 min and more, at their own length, one epoch:"
        f" time {worst_s:.2%}, energy {worst_j:.2%} at worst"
    )
    return {"loads": count, "time_worst": worst_s, "energy_worst": worst_j}


FOLLOWER = """
import sys, time
from penstock.energy import Meter, gpu_sensors
sensors = gpu_sensors()
assert not any(sensor.is_reader for sensor in sensors)
meter = Meter(sensors)
costs = []
for _ in range(7):
    begin = time.perf_counter()
    for _ in range(2000):
        with meter.window():
            pass
    costs.append((time.perf_counter() - begin) / 2000)
print(min(costs) * 1e6, sorted(costs)[3] * 1e6)
"""


def window() -> dict[str, Any]:
    """What a window costs, against the NVML stub of the tests, through the real nvidia-ml-py."""
    path = Path(__file__).parent.parent / "tests" / "energy" / "nvml_stub" / "nvml_stub.py"
    spec = importlib.util.spec_from_file_location("nvml_stub", path)
    assert spec is not None
    assert spec.loader is not None
    nvml_stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nvml_stub)
    found: dict[str, Any] = {"unit": "us", "rounds": 7, "windows": 2000}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name
        library = nvml_stub.build(folder)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        print("one window (open and end), best and median of 7 rounds of 2,000:")
        for count in (1, 2, 4):
            stub = nvml_stub.NvmlStub(folder / f"gpus{count}", count)
            os.environ[nvml_stub.ENVIRONMENT] = str(stub.path)
            stub.set_load(200.0)
            for shared in (False, True):
                sensors = gpu_sensors(shared=shared)
                meter = Meter(sensors)
                costs = []
                for _ in range(7):
                    begin = time.perf_counter()
                    for _ in range(2000):
                        with meter.window():
                            pass
                    costs.append((time.perf_counter() - begin) / 2000 * 1e6)
                what = "shared, the reader" if shared else "not shared"
                found[f"{count} GPU, {what}"] = {"best": min(costs), "median": statistics.median(costs)}
                print(f"  {count} GPU  {what:<22} {min(costs):6.1f} us  {statistics.median(costs):6.1f} us")
                if shared:
                    done = subprocess.run(
                        [sys.executable, "-c", FOLLOWER],
                        env=stub.environment(library),
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    best, median = map(float, done.stdout.split())
                    found[f"{count} GPU, shared, a follower"] = {"best": best, "median": median}
                    print(f"  {count} GPU  {'shared, a follower':<22} {best:6.1f} us  {median:6.1f} us")
                for sensor in sensors:
                    sensor.close()
            stub.close()
    return found


def study(trials: int, pairs: int) -> dict[str, Any]:
    """Metering a study of trivial trials, in CPU time: of the hook alone, of a worker, of the whole study."""
    import penstock as pk
    from penstock.energy import make_meter
    from penstock.train._worker import Settings, Spec, execute

    def hook() -> float:
        begin = time.process_time()
        for _ in range(trials):
            made = make_meter(("cpu",), cores=1)
            assert made is not None
            made.epoch_begin()  # the function begins
            made.epoch_begin()  # its loop begins
            made.plain_end()
            made.other()
            made.close()
        return time.process_time() - begin

    hook()
    hook_s = statistics.median([hook() for _ in range(15)])
    print(f"study: the hook of {trials} trials of one epoch: {hook_s / trials * 1e6:.1f} us of CPU per trial")

    def worker(folder: Path, metered: bool) -> float:
        settings = Settings(folder, ("loss",), "bench", make_meter if metered else None)
        sink = _Sink()
        begin = time.process_time()
        for number in range(trials):
            execute(trivial, Spec(number, {"x": 0.5}, 0, 0, None, True, None, None, 0, 0), settings, sink)
        return time.process_time() - begin

    def cpu_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    def whole(metered: bool) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as name:
            made = pk.Study(
                trivial,
                pk.Space(x=pk.Float(0, 1)),
                minimize="loss",
                sampler=pk.Random(),
                budget=pk.Budget(trials=trials),
                store=Path(name) / "study.db",
                meter=metered,
            )
            before_s, begin = cpu_s(), time.perf_counter()
            made.run()
            wall_s, used_s = time.perf_counter() - begin, cpu_s() - before_s
            assert (made.energy is not None) == metered
        return wall_s, used_s

    with tempfile.TemporaryDirectory() as name:
        ways = {
            "plain": lambda: worker(Path(name), False),
            "metered": lambda: worker(Path(name), True),
        }
        results: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(11):
            for way, run in ways.items():
                results[way].append(run())
    plain_s, metered_s = (statistics.median(results[way]) for way in ("plain", "metered"))
    added_s = statistics.median(b - a for a, b in zip(results["plain"], results["metered"], strict=True))
    print(
        f"study: a worker's CPU time for {trials} trials: {plain_s:.4f} s without metering, {metered_s:.4f} s with it"
        f" ({added_s / trials * 1e6:+.1f} us per trial)"
    )
    whole(True)
    rounds = []
    for number in range(pairs):  # who is first changes
        one = whole(bool(number % 2))
        other = whole(not number % 2)
        rounds.append((other, one) if number % 2 else (one, other))
    found: dict[str, Any] = {
        "trials": trials,
        "pairs": pairs,
        "hook_us": hook_s / trials * 1e6,
        "worker_us": added_s / trials * 1e6,
    }
    for index, what in enumerate(("wall", "CPU")):
        without = statistics.median(a[index] for a, _ in rounds)
        with_ = statistics.median(b[index] for _, b in rounds)
        ratios = sorted(b[index] / a[index] - 1 for a, b in rounds)
        low, paired, high = statistics.quantiles(ratios, n=4)
        # The median's own 95% interval, by order statistics: the sign test's, free of any distribution.
        rank = max(0, int(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
        interval = [ratios[rank], ratios[-1 - rank]]
        found[what] = {
            "without_s": without,
            "with_s": with_,
            "added": paired,
            "median_95": interval,
            "quartiles": [low, high],
        }
        print(
            f"study: {trials} trivial trials, {what} time: {without:.3f} s without metering, {with_:.3f} s with it;"
            f" {paired:+.1%} in the median of {len(rounds)} pairs (95%: {interval[0]:+.1%} to {interval[1]:+.1%},"
            f" quartiles {low:+.1%} to {high:+.1%})"
        )
    wall_s = statistics.median(a[0] for a, _ in rounds)
    cores = len(os.sched_getaffinity(0))
    print(
        f"study: what the workers add, {added_s * 1e3:.1f} ms of CPU over {cores} cores, is"
        f" {added_s / cores / wall_s:.2%} of the study's wall time ({added_s / wall_s:.2%} if it all fell on one core)"
    )
    return found


class _Sink:
    """Where a trial's news goes to be forgotten."""

    def reported(self, report: Any) -> None:
        pass

    def saved(self, epoch: int, path: str) -> None:
        pass

    def told(self) -> None:
        return None


def trivial(run: Any) -> None:
    """A trial of one epoch that does nothing."""
    for _ in run.epochs(1):
        run.report(loss=1.0)


def fit(trace: Path) -> None:
    """How well the model in the code fits the trace, and what a fresh fit of its loads gives."""
    import numpy as np
    from scipy.optimize import least_squares

    table = read_trace(trace)
    limits = np.array(LIMITS)

    def errors(load: Load, rows: dict[float, tuple[float, float]]) -> np.ndarray:
        time_error = [np.log(V100.epoch_s(load, limit) / rows[limit][0]) for limit in LIMITS]
        power_error = [np.log(V100.power_w(load, limit) / rows[limit][1]) for limit in LIMITS]
        return np.array(time_error + power_error)

    def show(name: str, all_errors: list[np.ndarray]) -> None:
        both = np.abs(np.array(all_errors))
        for what, part in (("time", both[:, : len(limits)]), ("watts", both[:, len(limits) :])):
            print(
                f"fit: {name}: {what} off by {np.median(part):.1%} in the median, {np.quantile(part, 0.95):.1%} at"
                f" the 95th percentile, {part.max():.1%} at most"
            )

    show("loads in the code", [errors(V100_LOADS[key], rows) for key, rows in table.items()])
    fresh = []
    for rows in table.values():
        best = None
        for start in ((0.5, 200, 90), (0.9, 300, 95), (0.1, 60, 38), (0.97, 420, 90)):
            scale = np.log(rows[250.0][0])
            found = least_squares(
                lambda x, rows=rows: errors(Load(np.exp(x[3]), x[0], x[1], x[2]), rows),
                [*start, scale],
                bounds=([1e-3, 41, 20, scale - 3], [1, 700, 100, scale + 3]),
                x_scale=[0.1, 50, 30, 0.1],
                loss="soft_l1",
                f_scale=0.02,
            )
            if best is None or found.cost < best[0]:
                x = found.x
                best = found.cost, errors(Load(np.exp(x[3]), x[0], x[1], x[2]), rows)
        assert best is not None
        fresh.append(best[1])
    show("fitted anew", fresh)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["optimum", "overhead", "window", "study", "fit"])
    data = os.environ.get("PENSTOCK_DATA")
    default = None if data is None else Path(data) / "zeus" / "summary_power_v100.csv"
    parser.add_argument("--trace", type=Path, default=default, help="Zeus's summary_power_v100.csv")
    parser.add_argument("--trials", type=int, default=1000, help="of a study whose metering is measured")
    parser.add_argument("--pairs", type=int, default=201, help="of such studies, with and without")
    parser.add_argument("--save", action="store_true", help="of a single part: put it into the saved results")
    chosen = parser.parse_args()

    def metered() -> dict[str, Any]:
        return study(chosen.trials, chosen.pairs)

    if chosen.what in ("optimum", "fit"):
        if chosen.trace is None:
            parser.error("--trace is needed")
        {"optimum": optimum, "fit": fit}[chosen.what](chosen.trace)
    elif chosen.what is not None:
        found = {"overhead": overhead, "window": window, "study": metered}[chosen.what]()
        if chosen.save:  # the other parts stay as they were measured
            kept = _bench.earlier("energy")
            results = (kept or {"results": {}})["results"] | {chosen.what: found}
            command = f"python benchmarks/energy.py {chosen.what} --save; the rest: make bench-energy"
            _bench.save("energy", command, results, ("nvidia-ml-py",), kept=kept)
    else:
        results = {"study": metered(), "window": window(), "overhead": overhead()}
        if chosen.trace is not None:
            results["optimum"] = optimum(chosen.trace)
        _bench.save("energy", "make bench-energy", results, ("nvidia-ml-py",))


if __name__ == "__main__":
    main()
