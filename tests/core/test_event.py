"""Events survive the way through a record, and old records keep their meaning."""

import json
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given

from penstock.core import (
    Checkpoint,
    Dropped,
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Saved,
    Segment,
    SessionClosed,
    SessionOpened,
    Share,
    Source,
    Started,
    Submitted,
    Trial,
    TrialStatus,
    from_record,
    to_record,
)
from penstock.core.errors import StoreCorrupt
from penstock.testing.events import events, every_event


def through_json(event: Event) -> Event:
    kind, trial, time_s, data = to_record(event)
    return from_record(kind, trial, time_s, json.loads(json.dumps(data)))


@given(events)
def test_any_event_round_trips(event: Event) -> None:
    assert through_json(event) == event


def test_every_kind_is_tried() -> None:
    kinds = {event.kind for event in every_event()}
    assert kinds == {each.kind for each in typing.get_args(Event)}
    for event in every_event():
        assert through_json(event) == event


# As written by version 0.1.0. Journals live on: these must read as they do for ever.
OLD = [
    (
        ("session_opened", None, 1.0, {"host": "h", "pid": 3, "note": {"v": 1}}),
        SessionOpened(1.0, "h", 3, {"v": 1}),
    ),
    (("session_closed", None, 1.0, {"reason": "budget", "detail": ""}), SessionClosed(1.0, "budget")),
    (
        (
            "submitted",
            None,
            1.0,
            {
                "want": 2,
                "label": "rung 1",
                "segments": [
                    {"id": 4, "seed": 9, "last": True, "until": None, "config": {"lr": 0.1}},
                    {
                        "id": 5,
                        "seed": 8,
                        "last": False,
                        "until": 9,
                        "config": {},
                        "parent": 4,
                        "start": 3,
                        "copy_from": [4, 3],
                    },
                ],
            },
        ),
        Submitted(
            1.0,
            2,
            (
                Segment(Trial(4, {"lr": 0.1}, 9)),
                Segment(Trial(5, {}, 8, 4), start=3, until=9, last=False, copy_from=Checkpoint(4, 3)),
            ),
            "rung 1",
        ),
    ),
    (("started", 4, 1.0, {"shares": [["cpu:0", 0.5]]}), Started(1.0, 4, shares=(Share("cpu:0", 0.5),))),
    (
        ("started", 4, 1.0, {"shares": [], "start": 3, "attempt": 1, "fused": [4, 5]}),
        Started(1.0, 4, 3, (), 1, (4, 5)),
    ),
    (
        ("reported", 4, 1.0, {"e": 2, "m": {"loss": 0.5}, "s": 3.0, "j": [7.0, "J", 1, 0.1]}),
        Reported(1.0, 4, 2, {"loss": 0.5}, 3.0, Measurement(7.0, "J", Source.ATTRIBUTED, 0.1)),
    ),
    (("reported", 4, 1.0, {"e": 2, "m": {}}), Reported(1.0, 4, 2, {})),
    (("saved", 4, 1.0, {"e": 2, "path": "p"}), Saved(1.0, 4, 2, "p")),
    (("ended", 4, 1.0, {"status": "completed", "e": 2}), Ended(1.0, 4, TrialStatus.COMPLETED, 2)),
    (
        (
            "ended",
            4,
            1.0,
            {"status": "failed", "e": 2, "reason": "r", "error": "t", "lost": True, "retry": True},
        ),
        Ended(1.0, 4, TrialStatus.FAILED, 2, "r", "t", True, True),
    ),
    (("dropped", 4, 1.0, {"reason": "r"}), Dropped(1.0, 4, "r")),
    (("noted", None, 1.0, {"topic": "t", "data": {"a": [1]}}), Noted(1.0, "t", {"a": [1]})),
]


@pytest.mark.parametrize(("record", "event"), OLD)
def test_old_records_keep_their_meaning(record: Any, event: Event) -> None:
    assert from_record(*record) == event
    assert to_record(event) == record


@pytest.mark.parametrize(
    ("kind", "trial", "data"),
    [
        ("reported", None, {"e": 1, "m": {}}),
        ("reported", 1, {}),
        ("reported", 1, {"e": 1, "m": {}, "j": [1.0]}),
        ("ended", 1, {"status": "nonsense", "e": 1}),
        ("submitted", None, {"want": 1, "label": "", "segments": [{}]}),
        ("submitted", None, {"want": 1, "label": "", "segments": 3}),
        ("started", 1, {"shares": [["cpu:0"]]}),
        ("from the future", 1, {}),
    ],
)
def test_records_that_are_not_ours(kind: str, trial: int | None, data: Mapping[str, Any]) -> None:
    with pytest.raises(StoreCorrupt, match=kind):
        from_record(kind, trial, 0.0, data)


@pytest.mark.parametrize("data", [[], "text", 3, None])
def test_payloads_of_another_shape(data: Any) -> None:
    for event in every_event():
        with pytest.raises(StoreCorrupt):
            from_record(event.kind, 1, 0.0, data)


def test_a_group_of_an_older_version_has_no_refused_proposals() -> None:
    segments = (Segment(Trial(4, {"x": 1}, 7)),)
    new = Submitted(1.0, 1, segments, "", ((4, 12),))
    kind, trial, time_s, data = to_record(new)
    assert from_record(kind, trial, time_s, data) == new
    del data["refused"]
    assert from_record(kind, trial, time_s, data) == Submitted(1.0, 1, segments)
    assert (
        "refused" not in to_record(Submitted(1.0, 1, segments))[3]
    )  # nor for who reads it with an older one
