"""Bayes: where it starts under limits, and how it stays near the best in many dimensions."""

import numpy as np
import pytest

import penstock as pk
from penstock.core.errors import InvalidInput, SpaceError
from penstock.goal import Quantity
from penstock.predict import Features, Predictor, Predictors
from penstock.sample import Bayes, Gate, Observation
from penstock.sample._bayes import _standardised
from penstock.sample._cube import Cube
from penstock.space import Choice, Float, Int, Space, equals, less, one_of

FLAT = Space(**{f"x{i}": Float(0, 1) for i in range(12)})
COST = Quantity("cost", of=lambda c: sum(c.values())) <= 5.0  # about a sixth of the cube keeps it


def asked(sampler, space, count, value, seed=0):
    sampler.start(space, objectives=1, seed=seed)
    configs = []
    for number in range(count):
        (config,) = sampler.ask(1)
        sampler.adopt(config, number)
        sampler.tell(Observation(number, config, (value(config),)))
        configs.append(dict(config))
    return configs


def test_two_of_three_starting_points_are_near_the_limits_and_all_keep_them():
    near, anywhere = [], []
    for seed in range(12):
        costs = [sum(c.values()) for c in asked(Bayes(gate=Gate([COST])), FLAT, 9, lambda c: 0.0, seed)]
        assert max(costs) <= 5.0
        near += [cost for i, cost in enumerate(costs) if i % 3 != 2]
        anywhere += [cost for i, cost in enumerate(costs) if i % 3 == 2]
    draws = [sum(FLAT.sample(i).values()) for i in range(4000)]
    plain = np.mean([cost for cost in draws if cost <= 5.0])
    # Of four uniform draws the nearest to the bound; the others are as draws that keep the limits are.
    assert np.mean(near) > plain + 0.6 * (5.0 - plain)
    assert np.mean(anywhere) == pytest.approx(plain, abs=0.25)


def test_proposals_stay_near_the_best_in_many_dimensions_and_choices_stay_free():
    space = Space(
        **{f"x{i}": Float(0, 1) for i in range(9)},
        n=Int(1, 3),
        kind=Choice("a", "b", "c"),
        more=Float(0, 1, when=equals("kind", "b")),
    )

    def value(c):
        return sum((c[f"x{i}"] - 0.5) ** 2 for i in range(9)) + 0.1 * (c["kind"] != "b")

    configs = asked(Bayes(startup=12), space, 22, value)
    values = [value(c) for c in configs]
    for number in range(12, 22):
        best = configs[int(np.argmin(values[:number]))]
        far = max(abs(configs[number][f"x{i}"] - best[f"x{i}"]) for i in range(9))
        assert far <= 0.3 + 1e-9  # 0.15, or twice that after three improvements in a row
        assert abs(configs[number]["n"] - best["n"]) <= 1
    assert {c["kind"] for c in configs[12:]} != {configs[12]["kind"]}


def test_a_search_that_is_stuck_looks_closer_and_then_everywhere_again():
    """A flat objective: nothing improves, so the region shrinks, and then begins anew with looks from afar."""
    first = []

    def value(config):
        first.append(config)
        return float(len(first) > 1) + 1e-6 * (len(first) % 3)

    configs = asked(Bayes(startup=3), FLAT, 26, value)
    far = [max(abs(c[n] - configs[0][n]) for n in FLAT.names) for c in configs]
    assert max(far[3:9]) <= 0.15 + 1e-9
    assert min(far[9:21]) < 0.08
    assert (
        sum(f > 0.31 for f in far[3:]) == 3
    )  # after three times six without an improvement, before every other one


def test_the_margin_is_of_the_quantity_not_of_the_sensor():
    space = Space(width=Int(10, 100, structural=True))
    draw = np.random.default_rng(0)
    configs = [space.sample(i) for i in range(60)]
    configs += configs[:30]
    values = [(20 + c["width"]) * (1 + 0.05 * draw.standard_normal()) for c in configs]
    model = Predictor.fit("power_w", Features.of(space), configs, values)
    gate = Gate([Quantity("power_w") <= 80], Predictors({"power_w": model}), confidence=0.999)
    widest = max(w for w in range(10, 101) if gate.check({"width": w}).allowed)
    found = model.predict({"width": widest})
    assert 20 + widest <= 80  # it does keep the limit
    assert found.mean + 3.0 * found.doubt <= 80 < found.mean + 3.0 * found.std  # a sensor may show more
    excess = gate.excess([{"width": w} for w in range(10, 101)])
    assert [e <= 0 for e in excess] == [gate.check({"width": w}).allowed for w in range(10, 101)]


LINE = Space(x=Float(0, 1), kind=Choice("a", "b"))


def hill(run):
    """Best at x = 0.8."""
    for _ in run.epochs():
        run.report(accuracy=1 - (run.config["x"] - 0.8) ** 2)


def earlier(**options):
    options.setdefault("scheduler", pk.Full(trials=25, epochs=1))
    return pk.Study(
        hill,
        LINE,
        maximize="accuracy",
        sampler=pk.Random(),
        executor=pk.Simulated(devices=4, seconds=1.0),
        **{"store": False, **options},
    )


