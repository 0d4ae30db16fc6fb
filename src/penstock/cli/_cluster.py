"""``penstock simulate --jobs ...``: tuning jobs on a simulated cluster of mixed devices."""

from __future__ import annotations

import ast
import csv
import json
import lzma
import math
import reprlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli._json import json_text
from penstock.core.errors import InvalidInput
from penstock.plan import DeviceKind, Rate
from penstock.plan._cluster import ClusterOutcome, TuningJob, sample_jobs, simulate_cluster
from penstock.report._format import duration_text

# Rough board power, idle power and price per hour, none of them measured here. Give your own as
# NAME=COUNT:BUSY_W:IDLE_W:PRICE.
_KNOWN = {
    "k80": DeviceKind("k80", 1, 2014, 150, 30, 0.45, 4),
    "p100": DeviceKind("p100", 1, 2016, 250, 30, 1.46, 6),
    "v100": DeviceKind("v100", 1, 2017, 300, 40, 2.48, 8),
    "a100": DeviceKind("a100", 1, 2020, 400, 50, 3.67, 12),
}

# Iterations a second where no table is given, made up: trials that newer devices speed up much, little, and not at all.
_MADE_UP = {"compute": (9.0, 4.0, 2.5, 0.6), "mixed": (7.0, 5.0, 4.0, 1.5), "memory": (5.0, 4.0, 4.5, 3.0)}
_RATES = {
    (trial, device): Rate(speed)
    for trial, row in _MADE_UP.items()
    for device, speed in zip(("a100", "v100", "p100", "k80"), row, strict=True)
}


def parse_devices(text: str) -> list[DeviceKind]:
    """``v100=8,p100=4:250:30:1.46``: kinds, counts, and where wanted busy watts, idle watts and price per hour."""
    found = []
    for order, item in enumerate(text.split(",")):
        name, equals, rest = item.strip().partition("=")
        parts = rest.split(":")
        try:
            if not (name and equals and len(parts) in (1, 4)):
                raise ValueError(item)
            count = int(parts[0])
            if count > 999_999:
                raise ValueError(item)
            known = _KNOWN.get(name.lower())
            if len(parts) == 4:
                watts, idle, price = map(float, parts[1:])
                generation = known.generation if known else 3000 - order
                found.append(DeviceKind(name.lower(), count, generation, watts, idle, price))
            elif known:
                found.append(
                    DeviceKind(
                        known.name,
                        count,
                        known.generation,
                        known.busy_w,
                        known.idle_w,
                        known.price_per_h,
                        known.cores,
                    )
                )
            else:
                found.append(DeviceKind(name.lower(), count, 3000 - order))
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(
                f"--devices takes kinds with --jobs, v100=8,p100=4 or v100=8:300:40:2.48 (count, busy W, idle W, "
                f"price/h), newest first; got {item!r}."
            ) from None
    if len({d.name for d in found}) != len(found):
        raise InvalidInput(f"--devices names a kind twice: {text!r}.")
    return found


def read_rates(path: str | None) -> dict[tuple[str, str], Rate]:
    """Rates from a table: Gavel's JSON (also .xz), or ``{"trial kind": {"device kind": iterations/s}}``.

    Gavel's table also says how two copies of a job do on one device together; from that comes the utilisation.
    """
    if path is None:
        return dict(_RATES)
    try:
        raw = Path(path).read_bytes()
        data = json.loads(lzma.decompress(raw) if path.endswith(".xz") else raw)
    except (OSError, ValueError, RecursionError, lzma.LZMAError) as error:
        raise InvalidInput(f"--rates {path} can't be read: {error}.") from error
    if not (isinstance(data, dict) and all(isinstance(row, dict) for row in data.values())):
        raise InvalidInput(
            f"--rates {path} is no table of iterations per second: it takes {{trial kind: {{device kind: number}}}}, "
            f"got {reprlib.repr(data)}."
        )
    if not any("('" in key for row in data.values() for key in row):
        return {
            (t, d.lower()): Rate(_per_s(path, t, d, v)) for t, row in data.items() for d, v in row.items()
        }
    return {k: v for device, row in data.items() for k, v in _gavel(path, device, row).items()}


def _per_s(path: str, trial: str, device: str, value: Any) -> float:
    try:
        per_s = float(value)
    except (TypeError, ValueError, OverflowError):
        per_s = math.nan
    if not 0 <= per_s < math.inf:
        raise InvalidInput(
            f"--rates {path}: {trial!r} on {device!r} can't make {reprlib.repr(value)} iterations a second; give a "
            "number of at least 0 (0: it can't run there)."
        )
    return per_s


def _gavel(path: str, device: str, row: Mapping[str, Any]) -> dict[tuple[str, str], Rate]:
    found = {}
    for key, others in row.items():
        try:
            name, workers = ast.literal_eval(key)
            if workers != 1 or "unconsolidated" in device:
                continue
            alone, pair = _per_s(path, name, device, others["null"]), others.get(key)
            used = None
            if pair and alone > 0 and sum(pair) > 0:
                used = min(1.0, alone / sum(pair))  # two of them do so much more than one
            found[name, device] = Rate(alone, None, used)
        except InvalidInput:
            raise
        except (AttributeError, TypeError, ValueError, KeyError, SyntaxError, RecursionError, MemoryError):
            raise InvalidInput(
                f"--rates {path}: {reprlib.repr(key)} of {device!r} is not as in Gavel's tables, \"('kind', 1)\": "
                f'{{"null": number}}; got {reprlib.repr(others)}.'
            ) from None
    return found


