"""Zeus's cost and its decoupling (Eq. 1-7)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.recurring import best_limit, epoch_cost, run_cost, scaled_lr

profiles = st.dictionaries(
    st.sampled_from([100.0, 150.0, 200.0, 250.0]),
    st.tuples(st.floats(1.0, 100.0), st.floats(20.0, 250.0)),
    min_size=1,
)


def test_the_ends_of_eta_are_energy_and_time():
    assert run_cost(3000.0, 20.0, eta=1.0, max_power_w=250.0) == 3000.0
    assert run_cost(3000.0, 20.0, eta=0.0, max_power_w=250.0) == 250.0 * 20.0
    assert run_cost(3000.0, 20.0, eta=0.5, max_power_w=250.0) == 0.5 * 3000 + 0.5 * 5000


@given(profiles, st.integers(1, 300), st.floats(0.0, 1.0))
def test_decoupling_keeps_the_optimum(profile, epochs, eta):
    """Eq. 6 and 7: minimising the epoch's cost minimises the run's, for any number of epochs."""
    limit, cost = best_limit(profile, eta=eta, max_power_w=250.0)
    brute = {w: eta * (epochs * t * p) + (1 - eta) * 250.0 * (epochs * t) for w, (t, p) in profile.items()}
    assert epochs * cost == pytest.approx(min(brute.values()))
    assert brute[limit] == pytest.approx(min(brute.values()))
    assert epoch_cost(profile, limit, eta=eta, max_power_w=250.0) == cost


def test_paper_figures_of_deepspeech2_prefer_lower_limits_for_energy():
    """Fig. 2b's shape on measured numbers: 100 W is best for energy, 250 W for time (b=32, V100)."""
    profile = {100.0: (8226.0, 95.0), 150.0: (6680.0, 130.0), 250.0: (5888.0, 205.0)}
    assert best_limit(profile, eta=1.0, max_power_w=250.0)[0] == 100.0
    assert best_limit(profile, eta=0.0, max_power_w=250.0)[0] == 250.0


def test_an_empty_profile_is_refused():
    with pytest.raises(InvalidInput):
        best_limit({}, eta=0.5, max_power_w=250.0)


def test_learning_rate_scaling():
    # The traces' own learning rates: DeepSpeech2's 2.6e-4 at 192 is 1.3e-4 at 48 (square root).
    assert scaled_lr(2.6e-4, 48, 192, "sqrt") == pytest.approx(1.3e-4)
    assert scaled_lr(0.1, 256, 64, "linear") == pytest.approx(0.4)
    assert scaled_lr(0.1, 256, 64, "off") == 0.1
    assert math.isclose(scaled_lr(0.1, 64, 64, "sqrt"), 0.1)
    with pytest.raises(InvalidInput):
        scaled_lr(0.1, 256, 64, "cubic")  # type: ignore[arg-type]
