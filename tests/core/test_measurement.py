"""Measurements add up without losing their unit, their source or their doubt."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Measurement, Source, total
from penstock.core.errors import InvalidInput
from penstock.core.measurement import Sum, measurement

joules = st.builds(
    Measurement,
    st.floats(0, 1e12),
    st.just("J"),
    st.sampled_from(Source),
    st.floats(0, 1),
)


def interval(measurement: Measurement) -> tuple[Fraction, Fraction]:
    value, doubt = Fraction(measurement.value), Fraction(measurement.uncertainty)
    return value - abs(value) * doubt, value + abs(value) * doubt


@given(st.lists(joules, min_size=1, max_size=20))
def test_a_sum_covers_what_its_parts_cover(parts: list[Measurement]) -> None:
    """Interval arithmetic, exactly: the ends of the sum's interval are the sums of the ends."""
    growing = Sum()
    for part in parts:
        growing.add(part)
    low = sum(interval(part)[0] for part in parts)
    high = sum(interval(part)[1] for part in parts)
    scale = float(high) or 1.0
    for result in (total(parts), growing.total):
        assert result is not None
        assert abs(float(interval(result)[0] - low)) <= 1e-12 * scale
        assert abs(float(interval(result)[1] - high)) <= 1e-12 * scale
        assert result.source == max(part.source for part in parts)
        assert result.unit == "J"


@given(joules)
def test_the_quick_way_makes_the_same(made: Measurement) -> None:
    assert measurement(*made.plain) == made
    assert hash(measurement(*made.plain)) == hash(made)


@pytest.mark.parametrize(
    ("value", "doubt"), [(math.nan, 0.1), (math.inf, 0.1), (1.0, -0.1), (1.0, math.nan), (1.0, math.inf)]
)
def test_the_quick_way_refuses_the_same(value: float, doubt: float) -> None:
    for make in (Measurement, measurement):
        with pytest.raises(InvalidInput, match="must be finite"):
            make(value, "J", Source.MEASURED, doubt)
    with pytest.raises(ValueError, match="7 is not a valid Source"):
        measurement(1.0, "J", 7, 0.1)


@given(joules, joules)
def test_addition_commutes(a: Measurement, b: Measurement) -> None:
    assert a + b == b + a


@given(joules, st.floats(0, 1e6), st.none() | st.sampled_from(Source))
def test_scaling(measurement: Measurement, factor: float, source: Source | None) -> None:
    scaled = measurement.scaled(factor, source=source)
    assert scaled.value == measurement.value * factor
    assert scaled.uncertainty == measurement.uncertainty
    assert scaled.source >= measurement.source
    assert source is None or scaled.source >= source


def test_nothing_is_not_zero() -> None:
    assert total([]) is None
    assert Sum().total is None


def test_a_sum_refuses_other_units() -> None:
    growing = Sum()
    growing.add(Measurement(1.0, "J", Source.MEASURED))
    with pytest.raises(InvalidInput, match="Can't add J and g"):
        growing.add(Measurement(1.0, "g", Source.MEASURED))


def test_units() -> None:
    energy = Measurement(7200.0, "J", Source.MEASURED)
    power = Measurement(90.0, "W", Source.MEASURED)
    assert energy.wh == 2.0
    with pytest.raises(InvalidInput, match="J and W"):
        energy + power
    for read in (lambda: power.joules, lambda: power.wh):
        with pytest.raises(InvalidInput, match="not J"):
            read()
    with pytest.raises(TypeError):
        energy + 1.0  # type: ignore[operator]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_values(value: float) -> None:
    with pytest.raises(InvalidInput, match="finite"):
        Measurement(value, "J", Source.MEASURED)
    with pytest.raises(InvalidInput, match="Uncertainty"):
        Measurement(1.0, "J", Source.MEASURED, value)


def test_negative_doubt() -> None:
    with pytest.raises(InvalidInput, match=r"-0\.1"):
        Measurement(1.0, "J", Source.MEASURED, -0.1)


def test_text() -> None:
    assert str(Measurement(7200.0, "J", Source.ATTRIBUTED, 0.05)) == "2 Wh +- 5% (attributed)"
    assert str(Measurement(12.0, "J", Source.MEASURED)) == "12 J (measured)"
    assert str(Measurement(90.0, "W", Source.ESTIMATED)) == "90 W (estimated)"
