"""An actor's side of the Ray executor, with real worker processes and without Ray."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import Placement, Share
from penstock.execute import Job, Launch, _actor, pack
from penstock.execute._actor import Order, Slot, boot_id
from penstock.execute._crew import FAREWELL_S, PARTING_S, Crew
from penstock.execute._wire import settings_of, specs_of
from penstock.testing.executors import DEADLINE_S, returns_float, segment


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot()
    yield made
    made.close()


def opened(slot: Slot, folder: Path, turn: int) -> None:
    job = Job(returns_float, folder, ("loss",), meter=False)
    (folder / "logs").mkdir(exist_ok=True)
    order = Order(
        "worker",
        settings_of(job),
        "",
        True,
        tuple(sys.path),
        tuple(sys.argv),
        os.getcwd(),
        boot_id(),
        1,
        0,
        turn,
    )
    slot.open(order, pack(returns_float))


def told(slot: Slot, turn: int, wanted: str) -> list[tuple[Any, ...]]:
    """Its messages, until there is one of this kind."""
    found: list[tuple[Any, ...]] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(message[0] == wanted for message in found):
        assert time.monotonic() < deadline_s
        for item in slot.news(turn, 5.0):
            assert item[0] == "m", item
            found += pickle.loads(item[1])
    return found


def test_a_segment_for_a_worker_that_has_died_is_not_given_to_the_next(slot: Slot, tmp_path: Path) -> None:
    """Its files may come late: by then the driver knows of the death and has it run elsewhere."""

    def message(number: int) -> bytes:
        launch = Launch(Placement((segment(number, until=1),), (Share("a"),)), (None,), (0,))
        return pickle.dumps((number, specs_of(launch), ("cpu",), 1, {}), protocol=5)

    for turn in (1, 2):
        opened(slot, tmp_path, turn)
    slot.take(1, 7, (7,), (message(7),))
    slot.take(2, 8, (8,), (message(8),))
    assert {message[2] for message in told(slot, 2, "e") if message[0] != "y"} == {8}


def test_who_hangs_after_another_failed_and_the_lead_ended_well_is_ended(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hears that the trial has ended well, and hands on the next one, which that one would never begin."""
    now_s = 100.0
    monkeypatch.setattr(_actor, "time", SimpleNamespace(monotonic=lambda: now_s))
    slot._team = 7, Crew(3)
    for rank in range(3):
        slot._of_crew(rank, pickle.dumps([("s", 7, 0, now_s, 0)]))
    assert not slot._of_crew(1, pickle.dumps([("e", 7, 0, now_s, "failed", 1, "late", "", False, None)]))
    assert slot._of_crew(0, pickle.dumps([("e", 7, 0, now_s, "completed", 1, "", "", False, None)]))
    assert slot._settled() == []
    now_s += FAREWELL_S
    assert slot._settled() == [("d", None, "")]


def test_who_has_failed_before_the_lead_ended_well_does_not_end_the_crew(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hangs: the next trial finds them all."""
    monkeypatch.setattr(_actor, "time", SimpleNamespace(monotonic=lambda: 1e9))
    slot._team = 7, Crew(2)
    for rank in range(2):
        slot._of_crew(rank, pickle.dumps([("s", 7, 0, 1.0, 0)]))
    slot._of_crew(1, pickle.dumps([("e", 7, 0, 1.0, "failed", 1, "late", "", False, None)]))
    assert slot._of_crew(0, pickle.dumps([("e", 7, 0, 1.0, "completed", 1, "", "", False, None)]))
    assert slot._settled() == []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_trial_is_begun_when_nobody_of_its_crew_is_busy_with_the_one_before(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Or else, when one has to be ended that hangs, it would seem to be lost."""
    now_s = 100.0
    monkeypatch.setattr(_actor, "time", SimpleNamespace(monotonic=lambda: now_s))
    slot._team = 7, Crew(2)
    for rank in range(2):
        slot._of_crew(rank, pickle.dumps([("s", 7, 0, now_s, 0)]))
    end = ("e", 7, 0, now_s, "completed", 1, "", "", False, None)
    assert pickle.loads(slot._of_crew(0, pickle.dumps([end]))) == [end]
    slot._team = 8, Crew(2)
    start = ("s", 8, 1, now_s, 0)
    assert not slot._of_crew(0, pickle.dumps([start]))
    if hangs:
        now_s += PARTING_S
        assert slot._settled() == [("d", None, "")]
        return
    assert pickle.loads(slot._of_crew(1, pickle.dumps([end]))) == [start]
    report = ("r", 8, 1, now_s, 1, {"loss": 0.0}, 0.1, None)
    assert pickle.loads(slot._of_crew(0, pickle.dumps([report]))) == [report]
