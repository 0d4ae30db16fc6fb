"""Limits as users write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from penstock.core.errors import InvalidInput
from penstock.goal import Limit, Quantity, check_limits, latency_s, memory_bytes, params, power_w


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        (power_w <= 90, 90.0),
        (power_w <= "90", 90.0),
        (power_w <= "0.09 kW", 90.0),
        (memory_bytes <= "1.25GB", 1.25e9),
        (memory_bytes <= "1.25 GiB", 1.25 * 1024**3),
        (memory_bytes <= "512MiB", 512 * 1024**2),
        (memory_bytes <= 1.5e9, 1.5e9),
        (latency_s <= "20ms", 0.02),
        (latency_s <= "1.5 min", 90.0),
        (params <= "2.5M", 2.5e6),
    ],
)
def test_bounds_are_read_in_the_unit_of_the_quantity(limit, bound):
    assert limit.bound == pytest.approx(bound, rel=1e-12)
    assert limit.at_most


def test_a_lower_bound():
    limit = Quantity("throughput") >= 100
    assert not limit.at_most
    assert limit.holds(100)
    assert not limit.holds(99)
    assert limit.excess(90) == pytest.approx(0.1)
    assert str(limit) == "throughput >= 100"


@pytest.mark.parametrize(
    "bound",
    [
        "90 GB",
        "ninety",
        "",
        None,
        True,
        math.nan,
        math.inf,
        [90],
        pytest.param(10**400, id="10**400"),
        "1e999",
        "1e308kW",
    ],
)
def test_a_bound_that_cannot_be_read_is_refused_by_name(bound):
    with pytest.raises(InvalidInput, match=r"The bound of power_w|power_w: .* can't be read"):
        power_w.amount(bound)


def test_mistakes_in_writing_limits_are_told():
    with pytest.raises(InvalidInput, match="two limits"):
        assert 10 <= power_w <= 90
    with pytest.raises(InvalidInput, match="power_w <= 90"):
        assert power_w < 90
    with pytest.raises(InvalidInput, match=r"power_w <= \.\.\."):
        check_limits([power_w])
    with pytest.raises(InvalidInput, match="True"):
        check_limits([True])
    with pytest.raises(InvalidInput, match="Nothing is between"):
        check_limits([power_w >= 100, power_w <= 90])
    with pytest.raises(InvalidInput, match="identifier"):
        Quantity("my power")


def test_one_limit_needs_no_list():
    assert check_limits(power_w <= 90) == (power_w <= 90,)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.booleans())
def test_holding_and_excess_agree(value, bound, at_most):
    limit = Limit(power_w, bound, at_most)
    assert limit.holds(value) == (limit.excess(value) <= 0)


@given(st.floats(-50, 50), st.floats(0.01, 20), st.floats(-50, 50))
def test_the_probability_is_that_of_a_normal_distribution(mean, std, bound):
    limit = Limit(power_w, bound)
    assert limit.probability(mean, std) == pytest.approx(norm.cdf(bound, mean, std), abs=1e-12)
    assert Limit(power_w, bound, False).probability(mean, std) == pytest.approx(
        norm.sf(bound, mean, std), abs=1e-12
    )


def test_nan_violates():
    assert not (power_w <= 90).holds(math.nan)
    assert (power_w <= 90).excess(math.nan) == math.inf


def test_json_and_text():
    limit = memory_bytes <= "1.25GB"
    assert Limit.from_json(limit.to_json()) == limit
    assert str(limit) == "memory_bytes <= 1.25 GB"
