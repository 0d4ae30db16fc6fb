"""One background thread per process that reads what must be read now and then."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import final


@final
class Poller:
    """Calls functions at a period each, from one daemon thread that lives while there are any.

    A function that raises is called again when it is due: a device that could not be read for a moment counts on, and
    whoever asks is told why it can't be read. After a fork the child starts anew, with none.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop everything, after a fork."""
        self._lock = threading.Lock()
        self._jobs: dict[int, tuple[float, Callable[[], None], float]] = {}  # id -> period, call, due
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_id = 0

    def add(self, period_s: float, call: Callable[[], None]) -> int:
        """Call ``call`` every ``period_s`` until ``remove``; returns the number to remove it by."""
        with self._lock:
            self._next_id += 1
            number = self._next_id
            self._jobs[number] = (period_s, call, time.monotonic() + period_s)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="penstock-energy", daemon=True)
                self._thread.start()
        self._wake.set()
        return number

    def remove(self, number: int) -> None:
        """Stop calling. Returns without waiting for a call that is under way."""
        with self._lock:
            self._jobs.pop(number, None)
        self._wake.set()

    def _work(self) -> None:
        while True:
            now_s = time.monotonic()
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                due = [(number, job) for number, job in self._jobs.items() if job[2] <= now_s]
                for number, (period_s, call, _) in due:
                    self._jobs[number] = (period_s, call, now_s + period_s)
                next_s = min(job[2] for job in self._jobs.values())
                self._wake.clear()
            for _, (_, call, _) in due:
                with contextlib.suppress(Exception):
                    call()
            if not due:
                self._wake.wait(max(0.0, next_s - now_s))


POLLER = Poller()
os.register_at_fork(after_in_child=POLLER.forget)
