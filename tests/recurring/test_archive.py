"""A job's long memory: archived in chunks, whatever cuts that short, and no decision depends on it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import VirtualClock
from penstock.core.errors import StoreCorrupt, StoreUnwritable
from penstock.recurring import Decision, History, JobSpec, RecurringJob, Result
from penstock.recurring._curve import Curve
from penstock.recurring._history import decision_to_json, result_to_json
from penstock.recurring._zeus import Zeus
from penstock.report._feed import Feed
from penstock.report.views import recurring
from penstock.store import Store, open_store
from penstock.store._chunks import CHUNK, all_whole

SIZES = [8, 16, 32, 64]
KEY = "recurring/n"


def job_on(store, **more) -> RecurringJob:
    return RecurringJob("n", batch_sizes=SIZES, default=32, store=store, clock=VirtualClock(), **more)


def observe(job: RecurringJob, decision: Decision, rng: random.Random) -> None:
    epochs = 10.0 + rng.random() + 40.0 / decision.batch_size
    time_s = epochs * (1.0 + decision.batch_size / 50.0)
    job.observe(decision, epochs=epochs, time_s=time_s, energy_j=100.0 * time_s, reached=True)


def old_records(count: int) -> list[dict[str, object]]:
    """What the first layout kept: everything in one list."""
    rng = random.Random(3)
    records: list[dict[str, object]] = []
    for n in range(count):
        records.append({"d": decision_to_json(Decision(n, rng.choice(SIZES), decided_s=float(n)))})
        epochs = 8.0 + 4.0 * rng.random()
        records.append({"r": result_to_json(Result(n, epochs, epochs, 90.0 * epochs, rng.random() < 0.9))})
    return records


def test_only_the_latest_records_are_rewritten(tmp_path: Path):
    path, rng = tmp_path / "a.db", random.Random(0)
    with job_on(path) as job:
        made = []
        for _ in range(5 * CHUNK):
            ticket = job.decide()
            made.append(ticket)
            observe(job, ticket, rng)
    with open_store(path, write=False) as store:
        head = store.get(KEY)
        assert len(head["records"]) < 2 * CHUNK
        assert head["archived"] == len(store.keys(KEY + "/")) >= 8
        whole = all_whole(store, "recurring/")
        assert list(whole) == ["n"]
        assert len(whole["n"]["records"]) == 10 * CHUNK
    with job_on(path) as job:
        assert list(job.history.decisions.values()) == made
        assert job.status()["results"] == 5 * CHUNK
        assert job.decide().number == 5 * CHUNK


@pytest.mark.parametrize("policy", ["ours", "zeus"])
def test_a_store_of_the_old_layout_goes_on(tmp_path: Path, policy):
    records = old_records(3 * CHUNK)
    path = tmp_path / "old.db"
    with open_store(path, write=True) as store:
        store.put(KEY, {"format": 1, "records": records, "max_power_w": 90.0})
    spec = JobSpec(tuple(SIZES), 32, max_power_w=90.0)
    known = History.fold(records)
    choice = {"ours": Curve(), "zeus": Zeus()}[policy].choose(known.view(spec), known.next_number)
    with job_on(path, policy=policy) as job:
        ticket = job.decide()
        assert (ticket.number, ticket.batch_size, ticket.cost_limit) == (
            3 * CHUNK,
            choice.batch_size,
            choice.cost_limit,
        )
        observe(job, ticket, random.Random(0))
    with open_store(path, write=False) as store:
        assert len(store.get(KEY)["records"]) < 2 * CHUNK
        assert all_whole(store, "recurring/")["n"]["records"][: len(records)] == records
    with job_on(path, policy=policy) as job:
        assert len(job.history.results) == 3 * CHUNK + 1


class Failing:
    """A store whose writes fail from a certain one on, as on a full disk or with a process that is killed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.left = 10**9

    def _spend(self) -> None:
        if self.left <= 0:
            raise StoreUnwritable("The disk is full.")
        self.left -= 1

    def get(self, key):
        return self.store.get(key)

    def put(self, key, value):
        self._spend()
        self.store.put(key, value)

    def update(self, key, change):
        self._spend()
        return self.store.update(key, change)


