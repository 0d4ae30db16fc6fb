"""The just-in-time profiler of power limits (Zeus 4.2 and 5), as a pure state machine.

It is told of epochs and iterations with a time and an energy each, and answers which limit to set. It reads no clock
and touches no device: ``PowerLimiter`` does that for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from penstock.core.errors import InvalidInput
from penstock.energy._profile import LimitProfile, LimitRule, PowerProfile


@dataclass(frozen=True, slots=True)
class Spent:
    """Time, energy and samples of a slice so far. A slice may span epochs: what lies between them is not in it."""

    time_s: float = 0.0
    energy_j: float = 0.0
    samples: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Nothing has run. -> Warming when the first epoch begins, or Applied if a profile is known."""


@dataclass(frozen=True, slots=True)
class Warming:
    """The first slice, at the highest limit, measured by nobody: caches fill, kernels are chosen. -> Profiling."""

    limit_w: float
    spent: Spent = Spent()


@dataclass(frozen=True, slots=True)
class Settling:
    """A new limit was set and has not taken full effect yet. -> Profiling."""

    index: int
    limit_w: float
    spent: Spent = Spent()


@dataclass(frozen=True, slots=True)
class Profiling:
    """A slice at a limit is measured. -> Settling for the next limit, or Applied after the last one."""

    index: int
    limit_w: float
    spent: Spent = Spent()


@dataclass(frozen=True, slots=True)
class Applied:
    """The profile is complete, the chosen limit is set for the rest. The end.

    In observer mode ``limit_w`` is the highest limit, and ``best`` what would have been set.
    """

    limit_w: float
    best: LimitProfile
    profile: PowerProfile


LimitState: TypeAlias = Ready | Warming | Settling | Profiling | Applied


