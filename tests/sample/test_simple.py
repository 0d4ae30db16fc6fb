"""Random, Grid and Walk do what their literature says."""

import itertools
import math
from collections import Counter

import pytest
from scipy import stats

from penstock.core.errors import InvalidInput, SpaceError
from penstock.sample import Grid, Observation, Random, Sampler, Walk, WarmStart
from penstock.sample._seed import Stream, mixed
from penstock.space import Choice, Float, Int, Space, equals

SPACE = Space(x=Float(0, 1), lr=Float(1e-4, 1, log=True), n=Int(1, 10), o=Choice("a", "b", "c"))


def begin(sampler, space=SPACE, objectives=1, seed=0):
    sampler.start(space, objectives=objectives, seed=seed)
    return sampler


def test_streams_are_uniform_and_unrelated():
    numbers = [Stream(5, index).random() for index in range(4000)]
    assert stats.kstest(numbers, stats.uniform.cdf).pvalue > 1e-3
    stream = Stream(5, 0)
    long = [stream.random() for _ in range(4000)]
    assert long[0] == numbers[0]
    assert stats.kstest(long, stats.uniform.cdf).pvalue > 1e-3
    assert abs(stats.pearsonr(long[:-1], long[1:]).statistic) < 0.06
    assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 0.06
    assert (
        len({mixed(seed, index, salt) for seed in range(30) for index in range(30) for salt in "ab"}) == 1800
    )


def test_random_is_uniform_over_indices():
    configs = begin(Random()).ask(4000)
    assert stats.kstest([c["x"] for c in configs], stats.uniform.cdf).pvalue > 1e-3
    assert stats.kstest([c["lr"] for c in configs], stats.loguniform(1e-4, 1).cdf).pvalue > 1e-3
    assert stats.chisquare(list(Counter(c["n"] for c in configs).values())).pvalue > 1e-3
    assert stats.chisquare(list(Counter(c["o"] for c in configs).values())).pvalue > 1e-3


@pytest.mark.parametrize("sampler", [Random(), Grid(2), Walk(), WarmStart(then=Random())])
def test_asking_before_start_is_refused(sampler):
    with pytest.raises(InvalidInput, match="before it was started"):
        sampler.ask(1)


def test_grid_is_the_product():
    space = Space(a=Choice("x", "y"), b=Int(1, 3), c=Float(0, 1, step=0.5))
    grid = begin(Grid(), space)
    expected = [
        {"a": a, "b": b, "c": c} for a, b, c in itertools.product(["x", "y"], [1, 2, 3], [0.0, 0.5, 1.0])
    ]
    assert grid.ask(7) + grid.ask(7) + grid.ask(7) == expected
    assert grid.ask(1) == []


def test_grid_names_the_domain_without_resolution():
    with pytest.raises(SpaceError, match=r"x=Float\(0.0, 1.0\) is continuous: a grid needs its resolution"):
        begin(Grid())
    assert len(begin(Grid(resolution=2)).ask(1000)) == 2 * 2 * 10 * 3
    assert len(begin(Grid({"x": 3, "lr": 2, "n": 4})).ask(1000)) == 3 * 2 * 4 * 3


def told(walk, trial, config, *values, epoch=1, final=True):
    walk.tell(Observation(trial, config, values or None, epoch, final))


def test_walk_is_a_truncated_normal_around_the_best():
    # HyperPower 3.5: x_{n+1} ~ N(x+, sigma_0^2), over the best of the previous observations.
    walk = begin(Walk(sigma=0.2))
    told(walk, 0, {"x": 0.9, "lr": 0.1, "n": 1, "o": "a"}, 5.0)
    told(walk, 1, {"x": 0.1, "lr": 1e-4, "n": 5, "o": "b"}, 3.0)
    told(walk, 2, {"x": 0.5, "lr": 1e-2, "n": 9, "o": "c"}, 4.0)
    configs = walk.ask(4000)
    x = stats.truncnorm(-0.1 / 0.2, 0.9 / 0.2, loc=0.1, scale=0.2)
    assert stats.kstest([c["x"] for c in configs], x.cdf).pvalue > 1e-3
    lr = stats.truncnorm(0.0, 1.0 / 0.2, loc=0.0, scale=0.2)  # in the unit interval of the logarithm
    assert stats.kstest([math.log10(c["lr"]) / 4 + 1 for c in configs], lr.cdf).pvalue > 1e-3
    n = stats.truncnorm(-0.45 / 0.2, 0.55 / 0.2, loc=0.45, scale=0.2)  # 5 of 1..10: the bin [0.4, 0.5)
    expected = [4000 * (n.cdf((k + 1) / 10) - n.cdf(k / 10)) for k in range(10)]
    counts = Counter(c["n"] for c in configs)
    assert stats.chisquare([counts[k] for k in range(1, 11)], expected).pvalue > 1e-3
    leave = 2 * stats.norm.sf(0.5 / 3 / 0.2)
    counts = Counter(c["o"] for c in configs)
    expected = [4000 * leave / 2, 4000 * (1 - leave), 4000 * leave / 2]
    assert stats.chisquare([counts[o] for o in "abc"], expected).pvalue > 1e-3


