"""Whatever comes from outside is read, or refused with a reason: no other exception, no hang.

``benchmarks/hardening/fuzz.py`` goes on for as long as it is let, with atheris.
"""

import json
import random
import sqlite3
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import penstock as pk
from penstock.cli._app import app
from penstock.core import from_record
from penstock.core.errors import InvalidInput, PenstockError, StoreCorrupt, StoreError
from penstock.energy import PowerProfile
from penstock.goal import Budget, Goal, Limit
from penstock.report import read_journal
from penstock.report._feed import Feed
from penstock.report.dashboard._app import make_app
from penstock.store import open_store, salvage
from penstock.testing import fuzz
from penstock.testing.events import every_event
from penstock.testing.journals import SPACE, journal

SPEC = {
    "space": SPACE,
    "goal": Goal.of("loss", None).to_json(),
    "price_per_kwh": 0.3,
    "currency": "EUR",
    "region": "FR",
}
ALL_DOMAINS = pk.Space(
    lr=pk.Float(1e-4, 1, log=True),
    batch=pk.Int(1, 64, step=3),
    optimizer=pk.Choice("sgd", "adam", 1),
    momentum=pk.Float(0, 1, when=pk.equals("optimizer", "sgd")),
    depth=pk.Int(1, 9, when=pk.greater("batch", 4) & pk.less("lr", 0.1)),
).to_json()
FORMS = [
    (Goal.from_json, Goal.of("loss", ["accuracy"]).to_json()),
    (Budget.from_json, pk.Budget(trials=3, energy_wh=2.0, finish=True).to_json()),
    (Limit.from_json, (pk.power_w <= 90).to_json()),
    (
        PowerProfile.from_json,
        {"device": "V", "world_size": 1, "max_limit_w": 250.0, "limits": [[100.0, 90.0, 3.0]]},
    ),
]
JOURNALS = [journal(seed, 6) for seed in range(4)] + [[*journal(9, 4), *every_event()[1:]]]

