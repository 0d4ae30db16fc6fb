"""The dashboard's web application: one page, its files, JSON views and a stream of changes. Read-only."""

from __future__ import annotations

import asyncio
import gzip
import hmac
import ipaddress
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import InvalidInput, MissingDependency, PenstockError
from penstock.report._feed import Feed
from penstock.report.dashboard._views import Kitchen, encoded, options_of

_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""The hash of an empty style element: Plotly adds one and fills it by rules, which needs no inline style."""

CSP = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {_EMPTY}; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
COOKIE = "penstock_token"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = ("app.css", "app.js", "icon.svg")
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_BEAT_S = 15.0
_LEAST_S = 0.4  # between two messages of a stream


def make_app(feed: Feed, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> ASGIApp:
    """The application over a feed, which it starts and closes.

    Args:
        feed: Of the store to show.
        token: Asked of every request, if given.
        hosts: Names by which it may be called; others are refused, so that no web page can reach it by a name of
            its own that points here (DNS rebinding). None: any.
    """
    kitchen = Kitchen(feed)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        feed.start()
        try:
            yield
        finally:
            kitchen.close()
            await run_in_threadpool(feed.close)

    async def page(request: Request) -> Response:
        return _file(request, "index.html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name == "plotly.min.js":
            return await run_in_threadpool(_plotly, request)
        if name not in _FILES:
            raise HTTPException(404, f"There is no file {name[:50]!r}.")
        return _file(request, name)

    async def studies(request: Request) -> Response:
        entries = [
            {
                "id": entry.id,
                "name": entry.name,
                "created_s": entry.created_s,
                "events": entry.events,
                "goal": entry.spec.get("goal"),
            }
            for entry in reversed(feed.studies())
        ]
        version = feed.jobs_version  # before the names: what comes meanwhile is told of once more
        told = {"studies": entries, "jobs": sorted(feed.jobs()), "jobs_version": version}
        return _json({**told, "problem": feed.problem})

    async def view(request: Request) -> Response:
        study, name = request.path_params["study"], request.path_params["view"]
        options = options_of(request.query_params)
        return _json_bytes(request, await run_in_threadpool(kitchen.view, study, name, options))

    async def job(request: Request) -> Response:
        options = options_of(request.query_params)
        return _json_bytes(request, await run_in_threadpool(kitchen.job, options))

    async def stream(request: Request) -> Response:
        study = request.path_params.get("study")
        if study is not None:
            feed.progress(study)  # says if there is no such study
        return StreamingResponse(
            _stream(feed, study), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", static),
            Route("/api/studies", studies),
            Route("/api/recurring", job),
            Route("/api/stream", stream),
            Route("/api/study/{study:int}/stream", stream),
            Route("/api/study/{study:int}/{view}", view),
        ],
        exception_handlers={
            HTTPException: _on_http,
            InvalidInput: _on_invalid,
            PenstockError: _on_penstock,
            Exception: _on_any,
        },
        lifespan=lifespan,
    )
    return _Guard(app, token, hosts)


async def _stream(feed: Feed, study: int | None) -> AsyncIterator[bytes]:
    """A message whenever the study, the list of studies or a recurring job changed; without a study, the latter two.

    A comment now and then: a dead line shows.
    """
    last: dict[str, Any] | None = None
    silent_s = 0.0
    version = -1
    while not feed.closing:
        now = feed.version
        if now == version:
            await asyncio.sleep(0.1)
            silent_s += 0.1
            if silent_s >= _BEAT_S:
                silent_s = 0.0
                yield b": still here\n\n"
            continue
        version = now
        told: dict[str, Any] = {
            "studies": len(feed.studies()),
            "jobs": feed.jobs_version,
            "problem": feed.problem,
        }
        if study is not None:
            told["read"], told["events"] = feed.progress(study)
            told["status"], told["last_s"] = feed.status(study)
        if told != last:
            last = told
            yield b"event: change\ndata: " + encoded(told) + b"\n\n"
            silent_s = 0.0
            await asyncio.sleep(_LEAST_S)


class _Guard:
    """Around everything: the host's name, the token, the methods, and headers on every answer."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: tuple[str, ...] | None) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in known]
                if b"cache-control" not in known:
                    extra.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self._hosts is not None and host_of(request.headers.get("host", "")) not in self._hosts:
            return error(400, "This dashboard is not called by that name. Open it by the address it printed.")
        if request.method not in ("GET", "HEAD"):
            return error(405, f"The dashboard only shows: {request.method[:20]} is not allowed.")
        if self._token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            # The token leaves the address at once, for addresses end up in histories and screenshots.
            # One slash alone: "//name" would be another host.
            answer = RedirectResponse(quote("/" + request.scope["path"].lstrip("/\\")), 303)
            answer.set_cookie(cookie_of(request), self._token, httponly=True, samesite="strict", path="/")
            return answer
        bearer = request.headers.get("authorization", "")
        if bearer.lower().startswith("bearer ") and _same(bearer[7:].strip(), self._token):
            return None
        cookie = request.cookies.get(cookie_of(request))
        if cookie is not None and _same(cookie, self._token):
            return None
        return error(
            401, "This dashboard asks for a token: open the address with ?token=... that it printed."
        )


