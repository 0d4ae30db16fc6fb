"""PBT: truncation selection, exploration within the space, failures, and the paper's toy problem."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Segment, Trial, TrialStatus
from penstock.core.errors import InvalidInput
from penstock.schedule import PBT, Outcome, Rules
from penstock.schedule._pbt import _perturbed
from penstock.space import Choice, Float, Int, Space, equals
from penstock.testing.schedulers import Trace, by_fronts, drive, smooth_loss


def rounds(trace: Trace) -> list[tuple[tuple[Segment, ...], dict[int, Outcome]]]:
    """Each round's segments and how they ended."""
    result = []
    outcomes = iter(trace.outcomes)
    by_label: dict[str, list[Segment]] = {}
    for _, group in trace.groups:
        by_label.setdefault(group.label, []).extend(group.segments)
    for segments in by_label.values():
        result.append((tuple(segments), {(o := next(outcomes)).trial: o for _ in segments}))
    return result


@settings(deadline=None)  # timings are never asserted
@given(
    population=st.integers(2, 20),
    quantile=st.sampled_from([0.1, 0.25, 0.5]),
    seed=st.integers(0, 10_000),
    failures=st.sampled_from([0.0, 0.15]),
    learns=st.booleans(),
)
def test_truncation_selection(
    population: int, quantile: float, seed: int, failures: float, learns: bool
) -> None:
    pbt = PBT(population, max_epochs=23, interval=5, quantile=quantile)
    trace = drive(pbt, smooth_loss(seed), seed=seed, failures=failures, learns=learns, slots=3)
    played = rounds(trace)
    for (before, outcomes), (after, _) in pairwise(played):
        alive = [s.trial.id for s in before if outcomes[s.trial.id].status is TrialStatus.PAUSED]
        alive.sort(key=lambda t: outcomes[t].values or ())
        count = max(1, int(quantile * len(alive)))
        best = set(alive[:count])
        worst = set(alive[-count:]) if len(alive) > 1 else set()
        kept = {s.trial.id for s in after if s.copy_from is None}
        assert kept == set(alive) - worst
        copies = [s for s in after if s.copy_from is not None]
        assert {s.trial.id for s in copies} & set(alive) == worst
        assert len(after) == len(before)  # the failed are replaced
        epoch = before[0].until
        for segment in copies:
            assert segment.copy_from is not None
            assert segment.copy_from.trial in best
            assert segment.copy_from.epoch == epoch == segment.start
            assert segment.trial.parent == segment.copy_from.trial
    assert len(played) == 5 or failures
    spans = sorted({(s.start, s.until) for s in trace.segments})
    assert spans[: len(played)] == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)][: len(played)]


def explored(space: Space, config: dict[str, Any], *, resample: float, seed: int) -> dict[str, Any]:
    """What the second of two members becomes when the first, with ``config``, is better."""
    pbt = PBT(population=2, max_epochs=2, interval=1, quantile=0.5, resample=resample)
    trials = [Trial(0, config, 0), Trial(1, space.sample(seed), 1)]
    pbt.start(Rules(lambda n: trials, by_fronts, space, False, seed))
    assert pbt.next(2) is not None
    pbt.ended(Outcome(0, TrialStatus.PAUSED, 1, (0.0,)))
    pbt.ended(Outcome(1, TrialStatus.PAUSED, 1, (1.0,)))
    group = pbt.next(2)
    assert group is not None
    first, second = group.segments
    assert first.trial is trials[0]
    assert (second.trial.id, second.trial.seed) == (1, 1)
    assert second.copy_from is not None
    assert second.copy_from.trial == 0
    return dict(second.trial.config)


WIDE = Space(
    lr=Float(1e-4, 1.0, log=True),
    decay=Float(0.0, 1.0),
    grid=Float(0.0, 2.0, step=0.25),
    batch=Int(16, 512, log=True),
    warmup=Int(0, 10),
    pick=Choice("a", "b", "c", "d"),
    depth=Int(1, 9, structural=True),
)


@settings(deadline=None)  # timings are never asserted
@given(st.integers(0, 10_000))
def test_perturbation(seed: int) -> None:
    config = WIDE.sample(seed)
    got = explored(WIDE, config, resample=0.0, seed=seed)
    assert WIDE.validate(got) == got
    assert got["depth"] == config["depth"]
    for name in ("lr", "decay"):
        domain = WIDE[name]
        assert isinstance(domain, Float)
        options = [min(max(config[name] * f, domain.low), domain.high) for f in (0.8, 1.2)]
        assert any(got[name] == pytest.approx(option, rel=1e-9, abs=1e-11) for option in options)
    assert abs("abcd".index(got["pick"]) - "abcd".index(config["pick"])) <= 1
    for name, low, high in (("batch", 16, 512), ("warmup", 0, 10)):
        if low < config[name] < high:
            assert got[name] != config[name]  # small whole numbers move too
        elif config[name]:
            assert abs(got[name] - config[name]) <= max(1, 0.2 * config[name] + 1)


