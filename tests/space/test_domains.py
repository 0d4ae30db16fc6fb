"""Domains refuse what cannot work, and draw what they promise."""

import math
from collections import Counter
from decimal import Decimal
from enum import StrEnum
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.core.errors import PenstockError, SpaceError
from penstock.space import Choice, Float, Int, Space, equals, greater, less, one_of

NAN, INF = float("nan"), float("inf")
DRAWS = 4000


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Float(1, 1), r"low 1\.0 is not less than high 1\.0. Use Choice\(1\.0\)"),
        (lambda: Float(2, 1), r"low 2\.0 is not less than high 1\.0. Swap"),
        (lambda: Float(NAN, 1), "low is nan"),
        (lambda: Float(0, INF), "high is inf"),
        (lambda: Float(True, 2), "low is True, a bool"),
        (lambda: Float("0", 1), "low is '0', a str"),
        (lambda: Float(None, 1), "low is None"),
        (lambda: Float(0, 1, log=True), r"log=True needs low > 0, but low is 0\.0"),
        (lambda: Float(-1, 1, log=True), r"low is -1\.0"),
        (lambda: Float(0.1, 1, log=True, step=0.1), "exclude each other"),
        (lambda: Float(1, 1 + 1e-9, log=True), "Drop log=True"),
        (lambda: Float(0, 1, step=0), r"step 0\.0 is not positive"),
        (lambda: Float(0, 1, step=-0.1), r"step -0\.1 is not positive"),
        (lambda: Float(0, 1, step=2), r"step 2\.0 is larger than the range"),
        (lambda: Float(0, 1, step=NAN), "step is nan"),
        (lambda: Float(0, 1, step=1e-18), "too fine"),
        (lambda: Float(-1e308, 1e308), "too wide or too narrow"),
        (lambda: Float(1.0, 1.0 + 1e-15), "too wide or too narrow"),
        (lambda: Float(0, 1, log=1), "log is 1"),
        (lambda: Float(0, 1, structural="yes"), "structural is 'yes'"),
        (lambda: Float(0, 1, transfers=None), "transfers is None"),
        (lambda: Float(0, 1, when="optimizer"), "when is 'optimizer', not a condition"),
        (lambda: Int(1, 1), r"Use Choice\(1\) for a constant"),
        (lambda: Int(5, 1), "low 5 is not less than high 1"),
        (lambda: Int(0.5, 3), r"low is 0\.5, not an integer"),
        (lambda: Int(0, INF), "high is inf"),
        (lambda: Int(0, NAN), "high is nan"),
        (lambda: Int(False, 3), "low is False"),
        (lambda: Int("1", 3), "low is '1'"),
        (lambda: Int(0, 9, log=True), "log=True needs low >= 1, but low is 0"),
        (lambda: Int(1, 9, log=True, step=2), "exclude each other"),
        (lambda: Int(0, 9, step=0), "step 0 is not positive"),
        (lambda: Int(0, 9, step=10), "step 10 is larger than the range 9"),
        (lambda: Int(0, 9, step=1.5), r"step is 1\.5"),
        (lambda: Int(0, 2**60), "Narrow it"),
        (lambda: Int(1, 10**13, log=True), r"Use Float\(log=True\)"),
        (Choice, "it has no values"),
        (lambda: Choice(1, True), "1 and True are equal in Python"),
        (lambda: Choice(1, 1.0), r"1 and 1\.0 are equal in Python"),
        (lambda: Choice(0, "a", False), "0 and False are equal"),
        (lambda: Choice([1], (True,)), r"\[1\] and \[True\] are equal"),
        (lambda: Choice("a", "b", "a"), "'a' is there twice"),
        (lambda: Choice(NAN, 1), "nan is not a finite number"),
        (lambda: Choice(print), "Use a name and look the object up in your training function"),
        (lambda: Choice({"a": 1}), "a dict, which no configuration can hold. Use a name"),
        (lambda: Choice([1, {2}], 3), "a set, which no configuration can hold"),
        (lambda: Choice(["sgd", "adam"]), r"one by one: Choice\('sgd', 'adam'\); or Choice\.constant"),
        (lambda: Choice((1, 2)), r"one by one: Choice\(1, 2\)"),
        (lambda: Choice(range(3)), r"one range as its only value.*Choice\(\*values\)"),
        (lambda: Choice({"sgd": 1}.keys()), r"one by one: Choice\(\*values\)"),
        (lambda: one_of("a"), "names no value"),
        (lambda: equals(3, 4), "by name, not 3"),
        (lambda: greater("a", "b"), "compares with 'b', not a number"),
        (lambda: less("a", NAN), "not a number"),
        (lambda: equals("a", 1) and less("b", 2), r"equals\('a', 1\) has no truth value.*a & b"),
        (lambda: equals("a", 1) or equals("a", 2), r"one_of\("),
        (lambda: not equals("a", 1), "no truth value"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(make, says):
    with pytest.raises(SpaceError, match=says) as caught:
        make()
    assert isinstance(caught.value, PenstockError)
    assert isinstance(caught.value, ValueError)


def test_an_enum_member_is_refused_because_the_journal_would_lose_it():
    class Kind(StrEnum):
        A = "a"

    with pytest.raises(SpaceError, match="Kind"):
        Choice(Kind.A)


def test_numpy_scalars_are_taken_as_plain_values():
    choice = Choice(np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"))
    assert choice.values == (3, 0.5, True, "x")
    assert [type(v) for v in choice.values] == [int, float, bool, str]
    assert Float(np.float64(0.0), np.int32(1)) == Float(0, 1)
    assert type(Int(np.int64(1), 5).low) is int


def test_tuples_become_lists_and_are_not_shared():
    choice = Choice((64, 64), (128,))
    first = choice.value_at(0)
    assert first == [64, 64]
    first.append("changed by a training function")
    assert choice.value_at(0) == [64, 64]
    assert choice.check((128,)) == [128]


def test_true_and_one_are_different_choices():
    assert Choice(1) != Choice(True)
    assert Choice(1, 2).check(2.0) == 2
    assert type(Choice(1, 2).check(2.0)) is int
    with pytest.raises(SpaceError, match=r"True is none of its values\. Give one of 1, 2"):
        Choice(1, 2).check(True)
    with pytest.raises(SpaceError, match="1 is none of its values"):
        Choice(True, False).check(1)
    with pytest.raises(SpaceError, match="none of its values"):
        Choice(1, 2).check({"not": "hashable"})


def test_steps_are_clean_decimals():
    third = Float(0, 1, step=0.1)
    assert [third.value_at(k) for k in range(third.count)] == [
        0.0,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1.0,
    ]
    assert third.check(0.1 + 0.2) == 0.3
    assert Float(0.05, 0.99, step=0.25).count == 4  # 0.05, 0.3, 0.55, 0.8; the next is beyond high
    assert Float(0.05, 0.99, step=0.25).from_unit(1.0) == 0.8
    with pytest.raises(SpaceError, match=r"0\.25 is not on the grid .* nearest value is 0\.2"):
        third.check(0.25)


@given(
    low=st.decimals(-100, 100, places=3),
    step=st.decimals("0.001", 3, places=3),
    count=st.integers(2, 500),
    unit=st.floats(0, 1),
)
def test_stepped_floats_are_the_decimal_grid_exactly(low, step, count, unit):
    high = low + step * (count - 1)
    domain = Float(float(low), float(high), step=float(step))
    assert domain.count == count
    value = domain.from_unit(unit)
    index = (
        Decimal(repr(value)) - low
    ) / step  # exact decimal arithmetic, independent of the domain's doubles
    assert index == int(index)
    assert 0 <= index < count
    assert domain.low <= value <= domain.high


def test_whole_floats_are_ints_and_others_are_refused():
    domain = Int(1, 9, step=2)
    assert domain.check(3.0) == 3
    assert type(domain.check(np.float64(3.0))) is int
    for value, says in (
        (3.5, "not an integer"),
        (4, "not on the grid"),
        (11, r"outside \[1, 9\]"),
        (True, "bool"),
    ):
        with pytest.raises(SpaceError, match=says):
            domain.check(value)


def draws(domain, seed=0, n=DRAWS):
    random = Random(seed).random
    return [domain.from_unit(random()) for _ in range(n)]


def test_floats_are_uniform():
    assert stats.kstest(draws(Float(-3, 5)), stats.uniform(-3, 8).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "domain", [Float(0.1, 0.7), Float(1e-5, 10, log=True), Float(3, 1e9), Int(1, 10**12, log=True)]
)
def test_draws_come_back_exactly_from_the_unit_interval(domain):
    # Of raw doubles in [0.1, 0.7], one in twenty does not: continuous draws are rounded for this.
    assert [v for v in draws(domain) if domain.from_unit(domain.to_unit(v)) != v] == []
    assert all(domain.low <= v <= domain.high for v in draws(domain))


def test_log_floats_are_uniform_in_the_logarithm():
    assert stats.kstest(draws(Float(1e-5, 10, log=True)), stats.loguniform(1e-5, 10).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "domain", [Int(-3, 8), Int(0, 100, step=7), Float(0, 1, step=0.05), Choice("a", 1, None, [2])]
)
def test_discrete_values_are_equally_likely(domain):
    counts = Counter(map(repr, draws(domain)))
    assert len(counts) == domain.count
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_log_ints_have_their_share_of_the_logarithmic_axis():
    domain = Int(1, 20, log=True)
    counts = Counter(draws(domain))
    total = math.log(20.5 / 0.5)
    expected = [DRAWS * math.log((v + 0.5) / (v - 0.5)) / total for v in range(1, 21)]
    assert stats.chisquare([counts[v] for v in range(1, 21)], expected).pvalue > 1e-3


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        (Float(1e-4, 1, log=True), "Float(0.0001, 1.0, log=True)"),
        (Float(0, 1, step=0.1, transfers=False), "Float(0.0, 1.0, step=0.1, transfers=False)"),
        (Int(1, 9, structural=True), "Int(1, 9, structural=True)"),
        (Choice("a", None, when=equals("x", 1)), "Choice('a', None, when=equals('x', 1))"),
        (
            Choice(1, when=one_of("x", 1, 2) & greater("y", 3)),
            "Choice(1, when=one_of('x', 1, 2) & greater('y', 3))",
        ),
    ],
)
def test_the_repr_makes_the_domain_again(domain, text):
    names = {
        "Float": Float,
        "Int": Int,
        "Choice": Choice,
        "equals": equals,
        "one_of": one_of,
        "greater": greater,
    }
    assert repr(domain) == text
    assert eval(text, names) == domain


def test_a_list_may_be_a_constant_where_it_is_asked_for():
    domain = Choice.constant([64, 64], structural=True)
    assert domain.count == 1
    assert domain.value_at(0) == domain.from_unit(0.3) == [64, 64]
    assert repr(domain) == "Choice.constant([64, 64], structural=True)"
    again = Space.from_json(Space(layers=domain).to_json())
    assert again["layers"] == domain
    assert Choice.constant(3) == Choice(3)