def loopback(host: str) -> bool:
    """Whether only this machine can reach a server that binds to ``host``."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def error(status: int, reason: str) -> Response:
    """An error as JSON with its reason."""
    return Response(
        encoded({"error": {"status": status, "reason": reason}}), status, media_type="application/json"
    )


async def _on_http(request: Request, cause: Exception) -> Response:
    status = getattr(cause, "status_code", 500)
    detail = getattr(cause, "detail", "")
    if status == 404 and detail in ("", "Not Found"):
        detail = f"There is nothing at {request.url.path[:200]}."
    return error(status, detail)


async def _on_invalid(request: Request, cause: Exception) -> Response:
    return error(404 if str(cause).startswith("There is no") else 400, str(cause))


async def _on_penstock(request: Request, cause: Exception) -> Response:
    return error(503, str(cause))


async def _on_any(request: Request, cause: Exception) -> Response:
    return error(500, f"The dashboard failed to make this view: {type(cause).__name__}. Its log says where.")


def _json(data: Any) -> Response:
    return Response(encoded(data), media_type="application/json")


def _json_bytes(request: Request, data: bytes) -> Response:
    if len(data) > 20_000 and "gzip" in request.headers.get("accept-encoding", ""):
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
        return Response(gzip.compress(data, 1), media_type="application/json", headers=headers)
    return Response(data, media_type="application/json")


@lru_cache(maxsize=8)
def _content(name: str) -> bytes:
    return (resources.files("penstock.report.dashboard") / "static" / name).read_bytes()


def _file(request: Request, name: str) -> Response:
    return Response(
        _content(name), media_type=_TYPES[Path(name).suffix], headers={"cache-control": "no-cache"}
    )


@lru_cache(maxsize=1)
def _plotly_script() -> tuple[bytes, bytes, str]:
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise MissingDependency('The dashboard needs Plotly: pip install "penstock[dashboard]".')
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    script = path.read_bytes()
    return script, gzip.compress(script, 5), f'"{len(script):x}-{int(path.stat().st_mtime):x}"'


def _plotly(request: Request) -> Response:
    plain, packed, tag = _plotly_script()
    headers = {"cache-control": "private, max-age=86400", "etag": tag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    # To this machine the plain file is quicker than its unpacking.
    near = loopback(request.client.host) if request.client is not None else False
    if not near and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type="text/javascript", headers=headers | {"content-encoding": "gzip"})
    return Response(plain, media_type="text/javascript", headers=headers)


def host_of(header: str) -> str | None:
    """The name of a Host header in small letters, without its port and a closing dot; None if it is none."""
    found = _HOST.fullmatch(header)
    return None if found is None else (found["six"] or found["name"]).lower().rstrip(".")


def cookie_of(request: Request) -> str:
    """The cookie's name: it carries the port, for cookies don't tell the dashboards of one machine apart."""
    server = request.scope.get("server")
    return f"{COOKIE}_{server[1]}" if server and server[1] else COOKIE


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
