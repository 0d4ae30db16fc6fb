"""Spaces: conditions, validation, encoding, JSON, counting."""

import itertools
import json
import math
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import SpaceError
from penstock.space import Choice, Float, Int, Space, equals, greater, less, one_of

NET = Space(
    optimizer=Choice("sgd", "adam"),
    momentum=Float(0.0, 0.9, step=0.3, when=equals("optimizer", "sgd")),
    nesterov=Choice(True, False, when=greater("momentum", 0.3)),
    depth=Int(1, 4, structural=True),
    width=Choice(8, 16, when=one_of("depth", 2, 3) & equals("optimizer", "adam"), structural=True),
    decay=Choice(0.0, 0.1, transfers=False),
)


def brute_force(space):
    """Every configuration, from the full product and the meaning of conditions alone."""
    found = []
    every = {name: [space[name].value_at(i) for i in range(space[name].count)] for name in space}
    for values in itertools.product(*every.values()):
        whole = dict(zip(every, values, strict=True))
        config = {}
        for name in NET_ORDER if space is NET else space.order:
            when = space[name].when
            tests = [] if when is None else when.atoms
            if all(test.name in config and test.holds(config) for test in tests):
                config[name] = whole[name]
        if config not in found:
            found.append(config)
    return found


NET_ORDER = ("optimizer", "momentum", "nesterov", "depth", "width", "decay")


def test_conditions_chain_and_inactive_domains_are_absent():
    seen = [NET.sample(i) for i in range(300)]
    for config in seen:
        sgd = config["optimizer"] == "sgd"
        assert ("momentum" in config) == sgd
        assert ("nesterov" in config) == (sgd and config["momentum"] > 0.3)
        assert ("width" in config) == (not sgd and config["depth"] in (2, 3))
    assert any("nesterov" in config for config in seen)


def test_the_middle_is_the_geometric_mean_of_logarithmic_domains_and_drops_what_is_not_active():
    space = Space(
        lr=Float(1e-4, 1, log=True),
        depth=Int(2, 6),
        kind=Choice("a", "b", "c"),
        beta=Float(0, 1, when=equals("kind", "b")),
        other=Float(0, 1, when=equals("kind", "a")),
    )
    assert space.middle == {"lr": pytest.approx(1e-2), "depth": 4, "kind": "b", "beta": 0.5}
    assert space.validate(space.middle) == space.middle


def test_size_and_grid_agree_with_brute_force():
    every = brute_force(NET)
    assert NET.size == len(every)
    grid = list(NET.grid())
    assert len(grid) == len(every)
    assert all(config in every for config in grid)


def test_size_counts_classes_of_values_not_values():
    space = Space(
        seed=Int(0, 2**40),
        low=Choice(1, 2, 3, when=less("seed", 10)),
        high=Choice(1, 2, when=greater("seed", 2**39) & less("seed", 2**39 + 3)),
    )
    assert space.size == 10 * 3 + 2 * 2 + (2**40 + 1 - 12)
    assert Space(x=Float(0, 1)).size == math.inf
    assert Space(x=Float(0, 1, step=0.25), y=Int(1, 3)).size == 15
    assert Space().size == 1
    assert Space(x=Float(0, 1), y=Choice(1, 2, when=greater("x", 0.5))).size == math.inf


def test_grid_of_continuous_domains_needs_and_takes_a_resolution():
    space = Space(lr=Float(1e-4, 1.0, log=True), x=Float(0, 1), n=Int(1, 3))
    with pytest.raises(SpaceError, match=r"lr=Float.* is continuous: a grid needs its resolution"):
        space.grid()
    with pytest.raises(SpaceError, match=r"x=Float.* is continuous"):
        space.grid({"lr": 3})
    with pytest.raises(SpaceError, match="resolution of 'lr' is 0"):
        space.grid(0)
    with pytest.raises(SpaceError, match="No domain 'z'"):
        space.grid({"z": 3})
    grid = list(space.grid({"lr": 5, "x": 1, "n": 2}))
    assert sorted({c["lr"] for c in grid}) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert {c["x"] for c in grid} == {0.5}
    assert {c["n"] for c in grid} == {1, 3}
    assert len(grid) == 10


