"""Samplers under limits: what happens when nothing they propose is allowed."""

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.goal import Quantity
from penstock.predict import Features, Predictor, Predictors
from penstock.sample import Gate, Grid, Limited
from penstock.space import Choice, Float, Int, Space

SPACE = Space(width=Choice(8, 16, 32), depth=Choice(1, 2))
CELLS = Quantity("cells", of=lambda c: c["width"] * c["depth"])


def started(limit, sampler=None, **options):
    made = Limited(sampler or Grid(), limit, **options)
    made.start(SPACE, objectives=1, seed=0)
    return made


def test_a_grid_of_which_nothing_is_allowed_says_so():
    """The nearest of the six is 8 x 1, known by hand."""
    with pytest.raises(InvalidInput) as caught:
        started(CELLS <= 7).ask(3)
    text = str(caught.value)
    assert "cells <= 7" in text
    assert "{'width': 8, 'depth': 1}" in text
    assert "among the 6 that Grid() proposes" in text


def test_a_study_of_such_a_grid_fails_too():
    study = pk.Study(
        lambda run: None,
        SPACE,
        minimize="loss",
        sampler=pk.Grid(),
        scheduler=pk.Full(epochs=1),
        executor=pk.Simulated(devices=1),
        limits=[CELLS <= 7],
        store=False,
    )
    with pytest.raises(InvalidInput, match=r"tightest limit is cells <= 7"):
        study.run()
    assert not study.trials


def test_a_grid_of_which_something_is_allowed_ends_quietly():
    made = started(CELLS <= 16)
    assert made.ask(10) == [{"width": 8, "depth": 1}, {"width": 8, "depth": 2}, {"width": 16, "depth": 1}]
    assert made.ask(1) == []
    assert made.refused == 3


def test_of_a_grid_whose_first_part_is_forbidden_nothing_else_is_tried():
    space = Space(width=Int(1, 5), depth=Int(1, 80), rate=Float(0, 1))
    sampler = Grid(resolution={"rate": 3})
    made = Limited(sampler, Quantity("narrow", of=lambda c: -c["width"]) <= -4)
    made.start(space, objectives=1, seed=0)
    allowed = [c for c in space.grid({"rate": 3}) if c["width"] >= 4]
    assert made.ask(1000) == allowed
    assert made.refused == 3 * 80 * 3


def test_of_a_grid_in_doubt_the_surest_of_what_is_predicted_to_fit_is_taken():
    space = Space(width=Int(1, 40, structural=True))
    configs = [{"width": 1 + i} for i in range(40)]
    values = [c["width"] * (1.2 if i % 2 else 0.8) for i, c in enumerate(configs)]  # scatters by 20%
    model = Predictor.fit("power_w", Features.of(space), configs, values, folds=0, forms=("plain",))
    grid = Space(width=Choice(20, 24, 32))
    gate = Gate([pk.power_w <= 25], Predictors({"power_w": model}), confidence=0.999)
    made = Limited(Grid(), gate)
    made.start(grid, objectives=1, seed=0)
    assert not any(gate.check({"width": w}).allowed for w in (20, 24, 32))
    assert made.ask(5) == [{"width": 20}]
