"""A store with simulated studies, read by the views, and a real browser."""

import math
import os

import pytest

import penstock as pk
from penstock.core.errors import Unsupported
from penstock.report._journal import fold_journal
from penstock.report.views import Folded
from penstock.store import open_store


def curve(run: pk.Run) -> None:
    x, y = run.config["x"], run.config["y"]
    for epoch in run.epochs():
        run.report(loss=(math.log10(x) + 2) ** 2 + 0.05 * y + 1 / (epoch + 1), quality=y)


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> str:
    """A store with a study of 60 trials on simulated devices (named with a tag, as anybody may), and another."""
    path = tmp_path_factory.mktemp("report") / "s.db"
    space = pk.Space(x=pk.Float(1e-4, 1, log=True), y=pk.Float(0, 1), note=pk.Choice("<img src=x>", "b"))
    for name, trials in (("first", 5), ("<script>alert(1)</script>", 60)):
        pk.Study(
            curve,
            space,
            minimize="loss",
            scheduler=pk.ASHA(max_epochs=9, trials=trials),
            sampler=pk.Random(),
            executor=pk.Simulated(devices=3, seconds=lambda config, epoch: 1 + config["y"]),
            store=path,
            name=name,
            seed=3,
        ).run()
    return str(path)


@pytest.fixture(scope="session")
def simulated(store) -> Folded:
    return fold_journal(store)[0]


@pytest.fixture(scope="session")
def events(store) -> list:
    with open_store(store, write=False) as opened:
        return [event for _, event in opened.read(opened.find().id)]


@pytest.fixture(scope="session")
def browser():
    from penstock.testing.browser import chromium

    try:
        context = chromium()
        driver = context.__enter__()
    except Unsupported as error:
        if os.environ.get("PENSTOCK_REQUIRE_BROWSER"):
            pytest.fail(f"PENSTOCK_REQUIRE_BROWSER is set, but: {error}")
        pytest.skip(str(error))
    try:
        yield driver
    finally:
        context.__exit__(None, None, None)