def test_of_a_fine_grid_only_what_is_asked_for_is_made():
    """Lists of a billion values would take minutes and gigabytes."""
    space = Space(x=Float(0, 1), y=Float(0, 1, step=1e-12), n=Int(1, 2**40))
    grid = space.grid({"x": 10**9 + 1, "y": 10**9, "n": 10**9})
    assert list(itertools.islice(grid, 3)) == [
        {"x": 0.0, "y": 0.0, "n": 1},
        {"x": 0.0, "y": 0.0, "n": 1101},
        {"x": 0.0, "y": 0.0, "n": 2200},
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Space(a=Choice(1, when=equals("b", 1))), "'a' has when=equals.* no domain 'b'"),
        (lambda: Space(a=Choice(1, when=equals("a", 1))), "can't depend on itself"),
        (
            lambda: Space(a=Choice(1, when=equals("b", 1)), b=Choice(1, when=equals("a", 1))),
            "form a ring: a -> b -> a",
        ),
        (
            lambda: Space(o=Choice("sgd", "adam"), m=Float(0, 1, when=equals("o", "rmsprop"))),
            "'m' has when=.*'rmsprop' is no value of 'o'.*Give one of 'sgd', 'adam'",
        ),
        (lambda: Space(n=Int(1, 5), m=Choice(1, 2, when=equals("n", 6))), "6 is no value of 'n'"),
        (
            lambda: Space(x=Float(0, 1), m=Choice(1, 2, when=equals("x", 0.5))),
            "continuous and equals a value never",
        ),
        (lambda: Space(n=Int(1, 5), m=Choice(1, 2, when=greater("n", 5))), "never holds"),
        (lambda: Space(n=Int(1, 5), m=Choice(1, 2, when=less("n", 1))), "never holds"),
        (
            lambda: Space(n=Int(1, 10, step=4), m=Choice(1, 2, when=greater("n", 9))),
            "never holds: 'n' is Int",
        ),
        (lambda: Space(n=Float(0, 1, step=0.3), m=Choice(1, 2, when=greater("n", 0.9))), "never holds"),
        (lambda: Space(n=Int(1, 5), m=Choice(1, 2, when=greater("n", -3))), "-3 is outside 'n'"),
        (lambda: Space(n=Choice(1, 5), m=Choice(1, 2, when=greater("n", 3))), "has no order. Use one_of"),
        (
            lambda: Space(n=Int(1, 5), m=Choice(1, 2, when=greater("n", 3) & less("n", 4))),
            "never holds: the tests on 'n' exclude each other",
        ),
        (lambda: Space({"learning rate": Float(0, 1)}), "'learning rate' is not an identifier"),
        (lambda: Space({3: Float(0, 1)}), "3 is not an identifier"),
        (lambda: Space({"a": Choice(1)}, a=Choice(2)), "'a' is given twice"),
        (lambda: Space(lr=0.1), r"lr=0\.1 is not a domain.*Choice\(0\.1\) is a constant"),
        (lambda: Space(lr=[1, 2]), r"lr=\[1, 2\] is not a domain.*Choice\(1, 2\) is one of these"),
        (lambda: Space(opt={"lr": Float(0, 1)}), "not a domain.*Spaces are flat.*such as opt_lr"),
        (
            lambda: Space(lr=Float),
            r"not a domain. Use Float, Int or Choice, with its values: Float\(\.\.\.\)\.$",
        ),
        (lambda: Space(lr=object), "not a domain. Use Float, Int or Choice\\.$"),
        (lambda: Space([Float(0, 1)]), "not made of domains"),
    ],
)
def test_spaces_that_cannot_work_are_refused_by_name(make, says):
    with pytest.raises(SpaceError, match=says):
        make()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"optimizer": "sgd", "depth": 1, "decay": 0}, "'momentum' is missing"),
        (
            {"optimizer": "rmsprop", "depth": 1, "decay": 0},
            "optimizer='rmsprop': 'rmsprop' is none of its values",
        ),
        ({"optimizer": "adam", "depth": 9, "decay": 0}, r"depth=9: 9 is outside \[1, 4\]"),
        ({"optimizer": "adam", "depth": 1, "decay": 0, "lr": 1}, "lr=1: there is no domain 'lr'"),
        (
            {"optimizer": "adam", "momentum": 0.3, "depth": 1, "decay": 0},
            "momentum=0.3: .*when equals.*Drop it",
        ),
        ({"optimizer": "sgd", "momentum": "x", "depth": 1, "decay": 0}, "momentum='x'"),
        ([1], r"not \[1\]"),
    ],
)
def test_wrong_configurations_are_refused_by_name(config, says):
    with pytest.raises(SpaceError, match=says):
        NET.validate(config)