draws = st.randoms(use_true_random=False)
quick = settings(max_examples=40, suppress_health_check=list(HealthCheck))
slow = settings(max_examples=8, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with one study; ``tests`` overwrite it."""
    path = tmp_path_factory.mktemp("fuzz") / "s.db"
    with open_store(path, write=True) as opened:
        entry = opened.create("fuzzed", SPEC, b"work")
        opened.lock(entry.id)
        opened.append(entry.id, JOURNALS[0])
        opened.put("k", [1])
    return path, entry.id


@settings(max_examples=150)
@given(draws, st.integers(1, 3))
def test_spaces(rng, changes):
    fuzz.use_space(fuzz.mutate(ALL_DOMAINS, rng, changes))


@settings(max_examples=100)
@given(draws, st.sampled_from(FORMS), st.integers(1, 3))
def test_forms(rng, form, changes):
    read, right = form
    fuzz.read_form(read, fuzz.mutate(right, rng, changes))


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(draws, st.sampled_from(JOURNALS))
def test_records_with_right_checksums_that_say_nonsense(rng, events):
    fuzz.fold_records(fuzz.mutate_journal(events, rng), SPEC)


@slow
@given(draws, st.sampled_from(JOURNALS))
def test_sealed_journals(store, rng, events):
    path, study = store
    fuzz.seal(path, study, fuzz.mutate_journal(events, rng))
    fuzz.read_store(path)


@slow
@given(draws)
def test_descriptions_of_studies(store, tmp_path_factory, rng):
    path, study = store
    fuzz.seal(path, study, fuzz.mutate_journal([], rng))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE penstock_studies SET spec = ?", (json.dumps(fuzz.mutate(SPEC, rng, 2)),))
    fuzz.read_store(path)
    fuzz.read_form(pk.Study.load, path)


@slow
@given(draws)
def test_damaged_files(tmp_path_factory, store, rng):
    folder = tmp_path_factory.mktemp("bytes")
    whole = bytearray(store[0].read_bytes())
    for _ in range(rng.randint(1, 30)):
        whole[rng.randrange(len(whole) if rng.random() < 0.5 else 200)] = rng.randrange(256)
    (folder / "s.db").write_bytes(whole[: rng.randrange(len(whole))] if rng.random() < 0.2 else whole)
    fuzz.read_store(folder / "s.db")
    with fuzz.allowed():
        salvage(folder / "s.db", folder / "new.db")


# --- the command line -------------------------------------------------------------------------------------------------

COMMANDS = fuzz.options_of("dashboard", "measure")  # one serves until it is stopped, one runs what it is told


@st.composite
def commands(draw):
    name = draw(st.sampled_from(sorted(COMMANDS)))
    option = st.sampled_from([*COMMANDS[name], "--nope"])
    word = st.sampled_from(fuzz.WORDS) | st.text(alphabet=st.characters(exclude_characters="\0"), max_size=5)
    parts = draw(st.lists(st.tuples(word) | st.tuples(option, word) | st.tuples(option), max_size=4))
    more = ["--trials", "3", "--max-epochs", "3"] if name == "simulate" else []
    return [name, *(item for part in parts for item in part), *more]


@pytest.fixture
def workplace(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    fuzz.furnish(tmp_path, SPEC, JOURNALS[1])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(commands())
def test_commands(workplace, arguments):
    assert fuzz.run_command(arguments) in (0, 1, 2)


# --- files ------------------------------------------------------------------------------------------------------------

RATES = [b'{"a":{"v100":3.0,"p100":2.0},"b":{"v100":1}}',
         b"""{"v100":{"('ResNet', 1)":{"null":3.0,"('ResNet', 1)":[2.0,2.0]}}}"""]  # fmt: skip
JOBS = b"arrival_s,kind,trials,iterations,rungs\n0,a,9,100,2\n3,b,3,50,1\n"
TRAIN = (
    b"dataset,network,batch_size,optimizer,learning_rate,target_metric,seed,epoch\nd,n,8,sgd,0.1,0.5,1,3\n"
)
POWER = (
    b"dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\nd,n,8,sgd,100,3.5,90\n"
)
PIECES = [
    b"9" * 400,
    b",",
    b"\n",
    b"\x00",
    b"\xff",
    b'"',
    b"-",
    b"nan",
    b"1e999",
    b"[]",
    b"{}",
    b"null",
    b"(" * 3000,
]


def spoil(data: bytes, rng: random.Random) -> bytes:
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at, what = rng.randrange(len(spoiled) + 1), rng.randrange(3)
        if what == 0:
            del spoiled[at : at + 4]
        elif what == 1:
            spoiled[at:at] = rng.choice(PIECES)
        elif spoiled:
            spoiled[at % len(spoiled)] = rng.randrange(256)
    return bytes(spoiled)


@quick
@given(draws)
def test_tables(tmp_path_factory, rng):
    folder = tmp_path_factory.getbasetemp()
    fuzz.read_rates_and_jobs(spoil(rng.choice(RATES), rng), spoil(JOBS, rng), folder)
    fuzz.read_traces(spoil(TRAIN, rng), spoil(POWER, rng), folder)


# --- the dashboard ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    study = fuzz.furnish(folder, SPEC, JOURNALS[2])
    feed = Feed(str(folder / "s.db"))
    with TestClient(make_app(feed), follow_redirects=False, raise_server_exceptions=False) as made:
        assert feed.wait_read(study, 30)
        yield made


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        "/api/study/{}/{}".format, st.sampled_from([1, 0, -1, 10**30, "x"]), st.sampled_from(fuzz.VIEWS)
    )
    | st.sampled_from(fuzz.PATHS),
    st.dictionaries(
        st.sampled_from(fuzz.KEYS), st.sampled_from(fuzz.VALUES) | st.text(max_size=5), max_size=3
    ),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "OPTIONS"]),
    st.sampled_from(
        [{}, {"accept-encoding": "gzip"}, {"authorization": "Bearer"}, {"cookie": "penstock_token=1;;;="}]
    ),
)
def test_the_dashboard(client, path, query, method, headers):
    fuzz.ask(client, path, query, headers, method)


# --- what fuzzing has found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (Goal.from_json, 1e-300),
        (Goal.from_json, [{"maximize": False}]),
        (Budget.from_json, {"": 3}),
        (Limit.from_json, {"unit": "W", "bound": 90.0, "at_most": True}),
        (Limit.from_json, {"quantity": "power_w", "unit": [[]], "bound": 1.0, "at_most": True}),
        (Limit.from_json, {"quantity": "power_w", "unit": "W", "bound": "x", "at_most": True}),
        (PowerProfile.from_json, {"device": "V", "world_size": float("inf"), "max_limit_w": 1, "limits": []}),
    ],
)
def test_found_forms(read, value):
    with pytest.raises(InvalidInput, match="Not a"):
        read(value)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("reported", {"e": {}, "m": {"loss": 1.0}}),
        ("reported", {"e": 1, "m": {"loss": "low"}}),
        ("reported", {"e": 1, "m": 7}),
        ("reported", {"e": 1, "m": {"loss": 10**400}}),
        ("reported", {"e": 1, "m": {}, "s": []}),
        ("ended", {"status": "completed", "e": 1, "reason": 3}),
        ("noted", {"topic": "power_profile", "data": [1]}),
        ("started", {"shares": [[{}, "much"]]}),
    ],
)
def test_found_records(kind, data):
    with pytest.raises(StoreCorrupt, match=kind):
        from_record(kind, 1, 0.0, data)


def test_found_a_record_of_a_trial_there_is_not(tmp_path):
    path = tmp_path / "s.db"
    with open_store(path, write=True) as opened:
        study = opened.create("s", SPEC, None).id
        opened.lock(study)
        opened.append(study, [event for event in JOURNALS[0] if getattr(event, "trial", None) != 2])
    records = [(e.kind, getattr(e, "trial", None), e.time_s) for e in JOURNALS[0]]
    assert ("started", 2) in [record[:2] for record in records]
    with open_store(path, write=True) as opened:
        opened.lock(study)
        opened.append(study, [next(e for e in JOURNALS[0] if e.kind == "started" and e.trial == 2)])
        opened.append(study, [from_record("dropped", 77, 0.0, {"reason": ""})])
    told = read_journal(path)
    assert "trial 77, which was never handed out" in told.problem
    assert told.state.trials  # what stands before it is told


@pytest.mark.parametrize("name", [".", "/", "a\0b", "sqlite:///"])
def test_found_names_of_no_file(name):
    with pytest.raises((InvalidInput, StoreError)):
        open_store(name, write=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--devices", "\u00b2"],
        ["simulate", "--devices", "9" * 30],
        ["simulate", "--jobs", "3", "--devices", "v100=99999999999999"],
        ["simulate", "--jobs", "9" * 30, "--devices", "v100=1"],
    ],
)
def test_found_numbers_that_are_none(arguments):
    with pytest.raises(PenstockError):
        app(args=arguments, standalone_mode=False)


def test_found_a_list_of_jobs_in_another_encoding(tmp_path):
    from penstock.cli._cluster import read_jobs

    (tmp_path / "j.csv").write_bytes(b"arrival_s,kind\n\xff\xfe")
    with pytest.raises(InvalidInput, match="can't be read"):
        read_jobs(str(tmp_path / "j.csv"), {}, 1.0, 0)
