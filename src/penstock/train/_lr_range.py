"""LR exploration: the largest stable learning rate from one sweep over a few batches (SM2 4.2).

The learning rate rises over the batches of an exploratory epoch, evenly in log-lr, and the loss that each rate
leaves behind is recorded. The curve is smoothed and its curvature taken: the second derivative over **log-lr**
(over the rate itself the small rates lie so close that the derivative sees only them). Windows slide along the
curve; those with low curvature, on which the loss does not rise, are stable, and of them the one with the largest
rates gives its largest rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from penstock.core.errors import InvalidInput, MissingDependency
from penstock.core.trial import Config

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.train._loop import Trainer
    from penstock.train._task import Task

_DIVERGED = 4.0  # times the best loss so far (above the lowest possible): a sweep stops there
_FLAT = 4.0  # noise levels: a smoothed curve of pure noise spans about 2.5
_RISE = 0.05  # of the curve's range
_DESCENDS = 0.15  # of the steepest slope
_MARGIN = 3.0  # between the rate with the lowest loss and the largest that is called stable
_ALIKE = 0.05  # curvatures this close, in ranges of the curve per decade squared, are the same
_STEPS = 3  # per learning rate: momentum needs some to build up and to show what it does
_PROBE = 256  # samples


@final
@dataclass(frozen=True, slots=True)
class LRChoice:
    """A learning rate and the curve it was read from.

    Attributes:
        lr: The largest stable learning rate.
        reason: ``"stable"``; ``"flat"``: no rate changed the loss beyond its noise, so the largest tried is
            stable; ``"few"``: too few finite points for a curvature, the best of them is taken;
            ``"diverged"``: even the smallest rate does, so it is returned a tenth as large; sweep lower.
        loss: The smoothed loss at the end of the chosen window.
        stability: 1 / (1 + curvature of the chosen window): 1 is a straight line, 0 where nothing is stable.
        window: The smallest and largest rate of the chosen window, cut at ``lr``.
        lrs: The rates tried, rising.
        losses: The loss each left behind; not finite where it diverged.
        smooth: The smoothed losses up to the divergence.
        curvature: Second derivative of the smoothed loss over log10-lr, in units of the curve's own range.
        steps: Optimizer steps the sweep took.
        probed: Samples whose loss it looked at between them, without a step.
    """

    lr: float
    reason: str
    loss: float
    stability: float
    window: tuple[float, float]
    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    curvature: tuple[float, ...]
    steps: int = 0
    probed: int = 0

    def plot(self, ax: Any = None) -> Any:
        """Draw the curve, its curvature and the chosen window (SM2 Fig. 1); returns the matplotlib axes.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise MissingDependency('Plots need matplotlib: pip install "matplotlib>=3.8".') from error
        if ax is None:
            _, ax = plt.subplots(figsize=(6, 4))
        points = [(lr, loss) for lr, loss in zip(self.lrs, self.losses, strict=True) if math.isfinite(loss)]
        shown = self.lrs[: len(self.smooth)]
        ax.plot(
            *zip(*points, strict=True), ".", color="tab:blue", alpha=0.4, label="loss"
        ) if points else None
        ax.plot(shown, self.smooth, color="tab:blue", label="smoothed loss")
        ax.axvspan(*self.window, color="tab:red", alpha=0.15)
        for edge in self.window:
            ax.axvline(edge, color="tab:red", linestyle=":")
        ax.axvline(self.lr, color="tab:red", label=f"lr {self.lr:.3g} ({self.reason})")
        if self.smooth:
            low, high = min(self.smooth), max(self.smooth)
            room = (high - low) or abs(high) or 1.0
            ax.set_ylim(low - 0.15 * room, high + 0.35 * room)
        other = ax.twinx()
        other.plot(shown, self.curvature, color="tab:green", alpha=0.7, label="curvature")
        other.set_ylabel("curvature over log-lr")
        ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        lines, labels = ax.get_legend_handles_labels()
        more, more_labels = other.get_legend_handles_labels()
        ax.legend(lines + more, labels + more_labels, loc="upper left", fontsize="small")
        return ax