def test_validation_returns_plain_normal_values_in_order():
    given = {"decay": np.float32(0), "depth": np.int64(1), "momentum": 0.1 + 0.2, "optimizer": np.str_("sgd")}
    config = NET.validate(given)
    assert list(config) == ["optimizer", "momentum", "depth", "decay"]
    assert config == {"optimizer": "sgd", "momentum": 0.3, "depth": 1, "decay": 0.0}
    assert [type(value) for value in config.values()] == [str, float, int, float]


def test_repair_drops_what_became_inactive_and_samples_what_became_active():
    config = {"optimizer": "adam", "momentum": 0.3, "depth": 2, "decay": 0.1}
    repaired = NET.repair(config, 5)
    assert NET.validate(repaired) == repaired
    assert {k: repaired[k] for k in ("optimizer", "depth", "decay")} == {
        "optimizer": "adam",
        "depth": 2,
        "decay": 0.1,
    }
    assert "momentum" not in repaired
    assert repaired["width"] in (8, 16)
    with pytest.raises(SpaceError, match="depth=9"):
        NET.repair({"depth": 9}, 0)


def test_is_a_container_of_domains_with_flags():
    assert NET.names == tuple(NET) == NET_ORDER
    assert len(NET) == 6
    assert NET["depth"] == Int(1, 4, structural=True)
    assert "depth" in NET
    assert NET.structural == ("depth", "width")
    assert NET.transferring == ("optimizer", "momentum", "nesterov", "depth", "width")
    with pytest.raises(SpaceError, match=r"No domain 'lr'\. There are: optimizer"):
        NET["lr"]
    assert Space(a=Choice(1), b=Choice(2)) != Space(b=Choice(2), a=Choice(1))
    assert Space({"a": Choice(1)}) == Space(a=Choice(1))
    assert repr(Space(a=Choice(1))) == "Space(a=Choice(1))"


def test_a_parent_may_be_declared_after_its_child():
    space = Space(m=Float(0, 1, when=equals("o", "sgd")), o=Choice("sgd", "adam"))
    assert space.names == ("m", "o")
    assert space.order == ("o", "m")
    assert {("m" in config) == (config["o"] == "sgd") for config in map(space.sample, range(50))} == {True}


def test_one_hot_and_ordinal_encoding_by_hand():
    space = Space(
        o=Choice("a", "b", "c", "d"), n=Int(1, 2, when=equals("o", "a")), lr=Float(0.01, 1, log=True)
    )
    config = {"o": "b", "lr": 0.1}
    assert space.encode(config) == [0.375, 0.5, pytest.approx(0.5)]
    assert space.encode(config, one_hot=True) == [0, 1, 0, 0, 0.5, pytest.approx(0.5)]
    assert space.width(one_hot=True) == 6
    assert space.decode([0.2, 0.9, 7.0]) == {"o": "a", "n": 2, "lr": 1.0}  # clipped to the cube
    assert space.decode([0.1, 0.2, 0.9, 0.3, 0.5, -1.0], one_hot=True) == {"o": "c", "lr": 0.01}
    with pytest.raises(SpaceError, match="has 3 numbers, not 2"):
        space.decode([0.1, 0.2])
    with pytest.raises(SpaceError, match="NaN"):
        space.decode([0.1, float("nan"), 0.2])
    assert space.decode(np.array(space.encode(config))) == config


# --- any space ------------------------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6, allow_nan=False)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3), st.floats(-9, 9))


@st.composite
def spaces(draw):
    domains = {}
    for i in range(draw(st.integers(1, 6))):
        when = None
        if domains and draw(st.booleans()):
            parent = draw(st.sampled_from(sorted(domains)))
            when = draw(conditions(parent, domains[parent]))
        domains[f"d{i}"] = draw(any_domain(when))
    if draw(st.booleans()):  # children before their parents
        domains = dict(reversed(domains.items()))
    return Space(domains)


