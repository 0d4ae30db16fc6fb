"""The dashboard over HTTP: every view, the token, the headers, errors as JSON, and that nothing is written."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.core import SessionOpened
from penstock.core.errors import InvalidInput, PenstockError, StoreError
from penstock.report import _feed, views
from penstock.report._feed import Feed
from penstock.report._static import write_report
from penstock.report.dashboard import serve
from penstock.report.dashboard._app import _stream, make_app
from penstock.report.dashboard._assess import Assessor
from penstock.report.views import Folded, Options
from penstock.store import open_store
from penstock.testing.journals import SPACE, journal

VIEWS = ("overview", "history", "curves", "table", "pareto", "importance", "parallel", "devices", "power", "sm2",
         "coordinate_check", "limits", "log")  # fmt: skip
LOCAL = ("127.0.0.1", "localhost", "testserver")
TOKEN = "correct horse battery"


@contextmanager
def client_of(store: str, *, token: str | None = None, hosts: tuple[str, ...] | None = LOCAL):
    feed = Feed(store)
    with TestClient(make_app(feed, token=token, hosts=hosts), follow_redirects=False) as client:
        for entry in feed.studies():
            assert not entry.events or feed.wait_read(entry.id, 30)
        yield client


@pytest.fixture(scope="module")
def client(store):
    with client_of(store) as client:
        yield client


def newest(client: TestClient) -> int:
    return client.get("/api/studies").json()["studies"][0]["id"]


def test_the_studies(client):
    told = client.get("/api/studies").json()
    assert [each["name"] for each in told["studies"]] == ["<script>alert(1)</script>", "first"]
    assert told["problem"] == ""


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers(client, view):
    answer = client.get(f"/api/study/{newest(client)}/{view}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    answer.json()


def test_views_say_what_the_pure_functions_say(client, simulated):
    study = newest(client)
    assert client.get(f"/api/study/{study}/overview").json() == json.loads(
        json.dumps(views.overview(simulated))
    )
    told = client.get(
        f"/api/study/{study}/table", params={"sort": "loss", "filter": "y < 0.5", "limit": 5}
    ).json()
    assert told == json.loads(
        json.dumps(views.table(simulated, Options(sort="loss", filter="y < 0.5", limit=5)))
    )
    history = views.history_figure(views.history(simulated, Options(x="epochs")))
    assert client.get(f"/api/study/{study}/history?x=epochs").json()["figure"] == json.loads(
        json.dumps(history)
    )
    trial = client.get(f"/api/study/{study}/trial?trial=7").json()
    assert trial["config"] == dict(simulated.state.trials[7].config)


def test_other_studies_of_the_store_can_be_seen(client):
    other = client.get("/api/studies").json()["studies"][1]
    told = client.get(f"/api/study/{other['id']}/overview").json()
    assert (told["name"], told["trials"]["total"]) == ("first", 5)


@pytest.mark.parametrize(
    "path", ["/", "/static/app.js", "/api/studies", "/nonsense", "/api/study/1/overview"]
)
def test_every_answer_has_the_strict_headers(client, path):
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_outside(client):
    page = client.get("/").text
    assert page.count("<script") == page.count('<script src="/static/') == 1
    assert "<style" not in page
    assert " style=" not in page
    assert " on" not in page.replace(" on ", "").split("<body>")[1].split("</body>")[0].replace(" only", "")
    for text in (page, client.get("/static/app.js").text, client.get("/static/app.css").text):
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    script = client.get("/static/app.js").text
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in script


def test_plotly_comes_from_the_installed_package(client):
    import plotly

    answer = client.get("/static/plotly.min.js")
    installed = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert answer.content == installed.read_bytes()
    again = client.get("/static/plotly.min.js", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/nonsense", 404, "nothing at /nonsense"),
        ("/api/study/99/overview", 404, "no study 99"),
        ("/api/study/99/stream", 404, "no study 99"),
        ("/api/study/{}/nonsense", 404, "no view 'nonsense'"),
        ("/api/study/{}/trial?trial=999", 404, "no trial 999"),
        ("/api/study/{}/trial?trial=-1", 400, "between 0 and"),
        ("/api/study/{}/trial?trial=x", 400, "whole number"),
        ("/api/study/{}/trial", 400, "Which trial"),
        ("/api/study/{}/table?sort=nonsense", 404, "no column 'nonsense'"),
        ("/api/study/{}/table?filter=x%20%3C%20abc", 400, "'x' has numbers, and 'abc' is none"),
        ("/api/study/{}/table?filter=x%20%3E=", 400, "'x' has numbers"),
        ("/api/study/{}/history?x=nonsense", 400, "x takes one of"),
        ("/api/study/{}/history?nonsense=1", 404, "no parameter 'nonsense'"),
        ("/api/recurring?job=x", 404, "no recurring job 'x'"),
        ("/static/../_app.py", 404, "nothing at"),
        ("/static/..%2f_app.py", 404, ""),
        ("/static/index.html", 404, "no file"),
    ],
)
def test_errors_are_json_with_a_reason(client, path, status, reason):
    answer = client.get(path.format(newest(client)))
    assert answer.status_code == status
    assert answer.json()["error"]["status"] == status
    assert reason in answer.json()["error"]["reason"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_shows(client, method):
    answer = client.request(method, "/api/studies")
    assert answer.status_code == 405
    assert method in answer.json()["error"]["reason"]


def test_a_foreign_name_for_this_machine_is_refused(client):
    answer = client.get("/api/studies", headers={"host": "evil.example:8391"})
    assert answer.status_code == 400
    assert client.get("/api/studies", headers={"host": "localhost:8391"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("LocalHost", 200),
        ("localhost.", 200),
        ("localhost.:8391", 200),
        ("127.0.0.1:80", 200),
        ("localhost:", 400),
        ("localhost:80a", 400),
        ("localhost:80@evil.example", 400),
        ("evil.example:127.0.0.1", 400),
        ("localhost.evil.example", 400),
        ("[::1]:8391", 400),  # not among this one's names
        ("[::1", 400),
        ("", 400),
    ],
)
def test_the_host_is_compared_as_names_are(client, host, status):
    assert client.get("/api/studies", headers={"host": host}).status_code == status


def test_a_token_is_asked_for_and_leaves_the_address(store):
    with client_of(store, token=TOKEN, hosts=None) as client:
        for path in (
            "/",
            "/static/app.js",
            "/static/plotly.min.js",
            "/api/studies",
            "/api/study/1/overview",
            "/x",
        ):
            refused = client.get(path)
            assert refused.status_code == 401
            assert "token" in refused.json()["error"]["reason"]
            assert "content-security-policy" in refused.headers
        for wrong in ("", "x", TOKEN[:-1], TOKEN + "x", "\u00e9"):
            assert client.get("/", params={"token": wrong}).status_code == 401
            cookie = {"cookie": f"penstock_token_80={wrong.encode().hex()}"}
            assert client.get("/", headers=cookie).status_code == 401
        assert client.get("/api/studies", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        answer = client.get("/", params={"token": TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/").status_code == 200  # by the cookie now
        assert client.get("/api/studies").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["//evil.example/.", "///evil.example", "/\\evil.example", "/%2fevil.example", "/%5cevil.example/"],
)
def test_the_token_leads_to_no_other_host(store, path):
    with client_of(store, token=TOKEN, hosts=None) as client:
        answer = client.get(f"http://testserver{path}?token={TOKEN.replace(' ', '%20')}")
        assert answer.status_code == 303
        assert urllib.parse.urljoin("http://testserver/", answer.headers["location"]).startswith(
            "http://testserver/evil.example"
        )


def test_the_cookie_is_of_this_port_alone(store):
    feed = Feed(store)
    with TestClient(make_app(feed, token=TOKEN), "http://testserver:8391", follow_redirects=False) as client:
        cookies = client.get("/", params={"token": TOKEN}).cookies
        assert list(cookies) == ["penstock_token_8391"]
        kept = cookies["penstock_token_8391"]
        client.cookies.clear()
        other = {"cookie": f"penstock_token_8392={kept}; penstock_token={kept}"}
        assert client.get("/", headers=other).status_code == 401
        assert client.get("/", headers={"cookie": f"penstock_token_8391={kept}"}).status_code == 200


@pytest.mark.parametrize(
    "token", ["\u00e9" * 16, "sixteen&letters#", "sixteen+letters%", "sixteen letters ", "short"]
)
def test_tokens_that_can_be_guessed_or_are_no_part_of_an_address_are_refused(store, token):
    with pytest.raises(InvalidInput, match="can be guessed" if token == "short" else "part of an address"):
        serve(store, token=token)


def test_missing_stores_are_refused(store):
    with pytest.raises(StoreError, match="no store"):
        serve(Path(store).parent / "nonsense.db")


def test_trial_data_stays_text(client):
    """Tags in names and configurations go out as JSON strings; figures carry them escaped, for Plotly reads tags."""
    study = newest(client)
    assert client.get(f"/api/study/{study}/overview").json()["name"] == "<script>alert(1)</script>"
    for view in ("history", "curves", "pareto", "parallel", "devices"):
        figure = json.dumps(client.get(f"/api/study/{study}/{view}").json()["figure"])
        assert "<img" not in figure
        assert "<script" not in figure
        if view in ("history", "parallel"):
            assert "&lt;img" in figure


@hypothesis_settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    view=st.sampled_from([*VIEWS, "trial", "stream2", "\u2603"]),
    query=st.dictionaries(
        st.sampled_from(
            [
                "objective",
                "metric",
                "x",
                "trial",
                "limit",
                "offset",
                "sort",
                "filter",
                "job",
                "descending",
                "z",
            ]
        ),
        st.text(max_size=12)
        | st.integers(-5, 10**18).map(str)
        | st.sampled_from(["loss", "time", "y < 0.5", "a ~ b"]),
        max_size=4,
    ),
)
def test_any_request_is_answered_in_json(client, view, query):
    answer = client.get(f"/api/study/{newest(client)}/{view}", params=query)
    assert answer.status_code in (200, 400, 404)
    told = answer.json()
    if answer.status_code != 200:
        assert told["error"]["reason"]


def test_the_store_is_not_touched(store):
    folder = Path(store).parent
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir() if path.is_file()
    }
    with client_of(store) as client:
        for view in VIEWS:
            if view != "importance":  # made of the same fold, by a process that knows of no store
                client.get(f"/api/study/{newest(client)}/{view}")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()} == before


def test_importance_is_found_by_a_process_that_survives_bad_questions_and_is_replaced_when_it_died():
    given = {"metric": "loss", "maximize": False, "space": None, "scored": 2}
    given["trials"] = [({"lr": 0.1, "act": "relu"}, 1.0), ({"lr": 0.2, "act": "relu"}, 2.0)]
    assessor = Assessor()
    try:
        assert assessor.assess(given) == views.importance(given)
        with pytest.raises(PenstockError, match="KeyError"):
            assessor.assess({"trials": []})
        first = assessor._process
        assert assessor.assess(given)["left_out"] == ["act"]
        assert assessor._process is first
        first.kill()
        assert assessor.assess(given)["left_out"] == ["act"]
        last = assessor._process
    finally:
        assessor.close()
    assert last is not first
    assert last.poll() is not None
    with pytest.raises(PenstockError, match="closing"):
        assessor.assess(given)


def test_the_process_of_importance_imports_nothing_from_the_folder_it_is_started_in(tmp_path, monkeypatch):
    for name in ("optuna", "sklearn", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    given = {"metric": "loss", "maximize": False, "space": None, "scored": 2}
    given["trials"] = [({"lr": 0.1, "act": "relu"}, 1.0), ({"lr": 0.2, "act": "relu"}, 2.0)]
    assessor = Assessor()
    try:
        assert assessor.assess(given)["left_out"] == ["act"]
    finally:
        assessor.close()
    assert not (tmp_path / "executed").exists()


def messages(feed: Feed, study: int | None, steps) -> list[dict]:
    """What a stream says: each step is done after one message, and the next message is waited for."""

    async def listen() -> list[dict]:
        found = []
        stream = _stream(feed, study)
        for step in [*steps, None]:
            async with asyncio.timeout(120):
                found.append(json.loads((await anext(stream)).decode().partition("data: ")[2]))
            if step is not None:
                step()
        return found

    return asyncio.run(listen())


RECORDS = [
    {"d": {"n": 0, "b": 32, "t": 0.0}},
    {"r": {"n": 0, "epochs": 3, "s": 10.0, "j": 100.0, "reached": True}},
]


def test_a_store_without_a_study_is_listened_to_until_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_feed, "POLL_S", 0.05)
    with open_store(tmp_path / "s.db", write=True) as writer:
        feed = Feed(tmp_path / "s.db")
        feed.start()
        try:
            steps = (
                lambda: writer.put("recurring/nightly", {"format": 1, "records": []}),
                lambda: writer.create("first", spec(), None),
            )
            empty, job, study = messages(feed, None, steps)
        finally:
            feed.close()
    assert (empty["studies"], job["studies"], study["studies"]) == (0, 0, 1)
    assert empty["jobs"] < job["jobs"] == study["jobs"]


def test_a_new_run_of_a_recurring_job_is_told_to_who_looks_at_a_study(tmp_path, monkeypatch):
    monkeypatch.setattr(_feed, "POLL_S", 0.05)
    with open_store(tmp_path / "s.db", write=True) as writer:
        entry = writer.create("idle", spec(), None)
        writer.put("recurring/nightly", {"format": 1, "records": RECORDS[:1]})
        feed = Feed(tmp_path / "s.db")
        with TestClient(make_app(feed)) as client:
            told = client.get("/api/studies").json()
            steps = [lambda: writer.put("recurring/nightly", {"format": 1, "records": RECORDS})]
            before, after = messages(feed, entry.id, steps)
            runs = client.get("/api/recurring", params={"job": "nightly"}).json()["runs"]
    assert told["jobs"] == ["nightly"]
    assert told["jobs_version"] == before["jobs"] < after["jobs"]
    assert [run["state"] for run in runs] == ["reached"]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        5,
        [1],
        {"records": "text"},
        {"records": [5]},
        {"records": [{"d": {}}]},
        {"records": [RECORDS[0], {"r": {"n": 0}}]},
        {"records": [], "eta": "x"},
        {"archived": "x", "records": []},
        {"archived": 3, "records": []},
        {"archived": 1},
    ],
)
def test_a_foreign_value_among_recurring_jobs_is_said_and_harms_nothing_else(tmp_path, value):
    with open_store(tmp_path / "s.db", write=True) as writer:
        writer.create("study", spec(), None)
        writer.put("recurring/mine", {"format": 1, "records": RECORDS})
        writer.put("recurring/odd", value)
    with client_of(str(tmp_path / "s.db")) as client:
        assert client.get("/api/studies").json()["jobs"] == ["mine", "odd"]
        assert client.get("/api/studies").json()["problem"] == ""
        assert len(client.get("/api/recurring?job=mine").json()["runs"]) == 1
        answer = client.get("/api/recurring?job=odd")
        assert answer.status_code == 503
        assert "'recurring/odd" in answer.json()["error"]["reason"]
        assert client.get("/api/study/1/overview").status_code == 200
    write_report(tmp_path / "s.db", tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "recurring/odd" in text
    assert "Recurring job mine" in text


def spec() -> dict[str, object]:
    return {"goal": [{"metric": "loss", "maximize": False}], "space": SPACE}


def test_a_growing_journal_is_followed_and_equals_one_fold(tmp_path, monkeypatch):
    monkeypatch.setattr(_feed, "POLL_S", 0.05)
    path = tmp_path / "s.db"
    events = journal(5, trials=40)
    with open_store(path, write=True) as writer:
        entry = writer.create("grows", spec(), None)
        writer.lock(entry.id)
        feed = Feed(path)
        feed.start()
        try:
            for at in range(0, len(events), 37):
                writer.append(entry.id, events[at : at + 37])
                assert_until(lambda at=at: feed.progress(entry.id)[0] == min(at + 37, len(events)))
                with feed.view(entry.id) as folded:
                    whole = Folded.of("grows", folded.goal, events[: at + 37], spec())
                    assert views.overview(folded) == views.overview(whole)
                    assert views.history(folded) == views.history(whole)
                    assert views.devices(folded) == views.devices(whole)
        finally:
            feed.close()


def assert_until(test, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_events_that_contradict_themselves_are_said_not_raised(tmp_path):
    from penstock.core import Reported

    with open_store(tmp_path / "s.db", write=True) as writer:
        entry = writer.create("odd", spec(), None)
        writer.lock(entry.id)
        writer.append(entry.id, [SessionOpened(0.0), Reported(1.0, 7, 1, {"loss": 1.0})])
        feed = Feed(tmp_path / "s.db")
        with TestClient(make_app(feed)) as client:
            assert_until(lambda: client.get("/api/study/1/overview").json()["problem"])
            assert "can't be" in client.get("/api/study/1/overview").json()["problem"]
            assert client.get("/api/studies").status_code == 200


@contextmanager
def served(store: str, *options: str):
    """The command itself, on a port of its own; gives the address it prints."""
    code = "from penstock.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "dashboard", store, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def status_of(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_command_asks_for_a_token_on_any_other_host(store):
    with served(store, "--host", "0.0.0.0") as address:
        place, _, token = address.partition("?token=")
        assert len(token) >= 32
        assert "0.0.0.0" not in place
        port = urllib.parse.urlsplit(place).port
        cookies = urllib.request.HTTPCookieProcessor()
        browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)
        with browser.open(address, timeout=120) as answer:  # what it prints can be opened
            assert answer.status == 200
        here = f"http://127.0.0.1:{port}/"
        assert status_of(here) == status_of(here + "api/studies") == status_of(here + "?token=x") == 401
        request = urllib.request.Request(here + "api/studies", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 200


def test_the_command_serves_on_loopback_and_streams(store):
    with served(store) as address:
        check_stream(address.rstrip("/"))


def test_it_ends_in_good_order_while_a_page_is_open(store):
    code = "from penstock.cli import main; main()"
    command = [sys.executable, "-c", code, "dashboard", store, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}api/stream", timeout=120) as stream:
            assert stream.readline().startswith(b"event: change")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=120)
    assert "Traceback" not in said
    assert "ERROR" not in said


def check_stream(served: str) -> None:
    assert served.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{served}/api/studies", timeout=120) as answer:
        study = json.load(answer)["studies"][0]
    told: list[str] = []

    def listen() -> None:
        with urllib.request.urlopen(f"{served}/api/study/{study['id']}/stream", timeout=120) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for raw in stream:
                line = raw.decode()
                if line.startswith("data: "):
                    told.append(line[6:])
                    if json.loads(told[-1])["read"] == study["events"]:
                        return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert json.loads(told[-1])["status"] == "finished"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(
            urllib.request.Request(f"{served}/", headers={"host": "evil.example"}), timeout=120
        )
