# PYTHONPATH=benchmarks python benchmarks/papers/fluid/studies.py --data FOLDER
"""Whole studies with and without Fluid on simulated devices (Fluid, section 6.2, Figure 7).

``pk.Study`` throughout: its loop, journal and simulated devices, runtimes unknown to the planner at first. The default
is FIFO, one trial on one device.

The setting follows the paper as far as it tells. Budgets were up to R = 27 epochs at first, and BOHB was what is called
"ASHA with TPE" now; both were changed after those results were known, for the reasons given here and before any result
of the present setting was. Both stay in: as a condition and as a row.

* 8 and 32 devices. Budgets up to R = 81 epochs, one in eta = 3 goes on: the table of Hyperband's and BOHB's papers, and
  the default of Ray Tune's Hyperband, on which Fluid was built. Halving and ASHA begin with 81 trials.
* Hyperband is a synchronous, stage-based strategy in the paper (6.2): "Hyperband in turn" and SyncBOHB run one bracket
  after the other. "Hyperband" and BOHB begin the next bracket when devices would be idle, as Penstock and BOHB's
  authors do, and leave FIFO little to waste.
* Co-location as Gavel measured it on V100s, per family of models; c by Fluid's threshold. The paper's tasks are most
  like ResNet-18 (a CNN on CIFAR-10), LM (an RNN language model) and CycleGAN (a GAN); the other four are further ones,
  and in three of these two on a device gain nothing.
* beta 1.05 and d = 8, within the paper's range [1, 1 + 1/d); a change of width costs 3 s, an epoch takes 30 s on
  average, and differs among trials by sigma 0.3.
* Learning curves of TaskSet.

After results of all algorithms on seeds 0 to 2 were known, Fluid was changed once: under BOHB, too, trials share
devices since then. That was tried on seeds 100 to 107 and measured on those reported; nothing changes for the others.
A proposal then knows fewer results, other trials are trained, and chance decides which are longer: on 8 devices and
21 seeds (0 to 12, 108 to 115) makespans were 1.65 times shorter (0.98 to 2.36) where sharing is free and 1.25 times
(0.71 to 1.58) at alpha 1.6, with a loss lower by 0.02 (standard error 0.03). "per_work" leaves that chance out.

Fluid was changed a second time after all results were known: where several groups are under way, trials that wait get
the width of the least device time instead of StaticFluid's, and where devices are shared, Hyperband's next bracket
begins when fewer trials are under way than half as many again as there are places, instead of as many. Both were
chosen on seeds 100 to 105 with budgets of 27 and 81 epochs and measured on those reported. Four times as many was tried
first: 1.466 instead of 1.450 for Hyperband on 8 devices here, but slower with 27 epochs. Halving, synchronous BOHB and
Hyperband in turn have one group at a time: nothing changes for them.

Fluid was changed a third time after all results were known, for what "to_equal_quality" told: under Hyperband on 8
devices, where trials share, the best loss came later than without Fluid (0.69 of its speed in the median). Since then
promoted trials go before new ones, and finalists get up to half of the devices, for which new ones pause. On
seeds 100 to 105 that made the time to the best loss 1.13 to 1.45 times shorter under Hyperband and BOHB on 8 devices,
and makespans 0 to 3% longer; width 2 (of 1 to 4) was chosen there.

Further conditions: packing costs ten times as much (6.4.2; measured first, as in the paper, or unknown to the planner);
epochs of one trial differ as well (6.4.1); budgets up to 27 epochs only, where Halving of 81 leaves few devices idle.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuning import ALGORITHMS, Result, run
from workloads import TASKS, Curves, data_folder, families, gavel

from _bench import earlier, save, spread
from penstock import Fluid, Overhead
from penstock.predict import fit_sharing

GOALS = {
    "SyncBOHB": 2.0,
    "Halving": 2.0,
    "Halving of 27": 2.0,
    "Hyperband in turn": 1.5,
    "Hyperband": 1.5,
    "ASHA": 1.3,
    "BOHB": 1.3,
    "ASHA with TPE": 1.3,
}


KNOWN: dict[tuple[object, ...], Result] = {}  # conditions and families have studies in common


@dataclass(frozen=True)
class Condition:
    """How a study is made harder than the paper's macrobenchmark."""

    packing: float = 1.0  # times the packing overhead
    unknown: bool = False  # the planner believes in the measured overhead nevertheless
    variance: float = 0.0  # sigma of the epochs of one trial
    epochs: int = 81


CONDITIONS = {
    "as measured": Condition(),
    "packing x10": Condition(packing=10.0),
    "packing x10, unknown": Condition(packing=10.0, unknown=True),
    "epochs differ by 0.3": Condition(variance=0.3),
    "27 epochs": Condition(epochs=27),
}