@pytest.mark.parametrize("allowed", [1, 2, 3, 4])
def test_archiving_cut_short_loses_nothing(allowed):
    """The first write is the result itself; then come two chunks and the shorter value."""
    records = old_records(CHUNK + CHUNK // 2)[:-1]  # three chunks, but for the last result
    with open_store(None, write=True) as store:
        store.put(KEY, {"format": 1, "records": records, "max_power_w": 90.0})
        failing = Failing(store)
        job = job_on(failing)
        ticket = job.history.pending[0]
        failing.left = allowed
        observe(job, ticket, random.Random(0))  # it is kept, whatever becomes of the archive
        failing.left = 10**9
        assert len(store.keys(KEY + "/")) == min(allowed - 1, 2)
        for other in (job, job_on(store)):
            assert len(other.history.results) == CHUNK + CHUNK // 2
            assert other.history.pending == []
        observe(job, job.decide(), random.Random(1))
        assert store.get(KEY)["archived"] == 2
        assert all_whole(store, "recurring/")["n"]["records"][: len(records)] == records
        assert job_on(store).history.next_number == CHUNK + CHUNK // 2 + 1


@settings(max_examples=8)
@given(st.data())
def test_jobs_on_one_store_decide_as_one(data):
    """Several that take turns in any order know the same as one that was there all the time."""
    seed = data.draw(st.integers(0, 2**16))
    with open_store(None, write=True) as store, open_store(None, write=True) as other:
        jobs = [job_on(store, policy="zeus") for _ in range(3)]
        alone = job_on(other, policy="zeus")
        rng, again = random.Random(seed), random.Random(seed)
        turns = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=7))
        for turn in turns:  # one does a lot while the others fall behind
            for _ in range(random.Random(f"{seed}/{turn}").choice([1, 3, CHUNK])):
                ticket, expected = jobs[turn].decide(), alone.decide()
                assert ticket == expected
                observe(jobs[turn], ticket, rng)
                observe(alone, expected, again)
        for job in jobs:
            assert job.status() == alone.status()


def test_a_chunk_that_is_gone_or_anothers_is_said(tmp_path: Path):
    path, rng = tmp_path / "c.db", random.Random(0)
    with job_on(path) as job:
        for _ in range(2 * CHUNK):
            observe(job, job.decide(), rng)
    with open_store(path, write=True) as store:
        store.put(KEY + "/1", {"id": "another", "records": [{"x": 1}] * CHUNK})
    with job_on(path) as job, pytest.raises(StoreCorrupt, match="recurring/n/1"):
        job.decide()


def test_another_history_in_its_place_is_read_anew():
    with open_store(None, write=True) as store:
        job, rng = job_on(store), random.Random(0)
        for _ in range(2 * CHUNK):
            observe(job, job.decide(), rng)
        store.put(KEY, {"format": 1, "records": old_records(5)})
        assert job.decide().number == 5
        assert len(job.history.results) == 5


def test_the_dashboard_sees_all_of_it_with_the_jobs_own_eta(tmp_path: Path):
    path, rng = tmp_path / "d.db", random.Random(0)
    with job_on(path, eta=0.25, policy="zeus", max_power_w=200.0) as job:
        for _ in range(2 * CHUNK):
            observe(job, job.decide(), rng)
        results = job.history.results
        feed = Feed(path)
        feed.start()
        try:
            jobs = feed.jobs()
        finally:
            feed.close()
    assert list(jobs) == ["n"]
    told = recurring("n", jobs["n"])
    assert len(told["runs"]) == 2 * CHUNK
    assert told["policy"] == "zeus"
    assert told["eta"] == 0.25
    power_w = told["max_power_w"]
    for run, result in zip(told["runs"], results, strict=True):
        assert run["cost"] == pytest.approx(0.25 * result.energy_j + 0.75 * power_w * result.time_s)


steps = st.tuples(
    st.sampled_from(SIZES),
    st.sampled_from(["", "B"]),
    st.floats(1.0, 60.0),
    st.sampled_from(["reached", "reached", "reached", "stopped", "crashed", "open"]),
    st.booleans(),
)


@given(st.lists(steps, min_size=1, max_size=60), st.sampled_from([None, 7]), st.integers(1, 5))
def test_what_policies_remember_changes_no_decision(given_steps, window, every):
    """Choosing now and then on one growing history is as choosing once on a new one, on any device, with any drift."""
    spec = JobSpec(tuple(SIZES), 32, window=window, limits_w=(100.0, 200.0), max_power_w=200.0)
    history, records, older = History(), [], None
    for n, (size, device, epochs, end, explore) in enumerate(given_steps):
        records.append({"d": decision_to_json(Decision(n, size, 100.0, explore=explore, device=device))})
        if end != "open":
            result = Result(
                n,
                epochs,
                epochs * (2.0 if device else 1.0),
                90.0 * epochs,
                end == "reached",
                error="no memory" if end == "crashed" else "",
            )
            records.append({"r": result_to_json(result)})
        for record in records[-2:] if end != "open" else records[-1:]:
            history.apply(json.loads(json.dumps(record)))
        if n % every:
            continue
        for policy in (Curve(), Zeus()):
            for where in ("", "B"):
                fresh = History.fold(records).view(spec, where)
                view = history.view(spec, where)
                assert view.seen == fresh.seen
                assert policy.choose(view, n + 1) == policy.choose(fresh, n + 1)
                if older is not None and older[0] is type(policy) and older[1].spec == spec:
                    assert policy.choose(older[1], older[2]) == older[3]
                if older is None:
                    older = type(policy), view, n + 1, policy.choose(view, n + 1)
