"""Full, and the arguments of all schedulers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.core.errors import InvalidInput
from penstock.schedule import ASHA, PBT, Full, Halving, Hyperband, Scheduler
from penstock.testing.schedulers import drive, smooth_loss


def test_known_trials_are_one_group() -> None:
    trace = drive(Full(trials=50, epochs=3), smooth_loss(0), slots=2)
    assert [len(group.segments) for _, group in trace.groups] == [50]
    assert all((s.start, s.until, s.last) == (0, 3, True) for s in trace.segments)
    assert [s.trial.id for s in trace.segments] == list(range(50))


@pytest.mark.parametrize(("trials", "learns"), [(None, False), (None, True), (50, True)])
def test_otherwise_as_many_as_can_start(trials: int | None, learns: bool) -> None:
    trace = drive(Full(trials), smooth_loss(0), slots=4, learns=learns, limit=50)
    assert [len(group.segments) for _, group in trace.groups] == [4] + [1] * 46
    assert all(s.until is None for s in trace.segments)


def test_expected() -> None:
    assert Full(trials=9).expected == 9
    assert Full().expected is None
    assert Halving().expected == 27 + 9 + 3 + 1
    assert Hyperband(iterations=2).expected == 2 * (121 + 49 + 21 + 10 + 5)
    assert Hyperband(iterations=None).expected is None
    assert ASHA().expected == 81 + 27 + 9 + 3
    assert ASHA(trials=None).expected is None
    assert PBT(population=4, max_epochs=25, interval=10).expected == 12


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Full(trials=0), "trials is 0"),
        (lambda: Full(epochs=-3), "epochs is -3"),
        (lambda: Full(trials=2.5), "trials is 2.5"),
        (lambda: Full(trials=True), "trials is True"),
        (lambda: Halving(eta=1), "eta is 1"),
        (lambda: Halving(eta=2.5), "eta is 2.5"),
        (lambda: Halving(max_epochs=4, min_epochs=5), "min_epochs is 5 and max_epochs 4"),
        (lambda: Halving(trials=0), "trials is 0"),
        (lambda: Halving(max_epochs="27"), "max_epochs is '27'"),
        (lambda: Hyperband(eta=0), "eta is 0"),
        (lambda: Hyperband(brackets=6), "brackets is 6.*at most 5"),
        (lambda: Hyperband(iterations=0), "iterations is 0"),
        (lambda: ASHA(min_epochs=0), "min_epochs is 0"),
        (lambda: ASHA(min_epochs=28), "min_epochs is 28 and max_epochs 27"),
        (lambda: ASHA(trials=0), "trials is 0"),
        (lambda: ASHA(brackets=5), "brackets is 5.*at most 4"),
        (lambda: PBT(population=1), "population is 1"),
        (lambda: PBT(interval=101), "interval is 101"),
        (lambda: PBT(quantile=0.6), "quantile is 0.6"),
        (lambda: PBT(quantile=0), "quantile is 0"),
        (lambda: PBT(resample=1.1), "resample is 1.1"),
        (lambda: PBT(factors=()), "factors is empty"),
        (lambda: PBT(factors=(0.8, -1)), "factors is -1"),
        (lambda: PBT(factors=(0.8, float("nan"))), "factors is nan"),
    ],
)
def test_arguments_are_checked(make: Callable[[], Scheduler], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make()


def test_numpy_integers_are_whole_numbers() -> None:
    data = Halving(max_epochs=np.int64(9), eta=np.int32(3)).to_json()
    assert data == Halving(max_epochs=9).to_json()
    assert type(data["max_epochs"]) is int


def test_a_sampler_is_carried() -> None:
    sampler = object()
    for scheduler in (
        Full(sampler=sampler),
        Halving(sampler=sampler),
        Hyperband(sampler=sampler),
        ASHA(sampler=sampler),
        PBT(sampler=sampler),
    ):
        assert scheduler.sampler is sampler
        assert "sampler" not in scheduler.to_json()
