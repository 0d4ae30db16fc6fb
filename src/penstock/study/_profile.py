"""The profile at a study's start: what sharing devices and spreading over them costs here (Fluid 4.2.2 and 5)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.core import (
    Config,
    Device,
    Ended,
    Measurement,
    Placement,
    Reported,
    Segment,
    Share,
    Trial,
    TrialStatus,
    total,
)
from penstock.execute import Executor, Launch
from penstock.predict import Overhead, OverheadProfile, Probe
from penstock.store import Store
from penstock.study._limits import task_of
from penstock.train._elastic import by_threads

PREFIX = "overhead/"
_ITERATIONS = 30
_WINDOW_S = 0.5  # at least, so that short iterations are timed over many of the system's time slices
_LIMIT_S = 20.0  # for one probe; work whose iterations take longer is timed by fewer of them
_SPARE = 1.2  # of the memory a trial was seen to take: another configuration may take more


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What a profile found.

    Attributes:
        overhead: c, d, alpha, beta and epsilon.
        memory_bytes: What a trial needs on a device; None where it has no memory of its own.
        data: All times, for the store and the journal.
        energy: What it drew; None where that was not metered, or an earlier study has done it.
    """

    overhead: Overhead
    memory_bytes: int | None
    data: Mapping[str, Any]
    energy: Measurement | None = None


def key_of(work: Any, executor: Executor, spread: str = "threads") -> str:
    """What a profile holds for: the work, the kind and number of devices, and how a trial spreads over them."""
    task = task_of(work)
    if " at 0x" in task:  # an object's address is another one tomorrow
        task = f"{type(work).__module__}.{type(work).__qualname__}"
    free = executor.free()
    device = free[0].device if free else Device("none")
    how = "/threads" if by_threads(work, [device.kind], spread) else ""
    return f"{PREFIX}{task}/{device.kind}/{executor.slots}x{device.cores}{how}"


def recall(store: Store, key: str) -> Measured | None:
    """What an earlier study has measured."""
    data = store.get(key)
    # Without a window it was timed by single iterations, which do not see whose turn it is on a core.
    if not isinstance(data, dict) or "result" not in data or "window_s" not in data:
        return None
    return Measured(Overhead.from_json(data["result"]), data.get("memory_bytes"), data)


def measure(
    executor: Executor,
    config: Config,
    files: Path,
    *,
    seed: int,
    max_sharing: int,
    max_devices: int,
    meter: bool = False,
) -> Measured:
    """Time iterations of one configuration: p at a time on one device, then over w devices.

    Uses an open executor that is idle, and leaves it so. With ``meter``, tells what it drew.
    """
    free = executor.free()
    profile = OverheadProfile(max_sharing=max_sharing, max_devices=max_devices)
    bench = _Bench(executor, config, files.absolute() / "profile", seed, meter=meter)
    kind = [item.device for item in free if item.device.kind == free[0].device.kind] if free else []
    try:
        while kind and (probe := profile.wants) is not None:
            if probe.kind == "scaling" and probe.count > len(kind):
                profile.tell(probe, ())
                continue
            times = bench.run(probe, kind)
            if probe == Probe("sharing", 1):
                if not times:
                    break  # it can't be timed: nothing is shared, nothing spreads
                # All others are compared with it, and the first of all is cold: what made it slow must not look like
                # a gain of theirs.
                times = min(times, bench.run(probe, kind) or times)
            profile.tell(probe, times)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    found = profile.result
    overhead = Overhead(found.alpha, found.beta, found.max_sharing, found.max_devices, bench.setup_s or 0.0)
    memory = int(_SPARE * bench.memory_bytes) or None
    data = {**profile.to_json(), "result": overhead.to_json(), "memory_bytes": memory, "config": dict(config)}
    data["window_s"] = _WINDOW_S
    if bench.refused:
        data["refused"] = bench.refused
    return Measured(overhead, memory, data, total(bench.drawn))


@final
class _Bench:
    """Runs probes one after the other."""

    def __init__(
        self, executor: Executor, config: Config, folder: Path, seed: int, *, meter: bool = False
    ) -> None:
        self._executor = executor
        self._config = config
        self._seed = seed
        self.folder = folder
        self._number = 0
        self.setup_s: float | None = None
        self.memory_bytes = 0
        self.refused = ""  # why a trial could not spread
        self._metered = meter
        self.drawn: list[Measurement] = []

    def run(self, probe: Probe, devices: Sequence[Device]) -> list[float]:
        """Seconds per iteration of each trial; empty if one of them could not run."""
        together = probe.count if probe.kind == "sharing" else 1
        path = self.folder / f"{probe.kind}-{probe.count}"
        shutil.rmtree(path, ignore_errors=True)  # words of an earlier run
        path.mkdir(parents=True)
        first = devices[0]
        if probe.kind == "sharing":
            shares: tuple[Share, ...] = (Share(first.id, 1 / probe.count),)
        else:
            shares = tuple(Share(device.id) for device in devices[: probe.count])
        launches = []
        waiting: set[int] = set()
        for number in range(together):
            self._number -= 1  # such numbers no trial of a study has
            waiting.add(self._number)
            facts = {
                "probe": {
                    "path": str(path),
                    "size": together,
                    "number": number,
                    "iterations": _ITERATIONS,
                    "window_s": _WINDOW_S,
                    "limit_s": _LIMIT_S,
                    "cores": first.cores if first.kind == "cpu" and probe.kind == "sharing" else 0,
                    "meter": self._metered,
                }
            }
            segment = Segment(Trial(self._number, self._config, self._seed), until=1 << 30)
            placement = Placement((segment,), shares, max_devices=len(shares))
            launches.append(Launch(placement, (None,), (0,), facts))
        self._executor.launch(launches)
        times: list[float] = []
        deadline_s = time.monotonic() + 6 * _LIMIT_S
        while waiting:
            for event in self._executor.poll(0.25):
                if isinstance(event, Reported) and event.trial in waiting:
                    times.append(event.metrics["iteration_s"])
                    self._note(event.metrics)
                elif isinstance(event, Ended):
                    waiting.discard(event.trial)
                    self.drawn += [] if event.energy is None else [event.energy]
                    if probe.kind == "scaling" and event.status is TrialStatus.FAILED:
                        self.refused = event.reason
            if time.monotonic() > deadline_s:
                self._executor.stop(sorted(waiting), reason="the profile takes too long")
                deadline_s = float("inf")
        return times if len(times) == together else []

    def _note(self, metrics: Mapping[str, float]) -> None:
        setup_s = metrics["setup_s"]
        self.setup_s = setup_s if self.setup_s is None else min(self.setup_s, setup_s)
        self.memory_bytes = max(self.memory_bytes, int(metrics["memory_bytes"]))


def said(measured: Measured) -> str:
    """The result in a sentence."""
    found = measured.overhead
    sharing = (
        f"up to {found.max_sharing} trials share a device (each takes {found.alpha:.2f}x as long per further one)"
        if found.max_sharing > 1
        else "sharing a device does not pay"
    )
    scaling = (
        f"a trial spreads over up to {found.max_devices} (overhead {found.beta:.2f} per further one)"
        if found.max_devices > 1
        else "spreading a trial does not pay"
    )
    refused = measured.data.get("refused")
    return f"Measured: {sharing}; {scaling}." + (f" {refused}" if refused else "")
