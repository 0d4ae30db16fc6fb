"""The SM2 score against hand-computed examples, the paper's statements and properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.goal._score import rescale, score

finite = st.floats(-1e6, 1e6)


def test_eq_2_by_hand():
    # Three configurations, P in {0.1, 0.45, 0.275}, E in {10, 30, 20} J, LR in {0.1, 0.9, 0.5}.
    # Rescaled: P = 0, 1, 0.5; E (inverted) = 1, 0, 0.5; LR = 0, 1, 0.5.
    found = score([0.1, 0.45, 0.275], [10.0, 30.0, 20.0], [0.1, 0.9, 0.5], alpha=0.75, beta=0.5)
    assert [s.total for s in found] == pytest.approx([0.25 * 0.5, 0.75 + 0.25 * 0.5, 0.75 * 0.5 + 0.25 * 0.5])
    assert [s.energy for s in found] == pytest.approx([1, 0, 0.5])


def test_beta_weighs_energy_against_learning_rate():
    by_energy = score([1.0, 1.0], [5.0, 9.0], [0.1, 1.0], alpha=0.0, beta=1.0)
    by_rate = score([1.0, 1.0], [5.0, 9.0], [0.1, 1.0], alpha=0.0, beta=0.0)
    assert [s.total for s in by_energy] == [1.0, 0.0]
    assert [s.total for s in by_rate] == [0.0, 1.0]


def test_alpha_1_looks_at_performance_alone():
    found = score([0.9, 0.8], [100.0, 1.0], [0.001, 1.0], alpha=1.0)
    assert found[0].total == 1.0
    assert found[1].total == 0.0


def test_similar_performance_is_settled_by_energy():
    """SM2 5.2: energy decides among configurations that perform alike, not against a clearly better one."""
    alike = score([0.900, 0.899, 0.10], [30.0, 10.0, 8.0], [0.1, 0.1, 0.1])
    assert alike[1].total > alike[0].total > alike[2].total


def test_one_configuration_and_equal_values():
    (only,) = score([0.3], [7.0], [0.1])
    assert only.total == 1.0
    assert {s.total for s in score([0.3] * 3, [7.0] * 3, [0.1] * 3)} == {1.0}


def test_unmetered_energy_gives_its_weight_to_the_learning_rate():
    found = score([0.0, 1.0], [None, None], [1.0, 0.1], alpha=0.5, beta=0.9)
    assert [s.energy for s in found] == [None, None]
    assert [s.total for s in found] == pytest.approx([0.5, 0.5])
    bare = score([0.0, 1.0], [None, None], [None, None], alpha=0.5)
    assert [s.total for s in bare] == [0.0, 1.0]


def test_a_failed_configuration_is_last_and_does_not_stretch_the_ranges():
    with_failure = score([0.5, 0.6, None], [10.0, 12.0, 1e9], [0.1, 0.2, 1e9])
    without = score([0.5, 0.6], [10.0, 12.0], [0.1, 0.2])
    assert [s.total for s in with_failure[:2]] == [s.total for s in without]
    assert with_failure[2].total == -math.inf
    assert score([math.nan, 0.1], [1.0, 1.0], [1.0, 1.0])[0].total == -math.inf


@pytest.mark.parametrize("bad", [{"alpha": 1.1}, {"alpha": -0.1}, {"beta": math.nan}])
def test_weights_are_checked(bad):
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        score([1.0], [1.0], [1.0], **bad)
    with pytest.raises(InvalidInput, match="all three"):
        score([1.0, 2.0], [1.0], [1.0])


@given(st.lists(finite, min_size=1, max_size=12), st.booleans())
def test_rescale_keeps_order_and_bounds(values, higher):
    scaled = rescale(values, higher_is_better=higher)
    assert scaled is not None
    assert all(0.0 <= v <= 1.0 for v in scaled)
    assert scaled[values.index(max(values) if higher else min(values))] == 1.0
    for a, x in zip(values, scaled, strict=True):
        for b, y in zip(values, scaled, strict=True):
            if (a > b) if higher else (a < b):
                assert x >= y


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100), st.floats(1e-3, 1)), min_size=2, max_size=8),
    st.floats(0.1, 1000),
    st.floats(-50, 50),
)
def test_score_does_not_depend_on_units(rows, factor, shift):
    """SM2 4.3: rescaling makes it independent of model and hardware: joules or watt-hours give one ranking."""
    p, e, r = zip(*rows, strict=True)
    one = score(p, e, r)
    other = score([factor * v + shift for v in p], [factor * v for v in e], r)
    spread = [max(c) - min(c) for c in (p, e)]
    if all(s > 1e-3 for s in spread):
        assert [s.total for s in other] == pytest.approx([s.total for s in one], abs=1e-6)
