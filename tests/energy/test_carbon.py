"""CO2e, money, and budgets in either."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput
from penstock.energy import co2, energy_budget, grid, money
from penstock.energy._carbon import G_PER_KWH

KWH = Measurement(3.6e6, "J", Source.MEASURED, 0.05)


def test_a_kilowatt_hour_by_country():
    assert co2(KWH, grid("FR")).value == 56
    assert co2(KWH, grid("pl")).value == 662
    assert co2(KWH.scaled(2), grid(g_per_kwh=100)).value == 200


def test_no_region_is_the_world_average_and_flagged():
    world = grid()
    grams = co2(KWH, world)
    assert (world.assumed, grams.value) == (True, 481)
    assert grams.source is Source.ESTIMATED
    assert "no region given" in str(world)
    assert "Ember" in str(world)
    assert "2023" in str(world)
    # The stated doubt covers every country in the table from below.
    low = grams.value * (1 - world.uncertainty)
    assert low <= min(G_PER_KWH.values())


def test_a_supplier_s_figure_keeps_the_source():
    assert co2(KWH, grid(g_per_kwh=0)).source is Source.MEASURED
    assert co2(KWH, grid("DE")).source is Source.ESTIMATED
    assert co2(KWH, grid("DE")).uncertainty > KWH.uncertainty


def test_money_needs_a_price():
    cost = money(KWH, 0.32, "EUR")
    assert str(cost) == "0.32 EUR +- 5% (measured)"
    with pytest.raises(InvalidInput, match="price_per_kwh"):
        money(KWH, -1)
    with pytest.raises(InvalidInput, match="needs the price"):
        energy_budget(cost=5)


def test_unknown_regions_name_the_way_out():
    with pytest.raises(InvalidInput, match=r"'XX'.*Known: AR, .*g_per_kwh"):
        grid("XX")
    with pytest.raises(InvalidInput, match="not both"):
        grid("DE", g_per_kwh=5)
    with pytest.raises(InvalidInput, match=r"region.*5"):
        grid(5)
    with pytest.raises(InvalidInput, match=r"g_per_kwh.*'a'"):
        grid(g_per_kwh="a")


def test_the_tightest_budget_counts():
    assert energy_budget() is None
    both = energy_budget(energy_wh=500, co2_g=100, source=grid(g_per_kwh=400))
    assert (both.wh, both.because) == (250, "co2_g")
    priced = energy_budget(energy_wh=500, cost=0.1, price_per_kwh=0.5)
    assert (priced.wh, priced.because) == (200, "cost")
    assert energy_budget(co2_g=481).wh == pytest.approx(1000)  # world average
    with pytest.raises(InvalidInput, match="energy_wh=0"):
        energy_budget(energy_wh=0)


@given(
    limit_wh=st.floats(1, 1e4),
    epochs=st.lists(st.floats(0.01, 100), min_size=1, max_size=300),
)
def test_a_study_ends_within_one_epoch_of_its_budget(limit_wh, epochs):
    budget = energy_budget(energy_wh=limit_wh)
    spent = None
    for wh in epochs:
        one = Measurement(wh * 3600, "J", Source.MEASURED)
        if budget.is_spent(spent, one):
            break
        spent = one if spent is None else spent + one
    else:
        return
    largest = max(epochs)
    assert abs(spent.wh - limit_wh) <= largest * (1 + 1e-9)


def test_how_much_is_spent():
    budget = energy_budget(energy_wh=10)
    assert budget.spent(None) == 0
    assert not budget.is_spent(None)
    assert budget.spent(Measurement(18_000, "J", Source.MEASURED)) == pytest.approx(0.5)
    assert budget.is_spent(Measurement(36_000, "J", Source.MEASURED))
