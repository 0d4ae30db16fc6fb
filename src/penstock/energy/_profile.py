"""Power profiles: what each power limit means for watts and speed, and the rules that choose one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

from penstock.core.check import is_real
from penstock.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class LimitProfile:
    """What was seen at one power limit.

    Attributes:
        limit_w: The limit of each GPU.
        power_w: Average watts of all GPUs of the job together.
        throughput: Samples (or iterations) per second of the whole job.
    """

    limit_w: float
    power_w: float
    throughput: float

    def __post_init__(self) -> None:
        if not (
            0 < self.limit_w < math.inf and 0 <= self.power_w < math.inf and 0 < self.throughput < math.inf
        ):
            raise InvalidInput(f"Not what a power limit can do: {self}.")

    @property
    def energy_per_sample_j(self) -> float:
        """Joules per sample."""
        return self.power_w / self.throughput


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """A job's limits on one kind of device, highest limit first.

    Attributes:
        device: The device's model.
        world_size: GPUs of the job, all with the same limit.
        max_limit_w: The highest limit of one GPU: Zeus's MAXPOWER.
        limits: What was seen.
    """

    device: str
    world_size: int
    max_limit_w: float
    limits: tuple[LimitProfile, ...]

    def __post_init__(self) -> None:
        if not self.limits:
            raise InvalidInput("A power profile needs at least one limit.")
        if self.world_size < 1:
            raise InvalidInput(f"world_size must be at least 1, got {self.world_size}.")

    def at(self, limit_w: float) -> LimitProfile:
        """What was seen at a limit.

        Raises:
            InvalidInput: It was not profiled.
        """
        for seen in self.limits:
            if seen.limit_w == limit_w:
                return seen
        raise InvalidInput(f"{limit_w:g} W was not profiled: {[seen.limit_w for seen in self.limits]} were.")

    @property
    def highest(self) -> LimitProfile:
        """What was seen at the highest limit."""
        return max(self.limits, key=lambda seen: seen.limit_w)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value, for a store."""
        return {
            "device": self.device,
            "world_size": self.world_size,
            "max_limit_w": self.max_limit_w,
            "limits": [[seen.limit_w, seen.power_w, seen.throughput] for seen in self.limits],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PowerProfile:
        """Back from ``to_json``.

        Raises:
            InvalidInput: It is something else.
        """
        try:
            limits = tuple(LimitProfile(float(a), float(b), float(c)) for a, b, c in value["limits"])
            return cls(str(value["device"]), int(value["world_size"]), float(value["max_limit_w"]), limits)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"Not a power profile: {value!r} ({error}).") from error


PROFILES = "power-profile/"
PARTS = "power-profile-part/"


def profile_key(device: str, task: str, batch_size: int, world_size: int = 1) -> str:
    """The store's key of a profile: device model, task, batch size, GPUs."""
    return f"{PROFILES}{device}/{task}/{batch_size}/{world_size}"


def part_key(key: str) -> str:
    """The key of a profile's beginning, left by a training that was over too soon, from the profile's key."""
    return PARTS + key.removeprefix(PROFILES)


class ProfileCache(Protocol):
    """Where profiles are kept; a ``Store`` is one."""

    def get(self, key: str) -> Any | None:
        """A JSON value, or None."""

    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value."""


class LimitRule(ABC):
    """Chooses a limit from a profile. Pure."""

    @abstractmethod
    def choose(self, profile: PowerProfile) -> LimitProfile:
        """The best; of equals the lowest limit."""


@final
@dataclass(frozen=True, slots=True)
class EtaCost(LimitRule):
    """Zeus Eq. 7: least (eta x watts + (1 - eta) x MAXPOWER) / throughput.

    Attributes:
        eta: 1 is energy alone, 0 time alone.
    """

    eta: float = 0.5

    def __post_init__(self) -> None:
        if not is_real(self.eta) or not 0 <= self.eta <= 1:
            raise InvalidInput(f"eta must be in [0, 1], got {self.eta!r}. 1 is energy alone, 0 time alone.")

    def cost_rate_w(self, power_w: float, profile: PowerProfile) -> float:
        """Cost per second, in watts: Eq. 7's numerator. MAXPOWER is all GPUs' together (Zeus 7)."""
        return self.eta * power_w + (1 - self.eta) * profile.max_limit_w * profile.world_size

    def choose(self, profile: PowerProfile) -> LimitProfile:
        """The limit of least cost."""
        return min(
            profile.limits,
            key=lambda seen: (self.cost_rate_w(seen.power_w, profile) / seen.throughput, seen.limit_w),
        )


@final
@dataclass(frozen=True, slots=True)
class LeastEnergy(LimitRule):
    """Least energy, however long it takes."""

    def choose(self, profile: PowerProfile) -> LimitProfile:
        """The limit of least joules per sample."""
        return min(profile.limits, key=lambda seen: (seen.energy_per_sample_j, seen.limit_w))


@final
@dataclass(frozen=True, slots=True)
class LeastTime(LimitRule):
    """Least time, however much energy it takes."""

    def choose(self, profile: PowerProfile) -> LimitProfile:
        """The limit of highest throughput."""
        return min(profile.limits, key=lambda seen: (-seen.throughput, seen.limit_w))


@final
@dataclass(frozen=True, slots=True)
class LeastEnergyWithin(LimitRule):
    """Least energy that costs at most ``slowdown`` more time than the fastest limit: 0.1 is 10%."""

    slowdown: float

    def __post_init__(self) -> None:
        if not is_real(self.slowdown) or not self.slowdown >= 0:
            raise InvalidInput(f"slowdown must be at least 0, got {self.slowdown!r}. 0.1 is 10%.")

    def choose(self, profile: PowerProfile) -> LimitProfile:
        """The limit of least joules per sample among those fast enough."""
        fastest = max(seen.throughput for seen in profile.limits)
        allowed = [seen for seen in profile.limits if fastest / seen.throughput <= 1 + self.slowdown]
        return min(allowed, key=lambda seen: (seen.energy_per_sample_j, seen.limit_w))
