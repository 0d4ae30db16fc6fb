"""Studies that share a machine's devices: fair in whole devices, idle ones given back, the dead's freed."""

import math
import os
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Share
from penstock.core.errors import InvalidInput
from penstock.execute import Job, Local
from penstock.execute._pool import Pool
from penstock.plan import whole_counts

DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_whole_counts_are_max_min_fair(wants, devices):
    """Against all ways to deal whole devices out: the sorted counts are the lexicographically greatest."""
    counts = whole_counts(wants, [1.0] * len(wants), devices)
    best = max(
        (c for c in product(*(range(w + 1) for w in wants)) if sum(c) <= devices), key=lambda c: sorted(c)
    )
    assert sorted(counts) == sorted(best)
    assert all(c <= w for c, w in zip(counts, wants, strict=True))


def test_weights_count():
    assert whole_counts([9, 9], [2.0, 1.0], 6) == [4, 2]


def test_a_study_alone_has_all_and_gives_up_what_others_have_a_claim_to(tmp_path):
    one, two = Pool(tmp_path), Pool(tmp_path)
    one.join()
    assert one.update(DEVICES, (), 0.0)
    assert one.mine == set(DEVICES)
    two.join()
    two.update(DEVICES, (), 0.0)
    assert not two.mine  # all are held
    assert one.update(DEVICES, ("cpu:0", "cpu:1", "cpu:2"), 1.0)  # one is idle: it goes at once
    assert one.mine == {"cpu:0", "cpu:1", "cpu:2"}
    assert one.leaving == {"cpu:2"}  # busy: what runs there is to make room
    two.update(DEVICES, (), 1.0)
    assert two.mine == {"cpu:3"}
    one.update(DEVICES, ("cpu:0", "cpu:1"), 2.0)
    two.update(DEVICES, ("cpu:3",), 2.0)
    assert (one.mine, one.leaving, two.mine) == ({"cpu:0", "cpu:1"}, set(), {"cpu:2", "cpu:3"})
    two.leave()
    one.update(DEVICES, ("cpu:0", "cpu:1"), 3.0)
    assert one.mine == set(DEVICES)


def test_what_is_idle_for_a_minute_goes_back_until_it_is_needed_again(tmp_path):
    pool = Pool(tmp_path)
    pool.join()
    for now_s in (0.0, 59.0):
        pool.update(DEVICES, ("cpu:0",), now_s)
        assert pool.mine == set(DEVICES)
    pool.update(DEVICES, ("cpu:0",), 61.0)
    assert pool.mine == {"cpu:0"}
    pool.update(DEVICES, (), 500.0)  # the last one is kept
    assert pool.mine == {"cpu:0"}
    pool.started()
    pool.update(DEVICES, ("cpu:0",), 501.0)
    assert pool.mine == set(DEVICES)


def test_the_devices_of_a_study_that_was_killed_are_free(tmp_path):
    code = (
        "import sys, time; from penstock.execute._pool import Pool; p = Pool(sys.argv[1]); p.join(); "
        f"p.update({DEVICES}, {DEVICES}, 0.0); print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    pool = Pool(tmp_path)
    pool.join()
    pool.update(DEVICES, (), 0.0)
    assert not pool.mine
    child.kill()
    child.wait()
    child.stdout.close()
    pool.update(DEVICES, (), 1.0)
    assert pool.mine == set(DEVICES)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".study")] == [pool._path.name]


def test_a_device_that_is_kept_for_a_trial_that_is_to_spread_is_not_given_away(tmp_path):
    executor = Local(2, shared=tmp_path / "pool", threads=1)
    executor.open(Job(print, tmp_path / "files", ("loss",)))
    try:
        assert executor._pool.mine == {"cpu:0", "cpu:1"}
        executor._book.holdings.hold([Share("cpu:1")])  # until the trial's next report
        other = Pool(tmp_path / "pool")
        other.join()
        other.update(["cpu:0", "cpu:1"], (), 0.0)
        executor._shared_out_s = -math.inf
        executor.poll(0.0)
        other.update(["cpu:0", "cpu:1"], (), 1.0)
        assert (executor._pool.mine, other.mine) == ({"cpu:1"}, {"cpu:0"})
    finally:
        executor.close()
        other.leave()


def test_a_weight_is_above_zero(tmp_path):
    with pytest.raises(InvalidInput, match="weight"):
        Pool(tmp_path, weight=0)