def first(sampler, objectives=1):
    sampler.start(LINE, objectives=objectives, seed=3)
    return sampler.ask(1)[0]


def test_an_earlier_study_is_transferred_as_it_is_run_or_loaded(tmp_path):
    """It was maximised: in a sampler's terms its values are turned around, so the first proposal is at its best."""
    path = tmp_path / "earlier.db"
    study = earlier(store=path).run()
    told = [Observation(t.id, t.config, (-t.metrics["accuracy"],), t.epoch) for t in study.trials]
    by_hand = first(Bayes(transfer=told))
    assert by_hand["x"] == pytest.approx(0.8, abs=0.1)
    assert first(Bayes(transfer=study)) == by_hand
    assert first(Bayes(transfer=pk.Study.load(path))) == by_hand
    assert first(Bayes(transfer=study.trials).toward(study.goal)) == by_hand
    # The other way round: trials are measured by the goal of the study to come.
    low = first(Bayes(transfer=study.trials).toward(pk.Study(hill, LINE, minimize="accuracy").goal))
    assert abs(low["x"] - 0.8) > 0.4


def test_of_trials_of_different_lengths_the_longest_are_transferred():
    """Short trainings say the opposite here: they must not count as results."""
    space = Space(x=Float(0, 1))
    long = [Observation(i, {"x": i / 9}, ((i / 9 - 0.8) ** 2,), 27) for i in range(10)]
    short = [Observation(100 + i, {"x": i / 29}, (-5 - (i / 29 - 0.8) ** 2,), 1) for i in range(30)]
    found = []
    for told in (long, [*long, *short]):
        sampler = Bayes(transfer=told)
        sampler.start(space, objectives=1, seed=0)
        found.append(sampler.ask(1)[0]["x"])
    assert found[0] == found[1] == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    "wrong",
    ["nofile.db", b"x", 3, None, [1, 2], [{"x": 1.0}], {"x": 1.0}],
    ids=repr,
)
def test_what_can_not_be_transferred_is_refused_at_once(wrong):
    with pytest.raises(InvalidInput, match=r"Study\.load"):
        Bayes(transfer=wrong)


def test_a_study_without_results_or_of_something_else_is_refused():
    with pytest.raises(InvalidInput, match="of 0 trials that are over"):
        Bayes(transfer=earlier())
    study = earlier().run()
    with pytest.raises(InvalidInput, match="transfer=study"):
        first(Bayes(transfer=study.trials))
    with pytest.raises(InvalidInput, match="has 1 values, but the study has 2"):
        first(Bayes(transfer=study), objectives=2)
    with pytest.raises(InvalidInput, match=r"minimize loss"):
        Bayes(transfer=study.trials).toward(pk.Study(hill, LINE, minimize="loss").goal)
    sampler = Bayes(transfer=study)
    with pytest.raises(SpaceError, match=r"trial 0 to transfer"):
        sampler.start(FLAT, objectives=1, seed=0)


def test_conditions_on_numbers_of_many_values():
    space = Space(
        n=Int(1, 10_000), m=Float(0, 1, when=one_of("n", 5, 7)), k=Float(0, 1, when=less("n", 10.5))
    )
    configs = [
        {"n": 5, "m": 0.25, "k": 0.75}, {"n": 6, "k": 0.75}, {"n": 7, "m": 0.75, "k": 0.25}, {"n": 10, "k": 0.25},
        {"n": 11},
    ]  # fmt: skip
    cube = Cube(space)
    assert [cube.config(row) for row in cube.snap(cube.units(configs))] == configs
    sampler = Bayes()
    sampler.start(space, objectives=1, seed=0)
    assert [space.validate(config) for config in sampler.ask(2)]


@pytest.mark.parametrize("transfer", [(), [Observation(trial, {}, (float(trial),)) for trial in range(3)]])
def test_an_empty_space_has_one_configuration_however_many_results_there_are(transfer):
    sampler = Bayes(transfer=transfer)
    sampler.start(Space(), objectives=1, seed=0)
    for trial in range(8):
        (config,) = sampler.ask(1)
        assert config == {}
        sampler.adopt(config, trial)
        sampler.tell(Observation(trial, config, (float(trial),)))
    nothing = Bayes(gate=Gate([Quantity("cells", of=lambda config: 5.0) <= 3]))
    nothing.start(Space(), objectives=1, seed=0)
    with pytest.raises(InvalidInput, match="cells <= 3"):
        nothing.ask(1)


@pytest.mark.parametrize("scale", [1.0, 1e300, -1e300])
def test_results_near_the_end_of_all_numbers_keep_their_shape(scale):
    """Of a training that diverges in double precision; with results as bad as that, the others must still count."""
    values = np.array([1.0, 1.1, 1.3, 1.2, 1.25]) * scale
    wanted = _standardised(values / abs(scale))
    np.testing.assert_allclose(_standardised(values), wanted, rtol=1e-6)
    assert wanted.std() == pytest.approx(1.0)
