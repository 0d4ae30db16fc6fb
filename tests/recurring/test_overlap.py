"""Overlapping jobs from an arrival trace (Zeus section 6.3)."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from penstock.core.errors import InvalidInput
from penstock.recurring import Arrival, make_policy, replay_arrivals, synthetic_arrivals
from penstock.recurring._overlap import _kmeans, assign, read_arrivals, typical_runtime_s
from penstock.recurring._replay import replay


def test_clusters_minimise_the_spread_by_brute_force():
    rng = random.Random(2)
    points = {f"g{i}": rng.uniform(0, 10) for i in range(9)}

    def spread(groups):
        total = 0.0
        for group in groups:
            mean = sum(points[g] for g in group) / len(group)
            total += sum((points[g] - mean) ** 2 for g in group)
        return total

    names = sorted(points, key=points.__getitem__)
    best = min(
        spread([names[:i], names[i:j], names[j:]]) for i, j in itertools.combinations(range(1, len(names)), 2)
    )
    assert spread(_kmeans(points, 3)) == pytest.approx(best)


def test_groups_are_matched_with_workloads_in_the_order_of_runtimes(make_workload):
    fast, slow = make_workload(least=3.0), make_workload(least=60.0)
    arrivals = [Arrival("a", t, 100.0) for t in range(3)] + [Arrival("b", t, 9000.0) for t in range(3)]
    matched = assign(arrivals, [slow, fast])
    assert matched["a"] == (fast, 100.0)
    assert matched["b"] == (slow, 9000.0)


def test_jobs_that_do_not_overlap_replay_as_in_sequence(make_workload):
    workload = make_workload(noise=0.0)
    far = 100 * typical_runtime_s(workload)
    arrivals = [Arrival("g", n * far, 50.0) for n in range(20)]
    done = replay_arrivals(arrivals, [workload], lambda w: make_policy("zeus", w, 0.5), seed=1)
    alone = replay(workload, make_policy("zeus", workload, 0.5), recurrences=20, seed=1)
    assert done.most_in_flight == 1
    assert [r.batch_size for r in done.runs[:12]] == [s.batch_size for s in alone.steps[:12]]
    assert done.totals()["small"]["cost"] == pytest.approx(sum(s.cost for s in alone.steps), rel=0.05)


def test_runtimes_scale_by_the_ratio_to_the_cluster_s_mean(make_workload):
    workload = make_workload(noise=0.0)
    arrivals = [Arrival("g", 0.0, 100.0), Arrival("g", 1e9, 300.0)]
    done = replay_arrivals(arrivals, [workload], lambda w: make_policy("default", w, 0.5))
    short, long = done.runs
    assert long.time_s == pytest.approx(3 * short.time_s)
    assert long.energy_j == pytest.approx(3 * short.energy_j)
    assert short.end_s - short.start_s == pytest.approx(short.time_s)


@pytest.mark.parametrize("name", ["zeus", "ours", "grid"])
def test_every_arrival_reaches_its_target_once(make_workload, name):
    workload = make_workload(noise=0.1, fails_below=16)
    arrivals = synthetic_arrivals([workload], groups=2, recurrences=30, overlap=4.0)
    done = replay_arrivals(arrivals, [workload], lambda w: make_policy(name, w, 0.5))
    assert sum(r.reached for r in done.runs) == 60
    assert done.most_in_flight > 2
    assert all(math.isfinite(r.cost) and r.cost >= 0 for r in done.runs)


def test_overlapping_jobs_still_save_against_the_default(make_workload):
    workload = make_workload()
    arrivals = synthetic_arrivals([workload], groups=2, recurrences=50, overlap=3.0)
    cost = {
        name: replay_arrivals(arrivals, [workload], lambda w, n=name: make_policy(n, w, 0.5)).totals()[
            "small"
        ]["cost"]
        for name in ("zeus", "ours", "default")
    }
    assert cost["ours"] < cost["zeus"] < cost["default"]


def test_reading_arrivals(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("group,start_time,end_time\na,0,10\na,5,7\nb,1,1\n")
    assert read_arrivals(path) == [Arrival("a", 0.0, 10.0), Arrival("a", 5.0, 2.0)]
    path.write_text("group,start_time\na,0\n")
    with pytest.raises(InvalidInput, match="line 2"):
        read_arrivals(path)
    with pytest.raises(InvalidInput, match="Can't read"):
        read_arrivals(tmp_path / "none.csv")
