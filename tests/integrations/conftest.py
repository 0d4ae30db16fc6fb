"""A small study in a store, shared by the tests of loggers."""

import pytest

import penstock as pk
from penstock.integrations._inline import Inline


def curve(run):
    """Loses 1 / (epoch x lr); the third configuration fails."""
    if run.config["lr"] == 0.3:
        raise ValueError("lr is 0.3")
    for epoch in run.epochs(9):
        run.save(epoch)
        run.report(loss=run.config["lr"] / (epoch + 1), twice=2 * epoch)


def make_study(store, **options):
    space = {"lr": pk.Choice(0.1, 0.2, 0.3, 0.4), "layers": pk.Choice([8, 8], [16])}
    options = {
        "scheduler": pk.Halving(max_epochs=4, min_epochs=1, eta=2, trials=8, sampler=pk.Grid())
    } | options
    return pk.Study(
        curve, space, minimize="loss", store=store, executor=Inline(), seed=3, name="curves", **options
    )


@pytest.fixture
def store(tmp_path):
    """The path of a store with a finished study."""
    path = str(tmp_path / "study.db")
    make_study(path).run()
    return path
