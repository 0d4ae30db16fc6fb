"""The report of searches under limits, against figures worked out by hand."""

from itertools import pairwise

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.report import Sample, Search, compare_searches, comparison_text, read_journal, search_of
from penstock.study._engine import derive_seed


def sample(error, start_s, end_s, *, violates=False, queries=1, watts=50.0):
    return Sample({}, error, violates, start_s, end_s, 3, queries, {"power_w": watts, "memory_bytes": 1e9})


# Four trainings of 100 s; the best one violates the limit, one failed.
DEFAULT = Search(
    (
        sample(30.0, 0, 100),
        sample(10.0, 100, 200, violates=True, watts=120.0),
        sample(None, 200, 300),
        sample(25.0, 300, 400),
    )
)
# Five looked at before the first is trained; the third training is stopped after 10 s.
OURS = Search(
    (
        sample(26.0, 0, 40, queries=5),
        sample(24.0, 40, 80, queries=2),
        sample(90.0, 80, 90, queries=1),
        sample(20.0, 90, 130, queries=4),
    )
)


def test_curves():
    assert DEFAULT.best_by_evaluation() == [30.0, 30.0, 30.0, 25.0]
    assert DEFAULT.best_by_time() == [(100, 30.0), (400, 25.0)]
    assert DEFAULT.violations_by_evaluation() == [0, 1, 1, 1]
    assert (DEFAULT.best, DEFAULT.violations, DEFAULT.queried, DEFAULT.time_s) == (25.0, 1, 4, 400)
    assert (OURS.best, OURS.violations, OURS.queried, OURS.time_s) == (20.0, 0, 12, 130)


def test_all_samples_over_the_constraint_map():
    points = DEFAULT.constraint_map("power_w", "memory_bytes")
    assert [(p["power_w"], p["violates"]) for p in points] == [
        (50.0, False),
        (120.0, True),
        (50.0, False),
        (50.0, False),
    ]
    assert [p["error"] for p in DEFAULT.constraint_map("power_w")] == [30.0, 10.0, 25.0]


def test_times_to_samples_and_errors():
    # The first four of the five configurations were refused at once: four samples before any training.
    assert OURS.time_to_queries(4) == 0
    assert OURS.time_to_queries(5) == 40  # the fifth is the one that was trained
    assert OURS.time_to_queries(8) == 90
    assert OURS.time_to_queries(13) is None
    assert OURS.time_to_error(25.0) == 80
    assert OURS.time_to_error(19.0) is None


def test_the_tables_of_the_paper():
    quick = Search(tuple(sample(e, 10.0 * i, 10.0 * i + 10) for i, e in enumerate((25.0, 20.0, 18.0, 17.0))))
    slow = Search(tuple(sample(e, 80.0 * i, 80.0 * i + 80) for i, e in enumerate((40.0, 25.0, 24.0, 22.0))))
    (row,) = compare_searches({"Rand": ([DEFAULT, DEFAULT], [quick, slow])})
    assert row.error == ((25.0, 0.0), (19.5, 2.5))
    # 400 s against 40 s and 320 s: sqrt(10 * 1.25).
    assert row.time_to_samples.default == 400
    assert row.time_to_samples.ours == 180
    assert row.time_to_samples.gain == pytest.approx((10 * 1.25) ** 0.5)
    assert row.samples.gain == pytest.approx(1.0)
    # The default's best, 25, at 400 s; ours at 10 s and 160 s.
    assert row.time_to_error.gain == pytest.approx((40 * 2.5) ** 0.5)
    assert row.violations == (1.0, 0.0)
    text = comparison_text([row], unit_s=1.0, unit="s")
    assert "25.00 (0.00)" in text
    assert "19.50 (2.50)" in text
    assert "10.00x" in text


def test_a_method_that_never_kept_the_limits_has_a_dash_as_in_the_paper():
    hopeless = Search((sample(10.0, 0, 100, violates=True),))
    (row,) = compare_searches({"Rand-Walk": ([hopeless], [OURS])})
    assert row.error[0] is None
    assert row.time_to_error.gain is None
    assert row.samples.gain == 12.0
    assert "Rand-Walk" in comparison_text([row])
    assert " -  " in comparison_text([row])


def test_runs_come_in_pairs():
    with pytest.raises(InvalidInput, match="in pairs"):
        compare_searches({"Rand": ([DEFAULT], [])})


def test_a_study_becomes_a_search_also_from_its_journal(tmp_path):
    def train(run):
        for _ in run.epochs(3):
            run.report(error=run.config["x"], power_w=100 - run.config["x"])

    done = pk.Study(
        train,
        pk.Space(x=pk.Int(0, 99)),
        minimize="error",
        sampler=pk.Random(),
        scheduler=pk.Full(trials=10, epochs=3),
        executor=pk.Simulated(devices=1, seconds=2.0),
        limits=[pk.Quantity("twice", of=lambda c: 2 * c["x"]) <= 100],
        store=tmp_path / "s.db",
    ).run()
    made = search_of(done)
    assert [s.config["x"] for s in made.samples] == [t.config["x"] for t in done.trials]
    assert made.time_s == pytest.approx(60.0)
    assert [s.end_s - s.start_s for s in made.samples] == pytest.approx([6.0] * 10)
    assert made.queried == 10 + done.refused > 10
    assert made.best == min(t.config["x"] for t in done.trials)
    # As many as came before each in the sampler's own stream of proposals, also for who reads the journal.
    alone = pk.Random()
    alone.start(done.space, objectives=1, seed=derive_seed(done.seed, "sampler"))
    stream = [config["x"] for config in alone.ask(100)]
    kept = [place for place, x in enumerate(stream) if 2 * x <= 100][:10]
    refused = [place - before - 1 for before, place in pairwise([-1, *kept])]
    for told in (
        made,
        search_of(read_journal(tmp_path / "s.db")),
        search_of(pk.Study.load(tmp_path / "s.db")),
    ):
        assert [s.queries - 1 for s in told.samples] == refused
    assert pk.Study.load(tmp_path / "s.db").refused == done.refused == sum(refused)
    judged = search_of(read_journal(tmp_path / "s.db"), [pk.power_w <= 70])
    assert judged.violations == sum(t.config["x"] < 30 for t in done.trials) > 0
    assert judged.best == min(t.config["x"] for t in done.trials if t.config["x"] >= 30)
