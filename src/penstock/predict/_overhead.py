"""What sharing a device and spreading over devices cost, fitted from a short profile (Fluid, 4.2.2 and 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, final

from penstock.core.check import is_real
from penstock.core.errors import InvalidInput


@final
@dataclass(frozen=True, slots=True)
class Overhead:
    """Fluid's runtime model h(i, w): how long a trial takes on a width of ``w`` devices.

    Attributes:
        alpha: Packing: with p trials on one device, each takes ``alpha ** (p - 1)`` times as long as alone.
        beta: Scaling: on w devices a trial takes ``beta ** (w - 1) / w`` of its time on one.
        max_sharing: c, the most trials on one device.
        max_devices: d, the most devices of one trial.
        epsilon_s: What changing a running trial's width costs it, in seconds.
    """

    alpha: float = 1.0
    beta: float = 1.0
    max_sharing: int = 1
    max_devices: int = 1
    epsilon_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not (is_real(value) and math.isfinite(value) and value >= 1):
                raise InvalidInput(f"{name} must be finite and at least 1 (1 is no overhead), got {value!r}.")
        for name in ("max_sharing", "max_devices"):
            value = getattr(self, name)
            if not (is_real(value) and math.isfinite(value)) or value < 1 or int(value) != value:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r}.")
        if not (is_real(self.epsilon_s) and math.isfinite(self.epsilon_s) and self.epsilon_s >= 0):
            raise InvalidInput(f"epsilon_s must be finite and at least 0 seconds, got {self.epsilon_s!r}.")

    def speed(self, width: float) -> float:
        """How fast a trial trains on ``width`` devices, 1 being alone on one."""
        if width < 1:
            return float(self.alpha ** (1 - 1 / width))
        return float(width * self.beta ** (1 - width))

    def runtime_s(self, alone_s: float, width: float) -> float:
        """h(i, w): the time of a trial that takes ``alone_s`` alone on one device, on ``width`` of them."""
        return alone_s / self.speed(width)

    def within_bounds(self) -> Overhead:
        """The same with c and d lowered until each further trial or device still gains something.

        Fluid's lemmas 4 and 6: packing the p-th trial pays while ``alpha < p / (p - 1)``, the w-th device
        while ``beta < w / (w - 1)``. (Lemma 6 prints ``1 + 1 / d``, below which a device more than d would still gain;
        Theorem 2's bound holds here, too.)
        """
        sharing, devices = self.max_sharing, self.max_devices
        while sharing > 1 and self.alpha >= sharing / (sharing - 1):
            sharing -= 1
        while devices > 1 and self.beta >= devices / (devices - 1):
            devices -= 1
        return replace(self, max_sharing=sharing, max_devices=devices)

    def to_json(self) -> dict[str, Any]:
        """For the journal: a profile is measured once and used for the whole study."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Overhead:
        """The overhead of a journal's record."""
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})