def read_jobs(text: str, rates: Mapping[tuple[str, str], Rate], hours: float, seed: int) -> list[TuningJob]:
    """A number of made-up jobs, or those of a CSV file.

    Columns: ``arrival_s``, ``kind``, ``trials``, ``iterations`` (of a trial); optional: ``name``, ``rungs`` (how many,
    each with a third of the trials and three times the iterations), ``max_devices``, ``target_iterations``, ``weight``.
    """
    if text.isascii() and text.isdigit():
        if len(text) > 6:
            raise InvalidInput(f"--jobs makes up to 999999 jobs, got {text:.80}.")
        return sample_jobs(int(text), rates, hours=hours, seed=seed)
    try:
        with Path(text).open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin with a mark
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(f"--jobs takes a number or a CSV file; {text!r} can't be read: {why}.") from error
    jobs = []
    for number, row in enumerate(rows):
        try:
            trials, iterations = int(row["trials"]), float(row["iterations"])
            rungs: list[tuple[int, float]] = []
            for _ in range(int(row.get("rungs") or 1)):
                if trials < 1 and rungs:
                    break
                rungs.append((trials, iterations))
                trials, iterations = trials // 3, iterations * 3
            jobs.append(
                TuningJob(
                    row.get("name") or f"job{number}",
                    float(row["arrival_s"]),
                    row["kind"],
                    tuple(rungs),
                    int(row["max_devices"]) if row.get("max_devices") else None,
                    float(row.get("target_iterations") or 0),
                    float(row.get("weight") or 1),
                )
            )
        except InvalidInput:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidInput(
                f"{text}, job {number + 1}: {error!r}. Needed are arrival_s, kind, trials and iterations."
            ) from error
    if not jobs:
        raise InvalidInput(
            f"--jobs {text}: the file has no jobs. Give one a line below the names of the columns."
        )
    return jobs


def cluster(
    jobs: str,
    devices: str,
    policy: str,
    *,
    rates: str | None = None,
    goal: str = "time",
    eta: float = 0.5,
    learn: bool = False,
    hours: float = 1.0,
    seed: int = 0,
    as_json: bool = False,
) -> str:
    """Simulate, and say what came of it; policy ``both`` compares."""
    kinds = parse_devices(devices)
    table = read_rates(rates)
    names = {d.name for d in kinds}
    known = {device for (_, device), rate in table.items() if rate.per_s > 0}
    if not names & known:
        raise InvalidInput(
            f"--devices {devices}: no trial is known to run on any of them. There are rates for "
            f"{', '.join(sorted(known)) or 'no device'}; name one of these, or give --rates with others."
        )
    table = {(trial, device): rate for (trial, device), rate in table.items() if device in names}
    listed = read_jobs(jobs, table, hours, seed)
    if policy not in ("agnostic", "aware", "both"):
        raise InvalidInput(f"--policy takes agnostic, aware or both, got {policy!r}.")
    if goal not in ("time", "energy", "money"):
        raise InvalidInput(f"--goal takes time, energy or money, got {goal!r}.")
    found: dict[str, ClusterOutcome] = {}
    cpu_s: dict[str, float] = {}
    for one in ("agnostic", "aware") if policy == "both" else (policy,):
        begin = time.process_time()
        found[one] = simulate_cluster(
            listed,
            kinds,
            table,
            policy="agnostic" if one == "agnostic" else "aware",
            goal="energy" if goal == "energy" else "money" if goal == "money" else "time",
            eta=eta,
            learn=learn,
            seed=seed,
        )
        cpu_s[one] = time.process_time() - begin
    if as_json:
        return json_text({name: out.to_json() | {"cpu_s": cpu_s[name]} for name, out in found.items()})
    lines = [f"simulated {len(listed)} jobs, {sum(j.trials for j in listed)} trials on {devices}"]
    for name, out in found.items():
        lines += _text(name, out)
    if len(found) == 2:
        gain = found["agnostic"].mean_jct_s / found["aware"].mean_jct_s
        lines.append(f"average job completion time: aware {gain:.2f} times as good as agnostic")
    return "\n".join(lines)


def _text(name: str, out: ClusterOutcome) -> list[str]:
    told = out.to_json()
    return [
        f"{name}",
        f"  job completion {duration_text(told['mean_jct_s'])} on average, "
        f"95% within {duration_text(told['p95_jct_s'])}",
        f"  makespan       {duration_text(out.makespan_s)}",
        f"  devices        {100 * out.utilisation:.0f}% of the held time at work",
        f"  energy         {out.energy_j / 3.6e6:.4g} kWh (simulated, from the kinds' power)",
        f"  cost           {out.money:.2f} (by the kinds' prices per hour)",
    ]
