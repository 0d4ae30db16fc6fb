"""Timelines: makespan, utilisation and pictures out of the journal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import penstock as pk
from penstock.core import Ended, Resized, SessionClosed, SessionOpened, Share, Started
from penstock.core.errors import InvalidInput
from penstock.report import read_timeline, timeline, timeline_svg, timeline_text, write_timeline

DONE = pk.TrialStatus.COMPLETED
A, B = Share("cpu:0"), Share("cpu:1")
# Trial 0 on a for 4 s, then on a and b for 2 s; trial 1 on half of b for 2 s; a driver that was away for 94 s; trial 2.
EVENTS = [
    SessionOpened(100.0),
    Started(100.0, 0, 0, (A,)),
    Started(101.0, 1, 0, (Share("cpu:1", 0.5),)),
    Ended(103.0, 1, DONE, 1),
    Resized(104.0, 0, (A, B)),
    Ended(106.0, 0, DONE, 9),
    SessionClosed(106.0, "interrupted"),
    SessionOpened(200.0),
    Started(202.0, 2, 0, (Share("cpu:10"),)),
    SessionClosed(204.0, "interrupted"),
]


def test_times_by_hand() -> None:
    told = timeline(EVENTS)
    assert told.devices == ("cpu:0", "cpu:1", "cpu:10")
    assert told.makespan_s == pytest.approx(10.0)  # 6 s, and 4 s of the second session
    assert told.device_s == pytest.approx(4 + 2 + 2 + 0.5 * 2 + 2)
    assert told.busy_s == pytest.approx(6 + (2 + 2) + 2)
    assert told.utilisation == pytest.approx(12 / 30)
    assert told.heatmap(10)[0] == [1.0] * 6 + [0.0] * 4
    assert told.heatmap(10)[1] == [0, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert told.heatmap(5)[1] == pytest.approx([0.5, 0.5, 1, 0, 0])
    assert "10 s" in timeline_text(told)
    assert "40%" in timeline_text(told)


def test_a_driver_that_was_killed_ends_its_stays() -> None:
    told = timeline(
        [SessionOpened(0.0), Started(1.0, 0, 0, (A,)), Started(3.0, 1, 0, (B,)), SessionOpened(50.0)]
    )
    assert [(stay.trial, stay.begin_s, stay.end_s) for stay in told.stays] == [(0, 1.0, 3.0)]


def test_devices_that_had_nothing_to_do_count() -> None:
    assert timeline(EVENTS, ["cpu:0", "cpu:11"]).utilisation == pytest.approx(12 / 40)
    assert timeline([]).utilisation == 0.0


def test_pictures(tmp_path: Path) -> None:
    told = timeline(EVENTS)
    picture = ElementTree.fromstring(timeline_svg(told, bins=10))
    bars = [e for e in picture.iter() if e.find("{http://www.w3.org/2000/svg}title") is not None]
    assert len(bars) == len(told.stays) == 5
    for name in ("t.html", "t.svg", "t.png"):
        write_timeline(told, tmp_path / name)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "t.html").read_text()
    with pytest.raises(InvalidInput, match=r"\.gif"):
        write_timeline(told, tmp_path / "t.gif")


def test_of_a_study(tmp_path: Path) -> None:
    def curve(run: pk.Run) -> None:
        run.load()
        for _ in run.epochs():
            run.save(None)
            run.report(loss=run.config["x"])

    overhead = pk.Overhead(alpha=1.2, beta=1.05, max_sharing=2, max_devices=4)
    found = {}
    for name, planner in (("fifo", None), ("fluid", pk.Fluid())):
        study = pk.Study(
            curve,
            pk.Space(x=pk.Float(0, 1)),
            minimize="loss",
            scheduler=pk.Halving(max_epochs=27),
            sampler=pk.Random(),
            executor=pk.Simulated(8, seconds=10.0, overhead=overhead),
            planner=planner,
            store=tmp_path / f"{name}.db",
        ).run()
        found[name] = read_timeline(tmp_path / f"{name}.db")
        assert found[name].makespan_s == pytest.approx(study.state.spent_s)
        told = study.summary()
        assert told["device_s"] == pytest.approx(found[name].device_s)
        assert told["devices"] == 8
        assert sum(record.device_s for record in study.trials) == pytest.approx(found[name].device_s)
        assert f"{told['utilisation']:.0%} held" in str(study)
    # One trial per device: 27 of 1 epoch in 4 rounds, 9 of 2 more in 2 rounds, 3 of 6 more, 1 of 18 more.
    assert found["fifo"].makespan_s == pytest.approx(10 * (4 * 1 + 2 * 2 + 6 + 18))
    assert found["fifo"].busy_s == pytest.approx(10 * (27 * 1 + 9 * 2 + 3 * 6 + 1 * 18))
    assert found["fluid"].utilisation > 1.3 * found["fifo"].utilisation


@pytest.mark.parametrize("name", ["t.html", "t.svg", "t.png"])
def test_a_place_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    with pytest.raises(InvalidInput, match=rf"nowhere/{name}.*folder"):
        write_timeline(timeline(EVENTS), tmp_path / "nowhere" / name)


def test_a_store_in_place_of_its_timeline_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"read_timeline\('study.db'\)"):
        write_timeline("study.db", tmp_path / "t.html")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="got 3"):
        write_timeline(3, tmp_path / "t.html")  # type: ignore[arg-type]
