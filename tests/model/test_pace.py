"""Recording and compiling only where the expected steps repay it."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.model import Form, Pace

COSTS = {"record_cost_s": 1.0, "compile_cost_s": 60.0}


def test_short_groups_are_neither_recorded_nor_compiled():
    assert Pace(0.01, spent_s=100.0, **COSTS).best(100) is Form.PLAIN
    assert Pace(0.01, spent_s=0.1, **COSTS).best(10**6) is Form.PLAIN
    assert Pace().best(10**6) is Form.PLAIN  # nothing measured yet


def test_long_groups_are_recorded_and_then_compiled():
    assert Pace(0.01, spent_s=2.0, **COSTS).best(10**5) is Form.RECORDED
    assert Pace(0.01, 0.005, spent_s=2.0, **COSTS).best(10**5) is Form.RECORDED
    assert Pace(0.01, 0.005, spent_s=61.0, **COSTS).best(10**5) is Form.COMPILED
    assert Pace(0.01, 0.005, spent_s=61.0, **COSTS).best(10**4) is Form.RECORDED


def test_a_form_that_turned_out_slower_is_left():
    assert Pace(0.01, 0.02, spent_s=2.0, **COSTS).best(100) is Form.PLAIN
    assert Pace(0.01, 0.005, 0.006, spent_s=200.0, **COSTS).best(10**6) is Form.RECORDED
    assert Pace(0.01, spent_s=2.0, **COSTS).best(10**5, can_record=False) is Form.PLAIN
    assert Pace(0.01, 0.005, spent_s=99.0, **COSTS).best(10**6, can_compile=False) is Form.RECORDED


@given(
    st.floats(1e-4, 1),
    st.floats(1e-4, 1),
    st.floats(0.01, 10),
    st.integers(1, 100_000),
)
def test_trying_at_most_doubles_and_leaving_at_most_quadruples_what_hindsight_spends(
    plain_s, recorded_s, cost_s, steps
):
    """However long the group really lives: a scheduler may stop it at any step."""
    spent_s, known = 0.0, False
    at = 0
    while at < min(steps, 300):
        pace = Pace(
            plain_s,
            recorded_s if known else None,
            spent_s=spent_s,
            record_cost_s=cost_s,
            compile_cost_s=1e9,
        )
        form = pace.best(steps - at)
        if form is Form.RECORDED and not known:
            known = True
            spent_s += cost_s
            form = Form.RECORDED if recorded_s < plain_s else Form.PLAIN
        spent_s += recorded_s if form is Form.RECORDED else plain_s
        at += 1
    hindsight_s = min(at * plain_s, cost_s + at * recorded_s)
    assert spent_s <= (2 if known else 4) * hindsight_s + plain_s + recorded_s + 1e-9