@st.composite
def conditions(draw, name, domain):
    if isinstance(domain, Float) and domain.count is None:
        return greater(name, draw(st.floats(0, 0.9)) * (domain.high - domain.low) + domain.low)
    value = domain.value_at(draw(st.integers(0, domain.count - 1)))
    if isinstance(domain, Choice):
        return one_of(name, value, domain.value_at(0)) if draw(st.booleans()) else equals(name, value)
    return draw(st.sampled_from([equals(name, value), greater(name, domain.low), less(name, domain.high)]))


@st.composite
def any_domain(draw, when):
    flags = {"when": when, "structural": draw(st.booleans()), "transfers": draw(st.booleans())}
    match draw(st.sampled_from(["float", "log", "step", "int", "logint", "choice"])):
        case "float":
            low = draw(finite)
            return Float(low, low + draw(st.floats(0.01, 1e7)), **flags)
        case "log":
            low = 10 ** draw(st.floats(-280, 200))
            return Float(low, low * 10 ** draw(st.floats(0.01, 100)), log=True, **flags)
        case "step":
            low, step = draw(st.decimals(-50, 50, places=2)), draw(st.decimals("0.01", 5, places=2))
            return Float(float(low), float(low + step * draw(st.integers(1, 300))), step=float(step), **flags)
        case "int":
            low, span = draw(st.integers(-(10**6), 10**6)), draw(st.integers(1, 10**9))
            return Int(low, low + span, step=draw(st.one_of(st.none(), st.integers(1, span))), **flags)
        case "logint":
            low = draw(st.integers(1, 10**6))
            return Int(low, low + draw(st.integers(1, 10**11)), log=True, **flags)
    values = draw(st.lists(st.one_of(scalars, st.lists(scalars, max_size=2)), min_size=1, max_size=6))
    unique = [value for i, value in enumerate(values) if value not in values[:i]]
    return Choice(*unique, **flags) if len(unique) > 1 else Choice.constant(unique[0], **flags)


@settings(max_examples=150, deadline=None)
@given(spaces(), st.integers(0, 2**32))
def test_any_configuration_survives_the_unit_cube_and_validation(space, seed):
    generator = Random(seed)
    for _ in range(5):
        config = space.sample(generator)
        assert space.validate(config) == config
        for one_hot in (False, True):
            point = space.encode(config, one_hot=one_hot)
            assert len(point) == space.width(one_hot=one_hot)
            assert all(0.0 <= x <= 1.0 for x in point)
            assert space.decode(point, one_hot=one_hot) == config
        assert json.loads(json.dumps(config)) == config


@settings(max_examples=100, deadline=None)
@given(spaces(), st.integers(0, 2**32), st.data())
def test_any_point_of_the_cube_is_a_valid_configuration(space, seed, data):
    point = data.draw(st.lists(st.floats(0, 1), min_size=len(space), max_size=len(space)))
    config = space.decode(point)
    assert space.validate(config) == config
    assert space.decode(space.encode(config)) == config
    repaired = space.repair(space.sample(seed), seed)
    assert space.validate(repaired) == repaired == space.sample(seed)


@settings(max_examples=100, deadline=None)
@given(spaces(), st.integers(0, 2**32))
def test_any_space_survives_json(space, seed):
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert again == space
    assert repr(again) == repr(space)
    assert again.sample(seed) == space.sample(seed)
    assert again.to_json() == space.to_json()
    assert hash(again) == hash(space)


def test_json_of_something_else_is_refused():
    for data in ({}, {"domains": [["a", {"kind": "complex"}]]}, {"domains": 3}, {"domains": [["a", {}]]}):
        with pytest.raises(SpaceError):
            Space.from_json(data)


def test_the_same_seed_gives_the_same_configuration_and_others_do_not():
    space = Space(x=Float(0, 1), y=Int(0, 10**6))
    assert space.sample(3) == space.sample(3) == space.sample(Random(3))
    assert len({repr(space.sample(seed)) for seed in range(100)}) == 100
    assert 0 <= space.sample(np.random.default_rng(0))["x"] <= 1


def test_needs_no_numpy():
    code = (
        "import sys; from penstock.space import Space, Float; Space(x=Float(0, 1)).sample(1);"
        "from penstock.sample import TPE, Random; Random(); TPE();"
        "print(sorted({'numpy', 'scipy', 'optuna', 'torch'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