def test_walk_follows_supersession_and_failure():
    space = Space(x=Float(0, 1))
    walk = begin(Walk(sigma=1e-6), space)

    def center():
        return round(walk.ask(1)[0]["x"], 3)

    told(walk, 0, {"x": 0.2}, 1.0, epoch=1, final=False)
    told(walk, 1, {"x": 0.7}, 2.0)
    assert center() == 0.2
    told(walk, 0, {"x": 0.2}, 3.0, epoch=3, final=False)  # it got worse with training: no longer the best
    assert center() == 0.7
    told(walk, 0, {"x": 0.2}, 0.5, epoch=2)  # late news of an earlier epoch
    assert center() == 0.7
    told(walk, 2, {"x": 0.4}, 0.1)
    assert center() == 0.4
    told(walk, 2, {"x": 0.4}, epoch=4)  # failed after all
    assert center() == 0.7
    told(walk, 3, {"x": 0.9}, float("nan"))
    assert center() == 0.7


def test_walk_draws_from_the_pareto_front():
    space = Space(x=Float(0, 1))
    walk = begin(Walk(sigma=1e-6), space, objectives=2)
    for trial, (x, a, b) in enumerate([(0.1, 0, 3), (0.2, 1, 2), (0.3, 2, 2), (0.4, 3, 0), (0.5, 4, 4)]):
        told(walk, trial, {"x": x}, float(a), float(b))
    assert {round(c["x"], 3) for c in walk.ask(200)} == {0.1, 0.2, 0.4}


def test_walk_samples_newly_active_domains_uniformly():
    space = Space(o=Choice("sgd", "adam"), m=Float(0, 1, when=equals("o", "sgd")))
    walk = begin(Walk(sigma=0.5), space)
    told(walk, 0, {"o": "adam"}, 1.0)
    fresh = [c["m"] for c in walk.ask(4000) if "m" in c]
    assert len(fresh) > 500
    assert stats.kstest(fresh, stats.uniform.cdf).pvalue > 1e-3


def test_walk_shrinks_geometrically():
    walk = Walk(sigma=0.4, sigma_end=0.1, steps=10)
    assert [walk.sigma_at(i) for i in (0, 5, 10, 99)] == pytest.approx([0.4, 0.2, 0.1, 0.1])
    for wrong in (0, -1, math.inf, math.nan, True, "x"):
        with pytest.raises(InvalidInput, match="sigma is"):
            Walk(sigma=wrong)
    with pytest.raises(InvalidInput, match="steps is 0"):
        Walk(steps=0)


def test_warm_start_gives_the_configurations_first_then_the_sampler():
    given = [{"x": 0.5, "lr": 0.1, "n": 3.0, "o": "a"}, {"x": 0.25, "lr": 0.01, "n": 4, "o": "b"}]
    sampler = begin(WarmStart(given, then=Random()))
    assert sampler.learns is False
    first = sampler.ask(1) + sampler.ask(3)
    assert first[0] == {"x": 0.5, "lr": 0.1, "n": 3, "o": "a"}
    assert first[1] == given[1]
    assert first[2:] == begin(Random()).ask(2)
    assert WarmStart(given, then=Walk()).learns is True


def test_warm_start_names_the_wrong_configuration():
    good = {"x": 0.5, "lr": 0.1, "n": 3, "o": "a"}
    with pytest.raises(SpaceError, match=r"WarmStart: Configuration 1, .*n=30: 30 is outside \[1, 10\]"):
        begin(WarmStart([good, good | {"n": 30}], then=Random()))
    with pytest.raises(SpaceError, match=r"WarmStart: Observation of trial 7,.*'o' is missing"):
        begin(
            WarmStart.from_observations([Observation(7, {"x": 0.5, "lr": 0.1, "n": 3}, (1.0,))], then=Walk())
        )
    with pytest.raises(InvalidInput, match="has 1 values, but the study has 2"):
        begin(WarmStart.from_observations([Observation(7, good, (1.0,))], then=Walk()), objectives=2)
    with pytest.raises(InvalidInput, match="then is 3, not a sampler"):
        WarmStart([good], then=3)


def test_an_earlier_study_is_known_before_the_first_proposal_and_its_numbers_do_not_clash():
    earlier = [
        Observation(0, {"x": 0.9}, (2.0,)),
        Observation(1, {"x": 0.3}, (9.0,), 1, final=False),
        Observation(1, {"x": 0.3}, (1.0,), 5, final=False),
    ]
    sampler = begin(WarmStart.from_observations(earlier, then=Walk(sigma=1e-6)), Space(x=Float(0, 1)))
    config = sampler.ask(1)[0]
    assert config["x"] == pytest.approx(0.3, abs=1e-4)
    sampler.adopt(config, 1)
    sampler.tell(Observation(1, config, None))  # this study's trial 1 fails; the earlier one's stays known
    assert sampler.ask(1)[0]["x"] == pytest.approx(0.3, abs=1e-4)


def test_what_else_earlier_trials_measured_is_passed_on():
    """It teaches predictors of limits."""
    heard = []

    class Listener(Sampler):
        def start(self, space, *, objectives, seed):
            heard.clear()

        def ask(self, n):
            return []

        def skip(self, configs, trials):
            pass

        def adopt(self, config, trial):
            pass

        def tell(self, observation):
            heard.append((observation.trial, dict(observation.metrics), observation.final))

    earlier = [
        Observation(4, {"x": 0.5}, (1.0,), 1, False, {"power_w": 30.0}),
        Observation(9, {"x": 0.25}, None, 1, True, {"power_w": 40.0}),
    ]
    begin(WarmStart.from_observations(earlier, then=Listener()), Space(x=Float(0, 1)))
    assert heard == [
        (-1, {"power_w": 30.0}, False),
        (-2, {"power_w": 40.0}, True),
        (-1, {"power_w": 30.0}, True),
    ]