@final
class PowerLimitOptimizer:
    """Profiles every limit once, in slices that end at iteration boundaries, then keeps the best.

    Call ``begin_epoch``, ``iteration`` after each iteration and ``end_epoch``. Each answers a limit to set now, or
    None. ``iteration`` needs an energy only when ``wants_reading`` says so, so that a training is not slowed by
    reading counters (and waiting for the GPU) after each of them.

    Who can't tell when an epoch's last iteration was, only that the epoch is over by now, gives ``piece_s`` and calls
    ``leave_epoch``: the energy is then read every ``piece_s``, and what came after the last reading is left out.

    Args:
        limits_w: The limits to profile; they are tried from the highest down.
        rule: Chooses from the profile.
        device: The device's model, kept in the profile.
        world_size: GPUs of the job. Energies are of all of them together.
        max_limit_w: MAXPOWER of one GPU; the highest of ``limits_w`` if None.
        slice_s: How long each limit is measured. Zeus 5: five seconds are enough.
        warmup_s: The first slice, not measured; ``slice_s`` if None.
        settle_s: Left out at the beginning of each limit's slice.
        min_iterations: Each slice has at least so many.
        observe: Keep the highest limit after profiling (Zeus 5, Observer Mode).
        known: A profile from earlier: nothing is profiled.
        seen: The beginning of a profile, from a training that was over too soon: only the rest is profiled.
        piece_s: See above.
    """

    def __init__(
        self,
        limits_w: tuple[float, ...],
        rule: LimitRule,
        *,
        device: str = "",
        world_size: int = 1,
        max_limit_w: float | None = None,
        slice_s: float = 5.0,
        warmup_s: float | None = None,
        settle_s: float = 0.5,
        min_iterations: int = 1,
        observe: bool = False,
        known: PowerProfile | None = None,
        seen: Sequence[LimitProfile] = (),
        piece_s: float | None = None,
    ) -> None:
        if not limits_w or min(limits_w) <= 0 or len(set(limits_w)) != len(limits_w):
            raise InvalidInput(f"limits_w must be different positive watts, got {limits_w}.")
        if slice_s <= 0 or settle_s < 0 or (warmup_s is not None and warmup_s < 0) or min_iterations < 1:
            raise InvalidInput(
                f"Slices must have a length: got {slice_s=}, {warmup_s=}, {settle_s=}, {min_iterations=}."
            )
        self.limits_w = tuple(sorted(limits_w, reverse=True))
        self.rule = rule
        self._device = device
        self._world_size = world_size
        self._max_limit_w = self.limits_w[0] if max_limit_w is None else max_limit_w
        self._slice_s = slice_s
        self._warmup_s = slice_s if warmup_s is None else warmup_s
        self._settle_s = settle_s
        self._min_iterations = min_iterations
        self._observe = observe
        self._known = known
        self.state: LimitState = Ready()
        self._seen: list[LimitProfile] = []
        for limit_w, known_limit in zip(self.limits_w[:-1], seen, strict=False):
            if known_limit.limit_w != limit_w:
                break
            self._seen.append(known_limit)
        self._piece_s = math.inf if piece_s is None else piece_s
        self._from: tuple[float, float] | None = None  # time and energy where the running piece began
        self._iterations = 0  # in this slice
        self._piece_iterations = 0  # in the running piece
        self._samples = 0.0  # in the running piece
        self._banked = False  # a piece of this epoch was counted

    @property
    def done(self) -> bool:
        """Whether the profile is complete."""
        return isinstance(self.state, Applied)

    @property
    def profile(self) -> PowerProfile | None:
        """The complete profile, or None before."""
        return self.state.profile if isinstance(self.state, Applied) else None

    @property
    def seen(self) -> tuple[LimitProfile, ...]:
        """The limits whose slices are over, highest first."""
        return tuple(self._seen)

    def begin_epoch(self, now_s: float, energy_j: float) -> float | None:
        """An epoch's first iteration begins."""
        self._from = (now_s, energy_j)
        self._drop_piece()
        self._banked = False
        if not isinstance(self.state, Ready):
            return None
        if self._known is not None:
            return self._apply(self._known)
        index = len(self._seen)
        first_w = self.limits_w[index]
        self.state = Warming(first_w) if self._warmup_s > 0 else Profiling(index, first_w)
        return first_w

    def wants_reading(self, now_s: float) -> bool:
        """Whether the next ``iteration`` may end a slice, or a piece of one, and so needs an energy."""
        if self._from is None or isinstance(self.state, Ready | Applied):
            return False
        return now_s - self._from[0] >= self._piece_s or self._ends_slice(now_s)

    def _ends_slice(self, now_s: float, samples: float = 1.0) -> bool:
        state = self.state
        assert not isinstance(state, Ready | Applied)
        assert self._from is not None
        needed = self._min_iterations if isinstance(state, Profiling) else 1
        return (
            state.spent.time_s + now_s - self._from[0] >= self._length_s(state)
            and self._iterations + 1 >= needed
            and (not isinstance(state, Profiling) or state.spent.samples + self._samples + samples > 0)
        )

    def iteration(self, now_s: float, energy_j: float | None = None, samples: float = 1.0) -> float | None:
        """An iteration is over. ``energy_j`` may be None unless ``wants_reading`` said so for this moment."""
        state = self.state
        if self._from is None or isinstance(state, Ready | Applied):
            return None
        wanted, ends = self.wants_reading(now_s), self._ends_slice(now_s, samples)
        self._samples += samples
        self._iterations += 1
        self._piece_iterations += 1
        if not wanted or energy_j is None:
            return None
        spent = self._bank(state.spent, now_s, energy_j)
        self._banked = True
        if not ends:
            self.state = replace(state, spent=spent)
            return None
        self._iterations = 0
        if isinstance(state, Profiling):
            self._seen.append(_seen(state.limit_w, spent))
            if state.index + 1 == len(self.limits_w):
                return self._apply(
                    PowerProfile(self._device, self._world_size, self._max_limit_w, tuple(self._seen))
                )
            index = state.index + 1
            limit_w = self.limits_w[index]
            self.state = Settling(index, limit_w) if self._settle_s > 0 else Profiling(index, limit_w)
            return limit_w
        index = state.index if isinstance(state, Settling) else len(self._seen)
        self.state = Profiling(index, state.limit_w)
        return None

    def end_epoch(self, now_s: float, energy_j: float) -> None:
        """The last iteration of an epoch is over: what follows (an evaluation) is not part of any slice."""
        state = self.state
        if self._from is not None and not isinstance(state, Ready | Applied):
            self.state = replace(state, spent=self._bank(state.spent, now_s, energy_j))
        self._from = None

    def leave_epoch(self, now_s: float, energy_j: float) -> None:
        """An epoch is over by now, and so is perhaps an evaluation: what no reading has counted is left out.

        Of an epoch so short that there was no reading in it all counts: it would never be profiled otherwise.
        """
        if self._banked:
            self._drop_piece()
            self._from = None
        else:
            self.end_epoch(now_s, energy_j)

    def validate(self) -> None:
        """Assert the invariants; called by tests."""
        state = self.state
        if isinstance(state, Settling | Profiling):
            assert state.limit_w == self.limits_w[state.index]
            assert [seen.limit_w for seen in self._seen] == list(self.limits_w[: state.index])
        if isinstance(state, Applied):
            assert state.limit_w == (self.limits_w[0] if self._observe else state.best.limit_w)

    def _length_s(self, state: Warming | Settling | Profiling) -> float:
        match state:
            case Warming():
                return self._warmup_s
            case Settling():
                return self._settle_s
            case Profiling():
                return self._slice_s

    def _bank(self, spent: Spent, now_s: float, energy_j: float) -> Spent:
        assert self._from is not None
        from_s, from_j = self._from
        banked = Spent(
            spent.time_s + now_s - from_s, spent.energy_j + energy_j - from_j, spent.samples + self._samples
        )
        self._from = (now_s, energy_j)
        self._samples = 0.0
        self._piece_iterations = 0
        return banked

    def _drop_piece(self) -> None:
        self._iterations -= self._piece_iterations
        self._piece_iterations = 0
        self._samples = 0.0

    def _apply(self, profile: PowerProfile) -> float:
        best = self.rule.choose(profile)
        limit_w = self.limits_w[0] if self._observe else best.limit_w
        self.state = Applied(limit_w, best, profile)
        return limit_w


def _seen(limit_w: float, spent: Spent) -> LimitProfile:
    return LimitProfile(limit_w, spent.energy_j / spent.time_s, spent.samples / spent.time_s)


def limits_between(low_w: float, high_w: float, step_w: float = 25.0) -> tuple[float, ...]:
    """Limits from the highest down in steps, and the lowest: what Zeus sweeps on a V100, 250..100 W by 25.

    Raises:
        InvalidInput: The range or the step is not positive.
    """
    if not (0 < low_w <= high_w and step_w > 0):
        raise InvalidInput(
            f"Power limits need 0 < low <= high and a positive step, got {low_w=}, {high_w=}, {step_w=}."
        )
    limits = []
    limit_w = high_w
    while limit_w > low_w:
        limits.append(limit_w)
        limit_w -= step_w
    return (*limits, low_w)