PAPERS = [name for name, condition in CONDITIONS.items() if not condition.unknown]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with gavel/ and taskset/; else the variable PENSTOCK_DATA")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--task", default=TASKS[0], choices=TASKS, help="whose learning curves")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--beta", type=float, default=1.05)
    parser.add_argument("--d", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=0.3, help="how much epochs of different trials differ")
    parser.add_argument("--conditions", nargs="+", default=PAPERS, choices=list(CONDITIONS))
    parser.add_argument("--families", nargs="+", help="of Gavel's models; by default all")
    parser.add_argument(
        "--ahead", type=int, help="trials under way per device, up to c; by default the planner's choice"
    )
    parser.add_argument("--add", action="store_true", help="to the rows that the file with results has")
    parser.add_argument(
        "--limits",
        action="store_true",
        help="only tell anew, for the rows that the file has, what could be gained",
    )
    parser.add_argument("--name", default="fluid_studies", help="of the file with results")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    arguments = parser.parse_args()
    curves = Curves(data_folder(arguments.data, "taskset"), arguments.task)
    if arguments.limits:
        tell_limits(arguments, curves)
        return
    jobs = families(gavel(data_folder(arguments.data, "gavel")))
    jobs = {name: job for name, job in jobs.items() if not arguments.families or name in arguments.families}
    settings = list(itertools.product(arguments.conditions, arguments.devices, arguments.algorithms))
    rows: list[dict[str, object]] = []
    for condition, devices, algorithm in settings:
        found = compare(algorithm, devices, CONDITIONS[condition], arguments, curves, jobs)
        rows += [{"condition": condition, **row} for row in found]
        for row in rows[-len(found) :]:
            show(row)
        keep(rows, arguments, whole=(condition, devices, algorithm) == settings[-1])


def keep(rows: list[dict[str, object]], arguments: argparse.Namespace, whole: bool) -> None:
    """Save rows as soon as they are known; ``--add``: in the place of older ones of the same setting."""
    facts = {key: value for key, value in vars(arguments).items() if key not in ("data", "add", "limits")}
    kept = earlier(arguments.name) if arguments.add else None
    if kept is not None:
        before = kept["results"]
        for key in ("conditions", "devices", "algorithms"):
            facts[key] = list(dict.fromkeys([*before["arguments"][key], *facts[key]]))
        mine = {(row["condition"], row["devices"], row["algorithm"]) for row in rows}
        others = [r for r in before["rows"] if (r["condition"], r["devices"], r["algorithm"]) not in mine]
        rows = [*others, *rows]
    facts["seeds"] = min(row["makespan"]["repeats"] for row in rows)  # type: ignore[index]  # each row tells its own
    command = f"python {sys.argv[0]} --data FOLDER --seeds {facts['seeds']}"
    save(arguments.name, command, {"arguments": facts, "rows": rows}, ["optuna"], kept=kept, whole=whole)


def compare(
    algorithm: str,
    devices: int,
    condition: Condition,
    arguments: argparse.Namespace,
    curves: Curves,
    jobs: dict[str, dict[str, float]],
) -> list[dict[str, object]]:
    """One algorithm with and without Fluid, for each family of models."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)

    def study(believed: Overhead | None, truth: Overhead, seed: int) -> Result:
        """Without Fluid, or with what it believes in. Where nothing is packed, its price is nobody's concern."""
        if believed is not None and believed.max_sharing == 1:
            believed = truth = replace(believed, alpha=1.0)
        ahead = None if believed is None or arguments.ahead is None else arguments.ahead
        key = (algorithm, devices, condition.epochs, condition.variance, believed, truth, seed)
        if key not in KNOWN:
            planner = None
            if believed is not None:
                concurrency = None if ahead is None else min(ahead, believed.max_sharing) * devices
                planner = Fluid(believed, concurrency=concurrency)
            KNOWN[key] = run(
                algorithm,
                planner,
                devices=devices,
                truth=truth,
                curves=curves,
                epochs=condition.epochs,
                sigma=arguments.sigma,
                variance=condition.variance,
                seed=seed,
            )
        return KNOWN[key]

    default = {seed: study(None, Overhead(), seed) for seed in seeds}
    rows: list[dict[str, object]] = []
    for family, job in jobs.items():
        c, measured = fit_sharing({1: [1.0], 2: [job["alpha"]] * 2})
        alpha = 1 + condition.packing * (measured - 1)
        truth = Overhead(alpha, arguments.beta, c if condition.packing == 1 else 2, arguments.d, 3.0)
        believed = replace(truth, alpha=measured, max_sharing=c) if condition.unknown else truth
        believed = believed.within_bounds()
        sharing = believed.max_sharing
        saving = min(1.0, alpha / 2) if sharing > 1 else 1.0  # two on a device, against one after the other
        pairs = [(default[seed], ours) for seed in seeds for ours in [study(believed, truth, seed)]]
        targets = [max(base.best, ours.best) for base, ours in pairs]
        rows.append(
            {
                "algorithm": algorithm,
                "devices": devices,
                "family": family,
                "alpha": alpha,
                "c": sharing,
                "makespan": spread([base.makespan_s / ours.makespan_s for base, ours in pairs]),
                "geometric_mean": statistics.geometric_mean(
                    [base.makespan_s / ours.makespan_s for base, ours in pairs]
                ),
                # Where other results are known when a trial is proposed or promoted, others are trained, and longer
                # or shorter ones by chance: the same with the makespans per work.
                "per_work": spread(
                    [base.makespan_s / base.work_s / (ours.makespan_s / ours.work_s) for base, ours in pairs]
                ),
                "per_work_geometric_mean": statistics.geometric_mean(
                    [base.makespan_s / base.work_s / (ours.makespan_s / ours.work_s) for base, ours in pairs]
                ),
                **limits(pairs, devices, truth, saving),
                "to_equal_quality": spread(
                    [
                        base.reached_s(target) / ours.reached_s(target)  # type: ignore[operator]
                        for (base, ours), target in zip(pairs, targets, strict=True)
                    ]
                ),
                "loss_difference": spread([ours.best - base.best for base, ours in pairs]),
                "mean_loss_difference": statistics.mean([ours.best - base.best for base, ours in pairs]),
                "utilisation": statistics.mean(
                    [ours.busy_s / devices / ours.makespan_s for _, ours in pairs]
                ),
                "goal": GOALS[algorithm],
            }
        )
    return rows


