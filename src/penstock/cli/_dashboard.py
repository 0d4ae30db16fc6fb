"""``penstock dashboard``: a store's studies as a local web page."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def dashboard(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A path or a postgresql:// URL.")],
    host: Annotated[
        str,
        typer.Option("--host", help="Where to listen; anything but this machine's loopback needs the token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8391,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="PENSTOCK_TOKEN",
            help="Asked of every request: 16 or more letters, digits, . _ ~ -; made up where needed.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Also open it in a browser.")] = False,
) -> None:
    """Show a store's studies as a live web page, until Ctrl-C. Nothing is written to the store."""
    from penstock.report.dashboard import serve

    def ready(address: str) -> None:
        print(f"Dashboard: {address}", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)

    try:
        serve(store, host=host, port=port, token=token, ready=ready)
    except KeyboardInterrupt:
        sys.exit(130)
