import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.goal import Budget, Goal, Spent, dominates, front, order

points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=25)


@given(points)
def test_front_is_what_brute_force_finds(values):
    expected = [i for i, v in enumerate(values) if not any(dominates(w, v) for w in values)]
    assert front(values) == expected


@given(points)
def test_order_is_a_permutation_in_which_nobody_stands_behind_one_it_dominates(values):
    ranked = order(values)
    assert sorted(ranked) == list(range(len(values)))
    for earlier, later in itertools.combinations(ranked, 2):
        assert not dominates(values[later], values[earlier])


def test_one_objective_ranks_by_value_and_direction():
    goal = Goal.of(None, "accuracy")
    scores = [goal.values({"accuracy": a}) for a in (0.5, 0.9, 0.7)]
    assert goal.order(scores) == [1, 2, 0]
    assert Goal.of("loss", None).values({"loss": 2.0, "other": 1.0}) == (2.0,)


def test_a_missing_or_non_finite_objective_has_no_values():
    goal = Goal.of("loss", "accuracy")
    assert goal.values({"loss": 1.0}) is None
    assert goal.values({"loss": float("nan"), "accuracy": 1.0}) is None


@pytest.mark.parametrize(
    ("minimize", "maximize", "named"),
    [(None, None, "needs a goal"), ("loss", "loss", "'loss'"), ("", None, "''"), ([3], None, "3")],
)
def test_bad_goals_are_refused_by_name(minimize, maximize, named):
    with pytest.raises(InvalidInput, match=named):
        Goal.of(minimize, maximize)


def test_goal_round_trip():
    goal = Goal.of(["loss", "energy_j"], "accuracy")
    assert Goal.from_json(goal.to_json()) == goal
    assert goal.metrics == ("loss", "accuracy")  # energy is metered, not reported by the training


@pytest.mark.parametrize("name", ["trials", "epochs", "time_s", "energy_wh", "co2_g", "cost"])
@pytest.mark.parametrize(
    "value", [0, -1, float("nan"), float("inf"), "5", True, 10**400], ids=lambda v: str(v)[:9]
)
def test_bad_budgets_are_refused_by_name_and_value(name, value):
    with pytest.raises(InvalidInput, match=name):
        Budget(**{name: value})


@pytest.mark.parametrize("three", [3, 3.0, np.int64(3), np.float32(3)], ids=lambda v: type(v).__name__)
def test_numbers_of_any_kind_make_the_same_budget(three):
    """Trials are counted by it, and it is kept as JSON."""
    budget = Budget(trials=three, epochs=three, time_s=three)
    assert budget == Budget(trials=3, epochs=3, time_s=3)
    assert {type(budget.trials), type(budget.epochs)} == {int}
    assert Budget.from_json(json.loads(json.dumps(budget.to_json()))) == budget


def test_budget_says_which_limit_is_reached():
    budget = Budget(epochs=10, time_s=60, energy_wh=5)
    assert budget.used_up(Spent(epochs=9, time_s=59.9, energy_wh=4.9)) is None
    assert "10 epochs" in budget.used_up(Spent(epochs=10))
    assert "5 Wh" in budget.used_up(Spent(energy_wh=5.1))
    assert budget.used_up(Spent(energy_wh=None)) is None
    assert Budget.from_json(budget.to_json()) == budget


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), max_size=12))
def test_equal_points_stay_in_their_order(points):
    """A halving that keeps two of four equals keeps the first two, as with one objective."""
    values = [tuple(map(float, point)) for point in points]
    places = {}
    for index in order(values):
        places.setdefault(values[index], []).append(index)
    assert all(group == sorted(group) for group in places.values())