def limits(
    pairs: Sequence[tuple[Result, Result]], devices: int, overhead: Overhead, saving: float
) -> dict[str, object]:
    """How much any planner could gain with the trials it trained, which may be others than by default.

    All work, packed, with no device ever idle, or the trial that trains longest, as wide as can be: what takes longer
    is less than any schedule takes. That rungs wait for their last trials is left out, so it is rarely met.
    """
    fastest = overhead.speed(min(devices, overhead.max_devices))
    most = [
        base.makespan_s / max(ours.work_s * saving / devices, ours.longest_s / fastest)
        for base, ours in pairs
    ]
    return {"at_most": spread(most), "at_most_geometric_mean": statistics.geometric_mean(most)}


def tell_limits(arguments: argparse.Namespace, curves: Curves) -> None:
    """The default execution again, and with it the limits of all rows; gains stay as they were measured.

    Of the default's trials: right where Fluid trains the same, not for learning samplers or ASHA.
    """
    kept = earlier(arguments.name)
    if kept is None:
        sys.exit(f"There are no results {arguments.name} yet; run this without --limits.")
    results = kept["results"]
    facts = results["arguments"]
    overhead = Overhead(beta=facts["beta"], max_devices=facts["d"])
    known: dict[tuple[object, ...], list[Result]] = {}
    for row in results["rows"]:
        condition = CONDITIONS[row["condition"]]
        key = (row["algorithm"], row["devices"], condition.epochs, condition.variance)
        if key not in known:
            first = facts["first_seed"]
            known[key] = [
                run(
                    row["algorithm"],
                    None,
                    devices=row["devices"],
                    truth=Overhead(),
                    curves=curves,
                    epochs=condition.epochs,
                    sigma=facts["sigma"],
                    variance=condition.variance,
                    seed=seed,
                )
                for seed in range(first, first + row["makespan"]["repeats"])
            ]
        saving = min(1.0, row["alpha"] / 2) if row["c"] > 1 else 1.0
        row |= limits([(base, base) for base in known[key]], row["devices"], overhead, saving)
    command = f"python {sys.argv[0]} --data FOLDER"
    save(arguments.name, command, results, ["optuna"], kept=kept)


def show(row: dict[str, object]) -> None:
    gain, equal = row["makespan"], row["to_equal_quality"]
    print(
        f"{row['condition']}: {row['devices']:4d} {row['algorithm']:18s} {row['family']:15s} alpha {row['alpha']:.2f} "
        f"c {row['c']}: makespan x{row['geometric_mean']:.2f} ({gain['min']:.2f}..{gain['max']:.2f}) of at most "  # type: ignore[index]
        f"x{row['at_most_geometric_mean']:.2f}, per work x{row['per_work_geometric_mean']:.2f}, "
        f"to equal quality x{equal['median']:.2f}, "  # type: ignore[index]
        f"loss {row['mean_loss_difference']:+.4f}, busy {row['utilisation']:.2f} (goal {row['goal']})",
        flush=True,
    )


if __name__ == "__main__":
    main()
