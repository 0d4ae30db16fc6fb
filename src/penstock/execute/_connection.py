"""This process's connection to Ray: loaded when first needed, made once and shared by all who use it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ExecutorError, MissingDependency

_KNOCK_S = 5.0  # for a head node that is just coming up
_KNOCK_AGAIN_S = 0.5

_connecting = threading.Lock()
_guests: weakref.WeakSet[Any] = weakref.WeakSet()
"""Who uses a connection that one of them has made: a process has one, and the last to leave ends it."""


def load() -> Any:
    """Ray, loaded when first needed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependency(f"Ray can't be loaded ({error}): pip install 'penstock[ray]'.") from error
    return ray


def connect(ray: Any, guest: Any, address: str | None, environment: Mapping[str, Any] | None) -> bool:
    """Let ``guest`` use the connection, made if there is none; returns whether it was made now.

    Args:
        ray: The module.
        guest: Who leaves later, unless the connection is the user's own.
        address: Of the cluster; None: as ``RAY_ADDRESS`` says, else this machine.
        environment: Ray's ``runtime_env`` for all it runs.

    Raises:
        ExecutorError: The cluster can't be reached.
    """
    with _connecting:
        made = not ray.is_initialized()
        if made:
            _guests.clear()
            _init(ray, address or os.environ.get("RAY_ADDRESS") or "local", environment)
        elif not _guests:
            return False  # it is the user's own
        _guests.add(guest)
        return made


def leave(ray: Any, guest: Any) -> None:
    """Who is the last ends the connection, unless it is the user's own."""
    with _connecting:
        if guest in _guests:
            _guests.discard(guest)
            if not _guests:
                ray.shutdown()


def _init(ray: Any, address: str, environment: Mapping[str, Any] | None) -> None:
    options: dict[str, Any] = {} if address != "local" else {"include_dashboard": False}
    if environment:
        options["runtime_env"] = environment
    _knock(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        raise ExecutorError(
            f"The Ray cluster at {address!r} can't be reached: {error}. Is it up, and of this version of Ray "
            f"({ray.__version__}) and Python? Ray on this machine alone: Ray(None), without RAY_ADDRESS."
        ) from error


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself goes on trying for minutes, and says nothing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # "auto", "local" or another way to find it, which is Ray's affair
    deadline_s = time.monotonic() + _KNOCK_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() < deadline_s - _KNOCK_AGAIN_S:
                time.sleep(_KNOCK_AGAIN_S)
                continue
            raise ExecutorError(
                f"The Ray cluster at {address!r} can't be reached: {error}. Is it up, and are host and port right "
                '("head:6379", or "ray://head:10001" from outside)? Ray on this machine alone: Ray(None), without '
                "RAY_ADDRESS."
            ) from error
        return
