"""Attribution: the parts always sum to the whole, and are never stronger than it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput
from penstock.energy import Usage, attribute, attribute_fused, split

weights = st.lists(st.floats(0, 1e12), min_size=1, max_size=12)
energies = st.builds(
    Measurement,
    st.floats(0, 1e12),
    st.just("J"),
    st.sampled_from(Source),
    st.floats(0, 1),
)


@given(amount=st.floats(0, 1e12), weights=weights)
def test_a_split_sums_to_the_whole(amount, weights):
    parts = split(amount, weights)
    expected = amount if any(weight > 0 for weight in weights) else 0.0
    assert math.fsum(parts) == pytest.approx(expected, rel=1e-12)
    assert all(part >= -1e-9 * amount for part in parts)


@given(amount=st.floats(1, 1e6), weights=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8))
def test_a_split_is_in_proportion(amount, weights):
    parts = split(amount, weights)
    for part, weight in zip(parts, weights, strict=True):
        assert part == pytest.approx(amount * weight / sum(weights), rel=1e-9)


@given(
    energy=energies,
    usages=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), max_size=8),
    duration_s=st.floats(0, 1e6),
    idle_w=st.floats(0, 1e3),
)
def test_parts_and_the_unattributed_sum_to_the_whole(energy, usages, duration_s, idle_w):
    result = attribute(
        energy,
        [Usage(key, *usage) for key, usage in enumerate(usages)],
        duration_s=duration_s,
        idle_w=idle_w,
    )
    parts = [m for part in result.parts.values() for m in (part.work, part.idle)]
    whole = math.fsum([m.joules for m in parts] + [result.unattributed.joules])
    assert whole == pytest.approx(energy.joules, rel=1e-12)
    for measurement in [*parts, result.unattributed]:
        assert measurement.source >= max(energy.source, Source.ATTRIBUTED)
        assert measurement.uncertainty >= energy.uncertainty
    idle_j = math.fsum(part.idle.joules for part in result.parts.values())
    assert idle_j <= min(energy.joules, idle_w * duration_s) * (1 + 1e-9) + 1e-9


def test_active_time_times_utilisation():
    """100 s at 100 W, 40 of them idle power. a: 100 s x 0.6, b: 50 s x 0.4, so 3 to 1."""
    energy = Measurement(10_000, "J", Source.MEASURED, 0.05)
    result = attribute(energy, [Usage("a", 100, 0.6), Usage("b", 50, 0.4)], duration_s=100, idle_w=40)
    assert result.parts["a"].work.joules == pytest.approx(4500)
    assert result.parts["a"].idle.joules == pytest.approx(3000)
    assert result.parts["b"].energy.joules == pytest.approx(2500)
    assert result.parts["b"].energy.source is Source.ATTRIBUTED
    assert result.unattributed.joules == 0


def test_with_nobody_there_nothing_is_attributed():
    result = attribute(Measurement(400, "J", Source.MEASURED), [Usage("a", 0)], duration_s=10, idle_w=40)
    assert result.parts["a"].energy.joules == 0
    assert result.unattributed.joules == 400


def test_fused_members_by_samples():
    """Three models trained as one; the third was stopped half-way."""
    result = attribute_fused(Measurement(500, "J", Source.SIMULATED), {1: 1000, 2: 1000, 3: 500})
    assert [result.parts[key].energy.joules for key in (1, 2, 3)] == pytest.approx([200, 200, 100])
    assert result.parts[1].energy.source is Source.SIMULATED  # never stronger


def test_what_is_refused():
    energy = Measurement(1, "J", Source.MEASURED)
    with pytest.raises(InvalidInput, match="appear once"):
        attribute(energy, [Usage("a", 1), Usage("a", 1)], duration_s=1)
    with pytest.raises(InvalidInput, match="-1"):
        split(1, [-1, 2])
    with pytest.raises(InvalidInput, match="nan"):
        split(1, [math.nan])
    with pytest.raises(InvalidInput, match="at least 0"):
        attribute(energy, [Usage("a", -1, -1)], duration_s=1)
    with pytest.raises(InvalidInput, match="is not an energy"):
        attribute(Measurement(1, "W", Source.MEASURED), [], duration_s=1)