def marginal_benefit(times_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """O^p for each measured p > 1: what packing the p-th trial on a device gains (Fluid 4.2.2).

    Args:
        times_s: By the number p of trials on one device, their times per iteration. p = 1, 2, ... without gaps.

    Returns:
        By p, ``1 - (p - 1) / p * avg(T^p) / avg(T^(p-1))``: 1/p if packing costs nothing, 0 if the p trials
        could as well take turns, negative if they get in each other's way.
    """
    mean = _means(times_s, "trials on one device")
    return {p: 1 - (p - 1) / p * mean[p] / mean[p - 1] for p in sorted(mean) if p > 1}


def fit_sharing(times_s: Mapping[int, Sequence[float]], *, threshold: float = 0.05) -> tuple[int, float]:
    """c and alpha from a profile of p = 1, 2, ... trials on one device.

    c is the last p up to which every marginal benefit is above ``threshold``; alpha is fitted to the times up
    to c by least squares of their logarithms.
    """
    benefit = marginal_benefit(times_s)
    mean = _means(times_s, "trials on one device")
    sharing = 1
    while benefit.get(sharing + 1, -math.inf) > threshold:
        sharing += 1
    while True:
        # Keep a cost for packing also when c = 1: a planner that is told c by hand still sees it.
        upto = max(sharing, min(2, max(mean)))
        alpha = _fit({p: mean[p] / mean[1] for p in mean if p <= upto})
        if sharing == 1 or alpha < sharing / (sharing - 1):  # Lemma 4
            return sharing, alpha
        sharing -= 1


def fit_scaling(times_s: Mapping[int, Sequence[float]], *, threshold: float = 0.05) -> tuple[int, float]:
    """d and beta from a profile of one trial on w devices, with the same global batch.

    Widths need not be consecutive (1, 2, 4, 8). d is the largest measured width up to which each step to the
    next one shortens an iteration by more than ``threshold`` per doubling; beta is fitted up to d.
    """
    mean = _means(times_s, "devices of one trial", consecutive=False)
    widths = sorted(mean)
    devices = 1
    for narrow, wide in pairwise(widths):
        doublings = math.log2(wide / narrow)
        if mean[wide] >= mean[narrow] * (1 - threshold) ** doublings:
            break
        devices = wide
    while True:
        upto = max(devices, widths[1]) if len(widths) > 1 else 1
        beta = _fit({w: w * mean[w] / mean[1] for w in widths if w <= upto})
        if devices == 1 or beta < devices / (devices - 1):
            return devices, beta
        devices = max((w for w in widths if w < devices), default=1)


def _means(
    times_s: Mapping[int, Sequence[float]], what: str, *, consecutive: bool = True
) -> dict[int, float]:
    if 1 not in times_s:
        raise InvalidInput(f"A profile over {what} needs the time for 1, got {sorted(times_s)}.")
    if consecutive and sorted(times_s) != list(range(1, len(times_s) + 1)):
        raise InvalidInput(f"A profile over {what} must go 1, 2, 3, ... without gaps, got {sorted(times_s)}.")
    means = {}
    for count, times in times_s.items():
        if not times or not all(math.isfinite(t) and t > 0 for t in times):
            raise InvalidInput(f"Times of {count} {what} must be positive seconds, got {list(times)!r}.")
        means[count] = math.fsum(times) / len(times)
    return means


def _fit(ratio: Mapping[int, float]) -> float:
    """The base b >= 1 of ``b ** (x - 1)`` that fits ratio(x), by least squares of logarithms."""
    above = sum((x - 1) * math.log(y) for x, y in ratio.items())
    below = sum((x - 1) ** 2 for x in ratio)
    return max(1.0, math.exp(above / below)) if below else 1.0


@final
@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to measure: iterations of ``count`` trials on one device, or of one trial on ``count`` devices."""

    kind: Literal["sharing", "scaling"]
    count: int


@final
class OverheadProfile:
    """Which runs to time at the start of a study, and what follows from them (Fluid 5: measured, not guessed).

    A state machine without I/O: run what ``wants`` names for a few iterations, ``tell`` the seconds per
    iteration, until ``wants`` is None; then ``result``. Packing is tried with one trial more each time while
    the last one paid, scaling with twice the devices. Belongs to one study; not shared between threads.
    """

    def __init__(
        self, *, max_sharing: int = 8, max_devices: int = 1, threshold: float = 0.05, epsilon_s: float = 0.0
    ) -> None:
        if max_sharing < 1 or max_devices < 1:
            raise InvalidInput(
                f"Can't profile up to {max_sharing} trials on a device and {max_devices} devices: give at least 1."
            )
        self._limits = {"sharing": max_sharing, "scaling": max_devices}
        self._threshold = threshold
        self._epsilon_s = epsilon_s
        self._sharing: dict[int, tuple[float, ...]] = {}
        self._scaling: dict[int, tuple[float, ...]] = {}

    @property
    def wants(self) -> Probe | None:
        """The next thing to measure, or None: done."""
        if not self._sharing:
            return Probe("sharing", 1)
        packed = len(self._sharing)
        # The trial that did not pay is measured too: it is how c is known.
        if (
            packed < self._limits["sharing"]
            and fit_sharing(self._sharing, threshold=self._threshold)[0] == packed
        ):
            return Probe("sharing", packed + 1)
        widest = max(self._scaling, default=1)
        limit = self._limits["scaling"]
        times = {1: self._sharing[1], **self._scaling}
        if widest < limit and fit_scaling(times, threshold=self._threshold)[0] == widest:
            return Probe("scaling", min(2 * widest, limit))
        return None

    def tell(self, probe: Probe, times_s: Sequence[float]) -> None:
        """The seconds per iteration of each trial of ``probe``. An empty list: it could not run (no memory)."""
        if probe != self.wants:
            raise InvalidInput(f"Asked to time {self.wants}, told of {probe}.")
        if times_s:
            measured = self._sharing if probe.kind == "sharing" else self._scaling
            measured[probe.count] = tuple(times_s)
        elif probe.kind == "sharing" and probe.count == 1:
            raise InvalidInput("A trial alone on one device could not run: there is nothing to profile.")
        else:
            self._limits[probe.kind] = (
                probe.count - 1 if probe.kind == "sharing" else max(self._scaling, default=1)
            )

    @property
    def result(self) -> Overhead:
        """What the measurements so far say."""
        if not self._sharing:
            return Overhead(epsilon_s=self._epsilon_s)
        sharing, alpha = fit_sharing(self._sharing, threshold=self._threshold)
        devices, beta = fit_scaling({1: self._sharing[1], **self._scaling}, threshold=self._threshold)
        return Overhead(alpha, beta, sharing, devices, self._epsilon_s)

    def to_json(self) -> dict[str, Any]:
        """The raw times, for the journal."""
        return {
            "sharing_s": {str(p): list(times) for p, times in self._sharing.items()},
            "scaling_s": {str(w): list(times) for w, times in self._scaling.items()},
            "result": self.result.to_json(),
        }
