"""The ``penstock`` command."""

from __future__ import annotations


def main() -> None:
    """Run the ``penstock`` command."""
    from penstock.cli._app import main as run

    run()


__all__ = ["main"]