@pytest.mark.parametrize(
    ("value", "factor", "wanted"), [(-1, 1.2, -2), (-1, 0.8, 0), (1, 1.2, 2), (1, 0.8, 0)]
)
def test_small_whole_numbers_move_the_way_of_the_factor(value: int, factor: float, wanted: int) -> None:
    assert _perturbed(Int(-9, 9), value, Random(0), (factor,)) == wanted


def test_resampling_draws_from_the_whole_domain() -> None:
    config = WIDE.sample(0)
    draws = [explored(WIDE, config, resample=1.0, seed=seed) for seed in range(300)]
    assert {draw["depth"] for draw in draws} == {config["depth"]}
    assert {draw["pick"] for draw in draws} == set("abcd")
    units = [WIDE["lr"].to_unit(draw["lr"]) for draw in draws]
    assert mean(units) == pytest.approx(0.5, abs=4 * (1 / 12 / 300) ** 0.5)
    assert len({draw["lr"] for draw in draws}) > 290


def test_what_decides_over_structure_stays() -> None:
    """Copied weights would not fit if exploring switched a structural domain on."""
    space = Space(
        kind=Choice("mlp", "cnn"),
        kernel=Choice(3, 5, structural=True, when=equals("kind", "cnn")),
        optimizer=Choice("sgd", "adam"),
        momentum=Float(0.0, 0.9, when=equals("optimizer", "sgd")),
    )
    flipped = 0
    for seed in range(200):
        config = space.sample(seed)
        got = explored(space, config, resample=0.5, seed=seed)
        assert space.validate(got) == got
        assert got["kind"] == config["kind"]
        assert got.get("kernel") == config.get("kernel")
        flipped += ("momentum" in got) != ("momentum" in config)
    assert flipped > 20  # a condition of its own is followed


def test_without_derive_the_population_shrinks() -> None:
    space = Space(x=Float(0, 1))
    pbt = PBT(population=3, max_epochs=2, interval=1)
    pbt.start(Rules(lambda n: [Trial(i, space.sample(i), 0) for i in range(n)], by_fronts, space, False, 0))
    pbt.next(3)
    pbt.ended(Outcome(0, TrialStatus.PAUSED, 1, (1.0,)))
    pbt.ended(Outcome(1, TrialStatus.FAILED, 1, None))
    pbt.ended(Outcome(2, TrialStatus.PAUSED, 1, (0.0,)))
    group = pbt.next(3)
    assert group is not None
    assert [(s.trial.id, s.copy_from is not None) for s in group.segments] == [(0, True), (2, False)]


def toy(pbt: PBT) -> float:
    """Jaderberg et al. 2017, section 4.1 and Figure 2: climb 1.2 - x^2 - y^2 knowing 1.2 - h0 x^2 - h1 y^2."""
    space = Space(h0=Float(0.0, 1.0), h1=Float(0.0, 1.0))
    starts = [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    pbt.start(Rules(lambda n: [Trial(i, c, 0) for i, c in enumerate(starts)], by_fronts, space, False, 4))
    theta: dict[tuple[int, int], tuple[float, float]] = {(0, 0): (0.9, 0.9), (1, 0): (0.9, 0.9)}
    best = -1.0
    while (group := pbt.next(2)) is not None:
        for segment in group.segments:
            source = segment.trial.id if segment.copy_from is None else segment.copy_from.trial
            x, y = theta[source, segment.start]
            config = segment.trial.config
            assert segment.until is not None
            for _ in range(segment.start, segment.until):
                x, y = x - 0.02 * config["h0"] * x, y - 0.02 * config["h1"] * y
            theta[segment.trial.id, segment.until] = x, y
        for segment in group.segments:
            assert segment.until is not None
            x, y = theta[segment.trial.id, segment.until]
            quality = 1.2 - x * x - y * y
            best = max(best, quality)
            pbt.ended(Outcome(segment.trial.id, TrialStatus.PAUSED, segment.until, (-quality,)))
    return best


def test_the_toy_problem_of_the_paper() -> None:
    """Alone, each member leaves one coordinate at 0.9 and ends below 0.4; together they reach the top, 1.2."""
    alone = toy(PBT(population=2, max_epochs=400, interval=400, quantile=0.5))
    assert alone == pytest.approx(1.2 - 0.81, abs=0.01)
    together = toy(PBT(population=2, max_epochs=400, interval=8, quantile=0.5))
    assert together > 1.15


def test_needs_a_space() -> None:
    with pytest.raises(InvalidInput, match="Space"):
        PBT().start(Rules(lambda n: [], by_fronts, {"x": 1}, False, 0))


def test_seed_decides() -> None:
    def configs(seed: int) -> list[dict[str, Any]]:
        return [explored(WIDE, WIDE.sample(Random(7)), resample=0.5, seed=seed)]

    assert configs(1) == configs(1)
    assert configs(1) != configs(2)
