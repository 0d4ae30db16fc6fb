"""Power limits of a study: its placements have their devices to themselves, its profiles go to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from penstock.core import Free, Noted, Plan
from penstock.core.errors import InvalidInput
from penstock.energy import (
    PARTS,
    PROBLEMS,
    PROFILES,
    FileCache,
    LimitedMeters,
    LimitOptions,
    LimitRule,
    PowerLimits,
    PowerProfile,
    SimulatedGpus,
    savings,
)
from penstock.execute import Executor
from penstock.store import Store

_FILE = "power-profiles.json"


def check_limits(given: Any, executor: Executor, *, meter: bool) -> PowerLimits | None:
    """The study's power limits.

    Raises:
        InvalidInput: They are something else, the meter is off, or trials share their devices.
    """
    if given is None:
        return None
    if isinstance(given, type):
        raise InvalidInput(
            f"power_limits takes an object, got the class {given.__name__}: write {given.__name__}(...)."
        )
    limits = PowerLimits(given) if isinstance(given, LimitRule) else given
    if not isinstance(limits, PowerLimits):
        raise InvalidInput(f"power_limits takes a rule such as EtaCost(0.5), or PowerLimits, got {given!r}.")
    if not meter:
        raise InvalidInput("power_limits needs the meter: drop meter=False, or the power limits.")
    width = float(getattr(executor, "slots_per_trial", 1))
    if width < 1:
        raise InvalidInput(
            f"power_limits can't be used with slots_per_trial={width:g}: a limit belongs to a whole device, and "
            "trials that share one would profile each other. Give every trial a whole device, or drop power_limits."
        )
    return limits


def exclusively(plan: Plan) -> Plan:
    """A plan pass: on GPUs, what waits gets its devices to itself, for a power limit is the whole device's."""
    if all(item.device.kind == "cpu" for item in plan.free):
        return plan
    return alone(plan)


def alone(plan: Plan) -> Plan:
    """A plan pass: what waits gets its devices to itself, whatever they are: imagined GPUs have limits, too."""
    return replace(plan, waiting=tuple(replace(placement, exclusive=True) for placement in plan.waiting))


@final
class LimitDesk:
    """Carries power profiles between the store, which outlives the study, and the file that its workers share.

    Args:
        limits: What the study wants.
        task: Names the work in the profiles' keys.
        files: The study's folder.
        store: Open for writing.
    """

    def __init__(self, limits: PowerLimits, task: str, files: Path, store: Store) -> None:
        self._limits = limits
        self._task = task
        self._path = files.absolute() / _FILE
        self._file = FileCache(self._path)
        self._store = store
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, Any] = {}

    def meters(self, imagined: SimulatedGpus | None = None) -> LimitedMeters | SimulatedGpus:
        """What makes the trials' meters in the workers, on real GPUs or on imagined ones."""
        limits = self._limits
        options = LimitOptions(
            limits.rule, self._task, self._path, limits.observe, limits.slice_s, limits.step_w
        )
        return LimitedMeters(options) if imagined is None else imagined.limited(options)

    def for_simulated(self) -> dict[str, Any]:
        """What simulated devices must know: the same, without a file."""
        known = {key: value for key, value in self._known.items() if key.startswith(PROFILES)}
        return {"power_limits": self._limits, "power_profiles": known, "task": self._task}

    def keep(self, note: Noted) -> None:
        """A simulated device's profile goes to the store, too."""
        key, data = note.data.get("key"), note.data
        if isinstance(key, str):
            limits = [list(seen) for seen in data["profile"]]
            highest_w = max(limit_w for limit_w, _, _ in limits)
            profile = {"device": data["device"], "world_size": 1, "max_limit_w": highest_w, "limits": limits}
            self._known[key] = profile
            self._store.put(key, profile)

    def open(self) -> None:
        """Give the workers what the store knows; no worker runs yet.

        What a killed driver has left in the file goes to the store by ``news``, like any other.
        """
        left = {key: value for key, value in self._file.items() if key.startswith((PROFILES, PARTS))}
        for prefix in (PROFILES, PARTS):
            for key in self._store.keys(prefix):
                self._known[key] = self._store.get(key)
        self._file.replace(self._known | left)

    def refusal(self, free: Sequence[Free], *, virtual: bool, imagined: bool) -> str | None:
        """Why no limit will be set at all, from what the executor has; None if one may be."""
        if imagined:
            return None
        if virtual:
            return (
                "Simulated devices have no power limits, unless they are given some by "
                "Simulated(power=SimulatedGpus(load)): power_limits is not used."
            )
        if free and all(item.device.kind == "cpu" for item in free):
            return (
                "There is no GPU here, so no power limit to set: power_limits is not used. "
                'Run "penstock doctor" to see what this machine has.'
            )
        return None

    def news(self, time_s: float) -> tuple[list[Noted], list[str]]:
        """What workers have found since the last call: notes for the journal, and sentences for the user."""
        try:
            status = self._path.stat()
        except OSError:
            return [], []
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return [], []
        self._stamp = stamp
        notes: list[Noted] = []
        said: list[str] = []
        for key, value in self._file.items():
            if self._known.get(key) == value:
                continue
            self._known[key] = value
            if key.startswith(PROBLEMS):
                said.append(str(value))
                notes.append(Noted(time_s, "power_limits", {"text": str(value)}))
                continue
            self._store.put(key, value)
            if key.startswith(PROFILES):
                notes.append(Noted(time_s, "power_profile", self._found(key, PowerProfile.from_json(value))))
        return notes, said

    def _found(self, key: str, profile: PowerProfile) -> dict[str, Any]:
        best = self._limits.rule.choose(profile)
        energy_saved, time_saved = savings(profile, best)
        batch_size = int(key.split("/")[-2])
        return {
            "device": profile.device,
            "gpus": profile.world_size,
            "batch_size": batch_size,
            "rule": repr(self._limits.rule),
            "limit_w": best.limit_w,
            "highest_w": profile.highest.limit_w,
            "energy_saved": energy_saved,
            "time_saved": time_saved,
            "applied": not self._limits.observe,
            "profile": [[seen.limit_w, seen.power_w, seen.throughput] for seen in profile.limits],
        }


def task_of(work: Any) -> str:
    """What names a work in the keys of power profiles: the same work has the same name in every session."""
    name = getattr(work, "name", None)
    if isinstance(name, str) and name:
        return name
    name = getattr(work, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(work, '__module__', '')}.{name}"
    return repr(work)


__all__ = ["LimitDesk", "alone", "check_limits", "exclusively", "task_of"]
