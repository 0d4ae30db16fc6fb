"""LR exploration: constructed curves whose answer is known, and sweeps that leave no trace."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.core.errors import InvalidInput
from penstock.train._loop import Trainer
from penstock.train._lr_range import choose_lr, find_lr, log_spaced, sweep
from penstock.train._task import Data, Task


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GRID = log_spaced(1e-4, 1.0, 21)  # five per decade


def curve(falls_at, blows_at, *, drop=2.0, start=2.3, noise=0.0, seed=0):
    """Flat, then falling from ``falls_at`` by ``drop`` per decade and a half, blowing up from ``blows_at``."""
    rng = random.Random(seed)
    values = []
    for lr in GRID:
        x = math.log10(lr)
        down = min(1.0, max(0.0, (x - math.log10(falls_at)) / 1.5)) * drop
        up = math.exp(6 * max(0.0, x - math.log10(blows_at))) - 1
        values.append(start - down + up + noise * rng.gauss(0, 1))
    return values


def test_log_spaced():
    assert log_spaced(1e-3, 1.0, 4) == pytest.approx([1e-3, 1e-2, 1e-1, 1.0])
    assert log_spaced(1e-3, 1.0, 20)[-1] == 1.0
    for bad in ((0.0, 1.0, 5), (1.0, 0.1, 5), (1e-3, 1.0, 1), (1e-3, math.inf, 5)):
        with pytest.raises(InvalidInput):
            log_spaced(*bad)


@pytest.mark.parametrize("blows_at", [3e-3, 1e-2, 3e-2, 1e-1])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_choice_lies_on_the_descent_below_the_blow_up(blows_at, noise):
    falls_at = blows_at / 10
    choice = choose_lr(GRID, curve(falls_at, blows_at, noise=noise))
    assert choice.reason == "stable"
    assert falls_at < choice.lr <= blows_at / 2
    assert choice.window[0] <= choice.window[1] == choice.lr


def test_a_later_blow_up_gives_a_larger_rate():
    found = [choose_lr(GRID, curve(b / 10, b)).lr for b in (3e-3, 1e-2, 3e-2, 1e-1)]
    assert found == sorted(found)
    assert found[-1] / found[0] == pytest.approx(10**1.5, rel=0.7)


def test_a_trained_model_flat_then_rising():
    """Later explorations start from trained weights: nothing to gain, only the rise to stay away from."""
    losses = [0.3 + (math.exp(5 * max(0.0, math.log10(lr) + 1.5)) - 1) for lr in GRID]
    choice = choose_lr(GRID, losses)
    assert choice.lr <= 10**-1.5 * 1.01
    assert choice.lr >= 1e-3


def test_descending_to_the_end_keeps_a_margin_to_the_largest_rate_tried():
    choice = choose_lr(GRID, [2.3 - 0.4 * max(0.0, math.log10(lr) + 3) for lr in GRID])
    assert choice.reason == "stable"
    assert choice.lr == pytest.approx(1 / 3)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1])
def test_a_flat_curve_allows_the_largest_rate(noise):
    rng = random.Random(1)
    choice = choose_lr(GRID, [2.3 + noise * rng.gauss(0, 1) for _ in GRID])
    assert choice.reason == "flat"
    assert choice.lr == GRID[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_follows_a_non_finite_loss_is_ignored(bad):
    losses = curve(1e-3, 1e-2)
    cut = 14
    broken = losses[:cut] + [bad] + [0.0] * (len(losses) - cut - 1)  # zeros after it must not look attractive
    choice = choose_lr(GRID, broken)
    assert choice.lr <= GRID[cut - 1]
    assert choice.reason == "stable"
    assert len(choice.smooth) <= cut


def test_diverging_at_once_points_below_the_range():
    choice = choose_lr(GRID, [math.nan] * len(GRID))
    assert choice.reason == "diverged"
    assert choice.lr == pytest.approx(GRID[0] / 10)
    assert choice.stability == 0.0


def test_too_few_points():
    assert choose_lr([0.1], [1.0]).lr == 0.1
    choice = choose_lr([0.01, 0.1, 1.0], [2.0, 1.0, math.nan])
    assert choice.reason == "few"
    assert choice.lr == 0.01  # one step back from the edge
    assert choose_lr([0.01, 0.1, 1.0], [2.0, 1.0, 1.5]).lr == 0.1


def test_a_single_outlier_in_the_flat_part_does_not_move_the_choice_far():
    losses = curve(1e-3, 3e-2)
    clean = choose_lr(GRID, losses).lr
    losses[2] += 0.3
    assert choose_lr(GRID, losses).lr >= clean / 4


@given(
    st.lists(
        st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(-5, 5)), min_size=1, max_size=30
    ),
    st.floats(1e-6, 1e-2),
)
def test_any_curve_has_an_answer_in_or_just_below_the_range(losses, low):
    lrs = log_spaced(low, 10.0, len(losses)) if len(losses) > 1 else [low]
    choice = choose_lr(lrs, losses)
    assert math.isfinite(choice.lr)
    assert lrs[0] / 10 * 0.999 <= choice.lr <= lrs[-1]
    assert 0.0 <= choice.stability <= 1.0
    if choice.reason != "diverged":
        # Never a rate at or above the first that was not finite.
        first = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        assert choice.lr <= lrs[first - 1]


@given(st.floats(0.01, 100), st.floats(-5, 5), st.integers(0, 5))
def test_units_of_the_loss_do_not_matter(factor, shift, seed):
    losses = curve(1e-3, 3e-2, noise=0.01, seed=seed)
    # A shift below the blow-up guard's scale would change what "twice the start" means; scale alone never does.
    assert choose_lr(GRID, [factor * v for v in losses]).lr == choose_lr(GRID, losses).lr


def test_refusals():
    with pytest.raises(InvalidInput, match="one loss per learning rate"):
        choose_lr([0.1, 1.0], [1.0])
    with pytest.raises(InvalidInput, match="rise"):
        choose_lr([1.0, 0.1], [1.0, 1.0])
    with pytest.raises(InvalidInput, match="at least 3 points"):
        choose_lr(GRID, curve(1e-3, 1e-2), window=2)


def quadratic_task(curvature, n=64):
    """Least squares with Hessian ``curvature``: gradient descent is stable exactly below 2 / curvature."""
    x = torch.full((n, 1), math.sqrt(curvature / 2))
    y = x * 3.0

    def net():
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    return Task(net, Data((x, y), (x, y)), F.mse_loss, batch_size=1)


@pytest.mark.parametrize("curvature", [2.0, 20.0, 200.0])
def test_on_a_quadratic_the_choice_is_below_the_theoretical_edge(curvature):
    """Loss c/2 (w - 3)^2: the edge of stability is 2/c, in closed form; convergence is quickest at 1/c."""
    task = quadratic_task(curvature)
    choice = find_lr(task, lrs=20, lr_range=(1e-3 / curvature, 100 / curvature), fraction=1.0)
    assert choice.lr < 2 / curvature
    assert choice.lr > 0.02 / curvature
    trainer = Trainer(task, {"lr": choice.lr}, seed=0)
    assert trainer.train_epoch()["loss"] < 0.1 * curvature / 2 * 9


def small_task(**more):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=g)
    y = (x @ torch.randn(8, 3, generator=g)).argmax(1)

    def net():
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)
        )

    return Task(net, Data.split(x, y), F.cross_entropy, **more)


def test_a_search_leaves_no_trace():
    task = small_task(optimizer=torch.optim.Adam)
    trainer = Trainer(task, {"lr": 0.01, "batch_size": 16}, seed=3)
    trainer.train_epoch()
    state = trainer.state()
    before = copy.deepcopy({key: state[key] for key in ("model", "optimizer")})
    generator = torch.get_rng_state()
    choice = find_lr(task, {"batch_size": 16}, seed=3, state=state)
    assert torch.equal(torch.get_rng_state(), generator)
    for key, value in before["model"].items():
        assert torch.equal(value, trainer.model.state_dict()[key])
    assert str(before["optimizer"]) == str(trainer.optimizer.state_dict())
    assert choice == find_lr(task, {"batch_size": 16}, seed=3, state=state)  # and says the same again


def test_few_batches_are_used_again():
    choice = find_lr(small_task(), {"batch_size": 120}, lrs=20, fraction=0.25)  # half a batch's worth
    assert len(choice.lrs) == 20
    assert choice.steps <= 60
    assert 1e-3 <= choice.lr <= 1.0
    task = small_task()
    trainer = Trainer(task, {"batch_size": 120, "lr": 0.1}, seed=0)
    cheap = sweep(trainer, lrs=20, lr_range=(1e-3, 1.0), order=trainer.subset(0.25), least_steps=24)
    assert (len(cheap.lrs), cheap.steps) == (12, 24)


def test_many_batches_give_several_steps_per_rate():
    choice = find_lr(small_task(), {"batch_size": 2}, lrs=10, fraction=0.5)
    assert len(choice.lrs) == 10
    assert choice.steps == 60  # half of 120 batches, six per rate


def test_a_model_that_always_diverges():
    task = Task(lambda: nn.Linear(8, 1), Data.split(1e6 * torch.randn(64, 8), torch.randn(64, 1)), F.mse_loss)
    choice = find_lr(task, {"batch_size": 4}, lr_range=(0.1, 10.0))
    assert choice.reason in ("diverged", "few")
    assert choice.lr <= 0.1
    assert choice.steps < 20  # it stopped early instead of spending on hopeless rates


def test_arguments_are_checked():
    with pytest.raises(InvalidInput, match="fraction"):
        find_lr(small_task(), fraction=0.0)
    with pytest.raises(InvalidInput, match="lr_range"):
        find_lr(small_task(), lr_range=(1.0, 0.1))


def test_the_plot_shows_curve_curvature_and_window():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    choice = choose_lr(GRID, curve(1e-3, 3e-2))
    ax = choice.plot()
    assert ax.get_xscale() == "log"
    edges = {round(float(line.get_xdata()[0]), 9) for line in ax.lines if len(set(line.get_xdata())) == 1}
    assert {round(choice.window[0], 9), round(choice.window[1], 9)} <= edges
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert {"smoothed loss", "curvature"} <= set(labels)
    choose_lr(GRID, [math.nan] * len(GRID)).plot()  # nothing to draw is no error
    plt.close("all")
