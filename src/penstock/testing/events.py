"""Events for tests: one of every kind, and Hypothesis strategies that make any."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.core import (
    Checkpoint,
    Dropped,
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Resized,
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
)


def every_event() -> list[Event]:
    """At least one event of every kind, with every field set and with text that databases stumble over."""
    config = {"lr": 1e-3, "layers": 3, "name": "a'b\"c\\\n\u2603\U0001f600", "flag": True, "none": None}
    child = Trial(1, {**config, "nested": {"a": [1, 2.5, "x"]}}, 2**63 - 1, parent=0)
    segments = (
        Segment(Trial(0, config, 7), until=9, last=False),
        Segment(child, start=3, until=27, copy_from=Checkpoint(0, 3)),
    )
    energy = Measurement(12.5, "J", Source.ATTRIBUTED, 0.05)
    return [
        SessionOpened(0.0, "host", 42, {"version": "1", "seed": 3}),
        Submitted(1.0, 2, segments, "bracket 1, rung 0"),
        Submitted(1.5, 1, (Segment(Trial(2, {}, 0)),)),
        Started(2.0, 0, 0, (Share("cpu:0", 0.5), Share("node7/cuda:1")), 1, (0, 1)),
        Started(2.0, 1, 3),
        Reported(3.25, 0, 1, {"loss": 0.1 + 0.2, "accuracy": float("inf")}, 0.5, energy),
        Reported(1e9 + 1 / 3, 0, 2, {"loss": 5e-324}),
        Resized(3.5, 0, (Share("cpu:0"), Share("cpu:1"))),
        Saved(4.0, 0, 2, "trial-0/2 \u00e9.pt"),
        Ended(5.0, 0, TrialStatus.FAILED, 2, "boom", "Traceback:\n\0 NUL, lone \udcff", True, True, True),
        Ended(5.0, 1, TrialStatus.PAUSED, 9),
        Ended(5.0, 1, TrialStatus.PAUSED, 9, energy=energy),
        Dropped(6.0, 1, "rung"),
        Noted(7.0, "power", {"w": [1.5, None], "deep": {"x": {}}}, 1),
        Noted(7.0, "plain", {}),
        SessionClosed(8.0, "finished", "all done"),
    ]


_text = st.text(max_size=20)  # any code points, NUL and lone surrogates included
_number = st.integers(0, 2**53)
_real = st.floats(allow_nan=False)
_time_s = st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _real | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_mapping = st.dictionaries(_text, _json, max_size=4)

measurements: st.SearchStrategy[Measurement] = st.builds(
    Measurement,
    _time_s,
    st.sampled_from(["J", "W", "s", "bytes", "g", "EUR"]),
    st.sampled_from(Source),
    st.floats(0, 10),
)

segments: st.SearchStrategy[Segment] = st.builds(
    Segment,
    st.builds(Trial, _number, _mapping, _number, st.none() | _number),
    start=_number,
    until=st.none() | _number,
    last=st.booleans(),
    copy_from=st.none() | st.builds(Checkpoint, _number, _number),
)

events: st.SearchStrategy[Event] = st.one_of(
    st.builds(SessionOpened, _time_s, _text, _number, _mapping),
    st.builds(SessionClosed, _time_s, _text, _text),
    st.builds(Submitted, _time_s, _number, st.lists(segments, max_size=3).map(tuple), _text),
    st.builds(
        Started,
        _time_s,
        _number,
        _number,
        st.lists(st.builds(Share, _text, _real), max_size=3).map(tuple),
        _number,
        st.lists(_number, max_size=3).map(tuple),
    ),
    st.builds(
        Reported,
        _time_s,
        _number,
        _number,
        st.dictionaries(_text, _real, max_size=3),
        st.none() | _real,
        st.none() | measurements,
    ),
    st.builds(Resized, _time_s, _number, st.lists(st.builds(Share, _text, _real), max_size=3).map(tuple)),
    st.builds(Saved, _time_s, _number, _number, _text),
    st.builds(
        Ended,
        _time_s,
        _number,
        st.sampled_from(TrialStatus),
        _number,
        _text,
        _text,
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Dropped, _time_s, _number, _text),
    st.builds(Noted, _time_s, _text, _mapping, st.none() | _number),
)
