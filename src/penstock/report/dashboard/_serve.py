"""Serving the dashboard: where it binds, the token it asks for, and the address to open."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidInput, MissingDependency

HOST = "127.0.0.1"
PORT = 8391
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")


def serve(
    store: str | Path,
    *,
    host: str = HOST,
    port: int = PORT,
    token: str | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the dashboard of a store until Ctrl-C.

    Args:
        store: A path or URL. Nothing is written to it.
        host: Where to bind. On anything but this machine's loopback, every request needs the token.
        port: 0: any free one.
        token: At least 16 letters, digits and ``. _ ~ -``; made up where the host needs one and none is given.
        ready: Called with the address to open, once it answers.

    Raises:
        InvalidInput: A port or token that can't be, or the port is taken.
        MissingDependency: Starlette, uvicorn or Plotly are not installed.
        StoreError: There is no store.
    """
    try:
        import plotly  # noqa: F401
        import uvicorn

        from penstock.report.dashboard._app import loopback, make_app
    except ImportError as error:
        raise MissingDependency(
            f'The dashboard needs {error.name}: pip install "penstock[dashboard]".'
        ) from error
    from penstock.report._feed import Feed
    from penstock.store import open_store

    if not 0 <= port <= 65535:
        raise InvalidInput(f"port must be between 0 and 65535, got {port}.")
    if token is not None and len(token) < 16:
        raise InvalidInput(f"A token of {len(token)} characters can be guessed: give at least 16, or none.")
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidInput(
            "A token is part of an address: it takes the letters A to Z and a to z, digits and . _ ~ - alone."
        )
    local = loopback(host)
    if not local and token is None:
        token = secrets.token_urlsafe(24)
    open_store(store, write=False).close()  # say now if there is none
    bound = _bind(host, port)
    with bound:
        number = bound.getsockname()[1]
        hosts = (host.strip("[]").lower().rstrip("."), "localhost", "127.0.0.1", "::1") if local else None
        shown = _reachable(host.strip("[]"))
        shown = f"[{shown}]" if ":" in shown else shown
        address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
        feed = Feed(store, alone=True)
        app = make_app(feed, token=token, hosts=hosts)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", server_header=False, timeout_graceful_shutdown=1
        )
        server = _server(uvicorn, config, lambda: None if ready is None else ready(address), feed.close)
        server.run(sockets=[bound])


def _server(uvicorn: Any, config: Any, ready: Callable[[], None], close: Callable[[], None]) -> Any:
    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                ready()

        async def shutdown(self, sockets: Any = None) -> None:
            await asyncio.to_thread(close)  # first: streams end with the feed, and nothing has to be cut off
            await super().shutdown(sockets=sockets)

    return Server(config)


def _reachable(host: str) -> str:
    """By what a browser reaches a server that binds to ``host``: "all interfaces" is no address to open."""
    remote = {"": "192.0.2.1", "0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}.get(host)  # RFC 5737, RFC 3849
    if remote is None:
        return host
    six = ":" in remote
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, 9))  # nothing is sent: it only says which interface leads outwards
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if six else "127.0.0.1"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform != "win32":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise InvalidInput(
            f"Can't listen on {host} port {port}: {error.strerror or error}. Give another --port, or 0 for any."
        ) from error
    return bound
