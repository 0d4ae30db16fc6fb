"""Devices of one machine shared fairly by the studies of several processes (Hydro 5.2).

Every study writes down how many devices it could use and which it holds, in a folder. By max-min fairness each has its
share; nobody is kept from devices that nobody else wants. Who holds too many gives idle ones up at once and the
others as soon as their trials let it, but never the last one. What lies idle for a minute is given back. The system
frees what a dead study held.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import InvalidInput
from penstock.plan import Idle, whole_counts

RELEASE_S = 60.0
"""How long a device may lie idle before it is given back (Hydro 5.2)."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a study has written down."""

    name: str
    weight: float
    wants: int
    holds: tuple[str, ...]


@final
class Pool:
    """A study's place among those that share a machine's devices.

    Args:
        folder: Where the studies meet; made if missing.
        weight: This study's share among them.
        release_s: After how much idleness a device is given back.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, weight: float = 1.0, release_s: float = RELEASE_S
    ) -> None:
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidInput(f"weight must be above 0, got {weight!r}.")
        self.folder, self.weight = Path(folder), float(weight)
        self.mine: set[str] = set()
        self.leaving: set[str] = set()
        self._idle = Idle(release_s)
        self._file = -1
        self._path: Path | None = None
        self._sated = False  # it had devices it did not use

    def join(self) -> None:
        """Be one of those who share."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            first = 1 + max((int(path.stem.split("-")[0]) for path in self._paths()), default=0)
            self._path = self.folder / f"{first}-{os.getpid()}-{next(_numbers)}.study"
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(0)

    def leave(self) -> None:
        """Give everything back."""
        if self._path is None:
            return
        with self._locked():
            self._path.unlink(missing_ok=True)
            os.close(self._file)
        self._path, self._file = None, -1
        self.mine, self.leaving, self._sated = set(), set(), False
        self._idle = Idle(self._idle.after_s)

    def started(self) -> None:
        """The study has started something: it could use more than it has."""
        self._sated = False

    def update(self, devices: Sequence[str], busy: Collection[str], now_s: float) -> bool:
        """Take and give devices; returns whether ``mine`` or ``leaving`` has changed.

        Args:
            devices: All there are.
            busy: Those on which something of this study runs.
            now_s: The time.
        """
        if self._path is None:
            return False
        before = set(self.mine), set(self.leaving)
        for name in self.mine:
            if name in busy:
                self._idle.busy(name)
            else:
                self._idle.idle(name, now_s)
        for name in self._idle.due(now_s):
            if len(self.mine) > 1:
                self.mine.discard(name)
                self._sated = True
        with self._locked():
            wants = len(self.mine) if self._sated else len(devices)
            others = [entry for path in self._paths() if path != self._path and (entry := self._read(path))]
            here = _Entry(self._path.name, self.weight, wants, ())
            entries = sorted([*others, here], key=lambda entry: int(entry.name.split("-")[0]))
            counts = whole_counts([e.wants for e in entries], [e.weight for e in entries], len(devices))
            allowed = max(counts[entries.index(here)], 1 if self.mine else 0)
            taken = {name for entry in others for name in entry.holds}
            for name in [name for name in devices if name not in taken | self.mine][
                : max(0, allowed - len(self.mine))
            ]:
                self.mine.add(name)
                self._idle.idle(name, now_s)
            spare = sorted(self.mine - set(busy), key=devices.index, reverse=True)
            for name in spare[: max(0, len(self.mine) - allowed)]:
                self.mine.discard(name)
                self._idle.busy(name)
            over = max(0, len(self.mine) - allowed)
            self.leaving = set(sorted(self.mine, key=devices.index, reverse=True)[:over])
            self._write(wants)
        return before != (self.mine, self.leaving)

    def _write(self, wants: int) -> None:
        text = json.dumps({"weight": self.weight, "wants": wants, "holds": sorted(self.mine)}).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.study"))

    def _read(self, path: Path) -> _Entry | None:
        """What a study has written; None if it is dead, whose file then goes."""
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                return None
            told = json.loads(os.pread(file, 1 << 20, 0))
            return _Entry(path.name, told["weight"], told["wants"], tuple(told["holds"]))
        finally:
            os.close(file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def usual_folder() -> Path:
    """Where this user's studies on this machine meet."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    return base / f"penstock-{os.getuid()}"