def log_spaced(low: float, high: float, n: int) -> list[float]:
    """``n`` learning rates from ``low`` to ``high``, evenly in log-lr.

    Raises:
        InvalidInput: The range is empty or not positive, or n is below 2.
    """
    if not (math.isfinite(high) and 0.0 < low < high):
        raise InvalidInput(f"lr_range must be 0 < low < high, got ({low!r}, {high!r}).")
    if n < 2:
        raise InvalidInput(f"A sweep needs at least 2 learning rates, got {n!r}.")
    ratio = math.log(high / low) / (n - 1)
    return [low * math.exp(ratio * i) for i in range(n - 1)] + [high]


def choose_lr(
    lrs: Sequence[float], losses: Sequence[float], *, window: int | None = None, steps: int = 0
) -> LRChoice:
    """The largest stable learning rate of a curve. Pure.

    Args:
        lrs: Rising learning rates.
        losses: The loss each left behind. What follows the first one that is not finite is ignored.
        window: Points per sliding window; None: a sixth of the points, at least 3.
        steps: Kept in the result.

    Raises:
        InvalidInput: No points, lists of different lengths, or rates that don't rise.
    """
    if not lrs or len(lrs) != len(losses):
        raise InvalidInput(f"A curve needs one loss per learning rate, got {len(losses)} for {len(lrs)}.")
    if any(not a < b for a, b in itertools.pairwise(lrs)) or not lrs[0] > 0:
        raise InvalidInput("The learning rates of a curve must be positive and rise.")
    raw = _finite_start(losses)
    rates, values = tuple(map(float, lrs)), tuple(map(float, losses))

    def result(lr: float, reason: str, loss: float, stability: float, span: tuple[float, float]) -> LRChoice:
        return LRChoice(
            lr, reason, loss, stability, span, rates, values, tuple(smooth), tuple(curvature), steps
        )

    smooth: list[float] = []
    curvature: list[float] = []
    if not raw:
        # Nothing tried was stable: below the range is the only place left to go.
        return result(rates[0] / 10, "diverged", math.nan, 0.0, (rates[0] / 10, rates[0] / 10))
    raw = raw[: _before_blow_up(raw)]
    n = len(raw)
    width = max(3, len(lrs) // 6) if window is None else window
    if width < 3:
        raise InvalidInput(f"A window needs at least 3 points for a curvature, got {width!r}.")
    if n < width + 1:
        # Too short for a window: the rate with the lowest loss, one step back from the edge it fell off.
        smooth = list(raw)
        curvature = [0.0] * n
        best = min(range(n), key=lambda i: (raw[i], i))
        best = min(best, max(0, n - 2)) if n < len(lrs) else best
        return result(rates[best], "few", raw[best], 0.0, (rates[best], rates[best]))
    # In units of the largest loss, so that no difference of losses can overflow.
    unit = max(abs(value) for value in raw) or 1.0
    scaled = [value / unit for value in raw]
    level = _smooth(scaled)
    smooth = [value * unit for value in level]
    # What happens beyond the lowest loss is instability, not noise.
    noise = _noise(scaled[: max(min(range(n), key=lambda i: level[i]) + 1, n // 2, 5)])
    x = [math.log10(rate) for rate in rates[:n]]
    span = max(level) - min(level)
    curvature = [value / span if span > 0 else 0.0 for value in _second_derivative(x, level)]
    if span <= max(_FLAT * noise, 1e-9):
        # Flat: what moves is noise, and no rate did harm.
        return result(rates[n - 1], "flat", smooth[n - 1], 1.0, (rates[n - width], rates[n - 1]))
    # Stable until the loss is above the lowest so far by more than its noise and a part of its range.
    slack = max(_RISE * span, noise)
    lowest = level[0]
    stable_until = 0
    for i, value in enumerate(level):
        lowest = min(lowest, value)
        if value > lowest + slack:
            break
        stable_until = i
    descent = level[0] - min(level[: stable_until + 1])
    falls = descent > slack + noise
    edge = min(range(stable_until + 1), key=lambda i: level[i]) if falls else stable_until
    # A sweep gives each rate a few batches only, and an error that has vanished needs time to grow again: the loss is
    # lowest at rates that no training survives. The margin was picked on cases of benchmarks/papers/sm2/lr_cases.py,
    # so what that benchmark says of it is not independent.
    most = rates[edge] / _MARGIN if falls or stable_until < len(lrs) - 1 else rates[edge]
    windows = []
    for first in range(stable_until - width + 2):
        last = first + width - 1
        bend = sum(abs(c) for c in curvature[first : last + 1]) / width
        windows.append((bend, first, last, (level[first] - level[last]) / (x[last] - x[first])))
    if not windows:
        near = max((i for i in range(edge + 1) if rates[i] <= most), default=0)
        return result(rates[near], "few", smooth[near], 0.0, (rates[0], rates[stable_until]))
    if falls:
        # Where there is a descent, the rate must be on it.
        steepest = max(slope for *_, slope in windows)
        windows = [window for window in windows if window[3] >= _DESCENDS * steepest]
    # SM2 4.2: sort by curvature, keep the calmer half, take the one with the largest mean rate.
    bends = sorted(bend for bend, *_ in windows)
    calm = bends[(len(bends) - 1) // 2]
    bend, first, last, _ = max((w for w in windows if w[0] <= calm + _ALIKE), key=lambda w: w[1])
    lr = min(rates[last], max(most, rates[0]))
    return result(lr, "stable", smooth[last], 1.0 / (1.0 + bend), (min(rates[first], lr), lr))


def _finite_start(losses: Sequence[float]) -> list[float]:
    kept: list[float] = []
    for loss in losses:
        if not math.isfinite(loss):
            break
        kept.append(float(loss))
    return kept


def _before_blow_up(losses: Sequence[float]) -> int:
    """How many points there are before the loss leaves the range it started in, for good or not."""
    start = sorted(losses[:3])[len(losses[:3]) // 2]
    best = math.inf
    for i, loss in enumerate(losses):
        best = min(best, loss)
        room = max(abs(start - best), 0.05 * abs(start), 1e-12)
        if i >= 3 and loss > max(start, best) + 2.0 * room:
            return i
    return len(losses)


def _smooth(values: Sequence[float]) -> list[float]:
    """Medians of three, which take single outliers away, then a centred 1-2-1 average.

    Unlike an exponential average it does not move the curve to larger rates, and a straight line stays one.
    """
    n = len(values)
    if n < 3:
        return list(values)
    middle = [sorted(values[i - 1 : i + 2])[1] for i in range(1, n - 1)]
    calm = [values[0], *middle, values[-1]]
    inner = [0.25 * calm[i - 1] + 0.5 * calm[i] + 0.25 * calm[i + 1] for i in range(1, n - 1)]
    if len(inner) < 2:
        return [values[0], *inner, values[-1]]
    first = 0.5 * values[0] + 0.5 * (2 * inner[0] - inner[1])
    last = 0.5 * values[-1] + 0.5 * (2 * inner[-1] - inner[-2])
    return [first, *inner, last]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of what is left when a straight line through neighbours is taken away (robust)."""
    if len(values) < 4:
        return 0.0
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False))
    middle = len(bends) // 2
    median = bends[middle] if len(bends) % 2 else 0.5 * (bends[middle - 1] + bends[middle])
    return 1.4826 * median / math.sqrt(6.0)


def _second_derivative(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Three-point second derivative on an uneven grid; the ends take their neighbours'."""
    n = len(x)
    inner = []
    for i in range(1, n - 1):
        a, b = x[i] - x[i - 1], x[i + 1] - x[i]
        inner.append(2.0 * (a * y[i + 1] - (a + b) * y[i] + b * y[i - 1]) / (a * b * (a + b)))
    return [inner[0], *inner, inner[-1]]


def sweep(
    trainer: Trainer,
    *,
    lrs: int,
    lr_range: tuple[float, float],
    order: Tensor,
    window: int | None = None,
    least_steps: int,
) -> LRChoice:
    """Sweep the learning rate on a trainer that is thrown away afterwards.

    Args:
        trainer: An isolated copy (``Trainer.clone``): its weights are ruined.
        lrs: How many rates, fewer if there are not two steps for each.
        lr_range: Smallest and largest rate.
        order: Samples to use.
        window: As in ``choose_lr``.
        least_steps: Steps to take even if ``order`` has fewer batches, which are then used again (at most three
            per rate).
    """
    from penstock.train._loop import _rows

    size = trainer.batch_size
    batches = max(1, len(order) // size)
    budget = max(batches, min(least_steps, _STEPS * lrs))
    points = max(2, min(lrs, budget // 2))
    each = max(1, budget // points)
    rates = log_spaced(*lr_range, points)
    trainer.schedule = None  # the sweep is the schedule
    if trainer.epoch == 0:  # one that warms up has begun with a part of the rate that is looked for
        for group in trainer.optimizer.param_groups:
            if "initial_lr" in group:
                group["lr"] = group["initial_lr"] * group.get("lr_scale", 1.0)
    source, losses = trainer.data.train, trainer._losses

    def endless() -> Any:
        while True:
            yield from source.batches(size, order=order[: batches * size])

    stream = endless()
    # Every rate is judged on the same samples: between batches of 16 the loss differs by more than a step at a small
    # rate changes it. The samples follow those of the sweep in the epoch's order, or are its first.
    probe = _probe(trainer, order, batches * size)
    found: list[float] = []
    taken = 0
    best = math.inf
    trainer.model.train()
    for rate in rates:
        trainer.set_lr(rate)
        trainer.run_steps(next(stream) for _ in range(each))
        losses.clear()
        taken += each
        loss = sum(trainer.peek(batch) for batch in probe) / len(probe)
        found.append(loss)
        if not math.isfinite(loss) or loss > best + _DIVERGED * max(abs(best), 1e-12):
            break  # energy spent on larger rates would tell nothing
        best = min(best, loss)
    stream.close()
    looks = len(found)
    found += [math.nan] * (len(rates) - len(found))
    choice = choose_lr(rates, found, window=window, steps=taken)
    return replace(choice, probed=looks * sum(_rows(batch) for batch in probe))


def _probe(trainer: Trainer, order: Tensor, used: int) -> list[Any]:
    """A few fixed batches to measure the loss on: as many as make about 256 samples, at least one."""
    import copy

    source, size = trainer.data.train, trainer.batch_size
    rows = min(source.n, max(_PROBE, min(size, 2 * _PROBE)))
    rest = trainer.others(order[:used], rows)
    # Copies: the loader writes over its buffers.
    return [copy.deepcopy(batch) for batch in source.batches(min(rows, 2 * _PROBE), order=rest)]


def find_lr(
    task: Task,
    config: Config | None = None,
    *,
    lrs: int = 20,
    lr_range: tuple[float, float] = (1e-3, 1.0),
    fraction: float = 0.25,
    seed: int = 0,
    device: Any = "cpu",
    state: Any = None,
    window: int | None = None,
) -> LRChoice:
    """Find the largest stable learning rate of a task. Changes nothing: model, data and randomness are copies.

    Args:
        task: The training.
        config: The other hyperparameters; ``lr`` may be missing.
        lrs: How many rates to try.
        lr_range: Between which, evenly in log-lr.
        fraction: Part of an epoch's batches to use.
        seed: Of the initial weights and the batches.
        device: Where to run.
        state: A checkpoint of the task's to start from; None: fresh weights.
        window: Points per sliding window; None: a sixth of the rates.

    Raises:
        InvalidInput: An empty range, fewer than 2 rates, a fraction outside (0, 1].
    """
    from penstock.train._loop import Trainer, private_randomness

    if not 0.0 < fraction <= 1.0:
        raise InvalidInput(f"fraction must be above 0 and at most 1, got {fraction!r}.")
    log_spaced(*lr_range, lrs)
    with private_randomness():
        trainer = Trainer(task, config or {}, seed=seed, device=device, lr_is_found=True)
        if state is not None:
            import copy

            trainer.load_state(copy.deepcopy(state))
            trainer.step = 0
        trainer.seed_epoch()
        return sweep(
            trainer,
            lrs=lrs,
            lr_range=lr_range,
            order=trainer.subset(fraction),
            window=window,
            least_steps=_STEPS * lrs,
        )
